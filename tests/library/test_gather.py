"""`clamor.gather` above the page cache: what is asked for, and that the result is `array[ids]`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._objects import ranges
from clamor_ray._objects.ranges import BLOCK_BYTES
from clamor_ray._read.gather import row_ids
from clamor_ray._session import process_sessions
from tests.support.fake_session import Cluster, FakeSession

N = 5000
RNG = np.random.default_rng(4)
TABLE = RNG.integers(0, 1 << 40, (N, 8))
IDS = RNG.integers(-N, N, 300)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSession]:
    session = FakeSession(Cluster())
    monkeypatch.setattr(process_sessions, "_current", session)
    return session


def same(got: Any, expected: Any) -> None:
    assert type(got) is type(expected)
    np.testing.assert_array_equal(got, expected)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape


# ------------------------------------------------------------------ arrays


@pytest.mark.parametrize(
    "ids",
    [
        IDS,
        IDS.astype(np.int16),
        IDS.tolist(),
        np.abs(IDS).astype(np.uint64),
        np.abs(IDS % 200).astype(np.uint8),
        IDS.reshape(20, 15),
        IDS.reshape(20, 15).T,
        IDS[::-3],
        7,
        -1,
        np.int32(9),
        np.array(3),
        [],
        np.empty((0, 4), np.int64),
        [[1, 2], [3, -4]],
    ],
    ids=lambda ids: f"{type(ids).__name__}{np.shape(ids)}",
)
@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("here", [False, True], ids=["absent", "here"])
def test_ids_as_numpy_has_them(session: FakeSession, ids: Any, flat: bool, here: bool) -> None:
    session.fake.has_all = here
    table = TABLE[:, 0].copy() if flat else TABLE
    view = clamor.put(table).get()
    expected = table[np.asarray(ids, np.int64)]
    same(clamor.gather(view, ids), expected)
    same(clamor.gather(clamor.put(table), ids), expected)
    out = np.zeros_like(expected) if isinstance(expected, np.ndarray) else np.zeros((), np.int64)
    assert clamor.gather(view, ids, out=out) is out
    np.testing.assert_array_equal(out, expected)
    assert len(session.fake.gathered) == (3 if np.size(ids) and not here else 0)


VIEWS: dict[str, tuple[Any, bool]] = {  # and whether the page cache copies the rows
    "all": (lambda a: a, True),
    "a slice": (lambda a: a[100:4000], True),
    "every third row": (lambda a: a[::3], True),
    "the rows' first half": (lambda a: a[:, :4], True),
    "one row": (lambda a: a[17:18], True),
    "backwards": (lambda a: a[::-1], False),
    "gaps in the rows": (lambda a: a[:, ::2], False),
    "rows backwards": (lambda a: a[:, ::-1], False),
    "transposed": (lambda a: a.T, False),
    "one number": (lambda a: np.broadcast_to(a[0], (50, 8)), False),
    "windows": (lambda a: np.lib.stride_tricks.sliding_window_view(a.reshape(-1), 10), False),
    "three axes": (lambda a: a.reshape(-1, 4, 2), True),
    "no rows' bytes": (lambda a: a[:, :0], False),
    "bytes": (lambda a: a.view("S8"), True),
    "records": (lambda a: a.view("i4,f4,S4,u4").reshape(-1, 4), True),
    "a record array": (lambda a: a.view("i4,f4").view(np.recarray), False),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_what_is_here(session: FakeSession, name: str) -> None:
    cut, _ = VIEWS[name]
    session.fake.has_all = True
    view = cut(clamor.put(TABLE).get())
    ids = RNG.integers(-len(view), len(view), 40)
    rows = clamor.gather(view, ids)
    same(rows, cut(TABLE)[ids])
    assert not np.shares_memory(rows, view)
    assert not session.fake.gathered
    one = clamor.gather(view, np.array(3 % len(view)))
    same(one, cut(TABLE)[3 % len(view)])
    assert not np.shares_memory(one, view)


@pytest.mark.parametrize("name", VIEWS)
def test_views(session: FakeSession, name: str) -> None:
    cut, by_rows = VIEWS[name]
    ref = clamor.put(TABLE)
    view = cut(ref.get())
    ids = RNG.integers(-len(view), len(view), 40)
    session.fake.prefetched.clear()
    same(clamor.gather(view, ids), cut(TABLE)[ids])
    assert bool(session.fake.gathered) is by_rows
    if not by_rows:  # the blocks that the rows lie on came first, in one request
        asked = {
            first + i
            for _, runs, _ in session.fake.prefetched
            for first, n in runs
            for i in range(n)
        }
        rows = np.asarray(view)[ids]
        assert (rows.nbytes == 0) == (not asked)
        assert len(session.fake.prefetched) == bool(rows.nbytes)


def test_only_what_the_rows_lie_on_is_prefetched(session: FakeSession) -> None:
    ref = clamor.put(np.zeros((4, 100, BLOCK_BYTES), np.uint8))
    view = ref.get().transpose(1, 0, 2)  # a row is 4 blocks, 100 apart
    session.fake.prefetched.clear()
    clamor.gather(view, [7, 50, 7])
    ((_, runs, wait),) = session.fake.prefetched
    first = ref._plan.buffers[0][0] // BLOCK_BYTES
    assert runs == [[first + plane * 100 + row, 1] for plane in range(4) for row in (7, 50)]
    assert wait


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(-2 * BLOCK_BYTES, 2 * BLOCK_BYTES)), max_size=2
    ),
    st.integers(-3 * BLOCK_BYTES, 3 * BLOCK_BYTES),
    st.lists(st.integers(0, 9), max_size=5),
)
def test_no_block_of_a_row_is_missing(
    axes: list[tuple[int, int]], stride: int, ids: list[int]
) -> None:
    memory = np.zeros(1 << 20, np.uint8)
    shape, strides = (10, *(n for n, _ in axes)), (stride, *(step for _, step in axes))
    array = np.ndarray(shape, "V8", memory, 1 << 19, strides)
    found = {
        int(first) + i
        for first, n in ranges.row_spans(array, np.array(ids, np.uint64))
        for i in range(int(n))
    }
    base = memory.ctypes.data + (1 << 19)
    expected = set()
    for place in ids:
        for index in np.ndindex(*shape[1:]):
            at = base + place * stride + sum(i * s for i, s in zip(index, strides[1:], strict=True))
            expected.update(range(at >> 12, ((at + 7) >> 12) + 1))
    assert expected <= found
    if not axes:
        assert expected == found


def test_what_is_not_global_is_indexed(session: FakeSession) -> None:
    same(clamor.gather(TABLE, IDS), TABLE[IDS])
    small = clamor.put(np.arange(10.0))
    assert small._inline
    same(clamor.gather(small, [1, -1]), np.array([1.0, 9.0]))
    same(clamor.gather(small, 2), np.float64(2.0))
    objects = np.array([None, "a", {}], object)
    same(clamor.gather(objects, [2, 0]), objects[[2, 0]])
    assert not session.fake.gathered
    masked = np.ma.masked_array(TABLE[:, 0], TABLE[:, 0] % 2 == 0)
    view = clamor.put(masked).get()
    got = clamor.gather(view, IDS)
    assert type(got) is type(masked)
    np.testing.assert_array_equal(got.mask, masked[IDS].mask)


def test_before_init(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_sessions, "_current", None)
    same(clamor.gather(TABLE, IDS), TABLE[IDS])


def test_a_transaction_sees_what_it_wrote(session: FakeSession) -> None:
    ref = clamor.put(TABLE)
    with clamor.update(ref) as x:
        x[5] = -1
        got = clamor.gather(x, [4, 5])
        same(got, np.stack([TABLE[4], np.full(8, -1)]))
        same(clamor.gather(ref, [5]), TABLE[[5]])  # it reads its version
    same(clamor.gather(ref, [5]), np.full((1, 8), -1))


# ------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([1, N, 3], f"index {N} is out of bounds for axis 0 with size {N}"),
        ([1, -N - 1], f"index {-N - 1} is out of bounds for axis 0 with size {N}"),
        ([1, -N - 1, N], f"index {-N - 1} is out of bounds for axis 0 with size {N}"),
        (np.array([1 << 63], np.uint64), f"index {1 << 63} is out of bounds"),
        (np.array([-128], np.int8) * 1, None),
        ([0.0], "must be of integer"),
        (np.array([]), "must be of integer"),
        (["a"], "must be of integer"),
        ([True, False], "flatnonzero"),
    ],
    ids=repr,
)
def test_bad_ids_move_nothing(session: FakeSession, ids: Any, text: str | None) -> None:
    view = clamor.put(TABLE).get()
    session.fake.prefetched.clear()
    if text is None:
        same(clamor.gather(view, ids), TABLE[ids])
        return
    for source in (view, view[::-1], view[:, :0]):
        with pytest.raises(IndexError, match=text):
            clamor.gather(source, ids)
    assert not session.fake.gathered
    assert not session.fake.prefetched


def test_the_text_is_numpys() -> None:
    with pytest.raises(IndexError) as theirs:
        TABLE[[3, 9999, -1]]
    with pytest.raises(IndexError) as ours:
        row_ids([3, 9999, -1], N)
    assert str(ours.value) == str(theirs.value)
    with pytest.raises(IndexError) as theirs:
        np.array(3)[[0]]
    with pytest.raises(IndexError) as ours:
        clamor.gather(np.array(3), [0])
    assert str(ours.value) == str(theirs.value)


def test_what_has_no_rows(session: FakeSession) -> None:
    with pytest.raises(TypeError, match="not dict"):
        clamor.gather(clamor.put({"a": TABLE}), [1])
    m = clamor.HashMap.build(np.arange(1000), np.arange(1000))
    with pytest.raises(TypeError, match=r"HashMap has get\(\)"):
        clamor.gather(m, [1])
    ref = clamor.put(TABLE)
    clamor.free(ref)
    with pytest.raises(errors.FreedError):
        clamor.gather(ref, [1])


@pytest.mark.parametrize(
    ("out", "error", "text"),
    [
        (np.empty((3, 8), np.int64), ValueError, "shape"),
        (np.empty((2, 8), np.int32), ValueError, "dtype"),
        ([[0] * 8] * 2, TypeError, "out is an array"),
    ],
)
def test_an_out_that_does_not_fit(
    session: FakeSession, out: Any, error: type[Exception], text: str
) -> None:
    view = clamor.put(TABLE).get()
    with pytest.raises(error, match=text):
        clamor.gather(view, [1, 2], out=out)
    with pytest.raises(ValueError, match="read-only"):
        clamor.gather(view, [1, 2], out=view[:2])
    assert not session.fake.gathered


def test_an_out_with_gaps(session: FakeSession) -> None:
    view = clamor.put(TABLE).get()
    out = np.zeros((600, 8), np.int64)
    clamor.gather(view, IDS, out=out[::2])
    np.testing.assert_array_equal(out[::2], TABLE[IDS])
    assert not out[1::2].any()


def test_a_failure_passes(session: FakeSession) -> None:
    view = clamor.put(TABLE).get()

    def fail(name: str) -> None:
        if name == "gather":
            raise errors.HomeLostError("made up")

    session.cluster.fail = fail
    with pytest.raises(errors.HomeLostError):
        clamor.gather(view, [1])


# ------------------------------------------------------------------ tables


def blocks_asked(session: FakeSession) -> int:
    return sum(n for _, runs, _ in session.fake.prefetched for _, n in runs)


def chunked() -> Any:
    parts = np.array_split(np.arange(60_000, dtype=np.int64), 5)
    return pa.chunked_array([pa.array(part) for part in parts])


WORDS = [f"word {i}" * (i % 5) if i % 7 else None for i in range(30_000)]
ARROW: dict[str, Any] = {
    "integers": lambda: pa.array(np.arange(60_000)),
    "a slice": lambda: pa.array(np.arange(60_000))[1000:50_000],
    "nulls": lambda: pa.array([i if i % 3 else None for i in range(30_000)]),
    "booleans": lambda: pa.array([i % 3 == 0 for i in range(60_000)]),
    "strings": lambda: pa.array(WORDS),
    "large strings": lambda: pa.array(WORDS, pa.large_string()),
    "lists": lambda: pa.array([[i, i + 1] for i in range(20_000)]),
    "chunks": chunked,
    "chunks of words": lambda: pa.chunked_array([WORDS[:10_000], WORDS[10_000:]]),
    "a table": lambda: pa.table({"a": chunked(), "b": np.arange(60_000.0)}),
    "a batch": lambda: pa.record_batch({"a": np.arange(60_000), "b": np.arange(60_000.0)}),
    "a table of nothing": lambda: pa.table({}),
    "words by number": lambda: pa.array(
        [f"kind {i % 9}" for i in range(60_000)]
    ).dictionary_encode(),
    "decimals": lambda: pa.array(range(60_000), pa.decimal128(12, 2)),
}


@pytest.mark.parametrize("name", ARROW)
def test_arrow(session: FakeSession, name: str) -> None:
    obj = ARROW[name]()
    view = clamor.put(obj).get()
    ids = RNG.integers(-len(obj), len(obj), 50) if len(obj) else np.empty(0, np.int64)
    session.fake.prefetched.clear()
    got = clamor.gather(view, ids)
    assert type(got) is type(obj)
    wanted = [int(i) % len(obj) for i in ids]
    assert got.to_pylist() == obj.take(pa.array(wanted, pa.int64())).to_pylist()
    if len(obj):
        got.validate(full=True)
        assert blocks_asked(session) > 0
        if name in ("integers", "a slice", "chunks", "a batch", "words by number", "decimals"):
            assert blocks_asked(session) <= 2 * 2 * 50
        with pytest.raises(IndexError, match="out of bounds"):
            clamor.gather(view, [len(obj)])
        with pytest.raises(ValueError, match="one dimension"):
            clamor.gather(view, [[0]])
        with pytest.raises(TypeError, match="out="):
            clamor.gather(view, [0], out=np.empty(1))
    assert len(clamor.gather(view, [])) == 0


def test_of_words_the_offsets_and_the_letters_come(session: FakeSession) -> None:
    obj = pa.array([f"{i:0100d}" for i in range(50_000)])
    view = clamor.put(obj).get()
    session.fake.prefetched.clear()
    clamor.gather(view, [40_000, 10])
    asked = [
        {first + i for first, n in runs for i in range(n)} for _, runs, _ in session.fake.prefetched
    ]
    leased = session.leases.at(view.buffers()[2].address)
    assert leased is not None
    begin = leased.mapping.address
    offsets, letters = (buffer.address - begin >> 12 for buffer in view.buffers()[1:])
    assert asked == [
        {offsets + 4 * 40_000 // 4096, offsets},
        {letters + 100 * 40_000 // 4096, letters},
    ]


def test_a_table_is_two_batches(session: FakeSession) -> None:
    words = pa.chunked_array(
        [[f"{i:0100d}" for i in range(part * 9000, (part + 1) * 9000)] for part in range(4)]
    )
    table = pa.table(dict.fromkeys("ab", words) | {"c": np.arange(36_000)})
    view = clamor.put(table).get()
    session.fake.prefetched.clear()
    got = clamor.gather(view, [35_000, 3, 10_000])
    assert got.column("b").to_pylist() == [f"{i:0100d}" for i in (35_000, 3, 10_000)]
    assert len(session.fake.prefetched) == 2


PANDAS: dict[str, Any] = {
    "a frame": lambda: pd.DataFrame(np.arange(200_000).reshape(-1, 4), columns=list("abcd")),
    "columns": lambda: pd.DataFrame({"a": np.arange(30_000), "b": np.arange(30_000.0)}),
    "an index of its own": lambda: pd.DataFrame(
        {"a": np.arange(30_000)}, index=np.arange(30_000)[::-1].copy()
    ),
    "a series": lambda: pd.Series(np.arange(60_000.0)),
    "an index": lambda: pd.Index(np.arange(60_000)),
    "categories": lambda: pd.Series(pd.Categorical(np.arange(30_000) % 7)),
    "nullable": lambda: pd.Series(np.arange(30_000), dtype="Int64"),
    "arrow": lambda: pd.Series(np.arange(30_000), dtype="int64[pyarrow]"),
    "days": lambda: pd.Series(pd.date_range("2020", periods=30_000, freq="s")),
    "two levels": lambda: pd.Series(
        np.arange(30_000), index=pd.MultiIndex.from_arrays([np.arange(30_000), np.arange(30_000)])
    ),
}


@pytest.mark.parametrize("name", PANDAS)
def test_pandas(session: FakeSession, name: str) -> None:
    obj = PANDAS[name]()
    view = clamor.put(obj).get()
    ids = RNG.integers(-len(obj), len(obj), 50)
    session.fake.prefetched.clear()
    got = clamor.gather(view, ids)
    expected = obj.take(np.where(ids < 0, ids + len(obj), ids))
    if isinstance(obj, pd.DataFrame):
        pd.testing.assert_frame_equal(got, expected)
    elif isinstance(obj, pd.Series):
        pd.testing.assert_series_equal(got, expected)
    else:
        pd.testing.assert_index_equal(got, expected)
    assert blocks_asked(session) > 0
    if name in ("nullable", "two levels"):
        assert blocks_asked(session) <= 3 * 50
    with pytest.raises(IndexError, match="out of bounds"):
        clamor.gather(view, [len(obj)])
