"""Where the blocks of a lost region come from, against a model that holds contents."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from pyroaring import BitMap

from clamor_ray._objects.block_sets import runs, said
from clamor_ray.actors.lost_homes.new_home import blocks_of
from clamor_ray.actors.lost_homes.rebuild_plan import Holding, RebuildPlan, plan
from clamor_ray.actors.page_server.version_questions import runs_of


class Model:
    """A region's versions as contents: a number for each block, and who has which.

    Args:
        rng: What decides.
    """

    def __init__(self, rng: random.Random) -> None:
        self.n_blocks = rng.randint(1, 40)
        self.versions = [[0] * self.n_blocks]
        self.changes: list[BitMap] = []
        for version in range(1, rng.randint(0, 6) + 1):
            dirty = BitMap(rng.sample(range(self.n_blocks), rng.randint(0, self.n_blocks // 3)))
            self.changes.append(dirty)
            last = self.versions[-1]
            self.versions.append(
                [version if block in dirty else last[block] for block in range(self.n_blocks)]
            )
        # What changed before this version is forgotten.
        self.horizon = rng.choice([0, 0, 0, rng.randint(0, len(self.changes))])
        self.servers = rng.sample(range(100, 120), rng.randint(0, 4))
        self.cached: dict[tuple[int, int], BitMap] = {}
        for server in self.servers:
            for version in range(len(self.versions)):
                if rng.random() < 0.5:
                    share = rng.choice([0.1, 0.5, 0.9, 1.0])
                    self.cached[server, version] = BitMap(
                        block for block in range(self.n_blocks) if rng.random() < share
                    )
        self.has_source = rng.random() < 0.5

    @property
    def newest(self) -> int:
        return len(self.changes)

    def changed_since(self, version: int) -> BitMap | None:
        if version < self.horizon:
            return None
        return BitMap.union(BitMap(), *self.changes[version:])

    def plan(self) -> RebuildPlan | None:
        holdings = [Holding(*where, blocks) for where, blocks in self.cached.items()]
        return plan(
            self.n_blocks,
            holdings,
            self.changed_since,
            has_source=self.has_source,
            servers=self.servers,
        )

    def carry_out(self, found: RebuildPlan) -> list[int | None]:
        """The contents that the plan leads to, as a page server would come by them."""
        content: list[int | None] = [None] * self.n_blocks
        for take in found.takes:
            for block in take.blocks:
                assert content[block] is None, "it comes twice"
                assert block in self.cached[take.server_id, take.version], "it is not there"
                content[block] = self.versions[take.version][block]
        for block in found.compared:
            assert content[block] == self.versions[0][block], "the source cannot have made it"
        for block in found.from_source:
            assert content[block] is None, "it comes twice"
            content[block] = self.versions[0][block]
        return content

    def can_be_had(self, block: int) -> bool:
        """Somebody has what it is now, and can be known to have it."""
        now = self.versions[-1][block]
        for (_, version), blocks in self.cached.items():
            unchanged = version >= self.horizon and not any(
                block in dirty for dirty in self.changes[version:]
            )
            if block in blocks and unchanged:
                assert self.versions[version][block] == now
                return True
        untouched = not any(block in dirty for dirty in self.changes)
        return self.has_source and self.horizon == 0 and untouched


@pytest.mark.parametrize("seed", range(400))
def test_it_is_the_newest_version_or_lost(seed: int) -> None:
    model = Model(random.Random(seed))
    found = model.plan()
    if found is None:
        assert not model.servers
        return
    content = model.carry_out(found)
    for block, (got, wanted) in enumerate(zip(content, model.versions[-1], strict=True)):
        assert (got is None) == (block in found.lost)
        assert got is None or got == wanted
        assert (got is not None) == model.can_be_had(block), "nothing is lost that is somewhere"
    assert found.home in model.servers


@pytest.mark.parametrize("seed", range(200))
def test_the_source_is_asked_for_as_little_as_possible(seed: int) -> None:
    model = Model(random.Random(seed))
    model.has_source = True
    found = model.plan()
    model.has_source = False
    without = model.plan()
    if found is not None and without is not None:
        assert found.from_source <= without.lost
        assert (found.home, found.takes) == (without.home, without.takes)
        assert without.from_source == without.compared == BitMap()


@pytest.mark.parametrize("seed", range(200))
def test_what_no_commit_has_changed_stays_in_its_file(seed: int) -> None:
    model = Model(random.Random(seed))
    model.has_source = False
    holdings = [Holding(*where, blocks) for where, blocks in model.cached.items()]
    how = {"has_source": True, "servers": model.servers}
    found = plan(model.n_blocks, holdings, model.changed_since, is_in_file=True, **how)
    if found is None:
        return
    content, changed = model.carry_out(found), model.changed_since(0)
    assert not found.from_source
    for block, got in enumerate(content):
        if changed is not None and block not in changed:
            assert got is None, "no home has it"
            assert block not in found.lost
        else:  # where it is not known, nothing is taken from the file
            assert got == (model.versions[-1][block] if model.can_be_had(block) else None)
            assert (got is None) == (block in found.lost)


def of(*numbers: int) -> BitMap:
    return BitMap(numbers)


def nothing(version: int) -> BitMap:
    return BitMap()


def test_the_server_with_most_blocks_becomes_home() -> None:
    held = [Holding(1, 0, of(0, 1)), Holding(2, 0, of(2, 3)), Holding(2, 1, of(1, 2))]
    found = plan(4, held, nothing, has_source=False, servers=[1, 2])
    assert found is not None
    assert found.home == 2
    assert {(take.server_id, block) for take in found.takes for block in take.blocks} == {
        *((2, 1), (2, 2), (2, 3), (1, 0))
    }


def test_a_server_that_cannot_be_home_still_gives_its_blocks() -> None:
    found = plan(2, [Holding(1, 0, of(0, 1))], nothing, has_source=False, servers=[2])
    assert found is not None
    assert found.home == 2
    assert [(take.server_id, list(take.blocks)) for take in found.takes] == [(1, [0, 1])]


def test_what_is_not_known_to_be_the_same_is_not_used() -> None:
    forgotten: Callable[[int], BitMap | None] = lambda version: None  # noqa: E731
    found = plan(1, [Holding(1, 0, of(0))], forgotten, has_source=True, servers=[1])
    assert found is not None
    assert found.lost == of(0)


def test_blocks_beyond_the_region_do_not_count() -> None:
    held = [Holding(1, 0, of(0, 1)), Holding(2, 0, of(1, 7, 8, 9))]
    found = plan(2, held, nothing, has_source=False, servers=[2, 1])
    assert found is not None
    assert found.home == 1
    assert [list(take.blocks) for take in found.takes] == [[0, 1]]


def test_runs_there_and_back() -> None:
    rng = random.Random(5)
    for _ in range(50):
        blocks = BitMap(rng.sample(range(60), rng.randint(0, 40)))
        found = runs(blocks)
        assert np.array_equal(
            np.array(found, np.uint64).reshape(-1, 2), runs_of(bytes(blocks.serialize()))
        )
        assert blocks_of(np.array(found, np.uint64).reshape(-1, 2)) == blocks


def test_what_is_said_is_short() -> None:
    assert said(of(*range(0, 100, 2)), 200) == "50 of 200 blocks (0, 2, 4, 6, 8, 10, ...)"
