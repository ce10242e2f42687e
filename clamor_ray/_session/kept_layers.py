"""Layers that were staged on this node go to its store at once, before the commit is asked for.

In a session with a store the registry asks each home for its layer, by a call of an actor. The home
on the writer's node is asked by the writer, over the socket of `actors/page_server/news.py`. What
it answers goes with the commit: which process of the page server has the layer on its disk. The
registry believes that as long as this process is the one that it knows, and else asks as ever. So
whatever fails here makes a commit slower, and nothing else.

Locks: `KeptLayers._lock` guards the connections that nobody uses.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Final

from clamor_ray import errors
from clamor_ray._protocol import names

if TYPE_CHECKING:
    from clamor_ray._session.session import Session

logger = logging.getLogger("clamor_ray")

# A layer that was staged longer ago is asked for again anyway (`Commits.FRESH_S`).
ANSWER_S: Final = 1.0
MOST_KEPT: Final = 1024
MOST_REGIONS: Final = 64  # of one commit; those of more are asked for by the registry
_LINE_BYTES: Final = 4096


class KeptLayers:
    """See the file's head. Safe from any thread.

    Args:
        session: whose page server is asked.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._kept: dict[int, tuple[int, ...]] = {}  # regions of commits that are not decided yet

    def after_fork(self) -> None:
        """In the child: the parent's connections are the parent's."""
        self._lock = threading.Lock()
        self.close()

    def close(self) -> None:
        """Ends connections that nobody uses."""
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def ask(self, commit_id: int, regions: Collection[int]) -> int:
        """Layers of a commit, staged on this node, whose homes are this node's.

        Args:
            commit_id: of all of them.
            regions: that they are of.

        Returns:
            Which process of the page server has all of them on its disk
            (`ServerInfo.process`); 0: none has, as far as anybody knows.
        """
        if not regions or len(regions) > MOST_REGIONS:
            return 0
        try:
            if not self._session.creator.has_store:
                return 0
            connection = self._take()
        except (OSError, errors.ClamorError) as failure:
            logger.debug("the page server is not asked for a layer: %r", failure)
            return 0
        try:
            process = _answer(connection, commit_id, regions)
        except (OSError, ValueError) as failure:
            logger.debug("the page server has not answered for a layer: %r", failure)
            connection.close()
            return 0
        with self._lock:
            self._idle.append(connection)
            self._kept[commit_id] = tuple(regions)
            if len(self._kept) > MOST_KEPT:
                del self._kept[next(iter(self._kept))]
        return process

    def drop(self, commit_id: int) -> None:
        """The registry has refused the commit: its layers need not be kept. Where nobody hears of
        it, the page server asks the registry, later."""
        with self._lock:
            regions = self._kept.pop(commit_id, ())
        if not regions:
            return
        lines = "".join(f"drop {region} {commit_id}\n" for region in regions)
        with contextlib.suppress(OSError, errors.ClamorError):
            connection = self._take()
            try:
                connection.settimeout(ANSWER_S)
                connection.sendall(lines.encode("ascii"))
            except OSError:
                connection.close()
                raise
            with self._lock:
                self._idle.append(connection)

    def forget(self, commit_id: int) -> None:
        """The commit was made."""
        with self._lock:
            self._kept.pop(commit_id, None)

    def _take(self) -> socket.socket:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        path = names.news_socket(self._session.ensure_server().socket_name)
        with contextlib.ExitStack() as stack:
            made = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            made.settimeout(ANSWER_S)
            made.connect(path)
            stack.pop_all()
            return made


def _answer(connection: socket.socket, commit_id: int, regions: Collection[int]) -> int:
    """
    Raises:
        OSError: There is none; nothing can be asked over this connection any more.
        ValueError: It is no answer to this.
    """
    deadline = time.monotonic() + ANSWER_S
    lines = "".join(f"keep {region} {commit_id}\n" for region in regions)
    connection.settimeout(ANSWER_S)
    connection.sendall(lines.encode("ascii"))
    got, processes, left = b"", set(), set(regions)
    while left:
        connection.settimeout(max(deadline - time.monotonic(), 1e-3))
        if not (some := connection.recv(_LINE_BYTES)):
            raise ConnectionResetError("it has closed the connection")
        *whole, got = (got + some).split(b"\n")
        for line in whole:
            word, region, of, process = line.decode("ascii").split()
            if word != "kept" or int(of) != commit_id:
                raise ValueError(line)
            left.remove(int(region))
            processes.add(int(process))
    return processes.pop() if len(processes) == 1 else 0
