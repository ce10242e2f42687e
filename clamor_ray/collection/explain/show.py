"""What `explain()` and `lineage()` show: stages as text of 80 columns; as a picture: `dot.py`.

Pure: the plan is turned into `ShownStage`s first, and everything here is written against those.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Final

from clamor_ray.collection.explain.shown_stage import ShownStage, Variable, check, count

WIDTH: Final = 80
ARROW: Final = " → "
MARGIN: Final = 11

# ------------------------------------------------------------------ explain


def explain(stages: Sequence[ShownStage], title: str = "") -> str:
    """Stages in the order in which they run, and what each of them is made of.

    Args:
        stages: inputs before those who take them.
        title: what is explained.

    Raises:
        ValueError: See `shown_stage.check`.

    Example:
        >>> print(explain([ShownStage("0", ("range", "sum"), 4, ("items 0 to 99",))], "total"))
        total: 1 stage, 4 tasks
        <BLANKLINE>
        Stage 0    range → sum
                   4 partitions
          from     items 0 to 99
    """
    check(stages)
    names = {stage.name for stage in stages}
    n_tasks = sum(stage.n_partitions for stage in stages)
    head = f"{title}: " if title else ""
    lines = [f"{head}{count(len(stages), 'stage')}, {count(n_tasks, 'task')}"]
    for stage in stages:
        lines += ["", *_explained(stage, names)]
    return "\n".join(lines)


def _explained(stage: ShownStage, names: set[str]) -> list[str]:
    lines = _entry(f"Stage {stage.name}", _fill(stage.operators, ARROW, WIDTH - MARGIN), indent=0)
    size = count(stage.n_partitions, "partition")
    if stage.rows is not None:
        size += f", {count(stage.rows, 'row')}"
    lines += _entry("", [size + (f"; tasks go {stage.placement}" if stage.placement else "")])
    how = ", all to all" if stage.wide else ""
    froms = [f"stage {name}{how}" if name in names else name for name in stage.inputs]
    lines += _entry("from", froms)
    lines += _entry("reads", _table(stage.variables))
    states = stage.states
    if states.kept or states.dirty or states.lost:
        lines += _entry("kept", [_kept_text(stage)])
    if stage.attempts:
        lines += _entry("ran", [count(stage.attempts, "attempt")])
    lines += _entry("note", list(stage.notes))
    return lines


def _kept_text(stage: ShownStage) -> str:
    states = stage.states
    there = states.kept + states.dirty
    text = f"{there:,} of {stage.n_partitions:,} partitions"
    worse = [
        f"{number:,} {name}"
        for number, name in ((states.dirty, "dirty"), (states.lost, "lost"))
        if number
    ]
    return f"{text} ({', '.join(worse)})" if worse else text


def _table(variables: Sequence[Variable]) -> list[str]:
    width = max((len(name) for name, _, _ in variables), default=0)
    return [
        f"{name:<{width}}  version {version}"
        + (f", {count(n_blocks, 'block')}" if n_blocks is not None else "")
        for name, version, n_blocks in variables
    ]


def _fill(words: Sequence[str], between: str, width: int) -> list[str]:
    """Words with something between them, in lines of a width; no word is broken."""
    lines = [""]
    for index, word in enumerate(words):
        if not index:
            lines[-1] = word
        elif len(lines[-1]) + len(between) + len(word) > width:
            lines[-1] += between.rstrip() if between.startswith(",") else ""
            lines.append(word if between.startswith(",") else between.lstrip() + word)
        else:
            lines[-1] += between + word
    return lines


def _entry(name: str, values: Sequence[str], indent: int = 2) -> list[str]:
    """Lines with a name in the margin of the first; none where there is nothing to say."""
    lines: list[str] = []
    for value in values:
        margin = " " * MARGIN if lines else f"{' ' * indent + name:<{MARGIN}}"
        if not lines and len(margin) > MARGIN:
            margin += " "
        lines += textwrap.wrap(
            value,
            WIDTH,
            initial_indent=margin,
            subsequent_indent=" " * MARGIN,
            break_on_hyphens=False,
        ) or [margin.rstrip()]
    return lines


# ------------------------------------------------------------------ lineage


def lineage(stages: Sequence[ShownStage], title: str = "") -> str:
    """The graph as a tree, from the last stages back to their sources.

    A stage that several others take is drawn once; elsewhere it is only named.

    Args:
        stages: inputs before those who take them.
        title: whose lineage this is.

    Raises:
        ValueError: See `shown_stage.check`.

    Example:
        >>> variables = (("hm", 3, None),)
        >>> print(lineage([
        ...     ShownStage("0", ("read_csv", "map(f)"), 4, ("a.csv",), variables, kept=True),
        ...     ShownStage("1", ("sort",), 4, ("0",), wide=True),
        ... ]))
        ○ 1  sort                                                           4 partitions
        ║
        ● 0  read_csv → map(f)                                              4 partitions
        │    reads hm v3
        ╰─ a.csv
        <BLANKLINE>
        ● kept  ○ not kept  │ by partition  ║ all to all
    """
    check(stages)
    tree = _Tree(stages)
    taken = {name for stage in stages for name in stage.inputs}
    lines = [f"lineage of {title}"] if title else []
    for stage in reversed(stages):
        if stage.name not in taken:
            tree.lines.append("")
            tree.draw(stage.name, first="", rest="")
    lines += tree.lines if title else tree.lines[1:]
    return "\n".join([*lines, "", *_legend(stages)])


class _Tree:
    """Draws stages from the last one back. The longest of a stage's branches goes on in its own
    column: a program of a thousand iterations is long, and not wide."""

    def __init__(self, stages: Sequence[ShownStage]) -> None:
        self.lines: list[str] = []
        self._stages = {stage.name: stage for stage in stages}
        self._drawn: set[str] = set()
        self._height: dict[str, int] = {}
        for stage in stages:
            inner = (self._height.get(name, 0) for name in stage.inputs)
            self._height[stage.name] = 1 + max(inner, default=0)

    def draw(self, name: str, first: str, rest: str) -> None:
        """A branch.

        Args:
            name: of its lowest stage, or of a source.
            first: what stands before its first line.
            rest: what stands before all others.
        """
        while True:
            stage = self._stages.get(name)
            if stage is None:
                self.lines.append(_fit(f"{first} {name}"))
                return
            if name in self._drawn:
                self.lines.append(_fit(f"{first}{_mark(stage)} {name}  (see above)"))
                return
            self._drawn.add(name)
            down, across, last = "║═╚" if stage.wide else "│─╰"
            inputs = list(dict.fromkeys(stage.inputs))
            longest = max(inputs, key=lambda inner: self._height.get(inner, 0), default="")
            self._draw_stage(stage, first, f"{rest}{down}" if inputs else f"{rest} ")
            for inner in inputs:
                if inner != longest:
                    fork = "╠" if stage.wide else "├"
                    self.draw(inner, first=f"{rest}{fork}{across}", rest=f"{rest}{down} ")
            if not inputs:
                return
            name = longest
            if name in self._drawn or name not in self._stages:
                first, rest = f"{rest}{last}{across}", f"{rest}  "
            else:
                first = rest
                if stage.wide and self.lines[-1][len(rest)] not in "║╠":
                    self.lines.append(f"{rest}{down}")

    def _draw_stage(self, stage: ShownStage, first: str, bar: str) -> None:
        head = f"{first}{_mark(stage)} {stage.name}  "
        bar = bar.ljust(len(head))
        right = _right(stage)
        chain = _fill(stage.operators, ARROW, max(12, WIDTH - len(head) - len(right)))
        line = f"{head}{chain[0]}".ljust(WIDTH - len(right))
        self.lines.append(f"{line}{right}" if len(line + right) <= WIDTH else _fit(line.rstrip()))
        if len(line + right) > WIDTH:
            self.lines.append(_fit(f"{bar}{right}"))
        reads = _fill([_variable(v) for v in stage.variables], ", ", WIDTH - len(bar) - 6)
        more = [f"{'reads' if not i else '':<6}{text}" for i, text in enumerate(reads) if text]
        self.lines += [_fit(f"{bar}{text}") for text in chain[1:] + more]


def _mark(stage: ShownStage) -> str:
    states = stage.states
    if states.lost:
        return "✗"
    if states.dirty:
        return "!"
    return "●" if states.kept else "○"


def _right(stage: ShownStage) -> str:
    states = stage.states
    worse = [
        f"{number:,} {name}"
        for number, name in ((states.dirty, "dirty"), (states.lost, "lost"))
        if number
    ]
    return "  " + ", ".join([count(stage.n_partitions, "partition"), *worse])


def _variable(variable: Variable) -> str:
    name, version, n_blocks = variable
    blocks = f" ({count(n_blocks, 'block')})" if n_blocks is not None else ""
    return f"{name} v{version}{blocks}"


def _legend(stages: Sequence[ShownStage]) -> list[str]:
    marks = {_mark(stage) for stage in stages}
    words = {"●": "kept", "○": "not kept", "!": "some dirty", "✗": "some lost"}
    entries = [f"{mark} {word}" for mark, word in words.items() if mark in marks]
    entries.append("│ by partition")
    if any(stage.wide for stage in stages):
        entries.append("║ all to all")
    return _fill(entries, "  ", WIDTH) if stages else []


def _fit(text: str) -> str:
    return text if len(text) <= WIDTH else text[: WIDTH - 1] + "…"
