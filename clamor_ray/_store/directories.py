"""Opening the directories of a persistent store: of its registry, and of its page servers.

Who has one open holds a lock of the kernel's on its file `lock`, which ends with the process. A new
directory is made whole, and locked, under a name that begins with ".", and then renamed; so a
directory that is there has a description.

Only this user's directories that nobody else can read or write are opened: what is in them is
unpickled.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from clamor_ray import errors
from clamor_ray._protocol.cause import cause_of
from clamor_ray._store import description as descriptions
from clamor_ray._store import disk
from clamor_ray._store.bases import settle
from clamor_ray._store.description import NODE_KIND, REGISTRY_KIND, Description
from clamor_ray._store.layout import (
    DESCRIPTION,
    LAYERS,
    LOCK,
    NEW,
    REGIONS,
    REGISTRY,
    node_id_of,
    node_name,
)

DYING_S: Final = 20.0
_LOOK_S: Final = 0.1


class Lock:
    """That this process has a directory open.

    Args:
        path: of the directory.
        fd: of its file `lock`, locked.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self.path = path
        self.fd = fd

    def close(self) -> None:
        """Another process may open the directory from now on."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


@dataclass(frozen=True)
class RegistryDirectory:
    """The registry's directory, open.

    Args:
        path: of it.
        description: of it.
        is_new: it was made now.
        lock: while it is held, nobody else opens it.
    """

    path: Path
    description: Description
    is_new: bool
    lock: Lock

    @property
    def lock_fd(self) -> int:
        return self.lock.fd

    def close(self) -> None:
        self.lock.close()


@dataclass(frozen=True)
class NodeDirectory(RegistryDirectory):
    """A page server's directory, open. Arguments as of `RegistryDirectory`."""

    @property
    def directory_id(self) -> str:
        """32 hex digits."""
        return self.description.directory


class Here(NamedTuple):
    """What of a store is at a path.

    Args:
        registry: what the registry's directory says; None: it is not here.
        nodes: what the page servers' directories say, in the order of their names.
        trouble: what cannot be read, a sentence each.
    """

    registry: Description | None
    nodes: tuple[Description, ...]
    trouble: tuple[str, ...]


def _check_private(path: Path) -> None:
    """
    Raises:
        StoreAccessError: It is no directory, another user's, or others may use it.
    """
    with disk.asking(path, "looking at it"):
        found = os.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise errors.StoreAccessError(f"{path} is no directory.", hint="Choose another path.")
    if found.st_uid != os.geteuid():
        raise errors.StoreAccessError(
            f"{path} belongs to user {found.st_uid}, and this is user {os.geteuid()}."
        )
    if found.st_mode & 0o077:
        raise errors.StoreAccessError(
            f"{path} may be used by others (mode {stat.S_IMODE(found.st_mode):04o})."
        )


def _check_parent(path: Path) -> None:
    """
    Raises:
        StoreAccessError: Anybody may put directories of their own into it.
    """
    with disk.asking(path, "looking at it"):
        found = os.stat(path)
    if not stat.S_ISDIR(found.st_mode):
        raise errors.StoreAccessError(f"{path} is no directory.", hint="Choose another path.")
    if found.st_uid not in (0, os.geteuid()):
        raise errors.StoreAccessError(
            f"{path} belongs to user {found.st_uid}, and this is user {os.geteuid()}."
        )
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        raise errors.StoreAccessError(
            f"others may write into {path} (mode {stat.S_IMODE(found.st_mode):04o})."
        )


def _make(path: Path) -> None:
    with disk.asking(path, "making the directory"):
        try:
            os.mkdir(path, disk.DIRECTORY_MODE)
        except FileExistsError:
            return
    disk.sync_now(path.parent)


def make_root(root: Path) -> None:
    """Makes a session's part of a store, and the store, where they are absent.

    Args:
        root: see `layout.session_directory`. The directory that the store is in must be there.

    Raises:
        StoreError: They cannot be made, or may not be used.
        ValueError: The path is not absolute.
    """
    if not root.is_absolute():
        raise ValueError(f"the path of a store is absolute: {root}")
    if not root.parent.parent.is_dir():
        raise errors.StoreAccessError(
            f"{root.parent.parent} is no directory, so the store {root.parent} cannot be made.",
            hint="Make that directory on each node, or choose another path.",
        )
    _make(root.parent)
    _check_parent(root.parent)
    _make(root)
    _check_private(root)


# ------------------------------------------------------------------------------------ locks


def who_has(path: Path) -> str:
    """The process that has a directory open, as it wrote it down; for messages."""
    try:
        with disk.open_file(path / LOCK) as fd:
            said = os.pread(fd, 200, 0).decode(errors="replace").split()
    except OSError:
        said = []
    return f"process {said[0]} on {said[1]}" if len(said) == 2 else "another process"


def _try_lock(path: Path) -> Lock | None:
    """None: another process has it."""
    file = path / LOCK
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    with disk.asking(file, "opening it"):
        fd = os.open(file, flags, disk.FILE_MODE)
    try:
        with disk.asking(file, "locking it"):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            disk.write_at(fd, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
    except errors.StoreError as error:
        os.close(fd)
        if isinstance(error.__cause__, BlockingIOError):
            return None
        raise
    except BaseException:
        os.close(fd)
        raise
    return Lock(path, fd)


def _lock(path: Path, timeout_s: float) -> Lock:
    """
    Raises:
        StoreInUseError: Another process has it, for all that time.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        lock = _try_lock(path)
        if lock is not None:
            return lock
        if time.monotonic() >= deadline:
            raise errors.StoreInUseError(f"{path} is open in {who_has(path)}.")
        time.sleep(_LOOK_S)


# ----------------------------------------------------------------------------------- making


def _make_directory(root: Path, name: str, description: Description) -> Lock | None:
    """Makes it whole, and locked. None: there is one of that name meanwhile."""
    made = root / f"{NEW}{name}-{secrets.token_hex(4)}"
    _make(made)
    lock: Lock | None = None
    try:
        lock = _lock(made, 0.0)
        if description.kind == NODE_KIND:
            _make(made / REGIONS)
            _make(made / LAYERS)
        descriptions.write(made, description)
        with disk.asking(root / name, "making it"):
            os.rename(made, root / name)
    except BaseException as error:
        if lock is not None:
            lock.close()
        shutil.rmtree(made, ignore_errors=True)
        cause = error.__cause__
        if isinstance(cause, OSError) and (root / name).exists():
            return None
        raise
    disk.sync_now(root)
    lock.path = root / name
    return lock


def _tidy(root: Path) -> None:
    """What was being made by processes that are dead goes."""
    with disk.asking(root, "listing it"):
        names = [name for name in os.listdir(root) if name.startswith(NEW)]
    for name in names:
        with contextlib.suppress(errors.StoreError):  # gone meanwhile: its maker renamed it
            lock = _try_lock(root / name)
            if lock is not None:
                if (root / name / LOCK).exists():  # not renamed while it was locked
                    shutil.rmtree(root / name, ignore_errors=True)
                lock.close()


def open_registry(
    root: Path, *, store_id: str | None = None, scope: str | None = None
) -> RegistryDirectory:
    """Opens the registry's directory, or makes it.

    Args:
        root: see `layout.session_directory`.
        store_id: that it must have; a new one's; None: any, and a random one.
        scope: of a new one; None: a random one. One that is there keeps its own.

    Raises:
        StoreInUseError: Another process has it open.
        StoreIncompleteError: It is of another store.
        StoreFormatError, StoreAccessError, StoreDamagedError, StoreError, NoSpaceError.
    """
    make_root(root)
    path = root / REGISTRY
    if not path.exists():
        made = Description(
            REGISTRY_KIND, store_id or uuid.uuid4().hex, scope or secrets.token_hex(6), root.name
        )
        lock = _make_directory(root, REGISTRY, made)
        if lock is not None:
            return RegistryDirectory(path, made, True, lock)
    _check_private(path)
    found = descriptions.read(path)
    if store_id is not None and found.store != store_id:
        raise errors.StoreIncompleteError(
            f"{path} is of the store {found.store}, and {store_id} is to be opened."
        )
    lock = _lock(path, 0.0)
    disk.forget_sync(path)
    return RegistryDirectory(path, found, False, lock)


def _nodes(root: Path) -> Iterator[Path]:
    with disk.asking(root, "listing it"):
        names = sorted(os.listdir(root))
    yield from (root / name for name in names if node_id_of(name))


def _open_this(root: Path, store_id: str, directory_id: str) -> NodeDirectory:
    path = root / node_name(directory_id)
    if not path.is_dir():
        raise errors.StoreIncompleteError(f"{path} is not there any more.")
    _check_private(path)
    found = descriptions.read(path)
    if found.store != store_id:
        raise errors.StoreIncompleteError(
            f"{path} is of the store {found.store}, and {store_id} is to be opened."
        )
    return NodeDirectory(path, found, False, _lock(path, DYING_S))


def _open_free(root: Path, store_id: str) -> NodeDirectory | None:
    for path in _nodes(root):
        _check_private(path)
        found = descriptions.read(path)
        lock = _try_lock(path) if found.store == store_id else None
        if lock is not None:
            return NodeDirectory(path, found, False, lock)
    return None


def open_node(
    root: Path, store_id: str, scope: str, *, directory_id: str | None = None
) -> NodeDirectory:
    """Opens a page server's directory: the first of this store that is free, or a new one.

    Args:
        root: see `layout.session_directory`.
        store_id: of the store.
        scope: of a new one.
        directory_id: takes that very one, and waits until a process that had it is gone.

    Raises:
        StoreInUseError: Another process has that very one open.
        StoreIncompleteError: That very one is not there, or is of another store.
        StoreFormatError, StoreAccessError, StoreDamagedError, StoreError, NoSpaceError.
    """
    make_root(root)
    _tidy(root)
    if directory_id is not None:
        opened: NodeDirectory | None = _open_this(root, store_id, directory_id)
    else:
        opened = _open_free(root, store_id)
    if opened is None:
        made = Description(NODE_KIND, store_id, scope, root.name, uuid.uuid4().hex)
        lock = _make_directory(root, node_name(made.directory), made)
        if lock is None:
            raise errors.InternalError(f"{root} has a directory {made.directory} already.")
        opened = NodeDirectory(lock.path, made, True, lock)
    for name in (REGIONS, LAYERS):  # a copy of a store may lack directories that were empty
        _make(opened.path / name)
    disk.forget_sync(opened.path)
    try:
        settle(opened.path)
    except BaseException:
        opened.close()
        raise
    return opened


def free_nodes(root: Path, store_id: str) -> list[str]:
    """The page servers' directories of a store, here, that nobody has open.

    Raises:
        StoreError: They cannot be looked at.
    """
    free = []
    for path in _nodes(root):
        _check_private(path)
        found = descriptions.read(path)
        lock = _try_lock(path) if found.store == store_id else None
        if lock is not None:
            lock.close()
            free.append(found.directory)
    return free


def remove_node(opened: NodeDirectory) -> None:
    """Deletes a page server's directory, whose files another one has, and closes it.

    Raises:
        StoreError: It cannot be deleted whole. What is left is opened as an empty one.
    """
    with disk.asking(opened.path, "deleting it"):
        gone = opened.path.with_name(f"{NEW}{opened.path.name}-{secrets.token_hex(4)}")
        os.rename(opened.path, gone)
    disk.sync_now(opened.path.parent)
    with disk.asking(gone, "deleting it"):
        shutil.rmtree(gone)
    opened.close()


def what_is_here(root: Path) -> Here:
    """Reads only, and takes no lock. What cannot be read is said, and not raised."""
    registry: Description | None = None
    nodes: list[Description] = []
    trouble: list[str] = []
    try:
        if not os.path.lexists(root):
            return Here(None, (), ())
        _check_private(root)
        paths = [root / REGISTRY] if os.path.lexists(root / REGISTRY) else []
        paths += _nodes(root)
    except errors.ClamorError as error:
        return Here(None, (), (cause_of(error),))
    for path in paths:
        try:
            _check_private(path)
            found = descriptions.read(path)
        except errors.ClamorError as error:
            trouble.append(cause_of(error))
            continue
        if path.name == REGISTRY:
            registry = found
        elif found.directory != node_id_of(path.name):
            trouble.append(f"{path / DESCRIPTION} is of the directory {found.directory}")
        else:
            nodes.append(found)
    return Here(registry, tuple(nodes), tuple(trouble))
