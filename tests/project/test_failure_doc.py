"""Each row of docs/failure.md names a test, and each test that a document names is run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("**/*.md"))
C_TESTS = ROOT / "pagecache_c" / "tests"
# `test_x.py`, `tests/actors/test_x.py::test_y`, `test_x.c: test_y`
NAMED = re.compile(r"`(?:[\w./]+/)?(test_\w+\.(?:py|c))(?:(?:::|: )(\w+))?`")
RULE = re.compile(r"\|[\s|:-]+\|")


def rows_of(text: str) -> list[str]:
    """The rows of all tables, without their headings."""
    lines = text.splitlines()
    begins = {n for n, line in enumerate(lines) if RULE.fullmatch(line.strip())}
    return [
        line
        for n, line in enumerate(lines)
        if line.startswith("|") and n not in begins and n + 1 not in begins
    ]


def named_in(paths: list[Path]) -> set[tuple[str, str]]:
    """(file, function or "") of all tests that these documents name."""
    return {match for path in paths for match in NAMED.findall(path.read_text())}


def one_file(name: str) -> Path:
    folder = C_TESTS if name.endswith(".c") else ROOT / "tests"
    found = sorted(folder.rglob(name))
    assert len(found) == 1, f"{name}: {len(found)} files have this name"
    return found[0]


def test_rows_are_found() -> None:
    table = "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n\ntext | with a bar\n"
    assert rows_of(table) == ["| 1 | 2 |", "| 3 | 4 |"]
    assert len(rows_of((ROOT / "docs" / "failure.md").read_text())) > 60


def test_each_row_of_failures_names_its_test() -> None:
    rows = rows_of((ROOT / "docs" / "failure.md").read_text())
    assert [row[:100] for row in rows if not NAMED.search(row)] == []


def test_each_named_test_in_c_exists_and_is_called() -> None:
    wrong = []
    for name, function in sorted(named_in(DOCS)):
        if not name.endswith(".c"):
            continue
        text = one_file(name).read_text()
        assert "int main(" in text, f"{name} is no program"
        # main() may call it by a macro that puts `test_` before the name.
        mentions = re.findall(rf"\b(?:{function}|{function.removeprefix('test_')})\b", text)
        if function and (f"{function}(" not in text or len(mentions) < 2):
            wrong.append(f"{name}: {function}")
    assert wrong == []


@pytest.mark.timeout(120)
def test_each_named_test_in_python_is_collected() -> None:
    named = sorted(item for item in named_in(DOCS) if item[0].endswith(".py"))
    files = sorted({str(one_file(name).relative_to(ROOT)) for name, _ in named})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *files], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    collected = set(re.findall(r"(test_\w+\.py)::(?:\w+::)*(\w+)", done.stdout))
    collected |= {(file, "") for file, _ in collected}
    assert [item for item in named if item not in collected] == []
