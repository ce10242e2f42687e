"""Pieces that are made again from the others of their group: page servers that are made up."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._protocol.messages import CommitRequest, RepairSet, ServerInfo, Write
from clamor_ray._redundancy.groups import PieceLayout, Shape, homes_of
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.lost_homes import repairs
from clamor_ray.actors.lost_homes.lost_blocks import Losses, LostBlocks
from clamor_ray.actors.lost_homes.repairs import Repairs, Staged
from clamor_ray.actors.process.byte_rate import ByteRate
from clamor_ray.actors.registry.registry_core import RegistryCore

PIECE_BYTES = 2 << 20
MOST = 512  # blocks of a piece; of them so many are used:
USED = 12
LAST = 5  # blocks of the last piece
TAKER = 9
ATTEMPT = 77

Blocks = dict[int, int]  # block -> its content, a number; zeros are not there


def xor(parts: list[Blocks]) -> Blocks:
    made: Blocks = {}
    for part in parts:
        for block, value in part.items():
            made[block] = made.get(block, 0) ^ value
    return {block: value for block, value in made.items() if value}


class World:
    """A variable with redundancy, and what each version of each piece is."""

    def __init__(self, shape: Shape, n_pieces: int, seed: int = 0, bytes_s: int = 0) -> None:
        self.rng = random.Random(seed)
        self.core = RegistryCore()
        self.servers = list(range(1, max(shape.width, 1) + shape.n_parity + 1))
        for server_id in (*self.servers, TAKER):
            info = ServerInfo(server_id, f"node{server_id}", "host", 1, "name", "version")
            self.core.server_registered(info)
        length_bytes = (n_pieces - 1) * PIECE_BYTES + LAST * 4096  # the last one is shorter
        whole = self.core.create_pieces(length_bytes, PieceLayout(PIECE_BYTES, shape), 1)
        self.whole, self.groups = whole.region, whole.groups
        self.log = CommitLog()
        homes = homes_of(self.groups, self.servers, 0, shape.is_fixed)
        for region, home in zip(whole.pieces, homes, strict=True):
            self.core.seal(region)
            self.core.rehome(region, home)
            record = self.core.record_of(region)
            assert record is not None
            self.log.open(region, (home,), record.length_bytes)
        self.core.seal(self.whole)
        self.log.open_pieces(self.whole, whole.pieces, self.groups)
        self.at: dict[int, list[Blocks]] = {region: [{}] for region in whole.pieces}
        self.kept_from: dict[int, int] = {}
        self.layers: dict[tuple[int, int, int], Blocks] = {}
        self.base: Blocks = {}
        self.records: dict[int, Blocks] = {}
        self.sealed: int | None = None
        self.dropped = False
        self.now_s = 0.0
        self.rate = ByteRate(bytes_s, lambda: self.now_s, self.sleep)
        self.reads: list[tuple[float, bool, int]] = []  # when, whether of records, bytes
        self.staged: set[int] = set()
        self.losses = Losses()
        self.tasks: list[asyncio.Task[None]] = []
        self.repairs = Repairs(
            self.core,
            self.log,
            self,
            self.losses,
            self.staged,
            lambda work: self.tasks.append(asyncio.ensure_future(work)),
            self.rate,
        )

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)
        self.now_s += seconds

    def region(self, index: int) -> int:
        return self.whole + 1 + index

    def commit(self) -> None:
        """Some blocks of some data pieces, and their parities; none whose home is lost."""
        may = [index for index in range(self.groups.n_pieces) if self._may_write(index)]
        changed = {
            index: self.rng.sample(
                range(LAST if index == self.groups.n_pieces - 1 else USED), self.rng.randrange(1, 4)
            )
            for index in self.rng.sample(may, min(len(may), self.rng.randrange(1, 3)))
        }
        if not changed:
            return
        blocks = {self.region(i): BitMap(some) for i, some in changed.items()}
        for index, some in changed.items():
            now = dict(self.at[self.region(index)][-1])
            now.update({block: self.rng.randrange(1, 1 << 30) for block in some})
            self.at[self.region(index)].append(now)
        for group in {self.groups.group_of(index) for index in changed}:
            data = [self.region(i) for i in self.groups.data_of(group)]
            for index in self.groups.parity_of(group):
                self.at[self.region(index)].append(xor([self.at[each][-1] for each in data]))
                union = BitMap.union(*(blocks.get(each, BitMap()) for each in data))
                blocks[self.region(index)] = union
        commit_id = self.rng.getrandbits(63) | 1
        writes = [Write(self.whole, self.log.newest(self.whole), 0, b"", 0, 0)]
        writes += [
            Write(region, self.log.newest(region), len(some), bytes(some.serialize()), 8192, 1)
            for region, some in blocks.items()
        ]
        request = CommitRequest(commit_id, tuple(writes))
        self.log.apply(commit_id, self.log.prepare(request), 0.0)

    def _may_write(self, index: int) -> bool:
        parity = self.groups.parity_of(self.groups.group_of(index))
        homes = [self.core.homes_of(self.region(each))[0] for each in (index, *parity)]
        return all(self.why_lost(home) is None for home in homes)

    def lose(self, server_id: int) -> None:
        self.core.server_lost(server_id, "its node is dead")
        self.log.server_lost(server_id)

    # -- as page servers

    def why_lost(self, server_id: int) -> str | None:
        return getattr(self.core.locate(server_id), "reason", None)

    async def examine(self, server_id: int) -> None:
        return None

    def _at(self, giver: int, region: int, version: int) -> Blocks:
        if self.why_lost(giver) is not None:
            raise errors.HomeLostError("It is gone.")
        assert self.core.homes_of(region) == (giver,)
        return self.at[region][version]

    async def home_blocks(self, giver: int, region: int, version: int) -> bytes:
        return bytes(BitMap(self._at(giver, region, version)).serialize())

    async def stage_versions(
        self, giver: int, region: int, wanted: list[tuple[int, int, bytes]]
    ) -> list[int]:
        await asyncio.sleep(0)
        if self.rng.random() < 0.3:
            self.commit()  # it goes on
        found = []
        for version, commit_id, packed in wanted:
            if version < self.kept_from.get(region, 0):
                found.append(0)
                continue
            blocks, there = BitMap.deserialize(packed), self._at(giver, region, version)
            assert blocks
            assert blocks.max() < self.log.n_blocks(region)
            self.layers[giver, region, commit_id] = {b: there.get(b, 0) for b in blocks}
            found.append(4096 * len(blocks))
        return found

    async def oldest_version(self, giver: int, region: int) -> int:
        return self.kept_from.get(region, 0)

    async def drop_layers(self, giver: int, region: int, commit_ids: list[int]) -> None:
        for commit_id in commit_ids:
            self.layers.pop((giver, region, commit_id), None)

    async def take_repaired(
        self, taker: int, region: int, attempt: int, are_records: bool, staged: list[Staged]
    ) -> None:
        assert (taker, attempt) == (TAKER, ATTEMPT)
        n_bytes = sum(layer_bytes for _, layers in staged for *_, layer_bytes in layers)
        self.reads.append((self.now_s, are_records, n_bytes))
        for version, layers in staged:
            made = xor([self.layers[server, member, id] for server, member, id, _ in layers])
            if are_records:
                assert version == max(self.records, default=version - 1) + 1
                blocks = {b for s, m, id, _ in layers for b in self.layers[s, m, id]}
                self.records[version] = {block: made.get(block, 0) for block in blocks}
            else:
                self.base.update(made)

    async def take_seal(self, taker: int, region: int, attempt: int, version: int) -> None:
        self.sealed = version

    async def take_drop(self, taker: int, region: int, attempt: int) -> None:
        self.dropped = True

    # -- what came of it

    async def bring(self, region: int) -> None:
        found = self.repairs.repairable(region)
        assert found is not None
        record = self.core.record_of(region)
        assert record is not None
        assert found.version == self.log.newest(region)
        record = dataclasses.replace(record, version=found.version, homes=(TAKER,))
        try:
            await self.repairs.bring(record, TAKER, ATTEMPT, found)
        finally:
            await asyncio.gather(*self.tasks)

    def versions_there(self, newest: int) -> dict[int, Blocks]:
        """What the new home gives for each version that it has."""
        found, now = {newest: dict(self.base)}, dict(self.base)
        for version in sorted(self.records, reverse=True):
            now.update(self.records[version])
            found[version] = {block: value for block, value in now.items() if value}
        return found


SHAPES = {
    "raid5": (Shape(3, 1), 7),
    "raid4": (Shape(2, 1, True), 4),
    "raid1": (Shape(1, 1), 3),
    "three copies": (Shape(1, 2), 2),
}


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("shape", "n_pieces"), SHAPES.values(), ids=SHAPES)
def test_any_piece_is_made_again_with_its_versions(shape: Shape, n_pieces: int, seed: int) -> None:
    async def work() -> None:
        world = World(shape, n_pieces, seed)
        for _ in range(world.rng.randrange(0, 25)):
            world.commit()
        lost = world.rng.choice(world.servers)
        world.lose(lost)
        region = world.rng.choice(world.core.homed_at(lost))
        newest = world.log.newest(region)
        await world.bring(region)
        assert world.sealed == newest
        assert not world.dropped
        assert not world.layers
        assert not world.staged
        there = world.versions_there(newest)
        assert sorted(there) == list(range(newest + 1))
        for version, blocks in there.items():
            assert blocks == world.at[region][version], version

    asyncio.run(work())


def lost(n_blocks: int, *blocks: int) -> LostBlocks:
    packed = bytes(BitMap(blocks).serialize())
    return LostBlocks(number=5, n_blocks=n_blocks, blocks=packed, why="Why", hint="Do.")


def test_what_the_others_lack_is_not_made() -> None:
    world = World(Shape(2, 1), 4)
    for _ in range(5):
        world.commit()
    first, second, parity = (world.region(i) for i in world.groups.members(0))
    (home,) = world.core.homes_of(first)
    world.losses.update({second: lost(MOST, 3, 4), parity: lost(MOST, 4, 5)})
    world.lose(home)
    found = world.repairs.repairable(first)
    assert found is not None
    assert set(range(MOST)) - set(found.blocks) == {3, 4, 5}
    assert world.repairs.repair_set(first, world.log.newest(first)) is None
    assert world.repairs.stale_parity(first) == [parity]
    assert world.repairs.stale_parity(parity) == []
    # A second loss.
    (home,) = world.core.homes_of(second)
    world.lose(home)
    assert world.repairs.repairable(first) is None


def test_copies_each_are_enough() -> None:
    world = World(Shape(1, 2), 2)
    for _ in range(5):
        world.commit()
    piece, one, other = (world.region(i) for i in world.groups.members(0))
    version = world.log.newest(piece)
    found = world.repairs.repair_set(piece, version)
    homes = {each: world.core.homes_of(each)[0] for each in (piece, one, other)}
    members = tuple((each, version, homes[each]) for each in (one, other))
    assert found == RepairSet(members, is_mirror=True)
    world.lose(homes[one])
    assert world.repairs.repair_set(piece, version) == RepairSet(members[1:], is_mirror=True)
    world.lose(homes[piece])
    made = world.repairs.repairable(piece)
    assert made is not None
    assert made.versions == {other: version}
    assert world.repairs.stale_parity(piece) == []


def test_who_answers_for_an_old_version() -> None:
    world = World(Shape(2, 1), 4, seed=3)
    for _ in range(30):
        world.commit()
    for region in world.at:
        for version, wanted in enumerate(world.at[region]):
            found = world.repairs.repair_set(region, version)
            assert found is not None
            assert not found.is_mirror
            made = xor([world.at[each][at] for each, at, _ in found.members])
            assert made == {block: value for block, value in wanted.items() if value}
    assert world.repairs.repair_set(world.whole, 3) is None
    assert world.repairs.repair_set(region, 1000) is None


def test_versions_that_are_kept_no_longer() -> None:
    async def work() -> None:
        world = World(Shape(2, 1), 2, seed=1)
        for _ in range(40):
            world.commit()
        first, second, _parity = (world.region(i) for i in world.groups.members(0))
        newest = world.log.newest(first)
        row = world.log.row_with(first, newest // 2)
        assert row is not None
        world.kept_from[second] = row[1]
        world.lose(world.core.homes_of(first)[0])
        await world.bring(first)
        there = world.versions_there(newest)
        assert 1 < len(there) < newest
        assert max(there) == newest
        assert sorted(there) == list(range(min(there), newest + 1))  # the newest ones
        for version, blocks in there.items():
            assert blocks == world.at[first][version]

    asyncio.run(work())


@pytest.mark.parametrize("method", ["home_blocks", "stage_versions", "take_repaired", "take_seal"])
def test_whatever_fails_the_taker_drops_it(method: str) -> None:
    async def work() -> None:
        world = World(Shape(2, 1), 4)
        for _ in range(9):
            world.commit()

        async def fail(*arguments: Any) -> None:
            raise errors.WaitTimeoutError("It takes too long.")

        region = world.region(0)
        world.lose(world.core.homes_of(region)[0])
        setattr(world, method, fail)
        with pytest.raises(errors.WaitTimeoutError):
            await world.bring(region)
        assert world.dropped
        assert not world.layers
        assert not world.staged

    asyncio.run(work())


def test_what_is_degraded() -> None:
    world = World(Shape(2, 1), 4)
    n = len(world.groups.members(0))
    assert world.repairs.n_degraded() == 0
    world.losses.update({world.region(0): lost(MOST, 3)})
    assert world.repairs.n_degraded() == n
    world.losses.update({world.region(0): None})
    first, second, _ = (world.region(i) for i in world.groups.members(0))
    (home,) = world.core.homes_of(first)
    world.core.rehome(second, home)
    assert world.repairs.n_degraded() == n
    world.core.rehome(second, TAKER)
    assert world.repairs.n_degraded() == 0
    world.lose(home)
    assert world.repairs.n_degraded() == world.groups.n_regions
    assert world.core.apart(first, [home, TAKER]) == [home]
    with world.core.heading(second, home), world.core.heading(second, home):
        assert world.core.apart(first, [home, TAKER]) == []
    assert world.core.apart(first, [home, TAKER]) == [home]
    assert world.core.apart(world.whole, [home, TAKER]) == [home, TAKER]


def test_records_without_room_are_left_out() -> None:
    async def work() -> None:
        world = World(Shape(2, 1), 4)
        for _ in range(9):
            world.commit()
        region = world.region(0)
        world.lose(world.core.homes_of(region)[0])
        stage = world.stage_versions
        n_calls = 0

        async def full(giver: int, member: int, wanted: Any) -> list[int]:
            nonlocal n_calls
            n_calls += 1
            if n_calls > 2:  # of the blocks
                raise errors.OutOfMemoryError("There is no room.")
            return await stage(giver, member, wanted)

        world.stage_versions = full  # type: ignore[method-assign]
        await world.bring(region)
        assert world.base == world.at[region][-1]
        assert not world.records
        assert not world.layers
        assert not world.staged

    asyncio.run(work())


def test_a_version_with_lost_blocks_ends_the_history() -> None:
    """Also of one that a commit has made whole since."""

    async def work() -> None:
        world = World(Shape(2, 1), 4, seed=2)
        for _ in range(30):
            world.commit()
        first, second, parity = (world.region(i) for i in world.groups.members(0))
        world.losses.update({parity: lost(MOST, *range(USED))})
        world.lose(world.core.homes_of(first)[0])
        found = world.repairs.repairable(first)
        assert found is not None
        assert not world.repairs._records(first, found, {second: 0, parity: 0})
        world.losses.update({parity: None})
        assert world.repairs._records(first, found, {second: 0, parity: 0})

    asyncio.run(work())


def test_what_a_plan_stands_on() -> None:
    world = World(Shape(2, 1), 4)
    first, second, parity = (world.region(i) for i in world.groups.members(0))
    whole, in_part = world.repairs.mates(parity, False), world.repairs.mates(parity, True)
    world.lose(world.core.homes_of(first)[0])
    assert world.repairs.mates(parity, False) == whole
    assert world.repairs.mates(parity, True) != in_part
    assert world.repairs.is_awaited(parity)
    assert not world.repairs.is_awaited(second)  # data does not wait for a parity
    world.losses.update({first: lost(MOST, 3)})
    assert world.repairs.mates(parity, False) != whole


def test_a_parity_is_made_again_when_its_data_is_whole() -> None:
    world = World(Shape(2, 1), 4)
    first, second, parity = (world.region(i) for i in world.groups.members(0))
    for region in (first, second, parity):
        assert world.repairs.remakeable(region) == []
    world.losses.update({first: lost(MOST, 3), parity: lost(MOST, 3)})
    assert world.repairs.remakeable(first) == []
    world.losses.update({first: None})
    for region in (first, second, parity):
        assert world.repairs.remakeable(region) == [parity]
    world.lose(world.core.homes_of(second)[0])
    assert world.repairs.remakeable(first) == []
    assert world.repairs.remakeable(world.region(2)) == []  # of another group


def test_a_parity_that_stays_stale_is_made_again_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Commits to its group wait while one is made. One that was healed meanwhile begins anew."""
    world = World(Shape(2, 1), 4)
    _, _, parity = (world.region(i) for i in world.groups.members(0))
    stale = {parity: lost(MOST, 3)}
    world.losses.update(stale)
    now_s, tried_s = 0.0, []
    healed_s, end_s = 8 * repairs.LOOK_MOST_S, 9 * repairs.LOOK_MOST_S

    async def sleep(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds
        if now_s > end_s:
            raise asyncio.CancelledError
        world.losses.update({parity: None} if now_s == healed_s else stale)

    monkeypatch.setattr(repairs, "asyncio", SimpleNamespace(sleep=sleep))
    monkeypatch.setattr(repairs.time, "monotonic", lambda: now_s)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(world.repairs.look_for_stale_parity(lambda _: tried_s.append(now_s)))
    before = [each / repairs.LOOK_S for each in tried_s if each < healed_s]
    pauses = [after - begun for begun, after in itertools.pairwise(before)]
    assert pauses[:5] == [2, 4, 8, 16, 32]
    assert set(pauses[5:]) == {repairs.LOOK_MOST_S / repairs.LOOK_S}
    again = [(each - healed_s) / repairs.LOOK_S for each in tried_s if each > healed_s]
    assert again[:3] == [1, 3, 7]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("shape", "n_pieces"), SHAPES.values(), ids=SHAPES)
def test_all_that_is_read_is_paid_from_one_budget(shape: Shape, n_pieces: int, seed: int) -> None:
    """Of all pieces of a lost home together, and of old versions, too."""
    bytes_s = 20 * 4096

    async def work() -> None:
        world = World(shape, n_pieces, seed, bytes_s)
        for _ in range(25):
            world.commit()
        lost = world.rng.choice(world.servers)
        world.lose(lost)

        async def take(taker: int, region: int, attempt: int, records: bool, staged: Any) -> None:
            n_bytes = sum(each for _, layers in staged for *_, each in layers)
            world.reads.append((world.now_s, records, n_bytes))

        async def one(region: int) -> None:
            record, found = world.core.record_of(region), world.repairs.repairable(region)
            assert record is not None
            assert found is not None
            await world.repairs.bring(record, TAKER, ATTEMPT, found)

        world.take_repaired = take  # type: ignore[method-assign]
        await asyncio.gather(*map(one, world.core.homed_at(lost)))
        n_bytes = [sum(each for *_, of, each in world.reads if of == which) for which in (0, 1)]
        assert min(n_bytes) > 0
        # Nothing else has taken time.
        assert world.now_s + world.rate.wait_s() == pytest.approx(sum(n_bytes) / bytes_s)
        await asyncio.gather(*world.tasks)

    asyncio.run(work())


def test_a_step_is_a_second_of_the_budget_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repairs, "LEAST_LAYER_BLOCKS", 2)

    async def work() -> None:
        world = World(Shape(2, 1), 4, seed=5, bytes_s=8 * 4096)
        for _ in range(25):
            world.commit()
        region = world.region(0)
        world.lose(world.core.homes_of(region)[0])
        await world.bring(region)
        of_blocks = [n_bytes for _, are_records, n_bytes in world.reads if not are_records]
        assert len(of_blocks) > 1
        assert max(of_blocks) == 8 * 4096
        assert world.base == world.at[region][world.sealed or 0]

    asyncio.run(work())


def test_who_takes_a_repair_hears_of_it_while_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """It drops one that is silent."""
    monkeypatch.setattr(repairs, "SAY_S", 0.001)

    async def work() -> None:
        world = World(Shape(2, 1), 4, seed=5, bytes_s=4096)
        for _ in range(9):
            world.commit()
        region = world.region(0)
        world.lose(world.core.homes_of(region)[0])
        world.rate.spend(10**9)

        heard = asyncio.Event()

        async def take(*arguments: Any) -> None:
            await World.take_repaired(world, *arguments)
            if len(world.reads) == 3:
                heard.set()

        async def sleep(seconds: float) -> None:
            await heard.wait()
            await world.sleep(seconds)

        world.take_repaired = take  # type: ignore[method-assign]
        world.rate._sleep = sleep
        await asyncio.wait_for(world.bring(region), 30.0)
        assert [n_bytes for *_, n_bytes in world.reads[:3]] == [0, 0, 0]
        assert world.sealed is not None
        assert not world.layers

    asyncio.run(work())
