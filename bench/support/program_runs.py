"""Real jobs for bench/program_sim.py: what messages, tasks and calls cost; rounds to compare."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, Final

import numpy as np
import ray

import clamor_ray as clamor
from bench.programs import length_for, work
from bench.support import common
from bench.support.common import emit, note
from bench.support.program_sim import Simulation
from bench.support.program_world import Costs, World

STORE_BYTES: Final = 128 << 20
END_S: Final = 300.0
BIG_BYTES: Final = 4 << 20
FUNCTION_S: Final = 0.02
BURST: Final = 32  # partitions of a worker, each of which sends
CALLS: Final = 300
TRIES: Final = 12  # halvings
QUICK: Final = 10  # percent of the rounds that are as quick, or quicker


@contextlib.contextmanager
def cluster(n_nodes: int) -> Iterator[None]:
    """On this machine. Ray's workers count as much as other processes on it: by themselves, they
    wait for all of those (nice 15), and that is nothing that is simulated."""
    os.environ.setdefault("RAY_worker_niceness", "0")
    with common.several_nodes(n_nodes, STORE_BYTES, num_cpus=1):
        yield


def _stamps(program: Any, value: Any, workers: int) -> list[float]:
    """Runs it. The last item of the value is a list of times."""
    job = program.run(workers=workers, cpus=1)
    try:
        return list(job.result(value, END_S)[-1])
    finally:
        job.stop()


def _quick_round(stamps: list[float]) -> float:
    """Of so many rounds one in ten is quicker: what other programs on this machine add to a round
    is in few of those, and it is nothing that is simulated."""
    return common.percentile([end - begin for begin, end in pairwise(stamps)], QUICK)


def rounds(world: World) -> float:
    """Seconds of a quick round of the program that is simulated."""
    program = clamor.Program()
    rows = program.dataset([0] * (world.workers * world.partitions))
    w = program.value((bytes(world.message_bytes), []))
    function_s, n_rounds = world.function_s, world.rounds
    array = np.ones(length_for(function_s)) if world.computes else np.ones(0)

    def send_all(t: Any, w: Any) -> None:
        t.broadcast(w[0])

    def compute(t: Any, row: Any) -> None:
        (message,) = t.recv()
        work(array)
        if not len(array) and function_s:
            time.sleep(function_s)
        t.send(0, message)

    def step(t: Any, w: Any) -> Any:
        t.recv()
        w[1].append(time.perf_counter())
        return w

    def is_over(t: Any, w: Any) -> bool:
        return len(w[1]) >= n_rounds

    with program.loop() as loop:
        program.stage(send_all, reads=[w])
        program.stage(compute, reads=[rows])
        program.stage(step, writes=[w])
        loop.until(is_over, reads=[w])
    return _quick_round(_stamps(program, w, world.workers))


def simulated(world: World, costs: Costs) -> float:
    """The same."""
    simulation = Simulation(world, costs)
    simulation.begin()
    simulation.until(lambda: len(simulation.rounds) >= world.rounds)
    return _quick_round(simulation.rounds)


# ------------------------------------------------------------------ costs


def _task_s(n_rounds: int) -> float:
    """A task that does nothing, after another one on the same worker."""
    program = clamor.Program()
    value = program.value(([],))

    def stamp(t: Any, value: Any) -> Any:
        value[0].append(time.perf_counter())
        return value

    with program.loop(max=n_rounds):
        program.stage(stamp, writes=[value])
    return _quick_round(_stamps(program, value, workers=1))


def _there_and_back_s(n_rounds: int, n_bytes: int) -> float:
    """Three tasks, and two messages between two workers."""
    program = clamor.Program()
    here, there = program.value((bytes(n_bytes), [])), program.value(0)

    def ping(t: Any, here: Any) -> None:
        t.send(0, here[0])

    def pong(t: Any, there: Any) -> None:
        t.send(0, t.recv()[0])

    def back(t: Any, here: Any) -> Any:
        t.recv()
        here[1].append(time.perf_counter())
        return here

    with program.loop(max=n_rounds):
        program.stage(ping, reads=[here])
        program.stage(pong, reads=[there])
        program.stage(back, writes=[here])
    return _quick_round(_stamps(program, here, workers=2))


class _Called:
    def call(self, order: Any) -> None:
        del order


def _call_s() -> tuple[float, float]:
    """Of a call of an actor: at who calls, and at the actor."""
    actor = ray.remote(num_cpus=0)(_Called).remote()
    ray.get(actor.call.remote(None))
    begin = common.now()
    calls = [actor.call.remote((0, 1, {})) for _ in range(CALLS)]
    sent = common.now()
    ray.get(calls)
    ended = common.now()
    ray.kill(actor)
    return (sent - begin) / CALLS, (ended - begin) / CALLS


def _such_that(simulate: Callable[[float], float], measured: float, most: float) -> float:
    """The argument by which what is simulated, and grows with it, is what was measured."""
    low, high = 0.0, most
    for _ in range(TRIES):
        middle = (low + high) / 2
        low, high = (middle, high) if simulate(middle) < measured else (low, middle)
    return (low + high) / 2


def measured(is_small: bool) -> Costs:
    """Of this machine, now. A message's cost is that by which a round of `BURST` tasks that do
    nothing takes as long as it does; a link's latency the rest of an exchange of two messages."""
    n_rounds = 20 if is_small else 120
    note("what a task, a message and a call cost")
    task_s = _task_s(5 * n_rounds)
    exchange_s = _there_and_back_s(n_rounds, 8)
    with_bytes_s = _there_and_back_s(max(10, n_rounds // 10), BIG_BYTES)
    order_s, report_s = _call_s()
    hop_s = max(0.0, (exchange_s - 3 * task_s) / 2)
    world = World(
        2,
        partitions=BURST,
        function_s=0.0,
        message_bytes=8,
        cores=len(os.sched_getaffinity(0)),
        computes=False,
        rounds=n_rounds // 4,
    )
    burst_s = rounds(world)

    def costs(message_s: float) -> Costs:
        return Costs(
            task_s=task_s,
            message_s=message_s,
            latency_s=max(0.0, hop_s - 2 * message_s),
            byte_s=max(0.0, (with_bytes_s - exchange_s) / 2 / BIG_BYTES),
            order_s=order_s,
            report_s=report_s,
        )

    message_s = _such_that(lambda s: simulated(world, costs(s)), burst_s, most=5 * hop_s + 1e-3)
    emit({"exchange_s": exchange_s, "burst_round_s": burst_s})
    return costs(message_s)


def compared(costs: Costs, is_small: bool) -> dict[str, float]:
    """Simulated / measured - 1, of a quick round, by case."""
    errors = {}
    cases = [(2, False)] if is_small else [(2, False), (4, False), (8, False), (2, True)]
    for n, computes in cases:
        world = World(
            n,
            partitions=2,
            function_s=FUNCTION_S,
            cores=len(os.sched_getaffinity(0)),
            computes=computes,
            rounds=10 if is_small else 80,
        )
        real_s, simulated_s = rounds(world), simulated(world, costs)
        name = f"{n} workers, {'computing' if computes else 'sleeping'}"
        errors[name] = simulated_s / real_s - 1
        emit({"case": name, "measured_s": real_s, "simulated_s": simulated_s})
        note(f"{name}: {real_s:.4f} s, simulated {simulated_s:.4f} s")
    return errors
