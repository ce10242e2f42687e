"""Private mappings that will be written all over: their blocks come at once, not one by one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from clamor_ray._native import scatter
from clamor_ray._native.client import Runs
from clamor_ray._read.lease import Lease
from clamor_ray._session.session import Session
from clamor_ray._write.deltas import Array

FEW_BLOCKS: Final = 32  # whose faults cost less than asking ahead


def bring(session: Session, lease: Lease | None, array: Array, ids: Iterable[Any]) -> None:
    """Makes the blocks that will be written resident, and this process's own.

    Args:
        lease: of the private mapping; None: the variable is inside its reference.
        array: over it.
        ids: of rows, uint32 or uint64; None: all of the array.
    """
    if lease is None or not array.nbytes or not array.flags.c_contiguous:
        return
    address = lease.mapping.address
    offset_bytes = array.__array_interface__["data"][0] - address
    for each in ids:
        if each is None:
            runs: Runs = np.array([_blocks(offset_bytes, array.nbytes)], np.uint64)
        else:
            row_bytes = array.nbytes // len(array)
            runs = scatter.blocks(offset_bytes, row_bytes, len(array), each)
        if runs[:, 1].sum() < FEW_BLOCKS:
            continue
        lease.prefetch(runs, wait=True, timeout_s=session.config.patience_s)
        scatter.populate(address, runs)


def _blocks(offset_bytes: int, n_bytes: int) -> tuple[int, int]:
    first = offset_bytes >> 12
    return first, ((offset_bytes + n_bytes - 1) >> 12) - first + 1
