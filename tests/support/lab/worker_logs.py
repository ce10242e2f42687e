"""What workers have said, out of their files, for the report of a test that failed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

LAST_BYTES = 4000  # of each file


def since(began_s: float) -> dict[str, str]:
    """The end of each file that a worker of this process's cluster has written to since a time.

    Args:
        began_s: as `time.time()` gives it.
    """
    found = {}
    for path in _paths():
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size and status.st_mtime >= began_s:
                file.seek(max(0, status.st_size - LAST_BYTES))
                found[path.name] = file.read().decode(errors="replace")
    return found


def have(text: str, began_s: float) -> bool:
    """Whether a worker has said this in a file that was written to since a time.

    Args:
        text: Of one line.
        began_s: as of `since`.
    """
    return any(
        text in path.read_text(errors="replace")
        for path in _paths()
        if path.stat().st_mtime >= began_s
    )


def _paths() -> list[Path]:
    worker = sys.modules.get("ray._private.worker")
    if worker is None or worker.global_worker.node is None:
        return []
    return sorted(Path(worker.global_worker.node.get_logs_dir_path()).glob("worker-*"))
