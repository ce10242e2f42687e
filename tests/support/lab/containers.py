"""One process in a container of runc: its seccomp profile, capabilities and devices are given.

The container sees this machine's programs and this project, read only, and nothing of the user's.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.lab.availability import missing

ROOT = Path(__file__).resolve().parents[3]
# Of containers-common, as Podman and CRI-O have it; Docker's is the same but for details.
PROFILE = Path("/usr/share/containers/seccomp.json")
OWN_PROFILE = ROOT / "k8s" / "nodes" / "seccomp" / "clamor-ray.json"
DEVICE = Path("/dev/userfaultfd")
CONTAINER_S = 120.0
PROGRAMS = ("/usr", "/lib", "/lib64", "/bin", "/sbin", "/etc")


def require_containers() -> None:
    """Skips the calling test with the reason, or fails it where CLAMOR_REQUIRE_LAB=1."""
    if os.geteuid() != 0:
        missing("containers of runc need root here")
    if shutil.which("runc") is None:
        missing("runc is not installed (Debian: runc)")
    if not PROFILE.exists():
        missing(f"{PROFILE} is missing (Debian: golang-github-containers-common)")
    if not DEVICE.exists():
        missing(f"this kernel has no {DEVICE}")


@dataclass(frozen=True)
class Container:
    """What a process has in it.

    Args:
        user: its id; its group has the same.
        capabilities: as CAP_SYS_PTRACE.
        seccomp: of OCI; None: no filter.
        device_mode: of /dev/userfaultfd, with a rule that allows it; None: it is not there.
        mounts_device: whether the machine's is mounted there, with no rule.
        limit_bytes: of memory; None: none.
    """

    user: int = 0
    capabilities: tuple[str, ...] = ()
    seccomp: dict[str, Any] | None = None
    device_mode: int | None = None
    mounts_device: bool = False
    limit_bytes: int | None = None


def _applies(rule: dict[str, Any], capabilities: Sequence[str]) -> bool:
    arch = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    includes, excludes = rule.get("includes") or {}, rule.get("excludes") or {}
    return (
        set(includes.get("caps", [])) <= set(capabilities)
        and arch in includes.get("arches", [arch])
        and not set(excludes.get("caps", [])) & set(capabilities)
        and arch not in excludes.get("arches", [])
    )


def own_seccomp() -> dict[str, Any]:
    """The profile that `k8s/` gives to nodes, as it stands there."""
    profile: dict[str, Any] = json.loads(OWN_PROFILE.read_text())
    return profile


def default_seccomp(capabilities: Sequence[str] = ()) -> dict[str, Any]:
    """The default profile as runc takes it: with the rules for these capabilities."""
    profile = json.loads(PROFILE.read_text())
    names = {"x86_64": "SCMP_ARCH_X86_64", "aarch64": "SCMP_ARCH_AARCH64"}
    rules = [
        {
            "names": rule["names"],
            "action": rule["action"],
            **({"errnoRet": rule["errnoRet"]} if "errnoRet" in rule else {}),
            **({"args": rule["args"]} if rule.get("args") else {}),
        }
        for rule in profile["syscalls"]
        if _applies(rule, capabilities)
    ]
    return {
        "defaultAction": profile["defaultAction"],
        **({"defaultErrnoRet": profile["defaultErrnoRet"]} if "defaultErrnoRet" in profile else {}),
        "architectures": [names[platform.machine()]],
        "syscalls": rules,
    }


def _mounts(container: Container) -> list[dict[str, Any]]:
    read_only = ["rbind", "ro"]
    # The interpreter may lie where only root may go to: only it is mounted, not what is above.
    shown = [*PROGRAMS, str(ROOT), sys.base_prefix]
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["mode=755"]},
        {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs", "options": ["mode=1777"]},
        {"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["ro"]},
        {"destination": "/sys/fs/cgroup", "type": "cgroup", "source": "cgroup", "options": ["ro"]},
        *(
            {"destination": one, "type": "bind", "source": one, "options": read_only}
            for one in dict.fromkeys(shown)
            if Path(one).is_dir()
        ),
    ]
    if container.mounts_device:
        device = str(DEVICE)
        mounts.append(
            {"destination": device, "type": "bind", "source": device, "options": ["bind"]}
        )
    return mounts


def _configuration(container: Container, command: Sequence[str], top: Path) -> dict[str, Any]:
    number = DEVICE.stat().st_rdev
    major, minor = os.major(number), os.minor(number)
    devices, rules = [], [{"allow": False, "access": "rwm"}]
    if container.device_mode is not None:
        devices.append(
            {
                "path": str(DEVICE),
                "type": "c",
                "major": major,
                "minor": minor,
                "fileMode": container.device_mode,
                "uid": 0,
                "gid": 0,
            }
        )
        rules.append({"allow": True, "type": "c", "major": major, "minor": minor, "access": "rw"})
    capabilities = list(container.capabilities)
    sets = ("bounding", "effective", "permitted", "inheritable")
    memory = {} if container.limit_bytes is None else {"memory": {"limit": container.limit_bytes}}
    return {
        "ociVersion": "1.0.2",
        "process": {
            "user": {"uid": container.user, "gid": container.user},
            "args": list(command),
            "env": [
                f"PATH={ROOT}/.venv/bin:/usr/bin:/bin",
                "HOME=/tmp",
                "PYTHONDONTWRITEBYTECODE=1",
            ],
            "cwd": "/tmp",
            "capabilities": dict.fromkeys(sets, capabilities),
            "noNewPrivileges": True,
        },
        "root": {"path": str(top), "readonly": False},
        "mounts": _mounts(container),
        "linux": {
            "namespaces": [{"type": kind} for kind in ("pid", "ipc", "mount", "uts", "network")],
            "devices": devices,
            "resources": {"devices": rules, **memory},
            **({} if container.seccomp is None else {"seccomp": container.seccomp}),
        },
    }


def run(container: Container, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command in it, and takes the container away, whatever becomes of it."""
    name = f"clamorlab-{uuid.uuid4().hex[:12]}"
    with tempfile.TemporaryDirectory(prefix="clamorlab") as directory:
        bundle = Path(directory)
        bundle.chmod(0o755)
        top = bundle / "root"
        top.mkdir()
        configuration = _configuration(container, command, top)
        (bundle / "config.json").write_text(json.dumps(configuration))
        state = bundle / "state"
        runc = ["runc", "--root", str(state)]
        try:
            return subprocess.run(
                [*runc, "run", "--bundle", str(bundle), name],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=CONTAINER_S,
                check=False,
            )
        finally:
            subprocess.run(
                [*runc, "delete", "--force", name], capture_output=True, timeout=60, check=False
            )
