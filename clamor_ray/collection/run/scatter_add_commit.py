"""What a stage's tasks have added to variables: one commit when the stage is over.

    task         its own sums, by variable: one Ray object (`Collector`, in `_write/deltas.py`)
    merge        a Ray task for each group of partitions: their sums made one, in the order of
                 partitions; one result for each home
    apply        a Ray task on each home's node: the groups' sums in the order of groups, into a
                 private mapping of the newest version; staged there under the commit's id. Of a
                 variable in pieces each home gets the rows of its own pieces
    commit       by the driver, over all variables and homes: the registry's word

The driver has references only. Which partitions are a group depends on their numbers and on how
many nodes could run its tasks when it began, never on where its tasks ran: floats are added in the
same order on every run. What is lost with a node Ray makes again from the same arguments, and what
was staged is nothing until the commit: so everything counts once.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import secrets
import time
import warnings
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

import numpy as np
import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from clamor_ray import errors
from clamor_ray._build.room import ensure_room, homes_give_room
from clamor_ray._objects.layout import put_together
from clamor_ray._objects.memory import COMMIT_HINT
from clamor_ray._protocol.attempt_record import Failure
from clamor_ray._protocol.messages import CommitRequest, Committed, RegionRecord, Write
from clamor_ray._protocol.names import server_id_of
from clamor_ray._read.lease import Lease
from clamor_ray._read.ref import GlobalRef, newest_states
from clamor_ray._session import process_sessions
from clamor_ray._session.session import Session
from clamor_ray._write.applying import bring
from clamor_ray._write.deltas import Sum, apply_sums, merged
from clamor_ray._write.packed_sums import pack_sum, unpack_sum
from clamor_ray._write.retry import pause_s
from clamor_ray._write.row_ranges import ALL_ROWS, Range, cut, rows_of_pieces
from clamor_ray._write.scatter_add import AGAIN, layout_at_or_after
from clamor_ray._write.write_set import Change, WriteSetEntry, rows_at
from clamor_ray._write.write_targets import WriteTarget
from clamor_ray.collection.plan.followers import move_followers
from clamor_ray.collection.plan.task_messages import Meta
from clamor_ray.collection.run.schedule import group_of

FIRST_PAUSE_S: Final = 0.002
MOST_PAUSE_S: Final = 0.5
LEAST_RATE: Final = 50e6  # bytes per second, for deadlines of large commits
ANSWER_MARGIN_S: Final = 5.0
RETRIES: Final = 4  # of the tasks here, by Ray
MOST_KNOWN: Final = 1000
TOGETHER_BYTES: Final = 1 << 20  # below, what is added is not merged before it goes to its home


class Added(NamedTuple):
    """What one partition has added.

    Args:
        sums: reference to its `Sum`s, by region.
        node_id: where it ran.
        n_bytes: of the sums.
    """

    sums: Any
    node_id: str
    n_bytes: int


# ------------------------------------------------------------------ on the nodes


def _raise_failures(found: Sequence[Any]) -> None:
    for one in found:
        if isinstance(one, Failure):
            raise one.error


class Share(NamedTuple):
    """What of a variable is at one home.

    Args:
        region: of the variable.
        ranges: of its rows: one for each piece there; all where it has no pieces.
    """

    region: int
    ranges: tuple[Range, ...]


def merge(homes: Sequence[Sequence[Share]], *found: Any) -> Any:
    """What the partitions of one group have added, made one.

    Args:
        homes: what each home has.
        found: of each partition, in their order.

    Returns:
        For each home the packed sums of each range there, by region; without a list where there is
        one home.
    """
    _raise_failures(found)
    totals = _totals({share.region for shares in homes for share in shares}, found)
    made = [
        {
            share.region: tuple(
                None if part is None else pack_sum(part)
                for part in cut(totals[share.region], share.ranges)
            )
            for share in shares
            if share.region in totals
        }
        for shares in homes
    ]
    return made[0] if len(made) == 1 else made


def _totals(regions: Iterable[int], found: Sequence[Any]) -> dict[int, Sum]:
    return {
        region: merged([sums[region] for sums in found if region in sums])
        for region in regions
        if any(region in sums for sums in found)
    }


class HomeOrder(NamedTuple):
    """What is to be applied at one home.

    Args:
        scope: of the session.
        commit_id: to stage under.
        dropped: what was staged before under another id, and is not wanted any more; 0: nothing.
        refs: packed references to the variables, at the version that is changed.
        shares: what of each is changed here.
        groups: how many of the sums are of each group; they are merged first.
        are_merged: they are merged already, and cut; there is one of each group.
    """

    scope: str
    commit_id: int
    dropped: int
    refs: tuple[bytes, ...]
    shares: tuple[Share, ...]
    groups: tuple[int, ...]
    are_merged: bool


def apply_at_home(packed: bytes, *found: Any) -> bytes:
    """Applies sums to variables and stages what that has changed.

    Returns:
        The pickled writes of the commit.
    """
    _raise_failures(found)
    order: HomeOrder = pickle.loads(packed)
    refs = [GlobalRef._unpacked(each) for each in order.refs]
    session = process_sessions.current(order.scope)
    regions = [ref._region for ref in refs]
    staged = [*regions, *(piece.region for ref in refs for piece in ref._piece_versions())]
    _drop(session, order.dropped, staged)
    groups: list[Any] = list(found)
    if not order.are_merged:
        groups, at = [], 0
        for n in order.groups:
            totals = _totals(regions, found[at : at + n])
            groups.append(
                {
                    s.region: cut(totals[s.region], s.ranges)
                    for s in order.shares
                    if s.region in totals
                }
            )
            at += n
    writes: list[Write] = []
    try:
        for ref, share in zip(refs, order.shares, strict=True):
            cuts = [group[ref._region] for group in groups if ref._region in group]
            sums = [
                (rows, [unpack_sum(each) for each in parts if each is not None])
                for rows, *parts in zip(share.ranges, *cuts, strict=True)
            ]
            writes += _apply_to(session, order.commit_id, ref, sums)
    except BaseException:
        _drop(session, order.commit_id, staged)
        raise
    return pickle.dumps(writes, 5)


def _drop(session: Session, commit_id: int, regions: Sequence[int]) -> None:
    for region in regions if commit_id else ():
        with contextlib.suppress(errors.ClamorError):  # the page server asks in its own time
            session.client.resolve(commit_id, region, 0)


def _apply_to(
    session: Session,
    commit_id: int,
    ref: GlobalRef[Any],
    sums: Sequence[tuple[Range, Sequence[Sum]]],
) -> list[Write]:
    lease: Lease | None = None
    if ref._payload is not None:
        image: Any = np.frombuffer(ref._payload, np.uint8).copy()
    else:
        lease = session.open(ref, private=True)
        image = lease.bytes()
    array = put_together(image, ref._plan)
    parts = [(array[begin:end] if array.ndim else array, some) for (begin, end), some in sums]
    for rows, some in parts:
        for one in some:
            bring(session, lease, rows, one.touched)
        apply_sums(rows, some)
    part = WriteSetEntry(
        target=WriteTarget(ref),
        begin=ref,
        plan=ref._plan,
        lease=lease,
        image=image,
        raw=array,
        value=array,
        before=None,
    )
    runs = part.dirty(session)
    if runs is None:
        return []
    change = Change.of(session, part, runs)
    writes = change.writes(session.server_id)
    layer_bytes = sum(write.layer_bytes for write in writes)
    gives = homes_give_room(session.rpc, session.node_id, layer_bytes)
    ensure_room(layer_bytes, "The commit", gives, COMMIT_HINT)
    timeout_s = session.config.control_timeout_s + layer_bytes / LEAST_RATE
    staged_at = change.stage(session, commit_id, timeout_s)
    return [replace(write, staged_at=staged_at.get(write.region, 0)) for write in writes]


# ------------------------------------------------------------------ on the driver


class ScatterAddCommit:
    """What the tasks of one stage have added, until it is committed.

    Args:
        scope: of the session.
        nodes: that were alive when the stage began.
        n_groups: how many of them had places for its tasks.
    """

    def __init__(self, scope: str, nodes: Sequence[str], n_groups: int) -> None:
        self._scope = scope
        self._nodes = list(nodes)
        self._n_groups = max(1, n_groups)
        self._added: dict[int, Added] = {}
        self._refs: dict[int, GlobalRef[Any]] = {}

    def add(self, partition: int, meta: Meta, sums: Any) -> None:
        """The report of the attempt that counts."""
        for packed in meta.scatter_added:
            ref = GlobalRef._unpacked(packed)
            self._refs[ref._region] = ref
        self._added[partition] = Added(sums, meta.node_id, meta.scatter_added_bytes)

    def commit(self) -> None:
        """Applies all of it by one commit; nothing where nothing was added.

        Raises:
            CommitConflict: Others were first, again and again, for CLAMOR_CONTROL_TIMEOUT_S.
            FreedError, HomeLostError, OutOfMemoryError, ...: Nothing was applied.
        """
        if not self._added:
            return
        session = process_sessions.current(self._scope)
        refs = [self._refs[region] for region in sorted(self._refs)]
        homes = self._homes(session, refs)
        found = self._merged(homes)
        deadline = time.monotonic() + session.config.control_timeout_s
        n_tries, dropped = 0, 0
        while True:
            commit_id = secrets.randbits(64) or 1
            try:
                self._commit_once(session, refs, homes, found, commit_id, dropped)
                return
            except (*AGAIN, errors.CommitAbortedError):
                wait_s = pause_s(n_tries, FIRST_PAUSE_S, MOST_PAUSE_S, random.uniform)
                if time.monotonic() + wait_s > deadline:
                    raise
            dropped = commit_id
            n_tries += 1
            time.sleep(wait_s)

    # -- where

    def _homes(
        self, session: Session, refs: Sequence[GlobalRef[Any]]
    ) -> list[tuple[str | None, list[Share]]]:
        """What each home has, and its node. Variables inside references have none: they go with the
        first."""
        node_of = {server_id_of(node): node for node in self._nodes}
        by_home: dict[str | None, list[Share]] = {}
        inline = [Share(ref._region, ALL_ROWS) for ref in refs if ref._inline]
        for ref in refs:
            for node, ranges in ({} if ref._inline else _places(session, ref, node_of)).items():
                by_home.setdefault(node, []).append(Share(ref._region, ranges))
        homes = sorted(
            by_home.items(), key=lambda home: [(s.region, s.ranges[0][0]) for s in home[1]]
        )
        if not homes:
            return [(None, inline)]
        homes[0][1].extend(inline)
        return homes

    def _groups(self) -> list[list[Added]]:
        """Partitions by group, each in their order; none is empty."""
        groups: dict[int, list[Added]] = {}
        for partition in sorted(self._added):
            number = group_of(partition, self._n_groups)
            groups.setdefault(number, []).append(self._added[partition])
        return [groups[number] for number in sorted(groups)]

    def _merged(
        self, homes: Sequence[tuple[str | None, list[Share]]]
    ) -> tuple[list[list[Any]], tuple[int, ...], bool]:
        """What goes to each home, how it is grouped there, and whether it is merged. Little goes as
        it is."""
        groups = self._groups()
        total_bytes = sum(added.n_bytes for group in groups for added in group)
        if len(self._nodes) <= 1 or (len(homes) == 1 and total_bytes < TOGETHER_BYTES):
            flat = [added.sums for group in groups for added in group]
            return [flat for _ in homes], tuple(len(group) for group in groups), False
        task = ray.remote(merge)
        shares = [home[1] for home in homes]
        rows = []
        for group in groups:
            by_node: dict[str, int] = {}
            for added in group:
                by_node[added.node_id] = by_node.get(added.node_id, 0) + added.n_bytes
            most = max(sorted(by_node), key=lambda node: by_node[node])
            made = task.options(num_returns=len(homes), **_at(most)).remote(
                shares, *(added.sums for added in group)
            )
            rows.append(made if isinstance(made, list) else [made])
        return [[row[home] for row in rows] for home in range(len(homes))], (1,) * len(rows), True

    # -- the commit

    def _commit_once(
        self,
        session: Session,
        refs: Sequence[GlobalRef[Any]],
        homes: Sequence[tuple[str | None, list[Share]]],
        found: tuple[list[list[Any]], tuple[int, ...], bool],
        commit_id: int,
        dropped: int,
    ) -> None:
        states = newest_states(session, list(refs))
        newest = {
            ref._region: ref._with(state, frozen=True)
            for ref, state in zip(refs, states, strict=True)
        }
        task = ray.remote(apply_at_home)
        answers = []
        began_s = time.monotonic()
        every, groups, are_merged = found
        for (node, shares), sums in zip(homes, every, strict=True):
            order = HomeOrder(
                scope=self._scope,
                commit_id=commit_id,
                dropped=dropped,
                refs=tuple(newest[share.region]._packed() for share in shares),
                shares=tuple(shares),
                groups=groups,
                are_merged=are_merged,
            )
            answers.append(task.options(**_at(node)).remote(pickle.dumps(order, 5), *sums))
        by_region: dict[int, Write] = {}  # each home of a variable in pieces names it, too
        for answer in _results(answers):
            by_region |= {write.region: write for write in pickle.loads(answer)}
        writes = list(by_region.values())
        if not writes:
            return
        payloads = {write.region: write.payload for write in writes}

        def move(versions: Mapping[int, int], rows: Mapping[int, bytes]) -> None:
            for region in versions.keys() & newest.keys():
                ref = newest[region]
                if ref._pieces is not None and region not in rows:
                    continue  # it was freed since, or the registry is away again
                state = ref._state_after(
                    ref._plan, payloads[region], versions[region], rows.get(region)
                )
                move_followers(ref._with(state, frozen=True))

        try:
            made = _commit(session, commit_id, writes, began_s)
            move(made.versions, made.rows)
        except _InDoubt as doubt:
            failure = doubt.__cause__
            assert failure is not None
            try:
                versions = _settled(session, commit_id)
            except errors.ServerUnavailableError as unknown:
                if isinstance(failure, errors.ClamorError):
                    raise
                warnings.warn(str(unknown), errors.ClamorWarning, stacklevel=2)
                raise failure from None  # an interrupt stays one
            rows: dict[int, bytes] = {}
            with contextlib.suppress(errors.ServerUnavailableError, errors.WaitTimeoutError):
                rows = rows_at(session, newest.values(), versions)
            move(versions, rows)
            if versions and isinstance(failure, errors.ClamorError):
                return
            if versions:
                warnings.warn(
                    "What a stage's tasks have added had been applied when it was interrupted; "
                    "its references have moved. The action run again adds once more.",
                    errors.ClamorWarning,
                    stacklevel=2,
                )
            raise failure from None


def _at(node: str | None) -> dict[str, Any]:
    how: dict[str, Any] = {"num_cpus": 0, "max_retries": RETRIES}
    if node is not None:
        how["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node, soft=True)
    return how


_homes: Final[weakref.WeakKeyDictionary[Any, dict[int, int]]] = weakref.WeakKeyDictionary()
_ranges: Final[weakref.WeakKeyDictionary[Any, dict[int, tuple[Range, ...] | None]]] = (
    weakref.WeakKeyDictionary()
)  # of variables in pieces


def _places(
    session: Session, ref: GlobalRef[Any], nodes: Mapping[int, str]
) -> dict[str | None, tuple[Range, ...]]:
    """The rows at each node."""
    if ref._pieces is None:
        return {_node_of(session, ref._region, nodes): ALL_ROWS}
    pieces = ref._piece_versions()
    known = _ranges.setdefault(session, {})
    if ref._region not in known:
        while len(known) >= MOST_KNOWN:
            del known[next(iter(known))]
        begins = [begin for begin, n_bytes in ref._plan.buffers if n_bytes]
        known[ref._region] = None
        if len(begins) == 1 and ref._pieces.width <= 1:
            layout = layout_at_or_after(ref.snapshot())
            n, piece_bytes = ref._pieces.n, ref._pieces.piece_bytes
            known[ref._region] = rows_of_pieces(layout, begins[0], piece_bytes, n)
    ranges = known[ref._region]
    if ranges is None:  # some rows have two homes, or pieces of two homes one parity
        return {_node_of(session, pieces[0].region, nodes): ALL_ROWS}
    found: dict[str | None, list[Range]] = {}
    for piece, rows in zip(pieces, ranges, strict=True):
        if rows[0] != rows[1]:
            found.setdefault(_node_of(session, piece.region, nodes), []).append(rows)
    return {node: tuple(some) for node, some in found.items()}


def _node_of(session: Session, region: int, nodes: Mapping[int, str]) -> str | None:
    """The node of a region's home, among those that are alive. It is where its blocks are, and
    nothing else depends on it: what was heard once will do until that node is gone."""
    known = _homes.setdefault(session, {})
    if known.get(region) not in nodes:
        answer = session.rpc.lookup(region)
        if not isinstance(answer, RegionRecord) or not answer.homes:
            return None  # freed: the next question says so
        while len(known) >= MOST_KNOWN:
            del known[next(iter(known))]
        known[region] = answer.homes[0]
    return nodes.get(known[region])


def _results(references: Sequence[Any]) -> list[Any]:
    try:
        return list(ray.get(list(references)))
    except RayError as failure:
        cause = getattr(failure, "cause", None)
        if isinstance(cause, errors.ClamorError):
            raise cause from None
        raise errors.FunctionFailedError(
            f"What a stage's tasks have added could not be applied: "
            f"{type(failure).__name__}: {failure}",
            cause=type(failure).__name__,
            hint="Nothing was applied. Ray says above why; the action can be run again.",
        ) from failure


class _InDoubt(Exception):
    """Whether a commit was made is not known: its answer did not come. The cause says why."""


def _commit(session: Session, commit_id: int, writes: Sequence[Write], began_s: float) -> Committed:
    """The registry's word. The same id gets the same answer, however often it is asked.

    Args: began_s: when staging began, by the monotonic clock.

    Raises:
        ClamorError: It said no.
        _InDoubt: It said nothing, or this thread was interrupted before it could.
    """
    total_bytes = sum(write.layer_bytes for write in writes)
    timeout_s = session.config.control_timeout_s + total_bytes / LEAST_RATE
    request = CommitRequest(commit_id, tuple(writes), timeout_s)
    deadline = time.monotonic() + session.config.reattach_s
    wait_s = 0.05
    try:
        while True:
            try:
                request = replace(request, staged_ago_s=time.monotonic() - began_s)
                return session.rpc.commit(request, timeout_s=timeout_s + ANSWER_MARGIN_S)
            except errors.ServerUnavailableError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(wait_s)
            wait_s = min(1.0, 2 * wait_s)
    except (errors.ServerUnavailableError, errors.WaitTimeoutError, errors.InternalError) as lost:
        raise _InDoubt from lost
    except errors.ClamorError:
        raise
    except BaseException as interrupted:  # any: it may be between the question and its answer
        raise _InDoubt from interrupted


def _settled(session: Session, commit_id: int) -> dict[int, int]:
    """What became of a commit in doubt: its versions; none: it was not made, and never will be.

    Raises:
        ServerUnavailableError: Nobody can tell.
    """
    try:
        return dict(session.rpc.outcome(commit_id))
    except errors.ClamorError as failure:
        raise errors.ServerUnavailableError(
            "What a stage's tasks have added may have been applied, or not: the registry, which "
            f"would know, does not answer ({failure.message})",
            hint="Look at the variables (ref.refresh()) before the action is run again: it would "
            "add once more.",
        ) from failure
