"""The peer that is MPI: k-means in mpi4py, each rank with its part of the points in one array.

The arithmetic of a rank is the function that our tasks call. `unavailable` says what is missing;
`ranks` starts them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.peers import peer as _peer

MISSING = "mpi4py and an MPI are needed for mpi_ratio (pip install mpi4py mpich)"


def _mpiexec() -> str | None:
    # A wheel's is beside Python, and belongs to the library that mpi4py will find.
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def unavailable() -> str | None:
    """Why there is no MPI here, or None."""
    import importlib.util

    if importlib.util.find_spec("mpi4py") is None:
        return f"{MISSING}: there is no mpi4py"
    if _mpiexec() is None:
        return f"{MISSING}: there is no mpiexec"
    return None


@contextlib.contextmanager
def ranks(n_ranks: int, mixture: Any, k: int) -> Iterator[_peer.Peer]:
    """So many ranks; each has generated its points when this yields."""
    mpiexec = _mpiexec()
    assert mpiexec is not None
    spec = json.dumps({**dataclasses.asdict(mixture), "k": k})
    command = [mpiexec, "-n", str(n_ranks), sys.executable, "-m", "bench.peers.kmeans_mpi", spec]
    # One thread a rank, as Ray gives a task of one CPU.
    with _peer.started("MPI", command, n_ranks, {"OMP_NUM_THREADS": "1"}) as peer:
        yield peer


def _main() -> None:
    import numpy as np
    from mpi4py import MPI

    from clamor_ray.workloads.data import clusters

    spec = json.loads(sys.argv[-2])
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
        return {"seconds": seconds, "centroids": centroids.tolist()}

    def about(_: Any) -> dict[str, Any]:
        version = MPI.Get_library_version().strip("\0\n").splitlines()[0]
        return {"library": " ".join(version.split()), "points": len(points)}

    _peer.serve(comm.rank, {"iterate": iterate, "about": about})


if __name__ == "__main__":
    _main()
