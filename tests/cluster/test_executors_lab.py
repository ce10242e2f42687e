"""Programs whose tasks run in processes of their own, and kernels in C."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._programs.program import Program
from clamor_ray._recipes.program.plain import run_plainly
from tests.conftest import until
from tests.recipes.programs import random_program
from tests.support.lab import LocalCluster, local_cluster, require_lab

pytestmark = pytest.mark.lab

END_S = 90.0
N_NODES = 2
CPUS = 2


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(N_NODES, num_cpus=CPUS) as lab:
        clamor.init()
        yield lab
        clamor.shutdown(force=True)


def rounds_of_pids(n_rounds: int) -> tuple[Program, Any, Any]:
    """Partitions count, in place, and a value has the processes that have done it."""
    program = Program()
    parts = program.dataset([np.zeros(5000) for _ in range(6)], name="parts")
    seen = program.value(set(), name="seen")

    def grow(t: Any, part: Any) -> None:
        time.sleep(0.002)
        part += 1
        t.send(0, os.getpid())

    def note(t: Any, seen: set[int]) -> None:
        seen.update(t.recv())

    with program.loop(max=n_rounds):
        program.stage(grow, writes=[parts])
        program.stage(note, writes=[seen])
    return program, parts, seen


def gone(pids: Any) -> bool:
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_random_programs_give_the_plain_answer(lab: LocalCluster) -> None:
    for seed in range(3):
        program = random_program(random.Random(seed + 100), make=Program)
        assert isinstance(program, Program)
        job = program.run(executors="processes")
        found = [job.result(dataset, END_S) for dataset in program.datasets]
        sources = [list(dataset.source) for dataset in program.datasets]
        plain = run_plainly(program.tables(), program.functions, sources)
        assert [x if isinstance(x, list) else [x] for x in found] == plain
        job.stop()


def test_processes_change_the_same_partitions(lab: LocalCluster) -> None:
    n_rounds = 800
    program, parts, seen = rounds_of_pids(n_rounds)
    job = program.run(executors="processes")
    workers = {each.pid for each in job.stats().workers}
    for n in range(6):
        time.sleep(0.2)
        job.move(parts, n, lab.node_ids[n % N_NODES])
    for part in job.result(parts, END_S):
        assert (part == n_rounds).all()
    processes = job.result(seen, END_S) - workers
    assert len(processes) == N_NODES * CPUS
    assert sum(each.tasks for each in job.stats().workers) == 7 * n_rounds
    job.stop()
    until(lambda: gone(processes), END_S)


def test_processes_take_over_when_functions_are_busy(lab: LocalCluster) -> None:
    program = Program()
    parts = program.dataset([0] * 4)
    seen = program.value(set())

    def spin(t: Any, part: int) -> int:
        t.send(0, os.getpid())
        return part + sum(range(50_000)) * 0 + 1

    def note(t: Any, seen: set[int]) -> None:
        seen.update(t.recv())

    def has_processes(t: Any, seen: set[int]) -> bool:
        return len(seen) >= 2 + CPUS  # threads of both workers, and the processes of one at least

    with program.loop(max=10**6) as loop:
        program.stage(spin, writes=[parts])
        program.stage(note, writes=[seen])
        loop.until(has_processes, reads=[seen])
    job = program.run()
    assert len(job.result(seen, END_S)) >= 2 + CPUS
    job.stop()


def test_functions_read_variables_there(lab: LocalCluster) -> None:
    ref = clamor.put(np.arange(100_000))
    program = Program()
    parts = program.dataset([0] * 4)
    pids = program.dataset([0] * 4)

    def look(t: Any, part: int, pid: int) -> Any:
        time.sleep(0.005)
        return int(ref.get()[t.index * 1000]), os.getpid()

    with program.loop(max=400):
        program.stage(look, writes=[parts, pids])
    job = program.run(executors="processes")
    assert job.result(parts, END_S) == [0, 1000, 2000, 3000]
    assert not {each.pid for each in job.stats().workers} & set(job.result(pids, END_S))
    job.stop()


def test_what_a_function_raises_there_is_said(lab: LocalCluster, tmp_path: Path) -> None:
    program = Program()
    parts = program.dataset([0] * 4)
    of_workers = tmp_path / "pids"

    def fail(t: Any, part: int) -> int:
        time.sleep(0.002)
        if of_workers.exists() and str(os.getpid()) not in of_workers.read_text().split():
            raise ValueError(f"{os.getpid()}")
        return part + 1

    with program.loop(max=10**6):
        program.stage(fail, writes=[parts])
    job = program.run(executors="processes")
    workers = {each.pid for each in job.stats().workers}
    of_workers.write_text(" ".join(map(str, workers)))
    with pytest.raises(errors.StageFailedError, match="stage fail raised ValueError") as caught:
        job.wait(END_S)
    pid = int(str(caught.value).split("ValueError: ")[1].split()[0])
    assert pid not in workers
    job.stop()


def processes_of(job: Any) -> set[int]:
    return {pid for each in job.stats().workers for pid in each.processes}


@pytest.mark.parametrize("has_checkpoints", [True, False])
def test_a_process_that_is_killed(lab: LocalCluster, tmp_path: Path, has_checkpoints: bool) -> None:
    n_rounds = 3000
    program, parts, _ = rounds_of_pids(n_rounds)
    place = {"checkpoint": tmp_path} if has_checkpoints else {}
    job = program.run(executors="processes", **place)
    if has_checkpoints:
        assert job.checkpoint()
        until(lambda: job.stats().checkpoint is not None, END_S)
    until(lambda: len(processes_of(job)) == N_NODES * CPUS, END_S)
    processes = processes_of(job)
    os.kill(min(processes), signal.SIGKILL)
    if has_checkpoints:
        for part in job.result(parts, END_S):
            assert (part == n_rounds).all()
        assert job.stats().restarts == 1
    else:
        with pytest.raises(errors.ProgramLostError, match="an executor process has ended"):
            job.wait(END_S)
    job.stop()
    until(lambda: gone(processes), END_S)


def test_a_function_that_exits(lab: LocalCluster) -> None:
    program = Program()
    parts = program.dataset([0] * 4)

    def leave(t: Any, part: int) -> int:
        time.sleep(0.01)
        if part == 300:
            os._exit(3)
        return part + 1

    with program.loop(max=10**6):
        program.stage(leave, writes=[parts])
    job = program.run(executors="processes")
    with pytest.raises(errors.ProgramLostError):
        job.wait(END_S)
    job.stop()


SOURCE = r"""
#include <stddef.h>
#include <stdint.h>
struct message { const void *data; uint64_t n_bytes, sender; };
struct task {
    uint64_t number;
    uint32_t stage, index, n_tasks, n_next;
    uint64_t n_messages;
    const struct message *messages;
    int (*send)(struct task *, uint32_t, const void *, uint64_t);
    int (*broadcast)(struct task *, const void *, uint64_t);
    void *internal;
};
int grow(struct task *t, void **partitions, const size_t *n_bytes)
{
    int64_t *part = partitions[0], sum = 0;
    for (size_t i = 0; i < n_bytes[0] / 8; i++)
        sum += ++part[i];
    return t->send(t, 0, &sum, sizeof sum);
}
int add_up(struct task *t, void **partitions, const size_t *n_bytes)
{
    (void)n_bytes;
    for (uint64_t i = 0; i < t->n_messages; i++)
        *(int64_t *)partitions[0] += *(const int64_t *)t->messages[i].data;
    return 0;
}
int fails(struct task *t, void **partitions, const size_t *n_bytes)
{
    (void)n_bytes;
    return t->index == 2 && *(int64_t *)partitions[0] == 20 ? -7 : 0;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    (folder / "kernels.c").write_text(SOURCE)
    path = folder / "kernels.so"
    subprocess.run(
        ["cc", "-O2", "-shared", "-fPIC", "-o", path, folder / "kernels.c"], check=True, timeout=60
    )
    return path


def kernel(library: Path, name: str) -> clamor.Kernel:
    path = str(library)
    return clamor.Kernel(lambda: getattr(ctypes.CDLL(path), name), name=name)


@pytest.mark.parametrize("executors", [None, "processes"])
def test_kernels_in_c(lab: LocalCluster, library: Path, executors: str | None) -> None:
    """A round is kernels, and one that adds up; Python sees both at the end."""
    n_rounds = 2000
    program = Program()
    parts = program.dataset([np.full(100, n) for n in range(4)])
    total = program.value(np.zeros(1, np.int64))
    last = program.value(0)
    lists = program.dataset([list(range(100_000)) for _ in range(4)])  # would stay on threads alone
    program.stage(lambda t, items: None, reads=[lists])
    with program.loop(max=n_rounds):
        program.stage(kernel(library, "grow"), writes=[parts], sends=True)
        program.stage(kernel(library, "add_up"), writes=[total], receives=True)
    program.stage(lambda t, total: t.send(0, int(total[0])), reads=[total])
    program.stage(lambda t, last: t.recv()[0], writes=[last])
    job = program.run(executors=executors)
    sums = sum(100 * (n + k) for n in range(4) for k in range(1, n_rounds + 1))
    assert job.result(last, END_S) == sums
    assert job.result(total, END_S).tolist() == [sums]
    for n, part in enumerate(job.result(parts, END_S)):
        assert (part == n + n_rounds).all()
    job.stop()


def test_a_kernel_that_fails_is_said(lab: LocalCluster, library: Path) -> None:
    program = Program()
    parts = program.dataset([np.zeros(3, np.int64) for _ in range(4)])
    with program.loop(max=50):
        program.stage(lambda t, part: part + 1, writes=[parts])
        program.stage(kernel(library, "fails"), reads=[parts], name="look")
    job = program.run()
    with pytest.raises(
        errors.StageFailedError, match="kernel of look failed for index 2"
    ) as caught:
        job.wait(END_S)
    assert caught.value.index == 2
    job.stop()


def test_python_does_not_receive_from_kernels(lab: LocalCluster, library: Path) -> None:
    program = Program()
    parts = program.dataset([np.zeros(3, np.int64)])
    program.stage(kernel(library, "grow"), writes=[parts], sends=True)
    program.stage(lambda t, part: t.recv() and None, reads=[parts])
    with pytest.raises(errors.StageFailedError, match="what a kernel in C has sent"):
        program.run().wait(END_S)


def test_what_is_no_kernel_is_said(lab: LocalCluster) -> None:
    program = Program()
    parts = program.dataset([np.zeros(3)])
    program.stage(clamor.Kernel(lambda: "no function", name="nothing"), writes=[parts])
    with pytest.raises(errors.ClamorError, match="no C function"):
        program.run().wait(END_S)
    with pytest.raises(TypeError):
        clamor.Kernel(7)  # type: ignore[arg-type]


def test_another_kind_of_executors_is_refused(lab: LocalCluster) -> None:
    program = Program()
    n = program.value(1)
    program.stage(lambda t, n: n + 1, writes=[n])
    with pytest.raises(ValueError, match="'threads' or 'processes'"):
        program.run(executors="fibers")
