"""Particles that push each other away, in a box that is cut into slabs. No Ray here.

Where particles are dense there is more to compute, so slabs of one width have very different work:
as in fluidanimate of PARSEC, by which Canary measures what finer partitions are worth (7.2). The
work of a particle is the particles that are as near in x, however the box is cut.

Forces are added up as whole numbers, in units of 2 ** -40. So their sums do not depend on an order,
and the same particles move the same way, bit for bit, in any number of slabs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..data.errors import WrongResult

__all__ = [
    "ParticleBox",
    "Particles",
    "WrongParticles",
    "check",
    "generate",
    "merged",
    "near_border",
    "pushed",
    "reference",
    "slab_of",
]

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]

UNIT: Final = 2.0**-40  # of forces
MOST_PAIRS: Final = 1 << 18  # at a time: 2 MiB an array


class WrongParticles(WrongResult):
    """The tasks' particles are not where one process finds them."""


@dataclasses.dataclass(frozen=True)
class ParticleBox:
    """Where particles are, and how they move.

    Args:
        width: of the box, in x and in y.
        radius: within which particles push each other.
        strength: of the push at no distance.
        step_s: of time.
    """

    width: float = 64.0
    radius: float = 1.0
    strength: float = 4.0
    step_s: float = 2.0**-6


@dataclasses.dataclass(frozen=True, eq=False)
class Particles:
    """Some particles, by number.

    Args:
        numbers: (n,), ascending; no two particles have one.
        at: (n, 2): x, y.
        speed: (n, 2).
    """

    numbers: Int64
    at: Float64
    speed: Float64

    def __len__(self) -> int:
        return len(self.numbers)

    def of(self, which: Any) -> Particles:
        """Some of them: a mask or places, ascending."""
        return Particles(self.numbers[which], self.at[which], self.speed[which])


def generate(n: int, box: ParticleBox, skew: float, seed: int) -> Particles:
    """Particles at rest, the denser the nearer to x = 0.

    Args:
        n: of them.
        skew: 1: as dense everywhere; the larger, the more are near to x = 0.
        seed: of the draw.

    Example:
        >>> len(generate(100, ParticleBox(), 3.0, seed=1))
        100
    """
    at = np.random.default_rng(seed).random((n, 2))
    at[:, 0] **= skew
    return Particles(np.arange(n), at * box.width, np.zeros((n, 2)))


def slab_of(particles: Particles, box: ParticleBox, n_slabs: int) -> Int64:
    """The slab that each is in: they have one width."""
    slabs = (particles.at[:, 0] * (n_slabs / box.width)).astype(np.int64)
    return np.clip(slabs, 0, n_slabs - 1)


def near_border(
    particles: Particles, box: ParticleBox, n_slabs: int, slab: int, side: int
) -> Particles:
    """Those of a slab that push particles of its neighbour.

    Args:
        side: -1: the neighbour before it; 1: the one behind it.
    """
    width = box.width / n_slabs
    border = (slab if side < 0 else slab + 1) * width
    # Twice what is needed: slab_of and this round differently.
    return particles.of(np.abs(particles.at[:, 0] - border) <= 2.0 * box.radius)


def merged(parts: Iterable[Particles]) -> Particles:
    """All of them, by number."""
    some = list(parts)
    numbers = np.concatenate([part.numbers for part in some])
    order = np.argsort(numbers)
    at = np.concatenate([part.at for part in some])[order]
    return Particles(numbers[order], at, np.concatenate([part.speed for part in some])[order])


def pushed(own: Particles, others: Particles, box: ParticleBox) -> Particles:
    """Particles after one step of time.

    Args:
        own: that move.
        others: that push them too, and are no own ones.
    """
    force = _forces(own, merged([own, others]), box)
    speed = own.speed + force * (UNIT * box.step_s)
    at = own.at + speed * box.step_s
    out = (at < 0.0) | (at > box.width)
    return Particles(own.numbers, np.clip(at, 0.0, box.width), np.where(out, -speed, speed))


def _forces(own: Particles, there: Particles, box: ParticleBox) -> Float64:
    """On own particles, in units."""
    order = np.argsort(there.at[:, 0], kind="stable")
    at = there.at[order]
    x = at[:, 0]
    first = np.searchsorted(x, own.at[:, 0] - box.radius)
    last = np.searchsorted(x, own.at[:, 0] + box.radius, "right")
    out = np.zeros((len(own), 2))
    for begin, end in _chunks(last - first):
        counts = last[begin:end] - first[begin:end]  # at least 1: itself
        starts = np.cumsum(counts) - counts
        places = np.arange(int(counts.sum())) + np.repeat(first[begin:end] - starts, counts)
        away = np.repeat(own.at[begin:end], counts, axis=0) - at[places]
        out[begin:end] = np.add.reduceat(_push(away, box), starts)
    return out


def _chunks(counts: Int64) -> Iterator[tuple[int, int]]:
    """Ranges of particles with about MOST_PAIRS pairs each."""
    ends = np.cumsum(counts)
    begin = 0
    while begin < len(counts):
        done = int(ends[begin - 1]) if begin else 0
        end = max(begin + 1, int(np.searchsorted(ends, done + MOST_PAIRS, "right")))
        yield begin, end
        begin = end


def _push(away: Float64, box: ParticleBox) -> Int64:
    """By differences (dx, dy), in units: 0 for none, and from the radius on."""
    distance = np.sqrt(away[:, 0] * away[:, 0] + away[:, 1] * away[:, 1])
    share = np.maximum(0.0, 1.0 - distance / box.radius)
    push = share[:, None] * away * (box.strength / box.radius / UNIT)
    found: Int64 = np.rint(push).astype(np.int64)
    return found


# ---------------------------------------------------------------- checking


def reference(particles: Particles, box: ParticleBox, steps: int) -> Particles:
    """After so many steps, by all pairs, in this process. None of the code above sums."""
    for _ in range(steps):
        force = np.zeros((len(particles), 2), np.int64)
        for i in range(len(particles)):
            dx = particles.at[i, 0] - particles.at[:, 0]
            dy = particles.at[i, 1] - particles.at[:, 1]
            share = np.maximum(0.0, 1.0 - np.sqrt(dx * dx + dy * dy) / box.radius)
            scale = box.strength / box.radius / UNIT
            for axis, away in enumerate((dx, dy)):
                force[i, axis] = np.rint(share * away * scale).astype(np.int64).sum()
        speed = particles.speed + force.astype(np.float64) * (UNIT * box.step_s)
        at = particles.at + speed * box.step_s
        for axis in (0, 1):
            out = np.flatnonzero((at[:, axis] < 0.0) | (at[:, axis] > box.width))
            speed[out, axis] *= -1.0
            at[out, axis] = np.clip(at[out, axis], 0.0, box.width)
        particles = Particles(particles.numbers, at, speed)
    return particles


def check(particles: Particles, expected: Particles) -> None:
    """That particles are these, bit for bit.

    Raises:
        WrongParticles: One is elsewhere, or there is another number of them.
    """
    if not np.array_equal(particles.numbers, expected.numbers):
        raise WrongParticles(f"there are {len(particles):,} particles, not {len(expected):,}")
    wrong = np.flatnonzero(
        (particles.at != expected.at).any(axis=1) | (particles.speed != expected.speed).any(axis=1)
    )
    if len(wrong):
        i = int(wrong[0])
        raise WrongParticles(
            f"{len(wrong):,} of {len(expected):,} particles; number {particles.numbers[i]} is at "
            f"{particles.at[i].tolist()}, not at {expected.at[i].tolist()}"
        )
