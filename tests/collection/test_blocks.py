"""Blocks of items: what goes in comes out, in value and in type."""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import math
import pickle
import subprocess
import sys
import uuid
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from clamor_ray import errors
from clamor_ray.collection.data import blocks
from clamor_ray.collection.data.blocks import EMPTY, Columns, concat, from_items, items, n_items
from tests.support.collection_items import FLOATS, INT64, NUMPY, SCALARS, TEXT, WIDE, for_all, same


class Colour(enum.IntEnum):
    RED = 1


Point = collections.namedtuple("Point", "x y")

ARRAYS = st.one_of(
    st.lists(st.floats(-9, 9), min_size=3, max_size=3).map(np.array),
    st.lists(st.integers(-9, 9), min_size=1, max_size=3).map(np.array),
)
VALUES = st.recursive(
    st.one_of(SCALARS, NUMPY),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from("ab"), inner, max_size=2),
    ),
    max_leaves=6,
)
ROWS = st.fixed_dictionaries(
    {
        "i": st.one_of(st.none(), INT64),
        "f": FLOATS,
        "s": st.one_of(st.none(), TEXT),
        "l": st.lists(st.integers(0, 3), max_size=2),
    }
)
LISTS = st.one_of(
    *(
        st.lists(kind, max_size=12)
        for kind in (
            INT64,
            WIDE,
            FLOATS,
            st.booleans(),
            TEXT,
            st.binary(max_size=4),
            st.complex_numbers(),
            NUMPY,
            ARRAYS,
            ROWS,
            st.fixed_dictionaries({"x": ARRAYS, "d": st.dates()}),
            st.fixed_dictionaries({"x": VALUES}),
            st.tuples(INT64, TEXT),
            st.tuples(INT64, st.tuples(ARRAYS, FLOATS)),
            st.tuples(INT64, ROWS),
            SCALARS,
            VALUES,
        )
    )
)


@for_all(LISTS)
def test_items_come_back_as_they_were(values: list[Any]) -> None:
    b = from_items(values)
    assert n_items(b) == len(values)
    assert same(list(items(b)), values)
    assert isinstance(blocks.schema_of(b), str)
    assert blocks.n_bytes(b) >= 0
    again = pickle.loads(pickle.dumps(b, protocol=5))
    assert same(list(items(again)), values)
    assert blocks.digest(again) == blocks.digest(b)


@for_all(LISTS, st.data())
def test_slices_and_places(values: list[Any], data: st.DataObject) -> None:
    b = from_items(values)
    start, stop = data.draw(st.integers(0, 14)), data.draw(st.integers(0, 14))
    assert same(list(items(blocks.slice_of(b, start, stop))), values[start:stop])
    places = (
        data.draw(st.lists(st.integers(-len(values), len(values) - 1), max_size=9))
        if (values)
        else []
    )
    assert same(list(items(blocks.take(b, places))), [values[place] for place in places])
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=len(values), max_size=len(values))))
    kept = [value for value, keep in zip(values, mask, strict=True) if keep]
    assert same(list(items(blocks.take(b, mask.astype(bool)))), kept)
    for wrong in ([len(values)], np.ones(len(values) + 1, bool)):
        with pytest.raises(IndexError):
            blocks.take(b, wrong)


@for_all(LISTS, st.integers(0, 12), st.integers(0, 12))
def test_concat_of_one_kind_is_the_whole(values: list[Any], one: int, two: int) -> None:
    b = from_items(values)
    cuts = sorted((one, two))
    parts = [blocks.slice_of(b, i, j) for i, j in zip([0, *cuts], [*cuts, 99], strict=True)]
    whole = concat([EMPTY, *parts, EMPTY])
    assert same(list(items(whole)), values)
    if values:
        assert blocks.digest(whole) == blocks.digest(b)
        assert type(whole) is type(b)


@for_all(st.lists(LISTS, max_size=4))
def test_concat_of_anything_keeps_the_items(lists: list[list[Any]]) -> None:
    found = list(items(concat([from_items(values) for values in lists])))
    values = [value for part in lists for value in part]
    assert len(found) == len(values)
    for one, other in zip(found, values, strict=True):
        alike = same(one, other) or as_numbers(one) == as_numbers(other)
        assert alike, (one, other)


def as_numbers(value: Any) -> Any:
    """Numbers promoted as NumPy or Arrow promote them; text of them, since NaN is there."""
    if isinstance(value, (bool, int, float, complex, np.number, np.bool_)):
        return repr(complex(value)).replace("-0", "0")
    if isinstance(value, np.ndarray):
        return [as_numbers(part) for part in value.tolist()]
    if isinstance(value, (tuple, list)):
        return [as_numbers(part) for part in value]
    if isinstance(value, dict):
        return {name: as_numbers(part) for name, part in value.items()}
    return str(value)


def test_what_becomes_what() -> None:
    for values, schema in (
        ([1, 2], "int64"),
        (range(5), "int64"),
        ([1, 2**63], "int"),
        ([1, 2.5], "object"),
        ([True, 1], "object"),
        ([1.0], "float64"),
        ([np.float32(1)], "float32"),
        ([np.float32(1), np.float64(1)], "object"),
        ([Colour.RED], "Colour"),
        ([np.zeros((2, 3))] * 2, "float64[2][3]"),
        ([np.zeros(3), np.zeros(2)], "ndarray"),
        ([np.zeros(3), np.zeros(3, int)], "ndarray"),
        ([np.array(1)], "ndarray"),
        (["a"], "str"),
        ([("a", 1)], "(str, int64)"),
        ([("a",)], "(str,)"),
        ([Point(1, 2)], "Point"),
        ([(1,), (1, 2)], "tuple"),
        ([()], "tuple"),
        ([{}], "dict"),
        ([{"a": 1, "b": None}, {"b": None, "a": 2}], "{a: int64, b: null}"),
        ([{"a": 1}, {"a": 1.5}], "dict"),
        ([{"a": 1}, {"b": 1}], "dict"),
        ([{1: 1}], "dict"),
        ([{"a": decimal.Decimal("1.5")}], "{a: decimal128(2, 1)}"),
        ([{"a": 2**64}], "dict"),
        ([{"a": {"x": 1}}, {"a": {"y": 1}}], "dict"),
        ([], "object"),
        ([np.datetime64("2020-01-01")], "datetime64[D]"),
    ):
        b = from_items(values)
        shown = blocks.schema_of(b)
        assert shown == schema
        assert same(list(items(b)), list(values))
    assert same(list(items(from_items([{"a": np.float32(2)}]))), [{"a": 2.0}])  # as documented


def test_fields_of_tuples_are_equally_long() -> None:
    for fields in ((), (np.zeros(2), np.zeros(3))):
        with pytest.raises(ValueError, match="same number of items"):
            Columns(fields)
    b = Columns((np.zeros(2), pa.table({"a": [1, 2]})))
    assert repr(b) == "Columns(2 × (float64, {a: int64}))"
    with pytest.raises(AttributeError):
        b.fields = ()  # type: ignore[misc]


def test_numbers_pickle_out_of_band() -> None:
    b = Columns((np.zeros(10000), pa.table({"a": np.zeros(10000)})))
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(b, protocol=5, buffer_callback=buffers.append)
    assert len(data) < 2000
    assert sum(buffer.raw().nbytes for buffer in buffers) >= 160000


def test_kinds_that_do_not_match_stay_items() -> None:
    ints, text = np.array([1, 2]), from_items(["a"])
    table = pa.table({"a": [1]})
    for parts, kind in (
        ([ints, np.array([1.5])], "float64"),
        ([ints, np.array([True])], "int64"),
        ([ints, text], "object"),
        ([ints, np.array(["x"])], "object"),
        ([np.array([2**63], np.uint64), ints], "object"),
        ([np.array(["2020"], "M8[Y]"), np.array(["2020-01-01"], "M8[D]")], "datetime64[D]"),
        ([np.array(["2020"], "M8[Y]"), np.array([1], "m8[s]")], "object"),
        ([np.zeros((1, 2)), np.zeros((1, 3))], "ndarray"),
        ([np.zeros((1, 2)), np.zeros((1, 2), int)], "float64[2]"),
        ([np.zeros(1, [("a", int)]), np.zeros(1, [("b", int)])], "void"),
        ([table, ints], "object"),
        ([table, pa.table({"a": [1.5]})], "{a: double}"),
        ([table, pa.table({"a": ["x"]})], "dict"),
        ([table, pa.table({"b": [1]})], "dict"),
        ([table, pa.table({"a": pa.nulls(1)})], "{a: int64}"),
        ([pa.table({"a": [1], "b": [2]}), pa.table({"b": [3], "a": [4]})], "{a: int64, b: int64}"),
        ([Columns((ints, ints)), Columns((ints, ints + 0.5))], "(int64, float64)"),
        ([Columns((ints, ints)), Columns((ints,))], "tuple"),
    ):
        for order in (parts, parts[::-1]):
            whole = concat(order)
            assert n_items(whole) == sum(map(n_items, parts))
        assert blocks.schema_of(concat(parts)) == kind
    assert concat([]) is EMPTY
    assert concat([EMPTY, table.slice(0, 0)]).schema == table.schema
    swapped = concat([pa.table({"a": [1], "b": [2]}), pa.table({"b": [3], "a": [4]})])
    assert swapped.to_pylist() == [{"a": 1, "b": 2}, {"a": 4, "b": 3}]
    assert list(items(concat([np.array([2**64 - 1], np.uint64), ints])))[1:] == [1, 2]


# -- batches


BLOCKS = {
    "numbers": lambda: np.array([1.5, math.nan]),
    "rows": lambda: np.arange(6).reshape(2, 3),
    "text": lambda: from_items(["a", None]),
    "nothing": lambda: EMPTY,
    "table": lambda: pa.table({"a": [1, 2], "s": ["x", None], "t": [[1, 2], [3]]}),
    "tensors": lambda: from_items([{"x": np.zeros((2, 2)), "i": 1}] * 2),
    "tuples": lambda: from_items([(1, ("a", np.zeros(2))), (2, ("b", np.ones(2)))]),
    "tuples of rows": lambda: from_items([(1, {"a": 1}), (2, {"a": 2})]),
    "structures": lambda: np.array([(1, b"x"), (2, b"y")], [("i", int), ("s", "S1")]),
    "times": lambda: np.array(["2020-01-01", "NaT"], "M8[h]"),
    "no rows": lambda: pa.table({"a": pa.nulls(0, pa.int64())}),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_batches_there_and_back(name: str) -> None:
    b = BLOCKS[name]()
    rows = list(items(b))
    back = blocks.from_batch(blocks.to_batch(b, "numpy"))
    if name not in ("table", "tuples of rows"):
        assert same(list(items(back)), rows)
    table = blocks.to_batch(b, "pyarrow")
    assert isinstance(table, pa.Table)
    assert table.num_rows == len(rows)
    assert blocks.from_batch(table) is table
    frame = blocks.to_batch(b, "pandas")
    assert isinstance(frame, pd.DataFrame)
    assert len(frame) == len(rows)
    assert list(frame.columns) == table.column_names


def test_numpy_batches_of_tables_are_ray_datas() -> None:
    table = pa.table(
        {
            "i": [1, None],
            "s": pa.array(["a", "b"]).dictionary_encode(),
            "v": pa.array([[1, 2], [3, 4]], pa.list_(pa.int32(), 2)),
            "l": [[1], [2, 3]],
        }
    )
    batch = blocks.to_batch(table, "numpy")
    assert batch["i"].dtype == np.float64
    assert np.isnan(batch["i"][1])
    assert batch["s"].tolist() == ["a", "b"]
    assert batch["v"].dtype == np.int32
    assert batch["v"].tolist() == [[1, 2], [3, 4]]
    assert batch["l"][1].tolist() == [2, 3]
    chunks = blocks.to_batch(pa.concat_tables([table, table.slice(1)]), "numpy")
    assert chunks["v"].tolist() == [[1, 2], [3, 4], [3, 4]]


def test_what_a_function_of_batches_may_return() -> None:
    frame = pd.DataFrame({"a": [1, 2]}, index=[5, 6])
    batch = pa.record_batch({"a": [1, 2]})
    rows = [{"a": 1}, {"a": 2}]
    for value in (frame, batch, {"a": np.array([1, 2])}, {"a": [1, 2]}, {"a": frame["a"]}, rows):
        assert list(items(blocks.from_batch(value))) == rows
    for value in (
        frame["a"],
        batch.column(0),
        np.array([1, 2]),
        [1, 2],
        pa.chunked_array([[1, 2]]),
    ):
        assert list(items(blocks.from_batch(value))) == [1, 2]
    pairs = blocks.from_batch((np.array([1, 2]), frame))
    assert list(items(pairs)) == [(1, {"a": 1}), (2, {"a": 2})]
    images = blocks.from_batch(
        {"x": np.zeros((2, 4, 4)), "y": np.fromiter([np.ones(2)] * 2, object)}
    )
    assert [(row["x"].shape, row["y"].shape) for row in items(images)] == [((4, 4), (2,))] * 2


def test_what_a_function_of_batches_may_not_return() -> None:
    for value, what in (
        (None, "NoneType"),
        (1, "int"),
        ("text", "str"),
        (np.array(1), "numpy.ndarray without dimensions"),
        (np.ma.array([1], mask=[True]), "MaskedArray"),
        ((), "tuple"),
        (iter([1]), "list_iterator"),
    ):
        with pytest.raises(TypeError, match=f"this one returned .*{what}"):
            blocks.from_batch(value)
    for columns, what in (
        ({"a": 1}, "Column 'a' of a batch is int"),
        ({1: [1]}, "named by text"),
        ({"a": [object()]}, "Column 'a' cannot be one of Arrow's"),
        ({"a": np.array([1j])}, "of complex128"),
    ):
        with pytest.raises(TypeError, match=what):
            blocks.from_batch(columns)
    with pytest.raises(ValueError, match="'a': 1, 'b': 2"):
        blocks.from_batch({"a": [1], "b": [1, 2]})
    with pytest.raises(TypeError, match="DataFrame cannot become"):
        blocks.from_batch(pd.DataFrame({"a": [1, "x"]}))
    with pytest.raises(ValueError, match="numpy, pyarrow, pandas, not 'polars'"):
        blocks.to_batch(EMPTY, "polars")


def test_pandas_is_not_needed() -> None:
    program = (
        "import sys\n"
        "class Without:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'pandas': raise ImportError('not here')\n"
        "sys.meta_path.insert(0, Without())\n"
        "import numpy as np\n"
        "from clamor_ray.collection.data import blocks, shuffle\n"
        "b = blocks.from_items([{'a': 1, 's': 'x'}, {'a': 2, 's': None}])\n"
        "assert blocks.from_batch(blocks.to_batch(b, 'numpy')).num_rows == 2\n"
        "try: blocks.to_batch(b, 'pandas')\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert "needs pandas: pip install pandas" in done.stdout


# -- Arrow


def test_arrow_of_arrays_and_tuples() -> None:
    assert blocks.to_arrow(np.array([1, 2])).to_pydict() == {"item": [1, 2]}
    rows = blocks.to_arrow(np.arange(8.0).reshape(2, 2, 2))
    assert rows.schema.field("item").type == pa.list_(pa.list_(pa.float64(), 2), 2)
    assert rows.to_pylist()[0] == {"item": [[0, 1], [2, 3]]}
    assert np.array_equal(blocks.column(rows, "item"), np.arange(8.0).reshape(2, 2, 2))
    nested = from_items([(1, {"a": "x"}), (2, {"a": "y"})])
    assert blocks.to_arrow(nested).to_pydict() == {"0": [1, 2], "1": [{"a": "x"}, {"a": "y"}]}
    deep = blocks.to_arrow(from_items([(1, (2, np.zeros(2)))]))
    assert deep.to_pydict() == {"0": [1], "1": [{"0": 2, "1": [0, 0]}]}
    assert blocks.to_arrow(EMPTY).num_rows == 0
    for array, values in (
        (np.array(["a\0b", ""]), ["a\0b", ""]),
        (np.array([b"a\0b"]), [b"a\0b"]),
        (np.array([1, 2], ">i4"), [1, 2]),
        (np.array(["2020-01-01T01"], "M8[h]"), [datetime.datetime(2020, 1, 1, 1)]),
        (np.array(["2020-02"], "M8[M]"), [datetime.date(2020, 2, 1)]),
        (np.array([2], "m8[D]"), [datetime.timedelta(2)]),
        (np.array([(1, 2.5)], [("a", int), ("b", float)]), [{"a": 1, "b": 2.5}]),
        (np.zeros((2, 0)), [[], []]),
        (np.arange(6)[::2], [0, 2, 4]),
        (np.array([b"ab"], "V2"), [b"ab"]),
        (np.array([1.5], np.float16), [1.5]),
    ):
        assert blocks.to_arrow(array).column(0).to_pylist() == values
    for bad in (
        np.array([1j]),
        np.zeros(1, np.longdouble),
        from_items([object()]),
        np.array([2], "m8[M]"),
    ):
        with pytest.raises(TypeError, match="Column 'item' cannot be one of Arrow's"):
            blocks.to_arrow(bad)


def test_values_that_arrow_would_guess_wrong() -> None:
    """Times of NumPy among other values end the process; complex numbers lose a part."""
    mixed = [np.datetime64("2020-01-01"), np.float32(1), {}]
    for values in (mixed, [mixed], [{"a": mixed}], [np.array(mixed, object)], [1j, 1.5]):
        with pytest.raises(TypeError, match=r"times of NumPy among other|no complex numbers"):
            blocks.to_arrow(from_items([*values, None]))
        assert same(list(items(from_items([{"x": v} for v in values]))), [{"x": v} for v in values])
    with pytest.raises(TypeError, match=r"DataFrame cannot become.*times of NumPy"):
        blocks.from_batch(pd.DataFrame({"a": pd.Series(mixed, dtype=object)}))


def test_columns_by_name_and_number() -> None:
    table = pa.table({"a": [1, 2], "n": [1, None], "s": [{"x": 1}, {"x": 2}], "t": ["x", None]})
    assert blocks.column(table, "a").tolist() == [1, 2]
    assert list(items(blocks.column(table, "n"))) == [1, None]
    assert list(items(blocks.column(table, "s"))) == [{"x": 1}, {"x": 2}]
    assert list(items(blocks.column(table, "t"))) == ["x", None]
    pairs = from_items([(1, "a"), (2, "b")])
    assert list(items(blocks.column(pairs, 1))) == ["a", "b"]
    mixed = from_items([(1, "a"), (2, "b", 3)])
    assert list(items(blocks.column(mixed, 1))) == ["a", "b"]
    assert list(items(blocks.column(from_items([{"a": 1}, {"a": "x", "b": 1}]), "a"))) == [1, "x"]
    assert blocks.column(np.zeros(2, [("x", int)]), "x").tolist() == [0, 0]
    assert n_items(blocks.column(EMPTY, "a")) == n_items(blocks.column(np.empty(0), "a")) == 0
    for b, name, there in (
        (table, "b", "'a', 'n', 's', 't'"),
        (table, 0, "'a', 'n'"),
        (pairs, 2, "fields 0 to 1"),
        (pairs, "a", "fields 0 to 1"),
        (pairs, -1, "fields 0 to 1"),
        (mixed, 2, r"\(1, 'a'\)"),
        (np.zeros(2), "a", "float64"),
        (np.zeros(2, [("x", int)]), "y", "the fields x"),
    ):
        with pytest.raises(errors.MissingColumnError, match=there):
            blocks.column(b, name)


def test_columns_of_one_name_are_told() -> None:
    table = pa.table([[1], [2]], ["a", "a"])
    for function in (
        lambda: list(items(table)),
        lambda: blocks.to_batch(table, "numpy"),
        lambda: blocks.column(table, "a"),
    ):
        with pytest.raises(ValueError, match="2 columns 'a'"):
            function()
    assert concat([table, table]).num_rows == 2
    assert blocks.take(table, [0, 0]).num_rows == 2


def test_rows_without_columns() -> None:
    table = pa.table({"a": [1, 2, 3]}).select([])
    assert n_items(table) == 3
    assert list(items(table)) == [{}, {}, {}]
    assert n_items(blocks.take(table, [0, 2, 2, 1])) == 4
    assert n_items(blocks.slice_of(table, 1, 3)) == 2
    assert n_items(concat([table, table])) == 6
    assert blocks.to_batch(table, "numpy") == {}
    assert n_items(blocks.to_arrow(Columns((table, table)))) == 3


def test_slices_share_memory() -> None:
    for b in (np.zeros((4, 2)), pa.table({"a": np.arange(4)})):
        part = blocks.slice_of(Columns((b, b)), 1, 3).fields[0]
        if isinstance(b, np.ndarray):
            assert np.shares_memory(part, b)
        else:
            assert part.column(0).chunk(0).buffers()[1].address == (
                b.column(0).chunk(0).buffers()[1].address
            )
    assert n_items(blocks.slice_of(np.zeros(4), 3, 1)) == 0
    assert n_items(blocks.slice_of(pa.table({"a": [1]}), 3, 1)) == 0


def test_size_in_bytes() -> None:
    assert blocks.n_bytes(np.zeros((10, 3))) == 240
    text = from_items(["x" * 1000] * 5000)
    assert 5_000_000 < blocks.n_bytes(text) < 6_000_000
    assert blocks.n_bytes(Columns((np.zeros(2), np.zeros(2)))) == 32
    assert blocks.n_bytes(pa.table({"a": np.arange(1000)}).slice(0, 10)) == 80


# -- digests


class Plain:
    def __init__(self, **state: Any) -> None:
        self.__dict__.update(state)


def test_digest_of_a_table_is_not_of_its_chunks() -> None:
    table = pa.table(
        {
            "k": [1, 2, 3, 4],
            "i": [1, None, 3, 4],
            "f": [1.5, math.nan, None, 0.0],
            "s": ["a", None, "", "d"],
            "b": [True, None, False, False],
            "l": [[1], None, [], [2, 3]],
            "st": [{"x": 1}, None, {"x": None}, {"x": 3}],
            "d": [decimal.Decimal("1.5"), None, decimal.Decimal("2.5"), None],
            "m": pa.array([[("k", 1)], None, [], [("q", 2)]], pa.map_(pa.string(), pa.int64())),
            "fl": pa.array([[1, 2], None, [3, 4], [5, 6]], pa.list_(pa.int8(), 2)),
            "dict": pa.array(["x", None, "x", "y"]).dictionary_encode(),
            "fb": pa.array([b"ab", None, b"cd", b"ef"], pa.binary(2)),
            "n": pa.nulls(4),
            "t": pa.array([1, None, 2, 3], pa.timestamp("us")),
            "big": pa.array(["a", None, "", "d"], pa.large_string()),
        }
    )
    expected = blocks.digest(table)
    around = pa.concat_tables([table.take(pa.array([2, 3, 0, 1])), table, table])
    for same_rows in (
        pa.concat_tables([table.slice(0, 1), table.slice(1, 0), table.slice(1)]),
        around.slice(4, 4),
        around.combine_chunks().slice(4, 4),
        table.take(pa.array([0, 1, 2, 3])),
        table.replace_schema_metadata({"written": "by somebody"}),
        pickle.loads(pickle.dumps(table)),
    ):
        assert blocks.digest(same_rows) == expected
    seen = {expected}
    for other in (
        table.slice(0, 3),
        table.select(table.column_names[::-1]),
        table.rename_columns(["z", *table.column_names[1:]]),
        table.set_column(1, "i", table.column("i").cast(pa.uint64())),
        table.set_column(1, "i", pa.array([None, 1, 3, 4])),
        *(
            table.set_column(i, n, table.column(n).take(pa.array([3, 1, 2, 0])))
            for i, n in enumerate(table.column_names)
            if n != "n"
        ),
    ):
        seen.add(blocks.digest(other))
    assert len(seen) == 6 + len(table.column_names) - 1


def test_digest_looks_neither_under_nulls_nor_at_padding() -> None:
    hidden = pa.Array.from_buffers(
        pa.int64(), 2, [pa.py_buffer(b"\x01"), pa.py_buffer(np.array([1, 77]).tobytes())]
    )
    plain = pa.array([1, None], pa.int64())
    assert blocks.digest(pa.table({"a": hidden})) == blocks.digest(pa.table({"a": plain}))
    dtype = np.dtype([("a", "i1"), ("b", "i8")], align=True)
    memory = bytearray([255]) * (3 * dtype.itemsize)
    one, other = np.zeros(3, dtype), np.frombuffer(memory, dtype)
    other["a"], other["b"] = 0, 0
    assert any(memory)
    assert blocks.digest(one) == blocks.digest(other)


@for_all(LISTS, LISTS)
def test_digest_tells_items_apart(one: list[Any], other: list[Any]) -> None:
    equal = blocks.digest(from_items(one)) == blocks.digest(from_items(other))
    assert equal == (same(one, other) and len(one) == len(other)) or has_nan(one)


def has_nan(value: Any) -> bool:
    return "nan" in repr(value).lower() or "nat" in repr(value).lower()


def test_digest_of_objects_is_of_their_content() -> None:
    shared = "".join(["sh", "ared"])
    twice, apart = [shared, shared], ["shared", "".join(["share", "d"])]
    assert pickle.dumps(twice) != pickle.dumps(apart)
    assert digest_of(twice) == digest_of(apart)
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    assert digest_of(Plain(x=1, y=shared)) == digest_of(Plain(x=1, y="shared"))
    assert digest_of(Plain(x=1)) != digest_of(Plain(x=2))
    assert digest_of(uuid.UUID(int=1)) == digest_of(uuid.UUID(int=1))
    assert digest_of(collections.OrderedDict(a=1)) != digest_of(collections.OrderedDict(a=2))
    assert digest_of(collections.Counter("aab")) == digest_of(collections.Counter("aba"))
    assert digest_of(math.sin) != digest_of(math.cos)
    cycle: list[Any] = [1]
    cycle.append(cycle)
    other: list[Any] = [1]
    other.append(other)
    assert digest_of(cycle) == digest_of(other)
    distinct = [1, 1.0, True, "1", b"1", (1,), [1], None, {1}, frozenset({1}), np.int64(1), 1j]
    distinct += ["\ud800", np.longdouble(1), np.array([1]), pa.table({"a": [1]})]
    assert len({digest_of(value) for value in distinct}) == len(distinct)
    with pytest.raises(TypeError, match="pickle"):
        digest_of(value for value in [1])


def digest_of(value: Any) -> bytes:
    b = np.empty(1, object)
    b[0] = value
    return blocks.digest(b)


def test_digest_of_sets_is_the_same_in_every_process() -> None:
    program = (
        "from clamor_ray.collection.data import blocks;"
        "print(blocks.digest(blocks.from_items([set('abcdefgh'), frozenset(('x', 'y')), 'a'])))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
