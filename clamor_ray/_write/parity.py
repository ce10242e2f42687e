"""What a commit brings to the parity pieces of a variable (`clamor_ray._redundancy`).

The writer has the old and the new bytes, so it says what changes: their XOR. Of a piece of which
there are copies it says the new bytes. (Camelot, section 3.5, without its reads before writes.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from pyroaring import BitMap

from clamor_ray._native.base import Runs
from clamor_ray._native.client import ParityMember
from clamor_ray._native.pieced_client import PiecedClient, PiecePart
from clamor_ray._objects import block_sets
from clamor_ray._read.ref import GlobalRef


class ParityPart(NamedTuple):
    """One parity piece of a commit.

    Args:
        region: of it.
        version: of it, at the version that the transaction began at.
        parts: of its group's data pieces, those that are written.
        is_copy: it has the same bytes as the one data piece.
        were_lost: blocks of these pieces that nobody has, by region.
    """

    region: int
    version: int
    parts: tuple[PiecePart, ...]
    is_copy: bool
    were_lost: Mapping[int, BitMap]

    def runs(self) -> Runs:
        """The blocks that change: those that any of the pieces changes."""
        return _runs(BitMap.union(*(blocks_of(part.runs) for part in self.parts)))

    def _members(self) -> Iterator[ParityMember]:
        for part in self.parts:
            lost = self.were_lost.get(part.region, BitMap())
            whole = ParityMember(
                part.mapping_id, part.runs, region=part.region, version=part.version
            )
            if self.is_copy or not lost:
                yield whole
                continue
            written = blocks_of(part.runs)
            for blocks, was_lost in ((written - lost, False), (written & lost, True)):
                if blocks:
                    yield whole._replace(runs=_runs(blocks), was_lost=was_lost)

    def stage(self, client: PiecedClient, commit_id: int, timeout_s: float) -> int:
        """Copies what changes to this node's page server.

        Returns:
            Its id.

        Raises:
            See `Client.stage_parity`.
        """
        members = list(self._members())
        return client.stage_parity(
            self.region, commit_id, members, delta=not self.is_copy, timeout_s=timeout_s
        ).server_id


def blocks_of(runs: Runs) -> BitMap:
    """The numbers of the blocks in these runs."""
    blocks = BitMap()
    for first, n_blocks in runs.tolist():
        blocks.add_range(first, first + n_blocks)
    return blocks


def _runs(blocks: BitMap) -> Runs:
    return np.array(block_sets.runs(blocks), np.uint64).reshape(-1, 2)


def parities_of(
    begin: GlobalRef[object], parts: Iterable[PiecePart], were_lost: Mapping[int, BitMap]
) -> tuple[ParityPart, ...]:
    """The parity pieces that a commit changes with some blocks of a variable.

    Args:
        begin: the version that the transaction began at.
        parts: the blocks.
        were_lost: blocks that nobody has of that version, by piece.
    """
    if begin._pieces is None or not begin._pieces.width:
        return ()
    groups, first = begin._pieces.groups, begin._region + 1
    by_group: dict[int, list[PiecePart]] = {}
    for part in parts:
        by_group.setdefault(groups.group_of(part.region - first), []).append(part)
    return tuple(
        ParityPart(
            region=first + index,
            version=begin._state.row[index],
            parts=tuple(some),
            is_copy=groups.are_copies,
            were_lost=were_lost,
        )
        for group, some in by_group.items()
        for index in groups.parity_of(group)
    )
