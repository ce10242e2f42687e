"""Sums for the way to another node: their ids in few bytes. Pure."""

from __future__ import annotations

from typing import NamedTuple

from clamor_ray._objects.packed_ids import Bits, Ids, pack, unpack
from clamor_ray._write.deltas import OPS, Array, Rows, Sum


class PackedSum(NamedTuple):
    """A `Sum` on its way.

    Args:
        dense: as there.
        rows: of each operation that has any: its name, ids, values.
    """

    dense: Array | None
    rows: tuple[tuple[str, Ids | Bits, Array], ...]


def pack_sum(total: Sum) -> PackedSum:
    """A sum, packed."""
    found = []
    for op in OPS:
        rows: Rows | None = getattr(total, op)
        if rows is not None:
            found.append((op, pack(rows.ids), rows.values))
    return PackedSum(total.dense, tuple(found))


def unpack_sum(packed: PackedSum | Sum) -> Sum:
    """The sum; what is none that was packed stays."""
    if isinstance(packed, Sum):
        return packed
    rows = {op: Rows(unpack(ids), values) for op, ids, values in packed.rows}
    return Sum(packed.dense, **rows)
