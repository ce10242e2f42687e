"""What the engine and its clients say: true, and never without the cause."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from clamor_ray import errors
from clamor_ray._native import client as _native
from clamor_ray._version import __version__
from tests.conftest import ClamorCluster
from tests.support import driver_script

TRAP = """
import os, sys
from clamor_ray._native import client as _native
_native.c.module  # loaded while its file can be read
if os.geteuid() == 0:
    os.setgroups([])
    os.setresuid(65534, 65534, 65534)
engine = _native.Engine(sys.argv[1], server_id=1, history_directory="/tmp")
client = _native.Client(sys.argv[1], trap=sys.argv[2], connect_timeout_s=30.0)
print(client.trap, client.trap_reason, sep="\\n")
client.close()
engine.stop()
"""


@pytest.fixture
def other_build() -> Iterator[tuple[str, _native.Engine]]:
    name = f"clamor-test-{secrets.token_hex(6)}"
    engine = _native.Engine(
        name, server_id=1, history_directory="/tmp", library_version="0.0.1-other"
    )
    yield name, engine
    engine.stop()


def log_lines(engine: _native.Engine) -> list[str]:
    """Once there is one."""
    lines: list[str] = []
    deadline = time.monotonic() + 30.0
    while not lines and time.monotonic() < deadline:
        while (event := engine.next_event()) is not None:
            if event.kind == _native.EVENT_LOG:
                lines.append(event.text)
        time.sleep(0.01)
    return lines


def test_why_a_local_connection_was_closed(other_build: tuple[str, _native.Engine]) -> None:
    name, engine = other_build
    with pytest.raises(errors.VersionMismatchError):
        _native.Client(name, trap="sigsegv", connect_timeout_s=30.0)
    (line,) = log_lines(engine)
    assert line.startswith(f"closed a local connection of process {os.getpid()}: ")
    assert f"it is of version {__version__} (wire " in line
    assert "this page server of 0.0.1-other (wire " in line


@pytest.mark.parametrize("wanted", ["auto", "sigsegv"])
def test_why_this_trap(wanted: str) -> None:
    """As a user who may trap little, where that can be had."""
    name = f"clamor-test-{secrets.token_hex(6)}"
    done = subprocess.run(
        [sys.executable, "-c", TRAP, name, wanted],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    trap, reason = done.stdout.splitlines()
    if wanted == "sigsegv":
        assert (trap, reason) == ("sigsegv", "")  # it was asked for: the session says that
    else:
        assert bool(reason) == (trap != "uffd")
        assert trap == "uffd" or "userfaultfd" in reason


INIT = """
import ray
import clamor_ray as clamor

ray.init(log_to_driver=False)
found = clamor.init()
print(found.trap, found.trap_reason, sep=": ")
"""


@pytest.mark.lab
def test_init_says_why_this_trap(clamor_cluster: ClamorCluster) -> None:
    said = driver_script.run(INIT, timeout_s=250, lab=clamor_cluster.lab, CLAMOR_TRAP="sigsegv")
    assert said.splitlines()[-1] == "sigsegv: CLAMOR_TRAP=sigsegv asks for it"
