"""A page server's reads of files: threads, errors, files that are elsewhere. No cluster."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from clamor_ray import errors
from clamor_ray._files.describe import describe
from clamor_ray._files.spec import FileSpec
from clamor_ray._native import client as native
from clamor_ray._objects.layout import BLOCK_BYTES
from clamor_ray._protocol.source import Source
from clamor_ray.actors.page_server import file_reads
from clamor_ray.actors.page_server.file_reads import FileReads
from tests.conftest import until

REGION = 7


class Engine:
    """Ranges that are to be read, and what has come of them."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.wanted: deque[native.FileRead] = deque()
        self.urgent: deque[native.FileRead] = deque()
        self.got: dict[int, bytes] = {}
        self.ended: dict[int, tuple[int, str]] = {}
        self.given_up: set[int] = set()
        self.before_none: Any = lambda: None

    def ask(self, read_id: int, first_block: int, n_blocks: int) -> None:
        self.wanted.append(native.FileRead(read_id, REGION, first_block, n_blocks, False))

    def file_next(self, only_urgent: bool = False) -> native.FileRead | None:
        if self.urgent:
            return self.urgent.popleft()
        if only_urgent or not self.wanted:
            self.before_none()
            return None
        return self.wanted.popleft()

    def file_fill(self, read_id: int, image: Any) -> None:
        if read_id in self.given_up:
            raise errors.FreedError("It was given up.")
        with self.lock:
            self.got[read_id] = self.got.get(read_id, b"") + bytes(image)

    def file_end(self, read_id: int, error: int = 0, text: str = "") -> None:
        with self.lock:
            self.ended[read_id] = (error, text)


def spec_of(path: Path, node_id: str) -> FileSpec:
    spec, _ = describe(path, dtype="u1", node_id=node_id)
    return spec


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "x.bin"
    path.write_bytes(bytes(range(256)) * 4000 + b"the end")
    return path


def reads_of(engine: Engine, source: Source | None, **how: Any) -> FileReads:
    def nobody(*where: Any) -> bytes:
        raise AssertionError("another node was asked")

    ask_node = how.get("ask_node", nobody)
    return FileReads(engine, lambda region: source, how.get("node_id", "here"), ask_node)


def test_ranges_come_whole_and_in_blocks(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_reads, "PART_BYTES", 5 * BLOCK_BYTES)
    engine, spec = Engine(), spec_of(path, "here")
    reads = reads_of(engine, spec.source())
    whole = path.read_bytes()
    image = whole.ljust(spec.tail_offset, b"\0") + spec.tail
    image = image.ljust(-(-len(image) // BLOCK_BYTES) * BLOCK_BYTES, b"\0")
    n_blocks = len(image) // BLOCK_BYTES
    ranges = [(0, 1), (3, 17), (n_blocks - 2, 2), (n_blocks - 1, 1)]
    for number, each in enumerate(ranges):
        engine.ask(number, *each)
        reads.wanted()
    until(lambda: len(engine.ended) == len(ranges))
    reads.close()
    assert set(engine.ended.values()) == {(0, "")}
    for number, (first, n) in enumerate(ranges):
        begin = first * BLOCK_BYTES
        assert engine.got[number] == image[begin : begin + n * BLOCK_BYTES]


def test_no_range_stays_when_a_thread_ends(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One comes just when the last thread has found none."""
    monkeypatch.setattr(file_reads, "AT_ONCE", 1)
    engine = Engine()
    reads = reads_of(engine, spec_of(path, "here").source())
    asked = threading.Event()

    def late() -> None:
        if not asked.is_set():
            asked.set()
            engine.ask(1, 1, 1)
            tells = threading.Thread(target=reads.wanted)
            tells.start()
            tells.join(0.2)  # it waits for us, if it must

    engine.before_none = late
    engine.ask(0, 0, 1)
    reads.wanted()
    until(lambda: set(engine.ended) == {0, 1})
    reads.close()


def test_bulk_leaves_threads_to_who_is_stopped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_reads, "AT_ONCE", 3)
    monkeypatch.setattr(file_reads, "BULK_AT_ONCE", 2)
    engine, hangs = Engine(), threading.Event()
    source = spec_of(path, "elsewhere").source()

    def ask_node(node_id: str, region: int, offset: int, n_bytes: int) -> bytes:
        if offset:
            assert hangs.wait(20)
        return bytes(n_bytes)

    path.unlink()
    reads = reads_of(engine, source, ask_node=ask_node)
    for number in range(1, 5):
        engine.ask(number, number, 1)
        reads.wanted()
    engine.urgent.append(native.FileRead(9, REGION, 0, 1, True))
    reads.wanted()
    until(lambda: set(engine.ended) == {9})
    hangs.set()
    until(lambda: len(engine.ended) == 5)
    reads.close()


def test_each_failure_has_its_code(path: Path) -> None:
    engine, source = Engine(), spec_of(path, "here").source()
    path.write_bytes(b"something else")
    reads = reads_of(engine, source)
    engine.ask(1, 0, 1)
    reads.wanted()
    until(lambda: 1 in engine.ended)
    code, text = engine.ended[1]
    assert code == native.PC_ERR_FILE_CHANGED
    assert str(path) in text
    assert not engine.got
    gone = reads_of(engine, None)
    engine.ask(2, 0, 1)
    gone.wanted()
    until(lambda: 2 in engine.ended)
    assert engine.ended[2][0] == native.PC_ERR_NO_REGION
    reads.close()
    gone.close()


def test_what_was_given_up_is_let_go(path: Path) -> None:
    engine = Engine()
    engine.given_up.add(1)
    reads = reads_of(engine, spec_of(path, "here").source())
    engine.ask(1, 0, 1)
    engine.ask(2, 1, 1)
    reads.wanted()
    until(lambda: 2 in engine.ended)
    assert len(engine.got[2]) == BLOCK_BYTES
    assert 1 not in engine.got
    reads.close()


def test_a_file_that_is_on_another_node_is_asked_for_there(path: Path) -> None:
    engine, spec = Engine(), spec_of(path, "there")
    there = reads_of(Engine(), spec.source(), node_id="there")
    asked: list[tuple[Any, ...]] = []

    def ask_node(node_id: str, *where: int) -> bytes:
        asked.append((node_id, *where))
        return there.read_for_others(*where)

    content = path.read_bytes()
    reads = reads_of(engine, spec.source(), ask_node=ask_node)
    engine.ask(1, 0, 1)
    reads.wanted()
    until(lambda: 1 in engine.ended)
    assert not asked  # the same file is here: a shared file system
    other = path.with_name("other")
    path.rename(other)
    path.write_bytes(content)  # a file of that name is here, and is another one
    engine.ask(2, 2, 1)
    reads.wanted()
    until(lambda: 2 in engine.ended)
    assert asked == [("there", REGION, 2 * BLOCK_BYTES, BLOCK_BYTES)]
    assert engine.ended[2][0] == native.PC_ERR_FILE_CHANGED  # as that node says
    reads.close()
    there.close()


def test_it_ends(path: Path) -> None:
    engine = Engine()
    reads = reads_of(engine, spec_of(path, "here").source())
    reads.close()
    engine.ask(1, 0, 1)
    reads.wanted()
    assert len(engine.wanted) == 1
