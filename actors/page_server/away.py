"""A page server that was away: stopped, or cut off. It asks whether it was declared lost meanwhile.

What it is home of has been rebuilt on other nodes then, in later terms. Nobody may take it for the
home again, and nobody would tell it: it asks by itself, at once when its process was stopped, and
else from time to time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from clamor_ray._native.engine import Engine
from clamor_ray._objects.layout import format_bytes
from clamor_ray._protocol.messages import LocateAnswer, ServerLost

logger = logging.getLogger("clamor_ray.page_server")

LOOK_S = 1.0
AWAY_S = 5.0  # between two looks: the process was stopped
ASK_S = 30.0  # between two questions of one that was not


def old_homes(engine: Engine, reason: str) -> int:
    """Says what a server drops that was declared lost.

    Args:
        engine: Its.
        reason: Why it was.

    Returns:
        How many homes.
    """
    homes = [each for each in engine.region_stats() if each["is_home"]]
    n_bytes = sum(each["home_bytes"] + each["disk_bytes"] for each in homes)
    logger.error(
        "page server %#x was declared lost while it was not reached (%s): the %d homes that it has "
        "(%s) are old, and dropped",
        *(engine.server_id, reason, len(homes), format_bytes(n_bytes)),
    )
    return len(homes)


class AwayWatch:
    """See the file's head.

    Args:
        locate: Asks the registry for this server. Any exception means: ask again.
        lost: Is called once, with the reason, where this server was declared lost.
        now_s: A clock that goes on while the process is stopped.
    """

    def __init__(
        self,
        locate: Callable[[], LocateAnswer],
        lost: Callable[[str], object],
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._locate = locate
        self._lost = lost
        self._now_s = now_s
        self._closed = threading.Event()

    def start(self) -> None:
        """Watches from now on, on a thread of its own."""
        threading.Thread(target=self.run, name="clamor-away", daemon=True).start()

    def close(self) -> None:
        """Asks no more."""
        self._closed.set()

    def run(self) -> None:
        """Returns when it was closed, or this server is lost."""
        looked_s = asked_s = self._now_s()
        has_to_ask = False
        while not self._closed.wait(LOOK_S):
            now_s = self._now_s()
            has_to_ask = has_to_ask or now_s - looked_s >= AWAY_S or now_s - asked_s >= ASK_S
            looked_s = now_s
            if not has_to_ask:
                continue
            try:
                answer = self._locate()
            except Exception as failure:  # any: the registry may be restarting
                logger.info("the registry does not say whether this server is lost: %r", failure)
                continue
            has_to_ask, asked_s = False, now_s
            if isinstance(answer, ServerLost) and not self._closed.is_set():
                self._lost(answer.reason)
                return
