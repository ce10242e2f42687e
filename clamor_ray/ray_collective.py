"""`ray.util.collective` on CPUs without torch: `backend="clamor"`.

Import this module in the driver and in each actor; that registers the backend. Arrays are NumPy's,
of the dtypes of `AllReduceGroup.allreduce`, and results are written into them, as Ray's API has it.

Example:
    >>> def member(rank):
    ...     import clamor_ray.ray_collective
    ...     from ray.util import collective
    ...     collective.init_collective_group(1, rank, "clamor", "sums")
    ...     x = np.ones(3)
    ...     collective.allreduce(x, "sums")
    ...     collective.destroy_collective_group("sums")
    ...     return x
    >>> ray.get(ray.remote(member).remote(0))
    array([1., 1., 1.])
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
"""The name that `ray.util.collective` knows it by."""
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

    Example:
        >>> def member(rank):
        ...     import clamor_ray.ray_collective
        ...     from ray.util import collective
        ...     collective.init_collective_group(1, rank, "clamor", "class")
        ...     size = collective.get_collective_group_size("class")
        ...     collective.destroy_collective_group("class")
        ...     return size
        >>> ray.get(ray.remote(member).remote(0))
        1
    """

    def __init__(self, world_size: int, rank: int, group_name: str) -> None:
        super().__init__(world_size, rank, group_name)
        self._group = RingGroup(f"ray:{group_name}", world_size, rank, None)
        # (lower rank, higher rank) -> a ring of two, for send and recv
        self._pairs: dict[tuple[int, int], RingGroup] = {}

    @classmethod
    def backend(cls) -> str:
        """The backend's name.

        Returns:
            `BACKEND`.

        Example:
            >>> from clamor_ray.ray_collective import ClamorCollectiveGroup
            >>> ClamorCollectiveGroup.backend()
            'CLAMOR'
        """
        return BACKEND

    @classmethod
    def check_backend_availability(cls) -> bool:
        """Tells Ray whether the backend can be used.

        Returns:
            True: it needs nothing.

        Example:
            >>> from clamor_ray.ray_collective import ClamorCollectiveGroup
            >>> ClamorCollectiveGroup.check_backend_availability()
            True
        """
        return True

    def destroy_group(self) -> None:
        """Leaves the group. `ray.util.collective.destroy_collective_group` calls it.

        Example:
            >>> def member(rank):
            ...     import clamor_ray.ray_collective
            ...     from ray.util import collective
            ...     collective.init_collective_group(1, rank, "clamor", "left")
            ...     assert collective.is_group_initialized("left")
            ...     collective.destroy_collective_group("left")
            ...     return collective.is_group_initialized("left")
            >>> ray.get(ray.remote(member).remote(0))
            False
        """
        self._group.close()
        for pair in self._pairs.values():
            pair.close()
        super().destroy_group()

    def allreduce(self, tensor: Any, allreduce_options: Any = None) -> None:
        """Reduces all members' arrays, in place. See `ray.util.collective.allreduce`.

        Args:
            tensor: a list of one array, which gets the result.
            allreduce_options: Ray's; None: its defaults.

        Raises:
            MemberLostError, CollectiveMismatchError, TypeError, ValueError: As `AllReduceGroup`'s
                methods.

        Example:
            >>> def member(rank):
            ...     import clamor_ray.ray_collective
            ...     from ray.util import collective
            ...     collective.init_collective_group(1, rank, "clamor", "all")
            ...     x = np.ones(3)
            ...     collective.allreduce(x, "all")
            ...     collective.destroy_collective_group("all")
            ...     return x
            >>> ray.get(ray.remote(member).remote(0))
            array([1., 1., 1.])
        """
        options = allreduce_options or AllReduceOptions()
        array = _one(tensor)
        array[...] = self._group.allreduce(array, _OPS[options.reduceOp])

    def barrier(self, barrier_options: Any = None) -> None:
        """Waits for all members. See `ray.util.collective.barrier`.

        Args:
            barrier_options: Ray's; they change nothing.

        Raises:
            MemberLostError: A member is gone, or did not come in time.

        Example:
            >>> def member(rank):
            ...     import clamor_ray.ray_collective
            ...     from ray.util import collective
            ...     collective.init_collective_group(1, rank, "clamor", "wait")
            ...     collective.barrier("wait")
            ...     collective.destroy_collective_group("wait")
            ...     return rank
            >>> ray.get(ray.remote(member).remote(0))
            0
        """
        del barrier_options
        self._group.barrier()

    def reduce(self, tensor: Any, reduce_options: Any = None) -> None:
        """Reduces to the root: only its array changes. See `ray.util.collective.reduce`.

        Args:
            tensor: a list of one array.
            reduce_options: Ray's; None: its defaults.

        Raises:
            MemberLostError, CollectiveMismatchError, TypeError, ValueError: As `AllReduceGroup`'s
                methods.

        Example:
            >>> def member(rank):
            ...     import clamor_ray.ray_collective
            ...     from ray.util import collective
            ...     collective.init_collective_group(1, rank, "clamor", "root")
            ...     x = np.ones(3)
            ...     collective.reduce(x, 0, "root")
            ...     collective.destroy_collective_group("root")
            ...     return x
            >>> ray.get(ray.remote(member).remote(0))
            array([1., 1., 1.])
        """
        options = reduce_options or ReduceOptions()
        array = _one(tensor)
        result = self._group.allreduce(array, _OPS[options.reduceOp])
        if self.rank == options.root_rank:
            array[...] = result

    def allgather(self, tensor_list: Any, tensor: Any, allgather_options: Any = None) -> None:
        """Gathers all members' arrays. See `ray.util.collective.allgather`.

        Args:
            tensor_list: a list of one list of arrays, one for each member, which get the results.
            tensor: a list of one array, this member's.
            allgather_options: Ray's; they change nothing.

        Raises:
            MemberLostError, CollectiveMismatchError, TypeError, ValueError: As `AllReduceGroup`'s
                methods.

        Example:
            >>> def member(rank):
            ...     import clamor_ray.ray_collective
            ...     from ray.util import collective
            ...     collective.init_collective_group(1, rank, "clamor", "lists")
            ...     x = np.ones(3)
            ...     collective.allgather([x], np.zeros(3), "lists")
            ...     collective.destroy_collective_group("lists")
            ...     return x
            >>> ray.get(ray.remote(member).remote(0))
            array([0., 0., 0.])
        """
        del allgather_options
        outs = self._listed(tensor_list)
        for out, found in zip(outs, self._group.all_gather(_one(tensor)), strict=True):
            out[...] = found

    def broadcast(self, tensor: Any, broadcast_options: Any = None) -> None:
        """Sends the root's array to all. See `ray.util.collective.broadcast`.

        Args:
            tensor: a list of one array: the root's is sent, the others' get it.
            broadcast_options: Ray's; None: its defaults.

        Raises:
            MemberLostError, CollectiveMismatchError, TypeError, ValueError: As `AllReduceGroup`'s
                methods.

        Example:
            >>> def member(rank):
            ...     import clamor_ray.ray_collective
            ...     from ray.util import collective
            ...     collective.init_collective_group(1, rank, "clamor", "root")
            ...     x = np.ones(3)
            ...     collective.broadcast(x, 0, "root")
            ...     collective.destroy_collective_group("root")
            ...     return x
            >>> ray.get(ray.remote(member).remote(0))
            array([1., 1., 1.])
        """
        options = broadcast_options or BroadcastOptions()
        array = _one(tensor)
        array[...] = self._group.broadcast(array, options.root_rank)

    def reducescatter(
        self, output_tensor: Any, tensor_list: Any, reducescatter_options: Any = None
    ) -> None:
        """Reduces, and gives each member its part. See `ray.util.collective.reducescatter`.

        Args:
            output_tensor: a list of one array, which gets this member's part.
            tensor_list: a list of one list of arrays, one for each member, of the output's shape
                and dtype.
            reducescatter_options: Ray's; None: its defaults.

        Raises:
            ValueError: The arrays are not of the output's shape and dtype, or not one for each
                member.
            MemberLostError, CollectiveMismatchError, TypeError: As `AllReduceGroup.reduce_scatter`.

        Example:
            >>> def member(rank):
            ...     import clamor_ray.ray_collective
            ...     from ray.util import collective
            ...     collective.init_collective_group(1, rank, "clamor", "parts")
            ...     x = np.ones(3)
            ...     collective.reducescatter(x, [np.zeros(3)], "parts")
            ...     collective.destroy_collective_group("parts")
            ...     return x
            >>> ray.get(ray.remote(member).remote(0))
            array([0., 0., 0.])
        """
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
        """Sends an array to one member, which calls `recv`. See `ray.util.collective.send`.

        Args:
            tensor: a list of one array.
            send_options: Ray's; `dst_rank` is the receiver.

        Raises:
            RuntimeError: The other member sent, too.
            MemberLostError, TypeError, ValueError: As `AllReduceGroup`'s methods.

        Example:
            >>> class Member:
            ...     def run(self, rank):
            ...         import clamor_ray.ray_collective
            ...         from ray.util import collective
            ...         collective.init_collective_group(2, rank, "clamor", "sent")
            ...         x = np.full(3, rank)
            ...         send, recv = collective.send, collective.recv
            ...         recv(x, 0, "sent") if rank else send(x, 1, "sent")
            ...         return x.tolist()
            >>> members = [ray.remote(Member).remote() for _ in range(2)]
            >>> ray.get([member.run.remote(rank) for rank, member in enumerate(members)])
            [[0, 0, 0], [0, 0, 0]]
        """
        array, _ = _numbers(_one(tensor), "send")
        with self._pair(send_options.dst_rank)._call() as member:
            came = member.ring.swap(array.reshape(-1).view(np.uint8), self._group._timeout_s)
        if came:
            raise RuntimeError(
                f"member {send_options.dst_rank} sent {len(came)} bytes where it should receive"
            )

    def recv(self, tensor: Any, recv_options: Any) -> None:
        """Receives an array from one member, which calls `send`. See `ray.util.collective.recv`.

        Args:
            tensor: a list of one array of the sender's size, which gets the content.
            recv_options: Ray's; `src_rank` is the sender.

        Raises:
            ValueError: What came has another size.
            MemberLostError, TypeError: As `AllReduceGroup`'s methods.

        Example:
            >>> class Member:
            ...     def run(self, rank):
            ...         import clamor_ray.ray_collective
            ...         from ray.util import collective
            ...         collective.init_collective_group(2, rank, "clamor", "received")
            ...         x = np.full(3, rank)
            ...         send, recv = collective.send, collective.recv
            ...         recv(x, 0, "received") if rank else send(x, 1, "received")
            ...         return x.tolist()
            >>> members = [ray.remote(Member).remote() for _ in range(2)]
            >>> ray.get([member.run.remote(rank) for rank, member in enumerate(members)])
            [[0, 0, 0], [0, 0, 0]]
        """
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
