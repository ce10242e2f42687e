"""One cluster of two raylets, with a session, for all tests that only use it."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import time
from collections.abc import Awaitable, Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import uvloop

import clamor_ray as clamor
from clamor_ray._observe.stats import EngineStats, RegionStats
from tests.support.lab import LocalCluster, local_cluster, require_lab, worker_logs
from tests.support.lab.availability import REQUIRE_VARIABLE
from tests.support.lab.cluster import node_resource
from tests.support.server_rig import descriptors

ANSWER_S = 200.0  # a busy machine starts a worker in a minute
MOST_PAUSE_S = 0.1  # between two looks at what has to come true

TRAPS = ("uffd", "uffd-user", "sigsegv")
_USER_MODE = "CLAMOR_TEST_USER_MODE"
_CAP_SYS_PTRACE = 19
_CLONE_NEWNS = 0x20000
_MS_BIND, _MS_REC, _MS_PRIVATE = 0x1000, 0x4000, 1 << 18
_DEVICE = "/dev/userfaultfd"


def _give_up_full_uffd() -> None:
    """Makes the kernel refuse this thread all but user-mode userfaultfd, also where it is root."""
    if os.geteuid() != 0:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    # In mounts of its own the thread's device is no device. It stays root to the file system: the
    # page server's socket is in a directory that only root enters.
    private = _MS_REC | _MS_PRIVATE
    assert libc.unshare(_CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    assert libc.mount(b"none", b"/", None, private, None) == 0, os.strerror(ctypes.get_errno())
    if os.path.exists(_DEVICE):
        bound = libc.mount(b"/dev/null", _DEVICE.encode(), None, _MS_BIND, None)
        assert bound == 0, os.strerror(ctypes.get_errno())
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    sets = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, sets) == 0
    sets[0] &= ~(1 << _CAP_SYS_PTRACE)
    assert libc.capset(header, sets) == 0


def in_trap(trap: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Calls a function in a worker whose trap is this one; a text that says why it is not."""
    if os.environ.get(_USER_MODE):
        _give_up_full_uffd()
    found = clamor.init().trap
    if found != trap:
        return f"the kernel gives {found} here, not {trap}"
    return [function(*arguments)]


@dataclass(frozen=True)
class ClamorCluster:
    """The cluster and its session. Node 0 is the driver's, node 1 the other one.

    Args:
        lab: the raylets.
        attached: what `clamor.init` returned.
    """

    lab: LocalCluster
    attached: clamor.InitResult

    def remote(
        self,
        function: Callable[..., Any],
        node: int = 1,
        read_set: str | None = None,
        **options: Any,
    ) -> Any:
        """A function as a task of one node, to be started with `.remote(...)`."""
        decorate = clamor.remote if read_set is None else clamor.remote(read_set=read_set)
        task = decorate(function)
        return task.options(num_cpus=0, resources={node_resource(node): 0.001}, **options)

    def run(self, function: Callable[..., Any], *arguments: Any, **how: Any) -> Any:
        """What a function returns as a task of the other node, or of `node`."""
        import ray

        return ray.get(self.remote(function, **how).remote(*arguments), timeout=ANSWER_S)

    def run_in_trap(self, trap: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """What a function returns in a worker of the other node that has this trap.

        References arrive as references. Where the kernel does not give the trap the test is
        skipped, or fails where CLAMOR_REQUIRE_LAB=1: there, every trap must be tested.
        """
        import ray

        env = {"CLAMOR_TRAP": "sigsegv" if trap == "sigsegv" else "uffd"}
        if trap == "uffd-user":
            env[_USER_MODE] = "1"
        task = ray.remote(in_trap).options(
            num_cpus=0, resources={node_resource(1): 0.001}, runtime_env={"env_vars": env}
        )
        got = ray.get(task.remote(trap, function, arguments), timeout=ANSWER_S)
        if isinstance(got, str):
            if os.environ.get(REQUIRE_VARIABLE) == "1":
                pytest.fail(f"{got} ({REQUIRE_VARIABLE}=1)", pytrace=False)
            pytest.skip(got)
        return got[0]

    def engine(self, node: int) -> EngineStats:
        """The counters of a node's page server."""
        node_id = self.lab.node_ids[node]
        (found,) = (entry for entry in clamor.stats().nodes if entry.node_id == node_id)
        assert not found.error
        return found.engine

    def region(self, ref: clamor.GlobalRef[Any], node: int = 1) -> RegionStats:
        """What a node has of a global variable."""
        node_id = self.lab.node_ids[node]
        seen: list[RegionStats] = []

        def is_told() -> bool:  # a busy page server answers too late for one call
            there = clamor.stats().region(ref)
            seen[:] = [there[node_id]] if node_id in there else []
            return bool(seen)

        until(is_told)
        return seen[0]

    def is_gone(self, ref: clamor.GlobalRef[Any]) -> bool:
        """Whether no node has anything of it."""
        return not clamor.stats().region(ref)


def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    """Returns when it is true; fails when it never becomes so."""
    began = time.monotonic()
    while not condition():
        waited_s = time.monotonic() - began
        assert waited_s < seconds, "it never came true"
        # Another process has no way to tell us. What takes long is asked for less often: most
        # questions go to page servers or the registry, and cost them and us a core's time.
        time.sleep(min(MOST_PAUSE_S, 0.02 + waited_s / 20))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # A process has one connection to Ray: those who make a cluster of their own go first.
    items.sort(key=lambda item: "clamor_cluster" in getattr(item, "fixturenames", ()))


def pytest_collection_finish() -> None:
    """What is imported by now stays: a sixth of what tests computed was Python looking for
    garbage in it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a failure, what workers said meanwhile: no cluster of ours runs Ray's log monitor."""
    report = yield
    if report.failed:
        said = worker_logs.since(call.start)
        report.sections += [(f"Captured {name}", text) for name, text in said.items()]
    return report


@pytest.fixture(scope="session", params=TRAPS)
def trap(request: pytest.FixtureRequest) -> str:
    """Every trap. Of session scope so that pytest runs the tests of one trap together: their
    workers are then the same."""
    return str(request.param)


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    """Two raylets without a session, for the tests of one module."""
    require_lab("local")
    with local_cluster(2) as lab:
        yield lab


@pytest.fixture(scope="session")
def clamor_cluster() -> Iterator[ClamorCluster]:
    require_lab("local")
    with local_cluster(2) as lab:
        attached = clamor.init()
        yield ClamorCluster(lab, attached)
        clamor.shutdown(force=True)


@pytest.fixture(params=["uvloop", "asyncio"])
def run_core(request: pytest.FixtureRequest):
    """Runs a coroutine on a fresh loop of each kind, and looks for leaked descriptors."""
    new = uvloop.new_event_loop if request.param == "uvloop" else asyncio.new_event_loop

    def runner(work: Callable[[], Awaitable[None]], seconds: float = 60.0) -> None:
        new().close()  # a first loop of a process opens descriptors that it keeps
        before = descriptors()
        loop = new()
        try:
            loop.run_until_complete(asyncio.wait_for(work(), seconds))
        finally:
            loop.run_until_complete(loop.shutdown_asyncgens())
            loop.close()
        assert descriptors() == before

    return runner
