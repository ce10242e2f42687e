"""The benchmark of programs that move and grow: its small run, and how its figures are read off."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest

from bench import program_moves
from bench.drivers import program_rounds
from bench.support.links import LinkEnd, namespace
from tests.bench.conftest import lines_of, run_bench
from tests.support.lab import remove_stale, require_lab


def moved(n: int, repetition: int, total_ms: float, back_s: float | None) -> dict[str, Any]:
    return {
        "run": "migrate",
        "repetition": repetition,
        "partitions": n,
        "total_ms": total_ms,
        "link_ms": 1.0,
        "stopped_ms": total_ms / 2,
        "back_s": back_s,
    }


def test_the_first_move_makes_connections_and_is_no_repetition() -> None:
    runs = [moved(1, n, total, 0.002) for n, total in enumerate((90.0, 3.0, 2.0, 4.0))]
    runs += [moved(8, n, total, None) for n, total in enumerate((70.0, 6.0))]
    found = program_moves.figures(runs)
    assert set(found) == {"migrate_ms"}
    figures = found["migrate_ms"]
    assert (figures["one"], figures["one_min"], figures["one_max"]) == (2.0, 1.0, 3.0)
    assert (figures["one_first"], figures["one_stopped"], figures["one_link"]) == (89.0, 1.5, 1.0)
    assert (figures["eight"], figures["eight_first"]) == (5.0, 69.0)
    assert figures["by_driver"] == 2.0


def test_rounds_are_compared_with_undisturbed_ones_of_their_repetition() -> None:
    runs = [
        {
            "run": "straggler",
            "before_s": before_s,
            "at_once_s": 1.5 * before_s,
            "after_s": 1.1 * before_s,
            "best_ratio": 1.09,
        }
        for before_s in (0.1, 0.3, 0.2)
    ]
    found = program_moves.figures(runs)
    ratios = found["straggler"]
    assert ratios["best"] == 1.09
    assert (ratios["at_once"], ratios["after_max"]) == pytest.approx((1.5, 1.1))
    assert set(found) == {"straggler"}


def test_processes_and_links_are_not_in_the_time_to_the_full_rate() -> None:
    run = {"run": "elastic", "two_s": [0.4, 0.2], "four_s": 0.15, "gone_s": 1.0}
    times = {"began_s": 2.0, "full_s": 2.75, "link_s": 0.25}
    said = ({"Heartbeat": 4.0}, {"Heartbeat": 4.5, "MapUpdate": 1.0}, {"Heartbeat": 4.0})
    found = program_moves.figures([run | times | {"messages": each} for each in said])
    assert found["controller_messages"] == {"Heartbeat": 4.0, "MapUpdate": 0.0}
    figures = found["elastic"]
    assert figures["speedup"] == pytest.approx(2.0)
    assert figures["beyond_s"] == pytest.approx(0.5)
    assert (figures["start_s"], figures["gone_s"]) == (2.0, 1.0)


def test_the_best_of_a_slow_node_is_in_whole_partitions() -> None:
    assert program_rounds.best_ratio(128, 4, 1.0) == 1.0
    assert program_rounds.best_ratio(128, 4, 1.5) == 35 / 32  # 23 on the slow one, 35 on others
    assert program_rounds.best_ratio(4, 4, 1.5) == 1.5  # another one would have two


def test_the_full_rate_begins_with_some_rounds_in_a_row() -> None:
    ends = [0.0, 2.0, 3.0, 5.0, 6.0, 7.1, 8.0, 9.0, 10.0, 12.0]
    rounds = program_rounds.spans(ends)
    assert program_rounds.full_from(rounds, 1.0) == 5.0
    with pytest.raises(RuntimeError, match="no 5 rounds in a row"):
        program_rounds.full_from(rounds, 0.5)


def test_a_link_carries_parts_to_one_receiver_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    ends = [LinkEnd(), LinkEnd()]
    (_, (here, address)) = [end.about() for end in ends]
    assert here == namespace()
    ends[0].connect({1: address})
    began_ns = ends[0].send([(1, 300_000), (1, 5), (1, 100_000)], time.monotonic() + 0.05)
    came_ns = ends[1].ends_ns(3)
    assert began_ns < came_ns[0] <= came_ns[1] <= came_ns[2]
    with pytest.raises(RuntimeError, match="late"):
        ends[0].send([(1, 5)], time.monotonic() - 1)


@pytest.mark.lab
@pytest.mark.root
@pytest.mark.slow
@pytest.mark.soak
def test_a_small_run_ends_with_its_figures_and_leaves_no_namespace() -> None:
    require_lab("netns")
    lines = lines_of(run_bench("program_moves", "--small"))
    assert {"kernel", "cores", "page_size", "ray", "trap", "rate"} <= set(lines[0]["environment"])
    figures = lines[-1]["summary"]
    assert set(figures) == {"straggler", "migrate_ms", "elastic", "controller_messages"}
    flat = [value for figure in figures.values() for value in figure.values()]
    assert all(math.isfinite(value) for value in flat)
    stable = figures["controller_messages"]
    assert stable["Heartbeat"] > 0
    assert sum(stable.values()) == stable["Heartbeat"]
    assert figures["straggler"]["at_once"] > 1.2  # a node was slow
    assert remove_stale() == []
