"""Transactions over a stand-in of the page server, decided by the registry's own commit log."""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._native.client import Mapping
from clamor_ray._objects import memory
from clamor_ray._read.ref import GlobalRef
from clamor_ray._session import process_sessions
from clamor_ray._write import transaction
from tests.support.fake_session import BLOCK_BYTES, Cluster, FakeSession

PER_BLOCK = BLOCK_BYTES // 8
DEADLINE_S = 30.0


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSession]:
    session = FakeSession(Cluster())
    monkeypatch.setattr(process_sessions, "_current", session)
    return session


@pytest.fixture
def ref(session: FakeSession) -> GlobalRef[Any]:
    """Of an array of zeros, 20 blocks."""
    return clamor.put(np.zeros(20 * PER_BLOCK))


@pytest.fixture
def small(session: FakeSession) -> GlobalRef[Any]:
    return clamor.put(np.zeros(10))


# ------------------------------------------------------------------ one variable


def test_update_makes_the_next_version(session: FakeSession, ref: GlobalRef[Any]) -> None:
    with clamor.update(ref) as x:
        x[5] = 1
        x[3 * PER_BLOCK] += 2
        assert ref.version == 0
        assert ref.get()[5] == 0  # nobody sees it yet
    assert ref.version == 1
    assert ref.get()[[5, 3 * PER_BLOCK]].tolist() == [1, 2]
    assert session.cluster.calls[-2:] == ["latest", "commit"]  # and no more than these
    assert not session.cluster.staged


def test_only_dirty_blocks_travel(session: FakeSession, ref: GlobalRef[Any]) -> None:
    tx = clamor.update(ref)
    with tx as x:
        x[3 * PER_BLOCK] = 1
    entry = session.cluster.log._variables[ref._region].entries[0]
    from pyroaring import BitMap

    assert list(BitMap.deserialize(entry.blocks)) == [ref._plan.buffers[0][0] // BLOCK_BYTES + 3]


def test_an_exception_publishes_nothing(session: FakeSession, ref: GlobalRef[Any]) -> None:
    tx = clamor.update(ref)

    def fail() -> None:
        with tx as x:
            x[:] = 9
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert (tx.status, ref.version) == ("aborted", 0)
    assert ref.refresh().get()[0] == 0
    assert "commit" not in session.cluster.calls


def test_nothing_written_is_no_version(session: FakeSession, ref: GlobalRef[Any]) -> None:
    with clamor.update(ref) as x:
        assert x[0] == 0
    assert ref.version == 0
    assert session.cluster.log.newest(ref._region) == 0


@pytest.mark.parametrize("kind", ["ref", "small"])
def test_live_references_begin_at_the_newest_version(
    request: pytest.FixtureRequest, kind: str
) -> None:
    ref = request.getfixturevalue(kind)
    other = pickle.loads(pickle.dumps(ref))
    with clamor.update(ref) as x:
        x[0] = 1
    with clamor.update(other) as y:
        assert y[0] == 1
        y[0] += 1
    assert (ref.version, other.version) == (1, 2)
    assert (ref.get()[0], other.get()[0]) == (1, 2)


@pytest.mark.parametrize("kind", ["ref", "small"])
def test_snapshots_begin_at_their_version(request: pytest.FixtureRequest, kind: str) -> None:
    ref = request.getfixturevalue(kind)
    old = ref.snapshot()
    with clamor.update(ref) as x:
        x[0] = 1
    tx = clamor.update(old)
    x = tx.begin()
    assert x[0] == 0
    x[0] = 5
    with pytest.raises(errors.CommitConflict) as caught:
        tx.commit()
    assert (caught.value.region, caught.value.base_version, caught.value.version) == (
        ref._region,
        0,
        1,
    )
    assert caught.value.transaction is None
    assert tx.status == "aborted"
    assert ref.refresh().get()[0] == 1


def test_a_snapshot_does_not_move(ref: GlobalRef[Any]) -> None:
    old = ref.snapshot()
    tx = clamor.update(old)
    with tx as x:
        x[0] = 5
    assert (old.version, tx.versions, tx.status) == (0, (1,), "committed")
    assert (old.get()[0], ref.at(1).get()[0]) == (0, 5)


def test_other_blocks_do_not_conflict(ref: GlobalRef[Any]) -> None:
    old = ref.snapshot()
    with clamor.update(ref) as x:
        x[0] = 1
    with clamor.update(old) as x:
        x[-1] = 2
    assert ref.refresh().version == 2
    assert ref.get()[[0, -1]].tolist() == [1, 2]


def test_a_conflict_names_the_blocks(session: FakeSession, ref: GlobalRef[Any]) -> None:
    old = ref.snapshot()
    with clamor.update(ref) as x:
        x[2 * PER_BLOCK : 5 * PER_BLOCK] = 1
    with pytest.raises(errors.CommitConflict) as caught, clamor.update(old) as x:
        x[3 * PER_BLOCK : 9 * PER_BLOCK] = 2
    first = ref._plan.buffers[0][0] // BLOCK_BYTES
    assert (caught.value.first_block, caught.value.n_blocks) == (first + 3, 2)
    assert not session.cluster.staged  # nothing is left behind


def test_after_the_block_the_array_is_read_only(ref: GlobalRef[Any]) -> None:
    with clamor.update(ref) as x:
        x[0] = 1
    assert x[0] == 1
    with pytest.raises(ValueError, match="read-only"):
        x[0] = 2


def test_a_rebound_name_is_a_warning(session: FakeSession, ref: GlobalRef[Any]) -> None:
    with pytest.warns(errors.ClamorWarning, match="x \\+= 1") as caught, clamor.update(ref) as x:
        x = x + 1
    assert caught[0].filename == __file__
    assert ref.version == 0


def test_leases_end_with_the_last_array(session: FakeSession, ref: GlobalRef[Any]) -> None:
    with clamor.update(ref) as x:
        x[0] = 1
    assert len(session.fake.mapped) == 1
    del x
    gc.collect()
    assert not session.fake.mapped


def test_a_failed_commit_is_no_nesting(session: FakeSession, ref: GlobalRef[Any]) -> None:
    out_of_memory_once(session, "commit")
    with pytest.raises(errors.OutOfMemoryError) as caught, clamor.update(ref) as x:
        x[0] = 1
    with clamor.update(ref) as x:
        x[1] = 2
    assert ref.get()[:2].tolist() == [0, 2]
    with pytest.raises(errors.CommitConflict):
        caught.value.transaction.commit()


def test_a_region_of_its_own_address_is_asked_for_as_such(
    session: FakeSession, ref: GlobalRef[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = []
    original = session.fake.map

    def watch(*args: Any, **kwargs: Any) -> Mapping:
        flags.append(kwargs["flags"])
        return original(*args, **kwargs)

    monkeypatch.setattr(session.fake, "map", watch)
    with clamor.update(ref) as x:
        x[0] = 1
    assert flags == [1]


@pytest.mark.parametrize(
    "obj",
    [
        np.arange(5000.0),
        np.arange(50.0),
        np.asfortranarray(np.arange(6000.0).reshape(60, 100)),
        np.arange("2001-01", "2501-01", dtype="datetime64[M]"),
        np.ma.MaskedArray(np.arange(5000.0), mask=np.arange(5000) % 2 == 0),
    ],
    ids=["large", "small", "fortran", "datetime", "masked"],
)
def test_what_was_put_read_only_can_be_changed(session: FakeSession, obj: Any) -> None:
    (obj.data if isinstance(obj, np.ma.MaskedArray) else obj).flags.writeable = False
    ref = clamor.put(obj)
    with clamor.update(ref) as x:
        assert x.flags.f_contiguous == obj.flags.f_contiguous
        np.testing.assert_array_equal(x, obj)
        x.T[..., 1] = x.T[..., 5]
    assert ref.version == 1
    assert ref.get().T[..., 1].tolist() == obj.T[..., 5].tolist()
    assert not ref.get().flags.writeable


# ------------------------------------------------------------------ several variables


def test_a_transaction_is_one_commit(
    session: FakeSession, ref: GlobalRef[Any], small: GlobalRef[Any]
) -> None:
    third = clamor.put({"a": np.zeros(1000), "b": np.ones(2000)})
    session.cluster.calls.clear()
    tx = clamor.transaction(ref, small, third)
    with tx as (x, y, z):
        x[0], y[0] = 1, 2
        assert z["b"][0] == 1
    assert session.cluster.calls == ["latest", "commit"]
    assert (ref.version, small.version, third.version) == tx.versions == (1, 1, 0)
    assert (ref.get()[0], small.get()[0]) == (1, 2)


def test_all_of_a_transaction_conflicts_or_nothing(
    session: FakeSession, ref: GlobalRef[Any], small: GlobalRef[Any]
) -> None:
    old = small.snapshot()
    with clamor.update(small) as y:
        y[0] = 1
    with pytest.raises(errors.CommitConflict), clamor.transaction(ref, old) as (x, y):
        x[0], y[0] = 5, 5
    assert ref.refresh().version == 0
    assert not session.cluster.staged


def test_a_transaction_over_nothing() -> None:
    with pytest.raises(ValueError, match="at least one"):
        clamor.transaction()


# ------------------------------------------------------------------ by hand, and failures for now


def test_by_hand(ref: GlobalRef[Any]) -> None:
    tx = clamor.update(ref)
    x = tx.begin()
    x[0] = 3
    assert tx.commit() == (1,)
    tx.abort()  # nothing any more
    assert ref.get()[0] == 3
    for call in (tx.commit, tx.begin):
        with pytest.raises(errors.ClosedError):
            call()


def test_abort_inside_the_block(ref: GlobalRef[Any]) -> None:
    tx = clamor.update(ref)
    with tx as x:
        x[0] = 3
        tx.abort()
    assert (tx.status, ref.refresh().version) == ("aborted", 0)


def out_of_memory_once(session: FakeSession, where: str) -> None:
    def fail(name: str) -> None:
        if name == where:
            session.cluster.fail = lambda name: None
            raise errors.OutOfMemoryError("The home is full.")

    session.cluster.fail = fail


@pytest.mark.parametrize("where", ["commit", "stage"])
def test_a_commit_that_fails_for_now_can_be_tried_again(
    session: FakeSession, ref: GlobalRef[Any], small: GlobalRef[Any], where: str
) -> None:
    out_of_memory_once(session, where)
    block = clamor.transaction(ref, small)
    with pytest.raises(errors.OutOfMemoryError) as caught, block as (x, y):
        x[0], y[0] = 1, 2
    tx = caught.value.transaction
    assert tx.status == "open"
    assert not session.cluster.staged
    assert (ref.version, small.version) == (0, 0)
    assert tx.commit() == (1, 1)
    assert (ref.get()[0], small.get()[0]) == (1, 2)


def test_or_dropped(session: FakeSession, ref: GlobalRef[Any]) -> None:
    out_of_memory_once(session, "commit")
    with pytest.raises(errors.OutOfMemoryError) as caught, clamor.update(ref) as x:
        x[0] = 1
    caught.value.transaction.abort()
    assert ref.refresh().version == 0
    with pytest.raises(errors.ClosedError):
        caught.value.transaction.commit()


def test_an_error_travels_without_its_transaction(
    session: FakeSession, ref: GlobalRef[Any]
) -> None:
    out_of_memory_once(session, "commit")
    with pytest.raises(errors.OutOfMemoryError) as caught, clamor.update(ref) as x:
        x[0] = 1
    again = pickle.loads(pickle.dumps(caught.value))
    assert again.transaction is None
    assert str(again) == str(caught.value)


def test_no_room_is_said_before_anything_is_staged(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    ref = clamor.put(np.zeros(3 << 17))  # 3 MiB: less than the kernel need not be asked for
    with monkeypatch.context() as patch:
        patch.setattr(memory, "available_bytes", lambda: 100)
        expected = pytest.raises(errors.OutOfMemoryError, match=r"100 bytes.*still open")
        with expected as caught, clamor.update(ref) as x:
            x[:] = 1
        assert session.cluster.calls.count("make_room") == 1
        assert "commit" not in session.cluster.calls
    assert caught.value.transaction.commit() == (1,)


def test_a_lost_answer_is_asked_for_again(
    session: FakeSession, ref: GlobalRef[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    session.cluster.answer_lost = ["commit"]
    with clamor.update(ref) as x:
        x[0] = 1
    assert session.cluster.calls.count("commit") == 2
    assert ref.version == 1  # once, not twice
    assert session.cluster.log.newest(ref._region) == 1


def in_doubt(session: FakeSession, ref: GlobalRef[Any], *, made: bool) -> Any:
    """A transaction whose commit was made, or not, and whose answer never came."""
    session.config = type(session.config)(reattach_s=0.01)
    if made:
        session.cluster.answer_lost = ["commit"] * 5
    else:
        session.cluster.fail = fail_with(errors.ServerUnavailableError("Gone."), "commit")
    with pytest.raises(errors.ServerUnavailableError) as caught, clamor.update(ref) as x:
        x[0] = 1
    session.cluster.answer_lost = []
    session.cluster.fail = lambda name: None
    return caught.value.transaction


def fail_with(error: Exception, *names: str) -> Callable[[str], None]:
    def fail(name: str) -> None:
        if name in names:
            raise error

    return fail


@pytest.mark.parametrize("made", [True, False])
def test_what_is_in_doubt_is_settled_first(
    session: FakeSession, ref: GlobalRef[Any], made: bool
) -> None:
    tx = in_doubt(session, ref, made=made)
    assert session.fake.resolved == []  # the layer may be a version's
    assert tx.commit() == (1,)
    assert session.cluster.log.newest(ref._region) == 1
    assert session.cluster.calls.count("outcome") == 1
    assert ref.get()[0] == 1
    assert session.fake.resolved[-1][1:] == (ref._region, 1)


def test_a_commit_that_was_made_cannot_be_aborted(
    session: FakeSession, ref: GlobalRef[Any]
) -> None:
    tx = in_doubt(session, ref, made=True)
    with pytest.warns(errors.ClamorWarning, match="had been made"):
        tx.abort()
    assert (tx.status, ref.version) == ("committed", 1)


def test_one_that_was_not_made_can(session: FakeSession, ref: GlobalRef[Any]) -> None:
    tx = in_doubt(session, ref, made=False)
    tx.abort()
    assert (tx.status, ref.refresh().version) == ("aborted", 0)
    assert session.fake.resolved[-1][2] == 0


def test_in_doubt_without_an_answer(session: FakeSession, ref: GlobalRef[Any]) -> None:
    tx = in_doubt(session, ref, made=True)
    session.cluster.fail = fail_with(errors.ServerUnavailableError("Gone."), "outcome")
    tx.abort()
    assert tx.status == "aborted"
    assert session.fake.resolved == []  # its page server asks in its own time


def test_a_commit_that_was_taken_for_dead_goes_under_another_id(
    session: FakeSession, ref: GlobalRef[Any]
) -> None:
    left = [2]

    def commit(request: Any, original: Any = session.cluster.commit) -> Any:
        if left[0]:
            left[0] -= 1
            session.cluster.outcome(request.commit_id)  # its page server gives it up
        return original(request)

    session.cluster.commit = commit  # type: ignore[method-assign]
    with clamor.update(ref) as x:
        x[0] = 1
    assert ref.version == 1
    left[0] = 3
    with pytest.raises(errors.CommitAbortedError) as caught, clamor.update(ref) as x:
        x[0] = 2
    assert caught.value.transaction.commit() == (2,)


def test_a_large_commit_asks_before_it_copies(
    session: FakeSession, ref: GlobalRef[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transaction, "ASK_FIRST_BYTES", 4 * BLOCK_BYTES)
    old = ref.snapshot()
    with clamor.update(ref) as x:
        x[0] = 1
    assert "may_commit" not in session.cluster.calls
    session.cluster.fail = fail_with(AssertionError("copied in vain"), "stage")
    with pytest.raises(errors.CommitConflict), clamor.update(old) as x:
        x[:] = 1
    assert session.cluster.calls[-1] == "may_commit"


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("obj", [[1, 2], "text", {"a": 1}, 7, (None, 2.5), np.zeros(0)])
def test_objects_without_arrays_are_refused_at_the_beginning(
    session: FakeSession, obj: Any
) -> None:
    with pytest.raises(errors.NotInPlaceError, match=r"cannot be changed in place.*clamor\.put"):
        clamor.update(clamor.put(obj)).begin()


def grow(d: Any) -> None:
    d["list"].append(3)


def replace(d: Any) -> None:
    d["a"] = d["a"] + 1


def exchange(d: Any) -> None:
    d["a"], d["b"] = d["b"], d["a"]


def add(d: Any) -> None:
    d["c"] = np.ones(5000)


def number(d: Any) -> None:
    d["n"] = 8


def lock(d: Any) -> None:
    d["n"] = threading.Lock()


@pytest.mark.parametrize("change", [grow, replace, exchange, add, number, lock])
@pytest.mark.parametrize("length", [5000, 20])
def test_what_changes_out_of_place_is_refused(
    session: FakeSession, change: Callable[[Any], None], length: int
) -> None:
    ref = clamor.put({"a": np.zeros(length), "b": np.zeros(length), "list": [1], "n": 7})
    tx = clamor.update(ref)
    d = tx.begin()
    d["b"][0] = 1
    change(d)
    with pytest.raises(errors.NotInPlaceError, match="out of place"):
        tx.commit()
    assert (tx.status, ref.refresh().version) == ("aborted", 0)
    with clamor.update(ref) as d:
        d["b"][0] = 1
    assert ref.get()["b"][0] == 1


def test_pandas_and_arrow_pass_the_check(session: FakeSession) -> None:
    import pandas as pd
    import scipy.sparse

    frame = clamor.put(pd.DataFrame({"a": np.arange(5000.0), "b": np.arange(5000.0)}))
    with clamor.update(frame) as df:
        df._mgr.blocks[0].values[0, 0] = 99  # as libraries do that write to its blocks
    assert frame.version == 1
    matrix = clamor.put(scipy.sparse.random(500, 500, 0.1, format="csr", random_state=0))
    with clamor.update(matrix) as m:
        m.data *= 2
    assert matrix.version == 1


def test_a_frame_that_replaces_a_column_is_refused(session: FakeSession) -> None:
    import pandas as pd

    frame = clamor.put(pd.DataFrame({"a": np.arange(5000.0), "b": np.arange(5000)}))
    with pytest.raises(errors.NotInPlaceError), clamor.update(frame) as df:
        df["a"] = df["a"] + 1


def test_nested_updates(ref: GlobalRef[Any], small: GlobalRef[Any]) -> None:
    with pytest.raises(errors.NestedUpdateError, match="twice"):
        clamor.transaction(ref, ref.snapshot()).begin()
    with clamor.update(ref) as x:
        for again in (ref, ref.snapshot(), pickle.loads(pickle.dumps(ref)), x):
            with pytest.raises(errors.NestedUpdateError, match="already"):
                clamor.update(again).begin()
        with clamor.update(small) as y:  # another variable is no nesting
            y[0] = 1
        x[0] = 1
    with clamor.update(ref) as x:
        x[0] = 2
    assert ref.version == 2


def test_a_dropped_transaction_is_no_nesting(session: FakeSession, ref: GlobalRef[Any]) -> None:
    tx = clamor.update(ref)
    dropped = weakref.ref(tx)
    tx.begin()
    del tx
    gc.collect()
    assert dropped() is None
    with clamor.update(ref) as x:
        x[0] = 1
    assert ref.version == 1


def test_threads_are_rivals(ref: GlobalRef[Any]) -> None:
    both_open = threading.Barrier(2)
    conflicts = []

    def work(index: int) -> None:
        own = pickle.loads(pickle.dumps(ref))
        try:
            with clamor.update(own) as x:
                both_open.wait(DEADLINE_S)
                x[0] = index + 1
        except errors.CommitConflict as error:
            conflicts.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert len(conflicts) == 1
    assert ref.refresh().version == 1


def test_coroutines_are_rivals_too(ref: GlobalRef[Any], small: GlobalRef[Any]) -> None:
    async def work(block: int) -> None:
        with clamor.update(ref) as x:
            await asyncio.sleep(0)
            x[block * PER_BLOCK] = 1
            with pytest.raises(errors.NestedUpdateError):
                clamor.update(ref).begin()

    async def both() -> None:
        await asyncio.gather(work(1), work(7))

    asyncio.run(both())
    assert ref.refresh().version == 2


@pytest.mark.parametrize("kind", ["ref", "small"])
def test_freed_variables(request: pytest.FixtureRequest, kind: str, session: FakeSession) -> None:
    ref = request.getfixturevalue(kind)
    other = pickle.loads(pickle.dumps(ref))
    tx = clamor.update(ref)
    x = tx.begin()
    x[0] = 1
    session.cluster.free(ref._region)
    with pytest.raises(errors.FreedError):
        tx.commit()
    assert tx.status == "aborted"
    with pytest.raises(errors.FreedError):
        clamor.update(other).begin()
    ref._mark_freed()
    with pytest.raises(errors.FreedError):
        clamor.update(ref).begin()


def test_a_home_that_is_lost_ends_it(session: FakeSession, ref: GlobalRef[Any]) -> None:
    def lost(name: str) -> None:
        if name == "commit":
            raise errors.HomeLostError("its node is dead")

    tx = clamor.update(ref)
    tx.begin()[0] = 1
    session.cluster.fail = lost
    with pytest.raises(errors.HomeLostError):
        tx.commit()
    assert tx.status == "aborted"
    (mapped,) = session.fake.resolved
    assert mapped[2] == 0  # its layer is dropped
    with pytest.raises(errors.ClosedError):
        tx.commit()


def test_a_forked_child_cannot_commit(session: FakeSession, ref: GlobalRef[Any]) -> None:
    tx = clamor.update(ref)
    x = tx.begin()
    x[0] = 1
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            tx.commit()
        except errors.ForkedError:
            code = 0 if not session.fake.resolved else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert tx.commit() == (1,)


# ------------------------------------------------------------------ objects instead of references


@pytest.mark.parametrize("length", [5000, 50])
def test_an_object_of_this_process_stands_for_its_variable(
    session: FakeSession, length: int
) -> None:
    plain, held = clamor.put(np.zeros(length)), clamor.put({"a": np.zeros(length), "b": [1]})
    x, d = plain.get(), held.get()
    with clamor.transaction(x, d) as (y, e):
        y[0], e["a"][0] = 1, 2
    assert (plain.version, held.version) == (0, 0)  # nobody told these
    assert (plain._latest().get()[0], held._latest().get()["a"][0]) == (1, 2)
    assert (x[0], d["a"][0]) == (0, 0)
    with clamor.update(x) as y:  # begins at the newest all the same
        assert y[0] == 1


@pytest.mark.parametrize(
    "obj", [np.zeros(5), [np.zeros(5)], 7, "text", None, {"a": 1}, np.zeros((9, 9))[:, 1]]
)
def test_what_is_no_variable(session: FakeSession, obj: Any) -> None:
    with pytest.raises(TypeError, match="no global variable"):
        clamor.update(obj)


@pytest.mark.parametrize("part", [lambda x: x[:100], lambda x: x[::2], lambda x: [x, x[:5]]])
def test_parts_are_refused(ref: GlobalRef[Any], part: Any) -> None:
    with pytest.raises(ValueError, match="a part of"):
        clamor.update(part(ref.get()))


def test_private_copies_are_refused(ref: GlobalRef[Any], small: GlobalRef[Any]) -> None:
    for either in (ref, small):
        with pytest.raises(ValueError, match="private copy"):
            clamor.update(either.get("c")).begin()


class Counter:
    """A structure over an array, as HashMap is."""

    def __init__(self, ref: GlobalRef[Any], cells: Any = None) -> None:
        self.ref, self.cells = ref, cells

    def __clamor_ref__(self) -> GlobalRef[Any]:
        return self.ref

    def __clamor_open__(self, raw: Any) -> Counter:
        return Counter(self.ref, raw)


def test_structures_open_themselves(ref: GlobalRef[Any]) -> None:
    counter = Counter(ref)
    with clamor.update(counter) as open_counter:
        assert isinstance(open_counter, Counter)
        open_counter.cells[0] = 7
    assert (counter.ref.version, ref.get()[0]) == (1, 7)


# ------------------------------------------------------------------ arrays that grow


def test_growing(session: FakeSession) -> None:
    ref = clamor.zeros((10, 600), np.float32, capacity=1000)
    with clamor.update(ref) as x:
        x[:] = 1
    before = ref.snapshot()
    with clamor.update(ref, grow_to=400) as x:
        assert x.shape == (400, 600)
        assert x[9, 0] == 1
        assert not x[10:].any()
        x[399] = 5
    assert ref.get().shape == (400, 600)
    assert ref.get()[399, 0] == 5
    assert (ref.shape, len(ref)) == ((400, 600), 400)
    assert before.get().shape == before.shape == (10, 600)
    again = pickle.loads(pickle.dumps(ref))
    assert [again.at(v).get().shape[0] for v in range(3)] == [10, 10, 400]
    assert before._latest().get().shape == (400, 600)
    with clamor.update(ref) as x:  # also without writing to what is new
        x[0] = 2
    assert ref.get().shape == (400, 600)


def test_growing_alone_is_a_version(session: FakeSession) -> None:
    ref = clamor.zeros(1, np.float32, capacity=10**6)
    with clamor.update(ref, grow_to=10**6):
        pass
    assert (ref.version, len(ref.get())) == (1, 10**6)
    with clamor.update(ref, grow_to=10**6) as x:
        assert len(x) == 10**6
    assert ref.version == 1


def test_growth_beyond_the_room(session: FakeSession, ref: GlobalRef[Any]) -> None:
    wide = clamor.zeros(100, capacity=2000)
    with pytest.raises(errors.NoSpaceError, match="capacity"):
        clamor.update(wide, grow_to=10**6).begin()
    with pytest.raises(ValueError, match="more than 50"):
        clamor.update(wide, grow_to=50).begin()
    with pytest.raises(errors.NotInPlaceError, match="one array"):
        clamor.update(clamor.put([np.zeros(5000)]), grow_to=6000).begin()
    with pytest.raises(errors.NoSpaceError):
        clamor.update(clamor.put(np.zeros(5)), grow_to=6).begin()
    for bad in (5, 99):
        with pytest.raises(ValueError, match="does not fit"):
            clamor.zeros(100, capacity=bad)


def test_two_that_grow_are_rivals(session: FakeSession) -> None:
    ref = clamor.zeros(10, capacity=10**5)
    old = ref.snapshot()
    with clamor.update(ref, grow_to=10**5) as x:
        x[-1] = 1
    with pytest.raises(errors.CommitConflict), clamor.update(old, grow_to=50_000) as x:
        x[-1] = 1
