"""Sparse logistic regression against a parameter server of Ray actors (Clamor 7.1.2, fig. 7).

Nodes in network namespaces, each behind a link shaped by `tc tbf`, eight workers on each. Rows of
the Criteo schema, the same on both sides, with the same ids (by frequency), the same homes and the
same arithmetic; all sides take turns, and their weights are compared. The peer is
`peers/actor_ps.py`: shards on the nodes, each worker pulls and pushes each id once, with ids that
travel ("sent") or that the shards know ("kept"), or all of a node by way of an actor there
("node"). The fastest counts: actor_ps_speedup is over that one.

Cases: "1e7", "1e8" and "1e9" have so many parameters in all and the proportions of Clamor's figure
7: every feature has as many values, all as likely, and each worker 1.25 rows for each. "zipf"
draws from Criteo's columns, scaled to 10^7 values, by Zipf (1.1): there a parameter that a node
touches is touched by about two of its eight workers, in the others by nearly six. The cases with a
number touch the same parameters: they show what a variable costs of which most is never touched.

actor_ps_speedup   time of an iteration with the actors / with us, of medians.
memory_ratio       most that a node's page server held of the model (cached and home bytes, beyond
                   what it held before) / the bytes of the parameters that the node's rows touch, 4
                   each, the worst node. `block_memory_ratio` is the same over the bytes of the
                   4 KiB blocks that these lie on; `memory_ratio_with_history` has in it what homes
                   keep of old versions (up to CLAMOR_HISTORY_BYTES) and of commits on their way.

The summary's figures are the worst of all cases; each case has its own beside. Lines
before it say what each link carried in each round, with Ray's own messages, and what page servers
fetched.

Needs root.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from bench.drivers.sparse_driver import Case
from bench.hot_pages import link_rates
from bench.support import common
from bench.support.common import emit, note
from bench.support.namespaces import records_of, with_links

EVEN_VALUES_PER_ROW = 1 / 1.25


def cases_of(names: Sequence[str], rows: int, iterations: int, rounds: int) -> list[Case]:
    """The cases by their names; see the file's head.

    Args:
        rows: of each worker.
    """
    found = []
    for name in names:
        if name == "zipf":
            found.append(Case(name, 10**7, 10**7, rows, 1.1, False, iterations, rounds))
        else:
            n_values = 39 * round(rows * EVEN_VALUES_PER_ROW)
            found.append(
                Case(name, int(float(name)), n_values, rows, 0.0, True, iterations, rounds)
            )
    return found


def driver_lines(lab: Any, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """What the driver says, each line with what the links carried since the one before."""
    asked = json.dumps([dataclasses.asdict(case) for case in cases])
    with lab.start([sys.executable, "-m", "bench.drivers.sparse_driver", asked]) as driver:
        yield from with_links(lab, records_of(driver, "sparse_lr"))


def figures(lines: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each case; the first round of each side does not count."""
    found: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(line["case"] for line in lines):
        of_case = [line for line in lines if line["case"] == name]
        seconds: dict[str, list[float]] = {}
        carried: dict[str, list[float]] = {}
        for line in of_case:
            if line.get("round", -1) >= 0:
                seconds.setdefault(line["side"], []).extend(line["seconds"])
                busiest = max(max(node) for node in line["link_out_in"])
                carried.setdefault(line["side"], []).append(busiest / len(line["seconds"]))
        medians = {side: statistics.median(each) for side, each in seconds.items()}
        ours = medians.pop("clamor")
        best = min(medians, key=lambda side: medians[side])
        memory = next(line["memory"] for line in of_case if "memory" in line)
        found[name] = {
            "actor_ps_speedup": medians[best] / ours,
            **{f"speedup_over_{side}": each / ours for side, each in medians.items()},
            "iteration_s": ours,
            "link_bytes_ratio": statistics.median(carried[best])
            / max(1.0, statistics.median(carried["clamor"])),
            "memory_ratio": memory["of_parameters"],
            "block_memory_ratio": memory["of_blocks"],
            "memory_ratio_with_history": memory["all_of_parameters"],
        }
    return found


def worst(of_cases: dict[str, dict[str, float]]) -> dict[str, float]:
    """The summary's figures."""
    return {
        "actor_ps_speedup": min(each["actor_ps_speedup"] for each in of_cases.values()),
        "memory_ratio": max(each["memory_ratio"] for each in of_cases.values()),
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench sparse_lr", description=__doc__)
    parser.add_argument("--small", action="store_true", help="2 nodes, 2 workers, 2,000 rows each")
    parser.add_argument("--cases", help="some of 1e7,1e8,1e9,zipf (all)")
    parser.add_argument("--nodes", type=int, help="how many (4)")
    parser.add_argument("--workers", type=int, help="of each node (8)")
    parser.add_argument("--rows", type=int, help="of each worker (40000)")
    parser.add_argument("--rate", default="100mbit", help="of each link, for tc (100mbit)")
    parser.add_argument("--iterations", type=int, help="of a round (3)")
    parser.add_argument("--rounds", type=int, help="of each side (3)")
    options = parser.parse_args(arguments)
    small = options.small
    cases = cases_of(
        (options.cases or ("1e7,zipf" if small else "1e7,1e8,1e9,zipf")).split(","),
        options.rows or (2000 if small else 40_000),
        options.iterations or (2 if small else 3),
        options.rounds or (1 if small else 3),
    )
    n_nodes = options.nodes or (2 if small else 4)

    import clamor_ray as clamor
    from tests.support.lab import lab_unavailable, netns_cluster

    if reason := lab_unavailable("netns"):
        raise SystemExit(f"bench: sparse_lr cannot run here: {reason}")
    environment = common.environment(library=clamor.__version__, bench="sparse_lr")
    note(f"starting {n_nodes} nodes")
    with netns_cluster(
        n_nodes,
        num_cpus=options.workers or (2 if small else 8),
        object_store_memory=1 << 30,
        rate=options.rate,
    ) as lab:
        rates = link_rates(lab, small)
        lines = []
        for line in driver_lines(lab, cases):
            if "trap" in line:
                environment["environment"].update(trap=line["trap"], rate=options.rate)
                emit(environment)
                emit({"link_bytes_per_s": rates})
            elif "case" in line:
                emit(line)
                lines.append(line)
    of_cases = figures(lines)
    common.summary({**worst(of_cases), **of_cases})
    return 0
