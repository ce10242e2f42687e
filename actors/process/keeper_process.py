"""Starts what outlives our actors: a node's keeper, and the watcher of the registry's journal.

The keeper is the process that holds memory across a page server's death; the watcher removes the
journal's directory when nobody needs it any more.

Facts, and what follows:

* A page server dies by ``kill -9`` at any moment, and its keeper must not notice. So the keeper is
  in a session of its own, a grandchild (its parent has left: nobody's zombie), and shares no
  descriptor with the page server but the socket that it is given later.
* Ray may kill a dead worker's children and process group. A grandchild in its own session is
  neither.
* It lives as long as the node, times the number of jobs. So it is a bare interpreter (no site, no
  Ray, no NumPy) that loads the compiled module by its path and never runs Python again.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

from clamor_ray._protocol.cause import cause_of
from clamor_ray.actors.process import journal_watcher

# Run by `python -I -S -c`. Loads first and forks then, so that what goes wrong in loading is told.
_PROGRAM = """
import importlib.util, os, sys
path, cffi_folder, name, watched, orphan_ns, is_part = sys.argv[1:]
sys.path.insert(0, cffi_folder)
spec = importlib.util.spec_from_file_location("clamor_ray._pagecache", path)
lib = importlib.util.module_from_spec(spec).lib
if os.fork():
    os._exit(0)
null = os.open(os.devnull, os.O_RDWR)
for fd in (0, 1, 2):
    os.dup2(null, fd)
if null > 2:
    os.close(null)
run = lib.pc_keeper_run_part if is_part == "1" else lib.pc_keeper_run
os._exit(1 if run(name.encode(), int(watched), int(orphan_ns)) else 0)
"""

START_S = 60.0
LOCK_S = 30.0
JOURNAL_ORPHAN_S = 600.0
WATCHER_POLL_S = 5.0
RESERVE_BYTES = 32 << 20  # of the disk that the journal is on: see journal_watcher


class KeeperError(RuntimeError):
    """The keeper could not be started; the text says what its interpreter said."""


def _file_of(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise KeeperError(f"{module} is not installed as a file")
    return Path(spec.origin)


def raylet_pid() -> int:
    """The raylet that this Ray worker belongs to; a keeper leaves when it ends.

    Raises:
        KeeperError: Neither Ray's own variable nor our parent names a raylet.
    """
    for candidate in (os.environ.get("RAY_RAYLET_PID", ""), str(os.getppid())):
        if not candidate.isdigit():
            continue
        try:
            comm = Path("/proc", candidate, "comm").read_text()
        except OSError:
            continue
        if comm.startswith("raylet"):
            return int(candidate)
    raise KeeperError(f"no raylet: neither RAY_RAYLET_PID nor process {os.getppid()} is one")


def spawn(
    listen_name: str, watched_pid: int, orphan_timeout_s: float, *, is_part: bool = False
) -> None:
    """Starts a keeper and returns when its process has loaded the library and stands alone.

    Args:
        listen_name: Path of its Unix socket.
        watched_pid: The keeper leaves when this process ends.
        orphan_timeout_s: It also leaves when no page server was connected for so long.
        is_part: It takes the place of one that died: a page server that comes before it was given
            everything is told so.

    Raises:
        KeeperError: It did not start within 60 s, or its interpreter failed.
    """
    _run(
        "-c",
        _PROGRAM,
        str(_file_of("clamor_ray._pagecache")),
        str(_file_of("_cffi_backend").parent),
        listen_name,
        str(watched_pid),
        str(int(orphan_timeout_s * 1e9)),
        "1" if is_part else "0",
    )


def hold_and_watch(
    directory: Path,
    watched_pid: int,
    orphan_s: float = JOURNAL_ORPHAN_S,
    poll_s: float = WATCHER_POLL_S,
    reserve_bytes: int = RESERVE_BYTES,
) -> int:
    """Marks a journal's directory as in use by this process, and sees to its end.

    A process is started, unless there is one, that removes the directory when ``watched_pid``
    ends, or when nobody has had it in use for ``orphan_s`` seconds; a driver that has called
    ``hold_for_driver`` has it in use, too. It leaves then, and within
    ``poll_s`` seconds when somebody else has removed the directory. While there is room it keeps
    ``reserve_bytes`` of the disk, and gives of them where the disk is full and who has it in use,
    or the page server beside it, must be started again.

    Returns:
        A descriptor; the directory is in use until it is closed, or this process ends.

    Raises:
        KeeperError: The watcher did not start.
        OSError: The directory is not there, or cannot be written.
    """
    fd = hold(directory / journal_watcher.REGISTRY_LOCK)
    try:
        for name in (journal_watcher.server_lock(watched_pid), journal_watcher.DRIVER_LOCK):
            os.close(os.open(directory / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        _run(
            journal_watcher.__file__,
            *(str(directory), str(watched_pid), str(orphan_s), str(poll_s), str(reserve_bytes)),
        )
    except BaseException:
        os.close(fd)
        raise
    return fd


def hold_beside(directory: Path) -> int | None:
    """What a page server holds while it lives, where the registry is on its node.

    Returns:
        As ``hold``; None where there is no such directory, or another raylet's.

    Raises:
        KeeperError, OSError: As from ``hold``.
    """
    with contextlib.suppress(FileNotFoundError):
        return hold(directory / journal_watcher.server_lock(raylet_pid()), flags=0)
    return None


def hold_for_driver(directory: Path) -> int | None:
    """What a driver holds from its session's beginning to its end: the journal stays meanwhile,
    however long the registry takes to be restarted. A child of ``os.fork`` does not hold it.

    Returns:
        A descriptor; the lock is held until it is closed, or this process ends. None where the
        directory is not to be seen here, or is no place for locks: then ``orphan_s`` counts alone.
    """
    with contextlib.suppress(OSError):
        fd = os.open(directory / journal_watcher.DRIVER_LOCK, os.O_RDWR | os.O_CLOEXEC)
        deadline = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            except OSError:  # a watcher looks, for a moment
                if time.monotonic() >= deadline:
                    os.close(fd)
                    break
            time.sleep(0.01)
    return None


def hold(path: Path, flags: int = os.O_CREAT) -> int:
    """Takes a lock that says that this process lives, and makes its file, unless ``flags`` is 0.

    Returns:
        A descriptor; the lock is held until it is closed, or this process ends.

    Raises:
        KeeperError: Another process has it for longer than an old one takes to die.
        OSError: Its directory is not there, or cannot be written.
    """
    fd = os.open(path, os.O_RDWR | flags | os.O_CLOEXEC, 0o600)
    try:
        deadline = time.monotonic() + LOCK_S
        while True:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return fd
            if time.monotonic() >= deadline:  # a watcher only looks, an old process dies soon
                raise KeeperError(f"{path} is in use by another process")
            time.sleep(0.01)
    except BaseException:
        os.close(fd)
        raise


def _run(*arguments: str) -> None:
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            close_fds=True,
            start_new_session=True,
            cwd="/",
            timeout=START_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as failure:
        raise KeeperError(f"cannot start a keeper: {cause_of(failure)}") from failure
    if done.returncode != 0:
        raise KeeperError(f"cannot start a keeper: {done.stderr.decode(errors='replace')}")
