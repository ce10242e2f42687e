"""Workers that change and read variables and record what they did and saw, for isolation.check.

A variable is an array of int64, a whole number of blocks; a block holds one value, everywhere the
same. Each attempt of a task records to a file of its own, at once: a killed process counts as well.
"""

from __future__ import annotations

import gc
import os
import random
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import clamor_ray as clamor
from clamor_ray import errors
from tests.support.lab.isolation import Event, Recorder, load

PER_BLOCK = 512  # int64
AT_LAST_S = 60.0
TORN = -1  # a block that holds several values: nobody wrote that
Array = npt.NDArray[np.int64]


def blank(n_blocks: int) -> Array:
    return np.zeros(n_blocks * PER_BLOCK, np.int64)


def value_of(array: Array, block: int) -> int:
    values = array[block * PER_BLOCK : (block + 1) * PER_BLOCK]
    first = int(values[0])
    return first if bool((values == first).all()) else TORN


@dataclass(frozen=True)
class Job:
    """What a worker is to do, and where it records.

    Args:
        refs: the variables, by name.
        n_blocks: of each.
        folder: for the histories; on this machine, as everything.
        seed: of its choices.
        seconds: how long.
        rest_s: between two transactions, or two snapshots, on average. Workers that never rest take
            all cores, and what was killed is late to come back.
    """

    refs: Mapping[str, Any]
    n_blocks: int
    folder: str
    seed: int
    seconds: float
    rest_s: float = 0.0

    def recorder(self) -> Recorder:
        # Not from the seed: a task that is run again makes the same choices, not the same values.
        process = 1 + secrets.randbelow((1 << 30) - 1)
        return Recorder(process, Path(self.folder, f"{process}-{os.getpid()}.history"))

    def rest(self, rng: random.Random) -> None:
        if self.rest_s:
            time.sleep(rng.uniform(0, 2 * self.rest_s))


def commit_at_last(work: Any) -> Any:
    """Commits, again and again where that failed for now and the transaction is still open."""
    deadline = time.monotonic() + AT_LAST_S
    while True:
        try:
            return work.commit()
        except (
            errors.DescriptorLimitError,
            errors.JournalFullError,
            errors.ServerUnavailableError,
            errors.WaitTimeoutError,
        ) as error:
            if error.transaction is not work or time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def transact(recorder: Recorder, job: Job, rng: random.Random) -> None:
    """One transaction over one or all variables; CommitConflict where another was faster."""
    names = sorted(job.refs) if rng.random() < 0.5 else [rng.choice(sorted(job.refs))]
    refs = [job.refs[name] for name in names]
    before_ns = time.monotonic_ns()
    one = len(refs) == 1 and rng.random() < 0.5
    work = clamor.update(refs[0]) if one else clamor.transaction(*refs)
    opened = work.begin()
    arrays = dict(zip(names, (opened,) if one else opened, strict=True))
    txn = recorder.begin(dict(zip(names, work.versions, strict=True)), before_ns)
    written = set()
    for _ in range(rng.randint(1, 6)):
        # Half of them where all meet.
        name = rng.choice(names)
        block = rng.randrange(rng.choice((min(16, job.n_blocks), job.n_blocks)))
        recorder.read(txn, name, block, value_of(arrays[name], block))
        if rng.random() < 0.6:
            # Wide ones take longer to apply: more moments in the middle.
            end = block + 1 if rng.random() < 0.97 else rng.randint(block + 1, job.n_blocks)
            for each in range(block, end):
                value = recorder.new_value()
                recorder.write(txn, name, each, value)
                arrays[name][each * PER_BLOCK : (each + 1) * PER_BLOCK] = value
            written.add(name)
        if rng.random() < 0.1:
            time.sleep(rng.uniform(0, 0.01))  # so that some overlap for long
    if rng.random() < 0.05:
        work.abort()
        recorder.abort(txn)
        return
    try:
        versions = dict(zip(names, commit_at_last(work), strict=True))
    except errors.CommitConflict:
        recorder.abort(txn)
        raise
    recorder.commit(txn, {name: versions[name] for name in written}, time.monotonic_ns())


def write(job: Job) -> int:
    """Transactions, one after the other; how many."""
    recorder, rng = job.recorder(), random.Random(job.seed)
    deadline = time.monotonic() + job.seconds
    done = 0
    while time.monotonic() < deadline:
        clamor.retry(transact, recorder, job, rng, attempts=100, most_s=0.1)
        done += 1
        job.rest(rng)
    return done


def read(job: Job) -> int:
    """Snapshots: new ones, old ones, and some that are held for a while; how many."""
    recorder, rng = job.recorder(), random.Random(job.seed)
    held: list[tuple[str, int, Array]] = []
    deadline = time.monotonic() + job.seconds
    done = 0

    def look(name: str, version: int, array: Array) -> None:
        for block in rng.sample(range(job.n_blocks), min(8, job.n_blocks)):
            recorder.plain(name, version, block, value_of(array, block))

    while time.monotonic() < deadline:
        name = rng.choice(sorted(job.refs))
        ref = job.refs[name]._latest()
        if rng.random() < 0.4:
            ref = ref.at(max(0, ref.version - rng.randrange(30)))
        array = ref.get()
        look(name, ref.version, array)
        if rng.random() < 0.2:
            held.append((name, ref.version, array))
        if held and rng.random() < 0.5:
            look(*rng.choice(held))
        if len(held) > 4:
            held.pop(rng.randrange(len(held)))
            gc.collect()
        done += 1
        job.rest(rng)
    return done


def look_at_all(job: Job, versions: Mapping[str, list[int]]) -> None:
    """Every block of these versions."""
    recorder = job.recorder()
    for name, wanted in versions.items():
        for version in wanted:
            array = job.refs[name].at(version).get()
            for block in range(job.n_blocks):
                recorder.plain(name, version, block, value_of(array, block))


def histories(folder: Path) -> list[Event]:
    """What all workers recorded."""
    return [event for path in sorted(folder.glob("*.history")) for event in load(path)]
