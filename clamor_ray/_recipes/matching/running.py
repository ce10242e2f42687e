"""Calls the function of one task. Pure, but for what the function does."""

from __future__ import annotations

import pickle
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple

from clamor_ray._recipes.matching.matcher import ReadyTask
from clamor_ray._recipes.matching.pickling import pickled
from clamor_ray._recipes.program.plain import decision_of
from clamor_ray._recipes.program.tables import StageInfo
from clamor_ray._recipes.program.task import Task, results_of


class Ran(NamedTuple):
    """What a task has done, its partitions apart.

    Args:
        sent: Messages, pickled, by the index of the receiver.
        decision: What it decides; None: its stage does not.
    """

    sent: dict[int, list[bytes]]
    decision: bool | None


def run_task(
    stage: StageInfo,
    function: Callable[..., Any],
    task: ReadyTask,
    n_next: int | None,
    received: Sequence[bytes],
    partitions: MutableMapping[tuple[int, int], Any],
) -> Ran:
    """
    Args:
        stage: Of the task.
        function: Of the stage.
        task: Which one.
        n_next: How many tasks the next stage has.
        received: Messages to it, pickled, in the order of their senders.
        partitions: By dataset and index. What the function returns takes their place.

    Raises:
        ProgramError: The function returns what it must not.
        Exception: Any of the function's.
    """
    sent: dict[int, list[bytes]] = {}

    def send(to: int, message: Any) -> None:
        sent.setdefault(to, []).append(pickled(message))

    handle = Task(
        stage,
        task.index,
        task.number,
        n_next,
        lambda: [pickle.loads(each) for each in received],
        send,
    )
    values = [partitions[access.dataset, task.index] for access in stage.accesses]
    returned = function(handle, *values)
    if stage.decides:
        return Ran(sent, decision_of(stage, returned))
    writes = [access.dataset for access in stage.accesses if access.is_write]
    for dataset, value in results_of(stage, returned, writes).items():
        partitions[dataset, task.index] = value
    return Ran(sent, None)
