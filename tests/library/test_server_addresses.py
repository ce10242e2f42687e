"""A page server that may have no more maps, or addresses: it is not told as a want of memory."""

from __future__ import annotations

import os
import resource
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clamor_ray import errors
from clamor_ray._native import client as _native

BASE = 0x1300_0000_0000
LENGTH = 4 << 30  # addresses only: no block of it is written
REGION, ELSEWHERE = 7, 8
SPARE_BYTES = 64 << 20

SERVER = f"""
import sys
from clamor_ray._native import client as _native
engine = _native.Engine(sys.argv[1], server_id=1, history_directory="/tmp")
engine.define_region({ELSEWHERE}, 0, {BASE + LENGTH}, {LENGTH}, (2,) * {LENGTH >> 26})
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def client() -> Iterator[_native.Client]:
    """Of a page server in a process that has few addresses left."""
    name = f"clamor-test-{secrets.token_hex(6)}"
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert server.stdin
    assert server.stdout
    try:
        assert server.stdout.readline() == b"ready\n"
        client = _native.Client(name, connect_timeout_s=30.0)
        pages = int(Path(f"/proc/{server.pid}/statm").read_text().split()[0])
        most = pages * os.sysconf("SC_PAGE_SIZE") + SPARE_BYTES
        resource.prlimit(server.pid, resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        yield client
        client.close()
    finally:
        server.stdin.close()
        server.wait(30)


def check(refused: errors.ClamorError, region: int) -> None:
    assert f"variable {region}" in refused.message
    assert "at the page server of this node: mmap of a " in refused.message
    assert "vm.max_map_count" in refused.hint
    assert "larger node" not in str(refused)


def test_no_map_for_a_home(client: _native.Client) -> None:
    with pytest.raises(errors.OutOfMemoryError) as failure:
        client.build(REGION, BASE, LENGTH)
    check(failure.value, REGION)


def test_no_map_for_a_version(client: _native.Client) -> None:
    if client.trap != "uffd":
        pytest.skip("the page server inserts by userfaultfd only where it may")
    with pytest.raises(errors.OutOfMemoryError) as failure:
        client.map(ELSEWHERE, 0, BASE + LENGTH, LENGTH)
    check(failure.value, ELSEWHERE)
