"""How members of a group connect, once they know each other's addresses. No Ray here.

Each member listens on its node's address. Everyone connects to the next in the ring, once for each
lane, and to those partners that come after it; and accepts what the one before and the partners
before it open. Every connection passes the handshake of the page port (`_protocol.handshake`), by
the session's secret and ids that are the group's and this joining's alone: what is left of an
earlier one, or of another group, is turned away. One byte more says that the handshake's end has
arrived: until then the side that accepts does not count on it, for the other one may have given up.

A member listens from before it meets the others until it has all connections: a port that refuses
is that of one that died, or gave up.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from clamor_ray import errors
from clamor_ray._native.ring import DEFAULT_SMALL_BYTES, Ring, partners
from clamor_ray._protocol.handshake import (
    ACCEPT_BYTES,
    CHALLENGE_BYTES,
    HELLO_BYTES,
    MAX_LANES,
    PROOF_BYTES,
    ClientHandshake,
    HandshakeError,
    Hello,
    ServerHandshake,
)

PAIR_LANE: Final = MAX_LANES - 1  # a partner's; those of the ring count from 0
HANDSHAKE_S: Final = 5.0  # of all its messages
RETRY_S: Final = 0.05
ACCEPT_S: Final = 0.2  # how soon it is seen that joining was given up
LOOK_S: Final = 1.0  # how often it is looked whether those that are awaited still listen
MOST_PENDING: Final = 512  # connections in the middle of a handshake; strangers' go first
ARRIVED: Final = b"\x01"


@dataclass(frozen=True)
class RingPlace:
    """One member, as the others need to know it.

    Args:
        rank: its number.
        host: its node's address.
        port: where it listens.
    """

    rank: int
    host: str
    port: int


def in_ring(places: Sequence[RingPlace]) -> list[RingPlace]:
    """Members by position: those of one node side by side, nodes by address, so that of each node's
    traffic only one stream leaves it (Sparker, 4.1).

    Example:
        >>> places = [RingPlace(0, "b", 1), RingPlace(1, "a", 1), RingPlace(2, "b", 2)]
        >>> [place.rank for place in in_ring(places)]
        [1, 0, 2]
    """
    return sorted(places, key=lambda place: (place.host, place.rank))


def listen(host: str) -> socket.socket:
    """A listening socket on a port that was free."""
    return _ours(socket.create_server((host, 0), backlog=1024))


# What a child of fork must not keep: nobody would see the parent die. The lock is held where
# descriptors go from here to C, whose own they are then.
_sockets: set[socket.socket] = set()
_handing_over = threading.Lock()


def _ours(made: socket.socket) -> socket.socket:
    for gone in [known for known in list(_sockets) if known.fileno() < 0]:
        _sockets.discard(gone)
    _sockets.add(made)
    return made


def _after_fork_in_child() -> None:
    global _handing_over
    for made in list(_sockets):
        made.close()
    _sockets.clear()
    _handing_over = threading.Lock()


os.register_at_fork(
    before=lambda: _handing_over.acquire(),
    after_in_parent=lambda: _handing_over.release(),
    after_in_child=_after_fork_in_child,
)


@dataclass
class _Joining:
    """What one member has so far."""

    group: bytes
    secret: bytes = field(repr=False)  # a log may show the rest
    places: Sequence[RingPlace]
    position: int
    n_lanes: int
    deadline_s: float
    found: dict[tuple[int, int], socket.socket] = field(default_factory=dict)
    accepted: dict[tuple[int, int], socket.socket] = field(default_factory=dict)
    failure: errors.MemberLostError | None = None  # of the thread that accepts

    def id_of(self, position: int) -> int:
        digest = hashlib.blake2b(self.group + position.to_bytes(4, "little"), digest_size=8)
        return int.from_bytes(digest.digest(), "little") or 1

    def left_s(self) -> float:
        left = self.deadline_s - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left

    def awaited(self) -> set[tuple[int, int]]:
        """(position, lane) of connections that others open."""
        n, me = len(self.places), self.position
        before = {((me - 1) % n, lane) for lane in range(self.n_lanes)}
        return before | {(p, PAIR_LANE) for p in partners(me, n) if p < me}

    def opened(self) -> set[tuple[int, int]]:
        """(position, lane) of connections that this member opens."""
        n, me = len(self.places), self.position
        after = {((me + 1) % n, lane) for lane in range(self.n_lanes)}
        return after | {(p, PAIR_LANE) for p in partners(me, n) if p > me}


def join(
    listener: socket.socket,
    group: bytes,
    secret: bytes,
    places: Sequence[RingPlace],
    rank: int,
    *,
    n_lanes: int = 1,
    small_bytes: int = DEFAULT_SMALL_BYTES,
    timeout_s: float,
) -> Ring:
    """This member's end of the ring. All members call it at about the same time.

    Args:
        listener: what this member's place says; stays open.
        group: names the group and this joining of it.
        secret: 32 bytes that all members have.
        places: of all members, by position.
        rank: this member's.
        n_lanes: connections between neighbours.
        timeout_s: until all connections are there.

    Raises:
        MemberLostError: A member did not connect, or could not be connected to.
    """
    ranks = [place.rank for place in places]
    position = ranks.index(rank)
    if len(places) == 1:
        return Ring(0, ranks, [], [], [])
    joining = _Joining(
        group=group,
        secret=secret,
        places=places,
        position=position,
        n_lanes=n_lanes,
        deadline_s=time.monotonic() + timeout_s,
    )
    failed: list[BaseException] = []

    def accept() -> None:
        try:
            with _Acceptor(joining, listener) as acceptor:
                acceptor.run()
        except errors.MemberLostError as lost:
            joining.failure = lost
        except BaseException as failure:  # any: it is raised by the thread that waits
            failed.append(failure)

    thread = threading.Thread(target=accept, name="clamor-ring-accept", daemon=True)
    thread.start()
    whole = False
    try:
        for where in sorted(joining.opened()):
            joining.found[where] = _connect(joining, *where)
        thread.join(max(0.0, joining.deadline_s - time.monotonic()) + 1.0)
        if joining.failure is not None:
            raise joining.failure
        missing = joining.awaited() - joining.accepted.keys()
        if failed or missing:
            raise _lost(joining, missing, failed) from (failed[0] if failed else None)
        ring = _ring_of(joining, small_bytes)
        whole = True
        return ring
    finally:
        if not whole:  # the others must not take this member for one that is there
            joining.deadline_s = 0.0
            thread.join(HANDSHAKE_S + 1.0)
            for connection in [*joining.found.values(), *joining.accepted.values()]:
                connection.close()


def _ring_of(joining: _Joining, small_bytes: int) -> Ring:
    n, position, lanes = len(joining.places), joining.position, range(joining.n_lanes)
    after = [joining.found[(position + 1) % n, lane] for lane in lanes]
    before = [joining.accepted[(position - 1) % n, lane] for lane in lanes]
    connections = {**joining.accepted, **joining.found}
    beside = [connections[p, PAIR_LANE] for p in partners(position, n)]
    with _handing_over:
        try:
            return Ring(
                position,
                [place.rank for place in joining.places],
                [connection.fileno() for connection in after],
                [connection.fileno() for connection in before],
                [connection.fileno() for connection in beside],
                small_bytes,
            )
        finally:
            for connection in (*after, *before, *beside):
                connection.detach()


def _lost(
    joining: _Joining, missing: set[tuple[int, int]], failed: Sequence[BaseException]
) -> errors.MemberLostError:
    ranks = sorted({joining.places[position].rank for position, _ in missing})
    told = ", ".join(str(rank) for rank in ranks)
    error = errors.MemberLostError(
        f"Member {joining.places[joining.position].rank} waited for members {told}, which did not "
        f"connect{f': {failed[0]}' if failed and str(failed[0]) else ''}."
    )
    error.member = ranks[0] if ranks else None
    return error


def _unreachable(place: RingPlace, why: Exception | None) -> errors.MemberLostError:
    error = errors.MemberLostError(
        f"Member {place.rank} of the group, at {place.host}:{place.port}, could not be reached: "
        f"{why}."
    )
    error.member = place.rank
    return error


# ------------------------------------------------------------------ who connects


def _connect(joining: _Joining, position: int, lane: int) -> socket.socket:
    place = joining.places[position]
    hello = Hello(joining.id_of(joining.position), joining.id_of(position), lane)
    why: Exception | None = None
    while True:
        if joining.failure is not None:
            raise joining.failure
        try:
            left_s = joining.left_s()
        except TimeoutError:
            raise _unreachable(place, why) from why
        try:
            connection = _ours(socket.create_connection((place.host, place.port), left_s))
        except ConnectionRefusedError as refused:
            raise _unreachable(place, refused) from refused
        except OSError as failure:
            why = failure
            time.sleep(min(RETRY_S, left_s))
            continue
        try:
            _shake_hands(connection, joining.secret, hello, min(left_s, HANDSHAKE_S))
        except (OSError, HandshakeError) as failure:
            why = failure
            connection.close()
            time.sleep(min(RETRY_S, left_s))
            continue
        connection.setblocking(False)
        return connection


def _shake_hands(connection: socket.socket, secret: bytes, hello: Hello, within_s: float) -> None:
    deadline_s = time.monotonic() + within_s
    handshake = ClientHandshake(secret, hello)
    connection.settimeout(within_s)
    connection.sendall(handshake.hello)
    connection.sendall(handshake.prove(_exactly(connection, CHALLENGE_BYTES, deadline_s)))
    handshake.finish(_exactly(connection, ACCEPT_BYTES, deadline_s))
    connection.sendall(ARRIVED)


def _exactly(connection: socket.socket, n_bytes: int, deadline_s: float) -> bytes:
    """As many bytes and not one more: what follows is the ring's."""
    out = b""
    while len(out) < n_bytes:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the handshake took too long")
        connection.settimeout(left_s)
        some = connection.recv(n_bytes - len(out))
        if not some:
            raise ConnectionError("the other side closed the connection")
        out += some
    return out


# ------------------------------------------------------------------ who is connected to


class _Greeting:
    """A connection in the middle of its handshake; never blocks.

    Args:
        connection: accepted.
        handshake: this side's.
        where: which of the awaited connections a peer's is.
    """

    def __init__(
        self,
        connection: socket.socket,
        handshake: ServerHandshake,
        where: Callable[[Hello], tuple[int, int] | None],
    ) -> None:
        self.connection = connection
        self.handshake = handshake
        self.where: tuple[int, int] | None = None
        self._where = where
        self.deadline_s = time.monotonic() + HANDSHAKE_S
        self._received = b""
        self._steps = self._talk()
        self._wanted = next(self._steps)

    def _talk(self) -> Iterator[int]:
        """How many bytes are to come, before each step."""
        yield HELLO_BYTES
        # Both answers fit an empty socket's buffer: what did not go at once ends it.
        self._send(self.handshake.challenge(self._received))
        yield PROOF_BYTES
        accept = self.handshake.accept(self._received)
        self.where = self._where(self.handshake.peer)
        if self.where is None:
            raise ConnectionError("nobody waits for that lane of that member")
        self._send(accept)
        yield len(ARRIVED)

    def _send(self, answer: bytes) -> None:
        if self.connection.send(answer) < len(answer):
            raise ConnectionError("there is no room for an answer")

    def hear(self) -> bool:
        """Takes in what is there. True: the handshake is over.

        Raises:
            OSError, HandshakeError: It has failed.
        """
        while True:
            try:
                some = self.connection.recv(self._wanted - len(self._received))
            except BlockingIOError:
                return False
            if not some:
                raise ConnectionError("the other side closed the connection")
            self._received += some
            if len(self._received) < self._wanted:
                continue
            try:
                self._wanted = next(self._steps)
            except StopIteration:
                return True
            self._received = b""


class _Acceptor:
    """All connections that others open, at once, each with a deadline of its own.

    Args:
        joining: where they go.
        listener: where they come from.
    """

    def __init__(self, joining: _Joining, listener: socket.socket) -> None:
        self._joining = joining
        self._listener = listener
        self._awaited = joining.awaited()
        self._by_id = {joining.id_of(position): position for position, _ in self._awaited}
        self._greetings: dict[socket.socket, _Greeting] = {}
        self._selector = selectors.DefaultSelector()
        self._refused: set[int] = set()  # positions whose port refused when it was last looked

    def __enter__(self) -> _Acceptor:
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        return self

    def __exit__(self, *_: object) -> None:
        for connection in list(self._greetings):
            self._drop(connection)
        self._selector.close()

    def run(self) -> None:
        """Until all are there.

        Raises:
            MemberLostError: One that is awaited listens no longer.
            TimeoutError: The deadline has passed, or joining was given up.
        """
        look_s = time.monotonic() + LOOK_S
        while self._awaited - self._joining.accepted.keys():
            for key, _ in self._selector.select(min(self._joining.left_s(), ACCEPT_S)):
                if key.fileobj is self._listener:
                    self._accept()
                else:
                    self._hear(key.fileobj)  # type: ignore[arg-type]
            now_s = time.monotonic()
            for connection, greeting in list(self._greetings.items()):
                if greeting.deadline_s < now_s:
                    self._drop(connection)
            if now_s >= look_s:
                self._look()
                look_s = time.monotonic() + LOOK_S

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # whoever it was has gone again
            connection = _ours(self._listener.accept()[0])
            connection.setblocking(False)
            if len(self._greetings) >= MOST_PENDING:
                self._drop(next(iter(self._greetings)))
            secret, own = self._joining.secret, self._joining.id_of(self._joining.position)
            handshake = ServerHandshake(secret, own)
            self._greetings[connection] = _Greeting(connection, handshake, self._where)
            self._selector.register(connection, selectors.EVENT_READ)

    def _where(self, peer: Hello) -> tuple[int, int] | None:
        where = (self._by_id.get(peer.client_id, -1), peer.lane)
        return where if where in self._awaited else None

    def _hear(self, connection: socket.socket) -> None:
        greeting = self._greetings[connection]
        try:
            if not greeting.hear():
                return
        except (OSError, HandshakeError):  # a stranger, or one who tries again
            self._drop(connection)
            return
        assert greeting.where is not None
        self._selector.unregister(connection)
        del self._greetings[connection]
        before = self._joining.accepted.pop(greeting.where, None)
        if before is not None:
            before.close()
        self._joining.accepted[greeting.where] = connection

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        del self._greetings[connection]
        connection.close()

    def _look(self) -> None:
        """Whether those that are awaited still listen. Who has all its connections listens no more,
        and has said so before: of that, the rest is taken in before the second look."""
        missing = {position for position, _ in self._awaited - self._joining.accepted.keys()}
        refused = {position for position in missing if _refuses(self._joining.places[position])}
        for position in sorted(refused & self._refused):
            raise _unreachable(self._joining.places[position], ConnectionRefusedError("refused"))
        self._refused = refused


def _refuses(place: RingPlace) -> bool:
    try:
        socket.create_connection((place.host, place.port), ACCEPT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:  # it may be busy
        return False
    return False
