"""Which session has which addresses: no two that live share one, whoever writes when."""

from __future__ import annotations

import itertools
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clamor_ray import errors
from clamor_ray._protocol.messages import INLINE_BASE
from clamor_ray._protocol.refusals import NoAddresses, TooLarge
from clamor_ray._protocol.rpc import _meaning_of
from clamor_ray.actors.window.address_claims import (
    LEAST_BYTES,
    MOST_BYTES,
    REGION_IDS,
    AddressClaims,
    Claim,
    gaps,
)
from clamor_ray.actors.window.address_space import (
    GUARD_BYTES,
    UNIT_BYTES,
    WINDOW_BEGIN,
    WINDOW_END,
    AddressSpace,
)
from tests.support.claims_table import ListTable

GIB = 1 << 30
WINDOW = (WINDOW_BEGIN, WINDOW_BEGIN + 16 * LEAST_BYTES)


def session(table: ListTable, scope: str, ended: set[str] | None = None, **more) -> AddressClaims:
    return AddressClaims(table, scope, (set() if ended is None else ended).__contains__, **more)


def disjoint(claims: list[Claim]) -> bool:
    ordered = sorted(claims, key=lambda claim: claim.begin)
    return all(a.end <= b.begin for a, b in itertools.pairwise(ordered))


def test_two_sessions_share_no_address_and_no_id() -> None:
    table = ListTable()
    (a,) = session(table, "a").claim(1, known=0)
    (b,) = session(table, "b").claim(1, known=0)
    assert (a.begin, a.end) == (WINDOW_BEGIN, WINDOW_BEGIN + LEAST_BYTES)
    assert disjoint([a, b])
    assert (a.region_ids, b.region_ids) == (0, REGION_IDS)


def test_it_takes_more_the_more_it_has() -> None:
    table = ListTable()
    claims = session(table, "a")
    sizes = []
    for known in range(6):
        mine = claims.claim(1, known=known)
        sizes.append(mine[-1].end - mine[-1].begin)
    assert sizes == [LEAST_BYTES * n for n in (1, 1, 2, 4, 8, 16)]
    (mine,) = session(table, "b").claim(3 << 40, known=0)
    assert mine.end - mine.begin == (3 << 40) + GUARD_BYTES
    (*_, mine) = session(table, "b").claim(1, known=1)
    assert mine.end - mine.begin == MOST_BYTES


def test_the_first_claim_is_seen_by_the_second() -> None:
    """Another session writes between the look at the log and the write."""
    table = ListTable()
    other, found = session(table, "other"), []

    def interrupt() -> None:
        table.before_append = lambda: None
        found.extend(other.claim(1, known=0))

    table.before_append = interrupt
    (mine,) = session(table, "mine").claim(1, known=0)
    assert [claim.number for claim in [*found, mine]] == [0, 1]
    assert disjoint([*found, mine])


def test_a_lost_answer_costs_no_addresses() -> None:
    table = ListTable()
    claims = session(table, "a")
    table.loses_answer = lambda: True
    with pytest.raises(ConnectionError):
        claims.claim(1, known=0)
    (found,) = claims.claim(1, known=0)  # it writes nothing
    assert found.number == 0


def test_who_has_no_claim_is_new() -> None:
    table = ListTable()
    session(table, "b").claim(1, known=0)
    claims = session(table, "a")
    assert claims.is_new()
    claims.claim(1, known=0)
    assert not claims.is_new()
    assert not session(table, "a").is_new()


def test_after_a_restart_it_has_what_it_had() -> None:
    table = ListTable()
    before = session(table, "a").claim(1, known=0)
    session(table, "b").claim(1, known=0)
    assert session(table, "a").claim(1, known=0) == before


def test_what_the_driver_still_uses_elsewhere_is_left_out() -> None:
    avoid = [(WINDOW_BEGIN + UNIT_BYTES, WINDOW_BEGIN + 2 * UNIT_BYTES)]
    (mine,) = session(ListTable(), "a", avoid=avoid).claim(1, known=0)
    assert mine.begin == avoid[0][1]
    (mine,) = session(ListTable(), "a", avoid=[(WINDOW_BEGIN, WINDOW_END)]).claim(1, known=0)
    assert mine.begin == WINDOW_BEGIN  # a refused map there is better than none anywhere


def test_what_is_larger_than_the_window_says_so() -> None:
    """To free something, or to end a session, would not help: nobody is asked for that."""
    with pytest.raises(TooLarge) as caught:
        session(ListTable(), "a").claim(8 * 10**15, known=0)
    error = _meaning_of(caught.value)
    assert isinstance(error, errors.OutOfMemoryError)
    assert "7.1 PiB is larger than all addresses that there are, 24.0 TiB" in error.message
    assert error.hint.startswith("Make several smaller ones")
    full = _meaning_of(NoAddresses("x"))
    assert full.hint.startswith("Free variables that are not needed, or end another session")


def test_a_full_window_gives_the_oldest_of_those_that_have_ended() -> None:
    table, ended = ListTable(), set()
    for number in range(16):
        session(table, f"s{number}", ended, window=WINDOW).claim(1, known=0)
    late = session(table, "late", ended, window=WINDOW)
    with pytest.raises(NoAddresses, match=r"a variable of .* finds no room: the sessions of this"):
        late.claim(1, known=0)
    ended |= {"s3", "s9"}
    (mine,) = late.claim(1, known=0)
    third = Claim.unpacked(3, table.log[3])
    assert (mine.begin, mine.end) == (third.begin, third.begin + UNIT_BYTES + GUARD_BYTES)
    assert mine.region_ids == 16 * REGION_IDS  # addresses come again, ids never
    with pytest.raises(NoAddresses):
        late.claim(2 * LEAST_BYTES, known=1)


def test_ids_stay_below_those_of_inline_variables() -> None:
    assert Claim(10**9, "s", 0, 1).region_ids + REGION_IDS < INLINE_BASE


def test_threads_of_many_sessions() -> None:
    table, mutex = ListTable(), threading.Lock()
    append, entries, found = table.append, table.entries, []
    table.append = lambda *args: locked(append, *args)  # type: ignore[method-assign]
    table.entries = lambda *args: locked(entries, *args)  # type: ignore[method-assign]

    def locked(call, *args):
        with mutex:
            return call(*args)

    def run(scope: str) -> None:
        claims = session(table, scope)
        for known in range(5):
            mine = claims.claim(GIB, known=known)
        found.extend(mine)

    threads = [threading.Thread(target=run, args=(f"s{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert len(found) == 8 * 5
    assert disjoint(found)
    assert len({claim.number for claim in found}) == len(found)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12))), st.integers(0, 30))
def test_gaps_are_what_is_not_taken(taken: list[tuple[int, int]], end: int) -> None:
    ranges = [(low, low + n) for low, n in taken]
    free = {at for low, high in gaps(ranges, 0, end + 1) for at in range(low, high)}
    assert free == set(range(end + 1)) - {at for low, high in ranges for at in range(low, high)}


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_sessions_that_live_never_share(data: st.DataObject) -> None:
    """Sessions begin, grow, restart their registries, lose answers and end, in any order."""
    table, ended = ListTable(), set()
    live: dict[str, tuple[AddressClaims, list[Claim]]] = {}
    first_ids: list[int] = []
    numbers = itertools.count()
    for _ in range(data.draw(st.integers(1, 40))):
        what = data.draw(st.sampled_from(["begin", "grow", "restart", "lose", "end"]))
        table.loses_answer = lambda: False
        if what == "begin" or not live:
            scope = f"s{next(numbers)}"
            live[scope] = (session(table, scope, ended, window=WINDOW), [])
            continue
        scope = data.draw(st.sampled_from(sorted(live)))
        claims, mine = live[scope]
        if what == "end":
            ended.add(scope)
            del live[scope]
        elif what == "restart":
            live[scope] = (session(table, scope, ended, window=WINDOW), [])
        else:
            table.loses_answer = lambda what=what: what == "lose"
            length_bytes = data.draw(st.sampled_from([1, GIB, LEAST_BYTES, 3 * LEAST_BYTES]))
            try:
                found = claims.claim(length_bytes, known=len(mine))
            except (ConnectionError, NoAddresses):
                continue
            assert len(found) > len(mine)
            first_ids.append(found[0].region_ids)
            live[scope] = (claims, found)
        held = [
            claim
            for number, entry in enumerate(table.log)
            if (claim := Claim.unpacked(number, entry)).scope in live
        ]
        assert disjoint(held)
        assert all(WINDOW[0] <= claim.begin < claim.end <= WINDOW[1] for claim in held)
        assert len({claims[0].region_ids for _, claims in live.values() if claims}) == sum(
            bool(claims) for _, claims in live.values()
        )


# -- what of it the registry has


def test_a_space_of_claims() -> None:
    space = AddressSpace(ours=False)
    space.check()
    assert not space.has_room(1)
    with pytest.raises(NoAddresses):
        space.allocate(1)
    begin = WINDOW_BEGIN + LEAST_BYTES
    space.acquire(begin, begin + LEAST_BYTES)
    assert space.has_room(LEAST_BYTES - GUARD_BYTES)
    assert not space.has_room(LEAST_BYTES)
    first = space.allocate(1)
    assert first == begin
    space.acquire(begin, begin + LEAST_BYTES)  # twice is once
    space.check()
    assert space.allocate(1) != first
    space.acquire(begin + LEAST_BYTES, begin + 2 * LEAST_BYTES)
    assert space.has_room(LEAST_BYTES + GIB)  # joined
    space.check()


def test_a_journal_that_is_read_before_the_log() -> None:
    space = AddressSpace(ours=False)
    space.reserve(WINDOW_BEGIN + 8 * UNIT_BYTES, 1)
    space.check()
    assert not space.has_room(1)
    with pytest.raises(ValueError, match="not free"):
        space.reserve(WINDOW_BEGIN + 8 * UNIT_BYTES, 1)
    space.acquire(WINDOW_BEGIN, WINDOW_BEGIN + LEAST_BYTES)
    space.check()
    taken = {space.allocate(1) for _ in range(8)}
    assert WINDOW_BEGIN + 8 * UNIT_BYTES not in taken
    space.release(WINDOW_BEGIN + 8 * UNIT_BYTES)
    space.check()


def lasting(table: ListTable, scope: str, ended: set[str] | None = None, **more) -> AddressClaims:
    return session(table, scope, ended, is_lasting=True, **more)


def ranges(claims: list[Claim]) -> list[tuple[int, int]]:
    return [(claim.begin, claim.end) for claim in claims]


def test_a_store_begins_at_a_random_place_and_goes_on_behind_it() -> None:
    firsts = set()
    for _ in range(8):
        table = ListTable()
        claims = lasting(table, "s")
        (first,) = claims.claim(1, known=0)
        assert first.begin % LEAST_BYTES == 0
        second = claims.claim(1, known=1)[-1]
        assert second.begin in (first.end, WINDOW_BEGIN)  # the latter behind the window's end
        firsts.add(first.begin)
    assert len(firsts) > 1


def test_a_store_finds_room_before_its_place_where_there_is_none_behind_it() -> None:
    table = ListTable()
    claims = lasting(table, "s", window=WINDOW)
    mine: list[tuple[int, int]] = []
    is_full = False
    while not is_full:
        try:
            mine = ranges(claims.claim(LEAST_BYTES - GUARD_BYTES, known=len(mine)))
        except NoAddresses:
            is_full = True
    assert gaps(mine, *WINDOW) == []


def test_a_store_has_in_another_cluster_the_addresses_that_it_had() -> None:
    before = ranges(lasting(ListTable(), "s").claim(1, known=0))
    table = ListTable()
    (other,) = session(table, "other").claim(1, known=0)
    again = lasting(table, "s")
    again.claim_exactly(before)
    again.claim_exactly(before)
    assert len(table.entries(0)) == 2
    more = again.claim(1, known=1)
    assert ranges(more)[:1] == before
    assert disjoint([other, *more])
    assert disjoint([*session(table, "third").claim(1, known=0), *more])


def test_addresses_of_a_store_that_another_session_has_are_not_taken() -> None:
    table, ended = ListTable(), set()
    (other,) = session(table, "other").claim(1, known=0)
    wanted = [(other.end - UNIT_BYTES, other.end + LEAST_BYTES)]
    store = lasting(table, "s", ended)
    with pytest.raises(
        errors.AddressClashError, match="the one called other has addresses"
    ) as clash:
        store.claim_exactly(wanted, "the one called {}".format)
    assert "End that session" in clash.value.hint
    assert len(table.entries(0)) == 1
    ended.add("other")
    store.claim_exactly(wanted)
    assert ranges(store.claim(1, known=0)) == wanted


def test_addresses_that_its_driver_still_uses_are_not_taken() -> None:
    table, wanted = ListTable(), (WINDOW_BEGIN, WINDOW_BEGIN + LEAST_BYTES)
    store = lasting(table, "s", avoid=[(wanted[1] - 4096, wanted[1])])
    with pytest.raises(errors.AddressClashError, match="holds objects of a session"):
        store.claim_exactly([wanted])
    assert table.entries(0) == []


def test_what_another_took_while_the_store_was_closed_is_taken_back_only_when_that_has_ended() -> (
    None
):
    table, ended = ListTable(), {"s"}
    before = ranges(
        lasting(table, "s", window=(WINDOW_BEGIN, WINDOW_BEGIN + LEAST_BYTES)).claim(1, 0)
    )
    other = session(table, "other", ended, window=before[0])
    assert ranges(other.claim(1, known=0)) == [(before[0][0], before[0][0] + 2 * UNIT_BYTES)]
    again = lasting(table, "s", ended)
    with pytest.raises(errors.AddressClashError, match="session other"):
        again.claim_exactly(before)
    ended.add("other")
    again.claim_exactly(before)
    assert ranges(again.claim(1, known=0)) == before


def test_the_first_who_writes_has_them() -> None:
    """Another session takes them between the look at the log and the write."""
    table = ListTable()
    wanted = (WINDOW_BEGIN, WINDOW_BEGIN + LEAST_BYTES)

    def interrupt() -> None:
        table.before_append = lambda: None
        session(table, "other").claim(1, known=0)

    table.before_append = interrupt
    with pytest.raises(errors.AddressClashError, match="session other"):
        lasting(table, "s").claim_exactly([wanted])
