"""Two attempts of one task on two nodes, and a registry that restarts between them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray._session import process_sessions
from clamor_ray._tasks.task_context import recording
from tests.conftest import ANSWER_S, ClamorCluster
from tests.support.lab.cluster import node_resource

pytestmark = pytest.mark.lab

N_TASKS, PER_BLOCK = 12, 512


@pytest.fixture
def counters(clamor_cluster: ClamorCluster) -> Iterator[Any]:
    """One block for each task, and one for all of them."""
    ref = clamor.put(np.zeros((N_TASKS + 1, PER_BLOCK)))
    yield ref
    clamor.free(ref)


TESTS = {"at once": 1, "restart": 2, "half way": 3}


def token_of(test: str, task: int) -> bytes:
    return TESTS[test].to_bytes(8, "little") + task.to_bytes(8, "little")


class Runner:
    """A process of a node that runs attempts."""

    def __init__(self) -> None:
        clamor.init()

    def attempt(
        self, box: list[Any], test: str, task: int, wait_for: Any = None
    ) -> tuple[int, int]:
        """Counts in the task's own block, then in that of all; how often it has committed, and at
        which version its reference is."""
        (ref,) = box

        def count(row: int) -> None:
            with clamor.update(ref) as x:
                x[row, 0] += 1

        with recording(token_of(test, task)) as attempt:
            count(task)
            if wait_for is not None:
                import ray

                ray.get(wait_for, timeout=ANSWER_S)
            clamor.retry(attempts=1000)(count)(N_TASKS)
        return attempt.commits, ref.version


def runners() -> list[Any]:
    import ray

    return [
        ray.remote(Runner).options(num_cpus=0, resources={node_resource(node): 0.001}).remote()
        for node in (0, 1)
    ]


def tokens(test: str) -> list[bytes]:
    return [token_of(test, task) for task in range(N_TASKS)]


def test_two_attempts_at_once_count_once(clamor_cluster: ClamorCluster, counters: Any) -> None:
    import ray

    both = runners()
    pending = [
        runner.attempt.remote([counters], "at once", task)
        for task in range(N_TASKS)
        for runner in (both if task % 2 else reversed(both))
    ]
    answers = ray.get(pending, timeout=ANSWER_S)
    assert [commits for commits, _ in answers] == [2] * (2 * N_TASKS)
    x = counters.refresh().get()
    assert x[:, 0].tolist() == [1] * N_TASKS + [N_TASKS]
    assert counters.version == 2 * N_TASKS
    session = process_sessions.current()
    assert session.rpc.drop_keys(tokens("at once")) == 2 * N_TASKS
    assert session.rpc.drop_keys(tokens("at once")) == 0
    for runner in both:
        ray.kill(runner)


def test_the_registry_restarts_between_attempts(
    clamor_cluster: ClamorCluster, counters: Any
) -> None:
    import ray

    first, second = runners()
    assert ray.get(first.attempt.remote([counters], "restart", 0), timeout=ANSWER_S) == (2, 2)
    session = process_sessions.current()
    before = session.rpc.ping()
    os.kill(before, signal.SIGKILL)
    assert session.rpc.ping() != before
    assert ray.get(second.attempt.remote([counters], "restart", 0), timeout=ANSWER_S) == (2, 2)
    x = counters.refresh().get()
    assert (x[0, 0], x[N_TASKS, 0]) == (1, 1)
    assert session.rpc.drop_keys(tokens("restart")) == 2
    for runner in (first, second):
        ray.kill(runner)


def test_an_attempt_that_died_half_way_is_finished(
    clamor_cluster: ClamorCluster, counters: Any
) -> None:
    """The second one's first transaction was committed, and its second one was not."""
    import ray

    first, second = runners()
    never = ray.remote(lambda: signal.pause()).options(num_cpus=0).remote()
    ray.get(first.__ray_ready__.remote(), timeout=ANSWER_S)
    dying = first.attempt.remote([counters], "half way", 3, [never])
    with pytest.raises(ray.exceptions.GetTimeoutError):
        ray.get(dying, timeout=3)
    assert counters.refresh().version == 1
    ray.kill(first)
    ray.cancel(never, force=True)
    assert ray.get(second.attempt.remote([counters], "half way", 3), timeout=ANSWER_S) == (2, 2)
    x = counters.refresh().get()
    assert (x[3, 0], x[N_TASKS, 0]) == (1, 1)
    process_sessions.current().rpc.drop_keys(tokens("half way"))
    ray.kill(second)
