"""What a process hears of newer versions: one connection to this node's page server.

The registry tells each node that watches a variable once of each commit, and the page server tells
its processes (`actors/page_server/news.py`). Nothing here asks again and again: a thread waits for
lines, and is there only while something is watched. After a connection has ended, the page server
is told the versions that are known, and answers with what is newer.

Locks: `ProcessNews._lock` guards the watches and the socket; no other is taken under it.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from clamor_ray import errors
from clamor_ray._labels import capital, label
from clamor_ray._protocol import names
from clamor_ray._protocol.cause import cause_of
from clamor_ray._session import end_hooks

if TYPE_CHECKING:
    from clamor_ray._session.session import Session

logger = logging.getLogger("clamor_ray")

LOOK_S: Final = 30.0  # without a line: is the session still there?
CONNECT_S: Final = 5.0
SEND_S: Final = 5.0
PAUSE_S: Final = 0.1
ASK_AFTER_S: Final = 2.0  # without a connection: whether the page server must be started


class Watch:
    """What `GlobalRef.on_update` returns. It lasts until `cancel`, or the end of the variable.

    Example:
        >>> ref = clamor.put(np.zeros(1000))
        >>> watch = ref.on_update(print)
        >>> watch.cancel()
        >>> watch.error is None
        True
    """

    def __init__(
        self,
        news: ProcessNews,
        region: int,
        version: int,
        told: Callable[[int], object],
        ended: Callable[[BaseException], object],
        name: str | None,
    ) -> None:
        self._news = news
        self._region = region
        self._version = version  # the newest that it was told of
        self._told = told
        self._ended = ended
        self._name = name
        self._error: BaseException | None = None
        self._is_cancelled = False
        self.held_by: object = None  # what keeps the variable meanwhile

    @property
    def error(self) -> BaseException | None:
        """Why it hears nothing any more: `FreedError`, `SessionEndedError`, or
        `ServerUnavailableError`; None while it does, and after `cancel`."""
        return self._error

    def cancel(self) -> None:
        """Hears nothing from now on; a call that has begun goes on. Safe from any thread."""
        self._is_cancelled = True
        self.held_by = None
        self._news.leave(self)


class ProcessNews:
    """A session's watches in this process. Safe from any thread.

    Args:
        session: whose page server is asked.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._lock = threading.Lock()
        self._watches: dict[int, list[Watch]] = {}  # by region
        self._socket: socket.socket | None = None
        self._thread: threading.Thread | None = None
        self._path = ""
        self._calls: queue.SimpleQueue[Callable[[], object]] | None = None

    def after_fork(self) -> None:
        """In the child: the parent's watches are the parent's."""
        self._lock = threading.Lock()
        if self._socket is not None:
            self._socket.close()
        self._socket = self._thread = self._calls = None
        self._watches = {}

    def watch(
        self,
        region: int,
        version: int,
        told: Callable[[int], object],
        ended: Callable[[BaseException], object] = lambda error: None,
        name: str | None = None,
    ) -> Watch:
        """Calls `told` with each version after this one that it hears of, on the thread that hears
        it: it must not wait. Those that came in between are left out. `ended` is called once, where
        there will be no more. `name` is the variable's, for messages.

        Raises:
            What `ensure_server` raises.
        """
        if not self._path:  # a page server may not have been needed here so far
            self._path = names.news_socket(self._session.ensure_server().socket_name)
        watch = Watch(self, region, version, told, ended, name)
        with self._lock:
            self._watches.setdefault(region, []).append(watch)
            self._send(self._line_of(region))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="clamor-news", daemon=True)
                self._thread.start()
        return watch

    def leave(self, watch: Watch) -> None:
        """Ends a watch."""
        with self._lock:
            self._take_out(watch)

    def call(
        self,
        region: int,
        version: int,
        function: Callable[[int], object],
        name: str | None = None,
    ) -> Watch:
        """As `watch`, of a function that may wait: all of them run on one thread of their own. Of
        the versions that have come when it is called it gets the newest.

        Raises:
            What `ensure_server` raises.
        """
        with self._lock:
            if self._calls is None:
                self._calls = queue.SimpleQueue()
                threading.Thread(
                    target=_call_all, args=(self._calls,), name="clamor-updates", daemon=True
                ).start()
            calls = self._calls
        came: collections.deque[int] = collections.deque()
        begun: list[Watch] = []  # a version may come before the next line here has it

        def call() -> None:
            versions = [came.popleft() for _ in range(len(came))]
            if versions and not (begun and begun[0]._is_cancelled):
                function(versions[-1])

        def told(newer: int) -> None:
            came.append(newer)
            calls.put(call)

        begun.append(self.watch(region, version, told, name=name))
        return begun[0]

    def end(self, error: BaseException) -> None:
        """There will be no more news."""
        with self._lock:
            watches = [watch for known in self._watches.values() for watch in known]
            self._watches.clear()
            self._close()
        for watch in watches:
            watch._error = error
            watch._ended(error)

    # -- under the lock

    def _take_out(self, watch: Watch) -> None:
        known = self._watches.get(watch._region, [])
        if watch not in known:
            return
        known.remove(watch)
        if not known:
            del self._watches[watch._region]
            self._send(f"leave {watch._region}\n")
        if not self._watches:
            self._close()

    def _line_of(self, region: int) -> str:
        """What the page server is told: of several watches, the oldest version that one knows."""
        return f"watch {region} {min(watch._version for watch in self._watches[region])}\n"

    def _send(self, lines: str) -> None:
        if self._socket is None:
            return  # all is said after the connect
        try:
            self._socket.settimeout(SEND_S)  # the thread that reads takes a longer one for itself
            self._socket.sendall(lines.encode("ascii"))
            self._socket.settimeout(LOOK_S)
        except OSError:
            self._close()  # the thread connects again, and says it then

    def _close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes it
            self._socket = None

    # -- the thread

    def _run(self) -> None:
        try:
            while self._connect_and_listen():
                time.sleep(PAUSE_S)
        except errors.ClamorError as error:
            self.end(error)
        except Exception as error:  # any: who watches must not wait for nothing
            logger.exception("what hears of newer versions has failed")
            self.end(error)
        finally:
            with self._lock:
                self._thread = None
                if self._watches:  # begun while this thread was ending
                    self._thread = threading.Thread(
                        target=self._run, name="clamor-news", daemon=True
                    )
                    self._thread.start()

    def _connect_and_listen(self) -> bool:
        """Until the connection ends. False where nothing is watched any more.

        Raises:
            SessionEndedError: Its driver has ended it.
            ServerUnavailableError: There is no connection.
        """
        with self._lock:
            if not self._watches:
                return False
        connection = self._connect()
        with contextlib.closing(connection):
            with self._lock:
                if not self._watches:
                    return False
                self._socket = connection
                self._send("".join(map(self._line_of, self._watches)))
            self._listen(connection)
        return True

    def _connect(self) -> socket.socket:
        config = self._session.config
        begun = time.monotonic()
        ask_at, pause_s = begun + ASK_AFTER_S, PAUSE_S
        while True:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
            connection.settimeout(CONNECT_S)
            try:
                connection.connect(self._path)
                return connection
            except OSError as failure:
                connection.close()
                self._check_session()
                now = time.monotonic()
                if now - begun >= config.reattach_s:
                    raise errors.ServerUnavailableError(
                        f"This node's page server has not answered for {config.reattach_s:g} s: "
                        f"{cause_of(failure)}.",
                        hint="Newer versions are not heard of any more: watch the variable again.",
                    ) from failure
                if now >= ask_at:
                    ask_at = now + ASK_AFTER_S
                    with contextlib.suppress(errors.ClamorError):  # it may be restarting itself
                        self._session.ensure_server()
            except BaseException:
                connection.close()
                raise
            time.sleep(pause_s)
            pause_s = min(1.0, 2 * pause_s)

    def _check_session(self) -> None:
        if self._session._has_ended():
            for heard in end_hooks.when_found:
                heard(self._session)
            end_hooks.raise_ended(self._session.scope)

    def _listen(self, connection: socket.socket) -> None:
        """Tells what comes, until the connection ends.

        Raises:
            SessionEndedError: Its driver has ended it.
        """
        connection.settimeout(LOOK_S)
        rest = b""
        while True:
            try:
                received = connection.recv(1 << 16)
            except TimeoutError:
                self._check_session()
                continue
            except OSError:
                received = b""
            if not received:
                break
            *lines, rest = (rest + received).split(b"\n")
            for line in lines:
                word, *numbers = line.decode("ascii").split()
                if word == "at":
                    self._tell(*map(int, numbers))
                elif word == "freed":
                    self._tell_freed(*map(int, numbers))
        with self._lock:
            if self._socket is connection:
                self._socket = None

    def _tell(self, region: int, version: int) -> None:
        with self._lock:
            watches = [w for w in self._watches.get(region, []) if w._version < version]
            for watch in watches:
                watch._version = version
        for watch in watches:
            watch._told(version)

    def _tell_freed(self, region: int) -> None:
        with self._lock:
            watches = self._watches.pop(region, [])
            if not self._watches:
                self._close()
        for watch in watches:
            freed = f"{capital(label(region, watch._name))} was freed."
            watch._error = errors.FreedError(freed)
            watch._ended(watch._error)


def _call_all(calls: queue.SimpleQueue[Callable[[], object]]) -> None:
    while True:
        call = calls.get()
        try:
            call()
        except Exception:  # any: the user's function; the next version is told all the same
            logger.exception("a function that GlobalRef.on_update was given has failed")
        del call  # it may close over references


def _end(session: Session) -> None:
    """This process leaves the session."""
    if session.goes_on:
        left = errors.NotInitializedError("This process has left the session: clamor.shutdown().")
        session.news.end(left)
        return
    try:
        end_hooks.raise_ended(session.scope)
    except errors.SessionEndedError as error:
        session.news.end(error)


end_hooks.at_end.append(_end)
