"""In: the registry's numbers. Out: the session's metrics, each second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from clamor_ray._protocol.messages import ServerConfig
from clamor_ray._protocol.metrics import SESSION_METRICS
from clamor_ray.actors.process.metrics_export import INTERVAL_S, Export


async def export(
    config: ServerConfig,
    quick: Callable[[], Mapping[str, float]],
    slow: Callable[[], Mapping[str, float]],
) -> None:
    """Exports until it is cancelled.

    Args:
        config: of the session.
        quick: what costs nothing.
        slow: what looks at each variable: asked for as seldom as it is slow.
    """
    if not config.has_metrics:
        return
    tags = {"session": config.session_name or config.job_scope}
    exports = Export(SESSION_METRICS, tags, slow)
    while True:
        exports.tick(quick())
        await asyncio.sleep(INTERVAL_S)
