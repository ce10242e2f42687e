"""The handshake as bytes: who passes, and what each way of not passing is called."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clamor_ray._protocol.handshake import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    MAX_LANES,
    PROOF_BYTES,
    ClientHandshake,
    HandshakeError,
    Hello,
    Refusal,
    ServerHandshake,
)

SECRET = bytes(range(32))
OTHER = bytes(reversed(range(32)))
HELLO = Hello(client_id=0x1111, server_id=0x2222, lane=3)

# Proofs of CHALLENGE, PROOF and ACCEPT for the fixed nonces below.
GOLDEN = (
    "b4b25a58743f1313757f84c7f883ba03140f448beb3f8d96e419835ed891972d",
    "e0f4aa0630a3cbab89f5c8da8dbb5fd67135d00ea8ab8801755725de0a12cd2c",
    "1cf9f40a3e07d37ef83fa44b50d1e2d65ebdb75bcdac88fef8994ca563ffcd83",
)


@contextlib.contextmanager
def refused(refusal: Refusal):
    with pytest.raises(HandshakeError) as caught:
        yield
    assert caught.value.refusal is refusal


def test_both_sides_pass_and_the_server_knows_the_client() -> None:
    client, server = ClientHandshake(SECRET, HELLO), ServerHandshake(SECRET, HELLO.server_id)
    client.finish(server.accept(client.prove(server.challenge(client.hello))))
    assert server.peer == HELLO


def test_the_bytes_of_wire_version_1() -> None:
    nonce_c, nonce_s = b"c" * 32, b"s" * 32
    client = ClientHandshake(SECRET, HELLO, nonce_c)
    server = ServerHandshake(SECRET, HELLO.server_id, nonce_s)
    challenge = server.challenge(client.hello)
    proof = client.prove(challenge)
    accept = server.accept(proof)
    assert client.hello == (
        b"CLMRHS01"
        + b"\x01\0\0\0"
        + b"\x03\0\0\0"
        + b"\x11\x11"
        + bytes(6)
        + b"\x22\x22"
        + bytes(6)
        + nonce_c
    )
    assert challenge[:32] == nonce_s
    assert (len(client.hello), len(challenge), len(proof), len(accept)) == (64, 64, 32, 32)
    assert challenge[32:].hex() == GOLDEN[0]
    assert proof.hex() == GOLDEN[1]
    assert accept.hex() == GOLDEN[2]


def test_a_client_without_the_secret_is_denied() -> None:
    client, server = ClientHandshake(OTHER, HELLO), ServerHandshake(SECRET, HELLO.server_id)
    challenge = server.challenge(client.hello)
    with refused(Refusal.DENIED):
        client.prove(challenge)
    with refused(Refusal.DENIED):
        server.accept(bytes(PROOF_BYTES))
    with refused(Refusal.DENIED):
        _ = server.peer


def test_a_client_that_does_not_check_us_is_denied_all_the_same() -> None:
    server = ServerHandshake(SECRET, HELLO.server_id)
    client = ClientHandshake(OTHER, HELLO)
    imposter = ServerHandshake(OTHER, HELLO.server_id)
    server.challenge(client.hello)
    with refused(Refusal.DENIED):
        server.accept(client.prove(imposter.challenge(client.hello)))


def test_a_recorded_session_is_worthless() -> None:
    client, server = ClientHandshake(SECRET, HELLO), ServerHandshake(SECRET, HELLO.server_id)
    proof = client.prove(server.challenge(client.hello))
    server.accept(proof)
    again = ServerHandshake(SECRET, HELLO.server_id)
    again.challenge(client.hello)
    with refused(Refusal.DENIED):
        again.accept(proof)


def test_a_reflected_proof_is_worthless() -> None:
    client, server = ClientHandshake(SECRET, HELLO), ServerHandshake(SECRET, HELLO.server_id)
    challenge = server.challenge(client.hello)
    with refused(Refusal.DENIED):
        server.accept(challenge[32:])


def test_the_acceptance_of_another_session_is_worthless() -> None:
    client, server = ClientHandshake(SECRET, HELLO), ServerHandshake(SECRET, HELLO.server_id)
    accept = server.accept(client.prove(server.challenge(client.hello)))
    second = ClientHandshake(SECRET, HELLO)
    second.prove(ServerHandshake(SECRET, HELLO.server_id).challenge(second.hello))
    with refused(Refusal.DENIED):
        second.finish(accept)


def test_another_server_another_version_another_protocol() -> None:
    client = ClientHandshake(SECRET, HELLO)
    with refused(Refusal.WRONG_SERVER):
        ServerHandshake(SECRET, 0x3333).challenge(client.hello)
    server = ServerHandshake(SECRET, HELLO.server_id)
    with refused(Refusal.VERSION):
        server.challenge(client.hello[:8] + b"\x02\0\0\0" + client.hello[12:])
    with refused(Refusal.GARBAGE):
        server.challenge(b"GET / HTTP/1.1\r\n".ljust(HELLO_BYTES, b" "))


@pytest.mark.parametrize(
    "hello",
    [
        dataclasses.replace(HELLO, client_id=0),
        dataclasses.replace(HELLO, lane=MAX_LANES),
        dataclasses.replace(HELLO, lane=2**32 - 1),
    ],
)
def test_values_that_make_no_sense(hello: Hello) -> None:
    with refused(Refusal.GARBAGE):
        ServerHandshake(SECRET, HELLO.server_id).challenge(ClientHandshake(SECRET, hello).hello)


@pytest.mark.parametrize("change", [-1, 1, 4096])
def test_sizes_are_exact(change: int) -> None:
    client, server = ClientHandshake(SECRET, HELLO), ServerHandshake(SECRET, HELLO.server_id)
    with refused(Refusal.GARBAGE):
        server.challenge(bytes(HELLO_BYTES + change))
    server.challenge(client.hello)
    with refused(Refusal.GARBAGE):
        server.accept(bytes(PROOF_BYTES + change))
    with refused(Refusal.GARBAGE):
        client.prove(bytes(CHALLENGE_BYTES + change))


def test_steps_out_of_order() -> None:
    with refused(Refusal.GARBAGE):
        ServerHandshake(SECRET, HELLO.server_id).accept(bytes(PROOF_BYTES))
    with refused(Refusal.GARBAGE):
        ClientHandshake(SECRET, HELLO).finish(bytes(PROOF_BYTES))


def test_a_short_secret_is_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match="31 bytes"):
        ClientHandshake(SECRET[:-1], HELLO)
    with pytest.raises(ValueError, match="0 bytes"):
        ServerHandshake(b"", 1)


@given(st.integers(0, HELLO_BYTES * 8 - 1))
def test_no_bit_of_the_hello_may_change_on_the_way(bit: int) -> None:
    client, server = ClientHandshake(SECRET, HELLO), ServerHandshake(SECRET, HELLO.server_id)
    changed = bytearray(client.hello)
    changed[bit // 8] ^= 1 << bit % 8
    with pytest.raises(HandshakeError):
        server.accept(client.prove(server.challenge(bytes(changed))))


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else_is_raised(hello: bytes, proof: bytes) -> None:
    server = ServerHandshake(SECRET, HELLO.server_id)
    with pytest.raises(HandshakeError):
        server.challenge(hello)
    with pytest.raises(HandshakeError):
        server.accept(proof)
