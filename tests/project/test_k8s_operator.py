"""What KubeRay's operator, and Kubernetes, make of k8s/: their own types, checks and pods.

The program that asks them takes minutes to compile where it has never been.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.project.test_k8s import CLUSTERS, OTHERS, RAYS
from tests.support.k8s import manifests
from tests.support.k8s.manifests import Object, objects, one, templates

pytestmark = [pytest.mark.soak, pytest.mark.timeout(manifests.BUILD_S + 60)]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    manifests.require_go()
    made = tmp_path_factory.mktemp("k8s") / "k8s"
    manifests.output("go", "build", "-o", str(made), ".", limit_s=manifests.BUILD_S)
    return made


def found_of(program: Path, folder: str) -> Object:
    said = manifests.output(str(program), "a-namespace", said=manifests.text_of(folder))
    found: Object = json.loads(said)
    return found


@pytest.mark.parametrize("folder", [*RAYS, *sorted(OTHERS)])
def test_whoever_reads_it_takes_all_of_it(program: Path, folder: str) -> None:
    found = found_of(program, folder)
    assert found["faults"] == []
    assert sorted(found["kinds"]) == sorted(each["kind"] for each in objects(folder))


def test_what_is_wrong_is_a_fault(program: Path) -> None:
    text = manifests.text_of("base")
    for right, wrong, said in (
        ("version: v2", "version: v1", "idleTimeoutSeconds is set, but autoscaler v2"),
        ("enableInTreeAutoscaling:", "enableAutoscaling:", "unknown field"),
        ("podSelector:", "podsSelector:", "unknown field"),
        ("minAvailable: 1", "minAvailable: [1]", "minAvailable"),
    ):
        assert right in text
        done = manifests.output(str(program), "a-namespace", said=text.replace(right, wrong))
        faults = json.loads(done)["faults"]
        assert any(said in fault for fault in faults), faults


@pytest.mark.parametrize("folder", CLUSTERS)
def test_pods_that_the_operator_makes(program: Path, folder: str) -> None:
    """Namespaces for "restricted" pods take them, and what was asked for is in them."""
    pods = found_of(program, folder)["pods"]
    assert [each["pod"]["metadata"]["labels"]["ray.io/node-type"] for each in pods] == [
        "head",
        "worker",
    ]
    policy = one(folder, "NetworkPolicy")["spec"]["podSelector"]["matchLabels"]
    for each, (group, template) in zip(pods, templates(one(folder, CLUSTERS[folder])), strict=True):
        assert (each["level"], each["why"]) == ("restricted", "")
        made = each["pod"]["spec"]
        labels = each["pod"]["metadata"]["labels"]
        assert policy.items() <= labels.items()
        assert labels["app.kubernetes.io/name"] == "kuberay"  # its Services select by that
        container = made["containers"][0]
        (asked,) = template["containers"]
        assert container["lifecycle"] == asked["lifecycle"]
        assert made["terminationGracePeriodSeconds"] == 120
        started = container["args"][0]
        for name, value in group["rayStartParams"].items():
            assert f"--{name}={value} " in started
        for other in (*made["containers"], *made.get("initContainers", [])):
            limits = other["resources"]["limits"]
            assert other["resources"]["requests"] == limits  # else its pod is not Guaranteed
            assert {"cpu", "memory"} <= set(limits)


def test_a_pod_that_asks_for_more_has_a_lower_level(program: Path) -> None:
    text = manifests.text_of("base")
    for right, wrong, level in (
        ("type: RuntimeDefault", "type: Unconfined", "privileged"),
        ("runAsNonRoot: true", "runAsNonRoot: false", "baseline"),
    ):
        done = manifests.output(str(program), "a-namespace", said=text.replace(right, wrong))
        pods = json.loads(done)["pods"]
        assert {pod["level"] for pod in pods} == {level}, [pod["why"] for pod in pods]
