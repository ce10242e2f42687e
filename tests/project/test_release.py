"""What a release says of itself agrees; its archives have the same bytes each time."""

from __future__ import annotations

import gzip
import importlib.util
import os
import platform
import re
import subprocess
import tarfile
import zlib
from io import BytesIO
from pathlib import Path
from types import ModuleType

import pytest

from clamor_ray import __version__

ROOT = Path(__file__).parents[2]


def _archives() -> ModuleType:
    """release/archives.py, whose folder is no package where only a copy of tests/ is."""
    spec = importlib.util.spec_from_file_location("archives", ROOT / "release" / "archives.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_file_that_has_the_version_has_this_one() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest = re.search(r"^## \[(.+?)\] - (\d{4}-\d\d-\d\d)$", changelog, re.MULTILINE)
    assert newest is not None
    assert newest[1] == __version__
    assert f"\nversion: {__version__}\n" in citation
    assert f'\ndate-released: "{newest[2]}"\n' in citation
    supported = __version__.rpartition(".")[0]
    assert f"| {supported}.x | yes |" in (ROOT / "SECURITY.md").read_text()


def test_the_changelog_ends_with_the_first_release() -> None:
    headings = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings == sorted(
        headings, key=lambda text: [int(number) for number in text.split(".")], reverse=True
    )
    assert headings[-1] == "0.1.0"


@pytest.mark.parametrize("path", re.findall(r"`((?:clamor_ray|pagecache_c|tests)/[\w./]+)`",
                                            (ROOT / "SECURITY.md").read_text()))  # fmt: skip
def test_what_security_names_is_there(path: str) -> None:
    assert (ROOT / path).exists()


def test_tools_of_a_release_are_pinned() -> None:
    lines = (ROOT / "release" / "requirements.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert pins
    assert all(re.fullmatch(r"[\w-]+==[\d.]+", pin) for pin in pins), pins
    names = {pin.partition("==")[0] for pin in pins}
    assert {"build", "cffi", "setuptools", "wheel", "ziglang"} <= names


def _archive(into: Path, names: list[str], mtime_s: int, uid: int, mode: int) -> Path:
    with tarfile.open(into, "w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(name)
            member.size = len(name)
            member.mtime, member.uid, member.uname, member.mode = mtime_s, uid, f"u{uid}", mode
            archive.addfile(member, BytesIO(name.encode()))
    return into


def test_an_sdist_has_the_same_bytes_whoever_builds_it(tmp_path: Path) -> None:
    archives = _archives()
    one = _archive(tmp_path / "one.tar.gz", ["p/a", "p/b"], 5, 0, 0o644)
    other = _archive(tmp_path / "other.tar.gz", ["p/b", "p/a"], 7, 1000, 0o664)
    for path in (one, other):
        archives._same_everywhere(path, path.with_suffix(".same"), 1_700_000_000)
    same = one.with_suffix(".same").read_bytes()
    assert same == other.with_suffix(".same").read_bytes()
    with tarfile.open(fileobj=BytesIO(gzip.decompress(same))) as archive:
        assert archive.getnames() == ["p/a", "p/b"]
        content = archive.extractfile("p/b")
        assert content is not None
        assert content.read() == b"p/b"
        assert {member.mtime for member in archive.getmembers()} == {1_700_000_000}


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, Path]:
    """A repository of one commit, and the module that builds releases of it."""
    root = tmp_path / "root"
    root.mkdir()
    (root / "known").write_text("known")
    (root / "gone").write_text("gone")
    who = ["-c", "user.name=x", "-c", "user.email=x@x.example"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=root, check=True)
    archives = _archives()
    monkeypatch.setattr(archives, "ROOT", root)
    return archives, root


def test_an_sdist_is_of_what_git_knows(tree: tuple[ModuleType, Path], tmp_path: Path) -> None:
    archives, root = tree
    (root / "beside").write_text("nobody knows it")
    (root / "gone").unlink()
    archives.copy_tree(tmp_path / "copy")
    assert [path.name for path in (tmp_path / "copy").rglob("*")] == ["known"]


def test_what_is_in_no_commit_is_found(tree: tuple[ModuleType, Path]) -> None:
    archives, root = tree
    (root / "beside").write_text("it would not be in a release")
    assert archives.changed_files() == []
    (root / "known").write_text("changed")
    (root / "gone").unlink()
    assert archives.changed_files() == ["gone", "known"]


def test_an_umask_is_not_in_a_release(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`main` is what both builds call."""
    archives = _archives()
    monkeypatch.setattr(archives, "make_sdist", lambda into: into.touch())
    before = os.umask(0o077)
    try:
        archives.main(["sdist", str(tmp_path / "made")])
    finally:
        os.umask(before)
    assert (tmp_path / "made").stat().st_mode & 0o777 == 0o644


def test_it_says_which_python_and_zlib_made_the_bytes() -> None:
    said = _archives().built_by()
    assert platform.python_version() in said
    assert zlib.ZLIB_RUNTIME_VERSION in said


def test_a_release_is_of_its_commit_s_time(monkeypatch: pytest.MonkeyPatch) -> None:
    archives = _archives()
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    assert archives.commit_epoch_s() == 1_700_000_000
