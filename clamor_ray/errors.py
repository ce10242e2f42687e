"""What can go wrong, one class per case.

Every error is a `ClamorError`, carries the page cache's code where one applies (`code`) and one
sentence that says what to do (`hint`). All of them survive pickling, because Ray ships
exceptions between processes.
"""

from __future__ import annotations

from clamor_ray._errors.backup import (
    BackupFormatError,
    BackupInUseError,
    DamagedBackupError,
    DanglingReferenceError,
    FixedAddressError,
    NoBackupError,
)
from clamor_ray._errors.base import ClamorError, ClamorWarning, LostBlocksWarning
from clamor_ray._errors.collections import (
    EmptyCollectionError,
    FunctionFailedError,
    LengthMismatchError,
    MissingColumnError,
    NondeterministicError,
    ReadOnlyError,
    SourceError,
    StorageError,
)
from clamor_ray._errors.files import (
    FileAccessError,
    FileChangedError,
    FileFormatError,
    FileReadError,
    NoSuchFileError,
)
from clamor_ray._errors.names import NameTakenError, NoSuchNameError
from clamor_ray._errors.nodes import NodeLostError, NoOtherNodeError
from clamor_ray._errors.programs import ProgramError, ProgramLostError, StageFailedError
from clamor_ray._errors.stores import (
    StoreAccessError,
    StoreDamagedError,
    StoreError,
    StoreFormatError,
    StoreIncompleteError,
    StoreInUseError,
)

__all__ = [
    "AddressClashError",
    "BackupFormatError",
    "BackupInUseError",
    "CacheBudgetError",
    "ClamorError",
    "ClamorWarning",
    "ClosedError",
    "CollectiveMismatchError",
    "CommitAbortedError",
    "CommitConflict",
    "DamagedBackupError",
    "DanglingReferenceError",
    "DeniedError",
    "DescriptorLimitError",
    "DrainTimeoutError",
    "EmptyCollectionError",
    "ExistsError",
    "FixedAddressError",
    "ForkedError",
    "FreedError",
    "FrozenReferenceError",
    "FileAccessError",
    "FileChangedError",
    "FileFormatError",
    "FileReadError",
    "FunctionFailedError",
    "HashMapCorruptError",
    "HashMapFullError",
    "HomeLostError",
    "InternalError",
    "JournalFullError",
    "KeyTypeError",
    "LengthMismatchError",
    "LostBlocksWarning",
    "MallocShimError",
    "MemberLostError",
    "MissingColumnError",
    "MissingKeyError",
    "NameTakenError",
    "NestedUpdateError",
    "NoBackupError",
    "NoSpaceError",
    "DrainCancelledError",
    "NoOtherNodeError",
    "NodeLostError",
    "NoSuchFileError",
    "NoSuchNameError",
    "NoSuchNodeError",
    "NoSuchSessionError",
    "NoVersionError",
    "NondeterministicError",
    "NotAMemberError",
    "NotInPlaceError",
    "NotInitializedError",
    "NotOpenedError",
    "ObjectsInUseError",
    "OutOfMemoryError",
    "PrefetchTimeoutError",
    "ProgramError",
    "ProgramLostError",
    "ProtocolError",
    "RangeError",
    "RayClientError",
    "ReadOnlyError",
    "RowIdError",
    "ServerUnavailableError",
    "SessionEndedError",
    "SessionMismatchError",
    "SnapshotExpired",
    "SourceError",
    "StageFailedError",
    "StorageError",
    "StoreAccessError",
    "StoreDamagedError",
    "StoreError",
    "StoreFormatError",
    "StoreInUseError",
    "StoreIncompleteError",
    "SystemCallError",
    "TooFewNodesError",
    "TrapUnavailableError",
    "UnpicklableError",
    "UnsupportedPlatformError",
    "VersionMismatchError",
    "WaitTimeoutError",
]


class NotInitializedError(ClamorError):
    """There is no session in this process.

    Example:
        >>> clamor.shutdown()
        >>> clamor.put(np.zeros(1000))
        Traceback (most recent call last):
            ...
        clamor_ray.errors.NotInitializedError: ...
    """

    default_hint = "Call clamor.init() first."


class SessionMismatchError(NotInitializedError):
    """A reference belongs to a session that has ended, or to another cluster.

    Example:
        >>> old = clamor.put(np.zeros(1000))
        >>> clamor.shutdown()
        >>> session = clamor.init()
        >>> with clamor.transaction(old, clamor.put(np.zeros(1000))):
        ...     pass
        Traceback (most recent call last):
            ...
        clamor_ray.errors.SessionMismatchError: ...
    """

    default_hint = (
        "Put the object again: a global variable lives as long as the session it was put in."
    )


class NoSuchSessionError(NotInitializedError, LookupError):
    """No session of the cluster has the name.

    Example:
        >>> clamor.shutdown(session="nobody made it")
        Traceback (most recent call last):
            ...
        clamor_ray.errors.NoSuchSessionError: ...
    """

    default_hint = (
        "clamor.init(session=..., lifetime='detached') makes it; clamor.sessions() lists those "
        "that there are."
    )

    __str__ = ClamorError.__str__


class SessionEndedError(SessionMismatchError):
    """The session of a reference or an array has ended: its driver has, or called shutdown.

    Example:
        >>> old = clamor.put(np.zeros(1000))
        >>> clamor.shutdown()
        >>> session = clamor.init()
        >>> old.get()
        Traceback (most recent call last):
            ...
        clamor_ray.errors.SessionEndedError: ...
    """

    default_hint = (
        "A global variable lives as long as its session. Put the object again in the session that "
        "there is now, and pass new references to actors that outlive their driver."
    )


class ObjectsInUseError(ClamorError):
    """`clamor.shutdown()` in a driver that holds objects of which not all blocks are on this node,
    and did not come in time. A touch of such a block would end the process, so the session goes on.
    """

    default_hint = (
        "Let go of these objects (del), or copy what you need of them, and call clamor.shutdown() "
        "again. clamor.shutdown(force=True) ends the session all the same; at the end of the "
        "process that happens by itself."
    )


class RayClientError(ClamorError):
    """The driver is connected through Ray Client (`ray://`).

    Example:
        >>> clamor.init("ray://head:10001")
        Traceback (most recent call last):
            ...
        clamor_ray.errors.RayClientError: ...
    """

    default_hint = (
        "A Ray Client driver has no page server beside it. Submit the program with "
        "`ray job submit`, or run it on a node of the cluster with address='auto'."
    )


class UnsupportedPlatformError(ClamorError):
    """Not Linux, or a processor with too few address bits."""

    default_hint = "The page cache needs 64-bit Linux; run the driver and the nodes there."


class UnpicklableError(ClamorError):
    """The object cannot be pickled, so it cannot be laid out in a region.

    Example:
        >>> import threading
        >>> clamor.put(threading.Lock())
        Traceback (most recent call last):
            ...
        clamor_ray.errors.UnpicklableError: ...
    """

    default_hint = (
        "Remove what cannot be pickled (locks, open files, connections) from the object, "
        "or give its class a __reduce__."
    )


class FreedError(ClamorError):
    """The global variable was freed, or never existed.

    Example:
        >>> a = clamor.put(np.zeros(1000))
        >>> clamor.free(a)
        >>> a.get()
        Traceback (most recent call last):
            ...
        clamor_ray.errors.FreedError: ...
    """

    default_hint = "Put it again, and free it only when nothing will ask for it any more."


class FrozenReferenceError(ClamorError, ValueError):
    """A change was asked for through a snapshot, which never moves.

    Example:
        >>> a = clamor.put(np.zeros(1000))
        >>> clamor.add_at(a.snapshot(), [0], 1.0)
        Traceback (most recent call last):
            ...
        clamor_ray.errors.FrozenReferenceError: ...
    """

    default_hint = "Pass the reference that snapshot() or at() was called on, which moves."


class RowIdError(ClamorError, IndexError):
    """A row number is out of bounds, or no integer. Nothing was changed.

    Example:
        >>> a = clamor.put(np.zeros(1000))
        >>> clamor.add_at(a, [1000], 1.0)
        Traceback (most recent call last):
            ...
        clamor_ray.errors.RowIdError: ...
    """

    default_hint = "Ids are integers from -n to n - 1, where n is the length of axis 0."


class NotOpenedError(ClamorError, TypeError):
    """A reference was passed to a function of NumPy where its object was meant.

    Opening it would be silent, and could fetch all of the object. So `get` says where that is.
    `np.asarray(ref)` still makes an object array of one reference: lists of references in pandas
    and NumPy are made so, and NumPy does not say which of both it is asked for.

    Example:
        >>> ref = clamor.put(np.arange(1000))
        >>> np.sum(ref)
        Traceback (most recent call last):
            ...
        clamor_ray.errors.NotOpenedError: ...
        >>> int(np.sum(ref.get()))
        499500
    """

    default_hint = "Call ref.get() for the array, in plain Ray tasks, too."


class HomeLostError(ClamorError):
    """Blocks of the variable are on no page server that is known, and nothing makes them again."""

    default_hint = "Put the object again from its source; other global variables are not affected."

    is_verdict: bool = False
    """The registry has declared the blocks lost: asking again is of no use."""


class ServerUnavailableError(ClamorError):
    """The page server of this node, or the registry, does not answer."""

    default_hint = (
        "Ray restarts it by itself: try again in a moment. If it stays away, the actor's log in "
        "Ray's session directory says why."
    )


class VersionMismatchError(ClamorError):
    """The node runs another version of the library."""

    default_hint = (
        "Install the same clamor-ray on every node (or in the job's runtime_env), and restart."
    )


class AddressClashError(ClamorError):
    """Something else is mapped where the region must be."""

    default_hint = (
        "A library mapped memory at a fixed address inside the global address space "
        "(0x110000000000-0x290000000000); load it later, or configure it to stay out."
    )


class OutOfMemoryError(ClamorError, MemoryError):
    """The node has too little memory, or the session too few addresses, for what was asked.

    Example:
        >>> clamor.zeros(1 << 50, np.uint8)  # more than there are addresses
        Traceback (most recent call last):
            ...
        clamor_ray.errors.OutOfMemoryError: ...
    """

    default_hint = "Free other global variables, put fewer bytes at a time, or use a larger node."


class CacheBudgetError(ClamorError, ValueError):
    """A node has less memory than its cache was told to take.

    Example:
        >>> clamor.shutdown()
        >>> clamor.init(cache_bytes="1024TiB")
        Traceback (most recent call last):
            ...
        clamor_ray.errors.CacheBudgetError: ...
    """

    default_hint = (
        "Set CLAMOR_CACHE_BYTES, or clamor.init(cache_bytes=...), to less than the smallest node "
        "has; 0 takes a quarter of each node's own memory."
    )


class DescriptorLimitError(ClamorError):
    """The process or the page server is out of file descriptors."""

    default_hint = (
        "Free variables that are not needed, or raise the limit (`ulimit -n 65536`) before Ray "
        "starts on the node."
    )


class TrapUnavailableError(ClamorError):
    """The kernel refuses the trap that was asked for."""

    default_hint = "Set CLAMOR_TRAP=auto to take what the kernel allows, or CLAMOR_TRAP=sigsegv."


class WaitTimeoutError(ClamorError, TimeoutError):
    """A wait ended without an answer."""

    default_hint = "The page server is overloaded or unreachable; try again, or raise the timeout."


class PrefetchTimeoutError(WaitTimeoutError):
    """The blocks did not arrive in time. What did arrive stays."""

    default_hint = "Ask again with a longer timeout, or with wait=False."


class DrainTimeoutError(WaitTimeoutError):
    """`clamor.drain` was not done in time. What it names is still on the node.

    Example:
        >>> ref = clamor.put(np.zeros(1000))
        >>> clamor.drain(clamor.init().node_id, timeout=0.0)
        Traceback (most recent call last):
            ...
        clamor_ray.errors.DrainTimeoutError: ...
    """

    default_hint = (
        "Nothing is lost, and all of it can be used as before. Call clamor.drain again, with a "
        "longer timeout, before the node goes, or clamor.cancel_drain if it stays."
    )


class DrainCancelledError(ClamorError):
    """`clamor.cancel_drain` was called while `clamor.drain` moved what is on the node."""

    default_hint = (
        "What was moved stays where it is now, and the rest stays on the node, which takes "
        "variables again. Call clamor.drain again if the node is to go."
    )


class TooFewNodesError(ClamorError):
    """The cluster has fewer nodes than the redundancy of a variable needs.

    Example:
        >>> clamor.put(np.zeros(10**4), redundancy="raid1", copies=100)
        Traceback (most recent call last):
            ...
        clamor_ray.errors.TooFewNodesError: ...
    """

    default_hint = "Add nodes, or take less redundancy."


class NoSuchNodeError(ClamorError, LookupError):
    """No living node of the cluster has the id.

    Example:
        >>> clamor.drain("nobody")
        Traceback (most recent call last):
            ...
        clamor_ray.errors.NoSuchNodeError: ...
    """

    default_hint = "ray.nodes() lists the nodes, and their ids (NodeID)."

    __str__ = ClamorError.__str__


class ProtocolError(ClamorError):
    """The other side sent something that makes no sense."""

    default_hint = "Make sure that nothing but clamor-ray connects to its sockets; else report it."


class DeniedError(ClamorError):
    """The other side refused our credentials."""

    default_hint = "Run the driver as the user who started Ray on this node."


class ForkedError(ClamorError):
    """This is a fork of the process that made the session, and could not attach by itself.

    Example:
        >>> import multiprocessing
        >>> with multiprocessing.get_context("fork").Pool(1) as pool:
        ...     pool.apply(clamor.put, (np.zeros(1000),))
        Traceback (most recent call last):
            ...
        clamor_ray.errors.ForkedError: ...
    """

    default_hint = "Use the 'spawn' start method, or call clamor only in the parent process."


class ClosedError(ClamorError):
    """A session, a transaction or a region is used after its end, or before its beginning.

    Example:
        >>> a = clamor.put(np.zeros(1000))
        >>> change = clamor.update(a)
        >>> change.commit()  # it has not begun
        Traceback (most recent call last):
            ...
        clamor_ray.errors.ClosedError: ...
    """

    default_hint = "Call clamor.init() again, and put the objects again."


class ExistsError(ClamorError):
    """Something was to be made, sealed or begun a second time."""

    default_hint = "The message names it. If your program did not do so twice, please report it."


class RangeError(ClamorError):
    """Blocks outside the variable were asked for."""

    default_hint = "The reference and the page server disagree about the variable; report it."


class CommitConflict(ClamorError):
    """Another transaction changed the same blocks first; nothing of this one is visible.

    Args:
        message: what happened, as a sentence.
        region: id of the variable; 0 where it is not known.
        base_version: the version that this transaction read.
        version: the version that the other one made.
        first_block: first 4 KiB block that both wrote, counted from the region's start.
        n_blocks: how many from there on; 0 where it is not blocks that clash (a variable inside
            its reference, a changed layout, a base that is too old to tell).
        code, hint: as `ClamorError`'s.

    Example:
        >>> a = clamor.put(np.zeros(1000))
        >>> change = clamor.update(a)
        >>> change.begin()[0] = 1
        >>> ray.get(clamor.remote(lambda x: clamor.add_at(x, [1], 1.0)).remote(a))
        >>> change.commit()
        Traceback (most recent call last):
            ...
        clamor_ray.errors.CommitConflict: ...
    """

    default_hint = "Run the transaction again on the newest version: clamor.retry(fn, ...) does."

    def __init__(
        self,
        message: str,
        region: int = 0,
        base_version: int = 0,
        version: int = 0,
        first_block: int = 0,
        n_blocks: int = 0,
        *,
        code: int | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, code=code, hint=hint)
        self.region = region
        self.base_version = base_version
        self.version = version
        self.first_block = first_block
        self.n_blocks = n_blocks


class CommitAbortedError(ClamorError):
    """The commit was given up before it was made: its writer was taken for dead, or what it had
    staged was lost."""

    default_hint = "Nothing of it is visible. Run the transaction again."


class JournalFullError(ClamorError):
    """The registry cannot write its journal."""

    default_hint = "Nothing was changed; free disk space on the driver's node and try again."


class SnapshotExpired(ClamorError):
    """The blocks of an old version are kept no longer.

    Example:
        >>> a = clamor.put(np.zeros(10))  # of one this small the newest 64 versions are kept
        >>> for _ in range(200):
        ...     with clamor.update(a) as x:
        ...         x += 1
        >>> a.at(2)
        Traceback (most recent call last):
            ...
        clamor_ray.errors.SnapshotExpired: ...
    """

    default_hint = (
        "Read a newer version (ref.refresh()), or raise CLAMOR_HISTORY_BYTES or "
        "CLAMOR_HISTORY_DISK_BYTES before clamor.init()."
    )


class NoVersionError(ClamorError):
    """The global variable has no such version.

    Example:
        >>> a = clamor.put(np.zeros(1000))
        >>> a.at(7)
        Traceback (most recent call last):
            ...
        clamor_ray.errors.NoVersionError: ...
    """

    default_hint = "Versions count from 0 up to ref.refresh().version; ask for one of those."


class NoSpaceError(ClamorError):
    """A file system, or an arena that something is built in, is full.

    Example:
        >>> with clamor.build(4096) as r: r.zeros(1000)
        Traceback (most recent call last):
            ...
        clamor_ray.errors.NoSpaceError: ...
    """

    default_hint = "Make room on the disk, or make the region larger when it is made."


class MemberLostError(ClamorError):
    """A member of a group died, or did nothing until the deadline. Arrays that results were to be
    written to may hold anything."""

    default_hint = (
        "The group is broken, at every member. Start what died again, and have all members call "
        "group.rebuild()."
    )

    member: int | None = None
    """Rank of the member that was lost first, as far as those that noticed could say so before they
    closed; else of the neighbour whose connection ended, or that was silent."""


class CollectiveMismatchError(ClamorError):
    """The members of a group did not ask for the same. Nothing was reduced, the group goes on.

    Example:
        >>> class Worker:
        ...     def run(self, group):
        ...         return group.allreduce(np.ones(1 + group.rank))
        >>> workers = [ray.remote(Worker).remote() for _ in range(2)]
        >>> group = clamor.AllReduceGroup(workers)
        >>> ray.get([worker.run.remote(group) for worker in workers])
        Traceback (most recent call last):
            ...
        ray.exceptions.RayTaskError(CollectiveMismatchError): ...
    """

    default_hint = "All members make the same calls, in the same order, with arrays of one shape."


class NotAMemberError(ClamorError):
    """A group's method was called by a process that is none of its members.

    Example:
        >>> class Worker:
        ...     pass
        >>> group = clamor.AllReduceGroup([ray.remote(Worker).remote()])
        >>> group.barrier()  # this is no actor
        Traceback (most recent call last):
            ...
        clamor_ray.errors.NotAMemberError: ...
    """

    default_hint = "Pass the group to its actors, and call its methods there."


class MallocShimError(ClamorError):
    """The allocations of a library cannot be led into a region.

    Example:
        >>> def build():
        ...     with clamor.build(4096) as r, r.malloc("libc.so.6"):
        ...         pass
        >>> build()
        Traceback (most recent call last):
            ...
        clamor_ray.errors.MallocShimError: ...
    """

    default_hint = (
        "Name the library that allocates. One that takes an allocator needs no shim: give it the "
        "functions of region.malloc_functions()."
    )


class SystemCallError(ClamorError):
    """A system call failed in a way that has no case of its own."""

    default_hint = "The message names the call and the reason."


class KeyTypeError(ClamorError, TypeError):
    """A key of another type than the hash map's.

    Example:
        >>> m = clamor.HashMap.build([1, 2], [0.1, 0.2])
        >>> m["one"]
        Traceback (most recent call last):
            ...
        clamor_ray.errors.KeyTypeError: ...
    """

    default_hint = "Convert the keys (`keys.astype(...)`), or build a map with keys of that type."


class MissingKeyError(ClamorError, KeyError):
    """A key is not in the hash map.

    Example:
        >>> m = clamor.HashMap.build([1, 2], [0.1, 0.2])
        >>> m[7]
        Traceback (most recent call last):
            ...
        clamor_ray.errors.MissingKeyError: ...
    """

    default_hint = "Pass default= to get() for keys that may be missing, or ask contains() first."


class HashMapFullError(ClamorError):
    """The hash map has no room for another key.

    Example:
        >>> keys = np.arange(100)
        >>> clamor.HashMap.build(keys, keys, capacity=10)
        Traceback (most recent call last):
            ...
        clamor_ray.errors.HashMapFullError: ...
    """

    default_hint = "Build a larger one: HashMap.build(m.keys(), m.values(), capacity=...)."


class HashMapCorruptError(ClamorError):
    """The arrays are no table of a hash map, or were overwritten.

    Example:
        >>> m = clamor.HashMap(clamor.put(np.zeros(1000)))
        >>> m[7]
        Traceback (most recent call last):
            ...
        clamor_ray.errors.HashMapCorruptError: ...
    """

    default_hint = (
        "Only HashMap.build makes such arrays, and only `with clamor.update(m)` changes them; "
        "build the map again from its source."
    )


class NestedUpdateError(ClamorError):
    """One thread updates a variable inside an update of the same variable.

    Example:
        >>> a = clamor.put(np.zeros(1000))
        >>> with clamor.update(a), clamor.update(a): pass
        Traceback (most recent call last):
            ...
        clamor_ray.errors.NestedUpdateError: ...
    """

    default_hint = (
        "Write to the object of the outer block; what it commits is one version for all of them."
    )


class NotInPlaceError(ClamorError):
    """A list grew, an array was replaced, or nothing of the object can be changed in place.

    Example:
        >>> ref = clamor.put({"a": np.zeros(1000), "names": []})
        >>> with clamor.update(ref) as x: x["names"].append("b")
        Traceback (most recent call last):
            ...
        clamor_ray.errors.NotInPlaceError: ...
    """

    default_hint = (
        "Only the contents of arrays can be changed in place; put the new object again with "
        "clamor.put."
    )


class InternalError(ClamorError):
    """This should not happen."""

    default_hint = "Please report it with the message above."


for _name in __all__:  # wherever they are written down, they are this module's
    globals()[_name].__module__ = __name__
