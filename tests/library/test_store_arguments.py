"""What `clamor.init(store=...)` is given, and where its registry goes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._session.begin import stores
from clamor_ray._session.begin.stores import check_arguments, check_same, choose
from clamor_ray._store.description import NODE_KIND, REGISTRY_KIND, Description
from clamor_ray._store.directories import Here, open_registry
from clamor_ray._store.layout import REGISTRY, session_directory

ROOT = "/data/clamor/features"
NOTHING = Here(None, (), ())


def registry(store: str, scope: str = "aaaaaa000001") -> Here:
    return Here(Description(REGISTRY_KIND, store * 32, scope, "features"), (), ())


def part(store: str, directory: str) -> Description:
    return Description(NODE_KIND, store * 32, "aaaaaa000001", "features", directory * 32)


def place(found: dict[str, Here], here: str = "n1") -> stores.RegistryPlace:
    return choose(found, here, ROOT, "features")


def test_a_store_has_a_session() -> None:
    assert check_arguments(None, None) == check_arguments(None, "features") == ""
    with pytest.raises(
        ValueError, match=r"a store is of a session with a name: clamor.init\(store"
    ):
        check_arguments("/data/clamor", None)
    for name in ("a/b", ".hidden"):
        with pytest.raises(ValueError, match="cannot be the name of a session with a store"):
            check_arguments("/data/clamor", name)
    with pytest.raises(ValueError, match="path of a directory"):
        check_arguments("", "features")
    with pytest.raises(TypeError, match="store is a path, not bytes"):
        check_arguments(os.fsencode("/data"), "features")
    with pytest.raises(TypeError):
        check_arguments(7, "features")  # type: ignore[arg-type]


def test_init_says_so_before_it_starts_anything() -> None:
    with pytest.raises(ValueError, match="a store is of a session with a name"):
        clamor.init(store="/data/clamor")


def test_the_same_directory_is_the_same_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    wanted = str(tmp_path / "store")
    for same in ("store", "./x/../store", tmp_path / "store", f"{tmp_path}//store/"):
        assert check_arguments(same, "features") == wanted
    assert stores.root_of(wanted, "features") == str(session_directory(wanted, "features"))


def test_a_session_with_another_store_is_not_attached_to() -> None:
    check_same(ROOT, ROOT, "features")
    with pytest.raises(ValueError, match=r"store='/other', .* has the store '/data/clamor'"):
        check_same(ROOT, "/other/features", "features")
    with pytest.raises(ValueError, match=r"has no store: .* clamor\.shutdown"):
        check_same("", ROOT, "features")


def test_a_new_store_begins_on_the_node_of_its_driver() -> None:
    first, second = (place({"n0": NOTHING, "n1": NOTHING}) for _ in range(2))
    assert (first.node_id, first.root) == ("n1", ROOT)
    assert len(first.store_id) == 32
    assert first.store_id != second.store_id
    assert first.scope != second.scope
    assert first.scope[:6] == second.scope[:6]  # by which the session's name is found


def test_the_registry_goes_where_its_part_is() -> None:
    found = {"n0": NOTHING, "n1": Here(None, (part("a", "1"),), ()), "n2": registry("a")}
    assert place(found) == ("n2", ROOT, "a" * 32, "aaaaaa000001")


def test_on_a_shared_disk_it_is_at_the_driver() -> None:
    both = {"n0": registry("a"), "n1": registry("a"), "n2": NOTHING}
    assert place(both).node_id == "n1"
    assert place(both, here="n2").node_id == "n0"


def test_two_stores_at_one_path_are_not_opened() -> None:
    with pytest.raises(errors.StoreIncompleteError) as refused:
        place({"n0": registry("a"), "n1": registry("b")})
    for said in (f"node n0 has {'a' * 32}", f"node n1 has {'b' * 32}", "Move all but one away"):
        assert said in str(refused.value)


def test_a_store_without_the_registry_s_part_is_not_opened() -> None:
    nodes = {
        "n0": Here(None, (part("a", "1"), part("a", "2")), ()),
        "n1": NOTHING,
        "n2": Here(None, (part("a", "3"),), ()),
    }
    with pytest.raises(errors.StoreIncompleteError) as refused:
        place(nodes)
    assert f"{ROOT}/{REGISTRY}, is on no node that lives" in str(refused.value)
    assert f"nodes n0, n2 have parts of the store {'a' * 32}" in str(refused.value)


def test_where_something_cannot_be_read_no_new_store_is_begun() -> None:
    with pytest.raises(errors.StoreIncompleteError, match="node n0: /x may be used by others"):
        place({"n0": Here(None, (), ("/x may be used by others",)), "n1": NOTHING})


def test_what_is_wrong_with_the_registry_s_part_is_said_by_its_type(tmp_path: Path) -> None:
    root = session_directory(tmp_path / "store", "features")
    assert stores._what_is_here(str(root)) == NOTHING
    open_registry(root, store_id="a" * 32, scope="aaaaaa000001").close()
    here = stores._what_is_here(str(root))
    assert here.registry is not None
    assert here.registry.scope == "aaaaaa000001"
    (root / REGISTRY / "description.json").write_text('{"format": 99, "library": "9.0"}')
    with pytest.raises(errors.StoreFormatError, match=r"format 99 of clamor-ray 9\.0"):
        stores._what_is_here(str(root))


def test_what_others_could_have_written_is_not_opened(tmp_path: Path) -> None:
    root = session_directory(tmp_path / "store", "features")
    open_registry(root, store_id="a" * 32, scope="aaaaaa000001").close()
    for path in (root, root / REGISTRY):
        path.chmod(0o755)
        with pytest.raises(errors.StoreAccessError, match="may be used by others"):
            stores._what_is_here(str(root))
        path.chmod(0o700)
    assert stores._what_is_here(str(root)).registry is not None
