"""`clamor.prefetch`: from objects to runs of blocks to one request per mapping."""

from __future__ import annotations

import copy
import time
import weakref
from typing import Any

import numpy as np

from clamor_ray._native.client import BLOCK_SHIFT, Mapping, Runs
from clamor_ray._objects.ranges import Spans, object_spans
from clamor_ray._read import opener
from clamor_ray._read.lease import LeaseTable
from clamor_ray._read.ref import GlobalRef
from clamor_ray._spans.record import span


def split_by_mapping(spans: Spans, table: LeaseTable) -> dict[Mapping, Runs]:
    """Absolute runs of blocks -> runs relative to the mapping that each lies in.

    What lies in no mapping is left out; a run that leaves its mapping is cut at its end.
    """
    parts: dict[Mapping, list[Runs]] = {}
    rest = spans
    while len(rest):
        address = int(rest[0, 0]) << BLOCK_SHIFT
        mapping = table.find(address)
        if mapping is None:
            # Neighbours of one object are rarely all outside: step one run at a time.
            rest = rest[1:]
            continue
        first = mapping.address >> BLOCK_SHIFT
        end = first + (mapping.length_bytes >> BLOCK_SHIFT)
        inside = int(np.searchsorted(rest[:, 0], end))
        runs = rest[:inside].copy()
        runs[:, 0] -= np.uint64(first)
        runs[-1, 1] = min(int(runs[-1, 1]), end - first - int(runs[-1, 0]))
        parts.setdefault(mapping, []).append(runs)
        rest = rest[inside:]
    return {mapping: np.concatenate(found) for mapping, found in parts.items()}


def _flatten(target: Any) -> tuple[list[GlobalRef[Any]], Any]:
    """Separates references from objects, one level deep."""
    if isinstance(target, GlobalRef):
        return [target], None
    if type(target) in (list, tuple) and any(isinstance(item, GlobalRef) for item in target):
        refs = [item for item in target if isinstance(item, GlobalRef)]
        return refs, [item for item in target if not isinstance(item, GlobalRef)]
    return [], target


def prefetch(target: Any, *, wait: bool = True, timeout: float | None = None) -> None:
    """Makes memory resident on this node, in as few round trips as the number of blocks allows.

    Also the cure for `OSError: Bad address`, which a system call (`write`, `send`, `tofile`)
    gives on absent blocks where the trap in force is "uffd-user" or "sigsegv".

    Args:
        target: a `GlobalRef` (all of it), or an object or a view that came from one: arrays
            (of a strided view like `a[::1000]` only the blocks that its elements lie on), Arrow
            and pandas data, sparse matrices, anything that holds those, and lists of them.
        wait: return when the blocks are here; otherwise when the request is taken.
        timeout: seconds to wait; CLAMOR_FAULT_TIMEOUT_S where it is None.

    Raises:
        ValueError: Nothing of it is part of a global variable, e.g. because it is a copy.
        PrefetchTimeoutError: Not all blocks came in time; those that came stay.
        HomeLostError: The node that held them is gone.

    Safe from any thread.

    Example:
        >>> ref = clamor.put(np.arange(10**6))
        >>> rows = ref.get()[::1000]
        >>> clamor.prefetch(rows)
        >>> int(rows.sum())
        499500000
    """
    refs, rest = _flatten(target)
    session = opener.current(refs[0]._scope if refs else None)  # without one, this says so
    timeout_s = session.config.patience_s if timeout is None else timeout
    deadline = time.monotonic() + timeout_s

    def left_s() -> float:
        return max(0.0, deadline - time.monotonic())

    for ref in refs:
        ref._check_not_freed()
        if ref._inline:
            continue
        session = opener.current(ref._scope)
        # The lease keeps a snapshot, which is the reference itself where that is frozen.
        lease = session.open(copy.copy(ref))
        everything = np.array([[0, ref._length_bytes >> BLOCK_SHIFT]], np.uint64)
        with span(session.scope, "prefetch", region=ref._region), session.explaining(ref._region):
            lease.prefetch(everything, wait=wait, timeout_s=left_s())
        if not wait:
            weakref.finalize(ref, lease.close).atexit = False  # until then it must not be dropped
    if rest is None or (refs and not rest):
        return
    spans = object_spans(rest)
    parts = [
        (session, mapping, runs)
        for session in opener.sessions()
        for mapping, runs in split_by_mapping(spans, session.leases).items()
    ]
    if not parts and (len(spans) or not _is_empty(rest)):
        raise ValueError(
            f"{_describe(rest)} is not part of a global variable: pass what GlobalRef.get() "
            "returned, or a view of it. Fancy indexing and arithmetic make copies."
        )
    for session, mapping, runs in parts:
        region = session.region_at(mapping.address)
        with span(session.scope, "prefetch", region=region), session.explaining(region):
            session.client.prefetch(mapping.id, runs, wait=wait, timeout_s=left_s())


def _is_empty(target: Any) -> bool:
    """Whether there is nothing to fetch, rather than nothing of ours."""
    if isinstance(target, np.ndarray):
        return target.size == 0
    try:
        return len(target) == 0
    except TypeError:
        return False


def _describe(target: Any) -> str:
    cls = type(target)
    return f"This {cls.__module__}.{cls.__qualname__}".replace("builtins.", "")
