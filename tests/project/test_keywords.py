"""Who makes a record of many fields names each: none is told by its position."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WIDE = 5  # fields
MOST_BY_POSITION = 3


def _trees() -> Iterator[tuple[Path, ast.Module]]:
    for folder in ("clamor_ray", "actors"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def _is_record(node: ast.ClassDef) -> bool:
    marks = [ast.unparse(each) for each in (*node.decorator_list, *node.bases)]
    return any("dataclass" in mark or "NamedTuple" in mark for mark in marks)


def _wide(trees: list[tuple[Path, ast.Module]]) -> set[str]:
    return {
        node.name
        for _, tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and _is_record(node)
        and sum(isinstance(each, ast.AnnAssign) for each in node.body) >= WIDE
    }


def test_wide_records_are_made_with_keywords() -> None:
    trees = list(_trees())
    wide = _wide(trees)
    assert wide >= {"TaskSpec", "Meta", "Stage", "Write"}
    found = []
    for path, tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and len(node.args) > MOST_BY_POSITION:
                name = ast.unparse(node.func).rpartition(".")[2]
                if name in wide:
                    found.append(f"{path}:{node.lineno}: {name}")
    assert found == []
