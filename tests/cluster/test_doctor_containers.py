"""`clamor doctor` in containers of runc, for each way in which they have userfaultfd or not."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.lab.containers import (
    Container,
    default_seccomp,
    own_seccomp,
    require_containers,
    run,
)

pytestmark = [pytest.mark.lab, pytest.mark.root]

TRACE = ("CAP_SYS_PTRACE",)
USER = 1000


def examined(container: Container) -> tuple[str, dict[str, dict[str, str]]]:
    """The trap, and the findings by their names."""
    done = run(container, ["clamor", "doctor", "--format", "json"])
    assert done.returncode in (0, 1), done.stdout + done.stderr
    said: dict[str, Any] = json.loads(done.stdout)
    found = {each["check"]: each for each in said["findings"]}
    assert (done.returncode == 1) == any(each["level"] == "wrong" for each in found.values())
    return said["trap"], found


@pytest.mark.parametrize(
    ("user", "capabilities", "profile", "device_mode", "mounts_device", "trap", "says"),
    [
        pytest.param(USER, (), "none", None, False, "uffd-user", "CAP_SYS_PTRACE", id="user"),
        pytest.param(0, TRACE, "none", None, False, "uffd", "", id="root that may trace"),
        pytest.param(
            USER, TRACE, "none", None, False, "uffd-user", "CAP_SYS_PTRACE", id="user, may trace"
        ),
        pytest.param(0, TRACE, "default", None, False, "sigsegv", "seccomp profile", id="default"),
        pytest.param(USER, (), "default", 0o666, False, "uffd", "", id="device"),
        pytest.param(
            USER, (), "default", 0o600, False, "sigsegv", "mode 0600.*user 1000", id="device 0600"
        ),
        pytest.param(0, (), "default", None, True, "sigsegv", "device rule", id="mounted device"),
        pytest.param(USER, (), "k8s", None, False, "uffd-user", "device", id="profile of k8s"),
        pytest.param(0, TRACE, "k8s", None, False, "uffd", "", id="profile of k8s, root"),
    ],
)
def test_the_trap_of_each_container(
    user: int,
    capabilities: tuple[str, ...],
    profile: str,
    device_mode: int | None,
    mounts_device: bool,
    trap: str,
    says: str,
) -> None:
    require_containers()
    seccomp = {
        "none": lambda: None,
        "default": lambda: default_seccomp(capabilities),
        "k8s": own_seccomp,
    }[profile]()
    has, found = examined(Container(user, capabilities, seccomp, device_mode, mounts_device))
    assert has == trap
    said = found["trap"]
    assert said["says"].startswith(trap)
    assert re.search(says, said["remedy"])
    assert (said["remedy"] == "") == (trap == "uffd")


def test_a_limit_below_the_budgets() -> None:
    require_containers()
    _, found = examined(Container(limit_bytes=300 << 20))
    assert found["memory"]["level"] == "wrong"
    assert found["memory"]["says"].startswith("300.0 MiB: cache 75.0 MiB, history 256.0 MiB")
    assert "CLAMOR_HISTORY_BYTES" in found["memory"]["remedy"]
