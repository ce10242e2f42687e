"""A working set larger than the cache of the node that reads it, with a disk and without.

Two raylets in network namespaces, behind links shaped by `tc tbf`. A variable is homed on the
first. An actor on the second, whose cache may hold 40% of it, reads it over and over: all of it in
order, and words at random, each by a fault. The first pass counts in no figure.

scan_speedup     time of a pass in order, without the disk / with it
random_speedup   time of a pass of random words, without / with

Each is 1 where the disk is slower than the link: then it is not asked. Needs root.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from typing import Any

from bench.drivers.disk_cache_driver import Options
from bench.support import common
from bench.support.common import emit, note


def figures(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Of lines as the driver prints them."""
    return {
        f"{order}_speedup": _median_s(runs, order, with_disk=False)
        / _median_s(runs, order, with_disk=True)
        for order in ("scan", "random")
    }


def _median_s(runs: list[dict[str, Any]], order: str, *, with_disk: bool) -> float:
    return statistics.median(
        each["seconds"]
        for each in runs
        if (each["order"], each["with_disk"]) == (order, with_disk) and each["number"] > 0
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench disk_cache", description=__doc__)
    parser.add_argument("--small", action="store_true", help="20 MiB, 2 passes")
    parser.add_argument("--mib", type=int, help="of the variable (200)")
    parser.add_argument("--rate", default="1gbit", help="of each link, for tc (1gbit); '': none")
    parser.add_argument("--passes", type=int, help="of each order, after the first (5)")
    parser.add_argument("--touches", type=int, help="random words of a pass (4000)")
    given = parser.parse_args(arguments)
    options = Options(
        mib=given.mib or (20 if given.small else 200),
        passes=given.passes or (2 if given.small else 5),
        touches=given.touches or (400 if given.small else 4000),
    )

    import clamor_ray as clamor
    from tests.support.lab import lab_unavailable, netns_cluster

    if reason := lab_unavailable("netns"):
        raise SystemExit(f"bench: disk_cache cannot run here: {reason}")
    environment = common.environment(library=clamor.__version__, bench="disk_cache")
    note("starting two hosts")
    runs: list[dict[str, Any]] = []
    command = [sys.executable, "-m", "bench.drivers.disk_cache_driver"]
    command.append(json.dumps(dataclasses.asdict(options)))
    with (
        netns_cluster(2, num_cpus=2, object_store_memory=160 << 20, rate=given.rate) as lab,
        lab.start(command) as driver,
    ):
        for line in driver.stdout:
            if not line.startswith("{"):  # Ray prints there too
                sys.stderr.write(line)
                continue
            found = json.loads(line)
            if "trap" in found:
                environment["environment"].update(trap=found["trap"], rate=given.rate)
                emit(environment)
                continue
            emit(found)
            runs.append(found)
        if driver.wait() != 0:
            raise SystemExit("bench: the driver ended with an error")
    common.summary(figures(runs))
    return 0
