"""The simulator of bench/sim: what it says of small worlds is what can be said without it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from bench.support import sim
from bench.support.sim import POLICIES, World

WORLD = World(
    nodes=50,
    pieces=96,
    piece_bytes=64 << 10,
    rate=1e9 / 8,
    skew=0.99,
    lookups=256,
    batch=32,
    request_pieces=16,
)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"homes": 3},
        {"readers": 2, "batch": 16},
        {"slow": 0.1},
        {"dying": 0.2, "dying_s": 0.3},
        {"dying": 0.6, "dying_s": 0.4, "promised": False},
        {"home_queue_bytes": 1 << 20},
        {"ordered": False, "skew": 0.0},
        {"promised": False},
        {"promised": False, "dying": 0.2, "dying_s": 0.1},
        {"keys": 5000, "window": 1, "request_pieces": 4},
    ],
    ids=str,
)
def test_every_living_node_gets_what_it_wanted(policy: str, change: dict[str, float]) -> None:
    world = dataclasses.replace(WORLD, **change)
    outcome = sim.simulate(world, policy)
    alive = outcome.alive
    assert alive[: world.homes].all()
    assert not (outcome.wanted & ~outcome.had)[alive].any()
    # Nobody fetched what it did not want, and each piece arrived once: as many left as arrived.
    readers = alive.copy()
    readers[: world.homes] = False
    assert not (outcome.had & ~outcome.wanted)[readers].any()
    arrived = int(outcome.had[readers].sum()) * world.piece_bytes
    assert outcome.sent_bytes.sum() >= arrived
    if not world.dying:
        assert outcome.sent_bytes.sum() == arrived
    assert np.isfinite(outcome.node_seconds[readers]).all()
    # No link carried more than it can.
    assert outcome.sent_bytes.max() <= outcome.seconds * world.rate or world.dying
    assert outcome.seconds >= sim.ideal_s(world, outcome)


def test_two_nodes_take_the_time_of_their_link() -> None:
    world = dataclasses.replace(WORLD, nodes=2, lookups=4096, batch=4096, skew=0.0)
    for policy in POLICIES:
        outcome = sim.simulate(world, policy)
        pieces = int(outcome.wanted.sum())
        assert pieces == world.pieces
        # And one message there and one back, and no piece of it twice.
        link_s = pieces * world.piece_bytes / world.rate
        assert outcome.seconds == pytest.approx(link_s + 2 * world.latency_s, rel=1e-9)
        assert outcome.sent_bytes.tolist() == [pieces * world.piece_bytes, 0]


def test_two_choices_are_no_worse_than_one_and_one_than_none() -> None:
    seconds = {
        policy: np.median([sim.simulate(WORLD, policy, seed).seconds for seed in range(5)])
        for policy in POLICIES
    }
    assert seconds["p2c"] <= seconds["random"] * 1.02
    assert seconds["random"] < seconds["off"]
    assert seconds["p2c"] < 0.7 * seconds["off"]
    assert sim.simulate(WORLD, "p2c").redirected > 0
    off = sim.simulate(WORLD, "off")
    assert off.redirected == 0
    assert sim.skew(off) == pytest.approx(WORLD.nodes)  # the home sends everything


def test_same_seed_same_run() -> None:
    one, two = (sim.simulate(WORLD, "p2c", 7) for _ in range(2))
    assert one.seconds == two.seconds
    assert one.events == two.events
    assert (one.sent_bytes == two.sent_bytes).all()
    assert sim.simulate(WORLD, "p2c", 8).seconds != one.seconds


def test_the_choice_is_the_engines() -> None:
    """An idle home answers; a busy one is left for the holder of two with less to send."""
    choose = sim.chooser("p2c")
    assert choose(0, [0, 0], 1 << 63) == -1
    chosen = [
        choose(10 << 20, [9 << 20, 1 << 20, 5 << 20], bits * 0x9E3779B97F4A7C15 % 2**64)
        for bits in range(300)
    ]
    assert set(chosen) == {1, 2}
    assert chosen.count(1) > chosen.count(2)
    assert sim.chooser("off")(10 << 20, [0], 1) == -1


def test_worlds_without_readers_are_refused() -> None:
    with pytest.raises(ValueError, match="nobody to read"):
        sim.simulate(dataclasses.replace(WORLD, nodes=1), "off")
    with pytest.raises(ValueError, match="policy"):
        sim.simulate(WORLD, "least")
