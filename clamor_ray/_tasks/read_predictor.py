"""Replayed read sets: what a task is likely to touch, from what it touched the last time.

The caller names each call by what it is likely to have in common with its like in the next stage:
the function, and those arguments that are plain values. When such a name comes again, whoever runs
the call asks the registry for the blocks that its like touched, and has those fetched that the node
does not hold, in one batch, while the function starts. (REAP, Ustiugov et al., ASPLOS 2021: record
what was touched, prefetch it: that removes nearly all faults.)

A wrong guess costs network, never a wrong byte: see `actors/registry/read_sets.py` for what is not
guessed. Nothing here imports Ray.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from pyroaring import BitMap

from clamor_ray._native.base import BLOCK_BYTES, Runs
from clamor_ray._read.ref import GlobalRef

MOST_SET_BYTES: Final = 1 << 20  # of one serialized read set; a larger one is no use as a batch
MOST_KEYS: Final = 1 << 17  # that a caller remembers
CACHE_SHARE: Final = 4  # at most this part of a node's cache is fetched ahead for one call


class Key(NamedTuple):
    """Names calls that are likely to touch the same.

    Args:
        digest: of function and plain arguments, 16 bytes.
        sure: nothing was left out of it, or the user vouches for it: one call before this one is
            reason enough. Otherwise two must have been alike.
    """

    digest: bytes
    sure: bool


class Hinted(NamedTuple):
    """Travels in the place of a call's first reference, and is that reference to the function.

    Args:
        ref: the argument.
        key: names the call.
        again: a call of this name was submitted before.
    """

    ref: GlobalRef[Any]
    key: Key
    again: bool


# ------------------------------------------------------------------ names of calls


def _feed(hasher: Any, value: Any) -> bool:
    """Whether the value is plain, and part of the name now."""
    if isinstance(value, GlobalRef):
        text = f"{value._scope}/{value._region}".encode()
        hasher.update(b"r%d:" % len(text) + text)
        return True
    cls = type(value)
    if value is None or cls is bool or cls is int:
        hasher.update(b"%s;" % repr(value).encode())
    elif cls is float:
        hasher.update(b"f" + struct.pack("<d", value))
    elif cls is str or cls is bytes:
        raw = value.encode("utf-8", "surrogatepass") if cls is str else value
        hasher.update(b"%s%d:" % (cls.__name__.encode(), len(raw)) + raw)
    elif cls is tuple:
        hasher.update(b"(%d" % len(value))
        sure = [_feed(hasher, item) for item in value]
        return all(sure)
    else:
        hasher.update(b"?")
        return False
    return True


def key_of(
    name: str, args: Sequence[Any], kwargs: Mapping[str, Any], *, sure: bool | None = None
) -> Key:
    """Names a call.

    Args:
        name: of the function.
        args, kwargs: of the call. Of anything that is no number, text, bytes, bool, None, tuple
            of those or reference, only its place counts; of a reference, the variable.
        sure: whether the name is sure; None: where nothing was left out.

    Example:
        >>> key_of("f", (1,), {}) == key_of("f", (1,), {})
        True
    """
    hasher = hashlib.blake2b(digest_size=16)
    whole = _feed(hasher, name)
    for value in args:
        whole &= _feed(hasher, value)
    for keyword in sorted(kwargs):
        hasher.update(b"=")
        _feed(hasher, keyword)
        whole &= _feed(hasher, kwargs[keyword])
    return Key(hasher.digest(), whole if sure is None else sure)


class Submitted:
    """The names of the calls that this process has made. Safe from any thread: it has no lock."""

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._seen: dict[bytes, None] = {}
        self._most_keys = most_keys

    def again(self, key: Key) -> bool:
        """Whether a call of this name was made before; from now on one was."""
        if key.digest in self._seen:
            return True
        if len(self._seen) >= self._most_keys:
            self._seen = {}  # what follows is not looked up once, and then known again
        self._seen[key.digest] = None
        return False


submitted: Final = Submitted()


def hint(
    args: Sequence[Any], kwargs: Mapping[str, Any], make_key: Callable[[], Key]
) -> tuple[list[Any], dict[str, Any]]:
    """The arguments, with the name of the call at its first reference that is not inline."""
    found: list[Any] = list(args)
    named = dict(kwargs)
    for places, index in [
        *((found, i) for i in range(len(found))),
        *((named, keyword) for keyword in named),
    ]:
        value = places[index]  # type: ignore[index]
        if isinstance(value, GlobalRef) and not value._inline:
            key = make_key()
            places[index] = Hinted(value, key, submitted.again(key))  # type: ignore[index]
            break
    return found, named


class Hinting:
    """Ray's hook around the submission of a task (`__ray_invocation_decorator__`).

    Args:
        name: of the function, or what the user calls it.
        sure: as `key_of`'s.
    """

    def __init__(self, name: str, sure: bool | None) -> None:
        self.name = name
        self.sure = sure

    def __call__(self, submit: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
        def submit_hinted(args: Any, kwargs: Any) -> Any:
            args, kwargs = args or (), kwargs or {}
            return submit(
                *hint(args, kwargs, lambda: key_of(self.name, args, kwargs, sure=self.sure))
            )

        return submit_hinted


def hinting_of(function: Any, replay: str | bool | None) -> Hinting | None:
    """What `clamor.remote(replay=...)` asks for; None: nothing.

    All lambdas of a module have one name: two calls must have been alike.
    """
    if replay is False:
        return None
    if isinstance(replay, str):
        return Hinting(replay, True)
    own = getattr(function, "__qualname__", None)
    if own is None:  # an object with a __call__: nothing tells it from its like
        return None
    name = f"{getattr(function, '__module__', '')}.{own}"
    if replay is True:
        return Hinting(name, True)
    return Hinting(name, False if name.endswith("<lambda>") else None)


# ------------------------------------------------------------------ read sets


def encode(runs: Runs) -> bytes | None:
    """A read set as a serialized BitMap; None where it is empty or too large to keep."""
    if len(runs) == 0:
        return None
    alone = runs[:, 1] == 1
    blocks = BitMap(runs[alone, 0].astype(np.uint32))
    for first, n_blocks in runs[~alone].tolist():
        blocks.add_range(first, first + n_blocks)
    blocks.run_optimize()
    packed = bytes(blocks.serialize())
    return packed if len(packed) <= MOST_SET_BYTES else None


def runs_to_fetch(packed: bytes, length_bytes: int, cache_bytes: int) -> Runs:
    """What is fetched ahead of a recorded set.

    Args:
        packed: as `encode` gave it, maybe of another version.
        length_bytes: of the region now.
        cache_bytes: budget of this node: a quarter of it is the most that one call fetches ahead.

    Returns:
        Sorted, disjoint runs.
    """
    blocks = np.array(BitMap.deserialize(packed).to_array(), np.int64)
    blocks = blocks[blocks < length_bytes // BLOCK_BYTES]
    blocks = blocks[: max(1, cache_bytes // CACHE_SHARE // BLOCK_BYTES)]
    if len(blocks) == 0:
        return np.empty((0, 2), np.uint64)
    starts = np.flatnonzero(np.concatenate(([True], np.diff(blocks) != 1)))
    lengths = np.diff(np.append(starts, len(blocks)))
    return np.stack([blocks[starts], lengths], axis=1).astype(np.uint64)
