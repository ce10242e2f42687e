"""This process's attachment to sessions: the registry, the node, the page server's client.

A driver makes a session with `init`. Any process of the cluster finds one when it first needs it:
by the scope of the reference that arrived, or (a worker) by its job. It may use several at once: no
two sessions of a cluster have an address or an id in common (`actors/window/address_claims.py`).
What a worker makes is of its own job's session, where that has one. Nothing here is on the path of
a fault.

Locks: `_lock` guards which sessions there are, `Session._client_lock` the making of the client;
the first is never taken under the second. Neither is held by finalizers.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, TypeVar

import ray

from clamor_ray import errors
from clamor_ray._build import kept
from clamor_ray._native.client import (
    MAP_EXACT_READS,
    MAP_FIXED,
    MAP_PAGE_SHIFT,
    MAP_PRIVATE,
    Client,
    Mapping,
)
from clamor_ray._objects.layout import stream_blocks
from clamor_ray._protocol import names
from clamor_ray._protocol.config import Config
from clamor_ray._protocol.messages import FreeAnswer
from clamor_ray._protocol.rpc import OFTEN, await_rpc, pack, unpack
from clamor_ray._read import losses
from clamor_ray._read.lease import Lease, Leased, LeaseTable
from clamor_ray._read.ref import GlobalRef
from clamor_ray._session import starting
from clamor_ray._session.making import Making
from clamor_ray._session.spares import Spares
from clamor_ray._tasks import task_context
from clamor_ray._tasks.task_ends import TaskEnds
from clamor_ray._version import __version__
from clamor_ray.actors.registry.registry_core import server_id_of

_T = TypeVar("_T")

SWEEP_LEAST = 64
_OUTLIVES = (
    "A detached actor or a Serve app that outlives its driver has no session to make variables in. "
    "It can read and update those of any driver that runs: pass it their references."
)
RETIRE_S = 1.0  # then the registry is asked to see to it
FIRST_LOOK_S = 0.2  # for a page server that is there already


# ------------------------------------------------------------------ where we are


def _check_platform() -> None:
    if not sys.platform.startswith("linux"):
        raise errors.UnsupportedPlatformError(f"This is {sys.platform}, not Linux.")
    if sys.maxsize < 1 << 40:
        raise errors.UnsupportedPlatformError("This is a 32-bit process.")


# ------------------------------------------------------------------ the session


_KEPT_HINT = (
    "This process built it, and keeps it for the libraries of its malloc() block. Get it in "
    "another process; or, when nothing of those libraries points into it any more, call let_go() "
    "on the region that clamor.region() returned."
)


class Session(Making):
    """One process's part in one session. Safe from any thread.

    Args:
        scope: names the session.
        registry: the actor's handle.
        node_id: Ray's hex id of this node.
        config: this process's settings.
        owner: this process made the session, and ends it.
    """

    of_job = True  # whether it is one of this process's job
    in_driver = False

    def __init__(
        self, scope: str, registry: Any, node_id: str, config: Config, *, owner: bool
    ) -> None:
        self.scope = scope
        self.registry = registry
        self.node_id = node_id
        self.job_id: str = ray.get_runtime_context().get_job_id()
        self.of_job = owner or scope.startswith(starting.job_scope_part())
        self.in_driver = not starting.in_worker()
        self.config = config
        self.owner = owner
        self.leases = LeaseTable()
        # Private copies of transactions that are over, at addresses that only one map can have.
        self._ended: dict[int, weakref.ref[Lease]] = {}
        # Freed here while mapped here: the map would be shared without asking the page server.
        self._freed: dict[int, int] = {}
        self._spares = Spares()
        self._freed_after_sweep = 0
        self._shared: dict[int, Any] = {}
        self._client: Client | None = None
        self.task_ends = TaskEnds()
        self._client_lock = threading.Lock()
        self._pid = os.getpid()
        self.server_id = server_id_of(node_id)
        from clamor_ray._read import views

        views.install()

    # -- the page server of this node

    def ensure_server(self) -> Any:
        """This node's page server, started if there is none."""
        info = self.call("ensure_server", self.node_id)
        if info.library_version != __version__:
            raise errors.VersionMismatchError(
                f"The page server of node {self.node_id} runs clamor-ray {info.library_version}, "
                f"this process {__version__}."
            )
        return info

    @property
    def client(self) -> Client:
        """The connection to the page server, made on first use."""
        client = self._client
        if client is not None:
            return client
        with self._client_lock:
            if self._client is None:
                self._client = self._connect()
                _register_fork_hook()
                if self._client.trap != "uffd":
                    from clamor_ray._read import bad_address

                    bad_address.hook()
            return self._client

    def _connect(self) -> Client:
        from clamor_ray._session import spawned

        name = names.server_socket(self.scope, self.node_id, self.config.socket_dir)
        deadline = time.monotonic() + self.config.reattach_s
        pause_s = 0.05
        # The first task of a node that has joined need not wait for a server that nobody started.
        connect_s = min(FIRST_LOOK_S, self.config.connect_timeout_s)
        while True:
            try:
                client = Client(
                    name,
                    trap=self.config.trap,
                    connect_timeout_s=connect_s,
                    reattach_timeout_s=self.config.reattach_s,
                )
            except (errors.ServerUnavailableError, errors.WaitTimeoutError):
                if time.monotonic() >= deadline:
                    raise
            else:
                spawned.announce(self.node_id, names.below_which(name))
                return client
            # Not there yet, or restarting: the registry starts it, or knows where it listens.
            name = self.ensure_server().socket_name
            connect_s = self.config.connect_timeout_s
            time.sleep(pause_s)
            pause_s = min(1.0, 2 * pause_s)

    def call(self, method: str, *args: object, timeout_s: float | None = None) -> Any:
        """Calls a method of the registry and waits for the answer."""
        if os.getpid() != self._pid:
            raise errors.ForkedError(
                "This process is a fork: it reads global variables, but cannot reach the registry."
            )
        timeout_s = self.config.control_timeout_s if timeout_s is None else timeout_s
        if method in OFTEN:
            asked = self.registry.ask.remote(pack(method, *args))
            (answer,) = unpack(await_rpc(asked, timeout_s, owner=self.owner))
            return answer
        return await_rpc(getattr(self.registry, method).remote(*args), timeout_s, owner=self.owner)

    # -- reading

    def gives_way(self, lease: Lease) -> None:
        """A transaction's private copy of an object with pointers, which is over. It is unmapped
        when its address is next needed: `for ...: with clamor.update(tree) as p: ...` works."""
        self._ended[lease.region] = weakref.ref(lease)

    def open(
        self,
        ref: GlobalRef[Any],
        *,
        private: bool = False,
        read_set: str = "off",
        stream: bool = True,
        scattered: bool = False,
        page_bytes: int = 0,
        again: bool = False,
        warns: bool = True,
    ) -> Lease:
        """Maps a snapshot's region; its pickle stream is on this node when this returns.

        Args:
            ref: whose version is mapped, whatever becomes of the reference.
            private: as a writable private copy.
            read_set: coarse, exact or off.
            stream: False where nothing will be unpickled from it, or (with `again`) what is was
                read before.
            scattered: touched here and there: the kernel maps what is touched, and not what
                lies around it, which halves such touches (and makes scans dearer).
            page_bytes: what a fault fetches; 0: what this process's configuration says.
            again: it is likely to be opened again soon: its mapping is kept for a moment.
            warns: whether the user is told that blocks are lost.

        Raises:
            HomeLostError, SnapshotExpired: This task is run again, and an attempt before ended
                because it touched a block of this version that is lost, or kept no longer.

        Warns:
            LostBlocksWarning: Blocks of the variable are lost.
        """
        ref = ref.snapshot()
        exact = read_set == "exact" or scattered or task_context.wants_exact()
        flags = (MAP_PRIVATE if private else 0) | (MAP_EXACT_READS if exact else 0)
        flags |= MAP_FIXED if ref.plan.fixed else 0
        if page_bytes := page_bytes or self.config.page_bytes:
            flags |= (page_bytes.bit_length() - 1) << MAP_PAGE_SHIFT
        if ref.region in self._freed:
            raise errors.FreedError(f"{ref!r} was freed.")
        client = self.client
        ended = self._ended.pop(ref.region, None) if ref.plan.fixed else None
        if ended is not None and (copy := ended()) is not None:
            copy.close()  # its block is over; whoever still looks into it was told not to
        run = self.task_ends.note(client)
        with self.explaining(ref.region):
            mapping = self._map_here(client, ref, flags)
        lease = Lease(
            client, self.leases, mapping, ref.region, writable=private, snapshot=ref, later=again
        )
        if warns:
            try:
                self.task_ends.check(self, ref, run, mapping.loss)
                if mapping.loss:
                    losses.warn(self, ref, mapping.loss)
            except (errors.ClamorError, errors.LostBlocksWarning):
                lease.close()
                raise
        if read_set != "off":
            lease.reads_begin(None if stream or not again else stream_blocks(ref.plan))
        if not stream:
            return lease
        # Unpickling touches the stream at once: fetched here, a lost home is an exception.
        with self.explaining(ref.region):
            blocks = stream_blocks(ref.plan)
            lease.prefetch(blocks, wait=True, timeout_s=self.config.patience_s)
        return lease

    def region_at(self, address: int) -> int:
        """The region that is mapped there here; 0: none is."""
        leased = self.leases.at(address)
        return leased.snapshot.region if leased is not None and leased.snapshot else 0

    @contextlib.contextmanager
    def explaining(self, region: int) -> Iterator[None]:
        """Where blocks are lost, the registry knows which, and why."""
        try:
            yield
        except errors.HomeLostError as error:
            self.explain(error, region)

    def explain(self, error: errors.HomeLostError, region: int) -> NoReturn:
        """Raises what the registry says of it, or else the error as it is."""
        why = None
        with contextlib.suppress(errors.ClamorError):
            why = self.call("why_lost", region) if region else None
        if why is None:
            raise error
        raise errors.HomeLostError(why.message, code=error.code, hint=why.hint) from error

    def _map_here(self, client: Client, ref: GlobalRef[Any], flags: int) -> Mapping:
        try:
            return self._map(client, ref, flags)
        except errors.AddressClashError as error:
            if self.leases.find(ref.base_address) is None:
                raise  # it is not ours
            hint = (
                "Another version of it, or a private copy, is mapped at its address in this "
                "process: let go of what came from that first."
            )
            if kept.is_kept(client, ref.region):
                hint = _KEPT_HINT
            raise errors.AddressClashError(error.message, code=error.code, hint=hint) from error

    def _map(self, client: Client, ref: GlobalRef[Any], flags: int) -> Mapping:
        # In short waits: a restarting server is worth all of fault_timeout_s, an ended session,
        # which looks the same from here, nothing.
        deadline = time.monotonic() + self.config.fault_timeout_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                return client.map(
                    ref.region,
                    ref.version,
                    ref.base_address,
                    ref.length_bytes,
                    flags=flags,
                    timeout_s=max(0.0, min(left_s, self.config.connect_timeout_s)),
                )
            except (errors.ServerUnavailableError, errors.WaitTimeoutError):
                if self._has_ended():
                    _forget(self)
                    _raise_ended(self.scope)
                if left_s <= self.config.connect_timeout_s:
                    raise
            time.sleep(0.05)

    # -- freeing

    def free(self, ref: GlobalRef[Any]) -> None:
        if ref.scope != self.scope:
            _raise_mismatch(ref.scope)
        # One that maps nothing here tells nobody itself: that would start a page server.
        client = None if ref.inline else self._client
        answer: FreeAnswer = self.call("free", ref.region, client.server_id if client else 0)
        if client is not None:
            self._retire(client, ref.region, answer)
        self._shared.pop(ref.region, None)
        if not ref.inline:
            self._note_freed(ref.region, ref.base_address)

    def _retire(self, client: Client, region: int, answer: FreeAnswer) -> None:
        """Tells this node's page server, and through it those that ask it for blocks: messages on
        sockets, where calls of actors take milliseconds."""
        try:
            client.retire(region, alone=answer.alone, servers=answer.others, timeout_s=RETIRE_S)
        except errors.ClamorError:
            # One is being restarted, is silent, or was asked just now: the registry tells it, and
            # waits as long as `free` promises.
            self.call("free", region, 0)

    def _note_freed(self, region: int, base_address: int) -> None:
        """Remembers it while memory of it is held here. Now and then, those that are not go."""
        if self.leases.find(base_address) is None:
            return
        self._freed[region] = base_address
        if len(self._freed) > 2 * self._freed_after_sweep + SWEEP_LEAST:
            for other, at in list(self._freed.items()):  # other threads may add to it meanwhile
                if self.leases.find(at) is None:
                    self._freed.pop(other, None)
            self._freed_after_sweep = len(self._freed)

    # -- the end

    @property
    def is_here(self) -> bool:
        """Whether this process is still connected to the cluster that the session is of. The first
        job of every cluster has the same id, so that says too little."""
        if not ray.is_initialized():
            return False
        context = ray.get_runtime_context()
        return (context.get_node_id(), context.get_job_id()) == (self.node_id, self.job_id)

    @property
    def was_told(self) -> bool:
        """Whether this node's page server has said that the session ended. Asks nobody."""
        client = self._client
        return client is not None and client.has_ended

    def _has_ended(self) -> bool:
        """Whether its driver ended the session behind this process's back."""
        if self.owner or os.getpid() != self._pid:
            return False
        return not self.is_here or self.was_told or starting.find_registry(self.scope) is None

    def close(self, *, exiting: bool = False) -> None:
        """Ends this process's part. Every address that `get` gave out dies: nobody else gets it
        as long as an object is left that looks into it. What libraries built in place stays
        (`Region.let_go`).

        Args:
            exiting: the process ends: what stays is not copied before.
        """
        for ending in at_end:
            ending(self)
        if len(self.leases):
            _left[:] = [table for table in _left if len(table)]
            _left.append(self.leases)
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(errors.ClamorError):
                if not exiting:
                    client.build_copy()
            with contextlib.suppress(errors.ClamorError):
                client.close()

    def after_fork(self, is_here: bool) -> None:
        self._client_lock = threading.Lock()
        self._spares = Spares()  # the parent's are the parent's
        if self._client is None:
            return
        ended = None
        if not is_here:  # no server is left: waiting for one would hold up the child
            ended = errors.ForkedError("This process was forked after ray.shutdown().")
        self._client.after_fork(ended)


# ------------------------------------------------------------------ which one is ours

_lock = threading.RLock()
_current: Session | None = None  # what this process makes is of this one
_others: dict[str, Session] = {}  # what else it is attached to, by scope; replaced, not changed
_over: list[Session] = []  # have ended; something still looks into their memory
_left: list[LeaseTable] = []  # of sessions that were closed: their addresses are taken
_ended: set[str] = set()  # scopes of sessions that ended in this process's lifetime
_sought = False  # the job's own session, since it was last attached to another's
_hooks: set[str] = set()
at_end: list[Callable[[Session], None]] = []  # called when a session ends in this process


def _once(name: str, register: Callable[[], object]) -> None:
    if name not in _hooks:
        _hooks.add(name)
        register()


def _register_fork_hook() -> None:
    _once(
        "fork",
        lambda: os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child),
    )


_was_here = True


def _before_fork() -> None:
    # In the child Ray must not be asked: it has locks that other threads may hold now.
    global _was_here
    _was_here = all(session.is_here for session in sessions())


def _after_fork_in_child() -> None:
    global _lock
    _lock = threading.RLock()
    for session in sessions():
        session.owner = False  # the end of a child is not the end of the session
        try:
            session.after_fork(_was_here)
        except errors.ClamorError as error:
            # The maps it could not have are guards now; whoever touches one learns it from them.
            os.write(2, f"clamor: {error}\n".encode())


def _leave(session: Session) -> None:
    """Under the lock: it is none of this process's sessions any more."""
    global _current, _others
    if _current is session:
        _current = None
    _others = {scope: other for scope, other in _others.items() if other is not session}


def _forget(session: Session) -> None:
    """It has ended. It is closed when nothing looks into its memory: what is here of it is right,
    and other threads may be at it."""
    with _lock:
        _ended.add(session.scope)
        if session in sessions():
            _leave(session)
            _over.append(session)
        _close_over()


def _close_over() -> None:
    for session in list(_over):
        if len(session.leases) == 0:
            _over.remove(session)
            session.close()


def _raise_ended(scope: str) -> NoReturn:
    raise errors.SessionEndedError(
        f"Session {scope} has ended: its driver has, or called clamor.shutdown()."
    )


def _raise_mismatch(scope: str) -> NoReturn:
    if scope in _ended:
        _raise_ended(scope)
    raise errors.SessionMismatchError(
        f"The reference belongs to session {scope}, which has ended, or is of another cluster."
    )


def attached() -> Session | None:
    """The session that this process makes variables in, where it has one already."""
    return _current


def sessions() -> tuple[Session, ...]:
    """All that this process is attached to."""
    current, others = _current, _others
    if not others:
        return () if current is None else (current,)
    return (*(() if current is None else (current,)), *others.values())


def at_address(address: int) -> tuple[Session, Leased] | None:
    """What lies there, and of which session; None where it is nothing of ours."""
    for session in sessions():
        if (leased := session.leases.at(address)) is not None:
            return session, leased
    return None


def current(scope: str | None = None) -> Session:
    """This process's session; in a worker, attaches to it first.

    Args:
        scope: of the reference that is to be opened; None for the session of the job.

    Raises:
        NotInitializedError: There is none.
        SessionMismatchError: It is another than the reference's.
    """
    session = _known(scope)
    if session is not None:
        if session.owner and not session.is_here:
            raise errors.NotInitializedError(
                "The session has ended: ray.shutdown() took its cluster from under it."
            )
        if session.owner or not session.was_told:
            return session
        _forget(session)
    with _lock:
        return _attach(scope)


def with_current(make: Callable[[Session], _T]) -> _T:
    """What `make` makes in this process's session. Two frames above `make` is our caller.

    A worker may still be attached to a session that its driver has ended meanwhile: a page server
    that was killed tells nobody, and asking the registry before each call would double what small
    variables cost. Then the first call fails, and the session that there is now is attached to.
    """
    session = current()
    try:
        return make(session)
    except (errors.ServerUnavailableError, errors.SessionEndedError):
        if not session._has_ended():
            raise
    _forget(session)
    return make(current())


def _known(scope: str | None) -> Session | None:
    """The session of that scope, or the one to make variables in, if no other must be sought."""
    session = _current
    if session is None or (scope is not None and session.scope != scope):
        return None if scope is None else _others.get(scope)
    return session if scope is not None or session.of_job or _sought else None


def _attach(scope: str | None) -> Session:
    global _sought
    from clamor_ray._session import spawned

    known = _known(scope)
    if known is not None:
        return known
    session = _current
    if session is not None and session._pid != os.getpid():
        _raise_mismatch(scope or "?")
    if not ray.is_initialized():
        _add(alone := spawned.session_of(scope, session))
        return alone
    starting.check_not_ray_client()
    in_worker = starting.in_worker()
    if not in_worker and (session is None or not session.is_here):
        raise errors.NotInitializedError("There is no clamor session in this process.")
    wanted = scope if scope is not None else starting.find_scope_of_job()
    registry = starting.find_registry(wanted) if wanted is not None else None
    if wanted is None or registry is None:
        if scope is not None:
            _raise_mismatch(scope)
        if session is not None:  # another job's: there is none of our own
            _sought = True
            return session
        if _ended:  # of its job, or of another: a replica of Serve is of the controller's job
            of_job = any(scope.startswith(starting.job_scope_part()) for scope in _ended)
            which = "of this process's job" if of_job else "that this process used"
            raise errors.SessionEndedError(
                f"The session {which} has ended: its driver has, or called clamor.shutdown().",
                hint=_OUTLIVES,
            )
        raise errors.NotInitializedError(
            "No driver of this job has a clamor session.",
            hint="Call clamor.init() in the driver before its tasks use global variables. "
            + _OUTLIVES,
        )
    _check_platform()
    node_id = ray.get_runtime_context().get_node_id()
    found = Session(wanted, registry, node_id, Config.from_env(), owner=False)
    _add(found)
    spawned.announce(node_id, found.config.socket_dir)
    return found


def _add(found: Session) -> None:
    """Under the lock: one more session. What this process makes is of the one that it made, of the
    newest of its job, or else of the newest."""
    global _current, _others, _sought
    before = _current
    _sought = False
    if before is not None and (before.owner or (before.of_job and not found.of_job)):
        _others = {**_others, found.scope: found}
        return
    _current = found
    if before is not None and before.of_job:
        _ended.add(before.scope)  # a driver has one at a time
        _over.append(before)
    elif before is not None:
        _others = {**_others, before.scope: before}
    _close_over()
