"""The driver of `raid`, on the first host of its lab: one session.

python -m bench.drivers.raid_driver OPTIONS_AS_JSON      prints its records as JSON lines

Where a host is to be killed it asks for that with {"kill_after_s": ...}, and reads from stdin when
it was, by the machine's monotonic clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from bench.support import common
from bench.support.common import emit, grown, note
from clamor_ray.workloads.data import graphs

DAMPING = 0.85
DEGREE = 16
EXPONENT = 2.1
SLACK = 1.05  # of the budget, while a batch comes in
WAIT_S = 120.0
POLL_S, SLOW_POLL_S, SETTLE_S = 0.02, 0.25, 3.0
KILL_AT = 0.5  # of an iteration
MOST_ITERATIONS = 10_000
COUNTERS = (
    *("faults", "fetch_requests", "fetch_retries", "blocks_fetched", "bytes_received"),
    *("evicted_blocks", "refetched_blocks", "commits_applied"),
)


@dataclasses.dataclass(frozen=True)
class Options:
    """Of one session.

    Args:
        hosts: of the lab.
        victim: Ray's id of the one that is killed, which is not the driver's.
        vertices: of the graph.
        iterations: timed ones of each run, after the first.
        repetitions: of each level's run.
        tasks: of an iteration.
        cache_share: of the graph, that a node's cache may hold.
        storage_bytes: of the variable that is put with each of `stored`.
        stored: levels of redundancy whose storage is measured.
        is_ranked: whether there are PageRank and a killed host, or storage alone.
    """

    hosts: int
    victim: str
    vertices: int
    iterations: int
    repetitions: int
    tasks: int
    cache_share: float
    storage_bytes: int
    stored: tuple[str, ...]
    is_ranked: bool


def graph_bytes_of(graph: graphs.Graph) -> int:
    """Of the graph, and of the vector that each iteration changes."""
    return sum(array.nbytes for array in vars(graph).values()) + 8 * graph.n_vertices


def until(is_so: Callable[[], bool], poll_s: float, what: str) -> float:
    """When it was so, by the machine's clock."""
    deadline_s = time.monotonic() + WAIT_S
    while not is_so():
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"after {WAIT_S:.0f} s the bench still waits for {what}")
        time.sleep(poll_s)  # the registry tells nobody
    return time.monotonic()


class Watch(threading.Thread):
    """Waits for the kill, for the moment from which the registry calls the host's page server lost,
    and for that from which each piece has a home again."""

    def __init__(self, victim: str) -> None:
        super().__init__(daemon=True)
        self.victim, self.n_homes = victim, n_homes()
        self.killed_s = self.detected_s = self.repaired_s = 0.0
        self.detected = threading.Event()
        self.error: str | None = None

    def run(self) -> None:
        try:
            self.killed_s = float(sys.stdin.readline())
            self.detected_s = until(self._is_lost, POLL_S, "its page server to be lost")
            self.detected.set()
            text = f"all of {self.n_homes} homes to be there again"
            self.repaired_s = until(lambda: n_homes() == self.n_homes, SLOW_POLL_S, text)
        except Exception as failure:  # any: `result` raises it
            self.error = repr(failure)
        self.detected.set()

    def _is_lost(self) -> bool:
        from clamor_ray._read import opener

        # Not `clamor.stats()`, which waits for the answers of servers that do not live.
        servers = opener.current().rpc.servers()
        return all(each.node_id != self.victim for each in servers)

    def result(self) -> dict[str, float]:
        """Seconds of both."""
        self.join(WAIT_S)
        if self.error or self.is_alive():
            raise RuntimeError(f"the killed host: {self.error or 'no end in time'}")
        return {
            "detection_s": self.detected_s - self.killed_s,
            "repair_s": self.repaired_s - self.detected_s,
        }


def n_homes() -> int:
    """Pieces that have a home, of all variables."""
    import clamor_ray as clamor

    nodes = clamor.stats().nodes
    return sum(region.is_home for node in nodes for region in node.regions)


def home_bytes() -> int:
    """Of all nodes. Raises where one does not say."""
    import clamor_ray as clamor

    nodes = clamor.stats().nodes
    if silent := [node.error for node in nodes if node.error]:
        raise RuntimeError(f"a page server is silent: {silent}")
    return sum(node.engine.home_bytes for node in nodes)


def least_home_bytes() -> int:
    """The least of some seconds: what has moved is dropped a moment later where it was made."""
    looks = []
    end_s = time.monotonic() + SETTLE_S
    while time.monotonic() < end_s:
        looks.append(home_bytes())
        time.sleep(SLOW_POLL_S)
    return min(looks)


class Ranking:
    """PageRank over variables with one redundancy, by tasks on some hosts."""

    def __init__(
        self, graph: graphs.Graph, level: Any, hosts: list[str], n_tasks: int, budget_bytes: int
    ) -> None:
        import clamor_ray as clamor
        from clamor_ray.workloads import pagerank

        self.graph, self.done = graph, 0
        self.refs = (
            clamor.put(graph, redundancy=level),
            clamor.zeros(graph.n_vertices, redundancy=level),
        )
        if not all(ref._piece_versions() for ref in self.refs):
            # raid0 would leave it on one node, and that is another comparison.
            raise ValueError("a variable is too small for pieces: give more vertices")
        ranges = graphs.balanced_ranges(graph.first_edge, n_tasks)
        edges = graph.n_edges // len(ranges)
        self.tasks = pagerank.Tasks(
            *self.refs,
            pagerank.place(ranges, [(host, 1) for host in hosts]),
            zigzag=True,
            whole=pagerank.whole_vector(self.refs[1].nbytes, edges, budget_bytes),
        )
        self.steps = graphs.iterate(graph, self.tasks.step, DAMPING, MOST_ITERATIONS, 0.0)

    def step(self) -> dict[str, float]:
        """An iteration: seconds of its commit, and of all of it."""
        self.ranks, _ = next(self.steps)
        self.done += 1
        return {
            "commit_s": self.tasks.update_s,
            "seconds": self.tasks.update_s + self.tasks.tasks_s,
        }

    def check(self) -> None:
        """Raises `WrongRanks` where they are not those of one process."""
        graphs.check(self.ranks, graphs.reference(self.graph, DAMPING, self.done))

    def free(self) -> None:
        """Both variables."""
        for ref in self.refs:
            ref.free()


class Session:
    """A session, and the graph, which is put anew for each run."""

    def __init__(self, options: Options) -> None:
        import ray

        import clamor_ray as clamor

        self.options = options
        self.budget_bytes = 0
        if options.is_ranked:
            note("generating the graph")
            n = options.vertices
            self.graph = graphs.generate(n, DEGREE * n, EXPONENT, seed=1)
            self.graph_bytes = graph_bytes_of(self.graph)
            self.budget_bytes = int(options.cache_share * self.graph_bytes)
        self.trap = clamor.init(cache_bytes=self.budget_bytes or None).trap
        self.nodes = [str(node["NodeID"]) for node in ray.nodes() if node["Alive"]]
        if len(self.nodes) != options.hosts:
            raise RuntimeError(f"{len(self.nodes)} hosts are here, not {options.hosts}")

    def about(self) -> dict[str, Any]:
        """What a reader of the figures wants to know."""
        if not self.options.is_ranked:
            return {"trap": self.trap}
        return {
            "trap": self.trap,
            "edges": self.graph.n_edges,
            "graph_bytes": self.graph_bytes,
            "budget_bytes": self.budget_bytes,
        }

    def storage(self, level: str) -> dict[str, Any]:
        """Bytes that homes hold of a variable with this redundancy, and those of the variable."""
        import numpy as np

        import clamor_ray as clamor

        before = home_bytes()
        words = common.make_array(self.options.storage_bytes, 1)
        ref = clamor.put(words, redundancy=level)  # type: ignore[arg-type]
        held = least_home_bytes() - before
        common.verify("the variable", np.array(ref.get()), words)
        ref.free()
        until(lambda: home_bytes() <= before, SLOW_POLL_S, "freed memory to be given back")
        return {
            "run": "storage",
            "level": level,
            "hosts": self.options.hosts,
            "variable_bytes": words.nbytes,
            "held_bytes": held,
            "ratio": held / words.nbytes,
        }

    def counters(self) -> dict[str, int]:
        """Of all nodes that answer, as sums. Raises where a cache is above its budget."""
        import clamor_ray as clamor

        nodes = [node for node in clamor.stats().nodes if not node.error]
        for node in nodes:
            if node.engine.cached_bytes > SLACK * self.budget_bytes:
                raise AssertionError(
                    f"node {node.node_id[:8]} caches {node.engine.cached_bytes:,} bytes; "
                    f"{self.budget_bytes:,} may be"
                )
        return {name: sum(node.engine[name] for node in nodes) for name in COUNTERS}

    def rank(self, level: str) -> dict[str, Any]:
        """A run with tasks on all hosts; the first iteration, in which caches fill, is apart."""
        with self.ranking(level, self.nodes) as ranking:
            first = ranking.step()
            before = self.counters()
            timed = [ranking.step() for _ in range(self.options.iterations)]
            after = self.counters()
        return {
            "run": "rank",
            "level": level,
            "first_s": first["seconds"],
            "iteration_s": [each["seconds"] for each in timed],
            "commit_s": [each["commit_s"] for each in timed],
            **{name: grown(before, after, name) for name in COUNTERS},
        }

    def degrade(self, level: str) -> dict[str, Any]:
        """A host that has homes and no tasks is killed in the middle of an iteration."""
        victim = self.options.victim
        with self.ranking(level, [node for node in self.nodes if node != victim]) as ranking:
            ranking.step()
            before = [ranking.step()["seconds"] for _ in range(self.options.iterations)]
            watch = Watch(victim)
            watch.start()
            emit({"kill_after_s": KILL_AT * statistics.median(before)})
            within: list[float] = []
            while not watch.detected.is_set():
                within.append(ranking.step()["seconds"])
            after = [ranking.step()["seconds"] for _ in range(self.options.iterations)]
            found = watch.result()
        return {
            "run": "degraded",
            "level": level,
            "before_s": before,
            "until_detected_s": within,
            "after_s": after,
            **found,
        }

    @contextlib.contextmanager
    def ranking(self, level: str, hosts: list[str]) -> Iterator[Ranking]:
        """A run, whose ranks are right in the end."""
        ranking = Ranking(self.graph, level, hosts, self.options.tasks, self.budget_bytes)
        try:
            yield ranking
            ranking.check()
        finally:
            ranking.free()


def main(arguments: list[str]) -> int:
    import ray

    import clamor_ray as clamor

    fields = json.loads(arguments[0])
    options = Options(**{**fields, "stored": tuple(fields["stored"])})
    ray.init(address="auto", log_to_driver=False, logging_level="error")
    try:
        session = Session(options)
        emit(session.about())
        for level in options.stored:
            note(f"storage of {level} on {options.hosts} hosts")
            emit(session.storage(level))
        if not options.is_ranked:
            return 0
        note("starting workers")
        session.rank("raid0")
        for number in range(options.repetitions):
            levels = ("raid0", "raid5") if number % 2 == 0 else ("raid5", "raid0")
            for level in levels:
                note(f"repetition {number + 1}: {level}")
                emit({**session.rank(level), "repetition": number})
        note("a host is killed")
        emit(session.degrade("raid5"))
    finally:
        clamor.shutdown(force=True)
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
