"""What can go wrong, one class per case.

Every error is a `ClamorError`, carries the page cache's code where one applies (`code`) and one
sentence that says what to do (`hint`). All of them survive pickling, because Ray ships
exceptions between processes.
"""

from __future__ import annotations

from typing import Any, ClassVar

__all__ = [
    "AddressClashError",
    "ClamorError",
    "ClamorWarning",
    "ClosedError",
    "DeniedError",
    "DescriptorLimitError",
    "ExistsError",
    "ForkedError",
    "FreedError",
    "HomeLostError",
    "InternalError",
    "NotInitializedError",
    "OutOfMemoryError",
    "PrefetchTimeoutError",
    "ProtocolError",
    "RangeError",
    "RayClientError",
    "ServerUnavailableError",
    "SessionMismatchError",
    "SystemCallError",
    "TrapUnavailableError",
    "UnpicklableError",
    "UnsupportedPlatformError",
    "VersionMismatchError",
    "WaitTimeoutError",
]


class ClamorWarning(UserWarning):
    """Something works, but not the way it was probably meant."""


def _rebuild(cls: type[ClamorError], message: str, state: dict[str, Any]) -> ClamorError:
    error = cls(message)
    error.__dict__.update(state)
    return error


class ClamorError(Exception):
    """Base of everything this library raises on purpose.

    Args:
        message: what happened, as a sentence.
        code: the page cache's error code (`enum pc_err`), or None.
        hint: what to do about it; the class's own where none is given.
    """

    default_hint: ClassVar[str] = ""

    code: int | None
    hint: str

    def __init__(self, message: str, *, code: int | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.hint = self.default_hint if hint is None else hint

    @property
    def message(self) -> str:
        """What happened, without the hint."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".rstrip()

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, dict(self.__dict__))


class NotInitializedError(ClamorError):
    """There is no session in this process."""

    default_hint = "Call clamor.init() first."


class SessionMismatchError(NotInitializedError):
    """A reference belongs to a session that has ended, or to another cluster."""

    default_hint = (
        "Put the object again: a global variable lives as long as the session it was put in."
    )


class RayClientError(ClamorError):
    """The driver is connected through Ray Client (`ray://`)."""

    default_hint = (
        "A Ray Client driver has no page server beside it. Submit the program with "
        "`ray job submit`, or run it on a node of the cluster with address='auto'."
    )


class UnsupportedPlatformError(ClamorError):
    """Not Linux, or a processor with too few address bits."""

    default_hint = "The page cache needs 64-bit Linux; run the driver and the nodes there."


class UnpicklableError(ClamorError):
    """The object cannot be pickled, so it cannot be laid out in a region."""

    default_hint = (
        "Remove what cannot be pickled (locks, open files, connections) from the object, "
        "or give its class a __reduce__."
    )


class FreedError(ClamorError):
    """The global variable was freed, or never existed."""

    default_hint = "Put it again, and free it only when nothing will ask for it any more."


class HomeLostError(ClamorError):
    """The node that held the only copy of some blocks is gone."""

    default_hint = "Put the object again from its source; other global variables are not affected."


class ServerUnavailableError(ClamorError):
    """The page server of this node, or the registry, does not answer."""

    default_hint = (
        "See the page server's log in Ray's session directory; clamor.init() starts it anew."
    )


class VersionMismatchError(ClamorError):
    """The node runs another version of the library."""

    default_hint = (
        "Install the same clamor-ray on every node (or in the job's runtime_env), and restart."
    )


class AddressClashError(ClamorError):
    """Something else is mapped where the region must be."""

    default_hint = (
        "A library mapped memory at a fixed address inside the global address space "
        "(0x110000000000-0x290000000000); load it later, or configure it to stay out."
    )


class OutOfMemoryError(ClamorError, MemoryError):
    """The node has too little memory for what was asked."""

    default_hint = "Free other global variables, put fewer bytes at a time, or use a larger node."


class DescriptorLimitError(ClamorError):
    """The process or the page server is out of file descriptors."""

    default_hint = "Raise the limit (`ulimit -n 65536`) before Ray starts on the node."


class TrapUnavailableError(ClamorError):
    """The kernel refuses the trap that was asked for."""

    default_hint = "Set CLAMOR_TRAP=auto to take what the kernel allows, or CLAMOR_TRAP=sigsegv."


class WaitTimeoutError(ClamorError, TimeoutError):
    """A wait ended without an answer."""

    default_hint = "The page server is overloaded or unreachable; try again, or raise the timeout."


class PrefetchTimeoutError(WaitTimeoutError):
    """The blocks did not arrive in time. What did arrive stays."""

    default_hint = "Ask again with a longer timeout, or with wait=False."


class ProtocolError(ClamorError):
    """The other side sent something that makes no sense."""

    default_hint = "Make sure that nothing but clamor-ray connects to its sockets; else report it."


class DeniedError(ClamorError):
    """The other side refused our credentials."""

    default_hint = "Run the driver as the user who started Ray on this node."


class ForkedError(ClamorError):
    """This is a fork of the process that made the session, and could not attach by itself."""

    default_hint = "Use the 'spawn' start method, or call clamor only in the parent process."


class ClosedError(ClamorError):
    """The session was shut down while it was in use."""

    default_hint = "Call clamor.init() again, and put the objects again."


class ExistsError(ClamorError):
    """A region with this id exists already: two sessions share a page server."""

    default_hint = "Call clamor.shutdown() and clamor.init() again; if it comes back, report it."


class RangeError(ClamorError):
    """Blocks outside the region were asked for."""

    default_hint = "The reference and the page server disagree about the region; report it."


class SystemCallError(ClamorError):
    """A system call failed in a way that has no case of its own."""

    default_hint = "The message names the call and the reason."


class InternalError(ClamorError):
    """This should not happen."""

    default_hint = "Please report it with the message above."
