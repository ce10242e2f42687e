"""What is copied together: chunks of one node, for one data file. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from pyroaring import BitMap

from clamor_ray._backup.chunks import CHUNK_BLOCKS, CHUNK_BYTES
from clamor_ray._backup.copying import FILE_BYTES, Copied, CopyOrder, OrdersOf
from clamor_ray._backup.graph import GraphVariable
from clamor_ray._objects.layout import BLOCK_BYTES
from clamor_ray._protocol.messages import CheckpointVariable
from clamor_ray._read.ref import GlobalRef
from clamor_ray._redundancy.levels import SPREAD, Level

MOST_OF_UNIT: Final = 256  # variables
DENSE_BLOCKS: Final = 1 << 24  # with more of them each chunk is looked at


@dataclass
class Unit:
    """What becomes one data file.

    Args:
        node_id: Ray's hex id of the node where the data is.
        n_bytes: of it.
        refs, orders: of each variable, by its number in the checkpoint.
    """

    node_id: str
    n_bytes: int = 0
    refs: dict[int, GlobalRef[Any]] = field(default_factory=dict)
    orders: dict[int, list[CopyOrder]] = field(default_factory=dict)

    def packed(self) -> list[OrdersOf]:
        """For `copy_chunks`."""
        return [OrdersOf(self.refs[index], tuple(self.orders[index])) for index in self.orders]

    def results(self, found: list[list[Copied]]) -> Iterator[tuple[int, CopyOrder, Copied]]:
        """What `copy_chunks` says of each chunk: (number of its variable, order, what it says)."""
        for (index, orders), copied in zip(self.orders.items(), found, strict=True):
            for order, each in zip(orders, copied, strict=True):
                yield index, order, each


def level_of_known(known: CheckpointVariable | None) -> Level | None:
    """How it is placed, as far as that can be seen; None: it has one home."""
    record = known.record if known is not None else None
    if known is None or record is None:
        return None
    is_here = len(set(known.nodes)) == 1
    if not record.n_pieces:
        return Level("raid0", spill=True, is_here=True) if record.on_disk else None
    if not record.group_width:
        return SPREAD._replace(spill=record.on_disk, is_here=record.on_disk and is_here)
    if record.group_width == 1:
        return Level("raid1", copies=record.group_parity + 1, spill=record.on_disk)
    parities = known.nodes[record.n_pieces :]
    is_fixed = len(parities) > 1 and len(set(parities)) == 1
    return Level("raid4" if is_fixed else "raid5", spill=record.on_disk)


def chunks_with(blocks: BitMap) -> list[int]:
    """Numbers of the chunks that have some of the blocks, ascending."""
    if not blocks:
        return []
    if len(blocks) < DENSE_BLOCKS:
        numbers = np.frombuffer(blocks.to_array(), np.uint32) // CHUNK_BLOCKS
        found: list[int] = np.unique(numbers).tolist()
        return found
    last = blocks.max() // CHUNK_BLOCKS
    return [chunk for chunk in range(last + 1) if blocks.range_cardinality(*_bounds(chunk))]


def _bounds(chunk: int) -> tuple[int, int]:
    return chunk * CHUNK_BLOCKS, (chunk + 1) * CHUNK_BLOCKS


def blocks_of_chunk(chunk: int) -> BitMap:
    """Numbers of all blocks of a chunk."""
    return BitMap(range(*_bounds(chunk)))


class Units:
    """Orders, put together to one for each data file.

    Args:
        here: Ray's hex id of this node.
    """

    def __init__(self, here: str) -> None:
        self._here = here
        self._done: list[Unit] = []
        self._open: dict[str, Unit] = {}  # by node

    def add(self, saved: GraphVariable, index: int, order: CopyOrder) -> None:
        """Copies a chunk.

        Args:
            saved: the variable.
            index: its number in the checkpoint.
            order: the chunk.
        """
        node_id = self._node_of(saved, order.chunk)
        unit = self._open.setdefault(node_id, Unit(node_id))
        n_bytes = len(BitMap.deserialize(order.blocks)) * BLOCK_BYTES
        is_full = unit.n_bytes + n_bytes > FILE_BYTES and unit.n_bytes
        if is_full or (len(unit.orders) >= MOST_OF_UNIT and index not in unit.orders):
            self._done.append(unit)
            unit = self._open[node_id] = Unit(node_id)
        unit.n_bytes += n_bytes
        unit.refs[index] = saved.ref
        unit.orders.setdefault(index, []).append(order)

    def _node_of(self, saved: GraphVariable, chunk: int) -> str:
        known = saved.known
        if known is None or known.record is None:
            return self._here
        piece_bytes = known.record.piece_bytes
        piece = chunk * CHUNK_BYTES // piece_bytes if piece_bytes else 0
        return known.nodes[piece] or self._here

    def all(self) -> Iterable[Unit]:
        """All of them."""
        return [*self._done, *self._open.values()]
