"""What holds a secret does not show it: a log or an error that has such an object tells nothing."""

from __future__ import annotations

import base64
import os
from typing import Any

import pytest

from clamor_ray._protocol.handshake import ClientHandshake, Hello, ServerHandshake
from clamor_ray._protocol.rendezvous import Meeting
from clamor_ray._ring.joining import _Joining
from clamor_ray._ring.members import Member
from tests.support.secret_forms import forms

SECRET = bytes(range(0xA0, 0xC0))


def shown(said: bytes, secret: bytes) -> list[str]:
    return [form for form, text in forms(secret).items() if text in said]


@pytest.mark.parametrize(
    "holder",
    [
        Meeting(1, SECRET, ()),
        Member("scope", 0, None, SECRET, (0,)),  # type: ignore[arg-type]
        _Joining(b"group", SECRET, (), 0, 1, 0.0),
        ClientHandshake(SECRET, Hello(client_id=1, server_id=2, lane=0)),
        ServerHandshake(SECRET, server_id=2),
    ],
    ids=lambda holder: type(holder).__name__,
)
def test_its_text_has_no_secret(holder: Any) -> None:
    for said in (repr(holder), str(holder), f"{holder}", repr([holder])):
        assert shown(said.encode(), SECRET) == []


@pytest.mark.parametrize("how", ["raw", "hex", "HEX", "base64", "URL", "repr", "list"])
def test_a_secret_is_found(how: str) -> None:
    """In something longer, wherever in it; and nothing is found where it is not."""
    secret = os.urandom(32)
    for n_before in range(4):
        longer = b"x" * n_before + secret + b"y"
        said = {
            "raw": longer,
            "hex": longer.hex().encode(),
            "HEX": longer.hex().upper().encode(),
            "base64": base64.b64encode(longer),
            "URL": base64.urlsafe_b64encode(longer),
            "repr": repr(longer).encode(),
            "list": str(list(longer)).encode(),
        }[how]
        assert shown(said, secret)
        assert not shown(said, os.urandom(32))
        assert shown(said[: len(said) // 2 + 1], secret)  # also of a part of it
