"""PageRank over variables with redundancy, against the same without; and a host is killed.

Five raylets in network namespaces, each behind a link shaped by `tc tbf`. The graph and the vector
of PageRank (see `pressure`) are spread over all of them. The cache of each may hold a fifth of
both. Each iteration commits a vector that is new, and a task of each host reads its part.

parity_overhead    time of an iteration, raid5 / raid0: medians of the iterations after the first of
                   a run, of which there are some of each in turn; the median of their ratios.
degraded_slowdown  raid5; the last host has homes and no tasks, and is killed in the middle of an
                   iteration. Median of the iterations that began after its page server was called
                   lost / of those before the kill.
degraded_first     the first one of them / the median of those before.
detection_s        from the kill until the registry called that page server lost.
repair_s           from then until each piece had a home again.
storage_ratio      bytes that homes hold of a variable / bytes of the variable.
parity_rate        deltas XORed into a parity / as many bytes copied, per second of one core.

Ranks are checked against SciPy's after each run, and caches against their budget.

Needs root, but with --loopback: then raylets share a device that has no rate.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any, Literal

from bench.drivers.raid_driver import Options
from bench.support import common, raid_parity
from bench.support.common import emit, note
from bench.support.namespaces import records_of

HOSTS, FEW_HOSTS = 5, 3
CACHE_SHARE = 0.2
PARITY_SMALL = {"delta_bytes": 32 << 20}


def figures(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the records that the drivers print."""
    by_repetition: dict[int, dict[str, float]] = {}
    for run in runs:
        if run["run"] == "rank":
            found = by_repetition.setdefault(run["repetition"], {})
            found[run["level"]] = statistics.median(run["iteration_s"])
    (lost,) = [run for run in runs if run["run"] == "degraded"]
    before_s = statistics.median(lost["before_s"])
    return {
        "parity_overhead": statistics.median(
            found["raid5"] / found["raid0"] for found in by_repetition.values()
        ),
        "degraded_slowdown": statistics.median(lost["after_s"]) / before_s,
        "degraded_first": lost["after_s"][0] / before_s,
        "detection_s": lost["detection_s"],
        "repair_s": lost["repair_s"],
        "storage_ratio": {
            f"{run['level']}_of_{run['hosts']}": run["ratio"]
            for run in runs
            if run["run"] == "storage"
        },
    }


def kill(lab: Any, after_s: float, driver: Any) -> None:
    """The last host, some time from now; the driver hears when that was."""
    time.sleep(after_s)
    killed_s = time.monotonic()
    lab.kill_node(len(lab.node_ids) - 1)
    print(killed_s, file=driver.stdin, flush=True)


@contextlib.contextmanager
def session(options: Options, rate: str | None) -> Iterator[tuple[Any, Any]]:
    """Hosts of their own, and the driver on the first of them.

    Args:
        options: the driver's; the victim is the last host.
        rate: of each link; None: raylets that share the loopback device.
    """
    from tests.support.lab import local_cluster, netns_cluster
    from tests.support.lab.cluster import RAY_HEALTH_CHECK_PERIOD_MS

    def command(lab: Any) -> list[str]:
        fields = dataclasses.asdict(dataclasses.replace(options, victim=lab.node_ids[-1]))
        return [sys.executable, "-m", "bench.drivers.raid_driver", json.dumps(fields)]

    note(f"starting {options.hosts} hosts")
    if rate is not None:
        with (
            netns_cluster(options.hosts, rate=rate) as lab,
            lab.start(command(lab)) as driver,
        ):
            yield lab, driver
        return
    root = str(common.ROOT)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [root, *filter(None, [os.environ.get("PYTHONPATH", "")])]
    )
    with (
        local_cluster(
            options.hosts, connect=False, health_check_period_ms=RAY_HEALTH_CHECK_PERIOD_MS
        ) as local,
        subprocess.Popen(
            command(local),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=root,
            env={**os.environ, **local.environment},
        ) as driver,
    ):
        try:
            yield local, driver
        finally:
            driver.terminate()  # where this ends early


def run(
    options: Options, rate: str | None, environment: dict[str, Any] | None
) -> list[dict[str, Any]]:
    """What a driver finds on hosts of its own.

    Args:
        options, rate: as of `session`.
        environment: is emitted with what the driver says about itself; None: it was before.
    """
    runs: list[dict[str, Any]] = []
    with session(options, rate) as (lab, driver):
        for found in records_of(driver, "raid"):
            if "kill_after_s" in found:
                kill(lab, found["kill_after_s"], driver)
            elif "trap" not in found:
                emit(found)
                runs.append(found)
            elif environment is not None:
                environment["environment"].update(found)
                emit(environment)
    return runs


def main(arguments: list[str]) -> int:
    """Runs both labs and prints the summary."""
    parser = argparse.ArgumentParser(prog="python -m bench raid", description=__doc__)
    parser.add_argument("--small", action="store_true", help="3 hosts, a graph of 22 MiB")
    parser.add_argument("--vertices", type=int, help="of the graph, 84 bytes each (2**20)")
    parser.add_argument("--iterations", type=int, help="timed, after the first of each run (6)")
    parser.add_argument("--repetitions", type=int, help="of the runs of both levels (3)")
    parser.add_argument("--mib", type=int, help="of the variables whose storage counts (64)")
    parser.add_argument("--rate", default="1gbit", help="of each link, for tc (1gbit)")
    parser.add_argument(
        "--loopback", action="store_true", help="no namespaces and no links: no root"
    )
    given = parser.parse_args(arguments)
    form: Literal["local", "netns"] = "local" if given.loopback else "netns"
    rate = None if given.loopback else given.rate
    small = given.small
    hosts = FEW_HOSTS if small else HOSTS
    options = Options(
        hosts=hosts,
        victim="",
        vertices=given.vertices or (1 << 18 if small else 1 << 20),
        iterations=given.iterations or (2 if small else 6),
        repetitions=given.repetitions or (1 if small else 3),
        tasks=2 * hosts,
        cache_share=CACHE_SHARE,
        storage_bytes=(given.mib or (16 if small else 64)) << 20,
        stored=("raid5", "raid1"),
        is_ranked=True,
    )

    import clamor_ray as clamor
    from tests.support.lab import lab_unavailable

    if reason := lab_unavailable(form):
        raise SystemExit(f"bench: raid cannot run here: {reason}")
    environment = common.environment(
        bench="raid", library=clamor.__version__, rate=rate, **dataclasses.asdict(options)
    )
    runs = run(options, rate, environment)
    if not small:
        few = dataclasses.replace(options, hosts=FEW_HOSTS, stored=("raid5",), is_ranked=False)
        runs += run(few, rate, None)
    note("parity on one core")
    rates = raid_parity.parity_rate(**PARITY_SMALL if small else {})
    emit({"run": "parity", **rates})
    common.summary({**figures(runs), "parity_rate": rates["parity_rate"]})
    return 0
