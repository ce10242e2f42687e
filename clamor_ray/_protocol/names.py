"""How sessions are named, so that a worker finds its driver's without being told.

A scope is 12 hex digits: 6 from the job, the same in every process of it, and 6 of this session,
so that a reference from a session that has ended is never taken for one of its successor. Of a
session with a name the first 6 are from its name, and its registry's actor has that name: so Ray
sees to it that there is one.
"""

from __future__ import annotations

import functools
import hashlib
import os
import secrets
from typing import Final

NAMESPACE: Final = "clamor"
SOCKETS_BELOW: Final = "/tmp"
# What the kernel takes, less the rest of the longest path: the directory's name with a user id of
# 32 bits, and a keeper's file.
SOCKETS_BELOW_BYTES: Final = 107 - len("/clamor-4294967295/") - (12 + 1 + 16 + 1 + 16 + 7)
_REGISTRY: Final = "registry-"
_NAMED: Final = "session-"
NAME_CHARACTERS: Final = 200  # of a variable's or a session's name, at most


def check_name(name: object, what: str) -> str:
    """A name that a program gives a variable or a session.

    Args:
        name: 1 to 200 characters, each of which can be printed.
        what: has it, for the message.

    Raises:
        TypeError: It is no string.
        ValueError: It is empty, too long, or has other characters.
    """
    if not isinstance(name, str):
        raise TypeError(f"the name of a {what} is a string, not {type(name).__qualname__}")
    if not name or len(name) > NAME_CHARACTERS or not name.isprintable() or name != name.strip():
        raise ValueError(
            f"the name of a {what} has 1 to {NAME_CHARACTERS} characters that can be printed, "
            f"without spaces around it; {name!r} does not"
        )
    return name


def job_part(gcs_address: str, job_id: str) -> str:
    """What all scopes of a job begin with."""
    return hashlib.sha256(f"{gcs_address}\0{job_id}".encode()).hexdigest()[:6]


def new_scope(gcs_address: str, job_id: str) -> str:
    """A scope for a session that begins now."""
    return job_part(gcs_address, job_id) + secrets.token_hex(3)


def registry_name(scope: str, session_name: str = "") -> str:
    """The actor name of a session's registry.

    Args:
        scope: of the session.
        session_name: "" for one that ends with its driver.
    """
    return f"{_NAMED}{session_name}" if session_name else f"{_REGISTRY}{scope}"


def _named_part(session_name: str) -> str:
    """What all scopes of sessions of a name begin with."""
    return hashlib.sha256(f"session\0{session_name}".encode()).hexdigest()[:6]


def new_named_scope(session_name: str) -> str:
    """A scope for a session of that name that begins now."""
    return _named_part(session_name) + secrets.token_hex(3)


def page_server_name(scope: str, node_id: str) -> str:
    """The actor name of a node's page server."""
    return f"page-server-{scope}-{node_id[:16]}"


def program_name(scope: str, token: str) -> str:
    """The actor name of a program's controller. Those of its workers begin with it and "-"."""
    return f"program-{scope}-{token}"


def programs_of(actor_names: list[str], scope: str) -> list[str]:
    """The controllers of a session's programs among the names of actors.

    Example:
        >>> programs_of(["program-aaaaaa000001-x", "program-aaaaaa000001-x-w1"], "aaaaaa000001")
        ['program-aaaaaa000001-x']
    """
    begins = program_name(scope, "")
    return [
        name
        for name in actor_names
        if name.startswith(begins) and "-" not in name.removeprefix(begins)
    ]


def names_of_sessions(actor_names: list[str], scope: str = "") -> list[str]:
    """The names of sessions among the names of actors.

    Args:
        actor_names: in our namespace.
        scope: only those that may have this scope.

    Example:
        >>> names_of_sessions(["registry-aaaaaa000001", "session-index"])
        ['index']
        >>> names_of_sessions(["session-index"], new_named_scope("index"))
        ['index']
    """
    found = [name.removeprefix(_NAMED) for name in actor_names if name.startswith(_NAMED)]
    return [name for name in found if not scope or scope.startswith(_named_part(name))]


def scopes(actor_names: list[str]) -> list[str]:
    """Those of the sessions without a name, among the names of actors."""
    return [name.removeprefix(_REGISTRY) for name in actor_names if name.startswith(_REGISTRY)]


def job_key(part: str) -> str:
    """In Ray's key-value store: which session a job's driver has attached to by name.

    Args:
        part: what `job_part` returns; "" for what all such keys begin with.
    """
    return f"session-of-{part}"


def journal_directory(scope: str) -> str:
    """The name of the registry's directory, below Ray's directory of the cluster."""
    return f"clamor-registry-{scope}"


def scopes_of_job(actor_names: list[str], part: str) -> list[str]:
    """The scopes of a job among the names of actors.

    Example:
        >>> scopes_of_job(["registry-aaaaaa000001", "registry-bbbbbb000002", "x"], "aaaaaa")
        ['aaaaaa000001']
    """
    return [scope for scope in scopes(actor_names) if scope.startswith(part)]


def socket_directory(below: str) -> str:
    """This user's directory of Unix sockets, which no other user can enter.

    Args:
        below: A directory that exists: CLAMOR_SOCKET_DIR.
    """
    return f"{below.rstrip('/')}/clamor-{os.geteuid()}"


def below_which(socket: str) -> str:
    """The directory below which the one of a socket is."""
    return os.path.dirname(os.path.dirname(socket))


def server_socket(scope: str, node_id: str, below: str) -> str:
    """The path of the Unix socket of a node's page server; `below` as above."""
    return f"{socket_directory(below)}/{scope}-{node_id[:16]}"


def news_socket(server_socket: str) -> str:
    """The path of the Unix socket where the same page server tells of new versions."""
    return f"{server_socket}-news"


def keeper_socket(scope: str, node_id: str, server_id: int, below: str) -> str:
    """The path of the Unix socket of a page server's keeper; `below` as above."""
    return f"{server_socket(scope, node_id, below)}-{server_id:x}-keeper"


@functools.lru_cache(maxsize=1024)
def server_id_of(node_id: str, life: int = 0) -> int:
    """The id of a node's page server: 64 bits, never 0, the same after a restart.

    Args:
        node_id: Ray's hex id.
        life: How many page servers of the node were lost before, with all that they held.

    Example:
        >>> server_id_of("ab" * 28) == server_id_of("ab" * 28) != 0
        True
    """
    again = f"\0{life}" if life else ""
    digest = hashlib.sha256(b"clamor page server\0" + f"{node_id}{again}".encode()).digest()
    return int.from_bytes(digest[:8], "little") or 1
