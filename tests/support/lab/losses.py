"""Variables of one node that is to lose its memory, and what must be left of each."""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import clamor_ray as clamor
from clamor_ray import errors
from tests.support.lab.histories import PER_BLOCK, Array

N_BLOCKS = 300
N_READ = 40  # blocks that another node has of a variable that is lost
CHANGED = slice(7 * PER_BLOCK, 9 * PER_BLOCK)
LOOK_S = 240.0


def numbered(first: int) -> Array:
    """No block is like another one, or like those of another variable."""
    return np.arange(first, first + N_BLOCKS * PER_BLOCK, dtype=np.int64)


def changed(first: int) -> Array:
    array = numbered(first)
    array[CHANGED] = -first
    return array


def empty(first: int) -> Array:
    del first
    return np.zeros(N_BLOCKS * PER_BLOCK, np.int64)


def put(first: int, with_source: bool) -> Any:
    if with_source:
        return clamor.put(numbered(first), source=functools.partial(numbered, first))
    return clamor.put(numbered(first))


def put_zeros() -> Any:
    return clamor.zeros(N_BLOCKS * PER_BLOCK, np.int64)


def change(refs: list[Any], first: int) -> None:
    with clamor.update(refs[0]._latest()) as array:
        array[CHANGED] = -first


def touch(refs: list[Any], n_blocks: int) -> int:
    return int(refs[0].get()[: n_blocks * PER_BLOCK : PER_BLOCK].sum())


def look(refs: list[Any], expected: Callable[[int], Array], first: int) -> str:
    """Says "right", or what is wrong with it, or how its loss is said; where nobody can say yet, it
    asks again. A process that touches a block before the loss is known may end: Ray runs it again.
    """
    deadline = time.monotonic() + LOOK_S
    while True:
        try:
            array = refs[0]._latest().get()
            clamor.prefetch(array)  # a touch of a lost block would end the process
            wrong = np.flatnonzero(array != expected(first))
            return f"wrong from {wrong[0]} on, {len(wrong)} in all" if len(wrong) else "right"
        except errors.HomeLostError as lost:
            return f"lost: {lost}"
        except (errors.ServerUnavailableError, errors.WaitTimeoutError):
            if time.monotonic() > deadline:
                raise
        time.sleep(0.1)


@dataclass(frozen=True)
class Fate:
    """A variable that was homed on the node, and what must become of it.

    Args:
        name: what kind it is, for messages.
        ref: the variable.
        expected, first: its newest bytes.
        had_blocks: that other nodes have, where that decides: N_BLOCKS, or less if it is lost.
    """

    name: str
    ref: Any
    expected: Callable[[int], Array]
    first: int
    had_blocks: int = N_BLOCKS

    def holds(self, answer: str) -> bool:
        """Whether it is right, or, with blocks that only the node had, said to be lost."""
        if self.had_blocks == N_BLOCKS:
            return answer == "right"
        what = rf"Blocks of variable {self.ref._region} are lost:"
        if not self.had_blocks:
            what = rf"Variable {self.ref._region} is lost:"
        said = re.search(what + r".* (\d+) of (\d+) blocks", answer)
        return said is not None and 0 < int(said[1]) <= int(said[2]) - self.had_blocks
