"""Blocks that were written here and have no room here: a variable on other nodes holds them.

The variable is as any other, in pieces like those of what is written. Nobody but its maker knows
of it: if that dies, it is freed as any other variable is to which nobody refers. A piece is sent
there by a commit, so it is there whole or not at all.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from clamor_ray import errors
from clamor_ray._native.client import Runs
from clamor_ray._native.pieced_client import PieceVersion
from clamor_ray._objects.memory import check_room
from clamor_ray._protocol.messages import CommitRequest
from clamor_ray._write.write_set import ANSWER_MARGIN_S, brought, of_layer, of_variable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from clamor_ray._read.ref import GlobalRef
    from clamor_ray._session.session import Session

LEAST_COPY_RATE: Final = 50e6  # bytes per second, for deadlines
MOST_TRIES: Final = 3  # of a commit that the registry took for dead
SENT_HINT: Final = (
    "Nothing is lost: what was written is still here. Free other global variables, or add nodes, "
    "and try again."
)


class Scratch:
    """See the file's head. For one thread at a time.

    Args:
        session: whose it is.
        ref: the variable, of zeros.
    """

    def __init__(self, session: Session, ref: GlobalRef[Any]) -> None:
        self._session = session
        self._ref = ref
        self._version = 0
        self._pieces = ref._piece_versions()
        self._in_doubt: tuple[int, int] | None = None  # a commit, and the piece that it is to

    @classmethod
    def make(
        cls,
        session: Session,
        region_bytes: int,
        piece_bytes: int,
        *,
        or_here: bool = False,
        on_disk: bool = False,
    ) -> Scratch | None:
        """A new one, on the disk of this node or on others. Where there is no other node: None,
        or, with `or_here`, one on this node.

        Raises:
            OutOfMemoryError, ServerUnavailableError, WaitTimeoutError: Not now.
        """
        ref = session.creator.scratch(region_bytes, piece_bytes, or_here=or_here, on_disk=on_disk)
        return None if ref is None else cls(session, ref)

    @property
    def pieces(self) -> list[PieceVersion]:
        """All of them, at their newest versions."""
        return list(self._pieces)

    def write(self, index: int, part_id: int, runs: Runs) -> None:
        """Makes blocks of a mapping the content of a piece. The mapping stays as it is.

        Args:
            index: of the piece.
            part_id: of a private mapping of the piece's length.
            runs: of its blocks; sorted and disjoint, at least one.

        Raises:
            OutOfMemoryError, ServerUnavailableError, WaitTimeoutError, JournalFullError: Not now.
            HomeLostError: The piece is lost: so is all that was sent to it before.
        """
        self._settle()
        for left in reversed(range(MOST_TRIES)):
            try:
                self._write(index, part_id, runs)
                return
            except errors.CommitAbortedError:
                if not left:
                    raise

    def _write(self, index: int, part_id: int, runs: Runs) -> None:
        session, piece, commit_id = self._session, self._pieces[index], secrets.randbits(64) or 1
        write = of_layer(piece.region, piece.version, runs)
        timeout_s = session.config.control_timeout_s + write.layer_bytes / LEAST_COPY_RATE
        check_room(write.layer_bytes, "A piece on its way to another node", SENT_HINT)
        try:
            here = session.client.stage(
                part_id, commit_id, runs, timeout_s=timeout_s, of=(piece.region, piece.version)
            )
            home = brought(
                session, CommitRequest(commit_id, (replace(write, staged_at=here),), timeout_s)
            )
            if home != here:
                # Before the commit: a page server retains what its node has committed, and this
                # node is to be rid of it.
                self._resolve(commit_id, piece.region, 0)
            whole = of_variable(self._ref._region, self._version)
            request = CommitRequest(commit_id, (whole, replace(write, staged_at=home)), timeout_s)
            versions = self._until_answered(request, index)
        except BaseException:
            if self._in_doubt is None:
                self._resolve(commit_id, piece.region, 0)
                with contextlib.suppress(errors.ClamorError):  # the home asks in its own time
                    session.rpc.outcome(commit_id, True)
            raise
        self._made(index, versions)
        if home == here:
            self._resolve(commit_id, piece.region, versions[piece.region])

    def _made(self, index: int, versions: Mapping[int, int]) -> None:
        self._version = versions[self._ref._region]
        piece = self._pieces[index]
        self._pieces[index] = piece._replace(version=versions[piece.region])

    def _settle(self) -> None:
        """Finds out what became of a commit whose answer was lost: the next one stands on it."""
        if self._in_doubt is not None:
            commit_id, index = self._in_doubt
            versions = dict(self._session.rpc.outcome(commit_id, True))
            self._in_doubt = None
            if versions:
                self._made(index, versions)

    def _until_answered(self, request: CommitRequest, index: int) -> dict[int, int]:
        """The versions that it made. Where the answer does not come it is in doubt."""
        session = self._session
        deadline = time.monotonic() + session.config.reattach_s
        while True:
            self._in_doubt = (request.commit_id, index)
            try:
                timeout_s = request.timeout_s + ANSWER_MARGIN_S
                versions = session.rpc.commit(request, timeout_s=timeout_s).versions
            except errors.ServerUnavailableError:  # the same id gets the same answer
                if time.monotonic() >= deadline:
                    raise
            except (errors.WaitTimeoutError, errors.InternalError):
                raise
            except errors.ClamorError:
                self._in_doubt = None  # it said no
                raise
            else:
                self._in_doubt = None
                return versions
            time.sleep(0.1)

    def _resolve(self, commit_id: int, region: int, version: int) -> None:
        with contextlib.suppress(errors.ClamorError):  # the registry tells it as well
            self._session.client.resolve(commit_id, region, version)

    def end(self) -> None:
        """Frees it. What is mapped of it stays readable. Where that cannot be said now, it goes
        with the last reference."""
        with contextlib.suppress(errors.ClamorError):
            self._ref.free()
