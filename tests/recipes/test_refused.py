"""What cannot be right is refused, with its line in the user's file."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from clamor_ray import errors
from clamor_ray._recipes.program.builder import Builder
from clamor_ray._recipes.program.plain import run_plainly
from clamor_ray._recipes.program.task import Task

Describe = Callable[[Builder], Any]
CASES: list[Any] = []


def refused(why: str, *, runs: bool = False) -> Callable[[Describe], Describe]:
    """A program whose line with the comment HERE is refused, for a reason.

    Args:
        why: A regular expression of the message.
        runs: It is refused only when it runs.
    """

    def note(describe: Describe) -> Describe:
        CASES.append(pytest.param(describe, why, runs, id=describe.__name__))
        return describe

    return note


def send_all(t: Task, x: Any) -> None:
    t.broadcast(x)


def receive(t: Task, x: Any) -> Any:
    return sum(t.recv())


def change(t: Task, x: Any) -> Any:
    return x


def nothing(t: Task, x: Any) -> None:
    pass


def yes(t: Task, x: Any) -> bool:
    return True


# -- datasets


@refused("A dataset has at least one partition")
def no_partition(p: Builder) -> None:
    p.dataset([])  # HERE


@refused("Nobody says how many partitions the dataset has: pass n")
def nobody_says_how_many(p: Builder) -> None:
    p.dataset(None)  # HERE


@refused("n is 3, and the source has 2 partitions")
def two_say_how_many(p: Builder) -> None:
    p.dataset([1, 2], n=3)  # HERE


@refused("n is 'two', and must be a whole number")
def n_is_a_word(p: Builder) -> None:
    p.dataset(None, n="two")  # type: ignore[arg-type]  # HERE


@refused("a dict is none: pass a list with one item for each partition")
def partitions_without_order(p: Builder) -> None:
    p.dataset({0: "a", 1: "b"})  # HERE


# -- what a stage accesses


@refused(r"rows has 2 \(.*test_refused.py:\d+\), sums has 3 \(.*\)\. A task sees one index alone")
def unequal_partition_counts(p: Builder) -> None:
    rows, sums = p.dataset([1, 2], name="rows"), p.dataset([1, 2, 3], name="sums")
    p.stage(lambda t, a, b: None, reads=[rows], writes=[sums])  # HERE


@refused("Stage nothing accesses no dataset")
def no_dataset(p: Builder) -> None:
    p.stage(nothing)  # HERE


@refused(r"reads has dataset 0, which is a dataset of another program \(.*:\d+\)")
def dataset_of_another_program(p: Builder) -> None:
    p.dataset([1])
    p.stage(nothing, reads=[Builder().dataset([1])])  # HERE


@refused("writes has 7, which is no dataset")
def no_dataset_at_all(p: Builder) -> None:
    p.stage(nothing, writes=[7])  # type: ignore[list-item]  # HERE


@refused(r"reads is a list of datasets: write reads=\[...\]")
def no_list(p: Builder) -> None:
    x = p.value(1)
    p.stage(nothing, reads=x)  # type: ignore[arg-type]  # HERE


@refused("Stage change names w twice")
def read_and_written(p: Builder) -> None:
    w = p.value(1, name="w")
    p.stage(change, reads=[w], writes=[w])  # HERE


@refused("A stage is a function, and 3 cannot be called")
def no_function(p: Builder) -> None:
    p.stage(3, reads=[p.value(1)])  # type: ignore[arg-type]  # HERE


@refused(r"nothing is called with \(t, dataset 0, w\), and takes other arguments")
def other_arguments(p: Builder) -> None:
    x, w = p.value(1), p.value(2, name="w")
    p.stage(nothing, reads=[x], writes=[w])  # HERE


@refused("nothing reads later, which nothing may have written")
def reads_what_nothing_has_written(p: Builder) -> None:
    later = p.dataset(None, n=2, name="later")
    p.stage(nothing, reads=[later])  # HERE
    p.stage(change, writes=[later])


@refused("nothing reads later, which nothing may have written: on some path")
def reads_what_one_path_has_written(p: Builder) -> None:
    later, w = p.dataset(None, n=2, name="later"), p.value(1)
    with p.branch(yes, reads=[w]):
        p.stage(change, writes=[later])
    p.stage(nothing, reads=[later])  # HERE


# -- decisions


@refused("yes decides what comes next, and rows has 2 partitions, so there would be as many")
def decision_over_many_partitions(p: Builder) -> None:
    rows = p.dataset([1, 2], name="rows")
    with p.loop(max=2) as loop:
        p.stage(change, writes=[rows])
        loop.until(yes, reads=[rows])  # HERE


@refused("yes decides what comes next, and rows has 2 partitions")
def branch_over_many_partitions(p: Builder) -> None:
    rows = p.dataset([1, 2], name="rows")
    with p.branch(yes, writes=[rows]):  # HERE
        p.stage(change, writes=[rows])


@refused("Stage yes accesses no dataset")
def decision_over_nothing(p: Builder) -> None:
    with p.branch(yes):  # HERE
        pass


@refused("send_all decides what comes next, so it cannot send there")
def decision_that_sends(p: Builder) -> None:
    w = p.value(1)
    with p.branch(send_all, reads=[w]):  # HERE
        p.stage(receive, writes=[w])


@refused("change decides what comes next, and returns 1 instead of a bool", runs=True)
def decision_that_is_no_bool(p: Builder) -> None:
    w = p.value(1)
    with p.branch(change, reads=[w]):  # HERE
        p.stage(change, writes=[w])


# -- loops and branches


@refused("The loop has no end: pass max, or call until")
def loop_without_end(p: Builder) -> None:
    w = p.value(1)
    with p.loop():  # HERE
        p.stage(change, writes=[w])


@refused("The loop has no stage")
def loop_without_stage(p: Builder) -> None:
    with p.loop(max=3):  # HERE
        pass


@refused("max is 0: a loop has at least one round")
def loop_without_round(p: Builder) -> None:
    with p.loop(max=0):  # HERE
        p.stage(change, writes=[p.value(1)])


@refused("max is 2.5, and must be a whole number")
def half_a_round(p: Builder) -> None:
    with p.loop(max=2.5):  # type: ignore[arg-type]  # HERE
        p.stage(change, writes=[p.value(1)])


@refused("A loop or branch of the program is open here")
def open_loop(p: Builder) -> None:
    w = p.value(1)
    with p.loop(max=2):
        p.stage(change, writes=[w])
        p.tables()  # HERE


@refused(r"The loop has an until\(\) already, at .*test_refused.py:\d+")
def until_twice(p: Builder) -> None:
    w = p.value(1)
    with p.loop(max=2) as loop:
        p.stage(change, writes=[w])
        loop.until(yes, reads=[w])
        loop.until(yes, reads=[w])  # HERE


@refused(r"The until\(\) of the loop, at .*:\d+, is its last stage: put this before it")
def stage_after_until(p: Builder) -> None:
    w = p.value(1)
    with p.loop(max=2) as loop:
        loop.until(yes, reads=[w])
        p.stage(change, writes=[w])  # HERE


@refused(r"is its last stage")
def loop_after_until(p: Builder) -> None:
    w = p.value(1)
    with p.loop(max=2) as loop:
        loop.until(yes, reads=[w])
        with p.loop(max=3):  # HERE
            p.stage(change, writes=[w])


@refused(r"until\(\) belongs directly into its own loop")
def until_behind_its_loop(p: Builder) -> None:
    w = p.value(1)
    with p.loop(max=2) as loop:
        p.stage(change, writes=[w])
    loop.until(yes, reads=[w])  # HERE


@refused(r"until\(\) belongs directly into its own loop")
def until_in_an_inner_loop(p: Builder) -> None:
    w = p.value(1)
    with p.loop(max=2) as loop, p.loop(max=2):
        p.stage(change, writes=[w])
        loop.until(yes, reads=[w])  # HERE


@refused(r"until\(\) belongs directly into its own loop")
def until_in_a_branch(p: Builder) -> None:
    w = p.value(1)
    with p.loop(max=2) as loop, p.branch(yes, reads=[w]):
        loop.until(yes, reads=[w])  # HERE


@refused(r"otherwise\(\) belongs directly behind its branch")
def otherwise_after_a_stage(p: Builder) -> None:
    w = p.value(1)
    with p.branch(yes, reads=[w]) as branch:
        p.stage(change, writes=[w])
    p.stage(change, writes=[w])
    with branch.otherwise():  # HERE
        p.stage(change, writes=[w])


@refused(r"otherwise\(\) belongs directly behind its branch")
def otherwise_inside_of_its_branch(p: Builder) -> None:
    w = p.value(1)
    with p.branch(yes, reads=[w]) as branch, branch.otherwise():  # HERE
        p.stage(change, writes=[w])


@refused(r"otherwise\(\) belongs directly behind its branch")
def otherwise_twice(p: Builder) -> None:
    w = p.value(1)
    with p.branch(yes, reads=[w]) as branch:
        p.stage(change, writes=[w])
    for _ in range(2):
        with branch.otherwise():  # HERE
            p.stage(change, writes=[w])


@refused("The program has no stage")
def no_stage(p: Builder) -> None:
    p.value(1)
    p.tables()  # HERE


# -- messages


@refused(r"send_all sends, and the next stage may be nothing \(.*:\d+\), which does not call recv")
def message_to_a_stage_that_is_not_the_next(p: Builder) -> None:
    w = p.value(1)
    p.stage(send_all, reads=[w])  # HERE
    p.stage(nothing, reads=[w])
    p.stage(receive, writes=[w])


@refused("send_all sends, and the next stage may be nothing")
def message_past_a_branch(p: Builder) -> None:
    w = p.value(1)
    with p.branch(yes, reads=[w]):
        p.stage(send_all, reads=[w])  # HERE
    p.stage(nothing, reads=[w])


@refused("send_all sends, and the next stage may be yes")
def message_to_a_decision_that_receives_none(p: Builder) -> None:
    w = p.value(1)
    with p.loop() as loop:
        p.stage(send_all, reads=[w])  # HERE
        loop.until(yes, reads=[w])


@refused("send_all sends, and the next stage may be nothing")
def message_out_of_a_loop(p: Builder) -> None:
    w = p.value(1)
    with p.loop(max=3):
        p.stage(receive, writes=[w])
        p.stage(send_all, reads=[w])  # HERE
    p.stage(nothing, reads=[w])


@refused("send_all sends, and the program may end there: add a stage behind it")
def message_to_nobody(p: Builder) -> None:
    p.stage(send_all, reads=[p.value(1)])  # HERE


@refused(r"receive calls recv\(\), and no stage directly before it sends")
def recv_without_a_sender(p: Builder) -> None:
    w = p.value(1)
    p.stage(nothing, reads=[w])
    p.stage(receive, writes=[w])  # HERE


@refused(r"yes calls broadcast\(\), and was described .*pass sends=True to stage\(\)", runs=True)
def sends_in_a_function_of_its_own(p: Builder) -> None:
    w = p.value(1)
    p.stage(lambda t, w: send_all(t, w), reads=[w], name="yes")  # HERE
    p.stage(receive, writes=[w], sends=False, receives=False)


@refused(r"receive calls recv\(\), and was described .*pass receives=True to stage", runs=True)
def receives_in_a_function_of_its_own(p: Builder) -> None:
    w = p.value(1)
    p.stage(receive, writes=[w], receives=False)  # HERE


@refused(r"hidden calls recv\(\), .*pass receives=True to until\(\) or branch\(\)", runs=True)
def decision_receives_in_a_function_of_its_own(p: Builder) -> None:
    w = p.value(1)
    with p.branch(lambda t, w: bool(receive(t, w)), reads=[w], name="hidden"):  # HERE
        p.stage(change, writes=[w])


@refused(r"hidden calls broadcast\(\), and decides what comes next", runs=True)
def decision_sends_in_a_function_of_its_own(p: Builder) -> None:
    w = p.value(1)
    with p.branch(lambda t, w: send_all(t, w), reads=[w], name="hidden"):  # HERE
        p.stage(change, writes=[w])


@refused("far sends to task 2, and the tasks of the next stage are 0 to 1", runs=True)
def message_to_no_task(p: Builder) -> None:
    w, rows = p.value(1), p.dataset([1, 2])
    p.stage(lambda t, w: t.send(2, w), reads=[w], name="far")  # HERE
    p.stage(receive, writes=[rows])


@refused("half sends to task 0.5, and the tasks of the next stage are 0 to 1", runs=True)
def message_to_half_a_task(p: Builder) -> None:
    w, rows = p.value(1), p.dataset([1, 2])
    p.stage(lambda t, w: t.send(0.5, w), reads=[w], name="half")  # type: ignore[arg-type]  # HERE
    p.stage(receive, writes=[rows])


# -- what a function returns


@refused("change returns int, and writes no dataset that it could become", runs=True)
def returns_and_writes_nothing(p: Builder) -> None:
    p.stage(change, reads=[p.value(1)])  # HERE


@refused("pair writes 2 datasets and returns tuple of 3: return a tuple", runs=True)
def returns_too_many(p: Builder) -> None:
    a, b = p.value(1), p.value(2)
    p.stage(lambda t, a, b: (a, b, 3), writes=[a, b], name="pair")  # HERE


@refused("pair writes 2 datasets and returns int: return a tuple", runs=True)
def returns_one_of_two(p: Builder) -> None:
    a, b = p.value(1), p.value(2)
    p.stage(lambda t, a, b: a, writes=[a, b], name="pair")  # HERE


@pytest.mark.parametrize(("describe", "why", "runs"), CASES)
def test_it_is_refused_with_its_line(describe: Describe, why: str, runs: bool) -> None:
    p = Builder()
    lines, first = inspect.getsourcelines(describe)
    marked = [first + n for n, line in enumerate(lines) if "# HERE" in line]
    if runs:
        describe(p)

        def refuse() -> None:
            sources = [list(dataset.source) for dataset in p.datasets]
            run_plainly(p.tables(), p.functions, sources)

    else:

        def refuse() -> None:
            describe(p)
            p.tables()

    with pytest.raises(errors.ProgramError) as caught:
        refuse()
    said = str(caught.value.message)
    assert said.startswith(f"{__file__}:{marked[0]}: "), said
    assert re.search(why, said), said


def test_what_is_refused_leaves_the_program_as_it_was() -> None:
    p = Builder()
    w, rows = p.value(1), p.dataset([1, 2])
    p.stage(change, writes=[w])

    def refuse() -> None:
        with p.loop(max=2):
            p.stage(change, writes=[w])
            p.stage(lambda t, w, rows: None, reads=[w, rows])

    with pytest.raises(errors.ProgramError, match="different numbers of partitions"):
        refuse()
    p.stage(change, writes=[rows], name="last")
    assert [stage.name for stage in p.tables().stages] == ["change", "last"]


class Inherited:
    """Called by what its base class has."""

    def __call__(self, t: Task, x: Any) -> None:
        t.send(0, x)


class Inherits(Inherited):
    pass


def outer(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapped(*args: Any) -> Any:
        return function(*args)

    return wrapped


def test_functions_say_that_they_send() -> None:
    def nested(t: Task, x: Any) -> None:
        def inner() -> None:
            t.send(0, x)

        inner()

    say: list[Callable[..., Any]] = [
        send_all,
        nested,
        lambda t, x: [t.send(n, x) for n in range(1)] and None,
        functools.partial(functools.partial(send_all)),
        Inherited(),
        Inherits(),
        outer(outer(send_all)),
        Inherits().__call__,
    ]
    for n, function in enumerate(say):
        p = Builder()
        w = p.value(1)
        p.stage(function, reads=[w])
        p.stage(receive, writes=[w])
        assert p.tables().stages[0].sends, n
    p = Builder()
    p.stage(np.negative, reads=[p.value(1)], name="in C")  # nobody can say
    assert not p.tables().stages[0].sends
