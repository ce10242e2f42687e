"""How far a program is, and how even its work is: numbers, a line, a table. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

ID_DIGITS: Final = 12  # of a node's id, for people
NAME_WIDTH: Final = 30
MOST_LINES: Final = 40


@dataclass(frozen=True)
class LoopProgress:
    """One loop of a program.

    Args:
        name: Its first and its last stage.
        depth: Loops around it.
        rounds: That have ended on all nodes, of all times that the loop was entered.
        most: Rounds each time that it is entered; None: as many as its ``until`` says.
        may_end_before: It has an ``until``.
    """

    name: str
    depth: int
    rounds: int
    most: int | None
    may_end_before: bool


@dataclass(frozen=True)
class NodeProgress:
    """One node.

    Args:
        node_id: Ray's hex id.
        n_slices: Partition indices that it has, or gets; datasets that are accessed together count
            once.
        busy_s: That its tasks have computed, added up.
        cores: That its tasks have used lately: seconds of computing for each second.
    """

    node_id: str
    n_slices: int
    busy_s: float
    cores: float


@dataclass(frozen=True)
class GroupProgress:
    """Datasets that are accessed together.

    Args:
        datasets: Their names.
        busy_s: For each partition index: how long tasks have computed with it.
        node_ids: For each: Ray's hex id of its node.
    """

    datasets: tuple[str, ...]
    busy_s: tuple[float, ...]
    node_ids: tuple[str, ...]

    @property
    def busiest(self) -> int:
        """The index with which most was computed."""
        return max(range(len(self.busy_s)), key=lambda index: self.busy_s[index])

    @property
    def skew(self) -> float:
        """The seconds of the busiest index / the mean of all; 1 where nothing has run."""
        return skew_of(self.busy_s)


@dataclass(frozen=True)
class ProgressSample:
    """What was so at a time.

    Args:
        at_s: Since the program began.
        rounds: Of its outermost loops, that had ended.
        tasks: Of stages that had ended on all nodes.
        busy_s: By node: how long its tasks had computed.
    """

    at_s: float
    rounds: int
    tasks: int
    busy_s: Mapping[str, float]


@dataclass(frozen=True)
class ProgramProgress:
    """How far a program is. As text it is a table. See `Job.progress`.

    Args:
        state: ``starting``, ``running``, ``ended`` or ``failed``.
        elapsed_s: Since it began; of one that has ended: how long it ran.
        loops: In the order of the text.
        tasks: Of stages that have ended on all nodes.
        rounds_per_s, tasks_per_s: Lately; of a program that has ended: of all its time.
        nodes: That have partitions, or had some.
        groups: Of datasets.
        samples: From the beginning on, one a second or fewer.
    """

    state: str
    elapsed_s: float
    loops: tuple[LoopProgress, ...]
    tasks: int
    rounds_per_s: float
    tasks_per_s: float
    nodes: tuple[NodeProgress, ...]
    groups: tuple[GroupProgress, ...]
    samples: tuple[ProgressSample, ...]

    @property
    def rounds(self) -> int:
        """Of the outermost loops, that have ended on all nodes."""
        return sum(loop.rounds for loop in self.loops if not loop.depth)

    @property
    def most_rounds(self) -> int | None:
        """Of the outermost loops; None: there is no loop, or one that only its ``until`` ends."""
        most = [loop.most for loop in self.loops if not loop.depth]
        known = [each for each in most if each is not None]
        return sum(known) if known and len(known) == len(most) else None

    @property
    def node_skew(self) -> float:
        """The cores that the busiest node uses lately / the mean of all nodes; of a program that
        has ended: by the seconds of all its time."""
        if self.state == "running":
            return skew_of([node.cores for node in self.nodes])
        return skew_of([node.busy_s for node in self.nodes])

    @property
    def partition_skew(self) -> float:
        """Of the datasets with which most is computed, among those with many partitions."""
        many = [group for group in self.groups if len(group.busy_s) > 1]
        return max(many, key=lambda group: sum(group.busy_s)).skew if many else 1.0

    @property
    def rate(self) -> str:
        """Tasks a second, for people."""
        return f"{_rate(self.tasks_per_s)} tasks/s"

    @property
    def skew(self) -> str:
        """How even the work is, for people; empty: there is nothing to compare."""
        said = [f"node {self.node_skew:.2f}"] if len(self.nodes) > 1 else []
        if any(len(group.busy_s) > 1 for group in self.groups):
            said.append(f"partition {self.partition_skew:.2f}")
        return f"busiest {', '.join(said)} of mean" if said else ""

    def __str__(self) -> str:
        head = f"{self.state}, {self.elapsed_s:.1f} s: {self.tasks:,} tasks, "
        lines = [head + f"{_rate(self.tasks_per_s)} a second"]
        if self.loops:
            lines.append(f"{self.rounds:,} rounds, {_rate(self.rounds_per_s)} a second")
            rows = [
                (
                    _cut("  " * loop.depth + loop.name),
                    f"{loop.rounds:,}",
                    "no bound" if loop.most is None else f"{loop.most:,}",
                )
                for loop in self.loops
            ]
            lines += ["", *_table(("loop", "rounds", "at most"), rows)]
        lines += ["", *self._nodes(), "", *self._partitions()]
        return "\n".join(lines)

    def _nodes(self) -> Iterable[str]:
        mean = sum(node.busy_s for node in self.nodes) / max(1, len(self.nodes))
        rows = [
            (
                node.node_id[:ID_DIGITS],
                f"{node.n_slices:,}",
                f"{node.busy_s:.2f}",
                f"{node.busy_s / self.elapsed_s if self.elapsed_s else 0.0:.2f}",
                f"{node.busy_s / mean if mean else 1.0:.2f}",
            )
            for node in self.nodes
        ]
        return _table(("node", "partitions", "busy s", "cores", "of mean"), rows)

    def _partitions(self) -> Iterable[str]:
        rows = [
            (
                _cut(", ".join(group.datasets)),
                f"{len(group.busy_s):,}",
                f"{sum(group.busy_s):.2f}",
                f"{group.busiest:,}",
                f"{group.busy_s[group.busiest]:.2f}",
                f"{group.skew:.2f}",
            )
            for group in self.groups
        ]
        return _table(("partitions of", "n", "busy s", "busiest", "its s", "of mean"), rows)


def skew_of(seconds: Sequence[float]) -> float:
    """The largest / the mean; 1 where all are 0."""
    total = sum(seconds)
    return max(seconds) * len(seconds) / total if total > 0.0 else 1.0


def _rate(per_s: float) -> str:
    return f"{per_s:,.0f}" if per_s >= 100.0 else f"{per_s:.3g}"


def _cut(text: str) -> str:
    return text if len(text) <= NAME_WIDTH else f"{text[: NAME_WIDTH - 1]}…"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Names on the left, numbers on the right."""
    shown = [heads, *rows[:MOST_LINES]]
    widths = [max(len(row[at]) for row in shown) for at in range(len(heads))]
    lines = [
        "  ".join(
            [f"{row[0]:<{widths[0]}}"]
            + [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        )
        for row in shown
    ]
    if len(rows) > MOST_LINES:
        lines.append(f"... and {len(rows) - MOST_LINES:,} more")
    return lines
