"""What the driver and the `AllReduce` actors of a split aggregation say to each other.

How values are merged, what an aggregate consists of, and which ring reduces them among nodes.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from clamor_ray import errors
from clamor_ray._native.ring import dtype_code

UFUNCS: Final = {
    "sum": np.add,
    "prod": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}
RING_TIMEOUT_S: Final = 60.0
FETCH_S: Final = 5.0  # that a merge waits for an object, at first


class NotYet(NamedTuple):
    """An object is not there yet: the driver asks for its merge again."""


@dataclass(frozen=True)
class RingPlan:
    """A ring as one of its members is told of it.

    Args:
        name: of this composition of it; another one is another ring.
        size: members.
        rank: of this one.
        lanes: connections between neighbours.
    """

    name: str
    size: int
    rank: int
    lanes: int


class AggregateLayout(NamedTuple):
    """What an aggregate consists of; of one run it is the same on all nodes.

    Args:
        dtype: name of the arrays' dtype; "": objects, reduced in Python.
        shapes: of the arrays, by segment; of objects, as many `()` as there are segments.
    """

    dtype: str
    shapes: tuple[tuple[int, ...], ...]

    def __str__(self) -> str:
        if not self.dtype:
            return "objects that are no arrays of numbers"
        shapes = list(dict.fromkeys(self.shapes))
        told = ", ".join(map(str, shapes[:3])) + (", ..." if len(shapes) > 3 else "")
        return f"{self.dtype} of shape {told}"


class FailedFunction(NamedTuple):
    """A function of the user's has raised; travels in place of what it would have made."""

    error: errors.ClamorError


def raised(what: str, where: str, failure: BaseException) -> errors.ClamorError:
    """What the user is told of it.

    Args:
        what: the function, by its role and name.
        where: on what.
    """
    if isinstance(failure, errors.ClamorError):
        failure.args = (f"{failure.message} {what} raised it, {where}.",)
        failure.__traceback__ = None
        return failure
    frames = traceback.extract_tb(failure.__traceback__)[1:]  # the first is the caller's of it
    lines = ["Traceback (most recent call last):\n", *traceback.format_list(frames)]
    told = "".join(lines + traceback.format_exception_only(type(failure), failure)).rstrip()
    kind = f"{type(failure).__module__}.{type(failure).__qualname__}".removeprefix("builtins.")
    return errors.FunctionFailedError(
        f"{what} raised, {where}:\n\n{told}\n\n", stage="split_aggregate", cause=kind
    )


@dataclass(frozen=True)
class How:
    """How values are merged.

    Args:
        op: of `UFUNCS`, or None: by `reduce`.
        n_segments: that a value is cut into; 0: it is an array, and goes as a whole.
        split: (value, index, n_segments) -> segment.
        reduce: (segment, segment) -> segment, for what is no array of numbers. It may change the
            first and return it. None: `op`, as NumPy's.
        names: of the two, for people.
    """

    op: str | None
    n_segments: int = 0
    split: Callable[[Any, int, int], Any] | None = None
    reduce: Callable[[Any, Any], Any] | None = None
    names: tuple[str, str] = ("split_op", "reduce_op")

    def segments(self, value: Any, partition: int) -> list[Any]:
        """Of a partition's value.

        Raises:
            FunctionFailedError: `split` raised.
        """
        if self.split is None:
            return [value]
        made = []
        for index in range(self.n_segments):
            try:
                made.append(self.split(value, index, self.n_segments))
            except KeyboardInterrupt:
                raise
            except BaseException as failure:  # any, also an exit: it is the user's
                where = f"at segment {index} of {self.n_segments} of partition {partition}"
                raise raised(self.names[0], where, failure) from None
        return made

    def two(self, one: Any, other: Any, where: str) -> Any:
        """Two segments made one.

        Raises:
            FunctionFailedError: `reduce` raised.
        """
        function = self.reduce
        if function is None:
            assert self.op is not None
            function = UFUNCS[self.op]
        try:
            return function(one, other)
        except KeyboardInterrupt:
            raise
        except BaseException as failure:  # any, also an exit: it is the user's
            raise raised(self.names[1], where, failure) from None

    def layout(self, segments: Sequence[Any]) -> AggregateLayout:
        """Arrays of one dtype that C reduces, or objects."""
        if self.op is not None and segments:
            first = segments[0]
            plain = all(type(s) is np.ndarray and s.dtype == first.dtype for s in segments)
            if plain and dtype_code(first.dtype) is not None:
                return AggregateLayout(first.dtype.name, tuple(s.shape for s in segments))
        return AggregateLayout("", ((),) * len(segments))


def differ(
    one: tuple[int, AggregateLayout], other: tuple[int, AggregateLayout]
) -> errors.CollectiveMismatchError:
    """Two partitions' values that cannot be reduced element by element."""
    return errors.CollectiveMismatchError(
        f"Partition {one[0]} made {one[1]}, and partition {other[0]} {other[1]}.",
        hint="What all partitions make must have one shape and dtype: begin with a zero of it, and "
        "have seq_op keep it.",
    )
