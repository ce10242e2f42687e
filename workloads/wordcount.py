"""How often each word is in text files: the program that everyone knows.

    python -m clamor_ray.workloads.wordcount --demo
    python -m clamor_ray.workloads.wordcount 'books/*.txt' --out counts.parquet

Lines are cut into words, and the ones of each word added up: one stage that reads, cuts and adds
up what it has, and one that adds up what the others found of the same words.
"""

from __future__ import annotations

import dataclasses
import glob
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq

import clamor_ray as clamor

from .cli import options
from .cli.program import CommandRun, program, refuse_both
from .cli.stages import Stages
from .cli.waiting import default_partitions, start_workers
from .data import words
from .data.errors import InputError
from .data.words import WrongCounts

TOP = 10


@dataclasses.dataclass(frozen=True)
class WordCountJob:
    """What the command line asked for.

    Args:
        files: paths or globs of text.
        n_partitions: None for `default_partitions()`.
        check: whether to count in this process as well.
    """

    files: list[str]
    n_partitions: int | None = None
    check: bool = False


@dataclasses.dataclass(frozen=True)
class WordCountOutcome:
    """Of a run.

    Args:
        counts: of each word.
        seconds: from the first task to the last count.
        checked: whether they were compared.
    """

    counts: Counter[str]
    seconds: float
    checked: bool


def count(lines: Any) -> Any:
    """(word, how often) of a collection of lines; nothing runs yet."""
    return lines.flat_map(words.words_of).map(words.once).reduce_by_key("sum")


def run(job: WordCountJob, stages: Stages) -> WordCountOutcome:
    """Counts and checks, on the cluster that this process is attached to.

    Raises:
        InputError: There are no words.
        WrongCounts: The counts are not those of `collections.Counter`.
    """
    n_partitions = job.n_partitions or default_partitions()
    with stages.stage("workers", "starting workers"):
        start_workers(collections=True)
    with stages.stage("count", f"counting words in {n_partitions:,} partitions"):
        start = time.perf_counter()
        lines = clamor.read_text(job.files, partitions=n_partitions)
        pairs = count(lines).collect()
        seconds = time.perf_counter() - start
    counts = Counter(dict(pairs))
    if len(counts) != len(pairs):
        raise WrongCounts(f"{len(pairs) - len(counts):,} words were counted in two places")
    if not counts:
        raise InputError(f"there are no words in {', '.join(job.files)}")
    if job.check:
        with stages.stage("check", "checking against collections.Counter"):
            words.check(counts, words.reference(paths_of(job.files)))
    return WordCountOutcome(counts, seconds, job.check)


def paths_of(files: list[str]) -> list[Path]:
    """What paths and globs name on this machine, each once."""
    found = {path: None for each in files for path in sorted(glob.glob(each, recursive=True))}
    return [Path(path) for path in found]


def write(counts: Counter[str], out: Path) -> None:
    """Parquet: word, count; the most frequent first, equal ones by the alphabet."""
    ordered = sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))
    columns = zip(*ordered, strict=True)
    pq.write_table(pa.table(dict(zip(("word", "count"), map(list, columns), strict=True))), out)


@program("A million words on a local cluster.")
@click.argument("files", metavar="[TEXT]...", nargs=-1)
@options.count("--words", "n_words", "To generate. Default: 1,000,000.")
@options.number("--vocabulary", 50_000, "Different words, at the most.")
@options.real("--skew", 1.0, "The i-th word is as frequent as 1 / i ** skew.")
@click.option("--files", "n_files", default=8, show_default=True, type=click.IntRange(1))
@options.seed("Of the text.")
@options.new_folder(
    "--save", "Where generated text goes. Default: a temporary folder, removed at the end."
)
@options.partitions()
@options.new_file("--out", "Counts, Parquet.")
@options.check("Count")
def main(
    asked: CommandRun,
    files: tuple[str, ...],
    n_words: int | None,
    vocabulary: int,
    skew: float,
    n_files: int,
    seed: int,
    save: Path | None,
    n_partitions: int | None,
    out: Path | None,
    check: bool,
) -> None:
    """Counts the words of TEXT: files by path or glob, also s3://; or of text that it generates.

    A word is letters a to z, upper or lower case; everything else ends one.

    Exit status: 0; 1 where counts are wrong; 2 where the input cannot be used; 3 where the library
    cannot work here.
    """
    refuse_both(files, {"--demo": asked.demo, "--words": n_words, "--save": save}, "text")
    if not files and not (asked.demo or save or n_words):
        raise click.UsageError("give TEXT, or --demo")
    if check and any("://" in each for each in files):
        raise click.UsageError("--check reads the text in this process: give it local files")
    with tempfile.TemporaryDirectory(prefix="clamor-words-") as folder:
        named = list(files)
        if not files:
            n_words = n_words or 1_000_000
            with asked.stages.stage("generate", f"writing {n_words:,} words", n_words) as done:
                paths = words.write_files(
                    save or Path(folder), n_words, n_files, vocabulary, skew, seed, done
                )
            named = [str(path) for path in paths]
        with asked.attached():
            outcome = run(WordCountJob(named, n_partitions, check), asked.stages)
    print_outcome(asked, outcome)
    if out is not None:
        write(outcome.counts, out)
    asked.wrote(counts=out)


def print_outcome(asked: CommandRun, outcome: WordCountOutcome) -> None:
    """What a run found, and what it took."""
    checked = " All counts equal collections.Counter's." if outcome.checked else ""
    total = outcome.counts.total()
    asked.say(
        f"\n{total:,} words, {len(outcome.counts):,} different ones, in {outcome.seconds:.2f} s."
        f"{checked}"
    )
    top = ", ".join(f"{word} ({n:,})" for word, n in outcome.counts.most_common(TOP))
    asked.say(f"most frequent: {top}")


if __name__ == "__main__":
    main()
