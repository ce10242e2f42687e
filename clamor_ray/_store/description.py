"""What a directory of a persistent store says about itself: `description.json`."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from clamor_ray import errors
from clamor_ray._store import disk
from clamor_ray._store.layout import DESCRIPTION
from clamor_ray._version import __version__

FORMAT: Final = 1
REGISTRY_KIND: Final = "registry"
NODE_KIND: Final = "node"
_MOST_BYTES: Final = 1 << 16
_ID: Final = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True)
class Description:
    """See the file's head.

    Args:
        kind: REGISTRY_KIND or NODE_KIND.
        store: id of the store, 32 hex digits: the same in all its directories.
        scope: of the session, the same at every opening.
        session: its name.
        directory: id of a page server's directory, 32 hex digits; "" for the registry's.
        library: version of the library that made the directory.
    """

    kind: str
    store: str
    scope: str
    session: str
    directory: str = ""
    library: str = __version__


def write(path: Path, description: Description) -> None:
    """Into a directory, synced.

    Raises:
        StoreError, NoSpaceError: It cannot be written.
    """
    content: dict[str, Any] = {"format": FORMAT, **vars(description)}
    disk.write_json(path / DESCRIPTION, content)


def read(path: Path) -> Description:
    """Of a directory.

    Raises:
        StoreFormatError: A newer version of the library has made it.
        StoreDamagedError: It is missing, or is none.
        StoreError: It cannot be read.
    """
    file = path / DESCRIPTION
    with (
        disk.asking(file, "reading it"),
        disk.open_file(file) as fd,
        open(fd, "rb", closefd=False) as opened,
    ):
        content = opened.read(_MOST_BYTES)
    try:
        found = json.loads(content)
        form = found["format"]
        if isinstance(form, int) and form > FORMAT:
            raise errors.StoreFormatError(
                f"{path} has the format {form} of clamor-ray {found.get('library', '?')}; "
                f"this is {__version__}, which knows formats up to {FORMAT}."
            )
        description = Description(
            kind=str(found["kind"]),
            store=str(found["store"]),
            scope=str(found["scope"]),
            session=str(found["session"]),
            directory=str(found.get("directory", "")),
            library=str(found.get("library", "")),
        )
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise errors.StoreDamagedError(
            f"{file} is no description of a directory of a store: {error!r}.", file=str(file)
        ) from error
    is_node = description.kind == NODE_KIND
    if description.kind not in (REGISTRY_KIND, NODE_KIND) or not _ID.fullmatch(description.store):
        raise errors.StoreDamagedError(f"{file} is damaged: {description}.", file=str(file))
    if is_node and not _ID.fullmatch(description.directory):
        raise errors.StoreDamagedError(f"{file} is damaged: {description}.", file=str(file))
    return description
