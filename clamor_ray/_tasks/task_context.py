"""What a process reads and commits while one attempt of a task runs.

Reads come from the page table. `recording` begins a read set on every mapping that this process
has, and on each that is made while it lasts, by whatever way and from whatever thread; a mapping's
set is taken when its lease ends, at the latest when the attempt does. What does not go through a
mapping says so itself: rows that `clamor.gather` copies, variables inside their references.

A read set never misses a block; it may have more than was touched:

* with the SIGSEGV trap neighbours show, of what the process had mapped before without exact reads
  and where this node is the home; with userfaultfd before Linux 5.19 they show everywhere, and of
  a variable on disk they do;
* of a private copy (mode "c", transactions) all that was touched since it was mapped counts;
* a block that was evicted while the attempt ran counts, and all of a variable does whose page
  server was restarted meanwhile, or where the kernel swaps; of one that is on disk here all does
  where the kernel reclaims pages of files;
* of an object that lives on from an earlier call its pickle stream counts, and a variable inside
  its reference counts as read where its arrays are still alive;
* a forked child's page table is its own: all counts that it had at the fork or opened later.

What it cannot see: values that were copied out of a variable by an earlier call and are still here,
and processes that were started and not forked.

From the first attempt of a process on, this file observes its leases (`LeaseObserver`); what lies
above (`_session/`, `_build/`, `_write/`) says itself what it makes and commits. Nothing here takes
a lock where the garbage collector may call it.
"""

from __future__ import annotations

import contextlib
import os
import select
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._objects.layout import stream_blocks
from clamor_ray._protocol.idempotency import TOKEN_BYTES, Name, digest_of
from clamor_ray._read import opener
from clamor_ray._read.lease import LeaseObserver, inline_images, observe

if TYPE_CHECKING:
    from clamor_ray._native.client import Client, Mapping, Runs
    from clamor_ray._protocol.registry_client import RegistryClient
    from clamor_ray._read.ref import GlobalRef
    from clamor_ray._write.deltas import Collector

ReadSet = Literal["exact", "coarse", "off"]


class Read(NamedTuple):
    """What was read of one version of a variable.

    Args:
        region: id of the variable.
        version: of it.
        blocks: serialized `pyroaring.BitMap` of 4 KiB blocks, counted from the region's start;
            None: all of it (so it is for variables that travel inside their references).
    """

    region: int
    version: int
    blocks: bytes | None


def _reclaimed() -> int | None:
    """Counts what the kernel looked at to swap it out: entries of shared memory go without a trace
    then. 0 where it never does; None: unknown."""
    try:
        with open("/proc/meminfo") as lines:
            if any(line.split()[:2] == ["SwapTotal:", "0"] for line in lines):
                return 0
        with open("/proc/vmstat") as lines:
            found = [line.split()[1] for line in lines if line.startswith("pgscan_anon ")]
        return int(found[0]) if found else None
    except OSError:
        return None


class _Set(NamedTuple):
    """A read set that is being taken.

    Args:
        client: who takes it.
        mapping: of which mapping.
        key: (region, version).
        stream: what was, or must have been, read to make an object of it.
    """

    client: Client
    mapping: Mapping
    key: tuple[int, int]
    stream: Runs


def _blocks_of(runs: Runs) -> BitMap:
    alone = runs[:, 1] == 1
    blocks = BitMap(runs[alone, 0].astype(np.uint32))
    for first, n_blocks in runs[~alone].tolist():
        blocks.add_range(first, first + n_blocks)
    return blocks


class TaskContext:
    """One attempt's reads and commits. Made by `recording`.

    Args:
        token: names the task; None: transactions are not told apart.
        read_set: as `recording`'s.
    """

    def __init__(self, token: bytes | None, read_set: ReadSet) -> None:
        if token is not None and len(token) != TOKEN_BYTES:
            raise ValueError(f"a token has {TOKEN_BYTES} bytes, not {len(token)}")
        self.token = token
        self.read_set = read_set
        self._pid = os.getpid()
        self._sets: dict[int, _Set] = {}
        self._early: set[int] = set()  # leases that ended before their set was noted here
        self._all: set[tuple[int, int]] = set()
        self._found: list[tuple[tuple[int, int], Runs]] = []
        self._reads: list[Read] | None = None
        self._reclaimed = _reclaimed() if read_set != "off" else 0
        self._commit_lock = threading.Lock()  # transactions of several threads have an order, too
        self._committed: Counter[bytes] = Counter()  # by `digest_of` their variables
        self._made: set[int] = set()  # ids of variables that this attempt has made
        self._doubt: tuple[int, bytes] | None = None  # a commit whose answer was lost, of which
        # By id: references that it was given frozen, though no user has frozen them.
        self.moving: frozenset[int] = frozenset()
        # Of a stage's task: what is applied when the stage ends.
        self.scatter_adds: Collector | None = None

    # -- what the hooks say; from any thread, and (`released`) from the garbage collector

    @property
    def _on(self) -> bool:
        return self.read_set != "off" and self._reads is None

    def _leased(
        self, client: Client, token: int, mapping: Mapping, snapshot: GlobalRef[Any]
    ) -> None:
        key = (snapshot._region, snapshot.version)
        if self.read_set == "exact":
            client.reads_exact(mapping.id)
        client.evicted_begin(mapping.id)
        client.access_report_begin(mapping.id)
        self._sets[token] = _Set(client, mapping, key, stream_blocks(snapshot._plan))
        if token in self._early:
            self._released(token)

    def _released(self, token: int) -> None:
        taken = self._sets.pop(token, None)
        if taken is None:
            self._early.add(token)
        else:
            self._take(taken)

    def _take(self, taken: _Set, *, only_end: bool = False) -> None:
        self._found.append((taken.key, taken.stream))
        try:
            client, mapping_id = taken.client, taken.mapping.id
            if only_end:
                client.access_report_drop(mapping_id)
            else:
                self._found.append((taken.key, client.access_report_end(mapping_id)))
                self._found.append((taken.key, client.evicted(mapping_id)))  # in this order
            client.evicted_end(mapping_id)
        except errors.ClamorError:  # the page cache was closed under it: the reads are unknown
            self._all.add(taken.key)

    def reads_all(self, region: int, version: int) -> None:
        """Which blocks of the variable were read is not known: all of it counts."""
        if self._on:
            self._all.add((region, version))

    # -- its end

    def reads(self) -> list[Read]:
        """What was read, one entry for each variable and version, in the order of their ids.

        To be called once, at the end of the attempt; what is read afterwards is not seen. After
        `recording`'s block it gives what was read in the block.
        """
        if self._reads is None:
            self._reads = self._collect()
        return self._reads

    def _collect(self) -> list[Read]:
        if self.read_set == "off":
            return []
        sets, ended = list(self._sets.items()), set()
        for token, _ in sets:
            taken = self._sets.pop(token, None)  # None: its lease ended just now
            if taken is not None:
                self._take(taken, only_end=taken.mapping.id in ended)
                ended.add(taken.mapping.id)
        self._all.update(_children.read())
        if self._reclaimed is None or self._reclaimed != _reclaimed():
            self._all.update(key for key, _ in self._found)
        merged: dict[tuple[int, int], BitMap] = {}
        for key, runs in self._found:
            if key not in self._all:
                merged.setdefault(key, BitMap()).update(_blocks_of(runs))
        self._found = []
        reads = [Read(*key, None) for key in self._all]
        for key, blocks in merged.items():
            blocks.run_optimize()
            reads.append(Read(*key, bytes(blocks.serialize())))
        return sorted(reads, key=lambda read: read[:2])

    # -- transactions

    @property
    def commits(self) -> int:
        """How many transactions were committed, empty ones and those that another attempt had
        made before included."""
        return self._committed.total()

    @contextlib.contextmanager
    def one_commit(
        self, registry: RegistryClient, variables: Iterable[int]
    ) -> Iterator[Name | None]:
        """Around the commit of one transaction: it counts where the block does not raise.

        An earlier one whose answer was lost is asked about first: it may be the n-th.

        Args:
            registry: knows whether a commit was applied.
            variables: ids of all that the transaction is over, written or not.

        Yields:
            Its name; None where the attempt has no token, or made all of the variables itself: no
            other attempt has them.
        """
        shared = self._shared(variables)
        digest = digest_of(shared)
        with self._commit_lock:
            if self._doubt is not None:
                commit_id, doubtful = self._doubt
                self._committed[doubtful] += bool(registry.outcome(commit_id))
                self._doubt = None
            named = self.token is not None and shared
            yield Name(self.token or b"", digest, self._committed[digest]) if named else None
            self._committed[digest] += 1

    def has_made(self, region: int) -> bool:
        """Whether it has made the variable itself, so that no other attempt has it."""
        return region in self._made

    def doubts(self, commit_id: int, variables: Iterable[int]) -> None:
        """The answer to this commit was lost; inside `one_commit`, with the same variables."""
        self._doubt = (commit_id, digest_of(self._shared(variables)))

    def _shared(self, variables: Iterable[int]) -> set[int]:
        """Those that other attempts may have, too: what this one made is another variable there."""
        return set(variables) - self._made


_current: TaskContext | None = None


def current() -> TaskContext | None:
    """The attempt that runs in this process."""
    return _current


@contextlib.contextmanager
def recording(token: bytes | None, *, read_set: ReadSet = "exact") -> Iterator[TaskContext]:
    """Records what this process reads and commits in the block. (Clamor section 3.3; issue 5.)

    Args:
        token: 16 bytes that name the task, the same in each of its attempts: what the n-th
            transaction of these writes is applied once. None: every commit counts.
        read_set: "exact" (the blocks that were touched, as far as the trap can tell, see the
            file's head), "coarse" (what the kernel maps around them, too) or "off" (no reads).

    Raises:
        ValueError: Another attempt runs in this process, or the token is none.

    Example:
        >>> ref = clamor.put(np.arange(10**5))
        >>> with recording(None) as context:
        ...     total = ref.get()[:1000].sum()
        >>> [read.version for read in context.reads()]
        [0]
    """
    global _current
    if _current is not None:
        raise ValueError("an attempt is being recorded in this process already")
    context = TaskContext(token, read_set)
    _children.watch()
    _current = context  # before the look at what is there: see `_released`
    try:
        if context._on:
            _begin_on_all(context)
        yield context
    finally:
        if os.getpid() == context._pid:
            context.reads()
            _current = None


def _begin_on_all(context: TaskContext) -> None:
    entries = (
        (session, *entry) for session in opener.sessions() for entry in session.leases.entries()
    )
    for session, token, leased in entries:
        if leased.snapshot is not None and token not in context._sets:
            try:
                context._leased(session.client, token, leased.mapping, leased.snapshot)
            except errors.ClamorError:
                if token in dict(session.leases.entries()):  # else it has just ended
                    context._all.add((leased.snapshot._region, leased.snapshot.version))
    for _, leased in inline_images.entries():
        if leased.snapshot is not None:
            context._all.add((leased.snapshot._region, leased.snapshot.version))


# ------------------------------------------------------------------ hooks


def wants_exact() -> bool:
    """Whether what is opened now should show what is touched, and not what lies around it."""
    return _current is not None and _current.read_set == "exact"


def leased(client: Client, token: int, mapping: Mapping, snapshot: GlobalRef[Any] | None) -> None:
    """A lease began. Nothing of it has been touched through it."""
    if snapshot is None or _children.reported(snapshot):
        return
    context = _current
    if context is not None and context._on:
        context._leased(client, token, mapping, snapshot)


def released(token: int) -> None:
    """A lease ends; its mapping is still there."""
    context = _current
    if context is not None and context._on and os.getpid() == context._pid:
        context._released(token)


def made(region: int) -> None:
    """This process makes a variable: no other attempt has it."""
    context = _current
    if context is not None:
        context._made.add(region)


def read_whole(snapshot: GlobalRef[Any]) -> None:
    """All of a variable is read: it travels inside its reference."""
    if _children.reported(snapshot):
        return
    context = _current
    if context is not None and context._on:
        context._all.add((snapshot._region, snapshot.version))


def read_runs(snapshot: GlobalRef[Any] | None, runs: Callable[[], Runs]) -> None:
    """Blocks are read without being touched.

    Args:
        snapshot: of what.
        runs: gives them, counted from the region's start; only called where an attempt runs.
    """
    context = _current
    if context is not None and snapshot is not None and context._on:
        context._found.append(((snapshot._region, snapshot.version), runs()))


# ------------------------------------------------------------------ forked children


class _Child(NamedTuple):
    """A forked child, or what it forked itself.

    Args:
        alive: readable when all of them are gone.
        opened: memfd; they append a record for each snapshot that they open.
        had: what it could read at the fork.
    """

    alive: int
    opened: int
    had: frozenset[tuple[int, int]]


_RECORD: Final = struct.Struct("<QQ")


class _Children:
    """What forked children may have read: their page tables are their own.

    Watches from the first attempt of a process on; children that were forked before are not seen.
    """

    def __init__(self) -> None:
        self._watched = False
        self._pid = os.getpid()
        self._children: list[_Child] = []
        self._next: tuple[int, int, int] | None = None  # alive's two ends, and the memfd
        self._out = -1  # in a child: the memfd to append to
        self._end = -1

    def watch(self) -> None:
        if not self._watched:
            self._watched = True
            self._pid = os.getpid()
            observe(LeaseObserver(leased, released, read_whole, read_runs))
            os.register_at_fork(
                before=self._before,
                after_in_parent=self._in_parent,
                after_in_child=self._in_child,
            )

    def _before(self) -> None:
        if os.getpid() != self._pid:  # a child forks: its child writes where it writes
            return
        with contextlib.suppress(OSError):
            end, mine = os.pipe2(os.O_CLOEXEC)
            self._next = (end, mine, os.memfd_create("clamor-children"))

    def _in_parent(self) -> None:
        if os.getpid() != self._pid:
            return
        had = frozenset(_mapped())
        if self._next is None:  # no descriptors: its end is not seen
            self._children.append(_Child(-1, -1, had))
            return
        end, mine, opened = self._next
        self._next = None
        os.close(mine)
        self._children = [child for child in self._children if not self._is_gone(child)]
        self._children.append(_Child(end, opened, had))
        context = _current
        if context is not None and context._on:
            context._all.update(had)  # though it may be gone before the attempt ends

    def _in_child(self) -> None:
        if self._next is not None:
            end, self._end, self._out = self._next
            os.close(end)
            self._next = None
        for child in self._children:
            if child.alive >= 0:
                os.close(child.alive)
                os.close(child.opened)
        self._children = []

    def _is_gone(self, child: _Child) -> bool:
        if child.alive < 0:
            return False
        poll = select.poll()
        poll.register(child.alive, 0)  # hung up: no process can write to it any more
        if not poll.poll(0):
            return False
        os.close(child.alive)
        os.close(child.opened)
        return True

    def reported(self, snapshot: GlobalRef[Any]) -> bool:
        """Whether this is a forked child; if so, its parent learns that it opened this."""
        if self._out >= 0:
            record = _RECORD.pack(snapshot._region, snapshot.version)
            os.write(self._out, record)  # one description for all of them: each at the end
        return self._out >= 0

    def read(self) -> set[tuple[int, int]]:
        """In the parent: what children that lived during this attempt may have read."""
        found: set[tuple[int, int]] = set()
        for child in self._children:
            found |= child.had
            if child.opened >= 0:
                size = os.fstat(child.opened).st_size
                found.update(_RECORD.iter_unpack(os.pread(child.opened, size, 0)))
        self._children = [child for child in self._children if not self._is_gone(child)]
        return found


_children = _Children()


def _mapped() -> Iterator[tuple[int, int]]:
    for table in (inline_images, *(session.leases for session in opener.sessions())):
        for _, leased in table.entries():
            if leased.snapshot is not None:
                yield leased.snapshot._region, leased.snapshot.version
