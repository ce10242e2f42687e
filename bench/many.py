"""What `put` and `free` of one small variable cost among thousands of them.

Two nodes. A row of puts of 8 KiB on the driver's; the last ones are read on the other; then a row
of frees, those first. Milliseconds each, by thousand: median and mean. Beside them, in the same
cluster: `ray.put` of the same array, and an empty call of an actor, one after the other; both
before the first variable, and again beside all of them. Then what a variable takes of a page
server, at its home and where it was read: private memory that is no variable's, and descriptors.
Where they are read the second half counts: each variable is looked up by a call of an actor, and
for a process's first thousands of those Ray takes megabytes once. What is left when all are freed
stands beside what there was before the first.

`put_ms` and `free_ms` are the slowest thousand's medians, `free_read_ms` that of those that another
node has read; `put_growth` is what the last thousand puts took of what the first took. The bars are
2 ms, and 1.
"""

from __future__ import annotations

import argparse
import resource
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from bench.support import common, processes
from bench.support.common import emit, note, now

N_ITEMS = 1024
BATCH = 1000
READ_MOST = 2 * BATCH
READ_AT_ONCE = 50
STORE_BYTES = 512 << 20
TIMEOUT_S = 600
DESCRIPTORS_BESIDE = 1000  # of a page server, that are no variable's


class Nobody:
    """An actor that does nothing."""

    def nothing(self) -> None: ...


class Reader:
    """Reads variables, and holds none."""

    def read(self, refs: list[Any], expected: Any) -> int:
        for ref in refs:
            common.verify("what was put, elsewhere", ref.get(), expected)
        return len(refs)


def times_ms(work: Callable[[], object], n: int) -> list[float]:
    """Of each of n calls."""
    times = []
    for _ in range(n):
        start = now()
        work()
        times.append((now() - start) * 1e3)
    return times


def row(what: str, work: Callable[[], object], n: int, begin: int = 0) -> list[float]:
    """The medians of each thousand calls; all of it is emitted."""
    medians, means = [], []
    for first in range(begin, begin + n, BATCH):
        count = min(BATCH, begin + n - first)
        times = times_ms(work, count)
        medians.append(statistics.median(times))
        means.append(statistics.fmean(times))
        note(f"{what} of {first:6} to {first + count:6}: {medians[-1]:.2f} ms (median)")
    emit({f"{what}_ms": {"medians": medians, "means": means}})
    return medians


def beside(actor: Any, array: Any, n: int) -> dict[str, float]:
    import ray

    calls = times_ms(lambda: ray.get(actor.nothing.remote(), timeout=TIMEOUT_S), n)
    puts = times_ms(lambda: ray.put(array), n)
    return {"actor_call_ms": statistics.median(calls), "ray_put_ms": statistics.median(puts)}


def allow_descriptors(n: int) -> None:
    """A page server takes as many as it may have, and keeps back an eighth. Its limit is this
    process's, which may raise its own where it has the right to."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = (n + DESCRIPTORS_BESIDE) * 8 // 7 + 1
    if most == resource.RLIM_INFINITY or needed <= most:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, needed))
    except (OSError, ValueError) as failure:
        raise SystemExit(
            f"{n} variables need {needed} file descriptors, and RLIMIT_NOFILE is {most}: raise "
            f"the hard limit (ulimit -Hn). {failure}"
        ) from failure


def holds(node_id: str) -> dict[str, int]:
    """Private memory and descriptors of a node's page server."""
    from clamor_ray._session import process_sessions

    servers = process_sessions.current().rpc.servers()
    (pid,) = [server.pid for server in servers if server.node_id == node_id]
    return {
        "private_bytes": processes.private_bytes(pid),
        "descriptors": processes.open_descriptors(pid),
    }


def each(before: dict[str, int], after: dict[str, int], n: int) -> dict[str, float]:
    return {what: (after[what] - before[what]) / n for what in before}


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench many", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a run of seconds: no figure")
    parser.add_argument("--variables", type=int, default=0)
    args = parser.parse_args(argv)
    n = args.variables or (2 * BATCH if args.small else 20 * BATCH)
    n_read = min(READ_MOST, n // 2)
    allow_descriptors(n)

    import numpy as np
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    import clamor_ray as clamor

    with common.several_nodes(2, STORE_BYTES) as nodes:
        emit(common.environment(trap=nodes.trap))
        here, there = nodes.ids
        actor = ray.remote(Nobody).options(num_cpus=0).remote()
        on_there = NodeAffinitySchedulingStrategy(there, soft=False)
        reader = ray.remote(Reader).options(num_cpus=0, scheduling_strategy=on_there).remote()
        array = np.arange(N_ITEMS, dtype=np.float64)

        def read(some: list[Any]) -> None:
            for at in range(0, len(some), READ_AT_ONCE):
                part = some[at : at + READ_AT_ONCE]
                ray.get(reader.read.remote(part, array), timeout=TIMEOUT_S)

        beside(actor, array, 50)  # a warm-up
        first = clamor.put(array)
        read([first])
        clamor.free(first)
        emit({"variables": 0, **beside(actor, array, 200)})
        refs: list[Any] = []
        before, before_there = holds(here), holds(there)
        puts = row("put", lambda: refs.append(clamor.put(array)), n)
        at_home = each(before, holds(here), n)
        for ref in (refs[0], refs[-1]):
            common.verify("what was put", ref.get(), array)
        n_counted = n_read // 2
        read(refs[-n_read:-n_counted])
        at_first = holds(there)
        read(refs[-n_counted:])
        at_reader = each(at_first, holds(there), n_counted)
        emit({"each_at_home": at_home, "each_at_reader": at_reader})
        among = beside(actor, array, 200)
        emit({"variables": n, **among})
        frees_read = row("free_read", lambda: clamor.free(refs.pop()), n_read)
        frees = row("free", lambda: clamor.free(refs.pop()), n - n_read, n_read)
        emit({"empty_at_home": before, "left_at_home": holds(here)})
        emit({"empty_at_reader": before_there, "left_at_reader": holds(there)})
        figures = {
            "put_ms": max(puts),
            "free_ms": max(frees),
            "free_read_ms": max(frees_read),
            "put_growth": puts[-1] / puts[0],
            "home_bytes_each": at_home["private_bytes"],
            "reader_bytes_each": at_reader["private_bytes"],
        }
        common.summary({**figures, **among})
