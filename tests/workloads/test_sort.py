"""The sort workload: its pure parts against Python's own sort, and runs over a cluster."""

from __future__ import annotations

import io
import itertools
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from rich.console import Console

import clamor_ray as clamor
from clamor_ray.workloads import sort as workload
from clamor_ray.workloads.cli import observe, tasks
from clamor_ray.workloads.data import records
from tests.conftest import ClamorCluster

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

# Few different bytes: keys that are equal, and equal in their first eight bytes, are the rule.
ROWS = arrays(
    np.uint8,
    st.tuples(st.integers(0, 60), st.just(records.RECORD_BYTES)),
    elements=st.sampled_from([0, 1, 255]),
    fill=st.just(0),
)


def keys(rows: Any) -> list[bytes]:
    return [bytes(row[: records.KEY_BYTES]) for row in rows]


def drawn(n: int, seed: int = 1) -> Any:
    rows = np.empty((n, records.RECORD_BYTES), np.uint8)
    records.fill(rows, seed)
    return rows


# ---------------------------------------------------------------- pure parts


@PATIENT
@given(ROWS)
def test_order_is_that_of_the_keys_as_bytes_and_stable(rows: Any) -> None:
    expected = sorted(range(len(rows)), key=keys(rows).__getitem__)
    assert records.order(records.keys_of(rows)).tolist() == expected


def test_bytes_that_compare_unlike_signed_or_little_endian_numbers() -> None:
    rows = np.zeros((4, records.RECORD_BYTES), np.uint8)
    rows[0, 0] = 255
    rows[1, 7] = 255
    rows[2, 9] = 255
    rows[3, 8] = 1
    assert records.order(records.keys_of(rows)).tolist() == [2, 3, 1, 0]


@PATIENT
@given(ROWS, st.integers(1, 6), st.data())
def test_cuts_send_every_record_to_the_partition_of_its_key(
    rows: Any, n_partitions: int, data: st.DataObject
) -> None:
    sample = data.draw(ROWS.filter(lambda found: len(found) >= n_partitions))
    splitters = records.splitters(records.keys_of(sample), n_partitions)
    assert len(splitters.high) == n_partitions - 1
    limits = [
        high.to_bytes(8, "big") + low.to_bytes(2, "big")
        for high, low in zip(splitters.high.tolist(), splitters.low.tolist(), strict=True)
    ]
    assert limits == sorted(limits)
    in_order = rows[records.order(records.keys_of(rows))]
    cuts = records.cuts(records.keys_of(in_order), splitters)
    assert cuts[0] == 0
    assert cuts[-1] == len(rows)
    for number, (begin, end) in enumerate(itertools.pairwise(cuts)):
        assert begin <= end
        for key in keys(in_order[begin:end]):
            assert number == 0 or limits[number - 1] <= key
            assert number == n_partitions - 1 or key < limits[number]


def test_splitters_make_parts_of_about_equal_size() -> None:
    rows = drawn(40_000)
    in_order = records.keys_of(rows[records.order(records.keys_of(rows))])
    sample = records.keys_of(rows[: workload.SAMPLES * 10])
    sizes = np.diff(records.cuts(in_order, records.splitters(sample, 10)))
    assert sizes.max() < 1.4 * sizes.mean()
    with pytest.raises(ValueError, match="3 keys does not make 4"):
        records.splitters(records.keys_of(rows[:3]), 4)
    with pytest.raises(ValueError, match="at least 1"):
        records.splitters(records.keys_of(rows), 0)


@PATIENT
@given(st.lists(st.integers(0, 20), max_size=8), st.integers(1, 15))
def test_batches_cover_all_rows_in_order(sizes: list[int], most: int) -> None:
    groups = list(records.batches(sizes, most))
    rows = [
        (number, row)
        for group in groups
        for number, begin, end in group
        for row in range(begin, end)
    ]
    assert rows == [(number, row) for number, size in enumerate(sizes) for row in range(size)]
    lengths = [sum(end - begin for _, begin, end in group) for group in groups]
    assert all(length == most for length in lengths[:-1])
    assert all(0 < length <= most for length in lengths)


def test_no_batches_of_nothing() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        list(records.batches([1], 0))


@PATIENT
@given(ROWS, st.randoms(use_true_random=False))
def test_the_checksum_is_of_the_records_and_not_of_their_order(rows: Any, random: Any) -> None:
    places = list(range(len(rows)))
    random.shuffle(places)
    before = records.checksum(rows)
    assert records.checksum(rows[places]) == before
    if len(rows):
        changed = rows.copy()
        row, column = random.randrange(len(rows)), random.randrange(records.RECORD_BYTES)
        changed[row, column] ^= 4
        assert records.checksum(changed) != before
        assert records.checksum(rows[1:]) != before


def test_the_checksum_of_many_is_that_of_their_parts() -> None:
    rows = drawn(50_000)
    parts = [records.checksum(part) for part in (rows[:7], rows[7:30_000], rows[30_000:])]
    assert records.checksum(rows) == sum(parts) % (1 << 64)
    assert records.checksum(rows[::2][:1000]) == records.checksum(rows[::2][:1000].copy())


def test_two_swapped_words_and_two_equal_records_are_noticed() -> None:
    rows = drawn(1000)
    before = records.checksum(rows)
    swapped = rows.copy()
    swapped[5, 20:24], swapped[5, 40:44] = rows[5, 40:44], rows[5, 20:24]
    assert records.checksum(swapped) != before
    doubled = rows.copy()
    doubled[3] = doubled[4]
    assert records.checksum(doubled) != before


def test_records_are_the_same_for_the_same_seed() -> None:
    rows = drawn(70_000)
    assert np.array_equal(drawn(70_000), rows)
    assert not np.array_equal(drawn(70_000, seed=2), rows)
    assert len(np.unique(records.keys_of(rows).high)) == 70_000  # also where one draw ends
    seen: list[int] = []
    records.fill(rows, 1, seen.append)
    assert seen == [1 << 16, 70_000]


def parts_of(rows: Any, *at: int) -> list[records.Summary]:
    return [records.summarize(part) for part in np.split(rows, list(at))]


def test_the_check_accepts_what_is_sorted() -> None:
    rows = drawn(500)
    before = records.checksum(rows)
    in_order = rows[records.order(records.keys_of(rows))]
    records.check(parts_of(in_order, 0, 100, 100, 450), 500, before)
    records.check([], 0, 0)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda rows: np.concatenate([rows[:50], rows[51:52], rows[50:51], rows[52:]]), "record"),
        (lambda rows: np.concatenate([rows[100:200], rows[:100], rows[200:]]), "begins with less"),
        (lambda rows: rows[:-1], "499 records came out, and 500"),
        (lambda rows: rows[[0, *range(499)]], "checksum"),
    ],
)
def test_the_check_says_what_is_wrong(wrong: Any, message: str) -> None:
    rows = drawn(500)
    in_order = rows[records.order(records.keys_of(rows))]
    with pytest.raises(records.WrongOrder, match=message):
        records.check(parts_of(wrong(in_order), 100, 300), 500, records.checksum(rows))


def test_a_key_that_differs_in_its_last_byte_is_out_of_order() -> None:
    rows = np.zeros((3, records.RECORD_BYTES), np.uint8)
    rows[:, 9] = [1, 3, 2]
    assert records.summarize(rows).unsorted == 2
    assert records.summarize(rows[:2]).unsorted == -1


def test_windows_leave_room_for_all_tasks_of_a_node() -> None:
    assert workload.window_records(0, 2) == workload.WINDOW_BYTES // 100
    assert workload.window_records(1 << 40, 2) == workload.WINDOW_BYTES // 100
    assert workload.window_records(4 << 20, 2) == (1 << 20) // 100
    assert workload.window_records(1, 64) == 1


@pytest.mark.parametrize(("n", "partitions"), [(1000, 1), (1001, 2), (10_000, 10)])
def test_partitions_of_a_job(n: int, partitions: int) -> None:
    assert workload.SortJob(n, 100_000).n_partitions == partitions


# ------------------------------------------------------------- command line


def test_the_table_has_a_line_per_step() -> None:
    out = io.StringIO()
    cost = observe.Cost(12, 5 << 20, 1280, 256, 2)
    line = workload.SortStep("merge", 2.0, 7, cost)
    workload.print_steps(Console(file=out, width=80), 10**9, [line])
    (found,) = (text for text in out.getvalue().splitlines() if "merge" in text)
    assert re.sub(" +", " ", found).strip() == "merge 7 2.00 500 12 5.0 MiB 1.0 MiB 8.0 KiB"


# ------------------------------------------------------------------ cluster


def stages() -> tuple[workload.Stages, io.StringIO]:
    out = io.StringIO()
    return workload.Stages(Console(file=out, width=120)), out


@pytest.mark.parametrize(
    ("n_records", "partition_bytes"),
    [(20_000, 300_000), (1000, 1 << 20), (40, 100)],  # the last: a record each, some get none
)
def test_sort_on_two_nodes(
    clamor_cluster: ClamorCluster, n_records: int, partition_bytes: int
) -> None:
    job = workload.SortJob(n_records, partition_bytes, seed=4)
    before = {info.region for info in clamor.variables()}
    where, out = stages()
    lines = workload.run(job, where)
    assert [(line.name, line.tasks) for line in lines] == [
        (name, job.n_partitions) for name in ("runs", "merge", "check")
    ]
    assert "checking in" in out.getvalue()
    assert {info.region for info in clamor.variables()} <= before  # all were freed


def test_the_result_is_what_numpy_sorts(clamor_cluster: ClamorCluster) -> None:
    rows = drawn(5000)
    rows[:, 1:9] = 7  # most keys are equal, and nearly equal
    ref = clamor.put(rows)
    parts = workload.sort(ref, 4, 1, workload.Steps(stages()[0]))
    found = np.concatenate([part.ref.get()[: part.n] for part in parts])
    # Stable in every run, and runs are merged in their order.
    expected = rows[np.argsort(np.array(keys(rows), "V10"), kind="stable")]
    np.testing.assert_array_equal(found, expected)
    for part in parts:
        clamor.free(part.ref)
    clamor.free(ref)


def test_a_lost_record_is_noticed(
    clamor_cluster: ClamorCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build(job: workload.SortJob, done: Any = None) -> Any:
        ref, before = real(job)
        return ref, before + 1

    real = workload.build
    monkeypatch.setattr(workload, "build", build)
    with pytest.raises(records.WrongOrder, match="checksum"):
        workload.run(workload.SortJob(1000, 50_000), stages()[0])


def test_a_copy_is_of_all_rows_whatever_the_window(clamor_cluster: ClamorCluster) -> None:
    rows = drawn(300)
    ref = clamor.put(rows)
    value: Any = ref.get()
    for window in (1, 7, 300, 1000):
        got = tasks._copy([value[10:20], value[5:5], value[100:]], window)
        np.testing.assert_array_equal(got, np.concatenate([rows[10:20], rows[100:]]))
    clamor.free(ref)
