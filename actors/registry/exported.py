"""In: the registry's numbers. Out: the session's metrics, each second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from clamor_ray._protocol.messages import ServerConfig
from clamor_ray._protocol.metrics import SESSION_METRICS
from clamor_ray.actors.process.metrics_export import INTERVAL_S, Exporter

SLOW_S = 10.0  # between two looks at each variable


async def export(
    config: ServerConfig,
    quick: Callable[[], Mapping[str, float]],
    slow: Callable[[], Mapping[str, float]],
) -> None:
    """Exports until it is cancelled.

    Args:
        config: of the session.
        quick: what costs nothing.
        slow: what looks at each variable: asked for every `SLOW_S`.
    """
    if not config.has_metrics:
        return
    exporter = Exporter(SESSION_METRICS, {"session": config.session_name or config.job_scope})
    loop = asyncio.get_running_loop()
    looked_s, found = 0.0, slow()
    while True:
        if loop.time() - looked_s >= SLOW_S:
            found, looked_s = slow(), loop.time()
        exporter.tick({**found, **quick()})
        await asyncio.sleep(INTERVAL_S)
