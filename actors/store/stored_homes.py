"""Homes in the directories of a store: of which page server they are, away or not. No Ray, no I/O.

A page server of a session with a store that is lost has lost nothing: its directory has it all. So
a region that was homed there is **away** until somebody registers with the directory, which is then
its home, in one more term; unless it has another home by then.

* A region of which others have no redundancy waits for that. Nothing is rebuilt, no block is said
  to be lost; what other nodes have cached is read there as ever.
* One that other pieces of its group can make again is rebuilt as in every session, and waits only
  where too many of them are away.

Thread safety: everything belongs to one asyncio loop.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from clamor_ray import errors
from clamor_ray._labels import capital
from clamor_ray._protocol.messages import (
    RegionRecord,
    ServerInfo,
    ServerLost,
    StoredRegion,
    StoreState,
)
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.lost_homes.lost_blocks import Losses
from clamor_ray.actors.lost_homes.unheard_homes import Waited
from clamor_ray.actors.registry.registry_core import RegistryCore

DAMAGED_HINT = (
    "The files are left as they are: look at them with clamor fsck when the store is not open. "
    "The store's other variables can be read and changed."
)
BACK_S = 60.0  # a page server takes so long at most to begin again, and redo what it has
AWAY_HINT = (
    "Nothing of it is lost. Start a node on which this directory is: from then on the variable can "
    "be read and changed as before."
)


class StoredHomes:
    """See the file's head.

    Args:
        core: Regions and servers.
        log: Versions.
        journal: Where a home is written first.
        losses: What is lost of which regions.
        unheard: Whose new home may not have heard that it is that.

    Attributes:
        when_back: Is told of each region that has its home again, and of that.
        when_damaged: Is told of each region whose home has no whole files of it, and of that.
    """

    def __init__(
        self,
        core: RegistryCore,
        log: CommitLog,
        journal: Journal,
        losses: Losses,
        unheard: Waited,
    ) -> None:
        self._core = core
        self._log = log
        self._journal = journal
        self._losses = losses
        self.unheard = unheard
        self._waited = Waited()
        self._given: dict[int, list[int]] = {}  # home -> regions that nobody was told of yet
        self._expected_s: dict[str, float] = {}  # directory -> since when
        self._damaged: dict[int, tuple[int, str]] = {}  # home, and why
        self.when_back: Callable[[int, int], object] = lambda region, home: None
        self.when_damaged: Callable[[int, int], object] = lambda region, home: None

    # -- page servers that start

    def state(self, server_id: int) -> StoreState:
        """What a page server that starts cold is home of, or will be when it registers. That is
        also what the page servers were home of that had its directory before.

        Raises:
            ServerUnavailableError: Which directory it has was not said to this registry: it has to
                begin again.
        """
        directory = self._core.lives.directory_of(server_id)
        if not directory:
            raise errors.ServerUnavailableError(
                f"The registry does not know which directory of the store {server_id:#x} has.",
                hint="It has been started again meanwhile: the page server has to begin again.",
            )
        return self.state_of(directory, server_id)

    def state_of(self, directory: str, home: int) -> StoreState:
        """What a directory has that a page server is to be home of.

        Args:
            directory: Its uuid.
            home: The server: the one that has it, or one that takes all of it over.
        """
        lives = self._core.lives.of_directory(directory)
        regions = (region for each in sorted(lives) for region in self._core.homed_at(each))
        found = tuple(self._stored(region, home) for region in sorted(regions))
        return StoreState(found, self._core.next_region)

    def _stored(self, region: int, home: int) -> StoredRegion:
        record = self._core.record_of(region)
        assert record is not None
        commits = self._log.published(region, self._log.horizon(region))
        return StoredRegion(self._newest(_at(record, home)), tuple(commits))

    def _newest(self, record: RegionRecord) -> RegionRecord:
        region = record.region
        return replace(record, version=self._log.newest(region), loss=self._losses.number(region))

    def returned(self, info: ServerInfo) -> None:
        """A page server registers: what was homed in its directory before is homed at it. No await
        from here to ``server_here``: nobody sees the one without the other.

        Raises:
            JournalFullError: It may be home of some of that. It can be called again.
        """
        if not info.directory:
            return
        former = self._core.lives.of_directory(info.directory) - {info.server_id}
        self.give(
            (region for each in sorted(former) for region in self._core.homed_at(each)),
            info.server_id,
        )

    def give(self, regions: Iterable[int], home: int) -> None:
        """These regions are homed at a page server, which has all of them, from now on.

        Raises:
            JournalFullError: See ``returned``.
        """
        for region in regions:
            record = self._core.record_of(region)
            if record is None or set(self._core.homes_of(region)) in ({home}, set()):
                continue
            new = _at(record, home)
            self._journal.rehome(new, self._log.newest(region), self._losses.of(region))
            self._core.rehome(region, home)
            self._log.rehome(region, home)
            self._given.setdefault(home, []).append(region)

    def given_to(self, home: int) -> list[int]:
        """What a page server has been given since this was asked last."""
        return self._given.pop(home, [])

    def server_here(self, server_id: int) -> None:
        """It is registered: who waits for what it is home of again goes on."""
        for region in self.given_to(server_id):
            self.is_back(region, server_id)

    def is_back(self, region: int, home: int) -> None:
        """Its home serves it, unless it has another one by now: who waits for it goes on."""
        if home in self._core.homes_of(region):
            self.when_back(region, home)
        self._waited.discard(region)

    def record_at(self, region: int, home: int) -> RegionRecord | None:
        """Of its newest version, where it is homed there, and can be looked up."""
        record = self._core.record_of(region)
        if record is None or home not in self._core.homes_of(region):
            return None
        return self._newest(record)

    def are_damaged(self, home: int, regions: Mapping[int, str]) -> None:
        """The files that a page server has of these regions, which are homed there, are missing or
        not as they were written.

        Args:
            home: The server, which is about to register.
            regions: All that there are, and what is wrong.
        """
        for region in [each for each, (at, _) in self._damaged.items() if at == home]:
            del self._damaged[region]
        for region, why in regions.items():
            self._damaged[region] = home, why
            self.when_damaged(region, home)

    def has_nothing(self, region: int, home: int) -> bool:
        """A home that lives says that it does not have the region.

        Returns:
            Whether that is all there is to it: the files may be there, so nothing is made again.
        """
        if not self._core.lives.directory_of(home) or self._core.others_of(region):
            return False
        self._damaged[region] = home, "its page server does not have it; its log may say why"
        return True

    def _damage(self, region: int) -> str:
        home, why = self._damaged.get(region, (0, ""))
        return why if home in self._core.homes_of(region) else ""

    # -- regions that are away

    def why(self, region: int) -> str:
        """Where a region is that no page server has now, or what has become of its files; "" where
        that is not so."""
        if damage := self._damage(region):
            return f"{capital(self._log.label(region))} cannot be opened: {damage.rstrip('.')}"
        for home in self._core.homes_of(region):
            directory = self._core.lives.directory_of(home)
            if not directory or not isinstance(lost := self._core.locate(home), ServerLost):
                continue
            if self._is_here(directory):
                continue  # without the region: it had another home when the directory came
            return (
                f"{capital(self._log.label(region))} is in the directory node-{directory} of the "
                f"store, and its page server is gone ({lost.reason})"
            )
        return ""

    def _is_here(self, directory: str) -> bool:
        lives = self._core.lives.of_directory(directory)
        return any(self._core.node_of(each) is not None for each in lives)

    def error(self, region: int) -> errors.HomeLostError | None:
        """For who needs a region that is away, and that nothing makes again; None: it is not so."""
        if self._core.others_of(region) or not (why := self.why(region)):
            return None
        hint = DAMAGED_HINT if self._damage(region) else AWAY_HINT
        return errors.HomeLostError(f"{why}.", hint=hint)

    def expect(self, server_id: int) -> None:
        """A page server that is about to be lost begins again at once, with the same directory: who
        needs what is there waits for that."""
        if directory := self._core.lives.directory_of(server_id):
            self._expected_s[directory] = asyncio.get_running_loop().time()

    def _is_expected(self, region: int) -> bool:
        now_s = asyncio.get_running_loop().time()
        directories = map(self._core.lives.directory_of, self._core.homes_of(region))
        return any(now_s - self._expected_s.get(each, -math.inf) < BACK_S for each in directories)

    async def until_back(self, region: int, timeout_s: float) -> None:
        """Waits for a region that is away; not at all where there is no time for that, or where
        its files are damaged.

        Raises:
            HomeLostError: It is still away, nobody is about to bring it, and nothing makes it
                again.
        """
        if timeout_s <= 0 or (away := self.error(region)) is None:
            return
        if self._damage(region):  # nobody brings it back
            raise away
        self._waited.add(region)
        await self._waited.until_over(region, timeout_s)
        if (away := self.error(region)) is not None and not self._is_expected(region):
            raise away

    def forget(self, region: int) -> None:
        """It is gone."""
        self._waited.discard(region)
        self._damaged.pop(region, None)


def _at(record: RegionRecord, home: int) -> RegionRecord:
    """As it is once it is homed there."""
    if set(record.homes) == {home}:
        return record
    return replace(record, homes=(home,) * len(record.homes), term=record.term + 1)
