"""The registry without Ray: what a journal that cannot be written leaves as it was.

Its page servers are only known, never called.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import pickle
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyroaring import BitMap
from ray.exceptions import RayError, RayTaskError

from clamor_ray import errors
from clamor_ray._protocol import names
from clamor_ray._protocol.idempotency import IdempotencyKey, Name, digest_of
from clamor_ray._protocol.messages import (
    INLINE_BASE,
    CommitRequest,
    FreeAnswer,
    Pinned,
    RegionFreed,
    RegionRecord,
    RegionUnknown,
    ServerConfig,
    ServerInfo,
    ServerLost,
    Write,
)
from clamor_ray._protocol.names import server_id_of
from clamor_ray._protocol.refusals import IllegalTransition, NoSuchRegion, NoSuchServer
from clamor_ray._protocol.registry_client import RegistryClient
from clamor_ray._protocol.rpc import pack, unpack
from clamor_ray._protocol.source import SHARED, Source
from clamor_ray._redundancy.groups import PieceLayout, Shape
from clamor_ray.actors.commits.committed import Limits
from clamor_ray.actors.lost_homes.lost_blocks import LostBlocks
from clamor_ray.actors.process import journals, keeper_process
from clamor_ray.actors.registry import late_writes, regions, retiring, spare_regions
from clamor_ray.actors.registry import regions as regions_module
from clamor_ray.actors.registry import registry as registry_module
from clamor_ray.actors.registry.registry import Registry
from clamor_ray.actors.registry.registry_core import RegionState
from tests.support.claims_table import ListTable
from tests.support.lab import troubles
from tests.support.server_rig import until

NODE = "ab" * 28
HOME = server_id_of(NODE)
INFO = ServerInfo(HOME, NODE, "10.0.0.1", 1, "name", "0.1.0")
CONFIG = ServerConfig("scope", "0.1.0")


class FakeHandle:
    """An actor whose every call is answered with None."""

    def __getattr__(self, method: str) -> Any:
        class Method:
            @staticmethod
            async def remote(*arguments: Any) -> Any:
                if method == "hello":
                    return INFO, []
                if method == "retire":
                    return pack(*(True for _ in unpack(arguments[0])))
                return True

        return Method


class FakeJournalIsFull:
    def __init__(self, registry: Registry) -> None:
        self._db = registry._journal
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> None:
        def full(*_: object) -> None:
            raise errors.JournalFullError("The disk is full.")

        for method in (
            "create_region",
            "seal",
            "set_states",
            "free_inline",
            "save_server",
            "lose_server",
            "commit",
            "abort",
            "acknowledge",
            "trim",
        ):
            self._patch.setattr(self._db, method, full)

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.setattr(journals, "session_directory", lambda: tmp_path)
    monkeypatch.setattr(registry_module.keeper_process, "raylet_pid", lambda: 1)
    monkeypatch.setattr(registry_module.keeper_process, "hold_and_watch", lambda *_: -1)
    monkeypatch.setattr(registry_module.ray, "get_actor", lambda *_, **__: FakeHandle())
    monkeypatch.setattr(late_writes, "SAVE_AGAIN_S", 0.02)
    table = ListTable()  # the cluster's: it outlives a registry
    monkeypatch.setattr(registry_module, "RayTable", lambda: table)

    def runner(*steps: Callable[[Registry], Awaitable[None]]) -> None:
        """Each step has a registry of its own, with the journal of the one before."""

        async def one(step: Callable[[Registry], Awaitable[None]]) -> None:
            registry = Registry(CONFIG, bytes(32))
            try:
                await asyncio.wait_for(step(registry), 20)
            finally:  # as by SIGKILL: nothing is told
                registry._background.close()
                await registry._commits.close()
                await registry._lineage.stop()
                registry._journal.close()

        for step in steps:
            asyncio.run(one(step))

    return runner


async def made(registry: Registry) -> RegionRecord:
    await registry.register_server(INFO)
    record = await registry.create_region(8192, NODE)
    return await registry.seal(record.region)


def write(region: int, base: int) -> Write:
    return Write(region, base, 1, BitMap([1]).serialize(), 8192, HOME)


def test_a_full_journal_refuses_what_must_be_written(run: Callable[..., None]) -> None:
    async def work(registry: Registry) -> None:
        full = FakeJournalIsFull(registry)
        with full, pytest.raises(errors.JournalFullError):
            await registry.register_server(INFO)
        assert await registry.servers() == ()
        record = await made(registry)
        with full, pytest.raises(errors.JournalFullError):
            await registry.create_region(8192, NODE, 5)
        registry._core.check()
        assert registry._core.count_by_state() == {
            "creating": 0,
            "ready": 1,
            "freed": 0,
            "dropping": 0,
        }
        second = await registry.create_region(8192, NODE, 5)
        assert second.base_address > record.base_address
        with full, pytest.raises(errors.JournalFullError):
            await registry.seal(second.region)
        assert await registry.lookup(second.region) == RegionUnknown(second.region)
        await registry.seal(second.region)
        with full, pytest.raises(errors.JournalFullError):
            await registry.free(second.region)
        assert await registry.lookup(second.region) == second
        request = CommitRequest(9, (write(second.region, 0),))
        with full, pytest.raises(errors.JournalFullError):
            await registry.commit(request)
        with full, pytest.raises(errors.JournalFullError):
            await registry.outcome(10)
        with full, pytest.raises(errors.JournalFullError):
            await registry.free(INLINE_BASE + 1)
        assert (await registry.commit(request)).versions == {second.region: 1}
        assert (await registry.lookup(second.region)).version == 1

    async def after(registry: Registry) -> None:
        assert registry._core.count_by_state()["ready"] == 2
        assert await registry.lookup(2) == RegionFreed(2)  # the id of the one that was refused
        assert [entry.version for entry in await registry.latest([1, 3])] == [0, 1]

    run(work, after)


def test_what_need_not_be_written_at_once_is_written_later(run: Callable[..., None]) -> None:
    async def work(registry: Registry) -> None:
        record = await made(registry)
        again = await registry.create_region(8192, NODE)
        with FakeJournalIsFull(registry):
            assert (await registry.register_server(INFO)).epoch == 2
            await registry.abandon(again.region)
            await asyncio.sleep(0.1)
            assert registry._core.record_of(again.region) is None
        deadline = asyncio.get_running_loop().time() + 5
        while not registry._late.is_done:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)
        assert [saved.record.region for saved in registry._journal.load().regions] == [
            record.region
        ]

    async def after(registry: Registry) -> None:
        assert (await registry.servers())[0].epoch == 2
        assert registry._core.count_by_state()["ready"] == 1
        registry._core.check()

    run(work, after)


def test_the_journal_forgets_old_frees(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(registry: Registry) -> None:
        monkeypatch.setattr(registry._log, "_limits", Limits(max_freed_inline=3))
        for n in range(10):
            await registry.free(INLINE_BASE + n)
        kept = tuple(INLINE_BASE + n for n in (7, 8, 9))
        assert tuple(registry._log._freed_inline) == kept
        assert registry._journal.load().freed_inline == kept

    run(work)


def test_freed_inline_variables_stay_freed(run: Callable[..., None]) -> None:
    inline = INLINE_BASE + 1

    async def work(registry: Registry) -> None:
        request = CommitRequest(5, (Write(inline, 0, 0, b"", 0, 0, None, b"one"),))
        assert (await registry.commit(request)).versions == {inline: 1}
        assert (await registry.at(inline, 1)).payload == b"one"

    async def after(registry: Registry) -> None:
        assert (await registry.latest([inline]))[0].payload == b"one"
        await registry.free(inline)

    async def freed(registry: Registry) -> None:
        with pytest.raises(errors.FreedError):
            await registry.latest([inline])

    run(work, after, freed)


def test_dropped_tasks_stay_dropped(run: Callable[..., None]) -> None:
    quick, late = bytes([1]) * 16, bytes([2]) * 16

    def word(token: bytes, commit_id: int) -> CommitRequest:
        name = Name(token, digest_of([1]), 0)
        return CommitRequest(commit_id, (IdempotencyKey(name, commit_id).write(),))

    async def work(registry: Registry) -> None:
        await registry.commit(word(quick, 1))
        assert await registry.drop_keys([quick, late]) == 1
        assert await registry.drop_keys([quick, late]) == 0

    async def after(registry: Registry) -> None:
        for token in (quick, late):
            with pytest.raises(errors.FreedError, match="cancelled"):
                await registry.commit(word(token, 2))
        registry._log.check()

    run(work, after)


def test_what_is_filled_at_a_lost_home_is_not_sealed(run: Callable[..., None]) -> None:
    async def work(registry: Registry) -> None:
        await registry.register_server(INFO)
        record = await registry.create_region(8192, NODE)
        again = await registry.renew_server(NODE, HOME, "its keeper died with it")
        await registry.register_server(dataclasses.replace(INFO, server_id=again))
        with pytest.raises(IllegalTransition, match="died with it"):
            await registry.seal(record.region)
        assert [region.state for region in registry._journal.load().regions] == ["creating"]
        assert await registry.lookup(record.region) == RegionUnknown(record.region)

    run(work)


def test_what_has_lost_blocks_of_a_piece_is_not_sealed(run: Callable[..., None]) -> None:
    """Its maker has put them there: it makes all of it again."""

    async def work(registry: Registry) -> None:
        await registry.register_server(INFO)
        created = await registry.create_pieces(4 << 20, PieceLayout(2 << 20), NODE, 0, 0)
        for piece in created.pieces:
            await registry.seal(piece.region)
        lost = LostBlocks(1, 512, bytes(BitMap([3]).serialize()), "Why", "Do.")
        registry._losses.update({created.pieces[1].region: lost})
        with pytest.raises(IllegalTransition, match="not made, or lost"):
            await registry.seal(created.whole.region)
        registry._losses.update({created.pieces[1].region: None})
        await registry.seal(created.whole.region)

    run(work)


def test_who_asks_for_the_same_variable_again_is_at_work(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 1000.0
    monkeypatch.setattr(regions_module, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def work(registry: Registry) -> None:
        nonlocal now_s
        await registry.register_server(INFO)
        created = await registry.create_pieces(4 << 20, PieceLayout(2 << 20), NODE, 7, 0)
        for _ in range(3):
            now_s += 400.0
            again = await registry.create_pieces(4 << 20, PieceLayout(2 << 20), NODE, 7, 0)
            assert again.whole == created.whole
        now_s += 700.0  # nobody has said anything for so long
        new = await registry.create_pieces(4 << 20, PieceLayout(2 << 20), NODE, 7, 0)
        assert new.whole.region != created.whole.region

    run(work)


@pytest.mark.parametrize(
    ("n_gib", "shape"),
    [(3, Shape(1, 1)), (3.5, Shape(2, 1)), (16, Shape(3, 1)), (2, Shape(1, 3)), (0.1, Shape(1, 1))],
)
def test_parity_has_addresses_too(run: Callable[..., None], n_gib: float, shape: Shape) -> None:
    """A session claims 4 GiB of the window at a time, if it does not need more."""

    async def work(registry: Registry) -> None:
        await registry.register_server(INFO)
        for _ in range(50 if n_gib < 1 else 3):
            n_bytes, piece_bytes = int(n_gib * 2**30), 64 << 20
            created = await registry.create_pieces(
                n_bytes, PieceLayout(piece_bytes, shape), NODE, 0, 0
            )
            assert len(created.pieces) == created.whole.groups.n_regions
        registry._core.addresses.check()

    run(work)


def test_a_lost_page_server_that_registers_late_stays_lost(run: Callable[..., None]) -> None:
    """It was slow to start, and given up meanwhile: what was said of its regions holds."""

    async def work(registry: Registry) -> None:
        await made(registry)
        await registry.renew_server(NODE, HOME, "its keeper died with it")
        await asyncio.sleep(0)  # the verdict is in the journal
        registry._late.save_now()
        with pytest.raises(NoSuchServer, match="declared lost: its keeper died with it"):
            await registry.register_server(INFO)

    async def after(registry: Registry) -> None:
        assert registry._journal.load().lost == (ServerLost(HOME, "its keeper died with it"),)
        assert await registry.locate(HOME) == ServerLost(HOME, "its keeper died with it")
        with pytest.raises(NoSuchServer, match="declared lost"):
            await registry.register_server(INFO)

    run(work, after, after)


def test_regions_that_were_ending_go_on_ending(run: Callable[..., None]) -> None:
    async def work(registry: Registry) -> None:
        record = await made(registry)
        assert record.region == 1
        registry._journal.set_states([(1, "freed")])  # and died before it did anything

    async def after(registry: Registry) -> None:
        assert await registry.lookup(1) == RegionFreed(1)
        with pytest.raises(errors.FreedError):
            await registry.commit(CommitRequest(5, (write(1, 0),)))
        await registry.regions_idle([1], HOME)
        deadline = asyncio.get_running_loop().time() + 5
        while registry._journal.load().regions:
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)
        assert registry._core.addresses.bytes_in_use == 0
        assert (await registry.create_region(1, NODE)).region == 2

    run(work, after)


def test_a_page_server_that_is_new_is_written_down_on_a_full_disk(
    run: Callable[..., None], tmp_path: Path
) -> None:
    """It uses what is kept back for it; what else must be written is refused."""
    if os.geteuid() != 0:
        pytest.skip("a small disk can only be mounted as root")
    directory = tmp_path / names.journal_directory(CONFIG.job_scope)

    async def create_all(registry: Registry) -> None:
        for request in range(1, 100_000):
            await registry.create_region(8192, NODE, request)

    async def register(registry: Registry) -> None:
        assert registry._reserve.make()
        await made(registry)
        troubles.fill(directory / "filler")
        other = server_id_of(NODE, 1)
        with pytest.raises(errors.JournalFullError):
            await create_all(registry)
        troubles.fill(directory / "filler")
        await registry.register_server(dataclasses.replace(INFO, server_id=other))
        assert isinstance(await registry.locate(other), ServerInfo)

    async def after(registry: Registry) -> None:
        assert server_id_of(NODE, 1) in [info.server_id for info in await registry.servers()]

    with troubles.small_disk(directory, 3 * keeper_process.RESERVE_BYTES):
        run(register, after)


@pytest.mark.parametrize(
    "trouble",
    [
        RayError("not now"),
        RayTaskError("knows", "", KeyError("its own")).as_instanceof_cause(),  # is one, too
    ],
    ids=["silent", "raises"],
)
def test_an_unused_spare_is_given_back(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, trouble: Exception
) -> None:
    """Whoever has it may have ended. What a put has begun to fill is its maker's."""
    monkeypatch.setattr(spare_regions, "UNUSED_S", 0.1)
    filling: set[int] = set()
    not_now: list[Exception] = [trouble]

    def handle(*_: object, **__: object) -> Any:
        class Handle(FakeHandle):
            class knows:
                @staticmethod
                async def remote(regions: list[int]) -> list[bool]:
                    if not_now:
                        raise not_now.pop()
                    return [region in filling for region in regions]

        return Handle()

    monkeypatch.setattr(registry_module.ray, "get_actor", handle)

    async def work(registry: Registry) -> None:
        record = await made(registry)
        spares = []
        for request_id in (5, 6, 7):
            spare = await registry.seal_and_create(record.region, None, 8192, NODE, request_id)
            assert spare is not None
            spares.append(spare.region)
        unused, filled, sealed = spares
        filling.add(filled)
        await registry.seal(sealed)
        await until(lambda: registry._core.state(unused) is RegionState.GONE)
        assert not not_now  # what was not answered was asked again
        assert registry._core.state(filled) is RegionState.CREATING
        assert registry._core.state(sealed) is RegionState.READY
        await until(lambda: not registry._regions._spares.is_looking)
        again = await registry.seal_and_create(sealed, None, 8192, NODE, 8)
        assert again is not None
        await until(lambda: registry._core.state(again.region) is RegionState.GONE)
        with pytest.raises(NoSuchRegion):  # of a process that was stopped: it puts again
            await registry.seal(again.region)
        await registry.seal(filled)

    run(work)


def test_a_full_journal_gives_neither_a_seal_nor_a_spare(run: Callable[..., None]) -> None:
    """Both are one transaction: what is not written down is not there."""

    async def work(registry: Registry) -> None:
        await registry.register_server(INFO)
        first = await registry.create_region(8192, NODE)
        in_use = registry._core.addresses.bytes_in_use
        for _ in range(2):
            with FakeJournalIsFull(registry), pytest.raises(errors.JournalFullError):
                await registry.seal_and_create(first.region, None, 8192, NODE, 5)
            registry._core.check()
            assert registry._core.state(first.region) is RegionState.CREATING
            assert registry._core.addresses.bytes_in_use == in_use
        spare = await registry.seal_and_create(first.region, None, 8192, NODE, 5)
        assert spare is not None
        with FakeJournalIsFull(registry), pytest.raises(errors.JournalFullError):
            await registry.seal_and_create(first.region, None, 8192, NODE, 6)
        # What is answered a second time is the same, and is written once.
        assert await registry.seal_and_create(first.region, None, 8192, NODE, 5) == spare
        saved = {region.record.region: region.state for region in registry._journal.load().regions}
        assert saved == {first.region: "ready", spare.region: "creating"}
        with pytest.raises(NoSuchRegion):
            await registry.seal_and_create(spare.region + 99, None, 8192, NODE, 7)
        assert registry._core.count_by_state()["creating"] == 1

    run(work)


@pytest.mark.parametrize("failure", [RayError("no answer"), errors.ServerUnavailableError("dead")])
def test_what_is_filled_is_sealed_though_there_is_no_next_region(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    async def work(registry: Registry) -> None:
        await registry.register_server(INFO)
        first = await registry.create_region(8192, NODE)

        async def fails(_: str) -> ServerInfo:
            assert registry._core.state(first.region) is RegionState.READY  # before any wait
            raise failure

        monkeypatch.setattr(registry._regions._servers, "ensure", fails)
        monkeypatch.setattr(registry._regions._servers, "is_here", lambda _: False)
        assert await registry.seal_and_create(first.region, None, 8192, NODE, 5) is None

    run(work)


def test_a_put_and_a_free_write_the_same_at_any_number(run: Callable[..., None]) -> None:
    """A put in a row is one call and one transaction of the journal, and so is a free."""

    async def work(registry: Registry) -> None:
        n_written = 0
        transaction = registry._journal._transaction

        def counted() -> Any:
            nonlocal n_written
            n_written += 1
            return transaction()

        registry._journal._transaction = counted  # type: ignore[method-assign]
        await registry.register_server(INFO)
        spare = await registry.create_region(8192, NODE, 1)
        regions: list[int] = []

        async def put() -> None:
            nonlocal spare
            following = await registry.seal_and_create(
                spare.region, None, 8192, NODE, spare.region + 1
            )
            assert following is not None
            regions.append(spare.region)
            spare = following

        def is_settled() -> bool:
            left = registry._core.count_by_state()
            return registry._late.is_done and not left["freed"] + left["dropping"]

        async def costs() -> tuple[list[int], list[int], int]:
            """Of each of some puts; of each of some frees; of all that follows from those."""
            nonlocal n_written
            puts, frees = [], []
            for _ in range(10):
                n_written = 0
                await put()
                puts.append(n_written)
            freed = [regions.pop() for _ in range(10)]
            for region in freed:
                n_written = 0
                with pytest.raises(StopIteration):  # one step: nothing else runs meanwhile
                    registry.free(region, HOME).send(None)
                frees.append(n_written)
            n_written = 0
            await registry.regions_idle(freed, HOME)
            await until(is_settled)
            return puts, frees, n_written

        for n in (100, 2000):
            while len(regions) < n:
                await put()
            puts, frees, later = await costs()
            assert (puts, frees) == ([1] * 10, [1] * 10), n
            assert later <= 10, (n, later)  # at most one for each, however they are told

    run(work)


def test_a_home_that_is_not_here_yet_keeps_its_spares(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spare_regions, "UNUSED_S", 0.1)

    async def work(registry: Registry) -> None:
        record = await made(registry)
        spare = await registry.seal_and_create(record.region, None, 8192, NODE, 5)
        assert spare is not None
        del registry._servers._handles[HOME]
        await asyncio.sleep(0.5)
        assert registry._core.state(spare.region) is RegionState.CREATING
        registry._liveness.lose(HOME, "its node is dead")
        await until(lambda: registry._core.state(spare.region) is RegionState.GONE)

    run(work)


def silent(asked: list[tuple[int, list[int]]]) -> Any:
    """A page server that does not answer: which regions it is told to retire."""

    class Silent(FakeHandle):
        class retire:
            @staticmethod
            async def remote(packed: bytes) -> Any:
                asked.append((HOME, [order[0] for order in unpack(packed)]))
                await asyncio.sleep(60)

    return Silent()


def test_a_free_that_its_caller_tells_does_not_wait(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order goes out all the same, and is made anew by the next registry."""
    there = server_id_of("cd" * 28)
    asked: list[tuple[int, list[int]]] = []

    monkeypatch.setattr(registry_module.ray, "get_actor", lambda *_, **__: silent(asked))

    async def work(registry: Registry) -> None:
        first, second, third = [await made(registry) for _ in range(3)]
        assert await registry.free(first.region, HOME) == FreeAnswer(alone=True)
        await registry.lookup(second.region, there)
        assert await registry.free(second.region, HOME) == FreeAnswer(others=(there,))
        assert isinstance(await registry.lookup(first.region), RegionFreed)
        assert await registry.free(first.region, HOME) == FreeAnswer()  # Ray called it twice
        await until(lambda: bool(asked))
        assert asked == [(HOME, [first.region, second.region])]
        # Whose caller tells nobody waits for all, and no longer than is promised.
        monkeypatch.setattr(regions, "FREE_S", 0.05)
        assert await registry.free(third.region) == FreeAnswer()
        assert registry._core.state(third.region) is RegionState.FREED

    async def after(registry: Registry) -> None:
        await until(lambda: len(asked) == 2)
        assert asked[1] == (HOME, [1, 2, 3])

    run(work, after)


def test_a_large_variable_is_given_back_by_the_registrys_order(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its memory is back when free returns, and no thread that serves pages gave it back."""
    asked: list[tuple[int, list[int]]] = []
    monkeypatch.setattr(regions, "FREE_S", 0.5)
    monkeypatch.setattr(retiring, "BATCH_S", 30.0)
    monkeypatch.setattr(registry_module.ray, "get_actor", lambda *_, **__: silent(asked))

    async def work(registry: Registry) -> None:
        await registry.register_server(INFO)
        record = await registry.create_region(64 << 20, NODE)
        await registry.seal(record.region)
        assert await registry.free(record.region, HOME) == FreeAnswer()
        assert asked == [(HOME, [record.region])]

    run(work)


def test_what_is_shared_is_known_from_its_seal_on(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also to a registry whose page server died with the one before."""
    shared = Source(SHARED, 0, b"digest", b"where it is")
    monkeypatch.setattr(
        regions.shared_objects,
        "pinned_of",
        lambda record, source: (Pinned(record, source.what, source.digest), ["a reference"]),
    )
    sealed = []

    async def check(registry: Registry) -> None:
        ((pinned, object_refs),) = await registry.shared_at(HOME)
        assert (pinned.record.region, pinned.plan) == (sealed[0], b"where it is")
        assert object_refs == ["a reference"]
        assert await registry.shared_at(HOME + 1) == []

    async def share(registry: Registry) -> None:
        await registry.register_server(INFO)
        record = await registry.create_region(8192, NODE)
        await registry.seal(record.region, shared)
        sealed.append(record.region)
        await check(registry)

    run(share, check)


BAD_SOURCES = {
    "no pickle": Source(SHARED, 0, b"digest", b"where it is"),
    "of something else": Source(SHARED, 0, b"digest", pickle.dumps("where it is")),
    "no source": (SHARED, 0, b"digest", b""),
}


@pytest.mark.parametrize("bad", BAD_SOURCES)
def test_a_source_that_cannot_be_read_changes_nothing(run: Callable[..., None], bad: str) -> None:
    source: Any = BAD_SOURCES[bad]

    async def seal(registry: Registry) -> None:
        await registry.register_server(INFO)
        record = await registry.create_region(8192, NODE)
        for method in (
            registry.seal(record.region, source),
            registry.seal_and_create(record.region, source, 8192, NODE, 5),
        ):
            with pytest.raises(errors.ProtocolError, match="source of variable 1 cannot be read"):
                await method
            saved = registry._journal.load()
            assert [region.state for region in saved.regions] == ["creating"]
            assert saved.sources == ()
            registry._core.check()
        await registry.seal(record.region)

    async def after(registry: Registry) -> None:
        await registry.commit(CommitRequest(5, (write(1, 0),)))

    run(seal, after)


def test_a_source_in_the_journal_that_cannot_be_read_is_dropped(
    run: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A registry before this one wrote it down."""

    def end(_who: str, _tries: Path, failure: BaseException) -> None:
        raise failure

    monkeypatch.setattr(registry_module.starting, "end_process_to_try_again", end)

    async def write_down(registry: Registry) -> None:
        record = await made(registry)
        registry._journal.seal(record.region, BAD_SOURCES["no pickle"], None)

    async def after(registry: Registry) -> None:
        assert registry._core.state(1) is RegionState.READY
        assert await registry.shared_at(HOME) == []
        await registry.commit(CommitRequest(5, (write(1, 0),)))

    run(write_down, after)
    assert "the source of variable 1 cannot be read" in caplog.text.lower()


def test_what_is_called_often_is_answered_packed(run: Callable[..., None]) -> None:
    async def work(registry: Registry) -> None:
        record = await made(registry)
        packed: list[bytes] = []
        client = RegistryClient(lambda method, *args, **_: packed.append(*args) or pack(method))
        client.latest([])
        client.free(0)
        client.seal_and_create(0, None, 0, "", 0)
        client.commit(CommitRequest(0, ()))
        assert registry._often.keys() == {unpack(each)[0] for each in packed}
        (latest,) = unpack(await registry.ask(pack("latest", [record.region])))
        assert [entry.version for entry in latest] == [0]
        with pytest.raises(ValueError, match="'shutdown' is called by its own name"):
            await registry.ask(pack("shutdown"))

    run(work)


def test_a_registry_without_its_journal_gives_nothing_twice(
    run: Callable[..., None], tmp_path: Path
) -> None:
    """Page servers and keepers may still have regions under the ids and addresses of before."""
    before: list[RegionRecord] = []

    async def work(registry: Registry) -> None:
        before.append(await made(registry))

    async def again(registry: Registry) -> None:
        record = await made(registry)
        assert record.region != before[0].region
        assert record.base_address != before[0].base_address

    run(work)
    shutil.rmtree(tmp_path / names.journal_directory(CONFIG.job_scope))
    with pytest.raises(errors.InternalError, match=r"journal of this session.* is gone"):
        run(again)
