"""Where a commit's layer is staged: a home that has lost it is never told that it has it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._native.client import PC_ERR_HOME_LOST
from clamor_ray._protocol.messages import CommitRequest, Publication, ServerInfo, Write
from clamor_ray._protocol.names import server_id_of
from clamor_ray._protocol.source import ZEROS, Source
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.commits import Commits
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.lost_homes.rebuilds import Rebuilds
from clamor_ray.actors.page_server.rebuilt_homes import layer_error
from clamor_ray.actors.registry.registry_core import RegistryCore
from clamor_ray.actors.registry.versions import Versions
from tests.support.rebuild_rig import Servers

NODE = "a node"
FIRST, SECOND = server_id_of(NODE), server_id_of(NODE, 1)


class Homes(Servers):
    """The node's second page server has no layer of the first one's."""

    def __init__(self, core: RegistryCore) -> None:
        super().__init__(core)
        self.pulled: list[tuple[int, int]] = []
        self.told: list[Publication] = []

    def of(self, region: int) -> tuple[int, ...]:
        return self.core.homes_of(region)

    async def pull(self, home: int, commit_id: int, write: Write) -> None:
        self.pulled.append((home, write.staged_at))
        if write.staged_at != home:
            raise layer_error(PC_ERR_HOME_LOST, commit_id, write.region, write.staged_at, home)

    async def publish(self, home: int, items: list[Publication]) -> list[tuple[int, int]]:
        self.told += items
        return [(item.region, item.version) for item in items]

    async def oldest_version(self, home: int, region: int) -> int:
        return 0


def test_a_layer_that_died_with_its_server_is_not_committed_at_the_next_one(
    tmp_path: Path,
) -> None:
    """The region was rebuilt on the writer's own node: its home is where the writer is, and has
    never had the layer. The writer stages it again, and that is committed."""

    async def work() -> None:
        core, log, journal = RegistryCore(), CommitLog(), Journal(tmp_path / "journal")
        homes = Homes(core)

        def joins(server_id: int) -> None:
            info = ServerInfo(server_id, NODE, "127.0.0.1", 1, "name", "0")
            core.server_registered(info)
            journal.save_server(info)

        joins(FIRST)
        record = core.create_region(40960, FIRST)
        journal.create_region(record, 0, record.region + 1)
        core.seal(record.region)
        log.open(record.region, record.homes, record.length_bytes)
        rebuilds = Rebuilds(core, log, journal, homes)
        rebuilds.set_source(record.region, Source(ZEROS, 0, b"", b""))
        core.server_lost(FIRST, "it died, with its keeper")
        log.server_lost(FIRST)
        joins(SECOND)
        rebuilds.server_lost(FIRST)
        assert await rebuilds.settle(record.region, 10)
        assert core.homes_of(record.region) == (SECOND,)

        commits = Commits(log, journal, homes, 10.0)
        versions = Versions(log, journal, commits, rebuilds, 10.0)
        blocks = BitMap([4]).serialize()
        gone = CommitRequest(9, (Write(record.region, 0, 1, blocks, 8192, FIRST),), 5.0)
        with pytest.raises(errors.CommitAbortedError):
            await versions.commit(gone)
        assert homes.pulled == [(SECOND, FIRST)]
        assert log.newest(record.region) == 0
        again = CommitRequest(10, (Write(record.region, 0, 1, blocks, 8192, SECOND),), 5.0)
        assert (await versions.commit(again)).versions == {record.region: 1}
        await commits.close()
        journal.close()

    asyncio.run(work())
