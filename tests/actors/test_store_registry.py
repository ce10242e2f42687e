"""The registry of a session with a store, without Ray: it is opened, killed, and opened again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from clamor_ray import errors
from clamor_ray._protocol.messages import (
    STORED_IDS,
    Counted,
    RegionRecord,
    ServerConfig,
    ServerInfo,
)
from clamor_ray._protocol.names import server_id_of
from clamor_ray._redundancy.groups import PieceLayout
from clamor_ray._store.directories import open_registry
from clamor_ray.actors.commits.journal import ANY_REGION, Journal, Saved
from clamor_ray.actors.process import journals
from clamor_ray.actors.registry import registry as registry_module
from clamor_ray.actors.registry.registry import Registry
from clamor_ray.actors.store import store_registry
from clamor_ray.actors.store.store_registry import MARK, StoreRegistry
from clamor_ray.actors.window.address_claims import LEAST_BYTES, REGION_IDS, AddressClaims
from tests.actors.test_registry_facade import FakeHandle
from tests.support.claims_table import ListTable

NODE = "ab" * 28
DIRECTORY = "cd" * 16
INFO = ServerInfo(
    *(server_id_of(DIRECTORY), NODE, "10.0.0.1", 1, "name", "0.1.0"), directory=DIRECTORY
)
SCOPE = "aaaaaa000001"


@dataclass
class World:
    """A machine with a store, and the cluster that it is in now."""

    path: Path
    patch: pytest.MonkeyPatch
    n_sessions: int = 0
    refusals: list[errors.ClamorError] = field(default_factory=list)

    def cluster(self) -> ListTable:
        """A new one: its log of addresses."""
        session_directory = self.path / f"session-{self.n_sessions}"
        session_directory.mkdir(exist_ok=True)
        self.patch.setattr(journals, "session_directory", lambda: session_directory)
        table = ListTable()
        self.patch.setattr(registry_module, "RayTable", lambda: table)
        return table

    def config(self) -> ServerConfig:
        """Of a new session."""
        self.n_sessions += 1
        return ServerConfig(
            SCOPE,
            "0.1.0",
            session_name="features",
            began_at_s=float(self.n_sessions),
            store=str(self.path / "store" / "features"),
            store_id="a" * 32,
        )

    def run(
        self,
        config: ServerConfig,
        *steps: Callable[[StoreRegistry], Awaitable[None]],
        **more: object,
    ) -> None:
        """Each step has a registry of its own, started again after the one before was killed."""

        async def one(step: Callable[[StoreRegistry], Awaitable[None]]) -> None:
            registry = StoreRegistry(config, bytes(32), **more)  # type: ignore[arg-type]
            try:
                await asyncio.wait_for(step(registry), 20)
            finally:  # as by SIGKILL: nothing is told
                if registry._refusal is None:
                    registry._background.close()
                    await registry._directories.close()
                    await registry._commits.close()
                    await registry._lineage.stop()
                registry._let_go()

        for step in steps:
            asyncio.run(one(step))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setattr(registry_module.keeper_process, "raylet_pid", lambda: 1)
    monkeypatch.setattr(registry_module.keeper_process, "hold_and_watch", lambda *_: -1)
    monkeypatch.setattr(registry_module.ray, "get_actor", lambda *_, **__: FakeHandle())
    monkeypatch.setattr(journals, "find_registry", lambda scope: object())  # all go on
    monkeypatch.setattr(store_registry, "actor_names", list)
    monkeypatch.setattr(store_registry, "CLOSING_S", 0.3)
    monkeypatch.setattr(store_registry, "_end_after", lambda seconds: None)
    world = World(tmp_path, monkeypatch)
    world.cluster()
    return world


async def serve(registry: Registry) -> None:
    """Its node has a page server, with a directory in the store."""
    server_id, _ = await registry.begin_server(NODE, DIRECTORY)
    await registry.register_server(replace(INFO, server_id=server_id))


async def made(registry: Registry, name: str = "", *inside: bytes) -> RegionRecord:
    await serve(registry)
    record = await registry.create_region(10_000, NODE)
    await registry.seal(record.region, None, Counted(b"%d" % record.region, inside))
    if name:
        await registry.give_name(name, record.region, b"packed")
    return record


def test_a_store_is_opened_in_another_cluster(world: World) -> None:
    records: list[RegionRecord] = []

    async def first(registry: StoreRegistry) -> None:
        assert (await registry.report()).config.store.endswith("/store/features")
        named, _ = await made(registry, "kept"), await made(registry)
        assert await registry.opened_at(named.region) == 0
        records.append(named)

    async def again(registry: StoreRegistry) -> None:
        assert (await registry.report()).n_variables == 2  # the same session, after a kill

    async def elsewhere(registry: StoreRegistry) -> None:
        (named,) = records
        assert registry._names.find("kept") is not None
        assert registry._core.record_of(named.region) == named
        assert (await registry.report()).n_variables == 1
        assert registry._core.servers() == ()
        later = await made(registry)
        assert later.region == named.region + 2
        assert later.base_address not in range(named.base_address, named.base_address + 10_000)

    world.run(world.config(), first, again)
    table = world.cluster()
    world.run(world.config(), elsewhere, again)
    (named,) = records
    (entry,) = table.entries(0)
    assert f'"{SCOPE}"'.encode() in entry
    assert named.region >= STORED_IDS
    assert named.region % REGION_IDS == 1
    assert named.on_disk


def test_an_earlier_session_in_the_same_cluster_was_killed(world: World) -> None:
    """Its directory is there still; the store is opened anew all the same."""

    async def first(registry: StoreRegistry) -> None:
        await made(registry)
        (registry._directory / "left").touch()

    async def second(registry: StoreRegistry) -> None:
        assert (await registry.report()).n_variables == 0
        assert not (registry._directory / "left").exists()

    world.run(world.config(), first)
    world.run(world.config(), second)


def test_a_registry_killed_before_it_was_open_opens_the_store_anew(world: World) -> None:
    async def first(registry: StoreRegistry) -> None:
        await made(registry)
        (registry._directory / MARK).unlink()

    async def second(registry: StoreRegistry) -> None:
        assert (await registry.report()).n_variables == 0

    world.run(world.config(), first, second)


def test_all_of_it_is_on_disk_whoever_asks(world: World) -> None:
    async def work(registry: StoreRegistry) -> None:
        await serve(registry)
        assert (await registry.create_region(4096, NODE, on_disk=False)).on_disk
        created = await registry.create_pieces(8 << 20, PieceLayout(4 << 20), NODE, 5, 0)
        assert created.whole.on_disk
        assert all(piece.on_disk for piece in created.pieces)
        record = await registry.create_region(4096, NODE)
        spare = await registry.seal_and_create(record.region, None, 4096, NODE, 6)
        assert spare is not None
        assert spare.on_disk

    world.run(world.config(), work)


def test_what_is_inside_of_a_variable_is_written_down(world: World) -> None:
    async def work(registry: StoreRegistry) -> None:
        for anchor in (b"1", b"2"):
            registry._counts.made([anchor])
        inner = await made(registry)
        registry._counts.hold(inner.region, b"of inner")  # as of who has found it by a name
        outer = await made(registry, "outer", b"of inner")
        unknown = await made(registry, "unknown", b"of nobody knows what")
        assert set(registry._journal.load().inside) == {
            (outer.region, inner.region),
            (unknown.region, ANY_REGION),
        }
        await registry.free(inner.region)
        other = await made(registry, "other", b"of inner")  # what was in it may be in this one
        assert (other.region, ANY_REGION) in registry._journal.load().inside

    world.run(world.config(), work)


def test_a_version_from_before_the_opening_is_that_of_the_opening(world: World) -> None:
    records: list[RegionRecord] = []

    async def first(registry: StoreRegistry) -> None:
        records.append(await made(registry, "kept"))
        with registry._journal._transaction() as db:
            values = [(records[0].region, version, version, b"", None) for version in (1, 2, 3)]
            db.executemany("INSERT INTO commits VALUES (?, ?, ?, ?, ?)", values)

    async def second(registry: StoreRegistry) -> None:
        assert await registry.opened_at(records[0].region) == 3

    world.run(world.config(), first)
    world.run(world.config(), second, second)


def refused(world: World, config: ServerConfig, **more: object) -> errors.ClamorError:
    caught: list[errors.ClamorError] = []

    async def work(registry: StoreRegistry) -> None:
        try:
            await registry.report()
        except errors.ClamorError as error:
            caught.append(error)
        await registry.shutdown()

    world.run(config, work, **more)
    (error,) = caught
    return error


def test_a_store_that_is_open_elsewhere_is_not_opened(world: World) -> None:
    config = world.config()
    other = open_registry(Path(config.store), store_id=config.store_id, scope=SCOPE)
    error = refused(world, config)
    assert isinstance(error, errors.StoreInUseError)
    assert f"process {os.getpid()} on" in error.message
    other.close()

    async def work(registry: StoreRegistry) -> None:
        await registry.report()

    world.run(config, work)


def test_a_store_that_is_another_one_meanwhile_is_not_opened(world: World) -> None:
    config = world.config()
    open_registry(Path(config.store), store_id=config.store_id, scope=SCOPE).close()
    other = refused(world, replace(config, store_id="b" * 32))
    assert isinstance(other, errors.StoreIncompleteError)
    other = refused(world, replace(config, job_scope="aaaaaa000002"))
    assert isinstance(other, errors.StoreIncompleteError)
    assert "Open it again" in str(other)


def test_a_store_whose_addresses_are_taken_changes_nothing(world: World) -> None:
    async def first(registry: StoreRegistry) -> None:
        await made(registry)

    config = world.config()
    world.run(config, first)
    table = world.cluster()
    before = saved_in(config)
    begin = min(begin for begin, _ in before.claims)
    AddressClaims(table, "other", lambda scope: False, window=(begin, begin + LEAST_BYTES)).claim(
        1, 0
    )
    before = saved_in(config)
    again = world.config()
    error = refused(world, again)
    assert isinstance(error, errors.AddressClashError)
    assert "session other has addresses there" in error.message
    assert saved_in(config) == before

    world.cluster()
    error = refused(world, again, avoid=[(begin, begin + 4096)])
    assert "holds objects of a session that has ended" in error.message


def saved_in(config: ServerConfig) -> Saved:
    journal = Journal(Path(config.store) / "registry")
    try:
        return journal.load()
    finally:
        journal.close()


def claims_of(world: World, config: ServerConfig) -> list[tuple[int, int]]:
    return list(saved_in(config).claims)


def test_a_page_server_is_told_what_its_directory_has(world: World) -> None:
    """At another node of another cluster; what it answered before is nothing any more."""
    regions: list[int] = []

    async def first(registry: StoreRegistry) -> None:
        regions.append((await made(registry, "kept")).region)

    async def second(registry: StoreRegistry) -> None:
        other = "ef" * 28
        assert await registry.begin_server(other, DIRECTORY) == (INFO.server_id, False)
        (stored,) = (await registry.store_state(INFO.server_id)).regions
        assert stored.record.region == regions[0]
        assert registry._commits._n_begins == {INFO.server_id: 1}
        await registry.register_server(replace(INFO, node_id=other))
        assert registry._core.lives.directory_at(other) == DIRECTORY
        assert (await registry.lookup(regions[0])).homes == (INFO.server_id,)

    world.run(world.config(), first)
    world.cluster()
    world.run(world.config(), second)
