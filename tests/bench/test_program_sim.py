"""The simulator of programs: what it says of small worlds is what can be said without it."""

from __future__ import annotations

import math
import random

import pytest

from bench.program_sim import growth
from bench.support.program_sim import ENVELOPE_BYTES, Simulation
from bench.support.program_world import Costs, SharedMap, World
from clamor_ray._recipes.placement.messages import MapUpdate
from clamor_ray._recipes.placement.partition_map import PartitionMap
from clamor_ray._recipes.placement.schedule import stragglers
from tests.bench.conftest import lines_of, run_bench

FREE = Costs(task_s=0.0, message_s=0.0, latency_s=0.0, byte_s=0.0, order_s=0.0, report_s=0.0)


def ended(world: World, costs: Costs) -> Simulation:
    simulation = Simulation(world, costs)
    simulation.begin()
    assert simulation.until(lambda: len(simulation.rounds) == world.rounds, 1000.0)
    return simulation


def test_where_nothing_else_costs_a_round_is_its_tasks() -> None:
    for executors, round_s in ((1, 0.4), (2, 0.2), (3, 0.2), (4, 0.1)):
        world = World(3, partitions=4, function_s=0.1, executors=executors, rounds=3)
        assert ended(world, FREE).rounds == pytest.approx([round_s * n for n in (1, 2, 3)])


def test_tasks_that_compute_share_the_cores() -> None:
    world = World(4, partitions=1, function_s=0.1, cores=2, rounds=2)
    assert ended(world, FREE).rounds == pytest.approx([0.2, 0.4])
    sleeping = World(4, partitions=1, function_s=0.1, cores=2, computes=False, rounds=2)
    assert ended(sleeping, FREE).rounds == pytest.approx([0.1, 0.2])


def test_a_message_takes_its_latency_and_its_bytes() -> None:
    costs = Costs(0.0, 0.0, latency_s=0.003, byte_s=1e-6, order_s=0.0, report_s=0.0)
    world = World(2, partitions=1, function_s=0.0, message_bytes=1000, rounds=3)
    simulation = ended(world, costs)
    # The value is on the first worker. To the second one, and back; each acknowledgement goes
    # while nobody waits.
    hop_s = 0.003 + 1e-6 * (1000 + ENVELOPE_BYTES)
    later = simulation.rounds[2] - simulation.rounds[1]
    assert 2 * hop_s <= later <= 2 * hop_s + 4 * 1e-6 * ENVELOPE_BYTES


def test_the_receiver_of_all_pays_for_each_message() -> None:
    costs = Costs(0.0, 0.001, latency_s=0.0, byte_s=0.0, order_s=0.0, report_s=0.0)
    few, many = (ended(World(n, 2, function_s=0.0, rounds=2), costs).rounds[0] for n in (3, 21))
    # It sends to each worker, hears of each task, and says so: 1 + 2 + 2 messages a worker.
    assert many - few == pytest.approx(0.001 * 5 * 18, rel=0.25)


def test_a_worker_that_is_slowed_gives_partitions_away() -> None:
    simulation = Simulation(World(4, function_s=0.1), Costs(), [stragglers()])
    simulation.begin()
    simulation.slow("w00003", 2.0)
    simulation.until(lambda: False, 20.0)
    assert simulation.controller.map.n_slices_of("w00003") == 2
    assert simulation.rounds[-1] - simulation.rounds[-2] == pytest.approx(0.5, rel=0.05)


def test_workers_join_and_leave_with_their_slices() -> None:
    simulation = Simulation(World(3, function_s=0.01), Costs())
    simulation.begin()
    simulation.until(lambda: len(simulation.rounds) > 3)
    simulation.join(3)
    assert simulation.until(lambda: simulation.is_settled, 10.0)
    of = [simulation.controller.map.n_slices_of(f"w0000{n}") for n in range(6)]
    assert sorted(of) == [2, 2, 2, 2, 2, 3]  # 12, and the value
    simulation.leave(["w00003", "w00004", "w00005"])
    assert simulation.until(lambda: len(simulation.workers) == 3, 10.0)
    before = len(simulation.rounds)
    assert simulation.until(lambda: len(simulation.rounds) > before + 3, 10.0)


def test_copies_that_share_tables_are_as_copies_that_do_not() -> None:
    rng = random.Random(1)
    tables = SharedMap.Tables()
    slices, workers = [(0, n) for n in range(9)], {f"w{n}": n for n in range(3)}
    first = MapUpdate(
        1, {each: rng.choice(sorted(workers)) for each in slices}, workers, is_whole=True
    )
    own, shared = PartitionMap(), [SharedMap(tables) for _ in range(3)]
    changes = own.apply(first)
    assert all(copy.apply(first) == changes for copy in shared)
    late = shared.pop()
    steps = []
    for version in range(2, 30):
        moves = {slice: rng.choice(sorted(own.workers)) for slice in rng.sample(slices, 2)}
        joined = {f"w{version}": version} if rng.random() < 0.3 else {}
        steps.append(MapUpdate(version, moves, joined))
        changes = own.apply(steps[-1])
        assert all(copy.apply(steps[-1]) == changes for copy in shared)
    for step in steps:
        late.apply(step)
    new = SharedMap(tables)
    new.apply(own.whole())
    for copy in (*shared, late, new):
        assert copy.whole() == own.whole()
        assert list(copy.workers) == list(own.workers)
        assert all(copy.slices_of(worker) == own.slices_of(worker) for worker in own.workers)


def test_growth_is_an_exponent() -> None:
    records = [{"workers": n, "cpu_us": {"a": 5.0, "b": 2.0 * n * n}} for n in (8, 64, 512)]
    assert growth(records) == {"a": 0.0, "b": 2.0}


def test_a_small_run_ends_with_its_figures() -> None:
    lines = lines_of(run_bench("program_sim", "--small", "--given", timeout_s=120.0))
    figures = lines[-1]["summary"]
    for case in ("4 workers", "16 workers"):
        assert all(math.isfinite(each) for each in figures[case].values())
        assert figures[case]["round_s"] >= 1.0
        assert figures[case]["orders_per_s"] == 0.0
    assert {"controller: heartbeat", "root: message"} <= figures["growth"].keys()


@pytest.mark.soak
def test_a_small_run_is_compared_with_a_job() -> None:
    lines = lines_of(run_bench("program_sim", "--small", timeout_s=280.0))
    assert all(math.isfinite(each) for each in lines[-1]["summary"]["error"].values())
