"""A slice of an Arrow array takes the bytes of the slice, not those of what it was cut from."""

from __future__ import annotations

import decimal
import pickle
from typing import Any

import numpy as np
import pytest

from clamor_ray._objects.layout import take_apart

pa = pytest.importorskip("pyarrow")

N = 100_000
RNG = np.random.default_rng(16)
NULLS = RNG.random(N) < 0.1


def texts(n: int) -> list[str | None]:
    return [None if NULLS[i] else f"item {i} " + "x" * (i % 7) for i in range(n)]


ARRAYS: dict[str, Any] = {
    "int64": pa.array(np.arange(N)),
    "int16 with nulls": pa.array(np.arange(N).astype(np.int16), mask=NULLS),
    "bool": pa.array(RNG.random(N) < 0.5, mask=NULLS),
    "timestamp": pa.array(np.arange(N).astype("datetime64[s]"), mask=NULLS),
    "string": pa.array(texts(N)),
    "large string": pa.array(texts(N), pa.large_string()),
    "binary": pa.array(texts(N), pa.binary()),
    "fixed binary": pa.array([b"%07d" % i for i in range(N)], pa.binary(7)),
    "decimal": pa.array([decimal.Decimal(i) for i in range(N)], pa.decimal128(20, 2)),
    "list": pa.array([list(range(i % 5)) for i in range(N)]),
    "fixed list": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(4 * N)), 4),
    "struct": pa.array([{"a": i, "b": str(i)} for i in range(N)]),
    "map": pa.array([[(str(i), i)] for i in range(N)], pa.map_(pa.string(), pa.int64())),
    "string view": pa.array([f"item {i} " + "x" * (i % 17) for i in range(N)], pa.string_view()),
    "list view": pa.array([list(range(i % 5)) for i in range(N)], pa.list_view(pa.int64())),
    "dense union": pa.UnionArray.from_dense(
        pa.array(np.arange(N) % 2, pa.int8()),
        pa.array(np.arange(N) // 2, pa.int32()),
        [pa.array(np.arange(N // 2)), pa.array([str(i) for i in range(N // 2)])],
    ),
    "run ends": pa.RunEndEncodedArray.from_arrays(
        pa.array(np.arange(2, N + 2, 2), pa.int32()), pa.array(np.arange(N // 2))
    ),
    "tensor": pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int64(), (2, 2)),
        pa.FixedSizeListArray.from_arrays(pa.array(np.arange(4 * N)), 4),
    ),
}


def stored(obj: Any) -> tuple[int, Any]:
    """The bytes that putting it takes, and what comes back."""
    taken = take_apart(obj)
    buffers = [bytes(view) for view in taken.buffers]
    return taken.plan.total_bytes, pickle.loads(taken.inband, buffers=buffers)


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize(("first", "n"), [(1000, 2000), (3, 2005), (N - 1, 1), (77, 0), (0, 17)])
def test_a_slice_takes_its_own_bytes(name: str, first: int, n: int) -> None:
    whole = ARRAYS[name]
    part = whole.slice(first, n)
    n_bytes, again = stored(part)
    again.validate(full=True)
    assert again.equals(part)
    assert n_bytes < 2 * part.nbytes + 5 * 4096
    assert n_bytes < stored(whole)[0] / 4


@pytest.mark.parametrize("wrap", ["table", "batch", "chunked", "dict"])
def test_so_does_what_holds_slices(wrap: str) -> None:
    columns = {"a": ARRAYS["int16 with nulls"], "b": ARRAYS["string"]}
    table = pa.table(columns)
    made = {
        "table": table,
        "batch": table.to_batches()[0],
        "chunked": table.column("b"),
    }
    if wrap == "dict":
        part: Any = {"part": table.slice(1000, 2000)}
        n_bytes, again = stored(part)
        assert again["part"].equals(part["part"])
    else:
        part = made[wrap].slice(1000, 2000)
        n_bytes, again = stored(part)
        assert again.equals(part)
    assert n_bytes < 2000 * 40


def test_what_is_whole_is_not_copied() -> None:
    array = pa.array(np.arange(N))
    (view,) = take_apart(array).buffers
    assert np.frombuffer(view, np.uint8).ctypes.data == array.buffers()[1].address
    part = array.slice(800, N // 2)
    (view,) = take_apart(part).buffers
    assert np.frombuffer(view, np.uint8).ctypes.data == array.buffers()[1].address + 800 * 8


def test_a_dictionary_stays_whole_and_its_indices_do_not() -> None:
    array = pa.array(["a", "b", "c"] * (N // 3)).dictionary_encode()
    part = array.slice(1000, 2000)
    n_bytes, again = stored(part)
    assert again.equals(part)
    assert n_bytes < 2000 * 4 + 4 * 4096


LONG = [f"a name that is long enough, {i}" for i in range(N)]


def test_of_a_large_dictionary_a_slice_takes_what_it_uses() -> None:
    array = pa.DictionaryArray.from_arrays(
        pa.array((np.arange(N) * 7 % N).astype(np.int32), mask=NULLS), pa.array(LONG), ordered=True
    )
    part = array.slice(1000, 2000)
    n_bytes, again = stored(part)
    assert again.type == part.type
    assert again.to_pylist() == part.to_pylist()
    assert n_bytes < 2000 * 60
    used = again.dictionary.to_pylist()
    assert used == [name for name in LONG if name in set(used)]  # in their order, which it has


def test_a_dictionary_stays_whole_where_its_array_is_no_slice() -> None:
    array = pa.DictionaryArray.from_arrays(pa.array([5, 3], pa.int32()), pa.array(LONG))
    n_bytes, again = stored(array)
    assert again.equals(array)
    assert n_bytes > N * 28


def test_texts_that_lie_scattered_are_gathered() -> None:
    whole = pa.array(LONG, pa.string_view())
    views = np.frombuffer(whole.buffers()[1], "V16")[::500].copy()
    few = pa.Array.from_buffers(
        whole.type, len(views), [None, pa.py_buffer(views.view(np.uint8)), *whole.buffers()[2:]]
    )
    assert few.to_pylist() == LONG[::500]
    n_bytes, again = stored(few)
    again.validate(full=True)
    assert again.equals(few)
    assert n_bytes < len(few) * 60


def test_texts_that_items_share_are_stored_once() -> None:
    one = pa.array(["x" * 10_000], pa.string_view())
    views = np.repeat(np.frombuffer(one.buffers()[1], "V16"), N)
    part = pa.Array.from_buffers(
        one.type, N, [None, pa.py_buffer(views.view(np.uint8)), *one.buffers()[2:]]
    ).slice(1000, 2000)
    n_bytes, again = stored(part)
    assert again.equals(part)
    assert n_bytes < 2000 * 16 + 10_000 + 3 * 4096


@pytest.mark.parametrize("column", ["arrow", "view", "text", "number"])
def test_slices_of_frames(column: str) -> None:
    pd = pytest.importorskip("pandas")
    frame = pd.DataFrame(
        {
            "arrow": pd.Series(np.arange(N), dtype=pd.ArrowDtype(pa.int64())),
            "view": pd.Series(LONG, dtype=pd.ArrowDtype(pa.string_view())),
            "text": LONG,
            "number": np.arange(N),
        }
    )
    for part in (frame.iloc[1000:3000][[column]], frame[column].iloc[1000:3000]):
        n_bytes, again = stored(part)
        assert again.equals(part)
        assert n_bytes < 2000 * 60
