"""The files of checkpoints."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clamor_ray import errors
from clamor_ray.actors.recipes.checkpoint_files import CheckpointFiles


def test_the_newest_whole_one_counts(tmp_path: Path) -> None:
    files = CheckpointFiles(str(tmp_path))
    (tmp_path / "2023").mkdir()  # the user's own: it stays
    assert files.newest() is None
    for number in (1, 2, 10):
        files.write_slice(number, 0, 3, np.arange(number))
        files.finish(number, {"about": number})
    files.write_slice(11, 0, 3, np.arange(11))  # and its writer died
    found = CheckpointFiles(str(tmp_path)).newest()
    assert found == (10, {"about": 10})
    assert np.array_equal(files.read_slice(10, 0, 3), np.arange(10))
    assert sorted(os.listdir(tmp_path)) == [
        "2023",
        "checkpoint-10",
        "checkpoint-11",
        "checkpoint-2",
    ]  # and the one before it


def test_a_full_disk_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = CheckpointFiles(str(tmp_path))
    files.write_slice(1, 0, 0, "first")
    files.finish(1, None)

    def full(fd: int) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(errors.StorageError, match="No space left"):
            files.write_slice(2, 0, 0, "second")
    assert files.newest() == (1, None)
    assert files.read_slice(1, 0, 0) == "first"


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    files = CheckpointFiles(str(tmp_path))
    with pytest.raises(errors.StorageError, match="slice-0-7 is not read"):
        files.read_slice(1, 0, 7)
    with pytest.raises(errors.StorageError, match="cannot hold checkpoints"):
        CheckpointFiles("nonsense://x/y")


def test_a_class_of_the_users_script(tmp_path: Path) -> None:
    """It is not importable where a worker runs."""
    script: dict[str, Any] = {"__name__": "__main__"}
    exec("class Point:\n    x = 3", script)
    files = CheckpointFiles(str(tmp_path))
    files.write_slice(1, 0, 0, script["Point"]())
    assert files.read_slice(1, 0, 0).x == 3
