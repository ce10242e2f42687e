"""What a transaction holds of each variable: its private memory, and what was written to it."""

from __future__ import annotations

import contextlib
import pickle
import sys
import time
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._native.client import Runs
from clamor_ray._native.pieced_client import PiecedClient, PiecePart
from clamor_ray._objects import block_sets
from clamor_ray._objects.inplace import Fingerprint, check_in_place, fingerprint, is_worth_a_look
from clamor_ray._objects.layout import BLOCK_BYTES, Plan
from clamor_ray._protocol.messages import CommitRequest, Write
from clamor_ray._read.lease import Lease
from clamor_ray._read.ref import GlobalRef
from clamor_ray._read.state import State
from clamor_ray._session.session import Session
from clamor_ray._write.parity import ParityPart, blocks_of, parities_of
from clamor_ray._write.write_targets import WriteTarget

if TYPE_CHECKING:
    from clamor_ray._write.window import Window

ANSWER_MARGIN_S: Final = 5.0


@dataclass
class WriteSetEntry:
    """One variable while its transaction is open.

    Args:
        target: what the user passed.
        begin: the version that is worked on, frozen.
        plan: what lies where now; not the one of `begin` where the variable has grown.
        lease: of the private mapping; None where the object travels inside its reference.
        image: all bytes of it.
        raw: the object over `image`.
        value: what the block gets.
        before: what `raw` looked like, or None where it is not compared again.
        were_lost: blocks of `begin` that nobody has.
        window: of a variable in pieces: sends what was written to other nodes.
    """

    target: WriteTarget
    begin: GlobalRef[Any]
    plan: Plan
    lease: Lease | None
    image: Any
    raw: Any
    value: Any
    before: Fingerprint | None
    were_lost: BitMap = field(default_factory=BitMap)
    window: Window | None = None

    @property
    def name(self) -> str:
        return repr(self.target.ref)

    def _span(self) -> tuple[int, int]:
        start = int(self.image.__array_interface__["data"][0])
        return start, start + self.image.nbytes

    def look(self) -> None:
        if is_worth_a_look(self.raw, self.plan):
            self.before = fingerprint(self.raw, *self._span())

    def check_in_place(self) -> None:
        if self.before is not None:
            check_in_place(self.before, self.raw, *self._span(), self.name)

    def dirty(self, session: Session) -> Runs | None:
        """The blocks that were written; None where nothing was."""
        if self.lease is None:
            same = self.begin._payload == self.image.tobytes()
            return None if same else np.empty((0, 2), np.uint64)
        if self.window is not None:
            runs = self.window.written()
        else:
            runs = session.client.dirty(self.lease.mapping.id)
        return runs if len(runs) else None

    @property
    def is_whole(self) -> bool:
        """Whether its memory can be touched: see `Window.is_whole`."""
        return self.window is None or self.window.is_whole

    @property
    def is_large(self) -> bool:
        """Whether its layers go to their homes one after the other: a part of it was sent away, or
        is more than should be here twice."""
        window = self.window
        return window is not None and (
            window.has_sent or window.dirty_bytes() > window.budget_bytes
        )

    def state_at(self, version: int, rows: Mapping[int, bytes]) -> State:
        """Of the version that was committed; where nothing was written, of the one it began at.

        Args:
            version: its number.
            rows: what belongs to it of variables in pieces (`Committed.rows`).
        """
        row = rows.get(self.begin._region)
        is_known = self.begin._pieces is None or row is not None
        if version == self.begin.version or not is_known:  # it was freed since
            return self.begin._state
        payload = None if self.lease is not None else self.image.tobytes()
        return self.begin._state_after(self.plan, payload, version, row)


@dataclass(frozen=True)
class Change:
    """What one variable brings to a commit.

    Args:
        entry: the variable.
        runs: blocks that were written, counted from its first byte.
        parts: the same by region: one, or each piece that was written; none where the object
            travels inside its reference.
        parities: what that changes of parity pieces.
        were_lost: of the blocks, those that nobody has, by piece; where there is parity.
        in_turn: one layer after the other goes to its home, before the commit is asked for.
    """

    entry: WriteSetEntry
    runs: Runs
    parts: tuple[PiecePart, ...]
    parities: tuple[ParityPart, ...] = ()
    were_lost: Mapping[int, BitMap] = field(default_factory=dict)
    in_turn: bool = False

    @classmethod
    def of(cls, session: Session, entry: WriteSetEntry, runs: Runs) -> Change:
        """Those blocks of a variable."""
        if entry.lease is None:
            return cls(entry, runs, ())
        parts = tuple(session.client.parts(entry.lease.mapping.id, runs))
        lost = block_sets.runs(entry.were_lost) if entry.were_lost else []
        lost_parts = session.client.parts(entry.lease.mapping.id, np.array(lost, np.uint64))
        lost_of = {part.region: blocks_of(part.runs) for part in lost_parts if lost}
        parities = parities_of(entry.begin, parts, lost_of)
        written = {part.region: blocks_of(part.runs) for part in parts if parities}
        were_lost = {
            region: both
            for region, blocks in written.items()
            if (both := blocks & lost_of.get(region, BitMap()))
        }
        return cls(entry, runs, parts, parities, were_lost, in_turn=entry.is_large)

    @property
    def room_bytes(self) -> int:
        """How much memory its layers need here at the same time."""
        runs = [part.runs for part in self.parts] + [each.runs() for each in self.parities]
        layers = [layer_bytes_of(len(some), int(some[:, 1].sum())) for some in runs]
        return max(layers, default=0) if self.in_turn else sum(layers)

    def _region(self, part: PiecePart) -> int:
        return part.region or self.entry.begin._region

    def writes(self, server_id: int) -> tuple[Write, ...]:
        """What the registry is told, the variable first."""
        entry, begin = self.entry, self.entry.begin
        plan = None if entry.plan == begin._plan else pickle.dumps(entry.plan)
        whole = replace(of_variable(begin._region, begin.version), plan=plan)
        if entry.lease is None:
            return (replace(whole, payload=entry.image.tobytes()),)
        if begin._pieces is None:
            return (_with_blocks(whole, self.runs, server_id),)
        pieces = [(part.region, part.version, part.runs) for part in self.parts]
        pieces += [(each.region, each.version, each.runs()) for each in self.parities]
        written = (
            _with_blocks(
                replace(whole, region=region, base_version=version, plan=None), runs, server_id
            )
            for region, version, runs in pieces
        )
        lost = {region: bytes(blocks.serialize()) for region, blocks in self.were_lost.items()}
        return (whole, *(replace(e, were_lost=lost.get(e.region, b"")) for e in written))

    def stage(self, session: Session, commit_id: int, timeout_s: float) -> dict[int, int]:
        """Copies the blocks to this node's page server, or, in turn, to their homes.

        Returns:
            Which page server has each region's layer.

        Raises:
            See `Client.stage`; in turn also what `Commits.bring` raises.
        """
        client = session.client
        if self.in_turn:
            return self._stage_in_turn(session, commit_id, timeout_s)
        staged_at = {
            self._region(part): client.stage(
                part.mapping_id, commit_id, part.runs, timeout_s=timeout_s
            )
            for part in self.parts
        }
        for each in self.parities:
            staged_at[each.region] = each.stage(client, commit_id, timeout_s)
        return staged_at

    def _stage_in_turn(self, session: Session, commit_id: int, timeout_s: float) -> dict[int, int]:
        """This node keeps the last layer only. It must have one: if this process dies, that makes
        its page server ask what became of the commit, and homes need not wait until they do."""
        staged_at: dict[int, int] = {}
        before: int | None = None
        parts: list[PiecePart | ParityPart] = [*self.parts, *self.parities]
        for part in parts:
            region = self._region(part) if isinstance(part, PiecePart) else part.region
            here, home = self._bring(session, part, commit_id, timeout_s)
            if before is not None:
                session.client.resolve(commit_id, before, 0)
            before = None if here == home else region
            staged_at[region] = home
        return staged_at

    def _bring(
        self, session: Session, part: PiecePart | ParityPart, commit_id: int, timeout_s: float
    ) -> tuple[int, int]:
        """A layer goes to its home. Returns: the page server here, and the home."""
        client = session.client
        # What was sent to other nodes comes back for that. Where it is lost, this says so; the copy
        # would end the process.
        patience_s = session.config.patience_s
        for each in (part,) if isinstance(part, PiecePart) else part.parts:
            client.prefetch(each.mapping_id, each.runs, wait=True, timeout_s=patience_s)
        if isinstance(part, ParityPart):
            staged_at = part.stage(client, commit_id, timeout_s)
            write = of_layer(part.region, part.version, part.runs(), staged_at)
            return staged_at, brought(session, CommitRequest(commit_id, (write,), timeout_s))
        region = self._region(part)
        staged_at = client.stage(
            part.mapping_id, commit_id, part.runs, timeout_s=timeout_s, of=(region, part.version)
        )
        write = of_layer(region, part.version, part.runs, staged_at)
        return staged_at, brought(session, CommitRequest(commit_id, (write,), timeout_s))

    def resolve(self, client: PiecedClient, commit_id: int, versions: Mapping[int, int]) -> None:
        """Tells the page server what became of the layers. The registry tells it as well: this only
        makes it sooner."""
        for part in self.parts:
            region = self._region(part)
            with contextlib.suppress(errors.ClamorError):
                client.resolve(commit_id, region, versions.get(region, 0), part.mapping_id)
        for each in self.parities:
            with contextlib.suppress(errors.ClamorError):
                client.resolve(commit_id, each.region, versions.get(each.region, 0))


def brought(session: Session, request: CommitRequest) -> int:
    """The home that has the layer. While the registry or the home restarts it is asked again."""
    deadline = time.monotonic() + session.config.reattach_s
    while True:
        try:
            return session.rpc.bring(request, timeout_s=request.timeout_s + ANSWER_MARGIN_S)
        except errors.ServerUnavailableError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(0.1)


def rows_at(
    session: Session, refs: Iterable[GlobalRef[Any]], versions: Mapping[int, int]
) -> dict[int, bytes]:
    """As `Committed.rows`, of a commit whose answer was lost; none of a variable that was freed
    since, or of a version that is kept no longer.

    Raises:
        ServerUnavailableError, WaitTimeoutError: The registry does not answer.
    """
    rows: dict[int, bytes] = {}
    for ref in refs:
        if ref._pieces is None or ref._region not in versions:
            continue
        with contextlib.suppress(errors.FreedError, errors.SnapshotExpired, errors.HomeLostError):
            row = session.rpc.at(ref._region, versions[ref._region]).payload
            if row is not None:
                rows[ref._region] = row
    return rows


def of_variable(region: int, base_version: int) -> Write:
    """A write that makes a version of a variable, and changes no block of it."""
    return Write(
        region=region,
        base_version=base_version,
        n_blocks=0,
        blocks=b"",
        layer_bytes=0,
        staged_at=0,
    )


def of_layer(region: int, base_version: int, runs: Runs, server_id: int = 0) -> Write:
    """A write of some blocks of a region, which a page server has as a layer."""
    return _with_blocks(of_variable(region, base_version), runs, server_id)


def _with_blocks(write: Write, runs: Runs, server_id: int) -> Write:
    blocks = blocks_of(runs)
    return replace(
        write,
        n_blocks=len(blocks),
        blocks=blocks.serialize(),
        layer_bytes=layer_bytes_of(len(runs), len(blocks)),
        staged_at=server_id,
    )


_LAYER_HEAD_BYTES: Final = 56  # struct pc__layer_head
_RUN_BYTES: Final = 16


def layer_bytes_of(n_runs: int, n_blocks: int) -> int:
    """Size of the file that the blocks of a commit travel in (`pc__layer_data_offset`).

    Example:
        >>> layer_bytes_of(1, 1), layer_bytes_of(253, 1000)
        (8192, 4104192)
    """
    head = _LAYER_HEAD_BYTES + n_runs * _RUN_BYTES
    return (-(-head // BLOCK_BYTES) + n_blocks) * BLOCK_BYTES


def warn_if_rebound(entry: WriteSetEntry) -> None:
    """`x = x + 1` leaves the object as it was, and drops the last reference to it."""
    if entry.target.open_as is not None:
        return
    # Ours: entry.raw, entry.value, and the argument of getrefcount.
    if type(entry.raw) is np.ndarray and sys.getrefcount(entry.raw) <= 3:
        warnings.warn(
            f"Nothing of {entry.name} was changed: `x = x + 1` makes a new array, `x += 1` and "
            "`x[...] = x + 1` change the one of the block.",
            errors.ClamorWarning,
            stacklevel=5,
        )
