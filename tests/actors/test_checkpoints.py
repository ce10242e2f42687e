"""The registry's part of a checkpoint, without Ray: one moment, what stays, which blocks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

import pytest
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._protocol.idempotency import IdempotencyKey, Name, digest_of
from clamor_ray._protocol.messages import (
    INLINE_BASE,
    CommitRequest,
    Latest,
    ServerInfo,
    VariableRecord,
    Write,
    unpack_row,
)
from clamor_ray._protocol.rpc import unpack
from clamor_ray._redundancy.groups import PieceLayout
from clamor_ray.actors.backup import checkpoints
from clamor_ray.actors.backup.checkpoints import Checkpoints
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.registry.registry_core import RegistryCore

PIECE_BYTES = 2 << 20
NAMED = INLINE_BASE + 5  # an inline variable with a name, never changed


class _Homes:
    """`why_lost` of a server is not that of a region."""

    def __init__(self, session: Any) -> None:
        self.home_blocks = session.home_blocks
        self.examine = session.examine

    def why_lost(self, server_id: int) -> str | None:
        return None


class Session:
    """What `Checkpoints` asks, with a real core and log; homes are these methods.

    Args:
        answers: what each call to a home does in turn: blocks, or what it raises; then blocks.
    """

    def __init__(self, answers: Iterable[Any] = ()) -> None:
        self.core, self.log = RegistryCore(), CommitLog()
        for server in (7, 8):
            self.core.server_registered(ServerInfo(server, f"node{server}", "h", 1, "n", "0"))
        self.answers = list(answers)
        self.asked: list[tuple[int, int, int]] = []
        self.told: list[int] = []
        self.pins: dict[int, list[Any]] = {}
        self.lost: errors.HomeLostError | None = None
        self.meanwhile: Callable[[], object] = lambda: None
        homes = _Homes(self)
        self.service = Checkpoints(
            *(self.core, self.log, self, self, self, homes, self), timeout_s=2.0
        )

    def made(self) -> int:
        record = self.core.create_region(3 * 4096, 7)
        self.core.seal(record.region)
        self.log.open(record.region, record.homes, record.length_bytes)
        return record.region

    def made_in_pieces(self) -> int:
        whole = self.core.create_pieces(3 * PIECE_BYTES, PieceLayout(PIECE_BYTES), 7)
        for region in whole.pieces:
            record = self.core.seal(region)
            self.log.open(region, record.homes, record.length_bytes)
        self.core.seal(whole.region)
        self.log.open_pieces(whole.region, whole.pieces)
        return whole.region

    def commit(self, *writes: tuple[int, list[int]]) -> None:
        """(region, blocks) each."""
        self.decide(
            *(
                Write(
                    region=region,
                    base_version=self.log.newest(region),
                    n_blocks=len(blocks),
                    blocks=bytes(BitMap(blocks).serialize()),
                    layer_bytes=4096 * len(blocks),
                    staged_at=7,
                )
                for region, blocks in writes
            )
        )

    def decide(self, *writes: Write) -> None:
        number = 1 + len(self.log._outcomes)
        self.log.apply(number, self.log.prepare(CommitRequest(number, writes)), 0.0)

    # -- as the registry's services

    def variables(self) -> list[VariableRecord]:
        found = [
            VariableRecord(r.region, r.length_bytes, (), (), self.log.latest(r.region), None)
            for r in self.core.ready_regions()
            if not r.piece_of
        ]
        return [*found, VariableRecord(NAMED, 0, (), ("small",), Latest(NAMED, 0), b"packed")]

    def label(self, region: int) -> str:
        return f"variable {region}"

    async def open(self, packed: bytes) -> None:
        number, _, pins = unpack(packed)
        self.pins[number] = pins
        self.meanwhile()
        await asyncio.sleep(0)

    async def close(self, collections: Iterable[int]) -> None:
        for number in collections:
            self.pins.pop(number, None)

    def lost_blocks(self, region: int) -> None:
        return None

    def why_lost(self, region: int) -> errors.HomeLostError | None:
        return self.lost

    async def home_blocks(self, home: int, region: int, version: int) -> bytes:
        self.asked.append((home, region, version))
        if self.answers and isinstance(answer := self.answers.pop(0), Exception):
            self.meanwhile()
            raise answer
        return bytes(BitMap([region % 3]).serialize())

    async def tell_now(self, home: int) -> None:
        self.told.append(home)

    async def examine(self, server_id: int) -> None:
        raise AssertionError("nobody is silent")


def run(session: Session, work: Coroutine[Any, Any, Any]) -> Any:
    async def all_of_it() -> Any:
        try:
            return await asyncio.wait_for(work, 60)
        finally:
            await session.service.close()

    return asyncio.run(all_of_it())


def test_all_variables_of_one_moment() -> None:
    session = Session()
    one, other, spread = session.made(), session.made(), session.made_in_pieces()
    changed_inline = INLINE_BASE + 9
    session.commit((one, [0]), (other, [0]))
    session.commit((one, [1]), (other, [2]))
    session.commit((spread, []), (spread + 2, [5]))
    session.decide(Write(changed_inline, 0, 0, b"", 0, 0, payload=b"content"))
    key = IdempotencyKey(Name(bytes(16), digest_of([3]), 0), 99)
    session.decide(key.write())
    freed = session.made()
    session.log.close(freed)
    session.core.free(freed)
    # What is committed while the pins are told is not in it.
    session.meanwhile = lambda: session.commit((one, [2]), (other, [1]))
    found = run(session, session.service.begin(5))
    by_region = {each.latest.region: each for each in found}
    assert set(by_region) == {one, other, spread, changed_inline, NAMED}
    assert by_region[one].latest.version == by_region[other].latest.version == 2
    assert session.log.newest(one) == session.log.newest(other) == 3
    assert unpack_row(by_region[spread].latest.payload, 3) == (0, 1, 0)
    assert by_region[spread].nodes == ("node7",) * 3
    assert by_region[changed_inline].latest.payload == b"content"
    assert by_region[changed_inline].record is None
    assert (by_region[NAMED].names, by_region[NAMED].packed) == (("small",), b"packed")
    assert len(found) == len(by_region)
    pinned = dict(session.pins[5])
    assert pinned == {region: each.latest.version for region, each in by_region.items()}


def test_who_says_nothing_is_dead() -> None:
    session = Session()
    session.made()

    async def silent() -> None:
        await session.service.begin(5)
        await session.service.begin(6)
        session.service.keep(5, 0.2)
        session.service.keep(6, 0.2)
        for _ in range(5):
            await asyncio.sleep(0.1)
            session.service.keep(6, 0.2)
        assert set(session.pins) == {6}
        session.service.keep(6, 0)
        await asyncio.sleep(0)
        assert not session.pins

    run(session, silent())


def test_blocks_of_pieces_count_from_the_first_byte() -> None:
    session = Session()
    spread = session.made_in_pieces()
    session.commit((spread, []), (spread + 2, [5]))
    got = run(session, session.service.data_blocks(spread, 1))
    n = PIECE_BYTES // 4096
    expected = [(spread + 1 + i) % 3 + i * n for i in range(3)]
    assert list(BitMap.deserialize(got)) == expected
    assert sorted(session.asked) == [(7, spread + 1, 0), (7, spread + 2, 1), (7, spread + 3, 0)]


def test_a_home_that_does_not_know_the_version_is_told() -> None:
    session = Session([errors.NoVersionError("not yet"), None])
    region = session.made()
    assert run(session, session.service.data_blocks(region, 0))
    assert session.told == [7]


@pytest.mark.parametrize(
    "away",
    [
        errors.FreedError("no region"),
        errors.HomeLostError("it is lost"),
        errors.ServerUnavailableError("it is not known"),
        RuntimeError("what Ray says"),
    ],
)
def test_a_home_that_moves_is_asked_again(away: Exception) -> None:
    session = Session([away, None])
    region = session.made()
    session.meanwhile = lambda: session.core.rehome(region, 8)
    assert run(session, session.service.data_blocks(region, 0))
    assert [home for home, _, _ in session.asked] == [7, 8]


def test_what_is_lost_or_freed_is_said() -> None:
    session = Session([errors.FreedError("no region")] * 100)
    region = session.made()
    with pytest.raises(errors.WaitTimeoutError, match="which of its blocks"):
        run(session, session.service.data_blocks(region, 0))
    session.lost = errors.HomeLostError("blocks are lost")
    with pytest.raises(errors.HomeLostError, match="blocks are lost"):
        run(session, session.service.data_blocks(region, 0))
    session.lost = None
    session.core.free(region)
    with pytest.raises(errors.FreedError, match="was freed while it was copied"):
        run(session, session.service.data_blocks(region, 0))


def test_a_version_that_is_kept_no_longer_is_said() -> None:
    session = Session([errors.SnapshotExpired("gone")])
    region = session.made()
    with pytest.raises(errors.SnapshotExpired, match="gone"):
        run(session, session.service.data_blocks(region, 0))
    assert checkpoints.SILENCE_S > 60
