"""Where this process is attached, as its environment tells those that it starts."""

from __future__ import annotations

import os
from typing import Final

VARIABLE: Final = "CLAMOR_ATTACHED_NODE"


def announce(node_id: str, sockets_below: str) -> None:
    """Tells processes that this one will start where they are, and where the sockets lie."""
    os.environ[VARIABLE] = f"{node_id}:{os.getpid()}:{sockets_below}"


def announced() -> tuple[str, str] | None:
    """The node that the process which started this one was attached on, and the directory below
    which its sockets lie."""
    node_id, pid, sockets_below = (*os.environ.get(VARIABLE, "").split(":", 2), "", "")[:3]
    return (node_id, sockets_below) if sockets_below and pid != str(os.getpid()) else None
