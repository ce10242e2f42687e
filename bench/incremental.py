"""`refresh()` after 1 of 1,000 read blocks has changed, against computing everything anew.

A variable of 10,000 blocks, of which 500 partitions read two each, in scattered places, and compute
some milliseconds with what they find. Round after round the driver changes a number in one of the
read blocks, and then the collection is refreshed; another one that is written down afresh computes
all partitions at the same version, and both must have the same values, which the driver can say by
itself. The two take turns in being first. Once, a block is changed that nobody read.

``refresh_speedup``: seconds of everything anew / seconds of a refresh, medians of the rounds; the
change itself is in neither. ``precision``: partitions that read the changed block / partitions that
ran again, over all rounds; tasks say themselves that they ran.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.support import common
from bench.support.common import BLOCK_BYTES, emit, note, now
from bench.support.executions import Log

N_READ = 1000
OF_EACH = 2
N_BLOCKS = 10_000
WORDS = BLOCK_BYTES // 8

Float64 = npt.NDArray[np.float64]


def iterated(blocks: Float64, times: int) -> Float64:
    """One number of each block, (n, WORDS) in; the work of a task."""
    state = blocks.copy()
    for _ in range(times):
        np.sin(state, out=state)
        state += blocks
    total: Float64 = state.sum(axis=1)
    return total


def _task(ids: Any, table: Float64, times: int, stage: str, log: Log) -> Float64:
    # One partition's ids, OF_EACH of them; its first says which it is.
    log.note("began", stage, int(ids[0]))
    return iterated(table[ids], times)


class Program:
    """The variable, what is read of it, and what comes out."""

    def __init__(self, times: int, log: Log) -> None:
        import clamor_ray as clamor

        rng = np.random.default_rng(1)
        self.times, self.log = times, log
        self.table = rng.random((N_BLOCKS, WORDS))
        self.ref = clamor.put(self.table)
        self.read = rng.permutation(N_BLOCKS)[:N_READ]
        self.unread = np.setdiff1d(np.arange(N_BLOCKS), self.read)

    def written_down(self, stage: str) -> Any:
        """The collection; nothing runs yet."""
        import clamor_ray as clamor

        ids = clamor.from_numpy(self.read, partitions=N_READ // OF_EACH).options(progress=False)
        return ids.map_batches(_task, self.ref, self.times, stage, self.log)

    def change(self, block: int, value: float) -> None:
        """A number in the middle of a block."""
        import clamor_ray as clamor

        with clamor.update(self.ref) as table:
            table[block, WORDS // 2] = value
        self.table[block, WORDS // 2] = value

    def expected(self) -> Float64:
        """All values, by this process."""
        return iterated(self.table[self.read], self.times)

    def ran(self, stage: str) -> list[int]:
        """First ids of the partitions of that stage that ran, each as often as it did."""
        return [line.partition for line in self.log.lines() if line.stage == stage]


def rounds(program: Program, n_rounds: int) -> list[dict[str, Any]]:
    """Changes, refreshes, and computes anew.

    Raises:
        WrongData: Values are not those of the newest version.
    """
    kept = program.written_down("kept")
    kept.execute()
    common.verify("first", kept.to_numpy(), program.expected())
    rng = np.random.default_rng(2)
    out = []
    for number in range(-1, n_rounds):
        unread = number < 0  # a round of its own, in no time: a block that nobody read
        at = int(rng.integers(N_READ))
        block = int(rng.choice(program.unread)) if unread else int(program.read[at])
        program.change(block, float(rng.random()))
        needed = [] if unread else [int(program.read[at // OF_EACH * OF_EACH])]
        seconds = {}
        for name in ("refresh", "anew") if number % 2 else ("anew", "refresh"):
            if name == "refresh":
                before = len(program.ran("kept"))
                start = now()
                kept.refresh()
                seconds[name] = now() - start
                again = program.ran("kept")[before:]
                found = kept.to_numpy()
            else:
                stage = f"anew {number}"
                start = now()
                fresh = program.written_down(stage).execute()
                seconds[name] = now() - start
                ran = program.ran(stage)
                if sorted(ran) != sorted(program.read[::OF_EACH].tolist()):
                    raise common.WrongData(f"{len(ran)} tasks ran of {N_READ // OF_EACH}")
                found = fresh.to_numpy()
                fresh.unpersist()
            common.verify(name, found, program.expected())
        if not set(needed) <= set(again):
            raise common.WrongData("the partition that read the changed block did not run again")
        record = {
            "round": number,
            "read_by_nobody": unread,
            **{f"{name}_s": value for name, value in seconds.items()},
            "needed": len(needed),
            "rerun": len(again),
        }
        emit(record)
        out.append(record)
    return out


def figures(records: list[dict[str, Any]]) -> dict[str, float]:
    """From all rounds; that of the block that nobody read counts for what ran again."""
    timed = [record for record in records if not record["read_by_nobody"]]
    anew, refresh = (
        statistics.median(record[name] for record in timed) for name in ("anew_s", "refresh_s")
    )
    return {
        "refresh_speedup": anew / refresh,
        "precision": sum(r["needed"] for r in records) / sum(r["rerun"] for r in records),
        "refresh_s": refresh,
        "anew_s": anew,
    }


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench incremental", description=__doc__)
    parser.add_argument("--small", action="store_true", help="less work a task, 2 rounds")
    parser.add_argument("--rounds", type=int, help="of one changed block (9)")
    parser.add_argument("--times", type=int, help="sines of each number of a block (2,000)")
    options = parser.parse_args(arguments)
    times = options.times or (20 if options.small else 2000)

    import clamor_ray as clamor

    # What a task computes, without anything around it.
    one = np.random.default_rng(3).random((OF_EACH, WORDS))
    iterated(one, 2)
    start = now()
    iterated(one, times)
    task_s = now() - start
    environment = common.environment(
        library=clamor.__version__, bench="incremental", times=times, task_s=round(task_s, 6)
    )
    with (
        common.several_nodes(2, store_bytes=256 << 20, num_cpus=1) as nodes,
        tempfile.TemporaryDirectory(prefix="bench-incremental-") as folder,
    ):
        environment["environment"].update(trap=nodes.trap)
        emit(environment)
        note("computing everything once")
        program = Program(times, Log(str(Path(folder) / "log")))
        records = rounds(program, options.rounds or (2 if options.small else 9))
        clamor.free(program.ref)
    common.summary(figures(records))
    return 0
