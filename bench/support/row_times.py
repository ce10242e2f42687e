"""What rows cost that something keeps on a disk: each store does the same, and is checked."""

from __future__ import annotations

import statistics
from typing import Any

import numpy as np

from bench.support import common, disk
from bench.support.common import now

SALT = 17
SINGLE_ROWS, MANY_READS, BATCHES = 20_000, 200, 200
ROWS_PER_READ, ROWS_PER_BATCH = 1000, 100
FIGURES = ("put", "row", "rows", "update")


def measure(store: Any, n_rows: int, row_bytes: int) -> dict[str, float]:
    """Seconds of each kind.

    Args:
        store: see `bench.peers.row_stores.RowStore`. Where it has `read_anew`, that is called
            between updates and reads.
        n_rows: of the table, at least 1000.
        row_bytes: a multiple of eight.

    Returns:
        `put_s` of all rows, `row_s` and `rows_s` of one read, `update_s` of one batch (medians).

    Raises:
        WrongData: The store is wrong.
    """
    words = row_bytes // 8
    table = common.make_array(n_rows * row_bytes, SALT).reshape(n_rows, words)
    rng = np.random.default_rng(4)
    disk.settle()
    began = now()
    store.put(table)
    put_s = now() - began

    ids = rng.integers(0, n_rows, min(SINGLE_ROWS, 10 * n_rows))
    numbers = ids.tolist()
    began = now()
    got = [store.row(number) for number in numbers]
    row_s = (now() - began) / len(numbers)
    common.verify("rows one by one", np.stack(got), table[ids])

    many = [rng.integers(0, n_rows, ROWS_PER_READ) for _ in range(MANY_READS)]
    many_s = []
    for ids in many:
        began = now()
        found = store.rows(ids)
        many_s.append(now() - began)
        common.verify("many rows", found, table[ids])

    disk.settle()
    updates_s = []
    for number in range(BATCHES):
        ids = rng.choice(n_rows, ROWS_PER_BATCH, replace=False)
        fresh = common.make_array(ROWS_PER_BATCH * row_bytes, 100 + number).reshape(-1, words)
        table[ids] = fresh
        began = now()
        store.update(ids, fresh)
        updates_s.append(now() - began)
    if hasattr(store, "read_anew"):
        store.read_anew()
    ids = rng.permutation(n_rows)[:ROWS_PER_READ]
    common.verify("after updates", store.rows(ids), table[ids])
    store.close()
    return {
        "put_s": put_s,
        "row_s": row_s,
        "rows_s": statistics.median(many_s),
        "update_s": statistics.median(updates_s),
    }
