"""The application: replicas that answer look-ups from a variable of a named session.

POST /lookup    ids -> their rows, all of one version
POST /control   ids -> as many rows that are no variable's: what HTTP and Serve cost by themselves
GET  /about     what the table is, and which replica says so
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from typing import Any, Final, get_type_hints

import numpy as np
import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

import clamor_ray as clamor
from clamor_ray import errors

from .bodies import BYTES_TYPE, MOST_IDS, Answer, BadRequest, decode_ids, encode_answer
from .followed import Followed
from .table import Int64
from .updates import open_table

PATIENCE: Final = (errors.ServerUnavailableError, errors.WaitTimeoutError)
MOST_ONGOING: Final = 64  # requests of a replica at a time


@dataclasses.dataclass(frozen=True)
class AppOptions:
    """What the application's `args` may hold, in Serve's config files and on its command line.

    Args:
        session: its name. Where there is none, a replica makes it.
        table: the variable's name in it.
        n_rows: of the table, where a replica has to make it. 0: there is a session with a table,
            and a replica that finds none fails.
        dim: columns of such a table.
        n_replicas: of the deployment.
        most_per_node: replicas of a node; 0 for as many as there is room for.
        num_cpus: that a replica asks Ray for.
        node_id: Ray's, of the node that all replicas are on; none for wherever Ray puts them.
        release: any text. Another one replaces all replicas, one after the other.
    """

    session: str = "embeddings"
    table: str = "table"
    n_rows: int = 100_000
    dim: int = 64
    n_replicas: int = 2
    most_per_node: int = 0
    num_cpus: float = 0.5
    node_id: str = ""
    release: str = "1"

    @property
    def shape(self) -> tuple[int, int] | None:
        """Of the table, where a replica may make it."""
        return (self.n_rows, self.dim) if self.n_rows else None


def options_of(args: dict[str, Any]) -> AppOptions:
    """Options by their names; texts are read as numbers where numbers are wanted.

    Raises:
        ValueError: There is no such option, or it is no such number.
    """
    fields: dict[str, Any] = get_type_hints(AppOptions)
    unknown = sorted(set(args) - set(fields))
    if unknown:
        raise ValueError(f"no such options: {', '.join(unknown)}; there are {', '.join(fields)}")
    options = AppOptions(**{name: fields[name](value) for name, value in args.items()})
    if options.n_rows < 0 or options.dim < 1 or options.n_replicas < 1:
        raise ValueError("dim and n_replicas are at least 1, n_rows at least 0")
    return options


def application(options: AppOptions, replica: Any = None) -> Any:
    """What `serve.run` takes.

    Args:
        replica: the class of the replicas, with other rows behind it; None for `Embeddings`.
    """
    per_node = {"max_replicas_per_node": options.most_per_node} if options.most_per_node else {}
    on_node = {"label_selector": {"ray.io/node-id": options.node_id}} if options.node_id else {}
    deployment = serve.deployment(
        name="embeddings",
        num_replicas=options.n_replicas,
        max_ongoing_requests=MOST_ONGOING,
        health_check_period_s=2,
        logging_config={"enable_access_log": False},  # a line for each look-up
        ray_actor_options={"num_cpus": options.num_cpus, **on_node},
        **per_node,
    )
    return deployment(replica or Embeddings).bind(options)


class Service:
    """A replica but for its rows: HTTP in, HTTP out."""

    def __init__(self, options: AppOptions) -> None:
        self._options = options
        self._control = np.full((MOST_IDS, options.dim), 0.5, np.float32)
        self._replica = serve.get_replica_context().replica_id.unique_id

    async def rows(self, ids: Int64) -> Answer:
        """The rows with these ids.

        Raises:
            IndexError: There is no such row.
        """
        raise NotImplementedError

    def shape(self) -> tuple[int, int]:
        """Rows and columns of the table."""
        raise NotImplementedError

    def newest(self) -> tuple[int, int]:
        """The update and the version that the next look-up reads."""
        raise NotImplementedError

    async def __call__(self, request: Request) -> Response:
        what = request.url.path.rpartition("/")[2]
        if what == "about":
            return JSONResponse(self._about())
        if what not in ("lookup", "control"):
            text = f"there is no {request.url.path}: POST to /lookup or /control, GET /about"
            return JSONResponse({"error": text}, 404)
        content_type = request.headers.get("content-type", BYTES_TYPE)
        try:
            ids = decode_ids(await request.body(), content_type)
            answer = await self.rows(ids) if what == "lookup" else self._constant(len(ids))
        except (BadRequest, IndexError) as error:
            return JSONResponse({"error": str(error)}, 400)
        except PATIENCE as error:
            return JSONResponse({"error": str(error)}, 503, {"retry-after": "1"})
        return Response(encode_answer(answer, content_type), media_type=content_type)

    def _constant(self, n: int) -> Answer:
        return Answer(0, 0, self._control[:n])

    def _about(self) -> dict[str, Any]:
        (n_rows, dim), (update, version) = self.shape(), self.newest()
        return {
            "n_rows": n_rows,
            "dim": dim,
            "update": update,
            "version": version,
            "release": self._options.release,
            "replica": self._replica,
            "node_id": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
        }


class Embeddings(Service):
    """A replica whose rows are a global variable's."""

    async def __init__(self, options: AppOptions) -> None:  # type: ignore[misc]  # Serve awaits it
        super().__init__(options)
        # It may wait for a page server to start; Serve asks meanwhile how the replica is.
        await asyncio.to_thread(open_table, options.session, options.table, options.shape)
        self._followed = await Followed.begin(options.table)

    async def rows(self, ids: Int64) -> Answer:
        now = self._followed.now
        return Answer(now.update, now.version, await clamor.aio.gather(now.rows, ids))

    def shape(self) -> tuple[int, int]:
        n_rows, dim = self._followed.now.rows.shape
        return n_rows, dim

    def newest(self) -> tuple[int, int]:
        return self._followed.now.update, self._followed.now.version

    def check_health(self) -> None:
        """Serve's question. Where it raises, Serve starts another replica, which attaches anew."""
        if self._followed.failure is not None:
            raise self._followed.failure
