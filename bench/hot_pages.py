"""Pages that every host wants (Clamor fig. 3): Zipf look-ups into a hash map on one host.

Eight raylets in network namespaces, each behind a link shaped by `tc tbf` (so that the links are
the limit, not the cores), the home on the first. Of the map's blocks 5% hold all keys that are
looked up: in scattered places, and nobody is told which. Each of the other hosts has some readers;
a reader draws its own Zipf sequence over these keys, prefetches and looks it up: all at once, or in
batches, of which the next is on its way while one is looked up. All readers begin at one moment.
Every run has a variable that no host has seen.

ideal_ratio   time at 8 hosts / the time in which the links could have carried the bytes that must
              cross them at the least, at the rate of one raw TCP stream in the same run: into
              each reader's host what it touched, out of the home each touched block once, over
              all links together what all readers' hosts touched.
growth        time at 8 hosts / time at 2.
off_speedup   time at 8 hosts without replication / with it (p2c). random_speedup: as much with
              random choice in place of p2c.
ray_speedup   `ray.get` of the same arrays on all hosts at once, and the same look-ups / ours.

Beside them what each host sent and received, how many blocks the home redirected, how often a peer
did not have what it was asked for, what each link carried since the last line (Ray's own messages
and what comes before the clock included), and how busy the cores were (over a run, the readers'
checks after the clock included): where that is near 1 the links were not the limit.

Needs root.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from bench.drivers.hot_driver import RECORD_BYTES, Options
from bench.support import common
from bench.support import stream as _stream
from bench.support.common import emit, note
from bench.support.namespaces import records_of, with_links

HOSTS = (2, 4, 8)
MODES = ("p2c", "random", "off")
STREAM_MIB, SMALL_STREAM_MIB = 24, 4


def link_rates(lab: Any, small: bool) -> dict[str, Any]:
    """Bytes per second of one stream, and of one out of and into every host at once."""

    mib = SMALL_STREAM_MIB if small else STREAM_MIB

    def start(node: int) -> _stream.Start:
        return lambda arguments: lab.start([sys.executable, *arguments], node=node)

    def stream(sender: int, receiver: int) -> _stream.Stream:
        host = lab.node_address(receiver)
        return _stream.Stream(start(receiver), start(sender), host, mib)

    alone = stream(0, 1)
    alone.go()
    one = alone.finish()
    n = len(lab.namespaces)
    ring = [stream(node, (node + 1) % n) for node in range(n)]
    for each in ring:
        each.go()
    return {"one_stream": one, "all_links_at_once": [each.finish() for each in ring]}


def ideal_s(run: dict[str, Any], link_bytes_per_s: float) -> dict[str, float]:
    """Seconds for which each link is needed at the least; the largest is the ideal."""
    touched = run["touched_bytes"]
    return {
        "into_a_host": max(touched) / link_bytes_per_s,
        "out_of_home": run["distinct_bytes"] / link_bytes_per_s,
        "all_links": sum(touched) / (run["hosts"] * link_bytes_per_s),
    }


def session_runs(lab: Any, options: Options) -> Iterator[dict[str, Any]]:
    """Lines of one replication mode, from a driver of its own: the session, then its runs."""
    command = [
        sys.executable,
        "-m",
        "bench.drivers.hot_driver",
        json.dumps(dataclasses.asdict(options)),
    ]
    with lab.start(command, environment={"CLAMOR_REPLICATION": options.replication}) as driver:
        yield from with_links(lab, records_of(driver, f"hot_pages ({options.replication})"))


def median_s(runs: list[dict[str, Any]], replication: str, hosts: int) -> float:
    return statistics.median(
        run["seconds"]
        for run in runs
        if run.get("replication") == replication and run["hosts"] == hosts
    )


def figures(runs: list[dict[str, Any]], link_bytes_per_s: float) -> dict[str, float]:
    most = max(run["hosts"] for run in runs)
    least = min(run["hosts"] for run in runs)
    ours_s = median_s(runs, "p2c", most)
    ratios = [
        run["seconds"] / max(ideal_s(run, link_bytes_per_s).values())
        for run in runs
        if run.get("replication") == "p2c" and run["hosts"] == most
    ]
    (ray_s,) = (run["seconds"] for run in runs if run["side"] == "ray")
    return {
        "ideal_ratio": statistics.median(ratios),
        "growth": ours_s / median_s(runs, "p2c", least),
        "off_speedup": median_s(runs, "off", most) / ours_s,
        "random_speedup": median_s(runs, "random", most) / ours_s,
        "ray_speedup": ray_s / ours_s,
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench hot_pages", description=__doc__)
    parser.add_argument("--small", action="store_true", help="17 MiB, 2 and 3 hosts")
    parser.add_argument("--slots", type=int, help="of the map, of 17 bytes each (2**24: 272 MiB)")
    parser.add_argument("--hosts", help="how many, home included (2,4,8)")
    parser.add_argument("--rate", default="100mbit", help="of each link, for tc (100mbit)")
    parser.add_argument("--touched", type=float, default=0.05, help="share of the blocks (0.05)")
    parser.add_argument("--readers", type=int, default=2, help="per host (2)")
    parser.add_argument("--lookups", type=int, help="of each reader (100000)")
    parser.add_argument("--batch", type=int, default=100_000, help="look-ups prefetched at once")
    parser.add_argument("--skew", type=float, default=0.99, help="exponent of Zipf (0.99)")
    parser.add_argument("--repetitions", type=int, help="of p2c; others run once (3)")
    parser.add_argument("--modes", default=",".join(MODES), help="p2c,random,off")
    parser.add_argument("--no-ray", action="store_true", help="leave the peer out")
    options = parser.parse_args(arguments)
    hosts = tuple(int(word) for word in (options.hosts or "").split(",") if word)
    hosts = hosts or ((2, 3) if options.small else HOSTS)
    modes = options.modes.split(",")
    n_slots = options.slots or (1 << 20 if options.small else 1 << 24)
    base = Options(
        n_slots=n_slots,
        touched=options.touched,
        hosts=hosts,
        repetitions=options.repetitions or (1 if options.small else 3),
        readers=options.readers,
        lookups=options.lookups or (20_000 if options.small else 100_000),
        batch=options.batch,
        skew=options.skew,
        replication="p2c",
        ray=not options.no_ray,
    )

    import clamor_ray as clamor
    from tests.support.lab import lab_unavailable, netns_cluster

    if reason := lab_unavailable("netns"):
        raise SystemExit(f"bench: hot_pages cannot run here: {reason}")
    environment = common.environment(library=clamor.__version__, bench="hot_pages")
    note(f"starting {max(hosts)} hosts")
    store_bytes = n_slots * RECORD_BYTES + (160 << 20)
    with netns_cluster(
        max(hosts), num_cpus=0, object_store_memory=store_bytes, rate=options.rate
    ) as lab:
        note("raw streams")
        rates = link_rates(lab, options.small)
        runs: list[dict[str, Any]] = []
        for mode in modes:
            of_mode = base if mode == "p2c" else dataclasses.replace(base, ray=False)
            if mode != "p2c":
                # For comparison: enough at the largest number of hosts, once.
                of_mode = dataclasses.replace(
                    of_mode, replication=mode, hosts=hosts[-1:], repetitions=1
                )
            for line in session_runs(lab, of_mode):
                if "trap" not in line:
                    emit(line)
                    runs.append(line)
                elif "trap" not in environment["environment"]:
                    environment["environment"].update(trap=line["trap"], rate=options.rate)
                    emit(environment)
                    emit({"link_bytes_per_s": rates})
    for run in runs:
        if run["side"] == "clamor":
            ideal = ideal_s(run, rates["one_stream"])
            keys = ("replication", "hosts", "repetition", "seconds")
            ratio = run["seconds"] / max(ideal.values())
            emit({**{key: run[key] for key in keys}, "ideal_s": ideal, "ratio": ratio})
    if set(modes) == set(MODES) and base.ray and len(hosts) > 1:
        common.summary(figures(runs, rates["one_stream"]))
    return 0
