"""Makes variables: from an object to a sealed region and its reference."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeVar

import ray

from clamor_ray import errors
from clamor_ray._build.pieces import Content, ContentOf, PieceMaker, piece_bytes_of
from clamor_ray._build.room import ensure_room, homes_give_room
from clamor_ray._build.spares import Spares
from clamor_ray._counting.anchors import Anchor, Anchors, object_refs
from clamor_ray._counting.pool import AnchorPool
from clamor_ray._files.describe import describe
from clamor_ray._labels import capital, label
from clamor_ray._native.client import copy_in
from clamor_ray._native.pieced_client import PiecedClient
from clamor_ray._objects.layout import (
    BLOCK_BYTES,
    INLINE_BYTES,
    Plan,
    format_bytes,
    round_up,
    take_apart,
    take_apart_zeros,
)
from clamor_ray._objects.memory import check_room
from clamor_ray._protocol import ray_state
from clamor_ray._protocol.config import SEAL_S, Config
from clamor_ray._protocol.messages import INLINE_BASE, Counted, CreatedPieces, RegionRecord
from clamor_ray._protocol.registry_client import RegistryClient
from clamor_ray._protocol.rpc import new_request_id
from clamor_ray._protocol.source import FILE, Source, source_of_call, source_of_zeros
from clamor_ray._read.ref import GlobalRef
from clamor_ray._read.state import Pieces
from clamor_ray._redundancy.groups import PieceLayout
from clamor_ray._redundancy.levels import SPREAD, Level
from clamor_ray._spans.record import span
from clamor_ray._store.summed_copy import SummedCopy, is_too_large
from clamor_ray._tasks import task_context

_T = TypeVar("_T")
Home = Literal["spread"]
ZerosHome = Literal["spread", "writers"]


def _inline_id() -> int:
    """An id for a variable that travels inside its references. No server is asked for it."""
    region = INLINE_BASE | secrets.randbits(62)
    task_context.made(region)
    return region


class Creator:
    """Makes a session's variables. Safe from any thread.

    Args:
        scope: of the session.
        node_id: Ray's hex id of this node.
        config: of this process.
        rpc: calls the registry.
        client: gives the connection to this node's page server, made on first use.
        has_ended: whether the session's driver has ended it: then nothing is tried again.
    """

    def __init__(
        self,
        scope: str,
        node_id: str,
        config: Config,
        *,
        rpc: RegistryClient,
        client: Callable[[], PiecedClient],
        has_ended: Callable[[], bool],
    ) -> None:
        self._scope = scope
        self._node_id = node_id
        self._config = config
        self._rpc = rpc
        self._client = client
        self._has_ended = has_ended
        self._spares = Spares()
        self._anchors = self._make_anchors()
        self._store: str | None = None  # not asked yet

    def _make_anchors(self) -> AnchorPool:
        return AnchorPool(self._rpc.anchors)

    def after_fork(self) -> None:
        """In the child."""
        self._spares = Spares()  # the parent's are the parent's
        self._anchors = self._make_anchors()

    def put(
        self,
        obj: object,
        source: Callable[[], Any] | None = None,
        *,
        named: bool = False,
        level: Level | None = None,
    ) -> GlobalRef[Any]:
        """As `clamor.put`.

        Args:
            obj: the object.
            source: makes it again.
            level: how it is spread; None: it has one home, where there is room.
            named: it gets a name. Then it holds the references that are in it whoever refers to it,
                which one that travels inside its references cannot.
        """
        pickled = take_apart(obj)
        plan, inside = pickled.plan, list(pickled.inside)
        if plan.total_bytes < INLINE_BYTES and not (named and inside):
            where = (_inline_id(), 0, 0, 0)
            image = pickled.image()
            return GlobalRef(*where, plan, self._scope, image, held_by=pickled.inside)
        again = None if source is None else source_of_call(source, pickled, inside)
        try:
            if level is None:
                gives = homes_give_room(self._rpc, self._node_id, plan.region_bytes)
                ensure_room(plan.region_bytes, f"put({type(obj).__qualname__})", gives)
            return self._create(plan, pickled.pieces, again, inside, level)
        except errors.OutOfMemoryError as full:
            if level is not None or self._rpc.spread_over(self._node_id) < 2:
                raise
            return self._spread_after_all(full, plan, pickled.pieces, again, inside)

    def _spread_after_all(
        self,
        full: errors.OutOfMemoryError,
        plan: Plan,
        pieces: Callable[[], Iterator[tuple[int, memoryview]]],
        source: Source | None,
        inside: Sequence[Anchor],
    ) -> GlobalRef[Any]:
        """This node has no room for all of it."""
        try:
            return self._create(plan, pieces, source, inside, SPREAD)
        except errors.OutOfMemoryError as failure:
            raise errors.OutOfMemoryError(
                f"{full.message.rstrip('.')}; nor has it room when it is spread over the nodes: "
                f"{failure.message}",
                code=failure.code,
                hint=failure.hint,
            ) from failure

    def zeros(
        self, shape: Any, dtype: Any, capacity: int | None = None, level: Level | None = None
    ) -> GlobalRef[Any]:
        plan, inband = take_apart_zeros(shape, dtype, capacity)
        if plan.region_bytes <= INLINE_BYTES and plan.total_bytes < INLINE_BYTES:
            payload = inband.ljust(plan.total_bytes, b"\0")
            return GlobalRef(_inline_id(), 0, 0, 0, plan, self._scope, payload)
        source = source_of_zeros(plan, inband)
        if level is None and self._is_too_large(plan.total_bytes):
            level = SPREAD
        stream = memoryview(inband)
        return self._create(plan, lambda: iter([(0, stream)]), source, (), level)

    def copied(
        self,
        plan: Plan,
        content_of: ContentOf,
        n_bytes: int,
        inside: Sequence[Anchor],
        level: Level | None,
    ) -> GlobalRef[Any]:
        """A variable of bytes that lie elsewhere, as `put` makes it.

        Args:
            plan: what lies where.
            content_of: (begin, end) -> (offset, bytes) of all in between that is not zeros, in
                parts that do not overlap; it may be called more than once.
            n_bytes: of all that is not zeros.
            inside: anchors of the references that are in it.
            level: how it is spread; None: it has one home, where there is room.

        Raises:
            OutOfMemoryError, NoSpaceError, TooFewNodesError: As of `put`.
            What `content_of` raises. Nothing is left of the variable.
        """

        def all_of_it() -> Iterator[tuple[int, memoryview]]:
            yield from content_of(0, plan.region_bytes)

        try:
            if level is None:
                gives = homes_give_room(self._rpc, self._node_id, n_bytes)
                ensure_room(n_bytes, "Copying a variable", gives)
            return self._create(plan, all_of_it, None, inside, level, content_of)
        except errors.OutOfMemoryError:
            if level is not None or self._rpc.spread_over(self._node_id) < 2:
                raise
            return self._create(plan, all_of_it, None, inside, SPREAD, content_of)

    def inline(self, plan: Plan, payload: bytes, inside: Anchors) -> GlobalRef[Any]:
        """A variable below 4 KiB, which travels inside its references.

        Args:
            plan: what lies where.
            payload: its bytes.
            inside: anchors of the references that are in it.
        """
        where = (_inline_id(), 0, 0, 0)
        return GlobalRef(*where, plan, self._scope, payload, held_by=inside)

    def from_file(self, path: str | os.PathLike[str], **said: Any) -> GlobalRef[Any]:
        """As `clamor.from_file`, whose other arguments `said` are."""
        spec, plan = describe(path, node_id=self._node_id, **said)
        return self._create(plan, lambda: iter(()), spec.source())

    def _is_too_large(self, n_bytes: int) -> bool:
        """Whether this node has no room for so much, and there are others."""
        try:
            check_room(n_bytes, "zeros")
        except errors.OutOfMemoryError:
            return self._rpc.spread_over(self._node_id) > 1
        return False

    def _create(
        self,
        plan: Plan,
        pieces: Callable[[], Iterator[tuple[int, memoryview]]],
        source: Source | None,
        inside: Sequence[Anchor] = (),
        level: Level | None = None,
        content_of: ContentOf | None = None,
    ) -> GlobalRef[Any]:
        """Puts again where the page server died meanwhile: nothing was there before."""
        with span(self._scope, "put", bytes=plan.region_bytes) as found:
            ref = self._create_in_time(plan, pieces, source, inside, level, content_of)
            found.details["region"] = ref._region
            return ref

    def _create_in_time(
        self,
        plan: Plan,
        pieces: Callable[[], Iterator[tuple[int, memoryview]]],
        source: Source | None,
        inside: Sequence[Anchor],
        level: Level | None,
        content_of: ContentOf | None,
    ) -> GlobalRef[Any]:
        deadline = time.monotonic() + self._config.reattach_s
        while True:
            try:
                if level is not None:
                    layout = self.laid_out(plan.region_bytes, level)
                    if layout.piece_bytes < plan.region_bytes or layout.shape.width:
                        content = list(pieces()) if content_of is None else content_of
                        return self._try_create_pieces(
                            plan, layout, content, source, inside, follows=level.follows
                        )
                on_disk = level is not None and level.spill
                return self._try_create(plan, pieces(), source, inside, on_disk)
            except errors.ServerUnavailableError:
                if time.monotonic() >= deadline or self._has_ended():
                    raise
            time.sleep(0.1)

    @contextlib.contextmanager
    def room_on_disk(self, n_bytes: int) -> Iterator[None]:
        """The page server knows why there is none, and the user does not."""
        try:
            yield
        except errors.NoSpaceError as error:
            raise errors.NoSpaceError(
                f"The disk of this node has no room for {format_bytes(n_bytes)}.",
                code=error.code,
                hint="Make room in the directory for variables of spill=True, or set "
                "CLAMOR_SPILL_DIR to another one before the session begins; by default it is Ray's "
                "session directory. One that is in memory (tmpfs) has none.",
            ) from error

    def create_region(self, n_bytes: int, on_disk: bool = False) -> RegionRecord:
        """A new region on this node; anchors come along where there is none for it."""
        request_id = new_request_id()
        if not (n_anchors := self._anchors.wanted()):
            return self._rpc.create_region(n_bytes, self._node_id, request_id, on_disk)
        created = self._rpc.create_counted(n_bytes, self._node_id, request_id, n_anchors, on_disk)
        self._anchors.add(created.anchors)
        return created.record

    def _try_create(
        self,
        plan: Plan,
        pieces: Iterator[tuple[int, memoryview]],
        source: Source | None,
        inside: Sequence[Anchor],
        on_disk: bool,
    ) -> GlobalRef[Any]:
        client = self._client()
        in_file = source is not None and source.kind == FILE
        record = None if on_disk else self._spares.take(plan.region_bytes)
        if record is None:
            record = self.create_region(plan.region_bytes, on_disk)
        region = record.region
        task_context.made(region)
        try:
            with self.room_on_disk(record.length_bytes):
                fd = client.create(
                    *(region, record.base_address, record.length_bytes),
                    on_disk=record.on_disk,
                    in_file=in_file,
                    timeout_s=self._config.connect_timeout_s,
                )
            try:
                self._fill(fd, record, pieces)
            finally:
                os.close(fd)
            try:
                client.seal(region, timeout_s=max(SEAL_S, self._config.connect_timeout_s))
                anchor = self.anchor()
                counted = self._counted(anchor, inside)
                self._seal(record, source, counted)
            except errors.FreedError as error:
                # What was not sealed ends with the page server; the registry gives it 10 minutes.
                raise errors.ServerUnavailableError(
                    f"{capital(label(region))} was given up while it was filled: the page server "
                    "of this node was restarted, or the copy took more than 10 minutes.",
                    code=error.code,
                    hint="Nothing is left of it: put the object again.",
                ) from error
        except BaseException:
            with contextlib.suppress(errors.ClamorError):
                client.abandon(region, timeout_s=self._config.connect_timeout_s)
            with contextlib.suppress(errors.ClamorError):
                self._rpc.abandon(region)
            raise
        return self.ref(record, plan, (anchor,))

    def _fill(
        self, fd: int, record: RegionRecord, pieces: Iterator[tuple[int, memoryview]]
    ) -> None:
        content = list(pieces)
        if not record.on_disk or not is_too_large(sum(view.nbytes for _, view in content)):
            for offset, view in content:
                copy_in(fd, offset, view)
            return
        copy = SummedCopy(fd, record.length_bytes)
        with self.room_on_disk(record.length_bytes):
            for offset, view in content:
                copy.write(offset, view)
        copy.note(record.region)

    def _try_create_pieces(
        self,
        plan: Plan,
        layout: PieceLayout,
        content: Content | ContentOf,
        source: Source | None,
        inside: Sequence[Anchor],
        away: bool = False,
        follows: bool = False,
    ) -> GlobalRef[Any]:
        created = self.begin_pieces(plan.region_bytes, layout)
        whole = created.whole
        try:
            self.make_pieces(created, content, away=away)
            if follows:
                self._until_answered(lambda: self._rpc.follow_writers(whole.region))
            anchor = self.anchor()
            counted = self._counted(anchor, inside)
            with self._given_up(whole.region):
                self._until_answered(lambda: self._rpc.seal(whole.region, source, counted))
        except BaseException:
            with contextlib.suppress(errors.ClamorError):
                self._rpc.abandon(whole.region)
            raise
        return self.ref(whole, plan, (anchor,))

    def begin_pieces(
        self, region_bytes: int, layout: PieceLayout, request_id: int = 0
    ) -> CreatedPieces:
        """A new variable in pieces, of which nothing is there yet but ids and addresses.

        Args:
            region_bytes: of all of it; more than one piece.
            layout: of its pieces.
            request_id: the same again says that its maker is at work; 0: a new one.
        """
        self._client()  # the node's page server, which is its first home, is there from here on
        wanted = self._anchors.wanted()
        created = self._rpc.create_pieces(
            region_bytes, layout, self._node_id, request_id or new_request_id(), wanted
        )
        self._anchors.add(created.anchors)
        task_context.made(created.whole.region)
        return created

    def make_pieces(
        self,
        created: CreatedPieces,
        content: Content | ContentOf,
        *,
        away: bool = False,
        before: Callable[[int], None] = lambda index: None,
    ) -> None:
        """Fills all pieces and sends them to their homes. See `PieceMaker`.

        Raises:
            ServerUnavailableError: They were given up meanwhile, or a page server does not answer.
            OutOfMemoryError, NoSpaceError, WaitTimeoutError: See `PieceMaker.make`.
        """
        with self._given_up(created.whole.region), self.room_on_disk(created.whole.length_bytes):
            PieceMaker(
                created,
                content,
                client=self._client(),
                rpc=self._rpc,
                config=self._config,
                node_id=self._node_id,
                until_answered=self._until_answered,
                away=away,
                before=before,
            ).make()

    @contextlib.contextmanager
    def _given_up(self, region: int) -> Iterator[None]:
        """Where it is freed it was given up."""
        try:
            yield
        except errors.FreedError as error:
            raise errors.ServerUnavailableError(
                f"{capital(label(region))} was given up while it was filled: a page server was "
                "restarted or lost, or a piece took more than 10 minutes.",
                code=error.code,
                hint="Nothing is left of it: put the object again.",
            ) from error

    @property
    def has_store(self) -> bool:
        """Whether the session has: then all that is made is on disk, whoever asks."""
        if self._store is None:
            self._store = self._rpc.store()
        return bool(self._store)

    def laid_out(self, region_bytes: int, level: Level) -> PieceLayout:
        """The pieces of a new variable that is made on this node.

        Raises:
            TooFewNodesError: The level needs more nodes.
        """
        n_servers = 1
        if not level.is_here:
            n_servers = self._rpc.spread_over(self._node_id, level.n_nodes > 1)
        shape = level.shape(n_servers)
        on_disk = level.spill or self.has_store
        piece_bytes = piece_bytes_of(region_bytes, n_servers, shape.width, on_disk=on_disk)
        return PieceLayout(piece_bytes, shape, on_disk, level.is_here)

    def scratch(
        self, region_bytes: int, piece_bytes: int, *, or_here: bool, on_disk: bool
    ) -> GlobalRef[Any] | None:
        """A variable of zeros that takes no memory of this node, for bytes that this one has no
        room for. It has no object: `get` is not for it.

        Args:
            region_bytes: of all of it.
            piece_bytes: of each piece but the last.
            or_here: it is on this node where there is no other.
            on_disk: it is on the disk of this node, and not on others.

        Returns:
            None where there is no other node, and it must not be here.
        """
        deadline = time.monotonic() + self._config.reattach_s
        while True:
            try:
                is_alone = on_disk or self._rpc.spread_over(self._node_id) < 2
                if is_alone and not (or_here or on_disk):
                    return None
                plan = Plan(region_bytes, 0)
                layout = PieceLayout(piece_bytes, on_disk=on_disk, is_here=on_disk)
                return self._try_create_pieces(plan, layout, [], None, (), not is_alone)
            except errors.ServerUnavailableError:
                if time.monotonic() >= deadline or self._has_ended():
                    raise
            time.sleep(0.1)

    @staticmethod
    def _counted(anchor: Anchor, inside: Sequence[Anchor]) -> Counted:
        own, *others = (each.binary() for each in object_refs((anchor, *inside)))
        return Counted(own, tuple(others))

    def anchor(self) -> Anchor:
        """For a variable that is made."""
        return self._until_answered(self._anchors.take)

    def seal_built(self, region: int, anchor: Anchor, inside: Sequence[Anchor]) -> None:
        """Tells the registry that the bytes of a region are in place that was built there."""
        counted = self._counted(anchor, inside)
        self._until_answered(lambda: self._rpc.seal(region, None, counted))

    def _seal(self, record: RegionRecord, source: Source | None, counted: Counted) -> None:
        """Makes it public. In a row of puts of one size the answer brings the next region."""
        region, region_bytes = record.region, record.length_bytes
        if record.on_disk or not self._spares.wanted(region_bytes):
            self._until_answered(lambda: self._rpc.seal(region, source, counted))
            return
        request_id = new_request_id()
        spare = self._until_answered(
            lambda: self._rpc.seal_and_create(
                region, source, region_bytes, self._node_id, request_id, counted
            )
        )
        if spare is not None:
            self._spares.keep(region_bytes, spare)

    def _until_answered(self, ask: Callable[[], _T]) -> _T:
        """A call of the registry that may be made twice; again where the answer is lost."""
        deadline: float | None = None
        while True:
            try:
                return ask()
            except (errors.ServerUnavailableError, errors.WaitTimeoutError) as error:
                gone = isinstance(error.__cause__, ray_state.GONE)
                now = time.monotonic()
                deadline = now + self._config.reattach_s if deadline is None else deadline
                if gone or now >= deadline or self._has_ended():
                    raise
            time.sleep(0.1)

    def ref(self, record: Any, plan: Plan, held_by: Anchors | None = None) -> GlobalRef[Any]:
        """The reference to a region that is made."""
        return GlobalRef(
            record.region,
            record.version,
            record.base_address,
            round_up(record.length_bytes, BLOCK_BYTES),
            plan,
            self._scope,
            held_by=held_by,
            pieces=Pieces(
                *(record.n_pieces, record.piece_bytes),
                *(record.group_width, record.group_parity, record.on_disk),
            )
            if record.n_pieces
            else None,
        )

    def share(self, object_ref: Any, timeout_s: float, *, named: bool = False) -> GlobalRef[Any]:
        """As `clamor.share`; `named` as in `put`."""
        ready, _ = ray.wait([object_ref], timeout=timeout_s, fetch_local=False)
        if not ready:
            raise errors.WaitTimeoutError(
                f"{object_ref} was not ready within {timeout_s:g} s.",
                hint="Wait for the task that makes it, or raise the timeout.",
            )
        nodes = ray_state.nodes_of(object_ref)
        if not nodes:
            return self.put(ray.get(object_ref, timeout=timeout_s), named=named)
        if self.has_store:  # what is in Ray's store goes with the cluster: it is copied
            return self.put(ray.get(object_ref, timeout=timeout_s), named=named)
        node_id = self._node_id if self._node_id in nodes else nodes[0]
        request_id = new_request_id()
        try:
            record, plan, object_of_registry = self._rpc.share(
                [object_ref], node_id, request_id, timeout_s=timeout_s
            )
        except BaseException:  # registry and page server may go on with it
            with contextlib.suppress(errors.ClamorError):
                # A registry that is away hears it later: Ray repeats the call.
                self._rpc.give_up_share(request_id, timeout_s=self._config.connect_timeout_s)
            raise
        # Registry and page server have the object from each other: if both die, Ray counts neither.
        # So each reference carries it.
        return self.ref(record, plan, (Anchor(object_of_registry), Anchor(object_ref)))
