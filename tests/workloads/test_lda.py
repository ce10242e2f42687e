"""Topics of documents: the arithmetic, against scikit-learn, and runs over a cluster."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from matplotlib.image import imread
from scipy import sparse, special

from clamor_ray.workloads import lda
from clamor_ray.workloads.cli import learning
from clamor_ray.workloads.cli.learning import Iteration
from clamor_ray.workloads.cli.stages import Stages
from clamor_ray.workloads.data.places import InputError
from clamor_ray.workloads.data.rows import Documents
from clamor_ray.workloads.models import topics
from clamor_ray.workloads.models.topics import Corpus, Counts, Prior, WrongTopics
from tests.conftest import ClamorCluster


def parts_of(corpus: Corpus) -> list[Documents]:
    return [corpus.partition(i) for i in range(corpus.n_partitions)]


def matrix_of(parts: list[Documents], n_words: int) -> Any:
    return sparse.vstack(
        [sparse.csr_matrix((p.counts, p.words, p.first), (len(p), n_words)) for p in parts]
    ).tocsr()


def summed(parts: list[Documents], lam: Any, prior: Prior) -> Any:
    total = None
    weights = topics.weights_of(lam)
    for part in parts:
        among = np.ones(len(part), bool)
        total = topics.accumulate(total, part, part.words, weights, len(lam), prior, among)
    return total


# ---------------------------------------------------------------- documents


def test_a_partition_is_its_seed_and_number() -> None:
    corpus = Corpus(103, 200, 5, 4, seed=3)
    parts = parts_of(corpus)
    numbers = np.concatenate([part.numbers for part in parts])
    assert numbers.tolist() == list(range(1, 104))
    again = Corpus(103, 200, 5, 4, seed=3).partition(2)
    np.testing.assert_array_equal(again.words, parts[2].words)
    for part in parts:
        for i in range(len(part)):
            words = part.words[part.first[i] : part.first[i + 1]]
            assert (np.diff(words) > 0).all()
            assert part.counts[part.first[i] : part.first[i + 1]].sum() == 100
    assert len(Corpus(1, 10, 2, 3).partition(0)) == 0


def test_documents_are_chosen_by_their_numbers() -> None:
    corpus = Corpus(5000, 50, 2, 1, length=3)
    whole = corpus.partition(0)
    chosen = topics.chosen(whole, 0.2, 1, 7)
    assert 0.17 < chosen.mean() < 0.23
    half = whole.some(2000, 5000)
    np.testing.assert_array_equal(topics.chosen(half, 0.2, 1, 7), chosen[2000:])
    both = (chosen & topics.chosen(whole, 0.2, 1, 8)).mean()
    assert 0.02 < both < 0.06
    assert topics.chosen(whole, 1.0, 1, 7).all()


def test_some_documents_are_those() -> None:
    whole = Corpus(20, 50, 2, 1).partition(0)
    some = whole.some(5, 9)
    assert some.numbers.tolist() == [6, 7, 8, 9]
    want = matrix_of([whole], 50)[5:9]
    assert (matrix_of([some], 50) != want).nnz == 0


# ---------------------------------------------------------------- arithmetic


def test_weights_of_words_are_those_of_the_definition() -> None:
    lam = np.random.default_rng(1).gamma(1.0, 1.0, (5000, 3)) + 1e-3
    expected = np.exp(special.psi(lam) - special.psi(lam.sum(axis=0)))
    np.testing.assert_allclose(topics.weights_of(lam), expected, rtol=1e-12)


def test_the_bound_is_scikit_learns() -> None:
    from sklearn.decomposition import LatentDirichletAllocation

    corpus = Corpus(200, 80, 4, 3)
    parts = parts_of(corpus)
    matrix = matrix_of(parts, 80)
    model = LatentDirichletAllocation(4, max_iter=5, random_state=1, learning_method="batch")
    model.fit(matrix)
    prior = Prior(4)
    lam = np.ascontiguousarray(model.components_.T)
    total = summed(parts, lam, prior)
    assert total[-2] == matrix.sum()
    assert total[-1] == 200
    found = topics.perplexity(lam, total, prior, 200)
    assert found == pytest.approx(model.perplexity(matrix), rel=1e-4)
    # And what an iteration makes of it is what scikit-learn's makes.
    counts = total[: lam.size].reshape(lam.shape)
    assert counts.sum() == pytest.approx(matrix.sum(), rel=1e-9)
    np.testing.assert_allclose(counts.sum(axis=1), np.asarray(matrix.sum(axis=0))[0], rtol=1e-9)


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_it_is_as_good_as_scikit_learn(share: float) -> None:
    from sklearn.decomposition import LatentDirichletAllocation

    corpus = Corpus(150, 60, 4, 2)
    parts = parts_of(corpus)
    matrix = matrix_of(parts, 60)
    prior = Prior(4)
    job = lda.TopicsJob(prior, share=share, tau0=1.0, kappa=0.7, corpus=corpus)
    lam = lda.reference(parts, job, 60, 20)
    ours = topics.perplexity(lam, summed(parts, lam, prior), prior, 150)
    theirs = min(
        LatentDirichletAllocation(4, max_iter=20, random_state=seed, learning_method="batch")
        .fit(matrix)
        .perplexity(matrix)
        for seed in range(2)
    )
    assert ours < 1.03 * theirs


def test_topics_are_found() -> None:
    """Each has its most frequent words at a place of its own."""
    corpus = Corpus(150, 100, 4, 1)
    job = lda.TopicsJob(Prior(4), corpus=corpus)
    lam = lda.reference(parts_of(corpus), job, 100, 15)
    assert sorted(np.argmax(lam, axis=0) // 25 * 25) == [0, 25, 50, 75]


def test_part_of_the_documents_moves_the_parameters_part_of_the_way() -> None:
    lam = np.full((4, 2), 2.0)
    total = np.concatenate([np.arange(8.0), [-1.0, 10.0, 5.0]])
    whole, change = topics.new_lam(lam, total.copy(), Prior(2), 20, 1.0)
    np.testing.assert_allclose(whole, np.arange(8.0).reshape(4, 2) * 4 + 0.5)
    half, half_change = topics.new_lam(lam, total.copy(), Prior(2), 20, 0.25)
    np.testing.assert_allclose(half, 0.75 * lam + 0.25 * whole)
    assert half_change == pytest.approx(change / 4)
    rates = [lda.TopicsJob(Prior(2), share=0.1, tau0=3, kappa=0.5).rate(t) for t in (1, 6)]
    assert rates == pytest.approx([0.5, 1 / 3])
    assert lda.TopicsJob(Prior(2)).rate(9) == 1.0


def test_a_wrong_parameter_is_named() -> None:
    expected = np.full((3, 2), 2.0)
    assert topics.check(expected * (1 + 1e-9), expected) == pytest.approx(1e-9)
    wrong = expected.copy()
    wrong[2, 1] = 2.5
    with pytest.raises(WrongTopics, match=r"1 of 6 .* word 2 in topic 1 has 2\.5, not 2"):
        topics.check(wrong, expected)
    wrong[0, 0] = np.nan
    with pytest.raises(WrongTopics, match="word 0 in topic 0 has nan"):
        topics.check(wrong, expected)
    with pytest.raises(WrongTopics, match="shape"):
        topics.check(np.ones((2, 2)), expected)


# ---------------------------------------------------------------- command line


def test_the_result_says_what_was_found(
    attached: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    lam = np.array([[1.0, 6.0], [3.0, 2.0], [4.0, 24.0]])
    lines = [Iteration(1, 1, 0.5, 0.0123, 7.25, 0.1), Iteration(2, 1, 0.5, 0.01, 6.5, 0.1)]
    words = ["apple", "pear", "plum"]
    outcome = lda.TopicsOutcome(lam, Counts(12, 30, 1234), 321.5, lines, 3 << 20, words, 4e-13)
    monkeypatch.setattr(lda, "run", lambda *_: outcome)
    out, picture = tmp_path / "topics.parquet", tmp_path / "bound.png"
    result = CliRunner().invoke(lda.main, ["x.txt", "--out", str(out), "--picture", str(picture)])
    assert result.exit_code == 0, result.output
    assert "12 documents of 1,234 words out of 3; 2 topics, perplexity 321.5" in result.output
    assert "topic 1, 80.0%: plum apple pear" in result.output
    assert "topic 0, 20.0%: plum pear apple" in result.output
    table = pq.read_table(out).to_pydict()
    assert table["word"] == [1, 2, 3]
    assert table["text"] == words
    assert table["topic0"] == [0.125, 0.375, 0.5]
    assert imread(picture).shape[:2] == (675, 1200)


def test_it_is_over_where_the_loss_stays() -> None:
    def lines(*losses: float) -> list[Iteration]:
        return [Iteration(i, 1, 0.1, 0.1, loss, 0.1) for i, loss in enumerate(losses, 1)]

    assert not lda.is_over(lines(5.0), 0.1)
    assert not lda.is_over(lines(5.0, 4.0), 0.1)
    assert lda.is_over(lines(5.0, 4.0, 3.9), 0.1)


# ------------------------------------------------------------------ cluster


def job(**options: Any) -> lda.TopicsJob:
    corpus = Corpus(120, 400, 5, 4, length=40)
    return lda.TopicsJob(
        **{"prior": Prior(5), "corpus": corpus, "iterations": 4, "check": True, **options}
    )


@pytest.mark.parametrize(("how", "share"), [("split", 1.0), ("tree", 0.5), ("split", 0.5)])
def test_it_learns_on_two_nodes(
    clamor_cluster: ClamorCluster, how: Any, share: float, stages: Stages
) -> None:
    outcome = lda.run(job(how=how, share=share), stages)
    assert outcome.error is not None
    assert outcome.error < 1e-6
    assert outcome.counts.n_documents == 120
    assert outcome.counts.n_tokens == 120 * 40
    assert [line.number for line in outcome.lines] == [1, 2, 3, 4]
    assert outcome.lines[-1].loss < outcome.lines[0].loss


def test_few_words_are_gathered(clamor_cluster: ClamorCluster, stages: Stages) -> None:
    """A partition that has few of all words fetches their rows only."""
    corpus = Corpus(8, 20_000, 3, 4, length=30)
    outcome = lda.run(job(corpus=corpus, prior=Prior(16), iterations=2), stages)
    assert outcome.error is not None
    assert outcome.error < 1e-6
    assert outcome.received < 20_000 * 16 * 8  # less than all of it once


def test_it_ends_by_its_tolerance(clamor_cluster: ClamorCluster, stages: Stages) -> None:
    outcome = lda.run(job(iterations=100, tolerance=0.01), stages)
    assert len(outcome.lines) < 100
    assert outcome.error is not None


def docword(parts: list[Documents], n_documents: int, n_words: int) -> bytes:
    lines = [
        f"{part.numbers[i]} {part.words[j] + 1} {part.counts[j]:.0f}\n"
        for part in parts
        for i in range(len(part))
        for j in range(part.first[i], part.first[i + 1])
    ]
    return f"{n_documents}\n{n_words}\n{len(lines)}\n{''.join(lines)}".encode()


def test_files_are_read(clamor_cluster: ClamorCluster, tmp_path: Path, stages: Stages) -> None:
    corpus = Corpus(120, 400, 5, 4, length=40)
    text = docword(parts_of(corpus), 120, 400)
    (tmp_path / "docword.txt").write_bytes(text)
    (tmp_path / "docword.txt.gz").write_bytes(gzip.compress(text))
    (tmp_path / "vocab.txt").write_text("".join(f"word{i}\n" for i in range(400)))
    drawn = lda.run(job(), stages)
    for name in ("docword.txt", "docword.txt.gz"):
        files = {"data": str(tmp_path / name), "vocabulary": str(tmp_path / "vocab.txt")}
        found = lda.run(job(corpus=None, n_partitions=3, **files), stages)
        np.testing.assert_allclose(found.lam, drawn.lam, rtol=1e-6, atol=1e-9)
        assert found.perplexity == pytest.approx(drawn.perplexity)
        assert found.words is not None
        assert lda.top_words(found.lam, found.words, 1)[0].startswith("word")


def test_a_file_that_is_cut_off_is_noticed(
    clamor_cluster: ClamorCluster, tmp_path: Path, stages: Stages
) -> None:
    text = docword(parts_of(Corpus(20, 50, 2, 1)), 20, 50)
    path = tmp_path / "docword.txt"
    path.write_bytes(text[: text.rfind(b"\n", 0, -1) + 1])
    with pytest.raises(InputError, match="it is cut off, or has entries twice"):
        lda.run(job(corpus=None, data=str(path)), stages)
    path.write_bytes(b"3\n5\n0\n")
    with pytest.raises(InputError, match="no documents with words"):
        lda.run(job(corpus=None, data=str(path)), stages)


def test_a_wrong_sum_is_noticed(
    clamor_cluster: ClamorCluster, monkeypatch: pytest.MonkeyPatch, stages: Stages
) -> None:
    real = learning.add_up

    def add_up(*arguments: Any) -> Any:
        total = real(*arguments)
        total[3] += 1.0
        return total

    monkeypatch.setattr(learning, "add_up", add_up)
    with pytest.raises(WrongTopics):
        lda.run(job(), stages)
