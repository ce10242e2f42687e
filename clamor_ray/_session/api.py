"""What a program calls to make global variables and to let go of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import ray

from clamor_ray._files.describe import Format
from clamor_ray._read.hashmap import HashMap
from clamor_ray._read.ref import GlobalRef
from clamor_ray._redundancy.levels import LevelName, level_of
from clamor_ray._session.create import Home, ZerosHome
from clamor_ray._session.process_sessions import with_current


def put(
    obj: Any,
    *,
    name: str | None = None,
    source: Callable[[], Any] | None = None,
    home: Home | None = None,
    redundancy: LevelName | None = None,
    copies: int = 2,
    spill: bool = False,
) -> GlobalRef[Any]:
    """Places an object in the global address space and returns a reference to it.

    Its buffers (NumPy arrays, Arrow and pandas data, what SciPy and scikit-learn hold in them,
    PyTorch CPU tensors) are copied once, into memory homed on this node; tasks anywhere read
    them there, block by block. An object below 4 KiB travels inside its reference.

    The variable goes when no reference to it is left anywhere; see `GlobalRef`.

    Args:
        obj: anything that pickle or cloudpickle can pickle.
        name: that `clamor.open` finds it by, in any process of the session, until it is freed or
            `clamor.drop` takes the name away. Until then it stays, whoever refers to it.
        source: a callable without arguments that makes an equal object again: the same pickle
            stream, the same buffers. It is run, in a task of its own, where the node that holds
            the object is lost and blocks are wanted that no other node has read. Those that a
            commit has changed it cannot make. A small object needs none.
        home: "spread" homes parts of the object on all nodes in turn, so that it may be larger than
            the memory of any node, and readers do not all ask one. None homes it on this node; or
            spreads it, where this node has no room for it and there are others.
        redundancy: how an object that is spread survives the loss of a node, with all of its
            versions. "raid1" keeps `copies` copies of each block on as many nodes. "raid5" keeps a
            parity of the blocks of 2 to 8 nodes on another one, in turn; "raid4" has all parities
            on one node: one node may be lost. "raid0" is home="spread", and survives none. An
            object below 4 KiB needs none.
        copies: of each block, for "raid1"; one fewer than that may be lost.
        spill: it is in a file on disk, and not in memory: for what is larger than that. The kernel
            keeps in memory what is used. The disk has room for all of it, or `put` raises. It is
            not kept when the session ends. It is homed on this node, with home or redundancy on
            theirs.

    Returns:
        A reference to version 0 of the new global variable.

    Raises:
        NotInitializedError: Before `clamor.init()`.
        UnpicklableError: Something in the object, or in the source, cannot be pickled.
        NameTakenError: Another variable of the session has the name.
        TypeError: The source cannot be called; or the object is a reference or a `HashMap`, and a
            name would be another variable's.
        OutOfMemoryError: This node has less memory than the object needs, and there is no other;
            or all of them have.
        NoSpaceError: It is to spill, and the disk has less room than it needs.
        TooFewNodesError: The redundancy needs more nodes than there are.
        ValueError: No such home or redundancy, or copies that make no sense.

    Warns:
        ClamorWarning: Most of the object is not in buffers, so that it travels whole.

    Safe from any thread.

    Example:
        >>> ref = clamor.put({"weights": np.ones(1000)})
        >>> float(ref.get()["weights"].sum())
        1000.0
    """
    if name is not None and (isinstance(obj, GlobalRef) or hasattr(type(obj), "__clamor_ref__")):
        raise TypeError(
            f"a {type(obj).__name__} is a variable already, which put would only wrap: give the "
            "name when it is made, as in clamor.HashMap.build(keys, values, name=...)"
        )
    named, level = name is not None, level_of(home, redundancy, copies, spill=spill)
    return with_current(
        lambda s: s.named(name, lambda: s.creator.put(obj, source, named=named, level=level))
    )


def zeros(
    shape: int | tuple[int, ...],
    dtype: Any = np.float64,
    *,
    capacity: int | None = None,
    name: str | None = None,
    home: ZerosHome | None = None,
    redundancy: LevelName | None = None,
    copies: int = 2,
    spill: bool = False,
) -> GlobalRef[Any]:
    """A global array of zeros. Nothing is allocated, whatever its size: memory is taken by what is
    written.

    Args:
        shape: length of each axis, a number or a tuple of them.
        dtype: of the elements, plain data: one that holds no Python objects.
        capacity: length of the first axis that `clamor.update(ref, grow_to=n)` may reach; room
            for it is reserved, not allocated.
        name: as `put`'s.
        home: "spread" homes parts of the array on all nodes in turn: what is written to a part
            takes memory of its home. "writers" homes each part on the node that first writes to
            it. None homes all of it on this node, or, where this node has no room for all of it
            and there are others, does as "spread".
        redundancy, copies: as `put`'s; not with home="writers".
        spill: as `put`'s: the disk gives room for all of it at once.

    Returns:
        A reference to an array of this shape and dtype, in C order.

    Raises:
        NotInitializedError: Before `clamor.init()`.
        NameTakenError: Another variable of the session has the name.
        ValueError: A dtype that holds Python objects, a negative dimension, or a capacity below
            the first one; or no such home or redundancy.
        NoSpaceError: It is to spill, and the disk has less room than it needs.
        TooFewNodesError: The redundancy needs more nodes than there are.

    Example:
        >>> w = clamor.zeros(10**9, np.float32)  # 4 GB of addresses, no memory
        >>> float(w.get()[123456])
        0.0
    """
    level = level_of(home, redundancy, copies, spill=spill, is_zeros=True)
    return with_current(
        lambda s: s.named(name, lambda: s.creator.zeros(shape, dtype, capacity, level))
    )


def share(
    object_ref: Any,
    *,
    name: str | None = None,
    timeout: float = 300.0,
    home: Home | None = None,
) -> GlobalRef[Any]:
    """Makes an existing Ray object page-accessible; serving it needs no copy of its buffers.

    The page server of a node that holds the object pins it and serves its blocks to other nodes
    from Ray's own store. Processes on that node read through a generation of their own, into which
    the blocks that they touch are copied. It stays pinned as long as there are references to the
    variable, whatever becomes of `object_ref`, or until `clamor.free`.

    Args:
        object_ref: a `ray.ObjectRef`. A small object, which Ray keeps with its owner, is put.
        name: as `put`'s.
        timeout: seconds for the object to be ready and pinned.
        home: None: the node whose store has the object. It cannot be "spread": nothing is copied.

    Returns:
        A reference to version 0 of a global variable with the object's content.

    Raises:
        NotInitializedError: Before `clamor.init()`.
        NameTakenError: Another variable of the session has the name.
        WaitTimeoutError: The object was not ready in time.
        TypeError: It is no `ray.ObjectRef`.
        ValueError: It is to be spread. `clamor.put(ray.get(object_ref), home="spread")`, best in a
            task on a node that has the object, copies it to all nodes.

    Example:
        >>> ref = clamor.share(ray.put(np.arange(10**5)))
        >>> int(ref.get()[4])
        4
    """
    if not isinstance(object_ref, ray.ObjectRef):
        raise TypeError(f"share takes a Ray ObjectRef, not {type(object_ref).__qualname__}")
    if home is not None:
        raise ValueError(
            f"share cannot have home={home!r}: it copies nothing, so all blocks are homed on the "
            "node whose store has the object. Use clamor.put(ray.get(object_ref), home='spread'), "
            "which copies it to all nodes; it takes least time in a task on a node that has it."
        )
    named = name is not None
    return with_current(
        lambda s: s.named(name, lambda: s.creator.share(object_ref, timeout, named=named))
    )


def from_file(
    path: str | os.PathLike[str],
    *,
    format: Format | None = None,
    dtype: Any = None,
    shape: int | tuple[int, ...] | None = None,
    offset_bytes: int = 0,
    storage_options: dict[str, Any] | None = None,
    name: str | None = None,
) -> GlobalRef[Any]:
    """A global variable that is a file: its blocks are read from there when they are touched.

    Only the file's metadata is read now. Each node reads the ranges that it needs by itself, and
    caches them as the blocks of any variable. The file is never written: what `clamor.update`
    changes is kept in memory, at the variable's home, and the rest still comes from the file.

    The file must stay as it is. A range of a file that was changed, replaced or deleted is an
    error, and never mixed with what was read before: each range of an object in S3 is bound to the
    object's ETag; of a local file the size, inode and times are looked at before and after.

    Args:
        path: a local path, or s3://bucket/key, maybe with ?region=...&endpoint_override=... A local
            file need not be on other nodes: what they need of it they get from this one.
        format: "npy": an array; "arrow": the table of an Arrow IPC file (Feather V2) that is not
            compressed; "raw": an array of plain bytes. None: by the suffix (.npy; .arrow, .feather,
            .ipc), else raw.
        dtype: of raw bytes. Of a `.npy` file it must be what the file says.
        shape: of raw bytes, in C order; None: one axis, up to the end of the file.
        offset_bytes: where raw bytes begin.
        storage_options: how S3 is reached, where the environment of the nodes (AWS_ACCESS_KEY_ID,
            AWS_REGION, ...) does not say it: access_key_id, secret_access_key, session_token,
            region, endpoint, as obstore names them. They go to every node, and are in no message.
            S3 needs the extra `clamor-ray[s3]`.
        name: as `put`'s.

    Returns:
        A reference to version 0: an array, or a `pyarrow.Table`.

    Raises:
        NotInitializedError: Before `clamor.init()`.
        NoSuchFileError, FileAccessError, FileReadError: It is not there, may not or cannot be read.
        FileFormatError: It is too short for its header, damaged or compressed, or of another dtype.
        NameTakenError: Another variable of the session has the name.
        ValueError: Nobody knows what is in it, or arguments that do not fit together.

    Safe from any thread.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "embeddings.npy")
        >>> np.save(path, np.arange(10**5))
        >>> ref = clamor.from_file(path)
        >>> int(ref.get()[4])
        4
    """
    said = {"format": format, "dtype": dtype, "shape": shape, "offset_bytes": offset_bytes}
    return with_current(
        lambda s: s.named(
            name, lambda: s.creator.from_file(path, storage_options=storage_options, **said)
        )
    )


def free(ref: GlobalRef[Any] | HashMap) -> None:
    """Frees a global variable, and its name. Processes that read it keep its memory until they are
    done.

    From now on `get` raises `FreedError`. Freeing it again changes nothing.

    Args:
        ref: any reference to it, or what holds one, as a `HashMap`; all others go with it.

    Raises:
        NotInitializedError: Before `clamor.init()`.
        SessionMismatchError: It belongs to another session.
        TypeError: It is neither.

    Example:
        >>> ref = clamor.put(np.arange(1000))
        >>> clamor.free(ref)
        >>> ref.get()
        Traceback (most recent call last):
        clamor_ray.errors.FreedError: ...
    """
    ref_of = getattr(type(ref), "__clamor_ref__", None)
    if ref_of is not None:
        ref = ref_of(ref)
    if not isinstance(ref, GlobalRef):
        raise TypeError(f"free takes a GlobalRef, not {type(ref).__qualname__}")
    ref.free()
