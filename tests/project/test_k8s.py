"""What k8s/ has is valid, is of one piece, and asks the library for what it has."""

from __future__ import annotations

import importlib
import json
import re
import shlex
import shutil
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click
import jsonschema
import kubernetes_validate
import pytest
import yaml

from clamor_ray import __version__
from clamor_ray._protocol.config import Config
from clamor_ray._protocol.messages import DrainResult
from clamor_ray._session.named_sessions import SessionInfo
from clamor_ray.cli import clusters, drain, machine
from clamor_ray.cli.main import COMMANDS
from tests.support.k8s import manifests
from tests.support.k8s.manifests import K8S, Object, objects, one, templates
from tests.support.lab.containers import PROFILE

OVERLAYS = {"base": "RayCluster", "seccomp": "RayCluster", "device": "RayCluster"}
CLUSTERS = {**OVERLAYS, "service": "RayService"}
RAYS = {**CLUSTERS, "job": "RayJob"}
OTHERS = {"monitoring", "nodes/device", "nodes/namespace", "nodes/seccomp"}
PYTHON_STARTS_S = 4  # before a command knows its time
OWN_BYTES = 1 << 30  # of Ray's processes, page server and keeper, as README.md has it
CUSTOM = ("ray.io/", "monitoring.coreos.com/")
UNITS = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def quantity(text: str) -> int:
    """Bytes that Kubernetes calls so."""
    return int(text[:-2]) * UNITS[text[-2:]]


def settings(folder: str) -> dict[str, str]:
    found: dict[str, str] = one(folder, "ConfigMap")["data"]
    return found


def test_no_folder_is_left_out() -> None:
    assert set(manifests.folders()) == {*RAYS, *OTHERS}


@pytest.mark.parametrize("folder", [*RAYS, *sorted(OTHERS)])
def test_kinds_of_kubernetes_have_no_unknown_field(folder: str) -> None:
    for each in objects(folder):
        if not each["apiVersion"].startswith(CUSTOM):
            kubernetes_validate.validate(each, kubernetes_validate.latest_version(), strict=True)


@pytest.mark.parametrize(("folder", "kind"), RAYS.items())
def test_ray_kinds_are_what_their_definitions_say(folder: str, kind: str) -> None:
    manifests.require_go()
    schema = manifests.strict_schema(kind)
    resource = one(folder, kind)
    jsonschema.Draft202012Validator(schema).validate(resource)
    if kind == "RayJob":
        resource["spec"]["unheardOf"] = 1
    else:
        next(templates(resource))[1]["containers"][0]["unheardOf"] = 1
    with pytest.raises(jsonschema.ValidationError, match="unheardOf"):
        jsonschema.Draft202012Validator(schema).validate(resource)


# What the library is asked for.


@pytest.mark.parametrize("folder", CLUSTERS)
def test_each_setting_is_one_of_the_library(folder: str) -> None:
    known = {f"CLAMOR_{field.name.upper()}" for field in fields(Config)}
    assert set(settings(folder)) <= known
    Config.from_env(settings(folder))  # raises ValueError for a value that is none
    (name,) = {each["metadata"]["name"] for each in objects(folder) if each["kind"] == "ConfigMap"}
    for _, pod in templates(one(folder, CLUSTERS[folder])):
        (container,) = pod["containers"]
        assert container["envFrom"] == [{"configMapRef": {"name": name}}]
        assert "env" not in container


def parsed(command: click.Command, arguments: list[str]) -> dict[str, Any]:
    """The parameters; click raises UsageError where an option is not one of the command."""
    return command.make_context("command", list(arguments)).params


def drain_of(pod: Object) -> tuple[float, dict[str, Any]]:
    """What preStop calls: how long it may take, and the parameters of the drain."""
    (container,) = pod["containers"]
    timeout, limit_s, clamor, name, *arguments = container["lifecycle"]["preStop"]["exec"][
        "command"
    ]
    assert (timeout, clamor, name) == ("timeout", "clamor", "drain")
    command = importlib.import_module(COMMANDS[name]).command
    return float(limit_s), parsed(command, arguments)


@pytest.mark.parametrize("folder", CLUSTERS)
def test_a_pod_that_ends_is_drained_and_has_the_time_for_it(folder: str) -> None:
    for _, pod in templates(one(folder, CLUSTERS[folder])):
        limit_s, asked = drain_of(pod)
        assert asked["this_node"]
        assert asked["node"] is None
        # It must have ended before it is given up, and what is given up before all ends.
        longest_s = drain.longest_s(asked["timeout_s"])
        assert longest_s + PYTHON_STARTS_S <= limit_s < pod["terminationGracePeriodSeconds"]


def test_what_the_readme_says_of_a_drain_s_time() -> None:
    """Summed from the code's own bounds."""
    _, pod = next(templates(one("base", "RayCluster")))
    limit_s, asked = drain_of(pod)
    timeout_s = asked["timeout_s"]
    text = " ".join((K8S / "README.md").read_text().split())
    for said in (
        f"`clamor drain --this-node --timeout {timeout_s:g}`",
        f"takes at most {drain.longest_s(timeout_s):g} s",
        f"moves have {timeout_s:g} s, less what reaching the cluster takes beyond "
        f"{drain.REACH_S:g} s",
        f"given up after {limit_s:g} s",
        f"the pod has {pod['terminationGracePeriodSeconds']} s",
        f"within {clusters.ACCEPTS_S:g} s where nobody answers",
        f"within {timeout_s + clusters.STARTS_S:g} s where something takes the connection",
    ):
        assert said in text, said


class Registry:
    """As the client of one, of which is kept what a drain was given."""

    def drain(self, node_id: str, moves_s: float, *, timeout_s: float) -> DrainResult:
        self.given = (moves_s, timeout_s)
        return DrainResult(0, 0, 0.0, True)


@pytest.mark.parametrize(
    ("left_s", "moves_s"), [(105.0, 75.0), (91.0, 75.0), (60.0, 45.0), (10.0, 0.0), (-5.0, 0.0)]
)
def test_a_drain_that_was_late_to_begin_ends_when_it_should(left_s: float, moves_s: float) -> None:
    registry = Registry()
    asked = clusters.OpenSession(SessionInfo("", ""), registry)  # type: ignore[arg-type]
    drain._drained(asked, "", 75.0, time.monotonic() + left_s)
    assert registry.given == pytest.approx((moves_s, max(1.0, left_s - 1.0)), abs=0.5)
    # Who moves until then still has time to say so.
    assert registry.given[0] + drain.REACH_S - 1.5 < max(registry.given[1], drain.REACH_S)


def test_the_job_calls_a_program_with_options_that_it_has() -> None:
    python, option, module, *arguments = shlex.split(one("job", "RayJob")["spec"]["entrypoint"])
    assert (python, option) == ("python", "-m")
    assert parsed(importlib.import_module(module).main, arguments)["check"]


def test_the_job_finds_its_cluster() -> None:
    selector = one("job", "RayJob")["spec"]["clusterSelector"]
    for folder, kind in OVERLAYS.items():
        assert selector == {"ray.io/cluster": one(folder, kind)["metadata"]["name"]}


def test_the_service_has_the_cluster_of_the_recommended_overlay() -> None:
    cluster = one("seccomp", "RayCluster")["spec"]
    service = one("service", "RayService")["spec"]
    assert service["rayClusterConfig"] == cluster
    (application,) = yaml.safe_load(service["serveConfigV2"])["applications"]
    assert application["import_path"] == "clamor_ray.workloads.serving:app"


def test_commands_in_the_readme_have_their_options() -> None:
    text = (K8S / "README.md").read_text()
    called = re.findall(r"-- clamor (.*)$|`clamor ([a-z]+ -[^`]*)`", text, re.MULTILINE)
    called = ["".join(each) for each in called]
    assert len(called) == 4
    for line in called:
        name, *arguments = shlex.split(line, comments=True)
        parsed(importlib.import_module(COMMANDS[name]).command, arguments)


# Memory.


@dataclass(frozen=True)
class Budget:
    """Of one Ray pod, in bytes; README.md has the formula."""

    limit: int
    cache: int
    history: int
    object_store: int
    heaps: int

    @property
    def homes(self) -> int:
        full = int(machine.FULL_SHARE * self.limit)
        return full - self.cache - self.history - self.object_store - self.heaps


def budgets(folder: str, kind: str) -> dict[str, Budget]:
    config = Config.from_env(settings(folder))
    found = {}
    for group, pod in templates(one(folder, kind)):
        started = group["rayStartParams"]
        limit = quantity(pod["containers"][0]["resources"]["limits"]["memory"])
        found[group.get("groupName", "head")] = Budget(
            limit=limit,
            cache=machine.cache_budget(config.cache_bytes, limit, ""),
            history=config.history_bytes,
            object_store=int(started["object-store-memory"]),
            heaps=int(started["memory"]) + OWN_BYTES,
        )
    return found


def gibibytes(n_bytes: int) -> str:
    return f"{n_bytes / (1 << 30):.2f}"


@pytest.mark.parametrize("folder", CLUSTERS)
def test_the_memory_of_each_pod_is_what_the_readme_adds_up(folder: str) -> None:
    lines = (K8S / "README.md").read_text().splitlines()
    for name, budget in budgets(folder, CLUSTERS[folder]).items():
        cells = (
            *(budget.limit, int(machine.FULL_SHARE * budget.limit), budget.cache, budget.history),
            *(budget.object_store, budget.heaps, budget.homes),
        )
        assert budget.homes > 1 << 30
        assert f"| {name} | {' | '.join(gibibytes(each) for each in cells)} |" in lines


@pytest.mark.parametrize("folder", CLUSTERS)
def test_doctor_finds_no_fault_with_the_budgets(folder: str) -> None:
    """By the limits alone: doctor counts Ray's objects as if nobody had said how many."""
    config = Config.from_env(settings(folder))
    for budget in budgets(folder, CLUSTERS[folder]).values():
        found = machine.findings(machine.Machine((1, 1, 1), memory_bytes=budget.limit), config)
        (memory,) = [each for each in found if each.check == "memory"]
        assert memory.level == "ok"


@pytest.mark.parametrize("folder", CLUSTERS)
def test_the_disk_of_each_pod_holds_history_and_cache(folder: str) -> None:
    config = Config.from_env(settings(folder))
    for _, pod in templates(one(folder, CLUSTERS[folder])):
        (volume,) = pod["volumes"]
        (mount,) = pod["containers"][0]["volumeMounts"]
        assert mount == {"name": volume["name"], "mountPath": config.history_dir}
        room = quantity(volume["emptyDir"]["sizeLimit"])
        assert config.history_disk_bytes + config.cache_disk_bytes < room
        assert room < quantity(pod["containers"][0]["resources"]["limits"]["ephemeral-storage"])


@pytest.mark.parametrize("folder", CLUSTERS)
def test_a_volume_s_directories_stay_their_owner_s(folder: str) -> None:
    """A store that others may write to is refused (`_store/directories.py`)."""
    for _, pod in templates(one(folder, CLUSTERS[folder])):
        assert pod["securityContext"]["fsGroup"]
        assert pod["securityContext"]["fsGroupChangePolicy"] == "OnRootMismatch"


@pytest.mark.parametrize("folder", CLUSTERS)
def test_a_machine_has_one_ray_pod_and_keeps_what_it_asked_for(folder: str) -> None:
    for group, pod in templates(one(folder, CLUSTERS[folder])):
        resources = pod["containers"][0]["resources"]
        assert resources["requests"] == resources["limits"]
        (rule,) = pod["affinity"]["podAntiAffinity"][
            "requiredDuringSchedulingIgnoredDuringExecution"
        ]
        assert rule["topologyKey"] == "kubernetes.io/hostname"
        labels = group["template"]["metadata"]["labels"]
        assert rule["labelSelector"]["matchLabels"].items() <= labels.items()


# Who may ask.


@pytest.mark.parametrize("folder", CLUSTERS)
def test_a_cluster_asks_for_a_token(folder: str) -> None:
    resource = one(folder, CLUSTERS[folder])
    cluster = resource["spec"].get("rayClusterConfig", resource["spec"])
    assert cluster["authOptions"] == {"mode": "token"}


@pytest.mark.parametrize("folder", CLUSTERS)
def test_only_the_operator_submits_from_outside(folder: str) -> None:
    """By the dashboard's port, but for Ray pods, which have all ports."""
    asks = [
        rule["from"]
        for rule in one(folder, "NetworkPolicy")["spec"]["ingress"]
        if any(port["port"] == 8265 for port in rule.get("ports", []))
    ]
    (place,) = re.findall(
        r"^helm install .* --namespace (\S+)", (K8S / "README.md").read_text(), re.MULTILINE
    )
    assert asks == [
        [
            {
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": place}},
                "podSelector": {"matchLabels": {"app.kubernetes.io/name": "kuberay-operator"}},
            }
        ]
    ]


def test_the_readme_installs_the_operator_that_is_tested() -> None:
    manifests.require_go()
    version = manifests.operator_version().removeprefix("v")
    assert f"--version {version} " in (K8S / "README.md").read_text()


@pytest.mark.parametrize("folder", ["seccomp", "service"])
def test_the_overlay_of_the_readme_names_another_image(folder: str, tmp_path: Path) -> None:
    text = (K8S / "README.md").read_text()
    (overlay,) = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    copy = tmp_path / "k8s"
    shutil.copytree(K8S, copy)
    (copy / "mine").mkdir()
    (copy / "mine/kustomization.yaml").write_text(overlay.replace("../seccomp", f"../{folder}"))
    built = yaml.load_all(manifests.built(copy / "mine"), yaml.CSafeLoader)
    (resource,) = [each for each in built if each["kind"] == CLUSTERS[folder]]
    images = {pod["containers"][0]["image"] for _, pod in templates(resource)}
    assert images == {f"registry.example/clamor-ray:{__version__}"}


# What goes together.


@pytest.mark.parametrize("folder", CLUSTERS)
def test_policies_select_the_pods(folder: str) -> None:
    """By a label that no Service of KubeRay selects by: those want app.kubernetes.io/name."""
    labels = [
        group["template"]["metadata"]["labels"] | {"ray.io/node-type": kind}
        for kind, (group, _) in zip(
            ("head", "worker"), templates(one(folder, CLUSTERS[folder])), strict=True
        )
    ]
    assert all("app.kubernetes.io/name" not in each for each in labels)
    policy = one(folder, "NetworkPolicy")["spec"]
    monitor = one("monitoring", "PodMonitor")["spec"]
    for selector in (policy["podSelector"], monitor["selector"]):
        assert all(selector["matchLabels"].items() <= each.items() for each in labels)
    everything = [rule for rule in policy["ingress"] if "ports" not in rule]
    assert [rule["from"] for rule in everything] == [[{"podSelector": policy["podSelector"]}]]
    chosen = [
        each["spec"]["selector"]["matchLabels"]
        for each in objects(folder)
        if each["kind"] == "PodDisruptionBudget"
    ]
    matched = [[selector.items() <= each.items() for each in labels] for selector in chosen]
    assert sorted(matched) == [[False, True], [True, False]]


@pytest.mark.parametrize("folder", CLUSTERS)
def test_a_budget_of_disruptions_lets_one_worker_go(folder: str) -> None:
    """minAvailable: without a scale subresource, no pod may go under maxUnavailable."""
    manifests.require_go()
    assert "scale" not in manifests.definition("RayCluster")["subresources"]
    (_, (workers, _)) = templates(one(folder, CLUSTERS[folder]))
    stay = {
        each["spec"]["selector"]["matchLabels"]["ray.io/node-type"]: each["spec"]
        for each in objects(folder)
        if each["kind"] == "PodDisruptionBudget"
    }
    assert all("maxUnavailable" not in spec for spec in stay.values())
    assert stay["head"]["minAvailable"] == 1
    assert stay["head"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"
    assert "replicas" not in workers  # the autoscaler's
    assert stay["worker"]["minAvailable"] == workers["minReplicas"] - 1 > 0


@pytest.mark.parametrize("folder", CLUSTERS)
def test_ports_that_others_ask_are_ports_of_the_head(folder: str) -> None:
    (_, head), (_, worker) = templates(one(folder, CLUSTERS[folder]))
    of_head = {port["name"]: port["containerPort"] for port in head["containers"][0]["ports"]}
    monitored = [
        each["port"] for each in one("monitoring", "PodMonitor")["spec"]["podMetricsEndpoints"]
    ]
    assert monitored == ["metrics", "as-metrics", "dash-metrics"]
    assert {port["name"] for port in worker["containers"][0]["ports"]} == {"metrics"}
    *_, of_prometheus = one(folder, "NetworkPolicy")["spec"]["ingress"]
    assert [port["port"] for port in of_prometheus["ports"]] == [
        of_head[each] for each in monitored
    ]
    asked = [
        port["port"]
        for rule in one(folder, "NetworkPolicy")["spec"]["ingress"]
        for port in rule.get("ports", [])
    ]
    assert set(asked) <= set(of_head.values())


def test_overlays_name_what_the_nodes_are_given() -> None:
    daemon = one("nodes/seccomp", "DaemonSet")["spec"]["template"]["spec"]
    (profile_name,) = one("nodes/seccomp", "ConfigMap")["data"]
    (host,) = [each["hostPath"]["path"] for each in daemon["volumes"] if "hostPath" in each]
    assert profile_name in str(daemon["initContainers"][0]["command"])
    for folder in ("seccomp", "service"):
        for _, pod in templates(one(folder, CLUSTERS[folder])):
            chosen = pod["securityContext"]["seccompProfile"]
            assert chosen["type"] == "Localhost"
            where = Path("/var/lib/kubelet/seccomp", chosen["localhostProfile"])
            assert where == Path(host, profile_name)
    (plugin,) = one("nodes/device", "DaemonSet")["spec"]["template"]["spec"]["containers"]
    offered = f"squat.ai/{yaml.safe_load(plugin['args'][1])['name']}"
    for _, pod in templates(one("device", "RayCluster")):
        assert pod["containers"][0]["resources"]["limits"][offered] == "1"
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}


def test_the_profile_is_the_default_and_userfaultfd() -> None:
    if not PROFILE.exists():
        manifests.missing(f"{PROFILE} is missing (Debian: golang-github-containers-common)")
    profile = json.loads(one("nodes/seccomp", "ConfigMap")["data"]["clamor-ray.json"])

    def allowed(rules: list[Object]) -> set[str]:
        return {
            name
            for rule in rules
            if rule["action"] == "SCMP_ACT_ALLOW" and not (rule.get("includes") or {}).get("caps")
            for name in rule["names"]
        }

    default = json.loads(PROFILE.read_text())
    ours = allowed(profile["syscalls"])
    assert ours - allowed(default["syscalls"]) == {"userfaultfd"}
    assert {"futex", "memfd_create", "socket"} <= ours
    assert not ours & {"bpf", "chroot", "init_module"}  # for capabilities alone
    assert profile["defaultAction"] == "SCMP_ACT_ERRNO"


@pytest.mark.parametrize("folder", CLUSTERS)
def test_pods_run_the_image_that_the_dockerfile_makes(folder: str) -> None:
    dockerfile = (K8S / "Dockerfile").read_text()
    (tag,) = re.findall(r"^ARG RAY_IMAGE=rayproject/ray:(\S+)$", dockerfile, re.MULTILINE)
    resource = one(folder, CLUSTERS[folder])
    cluster = resource["spec"]
    cluster = cluster.get("rayClusterConfig", cluster)
    assert tag.startswith(f"{cluster['rayVersion']}-py")
    (built,) = re.findall(r"^# *docker build .*-t (\S+)", dockerfile, re.MULTILINE)
    assert built == f"clamor-ray:{__version__}"
    assert f"-t {built} ." in (K8S / "README.md").read_text()
    assert {pod["containers"][0]["image"] for _, pod in templates(resource)} == {built}
    for copied in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE):
        for path in copied.split():
            assert (K8S.parent / path).exists(), path
