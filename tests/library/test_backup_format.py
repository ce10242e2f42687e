"""The format of backups, without a session: chunks, streams with references, manifests, files."""

from __future__ import annotations

import itertools
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clamor_ray import errors
from clamor_ray._backup import stream_refs, writer
from clamor_ray._backup.chunks import (
    CHUNK_BLOCKS,
    CHUNK_BYTES,
    BadRecordError,
    blocks_of,
    record_of,
    runs_of,
)
from clamor_ray._backup.directory import Directory, data_name
from clamor_ray._backup.manifest import (
    ChunkPlace,
    Manifest,
    SavedVariable,
    moved_stream,
    name_of,
    of_bytes,
    to_bytes,
)
from clamor_ray._backup.saved_bytes import SavedBytes
from clamor_ray._objects.layout import BLOCK_BYTES, Plan, put_together, take_apart
from clamor_ray._read.ref import GlobalRef
from clamor_ray._read.state import State
from clamor_ray._redundancy.levels import Level

PLAN = Plan(10, 10)


def ref_to(region: int, name: str | None = None) -> GlobalRef[Any]:
    ref: GlobalRef[Any] = GlobalRef(region, 0, region << 20, 4096, PLAN, "scope")
    ref._name = name
    return ref


# ------------------------------------------------------------------ chunks

places = st.lists(st.integers(0, CHUNK_BLOCKS - 1), unique=True, max_size=40).map(sorted)


def some_blocks(numbers: list[int], seed: int) -> Any:
    blocks = np.random.default_rng(seed).integers(0, 256, (len(numbers), BLOCK_BYTES), np.uint8)
    blocks[::3] = 0
    return np.array(numbers, np.uint16), blocks


@given(places, st.integers(0, 2**32))
@settings(deadline=None)
def test_a_chunk_comes_back(numbers: list[int], seed: int) -> None:
    where, blocks = some_blocks(numbers, seed)
    image = np.zeros((CHUNK_BLOCKS, BLOCK_BYTES), np.uint8)
    image[where] = blocks
    record = record_of(where, blocks)
    got = np.zeros(CHUNK_BYTES, np.uint8)
    if record is not None:
        content = memoryview(b"".join(record.parts))
        assert content.nbytes == record.n_bytes
        for offset, view in runs_of(*blocks_of(content, record.digest)):
            assert not got[offset : offset + view.nbytes].any()
            got[offset : offset + view.nbytes] = np.frombuffer(view, np.uint8)
    assert (record is None) == (not image.any())
    assert np.array_equal(got.reshape(image.shape), image)


@given(st.data())
@settings(deadline=None)
def test_a_bit_that_flips_is_found(data: st.DataObject) -> None:
    numbers = data.draw(places.filter(lambda found: len(found) > 1))
    where, blocks = some_blocks(numbers, 1)
    record = record_of(where, blocks)
    assert record is not None
    content = bytearray(b"".join(record.parts))
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(BadRecordError) as caught:
        blocks_of(memoryview(content), record.digest)
    n_blocks = sum(1 for i in range(len(numbers)) if i % 3)
    head_bytes = len(content) - n_blocks * BLOCK_BYTES
    if at < head_bytes:
        assert caught.value.block is None
    else:
        kept = [number for i, number in enumerate(numbers) if i % 3]
        assert caught.value.block == kept[(at - head_bytes) // BLOCK_BYTES]


@given(st.binary(max_size=200))
@settings(deadline=None)
def test_what_is_no_record(content: bytes) -> None:
    with pytest.raises(BadRecordError):
        blocks_of(memoryview(content), "00" * 16)


# ------------------------------------------------------------------ references in streams

leaves = st.one_of(
    st.integers(1, 5).map(ref_to),
    st.just("_restore_inside"),
    st.just("clamor_ray._read.ref"),
    st.binary(max_size=300),
    st.integers(),
    st.builds(lambda n: np.arange(n), st.integers(0, 2000)),
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.tuples(inner),
        st.dictionaries(st.text(max_size=3), inner, max_size=3),
    ),
    max_leaves=20,
)


def refs_in(obj: Any) -> list[GlobalRef[Any]]:
    if isinstance(obj, GlobalRef):
        return [obj]
    if isinstance(obj, dict):
        obj = list(obj.values())
    if isinstance(obj, (list, tuple)):
        return [ref for each in obj for ref in refs_in(each)]
    return []


def without_refs(obj: Any) -> Any:
    if isinstance(obj, GlobalRef):
        return ("ref", obj._region)
    if isinstance(obj, dict):
        return {key: without_refs(value) for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return type(obj)(without_refs(each) for each in obj)
    return ("array", obj.tolist()) if isinstance(obj, np.ndarray) else obj


@given(trees, st.text(max_size=400))
@settings(deadline=None)
def test_references_are_replaced_and_nothing_else(obj: Any, name: str) -> None:
    pickled = take_apart(obj)
    stream = bytes(pickled.inband)
    inside = refs_in(obj)
    found = [GlobalRef._unpacked(packed)._region for packed in stream_refs.packed_in(stream)]
    assert set(found) == {ref._region for ref in inside}

    def other(packed: bytes) -> bytes:
        return ref_to(100 + GlobalRef._unpacked(packed)._region, name)._packed()

    new = stream_refs.replaced(stream, other)
    assert (new is stream) == (not inside)
    got = pickle.loads(new, buffers=pickled.buffers)
    assert [ref._region for ref in refs_in(got)] == [100 + ref._region for ref in inside]
    assert all(ref._name == name for ref in refs_in(got))
    back = pickle.loads(
        stream_refs.replaced(new, lambda p: ref_to(GlobalRef._unpacked(p)._region - 100)._packed()),
        buffers=pickled.buffers,
    )
    assert without_refs(back) == without_refs(obj)


def test_a_reference_in_a_function_and_twice() -> None:
    ref = ref_to(3)
    stream = bytes(take_apart({"f": lambda: ref, "same": [ref, ref], "copy": ref_to(3)}).inband)
    new = stream_refs.replaced(stream, lambda packed: ref_to(9)._packed())
    got = pickle.loads(new)
    assert {got["f"]()._region, *(r._region for r in got["same"]), got["copy"]._region} == {9}
    assert got["same"][0] is got["same"][1]
    # A stream that gets shorter has no frame that says that it is longer.
    long = bytes(take_apart([ref_to(3, "n" * 1000)]).inband)
    short = stream_refs.replaced(long, lambda packed: ref_to(9)._packed())
    assert len(short) < len(long) - 900
    assert [ref._region for ref in pickle.loads(short)] == [9]


# ------------------------------------------------------------------ manifests


def saved(region: int = 7, **how: Any) -> SavedVariable:
    described: dict[str, Any] = {
        "names": ("a", "b"),
        "keys": (),
        "state": State(3, take_apart(np.arange(1000)).plan, None),
        "is_old": False,
        "level": Level("raid1", copies=3),
        "chunks": {0: ChunkPlace("data/x", 5, 6, "ab"), 7: ChunkPlace("data/y", 0, 1, "cd")},
        **how,
    }
    return SavedVariable(region, **described)


MANIFEST = Manifest(4, "scope", "now", "0.1", (saved(), saved(8, names=(), level=None, chunks={})))


def test_a_manifest_comes_back() -> None:
    assert of_bytes(to_bytes(MANIFEST), "m") == MANIFEST
    assert MANIFEST.files == {"data/x", "data/y"}


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_a_manifest_with_a_wrong_byte_is_refused(data: st.DataObject) -> None:
    content = bytearray(to_bytes(MANIFEST))
    if data.draw(st.booleans()):
        content = content[: data.draw(st.integers(0, len(content) - 1))]
    else:
        content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises((errors.DamagedBackupError, errors.BackupFormatError)) as caught:
        of_bytes(bytes(content), "m")
    assert "m" in str(caught.value)


def test_a_newer_format_says_so_whatever_follows() -> None:
    with pytest.raises(errors.BackupFormatError, match="format 2 of a backup") as caught:
        of_bytes(b'{"clamor-backup": 2}\nsomething else', "m")
    assert "later" in caught.value.hint


# ------------------------------------------------------------------ bytes of a variable


@pytest.fixture
def directory(tmp_path: Path) -> Directory:
    found = Directory.at(tmp_path / "backup")
    found.prepare()
    return found


def written(directory: Directory, image: Any, numbers: list[int]) -> dict[int, ChunkPlace]:
    """The blocks of an image of shape (n, 4096), in a data file for each chunk."""
    chunks = {}
    for chunk in sorted({number // CHUNK_BLOCKS for number in numbers}):
        mine = [number for number in numbers if number // CHUNK_BLOCKS == chunk]
        where = np.array(mine, np.int64) - chunk * CHUNK_BLOCKS
        record = record_of(where.astype(np.uint16), image[mine])
        if record is None:
            continue
        name = data_name(1, "token", str(chunk))
        directory.write(name, [b"before it", *record.parts])
        chunks[chunk] = ChunkPlace(name, 9, record.n_bytes, record.digest)
    return chunks


def test_any_part_of_it_is_read(directory: Directory) -> None:
    rng = np.random.default_rng(5)
    image = np.zeros((3 * CHUNK_BLOCKS, BLOCK_BYTES), np.uint8)
    numbers = sorted({0, 1023, 1024, *rng.integers(0, len(image), 30).tolist()})
    image[numbers] = rng.integers(0, 256, (len(numbers), BLOCK_BYTES), np.uint8)
    chunks = written(directory, image, numbers)
    flat = image.reshape(-1)
    with ThreadPoolExecutor(2) as pool:
        content = SavedBytes(directory, 1, saved(chunks=chunks), pool)
        patch = rng.integers(0, 256, 9000, np.uint8).tobytes()
        for patch_at in (None, 5, CHUNK_BYTES - 4000, 3 * CHUNK_BYTES - 100):
            expected = np.concatenate([flat, np.zeros(10000, np.uint8)])
            if patch_at is not None:
                content.put_over(patch_at, patch)
                expected[patch_at : patch_at + len(patch)] = np.frombuffer(patch, np.uint8)
            for _ in range(20):
                begin, end = sorted(rng.integers(0, len(expected), 2).tolist())
                assert content.read(begin, end) == expected[begin:end].tobytes()
            spans = [(at, at + view.nbytes) for at, view in content.content(0, len(expected))]
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
            assert sum(b - a for a, b in spans) < 40 * BLOCK_BYTES  # holes are not read


@given(st.integers(0, 3000), st.booleans())
@settings(deadline=None)
def test_a_stream_that_grows_moves(n: int, is_array: bool) -> None:
    obj = {"ref": ref_to(1), "a": np.arange(n), "b": b"x" * n} if is_array else [ref_to(1), n]
    pickled = take_apart(obj)
    image = pickled.image()
    stream = bytes(pickled.inband)
    for name in (None, "n" * 5000):
        new = stream_refs.replaced(stream, lambda packed, name=name: ref_to(77, name)._packed())  # type: ignore[misc]
        plan = moved_stream(pickled.plan, len(stream), len(new))
        moved = bytearray(image.ljust(plan.total_bytes, b"\0"))
        moved[plan.inband_offset : plan.inband_offset + len(new)] = new
        got: Any = put_together(np.frombuffer(bytes(moved), np.uint8), plan)
        (ref,) = refs_in(got)
        assert (ref._region, ref._name) == (77, name)
        if is_array:
            assert np.array_equal(got["a"], np.arange(n))


# ------------------------------------------------------------------ files


def test_a_manifest_never_replaces_another(directory: Directory) -> None:
    directory.put_manifest(1, to_bytes(MANIFEST))
    with pytest.raises(errors.BackupInUseError, match="written by another process"):
        directory.put_manifest(1, b"other")
    assert directory.manifest(1) == MANIFEST
    assert directory.numbers() == [1]
    left = sorted(os.listdir(directory.path))
    assert left == ["checkpoint-00000001.json", "data"]


def test_what_no_checkpoint_needs_goes(directory: Directory) -> None:
    names = {n: data_name(n, "token", "0") for n in range(1, 5)}
    for n, name in names.items():
        directory.write(name, [b"x"])
        if n < 4:
            needed = {0: ChunkPlace(names[max(1, n - 1)], 0, 1, ""), 1: ChunkPlace(name, 0, 1, "")}
            directory.put_manifest(n, to_bytes(Manifest(n, "s", "", "", (saved(chunks=needed),))))
    orphan = data_name(2, "dead", "0")
    directory.write(orphan, [b"x"])
    directory.write("data/notes", [b"x"])
    directory.tidy(3, keep=2)
    assert directory.numbers() == [2, 3]
    # Of the number that is written now, 4, nothing goes: somebody may be at it.
    assert sorted(directory.data_files()) == [*(names[n] for n in (1, 2, 3, 4)), "data/notes"]
    directory.tidy(3, keep=1)
    assert sorted(directory.data_files()) == [*(names[n] for n in (2, 3, 4)), "data/notes"]


def test_of_a_damaged_checkpoint_nothing_goes(directory: Directory) -> None:
    for n in (1, 2, 3):
        name = data_name(n, "token", "0")
        directory.write(name, [b"x"])
        needed = {0: ChunkPlace(name, 0, 1, "")}
        directory.put_manifest(n, to_bytes(Manifest(n, "s", "", "", (saved(chunks=needed),))))
    Path(directory.path, name_of(2)).write_bytes(b"rotten")
    directory.tidy(3, keep=2)
    assert directory.numbers() == [1, 2, 3]
    assert len(directory.data_files()) == 3


def test_one_writer_at_a_time(directory: Directory) -> None:
    with writer.writing(directory):
        with (
            pytest.raises(errors.BackupInUseError, match=f"Process {os.getpid()} of"),
            writer.writing(directory),
        ):
            pass
        child = os.fork()
        if child == 0:  # has the lock's descriptor too; it ends when the test does
            os._exit(0)
        os.waitpid(child, 0)
    with writer.writing(directory):
        pass
