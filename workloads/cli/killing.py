"""The end of a node as a crash would have it, on a cluster of this machine, and what ran again."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import ray


@dataclasses.dataclass(frozen=True)
class Tally:
    """Counts what tasks of all nodes of this machine did, and where: a file each time.

    Args:
        folder: where; it pickles.
    """

    folder: str

    def note(self, name: str) -> None:
        """Once more."""
        node = ray.get_runtime_context().get_node_id()
        (Path(self.folder) / f"{name}.{node}.{uuid.uuid4()}").touch()

    def count(self, name: str) -> Counter[str]:
        """How often so far, by Ray's id of the node."""
        return Counter(path.name.split(".")[1] for path in Path(self.folder).glob(f"{name}.*"))


def kill_node(cluster: Any, node_id: str) -> None:
    """Kills a node of a local cluster with all its processes.

    Args:
        cluster: what `attaching.attached` yielded.
        node_id: Ray's.
    """
    (node,) = (node for node in cluster.list_all_nodes() if node.node_id == node_id)
    # Listed before: who has lost its parent is found no more.
    below = _descendants(node.all_processes["raylet"][0].process.pid)
    cluster.remove_node(node, allow_graceful=False)
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                # The command's name may hold spaces and brackets: count from the last one.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found
