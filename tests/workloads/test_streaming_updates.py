"""The streaming-updates workload: its data, its command line, and runs over a cluster."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import clamor_ray as clamor
from clamor_ray.workloads import streaming_updates as workload
from clamor_ray.workloads.cli import observe
from clamor_ray.workloads.data import stream
from tests.conftest import ClamorCluster

# --------------------------------------------------------------------- data


def test_keys_differ_and_are_everywhere() -> None:
    keys = stream.key_of(np.arange(1 << 18))
    assert len(np.unique(keys)) == 1 << 18
    assert abs(np.median(keys)) < 1 << 60
    assert keys.tolist()[:2] == [0, -7046029254386353131]
    assert len(np.unique(stream.first_value(keys))) == 1 << 18


@pytest.mark.parametrize("skew", [0.0, 0.5, 0.99, 1.0, 1.5])
def test_lookups_are_as_frequent_as_zipf_says(skew: float) -> None:
    n_keys, n = 1000, 400_000
    drawn = stream.zipf(np.random.default_rng(3), n_keys, n, skew)
    assert drawn.min() >= 0
    assert drawn.max() < n_keys
    counts = np.bincount(drawn, minlength=n_keys)
    share = 1.0 / np.arange(1, n_keys + 1) ** skew
    share /= share.sum()
    for low, high in ((0, 3), (3, 20), (20, 100), (100, 1000)):
        assert counts[low:high].sum() / n == pytest.approx(share[low:high].sum(), rel=0.12)


def a_batch(also: tuple[int, ...] = ()) -> stream.Batch:
    return stream.Batch(seed=5, n_keys=1000, n_lookups=2000, skew=0.9, also=also)


def test_batches_are_the_same_wherever_they_are_drawn() -> None:
    one, two = a_batch((7, 8)), a_batch((7, 8))
    np.testing.assert_array_equal(one.keys(), two.keys())
    assert one.keys()[:2].tolist() == [7, 8]
    assert len(one.keys()) == 2002
    other = stream.Batch(6, 1000, 2000, 0.9)
    assert not np.array_equal(other.keys(), a_batch().keys())


def test_the_model_is_first_values_and_changes() -> None:
    model = stream.PlainMap(1000)
    keys = stream.key_of([1, 2, 3, 2])
    model.change(keys[:2], np.array([10, 20]))
    model.change(keys[1:2], np.array([21]))
    assert model.values(keys).tolist() == [10, 21, int(stream.first_value(keys)[2]), 21]


@pytest.mark.parametrize("at", [0, 1, 1500])
def test_one_wrong_value_is_noticed(at: int) -> None:
    model = stream.PlainMap(1000)
    hot = stream.key_of([0])
    model.change(hot, np.array([123]))
    batch = a_batch((int(hot[0]),))
    values = model.values(batch.keys())
    model.check("round", batch, values[:1], stream.checksum(values))
    values[at] += 1
    with pytest.raises(stream.WrongValue, match="round"):
        model.check("round", batch, values[:1], stream.checksum(values))


# ------------------------------------------------------------- command line


def test_the_table_has_a_line_per_round_and_a_column_per_node() -> None:
    out = io.StringIO()
    rounds = [
        workload.Round(0, 0, 0.0, 1.5, 0, {"a": 0, "b": 5 << 20}, {"a": 1, "b": 2}),
        workload.Round(1, 1, 0.0042, 0.25, 3, {"a": 80}, {"a": 1, "b": 2}),
    ]
    console = Console(file=out, width=80)
    workload.print_rounds(console, rounds, [("a", "node 1"), ("b", "node 2"), ("c", "node 3")])
    text = out.getvalue()
    for part in ("node 3", "5.0 MiB", "4.2", "0.250", "80 B", "1.500"):
        assert part in text, text
    assert "…" not in text


# ------------------------------------------------------------------ cluster


def job(**options: Any) -> workload.StreamJob:
    defaults = {"n_keys": 20_000, "rounds": 3, "n_changes": 5, "n_lookups": 4000}
    return workload.StreamJob(**{**defaults, "n_tasks": 4, "skew": 0.99, "seed": 3, **options})


def test_rounds_on_two_nodes(clamor_cluster: ClamorCluster) -> None:
    out = io.StringIO()
    stages = workload.Stages(Console(file=out, width=100))
    rounds = workload.run(job(), stages)
    assert [line.number for line in rounds] == [0, 1, 2, 3]
    assert [line.version for line in rounds] == [0, 1, 2, 3]
    for line in rounds[1:]:
        assert 1 <= line.dirty_blocks <= 5
        assert line.update_s > 0
        assert sum(line.tasks.values()) == 4
    assert "checking 4 versions" in out.getvalue()


def test_a_lost_update_is_noticed(
    clamor_cluster: ClamorCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = stream.PlainMap.change

    def change(self: stream.PlainMap, keys: Any, values: Any) -> None:
        real(self, keys, values + 1)  # what the map will not hold

    monkeypatch.setattr(stream.PlainMap, "change", change)
    stages = workload.Stages(Console(file=io.StringIO()))
    with pytest.raises(stream.WrongValue, match="round 1: key"):
        workload.run(job(), stages)


def test_old_versions_are_checked(clamor_cluster: ClamorCluster) -> None:
    m = workload.build(20_000)
    model = stream.PlainMap(20_000)
    key = stream.key_of([3])
    with clamor.update(m) as t:
        t.set(key, 5)
    changed = stream.PlainMap(20_000)
    changed.change(key, np.array([5]))
    workload._check_versions(m, {0: model, 1: changed})
    with pytest.raises(stream.WrongValue, match="version 0"):
        workload._check_versions(m, {0: changed, 1: changed})
    assert observe.dirty_blocks(m.ref, 0, 1) == 1
    assert observe.dirty_blocks(m.ref, 1, 1) == 0
    clamor.free(m.ref)
