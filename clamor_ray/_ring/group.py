"""Groups of actors that reduce arrays among themselves, over a ring in C.

Actors find each other through the session's registry (`_protocol.rendezvous`) and connect
(`_ring.joining`); after that no call of Ray's is made. A process has one end of a group's ring; it
is made by the first call of the group, which waits until all members make theirs.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import hmac
import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import cloudpickle
import numpy as np
import numpy.typing as npt
import ray

from clamor_ray import errors
from clamor_ray._counting.anchors import Anchors, collecting, giving
from clamor_ray._native.ring import BYTES, OPS, address, dtype_code
from clamor_ray._protocol import ray_state
from clamor_ray._protocol.rendezvous import Guest, Meeting
from clamor_ray._ring import group_ends, members
from clamor_ray._ring.joining import RingPlace, in_ring, join, listen
from clamor_ray._ring.members import Member
from clamor_ray._session import process_sessions
from clamor_ray._session.session import Session

MEET_FIRST_S: Final = 0.005  # between two questions whether all are there
MEET_MOST_S: Final = 0.2
MEET_KNOWN_S: Final = 5.0  # what the registry said so long ago it would say again
MAC_BYTES: Final = 32
KEPT_PASSED: Final = 64
DEFAULT_TIMEOUT_S: Final = 60.0

Array = npt.NDArray[Any]


def _numbers(array: Any, what: str, op: Any = None) -> tuple[Array, int]:
    """A contiguous array of numbers that can be reduced by an operation, and its dtype's code."""
    found = np.asarray(array)
    code = dtype_code(found.dtype)
    if code is None:
        raise TypeError(
            f"{what} takes float16, bfloat16, float32, float64, int32 and int64, not {found.dtype}"
        )
    if op == "mean" and found.dtype.kind == "i":  # as NumPy
        found = found.astype(np.float64)
        code = dtype_code(found.dtype)
        assert code is not None
    plain = found
    if not (found.flags.c_contiguous and found.flags.aligned):
        plain = np.require(found, requirements=["C", "A"]).reshape(found.shape)
    # The kernel sends from it: absent blocks of a global variable are an error there, not a fault.
    return (plain.copy() if _is_global(plain) else plain), code


def _is_global(array: Array) -> bool:
    return process_sessions.at_address(address(array)) is not None


def _result(out: Any, like: Array, shape: tuple[int, ...]) -> Array:
    if out is None:
        return np.empty(shape, like.dtype)
    if not isinstance(out, np.ndarray) or out.shape != shape or out.dtype != like.dtype:
        raise ValueError(
            f"out is an array of {like.dtype} of shape {shape}, not "
            f"{getattr(out, 'dtype', type(out).__name__)} of {getattr(out, 'shape', '')}"
        )
    if not out.flags.c_contiguous or not out.flags.aligned or not out.flags.writeable:
        raise ValueError("out is a contiguous array that can be written to")
    if np.may_share_memory(out, like) and address(out) != address(like):
        raise ValueError("out is the array itself, or shares no memory with it")
    if _is_global(out):
        raise ValueError("out is no global variable's memory: copy the result into it")
    return out


class RingGroup:
    """A group by name, size and rank; `AllReduceGroup` finds those from actors.

    Args:
        name: the same for all members, and for no other group of the session.
        size: members.
        rank: this process's, or None where that is found out.
        scope: of the session.
        timeout_s: for members to come, and for a call without any progress.
        lanes: connections between neighbours, each with a thread.
    """

    def __init__(
        self,
        name: str,
        size: int,
        rank: int | None,
        scope: str | None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        lanes: int = 1,
    ) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is positive, not {timeout_s!r}")
        if not 1 <= lanes <= 16:
            raise ValueError(f"lanes is 1 to 16, not {lanes!r}")
        self._name = name
        self._size = size
        self._rank = rank
        self._scope = scope
        self._timeout_s = timeout_s
        # References in objects that were passed on: who gets them asks for anchors of its own.
        self._passed: collections.deque[Anchors] = collections.deque(maxlen=KEPT_PASSED)
        self._lanes = lanes
        group_ends.here(self)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        group_ends.here(self)

    @property
    def name(self) -> str:
        """The same for all members, and for no other group of the session."""
        return self._name

    def _own_rank(self) -> int:
        assert self._rank is not None
        return self._rank

    @property
    def size(self) -> int:
        """Number of members."""
        return self._size

    @property
    def rank(self) -> int:
        """This process's number in the group, from 0.

        Raises:
            NotAMemberError: It is none of the group's actors.
        """
        member = members.by_group.get(self._name)
        return self._own_rank() if member is None else member.rank

    # -- being a member

    def _joined(self) -> Member:
        member = members.by_group.get(self._name)
        if member is not None:
            return member
        with members.alone(self._name):
            member = members.by_group.get(self._name)
            if member is None:
                member = members.by_group[self._name] = self._join()
            return member

    def _join(self) -> Member:
        rank = self._own_rank()
        session = process_sessions.current(self._scope)
        host = ray.util.get_node_ip_address()
        with contextlib.closing(listen(host)) as listener:
            port = listener.getsockname()[1]
            calls = members.calls_lost.get(self._name, 0)
            meeting = self._meet(
                session,
                Guest(rank=rank, host=host, port=port, visit=secrets.randbits(63), calls=calls),
            )
            ring = join(
                listener,
                f"{self._name}/{meeting.number}".encode(),
                meeting.secret,
                in_ring(
                    [RingPlace(guest.rank, guest.host, guest.port) for guest in meeting.guests]
                ),
                rank,
                n_lanes=self._lanes,
                timeout_s=self._timeout_s,
            )
        members.calls_lost.pop(self._name, None)
        calls_before = tuple(guest.calls for guest in meeting.guests)
        return Member(
            scope=session.scope,
            rank=rank,
            ring=ring,
            secret=meeting.secret,
            calls_before=calls_before,
        )

    def _meet(self, session: Session, guest: Guest) -> Meeting:
        """All members, when all are there. In short questions: the registry forgets who does not
        come again, and whoever waits when it is restarted comes again by itself."""
        deadline = time.monotonic() + self._timeout_s
        pause_s, failure = MEET_FIRST_S, None
        missing: tuple[int, ...] = ()
        met, said_s = False, 0.0
        try:
            while True:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    # The last question has little time: a busy registry may not answer it.
                    is_known = missing and said_s >= deadline - MEET_KNOWN_S
                    raise self._nobody(missing) if failure is None or is_known else failure
                try:
                    within_s = min(session.config.control_timeout_s, left_s + MEET_MOST_S)
                    found = session.rpc.meet(self._name, self._size, guest, timeout_s=within_s)
                except (errors.ServerUnavailableError, errors.WaitTimeoutError) as error:
                    if isinstance(error.__cause__, ray_state.GONE):
                        raise  # the session has ended
                    failure = error
                else:
                    if isinstance(found, Meeting):
                        met = True
                        return found
                    if found.missing != missing:
                        pause_s = MEET_FIRST_S
                    missing, failure, said_s = found.missing, None, time.monotonic()
                time.sleep(min(pause_s, max(0.0, left_s)))
                pause_s = min(MEET_MOST_S, 1.5 * pause_s)
        finally:
            if not met:  # nobody waits for the answer: without it, the place lasts for seconds
                with contextlib.suppress(Exception):
                    session.registry.leave_meeting.remote(self._name, guest.visit)

    def _nobody(self, missing: tuple[int, ...]) -> errors.MemberLostError:
        told = ", ".join(str(rank) for rank in missing) or "some"
        error = errors.MemberLostError(
            f"Of {self._size} members of the group, {told} did not come within "
            f"{self._timeout_s:g} s.",
            hint="Do all its actors run, and does each call the group? `ray list actors` says "
            "which wait for a place: a group may have more members than the cluster has CPUs.",
        )
        error.member = missing[0] if missing else None
        return error

    @contextlib.contextmanager
    def _call(self) -> Iterator[Member]:
        member = self._joined()
        if not member.lock.acquire(timeout=self._timeout_s):
            raise errors.WaitTimeoutError(
                f"Another thread's call of the group did not end within {self._timeout_s:g} s.",
                hint="A group has one call at a time: wait for the other thread's, or make another "
                "group for this one.",
            )
        try:
            yield member
            member.calls += 1
        finally:
            member.lock.release()

    def rebuild(self) -> tuple[int, ...]:
        """Connects the members anew after `MemberLostError`. All members call it, those that were
        started again included (for them, any first call does).

        When a member is lost, some of the others may have completed one call more than the rest.
        The calls are counted anew from here: all make the same one next, and which one that is the
        program decides, by what this returns or by a call of the group itself.

        Returns:
            By rank, how many calls of the group each member had completed since it was connected
            before: 0 for one that was started again.

        Raises:
            MemberLostError: Not all members came, or one was lost again: call it once more.

        Example:
            >>> class Worker:
            ...     def run(self, group):
            ...         return group.barrier(), group.rebuild()
            >>> workers = [ray.remote(Worker).remote() for _ in range(2)]
            >>> group = clamor.AllReduceGroup(workers)
            >>> ray.get([worker.run.remote(group) for worker in workers])
            [(None, (1, 1)), (None, (1, 1))]
        """
        with members.alone(self._name):
            member = members.by_group.pop(self._name, None)
        if member is not None:
            members.calls_lost[self._name] = member.calls
            member.ring.close()
        return self._joined().calls_before

    def close(self) -> None:
        """Leaves the group; the others find this member gone. Calling it again changes nothing.

        Example:
            >>> class Worker:
            ...     def run(self, group):
            ...         return group.size, group.barrier(), group.close()
            >>> workers = [ray.remote(Worker).remote() for _ in range(2)]
            >>> group = clamor.AllReduceGroup(workers)
            >>> ray.get([worker.run.remote(group) for worker in workers])
            [(2, None, None), (2, None, None)]
        """
        members.close_member(self._name)

    # -- collectives

    def allreduce(
        self, array: npt.ArrayLike, op: str | Callable[[Any, Any], Any] = "sum", out: Any = None
    ) -> Array:
        """All members' arrays made one, element by element; all members get it.

        Args:
            array: of one shape and dtype at all members: float16, bfloat16 (of `ml_dtypes`),
                float32, float64, int32 or int64. Integers wrap around, NaN and infinities go
                through, as in NumPy.
            op: "sum", "prod", "min", "max", "mean" (of integers it is float64, as NumPy's), or a
                function of two arrays, of a part of all elements, that returns one of the same
                shape and dtype: in Python, and so slower. Where it raises, the group is broken.
            out: where the result goes: the array itself, or one that shares no memory with it.

        Returns:
            The result; the same bits at every member, and on every run with members at the same
            nodes. The elements are cut into `size` segments, and each is added up in the order of
            the ring, starting after its own member.

        Raises:
            CollectiveMismatchError: Members differ in shape, dtype, operation or call. Nothing was
                reduced, and the group can go on.
            MemberLostError: A member is gone, or did nothing for `timeout_s`. The group is broken:
                `rebuild()`.
            TypeError, ValueError: No such dtype or operation, or `out` does not fit.
            NotAMemberError: Called outside the group's actors.

        Example:
            >>> class Worker:
            ...     def run(self, group):
            ...         return group.allreduce(np.ones(2, np.int64))
            >>> workers = [ray.remote(Worker).remote() for _ in range(2)]
            >>> group = clamor.AllReduceGroup(workers)
            >>> ray.get([worker.run.remote(group) for worker in workers])
            [array([2, 2]), array([2, 2])]
        """
        given, code = _numbers(array, "allreduce", op)
        result = _result(out, given, given.shape)
        if callable(op):
            self._reduced_in_python("allreduce", given, op, result)
            return result
        self._check_op(op)
        with self._call() as member:
            member.ring.run(
                "allreduce",
                given.shape,
                code,
                op,
                given=given,
                result=result,
                n_elements=given.size,
                timeout_s=self._timeout_s,
            )
        return result

    def reduce_scatter(
        self, array: npt.ArrayLike, op: str | Callable[[Any, Any], Any] = "sum"
    ) -> Array:
        """As `allreduce`, but each member gets its own segment: of the array flattened, elements
        n * rank // size to n * (rank + 1) // size.

        Args:
            array: of one shape and dtype at all members, as `allreduce`'s.
            op: as `allreduce`'s.

        Returns:
            The member's segment, 1-D.

        Raises:
            CollectiveMismatchError, MemberLostError, TypeError, ValueError, ...: As `allreduce`.

        Example:
            >>> class Worker:
            ...     def run(self, group):
            ...         return group.reduce_scatter([1, 2, 3, 4])
            >>> workers = [ray.remote(Worker).remote() for _ in range(2)]
            >>> group = clamor.AllReduceGroup(workers)
            >>> ray.get([worker.run.remote(group) for worker in workers])
            [array([2, 4]), array([6, 8])]
        """
        given, code = _numbers(array, "reduce_scatter", op)
        if callable(op):
            return self._reduced_in_python("reduce_scatter", given, op, None)
        self._check_op(op)
        room = np.empty(given.size, given.dtype)
        with self._call() as member:
            member.ring.run(
                "reduce_scatter",
                given.shape,
                code,
                op,
                given=given,
                result=room,
                n_elements=given.size,
                timeout_s=self._timeout_s,
            )
            low, high = (given.size * (member.rank + i) // self._size for i in (0, 1))
        own: Array = room[low:high].copy()
        return own

    def all_gather(self, array: npt.ArrayLike) -> Array:
        """Stacks all members' arrays by rank.

        Args:
            array: of one shape and dtype at all members, as `allreduce`'s.

        Returns:
            Shape `(size, *shape)`, at every member.

        Raises:
            CollectiveMismatchError, MemberLostError, TypeError, ...: As `allreduce`.

        Example:
            >>> class Worker:
            ...     def run(self, group):
            ...         return group.all_gather(group.rank)
            >>> workers = [ray.remote(Worker).remote() for _ in range(2)]
            >>> group = clamor.AllReduceGroup(workers)
            >>> ray.get([worker.run.remote(group) for worker in workers])
            [array([0, 1]), array([0, 1])]
        """
        given, code = _numbers(array, "all_gather")
        result = np.empty((self._size, *given.shape), given.dtype)
        with self._call() as member:
            result[member.rank] = given
            member.ring.run(
                "all_gather",
                given.shape,
                code,
                result=result,
                n_elements=result.size,
                timeout_s=self._timeout_s,
            )
        return result

    def broadcast(self, array: npt.ArrayLike, root: int = 0, out: Any = None) -> Array:
        """Sends the root's array to all members.

        Args:
            array: the root's is sent; the others pass one of the same shape and dtype, whose
                content does not matter.
            root: rank of the member that sends.
            out: where the result goes, as `allreduce`'s.

        Returns:
            The root's array, at every member.

        Raises:
            ValueError: There is no such member, or `out` does not fit.
            CollectiveMismatchError, MemberLostError, TypeError, ...: As `allreduce`.

        Example:
            >>> class Worker:
            ...     def run(self, group):
            ...         return group.broadcast([group.rank], root=1)
            >>> workers = [ray.remote(Worker).remote() for _ in range(2)]
            >>> group = clamor.AllReduceGroup(workers)
            >>> ray.get([worker.run.remote(group) for worker in workers])
            [array([1]), array([1])]
        """
        if not 0 <= root < self._size:
            raise ValueError(f"root is 0 to {self._size - 1}, not {root!r}")
        given, code = _numbers(array, "broadcast")
        result = _result(out, given, given.shape)
        with self._call() as member:
            if member.rank == root:
                result[...] = given
            member.ring.run(
                "broadcast",
                given.shape,
                code,
                root=root,
                given=given,
                result=result,
                n_elements=given.size,
                timeout_s=self._timeout_s,
            )
        return result

    def barrier(self) -> None:
        """Waits until all members have called it.

        Raises:
            MemberLostError: A member is gone, or did not come for `timeout_s`.
            CollectiveMismatchError: Another member made another call.

        Example:
            >>> class Worker:
            ...     def run(self, group):
            ...         return group.barrier()
            >>> workers = [ray.remote(Worker).remote() for _ in range(2)]
            >>> group = clamor.AllReduceGroup(workers)
            >>> ray.get([worker.run.remote(group) for worker in workers])
            [None, None]
        """
        with self._call() as member:
            member.ring.run("barrier", dtype=BYTES, timeout_s=self._timeout_s)

    @staticmethod
    def _check_op(op: str) -> None:
        if op not in OPS:
            raise ValueError(f"op is {', '.join(OPS)} or a function, not {op!r}")

    # -- objects

    def _reduced_in_python(
        self, kind: str, given: Array, op: Callable[[Any, Any], Any], result: Array | None
    ) -> Array:
        """This member's segment, which may be its own array's; all of them to `result`, if any."""
        flat = given.reshape(-1)
        bounds = [given.size * i // self._size for i in range(self._size + 1)]
        parts = [flat[low:high] for low, high in itertools.pairwise(bounds)]
        code = dtype_code(given.dtype)
        assert code is not None

        def checked(a: Any, b: Any) -> Any:
            made = np.asarray(op(a, b))
            if made.shape != b.shape or made.dtype != b.dtype:
                raise ValueError(
                    f"the function made {made.dtype} of shape {made.shape} of two parts of "
                    f"{b.dtype} of shape {b.shape}"
                )
            return made

        with self._call() as member:
            # As all other calls: before anything moves, that all ask for the same.
            member.ring.agree_on_function(kind, given.shape, code, self._timeout_s)
            try:
                own: Array = self._own_part(member, parts, checked)
                if result is not None:
                    into = result.reshape(-1)
                    for rank, part in self._all_parts(member, own):
                        into[bounds[rank] : bounds[rank + 1]] = part
            except BaseException:  # any: also the function's. The others must not wait for it
                member.ring.shut()
                raise
        return own if result is not None else own.copy()

    def _own_part(
        self,
        member: Member,
        parts: Sequence[Any],
        op: Callable[[Any, Any], Any],
        timeout_s: float | None = None,
    ) -> Any:
        """This member's part, of all members' reduced by a function, around the ring.

        Args:
            timeout_s: without progress, so also for the function at others; None: the group's.
        """
        ranks, me = member.ring.ranks, member.ring.position
        n = len(ranks)
        so_far = parts[ranks[(me - 1) % n]]
        for step in range(n - 1):
            so_far = op(self._swap(member, so_far, timeout_s), parts[ranks[(me - 2 - step) % n]])
        return so_far

    def _all_parts(self, member: Member, own: Any) -> Iterator[tuple[int, Any]]:
        """Every member's object, with its rank."""
        ranks, me = member.ring.ranks, member.ring.position
        passed = own
        yield member.rank, own
        for step in range(len(ranks) - 1):
            passed = self._swap(member, passed)
            yield ranks[(me - 1 - step) % len(ranks)], passed

    def _swap(self, member: Member, obj: Any, timeout_s: float | None = None) -> Any:
        """Passes an object on; the one that the member before passes."""
        with collecting() as held_by:
            body = cloudpickle.dumps(obj, protocol=5)
        if held_by:
            self._passed.append(tuple(held_by))
        said = _mac(member.secret, body) + body
        heard = memoryview(member.ring.swap(said, timeout_s or self._timeout_s))
        mac, body = bytes(heard[:MAC_BYTES]), heard[MAC_BYTES:]
        # Nothing is unpickled that a member has not said.
        if not hmac.compare_digest(mac, _mac(member.secret, body)):
            member.ring.shut()
            raise errors.ProtocolError("What came from the member before is not its word.")
        with giving(()):  # each is weak, and asks for an anchor when it is opened or passed on
            return cloudpickle.loads(body)


def _mac(secret: bytes, body: Any) -> bytes:
    return hmac.new(secret, body, hashlib.sha256).digest()


class AllReduceGroup(RingGroup):
    """Actors that reduce arrays among themselves: ring and recursive doubling in C, over TCP.

    Make it in the driver, and pass it to the actors. There its methods are called by all members,
    in the same order; the first call connects them. A member is one process; calls block, without
    the GIL.

    The connections last until the actor ends, the session does (`clamor.shutdown`), or `close`; and
    where this object is gone here, and all copies of it there, they are closed after a while.

    Args:
        actors: handles, in the order of ranks.
        timeout_s: how long members wait for each other to come, and in a call for any progress.
        lanes: connections between neighbours, each with a thread: more than 1 where one connection
            does not fill the link, or one core does not reduce as fast as it brings.

    Raises:
        NotInitializedError: There is no session.
        ValueError: There are no actors, or one is there twice.

    Example:
        >>> class Worker:
        ...     def run(self, group):
        ...         return group.allreduce([1.0, group.rank])
        >>> workers = [ray.remote(Worker).remote() for _ in range(2)]
        >>> group = clamor.AllReduceGroup(workers)
        >>> ray.get([worker.run.remote(group) for worker in workers])
        [array([2., 1.]), array([2., 1.])]
    """

    def __init__(
        self, actors: Sequence[Any], *, timeout_s: float = DEFAULT_TIMEOUT_S, lanes: int = 1
    ) -> None:
        ids = tuple(actor._actor_id.hex() for actor in actors)
        if not ids:
            raise ValueError("a group has at least one actor")
        if len(set(ids)) < len(ids):
            raise ValueError("an actor is in the group twice")
        self._ids = ids
        super().__init__(
            f"actors-{secrets.token_hex(8)}",
            len(ids),
            None,
            process_sessions.current().scope,
            timeout_s,
            lanes,
        )
        group_ends.made(self, actors)

    def _own_rank(self) -> int:
        own = ray.get_runtime_context().get_actor_id()
        if own not in self._ids:
            raise errors.NotAMemberError(
                "This process is none of the group's actors."
                if own
                else "This is no actor: the group's methods are called inside its actors."
            )
        return self._ids.index(own)

    def __repr__(self) -> str:
        return f"AllReduceGroup({self.size} actors)"
