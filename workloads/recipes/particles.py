"""A simulation of particles as a program of stages (Canary 7.2): slabs of a box, with skewed work.

In each round a slab shows its neighbours the particles near their border, pushes its own, and hands
over those that have left it. Slabs that are finer than there are cores let a core with sparse slabs
take over more of them.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ..models import particles
from ..models.particles import ParticleBox, Particles

__all__ = ["ParticleDatasets", "describe_particles"]


class ParticleDatasets(NamedTuple):
    """Datasets of the program.

    Args:
        slabs: `Particles`, one a slab of the box.
    """

    slabs: Any


def describe_particles(
    p: Any, first: Particles, box: ParticleBox, n_slabs: int, steps: int
) -> ParticleDatasets:
    """So many steps of time.

    Args:
        p: the program that is being described.
        first: where the particles are, and how fast.
        box: that they are in.
        n_slabs: into which it is cut.
        steps: at least 1.

    Raises:
        ValueError: A slab is less than two radii wide: particles would be pushed from beyond its
            neighbours.
    """
    if n_slabs > 1 and box.width / n_slabs < 2.0 * box.radius:
        most = max(1, int(box.width / box.radius / 2.0))
        raise ValueError(f"{n_slabs} slabs are too thin for that radius: take up to {most}")
    where = particles.slab_of(first, box, n_slabs)
    slabs = p.dataset([first.of(where == slab) for slab in range(n_slabs)], name="slabs")
    with p.loop(max=steps):
        p.stage(functools.partial(show_borders, box), reads=[slabs])
        p.stage(functools.partial(push, box), writes=[slabs])
        p.stage(take_over, writes=[slabs])
    return ParticleDatasets(slabs)


def show_borders(box: ParticleBox, t: Any, slab: Particles) -> None:
    """To both neighbours, what pushes their particles."""
    for side in (-1, 1):
        if 0 <= t.index + side < t.n_tasks:
            near = particles.near_border(slab, box, t.n_tasks, t.index, side)
            t.send(t.index + side, near)


def push(box: ParticleBox, t: Any, slab: Particles) -> Particles:
    """Moves the particles of a slab; those that have left it go to where they are now."""
    nobody = slab.of(slice(0))
    moved = particles.pushed(slab, particles.merged([nobody, *t.recv()]), box)
    where = particles.slab_of(moved, box, t.n_tasks)
    for other in sorted(set(where.tolist()) - {t.index}):
        t.send(other, moved.of(where == other))
    return moved.of(where == t.index)


def take_over(t: Any, slab: Particles) -> Particles:
    """Particles that have come."""
    return particles.merged([slab, *t.recv()])
