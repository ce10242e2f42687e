"""Drivers of benchmarks in network namespaces, and what they print."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any

from bench.support import common
from bench.support.common import emit, note


def records_of(driver: subprocess.Popen[str], name: str) -> Iterator[dict[str, Any]]:
    """The JSON objects that a driver prints, a line each. All else, as what Ray prints there, goes
    to stderr.

    Args:
        driver: whose output is a pipe.
        name: of it, for people.

    Raises:
        SystemExit: It ended with an error.
    """
    for line in driver.stdout or ():
        if line.startswith("{"):
            yield json.loads(line)
        else:
            sys.stderr.write(line)
    if driver.wait() != 0:
        raise SystemExit(f"bench: the driver of {name} ended with an error")


def _links(lab: Any) -> list[tuple[int, int]]:
    """What each host's link has carried out and in so far, bytes with all headers."""
    hosts = range(len(lab.namespaces))
    return [(lab.sent_bytes(host), lab.received_bytes(host)) for host in hosts]


def with_links(lab: Any, records: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Each record with `link_out_in`: of each host, the bytes that its link has carried out and in
    since the record before, and of the first, since this began."""
    crossed = _links(lab)
    for record in records:
        before, crossed = crossed, _links(lab)
        grown = [
            [end - start for start, end in zip(*host, strict=True)]
            for host in zip(before, crossed, strict=True)
        ]
        yield {**record, "link_out_in": grown}


def runs_of(bench: str, driver: str, options: Any, n_hosts: int, rate: str) -> list[dict[str, Any]]:
    """The runs of a driver, which it prints as JSON objects; the first says the trap.

    Args:
        bench: the benchmark's name.
        driver: its module, which takes the options as JSON.
        options: a dataclass.
        n_hosts: namespaces, each with a raylet.
        rate: of each link, for tc; "": none.

    Raises:
        SystemExit: There can be no namespaces here, or the driver has failed.
    """
    import clamor_ray as clamor
    from tests.support.lab import lab_unavailable, netns_cluster

    if reason := lab_unavailable("netns"):
        raise SystemExit(f"bench: {bench} cannot run here: {reason}")
    environment = common.environment(library=clamor.__version__, bench=bench)
    note(f"starting {n_hosts} hosts")
    runs: list[dict[str, Any]] = []
    command = [sys.executable, "-m", driver, json.dumps(dataclasses.asdict(options))]
    with (
        netns_cluster(n_hosts, num_cpus=2, object_store_memory=160 << 20, rate=rate) as lab,
        lab.start(command) as started,
    ):
        for found in records_of(started, bench):
            if "trap" in found:
                environment["environment"].update(trap=found["trap"], rate=rate)
                emit(environment)
            else:
                emit(found)
                runs.append(found)
    return runs
