"""What a process does that finds its node's page server missing, or slow to answer."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace
from typing import Any

import pytest

from clamor_ray import _names
from clamor_ray._session import FIRST_LOOK_S, Session


class Asked(Exception):
    """The registry was asked for the page server."""


def first_look(scope: str) -> float:
    """Seconds until a session asks the registry."""

    def ensure_server() -> Any:
        raise Asked

    session = SimpleNamespace(
        scope=scope,
        node_id="0" * 56,
        config=SimpleNamespace(reattach_s=30.0, connect_timeout_s=5.0, trap="auto"),
        ensure_server=ensure_server,
    )
    begun_s = time.monotonic()
    with pytest.raises(Asked):
        Session._connect(session)  # type: ignore[arg-type]
    return time.monotonic() - begun_s


def test_no_server_is_asked_for_at_once() -> None:
    assert first_look("a" * 12) < FIRST_LOOK_S + 2


def test_a_server_that_is_slow_to_answer_is_no_error() -> None:
    """It listens, and its first answer takes longer than the first look."""
    scope = "b" * 12
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind("\0" + _names.server_socket(scope, "0" * 56))
        server.listen(1)
        assert first_look(scope) < FIRST_LOOK_S + 2
