"""What one task does: reads its inputs, runs the stage's operators on them, says what it did.

A function that raises is no failure of the task: the task returns, and its report says what was
raised. So Ray does not try again what would only raise again.
"""

from __future__ import annotations

import copy
import functools
import itertools
import os
import pickle
import re
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from clamor_ray import errors
from clamor_ray._counting.anchors import Anchor, collecting, giving, object_refs
from clamor_ray._objects.global_array import GlobalArray
from clamor_ray._protocol.attempt_record import Failure
from clamor_ray._read import bad_address
from clamor_ray._read.ref import GlobalRef
from clamor_ray._tasks.task_context import recording
from clamor_ray._write.deltas import Collector
from clamor_ray.collection.data import blocks, combine, joins, shuffle
from clamor_ray.collection.data.blocks import Columns, Items
from clamor_ray.collection.plan.functions import Captured
from clamor_ray.collection.plan.stages import (
    Apply,
    Folded,
    FunctionAt,
    Hashed,
    Input,
    Merge,
    Program,
    Ranged,
    ReadSplit,
    Sampled,
    ZipSteps,
)
from clamor_ray.collection.plan.task_messages import Meta, Piece, TaskSpec
from clamor_ray.collection.run import detach as own
from clamor_ray.collection.run import report

# What NumPy and others say of a write to memory that is not to be written to.
_READ_ONLY = re.compile(
    r"(destination|array|buffer|memory|view) is (not writ|read-only)|"
    r"read-only (array|buffer|memory|view)"
)
SAMPLE_ITEMS = 200  # of each partition, for the bounds of a sort


# ------------------------------------------------------------------ operators


class _Raised(Exception):
    """A user's function raised. Folds raise it too, where they call several.

    Args:
        what: which function, on what.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what


class _Function:
    """A loaded function with its further arguments, references among them opened."""

    def __init__(self, captured: Captured, refs: Sequence[GlobalRef[Any]]) -> None:
        self.name = captured.name
        self.function, args, kwargs = captured.load(refs)
        opened: dict[int, Any] = {}

        def value_of(value: Any) -> Any:
            if not isinstance(value, GlobalRef):
                return value
            if id(value) not in opened:
                opened[id(value)] = value.get()
            return opened[id(value)]

        self.args = tuple(value_of(value) for value in args)
        self.kwargs = {name: value_of(value) for name, value in kwargs.items()}

    def __call__(self, *values: Any) -> Any:
        return self.function(*values, *self.args, **self.kwargs)


def _each(function: _Function, items: Items) -> Iterable[tuple[Any, Any]]:
    call, args, kwargs = function.function, function.args, function.kwargs
    done = 0
    try:
        for item in blocks.items(_read_only(items) if isinstance(items, np.ndarray) else items):
            yield item, call(item, *args, **kwargs)
            done += 1
    except Exception as failure:  # any: it is the user's
        raise _Raised(f"{function.name} raised at item {done}") from failure


def _map(function: _Function, items: Items) -> Items:
    return blocks.from_items([result for _, result in _each(function, items)])


def _filter(function: _Function, items: Items) -> Items:
    kept = [bool(result) for _, result in _each(function, items)]
    return blocks.take(items, np.flatnonzero(np.array(kept, bool)))


def _flat_map(function: _Function, items: Items) -> Items:
    found: list[Any] = []
    done = 0
    try:
        for _, results in _each(function, items):
            found.extend(results)
            done += 1
    except _Raised:
        raise
    except Exception as failure:  # any: iterating the result runs the user's code too
        raise _Raised(
            f"{function.name} raised, or gave nothing to iterate, at item {done}"
        ) from failure
    return blocks.from_items(found)


def _map_batches(function: _Function, items: Items, batch_format: str) -> Items:
    # As Ray Data's batches: what others may read as well cannot be written to.
    batch = _read_only(blocks.to_batch(items, batch_format))
    try:
        result = function(batch)
    except Exception as failure:  # any: it is the user's
        raise _Raised(f"{function.name} raised") from failure
    try:
        return blocks.from_batch(result)
    except TypeError as failure:
        raise _Raised(f"{function.name} returned what is no batch") from failure


def _read_only(batch: Any) -> Any:
    if isinstance(batch, np.ndarray):
        view = batch.view()
        view.flags.writeable = False
        return view
    if isinstance(batch, dict):
        return {name: _read_only(column) for name, column in batch.items()}
    return tuple(map(_read_only, batch)) if type(batch) is tuple else batch


_BY_ITEM: Mapping[str, Callable[[_Function, Items], Items]] = {
    "map": _map,
    "filter": _filter,
    "flat_map": _flat_map,
}


def _zip(sides: Sequence[Items]) -> Items:
    lengths = [blocks.n_items(side) for side in sides]
    if len(set(lengths)) > 1:
        raise errors.LengthMismatchError(
            "The two sides of zip have "
            + " and ".join(str(length) for length in lengths)
            + " items in this partition."
        )
    return Columns(tuple(sides))


class ProgramRun:
    """The steps of a program on one task's inputs.

    Args:
        program: what is done.
        functions: loaded, in the program's order.
        slots: as a `TaskSpec` has them.
        objects: the Ray objects that pieces point into.
    """

    def __init__(
        self,
        program: Program,
        functions: Sequence[_Function],
        slots: Sequence[Any],
        objects: Sequence[Items],
    ) -> None:
        self._program = program
        self._functions = functions
        self._slots = slots
        self._objects = objects
        self._made: list[Items] = []

    def items(self) -> Items:
        """What the last step makes."""
        for step in self._program.steps:
            self._made.append(self._step(step))
        return self._made[-1]

    def _step(self, step: Any) -> Items:
        if isinstance(step, ReadSplit):
            split: Any = self._slots[step.slot]
            found: Items = split.read()
            return found
        if isinstance(step, Input):
            return self._pieces(step.slot)
        if isinstance(step, Apply):
            function, items = self._functions[step.function], self._made[step.step]
            if step.kind == "map_batches":
                return _map_batches(function, items, step.batch_format)
            return _BY_ITEM[step.kind](function, items)
        if isinstance(step, ZipSteps):
            return _zip([self._made[each] for each in step.steps])
        return self._merge(step)

    def _pieces(self, slot: int) -> Items:
        found = []
        for index, start, stop in self._slots[slot]:
            items: Any = self._objects[index]
            if isinstance(items, Failure):
                raise items.error
            found.append(items if stop is None else blocks.slice_of(items, start, stop))
        return found[0] if len(found) == 1 else blocks.concat(found)

    def part(self, part: Any) -> Any:
        """A key or how: a name, or a function that says whose it is when it raises."""
        if not isinstance(part, FunctionAt):
            return part
        function = self._functions[part.index]

        def call(*values: Any) -> Any:
            try:
                return function(*values)
            except Exception as failure:  # any: it is the user's
                raise _Raised(f"{function.name} raised") from failure

        return call

    def _merge(self, step: Merge) -> Items:
        sides = [self._pieces(slot) for slot in step.slots]
        return _MERGES[step.kind](self, step, sides)

    def outs(self, items: Items, partition: int, bounds: Any) -> tuple[list[Any], Any]:
        """The task's results, and a sample of keys."""
        out = self._program.out
        if isinstance(out, Hashed):
            if out.before:
                items = _MERGES[out.before](self, out, [items])
            return shuffle.partition_by_hash(items, self.part(out.key), out.n), None
        if isinstance(out, Ranged):
            key = self.part(out.key)
            pieces = shuffle.partition_by_range(items, key, bounds, out.descending)
            # Fewer keys were sampled than there are to be partitions.
            return pieces + [blocks.slice_of(items, 0, 0)] * (out.n - len(pieces)), None
        if isinstance(out, Sampled):
            sample = shuffle.sample_keys(items, self.part(out.key), SAMPLE_ITEMS, out.seed)
            return [items if out.whole else None], sample
        if isinstance(out, Folded):
            try:
                return [self._functions[out.function.index](items, partition)], None
            except (errors.ClamorError, _Raised):
                raise
            except Exception as failure:  # any: it may be the user's
                name = self._functions[out.function.index].name
                raise _Raised(f"{name} raised") from failure
        return [items], None


# What a wide operator does with its pieces; `before` an exchange, with the items of one task.
_MERGES: Mapping[str, Callable[[ProgramRun, Any, list[Items]], Items]] = {
    "reduce_by_key": lambda task, wide, sides: combine.combine_by_key(
        sides[0], task.part(wide.how)
    ),
    "distinct": lambda task, wide, sides: shuffle.distinct_items(sides[0]),
    "sort": lambda task, wide, sides: shuffle.sort_items(
        sides[0], task.part(wide.key), wide.descending
    ),
    "join": lambda task, wide, sides: joins.join_items(sides[0], sides[1], wide.key, wide.how),
    "repartition": lambda task, wide, sides: sides[0],
}


# ------------------------------------------------------------------ failures


def _own_lines(failure: BaseException) -> str:
    """The traceback, without this library's frames."""
    here = os.path.dirname(os.path.dirname(__file__))
    frames = [
        frame
        for frame in traceback.extract_tb(failure.__traceback__)
        if not frame.filename.startswith(here)
    ]
    lines = ["Traceback (most recent call last):\n"] if frames else []
    bad_address.explain(failure)
    lines += traceback.format_list(frames)
    lines += traceback.format_exception_only(type(failure), failure)
    return "".join(lines).rstrip()


def _where(spec: TaskSpec) -> str:
    made_of = "; ".join(text for text in spec.inputs if text) or "nothing"
    return f"stage {spec.stage!r}, partition {spec.partition} (made of {made_of})"


def _explained(failure: BaseException, spec: TaskSpec) -> errors.ClamorError:
    """What the user is told. A typed error of ours stays what it is, wherever it was raised."""
    if isinstance(failure, _Raised) and isinstance(failure.__cause__, errors.ClamorError):
        error = failure.__cause__
        error.args = (f"{error.message} {failure.what}, in {_where(spec)}.",)
        error.__cause__ = error.__context__ = error.__traceback__ = None
        return error
    if isinstance(failure, _Raised):
        cause = failure.__cause__ or failure
        kind = f"{type(cause).__module__}.{type(cause).__qualname__}".removeprefix("builtins.")
        text = f"{failure.what}, in {_where(spec)}:\n\n{_own_lines(cause)}\n\n"
        fields = {"stage": spec.stage, "partition": spec.partition, "cause": kind}
        told: type[errors.FunctionFailedError] = errors.FunctionFailedError
        if isinstance(cause, (ValueError, TypeError)) and _READ_ONLY.search(str(cause)):
            told = errors.ReadOnlyError
        return told(text, input="; ".join(spec.inputs), **fields)  # type: ignore[arg-type]
    if isinstance(failure, errors.ClamorError):
        failure.args = (f"{failure.message} This was in {_where(spec)}.",)
        failure.__traceback__ = None
        return failure
    if isinstance(failure, SystemExit):
        return errors.FunctionFailedError(
            f"A function ended its process by sys.exit({failure.code!r}), in {_where(spec)}.",
            stage=spec.stage,
            partition=spec.partition,
            input="; ".join(spec.inputs),
            cause="SystemExit",
            hint="Raise an exception instead: tasks share processes.",
        )
    return errors.FunctionFailedError(
        f"The operator itself failed, in {_where(spec)}:\n\n"
        + "".join(traceback.format_exception(failure)).rstrip()
        + "\n\n",
        stage=spec.stage,
        partition=spec.partition,
        input="; ".join(spec.inputs),
        cause=f"{type(failure).__module__}.{type(failure).__qualname__}",
        hint="Look at the types of keys and values in this partition.",
    )


# ------------------------------------------------------------------ a task


def packed(spec: TaskSpec) -> TaskSpec | bytes | tuple[Any, ...]:
    """A task's spec as bytes, and the anchors of its snapshots, where nothing of the user's is in
    it: Ray pickles other classes by a pickler written in Python, which also knows classes of the
    user's script."""
    plain = spec.bounds is None and all(
        type(slot) is tuple and all(type(piece) is Piece for piece in slot) for slot in spec.slots
    )
    if not plain:
        return spec
    with collecting() as held_by:
        made = pickle.dumps(spec, 5)
    refs = object_refs(tuple(dict.fromkeys(held_by)))
    return (made, *refs) if refs else made


def unpacked(spec: TaskSpec | bytes | tuple[Any, ...]) -> TaskSpec:
    """What `packed` got."""
    if isinstance(spec, TaskSpec):
        return spec
    made, *held_by = (spec,) if isinstance(spec, bytes) else spec
    with giving(tuple(map(Anchor, held_by)) or None):
        task: TaskSpec = pickle.loads(made)
    return task


def run_packed(program: bytes, spec: Any, n_outs: int, *objects: Any) -> tuple[Any, ...]:
    """As `run_partition`: a pickled `Program`, and a `Meta` that is pickled too, if it may be."""
    task = unpacked(spec)
    meta, *outs = run_partition(pickle.loads(program), task, n_outs, *objects)
    plain = meta.failure is None and meta.sample is None
    return (pickle.dumps(meta, 5) if plain else meta, *outs)


def run_partition(program: Program, spec: TaskSpec, n_outs: int, *objects: Any) -> tuple[Any, ...]:
    """One attempt at one partition.

    Returns:
        A `Meta`, then n_outs results; or `Failure`s in their places. Then, where scatter_added
        are collected, a `Sum` for each region that the task has added to, or None.
    """

    def work(functions: Sequence[_Function]) -> tuple[list[Any], Any]:
        run = ProgramRun(program, functions, spec.slots, objects)
        return run.outs(run.items(), spec.partition, spec.bounds)

    return _attempt_at(program, spec, n_outs, work)


def combine_partials(function: Captured, spec: TaskSpec, *values: Any) -> Any:
    """Several partial results made one, in their order; a `Failure` where that raises."""
    for value in values:
        if isinstance(value, Failure):
            return value

    def work(functions: Sequence[_Function]) -> tuple[list[Any], Any]:
        (two,) = functions
        try:
            # It may change its first argument: what lies in Ray's store cannot be.
            return [functools.reduce(two, values[1:], copy.deepcopy(values[0]))], None
        except errors.ClamorError:
            raise
        except Exception as failure:  # any: it is the user's
            raise _Raised(f"{function.name} raised") from failure

    program = Program((), ((function, 0),), Folded(FunctionAt(0)))
    _, combined = _attempt_at(program, spec, 1, work)
    return combined


def _loaded(captured: Captured, first: int, spec: TaskSpec) -> _Function:
    """A function with the snapshots of its variables, of which the first has this number."""
    try:
        return _Function(captured, spec.snapshots[first : first + len(captured.variables)])
    except errors.ClamorError:
        raise
    except Exception as failure:  # any: of modules that it imports
        raise errors.FunctionFailedError(
            f"{captured.name} could not be loaded in the task's process: "
            f"{type(failure).__name__}: {failure}.",
            stage=spec.stage,
            partition=spec.partition,
            cause=type(failure).__name__,
            hint="Is each module that it uses installed on all nodes, in the same version? Ray's "
            "runtime_env (pip, working_dir, py_modules) brings them there.",
        ) from failure


def _attempt_at(
    program: Program,
    spec: TaskSpec,
    n_outs: int,
    work: Callable[[Sequence[_Function]], tuple[list[Any], Any]],
) -> tuple[Any, ...]:
    """Does the work with its functions loaded and its reads recorded, and says so."""
    start_ns = time.time_ns()
    sample, digest, failure = None, None, None
    added: tuple[Any, ...] = ()
    sums: Any = None
    with recording(spec.token) as context:
        context.moving = frozenset(map(id, itertools.compress(spec.snapshots, spec.moves)))
        if spec.scatter_adds:
            context.scatter_adds = Collector()
        try:
            ahead = report.fetch_ahead(spec)
            functions = [_loaded(captured, first, spec) for captured, first in program.functions]
            outs, sample = work(functions)
            if spec.snapshots:
                outs = [own.detached(out) for out in outs]
            if context.scatter_adds is not None:
                added, sums = context.scatter_adds.take()
            del functions, ahead
            if spec.check:
                digest = report.digest_of(outs)
                report.check(spec, digest)
        except (Exception, SystemExit) as raised:  # any: the user's, or a typed error of ours
            failure = Failure(_explained(raised, spec))
            outs = [failure] * n_outs
            added, sums = (), failure
        reads = tuple(context.reads())
        commits = context.commits
    n_items = n_bytes = 0
    array = None
    if failure is None and isinstance(program.out, Folded):
        (out,) = outs
        if type(out) in (np.ndarray, GlobalArray):
            array = (out.dtype.name if out.dtype.isnative else out.dtype.str, out.shape)
    elif failure is None:
        made = [out for out in outs if out is not None]
        n_items = sum(blocks.n_items(out) for out in made)
        n_bytes = sum(blocks.n_bytes(out) for out in made)
    meta = Meta(
        partition=spec.partition,
        attempt=spec.attempt,
        node_id=report.node_id(),
        start_ns=start_ns,
        end_ns=time.time_ns(),
        n_items=n_items,
        n_bytes=n_bytes,
        reads=reads,
        failure=failure,
        sample=sample,
        digest=digest,
        commits=commits,
        array=array,
        scatter_added=tuple(ref._packed() for ref in added),
        scatter_added_bytes=sum(one.n_bytes for one in sums.values()) if added else 0,
    )
    report.note(spec, meta, program)
    return (meta, *outs, sums or None) if spec.scatter_adds else (meta, *outs)
