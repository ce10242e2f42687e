"""A table that is larger than its node's memory is made, sorted and scanned (VOLUME, fig. 7).

One raylet in a memory cgroup, which may have M bytes more than it has when it is idle. For tables
of 0.5, 1, 2 and 4 M, each in a cluster of its own:

clamor     variables with spill=True: parts of M / 8 are sorted, then merged
duckdb     tables on disk, CREATE TABLE AS ... ORDER BY, sum
ray_data   map_batches, sort, sum, with an object store of M / 3 that spills

beyond_slowdown   seconds per byte at the largest table / at the smallest, of ours: of the sort and
                  of the first scan after it.
duckdb_speedup, ray_speedup
                  of the largest table that both of them ended with: their seconds / ours, of the
                  sort and of the scan. 0: it did not end with any.

The kernel's page cache is part of M: cgroups of version 1 count it. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Sequence
from typing import Any

from bench.drivers import beyond_cases
from bench.support import common
from bench.support.common import emit, note

SYSTEMS = {
    "clamor": beyond_cases.ours,
    "duckdb": beyond_cases.duckdb,
    "ray_data": beyond_cases.ray_data,
}
FACTORS = (0.5, 1.0, 2.0, 4.0)
SMALL_FACTORS = (0.5, 2.0)
STORE_SHARE = 3
CASE_S = 1800.0


def run_case(system: str, factor: float, memory_bytes: int) -> dict[str, Any]:
    """One table in a cluster of its own. `failed`: why it did not end, if so."""
    import ray

    import clamor_ray as clamor
    from tests.support.lab import local_cluster
    from tests.support.lab.cluster import RAY_HEALTH_CHECK_PERIOD_MS, RAY_IDLE_WORKERS
    from tests.support.lab.memory import memory_group

    n_bytes = int(factor * memory_bytes) // 4096 * 4096
    record: dict[str, Any] = {"system": system, "factor": factor, "n_bytes": n_bytes}
    with contextlib.ExitStack() as stack:
        lab = stack.enter_context(
            local_cluster(
                1,
                num_cpus=2,
                object_store_memory=max(memory_bytes // STORE_SHARE, 80 << 20),
                health_check_period_ms=RAY_HEALTH_CHECK_PERIOD_MS,
                idle_workers=RAY_IDLE_WORKERS,
            )
        )
        record["trap"] = clamor.init().trap
        stack.callback(clamor.shutdown)
        case = ray.remote(SYSTEMS[system]).options(num_cpus=0)
        ray.get(case.remote(1 << 20, memory_bytes), timeout=CASE_S)  # imports, workers
        group = stack.enter_context(memory_group("beyond"))
        group.add([pid for pid in lab.processes(0) if pid != os.getpid()])
        group.leave(memory_bytes)
        try:
            took = ray.get(case.remote(n_bytes, memory_bytes), timeout=CASE_S)
            record |= {f"{name}_s": seconds for name, seconds in took.items()}
        except (ray.exceptions.RayError, clamor.errors.ClamorError) as failure:
            record["failed"] = str(failure).strip().splitlines()[-1][:300]
    return record


def figures(records: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The summary, of all cases."""
    ended = {(r["system"], r["factor"]): r for r in records if "failed" not in r}
    factors = sorted(factor for system, factor in ended if system == "clamor")
    least, most = ended["clamor", factors[0]], ended["clamor", factors[-1]]
    kinds = {"sort": "sort_s", "scan": "scan_s"}
    found = {
        "beyond_slowdown": {
            kind: most[name] / most["n_bytes"] / (least[name] / least["n_bytes"])
            for kind, name in kinds.items()
        }
    }
    for figure, peer in (("duckdb_speedup", "duckdb"), ("ray_speedup", "ray_data")):
        both = [factor for factor in factors if (peer, factor) in ended]
        found[figure] = {
            kind: ended[peer, both[-1]][name] / ended["clamor", both[-1]][name] if both else 0.0
            for kind, name in kinds.items()
        }
    return found


def main(arguments: list[str]) -> int:
    """Runs all cases and prints the summary."""
    parser = argparse.ArgumentParser(prog="python -m bench beyond", description=__doc__)
    parser.add_argument("--small", action="store_true", help="M of 128 MiB, 0.5 and 2 M")
    parser.add_argument("--mib", type=int, help="M (512)")
    parser.add_argument("--factors", help="sizes in M, separated by commas")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="separated by commas")
    options = parser.parse_args(arguments)
    systems = options.systems.split(",")
    if "clamor" not in systems or not set(systems) <= set(SYSTEMS):
        parser.error(f"--systems: clamor, and others of {', '.join(SYSTEMS)}")
    memory_bytes = (options.mib or (128 if options.small else 512)) << 20
    factors: Sequence[float] = SMALL_FACTORS if options.small else FACTORS
    if options.factors:
        try:
            factors = [float(factor) for factor in options.factors.split(",")]
        except ValueError:
            parser.error(f"--factors: numbers, as 0.5,2, and not {options.factors}")

    import clamor_ray as clamor

    environment = common.environment(library=clamor.__version__, bench="beyond")
    environment["environment"]["memory_bytes"] = memory_bytes
    records: list[dict[str, Any]] = []
    for factor in factors:
        for system in systems:
            note(f"{system}: {factor:g} M")
            records.append(run_case(system, factor, memory_bytes))
            if len(records) == 1:
                environment["environment"]["trap"] = records[0]["trap"]
                emit(environment)
            emit(records[-1])
    common.summary(figures(records))
    return 0
