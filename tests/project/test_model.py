"""The model of versions (docs/model/versions.pml): it holds, and each rule in it is needed."""

from __future__ import annotations

import re

import pytest

from tests.support.spin import EXACT, QUICK, check, holds, switches_of

MODEL = "versions.pml"

PARTS = {
    "home": ["-DPART_HOME"],
    "node": ["-DPART_NODE"],
    "whole": ["-DNB=1", "-DNO_EXPIRY"],
}
# The same in the gate: one block at home, and of the whole what 2^22 bits have room for (each step
# is reached in it). `make soak` and `make model` leave nothing out.
SHORT = {
    "home": (["-DPART_HOME", "-DNB=1"], EXACT, ""),
    "node": (PARTS["node"], EXACT, ""),
    "whole": (PARTS["whole"], "-O2 -DBITSTATE", "-w22"),
}
# Rule -> the parts that find it broken, and what they say then.
ANSWER, SEEN_HERE, SEEN_THERE = "fetch_content==truth", r"!\(mapped\)", r"reader\[[01]\]==.*content"
BROKEN = {
    "APPLY_ORDER": {"home": ANSWER},
    "GRACE": {"home": ANSWER},
    "TURN": {"home": ANSWER},
    "TORN": {"home": SEEN_HERE},
    "REAPPLY": {"home": ANSWER},
    "MERGE": {"home": ANSWER},
    "PULL": {"home": ANSWER},
    "EXPIRED": {"home": ANSWER},
    "PIN": {"home": SEEN_HERE},
    "SETTLE": {"home": SEEN_HERE, "node": SEEN_THERE},
    "LAYER_DROP": {"home": "layers&"},
    "OUTCOME": {"home": "layers&"},
    "STAGE": {"home": "layers&"},
    "RECHECK": {"home": "base_of"},
    "COMMIT_ID": {"home": "answer=="},
    "ADVANCE": {"node": SEEN_THERE},
    "RETAG": {"node": SEEN_THERE},
    "SIBLING": {"node": SEEN_THERE},
}

# What is found only after millions of states, found earlier: with one block, or with the last step
# of a process tried first.
SWITCHES = {"RECHECK": ["-DNB=1"]}
SEARCH = {"TURN": "-DT_REVERSE"}


@pytest.mark.parametrize("part", PARTS)
def test_the_model_holds(part: str) -> None:
    switches, cflags, arguments = SHORT[part]
    holds(MODEL, check(MODEL, *switches, cflags=cflags, arguments=arguments))


@pytest.mark.soak
@pytest.mark.timeout(1500)  # 17 million states: two minutes on a machine with nothing else to do
@pytest.mark.parametrize("part", ["home", "whole"])
def test_the_model_holds_in_every_state(part: str) -> None:
    holds(MODEL, check(MODEL, *PARTS[part], timeout_s=1400))


@pytest.mark.parametrize(
    ("rule", "part"), [(rule, part) for rule, parts in BROKEN.items() for part in parts]
)
def test_the_model_finds_a_broken_rule(rule: str, part: str) -> None:
    says = BROKEN[rule][part]
    switches = [*PARTS[part], *SWITCHES.get(rule, []), f"-DBREAK_{rule}"]
    done = check(MODEL, *switches, cflags=f"{QUICK} {SEARCH.get(rule, '')}")
    assert done.returncode == 1, done.stdout
    assert re.search(rf"assertion violated .*{says}", done.stdout), done.stdout


def test_every_switch_of_the_model_is_tried() -> None:
    said, used = switches_of(MODEL)
    assert said == used == set(BROKEN)
