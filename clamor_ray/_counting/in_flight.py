"""Anchors of what was passed to tasks that are not over yet.

Ray counts an anchor that is in a task's arguments. But an argument that is no bytes makes an empty
task a tenth dearer, so the arguments of `clamor.remote` functions go without, and the process that
submitted the task holds their anchors itself. Ray says which of its tasks are not over; they are
looked at once a second, while there are any.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Any, Final

from clamor_ray._counting.anchors import Anchors

logger = logging.getLogger("clamor_ray")

LOOK_S: Final = 1.0


class InFlight:
    """Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a `__del__` may submit a task wherever memory is taken
        # By the task that submitted. Of one without a result nobody knows the id: it is over at the
        # latest when that task has none under way.
        self._by_task: dict[Any, dict[Any, Anchors]] = {}
        self._without_id: dict[Any, list[Anchors]] = {}
        self._is_looking = False

    def add(self, result: Any, held: Anchors) -> None:
        """A task was submitted by this thread.

        Args:
            result: what submitting it returned: a reference, several, a generator, or None.
            held: until it is over.
        """
        import ray

        parent = ray._private.worker.global_worker.current_task_id
        ref = result[0] if isinstance(result, list) and result else result
        ref = getattr(ref, "_generator_ref", ref)
        with self._lock:
            if isinstance(ref, ray.ObjectRef):
                self._by_task.setdefault(parent, {})[ref.task_id()] = held
            else:
                self._without_id.setdefault(parent, []).append(held)
            if self._is_looking:
                return
            self._is_looking = True
        thread = threading.Thread(target=self._look, name="clamor-in-flight", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there is no room for one; the task is submitted, and the next one
            self._is_looking = False  # tries again

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_S)
            try:
                with self._lock:
                    parents = {*self._by_task, *self._without_id}
                for parent in parents:
                    self._look_at(parent)
            except Exception:  # to hold too long harms nobody
                logger.exception("variables that were passed to tasks stay for now")
            with self._lock:
                if not self._by_task and not self._without_id:
                    self._is_looking = False
                    return

    def _look_at(self, parent: Any) -> None:
        with self._lock:  # those of now: what is submitted meanwhile may not be in the answer
            known = list(self._by_task.get(parent, ()))
            n_without = len(self._without_id.get(parent, ()))
        pending = _pending(parent)
        if pending is None:
            return
        with self._lock:
            held = self._by_task.get(parent, {})
            gone = [held.pop(task) for task in known if task not in pending]
            if not held:
                self._by_task.pop(parent, None)
            if not pending and n_without:
                gone += self._without_id[parent][:n_without]
                del self._without_id[parent][:n_without]
                if not self._without_id[parent]:
                    del self._without_id[parent]
        while gone:  # not under the lock
            while _is_ending():
                time.sleep(LOOK_S)
            gone.pop()


def _is_ending() -> bool:
    """Whether `ray.shutdown` is under way. Who calls Ray then from another thread, or drops an
    object reference there, ends the process."""
    import ray

    worker = ray._private.worker.global_worker
    if not hasattr(worker, "core_worker"):
        return False  # it is over, and references are dropped without Ray
    return not worker.connected or worker.threads_stopped.is_set()


def _pending(parent: Any) -> set[Any] | None:
    """Tasks that this one submitted and that are not over; None where Ray cannot be asked now."""
    import ray

    worker = ray._private.worker.global_worker
    if not worker.connected and not hasattr(worker, "core_worker"):
        return set()
    return None if _is_ending() else set(worker.core_worker.get_pending_children_task_ids(parent))


in_flight = InFlight()


def _after_fork_in_child() -> None:
    global in_flight
    in_flight = InFlight()  # what the parent held the child keeps (`anchors.py`)


os.register_at_fork(after_in_child=_after_fork_in_child)
