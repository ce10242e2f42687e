"""Which blocks prefetch asks for: pure computation, checked against brute force."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import scipy.sparse
from hypothesis import given, settings
from hypothesis import strategies as st

from clamor_ray._native.client import BLOCK_BYTES, BLOCK_SHIFT, Mapping
from clamor_ray._objects import ranges as _ranges
from clamor_ray._read.lease import LeaseTable
from clamor_ray._read.prefetch import prefetch, split_by_mapping

MIB = 1 << 20
BIG = np.zeros(16 * MIB, np.uint8)
BASE = BIG.__array_interface__["data"][0]


def blocks_of(spans: Any) -> set[int]:
    assert spans.dtype == np.uint64
    found: set[int] = set()
    end = -1
    for first, n in spans.tolist():
        assert n > 0
        assert first > end, "sorted, apart and merged"
        end = first + n
        found.update(range(first, end))
    return found


def brute_force(array: np.ndarray[Any, Any]) -> set[int]:
    """The blocks of every byte of every element, one by one."""
    address = array.__array_interface__["data"][0]
    offsets = np.zeros(1, np.int64)
    for n, stride in zip(array.shape, array.strides, strict=True):
        offsets = (offsets[:, None] + np.arange(n) * stride).reshape(-1)
    found: set[int] = set()
    if array.itemsize:
        for begin in (address + offsets).tolist():
            found.update(range(begin >> 12, ((begin + array.itemsize - 1) >> 12) + 1))
    return found


WINDOWS = np.lib.stride_tricks.sliding_window_view(BIG[: MIB // 4], 100_000)

VIEWS: dict[str, np.ndarray[Any, Any]] = {
    "all": BIG,
    "slice": BIG[5000:9000],
    "every 1000th": BIG[::1000],
    "every 10000th": BIG[::10_000],
    "every 10000th, backwards": BIG[::-10_000],
    "two columns": BIG.reshape(-1, 16384)[:, 4000:4200],
    "a column": BIG.reshape(-1, 65536)[:, 70],
    "scattered in two axes": BIG.reshape(4, 4, MIB)[::2, ::3, ::70_000],
    "transposed": BIG.reshape(64, 512, 512)[::9, ::100, :10].transpose(2, 0, 1),
    "broadcast": np.broadcast_to(BIG[:8], (1000, 8)),
    "overlapping windows": WINDOWS[::8192],
    "wide items": BIG[: 15 * MIB].view("V10240")[::7],
    "empty": BIG[:0],
    "one": BIG[4096:4097].reshape(()),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str) -> None:
    view = VIEWS[name]
    expected = brute_force(view) if view.size < 3_000_000 else None
    found = blocks_of(_ranges.array_spans(view))
    if expected is None:
        first = BASE >> BLOCK_SHIFT
        expected = set(range(first, (BASE + BIG.nbytes - 1 >> BLOCK_SHIFT) + 1))
    assert found == expected


@settings(max_examples=300, deadline=None)
@given(
    st.integers(0, 3 * BLOCK_BYTES),
    st.lists(
        st.tuples(st.integers(0, 6), st.integers(-3 * BLOCK_BYTES, 3 * BLOCK_BYTES)), max_size=3
    ),
    st.integers(1, 2 * BLOCK_BYTES),
)
def test_no_block_is_missing(address: int, axes: list[tuple[int, int]], itemsize: int) -> None:
    address += 1 << 32
    shape, strides = tuple(n for n, _ in axes), tuple(step for _, step in axes)
    spans = _ranges.strided_spans(address, shape, strides, itemsize)
    expected: set[int] = set()
    for index in np.ndindex(*shape):
        begin = address + sum(i * step for i, step in zip(index, strides, strict=True))
        expected.update(range(begin >> 12, ((begin + itemsize - 1) >> 12) + 1))
    found = blocks_of(spans)
    assert found >= expected
    if len(axes) <= 1:
        assert found == expected


def test_the_number_of_runs_is_bounded_by_the_blocks_covered() -> None:
    # A million overlapping windows of a few blocks are the few blocks.
    spans = _ranges.strided_spans(0, (1000, 1000), (5000, 5000), 8)
    assert len(spans) <= (2 * 999 * 5000 >> BLOCK_SHIFT) + 1


@pytest.mark.parametrize("n", [1, 3000])
def test_a_list_of_views_is_one_set_of_runs(n: int) -> None:
    views = [BIG[i * 5000 : i * 5000 + 100] for i in range(n)]
    expected = set().union(*(brute_force(view) for view in views))
    assert blocks_of(_ranges.object_spans(views)) == expected
    assert blocks_of(_ranges.object_spans([*views, BIG[::10_000]])) == expected | brute_force(
        BIG[::10_000]
    )
    assert blocks_of(_ranges.object_spans(tuple(views))) == expected


@dataclasses.dataclass
class Holder:
    a: Any
    b: Any


def test_objects_are_walked_and_not_copied() -> None:
    part, column = BIG[: 2 * MIB : 9000], BIG[4 * MIB : 5 * MIB]
    obj = Holder({"x": [part]}, (column, "text", 3))
    assert blocks_of(_ranges.object_spans(obj)) == brute_force(part) | blocks_of(
        _ranges.array_spans(column)
    )


def test_arrays_of_dates_and_structures() -> None:
    dates = BIG[: 8 * MIB].view("M8[s]")[::5000]
    structures = BIG[8 * MIB :].view([("a", "i4"), ("b", "i4")])["b"][::5000]
    found = blocks_of(_ranges.object_spans([dates, {"s": structures}]))
    assert found == brute_force(dates) | brute_force(structures)


def test_data_frames() -> None:
    table = pd.DataFrame({"x": BIG.view(np.float64)}, copy=False)
    spans = _ranges.object_spans(table)
    assert blocks_of(spans) >= blocks_of(_ranges.array_spans(BIG))
    few = table.iloc[1000:2000]
    inside = {b for b in blocks_of(_ranges.object_spans(few)) if b in blocks_of(spans)}
    assert inside >= brute_force(BIG.view(np.float64)[1000:2000])
    assert len(inside) < 10


def test_sparse_matrices() -> None:
    n = MIB
    data, indices = BIG[: 8 * n].view(np.float64), BIG[8 * n : 12 * n].view(np.int32)
    matrix = scipy.sparse.csr_matrix((1, n))
    matrix.data, matrix.indices, matrix.indptr = data, indices, np.array([0, n], np.int32)
    found = blocks_of(_ranges.object_spans(matrix))
    assert found >= blocks_of(_ranges.array_spans(BIG[: 12 * n]))


def arrow_blocks(*ranges: tuple[int, int]) -> set[int]:
    found: set[int] = set()
    for address, n_bytes in ranges:
        if n_bytes:
            found.update(range(address >> 12, ((address + n_bytes - 1) >> 12) + 1))
    return found


def test_arrow_slices_are_exact_for_flat_data() -> None:
    numbers = pa.Array.from_buffers(pa.int64(), 2 * MIB, [None, pa.py_buffer(BIG)])
    part = numbers.slice(100_000, 1000)
    assert blocks_of(_ranges.object_spans(part)) == arrow_blocks((BASE + 800_000, 8000))
    bits = pa.Array.from_buffers(pa.bool_(), 100 * MIB, [None, pa.py_buffer(BIG)])
    part = bits.slice(1_000_003, 10)
    assert blocks_of(_ranges.object_spans(part)) == arrow_blocks((BASE + 125_000, 2))


def test_arrow_slices_of_strings_follow_the_offsets() -> None:
    texts = pa.array([f"{i:0100d}" for i in range(50_000)])
    part = texts.slice(20_000, 10)
    _, offsets, data = texts.buffers()
    assert blocks_of(_ranges.object_spans(part)) == arrow_blocks(
        (offsets.address + 80_000, 44), (data.address + 2_000_000, 1000)
    )
    assert blocks_of(_ranges.object_spans(texts.slice(5, 0))) == set()


def test_arrow_tables_and_nested_data() -> None:
    table = pa.table({"l": [[i] * 3 for i in range(9000)], "d": ["a", "b", "c"] * 3000})
    expected = {
        block
        for column in table.columns
        for chunk in column.chunks
        for buffer in chunk.buffers()
        if buffer is not None and column.type != pa.string()
        for block in arrow_blocks((buffer.address, buffer.size))
    }
    assert blocks_of(_ranges.object_spans(table)) >= expected


# ------------------------------------------------------------------ from addresses to mappings


def mapping(number: int, first_block: int, n_blocks: int) -> Mapping:
    return Mapping(number, first_block << BLOCK_SHIFT, n_blocks << BLOCK_SHIFT)


def spans(*runs: tuple[int, int]) -> Any:
    return np.array(runs, np.uint64).reshape(-1, 2)


def test_runs_become_relative_to_their_mapping() -> None:
    table = LeaseTable()
    one, two = mapping(1, 100, 50), mapping(2, 200, 10)
    table.add(1, one)
    table.add(2, two)
    parts = split_by_mapping(spans((5, 3), (100, 1), (110, 5), (160, 1), (203, 2), (900, 1)), table)
    assert {m.id: runs.tolist() for m, runs in parts.items()} == {
        1: [[0, 1], [10, 5]],
        2: [[3, 2]],
    }


def test_a_run_is_cut_at_the_end_of_its_mapping() -> None:
    table = LeaseTable()
    table.add(1, mapping(1, 100, 10))
    parts = split_by_mapping(spans((105, 100)), table)
    assert [runs.tolist() for runs in parts.values()] == [[[5, 5]]]


def test_mappings_come_and_go() -> None:
    table = LeaseTable()
    one = mapping(1, 100, 10)
    assert table.find(100 << BLOCK_SHIFT) is None
    table.add(1, one)
    table.add(2, one)  # two leases of one snapshot share its mapping
    assert table.find((110 << BLOCK_SHIFT) - 1) == one
    assert table.find(110 << BLOCK_SHIFT) is None
    assert table.find((100 << BLOCK_SHIFT) - 1) is None
    table.forget(1)
    assert table.find(100 << BLOCK_SHIFT) == one
    table.forget(2)
    table.forget(2)
    assert table.find(100 << BLOCK_SHIFT) is None
    assert len(table) == 0


# ------------------------------------------------------------------ the call


class FakeClient:
    has_ended = False
    is_connected = True

    def __init__(self) -> None:
        self.asked: list[tuple[int, list[list[int]], bool]] = []

    def prefetch(self, mapping_id: int, runs: Any, *, wait: bool, timeout_s: float) -> None:
        assert timeout_s > 0
        self.asked.append((mapping_id, runs.tolist(), wait))


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    """A session whose one mapping is the 16 MiB of BIG."""
    from clamor_ray._protocol.config import Config
    from clamor_ray._session import process_sessions
    from clamor_ray._session.session import Session

    first, end = BASE >> BLOCK_SHIFT, (BASE + BIG.nbytes) >> BLOCK_SHIFT
    session = Session.__new__(Session)
    session.scope = "a" * 12
    session.owner = False  # as in a task
    session.config = Config()
    session.leases = LeaseTable()
    session.leases.add(1, mapping(7, first, end - first))
    client = FakeClient()
    session._client = client  # type: ignore[assignment]
    monkeypatch.setattr(process_sessions, "_current", session)
    return client


def test_prefetch_asks_once_for_a_list_of_views(client: FakeClient) -> None:
    prefetch([BIG[8192:8200], BIG[20480 : 20480 + 4096], np.zeros(10)], wait=False)
    assert len(client.asked) == 1
    number, runs, wait = client.asked[0]
    assert number == 7
    assert not wait
    offset = BASE & (BLOCK_BYTES - 1)
    assert runs[0][0] == (8192 + offset) >> BLOCK_SHIFT


@pytest.mark.parametrize(
    "target", [np.zeros(10), [np.zeros(10)], {"a": 3}, "text", pa.array([1, 2])]
)
def test_what_is_not_of_a_global_variable_is_an_error(client: FakeClient, target: Any) -> None:
    with pytest.raises(ValueError, match="not part of a global variable"):
        prefetch(target)
    assert client.asked == []


def test_a_copy_is_an_error_that_says_so(client: FakeClient) -> None:
    with pytest.raises(ValueError, match="Fancy indexing"):
        prefetch(BIG[[1, 5, 7]])


@pytest.mark.parametrize("target", [BIG[:0], [], ()])
def test_nothing_is_nothing(client: FakeClient, target: Any) -> None:
    prefetch(target)
    assert client.asked == []
