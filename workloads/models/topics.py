"""Latent Dirichlet allocation by variational Bayes (Hoffman, Blei, Bach 2010). No Ray here.

What a topic says of words is a Dirichlet distribution; all parameters are one array `lam` of shape
(words, topics), a row a word, so that the words of a document are a few whole rows. A task looks up
exp(E[log beta]) of its words, finds for each document which topics it is about, and adds up how
often each topic has made each word; that is one array, with what is said about its likelihood
behind it. New parameters are made of the sum.

With all documents in each iteration this is batch variational Bayes. With a part of them, chosen by
a hash of their numbers, the parameters move by (tau0 + t)^-kappa of the way, as in MLlib's
OnlineLDAOptimizer.
"""

from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import special

from ..data.errors import WrongResult
from ..data.rows import Documents, Float64

__all__ = [
    "TAIL",
    "Corpus",
    "Counts",
    "Prior",
    "WrongTopics",
    "accumulate",
    "check",
    "chosen",
    "first_lam",
    "generate",
    "moved",
    "new_lam",
    "perplexity",
    "topics_bound",
    "weights_of",
]

TAIL: Final = 3  # behind the words: bound, words, documents
MOST_ROUNDS: Final = 100  # over a document
LEAST_CHANGE: Final = 1e-3  # of a document's topics, on average, in the last of them
_EPS: Final = 1e-100
_ROWS_AT_ONCE: Final = 1 << 12


class WrongTopics(WrongResult):
    """The tasks' topics are not those that one process finds."""


@dataclasses.dataclass(frozen=True)
class Prior:
    """Of the model.

    Args:
        n_topics: K.
        alpha: of topics in documents; None: 1 / K.
        eta: of words in topics; None: 1 / K.
    """

    n_topics: int
    alpha: float | None = None
    eta: float | None = None

    @property
    def of_documents(self) -> float:
        return 1.0 / self.n_topics if self.alpha is None else self.alpha

    @property
    def of_words(self) -> float:
        return 1.0 / self.n_topics if self.eta is None else self.eta


# ---------------------------------------------------------------- data


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Documents that everyone can draw, partition by partition.

    Each topic has its most frequent word at a place of its own in the vocabulary, and frequencies
    fall from there on; a document is about a few topics.

    Args:
        n_documents: in all.
        n_words: of the vocabulary.
        n_topics: that they are drawn from.
        n_partitions: into which documents are cut, about evenly.
        length: words of a document.
        seed: of all that is drawn.
    """

    n_documents: int
    n_words: int
    n_topics: int
    n_partitions: int
    length: int = 100
    seed: int = 1

    def partition(self, number: int) -> Documents:
        """The documents of a partition."""
        begin, end = (self.n_documents * i // self.n_partitions for i in (number, number + 1))
        rng = np.random.default_rng([self.seed, number])
        n = end - begin
        about = rng.dirichlet(np.full(self.n_topics, 0.1), n).cumsum(axis=1)
        drawn = rng.random((n, self.length))
        topic = np.zeros((n, self.length), np.int64)
        for i in range(n):
            topic[i] = np.searchsorted(about[i], drawn[i])
        place = (rng.random((n, self.length)) ** 4 * self.n_words).astype(np.int64)
        top = np.minimum(topic, self.n_topics - 1)
        word = (top * self.n_words // self.n_topics + place) % self.n_words
        cell = np.arange(n)[:, None] * self.n_words + word
        cells, counts = np.unique(cell, return_counts=True)
        first = np.searchsorted(cells, np.arange(n + 1) * self.n_words)
        return Documents(
            np.arange(begin + 1, end + 1),
            first.astype(np.int64),
            (cells % self.n_words).astype(np.int32),
            counts.astype(np.float64),
        )


def generate(numbers: npt.NDArray[np.int64], corpus: Corpus) -> npt.NDArray[Any]:
    """The documents of these partitions, an item each."""
    out = np.empty(len(numbers), object)
    out[:] = [corpus.partition(int(number)) for number in numbers]
    return out


class Counts(NamedTuple):
    """What some documents are, all together.

    Args:
        n_documents: with words.
        n_entries: different words of each, added up.
        n_tokens: words.
    """

    n_documents: int = 0
    n_entries: int = 0
    n_tokens: int = 0

    def and_of(self, documents: Documents) -> Counts:
        """With some more."""
        tokens = int(documents.counts.sum())
        return self.and_these(Counts(len(documents), len(documents.words), tokens))

    def and_these(self, other: Counts) -> Counts:
        """Of both."""
        return Counts(*(one + two for one, two in zip(self, other, strict=True)))


def chosen(documents: Documents, share: float, seed: int, iteration: int) -> npt.NDArray[np.bool_]:
    """Which documents an iteration looks at: by their numbers, wherever they are."""
    if share >= 1.0:
        return np.ones(len(documents), bool)
    with np.errstate(over="ignore"):
        mixed = documents.numbers.astype(np.uint64) + np.uint64(seed * 1_000_003 + iteration)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    found: npt.NDArray[np.bool_] = (mixed >> np.uint64(11)) * (1.0 / (1 << 53)) < share
    return found


# ---------------------------------------------------------------- an iteration


def first_lam(n_words: int, n_topics: int, seed: int) -> Float64:
    """Where it begins: about 1 everywhere, shape (n_words, n_topics)."""
    return np.random.default_rng([seed, 0x1DA]).gamma(100.0, 0.01, (n_words, n_topics))


def weights_of(lam: Float64, threads: int = 4) -> Float64:
    """exp(E[log beta]), shape of lam."""
    total = special.psi(lam.sum(axis=0))
    out = np.empty_like(lam)

    def fill(begin: int) -> None:
        part = slice(begin, begin + _ROWS_AT_ONCE)
        special.psi(lam[part], out=out[part])
        out[part] -= total
        np.exp(out[part], out=out[part])

    with ThreadPoolExecutor(threads) as pool:  # NumPy lets go of the GIL
        list(pool.map(fill, range(0, len(lam), _ROWS_AT_ONCE)))
    return out


def accumulate(
    total: Float64 | None,
    documents: Documents,
    rows: npt.NDArray[np.integer[Any]],
    weights: Float64,
    n_words: int,
    prior: Prior,
    among: npt.NDArray[np.bool_],
) -> Float64:
    """Adds what some documents say of topics; changes `total`.

    Args:
        total: so far, shape (n_words * K + TAIL,); None: nothing.
        rows: where each of the documents' words is in `weights`, shape of `documents.words`.
        weights: exp(E[log beta]) of words, shape (any, K).
        among: which documents count.
    """
    k, alpha = prior.n_topics, prior.of_documents
    if total is None:
        total = np.zeros(n_words * k + TAIL)
    counts_by_word = total[: n_words * k].reshape(n_words, k)
    for i in np.flatnonzero(among).tolist():
        part = slice(int(documents.first[i]), int(documents.first[i + 1]))
        counts = documents.counts[part]
        of_words = weights[rows[part]]
        gamma = np.ones(k)
        log_theta = special.psi(gamma) - special.psi(gamma.sum())
        theta = np.exp(log_theta)
        norm = of_words @ theta + _EPS
        for _ in range(MOST_ROUNDS):
            last, gamma = gamma, alpha + theta * ((counts / norm) @ of_words)
            log_theta = special.psi(gamma) - special.psi(gamma.sum())
            theta = np.exp(log_theta)
            norm = of_words @ theta + _EPS
            if np.abs(gamma - last).mean() < LEAST_CHANGE:
                break
        of_words *= theta
        of_words *= (counts / norm)[:, None]
        counts_by_word[documents.words[part]] += of_words  # each word is there once
        total[-3] += (
            float(counts @ np.log(norm))
            + float((alpha - gamma) @ log_theta + special.gammaln(gamma).sum())
            - float(special.gammaln(gamma.sum()))
            + float(special.gammaln(k * alpha) - k * special.gammaln(alpha))
        )
        total[-2] += counts.sum()
        total[-1] += 1.0
    return total


def new_lam(
    lam: Float64, total: Float64, prior: Prior, n_documents: int, rate: float
) -> tuple[Float64, float]:
    """The parameters after an iteration, and their mean change relative to their mean.

    Args:
        total: of the documents that it looked at. Its memory is used.
        n_documents: that there are.
        rate: of the way that they go, in (0, 1].
    """
    there = total[: lam.size].reshape(lam.shape)
    there *= n_documents / max(total[-1], 1.0)
    there += prior.of_words
    if rate < 1.0:
        there *= rate
        there += (1.0 - rate) * lam
    return there, moved(lam, there)


def moved(before: Float64, after: Float64) -> float:
    """Mean change of the parameters, relative to their mean."""
    return float(np.abs(after - before).sum() / before.sum())


def topics_bound(lam: Float64, prior: Prior) -> float:
    """What the topics themselves add to the bound of the log likelihood."""
    eta, (n_words, k) = prior.of_words, lam.shape
    sums = lam.sum(axis=0)
    log_beta = special.psi(lam) - special.psi(sums)
    bound = ((eta - lam) * log_beta).sum() + special.gammaln(lam).sum()
    bound -= special.gammaln(sums).sum()
    return float(bound + k * (special.gammaln(n_words * eta) - n_words * special.gammaln(eta)))


def perplexity(lam: Float64, total: Float64, prior: Prior, n_documents: int) -> float:
    """exp(-bound / words), as scikit-learn has it; lower is better.

    Args:
        total: of the documents that were looked at, at these parameters.
        n_documents: that there are.
    """
    scale = n_documents / max(total[-1], 1.0)
    bound = scale * total[-3] + topics_bound(lam, prior)
    return float(np.exp(-bound / max(scale * total[-2], 1.0)))


def check(lam: Float64, expected: Float64) -> float:
    """That parameters are these, but for the rounding of other orders of summing.

    Returns:
        The largest difference, relative to the mean.

    Raises:
        WrongTopics: One differs by more than 1e-4 of the mean; names the worst.
    """
    if lam.shape != expected.shape:
        raise WrongTopics(f"topics have shape {lam.shape}, not {expected.shape}")
    difference = np.abs(lam - expected) / expected.mean()
    wrong = ~(difference <= 1e-4)  # a NaN is wrong as well
    if wrong.any():
        word, topic = np.unravel_index(
            int(np.argmax(np.where(np.isnan(difference), np.inf, difference))), lam.shape
        )
        raise WrongTopics(
            f"{int(wrong.sum()):,} of {lam.size:,} parameters; word {word} in topic {topic} has "
            f"{lam[word, topic]:.8g}, not {expected[word, topic]:.8g}"
        )
    return float(difference.max(initial=0.0))
