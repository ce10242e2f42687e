"""The same service with other rows behind it: in a Redis server, or in a Ray actor.

HTTP, the replicas and the bodies are `clamor_ray.workloads.serving`'s: only where a replica gets
its rows from is different.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from bench.peers import redis as _redis
from clamor_ray.workloads.serving import table
from clamor_ray.workloads.serving.bodies import Answer
from clamor_ray.workloads.serving.deployment import AppOptions, Service
from clamor_ray.workloads.serving.table import Int64, Rows

HOLDER = "serve_load_rows"  # the actor's name
NAMESPACE = "bench"


@dataclasses.dataclass(frozen=True)
class RedisOptions(AppOptions):
    """`AppOptions`, and where the server is.

    Args:
        redis_port: on this machine.
    """

    redis_port: int = 6379


class _PeerService(Service):
    """Of a table that nobody updates."""

    def shape(self) -> tuple[int, int]:
        return self._options.n_rows, self._options.dim

    def newest(self) -> tuple[int, int]:
        return 0, 0


class RedisService(_PeerService):
    """One MGET for each request, by Redis' own client for coroutines."""

    def __init__(self, options: RedisOptions) -> None:
        import redis.asyncio

        super().__init__(options)
        self._client = redis.asyncio.Redis(host="127.0.0.1", port=options.redis_port)

    async def rows(self, ids: Int64) -> Answer:
        values = await self._client.mget(_redis.keys_of(ids))
        rows = np.frombuffer(b"".join(values), np.float32).reshape(len(ids), -1)
        return Answer(0, 0, rows)


class Holder:
    """An actor that has the table as a private array."""

    def __init__(self, n_rows: int, dim: int) -> None:
        self.table = np.empty((n_rows, dim), np.float32)
        table.fill(self.table, 0)

    def ready(self) -> int:
        return len(self.table)

    def rows(self, ids: Int64) -> Rows:
        found: Rows = self.table[ids]
        return found


class ActorService(_PeerService):
    """One call of the actor for each request."""

    def __init__(self, options: AppOptions) -> None:
        import ray

        super().__init__(options)
        self._holder: Any = ray.get_actor(HOLDER, namespace=NAMESPACE)

    async def rows(self, ids: Int64) -> Answer:
        return Answer(0, 0, await self._holder.rows.remote(ids))


def load_redis(client: Any, n_rows: int, dim: int) -> None:
    """Sets all rows of a table before its first update."""
    for first in range(0, n_rows, 10_000):
        ids = np.arange(first, min(first + 10_000, n_rows))
        _redis.load(client, ids, table.rows_at(ids, 0, dim))
