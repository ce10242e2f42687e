"""Logistic regression in mpi4py: each rank with its partitions of the rows.

A rank calls the function that our tasks call, and an all-reduce has the place of our messages.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

from bench.peers import mpi
from bench.peers import peer as _peer


def ranks(n_ranks: int, sample: Any, step: float) -> contextlib.AbstractContextManager[_peer.Peer]:
    """So many ranks; each has drawn its rows when this yields."""
    spec = {**dataclasses.asdict(sample), "step": step}
    return mpi.ranks("bench.peers.lr_mpi", n_ranks, spec)


def _main() -> None:
    import numpy as np
    from mpi4py import MPI

    from clamor_ray.workloads.models import linear

    spec = mpi.given()
    step = spec.pop("step")
    sample = linear.Sample(**spec)
    comm = MPI.COMM_WORLD
    mine = np.array_split(np.arange(sample.n_partitions), comm.size)[comm.rank]
    parts = [sample.partition(int(number)) for number in mine]

    def evaluate(weights: Any) -> tuple[float, Any]:
        total = np.zeros(len(weights) + linear.TAIL)
        for rows in parts:
            linear.accumulate(total, rows, weights, "logistic", 1.0)
        comm.Allreduce(MPI.IN_PLACE, total)
        return linear.penalized(total, weights, 0.0, True)

    def iterate(n: int) -> dict[str, Any]:
        seconds = []
        comm.Barrier()
        start = time.perf_counter()
        first = np.zeros(sample.n_features + 1)
        for here in linear.descend(evaluate, first, n, 0.0, step):
            seconds.append(time.perf_counter() - start)
            weights = here.weights
            start = time.perf_counter()
        return {"seconds": seconds, "answer": weights.tolist()}

    def about(_: Any) -> dict[str, Any]:
        return {"library": mpi.library(), "n": sum(map(len, parts))}

    _peer.serve(comm.rank, {"iterate": iterate, "about": about})


if __name__ == "__main__":
    _main()
