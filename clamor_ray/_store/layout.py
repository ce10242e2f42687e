"""Where the files of a persistent store are, and what their names say.

    <store>/<session>/                   the session's part, called the root here
      registry/                          description.json  lock  journal
      node-<32 hex>/                     of one page server: description.json  lock
        regions/<region>.base            the region at the version that .sums says, or a later one
        regions/<region>.sums            checksums of it (`sums.py`)
        layers/<region>-<commit>.layer               written, not known to be committed
        layers/<region>-<commit>-<version>.layer     committed as this version (`layer_files.py`)
        layers/<region>-<commit>-<first>..<last>.layer    several committed ones in one

Regions and versions are decimal, ids of commits have 16 hex digits. A name that begins with "." is
of something that is being made; who opens a directory deletes what a dead process has left.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

REGISTRY: Final = "registry"
REGIONS: Final = "regions"
LAYERS: Final = "layers"
DESCRIPTION: Final = "description.json"
LOCK: Final = "lock"
JOURNAL: Final = "journal"
NEW: Final = ".new-"

_NODE: Final = re.compile(r"node-([0-9a-f]{32})")
_BASE: Final = re.compile(r"([1-9][0-9]*)\.base")
_LAYER: Final = re.compile(
    r"([1-9][0-9]*)-([0-9a-f]{16})(?:-([1-9][0-9]*)(?:\.\.([1-9][0-9]*))?)?\.layer"
)
_MOST_BYTES_OF_A_NAME: Final = 255


class LayerName(NamedTuple):
    """What the name of a layer's file says.

    Args:
        region: whose blocks it has.
        commit_id: of the commit; of the newest one, where there are several in it.
        version: that the commit made; the newest one; 0: not known to be committed.
        first: the oldest version in it; `version`, but where there are several in it.

    Example:
        >>> LayerName(7, 0x2A).text, LayerName(7, 0x2A, 3).text, LayerName(7, 0x2A, 5, 2).text
        ('7-000000000000002a.layer', '7-000000000000002a-3.layer', '7-000000000000002a-2..5.layer')
    """

    region: int
    commit_id: int
    version: int = 0
    first: int = 0

    @property
    def text(self) -> str:
        name = f"{self.region}-{self.commit_id:016x}"
        if self.version and self.first not in (0, self.version):
            name += f"-{self.first}..{self.version}"
        elif self.version:
            name += f"-{self.version}"
        return f"{name}.layer"

    @property
    def oldest(self) -> int:
        """The oldest version in it."""
        return self.first or self.version


def layer_name_of(name: str) -> LayerName | None:
    """Of a file's name; None: it is no layer's.

    Example:
        >>> layer_name_of("7-000000000000002a-2..5.layer")
        LayerName(region=7, commit_id=42, version=5, first=2)
        >>> layer_name_of("notes.txt") is None
        True
    """
    found = _LAYER.fullmatch(name)
    if found is None:
        return None
    region, commit_id, first, last = found.groups()
    version = int(last or first or 0)
    merged = int(first) if last else 0
    return LayerName(int(region), int(commit_id, 16), version, merged)


def check_session_name(name: str) -> None:
    """A session with a store has its name for a directory.

    Raises:
        ValueError: It can be no directory's name.

    Example:
        >>> check_session_name("a/b")
        Traceback (most recent call last):
            ...
        ValueError: ...
    """
    if not name or name.startswith(".") or "/" in name or "\0" in name:
        why = 'it has "/" in it, begins with ".", or is empty'
    elif len(name.encode(errors="surrogateescape")) > _MOST_BYTES_OF_A_NAME:
        why = f"it has more than {_MOST_BYTES_OF_A_NAME} bytes"
    else:
        return
    raise ValueError(
        f"session={name!r} cannot be the name of a session with a store, because a directory of "
        f"the store is called so: {why}."
    )


def session_directory(store: str | Path, session: str) -> Path:
    """Where a session's part of a store is, called the root here.

    Raises:
        ValueError: See `check_session_name`.
    """
    check_session_name(session)
    return Path(store) / session


def node_name(directory_id: str) -> str:
    """Name of a page server's directory."""
    return f"node-{directory_id}"


def node_id_of(name: str) -> str:
    """The id that a page server's directory has in its name; "": it is none."""
    found = _NODE.fullmatch(name)
    return found[1] if found else ""


def base_path(directory: Path, region: int) -> Path:
    """The base of a region, in a page server's directory."""
    return directory / REGIONS / f"{region}.base"


def sums_path(directory: Path, region: int) -> Path:
    """The checksums of a region's base."""
    return directory / REGIONS / f"{region}.sums"


def region_of_base(name: str) -> int:
    """The region that a file of `regions` is the base of; 0: it is none.

    Example:
        >>> region_of_base("12.base"), region_of_base("12.sums")
        (12, 0)
    """
    found = _BASE.fullmatch(name)
    return int(found[1]) if found else 0


def layer_path(directory: Path, name: LayerName) -> Path:
    """A layer's file, in a page server's directory."""
    return directory / LAYERS / name.text
