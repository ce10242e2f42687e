"""The model of parity (docs/model/parity.pml): it holds, and each rule in it is needed."""

from __future__ import annotations

import re

import pytest

from tests.support.spin import EXACT, QUICK, check, holds, switches_of

MODEL = "parity.pml"

# Where there are many states: not compressed, which takes half of the time, and below 1 GB.
FAST = "-O2"
RUNS = {
    "one loss": ([], FAST),
    "two losses": (["-DSECOND"], FAST),
    "a degraded read": (["-DREAD"], FAST),
    "one loss, to its end": (["-DENDS"], EXACT),
    "two losses, to their end": (["-DENDS", "-DSECOND"], EXACT),
}
LONG = pytest.mark.soak  # `make soak`, and `make model`
# Rule -> what the checker says where it is broken.
SAID = r"assertion violated \( !\(\(found<250\)\)\|\|\(found=="  # by a home
MADE = r"assertion violated \(\(sum_of==250\)\|\|"  # of the other members
ANSWERED = r"assertion violated \(\(\(\(losses==2\)\|\|\(newest<newest\)"
THERE = r"assertion violated \(layers\[p\]&"
NEWEST = r"assertion violated \(applied\[j\]=="
APART = r"assertion violated \(\(\(home\[0\]==7\)"
REFUSED = r"assertion violated \(\(\(pieces_of\[c\]&1\)&&"
READ = r"assertion violated \(\(got==250\)\|\|"
ENDS = "acceptance cycle"
BROKEN = {
    "ROW": SAID,
    "RECORD": SAID,
    "CHECK": SAID,
    "FALSE": REFUSED,
    "STAGE": THERE,
    "RECHECK": THERE,
    "WAIT": NEWEST,
    "TOLD": ANSWERED,
    "ABORT": SAID,
    "TWICE": SAID,
    "FIRST": SAID,
    "KEEP": SAID,
    "PENDING": SAID,
    "CARRY": SAID,
    "ONE_ROW": MADE,
    "DEGRADED": READ,
    "SPARE": APART,
    "RESERVE": APART,
    "LAST": ENDS,
    "ZEROS": SAID,
    "SPOIL": SAID,
    "HEAL": SAID,
    "REMAKE": ENDS,
}
SWITCHES = {
    "DEGRADED": ["-DREAD"],
    "LAST": ["-DENDS", "-DSECOND"],
    "ZEROS": ["-DSECOND"],
    "SPOIL": ["-DSECOND"],
    "HEAL": ["-DSECOND"],
    "REMAKE": ["-DENDS", "-DSECOND"],
}


@pytest.mark.parametrize(
    "run",
    [
        pytest.param(run, marks=LONG if "two losses" in run or run == "one loss" else ())
        for run in RUNS
    ],
)
def test_the_model_of_parity_holds(run: str) -> None:
    switches, cflags = RUNS[run]
    holds(MODEL, check(MODEL, *switches, cflags=cflags))


@pytest.mark.parametrize("rule", BROKEN)
def test_the_model_of_parity_finds_a_broken_rule(rule: str) -> None:
    done = check(MODEL, f"-DBREAK_{rule}", *SWITCHES.get(rule, []), cflags=QUICK)
    assert done.returncode == 1, done.stdout
    assert re.search(BROKEN[rule], done.stdout), done.stdout


def test_every_switch_of_the_model_of_parity_is_tried() -> None:
    said, used = switches_of(MODEL)
    assert said == used == set(BROKEN)
