"""The metrics that a session exports, in one table: exporters, dashboard and rules come from it.

Ray puts `ray_` before each name, and `_total` behind a counter's: `ray_clamor_faults_total`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from clamor_ray._native.base import BLOCK_BYTES


@dataclass(frozen=True)
class Metric:
    """One metric.

    Args:
        name: without Ray's additions.
        kind: a counter grows, from 0 at each start of its process; a gauge is what is now.
        help: a sentence for people.
        sources: the numbers that are added up, by name: of a page server, `clamor.stats()`'s.
        scale: what the sum is multiplied by.
    """

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    sources: tuple[str, ...]
    scale: float = 1.0

    @property
    def exported(self) -> str:
        """Its name in Prometheus.

        Example:
            >>> Metric("clamor_faults", "counter", "", ("faults",)).exported
            'ray_clamor_faults_total'
        """
        return f"ray_{self.name}" + ("_total" if self.kind == "counter" else "")


def _counter(name: str, help: str, *sources: str, scale: float = 1.0) -> Metric:
    return Metric(name=f"clamor_{name}", kind="counter", help=help, sources=sources, scale=scale)


def _blocks(name: str, help: str, *sources: str) -> Metric:
    return _counter(name, help, *sources, scale=float(BLOCK_BYTES))


def _gauge(name: str, help: str, *sources: str) -> Metric:
    return Metric(name=f"clamor_{name}", kind="gauge", help=help, sources=sources)


NODE_METRICS: Final = (
    _counter("faults", "Touches of absent blocks.", "faults"),
    _counter("faults_failed", "Faults that ended with an error.", "faults_failed"),
    _counter(
        "fault_wait_seconds", "What faults have waited, together.", "fault_wait_ns", scale=1e-9
    ),
    _counter("received_bytes", "Received over the network.", "bytes_received"),
    _counter("sent_bytes", "Sent over the network.", "bytes_sent"),
    _blocks("fetched_bytes", "Blocks that came from other nodes.", "blocks_fetched"),
    _blocks(
        "peer_fetched_bytes", "Of these, from nodes that are not their home.", "peer_blocks_fetched"
    ),
    _blocks("disk_read_bytes", "Blocks from disk or files.", "disk_cache_reads", "file_blocks"),
    _blocks("evicted_bytes", "Cached blocks that were evicted.", "evicted_blocks"),
    _blocks("refetched_bytes", "Blocks fetched soon after their eviction.", "refetched_blocks"),
    _blocks("degraded_bytes", "Blocks that others made: a home was late.", "degraded_blocks"),
    _counter("fetch_retries", "Requests for blocks that were sent again.", "fetch_retries"),
    _counter("fetch_failures", "Requests for blocks that failed.", "fetch_failed"),
    _counter("opens", "Variables that processes have opened.", "opens"),
    _counter("history_expired_blocks", "Blocks of old versions let go.", "history_expired"),
    _counter("damaged_blocks", "Blocks of a store without their checksum.", "damaged_blocks"),
    _gauge("home_bytes", "Memory of variables that are homed on the node.", "home_bytes"),
    _gauge("disk_bytes", "Files of variables that are homed on the node's disk.", "disk_bytes"),
    _gauge("cached_bytes", "Cached blocks.", "cached_bytes"),
    _gauge("cache_budget_bytes", "What they may take.", "cache_budget_bytes"),
    _gauge("history_bytes", "Old versions, in memory.", "history_bytes"),
    _gauge("history_disk_bytes", "Old versions, on disk.", "history_disk_bytes"),
    _gauge("layer_bytes", "Commits that are not applied yet.", "layer_bytes"),
    _gauge("faults_waiting", "Faults that wait now.", "faults_waiting"),
    _gauge("processes", "Processes of the node that use variables.", "clients"),
)

SESSION_METRICS: Final = (
    _counter("commits", "Commits that were made.", "commits"),
    _counter("commit_conflicts", "Commits that another was before.", "commit_conflicts"),
    _gauge("variables", "Variables.", "variables"),
    _gauge("lost_variables", "Variables that are lost, or lack blocks.", "lost_variables"),
    _gauge("degraded_pieces", "Pieces that would not survive one more node.", "degraded_pieces"),
    _gauge("page_servers", "Page servers that serve.", "page_servers"),
)
