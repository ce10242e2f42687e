"""Rows by id from a table on another host, cold, against Redis and against a Ray actor.

A table of 256-byte rows is homed on node b; the driver on node a asks for a million of them: ids
drawn by Zipf (exponent 1.1 over all rows, ranks in random places), and uniform ones.

redis_speedup   Redis, MGETs in pipelines, the replies joined to one array / `clamor.gather`. Its
                server is on this machine too, over the loopback device as the two nodes are. It
                holds only the rows that are asked for. It gets its best number of keys per MGET.
actor_speedup   an actor on node b that holds the table as a private array and returns
                `table[ids]`: in one call or in sixteen at once, the faster of both /
                `clamor.gather`.

Of each side its fastest repetition counts: a result's memory that the hypervisor took back costs
whoever touches it half a second more. Each repetition has a variable of its own that node a has
never seen; the clock includes opening it. Every result is compared with the table, byte for byte.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.peers import redis as _redis
from bench.support import common
from bench.support.common import emit, grown, note, now
from clamor_ray.workloads.data.stream import zipf

ROW_WORDS = 32
ROW_BYTES = ROW_WORDS * 8
SALT = 9
SKEW = 1.1
TIMEOUT_S = 600
KEYS_PER_MGET = (1000, 10_000)
ACTOR_CALLS = (1, 16)
COUNTERS = ("bytes_received", "fetch_requests", "blocks_fetched", "rows_fetched")

Int64 = npt.NDArray[np.int64]
Rows = npt.NDArray[np.uint64]


class Holder:
    """On node b: has the table, puts it, and is the peer."""

    def build(self, n_rows: int) -> int:
        self.table = common.make_array(n_rows * ROW_BYTES, SALT).reshape(n_rows, ROW_WORDS)
        return len(self.table)

    def put(self) -> list[Any]:
        """A variable of its own; in a list, so that nobody opens it on the way."""
        import clamor_ray as clamor

        return [clamor.put(self.table)]

    def rows(self, ids: Int64) -> Rows:
        found: Rows = self.table[ids]
        return found


def expected_rows(ids: Int64) -> Rows:
    """What the rows with these ids hold."""
    return common.expected_at(ids[:, None] * ROW_WORDS + np.arange(ROW_WORDS), SALT)


def check(what: str, rows: Rows, ids: Int64) -> None:
    """Every byte, in pieces."""
    if rows.shape != (len(ids), ROW_WORDS):
        raise common.WrongData(f"{what}: {rows.shape} instead of {len(ids)} rows")
    for first in range(0, len(ids), 1 << 16):
        part = slice(first, first + (1 << 16))
        common.verify(what, rows[part], expected_rows(ids[part]))


def draw(n_rows: int, n_ids: int) -> dict[str, Int64]:
    """The ids of either case."""
    rng = np.random.default_rng(12)
    ranks = zipf(rng, n_rows, n_ids, SKEW)
    return {
        "zipf": rng.permutation(n_rows)[ranks],
        "uniform": rng.integers(0, n_rows, n_ids),
    }


def timed(what: str, ids: Int64, ask: Callable[[], Rows]) -> float:
    """Seconds of one way to get the rows, checked."""
    common.warm_memory(4 * len(ids) * ROW_BYTES)
    start = now()
    rows = ask()
    seconds = now() - start
    check(what, rows, ids)
    return seconds


def ours(nodes: common.TwoNodes, holder: Any, ids: Int64) -> dict[str, Any]:
    """A cold variable, gathered twice."""
    import ray

    import clamor_ray as clamor

    (ref,) = ray.get(holder.put.remote(), timeout=TIMEOUT_S)
    before = common.node_counters(nodes.a)
    cold_s = timed("clamor.gather", ids, lambda: clamor.gather(ref, ids))
    after = common.node_counters(nodes.a)
    again_s = timed("clamor.gather, again", ids, lambda: clamor.gather(ref, ids))
    clamor.free(ref)
    counters = {name: grown(before, after, name) for name in COUNTERS if name in after}
    return {
        "seconds": cold_s,
        "again_s": again_s,
        "bytes_ratio": counters["bytes_received"] / (len(np.unique(ids)) * ROW_BYTES),
        **counters,
    }


def actor(holder: Any, ids: Int64) -> dict[str, float]:
    """The peer on node b."""
    import ray

    def ask(n_calls: int) -> Rows:
        calls = [holder.rows.remote(part) for part in np.array_split(ids, n_calls)]
        parts = ray.get(calls, timeout=TIMEOUT_S)
        return parts[0] if n_calls == 1 else np.concatenate(parts)

    return {f"calls_{n}": timed("actor", ids, lambda n=n: ask(n)) for n in ACTOR_CALLS}


def redis_times(client: Any, ids: Int64) -> dict[str, float]:
    def ask(n_keys: int) -> Rows:
        return _redis.gather(client, ids, n_keys, ROW_WORDS)

    return {f"mget_{n}": timed("redis", ids, lambda n=n: ask(n)) for n in KEYS_PER_MGET}


def best(runs: list[dict[str, float]]) -> float:
    return min(seconds for run in runs for seconds in run.values())


def case(
    name: str, ids: Int64, repetitions: int, nodes: common.TwoNodes, holder: Any, client: Any
) -> dict[str, float]:
    """All sides in turn, then the figures of one distribution of ids."""
    distinct = np.unique(ids)
    note(f"{name}: loading {len(distinct)} rows into Redis")
    client.flushall()
    for first in range(0, len(distinct), 100_000):
        part = distinct[first : first + 100_000]
        _redis.load(client, part, expected_rows(part))
    our_runs: list[dict[str, Any]] = []
    redis_runs: list[dict[str, float]] = []
    actor_runs: list[dict[str, float]] = []
    for number in range(repetitions):
        note(f"{name}: repetition {number + 1} of {repetitions}")
        sides: list[Callable[[], None]] = [
            lambda: our_runs.append(ours(nodes, holder, ids)),
            lambda: redis_runs.append(redis_times(client, ids)),
            lambda: actor_runs.append(actor(holder, ids)),
        ]
        for side in sides if number % 2 == 0 else reversed(sides):
            side()
        record = {"ids": name, "repetition": number, "n_ids": len(ids), "distinct": len(distinct)}
        emit({**record, "ours": our_runs[-1], "redis_s": redis_runs[-1], "actor_s": actor_runs[-1]})
    seconds = min(run["seconds"] for run in our_runs)
    return {
        "redis_speedup": best(redis_runs) / seconds,
        "actor_speedup": best(actor_runs) / seconds,
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench gather", description=__doc__)
    parser.add_argument("--small", action="store_true", help="64 MiB, 50,000 ids, once")
    parser.add_argument("--mib", type=int, help="size of the table (4096)")
    parser.add_argument("--ids", type=int, help="rows asked for (1,000,000)")
    parser.add_argument("--repetitions", type=int, help="of each case (5)")
    options = parser.parse_args(arguments)
    n_rows = ((options.mib or (64 if options.small else 4096)) << 20) // ROW_BYTES
    n_ids = options.ids or (50_000 if options.small else 1_000_000)
    repetitions = options.repetitions or (1 if options.small else 5)

    import ray

    import clamor_ray as clamor

    if reason := _redis.unavailable():
        raise SystemExit(f"bench: gather needs its peer: {reason}")
    note("touching memory")
    common.warm_memory(min(3 * n_rows * ROW_BYTES, 8 << 30))
    environment = common.environment(library=clamor.__version__, bench="gather")
    drawn = draw(n_rows, n_ids)
    store_bytes = 4 * n_ids * ROW_BYTES + (256 << 20)
    figures: dict[str, dict[str, float]] = {}
    with _redis.server() as client, common.two_nodes(store_bytes) as nodes:
        environment["environment"].update(
            trap=nodes.trap, rows=n_rows, redis=client.info("server")["redis_version"]
        )
        emit(environment)
        holder = nodes.on_b(Holder)
        note(f"building {n_rows} rows")
        ray.get(holder.build.remote(n_rows), timeout=TIMEOUT_S)
        # What starts once is started; the peers' first answers are not the ones that count.
        few = drawn["uniform"][:1000]
        ours(nodes, holder, few)
        actor(holder, few)
        for name, ids in drawn.items():
            figures[name] = case(name, ids, repetitions, nodes, holder, client)
    common.summary(figures)
    return 0
