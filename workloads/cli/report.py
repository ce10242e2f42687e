"""What a run looks like to a person: a table, and a picture of what each node touched.

Pure: plain numbers and arrays in, text and a PNG out.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from rich.console import Console
from rich.table import Table
from rich.text import Text

__all__ = [
    "BLOCK_BYTES",
    "NodeReport",
    "RunReport",
    "Section",
    "draw_touched",
    "human_bytes",
    "print_report",
]

BLOCK_BYTES = 4096
Counts = npt.NDArray[np.uint32]


@dataclasses.dataclass(frozen=True)
class Section:
    """A named part of the variable."""

    name: str
    offset_bytes: int
    length_bytes: int


@dataclasses.dataclass(frozen=True)
class NodeReport:
    """One node's share of the run.

    Attributes:
        bytes_received: all bytes on the wire to this node's page server, headers included.
        touched: blocks that tasks touched, by equal parts of the variable.
        fetched: blocks that crossed the network to this node, likewise.
    """

    name: str
    is_home: bool
    tasks: int
    blocks_fetched: int
    bytes_received: int
    touched: Counts
    fetched: Counts


@dataclasses.dataclass(frozen=True)
class RunReport:
    """A whole run."""

    variable_bytes: int
    sections: tuple[Section, ...]
    nodes: tuple[NodeReport, ...]
    queries: int
    places: int
    k: int
    seconds: tuple[tuple[str, float], ...]  # (stage, duration)

    @property
    def moved_bytes(self) -> int:
        """What crossed the network."""
        return sum(node.bytes_received for node in self.nodes)

    @property
    def whole_object_bytes(self) -> int:
        """What moving the whole object to every node but its home would have taken."""
        return self.variable_bytes * sum(not node.is_home for node in self.nodes)


def human_bytes(n: float) -> str:
    """1536 -> '1.5 KiB'."""
    for unit in ("B", "KiB", "MiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.2f} GiB"


def _percent(part: float, whole: float) -> str:
    if not whole:
        return "-"
    share = 100.0 * part / whole
    return f"{share:.2f}%" if share < 10 else f"{share:.1f}%"


def print_report(console: Console, report: RunReport) -> None:
    """Prints the closing tables."""
    nodes = Table(title="What crossed the network", title_justify="left", expand=False)
    nodes.add_column("node")
    for heading in ("tasks", "blocks fetched", "bytes fetched", "of the variable"):
        nodes.add_column(heading, justify="right")
    for node in report.nodes:
        name = Text(node.name)
        if node.is_home:
            name.append(" (home)", style="dim")
        nodes.add_row(
            name,
            f"{node.tasks:,}",
            f"{node.blocks_fetched:,}",
            human_bytes(node.bytes_received),
            _percent(node.blocks_fetched * BLOCK_BYTES, report.variable_bytes),
        )
    nodes.add_section()
    nodes.add_row(
        Text("all", style="bold"),
        f"{sum(node.tasks for node in report.nodes):,}",
        f"{sum(node.blocks_fetched for node in report.nodes):,}",
        Text(human_bytes(report.moved_bytes), style="bold"),
        "",
    )
    console.print(nodes)

    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    facts.add_row("the variable", f"{human_bytes(report.variable_bytes)}, {report.places:,} places")
    others = sum(not node.is_home for node in report.nodes)
    facts.add_row(
        "whole-object transfer",
        f"would have moved {human_bytes(report.whole_object_bytes)} "
        f"({human_bytes(report.variable_bytes)} to {others} node{'s' * (others != 1)})",
    )
    facts.add_row("moved instead", _ratio(report))
    facts.add_row(
        "time", ", ".join(f"{stage} {duration:.2f} s" for stage, duration in report.seconds)
    )
    query_seconds = dict(report.seconds).get("query", 0.0)
    if query_seconds:
        facts.add_row("queries", f"{report.queries:,} ({report.queries / query_seconds:,.0f}/s)")
    console.print(facts)


def _ratio(report: RunReport) -> str:
    moved, whole = report.moved_bytes, report.whole_object_bytes
    text = human_bytes(moved)
    if not whole:
        return f"{text} (one node: nothing has to move)"
    text += f", {_percent(moved, whole)} of that"
    return f"{text}: [bold]{whole / moved:,.0f} times less[/bold]" if moved else text


# ------------------------------------------------------------------ picture

_PAPER, _INK, _FAINT, _GRID = "#ffffff", "#1f2933", "#7b8794", "#cbd2d9"
_TRACK = "#f0f2f5"
_FETCHED, _TOUCHED = "#f2a65a", "#1d5fa8"
_PANEL_PIXELS = 1400  # columns that a panel's histogram is reduced to


def draw_touched(report: RunReport, path: str | os.PathLike[str]) -> None:
    """Writes a PNG: one strip per node, offset in the variable from left to right.

    The metadata dwarfs everything else, so the sections are drawn in panels of their own scale:
    every section below a twentieth of the variable shares the left one.
    """
    panels = _panels(report)
    n_nodes = len(report.nodes)
    height = 2.15 + 0.62 * n_nodes
    figure = Figure(figsize=(12.5, height), dpi=160, facecolor=_PAPER)
    FigureCanvasAgg(figure)
    widths = [1.0 if index < len(panels) - 1 else 2.0 for index in range(len(panels))]
    left = 0.035 + 0.0075 * max(len(_label(node)) for node in report.nodes)
    grid = figure.add_gridspec(
        1,
        len(panels),
        width_ratios=widths,
        left=left,
        right=0.985,
        bottom=0.62 / height,
        top=1.0 - 1.12 / height,
        wspace=0.04,
    )
    for index, sections in enumerate(panels):
        axes = figure.add_subplot(grid[0, index])
        _draw_panel(axes, report, sections)
        if index == 0:
            axes.set_yticks(range(n_nodes), [_label(node) for node in report.nodes])
            axes.tick_params(axis="y", length=0, labelsize=10, colors=_INK, pad=8)
        else:
            axes.set_yticks([])
    moved, whole = report.moved_bytes, report.whole_object_bytes
    title = f"{human_bytes(moved)} crossed the network for {report.queries:,} queries"
    if whole:
        title += f"; whole-object transfer would have moved {human_bytes(whole)}"
    figure.text(
        0.015, 1.0 - 0.22 / height, title, fontsize=13.5, weight="bold", color=_INK, va="top"
    )
    figure.text(
        0.015,
        1.0 - 0.52 / height,
        f"Which parts of the variable ({report.places:,} places, "
        f"{human_bytes(report.variable_bytes)}) each node touched",
        fontsize=10.5,
        color=_FAINT,
        va="top",
    )
    figure.legend(
        handles=[
            Patch(color=_TOUCHED, label="touched by tasks"),
            Patch(color=_FETCHED, label="fetched over the network"),
            Patch(facecolor=_TRACK, edgecolor=_GRID, linewidth=0.6, label="neither"),
        ],
        loc="lower right",
        bbox_to_anchor=(0.985, 0.0),
        ncols=3,
        frameon=False,
        fontsize=9,
        labelcolor=_INK,
        handlelength=1.1,
        columnspacing=1.6,
    )
    figure.text(
        left,
        0.1 / height,
        "offset in the variable; each panel has its own scale",
        fontsize=9,
        color=_FAINT,
        va="bottom",
    )
    figure.savefig(Path(path), format="png", facecolor=_PAPER)


def _label(node: NodeReport) -> str:
    return f"{node.name} (home)" if node.is_home else node.name


def _panels(report: RunReport) -> list[list[Section]]:
    """Neighbouring sections that share a panel: the small ones together, a large one alone."""
    small_bytes = report.variable_bytes / 20
    panels: list[list[Section]] = []
    for section in report.sections:
        is_small = section.length_bytes < small_bytes
        if panels and is_small and panels[-1][-1].length_bytes < small_bytes:
            panels[-1].append(section)
        else:
            panels.append([section])
    return panels


def _coverage(counts: Counts, variable_bytes: int, begin: int, end: int) -> npt.NDArray[np.float64]:
    """Share of touched blocks in equal parts of [begin, end), from counts over the variable."""
    bucket_bytes = variable_bytes / max(len(counts), 1)
    n = int(np.clip(np.ceil((end - begin) / bucket_bytes), 1, _PANEL_PIXELS))
    edges = np.linspace(begin, end, n + 1)
    covered = np.concatenate([[0.0], np.cumsum(counts, dtype=np.float64)]) * BLOCK_BYTES
    at = np.interp(edges, np.arange(len(covered)) * bucket_bytes, covered)
    share: npt.NDArray[np.float64] = np.clip(np.diff(at) / np.diff(edges), 0.0, 1.0)
    return share


def _draw_panel(axes: Axes, report: RunReport, sections: Sequence[Section]) -> None:
    begin = sections[0].offset_bytes
    end = sections[-1].offset_bytes + sections[-1].length_bytes
    scale, unit = (2**30, "GiB") if end - begin >= 2**30 else (2**20, "MiB")
    # Two lanes a node: what its tasks touched, and below it, thin, what came over the network.
    lanes = (("touched", _TOUCHED, -0.36, 0.16), ("fetched", _FETCHED, 0.20, 0.36))
    for row, node in enumerate(report.nodes):
        for attribute, colour, top, bottom in lanes:
            counts: Counts = getattr(node, attribute)
            share = _coverage(counts, report.variable_bytes, begin, end)
            axes.add_patch(
                Rectangle(
                    (begin / scale, row + top),
                    (end - begin) / scale,
                    bottom - top,
                    facecolor=_TRACK,
                    zorder=1,
                )
            )
            # A part that was touched a little must still be seen: the square root lifts it, and
            # opacity has a floor.
            image = np.empty((1, len(share), 4))
            image[..., :3] = to_rgb(colour)
            image[0, :, 3] = np.where(share > 0, 0.25 + 0.75 * np.sqrt(share), 0.0)
            axes.imshow(
                image,
                extent=(begin / scale, end / scale, row + bottom, row + top),
                aspect="auto",
                interpolation="nearest",
                zorder=2,
            )
    for section in sections[1:]:
        axes.axvline(section.offset_bytes / scale, color=_FAINT, linewidth=0.7, zorder=4)
    _label_sections(axes, sections, begin, end, scale)
    axes.set_xlim(begin / scale, end / scale)
    axes.set_ylim(len(report.nodes) - 0.5, -0.5)
    axes.set_facecolor(_PAPER)
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.tick_params(axis="x", colors=_FAINT, labelsize=8.5, length=3)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10], prune="both"))
    axes.xaxis.set_major_formatter(f"{{x:g}} {unit}")


def _label_sections(
    axes: Axes, sections: Sequence[Section], begin: int, end: int, scale: int
) -> None:
    """Names above the strips; those too narrow for their name join their neighbour's label."""
    groups: list[tuple[list[str], int, int]] = []
    for section in sections:
        stop = section.offset_bytes + section.length_bytes
        narrow = section.length_bytes < 0.2 * (end - begin)
        if groups and (narrow or groups[-1][2] - groups[-1][1] < 0.2 * (end - begin)):
            names, first, _ = groups[-1]
            groups[-1] = ([*names, section.name], first, stop)
        else:
            groups.append(([section.name], section.offset_bytes, stop))
    for names, first, stop in groups:
        axes.text(
            (first + stop) / 2 / scale,
            -0.56,
            f"{' | '.join(names)}  ({human_bytes(stop - first)})",
            ha="center",
            va="bottom",
            fontsize=9.5,
            color=_INK,
        )
