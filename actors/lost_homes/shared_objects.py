"""What the journal keeps of a Ray object that is served as a region: enough to hold it again.

A registry and a page server that die together cannot ask each other what was shared. So the journal
has the object's id and its owner's address, which are what Ray itself sends where a reference goes.
(Pickling the reference would do, but for one thing: Ray then pins the object for as long as the
process that pickled it lives.) A reference that is made from those is counted by the owner as any
other. The owner keeps the object meanwhile: the session that has shared it holds it
(``_session.create``).
"""

from __future__ import annotations

import errno
import hashlib
import pickle
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError, ObjectFetchTimedOutError

from clamor_ray import errors
from clamor_ray._objects.layout import BLOCK_BYTES, Pickled, Plan
from clamor_ray._protocol.messages import Pinned, RegionRecord
from clamor_ray._protocol.source import SHARED, Source

# Where an object cannot be had for one of these, it may be later.
SHORTAGES: Final = (
    MemoryError,
    GetTimeoutError,
    ObjectFetchTimedOutError,
    errors.DescriptorLimitError,
    errors.ServerUnavailableError,
    errors.WaitTimeoutError,
)
SHORTAGE_ERRNOS: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)


def is_in_place(offset: int, view: memoryview) -> bool:
    """Whether a piece is served from where it lies, and not from a copy."""
    return offset > 0 and view.nbytes >= BLOCK_BYTES


def digest_of(pickled: Pickled) -> bytes:
    """See ``Pinned``."""
    digest = hashlib.sha256(repr(pickled.plan).encode())
    for offset, view in pickled.pieces():
        if not is_in_place(offset, view):
            digest.update(view)
    return digest.digest()


def source_of(plan: Plan, digest: bytes, object_ref: Any) -> Source:
    """What is written down, before the region is sealed.

    Args:
        plan: What lies where in the region.
        digest: See ``Pinned``.
        object_ref: The object's.
    """
    worker = ray._private.worker.global_worker
    _, owner_address, object_status = worker.core_worker.serialize_object_ref(object_ref)
    what = (plan, object_ref.binary(), owner_address, object_status)
    return Source(SHARED, 0, digest, pickle.dumps(what, 5))


def pinned_of(record: RegionRecord, source: Source) -> tuple[Pinned, list[Any]]:
    """What ``source_of`` has made, and a list of one reference, which is this process's own.

    Args:
        record: The region's.
        source: Of the kind ``SHARED``.
    """
    plan, binary, owner_address, object_status = pickle.loads(source.what)
    worker = ray._private.worker.global_worker
    object_ref = ray.ObjectRef(binary, owner_address)
    worker.core_worker.deserialize_and_register_object_ref(
        binary, ray.ObjectRef.nil(), owner_address, object_status
    )
    return Pinned(record, plan, source.digest), [object_ref]


def is_shortage(failure: Exception) -> bool:
    """Whether what fails may succeed later, for want of memory, descriptors or time."""
    if isinstance(failure, OSError) and failure.errno in SHORTAGE_ERRNOS:
        return True
    return isinstance(failure, SHORTAGES)
