"""What a program says of itself: its text, and the recipes in it against what really runs."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from clamor_ray._observe.graphviz import write_graph
from clamor_ray._recipes.program.builder import Builder
from clamor_ray._recipes.program.explaining import WIDTH, explain_text
from clamor_ray._recipes.program.picture import explain_picture
from clamor_ray._recipes.program.recipes import Recipes, Rounds, loops_around
from clamor_ray._recipes.program.sequence import Instance
from clamor_ray._recipes.program.sequence import Sequence as Order
from clamor_ray._recipes.program.tables import Tables
from tests.recipes.programs import random_program
from tests.recipes.test_sequence import change, figure_3, look, yes

FIGURE_3 = """\
program: 5 stages, 3 datasets, 4 partitions

datasets; those of one group move together
  group 0   TD (2 partitions)
  group 1   G, W (1 partition each)

loop, until Again says True
  0 Broadcast, 1 task, sends to the next stage  (test_sequence.py)
      reads W: first round: as it is at first
               later rounds: written by Update in the round before
  1 Compute, 2 tasks, sends to the next stage  (test_sequence.py)
      messages: from 1 task of Broadcast
      reads TD: as it is at first
  2 Reduce, 1 task  (test_sequence.py)
      messages: from 2 tasks of Compute
      writes G: first round: as it is at first, read by nobody since
                later rounds: written by Reduce in the round before, read since by Update and
                  Again
  3 Update, 1 task  (test_sequence.py)
      reads G: written by Reduce
      writes W: first round: as it is at first, read since by Broadcast
                later rounds: written by Update in the round before, read since by Broadcast
  4 Again, 1 task  (test_sequence.py)
      reads G: written by Reduce, after Update"""


def without_lines(text: str) -> str:
    return re.sub(r"(\.py):\d+\)", r"\1)", text)


def test_the_papers_figure_3() -> None:
    assert without_lines(explain_text(figure_3().tables())) == FIGURE_3


def in_each_other() -> Tables:
    p = Builder()
    w, rows = p.value(1, name="w"), p.dataset([1, 2], name="rows")
    with p.loop(max=2):
        with p.branch(yes, reads=[w], name="even") as branch, p.loop(max=3) as inner:
            p.stage(change, writes=[w], name="inner")
            inner.until(yes, reads=[w], name="done")
        with branch.otherwise():
            p.stage(change, writes=[rows], name="other")
        p.stage(look, reads=[w], name="last")
    return p.tables()


def test_loops_and_branches_are_indented_in_the_order_of_the_text() -> None:
    text = without_lines(explain_text(in_each_other()))
    is_entry = re.compile(r" +(messages|reads .*|writes .*): | {10}")
    lines = [line for line in text.splitlines()[6:] if not is_entry.match(line)]
    assert [line.split("  (")[0] for line in lines] == [
        "loop 0, 2 rounds",
        "  0 even, 1 task",
        "  where 0 even says True:",
        "    loop 1, until done says True, at most 3 rounds",
        "      1 inner, 1 task",
        "      2 done, 1 task",
        "  where 0 even says False:",
        "    3 other, 2 tasks",
        "  4 last, 1 task",
    ]


@pytest.mark.parametrize("seed", range(4))
def test_lines_have_room(seed: int) -> None:
    for n in range(25):
        text = explain_text(random_program(random.Random(100 * seed + n)).tables())
        assert max(map(len, text.splitlines())) <= WIDTH + 10


# -- against what runs


def rounds_and_needs(
    tables: Tables, salt: int, most: int = 300
) -> Iterator[tuple[Instance, Rounds, Instance | None, list[Instance]]]:
    """Runs a program with some decisions: each stage with its rounds, by the steps' counters."""
    around = loops_around(tables)
    order = Order(tables)
    ran: list[Instance] = []
    while not order.is_complete and len(ran) < most:
        found = order.extend(1)
        for each in found:
            rounds = tuple(order._counters[loop] > 1 for loop in around[each.stage])
            before = ran[-1] if ran else None
            ran.append(each)
            yield each, rounds, before, ran
        if order.decision is not None:
            order.decide(order.decision, hash((order.decision, salt)) % 3 == 0)


@pytest.mark.parametrize("seed", range(8))
def test_what_runs_is_one_of_the_recipes(seed: int) -> None:
    """Each writer, number of readers and sender that a run meets is in the recipe of its rounds."""
    met = 0
    for n in range(12):
        tables = random_program(random.Random(1000 * seed + n)).tables()
        recipes = Recipes(tables)
        for salt in range(3):
            for each, rounds, before, ran in rounds_and_needs(tables, salt):
                recipe = recipes.of(each.stage)[rounds]
                sender = None if before is None else before.stage
                if sender is not None and not tables.stages[sender].sends:
                    sender = None
                assert sender in recipe.senders
                for need in each.needs:
                    writer = ran[need.writer - 1].stage if need.writer else None
                    since = [one.stage for one in ran[need.writer : each.number - 1]]
                    readers = {
                        number: since.count(number)
                        for number, stage in enumerate(tables.stages)
                        if number in since
                        and any(a.dataset == need.dataset for a in stage.accesses)
                    }
                    assert sum(readers.values()) == need.readers
                    ways = recipe.needs[need.dataset]
                    fits = [
                        way
                        for way, possible in ways.items()
                        if way.stage == writer
                        and all(
                            min(2, readers.get(number, 0)) in possible.get(number, {0})
                            for number in {*readers, *possible}
                        )
                    ]
                    assert fits, (tables.stages[each.stage], need, ways)
                    met += need.writer > 0
    assert met > 200


def test_no_recipe_is_made_up() -> None:
    """Of a program without branches each recipe is met by a run."""
    tables = figure_3().tables()
    met: set[tuple[int, Rounds]] = set()
    for salt in range(5):
        met |= {(each.stage, rounds) for each, rounds, _, _ in rounds_and_needs(tables, salt)}
    recipes = Recipes(tables)
    assert met == {(stage, rounds) for stage in range(5) for rounds in recipes.of(stage)}
    for stage in range(5):
        for recipe in recipes.of(stage).values():
            assert all(len(ways) == 1 for ways in recipe.needs.values())


def test_many_branches_cost_little() -> None:
    """As many ways as there are subsets of 40 branches; each dataset is followed alone."""
    p = Builder()
    w, rows = p.value(1), p.dataset([1, 2], name="rows")
    with p.loop(max=5):
        for n in range(40):
            with p.branch(yes, reads=[w], name=f"d{n}"):
                if n % 8:
                    p.stage(look, reads=[rows])
                else:
                    p.stage(change, writes=[rows])
    p.stage(change, writes=[rows], name="end")
    assert "end, 2 tasks" in explain_text(p.tables())


# -- the picture


def test_the_picture_shows_stages_loops_messages_and_datasets(tmp_path: Path) -> None:
    text = explain_picture(figure_3().tables())
    for line in (
        "subgraph cluster_0 {",
        'stage1 [shape=box, label="Compute\\n× 2"]',
        'stage4 [shape=diamond, label="Again"]',
        'stage1 -> stage2 [color="#e8a33d:#e8a33d", penwidth=1.6, label="2 → 1"]',
        'stage4 -> end [label="True"]',
        'stage4 -> stage0 [label="False", constraint=false]',
        'dataset0 [shape=box, style="rounded,filled", color="#5b6fb5", fillcolor="#edf0fa", '
        'label="TD\\n2 partitions, group 0"]',
        'stage2 -> dataset1 [style=dashed, color="#5b6fb5", constraint=false]',
    ):
        assert f"  {line}\n" in text, text
    assert 'stage4 -> end [label="False"]' not in text  # the loop has no other end
    assert text.count("{") == text.count("}")


@pytest.mark.parametrize("seed", range(3))
def test_graphviz_draws_it(seed: int, tmp_path: Path) -> None:
    tables = random_program(random.Random(seed)).tables()
    out = tmp_path / "program.svg"
    write_graph(explain_picture(tables), out, "explain(picture=...)", "some stages")
    drawn = out.read_text()
    assert drawn.count('class="cluster"') == tables.n_counters
    assert drawn.count('class="node"') == 2 + len(tables.stages) + len(tables.datasets)


def test_names_with_quotes_stay_names() -> None:
    p = Builder()
    p.stage(look, reads=[p.value(1, name='a "b" \\ c')], name='say "x"')
    text = explain_picture(p.tables())
    assert 'label="say \\"x\\""' in text
    assert 'label="a \\"b\\" \\\\ c\\n1 partition, group 0"' in text
