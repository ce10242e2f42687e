"""Logistic regression, SVM and LDA end to end: split aggregation against a tree (Sparker 5.3).

The same programs, over the same rows and documents in the cluster's memory, with the same models:
only the way in which the partitions' arrays are added up differs. In each round each workload is
trained from its beginning with either, in an order that turns from round to round; the first round
is in no figure. The clock runs from the first iteration to the last one: commits of the model, what
tasks fetch of it, gradients, adding up, and the driver's own arithmetic. Loading is not in it: both
sides use what was loaded once.

``split_speedup``: geometric mean over the workloads of median seconds with the tree / median
seconds with split aggregation. ``lr_split_speedup`` and so on: each one's. ``lr_sum_speedup``: of
the part of these seconds in which tasks ran and arrays were added up.

After each round the models of both sides are compared: they differ by rounding, or there is no
figure.

With ``--rate`` (root) each node is in a network namespace of its own, behind a shaped link;
without it nodes are raylets of this machine, between which bytes cost what memory does.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench.support import common
from bench.support.common import emit, note, now

HOWS = ("tree", "split")
WORKLOADS = ("lr", "svm", "lda")
TOPICS = 100

# (how) -> (seconds of all, of them of tasks and adding up, the model)
Train = Callable[[str], tuple[float, float, Any]]


def linear_workload(job: Any) -> Train:
    """A linear model over rows that are loaded here."""
    from clamor_ray.workloads.cli import linear_job

    rows = linear_job.load(job).options(speculation=False).cache()
    facts, n_features = linear_job.look(rows, job)
    if facts.n_rows != job.sample.n_rows:
        raise common.WrongData(f"{facts.n_rows:,} rows of {job.sample.n_rows:,}")

    def train(how: str) -> tuple[float, float, Any]:
        asked = dataclasses.replace(job, how=how)
        start = now()
        evaluator = linear_job.Evaluator(rows, facts, asked, n_features)
        weights = None
        for step in asked.walk(evaluator, np.zeros(n_features + 1)):
            weights = step.weights
        took = now() - start
        evaluator.model.free()
        return took, evaluator.model.tasks_s, weights

    return train


def lda_workload(job: Any) -> Train:
    """Topics of documents that are loaded here."""
    from clamor_ray.workloads import lda
    from clamor_ray.workloads.cli import learning
    from clamor_ray.workloads.cli.learning_tasks import Look

    documents = lda.load(job)[0].options(speculation=False).cache()
    counts = lda.look(documents, None, job)
    if counts.n_documents != job.corpus.n_documents:
        raise common.WrongData(f"{counts.n_documents:,} of {job.corpus.n_documents:,} documents")
    n_words = job.corpus.n_words

    def train(how: str) -> tuple[float, float, Any]:
        model = learning.Model((n_words, job.prior.n_topics))

        def add_up(weights: Any, number: int) -> Any:
            model.set(weights)
            look = Look(model.variable, job.prior, job.share, job.seed, number)
            return model.add_up(documents, look, how)  # type: ignore[arg-type]

        learner = lda.Learner(add_up, job, n_words, counts.n_documents)
        start = now()
        for number in range(1, job.iterations + 1):
            learner.step(number)
        took = now() - start
        model.free()
        return took, model.tasks_s, learner.lam

    return train


def workloads(options: argparse.Namespace) -> dict[str, Callable[[], Train]]:
    """How each is loaded."""
    from clamor_ray.workloads import lda, lr, svm
    from clamor_ray.workloads.models.linear import Sample
    from clamor_ray.workloads.models.topics import Corpus, Prior

    n_partitions = options.partitions
    sample = Sample(options.rows, options.features, n_partitions)
    corpus = Corpus(options.documents, options.words, TOPICS, n_partitions)
    n = options.iterations
    return {
        "lr": lambda: linear_workload(lr.make_job("lbfgs", n, 0.0, memory=5, sample=sample)),
        "svm": lambda: linear_workload(svm.make_job(n, 0.0, sample=sample)),
        "lda": lambda: lda_workload(lda.TopicsJob(Prior(TOPICS), n, corpus=corpus)),
    }


def compare(name: str, one: Any, other: Any) -> None:
    """Raises WrongData where two models differ by more than rounding."""
    scale = float(np.abs(other).max(initial=0.0))
    if one.shape != other.shape or not float(np.abs(one - other).max(initial=0.0)) <= 1e-6 * scale:
        raise common.WrongData(f"{name}: the model by split aggregation is not that by the tree")


def rounds(
    name: str, train: Train, n_rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of training with either, and of them of tasks and adding up, but for the first round.

    Raises:
        WrongData: The models differ.
    """
    seconds: dict[str, list[float]] = defaultdict(list)
    sums: dict[str, list[float]] = defaultdict(list)
    for number in range(n_rounds + 1):
        models = {}
        for how in HOWS if number % 2 == 0 else reversed(HOWS):
            took, summed, models[how] = train(how)
            emit({"workload": name, "aggregate": how, "round": number, "s": took, "sum_s": summed})
            if number:
                seconds[how].append(took)
                sums[how].append(summed)
        compare(name, models["split"], models["tree"])
    return seconds, sums


def figures(
    seconds: dict[str, dict[str, list[float]]], sums: dict[str, dict[str, list[float]]]
) -> dict[str, float]:
    """From the seconds of all rounds, by workload and aggregate."""

    def speedup(of: dict[str, list[float]]) -> float:
        return statistics.median(of["tree"]) / statistics.median(of["split"])

    each = {name: speedup(of) for name, of in seconds.items()}
    out = {"split_speedup": math.exp(statistics.fmean(math.log(each[name]) for name in each))}
    for name in each:
        out[f"{name}_split_speedup"] = each[name]
        out[f"{name}_sum_speedup"] = speedup(sums[name])
        out[f"{name}_split_s"] = statistics.median(seconds[name]["split"])
    return out


def measure(options: argparse.Namespace) -> None:
    """All rounds of all workloads, on the cluster that this process is attached to."""
    from clamor_ray.workloads.cli.waiting import start_workers

    start_workers(collections=True)
    seconds, sums = {}, {}
    for name, load in workloads(options).items():
        if name in options.without:
            continue
        note(f"{name}: loading")
        train = load()
        note(f"{name}: {options.rounds + 1} rounds of {options.iterations} iterations")
        seconds[name], sums[name] = rounds(name, train, options.rounds)
        del train  # and with it what was loaded
    common.summary(figures(seconds, sums))


@contextlib.contextmanager
def _attached(options: argparse.Namespace, store_bytes: int) -> Iterator[str]:
    """A cluster of this machine; or the one of the namespaces that this process is in."""
    if not options.inside:
        with common.several_nodes(options.nodes, store_bytes, num_cpus=1) as nodes:
            yield nodes.trap
        return
    import ray

    import clamor_ray as clamor

    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level="error")
    try:
        yield clamor.init().trap
    finally:
        clamor.shutdown(force=True)
        ray.shutdown()


def _in_namespaces(options: argparse.Namespace, arguments: list[str], store_bytes: int) -> int:
    """The same program, as a driver in the first node's namespace."""
    from tests.support.lab import lab_unavailable, netns_cluster

    if reason := lab_unavailable("netns"):
        raise SystemExit(f"bench learning --rate: {reason}")
    with netns_cluster(
        options.nodes, num_cpus=1, object_store_memory=store_bytes, rate=options.rate
    ) as lab:
        command = [sys.executable, "-m", "bench", "learning", "--inside", *arguments]
        with lab.start(command) as driver:
            assert driver.stdout is not None
            for line in driver.stdout:
                print(line, end="", file=common.stdout(), flush=True)
            try:
                return driver.wait(60)
            except subprocess.TimeoutExpired:
                driver.kill()
                raise


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench learning", description=__doc__)
    parser.add_argument("--small", action="store_true", help="models of 0.8 MB, once")
    parser.add_argument("--nodes", type=int, help="of one CPU (4)")
    parser.add_argument("--partitions", type=int, help="of rows and documents (4 a node)")
    parser.add_argument("--features", type=int, help="of lr and svm (10,000,000: 80 MB)")
    parser.add_argument("--rows", type=int, help="of them, of 30 numbers (100,000)")
    parser.add_argument("--words", type=int, help="of lda, times 100 topics (100,000: 80 MB)")
    parser.add_argument("--documents", type=int, help="of 100 words (1,600)")
    parser.add_argument("--iterations", type=int, help="of each training (5)")
    parser.add_argument("--rounds", type=int, help="that count (3)")
    parser.add_argument("--rate", help="of nodes' links in namespaces, as in 10gbit (none)")
    parser.add_argument("--without", action="append", default=[], choices=WORKLOADS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    small = options.small
    options.nodes = options.nodes or (2 if small else 4)
    options.partitions = options.partitions or 4 * options.nodes
    options.features = options.features or (100_000 if small else 10_000_000)
    options.rows = options.rows or (2_000 if small else 100_000)
    options.words = options.words or (1_000 if small else 100_000)
    options.documents = options.documents or (100 if small else 1_600)
    options.iterations = options.iterations or (2 if small else 5)
    options.rounds = options.rounds or (1 if small else 3)
    if len(set(options.without)) == len(WORKLOADS):
        parser.error("--without all of them there is nothing to measure")

    largest = 8 * max(options.features, options.words * TOPICS)
    # Partial results of a node, in two iterations' at once, and what others have sent of them.
    store_bytes = (256 << 20) + 3 * largest * options.partitions // options.nodes
    if options.rate and not options.inside:
        return _in_namespaces(options, arguments, store_bytes)

    import clamor_ray as clamor

    environment = common.environment(library=clamor.__version__, bench="learning")
    if not options.inside:
        note("touching memory")
        common.warm_memory(min(6 << 30, 2 * options.nodes * store_bytes))
    with _attached(options, store_bytes) as trap:
        environment["environment"].update(
            trap=trap,
            nodes=options.nodes,
            links=options.rate or "none: one machine",
            partitions=options.partitions,
            features=options.features,
            rows=options.rows,
            words=options.words,
            documents=options.documents,
            topics=TOPICS,
            iterations=options.iterations,
        )
        emit(environment)
        measure(options)
    return 0
