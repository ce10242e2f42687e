"""Other processes: stopped, and ended, for certain.

A process runs on for some milliseconds after SIGSTOP or SIGKILL was sent to it, on a busy machine
for more: each of its threads ends what it does when it is next on a processor. A page server that
is asked in that time answers.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

STOPPED_S = 10.0
ENDED_S = 30.0
PAUSE_S = 0.001


def stop(*pids: int) -> None:
    """SIGSTOP; returns when none of their threads runs any more, but for what the kernel does.

    Raises:
        TimeoutError: One runs still after `STOPPED_S`.
    """
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + STOPPED_S
    stopping = set(pids)
    while stopping := {pid for pid in stopping if set(_states(pid)) & set("RS")}:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(stopping)} run {STOPPED_S:g} s after SIGSTOP")
        time.sleep(PAUSE_S)


def end(pids: Iterable[int]) -> None:
    """SIGKILL, as a power cut ends processes; returns when they are gone.

    Raises:
        TimeoutError: One is there still after `ENDED_S`.
    """
    waiting = set(pids)
    for pid in waiting:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + ENDED_S
    while waiting := {pid for pid in waiting if _is_alive(pid)}:
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(waiting)} live {ENDED_S:g} s after SIGKILL")
        time.sleep(PAUSE_S)


def _is_alive(pid: int) -> bool:
    return bool(set(_states(pid)) - set("ZX"))  # a zombie has no files any more


def _states(pid: int) -> Iterator[str]:
    """Of a process's threads, as in /proc: R runs, S sleeps, T was stopped, D waits for a disk."""
    threads: list[Path] = []
    with contextlib.suppress(OSError):  # it may go between two looks at it
        threads = list(Path(f"/proc/{pid}/task").glob("*/stat"))
    for stat in threads:
        with contextlib.suppress(OSError):
            yield stat.read_text().rpartition(")")[2].split()[0]
