"""What is read in a second, by a clock of the test."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from clamor_ray.actors.process.byte_rate import ByteRate

SLACK = 1e-6  # of sums of floats


class Clock:
    """Goes on only where somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.n_sleeps = 0

    def read(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.n_sleeps += 1
        await asyncio.sleep(0)
        self.now_s += seconds

    def rate(self, bytes_s: int) -> ByteRate:
        return ByteRate(bytes_s, self.read, self.sleep)


@given(
    bytes_s=st.integers(1, 1 << 40),
    steps=st.lists(st.tuples(st.integers(0, 1 << 32), st.floats(0, 100)), max_size=20),
)
def test_any_time_has_its_bytes_and_one_request(
    bytes_s: int, steps: list[tuple[int, float]]
) -> None:
    """Each waits so long before it asks, and all ask at once then."""
    clock = Clock()
    rate = clock.rate(bytes_s)
    given_at: list[tuple[float, int]] = []

    async def work() -> None:
        for n_bytes, pause_s in steps:
            clock.now_s += pause_s
            await rate.take(n_bytes)
            given_at.append((clock.now_s, n_bytes))

    asyncio.run(work())
    for first, (begun_s, _) in enumerate(given_at):
        for last in range(first, len(given_at)):
            most = bytes_s * (given_at[last][0] - begun_s) + given_at[last][1]
            read = sum(n_bytes for _, n_bytes in given_at[first : last + 1])
            assert read <= most + bytes_s * SLACK + SLACK * read


@given(
    bytes_s=st.integers(1, 1 << 40), sizes=st.lists(st.integers(0, 1 << 32), min_size=1, max_size=9)
)
def test_those_who_always_read_get_all_of_it(bytes_s: int, sizes: list[int]) -> None:
    """In the order in which they came."""
    clock = Clock()
    rate, done = clock.rate(bytes_s), []

    async def one(number: int, n_bytes: int) -> None:
        await rate.take(n_bytes)
        done.append(number)

    async def work() -> None:
        await asyncio.gather(*(one(*each) for each in enumerate(sizes)))
        await rate.take(0)

    begun_s = clock.now_s
    asyncio.run(work())
    assert done == list(range(len(sizes)))
    took_s = sum(sizes) / bytes_s
    assert abs(clock.now_s - begun_s - took_s) <= SLACK * (1 + took_s)


def test_what_was_not_read_is_not_saved() -> None:
    clock = Clock()
    rate = clock.rate(100)
    clock.now_s += 3600
    rate.spend(100)
    assert rate.wait_s() == 1.0
    clock.now_s += 0.25
    assert rate.wait_s() == 0.75


def test_who_is_cancelled_has_taken_nothing() -> None:
    clock = Clock()
    rate, go = clock.rate(100), asyncio.Event()

    async def sleep(seconds: float) -> None:
        await go.wait()
        await clock.sleep(seconds)

    rate._sleep = sleep

    async def work() -> None:
        await rate.take(100)
        waiting = [asyncio.ensure_future(rate.take(10**6)) for _ in range(2)]
        last = asyncio.ensure_future(rate.take(50))
        await asyncio.sleep(0)
        for each in waiting:
            each.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        go.set()
        await last
        assert clock.now_s == 1001.0
        assert rate.wait_s() == 0.5

    asyncio.run(work())


def test_without_a_limit_nobody_waits() -> None:
    clock = Clock()
    rate = clock.rate(0)

    async def work() -> None:
        for _ in range(9):
            await rate.take(1 << 50)

    asyncio.run(work())
    assert not clock.n_sleeps
    assert rate.bytes_in(1e-9) == float("inf")
