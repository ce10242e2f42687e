"""The peer that is MPI: k-means in mpi4py, each rank with its part of the points in one array.

The arithmetic of a rank is the function that our tasks call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

from bench.peers import mpi
from bench.peers import peer as _peer


def ranks(n_ranks: int, mixture: Any, k: int) -> contextlib.AbstractContextManager[_peer.Peer]:
    """So many ranks; each has generated its points when this yields."""
    spec = {**dataclasses.asdict(mixture), "k": k}
    return mpi.ranks("bench.peers.kmeans_mpi", n_ranks, spec)


def _main() -> None:
    import numpy as np
    from mpi4py import MPI

    from clamor_ray.workloads.data import clusters

    spec = mpi.given()
    k = spec.pop("k")
    mixture = clusters.Mixture(**spec)
    comm = MPI.COMM_WORLD
    mine = np.array_split(np.arange(mixture.n_partitions), comm.size)[comm.rank]
    points = clusters.generate(mine, mixture)

    def iterate(n: int) -> dict[str, Any]:
        centroids = mixture.first_centroids(k)
        seconds = []
        comm.Barrier()
        for _ in range(n):
            start = time.perf_counter()
            sums = clusters.partial_sums(points, centroids)
            comm.Allreduce(MPI.IN_PLACE, sums)
            centroids = clusters.new_centroids(sums[0], centroids)
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds, "answer": centroids.tolist()}

    def about(_: Any) -> dict[str, Any]:
        return {"library": mpi.library(), "n": len(points)}

    _peer.serve(comm.rank, {"iterate": iterate, "about": about})


if __name__ == "__main__":
    _main()
