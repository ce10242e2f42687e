"""The page server actor: one per node and job. A facade over the engine and ``server_core``.

Its process may be killed at any moment: Ray starts the actor again, ``__init__`` runs again, the
keeper hands back the memory, and the registry learns the new port. Whatever must survive is in the
keeper or in the registry; this object keeps nothing else, but for the Ray objects that it pins.
Where trouble may pass, ``__init__`` ends the process, and Ray starts it again (``starting``).

The registry's process may be killed at any moment, too, and Ray ends the actors that a dead process
has made. So a page server is detached, and ends itself: one call to the registry lasts for as long
as that lives, however often it is restarted, and fails when it is gone for good.

Threads: Ray calls methods on up to 32 threads. The sockets live on one thread of ours that runs a
uvloop; methods reach it only through ``_on_loop``. The engine's own threads never enter Python.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import ray
import uvloop
from ray.exceptions import GetTimeoutError, RayError

from clamor_ray import errors
from clamor_ray._labels import label
from clamor_ray._native import client as _native
from clamor_ray._objects.memory import COMMIT_HINT, check_room
from clamor_ray._protocol import names
from clamor_ray._protocol.messages import (
    LIBRARY_VERSION,
    NodeRoom,
    Pinned,
    Publication,
    RebuildOrder,
    RegionRecord,
    ServerConfig,
    ServerInfo,
    ServerReport,
    StoreState,
)
from clamor_ray._protocol.names import server_id_of
from clamor_ray._protocol.ray_state import GONE, was_restarted
from clamor_ray._protocol.registry_client import RegistryClient
from clamor_ray._protocol.rpc import pack, unpack
from clamor_ray.actors.lost_homes.repairs import Staged
from clamor_ray.actors.node_store.store_part import StorePart
from clamor_ray.actors.page_server import exported, keepers, node_spans
from clamor_ray.actors.page_server.away import AwayWatch, old_homes
from clamor_ray.actors.page_server.engine_like import Settings
from clamor_ray.actors.page_server.file_reads import FileReads, read_at_node
from clamor_ray.actors.page_server.moved_homes import MovedHomes
from clamor_ray.actors.page_server.pinned_objects import PinnedObjects
from clamor_ray.actors.page_server.rebuilt_homes import RebuiltHomes, layer_error
from clamor_ray.actors.page_server.registry_resolver import RegistryResolver
from clamor_ray.actors.page_server.room import (
    NoDirectory,
    cache_bytes,
    cache_disk_bytes,
    disk_directory,
    node_room,
)
from clamor_ray.actors.page_server.server_core import ServerCore
from clamor_ray.actors.process import (
    descriptors,
    keeper_process,
    oom_score,
    registry_end,
    socket_directory,
    starting,
)
from clamor_ray.actors.process.journals import session_directory
from clamor_ray.actors.process.throttle import throttle

logger = logging.getLogger("clamor_ray.page_server")

CALL_S = 10.0
START_CALL_S = 600.0  # while it starts: the registry may be restarted meanwhile, or slow
MOST_LIVES = 64  # of a node, that are looked for when nobody says which one is the last
LOOP_S = 10.0
START_LOOP_S = 60.0
RENEWING_S = 8.0  # less than the registry waits for a server to stop
PULL_S = 600.0
NO_KEEPER = "its process and its keeper died together, and with them what only they held"
PUBLISH_S = 60.0

_T = TypeVar("_T")


class PageServer(node_spans.NodeSpans):
    """See the file's head.

    Args:
        registry: The registry's actor handle.
        config: The job's settings.
        node_id: Ray's hex id of this node.
    """

    _store: StorePart | None = None
    _end_metrics: Callable[[], None] = staticmethod(lambda: None)  # before it has begun

    def __init__(self, registry: Any, config: ServerConfig, node_id: str) -> None:
        throttle("clamor_ray.page_server")
        self._registry = registry
        self._node_id = node_id
        self._renewing = threading.Lock()  # a keeper is being started in place of another
        self._info: ServerInfo | None = None
        self._process = secrets.randbits(64) or 1
        self._stopped = False
        self._ending = threading.Lock()
        oom_score.lower()
        here = ray.get_runtime_context().get_node_id()
        if here != node_id:
            raise RuntimeError(f"a page server for node {node_id} was started on node {here}")
        tries = session_directory() / f"clamor-{config.job_scope}-{node_id[:16]}-tries"
        try:
            self._start(config, node_id)
        except GONE:  # the session is over, and nobody will come for what is kept
            starting.succeeded(tries)
            self._end_keepers(config)
            raise
        except Exception as failure:
            self._cannot_start(config, failure)
            starting.end_process_to_try_again(f"the page server of node {node_id}", tries, failure)
        starting.succeeded(tries)

    def _cannot_start(self, config: ServerConfig, failure: Exception) -> None:
        """Tells the registry why; raises it where the next try would end in the same way."""
        cause = getattr(failure, "cause", None) or failure
        if not isinstance(cause, errors.ClamorError):
            text = f"The page server of node {self._node_id} cannot start: {cause!r}"
            cause = errors.ServerUnavailableError(text)
        refused = (NoDirectory, errors.StoreFormatError, errors.StoreAccessError)
        is_final = isinstance(cause, (*starting.FINAL, *refused))
        with contextlib.suppress(RayError):  # what it says is for a person: the log has it too
            told = self._registry.start_failed.remote(self._node_id, cause, is_final=is_final)
            ray.wait([told], timeout=CALL_S)
        # One that has served before has memory at its keeper: it is not given up.
        if is_final and not was_restarted():
            self._end_keepers(config)
            raise failure

    def _end_keepers(self, config: ServerConfig, but: int = 0) -> None:
        """Under all ids this node may have had: the registry may not be there to say which."""
        for server_id in self._ids():
            if server_id != but:
                keepers.end_keeper(self._keeper_socket(config, server_id))

    def _ids(self) -> Iterator[int]:
        place = self._place or self._node_id
        return (server_id_of(place, life) for life in range(MOST_LIVES))

    @property
    def _place(self) -> str:
        """The directory of the store that this server is known by; "": it is known by its node."""
        return self._store.directory_id if self._store is not None else ""

    def _keeper_socket(self, config: ServerConfig, server_id: int) -> str:
        return names.keeper_socket(config.job_scope, self._node_id, server_id, config.sockets_below)

    def _ask(self, method: str, *arguments: object, timeout_s: float | None = None) -> Any:
        """What the registry answers, however long it takes to be restarted.

        Raises:
            GONE: The session is over.
            GetTimeoutError: It said nothing for ``timeout_s``; None: for ``START_CALL_S``.
        """
        reference = getattr(self._registry, method).remote(*arguments)
        deadline_s = time.monotonic() + (START_CALL_S if timeout_s is None else timeout_s)
        while True:
            try:
                return ray.get(reference, timeout=CALL_S)
            except GetTimeoutError:
                if time.monotonic() >= deadline_s:
                    raise
                logger.warning("waiting for the registry's answer to %s", method)
                self._held_keepers.hold()

    def _start(self, config: ServerConfig, node_id: str) -> None:
        descriptors.make_room()
        if config.store:
            noted = session_directory() / f"clamor-{config.job_scope}-{node_id[:16]}-directory"
            self._store = StorePart(config, noted)
        # Before all that may wait; where this start fails, until the process has ended.
        self._held_keepers = keepers.KeeperHold(
            self._keeper_socket(config, each) for each in self._ids()
        )
        self._held_keepers.hold()
        # Until this process ends: whoever watches the journal sees that it must be started again.
        self._journal_directory = session_directory() / names.journal_directory(config.job_scope)
        self._lock_fd = keeper_process.hold_beside(self._journal_directory)
        socket_directory.prepare(names.socket_directory(config.sockets_below))
        self._cache_bytes = cache_bytes(config, node_id)
        registry = RegistryClient(self._ask)
        server_id, has_served = registry.begin_server(node_id, self._place)
        if not has_served:  # the ids before this one are lost for good, with what they held
            # Of a store, one that is there may have been given a part.
            self._end_keepers(config, but=0 if self._store is not None else server_id)
        keeper = keepers.find_keeper(self._keeper_socket(config, server_id), has_served)
        if keeper is None and has_served:
            server_id = registry.renew_server(node_id, server_id, NO_KEEPER)
            if self._store is not None:  # whose directory it has under this id, too
                server_id, _ = registry.begin_server(node_id, self._place)
        self._keeper_name = self._keeper_socket(config, server_id)
        # Before there is a keeper: the next start would take an empty one for whole.
        is_cold = keeper is None and self._store is not None
        state = registry.store_state(server_id) if is_cold else StoreState()
        self._keeper = keeper or keepers.start_keeper(self._keeper_name, config.orphan_timeout_s)
        damaged: dict[int, str] = {}
        if is_cold and self._store is not None:
            damaged = self._open_again(self._store, state)
        name = names.server_socket(config.job_scope, node_id, config.sockets_below)
        # Before the engine takes back what the keeper has: that may drop history for want of room.
        floors = registry.floors_at(server_id)
        self._engine = self._take_back(config, name, server_id, floors, is_cold)
        self._held_keepers.release()
        self._pins = PinnedObjects(self._engine, self._registry, node_id)
        self._file_reads = FileReads(
            *(
                self._engine,
                lambda region: self._ask("file_of", region, timeout_s=config.fault_timeout_s),
                node_id,
            ),
            lambda *where: read_at_node(config.job_scope, *where),
        )
        self._loop = uvloop.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="clamor-loop", daemon=True).start()
        secret = registry.secret()
        host = ray.util.get_node_ip_address()
        self._core = ServerCore(
            self._engine,
            RegistryResolver(self._registry, server_id),
            server_id=server_id,
            secret=secret,
            settings=Settings(deadline_s=config.reattach_s + CALL_S, pull_s=PULL_S),
            keeper_lost=lambda: threading.Thread(
                target=self._renew_keeper, args=(config,), name="clamor-keeper", daemon=True
            ).start(),
            file_wanted=self._file_reads.wanted,
            durable_wanted=self._durable_wanted,
            keeps=() if self._store is None else self._store.answering(self._process),
        )
        self._moved_homes = MovedHomes(
            *(self._engine, self._fetch),
            lambda region: self._ask("lookup", region, timeout_s=CALL_S),
            *(self.rehome, self._pins.unpin),
            syncs=self._store is not None,
        )
        self._rebuilt_homes = RebuiltHomes(
            *(self._engine, self._core.versions.keep, self._on_loop, self._fetch),
            self._moved_homes.adopt,
        )
        if self._store is not None:
            outcome = functools.partial(self._ask, "outcome", timeout_s=CALL_S)
            self._store.serve(self._engine, outcome)
        self._pins.pin_all_again(registry.shared_at(server_id), config.fault_timeout_s / 2)
        port = self._on_loop(self._core.start(host, 0, names.news_socket(name)), START_LOOP_S)
        info = ServerInfo(
            server_id=server_id,
            node_id=node_id,
            host=host,
            port=port,
            socket_name=name,
            library_version=LIBRARY_VERSION,
            pid=os.getpid(),
            directory=self._place,
            process=self._process,
        )
        if is_cold:
            registry.store_damaged(server_id, damaged)
        self._info = registry.register_server(info)
        logger.info("page server %#x listens at %s:%d", server_id, host, port)
        ask = self._ask
        self._away = AwayWatch(lambda: ask("locate", server_id, timeout_s=CALL_S), self._was_lost)
        self._end_metrics = exported.export(self._engine, self._cache_bytes, node_id, config)
        me, watch = (ray.get_runtime_context().current_actor,), self._watch_registry
        threading.Thread(target=watch, args=me, name="clamor-watch", daemon=True).start()
        self._away.start()

    def _take_back(
        self,
        config: ServerConfig,
        name: str,
        server_id: int,
        floors: dict[int, int],
        is_cold: bool,
    ) -> _native.Engine:
        """The engine, with all that the keeper has.

        Raises:
            HomeLostError: The keeper had only a part, and was told to leave.
            What the engine raises.
        """
        store = self._store
        on_disk = (
            str(store.path)
            if store is not None
            else disk_directory(
                "CLAMOR_SPILL_DIR", config.spill_directory or config.history_directory
            )
        )
        try:
            return _native.Engine(
                name,
                server_id=server_id,
                keeper=self._keeper,
                fetch_timeout_s=config.fetch_timeout_s,
                fault_timeout_s=config.fault_timeout_s,
                settle_s=config.reattach_s,
                page_bytes=config.page_bytes,
                stage_timeout_s=config.stage_timeout_s,
                history_bytes=config.history_bytes,
                history_disk_bytes=config.history_disk_bytes,
                history_directory=disk_directory("CLAMOR_HISTORY_DIR", config.history_directory),
                disk_directory=on_disk,
                cache_bytes=self._cache_bytes,
                cache_disk_bytes=cache_disk_bytes(config.cache_disk_bytes, on_disk),
                cache_policy=config.cache_policy,
                replication=config.replication,
                floors=floors,
                library_version=LIBRARY_VERSION,
                durable=store is not None,
                cold=is_cold,
                sums_directory=str(store.sums_path) if store is not None else None,
            )
        except errors.HomeLostError:
            self._keeper.quit()
            raise

    def _renew_keeper(self, config: ServerConfig) -> None:
        """Starts a keeper in place of the one that died, until one takes what there is."""
        name = self._keeper_name
        logger.error("the keeper is gone: another one is started, and given everything")
        for pause_s in itertools.chain(starting.PAUSES_S, itertools.repeat(starting.PAUSES_S[-1])):
            with self._renewing:
                if self._stopped:
                    return
                try:
                    socket_directory.prepare(names.socket_directory(config.sockets_below))
                    # One that has closed the connection, and is there still.
                    keepers.end_keeper(name)
                    keeper_process.spawn(
                        name, keeper_process.raylet_pid(), config.orphan_timeout_s, is_part=True
                    )
                    self._keeper = _native.Keeper(name, timeout_s=keepers.STARTS_S)
                    self._engine.renew_keeper(self._keeper)
                    return
                except Exception as failure:  # any: nobody else would start one
                    logger.error("a keeper cannot be started; again in %g s: %r", pause_s, failure)
            time.sleep(pause_s)

    def _open_again(self, store: StorePart, state: StoreState) -> dict[int, str]:
        """See ``StorePart.open_again``; where that fails, nothing is left of the keeper."""
        try:
            return store.open_again(state, self._keeper)
        except BaseException:
            self._keeper.quit()
            raise

    def _durable_wanted(self, region: int, commit_id: int, version: int) -> None:
        """The engine's question, on the loop: see ``StorePart.keep_whole``."""
        store = self._store
        assert store is not None

        def work() -> None:
            is_kept = False
            try:
                store.keep_whole(region, commit_id, version)
                is_kept = True
            except errors.ClamorError as failure:  # the engine asks again
                logger.warning("a commit to %s cannot be applied yet: %s", label(region), failure)
            with contextlib.suppress(errors.ClamorError):  # it is freed
                self._engine.layer_durable(region, commit_id, is_kept)

        self._loop.run_in_executor(None, work)

    def __repr__(self) -> str:  # must be: see starting
        return f"PageServer({self._node_id[:16]})"

    def _on_loop(self, work: Coroutine[Any, Any, _T], timeout_s: float = LOOP_S) -> _T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def _watch_registry(self, me: Any) -> None:
        """Waits for the registry's end, which is the session's, and then ends this actor."""
        registry_end.wait(self._registry)
        registry_end.remove_journal(self._journal_directory)
        try:
            self.stop()
        except Exception as failure:  # any: the process ends here
            logger.error("cannot stop the engine: %r", failure)
        finally:
            ray.kill(me)

    def ping(self) -> int:
        """The actor's process id; it answers once it has registered."""
        return os.getpid()

    def hello(self) -> ServerInfo:
        """What a restarted registry asks: who this is."""
        assert self._info is not None
        return self._info

    def stats(self) -> ServerReport:
        """The engine's counters, its regions, and what came to the data port."""
        assert self._info is not None
        return ServerReport(
            info=self._info,
            engine=self._engine.stats(),
            regions=tuple(self._engine.region_stats()),
            connections=self._core.counters(),
            cache_bytes=self._cache_bytes,
            thrashing=self._core.thrashing,
        )

    def room(self) -> NodeRoom:
        """See ``node_room``."""
        return node_room(self._engine, self._pins.regions)

    def region_stats(self) -> tuple[dict[str, int], ...]:
        """One entry per region known here, by the names of ``struct pc_region_stats``."""
        return tuple(self._engine.region_stats())

    def oldest_version(self, region: int) -> int:
        """The oldest version whose blocks this home keeps; 0 where it is not the home."""
        for stats in self._engine.region_stats():
            if stats["region"] == region and stats["is_home"]:
                return stats["oldest_version"]
        return 0

    def histogram(self, region: int, which: int, n_buckets: int) -> list[int]:
        """Blocks of a set in each of n equal parts of the region; empty where it is unknown."""
        try:
            return self._engine.histogram(region, which, n_buckets)
        except errors.FreedError:
            return []

    def knows(self, regions: list[int]) -> list[bool]:
        """Which of these regions are here, filled or not."""
        return [bool(self.histogram(region, _native.BLOCKS_PRESENT, 1)) for region in regions]

    def retire(self, packed: bytes) -> bytes:
        """Regions are freed; of those ordered with force, no lease is left anywhere: they go now.

        Args:
            packed: As ``rpc.pack`` makes it, for each order: (region, whether with force, its
                record or None, alone). The record is for a server that was restarted and does not
                know the region yet. Alone: no other server knows it: it goes now too, where no
                lease is left here.

        Returns:
            As packed: for each of them, whether leases may be left here. If not, none can begin any
            more; and with alone nothing of the region is here. None: it is to be ordered again.
        """
        orders = unpack(packed)

        async def tell() -> list[bool | None]:
            return [self._retire(*order) for order in orders]

        answers = self._on_loop(tell())
        for (region, force, _, alone), leased in zip(orders, answers, strict=True):
            if leased is not None and (force or (alone and not leased)):
                self._gone(region)
        return pack(*answers)

    def _gone(self, region: int) -> None:
        """The region is not here any more."""
        self._pins.unpin(region)
        if self._store is not None:
            self._store.drop_region(region)

    def _retire(
        self, region: int, force: bool, record: RegionRecord | None, alone: bool
    ) -> bool | None:
        try:
            leased = self._core.retire(region, force, record)
            if alone and not leased:
                self._core.retire(region, True)
        except errors.FreedError:  # nothing of it is here
            return False
        except errors.ClamorError as failure:
            logger.warning("variable %d cannot be retired yet: %s", region, failure)
            return None
        return leased

    def retain(self, floors: dict[int, int | None]) -> None:
        """Says which old versions of regions that are homed here live collections could need.

        Their blocks are dropped after all others, and only if the budgets for old versions are
        full (docs/transactions.md). Who asks twice waits for the first answer: calls that overlap
        may come in either order.

        Args:
            floors: By region, the oldest version that must stay readable; None: none must. Regions
                that are not named keep what was said of them. One that is not known here yet is
                no error. Nothing of it outlives this process: the next one asks when it starts
                (`Registry.floors_at`), and is told again.

        Raises:
            OutOfMemoryError: It could not be noted.
        """
        for region, version in floors.items():
            self._engine.retain(region, version)

    # -- commits

    def pull(self, commit_id: int, region: int, from_server: int, layer_bytes: int) -> None:
        """This home fetches the layer of a commit from the page server where it is staged.

        Args:
            commit_id: The commit.
            region: What it changes; homed here.
            from_server: Id of the page server that has it; this one's own: it is only asked whether
                it has it still.
            layer_bytes: Its size.

        Raises:
            OutOfMemoryError: There is no room for it.
            CommitAbortedError: It is not there any more.
            ClamorError: As the engine says. In a session with a store also what the disk refuses.
        """
        self._fetch(commit_id, region, from_server, layer_bytes)
        if self._store is not None:
            self._store.keep_layer(region, commit_id)

    def keep(self, region: int) -> None:
        """See ``StorePart.keep``: a region is sealed, in a session with a store."""
        if self._store is not None:
            self._store.keep(region)

    def free_directories(self) -> list[str]:
        """See ``StorePart.free_directories``."""
        return self._store.free_directories() if self._store is not None else []

    def take_directory(self, directory: str, state: StoreState) -> list[int]:
        """See ``StorePart.take_directory``."""
        return self._store.take_directory(directory, state) if self._store is not None else []

    def drop_directory(self, directory: str) -> None:
        """See ``StorePart.drop_directory``."""
        if self._store is not None:
            self._store.drop_directory(directory)

    def _fetch(self, commit_id: int, region: int, from_server: int, layer_bytes: int) -> None:
        what = f"Taking the changed blocks of {label(region)} at their home"
        if not self._engine.has_layer(region, commit_id):  # else it is only asked about
            check_room(layer_bytes, what, COMMIT_HINT)
        code = self._on_loop(
            self._core.versions.pull(region, commit_id, from_server, layer_bytes), PULL_S + LOOP_S
        )
        if code:
            raise layer_error(code, commit_id, region, from_server, self._engine.server_id)

    def publish(self, items: list[Publication]) -> list[tuple[int, int]]:
        """The registry tells what became public of the regions that are homed here.

        Returns:
            The newest (region, version) of each region that is settled here.
        """
        known: list[tuple[int, int]] = self._on_loop(self._core.versions.publish(items), PUBLISH_S)
        if self._store is not None:  # what is acknowledged may be forgotten by the registry
            self._store.name(items)
        return known

    def drop_staged(self, commit_id: int, regions: list[int]) -> None:
        """A commit was refused, and its layers were fetched already."""

        async def tell() -> None:
            self._core.versions.drop_staged(commit_id, regions)

        self._on_loop(tell())
        if self._store is not None:
            self._store.drop_layers(commit_id, regions)

    # -- regions whose home is lost

    def holdings(
        self, record: RegionRecord, commits: list[tuple[int, int]]
    ) -> list[tuple[int, bytes]]:
        """See ``RebuiltHomes.holdings``."""
        return self._rebuilt_homes.holdings(record, commits)

    def stage_cached(self, region: int, version: int, commit_id: int, blocks: bytes) -> int:
        """See ``RebuiltHomes.stage_cached``."""
        return self._rebuilt_homes.stage_cached(region, version, commit_id, blocks)

    def rebuild(self, order: RebuildOrder, made: list[Any]) -> None:
        """See ``RebuiltHomes.rebuild``."""
        self._rebuilt_homes.rebuild(order, made)
        if not order.attempt:
            self.keep(order.record.region)

    def rebuild_drop(self, region: int) -> None:
        """See ``RebuiltHomes.drop``."""
        self._rebuilt_homes.drop(region)
        self._gone_unless_home(region)

    # -- homes that move

    def home_blocks(self, region: int, version: int) -> bytes:
        """See ``MovedHomes.home_blocks``."""
        return self._moved_homes.home_blocks(region, version)

    def stage_home(self, region: int, version: int, commit_id: int, blocks: bytes) -> int:
        """See ``MovedHomes.stage_home``."""
        return self._moved_homes.stage_home(region, version, commit_id, blocks)

    def stage_records(
        self, region: int, first_version: int, commit_ids: list[int], most_bytes: int
    ) -> list[int]:
        """See ``MovedHomes.stage_records``."""
        return self._moved_homes.stage_records(region, first_version, commit_ids, most_bytes)

    def drop_layers(self, region: int, commit_ids: list[int]) -> None:
        """See ``MovedHomes.drop_layers``."""
        self._moved_homes.drop_layers(region, commit_ids)

    def take_begin(self, record: RegionRecord, attempt: int, n_bytes: int, lost: bytes) -> None:
        """See ``MovedHomes.begin``."""
        self._moved_homes.begin(record, attempt, n_bytes, lost)

    def take(
        self, region: int, attempt: int, from_server: int, layers: list[tuple[int, int]]
    ) -> None:
        """See ``MovedHomes.take``."""
        self._moved_homes.take(region, attempt, from_server, layers)

    def take_records(
        self, region: int, attempt: int, from_server: int, layers: list[tuple[int, int]]
    ) -> None:
        """See ``MovedHomes.take_records``."""
        self._moved_homes.take_records(region, attempt, from_server, layers)

    def stage_versions(self, region: int, wanted: list[tuple[int, int, bytes]]) -> list[int]:
        """See ``MovedHomes.stage_versions``."""
        return self._moved_homes.stage_versions(region, wanted)

    def take_repaired(
        self, region: int, attempt: int, are_records: bool, staged: list[Staged]
    ) -> None:
        """See ``MovedHomes.take_repaired``."""
        self._moved_homes.take_repaired(region, attempt, are_records, staged)

    def take_seal(self, region: int, attempt: int, version: int) -> None:
        """See ``MovedHomes.seal``."""
        self._moved_homes.seal(region, attempt, version)
        self.keep(region)

    def take_drop(self, region: int, attempt: int) -> None:
        """See ``MovedHomes.drop``."""
        self._moved_homes.drop(region, attempt)
        self._gone_unless_home(region)

    # -- who the homes are

    def is_home(self, region: int) -> bool:
        """Whether the region's blocks are here, as at its home."""
        return any(found["region"] == region and found["is_home"] for found in self.region_stats())

    def rehome(self, record: RegionRecord) -> None:
        """The region has other homes from now on, maybe this server.

        Raises:
            HomeLostError: This server is one, and has nothing of it.
            WaitTimeoutError: This server is one, and the keeper has not heard of that.
        """

        async def tell() -> None:
            self._core.rehome(record)

        self._on_loop(tell())
        self._moved_homes.told(record)
        if self._store is not None and self._engine.server_id not in record.homes:
            self._store.drop_unless_here(record.region)
        if self._engine.server_id in record.homes:  # the home before is told next, or commits go on
            self._engine.wait_for_keeper()
        elif record.region in self._pins.regions:
            self._moved_homes.left(record.region)

    def _gone_unless_home(self, region: int) -> None:
        """What was got ready here is not needed."""
        if self._store is not None:
            self._store.drop_unless_here(region)

    # -- files

    def read_file(self, region: int, offset: int, n_bytes: int) -> bytes:
        """See ``FileReads.read_for_others``."""
        return self._file_reads.read_for_others(region, offset, n_bytes)

    # -- Ray objects

    def pin(self, object_refs: list[Any], request_id: int = 0) -> Pinned:
        """See ``PinnedObjects.pin``."""
        return self._pins.pin(object_refs, request_id)

    # -- the end

    def _was_lost(self, reason: str) -> None:
        """This server was declared lost, and lives: see ``away``. Its node gets another one, as
        after any loss."""
        with self._ending:
            if self._stopped:
                return
            self._stopped = True
            self._end_metrics()
            arguments = (self._node_id, self._engine.server_id, reason)
            n_old = old_homes(self._engine, reason)
            try:
                self._ask("renew_server", *arguments, n_old, timeout_s=CALL_S)
            except RayError as failure:  # it only counts them
                logger.info("the registry was not told of them: %r", failure)
            self._end_keeper()
            logging.shutdown()
            os._exit(starting.EXIT_TRY_AGAIN)

    def in_use(self, but_homes: bool = False) -> int:
        """How much of what is here would be missed: homes, leases and staged layers, processes that
        watch variables, objects that are being shared. A process that is only connected uses
        nothing: it connects again.

        Args:
            but_homes: Neither homes count, nor layers of other nodes; but uses that have begun and
                ended since this was last asked.
        """
        n_new = self._engine.new_opens() if but_homes else 0
        used = self._engine.in_use(but_homes) + self._core.n_watching + self._pins.n_pinning()
        return used + n_new

    def leave(self) -> int:
        """Ends this server and its keeper where nothing here is in use. The session goes on, and
        its processes are told nothing: who needs a page server here has another one started.

        Returns:
            Its id, where it has ended, now or before; 0: it is in use.
        """
        with self._ending:
            if not self._stopped:
                if self.in_use():
                    return 0
                self._stopped = True
                self._end_metrics()
                try:
                    self._away.close()
                    self._moved_homes.close()
                    self._file_reads.close()
                    self._on_loop(self._core.close())
                    if n_missed := self._engine.leave():
                        raise RuntimeError(f"{n_missed} uses of it have begun meanwhile")
                except Exception as failure:
                    # The keeper has all: the next process of this actor goes on, as after a kill.
                    logger.warning("this server does not end, and is restarted: %r", failure)
                    logging.shutdown()
                    os._exit(starting.EXIT_TRY_AGAIN)
                self._end_keeper()
                if self._store is not None:
                    self._store.close()
        return self._engine.server_id

    def stop(self) -> None:
        """The session has ended: tells its processes, and lets go of everything, the keeper
        included. Idempotent."""
        with self._ending:
            if self._stopped:
                return
            self._stopped = True
            self._end_metrics()
            try:
                self._away.close()
                self._moved_homes.close()
                self._file_reads.close()
                self._engine.end()
                self._on_loop(self._core.close())
                self._engine.stop()
            finally:  # it would stay for CLAMOR_ORPHAN_S, with all memory
                self._end_keeper()
                if self._store is not None:
                    self._store.close()

    def _end_keeper(self) -> None:
        # One that is being started in place of another would stay when this process is gone.
        has_turn = self._renewing.acquire(timeout=RENEWING_S)
        with contextlib.suppress(errors.ClamorError):
            self._keeper.quit()
        if has_turn:
            self._renewing.release()
        self._pins.regions.clear()
