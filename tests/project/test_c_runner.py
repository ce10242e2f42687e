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


def write_programs(tmp_path: Path) -> None:
    (tmp_path / "takes").mkdir()
    for name, body in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)


def run(tmp_path: Path, *names: str) -> tuple[int, list[str]]:
    write_programs(tmp_path)
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


def stream(tmp_path: Path, n: int, script: str) -> tuple[int, list[str]]:
    """What the gate does: `script` says what there is to run, while some of it runs."""
    done = subprocess.run(
        ["sh", "-c", f'{{ {script}; }} | "{RUNNER}" --stream {n}'],
        env={
            **os.environ, "SECONDS_EACH": "5", "JOBS": "3", "VERBOSE": "",
            "RUNNER_tsan": "env TSAN=yes", "SETTING": str(tmp_path / "setting"),
            "LIST": f"{RUNNER} --list", "AT": str(tmp_path),
        },
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout.splitlines()


def test_programs_run_while_others_are_built(tmp_path: Path) -> None:
    write_programs(tmp_path)
    # The second list comes only if something of the first one runs.
    wait = 'for i in $(seq 200); do [ -e "$AT/beside.runs" ] && break; sleep 0.1; done'
    first, then = "$LIST asan $AT/beside $AT/bad", "$LIST tsan $AT/good $AT/test_huge_pages"
    status, lines = stream(tmp_path, 4, f'{first}; {wait}; [ "$i" = 200 ] || {then}')
    assert (status, lines[-1]) == (1, "3 passed, 1 failed, 0 skipped")
    assert any(line.startswith("FAIL asan/bad (exit status 3") for line in lines)
    assert lines[-2].startswith("ok   tsan/test_huge_pages")


def test_a_build_that_says_nothing_fails(tmp_path: Path) -> None:
    write_programs(tmp_path)
    status, lines = stream(tmp_path, 3, "$LIST asan $AT/good $AT/partly; exit 1")
    assert (status, lines[-1]) == (1, "2 passed, 1 failed, 0 skipped")
    assert "FAIL: no verdict of 1 of 3 programs" in lines


def test_only_tsan_has_its_runner(tmp_path: Path) -> None:
    write_programs(tmp_path)
    (tmp_path / "good").write_text('#!/bin/sh\n[ "$TSAN" = yes ]\n')
    status, lines = stream(tmp_path, 2, "$LIST asan $AT/good; $LIST tsan $AT/good")
    assert (status, lines[-1]) == (1, "1 passed, 1 failed, 0 skipped")
    assert any(line.startswith("FAIL asan/good") for line in lines)
