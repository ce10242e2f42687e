"""A registry's part that moves homes, around page servers that are made up. No Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._protocol.messages import (
    CommitRequest,
    Committed,
    Publication,
    RegionRecord,
    ServerInfo,
    Write,
)
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.commits import Commits
from clamor_ray.actors.commits.held_commits import HeldCommits
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.lost_homes.lost_blocks import Losses
from clamor_ray.actors.lost_homes.unheard_homes import UnheardHomes
from clamor_ray.actors.moves.drains import Drains
from clamor_ray.actors.moves.moves import Moves
from clamor_ray.actors.moves.switches import Switches
from clamor_ray.actors.registry.registry_core import RegistryCore

GIVER, TAKER, OTHER = 1, 2, 3
N_BLOCKS = 40
DATA = BitMap(range(4, 30))

Blocks = dict[int, int]  # block -> the version that wrote it


class Servers:
    """What each server has. A hook is called in the middle of a method, once."""

    def __init__(self, core: RegistryCore) -> None:
        self.core = core
        self.homes: dict[tuple[int, int], dict[int, Blocks]] = {}  # (server, region): versions
        self.terms: dict[tuple[int, int], int] = {}
        self.commits: dict[int, list[int]] = {}  # commit id -> what it writes
        self.layers: dict[tuple[int, int], tuple[int, Blocks]] = {}  # (server, commit id)
        # Of an attempt at the taker: (number, record, blocks, records, the version it is sealed at)
        self.attempts: dict[tuple[int, int], list[Any]] = {}
        self.calls: list[tuple[Any, ...]] = []
        self.before: dict[str, list[Callable[[], Any]]] = {}
        self.after: dict[str, list[Callable[[], Any]]] = {}

    async def _hooks(self, hooks: dict[str, list[Callable[[], Any]]], method: str) -> None:
        if some := hooks.get(method):
            result = some.pop(0)()
            if asyncio.iscoroutine(result):
                await result

    async def _now(self, method: str, server_id: int, *what: Any) -> None:
        self.calls.append((method, server_id, *what))
        await self._hooks(self.before, method)
        if (reason := self.why_lost(server_id)) is not None:
            raise errors.HomeLostError(f"It is gone: {reason}")

    def of(self, region: int) -> tuple[int, ...]:
        return self.core.homes_of(region)

    def why_lost(self, server_id: int) -> str | None:
        return getattr(self.core.locate(server_id), "reason", None)

    async def examine(self, server_id: int) -> None:
        return None

    # -- of commits

    async def pull(self, home: int, commit_id: int, write: Write) -> None:
        await self._now("pull", home, write.region)

    async def publish(self, home: int, items: list[Publication]) -> list[tuple[int, int]]:
        await self._now("publish", home)
        for item in items:
            versions = self.homes[home, item.region]
            newest = max(versions)
            if item.version == newest + 1:
                written = dict.fromkeys(self.commits[item.commit_id], item.version)
                versions[item.version] = {**versions[newest], **written}
        return [(item.region, max(self.homes[home, item.region])) for item in items]

    async def oldest_version(self, home: int, region: int) -> int:
        await self._now("oldest_version", home)
        return min(self.homes[home, region])

    async def drop(self, home: int, commit_id: int, regions: list[int]) -> None:
        return None

    # -- of moves

    async def home_blocks(self, giver: int, region: int, version: int) -> bytes:
        await self._now("home_blocks", giver)
        return bytes(BitMap(self.homes[giver, region][version]).serialize())

    async def stage_home(
        self, giver: int, region: int, version: int, commit_id: int, blocks: bytes
    ) -> int:
        await self._now("stage_home", giver)
        at = self.homes[giver, region][version]
        wanted = BitMap.deserialize(blocks)
        assert len(wanted)
        self.layers[giver, commit_id] = version, {each: at.get(each, 0) for each in wanted}
        return 4096 * len(wanted)

    async def stage_records(
        self, giver: int, region: int, first_version: int, commit_ids: list[int], most_bytes: int
    ) -> list[int]:
        await self._now("stage_records", giver)
        versions = self.homes[giver, region]
        assert first_version + len(commit_ids) in versions, "the commit after it is not known"
        for version, commit_id in enumerate(commit_ids, first_version):
            self.layers[giver, commit_id] = version, versions[version]
        return [4096] * len(commit_ids)

    async def drop_layers(self, giver: int, region: int, commit_ids: list[int]) -> None:
        for commit_id in commit_ids:
            self.layers.pop((giver, commit_id), None)

    async def retain(self, taker: int, floors: dict[int, int | None]) -> None:
        await self._now("retain", taker, floors)

    async def take_begin(
        self, taker: int, record: RegionRecord, attempt: int, n_bytes: int, lost: bytes
    ) -> None:
        await self._now("take_begin", taker, n_bytes, lost)
        self.attempts[taker, record.region] = [attempt, record, {}, {}, None]

    def _attempt(self, taker: int, region: int, attempt: int) -> list[Any]:
        found = self.attempts.get((taker, region))
        if found is None or found[0] != attempt:
            raise errors.ServerUnavailableError("There is no such attempt.")
        return found

    async def take(
        self, taker: int, region: int, attempt: int, giver: int, layers: list[tuple[int, int]]
    ) -> None:
        await self._now("take", taker)
        for commit_id, _ in layers:
            _, blocks = self.layers[giver, commit_id]
            self._attempt(taker, region, attempt)[2].update(blocks)

    async def take_records(
        self, taker: int, region: int, attempt: int, giver: int, layers: list[tuple[int, int]]
    ) -> None:
        await self._now("take_records", taker)
        records = self._attempt(taker, region, attempt)[3]
        for commit_id, _ in layers:
            version, blocks = self.layers[giver, commit_id]
            assert not records or version == max(records) + 1, "a gap"
            records[version] = blocks

    async def take_seal(self, taker: int, region: int, attempt: int, version: int) -> None:
        await self._now("take_seal", taker)
        self._attempt(taker, region, attempt)[4] = version
        await self._hooks(self.after, "take_seal")

    async def take_drop(self, taker: int, region: int, attempt: int) -> None:
        await self._now("take_drop", taker)
        if self.attempts.get((taker, region), [0])[0] == attempt:
            del self.attempts[taker, region]

    async def rehome(self, server_id: int, record: RegionRecord) -> None:
        await self._now("rehome", server_id, record.homes[0])
        key = server_id, record.region
        if record.term < self.terms.get(key, 0):
            return
        found = self.attempts.get(key)
        if server_id in record.homes:
            if key not in self.homes:
                if found is None or found[4] is None:
                    raise errors.HomeLostError("Nothing of it is here.")
                assert found[1].term == record.term
                self.homes[key] = {**found[3], found[4]: found[2]}
                del self.attempts[key]
        else:
            self.homes.pop(key, None)
        self.terms[key] = record.term
        await self._hooks(self.after, f"rehome {server_id}")

    def restart(self, server_id: int) -> None:
        """What is sealed, and what is home, is with its keeper."""
        for key, attempt in list(self.attempts.items()):
            if key[0] == server_id and attempt[4] is None:
                del self.attempts[key]


class World:
    """A region at version 0 with data in some blocks, at GIVER."""

    def __init__(self, directory: Path, n_servers: int = 3) -> None:
        self.core = RegistryCore()
        self.servers = Servers(self.core)
        self.journal = Journal(directory)
        self.log = CommitLog()
        self.losses = Losses()
        for server_id in range(1, n_servers + 1):
            info = ServerInfo(server_id, f"node {server_id}", "127.0.0.1", 1, "name", "0")
            self.core.server_registered(info)
            self.journal.save_server(info)
        self.region = self.add_region()
        self._next_commit = 100
        self.again: list[int] = []
        self._compose()

    def _compose(self) -> None:
        self.held, self.unheard = HeldCommits(), UnheardHomes()
        self.commits = Commits(self.log, self.journal, self.servers, 5.0, held=self.held)
        self.moved: list[tuple[int, int]] = []

        async def look_again(region: int) -> None:
            self.again.append(region)

        self.switches = Switches(
            *(self.core, self.log, self.journal, self.servers, self.held, self.losses),
            self.unheard,
            moved=lambda region, home: self.moved.append((region, home)),
            look_again=look_again,
        )
        self.moves = Moves(
            *(self.core, self.log, self.servers, self.commits, self.held, self.losses),
            self.switches,
        )
        self.drains = Drains(self.core, self.journal, self.moves)

    def add_region(self, home: int = GIVER, n_blocks: int = N_BLOCKS) -> int:
        record = self.core.create_region(n_blocks * 4096, home)
        self.journal.create_region(record, 0, record.region + 1)
        self.core.seal(record.region)
        self.journal.seal(record.region)
        self.log.open(record.region, record.homes)
        self.servers.homes[home, record.region] = {0: dict.fromkeys(DATA, 0)}
        return record.region

    def restart(self) -> None:
        """Another registry, with what the journal has."""
        saved = self.journal.load()
        core, log = RegistryCore(), CommitLog()
        core.restore(
            saved.next_region,
            [(each.record, core_state(each.state), each.request_id) for each in saved.regions],
            saved.servers,
            saved.lost,
            0.0,
        )
        for each in saved.regions:
            log.open(each.record.region, each.record.homes)
        log.restore(saved.entries, saved.plans, saved.acknowledged, saved.outcomes, ())
        self.core, self.log = core, log
        self.servers.core = core
        self._compose()
        self.drains.take_back(saved.leaving)
        self.switches.take_back(saved.givers)

    def request(self, *blocks: int, region: int = 0) -> CommitRequest:
        self._next_commit += 1
        region = region or self.region
        self.servers.commits[self._next_commit] = list(blocks)
        packed = bytes(BitMap(blocks).serialize())
        base = self.log.newest(region)
        write = Write(region, base, len(blocks), packed, 4096 * (1 + len(blocks)), OTHER)
        return CommitRequest(self._next_commit, (write,))

    async def commit(self, *blocks: int, region: int = 0) -> Committed:
        return await self.commits.commit(self.request(*blocks, region=region))

    def lose(self, server_id: int) -> None:
        self.core.server_lost(server_id, "its node is dead")
        self.log.server_lost(server_id)
        self.drains.lost(server_id)
        for key in [key for key in self.servers.homes if key[0] == server_id]:
            del self.servers.homes[key]
        for key in [key for key in self.servers.attempts if key[0] == server_id]:
            del self.servers.attempts[key]

    def free(self) -> None:
        self.core.free(self.region)
        self.log.close(self.region)

    def home(self, region: int = 0) -> int:
        (home,) = self.core.homes_of(region or self.region)
        return home

    def newest(self) -> Blocks:
        """What the newest version is, from its commits."""
        blocks = dict.fromkeys(DATA, 0)
        for version, commit_id in self.log.published(self.region, 0):
            blocks.update(dict.fromkeys(self.servers.commits[commit_id], version))
        return blocks

    async def until_told(self) -> None:
        while self.log.homes_behind():
            await self.commits.tell_now(self.home())

    async def check(self) -> None:
        """The home has all of the newest version, commits go on, and nothing is left behind."""
        for _ in range(20):
            await asyncio.sleep(0)
        self.core.check()
        self.log.check()
        (saved,) = [
            each for each in self.journal.load().regions if each.record.region == self.region
        ]
        record = self.core.record_of(self.region)
        assert record is not None
        assert (saved.record.homes, saved.record.term) == (record.homes, record.term)
        await self.commit(5)
        await self.until_told()
        versions = self.servers.homes[self.home(), self.region]
        assert versions[max(versions)] == self.newest()
        assert not self.held.is_held([self.region])
        assert self.region not in self.unheard
        assert self.region not in self.unheard.moving
        assert not self.servers.layers
        assert not self.servers.attempts
        assert not self.moves._staged
        assert not self.moves._moving
        homes = {server_id for server_id, region in self.servers.homes if region == self.region}
        assert homes == {self.home()}

    async def close(self) -> None:
        await self.moves.close()
        await self.switches.close()
        await self.commits.close()


def core_state(name: str) -> Any:
    from clamor_ray.actors.registry.registry_core import RegionState

    return RegionState(name)


def run(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(work(), 30))
