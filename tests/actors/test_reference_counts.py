"""Which variables nobody refers to, against a plain model; and how Ray is asked. Without Ray."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from clamor_ray.actors.process.background import BackgroundTasks
from clamor_ray.actors.reference_counting import ray_anchors
from clamor_ray.actors.reference_counting.counts import ReferenceCounts
from clamor_ray.actors.reference_counting.ray_anchors import ANCHORS_MOST, RayAnchors

logger = logging.getLogger(__name__)


class Programs(RuleBasedStateMachine):
    """Variables are made, found, named and dropped; the model walks over who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.named: set[int] = set()
        self.counts = ReferenceCounts(self.named.__contains__)
        self.numbers = itertools.count(1)
        self.alive: dict[bytes, int | None] = {}  # anchor -> its region
        self.inside: dict[int, set[int]] = {}  # every region that is there
        self.uncounted: set[int] = set()
        self.freed: dict[int, set[int]] = {}  # what was inside of those that were freed
        self.earlier: tuple[list[bytes], set[bytes]] | None = None

    def anchor(self) -> bytes:
        anchor = b"%d" % next(self.numbers)
        self.counts.made([anchor])
        self.alive[anchor] = None
        return anchor

    def held(self) -> set[int]:
        inside = {**self.freed, **self.inside}
        held = {region for region in self.alive.values() if region in inside}
        held |= self.named | self.uncounted
        while more := {inner for region in held for inner in inside[region]} - held:
            held |= more & inside.keys()
            if not more & inside.keys():
                break
        return held & self.inside.keys()

    def gone(self, region: int) -> None:
        self.counts.forget(region)
        self.freed[region] = self.inside.pop(region)
        for anchor, its in self.alive.items():
            if its == region and region in self.uncounted:
                self.alive[anchor] = None
        self.named.discard(region)
        self.uncounted.discard(region)

    @rule(data=st.data())
    def make(self, data: st.DataObject) -> None:
        region, anchor = next(self.numbers), self.anchor()
        self.put_inside(region, anchor, data)
        self.alive[anchor] = region

    def put_inside(self, region: int, anchor: bytes, data: st.DataObject) -> None:
        of_regions = sorted(each for each, its in self.alive.items() if its is not None)
        inner = data.draw(st.lists(st.sampled_from(of_regions))) if of_regions else []
        for _ in range(2):  # an answer that is lost is asked for again
            self.counts.begin(region, anchor, inner)
        known = {self.alive[each] for each in inner} - self.uncounted
        self.inside[region] = {each for each in known if each is not None}

    @rule(data=st.data())
    def make_with_an_anchor_of_an_earlier_life(self, data: st.DataObject) -> None:
        region = next(self.numbers)
        self.uncounted.add(region)
        self.put_inside(region, b"earlier", data)

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def find(self, data: st.DataObject) -> None:
        region, anchor = data.draw(st.sampled_from(sorted(self.inside))), self.anchor()
        self.counts.hold(region, anchor)
        self.alive[anchor] = region

    @rule()
    def take_for_later(self) -> None:
        self.anchor()

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        del self.alive[data.draw(st.sampled_from(sorted(self.alive)))]

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def name(self, data: st.DataObject) -> None:
        self.named.add(data.draw(st.sampled_from(sorted(self.inside))))

    @precondition(lambda self: self.named)
    @rule(data=st.data())
    def drop_name(self, data: st.DataObject) -> None:
        self.named.discard(data.draw(st.sampled_from(sorted(self.named))))

    @precondition(lambda self: self.inside)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.gone(data.draw(st.sampled_from(sorted(self.inside))))

    @rule()
    def begin_to_look(self) -> None:
        self.earlier = self.counts.anchors(), set(self.alive)

    @precondition(lambda self: self.earlier)
    @rule()
    def look_at_what_was(self) -> None:
        assert self.earlier is not None
        known, alive = self.earlier
        self.earlier = None
        for region in self.counts.unheld(known, alive):
            assert region not in self.held()
            self.gone(region)

    @rule()
    def look(self) -> None:
        while regions := self.counts.unheld(self.counts.anchors(), self.alive.keys()):
            held = self.held()
            for region in regions:
                assert region not in held
                self.gone(region)
        assert self.inside.keys() == self.held()

    @invariant()
    def it_keeps_nothing_of_what_is_gone(self) -> None:
        counted = self.counts._anchors_of.keys() - self.counts._freed
        assert counted | self.uncounted == self.inside.keys()
        assert self.counts._inside.keys() <= self.inside.keys() | self.counts._freed
        assert self.counts._freed <= self.freed.keys()
        if not self.inside and not self.alive:
            self.counts.unheld(self.counts.anchors(), set())
            assert self.counts.is_empty
            assert not self.counts._n_outside


Programs.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestPrograms = Programs.TestCase


def test_what_was_read_of_a_freed_variable_holds_what_was_inside() -> None:
    counts = ReferenceCounts(lambda region: False)
    counts.made([b"inner", b"outer"])
    counts.begin(1, b"inner")
    counts.begin(2, b"outer", [b"inner"])
    counts.forget(2)
    counts.hold(2, b"late")
    for _ in range(2):
        assert counts.unheld(counts.anchors(), {b"outer"}) == []
    assert counts.unheld(counts.anchors(), set()) == [1]
    counts.forget(1)
    assert counts.is_empty


def three_nested() -> ReferenceCounts:
    """1 is inside of 2, and 2 inside of 3; each has an anchor of its own."""
    counts = ReferenceCounts(lambda region: False)
    counts.made([b"1", b"2", b"3"])
    counts.begin(1, b"1")
    counts.begin(2, b"2", [b"1"])
    counts.begin(3, b"3", [b"2"])
    return counts


def test_a_freed_one_that_is_inside_of_another_holds_what_is_inside() -> None:
    counts = three_nested()
    counts.forget(2)
    assert counts.unheld(counts.anchors(), {b"3"}) == []
    assert counts.unheld(counts.anchors(), set()) == [3]
    counts.forget(3)
    assert counts.unheld(counts.anchors(), set()) == [1]
    counts.forget(1)
    assert counts.is_empty
    assert not counts._freed


def test_one_that_its_container_holds_is_freed() -> None:
    counts = three_nested()
    assert counts.unheld(counts.anchors(), {b"3"}) == []
    counts.forget(2)  # what was read of it by way of 3 has the anchor of 3
    assert counts.unheld(counts.anchors(), {b"3"}) == []
    assert counts.unheld(counts.anchors(), set()) == [3]
    counts.forget(3)
    assert counts.unheld(counts.anchors(), set()) == [1]


class FakeRef:
    def __init__(self, name: bytes) -> None:
        self.name = name

    def binary(self) -> bytes:
        return self.name


class World:
    """Ray, as far as anchors need it."""

    def __init__(self) -> None:
        self.alive: set[bytes] = set()
        self.freed: list[list[int]] = []
        self.troubles: list[Exception] = []
        self.looks = 0
        self.background = BackgroundTasks(logger)
        self.counts = ReferenceCounts(lambda region: False)
        self.anchors = RayAnchors(self.counts, self.free, self.background, self.make, self.look)

    def make(self, n_anchors: int) -> list[FakeRef]:
        made = [FakeRef(b"%d" % (len(self.alive) + n)) for n in range(n_anchors)]
        self.alive |= {each.name for each in made}
        return made

    def look(self) -> set[bytes]:
        self.looks += 1
        if self.troubles:
            raise self.troubles.pop()
        return set(self.alive)

    def free(self, regions: list[int]) -> None:
        if self.troubles:
            raise self.troubles.pop()
        self.freed.append(regions)
        for region in regions:
            self.counts.forget(region)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_anchors, "LOOK_S", 0.01)


def run(work: Callable[[World], object]) -> None:
    async def all_of_it() -> None:
        world = World()
        await asyncio.wait_for(work(world), 20)  # type: ignore[arg-type]
        await world.background.end()

    asyncio.run(all_of_it())


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 - the code under test tells nobody
        await asyncio.sleep(0.005)


def test_what_nobody_refers_to_is_freed_and_looking_ends(quick: None) -> None:
    async def work(world: World) -> None:
        one, two = world.anchors.make(2)
        world.counts.begin(1, one.binary())
        world.counts.begin(2, two.binary())
        world.alive.discard(two.name)
        await until(lambda: world.freed == [[2]])
        more = world.anchors.of(1)
        world.alive.discard(one.name)
        n_looks = world.looks
        await until(lambda: world.looks > n_looks + 2)
        assert world.freed == [[2]]
        world.alive.discard(more.name)
        await until(lambda: world.freed == [[2], [1]])
        await until(lambda: world.counts.is_empty)
        await asyncio.sleep(0.05)
        n_looks = world.looks
        await asyncio.sleep(0.05)
        assert world.looks == n_looks
        (again,) = world.anchors.make(1)  # and begins again
        world.counts.begin(3, again.binary())
        world.alive.clear()
        await until(lambda: world.freed[-1] == [3])

    run(work)


def test_a_failure_is_logged_and_tried_again(quick: None, caplog: pytest.LogCaptureFixture) -> None:
    async def work(world: World) -> None:
        (anchor,) = world.anchors.make(1)
        world.counts.begin(1, anchor.binary())
        world.alive.clear()
        world.troubles = [OSError("no room for the journal"), RuntimeError("Ray is away")]
        await until(lambda: world.freed == [[1]])
        assert "no room for the journal" in caplog.text
        assert "Ray is away" in caplog.text

    run(work)


@pytest.mark.parametrize("n_anchors", [0, -1, ANCHORS_MOST + 1])
def test_a_number_that_nobody_needs_is_refused(n_anchors: int) -> None:
    async def work(world: World) -> None:
        with pytest.raises(ValueError, match=f"1 to {ANCHORS_MOST}"):
            world.anchors.make(n_anchors)

    run(work)
