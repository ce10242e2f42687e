"""An embedding service under load over HTTP: look-ups of a global variable, against a control.

Two nodes. The table and the session's registry are on node a, with Serve's proxy; the replicas are
on node b. The clients are programs of their own (`clamor_ray.workloads.serving.open_loop`). Every
answer of a look-up is compared with what the table must hold.

p99_ratio   p99 of /lookup / p99 of /control, an endpoint of the same replicas that answers as many
            bytes and touches no variable. 32 clients, arrivals by a Poisson process at half of the
            rate that /control has at most, measured from the time of arrival; windows of both in
            turn. hot: any rows, which node b has. cold: after an update of 1% of the rows, each of
            these once.
rps_ratio   requests per second that 32 clients get from /lookup at most / the same with other rows
            behind the same service: redis, a Redis server on this machine; actor, an actor on node
            a that holds the table. For requests of 16 and of 1,024 ids: 4 KiB and 256 KiB.

A record beside them has what /control gets at most: where that is near, HTTP and Serve are what is
measured, and no ratio to a peer can be much above its share of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from bench.peers import redis as _redis
from bench.peers import row_services
from bench.support import common
from bench.support.common import ROOT, emit, note

SESSION, TABLE = "serve_load", "rows"
DIM = 64
N_CLIENTS, N_IDS = 32, 16
RPS_IDS = (N_IDS, 1024)
SHARE_OF_MOST = 0.5  # of what the control answers at most: the rate of the open loop
TIMEOUT_S = 600.0
PEERS = ("redis", "actor")

Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Size:
    """How much is asked for.

    Args:
        n_rows: of the table.
        window_s: of a window with hot rows, and of a closed loop.
        n_windows: of each endpoint, hot; of a service, closed.
        n_updates: after each of them one cold window.
        n_replicas: of each service.
    """

    n_rows: int
    window_s: float
    n_windows: int
    n_updates: int
    n_replicas: int = 2


SMALL = Size(20_000, 1.5, 1, 2)
FULL = Size(1_000_000, 10.0, 5, 10)


def run_load(url: str, path: str, **options: object) -> Record:
    """What a load program has measured; its answers were right, and all there.

    Raises:
        WrongData: They were not.
    """
    command = [sys.executable, "-m", "clamor_ray.workloads.serving.open_loop", "--latencies"]
    given = {"url": url, "path": path, "clients": N_CLIENTS, "ids": N_IDS, **options}
    for name, value in given.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if not done.stdout:
        raise RuntimeError(f"a load program ended with {done.returncode}: {done.stderr}")
    record: Record = json.loads(done.stdout)
    if done.returncode:
        raise common.WrongData(f"/{path}: {record['texts']}")
    return record


def windows_of(url: str, number: int, rate: float, **options: object) -> tuple[Record, Record]:
    """One window of (look-ups, control), now the one first and now the other."""
    order = ("lookup", "control") if number % 2 == 0 else ("control", "lookup")
    found = {path: run_load(url, path, rate=rate, seed=number, **options) for path in order}
    return found["lookup"], found["control"]


def p99_ratio(windows: Sequence[tuple[Record, Record]]) -> float:
    """Of (look-up, control): over all latencies of either."""
    lookups, controls = (
        [each for record in side for each in record["latencies_ms"]]
        for side in zip(*windows, strict=True)
    )
    return common.percentile(lookups, 99) / common.percentile(controls, 99)


def most_per_s(url: str, path: str, size: Size) -> dict[int, float]:
    """By ids of a request, the best window of a closed loop: what slows one down is the machine."""
    most: dict[int, float] = {}
    for n_ids in RPS_IDS:
        runs = [
            run_load(url, path, seconds=size.window_s, ids=n_ids) for _ in range(size.n_windows)
        ]
        most[n_ids] = max(float(run["requests_per_s"]) for run in runs)
    return most


def rps_ratios(per_s: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Of requests per second, by service and by ids of a request."""
    return {
        f"{peer} {n_ids}": per_s["clamor"][n_ids] / per_s[peer][n_ids]
        for peer in PEERS
        for n_ids in RPS_IDS
    }


def told(windows: str, number: int, records: Sequence[Record]) -> None:
    """What was measured, but for the single latencies."""
    for path, record in zip(("lookup", "control"), records, strict=True):
        short = {name: value for name, value in record.items() if name != "latencies_ms"}
        emit({"windows": windows, "number": number, "path": path, **short})


def measure_ours(url: str, ref: Any, size: Size) -> dict[str, Any]:
    """Hot and cold windows, and the closed loop's best."""
    from clamor_ray.workloads.serving import running
    from clamor_ray.workloads.serving.updates import update_rows

    note("closed loops")
    run_load(url, "lookup", seconds=1)  # connections, threads, blocks of hot rows
    control_per_s = most_per_s(url, "control", size)
    lookup_per_s = most_per_s(url, "lookup", size)
    rate = SHARE_OF_MOST * control_per_s[N_IDS]
    emit({"control_per_s": control_per_s, "rate": rate})
    hot: list[tuple[Record, Record]] = []
    for number in range(size.n_windows):
        note(f"hot windows {number + 1} of {size.n_windows}")
        hot.append(windows_of(url, number, rate, seconds=size.window_s))
        told("hot", number, hot[-1])
    cold: list[tuple[Record, Record]] = []
    for number in range(size.n_updates):
        note(f"update {number + 1} of {size.n_updates}")
        update = update_rows(ref)
        # Who asks before a replica has heard of it gets the rows of before: those are hot.
        running.wait_for(
            url, size.n_replicas, lambda said, update=update: bool(said["update"] >= update)
        )
        cold.append(windows_of(url, number, rate, of_update=update))
        told("cold", number, cold[-1])
    return {"hot": p99_ratio(hot), "cold": p99_ratio(cold), "lookup_per_s": lookup_per_s}


def main(arguments: list[str]) -> int:
    """Runs all sides and prints the summary."""
    parser = argparse.ArgumentParser(prog="python -m bench serve_load", description=__doc__)
    parser.add_argument("--small", action="store_true", help="20,000 rows, short windows")
    parser.add_argument("--rows", type=int, help="of the table, of 256 bytes (1,000,000)")
    parser.add_argument("--seconds", type=float, help="of a window (10)")
    parser.add_argument("--windows", type=int, help="of each kind (5)")
    given = parser.parse_args(arguments)
    base = SMALL if given.small else FULL
    size = Size(
        given.rows or base.n_rows,
        given.seconds or base.window_s,
        given.windows or base.n_windows,
        base.n_updates,
        base.n_replicas,
    )
    if reason := _redis.unavailable():
        raise SystemExit(f"bench: serve_load needs its peer: {reason}")
    return _run(size)


def _run(size: Size) -> int:
    import clamor_ray as clamor

    environment = common.environment(
        library=clamor.__version__, bench="serve_load", **dataclasses.asdict(size)
    )
    figures: dict[str, dict[str, float]] = {}
    with _redis.server() as client, common.two_nodes(256 << 20) as nodes:
        environment["environment"].update(
            trap=nodes.trap, redis=client.info("server")["redis_version"]
        )
        emit(environment)
        per_s = _sides(size, nodes, client, figures)
        emit({"requests_per_s": per_s})
        figures["rps_ratio"] = rps_ratios(per_s)
    common.summary(figures)
    return 0


def _sides(
    size: Size, nodes: common.TwoNodes, client: Any, figures: dict[str, dict[str, float]]
) -> dict[str, dict[int, float]]:
    """Requests per second of each service, one after the other."""
    import ray
    from ray import serve

    import clamor_ray as clamor
    from clamor_ray.workloads.serving import running
    from clamor_ray.workloads.serving.deployment import AppOptions
    from clamor_ray.workloads.serving.updates import open_table

    fields = {"table": TABLE, "dim": DIM, "n_replicas": size.n_replicas, "node_id": nodes.b}
    rows = {**fields, "n_rows": size.n_rows}
    per_s: dict[str, dict[int, float]] = {}
    url = running.start_http(running.free_port())

    def peer(name: str, options: AppOptions, replica: Any) -> None:
        note(f"the service with {name} behind it")
        running.deploy(options, replica)
        run_load(url, "lookup", seconds=1)
        per_s[name] = most_per_s(url, "lookup", size)
        running.end()

    try:
        clamor.shutdown()  # the session that `two_nodes` began: this one has a name
        clamor.init(session=SESSION, lifetime="detached")
        ref = open_table(SESSION, TABLE, (size.n_rows, DIM))
        # It finds the table, and makes none.
        running.deploy(AppOptions(session=SESSION, n_rows=0, **fields))
        ours = measure_ours(url, ref, size)
        figures["p99_ratio"] = {case: ours[case] for case in ("hot", "cold")}
        per_s["clamor"] = ours["lookup_per_s"]
        running.end()
        row_services.load_redis(client, size.n_rows, DIM)
        port = client.connection_pool.connection_kwargs["port"]
        options = row_services.RedisOptions(**rows, redis_port=port)
        peer("redis", options, row_services.RedisService)
        holder = common.pinned(
            row_services.Holder, nodes.a, name=row_services.HOLDER, namespace=row_services.NAMESPACE
        ).remote(size.n_rows, DIM)
        ray.get(holder.ready.remote(), timeout=TIMEOUT_S)
        peer("actor", AppOptions(**rows), row_services.ActorService)
        ray.kill(holder)
    finally:
        serve.shutdown()
        if SESSION in [info.name for info in clamor.sessions()]:
            clamor.shutdown(session=SESSION)
    return per_s
