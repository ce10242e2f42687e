"""Why a task's attempt before this one ended, where it touched a block that is on no node any more.

Such a touch ends the process: the thread may hold the GIL, and is in the middle of an instruction,
so nothing can be raised there. Ray runs the task again. So a task that opens a variable tells the
page cache's client who it is (no message), the client says that to the page server before the
process ends, and the registry keeps it (`actors/lost_homes/task_end_log.py`). An attempt that is
not the first asks once, and raises when it opens what the one before could not read: the same
version of the same variable. One that ended for another reason finds nothing.

Only tasks of functions: an actor's process may run several calls at once, and it is unknown which
of them touched the block. And only those that open a variable in their main thread: Ray does not
say which task another thread belongs to.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import ray

from clamor_ray import errors
from clamor_ray._labels import label
from clamor_ray._native.client import PC_ERR_EXPIRED, PC_ERR_FILE_CHANGED

if TYPE_CHECKING:
    from clamor_ray._native.client import Client
    from clamor_ray._read.ref import GlobalRef
    from clamor_ray._session.session import Session
    from clamor_ray.actors.lost_homes.task_end_log import TaskEnd

ON_ITS_WAY_S: Final = 1.0  # Ray may run a task again before the registry has heard how it ended


class Run(NamedTuple):
    """One attempt of a task.

    Args:
        task: its id, the same for all attempts.
        attempt: 0 is the first.
    """

    task: bytes
    attempt: int


def running() -> Run | None:
    """The task that runs in this thread, where it is the only one of the process."""
    worker = ray._private.worker.global_worker
    if worker.mode != ray.WORKER_MODE or not worker.actor_id.is_nil():
        return None
    if threading.current_thread() is not threading.main_thread():
        return None
    core = worker.core_worker
    return Run(worker.current_task_id.binary(), core.get_current_task_attempt_number())


class TaskEnds:
    """What one process knows of them, for one session. Safe from any thread."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._noted: tuple[Client, Run] | None = None
        self._asked: Run | None = None
        self._waited = False
        self._end: TaskEnd | None = None

    def note(self, client: Client) -> Run | None:
        """Before a variable is opened: should a touch of it end this process, it is this task's."""
        run = running() if os.getpid() == self._pid else None  # a child's end is not the task's
        if run is not None and self._noted != (client, run):
            client.note_task(run.task)
            self._noted = (client, run)
        return run

    def check(self, session: Session, ref: GlobalRef[Any], run: Run | None, loss: int) -> None:
        """After it was opened.

        Args:
            session: of the variable.
            ref: the variable, at the version that was opened.
            run: what `note` gave.
            loss: number of the variable's loss; 0: nothing of it is lost.

        Raises:
            HomeLostError, SnapshotExpired, FileChangedError: An attempt before touched a block of
                this version that is lost, kept no longer, or in a file that has changed.
        """
        if run is None or run.attempt == 0:
            return
        if self._asked != run or (self._end is None and loss and not self._waited):
            try:
                self._end = session.rpc.end_of_task(run.task.hex(), ON_ITS_WAY_S if loss else 0.0)
            except errors.ClamorError:  # the task goes on as it did; it is asked again
                return
            self._asked, self._waited = run, bool(loss)
        end = self._end
        if end is None:
            return
        opened = [(ref._region, ref.version), *(piece[:2] for piece in ref._piece_versions())]
        if (end.region, end.version) in opened:
            raise error_of(session, end, ref.name)


def error_of(session: Session, end: TaskEnd, name: str | None = None) -> errors.ClamorError:
    """What the touch would have raised, had it been a call."""
    where = f"{label(end.region, name)} version {end.version} block {end.block}"
    touch = f"An attempt of this task before touched {where}, and its process ended there."
    if end.error == PC_ERR_EXPIRED:
        return errors.SnapshotExpired(f"{touch} The version is kept no longer.", code=end.error)
    if end.error == PC_ERR_FILE_CHANGED:
        changed = "Its file has changed since the variable was made of it."
        return errors.FileChangedError(f"{touch} {changed}", code=end.error)
    why = None
    with contextlib.suppress(
        errors.ClamorError
    ):  # it is lost, whether the registry says why or not
        why = session.rpc.why_lost(end.region)
    if why is None:
        return errors.HomeLostError(f"{touch} The block is on no node.", code=end.error)
    return errors.HomeLostError(f"{why.message} {touch}", code=end.error, hint=why.hint)
