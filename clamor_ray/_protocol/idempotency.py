"""Idempotency keys: by which the n-th transaction of a task is committed once. Pure: no Ray, no
I/O.

A task may be run several times, at once or one after the other: a copy of one that is slow, what
Ray runs again. Each of its transactions then also writes its idempotency key, a variable that every
attempt expects at version 0. The second attempt to commit gets a conflict on the key, whatever else
it read and wrote, and takes over the first one's outcome. (VOLUME, section II-C: the status code
*s* that backup executions share.)

The key is named by the task, the variables that the transaction is over, and its number among the
attempt's transactions over the same variables. Threads that commit different variables get other
names; a conflict that the task catches changes the numbers of the same variables only.

The key is kept as an inline variable that no program has a reference of. Its id is a function of
the name; its content says which commit was made. A transaction that wrote nothing writes its key
too: another attempt of it may write something.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from clamor_ray._protocol.messages import INLINE_BASE, Write

TOKEN_BYTES: Final = 16
VARIABLES_BYTES: Final = 16
_CONTENT: Final = struct.Struct("<8s16s16sQQ")
_MAGIC: Final = b"clamor:1"


def digest_of(variables: Iterable[int]) -> bytes:
    """16 bytes that name a set of variables, given by their ids in any order.

    Example:
        >>> digest_of([3, 5]) == digest_of([5, 3]) != digest_of([3])
        True
    """
    ids = sorted(set(variables))
    packed = struct.pack(f"<{len(ids)}Q", *ids)
    return hashlib.blake2b(packed, digest_size=VARIABLES_BYTES, person=b"clamor set").digest()


class Name(NamedTuple):
    """Names one transaction of a task, the same in each of its attempts.

    Args:
        token: names the task, 16 bytes.
        variables: `digest_of` those that the transaction is over.
        n: how many transactions over just these the attempt committed before.
    """

    token: bytes
    variables: bytes
    n: int

    @property
    def key_region(self) -> int:
        """Id of the variable that the idempotency key is kept in.

        Example:
            >>> first, second = (Name(bytes(16), digest_of([3]), n) for n in (0, 1))
            >>> first.key_region != second.key_region
            True
        """
        packed = self.token + self.variables + struct.pack("<Q", self.n)
        digest = hashlib.blake2b(packed, digest_size=8, person=b"clamor once")
        return INLINE_BASE | (int.from_bytes(digest.digest(), "little") & (INLINE_BASE - 1))


class IdempotencyKey(NamedTuple):
    """What is written to the variable of the key.

    Args:
        name: of the transaction.
        commit_id: the commit that was made.
    """

    name: Name
    commit_id: int

    @property
    def region(self) -> int:
        """Id of the variable that the key is kept in."""
        return self.name.key_region

    @property
    def token(self) -> bytes:
        """Names the task, 16 bytes."""
        return self.name.token

    def write(self) -> Write:
        """Part of the commit. To be its first write, so that no other is compared before it."""
        payload = _CONTENT.pack(_MAGIC, *self.name, self.commit_id)
        return Write(
            region=self.region,
            base_version=0,
            n_blocks=0,
            blocks=b"",
            layer_bytes=0,
            staged_at=0,
            plan=None,
            payload=payload,
        )


def key_kept_in(region: int, payload: bytes | None) -> IdempotencyKey | None:
    """The key that this variable's content says, or None where it is any other variable."""
    if region < INLINE_BASE or payload is None or len(payload) != _CONTENT.size:
        return None
    magic, token, variables, n, commit_id = _CONTENT.unpack(payload)
    key = IdempotencyKey(Name(token, variables, n), commit_id)
    return key if magic == _MAGIC and key.region == region else None
