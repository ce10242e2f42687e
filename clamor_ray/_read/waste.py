"""Warns of faults that fetch far more than is touched: once in each process.

Each mapping comes with what its node's page server knows of the variable (`Mapping.wastes`).
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from clamor_ray import errors
from clamor_ray._errors.base import level_of_caller

if TYPE_CHECKING:
    from clamor_ray._read.ref import GlobalRef

_told: set[int] = set()  # processes; a child of fork is warned too


def warn(ref: GlobalRef[Any]) -> None:
    """Says what to do instead, where this process has not said so.

    Args:
        ref: the variable.

    Raises:
        ClamorWarning: Where a filter of `warnings` makes errors of these.
    """
    if os.getpid() in _told:
        return
    _told.add(os.getpid())
    warnings.warn(
        f"Page faults on this node have fetched far more of {ref!r} than was touched: it is read "
        "here and there. Gather the rows (clamor.gather(ref, ids), or table[ids] on what get() "
        "returns), or fetch single blocks (ref.get(page_bytes=4096)). clamor.stats().region(ref) "
        "has the numbers.",
        errors.ClamorWarning,
        stacklevel=level_of_caller(),
    )
