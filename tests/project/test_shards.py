"""The runner of the test files: what it puts together, what it counts, and that nothing passes
that did not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support import shards


def test_every_file_is_in_one_batch_and_the_longest_goes_first() -> None:
    files = shards.files_of_tests()
    shared = set(files[::3])
    found = shards.batches(files, {files[0]: 500.0, files[1]: 400.0}, shared)
    assert sorted(name for batch in found for name in batch.files) == files
    assert [batch.estimate_s for batch in found] == sorted(
        (batch.estimate_s for batch in found), reverse=True
    )
    for batch in found:
        assert len({name in shared for name in batch.files}) == 1
    assert found[0].files == (files[0],)


def test_files_of_one_kind_share_a_process() -> None:
    seconds = {"a": 100.0, "b": 40.0, "c": 40.0, "d": 10.0}
    found = shards.batches(list(seconds), seconds, set())
    assert [batch.files for batch in found] == [("a", "b", "d"), ("c",)]


def test_the_table_forgets_files_that_are_gone(tmp_path: Path) -> None:
    table = tmp_path / "seconds.txt"
    shards.write_seconds({"tests/project/test_shards.py": 2.6, "tests/no_more.py": 9.0}, table)
    assert shards.read_seconds(table) == {"tests/project/test_shards.py": 3.0}
    shards.write_seconds({"tests/project/test_shards.py": 4.0}, table)
    assert shards.read_seconds(table) == {"tests/project/test_shards.py": 4.0}


CASES = {
    "passes": ("def test_it(): pass", (1, 0, 0), ""),
    "fails": ("def test_it(): assert 0\ndef test_other(): pass", (1, 1, 0), ""),
    "skips": ("import pytest\ndef test_it(): pytest.skip('why')", (0, 0, 1), ""),
    "does not import": ("import no_such_module_anywhere", (0, 1, 0), "exit status 2"),
    "has a fixture that fails": (
        "import pytest\n@pytest.fixture\ndef x(): 1/0\ndef test_it(x): pass", (0, 1, 0), ""
    ),
    "dies": (
        "import os, pathlib\n"
        "def test_it():\n"
        "    logs = pathlib.Path(os.environ['RAY_TMPDIR'], 'ray', 'session_1', 'logs')\n"
        "    logs.mkdir(parents=True)\n"
        "    (logs / 'raylet.out').write_text('begun\\n' * 100 + \"the raylet's end\")\n"
        "    os._exit(0)",
        (0, 1, 0),
        "died",
    ),
    "has none": ("x = 1", (0, 1, 0), "no test was found"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_what_counts(case: str, tmp_path: Path) -> None:
    source, expected, trouble = CASES[case]
    (tmp_path / "test_one.py").write_text(source)
    batch = shards.Batch((str(tmp_path / "test_one.py"),), 0.0)
    outcome, said = shards.run_batch(batch, tmp_path / "scratch", [])
    assert ("the raylet's end" in said) == (case == "dies")
    assert outcome.passed == expected[0], said
    assert outcome.failed >= expected[1], said
    assert (outcome.failed > 0) == (expected[1] > 0), said
    assert outcome.skipped == expected[2], said
    assert trouble in outcome.trouble
    assert bool(outcome.trouble) == bool(trouble)
    said_again = " ".join(outcome.failures.values())
    assert ("assert 0" in said_again) == (case == "fails"), "why is said once more at the end"
    assert not (tmp_path / "scratch").exists()


def test_what_tests_leave_behind_is_ended_and_named(tmp_path: Path) -> None:
    environment = {**os.environ, "RAY_TMPDIR": str(tmp_path)}
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], env=environment,
                               stdin=subprocess.PIPE, start_new_session=True)  # fmt: skip
    assert sleeper.stdin is not None
    with sleeper.stdin:
        deadline = time.monotonic() + 30
        while not shards.left_behind(str(tmp_path)):
            assert time.monotonic() < deadline
            time.sleep(0.01)  # between fork and exec it has our environment
        (named,) = shards.end_processes(str(tmp_path), grace_s=0.1)
        assert named.startswith(f"{sleeper.pid}: ")
        assert sleeper.wait(30) != 0
    assert shards.left_behind(str(tmp_path)) == {}


def test_the_end_of_the_run_ends_its_processes(tmp_path: Path) -> None:
    here = tmp_path / "pids"
    (tmp_path / "test_slow.py").write_text(
        "import os, subprocess, time, pathlib\n"
        "def test_it():\n"
        "    child = subprocess.Popen(['sleep', '300'], start_new_session=True)\n"
        f"    pathlib.Path({str(here)!r}).write_text(f'{{os.getpid()}} {{child.pid}} ')\n"
        "    time.sleep(300)\n"
    )
    runner = subprocess.Popen(
        [sys.executable, "-m", "tests.support.shards", "1", str(tmp_path / "test_slow.py")],
        cwd=shards.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not (here.exists() and here.read_text().endswith(" ")):
        assert runner.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)  # it is a process of another process
    runner.terminate()
    assert runner.wait(120) != 0
    for pid in here.read_text().split():
        stat = Path(f"/proc/{pid}/stat")
        while stat.exists() and ") Z " not in stat.read_text():
            assert time.monotonic() < deadline + 120
            time.sleep(0.05)  # the kernel takes it away


def test_the_last_line_and_the_exit_status(capfd: pytest.CaptureFixture[str]) -> None:
    own = "tests/project/test_shards.py"
    status = shards.main(["2", own, "-k", "share_a_process"])
    assert (status, capfd.readouterr().out.splitlines()[-1]) == (0, "1 passed, 0 failed, 0 skipped")
    status = shards.main(["2", own, "-k", "no_test_has_this_name"])
    assert (status, capfd.readouterr().out.splitlines()[-1]) == (1, "0 passed, 0 failed, 0 skipped")


def test_why_a_test_failed_is_at_the_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_one.py").write_text("def test_it():\n    assert 7 == 8")
    assert shards.main(["1", str(tmp_path / "test_one.py")]) == 1
    # By where the clone is, more of its path is before its name.
    *_, last_part = re.split(r"==== \S*test_one\.test_it\n", capfd.readouterr().out)
    *why, last = last_part.splitlines()
    assert "E   assert 7 == 8" in why
    assert last == "0 passed, 1 failed, 0 skipped"


def test_a_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        shards.main(["1", "tests/library/test_nowhere.py"])
    assert "tests/library/test_nowhere.py: there is no such file" in capsys.readouterr().err
