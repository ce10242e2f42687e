"""What a disk does by itself: the rate of `dd`, and how often it syncs a block."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from bench.support.common import BLOCK_BYTES, note, now

BLOCK_SIZES = ("1M", "4M", "16M")
MOST_SOURCE_BYTES = 1 << 30
DD_S = 600.0
SYNCS_S = 2.0


def check_direct(directory: Path) -> None:
    """Ends the benchmark where the directory is on no disk."""
    probe = directory / "probe"
    try:
        os.close(os.open(probe, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o600))
    except OSError as error:
        raise SystemExit(f"bench: {directory} takes no O_DIRECT ({error.strerror})") from None
    finally:
        probe.unlink(missing_ok=True)


def dd_rate(directory: Path, n_bytes: int, block_sizes: tuple[str, ...] = BLOCK_SIZES) -> float:
    """Bytes per second of `dd oflag=direct,dsync` into a new file, at its best block size.

    What it writes does not compress: it is read from memory. Beyond 1 GiB the first GiB counts.
    """
    n_bytes = min(n_bytes, MOST_SOURCE_BYTES)
    source, target = Path(f"/dev/shm/bench-disk-{os.getpid()}"), directory / "dd"
    rates = []
    try:
        with source.open("wb") as file:
            piece = os.urandom(1 << 20)
            for _ in range(0, n_bytes, len(piece)):
                file.write(piece)
        for size in block_sizes:
            target.unlink(missing_ok=True)
            command = ["dd", f"if={source}", f"of={target}", f"bs={size}", "oflag=direct,dsync"]
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=DD_S,
                check=True,
                env={**os.environ, "LC_ALL": "C"},
            )
            # "N bytes (...) copied, SECONDS s, RATE"
            found = re.search(r"^(\d+) bytes .* copied, ([\d.e+-]+) s", done.stderr, re.MULTILINE)
            if found is None:
                raise SystemExit(f"bench: dd says {done.stderr!r}")
            rates.append(int(found[1]) / float(found[2]))
    finally:
        source.unlink(missing_ok=True)
        target.unlink(missing_ok=True)
    return max(rates)


def sync_rate(directory: Path, seconds: float = SYNCS_S) -> float:
    """How often in a second one thread can write a block of a file and have it on the disk."""
    path = directory / "syncs"
    block = os.urandom(BLOCK_BYTES)
    fd = os.open(path, os.O_CREAT | os.O_WRONLY, 0o600)
    try:
        for at in range(64):
            os.pwrite(fd, block, at * BLOCK_BYTES)
        os.fsync(fd)
        n, began = 0, now()
        while now() - began < seconds:
            os.pwrite(fd, block, n % 64 * BLOCK_BYTES)
            os.fdatasync(fd)
            n += 1
        return n / (now() - began)
    finally:
        os.close(fd)
        path.unlink()


def settle() -> None:
    """What others have written is on the disk before somebody is timed."""
    note("waiting for the disk")
    os.sync()
