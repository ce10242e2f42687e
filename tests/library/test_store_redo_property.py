"""A redo against a plain model: whatever a crash has left, and wherever it is killed itself."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from clamor_ray import errors
from clamor_ray._native.base import BLOCK_BYTES
from clamor_ray._store.bases import keep_base, settle
from clamor_ray._store.checkpoint import checkpoint, merge
from clamor_ray._store.layer_files import DELTA, MADE_WHOLE, Layer, scan_layers
from clamor_ray._store.layout import LAYERS, REGIONS, base_path, layer_path, sums_path
from clamor_ray._store.redo import redo
from clamor_ray._store.sums import SUMS_OFFSET, SumsFile, wrong_blocks
from tests.support.store_files import Block, Crash, Crashes, base_file, block_of, put_layer

REGION = 7
N_BLOCKS = 24
FIRST = 3
SEEDS = range(6)


class Story:
    """A region with some commits, and what it must be at each of their versions.

    Args:
        directory: of a page server; empty.
        seed: of all that is random.
        deltas: its commits are deltas, as those of parity are.
    """

    def __init__(self, directory: Path, seed: int, deltas: bool) -> None:
        self.directory = directory
        self.random = random.Random(seed)
        for name in (REGIONS, LAYERS):
            (directory / name).mkdir(parents=True)
        self._seed = seed * 1000
        begin = {b: self._block() for b in self.random.sample(range(N_BLOCKS), 9)}
        with base_file(directory, begin, N_BLOCKS) as fd:
            keep_base(directory, REGION, fd, FIRST, 1 << 44, N_BLOCKS * BLOCK_BYTES)
        now = np.zeros((N_BLOCKS, BLOCK_BYTES), np.uint8)
        for block, data in begin.items():
            now[block] = data
        self.models = {FIRST: now}
        self.committed: dict[int, int] = {}
        for version in range(FIRST + 1, FIRST + self.random.randint(2, 6)):
            self._commit(version, deltas)
        self.newest = max(self.models)
        put_layer(directory, REGION, 998, {3: self._block()})
        put_layer(directory, REGION, 999, {4: self._block()})
        torn = put_layer(directory, REGION, 1000, {5: self._block()})
        os.truncate(torn, torn.stat().st_size - 10)

    def _block(self) -> Block:
        self._seed += 1
        return block_of(self._seed)

    def _commit(self, version: int, deltas: bool) -> None:
        blocks = self.random.sample(range(N_BLOCKS), self.random.randint(1, 8))
        content = {block: self._block() for block in blocks}
        now = self.models[version - 1].copy()
        for block, data in content.items():
            now[block] = now[block] ^ data if deltas else data
        self.models[version] = now
        commit_id = 100 + version
        self.committed[commit_id] = version
        named = version if self.random.random() < 0.5 else 0
        flags = DELTA if deltas else 0
        put_layer(self.directory, REGION, commit_id, content, flags=flags, version=named)

    def make_some_whole(self) -> None:
        """As the engine has made the first ones whole."""
        for version in range(FIRST + 1, self.random.randint(FIRST + 1, self.newest + 1)):
            name = next(
                each
                for each in scan_layers(self.directory)[REGION]
                if each.commit_id == 100 + version
            )
            with Layer.open(layer_path(self.directory, name)) as layer:
                content = {int(b): self.models[version][int(b)] for b in layer.blocks}
            commit_id = 100 + version
            put_layer(self.directory, REGION, commit_id, content, flags=MADE_WHOLE, version=version)

    def scribble(self) -> None:
        """What is not synced may be there, or a part of it, or nothing."""
        with (
            SumsFile.open(sums_path(self.directory, REGION)) as sums,
            open(base_path(self.directory, REGION), "r+b") as base,
        ):
            for name in scan_layers(self.directory).get(REGION, ()):
                version = name.version or self.committed.get(name.commit_id, 0)
                if not sums.header.version < version <= self.newest:
                    continue
                try:
                    with Layer.open(layer_path(self.directory, name)) as layer:
                        blocks = [] if layer.flags & DELTA else layer.blocks.tolist()
                except errors.StoreDamagedError:
                    continue  # torn: nothing of it was applied
                for block in blocks:
                    if self.random.random() < 0.5:
                        os.pwrite(base.fileno(), self._block().tobytes()[:99], block * BLOCK_BYTES)
                        os.pwrite(sums.fd, b"junk", SUMS_OFFSET + 4 * block)

    def check(self, version: int) -> None:
        with (
            SumsFile.open(sums_path(self.directory, REGION)) as sums,
            open(base_path(self.directory, REGION), "rb") as base,
        ):
            found = np.frombuffer(base.read(), np.uint8).reshape(N_BLOCKS, BLOCK_BYTES)
            assert np.array_equal(found, self.models[version])
            assert sums.header.version == version
            assert not len(wrong_blocks(base.fileno(), sums))
        assert not scan_layers(self.directory)

    def redo(self) -> None:
        redo(self.directory, REGION, self.newest, self.committed)


def killed_everywhere(
    story: Story, crashes: Crashes, act: Callable[[], object], check: Callable[[], None]
) -> int:
    """Does `act` again and again from the same files, killed one change later each time."""
    saved = story.directory.with_name("saved")
    shutil.copytree(story.directory, saved)
    for n in range(1, 1000):
        crashes.after(n)
        try:
            act()
        except Crash:
            crashes.never()
            check()
        else:
            crashes.never()
            check()
            return n
        shutil.rmtree(story.directory)
        shutil.copytree(saved, story.directory)
    raise AssertionError("it never ends")


@pytest.mark.parametrize("deltas", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_a_redo_is_killed_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int, deltas: bool
) -> None:
    story = Story(tmp_path / "node", seed, deltas)
    if deltas:
        story.make_some_whole()
    story.scribble()
    crashes = Crashes(monkeypatch, seed)

    def check() -> None:
        story.scribble()
        story.redo()
        story.check(story.newest)

    assert killed_everywhere(story, crashes, story.redo, check) > 5


@pytest.mark.parametrize("seed", SEEDS)
def test_a_checkpoint_is_killed_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    story = Story(tmp_path / "node", seed, False)
    for name in scan_layers(story.directory)[REGION]:
        version = story.committed.get(name.commit_id)
        if version and not name.version:
            path = layer_path(story.directory, name)
            path.rename(layer_path(story.directory, name._replace(version=version)))
    to = story.random.randint(FIRST, story.newest)
    if story.random.random() < 0.5:
        merge(story.directory, REGION, story.random.randint(FIRST, to), story.newest)
    crashes = Crashes(monkeypatch, seed)

    def act() -> None:
        with open(base_path(story.directory, REGION), "r+b") as base:
            for block, data in enumerate(story.models[to]):  # as the engine has applied them
                if crashes.n == 0:
                    base.seek(block * BLOCK_BYTES)
                    base.write(data.tobytes())
            base.flush()
            checkpoint(story.directory, REGION, base.fileno(), to)

    def check() -> None:
        story.scribble()
        story.redo()
        story.check(story.newest)

    assert killed_everywhere(story, crashes, act, check) >= 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_merge_is_killed_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    story = Story(tmp_path / "node", seed, False)
    for name in scan_layers(story.directory)[REGION]:
        version = story.committed.get(name.commit_id)
        if version and not name.version:
            path = layer_path(story.directory, name)
            path.rename(layer_path(story.directory, name._replace(version=version)))
    above = story.random.randint(FIRST, story.newest - 1)
    story.scribble()
    crashes = Crashes(monkeypatch, seed)

    def check() -> None:
        merge(story.directory, REGION, above, story.newest)
        names = [n for n in scan_layers(story.directory)[REGION] if above < n.version]
        assert len([n for n in names if n.version <= story.newest]) == 1
        story.redo()
        story.check(story.newest)

    killed_everywhere(
        story, crashes, lambda: merge(story.directory, REGION, above, story.newest), check
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_base_is_replaced_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    story = Story(tmp_path / "node", seed, False)
    for name in scan_layers(story.directory)[REGION]:
        layer_path(story.directory, name).unlink()
    story.models[90] = np.stack([block_of(50_000 + seed * 100 + b) for b in range(N_BLOCKS)])
    crashes = Crashes(monkeypatch, seed)
    seen = set()

    def act() -> None:
        with base_file(story.directory, {}, N_BLOCKS) as fd:
            os.lseek(fd, 0, os.SEEK_SET)
            os.write(fd, story.models[90].tobytes())
            crashes.n = 0
            keep_base(story.directory, REGION, fd, 90, 1 << 44, N_BLOCKS * BLOCK_BYTES)

    def check() -> None:
        settle(story.directory)
        with SumsFile.open(sums_path(story.directory, REGION)) as sums:
            version = sums.header.version
        seen.add(version)
        story.check(version)
        assert sorted(os.listdir(story.directory / REGIONS)) == ["7.base", "7.sums"]

    killed_everywhere(story, crashes, act, check)
    assert seen == {FIRST, 90}
