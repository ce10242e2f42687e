"""The picture of a lineage, as a graph in DOT, the language of Graphviz, which lays it out.

A stage is a box with its operators and a bar of its partitions: kept, dirty, lost, or not kept. A
variable is a pill with its version, and a dashed line to the stages that read it. What passes
partition by partition is a line; what goes from all to all is a double one.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from html import escape
from typing import Final

from clamor_ray._observe.graphviz import write_graph
from clamor_ray.collection.explain.shown_stage import ShownStage, check, count

KEPT: Final = "#4c9a6a"
DIRTY: Final = "#e8a33d"
LOST: Final = "#c8453b"
ABSENT: Final = "#d5dce2"
VARIABLE: Final = "#5b6fb5"
INK: Final = "#22303c"
FAINT: Final = "#8a97a3"

BAR_POINTS: Final = 160
MOST_CELLS: Final = 40


def draw(stages: Sequence[ShownStage], path: str | os.PathLike[str], title: str = "") -> None:
    """Writes the graph to a file: as DOT text (.dot, .gv), or drawn by Graphviz (.png, .svg, .pdf).

    Args:
        stages: inputs before those who take them.
        path: its ending is the format.
        title: whose lineage this is.

    Raises:
        FileNotFoundError: The format needs Graphviz, and there is no `dot` on PATH.
        ValueError: The name has no ending; Graphviz does not know it; see `shown_stage.check`.
        OSError: The file cannot be written.
    """
    check(stages)
    call = f"lineage(picture={str(path)!r})"
    write_graph(dot_of(stages, title), path, call, count(len(stages), "stage"))


def dot_of(stages: Sequence[ShownStage], title: str = "") -> str:
    """The graph as DOT text. Pure."""
    names = {stage.name: f"stage{n}" for n, stage in enumerate(stages)}
    lines = [
        "digraph lineage {",
        f"  graph [label={_quote(f'lineage of {title}' if title else 'lineage')}, labelloc=t,",
        '         fontname="sans-serif", fontsize=16, ranksep=0.5, nodesep=0.35]',
        f'  node [fontname="sans-serif", fontsize=10, color="{INK}", fontcolor="{INK}"]',
        f'  edge [fontname="sans-serif", fontsize=8, color="{INK}", fontcolor="{VARIABLE}"]',
    ]
    others: dict[str, str] = {}  # sources and variables, by what they say
    edges = []
    for stage in stages:
        here = names[stage.name]
        lines.append(f"  {here} [shape=plain, label=<{_table(stage)}>]")
        for name in dict.fromkeys(stage.inputs):
            tail = names.get(name)
            if tail is None:
                tail = others.setdefault(f"source {name}", f"source{len(others)}")
                style = (
                    f'[shape=box, style="rounded,dashed", color="{FAINT}", label={_quote(name)}]'
                )
                lines.append(f"  {tail} {style}")
            wide = f' [color="{INK}:{INK}", penwidth=1.4]' if stage.wide else ""
            edges.append(f"  {tail} -> {here}{wide}")
        for name, version, n_blocks in stage.variables:
            label = f"{name} v{version}"
            tail = others.setdefault(f"variable {label}", f"variable{len(others)}")
            style = f'[shape=box, style="rounded,filled", color="{VARIABLE}", fillcolor="#edf0fa"'
            lines.append(f"  {tail} {style}, label={_quote(label)}]")
            blocks = _quote("" if n_blocks is None else count(n_blocks, "block"))
            edges.append(f'  {tail} -> {here} [style=dashed, color="{VARIABLE}", label={blocks}]')
    return "\n".join([*dict.fromkeys(lines), *edges, *_legend(stages), "}", ""])


def _quote(text: str) -> str:
    return f'"{_plain(text)}"'


def _plain(text: str) -> str:
    """Entities and backslashes mean the same in both kinds of labels."""
    return escape(text).replace("\\", "\\\\")


def _table(stage: ShownStage) -> str:
    """A stage's box: its name, its operators, and its partitions."""
    states = stage.states
    edge = LOST if states.lost else DIRTY if states.dirty else INK
    rows = f", {stage.rows:,} rows" if stage.rows is not None else ""
    lines = [f"<B>stage {_plain(stage.name + rows)}</B>", *map(_plain, stage.operators)]
    cells = "".join(f'<TR><TD BORDER="0">{line}</TD></TR>' for line in lines)
    return (
        f'<TABLE BORDER="1" COLOR="{edge}" CELLBORDER="0" CELLSPACING="0" CELLPADDING="3">{cells}'
        f'<TR><TD BORDER="0">{_bar(stage)}</TD></TR></TABLE>'
    )


def _bar(stage: ShownStage) -> str:
    """Partitions: a cell for each where there is room, else a part of the bar for each state."""
    states = [
        (number, color) for number, color in zip(stage.states, _COLORS, strict=True) if number
    ]
    total = max(1, stage.n_partitions)
    if total <= MOST_CELLS:
        states = [(1, color) for number, color in states for _ in range(number)]
    cells = "".join(
        # What there is of something bad is seen, however little.
        f'<TD BGCOLOR="{color}" WIDTH="{max(3, BAR_POINTS * number // total)}" HEIGHT="8"></TD>'
        for number, color in states
    )
    number = f'<TD BORDER="0">× {stage.n_partitions:,}</TD>'
    return f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="1"><TR>{cells}{number}</TR></TABLE>'


_COLORS: Final = (KEPT, DIRTY, LOST, ABSENT)  # of `States`, in order
_WORDS: Final = ("kept", "dirty (what it read has changed)", "lost", "not kept")


def _legend(stages: Sequence[ShownStage]) -> list[str]:
    """What the colours and lines of this picture mean, in one line below it."""
    there = [any(stage.states[n] for stage in stages) for n in range(len(_COLORS))]
    cells = [
        f'<TD BGCOLOR="{color}" WIDTH="10" HEIGHT="8"></TD><TD ALIGN="LEFT">{word}</TD>'
        for color, word, wanted in zip(_COLORS, _WORDS, there, strict=True)
        if wanted
    ]
    words = (
        ["line: by partition"] if any(stage.inputs and not stage.wide for stage in stages) else []
    )
    words += ["double line: all to all"] if any(stage.wide for stage in stages) else []
    words += ["dashed line: reads"] if any(stage.variables for stage in stages) else []
    cells += [f'<TD ALIGN="LEFT">{word}</TD>' for word in words]
    if not cells:
        return []
    row = f'<TABLE BORDER="0" CELLBORDER="0" CELLSPACING="6"><TR>{"".join(cells)}</TR></TABLE>'
    last = f"  stage{len(stages) - 1} -> legend [style=invis]"
    return [f"  legend [shape=plain, fontsize=8, label=<{row}>]", last]
