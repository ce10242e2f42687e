"""`ray.util.collective` on CPUs without torch: `backend="clamor"`.

Import this module in the driver and in each actor; that registers the backend. Arrays are NumPy's,
of the dtypes of `AllReduceGroup.allreduce`, and results are written into them, as Ray's API has it.

Example:
    >>> import clamor_ray.ray_collective                     # doctest: +SKIP
    >>> from ray.util import collective                      # doctest: +SKIP
    >>> collective.init_collective_group(4, rank, backend="clamor", group_name="sums")
    ...                                                      # doctest: +SKIP
    >>> collective.allreduce(gradient, group_name="sums")    # doctest: +SKIP
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from ray.util.collective.backend_registry import _global_registry, register_collective_backend
from ray.util.collective.collective_group.base_collective_group import BaseGroup
from ray.util.collective.types import (
    AllReduceOptions,
    BroadcastOptions,
    ReduceOp,
    ReduceOptions,
    ReduceScatterOptions,
)

from clamor_ray._ring.group import RingGroup, _numbers

__all__ = ["BACKEND", "ClamorCollectiveGroup"]

BACKEND: Final = "CLAMOR"
_OPS: Final = {
    ReduceOp.SUM: "sum",
    ReduceOp.PRODUCT: "prod",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
}


def _one(tensors: Any) -> Any:
    """Ray passes a list of one for each device; a CPU is one device."""
    if len(tensors) != 1:
        raise ValueError(f"one array for each process, not {len(tensors)}")
    return _writable(tensors[0])


def _writable(array: Any) -> Any:
    if not isinstance(array, np.ndarray):
        raise TypeError(f"the backend 'clamor' takes NumPy arrays, not {type(array).__name__}")
    return array


class ClamorCollectiveGroup(BaseGroup):
    """One process's part of a group; Ray makes it.

    Args:
        world_size: members.
        rank: this one's.
        group_name: the same for all.
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._group = RingGroup(f"ray:{group_name}", world_size, rank, None)
        # (lower rank, higher rank) -> a ring of two, for send and recv
        self._pairs: dict[tuple[int, int], RingGroup] = {}

    @classmethod
    def backend(cls) -> str:
        """Its name."""
        return BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        """It needs nothing."""
        return True

    def destroy_group(self) -> None:
        """Leaves the group."""
        self._group.close()
        for pair in self._pairs.values():
            pair.close()
        super().destroy_group()

    def allreduce(self, tensor: Any, allreduce_options: Any = None) -> None:
        """See `ray.util.collective.allreduce`."""
        options = allreduce_options or AllReduceOptions()
        array = _one(tensor)
        array[...] = self._group.allreduce(array, _OPS[options.reduceOp])

    def barrier(self, barrier_options: Any = None) -> None:
        """See `ray.util.collective.barrier`."""
        del barrier_options
        self._group.barrier()

    def reduce(self, tensor: Any, reduce_options: Any = None) -> None:
        """See `ray.util.collective.reduce`: only the root's array changes."""
        options = reduce_options or ReduceOptions()
        array = _one(tensor)
        result = self._group.allreduce(array, _OPS[options.reduceOp])
        if self.rank == options.root_rank:
            array[...] = result

    def allgather(self, tensor_list: Any, tensor: Any, allgather_options: Any = None) -> None:
        """See `ray.util.collective.allgather`."""
        del allgather_options
        outs = self._listed(tensor_list)
        for out, found in zip(outs, self._group.all_gather(_one(tensor)), strict=True):
            out[...] = found

    def broadcast(self, tensor: Any, broadcast_options: Any = None) -> None:
        """See `ray.util.collective.broadcast`."""
        options = broadcast_options or BroadcastOptions()
        array = _one(tensor)
        array[...] = self._group.broadcast(array, options.root_rank)

    def reducescatter(
        self, output_tensor: Any, tensor_list: Any, reducescatter_options: Any = None
    ) -> None:
        """See `ray.util.collective.reducescatter`."""
        options = reducescatter_options or ReduceScatterOptions()
        out = _one(output_tensor)
        parts = self._listed(tensor_list)
        if any(part.shape != out.shape or part.dtype != out.dtype for part in parts):
            raise ValueError(
                f"all parts are of {out.dtype} and of shape {out.shape}, as the output"
            )
        mine = self._group.reduce_scatter(np.stack(parts), _OPS[options.reduceOp])
        out[...] = mine.reshape(out.shape)

    def send(self, tensor: Any, send_options: Any) -> None:
        """See `ray.util.collective.send`."""
        array, _ = _numbers(_one(tensor), "send")
        with self._pair(send_options.dst_rank)._call() as member:
            came = member.ring.swap(array.reshape(-1).view(np.uint8), self._group._timeout_s)
        if came:
            raise RuntimeError(
                f"member {send_options.dst_rank} sent {len(came)} bytes where it should receive"
            )

    def recv(self, tensor: Any, recv_options: Any) -> None:
        """See `ray.util.collective.recv`."""
        array = _one(tensor)
        with self._pair(recv_options.src_rank)._call() as member:
            came = member.ring.swap(b"", self._group._timeout_s)
        if len(came) != array.nbytes:
            raise ValueError(
                f"{len(came)} bytes came from member {recv_options.src_rank}, and the array has "
                f"{array.nbytes}"
            )
        array[...] = np.frombuffer(came, array.dtype).reshape(array.shape)

    def _listed(self, tensor_list: Any) -> Sequence[Any]:
        (listed,) = tensor_list
        if len(listed) != self.world_size:
            raise ValueError(f"{len(listed)} arrays for {self.world_size} members")
        return [_writable(array) for array in listed]

    def _pair(self, other: int) -> RingGroup:
        low, high = sorted((self.rank, other))
        found = self._pairs.get((low, high))
        if found is None:
            # No group's own name begins so, whatever users call theirs.
            name = f"ray-pair:{low}-{high}:{self.group_name}"
            found = RingGroup(name, 2, int(self.rank == high), None)
            self._pairs[low, high] = found
        return found


if not _global_registry.is_registered(BACKEND):
    register_collective_backend(BACKEND, ClamorCollectiveGroup)
