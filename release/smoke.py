"""Does an installed clamor-ray work? Run it by its environment's Python, not in the tree:

    python smoke.py

One Ray node is started: an array is put, a task reads it, a transaction changes it, a task reads it
again. The last line has the versions. It ends with another status than 0 if something differs.
"""

from __future__ import annotations

import os
import platform

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import numpy as np
import ray

import clamor_ray as clamor

ROWS = 20_000
STARTS = 4  # on a busy machine Ray gives its first node up after 30 s


def start_ray() -> None:
    """A node of its own, also where another cluster of this user runs."""
    for left in reversed(range(STARTS)):
        try:
            ray.init("local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
            return
        except Exception as failure:
            ray.shutdown()
            if not left or "timed out" not in str(failure):
                raise
            print(f"{failure} Once more.", flush=True)


def main() -> None:
    start_ray()
    session = clamor.init()
    rows = np.random.default_rng(0).random((ROWS, 16))
    table = clamor.put(rows)

    @clamor.remote
    def total(table: np.ndarray, ids: np.ndarray) -> float:
        return float(table[ids].sum())

    ids = np.arange(0, ROWS, 97)
    before = ray.get(total.remote(table, ids), timeout=120)
    assert np.isclose(before, rows[ids].sum()), before
    with clamor.update(table) as writable:
        writable[ids[5]] += 1
    after = ray.get(total.remote(table, ids), timeout=120)
    assert np.isclose(after - before, 16), (before, after)
    assert table.version == 1, table.version
    trap = session.trap
    clamor.shutdown(force=True)
    ray.shutdown()
    print(
        f"works: clamor-ray {clamor.__version__}, ray {ray.__version__}, numpy {np.__version__}, "
        f"python {platform.python_version()}, {platform.machine()}, trap {trap}"
    )


if __name__ == "__main__":
    main()
