"""Files that documents and comments name exist; each room says what goes in and what comes out."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = [ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", ROOT / "README.md"]
DOCS += sorted((ROOT / "docs").glob("**/*.md"))
NAMED = re.compile(r"`((?:[\w.]+/)*[\w.]+\.(?:py|c|h|sh|pml))(?:::\w+|: \w+)?`")
MODULE = re.compile(r"`(_[a-z]\w*)\.(\w+)")  # of a room: `_read.ref`
INVENTED = {"test_x.py", "test_x.c", "tests/actors/test_x.py"}  # examples in a text


def files() -> set[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(listed.stdout.split())


@pytest.mark.parametrize("document", DOCS, ids=lambda path: path.name)
def test_files_that_are_named_exist(document: Path) -> None:
    """A name is a path from the root, or its last parts."""
    there = ["/" + path for path in files()]
    wrong = [
        name
        for name in NAMED.findall(document.read_text())
        if not any(path.endswith("/" + name) for path in there)
    ]
    assert wrong == []


def code(*tops: str) -> list[str]:
    return sorted(path for path in files() if path.endswith(".py") and path.startswith(tops))


def test_files_that_comments_name_exist() -> None:
    there = ["/" + path for path in files()]
    wrong = [
        (path, name)
        for path in code("clamor_ray/", "actors/", "workloads/", "bench/", "tests/")
        for name in NAMED.findall((ROOT / path).read_text())
        if name not in INVENTED and not any(each.endswith("/" + name) for each in there)
    ]
    assert wrong == []


def test_modules_that_comments_name_exist() -> None:
    there = files()
    wrong = [
        (path, f"{room}.{module}")
        for path in code("clamor_ray/", "actors/")
        for room, module in MODULE.findall((ROOT / path).read_text())
        if f"clamor_ray/{room}/{module}.py" not in there and module != "so"
    ]
    assert wrong == []


def test_each_room_says_what_goes_in_and_what_comes_out() -> None:
    rooms = [path for path in code("clamor_ray/", "actors/") if path.endswith("/__init__.py")]
    wrong = [
        path
        for path in rooms
        if path != "clamor_ray/__init__.py"
        and not re.match(r'"""In: .+\. Out: .+\.', (ROOT / path).read_text().splitlines()[0])
    ]
    assert wrong == []


def test_the_map_has_each_room() -> None:
    """Each folder with code is in ARCHITECTURE.md, and no folder that is not there."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    tables = {
        "clamor_ray": text.split("### Python: `clamor_ray/`")[1].split("###")[0],
        "actors": text.split("### Python: `actors/`")[1].split("###")[0],
        "pagecache_c": text.split("### C: `pagecache_c/`")[1].split("###")[0],
    }
    for top, table in tables.items():
        rooms = {
            str(Path(path).parent.relative_to(top))
            for path in files()
            if path.startswith(f"{top}/") and path.endswith((".py", ".c", ".h"))
        }
        rooms = {room for room in rooms if room != "." and not room.startswith("tests")}
        named = {name.rstrip("/") for name in re.findall(r"`([\w/]+/)`", table)}
        parents = {"collection", "engine"}  # their rooms are named one by one
        assert named - {top} == rooms - parents
