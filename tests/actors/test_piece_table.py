"""Which pieces of a variable a commit must write together. Pure."""

from __future__ import annotations

import pytest
from pyroaring import BitMap

from clamor_ray._redundancy.groups import PieceGroups
from clamor_ray.actors.commits.committed import Entry
from clamor_ray.actors.commits.piece_table import PieceTable
from clamor_ray.errors import ProtocolError

WHOLE = 7
GROUPS = PieceGroups(n_pieces=3, width=2, n_parity=1)  # 8 9 10, and the parities 11 12


def entry(region: int, *blocks: int) -> Entry:
    packed = bytes(BitMap(blocks).serialize()) if blocks else b""
    return Entry(region, 1, 5, packed, changed=BitMap(blocks))


@pytest.fixture
def table() -> PieceTable:
    table = PieceTable()
    table.open(WHOLE, range(8, 13), GROUPS)
    return table


def check(table: PieceTable, *entries: Entry) -> None:
    table.check(entries, lambda region: f"variable {region}")


def test_what_is_written_together(table: PieceTable) -> None:
    whole = entry(WHOLE)
    check(table, whole)
    check(table, whole, entry(8, 1), entry(11, 1))
    check(table, whole, entry(8, 1, 2), entry(9, 2, 3), entry(11, 1, 2, 3))
    check(table, whole, entry(10, 4), entry(12, 4))
    check(table, entry(20, 1))  # another variable
    for wrong in (
        (whole, entry(8, 1)),
        (whole, entry(8, 1), entry(11, 1, 2)),
        (whole, entry(8, 1), entry(9, 2), entry(11, 1)),
        (whole, entry(11, 1)),
        (whole, entry(10, 4), entry(11, 4)),
    ):
        with pytest.raises(ProtocolError, match="other blocks of its pieces than of their parity"):
            check(table, *wrong)
    with pytest.raises(ProtocolError, match="changes piece 8 of variable 7, and makes no version"):
        check(table, entry(8, 1), entry(11, 1))


def test_what_takes_deltas(table: PieceTable) -> None:
    table.open(30, range(31, 35), PieceGroups(n_pieces=2, width=1, n_parity=1))
    assert [table.takes_deltas(region) for region in (7, 8, 10, 11, 12, 33, 99)] == [
        *(False, False, False, True, True, False, False)
    ]
    table.forget(11)
    assert not table.is_parity(11)
    table.forget(WHOLE)
    assert WHOLE not in table
    assert not table.pieces_of(WHOLE)
    assert not table.data_of(WHOLE)
