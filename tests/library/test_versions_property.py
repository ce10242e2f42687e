"""Anything that a program can do with versions, in any order, against a model of plain arrays."""

from __future__ import annotations

import functools
import os
import random
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._session import process_sessions
from tests.conftest import ANSWER_S, ClamorCluster
from tests.support.lab.cluster import node_resource

pytestmark = [pytest.mark.lab, pytest.mark.slow]

BLOCK_BYTES = 4096
KEPT_PAYLOADS = 64
# What happens how often.
WEIGHTS = {
    "update": 4,
    "updates": 2,
    "begin": 5,
    "write": 3,
    "rival": 5,
    "commit": 2,
    "abort": 1,
    "read": 5,
    "hold": 3,
    "look": 4,
    "put": 2,
    "free": 1,
    "read_newest": 2,
    "no_such_version": 1,
    "kill": 1,
}
SEED = int(os.environ.get("CLAMOR_TEST_SEED") or random.SystemRandom().randrange(1 << 32))
Array = npt.NDArray[np.int64]
Change = tuple[int, int, int]  # first element, one behind the last, value

# ----------------------------------------------------------- who does things


class Hand:
    """Does what it is told in its process, and says what it saw, as copies."""

    def __init__(self) -> None:
        self.held: dict[int, Any] = {}
        self.open: tuple[Any, tuple[Any, ...]] | None = None

    def read(self, ref: Any) -> Array:
        return np.array(ref.get())

    def hold(self, key: int, ref: Any) -> None:
        self.held[key] = ref.get()

    def look(self, key: int) -> Array:
        return np.array(self.held[key])

    def drop(self, key: int) -> None:
        del self.held[key]

    def update(self, ref: Any, changes: list[Change]) -> tuple[int, int]:
        """The version before, and that of the reference after."""
        work = clamor.update(ref)
        with work as array:
            (before,) = work.versions
            for first, end, value in changes:
                array[first:end] = value
        assert work.versions == (ref.version,)
        return before, ref.version

    def begin(self, refs: list[Any]) -> tuple[int, ...]:
        work = clamor.transaction(*refs)
        self.open = work, work.begin()
        return tuple(work.versions)

    def write(self, index: int, change: Change) -> Array:
        assert self.open is not None
        first, end, value = change
        array = self.open[1][index]
        array[first:end] = value
        return np.array(array)

    def commit(self) -> tuple[int, ...]:
        assert self.open is not None
        (work, _), self.open = self.open, None
        return tuple(work.commit())

    def abort(self) -> None:
        assert self.open is not None
        (work, _), self.open = self.open, None
        work.abort()


class FarHand:
    """A `Hand` in an actor."""

    def __init__(self, node: int) -> None:
        import ray

        self.actor = (
            ray.remote(Hand).options(num_cpus=0, resources={node_resource(node): 0.001}).remote()
        )

    def __getattr__(self, name: str) -> Any:
        import ray

        def call(*arguments: Any) -> Any:
            # Ray would resolve nothing of ours, and errors come as ours.
            return ray.get(getattr(self.actor, name).remote(*arguments), timeout=ANSWER_S)

        return call


# ------------------------------------------------------------------ the model


def told(function: Callable[..., None]) -> Callable[..., None]:
    """Writes down how a rule failed."""

    @functools.wraps(function)
    def tell(self: Versions, *args: Any, **kwargs: Any) -> None:
        try:
            function(self, *args, **kwargs)
        except hypothesis.errors.HypothesisException:
            raise
        except Exception:
            self.failures.append(traceback.format_exc())
            raise

    return tell


@dataclass(eq=False)
class Variable:
    """What a variable must be."""

    ref: Any
    inline: bool
    first_byte: int  # of the array, in its region
    versions: list[Array] = field(repr=False)
    changed: list[set[int]] = field(
        default_factory=lambda: [set()], repr=False
    )  # blocks, by version
    freed: bool = False

    @property
    def newest(self) -> int:
        return len(self.versions) - 1

    def is_kept(self, version: int) -> bool:
        """The registry has the last versions of what travels inside; the reference the first."""
        return not (self.inline and 0 < version <= self.newest - KEPT_PAYLOADS)

    def blocks(self, change: Change) -> set[int]:
        first, end, _ = change
        if first == end:
            return set()
        begin_byte, end_byte = self.first_byte + 8 * first, self.first_byte + 8 * end
        return set(range(begin_byte // BLOCK_BYTES, (end_byte - 1) // BLOCK_BYTES + 1))

    def publish(self, content: Array, blocks: set[int]) -> None:
        """What was written, over the newest version."""
        if self.inline:
            self.versions.append(content)
        else:
            merged = self.versions[-1].copy()
            for block in blocks:
                first = max(0, (block * BLOCK_BYTES - self.first_byte) // 8)
                end = max(0, ((block + 1) * BLOCK_BYTES - self.first_byte) // 8)
                merged[first:end] = content[first:end]
            self.versions.append(merged)
        self.changed.append(blocks)

    def conflicts(self, since: int, blocks: set[int]) -> bool:
        if self.inline:
            return bool(blocks) and since != self.newest
        return any(blocks & changed for changed in self.changed[since + 1 :])


@dataclass(repr=False)
class Work:
    """An open transaction."""

    variables: list[Variable]
    begun: tuple[int, ...]
    content: list[Array]
    blocks: list[set[int]]

    def apply(self, index: int, change: Change) -> None:
        first, end, value = change
        self.content[index][first:end] = value
        self.blocks[index] |= self.variables[index].blocks(change)


class Versions(RuleBasedStateMachine):
    """Rules: what a program does. Every one compares what it gets with the model."""

    def __init__(
        self, cluster: ClamorCluster, hands: list[Any], met: Counter[str], failures: list[str]
    ) -> None:
        super().__init__()
        self.failures = failures
        self.met = met  # what happened, in all examples
        self.cluster = cluster
        self.hands = hands  # the driver; an actor beside it; one on the other node
        self.variables: list[Variable] = []
        self.open: dict[int, Work] = {}  # by hand
        self.held: dict[int, tuple[int, Array]] = {}  # key -> hand, content
        self.next_key = 0
        self.next_value = 0
        self.restarts = 0

    # -- helpers

    def value(self) -> int:
        self.next_value += 1
        return self.next_value

    def pick(self, data: st.DataObject) -> Variable:
        return data.draw(st.sampled_from([v for v in self.variables if not v.freed]), "variable")

    def change(self, data: st.DataObject, variable: Variable) -> Change:
        size = len(variable.versions[0])
        first = data.draw(st.integers(0, size), "first")
        n = data.draw(st.one_of(st.integers(0, 3), st.integers(0, 1600)), "number")
        return first, min(size, first + n), self.value()

    def version(self, data: st.DataObject, variable: Variable) -> int:
        """One that can be had."""
        return data.draw(st.integers(0, variable.newest).filter(variable.is_kept), "version")

    # -- the rule

    @rule(
        what=st.sampled_from([name for name, weight in WEIGHTS.items() for _ in range(weight)]),
        data=st.data(),
    )
    @told
    def step(self, what: str, data: st.DataObject) -> None:
        # One rule for all: hypothesis would leave out some of them in each example.
        if what == "put" and len(self.variables) >= 6:
            return
        if what in ("write", "rival", "commit", "abort") and not self.open:
            what = "begin"
        if what == "rival" and len(self.open) == len(self.hands):
            what = "commit"
        if what == "look" and not self.held:
            what = "hold"
        if what == "hold" and len(self.held) >= 6:
            what = "look"
        if what == "free" and sum(not variable.freed for variable in self.variables) < 2:
            return
        if what == "kill" and self.restarts:
            return
        self.met[what] += 1
        getattr(self, what)(data)

    def hand(self, data: st.DataObject) -> int:
        return data.draw(st.integers(0, len(self.hands) - 1), "hand")

    # -- what happens

    @initialize(n=st.integers(1, 3000))
    @told
    def first(self, n: int) -> None:
        self._put(n, 0)

    def put(self, data: st.DataObject) -> None:
        n = data.draw(st.one_of(st.integers(1, 200), st.integers(600, 6000)), "elements")
        self._put(n, self.hand(data))

    def _put(self, n: int, hand: int) -> None:
        content = np.arange(n, dtype=np.int64) * -1 - self.value() * 10_000
        ref = self._put_by(hand, content)
        array = ref.get()
        assert np.array_equal(array, content)
        address = int(array.__array_interface__["data"][0])
        first_byte = 0 if ref._inline else address - ref._base_address
        self.variables.append(Variable(ref, ref._inline, first_byte, [content]))

    def _put_by(self, hand: int, content: Array) -> Any:
        for _ in range(5):
            try:
                return clamor.put(content) if hand < 2 else self.cluster.run(clamor.put, content)
            except errors.ServerUnavailableError:  # it was killed under this put: put again
                self.met["puts again"] += 1
        raise AssertionError("no page server takes it")

    def update(self, data: st.DataObject) -> None:
        hand = self.hand(data)
        variable = self.pick(data)
        n = data.draw(st.integers(1, 3), "changes")
        self._update(hand, variable, [self.change(data, variable) for _ in range(n)])

    def updates(self, data: st.DataObject) -> None:
        variable = self.pick(data)
        for _ in range(data.draw(st.integers(2, 5), "updates")):
            self._update(self.hand(data), variable, [self.change(data, variable)])

    def _update(self, hand: int, variable: Variable, changes: list[Change]) -> None:
        mine = self.open.get(hand)
        if mine is not None and any(variable is other for other in mine.variables):
            self.met["nested"] += 1
            with pytest.raises(errors.NestedUpdateError):
                self.hands[hand].update(variable.ref, changes)
            return
        before = variable.newest
        ref = variable.ref if hand == 0 else variable.ref._latest()
        got = self.hands[hand].update(ref, changes)
        content, blocks = variable.versions[-1].copy(), set()
        for change in changes:
            content[change[0] : change[1]] = change[2]
            blocks |= variable.blocks(change)
        if blocks and not (variable.inline and np.array_equal(content, variable.versions[-1])):
            variable.publish(content, blocks)
        assert got == (before, variable.newest)
        if hand == 0 and variable.newest > before:
            assert variable.ref.version == variable.newest

    def begin(self, data: st.DataObject) -> None:
        hand = self.hand(data)
        if hand in self.open:
            return
        live = [variable for variable in self.variables if not variable.freed]
        variables = data.draw(
            st.lists(st.sampled_from(live), min_size=1, max_size=2, unique_by=id), "variables"
        )
        if data.draw(st.booleans(), "frozen"):
            begun = tuple(self.version(data, v) for v in variables)
            refs = [v.ref.at(version) for v, version in zip(variables, begun, strict=True)]
        else:
            begun = tuple(v.newest for v in variables)
            refs = [v.ref._latest() for v in variables]
        assert self.hands[hand].begin(refs) == begun
        content = [v.versions[n].copy() for v, n in zip(variables, begun, strict=True)]
        self.open[hand] = Work(variables, begun, content, [set() for _ in variables])

    def write(self, data: st.DataObject) -> None:
        hand = data.draw(st.sampled_from(sorted(self.open)), "hand")
        work = self.open[hand]
        index = data.draw(st.integers(0, len(work.variables) - 1), "which")
        change = self.change(data, work.variables[index])
        work.apply(index, change)
        assert np.array_equal(self.hands[hand].write(index, change), work.content[index])

    def rival(self, data: st.DataObject) -> None:
        """Another one writes to the variable, and commits first."""
        hand = data.draw(st.sampled_from(sorted(self.open)), "hand")
        work = self.open[hand]
        index = data.draw(st.integers(0, len(work.variables) - 1), "which")
        if not work.variables[index].freed:
            change = self.change(data, work.variables[index])
            work.apply(index, change)
            self.hands[hand].write(index, change)
            (other, *_) = (other for other in (2, 1, 0) if other not in self.open)
            last = len(work.variables[index].versions[0]) - 1
            changes = (
                [(last, last + 1, self.value())]
                if data.draw(st.booleans(), "elsewhere")
                else [self.change(data, work.variables[index])]
            )
            self._update(other, work.variables[index], changes)
            self._commit(hand)

    def commit(self, data: st.DataObject) -> None:
        self._commit(data.draw(st.sampled_from(sorted(self.open)), "hand"))

    def _commit(self, hand: int) -> None:
        work = self.open.pop(hand)
        written = [
            i
            for i, variable in enumerate(work.variables)
            if work.blocks[i]
            and not (
                variable.inline
                and np.array_equal(work.content[i], variable.versions[work.begun[i]])
            )
        ]
        self.met["commits"] += 1
        refusals: tuple[type[Exception], ...] = ()  # where there are two causes, either is said
        if any(work.variables[i].freed for i in written):
            self.met["commits of what was freed"] += 1
            refusals += (errors.FreedError,)
        if any(work.variables[i].conflicts(work.begun[i], work.blocks[i]) for i in written):
            self.met["conflicts"] += 1
            refusals += (errors.CommitConflict,)
        if refusals:
            with pytest.raises(refusals):
                self.hands[hand].commit()
        else:
            self.met["merges"] += any(
                work.begun[i] < work.variables[i].newest for i in written
            )  # over what others wrote meanwhile, elsewhere
            expected = list(work.begun)
            for i in written:
                work.variables[i].publish(work.content[i], work.blocks[i])
                expected[i] = work.variables[i].newest
            assert self.hands[hand].commit() == tuple(expected)

    def abort(self, data: st.DataObject) -> None:
        hand = data.draw(st.sampled_from(sorted(self.open)), "hand")
        del self.open[hand]
        self.hands[hand].abort()

    def read(self, data: st.DataObject) -> None:
        hand = self.hand(data)
        variable = self.pick(data)
        version = self.version(data, variable)
        self.met["old reads"] += version < variable.newest
        got = self.hands[hand].read(variable.ref.at(version))
        assert np.array_equal(got, variable.versions[version]), (variable.ref, version)

    def read_newest(self, data: st.DataObject) -> None:
        hand = self.hand(data)
        variable = self.pick(data)
        ref = variable.ref._latest()
        assert ref.version == variable.newest
        assert np.array_equal(self.hands[hand].read(ref), variable.versions[-1])

    def no_such_version(self, data: st.DataObject) -> None:
        variable = self.pick(data)
        with pytest.raises(errors.NoVersionError):
            variable.ref.at(variable.newest + data.draw(st.integers(1, 3), "beyond"))

    def hold(self, data: st.DataObject) -> None:
        hand = self.hand(data)
        variable = self.pick(data)
        version = self.version(data, variable)
        self.next_key += 1
        self.hands[hand].hold(self.next_key, variable.ref.at(version))
        self.held[self.next_key] = hand, variable.versions[version]

    def look(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.held)), "held")
        hand, content = self.held[key]
        self.met["held"] += 1
        assert np.array_equal(self.hands[hand].look(key), content)
        if data.draw(st.booleans(), "drop"):
            del self.held[key]
            self.hands[hand].drop(key)

    def free(self, data: st.DataObject) -> None:
        variable = self.pick(data)
        other = variable.ref._latest()
        clamor.free(variable.ref)
        variable.freed = True
        with pytest.raises(errors.FreedError):
            variable.ref.get()
        idle = next((hand for hand in (2, 1, 0) if hand not in self.open), None)
        if idle is not None:
            with pytest.raises(errors.FreedError):
                self.hands[idle].update(other, [(0, 1, self.value())])

    def kill(self, data: st.DataObject) -> None:
        who = data.draw(st.integers(0, 2), "server, or registry")
        self.restarts += 1
        pid = (
            int(process_sessions.current().rpc.ping())
            if who == 2
            else self.cluster.lab.page_server_pid(who)
        )
        os.kill(pid, signal.SIGKILL)

    @told
    def teardown(self) -> None:
        for hand in self.open:
            self.hands[hand].abort()
        for variable in self.variables:
            if variable.freed:
                continue
            for version, content in enumerate(variable.versions):
                if not variable.is_kept(version):
                    with pytest.raises(errors.SnapshotExpired):
                        variable.ref.at(version)
                    continue
                ref = variable.ref.at(version)
                hand = self.hands[2 * (version % 2)]
                assert np.array_equal(hand.read(ref), content), (ref, version)
        for key, (hand, content) in self.held.items():
            assert np.array_equal(self.hands[hand].look(key), content)
            self.hands[hand].drop(key)
        for variable in self.variables:
            if not variable.freed:
                clamor.free(variable.ref)


@pytest.fixture
def hands(clamor_cluster: ClamorCluster) -> Iterator[list[Any]]:
    import ray

    far = [FarHand(0), FarHand(1)]
    some = clamor.put(np.arange(10_000))
    assert all(len(hand.read(some)) == 10_000 for hand in far)  # every page server has started
    clamor.free(some)
    yield [Hand(), *far]
    for hand in far:
        ray.kill(hand.actor)


def test_versions_do_as_the_model(clamor_cluster: ClamorCluster, hands: list[Any]) -> None:
    print(f"seed {SEED}")
    met: Counter[str] = Counter()
    failures: list[str] = []
    try:
        run_state_machine_as_test(
            hypothesis.seed(SEED)(lambda: Versions(clamor_cluster, hands, met, failures)),
            settings=settings(
                max_examples=35,
                stateful_step_count=60,
                deadline=None,
                database=None,
                # A cluster does not do the same twice in the same time: no search for less.
                phases=(Phase.generate,),
                suppress_health_check=list(HealthCheck),
                print_blob=True,
            ),
        )
    finally:
        # Hypothesis runs what failed again, and where that goes well it says no more than that.
        for failure in failures:
            print("failed:", failure)
    print(dict(met))
    for what in {"commits", "conflicts", "merges", "nested", "old reads", "held", "free", "kill"}:
        assert met[what] >= (10 if what == "commits" else 3), (what, met)
