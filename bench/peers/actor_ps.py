"""The peer of `sparse_lr`: a sharded parameter server made of plain Ray actors.

A shard on each node has the parameters that are homed there in our case, in one private array. One
worker for each CPU has a partition of the rows. In each iteration it gets its weights from all
shards at once (each id once, int32; float32 back), works out its gradient, and sends that to all
shards at once. A shard applies the gradients of an iteration when it has those of all who push, so
that nobody sees half of a step: the iterations are those of synchronous SGD without a barrier
between pull and push.

Three ways:

    sent    ids travel with every call
    kept    a worker tells each shard its ids once (the key caching of Li et al., OSDI 2014), and
            from then on only numbers travel
    node    as kept, with an actor on each node between its workers and the shards: it pulls what
            any of them needs once, into Ray's store, where all of them read it, and adds up their
            gradients before it pushes
"""

from __future__ import annotations

from typing import Any, Final, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from clamor_ray.workloads.models import logistic
from clamor_ray.workloads.models.logistic import (
    Distinct,
    Float32,
    Int32,
    ParameterLayout,
    Synthetic,
)

TIMEOUT_S = 900

Way = Literal["sent", "kept", "node"]
WAYS: Final[tuple[Way, ...]] = get_args(Way)


class Shard:
    """Some parameters.

    Args:
        length: of them.
        n_workers: whose gradients make a step, workers' or nodes'.
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
    """What a worker, or a node, asks of one shard.

    Args:
        shard: the actor.
        part: of its ids.
        places: the shard's elements that they are; None: the shard knows.
    """

    shard: Any
    part: slice
    places: Int32 | None


def _parts_of(
    number: int, ids: Int32, layout: ParameterLayout, shards: list[Any], *, keep: bool
) -> list[_Part]:
    """What to ask of each shard; with `keep` the shards are told the places, here and now.

    Args:
        number: of the worker or node.
        ids: sorted by shard.
    """
    import ray

    places, length = layout.places(ids), layout.stripe_length
    assert (np.diff(places) > 0).all()
    bounds = np.searchsorted(places, np.arange(len(shards) + 1) * length).tolist()
    parts = []
    for i, (shard, low, high) in enumerate(zip(shards, bounds[:-1], bounds[1:], strict=True)):
        own = places[low:high] - np.int32(i * length)
        parts.append(_Part(shard, slice(low, high), own))
    if keep:
        told = [each.shard.keep.remote(number, each.places) for each in parts]
        ray.get(told, timeout=TIMEOUT_S)
        parts = [each._replace(places=None) for each in parts]
    return parts


def _pulled(number: int, parts: list[_Part], n: int) -> Float32:
    """The n weights of a worker or node, from all shards at once."""
    import ray

    asked = [each.shard.pull.remote(number, each.places) for each in parts]
    weights = np.empty(n, np.float32)
    for each, found in zip(parts, ray.get(asked, timeout=TIMEOUT_S), strict=True):
        weights[each.part] = found
    return weights


def _push(number: int, parts: list[_Part], slope: Float32) -> None:
    """A worker's or node's part of a step, to all shards at once."""
    import ray

    sent = [each.shard.push.remote(number, each.places, slope[each.part]) for each in parts]
    ray.get(sent, timeout=TIMEOUT_S)


class Node:
    """Between the workers of a node and the shards.

    Args:
        number: of the node.
        layout: of the parameters.
        ids: of each of its workers, each sorted by shard.
    """

    def __init__(self, number: int, layout: ParameterLayout, *ids: Int32) -> None:
        every = np.unique(np.concatenate(ids))
        order = np.argsort(layout.places(every))
        self.number, self.layout, self.ids = number, layout, every[order]
        rank = np.empty(len(every), np.int32)
        rank[order] = np.arange(len(every), dtype=np.int32)
        self.where: list[Int32] = [rank[np.searchsorted(every, each)] for each in ids]

    def places(self, worker: int) -> Int32:
        """Where a worker's ids are among the node's."""
        return self.where[worker]

    def meet(self, shards: list[Any]) -> None:
        """The shards."""
        self.parts = _parts_of(self.number, self.ids, self.layout, shards, keep=True)

    def pull(self) -> Float32:
        """The weights of all of its workers."""
        return _pulled(self.number, self.parts, len(self.ids))

    def push(self, *slopes: Float32) -> None:
        """Its workers' part of a step, in their order."""
        total = np.zeros(len(self.ids), np.float32)
        for where, slope in zip(self.where, slopes, strict=True):
            total[where] += slope  # no id is there twice
        _push(self.number, self.parts, total)


class Worker:
    """One partition of the rows."""

    def __init__(self, number: int, synthetic: Synthetic, layout: ParameterLayout) -> None:
        self.number, self.layout = number, layout
        self.rows = synthetic.partition(number)
        self.ways: dict[Way, list[_Part]] = {}

    def distinct(self) -> Distinct:
        """Its keys, for the dictionary."""
        return logistic.distinct(self.rows)

    def encode(self, ids: Int32) -> npt.NDArray[np.int32]:
        """Gives the rows their ids; the parameters that they touch, sorted by shard."""
        keys = np.unique(self.rows.keys)
        numbers = ids[np.searchsorted(keys, self.rows.keys)]
        self.block = logistic.block_of(self.rows.labels, numbers, self.layout)
        del self.rows
        return self.block.ids

    def meet(self, way: Way, shards: list[Any]) -> None:
        """The shards, and how ids are named to them."""
        keep = way == "kept"
        self.ways[way] = _parts_of(self.number, self.block.ids, self.layout, shards, keep=keep)

    def meet_node(self, places: Int32) -> None:
        """Where its ids are among the node's."""
        self.in_node = np.array(places)

    def step(self, way: Way, n_rows: int, rate: float) -> float:
        """One iteration; the sum of its rows' losses before it."""
        parts = self.ways[way]
        weights = _pulled(self.number, parts, len(self.block.ids))
        slope, loss = logistic.gradient(self.block, weights, n_rows)
        slope *= -rate
        _push(self.number, parts, slope)
        return loss

    def step_in_node(self, weights: Float32, n_rows: int, rate: float) -> tuple[Float32, float]:
        """What it adds to the node's step, and the sum of its rows' losses before it."""
        slope, loss = logistic.gradient(self.block, weights[self.in_node], n_rows)
        slope *= -rate
        return slope, loss


class Server:
    """Shards and workers on their nodes, driven from here.

    Args:
        nodes: Ray's ids of the nodes, each with a shard.
        synthetic: the rows; as many partitions as workers.
        n_parameters: in all.
    """

    def __init__(self, nodes: list[str], synthetic: Synthetic, n_parameters: int) -> None:
        import ray

        from bench.support import common

        n = synthetic.n_partitions
        layout = ParameterLayout(n_parameters, len(nodes))  # a stripe is a shard
        self.layout, self.n_rows = layout, synthetic.n_rows
        pushers: dict[Way, int] = {"sent": n, "kept": n, "node": len(nodes)}
        self.shards = {
            way: [common.pinned(Shard, node).remote(layout.stripe_length, of_way) for node in nodes]
            for way, of_way in pushers.items()
        }
        self.node_of = [i * len(nodes) // n for i in range(n)]
        self.workers = [
            common.pinned(Worker, nodes[node]).remote(i, synthetic, layout)
            for i, node in enumerate(self.node_of)
        ]
        found = ray.get([worker.distinct.remote() for worker in self.workers], timeout=TIMEOUT_S)
        ids, keys = logistic.assign(found, layout.n_parameters)
        self.n_seen = min(len(keys), layout.n_parameters)
        encoded = [w.encode.remote(of) for w, of in zip(self.workers, ids, strict=True)]
        self.touched: list[Int32] = ray.get(encoded, timeout=TIMEOUT_S)
        for way in ("sent", "kept"):
            shards = self.shards[way]  # type: ignore[index]
            ray.get([w.meet.remote(way, shards) for w in self.workers], timeout=TIMEOUT_S)

        self.nodes, told = [], []
        for number, node in enumerate(nodes):
            here = [i for i in range(n) if self.node_of[i] == number]
            actor = common.pinned(Node, node).remote(
                number, layout, *(self.touched[i] for i in here)
            )
            self.nodes.append(actor)
            told.append(actor.meet.remote(self.shards["node"]))
            for place, i in enumerate(here):
                told.append(self.workers[i].meet_node.remote(actor.places.remote(place)))
        ray.get(told, timeout=TIMEOUT_S)

    def step(self, way: Way, rate: float) -> float:
        """One iteration; the mean loss before it."""
        import ray

        if way == "node":
            return self._step_in_nodes(rate)
        steps = [worker.step.remote(way, self.n_rows, rate) for worker in self.workers]
        return float(sum(ray.get(steps, timeout=TIMEOUT_S))) / self.n_rows

    def _step_in_nodes(self, rate: float) -> float:
        import ray

        weights = [node.pull.remote() for node in self.nodes]
        slopes: list[list[Any]] = [[] for _ in self.nodes]
        losses = []
        for worker, node in zip(self.workers, self.node_of, strict=True):
            step = worker.step_in_node.options(num_returns=2)
            slope, loss = step.remote(weights[node], self.n_rows, rate)
            slopes[node].append(slope)
            losses.append(loss)
        pushed = [node.push.remote(*of) for node, of in zip(self.nodes, slopes, strict=True)]
        ray.get(pushed, timeout=TIMEOUT_S)
        return float(sum(ray.get(losses, timeout=TIMEOUT_S))) / self.n_rows

    def weights(self, way: Way) -> Float32:
        """Of all parameters that rows touch."""
        import ray

        ids = np.arange(self.n_seen, dtype=np.int32)
        shard, place = np.divmod(self.layout.places(ids), self.layout.stripe_length)
        most = int(place.max(initial=-1)) + 1
        asked = [shard.first.remote(most) for shard in self.shards[way]]
        found: Float32 = np.stack(ray.get(asked, timeout=TIMEOUT_S))[shard, place]
        return found

    def close(self) -> None:
        """Ends its actors."""
        import ray

        shards = [shard for of in self.shards.values() for shard in of]
        for actor in (*self.workers, *self.nodes, *shards):
            ray.kill(actor)
