"""The lineage on a cluster: what is pinned stays readable, whoever is killed, and no longer."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._protocol.attempt_record import AttemptRecord
from clamor_ray._protocol.config import Config
from clamor_ray._protocol.rpc import pack
from clamor_ray._read.ref import GlobalRef
from clamor_ray._session import process_sessions
from clamor_ray._session.session import Session as ProcessSession
from clamor_ray._write.transaction import update
from clamor_ray.actors.process.journals import journal_directory
from tests.conftest import until
from tests.support.lab import LocalCluster
from tests.support.session_rig import Session, Sessions

pytestmark = pytest.mark.lab

N_BLOCKS = 64
REGION = 9_000_009  # of no variable
HISTORY_BYTES = 4 << 20  # of memory and disk together: some fifteen versions of one variable


@pytest.fixture(scope="module")
def sessions(lab: LocalCluster) -> Iterator[Sessions]:
    """Their homes keep old versions of a few commits only."""
    half = HISTORY_BYTES // 2
    sessions = Sessions(lab, history_bytes=half, history_disk_bytes=half)
    yield sessions
    sessions.end()


@pytest.fixture
def session(sessions: Sessions) -> Iterator[Session]:
    """One that other tests may have used: no region of theirs is left."""
    with sessions.one() as session:
        yield session


@pytest.fixture
def process(
    session: Session, lab: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ProcessSession]:
    """This process as one of the session's."""
    process = ProcessSession(
        session.scope, session.registry, lab.node_ids[0], Config(), owner=False
    )
    monkeypatch.setattr(process_sessions, "_current", process)
    yield process
    process.close()


def change_all(ref: GlobalRef[Any], times: int) -> None:
    for _ in range(times):
        with update(ref) as array:
            array += 1


def kill_registry(session: Session) -> None:
    before = session("ping")
    os.kill(before, signal.SIGKILL)
    assert session("ping") != before


def kill_server(session: Session, index: int) -> None:
    before = session.of_server(index, "ping")
    os.kill(before, signal.SIGKILL)
    until(lambda: session.of_server(index, "ping") != before)


def retained(session: Session, index: int = 0) -> int:
    return int(session.of_server(index, "stats").engine["history_retained_bytes"])


def opened(session: Session, *pins: tuple[int, int]) -> int:
    collection = secrets.randbits(63)
    session("lineage_open", pack(collection, "near", list(pins)))
    return collection


def record(run: int, partition: int = 0, **how: Any) -> AttemptRecord:
    token = bytes([partition]) * 16
    return AttemptRecord(token, run, "0 map", partition, 0, "f", node_id="ab" * 28, **how)


def array_of(process: ProcessSession) -> GlobalRef[Any]:
    return process.creator.put(np.zeros(N_BLOCKS * 512))


def free(session: Session, *refs: GlobalRef[Any]) -> None:
    for ref in refs:
        session("free", ref._region)


def is_expired(ref: GlobalRef[Any], version: int) -> bool:
    try:
        got = ref.at(version).get()
    except errors.SnapshotExpired:
        return True
    assert (np.asarray(got) == version).all()
    return False


def test_what_a_collection_needs_stays_and_no_longer(
    session: Session, process: ProcessSession
) -> None:
    ref, other = array_of(process), array_of(process)
    change_all(ref, 2)
    collection = opened(session, (ref._region, 2))
    change_all(ref, 2)
    change_all(other, 24)  # more than all that is kept, of what nobody needs
    assert not is_expired(ref, 2)
    assert is_expired(other, 1)
    assert retained(session) > 0
    session("lineage_close", [collection])
    session("lineage_close", [collection])
    until(lambda: retained(session) == 0)
    change_all(other, 24)
    assert is_expired(ref, 2)
    until(lambda: session("lineage_counters").collections == 0)
    free(session, ref, other)


def test_an_old_version_outlives_any_killed_process(
    session: Session, process: ProcessSession
) -> None:
    ref, other = array_of(process), array_of(process)
    collection = opened(session, (ref._region, 0))
    change_all(ref, 2)
    kill_registry(session)
    change_all(other, 24)
    assert not is_expired(ref, 0)
    kill_server(session, 0)
    assert retained(session) > 0  # from its first moment on
    change_all(other, 24)
    assert not is_expired(ref, 0)
    kill_registry(session)
    session("lineage_close", [collection])
    until(lambda: retained(session) == 0)
    change_all(other, 24)
    assert is_expired(ref, 1)  # nobody has opened it: it is nowhere but in the history
    free(session, ref, other)


def test_attempts_survive_the_registry(session: Session) -> None:
    collection = opened(session)
    blocks = bytes(BitMap([1, 5]).serialize())
    said = [
        record(collection, n, reads=((REGION, 1, blocks),), outcome="done", rows=n)
        for n in range(20)
    ]
    for one in said:
        session("note_attempt", one.packed())
    assert session("check_output", pack(b"t" * 16, b"first")) is None
    kill_registry(session)
    assert [AttemptRecord.of(p) for p in session("attempts_of", collection)] == said
    assert [AttemptRecord.of(p) for p in session("reads_of", REGION)] == said
    assert session("check_output", pack(b"t" * 16, b"second")) == b"first"
    session("lineage_close", [collection])
    assert len(session("attempts_of", collection)) == 20  # among the ended ones


def test_notes_under_way_when_it_is_killed_are_not_lost(session: Session) -> None:
    """Nobody waits for the answers; Ray sends again what was not answered."""
    import ray

    collection = opened(session)
    pid = session("ping")
    told = [
        session.registry.note_attempt.remote(record(collection, n % 250, start_ns=n).packed())
        for n in range(1000)
    ]
    os.kill(pid, signal.SIGKILL)
    ray.get(told, timeout=60)
    assert len(session("attempts_of", collection)) == 1000
    session("lineage_close", [collection])


def test_nothing_is_left_of_it(lab: LocalCluster) -> None:
    session = Session(lab)
    opened(session)
    directory = journal_directory(session.scope)
    assert (directory / "lineage").exists()
    session("shutdown")
    assert not directory.exists()
    with pytest.raises(errors.ClosedError):
        session("check_output", pack(bytes(16), bytes(16)))
    session("note_attempt", record(1).packed())  # else Ray would print it, or send it again


def test_a_plain_task_with_a_name_is_shown(session: Session, process: ProcessSession) -> None:
    import clamor_ray as clamor

    ref = array_of(process)
    sets = {ref._region: bytes(BitMap([1, 2, 60]).serialize())}
    before = session("stats").replay.noted
    who = ("mod.nearest", process.node_id, {ref._region: 0})
    session("note_reads", pack(b"d" * 16, sets, who))
    session("note_reads", pack(b"e" * 16, sets))  # one that does not say
    (found,) = clamor.read_report(ref).by
    assert (found.function, found.node, found.version) == ("mod.nearest", process.node_id, 0)
    assert list(found.blocks) == [1, 2, 60]
    assert session("stats").replay.noted == before + 2
    free(session, ref)


def test_an_attempt_with_a_name_is_replayed(session: Session, process: ProcessSession) -> None:
    ref = array_of(process)
    blocks = bytes(BitMap([7]).serialize())
    one = record(5, reads=((ref._region, 0, blocks),), predictor_digest=b"n" * 16)
    session("note_attempt", one.packed())
    other = session("ensure_server", session.lab.node_ids[1]).server_id
    packed = session("find_reads", pack(b"n" * 16, True, other, [ref._region]))
    from clamor_ray._protocol.rpc import unpack

    assert unpack(packed)[1] == {ref._region: blocks}
    free(session, ref)
