"""The `AllReduce` actor: one per node, where partial results of a node's tasks become one value,
and where nodes reduce theirs among themselves.

A facade: what is merged is `merging.py`'s, how nodes reduce is the ring's (`_ring/group.py`, in C).
The driver tells it of winners only, by run and partition, and whatever comes twice counts once. It
keeps nothing that cannot be made again: when it dies, the driver has the partial results merged
anew, by a new actor under a new run.

Threads: Ray runs "merge" on one, which waits for no object for long: who makes it may have to
aggregate itself. "ring" has one for each run, so that whoever waits for other members never keeps
those away whom they wait for; the rest runs on others, so that an actor that works still answers.
"""

from __future__ import annotations

import os
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

import ray
from ray.exceptions import GetTimeoutError

from clamor_ray import errors
from clamor_ray._native.ring import dtype_code
from clamor_ray._protocol.attempt_record import Failure
from clamor_ray._protocol.split_aggregation import (
    FETCH_S,
    AggregateLayout,
    FailedFunction,
    How,
    NotYet,
    RingPlan,
)
from clamor_ray.actors.allreduce.merging import MOST_RUNS, Runs
from clamor_ray.actors.allreduce.rings import Rings

CONCURRENCY: Final = {"merge": 1, "ring": MOST_RUNS, "rest": 4}
# That a member waits for what another one's reduce_op makes. The driver looks whether it lives.
COMPUTE_S: Final = 3600.0


class MemberRing(Protocol):
    """This member's part in a ring, as `_ring.group.RingGroup` is: who makes the actor gives it."""

    def _call(self) -> AbstractContextManager[Any]: ...

    def _own_part(
        self,
        member: Any,
        parts: Sequence[Any],
        op: Callable[[Any, Any], Any],
        timeout_s: float | None = None,
    ) -> Any: ...

    def close(self) -> None: ...


MakeRing = Callable[[str, int, int, str, float, int], MemberRing]


class AllReduce:
    """See the file's head.

    Args:
        scope: of the session.
        make_ring: (name, size, rank, scope, timeout_s, lanes) to a ring, which its first call
            joins.
    """

    def __init__(self, scope: str, make_ring: MakeRing) -> None:
        self._scope = scope
        self._make_ring = make_ring
        self._runs = Runs()
        self._rings: Rings[MemberRing] = Rings(_close)
        self._reducing: dict[int, MemberRing] = {}  # by run
        self.state: dict[str, Any] = {}

    @ray.method(concurrency_group="rest")
    def ping(self) -> int:
        """This process's id."""
        return os.getpid()

    @ray.method(concurrency_group="rest")
    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """What `function(actor, *args)` returns here; `actor.state` lives as long as the actor."""
        return function(self, *args)

    # -- merging

    @ray.method(concurrency_group="merge")
    def merge(
        self,
        run_id: int,
        how: bytes,
        parts: Sequence[tuple[int, int | None, Any]],
        fetch_s: float = FETCH_S,
    ) -> AggregateLayout | FailedFunction | NotYet | None:
        """Adds partial results to this node's aggregate of a run.

        Args:
            run_id: names the run.
            how: a pickled function that returns a `How`; called where the run begins here.
            parts: (partition, turn or None, a reference to what its task made); see
                `Aggregate.add`.
            fetch_s: to wait for each.

        Returns:
            What the aggregate consists of; None where all parts wait for their turn, or the run was
            given up. A `FailedFunction`: what a task, or a function of the user's, raised; or
            values differ. What is raised here is the actor's own.
        """
        aggregate = self._runs.of(run_id, lambda: _how(how))
        if aggregate is None:
            return None
        for partition, turn, reference in parts:
            try:
                value = ray.get(reference, timeout=fetch_s)  # in place; Ray makes it again if lost
            except GetTimeoutError:
                return None if self._runs.is_dropped(run_id) else NotYet()
            if isinstance(value, Failure):
                return FailedFunction(value.error)
            try:
                aggregate.add(partition, value, turn)
            except errors.ClamorError as failure:
                return FailedFunction(failure)
        self._runs.told()
        return aggregate.layout

    @ray.method(concurrency_group="rest")
    def clear(self, run_id: int) -> None:
        """Forgets a run: nothing of it is merged any more, and nobody waits for others' shares.
        Idempotent."""
        self._runs.drop(run_id)
        ring = self._reducing.pop(run_id, None)
        if ring is not None:
            _close(ring)

    # -- reducing among nodes

    @ray.method(concurrency_group="ring")
    def reduce(
        self, run_id: int, partitions: Sequence[int], plan: RingPlan, timeout_s: float
    ) -> Any:
        """This member's share of what all members' aggregates make together. All members call it.
        The run is over here then.

        Args:
            run_id: names the run.
            partitions: that are merged here.
            plan: of the ring; it stays joined for the next call.
            timeout_s: for members to come, and without any progress where C reduces.

        Returns:
            Of arrays, of all segments in one, elements n * rank // size to n * (rank + 1) // size;
            of objects a list of this member's segments (of all of them the same share), or a
            `FailedFunction`.

        Raises:
            MemberLostError: Another member is gone.
        """
        aggregate = self._runs.whole(run_id, partitions, timeout_s)
        try:
            assert aggregate.layout is not None
            reduced = self._arrays if aggregate.layout.dtype else self._objects
            if plan.size == 1:
                return aggregate.take()[0] if aggregate.layout.dtype else aggregate.objects()
            with self._rings.using(plan.name, lambda: self._ring(plan, timeout_s)) as ring:
                self._reducing[run_id] = ring
                if self._runs.is_dropped(run_id):
                    raise errors.ClosedError("The run was given up.")
                return reduced(aggregate, plan, ring, timeout_s)
        finally:
            self._reducing.pop(run_id, None)
            self._runs.drop(run_id)

    def _ring(self, plan: RingPlan, timeout_s: float) -> MemberRing:
        """The plan's; its first call joins it."""
        return self._make_ring(plan.name, plan.size, plan.rank, self._scope, timeout_s, plan.lanes)

    def _arrays(self, aggregate: Any, plan: RingPlan, ring: MemberRing, timeout_s: float) -> Any:
        flat, is_own = aggregate.take()
        out = flat if is_own else self._runs.take_spare(flat.size, flat.dtype)
        with ring._call() as member:
            member.ring.run(
                "reduce_scatter",
                flat.shape,
                dtype_code(flat.dtype) or 0,
                aggregate.how.op,
                given=flat,
                result=out,
                n_elements=flat.size,
                timeout_s=timeout_s,
            )
        low, high = (flat.size * (plan.rank + i) // plan.size for i in (0, 1))
        share = out[low:high].copy()
        self._runs.give_spare(out)
        return share

    def _objects(self, aggregate: Any, plan: RingPlan, ring: MemberRing, timeout_s: float) -> Any:
        segments, how = aggregate.objects(), aggregate.how
        n = len(segments)
        bounds = [n * rank // plan.size for rank in range(plan.size + 1)]
        parts = [segments[bounds[rank] : bounds[rank + 1]] for rank in range(plan.size)]

        def two(one: Any, other: Any) -> Any:
            if isinstance(one, FailedFunction):
                return one
            try:
                where = "between nodes"
                return [how.two(a, b, where) for a, b in zip(one, other, strict=True)]
            except errors.ClamorError as failure:  # goes on to whose it is: no ring breaks
                return FailedFunction(failure)

        with ring._call() as member:
            member.ring.agree_on_function("reduce_scatter", (n,), 0, timeout_s)
            began_s = time.monotonic()
            try:
                return ring._own_part(member, parts, two, COMPUTE_S)
            except errors.MemberLostError:
                if time.monotonic() - began_s < COMPUTE_S:
                    raise
                member.ring.shut()
                return FailedFunction(_too_long(how.names[1]))


def _too_long(name: str) -> errors.FunctionFailedError:
    return errors.FunctionFailedError(
        f"{name} took longer than {COMPUTE_S:g} s for one node's share of the segments, or a node "
        "between was cut off.",
        stage="split_aggregate",
        cause="MemberLostError",
        hint="More parallelism makes smaller segments; NumPy arrays with np.add are reduced in C.",
    )


def _close(ring: MemberRing) -> None:
    # On a thread: one that still waits for members is closed when it has stopped waiting.
    threading.Thread(target=ring.close, name="clamor-ring-close", daemon=True).start()


def _how(how: bytes) -> How:
    made: How = pickle.loads(how)()
    return made
