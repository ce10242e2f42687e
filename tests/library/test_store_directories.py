"""Directories of a store: who may open them, one at a time, and what they say of themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from clamor_ray import errors
from clamor_ray._store.description import FORMAT, read
from clamor_ray._store.directories import open_node, open_registry, what_is_here
from clamor_ray._store.layout import (
    LayerName,
    check_session_name,
    layer_name_of,
    session_directory,
)

STORE = "ab" * 16
SCOPE = "0123456789ab"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return session_directory(tmp_path / "store", "features")


def rewrite(path: Path, **changed: object) -> None:
    file = path / "description.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))


@pytest.mark.parametrize("name", ["", ".", "..", ".a", "a/b", "/", "a\0", "x" * 256])
def test_names_that_are_no_directories_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="session="):
        check_session_name(name)


@pytest.mark.parametrize(
    "name", [LayerName(1, 0), LayerName(7, 2**64 - 1, 3), LayerName(7, 5, 9, 4)]
)
def test_names_of_layers_say_what_they_are(name: LayerName) -> None:
    assert layer_name_of(name.text) == name


@pytest.mark.parametrize(
    "text",
    ["0-0000000000000001.layer", "7-1.layer", ".new-7-0000000000000001.layer-ab", "7.base"],
)
def test_other_names_are_no_layers(text: str) -> None:
    assert layer_name_of(text) is None


def test_what_is_made_is_found_again(root: Path) -> None:
    assert what_is_here(root) == (None, (), ())
    first = open_registry(root, store_id=STORE, scope=SCOPE)
    node = open_node(root, STORE, SCOPE)
    assert first.is_new
    assert node.is_new
    assert node.path.name == f"node-{node.directory_id}"
    here = what_is_here(root)
    assert here == (first.description, (node.description,), ())
    assert first.description.session == "features"
    first.close()
    node.close()
    again = open_registry(root, scope="ffffffffffff")
    assert not again.is_new
    assert again.description == first.description  # a store keeps its scope
    assert open_node(root, STORE, SCOPE).path == node.path
    for path, directories, files in os.walk(root):
        assert os.stat(path).st_mode & 0o777 == 0o700
        assert all(os.stat(Path(path, each)).st_mode & 0o777 == 0o600 for each in files)
        assert not [each for each in (*directories, *files) if each.startswith(".")]


def test_a_store_is_open_once(root: Path) -> None:
    opened = open_registry(root)
    with pytest.raises(errors.StoreInUseError, match=f"process {os.getpid()} on"):
        open_registry(root)
    opened.close()
    open_registry(root).close()


def test_a_lock_ends_with_its_process(root: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from clamor_ray._store.directories import *\n"
        f"opened = open_registry(Path({str(root)!r})); print('open', flush=True); sys.stdin.read()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"open\n"
        with pytest.raises(errors.StoreInUseError, match=f"process {other.pid} on"):
            open_registry(root)
        other.kill()
        other.wait(20)
    open_registry(root).close()


def test_each_page_server_takes_a_directory_of_its_own(root: Path) -> None:
    nodes = [open_node(root, STORE, SCOPE) for _ in range(3)]
    assert len({node.directory_id for node in nodes}) == 3
    nodes[1].close()
    taken = open_node(root, STORE, SCOPE)
    assert taken.directory_id == nodes[1].directory_id
    assert not taken.is_new
    assert open_node(root, "cd" * 16, SCOPE).is_new  # another store's are left alone


def test_that_very_directory(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [open_node(root, STORE, SCOPE) for _ in range(2)]
    monkeypatch.setattr("clamor_ray._store.directories.DYING_S", 0.3)
    wanted = nodes[1].directory_id
    with pytest.raises(errors.StoreInUseError):
        open_node(root, STORE, SCOPE, directory_id=wanted)
    nodes[1].close()
    assert open_node(root, STORE, SCOPE, directory_id=wanted).directory_id == wanted
    with pytest.raises(errors.StoreIncompleteError, match="not there"):
        open_node(root, STORE, SCOPE, directory_id="0" * 32)


def test_another_store_is_not_opened(root: Path) -> None:
    open_registry(root, store_id=STORE).close()
    with pytest.raises(errors.StoreIncompleteError, match=STORE):
        open_registry(root, store_id="cd" * 16)


def test_a_newer_format_is_refused(root: Path) -> None:
    opened = open_registry(root)
    opened.close()
    rewrite(opened.path, format=FORMAT + 1, library="99.0")
    with pytest.raises(errors.StoreFormatError, match=r"99\.0"):
        open_registry(root)
    assert "99.0" in what_is_here(root).trouble[0]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"format": 1}', "\0"])
def test_a_damaged_description_is_said(root: Path, content: str) -> None:
    opened = open_registry(root)
    opened.close()
    (opened.path / "description.json").write_text(content)
    with pytest.raises(errors.StoreDamagedError, match=r"description\.json"):
        read(opened.path)


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o701])
def test_what_others_may_use_is_refused(root: Path, mode: int) -> None:
    opened = open_registry(root)
    opened.close()
    opened.path.chmod(mode)
    with pytest.raises(errors.StoreAccessError, match=f"mode 0{mode:o}"):
        open_registry(root)
    opened.path.chmod(0o700)
    root.chmod(mode)
    with pytest.raises(errors.StoreAccessError, match=f"mode 0{mode:o}"):
        open_node(root, STORE, SCOPE)
    assert what_is_here(root).registry is None


def test_another_users_store_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_registry(root).close()
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    with pytest.raises(errors.StoreAccessError, match=f"user {me}"):
        open_registry(root)


def test_a_store_is_made_where_its_parent_is(tmp_path: Path) -> None:
    with pytest.raises(errors.StoreAccessError, match="is no directory"):
        open_registry(tmp_path / "no" / "store" / "features")
    with pytest.raises(ValueError, match="absolute"):
        open_registry(Path("store/features"))


def test_what_a_dead_maker_has_left_goes(root: Path) -> None:
    open_registry(root).close()
    left = root / ".new-node-abc"
    left.mkdir()
    (left / "lock").touch()
    open_node(root, STORE, SCOPE)
    assert not left.exists()
