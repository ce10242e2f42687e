"""What of a store's journal goes on when the store is opened anew: what a name leads to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clamor_ray._protocol.idempotency import IdempotencyKey, Name
from clamor_ray._protocol.messages import (
    INLINE_BASE,
    NamedVariable,
    RegionRecord,
    ServerInfo,
    ServerLost,
)
from clamor_ray.actors.commits.committed import Entry, Outcome
from clamor_ray.actors.commits.journal import ANY_REGION, Journal
from clamor_ray.actors.lost_homes.lost_blocks import LostBlocks
from clamor_ray.actors.store.opening import open_again

HOME = 7
RECORD = RegionRecord(1, 0, 0x1100_0000_0000, 4096, (HOME,))
BLOCKS = b"blocks"


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    journal = Journal(tmp_path / "journal")
    yield journal
    journal.close()


def make(journal: Journal, region: int, *inside: int, name: str = "", sealed: bool = True) -> None:
    record = replace(RECORD, region=region, base_address=RECORD.base_address + (region << 24))
    journal.create_region(record, region + 1000, region + 1)
    if sealed:
        journal.seal(region, inside=inside)
    if name:
        journal.give_name(NamedVariable(name, region, b"packed"))


def opened(journal: Journal) -> list[int]:
    """The regions that there are after a new opening."""
    saved = open_again(journal, journal.load())
    assert saved == journal.load()
    assert open_again(journal, saved) == saved
    return [each.record.region for each in saved.regions]


def test_what_a_name_leads_to_stays(journal: Journal) -> None:
    make(journal, 1)  # inside of the second
    make(journal, 2, 1)
    make(journal, 3, 2, name="outer")
    make(journal, 4)  # nobody has it
    make(journal, 5, 4)
    make(journal, 6, name="sealed twice")
    make(journal, 7, name="")
    make(journal, 8, sealed=False)
    journal.set_states([(6, "freed")])
    make(journal, 9, 9, name="itself")
    assert opened(journal) == [1, 2, 3, 9]
    assert set(journal.load().inside) == {(2, 1), (3, 2), (9, 9)}
    assert journal.load().next_region == 10


def test_where_nobody_knows_what_is_inside_all_that_is_sealed_stays(journal: Journal) -> None:
    make(journal, 1)
    make(journal, 2, ANY_REGION, name="outer")
    make(journal, 3, sealed=False)
    pieces = [replace(RECORD, region=region, piece_of=10) for region in (11, 12)]
    whole = replace(RECORD, region=10, homes=(), n_pieces=2, piece_bytes=2 << 20)
    journal.create_region(whole, 10, 13, pieces)
    journal.seal(11)  # a piece of what is not
    assert opened(journal) == [1, 2]
    journal.set_states([(2, "freed")])
    assert opened(journal) == []


def test_pieces_stay_and_go_with_their_variable(journal: Journal) -> None:
    def in_pieces(region: int) -> None:
        whole = replace(RECORD, region=region, homes=(), n_pieces=2, piece_bytes=2 << 20)
        pieces = [replace(RECORD, region=region + n, piece_of=region) for n in (1, 2)]
        journal.create_region(whole, region, region + 3, pieces)
        journal.seal(region + 1)
        journal.seal(region + 2)

    for region in (1, 4, 7):
        in_pieces(region)
    journal.seal(1)
    journal.seal(4)
    journal.give_name(NamedVariable("kept", 1, b""))  # the third is not sealed
    assert opened(journal) == [1, 2, 3]


def test_what_was_known_of_a_region_goes_with_it(journal: Journal) -> None:
    make(journal, 1)
    make(journal, 2, name="kept")
    for region in (1, 2):
        journal.commit(region, [Entry(region, 1, region, BLOCKS, b"plan")], 1.0)
        journal.commit(region + 10, [Entry(region, 2, region + 10, BLOCKS)], 1.0)
        journal.acknowledge([(region, HOME, 1)])
    saved = open_again(journal, journal.load())
    assert [(entry.region, entry.version) for entry in saved.entries] == [(2, 1), (2, 2)]
    assert saved.plans == ((2, 1, b"plan"),)
    assert saved.acknowledged == ((2, HOME, 1),)
    assert saved.opened == ((2, 2),)
    assert len(saved.outcomes) == 4


def test_what_was_of_the_cluster_before_goes(journal: Journal) -> None:
    for region, kind in enumerate(("zeros", "call", "shared", "file"), 1):
        make(journal, region, name=kind)
        with journal._transaction() as db:
            what = (region, kind, 0, b"", b"what")
            db.execute("INSERT INTO sources VALUES (?, ?, ?, ?, ?)", what)
    journal.save_server(ServerInfo(HOME, "node", "host", 1, "actor", "1"))
    journal.lose_server(ServerLost(8, "its node is dead"))
    journal.save_server(ServerInfo(9, "other", "host", 1, "actor", "1"))
    journal.leave(9, is_idle=True)
    lost = LostBlocks(1, 1, b"", "why", "hint")
    journal.rehome(replace(RECORD, homes=(9,)), 0, lost, giver=HOME)
    key = IdempotencyKey(Name(b"t" * 16, b"v" * 16, 0), 5)
    counter = INLINE_BASE + 3  # a reference to it may be inside of any variable
    journal.commit(
        5,
        [
            Entry(key.region, 1, 5, b"", None, key.write().payload),
            Entry(counter, 1, 5, b"", None, b"payload"),
        ],
        1.0,
    )
    journal.drop([], [b"token"], [])
    journal.claim([(4096, 8192)])
    saved = open_again(journal, journal.load())
    assert [(region, source.kind) for region, source in saved.sources] == [
        (1, "zeros"),
        (4, "file"),
    ]
    assert (saved.servers, saved.lost) == ((), (ServerLost(8, "its node is dead"),))
    assert (saved.leaving, saved.idle, saved.givers, saved.rehomed) == ((), (), (), ())
    assert saved.lacking == ((1, lost),)
    assert [entry.region for entry in saved.entries] == [counter]
    assert saved.outcomes == ((5, Outcome({key.region: 1, counter: 1}, 1.0)),)
    assert saved.dropped == ()
    assert saved.claims == ((4096, 8192),)
    assert saved.regions[0].record.homes == (9,)  # who has it, whoever had not heard of it
