"""What the function of a stage gets as its first argument. Pure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from clamor_ray import errors
from clamor_ray._recipes.program.tables import StageInfo


class Task:
    """One task of a stage: which one it is, and the messages to and from it.

    Args:
        stage: Whose task.
        index: Of its partitions.
        number: Of the stage in the order of all that run, from 1.
        n_next: How many tasks the next stage has; None: there is none, or nobody knows it yet.
        messages: From the tasks of the stage before, in their order, and in the order in which
            each of them has sent.
        send: Takes the index of a task of the next stage, and a message for it.
    """

    __slots__ = ("_messages", "_n_next", "_send", "_stage", "index", "n_tasks", "number")

    def __init__(
        self,
        stage: StageInfo,
        index: int,
        number: int,
        n_next: int | None,
        messages: Callable[[], list[Any]],
        send: Callable[[int, Any], None],
    ) -> None:
        self.index = index
        self.number = number
        self.n_tasks = stage.n_tasks
        self._stage = stage
        self._n_next = n_next
        self._messages = messages
        self._send = send

    def recv(self) -> list[Any]:
        """The messages to this task, in the order of the tasks that sent them.

        Raises:
            ProgramError: The stage was described as one that receives none.
        """
        if not self._stage.receives:
            self._refuse("calls recv()", "receives")
        return self._messages()

    def send(self, index: int, message: Any) -> None:
        """A message to the task of that index of the next stage.

        Args:
            index: From 0.
            message: Picklable. It arrives as it is now.

        Raises:
            ProgramError: The next stage has no such task, or the stage was described as one that
                sends nothing.
        """
        n_next = self._check_sends("send()")
        try:
            to = operator.index(index)
        except TypeError:
            to = -1
        if not 0 <= to < n_next:
            raise errors.ProgramError(
                f"{self._stage.line}: Stage {self._stage.name} sends to task {index!r}, and the "
                f"tasks of the next stage are 0 to {n_next - 1}."
            )
        self._send(to, message)

    def broadcast(self, message: Any) -> None:
        """A message to each task of the next stage.

        Raises:
            ProgramError: The stage was described as one that sends nothing.
        """
        for index in range(self._check_sends("broadcast()")):
            self._send(index, message)

    def _check_sends(self, what: str) -> int:
        if not self._stage.sends or self._n_next is None:
            self._refuse(f"calls {what}", "sends")
        assert self._n_next is not None
        return self._n_next

    def _refuse(self, does: str, parameter: str) -> None:
        stage = self._stage
        if stage.decides and parameter == "sends":
            why = "and decides what comes next: it cannot send to what is not known yet."
        else:
            where = "until() or branch()" if stage.decides else "stage()"
            why = (
                "and was described as a stage that does not. Its own text does not name that "
                f"method: pass {parameter}=True to {where}."
            )
        raise errors.ProgramError(f"{stage.line}: Stage {stage.name} {does}, {why}")


def results_of(stage: StageInfo, returned: Any, writes: Sequence[int]) -> dict[int, Any]:
    """What a function's answer says of the partitions that it writes.

    Args:
        stage: Of the function.
        returned: None: it has changed them in place.
        writes: The datasets that it writes, in the order in which it was given them.

    Returns:
        Dataset -> its new partition.

    Raises:
        ProgramError: It returns something, and not one thing for each.
    """
    if returned is None:
        return {}
    if len(writes) == 1:
        return {writes[0]: returned}
    if not writes:
        raise errors.ProgramError(
            f"{stage.line}: Stage {stage.name} returns {type(returned).__name__}, and writes no "
            "dataset that it could become. Name that dataset in writes, or return nothing."
        )
    if not isinstance(returned, tuple) or len(returned) != len(writes):
        n = f" of {len(returned)}" if isinstance(returned, tuple) else ""
        raise errors.ProgramError(
            f"{stage.line}: Stage {stage.name} writes {len(writes)} datasets and returns "
            f"{type(returned).__name__}{n}: return a tuple with a partition for each, or nothing "
            "where all were changed in place."
        )
    return dict(zip(writes, returned, strict=True))
