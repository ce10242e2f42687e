"""What partitions that are four times finer are worth where their work is uneven (Canary, table 1).

Particles push each other in a box that is cut into slabs (`workloads/recipes/particles.py`). They
fill the first half of the box, as the fluid of PARSEC's fluidanimate fills a part of its own, so
one of two slabs has nearly all work. One worker runs a task for each core at once, and all tasks
wait in one queue. The program runs with a slab for each core, and with four times as many, in turn;
each repetition begins anew. The first one is in no figure. Particles end at the same places, bit
for bit, however the box is cut.

``skew_speedup``: seconds of a round, coarse / fine: of whole runs without their first round, as
slabs do not wait for those that are far. The median of the repetitions.

``skew_bound``: what it would be if a task cost its pairs of particles alone, and no core waited
for a task that another one could run. `--skew` draws particles that are the denser the nearer they
are to a border, in all of the box: its bound is smaller.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support import common, timed
from bench.support.common import emit, note
from bench.support.timed import TimedProgram
from clamor_ray.workloads.models import particles
from clamor_ray.workloads.models.particles import ParticleBox, Particles
from clamor_ray.workloads.recipes.particles import describe_particles

BOX = ParticleBox()
FINER = 4


def drawn(n: int, skew: float | None, box: ParticleBox) -> Particles:
    """Particles at rest.

    Args:
        n: of them.
        skew: of `particles.generate`; None: evenly in the first half of the box, by x.
        box: whose.

    Example:
        >>> float(drawn(1000, None, ParticleBox()).at[:, 0].max()) < 32.0
        True
    """
    found = particles.generate(n, box, 1.0 if skew is None else skew, seed=1)
    if skew is None:
        found.at[:, 0] /= 2.0
    return found


def pairs(first: Particles, box: ParticleBox, n_slabs: int) -> npt.NDArray[np.int64]:
    """The work of each slab: how many particles lie as near in x, added up over its own.

    Example:
        >>> at = np.array([[1.0, 0.0], [1.5, 9.0], [40.0, 0.0]])
        >>> pairs(Particles(np.arange(3), at, np.zeros((3, 2))), ParticleBox(), 2).tolist()
        [4, 1]
    """
    x = np.sort(first.at[:, 0])
    own = first.at[:, 0]
    near = np.searchsorted(x, own + box.radius, "right") - np.searchsorted(x, own - box.radius)
    slabs = particles.slab_of(first, box, n_slabs)
    return np.bincount(slabs, near, minlength=n_slabs).astype(np.int64)


def bound(coarse: npt.NDArray[np.int64], fine: npt.NDArray[np.int64], n_executors: int) -> float:
    """The least time of the coarse slabs / that of the fine ones.

    Example:
        >>> bound(np.array([90, 10]), np.array([30, 30, 30, 0, 5, 5, 0, 0]), 2)
        1.8
    """

    def least(work: npt.NDArray[np.int64]) -> float:
        return max(float(work.max()), work.sum() / n_executors)

    return least(coarse) / least(fine)


def run(first: Particles, n_slabs: int, n_rounds: int, n_executors: int) -> tuple[float, Particles]:
    """Seconds of a round, and where the particles are in the end."""
    with tempfile.TemporaryDirectory(prefix="clamor-bench-") as folder:
        path = Path(folder) / "tasks"
        program = TimedProgram(path)
        slabs = describe_particles(program, first, BOX, n_slabs, n_rounds + 1).slabs
        job = program.run(workers=1, cpus=n_executors)
        try:
            found = particles.merged(job.result(slabs))
        finally:
            job.stop()
        rounds = timed.rounds_of(timed.read(path))
    names = [stage.name for stage in program.tables().stages]
    emit(
        {
            "slabs": n_slabs,
            "seconds": rounds.seconds,
            "longest_tasks_s": statistics.median(rounds.longest_s),
            "stages_s": dict(zip(names, rounds.stages_s, strict=True)),
        }
    )
    return statistics.mean(rounds.seconds[1:]), found


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Figures."""
    first = drawn(options.particles, options.skew, BOX)
    n, n_coarse = options.executors, options.slabs
    n_fine = FINER * n_coarse
    coarse, fine = pairs(first, BOX, n_coarse), pairs(first, BOX, n_fine)
    emit({"pairs": {"coarse": coarse.tolist(), "fine": fine.tolist()}})
    speedups, fine_s = [], []
    for number in range(options.repetitions + 1):
        note(f"repetition {number} of {options.repetitions}")
        turn = [n_coarse, n_fine] if number % 2 else [n_fine, n_coarse]
        took, found = {}, {}
        for n_slabs in turn:
            took[n_slabs], found[n_slabs] = run(first, n_slabs, options.rounds, n)
        particles.check(found[n_fine], found[n_coarse])
        if number:
            speedups.append(took[n_coarse] / took[n_fine])
            fine_s.append(took[n_fine])
    emit({"figure": "skew_speedup", **common.spread(speedups)})
    return {
        "skew_speedup": statistics.median(speedups),
        "skew_bound": bound(coarse, fine, n),
        "round_s": statistics.median(fine_s),
    }


def main(argv: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench program_skew", description=__doc__)
    parser.add_argument("--small", action="store_true", help="a run of seconds: no figure")
    parser.add_argument("--particles", type=int, help="how many (6,000)")
    parser.add_argument("--rounds", type=int, help="of a run (20)")
    parser.add_argument("--repetitions", type=int, help="of both (5)")
    parser.add_argument("--executors", type=int, help="tasks that run at once (one for each core)")
    parser.add_argument("--slabs", type=int, help="of the coarse side (one an executor)")
    parser.add_argument("--skew", type=float, help="draw by it, in all of the box (3.0)")
    options = parser.parse_args(argv)
    options.particles = options.particles or (600 if options.small else 6000)
    options.rounds = options.rounds or (4 if options.small else 20)
    options.repetitions = options.repetitions or (1 if options.small else 5)
    options.executors = options.executors or max(2, len(os.sched_getaffinity(0)))
    options.slabs = options.slabs or options.executors
    os.environ["OMP_NUM_THREADS"] = "1"
    environment = common.environment(executors=options.executors, particles=options.particles)
    with common.several_nodes(1, 256 << 20, num_cpus=options.executors) as nodes:
        environment["environment"]["trap"] = nodes.trap
        emit(environment)
        found = measured(options)
    common.summary(found)
