"""The benchmark of sparse logistic regression: its figures, what it counts, and a small run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import sparse_lr
from bench.drivers import sparse_driver
from bench.drivers.sparse_driver import Touched
from bench.peers import actor_ps
from clamor_ray.workloads.models.logistic import ParameterLayout
from tests.support.lab import lab_unavailable
from tests.support.lab.availability import missing

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


# ------------------------------------------------------------------ figures


def line(case: str, side: str, number: int, seconds: list[float], out: int) -> dict[str, Any]:
    links = [[out, 1], [2, 3 * out]]
    return {
        "case": case, "side": side, "round": number, "seconds": seconds, "link_out_in": links
    }  # fmt: skip


def memory(case: str, of_parameters: float, of_blocks: float) -> dict[str, Any]:
    found = {"of_parameters": of_parameters, "of_blocks": of_blocks, "all_of_parameters": 9.0}
    return {"case": case, "memory": found}


def test_figures_are_of_medians_of_the_faster_way_and_the_worst_case() -> None:
    lines = [
        line("a", "clamor", -1, [99.0, 99.0], 10**9),
        line("a", "clamor", 0, [1.0, 2.0], 10),
        line("a", "sent", 0, [10.0, 11.0], 70),
        line("a", "kept", 0, [8.0, 8.0], 40),
        line("a", "node", 0, [9.0, 9.0], 50),
        line("a", "clamor", 1, [9.0, 2.0], 10),
        memory("a", 1.5, 1.25),
        line("b", "clamor", 0, [2.0], 5),
        line("b", "sent", 0, [3.0], 20),
        line("b", "kept", 0, [4.0], 10),
        memory("b", 1.75, 1.0),
    ]
    found = sparse_lr.figures(lines)
    assert found["a"] == {
        "actor_ps_speedup": 4.0,
        "speedup_over_sent": 5.25,
        "speedup_over_kept": 4.0,
        "speedup_over_node": 4.5,
        "iteration_s": 2.0,
        "link_bytes_ratio": 4.0,
        "memory_ratio": 1.5,
        "block_memory_ratio": 1.25,
        "memory_ratio_with_history": 9.0,
    }
    assert found["b"]["actor_ps_speedup"] == 1.5
    assert found["b"]["link_bytes_ratio"] == 4.0
    assert sparse_lr.worst(found) == {"actor_ps_speedup": 1.5, "memory_ratio": 1.75}
    found["zipf"] = dict(found["b"], actor_ps_speedup=1.0)
    assert sparse_lr.worst(found) == {"actor_ps_speedup": 1.0, "memory_ratio": 1.75}


def test_cases_have_the_proportions_that_they_say() -> None:
    even, zipf = sparse_lr.cases_of(["1e9", "zipf"], 10_000, 3, 2)
    assert even.n_parameters == 10**9
    assert zipf.n_parameters == zipf.n_values == 10**7
    assert even.n_values == 39 * 8000
    assert (even.skew, even.even) == (0.0, True)
    assert (zipf.skew, zipf.even) == (1.1, False)
    assert even.sides == ("clamor", "sent", "kept", "node")


def test_memory_is_what_came_beside_what_was_there_over_what_was_touched() -> None:
    held = ("cached", "home", "both", "history", "all")
    idle = {"a": dict(zip(held, (MIB, MIB, 2 * MIB, 0, 2 * MIB), strict=True))}
    grown = (MIB + 8192, MIB + 4096, 2 * MIB + 12288, 50, 2 * MIB + 12300)
    most = {
        "a": dict(zip(held, grown, strict=True)),
        "b": dict(zip(held, (4096, 4096, 8192, 0, 8192), strict=True)),
        "c": dict(zip(held, (10**9, 10**9, 10**9, 0, 10**9), strict=True)),  # has no rows
    }
    parts = [
        Touched("a", np.array([0, 1, 5000], np.int32)),
        Touched("a", np.array([1, 1023, 1024], np.int32)),
        Touched("b", np.array([7], np.int32)),
    ]
    found = sparse_driver.memory_line(idle, most, parts)
    first, second = found["nodes"]
    assert first == {
        "cached_bytes": 8192,
        "home_bytes": 4096,
        "both_bytes": 12288,
        "history_bytes": 50,
        "all_bytes": 12300,
        "parameters_bytes": 20,
        "blocks_bytes": 12288,
    }
    assert second["parameters_bytes"] == 4
    assert found["of_parameters"] == 8192 / 4
    assert found["of_blocks"] == 2.0
    assert found["all_of_parameters"] == 8192 / 4


def test_a_block_that_ends_at_once_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    held = {"a": {"cached": 1, "home": 2}}
    monkeypatch.setattr(sparse_driver, "held_bytes", lambda: held)
    monkeypatch.setattr(sparse_driver, "SAMPLE_S", 60.0)
    with sparse_driver.Memory() as memory:
        pass
    assert memory.most == held


# ------------------------------------------------------------------ the peer


def test_a_shard_applies_a_step_when_it_has_all_of_it() -> None:
    shard = actor_ps.Shard(10, 2)
    shard.keep(1, np.array([2, 3], np.int32))
    ids = np.array([3, 9], np.int32)
    shard.push(0, ids, np.array([1.0, 2.0], np.float32))
    assert shard.pull(0, ids).tolist() == [0.0, 0.0]
    shard.push(1, None, np.array([0.5, 0.25], np.float32))
    assert shard.pull(1, None).tolist() == [0.5, 1.25]
    assert shard.first(10).tolist() == [0, 0, 0.5, 1.25, 0, 0, 0, 0, 0, 2.0]
    assert shard.pushed == {}


def test_a_node_adds_up_what_its_workers_push(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ParameterLayout(5000, 2)
    ids = [np.array(each, np.int32) for each in ([0, 2048, 1024], [5, 2048, 2047])]
    node = actor_ps.Node(0, layout, *ids)
    assert node.ids.tolist() == [0, 5, 2048, 1024, 2047]
    assert [node.places(i).tolist() for i in range(2)] == [[0, 2, 3], [1, 2, 4]]
    pushed: list[Any] = []
    monkeypatch.setattr(actor_ps, "_push", lambda *each: pushed.append(each))
    node.parts = []
    node.push(np.array([1, 2, 3], np.float32), np.array([10, 20, 30], np.float32))
    ((number, _, total),) = pushed
    assert (number, total.tolist()) == (0, [1, 10, 22, 3, 30])


class FakeActor:
    def __init__(self, actor: actor_ps.Shard) -> None:
        self.actor = actor


def test_a_layout_and_shards_agree() -> None:
    layout = ParameterLayout(5000, 2)
    ids = np.array([0, 2048, 4999, 1024, 2047], np.int32)  # by shard
    shards = [FakeActor(actor_ps.Shard(layout.stripe_length, 1)) for _ in range(2)]
    for part in actor_ps._parts_of(0, ids, layout, shards, keep=False):
        part.shard.actor.push(0, part.places, ids[part.part].astype(np.float32))
    shard, place = np.divmod(layout.places(ids), layout.stripe_length)
    found = [shards[i].actor.weights[at] for i, at in zip(shard, place, strict=True)]
    assert found == ids.tolist()
    assert shard.tolist() == [0, 0, 0, 1, 1]


# ------------------------------------------------------------------ a small run


@pytest.mark.lab
@pytest.mark.soak
@pytest.mark.root
@pytest.mark.slow
def test_it_ends_with_its_figures() -> None:
    if reason := lab_unavailable("netns"):
        missing(reason)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [sys.executable, "-m", "bench", "sparse_lr", "--small", "--cases", "1e7"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(text) for text in done.stdout.splitlines()]
    assert {"kernel", "cores", "page_size", "ray", "trap", "rate"} <= set(lines[0]["environment"])
    summary = lines[-1]["summary"]
    assert set(summary) == {"actor_ps_speedup", "memory_ratio", "1e7"}
    assert summary["actor_ps_speedup"] == summary["1e7"]["actor_ps_speedup"] > 0
    assert {each["side"] for each in lines if "side" in each} == {"clamor", "sent", "kept", "node"}
    (checked,) = (each["same_within"] for each in lines if "same_within" in each)
    assert set(checked) == {"sent", "kept", "node"}
