"""Page servers: how one starts and registers, how all stop, and what they did."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any, Final

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from clamor_ray import errors
from clamor_ray._protocol import names
from clamor_ray._protocol.cause import cause_of
from clamor_ray._protocol.messages import (
    LEFT,
    NodeRoom,
    ServerConfig,
    ServerInfo,
    ServerReport,
)
from clamor_ray._protocol.ray_state import PING_S, alive_nodes, raylet_is_gone, within
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.lost_homes.heartbeats import Heartbeats
from clamor_ray.actors.page_server.page_server import PageServer
from clamor_ray.actors.process.background import BackgroundTasks
from clamor_ray.actors.process.journal_watcher import Reserve
from clamor_ray.actors.registry.late_writes import LateWrites
from clamor_ray.actors.registry.liveness import (
    CALL_S,
    WATCH_MOST_S,
    Handles,
    Liveness,
    ServerLoss,
)
from clamor_ray.actors.registry.region_ends import RegionEnds
from clamor_ray.actors.registry.registry_core import RegistryCore

logger = logging.getLogger("clamor_ray.registry")

SPREAD_START_S = 15.0  # for page servers of nodes that a variable is spread over
GROUPS_START_S = 45.0  # the same, where that says how many nodes may be lost
START_SERVER_S = 55.0  # less than a call to the registry has: its caller is told why
STOP_S: Final = 10.0
STOP_PAUSE_S: Final = 0.2
LEAVE_S: Final = 30.0  # a server that is to end may have to end connections first
ROOM_S: Final = 3.0  # somebody waits for memory
NAME_S: Final = 5.0  # until Ray has forgotten the name of an actor that was killed
ELSEWHERE: Final = "its node's page server has another directory of the store now"
TAKEN: Final = "its directory has gone to another node"
RENEWED = "it has joined again as another one, without what it held"


class PageServers:
    """Starts page servers, and knows those that registered.

    Args:
        config: What they are told.
        core: Knows them.
        journal: Where a new one is written first.
        reserve: What is kept of a full disk for that.
        handles: Their actors.
        late: Writes what has changed of them.
        liveness: Which are lost.
        ends: Carries out what one that registers must catch up with.
        here: Is told the id of each that registers, or is found again.
        returned: Is told of each that registers, before it counts as registered: what is in its
            directory of a store is homed there again.
        background: Where nodes get another one.
    """

    def __init__(
        self,
        *,
        config: ServerConfig,
        core: RegistryCore,
        journal: Journal,
        reserve: Reserve,
        handles: Handles,
        late: LateWrites,
        liveness: Liveness,
        ends: RegionEnds,
        here: Callable[[int], object],
        background: BackgroundTasks,
        returned: Callable[[ServerInfo], object] = lambda info: None,
    ) -> None:
        self._config = config
        self._core = core
        self._journal = journal
        self._reserve = reserve
        self._handles = handles
        self._late = late
        self._liveness = liveness
        self._ends = ends
        self._here = here
        self._returned = returned
        self._background = background
        self._starting: dict[str, asyncio.Lock] = {}
        self._starts: dict[str, asyncio.Future[ServerInfo]] = {}  # by node
        self._start_troubles: dict[str, errors.ClamorError] = {}
        self._at_work: set[asyncio.Task[None]] = set()  # starts that nobody waits for any more
        self._ending: set[str] = set()  # nodes whose server is asked to leave
        self._asked_to_leave: set[int] = set()  # which may have ended already
        self.n_dropped = 0  # old homes, since the registry began
        self._heartbeats = Heartbeats(self._here_now, self._beat, self._look, background)
        self.watch = self._heartbeats.watch
        self.is_suspected = self._heartbeats.is_suspected

    def find_again(self, info: ServerInfo) -> None:
        """One that the journal knows."""
        name = names.page_server_name(self._config.job_scope, info.node_id)
        try:
            self._handles[info.server_id] = ray.get_actor(name, namespace=names.NAMESPACE)
        except ValueError:
            self._liveness.lose(info.server_id, "its actor ended while the registry was down")
            return
        self._background.spawn(self._greet(info.server_id))

    async def _greet(self, server_id: int) -> None:
        """Asks a page server what only it knows: its port, if it was restarted."""
        pause_s = PING_S
        while (handle := self._handles.get(server_id)) is not None:
            try:
                info = await within(CALL_S, handle.hello.remote())
            except ActorDiedError as failure:
                self._liveness.actor_died(server_id, failure)
            except (RayError, asyncio.TimeoutError) as failure:
                logger.warning("page server %#x does not answer yet: %r", server_id, failure)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, WATCH_MOST_S)
            else:
                known = self._core.locate(server_id)
                if info.server_id != server_id:
                    self._liveness.lose(server_id, RENEWED, is_there=True)
                    return
                if isinstance(known, ServerInfo) and known.epoch <= info.epoch != known:
                    self._core.server_moved(info)
                self._here(server_id)
                return

    def is_here(self, node_id: str) -> bool:
        """Whether the node has a page server, so that ``ensure`` need not wait for one."""
        server_id = self._core.server_id_at(node_id)
        return node_id not in self._ending and isinstance(self._core.locate(server_id), ServerInfo)

    async def ensure(self, node_id: str) -> ServerInfo:
        """The node's page server, started if there is none yet.

        Raises:
            ServerUnavailableError: The node is dead, or the server did not start in 60 s.
            VersionMismatchError: The node runs another build of this library.
        """
        async with self._starting.setdefault(node_id, asyncio.Lock()):
            server_id = self._core.server_id_at(node_id)
            answer = self._core.locate(server_id)
            if isinstance(answer, ServerInfo):
                return answer
            if self._background.is_closed:
                raise errors.ClosedError("The session was shut down.")
            if node_id not in await asyncio.to_thread(alive_nodes):
                raise errors.ServerUnavailableError(f"The node {node_id} is not alive.")
            handle = (
                ray.remote(PageServer)
                .options(
                    name=names.page_server_name(self._config.job_scope, node_id),
                    namespace=names.NAMESPACE,
                    get_if_exists=True,
                    lifetime="detached",
                    num_cpus=0,
                    max_restarts=-1,
                    max_task_retries=-1,
                    max_concurrency=32,
                    enable_task_events=False,  # see create_registry
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
                )
                .remote(ray.get_runtime_context().current_actor, self._config, node_id)
            )
            self._handles[server_id] = handle
            try:
                return await self._started(node_id, handle)
            except errors.ClamorError:
                for each in {server_id, self._core.server_id_at(node_id)}:
                    self._handles.pop(each, None)
                with contextlib.suppress(RayError, ValueError):
                    ray.kill(handle)
                raise

    async def check_alive(self, node_id: str) -> set[str]:
        """
        Returns:
            The living nodes.

        Raises:
            NoSuchNodeError: This is none of them.
        """
        alive = await asyncio.to_thread(alive_nodes)
        if node_id not in alive:
            raise errors.NoSuchNodeError(f"No living node of the cluster has the id {node_id!r}.")
        return alive

    async def to_drain(self, node_id: str, others: Callable[[int], list[int]]) -> int:
        """The id of the page server of a node that is to be drained. Where no other one is there
        that could take what it has, the other nodes get theirs.

        Args:
            node_id: Ray's hex id of the node.
            others: Who could take what a server has.

        Raises:
            NoSuchNodeError: No living node has this id.
        """
        alive = await self.check_alive(node_id)
        server_id = self._core.server_id_at(node_id)
        if not others(server_id):
            await self.ensure_at(alive - {node_id})
        return server_id

    async def come_back(self, node_id: str) -> bool:
        """The node of a page server that has left gets another one, which takes homes.

        Args:
            node_id: Ray's hex id of the node.

        Returns:
            Whether its page server had left.

        Raises:
            NoSuchNodeError: No living node has this id.
        """
        await self.check_alive(node_id)
        server_id = self._core.server_id_at(node_id)
        had_one = self._core.lives.has_lost_one(node_id)
        if not had_one or isinstance(self._core.locate(server_id), ServerInfo):
            return False
        await self.ensure(node_id)
        return True

    async def everywhere(
        self, node_id: str, leaving: Collection[str], for_groups: bool = False
    ) -> None:
        """Each living node gets its page server, as far as that does not take long.

        Args:
            node_id: Of who asks.
            leaving: Nodes that get none.
            for_groups: It may take longer: how many there are says how many may be lost.
        """
        alive = await self.check_alive(node_id)
        wait_s = GROUPS_START_S if for_groups else SPREAD_START_S
        await self.ensure_at(alive.difference(leaving), wait_s)

    async def start_spares(
        self, leaving: Collection[str], is_leaving: Callable[[int], bool]
    ) -> None:
        """Nodes that never had a page server get theirs: one that was drained has left.

        Args:
            leaving: Nodes that get none.
            is_leaving: Whether the node of a server gets none.
        """
        alive = await asyncio.to_thread(alive_nodes)
        new = []
        for node_id in alive.difference(leaving):
            server_id = self._core.server_id_at(node_id)
            if not self._core.lives.has_lost_one(node_id) and not is_leaving(server_id):
                new.append(node_id)
        await self.ensure_at(new, SPREAD_START_S)

    async def ensure_at(self, node_ids: Iterable[str], wait_s: float | None = None) -> None:
        """The page servers of these nodes, as far as they can be had: so that there is one that can
        take what another has.

        Args:
            node_ids: Of the nodes.
            wait_s: Those that need longer go on starting; None: all are waited for.
        """

        async def one(node_id: str) -> None:
            try:
                await self.ensure(node_id)
            except errors.ClamorError as failure:
                logger.warning("node %s gets no page server: %s", node_id, failure)

        starting = {node_id for node_id in node_ids if not self.is_here(node_id)}
        tasks = [asyncio.ensure_future(one(node_id)) for node_id in starting]
        if tasks:
            self._at_work.update(tasks)
            for task in tasks:
                task.add_done_callback(self._at_work.discard)
            await asyncio.wait(tasks, timeout=wait_s)

    async def _started(self, node_id: str, handle: Any) -> ServerInfo:
        """Waits until the server registers, says why it cannot, or dies without a word.

        Ray starts an actor whose ``__init__`` fails again and again: its death alone is no news.
        """
        registered: asyncio.Future[ServerInfo] = asyncio.get_running_loop().create_future()
        self._starts[node_id] = registered
        answers = asyncio.ensure_future(within(START_SERVER_S, handle.ping.remote()))
        try:
            await asyncio.wait({registered, answers}, return_when=asyncio.FIRST_COMPLETED)
            if registered.done():
                return registered.result()
            try:
                answers.result()
            except (RayError, asyncio.TimeoutError) as failure:
                why = self._start_troubles.get(node_id, failure)
                raise errors.ServerUnavailableError(
                    f"The page server did not start: {cause_of(why)}"
                ) from failure
            raise errors.ServerUnavailableError("The page server answers, but did not register.")
        finally:
            answers.cancel()
            registered.cancel()
            del self._starts[node_id]
            self._start_troubles.pop(node_id, None)

    def start_failed(
        self, node_id: str, failure: errors.ClamorError, is_final: bool = True
    ) -> None:
        """Called by a page server that cannot start.

        Args:
            node_id: Its node.
            failure: Why.
            is_final: Otherwise it tries again.
        """
        logger.error("the page server of node %s cannot start: %s", node_id, failure)
        registered = self._starts.get(node_id)
        if registered is None or registered.done():
            return
        if is_final:
            registered.set_exception(failure)
        else:
            self._start_troubles[node_id] = failure

    def is_starting(self, server_id: int) -> bool:
        """Whether a node's page server is being started that would register under this id."""
        return any(self._core.server_id_at(node_id) == server_id for node_id in self._starts)

    def begin(self, node_id: str, directory: str = "") -> tuple[int, bool]:
        """Called by a page server that starts.

        Args:
            node_id: Ray's hex id of its node.
            directory: In a session with a store: the uuid of the directory that it has locked.

        Returns:
            Its id, and whether it has served under it before: then a keeper has what it held. Of a
            store: since that was opened.
        """
        if directory:
            self._take(node_id, directory)
        server_id = self._core.server_id_at(node_id)
        return server_id, isinstance(self._core.locate(server_id), ServerInfo)

    def _take(self, node_id: str, directory: str) -> None:
        """Nobody else has the directory, and the node's page server has no other one: whoever is
        taken for that has ended."""
        before = self._core.server_id_at(node_id)
        handle = self._handles.get(before)
        if self._core.lives.directory_at(node_id) != directory:
            if isinstance(self._core.locate(before), ServerInfo):
                self._liveness.lose(before, ELSEWHERE, is_there=True)
            for server_id in self._core.lives.of_directory(directory):
                if isinstance(self._core.locate(server_id), ServerInfo):
                    self._liveness.lose(server_id, TAKEN)
        self._core.lives.take(node_id, directory)
        if (now := self._core.server_id_at(node_id)) != before and handle is not None:
            self._handles.pop(before, None)
            self._handles[now] = handle

    def renew(self, node_id: str, server_id: int, reason: str, n_old: int = 0) -> int:
        """Called by a page server that has lost what it held: it joins again as another one. What
        it was home of is rebuilt, or said to be lost. Also by one that comes back after it was
        declared lost, and drops what it has.

        Args:
            node_id: Ray's hex id of its node.
            server_id: Its id until now.
            reason: Why it is lost.
            n_old: The old homes that it drops.

        Returns:
            Its id from now on.
        """
        if isinstance(self._core.locate(server_id), ServerInfo):
            self._liveness.lose(server_id, reason, is_there=True)
        elif n_old:
            self.n_dropped += n_old
            logger.warning(
                "page server %#x is back, and was declared lost (%s): it drops %d old homes",
                *(server_id, reason, n_old),
            )
        return self._core.server_id_at(node_id)

    def register(self, info: ServerInfo) -> ServerInfo:
        """Called by a page server when it listens, after every start.

        Returns:
            The same with its epoch.

        Raises:
            VersionMismatchError: It is another build than the driver's.
            ServerUnavailableError: The session has a store, and it does not say which directory it
                has there: it begins again.
            NoSuchServer: It was declared lost, and joins again under another id.
            JournalFullError: It is new, and cannot be written down.
        """
        if info.library_version != self._config.library_version:
            raise errors.VersionMismatchError(
                f"Node {info.node_id} runs clamor-ray {info.library_version}, "
                f"the driver {self._config.library_version}."
            )
        self._core.check_not_lost(info.server_id)
        if not info.directory and info.server_id == self._core.server_id_at(info.node_id):
            info = replace(info, directory=self._core.lives.directory_at(info.node_id))
        if self._config.store and not info.directory:
            raise errors.ServerUnavailableError(
                f"The page server of node {info.node_id} registers without its directory in the "
                "store.",
                hint="The registry has been started again meanwhile: it has to begin again.",
            )
        if not isinstance(self._core.locate(info.server_id), ServerInfo):
            self._save_new_server(info)
        self._returned(info)
        known, orders = self._core.server_registered(info)
        if info.server_id not in self._handles:  # the registry died while it started
            name = names.page_server_name(self._config.job_scope, info.node_id)
            self._handles[info.server_id] = ray.get_actor(name, namespace=names.NAMESPACE)
        self._late.note_server(info.server_id, known)
        self._late.save_changed()
        logger.info("page server %#x registered, epoch %d", info.server_id, known.epoch)
        self._ends.carry_out(orders)
        self._ends.server_here(info.server_id)
        self._here(info.server_id)
        registered = self._starts.get(info.node_id)
        if registered is not None and not registered.done():
            registered.set_result(known)
        return known

    def _save_new_server(self, info: ServerInfo) -> None:
        """A node needs its page server also while the disk is full: that is what is kept for it."""
        try:
            self._journal.save_server(info)
        except errors.JournalFullError:
            if not self._reserve.give():
                raise
            self._journal.save_server(info)

    def server_lost(self, loss: ServerLoss) -> None:
        """Its node gets another one, where it lives."""
        if loss.node_id is not None and not self._background.is_closed:
            self._background.spawn(self._join_again(loss.node_id))

    async def _join_again(self, node_id: str) -> None:
        """A node that lives gets another page server; nobody there asks for one."""
        try:
            if not await asyncio.to_thread(raylet_is_gone, node_id):
                await self.ensure(node_id)
        except (errors.ClamorError, RayError) as failure:  # it is dead, or whoever needs it asks
            logger.warning("node %s does not join again: %r", node_id, failure)

    # -- servers that are silent

    def _here_now(self) -> list[int]:
        known = (info.server_id for info in self._core.servers())
        return [server_id for server_id in known if server_id in self._handles]

    async def _beat(self, server_id: int) -> None:
        """Returns when it has answered. Ray does not try that again: it would say each failure on
        the driver's console."""
        try:
            await self._handles[server_id].ping.options(max_task_retries=0).remote()
        except ActorDiedError:
            info = self._core.locate(server_id)
            if isinstance(info, ServerInfo) and server_id not in self._asked_to_leave:
                await self._liveness.examine(info)
            raise

    async def _look(self, server_id: int) -> None:
        if isinstance(info := self._core.locate(server_id), ServerInfo):
            await self._liveness.look(info)

    # -- servers that leave

    def take_back(self, leaving: Iterable[int]) -> None:
        """After a restart of the registry: the one before may have asked them to end."""
        self._asked_to_leave.update(leaving)

    async def in_use(self, server_id: int) -> int | None:
        """See ``EndsServers.in_use``."""
        if server_id in self._asked_to_leave:
            return 0  # it says when it is asked to leave
        return await self._in_use(server_id, False)

    async def used(self, server_id: int) -> int | None:
        """The same, homes not counted."""
        return await self._in_use(server_id, True)

    async def _in_use(self, server_id: int, but_homes: bool) -> int | None:
        if (handle := self._handles.get(server_id)) is None:
            return None
        try:
            in_use: int = await within(CALL_S, handle.in_use.remote(but_homes))
            return in_use
        except ActorDiedError as failure:
            self._liveness.actor_died(server_id, failure)
        except (RayError, asyncio.TimeoutError) as failure:
            logger.info("page server %#x does not say what is in use: %r", server_id, failure)
            if isinstance(info := self._core.locate(server_id), ServerInfo):
                await self._liveness.examine(info)  # its node may be dead: nobody else may ask
        return None

    def asked_to_leave(self) -> set[int]:
        """See ``EndsServers.asked_to_leave``."""
        return set(self._asked_to_leave)

    async def leave(self, server_id: int, may_leave: Callable[[], bool]) -> bool:
        """See ``EndsServers.leave``. Where the answer is lost, the server may have ended: it is
        asked until it says so, or says that it goes on. Its node gets no other one before."""
        info = self._core.locate(server_id)
        handle = self._handles.get(server_id)
        if not isinstance(info, ServerInfo) or handle is None:
            return False
        node_id = info.node_id
        async with self._starting.setdefault(node_id, asyncio.Lock()):
            await self._journal.synced()  # who has its homes now is known after a power cut, too
            if not may_leave() and server_id not in self._asked_to_leave:
                return False
            self._ending.add(node_id)
            self._asked_to_leave.add(server_id)
            try:
                ended: int = await within(LEAVE_S, handle.leave.remote())
            except ActorDiedError as failure:
                self._liveness.actor_died(server_id, failure)
                return False
            except (RayError, asyncio.TimeoutError) as failure:
                logger.warning("page server %#x does not say if it ends: %r", server_id, failure)
                return False
            finally:
                self._ending.discard(node_id)
            self._asked_to_leave.discard(server_id)
            if not ended:
                return False
            for each in {server_id, ended}:  # another one where it was restarted meanwhile
                self._liveness.lose(each, LEFT, is_there=True)
            self._late.save_changed()
            with contextlib.suppress(RayError, ValueError):
                ray.kill(handle)
            await asyncio.to_thread(_until_forgotten, self._config.job_scope, node_id)
            return True

    # -- servers that are full

    async def room(self, server_id: int) -> NodeRoom | None:
        """See ``PageServer.room``; None: it does not answer soon."""
        if (handle := self._handles.get(server_id)) is None:
            return None
        try:
            room: NodeRoom = await within(ROOM_S, handle.room.remote())
            return room
        except (RayError, asyncio.TimeoutError) as failure:
            logger.info("page server %#x does not say what room it has: %r", server_id, failure)
            return None

    # -- all of them

    async def reports(
        self, timeout_s: float, is_leaving: Callable[[int], bool] = lambda server_id: False
    ) -> tuple[ServerReport, ...]:
        """Their counters; one that does not answer in time says why in ``error``."""

        async def ask(info: ServerInfo) -> ServerReport:
            handle = self._handles.get(info.server_id)
            if handle is None:
                return ServerReport(info, error="it is gone, or not here yet")
            try:
                report: ServerReport = await within(timeout_s, handle.stats.remote())
                return replace(report, leaving=is_leaving(info.server_id))
            except (RayError, asyncio.TimeoutError) as failure:
                return ServerReport(info, error=cause_of(failure))

        return tuple(await asyncio.gather(*(ask(info) for info in self._core.servers())))

    async def histograms(
        self, region: int, which: int, n_buckets: int, timeout_s: float
    ) -> dict[str, list[int]]:
        """What ``PageServer.histogram`` answers, by node id; without those that know nothing, or
        do not answer in time."""

        async def ask(info: ServerInfo) -> list[int]:
            try:
                handle = self._handles[info.server_id]
                answer = handle.histogram.remote(region, which, n_buckets)
                counts: list[int] = await within(timeout_s, answer)
                return counts
            except (RayError, asyncio.TimeoutError, KeyError):
                return []

        servers = self._core.servers()
        found = await asyncio.gather(*(ask(info) for info in servers))
        return {info.node_id: counts for info, counts in zip(servers, found, strict=True) if counts}

    async def stop_all(self) -> None:
        """Stops each, and its keeper."""
        handles = list(self._handles.values())
        self._handles.clear()
        await asyncio.gather(*(_stop(handle) for handle in handles))
        for info in self._core.servers():
            self._core.server_lost(info.server_id, "the session was shut down")


def _until_forgotten(job_scope: str, node_id: str) -> None:
    """The next page server of the node has the same name: it must not be taken for this one."""
    deadline = time.monotonic() + NAME_S
    while time.monotonic() < deadline:
        try:
            ray.get_actor(names.page_server_name(job_scope, node_id), namespace=names.NAMESPACE)
        except ValueError:
            return
        time.sleep(0.02)
    logger.warning("Ray has not ended the page server of node %s within %g s", node_id, NAME_S)


async def _stop(handle: Any) -> None:
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
