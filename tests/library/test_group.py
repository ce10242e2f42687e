"""Groups of actors: what their collectives give, and what members see when one fails."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray import errors
from tests.conftest import ClamorCluster, until
from tests.support.lab.cluster import node_resource

pytestmark = pytest.mark.lab

ANSWER_S = 60.0


@ray.remote(num_cpus=0, max_restarts=1)
class Worker:
    """Calls functions in its process."""

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(*args)

    def pid(self) -> int:
        return os.getpid()


@contextlib.contextmanager
def started(n: int) -> Iterator[list[Any]]:
    """Actors, on both nodes in turn."""
    made = [Worker.options(resources={node_resource(i % 2): 0.001}).remote() for i in range(n)]
    ray.get([worker.pid.remote() for worker in made], timeout=ANSWER_S)
    yield made
    for worker in made:
        ray.kill(worker)


@pytest.fixture(scope="module")
def workers(clamor_cluster: ClamorCluster) -> Iterator[list[Any]]:
    """Four actors. Each test has a group of its own of them."""
    with started(4) as made:
        yield made


@pytest.fixture
def own_workers(clamor_cluster: ClamorCluster) -> Iterator[list[Any]]:
    """Four that may be killed."""
    with started(4) as made:
        yield made


def everywhere(
    workers: list[Any], function: Callable[..., Any], group: Any, *args: Any
) -> list[Any]:
    """What each member gets, or raises."""
    waiting = [
        worker.call.remote(function, group, rank, *args) for rank, worker in enumerate(workers)
    ]
    found = []
    for reference in waiting:
        try:
            found.append(ray.get(reference, timeout=ANSWER_S))
        except ray.exceptions.RayTaskError as failure:
            found.append(failure.cause)
        except ray.exceptions.RayActorError as failure:
            found.append(failure)
    return found


def test_all_collectives(workers: list[Any]) -> None:
    def work(group: Any, rank: int) -> Any:
        small = np.arange(6, dtype=np.int64).reshape(2, 3) + rank
        large = np.full(200_003, float(rank + 1))
        group.barrier()
        return {
            "rank": (group.rank, group.size),
            "sum": group.allreduce(small),
            "max": group.allreduce(small, "max"),
            "mean": group.allreduce(large, "mean")[[0, -1]],
            "python": group.allreduce(small, lambda a, b: np.maximum(a, b) + 0),
            "scatter": group.reduce_scatter(large)[:2],
            "lengths": len(group.reduce_scatter(large)),
            "scatter python": group.reduce_scatter(small, lambda a, b: np.maximum(a, b) + 0),
            "gather": group.all_gather(np.array([rank, -rank])),
            "broadcast": group.broadcast(small, root=2),
            "large broadcast": group.broadcast(large, root=1)[[0, -1]],
            "empty": group.allreduce(np.empty((0, 3))).shape,
            "scalar": group.allreduce(2.0),
        }

    group = clamor.AllReduceGroup(workers)
    n = 200_003
    base = np.arange(6).reshape(2, 3)
    for rank, found in enumerate(everywhere(workers, work, group)):
        assert found["rank"] == (rank, 4)
        np.testing.assert_array_equal(found["sum"], 4 * base + 6)
        np.testing.assert_array_equal(found["max"], base + 3)
        np.testing.assert_array_equal(found["mean"], [2.5, 2.5])
        np.testing.assert_array_equal(found["python"], base + 3)
        np.testing.assert_array_equal(found["scatter"], [10.0, 10.0])
        own = (base + 3).reshape(-1)[6 * rank // 4 : 6 * (rank + 1) // 4]
        np.testing.assert_array_equal(found["scatter python"], own)
        assert found["lengths"] == n * (rank + 1) // 4 - n * rank // 4
        np.testing.assert_array_equal(found["gather"], [[r, -r] for r in range(4)])
        np.testing.assert_array_equal(found["broadcast"], base + 2)
        np.testing.assert_array_equal(found["large broadcast"], [2.0, 2.0])
        assert found["empty"] == (0, 3)
        assert found["scalar"] == 8.0


def test_members_that_differ(workers: list[Any]) -> None:
    def work(group: Any, rank: int) -> Any:
        try:
            group.allreduce(np.ones(5 if rank == 1 else 4, np.float32))
        except errors.CollectiveMismatchError as error:
            return str(error), group.allreduce(np.array([rank]))
        return None

    for text, after in everywhere(workers, work, clamor.AllReduceGroup(workers)):
        assert "ember 1" in text
        assert "float32 of shape (5,)" in text
        assert after == [6]


def test_what_is_refused_before_anything_moves(workers: list[Any]) -> None:
    def work(group: Any, rank: int) -> Any:
        said = []
        for call in (
            lambda: group.allreduce(np.array(["a"])),
            lambda: group.allreduce(np.array([1, 2]), "mean", out=np.array([0, 0])),
            lambda: group.allreduce([1.0], "median"),
            lambda: group.allreduce(np.ones(3), out=np.ones(4)),
            lambda: (lambda a: group.allreduce(a[:-1], out=a[1:]))(np.ones(4)),
            lambda: group.broadcast(np.ones(3), root=4),
        ):
            try:
                call()
            except (TypeError, ValueError) as error:
                said.append(f"{type(error).__name__}: {error}")
        return said, group.allreduce(np.array([1]))

    for said, after in everywhere(workers, work, clamor.AllReduceGroup(workers)):
        assert [text.split(":")[0] for text in said] == [
            "TypeError",
            *["ValueError"] * 5,
        ]
        assert after == [4]


def test_functions_are_agreed_on_too(workers: list[Any]) -> None:
    def work(group: Any, rank: int) -> Any:
        said = []
        for call in (
            lambda: group.allreduce(np.ones(4, np.float64 if rank else np.int64), np.add),
            lambda: group.allreduce(1.0, np.add) if rank else group.barrier(),
            lambda: group.allreduce(np.ones(3), "sum" if rank else np.add),
            lambda: (group.allreduce if rank else group.reduce_scatter)(np.ones(3), np.add),
        ):
            try:
                call()
            except errors.CollectiveMismatchError as error:
                said.append(str(error))
        return said, group.allreduce(np.array([rank]), np.add)

    for said, after in everywhere(workers, work, clamor.AllReduceGroup(workers)):
        assert len(said) == 4
        assert "reduce_scatter of float64 of shape (3,) by a function" in said[3]
        assert "allreduce of int64 of shape (4,) by a function" in said[0]
        assert "a barrier" in said[1]
        assert "by sum" in said[2]
        assert after == [6]


def test_a_function_that_raises_ends_it_for_all(workers: list[Any]) -> None:
    def work(group: Any, rank: int) -> Any:
        def add(a: Any, b: Any) -> Any:
            if rank == 1:
                raise OverflowError("too much")
            return a + b

        group.allreduce(np.ones(1000), add)

    begun = time.monotonic()
    found = everywhere(workers, work, clamor.AllReduceGroup(workers))
    assert time.monotonic() - begun < 30
    assert isinstance(found[1], OverflowError)
    for rank in (0, 2, 3):
        assert isinstance(found[rank], errors.MemberLostError), found


def test_arrays_of_global_variables(workers: list[Any]) -> None:
    ref = clamor.put(np.arange(300_000.0))

    def work(group: Any, rank: int, ref: Any) -> Any:
        mine = ref.get()
        total = group.allreduce(mine)
        try:
            group.allreduce(mine, out=ref.get(mode="c"))
        except ValueError as error:
            return total[-1], str(error)
        return None

    for total, said in everywhere(workers, work, clamor.AllReduceGroup(workers), ref):
        assert total == 4 * 299_999.0
        assert "no global variable's memory" in said


def test_a_member_that_dies_and_comes_back(own_workers: list[Any]) -> None:
    def sum_up(group: Any, rank: int) -> Any:
        return float(group.allreduce(np.ones(1 << 20))[-1])

    group = clamor.AllReduceGroup(own_workers, timeout_s=100)
    assert everywhere(own_workers, sum_up, group) == [4.0] * 4
    os.kill(ray.get(own_workers[2].pid.remote(), timeout=ANSWER_S), signal.SIGKILL)
    begun = time.monotonic()
    left = [w for i, w in enumerate(own_workers) if i != 2]
    for found in everywhere(left, sum_up, group):
        assert isinstance(found, errors.MemberLostError), found
        assert found.member == 2, found  # at all of them: also at those that only hear of it
        assert "rebuild" in str(found)
    assert time.monotonic() - begun < 100  # they were told: nobody waited for as long as he may

    def again(group: Any, rank: int) -> Any:
        return group.rebuild(), sum_up(group, rank), group.rebuild()

    def has_come_back() -> bool:
        try:
            return bool(ray.get(own_workers[2].pid.remote(), timeout=ANSWER_S))
        except ray.exceptions.RayError:  # Ray is starting it again
            return False

    until(has_come_back)
    assert everywhere(own_workers, again, group) == [((1, 1, 0, 1), 4.0, (1, 1, 1, 1))] * 4


def test_a_member_that_stands_still(workers: list[Any]) -> None:
    def work(group: Any, rank: int) -> Any:
        group.barrier()
        if rank == 3:
            return None
        group.allreduce(np.ones(100_000))
        return "?"

    group = clamor.AllReduceGroup(workers, timeout_s=10)  # time to meet, on a busy machine too
    found = everywhere(workers, work, group)
    assert found[3] is None
    assert all(isinstance(error, errors.MemberLostError) for error in found[:3]), found
    assert any("Member 3 of the group did nothing for 10 s" in str(error) for error in found[:3])


def test_a_group_larger_than_its_members_times_out(workers: list[Any]) -> None:
    group = clamor.AllReduceGroup(workers, timeout_s=1.5)

    def work(group: Any, rank: int) -> Any:
        group.barrier()

    for error in everywhere(workers[:2], work, group):
        assert isinstance(error, errors.MemberLostError)
        assert "2, 3 did not come within 1.5 s" in str(error)
        assert "ray list actors" in str(error)


def test_outside_its_actors(workers: list[Any]) -> None:
    group = clamor.AllReduceGroup(workers[:2])
    with pytest.raises(errors.NotAMemberError, match="no actor"):
        group.barrier()
    (error,) = everywhere(workers[2:3], lambda group, rank: group.barrier(), group)
    assert isinstance(error, errors.NotAMemberError)
    with pytest.raises(ValueError, match="twice"):
        clamor.AllReduceGroup([workers[0], workers[0]])
    with pytest.raises(ValueError, match="at least one"):
        clamor.AllReduceGroup([])


def test_a_group_of_one(workers: list[Any]) -> None:
    def work(group: Any, rank: int) -> Any:
        return (
            group.allreduce(np.arange(3)),
            group.reduce_scatter(np.arange(3)),
            group.all_gather(np.arange(3)),
            group.broadcast(np.arange(3)),
            group.allreduce(np.arange(3), np.add),
        )

    ((total, part, gathered, broadcast, python),) = everywhere(
        workers[:1], work, clamor.AllReduceGroup(workers[:1])
    )
    for found in (total, part, gathered[0], broadcast, python):
        np.testing.assert_array_equal(found, np.arange(3))


# ------------------------------------------------------------------ Ray's own API


def test_rays_collectives(workers: list[Any]) -> None:
    def work(name: Any, rank: int) -> Any:
        from ray.util import collective
        from ray.util.collective.types import ReduceOp

        import clamor_ray.ray_collective  # noqa: F401  (registers the backend)

        collective.init_collective_group(4, rank, backend="clamor", group_name=name)
        total = np.full((2, 2), rank + 1.0)
        collective.allreduce(total, group_name=name)
        least = np.array([rank, -rank])
        collective.reduce(least, dst_rank=1, group_name=name, op=ReduceOp.MIN)
        parts = [np.empty(2, np.int64) for _ in range(4)]
        collective.allgather(parts, np.array([rank, 7]), group_name=name)
        told = np.full(3, float(rank))
        collective.broadcast(told, src_rank=3, group_name=name)
        mine = np.empty(2)
        collective.reducescatter(mine, [np.full(2, float(i)) for i in range(4)], group_name=name)
        collective.barrier(group_name=name)
        passed = np.zeros(50_000)
        if rank == 0:
            collective.send(np.arange(50_000.0), 2, group_name=name)
        if rank == 2:
            collective.recv(passed, 0, group_name=name)
        size = collective.get_collective_group_size(name)
        collective.destroy_collective_group(name)
        return total, least, parts, told, mine, passed[-1], size

    for rank, found in enumerate(everywhere(workers, work, "sums")):
        total, least, parts, told, mine, last, size = found
        np.testing.assert_array_equal(total, np.full((2, 2), 10.0))
        np.testing.assert_array_equal(least, [0, -3] if rank == 1 else [rank, -rank])
        np.testing.assert_array_equal(parts, [[r, 7] for r in range(4)])
        np.testing.assert_array_equal(told, [3.0] * 3)
        np.testing.assert_array_equal(mine, [4.0 * rank] * 2)
        assert last == (49_999 if rank == 2 else 0)
        assert size == 4
