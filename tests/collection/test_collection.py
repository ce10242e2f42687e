"""Operators and actions on a cluster, against plain Python."""

from __future__ import annotations

import collections
import functools
import operator
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import ray
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._protocol.attempt_record import AttemptRecord
from clamor_ray._session import process_sessions
from clamor_ray.collection.plan.pins import Pins
from tests.conftest import ClamorCluster, until

pytestmark = pytest.mark.usefixtures("clamor_cluster")


def numbers(n: int = 20, partitions: int = 4) -> clamor.DataCollection:
    return clamor.from_items(range(n), partitions=partitions)


# ------------------------------------------------------------------ narrow


def test_nothing_runs_before_an_action(tmp_path: Path) -> None:
    def mark(x: int) -> int:
        (tmp_path / str(x)).touch()
        return x

    marked = numbers(3, 1).map(mark).filter(bool)
    assert not list(tmp_path.iterdir())
    assert marked.collect() == [1, 2]
    assert len(list(tmp_path.iterdir())) == 3


def test_narrow_operators_are_one_task_for_each_partition() -> None:
    def pid(x: int) -> int:
        import ray

        return hash(ray.get_runtime_context().get_task_id())

    tasks = numbers(8, 2).map(lambda x: x).map(pid).flat_map(lambda t: [t, t]).collect()
    assert len(tasks) == 16
    assert len(set(tasks)) == 2


def test_map_filter_flat_map() -> None:
    found = numbers().map(lambda x, by: x * by, 3).filter(lambda x: x % 2)
    assert found.flat_map(lambda x: range(x % 4)).collect() == [
        y for x in range(0, 60, 3) if x % 2 for y in range(x % 4)
    ]


def test_map_batches_gets_whole_partitions() -> None:
    assert numbers().map_batches(lambda b: b[:1]).collect() == [0, 5, 10, 15]
    table = pa.table({"a": [1, 2, 3], "b": ["x", "y", "z"]})
    rows = clamor.from_arrow(table, partitions=2)
    doubled = rows.map_batches(lambda b: {"a": b["a"] * 2})
    assert doubled.collect() == [{"a": 2}, {"a": 4}, {"a": 6}]
    arrow = rows.map_batches(lambda t: t.append_column("c", t["a"]), batch_format="pyarrow")
    assert arrow.to_arrow().column_names == ["a", "b", "c"]
    frame = rows.map_batches(lambda f: f[f["a"] > 1], batch_format="pandas")
    assert [row["a"] for row in frame.collect()] == [2, 3]


def test_rows_of_arrays_and_tables() -> None:
    rows = clamor.from_numpy(np.arange(12.0).reshape(6, 2), partitions=3)
    assert rows.map(lambda row: float(row.sum())).collect() == [1, 5, 9, 13, 17, 21]
    assert np.array_equal(rows.sum(), [30, 36])
    table = clamor.from_arrow(pa.table({"a": [1, 2], "b": [3, 4]}))
    assert table.map(lambda row: row["a"] * row["b"]).collect() == [3, 8]
    assert table.sum("a") == 3
    assert table.sum(["a", "b"]) == {"sum(a)": 3, "sum(b)": 7}


def test_zip() -> None:
    left = numbers(6, 3)
    assert left.zip(left.map(lambda x: -x)).map(lambda p: p[0] - p[1]).collect() == [
        0, 2, 4, 6, 8, 10,
    ]  # fmt: skip
    three = left.zip(left, left).collect()
    assert three == [(x, x, x) for x in range(6)]


def test_zip_of_unequal_partitions() -> None:
    with pytest.raises(errors.LengthMismatchError, match="3 and 2 partitions"):
        numbers(6, 3).zip(numbers(6, 2))
    with pytest.raises(errors.LengthMismatchError, match=r"3 and 1 items .* partition 0"):
        numbers(6, 2).zip(numbers(5, 2).filter(lambda x: x != 1)).collect()


def test_lookup() -> None:
    table = clamor.HashMap.build(np.arange(100), np.arange(100) ** 2)
    assert numbers(4, 2).lookup(table).collect() == [0, 1, 4, 9]
    assert clamor.from_items([1, 1000]).lookup(table, -1).collect() == [1, -1]
    rows = clamor.from_arrow(pa.table({"k": [3, 5], "x": ["a", "b"]}), partitions=1)
    found = rows.lookup(table, on="k", into="square").collect()
    assert found == [{"k": 3, "x": "a", "square": 9}, {"k": 5, "x": "b", "square": 25}]
    with pytest.raises(errors.MissingKeyError, match=r"1000.*partition 0"):
        clamor.from_items([1000]).lookup(table).collect()
    with pytest.raises(errors.MissingColumnError, match="'nope'"):
        rows.lookup(table, on="nope").collect()
    words = clamor.HashMap.build(np.array([b"one", b"two"]), np.array([1, 2]))
    assert clamor.from_items(["two", "one"]).lookup(words).collect() == [2, 1]


# ------------------------------------------------------------------ wide


def test_reduce_by_key() -> None:
    words = clamor.from_items(
        ["the", "cat", "and", "the", "dog", "and", "the", "owl"], partitions=3
    )
    counts = words.map(lambda w: (w, 1)).reduce_by_key("sum", partitions=2)
    assert counts.num_partitions == 2
    assert sorted(counts.collect()) == [("and", 2), ("cat", 1), ("dog", 1), ("owl", 1), ("the", 3)]
    longest = words.map(lambda w: (len(w), w)).reduce_by_key(lambda a, b: max(a, b))
    assert longest.collect() == [(3, "the")]
    assert dict(words.map(lambda w: (w, 1)).reduce_by_key(operator.add).collect())["the"] == 3
    with pytest.raises(ValueError, match="median"):
        words.reduce_by_key("median")


def test_join() -> None:
    left = clamor.from_items([(k, k * 10) for k in range(5)], partitions=2)
    right = clamor.from_items([(k, str(k)) for k in range(3, 7)], partitions=3)
    assert sorted(left.join(right).collect()) == [(3, (30, "3")), (4, (40, "4"))]
    outer = dict(left.join(right, how="full_outer").collect())
    assert outer[0] == (0, None)
    assert outer[6] == (None, "6")
    assert len(outer) == 7
    tables = clamor.from_arrow(pa.table({"k": [1, 2], "a": ["x", "y"]}))
    others = clamor.from_arrow(pa.table({"k": [2, 3], "b": [True, False]}))
    assert tables.join(others, on="k").collect() == [{"k": 2, "a": "y", "b": True}]
    with pytest.raises(errors.MissingColumnError):
        tables.join(others, on="a").collect()
    with pytest.raises(ValueError, match="sideways"):
        left.join(right, how="sideways")


def test_sort() -> None:
    values = np.random.default_rng(1).integers(0, 1000, 3000)
    found = clamor.from_numpy(values, partitions=6).sort(partitions=4)
    assert found.collect() == sorted(values.tolist())
    assert (
        clamor.from_numpy(values).sort(descending=True).take(3) == sorted(values.tolist())[:-4:-1]
    )
    words = clamor.from_items(["bb", "a", "ccc", "dd"], partitions=2)
    assert words.sort(len).collect() == ["a", "bb", "dd", "ccc"]
    table = clamor.from_arrow(pa.table({"a": [3, 1, 2]}), partitions=3)
    assert table.sort("a").collect() == [{"a": 1}, {"a": 2}, {"a": 3}]


def test_repartition_and_distinct() -> None:
    found = numbers(10, 4).repartition(3)
    assert found.map_batches(lambda b: [len(b)]).collect() == [4, 3, 3]
    assert found.collect() == list(range(10))
    assert numbers(2, 1).repartition(5).collect() == [0, 1]
    assert sorted(clamor.from_items([1, 1, 2, 3, 2], partitions=3).distinct().collect()) == [
        1,
        2,
        3,
    ]
    with pytest.raises(ValueError, match="partitions"):
        numbers().repartition(0)


# ------------------------------------------------------------------ actions


def test_aggregates() -> None:
    n = numbers()
    assert (n.sum(), n.min(), n.max(), n.mean(), n.count()) == (190, 0, 19, 9.5, 20)
    assert n.reduce(operator.add) == 190
    assert n.aggregate(0, lambda s, x: s + x) == 190
    pair = n.aggregate(
        (0, 0), lambda s, x: (s[0] + x, s[1] + 1), lambda a, b: (a[0] + b[0], a[1] + b[1])
    )
    assert pair == (190, 20)
    whole = n.tree_aggregate(np.zeros(3), lambda s, x: s + x, np.add)
    assert np.array_equal(whole, [190] * 3)
    deep = numbers(64, 16).tree_aggregate(0, lambda s, x: s + 1, operator.add, depth=3)
    assert deep == 64


def test_tasks_that_combine_are_in_the_lineage() -> None:
    items = numbers(16, 16)
    assert items.tree_aggregate(0, operator.add, operator.add) == 120
    number = Pins.of(items._node).number

    def combining() -> list[AttemptRecord]:
        packed = process_sessions.current().rpc.attempts_of(number)
        records = [AttemptRecord.of(each) for each in packed]
        return [record for record in records if record.stage == "combine"]

    until(lambda: len(combining()) == 4)
    first = min(combining(), key=lambda record: record.partition)
    assert first.outcome == "done"
    assert first.function == "add"
    assert first.inputs == "4 partial results"
    assert first.node_id
    assert first.start_ns <= first.end_ns


def test_zero_is_not_shared() -> None:
    def add(so_far: list[int], x: int) -> list[int]:
        so_far.append(x)
        return so_far

    assert numbers(6, 3).aggregate([], add, operator.add) == list(range(6))


def test_take_computes_no_more_than_it_must(tmp_path: Path) -> None:
    def mark(x: int) -> int:
        (tmp_path / str(x)).touch()
        return x

    assert numbers(20, 10).map(mark).take(3) == [0, 1, 2]
    assert len(list(tmp_path.iterdir())) == 10  # one partition, then four
    assert numbers().take(0) == []
    assert numbers(3).take(10) == [0, 1, 2]


def test_kept_partitions_are_computed_once(tmp_path: Path) -> None:
    def mark(x: int) -> int:
        with (tmp_path / "log").open("a") as log:
            log.write("x")
        return x

    kept = numbers(4, 2).map(mark).cache()
    assert kept.sum() == 6
    assert kept.map(lambda x: x + 1).sum() == 10
    assert kept.collect() == [0, 1, 2, 3]
    assert (tmp_path / "log").read_text() == "xxxx"
    kept.unpersist()
    assert kept.count() == 4
    assert (tmp_path / "log").read_text() == "x" * 8


def test_to_others(tmp_path: Path) -> None:
    n = numbers(5, 2)
    assert n.to_arrow().to_pydict() == {"item": [0, 1, 2, 3, 4]}
    assert np.array_equal(n.to_numpy(), np.arange(5))
    written = n.write_parquet(str(tmp_path / "out"))
    assert len(written) == 2
    assert clamor.read_parquet(str(tmp_path / "out")).sum() == 10
    with pytest.raises(errors.StorageError, match="overwrite"):
        n.write_parquet(str(tmp_path / "out"))
    dataset = n.to_ray_dataset()
    assert dataset.sum("item") == 10
    assert clamor.from_ray_dataset(dataset).sum() == 10


def test_schema_and_text() -> None:
    assert "int64" in numbers().schema()
    assert clamor.from_items([]).schema() == "empty"
    assert repr(numbers().map(abs)) == "DataCollection(map(abs), 4 partitions)"


def test_who_read_what(clamor_cluster: ClamorCluster) -> None:
    ref = clamor.put(np.zeros(100_000))
    numbers(2, 2).map(lambda i, x: x[i * 5120], ref).collect()
    clamor_cluster.run(lambda x: x[90_000], ref)
    until(lambda: len(clamor.read_report(ref).by) >= 3)
    found = clamor.read_report(ref)
    assert {entry.function for entry in found.by} >= {"<lambda>"}
    assert {11, 176} <= {block for entry in found.by for block in entry.blocks}
    table = clamor.HashMap.build(np.arange(1000), np.arange(1000))
    assert "0 of" in str(clamor.read_report(table)) or "no" in str(clamor.read_report(table))
    with pytest.raises(TypeError, match="GlobalRef"):
        clamor.read_report(3)


def test_long_chains() -> None:
    found = numbers(4, 2)
    for _ in range(200):
        found = found.map(lambda x: x + 1)
    assert found.collect() == [200, 201, 202, 203]
    kept = numbers(4, 2)
    for _ in range(30):
        kept = kept.map(lambda x: x + 1).cache()
    assert kept.collect() == [30, 31, 32, 33]


def test_from_several_threads() -> None:
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        found[i] = numbers().map(lambda x, i: x * i, i).sum()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert found == {i: 190 * i for i in range(4)}


@pytest.mark.parametrize("scheduling", ["locality", "deterministic", "ray"])
def test_every_scheduling_computes_the_same(scheduling: str) -> None:
    assert numbers().options(scheduling=scheduling).map(lambda x: x * x).sum() == 2470


def test_deterministic_scheduling_repeats() -> None:
    def node(batch: Any) -> list[str]:
        return [ray.get_runtime_context().get_node_id()]

    fixed = numbers(8, 8).options(scheduling="deterministic")
    first = fixed.map_batches(node).collect()
    assert first == fixed.map_batches(node).collect()
    assert len(set(first)) == 2


def test_options() -> None:
    with pytest.raises(ValueError, match="'somewhere'"):
        numbers().options(scheduling="somewhere")
    with pytest.raises(TypeError, match="'speed'"):
        numbers().options(speed=1)
    with pytest.raises(ValueError, match="speculation_multiplier"):
        numbers().options(speculation_multiplier=0.5)


# ------------------------------------------------------------------ nothing

EMPTY = {
    "no items": lambda: clamor.from_items([]),
    "empty array": lambda: clamor.from_numpy(np.empty(0)),
    "all filtered": lambda: numbers().filter(lambda x: False),
    "some partitions empty": lambda: numbers().filter(lambda x: x >= 100),
}


@pytest.mark.parametrize("name", EMPTY)
def test_empty_collections_through_every_operator(name: str) -> None:
    empty = EMPTY[name]()
    pairs = empty.map(lambda x: (x, x))
    for found in (
        empty,
        empty.map(lambda x: 1 / 0),
        empty.flat_map(lambda x: [x]),
        empty.filter(bool),
        empty.map_batches(lambda b: b),
        empty.zip(empty),
        empty.lookup(clamor.HashMap.build(np.arange(3), np.arange(3))),
        empty.sort(),
        empty.sort(descending=True, key=lambda x: -x),
        empty.repartition(3),
        empty.distinct(),
        pairs.reduce_by_key("sum"),
        pairs.reduce_by_key(lambda a, b: a),
        pairs.join(pairs),
        pairs.join(pairs, how="full_outer"),
        empty.cache(),
    ):
        assert found.collect() == []
        assert found.count() == 0
    assert empty.sum() == 0
    assert empty.take(3) == []
    assert empty.aggregate(7, operator.add, max) == 7
    assert empty.tree_aggregate(7, operator.add, max) == 7
    assert empty.to_arrow().num_rows == 0
    for action in (empty.min, empty.max, empty.mean, functools.partial(empty.reduce, max)):
        with pytest.raises(errors.EmptyCollectionError):
            action()


def test_some_empty_partitions() -> None:
    found = numbers().filter(lambda x: x in (3, 17))
    assert (found.sum(), found.min(), found.mean()) == (20, 3, 10)
    assert found.sort(descending=True).collect() == [17, 3]
    assert found.map(lambda x: (x % 2, x)).reduce_by_key("sum").collect() == [(1, 20)]


# ------------------------------------------------------------------ any program


def _by_key(pairs: list[tuple[int, int]]) -> list[int]:
    sums: collections.Counter[int] = collections.Counter()
    for key, value in pairs:
        sums[key] += value
    return sorted(key * 100 + value for key, value in sums.items())


PROGRAMS: dict[str, tuple[Any, Any]] = {
    "map": (lambda c: c.map(lambda x: x * 3 - 1), lambda xs: [x * 3 - 1 for x in xs]),
    "filter": (lambda c: c.filter(lambda x: x % 3), lambda xs: [x for x in xs if x % 3]),
    "flat": (
        lambda c: c.flat_map(lambda x: [x] * (x % 3)),
        lambda xs: [x for x in xs for _ in range(x % 3)],
    ),
    "sort": (lambda c: c.sort(), sorted),
    "down": (lambda c: c.sort(descending=True), lambda xs: sorted(xs, reverse=True)),
    "distinct": (lambda c: c.distinct().sort(), lambda xs: sorted(set(xs))),
    "repartition": (lambda c: c.repartition(3), list),
    "zip": (
        lambda c: c.zip(c.map(abs)).map(lambda p: p[0] + p[1]),
        lambda xs: [x + abs(x) for x in xs],
    ),
    "by_key": (
        lambda c: (
            c.map(lambda x: (x % 5, x)).reduce_by_key("sum").map(lambda p: p[0] * 100 + p[1]).sort()
        ),
        lambda xs: _by_key([(x % 5, x) for x in xs]),
    ),
    "cache": (lambda c: c.map(lambda x: x).cache(), list),
}


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    names=st.lists(st.sampled_from(sorted(PROGRAMS)), max_size=5),
    items=st.lists(st.integers(-50, 50), max_size=25),
    partitions=st.integers(1, 5),
)
def test_any_program_is_what_python_says(
    names: list[str], items: list[int], partitions: int
) -> None:
    found, expected = clamor.from_items(items, partitions=partitions), items
    for name in names:
        ours, plain = PROGRAMS[name]
        found, expected = ours(found), plain(expected)
    assert found.collect() == expected
    assert found.count() == len(expected)


def test_a_collection_stays_on_the_driver() -> None:
    with pytest.raises(errors.UnpicklableError, match="zip or join"):
        numbers().map(lambda x, c: x, numbers())
    with pytest.raises(TypeError, match="collect"):
        list(numbers())


def test_more_than_fits_inline(clamor_cluster: ClamorCluster) -> None:
    rows = np.random.default_rng(0).random((40_000, 8))
    found = clamor.from_numpy(rows, partitions=4)
    assert np.allclose(found.sum(), rows.sum(axis=0))
    captured = np.arange(100_000.0)  # the function alone is more than goes with each call
    assert numbers(4, 2).map(lambda i: float(captured[i])).collect() == [0, 1, 2, 3]
