"""Of lines of one kind a few are written, and then a count."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable

import pytest

from clamor_ray.actors.process import throttle
from clamor_ray.actors.process.throttle import Throttle


class Clock:
    now_s = 100.0

    def __init__(self) -> None:
        self.wakes: list[tuple[float, Callable[[], None]]] = []

    def wake(self, pause_s: float, then: Callable[[], None]) -> None:
        self.wakes.append((self.now_s + pause_s, then))

    def run_until(self, now_s: float) -> None:
        while self.wakes and self.wakes[0][0] <= now_s:
            self.now_s, then = self.wakes.pop(0)
            then()
        self.now_s = now_s


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def log() -> tuple[logging.Logger, list[str], Clock]:
    logger, handler, clock = logging.getLogger("clamor_ray.test_throttle.lines"), Lines(), Clock()
    logger.propagate = False
    logger.handlers, logger.filters = [handler], []
    logger.addFilter(Throttle(now_s=lambda: clock.now_s, wake=clock.wake))
    return logger, handler.lines, clock


def test_a_storm_is_three_lines_and_a_count(log) -> None:
    logger, lines, clock = log
    for i in range(18_800):
        clock.now_s += 170 / 18_800
        logger.warning("the keeper did not take region %d: a crash would lose it", i)
    assert len(lines) <= 3 * (170 // 30 + 1)
    assert lines[0] == "the keeper did not take region 0: a crash would lose it"
    assert "more lines like this are counted for 30 s" in lines[2]
    assert "more lines like this in 30 s were left out" in lines[3]


def test_a_count_is_written_though_no_line_of_its_kind_comes_any_more(log) -> None:
    logger, lines, clock = log
    for i in range(500):
        clock.now_s += 0.01
        logger.warning("the keeper did not take region %d", i)
        if i == 200:
            logger.error("refused")
    clock.run_until(129.0)
    assert len(lines) == 4
    clock.run_until(135.1)
    assert lines[4:] == [
        "the keeper did not take region 499 (497 more lines like this in 30 s were left out)"
    ]
    clock.run_until(1000.0)
    assert len(lines) == 5
    assert not clock.wakes  # nothing goes on
    logger.warning("the keeper did not take region %d", 7)
    assert lines[5:] == ["the keeper did not take region 7"]


def test_each_kind_has_its_count_when_its_time_is_over(log) -> None:
    logger, lines, clock = log
    for _ in range(10):
        logger.warning("this")
    clock.run_until(110.0)
    for _ in range(20):
        logger.warning("that")
    clock.run_until(130.0)
    assert lines[6:] == ["this (7 more lines like this in 30 s were left out)"]
    clock.run_until(140.0)
    assert lines[7:] == ["that (17 more lines like this in 30 s were left out)"]


def test_a_count_has_no_traceback(log) -> None:
    logger, lines, clock = log
    records: list[logging.LogRecord] = []
    logger.handlers[0].emit = records.append  # type: ignore[method-assign]
    for _ in range(5):
        try:
            raise ValueError("x")
        except ValueError:
            logger.exception("it failed")
    clock.run_until(131.0)
    assert [record.exc_info is None for record in records] == [False, False, False, True]
    assert not lines


def test_by_the_clock_of_the_machine() -> None:
    logger, handler = logging.getLogger("clamor_ray.test_throttle.clock"), Lines()
    logger.propagate = False
    logger.handlers, logger.filters = [handler], [Throttle(window_s=0.1)]
    for i in range(100):
        logger.warning("line %d", i)
    deadline_s = time.monotonic() + 30.0
    while sum("left out)" in line for line in handler.lines) < 2:
        assert time.monotonic() < deadline_s, handler.lines
        time.sleep(0.01)
    written = sum("counted for" in line or "left out" not in line for line in handler.lines)
    counts = [re.search(r"\((\d+) more lines", line) for line in handler.lines]
    assert written + sum(int(count[1]) for count in counts if count) == 100


def test_nothing_that_is_rare_is_left_out(log) -> None:
    logger, lines, clock = log
    for i in range(10):
        clock.now_s += 11.0
        logger.warning("region %d is rebuilt", i)
    assert [line.partition(" (")[0] for line in lines] == [
        f"region {i} is rebuilt" for i in range(10)
    ]


def test_kinds_do_not_hide_each_other(log) -> None:
    logger, lines, _ = log
    for i in range(100):
        logger.warning("refused a connection from 10.0.0.%d", i)
        if i == 50:
            logger.error("refused a connection from 10.0.0.%d", i)
            logger.warning("page server %#x is lost: %s", 0xAB, "its node is dead")
    assert len(lines) == 5
    assert lines[3:] == [
        "refused a connection from 10.0.0.50",
        "page server 0xab is lost: its node is dead",
    ]


def test_the_number_of_kinds_is_bounded(log) -> None:
    logger, _, _ = log
    for i in range(2 * throttle.KINDS):
        logger.warning("x" * i)
    (found,) = logger.filters
    assert len(found._seen) == throttle.KINDS


def test_a_logger_is_throttled_once() -> None:
    for _ in range(3):
        throttle.throttle("clamor_ray.test_throttle")
    logger = logging.getLogger("clamor_ray.test_throttle")
    assert [type(found) for found in logger.filters] == [Throttle]
