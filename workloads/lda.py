"""Topics of documents: latent Dirichlet allocation (Blei et al. 2003; Sparker 5.3; MLlib).

    python -m clamor_ray.workloads.lda --demo --picture likelihood.png
    python -m clamor_ray.workloads.lda docword.nytimes.txt.gz --vocabulary vocab.nytimes.txt -k 100

Documents are read from a file in the UCI repository's format of bags of words, or generated, once,
and cached. What topics say of words is a global variable with a row for each word, which the driver
changes in place between iterations. A task per partition looks up the rows of its words, and makes
an array of the variable's size: how often each topic has made each word. These are added up in
segments by all nodes (`--aggregate split`), or in a tree. (Hoffman et al. 2010.)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import clamor_ray as clamor

from .cli import options
from .cli.learning import (
    How,
    Iteration,
    Model,
    Received,
    learning_options,
    print_iterations,
    spread,
)
from .cli.learning_tasks import Look
from .cli.program import CommandRun, program, refuse_both
from .cli.report import human_bytes
from .cli.results import agreement, draw_curve
from .cli.stages import Stages
from .cli.waiting import default_partitions, start_workers
from .data.bag_of_words import Header, read_bag_of_words, read_vocabulary
from .data.errors import InputError
from .data.rows import Documents, Float64
from .models import topics
from .models.topics import Corpus, Counts, Prior

TOP_WORDS = 8


@dataclasses.dataclass(frozen=True)
class TopicsJob:
    """What the command line asked for.

    Args:
        prior: of the model.
        iterations: at the most.
        tolerance: relative change of the loss, below which it ends.
        share: of the documents that an iteration looks at.
        tau0, kappa: rate (tau0 + t)^-kappa, where that is not all of them.
        corpus: what to draw; None where documents are read.
        data: a docword file.
        vocabulary: its words.
        n_partitions: of the file.
        seed: of first parameters, and of what each iteration looks at.
        how: sums are made.
        check: whether to do it in this process as well.
    """

    prior: Prior
    iterations: int = 40
    tolerance: float = 1e-4
    share: float = 1.0
    tau0: float = 1024.0
    kappa: float = 0.51
    corpus: Corpus | None = None
    data: str | None = None
    vocabulary: str | None = None
    n_partitions: int | None = None
    seed: int = 1
    how: How = "split"
    check: bool = False

    def rate(self, number: int) -> float:
        """How far the parameters go in an iteration, from 1."""
        return 1.0 if self.share >= 1.0 else float((self.tau0 + number) ** -self.kappa)


@dataclasses.dataclass(frozen=True, eq=False)
class TopicsOutcome:
    """Of a run.

    Args:
        lam: parameters, shape (words, topics).
        counts: of the documents.
        perplexity: of what the last iteration looked at, before it.
        lines: one an iteration; the loss is minus the documents' bound a word.
        received: bytes between page servers, in all iterations, of nodes that are there after them.
        words: the vocabulary; None where there is none.
        error: largest relative difference from the check; None where there was none.
    """

    lam: Float64
    counts: Counts
    perplexity: float
    lines: list[Iteration]
    received: int
    words: list[str] | None
    error: float | None


def load(job: TopicsJob) -> tuple[Any, Header | None]:
    """The documents as a collection; nothing runs yet, but where the file is compressed."""
    if job.corpus is not None:
        n = job.corpus.n_partitions
        numbers = clamor.from_numpy(np.arange(n), partitions=n)
        return numbers.map_batches(topics.generate, job.corpus), None
    wanted = job.n_partitions or default_partitions()
    documents, header = read_bag_of_words(job.data, partitions=wanted)
    return spread(documents, wanted), header


def look(documents: Any, header: Header | None, job: TopicsJob) -> Counts:
    """How many there are.

    Raises:
        InputError: None, or not as many as the file says.
    """
    counts: Counts = documents.aggregate(Counts(), Counts.and_of, Counts.and_these)
    if header is not None and counts.n_entries != header.n_entries:
        raise InputError(
            f"{job.data} has {counts.n_entries:,} entries, and its third line says "
            f"{header.n_entries:,}: it is cut off, or has entries twice"
        )
    if not counts.n_documents:
        raise InputError(f"{job.data} has no documents with words")
    return counts


class Learner:
    """The parameters, and how an iteration changes them.

    Args:
        add_up: (exp(E[log beta]), iteration) -> sum over all documents.
        job: prior, rates, seed.
        n_words: of the vocabulary.
        n_documents: with words.
    """

    def __init__(
        self,
        add_up: Callable[[Float64, int], Float64],
        job: TopicsJob,
        n_words: int,
        n_documents: int,
    ) -> None:
        self.add_up, self.job, self.n_documents = add_up, job, n_documents
        self.lam = topics.first_lam(n_words, job.prior.n_topics, job.seed)
        self.before = self.lam  # what the last iteration looked at documents with
        self.tail = np.zeros(topics.TAIL)

    def step(self, number: int) -> tuple[float, float]:
        """An iteration: minus the bound a word before it, and how far the parameters moved."""
        total = self.add_up(topics.weights_of(self.lam), number)
        self.tail = total[-topics.TAIL :].copy()
        self.before = self.lam
        self.lam, moved = topics.new_lam(
            self.lam, total, self.job.prior, self.n_documents, self.job.rate(number)
        )
        return float(-self.tail[-3] / max(self.tail[-2], 1.0)), moved

    def perplexity(self) -> float:
        """As the last iteration found it."""
        return topics.perplexity(self.before, self.tail, self.job.prior, self.n_documents)


def run(
    job: TopicsJob, stages: Stages, after: Callable[[int], None] = lambda number: None
) -> TopicsOutcome:
    """Loads, learns and checks, on the cluster that this process is attached to.

    Args:
        after: is told of each iteration.

    Raises:
        InputError: There are no documents, or not as many as the file says.
        SourceError: The vocabulary has another number of words.
        WrongTopics: The topics are not those that one process finds.
    """
    with stages.stage("workers", "starting workers"):
        start_workers(collections=True)
    text = "reading documents" if job.corpus is None else "generating documents where they stay"
    with stages.stage("load", text):
        documents, header = load(job)
        documents = documents.cache()
        counts = look(documents, header, job)
        n_words = header.n_words if header else job.corpus.n_words if job.corpus else 0
        words = read_vocabulary(job.vocabulary, n_words) if job.vocabulary else None
    model = Model((n_words, job.prior.n_topics))

    def add_up(weights: Float64, number: int) -> Float64:
        model.set(weights)
        seq_op = Look(model.variable, job.prior, job.share, job.seed, number)
        return model.add_up(documents, seq_op, job.how)

    learner = Learner(add_up, job, n_words, counts.n_documents)
    lines: list[Iteration] = []
    try:
        arrived = Received()
        text = f"up to {job.iterations} iterations over {counts.n_documents:,} documents"
        with stages.stage("iterate", text, job.iterations) as done:
            for number in range(1, job.iterations + 1):
                lines.append(model.line(number, *learner.step(number)))
                done(number)
                after(number)
                if is_over(lines, job.tolerance):
                    break
        received = arrived.bytes()
    finally:
        model.free()
    error = None
    if job.check:
        with stages.stage("check", "checking against the same in this process"):
            expected = reference(documents.collect(), job, n_words, len(lines))
            error = topics.check(learner.lam, expected)
    return TopicsOutcome(learner.lam, counts, learner.perplexity(), lines, received, words, error)


def is_over(lines: Sequence[Iteration], tolerance: float) -> bool:
    """Whether the loss stays where it is."""
    if len(lines) < 2:
        return False
    last, before = lines[-1].loss, lines[-2].loss
    return abs(before - last) < tolerance * abs(before)


def reference(parts: Sequence[Documents], job: TopicsJob, n_words: int, iterations: int) -> Float64:
    """The parameters after so many iterations, without tasks."""
    prior = job.prior

    def add_up(weights: Float64, number: int) -> Float64:
        total: Float64 | None = None
        for part in parts:
            among = topics.chosen(part, job.share, job.seed, number)
            total = topics.accumulate(total, part, part.words, weights, n_words, prior, among)
        assert total is not None  # there is a document
        return total

    learner = Learner(add_up, job, n_words, sum(map(len, parts)))
    for number in range(1, iterations + 1):
        learner.step(number)
    return learner.lam


# ---------------------------------------------------------------- for people


def top_words(lam: Float64, words: Sequence[str] | None, n: int = TOP_WORDS) -> list[str]:
    """For each topic, its most frequent words, or their numbers from 1."""
    best = np.argsort(-lam, axis=0, kind="stable")[:n].T.tolist()
    return [" ".join(words[i] if words else str(i + 1) for i in row) for row in best]


def print_outcome(asked: CommandRun, job: TopicsJob, outcome: TopicsOutcome) -> None:
    """What a run found, and what it took."""
    last = outcome.lines[-1]
    ended = "ended" if last.number < job.iterations else "stopped"
    n_words, k = outcome.lam.shape
    asked.say(
        f"\n{ended} after {last.number} iterations over {outcome.counts.n_documents:,} documents "
        f"of {outcome.counts.n_tokens:,} words out of {n_words:,}; {k} topics, perplexity "
        f"{outcome.perplexity:,.1f}; page servers received "
        f"{human_bytes(outcome.received)}.{agreement('topics', outcome.error)}\n"
    )
    print_iterations(asked.console, outcome.lines, "-bound\na word")
    weight = outcome.lam.sum(axis=0)
    named = top_words(outcome.lam, outcome.words)
    for topic in np.argsort(-weight, kind="stable")[:10].tolist():
        asked.console.print(f"topic {topic}, {weight[topic] / weight.sum():.1%}: {named[topic]}")


def write(lam: Float64, words: Sequence[str] | None, out: Path) -> None:
    """Parquet: a row a word: its number from 1, itself, and its share of each topic."""
    share = lam / lam.sum(axis=0)
    columns: dict[str, Any] = {"word": np.arange(1, len(lam) + 1)}
    if words:
        columns["text"] = list(words)
    columns |= {f"topic{k}": column for k, column in enumerate(share.T)}
    pq.write_table(pa.table(columns), out)


@program("2,000 documents on a local cluster.")
@click.argument("data", metavar="[DOCWORD]", required=False)
@click.option("-k", "--topics", "k", type=click.IntRange(1), help="Default: 100; 10 for the demo.")
@options.count("--documents", "n_documents", "To generate. Default: 50,000; 2,000 for the demo.")
@options.count(
    "--words",
    "n_words",
    "Of the vocabulary to generate. Default: 50,000; 2,000 for the demo.",
    least=2,
)
@click.option("--vocabulary", help="File of words, one a line, local or s3://.")
@options.number("--iterations", 40)
@options.real(
    "--tolerance",
    1e-4,
    "It ends with an iteration that changes the bound by less than this share.",
)
@click.option(
    "--share",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="Of the documents that an iteration looks at, others each time.",
)
@options.real("--alpha", None, "Default: 1 / topics.", above=True)
@options.real("--eta", None, "Default: 1 / topics.", above=True)
@options.new_file("--out", "Topics, Parquet.")
@learning_options
def main(
    asked: CommandRun,
    data: str | None,
    k: int | None,
    n_documents: int | None,
    n_words: int | None,
    alpha: float | None,
    eta: float | None,
    out: Path | None,
    picture: Path | None,
    **of_job: Any,
) -> None:
    """Finds topics in DOCWORD, a bag of words as the UCI repository has them, or in what it draws.

    Exit status: 0; 1 where the topics are wrong; 2 where the input cannot be used; 3 where the
    library cannot work here.
    """
    generated = {"--demo": asked.demo, "--documents": n_documents, "--words": n_words}
    refuse_both(data, generated, "documents")
    if of_job["vocabulary"] and not data:
        raise click.UsageError("--vocabulary belongs to a file of documents")
    k = k or (10 if asked.demo else 100)
    with asked.attached():
        corpus = None
        if not data:
            corpus = Corpus(
                n_documents or (2_000 if asked.demo else 50_000),
                n_words or (2_000 if asked.demo else 50_000),
                *(k, of_job["n_partitions"] or default_partitions()),
                seed=of_job["seed"],
            )
        job = TopicsJob(Prior(k, alpha, eta), corpus=corpus, data=data, **of_job)
        outcome = run(job, asked.stages)
    print_outcome(asked, job, outcome)
    if picture is not None:
        title = f"{outcome.counts.n_documents:,} documents, {k} topics"
        draw_curve(outcome.lines, title, "-bound a word", picture)
    if out is not None:
        write(outcome.lam, outcome.words, out)
    asked.wrote(picture=picture, topics=out)


if __name__ == "__main__":
    main()
