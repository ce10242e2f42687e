"""The model of versions (docs/model/versions.pml): it holds, and each rule in it is needed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.lab.availability import REQUIRE_VARIABLE

MODEL = Path(__file__).resolve().parents[2] / "docs" / "model"

PARTS = {
    "home": ["-DPART_HOME"],
    "node": ["-DPART_NODE"],
    "whole": ["-DNB=1", "-DNO_EXPIRY"],
}
# The same in the gate: one block at home, and of the whole what 2^22 bits have room for (each step
# is reached in it). `make soak` and `make model` leave nothing out.
EXACT = "-O2 -DCOLLAPSE"
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


def check(
    *switches: str, timeout_s: float = 280, cflags: str = EXACT, arguments: str = ""
) -> subprocess.CompletedProcess[str]:
    missing = [tool for tool in ("spin", "gcc") if shutil.which(tool) is None]
    if missing:
        text = f"{' and '.join(missing)} not installed: the model of versions cannot be checked"
        if os.environ.get(REQUIRE_VARIABLE) == "1":
            pytest.fail(f"{text} ({REQUIRE_VARIABLE}=1)", pytrace=False)
        pytest.skip(text)
    done = subprocess.run(
        [str(MODEL / "run.sh"), *switches],
        env={**os.environ, "PAN_CFLAGS": cflags, "PAN_ARGS": arguments},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done


def holds(done: subprocess.CompletedProcess[str]) -> None:
    assert done.returncode == 0, done.stdout
    # A step that is never reached would prove nothing about itself.
    unreached = re.findall(r'versions\.pml:\d+, state \d+, "(.*)"', done.stdout)
    assert set(unreached) == {"-end-"}, done.stdout


@pytest.mark.parametrize("part", PARTS)
def test_the_model_holds(part: str) -> None:
    switches, cflags, arguments = SHORT[part]
    holds(check(*switches, cflags=cflags, arguments=arguments))


@pytest.mark.soak
@pytest.mark.timeout(1500)  # 17 million states: two minutes on a machine with nothing else to do
@pytest.mark.parametrize("part", ["home", "whole"])
def test_the_model_holds_in_every_state(part: str) -> None:
    holds(check(*PARTS[part], timeout_s=1400))


@pytest.mark.parametrize(
    ("rule", "part"), [(rule, part) for rule, parts in BROKEN.items() for part in parts]
)
def test_the_model_finds_a_broken_rule(rule: str, part: str) -> None:
    says = BROKEN[rule][part]
    # To compile takes longer than to search.
    cflags = f"-O0 -DCOLLAPSE {SEARCH.get(rule, '')}"
    done = check(*PARTS[part], *SWITCHES.get(rule, []), f"-DBREAK_{rule}", cflags=cflags)
    assert done.returncode == 1, done.stdout
    assert re.search(rf"assertion violated .*{says}", done.stdout), done.stdout


def test_every_switch_of_the_model_is_tried() -> None:
    source = (MODEL / "versions.pml").read_text()
    head, _, body = source.partition("#ifndef NB")
    names = set(re.findall(r"BREAK_([A-Z_]+)", body))
    assert names == set(re.findall(r"BREAK_([A-Z_]+) ", head)) == set(BROKEN)
