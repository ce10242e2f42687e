"""One process's part in one session: the registry, the node, the page server's client.

In: what `process_sessions.py` and `init.py` attach to. Out: mappings of snapshots as leases, and
calls of the registry. Nothing here is on the path of a fault.

Locks: `Session._client_lock` guards the making of the client; no other is taken under it.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import ray

from clamor_ray import errors
from clamor_ray._build import kept
from clamor_ray._counting.anchors import Anchor, Anchors
from clamor_ray._native.client import (
    MAP_EXACT_READS,
    MAP_FIXED,
    MAP_PAGE_SHIFT,
    MAP_PRIVATE,
    Mapping,
)
from clamor_ray._native.pieced_client import PiecedClient
from clamor_ray._objects.layout import BLOCK_BYTES, stream_blocks
from clamor_ray._observe.stats import RegionStats, from_report
from clamor_ray._protocol import names, ray_state
from clamor_ray._protocol.config import Config
from clamor_ray._protocol.messages import INLINE_BASE, STORED_IDS, FreeAnswer
from clamor_ray._protocol.names import server_id_of
from clamor_ray._protocol.registry_client import RegistryClient
from clamor_ray._protocol.rpc import await_rpc
from clamor_ray._read import bad_address, indexing, losses, views, waste
from clamor_ray._read import ref as references
from clamor_ray._read.lease import Lease, LeaseTable
from clamor_ray._read.ref import GlobalRef
from clamor_ray._session import end_hooks, span_sender
from clamor_ray._session.begin import starting
from clamor_ray._session.begin.announced import announce
from clamor_ray._session.create import Creator
from clamor_ray._session.kept_layers import KeptLayers
from clamor_ray._session.news import ProcessNews
from clamor_ray._spans.record import span
from clamor_ray._tasks import task_context
from clamor_ray._tasks.task_ends import TaskEnds
from clamor_ray._version import __version__

SWEEP_LEAST = 64
FREED_KEPT = 1024
RETIRE_S = 1.0  # then the registry is asked to see to it
MOST_LOOKED_AT_BYTES = 64 << 30  # of a mapping: `Client.absent_blocks` takes all of a larger one
LAST_FETCH_BYTES = 4 << 30  # of a mapping: no more of it is fetched when the session ends
FIRST_LOOK_S = 0.2  # for a page server that is there already

_KEPT_HINT = (
    "This process built it, and keeps it for the libraries of its malloc() block. Get it in "
    "another process; or, when nothing of those libraries points into it any more, call let_go() "
    "on the region that clamor.build() returned."
)


class Session:
    """One process's part in one session. Safe from any thread.

    Args:
        scope: names the session.
        registry: the actor's handle.
        node_id: Ray's hex id of this node.
        config: this process's settings.
        owner: this process made the session, and ends it.
    """

    of_job = True  # whether it is one of this process's job
    name: str | None = None  # by which this process has attached to it
    bound_task = ""  # the plain task that has attached by the name: for it alone
    is_ending = False  # for all: its registry ends with it
    goes_on = False  # it is only this process that leaves it
    in_driver = False
    _journal_fd: int | None = None  # held by the driver
    _has_left = False

    def __init__(
        self, scope: str, registry: Any, node_id: str, config: Config, *, owner: bool
    ) -> None:
        self.scope = scope
        self.registry = registry
        self.rpc = RegistryClient(self._call_registry)
        self.node_id = node_id
        self.job_id: str = ray.get_runtime_context().get_job_id()
        self.of_job = owner or scope.startswith(starting.job_scope_part())
        self.in_driver = not starting.in_worker()
        self.config = config
        self.owner = owner
        self.leases = LeaseTable()
        # Private copies of transactions that are over, at addresses that only one map can have.
        self._ended: dict[int, weakref.ref[Lease]] = {}
        # Freed here: the page server may not have heard of it, and what is mapped here would be
        # shared without asking it. The newest, and those that are mapped.
        self._freed: dict[int, int] = {}
        self._opened_at: dict[int, int] = {}
        self._freed_after_sweep = 0
        self._client: PiecedClient | None = None
        self.task_ends = TaskEnds()
        self._client_lock = threading.Lock()
        self._pid = os.getpid()
        self.server_id = server_id_of(node_id)
        self.creator = self._make_creator()
        self.news = ProcessNews(self)
        self.kept_layers = KeptLayers(self)
        references.install()
        views.install()
        indexing.install()

    def _make_creator(self) -> Creator:
        return Creator(
            self.scope,
            self.node_id,
            self.config,
            rpc=self.rpc,
            client=lambda: self.client,
            has_ended=lambda: self._has_ended(),
        )

    # -- the page server of this node

    def ensure_server(self) -> Any:
        """This node's page server, started if there is none."""
        info = self.rpc.ensure_server(self.node_id)
        if info.library_version != __version__:
            raise errors.VersionMismatchError(
                f"The page server of node {self.node_id} runs clamor-ray {info.library_version}, "
                f"this process {__version__}."
            )
        return info

    def hold_journal(self) -> None:
        """The registry's journal stays from now on, however long its restart takes."""
        if self._journal_fd is None:
            self._journal_fd = starting.hold_journal(self.scope)

    @property
    def client(self) -> PiecedClient:
        """The connection to the page server, made on first use."""
        client = self._client
        if client is not None:
            if not client.is_connected:
                self._have_served(client)
            return client
        with self._client_lock:
            if self._client is None:
                self._client = self._connect()
                if self._client.trap != "uffd":
                    bad_address.hook()
            return self._client

    def _have_served(self, client: PiecedClient) -> None:
        """The page server is being restarted; or it has ended, because its node was drained and
        nothing used it. Then the registry starts another one, and the client finds that by itself:
        what is called next waits for it."""
        if os.getpid() != self._pid or client.has_ended:
            return
        ray_state.check_raylet()
        # Whoever calls gets the error of its own call, which waits as it does for a restart.
        with contextlib.suppress(errors.ClamorError):
            self.rpc.ensure_server(self.node_id, timeout_s=self.config.connect_timeout_s)

    def _connect(self) -> PiecedClient:
        name = names.server_socket(self.scope, self.node_id, self.config.socket_dir)
        deadline = time.monotonic() + self.config.reattach_s
        pause_s = 0.05
        # The first task of a node that has joined need not wait for a server that was not started.
        connect_s = min(FIRST_LOOK_S, self.config.connect_timeout_s)
        while True:
            try:
                client = PiecedClient(
                    name,
                    trap=self.config.trap,
                    connect_timeout_s=connect_s,
                    reattach_timeout_s=self.config.reattach_s,
                )
            except (errors.ServerUnavailableError, errors.WaitTimeoutError):
                if time.monotonic() >= deadline:
                    raise
            else:
                announce(self.node_id, names.below_which(name))
                span_sender.begin(self)
                return client
            # Not there yet, or restarting: the registry starts it, or knows where it listens.
            name = self.ensure_server().socket_name
            connect_s = self.config.connect_timeout_s
            time.sleep(pause_s)
            pause_s = min(1.0, 2 * pause_s)

    def _call_registry(self, method: str, *args: object, timeout_s: float | None = None) -> Any:
        """Calls a method of the registry and waits for the answer."""
        if os.getpid() != self._pid:
            raise errors.ForkedError(
                "This process is a fork: it reads global variables, but cannot reach the registry."
            )
        timeout_s = self.config.control_timeout_s if timeout_s is None else timeout_s
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
            ClamorWarning: Faults on this node have fetched far more of it than was touched.
        """
        ref = self.as_opened(ref.snapshot())
        exact = read_set == "exact" or scattered or task_context.wants_exact()
        flags = (MAP_PRIVATE if private else 0) | (MAP_EXACT_READS if exact else 0)
        flags |= MAP_FIXED if ref._plan.fixed else 0
        if page_bytes := page_bytes or self.config.page_bytes:
            flags |= (page_bytes.bit_length() - 1) << MAP_PAGE_SHIFT
        if ref._region in self._freed:
            raise errors.FreedError(f"{ref!r} was freed.")
        client = self.client
        over = self._ended.pop(ref._region, None) if ref._plan.fixed else None
        if over is not None and (copy := over()) is not None:
            copy.close()  # its block is over, and its memory must not be used after that
        run = self.task_ends.note(client)
        with span(self.scope, "open", region=ref._region), self.explaining(ref._region):
            mapping = self._map_here(client, ref, flags)
        lease = Lease(
            client, self.leases, mapping, ref._region, writable=private, snapshot=ref, later=again
        )
        if warns:
            try:
                self.task_ends.check(self, ref, run, mapping.loss)
                if mapping.loss:
                    losses.warn(self, ref, mapping.loss)
                if mapping.wastes and not page_bytes:
                    waste.warn(ref)
            except (errors.ClamorError, errors.ClamorWarning):
                lease.close()
                raise
        if read_set != "off":
            lease.access_report_begin(None if stream or not again else stream_blocks(ref._plan))
        if not stream:
            return lease
        # Unpickling touches the stream at once: fetched here, a lost home is an exception.
        with span(self.scope, "open: fetch", region=ref._region), self.explaining(ref._region):
            blocks = stream_blocks(ref._plan)
            lease.prefetch(blocks, wait=True, timeout_s=self.config.patience_s)
        return lease

    def as_opened(self, snapshot: GlobalRef[Any]) -> GlobalRef[Any]:
        """In a session with a store: a reference inside of an object may be to a version from
        before the store was opened. Of those nothing is kept: it is to the one that was opened.

        Raises:
            FreedError: The variable is not there any more.
            SnapshotExpired: Since then so much was committed that this one is not kept either.
        """
        region = snapshot._region
        if not STORED_IDS <= region < INLINE_BASE:
            return snapshot
        opened_at = self._opened_at.get(region)
        if opened_at is None:
            opened_at = self._opened_at[region] = self.rpc.opened_at(region)
        return snapshot if snapshot.version >= opened_at else snapshot.at(opened_at)

    def region_at(self, address: int) -> int:
        """The region that is mapped there here; 0: none is."""
        leased = self.leases.at(address)
        return leased.snapshot._region if leased is not None and leased.snapshot else 0

    @contextlib.contextmanager
    def explaining(self, region: int) -> Iterator[None]:
        """Where blocks are lost, the registry knows which, and why. Where nobody answers, the
        cluster may have ended."""
        try:
            yield
        except errors.HomeLostError as error:
            self.explain(error, region)
        except (errors.ServerUnavailableError, errors.WaitTimeoutError):
            ray_state.check_raylet()
            raise

    def explain(self, error: errors.HomeLostError, region: int) -> NoReturn:
        """Raises what the registry says of it, or else the error as it is."""
        why = None
        with contextlib.suppress(errors.ClamorError):
            why = self.rpc.why_lost(region) if region else None
        if why is None:
            raise error
        raise errors.HomeLostError(why.message, code=error.code, hint=why.hint) from error

    def _map_here(self, client: PiecedClient, ref: GlobalRef[Any], flags: int) -> Mapping:
        try:
            return self._map(client, ref, flags)
        except errors.AddressClashError as error:
            if self.leases.find(ref._base_address) is None:
                raise  # it is not ours
            hint = (
                "Another version of it, or a private copy, is mapped at its address in this "
                "process: let go of what came from that first."
            )
            if kept.is_kept(client, ref._region):
                hint = _KEPT_HINT
            raise errors.AddressClashError(error.message, code=error.code, hint=hint) from error

    def _map(self, client: PiecedClient, ref: GlobalRef[Any], flags: int) -> Mapping:
        # In short waits: a restarting server is worth all of fault_timeout_s, an ended session,
        # which looks the same from here, nothing.
        deadline = time.monotonic() + self.config.fault_timeout_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                timeout_s = max(0.0, min(left_s, self.config.connect_timeout_s))
                if pieces := ref._piece_versions():
                    return client.map_pieces(pieces, flags=flags, timeout_s=timeout_s)
                where = (ref._region, ref.version, ref._base_address, ref._length_bytes)
                return client.map(*where, flags=flags, timeout_s=timeout_s)
            except (errors.ServerUnavailableError, errors.WaitTimeoutError):
                if not client.is_connected:
                    self._have_served(client)
                if self._has_ended():
                    for heard in end_hooks.when_found:
                        heard(self)
                    end_hooks.raise_ended(self.scope)
                if left_s <= self.config.connect_timeout_s:
                    raise
            time.sleep(0.05)

    def anchors_of(self, ref: GlobalRef[Any]) -> Anchors:
        """What keeps a variable for a reference that has nothing: the registry is asked for it, and
        nobody waits for the answer."""
        if os.getpid() != self._pid:
            return ()
        return (Anchor(asked=self.ask_anchor(ref._region)),)

    def ask_anchor(self, region: int) -> Any:
        """Asks the registry for one more anchor; the `ray.ObjectRef` of its answer."""
        return self.registry.hold.remote(region)

    def stats_of(self, ref: GlobalRef[Any]) -> dict[str, RegionStats]:
        return from_report(self.rpc.stats()).region(ref)

    # -- making

    def named(self, name: str | None, make: Callable[[], GlobalRef[Any]]) -> GlobalRef[Any]:
        """Makes a variable and gives it a name, where there is one to give.

        Raises:
            NameTakenError: Another variable has the name. What was made is freed.
        """
        if name is None:
            return make()
        names.check_name(name, "variable")
        if self.rpc.find_name(name) is not None:  # before gigabytes are copied
            raise errors.NameTakenError(f"There is a variable named {name!r} already.")
        ref = make()
        ref._name = name
        try:
            self.rpc.give_name(name, ref._region, ref._packed())
        except BaseException:
            self.free(ref)
            raise
        return ref

    # -- freeing

    def free(self, ref: GlobalRef[Any]) -> None:
        if ref._scope != self.scope:
            end_hooks.raise_mismatch(ref._scope)
        # A process that maps nothing tells no server itself: that would start one.
        client = None if ref._inline else self._client
        answer = self.rpc.free(ref._region, client.server_id if client else 0)
        if not ref._inline:
            self._note_freed(ref._region, ref._base_address)
        if client is not None:
            self._retire(client, ref._region, answer)

    def _retire(self, client: PiecedClient, region: int, answer: FreeAnswer) -> None:
        """Tells this node's page server, and through it those that ask it for blocks: messages on
        sockets, where calls of actors take milliseconds."""
        try:
            client.retire(region, alone=answer.alone, servers=answer.others, timeout_s=RETIRE_S)
        except errors.ClamorError:
            # One is being restarted, is silent, or was asked just now: the registry tells it, and
            # waits as long as `free` promises.
            self.rpc.free(region, 0)

    def _note_freed(self, region: int, base_address: int) -> None:
        """Remembers it. Now and then old ones go of which no memory is held here."""
        self._freed[region] = base_address
        if len(self._freed) > 2 * self._freed_after_sweep + SWEEP_LEAST:
            # Other threads may add to it meanwhile.
            for other, at in list(self._freed.items())[:-FREED_KEPT]:
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
        try:  # by another thread Ray may go just now
            context = ray_state.runtime_context()
            return (context.get_node_id(), context.get_job_id()) == (self.node_id, self.job_id)
        except (AttributeError, RuntimeError):
            return False

    @property
    def is_of_this_process(self) -> bool:
        """False in a child of fork, which has a copy of its parent's."""
        return os.getpid() == self._pid

    @property
    def was_told(self) -> bool:
        """Whether this node's page server has said that the session ended. Sends no message."""
        client = self._client
        return client is not None and client.has_ended

    def _has_ended(self) -> bool:
        """Whether its driver ended the session behind this process's back."""
        if self.owner or os.getpid() != self._pid:
            return False
        return not self.is_here or self.was_told or ray_state.find_registry(self.scope) is None

    def leave(self) -> None:
        """This process makes nothing in it any more; it reads until `close`. Idempotent."""
        if self._has_left:
            return
        self._has_left = True
        for ending in end_hooks.at_end:
            ending(self)
        journal_fd, self._journal_fd = self._journal_fd, None
        if journal_fd is not None:
            os.close(journal_fd)

    def come_back(self) -> None:
        """Undoes `leave`, before `close`."""
        self.goes_on = False
        self._has_left = False
        if self._client is not None:
            span_sender.begin(self)

    def fetch_leased(self, timeout_s: float) -> list[tuple[Mapping, GlobalRef[Any]]]:
        """Fetches what this process's objects look at, before the session ends; not of mappings
        that lack more than `LAST_FETCH_BYTES`.

        Args:
            timeout_s: For all of it.

        Returns:
            What to ask `may_come` about; no version of a home that is lost, or that is kept no
            longer.
        """
        deadline = time.monotonic() + timeout_s
        fetched = []
        for mapping, ref in self._leased_mappings():
            if ref is None:  # no version: what is built here is here
                continue
            try:
                self._fetch(mapping, deadline)
            except (errors.HomeLostError, errors.SnapshotExpired):
                continue
            except errors.ClamorError:
                pass  # `may_come` says what is missing
            fetched.append((mapping, ref))
        return fetched

    def _fetch(self, mapping: Mapping, deadline: float) -> None:
        """As long as it comes nearer: what is fetched may push out others, and then itself."""
        all_of_it = np.array([[0, mapping.length_bytes // BLOCK_BYTES]], np.uint64)
        least = LAST_FETCH_BYTES // BLOCK_BYTES + 1
        while 0 < (absent := self.client.absent_blocks(mapping.id)) < least:
            least = absent
            if (left_s := deadline - time.monotonic()) <= 0:
                return
            self.client.prefetch(mapping.id, all_of_it, wait=True, timeout_s=left_s)

    def may_come(self, mapping: Mapping, ref: GlobalRef[Any]) -> bool:
        """Whether a mapping lacks blocks, and not for good. To be asked when all were fetched: what
        came last may have pushed out what was here."""
        n_blocks = mapping.length_bytes // BLOCK_BYTES
        try:
            absent = self.client.absent_blocks(mapping.id)
            if not absent or (absent == n_blocks and mapping.length_bytes > MOST_LOOKED_AT_BYTES):
                return False  # of so much nobody says what is here
            return self.rpc.why_lost(ref._region) is None
        except errors.SessionEndedError:
            return False
        except errors.ServerUnavailableError as error:
            return not isinstance(error.__cause__, ray_state.GONE)  # without a registry nothing is
        except errors.ClamorError:
            return True

    def n_not_here(self) -> int:
        """How many mappings that objects look at lack blocks."""
        n_missing = 0
        for mapping, _ in self._leased_mappings():
            try:
                n_missing += self.client.absent_blocks(mapping.id) > 0
            except errors.ClamorError:
                n_missing += 1
        return n_missing

    def _leased_mappings(self) -> list[tuple[Mapping, GlobalRef[Any] | None]]:
        """What is mapped once for all who look at it, the smallest first, and of which version."""
        mappings = {leased.mapping: leased.snapshot for _, leased in self.leases.entries()}
        return sorted(mappings.items(), key=lambda item: item[0].length_bytes)

    def wait_until_told(self, timeout_s: float) -> bool:
        """Whether this node's page server says, within that time, that the session has ended. Then
        what is here of its memory changes no more."""
        deadline = time.monotonic() + timeout_s
        while not self.was_told and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.was_told

    def close(self, *, exiting: bool = False) -> None:
        """Ends this process's part. Every address that `get` gave out dies, and is not given out
        again as long as an object is left that looks into it. What libraries built in place stays
        (`Region.let_go`).

        Args:
            exiting: the process ends: what stays is not copied before.
        """
        self.leave()
        self.kept_layers.close()
        if len(self.leases):
            end_hooks.left[:] = [table for table in end_hooks.left if len(table)]
            end_hooks.left.append(self.leases)
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(errors.ClamorError):
                if not exiting:
                    client.build_copy()
            with contextlib.suppress(errors.ClamorError):
                client.close()

    def after_fork(self, is_here: bool) -> None:
        self._client_lock = threading.Lock()
        self.creator.after_fork()
        self.news.after_fork()
        self.kept_layers.after_fork()
        if self._client is None:
            return
        why = None
        if not is_here:  # no server is left: waiting for one would hold up the child
            why = errors.ForkedError("This process was forked after ray.shutdown().")
        self._client.after_fork(why)
