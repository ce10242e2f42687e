"""What programs print and draw of their results, each in the same way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from rich import box
from rich.console import Console
from rich.table import Table

from .observe import Cost
from .report import BLOCK_BYTES, human_bytes

__all__ = [
    "TRAFFIC", "WHAT_SERVERS_DID", "Loss", "agreement", "draw_curve", "print_rows", "traffic",
]  # fmt: skip

WHAT_SERVERS_DID: Final = "and what the page servers of all nodes did in them"
TRAFFIC: Final = ("faults", "received", "evicted", "fetched\nagain")


class Loss(Protocol):
    """An iteration, from 1, and what it makes small."""

    @property
    def number(self) -> int: ...
    @property
    def loss(self) -> float: ...


def print_rows(
    console: Console,
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    title: str | None = None,
    names: bool = False,
) -> None:
    """A table of numbers.

    Args:
        title: above it.
        names: whether the first column are words, and not numbers.
    """
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
        padding=(0, 2, 0, 0),
    )  # fmt: skip
    for at, heading in enumerate(headings):
        table.add_column(heading, justify="left" if names and not at else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    console.print(table)


def agreement(what: str, error: float | None) -> str:
    """A sentence, to be put behind another one, of a check that found no difference.

    Args:
        error: the largest difference; None where nothing was checked.
    """
    if error is None:
        return ""
    return f" All {what} equal those of one process (largest difference {error:.0e})."


def draw_curve(lines: Sequence[Loss], title: str, loss: str, out: Path) -> None:
    """The loss by iterations, as a PNG."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(
        [line.number for line in lines], [line.loss for line in lines], color="#2a6f97", marker="o",
        markersize=3, linewidth=1.5,
    )  # fmt: skip
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xlabel("iteration")
    axes.set_ylabel(loss)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(out, format="png", dpi=150)


def traffic(cost: Cost) -> tuple[str, ...]:
    """Cells for the headings of TRAFFIC."""
    return (
        f"{cost.faults:,}",
        human_bytes(cost.bytes_received),
        human_bytes(cost.evicted_blocks * BLOCK_BYTES),
        human_bytes(cost.refetched_blocks * BLOCK_BYTES),
    )
