"""The reader of libsvm text: against scikit-learn's, against itself line by line, and in pieces."""

from __future__ import annotations

import gzip
import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs as pafs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clamor_ray.errors import SourceError
from clamor_ray.workloads.data import libsvm
from clamor_ray.workloads.data.libsvm import Malformed, libsvm_splits, parse
from clamor_ray.workloads.data.rows import LabelledRows
from tests.support.s3_rig import ENVIRONMENT, moto_server

PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
NEWLINE = b"\n"
TOKENS = [
    *(b" ", b"\n", b":", b"1", b"2", b"+", b"-", b".5", b"e1", b"#", b"\r\n", b"qid:1", b"nan"),
    *(b"\t", b"1 1:2\n", b"-1 2:3 5:1\n", b"1:2 ", b"a", b'"', b"inf", b"0x1", b"_", b"\0", b"3:1"),
]


def same(one: LabelledRows, other: LabelledRows) -> bool:
    names = ("labels", "first", "columns", "values")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def test_lines_are_rows() -> None:
    rows = parse(
        b"# made by hand\n+1 1:0.5 4:-2e1\t7:+3\r\n\n-1 qid:3 2:1 # the second\n  2.5  \n0 1:0"
    )
    assert rows.labels.tolist() == [1.0, -1.0, 2.5, 0.0]
    assert rows.first.tolist() == [0, 3, 4, 4, 5]
    assert rows.columns.tolist() == [0, 3, 6, 1, 0]
    assert rows.values.tolist() == [0.5, -20.0, 3.0, 1.0, 0.0]
    assert rows.width == 7
    assert parse(b"1 0:5\n", zero_based=True).columns.tolist() == [0]
    for nothing in (b"", b"\n\n", b"# nothing\n"):
        assert len(parse(nothing)) == 0
        assert parse(nothing).first.tolist() == [0]


@PATIENT
@given(st.lists(st.sampled_from(TOKENS), max_size=10).map(b"".join))
def test_at_once_is_line_by_line_or_nothing(text: bytes) -> None:
    cleaned = libsvm._cleaned(text)
    at_once = libsvm._parse_at_once(cleaned, 1, 100)
    try:
        by_line = libsvm._parse_lines(cleaned, 1, 100)
    except Malformed:
        assert at_once is None
        return
    assert at_once is not None
    assert same(at_once, by_line)


def drawn(n_rows: int, seed: int = 1) -> tuple[bytes, Any, Any]:
    """Text that scikit-learn has written, and what of."""
    from scipy import sparse
    from sklearn.datasets import dump_svmlight_file

    rng = np.random.default_rng(seed)
    matrix = sparse.random_array((n_rows, 500), density=0.02, rng=rng, format="csr")
    labels = rng.choice([-1.0, 1.0], n_rows)
    text = io.BytesIO()
    dump_svmlight_file(matrix, labels, text, zero_based=False, comment="scikit-learn's")
    return text.getvalue(), matrix, labels


def test_it_is_what_scikit_learn_reads() -> None:
    from sklearn.datasets import load_svmlight_file

    text, _, _ = drawn(2000)
    matrix, labels = load_svmlight_file(io.BytesIO(text), n_features=500, zero_based=False)
    rows = parse(text)
    assert np.array_equal(rows.labels, labels)
    assert (rows.matrix(500) != matrix).nnz == 0
    assert libsvm._parse_at_once(libsvm._cleaned(text), 1, 500) is not None


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"one 1:2", "the label is a number, not 'one'"),
        (b"1 2", "'2' is not index:value"),
        (b"1 2:", "the value of index '2' is a number, not ''"),
        (b"1 2:x", "the value of index '2' is a number, not 'x'"),
        (b"1 2:nan", "the value of index '2' is a number, not 'nan'"),
        (b"1 :3", "an index is a number, not ''"),
        (b"1 1.5:3", "an index is a whole number, not '1.5'"),
        (b"1 0:3", "indices begin at 1, and this one is '0'"),
        (b"1 3:1 2:1", "index '2' does not ascend in its row"),
        (b"1 3:1 3:1", "index '3' does not ascend in its row"),
        (b"1 11:1", "index '11' is beyond 10 features"),
        (b"1:2 3:4", "the label is a number, not '1:2'"),
        (b"1 1:2:3", "the value of index '1' is a number, not '2:3'"),
        (b"1 \xff:2", r"an index is a number, not '\\xff'"),
    ],
)
def test_a_line_that_is_none_is_named(tmp_path: Path, line: bytes, why: str) -> None:
    path = tmp_path / "rows.svm"
    lines = [b"1 1:0.5 10:1"] * 99
    lines[70] = line
    path.write_bytes(b"\n".join(lines) + b"\n")
    for n in (1, 4):
        with pytest.raises(SourceError) as caught:
            [split.read() for split in libsvm_splits(str(path), n=n, n_features=10)]
        assert f"{path}, line 71: {why}." in str(caught.value)
        assert ("zero_based=True" in str(caught.value)) == ("begin at 1" in why)


def whole(splits: list[Any]) -> list[LabelledRows]:
    return [rows for split in splits for rows in split.read()]


def joined(parts: list[LabelledRows]) -> LabelledRows:
    return LabelledRows(
        np.concatenate([rows.labels for rows in parts]),
        np.cumsum(np.concatenate([[0], *(np.diff(rows.first) for rows in parts)])),
        np.concatenate([rows.columns for rows in parts]),
        np.concatenate([rows.values for rows in parts]),
    )


def test_every_row_is_in_one_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, _, _ = drawn(60)
    path = tmp_path / "rows.svm"
    path.write_bytes(text)
    expected = parse(text)
    for n in (1, 2, 7, 60, 200):
        splits = libsvm_splits(str(path), n=n)
        assert len(splits) == n
        parts = [pickle.loads(pickle.dumps(split)).read() for split in splits]
        assert all(len(part) == 1 for part in parts)
        assert same(joined([part[0] for part in parts]), expected)
    monkeypatch.setattr(libsvm, "CHUNK_BYTES", 500)
    parts = whole(libsvm_splits(str(path), n=3))
    assert len(parts) > 10
    assert same(joined(parts), expected)
    (tmp_path / "bad.svm").write_bytes(text + b"1 x:1\n")
    with pytest.raises(SourceError, match=rf"bad\.svm, line {text.count(NEWLINE) + 1}:"):
        whole(libsvm_splits(str(tmp_path / "bad.svm"), n=2))


def test_compressed_files_and_patterns(tmp_path: Path) -> None:
    text, _, _ = drawn(40)
    half = text.find(b"\n", len(text) // 2) + 1
    (tmp_path / "a.svm.gz").write_bytes(gzip.compress(text[:half]))
    (tmp_path / "b.svm.gz").write_bytes(gzip.compress(text[half:] + b"1 0:1\n"))
    (tmp_path / "c.svm").write_bytes(text[half:])
    splits = libsvm_splits([str(tmp_path / "a.*"), str(tmp_path / "c.svm")], n=5)
    assert same(joined(whole(splits)), parse(text))
    wrong = text[half:].count(b"\n") + 1
    with pytest.raises(SourceError, match=rf"b\.svm\.gz, line {wrong}: indices begin at 1"):
        whole(libsvm_splits(str(tmp_path / "b.svm.gz")))


def test_rows_of_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    text, _, _ = drawn(50)
    with moto_server() as port:
        endpoint = f"http://127.0.0.1:{port}"
        monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
        store = pafs.S3FileSystem(
            endpoint_override=endpoint, access_key="testing", secret_key="testing",
            region="us-east-1", allow_bucket_creation=True,
        )  # fmt: skip
        store.create_dir("rows")
        with store.open_output_stream("rows/part-1.svm") as out:
            out.write(text)
        with store.open_output_stream("rows/part-2.svm") as out:
            out.write(b"1 2:3\n1 2\n")
        assert same(joined(whole(libsvm_splits("s3://rows/part-1*", n=3))), parse(text))
        with pytest.raises(SourceError, match=r"s3://rows/part-2\.svm, line 2: '2' is not"):
            whole(libsvm_splits("s3://rows/part-2.svm"))
