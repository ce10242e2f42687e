"""Which tasks ran, and where, written by the tasks themselves: nobody else is asked.

A line is appended to one file by a single write, so that tasks of all nodes of this machine may do
it at once. What a killed task began is there; its end is not.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Log:
    """Names a file; pickles."""

    path: str

    def note(self, event: str, stage: str, partition: int) -> None:
        """Says that the task of a partition began or ended here."""
        import ray

        node = ray.get_runtime_context().get_node_id()
        line = json.dumps([event, stage, int(partition), node]).encode() + b"\n"
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)

    def lines(self) -> list[Line]:
        """All of it so far, in order."""
        path = Path(self.path)
        if not path.exists():
            return []
        # Of a write that crosses a page of the file, readers may see the first part alone.
        whole = path.read_text().rpartition("\n")[0]
        return [Line(*json.loads(line)) for line in whole.splitlines()]


@dataclasses.dataclass(frozen=True)
class Line:
    """What one task said.

    Args:
        event: "began" or "ended".
        stage: of the program.
        partition: of the stage.
        node: Ray's id.
    """

    event: str
    stage: str
    partition: int
    node: str


def rerun(lines: list[Line]) -> int:
    """How many times a task began that had begun before."""
    began = Counter((line.stage, line.partition) for line in lines if line.event == "began")
    return sum(count - 1 for count in began.values())


def ended_and_again(lines: list[Line], node: str, stage: str) -> set[tuple[str, int]]:
    """Tasks of a stage that ended on a node and began once more, there or elsewhere."""
    mine = [line for line in lines if line.stage == stage]
    began = Counter(line.partition for line in mine if line.event == "began")
    ended = {line.partition for line in mine if line.event == "ended" and line.node == node}
    return {(stage, partition) for partition in ended if began[partition] > 1}


def running_on(lines: list[Line], node: str) -> set[tuple[str, int]]:
    """Tasks that began on a node and have not ended there."""
    out: set[tuple[str, int]] = set()
    for line in lines:
        if line.node == node:
            task = (line.stage, line.partition)
            (out.add if line.event == "began" else out.discard)(task)
    return out
