"""A plan as it is shown: the stages that an action would run, and what is kept of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyroaring import BitMap

from clamor_ray.collection.explain.shown_stage import ShownStage
from clamor_ray.collection.options import Options
from clamor_ray.collection.plan.changes import Targets, is_touched
from clamor_ray.collection.plan.functions import Variable
from clamor_ray.collection.plan.plan import Node, Scan
from clamor_ray.collection.plan.results import Part, StageResult
from clamor_ray.collection.plan.stages import (
    Cutter,
    FromSource,
    PiecesOf,
    SlicesOf,
    Stage,
    in_order,
)
from clamor_ray.collection.plan.staleness import lost

PLACEMENTS = {
    "locality": "where what they read last is cached",
    "deterministic": "to a node by the hash of the partition",
    "ray": "where Ray puts them",
}


def stages_of(target: Node, options: Options, targets: Targets) -> list[ShownStage]:
    """The stages of a node, inputs first.

    Args:
        targets: what is kept is compared with them.
    """
    stages = in_order(Cutter(lambda _: False).whole(target))
    names = {stage: str(index) for index, stage in enumerate(stages)}
    return [_shown(stage, target, names, options, targets) for stage in stages]


def _n_read(stage: Stage, variable: Variable, parts: Sequence[Part]) -> int | None:
    """Blocks of a variable that the parts read, at whichever version: what a refresh has left as it
    was read an older one. None where it is not known.

    Of a variable that is read at a frozen version too, reads at that one are the frozen one's."""
    others = {v.ref.version for v in stage.variables if v.region == variable.region and not v.moves}
    found = BitMap()
    for part in parts:
        for region, version, blocks in part.meta.reads:
            of_this = version == variable.ref.version or (variable.moves and version not in others)
            if region != variable.region or not of_this:
                continue
            if blocks is None:
                return None
            found |= BitMap.deserialize(blocks)
    return len(found) if parts else None


def _shown(
    stage: Stage, target: Node, names: dict[Stage, str], options: Options, targets: Targets
) -> ShownStage:
    holder = stage.owner if stage.is_own else target  # pieces are kept with what they are for
    result = holder.results.get(stage.key)
    parts = [part for part in result.parts if part] if isinstance(result, StageResult) else []
    inputs = [_source_text(s.node) for s in stage.slots if isinstance(s, FromSource)]
    inputs += [names[earlier] for earlier in dict.fromkeys(stage.inputs)]
    operators = [node.name for node in stage.fused if not isinstance(node.operator, Scan)]
    if stage.program.out.kind != "whole":
        operators.append(f"for {stage.owner.name}")
    variables = []
    for variable in dict.fromkeys(stage.variables):
        frozen = "" if variable.moves else " (frozen)"
        n_blocks = _n_read(stage, variable, parts)
        variables.append((variable.ref._label + frozen, variable.ref.version, n_blocks))
    gone = lost(parts)
    dirty = sum(
        part.number not in gone and is_touched(part.meta.reads, part.as_of, targets)
        for part in parts
    )
    return ShownStage(
        name=names[stage],
        operators=tuple(operators) or ("read",),
        n_partitions=stage.n_tasks,
        inputs=tuple(inputs),
        variables=tuple(variables),
        kept=len(parts) - len(gone),
        attempts=result.n_attempts if isinstance(result, StageResult) else 0,
        wide=any(isinstance(slot, (PiecesOf, SlicesOf)) for slot in stage.slots),
        placement=PLACEMENTS[options.scheduling],
        rows=sum(part.meta.n_items for part in parts) if len(parts) == stage.n_tasks else None,
        dirty=dirty,
        lost=len(gone),
    )


def _source_text(node: Node) -> str:
    source: Any = node.operator
    if source.objects or not source.splits:
        return f"{source.kind} ({len(source.splits)} partitions)"
    first, last = source.splits[0].describe(), source.splits[-1].describe()
    return f"{source.kind}: {first}" + (f" to {last}" if len(source.splits) > 1 else "")
