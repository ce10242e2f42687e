"""Runs a program in one process, one task after the other: the right answer, slowly.

Tests compare every other way to run a program with this one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

from clamor_ray import errors
from clamor_ray._recipes.program.sequence import Sequence as Order
from clamor_ray._recipes.program.tables import StageInfo, Tables
from clamor_ray._recipes.program.task import Task, results_of


def decision_of(stage: StageInfo, returned: Any) -> bool:
    """
    Raises:
        ProgramError: It is no bool.
    """
    if not isinstance(returned, bool) and type(returned).__name__ not in ("bool", "bool_"):
        raise errors.ProgramError(
            f"{stage.line}: Stage {stage.name} decides what comes next, and returns {returned!r} "
            "instead of a bool."
        )
    return bool(returned)


def run_plainly(
    tables: Tables, functions: Sequence[Callable[..., Any]], partitions: Sequence[Sequence[Any]]
) -> list[list[Any]]:
    """
    Args:
        tables: The program.
        functions: Of its stages.
        partitions: Of each dataset, as they are at first.

    Returns:
        Those of each dataset at the end.

    Raises:
        ProgramError: A function returns what it must not.
        Exception: Any of a function's.
    """
    # One by one: what is the same object at first must not stay so.
    state = [[copy.deepcopy(value) for value in each] for each in partitions]
    order = Order(tables)
    inbox: dict[int, list[Any]] = {}
    at = order.extend(1)
    while at:
        number, stage = at[0].number, tables.stages[at[0].stage]
        ahead = order.extend(1)  # a decision has no next one yet, and sends nothing
        n_next = tables.stages[ahead[0].stage].n_tasks if ahead else None
        outbox: dict[int, list[Any]] = {}
        answer: bool | None = None
        for index in range(stage.n_tasks):
            sent: list[tuple[int, Any]] = []
            received = inbox.get(index, [])
            task = Task(
                stage,
                index,
                number,
                n_next,
                lambda received=received: list(received),  # type: ignore[misc]
                lambda to, message, sent=sent: sent.append((to, message)),  # type: ignore[misc]
            )
            values = [state[access.dataset][index] for access in stage.accesses]
            returned = functions[at[0].stage](task, *values)
            if stage.decides:
                answer = decision_of(stage, returned)
            else:
                writes = [access.dataset for access in stage.accesses if access.is_write]
                for dataset, value in results_of(stage, returned, writes).items():
                    state[dataset][index] = copy.deepcopy(value)
            for to, message in sent:
                outbox.setdefault(to, []).append(copy.deepcopy(message))
        inbox = outbox
        if answer is not None:
            order.decide(number, answer)
            ahead = order.extend(1)
        at = ahead
    return state
