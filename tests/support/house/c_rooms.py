"""Which rooms of C stand on which: what a file may include, and whose functions it may call.

    python -m tests.support.house.c_rooms [ROOT]

`make lint` runs it. What lies above is handed down as a function (`struct pc__observers`).
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.house import c_side
from tests.support.house.tree import C_FOLDER, c_files

PUBLIC_HEADERS = ("pagecache.h", "pagecache_kernels.h", "pagecache_match.h")
# From the bottom up: the rooms that each room may use, besides itself and the public headers.
STANDS_ON: Mapping[str, tuple[str, ...]] = {
    "common": (),
    "os": ("common",),
    "kernels": ("common", "os"),
    "python": (),
    "alloc": ("common",),
    "match": ("common",),
    "history": ("common", "os"),
    "ring": ("common", "kernels"),
    "trap": ("common", "os"),
    "client": ("common", "os", "kernels", "trap"),
    "client/mapping": ("common", "os", "trap", "client"),
    "engine/keeper": ("common", "os"),
    "engine/core": ("common", "os", "history", "engine/keeper"),
    "engine/cache": ("common", "os", "engine/core"),
    "engine/checks": ("common", "os", "kernels", "engine/core"),
    "engine/store": (
        "common", "os", "kernels", "history", "engine/keeper", "engine/core", "engine/cache",
        "engine/checks",
    ),
    "engine/readahead": ("common", "engine/core"),
    "engine/miss": (
        "common", "os", "engine/core", "engine/cache", "engine/store", "engine/readahead",
    ),
    "engine/repair": ("common", "kernels", "engine/core", "engine/store", "engine/miss"),
    "engine/serve": ("common", "os", "engine/core", "engine/cache", "engine/store", "engine/miss"),
    "engine/local": (
        "common", "os", "engine/core", "engine/cache", "engine/store", "engine/readahead",
        "engine/miss", "engine/serve",
    ),
    "engine": (
        "common", "os", "history", "engine/keeper", "engine/core", "engine/cache", "engine/store",
        "engine/readahead", "engine/miss", "engine/repair", "engine/serve", "engine/local",
    ),
}  # fmt: skip
# One room in two folders: its header is client/client.h, and calls go both ways.
CALLS_TOO: Mapping[str, tuple[str, ...]] = {"client": ("client/mapping",)}

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def _room(path: str) -> str:
    return path.removeprefix(f"{C_FOLDER}/").rpartition("/")[0]


def _includes(root: Path, rooms: Mapping[str, tuple[str, ...]]) -> list[str]:
    found = []
    for path in c_files(root):
        here = str(path.relative_to(root))
        room = _room(here)
        if room not in rooms and path.name not in PUBLIC_HEADERS:
            found.append(f"{here}: no row of STANDS_ON is for {room or 'the top folder'}")
        for header in _INCLUDE.findall(path.read_text("utf-8")):
            if not (root / C_FOLDER / header).is_file():
                found.append(f'{here}: "{header}" is not the path of a header from {C_FOLDER} on')
            elif header not in PUBLIC_HEADERS and _room(header) not in {room, *rooms.get(room, ())}:
                found.append(f"{here}: {room} may not include {header}")
    return found


def _calls(root: Path, rooms: Mapping[str, tuple[str, ...]]) -> list[str]:
    found = []
    for caller, callees in sorted(c_side.calls(root).items()):
        room = _room(caller)
        may = {room, *rooms.get(room, ()), *CALLS_TOO.get(room, ())}
        found += [
            f"{caller}: {room} may not call {callee}"
            for callee in sorted(callees)
            if _room(callee) not in may
        ]
    return found


def arrows_up(root: Path, rooms: Mapping[str, tuple[str, ...]] = STANDS_ON) -> list[str]:
    """What goes where it may not, a line each.

    Args:
        root: of the project.
        rooms: what each room may use.
    """
    return _includes(root, rooms) + _calls(root, rooms)


def main(arguments: list[str]) -> int:
    """Prints what goes where it may not. Returns 1 if something does."""
    root = Path(arguments[0]) if arguments else Path(__file__).resolve().parents[3]
    found = arrows_up(root)
    print("\n".join(found) or f"{len(STANDS_ON)} rooms of C: no arrow goes up")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
