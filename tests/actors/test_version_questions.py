"""What a page server asks the registry about versions, and what it tells its engine."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
from pyroaring import BitMap

from clamor_ray._protocol.messages import Publication, RegionFreed, RegionRecord, RepairSet
from clamor_ray.actors.page_server.engine_like import Answer, EventKind
from clamor_ray.errors import (
    FreedError,
    NoVersionError,
    OutOfMemoryError,
    SnapshotExpired,
)
from tests.support.server_rig import HASTE, HERE, RECORD, THERE, FakeEvent, Node, until

CHANGES = BitMap([0, 1, 2, 7, 9, 10, 70_000]).serialize()


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([CHANGES], [[0, 3], [7, 1], [9, 2], [70_000, 1]]),
        ([BitMap().serialize()], []),
        ([None], Answer.EXPIRED),
        ([NoVersionError("No.")], Answer.NO_VERSION),
        ([FreedError("No.")], Answer.NO_REGION),
        ([RuntimeError("hiccup"), CHANGES], [[0, 3], [7, 1], [9, 2], [70_000, 1]]),
        ([RuntimeError("deaf")], Answer.TIMEOUT),
    ],
)
def test_what_changed_between_two_versions(run_core, answers, said) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.known.versions["changes", 7, 2, 5] = list(answers)
            here.engine.ask(FakeEvent(EventKind.NEED_CHANGES, 7, from_version=2, version=5))
            await until(lambda: bool(here.engine.answers))
            assert here.engine.answers == [("changes", 7, 2, 5, said)]

    run_core(work)


def test_a_question_about_versions_is_answered_once(run_core) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.known.gate = asyncio.Event()
            here.known.versions = {
                ("changes", 7, 2, 5): [CHANGES],
                ("changes", 7, 2, 6): [CHANGES],
                ("published", 7, 2): [[]],
                ("outcome", 99): [{}],
            }
            for _ in range(3):
                for to_version in (5, 6):
                    here.engine.ask(
                        FakeEvent(EventKind.NEED_CHANGES, 7, from_version=2, version=to_version)
                    )
                here.engine.ask(FakeEvent(EventKind.NEED_PUBLISHED, 7, from_version=2))
                here.engine.ask(FakeEvent(EventKind.NEED_OUTCOME, 7, commit_id=99))
            await until(lambda: len(here.known.asked_versions) == 4)
            here.known.gate.set()
            await until(lambda: len(here.engine.answers) == 4)
            assert len(here.known.asked_versions) == 4
            here.engine.ask(FakeEvent(EventKind.NEED_PUBLISHED, 7, from_version=2))
            await until(lambda: len(here.engine.answers) == 5)  # a new question

    run_core(work)


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([[(1, 10), (2, 11)]], [("publish", 7, 1, 10), ("publish", 7, 2, 11), ("caught up", 7, 0)]),
        ([[]], [("caught up", 7, 0)]),
        ([SnapshotExpired("No.")], [("caught up", 7, Answer.EXPIRED)]),
        ([FreedError("No.")], [("caught up", 7, Answer.NO_REGION)]),
        ([RuntimeError("deaf")], [("caught up", 7, Answer.TIMEOUT)]),
        # What is missing is not here yet. Only the registry says that something is lost.
        ([[(2, 11)]], [("caught up", 7, Answer.TIMEOUT)]),
        (
            [[(2, 11)], [(1, 10), (2, 11)]],
            [("publish", 7, 1, 10), ("publish", 7, 2, 11), ("caught up", 7, 0)],
        ),
    ],
)
def test_a_home_catches_up(run_core, answers, said) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.known.versions["published", 7, 0] = list(answers)
            here.engine.ask(FakeEvent(EventKind.NEED_PUBLISHED, 7))
            await until(lambda: "caught up" in [answer[0] for answer in here.engine.answers])
            assert here.engine.answers == said

    run_core(work)


@pytest.mark.parametrize(
    ("versions", "homes", "said"),
    [
        ({7: 1, 8: 4}, (HERE,), ("publish", 7, 1, 99)),
        ({7: 1}, (THERE,), ("publish", 7, 1, 99)),  # the engine retains it
        ({}, (HERE,), ("drop", 7, 99)),
    ],
)
def test_what_became_of_a_staged_layer(run_core, versions, homes, said) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            # However long it takes: nothing is dropped that may have been published.
            here.known.versions["outcome", 99] = [RuntimeError("deaf")] * 30 + [versions]
            here.known.regions[7] = dataclasses.replace(RECORD, homes=homes)
            here.engine.ask(FakeEvent(EventKind.NEED_OUTCOME, 7, commit_id=99))
            await until(lambda: bool(here.engine.answers), 15)
            assert here.engine.answers == [said]

    run_core(work)


@pytest.mark.parametrize(("answer", "said"), [(5, 5), (0, 0), (FreedError("No."), 2**64 - 1)])
def test_what_the_homes_have_acknowledged(run_core, answer, said) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            # No answer is no acknowledgement; the engine asks again.
            here.known.versions["settled", 7] = [RuntimeError("deaf"), answer]
            here.engine.ask(FakeEvent(EventKind.NEED_SETTLED, 7))
            await until(lambda: len(here.known.asked_versions) == 1)
            await asyncio.sleep(0.05)
            assert here.engine.answers == []
            here.engine.ask(FakeEvent(EventKind.NEED_SETTLED, 7))
            await until(lambda: bool(here.engine.answers))
            assert here.engine.answers == [("settled", 7, said)]

    run_core(work)


MEMBERS = ((8, 3, THERE), (9, 1, 0xCCCC))


@pytest.mark.parametrize("is_mirror", [True, False])
def test_what_makes_a_region_again(run_core, is_mirror: bool) -> None:
    """Each version by itself, and each question once at a time."""

    async def work() -> None:
        async with Node(HERE) as here:
            here.known.versions["repair_of", 7, 5] = [RepairSet(MEMBERS, is_mirror)]
            here.known.versions["repair_of", 7, 6] = [None]
            for version in (5, 6, 5):
                here.engine.ask(FakeEvent(EventKind.NEED_REPAIR, 7, version=version))
            await until(lambda: len(here.engine.answers) == 2)
            assert set(here.engine.answers) == {
                ("repair", 7, 5, MEMBERS, is_mirror),
                ("repair", 7, 6, (), False),
            }
            assert len(here.known.asked_versions) == 2
            here.engine.ask(FakeEvent(EventKind.NEED_REPAIR, 7, version=5))
            await until(lambda: len(here.engine.answers) == 3)

    run_core(work)


@pytest.mark.parametrize("failure", [RuntimeError("deaf"), FreedError("It was freed.")])
def test_without_an_answer_nothing_makes_it_again(run_core, failure: Exception) -> None:
    """The engine waits for one answer, and asks again by itself."""

    async def work() -> None:
        async with Node(HERE) as here:
            here.known.versions["repair_of", 7, 5] = [failure]
            here.engine.ask(FakeEvent(EventKind.NEED_REPAIR, 7, version=5))
            await until(lambda: bool(here.engine.answers))
            assert here.engine.answers == [("repair", 7, 5, (), False)]
            here.engine.unknown.add(7)  # and it is gone meanwhile
            here.engine.ask(FakeEvent(EventKind.NEED_REPAIR, 7, version=5))
            await until(lambda: len(here.known.asked_versions) == 2)
            await asyncio.sleep(0.05)
            assert len(here.engine.answers) == 1

    run_core(work)


def test_a_registry_that_hangs_is_not_waited_for(run_core) -> None:
    async def work() -> None:
        settings = dataclasses.replace(HASTE, answer_s=0.05)
        async with Node(HERE, settings=settings) as here:
            here.known.gate = asyncio.Event()
            here.engine.ask(FakeEvent(EventKind.NEED_REPAIR, 7, version=5))
            await until(lambda: bool(here.engine.answers))
            assert here.engine.answers == [("repair", 7, 5, (), False)]

    run_core(work)


def test_the_engine_hears_whether_a_region_has_such(run_core) -> None:
    class Record(RegionRecord):
        has_repair = True

    async def work() -> None:
        async with Node(HERE) as here:
            record = Record(7, 1, RECORD.base_address, 5000, (THERE,))
            here.known.regions[7] = record
            here.known.regions[8] = dataclasses.replace(RECORD, region=8)
            for region in (7, 8):
                here.engine.ask(FakeEvent(EventKind.NEED_REGION, region))
            await until(lambda: len(here.engine.answers) == 2)
            assert here.engine.has_repair == {7: True, 8: False}
            here.engine.has_repair.clear()
            here.core.rehome(record)  # what was homed here has no definition
            assert here.engine.has_repair == {7: True}

    run_core(work)


def test_a_layer_of_a_variable_that_is_gone_is_dropped(run_core) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.known.versions["outcome", 99] = [{7: 1}]
            here.known.regions[7] = RegionFreed(7)
            here.engine.ask(FakeEvent(EventKind.NEED_OUTCOME, 7, commit_id=99))
            await until(lambda: bool(here.engine.answers), 15)
            assert here.engine.answers == [("drop", 7, 99)]

    run_core(work)


def test_a_layer_of_an_unused_variable_is_kept(run_core) -> None:
    """Its writer ended before this server was restarted: nobody has said what the region is."""

    async def work() -> None:
        async with Node(HERE) as here:
            here.known.versions["outcome", 99] = [{7: 1}]
            here.known.regions[7] = dataclasses.replace(RECORD, homes=(THERE,))
            here.engine.unknown = {7}
            here.engine.ask(FakeEvent(EventKind.NEED_OUTCOME, 7, commit_id=99))
            await until(lambda: ("publish", 7) in [each[:2] for each in here.engine.answers], 15)
            assert [answer[:2] for answer in here.engine.answers] == [
                ("define", 7),
                ("homes", 7),  # a home that was prepared here, in vain, lets go of it
                ("publish", 7),
            ]

    run_core(work)


def test_a_version_before_its_predecessor_waits_for_it(run_core) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.known.versions["outcome", 99] = [{7: 2}]
            here.known.regions[7] = dataclasses.replace(RECORD, homes=(HERE,))
            here.engine.ask(FakeEvent(EventKind.NEED_OUTCOME, 7, commit_id=99))
            await asyncio.sleep(0.1)
            assert here.engine.answers == []
            assert await here.core.versions.publish([Publication(7, 1, 98)]) == [(7, 1)]
            await until(lambda: here.engine.published[7] == 2)

    run_core(work)


def test_what_the_registry_publishes(run_core) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.engine.unknown = {8, 9}  # not heard of since a restart; freed
            here.known.regions = {
                8: dataclasses.replace(RECORD, region=8),
                9: RegionFreed(9),
            }
            items = [
                Publication(7, 1, 11),
                Publication(7, 2, 12),
                Publication(8, 1, 11),
                Publication(9, 1, 11),
                Publication(10, 2, 12),  # a gap
                Publication(10, 1, 11),
            ]
            assert await here.core.versions.publish(items) == [(7, 2), (8, 1), (9, 1)]
            assert here.engine.published == {7: 2, 8: 1}

    run_core(work)


def test_a_layer_is_fetched(run_core) -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            here.engine.unknown = {7}
            here.known.regions[7] = RECORD
            pulls = [
                asyncio.ensure_future(here.core.versions.pull(7, 99, THERE, 8192)) for _ in range(2)
            ]
            wanted = ("pull", 7, 99, THERE, 8192)
            await until(lambda: wanted in here.engine.answers)
            here.engine.ask(FakeEvent(EventKind.PULLED, 8, commit_id=99))  # another one
            await asyncio.sleep(0.02)
            assert not any(pull.done() for pull in pulls)
            here.engine.ask(FakeEvent(EventKind.PULLED, 7, commit_id=99, error=-7))
            assert [await pull for pull in pulls] == [-7, -7]
            assert here.engine.answers.count(wanted) == 1
            here.engine.staged.add(99)
            assert await here.core.versions.pull(7, 99, THERE, 8192) == 0  # it is here by now
            here.core.versions.drop_staged(99, [7])

    run_core(work)


def test_a_fetch_that_never_ends_and_one_that_is_refused(run_core) -> None:
    async def work() -> None:
        async with Node(HERE, settings=dataclasses.replace(HASTE, pull_s=0.05)) as here:
            assert await here.core.versions.pull(7, 99, THERE, 8192) == Answer.TIMEOUT
            here.engine.unknown = {7}
            here.known.regions[7] = RegionFreed(7)
            with pytest.raises(FreedError):
                await here.core.versions.pull(7, 99, THERE, 8192)

            def full(*_: object) -> None:
                raise OutOfMemoryError("No room.")

            here.engine.pull = full
            with pytest.raises(OutOfMemoryError):
                await here.core.versions.pull(7, 99, THERE, 8192)

    run_core(work)


def test_a_region_that_was_idle_says_so_again(run_core) -> None:
    """A registry that was restarted asks once more, and the engine says it only once."""

    async def work() -> None:
        async with Node(HERE) as here:
            assert here.core.retire(7, force=False)
            here.engine.ask(FakeEvent(EventKind.REGION_IDLE, 7))
            await until(lambda: here.known.idle == [7])
            assert not here.core.retire(7, force=False)
            here.core.retire(7, force=True)
            assert here.core._told_idle == {}

    run_core(work)
