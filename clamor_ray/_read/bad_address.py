"""A system call that met an absent block: the exception gets a note that says so, and what to do.

With full userfaultfd a system call (`write`, `send`, `readinto`) waits for absent blocks as any
touch does. With the other traps the kernel answers "Bad address", and what reaches the user does
not always say even that: `ndarray.tofile` and `np.save` raise `OSError: 1000 requested and 0
written`. A full disk says that too, so the note then names both. We see such exceptions where they
leave a `clamor.remote` task or method, a function of a collection, a `with clamor.update` block, or
the program.
"""

from __future__ import annotations

import errno
import logging
import re
import sys
import threading
from typing import Any, Final

from clamor_ray._read import opener

logger = logging.getLogger("clamor_ray")

_COUNTS: Final = re.compile(r"\d+ requested and \d+ written")
_hooked = threading.Event()


def note_of(error: BaseException) -> str | None:
    """What to tell the user; None: it is no such error, or cannot be ours."""
    if not isinstance(error, OSError):
        return None
    text = str(error)
    is_bad_address = error.errno == errno.EFAULT or "Bad address" in text
    if not is_bad_address and not _COUNTS.fullmatch(text):
        return None
    in_force = [
        client.trap
        for session in opener.sessions()
        if (client := session._client) is not None and len(session.leases)
    ]
    trap = next((trap for trap in in_force if trap != "uffd"), None)
    if trap is None:
        return None
    return ("" if is_bad_address else "If the disk is not full: ") + (
        f"clamor: this process reads global variables with the trap {trap!r}, in which a system "
        "call fails on blocks that are not on its node yet. Before tofile, np.save, write or "
        "send: clamor.prefetch(array). Before readinto or recv_into a variable's array: read into "
        "memory of your own, then array[...] = it. With full userfaultfd (clamor.init() says "
        "which trap is in force) neither is needed."
    )


def explain(error: BaseException) -> None:
    """Adds the note, once; where exceptions have no notes (Python 3.10) it goes to the log."""
    note = note_of(error)
    if note is None or note in getattr(error, "__notes__", ()):
        return
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        logger.warning("%s: %s: %s", type(error).__name__, error, note)


def hook() -> None:
    """What ends the program, or a thread, unhandled is explained too."""
    if _hooked.is_set():
        return
    _hooked.set()
    shown, shown_of_thread = sys.excepthook, threading.excepthook

    def show(kind: Any, error: BaseException, traceback: Any) -> None:
        explain(error)
        shown(kind, error, traceback)

    def show_of_thread(args: Any) -> None:
        if args.exc_value is not None:
            explain(args.exc_value)
        shown_of_thread(args)

    sys.excepthook = show
    threading.excepthook = show_of_thread
