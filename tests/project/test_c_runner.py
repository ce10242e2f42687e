"""What runs the C tests: it counts, and nothing passes that did not."""

from __future__ import annotations

import fcntl
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

RUNNER = Path(__file__).resolve().parents[2] / "pagecache_c" / "tests" / "run.sh"

PROGRAMS = {
    "good": "exit 0",
    "partly": "echo 'ok other'; echo 'skip part/1'",
    "skips": "echo before; echo the reason; exit 77",
    "bad": "echo what went wrong; exit 3",
    "hangs": "sleep 60",
    "dies": "kill -SEGV $$",
    "beside": 'touch "$0.runs"; sleep 1; rm "$0.runs"',
    # As the real one is called: it changes a setting of the machine.
    "takes/test_huge_pages": 'flock -n -x "$SETTING" true',
    "test_huge_pages": 'sleep 0.5; ! ls "$(dirname "$0")" | grep runs',
}


def run(tmp_path: Path, *names: str) -> tuple[int, list[str]]:
    (tmp_path / "takes").mkdir()
    for name, body in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [str(RUNNER), *(str(tmp_path / name) for name in names)],
        env={
            **os.environ, "SECONDS_EACH": "5", "JOBS": "3", "VERBOSE": "",
            "SETTING": str(tmp_path / "setting"),
        },
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines()


def test_what_passes_and_what_is_skipped_in_part_or_whole(tmp_path: Path) -> None:
    status, lines = run(tmp_path, "good", "partly", "skips")
    assert (status, lines[-1]) == (0, "2 passed, 0 failed, 1 skipped")
    assert "SKIP skips: the reason" in lines
    assert "    skip part/1" in lines
    assert "    ok other" not in lines


def test_what_fails(tmp_path: Path) -> None:
    status, lines = run(tmp_path, "good", "bad", "hangs", "dies", "was never built")
    assert (status, lines[-1]) == (1, "1 passed, 4 failed, 0 skipped")
    assert any(line.startswith("FAIL bad (exit status 3") for line in lines)
    assert "    what went wrong" in lines
    assert "FAIL hangs (no end within 5 s)" in lines
    assert any(line.startswith("FAIL dies (exit status 139") for line in lines)
    assert "FAIL was never built" in lines


def test_what_changes_the_machine_runs_alone(tmp_path: Path) -> None:
    status, lines = run(tmp_path, "test_huge_pages", "good", "beside")
    assert (status, lines[-1]) == (0, "3 passed, 0 failed, 0 skipped")


def test_nothing_runs_while_another_run_changes_the_machine(tmp_path: Path) -> None:
    setting, began = tmp_path / "setting", tmp_path / "beside.runs"
    setting.touch()
    with setting.open() as held, ThreadPoolExecutor(1) as pool:
        fcntl.flock(held, fcntl.LOCK_EX)
        run_of_ours = pool.submit(run, tmp_path, "beside", "takes/test_huge_pages")
        time.sleep(1)
        assert not began.exists()
        fcntl.flock(held, fcntl.LOCK_UN)
        status, lines = run_of_ours.result()
    assert (status, lines[-1]) == (0, "2 passed, 0 failed, 0 skipped")
