"""What actions and built-in operators do with a partition, as functions that go to tasks."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayError

from clamor_ray import errors
from clamor_ray._protocol.attempt_record import Failure
from clamor_ray._protocol.split_aggregation import raised
from clamor_ray.collection.data import aggregates, blocks
from clamor_ray.collection.data.blocks import Items
from clamor_ray.collection.io import sinks
from clamor_ray.collection.options import Options
from clamor_ray.collection.plan.functions import Captured, name_of
from clamor_ray.collection.plan.task_messages import TaskSpec
from clamor_ray.collection.run.task import _Raised as Raised
from clamor_ray.collection.run.task import combine_partials

NOTHING: Final = object()
LARGE_BYTES: Final = 64 << 10  # zeros of that size do not travel


def look_up(batch: Any, table: Any, default: Any, on: str | None, into: str) -> Any:
    """A batch's keys in a hash map; see `DataCollection.lookup`."""
    if isinstance(batch, dict):
        if on is None and len(batch) == 1:
            (on,) = batch
        if on is None or on not in batch:
            there = ", ".join(repr(name) for name in batch) or "none"
            raise errors.MissingColumnError(
                f"There is no column {on!r} of keys; there are {there}."
            )
        return {**batch, into: _values(batch[on], table, default)}
    if on is not None:
        raise errors.MissingColumnError(f"There is no column {on!r}: these items are no tables.")
    return _values(batch, table, default)


def _values(keys: Any, table: Any, default: Any) -> Any:
    keys = np.asarray(keys)
    if keys.dtype == object and len(keys):
        # Text and bytes of a map of bytes; what is neither is refused by the map.
        keys = np.array([key.encode() if isinstance(key, str) else key for key in keys.tolist()])
    if not len(keys):
        return np.empty((0, *table.row_shape), table.value_dtype)
    return table.get(keys, default)


def count(items: Items, partition: int) -> int:
    """Number of a partition's items."""
    return blocks.n_items(items)


def partial(items: Items, partition: int, what: str, on: Any) -> Any:
    """A partition's share of an aggregate."""
    return aggregates.partial(items, what, on)


def is_of_nothing(partial: aggregates.Partial) -> bool:
    """Whether it is of a partition without items."""
    return not any(state.count for state in partial.states.values())


def reduced(items: Items, partition: int, function: Callable[[Any, Any], Any]) -> tuple[Any, ...]:
    """A partition's items made one; () where there are none."""
    values = list(blocks.items(items))
    return (functools.reduce(function, values),) if values else ()


class Zeros(NamedTuple):
    """An array of zeros, which need not travel."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def packed_zero(zero: Any) -> Any:
    """As tasks get it: see `folded`."""
    if type(zero) is not np.ndarray or zero.nbytes < LARGE_BYTES or zero.dtype.hasobject:
        return zero
    if not zero.flags.c_contiguous or zero.reshape(-1).view(np.uint8).any():  # -0.0 is no zero
        return zero
    return Zeros(zero.shape, zero.dtype)


def folded(items: Items, partition: int, zero: Any, function: Callable[[Any, Any], Any]) -> Any:
    """A partition's items folded into a copy of zero."""
    begin = np.zeros(*zero) if isinstance(zero, Zeros) else copy.deepcopy(zero)
    return functools.reduce(function, blocks.items(items), begin)


def folded_for_split(
    items: Items, partition: int, zero: Any, function: Callable[[Any, Any], Any], name: str
) -> Any:
    """As `folded`; says whose function it is that raises."""
    try:
        return folded(items, partition, zero, function)
    except Exception as failure:  # any: it is the user's
        raise Raised(f"seq_op ({name}) raised") from failure


def n_bytes(references: Sequence[Any]) -> int:
    """Of results that lie in nodes' object stores, as their owner, this process, knows it."""
    known = ray.experimental.get_object_locations(list(references))
    there = [each for each in known.values() if each["node_ids"] or each["did_spill"]]
    return sum(each["object_size"] or 0 for each in there)


def combined(
    what: str, function: Callable[[Any, Any], Any], values: Iterable[Any], zero: Any = NOTHING
) -> Any:
    """Partial results made one on the driver, in their order.

    Args:
        what: the function's part in the action.
        function: it may change its first argument, and return either.
        values: arrays among them may lie in Ray's store, and be read-only.
        zero: where it begins; else with the first value.

    Raises:
        FunctionFailedError: It raised.
    """
    begin, rest = zero, iter(values)
    try:
        begin = copy.deepcopy(next(rest) if zero is NOTHING else zero)
        for value in rest:
            # The function may return what it is given here, and then change it.
            begin = function(begin, value if _is_plain(value) else copy.deepcopy(value))
    except Exception as failure:  # any: it is the user's
        raise raised(f"{what} ({name_of(function)})", "on the driver", failure) from failure
    return begin


def _is_plain(value: Any) -> bool:
    return isinstance(value, (int, float, complex, str, bytes, np.generic))


def as_table(batch: Any) -> Any:
    """A batch in Arrow's format, as it is."""
    return batch


def write(items: Items, partition: int, run: sinks.ParquetRun, options: dict[str, Any]) -> str:
    """Writes a partition's file; its path."""
    return sinks.write_parquet_part(
        items, run.path, partition, run.run_id, run.filesystem, **options
    )


def fetch(references: Sequence[Any]) -> list[Any]:
    """The results of tasks.

    Raises:
        ClamorError: One of them came again, after its node was lost, and failed this time.
    """
    try:
        found = ray.get(list(references))
    except RayError as failure:
        cause = getattr(failure, "cause", None)
        if isinstance(cause, errors.ClamorError):
            raise cause from None
        raise errors.FunctionFailedError(
            f"A partition was lost, and could not be computed again: "
            f"{type(failure).__name__}: {failure}",
            cause=type(failure).__name__,
            hint="Ray says above why. refresh() or execute() of a new collection starts anew.",
        ) from failure
    for value in found:
        if isinstance(value, Failure):
            raise value.error
    return list(found)


def combine(function: Captured, spec: TaskSpec, references: Sequence[Any], options: Options) -> Any:
    """Several partial results made one, by a task; a reference to it."""
    task = ray.remote(combine_partials).options(
        num_cpus=options.num_cpus, max_retries=options.max_retries, name=spec.stage
    )
    return task.remote(function, spec, *references)
