"""A program as a graph in DOT, the language of Graphviz: text, which needs nothing to be made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from clamor_ray._recipes.program.recipes import loops_around
from clamor_ray._recipes.program.tables import END, ENDLESS, LineKind, Op, Tables
from clamor_ray._recipes.program.translate import next_stages

INK: Final = "#22303c"
FAINT: Final = "#8a97a3"
DATA: Final = "#5b6fb5"
MESSAGES: Final = "#e8a33d"


def explain_picture(tables: Tables) -> str:
    """Stages as boxes in frames of their loops, decisions as diamonds, datasets as pills.

    A line leads to the stage that comes next; a double line, where messages go there: their senders
    and receivers are its label. A dashed line leads from a dataset to what reads it, and from what
    writes it to the dataset.

    Args:
        tables: The program.

    Returns:
        DOT text.
    """
    lines = [
        "digraph program {",
        '  graph [fontname="sans-serif", fontsize=11, ranksep=0.45, nodesep=0.35]',
        f'  node [fontname="sans-serif", fontsize=10, color="{INK}", fontcolor="{INK}"]',
        f'  edge [fontname="sans-serif", fontsize=8, color="{INK}", fontcolor="{INK}"]',
        f'  begin [shape=circle, style=filled, fillcolor="{INK}", label="", width=0.12]',
        f'  end [shape=doublecircle, style=filled, fillcolor="{INK}", label="", width=0.1]',
        *_stages(tables),
        *_datasets(tables),
        *_order(tables),
        "}",
        "",
    ]
    return "\n".join(lines)


def _stages(tables: Tables) -> Iterator[str]:
    limits = {step.arg: step.limit for step in tables.steps if step.op is Op.REPEAT}
    depths: list[int] = []  # of open loops
    for line in tables.outline:
        while depths and line.depth <= depths[-1]:
            depths.pop()
            yield "  }"
        if line.kind is LineKind.LOOP:
            depths.append(line.depth)
            limit = limits[line.number]
            rounds = "loop" if limit == ENDLESS else f"loop: {limit:,} round{'s' * (limit > 1)}"
            yield f"  subgraph cluster_{line.number} {{"
            yield f'  label={_quote(rounds)}; labeljust=l; color="{FAINT}"; style=rounded'
        elif line.kind is not LineKind.OTHERWISE:
            info = tables.stages[line.number]
            shape = "diamond" if info.decides else "box"
            label = f"{info.name}\n× {info.n_tasks:,}" if info.n_tasks > 1 else info.name
            yield f"  stage{line.number} [shape={shape}, label={_quote(label)}]"
    yield from ["  }"] * len(depths)


def _datasets(tables: Tables) -> Iterator[str]:
    for number, info in enumerate(tables.datasets):
        parts = "partition" if info.n_partitions == 1 else "partitions"
        label = f"{info.name}\n{info.n_partitions:,} {parts}, group {info.group}"
        style = f'shape=box, style="rounded,filled", color="{DATA}", fillcolor="#edf0fa"'
        yield f"  dataset{number} [{style}, label={_quote(label)}]"
    faint = f'style=dashed, color="{DATA}", constraint=false'
    for number, stage in enumerate(tables.stages):
        for access in stage.accesses:
            ends = (f"dataset{access.dataset}", f"stage{number}")
            tail, head = reversed(ends) if access.is_write else ends
            yield f"  {tail} -> {head} [{faint}]"


def _order(tables: Tables) -> Iterator[str]:
    """From each stage to those that may come next."""
    around = loops_around(tables)
    for first in sorted(next_stages(tables, 0)):
        yield f"  begin -> {_node(first)}"
    for step in tables.steps:
        if step.op is Op.RUN:
            ways = {"": step.then}
        elif step.op is Op.DECIDE:
            ways = {"True": step.then, "False": step.other}
        else:
            continue
        stage = tables.stages[step.arg]
        for answer, way in ways.items():
            for after in sorted(next_stages(tables, way)):
                style = [f"label={_quote(answer)}"] if answer else []
                if stage.sends and after != END:
                    n_next = tables.stages[after].n_tasks
                    style = [f'color="{MESSAGES}:{MESSAGES}"', "penwidth=1.6"]
                    style.append(f"label={_quote(f'{stage.n_tasks:,} → {n_next:,}')}")
                if after != END and after <= step.arg and around[step.arg]:
                    style.append("constraint=false")  # back to the loop's begin
                yield f"  stage{step.arg} -> {_node(after)} [{', '.join(style)}]"


def _node(stage: int) -> str:
    return "end" if stage == END else f"stage{stage}"


def _quote(text: str) -> str:
    """A newline stays one."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
