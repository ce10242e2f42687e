"""Where tasks can run, and waiting for them, with a deadline."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, TypeVar

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from . import tasks as _tasks

TASK_TIMEOUT_S = 1800.0
PARTITIONS_PER_CPU: Final = 2

T = TypeVar("T")


def finished(pending: dict[Any, T], timeout_s: float = TASK_TIMEOUT_S) -> Iterator[tuple[T, Any]]:
    """What tasks return, each as it finishes, with what is said of it.

    Args:
        pending: Ray's reference of each task -> what is said of it.
        timeout_s: for the next one.

    Raises:
        TimeoutError: None finished in time.
    """
    left = dict(pending)
    while left:
        ready, _ = ray.wait(list(left), num_returns=1, timeout=timeout_s)
        if not ready:
            raise TimeoutError(
                f"no task finished within {timeout_s:.0f} s; {len(left)} are waiting: "
                "does the cluster have CPUs to run them?"
            )
        yield left.pop(ready[0]), ray.get(ready[0])


def nodes_with_cpus() -> list[tuple[str, int]]:
    """(Ray node id, CPUs) of the live nodes that run tasks.

    Raises:
        RuntimeError: There are none.
    """
    found = [
        (str(node["NodeID"]), int(node["Resources"].get("CPU", 0)))
        for node in ray.nodes()
        if node["Alive"]
    ]
    found = [(node_id, n_cpus) for node_id, n_cpus in found if n_cpus > 0]
    if not found:
        raise RuntimeError("no node of this cluster has a CPU: nothing can run")
    return found


def total_cpus() -> int:
    """Of all live nodes."""
    return sum(n_cpus for _, n_cpus in nodes_with_cpus())


def default_partitions() -> int:
    """PARTITIONS_PER_CPU for each CPU."""
    return PARTITIONS_PER_CPU * total_cpus()


def start_workers(*, collections: bool = False) -> None:
    """A worker process for each CPU, if Ray will: it takes seconds that are nobody's work.

    Args:
        collections: for tasks of collections. Those stay where they ran first; a node whose workers
            have yet to start would get none of them.
    """
    tasks = [
        ray.remote(_tasks.attach if collections else _tasks.nothing)
        .options(num_cpus=1, scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=True))
        .remote()
        for node_id, n_cpus in nodes_with_cpus()
        for _ in range(n_cpus)
    ]
    ray.get(tasks, timeout=TASK_TIMEOUT_S)
