"""Of lines of one kind a few are written, and then a count."""

from __future__ import annotations

import logging

import pytest

from clamor_ray.actors import throttle
from clamor_ray.actors.throttle import Throttle


class Clock:
    now_s = 100.0


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def log() -> tuple[logging.Logger, list[str], Clock]:
    logger, handler, clock = logging.Logger("test"), Lines(), Clock()
    logger.addHandler(handler)
    logger.addFilter(Throttle(now_s=lambda: clock.now_s))
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
