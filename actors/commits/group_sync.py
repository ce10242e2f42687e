"""A file that only grows, or is written anew: when what was written is on the disk.

Many write, and each wants to know when its own is safe. One ``fdatasync`` at a time runs in a
thread; who comes meanwhile shares the next one. Who comes in the same turn of the loop as others
shares one with them.

A sync that fails is final. The kernel says so once, and takes what it could not write for written:
the next ``fdatasync`` may say that all is well, which is not so. So the process ends. The next one
reads what is there, and writes it anew before it answers (``durable_journal``).

Thread safety: everything but the sync itself belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from clamor_ray._protocol.cause import cause_of
from clamor_ray.actors.process.starting import EXIT_TRY_AGAIN
from clamor_ray.errors import ClosedError, JournalFullError

logger = logging.getLogger("clamor_ray.registry")

SLOW_S: Final = 5.0  # a sync that takes longer is said


def end_process(path: Path, failure: BaseException) -> None:
    """Ends this process, with a code that Ray takes for a crash, and so restarts the actor."""
    logger.critical(
        "%s cannot be brought to the disk (%s): this process ends, so that nothing is answered "
        "that a power cut could take back. See the kernel's log for what the disk says",
        *(path, cause_of(failure)),
    )
    logging.shutdown()
    os._exit(EXIT_TRY_AGAIN)


class GroupSync:
    """See the file's head.

    Args:
        path: The file; it must be there.
        sync: Brings a descriptor's data to the disk, in a thread.
        then: Is called in that thread when those have been told who waited for it.
        on_failure: Ends the process. Where it returns, everybody is refused from then on.

    Raises:
        OSError: The file cannot be opened.
    """

    def __init__(
        self,
        path: Path,
        sync: Callable[[int], None] = os.fdatasync,
        then: Callable[[], None] = lambda: None,
        on_failure: Callable[[Path, BaseException], None] = end_process,
    ) -> None:
        self._path, self._sync, self._then, self._on_failure = path, sync, then, on_failure
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        # Its own: others that a process has may all wait for a node that is gone.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="clamor-sync")
        self._n_written = self._n_synced = 0
        self._running: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None
        self._closed = False
        self.n_syncs = 0

    def written(self) -> None:
        """Something was written, which nobody must hear of before it is on the disk."""
        self._n_written += 1

    async def synced(self) -> None:
        """Returns when all that was written before is on the disk. No await where it is.

        Raises:
            JournalFullError: It never will, as far as this process knows.
            ClosedError: The file was closed, and that has failed.
        """
        wanted = self._n_written
        while self._n_synced < wanted:
            if self._failure is not None:
                raise JournalFullError(
                    f"{self._path} cannot be brought to the disk ({cause_of(self._failure)}).",
                    hint="See the kernel's log for what the disk says.",
                )
            if self._closed:
                raise ClosedError("The session was shut down.")
            if self._running is None:
                self._running = asyncio.get_running_loop().create_task(self._run())
            await asyncio.wait({self._running})

    async def _run(self) -> None:
        # Begins in the loop's next turn: all that was written in this one is in it.
        if self._closed:
            self._running = None
            return
        wanted = self._n_written
        call = asyncio.get_running_loop().run_in_executor(self._thread, self._sync, self._fd)
        try:
            done, _ = await asyncio.wait({call}, timeout=SLOW_S)
            if not done:
                logger.warning(
                    "the disk has not taken what was written to %s for %g s. Whoever waits for the "
                    "registry waits for that",
                    *(self._path, SLOW_S),
                )
            await call
        except Exception as failure:  # any: what was written may be gone
            self._failure = failure
            self._on_failure(self._path, failure)
        else:
            self._n_synced = max(wanted, self._n_synced)
            if not self._closed:
                self._thread.submit(self._do_then)
        finally:
            self.n_syncs += 1
            self._running = None

    def _do_then(self) -> None:
        try:
            self._then()
        except Exception as failure:  # any, of ours: nobody waits for its answer
            logger.error("what follows a sync of %s has failed", self._path, exc_info=failure)

    @property
    def size_bytes(self) -> int:
        """Of the file."""
        return os.fstat(self._fd).st_size

    def close(self) -> None:
        """Brings to the disk what is left. Nothing is to be written from now on. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._thread.shutdown(wait=True)
        try:
            if self._n_synced < self._n_written and self._failure is None:
                self._sync(self._fd)
                self._n_synced = self._n_written
        except Exception as failure:  # any: what was written may be gone
            self._failure = failure
            self._on_failure(self._path, failure)
        finally:
            os.close(self._fd)
