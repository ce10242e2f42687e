"""Sparse logistic regression: rows that everyone can generate, and the arithmetic. No Ray here.

A row is 39 features of the value one; which parameter each has is its *id*. The loss is the mean
of log(1 + exp(-s)) over rows with the label 1, and of log(1 + exp(s)) over the others, where s is
the sum of the row's weights. One step of synchronous SGD takes every weight down along the gradient
of that mean over the rows of the step.

Ids are a matter of the order of a dictionary: the most frequent key is 0. So parameters that are
used together lie together, a block of 4 KiB that is touched at all is used for the most part, and
what nobody has seen is nowhere allocated. Of keys that are equally frequent those come first that
are met first: rare ones of the same rows are neighbours.

Neighbours in this order are dealt out to stripes of the variable (`ParameterLayout`), a block to
each in turn: a variable that is spread has its parts at different homes, so the hot ones are not
all at one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..data.criteo import N_FEATURES, N_NUMERIC, CriteoRows, UInt64, hashed, keys_of
from ..data.errors import WrongWeights

__all__ = [
    "RowBlock",
    "Distinct",
    "ParameterLayout",
    "Synthetic",
    "assign",
    "block_of",
    "check",
    "distinct",
    "folded",
    "gradient",
    "log_losses",
    "reference",
    "scores",
]

Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]

BLOCK_PARAMETERS: Final = 1024  # float32, of 4 KiB
USED_OF_BLOCK: Final = 128  # parameters of a block, on average, from which on blocks are read whole
MOST_RUNS: Final = 1024  # of blocks
STRIPES: Final = 64
MOST_PARAMETERS: Final = (1 << 31) - 1
NUMERIC_VALUES: Final = 120  # of a generated numeric feature, as buckets leave them

# Distinct values of the categorical columns of Criteo's week of display advertising.
CARDINALITIES: Final = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)


# ------------------------------------------------------------------ generated rows


@dataclasses.dataclass(frozen=True)
class Synthetic:
    """Rows of the Criteo schema that everyone can generate, partition by partition.

    Args:
        n_rows: in all.
        n_partitions: into which they are cut, about evenly.
        n_values: that the features can have, all together, about: Criteo's numbers, those of the
            columns with more than a hundred scaled.
        skew: exponent of the Zipf distribution of each feature's values; 0: all are as likely.
        seed: of the draw, and of the true weights.
        even: every feature can have as many values (Clamor 7.1.2, with a skew of 0).
    """

    n_rows: int
    n_partitions: int
    n_values: int
    skew: float = 1.1
    seed: int = 1
    even: bool = False

    def size_of(self, number: int) -> int:
        """Rows of a partition."""
        edges = [self.n_rows * i // self.n_partitions for i in (number, number + 1)]
        return edges[1] - edges[0]

    def values(self) -> list[int]:
        """How many values each of the 39 features can have."""
        if self.even:
            return [max(1, self.n_values // N_FEATURES)] * N_FEATURES
        scaled = [n for n in CARDINALITIES if n > 100]
        fixed = N_NUMERIC * NUMERIC_VALUES + sum(CARDINALITIES) - sum(scaled)
        factor = max(0, self.n_values - fixed) / sum(scaled)
        categorical = [max(2, int(n * factor)) if n > 100 else n for n in CARDINALITIES]
        return [NUMERIC_VALUES] * N_NUMERIC + categorical

    def ranks(self, number: int) -> Int64:
        """Which value each row has, the most likely is 0; shape (39, size_of(number))."""
        rng = np.random.default_rng([self.seed, number])
        n = self.size_of(number)
        drawn = [_zipf(rng.random(n), n_values, self.skew) for n_values in self.values()]
        return np.array(drawn, np.int64).reshape(N_FEATURES, n)

    def partition(self, number: int) -> CriteoRows:
        """The rows of a partition; labels are drawn with the true weights' chances."""
        ranks = self.ranks(number)
        rng = np.random.default_rng([self.seed, number, 1])
        keys = np.empty(ranks.shape, np.uint64)
        total = np.full(ranks.shape[1], -1.0)
        for feature, of_feature in enumerate(ranks):
            keys[feature] = keys_of(feature, of_feature.astype(np.uint64))
            total += self.true_weights(keys[feature])
        labels = rng.random(ranks.shape[1]) < 1.0 / (1.0 + np.exp(-total))
        return CriteoRows(labels.astype(np.uint8), keys)

    def true_weights(self, keys: UInt64) -> Float64:
        """The weights that labels are drawn with, -0.5 to 0.5, the same in every process."""
        chance = hashed(keys ^ np.uint64(self.seed)) >> np.uint64(11)
        found: Float64 = chance.astype(np.float64) / (1 << 53) - 0.5
        return found

    def save(self, folder: Path) -> list[Path]:
        """Writes ``rows-00000.tsv`` and so on, one file a partition, in the format of Criteo."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for number in range(self.n_partitions):
            ranks, labels = self.ranks(number), self.partition(number).labels
            words = hashed(ranks[N_NUMERIC:].astype(np.uint64)) & np.uint64(0xFFFFFFFF)
            path = folder / f"rows-{number:05}.tsv"
            with path.open("w") as out:
                for row in range(len(labels)):
                    fields = [str(labels[row]), *map(str, ranks[:N_NUMERIC, row])]
                    fields += [f"{word:08x}" for word in words[:, row]]
                    out.write("\t".join(fields) + "\n")
            paths.append(path)
        return paths


def _zipf(uniform: Float64, n_values: int, skew: float) -> Int64:
    """Ranks of the power law with that exponent, by the inverse of its continuous form."""
    if skew == 1.0:
        found = np.exp(uniform * np.log1p(n_values))
    else:
        power = 1.0 - skew
        found = (1.0 + uniform * ((1.0 + n_values) ** power - 1.0)) ** (1.0 / power)
    ranks: Int64 = np.clip(found.astype(np.int64) - 1, 0, n_values - 1)
    return ranks


# ------------------------------------------------------------------ ids


@dataclasses.dataclass(frozen=True)
class ParameterLayout:
    """Where parameters are in an array of float32: a block to each of its stripes in turn.

    Args:
        n_parameters: in all.
        n_stripes: of equal length.
    """

    n_parameters: int
    n_stripes: int = STRIPES

    def __post_init__(self) -> None:
        if not 0 < self.n_parameters <= MOST_PARAMETERS or self.length > MOST_PARAMETERS + 1:
            raise ValueError(
                f"there are 1 to {MOST_PARAMETERS:,} parameters, with what stripes leave empty"
            )

    @property
    def stripe_length(self) -> int:
        """Elements of each stripe."""
        n_blocks = -(-self.n_parameters // BLOCK_PARAMETERS)
        return -(-n_blocks // self.n_stripes) * BLOCK_PARAMETERS

    @property
    def length(self) -> int:
        """Elements of the array."""
        return self.n_stripes * self.stripe_length

    def places(self, ids: Int32) -> Int32:
        """The elements that ids are."""
        block, into = np.divmod(ids, BLOCK_PARAMETERS)
        turn, stripe = np.divmod(block, self.n_stripes)
        found: Int32 = stripe * self.stripe_length + turn * BLOCK_PARAMETERS + into
        return found


class Distinct(NamedTuple):
    """Keys of a partition.

    Args:
        keys: ascending.
        counts: how often each is there.
    """

    keys: UInt64
    counts: Int64


def distinct(rows: CriteoRows) -> Distinct:
    """The keys of some rows."""
    keys, counts = np.unique(rows.keys, return_counts=True)
    return Distinct(keys, counts.astype(np.int64))


def folded(ranks: Int64, n_parameters: int) -> Int32:
    """Ids of keys by their place in the dictionary: of more keys than there are parameters the
    rarest share the second half of them."""
    half = n_parameters // 2
    found = np.where(ranks < n_parameters, ranks, half + ranks % (n_parameters - half))
    return found.astype(np.int32)


def assign(found: Sequence[Distinct], n_parameters: int) -> tuple[list[Int32], UInt64]:
    """The dictionary: ids by falling frequency in all partitions.

    Args:
        found: of each partition, in order.

    Returns:
        For each partition the ids of its keys, in their order; and all keys, by their ranks.
    """
    sizes = [len(each.keys) for each in found]
    if not sum(sizes):
        return [np.empty(0, np.int32) for _ in found], np.empty(0, np.uint64)
    every, first, where = np.unique(
        np.concatenate([each.keys for each in found]), return_index=True, return_inverse=True
    )
    counts = np.bincount(where, np.concatenate([each.counts for each in found]))
    partition = np.searchsorted(np.cumsum(sizes), first, side="right")
    order = np.lexsort((every, partition, -counts))
    ranks = np.empty(len(every), np.int64)
    ranks[order] = np.arange(len(every))
    return np.split(folded(ranks[where], n_parameters), np.cumsum(sizes)[:-1]), every[order]


# ------------------------------------------------------------------ rows with ids


class RowBlock(NamedTuple):
    """Rows as an iteration wants them: with numbers of their own for the parameters they touch.

    Args:
        labels: shape (n,), 0 or 1.
        which: shape (39, n): the one of `ids` that each feature of each row is.
        ids: that the rows touch, by their places.
        places: the elements that they are, ascending.
        order: rows of all features of all rows, by `which`.
        firsts: where in `order` each id's rows begin.
        runs: the elements (begin, end) of the blocks that are touched, to be read as they are;
            None: so little of them is touched that rows are better asked for.
    """

    labels: npt.NDArray[np.uint8]
    which: Int32
    ids: Int32
    places: Int32
    order: Int32
    firsts: Int64
    runs: list[tuple[int, int]] | None


def runs_of(places: Int32) -> list[tuple[int, int]] | None:
    """Runs of whole blocks that elements lie on; None: there are too many, or they hold too little.

    Args:
        places: ascending.
    """
    if not len(places):
        return []
    blocks = np.unique(places // BLOCK_PARAMETERS).astype(np.int64)
    begins = np.flatnonzero(np.diff(blocks, prepend=-2) != 1)
    if len(places) < USED_OF_BLOCK * len(blocks) or len(begins) > MOST_RUNS:
        return None
    ends = np.append(begins[1:], len(blocks)) - 1
    pairs = np.stack([blocks[begins], blocks[ends] + 1], axis=1) * BLOCK_PARAMETERS
    return [(begin, end) for begin, end in pairs.tolist()]


def block_of(labels: npt.NDArray[np.uint8], ids: Int32, layout: ParameterLayout) -> RowBlock:
    """Rows made ready.

    Args:
        labels: shape (n,).
        ids: shape (39, n).
    """
    touched, inverse = np.unique(ids, return_inverse=True)
    places = layout.places(touched.astype(np.int32))
    order = np.argsort(places)
    rank = np.empty(len(order), np.int32)
    rank[order] = np.arange(len(order), dtype=np.int32)
    which: Int32 = rank[inverse.reshape(-1)]
    by_id = np.argsort(which, kind="stable")
    firsts = np.searchsorted(which[by_id], np.arange(len(order)))
    rows: Int32 = (by_id % max(1, len(labels))).astype(np.int32)
    own: Int32 = touched[order].astype(np.int32)
    places = places[order]
    runs = runs_of(places)
    return RowBlock(labels, which.reshape(ids.shape), own, places, rows, firsts, runs)


# ------------------------------------------------------------------ one step


def scores(block: RowBlock, weights: Float32) -> Float64:
    """The sum of each row's weights.

    Args:
        weights: of `block.ids`.
    """
    out = np.zeros(len(block.labels))
    for of_feature in block.which:
        out += weights.take(of_feature)
    return out


def log_losses(scores: Float64, labels: npt.NDArray[np.uint8]) -> Float64:
    """Of each row: what its label costs."""
    found: Float64 = np.logaddexp(0.0, np.where(labels, -scores, scores))
    return found


def gradient(block: RowBlock, weights: Float32, n_rows: int) -> tuple[Float32, float]:
    """A step's share of these rows.

    Args:
        weights: of `block.ids`.
        n_rows: of the step, all partitions together.

    Returns:
        The gradient for each of `block.ids`, and the sum of the rows' losses before the step.
    """
    total = scores(block, weights)
    loss = float(log_losses(total, block.labels).sum())
    if not len(block.ids):
        return np.empty(0, np.float32), loss
    with np.errstate(over="ignore"):  # exp of a large number is infinite, and its inverse 0
        chance = 1.0 / (1.0 + np.exp(-total))
    residuals = (chance - block.labels) / n_rows
    sums = np.add.reduceat(residuals.take(block.order), block.firsts)
    return sums.astype(np.float32), loss


# ------------------------------------------------------------------ checking


def reference(
    parts: Sequence[Sequence[tuple[npt.NDArray[np.uint8], Int32]]],
    n_ids: int,
    rate: float,
    iterations: int,
) -> tuple[Float64, list[float]]:
    """The weights after so many steps, in this process and in float64; the losses before each.

    None of the code above scores or sums.

    Args:
        parts: for each partition its row blocks: labels, and ids of shape (39, n). Step i takes
            block i of each, and begins again after the last.
        n_ids: one more than the largest id.
    """
    weights = np.zeros(n_ids)
    losses = []
    for number in range(iterations):
        taken = [blocks[number % len(blocks)] for blocks in parts if blocks]
        n_rows = sum(len(labels) for labels, _ in taken)
        step, loss = np.zeros(n_ids), 0.0
        for labels, ids in taken:
            margin = np.where(labels, 1.0, -1.0) * weights[ids].sum(axis=0)
            loss += float(np.log1p(np.exp(-np.abs(margin))).sum() - np.minimum(margin, 0.0).sum())
            slope = -np.where(labels, 1.0, -1.0) / (1.0 + np.exp(margin)) / n_rows
            for of_feature in ids:
                step += np.bincount(of_feature, slope, n_ids)
        weights -= rate * step
        losses.append(loss / max(1, n_rows))
    return weights, losses


def check(weights: Float32, expected: Float64) -> float:
    """That weights are these, but for the rounding of float32.

    Returns:
        The largest difference.

    Raises:
        WrongWeights: One differs by more than 1e-4 of the largest weight; names the first.
    """
    found = np.asarray(weights, np.float64)
    if found.shape != expected.shape:
        raise WrongWeights(f"there are {found.shape} weights, not {expected.shape}")
    difference = np.abs(found - expected)
    most = 1e-4 * max(1e-3, float(np.abs(expected).max(initial=0.0)))
    wrong = np.flatnonzero(~(difference <= most))  # a NaN is wrong as well
    if len(wrong):
        i = int(wrong[0])
        raise WrongWeights(
            f"{len(wrong):,} of {len(expected):,} weights; number {i} is {found[i]:.6g}, "
            f"not {expected[i]:.6g}"
        )
    return float(difference.max(initial=0.0))
