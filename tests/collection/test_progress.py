"""Bars of stages: where a terminal is, and nowhere else."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
import threading

import pytest

SCRIPT = """
import time
import ray
import clamor_ray as clamor

def by_default(x):
    time.sleep(0.2)
    return x

def wanted(x):
    return x

def unwanted(x):
    return x

ray.init(address="local", include_dashboard=False, num_cpus=1)
clamor.init()
items = clamor.from_items(range(4), partitions=4)
for function, progress in ((by_default, None), (wanted, True), (unwanted, False)):
    assert items.options(progress=progress).map(function).execute().count() == 4
"""


def stderr_of_driver(*, terminal: bool) -> str:
    """What it says while three stages of four tasks run."""
    environment = dict(os.environ)
    environment.pop("RAY_ADDRESS", None)
    ours, theirs = pty.openpty() if terminal else os.pipe()
    if terminal:
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    said: list[bytes] = []

    def listen() -> None:
        while True:
            try:
                some = os.read(ours, 65536)
            except OSError:  # a terminal whose other side is closed
                return
            if not some:
                return
            said.append(some)

    listener = threading.Thread(target=listen)
    listener.start()
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=theirs,
    )
    os.close(theirs)
    try:
        code = process.wait(120)
    finally:
        process.kill()
        listener.join(10)
        os.close(ours)
    text = b"".join(said).decode(errors="replace")
    assert code == 0, text
    return text


@pytest.mark.lab
@pytest.mark.parametrize("terminal", [True, False])
def test_bars(terminal: bool) -> None:
    text = stderr_of_driver(terminal=terminal)
    assert "map(wanted)" in text, text
    assert "/4.00" in text, text
    assert "map(unwanted)" not in text, text
    assert ("map(by_default)" in text) == terminal, text
