"""What tasks of programs that learn run. Every worker imports this, so it imports little."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

import clamor_ray as clamor

from ..data.rows import Documents, Float64, LabelledRows
from ..models import linear, topics
from ..models.topics import Prior

__all__ = ["Gradient", "Look", "add", "segment"]

BLOCK_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Gradient:
    """A partition's share: what tasks fold its items with.

    Args:
        weights: the variable, at the version at which the stage begins.
        loss, positive: see `linear.accumulate`.
    """

    weights: clamor.GlobalRef[Float64]
    loss: str
    positive: float

    def __call__(self, total: Float64 | None, rows: LabelledRows) -> Float64:
        weights = self.weights.get()
        if total is None and len(rows.columns) >= weights.nbytes // BLOCK_BYTES:
            _prefetch(self.weights)
        return linear.accumulate(total, rows, weights, self.loss, self.positive)


@dataclasses.dataclass(frozen=True)
class Look:
    """A partition's share: what tasks fold its items with.

    Args:
        weights: the variable, at the version at which the stage begins.
        prior: of the model.
        share, seed, number: which documents the iteration looks at.
    """

    weights: clamor.GlobalRef[Float64]
    prior: Prior
    share: float
    seed: int
    number: int

    def __call__(self, total: Float64 | None, documents: Documents) -> Float64:
        weights = self.weights.get()
        among = topics.chosen(documents, self.share, self.seed, self.number)
        per_document = np.diff(documents.first)
        used = documents.words[np.repeat(among, per_document)]
        words = np.unique(used)
        rows: Any = documents.words
        table: Float64 = weights
        if len(words) >= len(weights) // 4:
            _prefetch(self.weights)
        else:
            table = clamor.gather(weights, words)
            # Of words that nobody looks at it does not matter where they are.
            rows = np.searchsorted(words, documents.words)
        return topics.accumulate(total, documents, rows, table, len(weights), self.prior, among)


def segment(array: Float64, i: int, n: int) -> Float64:
    """The i-th of n parts of an array, all about as long."""
    return array[len(array) * i // n : len(array) * (i + 1) // n]


def add(one: Float64 | None, other: Float64) -> Float64:
    """Of a tree's node: in place where that is possible."""
    if one is None:
        return other
    if not one.flags.writeable:  # it lies in Ray's store
        return np.add(one, other)
    one += other
    return one


def _prefetch(variable: clamor.GlobalRef[Float64]) -> None:
    """Most of it will be used, and all is new: one batch instead of a fault a page."""
    if not variable._inline:  # a small one came with its reference
        clamor.prefetch(variable.get())
