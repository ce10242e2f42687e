"""A page server's engine and a registry that start where the kernel gives no more: each for real.

What they say must be what is tried again, never what is final (`actors/process/starting.py`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_ENGINE = """
import os, resource, sys
from clamor_ray._native import client as _native
from clamor_ray import errors
from clamor_ray.actors.process import journals, starting

def start():
    engine = _native.Engine(f"clamor-test-short-{os.getpid()}", server_id=7, keeper=None)
    engine.stop()

def used():
    if sys.argv[1] == "RLIMIT_NOFILE":
        return len(os.listdir("/proc/self/fd")) - 1
    return int(open("/proc/self/statm").read().split()[0]) * 4096

start()  # what is loaded once is there
kind, step = getattr(resource, sys.argv[1]), int(sys.argv[2])
before = resource.getrlimit(kind)
failures, n = set(), 0
while True:
    resource.setrlimit(kind, (used() + n * step, before[1]))
    try:
        start()
    except errors.ClamorError as failure:
        resource.setrlimit(kind, before)
        assert not isinstance(failure, starting.FINAL), repr(failure)
        failures.add(type(failure).__name__)
    else:
        break
    n += 1
resource.setrlimit(kind, before)
start()
print(n, *sorted(failures))
"""

_REGISTRY = """
import asyncio, os, resource, sys
from pathlib import Path
from clamor_ray.actors.registry import registry as module
from clamor_ray.actors.process import journals, starting
from clamor_ray._protocol.messages import ServerConfig
from tests.support.claims_table import ListTable

directory = Path(sys.argv[1])
module.RayTable = ListTable  # there is no cluster
journals.session_directory = lambda: directory
module.keeper_process.raylet_pid = lambda: 1
module.keeper_process.hold_and_watch = lambda *_: -1
starting.PAUSES_S = (0.0,)

async def begin():
    return module.Registry(ServerConfig("scope", "0.1.0"), bytes(32))

def child(n):
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if n is not None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        loop = asyncio.new_event_loop()  # Ray's is there before the actor is
        used = max(int(fd) for fd in os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + n, hard))
    else:
        loop = asyncio.new_event_loop()
    loop.run_until_complete(begin())
    os._exit(0)

assert child(None) == 0
codes = []
while not codes or codes[-1] != 0:
    codes.append(child(len(codes)))
    assert len(codes) < 100
assert child(None) == 0
print(*codes)
"""


def run(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "MALLOC_ARENA_MAX": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("limit", "step", "expected"),
    [("RLIMIT_NOFILE", "1", "DescriptorLimitError"), ("RLIMIT_AS", "32768", "OutOfMemoryError")],
)
def test_an_engine_with_less_and_less(limit: str, step: str, expected: str) -> None:
    n, *failures = run(_ENGINE, limit, step).split()
    assert int(n) >= 3
    assert failures == [expected]


def test_a_registry_with_few_descriptors(tmp_path: Path) -> None:
    """The second time: there is a journal, so it is tried again."""
    codes = run(_REGISTRY, str(tmp_path)).split()
    assert len(codes) >= 3
    assert set(codes[:-1]) == {"75"}
