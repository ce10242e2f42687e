"""Asks all page servers at once what they did; one that does not answer is no reason to wait."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from ray.exceptions import RayError

from clamor_ray._protocol.cause import cause_of
from clamor_ray._protocol.messages import ServerInfo, ServerReport
from clamor_ray.actors.registry.ray_nodes import within


async def reports_of(
    servers: Sequence[ServerInfo], handles: Mapping[int, Any], timeout_s: float
) -> tuple[ServerReport, ...]:
    """The counters of page servers, in their order.

    Args:
        servers: Which.
        handles: Their actors, by id.
        timeout_s: For all of them; a server without an answer says why in ``error``.
    """

    async def ask(info: ServerInfo) -> ServerReport:
        handle = handles.get(info.server_id)
        if handle is None:
            return ServerReport(info, error="it is gone, or not here yet")
        try:
            report: ServerReport = await within(timeout_s, handle.stats.remote())
            return report
        except (RayError, asyncio.TimeoutError) as failure:
            return ServerReport(info, error=cause_of(failure))

    return tuple(await asyncio.gather(*(ask(info) for info in servers)))


async def histograms_of(
    servers: Sequence[ServerInfo],
    handles: Mapping[int, Any],
    question: tuple[int, int, int],
    timeout_s: float,
) -> dict[str, list[int]]:
    """What ``PageServer.histogram`` answers, by node id; without those that know nothing.

    Args:
        servers, handles, timeout_s: As ``reports_of``'s.
        question: Its arguments.
    """

    async def ask(info: ServerInfo) -> list[int]:
        try:
            handle = handles[info.server_id]
            counts: list[int] = await within(timeout_s, handle.histogram.remote(*question))
            return counts
        except (RayError, asyncio.TimeoutError, KeyError):
            return []

    found = await asyncio.gather(*(ask(info) for info in servers))
    return {info.node_id: counts for info, counts in zip(servers, found, strict=True) if counts}
