"""From a node to its partitions: which stages run, which tasks of them, what is kept.

A part is up to date where it was made of the parts that are there now. Where a collection is
refreshed, it must besides have read nothing that has changed since.
"""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from clamor_ray._session import process_sessions
from clamor_ray._spans.record import span
from clamor_ray.collection.data import blocks, folds, shuffle
from clamor_ray.collection.options import Options
from clamor_ray.collection.plan.changes import Targets, is_touched
from clamor_ray.collection.plan.functions import Captured
from clamor_ray.collection.plan.pins import Pins, drop_keys
from clamor_ray.collection.plan.plan import Node, upstream
from clamor_ray.collection.plan.results import Part, StageResult, made_of, new_number
from clamor_ray.collection.plan.stages import Cutter, Folded, FromStage, Stage, in_order
from clamor_ray.collection.plan.staleness import newest_of, targets
from clamor_ray.collection.plan.task_messages import TaskSpec
from clamor_ray.collection.run.attempts_and_retries import Cluster

_clusters: weakref.WeakKeyDictionary[Any, Cluster] = weakref.WeakKeyDictionary()


def cluster_of(session: Any) -> Cluster:
    """The one `Cluster` of a session."""
    found = _clusters.get(session)
    if found is None:
        found = _clusters.setdefault(session, Cluster())
    return found


class Evaluation:
    """One action.

    Args:
        target: whose partitions are wanted.
        options: how.
    """

    def __init__(self, target: Node, options: Options) -> None:
        self._session = process_sessions.current()
        self._target = target
        self._options = options
        self._cutter = Cutter(self._is_there)
        self._made: dict[Stage, StageResult] = {}
        self._told: dict[Stage, Callable[[int, Part], None]] = {}
        self._refresh: Targets | None = None
        self._combining: list[bytes] = []  # tokens
        self.n_run = 0  # tasks

    def close(self) -> None:
        """The action is over: no task of what was not kept will begin again."""
        made = frozenset(self._combining).union(*(made.key_tokens for made in self._made.values()))
        if made:
            drop_keys(self._session, made)
        # At once: this object is in a cycle, and results are large.
        self._made.clear()
        self._told.clear()

    # -- what is asked for

    def parts(self, only: Sequence[int] | None = None) -> list[Any]:
        """References to the target's partitions, or to some of them."""
        result = self._result(self._cutter.whole(self._target), only)
        wanted = range(self._target.n_partitions) if only is None else only
        return [self._part(result, index).outs[0] for index in wanted]

    def folded(self, fold: Captured, took: Callable[[int, Part], None] | None = None) -> list[Any]:
        """References to what a function makes of each partition's items.

        Args:
            took: told of each result that counts, as soon as it is there.
        """
        stage = self._cutter.folded(self._target, fold)
        if took is not None:
            self._told[stage] = took
        result = self._result(stage, None)
        return [self._part(result, index).outs[0] for index in range(len(result.parts))]

    def combined(self, function: Captured, partials: Sequence[Any]) -> Any:
        """A reference to what a function of two makes of partial results, in their order."""
        token = secrets.token_bytes(16)
        self._combining.append(token)
        spec = TaskSpec(
            token=token,
            run_id=Pins.of(self._target).number,
            stage="combine",
            partition=len(self._combining) - 1,
            attempt=0,
            scope=self._session.scope,
            snapshots=tuple(variable.ref for variable in function.variables),
            slots=(),
            inputs=(f"{len(partials)} partial results",),
            check=self._options.check,
            moves=tuple(variable.moves for variable in function.variables),
        )
        return folds.combine(function, spec, partials, self._options)

    @staticmethod
    def _part(result: StageResult, index: int) -> Part:
        part = result.parts[index]
        assert part is not None
        return part

    def refresh(self) -> list[Any]:
        """As `parts`, on the newest versions of all variables that move."""
        nodes = list(upstream(self._target))
        newest = newest_of(self._session, nodes)
        for node in nodes:
            node.variables = tuple(
                variable.at(newest[variable.region])
                if variable.moves and variable.ref.version < newest[variable.region].version
                else variable
                for variable in node.variables
            )
        self._refresh = targets(self._session, nodes, newest)
        for node in nodes:
            Pins.of(node).update()
        return self.parts()

    # -- stages

    def _is_there(self, node: Node) -> bool:
        if self._refresh is not None or not node.keep:
            return False
        result = node.results.get("whole")
        return isinstance(result, StageResult) and result.has(range(node.n_partitions))

    def _result(self, stage: Stage, only: Sequence[int] | None) -> StageResult:
        """What a stage makes, or some of it (`only`); what there is of it is not made again."""
        wanted = range(stage.n_tasks) if only is None else only
        before = self._made.get(stage)
        if before is not None and before.has(wanted):
            return before
        if before is None:
            kept = self._holder(stage).results.get(stage.key)
            before = kept if isinstance(kept, StageResult) else None
            if before is not None and stage.is_own and self._is_there(stage.owner):
                self._made[stage] = before  # kept is kept, until it is refreshed
                return before
            if before is not None and before.signature != stage.signature:
                before = None  # something between was kept, or is no longer
        if only is None:
            for earlier in in_order(stage)[:-1]:  # so that no call is deeper than the next one
                if earlier not in self._made or not self._made[earlier].is_whole:
                    self._result(earlier, None)
        for earlier in stage.inputs:
            self._result(earlier, self._only(stage, earlier, only))
        result = self._bring_up(stage, before, wanted)
        self._made[stage] = result
        if self._keeps(stage):
            self._holder(stage).results[stage.key] = result
            Pins.of(self._holder(stage)).update()
        return result

    def _holder(self, stage: Stage) -> Node:
        """Who keeps what a stage makes, where it is kept: pieces are kept for a refresh of the
        target, and go with it."""
        return stage.owner if stage.is_own else self._target

    def _only(
        self, stage: Stage, earlier: Stage, only: Sequence[int] | None
    ) -> Sequence[int] | None:
        """Which partitions of a stage before are needed for some of this one."""
        direct = [s for s in stage.slots if isinstance(s, FromStage) and s.stage is earlier]
        others = [s for s in stage.inputs if s is earlier]
        return only if len(direct) == len(others) else None

    def _keeps(self, stage: Stage) -> bool:
        """Whether what the stage makes outlives the action."""
        if stage.is_own:
            return stage.owner.keep
        return self._target.keep and not isinstance(stage.program.out, Folded)

    def _bring_up(
        self, stage: Stage, before: StageResult | None, wanted: Sequence[int]
    ) -> StageResult:
        bounds = self._bounds(stage)
        mark = 0
        if bounds is not None:
            mark = int.from_bytes(blocks.digest(bounds)[:8], "little")
        parts: list[Part | None] = [None] * stage.n_tasks
        if before is not None:
            parts = list(before.parts)
        stale = []
        for index in wanted:
            part = parts[index]
            if part is not None and self._stands(
                stage, part, made_of(stage, index, self._made, mark)
            ):
                parts[index] = self._as_of(part)
            else:
                stale.append(index)
        if not stale and before is not None:
            return replace(before, parts=tuple(parts))
        pins = [Pins.of(node) for node in stage.fused]
        for each in pins:
            each.update()

        def pinned() -> None:
            for each in pins:
                each.confirm()

        with span(self._session.scope, "stage", stage=stage.name, tasks=len(stale)):
            made = cluster_of(self._session).run(
                stage,
                stale,
                self._made,
                bounds,
                mark,
                self._session.scope,
                self._options,
                pinned,
                self._told.get(stage),
            )
        self.n_run += len(made)
        for index, part in made.items():
            parts[index] = part
        n_attempts = sum(part.meta.attempt + 1 for part in made.values())
        n_before = before.n_attempts if before is not None else 0
        return StageResult(tuple(parts), new_number(), stage.signature, n_before + n_attempts)

    def _bounds(self, stage: Stage) -> Any:
        if stage.sampled is None:
            return None
        out: Any = stage.program.out
        samples = [part.meta.sample for part in self._made[stage.sampled].parts if part is not None]
        return shuffle.boundaries(samples, out.n, out.descending)

    def _stands(self, stage: Stage, part: Part, made_of_now: tuple[int, ...]) -> bool:
        """Whether what was made before would be made again."""
        if part.made_of != made_of_now:
            return False
        if self._refresh is not None:
            return not is_touched(part.meta.reads, part.as_of, self._refresh)
        # Another collection's refresh may have moved the variables since.
        return all(part.is_at(v.region, v.ref.version) for v in stage.variables)

    def _as_of(self, part: Part) -> Part:
        if self._refresh is None or not part.moved:
            return part
        regions = {pin.region for pin in part.moved} & self._refresh.newest.keys()
        newest = {region: self._refresh.newest[region] for region in regions}
        return replace(part, as_of={**part.as_of, **newest})
