"""The Python tests in several processes side by side.

python -m tests.support.shards N [FILE ...] [what pytest takes]

Test files go into batches, one pytest process for each. Files that use the `clamor_cluster` fixture
share batches, so that few of these clusters are started; files without it have batches of their
own. N workers take the next batch, the longest first, by the seconds in `seconds.txt` beside this
file (`--write-seconds` writes what it measured). Each process has a RAY_TMPDIR of its own, and
processes that it leaves behind are ended, and named.

A batch's output is printed when it ends. Where its process died, what its raylets logged last is,
too: a driver whose raylet has died ends without a word. Why each test failed is said once more at
the end, in short. The last line is `N passed, N failed, N skipped`: an error, a process that died,
and one that found no test count as failed, and make the exit status 1.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SECONDS_FILE = Path(__file__).with_name("seconds.txt")
SHARED_FIXTURE = "clamor_cluster"
STARTS_PROCESSES = re.compile(r"cluster|\blab\b|subprocess|ray\.init|driver_script")

BATCH_S = 150.0  # of measured seconds; a file that takes longer has a batch to itself
UNKNOWN_S = 60.0  # of a file that was never measured, and starts processes
UNKNOWN_PURE_S = 5.0  # likewise, and starts none
START_S = 6.0  # of a pytest process, for the estimate
DEADLINE_S = 2400.0  # of a batch: pytest's own timeout ends a test long before
# Of a session of Ray; of the driver, which ends without a word where its raylet has.
LOGS = ("gcs_server.*", "raylet.*", "python-core-driver-*.log")
LOG_LINES = 15  # of each
FAILURE_LINES = 15  # of a test's traceback, at the end
LEFT_S = 5.0  # what a test's processes have to end by themselves after it
NOTHING_COLLECTED = 5  # pytest's exit status


@dataclass(frozen=True)
class Batch:
    """Test files of one pytest process.

    Args:
        files: relative to the root.
        estimate_s: how long they take, by the table.
    """

    files: tuple[str, ...]
    estimate_s: float


@dataclass
class Outcome:
    """What one pytest process said.

    Args:
        failed: with errors, and one more where the process died or found nothing.
        trouble: why the process itself counts as failed.
        seconds: of each file.
        failures: the end of the traceback of each failed test, by its name.
    """

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    trouble: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)


def read_seconds(path: Path = SECONDS_FILE) -> dict[str, float]:
    """The table: a file's path and its measured seconds on each line."""
    lines = path.read_text().splitlines() if path.exists() else []
    pairs = [line.split() for line in lines if line and not line.startswith("#")]
    return {name: float(seconds) for name, seconds in pairs}


def write_seconds(seconds: dict[str, float], path: Path = SECONDS_FILE) -> None:
    """Writes what was measured over what the table had; files that are gone leave it."""
    every = {**read_seconds(path), **seconds}
    kept = {name: s for name, s in every.items() if (ROOT / name).exists()}
    lines = ["# Seconds of each test file on two busy cores: written by --write-seconds."]
    for name, s in sorted(kept.items(), key=lambda item: (-round(item[1]), item[0])):
        lines.append(f"{name} {round(s)}")
    path.write_text("\n".join(lines) + "\n")


def files_of_tests() -> list[str]:
    """All files that pytest would collect."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "tests").rglob("test_*.py"))


def batches(files: Sequence[str], seconds: dict[str, float], shared: set[str]) -> list[Batch]:
    """Files put together, the longest batch first.

    Args:
        files: of tests.
        seconds: measured, by file.
        shared: those that use one cluster, and so share a process.
    """
    found = []
    for kind in (True, False):
        open_batches: list[list[str]] = []
        of_kind = [name for name in files if (name in shared) == kind]
        for name in sorted(of_kind, key=lambda name: -seconds.get(name, UNKNOWN_S)):
            own_s = seconds.get(name, UNKNOWN_S)
            for batch in open_batches:
                if sum(seconds.get(each, UNKNOWN_S) for each in batch) + own_s <= BATCH_S:
                    batch.append(name)
                    break
            else:
                open_batches.append([name])
        for batch in open_batches:
            estimate = START_S + sum(seconds.get(each, UNKNOWN_S) for each in batch)
            found.append(Batch(tuple(batch), estimate))
    return sorted(found, key=lambda batch: -batch.estimate_s)


def count(report: Path) -> Outcome:
    """What pytest's JUnit file says; FileNotFoundError or ParseError where it was not finished."""
    outcome = Outcome()
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            outcome.failed += 1
            name = f"{case.get('classname')}.{case.get('name')}"
            of_it = [child.text or "" for child in case if child.tag in ("failure", "error")]
            lines = "\n".join(of_it).splitlines()
            outcome.failures[name] = "\n".join(lines[-FAILURE_LINES:])
        elif "skipped" in kinds:
            outcome.skipped += 1
        else:
            outcome.passed += 1
        # tests.test_x or tests.test_x.TestClass; an error of collection has a name only
        dotted = (case.get("classname") or case.get("name") or "").split(".")
        modules = [i for i, part in enumerate(dotted) if part.startswith("test_")]
        if modules:
            name = "/".join(dotted[: modules[-1] + 1]) + ".py"
            took = outcome.seconds.get(name, 0.0) + float(case.get("time") or 0)
            outcome.seconds[name] = took
    return outcome


def judge(status: int, report: Path, may_be_empty: bool = False) -> Outcome:
    """The outcome of a pytest process by its exit status and its report.

    Args:
        status: of exit.
        report: JUnit's.
        may_be_empty: whether a selection of tests was asked for, which may be all of other files.
    """
    try:
        outcome = count(report)
    except (FileNotFoundError, ElementTree.ParseError):
        return Outcome(failed=1, trouble=f"the process died (exit status {status})")
    if status == NOTHING_COLLECTED and may_be_empty:
        return outcome
    if status == NOTHING_COLLECTED or not outcome.passed + outcome.failed + outcome.skipped:
        outcome.failed += 1
        outcome.trouble = "no test was found"
    elif status not in (0, 1) or (status == 1) != (outcome.failed > 0):
        outcome.failed += 1
        outcome.trouble = f"exit status {status} with {outcome.failed - 1} failures"
    return outcome


def left_behind(ray_tmpdir: str) -> dict[int, str]:
    """Processes that a batch has started, known by its RAY_TMPDIR in their environment."""
    wanted = f"RAY_TMPDIR={ray_tmpdir}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # it has ended, or is another user's
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    command = (entry / "cmdline").read_bytes().replace(b"\0", b" ")
                    found[int(entry.name)] = command.decode(errors="replace")[:100]
    return found


def end_processes(ray_tmpdir: str, grace_s: float = LEFT_S) -> list[str]:
    """Ends what a batch has left; returns what had not ended by itself."""
    deadline = time.monotonic() + grace_s
    while (left := left_behind(ray_tmpdir)) and time.monotonic() < deadline:
        time.sleep(0.1)  # they end when they notice that nobody is there
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return [f"{pid}: {command}" for pid, command in left.items()]


def ray_said(ray_tmpdir: Path) -> str:
    """The end of Ray's own logs of the newest session."""
    files = [path for name in LOGS for path in ray_tmpdir.rglob(name)]
    newest = max((path.parent for path in files), key=lambda path: path.stat().st_mtime, default="")
    return "".join(
        f"---- {path.name}\n" + "\n".join(lines[-LOG_LINES:]) + "\n"
        for path in sorted(files)
        if path.parent == newest and (lines := path.read_text(errors="replace").splitlines())
    )


class Stopped(Exception):
    """The run was interrupted."""


def run_batch(
    batch: Batch,
    scratch: Path,
    arguments: Sequence[str],
    stop: threading.Event | None = None,
) -> tuple[Outcome, str]:
    """One pytest process from beginning to end, and what it printed.

    Raises:
        Stopped: `stop` was set meanwhile; the process and what it had started have ended.
    """
    ray_tmpdir = scratch / "r"
    ray_tmpdir.mkdir(parents=True)
    report, log = scratch / "report.xml", scratch / "log"
    command = [
        *(sys.executable, "-m", "pytest", "-q", "--no-header", "--tb=short"),
        *("-p", "no:cacheprovider", f"--junitxml={report}", *arguments, *batch.files),
    ]
    environment = {**os.environ, "RAY_TMPDIR": str(ray_tmpdir)}
    environment.pop("RAY_ADDRESS", None)
    # Ray's workers are nicer than what starts a cluster: beside that they would hardly run, and
    # what is restarted, page servers and registries, is a worker.
    environment.setdefault("RAY_worker_niceness", "0")
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=out, stderr=subprocess.STDOUT
        )
        status = _wait(process, stop or threading.Event())
    if stop is not None and stop.is_set():
        end_processes(str(ray_tmpdir), grace_s=0)
        shutil.rmtree(scratch, ignore_errors=True)
        raise Stopped
    left = end_processes(str(ray_tmpdir))
    outcome = judge(status, report, may_be_empty=bool(arguments))
    said = log.read_text(errors="replace")
    if left:
        said += "".join(f"left behind, and ended: {each}\n" for each in left)
    if "died" in outcome.trouble:
        said += ray_said(ray_tmpdir)
    shutil.rmtree(scratch, ignore_errors=True)
    return outcome, said


def _wait(process: subprocess.Popen[bytes], stop: threading.Event) -> int:
    """The exit status of a process, which is killed when it is late or everything stops."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return process.wait(0.2)
        except subprocess.TimeoutExpired:
            if stop.is_set() or time.monotonic() > deadline:
                process.kill()
                return process.wait()


def run_all(todo: Sequence[Batch], n_workers: int, arguments: Sequence[str]) -> Outcome:
    """All batches; prints what each says when it ends."""
    waiting: queue.SimpleQueue[tuple[int, Batch]] = queue.SimpleQueue()
    for numbered in enumerate(todo):
        waiting.put(numbered)
    # Short: a socket's path in it has room for 107 bytes.
    root = Path(tempfile.mkdtemp(prefix="sh", dir="/tmp"))
    total = Outcome()
    lock = threading.Lock()
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            try:
                number, batch = waiting.get_nowait()
            except queue.Empty:
                return
            began = time.monotonic()
            outcome, said = run_batch(batch, root / str(number), arguments, stop)
            took = time.monotonic() - began
            with lock:
                names = " ".join(batch.files)
                each = ", ".join(
                    f"{name} {outcome.seconds.get(name, 0):.0f} s" for name in batch.files
                )
                print(f"==== {each}; all {took:.0f} s, {batch.estimate_s:.0f} s expected")
                print(said, end="" if said.endswith("\n") else "\n")
                if outcome.trouble:
                    print(f"FAILED {names}: {outcome.trouble}")
                sys.stdout.flush()
                total.passed += outcome.passed
                total.failed += outcome.failed
                total.skipped += outcome.skipped
                total.seconds.update(outcome.seconds)
                total.failures.update(outcome.failures)

    # Not threads that are joined: in Python 3.11 an interrupted join takes its thread for ended.
    with futures.ThreadPoolExecutor(n_workers, thread_name_prefix="shard") as pool:
        workers = [pool.submit(work) for _ in range(n_workers)]
        try:
            futures.wait(workers, return_when=futures.FIRST_EXCEPTION)
        finally:  # one broke, or this was interrupted: the processes end first
            stop.set()
            futures.wait(workers)
            shutil.rmtree(root, ignore_errors=True)
        for worker in workers:
            worker.result()
    return total


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.shards", description=__doc__)
    parser.add_argument("n", type=int, help="how many pytest processes at a time")
    parser.add_argument("--write-seconds", action="store_true", help="of each file, to the table")
    # As Ctrl-C: what was started ends with this process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    options, others = parser.parse_known_args(arguments)
    if options.n < 1:
        parser.error("n: one process at least")
    files = [name for name in others if Path(ROOT, name).is_file()]
    for_pytest = [each for each in others if each not in files]
    for each in for_pytest:
        if each.endswith(".py"):  # pytest would get it in every batch
            parser.error(f"{each}: there is no such file in {ROOT}")
    files = files or files_of_tests()
    texts = {name: (ROOT / name).read_text() for name in files}
    shared = {name for name in files if SHARED_FIXTURE in texts[name]}
    pure = [name for name in files if not STARTS_PROCESSES.search(texts[name])]
    seconds = {**dict.fromkeys(pure, UNKNOWN_PURE_S), **read_seconds()}
    began = time.monotonic()
    total = run_all(batches(files, seconds, shared), options.n, for_pytest)
    if options.write_seconds:
        write_seconds(total.seconds)
    slowest = sorted(total.seconds.items(), key=lambda item: -item[1])[:15]
    print(f"==== {time.monotonic() - began:.0f} s; the slowest files:")
    for name, seconds in slowest:
        print(f"{seconds:6.0f} s  {name}")
    for name, text in total.failures.items():
        print(f"==== {name}\n{text}")
    print(f"{total.passed} passed, {total.failed} failed, {total.skipped} skipped")
    return 1 if total.failed or not total.passed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
