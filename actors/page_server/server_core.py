"""A page server without Ray: the data port, the peers, and the engine's questions.

The engine (C threads) serves faults and pages. What it cannot decide it asks here, through its
event descriptor: where a region lives, how to reach a peer. This file answers with the help of a
``Resolver``, which in production is the registry and in tests a dictionary.

Everything runs on one asyncio loop. Sockets are plain non-blocking ones, so that a connection that
has passed the handshake is handed to the engine as a bare descriptor, with nothing of it buffered
here. An idle server has no timer and wakes up for nothing.

What always holds:
* at most one task per peer and one per region looks for it;
* a connection is owned by exactly one side: by us until ``serve`` or ``add_peer``, by the engine
  from that call on;
* every question of the engine gets one answer, at the latest when its deadline is over;
* at most ``max_unauthenticated`` connections have not passed, each for at most 5 seconds, and who
  comes later is taken all the same: ``admission`` says who goes for it.

Thread safety: all methods belong to the loop's thread, but for ``counters``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

from clamor_ray._protocol.cause import cause_of
from clamor_ray._protocol.handshake import (
    ACCEPT_BYTES,
    CHALLENGE_BYTES,
    HELLO_BYTES,
    PROOF_BYTES,
    ClientHandshake,
    HandshakeError,
    Hello,
    Refusal,
    ServerHandshake,
)
from clamor_ray._protocol.messages import (
    ConnectionCounters,
    RegionRecord,
    ServerInfo,
    ServerLost,
    has_left,
)
from clamor_ray.actors.lost_homes.task_end_log import TaskEnd
from clamor_ray.actors.page_server.admission import ATTENDED_PARTS, Attended, Stranger, Strangers
from clamor_ray.actors.page_server.engine_like import (
    DEFAULTS,
    Answer,
    EngineLike,
    EventKind,
    Resolver,
    Settings,
    Tries,
)
from clamor_ray.actors.page_server.news import Drop, Keep, NewsServer
from clamor_ray.actors.page_server.version_questions import VersionQuestions
from clamor_ray.actors.process.background import BackgroundTasks
from clamor_ray.errors import ClamorError, FreedError, HomeLostError

logger = logging.getLogger("clamor_ray.page_server")

MAX_TOLD_IDLE = 65536
IDLE_BATCH_S = 0.1  # longer than the registry takes to order what a process has freed
IDLE_MOST = 1024  # regions a call
BACKLOG = 1024  # of a crowd, where this process gets its time, handled in less than handshake_s
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)  # a shortage of ours
FINAL = (Answer.HOME_LOST, Answer.EXPIRED, Answer.FILE_CHANGED)  # as who tries again gets


def _note(regions: dict[int, None], region: int) -> None:
    """The newest last, and not more than ``MAX_TOLD_IDLE``."""
    regions[region] = None
    if len(regions) > MAX_TOLD_IDLE:
        del regions[next(iter(regions))]


class ServerCore:
    """Accepts, connects and answers, until ``close``.

    Args:
        engine: Owns every connection that has passed.
        resolver: Answers for the engine.
        server_id: This server.
        secret: The job's 32 secret bytes.
        settings: Deadlines and bounds.
        keeper_lost: Called when the keeper has died, and again where it raises; it must not wait.
        file_wanted: Called for each range of a file that is to be read; it must not wait.
        durable_wanted: Called with region, commit id and version of a layer that is to be in a
            synced file before it is applied; it must not wait. Answered by the engine's
            ``layer_durable``; what is not answered is asked again. None: the engine does not ask.
        keeps: ``keep`` and ``drop`` of ``NewsServer``, where layers are on a disk.
    """

    def __init__(
        self,
        engine: EngineLike,
        resolver: Resolver,
        *,
        server_id: int,
        secret: bytes,
        settings: Settings = DEFAULTS,
        keeper_lost: Callable[[], None] = lambda: None,
        file_wanted: Callable[[], None] = lambda: None,
        durable_wanted: Callable[[int, int, int], None] | None = None,
        keeps: tuple[Keep, Drop] | tuple[()] = (),
    ) -> None:
        self._engine = engine
        self._keeper_lost = keeper_lost
        self._file_wanted = file_wanted
        self._durable_wanted = durable_wanted
        self._resolver = resolver
        self._server_id = server_id
        self._secret = secret
        self._background = BackgroundTasks(logger)
        self.versions = VersionQuestions(
            engine, resolver, server_id, settings, self._background.spawn, self._define
        )
        self._news = NewsServer(resolver.newer, self._background.spawn, *keeps)
        self._settings = settings
        self._listener: socket.socket | None = None
        self._event_fd = -1
        self._finding_peer: set[int] = set()
        self._finding_region: set[int] = set()
        self._finding_home: set[int] = set()
        self._retired_meanwhile: set[int] = set()
        self._told_idle: dict[int, None] = {}  # the oldest first
        self._dropped: dict[int, None] = {}  # the same, of those that went with force
        self._idle: dict[int, None] = {}  # to be told
        self._saying_idle = False
        self._retiring = 0  # whose idleness is told by the answer, and not in a call of its own
        self._attended = Attended(settings.undisturbed_s / ATTENDED_PARTS)
        self._strangers = Strangers(
            settings.max_unauthenticated,
            settings.max_unauthenticated_of_address,
            settings.undisturbed_s,
        )
        self._accepted = 0
        self._peers_connected = 0
        self._peers_lost = 0
        self._refused: Counter[str] = Counter()
        self._thrashing = 0

    def __repr__(self) -> str:
        where = self._listener.getsockname() if self._listener else "closed"
        return f"<ServerCore {self._server_id:#x} at {where}>"

    async def start(self, host: str, port: int = 0, news_socket: str = "") -> int:
        """Listens on the node's address and answers the engine from now on.

        Args:
            host: The address that peers use; never a wildcard.
            port: 0 for any.
            news_socket: Where processes of this node hear of versions; "": nowhere.

        Returns:
            The port.
        """
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind((host, port))
            listener.listen(BACKLOG)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        self._event_fd = self._engine.fileno()
        loop.add_reader(self._event_fd, self._drain)
        self._background.spawn(self._accept_for_ever(listener))
        self._drain()
        if news_socket:
            await self._news.start(news_socket)
        return int(listener.getsockname()[1])

    async def close(self) -> None:
        """Stops listening and answering; connections that the engine owns stay."""
        if self._event_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._event_fd)
            self._event_fd = -1
        await self._background.end()
        self._news.close()
        self._strangers.close()  # of tasks that had not begun
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def counters(self) -> ConnectionCounters:
        """What came to the port so far. Any thread."""
        return ConnectionCounters(
            accepted=self._accepted,
            peers_connected=self._peers_connected,
            peers_lost=self._peers_lost,
            unauthenticated_now=len(self._strangers),
            refused=tuple(sorted(self._refused.copy().items())),
        )

    @property
    def thrashing(self) -> int:
        """How often the engine has said that its budget is too small. Any thread."""
        return self._thrashing

    @property
    def n_watching(self) -> int:
        """Processes of the node that watch variables. Any thread."""
        return self._news.n_watching

    def retire(self, region: int, force: bool, record: RegionRecord | None = None) -> bool:
        """The region is freed. An answer about it that is still on its way is not used any more:
        otherwise a lease could begin after this server was counted as idle.

        Args:
            region: Its id.
            force: It goes now.
            record: Told to the engine first, so that after a restart those who had a lease get
                it back, and blocks that are absent are found.

        Returns:
            Whether leases may be left: not where the engine has said so before, which it does
            once (and a restarted registry may have forgotten).

        Raises:
            What the engine raises, for a region that it does not know, too.
        """
        if region in self._finding_region:
            self._retired_meanwhile.add(region)
        self._drain()  # it may have said already that the region is idle
        if not force and region in self._told_idle:  # whoever freed it has told the engine
            self._idle.pop(region, None)  # the answer says so
            return False
        if record is not None:
            # Refused where it is retired already, or its home is lost: it ends all the same.
            with contextlib.suppress(ClamorError):
                self._define(record)
        self._retiring = region
        try:
            self._engine.retire(region, force=force)
            if not force:
                self._drain()
        finally:
            self._retiring = 0
        if force:
            self._told_idle.pop(region, None)
            _note(self._dropped, region)
        elif region in self._told_idle:  # the answer says so
            self._idle.pop(region, None)
        return region not in self._told_idle

    def _define(self, record: RegionRecord) -> None:
        self._engine.define_region(
            record.region,
            record.version,
            record.base_address,
            record.length_bytes,
            record.homes,
            record.loss,
            record.term,
            record.has_repair,
            record.in_file,
        )

    # -- the engine's questions

    def _drain(self) -> None:
        while (event := self._engine.next_event()) is not None:
            kind = event.kind
            if kind == EventKind.NEED_PEER:
                if event.server_id not in self._finding_peer:
                    self._finding_peer.add(event.server_id)
                    self._background.spawn(self._find_peer(event.server_id))
            elif kind == EventKind.NEED_REGION:
                if event.region not in self._finding_region:
                    self._finding_region.add(event.region)
                    self._background.spawn(self._find_region(event.region))
            elif kind == EventKind.REGION_IDLE:
                _note(self._told_idle, event.region)
                if event.region != self._retiring:
                    self._idle[event.region] = None
                    if not self._saying_idle:
                        self._saying_idle = True
                        self._background.spawn(self._say_idle())
            elif self.versions.take(event):
                pass
            elif kind == EventKind.NEED_HOME:
                if event.region not in self._finding_home:
                    self._finding_home.add(event.region)
                    self._background.spawn(self._find_home(event.region, event.server_id))
            elif kind == EventKind.KEEPER_LOST:
                self._background.spawn(self._say_keeper_lost())
            elif kind == EventKind.TASK_ENDED:
                if event.error in FINAL:  # else the next attempt may get it
                    end = TaskEnd(event.region, event.version, event.block, event.error)
                    self._background.spawn(self._report_end(event.text, end))
            elif kind == EventKind.NEED_FILE:
                self._file_wanted()
            elif kind == EventKind.NEED_DURABLE and self._durable_wanted is not None:
                self._durable_wanted(event.region, event.commit_id, event.version)
            elif kind == EventKind.LOG:
                logger.warning("%s", event.text)
            elif kind == EventKind.THRASHING:
                self._thrash(event.text)
            else:
                logger.warning("the engine reports an unknown event %d", kind)

    def _thrash(self, text: str) -> None:
        self._thrashing += 1
        if self._thrashing == 1:  # the rest is counted: it may go on for hours
            logger.warning(
                "the cache of this node is too small for what its tasks use at once: %s. Give it "
                "more (CLAMOR_CACHE_BYTES, clamor.init(cache_bytes=...)), or run fewer tasks or "
                "smaller parts at a time; clamor.stats().thrashing counts it",
                text,
            )

    async def _say_keeper_lost(self) -> None:
        """Until somebody sees to it: the engine says it once."""
        pause_s = self._settings.backoff_first_s
        while True:
            try:
                return self._keeper_lost()
            except Exception as failure:  # any: there is no thread for it, say
                logger.error("a keeper cannot be started yet: %r", failure)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._settings.backoff_most_s)

    async def _find_region(self, region: int) -> None:
        error: int = Answer.TIMEOUT
        try:
            for_this_long = Tries(self._settings)
            while True:
                try:
                    answer = await asyncio.wait_for(
                        self._resolver.lookup(region), self._settings.answer_s
                    )
                except Exception as failure:  # any: the resolver's promise is to be asked again
                    logger.warning("cannot look up variable %d: %r", region, failure)
                    if not await for_this_long.pause():
                        break
                    continue
                if isinstance(answer, RegionRecord) and not self._is_over(region, answer):
                    try:
                        self._define(answer)
                        if answer.freed:  # no await between: only old leases come back
                            self._engine.retire(region, force=False)
                    except HomeLostError as failure:  # we should have it, and do not
                        logger.error("variable %d: %s", region, failure)
                        if error := await self._what_became_of(region):
                            break
                        error = Answer.TIMEOUT
                        if not await for_this_long.pause():
                            break
                        continue
                    except ClamorError as failure:  # the engine has told whoever waits
                        logger.warning("variable %d cannot be used here: %s", region, failure)
                    return
                error = Answer.NO_REGION
                break
            with contextlib.suppress(FreedError):  # it is gone, and nobody waits for it
                self._engine.refuse_region(region, error)
        finally:
            self._finding_region.discard(region)
            self._retired_meanwhile.discard(region)

    async def _what_became_of(self, region: int) -> int:
        """The registry has this server as the region's home, and nothing of it is here: only the
        registry says what that means.

        Returns:
            The code for who opens it; 0: it has no word yet, or another home: look it up again.
        """
        try:
            call = self._resolver.rehomed(region, self._server_id)
            await asyncio.wait_for(call, self._settings.answer_s)
        except HomeLostError as failure:
            logger.error("variable %d has lost its home: %s", region, failure)
            return Answer.HOME_LOST
        except FreedError:
            return Answer.NO_REGION
        except Exception as failure:  # any: the resolver's promise is to be asked again
            logger.warning("cannot learn of variable %d's new home: %r", region, failure)
        return 0

    def _is_over(self, region: int, answer: RegionRecord) -> bool:
        """It was freed while the answer was on its way; or before, and the registry, which says so,
        has not heard yet that nothing of it is left here."""
        if region in self._retired_meanwhile:
            return True
        return answer.freed and (region in self._told_idle or region in self._dropped)

    async def _say_idle(self) -> None:
        """All of a moment in one call. What a process has freed here is mostly not among them: the
        registry's order comes first, and its answer says so."""
        try:
            while self._idle:
                await asyncio.sleep(IDLE_BATCH_S)
                await self._report_idle(list(self._idle)[:IDLE_MOST])
        finally:
            self._saying_idle = False

    async def _report_idle(self, regions: list[int]) -> None:
        for_this_long = Tries(self._settings)
        while regions:
            try:
                call = self._resolver.regions_idle(regions)
                await asyncio.wait_for(call, self._settings.answer_s)
                break
            except Exception as failure:  # any: the resolver's promise is to be asked again
                if not await for_this_long.pause():
                    # Their addresses stay taken until the job ends; nothing else suffers.
                    logger.error("cannot report variables %s as idle: %r", regions, failure)
                    break
        for region in regions:
            self._idle.pop(region, None)

    async def _report_end(self, task: str, end: TaskEnd) -> None:
        for_this_long = Tries(self._settings)
        while True:
            try:
                await asyncio.wait_for(
                    self._resolver.task_ended(task, end), self._settings.answer_s
                )
                return
            except Exception as failure:  # any: the resolver's promise is to be asked again
                if not await for_this_long.pause():
                    logger.warning("nobody hears why task %s ended (%s): %r", task, end, failure)
                    return

    async def _find_peer(self, server_id: int) -> None:
        connecting: asyncio.Task[list[socket.socket]] | None = None
        try:
            for_this_long = Tries(self._settings)
            now = asyncio.get_running_loop().time
            began_s = now()
            short_since_s: float | None = None  # of descriptors
            tried_epoch = 0
            while True:
                answered = Answer.TIMEOUT  # without an answer nothing is lost
                try:
                    if not _is_connected(connecting):
                        answer = await asyncio.wait_for(
                            self._resolver.locate(server_id, tried_epoch), self._settings.answer_s
                        )
                        if isinstance(answer, ServerLost):
                            self._lose(server_id, answer.reason)
                            return
                        if isinstance(answer, ServerInfo):
                            if connecting is not None and answer.epoch != tried_epoch:
                                await _end(connecting)
                                connecting = None
                            tried_epoch = answer.epoch
                            if connecting is None:
                                connecting = asyncio.ensure_future(self._connect(answer))
                    last = "it is restarting, or is stopped"
                    # Who dials anew begins at the end of the queue again: it is only asked about.
                    if connecting is not None:
                        await asyncio.wait({connecting}, timeout=self._settings.handshake_s)
                        if not connecting.done():
                            raise asyncio.TimeoutError
                        done, connecting = connecting, None
                        self._join(server_id, done.result())
                        return
                except asyncio.TimeoutError:
                    last = "it does not answer (a process that is stopped, or a full queue)"
                except OSError as failure:
                    if failure.errno == errno.EMFILE:
                        answered = Answer.DESCRIPTORS  # ours: it says nothing of the peer
                    last = cause_of(failure)
                except Exception as failure:  # any: the resolver's promise is to be asked again
                    last = cause_of(failure)
                if _is_connected(connecting):
                    continue  # while the registry was asked about it
                for_s = now() - began_s
                self._engine.peer_unreached(server_id, for_s, last)
                if answered is not Answer.DESCRIPTORS:
                    short_since_s = None
                elif short_since_s is None:
                    short_since_s = now()
                short_for_s = 0.0 if short_since_s is None else now() - short_since_s
                is_short = short_for_s > self._settings.descriptors_s
                if is_short or not await for_this_long.pause():
                    if connecting is not None:
                        await _end(connecting)
                    # No await from here on: the engine asks again at once, and finds nobody at it.
                    self._give_up(server_id, for_s, last, answered)
                    return
        finally:
            self._finding_peer.discard(server_id)
            if connecting is not None:
                await _end(connecting)

    async def _find_home(self, region: int, home_id: int) -> None:
        """Until the region has a home that may have it, or never will.

        Args:
            region: Its id.
            home_id: Its home as the engine knows it, which is lost, or does not know the region.
        """
        error: int = Answer.TIMEOUT  # without an answer nothing is lost
        asked_about = home_id
        now = asyncio.get_running_loop().time
        deadline = now() + self._settings.rebuild_s
        again_s = self._settings.backoff_first_s  # twice as long each time that it is not known yet
        try:
            while now() < deadline:
                pause_s = again_s
                again_s = min(2 * again_s, self._settings.backoff_most_s)
                try:
                    call = self._resolver.rehomed(region, asked_about)
                    record = await asyncio.wait_for(call, self._settings.answer_s)
                except HomeLostError as failure:
                    logger.error("variable %d has lost its home: %s", region, failure)
                    error = Answer.HOME_LOST
                    if failure.is_verdict:
                        self.region_lost(region)
                    break
                except FreedError:
                    error = Answer.NO_REGION
                    break
                except Exception as failure:  # any: the resolver's promise is to be asked again
                    logger.warning("cannot learn of variable %d's new home: %r", region, failure)
                    record, pause_s = None, self._settings.backoff_most_s
                try:
                    if record is not None:
                        self.rehome(record)
                        return  # no await before the end: a question that is put now finds no task
                except HomeLostError as failure:  # we are it, and have nothing: what became of it?
                    logger.error("variable %d: %s", region, failure)
                    asked_about, pause_s = self._server_id, self._settings.backoff_most_s
                except ClamorError as failure:
                    logger.error("variable %d cannot be used at its new home: %s", region, failure)
                    error = failure.code or Answer.TIMEOUT
                    break
                await asyncio.sleep(pause_s)
        finally:
            self._finding_home.discard(region)
        # No await from here on, as above.
        with contextlib.suppress(FreedError):  # it is gone, and so is who waits
            self._engine.home_lost(region, home_id, error)

    def region_lost(self, region: int) -> None:
        """Blocks of it are nowhere: who opens it here is told, before it touches them."""
        with contextlib.suppress(FreedError):  # nobody has used it here
            self._engine.region_lost(region, Answer.HOME_LOST)

    def rehome(self, record: RegionRecord) -> None:
        """The region has other homes than this server may have been told; maybe itself.

        Raises:
            HomeLostError: This server is one, and has nothing of it.
        """
        if self._server_id in record.homes:
            self._define(record)
        with contextlib.suppress(FreedError):  # nobody has used it here
            self._engine.region_lacks(record.region, record.loss)
            self._engine.region_has_repair(record.region, record.has_repair)
            self._engine.set_homes(record.region, record.homes, record.term)

    def _give_up(self, server_id: int, for_s: float, cause: str, answered: Answer) -> None:
        """It is not lost: that is for the registry to say. Who waits for it waits on."""
        logger.warning("page server %#x is not reached for %.0f s: %s", server_id, for_s, cause)
        self._engine.peer_lost(server_id, answered)

    def _lose(self, server_id: int, reason: str) -> None:
        self._peers_lost += 1
        level = logging.INFO if has_left(reason) else logging.ERROR
        logger.log(level, "page server %#x is lost: %s", server_id, reason)
        self._engine.peer_lost(server_id, Answer.HOME_LOST)

    def _join(self, server_id: int, lanes: list[socket.socket]) -> None:
        """No await until nobody looks for it: a lane may die at once, and is asked about then."""
        for lane, sock in enumerate(lanes):
            self._engine.add_peer(server_id, lane, sock.detach())
        self._peers_connected += 1

    async def _connect(self, info: ServerInfo) -> list[socket.socket]:
        """All lanes or none: a peer with half its lanes would look reachable and be slow."""
        lanes = self._engine.peer_lanes
        outcomes = await asyncio.gather(
            *(self._connect_lane(info, lane) for lane in range(lanes)), return_exceptions=True
        )
        ready = [outcome for outcome in outcomes if isinstance(outcome, socket.socket)]
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if failures:
            for sock in ready:
                sock.close()
            raise failures[0]
        return ready

    async def _connect_lane(self, info: ServerInfo, lane: int) -> socket.socket:
        loop = asyncio.get_running_loop()
        family = socket.AF_INET6 if ":" in info.host else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            sock.setblocking(False)
            await asyncio.wait_for(
                loop.sock_connect(sock, (info.host, info.port)), self._settings.answer_s
            )
            _tune(sock)
            hello = Hello(client_id=self._server_id, server_id=info.server_id, lane=lane)
            await self._say_hello(sock, hello)
            return sock
        except BaseException:
            sock.close()
            raise

    async def _say_hello(self, sock: socket.socket, hello: Hello) -> None:
        loop = asyncio.get_running_loop()
        handshake = ClientHandshake(self._secret, hello)
        await loop.sock_sendall(sock, handshake.hello)
        # Until it has been taken from the other side's queue: as long as whoever looks for it does.
        proof = handshake.prove(await _receive(sock, CHALLENGE_BYTES))
        await loop.sock_sendall(sock, proof)
        accept = await asyncio.wait_for(_receive(sock, ACCEPT_BYTES), self._settings.handshake_s)
        handshake.finish(accept)

    # -- the data port

    async def _accept_for_ever(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as failure:
                if failure.errno in (errno.EBADF, errno.EINVAL):
                    return
                if failure.errno not in NO_ROOM:
                    await asyncio.sleep(0)
                    continue  # this one connection has failed
                if self._strangers.make_room():
                    await asyncio.sleep(self._settings.backoff_first_s)  # its task closes it
                    continue
                # The backlog keeps the others waiting meanwhile.
                logger.error("cannot accept on the data port: %s", failure)
                await asyncio.sleep(self._settings.backoff_most_s)
                continue
            self._accepted += 1
            clock, host = self._attended, address[0]
            while True:
                wait_s = self._strangers.wait_s(host, clock.now_s(loop.time()))
                if wait_s <= 0:
                    break
                await asyncio.sleep(min(wait_s, clock.most_s))  # nobody else comes in meanwhile
            stranger = self._strangers.take(sock, host, clock.now_s(loop.time()))
            self._background.spawn(self._admit(stranger, address))

    async def _admit(self, stranger: Stranger, address: Any) -> None:
        sock = stranger.sock
        try:
            sock.setblocking(False)
            _tune(sock)
            peer = await asyncio.wait_for(self._check_hello(stranger), self._settings.handshake_s)
        except HandshakeError as failure:
            self._refuse_stranger(stranger, failure.refusal, address, cause_of(failure))
        except asyncio.TimeoutError:
            self._refuse(Refusal.TIMEOUT, address, "the handshake took too long")
        except OSError as failure:
            self._refuse_stranger(stranger, Refusal.CLOSED, address, cause_of(failure))
        else:
            try:
                self._engine.serve(peer.client_id, sock.detach())
            except Exception as failure:  # any: one refused connection must not end the server
                self._refuse(Refusal.ENGINE, address, repr(failure))
        finally:
            self._strangers.leave(stranger)
            sock.close()

    async def _check_hello(self, stranger: Stranger) -> Hello:
        loop = asyncio.get_running_loop()
        sock = stranger.sock
        handshake = ServerHandshake(self._secret, self._server_id)
        challenge = handshake.challenge(await _receive(sock, HELLO_BYTES))
        stranger.named_us = True
        await loop.sock_sendall(sock, challenge)
        accept = handshake.accept(await _receive(sock, PROOF_BYTES))
        await loop.sock_sendall(sock, accept)
        return handshake.peer

    def _refuse_stranger(
        self, stranger: Stranger, refusal: Refusal, address: Any, why: str
    ) -> None:
        if stranger.had_to_go:
            refusal, why = Refusal.BUSY, "it had not passed, and others came after it"
        self._refuse(refusal, address, why)

    def _refuse(self, refusal: Refusal, address: Any, why: str) -> None:
        self._refused[refusal.value] += 1
        # A scanner can make any number of these: 1, 2, 4, 8 ... are logged.
        count = self._refused[refusal.value]
        if count & (count - 1) == 0:
            logger.warning(
                "data port: refused a connection from %s (%s, %d so far): %s",
                address[0] if address else "?",
                refusal.value,
                count,
                why,
            )


def _is_connected(connecting: asyncio.Task[list[socket.socket]] | None) -> bool:
    return connecting is not None and connecting.done() and not connecting.exception()


async def _end(connecting: asyncio.Task[list[socket.socket]]) -> None:
    """Cancels it, and waits until its sockets are closed."""
    connecting.cancel()
    await asyncio.wait({connecting})
    if not connecting.cancelled() and not connecting.exception():
        for sock in connecting.result():  # it was done just then
            sock.close()


async def _receive(sock: socket.socket, n_bytes: int) -> bytes:
    """Exactly n bytes, and never one of what follows them."""
    loop = asyncio.get_running_loop()
    parts: list[bytes] = []
    while n_bytes:
        part = await loop.sock_recv(sock, n_bytes)
        if not part:
            raise HandshakeError(Refusal.CLOSED, "the peer hung up during the handshake")
        parts.append(part)
        n_bytes -= len(part)
    return b"".join(parts)


def _tune(sock: socket.socket) -> None:
    """Small requests leave at once; a peer whose host vanished is noticed within 30 s."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3)):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
