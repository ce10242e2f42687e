"""What runs the C tests: it counts, and nothing passes that did not."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

RUNNER = Path(__file__).resolve().parents[1] / "pagecache_c" / "tests" / "run.sh"

PROGRAMS = {
    "good": "exit 0",
    "partly": "echo 'ok other'; echo 'skip part/1'",
    "skips": "echo before; echo the reason; exit 77",
    "bad": "echo what went wrong; exit 3",
    "hangs": "sleep 60",
    "dies": "kill -SEGV $$",
}


def run(tmp_path: Path, *names: str) -> tuple[int, list[str]]:
    for name, body in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [str(RUNNER), *(str(tmp_path / name) for name in names)],
        env={**os.environ, "SECONDS_EACH": "5", "JOBS": "3", "VERBOSE": ""},
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
