"""How the constructors of the page server and the registry end where trouble may pass.

Facts, and what follows:

* Ray calls an actor whose constructor raises dead, whatever ``max_restarts`` says. An actor whose
  process ends is restarted. So a constructor raises only what cannot pass, and what may pass
  (a shortage, a slow answer, a process that is still dying) ends the process.
* Ray unpickles the actor's class first, which imports much. Where that raises, Ray takes a class
  whose methods all raise. To report the error it asks that for its ``__repr__``. If ours has one,
  that raises too: the process ends and Ray restarts it. If ours has none, the actor is dead. So the
  two classes have a ``__repr__`` (seen with Ray 2.60; ``test_start_again.py`` looks at it).
* A restarted actor is a new process: what counts the tries is a file. Where even that cannot be
  written, the pause is the longest.
* Ray starts the next process at once: so the pause comes before the end.
* All that is logged comes to the driver's console, and ``throttle`` counts in one process. So the
  first tries of a row are said in full, and then one in its window.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Final, NoReturn

from clamor_ray import errors
from clamor_ray.actors.process.throttle import MOST, WINDOW_S

EXIT_TRY_AGAIN: Final = 75  # EX_TEMPFAIL
PAUSES_S: Final = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)  # by the number of tries before; then the last

# The next try would end the same way.
FINAL: Final = (
    errors.VersionMismatchError,
    errors.DeniedError,  # the directory of sockets is somebody else's
    errors.UnsupportedPlatformError,
    errors.CacheBudgetError,
    errors.TrapUnavailableError,
    errors.RangeError,
    errors.InternalError,  # a damaged journal
)


def _count(path: Path) -> tuple[int, bool]:
    """Notes this try: the file has a byte for each, and the time when one was last said.

    Returns:
        How many tries there were before, and whether this one is to be said.
    """
    now_s = time.time()
    before, said_s, is_said = 0, now_s, True
    try:
        with contextlib.suppress(FileNotFoundError):
            found = path.stat()
            before, said_s = found.st_size, found.st_mtime
            is_said = before < MOST or not 0 <= now_s - said_s < WINDOW_S
        with path.open("ab", buffering=0) as file:
            file.write(b".")
    except OSError:
        before = len(PAUSES_S)
    with contextlib.suppress(OSError):
        os.utime(path, (now_s, now_s if is_said else said_s))
    return before, is_said


def succeeded(path: Path) -> None:
    """The next trouble is the first one again."""
    with contextlib.suppress(OSError):
        path.unlink(missing_ok=True)


def end_process_to_try_again(who: str, path: Path, failure: BaseException) -> NoReturn:
    """Ends this process, with a code that Ray takes for a crash, and so restarts the actor.

    Args:
        who: Begins the line in the log.
        path: The file that counts the tries.
        failure: Why.
    """
    before, is_said = _count(path)
    pause_s = PAUSES_S[min(before, len(PAUSES_S) - 1)]
    if is_said:
        logging.getLogger("clamor_ray").error(
            "%s cannot start (try %d); it is tried again in %g s: %r",
            *(who, before + 1, pause_s, failure),
            exc_info=failure if before < MOST else None,
        )
    time.sleep(pause_s)
    logging.shutdown()
    os._exit(EXIT_TRY_AGAIN)
