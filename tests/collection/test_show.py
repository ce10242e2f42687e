"""What `explain` and `lineage` print, and where the boxes of the picture go."""

from __future__ import annotations

import builtins
import itertools
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clamor_ray.collection.explain import show_picture
from clamor_ray.collection.explain.graph_layout import _spread, place
from clamor_ray.collection.explain.show import ShownStage, States, draw, explain, lineage

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
def test_no_box_lies_on_another_and_lines_go_down(stages: list[ShownStage]) -> None:
    graph = show_picture._Graph(stages)
    width = {key: graph.size(key)[0] + show_picture.GAP_X for key in graph.texts}
    nodes = list(graph.texts)
    layout = place(nodes, graph.edges, width)
    assert layout.x.keys() == set(nodes)
    for one, other in itertools.combinations(nodes, 2):
        if layout.layer[one] == layout.layer[other]:
            apart = abs(layout.x[one] - layout.x[other])
            assert apart >= (width[one] + width[other]) / 2 - 1e-6
    for (tail, head), way in layout.ways.items():
        assert [at for _, at in way] == list(range(layout.layer[tail], layout.layer[head] + 1))
        assert way[0][0] == layout.x[tail]
        assert way[-1][0] == layout.x[head]
    assert all(at >= 0 for at in layout.layer.values())


def test_a_chain_is_straight_and_a_source_is_beside_its_reader() -> None:
    nodes = ["a", "b", "c", "late"]
    layout = place(
        ["a", "late", "b", "c"], [("a", "b"), ("b", "c"), ("late", "c")], dict.fromkeys(nodes, 1.0)
    )
    assert layout.x["a"] == pytest.approx(layout.x["b"], abs=0.6)
    assert layout.layer == {"a": 0, "late": 1, "b": 1, "c": 2}


def test_a_box_is_above_the_middle_of_those_it_feeds() -> None:
    nodes = ["a", "b", "c", "d"]
    layout = place(nodes, [("a", node) for node in "bcd"], {"a": 1.0, "b": 1.0, "c": 4.0, "d": 2.0})
    assert layout.x["a"] == pytest.approx(sum(layout.x[node] for node in "bcd") / 3, abs=0.1)


def test_two_that_want_one_place_share_it() -> None:
    x: dict[Any, float] = {}
    _spread(["a", "b", "c"], {"a": 0.0, "b": 0.0, "c": 9.0}, {"a": 1.0, "b": 3.0, "c": 1.0}, x)
    assert x == {"a": -1.0, "b": 1.0, "c": 9.0}


def colors_of(path: Path, color: str) -> int:
    pixels = matplotlib.image.imread(path)[..., :3]
    rgb = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return int((np.abs(pixels - rgb).max(axis=2) < 0.02).sum())


def test_the_picture_has_the_colours_of_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "lineage.png"
    draw(STAGES, path, "near")
    assert colors_of(path, show_picture.LOST) > 50

    def of(dirty: int, lost: int) -> list[int]:
        draw([ShownStage("0", ("map(f)",), 24, kept=True, dirty=dirty, lost=lost)], path)
        colors = (show_picture.KEPT, show_picture.DIRTY, show_picture.LOST)
        return [colors_of(path, color) for color in colors]

    (kept, dirty, lost), (less, more, same) = of(2, 2), of(12, 2)
    assert more - dirty == pytest.approx(kept - less, rel=0.3)
    assert more - dirty > 500
    assert same == pytest.approx(lost, rel=0.1)
    fine = [ShownStage("0", ("map(f)",), 4096, ("a.csv",), (("t", 1, 3),), kept=True)]
    draw(fine, path)
    assert colors_of(path, show_picture.KEPT) > 500
    assert colors_of(path, show_picture.DIRTY) == colors_of(path, show_picture.LOST) == 0
    draw([ShownStage("0", ("map(f)",), 4096, kept=4095, dirty=1)], path)
    assert colors_of(path, show_picture.DIRTY) > 20  # one of thousands is seen


def test_the_picture_names_everything(tmp_path: Path) -> None:
    import matplotlib

    path = tmp_path / "lineage.svg"
    with matplotlib.rc_context({"svg.fonttype": "none"}):
        draw(STAGES, path, "near")
    text = path.read_text()
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
    draw([], path)


def test_without_matplotlib_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    load = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return load(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert explain(STAGES)
    with pytest.raises(ImportError, match=r"pip install matplotlib"):
        draw(STAGES, tmp_path / "lineage.png")
