"""The model of slices (docs/model/slices.pml): it holds, and each rule in it is needed."""

from __future__ import annotations

import re

import pytest

from tests.support.spin import QUICK, check, holds, switches_of

MODEL = "slices.pml"

# Rule -> what the checker says where it is broken.
TWICE = r"begun\[running\[w\]\]"
ENDS = r"\(begun\[1\]&&begun\[2\]\)"  # when nothing more can happen
NEWER = "<sends_as"
BROKEN = {
    "HOLD": NEWER,
    "FORWARD": ENDS,
    "VERSION": NEWER,
    "EARLY": ENDS,
    "CLOSE": ENDS,
    "TWICE": r"place\[0\]==0",
    "COUNT": r"inbox\[w\]==3",
    "RUNNING": TWICE,
    "INBOX": ENDS,
    "STATE": TWICE,
    "STORE": r"stored\[w\]",
    "PART": "gone",
}
# What waits for a slice must go on: only where the map changes its mind on the way.
THREE = {"EARLY"}


def test_the_model_of_slices_holds() -> None:
    holds(MODEL, check(MODEL, "-DNV=2"))


@pytest.mark.soak  # four million states
def test_the_model_of_slices_holds_where_they_move_twice() -> None:
    holds(MODEL, check(MODEL))


@pytest.mark.parametrize("rule", BROKEN)
def test_the_model_of_slices_finds_a_broken_rule(rule: str) -> None:
    versions = 3 if rule in THREE else 2
    done = check(MODEL, f"-DNV={versions}", f"-DBREAK_{rule}", cflags=QUICK)
    assert done.returncode == 1, done.stdout
    assert re.search(rf"assertion violated .*{BROKEN[rule]}", done.stdout), done.stdout


def test_every_switch_of_the_model_of_slices_is_tried() -> None:
    said, used = switches_of(MODEL)
    assert said == used == set(BROKEN)
