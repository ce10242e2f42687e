"""What a transaction is asked to change: references, objects that hold one, and objects that
were opened from one in this process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from clamor_ray._objects.inplace import address_of
from clamor_ray._objects.layout import dump
from clamor_ray._read.lease import Leased, inline_images
from clamor_ray._read.ref import GlobalRef
from clamor_ray._session import process_sessions

# Never taken apart to find out whether their parts are global: it may take minutes.
_PLAIN = (int, float, complex, bool, str, bytes, bytearray, type(None))


@dataclass(frozen=True)
class WriteTarget:
    """One variable of a transaction.

    Args:
        ref: where it begins; the very reference that moves on commit, unless it is frozen.
        open_as: makes what the block gets of the rebuilt object.
        private: says what the user passed, where it is a private copy.
    """

    ref: GlobalRef[Any]
    open_as: Callable[[Any], Any] | None = None
    private: str = ""

    @property
    def key(self) -> tuple[str, int]:
        """Names the variable."""
        return self.ref._scope, self.ref._region


def write_target_of(value: Any) -> WriteTarget:
    """Finds the variable behind what a user passed.

    Raises:
        TypeError: It is no global variable, nor a part of one.
        ValueError: It is a part of one.
    """
    if isinstance(value, GlobalRef):
        return WriteTarget(value)
    ref_of = getattr(type(value), "__clamor_ref__", None)
    if ref_of is not None:
        return WriteTarget(ref_of(value), value.__clamor_open__)
    return _target_of_object(value)


def _look_up(address: int) -> Leased | None:
    found = process_sessions.at_address(address)
    return inline_images.at(address) if found is None else found[1]


def _target_of_object(obj: Any) -> WriteTarget:
    name = f"{type(obj).__module__}.{type(obj).__qualname__}".removeprefix("builtins.")
    unknown = TypeError(
        f"this {name} is no global variable: pass a GlobalRef, or the object that "
        "GlobalRef.get() or the argument of a clamor.remote task gave"
    )
    if isinstance(obj, _PLAIN):
        raise unknown
    if isinstance(obj, np.ndarray):
        # Before it is taken apart: a strided view would be copied for that.
        leased = _look_up(obj.__array_interface__["data"][0])
        if leased is None:
            raise unknown
        contiguous = obj.flags.c_contiguous or obj.flags.f_contiguous
        have = [(obj.__array_interface__["data"][0], obj.nbytes)] if contiguous else []
    else:
        _, views, _ = dump(obj)
        have = [(address_of(view), view.nbytes) for view in views if view.nbytes]
        leased = _look_up(have[0][0]) if have else None
    if leased is None or leased.snapshot is None:
        raise unknown
    snapshot = leased.snapshot
    begin = leased.mapping.address
    if have != [(begin + offset, n) for offset, n in snapshot._plan.buffers if n]:
        raise ValueError(
            f"this {name} is a part of {snapshot!r}: a transaction opens whole variables; pass the "
            "object that the part was taken from, or the reference"
        )
    private = f"this {name} is a private copy of {snapshot!r}" if leased.writable else ""
    return WriteTarget(snapshot._thawed(), private=private)
