"""A ring of members as Python sees it: one C handle, types and exceptions. No Ray here.

The ring owns its sockets, and knows its members by rank; who they are, and how they found each
other, is `_ring.joining`'s.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import weakref
from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._native.base import PC_ERR_MEMBER, PC_ERR_MISMATCH, _Handle, c, check, error_for, ns

Op = Literal["sum", "prod", "min", "max", "mean"]
OPS: Final = {"sum": 0, "prod": 1, "min": 2, "max": 3, "mean": 4}
DTYPES: Final = {
    "float16": 0,
    "bfloat16": 1,
    "float32": 2,
    "float64": 3,
    "int32": 4,
    "int64": 5,
}
BYTES: Final = 6
KINDS: Final = ("allreduce", "reduce_scatter", "all_gather", "broadcast", "barrier")
MOST_DIMS: Final = 8
# The root of a barrier before a reduction by functions: it differs from all other calls.
BY_FUNCTION: Final = {"allreduce": 1, "reduce_scatter": 2}
MOST_ASKED: Final = 64  # calls that are remembered: loops make the same ones again
DEFAULT_SMALL_BYTES: Final = 32 << 10  # measured: docs/groups.md


def partners(position: int, n_members: int) -> list[int]:
    """Positions with which a position exchanges small arrays, ascending.

    Raises:
        RangeError: There is no such position.
    """
    out = c.ffi.new("uint32_t[34]")
    n = check(c.lib.pc_ring_partners(position, n_members, out))
    return [int(out[i]) for i in range(n)]


@functools.lru_cache(maxsize=64)
def dtype_code(dtype: np.dtype[Any]) -> int | None:
    """The code of a dtype that numbers are reduced in; None for others.

    Example:
        >>> dtype_code(np.dtype(np.float64)), dtype_code(np.dtype("U3"))
        (3, None)
    """
    return DTYPES.get(dtype.name) if dtype.isnative else None


def reduce_into(
    out: npt.NDArray[Any], one: npt.NDArray[Any], other: npt.NDArray[Any], op: str
) -> None:
    """Two arrays made one, element by element, in C and without the GIL.

    Args:
        out, one, other: contiguous, of one size and dtype that `dtype_code` knows; `out` may be one
            of the two.
        op: of `OPS`; "mean" is a sum.

    Raises:
        RangeError: There is no such operation.
    """
    assert out.size == one.size == other.size
    assert out.dtype == one.dtype == other.dtype
    code = dtype_code(out.dtype)
    assert code is not None
    check(c.lib.pc_reduce(code, OPS[op], pointer(out), pointer(one), pointer(other), out.size))


_rings: weakref.WeakSet[Ring] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    # C has closed the descriptors here: the parent's death must be seen by the others.
    for ring in list(_rings):
        ring._after_fork()
    _rings.clear()


os.register_at_fork(after_in_child=_after_fork_in_child)


class Ring(_Handle):
    """This process's end of a ring of members.

    Args:
        position: of this member in the ring.
        ranks: by position: the numbers that callers know members by.
        next_fds: connected sockets to the next member, one for each lane.
        previous_fds: from the one before.
        partner_fds: to `partners`, in their order.
        small_bytes: arrays up to that go by recursive doubling.

    The sockets are the ring's from now on, also where this raises.

    One call at a time: others raise `ExistsError`.
    """

    def __init__(
        self,
        position: int,
        ranks: Sequence[int],
        next_fds: Sequence[int],
        previous_fds: Sequence[int],
        partner_fds: Sequence[int],
        small_bytes: int = DEFAULT_SMALL_BYTES,
    ) -> None:
        super().__init__()
        ffi = c.ffi
        given = [*next_fds, *previous_fds, *partner_fds]
        try:
            if len(next_fds) != len(previous_fds):
                raise ValueError(f"{len(next_fds)} lanes out, and {len(previous_fds)} in")
            after = ffi.new("int[]", list(next_fds))
            before = ffi.new("int[]", list(previous_fds))
            beside = ffi.new("int[]", list(partner_fds))
            options = ffi.new("struct pc_ring_options *")
            numbers = ffi.new("uint32_t[]", list(ranks))
            options.position = position
            options.n_members = len(ranks)
            options.ranks = numbers
            options.n_lanes = max(1, len(next_fds))
            options.small_bytes = small_bytes
            options.next_fds = after if next_fds else ffi.NULL
            options.previous_fds = before if next_fds else ffi.NULL
            options.n_partner_fds = len(partner_fds)
            options.partner_fds = beside
            out = ffi.new("pc_ring **")
        except BaseException:  # any: C closes what it is given, and was given nothing
            for fd in given:
                os.close(fd)
            raise
        check(c.lib.pc_ring_open(options, out))
        self._opened(out[0])
        _rings.add(self)
        self.position = position
        self.rank = ranks[position]
        self.ranks = tuple(ranks)
        self.n_members = len(ranks)
        self._asked: dict[Any, Any] = {}

    def run(
        self,
        kind: str,
        shape: tuple[int, ...] = (),
        dtype: int = BYTES,
        op: str = "sum",
        root: int = 0,
        given: npt.NDArray[Any] | None = None,
        result: npt.NDArray[Any] | None = None,
        n_elements: int = 0,
        timeout_s: float = 60.0,
    ) -> None:
        """One collective operation: see `pc_ring_run`.

        Args:
            kind: one of `KINDS`.
            shape: what is compared between members, and named where it differs.
            dtype: see `dtype_code`.
            given, result: contiguous; the callers know that they fit.
            n_elements: of the call.
            timeout_s: without any progress.

        Raises:
            CollectiveMismatchError: Members ask for different things; nothing has moved.
            MemberLostError: One is gone or silent; the ring is broken.
            ClosedError, ExistsError.
        """
        key = (kind, shape, dtype, op, root)
        call = self._asked.get(key)
        if call is None:
            if len(self._asked) >= MOST_ASKED:
                self._asked.clear()
            call = self._asked[key] = _asked_for(*key)
        code = self._call(
            c.lib.pc_ring_run,
            call,
            pointer(given),
            pointer(result),
            n_elements,
            ns(timeout_s),
        )
        self._check(code, timeout_s)

    def agree_on_function(
        self, kind: str, shape: tuple[int, ...], dtype: int, timeout_s: float
    ) -> None:
        """That all members reduce arrays of this shape and dtype by a function of theirs.

        Args:
            kind: of `BY_FUNCTION`.

        Raises:
            As `run`.
        """
        self.run("barrier", shape, dtype, "mean", BY_FUNCTION[kind], timeout_s=timeout_s)

    def swap(self, out: Any, timeout_s: float) -> bytearray:
        """Sends bytes to the next member; what the one before sends.

        Raises:
            MemberLostError, ClosedError, ExistsError.
        """
        view = memoryview(out).cast("B")
        size = c.ffi.new("uint64_t *")
        self._check(
            self._call(c.lib.pc_ring_swap_sizes, view.nbytes, size, ns(timeout_s)), timeout_s
        )
        into = bytearray(size[0])
        code = self._call(
            c.lib.pc_ring_swap,
            c.ffi.from_buffer(view, require_writable=False),
            view.nbytes,
            c.ffi.from_buffer(into, require_writable=True),
            len(into),
            ns(timeout_s),
        )
        self._check(code, timeout_s)
        return into

    def _check(self, code: int, timeout_s: float) -> None:
        if code not in (PC_ERR_MEMBER, PC_ERR_MISMATCH):
            check(code)
            return
        fault = c.ffi.new("struct pc_ring_fault *")
        self._call(c.lib.pc_ring_fault, fault)
        if fault.err == PC_ERR_MISMATCH:
            raise errors.CollectiveMismatchError(
                f"Member {fault.member} asked for {_name_of_call(fault.call)}, and member "
                f"{fault.other} for {_name_of_call(fault.other_call)}.",
                code=code,
            )
        if fault.err != PC_ERR_MEMBER:  # broken by an earlier call
            raise error_for(code)
        text = (
            f"Member {fault.member} of the group did nothing for {timeout_s:g} s."
            if fault.is_silent
            else f"The connection to member {fault.member} of the group has ended."
        )
        error = errors.MemberLostError(text, code=code)
        error.member = int(fault.member)
        raise error

    def _after_fork(self) -> None:
        self._calls.clear()  # they are in threads that are not here
        self.poison(errors.ForkedError("The group's connections are the parent process's."))

    def shut(self) -> None:
        """Ends calls that run in other threads, and all that come, with `ClosedError`."""
        pointer = self._pointer
        if pointer is not None and not self.closed:
            check(self._call(c.lib.pc_ring_shut))

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # of a half-made one, or when the process ends
            self.close()

    def close(self) -> None:
        """Closes all sockets; the other members see this one gone. Idempotent."""
        pointer = self._take()
        if pointer is None:
            return
        check(c.lib.pc_ring_shut(pointer))
        self._drain()
        check(c.lib.pc_ring_close(pointer))


def _asked_for(kind: str, shape: tuple[int, ...], dtype: int, op: str, root: int) -> Any:
    call = c.ffi.new("struct pc_ring_call *")
    call.kind = KINDS.index(kind)
    call.dtype = dtype
    call.op = OPS[op]
    call.root = root
    call.n_dims = min(len(shape), MOST_DIMS)
    dims = [*shape[: MOST_DIMS - 1], math.prod(shape[MOST_DIMS - 1 :])]
    for i in range(call.n_dims):
        call.dims[i] = dims[i]
    return call


def pointer(array: npt.NDArray[Any] | None) -> Any:
    """Where a contiguous array lies, as C takes it; it is not freed while that is there."""
    if array is None:
        return c.ffi.NULL
    try:
        return c.ffi.from_buffer(array)  # an eighth of the time of the interface below
    except (TypeError, ValueError):  # bfloat16 has no buffer
        return c.ffi.cast("void *", array.__array_interface__["data"][0])


def address(array: npt.NDArray[Any]) -> int:
    """The same as a number."""
    return int(c.ffi.cast("uintptr_t", pointer(array)))


def _name_of_call(call: Any) -> str:
    """What a member asked for, in words."""
    kind = KINDS[call.kind] if call.kind < len(KINDS) else f"operation {call.kind}"
    functions = {root: name for name, root in BY_FUNCTION.items()}
    if kind == "barrier" and call.root not in functions:
        return "a barrier"
    names = {code: name for name, code in DTYPES.items()}
    dims = ", ".join(str(int(call.dims[i])) for i in range(min(call.n_dims, MOST_DIMS)))
    shape = f"({dims},)" if call.n_dims == 1 else f"({dims})"
    if kind == "barrier":
        name = functions[call.root]
        return f"{name} of {names.get(call.dtype, 'bytes')} of shape {shape} by a function"
    text = f"{kind} of {names.get(call.dtype, 'bytes')} of shape {shape}"
    if kind in ("allreduce", "reduce_scatter"):
        text += f" by {next((name for name, code in OPS.items() if code == call.op), '?')}"
    if kind == "broadcast":
        text += f" from member {call.root}"
    return text
