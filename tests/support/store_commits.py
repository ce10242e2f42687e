"""A driver that commits to a store until its power is cut, and says what it was answered.

python -m tests.support.store_commits STORE LOG

Transaction n changes five variables at once, and their content says which n was the last: `state`
finds it, and finds anything that no transaction has made. Beside that variables come and go. LOG
lies on another disk: each line is there before its step begins, or once it was answered.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import clamor_ray as clamor

SESSION = "kept"
N_RAID, N_PLAIN, N_PAIR = 1_500_000, 200_000, 5000
RAID_STEP, PLAIN_STEP = 50_021, 9973
EVERY = 5  # so many transactions, and one variable more; an older one goes
N_KEPT = 3

NAMES = ("raid", "plain", "left", "right", "count")


def first(name: str) -> Any:
    """What it is put with."""
    sizes = {"raid": N_RAID, "plain": N_PLAIN, "left": N_PAIR, "right": N_PAIR, "count": 4}
    return np.zeros(sizes[name], np.int64)


def rows(name: str, n: int) -> Any:
    """What transaction n writes n to: in different blocks from one to the next."""
    if name == "raid":
        return np.arange(n * 613 % RAID_STEP, N_RAID, RAID_STEP)
    if name == "plain":
        return np.arange(n * 617 % PLAIN_STEP, N_PLAIN, PLAIN_STEP)
    return np.array([0])


def model(name: str, n: int) -> Any:
    """After n transactions."""
    content = first(name)
    for each in range(1, n + 1):
        content[rows(name, each)] = each
    return content


def state() -> int:
    """How many transactions there were.

    Raises:
        AssertionError: What is there is not what any number of them makes.
    """
    n = int(clamor.open("count").get()[0])
    for name in NAMES:
        found, want = np.asarray(clamor.open(name).get()), model(name, n)
        wrong = np.flatnonzero(found != want)
        assert not len(wrong), (
            f"{name} is not as after transaction {n}: {len(wrong)} rows, from {wrong[0]}, which "
            f"is {found[wrong[0]]} and not {want[wrong[0]]}"
        )
    return n


def coming(n: int) -> Any:
    """Of the variable that is put beside transaction n."""
    return np.full(2000, n)


@dataclass
class Said:
    """What the driver wrote down, in all openings up to now."""

    is_ready: bool = False  # all variables are there
    tried: int = 0
    did: int = 0
    begun: dict[int, str] = field(default_factory=dict)  # of each variable that came: put or free
    answered: dict[int, str] = field(default_factory=dict)


def said_in(log: Path) -> Said:
    """What a log says up to now; nothing where there is none yet."""
    said = Said()
    for line in log.read_text().splitlines() if log.exists() else ():
        kind, *words = line.split()
        said.is_ready |= kind == "ready"
        if kind == "ready":
            continue
        number = int(words[-1])
        if len(words) == 2:
            (said.begun if kind == "try" else said.answered)[number] = words[0]
        elif kind == "try":
            said.tried = number  # of the newest opening: what was cut off is tried again
        else:
            said.did = number
    return said


def check(said: Said) -> int:
    """In a process that has the store open.

    Raises:
        AssertionError: Something that was answered is not there, or something torn is.
    """
    n = state()
    assert said.did <= n <= max(said.tried, said.did), f"state {n}: {said}"
    there = {info.name for info in clamor.variables() if info.name}
    beside = {int(name.split()[1]) for name in there if name.startswith("beside ")}
    for number, what in said.begun.items():
        answered = said.answered.get(number)
        if answered == "put" and what == "put":
            assert number in beside, f"beside {number} was put: {sorted(beside)}"
        if answered == "free":
            assert number not in beside, f"beside {number} was freed"
    assert beside <= set(said.begun)
    for number in beside:
        found = clamor.open(f"beside {number}").get()
        assert np.array_equal(found, coming(number)), f"beside {number}"
    return n


class Log:
    """Of what was begun and what was answered."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def say(self, *words: object) -> None:
        """A line, on the disk when it returns."""
        os.write(self._fd, (" ".join(map(str, words)) + "\n").encode())
        os.fdatasync(self._fd)


def put_first(log: Log) -> None:
    """Those that are not there yet: the last opening may have been cut in the middle of it."""
    there = {info.name for info in clamor.variables()}
    for name in NAMES:
        if name not in there:
            how: dict[str, Any] = {"redundancy": "raid5"} if name == "raid" else {}
            clamor.put(first(name), name=name, **how)
    log.say("ready")


def step(log: Log, n: int) -> None:
    """Transaction n, and what comes and goes beside it."""
    refs = [clamor.open(name) for name in NAMES]
    log.say("try", n)
    with clamor.transaction(*refs) as arrays:
        for name, array in zip(NAMES, arrays, strict=True):
            array[rows(name, n)] = n
    log.say("did", n)
    if n % EVERY == 0:
        name = f"beside {n}"
        if name not in {info.name for info in clamor.variables()}:
            log.say("try put", n)
            clamor.put(coming(n), name=name)
            log.say("did put", n)
        old = n - N_KEPT * EVERY
        if f"beside {old}" in {info.name for info in clamor.variables()}:
            log.say("try free", old)
            clamor.free(clamor.open(f"beside {old}"))
            log.say("did free", old)


def main() -> None:
    import ray

    store, path = sys.argv[1:]
    ray.init(log_to_driver=False)
    print(clamor.init(store=store, session=SESSION).scope, flush=True)
    said = said_in(Path(path))
    log = Log(Path(path))
    n = check(said) if said.is_ready else 0
    put_first(log)
    while True:
        n += 1
        step(log, n)


if __name__ == "__main__":
    main()
