"""Connections between the workers of a program: who sends never waits, and what comes is handed on.

Each worker listens. A connection goes one way, and is made when there is something to send. Both
ends prove that they know the program's secret before anything is unpickled
(`multiprocessing.connection`: HMAC of a challenge). Nothing is encrypted.

What was on a connection that breaks is lost: whoever has sent it sends it again when nobody
acknowledges it (`_recipes/placement/links.py`), on a new connection. `lost` is told of each that
breaks, and finds out whether the other end lives.

Threads: one that listens; one for each connection that others have made; one for each worker that
this one sends to. `received` and `lost` are called on any of them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import (
    Client,
    Connection,
    Listener,
    answer_challenge,
    deliver_challenge,
)
from typing import Any, Final

from clamor_ray.actors.recipes import frames

logger = logging.getLogger("clamor_ray.recipes")

HANDSHAKE_S: Final = 10.0
CONNECT_S: Final = 10.0
PAUSE_S: Final = 0.05
BACKLOG: Final = 128
BATCH_BYTES: Final = 4 << 20

Address = tuple[str, int]


class Peers:
    """See the file's head. Safe from any thread.

    Args:
        me: This worker's id.
        host: The address of this node; None: nobody connects to this end.
        secret: Of the program.
        received: (worker, message), in the order in which each worker has sent.
        lost: (worker, why).
        failed: Is told what cannot be sent at all.
    """

    def __init__(
        self,
        me: str,
        host: str | None,
        secret: bytes,
        received: Callable[[str, Any], None],
        lost: Callable[[str, str], None],
        failed: Callable[[str], None],
    ) -> None:
        self._me = me
        self._secret = secret
        self._received = received
        self._lost = lost
        self._failed = failed
        self._listener = None if host is None else Listener((host, 0), backlog=BACKLOG)
        self._queues: dict[str, queue.SimpleQueue[Any]] = {}
        self._open: set[Connection] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        if self._listener is not None:
            threading.Thread(
                target=self._listen, args=(self._listener,), name="recipes-listen", daemon=True
            ).start()

    @property
    def address(self) -> Address:
        """Where others reach this one."""
        assert self._listener is not None
        host, port = self._listener.address
        return str(host), int(port)

    def send(self, worker: str, address: Address, message: Any) -> None:
        """Queues a message. Those to one worker arrive in order."""
        with self._lock:
            if self._closed.is_set():
                return
            waiting = self._queues.get(worker)
            if waiting is None:
                waiting = self._queues[worker] = queue.SimpleQueue()
                threading.Thread(
                    target=self._send_all,
                    args=(worker, address, waiting),
                    name=f"recipes-to-{worker}",
                    daemon=True,
                ).start()
        waiting.put(message)

    def drop(self, worker: str) -> None:
        """It gets nothing more: the connection to it ends, if there is one."""
        with self._lock:
            waiting = self._queues.pop(worker, None)
        if waiting is not None:
            waiting.put(None)

    def close(self) -> None:
        """Ends all connections. Idempotent."""
        with self._lock:
            if self._closed.is_set():
                return
            self._closed.set()
            queues, self._queues = list(self._queues.values()), {}
            connections, self._open = list(self._open), set()
        if self._listener is not None:
            with contextlib.suppress(OSError):
                # A blocked accept does not see that its socket is closed.
                _unblock(self._listener)
                self._listener.close()
        for waiting in queues:
            waiting.put(None)
        for connection in connections:
            _shut(connection)

    # -- from others

    def _listen(self, listener: Listener) -> None:
        while not self._closed.is_set():
            try:
                connection = listener.accept()
            except (OSError, EOFError) as failure:
                if self._closed.is_set():
                    return
                logger.warning("a connection was not accepted: %r", failure)
                time.sleep(PAUSE_S)
                continue
            threading.Thread(
                target=self._receive_all, args=(connection,), name="recipes-from", daemon=True
            ).start()

    def _receive_all(self, connection: Any) -> None:
        worker = None
        with self._lock:
            if self._closed.is_set():
                connection.close()
                return
            self._open.add(connection)
        try:
            late = threading.Timer(HANDSHAKE_S, _shut, [connection])
            late.daemon = True
            late.start()
            try:
                deliver_challenge(connection, self._secret)
                answer_challenge(connection, self._secret)
                worker = connection.recv_bytes().decode()
            finally:
                late.cancel()
            with _socket_of(connection) as link:
                while True:
                    for message in frames.receive(link):
                        self._received(worker, message)
        except Exception as failure:  # any: what was on it is not known
            if not self._closed.is_set() and worker is not None:
                self._lost(worker, f"its connection ended: {failure!r}")
            elif not self._closed.is_set():
                logger.warning("a stranger's connection was refused: %r", failure)
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    # -- to others

    def _send_all(self, worker: str, address: Address, waiting: queue.SimpleQueue[Any]) -> None:
        try:
            connection = self._connect(address)
        except Exception as failure:  # any of the socket's, or a refused secret
            self._forget(worker, waiting)
            self._lost_unless_closed(worker, f"it cannot be reached at {address}: {failure!r}")
            return
        try:
            connection.send_bytes(self._me.encode())
            with _socket_of(connection) as link:
                while batch := _next_batch(waiting, self._failed):
                    frames.send(link, batch)
        except Exception as failure:  # any: the rest of the queue is not sent
            self._forget(worker, waiting)
            self._lost_unless_closed(worker, f"nothing can be sent to it: {failure!r}")
        finally:
            with self._lock:
                self._open.discard(connection)
            connection.close()

    def _connect(self, address: Address) -> Any:
        deadline = time.monotonic() + CONNECT_S
        while True:
            try:
                connection = Client(address, authkey=self._secret)
                break
            except (TimeoutError, ConnectionError):
                if time.monotonic() > deadline or self._closed.is_set():
                    raise
                time.sleep(PAUSE_S)
        # Small messages must not wait for those before them to be acknowledged.
        with _socket_of(connection) as same:
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._lock:
            if self._closed.is_set():
                connection.close()
                raise ConnectionAbortedError("this worker ends")
            self._open.add(connection)
        return connection

    def _forget(self, worker: str, waiting: queue.SimpleQueue[Any]) -> None:
        with self._lock:  # what is sent from now on makes a new connection
            if self._queues.get(worker) is waiting:
                del self._queues[worker]

    def _lost_unless_closed(self, worker: str, why: str) -> None:
        if not self._closed.is_set():
            self._lost(worker, why)


def _next_batch(
    waiting: queue.SimpleQueue[Any], failed: Callable[[str], None]
) -> list[frames.Pickled]:
    """Messages that wait, pickled: at least one, and some MiB, so that those that are whole are
    acknowledged before all have come. Empty: there are no more."""
    batch: list[frames.Pickled] = []
    n_bytes = 0
    while n_bytes < BATCH_BYTES:
        try:
            message = waiting.get(block=not batch)
        except queue.Empty:
            break
        if message is None:
            if batch:
                waiting.put(None)  # for the next call
            break
        try:
            batch.append(frames.pickled(message))
            n_bytes += batch[-1].n_bytes
        except Exception as failure:  # any of the user's objects'
            failed(f"a partition, or a message, cannot be pickled: {failure!r}")
    return batch


def _socket_of(connection: Any) -> socket.socket:
    """Another descriptor of it."""
    return socket.socket(fileno=os.dup(connection.fileno()))


def _shut(connection: Any) -> None:
    """Ends its waits, on other threads too."""
    with contextlib.suppress(OSError), _socket_of(connection) as same:
        same.shutdown(socket.SHUT_RDWR)


def _unblock(listener: Any) -> None:
    same = listener._listener._socket
    with contextlib.suppress(OSError):
        same.shutdown(socket.SHUT_RDWR)
