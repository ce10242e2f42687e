"""`GlobalArray`: indexed as NumPy's arrays are, gathered where rows are absent, plain results."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._session import process_sessions as _session
from tests.conftest import ClamorCluster
from tests.support.fake_session import Cluster, FakeSession

N = 3000
RNG = np.random.default_rng(5)
TABLE = RNG.integers(0, 1 << 40, (N, 8))
IDS = RNG.integers(-N, N, 200)
MASK = RNG.random(N) < 0.05


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSession]:
    session = FakeSession(Cluster())
    monkeypatch.setattr(_session, "_current", session)
    return session


def same(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    np.testing.assert_array_equal(got, expected)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape


# Keys, and whether rows are gathered for them.
KEYS: dict[str, tuple[Any, bool]] = {
    "ids": (IDS, True),
    "a list": (IDS.tolist(), True),
    "small": (np.abs(IDS % 100).astype(np.uint8), True),
    "two dimensions": (IDS.reshape(20, 10), True),
    "not contiguous": (IDS[::-3], True),
    "a mask": (MASK, True),
    "a tuple of one": ((IDS,), True),
    "a column": ((IDS, 3), True),
    "columns": ((IDS, slice(2, 5)), True),
    "every other column": ((IDS, slice(None, None, -2)), False),
    "elements": ((IDS, IDS % 8), False),
    "elements, crossed": ((IDS[:20, None], np.arange(8)), False),
    "an empty list": ([], False),
    "an empty array": (np.empty((0, 3), np.intp), False),
    "columns by ids": ((slice(10), [1, 2]), False),
    "a new axis": ((IDS, None), False),
    "an ellipsis": ((..., [1, 2]), False),
    "a mask of elements": (TABLE % 7 == 0, False),
    "a mask with a column": ((MASK, 2), True),
    "a number of two dimensions": ((IDS.reshape(20, 10), 2), False),
    "a number": (5, False),
    "numbers": ((5, -2), False),
    "a slice": (slice(5, 900, 7), False),
    "of NumPy": (np.int16(9), False),
    "without dimensions": (np.array(3), True),
}


@pytest.mark.parametrize("has_all", [False, True])
@pytest.mark.parametrize("key", KEYS)
def test_keys_as_numpy_has_them(session: FakeSession, key: str, has_all: bool) -> None:
    index, gathers = KEYS[key]
    view = clamor.put(TABLE).get()
    session.fake.has_all = has_all
    assert type(view) is clamor.GlobalArray
    got, expected = view[index], TABLE[index]
    if isinstance(got, clamor.GlobalArray):
        assert np.shares_memory(got, view)  # a view of it is one, too
        got = got.view(np.ndarray)
    same(got, expected)
    assert bool(session.fake.gathered) == (gathers and not has_all)


def test_what_is_wrong_raises_as_numpy(session: FakeSession) -> None:
    view = clamor.put(TABLE).get()
    for key in (
        [N],
        [-N - 1],
        [0.5],
        np.ones(N - 1, bool),
        ["a"],
        (IDS, 99),
        (IDS, [8]),
        (0, 0, 0),
    ):
        with pytest.raises(IndexError) as expected:
            TABLE[key]
        with pytest.raises(IndexError) as got:
            view[key]
        assert str(got.value) == str(expected.value)
    with pytest.raises((ValueError, IndexError)):
        view[[[1, 2], [3]]]
    with pytest.raises(IndexError):
        view.take([N], axis=0)


def test_elements_come_in_one_batch(session: FakeSession) -> None:
    view = clamor.put(np.arange(10_000 * 600.0).reshape(10_000, 600)).get()
    before = len(session.fake.prefetched)
    assert view[[7, 900, -1], [3, 599, 0]].tolist() == [4203.0, 540599.0, 5999400.0]
    ((_, runs, wait),) = session.fake.prefetched[before:]
    assert wait
    assert len(runs) == 3


@pytest.mark.parametrize("axis", [0, None])
def test_take(session: FakeSession, axis: int | None) -> None:
    table = TABLE if axis == 0 else TABLE[:, 0].copy()
    view = clamor.put(table).get()
    same(view.take(IDS, axis=axis), table.take(IDS, axis=axis))
    same(np.take(view, IDS, axis=axis), np.take(table, IDS, axis=axis))
    same(view.take(IDS.tolist(), axis), table.take(IDS.tolist(), axis))
    assert len(session.fake.gathered) == 3
    same(view.take(N + 5, axis=axis, mode="wrap"), table.take(N + 5, axis=axis, mode="wrap"))
    out = np.zeros_like(table[IDS])
    assert view.take(IDS, axis=axis, out=out) is out
    np.testing.assert_array_equal(out, table[IDS])
    same(clamor.put(TABLE).get().take([1, 2], axis=1), TABLE.take([1, 2], axis=1))


def test_take_of_a_mask_is_numpys(session: FakeSession) -> None:
    """NumPy takes rows 0 and 1 by a mask, whatever is here."""
    for session.fake.has_all in (False, True):
        view = clamor.put(TABLE).get()
        same(view.take(MASK, axis=0), TABLE.take(MASK, axis=0))


def test_what_is_here_asks_nobody_whatever_its_shape(session: FakeSession) -> None:
    view = clamor.put(TABLE).get()
    session.fake.has_all = True
    before = len(session.fake.prefetched)
    for cut in (lambda a: a.T, lambda a: a[::-1], lambda a: a[:, ::2]):
        same(cut(view)[[3, -1]], cut(TABLE)[[3, -1]])
    same(view[[3, 5], [1, -1]], TABLE[[3, 5], [1, -1]])
    assert len(session.fake.prefetched) == before
    assert not session.fake.gathered


@pytest.mark.parametrize("error", [errors.DescriptorLimitError, errors.OutOfMemoryError])
def test_a_gather_that_lacks_something_leaves_it_to_touches(
    session: FakeSession, error: type[errors.ClamorError], monkeypatch: pytest.MonkeyPatch
) -> None:
    view = clamor.put(TABLE).get()

    def gather(*_: Any, **__: Any) -> None:
        raise error("none is left")

    monkeypatch.setattr(session.fake, "gather", gather)
    same(view[IDS], TABLE[IDS])


def test_what_was_changed_in_place_is_the_same_array(session: FakeSession) -> None:
    private = clamor.put(TABLE).get(mode="c")
    before = private
    private += 1
    assert private is before
    assert (private == TABLE + 1).all()


def test_views_of_it_gather_too(session: FakeSession) -> None:
    view = clamor.put(TABLE).get()
    for part, expected in (
        (view[100:], TABLE[100:]),
        (view[::2], TABLE[::2]),
        (view.view(np.uint64), TABLE.view(np.uint64)),
        (view.reshape(N // 2, 2, 8), TABLE.reshape(N // 2, 2, 8)),
    ):
        before = len(session.fake.gathered)
        same(part[[3, 1, -4]], expected[[3, 1, -4]])
        assert len(session.fake.gathered) == before + 1
    before = len(session.fake.prefetched)
    same(view[:, 2:4][[3, 1]], TABLE[:, 2:4][[3, 1]])  # rows with gaps come as blocks
    same(view.T[[1, 2]], TABLE.T[[1, 2]])
    assert len(session.fake.prefetched) > before


RESULTS: dict[str, Callable[[Any], Any]] = {
    "+": lambda x: x + 1,
    "r+": lambda x: 1 + x,
    "x + x": lambda x: x + x,
    "-": lambda x: -x,
    "==": lambda x: x == 3,
    "ufunc": np.sqrt,
    "sum": lambda x: x.sum(),
    "sum of rows": lambda x: x.sum(axis=1),
    "max": lambda x: x.max(),
    "mean": np.mean,
    "cumsum": lambda x: x.cumsum(axis=0),
    "round": lambda x: x.round(),
    "clip": lambda x: x.clip(0, 9),
    "copy": lambda x: x.copy(),
    "copy of the module": copy.copy,
    "deep copy": copy.deepcopy,
    "np.copy": np.copy,
    "astype": lambda x: x.astype(np.float32),
    "flatten": lambda x: x.flatten(),
    "matmul": lambda x: x @ x.T[:, :3],
    "dot": lambda x: x.dot(np.ones(8)),
    "einsum": lambda x: np.einsum("ij->i", x),
    "concatenate": lambda x: np.concatenate([x, x]),
    "stack": lambda x: np.stack([x[0], x[1]]),
    "where": lambda x: np.where(x > 5, x, 0),
    "sort": lambda x: np.sort(x, axis=0),
    "argsort": lambda x: x.argsort(axis=0),
    "unique": lambda x: np.unique(x[:10]),
    "repeat": lambda x: x.repeat(2),
    "compress": lambda x: x.compress([True, False, True], axis=0),
    "asarray": lambda x: np.asarray(x),
    "array": lambda x: np.array(x),
    "ascontiguousarray": lambda x: np.ascontiguousarray(x),
    "pickle": lambda x: pickle.loads(pickle.dumps(x, 5)),
    "old pickle": lambda x: pickle.loads(pickle.dumps(x, 2)),
    "cloudpickle": lambda x: cloudpickle.loads(cloudpickle.dumps(x)),
    "tolist": lambda x: x[:3].tolist(),
    "nonzero": lambda x: x.nonzero(),
    "std": lambda x: x.std(axis=0),
    "out": lambda x: np.add(x, 1, out=np.zeros(x.shape, x.dtype)),
    "reduceat": lambda x: np.add.reduceat(x, [0, 5], axis=0),
}


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_what_plain_arrays_give(session: FakeSession, name: str) -> None:
    view, operation = clamor.put(TABLE).get(), RESULTS[name]
    got, expected = operation(view), operation(TABLE)
    if isinstance(expected, np.ndarray):
        same(got, expected)
    else:
        assert type(got) is type(expected)
        np.testing.assert_array_equal(got, expected)


def test_no_method_makes_new_global_arrays(session: FakeSession) -> None:
    view = clamor.put(TABLE).get()
    for name in dir(np.ndarray):
        method = getattr(view[:4], name)
        if name.startswith("__") or not callable(method):
            continue
        try:
            made = method()
        except (TypeError, ValueError):
            continue
        if isinstance(made, clamor.GlobalArray):
            assert np.shares_memory(made, view), name


def test_what_can_be_a_view_is_one(session: FakeSession) -> None:
    """As of `numpy.ndarray`: these change what memory they look at, and copy nothing."""
    view = clamor.put(TABLE).get()
    parts = [view[3], view[3:9], view.T, view.ravel(), view.reshape(-1), view.squeeze(), view.real]
    for part in (*parts, view.diagonal(), view[None], view.swapaxes(0, 1)):
        assert type(part) is clamor.GlobalArray
        assert np.shares_memory(part, view)
        assert not part.flags.writeable


@dataclasses.dataclass
class Holder:
    array: Any


def test_arrays_in_objects(session: FakeSession) -> None:
    small, dates = np.arange(3), np.arange("2000", "2040", dtype="M8[D]")
    turned = np.asfortranarray(TABLE)
    held = {"a": TABLE, "b": [(TABLE * 2, "text")], "c": small, "d": dates, "e": Holder(TABLE)}
    got = clamor.put({**held, "f": turned, "g": np.array(["x", None], object)}).get()
    for array, expected in (
        (got["a"], TABLE),
        (got["b"][0][0], TABLE * 2),
        (got["d"], dates),
        (got["f"], turned),
    ):
        assert type(array) is clamor.GlobalArray
        np.testing.assert_array_equal(array, expected)
    assert got["f"].flags.f_contiguous
    assert type(got["c"]) is type(got["g"]) is np.ndarray
    assert got["b"][0][1] == "text"
    assert got["e"].array is got["a"]  # what was one object is one


def test_a_write_says_what_to_do(session: FakeSession) -> None:
    ref = clamor.put(TABLE)
    view = ref.get()

    def add() -> None:
        nonlocal view
        view += 1

    writes: list[Callable[[], None]] = [
        lambda: view.__setitem__(3, 1),
        lambda: view.__setitem__((3, 1), 1),
        lambda: view[5:].__setitem__(slice(None), 0),
        lambda: view.__setitem__(IDS, 0),
        add,
    ]
    for write in writes:
        with pytest.raises(ValueError, match=r"read-only: it is version 0 .*clamor\.update\(ref\)"):
            write()
    with pytest.raises(ValueError, match="could not broadcast"):  # another error is NumPy's alone
        ref.get(mode="c")[0] = [1, 2]
    private = ref.get(mode="c")
    private += 1
    assert (private == TABLE + 1).all()
    kept = view.copy()
    kept.flags.writeable = False
    with pytest.raises(ValueError, match=r"read-only$"):
        kept[0] = 1


def test_puts_and_views_of_it(session: FakeSession) -> None:
    view = clamor.put(TABLE).get()
    again = clamor.put(view)
    np.testing.assert_array_equal(again.get(), TABLE)
    part = clamor.put({"part": view[100:200]}).get()["part"]
    np.testing.assert_array_equal(part, TABLE[100:200])


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_index_is_as_numpys(data: st.DataObject) -> None:
    """Random shapes, strides and keys: the same elements, or the same kind of error."""
    session = FakeSession(Cluster())
    session.fake.has_all = data.draw(st.booleans())
    previous, _session._current = _session._current, session
    try:
        shape = data.draw(st.sampled_from([(900,), (60, 30), (40, 5, 9), (12, 7, 5, 6)]))
        table = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
        view = clamor.put(table).get()
        steps = data.draw(st.tuples(*(st.sampled_from([1, 2, -1]) for _ in shape)))
        cut = tuple(slice(None, None, step) for step in steps)
        table, view = table[cut], view[cut]

        def one(n: int) -> Any:
            ids = st.lists(st.integers(-n, n - 1), max_size=6)
            return st.one_of(
                st.integers(-n, n - 1),
                st.just(slice(None)),
                st.builds(slice, st.integers(0, n), st.integers(0, n)),
                ids,
                ids.map(lambda made: np.array(made, np.int32)),
                st.just(None),
                st.just(Ellipsis),
                st.lists(st.booleans(), min_size=n, max_size=n).map(np.array),
            )

        parts = data.draw(st.integers(1, table.ndim))
        key = tuple(data.draw(one(n)) for n in table.shape[:parts])
        index = key[0] if parts == 1 and data.draw(st.booleans()) else key
        try:
            expected = table[index]
        except (IndexError, ValueError) as error:
            with pytest.raises(type(error)):
                view[index]
        else:
            np.testing.assert_array_equal(view[index], expected)
            assert np.shape(view[index]) == np.shape(expected)
    finally:
        _session._current = previous


# ------------------------------------------------------------------ over real memory

ROWS, ROW = 4000, 300  # of 8 bytes: two rows in three lie on two blocks


def index_cold(ref: Any, ids: Any) -> tuple[Any, int, int, int, int]:
    def counts() -> tuple[int, int]:
        engines = [node.engine for node in clamor.stats().nodes]
        return sum(e.faults for e in engines), sum(e.bytes_received for e in engines)

    table = ref.get()
    before = counts()
    rows = table[ids]
    cold = counts()
    for _ in range(6):  # until their blocks are here
        assert (table[ids] == rows).all()
    assert (np.asarray(table)[ids] == rows).all()
    between = counts()
    assert (table[ids] == rows).all()
    after = counts()
    moved = cold[1] - before[1]
    return rows, cold[0] - before[0], moved, after[0] - between[0], after[1] - between[1]


@pytest.mark.lab
def test_cold_rows_come_without_faults(clamor_cluster: ClamorCluster, trap: str) -> None:
    array = np.random.default_rng(3).integers(0, 1 << 50, (ROWS, ROW))
    ref = clamor.put(array)
    ids = np.random.default_rng(4).choice(ROWS, 80, replace=False)
    rows, faults, moved, later_faults, later_moved = clamor_cluster.run_in_trap(
        trap, index_cold, ref, ids
    )
    np.testing.assert_array_equal(rows, array[ids])
    assert faults == 0
    assert moved <= 1.5 * 2 * 80 * 4096  # of the touched blocks
    assert (later_faults, later_moved) == (0, 0)
    clamor.free(ref)
