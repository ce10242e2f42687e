"""No C file includes, or calls, a room that its own does not stand on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.house import c_rooms

ROOT = Path(c_rooms.__file__).resolve().parents[3]
ROOMS = {"common": (), "engine/core": ("common",), "engine/miss": ("common", "engine/core")}
FILES = {
    "pagecache.h": "",
    "common/wire.h": '#include "pagecache.h"\n',
    "common/wire.c": "int pc__parse(void)\n{\n    return 0;\n}\n",
    "engine/core/core.h": '#include "common/wire.h"\n',
    "engine/core/core.c": '#include "engine/core/core.h"\n#include <errno.h>\n\n'
    "int pc__post(void)\n{\n    return pc__parse();\n}\n",
    "engine/miss/miss.h": '#include "engine/core/core.h"\n',
    "engine/miss/fill.c": "int pc__fill(void)\n{\n    return pc__post();\n}\n",
}


def make(root: Path, changed: dict[str, str]) -> Path:
    for name, text in {**FILES, **changed}.items():
        path = root / "pagecache_c" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_this_checkout() -> None:
    assert c_rooms.arrows_up(ROOT) == []


def test_arrows_that_go_down(tmp_path: Path) -> None:
    assert c_rooms.arrows_up(make(tmp_path, {}), ROOMS) == []


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("engine/core/up.h", '#include "engine/miss/miss.h"\n',
         "engine/core may not include engine/miss/miss.h"),
        ("common/up.c", '#  include "engine/core/core.h"\n',
         "common may not include engine/core/core.h"),
        ("engine/core/up.c", "int pc__up(void)\n{\n    return pc__fill();\n}\n",
         "engine/core may not call pagecache_c/engine/miss/fill.c"),
        ("engine/core/up.c", '#include "../miss/miss.h"\n',
         '"../miss/miss.h" is not the path of a header from pagecache_c on'),
        ("attic/up.c", "", "no row of STANDS_ON is for attic"),
    ],
)  # fmt: skip
def test_an_arrow_that_goes_up(tmp_path: Path, name: str, text: str, expected: str) -> None:
    found = c_rooms.arrows_up(make(tmp_path, {name: text}), ROOMS)
    assert found == [f"pagecache_c/{name}: {expected}"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert c_rooms.main([]) == 0
    assert "no arrow goes up" in capsys.readouterr().out
    make(tmp_path, {"engine/core/up.h": '#include "engine/miss/miss.h"\n'})
    assert c_rooms.main([str(tmp_path)]) == 1
    assert "may not include engine/miss/miss.h" in capsys.readouterr().out
