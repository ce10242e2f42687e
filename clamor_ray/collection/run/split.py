"""Split aggregation: the driver's side (Sparker, sections 3 and 4).

As tasks of the stage win, the `AllReduce` actor of the node where each has run is told to merge
what it made; when the stage is over, the actors reduce their values around a ring, a segment each,
and the driver gathers the segments. Driver and actors move no partial result: those lie in the
nodes' object stores, and are read there in place.

Only winners are merged, each once. Whatever is lost meanwhile (an actor, a node, a connection), all
that was merged is forgotten, and merged anew under another run; Ray makes again what was lost of
partial results.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import operator
import random
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import cloudpickle
import numpy as np
import numpy.typing as npt
import ray
from ray.exceptions import (
    GetTimeoutError,
    ObjectLostError,
    RayActorError,
    RayError,
    RayTaskError,
)

from clamor_ray import errors
from clamor_ray._native.ring import DTYPES
from clamor_ray._protocol.cause import cause_of
from clamor_ray._protocol.idempotency import TOKEN_BYTES
from clamor_ray._protocol.ray_state import alive_nodes, raylet_is_gone
from clamor_ray._protocol.split_aggregation import (
    FETCH_S,
    RING_TIMEOUT_S,
    UFUNCS,
    AggregateLayout,
    FailedFunction,
    How,
    NotYet,
    RingPlan,
    differ,
    raised,
)
from clamor_ray.collection.plan.functions import Captured, capture, name_of
from clamor_ray.collection.plan.results import Part
from clamor_ray.collection.plan.stages import Folded, FunctionAt, Program
from clamor_ray.collection.plan.task_messages import Meta, TaskSpec
from clamor_ray.collection.run import mergers, report
from clamor_ray.collection.run.schedule import place_of

logger = logging.getLogger("clamor_ray")

Array = npt.NDArray[Any]

MOST_TRIES: Final = 8
QUIET_S: Final = 30.0  # after which actors are asked whether they live
PING_S: Final = 10.0
MOST_FETCH_S: Final = 60.0  # that an actor waits for a partial result, at most
MOST_PAUSE_S: Final = 2.0  # before everything is merged again
GRACE_S: Final = 2.0  # for the other members' answers when one is lost
INLINE_BYTES: Final = 64 << 10  # functions up to that travel with each call
MOST_LANES: Final = 16
DEFAULT_LANES: Final = 4
LEAST_BYTES: Final = 8 << 20  # from which on `aggregate` does so: see docs/aggregation.md

ITEM_BYTES: Final = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "int32": 4,
    "int64": 8,
}
_OPS: Final[Mapping[Any, str]] = {
    np.add: "sum",
    operator.add: "sum",
    operator.iadd: "sum",
    np.multiply: "prod",
    operator.mul: "prod",
    operator.imul: "prod",
    np.minimum: "min",
    np.maximum: "max",
}
_NAMES: Final = ("sum", "prod", "min", "max")


def op_of(function: Any) -> str | None:
    """The operation, element by element, that a function is known to do on two arrays.

    Example:
        >>> op_of(np.add), op_of("max"), op_of(max)
        ('sum', 'max', None)
    """
    if isinstance(function, str):
        return function if function in _NAMES else None
    try:
        return _OPS.get(function)
    except TypeError:  # a callable that cannot be hashed
        return None


def _loaded(
    op: str | None, n_segments: int, functions: tuple[Captured | None, Captured | None]
) -> How:
    """Runs in the actors."""
    split, reduce = (
        None if each is None else each.load([variable.ref for variable in each.variables])[0]
        for each in functions
    )
    names = tuple(
        role if each is None else f"{role} ({each.name})"
        for role, each in zip(("split_op", "reduce_op"), functions, strict=True)
    )
    return How(op=op, n_segments=n_segments, split=split, reduce=reduce, names=names)  # type: ignore[arg-type]


class Recipe(NamedTuple):
    """How partial results are split and reduced; see `How`.

    Args:
        op: a known operation, for arrays.
        split, reduce: as they go to actors.
    """

    op: str | None
    split: Captured | None = None
    reduce: Captured | None = None

    def packed(self, n_segments: int) -> bytes:
        """As actors get it."""
        functions = (self.split, self.reduce)
        made: bytes = cloudpickle.dumps(
            functools.partial(_loaded, self.op, n_segments, functions), protocol=5
        )
        return made


def recipe_of(split_op: Any, reduce_op: Any) -> Recipe:
    """The recipe of `split_aggregate`.

    Raises:
        TypeError: One of them is no function.
        ValueError: There is no such operation.
        UnpicklableError: One of them cannot be pickled.
    """
    if isinstance(reduce_op, str):
        if reduce_op not in _NAMES:
            raise ValueError(f"reduce_op is a function, or one of {_NAMES}, not {reduce_op!r}")
        return Recipe(reduce_op, capture(split_op))
    return Recipe(op_of(reduce_op), capture(split_op), capture(reduce_op))


class _Lost(Exception):
    """What was merged is lost, or part of it."""


class _Round(NamedTuple):
    """A call of an actor that runs."""

    node: str
    handle: Any
    partitions: tuple[int, ...]


class SessionRings:
    """The rings that a session's actors form: each composition has a name of its own, so that what
    has fallen apart is never taken for what is joined next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._names: dict[tuple[Any, ...], str] = {}

    def name(self, members: Sequence[Any], lanes: int) -> str:
        """Of a ring of these actors, in this order."""
        key = (lanes, *(member._actor_id.hex() for member in members))
        with self._lock:
            while len(self._names) >= 16:
                self._names.pop(next(iter(self._names)))
            return self._names.setdefault(key, f"nodes-{secrets.token_hex(8)}")

    def forget(self) -> None:
        """They may be broken."""
        with self._lock:
            self._names.clear()


_rings: weakref.WeakKeyDictionary[Any, SessionRings] = weakref.WeakKeyDictionary()


class Merging:
    """One action's partial results on their way to segments.

    Args:
        session: this process's.
        nodes: that tasks may run on, when the stage begins.
        recipe: see there.
        lanes: connections between neighbours in the ring; P of P x N segments.
        fixed: partitions belong to nodes by `place_of`, and are merged there in their order: the
            same bits on every run.
        least_bytes: nothing is merged where the first result is no array of numbers of that size;
            None: whatever it is.
        n_partitions: of the collection.
        number: of the collection, as the lineage registry knows it.
    """

    def __init__(
        self,
        session: Any,
        nodes: Iterable[str],
        recipe: Recipe,
        lanes: int,
        *,
        fixed: bool,
        least_bytes: int | None = None,
        n_partitions: int,
        number: int,
    ) -> None:
        self._session = session
        self._number = number
        self._recipe = recipe
        self._nodes = sorted(nodes)
        self._lanes = lanes
        self._least_bytes = least_bytes
        self.n_segments = lanes * max(1, len(self._nodes))
        packed = recipe.packed(self.n_segments)
        self._how: Any = packed if len(packed) <= INLINE_BYTES else ray.put(packed)
        self._turns = _turns_on(self._nodes, n_partitions) if fixed and self._nodes else {}
        self._parts: dict[int, Part] = {}
        self._array: tuple[str, tuple[int, ...]] | None = None
        self._is_on = least_bytes is None
        self._is_lost = False
        self._rings = _rings.setdefault(session, SessionRings())
        self._begin()
        if self._is_on:
            self._wake()

    def _begin(self) -> None:
        self._run_id = secrets.randbits(63)
        self._calls: dict[Any, _Round] = {}  # merges that run
        self._layouts: dict[str, tuple[int, AggregateLayout]] = {}  # with a partition, by node
        self._homes: dict[str, list[int]] = {}  # partitions by the node where they are merged
        self._handles: dict[str, Any] = {}
        self._is_lost = False

    def _wake(self) -> None:
        """Has actors made while the tasks run."""
        with contextlib.suppress(errors.ClamorError):
            mergers.checked(self._session)
            for node in self._nodes:
                mergers.actor_on(self._session, node)

    # -- while the stage runs

    @property
    def is_on(self) -> bool:
        """Whether partial results are merged on their nodes."""
        return self._is_on

    def took(self, partition: int, part: Part) -> None:
        """A task has won. Does not wait."""
        self._parts[partition] = part
        if self._least_bytes is not None and not self._suits(part):
            return
        if self._is_on and not self._is_lost:
            turn = self._turns.get(partition)
            node = part.meta.node_id if turn is None else turn[0]
            self._send(partition, node)

    def _suits(self, part: Part) -> bool:
        """Whether it is an array as the others, of numbers and large enough."""
        array = part.meta.array
        if len(self._parts) == 1:
            self._array = array
            if array is not None and array[0] in DTYPES:
                assert self._least_bytes is not None
                self._is_on = math.prod(array[1]) * ITEM_BYTES[array[0]] >= self._least_bytes
            if self._is_on:
                self._wake()
        elif self._is_on and array != self._array:
            self._is_on = False
            self._clear()
        return self._is_on

    def _send(self, partition: int, node: str) -> None:
        try:
            handle = self._handles.get(node)
            if handle is None:
                handle = self._handles[node] = mergers.actor_on(self._session, node)
            call = self._merge_call(partition, handle, FETCH_S)
        except (errors.ClamorError, RayError):  # its node is just ending
            self._is_lost = True
            return
        self._homes.setdefault(node, []).append(partition)
        self._calls[call] = _Round(node, handle, (partition,))

    def _merge_call(self, partition: int, handle: Any, fetch_s: float) -> Any:
        reference = self._parts[partition].outs[0]
        turn = self._turns[partition][1] if partition in self._turns else None
        return handle.merge.remote(self._run_id, self._how, [(partition, turn, reference)], fetch_s)

    # -- when it is over

    def segments(self) -> tuple[AggregateLayout, list[Any]]:
        """What all partitions make together, as the members of the ring hold it: of arrays their
        shares of all segments in one, of objects all segments; in order.

        Raises:
            FunctionFailedError: A function of the user's raised.
            CollectiveMismatchError: Partitions' values are not alike.
            MemberLostError: Actors were lost, again and again.
        """
        why: Exception | None = None
        try:
            for tried in range(MOST_TRIES):
                try:
                    if tried:  # not all processes that got in each other's way at the same time
                        time.sleep(random.uniform(0.0, min(MOST_PAUSE_S, 0.05 * 2**tried)))
                        self._again()
                    return self._reduced()
                except _Lost as lost:
                    why = lost
                    logger.info("an aggregate is merged again: %s", lost)
        except BaseException:
            self._rings.forget()  # a ring of which one member has raised is broken
            raise
        raise errors.MemberLostError(
            f"Actors that merge an aggregate were lost {MOST_TRIES} times; at last: {why}",
            hint="Do nodes end all the time, or is their memory too small for one aggregate and "
            "its partial results? Nothing was returned; the action can be made again.",
        ) from why

    def _again(self) -> None:
        self._clear()
        self._rings.forget()
        mergers.checked(self._session)
        self._begin()
        alive = self._alive()
        if self._turns and not set(self._nodes) <= set(alive):
            self._nodes = alive
            self._turns = _turns_on(alive, len(self._turns))
        for partition, part in sorted(self._parts.items()):
            node = part.meta.node_id
            if partition in self._turns:
                node = self._turns[partition][0]
            elif node not in alive:
                node = alive[partition % len(alive)]
            self._send(partition, node)

    def _alive(self) -> list[str]:
        found = sorted(node for node in alive_nodes() if not raylet_is_gone(node))
        if not found:
            raise _Lost("no node of the cluster answers")
        return found

    def _reduced(self) -> tuple[AggregateLayout, list[Any]]:
        if self._is_lost:
            raise _Lost("an actor could not be made, or was not there any more")
        self._wait_for_merges()
        first = next(iter(self._layouts.values()))
        for other in self._layouts.values():
            if other[1] != first[1]:
                raise differ(first, other)
        nodes = sorted(self._homes)
        handles = [self._handles[node] for node in nodes]
        name = self._rings.name(handles, self._lanes)
        calls, began_ns = {}, time.time_ns()
        for rank, (node, handle) in enumerate(zip(nodes, handles, strict=True)):
            plan = RingPlan(name, len(nodes), rank, min(self._lanes, MOST_LANES))
            partitions = tuple(self._homes[node])
            call = handle.reduce.remote(self._run_id, partitions, plan, RING_TIMEOUT_S)
            calls[call] = _Round(node, handle, partitions)
        answers = self._answers(calls)
        shares = [answers[call] for call in calls]
        self._note(calls.values(), began_ns)
        layout = first[1]
        if not layout.dtype:
            return layout, [segment for share in shares for segment in share]
        return layout, shares

    def _wait_for_merges(self) -> None:
        fetch_s = FETCH_S
        while self._calls:
            calls, fetch_s = self._calls, min(MOST_FETCH_S, 2 * fetch_s)
            answers, self._calls = self._answers(calls), {}
            for call, answer in answers.items():
                what = calls[call]
                if isinstance(answer, NotYet):  # meanwhile the actor has done what others asked
                    logger.info("an aggregate waits for partition %d", what.partitions[0])
                    again = self._merge_call(what.partitions[0], what.handle, fetch_s)
                    self._calls[again] = what
                elif answer is not None:
                    self._layouts.setdefault(what.node, (what.partitions[0], answer))

    def _note(self, rounds: Iterable[_Round], began_ns: int) -> None:
        """Tells the lineage registry which node has reduced what."""
        reduce = self._recipe.reduce or self._recipe.split
        functions = () if reduce is None else ((reduce, 0),)
        program = Program((), functions, Folded(FunctionAt(0)))
        for rank, each in enumerate(rounds):
            inputs = (f"{len(each.partitions)} partial results",)
            token = secrets.token_bytes(TOKEN_BYTES)
            scope = self._session.scope
            spec = TaskSpec(
                token=token,
                run_id=self._number,
                stage="merge",
                partition=rank,
                attempt=0,
                scope=scope,
                snapshots=(),
                slots=(),
                inputs=inputs,
            )
            meta = Meta(
                partition=rank,
                attempt=0,
                node_id=each.node,
                start_ns=began_ns,
                end_ns=time.time_ns(),
                n_items=0,
                n_bytes=0,
                reads=(),
            )
            report.note(spec, meta, program)

    def _answers(self, calls: Mapping[Any, _Round]) -> dict[Any, Any]:
        """What calls return, when all are over.

        Raises:
            ClamorError: A call raised what is no mere loss.
            _Lost: An actor is gone, or does not answer.
        """
        left, heard_s = list(calls), time.monotonic()
        answers: dict[Any, Any] = {}
        lost: list[Exception] = []
        failures: list[Exception] = []
        while left:
            wait_s = GRACE_S if lost else PING_S
            over, left = ray.wait(left, num_returns=1, timeout=wait_s, fetch_local=False)
            if over:
                more, left = ray.wait(left, num_returns=len(left), timeout=0) if left else ([], [])
                heard_s = time.monotonic()
            elif lost:  # the others may wait for the one that is gone
                break
            elif time.monotonic() - heard_s > QUIET_S:
                heard_s = time.monotonic()
                logger.info("an aggregate waits for %d partial results", len(left))
                try:
                    self._ping([calls[call] for call in left])
                except _Lost:
                    _unread(left)
                    raise
            for call in [*over, *more] if over else []:
                answers[call] = self._answer(call, calls[call], lost, failures)
        _unread(left)
        # What a function raised comes first: others have only lost the member where it did.
        for error in [*failures, *lost]:
            raise error
        return {call: answers[call] for call in calls}

    def _answer(
        self, call: Any, what: _Round, lost: list[Exception], failures: list[Exception]
    ) -> Any:
        try:
            answer = ray.get(call, timeout=RING_TIMEOUT_S)
            if not isinstance(answer, FailedFunction):
                return answer
            failures.append(answer.error)
        except RayTaskError as failure:
            meant = self._meant(failure)
            (lost if isinstance(meant, _Lost) else failures).append(meant)
        except (RayActorError, ObjectLostError, GetTimeoutError) as failure:
            mergers.forget(self._session, what.node, what.handle)
            lost.append(_Lost(f"{cause_of(failure)}"))
        except RayError as failure:
            lost.append(_Lost(f"{cause_of(failure)}"))
        return None

    @staticmethod
    def _meant(failure: RayTaskError) -> Exception:
        cause = failure.cause
        passing = (
            errors.MemberLostError,
            errors.ClosedError,
            errors.ProtocolError,
            errors.WaitTimeoutError,
            errors.ServerUnavailableError,
        )
        if isinstance(cause, passing):
            return _Lost(str(cause))
        if isinstance(cause, errors.ClamorError):
            return cause
        if isinstance(cause, RayError):
            return errors.FunctionFailedError(
                "A partition's partial result was lost, and could not be computed again: "
                f"{cause_of(cause)}",
                cause=type(cause).__name__,
                hint="Ray says above why. The action can be made again.",
            )
        return errors.FunctionFailedError(
            f"Partial results could not be reduced: {cause_of(failure)}",
            cause=type(cause).__name__,
            hint="Segments must be something that pickle or cloudpickle can pickle.",
        )

    def _ping(self, silent: Sequence[_Round]) -> None:
        handles = {each.node: each.handle for each in silent}
        pings = {handle.ping.remote(): node for node, handle in handles.items()}
        over, dead = ray.wait(list(pings), num_returns=len(pings), timeout=PING_S)
        for ping in over:
            try:
                ray.get(ping, timeout=PING_S)
            except RayError:
                dead.append(ping)
        for ping in dead:
            node = pings[ping]
            mergers.forget(self._session, node, handles[node], end=True)
        if dead:
            raise _Lost(f"{len(dead)} actors did not answer for {QUIET_S + PING_S:g} s")

    def close(self) -> None:
        """The action is over: what its tasks have made may go."""
        self._clear()
        self._parts = {}
        _unread(self._calls)
        self._calls = {}

    def _clear(self) -> None:
        """Nobody merges for this run any more."""
        for handle in self._handles.values():
            with contextlib.suppress(RayError):
                handle.clear.remote(self._run_id)


def _unread(calls: Iterable[Any]) -> None:
    """Nobody will ask for these answers: Ray prints errors that were never looked at."""
    for call in calls:
        call.future().add_done_callback(lambda done: done.exception())


def _turns_on(nodes: Sequence[str], n_partitions: int) -> dict[int, tuple[str, int]]:
    """Where each partition is merged, and when: after how many others."""
    counts = dict.fromkeys(nodes, 0)
    turns = {}
    for partition in range(n_partitions):
        node = place_of(partition, nodes)
        turns[partition] = (node, counts[node])
        counts[node] += 1
    return turns


# ------------------------------------------------------------------ what comes of it


def whole(
    layout: AggregateLayout, shares: Sequence[Array], op: str, zero: Any, comb_op: Any
) -> Any:
    """The result of `aggregate`: zero, and what all partitions make together.

    Args:
        layout: of one array.
        shares: of it, flattened, in order.
        op: what `comb_op` does.
        zero: which counts once more, as in a tree.
    """
    (shape,) = layout.shapes
    dtype = shares[0].dtype
    if type(zero) is not np.ndarray or (zero.shape, zero.dtype) != (shape, dtype):
        gathered = np.concatenate(shares).reshape(shape)
        return comb_op(zero, gathered)
    result = np.empty(shape, dtype)
    flat, begin, low = result.reshape(-1), np.ascontiguousarray(zero).reshape(-1), 0
    for share in shares:
        high = low + share.size
        UFUNCS[op](begin[low:high], share, out=flat[low:high])
        low = high
    return result


def cut(layout: AggregateLayout, shares: Sequence[Any]) -> list[Any]:
    """The segments, for `concat_op`: views of shares where one has all of it."""
    if not layout.dtype:
        return list(shares)
    starts = np.cumsum([0, *(share.size for share in shares)]).tolist()
    segments, low = [], 0
    for shape in layout.shapes:
        high = low + int(np.prod(shape, dtype=np.int64))
        pieces = [
            share[max(low - start, 0) : high - start]
            for share, start in zip(shares, starts, strict=False)
            if start < high and low < start + share.size
        ]
        one = pieces[0] if len(pieces) == 1 else np.concatenate(pieces or [shares[0][:0]])
        segments.append(one.reshape(shape))
        low = high
    return segments


def concatenated(concat_op: Callable[[list[Any]], Any], segments: list[Any]) -> Any:
    """What `concat_op` makes of them.

    Raises:
        FunctionFailedError: It raised.
    """
    try:
        return concat_op(segments)
    except Exception as failure:  # any: it is the user's
        what = f"concat_op ({name_of(concat_op)})"
        raise raised(what, "on the driver", failure) from failure
