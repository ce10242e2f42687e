"""In: a folder of k8s/. Out: its objects, as kustomize builds them; what KubeRay's schemas say."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import yaml

from tests.support.lab.availability import missing

ROOT: Final = Path(__file__).resolve().parents[3]
K8S: Final = ROOT / "k8s"
PROGRAM: Final = Path(__file__).parent
OPERATOR: Final = "github.com/ray-project/kuberay/ray-operator"
LONGEST_S: Final = 60.0
DOWNLOAD_S: Final = 240.0
BUILD_S: Final = 1500.0  # of a program that has never been compiled here

Object = dict[str, Any]


def output(*command: str, said: str | None = None, limit_s: float = LONGEST_S) -> str:
    """What a program prints; AssertionError with its complaint where it fails."""
    done = subprocess.run(
        command,
        input=said,
        cwd=PROGRAM,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@functools.cache
def text_of(folder: str) -> str:
    """The manifests of a folder of k8s/, as `kubectl apply -k` would send them."""
    return built(K8S / folder)


def built(path: Path) -> str:
    """The same of a folder anywhere."""
    for command in (("kustomize", "build"), ("kubectl", "kustomize")):
        if shutil.which(command[0]) is not None:
            return output(*command, str(path))
    missing("neither kubectl nor kustomize is installed (.ci/packages)")
    raise AssertionError


def objects(folder: str) -> list[Object]:
    """Its objects; they are the caller's."""
    return list(yaml.load_all(text_of(folder), yaml.CSafeLoader))


def one(folder: str, kind: str) -> Object:
    """The object of this kind, of which there is one."""
    found = [each for each in objects(folder) if each["kind"] == kind]
    assert len(found) == 1, [each["metadata"]["name"] for each in found]
    return found[0]


def folders() -> list[str]:
    """All that can be applied."""
    return sorted(str(path.parent.relative_to(K8S)) for path in K8S.glob("**/kustomization.yaml"))


def require_go() -> None:
    """Skips the calling test with the reason, or fails it where CLAMOR_REQUIRE_LAB=1."""
    if shutil.which("go") is None:
        missing("go is not installed (Debian: golang-go)")


def operator_version() -> str:
    """Of KubeRay: the one that the checks are built of."""
    required = (PROGRAM / "go.mod").read_text().splitlines()
    return next(line.split()[1] for line in required if line.strip().startswith(OPERATOR))


@functools.cache
def _module() -> Path:
    require_go()
    # Not in this module's folder: an older Go, which can download it, could not read its go.mod.
    said = json.loads(
        subprocess.run(
            ["go", "mod", "download", "-json", f"{OPERATOR}@{operator_version()}"],
            cwd="/",
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_S,
            check=True,
        ).stdout
    )
    return Path(said["Dir"])


@functools.cache
def definition(kind: str) -> Object:
    """KubeRay's definition of a kind of its, in the version that we use."""
    path = _module() / "config" / "crd" / "bases" / f"ray.io_{kind.lower()}s.yaml"
    crd = yaml.load(path.read_text(), yaml.CSafeLoader)
    found: Object = next(each for each in crd["spec"]["versions"] if each["name"] == "v1")
    return found


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _strict(value) for key, value in schema.items()}
    is_open = schema.get("x-kubernetes-preserve-unknown-fields", False)
    if isinstance(schema.get("properties"), dict) and "type" in schema and not is_open:
        made.setdefault("additionalProperties", False)
    return made


@functools.cache
def strict_schema(kind: str) -> Object:
    """The same, where no object has fields that are not named: a server drops those silently."""
    made: Object = _strict(definition(kind)["schema"]["openAPIV3Schema"])
    # Kubernetes' own.
    made["properties"]["metadata"] = _strict(
        {"type": "object", "properties": {"name": {}, "labels": {}, "annotations": {}}}
    )
    return made


def templates(resource: Object) -> Iterator[tuple[Object, Object]]:
    """Of a RayCluster, or the cluster of a RayService: each group, and the pod that it makes."""
    spec = resource["spec"]
    cluster = spec if resource["kind"] == "RayCluster" else spec["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield group, group["template"]["spec"]
