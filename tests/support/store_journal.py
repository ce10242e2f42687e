"""A process that commits to a store's journal until its power is cut.

python -m tests.support.store_journal DISK LOG FOLD_BYTES

Commit n is of n bytes, more or less. LOG lies on another disk: n is there once the journal has said
that commit n is synced. The process begins by looking for what the one before was told.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

from clamor_ray.actors.commits import durable_journal
from clamor_ray.actors.commits.committed import Entry
from clamor_ray.actors.commits.durable_journal import DurableJournal
from tests.support.store_commits import Log

REGION = 1
MOST_AT_ONCE = 6


def entry(n: int) -> Entry:
    """Commit n, which nobody can take for another one."""
    return Entry(REGION, n, n, random.Random(n).randbytes(10 + n % 700))


def answered(log: Path) -> tuple[int, int]:
    """The newest commit that was told to be on the disk, and how many openings there were."""
    words = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
    did = [int(each[1]) for each in words if each[0] == "did"]
    return max(did, default=0), sum(each[0] == "opened" for each in words)


def check(journal: DurableJournal, n_answered: int) -> int:
    """What the journal has.

    Raises:
        AssertionError: A commit that was answered is not there, or one is another, or has a gap
            before it.
    """
    found = {each.version: each for each in journal.load().entries}
    newest = max(found, default=0)
    assert sorted(found) == list(range(1, newest + 1)), "there are gaps"
    assert newest >= n_answered, f"{newest} commits are there, and {n_answered} were answered"
    for n, each in found.items():
        assert each.blocks == entry(n).blocks, f"commit {n} is another"
    return newest


async def commit(journal: DurableJournal, log: Log, n: int) -> None:
    """Some more at a time, and one wait for all: never ends."""
    rng = random.Random(os.getpid())
    while True:
        for _ in range(rng.randint(1, MOST_AT_ONCE)):
            n += 1
            journal.commit(n, [entry(n)], 0.0)
        await journal.synced()
        log.say("did", n)


def main() -> None:
    disk, path, fold_bytes = sys.argv[1:]
    vars(durable_journal)["FOLD_BYTES"] = int(fold_bytes)
    n_answered, n_openings = answered(Path(path))
    log = Log(Path(path))
    journal = DurableJournal(Path(disk, "registry"))
    n = check(journal, n_answered)
    log.say("opened", n_openings + 1)
    asyncio.run(commit(journal, log, n))


if __name__ == "__main__":
    main()
