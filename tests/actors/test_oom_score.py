"""What must survive is not killed first where memory runs out."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from clamor_ray.actors.process import oom_score
from clamor_ray.actors.process.journals import journal_directory
from tests.conftest import ANSWER_S
from tests.support.lab import LocalCluster
from tests.support.session_rig import Session, keepers, running_session, watchers


class Kernel:
    """As the kernel's file: takes nothing below a limit."""

    def __init__(self, score: int, least: int) -> None:
        self.score, self.least = score, least

    def read_text(self) -> str:
        return f"{self.score}\n"

    def write_text(self, text: str) -> None:
        if int(text) < self.least:
            raise PermissionError(13, "Permission denied")
        self.score = int(text)


@pytest.mark.parametrize(
    ("score", "least", "expected"),
    [
        (1000, -1000, oom_score.WANTED),
        (1000, 0, 0),
        (1000, 250, 250),
        (1000, 1000, 1000),
        (1000, -300, -300),
        (0, -17, -17),
        (-950, -1000, -950),
    ],
)
def test_it_is_as_low_as_the_kernel_lets_it(
    score: int, least: int, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    kernel = Kernel(score, least)
    with caplog.at_level(logging.WARNING):
        assert oom_score.lower(kernel) == expected  # type: ignore[arg-type]
    assert kernel.score == expected
    assert ("CAP_SYS_RESOURCE" in caplog.text) == (expected > 0)


@pytest.fixture
def session(lab: LocalCluster) -> Iterator[Session]:
    with running_session(lab) as session:
        yield session


def score_of(pid: int | str) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


def lowest_of_a_worker() -> int:
    """By what it is let, one by one, and not by the code under test."""
    path = Path("/proc/self/oom_score_adj")
    for score in range(oom_score.WANTED, 1001):
        try:
            path.write_text(str(score))
        except OSError:
            continue
        return score
    return score_of("self")


@pytest.mark.lab
def test_all_four_processes_have_the_lowest(session: Session, lab: LocalCluster) -> None:
    lowest = ray.get(ray.remote(num_cpus=0)(lowest_of_a_worker).remote(), timeout=ANSWER_S)
    info = session("ensure_server", lab.node_ids[0])
    registry = session("ping")
    (keeper,) = keepers(session.scope)
    (watcher,) = watchers(journal_directory(session.scope))
    scores = [score_of(pid) for pid in (info.pid, registry, keeper, watcher)]
    assert scores == [lowest] * 4
