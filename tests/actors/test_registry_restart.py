"""The registry is killed, and everything goes on; the session ends, and nothing of it is left."""

from __future__ import annotations

import ctypes
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._native import client as _native
from clamor_ray._protocol.config import Config
from clamor_ray._protocol.messages import (
    INLINE_BASE,
    CommitRequest,
    RegionFreed,
    ServerConfig,
    ServerInfo,
    Write,
)
from clamor_ray._protocol.names import server_id_of
from clamor_ray._session.session import Session as ProcessSession
from clamor_ray._version import __version__
from tests.conftest import ANSWER_S, until
from tests.support.lab import LocalCluster
from tests.support.session_rig import Session, Sessions, keepers, running_session, watchers

pytestmark = pytest.mark.lab

BLOCKS = BitMap([0]).serialize()


@pytest.fixture(scope="module")
def sessions(lab: LocalCluster) -> Iterator[Sessions]:
    sessions = Sessions(lab)
    yield sessions
    sessions.end()


@pytest.fixture
def session(sessions: Sessions) -> Iterator[Session]:
    """One that other tests may have used: nothing is left of them."""
    with sessions.one() as session:
        yield session


@pytest.fixture
def fresh(lab: LocalCluster) -> Iterator[Session]:
    """One whose registry nobody has killed: it takes layers for staged without asking."""
    with running_session(lab) as session:
        yield session


def directory_of(session: Session) -> Path:
    from clamor_ray.actors.process.journals import journal_directory

    return journal_directory(session.scope)


def kill_registry(session: Session) -> None:
    before = session("ping")
    os.kill(before, signal.SIGKILL)
    assert session("ping") != before


def region_of(session: Session, node: int, n_blocks: int = 10) -> int:
    record = session("create_region", n_blocks * 4096, session.lab.node_ids[node])
    session("seal", record.region)
    return int(record.region)


def write(session: Session, region: int, base: int, node: int = 0, **how: Any) -> Write:
    here = server_id_of(session.lab.node_ids[node])
    return Write(region, base, 1, BLOCKS, 8192, here, **how)


def grow(region: int, base: int) -> Write:
    """A change of the plan only: it has no layer. A registry that was restarted asks for layers."""
    return Write(region, base, 0, b"", 0, 0, plan=b"plan of %d" % base)


def test_regions_servers_and_data_survive(session: Session, lab: LocalCluster) -> None:
    process = ProcessSession(
        session.scope, session.registry, lab.node_ids[0], Config(), owner=False
    )
    other = ProcessSession(session.scope, session.registry, lab.node_ids[1], Config(), owner=False)
    try:
        array = np.arange(1 << 17)
        longer = np.arange(1 << 18)  # no row of one size, which would have a region in advance
        first = process.creator.put(array)
        servers = [session("ensure_server", node_id) for node_id in lab.node_ids[:2]]
        secret = session("secret")
        before = session("lookup", first._region)
        kill_registry(session)
        assert session("secret") == secret
        assert session("lookup", first._region) == before
        assert [session("ensure_server", node_id) for node_id in lab.node_ids[:2]] == servers
        for info in servers:  # the same processes: nothing was lost
            assert session("locate", info.server_id) == info
            os.kill(info.pid, 0)
        second = process.creator.put(longer)
        assert second._region > first._region
        assert second._base_address >= first._base_address + first._length_bytes
        for ref, expected in ((first, array), (second, longer)):
            mapping = other.client.map(
                ref._region, ref.version, ref._base_address, ref._length_bytes
            )
            n_blocks = mapping.length_bytes // 4096
            other.client.prefetch(mapping.id, np.array([[0, n_blocks]], np.uint64))
            ((offset, n_bytes),) = ref._plan.buffers
            image = (ctypes.c_uint8 * mapping.length_bytes).from_address(mapping.address)
            assert bytes(image[offset : offset + n_bytes]) == expected.tobytes()
            other.client.unmap(mapping.id)
        kill_registry(session)
        process.free(first)
        process.free(second)
        until(lambda: sum(session.states().values()) == 0)
        assert session("stats").address_bytes_in_use == 0
        assert session("lookup", first._region) == RegionFreed(first._region)
    finally:
        process.close()
        other.close()


def test_commits_survive(fresh: Session) -> None:
    session = fresh
    one, two = region_of(session, 0), region_of(session, 0)
    inline = INLINE_BASE + 7
    request = CommitRequest(
        77,
        (
            write(session, one, 0, plan=b"plan"),
            write(session, two, 0),
            Write(inline, 0, 0, b"", 0, 0, None, b"payload"),
        ),
    )
    answer = session("commit", request)
    assert answer.versions == {one: 1, two: 1, inline: 1}
    assert session("outcome", 78) == {}
    latest = session("latest", [one, two, inline])
    assert [entry.version for entry in latest] == [1, 1, 1]
    assert (latest[0].plan, latest[2].payload) == (b"plan", b"payload")
    kill_registry(session)
    assert session("latest", [one, two, inline]) == latest
    assert session("commit", request) == answer  # asked again: the same answer
    assert session("outcome", 77) == answer.versions
    assert session("lookup", one).version == 1
    assert BitMap.deserialize(session("changes", one, 0, 1)) == BitMap([0])
    assert session("published", one, 0) == [(1, 77)]
    with pytest.raises(errors.CommitAbortedError):
        session("commit", CommitRequest(78, (write(session, one, 1),)))
    with pytest.raises(errors.CommitConflict) as caught:
        session("commit", CommitRequest(79, (write(session, one, 0),)))
    assert (caught.value.cause.first_block, caught.value.cause.n_blocks) == (0, 1)
    with pytest.raises(errors.CommitAbortedError, match="are gone"):  # it was never staged
        session("commit", CommitRequest(82, (write(session, one, 1),)))
    assert session("commit", CommitRequest(80, (grow(one, 1),))).versions == {one: 2}
    session("free", two)
    with pytest.raises(errors.FreedError):
        session("commit", CommitRequest(81, (write(session, two, 1),)))


def test_killed_while_it_commits_it_loses_no_answer(session: Session) -> None:
    """Every commit is one version of both variables, whatever dies meanwhile."""
    one, two = region_of(session, 0), region_of(session, 0)
    session("latest", [one])
    stop = threading.Event()

    def storm() -> None:
        try:
            for _ in range(3):
                time.sleep(1.0)
                kill_registry(session)
        finally:
            stop.set()  # else the commits below would never end

    killer = threading.Thread(target=storm)
    killer.start()
    version = 0
    try:
        while not stop.is_set() or version <= 100:  # a slow machine makes fewer in that time
            writes = (grow(one, version), grow(two, version))
            answer = session("commit", CommitRequest(1000 + version, writes))
            version += 1
            assert answer.versions == {one: version, two: version}
    finally:
        killer.join()
    expected = [(n + 1, 1000 + n) for n in range(version)]
    assert session("published", one, 0) == session("published", two, 0) == expected
    for region in (one, two):
        session("free", region)


def test_a_request_that_comes_twice_makes_one_region(session: Session, lab: LocalCluster) -> None:
    import ray

    node = lab.node_ids[0]
    first = session("create_region", 1 << 20, node, 4711)
    kill_registry(session)
    assert session("create_region", 1 << 20, node, 4711) == first
    assert session("seal", first.region) == session("seal", first.region)
    array = ray.put(np.arange(1 << 16))
    *shared, _held_by = session("share", [array], node, 4712)
    kill_registry(session)
    assert list(session("share", [array], node, 4712)[:2]) == shared
    assert session.states()["ready"] == 2
    for region in (first.region, shared[0].region):
        session("free", region)


def test_a_shared_object_survives_both(session: Session, lab: LocalCluster) -> None:
    """First the registry's process, then the one that serves the object."""
    import ray

    shared = ray.put(np.arange(1, 1 << 17))  # kept, as the session of who shares it does
    record, _, _held_by = session("share", [shared], lab.node_ids[1])
    kill_registry(session)
    until(lambda: len(session("shared_at", record.homes[0])) == 1)
    info = session("ensure_server", lab.node_ids[1])
    os.kill(info.pid, signal.SIGKILL)
    session.of_server(1, "ping")
    (region,) = session.of_server(1, "region_stats")
    assert (region["region"], region["is_home"]) == (record.region, 1)
    session("free", record.region)
    until(lambda: sum(session.states().values()) == 0)
    assert session("shared_at", record.homes[0]) == []


def test_a_shared_object_survives_both_at_once(session: Session, lab: LocalCluster) -> None:
    """Neither can ask the other: the journal says what is shared. Ray has it: so does its owner."""
    import ray

    shared = ray.put(np.arange(1, 1 << 17))
    record, _, _held_by = session("share", [shared], lab.node_ids[1])
    info = session("ensure_server", lab.node_ids[1])
    os.kill(session("ping"), signal.SIGKILL)
    os.kill(info.pid, signal.SIGKILL)
    session("ping")
    session.of_server(1, "ping")
    (region,) = session.of_server(1, "region_stats")
    assert (region["region"], region["is_home"]) == (record.region, 1)
    assert session("why_lost", record.region) is None
    session("free", record.region)
    until(lambda: sum(session.states().values()) == 0)
    assert session("shared_at", record.homes[0]) == []


def test_a_server_that_restarts_meanwhile_is_found(session: Session, lab: LocalCluster) -> None:
    before = session("ensure_server", lab.node_ids[1])
    os.kill(before.pid, signal.SIGKILL)
    kill_registry(session)

    def found() -> bool:
        answer = session("locate", before.server_id)
        return isinstance(answer, ServerInfo) and answer.pid not in (0, before.pid)

    until(found)
    session.of_server(1, "ping")


def test_freed_regions_that_wait_go_on_waiting(session: Session, lab: LocalCluster) -> None:
    here = session("ensure_server", lab.node_ids[0])
    client = _native.Client(here.socket_name)
    record = session("create_region", 8192, lab.node_ids[0])
    os.close(client.create(record.region, record.base_address, record.length_bytes))
    client.seal(record.region)
    session("seal", record.region)
    mapping = client.map(record.region, 0, record.base_address, record.length_bytes)
    session("free", record.region)
    assert session.states()["freed"] == 1
    kill_registry(session)
    assert session.states()["freed"] == 1
    assert session("lookup", record.region) == RegionFreed(record.region)
    client.unmap(mapping.id)  # the last lease; a client that closes with it keeps the addresses
    until(lambda: sum(session.states().values()) == 0)
    client.close()


def test_nothing_is_left_after_shutdown(lab: LocalCluster) -> None:
    session = Session(lab)
    session("ensure_server", lab.node_ids[0])
    directory = directory_of(session)
    assert directory.exists()
    until(lambda: len(watchers(directory)) == 1)
    kill_registry(session)
    until(lambda: len(watchers(directory)) == 1)
    session("shutdown")
    session("shutdown")
    assert not directory.exists()
    until(lambda: not watchers(directory))
    until(lambda: not keepers(session.scope))
    with pytest.raises(errors.ClosedError):
        session("outcome", 5)


SILENT_SERVER = """
import os, signal, time, ray
import clamor_ray as clamor
ray.init(address="local", num_cpus=1, include_dashboard=False)
scope = clamor.init().scope
node = ray.get_runtime_context().get_node_id()
server = ray.get_actor(f"page-server-{scope}-{node[:16]}", namespace="clamor")
os.kill(ray.get(server.ping.remote()), signal.SIGSTOP)
clamor.shutdown()
time.sleep(3.0)  # what is said on the console comes from another process
print("over", flush=True)
os._exit(0)
"""


def test_the_last_word_is_not_tried_without_end() -> None:
    """Ray says so on the console, of a task that it tries again: here, when it kills the actor."""
    driver = subprocess.run(
        [sys.executable, "-c", SILENT_SERVER],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=ANSWER_S + 60,
        check=True,
    )
    assert "over" in driver.stdout
    assert "PageServer.stop" not in driver.stdout


def test_nothing_is_left_after_the_raylet(lab: LocalCluster) -> None:
    """The registry's node dies by SIGKILL, and all below it."""
    import ray

    from clamor_ray.actors.create_registry import create_registry
    from clamor_ray.actors.process.journals import journal_directory

    index = lab.add_node(num_cpus=1)
    scope = secrets.token_hex(6)
    registry = create_registry(scope, lab.node_ids[index], ServerConfig(scope, __version__))
    ray.get(registry.ensure_server.remote(lab.node_ids[index]), timeout=ANSWER_S)
    directory = journal_directory(scope)
    assert directory.exists()
    until(lambda: len(watchers(directory)) == 1)
    lab.kill_node(index)
    until(lambda: not directory.exists())
    until(lambda: not watchers(directory))
    until(lambda: not keepers(scope))


# A driver that says who is there, and then waits to be killed.
_DRIVER = """
import os, time
import clamor_ray as clamor
import numpy as np
import ray
from clamor_ray._session import process_sessions
from clamor_ray.actors.process.journals import journal_directory

ray.init(log_to_driver=False)
attached = clamor.init()
clamor.put(np.zeros(1 << 16))
session = process_sessions.current()
print("session", attached.scope, session.rpc.ensure_server(session.node_id).pid, flush=True)
time.sleep(600)
"""


def test_a_driver_killed_leaves_no_page_server(lab: LocalCluster) -> None:
    """Page servers are detached, so that they outlive their registry's restarts; no longer."""
    driver = subprocess.Popen(
        [sys.executable, "-c", _DRIVER],
        env={**os.environ, **lab.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert driver.stdout is not None
        # Ray prints there too: of nodes that earlier tests have killed, whatever it is told.
        said = next(line for line in driver.stdout if line.startswith("session "))
        _, scope, pid = said.split()
        os.kill(int(pid), 0)
        assert keepers(scope)
    finally:
        driver.kill()
        driver.communicate()
    until(lambda: not Path(f"/proc/{pid}").exists())
    until(lambda: not keepers(scope))
