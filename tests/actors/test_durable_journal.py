"""A journal of a session with a store: what was synced is there after a power cut."""

from __future__ import annotations

import asyncio
import os
import random
import sqlite3
from pathlib import Path

import pytest

from clamor_ray import errors
from clamor_ray.actors.commits import durable_journal
from clamor_ray.actors.commits.committed import Entry
from clamor_ray.actors.commits.durable_journal import DurableJournal
from clamor_ray.actors.commits.journal import Journal
from tests.support.server_rig import until

WAIT_S = 30.0


def entry(version: int, n_bytes: int = 300) -> Entry:
    return Entry(1, version, version, bytes([version % 251]) * n_bytes)


def commit(journal: Journal, version: int, n_bytes: int = 300) -> None:
    journal.commit(version, [entry(version, n_bytes)], 0.0)


def versions(journal: Journal) -> list[int]:
    return [each.version for each in journal.load().entries]


class PowerCuts:
    """Keeps what is on the disk at each sync: the file, and the log as far as it was then."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.written = 0  # the newest version that the journal has taken
        self.kept: list[tuple[int, bytes, bytes]] = []

    def sync(self, fd: int) -> None:
        written, length = self.written, os.fstat(fd).st_size
        os.fdatasync(fd)
        file = (self.directory / "journal").read_bytes()
        self.kept.append((written, file, os.pread(fd, length, 0)))


@pytest.mark.parametrize("fold_bytes", [1 << 30, 64 << 10])
def test_what_was_synced_is_there_after_a_power_cut(
    fold_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_journal, "FOLD_BYTES", fold_bytes)
    cuts = PowerCuts(tmp_path / "there")
    journal = DurableJournal(tmp_path / "there", cuts.sync)
    n_folds = 0
    fold = journal._fold

    def count() -> None:
        nonlocal n_folds
        n_folds += 1
        fold()

    monkeypatch.setattr(journal, "_fold", count)

    async def work() -> None:
        for version in range(1, 150):
            commit(journal, version)
            cuts.written = version
            if version % 3 == 0:
                await asyncio.wait_for(journal.synced(), WAIT_S)

    asyncio.run(work())
    journal.close()
    assert len(cuts.kept) == 50
    assert (n_folds > 1) == (fold_bytes < 1 << 20)
    chance = random.Random(1)
    for at, (written, file, log) in enumerate(cuts.kept):
        after = tmp_path / f"after-{at}"
        after.mkdir()
        (after / "journal").write_bytes(file)
        # What came after the sync may be there, or not, or in part.
        (after / "journal-wal").write_bytes(log + chance.randbytes(chance.randrange(9000)))
        again = Journal(after)
        assert versions(again)[:written] == list(range(1, written + 1))
        again.close()


def test_what_only_reads_waits_for_no_disk(tmp_path: Path) -> None:
    journal = DurableJournal(tmp_path / "there")

    async def work() -> None:
        await journal.synced()
        journal.load()
        journal.set_states([])
        await journal.synced()
        assert journal.n_syncs == 0
        commit(journal, 1)
        await journal.synced()
        assert journal.n_syncs == 1

    asyncio.run(asyncio.wait_for(work(), WAIT_S))
    journal.close()


def test_it_opens_what_an_ordinary_journal_has_written_and_the_other_way_round(
    tmp_path: Path,
) -> None:
    for n, kind in enumerate((Journal, DurableJournal, Journal), 1):
        journal = kind(tmp_path / "there")
        assert versions(journal) == list(range(1, n))
        commit(journal, n)
        journal.close()


def test_who_opens_it_writes_anew_what_it_finds_in_the_log(tmp_path: Path) -> None:
    """After a sync that failed the kernel may have what the disk has not."""
    first = DurableJournal(tmp_path / "there")
    commit(first, 1)
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("journal", "journal-wal"):
        (copy / name).write_bytes((tmp_path / "there" / name).read_bytes())
    first.close()
    assert versions_in_the_file(copy) == []
    second = DurableJournal(copy)
    assert versions_in_the_file(copy) == [1]
    second.close()


def versions_in_the_file(directory: Path) -> list[int]:
    """Without the log."""
    alone = directory.parent / "alone"
    alone.write_bytes((directory / "journal").read_bytes())
    db = sqlite3.connect(f"file:{alone}?immutable=1", uri=True)
    try:
        return [row[0] for row in db.execute("SELECT version FROM commits")]
    finally:
        db.close()


class FullDisk:
    """In SQLite's way: a file must not be larger than this many pages."""

    def __init__(self, journal: Journal) -> None:
        self._db = journal._db

    def __enter__(self) -> None:
        (n_pages,) = self._db.execute("PRAGMA page_count").fetchone()
        self._db.execute(f"PRAGMA max_page_count={n_pages}")

    def __exit__(self, *_: object) -> None:
        self._db.execute("PRAGMA max_page_count=1073741823")


def test_a_full_disk_changes_nothing_and_says_where(tmp_path: Path) -> None:
    directory = tmp_path / "there"
    journal = DurableJournal(directory)
    commit(journal, 1)

    async def work() -> None:
        await journal.synced()
        with FullDisk(journal), pytest.raises(errors.JournalFullError) as refused:
            commit(journal, 2, 100_000)
        assert str(directory) in refused.value.message
        assert str(directory) in (refused.value.hint or "")
        assert versions(journal) == [1]
        await journal.synced()
        assert journal.n_syncs == 1
        commit(journal, 2)
        await journal.synced()
        assert versions(journal) == [1, 2]

    asyncio.run(asyncio.wait_for(work(), WAIT_S))
    journal.close()


def test_a_log_that_cannot_be_folded_in_grows_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(durable_journal, "FOLD_BYTES", 64 << 10)
    ended: list[BaseException] = []
    journal = DurableJournal(
        tmp_path / "there", on_failure=lambda path, failure: ended.append(failure)
    )
    fold, n_tries = journal._fold, 0
    is_full = True

    def maybe() -> None:
        nonlocal n_tries
        n_tries += 1
        if is_full:
            raise sqlite3.OperationalError("database or disk is full")
        fold()

    monkeypatch.setattr(journal, "_fold", maybe)
    log = tmp_path / "there" / "journal-wal"

    async def work() -> None:
        nonlocal is_full
        for version in range(1, 100):
            commit(journal, version, 4000)
            await journal.synced()
        assert 1 < n_tries < 50  # not with each
        assert log.stat().st_size > 256 << 10
        is_full = False
        for version in range(100, 150):
            commit(journal, version, 4000)
            await journal.synced()
        assert log.stat().st_size < 256 << 10
        assert versions(journal) == list(range(1, 150))

    asyncio.run(asyncio.wait_for(work(), WAIT_S))
    journal.close()
    assert not ended
    assert "cannot be folded in" in caplog.text


def test_a_disk_that_fails_while_the_log_is_folded_in_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(durable_journal, "FOLD_BYTES", 1)
    ended: list[BaseException] = []
    journal = DurableJournal(
        tmp_path / "there", on_failure=lambda path, failure: ended.append(failure)
    )

    def fails() -> None:
        raise sqlite3.OperationalError("disk I/O error")

    monkeypatch.setattr(journal, "_fold", fails)

    async def work() -> None:
        commit(journal, 1)
        await journal.synced()
        await until(lambda: len(ended) > 0)

    asyncio.run(asyncio.wait_for(work(), WAIT_S))
    journal.close()


def test_writes_go_on_while_the_log_is_folded_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its thread and the loop's never have the file at once."""
    monkeypatch.setattr(durable_journal, "FOLD_BYTES", 1)  # after each sync
    journal = DurableJournal(tmp_path / "there")

    async def work() -> None:
        for version in range(1, 300):
            commit(journal, version)
            if version % 2:
                await journal.synced()

    asyncio.run(asyncio.wait_for(work(), WAIT_S))
    assert versions(journal) == list(range(1, 300))
    journal.close()
