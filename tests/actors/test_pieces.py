"""Variables in pieces: regions in a row, and which of their versions belong together. No Ray."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._protocol.messages import CommitRequest, RegionRecord, ServerInfo, Write, unpack_row
from clamor_ray._protocol.refusals import NoSuchServer
from clamor_ray._redundancy.groups import PieceLayout
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.committed import Limits
from clamor_ray.actors.registry.registry_core import RegionState, RegistryCore
from clamor_ray.actors.window.address_space import GUARD_BYTES, UNIT_BYTES, AddressSpace

HOME, OTHER = 11, 22
PIECE = 2 * UNIT_BYTES
LENGTH = 2 * PIECE + 5000
N_PIECES = 3
WHOLE = 10
PIECES = range(11, 14)
PIECE_BLOCKS = 512


# -- regions


def registry() -> RegistryCore:
    core = RegistryCore()
    for server_id in (HOME, OTHER):
        core.server_registered(ServerInfo(server_id, f"node-{server_id}", "h", 1, "n", "0.1"))
    return core


def made(core: RegistryCore) -> RegionRecord:
    whole = core.create_pieces(LENGTH, PieceLayout(PIECE), HOME, request_id=5)
    for each in (*whole.pieces, whole.region):
        core.seal(each)
    return whole


def test_pieces_lie_side_by_side() -> None:
    core = registry()
    whole = core.create_pieces(LENGTH, PieceLayout(PIECE), HOME, request_id=5)
    core.check()
    assert (
        core.create_pieces(LENGTH, PieceLayout(PIECE), HOME, request_id=5) == whole
    )  # the answer was lost
    assert (whole.n_pieces, whole.homes, len(whole.pieces)) == (N_PIECES, (), N_PIECES)
    pieces = [core.record_of(each) for each in whole.pieces]
    assert [piece.base_address - whole.base_address for piece in pieces] == [0, PIECE, 2 * PIECE]
    assert [piece.length_bytes for piece in pieces] == [PIECE, PIECE, 5000]
    assert [piece.is_followed for piece in pieces] == [True, True, False]
    assert {piece.homes for piece in pieces} == {(HOME,)}
    assert {core.whole_of(piece.region) for piece in pieces} == {whole.region}
    assert [core.before_bytes(each) for each in whole.pieces] == [0, PIECE, 2 * PIECE]
    assert core.before_bytes(whole.region) == core.before_bytes(999) == 0
    after = core.create_region(1, HOME)
    assert after.region == whole.pieces[-1] + 1
    assert after.base_address == whole.base_address + 2 * PIECE + UNIT_BYTES + GUARD_BYTES
    with pytest.raises(ValueError, match="in pieces"):
        core.create_pieces(PIECE, PieceLayout(PIECE), HOME)
    with pytest.raises(NoSuchServer):
        core.create_pieces(LENGTH, PieceLayout(PIECE), 99)


def test_a_piece_moves_and_the_others_stay() -> None:
    core = registry()
    whole = made(core)
    core.rehome(whole.pieces[1], OTHER)
    assert [core.homes_of(each) for each in whole.pieces] == [(HOME,), (OTHER,), (HOME,)]
    assert core.homes_of(whole.region) == ()
    assert core.homed_at(OTHER) == (whole.pieces[1],)


def test_all_of_it_is_freed_and_its_addresses_come_back_piece_by_piece() -> None:
    core = registry()
    whole = made(core)
    pieces = core.pieces_of(whole.region)
    assert pieces == list(whole.pieces)
    for each in (*pieces, whole.region):
        core.free(each)
    assert core.state(whole.region) is RegionState.GONE  # it has no home that could have leases
    for piece in reversed(pieces):
        assert core.state(piece) is RegionState.FREED
        core.region_idle(piece, HOME)
        core.dropped(piece, HOME)
        core.check()
    assert core.addresses.bytes_in_use == 0
    assert core.create_region(1, HOME).base_address == whole.base_address


def test_a_maker_that_dies_leaves_nothing() -> None:
    core = registry()
    whole = core.create_pieces(LENGTH, PieceLayout(PIECE), HOME, now_s=0.0)
    core.seal(whole.pieces[0])
    core.goes_on(whole.region, 50.0)  # it is at work: a piece is sealed
    assert core.abandon_stale(50.0) == ()
    assert core.state(whole.region) is RegionState.CREATING
    assert core.state(whole.pieces[0]) is RegionState.READY
    assert core.state(whole.pieces[1]) is RegionState.CREATING
    core.abandon_stale(51.0)
    assert core.state(whole.region) is RegionState.GONE
    assert core.state(whole.pieces[0]) is RegionState.FREED
    core.check()


def test_a_creation_that_could_not_be_written_is_undone() -> None:
    core = registry()
    whole = core.create_pieces(LENGTH, PieceLayout(PIECE), HOME, request_id=5)
    core.undo_create(whole.region)
    core.check()
    assert core.addresses.bytes_in_use == 0
    assert core.requested(5) is None


@pytest.mark.parametrize("whole_is_gone", [False, True])
def test_after_a_restart_they_lie_where_they_did(whole_is_gone: bool) -> None:
    core = registry()
    whole = made(core)
    beside = core.create_region(1, HOME)
    state = RegionState.FREED if whole_is_gone else RegionState.READY
    saved = [(core.record_of(each), state, 0) for each in whole.pieces]
    saved += [] if whole_is_gone else [(whole, RegionState.READY, 5)]
    saved += [(beside, RegionState.READY, 0)]
    again = RegistryCore(AddressSpace(ours=False))
    again.restore(beside.region + 1, saved, core.servers(), (), 0.0)
    again.check()
    assert again.addresses.bytes_in_use == core.addresses.bytes_in_use
    assert again.pieces_of(whole.region) == ([] if whole_is_gone else list(whole.pieces))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_a_range_is_cut_and_given_back_in_any_order(units: list[int], random) -> None:
    space = AddressSpace()
    lengths = [n * UNIT_BYTES for n in units]
    base = space.allocate(sum(lengths))
    begins = space.split(base, lengths)
    assert begins == [base + sum(lengths[:i]) for i in range(len(lengths))]
    space.check()
    random.shuffle(begins)
    for begin in begins:
        space.release(begin)
        space.check()
    assert space.bytes_in_use == 0


def test_a_range_is_not_cut_elsewhere() -> None:
    space = AddressSpace()
    base = space.allocate(2 * UNIT_BYTES)
    with pytest.raises(ValueError, match="part of"):
        space.split(base, [UNIT_BYTES + 1, UNIT_BYTES - 1])
    with pytest.raises(ValueError, match="in a range"):
        space.split(base, [UNIT_BYTES, 2 * UNIT_BYTES])
    space.check()


# -- versions


def whole_write(base: int, plan: bytes | None = None) -> Write:
    return Write(WHOLE, base, 0, b"", 0, 0, plan)


def piece_write(index: int, base: int, *blocks: int) -> Write:
    return Write(PIECES[index], base, len(blocks), BitMap(blocks).serialize(), 8192, HOME)


def opened(limits: Limits | None = None) -> CommitLog:
    log = CommitLog(limits)
    for piece in PIECES:
        log.open(piece, (HOME,), PIECE_BLOCKS * 4096)
    log.open_pieces(WHOLE, PIECES)
    return log


def commit(log: CommitLog, number: int, *writes: Write) -> dict[int, int]:
    made = log.apply(number, log.prepare(CommitRequest(number, writes)), 0.0)
    assert unpack_row(made.rows[WHOLE], 3) == log.row(WHOLE, made.versions[WHOLE])
    assert log.answered(number) == made
    return made.versions


def test_a_version_says_which_versions_of_the_pieces_it_is() -> None:
    log = opened()
    assert log.row(WHOLE, 0) == (0, 0, 0)
    assert log.latest(WHOLE).payload is None
    assert commit(log, 1, whole_write(0), piece_write(1, 0, 5)) == {WHOLE: 1, PIECES[1]: 1}
    # The other transaction began at version 0, too, and changed other pieces.
    commit(log, 2, whole_write(0), piece_write(0, 0, 5), piece_write(2, 0, 1))
    commit(log, 3, whole_write(2), piece_write(1, 1, 5))
    rows = [log.row(WHOLE, version) for version in range(4)]
    assert rows == [(0, 0, 0), (0, 1, 0), (1, 1, 1), (1, 2, 1)]
    log.check()


def test_the_first_commit_to_a_block_wins() -> None:
    log = opened()
    commit(log, 1, whole_write(0), piece_write(1, 0, 5))
    with pytest.raises(errors.CommitConflict, match="Block 5 of variable 12") as caught:
        log.prepare(CommitRequest(2, (whole_write(0), piece_write(1, 0, 5, 6))))
    conflict = caught.value  # is of the variable, and of its blocks
    assert (conflict.region, conflict.version) == (WHOLE, 1)
    assert (conflict.first_block, conflict.n_blocks) == (PIECE_BLOCKS + 5, 1)
    commit(log, 3, whole_write(0), piece_write(1, 0, 6))
    assert log.row(WHOLE, 2) == (0, 2, 0)


def test_an_answer_is_the_same_after_it_is_freed() -> None:
    """Who asks again drops nothing that was committed."""
    log = opened()
    commit(log, 1, whole_write(0), piece_write(1, 0, 5))
    before = log.answered(1)
    log.close(WHOLE)
    assert log.answered(1) == before
    log.forget(WHOLE)
    found = log.answered(1)
    assert found is not None
    assert (found.versions, found.rows) == (before.versions, {})


def test_a_layout_is_the_whole_variables() -> None:
    log = opened()
    commit(log, 1, whole_write(0, b"plan"), piece_write(0, 0, 1))
    commit(log, 2, whole_write(1), piece_write(0, 1, 1))
    assert [log.at(WHOLE, version).plan for version in range(3)] == [None, b"plan", b"plan"]
    with pytest.raises(errors.CommitConflict, match="layout"):
        log.prepare(CommitRequest(3, (whole_write(0, b"other"), piece_write(2, 0, 1))))


def test_a_piece_is_not_written_without_its_variable() -> None:
    log = opened()
    with pytest.raises(errors.ProtocolError, match="makes no version"):
        log.prepare(CommitRequest(1, (piece_write(1, 0, 5),)))
    with pytest.raises(errors.ProtocolError, match="which has 0"):
        log.prepare(CommitRequest(1, (Write(WHOLE, 0, 1, BitMap([0]).serialize(), 8192, HOME),)))


def test_what_is_forgotten_of_it_has_expired() -> None:
    log = opened(Limits(max_commits=2))
    for number in range(1, 6):
        commit(log, number, whole_write(number - 1), piece_write(0, number - 1, number))
        for piece in PIECES:
            log.acknowledge(HOME, piece, log.newest(piece))
    log.trim(0.0)
    assert log.row(WHOLE, 5) == (5, 0, 0)
    assert log.row(WHOLE, 4) == (4, 0, 0)
    with pytest.raises(errors.SnapshotExpired):
        log.row(WHOLE, 2)
    assert log.changes(WHOLE, 2, 5) is None
    log.check()
    log.retain({WHOLE: 4})
    commit(log, 6, whole_write(5), piece_write(0, 5, 7))
    commit(log, 7, whole_write(6), piece_write(0, 6, 7))
    log.trim(0.0)
    assert log.row(WHOLE, 4) == (4, 0, 0)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),
            st.dictionaries(
                st.integers(0, 2), st.sets(st.integers(0, 40), min_size=1, max_size=4), min_size=1
            ),
        ),
        max_size=12,
    )
)
def test_against_a_model_of_blocks(steps) -> None:
    """Each transaction begins some versions ago; the model has the number of each block."""
    log = opened()
    model = [[[0] * 41 for _ in PIECES]]  # by version, piece and block
    written = []
    for number, (ago, changes) in enumerate(steps, 1):
        begin = max(0, len(model) - 1 - ago)
        row = log.row(WHOLE, begin)
        writes = [piece_write(index, row[index], *blocks) for index, blocks in changes.items()]
        clash = any(
            model[begin][index][block] != model[-1][index][block]
            for index, blocks in changes.items()
            for block in blocks
        )
        request = CommitRequest(number, (whole_write(begin), *writes))
        if clash:
            with pytest.raises(errors.CommitConflict):
                log.prepare(request)
            continue
        log.apply(number, log.prepare(request), 0.0)
        model.append([list(blocks) for blocks in model[-1]])
        for index, blocks in changes.items():
            for block in blocks:
                model[-1][index][block] = number
        written.append(number)
    newest = len(model) - 1
    assert log.newest(WHOLE) == newest
    for old in range(newest + 1):
        differ = {
            index * PIECE_BLOCKS + block
            for index in range(N_PIECES)
            for block in range(41)
            if model[old][index][block] != model[newest][index][block]
        }
        changed = set(log.changes(WHOLE, old, newest) or ())
        assert differ <= changed
    log.check()


def test_it_is_all_there_after_a_restart() -> None:
    log = opened()
    entries = []
    for number in range(1, 5):
        request = CommitRequest(
            number, (whole_write(number - 1), piece_write(number % 3, (number - 1) // 3, 4))
        )
        entries += log.prepare(request)
        log.apply(number, entries[-2:], 0.0)
    again = opened()
    again.restore(sorted(entries, key=lambda e: (e.region, e.version)), (), (), (), ())
    for version in range(5):
        assert again.row(WHOLE, version) == log.row(WHOLE, version)
    again.forget(WHOLE)
    assert again.pieces_of(WHOLE) == range(0)
