"""A stage as it is shown: `shown.py` makes it of a plan, `show.py` and `dot.py` use it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

Variable = tuple[str, int, int | None]


@dataclass(frozen=True)
class ShownStage:
    """One stage as it is shown, or a collection that waits for its action.

    Args:
        name: "0"; no two of one graph have the same.
        operators: that are fused into its tasks, in order: "map_batches(lookup)".
        n_partitions: one task each.
        inputs: names of the stages whose partitions it takes; a name that no stage has is a
            source, and says itself what it is ("part-*.parquet (24 files)").
        variables: (name, version, how many of its blocks were read or None) of each global
            variable that its functions read. One that is read at two versions is there twice.
        kept: how many of its partitions are in the object store; True: all.
        attempts: how many tasks were started for it so far.
        dirty: how many kept partitions read a block that has changed since.
        lost: how many partitions were kept and are gone with their node.
        wide: every task takes a part of every input partition.
        placement: where its tasks go: "where their blocks are cached".
        rows: how many items it has; None: not known yet.
        notes: more to say, one line each.
    """

    name: str
    operators: tuple[str, ...]
    n_partitions: int
    inputs: tuple[str, ...] = ()
    variables: tuple[Variable, ...] = ()
    kept: int | bool = 0
    attempts: int = 0
    dirty: int = 0
    lost: int = 0
    wide: bool = False
    placement: str = ""
    rows: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def states(self) -> States:
        """How many partitions are in which state; each is in one."""
        kept = self.n_partitions if self.kept is True else int(self.kept)
        lost = min(self.lost, self.n_partitions)
        dirty = min(self.dirty, self.n_partitions - lost)
        clean = min(max(0, kept - dirty), self.n_partitions - lost - dirty)
        return States(clean, dirty, lost, self.n_partitions - lost - dirty - clean)


class States(NamedTuple):
    """Partitions of a stage.

    Args:
        kept: in the object store, and up to date.
        dirty: kept, but something that they read has changed.
        lost: were kept, and are gone.
        absent: not computed, or not kept.
    """

    kept: int
    dirty: int
    lost: int
    absent: int


def check(stages: Sequence[ShownStage]) -> None:
    """Raises ValueError where two stages have one name, or one comes before its input."""
    names = [stage.name for stage in stages]
    seen: set[str] = set()
    for stage in stages:
        if stage.name in seen:
            raise ValueError(f"two stages are called {stage.name!r}")
        late = [name for name in stage.inputs if name not in seen and name in names]
        if late:
            raise ValueError(f"stage {stage.name!r} comes before its input {late[0]!r}")
        seen.add(stage.name)


def count(number: int, what: str) -> str:
    """A number of something, for people."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
