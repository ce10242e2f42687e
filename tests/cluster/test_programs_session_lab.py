"""Programs, and the nodes and the session that they run on."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._programs.program import Program
from tests.cluster.test_ray_nodes import drain_node
from tests.conftest import until
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


def rounds(n_rounds: int, n_parts: int = 6, ends: Path | None = None) -> tuple[Program, Any, Any]:
    """Each partition counts the rounds, and sends 1 in each; a value adds them up. They end early
    where there is that file."""
    program = Program()
    parts = program.dataset([np.zeros(1000) for _ in range(n_parts)])
    total = program.value(0)

    def grow(t: Any, part: Any) -> None:
        time.sleep(0.005)
        part += 1
        t.send(0, 1)

    with program.loop(max=n_rounds) as loop:
        program.stage(grow, writes=[parts])
        program.stage(lambda t, total: total + sum(t.recv()), writes=[total])
        if ends is not None:
            loop.until(lambda t, total: ends.exists(), reads=[total])
    return program, parts, total


def nodes_of(job: Any) -> set[str]:
    return {each.node_id for each in job.stats().workers}


def test_a_drained_node_is_left(lab: LocalCluster) -> None:
    program, _, total = rounds(400)
    job = program.run()
    assert nodes_of(job) == set(lab.node_ids)
    clamor.drain(lab.node_ids[2], timeout=END_S)
    assert nodes_of(job) == set(lab.node_ids[:2])
    assert job.stats().state == "running"
    clamor.drain(lab.node_ids[1], timeout=END_S)
    assert nodes_of(job) == {lab.node_ids[0]}
    other, _, _ = rounds(1)
    beside = other.run(workers="all")  # begins past them
    assert nodes_of(beside) == {lab.node_ids[0]}
    assert clamor.cancel_drain(lab.node_ids[1])
    until(lambda: nodes_of(beside) == set(lab.node_ids[:2]), END_S)
    until(lambda: lab.node_ids[1] in nodes_of(job), END_S)  # it was to have three
    clamor.cancel_drain(lab.node_ids[2])
    assert job.result(total, END_S) == 400 * 6
    assert job.stats().restarts == 0
    for each in (job, beside):
        each.stop()


def test_the_only_worker_of_a_drained_node_is_replaced_first(lab: LocalCluster) -> None:
    program, _, total = rounds(300)
    job = program.run(workers=1)
    (node,) = nodes_of(job)
    clamor.drain(node, timeout=END_S)
    assert len(nodes_of(job)) == 1
    assert node not in nodes_of(job)
    clamor.cancel_drain(node)
    assert job.result(total, END_S) == 300 * 6
    assert job.stats().restarts == 0
    job.stop()


def test_what_has_ended_leaves_a_drained_node_too(lab: LocalCluster) -> None:
    program, parts, _ = rounds(5)
    job = program.run()
    job.wait(END_S)
    clamor.drain(lab.node_ids[1], timeout=END_S)
    assert lab.node_ids[1] not in nodes_of(job)
    clamor.cancel_drain(lab.node_ids[1])
    assert [float(part[0]) for part in job.result(parts, END_S)] == [5.0] * 6
    job.stop()


def test_a_drain_says_what_no_other_node_can_take(lab: LocalCluster) -> None:
    program, _, _ = rounds(10**6)
    job = program.run(workers=1)
    (node,) = nodes_of(job)
    others = set(lab.node_ids) - {node}
    for each in others:
        clamor.drain(each, timeout=END_S)
    with pytest.raises(errors.DrainTimeoutError, match=r"by: program .* \(7 slices\)"):
        clamor.drain(node, timeout=1.0)
    assert clamor.cancel_drain(node)
    with ThreadPoolExecutor() as beside:
        drain = beside.submit(clamor.drain, node, timeout=END_S)
        # Again: the drain may not have begun, while the page servers of other nodes start.
        until(lambda: (clamor.cancel_drain(node), drain.done())[1], END_S)
        with pytest.raises(errors.DrainCancelledError):
            drain.result(END_S)
    assert nodes_of(job) == {node}
    for each in others:
        assert clamor.cancel_drain(each)
    job.stop()


def test_its_cpus_are_nobody_elses_until_it_has_ended(lab: LocalCluster) -> None:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    program, _, _ = rounds(10**6)
    job = program.run(workers=2)
    until(lambda: ray.available_resources().get("CPU") == 1.0, END_S)
    other, _, _ = rounds(10**6)
    third = other.run(workers=1)  # on the node that is free
    assert not nodes_of(third) & nodes_of(job)
    until(lambda: ray.available_resources().get("CPU", 0.0) == 0.0, END_S)
    beside, _, sum_beside = rounds(3)
    assert beside.run(reserve=False).result(sum_beside, END_S) == 3 * 6
    third.stop()
    until(lambda: ray.available_resources().get("CPU") == 1.0, END_S)
    taken = placement_group([{"CPU": 1}])
    with pytest.raises(errors.WaitTimeoutError, match="wants 1 CPUs of node"):
        job.scale(3)
    remove_placement_group(taken)
    until(lambda: len(nodes_of(job)) == 3, END_S)  # it was asked for, and is tried again
    assert ray.available_resources().get("CPU", 0.0) == 0.0
    job.stop()
    until(lambda: ray.available_resources().get("CPU") == 3.0, END_S)


def test_cpus_that_others_have_are_waited_for(lab: LocalCluster) -> None:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    taken = placement_group([{"CPU": 1}] * N_NODES, strategy="STRICT_SPREAD")
    ray.get(taken.ready(), timeout=END_S)
    program, _, total = rounds(3)
    with ThreadPoolExecutor() as beside:
        running = beside.submit(program.run)
        time.sleep(2.0)
        assert not running.done()
        remove_placement_group(taken)
        job = running.result(END_S)
    assert job.result(total, END_S) == 3 * 6
    until(lambda: ray.available_resources().get("CPU") == 3.0, END_S)  # it has ended
    job.stop()


def test_more_workers_than_nodes_are_refused(lab: LocalCluster) -> None:
    program, _, _ = rounds(1)
    with pytest.raises(errors.ProgramError, match="4 workers were asked for, and 3 nodes"):
        program.run(workers=4)
    with pytest.raises(errors.ProgramError, match="must be a number of nodes"):
        program.run(workers="some")


def squares(n_parts: int) -> tuple[Program, Any, Any]:
    program = Program()
    parts = program.dataset([np.full(50_000, float(n)) for n in range(n_parts)])
    total = program.value(0.0)

    def square(t: Any, part: Any) -> Any:
        t.send(0, part[0])
        return part * part

    program.stage(square, writes=[parts])
    program.stage(lambda t, total: np.full(1000, sum(t.recv())), writes=[total])
    return program, parts, total


def here() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


def sum_of_squares(n_parts: int) -> float:
    return 50_000.0 * sum(n * n for n in range(n_parts))


def test_what_it_made_is_published(lab: LocalCluster) -> None:
    import ray

    program, parts, total = squares(6)
    job = program.run()
    job.wait(END_S)
    for index in range(6):  # backwards, and not as the next one would place them by itself
        job.move(parts, index, lab.node_ids[(5 - index) // 2])
    made, ref = job.publish(parts), job.publish(total, name="total of squares")
    job.stop()
    assert float(ref.get()[0]) == float(clamor.open("total of squares").get()[0]) == 15.0
    references = made.partition_references()
    where = ray.experimental.get_object_locations(references)
    nodes = [where[each]["node_ids"] for each in references]
    assert nodes == [[lab.node_ids[(5 - index) // 2]] for index in range(6)]
    # And into the next program, where they are.
    again = Program()
    rows, at = again.dataset(made), again.dataset([""] * 6)
    again.stage(lambda t, rows, at: here(), reads=[rows], writes=[at])
    assert [[node] for node in again.run().result(at, END_S)] == nodes
    assert made.sum() == sum_of_squares(6)
    with pytest.raises(errors.ProgramError, match="options are for values"):
        job.publish(parts, name="no")


DETACHED = """
import os, time, clamor_ray as clamor
clamor.init(session="programs", lifetime="detached")
program = clamor.Program()
n = program.dataset([0] * 3)
with program.loop(max=10**12):
    program.stage(lambda t, n: n + 1, writes=[n])
job = program.run(reserve=False)
print(*(each.pid for each in job.stats().workers), flush=True)
"""


def is_alive(pid: int) -> bool:
    return os.path.exists(f"/proc/{pid}")


def test_a_program_of_a_detached_session_ends_with_that(lab: LocalCluster) -> None:
    """And not with its driver; nor with another session."""
    driver = subprocess.run(
        [sys.executable, "-c", DETACHED],
        env={**os.environ, **lab.environment},
        stdout=subprocess.PIPE,
        timeout=END_S,
        check=True,
    )
    pids = [int(each) for each in driver.stdout.split()]
    assert len(pids) == N_NODES
    program, _, total = rounds(20)
    job = program.run()  # of this session
    assert job.result(total, END_S) == 20 * 6
    assert all(map(is_alive, pids))
    clamor.shutdown(session="programs")
    until(lambda: not any(map(is_alive, pids)), END_S)
    assert job.stats().state == "ended"
    job.stop()


def test_what_is_no_partition_of_a_collection_is_said(lab: LocalCluster) -> None:
    program = Program()
    parts = program.dataset([1, 2])
    program.stage(lambda t, part: part + 1, writes=[parts])
    job = program.run()
    with pytest.raises(errors.ProgramError, match=r"Partition \d of .* returned int"):
        job.publish(parts)
    job.stop()


def test_what_was_published_and_is_lost_is_made_again(lab: LocalCluster) -> None:
    program, parts, _ = squares(8)
    index = lab.add_node(num_cpus=1)
    job = program.run()
    assert lab.node_ids[index] in nodes_of(job)
    made = job.publish(parts)
    job.stop()
    lab.kill_node(index)
    assert made.sum() == sum_of_squares(8)


def test_nodes_that_come_and_nodes_that_ray_drains(lab: LocalCluster, tmp_path: Path) -> None:
    """One node more is there at its end."""
    ends = tmp_path / "ends"
    program, _, total = rounds(10**6, ends=ends)
    job, fixed = program.run(workers="all"), rounds(10**6)[0].run(workers=2, reserve=False)
    at = nodes_of(fixed)
    index = lab.add_node(num_cpus=1)
    new = lab.node_ids[index]
    until(lambda: new in nodes_of(job), END_S)
    assert nodes_of(fixed) == at  # nobody has asked for more
    until(lambda: all(each.tasks > 0 for each in job.stats().workers), END_S)
    assert drain_node(new, int((time.time() + 600.0) * 1000))
    until(lambda: new not in nodes_of(job), END_S)
    ends.touch()
    assert job.result(total, END_S) == 6 * job.stats().rounds
    assert job.stats().restarts == 0
    for each in (job, fixed):
        each.stop()


def test_programs_end_with_their_session(lab: LocalCluster) -> None:
    """The very last test."""
    program, _, total = rounds(10**6)
    job = program.run(workers=2)
    pids = [each.pid for each in job.stats().workers]
    clamor.shutdown(force=True)
    until(lambda: not any(map(is_alive, pids)), END_S)
    with pytest.raises(errors.ProgramLostError):
        job.result(total, END_S)
