"""What is read of a benchmark's driver."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bench.support.namespaces import records_of, with_links


def driver(program: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)


def test_records_are_told_from_what_ray_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with driver("print('(raylet) hm'); print('{\"a\": 1}'); print('{\"b\": 2}')") as started:
        assert list(records_of(started, "some")) == [{"a": 1}, {"b": 2}]
    assert capsys.readouterr().err == "(raylet) hm\n"


def test_a_driver_that_fails_is_no_shorter_run() -> None:
    found = []
    with driver("print('{\"a\": 1}', flush=True); raise SystemExit(3)") as started:
        with pytest.raises(SystemExit, match="the driver of some ended with an error"):
            found.extend(records_of(started, "some"))
        assert started.returncode == 3


class Lab:
    """Two hosts, whose links carry 10 bytes out and 1 in between two looks."""

    namespaces = ("a", "b")

    def __init__(self) -> None:
        self.sent = [0, 0]

    def sent_bytes(self, host: int) -> int:
        self.sent[host] += 10
        return self.sent[host]

    def received_bytes(self, host: int) -> int:
        return self.sent[host] // 10


def test_each_record_has_what_the_links_carried_since_the_last() -> None:
    found = list(with_links(Lab(), [{"run": 1}, {"run": 2}]))
    grown = [[10, 1], [10, 1]]
    assert found == [{"run": 1, "link_out_in": grown}, {"run": 2, "link_out_in": grown}]
