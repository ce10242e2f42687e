"""In: the engine's counters. Out: the node's metrics, each second, and spans of what waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from clamor_ray._protocol.messages import ServerConfig
from clamor_ray._protocol.metrics import NODE_METRICS
from clamor_ray.actors.page_server import node_spans
from clamor_ray.actors.process.metrics_export import Export, start


class _Engine(Protocol):
    def stats(self) -> Mapping[str, int]: ...
    def region_stats(self) -> list[dict[str, int]]: ...
    def process_waits(self) -> list[dict[str, int]]: ...


def export(
    engine: _Engine, cache_bytes: int, node_id: str, config: ServerConfig
) -> Callable[[], None]:
    """Exports until what it returns is called. Raises nothing: a server starts without metrics.

    Args:
        engine: whose counters.
        cache_bytes: its budget of cached blocks.
        node_id: Ray's.
        config: of the session.
    """
    end_spans = node_spans.start(engine, config)
    if not config.has_metrics:
        return end_spans
    tags = {"node": node_id, "session": config.session_name or config.job_scope}
    budget = {"cache_budget_bytes": cache_bytes}
    end_metrics = start(Export(NODE_METRICS, tags, lambda: {**budget, **engine.stats()}))

    def end() -> None:
        end_metrics()
        end_spans()

    return end
