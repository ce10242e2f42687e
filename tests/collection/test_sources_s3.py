"""Sources and sinks on a real S3 endpoint: what is read of it, and what happens when it fails."""

from __future__ import annotations

import os
import pickle
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from clamor_ray.collection.data import blocks
from clamor_ray.collection.io import files, sinks, sources
from clamor_ray.errors import MissingColumnError, SourceError, StorageError
from tests.support.s3_rig import ENVIRONMENT, Proxy, moto_server, proxy_before

SDK_ATTEMPTS = files._SDK_ATTEMPTS
# A request that fails for ever is given up after some attempts; far from this.
GIVE_UP_S = 60.0


@pytest.fixture(scope="module")
def moto() -> Iterator[int]:
    with moto_server() as port:
        yield port


@pytest.fixture(scope="module")
def served(moto: int) -> Iterator[Proxy]:
    with proxy_before(moto) as proxy:
        yield proxy


def sdk_attempts(monkeypatch: pytest.MonkeyPatch, n: int) -> None:
    """How often the SDK tries a request by itself, from here on."""
    monkeypatch.setattr(files, "_SDK_ATTEMPTS", n)
    files._s3.cache_clear()


@pytest.fixture
def s3(served: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """The proxy, healthy; the environment says that it is S3.

    The SDK tries a request once: it would wait for seconds before it tries again.
    """
    sdk_attempts(monkeypatch, 1)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", served.endpoint)
    served.heal()
    yield served
    served.heal()
    files._s3.cache_clear()


@pytest.fixture
def bucket(s3: Proxy, request: pytest.FixtureRequest) -> str:
    """A new one, empty."""
    name = re.sub("[^a-z0-9]+", "-", f"b-{request.node.name}".lower())[:60].strip("-")
    _filesystem(s3).create_dir(name)
    s3.heal()
    return name


def _filesystem(s3: Proxy) -> Any:
    return pafs.S3FileSystem(
        access_key="testing",
        secret_key="testing",
        region="us-east-1",
        endpoint_override=s3.endpoint,
        allow_bucket_creation=True,
        request_timeout=GIVE_UP_S,  # its own 3 s are few on a busy machine
    )


def _put(s3: Proxy, path: str, content: bytes) -> None:
    with _filesystem(s3).open_output_stream(path) as out:
        out.write(content)
    s3.asked.clear()


def _bytes_of(write: Any, *arguments: Any, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    write(*arguments, sink, **options)
    return sink.getvalue().to_pybytes()


def _npy(array: Any) -> bytes:
    import io

    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def _read(splits: list[sources.Split]) -> list[Any]:
    """All items, each split as a worker gets it."""
    found: list[Any] = []
    for split in splits:
        found += blocks.items(pickle.loads(pickle.dumps(split)).read())
    return found


TABLE = pa.table({"a": range(1000), "b": [f"w{i}" for i in range(1000)]})


def test_parquet_by_pattern(s3: Proxy, bucket: str) -> None:
    for i in range(3):
        part = _bytes_of(pq.write_table, TABLE.slice(i * 300, 300), row_group_size=100)
        _put(s3, f"{bucket}/in/part-{i}.parquet", part)
    _put(s3, f"{bucket}/in/other.txt", b"no")
    splits = sources.parquet_splits(f"s3://{bucket}/in/part-*.parquet", n=9)
    assert len(splits) == 9
    assert splits[4].describe() == f"s3://{bucket}/in/part-1.parquet, row group 1"
    assert _read(splits) == TABLE.slice(0, 900).to_pylist()
    by_directory = sources.parquet_splits(f"s3://{bucket}/in/")
    assert _read(by_directory) == TABLE.slice(0, 900).to_pylist()
    (one,) = sources.parquet_splits(f"s3://{bucket}/**/in/part-1.*", columns=["b"])
    assert _read([one]) == TABLE.slice(300, 300).select(["b"]).to_pylist()
    with pytest.raises(MissingColumnError, match=r"part-0.parquet has no column 'c'.*'a', 'b'"):
        sources.parquet_splits(f"s3://{bucket}/in/part-*", columns=["c"])


def test_csv_and_text(s3: Proxy, bucket: str) -> None:
    _put(s3, f"{bucket}/t.csv", b"a,b\n1,x\n2,y\n")
    _put(s3, f"{bucket}/lines", b"one\r\ntwo\n\nfour")
    rows = _read(sources.csv_splits(f"s3://{bucket}/t.csv", columns=["b"]))
    assert rows == [{"b": "x"}, {"b": "y"}]
    for n in (1, 2, 5, 15):
        lines = _read(sources.text_splits(f"s3://{bucket}/lines", n=n))
        assert lines == ["one", "two", "", "four"]


def test_npy_reads_its_rows_only(s3: Proxy, bucket: str) -> None:
    array = np.arange(4 << 20, dtype=np.float32).reshape(-1, 64)
    _put(s3, f"{bucket}/x.npy", _npy(array))
    splits = sources.npy_splits(f"s3://{bucket}/x.npy", n=64)
    planned = s3.body_bytes("x.npy")
    assert planned < 10_000
    np.testing.assert_array_equal(splits[40].read(), array[40 * 1024 : 41 * 1024])
    assert s3.body_bytes("x.npy") - planned == 1024 * 64 * 4


def test_parquet_reads_its_columns_only(s3: Proxy, bucket: str) -> None:
    noise = np.random.default_rng(1).random((2, 1 << 17))
    table = pa.table({"a": noise[0], "b": noise[1]})
    _put(
        s3,
        f"{bucket}/x.parquet",
        _bytes_of(pq.write_table, table, row_group_size=1 << 14, use_dictionary=False),
    )
    splits = sources.parquet_splits(f"s3://{bucket}/x.parquet", columns=["b"], n=8)
    before = s3.body_bytes("x.parquet")
    assert splits[3].read().column("b").to_numpy().tolist() == noise[1, 3 << 14 : 4 << 14].tolist()
    assert s3.body_bytes("x.parquet") - before < 2 * (8 << 14)  # one column and a footer


def test_endpoint_travels(s3: Proxy, bucket: str) -> None:
    _put(s3, f"{bucket}/lines", b"one\ntwo\n")
    (split,) = sources.text_splits(f"s3://{bucket}/lines")
    # A worker has credentials of its own, and not the driver's variables.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("AWS_")}
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_EC2_METADATA_DISABLED"):
        environment[name] = ENVIRONMENT[name]
    program = "import pickle, sys; print(list(pickle.load(sys.stdin.buffer).read()))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=pickle.dumps(split),
        capture_output=True,
        env=environment,
        timeout=GIVE_UP_S,
        check=False,
    )
    assert done.stdout.strip() == b"['one', 'two']", done.stderr.decode()


def test_own_filesystem_travels(s3: Proxy, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _put(s3, f"{bucket}/lines", b"one\ntwo\n")
    filesystem = _filesystem(s3)
    for name in ("AWS_ENDPOINT_URL", *ENVIRONMENT):
        monkeypatch.delenv(name)
    for path in (f"{bucket}/lines", f"s3://{bucket}/lines"):
        splits = sources.text_splits(path, filesystem=filesystem)
        assert splits[0].describe() == f"s3://{bucket}/lines"
        assert _read(splits) == ["one", "two"]
    sdk_attempts(monkeypatch, SDK_ATTEMPTS)
    fault = s3.fail("close", path="lines", method="GET", times=4)  # pickled, it would try thrice
    assert _read(splits) == ["one", "two"]
    assert fault.hits == 4


def test_options_in_the_uri(s3: Proxy, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _put(s3, f"{bucket}/l-1", b"one\n")
    monkeypatch.delenv("AWS_ENDPOINT_URL")
    host = s3.endpoint.removeprefix("http://")
    uri = f"s3://{bucket}/l-?" + f"?scheme=http&endpoint_override={host}"
    assert _read(sources.text_splits(uri)) == ["one"]


def test_corrupt_is_not_tried_again(s3: Proxy, bucket: str) -> None:
    content = bytearray(_bytes_of(pq.write_table, TABLE, row_group_size=100))
    group = pq.ParquetFile(pa.py_buffer(bytes(content))).metadata.row_group(3)
    at = group.column(0).dictionary_page_offset or group.column(0).data_page_offset
    for i in range(at + 40, at + 400):
        content[i] ^= 0xFF
    _put(s3, f"{bucket}/x.parquet", bytes(content))
    (split,) = sources.parquet_splits(f"s3://{bucket}/x.parquet", n=1)
    s3.asked.clear()
    with pytest.raises(SourceError, match=rf"s3://{bucket}/x.parquet, row group 3: "):
        split.read()
    assert len(s3.asked) < 15
    _put(s3, f"{bucket}/y.parquet", bytes(content[:-50]))
    with pytest.raises(SourceError, match=rf"s3://{bucket}/y.parquet, Parquet footer: "):
        sources.parquet_splits(f"s3://{bucket}/y.parquet")


@pytest.mark.parametrize("how", ["503", "close", "cut"])
def test_trouble_that_passes(
    s3: Proxy, bucket: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdk_attempts(monkeypatch, SDK_ATTEMPTS)
    array = np.arange(1 << 18).reshape(-1, 2)
    _put(s3, f"{bucket}/x.npy", _npy(array))
    _put(s3, f"{bucket}/x.parquet", _bytes_of(pq.write_table, TABLE))
    times = 3
    faults = [
        s3.fail(how, path=r"x\.npy", method="GET" if how == "cut" else "", times=times),
        s3.fail(how, path=r"x\.parquet", method="GET" if how == "cut" else "", times=times),
        s3.fail(how, path="list-type", method="GET", times=times if how != "cut" else 0),
    ]
    splits = sources.npy_splits(f"s3://{bucket}/*.npy")
    np.testing.assert_array_equal(splits[0].read(), array)
    assert _read(sources.parquet_splits(f"s3://{bucket}/*.parquet")) == (TABLE.to_pylist())
    assert [fault.hits for fault in faults] == [fault.times for fault in faults]


@pytest.mark.parametrize("how", ["503", "close", "cut"])
def test_trouble_that_stays(
    s3: Proxy, bucket: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdk_attempts(monkeypatch, 2)
    _put(s3, f"{bucket}/x.npy", _npy(np.arange(1 << 16)))
    _put(s3, f"{bucket}/x.parquet", _bytes_of(pq.write_table, TABLE))
    splits = sources.npy_splits(f"s3://{bucket}/x.npy")
    splits += sources.parquet_splits(f"s3://{bucket}/x.parquet")
    parts = {"x.npy": r"bytes 128 to \d+", "x.parquet": "Parquet footer"}
    for split, (name, part) in zip(splits, parts.items(), strict=True):
        fault = s3.fail(how, path=name, method="GET")
        began = time.monotonic()
        with pytest.raises(
            StorageError, match=rf"s3://{bucket}/{name}: reading {part}: failed: .+"
        ) as raised:
            split.read()
        assert time.monotonic() - began < GIVE_UP_S
        assert fault.hits >= 2
        assert raised.value.__cause__ is not None
        s3.heal()
    s3.fail(how if how != "cut" else "503", path="list-type")
    with pytest.raises(StorageError, match=rf"s3://{bucket}: listing it: failed"):
        sources.npy_splits(f"s3://{bucket}/*.npy")


def test_short_ranges_are_tried_again(
    s3: Proxy, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What the store says when it throttles is longer than what is asked for.
    sdk_attempts(monkeypatch, 4)
    _put(s3, f"{bucket}/lines", b"one\ntwo\n")
    fault = s3.fail("503", path="lines", method="GET", times=3)
    assert _read(sources.text_splits(f"s3://{bucket}/lines")) == ["one", "two"]
    assert fault.hits == 3
    _put(s3, f"{bucket}/x.csv", b"a,b\n1,x\n")
    fault = s3.fail("503", path="x.csv", method="GET", times=3)
    assert _read(sources.csv_splits(f"s3://{bucket}/x.csv", ["b"])) == [{"b": "x"}]
    assert fault.hits == 3
    fault = s3.fail("503", path="lines", method="GET")
    with pytest.raises(StorageError, match=rf"s3://{bucket}/lines: reading bytes 0 to 7: failed"):
        _read(sources.text_splits(f"s3://{bucket}/lines"))
    assert fault.hits == 4


def test_what_is_refused_is_not_tried_again(s3: Proxy, bucket: str) -> None:
    _put(s3, f"{bucket}/x.npy", _npy(np.arange(10)))
    fault = s3.fail("403", path="x.npy")
    with pytest.raises(StorageError, match=rf"s3://{bucket}/x.npy: looking it up: refused: .*"):
        sources.npy_splits(f"s3://{bucket}/x.npy")
    assert fault.hits < 5


def test_nobody_there(monkeypatch: pytest.MonkeyPatch) -> None:
    sdk_attempts(monkeypatch, 2)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(StorageError, match=r"s3://bucket/key: looking it up: failed"):
        sources.text_splits("s3://bucket/key")


def test_nobody_answers(s3: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}")
        monkeypatch.setattr(files, "_REQUEST_S", 1.0)
        began = time.monotonic()
        with pytest.raises(StorageError, match=r"s3://bucket/key: looking it up: failed"):
            sources.text_splits("s3://bucket/key")
        assert time.monotonic() - began < GIVE_UP_S


def test_gone_and_changed(s3: Proxy, bucket: str) -> None:
    _put(s3, f"{bucket}/x", b"one\n")
    splits = sources.text_splits(f"s3://{bucket}/x")
    _put(s3, f"{bucket}/x", b"one\ntwo\n")
    with pytest.raises(SourceError, match=r"had 4 bytes when it was listed and has 8 now"):
        splits[0].read()
    _filesystem(s3).delete_file(f"{bucket}/x")
    with pytest.raises(SourceError, match=rf"s3://{bucket}/x was listed, and is not there"):
        splits[0].read()
    with pytest.raises(SourceError, match=rf"no file matches 's3://{bucket}/x'"):
        sources.text_splits(f"s3://{bucket}/x")


def test_csv_options_travel(s3: Proxy, bucket: str) -> None:
    _put(s3, f"{bucket}/x.csv", b"1;2\n3;4\n")
    splits = sources.csv_splits(
        f"s3://{bucket}/x.csv",
        read_options=pacsv.ReadOptions(column_names=["p", "q"]),
        parse_options=pacsv.ParseOptions(delimiter=";"),
        convert_options=pacsv.ConvertOptions(column_types={"q": pa.float32()}),
    )
    table = pickle.loads(pickle.dumps(splits[0])).read()
    assert table.equals(pa.table({"p": [1, 3], "q": pa.array([2, 4], pa.float32())}))


# ------------------------------------------------------------------ sinks


def _write(run: sinks.ParquetRun, *parts: Any) -> list[str]:
    run = pickle.loads(pickle.dumps(run))
    return [
        sinks.write_parquet_part(part, run.path, i, run.run_id, run.filesystem)
        for i, part in enumerate(parts)
    ]


def _there(s3: Proxy, bucket: str) -> list[str]:
    found = _filesystem(s3).get_file_info(pafs.FileSelector(bucket, recursive=True))
    return sorted(entry.path for entry in found if entry.type == pafs.FileType.File)


def test_write_and_read_back(s3: Proxy, bucket: str) -> None:
    run = sinks.begin(f"s3://{bucket}/out")
    names = sinks.finish(run, _write(run, TABLE.slice(0, 10), TABLE.slice(10, 5)))
    assert names == [f"s3://{bucket}/out/{run.run_id}_00000{i}.parquet" for i in range(2)]
    assert _read(sources.parquet_splits(f"s3://{bucket}/out")) == TABLE.slice(0, 15).to_pylist()
    with pytest.raises(StorageError, match=r"holds 2 files already.*mode='overwrite'"):
        sinks.begin(f"s3://{bucket}/out")
    assert sinks.begin(f"s3://{bucket}/out", "ignore").skip
    run = sinks.begin(f"s3://{bucket}/out", "append")
    sinks.finish(run, _write(run, TABLE.slice(20, 1)))
    assert len(_there(s3, bucket)) == 3
    run = sinks.begin(f"s3://{bucket}/out", "overwrite")
    parts = _write(run, TABLE.slice(30, 2))
    assert len(_there(s3, bucket)) == 4
    sinks.finish(run, parts)
    assert _there(s3, bucket) == parts


NOISE = np.random.default_rng(2).random(3 << 19)  # 12 MiB: an upload of several parts


@pytest.mark.parametrize("how", ["503", "close"])
@pytest.mark.parametrize("n_items", [10, len(NOISE)])
def test_write_through_trouble(
    s3: Proxy, bucket: str, how: str, n_items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdk_attempts(monkeypatch, SDK_ATTEMPTS)
    run = sinks.begin(f"s3://{bucket}/out")
    fault = s3.fail(how, path="parquet", method="PUT|POST", times=3)
    _write(run, NOISE[:n_items])
    assert fault.hits == 3
    (split,) = sources.parquet_splits(f"s3://{bucket}/out", n=1)
    np.testing.assert_array_equal(split.read().column("item").to_numpy(), NOISE[:n_items])


@pytest.mark.parametrize("how", ["503", "close"])
@pytest.mark.parametrize("n_items", [10, len(NOISE)])
def test_no_half_written_object(
    s3: Proxy, bucket: str, how: str, n_items: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdk_attempts(monkeypatch, 3)
    run = sinks.begin(f"s3://{bucket}/out")
    _write(run, TABLE)
    # Of a long upload the first part passes, the second does not.
    number = 1 if n_items == 10 else 2
    fault = s3.fail(how, path=rf"_000001\.parquet\?partNumber={number}", method="PUT")
    with pytest.raises(
        StorageError, match=rf"s3://{bucket}/out/{run.run_id}_000001.parquet: writing \d+ bytes"
    ):
        _write(run, TABLE, NOISE[:n_items])
    assert fault.hits >= 3
    s3.heal()
    assert _there(s3, bucket) == [f"{bucket}/out/{run.run_id}_000000.parquet"]
    sinks.abort(run)
    assert _there(s3, bucket) == []


def test_writer_that_stops_half_way(
    s3: Proxy, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = sinks.begin(f"s3://{bucket}/out")

    def stops(table: pa.Table, out: Any, options: dict[str, Any]) -> None:
        out.write(b"PAR1" + bytes(6 << 20))
        raise KeyboardInterrupt

    monkeypatch.setattr(sinks, "_encode", stops)
    with pytest.raises(KeyboardInterrupt):
        _write(run, TABLE)
    assert _there(s3, bucket) == []
