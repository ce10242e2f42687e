"""How the constructors of the page server and the registry end where trouble may pass.

Facts, and what follows:

* Ray calls an actor whose constructor raises dead, whatever ``max_restarts`` says. An actor whose
  process ends is restarted. So a constructor raises only what cannot pass, and what may pass
  (a shortage, a slow answer, a process that is still dying) ends the process.
* A restarted actor is a new process: what counts the tries is a file. Where even that cannot be
  written, the pause is the longest.
* Ray starts the next process at once: so the pause comes before the end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from pathlib import Path
from typing import Final, NoReturn

from clamor_ray import errors

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


def _read_count(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
    except OSError:
        return len(PAUSES_S)


def _count(path: Path) -> int:
    """How many tries there were before, this one noted: the file has a byte for each."""
    before = _read_count(path)
    try:
        with path.open("ab", buffering=0) as file:
            file.write(b".")
    except OSError:
        return len(PAUSES_S)
    return before


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
    before = _count(path)
    pause_s = PAUSES_S[min(before, len(PAUSES_S) - 1)]
    logging.getLogger("clamor_ray").error(
        "%s cannot start (try %d); it is tried again in %g s: %r",
        *(who, before + 1, pause_s, failure),
        exc_info=failure,
    )
    time.sleep(pause_s)
    logging.shutdown()
    os._exit(EXIT_TRY_AGAIN)
