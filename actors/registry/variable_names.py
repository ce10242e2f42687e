"""Names of variables: each names one, which lives until it is freed.

A name is given once: the first who gives it has it, until it is dropped or its variable is freed.
What stands behind a name is the reference as its maker packed it, which the registry does not read.
"""

from __future__ import annotations

from collections.abc import Iterable

from clamor_ray import errors
from clamor_ray._labels import capital, label
from clamor_ray._protocol.messages import (
    INLINE_BASE,
    Latest,
    NamedVariable,
    ServerInfo,
    VariableRecord,
)
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.registry.registry_core import RegionState, RegistryCore


class VariableNames:
    """See the file's head. Each change is in the journal before it counts.

    Args:
        core: Knows the regions.
        log: Their versions.
        journal: Where names are written.
    """

    def __init__(self, core: RegistryCore, log: CommitLog, journal: Journal) -> None:
        self._core = core
        self._log = log
        self._journal = journal
        self._named: dict[str, NamedVariable] = {}
        self._names: dict[int, set[str]] = {}  # by region

    def take_back(self, saved: Iterable[NamedVariable]) -> None:
        """What the journal holds."""
        for named in saved:
            self._note(named)

    def give(self, name: str, region: int, packed: bytes) -> None:
        """Names a variable. Giving it the same name again changes nothing.

        Args:
            name: See ``names.check_name``.
            region: Its id, or that of an inline variable.
            packed: A reference to it (``GlobalRef._packed``).

        Raises:
            NameTakenError: Another variable has the name.
            FreedError: There is no such variable.
            JournalFullError: It has no name.
        """
        known = self._named.get(name)
        if known is not None:
            if known.region == region:
                return
            raise errors.NameTakenError(f"There is a variable named {name!r} already.")
        if not self._lives(region):
            raise errors.FreedError(f"{capital(label(region))} was freed, or is not sealed.")
        named = NamedVariable(name, region, packed)
        self._journal.give_name(named)
        self._note(named)

    def find(self, name: str) -> tuple[bytes, Latest] | None:
        """The reference behind a name, and the variable's newest version; None: no such name."""
        named = self._named.get(name)
        return None if named is None else (named.packed, self._log.latest(named.region))

    def drop(self, name: str) -> None:
        """The name is free again; its variable stays. Dropping what is not there changes nothing.

        Raises:
            JournalFullError: The name stays.
        """
        if (named := self._named.get(name)) is not None:
            self._journal.drop_name(name)
            self._forget(named)

    def region_freed(self, region: int) -> None:
        """A variable is freed: its names go. The journal lost them when that was written."""
        for name in list(self._names.get(region, ())):
            self._forget(self._named[name])

    def has_name(self, region: int) -> bool:
        """Whether it has one: then it stays, whoever refers to it."""
        return region in self._names

    def label(self, region: int) -> str:
        """The variable for people: by the first of its names, where it has one."""
        record = self._core.record_of(region)
        if record is not None and record.piece_of:
            what = "parity piece" if record.is_parity else "piece"
            return f"{what} {region - record.piece_of} of {self.label(record.piece_of)}"
        return label(region, min(self._names.get(region, ()), default=None))

    def by_region(self) -> dict[int, str]:
        """The first name of each variable that has one."""
        return {region: min(names) for region, names in self._names.items()}

    def variables(self) -> list[VariableRecord]:
        """All variables that can be opened and that the registry knows: regions, by id, then inline
        ones that have a name."""
        regions = (record for record in self._core.ready_regions() if not record.piece_of)
        inline = sorted(region for region in self._names if region >= INLINE_BASE)
        return [
            *(self._record(record.region, record.length_bytes) for record in regions),
            *(self._record(region, 0) for region in inline),
        ]

    def _record(self, region: int, length_bytes: int) -> VariableRecord:
        regions = self._core.pieces_of(region) or (region,)
        servers = dict.fromkeys(home for each in regions for home in self._core.homes_of(each))
        homes = map(self._core.locate, servers)
        nodes = dict.fromkeys(home.node_id for home in homes if isinstance(home, ServerInfo))
        names = tuple(sorted(self._names.get(region, ())))
        return VariableRecord(
            region=region,
            length_bytes=length_bytes,
            nodes=tuple(nodes),
            names=names,
            latest=self._log.latest(region),
            packed=self._named[names[0]].packed if names else None,
        )

    def _lives(self, region: int) -> bool:
        if region >= INLINE_BASE:
            return not self._log.is_freed(region)
        return self._core.state(region) is RegionState.READY

    def _note(self, named: NamedVariable) -> None:
        self._named[named.name] = named
        self._names.setdefault(named.region, set()).add(named.name)

    def _forget(self, named: NamedVariable) -> None:
        del self._named[named.name]
        names = self._names[named.region]
        names.discard(named.name)
        if not names:
            del self._names[named.region]
