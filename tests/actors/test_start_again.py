"""Trouble that passes while a page server or the registry starts again: nothing is lost by it.

Ray gives up an actor whose constructor raises; so each of these once ended a node, or the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import re
import resource
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray.actors.page_server.page_server import PageServer, session_directory
from clamor_ray.actors.process import journal_watcher, starting
from clamor_ray.actors.process.journals import journal_directory
from clamor_ray.actors.process.throttle import MOST, WINDOW_S
from clamor_ray.actors.registry.registry import Registry
from tests.conftest import ANSWER_S, until
from tests.support.claims_table import ListTable
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.cluster import node_resource
from tests.support.processes import stop
from tests.support.session_rig import keepers

SLOW_S = 13.0  # more than one call to the registry once had
HELD_S = 8.0  # more than the registry once waited for its predecessor's lock
SHORT_S = 4.0  # of several starts, after the first
STOPPED_S = 12.0  # more than a call to the keeper, or of the registry, may take
N_VARIABLES = 150


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(2) as lab:
        clamor.init()
        yield lab


def on_node_1(function: Callable[..., Any]) -> Any:
    return clamor.remote(function).options(num_cpus=0, resources={node_resource(1): 0.001})


def put_there(n: int, n_bytes: int) -> list[Any]:
    return [clamor.put(np.full(n_bytes, i % 251, np.uint8)) for i in range(n)]


def total_of(array: Any) -> int:
    return int(array.sum(dtype=np.int64))


def until_gone(pid: int) -> None:
    until(lambda: not Path(f"/proc/{pid}").exists())


def registry_pid() -> int:
    from clamor_ray._session import process_sessions

    session = process_sessions.current()
    return int(ray.get(session.registry.ping.remote(), timeout=ANSWER_S))


@pytest.mark.lab
def test_the_registry_is_slow_while_a_page_server_starts(cluster: LocalCluster) -> None:
    (ref,) = ray.get(on_node_1(put_there).remote(1, 1 << 20), timeout=ANSWER_S)
    home, registry = cluster.page_server_pid(1), registry_pid()
    stop(registry)
    try:
        os.kill(home, signal.SIGKILL)
        time.sleep(SLOW_S)  # the trouble itself
    finally:
        os.kill(registry, signal.SIGCONT)
    until(lambda: cluster.page_server_pid(1, ANSWER_S) != home)
    assert ray.get(on_node_1(total_of).remote(ref), timeout=ANSWER_S) == 0
    assert total_of(ref.get()) == 0
    clamor.free(ref)


def limit_workers(cluster: LocalCluster, n_descriptors: int, but: set[int]) -> set[int]:
    """Of node 1, those there are now; which ones."""
    found = set()
    for pid in cluster.processes(1)[1:]:
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{pid}/cmdline").read_bytes()
            if pid not in but and (name.startswith(b"ray::") or b"default_worker.py" in name):
                resource.prlimit(pid, resource.RLIMIT_NOFILE, (n_descriptors, n_descriptors))
                found.add(pid)
    return found


def tries_in_vain(cluster: LocalCluster) -> int:
    """How often the page server of node 1 could not start since it last could, by its file."""
    from clamor_ray._session import process_sessions

    name = f"clamor-{process_sessions.current().scope}-{cluster.node_ids[1][:16]}-tries"
    with contextlib.suppress(FileNotFoundError):
        return (session_directory() / name).stat().st_size
    return 0


@pytest.mark.lab
def test_there_are_no_descriptors_while_a_page_server_starts(cluster: LocalCluster) -> None:
    """Its keeper has more of them than it may open."""
    refs = ray.get(on_node_1(put_there).remote(N_VARIABLES, 8192), timeout=ANSWER_S)
    home = cluster.page_server_pid(1)
    assert len(os.listdir(f"/proc/{home}/fd")) > N_VARIABLES
    limited = limit_workers(cluster, N_VARIABLES, {home})
    os.kill(home, signal.SIGKILL)
    in_vain = 0
    deadline_s = time.monotonic() + ANSWER_S
    while time.monotonic() < deadline_s:  # whoever begins meanwhile has few
        limited |= limit_workers(cluster, N_VARIABLES, {home} | limited)
        if not in_vain and (in_vain := tries_in_vain(cluster)):
            deadline_s = time.monotonic() + SHORT_S
        time.sleep(0.02)
    assert in_vain, "no page server began with few descriptors"
    until(lambda: cluster.page_server_pid(1, ANSWER_S) not in {home} | limited)
    for i, ref in enumerate(refs):
        assert total_of(ref.get()) == 8192 * (i % 251)
    assert ray.get(on_node_1(total_of).remote(refs[1]), timeout=ANSWER_S) == 8192
    for ref in refs:
        clamor.free(ref)


@pytest.mark.lab
def test_the_old_registry_takes_long_to_die(cluster: LocalCluster) -> None:
    """Its lock on the journal's directory is held meanwhile."""
    from clamor_ray._session import process_sessions

    ref = clamor.put(np.full(1 << 20, 3, np.uint8))
    registry = registry_pid()
    fd = os.open(journal_directory(process_sessions.current().scope) / "registry.lock", os.O_RDWR)
    os.kill(registry, signal.SIGKILL)

    def is_held() -> bool:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    deadline_s = time.monotonic() + ANSWER_S
    while not is_held():
        assert time.monotonic() < deadline_s
    time.sleep(HELD_S)  # the trouble itself
    os.close(fd)
    assert registry_pid() != registry
    again = clamor.put(np.full(1 << 20, 4, np.uint8))
    assert total_of(again.get()) == 4 << 20
    assert total_of(ref.get()) == 3 << 20
    clamor.free(ref)
    clamor.free(again)


def is_driven_now(path: str) -> bool:
    fd = os.open(path, os.O_RDWR)
    try:
        return journal_watcher.is_driven(fd)
    finally:
        os.close(fd)


@pytest.mark.lab
def test_the_driver_holds_the_journal(cluster: LocalCluster) -> None:
    """Asked from another process: to open and close such a file here would end the lock."""
    from clamor_ray._session import process_sessions

    path = str(journal_directory(process_sessions.current().scope) / journal_watcher.DRIVER_LOCK)
    is_driven = ray.remote(is_driven_now).options(num_cpus=0, resources={node_resource(0): 0.001})
    assert ray.get(is_driven.remote(path), timeout=ANSWER_S)
    process_sessions.current().hold_journal()  # again: nothing is opened, or closed
    assert ray.get(is_driven.remote(path), timeout=ANSWER_S)


def keeper_of_node_1(cluster: LocalCluster) -> int | None:
    from clamor_ray._session import process_sessions

    return next(iter(keepers(process_sessions.current().scope, cluster.node_ids[1])), None)


@pytest.mark.lab
def test_a_keeper_that_dies_is_started_again_and_given_everything(cluster: LocalCluster) -> None:
    (ref,) = ray.get(on_node_1(put_there).remote(1, 1 << 20), timeout=ANSWER_S)
    (other,) = ray.get(on_node_1(put_there).remote(1, 1 << 20), timeout=ANSWER_S)
    with clamor.update(ref) as array:
        array[::4096] = 1
    for _ in range(2):
        home, keeper = cluster.page_server_pid(1, ANSWER_S), keeper_of_node_1(cluster)
        assert keeper is not None
        os.kill(keeper, signal.SIGKILL)
        until(lambda keeper=keeper: keeper_of_node_1(cluster) not in (None, keeper))
        with clamor.update(ref) as array:  # it is acknowledged by a home that is kept again
            array[::4096] += 1
        os.kill(home, signal.SIGKILL)
        until(lambda home=home: cluster.page_server_pid(1, ANSWER_S) != home)
    assert total_of(ref.get()) == 256 * 3
    assert ray.get(on_node_1(total_of).remote(ref), timeout=ANSWER_S) == 256 * 3
    assert total_of(other.get()) == 0
    clamor.free(ref)
    clamor.free(other)


def zeros_there() -> Any:
    return clamor.zeros(1 << 20, np.uint8)


@pytest.mark.lab
def test_a_page_server_and_its_keeper_die_together(cluster: LocalCluster) -> None:
    """The node joins again as another server; what is elsewhere, or can be made, is rebuilt."""
    mine, read, unread = ray.get(on_node_1(put_there).remote(3, 1 << 20), timeout=ANSWER_S)
    made = ray.get(on_node_1(zeros_there).remote(), timeout=ANSWER_S)
    assert total_of(read.get()) == 1 << 20  # this node has all of it
    for _ in range(2):
        home, keeper = cluster.page_server_pid(1, ANSWER_S), keeper_of_node_1(cluster)
        assert keeper is not None
        stop(home)  # so that it starts no other
        os.kill(keeper, signal.SIGKILL)
        os.kill(home, signal.SIGKILL)
        until(lambda home=home: cluster.page_server_pid(1, ANSWER_S) != home)
        (new,) = ray.get(on_node_1(put_there).remote(1, 1 << 20), timeout=ANSWER_S)
        assert ray.get(on_node_1(add_one).remote([new]), timeout=ANSWER_S) == 1
        with clamor.update(new) as array:
            assert total_of(array) == 256
        clamor.free(new)
    assert ray.get(on_node_1(total_of).remote(read), timeout=ANSWER_S) == 1 << 20
    assert ray.get(on_node_1(total_of).remote(made), timeout=ANSWER_S) == 0
    with pytest.raises(errors.HomeLostError, match=f"ariable {unread._region} is lost"):
        unread.get()
    for ref in (mine, read, unread, made):
        clamor.free(ref)


class Putter:
    """Puts variables of one size in a row, so that the registry gives it regions in advance."""

    def __init__(self) -> None:
        from clamor_ray._build import spares

        spares.KEEP_S = 10 * ANSWER_S  # node and server take their time on a busy machine

    def put(self, n: int) -> list[Any]:
        refs = [clamor.put(np.full(1 << 20, i + 1, np.uint8)) for i in range(n)]
        from clamor_ray._session import process_sessions

        assert process_sessions.current().creator._spares._spare is not None
        return refs


@pytest.mark.lab
def test_a_region_in_advance_is_not_put_at_a_home_that_is_lost(cluster: LocalCluster) -> None:
    """The server that has joined again takes it; but it is not its home, as the registry knows."""
    putter = on_node_1(Putter).remote()
    for ref in ray.get(putter.put.remote(3), timeout=ANSWER_S):
        clamor.free(ref)
    home, keeper = cluster.page_server_pid(1, ANSWER_S), keeper_of_node_1(cluster)
    assert keeper is not None
    stop(home)  # so that it starts no other
    os.kill(keeper, signal.SIGKILL)
    os.kill(home, signal.SIGKILL)
    until(lambda: cluster.page_server_pid(1, ANSWER_S) != home)
    refs = ray.get(putter.put.remote(2), timeout=ANSWER_S)
    assert [total_of(ref.get()) for ref in refs] == [1 << 20, 2 << 20]
    for ref in refs:
        clamor.free(ref)
    ray.kill(putter)


def add_one(ref: Any) -> int:
    ref = ref[0] if isinstance(ref, list) else ref
    with clamor.update(ref) as array:
        array[::4096] += 1
    return int(ref.get()[0])


@pytest.mark.lab
def test_commits_go_on_while_a_keeper_is_stopped(cluster: LocalCluster) -> None:
    (ref,) = ray.get(on_node_1(put_there).remote(1, 1 << 20), timeout=ANSWER_S)
    task = ray.remote(add_one).options(
        num_cpus=0, resources={node_resource(1): 0.001}, max_retries=0
    )

    keeper = keeper_of_node_1(cluster)
    assert keeper is not None
    stop(keeper)
    begun_s = time.monotonic()
    n = 0
    try:
        while time.monotonic() - begun_s < STOPPED_S:
            n += 1
            assert ray.get(task.remote(ref), timeout=ANSWER_S) >= n % 256
            with clamor.update(ref) as array:
                array[::4096] += 0
    finally:
        with contextlib.suppress(ProcessLookupError):  # after 30 s without room it is replaced
            os.kill(keeper, signal.SIGCONT)
    assert ray.get(task.remote(ref), timeout=ANSWER_S) == (n + 1) % 256
    home = cluster.page_server_pid(1, ANSWER_S)
    os.kill(home, signal.SIGKILL)
    until(lambda: cluster.page_server_pid(1, ANSWER_S) != home)
    with clamor.update(ref) as array:  # of the newest version
        assert total_of(array) == 256 * ((n + 1) % 256)
    clamor.free(ref)


KEEPER_DIES_S = (  # after a server that starts again has reached it
    0.0,
    0.02,
    *(pytest.param(after_s, marks=pytest.mark.soak) for after_s in (0.005, 0.01, 0.03, 0.04)),
)


def connections_of(keeper: int) -> int:
    found = 0
    for entry in os.listdir(f"/proc/{keeper}/fd"):
        with contextlib.suppress(OSError):
            found += os.readlink(f"/proc/{keeper}/fd/{entry}").startswith("socket:")
    return found


@pytest.mark.lab
@pytest.mark.parametrize("after_s", KEEPER_DIES_S)
def test_the_keeper_dies_right_after_a_server_reached_it(
    cluster: LocalCluster, after_s: float
) -> None:
    """Whether all was given back by then or not, the node serves; what is lost is named."""
    read, unread = ray.get(on_node_1(put_there).remote(2, 1 << 20), timeout=ANSWER_S)
    assert total_of(read.get()) == 0  # this node has all of it
    home, keeper = cluster.page_server_pid(1, ANSWER_S), keeper_of_node_1(cluster)
    assert keeper is not None
    os.kill(home, signal.SIGKILL)
    until(lambda: connections_of(keeper) == 1)  # it listens, and nobody is connected
    deadline_s = time.monotonic() + ANSWER_S
    while connections_of(keeper) < 2:  # no pause: it is a matter of milliseconds
        assert time.monotonic() < deadline_s
    time.sleep(after_s)  # the trouble itself
    os.kill(keeper, signal.SIGKILL)
    assert ray.get(on_node_1(total_of).remote(read), timeout=ANSWER_S) == 0
    try:
        assert total_of(unread.get()) == 1 << 20
    except errors.HomeLostError as lost:
        named = rf"(?s)ariable {unread._region} is lost.* of \d+ blocks \("
        assert re.search(named, lost.message), lost.message  # noqa: PT017 - either is right
    (new,) = ray.get(on_node_1(put_there).remote(1, 1 << 20), timeout=ANSWER_S)
    assert ray.get(on_node_1(add_one).remote([new]), timeout=ANSWER_S) == 1
    until(lambda: keeper_of_node_1(cluster) not in (None, keeper))
    for ref in (read, unread, new):
        clamor.free(ref)


def keepers_lines() -> list[bytes]:
    from clamor_ray._session import process_sessions

    found = []
    for pid in keepers(process_sessions.current().scope):
        with contextlib.suppress(OSError):
            found.append(Path(f"/proc/{pid}/cmdline").read_bytes())
    return found


@pytest.mark.lab
def test_the_actor_of_a_node_that_lives_is_dead(cluster: LocalCluster) -> None:
    """Ray starts it no more: the registry does, under another id, though its keeper lives."""
    read, unread = ray.get(on_node_1(put_there).remote(2, 1 << 20), timeout=ANSWER_S)
    made = ray.get(on_node_1(zeros_there).remote(), timeout=ANSWER_S)
    assert total_of(read.get()) == 0  # this node has all of it
    home = cluster.page_server_pid(1, ANSWER_S)
    ray.kill(cluster.page_server(1), no_restart=True)
    until_gone(home)
    named = rf"(?s)ariable {unread._region} is lost.* of \d+ blocks \("
    with pytest.raises(errors.HomeLostError, match=named):
        unread.get()
    assert ray.get(on_node_1(total_of).remote(read), timeout=ANSWER_S) == 0
    assert ray.get(on_node_1(total_of).remote(made), timeout=ANSWER_S) == 0
    (new,) = ray.get(on_node_1(put_there).remote(1, 1 << 20), timeout=ANSWER_S)
    assert ray.get(on_node_1(add_one).remote([new]), timeout=ANSWER_S) == 1
    node = cluster.node_ids[1][:16].encode()
    until(lambda: sum(node in line for line in keepers_lines()) == 1)  # the old one leaves
    for ref in (read, unread, made, new):
        clamor.free(ref)


class Ended(BaseException):
    """Instead of the end of this process."""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        raise Ended

    monkeypatch.setattr(os, "_exit", end)
    monkeypatch.setattr(starting.logging, "shutdown", lambda: None)
    return codes


def test_each_pause_is_longer_until_it_succeeds(
    tmp_path: Path, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(starting.time, "sleep", pauses.append)
    tries = tmp_path / "tries"
    for _ in range(len(starting.PAUSES_S) + 2):
        with pytest.raises(Ended):
            starting.end_process_to_try_again("x", tries, OSError(24, "Too many open files"))
    last = starting.PAUSES_S[-1]
    assert pauses == [*starting.PAUSES_S, last, last]
    assert set(exits) == {starting.EXIT_TRY_AGAIN}
    starting.succeeded(tries)
    starting.succeeded(tries)
    with pytest.raises(Ended):
        starting.end_process_to_try_again("x", tries, OSError(24, "Too many open files"))
    assert pauses[-1] == starting.PAUSES_S[0]


def test_where_the_tries_cannot_be_counted_the_pause_is_the_longest(
    tmp_path: Path, exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(starting.time, "sleep", pauses.append)
    with pytest.raises(Ended):
        starting.end_process_to_try_again("x", tmp_path / "no" / "tries", OSError(28, "No space"))
    assert pauses == [starting.PAUSES_S[-1]]


def test_tries_of_minutes_are_a_few_lines(
    tmp_path: Path,
    exits: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each try is a process of its own, so no filter of a logger can count them."""
    now_s, said_s, tracebacks = 1e9, [], []

    def sleep(pause_s: float) -> None:
        nonlocal now_s
        now_s += pause_s

    monkeypatch.setattr(starting.time, "sleep", sleep)
    monkeypatch.setattr(starting.time, "time", lambda: now_s)
    for _ in range(100):
        caplog.clear()
        with pytest.raises(Ended):
            starting.end_process_to_try_again("x", tmp_path / "tries", OSError(24, "No files"))
        for record in caplog.records:
            assert "No files" in record.getMessage()
            said_s.append(now_s)
            tracebacks.append(bool(record.exc_info))
    assert tracebacks[:3] == [True] * 3
    assert not any(tracebacks[3:])
    for n, began_s in enumerate(said_s):
        assert sum(began_s <= at_s < began_s + WINDOW_S for at_s in said_s[n:]) <= MOST
        assert n == 0 or began_s - said_s[n - 1] < WINDOW_S + 2 * starting.PAUSES_S[-1]


@pytest.mark.parametrize("trouble", [OSError(24, "Too many open files"), MemoryError(), KeyError()])
def test_a_registry_that_cannot_take_back_what_it_knew(
    trouble: Exception,
    tmp_path: Path,
    exits: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from clamor_ray._protocol.messages import ServerConfig
    from clamor_ray.actors.process import journals
    from clamor_ray.actors.registry import registry as module

    monkeypatch.setattr(journals, "session_directory", lambda: tmp_path)
    monkeypatch.setattr(module.keeper_process, "raylet_pid", lambda: 1)
    monkeypatch.setattr(module.keeper_process, "hold_and_watch", lambda *_: -1)
    monkeypatch.setattr(module, "RayTable", ListTable)  # there may be no cluster
    monkeypatch.setattr(starting.time, "sleep", lambda _: None)

    def raises(registry: Any, *_: object) -> None:
        registry._journal.close()  # as its process's end would
        registry._lineage._journal.close()
        raise trouble

    async def start() -> Any:
        return module.Registry(ServerConfig("scope", "0.1.0"), bytes(32))

    with monkeypatch.context() as first:
        first.setattr(module.Registry, "_take_back", raises)
        with pytest.raises(type(trouble)):  # there was none before: the driver is told
            asyncio.run(start())
    with monkeypatch.context() as second:
        second.setattr(module.Registry, "_take_back", raises)
        with pytest.raises(Ended):
            asyncio.run(start())
    assert exits == [starting.EXIT_TRY_AGAIN]


def test_what_cannot_pass_is_said() -> None:
    assert issubclass(errors.VersionMismatchError, starting.FINAL)
    assert not issubclass(errors.JournalFullError, starting.FINAL)
    assert not issubclass(errors.DescriptorLimitError, starting.FINAL)


# In the way of a module that our actors import, and Ray does not: it fails while the mark is there.
_SHADOW = """
import os, sys
if os.path.exists({mark!r}):
    raise OSError(24, "Too many open files")
sys.path.remove({directory!r})
del sys.modules["pyroaring"]
import pyroaring
"""


@pytest.mark.lab
def test_its_class_cannot_be_imported_while_a_page_server_starts(
    cluster: LocalCluster, tmp_path: Path
) -> None:
    """Ray takes another class, which raises; what saves the actor is that its own has a
    ``__repr__``."""
    assert all("__repr__" in vars(each) for each in (PageServer, Registry))
    mark = tmp_path / "mark"
    (tmp_path / "pyroaring.py").write_text(_SHADOW.format(mark=str(mark), directory=str(tmp_path)))
    index = cluster.add_node(num_cpus=1, env_vars={"PYTHONPATH": str(tmp_path)})
    there = {"num_cpus": 0, "resources": {node_resource(index): 0.001}}
    put = clamor.remote(put_there).options(**there)
    (ref,) = ray.get(put.remote(1, 1 << 20), timeout=ANSWER_S)
    home = cluster.page_server_pid(index)
    mark.touch()
    os.kill(home, signal.SIGKILL)
    until_gone(home)
    time.sleep(SHORT_S)  # the trouble itself
    mark.unlink()
    until(lambda: cluster.page_server_pid(index, ANSWER_S) != home)
    assert total_of(ref.get()) == 0
    with clamor.update(ref) as array:
        array[::4096] = 1
    assert ray.get(clamor.remote(total_of).options(**there).remote(ref), timeout=ANSWER_S) == 256
    clamor.free(ref)
