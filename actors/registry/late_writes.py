"""What need not be in the journal before it is answered: written at once, or later until it is.

States of regions that follow from others, and where page servers are. After a restart without
them the same questions are asked again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from clamor_ray import errors
from clamor_ray._protocol.messages import ServerInfo, ServerLost
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.process.background import BackgroundTasks
from clamor_ray.actors.registry.registry_core import RegionState, RegistryCore

logger = logging.getLogger("clamor_ray.registry")

SAVE_AGAIN_S = 1.0
SAVE_AGAIN_MOST_S: Final = 30.0


class LateWrites:
    """See the file's head.

    Args:
        core: Says which regions have changed.
        journal: Takes it.
        background: Where it is tried again.
    """

    def __init__(self, core: RegistryCore, journal: Journal, background: BackgroundTasks) -> None:
        self._core = core
        self._journal = journal
        self._background = background
        self._states: dict[int, str | None] = {}
        self._servers: dict[int, ServerInfo | ServerLost] = {}
        self._is_saving = False
        self.when_gone: list[Callable[[int], object]] = []  # are told of a region that is no more

    @property
    def is_done(self) -> bool:
        """All of it is in the journal."""
        return not self._states and not self._servers

    def note_server(self, server_id: int, server: ServerInfo | ServerLost) -> None:
        """What ``save_changed`` writes of a page server."""
        self._servers[server_id] = server

    def save_changed(self) -> None:
        """Writes what has changed; what cannot be written now is written later."""
        for region, state in self._core.take_changed():
            is_gone = state is RegionState.GONE
            self._states[region] = None if is_gone else state.value
            if is_gone:
                for tell in self.when_gone:
                    tell(region)
        if not self.save_now() and not self._is_saving:
            self._is_saving = True
            self._background.spawn(self._save_later())

    def save_now(self) -> bool:
        """Whether all of it could be written."""
        try:
            if self._states:
                self._journal.set_states(list(self._states.items()))
                self._states.clear()
            for server_id, server in list(self._servers.items()):
                if isinstance(server, ServerLost):
                    self._journal.lose_server(server)
                else:
                    self._journal.save_server(server)
                del self._servers[server_id]
            return True
        except errors.JournalFullError as failure:
            logger.warning("%s", failure)
            return False

    async def _save_later(self) -> None:
        try:
            pause_s = SAVE_AGAIN_S
            while not self._background.is_closed:
                await asyncio.sleep(pause_s)
                if self.save_now():
                    return
                pause_s = min(pause_s * 2, SAVE_AGAIN_MOST_S)
        finally:
            self._is_saving = False
