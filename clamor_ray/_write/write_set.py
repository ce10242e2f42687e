"""What a transaction holds of each variable: its private memory, and what was written to it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from pyroaring import BitMap

from clamor_ray._native.client import Runs
from clamor_ray._objects.inplace import Fingerprint, check_in_place, fingerprint, is_worth_a_look
from clamor_ray._objects.layout import BLOCK_BYTES, Plan
from clamor_ray._protocol.messages import Write
from clamor_ray._read.lease import Lease
from clamor_ray._read.ref import GlobalRef, State
from clamor_ray._session.session import Session
from clamor_ray._write.write_targets import WriteTarget


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
    """

    target: WriteTarget
    begin: GlobalRef[Any]
    plan: Plan
    lease: Lease | None
    image: Any
    raw: Any
    value: Any
    before: Fingerprint | None

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
        runs = session.client.dirty(self.lease.mapping.id)
        return runs if len(runs) else None

    def state_at(self, version: int) -> State:
        """Of the version that was committed; where nothing was written, of the one it began at."""
        if version == self.begin.version:
            return State(version, self.begin._plan, self.begin._payload)
        return State(version, self.plan, None if self.lease is not None else self.image.tobytes())


@dataclass(frozen=True)
class Change:
    """What one variable brings to a commit."""

    entry: WriteSetEntry
    runs: Runs

    @property
    def n_blocks(self) -> int:
        return int(self.runs[:, 1].sum())

    @property
    def n_bytes(self) -> int:
        return self.n_blocks * BLOCK_BYTES

    def write(self, server_id: int) -> Write:
        entry, begin = self.entry, self.entry.begin
        plan = None if entry.plan == begin._plan else pickle.dumps(entry.plan)
        if entry.lease is None:
            payload = entry.image.tobytes()
            return Write(
                region=begin._region,
                base_version=begin.version,
                n_blocks=0,
                blocks=b"",
                layer_bytes=0,
                staged_at=0,
                plan=plan,
                payload=payload,
            )
        blocks = BitMap()
        for first, n_blocks in self.runs.tolist():
            blocks.add_range(first, first + n_blocks)
        layer_bytes = layer_bytes_of(len(self.runs), self.n_blocks)
        return Write(
            region=begin._region,
            base_version=begin.version,
            n_blocks=self.n_blocks,
            blocks=blocks.serialize(),
            layer_bytes=layer_bytes,
            staged_at=server_id,
            plan=plan,
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
