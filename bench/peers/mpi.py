"""Peers that are ranks of MPI, by mpi4py. `unavailable` says what is missing; `ranks` starts
them."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
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
def ranks(module: str, n_ranks: int, spec: Mapping[str, Any]) -> Iterator[_peer.Peer]:
    """So many processes of a module; each is ready when this yields.

    Args:
        module: run as ``__main__``; its `spec` is `given()`.
        n_ranks: processes.
        spec: JSON.
    """
    mpiexec = _mpiexec()
    assert mpiexec is not None
    command = [mpiexec, "-n", str(n_ranks), sys.executable, "-m", module, json.dumps(dict(spec))]
    # One thread a rank, as Ray gives a task of one CPU.
    with _peer.started("MPI", command, n_ranks, {"OMP_NUM_THREADS": "1"}) as peer:
        yield peer


def given() -> dict[str, Any]:
    """In a rank: the `spec` that it was started with."""
    found: dict[str, Any] = json.loads(sys.argv[-2])
    return found


def library() -> str:
    """In a rank: which MPI this is."""
    from mpi4py import MPI

    version = MPI.Get_library_version().strip("\0\n").splitlines()[0]
    return " ".join(version.split())
