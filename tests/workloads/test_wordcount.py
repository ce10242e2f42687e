"""The word count workload: the generator, the checker, and runs over a cluster."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from clamor_ray.workloads import wordcount as workload
from clamor_ray.workloads.cli.stages import Stages
from clamor_ray.workloads.data import words
from clamor_ray.workloads.data.places import InputError
from clamor_ray.workloads.data.words import WrongCounts
from tests.conftest import ClamorCluster


def files(folder: Path, n_words: int = 20_000, seed: int = 1, **other: Any) -> list[Path]:
    options = {"n_files": 3, "vocabulary": 500, "skew": 1.0, **other}
    return words.write_files(folder, n_words, seed=seed, **options)


# ---------------------------------------------------------------- generating


def test_no_two_words_are_alike() -> None:
    made = [words.word(index) for index in range(30_000)]
    assert len(set(made)) == len(made)
    assert all(re.fullmatch("[a-z]+", each) for each in made)


def test_as_many_words_as_asked_in_sentences(tmp_path: Path) -> None:
    paths = files(tmp_path)
    counts = [sum(words.reference([path]).values()) for path in paths]
    assert sum(counts) == 20_000
    assert max(counts) - min(counts) <= 1
    lines = [line for path in paths for line in path.read_text().splitlines()]
    assert all(line[0].isupper() and line.endswith(".") for line in lines)
    lengths = np.array([len(line.split()) for line in lines])
    assert lengths.max() <= 20
    assert np.median(lengths) > 5


def test_same_seed_same_text(tmp_path: Path) -> None:
    texts = [
        [path.read_text() for path in files(tmp_path / name, seed=seed)]
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    ]
    assert texts[0] == texts[1]
    assert texts[0] != texts[2]
    assert len(set(texts[0])) == 3


def test_words_are_as_frequent_as_zipf_says(tmp_path: Path) -> None:
    counts = words.reference(files(tmp_path, 400_000, vocabulary=2000))
    assert counts.total() == 400_000
    found = np.array([counts[words.word(i)] for i in (9, 19, 39, 79, 159)])
    slope = np.polyfit(np.log([10, 20, 40, 80, 160]), np.log(found), 1)[0]
    assert slope == pytest.approx(-1.0, abs=0.1)


# ---------------------------------------------------------------- cutting and checking


@given(st.lists(st.text(st.characters(max_codepoint=0x250)) | st.text("aB. ,'\n9")))
def test_two_ways_of_cutting_agree(lines: list[str]) -> None:
    expected: Counter[str] = Counter()
    for line in lines:
        text = "".join(c if "a" <= c <= "z" else " " for c in line.lower())
        expected.update(text.split())
    assert Counter(word for line in lines for word in words.words_of(line)) == expected


def test_one_wrong_count_is_noticed() -> None:
    expected = Counter({"a": 3, "b": 1})
    words.check({"b": 1, "a": 3}, expected)
    with pytest.raises(WrongCounts, match="'a' was counted 2 times, it is there 3 times"):
        words.check({"a": 2, "b": 1}, expected)
    with pytest.raises(WrongCounts, match="'b' was counted 0 times"):
        words.check({"a": 3}, expected)
    with pytest.raises(WrongCounts, match="'c' was counted 1 times, it is there 0 times"):
        words.check({"a": 3, "b": 1, "c": 1}, expected)


# ------------------------------------------------------------- command line


def test_the_result_says_what_was_found(
    attached: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    outcome = workload.WordCountOutcome(Counter({"of": 1, "the": 1200, "a": 1}), 1.5, True)
    monkeypatch.setattr(workload, "run", lambda *_: outcome)
    out = tmp_path / "counts.parquet"
    result = CliRunner().invoke(workload.main, ["x.txt", "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "1,202 words, 3 different ones, in 1.50 s. All counts equal" in result.output
    assert "most frequent: the (1,200), " in result.output
    assert pq.read_table(out).to_pydict() == {"word": ["the", "a", "of"], "count": [1200, 1, 1]}


# ------------------------------------------------------------------ cluster


def job(paths: list[Path], **options: Any) -> workload.WordCountJob:
    named = [str(path) for path in paths]
    return workload.WordCountJob(**{"files": named, "n_partitions": 3, "check": True, **options})


def test_counts_on_two_nodes(clamor_cluster: ClamorCluster, tmp_path: Path, stages: Stages) -> None:
    outcome = workload.run(job(files(tmp_path)), stages)
    assert outcome.checked
    assert outcome.counts.total() == 20_000


def test_one_file_in_many_partitions(
    clamor_cluster: ClamorCluster, tmp_path: Path, stages: Stages
) -> None:
    """Lines are cut nowhere, however small the parts."""
    path = tmp_path / "odd.txt"
    path.write_text("one two\n\n  THREE, two...\r\n\nthree three", newline="")
    for n in (1, 2, 7, 20):
        outcome = workload.run(job([path], n_partitions=n), stages)
        assert outcome.counts == {"one": 1, "two": 2, "three": 3}


def test_a_wrong_count_is_noticed(
    clamor_cluster: ClamorCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stages: Stages
) -> None:
    real = workload.count
    monkeypatch.setattr(
        workload, "count", lambda lines: real(lines).map(lambda pair: (pair[0], pair[1] + 1))
    )
    with pytest.raises(WrongCounts, match="was counted"):
        workload.run(job(files(tmp_path)), stages)


def test_no_words_are_an_error(
    clamor_cluster: ClamorCluster, tmp_path: Path, stages: Stages
) -> None:
    path = tmp_path / "empty.txt"
    path.write_text("12 34\n")
    with pytest.raises(InputError, match=r"there are no words in .*empty.txt"):
        workload.run(job([path]), stages)
