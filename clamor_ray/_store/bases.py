"""The bases of regions get their names in a page server's directory, with their checksums.

The engine makes them without names (O_TMPFILE), in the same directory, so a base is there when its
name is: then its checksums are there already. A base that takes another one's place goes through
names of its own, `.new-<region>.base` and `.new-<region>.sums`, in an order from which `settle` can
tell what a dead process was at.
"""

from __future__ import annotations

import os
from pathlib import Path

from clamor_ray import errors
from clamor_ray._store import disk
from clamor_ray._store.layer_files import layers_of
from clamor_ray._store.layout import (
    LAYERS,
    NEW,
    REGIONS,
    base_path,
    layer_path,
    region_of_base,
    sums_path,
)
from clamor_ray._store.summed_copy import drop_known, known_of
from clamor_ray._store.sums import IN_FILE, SumsFile, sums_of


def keep_base(
    directory: Path,
    region: int,
    fd: int,
    version: int,
    base_address: int,
    length_bytes: int,
    *,
    in_file: bool = False,
) -> None:
    """A base stays, at this version, whatever becomes of this process. The same one again: nothing.

    Args:
        directory: the page server's.
        region: its id.
        fd: of the base, on the same file system. Nobody writes to it during this call.
        version: that all of it is at.
        base_address, length_bytes: of the region; the length is of whole blocks.
        in_file: the region is in a file of the user's; see `SumsHeader`.

    Raises:
        StoreAccessError: The file system has no files without names, or it is another one.
        NoSpaceError, StoreError, WaitTimeoutError: What was kept before is kept.
    """
    path = base_path(directory, region)
    with disk.asking(path, "keeping it"):
        found = _inode(path)
        if found == _inode(fd):
            disk.sync_directory(directory / REGIONS)  # whoever named it may not have come to this
            drop_known(directory, region)
            return
        sums = sums_of(fd, length_bytes, known_of(directory, region, fd, length_bytes))
    about = {"region": region, "version": version, "base_address": base_address}
    new = sums_path(directory, region) if found is None else _new(sums_path(directory, region))
    if found is not None:
        if disk.unlink(new):  # of a try that failed: alone it would say that the base is replaced
            disk.sync_directory(directory / REGIONS)
        _link(fd, _new(path))
        disk.sync_directory(directory / REGIONS)
    SumsFile.create(
        new, length_bytes=length_bytes, flags=IN_FILE if in_file else 0, sums=sums, **about
    )
    with disk.asking(path, "syncing it"):
        os.fdatasync(fd)
    if found is None:
        _link(fd, path)
        disk.sync_directory(directory / REGIONS)
    else:
        disk.sync_directory(directory / REGIONS)
        _replace(directory, region)
    drop_known(directory, region)


def _inode(file: Path | int) -> tuple[int, int] | None:
    try:
        found = os.stat(file)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _new(path: Path) -> Path:
    return path.with_name(f"{NEW}{path.name}")


def _link(fd: int, path: Path) -> None:
    """Gives a file without a name one; what has it goes."""
    if not disk.link(fd, path):
        raise errors.StoreAccessError(
            f"{path}: the base cannot get this name.",
            hint="Keep a store on one file system that has O_TMPFILE: ext4, xfs, btrfs or tmpfs.",
        )


def _replace(directory: Path, region: int) -> None:
    """Both new files are there, whole and synced."""
    for path in (base_path(directory, region), sums_path(directory, region)):
        with disk.asking(path, "replacing it"):
            os.rename(_new(path), path)
        disk.sync_directory(directory / REGIONS)  # the base's name before that of its sums


def settle(directory: Path) -> None:
    """Ends, or undoes, what a dead process was at with the directory's bases and layers.

    Raises:
        StoreError: It cannot be done.
    """
    for below in (REGIONS, LAYERS):
        with disk.asking(directory / below, "listing it"):
            names = {name for name in os.listdir(directory / below) if name.startswith(NEW)}
        for name in sorted(names):  # a base is before its sums
            if below == REGIONS and _settle_base(directory, name, names):
                continue
            disk.unlink(directory / below / name)
        if names:
            disk.sync_directory(directory / below)


def _settle_base(directory: Path, name: str, names: set[str]) -> bool:
    """Whether that is done."""
    stem, _, kind = name.removeprefix(NEW).partition(".")
    if not stem.isdigit() or kind not in ("base", "sums"):
        return False
    region = int(stem)
    if kind == "sums" and name in names:
        # The base has its name: this is what was to be next. It was made after `.new-*.base` was
        # synced, so that it is alone here means that that one was renamed.
        path = sums_path(directory, region)
        with disk.asking(path, "replacing it"):
            os.rename(_new(path), path)
        return True
    names.discard(f"{NEW}{region}.sums")
    if disk.unlink(_new(sums_path(directory, region))):
        disk.sync_directory(directory / REGIONS)  # it must not be alone
    return False


def link_base(source: Path, directory: Path, region: int) -> None:
    """A base and its checksums get a second name in another directory of the same file system.

    Args:
        source: the directory that has them.
        directory: the other one. What it has of the region goes first.
        region: its id.

    Raises:
        StoreDamagedError: They are not in the one.
        NoSpaceError, StoreError, WaitTimeoutError.
    """
    drop_region(directory, region)
    for path_of in (sums_path, base_path):  # the base last: it says that all is there
        path = path_of(directory, region)
        with disk.asking(path, "linking it"):
            os.link(path_of(source, region), path)
    disk.sync_directory(directory / REGIONS)


def bases_of(directory: Path) -> list[int]:
    """The regions whose bases are there, ascending.

    Raises:
        StoreError: They cannot be listed.
    """
    with disk.asking(directory / REGIONS, "listing it"):
        return sorted(filter(None, map(region_of_base, os.listdir(directory / REGIONS))))


def drop_region(directory: Path, region: int) -> bool:
    """Deletes what there is of a region: its base first, so that nothing is taken for whole.

    Returns:
        Whether there was anything.

    Raises:
        StoreError, WaitTimeoutError: It cannot be deleted.
    """
    drop_known(directory, region)
    names = (base_path(directory, region), sums_path(directory, region))
    dropped = [disk.unlink(path) for path in (*names, *map(_new, names))]
    if any(dropped):
        disk.sync_directory(directory / REGIONS)
    dropped += [disk.unlink(layer_path(directory, name)) for name in layers_of(directory, region)]
    return any(dropped)
