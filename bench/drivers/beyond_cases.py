"""What `beyond` times: a table of random int64 is made, sorted and scanned, in a task.

Each of these runs in a process with little memory. All of them make the same number of values,
write all of the sorted table, and read all of it twice. They check that nothing is missing, and
ours that it is sorted, outside of what is timed.

The sort of ours is what NumPy does with an array that is larger than memory, by a user who knows it
is: it sorts parts that fit, and merges them part by part (as in VOLUME's sort, fig. 7).
"""

from __future__ import annotations

import dataclasses
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

SEED = 7
INDEX = 512  # of each sorted part every so many-th value is kept in memory: one of a block
PART_SHARE = 8  # of the memory
RAY_BLOCK_BYTES = 16 << 20


@dataclasses.dataclass(frozen=True)
class Took:
    """Seconds.

    Args:
        make: until the table is there, not sorted.
        sort: until the sorted one is.
        scan: its sum, the first time.
        scan_again: at once after that.
    """

    make: float
    sort: float
    scan: float
    scan_again: float


def values(n: int, part: int) -> Iterator[Any]:
    """n random numbers, so many at a time."""
    rng = np.random.default_rng(SEED)
    for at in range(0, n, part):
        yield rng.integers(0, 1 << 60, min(part, n - at))


def check(total: int, n: int, part: int) -> None:
    """Whether it is the sum of all of them.

    Raises:
        AssertionError: It is not.
    """
    want = sum(int(each.sum()) for each in values(n, part)) % (1 << 64)
    if total % (1 << 64) != want:
        raise AssertionError(f"the sum of {n} values is {total % (1 << 64)}, and not {want}")


def _runs(source: Any, target: Any, part: int) -> list[tuple[int, int, Any]]:
    """Sorts each part. (begin, end, every INDEX-th value) of each."""
    runs = []
    for begin in range(0, len(source), part):
        run = np.array(source[begin : begin + part])
        run.sort()
        target[begin : begin + len(run)] = run
        runs.append((begin, begin + len(run), run[::INDEX].copy()))
    return runs


def _first_above(table: Any, run: tuple[int, int, Any], cut: int) -> int:
    """The row of a sorted part from which on its values are at least the cut."""
    begin, end, index = run
    near = begin + max(0, int(np.searchsorted(index, cut)) - 1) * INDEX
    return near + int(np.searchsorted(table[near : min(end, near + INDEX + 1)], cut))


def _merge(table: Any, runs: list[tuple[int, int, Any]], out: Any) -> None:
    """Part by part: what lies between two cuts, of every sorted part."""
    sample = np.sort(np.concatenate([index for _, _, index in runs]))
    n_parts = len(runs)
    cuts = sample[np.arange(1, n_parts) * len(sample) // n_parts]
    begins, at = [begin for begin, _, _ in runs], 0
    for number in range(n_parts):
        last = number == n_parts - 1
        ends = [run[1] if last else _first_above(table, run, cuts[number]) for run in runs]
        piece = np.concatenate([table[a:b] for a, b in zip(begins, ends, strict=True)])
        piece.sort(kind="stable")  # sorted runs one after the other: timsort merges them
        out[at : at + len(piece)] = piece
        begins, at = ends, at + len(piece)


def ours(n_bytes: int, memory_bytes: int) -> dict[str, float]:
    """Variables with spill=True."""
    import clamor_ray as clamor

    n, clock = n_bytes // 8, time.perf_counter
    part = min(n, memory_bytes // PART_SHARE // 8)
    room_bytes = n_bytes + (1 << 20)
    began = clock()
    with clamor.build(room_bytes, spill=True) as region:
        table = region.empty(n, np.int64)
        for at, some in enumerate(values(n, part)):
            table[at * part : at * part + len(some)] = some
        source = region.publish(table)
    del table
    made = clock()
    with clamor.build(room_bytes, spill=True) as region:
        table = region.empty(n, np.int64)
        if n == part:
            table[:] = source.get()
            table.sort()
        else:
            runs = _runs(source.get(), table, part)
        ref = region.publish(table)
    del table
    clamor.free(source)
    if n > part:
        with clamor.build(room_bytes, spill=True) as region:
            out = region.empty(n, np.int64)
            _merge(ref.get(), runs, out)
            sorted_ref = region.publish(out)
        del out
        clamor.free(ref)
        ref = sorted_ref
    is_sorted = clock()
    array = ref.get()
    total = int(array.sum())
    scanned = clock()
    array.sum()
    again = clock()
    check(total, n, part)
    last = -1
    for at in range(0, n, part):
        some = array[at : at + part]
        if some[0] < last or not bool((np.diff(some) >= 0).all()):
            raise AssertionError("it is not sorted")
        last = int(some[-1])
    took = Took(made - began, is_sorted - made, scanned - is_sorted, again - scanned)
    return dataclasses.asdict(took)


def duckdb(n_bytes: int, memory_bytes: int) -> dict[str, float]:
    """A table of DuckDB on disk; half of the memory is its own, as its documentation advises."""
    import duckdb
    import pyarrow

    n, clock = n_bytes // 8, time.perf_counter
    part = min(n, memory_bytes // PART_SHARE // 8)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        database = duckdb.connect(os.path.join(folder, "db"))
        database.execute(f"SET memory_limit = '{memory_bytes // 2}B'")
        database.execute(f"SET temp_directory = '{folder}/spilled'")
        database.execute("SET preserve_insertion_order = false")
        began = clock()
        database.execute("CREATE TABLE made (x BIGINT)")
        for some in values(n, part):
            some_rows = pyarrow.table({"x": some})
            database.register("some_rows", some_rows)
            database.execute("INSERT INTO made SELECT x FROM some_rows")
            database.unregister("some_rows")
        made = clock()
        database.execute("CREATE TABLE ordered AS SELECT x FROM made ORDER BY x")
        is_sorted = clock()
        (total,) = database.execute("SELECT sum(x) FROM ordered").fetchone() or (0,)
        scanned = clock()
        database.execute("SELECT sum(x) FROM ordered").fetchone()
        again = clock()
        database.close()
    check(int(total), n, part)
    took = Took(made - began, is_sorted - made, scanned - is_sorted, again - scanned)
    return dataclasses.asdict(took)


def ray_data(n_bytes: int, memory_bytes: int) -> dict[str, float]:
    """A dataset of Ray Data; what its object store has no room for Ray spills."""
    import ray

    n, clock = n_bytes // 8, time.perf_counter
    block = RAY_BLOCK_BYTES // 8

    def random(batch: dict[str, Any]) -> dict[str, Any]:
        rng = np.random.default_rng(int(batch["id"][0]))
        return {"x": rng.integers(0, 1 << 40, len(batch["id"]))}

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    began = clock()
    made_rows = ray.data.range(n, override_num_blocks=max(1, n // block))
    made_rows = made_rows.map_batches(random, batch_size=None).materialize()
    made = clock()
    ordered = made_rows.sort("x").materialize()
    is_sorted = clock()
    total = ordered.sum("x")
    scanned = clock()
    again_total = ordered.sum("x")
    again = clock()
    if ordered.count() != n or total != again_total:
        raise AssertionError(f"{ordered.count()} rows of {n}, sums {total} and {again_total}")
    took = Took(made - began, is_sorted - made, scanned - is_sorted, again - scanned)
    return dataclasses.asdict(took)
