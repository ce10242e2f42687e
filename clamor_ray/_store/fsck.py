"""Checks a store's files, and mends what other page servers' directories have, too.

Nobody else has it open. What the registry knows comes as `Stored`, one for each region with a home;
`clamor_ray/cli/fsck.py` reads it from the journal. A block that has not its checksum is made again
from the other pieces of its group, and written only if it has the checksum then.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from clamor_ray import errors
from clamor_ray._native.base import BLOCK_BYTES
from clamor_ray._native.checksums import block_sums
from clamor_ray._native.parity import xor_into
from clamor_ray._protocol.cause import cause_of
from clamor_ray._store import disk
from clamor_ray._store.bases import bases_of, settle
from clamor_ray._store.committed import LayerVersions
from clamor_ray._store.layer_files import DELTA, Layer, Runs, runs_of, scan_layers
from clamor_ray._store.layout import LayerName, base_path, sums_path
from clamor_ray._store.redo import redo
from clamor_ray._store.sums import SumsFile, wrong_blocks

_MOST_SAID: Final = 8


class Stored(NamedTuple):
    """A region that the registry knows, and that has a home.

    Args:
        region: its id.
        label: what its variable is called.
        newest: version of it that was committed.
        commits: versions by the ids of their commits.
        directory: id of the directory that has it; "": nobody wrote that down.
        others: regions whose XOR is this one, block by block; none: there is no redundancy.
    """

    region: int
    label: str
    newest: int
    commits: Mapping[int, int]
    directory: str = ""
    others: tuple[int, ...] = ()


class Problem(NamedTuple):
    """Something that is wrong.

    Args:
        text: a sentence.
        is_mended: it was wrong.
    """

    text: str
    is_mended: bool = False


@dataclass
class Report:
    """What was found.

    Args:
        problems: in the order that they were found.
        notes: what is no damage: layers that were never committed, and the like.
        n_regions, n_layers, n_bytes: that were looked at.
    """

    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    n_regions: int = 0
    n_layers: int = 0
    n_bytes: int = 0

    @property
    def is_well(self) -> bool:
        """Nothing is wrong any more."""
        return all(problem.is_mended for problem in self.problems)


class _Place(NamedTuple):
    """Where a region is."""

    directory: Path
    stored: Stored


class Check:
    """One check of a store.

    Args:
        directories: of page servers, by their ids; all are locked by this process.
        stored: what the registry knows.
        repairs: whether files are changed.
        said: is told each step, for a progress bar.
    """

    def __init__(
        self,
        directories: Mapping[str, Path],
        stored: Sequence[Stored],
        *,
        repairs: bool = False,
        said: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._directories = directories
        self._stored = stored
        self._repairs = repairs
        self._said = said
        self._layers: dict[Path, dict[int, list[LayerName]]] = {}
        self._places: dict[int, _Place] = {}
        self._is_redone: set[int] = set()
        self.report = Report()

    def run(self) -> Report:
        """
        Raises:
            StoreError: A directory cannot be read at all.
        """
        for path in self._directories.values():
            if self._repairs:
                settle(path)
            self._layers[path] = scan_layers(path)
        self._find()
        for place in self._places.values():
            self._said(f"layers of {place.stored.label}")
            self._guarded(self._check_layers, place)
        if self._repairs:
            for place in self._places.values():
                self._said(f"redo of {place.stored.label}")
                self._guarded(self._redo, place)
        wrong: dict[int, Runs] = {}
        for region, place in self._places.items():
            self._said(f"blocks of {place.stored.label}")
            self._guarded(lambda place: self._find_wrong(place, wrong), place)
            self.report.n_regions += region > 0
        for region, blocks in wrong.items():
            self._mend(self._places[region], blocks, wrong)
        return self.report

    def _wrong(self, text: str, *, is_mended: bool = False) -> None:
        self.report.problems.append(Problem(text, is_mended))

    def _guarded(self, act: Callable[[_Place], None], place: _Place) -> None:
        try:
            act(place)
        except (errors.StoreError, errors.NoSpaceError) as error:
            self._wrong(f"{place.stored.label}: {cause_of(error)}.")

    # -- where the regions are

    def _find(self) -> None:
        found: dict[int, list[Path]] = {}
        for path in self._directories.values():
            for region in bases_of(path):
                found.setdefault(region, []).append(path)
        for stored in self._stored:
            paths = found.pop(stored.region, [])
            wanted = self._directories.get(stored.directory)
            if wanted is not None:
                paths = [path for path in paths if path == wanted]
            if paths:
                self._places[stored.region] = _Place(paths[0], stored)
            elif stored.directory and wanted is None:
                self._wrong(
                    f"{stored.label} is in node-{stored.directory}, a directory that is not here."
                )
            else:
                where = wanted or "no directory here"
                self._wrong(f"{stored.label} has no base: {where} has none of that name.")
        for region, paths in found.items():
            self.report.notes.append(
                f"variable {region} is not known to the registry any more: {paths[0]} has it "
                f"until the store is opened"
            )

    # -- layers

    def _versions(self, place: _Place) -> LayerVersions:
        names = self._layers[place.directory].get(place.stored.region, [])
        return LayerVersions(place.directory, place.stored.region, names, place.stored.commits)

    def _check_layers(self, place: _Place) -> None:
        stored = place.stored
        names = self._layers[place.directory].get(stored.region, [])
        left = [
            name
            for name in names
            if not 0 < (name.version or stored.commits.get(name.commit_id, 0)) <= stored.newest
        ]
        if left:
            self.report.notes.append(
                f"{stored.label} has {len(left)} layers of commits that were never made"
            )
        with SumsFile.open(sums_path(place.directory, stored.region), writes=False) as sums:
            for layer in self._versions(place).open(sums.header.version, stored.newest):
                with layer:
                    layer.check()
                    self.report.n_layers += 1
                    self.report.n_bytes += layer.head.n_bytes

    def _redo(self, place: _Place) -> None:
        stored = place.stored
        redo(place.directory, stored.region, stored.newest, stored.commits)
        self._layers[place.directory].pop(stored.region, None)
        self._is_redone.add(stored.region)

    # -- blocks

    def _find_wrong(self, place: _Place, wrong: dict[int, Runs]) -> None:
        region = place.stored.region
        path = base_path(place.directory, region)
        with (
            SumsFile.open(sums_path(place.directory, region), writes=False) as sums,
            disk.asking(path, "reading it"),
            disk.open_file(path) as fd,
        ):
            if os.fstat(fd).st_size < sums.header.length_bytes:
                self._wrong(f"{place.stored.label}: {path} is too short.")
                return
            found = wrong_blocks(fd, sums)
            self.report.n_bytes += os.fstat(fd).st_blocks * 512
            layers = self._versions(place).open(sums.header.version, place.stored.newest)
            if len(found):
                found = found[~np.isin(found, self._rewritten(layers))]
        if len(found):
            wrong[region] = found

    @staticmethod
    def _rewritten(layers: Iterable[Layer]) -> Runs:
        """Blocks that a redo writes, whatever they are now."""
        blocks: list[Runs] = [np.empty(0, np.uint64)]
        with contextlib.suppress(errors.StoreDamagedError):  # it was said
            for layer in layers:
                with layer:
                    if not layer.flags & DELTA:
                        blocks.append(layer.blocks)
        return np.concatenate(blocks)

    def _mend(self, place: _Place, blocks: Runs, wrong: Mapping[int, Runs]) -> None:
        mended: list[int] = []
        if self._repairs and place.stored.others and place.stored.region in self._is_redone:
            for block in blocks.tolist():
                with contextlib.suppress(errors.StoreError, OSError):
                    if self._mend_block(place, block, wrong):
                        mended.append(block)
        left = np.setdiff1d(blocks, np.array(mended, np.uint64))
        path = base_path(place.directory, place.stored.region)
        if mended:
            said = _said_blocks(np.array(mended, np.uint64))
            self._wrong(f"{place.stored.label}: {said} in {path} made again.", is_mended=True)
        if len(left):
            self._wrong(
                f"{place.stored.label}: {_said_blocks(left)} wrong, by the checksums, in {path}."
            )

    def _mend_block(self, place: _Place, block: int, wrong: Mapping[int, Runs]) -> bool:
        """Whether the others of its group have made it again."""
        whole = np.zeros(BLOCK_BYTES, np.uint8)
        for region in place.stored.others:
            other = self._places.get(region)
            if other is None or region not in self._is_redone or block in wrong.get(region, ()):
                return False
            xor_into(whole, _read_block(other, block))
        region = place.stored.region
        with SumsFile.open(sums_path(place.directory, region), writes=False) as sums:
            if int(block_sums(whole)[0]) != int(sums.read(block, 1)[0]):
                return False
        with disk.open_file(base_path(place.directory, region), os.O_RDWR) as fd:
            disk.write_at(fd, whole, block * BLOCK_BYTES)
            os.fdatasync(fd)
        return True


def _read_block(place: _Place, block: int) -> npt.NDArray[np.uint8]:
    """A block of a base; zeros behind its end, as a shorter piece of a group has."""
    region = place.stored.region
    with (
        SumsFile.open(sums_path(place.directory, region), writes=False) as sums,
        disk.open_file(base_path(place.directory, region)) as fd,
    ):
        if block >= sums.header.n_blocks:
            return np.zeros(BLOCK_BYTES, np.uint8)
        content = disk.read_at(fd, BLOCK_BYTES, block * BLOCK_BYTES)
    return np.frombuffer(content, np.uint8)


def _said_blocks(blocks: Runs) -> str:
    """
    Example:
        >>> _said_blocks(np.array([3, 4, 9], np.uint64))
        '3 blocks (3-4, 9) are'
    """
    runs = [(int(first), int(n)) for first, n in runs_of(blocks)]
    said = [f"{first}-{first + n - 1}" if n > 1 else str(first) for first, n in runs[:_MOST_SAID]]
    more = ", ..." if len(runs) > _MOST_SAID else ""
    n = len(blocks)
    return f"{n} block{'s' * (n > 1)} ({', '.join(said)}{more}) {'are' if n > 1 else 'is'}"
