"""Which files belong to which part of the project. No file is opened here."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

PYTHON_FOLDERS = ("clamor_ray", "actors", "workloads")
C_FOLDER = "pagecache_c"
_GENERATED = {"_pagecache.c"}


def files_below(root: Path, folder: str, *suffixes: str) -> list[Path]:
    """Source files below a folder of the project, in order; build products and hidden ones aside.

    Args:
        root: of the project.
        folder: relative to it; one that is not there has no files.
        suffixes: of names, with the dot.
    """
    found: list[Path] = []
    for place, folders, names in os.walk(root / folder):
        folders[:] = [
            name
            for name in folders
            if not name.startswith(("build", ".")) and name != "__pycache__"
        ]
        found += [
            Path(place) / name
            for name in names
            if name.endswith(suffixes) and name not in _GENERATED
        ]
    return sorted(found)


def python_files(root: Path) -> list[Path]:
    """Modules of the library, the actors and the programs."""
    return [path for folder in PYTHON_FOLDERS for path in files_below(root, folder, ".py")]


def c_files(root: Path, *suffixes: str) -> list[Path]:
    """Files of the page cache, its tests aside."""
    inner = root / C_FOLDER
    return [
        path
        for path in files_below(root, C_FOLDER, *(suffixes or (".c", ".h")))
        if path.relative_to(inner).parts[0] != "tests"
    ]


def module_of(root: Path, path: Path) -> str:
    """A module's name as it is imported: actors and workloads lie beside the package.

    >>> module_of(Path("/p"), Path("/p/actors/registry.py"))
    'clamor_ray.actors.registry'
    """
    parts = list(path.relative_to(root).with_suffix("").parts)
    if parts[0] in ("actors", "workloads"):
        parts.insert(0, "clamor_ray")
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


def is_program(path: Path) -> bool:
    """Whether a user runs this file: a workload, or a benchmark."""
    text = path.read_text(encoding="utf-8")
    return "\ndef main(" in text or 'if __name__ == "__main__"' in text


def fullest_folder(root: Path) -> tuple[int, str]:
    """The folder with most files, and how many. Tests and runnable programs do not count."""
    counts: Counter[str] = Counter()
    for path in [*python_files(root), *files_below(root, "bench", ".py"), *c_files(root)]:
        inside = path.relative_to(root)
        if inside.parts[0] in ("workloads", "bench") and is_program(path):
            continue
        counts[str(inside.parent)] += 1
    return max(((n, folder) for folder, n in counts.items()), default=(0, ""))
