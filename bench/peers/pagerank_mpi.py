"""PageRank in mpi4py: each rank has a range of vertices, and the edges into it.

The ranges and the arithmetic are those of `workloads/recipes/pagerank.py`. What vertices give goes
through an all-to-all of arrays, from and to memory that is made once.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from bench.peers import mpi
from bench.peers import peer as _peer


def ranks(n_ranks: int, spec: Mapping[str, Any]) -> contextlib.AbstractContextManager[_peer.Peer]:
    """So many ranks; each has cut its part of the graph when this yields.

    Args:
        n_ranks: processes.
        spec: arguments of `graphs.generate`, and "damping".
    """
    return mpi.ranks("bench.peers.pagerank_mpi", n_ranks, spec)


def _main() -> None:
    import numpy as np
    from mpi4py import MPI

    from clamor_ray.workloads.data import graphs
    from clamor_ray.workloads.recipes.pagerank import cut_graph

    spec = mpi.given()
    damping = spec.pop("damping")
    comm = MPI.COMM_WORLD
    parts = cut_graph(graphs.generate(**spec), comm.size)
    if len(parts) != comm.size:
        raise ValueError(f"the graph has {len(parts)} ranges, and there are {comm.size} ranks")
    part = parts[comm.rank]
    from_counts = [len(other.gives[comm.rank]) for other in parts]
    del parts
    to_counts = [len(places) for places in part.gives]
    places = np.concatenate(part.gives)
    given = np.empty(sum(to_counts))
    got = np.empty(sum(from_counts))

    def iterate(n: int) -> dict[str, Any]:
        ranks = np.full(len(part.out_degrees), 1.0 / part.n_vertices)
        seconds = []
        comm.Barrier()
        for _ in range(n):
            start = time.perf_counter()
            shares = graphs.shares(ranks, part.out_degrees, damping)
            dangling = comm.allreduce(float(ranks[part.out_degrees == 0].sum()))
            np.take(shares, places, out=given)
            comm.Alltoallv((given, to_counts), (got, from_counts))
            base = (1.0 - damping + damping * dangling) / part.n_vertices
            new = graphs.ranks_of(part.edges, got, 0, len(ranks), base)
            comm.allreduce(float(np.abs(new - ranks).sum()))  # whether they have converged
            ranks = new
            seconds.append(time.perf_counter() - start)
        # On average 1, as the answers of other sides are.
        whole = comm.gather(ranks * part.n_vertices)
        answer = [] if whole is None else np.concatenate(whole).tolist()
        return {"seconds": seconds, "answer": answer}

    def about(_: Any) -> dict[str, Any]:
        return {"library": mpi.library(), "n": len(part.out_degrees)}

    _peer.serve(comm.rank, {"iterate": iterate, "about": about})


if __name__ == "__main__":
    _main()
