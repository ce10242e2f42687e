"""The registry of a session with a store: its journal is in the store and outlives the cluster.

Where what is:

* In the store: the journal. It is never removed from here.
* In the session's directory, as ever: what goes with the cluster (lineage, tries, locks, reserve),
  and ``MARK``. That says that the store has been opened in this cluster: without it the journal is
  what another cluster has left, and this is a **new opening**; with it a registry has been killed
  and started again, as in every session.

The class has a ``__repr__`` of its own: see ``process.starting``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from clamor_ray.actors.commits.durable_journal import DurableJournal
from clamor_ray.actors.commits.journal import Journal, Saved
from clamor_ray.actors.registry.registry import Registry
from clamor_ray.actors.store.durable_calls import durable

MARK: Final = "store-open"
REGISTRY: Final = "registry"  # its directory in the session's store


@durable
class StoreRegistry(Registry):
    """See the file's head."""

    KEEPS = True

    def __repr__(self) -> str:
        return f"StoreRegistry({self._config.job_scope})"

    def _is_restart(self, directory: Path) -> bool:
        return (directory / MARK).exists()

    def _open_journal(self, directory: Path) -> Journal:
        directory.mkdir(mode=0o700, exist_ok=True)
        return DurableJournal(Path(self._config.store) / REGISTRY)

    def _take_back(self, saved: Saved) -> None:
        if not self._is_restart(self._directory):
            saved = self._opening(saved)
        super()._take_back(saved)
        (self._directory / MARK).touch(mode=0o600)

    def _home_begins(self, server_id: int) -> None:
        """A page server begins anew from what its directory has: a cold start, at which it drops
        what nobody has decided. To be called before it is told what was, without an await
        between."""
        self._commits.home_begins(server_id)
        self._regions.home_begins(server_id)

    def _opening(self, saved: Saved) -> Saved:
        """A new opening of the store: what goes on of what the journal holds, which is written
        before it counts."""
        return saved
