"""What Python tells an engine of members of a group, and the blocks that come of it.

No Ray: an engine in this process is a page server. It is the home of the members; the region's own
home is lost.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest

from clamor_ray import errors
from clamor_ray._native import client as _native

BASE = 0x1300_0000_0000
LENGTH = 32 * _native.BLOCK_BYTES
HOME_LOST = -7
HERE, LOST = 1, 2
REGION, ONE, OTHER = 7, 8, 9
CONTENT = np.random.default_rng(5).integers(0, 256, LENGTH, np.uint8)
HALF = np.random.default_rng(6).integers(0, 256, LENGTH // 2, np.uint8)


@pytest.fixture
def name() -> str:
    return f"clamor-test-{secrets.token_hex(6)}"


@pytest.fixture
def engine(name: str) -> Iterator[_native.Engine]:
    engine = _native.Engine(name, server_id=HERE, history_directory="/tmp")
    yield engine
    engine.stop()


def add_member(engine: _native.Engine, region: int, content: npt.NDArray[np.uint8]) -> None:
    base = BASE + (region << 32)
    segment = _native.Segment(0, len(content), content.ctypes.data)
    os.close(engine.create_shared(region, 0, base, len(content), [segment]))
    engine.seal(region)


class Registry(threading.Thread):
    """Answers the engine until it is told to stop."""

    def __init__(self, engine: _native.Engine, members: list[tuple[int, int, int]], mirror: bool):
        super().__init__()
        self.engine, self.members, self.is_mirror = engine, members, mirror
        self.asked: list[tuple[int, int]] = []
        self.ends = threading.Event()

    def run(self) -> None:
        while not self.ends.wait(0.002):
            while (event := self.engine.next_event()) is not None:
                if event.kind == _native.EVENT_NEED_PEER:
                    self.engine.peer_lost(event.server_id, HOME_LOST)
                elif event.kind == _native.EVENT_NEED_REPAIR:
                    self.asked.append((event.region, event.version))
                    self.engine.set_repair(
                        event.region, event.version, self.members, self.is_mirror
                    )


@pytest.mark.parametrize("is_mirror", [True, False])
@pytest.mark.parametrize("is_told_later", [True, False])
def test_the_engine_makes_it_again(engine, name, is_mirror: bool, is_told_later: bool) -> None:
    padded = np.concatenate((HALF, np.zeros(LENGTH - len(HALF), np.uint8)))
    one = CONTENT if is_mirror else CONTENT ^ padded
    add_member(engine, ONE, one)
    add_member(engine, OTHER, HALF)
    members = [(ONE, 0, HERE)] if is_mirror else [(ONE, 0, HERE), (OTHER, 0, HERE)]
    engine.define_region(REGION, 3, BASE, LENGTH, (LOST,), has_repair=not is_told_later)
    if is_told_later:
        engine.region_has_repair(REGION, True)
    registry = Registry(engine, members, is_mirror)
    registry.start()
    client = _native.Client(name)
    try:
        mapping = client.map(REGION, 3, BASE, LENGTH)
        client.prefetch(mapping.id, [(0, 32)], timeout_s=20)
        raw = (ctypes.c_uint8 * LENGTH).from_address(mapping.address)
        assert np.array_equal(np.frombuffer(raw, np.uint8), CONTENT)
        assert registry.asked == [(REGION, 3)]
        stats = engine.stats()
        assert stats["degraded_blocks"] + stats["mirror_blocks"] == 32
        client.unmap(mapping.id)
    finally:
        client.close()
        registry.ends.set()
        registry.join()


def test_nonsense_is_refused(engine) -> None:
    engine.define_region(REGION, 3, BASE, LENGTH, (LOST,))
    with pytest.raises(errors.RangeError, match="1 members of the group of variable 7"):
        engine.set_repair(REGION, 3, [(REGION, 3, LOST)], False)
    with pytest.raises(errors.FreedError):
        engine.set_repair(99, 3, [], False)
    with pytest.raises(errors.FreedError):
        engine.region_has_repair(99, True)
    engine.set_repair(REGION, 3, [], False)
