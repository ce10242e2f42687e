"""Calls the function of one task. Pure, but for what the function does."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from clamor_ray import errors
from clamor_ray._recipes.matching.matcher import ReadyTask
from clamor_ray._recipes.matching.pickling import pickled
from clamor_ray._recipes.program.plain import decision_of
from clamor_ray._recipes.program.tables import StageInfo
from clamor_ray._recipes.program.task import Task, results_of

PICKLED: Final = b"\x80"  # begins each pickle that Python sends


class Ran(NamedTuple):
    """What a task has done, but for what it has changed in place.

    Args:
        sent: Messages, pickled, by the index of the receiver.
        decision: What it decides; None: its stage does not.
        results: What its function has returned, by dataset.
    """

    sent: dict[int, list[bytes]]
    decision: bool | None
    results: dict[int, Any]


def _message(stage: StageInfo, received: bytes) -> Any:
    if received[:1] != PICKLED:
        raise errors.ProgramError(
            f"{stage.line}: Stage {stage.name} receives what a kernel in C has sent: bytes, and no "
            "pickle.",
            hint="Let the kernel write a partition, and a stage in Python send what is in it.",
        )
    return pickle.loads(received)


def run_task(
    stage: StageInfo,
    function: Callable[..., Any],
    task: ReadyTask,
    n_next: int | None,
    received: Sequence[bytes],
    values: Sequence[Any],
) -> Ran:
    """
    Args:
        stage: Of the task.
        function: Of the stage.
        task: Which one.
        n_next: How many tasks the next stage has.
        received: Messages to it, pickled, in the order of their senders.
        values: The partitions that it accesses, in the order of the stage's accesses.

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
        lambda: [_message(stage, each) for each in received],
        send,
    )
    returned = function(handle, *values)
    if stage.decides:
        return Ran(sent, decision_of(stage, returned), {})
    writes = [access.dataset for access in stage.accesses if access.is_write]
    return Ran(sent, None, results_of(stage, returned, writes))
