"""What a commit may change of a variable, and the regions that its bytes lie in. Pure."""

from __future__ import annotations

from typing import Any, NamedTuple

from clamor_ray._native.pieced_client import PieceVersion
from clamor_ray._objects.kind import Kind
from clamor_ray._objects.layout import Plan
from clamor_ray._redundancy.groups import PieceGroups


class State(NamedTuple):
    """What a commit may change of a variable: all of it moves at once.

    Args:
        version: number of commits behind it.
        plan: what lies where.
        payload: the content, where it travels inside the reference.
        row: of a variable in pieces, the version of each piece, parity pieces too.
    """

    version: int
    plan: Plan
    payload: bytes | None
    row: tuple[int, ...] = ()


class Pieces(NamedTuple):
    """The regions that have the bytes of a variable; their ids follow its own.

    Args:
        n: how many.
        piece_bytes: of each but the last, which may be shorter.
        width, n_parity: of groups of them (`PieceGroups`); 0: there are none. Parity pieces follow.
        on_disk: they are on disk.
    """

    n: int
    piece_bytes: int
    width: int = 0
    n_parity: int = 0
    on_disk: bool = False

    @property
    def groups(self) -> PieceGroups:
        return PieceGroups(self.n, self.width, self.n_parity)

    def at(
        self, row: tuple[int, ...], region: int, base_address: int, length_bytes: int
    ) -> list[PieceVersion]:
        """The pieces at a version of the variable.

        Args:
            row: of that version.
            region, base_address, length_bytes: of the variable.
        """
        return [
            PieceVersion(
                region=region + 1 + index,
                version=version,
                base_address=base_address + index * self.piece_bytes,
                length_bytes=min(self.piece_bytes, length_bytes - index * self.piece_bytes),
            )
            for index, version in enumerate(row[: self.n])
        ]


def packed_state(state: State) -> tuple[Any, ...]:
    """Plain values, for `state_of`."""
    plan = state.plan
    lies = (plan.total_bytes, plan.inband_bytes, plan.buffers, plan.inband_offset)
    end = (plan.capacity_bytes, plan.fixed, tuple(plan.kind))
    return (state.version, (*lies, *end), state.payload, state.row)


def state_of(
    version: int, lies: tuple[Any, ...], payload: bytes | None, row: tuple[int, ...]
) -> State:
    """The state that `packed_state` was given."""
    lies = (*lies[:-1], Kind(*lies[-1]))
    return State(version, Plan(*lies), payload, row)
