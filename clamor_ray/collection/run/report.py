"""What a task says to the lineage registry. Only a check that is wanted fails a task here."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import ray

from clamor_ray import errors
from clamor_ray._protocol.attempt_record import AttemptRecord
from clamor_ray._protocol.rpc import pack
from clamor_ray._session import process_sessions
from clamor_ray._session.session import Session
from clamor_ray._tasks.predicted_reads import PredictedReads
from clamor_ray._tasks.read_predictor import Hinted, Key
from clamor_ray.collection.data import blocks
from clamor_ray.collection.plan.stages import Program
from clamor_ray.collection.plan.task_messages import Meta, TaskSpec

logger = logging.getLogger("clamor_ray")


def node_id() -> str:
    """Ray's hex id of this node."""
    return str(ray.get_runtime_context().get_node_id())


def digest_of(outs: Sequence[Any]) -> bytes:
    """16 bytes that are the same where the results are."""
    hasher = hashlib.blake2b(digest_size=16)
    for out in outs:
        hasher.update(
            blocks.digest(out)
            if isinstance(out, (np.ndarray, pa.Table, blocks.Columns))
            else _pickled(out)
        )
    return hasher.digest()


def _pickled(out: Any) -> bytes:
    return hashlib.blake2b(pack(out), digest_size=16).digest()


def check(spec: TaskSpec, digest: bytes) -> None:
    """Compares a result with that of an earlier attempt at the same.

    Raises:
        NondeterministicError: They differ.
    """
    session = process_sessions.current(spec.scope)
    earlier = session.rpc.check_output(pack(spec.token, digest))
    if earlier is not None and earlier != digest:
        raise errors.NondeterministicError(
            f"Attempt {spec.attempt} returned something else than one before it."
        )


def fetch_ahead(spec: TaskSpec) -> list[Any]:
    """Has the blocks fetched, in one batch, that a task like this one has read; waits for none.

    Returns:
        Leases that keep them in use until the task is over.
    """
    refs = [ref for ref in spec.snapshots if not ref._inline]
    if spec.predictor_key is None or not refs:
        return []
    digest, again = spec.predictor_key
    predicted = PredictedReads(Hinted(refs[0], Key(digest, True), again), refs)
    if not predicted.asked:
        return []
    session = process_sessions.current(spec.scope)
    leases = [session.open(ref, stream=False) for ref in dict.fromkeys(refs)]
    predicted.fetch(leases)
    return leases


def _record(spec: TaskSpec, program: Program, **what: Any) -> AttemptRecord:
    """An attempt's record: what it was told, and what became of it."""
    return AttemptRecord(
        token=spec.token,
        run_id=spec.run_id,
        stage=spec.stage,
        partition=spec.partition,
        attempt=spec.attempt,
        function=", ".join(captured.name for captured, _ in program.functions),
        inputs="; ".join(spec.inputs),
        snapshots=tuple((ref._region, ref.version) for ref in spec.snapshots),
        **what,
    )


_Records = queue.SimpleQueue[tuple[Session, AttemptRecord]]


class _Teller:
    """Tells the registry of attempts on a thread of its own, so that no task's end waits for it."""

    def __init__(self) -> None:
        self._records: _Records = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pid = 0

    def tell(self, session: Session, record: AttemptRecord) -> None:
        """Does not wait."""
        with self._lock:
            if self._pid != os.getpid():  # the first, or this is a fork: threads stayed behind
                self._pid = os.getpid()
                self._records = queue.SimpleQueue()
                threading.Thread(
                    target=self._run, args=(self._records,), name="clamor-tell", daemon=True
                ).start()
            self._records.put((session, record))

    @staticmethod
    def _run(records: _Records) -> None:
        while True:
            session, record = records.get()
            # After its end there is no registry, and a call would have Ray start a cluster.
            if session not in process_sessions.sessions() or not ray.is_initialized():
                continue
            try:
                session.registry.note_attempt.remote(record.packed())
            except Exception:  # any: of Ray's; the next one may go
                logger.warning("an attempt could not be told to the registry", exc_info=True)


_teller = _Teller()


def _tell(spec: TaskSpec, record: AttemptRecord) -> None:
    with contextlib.suppress(errors.ClamorError):  # the session has ended, and the registry with it
        _teller.tell(process_sessions.current(spec.scope), record)


def ended(spec: TaskSpec, node: str | None, program: Program, outcome: str) -> None:
    """Tells the registry of an attempt that cannot say itself what became of it; said by the
    driver.

    Args:
        outcome: "cancelled" (a rival was first, or the stage failed), or "lost: ..." and why.
    """
    now_ns = time.time_ns()
    when = {"start_ns": now_ns, "end_ns": now_ns}
    _tell(spec, _record(spec, program, node_id=node or "", outcome=outcome, **when))


def note(spec: TaskSpec, meta: Meta, program: Program) -> None:
    """Tells the registry of an attempt, and does not wait."""
    outcome = "done" if meta.failure is None else f"failed: {meta.failure.error.message[:200]}"
    record = _record(
        spec,
        program,
        reads=meta.reads,
        node_id=meta.node_id,
        pid=os.getpid(),
        start_ns=meta.start_ns,
        end_ns=meta.end_ns,
        outcome=outcome,
        rows=meta.n_items,
        output_digest=meta.digest,
        predictor_digest=spec.predictor_key[0] if spec.predictor_key else None,
    )
    _tell(spec, record)
