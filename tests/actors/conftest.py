"""Fixtures of several files of this folder."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clamor_ray.actors.lost_homes import rebuilds
from tests.support.rebuild_rig import World


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A region at version 1, with rebuilds that do not pause for long."""
    monkeypatch.setattr(rebuilds, "PAUSE_S", 0.001)
    monkeypatch.setattr(rebuilds, "PAUSE_MOST_S", 0.002)
    world = World(tmp_path / "journal")
    yield world
    world.journal.close()


@pytest.fixture
def raylet() -> Iterator[subprocess.Popen[bytes]]:
    """What a keeper and a journal's watcher take for their raylet: they end with it."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()
