"""Text of words as frequent as in a language (Zipf 1935), and how a line is cut into words.

No Ray here.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import numpy as np

from .errors import WrongResult
from .stream import zipf

__all__ = ["WrongCounts", "check", "once", "reference", "word", "words_of", "write_files"]

_SYLLABLES: Final = [a + b for a in "bcdfghjklmnpqrstvwxyz" for b in "aeiou"]
_WORD: Final = re.compile(r"[a-z]+")
_DRAWN: Final = 1 << 16  # words at a time


class WrongCounts(WrongResult):
    """The tasks' counts are not those of `collections.Counter`."""


def word(index: int) -> str:
    """The word with this index, of no language: no two indices have the same.

    Example:
        >>> word(0), word(105), word(10**6)
        ('ba', 'baba', 'wusiwa')
    """
    out = ""
    index += 1
    while index:
        index, at = divmod(index - 1, len(_SYLLABLES))
        out = _SYLLABLES[at] + out
    return out


def words_of(line: str) -> list[str]:
    """The words of a line, in lower case; whatever is no letter a to z ends one.

    Example:
        >>> words_of("Bana codu, bana.")
        ['bana', 'codu', 'bana']
    """
    return _WORD.findall(line.lower())


def once(each: str) -> tuple[str, int]:
    """What a word counts for where it is found."""
    return each, 1


def write_files(
    folder: Path,
    n_words: int,
    n_files: int,
    vocabulary: int,
    skew: float,
    seed: int,
    done: Callable[[int], None] = lambda words: None,
) -> list[Path]:
    """Writes ``text-00000.txt`` and so on: sentences of 5 to 20 words, one a line.

    Args:
        n_words: in all files; each has about as many.
        vocabulary: different words at the most.
        skew: the i-th word is as frequent as 1 / i ** skew.
        seed: of the draw; file number i depends on it and on i alone.
        done: told of the words written so far.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = [word(index) for index in range(vocabulary)]
    paths, written = [], 0
    for number in range(n_files):
        rng = np.random.default_rng([seed, number])
        left = n_words * (number + 1) // n_files - n_words * number // n_files
        path = folder / f"text-{number:05}.txt"
        with path.open("w") as out:
            while left:
                drawn = [table[i] for i in zipf(rng, vocabulary, min(left, _DRAWN), skew).tolist()]
                ends = np.cumsum(rng.integers(5, 21, len(drawn) // 5 + 1)).tolist()
                start = 0
                for end in ends:
                    sentence = drawn[start:end]
                    if not sentence:
                        break
                    out.write(" ".join(sentence).capitalize() + ".\n")
                    start = end
                left -= len(drawn)
                written += len(drawn)
                done(written)
        paths.append(path)
    return paths


def reference(paths: Iterable[Path]) -> Counter[str]:
    """The counts in this process; none of the code above cuts."""
    counts: Counter[str] = Counter()
    for path in paths:
        with path.open() as lines:
            for line in lines:
                text = "".join(c if "a" <= c <= "z" else " " for c in line.lower())
                counts.update(text.split())
    return counts


def check(found: Mapping[str, int], expected: Mapping[str, int]) -> None:
    """That the counts are these.

    Raises:
        WrongCounts: naming the first word that differs.
    """
    for each in sorted(found.keys() | expected.keys()):
        if found.get(each, 0) != expected.get(each, 0):
            raise WrongCounts(
                f"{each!r} was counted {found.get(each, 0):,} times, "
                f"it is there {expected.get(each, 0):,} times"
            )
