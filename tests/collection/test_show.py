"""What `explain` and `lineage` print, and the picture as DOT."""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clamor_ray.collection.explain import dot
from clamor_ray.collection.explain.show import explain, lineage
from clamor_ray.collection.explain.shown_stage import ShownStage, States

STAGES = [
    ShownStage(
        "0",
        ("read_parquet", "map_batches(lookup)"),
        24,
        ("s3://bucket/part-*.parquet (24 files)",),
        (("hm", 3, 1204),),
        kept=24,
        attempts=27,
        dirty=2,
        lost=1,
        placement="where their blocks are cached",
        rows=10_000_000,
    ),
    ShownStage("1", ("sum",), 1, ("0",), wide=True, attempts=1),
    ShownStage("2", ("map(lambda)",), 24, ("0", "1"), kept=True, notes=("broadcast: 1",)),
    ShownStage(
        "3",
        ("read_npy", "map(as_vector)", "filter(is_near_enough_to_be_taken)", "map(weight_of_it)"),
        24,
        ("other-*.npy (24 files, 3.2 GiB)",),
        (("tree", 1, None), ("tree", 2, 88)),
    ),
    ShownStage("near", ("zip", "map(argmin)"), 24, ("2", "3"), (("tree", 2, 1),)),
]

EXPLAINED = """\
near: 5 stages, 97 tasks

Stage 0    read_parquet → map_batches(lookup)
           24 partitions, 10,000,000 rows; tasks go where their blocks are
           cached
  from     s3://bucket/part-*.parquet (24 files)
  reads    hm  version 3, 1,204 blocks
  kept     23 of 24 partitions (2 dirty, 1 lost)
  ran      27 attempts

Stage 1    sum
           1 partition
  from     stage 0, all to all
  ran      1 attempt

Stage 2    map(lambda)
           24 partitions
  from     stage 0
           stage 1
  kept     24 of 24 partitions
  note     broadcast: 1

Stage 3    read_npy → map(as_vector) → filter(is_near_enough_to_be_taken)
           → map(weight_of_it)
           24 partitions
  from     other-*.npy (24 files, 3.2 GiB)
  reads    tree  version 1
           tree  version 2, 88 blocks

Stage near zip → map(argmin)
           24 partitions
  from     stage 2
           stage 3
  reads    tree  version 2, 1 block"""

LINEAGE = """\
lineage of near

○ near  zip → map(argmin)                                          24 partitions
│       reads tree v2 (1 block)
├─○ 3  read_npy → map(as_vector)                                   24 partitions
│ │    → filter(is_near_enough_to_be_taken) → map(weight_of_it)
│ │    reads tree v1, tree v2 (88 blocks)
│ ╰─ other-*.npy (24 files, 3.2 GiB)
● 2  map(lambda)                                                   24 partitions
├─✗ 0  read_parquet → map_batches(lookup)         24 partitions, 2 dirty, 1 lost
│ │    reads hm v3 (1,204 blocks)
│ ╰─ s3://bucket/part-*.parquet (24 files)
○ 1  sum                                                             1 partition
╚═✗ 0  (see above)

● kept  ○ not kept  ✗ some lost  │ by partition  ║ all to all"""


def test_explain() -> None:
    assert explain(STAGES, "near") == EXPLAINED


def test_lineage() -> None:
    assert lineage(STAGES, "near") == LINEAGE


def test_a_long_program_is_not_wide() -> None:
    stages = [ShownStage("data", ("range",), 4, ("0 to 9",), kept=True)]
    for index in range(3000):
        before = (str(index - 1),) if index else ()
        stages.append(ShownStage(str(index), ("map", "sum"), 4, ("data", *before), wide=True))
    text = lineage(stages)
    assert text.startswith("○ 2999  map → sum")
    assert max(line.find("map") for line in text.split("\n")) == len("○ 2999  ")
    assert text.count("(see above)") == 2999


def test_nothing() -> None:
    assert explain([]) == "0 stages, 0 tasks"
    assert lineage([]).strip() == ""


@pytest.mark.parametrize(
    ("how", "states"),
    [
        ({}, States(0, 0, 0, 4)),
        ({"kept": True}, States(4, 0, 0, 0)),
        ({"kept": 3, "dirty": 1}, States(2, 1, 0, 1)),
        ({"kept": 4, "dirty": 1, "lost": 2}, States(1, 1, 2, 0)),
        ({"kept": 4, "dirty": 9, "lost": 9}, States(0, 0, 4, 0)),
    ],
)
def test_every_partition_is_in_one_state(how: dict[str, Any], states: States) -> None:
    stage = ShownStage("0", (), 4, **how)
    assert stage.states == states
    assert sum(stage.states) == 4


@pytest.mark.parametrize("show", [explain, lineage])
def test_a_graph_that_is_none(show: Any) -> None:
    with pytest.raises(ValueError, match="two stages are called '0'"):
        show([ShownStage("0", (), 1), ShownStage("0", (), 1)])
    with pytest.raises(ValueError, match="'0' comes before its input '1'"):
        show([ShownStage("0", (), 1, ("1",)), ShownStage("1", (), 1)])


names = st.text("abcdefgh_", min_size=1, max_size=30)


@st.composite
def graphs(draw: st.DrawFn) -> list[ShownStage]:
    stages: list[ShownStage] = []
    for index in range(draw(st.integers(1, 9))):
        before = [stage.name for stage in stages]
        chosen = draw(st.lists(st.sampled_from(before), max_size=3)) if before else []
        inputs = [*chosen, *draw(st.lists(names.map(lambda n: f"{n}.csv"), max_size=1))]
        variable = st.tuples(names, st.integers(0, 99), st.none() | st.integers(0, 10**7))
        stages.append(
            ShownStage(
                str(index),
                tuple(draw(st.lists(names, max_size=6))),
                draw(st.integers(0, 10**5)),
                tuple(inputs),
                tuple(draw(st.lists(variable, max_size=3))),
                kept=draw(st.booleans() | st.integers(0, 10)),
                dirty=draw(st.integers(0, 3)),
                lost=draw(st.integers(0, 3)),
                wide=draw(st.booleans()),
            )
        )
    return stages


@settings(max_examples=150, deadline=None)
@given(graphs())
def test_any_graph_is_shown_whole_within_80_columns(stages: list[ShownStage]) -> None:
    explained, tree = explain(stages, "x"), lineage(stages, "x")
    for text in (explained, tree):
        assert max(map(len, text.split("\n"))) <= 80
        assert not any(line != line.rstrip() for line in text.split("\n"))
    for stage in stages:
        assert f"Stage {stage.name}" in explained
        assert any(f" {stage.name}  " in line for line in tree.split("\n"))
        assert all(operator in explained for operator in stage.operators)
        assert all(operator in tree for operator in stage.operators)


# ------------------------------------------------------------------ the picture


@settings(max_examples=100, deadline=None)
@given(graphs())
def test_the_picture_has_each_stage_once_and_each_input_as_a_line(stages: list[ShownStage]) -> None:
    text = dot.dot_of(stages)
    for n, stage in enumerate(stages):
        assert len(re.findall(rf"^  stage{n} \[", text, re.M)) == 1
        into = re.findall(rf"^  (\w+) -> stage{n}\b(?!.*dashed)", text, re.M)
        assert len(into) == len(set(stage.inputs))
        readers = re.findall(rf"^  (\w+) -> stage{n} \[style=dashed", text, re.M)
        assert len(readers) == len(stage.variables)


def colors_of(text: str, color: str) -> int:
    return text.split("legend [")[0].count(f'BGCOLOR="{color}"')


def test_the_picture_has_the_colours_of_what_is_wrong() -> None:
    def of(n: int, kept: int | bool, dirty: int, lost: int) -> list[int]:
        stage = ShownStage("0", ("map(f)",), n, kept=kept, dirty=dirty, lost=lost)
        text = dot.dot_of([stage])
        return [colors_of(text, color) for color in (dot.KEPT, dot.DIRTY, dot.LOST, dot.ABSENT)]

    assert of(24, True, 2, 2) == [20, 2, 2, 0]
    assert of(24, 3, 0, 0) == [3, 0, 0, 21]
    assert of(4096, 4095, 1, 0) == [1, 1, 0, 1]  # parts of a bar; one of thousands is seen
    assert dot.LOST in dot.dot_of(STAGES).split("legend [")[0]


@pytest.mark.parametrize("ending", ["dot", "gv", "svg"])
def test_the_picture_names_everything(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"lineage.{ending}"
    dot.draw(STAGES, path, "near")
    text = html.unescape(path.read_text()).replace("\xa0", " ")
    for name in (
        "lineage of near",
        "stage near",
        "map(argmin)",
        "hm v3",
        "1,204 blocks",
        "tree v1",
        "tree v2",
        "s3://bucket/part-*.parquet (24 files)",
        "× 24",
        "all to all",
    ):
        assert name in text
    dot.draw([], path)


@pytest.mark.parametrize("name", ['a "b" \\', "<b>&amp;", "}; x -> y", "\\N", "é…"])
def test_names_stay_names_in_the_picture(tmp_path: Path, name: str) -> None:
    path = tmp_path / "lineage.svg"
    dot.draw([ShownStage(name, (name,), 2, (f"from {name}",), ((name, 1, None),))], path, name)
    text = html.unescape(path.read_text()).replace("\xa0", " ")
    assert text.count(name) >= 5


def test_the_picture_as_png(tmp_path: Path) -> None:
    path = tmp_path / "lineage.png"
    dot.draw(STAGES, path, "near")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"does not say its format"):
        dot.draw(STAGES, tmp_path / "lineage")
    with pytest.raises(ValueError, match=r"Graphviz cannot draw .*lineage\.nothing"):
        dot.draw(STAGES, tmp_path / "lineage.nothing")


def test_without_graphviz_it_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"apt install graphviz.*\.dot"):
        dot.draw(STAGES, tmp_path / "lineage.png")
    dot.draw(STAGES, tmp_path / "lineage.dot")
