"""Programs whose partitions move, and whose nodes come and go (Canary, figs 12, 14). Needs root.

Raylets in network namespaces, each behind a link shaped by `tc tbf`. Tasks of rounds sleep, for a
time that is proportional to their work: so nodes that share this machine's cores do not slow each
other down, and what is measured is who waits for whom. Each executor has one thread a node. Rounds
are those of k-means: a value goes to all tasks, and what they answer to one.

straggler            seconds of a round / an undisturbed one, of four nodes. One of them becomes
                     slow: its tasks sleep `--factor` times as long. `at_once`: rounds until the
                     first partition moves; `after`: when `clamor.schedule.stragglers` moves no
                     more. `best` is the least that whole partitions allow, by arithmetic: with one
                     slow node of four the rest has more to do.
migrate_ms           milliseconds from the order until a task runs at the new place, beyond those of
                     the link. The order is the return of a scheduling function in the controller.
                     Included: what is left of a task that runs then (0.5 ms at most), the map's new
                     step to workers, pickling, the way, and storing. `one` partition; `eight` of
                     one host at once to the others, until the last of them runs. The link: raw TCP
                     of the same bytes between the same hosts, once before each, their median.
                     Connections are there already: `first` is what makes them. `stopped`: how long
                     a partition had no task. `by_driver`: of one, from `job.move` in the driver,
                     the link's time with it.
elastic              `speedup`: rounds a second with 4 nodes / with 2, before and behind them.
                     `beyond_s`: from `scale()` to the first round of the full rate, without the
                     start of processes (`start_s`: until `scale()` returns) and without the time
                     of the links for what moves. `gone_s`: from `scale()` back to 2 until the
                     processes have ended.
controller_messages  each second while nothing moves, of four workers, by kind: what they say to the
                     controller, and what it says to them.

Each with the least and the most of all repetitions.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from bench.drivers.program_moves_driver import EIGHT, Options
from bench.support import common
from bench.support.namespaces import runs_of

DRIVER = "bench.drivers.program_moves_driver"
HOSTS, SMALL_HOSTS = 8, 4
RUNS = ("migrate", "straggler", "elastic")


def spread(name: str, values: Sequence[float]) -> dict[str, float]:
    return {
        name: statistics.median(values),
        f"{name}_min": min(values),
        f"{name}_max": max(values),
    }


def straggler(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of lines as the driver prints them."""
    ratios: dict[str, float] = {"best": runs[0]["best_ratio"]}
    for when in ("at_once", "after"):
        ratios |= spread(when, [run[f"{when}_s"] / run["before_s"] for run in runs])
    return ratios


def migrate_ms(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of lines as the driver prints them."""
    found: dict[str, float] = {}
    for name, n in (("one", 1), ("eight", EIGHT)):
        mine = [run for run in runs if run["partitions"] == n]
        # What slows one stream down is the machine, not the link.
        link_ms = statistics.median(run["link_ms"] for run in mine[1:])
        first, *rest = [run["total_ms"] - link_ms for run in mine]
        found |= spread(name, rest) | {f"{name}_first": first}
        found[f"{name}_stopped"] = statistics.median(run["stopped_ms"] for run in mine[1:])
        found[f"{name}_link"] = link_ms
    # The first comes from where it was put at first.
    back = [run["back_s"] for run in runs if run["back_s"] is not None and run["repetition"]]
    return found | {"by_driver": 1e3 * statistics.median(back)}


def elastic(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of lines as the driver prints them."""
    beyond = [run["full_s"] - run["began_s"] - run["link_s"] for run in runs]
    return {
        **spread("speedup", [statistics.mean(run["two_s"]) / run["four_s"] for run in runs]),
        **spread("beyond_s", beyond),
        **spread("start_s", [run["began_s"] for run in runs]),
        **spread("gone_s", [run["gone_s"] for run in runs]),
        "link_s": statistics.median(run["link_s"] for run in runs),
    }


def messages(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of lines as the driver prints them. Kinds that came before, and not then, are 0."""
    kinds = {kind for run in runs for kind in run["messages"]}
    return {
        kind: statistics.median(run["messages"].get(kind, 0.0) for run in runs)
        for kind in sorted(kinds)
    }


def figures(runs: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of all lines of the driver."""
    of: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        of.setdefault(run["run"], []).append(run)
    found = {}
    if "straggler" in of:
        found["straggler"] = straggler(of["straggler"])
    if "migrate" in of:
        found["migrate_ms"] = migrate_ms(of["migrate"])
    if "elastic" in of:
        found["elastic"] = elastic(of["elastic"])
        found["controller_messages"] = messages(of["elastic"])
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench program_moves", description=__doc__)
    parser.add_argument("--small", action="store_true", help="4 hosts, few partitions, once")
    parser.add_argument("--rate", default="1gbit", help="of each link, for tc (1gbit)")
    parser.add_argument("--repetitions", type=int, help="of stragglers, and of scaling (3)")
    parser.add_argument("--moves", type=int, help="of one partition, and of eight (15)")
    parser.add_argument("--kib", type=int, help="of a partition that moves (1024)")
    parser.add_argument("--work-ms", type=float, default=10.0, help="of a task (10)")
    parser.add_argument("--partitions", type=int, help="of rounds, on each of four nodes (32)")
    parser.add_argument("--factor", type=float, default=1.5, help="of the slow node (1.5)")
    parser.add_argument("--ratio", type=float, default=1.02, help="of stragglers() (1.02)")
    parser.add_argument("--rounds", type=int, help="of which a median is taken (15)")
    parser.add_argument("--only", choices=RUNS, action="append", help="one of them")
    given = parser.parse_args(arguments)
    small = given.small
    options = Options(
        hosts=SMALL_HOSTS if small else HOSTS,
        repetitions=given.repetitions or (1 if small else 3),
        moves=given.moves or (2 if small else 15),
        partition_bytes=(given.kib or (64 if small else 1024)) << 10,
        work_s=given.work_ms / 1e3,
        partitions=given.partitions or (4 if small else 32),
        factor=given.factor,
        ratio=given.ratio,
        rounds=given.rounds or (5 if small else 15),
        stable_s=2.0 if small else 10.0,
        only=given.only or RUNS,
    )
    common.summary(figures(runs_of("program_moves", DRIVER, options, options.hosts, given.rate)))
    return 0
