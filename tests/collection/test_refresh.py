"""`refresh`: what it computes again, and that it is what computing everything would give."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import clamor_ray as clamor
from clamor_ray import errors
from tests.conftest import ClamorCluster

ROW = 512  # numbers of 8 bytes in a block
N_BLOCKS = 16


@pytest.fixture
def table(clamor_cluster: ClamorCluster) -> Iterator[clamor.GlobalRef[Any]]:
    """Sixteen blocks and more of numbers, whose first block has the pickle stream's neighbours."""
    ref = clamor.put(np.arange(N_BLOCKS * ROW, dtype=float))
    yield ref
    if not ref._freed:
        clamor.free(ref)


def first_of(item: int, table: Any) -> float:
    return float(table[item * ROW])


def change(ref: clamor.GlobalRef[Any], *blocks: int) -> None:
    with clamor.update(ref) as x:
        for block in blocks:
            x[block * ROW] += 1000


def runs(collection: clamor.DataCollection) -> int:
    """Tasks that a refresh runs."""
    collection.refresh()
    return collection._refreshed


def test_only_partitions_that_read_a_changed_block(table: Any) -> None:
    found = clamor.from_items(range(8), partitions=8).map(first_of, table).execute()
    before = found.collect()
    change(table, 3)
    assert found.collect() == before  # it is kept, and the version is the old one
    assert runs(found) == 1
    after = found.collect()
    assert after[3] == before[3] + 1000
    assert [*after[:3], *after[4:]] == [*before[:3], *before[4:]]
    assert runs(found) == 0


def test_explain_says_what_a_refresh_would_run(
    table: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    items = clamor.from_items(range(8), partitions=8).options(speculation=False)
    found = items.map(first_of, table).execute()
    found.explain()
    before = capsys.readouterr().out
    assert "dirty" not in before
    change(table, 3, 5, 12)  # of which two were read
    found.explain()
    assert "8 of 8 partitions (2 dirty)" in capsys.readouterr().out
    found.lineage()
    assert "8 partitions, 2 dirty" in capsys.readouterr().out
    found.refresh()
    found.explain()
    after = capsys.readouterr().out
    assert "dirty" not in after
    assert "ran      10 attempts" in after  # two of eight again
    assert re.findall(r"\d+ blocks", after) == re.findall(r"\d+ blocks", before)


def test_a_change_that_no_task_read_runs_nothing(table: Any) -> None:
    found = clamor.from_items(range(4), partitions=4).map(first_of, table).execute()
    change(table, 9, 10)
    assert runs(found) == 0


def test_the_first_refresh_computes_all(table: Any) -> None:
    found = clamor.from_items(range(4), partitions=4).map(first_of, table)
    assert runs(found) == 4


def test_many_commits_between(table: Any) -> None:
    found = clamor.from_items(range(8), partitions=8).map(first_of, table).execute()
    for block in (1, 5, 1, 12):
        change(table, block)
    assert runs(found) == 2
    change(table, 5)
    assert runs(found) == 1
    assert found.collect()[5] == 5 * ROW + 2000


def test_descendants_run_and_their_neighbours_do_not(table: Any) -> None:
    kept = clamor.from_items(range(6), partitions=6).map(first_of, table).cache()
    doubled = kept.map(lambda x: 2 * x).cache()
    last = doubled.zip(kept).map(lambda pair: pair[0] + pair[1]).execute()
    change(table, 2)
    assert runs(last) == 3
    assert last.collect() == [3.0 * (ROW * i + 1000 * (i == 2)) for i in range(6)]
    assert kept.collect()[2] == 2 * ROW + 1000


def test_a_frozen_reference_stays(table: Any) -> None:
    """Listing 3: the distances of before stay those of before."""
    items = clamor.from_items(range(4), partitions=2)
    old = items.map(first_of, table.snapshot())
    change(table, 1)
    new = items.map(first_of, table)
    gain = old.zip(new).map(lambda pair: pair[1] - pair[0]).execute()
    assert gain.collect() == [0.0, 1000.0, 0.0, 0.0]
    change(table, 1, 3)
    assert runs(gain) == 2
    assert gain.collect() == [0.0, 2000.0, 0.0, 1000.0]


def test_an_operator_reads_what_was_there_when_it_was_written_down(table: Any) -> None:
    items = clamor.from_items(range(2), partitions=1)
    old = items.map(first_of, table)
    change(table, 1)
    new = items.map(first_of, table)
    assert old.zip(new).collect() == [(0.0, 0.0), (float(ROW), ROW + 1000.0)]


def test_a_reference_in_a_closure(table: Any) -> None:
    found = clamor.from_items(range(4), partitions=4).map(lambda i: table.get()[i * ROW]).execute()
    change(table, 2)
    assert runs(found) == 1
    assert found.collect()[2] == 2 * ROW + 1000


def test_an_object_that_was_opened_stays_at_its_version(table: Any) -> None:
    opened = table.get()
    found = clamor.from_items(range(4), partitions=4).map(first_of, opened).execute()
    (variable,) = found._node.variables  # it has gone as a reference, and not as its bytes
    assert not variable.moves
    change(table, 2)
    assert runs(found) == 0
    assert found.collect()[2] == 2 * ROW


def test_gather_counts(table: Any) -> None:
    def rows(batch: Any, ref: Any) -> Any:
        return clamor.gather(ref, batch * ROW)

    found = clamor.from_items(range(8), partitions=4).map_batches(rows, table).execute()
    change(table, 5)
    assert runs(found) == 1
    assert found.collect()[5] == 5 * ROW + 1000


def test_a_view_that_is_returned_counts(table: Any) -> None:
    def part(batch: Any, table: Any) -> Any:
        return table[int(batch[0]) * ROW : (int(batch[0]) + 1) * ROW]

    found = clamor.from_items(range(4), partitions=4).map_batches(part, table).execute()
    change(table, 1)
    assert runs(found) == 1
    assert found.collect()[ROW] == ROW + 1000


def test_a_hash_map(clamor_cluster: ClamorCluster) -> None:
    keys = np.arange(50_000)
    table = clamor.HashMap.build(keys, keys * 2)
    found = clamor.from_numpy(np.arange(0, 50_000, 5000), partitions=10).lookup(table).execute()
    with clamor.update(table) as t:
        t[15_000] = -1
    assert runs(found) <= 2  # two keys may share a block
    assert found.collect() == [key * 2 if key != 15_000 else -1 for key in range(0, 50_000, 5000)]


def test_a_variable_inside_its_reference(clamor_cluster: ClamorCluster) -> None:
    small = clamor.put(np.ones(3))
    found = clamor.from_items(range(3), partitions=3).map(lambda i, x: i + x[0], small).execute()
    with clamor.update(small) as x:
        x[0] = 5
    assert runs(found) == 3
    assert found.collect() == [5.0, 6.0, 7.0]


def test_a_variable_that_grew(clamor_cluster: ClamorCluster) -> None:
    ref = clamor.zeros(4 * ROW, capacity=64 * ROW)
    found = clamor.from_items(range(2), partitions=2).map(lambda i, x: len(x), ref).execute()
    with clamor.update(ref, grow_to=8 * ROW) as x:
        x[-1] = 1
    assert runs(found) == 2
    assert found.collect() == [8 * ROW] * 2


def test_a_join_of_kept_sides(table: Any) -> None:
    """Of different numbers of partitions: each side has pieces of its own."""
    left = clamor.from_items(range(8), partitions=4).map(lambda i, t: (i, float(t[i * ROW])), table)
    right = clamor.from_items(range(8), partitions=2).map(lambda i: (i, -i))
    joined = left.cache().join(right.cache()).execute()
    expected = [(i, (float(i * ROW), -i)) for i in range(8)]
    assert sorted(joined.collect()) == expected
    assert runs(joined) == 0
    change(table, 3)
    assert runs(joined) == 1 + 1 + 4  # the map, its pieces, and who gets any of them
    expected[3] = (3, (3.0 * ROW + 1000, -3))
    assert sorted(joined.collect()) == expected


def test_a_collection_never_mixes_versions(table: Any) -> None:
    """Another collection's refresh moves what both are made of."""
    read = clamor.from_items(range(4), partitions=4).map(first_of, table)
    kept = read.map(lambda x: x).cache()
    assert kept.take(1) == [0.0]
    change(table, 0, 3)
    read.map(lambda x: -x).refresh()
    assert kept.collect() == [1000.0, float(ROW), 2.0 * ROW, 3.0 * ROW + 1000]


def test_an_arrow_array_over_a_view_counts(table: Any) -> None:
    def part(i: int, table: Any) -> Any:
        import pyarrow as pa

        return pa.array(table[i * ROW : (i + 1) * ROW])

    found = clamor.from_items(range(4), partitions=4).map(part, table).execute()
    change(table, 2)
    assert runs(found) == 1
    assert found.collect()[2][0].as_py() == 2 * ROW + 1000


def test_a_long_loop(table: Any) -> None:
    found = clamor.from_items(range(2), partitions=1).map(first_of, table).cache()
    for _ in range(150):
        found = found.map(lambda x: x + 1)
        found = found.map(lambda x: x - 1).cache() if _ % 10 == 0 else found
    assert found.execute().collect() == [135.0, ROW + 135.0]
    change(table, 1)
    found.refresh()
    assert found.collect() == [135.0, ROW + 1135.0]


def test_a_freed_variable_further_up(table: Any) -> None:
    gone = clamor.put(np.ones(10_000))
    kept = clamor.from_items(range(2), partitions=2).map(lambda i, x: i + int(x[0]), gone).execute()
    clamor.free(gone)
    last = kept.map(first_of, table).cache()
    assert last.take(1) == [float(ROW)]
    assert last.collect() == [float(ROW), 2.0 * ROW]


def test_shuffled_partitions(table: Any) -> None:
    pairs = clamor.from_items(range(12), partitions=6).map(
        lambda i, table: (i % 3, float(table[i * ROW])), table
    )
    sums = pairs.reduce_by_key("sum", partitions=3).execute()
    change(table, 4)
    assert runs(sums) == 4  # one of six before the shuffle, and the three that it goes to
    expected = {k: float(sum(range(k, 12, 3)) * ROW + 1000 * (k == 1)) for k in range(3)}
    assert dict(sums.collect()) == expected


def test_a_freed_variable_is_said(table: Any) -> None:
    found = clamor.from_items(range(2), partitions=1).map(first_of, table).execute()
    clamor.free(table)
    with pytest.raises(errors.FreedError):
        found.refresh()


def test_unpersist_forgets(table: Any) -> None:
    found = clamor.from_items(range(4), partitions=4).map(first_of, table).execute()
    found.unpersist()
    change(table, 0)
    assert runs(found) == 4
    assert found.collect()[0] == 1000


# ------------------------------------------------------------------ random programs and updates

Step = tuple[str, int]


class Variables(NamedTuple):
    """What programs read: a table, what it was at the beginning, a hash map, a small array."""

    table: Any
    then: Any
    words: Any
    small: Any


STEPS: dict[str, Callable[[clamor.DataCollection, int, Variables], clamor.DataCollection]] = {
    "read": lambda c, k, v: c.map(
        lambda x, table: int(x) * 31 % 1009 + int(table[(int(x) + k) % N_BLOCKS * ROW]), v.table
    ),
    "gather": lambda c, k, v: c.map_batches(
        lambda b, ref: [
            int(x) + int(clamor.gather(ref, np.array([(int(x) * k) % N_BLOCKS * ROW]))[0])
            for x in b
        ],
        v.table,
    ),
    "frozen": lambda c, k, v: c.map(
        lambda x, table: int(x) + int(table[(int(x) + k) % N_BLOCKS * ROW]), v.then
    ),
    "filter": lambda c, k, v: c.filter(lambda x: int(x) % (k + 2) != 0),
    "cache": lambda c, k, v: c.map(lambda x: int(x) + k).cache(),
    "flat": lambda c, k, v: c.flat_map(lambda x: [int(x)] * (int(x) % 3)),
    "zip": lambda c, k, v: c.zip(c.map(lambda x: int(x) + k)).map(lambda p: p[0] ^ p[1]),
    "sort": lambda c, k, v: c.sort(),
    "repartition": lambda c, k, v: c.repartition(k + 1),
    "distinct": lambda c, k, v: c.distinct(),
    "join": lambda c, k, v: (
        c.map(lambda x: (int(x), 1))
        .cache()
        .join(c.map(lambda x: (int(x), k)).repartition(k + 1).cache())
        .map(lambda pair: int(pair[0]) + pair[1][0] + pair[1][1])
    ),
    "closure": lambda c, k, v: c.map(lambda x: int(x) + int(v.table.get()[int(x) % 16 * ROW])),
    "view": lambda c, k, v: c.map_batches(
        lambda b, t: t[k * ROW : k * ROW + len(b)].astype(int) if len(b) else b, v.table
    ),
    "lookup": lambda c, k, v: c.map(lambda x: int(x) % 64).lookup(v.words),
    "inline": lambda c, k, v: c.map(lambda x, s: int(x) + int(s[0]), v.small),
    "by_key": lambda c, k, v: (
        c.map(lambda x: (int(x) % (k + 2), int(x)))
        .reduce_by_key("sum")
        .map(lambda pair: int(pair[0]) * 7 + int(pair[1]))
    ),
}


def build(steps: list[Step], variables: Variables, cached: bool) -> clamor.DataCollection:
    found = clamor.from_items(range(24), partitions=6)
    for name, k in steps:
        found = STEPS[name](found, k, variables)
        if not cached:
            found._node.keep = False
    return found


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    steps=st.lists(st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 3)), max_size=5),
    updates=st.lists(
        st.sets(st.integers(0, N_BLOCKS - 1), min_size=1, max_size=3), min_size=1, max_size=3
    ),
)
def test_it_is_what_computing_everything_gives(
    table: Any, steps: list[Step], updates: list[set[int]]
) -> None:
    steps = [("read", 1), *steps]
    words = clamor.HashMap.build(np.arange(64), np.arange(64) * 3)
    variables = Variables(table, table.snapshot(), words, clamor.put(np.zeros(2)))
    found = build(steps, variables, cached=True).execute()
    for blocks in updates:
        change(table, *blocks)
        with clamor.update(words) as m:
            m[min(blocks)] = 1000
        if len(blocks) > 1:
            with clamor.update(variables.small) as small:
                small[0] += 1
        found.refresh()
        plain = build(steps, variables, cached=False)  # the same, written down now
        assert found.collect() == plain.collect()
