"""The registry's methods about page servers: how one starts, where it is, and when it is lost."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterable
from typing import Any

import ray
from ray.exceptions import ActorDiedError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from clamor_ray import errors
from clamor_ray._protocol import names
from clamor_ray._protocol.cause import cause_of
from clamor_ray._protocol.messages import (
    LocateAnswer,
    ServerConfig,
    ServerInfo,
    ServerLost,
    ServerRestarting,
)
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.lineage.lineage_service import LineageService
from clamor_ray.actors.page_server.page_server import PageServer
from clamor_ray.actors.process.journal_watcher import Reserve
from clamor_ray.actors.recovery.rebuilds import Rebuilds
from clamor_ray.actors.registry.ray_nodes import PING_S, alive_nodes, raylet_is_gone, within
from clamor_ray.actors.registry.registry_core import RegistryCore, Retire
from clamor_ray.actors.registry.retiring import Retiring

logger = logging.getLogger("clamor_ray.registry")

START_SERVER_S = 55.0  # less than a call to the registry has: its caller is told why
CALL_S = 10.0
WATCH_MOST_S = 30.0
RENEWED = "it has joined again as another one, without what it held"


def page_server_name(job_scope: str, node_id: str) -> str:
    """The actor name of a node's page server."""
    return f"page-server-{job_scope}-{node_id[:16]}"


class ServerMethods:
    """See the file's head. ``Registry`` makes what they use, and carries out what they order."""

    _config: ServerConfig
    _core: RegistryCore
    _handles: dict[int, Any]
    _journal: Journal
    _reserve: Reserve
    _lineage: LineageService
    _log: CommitLog
    _rebuilds: Rebuilds
    _retiring: Retiring
    _secret: bytes
    _start_troubles: dict[str, errors.ClamorError]
    _starting: dict[str, asyncio.Lock]
    _starts: dict[str, asyncio.Future[ServerInfo]]
    _stopped: bool
    _unsaved_servers: dict[int, ServerInfo | ServerLost]

    def _carry_out(self, orders: Iterable[Retire]) -> None:
        raise NotImplementedError

    def _save_changed(self) -> None:
        raise NotImplementedError

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        raise NotImplementedError

    def _find_again(self, info: ServerInfo) -> None:
        name = page_server_name(self._config.job_scope, info.node_id)
        try:
            self._handles[info.server_id] = ray.get_actor(name, namespace=names.NAMESPACE)
        except ValueError:
            self._lose(info.server_id, "its actor ended while the registry was down")
            return
        self._spawn(self._greet(info.server_id))

    async def _greet(self, server_id: int) -> None:
        """Asks a page server what only it knows: its port, if it was restarted."""
        pause_s = PING_S
        while (handle := self._handles.get(server_id)) is not None:
            try:
                info = await within(CALL_S, handle.hello.remote())
            except ActorDiedError as failure:
                self._lose(server_id, f"its actor is dead: {cause_of(failure)}")
            except (RayError, asyncio.TimeoutError) as failure:
                logger.warning("page server %#x does not answer yet: %r", server_id, failure)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, WATCH_MOST_S)
            else:
                known = self._core.locate(server_id)
                if info.server_id != server_id:
                    self._lose(server_id, RENEWED, is_there=True)
                    return
                if isinstance(known, ServerInfo) and known.epoch <= info.epoch != known:
                    self._core.server_moved(info)
                self._lineage.server_here(server_id)
                return

    async def secret(self) -> bytes:
        """What page servers prove to each other that they know."""
        return self._secret

    async def ensure_server(self, node_id: str) -> ServerInfo:
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
            if self._stopped:
                raise errors.ClosedError("The session was shut down.")
            if node_id not in await asyncio.to_thread(alive_nodes):
                raise errors.ServerUnavailableError(f"The node {node_id} is not alive.")
            handle = (
                ray.remote(PageServer)
                .options(
                    name=page_server_name(self._config.job_scope, node_id),
                    namespace=names.NAMESPACE,
                    get_if_exists=True,
                    lifetime="detached",
                    num_cpus=0,
                    max_restarts=-1,
                    max_task_retries=-1,
                    max_concurrency=32,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
                )
                .remote(ray.get_runtime_context().current_actor, self._config, node_id)
            )
            self._handles[server_id] = handle
            try:
                return await self._started(node_id, handle)
            except errors.ClamorError:
                self._handles.pop(server_id, None)
                with contextlib.suppress(RayError, ValueError):
                    ray.kill(handle)
                raise

    async def _started(self, node_id: str, handle: Any) -> ServerInfo:
        """Waits until the server registers, says why it cannot, or dies without a word.

        Ray starts an actor whose ``__init__`` fails again and again: its death alone is no news.
        """
        said: asyncio.Future[ServerInfo] = asyncio.get_running_loop().create_future()
        self._starts[node_id] = said
        answers = asyncio.ensure_future(within(START_SERVER_S, handle.ping.remote()))
        try:
            await asyncio.wait({said, answers}, return_when=asyncio.FIRST_COMPLETED)
            if said.done():
                return said.result()
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
            said.cancel()
            del self._starts[node_id]
            self._start_troubles.pop(node_id, None)

    async def start_failed(
        self, node_id: str, failure: errors.ClamorError, is_final: bool = True
    ) -> None:
        """Called by a page server that cannot start.

        Args:
            node_id: Its node.
            failure: Why.
            is_final: Otherwise it tries again.
        """
        logger.error("the page server of node %s cannot start: %s", node_id, failure)
        said = self._starts.get(node_id)
        if said is None or said.done():
            return
        if is_final:
            said.set_exception(failure)
        else:
            self._start_troubles[node_id] = failure

    async def begin_server(self, node_id: str) -> tuple[int, bool]:
        """Called by a page server that starts.

        Returns:
            Its id, and whether it has served under it before: then a keeper has what it held.
        """
        server_id = self._core.server_id_at(node_id)
        return server_id, isinstance(self._core.locate(server_id), ServerInfo)

    async def renew_server(self, node_id: str, server_id: int, reason: str) -> int:
        """Called by a page server that has lost what it held: it joins again as another one. What
        it was home of is rebuilt, or said to be lost.

        Returns:
            Its id from now on.
        """
        if isinstance(self._core.locate(server_id), ServerInfo):
            self._lose(server_id, reason, is_there=True)
        return self._core.server_id_at(node_id)

    async def register_server(self, info: ServerInfo) -> ServerInfo:
        """Called by a page server when it listens, after every start.

        Returns:
            The same with its epoch.

        Raises:
            VersionMismatchError: It is another build than the driver's.
            NoSuchServer: It was declared lost, and joins again under another id.
            JournalFullError: It is new, and cannot be written down.
        """
        if info.library_version != self._config.library_version:
            raise errors.VersionMismatchError(
                f"Node {info.node_id} runs clamor-ray {info.library_version}, "
                f"the driver {self._config.library_version}."
            )
        self._core.check_not_lost(info.server_id)
        if not isinstance(self._core.locate(info.server_id), ServerInfo):
            self._save_new_server(info)
        known, orders = self._core.server_registered(info)
        if info.server_id not in self._handles:  # the registry died while it started
            name = page_server_name(self._config.job_scope, info.node_id)
            self._handles[info.server_id] = ray.get_actor(name, namespace=names.NAMESPACE)
        self._unsaved_servers[info.server_id] = known
        self._save_changed()
        logger.info("page server %#x registered, epoch %d", info.server_id, known.epoch)
        self._carry_out(orders)
        self._retiring.server_here(info.server_id)
        self._lineage.server_here(info.server_id)
        said = self._starts.get(info.node_id)
        if said is not None and not said.done():
            said.set_result(known)
        return known

    def _save_new_server(self, info: ServerInfo) -> None:
        """A node needs its page server also while the disk is full: that is what is kept for it."""
        try:
            self._journal.save_server(info)
        except errors.JournalFullError:
            if not self._reserve.give():
                raise
            self._journal.save_server(info)

    async def locate(self, server_id: int, since_epoch: int = 0) -> LocateAnswer:
        """Where a page server is.

        Args:
            server_id: The server.
            since_epoch: The epoch under which the caller could not reach it, or 0. If it has not
                registered again since, Ray is asked what became of it.
        """
        answer = self._core.locate(server_id)
        if not isinstance(answer, ServerInfo) or answer.epoch > since_epoch:
            return answer
        return await self._examine(answer)

    async def _examine(self, info: ServerInfo) -> LocateAnswer:
        if info.node_id not in await asyncio.to_thread(alive_nodes):
            return self._lose(info.server_id, f"its node {info.node_id} is dead")
        try:
            await within(PING_S, self._handles[info.server_id].ping.remote())
        except ActorDiedError as failure:
            return self._lose(info.server_id, f"its actor is dead: {cause_of(failure)}")
        except (RayError, asyncio.TimeoutError):
            if await asyncio.to_thread(raylet_is_gone, info.node_id):
                return self._lose(info.server_id, f"the raylet of its node {info.node_id} is gone")
            return ServerRestarting(info.server_id)
        return self._core.locate(info.server_id)

    def _lose(self, server_id: int, reason: str, is_there: bool = False) -> LocateAnswer:
        """It is gone for good, with what it held. Its node may join again, under another id.

        Args:
            server_id: The server.
            reason: Why.
            is_there: The node has joined again already, or is about to.
        """
        logger.error("page server %#x is lost: %s", server_id, reason)
        info = self._core.locate(server_id)
        if isinstance(info, ServerInfo) and not is_there and not self._stopped:
            self._spawn(self._join_again(info.node_id))
        self._handles.pop(server_id, None)
        self._retiring.server_lost(server_id)
        orders = self._core.server_lost(server_id, reason)
        self._log.server_lost(server_id)
        self._rebuilds.server_lost(server_id)
        lost = ServerLost(server_id, reason)
        self._unsaved_servers[server_id] = lost
        self._carry_out(orders)
        return lost

    async def _join_again(self, node_id: str) -> None:
        """A node that lives gets another page server; nobody there asks for one."""
        try:
            if not await asyncio.to_thread(raylet_is_gone, node_id):
                await self.ensure_server(node_id)
        except (errors.ClamorError, RayError) as failure:  # it is dead, or whoever needs it asks
            logger.warning("node %s does not join again: %r", node_id, failure)
