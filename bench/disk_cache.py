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
import statistics
from typing import Any

from bench.drivers.disk_cache_driver import Options
from bench.support import common
from bench.support.namespaces import runs_of


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
    driver = "bench.drivers.disk_cache_driver"
    common.summary(figures(runs_of("disk_cache", driver, options, 2, given.rate)))
    return 0
