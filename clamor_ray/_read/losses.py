"""Warns of lost blocks: once in each process for each loss of blocks of a variable.

Each mapping comes with the number of its variable's loss (`Mapping.loss`), which is 0 where nothing
is lost: then nobody asks anybody. Else the registry is asked once which blocks these are, and why.
A process that Ray did not start, or a fork, cannot ask it: there the warning says no more than
that blocks are lost.
"""

from __future__ import annotations

import os
import warnings
from typing import TYPE_CHECKING, Any

from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._errors.base import level_of_caller
from clamor_ray._objects.block_sets import runs

if TYPE_CHECKING:
    from clamor_ray._read.ref import GlobalRef
    from clamor_ray._session.session import Session

# (process, scope, region, loss) that was warned of; a child of fork is warned too.
_told: set[tuple[int, str, int, int]] = set()


def warn(session: Session, ref: GlobalRef[Any], loss: int) -> None:
    """Says which blocks of the variable are lost, where this process has not said so.

    Args:
        session: of the variable.
        ref: the variable.
        loss: number of its loss, not 0.

    Raises:
        LostBlocksWarning: Where a filter of `warnings` makes errors of these; the next call
            raises it again.
    """
    key = (os.getpid(), ref._scope, ref._region, loss)
    if key in _told:
        return
    try:
        found = session.rpc.lost_blocks(ref._region)
    except (errors.NotInitializedError, errors.ForkedError):  # it can never ask
        text = (
            f"Blocks of {ref!r} are lost. This process cannot ask which. Open the variable in the "
            "process that started this one, or in a Ray task: that one is told."
        )
        warnings.warn(errors.LostBlocksWarning(text, ref._region), stacklevel=level_of_caller())
        _told.add(key)
        return
    except errors.ClamorError as failure:  # it is asked again with the next mapping
        text = f"Blocks of {ref!r} are lost. The registry does not say now which: {failure.message}"
        warnings.warn(errors.LostBlocksWarning(text, ref._region), stacklevel=level_of_caller())
        return
    if found is not None:  # else commits have written them meanwhile
        error = found.error(ref._label)
        warning = errors.LostBlocksWarning(
            f"{error.message} {error.hint}", ref._region, runs(BitMap.deserialize(found.blocks))
        )
        warnings.warn(warning, stacklevel=level_of_caller())
    _told.add(key)
