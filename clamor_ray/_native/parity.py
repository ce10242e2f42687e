"""Parity: its layers at the client, and bytes XORed. Nothing here imports Ray."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from clamor_ray._native.base import Runs, _Handle, c, check, ns, runs_pointer


class ParityMember(NamedTuple):
    """What a commit writes of one piece of a group.

    Args:
        mapping_id: Of the piece's own private mapping.
        runs: Blocks counted from the piece's first byte, sorted and disjoint, at least one.
        was_lost: What they were is lost. It counts as zeros: so is what the parity has of them.
        region, version: Whose blocks they were; 0: the mapping's own.
    """

    mapping_id: int
    runs: Runs
    was_lost: bool = False
    region: int = 0
    version: int = 0


class ParityLayer(NamedTuple):
    """A staged layer of a parity.

    Args:
        server_id: The page server that has it.
        runs: Its blocks: every one that a member has.
        layer_bytes: Its length, as `Engine.pull` takes it.
    """

    server_id: int
    runs: Runs
    layer_bytes: int


class _ParityCalls(_Handle):
    """The part of `Client` that stages parity."""

    def stage_parity(
        self,
        region: int,
        commit_id: int,
        members: Sequence[ParityMember],
        *,
        delta: bool = True,
        n_threads: int = 0,
        timeout_s: float = 60.0,
    ) -> ParityLayer:
        """Makes the layer of a group's parity, to be committed with those of its pieces.

        `Client.resolve(commit_id, region, version)` says what became of it.

        Args:
            region: The parity. It need not be mapped here.
            commit_id: That of the pieces' layers.
            members: Each piece of the group that the commit writes.
            delta: The XOR of what the blocks were and are, which the parity's home XORs into what
                it has. False: a mirror of the one member, whose blocks are taken as they are.
            n_threads: That copy a mirror; 0 chooses by size and cores.
            timeout_s: For all of it, a restart of the page server included.

        Raises:
            HomeLostError: Nobody has what a block was.
            OutOfMemoryError: Nothing is left behind; try again or drop it.
            RangeError: No member, or several of a mirror; or runs that are not of the piece.
            ForkedError, ServerUnavailableError, WaitTimeoutError.
        """
        packed = c.ffi.new("struct pc_parity_member[]", len(members))
        keep = []
        for to, member in zip(packed, members, strict=True):
            to.mapping_id, to.was_lost = member.mapping_id, int(member.was_lost)
            to.region, to.version = member.region, member.version
            to.runs, to.n_runs, kept = runs_pointer(member.runs)
            keep.append(kept)
        runs = np.empty((sum(len(kept) for kept in keep), 2), np.uint64)
        pointer, capacity, _ = runs_pointer(runs)
        server_id, layer_bytes = c.ffi.new("uint64_t *"), c.ffi.new("uint64_t *")
        n_runs = check(
            self._call(
                c.lib.pc_client_stage_parity,
                region,
                commit_id,
                int(delta),
                packed,
                len(members),
                n_threads,
                ns(timeout_s),
                pointer,
                capacity,
                server_id,
                layer_bytes,
            ),
            region=region,
        )
        return ParityLayer(int(server_id[0]), runs[:n_runs], int(layer_bytes[0]))


def xor_into(out: npt.NDArray[Any], other: npt.NDArray[Any]) -> None:
    """out ^= other, byte by byte, without the GIL.

    Args:
        out: Contiguous.
        other: Contiguous, with as many bytes. It may be `out`.

    Raises:
        ValueError: One is not contiguous, or their lengths differ.

    Example:
        >>> a = np.array([1, 2, 3], np.uint8)
        >>> xor_into(a, np.array([3, 2, 1], np.uint8))
        >>> a.tolist()
        [2, 0, 2]
    """
    if not (out.flags.c_contiguous and other.flags.c_contiguous) or out.nbytes != other.nbytes:
        raise ValueError(f"XOR of {out.nbytes} and {other.nbytes} bytes, both contiguous")
    to, a = (c.ffi.cast("char *", each.__array_interface__["data"][0]) for each in (out, other))
    check(c.lib.pc_xor_into(to, a, out.nbytes))
