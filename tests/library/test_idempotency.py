"""The n-th transaction of a task is committed once, however many attempts of it run."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._protocol.config import Config
from clamor_ray._protocol.idempotency import IdempotencyKey, Name, digest_of, key_kept_in
from clamor_ray._protocol.messages import INLINE_BASE, CommitRequest, Write
from clamor_ray._read.ref import GlobalRef
from clamor_ray._session import process_sessions
from clamor_ray._tasks import task_context
from clamor_ray._tasks.task_context import recording
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.committed import Limits
from clamor_ray.actors.commits.journal import Journal
from tests.support.fake_session import BLOCK_BYTES, Cluster, FakeSession

PER_BLOCK = BLOCK_BYTES // 8
TASK, OTHER = bytes(range(16)), bytes(16)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSession]:
    session = FakeSession(Cluster())
    monkeypatch.setattr(process_sessions, "_current", session)
    yield session
    session.cluster.log.check()


@pytest.fixture(params=["region", "inline"])
def ref(session: FakeSession, request: pytest.FixtureRequest) -> GlobalRef[Any]:
    return clamor.put(np.zeros(20 * PER_BLOCK if request.param == "region" else 10))


def name_of(token: bytes, n: int = 0, variables: tuple[int, ...] = (1,)) -> Name:
    return Name(token, digest_of(variables), n)


def attempt_of(token: bytes | None) -> Any:
    return recording(token, read_set="off")


def copy_of(ref: GlobalRef[Any]) -> GlobalRef[Any]:
    copied: GlobalRef[Any] = pickle.loads(pickle.dumps(ref))
    return copied


def add(ref: GlobalRef[Any], index: int = 0) -> None:
    with clamor.update(ref) as x:
        x[index] += 1


def look(ref: GlobalRef[Any], expected: float = 0) -> None:
    with clamor.update(ref) as x:
        assert x[0] == expected


def newest(ref: GlobalRef[Any], index: int = 0) -> float:
    return float(ref._latest().get()[index])


def on_a_thread(function: Callable[[], None]) -> None:
    """This thread has a transaction open."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result(30)


# ------------------------------------------------------------------ the key


def test_words_are_inline_variables_of_task_variables_and_number() -> None:
    ids = {
        name_of(token, n, variables).key_region
        for token in (TASK, OTHER)
        for n in range(100)
        for variables in ((1,), (2,), (1, 2))
    }
    assert len(ids) == 600
    assert all(INLINE_BASE <= region < 2 * INLINE_BASE for region in ids)
    assert name_of(TASK, 3, (1, 2)).key_region == name_of(bytes(TASK), 3, (2, 1)).key_region


def test_a_word_says_which_commit_was_made() -> None:
    key = IdempotencyKey(name_of(TASK, 7), 99)
    write = key.write()
    assert (write.region, write.base_version) == (name_of(TASK, 7).key_region, 0)
    assert key_kept_in(write.region, write.payload) == key
    assert key_kept_in(write.region + 1, write.payload) is None
    assert key_kept_in(write.region, b"something else") is None
    assert key_kept_in(write.region, None) is None


# ------------------------------------------------------------------ the decision


def request_of(commit_id: int, *writes: Write) -> CommitRequest:
    return CommitRequest(commit_id, writes)


def test_the_second_is_told_of_the_word_before_all_else() -> None:
    log = CommitLog()
    counter = INLINE_BASE | 5
    for commit_id in (1, 2):
        request = request_of(
            commit_id,
            IdempotencyKey(name_of(TASK, 0), commit_id).write(),
            Write(counter, 0, 0, b"", 0, 0, payload=b"one"),
        )
        if commit_id == 1:
            log.apply(1, log.prepare(request), 0.0)
    with pytest.raises(errors.CommitConflict) as conflict:
        log.prepare(request)
    assert conflict.value.region == name_of(TASK, 0).key_region
    assert log.newest(counter) == 1


def commit_word(log: CommitLog, journal: Journal, commit_id: int, name: Name) -> None:
    entries = log.prepare(request_of(commit_id, IdempotencyKey(name, commit_id).write()))
    journal.commit(commit_id, entries, 0.0)
    log.apply(commit_id, entries, 0.0)


def drop(log: CommitLog, journal: Journal, *tokens: bytes) -> None:
    journal.drop(log.keys_of(tokens), tokens, log.dropped_too_many(tokens))
    log.drop(tokens)
    log.check()


def restored(journal: Journal, limits: Limits | None = None) -> CommitLog:
    saved, again = journal.load(), CommitLog(limits or Limits())
    again.restore(
        saved.entries,
        saved.plans,
        saved.acknowledged,
        saved.outcomes,
        saved.freed_inline,
        saved.dropped,
    )
    again.check()
    return again


def test_words_are_dropped_with_their_tasks(tmp_path: Path) -> None:
    log, journal = CommitLog(), Journal(tmp_path)
    for commit_id, (token, n) in enumerate([(TASK, 0), (TASK, 1), (OTHER, 0)], 1):
        commit_word(log, journal, commit_id, name_of(token, n))
    assert log.keys_of([OTHER]) == (name_of(OTHER, 0).key_region,)
    nobody = b"nobody" + bytes(10)
    keys = log.keys_of([TASK, nobody])
    assert set(keys) == {name_of(TASK, 0).key_region, name_of(TASK, 1).key_region}
    drop(log, journal, TASK, nobody)
    for known in (log, restored(journal)):
        assert known.keys_of([TASK, OTHER]) == (name_of(OTHER, 0).key_region,)
        for token, n in ((TASK, 0), (TASK, 1), (TASK, 2), (nobody, 0)):
            # One that runs still changes nothing, whether it had a key or not.
            with pytest.raises(errors.FreedError, match="was cancelled"):
                known.prepare(request_of(9, IdempotencyKey(name_of(token, n), 9).write()))
        with pytest.raises(errors.CommitConflict):
            known.prepare(request_of(9, IdempotencyKey(name_of(OTHER, 0), 9).write()))
    journal.close()


def test_what_is_remembered_of_dropped_tasks_is_bounded(tmp_path: Path) -> None:
    limits = Limits(max_dropped=3)
    log, journal = CommitLog(limits), Journal(tmp_path)
    tokens = [bytes([n]) * 16 for n in range(9)]
    drop(log, journal, tokens[8])
    drop(log, journal, *tokens[2:0:-1], tokens[8])
    drop(log, journal, tokens[4], tokens[4])
    assert list(log._dropped) == [tokens[2], tokens[1], tokens[4]]
    assert list(restored(journal, limits)._dropped) == list(log._dropped)
    drop(log, journal, *tokens[3:8])
    assert list(log._dropped) == tokens[5:8]
    assert list(restored(journal, limits)._dropped) == list(log._dropped)
    journal.close()


def test_dropped_words_do_not_drive_out_freed_variables(tmp_path: Path) -> None:
    log, journal = CommitLog(Limits(max_freed_inline=2)), Journal(tmp_path)
    users = INLINE_BASE | 5
    journal.free_inline([users], log.freed_too_many())
    log.close(users)
    for n in range(5):
        commit_word(log, journal, n + 1, name_of(TASK, n))
    drop(log, journal, TASK)
    for known in (log, restored(journal)):
        with pytest.raises(errors.FreedError):
            known.latest(users)
    journal.close()


# ------------------------------------------------------------------ attempts


def test_without_a_token_every_commit_counts(ref: GlobalRef[Any]) -> None:
    for expected in (1, 2):
        with attempt_of(None) as attempt:
            add(copy_of(ref))
        assert attempt.commits == 1
        assert newest(ref) == expected


def test_a_second_attempt_changes_nothing(session: FakeSession, ref: GlobalRef[Any]) -> None:
    references = []
    for _ in range(2):
        mine = copy_of(ref)
        with attempt_of(TASK) as attempt:
            add(mine)
            add(mine, 1)
        assert attempt.commits == 2
        references.append(mine)
    assert (newest(ref), newest(ref, 1)) == (1, 1)
    assert [mine.version for mine in references] == [2, 2]
    assert not session.cluster.staged
    with attempt_of(OTHER):
        add(references[1])
    assert newest(ref) == 2


def test_one_that_began_before_the_other_committed_changes_nothing(ref: GlobalRef[Any]) -> None:
    late = copy_of(ref)
    with attempt_of(TASK):
        transaction = clamor.update(late)
        x = transaction.begin()
        x[0] += 1
    with attempt_of(TASK):
        on_a_thread(lambda: add(copy_of(ref)))
    with attempt_of(TASK) as attempt:
        assert transaction.commit() == (1,)
    assert transaction.status == "committed"
    assert (attempt.commits, late.version, newest(ref)) == (1, 1, 1)


def test_the_reference_moves_to_what_was_made_and_no_further(ref: GlobalRef[Any]) -> None:
    with attempt_of(TASK):
        add(copy_of(ref))
    late = ref.snapshot()
    add(copy_of(ref))
    thawed = late._thawed()
    with attempt_of(TASK), clamor.update(thawed) as x:
        x[3] = 7
    # Its own beginning was newer than what had been made: it stays there.
    assert thawed.version == 2
    assert (newest(ref), newest(ref, 3)) == (2, 0)


def test_another_variable_is_not_moved(session: FakeSession, ref: GlobalRef[Any]) -> None:
    other = clamor.put(np.zeros(10))
    with attempt_of(TASK), clamor.transaction(copy_of(ref), copy_of(other)) as (x, _):
        x[0] += 1
    with attempt_of(TASK), clamor.transaction(ref, other) as (x, y):
        x[0] += 1
        y[0] += 1
    assert (ref.version, other.version) == (1, 0)
    assert (newest(ref), newest(other)) == (1, 0)


def test_a_real_conflict_is_one(ref: GlobalRef[Any]) -> None:
    with attempt_of(TASK) as attempt:
        transaction = clamor.update(copy_of(ref))
        transaction.begin()[0] += 1
        on_a_thread(lambda: add(ref))  # the 0th
        with pytest.raises(errors.CommitConflict) as conflict:
            transaction.commit()
    assert conflict.value.region == ref._region
    assert (transaction.status, attempt.commits) == ("aborted", 1)
    assert newest(ref) == 1


def test_a_conflict_does_not_count(ref: GlobalRef[Any]) -> None:
    """The first attempt meets a rival and tries again; the second meets none."""
    with attempt_of(TASK):
        transaction = clamor.update(copy_of(ref))
        transaction.begin()[0] += 1
        rival(ref)
        with pytest.raises(errors.CommitConflict):
            transaction.commit()
        add(copy_of(ref))
        add(copy_of(ref), 1)
    with attempt_of(TASK):
        add(copy_of(ref))
        add(copy_of(ref), 1)
    assert (newest(ref), newest(ref, 1)) == (2, 1)


def rival(ref: GlobalRef[Any]) -> None:
    """A commit of another process, of which this attempt knows nothing."""
    attempt, task_context._current = task_context._current, None
    try:
        on_a_thread(lambda: add(copy_of(ref)))
    finally:
        task_context._current = attempt


def test_an_empty_transaction_commits_its_word(session: FakeSession, ref: GlobalRef[Any]) -> None:
    for looks in (True, False):
        with attempt_of(TASK) as attempt:
            with clamor.update(copy_of(ref)) as x:
                if not looks:
                    assert x[1] == 1
            add(copy_of(ref), 1)
        assert attempt.commits == 2
    assert (newest(ref, 1), ref._latest().version) == (1, 1)
    keys = {name_of(TASK, n, (ref._region,)).key_region for n in (0, 1)}
    assert set(session.cluster.log.keys_of([TASK])) == keys


def test_what_was_empty_is_empty_for_all_attempts(ref: GlobalRef[Any]) -> None:
    """The first attempt commits what the condition of the next one's first transaction sees."""

    def work(mine: GlobalRef[Any]) -> None:
        with clamor.update(mine) as x:
            if x[0]:
                x[0] = 0
        with clamor.update(mine) as x:
            x[0] += 5

    for _ in range(2):
        mine = copy_of(ref)
        with attempt_of(TASK) as attempt:
            work(mine)
        assert (attempt.commits, mine.version, newest(ref)) == (2, 1, 5)


def test_an_empty_transaction_is_made_though_its_answer_was_lost(
    session: FakeSession, ref: GlobalRef[Any]
) -> None:
    session.config = Config(reattach_s=0.0)
    with attempt_of(TASK) as attempt:
        session.cluster.answer_lost = ["commit"] * 3
        with pytest.raises(errors.ServerUnavailableError) as failure:
            look(copy_of(ref))
        session.cluster.answer_lost = []
        assert failure.value.transaction.commit() == (0,)
        add(copy_of(ref))
    assert (attempt.commits, newest(ref)) == (2, 1)


def test_without_a_token_an_empty_transaction_sends_nothing(
    session: FakeSession, ref: GlobalRef[Any]
) -> None:
    with attempt_of(None):
        look(copy_of(ref))
    assert "commit" not in session.cluster.calls


@pytest.mark.parametrize("swapped", [False, True])
def test_threads_that_commit_different_variables_keep_their_names(
    session: FakeSession, ref: GlobalRef[Any], swapped: bool
) -> None:
    """Whichever thread is first: each of its commits is made once."""
    other = clamor.put(np.zeros(10))
    with attempt_of(TASK):
        add(copy_of(ref))  # it dies before it comes to the other one
    with attempt_of(TASK) as attempt:
        for variable in (other, ref) if swapped else (ref, other):
            on_a_thread(lambda variable=variable: add(copy_of(variable)))  # type: ignore[misc]
    assert attempt.commits == 2
    assert (newest(ref), newest(other)) == (1, 1)


def test_a_caught_conflict_moves_no_name_of_other_variables(ref: GlobalRef[Any]) -> None:
    """The first attempt loses one transaction and goes on; the second loses none."""
    other = clamor.put(np.zeros(10))
    with attempt_of(TASK):
        transaction = clamor.update(copy_of(ref))
        transaction.begin()[0] += 1
        rival(ref)
        with pytest.raises(errors.CommitConflict):
            transaction.commit()
        add(copy_of(other))
    with attempt_of(TASK):
        add(copy_of(ref))
        add(copy_of(other))
    assert (newest(ref), newest(other)) == (2, 1)


def test_what_an_attempt_made_itself_names_nothing(
    session: FakeSession, ref: GlobalRef[Any]
) -> None:
    """In another attempt it is another variable."""
    for _ in range(2):
        with attempt_of(TASK) as attempt:
            own = clamor.put(np.zeros(20 * PER_BLOCK))
            add(own)
            assert newest(own) == 1
            with clamor.transaction(copy_of(ref), own) as (x, y):
                x[0] += 1
                y[1] += 1
        assert attempt.commits == 2
    assert newest(ref) == 1
    keys = session.cluster.log.keys_of([TASK])
    assert keys == (name_of(TASK, 0, (ref._region,)).key_region,)


def write_and_fail(ref: GlobalRef[Any]) -> None:
    with clamor.update(ref) as x:
        x[0] = 100
        raise KeyError


def test_what_raises_does_not_count(ref: GlobalRef[Any]) -> None:
    for _ in range(2):
        with attempt_of(TASK) as attempt:
            with pytest.raises(KeyError):
                write_and_fail(copy_of(ref))
            add(copy_of(ref))
        assert attempt.commits == 1
    assert newest(ref) == 1


def test_the_answer_to_the_first_attempt_was_lost(
    session: FakeSession, ref: GlobalRef[Any]
) -> None:
    session.config = Config(reattach_s=0.0)
    session.cluster.answer_lost = ["commit"] * 3
    with attempt_of(TASK), pytest.raises(errors.ServerUnavailableError):
        add(copy_of(ref))
    session.cluster.answer_lost = []
    with attempt_of(TASK):
        add(copy_of(ref))
    assert newest(ref) == 1


def test_the_answer_was_lost_and_the_attempt_goes_on(
    session: FakeSession, ref: GlobalRef[Any]
) -> None:
    """What comes after it must not be taken for it."""
    session.config = Config(reattach_s=0.0)
    with attempt_of(TASK) as attempt:
        session.cluster.answer_lost = ["commit"] * 3
        with pytest.raises(errors.ServerUnavailableError):
            add(copy_of(ref))
        session.cluster.answer_lost = []
        add(copy_of(ref), 1)
    assert attempt.commits == 2
    assert (newest(ref), newest(ref, 1)) == (1, 1)


def test_the_answer_was_lost_and_nothing_was_committed(
    session: FakeSession, ref: GlobalRef[Any]
) -> None:
    session.config = Config(reattach_s=0.0)

    def down(name: str) -> None:
        if name == "commit":
            raise errors.ServerUnavailableError("It is down.")

    with attempt_of(TASK) as attempt:
        session.cluster.fail = down
        with pytest.raises(errors.ServerUnavailableError) as failure:
            add(copy_of(ref))
        session.cluster.fail = lambda name: None
        failure.value.transaction.commit()
        add(copy_of(ref), 1)
    assert attempt.commits == 2
    assert (newest(ref), newest(ref, 1)) == (1, 1)


def test_threads_of_an_attempt_do_not_share_a_word(ref: GlobalRef[Any]) -> None:
    n_threads = 8

    def work(index: int) -> None:
        clamor.retry(lambda: add(copy_of(ref), index))

    with attempt_of(TASK) as attempt:
        threads = [threading.Thread(target=work, args=(index,)) for index in range(n_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
    assert attempt.commits == n_threads
    assert ref._latest().get()[:n_threads].tolist() == [1] * n_threads


def test_a_dropped_task_commits_nothing(session: FakeSession, ref: GlobalRef[Any]) -> None:
    """An attempt that nobody could end goes on, while another run does its work again."""
    for committed_before in (0, 1):
        late = copy_of(ref)
        with attempt_of(TASK) as attempt:
            for _ in range(committed_before):
                add(late)
            session.cluster.log.drop([TASK])
            with pytest.raises(errors.FreedError, match="cancelled"):
                add(late)
            with pytest.raises(errors.FreedError, match="cancelled"):
                look(late, late.get()[0])
        assert attempt.commits == committed_before
        assert not session.cluster.log.keys_of([TASK])
        assert not session.cluster.staged
        session.cluster.log._dropped.clear()
    assert newest(ref) == 1


def test_tokens_have_16_bytes() -> None:
    with pytest.raises(ValueError, match="16 bytes"), recording(b"short"):
        pass


def test_one_attempt_at_a_time() -> None:
    with (
        recording(None, read_set="off"),
        pytest.raises(ValueError, match="already"),
        recording(None),
    ):
        pass
    with recording(None, read_set="off") as attempt:
        pass
    assert attempt.reads() == []
