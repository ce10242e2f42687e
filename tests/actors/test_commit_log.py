"""Commits: who wins, what is remembered, and for how long; against a model that remembers all."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._protocol.messages import (
    INLINE_BASE,
    CommitRequest,
    Committed,
    Latest,
    Publication,
    Write,
)
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.committed import Entry, Limits

HOME, WRITER = 0xA, 0xB
INLINE = INLINE_BASE + 5


def write(region: int, base: int, *blocks: int, plan: bytes | None = None) -> Write:
    return Write(region, base, len(blocks), BitMap(blocks).serialize(), 8192, WRITER, plan)


def inline(base: int, payload: bytes) -> Write:
    return Write(INLINE, base, 0, b"", 0, WRITER, None, payload)


def commit(log: CommitLog, commit_id: int, *writes: Write, now_s: float = 0.0) -> dict[int, int]:
    return log.apply(commit_id, log.prepare(CommitRequest(commit_id, writes)), now_s).versions


@pytest.fixture
def log() -> CommitLog:
    log = CommitLog()
    log.open(1, (HOME,))
    log.open(2, (HOME, HOME))
    return log


def test_the_first_committer_wins_and_the_loser_learns_where(log: CommitLog) -> None:
    assert commit(log, 10, write(1, 0, 5, 6, 7)) == {1: 1}
    assert commit(log, 11, write(1, 0, 8)) == {1: 2}  # other blocks: no conflict
    with pytest.raises(errors.CommitConflict) as caught:
        log.prepare(CommitRequest(12, (write(1, 0, 3, 6, 7, 9),)))
    error = pickle.loads(pickle.dumps(caught.value))
    assert (error.region, error.base_version, error.version) == (1, 0, 1)
    assert (error.first_block, error.n_blocks) == (6, 2)
    assert "Blocks 6 to 7 of variable 1 were changed" in error.message
    with pytest.raises(errors.CommitConflict, match="Block 8 of variable 1 was changed"):
        log.prepare(CommitRequest(12, (write(1, 1, 8),)))
    assert commit(log, 13, write(1, 2, 3, 6, 7, 9)) == {1: 3}


def name_of(region: int) -> str:
    return {1: "variable 'one'", INLINE: "variable 'inline'"}.get(region, f"variable {region}")


def test_errors_say_the_name() -> None:
    log = CommitLog(Limits(max_commits=2, max_payloads=1), label=name_of)
    log.open(1, (HOME,), 10 * 4096)
    commit(log, 10, write(1, 0, 5, plan=b"plan"), inline(0, b"one"))

    def refused(*writes: Write) -> str:
        with pytest.raises(errors.ClamorError) as caught:
            log.prepare(CommitRequest(99, writes))
        return caught.value.message

    assert refused(write(1, 0, 5)).startswith("Block 5 of variable 'one' was changed")
    assert refused(write(1, 0, plan=b"other")).startswith("The layout of variable 'one' was")
    assert refused(inline(0, b"two")).startswith("Variable 'inline' was changed to version 1")
    assert "read version 7 of variable 'one', whose newest is 1" in refused(write(1, 7, 5))
    assert "changes block 10 of variable 'one', which has 10" in refused(write(1, 1, 10))
    assert "for variable 'one'" in refused(Write(1, -1, 0, b"", 0, WRITER))
    assert "blocks of variable 'one' come without a layer" in refused(
        Write(1, 1, 1, BitMap([5]).serialize(), 0, WRITER)
    )
    assert refused(write(3, 0, 5)) == "Variable 3 was freed, or never existed."
    with pytest.raises(errors.NoVersionError, match="version 9 of variable 'one'"):
        log.at(1, 9)
    for base in range(1, 5):
        commit(log, 10 + base, write(1, base, 6, plan=b"plan"), inline(base, b"more"))
        log.acknowledge(HOME, 1, base + 1)
    log.trim(0.0)
    assert refused(write(1, 0, 5)).startswith("The transaction read version 0 of variable 'one'")
    for region, version in ((1, 1), (INLINE, 1)):
        with pytest.raises(errors.SnapshotExpired, match=f"Version 1 of {name_of(region)} is"):
            log.at(region, version)
    with pytest.raises(errors.SnapshotExpired, match="commits of variable 'one' before"):
        log.published(1, 0)
    log.close(1)
    assert refused(write(1, 5, 5)) == "Variable 'one' was freed, or never existed."


def test_all_writes_of_a_request_or_none(log: CommitLog) -> None:
    commit(log, 10, write(2, 0, 5))
    with pytest.raises(errors.CommitConflict):
        log.prepare(CommitRequest(11, (write(1, 0, 5), write(2, 0, 5))))
    assert (log.newest(1), log.newest(2)) == (0, 1)
    assert commit(log, 12, write(1, 0, 5), write(2, 1, 5), inline(0, b"x")) == {
        1: 1,
        2: 2,
        INLINE: 1,
    }


def test_a_base_that_does_not_exist(log: CommitLog) -> None:
    with pytest.raises(errors.NoVersionError, match="newest is 0"):
        log.prepare(CommitRequest(1, (write(1, 1, 5),)))
    with pytest.raises(errors.NoVersionError):
        log.prepare(CommitRequest(1, (inline(1, b""),)))
    with pytest.raises(errors.NoVersionError):
        log.changes(1, 0, 1)
    with pytest.raises(errors.NoVersionError):
        log.at(1, 1)


def test_nonsense_is_refused(log: CommitLog) -> None:
    for request in (
        CommitRequest(0, (write(1, 0, 5),)),
        CommitRequest(1, ()),
        CommitRequest(1, (write(1, 0, 5), write(1, 0, 6))),
        CommitRequest(1, (Write(1, 0, 0, b"", 0, 0, None, b"payload"),)),
        CommitRequest(1, (write(INLINE, 0, 5),)),
    ):
        with pytest.raises(errors.ProtocolError):
            log.prepare(request)


def test_freed_and_unknown_variables(log: CommitLog) -> None:
    commit(log, 10, write(1, 0, 5), inline(0, b"one"))
    log.close(1)
    log.close(INLINE)
    for region in (1, 3, INLINE):
        with pytest.raises(errors.FreedError):
            log.latest(region)
    with pytest.raises(errors.FreedError):
        log.prepare(CommitRequest(11, (write(1, 1, 5),)))
    with pytest.raises(errors.FreedError):
        log.prepare(CommitRequest(11, (inline(1, b"two"),)))
    # Readers that are left go on: their page servers may ask.
    assert log.changes(1, 0, 1) == BitMap([5])
    assert log.published(1, 0) == [(1, 10)]
    log.forget(1)
    with pytest.raises(errors.FreedError):
        log.published(1, 0)


def test_the_same_commit_has_the_same_answer(log: CommitLog) -> None:
    commit(log, 10, write(1, 0, 5))
    assert log.answered(10) == Committed({1: 1})
    assert log.outcome(10) == {1: 1}
    assert log.answered(11) is None


def test_a_commit_asked_about_before_it_came_is_refused(log: CommitLog) -> None:
    assert log.outcome(10) is None
    log.abort(10, 0.0)
    assert log.outcome(10) == {}
    assert log.answered(10) is None
    with pytest.raises(errors.CommitAbortedError):
        log.prepare(CommitRequest(10, (write(1, 0, 5),)))
    commit(log, 11, write(1, 0, 5))
    log.abort(11, 0.0)  # too late
    assert log.outcome(11) == {1: 1}


def test_plans_are_valid_from_their_version_on(log: CommitLog) -> None:
    assert log.latest(1) == Latest(1, 0)
    commit(log, 10, write(1, 0, 5, plan=b"one"))
    commit(log, 11, write(1, 1, 5))
    commit(log, 12, write(1, 2, plan=b"three"))
    assert log.latest(1) == Latest(1, 3, b"three")
    assert [log.at(1, v).plan for v in range(4)] == [None, b"one", b"one", b"three"]
    with pytest.raises(errors.CommitConflict, match="layout") as caught:
        log.prepare(CommitRequest(13, (write(1, 2, 99, plan=b"other"),)))
    assert (caught.value.version, caught.value.n_blocks) == (3, 0)
    assert commit(log, 14, write(1, 2, 99)) == {1: 4}


def test_an_inline_variable_is_one_block() -> None:
    log = CommitLog(Limits(max_payloads=3))
    assert log.latest(INLINE) == Latest(INLINE, 0)
    for base in range(6):
        assert commit(log, 10 + base, inline(base, b"%d" % (base + 1))) == {INLINE: base + 1}
    with pytest.raises(errors.CommitConflict) as caught:
        log.prepare(CommitRequest(99, (inline(5, b"late"),)))
    assert (caught.value.region, caught.value.base_version, caught.value.version) == (INLINE, 5, 6)
    assert len(log.trim(0.0).commits) == 3
    assert log.latest(INLINE) == Latest(INLINE, 6, None, b"6")
    assert log.at(INLINE, 4).payload == b"4"
    assert log.at(INLINE, 0) == Latest(INLINE, 0)  # it is in every reference
    with pytest.raises(errors.SnapshotExpired):
        log.at(INLINE, 3)


def test_below_the_log_anything_may_have_changed() -> None:
    log = CommitLog(Limits(max_commits=3))
    log.open(1, ())
    for base in range(5):
        commit(log, 10 + base, write(1, base, base, plan=b"%d" % base))
    trimmed = log.trim(0.0)
    assert trimmed.commits == ((1, 1), (1, 2))
    assert trimmed.plans == ((1, 1),)  # that of version 2 is valid at the horizon
    assert log.changes(1, 1, 5) is None
    assert log.changes(1, 2, 5) == log.changes(1, 5, 2) == BitMap([2, 3, 4])
    assert log.changes(1, 2, 2) == BitMap()
    assert log.at(1, 2).plan == b"1"
    with pytest.raises(errors.SnapshotExpired):
        log.at(1, 1)
    with pytest.raises(errors.SnapshotExpired):
        log.published(1, 1)
    with pytest.raises(errors.CommitConflict, match="known no longer") as caught:
        log.prepare(CommitRequest(99, (write(1, 1, 1000),)))
    assert "newest version" in caught.value.hint
    log.check()


@pytest.mark.parametrize(("first_plan", "expired"), [(2, True), (4, False)])
def test_after_a_restart_a_first_plan_is_not_the_only_one(first_plan: int, expired: bool) -> None:
    """Version 3 is the horizon: a plan was forgotten only if a newer one is valid there."""
    log = CommitLog()
    log.open(1, ())
    entries = [Entry(1, version, 10 + version, b"") for version in (4, 5)]
    log.restore(entries, [(1, first_plan, b"plan")], (), (), ())
    log.check()
    assert log.at(1, 5).plan == b"plan"
    if expired:
        with pytest.raises(errors.SnapshotExpired):
            log.at(1, 1)
    else:
        assert log.at(1, 3).plan is None


def test_what_a_home_does_not_know_is_kept() -> None:
    log = CommitLog(Limits(max_commits=2, max_outcomes=0, outcome_s=10.0))
    log.open(1, (HOME, WRITER))
    for base in range(5):
        commit(log, 10 + base, write(1, base, 0))
    assert not log.trim(100.0)
    assert set(log.homes_behind()) == {HOME, WRITER}
    assert log.unacknowledged(HOME, 2) == [Publication(1, 1, 10), Publication(1, 2, 11)]
    assert log.acknowledge(HOME, 1, 5)
    assert not log.acknowledge(HOME, 1, 4)  # old news
    assert log.homes_behind() == (WRITER,)
    assert not log.trim(100.0)
    assert log.acknowledge(WRITER, 1, 2)
    assert log.trim(5.0).outcomes == ()  # young
    trimmed = log.trim(100.0)
    assert trimmed.outcomes == (10, 11)
    log.server_lost(WRITER)
    assert log.homes_behind() == ()
    assert log.trim(100.0).outcomes == ()  # the lost home may have been the only one with them
    log.rehome(1, HOME)
    assert log.trim(100.0).outcomes == (12, 13, 14)
    assert log.published(1, 3) == [(4, 13), (5, 14)]
    log.check()


def test_what_all_homes_have_acknowledged() -> None:
    log = CommitLog()
    log.open(1, (HOME, WRITER))
    for base in range(3):
        commit(log, 10 + base, write(1, base, 0))
    assert log.settled(1) == 0
    log.acknowledge(HOME, 1, 3)
    log.acknowledge(WRITER, 1, 2)
    assert log.settled(1) == 2
    log.server_lost(WRITER)  # with all that it had: the other's word is not enough
    assert log.settled(1) == 0
    log.open(2, (WRITER,))  # as after a restart of the registry
    assert log.settled(2) == 0
    for region, newest in ((1, 3), (2, 0)):
        log.rehome(region, HOME)
        assert log.settled(region) == newest
    commit(log, 20, write(1, 3, 0))
    assert log.settled(1) == 3
    with pytest.raises(errors.FreedError):
        log.settled(99)


def test_nothing_is_forgotten_between_the_loss_of_a_home_and_its_rebuild() -> None:
    """The rebuild, and writers that ask what became of their commit, need it."""
    log = CommitLog(Limits(max_commits=2, max_outcomes=0, outcome_s=0.0))
    log.open(1, (HOME,))
    for number in range(5):
        commit(log, 10 + number, write(1, number, number))
    log.acknowledge(HOME, 1, 3)
    log.server_lost(HOME)
    assert not log.trim(10.0)
    assert log.horizon(1) == 0
    assert log.outcome(10) == {1: 1}
    log.check()
    log.rehome(1, WRITER)
    trimmed = log.trim(10.0)
    assert trimmed.commits == ((1, 1), (1, 2), (1, 3))
    assert set(trimmed.outcomes) == set(range(10, 15))
    log.check()


def test_all_commits_together_stay_within_their_budget() -> None:
    log = CommitLog(Limits(budget_bytes=100_000))
    blocks = list(range(0, 4000, 7))
    for region in range(1, 6):
        log.open(region, ())
    for base in range(100):
        for region in range(1, 6):
            commit(log, 1 + base * 5 + region, write(region, base, *blocks))
        log.trim(0.0)
        log.check()
        assert log._bytes <= 100_000
    assert all(log.newest(region) == 100 for region in range(1, 6))
    assert log.changes(1, 99, 100) == BitMap(blocks)


def test_what_a_live_collection_could_need_is_trimmed_last() -> None:
    log = CommitLog(Limits(max_commits=3, max_retained=10))
    log.retain({1: 2, 2: 0})  # before they are known
    for region in (1, 2, 3):
        log.open(region, ())
        for base in range(8):
            plan = b"%d" % (base + 1) if base % 3 == 0 else None  # of versions 1, 4, 7
            commit(log, 10 * region + base, write(region, base, base, plan=plan))
    trimmed = log.trim(0.0)
    log.check()
    assert sorted(trimmed.commits) == [(1, 1), (1, 2), *((3, v) for v in range(1, 6))]
    assert trimmed.retained == ()
    assert log.retained_expired == 0
    assert log.changes(1, 2, 8) == BitMap(range(2, 8))
    assert log.changes(1, 1, 8) is None
    assert log.at(1, 2).plan == log.at(1, 3).plan == b"1"
    assert log.published(1, 2)[0] == (3, 12)
    assert log.changes(2, 0, 8) == BitMap(range(8))
    # What only the old floor held goes at once.
    log.retain({1: 4, 2: None})
    trimmed = log.trim(0.0)
    assert sorted(trimmed.commits) == [(1, 3), (1, 4), *((2, v) for v in range(1, 6))]
    assert trimmed.plans == ((1, 1), (2, 1)) or trimmed.plans == ((2, 1), (1, 1))
    assert trimmed.retained == ()
    assert log.at(1, 4).plan == b"4"
    # Bounded all the same, and said.
    for base in range(8, 20):
        commit(log, 100 + base, write(1, base, base))
    trimmed = log.trim(0.0)
    assert trimmed.commits == tuple((1, v) for v in range(5, 11))
    assert trimmed.retained == ((1, 10),)
    assert log.retained_expired == 6
    assert log.changes(1, 10, 20) == BitMap(range(10, 20))
    with pytest.raises(errors.SnapshotExpired):
        log.published(1, 9)
    log.forget(1)
    log.open(1, ())
    for base in range(8):
        commit(log, 200 + base, write(1, base, base))
    assert len(log.trim(0.0).commits) == 5  # a floor goes with its variable
    log.check()


def test_contents_that_a_live_collection_could_need_are_trimmed_last() -> None:
    log = CommitLog(Limits(max_payloads=2, max_retained=5))
    log.retain({INLINE: 3})
    for base in range(6):
        commit(log, 10 + base, inline(base, b"%d" % (base + 1)))
    assert log.trim(0.0).commits == ((INLINE, 1), (INLINE, 2))
    assert log.at(INLINE, 3).payload == b"3"  # its own content, not only what came after it
    with pytest.raises(errors.SnapshotExpired):
        log.at(INLINE, 2)
    for base in range(6, 9):
        commit(log, 10 + base, inline(base, b"%d" % (base + 1)))
    trimmed = log.trim(0.0)
    assert trimmed.commits == ((INLINE, 3), (INLINE, 4))
    assert trimmed.retained == ((INLINE, 5),)
    assert log.retained_expired == 2
    assert log.at(INLINE, 5).payload == b"5"
    with pytest.raises(errors.SnapshotExpired):
        log.at(INLINE, 4)
    log.check()
    log.retain({INLINE: None})
    assert len(log.trim(0.0).commits) == 3
    with pytest.raises(ValueError):
        log.retain({INLINE: 8, 1: -1})
    log.check()
    assert log._floors == {}


def test_the_budget_is_one_for_what_is_retained_too() -> None:
    log = CommitLog(Limits(budget_bytes=100_000))
    blocks = list(range(0, 4000, 7))
    log.retain({1: 5})
    for region in range(1, 6):
        log.open(region, ())
    for base in range(25):
        commit(log, 1 + base, write(1, base, *blocks))
    for base in range(200):
        for region in range(2, 6):
            commit(log, 1000 * region + base, write(region, base, *blocks))
        assert log.trim(0.0).retained == ()
        log.check()
        assert log._bytes <= 100_000
    assert log.changes(1, 5, 25) == BitMap(blocks)
    lost: dict[int, int] = {}
    for base in range(25, 200):
        commit(log, 1 + base, write(1, base, *blocks))
        lost |= log.trim(0.0).retained
        log.check()
        assert log._bytes <= 100_000
    assert lost[1] == log._variables[1].horizon > 5
    assert log.retained_expired == lost[1] - 5


@dataclass
class Told:
    """All that ever happened to one variable."""

    commits: list[tuple[int, frozenset[int], bytes | None]] = field(default_factory=list)
    freed: bool = False


class Against(RuleBasedStateMachine):
    """The log against lists that nobody trims, with restarts in between."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = Limits(
            max_commits=5, max_outcomes=8, outcome_s=3.0, budget_bytes=6000, max_retained=9
        )
        self.floors: dict[int, int] = {}
        self.promised: dict[int, int] = {}  # region -> a version since when changes are known
        self.log = CommitLog(self.limits)
        self.model: dict[int, Told] = {}
        self.outcomes: dict[int, dict[int, int]] = {}
        self.saved: dict[tuple[int, int], Entry] = {}
        self.acknowledged: dict[tuple[int, int], int] = {}
        self.forgotten: set[int] = set()
        self.next_id = 1
        self.now_s = 0.0

    @initialize()
    def begin(self) -> None:
        for region in (1, 2, 3):
            self.log.open(region, (HOME,))
            self.model[region] = Told()

    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from([1, 2, 3]), min_size=1, unique=True))
        writes = []
        for region in chosen:
            newest = len(self.model[region].commits)
            base = data.draw(st.integers(max(0, newest - 7), newest + 1))
            blocks = data.draw(st.frozensets(st.integers(0, 12), max_size=4))
            plan = data.draw(st.sampled_from([None, None, b"p%d" % self.next_id]))
            writes.append((write(region, base, *blocks, plan=plan), blocks))
        commit_id, self.next_id = self.next_id, self.next_id + 1
        request = CommitRequest(commit_id, tuple(w for w, _ in writes))
        expected: type[Exception] | None = None
        for w, blocks in writes:
            told = self.model[w.region]
            if told.freed:
                expected = expected or errors.FreedError
            elif w.base_version > len(told.commits):
                expected = expected or errors.NoVersionError
            else:
                clash = any(
                    their & blocks or (w.plan is not None and plan is not None)
                    for _, their, plan in told.commits[w.base_version :]
                )
                if clash or w.base_version < self.log._variables[w.region].horizon:
                    expected = expected or errors.CommitConflict
        if expected is not None:
            with pytest.raises(expected):
                self.log.prepare(request)
            return
        entries = self.log.prepare(request)
        answer = self.log.apply(commit_id, entries, self.now_s)
        for entry, (w, blocks) in zip(entries, writes, strict=True):
            self.model[w.region].commits.append((commit_id, blocks, w.plan))
            assert answer.versions[w.region] == len(self.model[w.region].commits)
            self.saved[entry.region, entry.version] = entry
        self.outcomes[commit_id] = answer.versions

    @rule(region=st.sampled_from([1, 2, 3]), n=st.integers(2, 8), part=st.floats(0, 1))
    def grow(self, region: int, n: int, part: float) -> None:
        """Commits that meet nobody: with random ones alone a variable hardly gets anywhere."""
        told = self.model[region]
        for _ in range(0 if told.freed else n):
            commit_id, self.next_id = self.next_id, self.next_id + 1
            base = len(told.commits)
            request = CommitRequest(commit_id, (write(region, base, base % 13),))
            (entry,) = self.log.prepare(request)
            self.outcomes[commit_id] = self.log.apply(commit_id, (entry,), self.now_s).versions
            told.commits.append((commit_id, frozenset({base % 13}), None))
            self.saved[region, entry.version] = entry
        self.acknowledge(region, max(part, 0.5))

    @rule(region=st.sampled_from([1, 2, 3]), part=st.floats(0, 1))
    def acknowledge(self, region: int, part: float) -> None:
        version = int(part * len(self.model[region].commits))
        if self.log.acknowledge(HOME, region, version):
            self.acknowledged[region, HOME] = version

    @rule(offset=st.integers(0, 3))
    def ask_outcome(self, offset: int) -> None:
        commit_id = max(1, self.next_id - offset)
        found = self.log.outcome(commit_id)
        if commit_id in self.forgotten:
            return
        assert found == self.outcomes.get(commit_id)
        if found is None:
            self.log.abort(commit_id, self.now_s)
            self.outcomes[commit_id] = {}
            self.next_id = max(self.next_id, commit_id + 1)

    @rule(seconds=st.floats(0, 4))
    def trim(self, seconds: float) -> None:
        self.now_s += seconds
        before = {r: self.log._variables[r].settled for r in self.model}
        expired = self.log.retained_expired
        sizes = {r: len(self.log._variables[r].entries) for r in self.model}
        is_full = self.log._bytes > self.limits.budget_bytes
        trimmed = self.log.trim(self.now_s)
        assert (self.log.retained_expired > expired) == bool(trimmed.retained)
        for region, version in trimmed.retained:
            assert is_full or sizes[region] > self.limits.max_retained
            assert version == self.log._variables[region].horizon > self.promised[region]
            self.promised[region] = version
        for region, version in trimmed.commits:
            assert version <= before[region]
            entry = self.saved[region, version]
            if entry.plan is None or (region, version) in trimmed.plans:
                del self.saved[region, version]
        self.forgotten.update(trimmed.outcomes)

    @rule(region=st.sampled_from([1, 2, 3]), back=st.none() | st.integers(0, 12))
    def retain(self, region: int, back: int | None) -> None:
        floor = None if back is None else max(0, len(self.model[region].commits) - back)
        self.log.retain({region: floor})
        self.floors.pop(region, None)
        self.promised.pop(region, None)
        if floor is not None:
            self.floors[region] = floor
            self.promised[region] = max(floor, self.log._variables[region].horizon)

    @rule(region=st.sampled_from([1, 2, 3]))
    def free(self, region: int) -> None:
        if self.next_id % 5 == 0:
            self.log.close(region)
            self.model[region].freed = True

    @rule()
    def restart(self) -> None:
        """As from a journal: entries that were trimmed are gone, their plans are apart."""
        old, self.log = self.log, CommitLog(self.limits)
        kept = {(r, e.version) for r, v in old._variables.items() for e in v.entries}
        for region, told in self.model.items():
            self.log.open(region, (HOME,))
            if told.freed:
                self.log.close(region)
        self.log.restore(
            [Entry(*k, e.commit_id, e.blocks) for k, e in sorted(self.saved.items()) if k in kept],
            [
                (region, version, plan)
                for region, variable in old._variables.items()
                for version, plan in sorted(variable.plans.items())
            ],
            [(region, home, version) for (region, home), version in self.acknowledged.items()],
            list(old._outcomes.items()),
            (),
        )
        self.log.retain(self.floors)

    @invariant()
    def agrees(self) -> None:
        self.log.check()
        for region, told in self.model.items():
            newest = len(told.commits)
            assert self.log.newest(region) == newest
            horizon = self.log._variables[region].horizon
            for low in range(max(0, newest - 8), newest + 1):
                found = self.log.changes(region, low, newest)
                if low < horizon:
                    assert found is None or low == newest
                else:
                    assert found == BitMap().union(*(BitMap(b) for _, b, _ in told.commits[low:]))
                if not told.freed and low >= horizon:
                    plans = [plan for _, _, plan in told.commits[:low] if plan is not None]
                    assert self.log.at(region, low).plan == (plans[-1] if plans else None)
            acknowledged = self.acknowledged.get((region, HOME), 0)
            assert horizon <= acknowledged
            assert horizon <= self.promised.get(region, newest)
            items = [i for i in self.log.unacknowledged(HOME) if i.region == region]
            assert items == [
                Publication(region, version, told.commits[version - 1][0])
                for version in range(acknowledged + 1, newest + 1)
            ]


TestAgainst = Against.TestCase
TestAgainst.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
