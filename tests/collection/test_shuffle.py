"""Keys, hashes, order, partitions and combining, against plain Python."""

from __future__ import annotations

import datetime
import decimal
import fractions
import functools
import math
import operator
import subprocess
import sys
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import strategies as st

from clamor_ray import errors
from clamor_ray.collection.data import blocks, combine, hashes, keys, shuffle
from clamor_ray.collection.data.blocks import Columns, from_items, items
from tests.support.collection_items import SMALL_KEYS, for_all, lists_of_one_kind, norm, same

KEYS = lists_of_one_kind(SMALL_KEYS)


def codes(values: list[Any]) -> list[int]:
    return [int(code) for code in shuffle.hash_codes(from_items(values))]


def test_equal_keys_of_any_type_have_one_hash() -> None:
    ones = [1, 1.0, True, np.int32(1), np.uint64(1), np.float32(1), decimal.Decimal(1), np.True_]
    ones += [fractions.Fraction(1), 1 + 0j]
    assert len({codes([one])[0] for one in ones}) == 1
    assert len(set(codes(ones))) == 1
    for equal in (
        [0.0, -0.0, 0],
        [math.nan, np.float32("nan"), -math.nan],
        [2**63, 2.0**63, np.uint64(2**63)],
        [2**70, 2.0**70],
        [2**64 - 1, np.uint64(2**64 - 1)],
        ["a", np.str_("a")],
        [(1, "a"), (1.0, "a")],
        [frozenset({1, 2}), frozenset({2.0, 1})],
        [decimal.Decimal("0.5"), 0.5, fractions.Fraction(1, 2)],
        [datetime.datetime(2020, 1, 1), np.datetime64("2020-01-01T00:00:00", "s")],
    ):
        assert len({codes([one])[0] for one in equal} | set(codes(equal))) == 1, equal


def test_text_has_one_hash_however_it_is_kept() -> None:
    texts = ["", "a", "a\0b", "é", "a longer one", "a"]
    expected = codes(texts)
    assert len(set(expected)) == 5
    for column in (
        pa.array(texts),
        pa.array(texts, pa.large_string()),
        pa.array(texts).dictionary_encode(),
        pa.chunked_array([texts[:2], [], texts[2:]]),
        pa.array(["x", *texts])[1:],
    ):
        table = pa.table({"a": column})
        assert hashes.codes(keys.key_columns(table, "a")).tolist() == expected
    assert shuffle.hash_codes(np.array(texts)).tolist() == expected


@for_all(lists_of_one_kind(SMALL_KEYS), st.integers(0, 20))
def test_hashes_do_not_depend_on_the_neighbours(values: list[Any], cut: int) -> None:
    whole = codes(values)
    assert whole == codes(values[:cut]) + codes(values[cut:])
    assert whole == [codes([value])[0] for value in values]
    by_key: dict[Any, int] = {}
    for value, code in zip(values, whole, strict=True):
        assert by_key.setdefault(norm(value), code) == code


def test_hashes_are_the_same_in_every_process() -> None:
    program = (
        "from clamor_ray.collection.data import blocks, shuffle; import datetime;"
        "print(shuffle.hash_codes(blocks.from_items(['a', b'b', ('c', 1), frozenset('xyz'),"
        " datetime.time(3), 1.5, None, 7, 2**80])).tolist())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1
    assert found.pop().count(",") == 8


def test_known_hashes() -> None:
    """Pinned: collections that were written by an older run are read by a newer one."""
    assert codes([0, 1]) == [0, 6238072747940578789]
    assert codes(["a", "ab"]) == [14581546973621404032, 945097358387287480]
    assert codes(["", "a"]) == [0, codes([b"a"])[0]]


@for_all(KEYS, st.integers(1, 5))
def test_partition_by_hash(values: list[Any], n: int) -> None:
    parts = shuffle.partition_by_hash(from_items(values), None, n)
    assert len(parts) == n
    where: dict[Any, int] = {}
    for number, part in enumerate(parts):
        for item in items(part):
            assert where.setdefault(norm(item), number) == number
    kept = [[item for item in values if where[norm(item)] == number] for number in range(n)]
    for part, expected in zip(parts, kept, strict=True):
        assert same([norm(item) for item in items(part)], [norm(item) for item in expected])


def test_hash_partitions_are_about_equal() -> None:
    for b in (np.arange(10000), from_items([str(i) for i in range(10000)]), np.arange(10000) / 7):
        sizes = [blocks.n_items(part) for part in shuffle.partition_by_hash(b, None, 10)]
        assert sum(sizes) == 10000
        assert min(sizes) > 850


def test_partition_by_column_field_or_function() -> None:
    table = pa.table({"a": [1, 2, 1, None], "b": ["x", "y", "x", "z"], "l": [[1], [2], [1], []]})
    pairs = Columns((np.array([1, 2, 1, 3]), table))
    for b, key, of in (
        (table, "a", lambda row: row["a"]),
        (table, ["a", "b"], lambda row: (row["a"], row["b"])),
        (table, "l", lambda row: tuple(row["l"])),
        (table, lambda row: row["b"], lambda row: row["b"]),
        (pairs, 0, lambda pair: pair[0]),
        (pairs, [0], lambda pair: pair[0]),
    ):
        parts = shuffle.partition_by_hash(b, key, 3)
        rows = [list(items(part)) for part in parts]
        assert sum(map(len, rows)) == 4
        found = [{of(row) for row in part} for part in rows]
        assert sum(map(len, found)) == len(set().union(*found))
    with pytest.raises(errors.MissingColumnError, match=r"no column 'c'.*'a', 'b'"):
        shuffle.partition_by_hash(table, "c", 2)


def test_a_key_that_cannot_be_hashed_is_named() -> None:
    for values in ([[1, 2], [3]], [{"a": 1}, {"b": 2}], [1, {2}], [(1, [2]), (3, [4])]):
        b = from_items(values)
        for function in (shuffle.distinct_items, lambda b: shuffle.partition_by_hash(b, None, 2)):
            with pytest.raises(TypeError, match="cannot be a key"):
                function(b)


ODD_COLUMNS = {
    "halves": lambda: pa.array(np.array([1.5, 2], np.float16)),
    "halves and null": lambda: pa.array([1.5, None], pa.float16()),
    "times of day": lambda: pa.array([datetime.time(1), None]),
    "booleans": lambda: pa.array([None, True]),
    "unsigned": lambda: pa.array([2**63, None], pa.uint64()),
    "bytes of one width": lambda: pa.array([b"a", None], pa.binary(1)),
    "views": lambda: pa.array(["a", None], pa.string_view()),
    "milliseconds": lambda: pa.array([86400000, None], pa.date64()),
    "days": lambda: pa.array([1, None], pa.date32()),
    "zoned": lambda: pa.array([1000, None], pa.timestamp("ns", "UTC")),
    "nanoseconds": lambda: pa.array([1, None], pa.timestamp("ns")),
    "durations": lambda: pa.array([1, None], pa.duration("s")),
    "decimals": lambda: pa.array([decimal.Decimal("1.5"), None]),
    "structs": lambda: pa.array([{"a": 1}, {"a": 2}]),
    "structs and null": lambda: pa.array([{"a": 1}, None]),
    "lists": lambda: pa.array([[1], None]),
    "maps": lambda: pa.array([[("a", 1)], None], pa.map_(pa.string(), pa.int8())),
    "fixed lists": lambda: pa.array([[1, 2], None], pa.list_(pa.int8(), 2)),
    "tensors": lambda: pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(8).reshape(2, 4)),
    "dictionary": lambda: pa.array(["b", None]).dictionary_encode(),
    "run ends": lambda: pa.RunEndEncodedArray.from_arrays([1, 2], [5, 6]),
    "nulls": lambda: pa.nulls(2),
}


@pytest.mark.parametrize("name", ODD_COLUMNS)
def test_columns_of_every_type_are_keys(name: str) -> None:
    once = pa.table({"a": ODD_COLUMNS[name](), "b": [1, 2]})
    keys_there = 1 if name == "nulls" else 2
    table = pa.concat_tables([once, once])
    rows = sorted(map(repr, items(table)))
    assert blocks.n_items(shuffle.distinct_items(table.select(["a"]))) == keys_there
    parts = shuffle.partition_by_hash(table, "a", 3)
    assert sorted(repr(row) for part in parts for row in items(part)) == rows
    assert sum(blocks.n_items(shuffle.distinct_items(p.select(["a"]))) for p in parts) == keys_there
    joined = shuffle.join_items(table, once.rename_columns(["a", "c"]), "a", "left")
    assert joined.num_rows == 4
    assert joined.column("c").null_count == 2 * once.column("a").null_count
    for descending in (False, True):
        ordered = shuffle.sort_items(table, "a", descending)
        assert sorted(map(repr, items(ordered))) == rows
        nulls = ordered.column("a").is_null().to_pylist()
        assert nulls == sorted(nulls)
    counted = shuffle.finish(shuffle.partial(table, "count", "a"))
    assert counted == 4 - table.column("a").null_count


# -- order


def sort_key(item: Any) -> tuple[int, Any]:
    if isinstance(item, tuple):
        return (0, tuple(map(sort_key, item)))
    return (2, 0) if item is None else (1, 0) if item != item else (0, item)


def in_order(values: list[Any], descending: bool) -> list[int]:
    """Places sorted by Python, None and NaN last in either direction, also inside tuples."""

    def compare(one: Any, other: Any) -> int:
        if isinstance(one, tuple):
            return next((c for c in map(compare, one, other) if c), 0)
        (of, x), (than, y) = sort_key(one), sort_key(other)
        if of != than:
            return of - than
        return (int(x > y) - int(x < y)) * (-1 if descending else 1)

    by_value = functools.cmp_to_key(compare)
    return sorted(range(len(values)), key=lambda place: by_value(values[place]))


@for_all(lists_of_one_kind(), st.booleans())
def test_sort(values: list[Any], descending: bool) -> None:
    tagged = Columns((from_items(values), np.arange(len(values))))
    ordered = list(items(shuffle.sort_items(tagged, 0, descending)))
    assert [place for _, place in ordered] == in_order(values, descending)
    assert same([item for item, _ in ordered], [values[place] for _, place in ordered])


@for_all(lists_of_one_kind(), st.integers(1, 5), st.booleans())
def test_ranges_are_in_order(values: list[Any], n: int, descending: bool) -> None:
    b = from_items(values)
    samples = [shuffle.sample_keys(part, None, 4, 7) for part in (b, blocks.EMPTY)]
    bounds = shuffle.boundaries(samples, n, descending)
    assert blocks.n_items(bounds) == (n - 1 if values else 0)
    parts = shuffle.partition_by_range(b, None, bounds, descending)
    assert len(parts) == blocks.n_items(bounds) + 1
    ordered = [shuffle.sort_items(part, None, descending) for part in parts]
    expected = [norm(values[place]) for place in in_order(values, descending)]
    assert [norm(item) for part in ordered for item in items(part)] == expected


def test_ranges_of_many_items_are_about_equal() -> None:
    values = np.random.default_rng(1).normal(size=20000)
    bounds = shuffle.boundaries([shuffle.sample_keys(values, None, 2000, 3)], 8)
    sizes = [blocks.n_items(part) for part in shuffle.partition_by_range(values, None, bounds)]
    assert min(sizes) > 1800


def test_sort_by_columns_each_in_its_direction() -> None:
    table = pa.table({"a": [1, 2, 1, None], "b": ["x", "y", "z", "w"]})
    assert shuffle.sort_items(table, ["a", "b"], [False, True]).column("b").to_pylist() == [
        "z",
        "x",
        "y",
        "w",
    ]
    assert shuffle.sort_items(table, "a", True).column("b").to_pylist() == ["y", "x", "z", "w"]
    with pytest.raises(ValueError, match="1 values of descending"):
        shuffle.sort_items(table, ["a", "b"], [True])
    with pytest.raises(TypeError, match="int, str cannot be sorted"):
        shuffle.sort_items(from_items([1, "a"]), None)


# -- combining


@for_all(KEYS)
def test_distinct(values: list[Any]) -> None:
    firsts: dict[Any, Any] = {}
    for value in values:
        firsts.setdefault(norm(value), value)
    assert same(list(items(shuffle.distinct_items(from_items(values)))), list(firsts.values()))


def test_the_first_of_equal_items_stays() -> None:
    other_nan = np.array([0x7FF8000000000001], np.uint64).view(np.float64)
    assert len(shuffle.distinct_items(np.concatenate([other_nan, [math.nan]]))) == 1
    for values, kept in (
        ([1, True, 1.0, 2], [1, 2]),
        ([True, 1, 0], [True, 0]),
        ([math.nan, "a", -math.nan, None, None], [math.nan, "a", None]),
    ):
        assert same(list(items(shuffle.distinct_items(from_items(values)))), kept)
    mixed = list(items(shuffle.sort_items(from_items([2, math.nan, None, 1]))))
    assert same(mixed, [1, 2, math.nan, None])
    none = hashes.codes(pa.chunked_array([pa.array(["a", None])]))[1]
    assert {int(none)} == set(codes([None])) == set(codes([None, 1])[:1])


def test_distinct_rows() -> None:
    table = pa.table({"a": [1, 1, 2], "b": [[1], [1], [1]], "c": [{"x": 1}, {"x": 1}, None]})
    assert shuffle.distinct_items(table).to_pylist() == table.slice(1).to_pylist()
    rows = np.array([[0.0, 1], [-0.0, 1], [1, 0], [math.nan, 1], [math.nan, 1]])
    assert len(shuffle.distinct_items(rows)) == 3
    structured = np.array([(1, b"a"), (1, b"a"), (2, b"a")], [("x", int), ("y", "S2")])
    assert shuffle.distinct_items(structured).tolist() == [(1, b"a"), (2, b"a")]
    nothing = pa.table({"a": [1, 2]}).select([])
    assert shuffle.distinct_items(nothing).num_rows == 1


def fold(pairs: list[tuple[Any, Any]], how: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for key, value in pairs:
        key = norm(key)
        found[key] = how(found[key], value) if key in found else value
    return found


VALUES = st.one_of(
    st.just("ints").map(lambda _: st.integers(-(2**63), 2**63 - 1)),
    st.just("floats").map(lambda _: st.floats(-1e9, 1e9)),
    st.just("nan").map(lambda _: st.sampled_from([1.0, math.nan, -1.0])),
    st.just("large").map(lambda _: st.integers(-(2**70), 2**70)),
    st.just("mixed").map(lambda _: st.one_of(st.booleans(), st.integers(-9, 9))),
)


@for_all(KEYS, st.data(), st.sampled_from([operator.add, min, max, lambda a, b: a + b]))
def test_combine_is_a_left_fold(of: list[Any], data: st.DataObject, how: Any) -> None:
    values = data.draw(st.lists(data.draw(VALUES), min_size=len(of), max_size=len(of)))
    pairs = list(zip(of, values, strict=True))
    expected = fold(pairs, how)
    found = {norm(k): v for k, v in items(shuffle.combine_by_key(from_items(pairs), how))}
    assert list(found) == list(expected)
    assert same(
        [norm(float(v)) for v in found.values()], [norm(float(v)) for v in expected.values()]
    )
    if all(type(value) is int for value in values):
        assert same(list(found.values()), list(expected.values()))


@pytest.mark.parametrize("how", [operator.add, min, max])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.longdouble])
def test_zeros_keep_the_sign_that_a_left_fold_gives(how: Any, dtype: Any) -> None:
    for n in (1, 2, 3, 40):  # NumPy takes several at once
        for signs in ([-0.0], [0.0], [-0.0, 0.0], [0.0, -0.0], [-0.0, -0.0], [-1.0, 1.0, -0.0]):
            values = np.array((signs * n)[:n], dtype)
            of = np.array([5, 7]).repeat(n)
            both = np.concatenate([values, -values])
            found = combine.combine_by_key(Columns((of, both)), how).fields[1]
            expected = [functools.reduce(how, part.tolist()) for part in (values, -values)]
            assert found.dtype == dtype
            assert found.tolist() == expected
            assert np.signbit(found).tolist() == np.signbit(expected).tolist(), (n, signs)


def test_zeros_keep_their_sign_in_vectors_and_complex_numbers() -> None:
    of = np.array([1, 1, 2])
    for width in (2, 100):
        vectors = np.tile([[0.0, -0.0], [-0.0, -0.0], [-0.0, 0.0]], width)
        for how in ("min", "max", "sum"):
            found = combine.combine_by_key(Columns((of, vectors)), how).fields[1]
            assert np.signbit(found[:, :2]).tolist() == [[False, True], [True, False]], how
    of_complex = combine.combine_by_key(
        Columns((np.array([1, 1]), np.full(2, complex(-0.0, -0.0)))), "sum"
    )
    assert np.signbit([of_complex.fields[1][0].real, of_complex.fields[1][0].imag]).all()


def test_names_of_combining() -> None:
    pairs = from_items([("a", 1.0), ("b", math.nan), ("a", 3.0), ("b", 1.0)])
    for how, expected in (
        ("sum", [4.0, math.nan]),
        ("min", [1.0, math.nan]),
        ("max", [3.0, math.nan]),
        ("count", [2, 2]),
        (np.minimum, [1.0, math.nan]),
    ):
        found = list(items(shuffle.combine_by_key(pairs, how)))
        assert same(found, list(zip("ab", expected, strict=True)))
    with pytest.raises(ValueError, match="not 'mean'"):
        shuffle.combine_by_key(pairs, "mean")


def test_combine_vectors_and_tuples() -> None:
    rng = np.random.default_rng(0)
    of = rng.integers(0, 5, 300)
    for shape, dtype in (((3,), np.float64), ((100,), np.float32), ((2, 2), np.int64)):
        points = rng.integers(0, 100, (300, *shape)).astype(dtype)
        expected = {k: points[of == k].sum(axis=0) for k in dict.fromkeys(of.tolist())}
        for how in ("sum", np.add, operator.add, lambda a, b: a + b):
            found = dict(items(shuffle.combine_by_key(Columns((of, points)), how)))
            assert list(found) == list(expected)
            for key, total in found.items():
                assert np.array_equal(total, expected[key])
        both = Columns((of, Columns((points, np.ones(300, np.int64)))))
        counted = dict(items(shuffle.combine_by_key(both, "sum")))
        assert counted[int(of[0])][1] == int((of == of[0]).sum())
        assert np.array_equal(counted[int(of[0])][0], expected[int(of[0])])


def test_a_function_that_writes_into_its_argument_does_not_change_the_block() -> None:
    points = np.ones((4, 2))
    b = Columns((np.array([0, 0, 1, 0]), points))
    found = list(items(shuffle.combine_by_key(b, operator.iadd)))
    assert found[0][1].tolist() == [3, 3]
    assert (points == 1).all()


def test_sums_beyond_int64_are_pythons() -> None:
    for values in (np.array([2**62, 2**62, 2**62, -1]), np.array([2**63, 2**63], np.uint64)):
        of = np.zeros(len(values), np.int64)
        (found,) = items(shuffle.combine_by_key(Columns((of, values)), "sum"))
        assert found == (0, sum(values.tolist()))
    (found,) = items(shuffle.combine_by_key(from_items([(1, True), (1, True)]), "sum"))
    assert same(found, (1, 2))


def test_combining_needs_pairs() -> None:
    for values in ([1, 2], [(1, 2), (1, 2, 3)], [[1, 2], [3, 4]], [(1, 2, 3)]):
        with pytest.raises(TypeError, match="works on pairs"):
            shuffle.combine_by_key(from_items(values), "sum")
    assert shuffle.combine_by_key(blocks.EMPTY, "sum") is blocks.EMPTY
