"""What the lines of product code are: code, docstrings, comments, blank ones. By text, for C."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

from tests.support.house import tree


def _docstring_lines(source: str) -> set[int]:
    """Numbers of the lines that docstrings take, from 1."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node, clean=False) is not None
        ):
            found.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return found


def kinds_in_python(source: str) -> Counter[str]:
    """How many lines of each kind."""
    counts: Counter[str] = Counter()
    documents = _docstring_lines(source)
    for number, line in enumerate(source.splitlines(), 1):
        text = line.strip()
        if number in documents:
            counts["docstrings"] += 1
        elif not text:
            counts["blank"] += 1
        else:
            counts["comments" if text.startswith("#") else "code"] += 1
    return counts


def kinds_in_c(source: str) -> Counter[str]:
    """How many lines of each kind; a comment behind code is code."""
    counts: Counter[str] = Counter()
    inside = False
    for line in source.splitlines():
        text = line.strip()
        if inside or text.startswith(("/*", "//")):
            counts["comments"] += 1
            inside = (inside or text.startswith("/*")) and "*/" not in text
        else:
            counts["code" if text else "blank"] += 1
    return counts


def kinds(root: Path) -> Counter[str]:
    """Of all files that users run: no tests, no benchmarks."""
    counts: Counter[str] = Counter()
    for path in tree.python_files(root):
        counts += kinds_in_python(path.read_text("utf-8"))
    for path in tree.c_files(root):
        counts += kinds_in_c(path.read_text("utf-8"))
    return counts
