"""Who is next of those that wait."""

from __future__ import annotations

import asyncio
import random

import pytest

from clamor_ray.actors.process.turns import Turns


class Crowd:
    """Some that take a turn each, and keep it until they are told."""

    def __init__(self, at_once: int) -> None:
        self.turns = Turns(at_once)
        self.begun: list[int] = []
        self.running: dict[int, asyncio.Event] = {}
        self.most = 0

    async def one(self, number: int) -> None:
        async with self.turns.of(number):
            self.begun.append(number)
            self.running[number] = asyncio.Event()
            self.most = max(self.most, len(self.running))
            try:
                await self.running[number].wait()
            finally:
                del self.running[number]

    async def end(self, number: int) -> None:
        self.running[number].set()
        for _ in range(3):
            await asyncio.sleep(0)


def test_the_one_that_was_asked_for_most_is_next() -> None:
    async def work() -> None:
        crowd = Crowd(1)
        work = [asyncio.ensure_future(crowd.one(number)) for number in range(6)]
        await asyncio.sleep(0)
        for number in (4, 3, 4, 0, 5):
            crowd.turns.ask(number)
        await crowd.end(0)
        await crowd.end(4)
        crowd.turns.forget(5)  # nobody waits for it any more
        await crowd.end(3)
        for number in (1, 2, 5):  # as they came
            await crowd.end(number)
        await asyncio.gather(*work)
        assert crowd.begun == [0, 4, 3, 1, 2, 5]
        assert crowd.most == 1

    asyncio.run(work())


@pytest.mark.parametrize("seed", range(20))
def test_all_have_their_turn_whoever_is_cancelled(seed: int) -> None:
    rng = random.Random(seed)

    async def work() -> None:
        crowd = Crowd(3)
        tasks = {n: asyncio.ensure_future(crowd.one(n)) for n in range(30)}
        cancelled = set()
        while len(crowd.begun) < 30 - len(cancelled - set(crowd.begun)) or crowd.running:
            what = rng.random()
            if what < 0.2:
                number = rng.randrange(30)
                if tasks[number].cancel():
                    cancelled.add(number)
            elif what < 0.7 and crowd.running:
                crowd.running[rng.choice(list(crowd.running))].set()
            else:
                crowd.turns.ask(rng.randrange(30))
            if rng.random() < 0.7:  # else several of these happen at one moment
                await asyncio.sleep(0)
        await asyncio.wait(tasks.values(), timeout=30.0)
        assert all(task.done() for task in tasks.values())
        assert crowd.most == 3
        assert len(set(crowd.begun)) == len(crowd.begun)
        for _ in range(3):  # and all turns are there again
            tasks = {n: asyncio.ensure_future(crowd.one(n)) for n in range(3)}
            await asyncio.sleep(0)
            assert sorted(crowd.running) == [0, 1, 2]
            for number in range(3):
                crowd.running[number].set()
            await asyncio.wait_for(asyncio.gather(*tasks.values()), 30.0)

    asyncio.run(work())
