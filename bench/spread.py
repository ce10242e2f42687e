"""A variable on one host, and the same spread over all: cold readers, and commits.

Four raylets in network namespaces, each behind a link shaped by `tc tbf`, two readers on each. A
reader reads its own eighth of a variable that no other host has seen. All begin at one moment.

spread_read_speedup   time until all have read, on one home / spread. The links alone allow 4: one
                      home sends six eighths of the variable over its link; of one that is spread
                      each host sends and receives three sixteenths.
many_home_commit      a commit of blocks from all over the variable, from the first host: spread
                      over all hosts / on one other host. Medians of commits in turn.

Needs root.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from bench.drivers.spread_driver import Options
from bench.support import common
from bench.support.namespaces import runs_of


def median_s(runs: list[dict[str, Any]], run: str, home: str) -> float:
    return statistics.median(
        each["seconds"] for each in runs if (each["run"], each["home"]) == (run, home)
    )


def figures(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Of lines as the driver prints them."""
    return {
        "spread_read_speedup": median_s(runs, "read", "one") / median_s(runs, "read", "spread"),
        "many_home_commit": median_s(runs, "commit", "spread") / median_s(runs, "commit", "one"),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench spread", description=__doc__)
    parser.add_argument("--small", action="store_true", help="8 MiB, 5 commits")
    parser.add_argument("--mib", type=int, help="of the variable that is read (512)")
    parser.add_argument("--hosts", type=int, default=4, help="how many (4)")
    parser.add_argument("--rate", default="100mbit", help="of each link, for tc (100mbit)")
    parser.add_argument("--blocks", type=int, default=100, help="of a commit (100)")
    parser.add_argument("--commits", type=int, help="to each of both (40)")
    parser.add_argument("--repetitions", type=int, help="of the reads (3)")
    given = parser.parse_args(arguments)
    options = Options(
        hosts=given.hosts,
        mib=given.mib or (8 if given.small else 512),
        blocks=given.blocks,
        commits=given.commits or (5 if given.small else 40),
        repetitions=given.repetitions or (1 if given.small else 3),
    )
    driver = "bench.drivers.spread_driver"
    common.summary(figures(runs_of("spread", driver, options, options.hosts, given.rate)))
    return 0
