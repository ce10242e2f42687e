"""The directory of a node's Unix sockets: made here, and checked before anybody listens there.

Other local users could take an abstract name, or one in a directory that all may write, while its
server is restarted. So the sockets lie in a directory that only this user can enter. It stays,
empty, when a session has ended: below one with the sticky bit (``/tmp``) nobody else can take its
name.

``pagecache_c/os/local_socket.c`` makes and removes the files in it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from typing import Final

from clamor_ray import errors
from clamor_ray._protocol.cause import cause_of

_ELSEWHERE: Final = (
    "or set CLAMOR_SOCKET_DIR to a directory that other users cannot write, on every node before "
    "Ray starts there, and for the driver."
)


def prepare(directory: str) -> None:
    """Makes the directory, unless it is there, and checks that it is this user's alone.

    Args:
        directory: ``names.socket_directory``.

    Raises:
        DeniedError: It cannot be made there; or it is another user's, a link, or open to others.
        OSError: There are no descriptors, no space, no memory.
    """
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(directory, 0o700)
            _warn_of_its_place(directory)
        found = os.lstat(directory)
    except (FileNotFoundError, NotADirectoryError, PermissionError) as failure:
        raise errors.DeniedError(
            f"The directory for Unix sockets, {directory}, cannot be made: {cause_of(failure)}.",
            hint=f"Make the one above it, {_ELSEWHERE}",
        ) from failure
    kind = "symbolic link" if stat.S_ISLNK(found.st_mode) else "file"
    if not stat.S_ISDIR(found.st_mode):
        _refuse(directory, found, f"is a {kind} of user {found.st_uid}")
    if found.st_uid != os.geteuid():
        _refuse(directory, found, f"belongs to user {found.st_uid}")
    if found.st_mode & 0o077:
        raise errors.DeniedError(
            f"The directory for Unix sockets, {directory}, is open to other users: its mode is "
            f"{stat.S_IMODE(found.st_mode):04o}.",
            hint=f"Remove what is in it, and `chmod 700 {directory}`.",
        )


def _refuse(directory: str, found: os.stat_result, what: str) -> None:
    raise errors.DeniedError(
        f"{directory} {what}, and must be a directory of user {os.geteuid()}, for Unix sockets.",
        hint=f"Have it removed by user {found.st_uid} or by root, {_ELSEWHERE}",
    )


def _warn_of_its_place(directory: str) -> None:
    above = os.path.dirname(directory)
    found = os.stat(above)
    if found.st_mode & 0o022 and not found.st_mode & stat.S_ISVTX:
        logging.getLogger("clamor_ray").warning(
            "%s has the mode %04o: other local users can rename %s, and so hold up this node. Set "
            "its sticky bit, or CLAMOR_SOCKET_DIR",
            *(above, stat.S_IMODE(found.st_mode), directory),
        )
