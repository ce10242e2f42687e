"""Layers and bases as the engine makes them, for tests of a store's files."""

from __future__ import annotations

import contextlib
import os
import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from clamor_ray._native.base import BLOCK_BYTES
from clamor_ray._store.layer_files import LayerHead, data_offset_of, write_layer

Block = npt.NDArray[np.uint8]


def block_of(seed: int) -> Block:
    """A block of bytes that no other seed has."""
    return np.random.default_rng(seed).integers(0, 256, BLOCK_BYTES, np.uint8)


def runs_of(blocks: list[int]) -> list[tuple[int, int]]:
    """Runs of ascending blocks."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and sum(runs[-1]) == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs


def engine_layer(
    region: int, commit_id: int, content: Mapping[int, Block], flags: int = 0
) -> bytes:
    """The engine's file of a layer."""
    blocks = sorted(content)
    runs = runs_of(blocks)
    offset = data_offset_of(len(runs))
    head = LayerHead(region, commit_id, 0, len(blocks), offset, len(runs), flags)
    index = head.packed() + np.array(runs, "<u8").tobytes()
    data = b"".join(content[block].tobytes() for block in blocks)
    return index.ljust(offset, b"\0") + data


@contextlib.contextmanager
def memfd(content: bytes) -> Iterator[int]:
    fd = os.memfd_create("layer")
    try:
        os.write(fd, content)
        yield fd
    finally:
        os.close(fd)


def put_layer(
    directory: Path,
    region: int,
    commit_id: int,
    content: Mapping[int, Block],
    *,
    flags: int = 0,
    version: int = 0,
) -> Path:
    """A layer's file in a page server's directory."""
    layer = engine_layer(region, commit_id, content, flags)
    with memfd(layer) as fd:
        return write_layer(directory, region, commit_id, fd, len(layer), version=version)


@contextlib.contextmanager
def base_file(directory: Path, content: Mapping[int, Block], n_blocks: int) -> Iterator[int]:
    """A base without a name, on the file system of the directory."""
    fd = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
    try:
        os.ftruncate(fd, n_blocks * BLOCK_BYTES)
        for block, data in content.items():
            os.pwrite(fd, data.tobytes(), block * BLOCK_BYTES)
        yield fd
    finally:
        os.close(fd)


class Crash(BaseException):
    """The process is dead from here on."""


class Crashes:
    """Ends the process, as far as its files are concerned, at the n-th change of them.

    Args:
        patch: pytest's.
        seed: of how much of the last write is there.
    """

    CHANGES = ("pwrite", "fdatasync", "fsync", "rename", "unlink", "link", "ftruncate")

    def __init__(self, patch: pytest.MonkeyPatch, seed: int = 0) -> None:
        self._random = random.Random(seed)
        self.at = 0
        self.n = 0
        for name in self.CHANGES:
            patch.setattr(os, name, self._counted(name, getattr(os, name)))

    def _counted(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **named: Any) -> Any:
            self.n += 1
            if self.at and self.n >= self.at:
                if self.n == self.at and name == "pwrite":
                    fd, data, offset = args
                    call(fd, data[: self._random.randrange(len(data) + 1)], offset)
                raise Crash
            return call(*args, **named) if "sync" not in name else None

        return counted

    def never(self) -> None:
        self.at = self.n = 0

    def after(self, n: int) -> None:
        """The n-th change is the last, and maybe a part of one."""
        self.at, self.n = n, 0
