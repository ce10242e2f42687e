"""The keepers of a node, as its page server finds, starts and holds them.

A keeper leaves when nobody was connected for ``CLAMOR_ORPHAN_S``. A start may wait longer than that
for the registry before it knows which keeper is its own, and be tried again. So it connects to all
that may be, first of all, and lets go when its engine has the memory.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Iterable

from clamor_ray import errors
from clamor_ray._native import client as _native
from clamor_ray.actors.process import keeper_process

logger = logging.getLogger("clamor_ray.page_server")

CONNECT_S = 10.0  # one that takes no connection for so long may be stopped
ABSENT_S = 5.0  # twice as long as a keeper takes to see that its file is gone, and more
ABSENT_POLL_S = 0.05
STARTS_S = 60.0  # what a new one may take until it listens


def find_keeper(listen_name: str, has_served: bool = False) -> _native.Keeper | None:
    """The keeper that this node's last page server had; None: there is none.

    A keeper that was killed leaves its file. Where there is none, somebody may have removed it: one
    that lives makes it again (``pagecache_c/os/local_socket.c``).

    Args:
        listen_name: Its socket.
        has_served: There should be one.

    Raises:
        WaitTimeoutError: There is one, and it took no connection for ``CONNECT_S``. It may be
            stopped, or have no time: what it holds is not lost.
    """
    deadline_s = time.monotonic() + (ABSENT_S if has_served else 0.0)
    while not os.path.exists(listen_name) and time.monotonic() < deadline_s:
        time.sleep(ABSENT_POLL_S)
    try:
        return _native.Keeper(listen_name, timeout_s=CONNECT_S, absent_at_once=True)
    except errors.ServerUnavailableError:  # nobody listens there
        return None


def start_keeper(listen_name: str, orphan_timeout_s: float) -> _native.Keeper:
    """A new one, which listens there."""
    keeper_process.spawn(listen_name, keeper_process.raylet_pid(), orphan_timeout_s)
    return _native.Keeper(listen_name, timeout_s=STARTS_S)


def end_keeper(listen_name: str) -> None:
    """Tells the one that listens there to leave, if there is one."""
    with contextlib.suppress(errors.ClamorError):  # there is none
        _native.Keeper(listen_name, timeout_s=0.0).quit()


class KeeperHold:
    """Holds what listens under any of these names; nothing before ``hold``, and after ``release``.

    Args:
        listen_names: Sockets of keepers, there or not.
    """

    def __init__(self, listen_names: Iterable[str]) -> None:
        self._names = list(listen_names)
        self._held: dict[str, _native.Keeper] = {}

    def hold(self) -> None:
        """Also those that have come, or can be reached, since the call before."""
        for name in self._names:
            if name in self._held:
                continue
            try:
                self._held[name] = _native.Keeper(name, timeout_s=0.0, absent_at_once=True)
            except errors.ServerUnavailableError:
                continue  # nobody listens there: so it is with most names
            except errors.ClamorError as failure:  # who needs it later finds out whether it matters
                logger.warning("the keeper at %s cannot be held: %s", name, failure)

    def release(self) -> None:
        self._names.clear()
        for keeper in self._held.values():
            keeper.close()
        self._held.clear()
