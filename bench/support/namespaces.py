"""A driver of a benchmark in the first of several network namespaces, and what it prints."""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

from bench.support import common
from bench.support.common import emit, note


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
        for line in started.stdout:
            if not line.startswith("{"):  # Ray prints there too
                sys.stderr.write(line)
                continue
            found = json.loads(line)
            if "trap" in found:
                environment["environment"].update(trap=found["trap"], rate=rate)
                emit(environment)
                continue
            emit(found)
            runs.append(found)
        if started.wait() != 0:
            raise SystemExit("bench: the driver ended with an error")
    return runs
