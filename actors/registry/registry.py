"""The registry actor: one per session. It is composed of services, and hands each call to one.

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

Names of actors, all in the namespace "clamor": ``registry-<job scope>``, or ``session-<name>`` for
a session that outlives its driver, and ``page-server-<job scope>-<first 16 of the node id>``.

Safety: methods are coroutines on one loop; the core is only touched between awaits.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from clamor_ray import errors
from clamor_ray._objects.layout import Plan
from clamor_ray._protocol.messages import (
    CommitRequest,
    Committed,
    Counted,
    Created,
    CreatedPieces,
    DrainResult,
    FreeAnswer,
    Latest,
    LocateAnswer,
    LookupAnswer,
    Pinned,
    RegionRecord,
    RegistryReport,
    RepairSet,
    ServerConfig,
    ServerInfo,
    SessionReport,
    VariableRecord,
)
from clamor_ray._protocol.ray_state import alive_nodes, forget_jobs_of
from clamor_ray._protocol.rpc import pack, unpack
from clamor_ray._protocol.source import Source
from clamor_ray._redundancy.groups import PieceLayout
from clamor_ray._spans import record
from clamor_ray.actors.allreduce.meetings import MeetingCalls, Meetings
from clamor_ray.actors.backup.checkpoints import CheckpointCalls, Checkpoints
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.commits import Commits
from clamor_ray.actors.commits.held_commits import HeldCommits
from clamor_ray.actors.commits.journal import Journal, Saved
from clamor_ray.actors.lineage.lineage_calls import LineageCalls
from clamor_ray.actors.lineage.lineage_service import LineageService
from clamor_ray.actors.lost_homes.lost_blocks import Losses, LostBlocks
from clamor_ray.actors.lost_homes.rebuilds import Rebuilds
from clamor_ray.actors.lost_homes.task_end_log import TaskEnd, TaskEndLog
from clamor_ray.actors.lost_homes.unheard_homes import UnheardHomes
from clamor_ray.actors.moves import ray_nodes
from clamor_ray.actors.moves.announced_drains import AnnouncedDrains
from clamor_ray.actors.moves.departures import Departures
from clamor_ray.actors.moves.drains import Drains
from clamor_ray.actors.moves.first_writes import FirstWrites
from clamor_ray.actors.moves.full_nodes import FullNodes
from clamor_ray.actors.moves.idle_nodes import IdleNodes
from clamor_ray.actors.moves.moves import Moves
from clamor_ray.actors.moves.placements import Placements
from clamor_ray.actors.moves.program_drains import ProgramDrains
from clamor_ray.actors.moves.separations import Separations
from clamor_ray.actors.moves.switches import Switches
from clamor_ray.actors.process import journals, keeper_process, oom_score, starting
from clamor_ray.actors.process.background import BackgroundTasks
from clamor_ray.actors.process.journal_watcher import Reserve
from clamor_ray.actors.process.throttle import throttle
from clamor_ray.actors.reference_counting.counts import ReferenceCounts
from clamor_ray.actors.reference_counting.ray_anchors import RayAnchors
from clamor_ray.actors.registry import exported
from clamor_ray.actors.registry.late_writes import LateWrites
from clamor_ray.actors.registry.liveness import Handles, Liveness
from clamor_ray.actors.registry.news import News
from clamor_ray.actors.registry.ray_homes import RayHomes
from clamor_ray.actors.registry.read_sets import SharedReadSets
from clamor_ray.actors.registry.region_ends import RegionEnds
from clamor_ray.actors.registry.regions import AddressRoom, FileCalls, Regions
from clamor_ray.actors.registry.registry_core import RegionState, RegistryCore
from clamor_ray.actors.registry.servers import PageServers
from clamor_ray.actors.registry.variable_names import VariableNames
from clamor_ray.actors.registry.versions import Versions
from clamor_ray.actors.store.stored_homes import StoredHomes
from clamor_ray.actors.window.address_claims import REGION_IDS, AddressClaims, Range, RayTable
from clamor_ray.actors.window.address_space import AddressSpace

logger = logging.getLogger("clamor_ray.registry")


class Registry(CheckpointCalls, FileCalls, LineageCalls, MeetingCalls):
    """See the file's head. Calls are documented at the services that answer them.

    Args:
        config: What page servers are told.
        secret: What page servers prove to each other that they know: 32 bytes, the same after a
            restart, and never on disk.
        avoid: See ``AddressClaims``.
    """

    KEEPS = False  # whether homes have what they answer for on their disks

    def __init__(self, config: ServerConfig, secret: bytes, avoid: Sequence[Range] = ()) -> None:
        throttle("clamor_ray.registry")
        self._config = config
        if config.has_spans:
            record.here.begin("")
        self._secret = secret
        self._ended = asyncio.Event()
        self._is_ending = False
        oom_score.lower()
        directory = journals.journal_directory(config.job_scope)
        is_restart = self._is_restart(directory)
        tries = directory / "tries"
        try:
            self._start(directory, avoid, is_restart)
        except starting.FINAL:
            raise
        except Exception as failure:
            if not is_restart:  # nothing is lost yet, and the driver is told why
                raise
            starting.end_process_to_try_again("the registry", tries, failure)
        starting.succeeded(tries)

    def _is_restart(self, directory: Path) -> bool:
        """Whether a process before this one was the session's registry."""
        return (directory / "journal").exists()

    def _open_journal(self, directory: Path) -> Journal:
        """What must outlive this process."""
        return Journal(directory)

    def _check_is_new(self, directory: Path) -> None:
        self._claims.check_is_new(directory)

    def _address_room(self) -> AddressRoom:
        return AddressRoom(self._core, self._claims)

    def _inside_of(self, anchors: Iterable[bytes]) -> Iterable[int]:
        """What the journal is told to be inside of a region, by anchors: it asks only for what
        outlives all references."""
        return ()

    def _start(self, directory: Path, avoid: Sequence[Range], is_restart: bool) -> None:
        """Makes the services, each of those that it stands on."""
        config, timeout_s = self._config, self._config.control_timeout_s
        self._directory = directory
        self._claims = AddressClaims(
            *(RayTable(), config.job_scope, journals.has_ended, avoid),
            is_lasting=bool(config.store),
        )
        if not is_restart:
            self._check_is_new(directory)

        def label(region: int) -> str:
            return self._names.label(region)  # which stand on those that are made with this

        core = self._core = RegistryCore(AddressSpace(ours=False), label)
        log = self._log = CommitLog(label=label)
        handles: Handles = {}
        self._handles = handles
        background = self._background = BackgroundTasks(logger)
        journal = self._journal = self._open_journal(directory)
        self._reserve = Reserve(str(directory), keeper_process.RESERVE_BYTES)
        self._in_use_fd = keeper_process.hold_and_watch(
            directory,
            keeper_process.raylet_pid(),
            # No driver says that it still wants the session.
            config.orphan_timeout_s if config.session_name else keeper_process.JOURNAL_ORPHAN_S,
        )
        late = self._late = LateWrites(core, journal, background)
        liveness = self._liveness = Liveness(core, log, handles, late)
        ends = self._ends = RegionEnds(core, handles, late, liveness, background, journal.synced)
        known = (core, handles, liveness.lose, liveness.examine, label)
        homes = self._homes = RayHomes(*known, before_told=journal.synced)
        losses = self._losses = Losses()
        held, unheard = HeldCommits(), UnheardHomes()
        stored = self._stored_homes = StoredHomes(core, log, journal, losses, unheard)
        commits = self._commits = Commits(
            *(log, journal, homes, timeout_s),
            losses=losses,
            restarted_s=time.monotonic() if is_restart else None,
            held=held,
            make_room=lambda *what: self._full_nodes.make_room(*what),
            keeps=self.KEEPS,
        )
        self._read_sets = SharedReadSets(core, config.cache_bytes)
        lineage = self._lineage = LineageService(
            *(directory, commits.retain, homes, self._read_sets.note, timeout_s),
            label=label,
            rows=log,
        )

        def has_more(server_id: int) -> None:
            stored.server_here(server_id)
            lineage.server_here(server_id)
            self._separations.look()

        rebuilds = self._rebuilds = Rebuilds(
            *(core, log, journal, homes, has_more, losses, unheard),
            repair_bytes_s=config.repair_bytes_s,
            is_leaving=lambda server_id: self._drains.is_leaving(server_id),
            is_suspected=lambda server_id: self._servers.is_suspected(server_id),
            make_room=lambda *what: self._full_nodes.make_room(*what),
            stored=stored,
        )
        self._switches = Switches(
            *(core, log, journal, homes, held, losses, unheard),
            moved=rebuilds.moved,
            rehomed=has_more,
            look_again=lambda region: rebuilds.settle(region, 0.0),
        )
        self._moves = Moves(
            *(core, log, homes, commits, held, losses, self._switches),
            floor_of=lineage.lineage.floor,
            is_leaving=lambda server_id: self._drains.is_leaving(server_id),
        )
        self._drains = Drains(core, journal, self._moves, label, lambda at: self._servers.room(at))
        self._programs = ProgramDrains(config.job_scope)
        self._placements = Placements(core, self._moves, self._drains, label)
        self._separations = Separations(
            *(core, self._moves, self._drains, label),
            lambda: self._servers.start_spares(self._announced.announced, self._drains.is_leaving),
        )
        self._first_writes = FirstWrites(log, self._moves, label)
        self._versions = Versions(
            *(log, journal, commits, rebuilds, timeout_s), self._moves.check_outcome
        )
        self._servers = PageServers(
            config=config,
            core=core,
            journal=journal,
            reserve=self._reserve,
            handles=handles,
            late=late,
            liveness=liveness,
            ends=ends,
            here=has_more,
            background=background,
            returned=stored.returned,
        )
        self._full_nodes = FullNodes(
            *(core, self._moves, self._drains, self._servers.room, timeout_s, label)
        )
        self._drains.is_suspected = self._servers.is_suspected

        def is_here(server_id: int) -> bool:
            return bool(core.node_of(server_id) == ray.get_runtime_context().get_node_id())

        self._departures = Departures(
            *(core, log, self._drains, self._servers),
            stays=is_here,
            is_lost_for_good=lambda region: rebuilds.verdict(region) is not None,
            keeps=lambda server_id: self._announced.keeps(core.node_of(server_id) or ""),
        )
        self._announced = AnnouncedDrains(
            *(core, self._drains, ray_nodes, self._prepare_drain),
            begun=self._departures.watch,
            label=label,
        )
        self._idle_nodes = IdleNodes(
            *(core, self._drains, ray_nodes, self._servers.used, is_here, config.idle_node_s),
            begun=self._departures.watch,
        )
        self._names = VariableNames(core, log, journal)
        self._checkpoints = Checkpoints(
            *(core, log, self._names, lineage, self._versions, homes, commits, timeout_s)
        )
        counts = self._counts = ReferenceCounts(self._names.has_name)
        forget = [self._read_sets.forget, lineage.region_freed, self._first_writes.forget]
        self._regions = Regions(
            core=core,
            log=log,
            journal=journal,
            room=self._address_room(),
            servers=self._servers,
            handles=handles,
            ends=ends,
            late=late,
            rebuilds=rebuilds,
            losses=losses,
            background=background,
            forget=[*forget, self._names.region_freed, counts.forget],
            keep=homes.keep if self.KEEPS else None,
            count=lambda region, counted: counts.begin(region, counted.anchor, counted.inside),
            inside=self._inside_of,
            all_on_disk=bool(config.store),
        )
        self._anchors = RayAnchors(counts, self._regions.free_unheld, background)
        self._meetings, self._news, self._task_ends = Meetings(), News(log), TaskEndLog()
        late.when_gone += [log.forget, rebuilds.forget, self._placements.forget]
        liveness.when_lost += [
            lambda loss: self._drains.lost(loss.server_id),  # first: it notes what is there
            lambda loss: rebuilds.server_lost(loss.server_id),
            ends.server_lost,
            self._servers.server_lost,
            lambda loss: self._idle_nodes.forget(loss.server_id),
        ]
        self._often: dict[str, Callable[..., Awaitable[Any]]] = {
            "latest": self.latest,
            "commit": self.commit,
            "seal_and_create": self.seal_and_create,
            "free": self.free,
        }
        self._take_back(journal.load())

    def _take_back(self, saved: Saved) -> None:
        """What the journal holds; nothing, the first time."""
        orders = self._core.restore(
            saved.next_region,
            [(each.record, RegionState(each.state), each.request_id) for each in saved.regions],
            saved.servers,
            saved.lost,
            time.monotonic(),
            (saved.next_region - 1) // REGION_IDS * REGION_IDS + 1,
            saved.directories,
            awaits_homes=bool(self._config.store),
        )
        for lost in saved.lost:
            self._log.server_lost(lost.server_id)
        for region in saved.regions:
            state = self._core.state(region.record.region)
            if state in (RegionState.READY, RegionState.FREED, RegionState.DROPPING):
                record = region.record
                if record.n_pieces:
                    self._log.open_pieces(record.region, record.pieces, record.groups)
                else:
                    self._log.open(record.region, record.homes, record.length_bytes)
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
        for known in saved.sources:
            self._regions.know_source(*known)
        for info in saved.servers:
            self._servers.find_again(info)
        self._losses.update(dict(saved.lacking))
        self._names.take_back(saved.names)
        self._drains.take_back(saved.leaving)
        self._servers.take_back(saved.leaving)
        self._idle_nodes.watch(saved.idle)
        for each in (self._departures, self._announced, self._servers):
            each.watch()
        self._switches.take_back(saved.givers)  # first: they tell the new homes themselves
        self._rebuilds.activate(saved.rehomed, [lost.server_id for lost in saved.lost])
        self._lineage.take_back()
        self._ends.carry_out(orders)
        self._separations.look()
        self._commits.tell_homes()
        self._commits.tidy_soon()
        self._background.spawn(exported.export(self._config, self._quick_numbers, self._numbers))
        if saved.servers:
            n = len(saved.regions), len(saved.servers)
            logger.info("the journal brought back %d regions and %d page servers", *n)

    def _quick_numbers(self) -> dict[str, float]:
        return {
            "commits": self._commits.n_made,
            "commit_conflicts": self._commits.n_conflicts,
            "page_servers": len(self._handles),
        }

    def _numbers(self) -> dict[str, float]:
        ready = self._core.ready_regions()
        return {
            "variables": sum(not record.piece_of for record in ready),
            "lost_variables": len(self._versions.all_lost(ready)),
            "degraded_pieces": self._rebuilds.n_degraded(),
        }

    def __repr__(self) -> str:  # must be: see starting
        return f"Registry({self._config.job_scope})"

    # -- the actor

    async def ping(self) -> int:
        """The actor's process id."""
        return os.getpid()

    async def scope(self) -> str:
        """The session's."""
        return self._config.job_scope

    async def store(self) -> str:
        """Where the session outlives its cluster; "": nowhere."""
        return self._config.store

    async def report(self) -> SessionReport:
        """What the session is.

        Raises:
            ClosedError: It is being shut down.
        """
        self._check_not_ending()
        regions = [record for record in self._core.ready_regions() if not record.piece_of]
        return SessionReport(
            self._config, len(regions), sum(record.length_bytes for record in regions)
        )

    async def until_end(self) -> None:
        """Answers when the session has been shut down; who waits for it learns from its failure
        when this actor is gone for good."""
        await self._ended.wait()

    async def ask(self, packed: bytes) -> bytes:
        """Calls a method that is called often: ``pack(method, *arguments)`` -> ``pack(answer)``.

        Raises:
            What the method raises.
        """
        method, *arguments = unpack(packed)
        if method not in self._often:
            raise ValueError(f"{method!r} is called by its own name")
        return pack(await self._often[method](*arguments))

    def _check_not_ending(self) -> None:
        if self._is_ending:
            raise errors.ClosedError("The session was shut down.")

    async def secret(self) -> bytes:
        """What page servers prove to each other that they know."""
        return self._secret

    async def shutdown(self) -> None:
        """Stops every page server and its keeper, removes the journal, and stays, empty."""
        self._is_ending = True
        self._background.close()
        self._ends.close()
        drains = (self._idle_nodes, self._announced, self._departures, self._separations)
        others = (self._moves, self._switches, self._rebuilds, self._checkpoints)
        for service in (self._commits, *drains, *others):
            await service.close()
        await self._lineage.stop()
        await self._programs.stop_all()
        await self._servers.stop_all()
        self._journal.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._in_use_fd >= 0:
            os.close(self._in_use_fd)
            self._in_use_fd = -1
        if self._config.session_name:
            await asyncio.to_thread(forget_jobs_of, self._config.job_scope)
        # Whoever still waits when this actor is killed has Ray tell the driver of it.
        self._ended.set()

    # -- page servers

    async def ensure_server(self, node_id: str) -> ServerInfo:
        """See ``PageServers.ensure``."""
        return await self._servers.ensure(node_id)

    async def start_failed(
        self, node_id: str, failure: errors.ClamorError, is_final: bool = True
    ) -> None:
        """See ``PageServers.start_failed``."""
        self._servers.start_failed(node_id, failure, is_final)

    async def begin_server(self, node_id: str, directory: str = "") -> tuple[int, bool]:
        """See ``PageServers.begin``; a directory there is only in a session with a store."""
        return self._servers.begin(node_id, directory)

    async def renew_server(self, node_id: str, server_id: int, reason: str, n_old: int = 0) -> int:
        """See ``PageServers.renew``."""
        return self._servers.renew(node_id, server_id, reason, n_old)

    async def register_server(self, info: ServerInfo) -> ServerInfo:
        """See ``PageServers.register``."""
        return self._servers.register(info)

    async def locate(self, server_id: int, since_epoch: int = 0) -> LocateAnswer:
        """See ``Liveness.locate``."""
        return await self._liveness.locate(server_id, since_epoch)

    async def servers(self) -> tuple[ServerInfo, ...]:
        """See ``RegistryCore.servers``."""
        return self._core.servers()

    async def histogram(
        self, region: int, which: int, n_buckets: int, timeout_s: float = 5.0
    ) -> dict[str, list[int]]:
        """See ``PageServers.histograms``."""
        return await self._servers.histograms(region, which, n_buckets, timeout_s)

    async def stats(self, timeout_s: float = 5.0) -> RegistryReport:
        """Counters of all page servers; one that does not answer in time says so in ``error``."""
        return RegistryReport(
            regions_by_state=self._core.count_by_state(),
            address_bytes_in_use=self._core.addresses.bytes_in_use,
            servers=await self._servers.reports(timeout_s, self._drains.is_leaving),
            replay=self._read_sets.counters(),
            names=self._names.by_region(),
            moves=replace(
                self._moves.counters(),
                left=self._departures.n_left,
                for_room=self._full_nodes.n_moved,
                dropped=self._servers.n_dropped,
            ),
            degraded=self._rebuilds.n_degraded(),
            lost=self._versions.all_lost(self._core.ready_regions()),
        )

    # -- regions

    async def create_region(
        self, length_bytes: int, node_id: str, request_id: int = 0, on_disk: bool = False
    ) -> RegionRecord:
        """See ``Regions.create``."""
        return await self._regions.create(length_bytes, node_id, request_id, on_disk)

    async def create_pieces(
        self, length_bytes: int, layout: PieceLayout, node_id: str, request_id: int, n_anchors: int
    ) -> CreatedPieces:
        """See ``Regions.create_pieces``, ``Placements.homes`` and ``RayAnchors.make``."""
        whole, *pieces = await self._regions.create_pieces(
            length_bytes, layout, node_id, request_id
        )
        kept = (layout.shape.is_fixed, layout.is_here)
        homes = self._placements.homes(whole, pieces[0].homes[0], *kept)
        anchors = self._anchors.make(n_anchors) if n_anchors else []
        return CreatedPieces(whole, tuple(pieces), homes, anchors)

    async def spread_over(self, node_id: str, for_groups: bool = False) -> int:
        """How many page servers there are for pieces. See ``PageServers.everywhere``."""
        await self._servers.everywhere(node_id, self._announced.announced, for_groups)
        return len(self._drains.others(0))

    async def follow_writers(self, region: int) -> None:
        """See ``FirstWrites.follow``; a variable in pieces."""
        self._first_writes.follow(self._core.pieces_of(region))

    async def repair_of(self, region: int, version: int) -> RepairSet | None:
        """See ``Repairs.repair_set``."""
        return self._rebuilds.repair_set(region, version)

    async def place(self, region: int, server_id: int, place_s: float) -> None:
        """See ``Placements.place``."""
        await self._placements.place(region, server_id, place_s)

    async def create_counted(
        self, length_bytes: int, node_id: str, request_id: int, n_anchors: int, on_disk: bool
    ) -> Created:
        """See ``Regions.create`` and ``RayAnchors.make``."""
        record = await self._regions.create(length_bytes, node_id, request_id, on_disk)
        return Created(record, self._anchors.make(n_anchors))

    async def seal(
        self, region: int, source: Source | None = None, counted: Counted | None = None
    ) -> RegionRecord:
        """See ``Regions.seal``."""
        if (record := await self._regions.seal(region, source, counted)).group_width:
            self._separations.look()
        return record

    async def seal_and_create(
        self,
        region: int,
        source: Source | None,
        length_bytes: int,
        node_id: str,
        request_id: int,
        counted: Counted | None = None,
    ) -> RegionRecord | None:
        """See ``Regions.seal_and_create``."""
        return await self._regions.seal_and_create(
            region, source, length_bytes, node_id, request_id, counted
        )

    async def anchors(self, n_anchors: int) -> list[Any]:
        """See ``RayAnchors.make``."""
        return self._anchors.make(n_anchors)

    async def hold(self, region: int) -> Any:
        """See ``RayAnchors.of``."""
        return self._anchors.of(region)

    async def nothing(self, n_times: int) -> list[None] | None:
        """Returns None so many times: what anchors are made of."""
        return None if n_times == 1 else [None] * n_times

    async def abandon(self, region: int, leased: bool = False) -> None:
        """See ``Regions.abandon``."""
        self._regions.abandon(region, leased)

    async def free(self, region: int, here: int = 0) -> FreeAnswer:
        """See ``Regions.free``."""
        return await self._regions.free(region, here)

    async def lookup(self, region: int, server_id: int = 0) -> LookupAnswer:
        """See ``Regions.lookup``."""
        return await self._regions.lookup(region, server_id)

    async def regions_idle(self, regions: list[int], server_id: int) -> None:
        """See ``RegionEnds.idle``."""
        self._ends.idle(regions, server_id)

    async def share(
        self, object_refs: list[Any], node_id: str, request_id: int = 0
    ) -> tuple[RegionRecord, Plan, Any]:
        """See ``Regions.share``; its references are counted by the anchor, which is the last of
        the three."""
        record, plan = await self._regions.share(object_refs, node_id, request_id)
        (anchor,) = self._anchors.make(1)
        self._counts.begin(record.region, anchor.binary())
        return record, plan, anchor

    async def give_up_share(self, request_id: int) -> None:
        """See ``Regions.give_up_share``."""
        self._regions.give_up_share(request_id)

    async def shared_at(self, server_id: int) -> list[tuple[Pinned, list[Any]]]:
        """See ``Rebuilds.shared_at``."""
        return self._rebuilds.shared_at(server_id)

    # -- names

    async def give_name(self, name: str, region: int, packed: bytes) -> None:
        """See ``VariableNames.give``."""
        self._names.give(name, region, packed)

    async def find_name(self, name: str) -> tuple[bytes, Latest, Any] | None:
        """See ``VariableNames.find``, and one more anchor of the variable.

        Raises:
            ClosedError: The session is being shut down.
        """
        self._check_not_ending()
        found = self._names.find(name)
        return None if found is None else (*found, self._anchors.of(found[1].region))

    async def drop_name(self, name: str) -> None:
        """See ``VariableNames.drop``."""
        self._names.drop(name)

    async def variables(self) -> list[VariableRecord]:
        """See ``VariableNames.variables``."""
        return self._names.variables()

    # -- versions

    async def latest(self, regions: list[int]) -> list[Latest]:
        """See ``Versions.latest``."""
        return self._versions.latest(regions)

    async def at(self, region: int, version: int) -> Latest:
        """See ``Versions.at``."""
        return await self._versions.at(region, version)

    async def may_commit(self, request: CommitRequest) -> None:
        """See ``Versions.may_commit``."""
        await self._versions.may_commit(request)

    async def commit(self, request: CommitRequest) -> Committed:
        """See ``Versions.commit``."""
        return await self._versions.commit(await self._first_writes.before_commit(request))

    async def spans(self) -> bytes:
        """What took this process long of late. Packed: host, node, pid, spans as tuples."""
        node_id = ray.get_runtime_context().get_node_id()
        # Ray's name of the thread of its loop is nothing to people.
        spans = [tuple(each._replace(thread="")) for each in record.here.spans()]
        return pack(ray.util.get_node_ip_address(), node_id, os.getpid(), spans)

    async def bring(self, request: CommitRequest) -> int:
        """See ``Versions.bring``."""
        return await self._versions.bring(request)

    async def outcome(self, commit_id: int, by_writer: bool = False) -> dict[int, int]:
        """See ``Versions.outcome``."""
        return await self._versions.outcome(commit_id, by_writer)

    async def drop_keys(self, tokens: list[bytes]) -> int:
        """See ``Versions.drop_keys``."""
        return self._versions.drop_keys(tokens)

    async def changes(self, region: int, from_version: int, to_version: int) -> bytes | None:
        """See ``Versions.changes``."""
        return self._versions.changes(region, from_version, to_version)

    async def published(self, region: int, since: int) -> list[tuple[int, int]]:
        """See ``Versions.published``."""
        return self._versions.published(region, since)

    async def settled(self, region: int) -> int:
        """See ``Versions.settled``."""
        return self._versions.settled(region)

    async def newer(self, server_id: int, known: dict[int, int], wait_s: float) -> dict[int, int]:
        """See ``News.newer``."""
        return await self._news.newer(server_id, known, wait_s)

    # -- homes that are lost

    async def rehomed(self, region: int, server_id: int) -> RegionRecord | None:
        """See ``Rebuilds.new_home``."""
        return await self._rebuilds.new_home(region, server_id)

    async def why_lost(self, region: int) -> errors.HomeLostError | None:
        """See ``Versions.why_lost``."""
        return self._versions.why_lost(region)

    async def lost_blocks(self, region: int) -> LostBlocks | None:
        """See ``Versions.lost_blocks``."""
        return self._versions.lost_blocks(region)

    async def task_ended(self, task: str, end: TaskEnd) -> None:
        """See ``TaskEndLog.note``."""
        self._task_ends.note(task, end)

    async def end_of_task(self, task: str, wait_s: float) -> TaskEnd | None:
        """See ``TaskEndLog.find``."""
        return await self._task_ends.find(task, wait_s)

    # -- homes that move

    async def drain(self, node_id: str, drain_s: float) -> DrainResult:
        """Moves all homes off a node. See ``Drains.drain``.

        Raises:
            NoSuchNodeError: No living node has this id.
        """
        self._check_not_ending()
        server_id = await self._servers.to_drain(node_id, self._drains.others)
        self._idle_nodes.forget(server_id)  # from now on it leaves because somebody has asked
        try:
            variables = self._drains.drain(server_id, node_id, drain_s)
            result = await self._programs.drain_with(variables, node_id, drain_s)
            return result._replace(leaves=self._departures.leaves(server_id))
        finally:
            self._departures.watch()

    async def _prepare_drain(self, server_id: int, but: Collection[str]) -> None:
        if not self._drains.others(server_id):
            await self._servers.ensure_at(await asyncio.to_thread(alive_nodes) - set(but))

    async def drained_nodes(self) -> list[str]:
        """Those to which no program is to come."""
        return [
            *self._programs.drained,
            *filter(None, map(self._core.node_of, self._drains.leaving)),
        ]

    async def cancel_drain(self, node_id: str) -> bool:
        """See ``Drains.cancel``, and ``PageServers.come_back`` where it has left.

        Raises:
            NoSuchNodeError: No living node has this id.
        """
        self._check_not_ending()
        has_come = await self._servers.come_back(node_id)
        was_drained = await self._programs.cancel(node_id)
        return self._drains.cancel(self._core.server_id_at(node_id)) or has_come or was_drained

    async def make_room(self, node_id: str, needed_bytes: int) -> bool:
        """See ``FullNodes.make_room``."""
        return await self._full_nodes.make_room(self._core.server_id_at(node_id), needed_bytes)

    # -- what tasks read

    async def note_reads(self, packed: bytes) -> None:
        """A task says what it touched: ``pack(digest, {region: serialized BitMap})``, and maybe who
        it was (``LineageService.note_plain``)."""
        digest, sets, *who = unpack(packed)
        self._read_sets.note(digest, sets)
        if who:
            self._lineage.note_plain(digest, sets, *who)

    async def find_reads(self, packed: bytes) -> bytes:
        """See ``SharedReadSets.find``."""
        return self._read_sets.find(packed)
