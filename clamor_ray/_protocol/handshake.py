"""Who may talk on the data port: a mutual challenge over fixed-size messages. Pure: no I/O.

Both sides hold the job's secret, which travels only in Ray's actor calls. A connection passes
when each side has proved that it knows the secret by an HMAC-SHA256 over the other's fresh nonce.

    client                                server
    HELLO   version, lane, ids, nonce  ->
                                       <- CHALLENGE  nonce, proof over (HELLO, nonce)
    PROOF   over (HELLO, CHALLENGE)    ->
                                       <- ACCEPT     over (HELLO, CHALLENGE, PROOF)

* Every proof covers all that was said before it, so that lane and ids cannot be altered.
* Each proof has its own label, so that none can be reflected as another.
* A recorded session is worthless: the server's nonce is new each time.
* Messages have one size each. Nobody reads a length from the wire, or past a message's end: what
  follows ACCEPT belongs to the data protocol.
* HELLO starts with the magic and the wire version, and that never changes, so that different
  builds can tell each other so.

Thread safety: each ``ClientHandshake`` and ``ServerHandshake`` belongs to one connection.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
import os
import struct
from dataclasses import dataclass

WIRE_VERSION = 1
SECRET_BYTES = 32
NONCE_BYTES = 32
PROOF_BYTES = hashlib.sha256().digest_size
MAX_LANES = 64

_MAGIC = b"CLMRHS01"
_HELLO = struct.Struct("<8sIIQQ32s")
_CHALLENGE = struct.Struct("<32s32s")

HELLO_BYTES = _HELLO.size
CHALLENGE_BYTES = _CHALLENGE.size
ACCEPT_BYTES = PROOF_BYTES

_LABEL_CHALLENGE = b"clamor handshake 1: server challenge\0"
_LABEL_PROOF = b"clamor handshake 1: client proof\0"
_LABEL_ACCEPT = b"clamor handshake 1: server accept\0"


class Refusal(enum.Enum):
    """Why a connection did not pass; the values name the counters."""

    BUSY = "busy"
    TIMEOUT = "timeout"
    CLOSED = "closed"
    GARBAGE = "garbage"
    VERSION = "version"
    WRONG_SERVER = "wrong_server"
    DENIED = "denied"
    ENGINE = "engine"


class HandshakeError(Exception):
    """The other side did not pass. ``refusal`` says why; the text is for the log."""

    def __init__(self, refusal: Refusal, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal


@dataclass(frozen=True)
class Hello:
    """What a client says about itself and the connection it wants.

    Args:
        client_id: The connecting server's id.
        server_id: The server that it means to reach.
        lane: Which of the connections between the two this is.
    """

    client_id: int
    server_id: int
    lane: int


def new_nonce() -> bytes:
    """32 bytes from the system's generator."""
    return os.urandom(NONCE_BYTES)


def _check_secret(secret: bytes) -> bytes:
    if len(secret) != SECRET_BYTES:
        raise ValueError(f"the secret has {len(secret)} bytes, not {SECRET_BYTES}")
    return secret


def _prove(secret: bytes, label: bytes, *said: bytes) -> bytes:
    # Every part has a fixed size, so that joining them is unambiguous.
    return hmac.new(secret, label + b"".join(said), hashlib.sha256).digest()


class ClientHandshake:
    """The connecting side: ``hello`` out, ``prove(challenge)`` out, ``finish(accept)``.

    Args:
        secret: The job's 32 secret bytes.
        hello: Who connects to whom.
        nonce: 32 fresh bytes; only tests pass one.

    Example:
        >>> secret = bytes(32)
        >>> client = ClientHandshake(secret, Hello(client_id=1, server_id=2, lane=0))
        >>> server = ServerHandshake(secret, server_id=2)
        >>> client.finish(server.accept(client.prove(server.challenge(client.hello))))
        >>> server.peer.client_id
        1
    """

    def __init__(self, secret: bytes, hello: Hello, nonce: bytes | None = None) -> None:
        self._secret = _check_secret(secret)
        self.hello = _HELLO.pack(
            _MAGIC,
            WIRE_VERSION,
            hello.lane,
            hello.client_id,
            hello.server_id,
            nonce if nonce is not None else new_nonce(),
        )
        self._challenge: bytes | None = None
        self._proof: bytes | None = None

    def prove(self, challenge: bytes) -> bytes:
        """Checks the server's proof and returns ours.

        Raises:
            HandshakeError: GARBAGE for a wrong size, DENIED for a wrong proof.
        """
        if len(challenge) != CHALLENGE_BYTES:
            raise HandshakeError(Refusal.GARBAGE, f"challenge of {len(challenge)} bytes")
        nonce, proof = _CHALLENGE.unpack(challenge)
        expected = _prove(self._secret, _LABEL_CHALLENGE, self.hello, nonce)
        if not hmac.compare_digest(proof, expected):
            raise HandshakeError(Refusal.DENIED, "the server does not know the secret")
        self._challenge = challenge
        self._proof = _prove(self._secret, _LABEL_PROOF, self.hello, challenge)
        return self._proof

    def finish(self, accept: bytes) -> None:
        """Checks the server's last word; after it the connection may carry data.

        Raises:
            HandshakeError: GARBAGE for a wrong size or order, DENIED for a wrong proof.
        """
        if self._challenge is None or self._proof is None or len(accept) != ACCEPT_BYTES:
            raise HandshakeError(Refusal.GARBAGE, f"accept of {len(accept)} bytes")
        expected = _prove(self._secret, _LABEL_ACCEPT, self.hello, self._challenge, self._proof)
        if not hmac.compare_digest(accept, expected):
            raise HandshakeError(Refusal.DENIED, "the server's acceptance is not genuine")


class ServerHandshake:
    """The accepting side: ``challenge(hello)`` out, ``accept(proof)`` out, then ``peer``.

    Args:
        secret: The job's 32 secret bytes.
        server_id: Ours; a client that means another server is refused.
        nonce: 32 fresh bytes; only tests pass one.
    """

    def __init__(self, secret: bytes, server_id: int, nonce: bytes | None = None) -> None:
        self._secret = _check_secret(secret)
        self._server_id = server_id
        self._nonce = nonce if nonce is not None else new_nonce()
        self._hello = b""
        self._challenge = b""
        self._said: Hello | None = None
        self._passed = False

    @property
    def peer(self) -> Hello:
        """What the client said, once it has proved it.

        Raises:
            HandshakeError: DENIED before ``accept`` succeeded.
        """
        if self._said is None or not self._passed:
            raise HandshakeError(Refusal.DENIED, "the peer has not passed")
        return self._said

    def challenge(self, hello: bytes) -> bytes:
        """Checks that the hello is for us and returns our challenge.

        Raises:
            HandshakeError: GARBAGE, VERSION or WRONG_SERVER.
        """
        if len(hello) != HELLO_BYTES:
            raise HandshakeError(Refusal.GARBAGE, f"hello of {len(hello)} bytes")
        magic, version, lane, client_id, server_id, _ = _HELLO.unpack(hello)
        if magic != _MAGIC:
            raise HandshakeError(Refusal.GARBAGE, "not a page server's hello")
        if version != WIRE_VERSION:
            raise HandshakeError(
                Refusal.VERSION, f"the peer speaks wire version {version}, we {WIRE_VERSION}"
            )
        if server_id != self._server_id:
            raise HandshakeError(
                Refusal.WRONG_SERVER, f"meant for server {server_id:#x}, not {self._server_id:#x}"
            )
        if client_id == 0 or lane >= MAX_LANES:
            raise HandshakeError(Refusal.GARBAGE, f"client {client_id:#x}, lane {lane}")
        self._said = Hello(client_id=client_id, server_id=server_id, lane=lane)
        self._hello = hello
        self._challenge = _CHALLENGE.pack(
            self._nonce, _prove(self._secret, _LABEL_CHALLENGE, hello, self._nonce)
        )
        return self._challenge

    def accept(self, proof: bytes) -> bytes:
        """Checks the client's proof and returns our acceptance.

        Raises:
            HandshakeError: GARBAGE for a wrong size or order, DENIED for a wrong proof.
        """
        if self._said is None or len(proof) != PROOF_BYTES:
            raise HandshakeError(Refusal.GARBAGE, f"proof of {len(proof)} bytes")
        expected = _prove(self._secret, _LABEL_PROOF, self._hello, self._challenge)
        if not hmac.compare_digest(proof, expected):
            raise HandshakeError(Refusal.DENIED, "the client does not know the secret")
        self._passed = True
        return _prove(self._secret, _LABEL_ACCEPT, self._hello, self._challenge, proof)
