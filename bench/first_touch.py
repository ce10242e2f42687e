"""Some rows of a table on another node, the first time that a node reads it: what comes, and when.

A table of float32 rows is homed on node b. A process on node a reads a share of its rows, random,
sorted or clustered (runs of 32 rows): by `table[ids]` on what `get()` returns, by `clamor.gather`,
by a Python loop over rows, and by `ray.get` of the whole and `table[ids]`. The loop also runs with
fixed page sizes. Each reading is of a table that node a has never seen.

fetch_ratio         bytes that node a's page server received / bytes of the blocks that the rows lie
                    on, of `table[ids]` and gather: the worst up to 10% of the rows.
loop_fetch_ratio    as much for the loop.
index_speedup       `ray.get` and `table[ids]` / `table[ids]` of a global array: the worst from 0.1%
                    to 10%.
loop_ratio          the loop / the loop with the best fixed page size: the worst up to 10%.
present_ratio       `table[ids]` of 1,000 and 100,000 ids, where all blocks are present / the same
                    on a plain array: the worst.
paged_ratio         the same on a plain array of 4 KiB pages, as a cache has: NumPy's own are huge.
scalar_ratio        `table[i, 1]`, likewise.
slice_ratio         `table[i:i + 8]`, likewise.
leak                regions and bytes at homes that are left after 1,000 variables, whose references
                    went through tasks, an actor and nested objects: the sum.
leak_s              how long after the last reference it was so, or LEAK_TIMEOUT_S.

Times are medians of the repetitions. `--link`: the nodes are in network namespaces, each behind a
link of 1 Gbit/s with round trips of 1 ms (needs root).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from bench.drivers.first_touch_driver import Options, cases
from bench.support import common
from bench.support.common import emit
from bench.support.namespaces import records_of

MOST_SHARE = 0.1
RATE = "1gbit"
ROUND_TRIP_MS = 1.0
KIND_OF = {
    **dict.fromkeys(("ids_1000", "ids_100000"), "ids"),
    **dict.fromkeys(("small_pages_1000", "small_pages_100000"), "small"),
}


def figures(records: list[dict[str, Any]]) -> dict[str, float]:
    """Of what was measured; a figure whose ways were left out is left out."""
    times: dict[Any, dict[Any, list[float]]] = defaultdict(lambda: defaultdict(list))
    ratios: dict[str, list[float]] = defaultdict(list)
    present: dict[str, list[float]] = defaultdict(list)
    left: list[dict[str, Any]] = []
    for record in records:
        if "leak" in record:
            left.append(record)
        elif "present" in record:
            for name, value in record["present"].items():
                present[KIND_OF.get(name, name)].append(value)
        elif record["share"] <= MOST_SHARE:
            case = (record["row_bytes"], record["share"], record["order"])
            times[case][record["way"], record["page_bytes"]].append(record["seconds"])
            if record["page_bytes"] == "auto":
                ratios[record["way"]].append(record["fetch_ratio"])
    speedups, loops = [], []
    for by_way in times.values():
        median = {way: statistics.median(values) for way, values in by_way.items()}
        fixed = [s for (way, page), s in median.items() if way == "loop" and page != "auto"]
        if ("ray", "auto") in median and ("index", "auto") in median:
            speedups.append(median["ray", "auto"] / median["index", "auto"])
        if fixed:
            loops.append(median["loop", "auto"] / min(fixed))
    named = {
        "fetch_ratio": ratios["index"] + ratios["gather"],
        "loop_fetch_ratio": ratios["loop"],
        "loop_ratio": loops,
        "present_ratio": present["ids"],
        "paged_ratio": present["small"],
        "scalar_ratio": present["scalar"],
        "slice_ratio": present["slice"],
        "leak": [record["leak"] for record in left],
        "leak_s": [record["seconds"] for record in left],
    }
    out = {name: max(values) for name, values in named.items() if values}
    if speedups:
        out["index_speedup"] = min(speedups)
    return out


def on_loopback(options: Options) -> Iterator[dict[str, Any]]:
    """Two raylets of this machine; the trap, then the records."""
    with common.two_nodes(store_bytes=2 * options.table_bytes + (128 << 20)) as nodes:
        yield {"trap": nodes.trap}
        yield from cases(options, nodes.a, nodes.b)


def on_link(options: Options) -> Iterator[dict[str, Any]]:
    """Two raylets in namespaces; the same lines, from a driver on the first."""
    from tests.support.lab import lab_unavailable, netns_cluster

    if reason := lab_unavailable("netns"):
        raise SystemExit(f"bench: first_touch --link cannot run here: {reason}")
    store_bytes = 2 * options.table_bytes + (128 << 20)
    fields = json.dumps(dataclasses.asdict(options))
    command = [sys.executable, "-m", "bench.drivers.first_touch_driver", fields]
    with (
        netns_cluster(
            2,
            num_cpus=2,
            object_store_memory=store_bytes,
            rate=RATE,
            round_trip_ms=ROUND_TRIP_MS,
        ) as lab,
        lab.start(command) as driver,
    ):
        yield from records_of(driver, "first_touch")


def _numbers(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def main(arguments: list[str]) -> int:
    """Runs the cases and prints the summary."""
    parser = argparse.ArgumentParser(prog="python -m bench first_touch", description=__doc__)
    parser.add_argument("--small", action="store_true", help="16 MiB, rows of 1 KiB, two shares")
    parser.add_argument("--link", action="store_true", help="1 Gbit/s, 1 ms (root)")
    parser.add_argument("--mib", type=int, help="of the table (512)")
    parser.add_argument("--rows", type=_numbers, help="bytes of a row (256,1024,4096)")
    parser.add_argument("--shares", type=_numbers, help="of the rows (0.001,0.01,...,0.5)")
    parser.add_argument("--orders", default="random,sorted,clustered")
    parser.add_argument("--ways", default="index,gather,loop,ray")
    parser.add_argument("--pages", type=_numbers, help="fixed sizes, bytes (4096 to 4194304)")
    parser.add_argument("--repetitions", type=int, help="of each (3, small: 1)")
    given = parser.parse_args(arguments)
    small = given.small
    pages = given.pages or ([4096, 65536] if small else [4096 << 2 * n for n in range(6)])
    shares = given.shares or ([0.01, 0.1] if small else [0.001, 0.01, 0.02, 0.05, 0.1, 0.5])
    options = Options(
        table_bytes=(given.mib or (16 if small else 512)) << 20,
        row_bytes=tuple(map(int, given.rows or ([1024] if small else [256, 1024, 4096]))),
        shares=tuple(shares),
        orders=tuple(given.orders.split(",")),
        ways=tuple(given.ways.split(",")),
        pages=tuple(map(int, pages)),
        repetitions=given.repetitions or (1 if small else 3),
    )
    records: list[dict[str, Any]] = []
    for line in on_link(options) if given.link else on_loopback(options):
        if "trap" in line:
            rate = f"{RATE}, {ROUND_TRIP_MS:g} ms" if given.link else "loopback"
            about = {"bench": "first_touch", "rate": rate, **line}
            emit(common.environment(**about, **dataclasses.asdict(options)))
        else:
            emit(line)
            records.append(line)
    common.summary(figures(records))
    return 0
