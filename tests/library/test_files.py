"""Files that variables are made of: what lies where in them, and their bytes. No cluster."""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pytest

from clamor_ray import errors
from clamor_ray._files import s3
from clamor_ray._files.describe import describe
from clamor_ray._files.reader import open_ranges, read_region
from clamor_ray._files.spec import FileSpec
from clamor_ray._objects.layout import BLOCK_BYTES, Plan, put_together
from tests.support.s3_rig import ENVIRONMENT, Proxy, moto_server, proxy_before

ROWS = 3000


def image_of(spec: FileSpec, plan: Plan, part_bytes: int = 1 << 20) -> Any:
    file = open_ranges(spec)
    parts = [
        bytes(read_region(spec, file, at, min(part_bytes, plan.region_bytes - at)))
        for at in range(0, plan.region_bytes, part_bytes)
    ]
    return np.frombuffer(b"".join(parts), np.uint8)


def made_of(path: Any, **said: Any) -> Any:
    spec, plan = describe(path, **said)
    assert spec.tail_offset + len(spec.tail) <= plan.region_bytes
    whole = put_together(image_of(spec, plan), plan)
    for_block = put_together(image_of(spec, plan, BLOCK_BYTES), plan)
    assert type(whole) is type(for_block)
    return whole


ARRAYS = {
    "rows": np.arange(ROWS * 7, dtype=np.float32).reshape(ROWS, 7),
    "fortran": np.asfortranarray(np.arange(ROWS * 3).reshape(ROWS, 3)),
    "structured": np.array([(1, 2.5, b"ab")] * 100, np.dtype("i4,f8,S3")),
    "dates": np.arange("2020-01", "2021-01", dtype="M8[D]"),
    "scalar": np.array(7.5),
    "empty": np.empty((0, 5)),
    "big-endian": np.arange(1000, dtype=">i2"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_npy(tmp_path: Path, name: str) -> None:
    array = ARRAYS[name]
    np.save(tmp_path / "x.npy", array)
    made = made_of(tmp_path / "x.npy")
    assert made.dtype == array.dtype
    assert made.shape == array.shape
    assert np.array_equal(made, array)
    assert made.flags.f_contiguous == array.flags.f_contiguous


def test_a_long_header(tmp_path: Path) -> None:
    array = np.zeros(3, [(f"a column with a long name {i}", "i4") for i in range(300)])
    np.save(tmp_path / "x.npy", array)
    assert np.array_equal(made_of(tmp_path / "x.npy"), array)


@pytest.mark.parametrize("offset_bytes", [0, 3, 4096])
def test_raw_bytes(tmp_path: Path, offset_bytes: int) -> None:
    path, array = tmp_path / "x.bin", np.arange(ROWS, dtype=np.int64)
    path.write_bytes(b"." * offset_bytes + array.tobytes())
    assert np.array_equal(made_of(path, dtype="i8", offset_bytes=offset_bytes), array)
    shaped = made_of(path, dtype="i8", shape=(10, 5), offset_bytes=offset_bytes)
    assert np.array_equal(shaped, array[:50].reshape(10, 5))


def a_table() -> pa.Table:
    texts = [None if i % 11 == 0 else f"text {i}" * (i % 5) for i in range(ROWS)]
    return pa.table(
        {
            "numbers": np.arange(ROWS),
            "texts": texts,
            "kinds": pa.array([f"kind {i % 7}" for i in range(ROWS)]).dictionary_encode(),
            "lists": [[i] * (i % 4) for i in range(ROWS)],
            "structs": [{"a": i, "b": None if i % 3 else "x"} for i in range(ROWS)],
            "flags": [bool(i % 2) for i in range(ROWS)],
            "nothing": pa.nulls(ROWS),
            "vectors": pa.FixedSizeListArray.from_arrays(np.arange(4.0 * ROWS), 4),
        }
    )


@pytest.mark.parametrize("rows_each", [ROWS, 100])
def test_arrow(tmp_path: Path, rows_each: int) -> None:
    table = a_table()
    with pa.ipc.new_file(str(tmp_path / "x.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=rows_each)
    made = made_of(tmp_path / "x.arrow")
    made.validate(full=True)
    assert made.equals(table)


def test_no_rows_in_an_arrow_file(tmp_path: Path) -> None:
    feather.write_feather(a_table()[:0], str(tmp_path / "x.feather"), compression="uncompressed")
    assert made_of(tmp_path / "x.feather").equals(a_table()[:0])


# --------------------------------------------------------------- what goes wrong


def test_compressed_arrow(tmp_path: Path) -> None:
    for codec in ("lz4", "zstd"):
        feather.write_feather(a_table(), str(tmp_path / "x.feather"), compression=codec)
        with pytest.raises(errors.FileFormatError, match="compression='uncompressed'"):
            describe(tmp_path / "x.feather")


def test_arrow_that_is_cut_or_damaged(tmp_path: Path) -> None:
    path = tmp_path / "x.arrow"
    feather.write_feather(a_table(), str(path), compression="uncompressed")
    whole = path.read_bytes()
    for n_bytes in (0, 5, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:n_bytes])
        with pytest.raises(errors.FileFormatError):
            describe(path)
    rng = np.random.default_rng(1)
    footer_bytes = int.from_bytes(whole[-10:-6], "little")
    for _ in range(300):  # whatever is in its footer, and in the metadata of its batches
        damaged = np.frombuffer(whole, np.uint8).copy()
        where = rng.integers(len(whole) - 10 - footer_bytes, len(whole), 4)
        damaged[where] = rng.integers(0, 256, 4)
        path.write_bytes(damaged.tobytes())
        try:
            spec, plan = describe(path)
        except errors.FileFormatError:
            continue
        assert all(at + n <= spec.tail_offset for at, n in plan.buffers)


def test_npy_that_is_none_or_too_short(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.zeros(10_000))
    whole = path.read_bytes()
    for n_bytes in (0, 5, 100, 128, len(whole) - 1):
        path.write_bytes(whole[:n_bytes])
        with pytest.raises(errors.FileFormatError, match=re.escape(str(path))):
            describe(path)
    path.write_bytes(b"something else" * 100)
    with pytest.raises(errors.FileFormatError, match=r"no \.npy file"):
        describe(path)
    np.save(path, np.array([{}, 1], object), allow_pickle=True)
    with pytest.raises(errors.FileFormatError, match="Python objects"):
        describe(path)


def test_a_dtype_or_a_shape_that_does_not_fit(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros(10, "f4"))
    with pytest.raises(errors.FileFormatError, match="float32, and not float64"):
        describe(tmp_path / "x.npy", dtype="f8")
    with pytest.raises(errors.FileFormatError, match="shape"):
        describe(tmp_path / "x.npy", shape=11)
    (tmp_path / "x.bin").write_bytes(bytes(1001))
    with pytest.raises(errors.FileFormatError, match="no whole number"):
        describe(tmp_path / "x.bin", dtype="f8")
    with pytest.raises(errors.FileFormatError, match="needs 1008"):
        describe(tmp_path / "x.bin", dtype="f8", shape=126)
    with pytest.raises(ValueError, match="dtype of raw bytes"):
        describe(tmp_path / "x.bin")
    with pytest.raises(ValueError, match="zero bytes"):
        describe(tmp_path / "x.bin", dtype=object)


def test_a_file_that_is_not_there_or_is_none(tmp_path: Path) -> None:
    with pytest.raises(errors.NoSuchFileError) as caught:
        describe(tmp_path / "x.npy")
    assert isinstance(caught.value, FileNotFoundError)
    with pytest.raises(errors.FileFormatError, match="regular file"):
        describe(tmp_path, dtype="u1")
    with pytest.raises(ValueError, match="gs://"):
        describe("gs://bucket/x.npy")


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "x.npy", np.zeros(10))

    def denied(path: Any, *how: Any) -> int:  # the kernel refuses root nothing
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(errors.FileAccessError):
        describe(tmp_path / "x.npy")


def rewrite(path: Path) -> None:
    st = path.stat()
    path.write_bytes(b"y" * st.st_size)


def replace_it(path: Path) -> None:
    other = path.with_suffix(".other")
    other.write_bytes(b"y" * path.stat().st_size)
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)


def cut(path: Path) -> None:
    os.truncate(path, 100)


def same_times(path: Path) -> None:
    st = path.stat()
    rewrite(path)
    os.utime(path, ns=(st.st_atime_ns, st.st_mtime_ns))  # as some archivers do


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)  # nobody writes to it


@pytest.mark.parametrize("change", [rewrite, replace_it, cut, same_times, pipe, Path.unlink])
def test_a_local_file_that_changes(tmp_path: Path, change: Any) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"x" * 100_000)
    spec, _ = describe(path, dtype="u1")
    file = open_ranges(spec)
    assert file.read(5, 10) == b"x" * 10
    change(path)
    with pytest.raises(errors.FileChangedError, match=re.escape(str(path))):
        file.read(5, 10)


def test_a_local_file_that_changes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"x" * 100_000)
    spec, _ = describe(path, dtype="u1")
    file, pread = open_ranges(spec), os.pread

    def late(fd: int, n_bytes: int, offset: int) -> bytes:
        found = pread(fd, n_bytes // 2 or 1, offset)
        rewrite(path)
        return found

    monkeypatch.setattr(os, "pread", late)
    with pytest.raises(errors.FileChangedError):
        file.read(0, 1000)


# ---------------------------------------------------------------------------- S3


def test_names_and_options_of_objects() -> None:
    assert s3.parse("s3://b/run#3/x.npy?region=a", None) == ("s3://b/run#3/x.npy", {"region": "a"})
    assert s3.parse("s3://b/x", {"token": None, "anon": True})[1] == {"skip_signature": "true"}
    for wrong in ("s3://b", "s3:///x", "s3://b/?region=a"):
        with pytest.raises(ValueError, match="names no object"):
            s3.parse(wrong, None)


def test_what_a_server_says_is_told_apart_from_names_and_secrets() -> None:
    path, options = "s3://credentials/part-401/x", {"access_key_id": "AKIAKEY", "endpoint": "e:403"}
    failure = RuntimeError(f"e:403 {path} credentials/part-401/x: reset, AKIAKEY")
    error = s3._error(path, failure, options)
    assert type(error) is errors.FileReadError
    assert "AKIAKEY" not in str(error)
    denied = s3._error(path, RuntimeError("HTTP 403 for AKIAKEY"), options)
    assert type(denied) is errors.FileAccessError
    assert "AKIAKEY" not in str(denied)


@pytest.fixture(scope="module")
def server() -> Iterator[Proxy]:
    with moto_server() as port, proxy_before(port) as proxy:
        yield proxy


@pytest.fixture
def proxy(server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    server.heal()
    return server


def client_of(proxy: Proxy) -> Any:
    import boto3

    return boto3.client("s3", endpoint_url=proxy.endpoint, region_name="us-east-1")


def stored(proxy: Proxy, content: bytes, key: str = "x.npy") -> str:
    client = client_of(proxy)
    client.create_bucket(Bucket="bucket")
    client.put_object(Bucket="bucket", Key=key, Body=content)
    host = proxy.endpoint.removeprefix("http://")
    return f"s3://bucket/{key}?endpoint_override={host}&scheme=http"


def npy_bytes(tmp_path: Path, array: Any) -> bytes:
    np.save(tmp_path / "local.npy", array)
    return (tmp_path / "local.npy").read_bytes()


def test_an_array_in_s3(proxy: Proxy, tmp_path: Path) -> None:
    array = np.random.default_rng(1).random((ROWS, 9))
    address = stored(proxy, npy_bytes(tmp_path, array))
    spec, _ = describe(address)
    assert proxy.body_bytes("x.npy") <= 4096
    assert spec.path == "s3://bucket/x.npy"
    assert np.array_equal(made_of(address), array)


def test_a_table_in_s3(proxy: Proxy, tmp_path: Path) -> None:
    feather.write_feather(a_table(), str(tmp_path / "t"), compression="uncompressed", chunksize=100)
    address = stored(proxy, (tmp_path / "t").read_bytes(), "t.feather")
    assert made_of(address).equals(a_table())


@pytest.mark.parametrize(("how", "times"), [("503", 4), ("close", 3), ("cut", 2)])
def test_what_passes_is_tried_again(proxy: Proxy, how: str, times: int) -> None:
    content = np.random.default_rng(2).bytes(300_000)
    spec, _ = describe(stored(proxy, content, "x.bin"), dtype="u1")
    fault = proxy.fail(how, path="x.bin", method="GET", times=times)
    assert bytes(open_ranges(spec).read(1000, 200_000)) == content[1000:201_000]
    assert fault.hits == times


def test_a_server_that_fails_for_good(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    from datetime import timedelta

    monkeypatch.setattr(s3, "RETRIES", 2)
    monkeypatch.setattr(s3, "timedelta", lambda seconds: timedelta(seconds=seconds / 10))
    spec, _ = describe(stored(proxy, bytes(10_000), "x.bin"), dtype="u1")
    proxy.fail("503", method="GET")
    with pytest.raises(errors.FileReadError, match=r"503.*SlowDown|SlowDown|503") as caught:
        open_ranges(spec).read(0, 100)
    assert type(caught.value) is errors.FileReadError


def test_a_server_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3, "RETRY_S", 0.5)
    monkeypatch.setattr(s3, "REQUEST_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        options = {"endpoint": endpoint, "skip_signature": "true", "region": "a"}
        spec = FileSpec("s3://b/x", 10_000, ("e",), options=options)
        began = time.monotonic()
        with pytest.raises(errors.FileReadError):
            s3.S3File(spec).read(0, 100)
        assert time.monotonic() - began < 20  # once all tries of a request, and no more


@pytest.mark.parametrize("how", ["403", "expired"])
@pytest.mark.parametrize("is_later", [False, True])
def test_credentials_that_are_wrong_or_expire(proxy: Proxy, how: str, is_later: bool) -> None:
    address = stored(proxy, bytes(10_000), "x.bin")
    options = {"access_key_id": "AKsecret", "secret_access_key": "very secret", "token": "t0ken"}
    if not is_later:
        proxy.fail(how, path="x.bin")
    spec = None

    def use() -> None:
        nonlocal spec
        spec, _ = describe(address, dtype="u1", storage_options=options)
        proxy.fail(how, path="x.bin")
        open_ranges(spec).read(0, 100)

    with pytest.raises(errors.FileAccessError, match="storage_options") as caught:
        use()
    said = f"{caught.value!r} {caught.value} {spec!r} {caught.value.__cause__!r}"
    assert not any(secret in said for secret in options.values())


@pytest.mark.parametrize("looks", [True, False])
def test_an_object_that_changes(proxy: Proxy, looks: bool) -> None:
    content = np.random.default_rng(3).bytes(100_000)
    spec, _ = describe(stored(proxy, content, "x.bin"), dtype="u1")
    file = open_ranges(spec)
    assert bytes(file.read(0, 1000)) == content[:1000]
    stored(proxy, content[::-1], "x.bin")
    if not looks:
        proxy.fail("any", method="GET")
    with pytest.raises(errors.FileChangedError, match=r"bucket/x\.bin"):
        file.read(0, 1000)
    client_of(proxy).delete_object(Bucket="bucket", Key="x.bin")
    with pytest.raises(errors.FileChangedError):
        file.read(0, 1000)


def test_an_object_that_is_not_there(proxy: Proxy) -> None:
    address = stored(proxy, b"x", "x.bin").replace("x.bin", "y.npy")
    with pytest.raises(errors.NoSuchFileError, match="bucket"):
        describe(address)


def test_addresses() -> None:
    with pytest.raises(ValueError, match="storage_options") as caught:
        s3.parse("s3://key:secret@bucket/x", None)
    assert "secret@" not in str(caught.value)
    with pytest.raises(ValueError, match="no option 'secret_key'"):
        s3.parse("s3://bucket/x?secret_key=1", None)
    with pytest.raises(ValueError, match="no object"):
        s3.parse("s3://bucket/", None)
    assert s3.parse("s3://b/k?endpoint_override=h:1&scheme=http", {"anon": True}) == (
        "s3://b/k",
        {"endpoint": "http://h:1", "skip_signature": "true"},
    )
