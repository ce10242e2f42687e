"""Adds of a stage's tasks: one commit when it is over, on a cluster of two nodes."""

from __future__ import annotations

import dataclasses
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._session import process_sessions
from clamor_ray.collection.run import attempts_and_retries, scatter_add_commit
from tests.conftest import ClamorCluster

N_ROWS = 20_000
DOUBTS = [  # what is raised in place of an answer, whether the commit was made, who can be asked
    (errors.ServerUnavailableError, True, True),
    (errors.ServerUnavailableError, False, True),
    (errors.WaitTimeoutError, True, True),
    (KeyboardInterrupt, True, True),
    (KeyboardInterrupt, False, True),
    (errors.ServerUnavailableError, True, False),
    (KeyboardInterrupt, True, False),
]
pytestmark = pytest.mark.usefixtures("clamor_cluster")


@pytest.fixture(params=["region", "inline"])
def w(request: pytest.FixtureRequest) -> clamor.GlobalRef[Any]:
    """Integers: 40 blocks, or inside its reference."""
    return clamor.zeros(N_ROWS if request.param == "region" else 200, np.int64)


def _numbers(n: int = 1000, partitions: int = 5) -> clamor.DataCollection:
    return clamor.from_numpy(np.arange(n), partitions=partitions)


def _of_the_other_node(cluster: ClamorCluster, values: np.ndarray[Any, Any]) -> Any:
    """A variable whose home is node 1."""

    def put() -> Any:
        return clamor.put(values)

    return cluster.run(put)


# ------------------------------------------------------------------ what lands


def test_all_tasks_in_one_version(w: clamor.GlobalRef[Any]) -> None:
    n = len(w.get())

    def work(batch: Any) -> Any:
        clamor.add_at(w, batch % 7, 1)
        clamor.add_at(w, [-1, -1], 2)
        return batch

    _numbers().map_batches(work).execute()
    expected = np.bincount(np.arange(1000) % 7, minlength=n)
    expected[-1] += 5 * 4
    assert w.version == 1  # the very reference that the function was given has moved
    np.testing.assert_array_equal(w.get(), expected)
    assert w.refresh().version == 1


def test_the_next_stage_reads_them(w: clamor.GlobalRef[Any]) -> None:
    def work(batch: Any, w: Any, seen: int) -> Any:
        assert w[0] == seen
        clamor.add_at(w, [0], 1)  # the object does, too
        return batch

    for step in range(3):
        _numbers().map_batches(work, w, 5 * step).execute()
        assert w.version == step + 1
    assert w.get()[0] == 15


def test_sums_then_maxima_then_minima(w: clamor.GlobalRef[Any]) -> None:
    def work(batch: Any) -> Any:
        clamor.minimum_at(w, [0, 1, 2], [100, 7, 50])
        clamor.maximum_at(w, [0, 1], [int(batch[0]), 30])
        clamor.add_at(w, [0, 2], 10)
        return batch

    _numbers(100).map_batches(work).execute()
    assert w.get()[:3].tolist() == [80, 7, 50]  # of 50, 0 and 50


def test_whole_arrays_and_rows(w: clamor.GlobalRef[Any]) -> None:
    n = len(w.get())

    def work(batch: Any) -> Any:
        clamor.add(w, np.arange(n))
        clamor.add_at(w, [1, 1], 100)
        clamor.add(w, np.ones(n, np.int32))
        return batch

    _numbers(100).map_batches(work).execute()
    expected = 5 * (np.arange(n) + 1)
    expected[1] += 1000
    np.testing.assert_array_equal(w.get(), expected)


def test_several_variables_on_several_homes_are_one_commit(clamor_cluster: ClamorCluster) -> None:
    near = clamor.zeros((N_ROWS, 3), np.float32)
    far = _of_the_other_node(clamor_cluster, np.zeros(N_ROWS))
    small = clamor.put(np.zeros(4, np.int32))

    def work(batch: Any) -> Any:
        clamor.add_at(near, batch, 1)
        clamor.add_at(far, batch, 2)
        clamor.add_at(small, batch % 4, 1)
        return batch

    _numbers(2000, partitions=6).map_batches(work).execute()
    assert (near.version, far.version, small.version) == (1, 1, 1)
    assert near.get()[:2001].sum() == 6000
    assert far.get()[:2001].tolist() == [2] * 2000 + [0]
    assert small.get().tolist() == [500] * 4


def test_more_than_is_kept_apart(monkeypatch: pytest.MonkeyPatch, w: clamor.GlobalRef[Any]) -> None:
    # Groups are merged by tasks of their own.
    monkeypatch.setattr(scatter_add_commit, "TOGETHER_BYTES", 0)

    def work(batch: Any) -> Any:
        for _ in range(3):
            clamor.add_at(w, batch % 200, 1)
        return batch

    _numbers(2000, partitions=6).map_batches(work).execute()
    assert w.get()[:201].tolist()[:200] == [30] * 200


def test_an_action_that_runs_no_task_adds_nothing(w: clamor.GlobalRef[Any]) -> None:
    def work(batch: Any) -> Any:
        clamor.add_at(w, [0], 1)
        return batch

    kept = _numbers().map_batches(work).cache()
    assert kept.count() == 1000
    assert kept.count() == 1000
    assert w.get()[0] == 5


def test_folds_may_add(w: clamor.GlobalRef[Any]) -> None:
    def fold(total: int, item: int) -> int:
        clamor.add_at(w, item % 3, 1)
        return total + 1

    assert _numbers(30).aggregate(0, fold, lambda a, b: a + b) == 30
    assert w.get()[:3].tolist() == [10, 10, 10]


def test_combining_partial_results_commits_at_once(w: clamor.GlobalRef[Any]) -> None:
    def two(a: int, b: int) -> int:
        clamor.add_at(w, [0], 1)
        return a + b

    def fold(total: int, item: int) -> int:
        return total + item

    assert _numbers(30).tree_aggregate(0, fold, two) == 435
    # 5 partial results: (3, 2) by tasks, and the zero and two of them here.
    assert w.refresh().get()[0] == 2 + 1 + 2


def test_a_function_that_does_not_look_like_it_runs_once(
    w: clamor.GlobalRef[Any], tmp_path: Path
) -> None:
    name = "add-at"

    def hidden(batch: Any) -> Any:
        fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(fd, b"x")
        os.close(fd)
        getattr(clamor, name.replace("-", "_"))(w, [0], 1)
        return batch

    clamor.from_numpy(np.arange(10), partitions=1).map_batches(hidden).execute()
    assert (tmp_path / "log").read_bytes() == b"x"
    assert (w.version, w.get()[0]) == (1, 1)


# ------------------------------------------------------------------ what does not


def test_a_stage_that_fails_applies_nothing(w: clamor.GlobalRef[Any]) -> None:
    def work(batch: Any) -> Any:
        clamor.add_at(w, [0], 1)
        if batch[0] == 400:
            raise ValueError("no")
        return batch

    with pytest.raises(errors.FunctionFailedError, match="no"):
        _numbers().map_batches(work).execute()
    assert (w.refresh().version, w.get()[0]) == (0, 0)


def test_what_is_wrong_is_said_in_the_task(w: clamor.GlobalRef[Any]) -> None:
    frozen = w.snapshot()

    def out(batch: Any) -> Any:
        clamor.add_at(w, [0, 10**6], 1)
        return batch

    def kind(batch: Any) -> Any:
        clamor.add_at(w, [0], 1.5)
        return batch

    def snapshot(batch: Any) -> Any:
        clamor.add_at(frozen, [0], 1)
        return batch

    def both(batch: Any, w: Any) -> Any:
        clamor.add_at(frozen, [0], len(w))
        return batch

    def turned(batch: Any, w: Any) -> Any:
        clamor.add_at(w.view(np.float64), [0], 1)
        return batch

    def open_twice(batch: Any) -> Any:
        with clamor.update(w):
            clamor.add_at(w, [0], 1)
        return batch

    with pytest.raises(IndexError, match=r"out of bounds.* partition ") as raised:
        _numbers().map_batches(out).execute()
    assert isinstance(raised.value, errors.RowIdError)
    with pytest.raises(errors.FunctionFailedError, match="TypeError"):
        _numbers().map_batches(kind).execute()
    with pytest.raises(errors.FrozenReferenceError):
        _numbers().map_batches(snapshot).execute()
    with pytest.raises(errors.FrozenReferenceError):  # though w is given at the same version
        _numbers().map_batches(both, w).execute()
    with pytest.raises(errors.NestedUpdateError):
        _numbers().map_batches(open_twice).execute()
    with pytest.raises(errors.FunctionFailedError, match="is a view of"):
        _numbers().map_batches(turned, w).execute()
    assert w.refresh().version == 0


def test_a_variable_that_is_freed_meanwhile(w: clamor.GlobalRef[Any]) -> None:
    other = clamor.zeros(N_ROWS, np.int64)

    def work(batch: Any) -> Any:
        clamor.add_at(w, [0], 1)
        clamor.add_at(other, [0], 1)
        if batch[0] == 0:
            clamor.free(w)
        return batch

    with pytest.raises(errors.FreedError):
        _numbers().map_batches(work).execute()
    assert other.refresh().version == 0


# ------------------------------------------------------------------ others


def test_others_commit_meanwhile(w: clamor.GlobalRef[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    times = [2]
    commit = scatter_add_commit._commit

    def late(*args: Any) -> Any:
        if times[0]:
            times[0] -= 1
            with clamor.update(w._latest()) as x:
                x[0] += 1000
        return commit(*args)

    def work(batch: Any) -> Any:
        clamor.add_at(w, [0], 1)
        return batch

    monkeypatch.setattr(scatter_add_commit, "_commit", late)
    _numbers().map_batches(work).execute()
    assert (w.version, w.get()[0]) == (3, 2005)


@pytest.mark.parametrize(("failure", "made", "asked"), DOUBTS)
def test_the_answer_to_the_commit_does_not_come(
    monkeypatch: pytest.MonkeyPatch, failure: type[BaseException], made: bool, asked: bool
) -> None:
    """The registry is asked what became of it: it never counts twice, and never silently."""
    w = clamor.zeros(N_ROWS, np.int64)
    session = process_sessions.current(w._scope)
    commit = session.rpc.commit

    def lost(*args: Any, **how: Any) -> Any:
        if made:
            commit(*args, **how)
        raise failure("injected")

    def silent(_: int) -> Any:
        raise errors.ServerUnavailableError("injected, too")

    def work(batch: Any) -> Any:
        clamor.add_at(w, [0], 1)
        return batch

    stage = _numbers().map_batches(work)
    raised: BaseException | None = None
    with monkeypatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patch.setattr(session.rpc, "commit", lost)
        if not asked:
            patch.setattr(session.rpc, "outcome", silent)
        patch.setattr(session, "config", dataclasses.replace(session.config, reattach_s=0.0))
        try:
            stage.execute()
        except (errors.ClamorError, KeyboardInterrupt) as error:
            raised = error
    if not asked:
        assert isinstance(raised, failure)
        texts = [str(raised), *(str(each.message) for each in told)]
        assert any("may have been applied, or not" in text for text in texts)
        return
    assert w.version == made  # the reference says whether it counts
    assert w.get()[0] == 5 * made
    if failure is KeyboardInterrupt:
        assert isinstance(raised, KeyboardInterrupt)
        assert any("had been applied" in str(each.message) for each in told) == made
    else:
        assert raised is None if made else isinstance(raised, failure)


def test_the_version_that_is_read_is_kept_no_longer(
    w: clamor.GlobalRef[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither by a task, which has to know only its shape, nor by who applies it."""
    times = [2]
    results = scatter_add_commit._results

    def late(answers: Any) -> Any:
        found = results(answers)
        if times[0]:
            times[0] -= 1
            raise errors.SnapshotExpired("gone")
        return found

    def work(batch: Any) -> Any:
        get = clamor.GlobalRef.get
        tries = [2]

        def gone(ref: Any, *args: Any) -> Any:
            if tries[0]:
                tries[0] -= 1
                raise errors.SnapshotExpired("gone")
            return get(ref, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(clamor.GlobalRef, "get", gone)
            clamor.add_at(w, [-1], 1)
        return batch

    monkeypatch.setattr(scatter_add_commit, "_results", late)
    _numbers().map_batches(work).execute()
    assert times[0] == 0
    assert (w.version, w.get()[-1]) == (1, 5)


def test_transactions_of_the_same_task_come_first(w: clamor.GlobalRef[Any]) -> None:
    def work(batch: Any) -> Any:
        clamor.add_at(w, [1], 10)

        def bump() -> None:
            with clamor.update(w._latest()) as x:
                x[1] = max(int(x[1]), 3)

        clamor.retry(bump)
        return batch

    _numbers(10, partitions=2).map_batches(work).execute()
    assert w.get()[1] == 23


def test_a_remote_task_commits_at_once(
    w: clamor.GlobalRef[Any], clamor_cluster: ClamorCluster
) -> None:
    def add(x: Any) -> int:
        clamor.add_at(x, [0, 0], 1)
        return 1

    assert clamor_cluster.run(add, w) == 1
    assert (w.refresh().version, w.get()[0]) == (1, 2)


def test_a_variable_that_the_task_made(w: clamor.GlobalRef[Any]) -> None:
    def work(batch: Any) -> Any:
        mine = clamor.zeros(1000)
        clamor.add_at(mine, [5], len(batch))
        clamor.add_at(w, [0], int(mine.get()[5]))  # it is there at once: nobody else has it
        return batch

    _numbers().map_batches(work).execute()
    assert w.get()[0] == 1000


# ------------------------------------------------------------------ the same bits, and once


def _floats(w: Any, how: dict[str, Any], kill: str = "") -> bytes:
    def work(batch: Any) -> Any:
        seed = np.random.default_rng(int(batch[0]))
        if kill and batch[0] == 300:
            mark = Path(kill)
            if not mark.exists():
                mark.touch()
                os._exit(1)
        ids = seed.integers(0, N_ROWS, 5000)
        clamor.add_at(w, ids, seed.normal(size=(5000, 2)) * 10.0 ** seed.integers(-9, 9, (5000, 1)))
        clamor.add(w, seed.normal(size=(N_ROWS, 2)))
        return batch

    _numbers(1000, partitions=10).options(**how).map_batches(work).execute()
    return bytes(w.get().tobytes())


def test_the_same_bits_wherever_tasks_run(
    clamor_cluster: ClamorCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fresh(far: bool = False) -> Any:
        if far:
            return _of_the_other_node(clamor_cluster, np.zeros((N_ROWS, 2)))
        return clamor.zeros((N_ROWS, 2))

    expected = _floats(fresh(), {"scheduling": "deterministic"})
    assert _floats(fresh(), {"scheduling": "locality"}) == expected
    assert _floats(fresh(), {"scheduling": "ray"}) == expected
    assert _floats(fresh(far=True), {"scheduling": "ray"}) == expected
    assert _floats(fresh(), {}, kill=str(tmp_path / "killed")) == expected
    monkeypatch.setattr(scatter_add_commit, "TOGETHER_BYTES", 1 << 60)
    assert _floats(fresh(), {}) == expected


def test_a_task_that_is_killed_and_its_copies_count_once(
    w: clamor.GlobalRef[Any], tmp_path: Path
) -> None:
    here = str(tmp_path)

    def work(batch: Any) -> Any:
        clamor.add_at(w, batch % 100, 1)
        mark = Path(here) / f"died-{batch[0]}"
        if batch[0] % 200 == 0 and not mark.exists():
            mark.touch()
            os._exit(1)
        return batch

    _numbers(1000, partitions=10).map_batches(work).execute()
    assert len(list(tmp_path.iterdir())) == 5
    assert w.version == 1
    assert w.get()[:100].tolist() == [10] * 100


def test_groups_are_of_the_nodes_that_run_tasks(
    w: clamor.GlobalRef[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node without CPUs is a home, and no place for tasks."""
    nodes, groups, found = ray.nodes, scatter_add_commit.ScatterAddCommit._groups, []

    def without_cpus() -> Any:
        return [
            {**node, "Resources": {**node["Resources"], "CPU": 2.0 * (n == 0)}}
            for n, node in enumerate(sorted(nodes(), key=lambda node: str(node["NodeID"])))
        ]

    def noted(self: Any) -> Any:
        found.append(([*self._nodes], groups(self)))
        return found[-1][1]

    def work(batch: Any) -> Any:
        clamor.add_at(w, [0], 1)
        return batch

    monkeypatch.setattr(ray, "nodes", without_cpus)
    monkeypatch.setattr(attempts_and_retries, "NODES_S", 0.01)  # what was heard before is not used
    monkeypatch.setattr(scatter_add_commit.ScatterAddCommit, "_groups", noted)
    _numbers().options(scheduling="deterministic").map_batches(work).execute()
    ((alive, made),) = found
    assert (len(alive), len(made)) == (2, 1)
    assert len({added.node_id for added in made[0]}) == 1


# ------------------------------------------------------------------ under each trap


def test_adds_under_each_trap(clamor_cluster: ClamorCluster, trap: str) -> None:
    """Many blocks of another node's variable, some of which nobody has written or read yet."""
    n_rows = 1 << 20
    near = clamor.zeros((n_rows, 2), np.float32)
    clamor.add_at(near, np.arange(0, n_rows, 5000), 1)
    ids = np.random.default_rng(7).integers(0, n_rows, 20_000)

    def add(w: Any, ids: Any) -> int:
        clamor.add_at(w, ids, 2)
        clamor.maximum_at(w, ids[:10], 100)
        return int(w.version)

    assert clamor_cluster.run_in_trap(trap, add, near, ids) == 3
    expected = np.zeros((n_rows, 2), np.float32)
    expected[::5000] = 1
    np.add.at(expected, ids, 2)
    expected[ids[:10]] = 100
    np.testing.assert_array_equal(near.refresh().get(), expected)
