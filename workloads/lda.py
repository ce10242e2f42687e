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
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console

import clamor_ray as clamor

from .cli.learning import (
    How,
    Iteration,
    Model,
    Received,
    default_partitions,
    draw_curve,
    learning_options,
    print_iterations,
    spread,
)
from .cli.learning_tasks import Look
from .cli.options import cluster_options
from .cli.report import human_bytes
from .cli.waiting import start_workers
from .data.bag_of_words import Header, read_bag_of_words, read_vocabulary
from .data.places import InputError
from .data.rows import Documents, Float64
from .knn import Stages, attached
from .models import topics
from .models.topics import Corpus, Counts, Prior, WrongTopics

TOP_WORDS = 8


@dataclasses.dataclass(frozen=True)
class Job:
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
class Outcome:
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


def load(job: Job) -> tuple[Any, Header | None]:
    """The documents as a collection; nothing runs yet, but where the file is compressed."""
    if job.corpus is not None:
        n = job.corpus.n_partitions
        numbers = clamor.from_numpy(np.arange(n), partitions=n)
        return numbers.map_batches(topics.generate, job.corpus), None
    wanted = job.n_partitions or default_partitions()
    documents, header = read_bag_of_words(job.data, partitions=wanted)
    return spread(documents, wanted), header


def look(documents: Any, header: Header | None, job: Job) -> Counts:
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
        self, add_up: Callable[[Float64, int], Float64], job: Job, n_words: int, n_documents: int
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


def run(job: Job, stages: Stages, after: Callable[[int], None] = lambda number: None) -> Outcome:
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
    return Outcome(learner.lam, counts, learner.perplexity(), lines, received, words, error)


def is_over(lines: Sequence[Iteration], tolerance: float) -> bool:
    """Whether the loss stays where it is."""
    if len(lines) < 2:
        return False
    last, before = lines[-1].loss, lines[-2].loss
    return abs(before - last) < tolerance * abs(before)


def reference(parts: Sequence[Documents], job: Job, n_words: int, iterations: int) -> Float64:
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


def print_outcome(console: Console, job: Job, outcome: Outcome) -> None:
    """What a run found, and what it took."""
    last = outcome.lines[-1]
    ended = "ended" if last.number < job.iterations else "stopped"
    checked = ""
    if outcome.error is not None:
        checked = (
            f" All topics equal those of one process (largest difference {outcome.error:.0e})."
        )
    n_words, k = outcome.lam.shape
    console.print(
        f"\n{ended} after {last.number} iterations over {outcome.counts.n_documents:,} documents "
        f"of {outcome.counts.n_tokens:,} words out of {n_words:,}; {k} topics, perplexity "
        f"{outcome.perplexity:,.1f}; page servers received "
        f"{human_bytes(outcome.received)}.{checked}\n",
        soft_wrap=True,
    )
    print_iterations(console, outcome.lines, "-bound\na word")
    weight = outcome.lam.sum(axis=0)
    named = top_words(outcome.lam, outcome.words)
    for topic in np.argsort(-weight, kind="stable")[:10].tolist():
        console.print(f"topic {topic}, {weight[topic] / weight.sum():.1%}: {named[topic]}")


def write(lam: Float64, words: Sequence[str] | None, out: Path) -> None:
    """Parquet: a row a word: its number from 1, itself, and its share of each topic."""
    share = lam / lam.sum(axis=0)
    columns: dict[str, Any] = {"word": np.arange(1, len(lam) + 1)}
    if words:
        columns["text"] = list(words)
    columns |= {f"topic{k}": column for k, column in enumerate(share.T)}
    pq.write_table(pa.table(columns), out)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("data", metavar="[DOCWORD]", required=False)
@click.option("--demo", is_flag=True, help="2,000 documents on a local cluster.")
@click.option("-k", "--topics", "k", type=click.IntRange(1), help="Default: 100; 10 for the demo.")
@click.option(
    "--documents",
    "n_documents",
    type=click.IntRange(1),
    help="To generate. Default: 50,000; 2,000 for the demo.",
)
@click.option(
    "--words",
    "n_words",
    type=click.IntRange(2),
    help="Of the vocabulary to generate. Default: 50,000; 2,000 for the demo.",
)
@click.option("--vocabulary", help="File of words, one a line, local or s3://.")
@click.option("--iterations", default=40, show_default=True, type=click.IntRange(1))
@click.option(
    "--tolerance",
    default=1e-4,
    show_default=True,
    type=click.FloatRange(0),
    help="It ends with an iteration that changes the bound by less than this share.",
)
@click.option(
    "--share",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, 1, min_open=True),
    help="Of the documents that an iteration looks at, others each time.",
)
@click.option("--alpha", type=click.FloatRange(0, min_open=True), help="Default: 1 / topics.")
@click.option("--eta", type=click.FloatRange(0, min_open=True), help="Default: 1 / topics.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Topics, Parquet.")
@learning_options
@cluster_options
def main(
    data: str | None,
    demo: bool,
    k: int | None,
    n_documents: int | None,
    n_words: int | None,
    vocabulary: str | None,
    iterations: int,
    tolerance: float,
    share: float,
    alpha: float | None,
    eta: float | None,
    out: Path | None,
    aggregate: Literal["split", "tree"],
    partitions: int | None,
    seed: int,
    picture: Path | None,
    check: bool | None,
    cache_bytes: str | None,
    cache_policy: str | None,
    nodes: int | None,
) -> None:
    """Finds topics in DOCWORD, a bag of words as the UCI repository has them, or in what it draws.

    Exit status: 0; 1 where the topics are wrong; 2 where the input cannot be used; 3 where the
    library cannot work here.
    """
    console = Console(highlight=False)
    stages = Stages(console)
    if data and (demo or n_documents or n_words):
        raise click.UsageError(
            "--demo, --documents and --words are of generated documents: give no file"
        )
    if vocabulary and not data:
        raise click.UsageError("--vocabulary belongs to a file of documents")
    k = k or (10 if demo else 100)
    settings = {"cache_bytes": cache_bytes, "cache_policy": cache_policy}
    try:
        with attached(nodes or (3 if demo else None), stages, **settings):
            corpus = None
            if not data:
                corpus = Corpus(
                    n_documents or (2_000 if demo else 50_000),
                    n_words or (2_000 if demo else 50_000),
                    *(k, partitions or default_partitions()),
                    seed=seed,
                )
            job = Job(
                *(Prior(k, alpha, eta), iterations, tolerance, share),
                corpus=corpus,
                data=data,
                vocabulary=vocabulary,
                n_partitions=partitions,
                seed=seed,
                how=aggregate,
                check=demo if check is None else check,
            )
            outcome = run(job, stages)
    except WrongTopics as error:
        console.print(f"[red]WRONG TOPICS:[/red] {error}", soft_wrap=True)
        sys.exit(1)
    except (InputError, clamor.errors.SourceError) as error:
        console.print(f"[red]error:[/red] {error}", soft_wrap=True)
        sys.exit(2)
    except clamor.errors.ClamorError as error:
        console.print(f"[red]error:[/red] {error}", soft_wrap=True)
        sys.exit(3)
    print_outcome(console, job, outcome)
    if picture is not None:
        title = f"{outcome.counts.n_documents:,} documents, {k} topics"
        draw_curve(outcome.lines, title, "-bound a word", picture)
        console.print(f"\npicture  {picture}", soft_wrap=True)
    if out is not None:
        write(outcome.lam, outcome.words, out)
        console.print(f"\ntopics   {out}", soft_wrap=True)


if __name__ == "__main__":
    main()
