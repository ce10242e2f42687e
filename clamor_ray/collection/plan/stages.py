"""A graph of operators, cut into stages. Pure.

Narrow operators and zips are fused with what they read: one task per partition does all of them.
A stage ends where the next one needs parts of many partitions (a wide operator), where partitions
are kept (`cache`), or where an action takes the results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from clamor_ray.collection.plan.functions import Captured, Variable
from clamor_ray.collection.plan.plan import Narrow, Node, Scan, Wide, Zip, functions_of

# ------------------------------------------------------------------ what a task does


@dataclass(frozen=True)
class ReadSplit:
    """Reads the split in a slot."""

    slot: int


@dataclass(frozen=True)
class Input:
    """The partition in a slot."""

    slot: int


@dataclass(frozen=True)
class Apply:
    """A narrow operator on an earlier step's items; `function` is an index of the program's."""

    kind: str
    batch_format: str
    name: str
    step: int
    function: int


@dataclass(frozen=True)
class ZipSteps:
    """Earlier steps' items, side by side."""

    steps: tuple[int, ...]


@dataclass(frozen=True)
class Merge:
    """The pieces in the slots (one slot for each side) become a partition.

    Args:
        kind: the wide operator.
        slots: of its sides.
        key, how: names, or indices of functions as `FunctionAt`.
        descending: of `sort`.
    """

    kind: str
    name: str
    slots: tuple[int, ...]
    key: Any
    how: Any
    descending: bool


@dataclass(frozen=True)
class FunctionAt:
    """The program's function of this index."""

    index: int


Step = ReadSplit | Input | Apply | ZipSteps | Merge


@dataclass(frozen=True)
class Whole:
    """The last step's items are the result."""

    kind: str = "whole"


@dataclass(frozen=True)
class Sampled:
    """A sample of the items' keys comes with the task's report; the items too, where `whole`."""

    key: Any
    seed: int
    whole: bool
    kind: str = "sampled"


@dataclass(frozen=True)
class Hashed:
    """A piece for each of n partitions, by key. `before`: what a map side can do already."""

    n: int
    key: Any
    before: str
    how: Any
    kind: str = "hashed"


@dataclass(frozen=True)
class Ranged:
    """A piece for each of n partitions, by ranges whose bounds each task is told."""

    n: int
    key: Any
    descending: bool
    kind: str = "ranged"


@dataclass(frozen=True)
class Folded:
    """What a function makes of the items."""

    function: FunctionAt
    kind: str = "folded"


Out = Whole | Sampled | Hashed | Ranged | Folded


@dataclass(frozen=True)
class Program:
    """What all tasks of a stage have in common. Pickles without the variables.

    Args:
        steps: in order; the last one's items go out.
        functions: with the index of each one's first variable among the stage's.
        out: what becomes of them.
    """

    steps: tuple[Step, ...]
    functions: tuple[tuple[Captured, int], ...]
    out: Out


# ------------------------------------------------------------------ a stage


@dataclass(frozen=True)
class FromSource:
    """A slot: partition p of a source."""

    node: Node


@dataclass(frozen=True)
class FromStage:
    """A slot: partition p of what a stage made."""

    stage: Stage


@dataclass(frozen=True)
class PiecesOf:
    """A slot: piece p of every partition of what a stage made."""

    stage: Stage


@dataclass(frozen=True)
class SlicesOf:
    """A slot: the p-th of n even parts of all items that a stage made."""

    stage: Stage
    n: int


Slot = FromSource | FromStage | PiecesOf | SlicesOf


@dataclass(frozen=True, eq=False)
class Stage:
    """Tasks that run side by side.

    Args:
        name: for people.
        node: whose items go out.
        owner: the node that keeps what the stage made, where that is kept.
        program: what each task does.
        slots: what each task is given.
        places: (node, index of its variable) of each of the program's variables.
        n_tasks: one for each partition.
        fused: nodes whose operators run in the stage.
        side: of a wide operator with several inputs, which one the stage makes pieces of.
        sampled: the stage whose samples say where the ranges end.
    """

    name: str
    node: Node
    owner: Node
    program: Program
    slots: tuple[Slot, ...]
    places: tuple[tuple[Node, int], ...]
    n_tasks: int
    fused: tuple[Node, ...]
    side: int = 0
    sampled: Stage | None = None

    @property
    def variables(self) -> tuple[Variable, ...]:
        """As the nodes have them now."""
        return tuple(node.variables[index] for node, index in self.places)

    @property
    def inputs(self) -> tuple[Stage, ...]:
        """The stages that must be over before this one."""
        stages = [slot.stage for slot in self.slots if not isinstance(slot, FromSource)]
        return (*stages, self.sampled) if self.sampled is not None else tuple(stages)

    @property
    def is_own(self) -> bool:
        """Whether it makes the partitions of the node that owns it."""
        return self.node is self.owner and isinstance(self.program.out, Whole)

    @property
    def key(self) -> Any:
        """Where what it made is kept: by its owner, or by whose action needed it."""
        if self.is_own:
            return "whole"
        return (self.owner.number, self.program.out.kind, self.side)

    @property
    def signature(self) -> tuple[Any, ...]:
        """Stages of one signature make the same of the same."""
        out = self.program.out
        folded = id(self) if isinstance(out, Folded) else 0
        fused = tuple(node.number for node in self.fused)
        takes = tuple((type(slot).__name__, _node_of(slot).number) for slot in self.slots)
        return (out.kind, getattr(out, "n", 0), folded, self.owner.number, self.side, fused, takes)


def _node_of(slot: Slot) -> Node:
    return slot.node if isinstance(slot, FromSource) else slot.stage.node


@dataclass
class _Builder:
    steps: list[Step] = field(default_factory=list)
    functions: list[tuple[Captured, int]] = field(default_factory=list)
    places: list[tuple[Node, int]] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    fused: list[Node] = field(default_factory=list)
    step_of: dict[int, int] = field(default_factory=dict)
    first_of: dict[int, int] = field(default_factory=dict)

    def slot(self, slot: Slot) -> int:
        self.slots.append(slot)
        return len(self.slots) - 1

    def functions_at(self, node: Node) -> int:
        """Index of the node's first function; they are added where they are not there yet."""
        if node.number not in self.first_of:
            self.first_of[node.number] = len(self.functions)
            offset = len(self.places)
            for function in functions_of(node.operator):
                self.functions.append((function, offset))
                offset += len(function.variables)
            self.places += [(node, index) for index in range(len(node.variables))]
        return self.first_of[node.number]

    def part(self, node: Node, part: Any) -> Any:
        """A key or how as tasks get it."""
        if not isinstance(part, Captured):
            return part
        functions = functions_of(node.operator)
        index = next(i for i, function in enumerate(functions) if function is part)
        return FunctionAt(self.functions_at(node) + index)

    def add(self, node: Node, step: Step) -> int:
        self.steps.append(step)
        self.step_of[node.number] = len(self.steps) - 1
        return len(self.steps) - 1


class Cutter:
    """Cuts graphs into stages. One for each action: within it a stage is made once.

    Args:
        is_there: whether a node's partitions are kept already; then nothing before it matters.
    """

    def __init__(self, is_there: Callable[[Node], bool]) -> None:
        self._is_there = is_there
        self._made: dict[tuple[Any, ...], Stage] = {}

    def whole(self, node: Node) -> Stage:
        """The stage that makes a node's partitions."""
        self._make_ready(node)
        return self._stage(node, node, "whole")

    def _make_ready(self, target: Node) -> None:
        """Makes the stages before a node's, inputs first: however long a graph is, nothing here
        calls itself more than a few levels deep."""
        for each in _before(target, lambda node: node.keep and self._is_there(node)):
            if each is not target and each.keep:
                self._stage(each, each, "whole")
            elif isinstance(each.operator, Wide):
                self._sides_of(each)

    def folded(self, node: Node, fold: Captured) -> Stage:
        """The stage that makes of each of a node's partitions what a function makes of it."""
        self._make_ready(node)
        builder = _Builder()
        self._step(builder, node, None)
        offset = len(builder.places)
        holder = Node(
            operator=Narrow("map_batches", fold),
            parents=(node,),
            n_partitions=node.n_partitions,
            variables=fold.variables,
        )
        builder.functions.append((fold, offset))
        builder.places += [(holder, index) for index in range(len(fold.variables))]
        out = Folded(FunctionAt(len(builder.functions) - 1))
        return self._finish(builder, node, node, out, fold.name)

    def _stage(self, node: Node, owner: Node, kind: str, side: int = 0) -> Stage:
        key = (node.number, owner.number, kind, side)
        if key not in self._made and kind == "whole" and node is owner and self._is_there(node):
            self._made[key] = self._finish(_Builder(), node, owner, Whole(), node.name)
        if key not in self._made:
            builder = _Builder()
            top = node if kind == "whole" and owner is node else None
            self._step(builder, node, top)
            out = self._out(builder, owner, kind)
            made = self._finish(builder, node, owner, out, owner.name)
            self._made[key] = dataclasses.replace(made, side=side)
        return self._made[key]

    def _out(self, builder: _Builder, owner: Node, kind: str) -> Out:
        if kind == "whole":
            return Whole()
        wide = owner.operator
        assert isinstance(wide, Wide)
        key = builder.part(owner, wide.key)
        if kind == "sampled":
            return Sampled(key, owner.number, whole=not owner.parents[0].keep)
        if kind == "ranged":
            return Ranged(owner.n_partitions, key, wide.descending)
        before = wide.kind if wide.kind in ("reduce_by_key", "distinct") else ""
        if wide.kind in ("reduce_by_key", "join") and key is None:
            key = 0  # the first of a pair
        return Hashed(
            n=owner.n_partitions, key=key, before=before, how=builder.part(owner, wide.how)
        )

    def _finish(self, builder: _Builder, node: Node, owner: Node, out: Out, name: str) -> Stage:
        program = Program(tuple(builder.steps), tuple(builder.functions), out)
        if out.kind in ("hashed", "ranged", "sampled"):
            name = f"{node.name} to {owner.name}"
        return Stage(
            name=name,
            node=node,
            owner=owner,
            program=program,
            slots=tuple(builder.slots),
            places=tuple(builder.places),
            n_tasks=node.n_partitions,
            fused=tuple(builder.fused),
        )

    def _step(self, builder: _Builder, node: Node, top: Node | None) -> int:
        """The step that makes a node's items; those that it needs are made first."""
        for each in _before(node, lambda each: self._ends_at(each, top)):
            self._own_step(builder, each, top)
        return builder.step_of[node.number]

    @staticmethod
    def _ends_at(node: Node, top: Node | None) -> bool:
        return (node.keep and node is not top) or isinstance(node.operator, Wide)

    def _own_step(self, builder: _Builder, node: Node, top: Node | None) -> int:
        if node.number in builder.step_of:
            return builder.step_of[node.number]
        if node.keep and node is not top:
            return builder.add(node, Input(builder.slot(FromStage(self.whole(node)))))
        operator = node.operator
        if isinstance(operator, Scan):
            slot = builder.slot(FromSource(node))
            builder.fused.append(node)
            return builder.add(node, Input(slot) if operator.objects else ReadSplit(slot))
        if isinstance(operator, Narrow):
            source = builder.step_of[node.parents[0].number]
            function = builder.functions_at(node)
            builder.fused.append(node)
            step = Apply(
                kind=operator.kind,
                batch_format=operator.batch_format,
                name=operator.name,
                step=source,
                function=function,
            )
            return builder.add(node, step)
        if isinstance(operator, Zip):
            steps = tuple(builder.step_of[parent.number] for parent in node.parents)
            builder.fused.append(node)
            return builder.add(node, ZipSteps(steps))
        return self._merge(builder, node, operator)

    def _merge(self, builder: _Builder, node: Node, operator: Wide) -> int:
        slots: list[int] = []
        for stage in self._sides_of(node):
            if operator.kind == "repartition":
                slots.append(builder.slot(SlicesOf(stage, node.n_partitions)))
            else:
                slots.append(builder.slot(PiecesOf(stage)))
        builder.fused.append(node)
        merge = Merge(
            kind=operator.kind,
            name=operator.name,
            slots=tuple(slots),
            key=builder.part(node, operator.key),
            how=builder.part(node, operator.how),
            descending=operator.descending,
        )
        return builder.add(node, merge)

    def _sides_of(self, node: Node) -> list[Stage]:
        """The stages that a wide operator takes pieces of."""
        kind = node.operator.kind  # type: ignore[union-attr]
        if kind == "sort":
            return [self._ranged(node, node.parents[0])]
        if kind == "repartition":
            (parent,) = node.parents
            return [self._stage(parent, parent if parent.keep else node, "whole")]
        return [
            self._stage(parent, node, "hashed", side) for side, parent in enumerate(node.parents)
        ]

    def _ranged(self, node: Node, parent: Node) -> Stage:
        """Sorting takes two looks at its input: one for a sample of its keys."""
        key = (parent.number, node.number, "ranged", 0)
        if key not in self._made:
            sampled = self._stage(parent, node, "sampled")
            items = self._stage(parent, parent, "whole") if parent.keep else sampled
            builder = _Builder()
            builder.add(parent, Input(builder.slot(FromStage(items))))
            out = self._out(builder, node, "ranged")
            ranged = self._finish(builder, parent, node, out, node.name)
            self._made[key] = dataclasses.replace(ranged, sampled=sampled)
        return self._made[key]


def in_order(last: Stage) -> list[Stage]:
    """A stage and those before it, each once, inputs first."""
    found: dict[Stage, None] = {}
    stack = [(last, False)]
    while stack:
        stage, inputs_are_there = stack.pop()
        if inputs_are_there:
            found.setdefault(stage)
        elif stage not in found:
            stack.append((stage, True))
            stack.extend((before, False) for before in reversed(stage.inputs))
    return list(found)


def _before(target: Node, ends_at: Callable[[Node], bool]) -> list[Node]:
    """A node and what it is made of, inputs first; not what those are made of where it ends."""
    found: dict[int, Node] = {}
    stack = [(target, False)]
    while stack:
        node, inputs_are_there = stack.pop()
        if inputs_are_there:
            found.setdefault(node.number, node)
        elif node.number not in found:
            stack.append((node, True))
            if not ends_at(node):
                stack.extend((parent, False) for parent in reversed(node.parents))
    return list(found.values())
