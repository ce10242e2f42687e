"""What programs that learn have in common: aggregates, the loop and its table.

In an iteration a task for each partition goes over its items at the newest version of the model, a
global variable, and makes one long array; all of them are added up, and the driver changes the
model in place. How they are added up is a choice: `split` in segments by all nodes at once
(`DataCollection.split_aggregate`), `tree` as whole arrays in a tree of tasks whose last ones
arrive at the driver (`tree_aggregate`).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal

import click
import numpy as np
from rich.console import Console

import clamor_ray as clamor

from ..data.rows import Float64
from . import options
from .learning_tasks import add, segment
from .results import print_rows

__all__ = [
    "How",
    "Iteration",
    "Model",
    "Received",
    "add_up",
    "learning_options",
    "print_iterations",
    "segment",
    "spread",
]

How = Literal["split", "tree"]

PARALLELISM: Final = 4  # of the ring


@dataclasses.dataclass(frozen=True)
class Iteration:
    """One line of the result.

    Args:
        number: from 1.
        aggregates: that it took: more than one where a line was searched.
        tasks_s: of tasks and of adding up.
        update_s: of commits.
        loss: what is made small.
        moved: how far the model did.
    """

    number: int
    aggregates: int
    tasks_s: float
    update_s: float
    loss: float
    moved: float


# ---------------------------------------------------------------- aggregates


def add_up(items: Any, seq_op: Callable[[Any, Any], Float64], how: How) -> Float64:
    """The sum of the arrays that partitions are folded into.

    Args:
        items: a collection with at least one item in each partition.
        seq_op: (array so far, or None; item) -> array.
        how: see the top of this file.

    Returns:
        An array that may be changed.
    """
    if how == "split":
        total = items.split_aggregate(
            None, seq_op, segment, np.add, np.concatenate, parallelism=PARALLELISM
        )
    else:
        total = items.tree_aggregate(None, seq_op, add)
    found = np.asarray(total)
    return found if found.flags.writeable else found.copy()


class Model:
    """A global variable that every iteration reads and changes, and what that took.

    Args:
        shape: of float64.
    """

    def __init__(self, shape: int | tuple[int, ...]) -> None:
        self.variable: clamor.GlobalRef[Float64] = clamor.zeros(shape, np.float64)
        self.aggregates = 0
        self.tasks_s = 0.0
        self.update_s = 0.0
        self._begun = (0, 0.0, 0.0)

    def set(self, values: Float64) -> None:
        """The next version."""
        start = time.perf_counter()
        with clamor.update(self.variable) as shared:
            shared[...] = values
        self.update_s += time.perf_counter() - start

    def add_up(self, items: Any, seq_op: Callable[[Any, Any], Float64], how: How) -> Float64:
        """`add_up`, timed."""
        start = time.perf_counter()
        total = add_up(items, seq_op, how)
        self.tasks_s += time.perf_counter() - start
        self.aggregates += 1
        return total

    def line(self, number: int, loss: float, moved: float) -> Iteration:
        """What was done since the line before it."""
        before, self._begun = self._begun, (self.aggregates, self.tasks_s, self.update_s)
        n, tasks_s, update_s = (a - b for a, b in zip(self._begun, before, strict=True))
        return Iteration(number, int(n), tasks_s, update_s, loss, moved)

    def free(self) -> None:
        """The variable and all its versions."""
        clamor.free(self.variable)


class Received:
    """Bytes that page servers have received since this was made, of nodes that answer."""

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> dict[str, int]:
        nodes = clamor.stats().nodes
        return {node.node_id: node.engine.bytes_received for node in nodes if not node.error}

    def bytes(self) -> int:
        """So far. What a node that has died had received is not known."""
        return sum(n - self._before.get(node_id, 0) for node_id, n in self._now().items())


def spread(items: Any, n_partitions: int) -> Any:
    """In so many partitions where there are fewer, each with an item at least."""
    if items.num_partitions >= n_partitions:
        return items
    n_items = items.cache().count()
    return (
        items.repartition(min(n_partitions, n_items)) if n_items > items.num_partitions else items
    )


# ---------------------------------------------------------------- for people


def print_iterations(console: Console, lines: Sequence[Iteration], loss: str) -> None:
    """The table of a run: a line per iteration."""
    rows = (
        (
            str(line.number),
            f"{line.loss:.6f}",
            f"{line.moved:.2e}",
            str(line.aggregates),
            f"{line.tasks_s:.3f}",
            f"{line.update_s * 1e3:.1f}",
        )
        for line in lines
    )
    headings = ("iteration", loss, "moved", "aggregates", "tasks\ns", "update\nms")
    print_rows(console, headings, rows, title="Iterations")


learning_options = options.together(
    click.option(
        "--aggregate",
        "how",
        type=click.Choice(["split", "tree"]),
        default="split",
        show_default=True,
        help="Add up in segments by all nodes, or as whole arrays in a tree of tasks.",
    ),
    options.partitions(),
    options.seed("Of all that is drawn."),
    options.new_file("--picture", "PNG to write, of the loss by iterations."),
    options.check(),
)
