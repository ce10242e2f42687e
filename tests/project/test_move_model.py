"""The model of moves (docs/model/moves.pml): it holds, and each rule in it is needed."""

from __future__ import annotations

import re

import pytest

from tests.support.spin import QUICK, check, holds, switches_of

MODEL = "moves.pml"

RUNS = {"all that may go wrong": [], "then nothing more goes wrong": ["-DCALM"]}
# Rule -> what the checker says where it is broken.
THERE = r"assertion violated \(+lost\[home\]"
READ = r"assertion violated \(\(is\[[01]\]!=\d+\)\|\|\(\(content"
DECIDED = r"assertion violated \(\(unheard==2\)&&"
JOURNAL = r"assertion violated .*home==s"
BROKEN = {
    "SEAL": THERE,
    "HOLD": THERE,
    "RELEASE": DECIDED,
    "RECHECK": THERE,
    "CATCH_UP": READ,
    "ATTEMPT": READ,
    "FREE": THERE,
    "ORDER": THERE,
    "FORGET": THERE,
    "GIVE_BACK": DECIDED,
    "TERM": THERE,
    "PREPARED": JOURNAL,
    "KEPT_HOME": THERE,
    "KEPT_TERM": THERE,
    "LOOK": "acceptance cycle",
}
SWITCHES = {"LOOK": ["-DCALM"]}


@pytest.mark.parametrize("run", RUNS)
def test_the_model_of_moves_holds(run: str) -> None:
    holds(MODEL, check(MODEL, *RUNS[run]))


@pytest.mark.parametrize("rule", BROKEN)
def test_the_model_of_moves_finds_a_broken_rule(rule: str) -> None:
    done = check(MODEL, f"-DBREAK_{rule}", *SWITCHES.get(rule, []), cflags=QUICK)
    assert done.returncode == 1, done.stdout
    assert re.search(BROKEN[rule], done.stdout), done.stdout


def test_every_switch_of_the_model_of_moves_is_tried() -> None:
    said, used = switches_of(MODEL)
    assert said == used == set(BROKEN)
