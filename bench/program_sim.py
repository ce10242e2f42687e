"""Programs past this machine: 1,152 and 10,000 workers, in simulated time, by their own code.

A program as gradient descent: a value goes to all partitions (four a worker, 0.25 s each),
each sends back, the value changes and decides. What is simulated, and what is left out, is in
bench/support/program_sim.py.

First what messages, tasks and calls cost is measured here, on a cluster of 8 nodes in this machine
(``--given``: not, and no run is compared). Then runs of a real job at 2, 4 and 8 workers are
compared with their simulation: ``error`` is simulated / measured - 1, of a round that one in ten is
quicker than. All nodes share the processors of this machine, and the simulation knows that. So
tasks sleep, but for one case at 2 workers, that computes.

Then, for each number of workers: a round; a straggler, whose tasks take twice as long, with
`clamor.schedule.stragglers()`; as many workers again that join at once; the same that leave at
once. With them the orders and heartbeats of the controller, the memory of a worker's map, and the
processor time that the controller's and the workers' code really takes for a call (``cpu_us``). The
summary has its ``growth``: the exponent k of n**k, from one number of workers to the most.

One JSON object per line.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import statistics
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Final

from bench.support import common, program_runs
from bench.support.common import emit, note, now
from bench.support.program_sim import Simulation
from bench.support.program_world import Costs, World, tables_of
from clamor_ray._recipes.matching.matcher import Matcher
from clamor_ray._recipes.placement.controller_core import ControllerCore
from clamor_ray._recipes.placement.messages import Begin
from clamor_ray._recipes.placement.schedule import stragglers
from clamor_ray._recipes.placement.worker_core import WorkerCore

WORKERS: Final = (8, 64, 512, 1152)
WARM: Final = 1  # rounds
ROUNDS: Final = 2
STRAGGLER_S: Final = 10.0
SLOWED: Final = 2.0
MOST_S: Final = 3600.0


def rounds_of(simulation: Simulation, n: int) -> list[float]:
    """Seconds of the next rounds."""
    first = len(simulation.rounds)
    if not simulation.until(lambda: len(simulation.rounds) > first + n, MOST_S):
        raise SystemExit(f"bench: {n} rounds took more than {MOST_S:g} simulated seconds")
    return [end - begin for begin, end in pairwise(simulation.rounds[first:])]


def settled_s(simulation: Simulation, n_workers: int) -> float:
    """Seconds until so many workers are left, and all slices have come."""
    begin_s = simulation.now_s
    if not simulation.until(
        lambda: len(simulation.workers) == n_workers and simulation.is_settled, MOST_S
    ):
        raise SystemExit(f"bench: not settled after {MOST_S:g} simulated seconds")
    return simulation.now_s - begin_s


def steady(simulation: Simulation) -> dict[str, Any]:
    """Nothing moves."""
    world = simulation.world
    rounds_of(simulation, WARM)
    simulation.sent.clear()
    begin_s = simulation.now_s
    seconds = statistics.median(rounds_of(simulation, ROUNDS))
    took_s = simulation.now_s - begin_s
    return {
        "round_s": seconds,
        "tasks_alone_s": world.partitions * world.function_s / world.executors,
        "envelopes_per_round": simulation.sent["envelopes"] * seconds / took_s,
        "orders_per_s": simulation.sent["orders"] / took_s,
        "heartbeats_per_s": simulation.sent["heartbeats"] / took_s,
    }


def straggler(simulation: Simulation) -> dict[str, Any]:
    """The last worker is slowed."""
    version, begin_s = simulation.controller.map.version, simulation.now_s
    simulation.slow(max(simulation.workers), SLOWED)
    at_once = rounds_of(simulation, 1)[0]
    simulation.until(lambda: False, STRAGGLER_S)
    settled_s(simulation, len(simulation.workers))
    return {
        "round_at_once_s": at_once,
        "moves": simulation.controller.map.version - version,
        "rebalanced_s": max(0.0, simulation.came_s - begin_s),
        "round_after_s": rounds_of(simulation, 1)[0],
    }


def joined(simulation: Simulation, n: int) -> dict[str, Any]:
    """As many again, at once."""
    simulation.sent.clear()
    simulation.join(n)
    return {
        "joined_s": settled_s(simulation, 2 * n),
        "orders": simulation.sent["orders"],
        "order_bytes": simulation.sent["order bytes"],
        "round_after_s": rounds_of(simulation, 1)[0],
    }


def left(simulation: Simulation, n: int) -> dict[str, Any]:
    """Those leave again."""
    simulation.sent.clear()
    simulation.leave(sorted(simulation.workers)[n:])
    return {
        "left_s": settled_s(simulation, n),
        "orders": simulation.sent["orders"],
        "reports": simulation.sent["reports"],
    }


def memory(n_workers: int) -> dict[str, int]:
    """Bytes of a worker's copy of the map, and of the rest of its core and matcher at the start."""
    tables = tables_of(n_workers * World(n_workers).partitions)
    controller = ControllerCore(tables)
    controller.begin({f"w{n:05d}": ("10.0.0.1", n) for n in range(n_workers)})
    begin = controller.take_outgoing()[0][1]
    assert isinstance(begin, Begin)
    tracemalloc.start()
    try:
        core = WorkerCore("w00000", tables, Matcher(tables))
        without = tracemalloc.get_traced_memory()[0]
        core.start(begin.update, {})
        return {"map_bytes": tracemalloc.get_traced_memory()[0] - without, "core_bytes": without}
    finally:
        tracemalloc.stop()


def scaled(n: int, costs: Costs) -> dict[str, Any]:
    """All that is asked of one number of workers, printed."""
    begin = now()
    gc.collect()
    gc.disable()  # else it looks through all workers, within calls that are measured
    alone = Simulation(World(n), costs)  # no function moves anything
    alone.begin()
    record: dict[str, Any] = {"workers": n, "steady": steady(alone)}
    del alone
    simulation = Simulation(World(n), costs, [stragglers()])
    simulation.begin()
    rounds_of(simulation, WARM)
    note(f"{n} workers: {record['steady']}")
    record["straggler"] = straggler(simulation)
    note(f"{n} workers, a straggler: {record['straggler']}")
    record["join"] = joined(simulation, n)
    note(f"{n} workers, as many again: {record['join']}")
    record["leave"] = left(simulation, n)
    note(f"{n} workers, those leave: {record['leave']}")
    record |= {
        "memory": memory(n),
        "cpu_us": {kind: round(us, 1) for kind, us in simulation.meter.us().items()},
        "simulated_in_s": now() - begin,
    }
    gc.enable()
    emit(record)
    return record


def growth(records: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of each kind of call: k, where its processor time grows as n**k. Pure.

    Example:
        >>> growth([{"workers": n, "cpu_us": {"a": 3.0, "b": n * 2.0}} for n in (10, 1000)])
        {'a': 0.0, 'b': 1.0}
    """
    first, last = records[0], records[-1]
    by = math.log(last["workers"] / first["workers"])
    return {
        kind: round(math.log(us / first["cpu_us"][kind]) / by, 2)
        for kind, us in last["cpu_us"].items()
        if first["cpu_us"].get(kind) and us
    }


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench program_sim", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a run of seconds: no figure")
    parser.add_argument("--workers", help="how many, with commas (8,64,512,1152)")
    parser.add_argument("--given", action="store_true", help="costs as they are in Costs")
    args = parser.parse_args(argv)
    numbers = [int(n) for n in (args.workers or "").split(",") if n]
    numbers = numbers or [*((4, 16) if args.small else WORKERS)]
    figures: dict[str, Any] = {}
    costs = Costs()
    if args.given:
        emit(common.environment())
    else:
        with program_runs.cluster(2 if args.small else 8):
            emit(common.environment())
            costs = program_runs.measured(is_small=args.small)
            emit({"costs": dataclasses.asdict(costs)})
            figures["error"] = program_runs.compared(costs, is_small=args.small)
    emit({"costs": dataclasses.asdict(costs)})
    records = [scaled(n, costs) for n in sorted(numbers)]
    for record in records:
        figures[f"{record['workers']} workers"] = {
            "round_s": record["steady"]["round_s"],
            "rebalanced_s": record["straggler"]["rebalanced_s"],
            "joined_s": record["join"]["joined_s"],
            "left_s": record["leave"]["left_s"],
            "orders_per_s": record["steady"]["orders_per_s"],
            "map_bytes": record["memory"]["map_bytes"],
        }
    if len(records) > 1:
        figures["growth"] = growth(records)
    common.summary(figures)
