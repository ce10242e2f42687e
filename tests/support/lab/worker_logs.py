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
    worker = sys.modules.get("ray._private.worker")
    if worker is None or worker.global_worker.node is None:
        return {}
    found = {}
    for path in sorted(Path(worker.global_worker.node.get_logs_dir_path()).glob("worker-*")):
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_size and status.st_mtime >= began_s:
                file.seek(max(0, status.st_size - LAST_BYTES))
                found[path.name] = file.read().decode(errors="replace")
    return found
