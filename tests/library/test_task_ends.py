"""What is run again learns why the attempt before it ended. No Ray."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import pytest

from clamor_ray import errors
from clamor_ray._native.client import PC_ERR_EXPIRED, PC_ERR_HOME_LOST
from clamor_ray._native.pieced_client import PieceVersion
from clamor_ray._tasks import task_ends as _task_ends
from clamor_ray._tasks.task_ends import Run
from clamor_ray.actors.lost_homes import task_end_log
from clamor_ray.actors.lost_homes.task_end_log import TaskEnd
from clamor_ray.actors.page_server.engine_like import Answer, EventKind
from tests.support.server_rig import HERE, FakeEvent, Node, until

TASK = bytes(range(24))
LOST = TaskEnd(7, 3, 20, PC_ERR_HOME_LOST)
EXPIRED = TaskEnd(7, 3, 20, PC_ERR_EXPIRED)


# ------------------------------------------------------------------ the registry's part


def test_the_newest_are_kept() -> None:
    async def work() -> None:
        ends = task_end_log.TaskEndLog(most=3)
        for task in ("a", "b", "c", "a", "d"):
            ends.note(task, LOST)
        found = [await ends.find(task, 0) is not None for task in "abcd"]
        assert found == [True, False, True, True]

    asyncio.run(work())


def test_one_that_is_on_its_way_is_waited_for() -> None:
    async def work() -> None:
        ends = task_end_log.TaskEndLog()
        asking = asyncio.ensure_future(ends.find("a", 5))
        await asyncio.sleep(0.01)
        ends.note("b", EXPIRED)
        await asyncio.sleep(0.01)
        assert not asking.done()
        ends.note("a", LOST)
        assert await asyncio.wait_for(asking, 5) == LOST
        assert await asyncio.wait_for(ends.find("c", 0.01), 5) is None

    asyncio.run(work())


# ------------------------------------------------------------------ the page server's part


def test_the_page_server_tells_what_is_final() -> None:
    async def work() -> None:
        async with Node(HERE) as here:
            task = TASK.hex()
            here.known.versions["task_ended", task, LOST] = [RuntimeError("not now"), None]
            here.known.versions["task_ended", task, EXPIRED] = [None]
            for error in (Answer.TIMEOUT, PC_ERR_HOME_LOST, Answer.NO_REGION, PC_ERR_EXPIRED):
                event = FakeEvent(
                    EventKind.TASK_ENDED, 7, text=task, error=error, version=3, block=20
                )
                here.engine.ask(event)
            await until(lambda: len(here.known.asked_versions) == 3)
            await asyncio.sleep(0.1)
            told = [question[2] for question in here.known.asked_versions]
            assert (told.count(LOST), told.count(EXPIRED), len(told)) == (2, 1, 3)

    asyncio.run(work())


# ------------------------------------------------------------------ the process's part


class FakeClient:
    def __init__(self) -> None:
        self.noted: list[bytes] = []

    def note_task(self, task: bytes) -> None:
        self.noted.append(task)


class FakeSession:
    def __init__(self) -> None:
        self.end: TaskEnd | None = None
        self.asked: list[float] = []
        self.why: errors.HomeLostError | None = None
        self.fails = False

    @property
    def rpc(self) -> FakeSession:
        """It is its own registry."""
        if self.fails:
            raise errors.ServerUnavailableError("The registry does not answer.")
        return self

    def why_lost(self, region: int) -> errors.HomeLostError | None:
        assert region == 7
        return self.why

    def end_of_task(self, task: str, wait_s: float) -> TaskEnd | None:
        assert task == TASK.hex()
        self.asked.append(wait_s)
        return self.end


class Process:
    """Opens variables in attempts of tasks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run: Run | None = Run(TASK, 1)
        monkeypatch.setattr(_task_ends, "running", lambda: self.run)
        self.session, self.client = FakeSession(), FakeClient()
        self.ends = _task_ends.TaskEnds()

    def open(
        self,
        region: int = 7,
        version: int = 3,
        loss: int = 5,
        name: str | None = None,
        pieces: tuple[PieceVersion, ...] = (),
    ) -> None:
        client: Any = self.client
        session: Any = self.session
        ref: Any = SimpleNamespace(
            _region=region, version=version, name=name, _piece_versions=lambda: pieces
        )
        self.ends.check(session, ref, self.ends.note(client), loss)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


def test_what_was_lost_is_raised_with_the_touch(process: Process) -> None:
    process.session.end = LOST
    process.session.why = errors.HomeLostError("2 of 9 blocks are lost.", hint="Do this.")
    for _ in range(2):
        with pytest.raises(errors.HomeLostError) as caught:
            process.open()
        assert "2 of 9 blocks are lost." in str(caught.value)
        assert "variable 7 version 3 block 20" in str(caught.value)
        assert str(caught.value).endswith("Do this.")
        assert caught.value.code == PC_ERR_HOME_LOST
    assert len(process.session.asked) == 1


def test_where_the_registry_does_not_say_why_it_is_lost(process: Process) -> None:
    process.session.end = LOST
    with pytest.raises(errors.HomeLostError, match="variable 7 version 3 block 20"):
        process.open()


def test_what_was_kept_no_longer_is_raised(process: Process) -> None:
    process.session.end = EXPIRED
    with pytest.raises(errors.SnapshotExpired, match="variable 7 version 3 block 20"):
        process.open(loss=0)
    with pytest.raises(errors.SnapshotExpired, match="variable 'index' version 3 block 20"):
        process.open(loss=0, name="index")


def test_other_variables_and_versions_are_opened(process: Process) -> None:
    process.session.end = LOST
    process.open(region=8)
    process.open(version=4)
    with pytest.raises(errors.HomeLostError):
        process.open()


def test_the_touch_may_have_been_of_a_piece(process: Process) -> None:
    process.session.end = LOST
    pieces = [PieceVersion(6, 9, 1 << 44, 4096), PieceVersion(7, 3, 2 << 44, 4096)]
    process.open(region=5, version=12, pieces=(pieces[0],))
    process.open(region=5, version=12, pieces=(pieces[0], pieces[1]._replace(version=4)))
    with pytest.raises(errors.HomeLostError):
        process.open(region=5, version=12, pieces=tuple(pieces))


def test_an_end_for_another_reason_is_asked_about_once(process: Process) -> None:
    for _ in range(3):
        process.open(loss=0)
    assert process.session.asked == [0.0]  # and nothing is waited for
    for _ in range(3):
        process.open(loss=5)
    assert process.session.asked == [0.0, _task_ends.ON_ITS_WAY_S]


def test_a_first_attempt_asks_nothing(process: Process) -> None:
    process.session.end = LOST
    process.run = Run(TASK, 0)
    process.open()
    assert process.session.asked == []
    process.run = Run(TASK, 1)  # which Ray runs again in the same process
    with pytest.raises(errors.HomeLostError):
        process.open()


def test_the_client_hears_of_each_task_once(process: Process) -> None:
    other = bytes(reversed(TASK))
    for run in (Run(TASK, 0), Run(TASK, 0), None, Run(other, 0), Run(TASK, 0)):
        process.run = run
        process.open()
    assert process.client.noted == [TASK, other, TASK]


def test_a_registry_that_does_not_answer_is_asked_again(process: Process) -> None:
    process.session.end = LOST
    process.session.fails = True
    process.open()
    process.session.fails = False
    with pytest.raises(errors.HomeLostError):
        process.open()


def test_a_childs_end_is_not_its_parents(process: Process) -> None:
    process.session.end = LOST
    child = os.fork()
    if not child:
        try:
            process.open()
            os._exit(10 + len(process.client.noted) + len(process.session.asked))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 10
