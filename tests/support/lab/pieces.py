"""Where the pieces of a variable are: which node is the home of each."""

from __future__ import annotations

from typing import Any

from clamor_ray._protocol.names import server_id_of
from clamor_ray._session import process_sessions
from tests.support.lab.cluster import LocalCluster

BLOCK_BYTES = 4096


def homes_of_pieces(lab: LocalCluster, ref: Any) -> list[int]:
    """The node of each piece, parity pieces too, by the piece's index."""
    node_of = {server_id_of(node_id): index for index, node_id in enumerate(lab.node_ids)}
    rpc, groups = process_sessions.current().rpc, ref._pieces.groups
    regions = range(ref._region + 1, ref._region + 1 + groups.n_regions)
    return [node_of[rpc.lookup(region).homes[0]] for region in regions]


def blocks_of_piece(ref: Any, index: int) -> range:
    """The blocks of a data piece, as numbers of the variable's blocks."""
    piece = ref._piece_versions()[index]
    first = (piece.base_address - ref._base_address) // BLOCK_BYTES
    return range(first, first + piece.length_bytes // BLOCK_BYTES)


def lost_with(lab: LocalCluster, ref: Any, nodes: set[int]) -> set[int]:
    """What the homes lose of a variable with one parity for each group if these nodes are lost at
    once: the data of groups that lose more than one piece."""
    homes, groups = homes_of_pieces(lab, ref), ref._pieces.groups
    lost: set[int] = set()
    for group in range(groups.n_groups):
        gone = [index for index in groups.members(group) if homes[index] in nodes]
        if len(gone) > 1:
            data = [index for index in gone if not groups.is_parity(index)]
            lost.update(*(blocks_of_piece(ref, index) for index in data))
    return lost
