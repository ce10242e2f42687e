"""Which C file calls which, and the names of structs and functions. By text: no compiler is needed.

It relies on how the C here is written: a definition begins in column 0, and so does its brace.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

from tests.support.house.tree import c_files

_NOISE = re.compile(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL)
_DEFINITION = re.compile(
    r"^(?!static\b)[A-Za-z_][^;{}#=]*?\b(\w+)\(([^;{}]*)\)\s*^\{", re.MULTILINE
)
_STRUCT = re.compile(r"^(?:typedef )?(?:struct|union) (\w+) \{", re.MULTILINE)
_NAME = re.compile(r"\b[A-Za-z_]\w*\b")


def _source(path: Path) -> str:
    return _NOISE.sub(lambda match: "\n" * match[0].count("\n") + " ", path.read_text("utf-8"))


def definitions(root: Path) -> dict[str, str]:
    """The file, relative to the root, that defines each function other files may call."""
    found = {}
    for path in c_files(root, ".c"):
        for match in _DEFINITION.finditer(_source(path)):
            found[match[1]] = str(path.relative_to(root))
    return found


def calls(root: Path) -> dict[str, set[str]]:
    """The files whose functions each file names: in a call, or to hand them on."""
    home = definitions(root)
    edges: dict[str, set[str]] = {}
    for path in c_files(root, ".c"):
        here = str(path.relative_to(root))
        named = set(_NAME.findall(_source(path)))
        edges[here] = {home[name] for name in named if home.get(name, here) != here}
    return edges


def shared_struct_names(root: Path) -> dict[str, list[str]]:
    """Names that several structs have which more than one file may see: the files of each.

    Those without `pc_` are one file's own: no header has them.
    """
    places: dict[str, list[str]] = defaultdict(list)
    for path in c_files(root):
        for name in _STRUCT.findall(_source(path)):
            if name.startswith("pc_"):
                places[name].append(str(path.relative_to(root)))
    return {name: files for name, files in sorted(places.items()) if len(files) > 1}


def one_underscore_apart(root: Path) -> list[tuple[str, str]]:
    """Pairs of functions such as `pc_open` and `pc__open`."""
    names = set(definitions(root))
    return sorted(
        (name, twin)
        for name in names
        if name.startswith("pc_") and not name.startswith("pc__")
        for twin in [name.replace("pc_", "pc__", 1)]
        if twin in names
    )


def largest_header(root: Path) -> tuple[int, str]:
    """Lines and path of the longest header; the public one, pagecache.h, is what users read."""
    return max(
        (
            (len(path.read_text("utf-8").splitlines()), str(path.relative_to(root)))
            for path in c_files(root, ".h")
            if path.name != "pagecache.h"
        ),
        default=(0, ""),
    )
