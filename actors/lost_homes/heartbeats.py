"""Asks each page server again and again if it is there, and has a silent one looked at. No Ray.

A server is asked ``PERIOD_S`` after its last answer. From how regularly its answers come follows
how suspicious a silence is (``suspicion.py``):

    φ >= 5   no region is moved or rebuilt there while there is another server
    φ >= 8   it is looked whether anything of it is there, again and again: every ``LOOK_AGAIN_S``
             at first, and every ``LOOK_AGAIN_MOST_S`` in the end

Silence is no verdict, however long: a server that is stopped, slow or cut off is silent too. Who
looks declares a loss only of what is certainly gone, or where Ray says so (``liveness.py``). So a
node that has died is found within about a second, also where nobody needs anything of it, and Ray
would count missed health checks for fifteen.

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable

from clamor_ray.actors.lost_homes.suspicion import AVOIDED_PHI, EXAMINED_PHI, Suspicion
from clamor_ray.actors.process.background import BackgroundTasks

logger = logging.getLogger("clamor_ray.registry")

PERIOD_S = 0.5
TICK_S = 0.1
SILENT_MOST_S = 2.0  # however irregular its answers are: then it is looked at
LOOK_AGAIN_S = 0.5
LOOK_AGAIN_MOST_S = 5.0  # a look at a stopped process leaves a connection in its port's queue
ANSWER_S = 30.0  # then it is asked anew
LATE_S = 0.2  # this loop itself, beyond a tick: then the silence is its own


class _Peer:
    """What is known of one server."""

    def __init__(self, now_s: float) -> None:
        self.arrivals = Suspicion(PERIOD_S, now_s)
        self.ask_at_s = now_s
        self.look_at_s = now_s
        self.look_again_s = LOOK_AGAIN_S
        self.asking = False
        self.looking = False
        self.said = False

    def is_silent(self, now_s: float) -> bool:
        return (
            self.arrivals.phi(now_s) >= EXAMINED_PHI
            or self.arrivals.silent_s(now_s) >= SILENT_MOST_S
        )


class Heartbeats:
    """See the file's head.

    Args:
        servers: Those that are to be asked, by id.
        ask: Returns when the server has answered. Any exception: it has not.
        look: Looks whether it is lost, and declares that. Any exception: it is not known.
        background: Runs all of it.

    Example:
        >>> async def show():
        ...     async def silent(server_id):
        ...         await asyncio.sleep(60)
        ...     async def look(server_id):
        ...         print("is", server_id, "there?", beats.is_suspected(7))
        ...     background = BackgroundTasks(logger)
        ...     beats = Heartbeats(lambda: [7], silent, look, background)
        ...     beats.watch()
        ...     await asyncio.sleep(1.6)
        ...     await background.end()
        >>> asyncio.run(show())
        is 7 there? True
    """

    def __init__(
        self,
        servers: Callable[[], Iterable[int]],
        ask: Callable[[int], Awaitable[object]],
        look: Callable[[int], Awaitable[object]],
        background: BackgroundTasks,
    ) -> None:
        self._servers = servers
        self._ask = ask
        self._look = look
        self._background = background
        self._peers: dict[int, _Peer] = {}

    def watch(self) -> None:
        """From now on."""
        self._background.spawn(self._watch())

    def is_suspected(self, server_id: int) -> bool:
        """Whether it is so silent that others are better."""
        peer = self._peers.get(server_id)
        return peer is not None and peer.arrivals.phi(time.monotonic()) >= AVOIDED_PHI

    async def _watch(self) -> None:
        before_s = time.monotonic()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = time.monotonic()
            late_s = now_s - before_s - TICK_S
            before_s = now_s
            if late_s > LATE_S:
                for peer in self._peers.values():
                    peer.arrivals.pardon(late_s, now_s)
            self._tick(now_s)

    def _tick(self, now_s: float) -> None:
        here = set(self._servers())
        for server_id in self._peers.keys() - here:
            del self._peers[server_id]
        for server_id in here:
            peer = self._peers.setdefault(server_id, _Peer(now_s))
            if not peer.asking and now_s >= peer.ask_at_s:
                peer.asking = True
                self._background.spawn(self._asked(server_id, peer))
            if not peer.looking and now_s >= peer.look_at_s and peer.is_silent(now_s):
                peer.looking = True
                self._background.spawn(self._looked(server_id, peer))

    async def _asked(self, server_id: int, peer: _Peer) -> None:
        try:
            await asyncio.wait_for(self._ask(server_id), ANSWER_S)
        except Exception as failure:  # any: it may be restarting
            logger.debug("page server %#x does not answer: %r", server_id, failure)
        else:
            peer.arrivals.heard(time.monotonic())
            peer.look_again_s = LOOK_AGAIN_S
            if peer.said:
                logger.info("page server %#x answers again", server_id)
            peer.said = False
        finally:
            peer.asking = False
            peer.ask_at_s = time.monotonic() + PERIOD_S

    async def _looked(self, server_id: int, peer: _Peer) -> None:
        try:
            if not peer.said:
                silent_s = peer.arrivals.silent_s(time.monotonic())
                logger.info("page server %#x is silent for %.1f s", server_id, silent_s)
            peer.said = True
            await self._look(server_id)
        except Exception as failure:  # any of Ray's: it is looked again
            logger.warning("page server %#x cannot be looked at: %r", server_id, failure)
        finally:
            peer.looking = False
            peer.look_at_s = time.monotonic() + peer.look_again_s
            peer.look_again_s = min(2 * peer.look_again_s, LOOK_AGAIN_MOST_S)
