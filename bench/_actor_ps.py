"""The peer of `sparse_lr`: a sharded parameter server made of plain Ray actors.

A shard on each node has the parameters that are homed there in our case, in one private array. One
worker for each CPU has a partition of the rows, and in each iteration asks all shards at once for
its weights (each id once, by shard, int32; float32 back), works out its gradient, sends it to all
shards at once. A shard applies the gradients of an iteration when it has those of all workers, so
that nobody sees half of a step: the iterations are those of synchronous SGD without a barrier
between pull and push.

Two ways of naming ids: "sent" with every call, or "kept", where a worker tells each shard its ids
once (the key caching of Li et al., OSDI 2014) and from then on only numbers travel.
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from clamor_ray.workloads import _logistic
from clamor_ray.workloads._logistic import Distinct, Float32, Int32, Layout, Synthetic

TIMEOUT_S = 900

Way = Literal["sent", "kept"]
WAYS: Final[tuple[Way, ...]] = get_args(Way)


class Shard:
    """Some parameters.

    Args:
        length: of them.
        n_workers: whose gradients make a step.
    """

    def __init__(self, length: int, n_workers: int) -> None:
        self.weights = np.zeros(length, np.float32)  # the kernel gives memory for what is written
        self.n_workers = n_workers
        self.kept: dict[int, Int32] = {}
        self.pushed: dict[int, tuple[Int32, Float32]] = {}

    def keep(self, worker: int, places: Int32) -> None:
        """From now on `places` is what this worker means where it gives none."""
        self.kept[worker] = np.array(places)

    def pull(self, worker: int, places: Int32 | None) -> Float32:
        """The weights there."""
        return self.weights[self.kept[worker] if places is None else places]

    def push(self, worker: int, places: Int32 | None, values: Float32) -> None:
        """Adds, when all workers have pushed; in their order, so that results repeat."""
        self.pushed[worker] = (self.kept[worker] if places is None else places, values)
        if len(self.pushed) == self.n_workers:
            for _, (where, what) in sorted(self.pushed.items()):
                self.weights[where] += what  # no id is there twice
            self.pushed = {}

    def first(self, n: int) -> Float32:
        """The first n parameters, for the check."""
        return self.weights[:n]


class _Part(NamedTuple):
    """What a worker asks of one shard.

    Args:
        shard: the actor.
        part: of the worker's ids.
        places: the shard's elements that they are; None: the shard knows.
    """

    shard: Any
    part: slice
    places: Int32 | None


class Worker:
    """One partition of the rows."""

    def __init__(self, number: int, synthetic: Synthetic, layout: Layout) -> None:
        self.number, self.layout = number, layout
        self.rows = synthetic.partition(number)
        self.ways: dict[Way, list[_Part]] = {}

    def distinct(self) -> Distinct:
        """Its keys, for the dictionary."""
        return _logistic.distinct(self.rows)

    def encode(self, ids: Int32) -> npt.NDArray[np.int32]:
        """Gives the rows their ids; the parameters that they touch."""
        keys = np.unique(self.rows.keys)
        numbers = ids[np.searchsorted(keys, self.rows.keys)]
        self.block = _logistic.block_of(self.rows.labels, numbers, self.layout)
        del self.rows
        return self.block.ids

    def meet(self, way: Way, shards: list[Any]) -> None:
        """The shards, and how ids are named to them."""
        import ray

        bounds = self.block.starts
        parts: list[_Part] = []
        for number, shard in enumerate(shards):
            part = slice(bounds[number], bounds[number + 1])
            parts.append(_Part(shard, part, self.block.places[part]))
        if way == "kept":
            told = [each.shard.keep.remote(self.number, each.places) for each in parts]
            ray.get(told, timeout=TIMEOUT_S)
            parts = [each._replace(places=None) for each in parts]
        self.ways[way] = parts

    def step(self, way: Way, n_rows: int, rate: float) -> float:
        """One iteration; the sum of its rows' losses before it."""
        import ray

        parts = self.ways[way]
        asked = [each.shard.pull.remote(self.number, each.places) for each in parts]
        weights = np.empty(len(self.block.ids), np.float32)
        for each, found in zip(parts, ray.get(asked, timeout=TIMEOUT_S), strict=True):
            weights[each.part] = found
        slope, loss = _logistic.gradient(self.block, weights, n_rows)
        slope *= -rate
        sent = [
            each.shard.push.remote(self.number, each.places, slope[each.part]) for each in parts
        ]
        ray.get(sent, timeout=TIMEOUT_S)
        return loss


class Server:
    """Shards and workers on their nodes, driven from here.

    Args:
        nodes: Ray's ids of the nodes, each with a shard.
        synthetic: the rows; as many partitions as workers.
        layout: as many variables as nodes.
    """

    def __init__(self, nodes: list[str], synthetic: Synthetic, layout: Layout) -> None:
        import ray

        from bench import _common

        n = synthetic.n_partitions
        self.layout, self.n_rows = layout, synthetic.n_rows
        self.shards = {
            way: [_common.pinned(Shard, node).remote(layout.length, n) for node in nodes]
            for way in WAYS
        }
        self.workers = [
            _common.pinned(Worker, nodes[i * len(nodes) // n]).remote(i, synthetic, layout)
            for i in range(n)
        ]
        found = ray.get([worker.distinct.remote() for worker in self.workers], timeout=TIMEOUT_S)
        ids, keys = _logistic.assign(found, layout.n_parameters)
        self.n_seen = min(len(keys), layout.n_parameters)
        encoded = [w.encode.remote(of) for w, of in zip(self.workers, ids, strict=True)]
        self.touched: list[Int32] = ray.get(encoded, timeout=TIMEOUT_S)

        for way, shards in self.shards.items():
            met = [worker.meet.remote(way, shards) for worker in self.workers]
            ray.get(met, timeout=TIMEOUT_S)

    def step(self, way: Way, rate: float) -> float:
        """One iteration; the mean loss before it."""
        import ray

        steps = [worker.step.remote(way, self.n_rows, rate) for worker in self.workers]
        return float(sum(ray.get(steps, timeout=TIMEOUT_S))) / self.n_rows

    def weights(self, way: Way) -> Float32:
        """Of all parameters that rows touch."""
        import ray

        ids = np.arange(self.n_seen, dtype=np.int32)
        most = int(self.layout.places(ids).max(initial=-1)) + 1
        asked = [shard.first.remote(most) for shard in self.shards[way]]
        parts = ray.get(asked, timeout=TIMEOUT_S)
        return self.layout.together(parts, ids.astype(np.int64))

    def close(self) -> None:
        """Ends its actors."""
        import ray

        for actor in (*self.workers, *(shard for of in self.shards.values() for shard in of)):
            ray.kill(actor)
