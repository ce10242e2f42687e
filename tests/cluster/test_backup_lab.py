"""Checkpoints of sessions on several nodes, and what is restored of them."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import ray

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._backup import checkpoint as checkpoint_module
from clamor_ray._backup.chunks import CHUNK_BYTES
from tests.cluster.test_moves_lab import on
from tests.conftest import ANSWER_S, until
from tests.support.backups import data_files, drop_all, manifest_of, new_session
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.troubles import server_pid
from tests.support.processes import stop

pytestmark = pytest.mark.lab

MIB = 1 << 20
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def three() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(3) as lab:
        clamor.init()
        yield lab


@pytest.fixture(autouse=True)
def no_names(three: LocalCluster) -> Iterator[None]:
    yield
    drop_all()


def homes_of(ref: Any) -> set[str]:
    return {node_id for node_id, entry in clamor.stats().region(ref).items() if entry.is_home}


# ------------------------------------------------------------------ what comes back


def test_each_sort_of_object(three: LocalCluster, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    whole = rng.integers(0, 256, 3 * CHUNK_BYTES + 12345, np.uint8)
    structured = np.zeros(1000, [("a", "<i4"), ("b", "<f8", (3,))])
    structured["b"] = rng.random((1000, 3))
    frame = pd.DataFrame({"x": np.arange(5000), "y": ["a", "b"] * 2500})
    table = pa.table({"n": pa.array(range(5000)), "s": pa.array([str(i) for i in range(5000)])})
    objects = {
        "whole": whole,
        "structured": structured,
        "dates": np.arange(2000).astype("datetime64[D]"),
        "columns": np.asfortranarray(rng.random((100, 70))),
        "none": np.empty((0, 3)),
        "small": np.arange(5.0),
        "frame": frame,
        "table": table,
        "mixed": {"a": np.arange(10**5), "text": "x" * 5000, "nothing": None},
    }
    for name, obj in objects.items():
        clamor.put(obj, name=name)
    clamor.share(ray.put(np.arange(10**5)), name="shared")
    with clamor.build(64 * MIB) as r:
        built = r.empty(10**6)
        built[:] = np.arange(10**6)
        in_place = r.publish({"built": built, "again": built[5:]})
    keys = np.arange(1000)
    clamor.HashMap.build(keys, keys**2, name="map")
    made = clamor.checkpoint(tmp_path, refs={"built": in_place})
    assert made.variables == len(objects) + 3
    assert (made.number, made.bytes) == (1, made.bytes_written)
    assert made.bytes > whole.nbytes
    new_session()
    back = clamor.restore(tmp_path)
    assert set(back) == {*objects, "shared", "built", "map"}
    assert {info.name for info in clamor.variables()} - {None} == set(back) - {"built"}
    for name in ("whole", "structured", "dates", "columns", "none", "small"):
        got = clamor.open(name).get()
        assert got.dtype == objects[name].dtype
        assert got.flags.f_contiguous == objects[name].flags.f_contiguous
        assert np.array_equal(got, objects[name])
        assert back[name].version == 0
    assert back["frame"].get().equals(frame)
    assert back["table"].get().equals(table)
    mixed = back["mixed"].get()
    assert np.array_equal(mixed["a"], np.arange(10**5))
    assert (mixed["text"], mixed["nothing"]) == ("x" * 5000, None)
    assert np.array_equal(back["shared"].get(), np.arange(10**5))
    assert np.array_equal(back["built"].get()["again"], np.arange(5, 10**6))
    restored = clamor.HashMap(back["map"])
    assert np.array_equal(restored.get(keys), keys**2)
    # They are variables as any: other nodes read them, and they are changed.
    assert on(1, lambda ref: int(ref.get()[7]), back["shared"]) == 7
    with clamor.update(back["whole"]) as x:
        x[0] ^= 1
    with clamor.update(restored) as t:
        t[5] = -1
    assert back["whole"].get()[0] == whole[0] ^ 1
    assert restored[5] == -1


def test_references_lead_to_what_is_restored(three: LocalCluster, tmp_path: Path) -> None:
    inner = clamor.put(np.arange(1000.0))  # nothing but references leads to it
    small = clamor.put(np.arange(3.0))
    m = clamor.HashMap.build(np.arange(100), np.arange(100) * 2)
    before = inner.snapshot()
    with clamor.update(inner) as x:
        x[0] = -1
    with clamor.update(small) as x:
        x[0] = -2
    middle = clamor.put({"inner": inner, "frozen": inner.snapshot()})
    clamor.put([inner, small, middle, m, before, inner], name="outer")
    with clamor.update(inner) as x:
        x[1] = -3  # the references in "outer" are behind
    made = clamor.checkpoint(tmp_path, refs={"mine": middle})
    assert made.variables == 7  # "inner" at three versions: frozen references have old ones
    new_session()
    back = clamor.restore(tmp_path)
    assert set(back) == {"outer", "mine"}
    new_inner, new_small, new_middle, new_map, new_before, same = back["outer"].get()
    assert new_inner == same == new_middle.get()["inner"]
    assert new_middle == back["mine"]
    assert new_inner.get()[:2].tolist() == [-1, -3]
    assert new_small.get().tolist() == [-2, 1, 2]
    assert new_map[7] == 14
    # What a frozen reference had it has still; one that had the newest version has that.
    assert new_before.get()[:2].tolist() == [0, 1]
    assert new_middle.get()["frozen"].get()[:2].tolist() == [-1, 1]
    with clamor.update(new_inner) as x:
        x[0] = 5
    assert new_inner.refresh().get()[0] == 5
    # They are held by what they are in, and by nothing else.
    held = {new_inner._region, new_map.ref._region}
    del new_inner, new_small, new_middle, new_map, new_before, same, x
    back.clear()
    time.sleep(3.0)  # nothing says that the references were counted
    assert held <= {info.region for info in clamor.variables()}
    clamor.drop("outer")
    until(lambda: not held & {info.region for info in clamor.variables()})


def test_a_frozen_reference_to_an_old_version(three: LocalCluster, tmp_path: Path) -> None:
    ref = clamor.put(np.zeros(10**5), name="moves")
    old = ref.snapshot()
    with clamor.update(ref) as x:
        x[:] = 1
    clamor.put({"old": old, "new": ref}, name="both")
    assert clamor.checkpoint(tmp_path).variables == 3
    new_session()
    both = clamor.restore(tmp_path)["both"].get()
    assert (both["old"].get() == 0).all()
    assert (both["new"].get() == 1).all()
    assert both["new"] == clamor.open("moves")
    with pytest.raises(ValueError, match="never moves"):
        both["old"].refresh()


def test_a_reference_to_what_was_freed(three: LocalCluster, tmp_path: Path) -> None:
    inner = clamor.put(np.zeros(1000), name="gone")
    clamor.put({"inner": inner}, name="holder")
    number = clamor.checkpoint(tmp_path).number
    clamor.free(inner)
    with pytest.raises(errors.DanglingReferenceError, match=r"'holder'.*'gone'.*freed") as caught:
        clamor.checkpoint(tmp_path)
    assert "leave_out" in caught.value.hint
    with pytest.raises(errors.NoSuchNameError, match="no one"):
        clamor.checkpoint(tmp_path, leave_out=["no one"])
    assert clamor.checkpoint(tmp_path, leave_out=["holder"]).number == number + 1


def test_spread_redundant_and_on_disk(three: LocalCluster, tmp_path: Path) -> None:
    content = np.random.default_rng(2).integers(0, 1 << 40, 3_000_000)
    how: dict[str, dict[str, Any]] = {
        "spread": {"home": "spread"},
        "raid5": {"redundancy": "raid5"},
        "raid1": {"redundancy": "raid1", "copies": 3},
        "disk": {"spill": True},
        "disks": {"spill": True, "home": "spread"},
    }
    for name, options in how.items():
        ref = clamor.put(content, name=name, **options)
        with clamor.update(ref) as x:
            x[[0, 1_500_000, 2_999_999]] = [1, 2, 3]
    content[[0, 1_500_000, 2_999_999]] = [1, 2, 3]
    made = clamor.checkpoint(tmp_path)
    assert made.variables == len(how)
    new_session()
    back = clamor.restore(tmp_path)
    for name, options in how.items():
        assert np.array_equal(back[name].get(), content), name
        assert len(homes_of(back[name])) == (1 if name == "disk" else 3)
        record = back[name]._pieces
        assert record is not None
        assert record.on_disk == options.get("spill", False)
        assert record.n_parity == {"raid5": 1, "raid1": 2}.get(name, 0)
    # The parity fits: a commit, and each piece made by others of its group.
    with clamor.update(back["raid5"]) as x:
        x[5] = 99
    assert clamor.stats().degraded == 0
    drop_all()
    new_session()
    here = clamor.restore(tmp_path, keep_placement=False)
    assert all(len(homes_of(ref)) == 1 for ref in here.values())
    assert np.array_equal(here["raid5"].get(), content)


def test_zeros_that_no_machine_could_hold(three: LocalCluster, tmp_path: Path) -> None:
    n = (1 << 38) // 8
    ref = clamor.zeros(n, np.int64, name="sparse")
    spread = clamor.zeros(n // 64, np.int64, name="spread", home="spread")
    at = [0, 1, n // 2, n - 1]
    for each, places in ((ref, at), (spread, [5, n // 128])):
        with clamor.update(each) as x:
            x[places] = 7
    made = clamor.checkpoint(tmp_path)
    assert made.bytes < MIB
    home_bytes = sum(node.engine.home_bytes for node in clamor.stats().nodes)
    new_session()
    back = clamor.restore(tmp_path)
    got = back["sparse"].get()
    assert got[at].tolist() == [7] * 4
    assert int(got[12345678]) == 0
    assert back["spread"].get()[[5, n // 128, 6]].tolist() == [7, 7, 0]
    assert sum(node.engine.home_bytes for node in clamor.stats().nodes) <= home_bytes + MIB


def test_a_grown_array(three: LocalCluster, tmp_path: Path) -> None:
    ref = clamor.zeros((10, 4), np.int64, capacity=10**6, name="grows")
    with clamor.update(ref, grow_to=5000) as x:
        x[:] = 3
    clamor.checkpoint(tmp_path)
    new_session()
    back = clamor.restore(tmp_path)["grows"]
    assert back.shape == (5000, 4)
    with clamor.update(back, grow_to=9000) as x:
        x[-1] = 4
    assert (back.get()[4999] == 3).all()
    assert (back.get()[8999] == 4).all()


def test_into_a_session_that_has_variables(three: LocalCluster, tmp_path: Path) -> None:
    clamor.put(np.arange(1000), name="one")
    clamor.put(np.arange(2000), name="two")
    clamor.checkpoint(tmp_path)
    clamor.drop("one")
    before = {info.region for info in clamor.variables()}
    with pytest.raises(errors.NameTakenError, match=r"'two'.*nothing was restored"):
        clamor.restore(tmp_path)
    assert {info.name for info in clamor.variables()} <= {"two", None}
    assert {info.region for info in clamor.variables()} <= before
    clamor.drop("two")
    assert clamor.restore(tmp_path)["two"].get()[1999] == 1999


def test_a_key_of_another_variable(three: LocalCluster, tmp_path: Path) -> None:
    one, _ = clamor.put(np.zeros(1000), name="one"), clamor.put(np.zeros(1000), name="two")
    with pytest.raises(ValueError, match="another variable named 'two'"):
        clamor.checkpoint(tmp_path, refs={"two": one})
    with pytest.raises(TypeError, match="refs is a dict"):
        clamor.checkpoint(tmp_path, refs={"x": np.zeros(3)})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="list of names"):
        clamor.checkpoint(tmp_path, leave_out="one")
    with pytest.raises(ValueError, match="1 or more"):
        clamor.checkpoint(tmp_path, keep=0)
    with pytest.raises(errors.NoBackupError, match="no checkpoint"):
        clamor.restore(tmp_path)
    assert clamor.checkpoint(tmp_path, refs={"one": one}).number == 1
    with pytest.raises(errors.NoBackupError, match="no checkpoint 7"):
        clamor.restore(tmp_path, number=7)


# ------------------------------------------------------------------ while commits go on


@ray.remote(num_cpus=0)
def transfer(refs: list[Any], stop: str, seed: int) -> int:
    """Takes from one and gives to the other: the sum of both stays."""
    rng = np.random.default_rng(seed)
    n = 0
    while not os.path.exists(stop):
        a, b = refs
        amount = int(rng.integers(1, 100))
        try:
            with clamor.transaction(a.refresh(), b.refresh()) as (x, y):
                x[int(rng.integers(len(x)))] -= amount
                y[int(rng.integers(len(y)))] += amount
            n += 1
        except errors.CommitConflict:
            pass
    return n


def test_of_a_transaction_all_or_nothing(three: LocalCluster, tmp_path: Path) -> None:
    n = 500_000
    refs = [
        clamor.put(np.full(n, 1000), name="from"),
        clamor.put(np.full(n, 1000), name="to", home="spread"),
    ]
    stop = tmp_path / "stop"
    on_node = {"resources": {"node1": 0.001}}
    working = [
        transfer.options(**(on_node if i else {})).remote(refs, str(stop), i) for i in range(2)
    ]
    path = tmp_path / "backup"
    versions: list[int] = []
    try:
        until(lambda: refs[0].at().version > 5)
        for number in range(1, 31):
            clamor.checkpoint(path)
            # Each commit is of both, so both have as many at any moment.
            saved = {v["version"] for v in manifest_of(path, number)["variables"]}
            assert len(saved) == 1
            versions += saved
    finally:
        stop.touch()
    n_commits = sum(ray.get(working, timeout=ANSWER_S))
    drop_all()
    for number in (29, 30):
        back = clamor.restore(path, number=number)
        sums = [int(back[name].get().sum()) for name in ("from", "to")]
        assert sum(sums) == 2 * 1000 * n, number
        drop_all()
    assert versions == sorted(versions)
    assert len(set(versions)) > 15  # commits went on
    assert versions[-1] <= n_commits


def test_only_what_has_changed(three: LocalCluster, tmp_path: Path) -> None:
    ref = clamor.put(np.arange(5 * CHUNK_BYTES // 8), name="large")
    spread = clamor.put(np.arange(5 * CHUNK_BYTES // 8), name="spread", home="spread")
    first = clamor.checkpoint(tmp_path)
    assert first.bytes_written > 10 * CHUNK_BYTES
    assert clamor.checkpoint(tmp_path).bytes_written == 0
    with clamor.update(ref) as x:
        x[3 * CHUNK_BYTES // 8] = -1
    with clamor.update(spread) as x:
        x[-1] = -1
        x[0] = 0  # the same as before
    third = clamor.checkpoint(tmp_path)
    assert CHUNK_BYTES < third.bytes_written < 3.1 * CHUNK_BYTES
    assert abs(third.bytes - first.bytes) < MIB
    # What was written to zeros, and is zeros again, is not there.
    with clamor.update(ref) as x:
        x[CHUNK_BYTES // 8 : 4 * CHUNK_BYTES // 8] = 0
    fourth = clamor.checkpoint(tmp_path)
    assert fourth.bytes < first.bytes - 1.9 * CHUNK_BYTES
    expected = ref.get().copy(), spread.get().copy()
    # Another session, with the same content: the digests say so.
    new_session()
    back = clamor.restore(tmp_path)
    assert np.array_equal(back["large"].get(), expected[0])
    assert np.array_equal(back["spread"].get(), expected[1])
    fifth = clamor.checkpoint(tmp_path)
    assert fifth.bytes_written == 0
    assert fifth.bytes == fourth.bytes
    with clamor.update(back["large"]) as x:
        x[7] = 8
    assert clamor.checkpoint(tmp_path).bytes_written < 1.1 * CHUNK_BYTES
    # Another variable under the name, which has holes where that had data.
    del x
    clamor.drop("large")
    other = clamor.zeros(5 * CHUNK_BYTES // 8, np.int64, name="large")
    with clamor.update(other) as x:
        x[-1] = 5
    clamor.checkpoint(tmp_path)
    expected_now = other.get().copy()
    drop_all()
    assert np.array_equal(clamor.restore(tmp_path)["large"].get(), expected_now)


def test_what_is_kept(three: LocalCluster, tmp_path: Path) -> None:
    ref = clamor.put(np.zeros(2 * CHUNK_BYTES // 8), name="kept")
    for value in range(1, 6):
        with clamor.update(ref) as x:
            x[:] = value
        clamor.checkpoint(tmp_path, keep=2)
    assert [path.name for path in sorted(tmp_path.glob("*.json"))] == [
        "checkpoint-00000004.json",
        "checkpoint-00000005.json",
    ]
    assert sum(path.stat().st_size for path in data_files(tmp_path)) < 4.1 * CHUNK_BYTES
    drop_all()
    assert clamor.restore(tmp_path, number=4)["kept"].get()[0] == 4
    clamor.checkpoint(tmp_path, keep=1)
    assert len(list(tmp_path.glob("*.json"))) == 1
    assert tmp_path.joinpath("data").stat().st_mode & 0o777 == 0o700
    assert all(p.stat().st_mode & 0o777 == 0o600 for p in (*data_files(tmp_path),))
    assert all(p.stat().st_mode & 0o777 == 0o600 for p in tmp_path.glob("*.json"))


def test_a_variable_that_is_freed_meanwhile(
    three: LocalCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names that go and come, as where each round's result replaces the last one's."""
    copy_all = checkpoint_module._Maker._copy_all
    n_tries = 0

    def freed_just_before(maker: Any, graph: Any) -> Any:
        nonlocal n_tries
        n_tries += 1
        if n_tries <= n_freed:
            clamor.free(clamor.open(f"goes {n_tries}"))
        return copy_all(maker, graph)

    monkeypatch.setattr(checkpoint_module._Maker, "_copy_all", freed_just_before)
    clamor.put(np.arange(10**6), name="stays")
    for n_freed, is_made in ((1, True), (2, True), (3, False)):
        n_tries = 0
        for i in range(1, 4):
            if f"goes {i}" not in {info.name for info in clamor.variables()}:
                clamor.put({"x": np.full(10**5, i)}, name=f"goes {i}")
        if is_made:
            assert clamor.checkpoint(tmp_path).variables == 4 - n_freed
        else:
            with pytest.raises(errors.FreedError):
                clamor.checkpoint(tmp_path)
        assert n_tries == min(n_freed + 1, 3)
    drop_all()
    back = clamor.restore(tmp_path)
    assert set(back) == {"stays", "goes 3"}  # of the second one
    assert back["stays"].get()[9] == 9


# ------------------------------------------------------------------ what goes wrong


def test_a_flipped_bit(three: LocalCluster, tmp_path: Path) -> None:
    content = np.random.default_rng(3).integers(0, 256, 2 * CHUNK_BYTES, np.uint8)
    clamor.put(np.ones(10**5), name="before it")
    clamor.put(content, name="rots")
    clamor.put(np.ones(10**5), name="behind it")
    clamor.checkpoint(tmp_path)
    drop_all()
    (file,) = data_files(tmp_path)
    image = bytearray(file.read_bytes())
    wanted = content[CHUNK_BYTES + 4096 * 5 - 4096 : CHUNK_BYTES + 4096 * 5].tobytes()
    at = image.index(wanted)  # the first 4096 bytes are the pickle stream's block
    image[at + 77] ^= 4
    file.write_bytes(image)
    before = {info.region for info in clamor.variables()}
    block = CHUNK_BYTES // 4096 + 5
    with pytest.raises(errors.DamagedBackupError, match=f"Block {block} of .*'rots'") as caught:
        clamor.restore(tmp_path)
    assert (caught.value.block, caught.value.file) == (block, str(file))
    assert "rots" in caught.value.variable
    # What was restored before is freed at once, and not when somebody lets go of the error.
    assert {info.region for info in clamor.variables()} <= before


def test_half_of_it_is_missing(three: LocalCluster, tmp_path: Path) -> None:
    clamor.put(np.ones(10**6), name="half")
    clamor.checkpoint(tmp_path)
    drop_all()
    (file,) = data_files(tmp_path)
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(errors.DamagedBackupError, match=r"of variable .*'half' is damaged"):
        clamor.restore(tmp_path)
    file.unlink()
    with pytest.raises(errors.DamagedBackupError, match=r"is missing, which has blocks 0 to"):
        clamor.restore(tmp_path)


def test_a_manifest_that_is_torn_or_newer(three: LocalCluster, tmp_path: Path) -> None:
    clamor.put(np.ones(1000), name="listed")
    clamor.checkpoint(tmp_path)
    drop_all()
    file = tmp_path / "checkpoint-00000001.json"
    text = file.read_text()
    for wrong, error, said in [
        (text[: len(text) // 2], errors.DamagedBackupError, r"has \d+ bytes of"),
        (text.replace("listed", "lasted"), errors.DamagedBackupError, "digest"),
        ("", errors.DamagedBackupError, "no head"),
        (text.replace('"clamor-backup": 1', '"clamor-backup": 2'), errors.BackupFormatError, "2"),
    ]:
        file.write_text(wrong)
        for call in (clamor.restore, clamor.checkpoint):
            with pytest.raises(error, match=said):
                call(tmp_path)
    assert [path.name for path in tmp_path.glob("*.json")] == [file.name]
    file.write_text(text)
    assert clamor.restore(tmp_path)["listed"].get()[0] == 1


def checkpointing(lab: LocalCluster, path: Path, mib: int) -> subprocess.Popen[str]:
    """A driver of its own, which makes a checkpoint of so much."""
    program = f"""
import numpy as np, sys
import clamor_ray as clamor
clamor.init()
rng = np.random.default_rng(0)
refs = [clamor.put(rng.random(4 << 17), name=f"v{{i}}") for i in range({mib} // 4)]
print("begins", flush=True)
sys.stdin.readline()
clamor.checkpoint({str(path)!r})
print("made", flush=True)
sys.stdin.readline()
"""
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, **lab.environment, "RAY_LOG_TO_DRIVER": "0"},
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def go_on(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_killed_in_the_midst(three: LocalCluster, tmp_path: Path) -> None:
    ref = clamor.put(np.arange(10**6), name="whole")
    clamor.checkpoint(tmp_path)
    process = checkpointing(three, tmp_path, mib=384)
    try:
        assert line_of(process) == "begins"
        go_on(process)
        # A node writes two files at a time, and a task that is ended deletes its own: one more
        # than these is whole, and stays.
        deadline_s = time.monotonic() + ANSWER_S
        while len(data_files(tmp_path)) < 1 + 2 + 1:
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        stop(process.pid)
        # Nobody else writes meanwhile.
        with pytest.raises(errors.BackupInUseError, match=f"Process {process.pid} of"):
            clamor.checkpoint(tmp_path)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait(ANSWER_S)
    assert [path.name for path in tmp_path.glob("*.json")] == ["checkpoint-00000001.json"]
    drop_all()
    assert np.array_equal(clamor.restore(tmp_path)["whole"].get(), np.arange(10**6))
    # Tasks of the dead driver end with it; what they have written goes with a later checkpoint.
    left = set(data_files(tmp_path))
    for _ in range(2):
        clamor.checkpoint(tmp_path, keep=1)
    kept = set(data_files(tmp_path))
    assert len(left) > len(kept) == 1
    del ref


def test_a_full_disk(three: LocalCluster, tmp_path: Path) -> None:
    ref = clamor.put(np.arange(10**5), name="fits")
    clamor.checkpoint(tmp_path)
    files = data_files(tmp_path)
    with clamor.update(ref) as x:
        x[:] = 1
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # the kernel says EFBIG
    try:
        with pytest.raises(errors.StorageError, match=r"writing it: .*File too large") as caught:
            clamor.checkpoint(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert "last checkpoint" in caught.value.hint
    assert data_files(tmp_path) == files
    assert clamor.checkpoint(tmp_path).number == 2
    with pytest.raises(errors.StorageError, match=r"cannot be opened|making it"):
        clamor.checkpoint("/proc/backup")


def test_a_server_that_dies_meanwhile(three: LocalCluster, tmp_path: Path) -> None:
    """Page servers restart, and commits go on: what is copied is right."""
    content = np.random.default_rng(4).integers(0, 1 << 40, 8 * CHUNK_BYTES // 8)
    ref = clamor.put(content, name="held", home="spread")
    pid = server_pid(three, 1)

    @ray.remote(num_cpus=0)
    def kill_and_commit(ref: Any, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        with clamor.update(ref) as x:
            x[:] = 0

    killed = kill_and_commit.remote(ref, pid)
    clamor.checkpoint(tmp_path)
    ray.get(killed, timeout=ANSWER_S)
    drop_all()
    back = clamor.restore(tmp_path)["held"].get()
    assert np.array_equal(back, content) or not back.any()


def test_blocks_that_are_lost(three: LocalCluster, tmp_path: Path) -> None:
    """Of a variable without redundancy; one that has it is saved while its node is gone."""
    node = three.add_node(num_cpus=1, object_store_memory=150 << 20)
    content = np.arange(6_000_000)  # so much that tasks copy it, each on its node
    clamor.put(content, name="raid", redundancy="raid1", copies=2)

    def put_here() -> Any:
        return clamor.put(np.random.default_rng(5).random(10**6), name="alone")

    alone = on(node, put_here)
    clamor.checkpoint(tmp_path)
    with clamor.update(alone) as x:
        x[10**5 :] = 0
    del x
    three.kill_node(node)
    with pytest.raises(errors.HomeLostError, match="'alone'"):
        clamor.checkpoint(tmp_path)
    made = clamor.checkpoint(tmp_path, leave_out=["alone"])
    assert (made.number, made.variables) == (2, 1)
    drop_all()
    assert np.array_equal(clamor.restore(tmp_path)["raid"].get(), content)
    drop_all()
    back = clamor.restore(tmp_path, number=1)  # what was lost since
    assert np.array_equal(back["alone"].get(), np.random.default_rng(5).random(10**6))


def test_a_variable_of_a_file_is_saved_whole(three: LocalCluster, tmp_path: Path) -> None:
    content = np.random.default_rng(5).random(3 * CHUNK_BYTES // 8)
    path = tmp_path / "content.npy"
    np.save(path, content)
    ref = clamor.from_file(path, name="of a file")
    first = clamor.checkpoint(tmp_path / "backup")
    assert first.bytes_written >= content.nbytes
    with clamor.update(ref) as change:
        change[70_000] = content[70_000] = -1.0
    assert clamor.checkpoint(tmp_path / "backup").bytes_written < 2 * CHUNK_BYTES
    path.unlink()
    for number, changed in ((2, True), (1, False)):
        drop_all()
        restored = clamor.restore(tmp_path / "backup", number=number)["of a file"].get()
        assert (restored[70_000] == -1.0) == changed
        restored = np.array(restored)
        restored[70_000] = -1.0
        assert np.array_equal(restored, content)


def test_a_data_file_that_has_gone_is_written_again(three: LocalCluster, tmp_path: Path) -> None:
    content = np.random.default_rng(6).random(CHUNK_BYTES // 8 * 2)
    path = tmp_path / "backup"
    clamor.put(content, name="kept")
    clamor.checkpoint(path)
    assert clamor.checkpoint(path).bytes_written == 0
    (file,) = data_files(path)
    file.write_bytes(file.read_bytes()[: CHUNK_BYTES // 2])
    assert clamor.checkpoint(path).bytes_written >= content.nbytes
    drop_all()
    assert np.array_equal(clamor.restore(path)["kept"].get(), content)


def test_a_name_that_is_left_out_stays_out(three: LocalCluster, tmp_path: Path) -> None:
    """What a saved object refers to is saved all the same, without the name."""
    inner = clamor.put(np.arange(10**4), name="inner")
    clamor.put({"inner": inner}, name="outer")
    clamor.checkpoint(tmp_path / "backup", leave_out=["inner"])
    drop_all()
    restored = clamor.restore(tmp_path / "backup")
    assert list(restored) == ["outer"]
    assert restored["outer"].get()["inner"].get()[7] == 7
    assert [info.name for info in clamor.variables() if info.name] == ["outer"]
