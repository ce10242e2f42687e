"""The descriptors of this process: as many as it may have, in a table that need not grow.

The kernel doubles a process's table when it is full. Where the process has several threads it then
waits for all processors to have passed a quiet point (``expand_fdtable``): 7 to 20 ms, in which
whoever makes a descriptor waits, with locks that others want. A page server has one for each
variable and for each layer that it retains: a commit that met a full table took five times as long
as the others. The table never shrinks, so it is made large once, at the start.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
from typing import Final

TABLE: Final = 1 << 15  # descriptors, of 8 bytes each


def make_room() -> None:
    """Raises the limit as far as it goes, and makes room in the table."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
    most = TABLE if soft == resource.RLIM_INFINITY else min(soft, TABLE)
    with contextlib.suppress(OSError), open(os.devnull, "rb") as file:
        os.close(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, most - 1))
