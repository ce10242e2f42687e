"""The registry actor: one per job. A facade: decisions are in ``registry_core`` and ``commit_log``.

It carries out the cores' orders, makes page servers appear on nodes, and finds out from Ray which
servers are lost. It is never on the path of a fault that a node can resolve from what it knows.

Its process may be killed at any moment. Ray starts the actor again on the same node, and the
journal there brings back what was answered. Ray also repeats the calls that were under way: each
may come twice and has the same answer then. Page servers are detached actors, because Ray ends
those that a dead process has made; they end themselves when the registry is gone for good.

What must be known after a restart is in the journal before it is answered or done: regions that
are made, sealed or freed, servers that are new, commits and outcomes. The rest (a region that has
drained, a server that is lost, what a home has acknowledged) is written when it is known, and again
later where that fails: after a restart without it the question is just asked again.

Names of actors, all in the namespace "clamor": ``registry-<job scope>``,
``page-server-<job scope>-<first 16 of the node id>``.

Safety: methods are coroutines on one loop; the core is only touched between awaits.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import shutil
import time
from collections.abc import Coroutine, Iterable, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import (
    ActorDiedError,
    RayError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from clamor_ray import errors
from clamor_ray._objects.layout import Plan
from clamor_ray._protocol import names
from clamor_ray._protocol.cause import cause_of
from clamor_ray._protocol.handshake import SECRET_BYTES
from clamor_ray._protocol.messages import (
    INLINE_BASE,
    FreeAnswer,
    LookupAnswer,
    Pinned,
    RegionRecord,
    RegistryReport,
    ServerConfig,
    ServerInfo,
    ServerLost,
)
from clamor_ray._protocol.rendezvous import Rendezvous
from clamor_ray._protocol.rpc import pack, unpack
from clamor_ray._protocol.source import SHARED, Source
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.commits import Commits
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.lineage.lineage_service import LineageMethods, LineageService
from clamor_ray.actors.page_server.page_server import session_directory
from clamor_ray.actors.process import keeper_process, oom_score, starting
from clamor_ray.actors.process.journal_watcher import Reserve
from clamor_ray.actors.process.throttle import throttle
from clamor_ray.actors.recovery import shared_objects
from clamor_ray.actors.recovery.lost_blocks import Losses
from clamor_ray.actors.recovery.rebuilds import REHOME_S, RebuildMethods, Rebuilds
from clamor_ray.actors.recovery.task_ends import TaskEndMethods, TaskEnds
from clamor_ray.actors.registry.meeting_methods import MeetingMethods
from clamor_ray.actors.registry.ray_homes import RayHomes
from clamor_ray.actors.registry.ray_nodes import alive_nodes, within
from clamor_ray.actors.registry.read_sets import ReadSets
from clamor_ray.actors.registry.registry_core import (
    AddressSpace,
    NoAddresses,
    RegionState,
    RegistryCore,
    RegistryError,
    Retire,
)
from clamor_ray.actors.registry.reports import histograms_of, reports_of
from clamor_ray.actors.registry.retiring import Retiring
from clamor_ray.actors.registry.server_methods import CALL_S, WATCH_MOST_S, ServerMethods
from clamor_ray.actors.registry.spare_regions import SpareRegions
from clamor_ray.actors.registry.version_methods import VersionMethods
from clamor_ray.actors.window.address_claims import REGION_IDS, AddressClaims, Range, RayTable

logger = logging.getLogger("clamor_ray.registry")

FREE_S = 5.0
AT_ONCE_BYTES = 16 << 20  # of more, giving back the memory takes milliseconds
RETIRE_MOST = 64  # other servers that a page server tells of a free (PC__RETIRE_MOST)
STOP_S = 10.0
STOP_PAUSE_S = 0.2
PIN_S = 300.0
WATCH_FIRST_S = 2.0
SAVE_AGAIN_S = 1.0
CREATING_S = 600.0  # a put that takes longer is taken for dead


def create_registry(
    job_scope: str, node_id: str, config: ServerConfig, avoid: Sequence[Range] = ()
) -> Any:
    """Makes the job's registry on a node, or finds the one that is there.

    The caller's process owns a registry that it makes: call it in the driver.

    Args:
        job_scope: 12 hex digits that separate jobs.
        node_id: Ray's hex id of the driver's node.
        config: What page servers are told.
        avoid: Addresses that this process still uses of sessions of other clusters.

    Returns:
        The actor's handle. Calls may be made at once; they wait for its start.
    """
    return (
        ray.remote(Registry)
        .options(
            name=names.registry_name(job_scope),
            namespace=names.NAMESPACE,
            get_if_exists=True,
            num_cpus=0,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=1000,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(config, os.urandom(SECRET_BYTES), tuple(avoid))
    )


def journal_directory(job_scope: str) -> Path:
    """Where the session's registry writes, on the driver's node."""
    return session_directory() / names.journal_directory(job_scope)


def _has_ended(job_scope: str) -> bool:
    """Whether a session of the cluster has: its registry is no actor any more."""
    try:
        ray.get_actor(names.registry_name(job_scope), namespace=names.NAMESPACE)
    except ValueError:
        return True
    return False


class Registry(
    LineageMethods,
    MeetingMethods,
    RebuildMethods,
    ServerMethods,
    TaskEndMethods,
    VersionMethods,
):
    """See the file's head.

    Args:
        config: What page servers are told.
        secret: What page servers prove to each other that they know: 32 bytes, the same after a
            restart, and never on disk.
        avoid: See ``AddressClaims``.
    """

    def __init__(self, config: ServerConfig, secret: bytes, avoid: Sequence[Range] = ()) -> None:
        throttle("clamor_ray.registry")
        self._config = config
        self._core = RegistryCore(AddressSpace(ours=False))
        self._claims = AddressClaims(RayTable(), config.job_scope, _has_ended, avoid)
        self._claiming = asyncio.Lock()
        self._n_claims = 0  # that the core knows
        self._log = CommitLog()
        self._read_sets = ReadSets()
        self._rendezvous = Rendezvous()
        self._secret = secret
        self._handles: dict[int, Any] = {}
        self._starting: dict[str, asyncio.Lock] = {}
        self._starts: dict[str, asyncio.Future[ServerInfo]] = {}  # by node
        self._start_troubles: dict[str, errors.ClamorError] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._unsaved: dict[int, str | None] = {}
        self._unsaved_servers: dict[int, ServerInfo | ServerLost] = {}
        self._saving = False
        self._watching = False
        self._stopped = False
        self._retiring = Retiring(self._tell, self._retired, self._is_dead)
        self._spares = SpareRegions(
            self._which_are_known, lambda region: self._carry_out(self._core.abandon(region))
        )
        self._ended = asyncio.Event()
        oom_score.lower()
        directory = journal_directory(config.job_scope)
        is_restart = (directory / "journal").exists()
        tries = directory / "tries"
        try:
            self._start(directory)
        except starting.FINAL:
            raise
        except Exception as failure:
            if not is_restart:  # nothing is lost yet, and the driver is told why
                raise
            starting.end_process_to_try_again("the registry", tries, failure)
        starting.succeeded(tries)

    def _start(self, directory: Path) -> None:
        config = self._config
        self._journal = Journal(directory)
        self._reserve = Reserve(str(directory), keeper_process.RESERVE_BYTES)
        self._in_use_fd = keeper_process.hold_and_watch(directory, keeper_process.raylet_pid())
        homes = RayHomes(self._core, self._handles, self._lose, self._examine)
        self._losses = Losses()
        self._task_ends = TaskEnds()
        self._commits = Commits(
            self._log, self._journal, homes, config.control_timeout_s, losses=self._losses
        )
        self._lineage = LineageService(
            directory, self._retain, homes, self._note_reads, config.control_timeout_s
        )
        self._rebuilds = Rebuilds(
            self._core, self._log, self._journal, homes, self._lineage.server_here, self._losses
        )
        self._take_back()

    def _take_back(self) -> None:
        """What the journal holds; nothing, the first time."""
        saved = self._journal.load()
        orders = self._core.restore(
            saved.next_region,
            [
                (region.record, RegionState(region.state), region.request_id)
                for region in saved.regions
            ],
            saved.servers,
            saved.lost,
            time.monotonic(),
            (saved.next_region - 1) // REGION_IDS * REGION_IDS + 1,
        )
        for lost in saved.lost:
            self._log.server_lost(lost.server_id)
        for region in saved.regions:
            state = self._core.state(region.record.region)
            if state in (RegionState.READY, RegionState.FREED, RegionState.DROPPING):
                self._log.open(
                    region.record.region, region.record.homes, region.record.length_bytes
                )
                if state is not RegionState.READY:
                    self._log.close(region.record.region)
        self._log.restore(
            saved.entries,
            saved.plans,
            saved.acknowledged,
            saved.outcomes,
            saved.freed_inline,
            saved.dropped,
        )
        records = {region.record.region: region.record for region in saved.regions}
        for number, source in saved.sources:
            if number in records:
                self._know_source(records[number], source)
        for info in saved.servers:
            self._find_again(info)
        self._losses.update(dict(saved.lacking))
        self._rebuilds.activate(saved.rehomed)
        self._lineage.take_back()
        self._carry_out(orders)
        self._commits.tell_homes()
        self._commits.tidy_soon()
        if saved.servers:
            logger.info(
                "the journal brought back %d regions and %d page servers",
                len(saved.regions),
                len(saved.servers),
            )

    def __repr__(self) -> str:
        return f"Registry({self._config.job_scope})"

    async def ping(self) -> int:
        """The actor's process id."""
        return os.getpid()

    async def until_end(self) -> None:
        """Answers when the session has been shut down; who waits for it learns from its failure
        when this actor is gone for good."""
        await self._ended.wait()

    # -- the journal

    def _save_changed(self) -> None:
        """Writes what has changed; what cannot be written now is written later."""
        for region, state in self._core.take_changed():
            gone = state is RegionState.GONE
            self._unsaved[region] = None if gone else state.value
            if gone:
                self._log.forget(region)
                self._rebuilds.forget(region)
        if not self._save_now() and not self._saving:
            self._saving = True
            self._spawn(self._save_later())

    def _save_now(self) -> bool:
        try:
            if self._unsaved:
                self._journal.set_states(list(self._unsaved.items()))
                self._unsaved.clear()
            for server_id, server in list(self._unsaved_servers.items()):
                if isinstance(server, ServerLost):
                    self._journal.lose_server(server)
                else:
                    self._journal.save_server(server)
                del self._unsaved_servers[server_id]
            return True
        except errors.JournalFullError as failure:
            logger.warning("%s", failure)
            return False

    async def _save_later(self) -> None:
        try:
            pause_s = SAVE_AGAIN_S
            while not self._stopped:
                await asyncio.sleep(pause_s)
                if self._save_now():
                    return
                pause_s = min(pause_s * 2, WATCH_MOST_S)
        finally:
            self._saving = False

    # -- regions

    async def create_region(
        self, length_bytes: int, node_id: str, request_id: int = 0
    ) -> RegionRecord:
        """A new region homed on a node, invisible until ``seal``, for which there are 600 s.

        Also ends those whose maker died, or gave up, without a word.

        Args:
            length_bytes: At least 1.
            node_id: Ray's hex id of its home.
            request_id: 63 random bits; the same ones get the same region again. 0: none.

        Raises:
            ServerUnavailableError, VersionMismatchError: See ``ensure_server``; the former also
                where the cluster's log of addresses cannot be reached.
            ValueError, NoAddresses: See ``RegistryCore.create_region``.
            JournalFullError: There is no region.
        """
        info = await self.ensure_server(node_id)
        if length_bytes > 0:
            await self._make_room(length_bytes)
        now_s = time.monotonic()  # no await from here on: others create regions, too
        self._carry_out(self._core.abandon_stale(now_s - CREATING_S))
        if (again := self._core.requested(request_id)) is not None:
            return again
        record = self._core.create_region(length_bytes, info.server_id, now_s, request_id)
        try:
            self._journal.create_region(record, request_id, record.region + 1)
        except errors.JournalFullError:
            self._core.undo_create(record.region)
            raise
        return record

    async def _make_room(self, length_bytes: int) -> None:
        """Until there are addresses for a region: takes more of the cluster's window."""
        while not self._core.addresses.has_room(length_bytes):
            async with self._claiming:
                if self._core.addresses.has_room(length_bytes):
                    return
                try:
                    claims = await asyncio.wait_for(
                        asyncio.to_thread(self._claims.claim, length_bytes, self._n_claims), CALL_S
                    )
                except NoAddresses:
                    raise
                except Exception as failure:  # any of Ray's; what it has written is found again
                    raise errors.ServerUnavailableError(
                        "The cluster's log of addresses cannot be read or written: "
                        f"{type(failure).__name__}: {failure}.".replace(": .", "."),
                        hint="It is in Ray's GCS: see its log, and try again.",
                    ) from failure
                for claim in claims:  # those that are known change nothing
                    self._core.addresses.own(claim.begin, claim.end)
                self._n_claims = len(claims)
                self._core.ids_from(claims[0].region_ids + 1)

    async def seal(self, region: int, source: Source | None = None) -> RegionRecord:
        """The region's bytes are in place: it can be looked up from now on.

        Args:
            region: Its id.
            source: What makes them again.

        Raises:
            NoSuchRegion, IllegalTransition: See ``RegistryCore.seal``.
            JournalFullError: It is not sealed.
        """
        if self._core.state(region) is RegionState.CREATING:
            self._core.check_seal(region)
            if source is not None:
                self._journal.save_source(region, source)
            self._journal.set_states([(region, RegionState.READY.value)])
        record = self._core.seal(region)
        if source is not None:
            self._know_source(record, source)
        self._spares.sealed(region)
        self._log.open(region, record.homes, record.length_bytes)
        self._save_changed()
        return record

    def _know_source(self, record: RegionRecord, source: Source) -> None:
        if source.kind == SHARED:
            # This reference outlives the page server's process, which pins the object anew.
            self._rebuilds.set_shared(record.region, *shared_objects.pinned_of(record, source))
        else:
            self._rebuilds.set_source(record.region, source)

    async def seal_and_create(
        self, region: int, source: Source | None, length_bytes: int, node_id: str, request_id: int
    ) -> RegionRecord | None:
        """``seal``, and ``create_region`` of one for the next ``put``, which then needs no call.

        Args:
            region, source: As in ``seal``.
            length_bytes, node_id, request_id: As in ``create_region``.

        Returns:
            The next region; None where there is none now. That is no error: ``region`` is sealed,
            and who needs the next one asks for it, and is told why.

        Raises:
            As ``seal``.
        """
        await self.seal(region, source)
        try:
            record = await self.create_region(length_bytes, node_id, request_id)
        except (errors.ClamorError, RegistryError) as failure:
            logger.info("no region in advance: %s", failure)
            return None
        if self._core.state(record.region) is RegionState.CREATING:
            self._spares.made(record.region, record.homes[0])
            if not self._spares.is_looking:
                self._spawn(self._spares.look())
        return record

    async def abandon(self, region: int, leased: bool = False) -> None:
        """Undoes ``create_region``, for a maker that has not heard of ``seal``: see
        ``RegistryCore.abandon``. A call of ``seal`` that comes later is refused."""
        orders = self._core.abandon(region, leased)
        self._log.close(region)
        self._read_sets.forget(region)
        self._lineage.region_freed(region)
        self._carry_out(orders)

    async def free(self, region: int, here: int = 0) -> FreeAnswer:
        """Starts the region's end; returns before its last lease is gone.

        When it returns, and the caller has done what the answer says (``pc_client_retire``), no
        server that answers within ``FREE_S`` seconds gives a new lease. Calling it again waits for
        those that have not been told.

        Args:
            region: Its id.
            here: The page server that the caller tells itself, and through it who asks that for
                blocks; 0: none.

        Raises:
            NoSuchRegion, IllegalTransition: See ``RegistryCore.free``.
            JournalFullError: It is not freed.
        """
        if region >= INLINE_BASE:
            self._journal.free_inline([region], self._log.freed_too_many())
            self._log.close(region)
            self._lineage.region_freed(region)
            return FreeAnswer()
        if self._core.state(region) is RegionState.READY:
            self._journal.set_states([(region, RegionState.FREED.value)])
        homes = self._core.homes_of(region)
        record = self._core.record_of(region)
        if record is not None and record.length_bytes > AT_ONCE_BYTES:
            # Given back before this returns, and by no thread that serves pages.
            here = 0
        orders = self._core.free(region)
        self._log.close(region)
        self._read_sets.forget(region)
        self._lineage.region_freed(region)
        self._carry_out(orders)
        others = tuple(sorted(self._core.waits_for(region) - {here}))
        if here in homes and len(others) <= RETIRE_MOST:
            alone = any(order.alone and order.server_id == here for order in orders)
            return FreeAnswer(alone, others)
        if told := self._retiring.hurry(region, but=here):
            await asyncio.wait(told, timeout=FREE_S)
        return FreeAnswer()

    async def lookup(self, region: int, server_id: int = 0) -> LookupAnswer:
        """The region's record with its newest version, or that it is freed or unknown.

        Args:
            region: Its id.
            server_id: The page server that will hold leases on it; 0 for a mere question.

        Raises:
            ServerUnavailableError: Its new home does not know yet that it is that: ask again.
        """
        await self._rebuilds.activated(region, REHOME_S)
        answer = self._core.lookup(region, server_id) if server_id else self._core.peek(region)
        if isinstance(answer, RegionRecord):
            return dataclasses.replace(
                answer, version=self._log.newest(region), loss=self._losses.number(region)
            )
        return answer

    async def regions_idle(self, regions: list[int], server_id: int) -> None:
        """A page server says that the last leases on its node are gone."""
        self._carry_out(
            order for region in regions for order in self._core.region_idle(region, server_id)
        )

    # -- Ray objects

    async def share(
        self, object_refs: list[Any], node_id: str, request_id: int = 0
    ) -> tuple[RegionRecord, Plan]:
        """Makes one Ray object page-accessible from the node that holds it.

        Args:
            object_refs: A list of one ObjectRef (in a list, so that Ray passes it as it is).
            node_id: Where its bytes lie; that page server pins it.
            request_id: As in ``create_region``.

        Returns:
            The sealed region's record, and the plan of what lies where in it.
        """
        info = await self.ensure_server(node_id)
        pinned: Pinned = await within(
            PIN_S, self._handles[info.server_id].pin.remote(object_refs, request_id)
        )
        return pinned.record, pinned.plan

    async def shared_at(self, server_id: int) -> list[tuple[Pinned, list[Any]]]:
        """What a restarted page server has to pin again."""
        return self._rebuilds.shared_at(server_id)

    # -- orders

    def _carry_out(self, orders: Iterable[Retire]) -> None:
        orders = list(orders)
        self._save_changed()
        self._retiring.order(orders)
        if orders and not self._watching and not self._stopped:
            self._watching = True
            self._spawn(self._watch())

    async def _tell(self, server_id: int, orders: list[Retire]) -> list[bool | None]:
        """See ``Retiring``."""
        handle = self._handles.get(server_id)
        if handle is None:
            raise LookupError("it is lost, and the core has been told")
        # A server that was restarted may know the region's memory, and not what it is.
        packed = pack(
            *(
                (
                    *(order.region, order.force),
                    None if order.force else self._core.record_of(order.region),
                    order.alone,
                )
                for order in orders
            )
        )
        answer: bytes = await within(CALL_S, handle.retire.remote(packed))
        return list(unpack(answer))

    def _retired(self, server_id: int, told: list[tuple[Retire, bool]]) -> None:
        """They were carried out; of each: whether leases may be left."""
        orders: list[Retire] = []
        for order, leased in told:
            if order.force:
                self._core.dropped(order.region, server_id)
            elif not leased and order.alone:  # which it has dropped already
                self._core.region_idle(order.region, server_id)
                self._core.dropped(order.region, server_id)
            elif not leased:
                orders += self._core.region_idle(order.region, server_id)
        self._carry_out(orders)

    async def _which_are_known(self, server_id: int, regions: list[int]) -> list[bool]:
        """See ``SpareRegions``."""
        handle = self._handles.get(server_id)
        if handle is None:
            raise LookupError("it is lost")
        known: list[bool] = await within(CALL_S, handle.knows.remote(regions))
        return known

    def _is_dead(self, server_id: int, failure: ActorDiedError) -> None:
        self._lose(server_id, f"its actor is dead: {cause_of(failure)}")

    async def _watch(self) -> None:
        """While freed regions wait for servers, looks for nodes that died without a word."""
        pause_s = WATCH_FIRST_S
        try:
            while waited_for := self._core.waited_for():
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, WATCH_MOST_S)
                alive = await asyncio.to_thread(alive_nodes)
                for server_id in waited_for:
                    answer = self._core.locate(server_id)
                    if isinstance(answer, ServerInfo) and answer.node_id not in alive:
                        self._lose(server_id, f"its node {answer.node_id} is dead")
        finally:
            self._watching = False

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            logger.error("a task of the registry failed", exc_info=failure)

    # -- reports

    async def servers(self) -> tuple[ServerInfo, ...]:
        """All page servers that are not lost."""
        return self._core.servers()

    async def stats(self, timeout_s: float = 5.0) -> RegistryReport:
        """Counters of all page servers; one that does not answer in time says so in ``error``."""

        reports = await reports_of(self._core.servers(), self._handles, timeout_s)
        return RegistryReport(
            regions_by_state=self._core.count_by_state(),
            address_bytes_in_use=self._core.addresses.bytes_in_use,
            servers=reports,
            replay=self._read_sets.counters(),
        )

    async def histogram(
        self, region: int, which: int, n_buckets: int, timeout_s: float = 5.0
    ) -> dict[str, list[int]]:
        """Blocks of a set (``PC_BLOCKS_*``) per part of the region, by node id.

        Nodes that do not know the region, or do not answer in time, are left out.
        """

        question = (region, which, n_buckets)
        return await histograms_of(self._core.servers(), self._handles, question, timeout_s)

    async def shutdown(self) -> None:
        """Stops every page server and its keeper, and removes the journal.

        The registry itself stays, and is empty.
        """
        self._stopped = True
        for task in list(self._tasks):
            task.cancel()
        self._retiring.close()
        await self._commits.close()
        await self._rebuilds.close()
        await self._lineage.stop()

        async def stop(handle: Any) -> None:
            deadline = time.monotonic() + STOP_S
            while (left_s := deadline - time.monotonic()) > 0:
                try:
                    # Ray's own tries have no end, and it says so on the console when we kill it.
                    await within(left_s, handle.stop.options(max_task_retries=0).remote())
                    break
                except (ActorDiedError, asyncio.TimeoutError):
                    break
                except RayError:  # it is being restarted
                    await asyncio.sleep(STOP_PAUSE_S)
            with contextlib.suppress(RayError, ValueError):
                ray.kill(handle)

        handles = list(self._handles.values())
        self._handles.clear()
        await asyncio.gather(*(stop(handle) for handle in handles))
        for info in self._core.servers():
            self._core.server_lost(info.server_id, "the session was shut down")
        self._journal.close()
        shutil.rmtree(self._journal.directory, ignore_errors=True)
        if self._in_use_fd >= 0:
            os.close(self._in_use_fd)
            self._in_use_fd = -1
        # Whoever still waits when this actor is killed has Ray tell the driver of it.
        self._ended.set()
