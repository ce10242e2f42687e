"""How long a node stays that nothing uses, beyond the autoscaler's own idle time.

Ray's autoscaler over its fake provider, whose nodes are raylets here. An actor has the one node
that it adds for itself, puts variables there and reads them; then it ends, and with it the last
lease.

idle_to_gone_s      from that end until Ray has removed the node - the autoscaler's idle time, of
                    v2: the session's own idle time (CLAMOR_IDLE_NODE_S) is part of it, and the move
                    of what the node has.
idle_to_gone_v1_s   the same of v1.
ray_idle_to_gone_s  an actor of the same cluster that never uses the library, before there is a
                    session: what Ray takes by itself. And ray_idle_to_gone_v1_s.

Medians. What was moved is read and checked after each turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.support import common
from bench.support.common import emit, note, now

N_VARIABLES = 16
UP_S = 180.0
GONE_S = 300.0


class Plain:
    """Has a node for itself."""

    def where(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())


class User(Plain):
    """Has variables there."""

    def put(self, n_bytes: int) -> list[Any]:
        import clamor_ray as clamor

        made = [clamor.put(common.make_array(n_bytes, n + 1)) for n in range(N_VARIABLES)]
        check(made)
        return made


def check(refs: list[Any]) -> None:
    for n, ref in enumerate(refs):
        words = ref.get()
        common.verify("read", words, common.expected_words(0, len(words), n + 1))


def gone_s(node_id: str) -> float:
    """Until Ray has removed the node."""
    import ray

    begin = now()
    while any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes()):
        if now() - begin > GONE_S:
            raise RuntimeError(f"node {node_id} is still there after {GONE_S:.0f} s")
        time.sleep(0.05)  # Ray has no event of it for drivers
    return now() - begin


def turn(cls: Any, n_bytes: int, idle_s: float) -> tuple[float, list[Any]]:
    """A node comes and goes: seconds beyond the autoscaler's idle time, and what it has put."""
    import ray

    actor = ray.remote(num_cpus=1)(cls).remote()
    node_id = ray.get(actor.where.remote(), timeout=UP_S)
    made = ray.get(actor.put.remote(n_bytes), timeout=UP_S) if cls is User else []
    ray.kill(actor)
    return gone_s(node_id) - idle_s, made


def turns(version: int, n: int, n_bytes: int, own_idle_s: float) -> dict[str, list[float]]:
    """Of one cluster, first those without a session."""
    import clamor_ray as clamor
    from tests.support.lab.autoscaled import IDLE_S, autoscaled_cluster

    os.environ["CLAMOR_IDLE_NODE_S"] = str(own_idle_s)
    found: dict[str, list[float]] = {"ray": [], "clamor": []}
    with (
        # Short: Ray has sockets below it.
        tempfile.TemporaryDirectory(prefix="cl-as-", ignore_cleanup_errors=True) as directory,
        autoscaled_cluster(version, Path(directory)),
    ):
        for _ in range(n):
            found["ray"].append(turn(Plain, n_bytes, IDLE_S)[0])
        clamor.init()
        for _ in range(n):
            seconds, made = turn(User, n_bytes, IDLE_S)
            found["clamor"].append(seconds)
            check(made)
    return found


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench autoscale", description=__doc__)
    parser.add_argument("--small", action="store_true", help="one turn each, 64 KiB a variable")
    parser.add_argument("--turns", type=int, help="of each (5)")
    parser.add_argument("--mib", type=int, default=4, help="of each of 16 variables (4)")
    parser.add_argument("--idle", type=float, default=2.0, help="CLAMOR_IDLE_NODE_S (2)")
    options = parser.parse_args(arguments)
    n = options.turns or (1 if options.small else 5)
    n_bytes = 64 << 10 if options.small else options.mib << 20

    import clamor_ray as clamor

    environment = common.environment(library=clamor.__version__, bench="autoscale")
    environment["environment"].update(own_idle_s=options.idle)
    emit(environment)
    summary = {}
    for version, suffix in ((2, ""), (1, "_v1")):
        note(f"autoscaler v{version}")
        found = turns(version, n, n_bytes, options.idle)
        emit({"autoscaler": version, "seconds": found})
        summary[f"idle_to_gone{suffix}_s"] = statistics.median(found["clamor"])
        summary[f"ray_idle_to_gone{suffix}_s"] = statistics.median(found["ray"])
    common.summary(summary)
    return 0
