"""What opens references: the sessions of this process, for those who read and lie below them.

A session maps what a reference names, so it stands on this folder, and nothing here imports it. It
gives itself (`give`) when it is loaded. A process that was only sent references has not loaded it:
then the first that must be opened does, by what the package has left here (`load_by`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from clamor_ray._read.lease import Leased
    from clamor_ray._session.session import Session


class Sessions(NamedTuple):
    """Functions of `_session/process_sessions.py`, which says what they do."""

    current: Callable[[str | None], Session]
    with_current: Callable[[Callable[[Session], Any]], Any]
    sessions: Callable[[], tuple[Session, ...]]
    at_address: Callable[[int], tuple[Session, Leased] | None]


_given: Sessions | None = None
_load: Callable[[], object] | None = None


def give(sessions: Sessions) -> None:
    """What opens references from now on."""
    global _given
    _given = sessions


def load_by(load: Callable[[], object]) -> None:
    """What is called where a reference must be opened and nobody has given what does."""
    global _load
    _load = load


def given() -> Sessions:
    """What opens references; loaded where it is not yet."""
    if _given is None:
        assert _load is not None
        _load()
        assert _given is not None
    return _given


def current(scope: str | None = None) -> Session:
    """The session of that scope; in a worker, attaches to it first. None: the job's.

    Raises:
        NotInitializedError: There is none.
        SessionMismatchError: It is another than the reference's.
    """
    return given().current(scope)


def sessions() -> tuple[Session, ...]:
    """All that this process is attached to."""
    return () if _given is None else _given.sessions()


def at_address(address: int) -> tuple[Session, Leased] | None:
    """What lies there, and of which session; None where it is nothing of ours."""
    return None if _given is None else _given.at_address(address)
