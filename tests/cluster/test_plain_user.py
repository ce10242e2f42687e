"""The same work without root, without userfaultfd, and under the system calls of a container."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.lab import plain_user, plain_work, require_lab
from tests.support.lab.availability import missing
from tests.support.shards import end_processes

pytestmark = pytest.mark.lab

ROOT = Path(__file__).resolve().parents[2]
RUN_S = 240.0  # with LEFT_S less than pytest's own, which ends this process at once
LEFT_S = 30.0  # a busy machine ends processes by and by
FULL_SYSCTL = Path("/proc/sys/vm/unprivileged_userfaultfd")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short one that any user may use; what was started in it has ended with it."""
    made = Path(tempfile.mkdtemp(prefix="pl", dir="/tmp"))
    made.chmod(0o777)
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def has_full_uffd() -> bool:
    """Whether this machine gives it to everybody."""
    try:
        return FULL_SYSCTL.read_text().strip() == "1" or os.geteuid() != 0
    except FileNotFoundError:
        return False


def test_plain_users_and_containers(folder: Path) -> None:
    """Reads, commits of one variable and of two, kills of workers and of page servers."""
    require_lab("local")
    try:
        words = plain_user.as_plain_user()
    except LookupError as cause:
        missing(str(cause))
        return
    file = folder / "found"
    environment = {
        **os.environ,
        "RAY_TMPDIR": str(folder),
        "HOME": str(folder),
        "CLAMOR_SOCKET_DIR": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    environment.pop("RAY_ADDRESS", None)
    environment.pop("CLAMOR_TRAP", None)
    command = [*words, sys.executable, "-m", "tests.support.lab.plain_work", str(file)]
    with (folder / "said").open("wb") as said:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=said, stderr=subprocess.STDOUT
        )
        try:
            returned = process.wait(RUN_S)
        finally:
            process.kill()
            process.wait()
            left = end_processes(str(folder), LEFT_S)
    assert returned == 0, (folder / "said").read_text()[-8000:]
    assert left == []
    check(json.loads(file.read_text()))


def check(found: dict[str, Any]) -> None:
    workers = found["workers"]
    traps = {worker: rights["trap"] for worker, rights in workers.items()}
    assert traps.pop("plain") in ({"uffd", "uffd-user"} if has_full_uffd() else {"uffd-user"})
    assert set(traps.values()) == {"sigsegv"}
    assert "Operation not permitted" in workers["container"]["reason"]
    assert set(workers["container"]["refused"].values()) == {"EPERM"}
    inside = [workers["container"], found["page servers"][1]]
    outside = [workers["plain"], workers["without userfaultfd"], found["page servers"][0]]
    assert [each["Seccomp"] for each in inside] == ["2", "2"]
    assert [each["Seccomp"] for each in outside] == ["0", "0", "0"]
    assert sorted(keeper["Seccomp"] for keeper in found["keepers"]) == ["0", "2"]
    for each in (*inside, *outside, *found["keepers"]):
        assert "0" not in each["Uid"].split()
        assert int(each["CapEff"], 16) in (0, 1 << 2)  # nothing, or to read root's folders

    assert all(before != after for before, after in found["servers"])
    assert found["died"] == [f"died-{n}" for n in range(3)]  # a worker of each kind, in a commit
    assert set(found["transfers"].values()) == {plain_work.TRANSFERS}
    looks = list(found["looks"].values())
    assert looks == [looks[0]] * 3
    assert looks[0]["balanced"]
    assert looks[0]["rows"] == [plain_work.TRANSFERS] * 3
    newest = looks[0]["versions"]
    assert newest[0] == newest[1]  # each commit of one is a commit of both
    assert newest[0] >= 3 * plain_work.TRANSFERS
    assert newest[2] >= 3 * plain_work.TRANSFERS
