"""Sessions that end while this process lives: who hears of it, and what they leave behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from clamor_ray import errors
from clamor_ray._read.lease import LeaseTable

if TYPE_CHECKING:
    from clamor_ray._session.session import Session

at_end: list[Callable[[Session], None]] = []  # called when a session ends in this process
when_found: list[Callable[[Session], None]] = []  # when its driver ended it behind our back
left: list[LeaseTable] = []  # of sessions that were closed: their addresses are taken
scopes: set[str] = set()  # of sessions that ended in this process's lifetime


def raise_ended(scope: str) -> NoReturn:
    """Of a session whose driver has gone."""
    raise errors.SessionEndedError(
        f"Session {scope} has ended: its driver has, or somebody has called clamor.shutdown()."
    )


def raise_mismatch(scope: str) -> NoReturn:
    """Of a scope that this process cannot attach to."""
    if scope in scopes:
        raise_ended(scope)
    raise errors.SessionMismatchError(
        f"The reference belongs to session {scope}, which has ended, or is of another cluster."
    )
