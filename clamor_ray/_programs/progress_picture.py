"""Draws how far a program came, and when: rounds, rate, cores of nodes, seconds of partitions."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any, Final

from clamor_ray._observe import picture

ID_DIGITS: Final = 8
MOST_NAMED: Final = 8  # nodes in the legend; with more, colours say nothing
LEAST_S: Final = 1e-3
COLOURS: Final = (
    "#5b6fb5", "#e8a33d", "#3f8f6b", "#b5485d", "#7a5ba6", "#4aa3b8", "#9a7b4f", "#6b7683",
)  # fmt: skip


def draw_progress(progress: Any, path: str | os.PathLike[str], call: str) -> None:
    """
    Args:
        progress: a `ProgramProgress`.
        path: its ending is the format (.png, .svg, .pdf).
        call: that needs it, for the error.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib knows no such format.
        OSError: The file cannot be written.
    """
    figure = picture.new_figure(10, 8, call)
    rounds, rate, cores, parts = figure.subplots(4, 1)
    nodes = [node.node_id for node in progress.nodes]
    colours = dict(zip(nodes, itertools.cycle(COLOURS), strict=False))
    has_loops = bool(progress.loops)
    total = progress.rounds if has_loops else progress.tasks
    unit = "rounds" if has_loops else "tasks"
    times = [sample.at_s for sample in progress.samples]
    rounds.plot(
        times,
        [sample.rounds if has_loops else sample.tasks for sample in progress.samples],
        color=picture.INK,
    )
    rounds.set_ylabel(unit)
    rounds.set_title(
        f"program, {progress.state}: {total:,} {unit} in {progress.elapsed_s:.1f} s", loc="left",
        fontsize=11, color=picture.INK,
    )  # fmt: skip
    _steps(rate, times, [sample.tasks for sample in progress.samples], color=picture.INK)
    rate.set_ylabel("tasks/s")
    for node in nodes:
        busy_s = [sample.busy_s.get(node, 0.0) for sample in progress.samples]
        _steps(cores, times, busy_s, color=colours[node], label=node[:ID_DIGITS])
    cores.set_ylabel("cores\nby node")
    cores.set_xlabel("seconds", fontsize=9, color=picture.INK)
    if cores.get_legend_handles_labels()[0] and len(nodes) <= MOST_NAMED:
        cores.legend(fontsize=7, frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
    _draw_partitions(parts, progress.groups, colours)
    for axes in (rounds, rate, cores):
        axes.set_xlim(0, max(LEAST_S, progress.elapsed_s, *times))
    for axes in (rounds, rate, cores, parts):
        axes.set_ylim(bottom=0)
        axes.tick_params(labelsize=7, colors=picture.INK)
        axes.yaxis.label.set_size(9)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    picture.save(figure, path)


def _steps(axes: Any, times: Sequence[float], grown: Sequence[float], **style: Any) -> None:
    """By how much a counter grew in each second, between samples."""
    pairs = [
        (a, b, max(0.0, later - before) / (b - a))
        for (a, b), (before, later) in zip(
            itertools.pairwise(times), itertools.pairwise(grown), strict=True
        )
        if b > a
    ]
    if pairs:
        edges = [pairs[0][0], *(b for _, b, _ in pairs)]
        axes.stairs([height for _, _, height in pairs], edges, baseline=None, **style)


def _draw_partitions(axes: Any, groups: Sequence[Any], colours: dict[str, str]) -> None:
    """Of the datasets with which most was computed, among those with many partitions."""
    from matplotlib.ticker import MaxNLocator

    group = max(groups, key=lambda each: (len(each.busy_s) > 1, sum(each.busy_s)))
    axes.bar(
        range(len(group.busy_s)),
        group.busy_s,
        width=1.0 if len(group.busy_s) > 100 else 0.8,
        color=[colours.get(node, picture.FAINT) for node in group.node_ids],
    )
    axes.axhline(sum(group.busy_s) / len(group.busy_s), color=picture.FAINT, linewidth=0.8)
    axes.set_ylabel("seconds by\npartition")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(
        f"partition of {', '.join(group.datasets)}; busiest {group.skew:.2f} of the mean",
        fontsize=9, color=picture.INK,
    )  # fmt: skip
