"""A process that does to a store's files what a page server does, until its power is cut.

python -m tests.support.store_layers DISK LOG SEED

One region gets commits, others are made beside it. LOG lies on another disk and is the registry:
a commit is decided once its line is there. The process begins by bringing back what the one before
has left, and ends with an error where that is not what was decided.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

from clamor_ray._native.base import BLOCK_BYTES
from clamor_ray._store.bases import bases_of, keep_base
from clamor_ray._store.checkpoint import checkpoint, merge
from clamor_ray._store.directories import open_node
from clamor_ray._store.layer_files import name_committed
from clamor_ray._store.layout import LAYERS, base_path, sums_path
from clamor_ray._store.redo import redo
from clamor_ray._store.sums import SumsFile, wrong_blocks
from tests.support.store_commits import Log
from tests.support.store_files import Block, base_file, block_of, put_layer

STORE_ID, SCOPE, SESSION = "a" * 32, "b" * 12, "s"
REGION, N_BLOCKS = 7, 256
MOST_BLOCKS = 12
ADDRESS = 1 << 44
MOST_BEHIND = 8  # versions that a base may be behind


def changes(version: int) -> dict[int, Block]:
    """What a commit changes."""
    rng = random.Random(version)
    blocks = rng.sample(range(N_BLOCKS), rng.randint(1, MOST_BLOCKS))
    return {block: block_of(version * 1000 + block) for block in blocks}


def model(version: int) -> Any:
    """The region at that version."""
    content = np.zeros((N_BLOCKS, BLOCK_BYTES), np.uint8)
    for each in range(1, version + 1):
        for block, data in changes(each).items():
            content[block] = data
    return content


def beside(region: int) -> dict[int, Block]:
    """Of a region that is made beside it."""
    return {region % 5: block_of(region), 9: block_of(region + 1)}


class Decided:
    """What a log says."""

    def __init__(self, log: Path) -> None:
        self.is_ready = False
        self.openings = 0
        self.version_of: dict[int, int] = {}
        self.kept: set[int] = set()
        for line in log.read_text().splitlines() if log.exists() else ():
            kind, *words = line.split()
            numbers = [int(word) for word in words]
            self.is_ready |= kind == "ready"
            self.openings += kind == "opened"
            if kind == "decided":
                self.version_of[numbers[1]] = numbers[0]
            elif kind == "kept":
                self.kept.add(numbers[0])

    @property
    def newest(self) -> int:
        """Of the region's versions."""
        return max(self.version_of.values(), default=0)


def read_base(directory: Path, region: int) -> Any:
    return np.frombuffer(base_path(directory, region).read_bytes(), np.uint8)


def check(directory: Path, decided: Decided) -> None:
    """After a redo.

    Raises:
        AssertionError: A block is not as it was decided, or its checksum is not its own.
    """
    found = read_base(directory, REGION).reshape(N_BLOCKS, BLOCK_BYTES)
    wrong = np.flatnonzero((found != model(decided.newest)).any(axis=1))
    assert not len(wrong), f"at version {decided.newest} blocks {wrong.tolist()} are others"
    assert decided.kept <= set(bases_of(directory)), (decided.kept, bases_of(directory))
    for region in bases_of(directory):
        with (
            base_path(directory, region).open("rb") as file,
            SumsFile.open(sums_path(directory, region)) as sums,
        ):
            bad = wrong_blocks(file.fileno(), sums).tolist()
            assert not bad, f"checksums of region {region}, blocks {bad}"
        if region != REGION:
            content = read_base(directory, region).reshape(-1, BLOCK_BYTES)
            for block, data in beside(region).items():
                assert np.array_equal(content[block], data), f"block {block} of region {region}"


class Page:
    """The page server: its base may be behind what was decided."""

    def __init__(self, directory: Path, fd: int, log: Log, decided: Decided, seed: int) -> None:
        self._directory, self._fd, self._log = directory, fd, log
        self._rng = random.Random(f"{seed} {decided.openings}")
        self._newest = self._applied = decided.newest
        self._ids = decided.openings << 32
        self._unnamed: list[tuple[int, int, int]] = []
        self._next_region = max({*decided.kept, 100}) + 1 + decided.openings

    def commit(self) -> None:
        """A layer, and maybe its decision."""
        self._ids += 1
        version = self._newest + 1
        put_layer(self._directory, REGION, self._ids, changes(version))
        if self._rng.random() < 0.1:
            return  # refused
        self._log.say("decided", version, self._ids)
        self._newest = version
        self._unnamed.append((REGION, self._ids, version))

    def catch_up(self) -> None:
        """The base has the newest version, unsynced."""
        for version in range(self._applied + 1, self._newest + 1):
            for block, data in changes(version).items():
                os.pwrite(self._fd, data.tobytes(), block * BLOCK_BYTES)
        self._applied = self._newest

    def name(self) -> None:
        """All that was decided."""
        name_committed(self._directory, self._unnamed)
        self._unnamed.clear()

    def merge(self) -> None:
        """Layers that the base does not have are one."""
        self.name()
        merge(self._directory, REGION, self._applied, self._newest)

    def checkpoint(self) -> None:
        """Layers that the base has are gone."""
        self.name()
        checkpoint(self._directory, REGION, self._fd, self._applied)

    def make_another(self) -> None:
        """A region that nobody changes."""
        region, self._next_region = self._next_region, self._next_region + 1
        with base_file(self._directory, beside(region), 16) as fd:
            keep_base(self._directory, region, fd, 0, ADDRESS, 16 * BLOCK_BYTES)
        self._log.say("kept", region)

    def sync_others(self) -> None:
        """What others sync takes a part of what is ours to the disk."""
        fd = os.open(self._directory / LAYERS, os.O_RDONLY)
        os.fsync(fd)
        os.close(fd)

    def run(self) -> None:
        """Never ends."""
        rest = (self.catch_up, self.name, self.merge, self.checkpoint, self.make_another)
        while True:
            self.commit()
            if self._newest - self._applied > MOST_BEHIND:
                self.catch_up()
            if self._rng.random() < 0.4:
                self._rng.choice((*rest, self.sync_others))()


def main() -> None:
    disk, path, seed = sys.argv[1:]
    decided = Decided(Path(path))
    log = Log(Path(path))
    node = open_node(Path(disk, SESSION), STORE_ID, SCOPE)
    directory = node.path
    if decided.is_ready:
        for region in bases_of(directory):
            newest = decided.newest if region == REGION else 0
            redo(directory, region, newest, decided.version_of)
        check(directory, decided)
    else:
        with base_file(directory, {}, N_BLOCKS) as fd:
            keep_base(directory, REGION, fd, 0, ADDRESS, N_BLOCKS * BLOCK_BYTES)
    log.say("ready")
    log.say("opened", decided.openings + 1)
    fd = os.open(base_path(directory, REGION), os.O_RDWR)
    decided.openings += 1
    Page(directory, fd, log, decided, int(seed)).run()


if __name__ == "__main__":
    main()
