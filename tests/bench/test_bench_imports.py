"""What benchmarks import inside of functions is there: no run of them all would say so in time."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import bench

FOLDER = Path(bench.__file__).parent
OURS = ("actors", "bench", "clamor_ray", "tests", "workloads")


def imported(path: Path) -> set[tuple[str, str]]:
    """(module, name in it, or nothing) of all that is ours, wherever the import stands."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {(each.name, "") for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found |= {(node.module, each.name) for each in node.names}
    return {each for each in found if each[0].split(".")[0] in OURS}


@pytest.mark.parametrize(
    "path", sorted(FOLDER.rglob("*.py")), ids=lambda path: str(path.relative_to(FOLDER))
)
def test_what_is_imported_is_there(path: Path) -> None:
    for module, name in imported(path):
        there = importlib.import_module(module)
        if name and not hasattr(there, name):
            importlib.import_module(f"{module}.{name}")
