"""A process that Ray did not start: a child of `multiprocessing` ("spawn"), a worker of joblib.

It reads what it is given references of, by the page server of its node. That is found by the scope
in the reference and the node's id, which the process that started it has left in the environment.
What the registry is needed for it cannot do.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any, NoReturn

from clamor_ray import errors
from clamor_ray._counting.anchors import Anchors
from clamor_ray._native.pieced_client import PiecedClient
from clamor_ray._protocol import names
from clamor_ray._protocol.config import Config
from clamor_ray._protocol.registry_client import RegistryClient
from clamor_ray._read import indexing
from clamor_ray._read.lease import Lease, LeaseTable
from clamor_ray._read.ref import GlobalRef
from clamor_ray._session.begin.announced import announced
from clamor_ray._session.kept_layers import KeptLayers
from clamor_ray._session.news import ProcessNews
from clamor_ray._session.session import Session
from clamor_ray._tasks.task_ends import TaskEnds

_HINT = (
    "Do it in the process that started this one, or in a Ray task, and pass references: this one "
    "reads them. To make it a driver of its own call clamor.init() here."
)


class SpawnedSession(Session):
    """The session of a reference, as far as its page server gives it. See the file's head.

    Args:
        scope: of the reference.
        node_id: Ray's hex id of this node.
        sockets_below: as `names.server_socket` takes it.
    """

    of_job = False  # nothing is made here

    def __init__(self, scope: str, node_id: str, sockets_below: str) -> None:
        indexing.install()
        self.scope = scope
        self.rpc = RegistryClient(self._call_registry)
        self._sockets_below = sockets_below
        self.node_id = node_id
        self.config = Config.from_env()
        self.owner = False
        self.leases = LeaseTable()
        self.task_ends = TaskEnds()
        self._ended: dict[int, weakref.ref[Lease]] = {}
        self._freed = {}
        self._client = None
        self._client_lock = threading.Lock()
        self._pid = os.getpid()
        self.creator = self._make_creator()
        self.news = ProcessNews(self)
        self.kept_layers = KeptLayers(self)

    @property
    def is_here(self) -> bool:
        return True

    def _has_ended(self) -> bool:
        return self.was_told

    def _call_registry(self, method: str, *args: object, timeout_s: float | None = None) -> Any:
        self.refuse()

    def anchors_of(self, ref: GlobalRef[Any]) -> Anchors:
        return ()  # Ray does not know this process: who started it keeps the variable

    def refuse(self) -> NoReturn:
        raise errors.NotInitializedError(
            "This process was not started by Ray: it only reads the global variables whose "
            "references it was given.",
            hint=_HINT,
        )

    def _have_served(self, client: PiecedClient) -> None:
        """Nobody is asked for another page server: it waits for one."""

    def _connect(self) -> PiecedClient:
        try:
            return PiecedClient(
                names.server_socket(self.scope, self.node_id, self._sockets_below),
                trap=self.config.trap,
                connect_timeout_s=self.config.connect_timeout_s,
                reattach_timeout_s=self.config.reattach_s,
            )
        except (errors.ServerUnavailableError, errors.WaitTimeoutError) as error:
            raise errors.SessionMismatchError(
                f"This process was not started by Ray, and no page server of session {self.scope} "
                f"answers on its node: {error.message}",
                hint="The session has ended, or the reference is of another node or cluster. Pass "
                "a new reference, or the data itself.",
            ) from error


def session_of(scope: str | None, current: Session | None) -> SpawnedSession:
    """The session of a reference, in a process without Ray.

    Args:
        scope: of the reference; None where something is to be made.
        current: what this process is attached to.

    Raises:
        NotInitializedError: It cannot be had here.
    """
    if isinstance(current, SpawnedSession) and scope is None:
        current.refuse()
    where = announced()
    if scope is None or where is None:
        raise errors.NotInitializedError(
            "There is no clamor session in this process.",
            hint="Call clamor.init() first. A process that Ray did not start reads references by "
            "itself where the one that started it had called clamor.init() before.",
        )
    return SpawnedSession(scope, *where)
