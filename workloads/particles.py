"""Particles in slabs of very different work: what finer partitions are worth (Canary 7.2, Table 1).

    python -m clamor_ray.workloads.particles --demo
    python -m clamor_ray.workloads.particles --particles 50000 --slabs 32 --progress-picture p.png

A program of stages (`recipes/particles.py`), whose partitions are slabs of a box. Particles are the
denser the nearer they are to one side, so slabs of one width have very different work. With as many
slabs as cores, all wait for the core with the densest one. With more, a core that has sparse slabs
takes more of them: run it with some numbers of --slabs and compare.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click
import pyarrow as pa
import pyarrow.parquet as pq

import clamor_ray as clamor

from .cli import options, running
from .cli.program import CommandRun, program
from .cli.stages import Stages
from .cli.waiting import total_cpus
from .models import particles
from .models.particles import ParticleBox, Particles
from .recipes.particles import describe_particles

SLABS_PER_CPU = 4


@dataclasses.dataclass(frozen=True)
class ParticlesJob:
    """What the command line asked for.

    Args:
        n_particles: to draw.
        box: that they are in.
        skew: see `particles.generate`.
        steps: of time.
        n_slabs: into which the box is cut; None for SLABS_PER_CPU for each CPU, or as many as its
            width allows.
        seed: of the draw.
        check: whether to do it in this process as well.
        progress_picture: of the program, to write.
    """

    n_particles: int
    box: ParticleBox
    skew: float = 3.0
    steps: int = 20
    n_slabs: int | None = None
    seed: int = 1
    check: bool = False
    progress_picture: Path | None = None


@dataclasses.dataclass(frozen=True)
class ParticlesOutcome:
    """Of a run.

    Args:
        particles: where they are at the end.
        sizes: how many are in each slab then.
        moved: the farthest that one did.
        is_checked: they are where one process finds them, bit for bit.
        progress: of the program.
    """

    particles: Particles
    sizes: list[int]
    moved: float
    is_checked: bool
    progress: Any


def most_slabs(box: ParticleBox) -> int:
    """Thinner ones would not be two radii wide: particles would push those of other slabs than the
    next ones."""
    return max(1, int(box.width / box.radius / 2.0))


def run(job: ParticlesJob, stages: Stages) -> ParticlesOutcome:
    """Draws particles, moves them, and checks, on the cluster that this process is attached to.

    Raises:
        ValueError: Slabs are too thin.
        WrongParticles: The particles are not where one process finds them.
    """
    n_slabs = job.n_slabs or min(most_slabs(job.box), SLABS_PER_CPU * total_cpus())
    first = particles.generate(job.n_particles, job.box, job.skew, job.seed)
    p = clamor.Program()
    of = describe_particles(p, first, job.box, n_slabs, job.steps)
    text = f"{job.steps} steps of {job.n_particles:,} particles in {n_slabs} slabs"
    with running.ended(p, stages, text, job.steps, job.progress_picture) as (ran, progress):
        slabs = ran.result(of.slabs)
    found = particles.merged(slabs)
    if job.check:
        with stages.stage("check", "checking against all pairs in this process"):
            particles.check(found, particles.reference(first, job.box, job.steps))
    moved = float(abs(found.at - first.at).max())
    return ParticlesOutcome(found, [len(slab) for slab in slabs], moved, job.check, progress)


def write(found: Particles, out: Path) -> None:
    """Parquet: number, x, y, and the speed along both."""
    columns = {"number": found.numbers, "x": found.at[:, 0], "y": found.at[:, 1]}
    columns |= {"speed_x": found.speed[:, 0], "speed_y": found.speed[:, 1]}
    pq.write_table(pa.table(columns), out)


@program("2,000 particles on a local cluster.")
@options.count("--particles", "n_particles", "To draw. Default: 50,000; 2,000 for the demo.")
@options.number("--steps", 20, "Of time.")
@options.count(
    "--slabs",
    "n_slabs",
    f"How fine the partitions are. Default: {SLABS_PER_CPU} for each CPU, or as many as the width "
    "of the box allows: half of --width.",
)
@options.real("--skew", 3.0, "1: as dense everywhere; the larger, the denser at one side.", least=1)
@options.real("--width", 64.0, "Of the box, in radii of a particle.", least=2)
@options.seed("Of the particles.")
@options.check()
@running.progress_option
@options.new_file("--out", "Where the particles are at the end, Parquet.")
def main(
    asked: CommandRun, n_particles: int | None, width: float, out: Path | None, **of_job: Any
) -> None:
    """Moves particles that push each other away, in slabs of a box with very different work.

    Prints how long it took, and how much each node and the busiest slab computed.

    Exit status: 0; 1 where particles are wrong; 2 where an option makes no sense; 3 where the
    library cannot work here.
    """
    box = ParticleBox(width=width)
    wanted, most = of_job["n_slabs"], most_slabs(box)
    if wanted is not None and wanted > most:
        raise click.UsageError(f"--slabs {wanted}: take up to {most}, half of --width")
    job = ParticlesJob(n_particles or (2_000 if asked.demo else 50_000), box, **of_job)
    running.check_options(job.progress_picture)
    with asked.attached():
        outcome = run(job, asked.stages)
    print_outcome(asked, job, outcome)
    if out is not None:
        write(outcome.particles, out)
    asked.wrote(particles=out, progress=job.progress_picture)


def print_outcome(asked: CommandRun, job: ParticlesJob, outcome: ParticlesOutcome) -> None:
    """What a run found, and what it took."""
    checked = " All particles are where one process finds them." if outcome.is_checked else ""
    sizes = outcome.sizes
    asked.say(
        f"\n{job.steps} steps of {job.n_particles:,} particles in {len(sizes)} slabs, "
        f"{outcome.progress.elapsed_s / job.steps * 1e3:.1f} ms a step; the farthest moved "
        f"{outcome.moved:.3f}.{checked}\nthe fullest slab has {max(sizes):,} particles, "
        f"{max(sizes) * len(sizes) / job.n_particles:.1f} times the mean\n"
    )
    running.print_progress(asked, outcome.progress)


if __name__ == "__main__":
    main()
