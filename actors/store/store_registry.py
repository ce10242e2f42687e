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
from clamor_ray._protocol.messages import STORED_IDS, ServerConfig, SessionReport
from clamor_ray._protocol.ray_state import actor_names
from clamor_ray._store.directories import RegistryDirectory, open_registry
from clamor_ray.actors.commits.journal import ANY_REGION, Journal, Saved
from clamor_ray.actors.process import journals
from clamor_ray.actors.registry.regions import AddressRoom
from clamor_ray.actors.registry.registry import Registry
from clamor_ray.actors.registry.registry_core import RegionState
from clamor_ray.actors.store.opening import open_again
from clamor_ray.actors.window.address_claims import REGION_IDS, Claim, Range

MARK: Final = "store-open"
REFUSING_S: Final = 30.0
DYING_S: Final = 20.0  # that the process before this one may take to be gone
CLOSING_S: Final = 5.0  # the same, of an earlier session
LOOK_S: Final = 0.1
FIRST_IDS: Final = range(STORED_IDS // REGION_IDS, 10**9)  # of stores, times `REGION_IDS`


class StoreRegistry(Registry):
    """See the file's head."""

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
        return Journal(self._store_directory.path)

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

    def _take_back(self, saved: Saved) -> None:
        if not self._is_restart(self._directory):
            self._claims.claim_exactly(saved.claims, _label)
            saved = self._opening(saved)
        self._opened_at = dict(saved.opened)
        super()._take_back(saved)
        (self._directory / MARK).write_text(self._mark())

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
