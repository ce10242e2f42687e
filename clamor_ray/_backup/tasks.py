"""Runs copying where the data is: a Ray task for each data file, a few at a time on each node.

A path on a disk means a directory of this machine. Other nodes copy into it themselves where they
have it too, as on a shared file system; else this node reads all over the network.
"""

from __future__ import annotations

import collections
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from clamor_ray import errors
from clamor_ray._backup.copying import FILE_BYTES, Copied, CopyOrder, copy_chunks, is_seen
from clamor_ray._backup.directory import Directory
from clamor_ray._backup.units import Unit
from clamor_ray._protocol.cause import cause_of
from clamor_ray._session.session import Session

AT_ONCE: Final = 2  # on one node
RETRIES: Final = 2  # of a task whose worker has died
SEEN_S: Final = 60.0


class CopyTasks:
    """See the file's head. Of one checkpoint.

    Args:
        session: that it is of.
        directory: the backup.
        number: of the checkpoint.
        still_at_it: is called again and again while tasks run; what it raises ends that.
    """

    def __init__(
        self,
        session: Session,
        directory: Directory,
        number: int,
        still_at_it: Callable[[], object],
    ) -> None:
        self._session = session
        self._where = (directory, number, secrets.token_hex(8))
        self._still_at_it = still_at_it
        self.n_written = 0

    def run(self, units: Iterable[Unit]) -> Iterator[tuple[int, CopyOrder, Copied]]:
        """Copies all; of each chunk (number of its variable, order, what became of it).

        Raises:
            ServerUnavailableError: A task could not be run.
            What `copy_chunks` raises.
        """
        units = list(units)
        if sum(unit.n_bytes for unit in units) <= FILE_BYTES:  # no task pays
            for unit in units:
                yield from self._note(unit, *copy_chunks(*self._where, unit.packed()))
            return
        nodes = self._nodes_that_see({unit.node_id for unit in units})
        waiting: dict[str, collections.deque[Unit]] = {}
        for unit in units:
            waiting.setdefault(nodes[unit.node_id], collections.deque()).append(unit)
        running: dict[Any, tuple[str, Unit]] = {}
        task = ray.remote(copy_chunks)
        try:
            while waiting or running:
                for node_id in list(waiting):
                    n_here = sum(at == node_id for at, _ in running.values())
                    while waiting[node_id] and n_here < AT_ONCE:
                        unit = waiting[node_id].popleft()
                        ref = task.options(**_on(node_id)).remote(*self._where, unit.packed())
                        running[ref] = (node_id, unit)
                        n_here += 1
                    if not waiting[node_id]:
                        del waiting[node_id]
                done, _ = ray.wait(list(running), num_returns=1, timeout=1.0)
                for ref in done:
                    _, unit = running.pop(ref)
                    yield from self._note(unit, *_answer_of(ref))
                self._still_at_it()
        finally:
            for ref in running:
                ray.cancel(ref)

    def _note(
        self, unit: Unit, found: list[list[Copied]], n_bytes: int
    ) -> Iterator[tuple[int, CopyOrder, Copied]]:
        self.n_written += n_bytes
        return unit.results(found)

    def _nodes_that_see(self, node_ids: set[str]) -> dict[str, str]:
        """Where the units of each node run."""
        here, directory = self._session.node_id, self._where[0]
        others = [node_id for node_id in node_ids if node_id != here]
        seen = {here: here, **{node_id: node_id for node_id in others}}
        if not others or not directory.store.is_local:
            return seen
        name = f".seen-{secrets.token_hex(8)}"
        directory.write(name, [b""])
        try:
            task = ray.remote(is_seen)
            path = os.path.join(directory.path, name)
            asked = {node_id: task.options(**_on(node_id)).remote(path) for node_id in others}
            ray.wait(list(asked.values()), num_returns=len(asked), timeout=SEEN_S)
            for node_id, ref in asked.items():
                ready, _ = ray.wait([ref], timeout=0)
                if not ready or not _answer_of(ref):
                    seen[node_id] = here
        finally:
            directory.delete([name])
        return seen


def _on(node_id: str) -> dict[str, Any]:
    # No CPU: tasks that are at work may hold all there are.
    return {
        "name": "clamor checkpoint",
        "num_cpus": 0,
        "max_retries": RETRIES,
        "enable_task_events": False,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=True),
    }


def _answer_of(ref: Any) -> Any:
    try:
        return ray.get(ref)
    except ray.exceptions.RayTaskError as failure:
        cause = failure.cause
        if isinstance(cause, errors.ClamorError):
            raise cause from None
        raise
    except ray.exceptions.RayError as failure:
        raise errors.ServerUnavailableError(
            f"A task of the checkpoint could not be run: {cause_of(failure)}",
            hint="The last checkpoint of the backup is as it was: call clamor.checkpoint again.",
        ) from failure
