"""Groups of actors: members out of step, how they meet, how long they last, odd arrays."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray import errors
from tests.conftest import ClamorCluster, until
from tests.library.test_group import ANSWER_S, Worker, everywhere, started
from tests.support import driver_script
from tests.support.lab.cluster import node_resource

pytestmark = pytest.mark.lab


@pytest.fixture(scope="module")
def workers(clamor_cluster: ClamorCluster) -> Iterator[list[Any]]:
    """Three actors on two nodes. Each test has a group of its own of them."""
    with started(3) as made:
        yield made


@pytest.fixture
def own_workers(clamor_cluster: ClamorCluster) -> Iterator[list[Any]]:
    """Three that may be killed, and have no other test's connections."""
    with started(3) as made:
        yield made


def connected(workers: list[Any], name: str) -> list[bool]:
    """Which of the actors have connections of a group."""

    def look(name: str) -> bool:
        from clamor_ray._ring import members

        return name in members.by_group

    return ray.get([worker.call.remote(look, name) for worker in workers], timeout=ANSWER_S)


# ------------------------------------------------------------------ out of step


def test_rebuild_says_who_has_completed_what_and_counts_anew(workers: list[Any]) -> None:
    def work(group: Any, rank: int) -> Any:
        for _ in range(2):
            group.barrier()
        if rank == 1:
            with group._call():  # as where it is done, and the others' connections end
                pass
        done = group.rebuild()
        # What a program does then: all go on from where all have been.
        step = int(group.allreduce(np.array(done[rank]), "min"))
        return done, step, group.rebuild()

    assert (
        everywhere(workers, work, clamor.AllReduceGroup(workers)) == [((2, 3, 2), 2, (1, 1, 1))] * 3
    )


def test_a_rebuild_that_fails_forgets_nothing(workers: list[Any]) -> None:
    group = clamor.AllReduceGroup(workers, timeout_s=10)  # in which two come on a busy machine

    def begin(group: Any, rank: int) -> Any:
        group.barrier()

    def rebuild(group: Any, rank: int) -> Any:
        return group.rebuild()

    assert everywhere(workers, begin, group) == [None] * 3
    for error in everywhere(workers[:2], rebuild, group):
        assert isinstance(error, errors.MemberLostError)
        assert error.member == 2
    assert everywhere(workers, rebuild, group) == [(1, 1, 1)] * 3


# ------------------------------------------------------------------ meeting


def test_members_meet_though_the_registry_is_killed_meanwhile(workers: list[Any]) -> None:
    from clamor_ray._session import process_sessions

    session = process_sessions.current()

    def work(group: Any, rank: int) -> Any:
        return group.allreduce(np.array(rank)).item()

    group = clamor.AllReduceGroup(workers, timeout_s=ANSWER_S)
    early = [workers[rank].call.remote(work, group, rank) for rank in range(2)]
    ready, _ = ray.wait(early, timeout=1.0)
    assert not ready
    os.kill(session.rpc.ping(), signal.SIGKILL)
    late = workers[2].call.remote(work, group, 2)
    assert ray.get([*early, late], timeout=2 * ANSWER_S) == [3, 3, 3]


def test_a_member_that_dies_while_it_waits_is_forgotten(own_workers: list[Any]) -> None:
    group = clamor.AllReduceGroup(own_workers, timeout_s=ANSWER_S)

    def work(group: Any, rank: int) -> Any:
        return group.allreduce(np.array(rank)).item()

    pid = ray.get(own_workers[0].pid.remote(), timeout=ANSWER_S)
    waiting = own_workers[0].call.options(max_task_retries=0).remote(work, group, 0)
    ready, _ = ray.wait([waiting], timeout=1.0)
    assert not ready
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(waiting, timeout=ANSWER_S)
    others = [own_workers[rank].call.remote(work, group, rank) for rank in (1, 2)]
    ready, _ = ray.wait(others, timeout=1.0)
    assert not ready  # they do not connect to one that is dead

    def has_come_back() -> bool:
        try:
            return ray.get(own_workers[0].pid.remote(), timeout=ANSWER_S) != pid
        except ray.exceptions.RayError:  # Ray is starting it again
            return False

    until(has_come_back)
    back = own_workers[0].call.remote(work, group, 0)
    assert ray.get([back, *others], timeout=2 * ANSWER_S) == [3, 3, 3]


def test_waiting_members_hold_no_call_of_the_registry(
    clamor_cluster: ClamorCluster, workers: list[Any]
) -> None:
    """More wait than it has places."""
    from clamor_ray._protocol.rendezvous import Guest, Waiting
    from clamor_ray._session import process_sessions

    session = process_sessions.current()
    registry = session.registry
    asked = [
        registry.meet.remote("crowd", 1101, Guest(rank, "h", 1, rank + 1)) for rank in range(1100)
    ]
    found = ray.get(asked, timeout=ANSWER_S)
    assert all(isinstance(one, Waiting) for one in found)
    assert 1100 in found[-1].missing
    assert session.rpc.ping(timeout_s=ANSWER_S)


# ------------------------------------------------------------------ how long they last


def test_connections_end_with_the_last_group_object(own_workers: list[Any]) -> None:
    def soon(rank: int) -> None:
        from clamor_ray._ring import group_ends

        group_ends.LET_GO_S = 0.2

    def keep(group: Any, rank: int) -> None:
        import builtins

        group.barrier()
        if rank == 0:
            builtins.kept_group = group  # type: ignore[attr-defined]

    def let_go(rank: int) -> None:
        import builtins

        builtins.kept_group.barrier  # type: ignore[attr-defined]  # noqa: B018
        del builtins.kept_group  # type: ignore[attr-defined]

    ray.get([worker.call.remote(soon, 0) for worker in own_workers], timeout=ANSWER_S)
    group = clamor.AllReduceGroup(own_workers)
    name = group.name
    assert everywhere(own_workers, keep, group) == [None] * 3
    assert connected(own_workers, name) == [True] * 3
    del group
    until(lambda: connected(own_workers, name) == [True, False, False])
    ray.get(own_workers[0].call.remote(let_go, 0), timeout=ANSWER_S)
    until(lambda: connected(own_workers, name) == [False] * 3)


SHUTDOWN = """
import time
import numpy as np
import ray
import clamor_ray as clamor

ray.init()
clamor.init()

@ray.remote(num_cpus=0)
class Worker:
    def call(self, function, *args):
        return function(*args)

def connected(name):
    from clamor_ray._ring import members
    return name in members.by_group

def work(group):
    group.barrier()

workers = [Worker.remote() for _ in range(3)]
group = clamor.AllReduceGroup(workers)
ray.get([worker.call.remote(work, group) for worker in workers], timeout=60)
assert all(ray.get([worker.call.remote(connected, group.name) for worker in workers], timeout=60))
lonely = clamor.AllReduceGroup(workers[:2], timeout_s=600)
waiting = workers[0].call.remote(work, lonely)
ray.wait([waiting], timeout=1)
clamor.shutdown()
try:
    ray.get(waiting, timeout=60)
    raise SystemExit("it has met nobody, and says nothing")
except ray.exceptions.RayTaskError as error:
    print("waiting ended:", type(error.cause).__name__)
deadline = time.monotonic() + 60
while any(ray.get([worker.call.remote(connected, group.name) for worker in workers], timeout=60)):
    assert time.monotonic() < deadline, "they are connected after the end of the session"
    time.sleep(0.05)
ray.shutdown()
print("ended")
"""


def test_they_end_with_the_session(clamor_cluster: ClamorCluster) -> None:
    said = driver_script.run(SHUTDOWN, lab=clamor_cluster.lab)
    assert "ended" in said
    assert "waiting ended: SessionEndedError" in said


# ------------------------------------------------------------------ groups that are odd


def test_two_groups_from_two_threads(workers: list[Any]) -> None:
    def work(first: Any, rank: int, second: Any) -> Any:
        def many(group: Any) -> float:
            total = 0.0
            for step in range(20):
                total += group.allreduce(np.full(1 if step % 2 else 30_000, float(step)))[0]
            return total

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(many, (first, second)))

    first, second = (clamor.AllReduceGroup(workers) for _ in range(2))
    assert everywhere(workers, work, first, second) == [[3 * 190.0] * 2] * 3


def test_lanes(workers: list[Any]) -> None:
    def work(group: Any, rank: int) -> Any:
        rng = np.random.default_rng(rank)
        large = rng.integers(-9, 9, 1_000_003)
        return (
            group.allreduce(large).sum(),
            len(group.reduce_scatter(large)),
            group.all_gather(large[:50_000])[rank].tolist() == large[:50_000].tolist(),
            group.broadcast(large, root=1)[:3].tolist(),
        )

    want = sum(np.random.default_rng(rank).integers(-9, 9, 1_000_003) for rank in range(3))
    first = np.random.default_rng(1).integers(-9, 9, 1_000_003)[:3].tolist()
    found = everywhere(workers, work, clamor.AllReduceGroup(workers, lanes=4))
    assert sum(length for _, length, _, _ in found) == 1_000_003
    for total, _, gathered, told in found:
        assert total == want.sum()
        assert gathered
        assert told == first


@pytest.mark.parametrize("size", [0, 1, 2, 7, 4096, 10_007])
def test_numbers_are_numpys(workers: list[Any], size: int) -> None:
    """Of lengths that three do not divide, with NaN, infinities and what overflows."""

    def arrays(rank: int) -> list[Any]:
        odd = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e300, 3.0])
        return [
            np.resize(np.roll(odd, rank), size),
            np.full(size, np.iinfo(np.int32).max - rank, np.int32),
            np.full(size, 60_000 + 100 * rank, np.float16),
        ]

    def work(group: Any, rank: int) -> Any:
        doubles, integers, halves = arrays(rank)
        with np.errstate(all="ignore"):
            return [
                *(group.allreduce(doubles, op) for op in ("sum", "min", "max", "prod")),
                group.allreduce(integers),
                group.allreduce(halves),
                group.allreduce(halves, "mean"),
                group.allreduce(integers, "mean"),
                np.concatenate(group.all_gather(group.reduce_scatter(np.resize(integers, 3)))),
            ]

    all_of = [np.stack(some) for some in zip(*(arrays(rank) for rank in range(3)), strict=True)]
    doubles, integers, halves = all_of
    with np.errstate(all="ignore"):
        want = [
            doubles.sum(axis=0),
            doubles.min(axis=0),
            doubles.max(axis=0),
            doubles.prod(axis=0),
            integers.sum(axis=0, dtype=np.int32),
            halves.sum(axis=0),
            halves.mean(axis=0),
            integers.mean(axis=0),
            np.resize(integers, (3, 3)).sum(axis=0, dtype=np.int32) if size else np.zeros(3),
        ]
    for found in everywhere(workers, work, clamor.AllReduceGroup(workers)):
        for ours, numpys in zip(found[:-1], want[:-1], strict=True):
            np.testing.assert_array_equal(ours, numpys)
            assert ours.dtype == numpys.dtype


def test_a_member_that_has_no_place(clamor_cluster: ClamorCluster, workers: list[Any]) -> None:
    """A group larger than the cluster: actors that wait for CPUs that there are not."""
    homeless = Worker.options(num_cpus=10_000).remote()
    try:
        group = clamor.AllReduceGroup([workers[0], homeless], timeout_s=2)
        (error,) = everywhere(workers[:1], lambda group, rank: group.barrier(), group)
        assert isinstance(error, errors.MemberLostError)
        assert error.member == 1
        assert "more members than the cluster has CPUs" in str(error)
    finally:
        ray.kill(homeless)


def test_more_members_than_nodes(clamor_cluster: ClamorCluster) -> None:
    made = [Worker.options(resources={node_resource(i % 2): 0.001}).remote() for i in range(7)]
    try:

        def work(group: Any, rank: int) -> Any:
            return group.allreduce(np.full(50_000, 1.0))[-1], group.allreduce(rank)

        found = everywhere(made, work, clamor.AllReduceGroup(made, timeout_s=ANSWER_S))
        assert [(float(a), int(b)) for a, b in found] == [(7.0, 21)] * 7
    finally:
        for worker in made:
            ray.kill(worker)


# ------------------------------------------------------------------ Ray's own API


def test_sends_that_cross_are_refused_at_both(workers: list[Any]) -> None:
    def work(name: Any, rank: int) -> Any:
        from ray.util import collective

        import clamor_ray.ray_collective  # noqa: F401  (registers the backend)

        collective.init_collective_group(2, rank, backend="clamor", group_name=name)
        array = np.full(40_000, float(rank))
        try:
            collective.send(array, 1 - rank, group_name=name)
            said = ""
        except RuntimeError as error:
            said = str(error)
        if rank == 0:
            collective.send(array, 1, group_name=name)
        else:
            collective.recv(array, 0, group_name=name)
        collective.destroy_collective_group(name)
        return said, array[-1]

    found = everywhere(workers[:2], work, "crossing")
    for rank, (said, last) in enumerate(found):
        assert f"member {1 - rank} sent 320000 bytes where it should receive" in said
        assert last == 0.0


def test_a_group_called_as_the_pairs_of_another(own_workers: list[Any]) -> None:
    def work(name: Any, rank: int) -> Any:
        from ray.util import collective

        import clamor_ray.ray_collective  # noqa: F401

        odd = f"{name}/0-1"
        for group_name in (name, odd):
            collective.init_collective_group(2, rank, backend="clamor", group_name=group_name)
        array = np.full(3, float(rank))
        collective.allreduce(array, group_name=odd)
        if rank == 0:
            collective.send(array, 1, group_name=name)
        else:
            collective.recv(array, 0, group_name=name)
        collective.allreduce(array, group_name=odd)
        from clamor_ray._ring import members

        names = sorted(members.by_group)
        for group_name in (name, odd):
            collective.destroy_collective_group(group_name)
        return array.tolist(), names

    for array, names in everywhere(own_workers[:2], work, "x"):
        assert array == [2.0] * 3
        assert names == ["ray-pair:0-1:x", "ray:x/0-1"]
