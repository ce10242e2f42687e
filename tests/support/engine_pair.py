"""Two page servers' engines in this process, one with a home and one that may take it. No Ray."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import threading
from collections.abc import Iterator

import numpy as np
from pyroaring import BitMap

from clamor_ray._native import client as _native
from clamor_ray._protocol.messages import LookupAnswer, RegionRecord, RegionUnknown
from clamor_ray.actors.page_server.engine_like import EventKind
from clamor_ray.actors.page_server.moved_homes import MovedHomes

BLOCK = 4096
N_BLOCKS = 64
GIVER, TAKER = 0xA, 0xB
HERE = RegionRecord(7, 0, 0x1300_0000_0000, N_BLOCKS * BLOCK, (GIVER,))
THERE = RegionRecord(7, 0, 0x1300_0000_0000, N_BLOCKS * BLOCK, (TAKER,), term=2)
DATA = BitMap([*range(3, 9), 40])
NONE = b""


def content(blocks: BitMap, seed: int) -> dict[int, bytes]:
    random = np.random.default_rng(seed)
    return {block: random.bytes(BLOCK) for block in blocks}


class Server:
    """An engine, and the part of its page server that moves homes."""

    def __init__(self, server_id: int) -> None:
        name = f"clamor-test-{secrets.token_hex(6)}"
        self.engine = _native.Engine(name, server_id=server_id, history_directory="/tmp")
        self.answer: LookupAnswer | Exception = RegionUnknown(7)
        self.unpinned: list[int] = []
        self._pulling = threading.Lock()
        self.moved = MovedHomes(
            self.engine, self.pull, self.look_up, self.rehome, self.unpinned.append
        )

    def pull(self, commit_id: int, region: int, from_server: int, layer_bytes: int) -> None:
        """One at a time: who waits takes all events."""
        with self._pulling:
            self._pull(commit_id, region, from_server, layer_bytes)

    def _pull(self, commit_id: int, region: int, from_server: int, layer_bytes: int) -> None:
        self.engine.pull(region, commit_id, from_server, layer_bytes)
        while select.select([self.engine.fileno()], [], [], 10.0)[0]:
            while (event := self.engine.next_event()) is not None:
                if event.kind == EventKind.PULLED:
                    assert (event.commit_id, event.error) == (commit_id, 0)
                    return
        raise AssertionError("it was not pulled")

    def look_up(self, region: int) -> LookupAnswer:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def define(self, record: RegionRecord) -> None:
        self.engine.define_region(
            *(record.region, record.version, record.base_address, record.length_bytes),
            *(record.homes, record.loss, record.term),
        )

    def rehome(self, record: RegionRecord) -> None:
        if self.engine.server_id in record.homes:
            self.define(record)
        self.engine.set_homes(record.region, record.homes, record.term)
        self.moved.told(record)
        self.engine.wait_for_keeper()

    @property
    def is_home(self) -> bool:
        return any(found["is_home"] for found in self.engine.region_stats())


def prepared() -> int:
    """Files that are as long as the region and that this process has open."""
    n_files = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            n_files += os.stat(f"/proc/self/fd/{fd}").st_size == HERE.length_bytes
        except FileNotFoundError:
            continue  # that of the listing itself
    return n_files


def connect(one: Server, other: Server) -> None:
    """So that the second fetches layers from the first."""
    for lane in range(other.engine.peer_lanes):
        ours, theirs = socket.socketpair()
        one.engine.serve(other.engine.server_id, theirs.detach())
        other.engine.add_peer(one.engine.server_id, lane, ours.detach())


def blocks_at(server: Server, version: int = 0) -> dict[int, bytes]:
    """What a home has, read out of a layer of it."""
    found = BitMap.deserialize(server.moved.home_blocks(7, version))
    n_bytes = server.moved.stage_home(7, version, 99, bytes(found.serialize()))
    other = Server(0xC)
    try:
        connect(server, other)
        fd = other.engine.rebuild_begin(7, 0, HERE.base_address, HERE.length_bytes, [])
        other.pull(99, 7, server.engine.server_id, n_bytes)
        other.engine.rebuild_take(7, fd, 99)
        read = {block: os.pread(fd, BLOCK, block * BLOCK) for block in found}
        os.close(fd)
        return read
    finally:
        server.moved.drop_layers(7, [99])
        other.engine.stop()


@contextlib.contextmanager
def engine_pair() -> Iterator[tuple[Server, Server]]:
    """The giver has the home, with data in some blocks. Each can fetch from the other."""
    giver, taker = Server(GIVER), Server(TAKER)
    try:
        fd = giver.engine.create_shared(7, 0, HERE.base_address, HERE.length_bytes, [])
        for block, found in content(DATA, 1).items():
            _native.copy_in(fd, block * BLOCK, memoryview(found))
        os.close(fd)
        giver.engine.seal(7)
        connect(giver, taker)
        connect(taker, giver)
        yield giver, taker
    finally:
        for server in (giver, taker):
            server.moved.close()
            server.engine.stop()
