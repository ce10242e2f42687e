"""Files of the Criteo schema: what becomes of fields, parts of files, and lines that are bad."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs as pafs
import pytest

from clamor_ray import errors
from clamor_ray.workloads.data import criteo
from clamor_ray.workloads.data.criteo import N_FEATURES, N_NUMERIC, CriteoRows
from tests.support.s3_rig import ENVIRONMENT, moto_server, proxy_before


def line(label: str = "0", numbers: list[str] | None = None, words: list[str] | None = None) -> str:
    return "\t".join([label, *(numbers or [""] * 13), *(words or [""] * 26)])


def parsed(*lines: str) -> CriteoRows:
    return criteo.parse("\n".join(lines).encode(), "x.tsv")


def sample(n: int, seed: int = 1) -> list[str]:
    """Lines with empty fields, long and short words, and numbers of all sizes."""
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(n):
        numbers = [
            "" if rng.random() < 0.3 else str(int(rng.integers(-3, 10 ** int(rng.integers(1, 9)))))
            for _ in range(13)
        ]
        words = [
            "" if rng.random() < 0.2 else "é" * int(rng.integers(0, 2)) + f"{rng.integers(40):08x}"
            for _ in range(26)
        ]
        out.append(line(str(rng.integers(2)), numbers, words))
    return out


# ------------------------------------------------------------------ fields


def test_rows_that_agree_in_a_field_have_its_key_in_common_and_no_other() -> None:
    numbers, words = [str(i) for i in range(13)], [f"{i:08x}" for i in range(26)]
    rows = parsed(line("0", numbers, words), line("1", numbers, words))
    assert rows.labels.tolist() == [0, 1]
    assert rows.keys.shape == (N_FEATURES, 2)
    np.testing.assert_array_equal(rows.keys[:, 0], rows.keys[:, 1])
    for at in range(N_FEATURES):
        other_numbers, other_words = list(numbers), list(words)
        if at < N_NUMERIC:
            other_numbers[at] = "123456"
        else:
            other_words[at - N_NUMERIC] = "ffffffff"
        other = parsed(line("0", other_numbers, other_words)).keys[:, 0]
        assert np.flatnonzero(other != rows.keys[:, 0]).tolist() == [at]


def test_the_same_value_of_another_feature_is_another_key() -> None:
    rows = parsed(line("0", ["7"] * 13, ["0badcafe"] * 26), line())
    assert len(np.unique(rows.keys)) == 2 * N_FEATURES


def test_a_missing_field_is_a_value_of_its_own() -> None:
    empty, zeros = parsed(line()), parsed(line("0", ["0"] * 13, ["0"] * 26))
    assert not np.isin(empty.keys, zeros.keys).any()


def test_buckets_are_of_logarithms_squared() -> None:
    values = [-3, -1, 0, 1, 2, 3, 10, 99, 12345, 10**9]
    expected = [v + 4 if v <= 2 else 7 + math.floor(math.log(v) ** 2) for v in values]
    assert criteo.buckets_of(np.array(values)).tolist() == expected
    assert sorted(set(expected)) == expected  # what is larger is never in the bucket of a smaller
    assert criteo.buckets_of(np.array([-99])).tolist() == criteo.buckets_of(np.array([-3])).tolist()


def test_a_word_has_the_same_key_whatever_stands_beside_it() -> None:
    words = [
        "a",
        "a\0",
        "b",
        "abcdefgh",
        "abcdefghi",
        "abcdefghijklmnopq",
        "abcdefgh\0",
        "é",
        "0" * 100,
    ]
    alone = [parsed(line("0", None, [word] + [""] * 25)).keys[N_NUMERIC, 0] for word in words]
    together = parsed(*(line("0", None, [word] + [""] * 25) for word in words)).keys[N_NUMERIC]
    assert together.tolist() == alone
    assert len(set(alone)) == len(words)


def test_no_rows() -> None:
    for text in ("", "\n", "\n\n\n"):
        rows = criteo.parse(text.encode(), "x.tsv")
        assert rows.labels.shape == (0,)
        assert rows.keys.shape == (N_FEATURES, 0)


# ------------------------------------------------------------------ files


def read_all(splits: list[Any]) -> list[CriteoRows]:
    return [criteo.read(split) for split in splits]


def same(one: CriteoRows, parts: list[CriteoRows]) -> None:
    np.testing.assert_array_equal(one.labels, np.concatenate([part.labels for part in parts]))
    np.testing.assert_array_equal(one.keys, np.concatenate([part.keys for part in parts], axis=1))


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_parts_of_a_file_are_all_of_it(tmp_path: Path, end: str) -> None:
    lines = sample(200)
    path = tmp_path / "rows.tsv"
    path.write_bytes((end.join(lines) + end).encode())
    (whole,) = (criteo.read(split) for split in criteo.splits(path, 1))
    same(whole, [parsed(*lines)])
    splits = criteo.splits(path, 7)
    assert len(splits) == 7
    same(whole, [criteo.read(split) for split in splits])


def test_compressed_and_several_files(tmp_path: Path) -> None:
    lines = sample(90)
    for number, part in enumerate((lines[:30], lines[30:60], lines[60:])):
        text = ("\n".join(part) + "\n").encode()
        if number == 1:
            (tmp_path / "1.tsv.gz").write_bytes(gzip.compress(text))
        else:
            (tmp_path / f"{number}.tsv").write_bytes(text)
    for n in (1, 3, 5):
        parts = [criteo.read(split) for split in criteo.splits(str(tmp_path / "*"), n)]
        same(parsed(*lines), parts)


def test_parts_of_an_object_in_s3(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = sample(60)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    with moto_server() as port, proxy_before(port) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        s3 = pafs.S3FileSystem(
            access_key="testing", secret_key="testing", region="us-east-1",
            endpoint_override=proxy.endpoint, allow_bucket_creation=True,
        )  # fmt: skip
        s3.create_dir("criteo")
        bad = [*lines[:40], "bad", *lines[40:]]
        for name, content in (
            ("day_0", "\n".join(lines).encode()),
            ("day_1.gz", gzip.compress("\n".join(lines).encode())),
            ("bad", "\n".join(bad).encode()),
        ):
            with s3.open_output_stream(f"criteo/{name}", compression=None) as out:
                out.write(content)
        parts = [criteo.read(split) for split in criteo.splits("s3://criteo/day_*", 4)]
        same(parsed(*lines, *lines), parts)
        with pytest.raises(errors.SourceError, match="s3://criteo/bad, line 41: 1 fields"):
            read_all(criteo.splits("s3://criteo/bad", 3))


def test_more_text_than_a_dictionary_is_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = sample(300)
    whole = parsed(*lines)
    monkeypatch.setattr(criteo, "_BLOCK_BYTES", 4096)
    same(whole, [parsed(*lines)])


# ------------------------------------------------------------------ bad lines

BAD = {
    "39 fields": (line().rpartition("\t")[0], "39 fields instead of 40"),
    "41 fields": (line() + "\t", "41 fields instead of 40"),
    "label": (line("2"), "the label is '2', not 0 or 1"),
    "no label": (line(""), "the label is '', not 0 or 1"),
    "number": (line("1", ["", "x7"] + [""] * 11), r"field 3 \(I2\) is 'x7', not a whole number"),
    "fraction": (line("1", ["1.5"] + [""] * 12), r"field 2 \(I1\) is '1.5'"),
    "quote": ('"' + line(), "the label is '\"0', not 0 or 1"),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("n", [1, 4])
def test_a_bad_line_is_named(tmp_path: Path, what: str, n: int) -> None:
    bad, why = BAD[what]
    lines = sample(100)
    lines[77] = bad
    path = tmp_path / "rows.tsv"
    path.write_text("\n".join(lines))
    splits = criteo.splits(path, n)
    assert len(splits) == n
    with pytest.raises(errors.SourceError, match=rf"rows\.tsv, line 78: {why}"):
        read_all(splits)


def test_a_bad_line_of_a_compressed_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv.gz"
    path.write_bytes(gzip.compress("\n".join([*sample(5), "what?"]).encode()))
    with pytest.raises(errors.SourceError, match=r"rows\.tsv\.gz, line 6: 1 fields instead"):
        criteo.read(criteo.splits(path, 1)[0])


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    text = line("0", None, ["ok", "X"] + [""] * 24).encode().replace(b"X", b"\xff\xfe")
    path.write_bytes(("\n".join(sample(3)) + "\n").encode() + text)
    with pytest.raises(errors.SourceError, match=r"line 4: field 16 \(C2\) is .*not UTF-8"):
        criteo.read(criteo.splits(path, 1)[0])


def test_empty_lines_are_no_rows_and_count_as_lines() -> None:
    lines = sample(4)
    same(parsed(*lines), [parsed(lines[0], "", *lines[1:], "", "")])
    with pytest.raises(errors.SourceError, match=r"x\.tsv, line 3:"):
        parsed(lines[0], "", "bad")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(errors.SourceError, match="nothing"):
        criteo.splits(str(tmp_path / "nothing*"))
