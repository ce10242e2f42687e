"""The driver of `sparse_lr`, in the namespace of the first node: the same steps on all sides.

python -m bench.drivers.sparse_driver CASE_AS_JSON      prints one JSON object for each round
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console

from bench.peers import actor_ps
from bench.support import common
from bench.support.common import BLOCK_BYTES, emit, note, now
from clamor_ray.workloads import sparse_lr
from clamor_ray.workloads.cli.stages import Stages
from clamor_ray.workloads.models.logistic import Synthetic

RATE = 0.2
SAMPLE_S = 0.1
COUNTERS = (
    *("bytes_received", "bytes_sent", "blocks_fetched", "rows_fetched", "faults"),
    *("peer_blocks_fetched", "prefetched_blocks", "forks", "commits_published"),
)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is trained.

    Args:
        name: of the case.
        n_parameters: in all.
        n_values: that the 39 features can have together.
        rows: of each worker.
        skew: of the Zipf distribution of values; 0: all as likely.
        even: every feature can have as many values.
        iterations: of a round.
        rounds: that count; one more comes before.
        sides: "clamor" and ways of the actors.
    """

    name: str
    n_parameters: int
    n_values: int
    rows: int
    skew: float
    even: bool
    iterations: int
    rounds: int
    sides: tuple[str, ...] = ("clamor", *actor_ps.WAYS)


class Touched(NamedTuple):
    """What a partition's rows touch, and where they are."""

    node_id: str
    ids: npt.NDArray[np.int32]


def touched(blocks: Any) -> list[Touched]:
    """Of the partition that this runs on."""
    import ray

    node_id = ray.get_runtime_context().get_node_id()
    return [Touched(node_id, np.unique(np.concatenate([block.ids for block in blocks])))]


class Memory:
    """The most that page servers have held, while the block lasts."""

    def __init__(self) -> None:
        self.most: dict[str, dict[str, int]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._sample()  # a block that is over within SAMPLE_S has no other

    def _run(self) -> None:
        while not self._over.wait(SAMPLE_S):
            self._sample()

    def _sample(self) -> None:
        for node_id, held in held_bytes().items():
            most = self.most.setdefault(node_id, held)
            for name, n_bytes in held.items():
                most[name] = max(most[name], n_bytes)


def held_bytes() -> dict[str, dict[str, int]]:
    """What page servers hold, by node: of others' variables, of their own, and old versions."""
    import clamor_ray as clamor

    found = {}
    for node in clamor.stats().nodes:
        if node.error:
            raise RuntimeError(f"the page server of node {node.node_id} is silent: {node.error}")
        engine = node.engine
        both = engine.cached_bytes + engine.home_bytes
        old = engine.history_bytes + engine.history_retained_bytes + engine.layer_bytes
        found[node.node_id] = {
            "cached": engine.cached_bytes,
            "home": engine.home_bytes,
            "both": both,
            "history": old,
            "all": both + old,
        }
    return found


def engines() -> dict[str, int]:
    """Counters of all page servers together."""
    import clamor_ray as clamor

    every = [dataclasses.asdict(node.engine) for node in clamor.stats().nodes]
    return {name: sum(engine[name] for engine in every) for name in COUNTERS}


def memory_line(
    idle: dict[str, dict[str, int]],
    most: dict[str, dict[str, int]],
    parts: list[Touched],
) -> dict[str, Any]:
    """What each node held beyond what it held before, and what it touched.

    Args:
        idle: before the model was made.
        most: while it was trained.
        parts: of each partition.
    """
    nodes = []
    for node_id in sorted({part.node_id for part in parts}):
        ids = np.unique(np.concatenate([part.ids for part in parts if part.node_id == node_id]))
        grown = {
            name: most[node_id][name] - idle.get(node_id, {}).get(name, 0) for name in most[node_id]
        }
        nodes.append(
            {
                **{f"{name}_bytes": n_bytes for name, n_bytes in grown.items()},
                "parameters_bytes": 4 * len(ids),
                "blocks_bytes": BLOCK_BYTES * len(np.unique(ids // (BLOCK_BYTES // 4))),
            }
        )
    return {
        "nodes": nodes,
        "of_parameters": max(node["both_bytes"] / node["parameters_bytes"] for node in nodes),
        "of_blocks": max(node["both_bytes"] / node["blocks_bytes"] for node in nodes),
        "all_of_parameters": max(node["all_bytes"] / node["parameters_bytes"] for node in nodes),
    }


class Training:
    """One case on all sides."""

    def __init__(self, case: Case) -> None:
        from clamor_ray.workloads.cli.waiting import nodes_with_cpus

        self.case = case
        nodes = nodes_with_cpus()
        n_workers = sum(n_cpus for _, n_cpus in nodes)
        synthetic = Synthetic(
            case.rows * n_workers, n_workers, case.n_values, case.skew, even=case.even
        )
        self.model = sparse_lr.SparseWeights(case.n_parameters)
        job = sparse_lr.SparseJob(synthetic, n_parameters=case.n_parameters)
        stages = Stages(Console(stderr=True, highlight=False))
        self.prepared = sparse_lr.prepare(job, self.model.layout, stages)
        note(f"{case.name}: {self.prepared.n_rows} rows, {self.prepared.n_seen} parameters seen")
        ids = [node_id for node_id, _ in nodes]
        self.server = actor_ps.Server(ids, synthetic, case.n_parameters)
        self.n_done = dict.fromkeys(case.sides, 0)
        self.losses: dict[str, list[float]] = {side: [] for side in case.sides}

    def round(self, side: str) -> list[float]:
        """Seconds of each of a round's iterations."""
        seconds = []
        if side == "clamor":
            steps: Callable[[], float] = self._steps()
        else:
            way: Any = side
            steps = lambda: self.server.step(way, RATE)  # noqa: E731
        for _ in range(self.case.iterations):
            start = now()
            loss = steps()
            seconds.append(now() - start)
            self.losses[side].append(loss)
            self.n_done[side] += 1
        return seconds

    def _steps(self) -> Callable[[], float]:
        losses = sparse_lr.iterate(self.model, self.prepared, RATE, self.case.iterations)
        return lambda: next(losses)

    def compare(self) -> dict[str, float]:
        """That all sides have the same weights, but for the order of their sums.

        Returns:
            The largest difference of each peer from ours.
        """
        ours = self.model.of(np.arange(self.prepared.n_seen, dtype=np.int32))
        differences = {}
        for side in self.case.sides:
            if side == "clamor":
                continue
            way: Any = side
            theirs = self.server.weights(way)
            most = 1e-4 * float(np.abs(ours).max())
            differences[side] = float(np.abs(ours - theirs).max())
            same = np.allclose(self.losses["clamor"], self.losses[side], rtol=1e-5)
            if self.n_done[side] != self.n_done["clamor"] or not same:
                raise common.WrongData(f"{side}: other losses than ours")
            if not differences[side] <= most:
                raise common.WrongData(f"{side}: a weight differs by {differences[side]}")
        return differences

    def close(self) -> None:
        """Ends the peer, frees the model."""
        self.server.close()
        self.prepared.blocks.unpersist()
        self.model.free()


def run(case: Case) -> None:
    """Rounds of all sides in turn, each way round once, then one more of ours for the memory."""
    idle = held_bytes()
    training = Training(case)
    try:
        for number in range(-1, case.rounds):
            for side in case.sides if number % 2 else case.sides[::-1]:
                note(f"{case.name}: round {number}, {side}")
                emit({"begins": side})  # what the links carried until here is nobody's
                before = engines()
                seconds = training.round(side)
                grown = {name: value - before[name] for name, value in engines().items()}
                line: dict[str, Any] = {"case": case.name, "side": side, "round": number}
                if side == "clamor":
                    line["engines"] = grown
                emit({**line, "seconds": seconds})
        differences = training.compare()
        parts = training.prepared.blocks.map_batches(touched).collect()
        with Memory() as memory:
            training.round("clamor")
        every = np.unique(np.concatenate([part.ids for part in parts]))
        emit(
            {
                "case": case.name,
                "same_within": differences,
                "rows": training.prepared.n_rows,
                "parameters": case.n_parameters,
                "seen": training.prepared.n_seen,
                "touched": {
                    "all": len(every),
                    "worker": float(np.mean([len(part.ids) for part in parts])),
                },
                "memory": memory_line(idle, memory.most, parts),
            }
        )
    finally:
        training.close()


def main(arguments: list[str]) -> int:
    import ray

    import clamor_ray as clamor
    from clamor_ray.workloads.cli.waiting import start_workers

    cases = [
        Case(**{**fields, "sides": tuple(fields["sides"])}) for fields in json.loads(arguments[0])
    ]
    ray.init(address="auto", log_to_driver=False, logging_level="error")
    try:
        emit({"trap": clamor.init().trap})
        note("starting workers")
        start_workers(collections=True)
        for case in cases:
            run(case)
    finally:
        clamor.shutdown(force=True)
        ray.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
