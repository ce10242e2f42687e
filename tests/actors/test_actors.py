"""The registry and the page servers as Ray actors, on a cluster of two raylets, with the engine.

Reading and writing through a client is tested elsewhere; here servers appear, restart, vanish, and
regions end.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clamor_ray import errors
from clamor_ray._native import client as _native
from clamor_ray._objects.layout import put_together
from clamor_ray._protocol.config import Config
from clamor_ray._protocol.messages import RegionFreed, RegionUnknown, ServerInfo, ServerLost
from clamor_ray._protocol.names import server_id_of
from clamor_ray._session import create
from clamor_ray._session.session import Session as ProcessSession
from clamor_ray._version import __version__
from tests.conftest import ANSWER_S, until
from tests.support.lab import LocalCluster
from tests.support.processes import stop
from tests.support.session_rig import Session, Sessions, keepers, running_session

pytestmark = pytest.mark.lab


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
    """One that nobody has used."""
    with running_session(lab) as session:
        yield session


def test_a_server_appears_when_it_is_needed(fresh: Session, lab: LocalCluster) -> None:
    info = fresh("ensure_server", lab.node_ids[1])
    assert info == fresh("ensure_server", lab.node_ids[1])
    assert info == fresh("locate", info.server_id)
    assert info == fresh("locate", info.server_id, info.epoch)  # it is alive: the same again
    assert info.server_id == server_id_of(lab.node_ids[1])
    assert (info.node_id, info.epoch, info.library_version) == (lab.node_ids[1], 1, __version__)
    assert info.pid == lab.page_server_pid(1)
    assert fresh("servers") == (info,)
    (report,) = fresh("stats").servers
    assert report.error == ""
    assert report.engine["regions"] == 0


def test_two_requests_at_once_get_one_server(fresh: Session, lab: LocalCluster) -> None:
    import ray

    infos = ray.get([fresh.registry.ensure_server.remote(lab.node_ids[0]) for _ in range(8)])
    assert len(set(infos)) == 1


def test_a_killed_server_comes_back_with_its_keeper(session: Session, lab: LocalCluster) -> None:
    before = session("ensure_server", lab.node_ids[1])
    (keeper,) = keepers(session.scope, lab.node_ids[1])
    stat = Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()
    assert stat[0] != "Z"
    assert int(stat[3]) != os.getsid(before.pid)  # a session of its own
    os.kill(before.pid, signal.SIGKILL)

    def found() -> Any:
        answer = session("locate", before.server_id, before.epoch)
        return answer if isinstance(answer, ServerInfo) and answer.epoch > before.epoch else None

    until(lambda: found() is not None)
    after = found()
    assert (after.server_id, after.socket_name) == (before.server_id, before.socket_name)
    assert after.pid != before.pid
    assert keepers(session.scope, lab.node_ids[1]) == [keeper]


def test_a_shared_object_is_served_from_where_it_lies(session: Session, lab: LocalCluster) -> None:
    import ray

    array = np.arange(1 << 20, dtype=np.float64)
    reference = ray.put({"large": array, "small": np.arange(8)})
    record, plan, _held_by = session("share", [reference], lab.node_ids[0])
    assert plan.total_bytes > array.nbytes
    assert record.homes == (server_id_of(lab.node_ids[0]),)
    assert session("lookup", record.region) == record
    (region,) = session.of_server(0, "region_stats")
    assert (region["region"], region["is_home"]) == (record.region, 1)
    assert session.of_server(0, "stats").engine["home_bytes"] < array.nbytes // 2
    found = session("histogram", record.region, _native.BLOCKS_PRESENT, 16)
    assert list(found) == [lab.node_ids[0]]
    assert len(found[lab.node_ids[0]]) == 16
    session("free", record.region)
    assert session("lookup", record.region) == RegionFreed(record.region)
    until(lambda: session.states() == {"creating": 0, "ready": 0, "freed": 0, "dropping": 0})
    assert session.of_server(0, "region_stats") == ()


def test_a_share_that_was_given_up_leaves_nothing(session: Session, lab: LocalCluster) -> None:
    """Before the page server has begun with it, while it is at it, and when the answer is lost."""
    import ray

    session("ensure_server", lab.node_ids[0])
    reference = ray.put(np.zeros(1 << 18))
    session("share", [reference], lab.node_ids[0], 1)
    session("give_up_share", 1)
    server = session.of_server(0, "ping")
    stop(server)
    try:
        asked = session.registry.share.remote([reference], lab.node_ids[0], 2)
        session("give_up_share", 2)
    finally:
        os.kill(server, signal.SIGCONT)
    with pytest.raises(ray.exceptions.RayTaskError, match="given up"):
        ray.get(asked, timeout=ANSWER_S)
    begun = session.registry.share.remote([reference], lab.node_ids[0], 3)
    until(lambda: sum(session.states().values()) > 0)
    session("give_up_share", 3)
    with contextlib.suppress(ray.exceptions.RayTaskError):
        ray.get(begun, timeout=ANSWER_S)
    until(lambda: sum(session.states().values()) == 0)
    until(lambda: session.of_server(0, "region_stats") == ())


def test_a_shared_object_survives_its_server(session: Session, lab: LocalCluster) -> None:
    """Its buffers come from the store again, not from holes that would read as zeros."""
    import ray

    array = np.arange(1, (1 << 18) + 1, dtype=np.float64)
    record, plan, _held_by = session("share", [ray.put(array)], lab.node_ids[1])
    os.kill(session.of_server(1, "ping"), signal.SIGKILL)
    session.of_server(1, "ping")
    here = session("ensure_server", lab.node_ids[0])  # another node: nothing of it is cached
    client = _native.Client(here.socket_name)
    try:
        mapping = client.map(
            record.region, record.version, record.base_address, record.length_bytes
        )
        client.prefetch(mapping.id, np.array([[0, record.length_bytes // 4096]], np.uint64))
        image = (ctypes.c_uint8 * mapping.length_bytes).from_address(mapping.address)
        ((offset, n_bytes),) = plan.buffers
        assert bytes(image[offset : offset + n_bytes]) == array.tobytes()
    finally:
        client.close()
    session("free", record.region)
    until(lambda: sum(session.states().values()) == 0)


def test_a_region_ends_without_a_trace(session: Session, lab: LocalCluster) -> None:
    record = session("create_region", 10_000, lab.node_ids[0])
    assert session("lookup", record.region) == RegionUnknown(record.region)
    session("abandon", record.region)  # its server never heard of it
    until(lambda: sum(session.states().values()) == 0)
    again = session("create_region", 10_000, lab.node_ids[0])
    assert again.base_address == record.base_address
    assert again.region != record.region
    session("seal", again.region)
    session("free", again.region)
    until(lambda: sum(session.states().values()) == 0)
    assert session("stats").address_bytes_in_use == 0


def test_a_put_survives_the_restart_of_its_server(
    session: Session, lab: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = ProcessSession(
        session.scope, session.registry, lab.node_ids[0], Config(), owner=False
    )
    array = np.arange(1 << 17)

    def kill(fd: int, offset: int, view: memoryview) -> None:
        monkeypatch.undo()
        os.kill(session.of_server(0, "ping"), signal.SIGKILL)
        session.of_server(0, "ping")

    try:
        assert process.client.trap  # its server runs
        monkeypatch.setattr(create, "copy_in", kill)
        ref = process.creator.put(array)  # filled, died with the server, put again
        until(lambda: session.states() | {"ready": 1} == session.states())
        until(lambda: sum(session.states().values()) == 1)
        lease = process.open(ref, private=True)
        found = put_together(lease.bytes(), ref._plan)
        assert (found == array).all()
        del found
        lease.close()
        process.free(ref)
        until(lambda: sum(session.states().values()) == 0)
    finally:
        process.close()


def test_freed_while_its_server_is_down(session: Session, lab: LocalCluster) -> None:
    import ray

    record, _, _held_by = session("share", [ray.put(np.zeros(1 << 18))], lab.node_ids[0])
    os.kill(session.of_server(0, "ping"), signal.SIGKILL)
    session("free", record.region)
    until(lambda: sum(session.states().values()) == 0)


# Reads one block after another, each when it is told to.
_READER = """
import ctypes, sys
from clamor_ray._native import client as _native

socket, trap, region, address, length = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
client = _native.Client(socket, trap=trap)
mapping = client.map(region, 0, address, length)
for line in sys.stdin:
    at = mapping.address + int(line) * 4096
    print(int.from_bytes(ctypes.string_at(at, 8), "little"), flush=True)
"""


def test_readers_of_a_freed_region_survive_restarts(lab: LocalCluster) -> None:
    """First of their own page server, then of the one that is the region's home."""
    session = Session(lab, reattach_s=10.0)
    home, there = (session("ensure_server", node_id) for node_id in lab.node_ids[:2])
    # Far apart: a block brings neighbours with it.
    blocks = [0, 1000, 2000, 3000]
    image = np.repeat(np.arange(1, 4097, dtype=np.uint64), 512)  # block n is full of n + 1
    record = session("create_region", image.nbytes, lab.node_ids[0])
    maker = _native.Client(home.socket_name)
    fd = maker.create(record.region, record.base_address, record.length_bytes)
    _native.copy_in(fd, 0, memoryview(image).cast("B"))
    os.close(fd)
    maker.seal(record.region)
    session("seal", record.region)
    maker.close()
    where = [str(n) for n in (record.region, record.base_address, record.length_bytes)]
    readers = [
        subprocess.Popen(
            [sys.executable, "-c", _READER, there.socket_name, trap, *where],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for trap in ("uffd", "sigsegv")
    ]

    def all_read(block: int) -> None:
        for reader in readers:
            assert reader.stdin is not None
            assert reader.stdout is not None
            reader.stdin.write(f"{block}\n")
            reader.stdin.flush()
            assert reader.stdout.readline() == f"{block + 1}\n", reader.communicate(timeout=5)

    try:
        all_read(blocks[0])
        session("free", record.region)
        assert session.states()["freed"] == 1
        all_read(blocks[1])
        for index, block in ((1, blocks[2]), (0, blocks[3])):
            os.kill(session.of_server(index, "ping"), signal.SIGKILL)
            session.of_server(index, "ping")
            for known in (*blocks[:2], block):
                all_read(known)
            assert session.states()["freed"] == 1
        late = _native.Client(there.socket_name)
        with pytest.raises(errors.FreedError):
            late.map(record.region, record.version, record.base_address, record.length_bytes)
        late.close()
        for reader in readers:
            assert reader.communicate(timeout=ANSWER_S) == ("", "")
            assert reader.returncode == 0
    finally:
        for reader in readers:
            reader.kill()
            reader.communicate()
    until(lambda: sum(session.states().values()) == 0)
    assert session.of_server(0, "region_stats") == session.of_server(1, "region_stats") == ()
    session("shutdown")


def test_another_build_is_refused_with_both_versions(lab: LocalCluster) -> None:
    session = Session(lab, library_version="0.0.9")
    with pytest.raises(errors.VersionMismatchError, match=f"{__version__}, the driver 0.0.9"):
        session("ensure_server", lab.node_ids[0])
    session("shutdown")


def test_a_node_that_is_not_there(session: Session) -> None:
    with pytest.raises(errors.ServerUnavailableError, match="is not alive"):
        session("ensure_server", "f" * 56)


def test_the_secret_is_in_no_log(session: Session, lab: LocalCluster) -> None:
    import ray

    session("ensure_server", lab.node_ids[0])
    secret = session("secret")
    assert len(secret) == 32
    logs = Path(ray._private.worker.global_worker.node.get_logs_dir_path())
    shown = [secret, secret.hex().encode(), repr(secret)[2:-1].encode()]
    for log in logs.glob("*"):
        if log.is_file():
            text = log.read_bytes()
            assert not any(form in text for form in shown), log


def test_after_shutdown_nothing_starts(lab: LocalCluster) -> None:
    session = Session(lab)
    info = session("ensure_server", lab.node_ids[0])
    session("shutdown")
    until(lambda: not keepers(session.scope))
    until(lambda: not Path(f"/proc/{info.pid}").exists())
    with pytest.raises(errors.ClosedError):
        session("ensure_server", lab.node_ids[0])
    name = f"{info.socket_name}-{info.server_id:x}-keeper"
    with pytest.raises(errors.ClamorError):
        _native.Keeper(name, timeout_s=0.1)


def test_a_lost_node_is_lost(fresh: Session, lab: LocalCluster) -> None:
    """On a node of its own: the module's others are needed by other tests."""
    index = lab.add_node(num_cpus=1)
    there = fresh("ensure_server", lab.node_ids[index])
    here = fresh("ensure_server", lab.node_ids[0])
    record = fresh("create_region", 1, lab.node_ids[0])
    fresh("seal", record.region)
    fresh("lookup", record.region, there.server_id)
    lab.kill_node(index)
    fresh("free", record.region)
    until(lambda: isinstance(fresh("locate", there.server_id, there.epoch), ServerLost))
    # The dead node's lease held the region; now nothing does.
    until(lambda: sum(fresh.states().values()) == 0)
    assert fresh("servers") == (here,)
    assert dataclasses.is_dataclass(fresh("locate", there.server_id))
