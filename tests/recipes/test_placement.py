"""Random programs on workers, with moves, joins, leaves, losses: the plain answer, once each."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest

from clamor_ray._recipes.placement.controller_core import ControllerCore
from clamor_ray._recipes.placement.schedule import stragglers
from clamor_ray._recipes.program.builder import Builder
from clamor_ray._recipes.program.plain import run_plainly
from tests.recipes.network import Cluster
from tests.recipes.programs import random_program


def plain(builder: Builder) -> list[list[Any]]:
    sources = [list(dataset.source) for dataset in builder.datasets]
    return run_plainly(builder.tables(), builder.functions, sources)


def disturb(cluster: Cluster, rng: random.Random) -> None:
    """A move, one or two workers more, or less."""
    controller = cluster.controller
    assert controller is not None
    staying = sorted(controller.map.workers - controller.leaving)
    kind = rng.random()
    if kind < 0.7:
        group, index = rng.choice(cluster.slices)
        dataset = rng.choice(cluster.tables.datasets_of(group))
        controller.move(dataset, index, rng.choice(staying))
    elif kind < 0.85 and len(cluster.nodes) < 5:
        cluster.join(*(f"j{rng.randrange(1 << 30)}" for _ in range(rng.randint(1, 2))))
    elif len(staying) > 1:
        controller.leave_all(rng.sample(staying, rng.randint(1, min(2, len(staying) - 1))))
    cluster.give_orders()


@pytest.mark.parametrize("seed", range(20))
def test_moves_joins_and_leaves_change_no_answer(seed: int) -> None:
    for n in range(3):
        _disturbed(random.Random(100 * seed + n))


def _disturbed(rng: random.Random) -> None:
    builder = random_program(rng)
    cluster = Cluster(
        builder,
        rng.randrange(1 << 30),
        workers=rng.randint(1, 4),
        window=rng.choice([3, 10, 1 << 16]),
        every_s=1.0,
        functions=[stragglers()],
    )
    controller = cluster.controller
    assert controller is not None
    for _ in range(rng.randint(0, 12)):
        for _ in range(rng.randint(0, 60)):
            cluster.step()
        disturb(cluster, rng)
    assert cluster.run_to_end() == plain(builder)
    n_tasks = sum(cluster.ran.values())
    cluster.until(lambda: not controller.leaving and not controller._farewells.workers)
    cluster.settle()
    assert sum(cluster.ran.values()) == n_tasks


def trouble(cluster: Cluster, rng: random.Random) -> None:
    """As `disturb`; or a checkpoint, a lost worker, a lost controller."""
    controller = cluster.controller
    assert controller is not None
    kind = rng.random()
    if kind < 0.4:
        disturb(cluster, rng)
    elif kind < 0.7:
        controller.checkpoint(cluster.now_s)
    elif kind < 0.85 and len(controller.map.workers) > 1 and len(cluster.nodes) > 1:
        name = rng.choice(sorted(controller.map.workers))
        cluster.kill(name)
        controller.on_lost(name)
    elif all(node.core is not None for node in cluster.nodes.values()):
        last = controller.checkpoints
        new = ControllerCore(
            cluster.tables,
            **{**cluster.settings, "last": last.last, "first_name": last._name + 1},
        )
        for node in cluster.nodes.values():
            for _ in range(rng.randint(0, len(node.orders))):
                cluster.order(node)
            node.orders.clear()
            node.reports.clear()
        cores = [node.core for node in cluster.nodes.values()]
        new.learn([core.whereabouts() for core in cores if core is not None])
        cluster.controller = new
    cluster.give_orders()


@pytest.mark.parametrize("is_shared", [False, True], ids=["python", "c"])
@pytest.mark.parametrize(
    "seeds", [range(15), pytest.param(range(15, 500), marks=pytest.mark.soak)], ids=["few", "many"]
)
def test_all_troubles_at_once_change_no_answer(seeds: range, is_shared: bool) -> None:
    for seed in seeds:
        with contextlib.closing(_troubled(seed, is_shared)) as cluster:
            assert cluster.run_to_end() == plain(cluster.builder), seed


def _troubled(seed: int, is_shared: bool) -> Cluster:
    rng = random.Random(seed)
    cluster = Cluster(
        random_program(rng),
        seed,
        workers=rng.randint(2, 4),
        window=rng.choice([4, 1 << 16]),
        every_s=2.0,
        is_shared=is_shared,
    )
    for _ in range(rng.randint(1, 15)):
        for _ in range(rng.randint(0, 150)):
            cluster.step()
        trouble(cluster, rng)
    return cluster
