"""What is said of one attempt of a task: to the lineage registry, and in place of its result."""

from __future__ import annotations

from typing import Final, NamedTuple

from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._protocol.rpc import pack, unpack

RECORD_COST_BYTES: Final = 700  # of a record beside its texts and read sets
READ_COST_BYTES: Final = 150
PLAIN_RUN: Final = 0  # the run id of tasks that belong to no collection

Snapshot = tuple[int, int]
Read = tuple[int, int, bytes | None]


class AttemptRecord(NamedTuple):
    """One attempt of one task, said when it is over.

    Args:
        token: 16 bytes that name the task: the same for all of its attempts.
        run_id: The id under which its collection was opened; 0: a task of no collection.
        stage: Name of the stage.
        partition: Its number in the stage.
        attempt: Counts the attempts of the partition, copies too.
        function: What it runs, for people.
        inputs: What the partition is made of, for people.
        snapshots: (region, version) of each variable that it was given.
        reads: (region, version, blocks) of what it touched: a serialized ``BitMap``; None: all
            of it, or an inline variable.
        node_id: Ray's hex id of the node where it ran.
        pid: Of its process.
        start_ns, end_ns: Wall clock.
        outcome: "done", "failed: ..." or "cancelled".
        rows: Items that it made.
        output_digest: 16 bytes of what it made, where that is checked.
        predictor_digest: Names tasks that are likely to touch the same (``read_predictor.Key``);
            None: nothing is fetched ahead for those like it.
    """

    token: bytes
    run_id: int
    stage: str
    partition: int
    attempt: int
    function: str
    inputs: str = ""
    snapshots: tuple[Snapshot, ...] = ()
    reads: tuple[Read, ...] = ()
    node_id: str = ""
    pid: int = 0
    start_ns: int = 0
    end_ns: int = 0
    outcome: str = "done"
    rows: int = 0
    output_digest: bytes | None = None
    predictor_digest: bytes | None = None

    def packed(self) -> bytes:
        """As ``Registry.note_attempt`` takes it."""
        snapshots = tuple((region, version) for region, version in self.snapshots)
        reads = tuple((region, version, blocks) for region, version, blocks in self.reads)
        return pack(*self._replace(snapshots=snapshots, reads=reads))

    @classmethod
    def of(cls, packed: bytes) -> AttemptRecord:
        """What ``packed`` gave."""
        return cls(*unpack(packed))

    @property
    def cost_bytes(self) -> int:
        """About what it costs to keep."""
        texts = len(self.stage) + len(self.function) + len(self.inputs) + len(self.outcome)
        sets = sum(READ_COST_BYTES + len(blocks or b"") for _, _, blocks in self.reads)
        return RECORD_COST_BYTES + texts + sets + READ_COST_BYTES * len(self.snapshots)

    @property
    def sets(self) -> dict[int, bytes]:
        """The blocks that are known of each region, of all its versions together."""
        found: dict[int, bytes] = {}
        for region, _, blocks in self.reads:
            if blocks is None:
                continue
            if region in found:
                both = BitMap.deserialize(found[region]) | BitMap.deserialize(blocks)
                found[region] = bytes(both.serialize())
            else:
                found[region] = blocks
        return found


class Failure(NamedTuple):
    """Why there is no result; a task that reads the result gets this instead."""

    error: errors.ClamorError
