"""`GlobalRef`: a global variable at a version, as a value of a few hundred bytes."""

from __future__ import annotations

import contextlib
import operator
import os
import pickle
import threading
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._counting import anchors
from clamor_ray._counting.anchors import Anchor, Anchors
from clamor_ray._labels import label
from clamor_ray._native.pieced_client import PieceVersion
from clamor_ray._objects.layout import Plan, format_bytes, put_together
from clamor_ray._protocol.config import check_page_bytes
from clamor_ray._protocol.messages import unpack_row
from clamor_ray._read import losses, opener, views
from clamor_ray._read.lease import InlineImage
from clamor_ray._read.state import Pieces, State, packed_state, state_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from clamor_ray._observe.stats import RegionStats
    from clamor_ray._session.news import Watch

T = TypeVar("T")
Mode = Literal["r", "c"]

_WEAK_HINT: Final = (
    "This reference was pickled outside Ray's serializer, as to a file, where it does not count. "
    "Keep a reference in the program, or give the variable a name: clamor.put(obj, name=...)."
)

# What a reference shows. The rest begins with an underscore, and is the package's own.
FACE: Final = (
    *("get", "at", "refresh", "on_update", "snapshot", "free", "name", "version"),
    *("shape", "dtype", "nbytes", "stats"),
)

_FORMERLY: Final = {
    "latest": "A reference at the newest version is ref.at() (frozen), or copy.copy(ref).refresh()."
}


_move_lock = threading.Lock()


def _after_fork_in_child() -> None:
    global _move_lock
    _move_lock = threading.Lock()  # the thread that held it may not be here


os.register_at_fork(after_in_child=_after_fork_in_child)


def _restore(packed: bytes, *object_refs: Any) -> GlobalRef[Any]:
    return GlobalRef._unpacked(packed, tuple(map(Anchor, object_refs)))


# Backups have streams with this name (`_backup/stream_refs.py`): it stays.
def _restore_inside(packed: bytes) -> GlobalRef[Any]:
    return GlobalRef._unpacked(packed, anchors.given())


def _reduce_for_ray(ref: GlobalRef[Any]) -> tuple[Any, ...]:
    """In Ray's serializer: an argument, a result, an object of `ray.put`, or a function."""
    import ray

    context = ray._private.worker.global_worker.get_serialization_context()
    if anchors.collected() is not None:
        return ref.__reduce__()
    held_by = ref._counted()
    if context.is_in_band_serialization():
        return _restore, (ref._packed(), *anchors.object_refs(held_by))
    anchors.keep(held_by)
    return _restore, (ref._packed(),)


def install() -> None:
    """Teaches Ray's serializer. Idempotent; called where the first reference is met."""
    from ray.cloudpickle import CloudPickler

    CloudPickler.dispatch_table[GlobalRef] = _reduce_for_ray


# Pickle streams of versions that were opened lately: a version's never changes. So a task that
# opens what the one before it had open touches nothing of it for that.
_streams: dict[tuple[str, int, int], bytes] = {}
MOST_STREAMS: Final = 64
MOST_STREAM_BYTES: Final = 16 << 10


def _keep_stream(at: GlobalRef[Any], image: Any) -> bytes | None:
    plan = at._plan
    if plan.inband_bytes > MOST_STREAM_BYTES:
        return None
    stream: bytes = image[plan.inband_offset : plan.inband_offset + plan.inband_bytes].tobytes()
    if len(_streams) >= MOST_STREAMS:
        _streams.clear()
    _streams[at._scope, at._region, at.version] = stream
    return stream


class GlobalRef(Generic[T]):
    """A global variable at one of its versions, and what sort of object it is.

    Made by `clamor.put`, `zeros` and `share`, and by `Region.publish`. Pickling it ships metadata
    only, or, for an object below 4 KiB, the object. It may be passed to tasks and actors, kept,
    and compared.

    The variable stays as long as there is a reference to it anywhere, as Ray counts its ObjectRefs:
    in a process, in the arguments or the result of a task, inside an object in Ray's store or
    another variable; or an object that `get` gave, or a view of one. It goes within seconds when
    the last is gone, unless it has a name; `clamor.free` ends it at once. A reference that is
    pickled otherwise, as to a file, is weak: it does not keep the variable.

    A reference reads one version, however many commits pass, and takes it along when it is
    pickled: a task that is run again sees what it first saw. It moves on only where it is told to,
    by `refresh` or by an update through this very reference. What `snapshot` and `at` return is
    frozen: it never moves.

    Two references are equal where they name the same variable, whatever their versions; frozen
    ones are equal only to frozen ones of the same version. So neither equality nor the hash of a
    reference changes when it moves.

    Args:
        region: id of the region, or of the variable where the object travels inside.
        version: number of commits behind the content.
        base_address: where every process maps it.
        length_bytes: of the region, whole blocks.
        plan: what lies where, and the kind of object.
        scope: the session it belongs to.
        payload: the content, where it travels inside.
        first: state of version 0; None where this is it.
        frozen: it never moves.
        held_by: what keeps the variable; empty in a weak reference, None where others see to it.
        pieces: of a variable whose bytes several regions have.
        row: the versions of these; none: those of version 0.

    Example:
        >>> ref = clamor.put(np.ones((1000, 256), np.float32))
        >>> ref
        GlobalRef(ndarray float32 (1000, 256), 1000.0 KiB, variable ... version 0)
        >>> ref.shape, ref.dtype, ref.nbytes, len(ref)
        ((1000, 256), dtype('float32'), 1024000, 1000)
        >>> float(ref.get()[500, 7])
        1.0
    """

    __slots__ = (
        "__weakref__",
        "_anchors",
        "_base_address",
        "_first",
        "_freed",
        "_frozen",
        "_length_bytes",
        "_name",
        "_packed_at",
        "_pieces",
        "_region",
        "_scope",
        "_state",
    )

    def __init__(
        self,
        region: int,
        version: int,
        base_address: int,
        length_bytes: int,
        plan: Plan,
        scope: str,
        payload: bytes | None = None,
        *,
        first: State | None = None,
        frozen: bool = False,
        held_by: Anchors | None = None,
        pieces: Pieces | None = None,
        row: tuple[int, ...] = (),
    ) -> None:
        self._anchors = held_by
        self._pieces = pieces
        self._region = region
        self._base_address = base_address
        self._length_bytes = length_bytes
        self._scope = scope
        self._frozen = frozen
        self._freed = False
        self._name: str | None = None
        self._packed_at: tuple[State, bytes] | None = None
        if pieces is not None and not row:
            row = (0,) * pieces.groups.n_regions
        self._state = State(version, plan, payload, row)
        # What no commit has changed the registry does not know: it is asked of the reference.
        self._first = self._state if first is None else first

    # -- what it is

    @property
    def name(self) -> str | None:
        """The name that it was put under, or found by; None where there was none."""
        return self._name

    @property
    def _label(self) -> str:
        """The variable for people."""
        if self._inline and self._name is None:
            return "inline variable"  # its number, which nobody else shows, has 19 digits
        return label(self._region, self._name)

    @property
    def version(self) -> int:
        """Number of commits behind what `get` returns."""
        return self._state.version

    @property
    def nbytes(self) -> int:
        """Size of the object in bytes: an array's `nbytes`; of any other object its pickle stream
        and its buffers."""
        return self._plan.object_bytes

    @property
    def shape(self) -> tuple[int, ...]:
        """Of an array; of any other object there is no such attribute."""
        shape = self._plan.kind.shape
        if shape is None:
            raise AttributeError("shape")  # __getattr__ says more
        return shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of an array's elements; of any other object there is no such attribute."""
        kind = self._plan.kind
        if kind.shape is None:
            raise AttributeError("dtype")  # __getattr__ says more
        dtype: np.dtype[Any] = np.dtype(kind.dtype)
        return dtype

    def __len__(self) -> int:
        shape = self._plan.kind.shape
        if not shape:
            raise TypeError(
                f"{self!r} has no length: it is no array with an axis. Use len(ref.get())."
            )
        return shape[0]

    def __bool__(self) -> bool:
        return True  # a reference is there, also to an array without elements

    @property
    def _plan(self) -> Plan:
        return self._state.plan

    @property
    def _payload(self) -> bytes | None:
        return self._state.payload

    @property
    def _inline(self) -> bool:
        """Whether the object travels inside the reference."""
        return self._state.payload is not None

    # -- reading

    def get(self, mode: Mode = "r", *, page_bytes: int | str = 0) -> T:
        """The object at this version, over memory that all processes of this node share.

        Only its pickle stream is read now; buffers are fetched block by block when they are
        touched. The object's arrays keep the lease: it lasts as long as they do, and they show
        the same version for as long.

        Args:
            mode: "r" gives read-only arrays. "c" gives private copy-on-write ones, for libraries
                that insist on writable buffers: what is written stays in this process and is
                lost with the object. To change the variable use `clamor.update`.
            page_bytes: what a touch of an absent block fetches here, a power of two from 4 KiB to
                8 MiB ("64KiB"); 0: by use, or what the session's `page_bytes` says. Where this
                process has the version open already, the first one's choice stands for all.

        Returns:
            An object equal to the one that was put; its arrays are views of shared memory.

        Raises:
            ValueError: No such mode or page size.
            FreedError: The variable was freed.
            SnapshotExpired: The version is so old that its blocks are kept no longer.
            SessionMismatchError: The reference is from a session that has ended.
            HomeLostError: The node that held it is gone, and the pickle stream is nowhere else.
            NotInitializedError: In a driver before `clamor.init()`.

        Warns:
            LostBlocksWarning: Blocks of it are lost, which it names; all others are not.

        Safe from any thread.

        Example:
            >>> weights = clamor.put({"weights": np.arange(1000.0)}).get()["weights"]
            >>> float(weights[7]), weights.flags.writeable
            (7.0, False)
        """
        return self._open(mode, page_bytes=check_page_bytes("page_bytes", str(page_bytes)))[0]

    def _open(
        self,
        mode: Mode = "r",
        read_set: str = "off",
        scattered: bool = False,
        page_bytes: int = 0,
        again: bool = False,
    ) -> tuple[T, Any]:
        """The object and its lease; the lease is None where the object travels inside."""
        if mode not in ("r", "c"):
            raise ValueError(f"mode is 'r' or 'c', not {mode!r}")
        self._check_not_freed()
        if self._inline:
            at = self.snapshot()
            with anchors.giving(at._anchors):
                return put_together(InlineImage(at, writable=mode == "c").bytes(), at._plan), None
        session = opener.current(self._scope)
        is_weak = self._ask_anchors(session)
        at = session.as_opened(self.snapshot())
        self._move(at._state)
        stream = _streams.get((at._scope, at._region, at.version)) if again else None
        try:
            lease = session.open(
                at,
                private=mode == "c",
                read_set=read_set,
                scattered=scattered,
                page_bytes=page_bytes,
                again=again,
                stream=stream is None,
            )
        except errors.FreedError as error:
            if not is_weak:
                raise
            raise errors.FreedError(error.message, code=error.code, hint=_WEAK_HINT) from error
        image = lease.bytes()
        if again and stream is None:
            stream = _keep_stream(at, image)
        with anchors.giving(at._anchors):
            obj = put_together(image, at._plan, stream, as_globals=True)
        views.install_for_arrow()  # unpickling may have been the first to import it
        return obj, lease

    # -- versions

    def snapshot(self) -> GlobalRef[T]:
        """Freezes the version that this reference reads now. No message is sent.

        Returns:
            A frozen reference: neither commits nor `refresh` move it.

        Example:
            >>> ref = clamor.put(np.zeros(1000))
            >>> before = ref.snapshot()
            >>> with clamor.update(ref) as x:
            ...     x[0] = 1
            >>> float(before.get()[0]), float(ref.get()[0])
            (0.0, 1.0)
        """
        if self._frozen:
            return self
        return self._with(self._state, frozen=True)

    def at(self, version: int | None = None) -> GlobalRef[T]:
        """A reference to an old (or the newest) version, which never moves.

        The registry is asked, also for the version that this reference is at, and of an old one
        its home, whether it keeps the blocks. They may go later: `get` raises `SnapshotExpired`
        then, or the first touch of one ends the process, and what Ray runs again raises it. Of an
        object that travels inside the reference its own version is there, and nobody is asked.

        Args:
            version: number of the version, from 0 on; None is the newest.

        Returns:
            A frozen reference to it.

        Raises:
            NoVersionError: The variable has no such version (yet).
            SnapshotExpired: Nothing is known of it any more, or its blocks are kept no longer.
            HomeLostError: All of the variable is lost.
            FreedError: The variable was freed.
            NotInitializedError, SessionMismatchError: Its session is not that of this process.

        Warns:
            LostBlocksWarning: Blocks of the variable are lost.

        Example:
            >>> ref = clamor.put(np.zeros(1000))
            >>> with clamor.update(ref) as x:
            ...     x[0] = 1
            >>> float(ref.at(0).get()[0]), float(ref.at(1).get()[0]), ref.at().version
            (0.0, 1.0, 1)
        """
        if version is None:
            return self._latest().snapshot()
        version = operator.index(version)
        self._check_not_freed()
        state = self._state
        if state.payload is not None and version == state.version:
            return self._with(state, frozen=True)
        if version < 0:
            raise errors.NoVersionError(f"{self!r} has no version {version}.")
        session = opener.current(self._scope)
        answer = session.rpc.at(self._region, version)
        if answer.loss:
            losses.warn(session, self, answer.loss)
        return self._with(self._state_of(answer), frozen=True)

    def _latest(self) -> GlobalRef[T]:
        """A new reference at the newest version, which is not frozen; this one stays."""
        self._check_not_freed()
        (state,) = newest_states(opener.current(self._scope), [self])
        return self._with(state, frozen=False)

    def refresh(self) -> GlobalRef[T]:
        """Moves this reference to the newest version and returns it.

        Returns:
            This reference.

        Raises:
            ValueError: It is a snapshot, which never moves; `at()` reads the newest version.
            FreedError: The variable was freed.
            NotInitializedError, SessionMismatchError: Its session is not that of this process.
            ServerUnavailableError: The registry does not answer.

        Safe from any thread.

        Example:
            >>> import copy
            >>> ref = clamor.put(np.zeros(1000))
            >>> other = copy.copy(ref)
            >>> clamor.add_at(ref, [0], 1.0)
            >>> other.version, other.refresh().version
            (0, 1)
        """
        if self._frozen:
            raise ValueError(
                f"{self!r} is a snapshot and never moves: refresh the reference that it is of, or "
                "read ref.at()."
            )
        self._move(self._latest()._state)
        return self

    def _thawed(self) -> GlobalRef[T]:
        """A new reference at this version that refresh and updates move. No message is sent."""
        return self._with(self._state, frozen=False)

    def _move(self, state: State) -> None:
        """To a newer version; an older one, from a slower thread, changes nothing."""
        with _move_lock:
            if not self._frozen and state.version > self._state.version:
                self._state = state

    def _state_of(self, latest: Any) -> State:
        """What the registry says of a version (`messages.Latest`), completed from here."""
        plan = self._first.plan if latest.plan is None else pickle.loads(latest.plan)
        payload = latest.payload
        if self._pieces is not None:
            row = unpack_row(payload, self._pieces.groups.n_regions)
            return State(latest.version, plan, None, row)
        if payload is None and self._inline:
            known = next(
                (state for state in (self._first, self._state) if state.version == latest.version),
                None,
            )
            if known is None:
                raise errors.SnapshotExpired(
                    f"The content of {self!r} at version {latest.version} is kept no longer."
                )
            payload = known.payload
        return State(latest.version, plan, payload)

    def _state_after(
        self, plan: Plan, payload: bytes | None, version: int, packed_row: bytes | None
    ) -> State:
        """Of the version that a commit to this one has made."""
        if self._pieces is None:
            return State(version, plan, payload)
        return State(version, plan, None, unpack_row(packed_row, self._pieces.groups.n_regions))

    @property
    def _is_on_disk(self) -> bool:
        return self._pieces is not None and self._pieces.on_disk

    def _piece_versions(self) -> list[PieceVersion]:
        """The pieces at the version that this reference reads; none of a variable without."""
        if self._pieces is None:
            return []
        return self._pieces.at(
            self._state.row, self._region, self._base_address, self._length_bytes
        )

    def _with(self, state: State, *, frozen: bool) -> GlobalRef[T]:
        ref: GlobalRef[T] = GlobalRef(
            self._region,
            state.version,
            self._base_address,
            self._length_bytes,
            state.plan,
            self._scope,
            state.payload,
            first=self._first,
            frozen=frozen,
            held_by=self._anchors,
            pieces=self._pieces,
            row=state.row,
        )
        ref._freed = self._freed
        ref._name = self._name
        return ref

    @property
    def _is_weak(self) -> bool:
        return self._anchors == () and not self._inline

    def _ask_anchors(self, session: Any) -> bool:
        """Of a weak reference: from now on it counts. Whether it was one."""
        if self._is_weak:
            self._anchors = session.anchors_of(self)
            return True
        return False

    def _counted(self) -> Anchors:
        """What keeps the variable, for who gets this reference; a weak one asks for an anchor."""
        with contextlib.suppress(errors.ClamorError):  # its session is not here, and it stays weak
            if self._is_weak:  # else no session is sought
                self._ask_anchors(opener.current(self._scope))
        return self._anchors or ()

    def _held(self, held_by: Anchors) -> GlobalRef[T]:
        """A new reference like this one, with a hold of its own on the variable."""
        if held_by:
            install()
        ref = self._with(self._state, frozen=self._frozen)
        ref._anchors = held_by
        ref._packed_at = self._packed_at
        return ref

    def on_update(self, function: Callable[[int], object]) -> Watch:
        """Calls a function with each newer version that a commit makes, wherever that is made.

        This reference does not move: the function may `refresh` it. All such functions of a process
        run on one thread, one after the other; of several versions that came meanwhile the newest
        is told. The registry sends one message to each node for a commit, and nobody asks in
        between. A restart of the registry or of a page server loses no update.

        Args:
            function: called with the version, an int; first with one that is newer than this
                reference's. What it raises is logged.

        Returns:
            A handle: its `cancel()` ends the calls, and its `error` says why there are none any
            more (`FreedError`, `SessionEndedError`).

        Raises:
            FreedError: This reference was freed.
            NotInitializedError, SessionMismatchError: Its session is not that of this process.
            ServerUnavailableError: The registry does not answer.

        Safe from any thread.

        Example:
            >>> import queue
            >>> ref, versions = clamor.put(np.zeros(1000)), queue.Queue()
            >>> watch = ref.on_update(versions.put)
            >>> clamor.add_at(ref, [0], 1.0)
            >>> versions.get(timeout=60)
            1
            >>> watch.cancel()
        """
        self._check_not_freed()
        news = opener.current(self._scope).news
        watch = news.call(self._region, self.version, function, self._name)
        watch.held_by = self._anchors  # who waits for versions of it refers to it
        return watch

    # -- its end

    def free(self) -> None:
        """Frees the variable: `clamor.free(ref)`.

        Raises:
            NotInitializedError: Before `clamor.init()`.
            SessionMismatchError: It belongs to another session.

        Example:
            >>> ref = clamor.put(np.arange(1000))
            >>> ref.free()
            >>> ref.get()
            Traceback (most recent call last):
            clamor_ray.errors.FreedError: ...
        """
        session = opener.current(self._scope)
        if not self._freed:
            session.free(self)
            self._mark_freed()

    def stats(self) -> dict[str, RegionStats]:
        """This variable's part of `clamor.stats()`: its counters on every node that has a part.

        Returns:
            Node id -> counters; empty where the object travels inside the reference.

        Raises:
            FreedError: The variable was freed.
            NotInitializedError, SessionMismatchError: Its session is not that of this process.
            ServerUnavailableError: The registry does not answer.

        Example:
            >>> ref = clamor.put(np.arange(10**5))
            >>> [counters.is_home for counters in ref.stats().values()]
            [1]
        """
        self._check_not_freed()
        return opener.current(self._scope).stats_of(self)

    def _mark_freed(self) -> None:
        self._freed = True
        self._packed_at = self._anchors = None

    def _check_not_freed(self) -> None:
        if self._freed:
            raise errors.FreedError(f"{self!r} was freed.")

    # -- as a value

    @property
    def _key(self) -> tuple[Any, ...]:
        return (self._scope, self._region, self._state.version if self._frozen else None)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, GlobalRef):
            return NotImplemented
        return self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def _packed(self) -> bytes:
        """The whole reference as bytes, for `_unpacked`. Made once for each version that it is at.

        A few hundred bytes; with the object inside where it is below 4 KiB.
        """
        state, known = self._state, self._packed_at
        if known is not None and known[0] is state:
            return known[1]
        first = None if self._first is state else packed_state(self._first)
        where = (self._region, self._base_address, self._length_bytes, self._scope, self._name)
        pieces = () if self._pieces is None else tuple(self._pieces)
        content = ((*where, *pieces), packed_state(state), first, self._frozen, self._freed)
        packed = pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
        self._packed_at = (state, packed)
        return packed

    @staticmethod
    def _unpacked(packed: bytes, held_by: Anchors | None = None) -> GlobalRef[Any]:
        """A new reference like the one that gave these bytes, with its own hold on the variable."""
        if held_by:
            install()  # it may travel on from a process that opens none
        where, now, first, frozen, freed = pickle.loads(packed)
        region, base_address, length_bytes, scope, name, *pieces = where

        state = state_of(*now)
        ref: GlobalRef[Any] = GlobalRef(
            region,
            state.version,
            base_address,
            length_bytes,
            state.plan,
            scope,
            state.payload,
            first=None if first is None else state_of(*first),
            frozen=frozen,
            held_by=held_by,
            pieces=Pieces(*pieces) if pieces else None,
            row=state.row,
        )
        ref._name = name
        if freed:
            ref._mark_freed()
        return ref

    def __reduce__(self) -> tuple[Any, ...]:
        # Ray's pickler is written in Python: the fewer objects it sees the better.
        collected = anchors.collected()
        if collected is None:
            return _restore, (self._packed(),)
        collected += self._counted()
        return _restore_inside, (self._packed(),)

    def __copy__(self) -> GlobalRef[T]:
        return self._with(self._state, frozen=self._frozen)

    def __deepcopy__(self, memo: dict[int, Any]) -> GlobalRef[T]:
        return self.__copy__()

    def __dir__(self) -> list[str]:
        return sorted(FACE)

    if not TYPE_CHECKING:  # which would take any name for one that is there

        def __getattr__(self, name: str) -> Any:
            # Only for what is not there. Names of protocols are asked for by many: no advice.
            hint = ""
            if name in _FORMERLY:
                hint = f" {_FORMERLY[name]}"
            elif not name.startswith("_"):
                hint = f" It refers to an object ({self._plan.kind}): use ref.get().{name}."
            raise AttributeError(
                f"'GlobalRef' object has no attribute {name!r}.{hint}", name=name, obj=self
            )

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        if ufunc not in (np.equal, np.not_equal):
            raise errors.NotOpenedError(f"{self!r} is a reference, not an array.")
        # As of any object: containers look for what is equal.
        given = [_as_element(value) if isinstance(value, GlobalRef) else value for value in inputs]
        return getattr(ufunc, method)(*given, **options)

    def __array_function__(self, function: Any, types: Any, args: Any, options: Any) -> Any:
        # NumPy would make an object array of one reference, and np.sum of that is the reference.
        # So it does where it is told to (np.asarray, a list of references in a pandas Series).
        raise errors.NotOpenedError(f"{self!r} is a reference, not an array.")

    def __repr__(self) -> str:
        state = self._state
        where = "inline" if self._inline else label(self._region)  # what page servers call it
        size, frozen = format_bytes(self.nbytes), ", frozen" if self._frozen else ""
        name = "" if self._name is None else f"{self._name!r}, "
        return (
            f"GlobalRef({name}{state.plan.kind}, {size}, {where} version {state.version}{frozen})"
        )


def _as_element(ref: GlobalRef[Any]) -> npt.NDArray[Any]:
    element = np.empty((), object)
    element[()] = ref
    return element


def newest_states(session: Any, refs: list[GlobalRef[Any]]) -> list[State]:
    """Where these variables are now; one call to the registry for all of them.

    Raises:
        FreedError: One of them was freed.
    """
    if not refs:
        return []
    answers = session.rpc.latest([ref._region for ref in refs])
    by_region = {answer.region: answer for answer in answers}
    return [ref._state_of(by_region[ref._region]) for ref in refs]
