"""How far a stage is, or a program: a bar where a terminal is, lines in a log."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import threading

import pytest

from clamor_ray._observe.progress import LINE_S, ProgressLines
from tests.conftest import ClamorCluster
from tests.support.lab import LocalCluster

SCRIPT = """
import time
import ray
import clamor_ray as clamor
from clamor_ray._observe import progress as of_stages

of_stages.LINE_S = 0.3

def by_default(x):
    time.sleep(0.3)
    return x

def by_default_too(part, n):
    return by_default(n)

def wanted(x):
    return by_default(x)

def unwanted(x):
    return by_default(x)

ray.init()
clamor.init()
items = clamor.from_items(range(4), partitions=4)
for function, progress in ((by_default, None), (wanted, True), (unwanted, False)):
    assert items.options(progress=progress).map(function).execute().count() == 4

program = clamor.Program()
rounds = program.value(0)
with program.loop(max=8):
    program.stage(lambda t, n: by_default(n) + 1, writes=[rounds])
job = program.run()
assert job.result(rounds) == 8
job.stop()
quiet = items.options(progress=False)
assert quiet.iterate(0, map=by_default_too, update=lambda n, _: n + 1, max=5) == 5
"""


def stderr_of_driver(lab: LocalCluster, *, terminal: bool) -> str:
    """What it says while three stages of four tasks run, and a program of eight rounds."""
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
        env={**os.environ, **lab.environment},
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
def test_bars(terminal: bool, clamor_cluster: ClamorCluster) -> None:
    text = stderr_of_driver(clamor_cluster.lab, terminal=terminal)
    assert "map(unwanted)" not in text, text
    for name in ("map(by_default)", "map(wanted)"):
        lines = re.findall(rf"^{re.escape(name)}: \d of 4 \(\d+ s\)$", text, re.MULTILINE)
        assert name in text, text
        assert bool(lines) != terminal, text
    assert ("/4.00" in text) == terminal, text
    assert terminal or "\r" not in text, text  # in a file that is one line without end
    rounds = re.findall(r"^program, rounds: \d of 8 \(\d+ s\), \S+ tasks/s", text, re.MULTILINE)
    assert bool(rounds) != terminal, text
    assert not re.search(r"of 5|/5\.00", text), text
    assert ("8.00/8.00" in text and "rounds/s" in text) == terminal, text


def test_a_log_is_told_every_few_seconds() -> None:
    now_s, said = 100.0, list[str]()
    lines = ProgressLines(said.append, "x", 2000, clock=lambda: now_s)
    endless = ProgressLines(said.append, "y", None, clock=lambda: now_s)
    lines.at(1)
    now_s += LINE_S - 0.1
    lines.at(999)
    assert said == []
    now_s += 0.1
    for each in (lines, lines, endless):
        each.at(1000)
    assert said == ["x: 1,000 of 2,000 (5 s)", "y: 1,000 (5 s)"]
    now_s += LINE_S
    lines.at(1000)  # nothing more is done: it goes on
    assert said[2:] == ["x: 1,000 of 2,000 (10 s)"]
