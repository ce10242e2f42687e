"""Hash maps under transactions: what is seen when, what conflicts, and what travels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import clamor_ray as clamor
from clamor_ray import errors
from tests.conftest import ClamorCluster

N = 1 << 18  # 17 bytes a slot: 8.5 MiB


@pytest.fixture
def m(clamor_cluster: ClamorCluster) -> Any:
    keys = np.arange(N)
    made = clamor.HashMap.build(keys, keys * 0.5, capacity=N)
    yield made
    clamor.free(made.ref)


def _get(m: clamor.HashMap, keys: Any) -> tuple[int, Any]:
    return m.version, m.get(keys)


def _update(m: clamor.HashMap, keys: Any, values: Any) -> int:
    with clamor.update(m) as t:
        t.set(keys, values)
    return m.version


def _exchange(m: clamor.HashMap, old: int, new: int) -> None:
    with clamor.update(m) as t:
        t.erase(old)
        t[new] = 1.0


def test_set_and_erase_are_seen_after_the_block(m: Any, clamor_cluster: ClamorCluster) -> None:
    before = m.snapshot()
    with clamor.update(m) as t:
        t[17] = -1.0
        t.erase([3, 4])
        del t[5]
        t.update([10, 11], [1.0, 2.0])
        assert t[17] == -1.0
        assert 3 not in t
        assert len(t) == N - 3
        assert m[17] == 8.5
        assert len(m) == N
    assert m.version == 1
    assert m[17] == -1.0
    assert m.get([10, 11]).tolist() == [1.0, 2.0]
    assert m.contains([3, 4, 5, 6]).tolist() == [False, False, False, True]
    assert len(m) == N - 3
    assert clamor_cluster.run(_get, m, [17, 10])[1].tolist() == [-1.0, 1.0]
    # The old version stays as it was, here and elsewhere.
    for old in (before, m.at(0)):
        assert old.version == 0
        assert old.get([17, 3]).tolist() == [8.5, 1.5]
        assert clamor_cluster.run(_get, old, [17, 3])[1].tolist() == [8.5, 1.5]
    with pytest.raises(KeyError):
        clamor_cluster.run(_get, m, [3])


def test_an_error_in_the_block_changes_nothing(m: Any) -> None:
    def fail() -> None:
        with clamor.update(m) as t:
            t[1] = 99.0
            t.erase(N + 1)

    with pytest.raises(errors.MissingKeyError):
        fail()
    assert m.version == 0
    assert m[1] == 0.5


def test_a_full_map_leaves_the_transaction_usable(m: Any) -> None:
    with clamor.update(m) as t:
        with pytest.raises(errors.HashMapFullError, match=f"capacity of {N}"):
            t[N] = 1.0
        t.erase(0)
        t[N] = 1.0
    assert m[N] == 1.0
    assert 0 not in m


def test_one_changed_value_is_one_block(m: Any, clamor_cluster: ClamorCluster) -> None:
    keys = np.arange(0, N, 64)
    clamor_cluster.run(_get, m, keys)
    before = clamor_cluster.engine(1).bytes_received
    with clamor.update(m) as t:
        t[4711] = 1.25
    version, found = clamor_cluster.run(_get, m, [4711])
    assert (version, found.tolist()) == (1, [1.25])
    assert clamor_cluster.engine(1).bytes_received - before <= 64 << 10


def test_equal_values_make_no_version(m: Any) -> None:
    with clamor.update(m) as t:
        t.set(np.arange(N), np.arange(N) * 0.5)
    assert m.version == 0


def test_tasks_update_too(m: Any, clamor_cluster: ClamorCluster) -> None:
    assert clamor_cluster.run(_update, m, [1, N - 1], [7.0, 8.0]) == 1
    assert m.version == 0
    assert m[1] == 0.5
    assert m.refresh().version == 1
    assert m.get([1, N - 1]).tolist() == [7.0, 8.0]


def test_rivals_in_one_block_conflict(m: Any) -> None:
    rival = m.snapshot()
    _update(m, 5, 1.0)
    with pytest.raises(errors.CommitConflict):
        _update(rival, 5, 2.0)
    assert m.refresh()[5] == 1.0


def test_two_that_change_the_set_of_keys_always_conflict(m: Any) -> None:
    # Otherwise one could insert behind a slot that the other empties, and the key be lost: also
    # where both leave the number of keys as it was.
    _update(m, [0], [0.25])
    with clamor.update(m) as t:
        t.erase(7)
    old = m.snapshot()
    _exchange(m, 100, N + 5)
    with pytest.raises(errors.CommitConflict):
        _exchange(old, 200_000, N + 6)
    found = m.refresh().contains([N + 5, N + 6, 100, 200_000])
    assert found.tolist() == [True, False, False, True]


def test_small_maps_are_updated_too(clamor_cluster: ClamorCluster) -> None:
    m = clamor.HashMap.build([b"one", b"two"], [1, 2])
    assert m.ref._inline
    with clamor.update(m) as t:
        t[b"six"] = 6
    assert m.version == 1
    assert clamor_cluster.run(_get, m, [b"six", b"one"])[1].tolist() == [6, 1]
    assert clamor.HashMap(m.ref.at(0)).contains(b"six") is False


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_versions_are_dicts(clamor_cluster: ClamorCluster, data: Any) -> None:
    """Each version of a map, read on the other node, is the dict that it was."""
    keys = st.integers(0, 300)
    m = clamor.HashMap.build(np.arange(200), np.arange(200), capacity=400)
    models = [{k: k for k in range(200)}]
    for _ in range(data.draw(st.integers(1, 4))):
        model = dict(models[-1])
        with clamor.update(m) as t:
            for key in data.draw(st.lists(keys, max_size=5)):
                if key in model and data.draw(st.booleans()):
                    t.erase(key)
                    del model[key]
                else:
                    t[key] = model[key] = data.draw(st.integers(0, 9))
        if m.version == len(models):
            models.append(model)
        assert model == models[-1]
    for version, model in enumerate(models):
        found, values = clamor_cluster.run(_items, m.at(version))
        assert dict(zip(found.tolist(), values.tolist(), strict=True)) == model
    clamor.free(m.ref)


def _items(m: clamor.HashMap) -> tuple[Any, Any]:
    return m.items()
