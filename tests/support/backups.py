"""Sessions that end and begin again around a backup, in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import clamor_ray as clamor


def new_session() -> None:
    """All variables of this process's session are gone, and there is another one."""
    clamor.shutdown(force=True)
    clamor.init()


def drop_all() -> None:
    """No variable of the session has a name."""
    for info in clamor.variables():
        if info.name is not None:
            clamor.drop(info.name)


def data_files(path: Path) -> list[Path]:
    """Of a backup."""
    return sorted((path / "data").iterdir())


def manifest_of(path: Path, number: int) -> dict[str, Any]:
    """Of a checkpoint, as JSON."""
    text = (path / f"checkpoint-{number:08d}.json").read_text()
    found: dict[str, Any] = json.loads(text.splitlines()[1])
    return found
