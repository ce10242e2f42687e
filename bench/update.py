"""A hash map that changes between look-ups (Clamor fig. 9), against Ray putting it anew.

Three nodes, the driver on the first. Round after round the driver changes one key that tasks on all
nodes use, and a task on each node makes Zipf look-ups, the same ones in every round and on both
sides. Both sides have the same table and the same look-up function in C; Ray's is two arrays in its
object store, put anew in each round, the old one let go of before. A task makes as many look-ups as
a worker of the paper's largest cluster: 10 million over 50 nodes of 8 workers.

Timed: from before the change to the last task's answer. The rounds come after a first one, in which
everything travels on both sides; it is printed, and in no figure. `bytes_per_update` is what the
page server of a node received in a round, the worst of all rounds and nodes but the home: the
look-ups find all their blocks there already but for those that the update changed.

`lookup_rate_ratio` is taken on a node that the map is not homed on, in one process that looks the
same random keys up in turn in the map, all of it resident, and in a private NumPy copy of its
table. NumPy's copy is made of huge pages where the kernel gives them.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support import common
from bench.support.common import emit, grown, note, now
from clamor_ray.workloads.data.stream import Batch, PlainMap, checksum, first_value, key_of

N_NODES = 3
SKEW = 0.99
RECORD_BYTES = 1 + 8 + 8
TIMEOUT_S = 900
PROBES = 9


def look_up_ours(m: Any, batch: Batch) -> tuple[int, Any, int]:
    """Version, the values of the named keys, the checksum of all."""
    values = m.get(batch.keys())
    return m.version, values[: len(batch.also)], checksum(values)


def look_up_ray(arrays: dict[str, Any], batch: Batch) -> tuple[int, Any, int]:
    """The same from Ray's object store."""
    from clamor_ray._objects.hashtable import Table

    values = Table(arrays["header"], arrays["slots"]).get(batch.keys(), None)
    return 0, values[: len(batch.also)], checksum(values)


def rates(m: Any, keys: npt.NDArray[np.int64]) -> dict[str, list[float]]:
    """Seconds of look-ups in the map and in a private copy of its table, in turn."""
    from clamor_ray._objects.hashtable import Table

    shared = m._opened()
    private = Table(shared.header.copy(), shared.slots.copy())  # every block is here now
    seconds: dict[str, list[float]] = {"shared": [], "private": []}
    for probe in range(PROBES + 1):
        order = [("shared", m), ("private", private)]
        for name, table in order if probe % 2 else reversed(order):
            start = now()
            values = table.get(keys, None)
            took = now() - start
            common.verify(name, values, first_value(keys))
            if probe:  # the first maps what it touches
                seconds[name].append(took)
    return seconds


class Side:
    """One side's rounds; the other side's model is its own."""

    def __init__(self, name: str, nodes: common.Nodes, n_keys: int, n_lookups: int) -> None:
        self.name, self.nodes = name, nodes
        self.n_keys, self.n_lookups = n_keys, n_lookups
        self.model = PlainMap(n_keys)
        self.tasks: dict[Any, list[Any]] = {}
        drawn = (batch.keys() for batch in self.batches(()))
        self.used_by_all = functools.reduce(np.intersect1d, drawn)

    def change(self, number: int) -> tuple[int, int]:
        """The key that round `number` changes, and its new value."""
        rng = np.random.default_rng(1000 + number)
        key = int(rng.choice(self.used_by_all))
        value = int(rng.integers(0, 1 << 62))
        self.model.change(np.array([key]), np.array([value]))
        return key, value

    def ask(self, function: Any, argument: Any, also: tuple[int, ...]) -> list[Any]:
        """A task on each node; their answers."""
        import ray

        batches = self.batches(also)
        tasks = self.tasks.get(function)
        if tasks is None:  # made once, as a program would
            tasks = [common.pinned(function, node_id) for node_id in self.nodes.ids]
            self.tasks[function] = tasks
        pending = [t.remote(argument, b) for t, b in zip(tasks, batches, strict=True)]
        answers: list[Any] = ray.get(pending, timeout=TIMEOUT_S)
        return answers

    def batches(self, also: tuple[int, ...]) -> list[Batch]:
        return [
            Batch(seed, self.n_keys, self.n_lookups, SKEW, also)
            for seed in range(len(self.nodes.ids))
        ]

    def check(self, answers: list[Any], also: tuple[int, ...]) -> None:
        for batch, (_, named, found) in zip(self.batches(also), answers, strict=True):
            self.model.check(self.name, batch, named, found)


def our_rounds(side: Side, n_rounds: int) -> dict[str, Any]:
    """Updates in place."""
    import ray

    import clamor_ray as clamor

    keys = key_of(np.arange(side.n_keys))
    start = now()
    m = clamor.HashMap.build(keys, first_value(keys), capacity=side.n_keys)
    out: dict[str, Any] = {"build_s": now() - start, "bytes": m.ref.nbytes}
    del keys
    rounds = []
    try:
        for number in range(n_rounds + 1):
            before = [common.node_counters(node_id) for node_id in side.nodes.ids]
            also: tuple[int, ...] = ()
            start = updated = now()
            if number:
                key, value = side.change(number)
                start = now()
                with clamor.update(m) as t:
                    t[key] = value
                updated = now()
                also = (key,)
            answers = side.ask(look_up_ours, m, also)
            end = now()
            after = [common.node_counters(node_id) for node_id in side.nodes.ids]
            side.check(answers, also)
            if any(answer[0] != number for answer in answers):
                raise common.WrongData(f"round {number} read versions of other rounds")
            received = [
                grown(one, two, "bytes_received") for one, two in zip(before, after, strict=True)
            ]
            rounds.append(
                {"seconds": end - start, "update_s": updated - start, "received": received}
            )
        rng = np.random.default_rng(4)
        probes = key_of(rng.integers(0, side.n_keys, 1_000_000))
        probes = probes[~np.isin(probes, list(side.model.changed))]
        task = common.pinned(rates, side.nodes.ids[1])
        out["lookups"] = ray.get(task.remote(m, probes), timeout=TIMEOUT_S)
    finally:
        clamor.free(m.ref)
    return {**out, "first": rounds[0], "rounds": rounds[1:]}


def ray_rounds(side: Side, n_rounds: int) -> dict[str, Any]:
    """The peer: the driver keeps the table, and puts its arrays in each round."""
    import ray

    from clamor_ray._objects.hashtable import Table

    keys = key_of(np.arange(side.n_keys))
    table = Table.build(keys, first_value(keys), side.n_keys)
    del keys
    rounds = []
    for number in range(n_rounds + 1):
        also: tuple[int, ...] = ()
        start = now()
        if number:
            key, value = side.change(number)
            start = now()
            table.set(key, value)
            also = (key,)
        ref = ray.put({"header": table.header, "slots": table.slots})
        put = now()
        answers = side.ask(look_up_ray, ref, also)
        rounds.append({"seconds": now() - start, "put_s": put - start})
        side.check(answers, also)
        del ref, answers
    return {"first": rounds[0], "rounds": rounds[1:]}


def warm(nodes: common.Nodes) -> None:
    """Has the workers and what they import started."""
    import ray

    import clamor_ray as clamor
    from clamor_ray._objects.hashtable import Table

    keys = key_of(np.arange(100_000))
    m = clamor.HashMap.build(keys, first_value(keys))
    side = Side("warm", nodes, len(keys), 1000)
    for _ in range(2):
        side.ask(look_up_ours, m, ())
    clamor.free(m.ref)
    table = Table.build(keys, first_value(keys), len(keys))
    side.ask(look_up_ray, ray.put({"header": table.header, "slots": table.slots}), ())


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench update", description=__doc__)
    parser.add_argument("--small", action="store_true", help="17 MiB, 3 rounds")
    parser.add_argument("--keys", type=int, help="in the map; 34 bytes each (2**25)")
    parser.add_argument("--rounds", type=int, help="of one changed key and look-ups (10)")
    parser.add_argument("--lookups", type=int, help="of each task in each round (25000)")
    options = parser.parse_args(arguments)
    n_keys = options.keys or (1 << 19 if options.small else 1 << 25)
    n_rounds = options.rounds or (3 if options.small else 10)
    n_lookups = options.lookups or (10_000 if options.small else 25_000)
    n_bytes = 2 * n_keys * RECORD_BYTES

    import clamor_ray as clamor

    note("touching memory")
    common.warm_memory(min(6 * n_bytes, 8 << 30))
    environment = common.environment(library=clamor.__version__, bench="update")
    # Two of Ray's at a time: what was let go of may go later.
    with common.several_nodes(N_NODES, store_bytes=2 * n_bytes + (256 << 20)) as nodes:
        environment["environment"].update(trap=nodes.trap, keys=n_keys, lookups=n_lookups)
        emit(environment)
        warm(nodes)
        note("updates in place")
        ours = our_rounds(Side("HashMap", nodes, n_keys, n_lookups), n_rounds)
        lookups = ours.pop("lookups")
        emit({"ours": ours})
        note("Ray puts anew")
        peer = ray_rounds(Side("ray", nodes, n_keys, n_lookups), n_rounds)
        emit({"ray": peer})
    emit({"lookups_s": lookups})

    def total_s(side: dict[str, Any]) -> float:
        return sum(line["seconds"] for line in side["rounds"])

    emit(
        {
            "spread": {
                "ours_s": common.spread([line["seconds"] for line in ours["rounds"]]),
                "ray_s": common.spread([line["seconds"] for line in peer["rounds"]]),
                "update_s": common.spread([line["update_s"] for line in ours["rounds"]]),
            },
            "with_first_round": (total_s(peer) + peer["first"]["seconds"])
            / (total_s(ours) + ours["first"]["seconds"]),
        }
    )
    common.summary(
        {
            "round_speedup": total_s(peer) / total_s(ours),
            # Not the first node: it is the home.
            "bytes_per_update": max(max(line["received"][1:]) for line in ours["rounds"]),
            "lookup_rate_ratio": statistics.median(lookups["private"])
            / statistics.median(lookups["shared"]),
        }
    )
    return 0
