"""A node is drained while others read and write: how much of its link the move has, who waits.

Four raylets in network namespaces, each behind a link shaped by `tc tbf`: the driver's with the
registry, the drained one, and two with readers and writers. All variables are homed on the second.
Readers read blocks that their node does not have, one at a time. Writers change one block and
commit. Both pause after each. First they are measured undisturbed, then while `clamor.drain` runs.

evacuation_share   bytes that the drain moved per second / those of a raw TCP stream between two of
                   the same hosts in the same run, the best of three. What readers and writers need
                   of the link is in neither.
read_stall_ms      of the reads that were under way while it ran, p99.9: a touch of one block.
commit_stall_ms    of `commit`, likewise.
*_before_ms        the same before the drain.

Beside them p50, p99, the longest and the number of each, also of whole updates (begin, write,
commit), and how busy the cores were: where that is near 1 the link was not the limit. All that was
read, and what was committed last, is checked.

Needs root.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from typing import Any

from bench.drivers.drain_driver import Options
from bench.support import common
from bench.support import stream as _stream
from bench.support.common import emit, note
from bench.support.namespaces import records_of

HOSTS, SMALL_HOSTS = 4, 3
STREAM_MIB, SMALL_STREAM_MIB = 64, 8


def figures(run: dict[str, Any], link_bytes_per_s: float) -> dict[str, float]:
    """From what was measured."""
    before, during = run["before"], run["during"]
    return {
        "evacuation_share": run["bytes_per_s"] / link_bytes_per_s,
        "read_stall_ms": during["read"]["p999_ms"],
        "commit_stall_ms": during["commit"]["p999_ms"],
        "read_before_ms": before["read"]["p999_ms"],
        "commit_before_ms": before["commit"]["p999_ms"],
    }


def link_rate(lab: Any, n_mib: int) -> float:
    """Bytes per second of the best of three streams out of the host that is drained: what slows one
    of them down is the machine, not the link."""

    def start(node: int) -> _stream.Start:
        return lambda arguments: lab.start([sys.executable, *arguments], node=node)

    return max(_stream.rate(start(2), start(1), lab.node_address(2), n_mib) for _ in range(3))


def main(arguments: list[str]) -> int:
    """Runs the drain and prints the summary."""
    parser = argparse.ArgumentParser(prog="python -m bench drain", description=__doc__)
    parser.add_argument("--small", action="store_true", help="2 times 16 MiB, 3 hosts")
    parser.add_argument("--rate", default="1gbit", help="of each link, for tc (1gbit)")
    parser.add_argument("--round-trip-ms", type=float, default=0.0, help="that links add (0)")
    parser.add_argument("--variables", type=int, help="of the drained node (8)")
    parser.add_argument("--mib", type=int, help="of each of them (128)")
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--writers", type=int, default=2)
    parser.add_argument("--read-pause-ms", type=float, default=2.0)
    parser.add_argument("--write-pause-ms", type=float, default=5.0)
    parser.add_argument("--undisturbed", type=float, help="seconds before the drain (10)")
    given = parser.parse_args(arguments)
    small = given.small
    options = Options(
        variables=given.variables or (2 if small else 8),
        variable_bytes=(given.mib or (16 if small else 128)) << 20,
        readers=given.readers,
        writers=given.writers,
        read_pause_s=given.read_pause_ms / 1e3,
        write_pause_s=given.write_pause_ms / 1e3,
        undisturbed_s=given.undisturbed or (1.0 if small else 10.0),
    )

    import clamor_ray as clamor
    from tests.support.lab import lab_unavailable, netns_cluster

    if reason := lab_unavailable("netns"):
        raise SystemExit(f"bench: drain cannot run here: {reason}")
    n_hosts = SMALL_HOSTS if small else HOSTS
    about = {"bench": "drain", "library": clamor.__version__, "hosts": n_hosts}
    shape = {"rate": given.rate, "round_trip_ms": given.round_trip_ms}
    environment = common.environment(**about, **shape, **dataclasses.asdict(options))
    note(f"starting {n_hosts} hosts")
    run: dict[str, Any] = {}
    with netns_cluster(n_hosts, num_cpus=2, **shape) as lab:
        rate = link_rate(lab, SMALL_STREAM_MIB if small else STREAM_MIB)
        fields = json.dumps(dataclasses.asdict(options))
        with lab.start([sys.executable, "-m", "bench.drivers.drain_driver", fields]) as driver:
            for record in records_of(driver, "drain"):
                if "trap" in record:
                    environment["environment"].update(record)
                    emit(environment)
                else:
                    run = {**record, "link_bytes_per_s": rate}
                    emit(run)
    common.summary(figures(run, rate))
    return 0
