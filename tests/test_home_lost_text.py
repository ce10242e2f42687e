"""Every message of loss names the variable; where blocks were asked for, it names them too.

The table of places: all where the code makes such an error, in Python and in C."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import clamor_ray
from clamor_ray import _native, errors
from clamor_ray._native_base import PC_ERR_HOME_LOST

HOME = Path(clamor_ray.__file__).parent
ROOT = HOME.parent
# Says what somebody has said before, who named it.
PASSED_ON = {"why.message"}
# Of a whole keeper: no region is meant, and its page server begins anew.
OF_NO_REGION = '"the keeper has only a part of what there was"'


def made_in(path: Path) -> list[tuple[int, str]]:
    """Line and message of each HomeLostError that a file makes."""
    return [
        (node.lineno, ast.unparse(node.args[0]))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", getattr(node.func, "id", "")) == "HomeLostError"
        and node.args
    ]


def names_a_region(message: str) -> bool:
    return bool(re.search(r"[Rr]egion \{|\{about\}|\{text\}", message))


def test_every_place_in_python_names_the_region() -> None:
    files = [p for folder in (HOME, ROOT / "actors") for p in folder.rglob("*.py")]
    places = [(str(p), *place) for p in files for place in made_in(p)]
    assert len(places) >= 7
    unnamed = [
        place for place in places if place[2] not in PASSED_ON and not names_a_region(place[2])
    ]
    assert not unnamed


def test_every_place_in_c_names_the_region() -> None:
    """A code without a text is named by who knows the mapping: the next tests."""
    found = []
    for path in (ROOT / "pagecache_c").glob("*.c"):
        calls = re.findall(r"pc__fail\(\s*PC_ERR_HOME_LOST,(.*?)\);", path.read_text(), re.S)
        found += [(path.name, call) for call in calls]
    assert len(found) >= 3
    unnamed = [place for place in found if "region %" not in place[1]]
    assert [place for place in unnamed if place[1].strip() != OF_NO_REGION] == []


def test_no_call_about_a_mapping_is_checked_without_its_variable() -> None:
    assert "mapping=mapping_id" not in (HOME / "_native.py").read_text()


class LosingClient(_native.Client):
    """Whose page server has lost everything."""

    def __init__(self) -> None:
        self._mapped = {}
        self._remember(SimpleNamespace(id=8, address=1 << 44, length_bytes=1 << 20), 7, 2)

    def _call(self, function: Any, *args: Any) -> int:
        return PC_ERR_HOME_LOST


RUNS = np.array([[3, 3], [9, 1]], np.uint64)


@pytest.mark.parametrize("name", ["prefetch", "gather", "dirty", "stage", "evicted", "build_seal"])
def test_what_a_call_on_a_mapping_says(name: str) -> None:
    client = LosingClient()
    calls = {
        "prefetch": lambda: client.prefetch(8, RUNS),
        "gather": lambda: client.gather(
            8,
            np.array([2, 5], np.uint64),
            np.empty(200, np.uint8),
            offset_bytes=4096,
            stride_bytes=4096,
            row_bytes=100,
        ),
        "dirty": lambda: client.dirty(8),
        "stage": lambda: client.stage(8, 1, RUNS),
        "evicted": lambda: client.evicted(8),
        "build_seal": lambda: client.build_seal(8),
    }
    with pytest.raises(errors.HomeLostError) as caught:
        calls[name]()
    assert "region 7, version 2" in caught.value.message
    assert "mapping" not in caught.value.message
    blocks = {"prefetch": "blocks 3-5, 9", "gather": "blocks 2 rows in 3-6"}
    assert blocks.get(name, "") in caught.value.message


def test_a_mapping_that_is_forgotten_is_named_by_its_number() -> None:
    client = LosingClient()
    client._mapped.clear()
    with pytest.raises(errors.HomeLostError, match="mapping 8"):
        client.prefetch(8, RUNS)


def test_few_mappings_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "MAPPED_MOST", 4)
    client = LosingClient()
    for number in range(100, 120):
        client._remember(SimpleNamespace(id=number, address=0, length_bytes=0), number, 0)
        assert len(client._mapped) <= 4
    assert {118, 119} <= client._mapped.keys()
