"""How far a program is: from heartbeats to numbers, a table and a picture."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.image import imread

from clamor_ray._programs.progress_picture import draw_progress
from clamor_ray._programs.showing import Showing
from clamor_ray._recipes.program.builder import Builder
from clamor_ray._recipes.program.tables import Tables
from clamor_ray._recipes.progress import history as of_history
from clamor_ray._recipes.progress.history import History
from clamor_ray._recipes.progress.rounds import Done, RoundCounter

A, B = "a" * 56, "b" * 56  # nodes
AT = {(0, 0): A, (0, 1): A, (0, 2): B, (1, 0): B}


def tables() -> Tables:
    """Three parts and a total; 500 rounds of 4 tasks at the most."""
    p = Builder()
    parts, total = p.dataset([1, 2, 3], name="parts"), p.value(0, name="total")
    with p.loop(max=500) as loop:
        p.stage(lambda t, part: part + 1, writes=[parts], name="grow")
        loop.until(lambda t, total: total > 9, reads=[total], name="is_enough")
    return p.tables()


def done(rounds: int) -> Done:
    return Done(2 * rounds, 4 * rounds, (rounds,))


def ran(seconds: int, n: int = 10) -> History:
    """`n` rounds a second. Of each second node A computes 1.5 and node B 0.5."""
    history = History(tables(), done(0), now_s=100.0)
    for second in range(1, seconds + 1):
        now_s = 100.0 + second
        history.heard(A, {(0, 0): 0.9, (0, 1): 0.6}, now_s)
        history.heard(B, {(0, 2): 0.4, (1, 0): 0.1}, now_s + 0.4)
        history.sample(lambda second=second: done(n * second), now_s)  # type: ignore[misc]
    return history


def test_rounds_rates_and_skew_while_it_runs() -> None:
    progress = ran(20).progress("running", AT, 120.5)
    assert (progress.rounds, progress.most_rounds, progress.tasks) == (200, 500, 800)
    assert progress.elapsed_s == 20.5
    assert progress.rounds_per_s == pytest.approx(10.0)
    assert progress.tasks_per_s == pytest.approx(40.0)
    assert [(node.node_id, node.n_slices) for node in progress.nodes] == [(A, 2), (B, 2)]
    assert [node.busy_s for node in progress.nodes] == pytest.approx([30.0, 10.0])
    # Heartbeats of B are late by 0.4 s; what it computes for each second is right all the same.
    assert [node.cores for node in progress.nodes] == pytest.approx([1.5, 0.5])
    assert progress.node_skew == pytest.approx(1.5)
    parts, total = progress.groups
    assert (parts.datasets, total.datasets) == (("parts",), ("total",))
    assert parts.busy_s == pytest.approx((18.0, 12.0, 8.0))
    assert parts.node_ids == (A, A, B)
    assert (parts.busiest, parts.skew) == (0, pytest.approx(18.0 * 3 / 38.0))
    assert progress.partition_skew == parts.skew  # a total has no skew


def test_rates_are_of_the_last_seconds_and_at_the_end_of_all() -> None:
    history = ran(20)
    for second in range(21, 28):  # it stands
        history.sample(lambda: done(200), 100.0 + second)
    assert history.progress("running", AT, 127.0).rounds_per_s == 0.0
    history.sample(lambda: done(210), 130.0, is_last=True)
    ended = history.progress("ended", AT, 999.0)
    assert ended.elapsed_s == 30.0
    assert (ended.rounds, ended.rounds_per_s) == (210, pytest.approx(7.0))
    assert ended.samples[0].rounds == 0
    assert ended.samples[-1].rounds == 210
    history.sample(lambda: done(0), 140.0)  # a heartbeat that comes late says nothing
    assert history.progress("ended", AT, 999.0) == ended


def test_a_program_that_goes_on_at_a_checkpoint_counts_what_it_does_itself() -> None:
    history = History(tables(), done(100), now_s=0.0)
    history.sample(lambda: done(130), 3.0, is_last=True)
    progress = history.progress("ended", AT, 3.0)
    assert (progress.rounds, progress.rounds_per_s) == (130, pytest.approx(10.0))


def test_a_loss_takes_it_back() -> None:
    history = ran(10)
    history.sample(lambda: None, 111.0)  # something moves: nobody knows
    assert history.progress("running", AT, 111.0).rounds == 100
    history.sample(lambda: done(40), 112.0)
    progress = history.progress("running", AT, 112.0)
    assert progress.rounds == 40
    assert progress.rounds_per_s == 0.0


def test_loading_does_not_count() -> None:
    history = History(tables(), done(0), now_s=0.0)
    history.loaded(7.0)
    assert history.progress("running", AT, 9.0).elapsed_s == 2.0
    history.heard(A, {(0, 0): 1.0}, 8.5)
    history.loaded(9.0)  # some have begun while others load
    assert history.progress("running", AT, 9.0).elapsed_s == 2.0


def test_a_long_run_has_few_samples() -> None:
    history = ran(5000)
    samples = history.progress("running", AT, 5100.0).samples
    assert of_history.MOST_SAMPLES / 2 <= len(samples) <= of_history.MOST_SAMPLES
    assert samples[0].at_s == 0.0
    assert samples[-1].at_s > 4900.0
    gaps = {round(b.at_s - a.at_s) for a, b in itertools.pairwise(samples)}
    assert len(gaps) <= 2


SHOWN = """\
running, 20.5 s: 800 tasks, 40 a second
200 rounds, 10 a second

loop              rounds  at most
grow … is_enough     200      500

node          partitions  busy s  cores  of mean
aaaaaaaaaaaa           2   30.00   1.46     1.50
bbbbbbbbbbbb           2   10.00   0.49     0.50

partitions of  n  busy s  busiest  its s  of mean
parts          3   38.00        0  18.00     1.42
total          1    2.00        0   2.00     1.00"""


def test_as_text_it_is_a_table() -> None:
    progress = ran(20).progress("running", AT, 120.5)
    assert str(progress) == SHOWN
    assert progress.rate == "40 tasks/s"
    assert progress.skew == "busiest node 1.50, partition 1.42 of mean"


def test_a_table_is_no_wider_than_a_terminal() -> None:
    p = Builder()
    parts = [p.dataset([0] * 60, name=f"a dataset with a long name {n}") for n in range(3)]
    with p.loop(max=10**9), p.loop(max=10**9):
        p.stage(lambda t, *parts: None, reads=parts, name="a_stage_with_a_name_that_is_long")
    history = History(p.tables(), Done(0, 0, (0, 0)), now_s=0.0)
    at = {(0, n): f"{n:056x}" for n in range(60)}
    for n in range(60):
        history.heard(at[0, n], {(0, n): 12345.678}, 1.0)
    history.sample(lambda: Done(10**9, 10**10, (10**6, 10**9)), 1.0)
    lines = str(history.progress("running", at, 1.0)).splitlines()
    assert max(map(len, lines)) < 80
    assert "... and 20 more" in lines
    assert lines[1] == "1,000,000 rounds, 1,000,000 a second"


def test_nothing_has_run() -> None:
    p = Builder()
    p.stage(lambda t, x: x, reads=[p.value(0)], name="look")
    begun = RoundCounter(p.tables()).advance(0, {})
    progress = History(p.tables(), begun, 0.0).progress("starting", {}, 0.0)
    assert progress.skew == ""
    assert (progress.rounds, progress.most_rounds) == (0, None)
    assert "0 tasks, 0 a second" in str(progress)
    assert "rounds" not in str(progress)


@pytest.mark.parametrize("ending", ["svg", "png"])
@pytest.mark.parametrize("seconds", [0, 30])
def test_the_picture(ending: str, seconds: int, tmp_path: Path) -> None:
    path = tmp_path / f"x.{ending}"
    draw_progress(ran(seconds).progress("running", AT, 100.0 + seconds), path, "x")
    if ending == "png":
        assert imread(path).std() > 0.01
    else:
        assert ElementTree.parse(path).getroot().tag.endswith("svg")


def test_a_log_is_told_of_rounds_rate_and_skew(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from clamor_ray._observe import progress as lines

    monkeypatch.setattr(lines, "LINE_S", 0.0)
    showing = Showing(True, lambda: ran(20).progress("running", AT, 120.5))
    showing.look()
    showing.close()
    said = capsys.readouterr().err
    assert said == (
        "program, rounds: 200 of 500 (0 s), 40 tasks/s, busiest node 1.50, partition 1.42 of mean\n"
    )


def test_nobody_is_asked_where_nothing_is_shown() -> None:
    def ask() -> Any:
        raise AssertionError("it was asked")

    Showing(False, ask).look()
