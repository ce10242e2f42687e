"""Commits that make no sense are refused with a typed error, and change neither journal nor memory.

Whatever comes, what a restart takes back from the journal is what was in memory before it.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._protocol.messages import BLOCK_BYTES, INLINE_BASE, CommitRequest, Write
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.commits import Commits
from clamor_ray.actors.commits.journal import Journal
from tests.actors.test_commits import HERE, FakeHomes

N_BLOCKS = 100
REGIONS = (1, 2)


def opened() -> CommitLog:
    log = CommitLog()
    for region in REGIONS:
        log.open(region, (HERE,), N_BLOCKS * BLOCK_BYTES)
    return log


def state_of(log: CommitLog) -> object:
    return (
        {region: (v.newest, v.entries, v.blocks, v.plans) for region, v in log._variables.items()},
        log._outcomes,
        log._bytes,
    )


def after_a_restart(journal: Journal) -> CommitLog:
    saved, log = journal.load(), opened()
    log.restore(
        saved.entries,
        saved.plans,
        saved.acknowledged,
        saved.outcomes,
        saved.freed_inline,
        saved.dropped,
    )
    return log


def without_plans(state: Any) -> object:
    """Entries come back without their plans, which the journal has apart."""
    variables, outcomes, _ = state
    return (
        {
            region: (
                newest,
                [(e.version, e.commit_id, e.blocks, e.payload) for e in entries],
                *rest,
            )
            for region, (newest, entries, *rest) in variables.items()
        },
        outcomes,
    )


good_blocks = st.frozensets(st.integers(0, N_BLOCKS - 1), min_size=1, max_size=5)
bad_bytes = st.one_of(
    st.binary(max_size=40),
    st.builds(
        lambda blocks, at, bits, tail: mangled(BitMap(blocks).serialize(), at, bits) + tail,
        good_blocks,
        st.integers(0, 60),
        st.integers(0, 255),
        st.binary(max_size=3),
    ),
    st.sampled_from(
        [None, 7, "text", BitMap([N_BLOCKS]).serialize(), BitMap([1 << 31]).serialize()]
    ),
)
any_number = st.one_of(
    st.integers(0, 3),
    st.sampled_from([-1, 1 << 62, 1 << 63, (1 << 64) - 1, 1 << 64, 1 << 80, 1.5, None, "1"]),
)


def mangled(good: bytes, at: int, bits: int) -> bytes:
    at %= len(good)
    return good[:at] + bytes([good[at] ^ bits]) + good[at + 1 :]


@st.composite
def good_write(draw: Any) -> Write:
    if draw(st.booleans()):
        return Write(INLINE_BASE + 5, draw(st.integers(0, 3)), 0, b"", 0, 0, None, b"content")
    blocks = draw(good_blocks)
    return Write(
        draw(st.sampled_from(REGIONS)),
        draw(st.integers(0, 3)),
        len(blocks),
        BitMap(blocks).serialize(),
        8192,
        HERE,
        draw(st.sampled_from([None, None, b"plan"])),
    )


@st.composite
def hostile_write(draw: Any) -> Any:
    write = draw(good_write())
    name, values = draw(
        st.sampled_from(
            [
                ("region", st.one_of(any_number, st.just(INLINE_BASE + 5))),
                ("base_version", any_number),
                ("n_blocks", any_number),
                ("blocks", bad_bytes),
                ("layer_bytes", any_number),
                ("staged_at", any_number),
                ("plan", st.sampled_from([7, "text", ["list"]])),
                ("payload", st.sampled_from([7, "text", b"x" * 5000, b""])),
            ]
        )
    )
    fields = {**write.__dict__, name: draw(values)}
    return draw(st.sampled_from([Write(**fields)] * 9 + [None, "write"]))


requests = st.builds(
    CommitRequest,
    st.one_of(st.integers(1, 1 << 64), st.integers(1, 20), any_number),
    st.one_of(
        st.lists(st.one_of(good_write(), hostile_write()), max_size=3).map(tuple),
        st.sampled_from([None, 7]),
    ),
    st.sampled_from([0.0, 0.0, 0.0, 0.1, -1.0, float("nan"), float("inf"), "1", None]),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(requests, min_size=1, max_size=8))
def test_memory_and_journal_stay_one(sent: list[CommitRequest]) -> None:
    async def work(directory: str) -> None:
        journal, log = Journal(Path(directory, "journal")), opened()
        commits = Commits(log, journal, FakeHomes(), 2.0, lambda: 1.0)
        try:
            for request in sent:
                before = repr(state_of(log))
                try:
                    await commits.commit(request)
                except errors.ClamorError:
                    assert repr(state_of(log)) == before
                log.check()
                again = after_a_restart(journal)
                again.check()
                assert without_plans(state_of(again)) == without_plans(state_of(log))
        finally:
            await commits.close()
            journal.close()

    with tempfile.TemporaryDirectory() as directory:
        asyncio.run(work(directory))


GOOD = BitMap([3, 4]).serialize()


@pytest.mark.parametrize(
    ("write", "match"),
    [
        (Write(1, 0, 2, b"no bitmap", 8192, HERE), "cannot be read"),
        (Write(1, 0, 2, GOOD + b"tail", 8192, HERE), "cannot be read"),
        (Write(1, 0, 3, GOOD, 8192, HERE), "3 blocks"),
        (Write(1, 0, 2, GOOD, 0, HERE), "without a layer"),
        (Write(1, 0, 1, BitMap([N_BLOCKS]).serialize(), 8192, HERE), "block 100 .* has 100"),
        (Write(INLINE_BASE + 1, 0, 0, b"", 0, 0, None, b"x" * 4097), "4097 bytes"),
        (Write(INLINE_BASE + 1, 0, 2, GOOD, 8192, HERE, None, b"x"), "blocks"),
    ],
)
def test_the_refusal_says_what_is_wrong(write: Write, match: str) -> None:
    log = opened()
    with pytest.raises(errors.ProtocolError, match=match) as caught:
        log.prepare(CommitRequest(1, (write,)))
    assert str(write.region) in caught.value.message
    assert state_of(log) == state_of(opened())
