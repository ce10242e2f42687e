"""Programs on a cluster of three nodes: their answers are those of `run_plainly`."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._observe import progress as lines
from clamor_ray._programs.program import Program
from clamor_ray._recipes.program.plain import run_plainly
from tests.conftest import until
from tests.recipes.programs import random_program
from tests.support.lab import LocalCluster, local_cluster, require_lab

pytestmark = pytest.mark.lab

END_S = 60.0
N_NODES = 3


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(N_NODES) as lab:
        clamor.init()
        yield lab
        clamor.shutdown(force=True)


def expected(program: Program) -> list[list[Any]]:
    sources = [list(dataset.source) for dataset in program.datasets]
    return run_plainly(program.tables(), program.functions, sources)


def results(program: Program, job: Any) -> list[list[Any]]:
    found = [job.result(dataset, END_S) for dataset in program.datasets]
    return [
        [value] if dataset.is_value else value
        for dataset, value in zip(program.datasets, found, strict=True)
    ]


def slow_rounds(n_rounds: int, pause_s: float = 0.005) -> tuple[Program, Any]:
    """Adds up what six partitions send, in rounds."""
    program = Program()
    parts = program.dataset([np.full(1000, n) for n in range(6)])
    total = program.value(0)

    def grow(t: Any, part: Any) -> None:
        time.sleep(pause_s)
        part += 1
        t.send(0, int(part.sum()))

    def add_up(t: Any, total: int) -> int:
        return total + sum(t.recv())

    with program.loop(max=n_rounds):
        program.stage(grow, writes=[parts])
        program.stage(add_up, writes=[total])
    return program, total


def sum_of_rounds(n_rounds: int) -> int:
    return sum(1000 * (n + k) for n in range(6) for k in range(1, n_rounds + 1))


def test_random_programs_give_the_plain_answer(lab: LocalCluster) -> None:
    for seed in range(5):
        program = random_program(random.Random(seed), make=Program)
        assert isinstance(program, Program)
        job = program.run()
        assert results(program, job) == expected(program)
        job.stop()


def test_slices_are_on_all_nodes_and_move(lab: LocalCluster) -> None:
    program, total = slow_rounds(200)
    job = program.run()
    assert sorted(each.n_slices for each in job.stats().workers) == [2, 2, 3]
    parts = program.datasets[0]
    for n in range(12):
        # Each to two nodes, since it may have begun on the first.
        job.move(parts, n % 6, lab.node_ids[(n + n // 6) % N_NODES])
    assert job.result(total, END_S) == sum_of_rounds(200)
    assert job.stats().moves > 0
    job.stop()


def test_progress_while_it_runs_and_at_its_end(
    lab: LocalCluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "LINE_S", 0.5)
    program, total = slow_rounds(500)
    job = program.run()
    until(lambda: 0 < job.progress().rounds < 500, END_S)
    assert job.result(total, END_S) == sum_of_rounds(500)
    said = capsys.readouterr().err
    assert re.search(
        r"^program, rounds: \d+ of 500 \(\d+ s\), [\d,.]+ tasks/s, "
        r"busiest node \d\.\d\d, partition \d\.\d\d of mean$",
        said,
        re.M,
    ), said
    progress = job.progress()
    assert (progress.state, progress.rounds, progress.most_rounds) == ("ended", 500, 500)
    assert progress.tasks == 500 * 7
    assert job.stats().rounds == 500
    assert {node.node_id for node in progress.nodes} == set(lab.node_ids)
    parts, _ = progress.groups
    assert set(parts.node_ids) == set(lab.node_ids)
    assert all(busy_s > 500 * 0.005 for busy_s in parts.busy_s)  # each has slept in each round
    assert sum(node.busy_s for node in progress.nodes) == pytest.approx(
        sum(sum(group.busy_s) for group in progress.groups)
    )
    assert [sample.rounds for sample in progress.samples][-1] == 500
    assert str(progress).startswith("ended, ")
    job.wait(progress=False)
    assert capsys.readouterr().err == ""
    job.stop()


def test_while_nothing_moves_the_controller_hears_heartbeats_alone(lab: LocalCluster) -> None:
    program, total = slow_rounds(500)
    job = program.run(schedule=[clamor.schedule.stragglers(100)])
    before = job.stats().by_kind
    until(lambda: job.stats().by_kind.get("Heartbeat", 0) > before.get("Heartbeat", 0) + 6, END_S)
    after = job.stats().by_kind
    assert {kind for kind in after if after[kind] != before.get(kind, 0)} == {"Heartbeat"}
    assert after["Begin"] == N_NODES
    job.move(program.datasets[0], 0, lab.node_ids[1])
    job.move(program.datasets[0], 0, lab.node_ids[2])
    until(lambda: job.stats().by_kind.get("Arrived", 0) > 0, END_S)
    moved = job.stats().by_kind
    assert moved["MapUpdate"] % N_NODES == 0  # each step to each worker
    assert moved["hurried MapUpdate"] > 0
    assert job.result(total, END_S) == sum_of_rounds(500)
    job.stop()


def test_it_grows_and_shrinks_while_it_runs(lab: LocalCluster) -> None:
    program, total = slow_rounds(400)
    job = program.run(workers=1)
    assert len(job.stats().workers) == 1
    job.scale(3)
    until(lambda: all(each.tasks > 0 for each in job.stats().workers), END_S)
    assert len(job.stats().workers) == 3
    job.scale(1)
    until(lambda: len(job.stats().workers) == 1, END_S)
    assert job.result(total, END_S) == sum_of_rounds(400)
    assert job.progress().rounds == 400
    assert len(job.progress().nodes) == 3  # those that have left have computed too
    job.stop()


def test_what_a_function_raises_is_said(lab: LocalCluster) -> None:
    program = Program()
    parts = program.dataset([1, 2, 0, 4])

    def divide(t: Any, part: int) -> int:
        return 12 // part

    program.stage(divide, writes=[parts])
    job = program.run()
    with pytest.raises(errors.StageFailedError, match="stage divide raised ZeroDivisionError"):
        job.wait(END_S)
    with pytest.raises(errors.StageFailedError) as caught:
        job.result(parts, END_S)
    assert (caught.value.index, caught.value.number, caught.value.stage) == (2, 1, "divide")
    assert "return 12 // part" in str(caught.value)  # its own line
    job.stop()


def test_a_function_that_raises_while_other_partitions_load(lab: LocalCluster) -> None:
    """The workers end then, also the one that loads still: `run` gives a job that says why."""

    def slowly() -> int:
        time.sleep(5.0)
        return 1

    class Slow:
        def __reduce__(self) -> Any:
            return slowly, ()

    program = Program()
    parts = program.dataset([0, Slow(), 2])
    program.stage(lambda t, part: 12 // part, writes=[parts], name="divide")
    job = program.run()
    with pytest.raises(errors.StageFailedError, match="stage divide raised ZeroDivisionError"):
        job.wait(END_S)
    job.stop()


def test_two_programs_at_once(lab: LocalCluster) -> None:
    made = [slow_rounds(n) for n in (30, 50)]
    jobs = [program.run() for program, _ in made]
    for (_, total), job, n in zip(made, jobs, (30, 50), strict=True):
        assert job.result(total, END_S) == sum_of_rounds(n)
        job.stop()


@pytest.mark.parametrize("after", ["a checkpoint", "its beginning"])
def test_a_worker_that_is_killed(lab: LocalCluster, tmp_path: Path, after: str) -> None:
    program, total = slow_rounds(300)
    job = program.run(checkpoint=str(tmp_path))
    if after == "a checkpoint":
        until(lambda: job.stats().workers[0].stage > 20, END_S)
        assert job.checkpoint()
        until(lambda: job.stats().checkpoint == 1, END_S)
    os.kill(job.stats().workers[0].pid, signal.SIGKILL)
    assert job.result(total, END_S) == sum_of_rounds(300)
    assert job.stats().restarts == 1
    assert job.stats().rounds == 300
    job.stop()


def test_a_program_goes_on_in_another_run(lab: LocalCluster, tmp_path: Path) -> None:
    program, total = slow_rounds(200)
    job = program.run(checkpoint=str(tmp_path), every_s=0.3)
    until(lambda: (job.stats().checkpoint or 0) > 1, END_S)
    job.stop()
    again, total = slow_rounds(200)
    job = again.run(checkpoint=str(tmp_path), workers=2)
    assert job.result(total, END_S) == sum_of_rounds(200)
    assert sum(each.tasks for each in job.stats().workers) < 200 * 7  # not from its beginning
    job.stop()
    other, _ = slow_rounds(201)
    with pytest.raises(errors.ProgramError, match="of another program"):
        other.run(checkpoint=str(tmp_path))


def controller_pid() -> int:
    import ray

    for actor in ray._private.state.actors().values():
        if actor["ActorClassName"] == "RecipeController" and actor["State"] == "ALIVE":
            return int(actor["Pid"])
    raise AssertionError("no controller")


def test_a_controller_that_is_killed(lab: LocalCluster) -> None:
    """The workers go on; the next one learns from them where everything is."""
    program, total = slow_rounds(300)
    job = program.run()
    parts = program.datasets[0]
    pids = sorted(each.pid for each in job.stats().workers)
    os.kill(controller_pid(), signal.SIGKILL)
    job.move(parts, 0, lab.node_ids[1])
    assert sorted(each.pid for each in job.stats().workers) == pids
    assert job.result(total, END_S) == sum_of_rounds(300)
    assert job.stats().restarts == 0
    assert job.stats().rounds == 300
    job.stop()


def test_without_checkpoints_a_lost_worker_is_its_end(lab: LocalCluster) -> None:
    program, total = slow_rounds(10**6)
    job = program.run()
    os.kill(job.stats().workers[1].pid, signal.SIGKILL)
    with pytest.raises(errors.ProgramLostError, match="has no checkpoints"):
        job.result(total, END_S)
    job.stop()


def test_nothing_stays_when_it_is_stopped(lab: LocalCluster) -> None:
    program, total = slow_rounds(10**6)
    job = program.run()
    pids = [each.pid for each in job.stats().workers]
    job.stop()
    with pytest.raises(errors.ProgramLostError):
        job.result(total, END_S)
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), END_S)


def test_a_job_that_nobody_has_ends(lab: LocalCluster) -> None:
    program, _ = slow_rounds(10**6)
    job = program.run()
    pids = [each.pid for each in job.stats().workers]
    del job
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), END_S)


def test_functions_read_variables_as_they_were_when_it_began(lab: LocalCluster) -> None:
    ref = clamor.put(np.zeros(10**6))
    program = Program()
    parts = program.dataset([0.0] * 6)

    def add(t: Any, part: float) -> float:
        time.sleep(0.01)
        return part + float(ref.get()[t.index * 1000])

    with program.loop(max=20):
        program.stage(add, writes=[parts])
    with clamor.update(ref) as array:
        array[:] = 1.0
    job = program.run()
    with clamor.update(ref) as array:
        array[:] = 2.0
    assert job.result(parts, END_S) == [20.0] * 6
    job.stop()


def test_partitions_of_a_collection(lab: LocalCluster) -> None:
    rows = clamor.from_numpy(np.arange(1000.0), partitions=6)
    mean = rows.iterate(
        0.0,
        map=lambda x, w: (x - w).sum(),
        update=lambda w, total: w + total / 1000,
        until=lambda w, total: abs(total) < 1e-9,
    )
    assert float(mean) == 499.5


def test_what_cannot_be_pickled_is_named(lab: LocalCluster) -> None:
    program = Program()
    value = program.value(0)
    lock = threading.Lock()
    program.stage(lambda t, v: v + lock.locked(), writes=[value])
    with pytest.raises(errors.ProgramError, match=r"test_programs_lab.py:\d+: the function of"):
        program.run()


DRIVER = """
import sys, clamor_ray as clamor
clamor.init()
program = clamor.Program()
n = program.dataset([0] * 6)
with program.loop(max=10**12):
    program.stage(lambda t, n: n + 1, writes=[n])
job = program.run()
print(*(each.pid for each in job.stats().workers), flush=True)
sys.stdin.read()
"""


def test_a_driver_that_is_killed_leaves_nothing(lab: LocalCluster) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        env={**os.environ, **lab.environment},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as driver:
        assert driver.stdout is not None
        late = threading.Timer(END_S, driver.kill)
        late.start()
        pids = [int(each) for each in driver.stdout.readline().split()]
        late.cancel()
        assert len(pids) == N_NODES
        driver.kill()
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids), END_S)


def test_objects_of_the_users_own_classes(lab: LocalCluster, tmp_path: Path) -> None:
    """They are sent, moved and stored."""
    script: dict[str, Any] = {"__name__": "__main__"}
    exec("class Point:\n    def __init__(self, x):\n        self.x = x", script)
    point = script["Point"]
    program = Program()
    points, total = program.dataset([point(n) for n in range(6)]), program.value(point(0))

    def send_it(t: Any, each: Any) -> None:
        time.sleep(0.01)
        each.x += 1
        t.send(0, each)

    def add_up(t: Any, total: Any) -> Any:
        return type(total)(total.x + sum(each.x for each in t.recv()))

    with program.loop(max=50):
        program.stage(send_it, writes=[points])
        program.stage(add_up, writes=[total])
    job = program.run(checkpoint=tmp_path)
    assert job.checkpoint()
    for n in range(6):
        job.move(points, n, lab.node_ids[(n + 1) % N_NODES])
    until(lambda: job.stats().checkpoint == 1, END_S)
    assert job.result(total, END_S).x == sum(n + k for n in range(6) for k in range(1, 51))
    job.stop()


def test_a_scheduling_function_that_raises_ends_it(lab: LocalCluster) -> None:
    def raises(workers: Any, partitions: Any, leaving: Any) -> Any:
        if any(row.seconds for row in workers):
            raise ValueError("no idea")
        return {}

    program, total = slow_rounds(10**6)
    job = program.run(schedule=[raises])
    with pytest.raises(errors.ProgramLostError, match="no idea"):
        job.result(total, END_S)
    job.stop()


def test_all_workers_are_killed(lab: LocalCluster, tmp_path: Path) -> None:
    program, total = slow_rounds(300)
    job = program.run(checkpoint=tmp_path)
    until(lambda: job.stats().workers[0].stage > 20, END_S)
    assert job.checkpoint()
    until(lambda: job.stats().checkpoint == 1, END_S)
    for worker in job.stats().workers:
        os.kill(worker.pid, signal.SIGKILL)
    assert job.result(total, END_S) == sum_of_rounds(300)
    assert job.stats().restarts > 0
    job.stop()
