"""What a process does that finds its node's page server missing, or slow to answer."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clamor_ray._protocol import names
from clamor_ray._session.session import FIRST_LOOK_S, Session


class Asked(Exception):
    """The registry was asked for the page server."""


@pytest.fixture
def below() -> Iterator[Path]:
    """Below a short one: the kernel takes 107 bytes for a socket's path."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        yield Path(directory)


def first_look(scope: str, below: Path) -> float:
    """Seconds until a session asks the registry."""

    def ensure_server() -> Any:
        raise Asked

    session = SimpleNamespace(
        scope=scope,
        node_id="0" * 56,
        config=SimpleNamespace(
            reattach_s=30.0, connect_timeout_s=5.0, trap="auto", socket_dir=str(below)
        ),
        ensure_server=ensure_server,
    )
    begun_s = time.monotonic()
    with pytest.raises(Asked):
        Session._connect(session)  # type: ignore[arg-type]
    return time.monotonic() - begun_s


def test_no_server_is_asked_for_at_once(below: Path) -> None:
    assert first_look("a" * 12, below) < FIRST_LOOK_S + 2


def test_a_server_that_is_slow_to_answer_is_no_error(below: Path) -> None:
    """It listens, and its first answer takes longer than the first look."""
    scope = "b" * 12
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        os.mkdir(names.socket_directory(str(below)))
        server.bind(names.server_socket(scope, "0" * 56, str(below)))
        server.listen(1)
        assert first_look(scope, below) < FIRST_LOOK_S + 2
