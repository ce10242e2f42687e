"""The registry of a session with a store: its journal is in the store and outlives the cluster.

Where what is:

* In the store: the journal, and the lock that says that this process has it open. They are never
  removed from here.
* In the session's directory, as ever: what goes with the cluster (lineage, tries, locks, reserve),
  and ``MARK``. That says that the store has been opened for this session: without it the journal is
  what an earlier session has left, and this is a **new opening**; with it a registry has been
  killed and started again, as in every session.

A store that cannot be opened is no reason to end: Ray would tell the driver no more than that the
actor is dead. So this one stays for ``REFUSING_S``, and ``report`` says why; who has made it ends
it sooner.

The class has a ``__repr__`` of its own: see ``process.starting``.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import ray

from clamor_ray import errors
from clamor_ray._protocol import names
from clamor_ray._protocol.messages import (
    STORED_IDS,
    ServerConfig,
    ServerInfo,
    SessionReport,
    StoreState,
)
from clamor_ray._protocol.ray_state import actor_names, alive_nodes
from clamor_ray._store.directories import RegistryDirectory, open_registry
from clamor_ray.actors.commits.durable_journal import DurableJournal
from clamor_ray.actors.commits.journal import ANY_REGION, Journal, Saved
from clamor_ray.actors.process import journals
from clamor_ray.actors.registry.liveness import ServerLoss
from clamor_ray.actors.registry.regions import AddressRoom
from clamor_ray.actors.registry.registry import Registry
from clamor_ray.actors.registry.registry_core import RegionState
from clamor_ray.actors.registry.servers import START_SERVER_S
from clamor_ray.actors.store.directories import StoreDirectories
from clamor_ray.actors.store.durable_calls import durable
from clamor_ray.actors.store.opening import open_again
from clamor_ray.actors.window.address_claims import REGION_IDS, Claim, Range

MARK: Final = "store-open"
REFUSING_S: Final = 30.0
KEPT_BYTES_S: Final = 256 << 20  # what a home that moves has at least of its bytes on the disk
DYING_S: Final = 20.0  # that the process before this one may take to be gone
CLOSING_S: Final = 5.0  # the same, of an earlier session
LOOK_S: Final = 0.1
FIRST_IDS: Final = range(STORED_IDS // REGION_IDS, 10**9)  # of stores, times `REGION_IDS`


@durable
class StoreRegistry(Registry):
    """See the file's head."""

    KEEPS = True

    def __init__(self, config: ServerConfig, secret: bytes, avoid: Sequence[Range] = ()) -> None:
        self._refusal: errors.ClamorError | None = None
        self._store_directory: RegistryDirectory | None = None
        try:
            super().__init__(config, secret, avoid)
        except errors.ClamorError as refusal:
            if self._is_restart(journals.journal_directory(config.job_scope)):
                raise
            self._refusal = refusal
            self._let_go()
            _end_after(REFUSING_S)

    def __repr__(self) -> str:
        return f"StoreRegistry({self._config.job_scope})"

    def _mark(self) -> str:
        """Of this session, also where an earlier one in this cluster had the same store."""
        return f"{self._config.began_at_s!r}\n"

    def _is_restart(self, directory: Path) -> bool:
        try:
            return (directory / MARK).read_text() == self._mark()
        except FileNotFoundError:
            return False

    def _check_is_new(self, directory: Path) -> None:
        pass  # what an earlier opening gave out is in the journal

    def _open_journal(self, directory: Path) -> Journal:
        is_restart = self._is_restart(directory)
        self._store_directory = self._open_directory(DYING_S if is_restart else CLOSING_S)
        if not is_restart:  # an earlier session with this store was killed
            shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(mode=0o700, exist_ok=True)
        return DurableJournal(self._store_directory.path)

    def _open_directory(self, wait_s: float) -> RegistryDirectory:
        """The registry's directory in the store, which nobody else has open from now on."""
        config = self._config
        deadline = time.monotonic() + wait_s
        while True:
            try:
                found = open_registry(
                    Path(config.store), store_id=config.store_id, scope=config.job_scope
                )
            except errors.StoreInUseError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(LOOK_S)
                continue
            if found.description.scope == config.job_scope:
                return found
            found.close()
            raise errors.StoreIncompleteError(
                f"{found.path} is of the session {found.description.scope} now, and of "
                f"{config.job_scope} when it was looked at.",
                hint="Open it again.",
            )

    def _address_room(self) -> AddressRoom:
        def first_id(claim: Claim) -> int:
            return secrets.choice(FIRST_IDS) * REGION_IDS + 1

        return AddressRoom(self._core, self._claims, self._journal.claim, first_id)

    def _inside_of(self, anchors: Iterable[bytes]) -> Iterable[int]:
        """Where one of them is of nothing that can be looked up, anything may be inside: what was
        taken out of a variable that was freed has the anchors of that."""
        regions = self._counts.regions_of(anchors)
        if regions is None or any(
            self._core.state(region) is not RegionState.READY for region in regions
        ):
            return (ANY_REGION,)
        return regions

    def _start(self, directory: Path, avoid: Sequence[Range], is_restart: bool) -> None:
        super()._start(directory, avoid, is_restart)
        directories = self._directories = StoreDirectories(
            *(self._core, self._stored_homes, self._homes),
            lose=self._lose,
            start_all=self._start_all,
            start_new=self._start_new,
            is_starting=self._servers.is_starting,
            is_leaving=self._drains.is_leaving,
        )
        self._moves.kept_bytes_s = KEPT_BYTES_S
        self._liveness.when_lost.insert(0, self._is_expected)
        self._liveness.when_lost.append(lambda loss: directories.server_lost())
        directories.open()

    def _is_expected(self, loss: ServerLoss) -> None:
        if loss.is_there:
            self._stored_homes.expect(loss.server_id)

    def _lose(self, server_id: int, reason: str) -> None:
        self._liveness.lose(server_id, reason)
        self._late.save_changed()

    async def _start_all(self) -> None:
        alive = await asyncio.to_thread(alive_nodes)
        await self._servers.ensure_at(alive.difference(self._announced.announced), START_SERVER_S)

    async def _start_new(self) -> None:
        await self._servers.start_spares(self._announced.announced, self._drains.is_leaving)

    def _take_back(self, saved: Saved) -> None:
        if not self._is_restart(self._directory):
            self._claims.claim_exactly(saved.claims, _label)
            saved = self._opening(saved)
        self._opened_at = dict(saved.opened)
        super()._take_back(saved)
        (self._directory / MARK).write_text(self._mark())

    def _home_begins(self, server_id: int) -> None:
        """A page server begins anew from what its directory has: a cold start, at which it drops
        what nobody has decided. To be called before it is told what was, without an await
        between."""
        self._commits.home_begins(server_id)
        self._regions.home_begins(server_id)

    async def register_server(self, info: ServerInfo) -> ServerInfo:
        """See ``PageServers.register``."""
        registered = await super().register_server(info)  # which does not wait
        self._commits.home_is(info.server_id, info.process)
        return registered

    def _opening(self, saved: Saved) -> Saved:
        """A new opening of the store: what goes on of what the journal holds, which is written
        before it counts."""
        return open_again(self._journal, saved)

    def _let_go(self) -> None:
        """Another process may open the store from now on."""
        if (journal := getattr(self, "_journal", None)) is not None:
            journal.close()
        if self._store_directory is not None:
            self._store_directory.close()

    async def report(self) -> SessionReport:
        """See ``Registry.report``.

        Raises:
            What the store cannot be opened for.
        """
        if self._refusal is not None:
            raise self._refusal
        return await super().report()

    async def store_state(self, server_id: int) -> StoreState:
        """See ``StoredHomes.state``."""
        self._home_begins(server_id)
        return self._stored_homes.state(server_id)

    async def store_damaged(self, server_id: int, regions: dict[int, str]) -> None:
        """See ``StoredHomes.are_damaged``."""
        self._stored_homes.are_damaged(server_id, regions)

    async def opened_at(self, region: int) -> int:
        """The version that a region had when the store was opened: of those before it nothing is
        kept."""
        return self._opened_at.get(region, 0)

    async def shutdown(self) -> None:
        """See ``Registry.shutdown``. The store stays, and may be opened again."""
        if self._refusal is None:
            await self._directories.close()
            await super().shutdown()
        self._let_go()


def _end_after(seconds: float) -> None:
    """This actor ends then, and Ray does not start it again."""
    own = ray.get_runtime_context().current_actor
    timer = threading.Timer(seconds, ray.kill, (own,))
    timer.daemon = True
    timer.start()


def _label(scope: str) -> str:
    found = names.names_of_sessions(actor_names(), scope)
    return f"session {found[0]!r}" if found else f"session {scope}"
