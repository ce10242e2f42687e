"""Variables in pieces of which some are lost: no Ray, page servers that are made up."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._redundancy.groups import PieceLayout
from clamor_ray.actors.commits.commits import Commits
from clamor_ray.actors.lost_homes.lost_blocks import Losses, LostBlocks
from clamor_ray.actors.lost_homes.rebuilds import Rebuilds
from clamor_ray.actors.registry.versions import Versions
from tests.support.rebuild_rig import HOME, OTHER, PEER, WAIT_S, World, lost_of, run

PIECE_BYTES = 2 << 20
PIECE_BLOCKS = PIECE_BYTES // 4096
N_PIECES = 3


class Pieces(World):
    """And a variable whose first piece is at PEER, the others at HOME; HOME is lost then."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        record = self.core.create_pieces(N_PIECES * PIECE_BYTES, PieceLayout(PIECE_BYTES), HOME)
        self.whole, self.pieces = record.region, list(record.pieces)
        records = [each for piece in self.pieces if (each := self.core.record_of(piece))]
        self.journal.create_region(record, 0, self.pieces[-1] + 1, records)
        for piece in records:
            self.core.seal(piece.region)
            self.log.open(piece.region, piece.homes, piece.length_bytes)
        self.core.rehome(self.pieces[0], PEER)
        self.log.rehome(self.pieces[0], PEER)
        self.losses = Losses()
        self.rebuilds = Rebuilds(
            self.core, self.log, self.journal, self.servers, losses=self.losses
        )
        commits = Commits(self.log, self.journal, self.servers, WAIT_S)
        self.versions = Versions(self.log, self.journal, commits, self.rebuilds, WAIT_S)

    def seal(self) -> None:
        self.core.seal(self.whole)
        self.log.open_pieces(self.whole, range(self.pieces[0], self.pieces[-1] + 1))


@pytest.fixture
def pieces(tmp_path: Path) -> Pieces:
    return Pieces(tmp_path)


def blocks_of(lost: LostBlocks | None) -> BitMap:
    return BitMap.deserialize(lost.blocks) if lost is not None else BitMap()


def test_a_piece_that_is_wholly_lost_is_lost_blocks_of_the_variable(pieces: Pieces) -> None:
    async def work() -> None:
        pieces.seal()
        pieces.servers.holders = {
            pieces.pieces[1]: {},
            pieces.pieces[2]: {OTHER: [(0, BitMap([0]))]},
        }
        pieces.lose(HOME)
        for piece in pieces.pieces:
            assert await pieces.rebuilds.settle(piece, WAIT_S)
            assert pieces.rebuilds.verdict(piece) is None
        orders = {order.record.region: lost_of(order) for _, order, _ in pieces.servers.orders}
        assert orders[pieces.pieces[1]] == BitMap(range(PIECE_BLOCKS))
        lost = pieces.versions.lost_blocks(pieces.whole)
        assert blocks_of(lost) == BitMap(range(PIECE_BLOCKS, N_PIECES * PIECE_BLOCKS)) - BitMap(
            [2 * PIECE_BLOCKS]
        )
        why = pieces.versions.why_lost(pieces.whole)
        assert why is not None
        assert f"Blocks of variable {pieces.whole} are lost: 1023 of 1536" in why.message
        assert "source=" in why.hint
        # It stays so after a restart of the registry.
        saved = dict(pieces.journal.load().lacking)
        assert blocks_of(saved[pieces.pieces[1]]) == BitMap(range(PIECE_BLOCKS))

    run(work)


def test_a_variable_whose_pieces_are_made_is_made_again(pieces: Pieces) -> None:
    """Else it would be sealed without what its maker has put there."""

    async def work() -> None:
        pieces.lose(HOME)
        with pytest.raises(errors.HomeLostError, match="is lost"):
            await pieces.rebuilds.settle(pieces.pieces[1], WAIT_S)

    run(work)
