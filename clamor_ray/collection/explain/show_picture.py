"""The picture of a lineage: sources at the top, and from there down what was made of them.

A stage is a box with its operators and a bar of its partitions: kept, dirty, lost, or not kept. A
variable is a pill with its version, and a dashed line to the stages that read it. What passes
partition by partition is a line; what goes from all to all is a broad one.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from clamor_ray._read import picture
from clamor_ray.collection.explain.graph_layout import Layout, place
from clamor_ray.collection.explain.show import ShownStage, count

KEPT: Final = "#4c9a6a"
DIRTY: Final = "#e8a33d"
LOST: Final = "#c8453b"
ABSENT: Final = "#d5dce2"
VARIABLE: Final = "#5b6fb5"
BOX: Final = "#ffffff"
SOURCE: Final = "#eef1f4"

LETTER: Final = 0.088  # inches, of the text in boxes
LINE: Final = 0.2
TITLE_CHAR: Final = 0.118  # inches, about, of a character of the heading
GAP_X: Final = 0.45
GAP_Y: Final = 0.62
PAD: Final = 0.16
MOST_LETTERS: Final = 40
MOST_CELLS: Final = 48

Key = tuple[str, str]


def _cut(text: str) -> str:
    return text if len(text) <= MOST_LETTERS else text[: MOST_LETTERS - 1] + "…"


class _Graph:
    """What is drawn: boxes with their sizes, and lines."""

    def __init__(self, stages: Sequence[ShownStage]) -> None:
        self.stages = {("stage", stage.name): stage for stage in stages}
        self.texts: dict[Key, list[str]] = {}
        self.flows: dict[tuple[Key, Key], bool] = {}  # whether all to all
        self.uses: dict[tuple[Key, Key], str] = {}
        for key, stage in self.stages.items():
            for name in stage.inputs:
                tail = ("stage", name)
                if tail not in self.stages:
                    tail = ("source", name)
                    self.texts[tail] = [_cut(name)]
                self.flows[tail, key] = stage.wide
            for name, version, n_blocks in stage.variables:
                pill = ("variable", f"{name} v{version}")
                self.texts[pill] = [_cut(pill[1])]
                self.uses[pill, key] = "" if n_blocks is None else count(n_blocks, "block")
            self.texts[key] = [_head(stage), *(_cut(name) for name in stage.operators)]
        self.edges = [*self.flows, *self.uses]
        for edge, blocks in self.uses.items():
            pill = edge[0]
            if blocks and sum(pill == other for other, _ in self.uses) == 1:
                self.texts[pill].append(blocks)  # beside the line only where there are several
                self.uses[edge] = ""

    def size(self, key: Key) -> tuple[float, float]:
        """Width and height in inches."""
        texts = self.texts[key]
        width = LETTER * max(map(len, texts)) + 2 * PAD
        height = LINE * len(texts) + PAD
        if key in self.stages:
            return max(width, 1.7), height + LINE
        return max(width, 0.8), height


def _head(stage: ShownStage) -> str:
    rows = f", {stage.rows:,} rows" if stage.rows is not None else ""
    return f"stage {stage.name}{rows}"


def draw(stages: Sequence[ShownStage], path: str | os.PathLike[str], title: str) -> None:
    """See `show.draw`."""
    graph = _Graph(stages)
    sizes = {key: graph.size(key) for key in graph.texts}
    layout = place(list(graph.texts), graph.edges, {k: w + GAP_X for k, (w, _) in sizes.items()})
    n_layers = max(layout.layer.values(), default=-1) + 1
    heights = [
        max(sizes[key][1] for key in sizes if layout.layer[key] == at) for at in range(n_layers)
    ]
    tops = [sum(heights[:at]) + at * GAP_Y for at in range(n_layers)]
    rows = [(top, top + height) for top, height in zip(tops, heights, strict=True)]
    legend = _legend(graph)
    heading = f"lineage of {title}" if title else "lineage"
    least = max(0.3 + sum(width for *_, width in legend), 0.6 + TITLE_CHAR * len(heading))
    left = min((layout.x[k] - w / 2 for k, (w, _) in sizes.items()), default=0.0) - 0.3
    right = max((layout.x[k] + w / 2 for k, (w, _) in sizes.items()), default=0.0) + 0.3
    spare = max(0.0, least - (right - left)) / 2
    left, right = left - spare, right + spare
    bottom = (rows[-1][1] if rows else 0.5) + 0.2
    figure = picture.new_figure(right - left, bottom + 1.15, "lineage(picture=...)", arrange=False)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_axis_off()
    axes.set_xlim(left, right)
    axes.set_ylim(bottom + 0.5, -0.65)
    axes.text(
        left + 0.3,
        -0.38,
        heading,
        fontsize=13,
        weight="bold",
        color=picture.INK,
        va="center",
    )
    _draw_lines(axes, graph, layout, rows, sizes)
    for key in graph.texts:
        middle = sum(rows[layout.layer[key]]) / 2
        _draw_box(axes, graph, key, layout.x[key], middle, sizes[key])
    _draw_legend(axes, legend, left + 0.3, bottom + 0.2)
    picture.save(figure, path)


def _ports(
    graph: _Graph, layout: Layout, sizes: Mapping[Key, tuple[float, float]], end: int
) -> dict[tuple[Key, Key], float]:
    """Where lines leave (end 0) or reach (end 1) their boxes: side by side, in their order."""
    found = {}
    for key in graph.texts:
        lines = [edge for edge in graph.edges if edge[end] == key]
        lines.sort(key=lambda edge: layout.ways[edge][1 if end == 0 else -2][0])
        step = min(0.3, 0.7 * sizes[key][0] / max(1, len(lines)))
        for index, edge in enumerate(lines):
            found[edge] = layout.x[key] + (index - (len(lines) - 1) / 2) * step
    return found


def _draw_lines(
    axes: Any,
    graph: _Graph,
    layout: Layout,
    rows: Sequence[tuple[float, float]],
    sizes: Mapping[Key, tuple[float, float]],
) -> None:
    leaves, reaches = (_ports(graph, layout, sizes, end) for end in (0, 1))
    for edge in graph.edges:
        tail, head = edge
        # Straight through a row, and bent only between two: so no line runs into a box.
        first, *passed, last = layout.ways[edge]
        points = [
            (leaves[edge], sum(rows[first[1]]) / 2 + sizes[tail][1] / 2),
            (leaves[edge], rows[first[1]][1]),
            *((x, y) for x, at in passed for y in rows[at]),
            (reaches[edge], rows[last[1]][0]),
            (reaches[edge], sum(rows[last[1]]) / 2 - sizes[head][1] / 2),
        ]
        if edge in graph.uses:
            _draw_line(axes, points, color=VARIABLE, linewidth=1.1, linestyle=(0, (3, 2)))
            if graph.uses[edge]:
                (x0, y0), (x1, y1) = points[1:3]
                axes.text(
                    0.75 * x0 + 0.25 * x1,
                    0.65 * y0 + 0.35 * y1,
                    graph.uses[edge],
                    fontsize=6.5,
                    color=VARIABLE,
                    ha="center",
                    va="center",
                    zorder=4,
                    bbox={"facecolor": picture.PAPER, "edgecolor": "none", "pad": 0.6},
                )
        else:
            wide = graph.flows[edge]
            _draw_line(axes, points, color=picture.INK, linewidth=4.0 if wide else 1.3)
            if wide:  # hollow, as two lines side by side
                _draw_line(axes, points, color=picture.PAPER, linewidth=1.6, arrow=False)


def _draw_line(
    axes: Any, points: Sequence[tuple[float, float]], *, arrow: bool = True, **how: Any
) -> None:
    from matplotlib.patches import FancyArrowPatch, PathPatch
    from matplotlib.path import Path

    vertices, codes = [points[0]], [Path.MOVETO]
    for (x0, y0), (x1, y1) in itertools.pairwise(points):
        middle = (y0 + y1) / 2
        vertices += [(x0, middle), (x1, middle), (x1, y1)]
        codes += [Path.CURVE4] * 3
    axes.add_patch(PathPatch(Path(vertices, codes), fill=False, capstyle="butt", zorder=1, **how))
    if arrow:
        x, y = points[-1]
        axes.add_patch(
            FancyArrowPatch(
                (x, y - 0.1),
                (x, y + 0.01),
                arrowstyle="-|>",
                mutation_scale=9,
                color=how["color"],
                linewidth=0,
                shrinkA=0,
                shrinkB=0,
                zorder=2,
            )
        )


def _draw_box(
    axes: Any, graph: _Graph, key: Key, x: float, y: float, size: tuple[float, float]
) -> None:
    from matplotlib.patches import FancyBboxPatch

    width, height = size
    kind = key[0]
    stage = graph.stages.get(key)
    rounding = min(height, LINE + PAD) / 2 if kind == "variable" else 0.07
    edge = {"variable": VARIABLE, "source": picture.FAINT}.get(kind, picture.INK)
    if stage is not None and stage.states.lost:
        edge = LOST
    elif stage is not None and stage.states.dirty:
        edge = DIRTY
    axes.add_patch(
        FancyBboxPatch(
            (x - width / 2, y - height / 2),
            width,
            height,
            boxstyle=f"round,pad=0,rounding_size={rounding}",
            facecolor={"variable": "#edf0fa", "source": SOURCE}.get(kind, BOX),
            edgecolor=edge,
            linewidth=1.8 if edge in (LOST, DIRTY) else 1.1,
            linestyle="--" if kind == "source" else "-",
            zorder=3,
        )
    )
    top = y - height / 2 + PAD / 2 + LINE / 2
    for index, text in enumerate(graph.texts[key]):
        head = stage is not None and index == 0
        axes.text(
            x,
            top + index * LINE,
            text,
            ha="center",
            va="center",
            fontsize=6.5 if kind == "variable" and index else 8.5 if head else 8,
            weight="bold" if head else "normal",
            family="monospace" if stage is not None and not head else "sans-serif",
            color=VARIABLE if kind == "variable" else picture.INK,
            zorder=4,
        )
    if stage is not None:
        _draw_bar(
            axes, stage, x - width / 2 + PAD, y + height / 2 - (PAD + LINE) / 2, width - 2 * PAD
        )


def _draw_bar(axes: Any, stage: ShownStage, left: float, y: float, width: float) -> None:
    """The partitions: a cell for each where there is room, else parts of a bar."""
    from matplotlib.patches import Rectangle

    states = stage.states
    parts = [
        (states.kept, KEPT),
        (states.dirty, DIRTY),
        (states.lost, LOST),
        (states.absent, ABSENT),
    ]
    text = f"× {stage.n_partitions:,}"
    text_width = LETTER * len(text) * 0.8 + 0.08
    width -= text_width
    n_cells = stage.n_partitions
    if 0 < n_cells <= MOST_CELLS:
        cells = [color for number, color in parts for _ in range(number)]
        step = min(width / n_cells, 0.16)
        left += (width - n_cells * step) / 2
        gap = min(0.02, step * 0.15)
        spans = [(left + i * step, step - gap, color) for i, color in enumerate(cells)]
        end = left + n_cells * step
    else:
        spans, end = [], left
        for number, color in parts:
            # What there is of something bad is seen, however little.
            part = max(0.03, width * number / max(1, n_cells)) if number else 0.0
            spans.append((end, part, color))
            end += part
    for begin, part, color in spans:
        axes.add_patch(
            Rectangle((begin, y - 0.06), part, 0.12, facecolor=color, lw=0, zorder=4, snap=False)
        )
    axes.text(end + 0.05, y, text, fontsize=7.5, va="center", color=picture.INK, zorder=4)


def _legend(graph: _Graph) -> list[tuple[str, str, float]]:
    """What there is to explain: kind, name, and how much room that takes."""
    states = [stage.states for stage in graph.stages.values()]
    flows = graph.flows.values()
    found = [
        (kind, name)
        for kind, name, wanted in (
            (KEPT, "kept", any(s.kept for s in states)),
            (DIRTY, "dirty (what it read has changed)", any(s.dirty for s in states)),
            (LOST, "lost", any(s.lost for s in states)),
            (ABSENT, "not kept", any(s.absent for s in states)),
            ("line", "by partition", False in flows),
            ("wide", "all to all", True in flows),
            ("reads", "reads", bool(graph.uses)),
        )
        if wanted
    ]
    return [(kind, name, 0.58 + 0.058 * len(name)) for kind, name in found]


def _draw_legend(axes: Any, legend: Sequence[tuple[str, str, float]], x: float, y: float) -> None:
    from matplotlib.patches import Rectangle

    strokes: dict[str, list[dict[str, Any]]] = {
        "line": [{"linewidth": 1.3, "color": picture.INK}],
        "wide": [
            {"linewidth": 4.0, "color": picture.INK},
            {"linewidth": 1.6, "color": picture.PAPER},
        ],
        "reads": [{"linewidth": 1.1, "color": VARIABLE, "linestyle": (0, (3, 2))}],
    }
    for kind, name, width in legend:
        for stroke in strokes.get(kind, ()):
            axes.plot([x, x + 0.24], [y, y], solid_capstyle="butt", **stroke)
        if kind not in strokes:
            axes.add_patch(Rectangle((x + 0.1, y - 0.07), 0.14, 0.14, facecolor=kind, linewidth=0))
        axes.text(x + 0.3, y, name, fontsize=7.5, va="center", color=picture.INK)
        x += width
