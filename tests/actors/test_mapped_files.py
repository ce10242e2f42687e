"""Files that processes map."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

from clamor_ray.actors.node_store.mapped import id_of, mapped_files

HOLD = """
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
held = mmap.mmap(fd, 4096)
os.close(fd)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_file_is_mapped_as_long_as_another_process_maps_it(tmp_path: Path) -> None:
    path = tmp_path / "with a space"
    path.write_bytes(bytes(4096))
    fd = os.open(path, os.O_RDONLY)
    try:
        assert id_of(fd) not in mapped_files()
        with subprocess.Popen(
            [sys.executable, "-c", HOLD, str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == "held\n"
            assert id_of(fd) in mapped_files()
            path.rename(tmp_path / "elsewhere")
            assert id_of(fd) in mapped_files()
            holder.communicate("")
        assert id_of(fd) not in mapped_files()
    finally:
        os.close(fd)


def test_a_file_without_a_name_is_found(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.ftruncate(fd, 4096)
        with mmap.mmap(fd, 4096):
            assert id_of(fd) in mapped_files()
        assert id_of(fd) not in mapped_files()
    finally:
        os.close(fd)


def test_a_process_that_ends_meanwhile_is_nobody(tmp_path: Path) -> None:
    (tmp_path / "17").mkdir()
    (tmp_path / "self").mkdir()
    assert mapped_files(tmp_path) == set()
