"""What benchmarks stand on: content that can be checked, percentiles, C helpers. No figures."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from bench.support import common

needs_compiler = pytest.mark.skipif(not shutil.which("gcc"), reason="no gcc")


def test_content_is_known_from_anywhere_in_it() -> None:
    whole = common.make_array(1 << 20, salt=7)
    assert whole.nbytes == 1 << 20
    np.testing.assert_array_equal(whole[5000:5100], common.expected_words(5000, 100, salt=7))
    blocks = np.array([0, 255, 17], np.int64)
    np.testing.assert_array_equal(
        whole.view(np.uint8)[blocks * 4096], common.expected_first_bytes(blocks, salt=7)
    )


def test_content_differs_between_words_blocks_and_arrays() -> None:
    one, two = (common.make_array(1 << 20, salt) for salt in (1, 2))
    assert len(np.unique(np.concatenate([one, two]))) == 2 * len(one)
    # First bytes are what sparse reads check: they may not be one value, nor zero throughout.
    counts = np.bincount(one.view(np.uint8)[::4096], minlength=256)
    assert (counts > 0).sum() > 100


def test_pieces_make_the_same_array() -> None:
    n_words = (1 << 20) + 12_345
    np.testing.assert_array_equal(
        common.make_array(n_words * 8, 3), common.expected_words(0, n_words, 3)
    )


def test_wrong_data_has_no_figure() -> None:
    right = common.expected_words(0, 512, 1)
    wrong = right.copy()
    wrong[511] ^= np.uint64(1)
    common.verify("same", right.copy(), right)
    with pytest.raises(common.WrongData, match="dense"):
        common.verify("dense", wrong, right)
    with pytest.raises(common.WrongData):
        common.verify("shorter", right[:-1], right)


def test_percentile_is_a_measured_value() -> None:
    values = np.array([5, 1, 4, 2, 3])
    assert [common.percentile(values, q) for q in (0, 50, 99, 100)] == [1, 3, 5, 5]
    assert common.percentile([7.0], 99) == 7.0
    assert common.percentile(np.arange(1, 101), 99) == 99


def test_lines_are_json(capsys: pytest.CaptureFixture[str]) -> None:
    common.emit({"a": 1})
    common.summary({"speedup": 3.14159265})
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert lines == [{"a": 1}, {"summary": {"speedup": 3.1416}}]


def test_a_figure_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="JSON"):
        common.emit({"summary": {"speedup": float("nan")}})


@needs_compiler
def test_touch_reads_what_is_there(tmp_path: Path) -> None:
    touch = ctypes.CDLL(str(common.compile_c("touch.c", tmp_path, shared=True)))
    touch.touch_all.restype = ctypes.c_uint64
    data = common.make_array(1 << 20, 9).view(np.uint8)
    offsets = np.random.default_rng(1).permutation(256).astype(np.uint64) * np.uint64(4096)
    for function in ("touch_each", "touch_all"):
        got, ns = np.zeros(256, np.uint8), np.zeros(256, np.uint64)
        pointers = [ctypes.c_void_p(data.ctypes.data), ctypes.c_void_p(offsets.ctypes.data)]
        pointers += [ctypes.c_size_t(256), ctypes.c_void_p(got.ctypes.data)]
        pointers += [ctypes.c_void_p(ns.ctypes.data)] if function == "touch_each" else []
        total = getattr(touch, function)(*pointers)
        np.testing.assert_array_equal(got, data[offsets.astype(np.int64)])
        assert (total if function == "touch_all" else int(ns.sum())) > 0


@needs_compiler
def test_raw_exchange_measures_every_one(tmp_path: Path) -> None:
    exchange = common.compile_c("exchange.c", tmp_path, shared=False)
    done = subprocess.run(
        [str(exchange), "65536", "50"], capture_output=True, text=True, timeout=60, check=True
    )
    ns = [int(line) for line in done.stdout.split()]
    assert len(ns) == 50
    assert min(ns) > 0
    refused = subprocess.run([str(exchange), "100", "5"], capture_output=True, timeout=60)
    assert refused.returncode == 2
