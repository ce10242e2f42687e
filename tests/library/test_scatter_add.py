"""`add_at` and its like outside of a stage, over a stand-in of the page server."""

from __future__ import annotations

import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._protocol.config import Config
from clamor_ray._read.ref import GlobalRef
from clamor_ray._session import process_sessions
from clamor_ray._write import scatter_add
from tests.support.fake_session import BLOCK_BYTES, Cluster, FakeSession

PER_BLOCK = BLOCK_BYTES // 8
DEADLINE_S = 30.0
DTYPES = ["f2", "f4", "f8", "i1", "u1", "i2", "i4", "u4", "i8", "u8", "c8", ">f8"]


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSession]:
    session = FakeSession(Cluster())
    monkeypatch.setattr(process_sessions, "_current", session)
    return session


@pytest.fixture(params=["region", "inline"])
def ref(session: FakeSession, request: pytest.FixtureRequest) -> GlobalRef[Any]:
    """Of zeros: 20 blocks, or inside its reference."""
    return clamor.put(np.zeros(20 * PER_BLOCK if request.param == "region" else 100))


# ------------------------------------------------------------------ what is added


def test_repeated_ids_add_up(ref: GlobalRef[Any]) -> None:
    clamor.add_at(ref, [3, 3, -1, 0, 3], [1, 2, 3, 4, 5])
    assert ref.version == 1
    assert ref.get()[[0, 3, -1]].tolist() == [4, 8, 3]
    assert np.count_nonzero(ref.get()) == 3


def test_maximum_minimum_accumulate(ref: GlobalRef[Any]) -> None:
    clamor.maximum_at(ref, [1, 1, 2], [5.0, 4.0, -1.0])
    clamor.minimum_at(ref, [1, 2], [4.5, -2.0])
    assert ref.get()[:4].tolist() == [0, 4.5, -2, 0]
    clamor.add(ref, np.arange(len(ref.get())))
    assert ref.get()[:4].tolist() == [0, 5.5, 0, 3]
    assert ref.version == 3


@pytest.mark.parametrize("shape", [(700,), (300, 7), (40, 3, 5), (2,)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["C", "F"])
def test_as_numpy(session: FakeSession, dtype: str, shape: tuple[int, ...], order: str) -> None:
    seed = np.random.default_rng([len(shape), *dtype.encode()])
    limits = np.iinfo(dtype) if np.dtype(dtype).kind in "iu" else None

    def some(of: tuple[int, ...]) -> Any:
        if limits is not None:  # sums wrap
            return seed.integers(limits.min, limits.max, of, np.dtype(dtype), endpoint=True)
        found = seed.normal(size=of)
        found[seed.random(of) < 0.1] = np.nan
        found[seed.random(of) < 0.1] = np.inf
        return found.astype(dtype)

    before = np.asarray(some(shape), order=order)  # type: ignore[call-overload]
    ref = clamor.put(before)
    after = before.copy(order="K")
    for function, ufunc in (
        (clamor.add_at, np.add),
        (clamor.maximum_at, np.maximum),
        (clamor.minimum_at, np.minimum),
    ):
        ids = seed.integers(-shape[0], shape[0], (30, 2))
        values = some((30, 2, *shape[1:]))
        with np.errstate(all="ignore"):
            ufunc.at(after, ids, values)
        function(ref, ids, values)
        np.testing.assert_array_equal(ref.get(), after)
    dense = some(shape)
    with np.errstate(all="ignore"):
        after += dense
    clamor.add(ref, dense)
    np.testing.assert_array_equal(ref.get(), after)


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_zeros_have_the_sign_that_numpy_gives_them(session: FakeSession, dtype: str) -> None:
    for first, second in ((0.0, -0.0), (-0.0, 0.0)):
        for function, ufunc in (
            (clamor.maximum_at, np.maximum),
            (clamor.minimum_at, np.minimum),
        ):
            after = np.full(3, first, dtype)
            ref = clamor.put(after.copy())
            ids, values = [0, 2, 2], np.array([second, -second, second], dtype)
            ufunc.at(after, ids, values)
            function(ref, ids, values)
            assert ref.refresh().get().tobytes() == after.tobytes()


def test_what_values_may_be(session: FakeSession) -> None:
    ref = clamor.put(np.zeros((4, 2), np.float32))
    clamor.add_at(ref, [0, 1], 1)
    clamor.add_at(ref, [0], np.ones(2))  # float64 to float32 is of the same kind
    clamor.add_at(ref, [[2], [3]], np.array([5, 6], np.int8))
    clamor.add_at(ref, 1, True)
    assert ref.get().tolist() == [[2, 2], [2, 2], [5, 6], [5, 6]]
    small = clamor.put(np.zeros(3, np.uint8))
    clamor.add_at(small, [0, 0], 200)
    assert small.get().tolist() == [144, 0, 0]


def test_an_object_that_came_from_a_reference(ref: GlobalRef[Any]) -> None:
    before = ref.get()
    clamor.add_at(before, [1], 1)
    assert (before[1], ref.version) == (0, 0)  # it shows its version, and the reference stays
    assert ref.refresh().get()[1] == 1


def test_nothing_to_add_is_no_version(ref: GlobalRef[Any]) -> None:
    clamor.add_at(ref, [], [])
    clamor.add_at(ref, np.empty(0, np.int32), 1.0)
    assert ref.refresh().version == 0
    empty = clamor.put(np.empty((0, 3)))
    clamor.add(empty, np.empty((0, 3)))
    assert empty.refresh().version == 0


# ------------------------------------------------------------------ what is refused


@pytest.mark.parametrize("function", [clamor.add_at, clamor.maximum_at, clamor.minimum_at])
@pytest.mark.parametrize(
    ("ids", "values", "error", "text"),
    [
        ([0, 10**6], 1, IndexError, "index 1000000 is out of bounds"),
        ([0, -(10**6)], 1, IndexError, "index -1000000 is out of bounds"),
        ([0.0], 1, IndexError, "must be of integer"),
        ([True], 1, IndexError, "flatnonzero"),
        (["a"], 1, IndexError, "must be of integer"),
        ([], [1j], TypeError, "same_kind"),
        ([0], 1j, TypeError, "complex128 cannot be cast to float64"),
        ([0], ["a"], TypeError, "cannot be cast"),
        ([0], None, TypeError, "cannot be cast"),
        ([0, 1], [1, 2, 3], ValueError, r"shape \(2,\)"),
        ([0], [[1, 2]], ValueError, "do not fit"),
    ],
)
def test_ids_and_values_are_checked_first(
    ref: GlobalRef[Any], function: Any, ids: Any, values: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        function(ref, ids, values)
    assert ref.refresh().version == 0


def test_what_is_no_array_of_numbers(session: FakeSession) -> None:
    integers = clamor.put(np.zeros(5, np.int64))
    with pytest.raises(TypeError, match="float64 cannot be cast to int64"):
        clamor.add_at(integers, [0], 1.5)
    with pytest.raises(OverflowError):
        clamor.add_at(clamor.put(np.zeros(5, np.int8)), [0], 1000)
    with pytest.raises(TypeError, match="a dict, and not an array"):
        clamor.add_at(clamor.put({"a": np.zeros(5)}), [0], 1)
    for dtype in ("U3", "datetime64[s]", "bool", [("a", "f4")]):
        with pytest.raises(TypeError, match="of numbers"):
            clamor.add_at(clamor.put(np.zeros(5, dtype)), [0], 1)
    with pytest.raises(IndexError, match="0-dimensional"):
        clamor.add_at(clamor.put(np.zeros(())), [0], 1)
    with pytest.raises(TypeError, match="HashMap"):
        clamor.add_at(clamor.HashMap.build([1, 2], [3.0, 4.0]), [0], 1)
    with pytest.raises(TypeError, match="no global variable"):
        clamor.add_at(np.zeros(5), [0], 1)


def test_masked_arrays_are_refused(ref: GlobalRef[Any]) -> None:
    n = len(ref.get())
    with pytest.raises(TypeError, match="values are a masked array"):
        clamor.add_at(ref, [0, 1], np.ma.masked_array([1.0, 2.0], [False, True]))
    with pytest.raises(TypeError, match="ids are a masked array"):
        clamor.add_at(ref, np.ma.masked_array([0, 1], [False, True]), 1)
    with pytest.raises(TypeError, match="values are a masked array"):
        clamor.add(ref, np.ma.zeros(n))
    assert ref.refresh().version == 0


def test_what_is_accumulated_has_the_shape(session: FakeSession) -> None:
    ref = clamor.put(np.zeros((3, 4)))
    for values in (1.0, np.ones(4), np.ones((1, 4)), np.ones((4, 3))):
        with pytest.raises(ValueError, match=r"has shape \(3, 4\)"):
            clamor.add(ref, values)
    with pytest.raises(TypeError, match="same_kind"):
        clamor.add(ref, np.ones((3, 4), complex))
    scalar = clamor.put(np.zeros(()))
    clamor.add(scalar, 2)
    assert scalar.get() == 2


def test_snapshots_parts_and_copies(session: FakeSession) -> None:
    ref = clamor.put(np.zeros(20 * PER_BLOCK))
    for frozen in (ref.snapshot(), ref.at(0)):
        with pytest.raises(errors.FrozenReferenceError, match="is a snapshot"):
            clamor.add_at(frozen, [0], 1)
    with pytest.raises(ValueError, match="is a part of"):
        clamor.add_at(ref.get()[1:], [0], 1)
    with pytest.raises(ValueError, match="private copy"):
        clamor.add_at(ref.get("c"), [0], 1)
    clamor.free(ref)
    with pytest.raises(errors.FreedError):
        clamor.add_at(ref, [0], 1)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("n_rows", [40, 20 * PER_BLOCK])
def test_a_view_over_all_of_it_is_refused(session: FakeSession, n_rows: int, order: str) -> None:
    ref = clamor.put(np.zeros((n_rows, 2), order=order))  # type: ignore[call-overload]
    x = ref.get()
    views = (x.T, x.ravel("K"), x.view(np.int64), x[None], x.T.reshape(n_rows, 2, order="A"))
    for view in views:
        with pytest.raises(ValueError, match="is a view of"):
            clamor.add_at(view, [0], 1)
    assert ref.refresh().version == 0
    clamor.add_at(x[:], [0], 1)
    assert ref.refresh().get()[0].tolist() == [1, 1]


def test_inside_a_transaction_of_the_same_variable(ref: GlobalRef[Any]) -> None:
    with clamor.update(ref) as x:
        x[0] = 1
        for what in (ref, x):
            with pytest.raises(errors.NestedUpdateError):
                clamor.add_at(what, [0], 1)
    assert ref.get()[0] == 1


# ------------------------------------------------------------------ others


def _before_commit(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch, act: Callable[[], None], times: int = 1
) -> None:
    """Somebody else does something just before each of this thread's next commits."""
    left, commit, here = [times], session.rpc.commit, threading.get_ident()

    def called(*args: Any, **how: Any) -> Any:
        if left[0] and threading.get_ident() == here:
            left[0] -= 1
            _in_thread(act)
        return commit(*args, **how)

    monkeypatch.setattr(session.rpc, "commit", called)


def test_a_conflict_begins_anew(
    session: FakeSession, ref: GlobalRef[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def other() -> None:
        with clamor.update(ref._latest()) as x:
            x[0] *= 2
            x[1] = 7

    clamor.add_at(ref, [0], 1)
    before = session.cluster.calls.count("commit")
    _before_commit(session, monkeypatch, other)
    clamor.add_at(ref, [0], 1)
    assert ref.get()[:2].tolist() == [3, 7]  # 1 * 2 + 1: on what the other made of it
    assert session.cluster.calls.count("commit") == before + 3


@pytest.mark.parametrize("error", [errors.SnapshotExpired, errors.NoVersionError])
def test_a_version_that_is_kept_no_longer_begins_anew(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch, error: type[errors.ClamorError]
) -> None:
    """So much was committed by others between the question for the newest and its opening."""
    ref = clamor.put(np.zeros(20 * PER_BLOCK))
    left, opened = [2], session.open

    def open_late(*args: Any, **how: Any) -> Any:
        if left[0]:
            left[0] -= 1
            raise error("gone")
        return opened(*args, **how)

    monkeypatch.setattr(session, "open", open_late)
    clamor.add_at(ref, [0, 0], 1)
    assert (left[0], ref.get()[0]) == (0, 2)


def test_a_transaction_that_began_before_loses(ref: GlobalRef[Any]) -> None:
    def late() -> None:
        with clamor.update(ref._latest()) as x:
            x[0] = 5
            _in_thread(lambda: clamor.add_at(ref, [0], 1))

    with pytest.raises(errors.CommitConflict):
        late()
    assert ref.refresh().get()[0] == 1


def _in_thread(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join(DEADLINE_S)
    assert not thread.is_alive()


def test_threads_that_add_at_once(ref: GlobalRef[Any]) -> None:
    gate = threading.Barrier(4)

    def add(number: int) -> None:
        gate.wait(DEADLINE_S)
        for _ in range(10):
            clamor.add_at(ref._latest(), [0, number, number], 1)

    threads = [threading.Thread(target=add, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    assert ref.refresh().get()[:6].tolist() == [40, 20, 20, 20, 20, 0]


def test_it_gives_up_in_time(
    session: FakeSession, ref: GlobalRef[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def other() -> None:
        with clamor.update(ref._latest()) as x:
            x[0] += 1

    now_s = [100.0]
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        now_s[0] += seconds

    clock = types.SimpleNamespace(monotonic=lambda: now_s[0], sleep=sleep)
    monkeypatch.setattr(scatter_add, "time", clock)
    monkeypatch.setattr(session, "config", Config(control_timeout_s=3.0))
    _before_commit(session, monkeypatch, other, times=10**6)
    with pytest.raises(errors.CommitConflict):
        clamor.add_at(ref, [0], 100)
    assert 1.0 < sum(waited) <= 3.0
    assert ref.refresh().get()[0] == ref.version  # only the others'
