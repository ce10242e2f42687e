"""Datasets of a program, and checks of where they are described and named. Pure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from clamor_ray._recipes.program.functions import name_of, takes
from clamor_ray._recipes.program.statements import refuse


@dataclass(frozen=True, eq=False)
class Dataset:
    """What a program calls a dataset: its partitions are on the workers.

    Args:
        number: In the program's order.
        name: For people.
        n_partitions: How many it has.
        line: Where it is described.
        source: What the partitions are at first: a sequence of them, or what gives them later.
        is_value: It was described as a value.
    """

    number: int
    name: str
    n_partitions: int
    line: str
    source: Any = field(repr=False)
    is_value: bool = False


def n_partitions_of(source: Any, n: int | None, line: str) -> int:
    """How many partitions a dataset has.

    Args:
        source: See `Builder.dataset`.
        n: What the user says; None: nothing.
        line: Of the user's program.

    Raises:
        ProgramError: None, or nobody knows, or source and user differ.
    """
    if isinstance(source, (Mapping, set, frozenset, str, bytes)):
        refuse(
            line,
            f"A dataset is a sequence of partitions, and a {type(source).__name__} is none: pass a "
            "list with one item for each partition.",
        )
    said = getattr(source, "num_partitions", None)
    if said is None and hasattr(source, "__len__"):
        said = len(source)
    if said is None and n is None:
        refuse(line, "Nobody says how many partitions the dataset has: pass n.")
    found = int(said or 0) if n is None else whole_number(n, "n", line)
    if said is not None and said != found:
        refuse(line, f"n is {n}, and the source has {said} partitions: leave n out.")
    if found < 1:
        refuse(line, "A dataset has at least one partition.")
    return found


def checked(
    function: Callable[..., Any],
    reads: Sequence[Dataset],
    writes: Sequence[Dataset],
    name: str | None,
    datasets: Sequence[Dataset],
    line: str,
) -> dict[str, Any]:
    """What stages and decisions have alike.

    Args:
        function, reads, writes, name: See `Builder.stage`.
        datasets: Of the program.
        line: Of the user's program.

    Raises:
        ProgramError: See `Builder.stage`.
    """
    if not callable(function):
        refuse(line, f"A stage is a function, and {function!r} cannot be called.")
    name = name or name_of(function)
    read = _numbers(reads, "reads", datasets, line)
    written = _numbers(writes, "writes", datasets, line)
    accessed = [datasets[number] for number in read + written]
    if not accessed:
        refuse(
            line,
            f"Stage {name} accesses no dataset. It runs once for each partition of those that it "
            "names in reads and writes: name one.",
        )
    for n, dataset in enumerate(accessed):
        if dataset in accessed[:n]:
            refuse(
                line,
                f"Stage {name} names {dataset.name} twice, and its function gets it once. What is "
                "in writes is read as well.",
            )
    if len({dataset.n_partitions for dataset in accessed}) > 1:
        said = ", ".join(f"{each.name} has {each.n_partitions} ({each.line})" for each in accessed)
        refuse(
            line,
            f"The datasets of stage {name} have different numbers of partitions: {said}. A task "
            "sees one index alone: what it needs of another dataset comes to it in messages.",
        )
    if not takes(function, 1 + len(accessed)):
        given = ", ".join(["t", *(each.name for each in accessed)])
        refuse(line, f"Stage {name} is called with ({given}), and takes other arguments.")
    return {"function": function, "name": name, "line": line, "reads": read, "writes": written}


def _numbers(
    named: Sequence[Dataset], what: str, datasets: Sequence[Dataset], line: str
) -> tuple[int, ...]:
    if isinstance(named, Dataset):
        refuse(line, f"{what} is a list of datasets: write {what}=[...].")
    for dataset in named:
        if not isinstance(dataset, Dataset):
            refuse(line, f"{what} has {dataset!r}, which is no dataset.")
        if dataset not in datasets:
            refuse(
                line,
                f"{what} has {dataset.name}, which is a dataset of another program "
                f"({dataset.line}).",
            )
    return tuple(dataset.number for dataset in named)


def whole_number(value: Any, what: str, line: str) -> int:
    """
    Raises:
        ProgramError: It is none.
    """
    try:
        return operator.index(value)
    except TypeError:
        refuse(line, f"{what} is {value!r}, and must be a whole number.")
