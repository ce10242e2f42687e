"""`GlobalRef`: a global variable's snapshot as a value of a few hundred bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from clamor_ray import errors
from clamor_ray._layout import Plan, format_bytes, put_together

T = TypeVar("T")
Mode = Literal["r", "c"]


def _restore(fields: tuple[Any, ...], freed: bool) -> GlobalRef[Any]:
    ref: GlobalRef[Any] = GlobalRef(*fields)
    if freed:
        ref._mark_freed()
    return ref


@dataclass(frozen=True, repr=False)
class GlobalRef(Generic[T]):
    """A snapshot of a global variable: which region, which version, and how the object lies in it.

    Made by `clamor.put`, `clamor.zeros` and `clamor.share`. Pickling it ships metadata only, or,
    for an object below 4 KiB, the object. It may be passed to tasks and actors, kept, and
    compared; it stays valid until `clamor.free` or the end of the session.

    Args:
        region: id of the region; 0 where the object travels inside.
        version: number of commits behind the content.
        base_address: where every process maps it.
        length_bytes: of the region, whole blocks.
        plan: what lies where.
        scope: the session it belongs to.
        payload: the content, where it travels inside.

    Example:
        >>> ref = clamor.put(numpy.arange(10**6))   # doctest: +SKIP
        >>> ref.get()[500_000]                      # doctest: +SKIP
        500000
    """

    region: int
    version: int
    base_address: int
    length_bytes: int
    plan: Plan
    scope: str
    payload: bytes | None = None

    @property
    def nbytes(self) -> int:
        """Size of the object: its pickle stream and its buffers."""
        return self.plan.total_bytes

    @property
    def inline(self) -> bool:
        """Whether the object travels inside the reference."""
        return self.payload is not None

    def get(self, mode: Mode = "r") -> T:
        """The object, over memory that all processes of this node share.

        Only its pickle stream is read now; buffers are fetched block by block when they are
        touched. The object's arrays keep the lease: it lasts as long as they do.

        Args:
            mode: "r" gives read-only arrays. "c" gives private copy-on-write ones, for libraries
                that insist on writable buffers: what is written stays in this process and is
                lost with the object.

        Raises:
            FreedError: The variable was freed.
            SessionMismatchError: The reference is from a session that has ended.
            HomeLostError: The node that held it is gone.
            NotInitializedError: In a driver before `clamor.init()`.

        Safe from any thread.

        Example:
            >>> clamor.put({"weights": w}).get()["weights"][0]   # doctest: +SKIP
        """
        return self._open(mode)[0]

    def _open(self, mode: Mode = "r", read_set: str = "off") -> tuple[T, Any]:
        """The object and its lease; the lease is None where the object travels inside."""
        if mode not in ("r", "c"):
            raise ValueError(f"mode is 'r' or 'c', not {mode!r}")
        self._check_not_freed()
        if self.payload is not None:
            image = np.frombuffer(self.payload, np.uint8)
            return put_together(image.copy() if mode == "c" else image, self.plan), None
        from clamor_ray import _session

        session = _session.current(self.scope)
        lease = session.open(self, private=mode == "c", read_set=read_set)
        return put_together(lease.bytes(), self.plan), lease

    @property
    def freed(self) -> bool:
        """Whether this very reference was given to `clamor.free`."""
        return "_freed" in self.__dict__

    def _mark_freed(self) -> None:
        self.__dict__["_freed"] = True

    def _check_not_freed(self) -> None:
        if self.freed:
            raise errors.FreedError(f"{self!r} was freed.")

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (
            self.region,
            self.version,
            self.base_address,
            self.length_bytes,
            self.plan,
            self.scope,
            self.payload,
        )
        return _restore, (fields, self.freed)

    def __repr__(self) -> str:
        size = format_bytes(self.nbytes)
        if self.inline:
            return f"GlobalRef(inline, {size})"
        return f"GlobalRef(region={self.region}, version={self.version}, {size})"
