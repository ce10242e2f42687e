"""Sources and sinks in memory and on local files; what a half-written file is told to be."""

from __future__ import annotations

import gc
import glob
import gzip
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clamor_ray.collection.data import blocks
from clamor_ray.collection.io import npy, sinks, sources
from clamor_ray.collection.io.files import File, Store, files, read_bytes
from clamor_ray.errors import MissingColumnError, SourceError, StorageError
from tests.support.lab import LocalCluster

ANSWER_S = 90.0
TABLE = pa.table({"a": range(1000), "b": [f"w{i}" for i in range(1000)]})


def _sent(splits: list[sources.Split]) -> list[blocks.Items]:
    """Each partition as a worker gets it."""
    return [pickle.loads(pickle.dumps(split)).read() for split in splits]


def _read(splits: list[sources.Split]) -> list[Any]:
    return [item for block in _sent(splits) for item in blocks.items(block)]


# ------------------------------------------------------------------ how many


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.integers(1, 60))
def test_groups_cover_all(weights: list[int], n: int) -> None:
    groups = sources._groups(weights, n)
    assert len(groups) == min(n, len(weights))
    assert [i for start, stop in groups for i in range(start, stop)] == list(range(len(weights)))
    assert all(start < stop for start, stop in groups)
    heaviest = max(sum(weights[start:stop]) for start, stop in groups)
    assert heaviest <= sum(weights) / len(groups) + max(weights)


def test_groups_are_even() -> None:
    groups = sources._groups([10] * 20 + [1] * 20, 4)
    assert groups == [(0, 6), (6, 11), (11, 17), (17, 40)]
    assert sources._groups([0, 0, 0], 2) == [(0, 1), (1, 3)]


@given(
    st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(1, 20)), min_size=1, max_size=20),
    st.one_of(st.none(), st.integers(1, 100)),
)
def test_counts(sizes: list[tuple[int, int]], more: int | None) -> None:
    weights, most = [w for w, _ in sizes], [m for _, m in sizes]
    n = None if more is None else len(sizes) + more
    counts = sources._counts(weights, most, n)
    assert all(1 <= count <= limit for count, limit in zip(counts, most, strict=True))
    if n is not None:
        assert sum(counts) == min(n, sum(most))
    else:
        for weight, limit, count in zip(weights, most, counts, strict=True):
            assert count == limit or weight / count <= 64 << 20


def test_items() -> None:
    values: list[Any] = [{"x": i, "y": str(i)} for i in range(10)]
    for of in (range(10), [0.5, 1.5], ["a", None, 3], [(1, "a"), (2, "b")], values):
        for n in (None, 1, 2, 100):
            splits = sources.items_splits(of, n)
            assert _read(splits) == list(of)
            assert len(splits) == min(n or 1, len(of))
    assert [split.describe() for split in sources.items_splits(range(5), 2)] == [
        "items 0-1",
        "items 2-4",
    ]
    (empty,) = sources.items_splits([], 4)
    assert blocks.n_items(empty.read()) == 0
    assert empty.describe() == "no items"
    with pytest.raises(TypeError, match=r"a str is one item: write \[it\]"):
        sources.items_splits("abc")
    with pytest.raises(ValueError, match="at least one partition, not 0"):
        sources.items_splits([1], 0)


def test_arrays() -> None:
    array = np.arange(30, dtype=np.float32).reshape(10, 3)
    parts = _sent(sources.numpy_splits(array, 4))
    assert [part.shape for part in parts] == [(2, 3), (3, 3), (2, 3), (3, 3)]
    np.testing.assert_array_equal(np.concatenate(parts), array)
    assert np.shares_memory(sources.numpy_splits(array, 4)[2].read(), array)
    large = np.zeros(9 << 20)  # 72 MiB
    assert len(sources.numpy_splits(large)) == 2
    with pytest.raises(ValueError, match="without axes"):
        sources.numpy_splits(np.float64(1))
    with pytest.raises(TypeError, match="masked"):
        sources.numpy_splits(np.ma.masked_array([1, 2], [True, False]))


def test_tables_send_only_their_slice() -> None:
    table = pa.table({"a": np.arange(1 << 17)})
    splits = sources.arrow_splits(table, 8)
    assert all(len(pickle.dumps(split)) < (1 << 17) + 4096 for split in splits)
    assert pa.concat_tables(_sent(splits)).equals(table)
    (batch,) = sources.arrow_splits(TABLE.to_batches()[0])
    assert batch.read().equals(TABLE)
    with pytest.raises(TypeError, match=r"a pyarrow.Table is needed, not dict"):
        sources.arrow_splits({"a": [1]})


# ------------------------------------------------------------------ which files

NAMES = st.sampled_from(["a.csv", "b.csv", "ab.csv", "_x.csv", ".y.csv", "[z].csv", "c.txt"])
FOLDERS = st.sampled_from(["", "p/", "q/", "p/q/", "q/p/q/", "_h/", ".h/"])
PATTERNS = [
    "*.csv",
    "p/*",
    "*/*.csv",
    "p*/?.csv",
    "**/*.csv",
    "**/q/*.csv",
    "p/**/a.csv",
    "[ab].csv",
    "[!a].csv",
    "_*.csv",
    "p/**/[a-b]*.csv",
    "q/**/*",
]


@given(st.sets(st.tuples(FOLDERS, NAMES)), st.sampled_from(PATTERNS))
def test_patterns_are_as_in_glob(
    tmp_path_factory: pytest.TempPathFactory, there: set[tuple[str, str]], pattern: str
) -> None:
    root = tmp_path_factory.mktemp("glob")
    for folder, name in there:
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / name).touch()
    expected = set()
    for path in glob.glob(str(root / pattern), recursive=True):
        below = [path] if os.path.isfile(path) else glob.glob(f"{path}/**", recursive=True)
        for file in filter(os.path.isfile, below):
            hidden = any(part.startswith("_") for part in os.path.relpath(file, root).split(os.sep))
            if not hidden or pattern.startswith("_"):
                expected.add(file)
    if expected:
        assert [file.path for file in files(str(root / pattern))] == sorted(expected)
    else:
        with pytest.raises(SourceError, match="no file matches"):
            files(str(root / pattern))


def test_directories_lists_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "b/2.parquet",
        "b/1.PARQUET",
        "b/_SUCCESS",
        "b/x.txt",
        "b/.p.parquet",
        "b/_t/3.pq",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(TABLE.slice(0, 3), tmp_path / name)
    (tmp_path / "[1].txt").write_text("one\n")

    def names(*arguments: Any, **options: Any) -> list[str]:
        return [os.path.relpath(file.path, tmp_path) for file in files(*arguments, **options)]

    assert names(tmp_path / "b", suffixes=(".parquet",)) == ["b/1.PARQUET", "b/2.parquet"]
    assert names(str(tmp_path / "b") + "/") == ["b/1.PARQUET", "b/2.parquet", "b/x.txt"]
    assert names([tmp_path / "b" / "x.txt", tmp_path / "b" / "2.parquet"]) == [
        "b/x.txt",
        "b/2.parquet",
    ]
    assert names(tmp_path / "[1].txt") == ["[1].txt"]
    assert names(f"file://{tmp_path}/b/x.txt") == ["b/x.txt"]
    assert names((tmp_path / "[1].txt").as_uri()) == ["[1].txt"]
    with pytest.raises(SourceError, match="is on the machine 'elsewhere'"):
        files("file://elsewhere/x")
    assert names(tmp_path / "b" / "_SUCCESS") == ["b/_SUCCESS"]
    monkeypatch.chdir(tmp_path)
    assert names("b/x*") == ["b/x.txt"]
    inside = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    assert [file.path for file in files("b/*.txt", inside)] == ["b/x.txt"]
    assert names("b/*.txt", pafs.LocalFileSystem()) == ["b/x.txt"]
    with pytest.raises(SourceError, match=r"no file matches 'b/\*\.csv'.*Look at the path"):
        files("b/*.csv")
    with pytest.raises(SourceError, match="No paths were given"):
        files([])
    with pytest.raises(SourceError, match="nothing://x/y"):
        files("nothing://x/y")


# ------------------------------------------------------------------ Parquet


def _parquet(path: Path, table: pa.Table = TABLE, group: int = 100, **options: Any) -> str:
    pq.write_table(table, path, row_group_size=group, **options)
    return str(path)


def test_parquet_row_groups(tmp_path: Path) -> None:
    path = _parquet(tmp_path / "x.parquet")
    for n, expected in ((None, 1), (1, 1), (3, 3), (10, 10), (50, 10)):
        splits = sources.parquet_splits(path, n=n)
        assert len(splits) == expected
        assert _read(splits) == TABLE.to_pylist()
    assert [split.describe() for split in sources.parquet_splits(path, n=3)] == [
        f"{path}, row groups 0-3",
        f"{path}, row groups 4-6",
        f"{path}, row groups 7-9",
    ]
    splits = sources.parquet_splits(path, ["b", "a"], n=5)
    assert splits[0].read().column_names == ["b", "a"]
    whole = sum(split.size_bytes or 0 for split in splits)
    assert sum(split.size_bytes or 0 for split in sources.parquet_splits(path, ["a"])) < whole / 1.5


def test_parquet_files(tmp_path: Path) -> None:
    for i in range(4):
        _parquet(tmp_path / f"{i}.parquet", TABLE.slice(i * 200, 200 * (i != 2)))
    assert len(sources.parquet_splits(tmp_path)) == 4  # at least one each, also without rows
    assert len(sources.parquet_splits(tmp_path, n=6)) == 6
    expected = TABLE.slice(0, 400).to_pylist() + TABLE.slice(600, 200).to_pylist()
    for n in (None, 1, 2, 3, 4, 6, 99):
        assert _read(sources.parquet_splits(tmp_path, n=n)) == expected
    assert sources.parquet_splits(tmp_path, n=1)[0].describe().endswith(", and 3 more")
    nested = pa.table({"s": [{"x": 1, "y": 2}], "z": [3]})
    path = _parquet(tmp_path / "nested.parquet", nested)
    assert _read(sources.parquet_splits(path, ["s.x"])) == [{"s": {"x": 1}}]
    assert _read(sources.parquet_splits(path, ["z", "s"])) == [{"z": 3, "s": {"x": 1, "y": 2}}]


def test_parquet_of_different_columns(tmp_path: Path) -> None:
    _parquet(tmp_path / "1.parquet", pa.table({"a": [1]}))
    _parquet(tmp_path / "2.parquet", pa.table({"a": [1.5], "b": [2]}))
    (split,) = sources.parquet_splits(tmp_path, n=1)
    assert _read([split]) == [{"a": 1.0, "b": None}, {"a": 1.5, "b": 2}]
    _parquet(tmp_path / "2.parquet", pa.table({"a": ["x"]}))
    (split,) = sources.parquet_splits(tmp_path, n=1)
    with pytest.raises(SourceError, match=r"1.parquet, .*: the files' columns do not fit"):
        split.read()


def test_parquet_missing_columns(tmp_path: Path) -> None:
    _parquet(tmp_path / "1.parquet")
    other = _parquet(tmp_path / "2.parquet", pa.table({"c": [1], "d": [2]}))
    with pytest.raises(MissingColumnError, match=r"1.parquet has no column 'b\.x': there are"):
        sources.parquet_splits(tmp_path, ["a", "b.x"])
    with pytest.raises(
        MissingColumnError, match=rf"{other} has no column 'a', 'b\.x': there are 'c', 'd'\."
    ):
        sources.parquet_splits(other, ["a", "b.x"])
    for columns in ([], "ab"):
        with pytest.raises(ValueError, match="columns= takes a list"):
            sources.parquet_splits(tmp_path, columns)


def _footer_cut(content: bytes) -> bytes:
    return content[:-50]


def _front_lost(content: bytes) -> bytes:
    return content[-1000:]


def _nothing(content: bytes) -> bytes:
    return b""


def _zeros(content: bytes) -> bytes:
    return bytes(len(content))


@pytest.mark.parametrize("damage", [_footer_cut, _front_lost, _nothing, _zeros])
def test_half_written_parquet(tmp_path: Path, damage: Callable[[bytes], bytes]) -> None:
    _parquet(tmp_path / "1.parquet")
    path = Path(_parquet(tmp_path / "2.parquet"))
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SourceError, match=rf"{path}, Parquet footer: .+ Write the file again"):
        sources.parquet_splits(tmp_path)


@pytest.mark.parametrize("damage", ["page", "value"])
def test_corrupt_row_group(tmp_path: Path, damage: str) -> None:
    # The checksum tells of a page that decodes, and is wrong.
    options: dict[str, Any] = {"compression": "none", "use_dictionary": False}
    path = Path(_parquet(tmp_path / "x.parquet", write_page_checksum=damage == "value", **options))
    group = pq.ParquetFile(path).metadata.row_group(6)
    content = bytearray(path.read_bytes())
    at = group.column(1).data_page_offset
    if damage == "page":
        content[at : at + 20] = bytes(range(0xEC, 0x100))
    else:
        content[content.index(b"w650", at) + 1] += 1
    path.write_bytes(content)
    splits = sources.parquet_splits(path, n=3)
    assert len(splits[0].read()) == 400
    with pytest.raises(SourceError, match=rf"{path}, row group 6: "):
        splits[1].read()
    assert len(sources.parquet_splits(path, ["a"], n=1)[0].read()) == 1000


def test_file_that_is_gone_or_changed(tmp_path: Path) -> None:
    path = Path(_parquet(tmp_path / "x.parquet"))
    (split,) = sources.parquet_splits(path)
    _parquet(path, TABLE.slice(0, 10))
    with pytest.raises(SourceError, match=r"had \d+ bytes when it was listed and has \d+ now"):
        split.read()
    path.unlink()
    with pytest.raises(SourceError, match=rf"{path} was listed on .* and is not there on .*s3://"):
        split.read()
    path.mkdir()
    with pytest.raises(SourceError, match=rf"{path} on {socket.gethostname()}: .*directory"):
        split.read()


class Short:
    """An open file whose reads bring at most three bytes."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at = content, 0

    def seek(self, at: int) -> None:
        self.at = at

    def readinto(self, out: memoryview) -> int:
        got = self.content[self.at : self.at + min(3, len(out))]
        out[: len(got)] = got
        return len(got)


def test_short_reads_go_on() -> None:
    file = File(Store("given", prefix="short://"), "x", 10)
    assert read_bytes(file, Short(b"0123456789"), 1, 9) == b"12345678"
    with pytest.raises(
        SourceError, match=r"short://x: bytes 1 to 8 are wanted, and it ends at byte 4\."
    ):
        read_bytes(file, Short(b"0123"), 1, 9)


# ------------------------------------------------------------------ CSV


def test_csv(tmp_path: Path) -> None:
    (tmp_path / "1.csv").write_text("a,b\n1,x\n2,y\n")
    with gzip.open(tmp_path / "2.csv.gz", "wt") as file:
        file.write("a,b\n3.5,z\n")
    (tmp_path / "3.csv").write_text("a,b\n")
    rows = [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}, {"a": 3.5, "b": "z"}]
    for n in (None, 1, 2, 9):
        assert _read(sources.csv_splits(tmp_path, n=n)) == rows
    assert len(sources.csv_splits(tmp_path, n=9)) == 3
    only = sources.csv_splits(tmp_path, ["b"])
    assert _read(only) == [{"b": row["b"]} for row in rows]
    assert _read(sources.csv_splits(tmp_path / "1.csv", ["b", "a"])) == [
        {"b": "x", "a": 1},
        {"b": "y", "a": 2},
    ]
    with pytest.raises(MissingColumnError, match=r"1.csv has no column 'q': there are 'a', 'b'"):
        sources.csv_splits(tmp_path, ["q", "a"])
    convert = pacsv.ConvertOptions(include_columns=["b", "q"])
    splits = sources.csv_splits(tmp_path / "1.csv", convert_options=convert)
    with pytest.raises((SourceError, MissingColumnError), match=r"1.csv.*'q'"):
        splits[0].read()
    assert convert.include_columns == ["b", "q"]
    convert.include_missing_columns = True
    (split,) = sources.csv_splits(tmp_path / "1.csv", ["q"], convert_options=convert)
    assert split.read().to_pylist() == [{"q": None}, {"q": None}]
    assert convert.include_columns == ["b", "q"]


@pytest.mark.parametrize("threads", [None, True, False])
def test_ragged_csv(tmp_path: Path, threads: bool | None) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n" + "1,2\n" * 500_000 + "1,2,3\n" + "1,2\n" * 10)
    options = None if threads is None else pacsv.ReadOptions(use_threads=threads)
    (split,) = sources.csv_splits(path, read_options=options)
    with pytest.raises(SourceError, match=rf"{path}: .*Row #500002: Expected 2 columns, got 3"):
        split.read()


def test_bad_csv(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n3,x\n")
    types = pacsv.ConvertOptions(column_types={"b": pa.int64()})
    with pytest.raises(SourceError, match=rf"{path}: .*Row #3: .*invalid value 'x'"):
        sources.csv_splits(path, convert_options=types)[0].read()
    path.write_text("a,b\n1,2\n3")  # the writer was stopped
    with pytest.raises(SourceError, match=rf"{path}: .*Row #3: Expected 2 columns, got 1: 3"):
        sources.csv_splits(path)[0].read()
    path.write_text("")
    with pytest.raises(SourceError, match=rf"{path}: Empty CSV file"):
        sources.csv_splits(path)[0].read()
    named = pacsv.ReadOptions(column_names=["p", "q"])
    (split,) = sources.csv_splits(path, read_options=named)
    assert split.read().column_names == ["p", "q"]
    broken = tmp_path / "x.csv.gz"
    broken.write_bytes(gzip.compress(b"a,b\n" + b"1,2\n" * 1000)[:-20])
    with pytest.raises(SourceError, match=rf"{broken}: .+"):
        sources.csv_splits(broken)[0].read()


# ------------------------------------------------------------------ text

LINES = st.lists(
    st.sampled_from(["", "x", "é", "long enough", "\r", " ", "\u2028", "\x85", "\x0c"]), max_size=12
)


@given(LINES, st.sampled_from(["\n", "\r\n"]), st.booleans(), st.integers(1, 80))
def test_each_line_is_in_one_split(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], end: str, closed: bool, n: int
) -> None:
    path = tmp_path_factory.mktemp("text") / "x"
    text = end.join(lines) + (end if closed and lines else "")
    path.write_bytes(text.encode())
    expected = [line.removesuffix("\r") for line in text.split("\n")[:-1]]
    expected += [last] if (last := text.rpartition("\n")[2]) else []
    splits = sources.text_splits(path, n=n)
    assert _read(splits) == expected
    assert len(splits) == max(1, min(n, path.stat().st_size))
    kept = [line for line in expected if line]
    assert _read(sources.text_splits(path, n=n, drop_empty_lines=True)) == kept


def test_line_longer_than_many_splits(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("a\n" + "b" * 1_000_000 + "\nc\n")
    for n in (7, 40):
        parts = _sent(sources.text_splits(path, n=n))
        assert [len(item) for part in parts for item in part] == [1, 1_000_000, 1]
        assert parts[0].dtype == object


def test_text_files(tmp_path: Path) -> None:
    (tmp_path / "1.txt").write_bytes(b"\xef\xbb\xbfone\ntwo")
    (tmp_path / "2.txt").write_bytes(b"")
    with gzip.open(tmp_path / "3.txt.gz", "wt") as file:
        file.write("three\n\nfour\n")
    expected = ["one", "two", "three", "", "four"]
    for n in (None, 1, 2, 3, 5):
        assert _read(sources.text_splits(tmp_path, n=n)) == expected
    assert _read(sources.text_splits(tmp_path, encoding="utf-8-sig")) == expected
    (tmp_path / "4.txt").write_bytes("é\n".encode("latin-1"))
    assert _read(sources.text_splits(tmp_path / "4.txt", encoding="latin-1")) == ["é"]
    for encoding, why in (("utf-16", "cannot be told by their bytes"), ("no-such", "knows no")):
        with pytest.raises(ValueError, match=why):
            sources.text_splits(tmp_path, encoding=encoding)


@pytest.mark.parametrize("n", [1, 2, 9])
def test_bytes_that_are_not_utf8(tmp_path: Path, n: int) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"fine\nfine\n1234\xff56\nfine\n")
    with pytest.raises(SourceError, match=rf"{path}, byte 14: not utf-8: .*\(ff 35 36 0a\)"):
        _read(sources.text_splits(path, n=n))


# ------------------------------------------------------------------ .npy


@pytest.mark.parametrize(
    "array",
    [
        np.arange(100),
        np.arange(60, dtype=np.float32).reshape(20, 3),
        np.arange(24, dtype=">i2").reshape(4, 3, 2),
        np.array([("a", 1.5), ("b", 2.5)], dtype=[("näme", "U4"), ("x", "f8", (1,))]),
        np.zeros((0, 3)),
        np.zeros((5, 0)),
        np.array(["2026-01-01", "NaT"], "M8[D]"),
        np.asfortranarray(np.arange(5)),
    ],
    ids=["1-d", "2-d", "big-endian", "fields", "no-rows", "no-columns", "dates", "fortran-1-d"],
)
def test_npy(tmp_path: Path, array: Any) -> None:
    path = tmp_path / "x.npy"
    np.save(path, array)
    for n in (None, 1, 3, 1000):
        parts = _sent(sources.npy_splits(path, n=n))
        assert len(parts) == max(1, min(n or 1, len(array)))
        got = np.concatenate(parts)
        assert parts[0].dtype == array.dtype
        np.testing.assert_array_equal(got, array)


def test_npy_files(tmp_path: Path) -> None:
    for i in range(3):
        np.save(tmp_path / f"{i}.npy", np.arange(i * 10, i * 10 + 10))
    for n in (None, 1, 2, 3, 7):
        splits = sources.npy_splits(tmp_path, n=n)
        assert len(splits) == (n or 3)
        assert _read(splits) == list(range(30))


class Garbage:
    """A cycle, whose finalizer lets another thread run."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(0)


def test_npy_headers_are_read_on_threads_while_garbage_is_collected(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((10, 3)))
    (file,) = files(str(tmp_path / "x.npy"))
    before, interval = gc.get_threshold(), sys.getswitchinterval()
    gc.set_threshold(5)
    sys.setswitchinterval(1e-6)

    def read(_: int) -> tuple[int, ...]:
        Garbage()
        return npy.npy_header(file).shape

    try:
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(read, range(4000))) == {(10, 3)}
    finally:
        gc.set_threshold(*before)
        sys.setswitchinterval(interval)


def test_npy_reads_its_rows_only(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    rows = (1 << 40) // 8  # a TiB, nearly all of it a hole
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": "<f8", "fortran_order": False, "shape": (rows,)}
        )
        offset = file.tell()
        file.truncate(offset + rows * 8)
    splits = sources.npy_splits(path)
    assert len(splits) == 1 << 14
    with path.open("r+b") as file:
        file.seek(offset + 5 * (64 << 20))
        file.write(np.float64(1.5).tobytes())
    part = splits[5].read()
    assert part[0] == 1.5
    assert part.nbytes == 64 << 20
    assert not part[1:].any()


def _saved(path: Path, array: Any, **options: Any) -> bytes:
    np.save(path, array, **options)
    return path.read_bytes()


def test_npy_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    whole = _saved(path, np.arange(100).reshape(50, 2))
    first = whole.index(b"\n") + 1
    cases: list[tuple[bytes, str]] = [
        (b"", "does not begin with the magic bytes"),
        (b"PK\x03\x04" + whole, "does not begin with the magic bytes"),
        (whole[:8], "the .npy header is truncated: the file has 8 bytes"),
        (whole[:40], rf"the .npy header is truncated: it needs {first} bytes and the file has 40"),
        (whole[:6] + b"\x09" + whole[7:], "version 9.0 of the .npy format is not known"),
        (whole.replace(b"'shape'", b"'shade'"), "the .npy header makes no sense"),
        (whole.replace(b"{'descr", b"{{{{{{{"), "the .npy header makes no sense"),
        (whole.replace(b"(50, 2)", b"(-5, 2)"), r"says a shape of \(-5, 2\)"),
        (
            whole[:-1],
            rf"says 50 items of 16 bytes, which is {len(whole)} bytes with the header, and the "
            rf"file has {len(whole) - 1}",
        ),
        (_saved(path, np.array(1.5)), "without axes"),
        (_saved(path, np.asfortranarray(np.ones((3, 4)))), "Fortran order.*ascontiguousarray"),
        (_saved(path, np.array([{}, 1]), allow_pickle=True), "Python objects"),
    ]
    for content, why in cases:
        path.write_bytes(content)
        with pytest.raises(SourceError, match=rf"{path}: .*{why}"):
            sources.npy_splits(path)
    long = [(f"field{i}", "f8") for i in range(200)]  # a header of more than one look
    array = np.zeros(3, long)
    _saved(path, array)
    np.testing.assert_array_equal(sources.npy_splits(path)[0].read(), array)
    _saved(path, np.zeros(3, [(f"field{i}", "f8") for i in range(1000)]))
    with pytest.raises(SourceError, match=r"a .npy header of \d+ bytes; 10000 is the most"):
        sources.npy_splits(path)


# ------------------------------------------------------------------ sinks


def _write(run: sinks.ParquetRun, *parts: blocks.Items) -> list[str]:
    run = pickle.loads(pickle.dumps(run))
    return [
        sinks.write_parquet_part(part, run.path, i, run.run_id, run.filesystem)
        for i, part in enumerate(parts)
    ]


def _there(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


@pytest.fixture(params=["local", "given"])
def out(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., sinks.ParquetRun]:
    """Begins a run in tmp_path/out."""
    inside = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())

    def begin(mode: str = "error") -> sinks.ParquetRun:
        if request.param == "local":
            return sinks.begin(tmp_path / "out", mode)
        return sinks.begin("out", mode, inside)

    return begin


def test_write(tmp_path: Path, out: Callable[..., sinks.ParquetRun]) -> None:
    run = out()
    parts = _write(run, TABLE.slice(0, 10), blocks.EMPTY, TABLE.slice(0, 0), TABLE.slice(10, 5))
    assert parts[1] == ""
    names = [f"{run.run_id}_00000{i}.parquet" for i in (0, 2, 3)]
    assert [os.path.basename(name) for name in sinks.finish(run, parts)] == names
    assert _there(tmp_path / "out") == names
    assert _read(sources.parquet_splits(tmp_path / "out")) == TABLE.slice(0, 15).to_pylist()
    sinks.finish(run, _write(run, TABLE.slice(0, 1), blocks.EMPTY, TABLE, TABLE))  # again: no more
    assert _there(tmp_path / "out") == names


def test_write_what_is_no_table(tmp_path: Path) -> None:
    run = sinks.begin(tmp_path / "out")
    pairs = blocks.from_items([("a", 1), ("b", 2)])
    sinks.finish(run, _write(run, np.arange(3), np.empty(0, object)))
    assert _read(sources.parquet_splits(tmp_path / "out")) == [{"item": i} for i in range(3)]
    run = sinks.begin(tmp_path / "out", "overwrite")
    sinks.finish(run, _write(run, pairs))
    assert _read(sources.parquet_splits(tmp_path / "out")) == [
        {"0": "a", "1": 1},
        {"0": "b", "1": 2},
    ]
    run = sinks.begin(tmp_path / "out", "append")
    before = _there(tmp_path / "out")
    with pytest.raises(TypeError):
        _write(run, blocks.from_items([object()]))
    assert _there(tmp_path / "out") == before


def test_modes(tmp_path: Path, out: Callable[..., sinks.ParquetRun]) -> None:
    run = out()
    first = _write(run, TABLE)
    sinks.finish(run, first)
    for mode in ("error", "create"):
        with pytest.raises(StorageError, match=r"out holds 1 files already\. Say mode='overwrite'"):
            out(mode)
    with pytest.raises(ValueError, match="mode is one of error, append, overwrite, ignore, not"):
        out("upsert")
    run = out("ignore")
    assert run.skip
    assert sinks.finish(run, []) == []
    run = out("append")
    sinks.finish(run, _write(run, TABLE))
    assert len(_there(tmp_path / "out")) == 2
    run = out("overwrite")
    _write(run, TABLE)
    assert len(_there(tmp_path / "out")) == 3
    sinks.abort(run)  # a run that fails leaves what was there
    assert len(_there(tmp_path / "out")) == 2
    run = out("overwrite")
    parts = _write(run, TABLE.slice(0, 5))
    sinks.finish(run, parts)
    assert _there(tmp_path / "out") == [os.path.basename(parts[0])]
    (tmp_path / "empty").mkdir()
    assert not sinks.begin(tmp_path / "empty").skip
    with pytest.raises(StorageError, match=r"is a file\. Give a directory"):
        sinks.begin(tmp_path / "out" / os.path.basename(parts[0]))


def test_no_half_written_file(
    tmp_path: Path, out: Callable[..., sinks.ParquetRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = out()
    _write(run, TABLE)
    seen: list[list[str]] = []
    encode = sinks._encode

    def stops(table: pa.Table, sink: Any, options: dict[str, Any]) -> None:
        encode(table, sink, options)
        seen.append(_there(tmp_path / "out"))
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(sinks, "_encode", stops)
        with pytest.raises(StorageError, match=r"_000001.parquet.*No space left"):
            sinks.write_parquet_part(TABLE, run.path, 1, run.run_id, run.filesystem)
    half = [name for name in seen[0] if "_000001" in name]
    assert len(half) == 1
    assert half[0].startswith(".")  # no reader takes it
    assert _there(tmp_path / "out") == [f"{run.run_id}_000000.parquet"]
    (tmp_path / "out" / half[0]).touch()  # as a killed worker leaves it
    sinks.abort(run)
    assert not (tmp_path / "out").exists()  # begin had made it


def test_nothing_is_lost_where_old_files_stay(
    tmp_path: Path, out: Callable[..., sinks.ParquetRun], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = out()
    sinks.finish(run, _write(run, TABLE, TABLE, TABLE))
    old = _there(tmp_path / "out")
    delete, n_left = sinks._delete, 0

    def stops(store: Store, paths: Sequence[str]) -> None:
        delete(store, paths[:n_left])
        if paths:
            raise StorageError("no more")

    for n_left in (0, 1):
        run = out("overwrite")
        new = _write(run, TABLE.slice(0, 1))
        with monkeypatch.context() as patch:
            patch.setattr(sinks, "_delete", stops)
            with pytest.raises(StorageError, match="no more"):
                sinks.finish(run, new)
        sinks.abort(run)
        kept = [os.path.basename(new[0])] if n_left else []
        assert _there(tmp_path / "out") == sorted(old[n_left:] + kept)


def test_stale_parts_go(tmp_path: Path) -> None:
    run = sinks.begin(tmp_path / "out")
    parts = _write(run, TABLE, TABLE)
    stale = tmp_path / "out" / f".{run.run_id}_000001.parquet.0123"
    stale.touch()
    other = tmp_path / "out" / "mine.txt"
    other.touch()
    sinks.finish(run, parts)
    assert not stale.exists()
    assert other.exists()
    Path(parts[1]).unlink()  # as if it were on another machine
    with pytest.raises(StorageError, match=r"_000001.parquet and 0 more of 2 files.*all nodes"):
        sinks.finish(run, parts)


# ------------------------------------------------------------------ with Ray


def test_ray_data_there_and_back(lab: LocalCluster) -> None:
    import ray

    ds = ray.data.from_items([{"x": i} for i in range(100)], override_num_blocks=4)
    refs = sources.ray_dataset_refs(ds.map(lambda row: {"x": 2 * row["x"]}))
    tables = ray.get(refs, timeout=ANSWER_S)
    assert all(isinstance(table, pa.Table) for table in tables)
    assert len(tables) == 4
    assert sorted(x for table in tables for x in table["x"].to_pylist()) == list(range(0, 200, 2))
    back = sinks.to_ray_dataset(refs)
    assert back.count() == 100
    assert back.sum("x") == sum(range(0, 200, 2))
    with pytest.raises(TypeError, match=r"a ray.data.Dataset is needed, not list"):
        sources.ray_dataset_refs([1])


def test_splits_are_read_by_tasks(lab: LocalCluster, tmp_path: Path) -> None:
    import ray

    from tests.support.lab.cluster import node_resource

    path = Path(_parquet(tmp_path / "x.parquet"))
    read = ray.remote(lambda split: split.read()).options(
        num_cpus=0, resources={node_resource(1): 0.001}
    )
    splits = sources.parquet_splits(path, n=5)
    tables = ray.get([read.remote(split) for split in splits], timeout=ANSWER_S)
    assert pa.concat_tables(tables).equals(TABLE)
    path.unlink()
    with pytest.raises(SourceError, match=r"is not there on .*the node where they run"):
        ray.get(read.remote(splits[0]), timeout=ANSWER_S)
