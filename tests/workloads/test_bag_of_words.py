"""The reader of bags of words: lines, documents across borders, and what is wrong with files."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clamor_ray.errors import SourceError
from clamor_ray.workloads.data import bag_of_words
from clamor_ray.workloads.data.bag_of_words import bag_splits, documents_of, read_vocabulary
from clamor_ray.workloads.data.rows import Documents


def drawn(n_documents: int = 30, n_words: int = 200, seed: int = 1) -> np.ndarray[Any, Any]:
    """Entries as they are in a file; some documents have no words, some very many."""
    rng = np.random.default_rng(seed)
    triples = []
    for document in range(1, n_documents + 1):
        n = int(rng.choice([0, 1, 3, 40]))
        words = np.sort(rng.choice(n_words, n, replace=False)) + 1
        triples += [(document, word, int(rng.integers(1, 9))) for word in words]
    return np.array(triples)


def text_of(triples: Any, n_documents: int = 30, n_words: int = 200) -> bytes:
    lines = [f"{d} {w} {n}\n" for d, w, n in triples]
    return f"{n_documents}\n{n_words}\n{len(lines)}\n{''.join(lines)}".encode()


def joined(parts: list[Documents]) -> np.ndarray[Any, Any]:
    return np.concatenate(
        [
            np.column_stack(
                [np.repeat(part.numbers, np.diff(part.first)), part.words + 1, part.counts]
            )
            for part in parts
        ]
    ).astype(int)


def read(path: Path, n: int) -> list[Documents]:
    splits, _ = bag_splits(str(path), n=n)
    return [item for split in splits for item in pickle.loads(pickle.dumps(split)).read()]


def test_every_document_is_whole_and_in_one_partition(tmp_path: Path) -> None:
    triples = drawn()
    path = tmp_path / "docword.txt"
    path.write_bytes(text_of(triples))
    for n in (1, 2, 3, 10, 50, 1000, 10_000):
        parts = read(path, n)
        assert np.array_equal(joined(parts), triples)
        numbers = np.concatenate([part.numbers for part in parts])
        assert numbers.tolist() == np.unique(triples[:, 0]).tolist()
    _, header = bag_splits(str(path))
    assert (header.n_documents, header.n_words, header.n_entries) == (30, 200, len(triples))


def test_a_document_that_is_longer_than_several_partitions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bag_of_words, "_TAIL_BYTES", 16)
    triples = [(3, word, 1) for word in range(1, 200)] + [(4, 7, 2)]
    path = tmp_path / "docword.txt"
    path.write_bytes(text_of(triples)[:-1])  # the last line has no end
    assert [part.numbers.tolist() for part in read(path, 10) if len(part)] == [[3], [4]]
    assert np.array_equal(joined(read(path, 10)), triples)


def test_compressed_files_become_several_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bag_of_words, "ITEM_ENTRIES", 50)
    triples = drawn(100)
    path = tmp_path / "docword.txt.gz"
    path.write_bytes(gzip.compress(text_of(triples, 100)))
    parts = read(path, 9)
    assert len(parts) > 5
    assert np.array_equal(joined(parts), triples)
    path.write_bytes(gzip.compress(text_of(triples, 100) + b"100 x 1\n"))
    with pytest.raises(SourceError, match=rf"gz, line {len(triples) + 4}: '100 x 1' is not doc"):
        read(path, 1)


def test_words_are_in_order_and_once() -> None:
    found = documents_of(np.array([[1, 5, 1], [1, 2, 3], [1, 5, 2], [2, 1, 1]]))
    assert found.numbers.tolist() == [1, 2]
    assert found.first.tolist() == [0, 2, 3]
    assert found.words.tolist() == [1, 4, 0]
    assert found.counts.tolist() == [3.0, 3.0, 1.0]
    empty = documents_of(np.empty((0, 3), np.int64))
    assert (len(empty), empty.first.tolist()) == (0, [0])


def test_what_arrow_does_not_take_is_read_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "docword.txt"
    path.write_bytes(b"2 \r\n9\r\n3\r\n1 2 3 \r\n\r\n1\t4  1\r\n2 9 1\r\n")
    assert joined(read(path, 1)).tolist() == [[1, 2, 3], [1, 4, 1], [2, 9, 1]]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("7 8", "'7 8' is not document, word and count"),
        ("7 8 -1", "'7 8 -1' is not document, word and count"),
        ("7 8 1.5", "'7 8 1.5' is not document, word and count"),
        ("7 8 1 1", "'7 8 1 1' is not document, word and count"),
        ("7 8 99999999999999999999", "is not document, word and count"),
        ("7 0 1", "word 0 of 200"),
        ("7 201 1", "word 201 of 200"),
        ("7 8 0", "document 7 has word 8 0 times"),
        ("31 8 1", "document 31 of 30"),
        ("0 8 1", "document 0 of 30"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, line: str, why: str) -> None:
    lines = [f"{1 + i // 10} {1 + i % 10} 1" for i in range(100)]
    lines[64] = line
    path = tmp_path / "docword.txt"
    path.write_text("30\n200\n100\n" + "\n".join(lines))
    for n in (1, 4):
        with pytest.raises(SourceError) as caught:
            read(path, n)
        assert f"{path}, line 68: " in str(caught.value)
        assert why in str(caught.value)


def test_documents_out_of_order_are_refused_wherever_the_borders_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bag_of_words, "_TAIL_BYTES", 1)  # nobody looks far ahead
    lines = [f"{document} {word} 1" for document in (1, 3, 2) for word in range(1, 11)]
    path = tmp_path / "docword.txt"
    path.write_text("3\n10\n30\n" + "\n".join(lines) + "\n")
    for n in range(1, 31):
        with pytest.raises(SourceError, match="line 24: document 2 comes after document 3"):
            read(path, n)


def test_what_is_no_bag_of_words_is_said(tmp_path: Path) -> None:
    path = tmp_path / "docword.txt"
    for text in ("", "1\n2", "1 2 3\n1 2 3\n1 2 3\n", "a\nb\nc\n"):
        path.write_text(text)
        with pytest.raises(SourceError, match="its first three lines should be"):
            bag_splits(str(path))
    (tmp_path / "docword.2.txt").write_text("1\n1\n0\n")
    with pytest.raises(SourceError, match="is 2 files"):
        bag_splits(str(tmp_path / "docword*"))
    parts = read(tmp_path / "docword.2.txt", 3)
    assert [len(part) for part in parts] == [0]


def test_a_vocabulary_has_as_many_words(tmp_path: Path) -> None:
    path = tmp_path / "vocab.txt"
    path.write_text("one\ntwo\nthrée\n", encoding="utf-8")
    assert read_vocabulary(str(path), 3) == ["one", "two", "thrée"]
    with pytest.raises(SourceError, match="has 3 words, and the documents 4"):
        read_vocabulary(str(path), 4)
