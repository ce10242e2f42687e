"""Addresses, regions and their end, without Ray."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from clamor_ray._protocol.messages import (
    EXTENT_BYTES,
    RegionFreed,
    RegionRecord,
    RegionUnknown,
    ServerInfo,
    ServerLost,
)
from clamor_ray._protocol.names import server_id_of
from clamor_ray._protocol.refusals import IllegalTransition, NoAddresses, NoSuchRegion, NoSuchServer
from clamor_ray.actors.registry.registry_core import (
    TRANSITIONS,
    RegionEvent,
    RegionState,
    RegistryCore,
    Retire,
)
from clamor_ray.actors.window.address_space import (
    GUARD_BYTES,
    UNIT_BYTES,
    WINDOW_BEGIN,
    WINDOW_END,
    AddressSpace,
)

HOME, READER, OTHER = 11, 22, 33


def info(server_id: int) -> ServerInfo:
    return ServerInfo(server_id, f"node-{server_id}", "127.0.0.1", 1, f"name-{server_id}", "0.1.0")


@pytest.fixture
def core():
    core = RegistryCore()
    for server_id in (HOME, READER, OTHER):
        core.server_registered(info(server_id))
    yield core
    core.check()


def ready(core: RegistryCore, length_bytes: int = 100) -> RegionRecord:
    record = core.create_region(length_bytes, HOME)
    core.seal(record.region)
    return record


# -- addresses


def test_addresses_are_aligned_and_apart() -> None:
    space = AddressSpace()
    first, second, third = (space.allocate(n) for n in (1, UNIT_BYTES + 1, 1))
    assert first == WINDOW_BEGIN
    assert second == first + UNIT_BYTES + GUARD_BYTES
    assert third == second + 2 * UNIT_BYTES + GUARD_BYTES
    space.check()


def test_the_lowest_gap_that_fits_is_used_again() -> None:
    space = AddressSpace()
    small, _, large, _ = (space.allocate(n * UNIT_BYTES) for n in (1, 1, 5, 1))
    space.release(large)
    space.release(small)
    assert space.allocate(2 * UNIT_BYTES) == large
    assert space.allocate(1) == small
    space.check()


def test_free_neighbours_are_joined() -> None:
    space = AddressSpace(WINDOW_BEGIN, WINDOW_BEGIN + 6 * UNIT_BYTES)
    parts = [space.allocate(1) for _ in range(3)]
    with pytest.raises(NoAddresses, match="a variable of 1 B finds no room"):
        space.allocate(1)
    for part in (parts[0], parts[2], parts[1]):
        space.release(part)
        space.check()
    assert space.allocate(5 * UNIT_BYTES) == WINDOW_BEGIN
    assert space.bytes_in_use == 6 * UNIT_BYTES


def test_the_whole_window_less_one_guard_is_the_largest_region() -> None:
    most = WINDOW_END - WINDOW_BEGIN - GUARD_BYTES
    with pytest.raises(NoAddresses):
        AddressSpace().allocate(most + 1)
    assert AddressSpace().allocate(most) == WINDOW_BEGIN


@pytest.mark.parametrize("length_bytes", [0, -1])
def test_no_region_is_empty(length_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"{length_bytes} bytes"):
        AddressSpace().allocate(length_bytes)


def test_server_ids_are_stable_distinct_and_fit() -> None:
    ids = {server_id_of(f"{n:056x}") for n in range(1000)}
    assert len(ids) == 1000
    assert all(0 < server_id < 2**64 for server_id in ids)
    assert server_id_of("a" * 56) == 0x273956756BA559F3


# -- the life of a region


def test_a_region_is_seen_only_after_seal(core: RegistryCore) -> None:
    record = core.create_region(EXTENT_BYTES + 1, HOME)
    assert record.homes == (HOME, HOME)
    assert core.lookup(record.region, READER) == RegionUnknown(record.region)
    core.seal(record.region)
    assert core.lookup(record.region, READER) == record
    assert core.lookup(999, READER) == RegionUnknown(999)


def test_the_address_returns_only_when_everybody_let_go(core: RegistryCore) -> None:
    record = ready(core)
    region = record.region
    core.lookup(region, READER)
    assert core.free(region) == (Retire(HOME, region, False), Retire(READER, region, False))
    assert core.lookup(region, OTHER) == RegionFreed(region)
    assert core.region_idle(region, HOME) == ()
    assert ready(core).base_address != record.base_address
    assert core.region_idle(region, READER) == (Retire(HOME, region, True),)
    assert core.state(region) is RegionState.DROPPING
    assert ready(core).base_address != record.base_address
    core.dropped(region, HOME)
    assert core.state(region) is RegionState.GONE
    assert core.lookup(region, OTHER) == RegionFreed(region)
    assert ready(core).base_address == record.base_address


def test_a_restarted_reader_is_told_what_a_freed_region_was(core: RegistryCore) -> None:
    record = ready(core)
    region, freed = record.region, dataclasses.replace(record, freed=True)
    core.lookup(region, READER)
    core.free(region)
    assert core.lookup(region, READER) == core.lookup(region, HOME) == freed
    assert core.lookup(region, OTHER) == core.peek(region) == RegionFreed(region)
    assert core.record_of(region) == record
    assert core.waited_for() == {HOME, READER}
    core.region_idle(region, READER)  # it has no lease, so it may get none
    assert core.lookup(region, READER) == RegionFreed(region)
    core.region_idle(region, HOME)
    assert core.state(region) is RegionState.DROPPING
    assert core.lookup(region, HOME) == RegionFreed(region)
    core.dropped(region, HOME)
    assert core.record_of(region) is None


def test_a_look_is_not_waited_for(core: RegistryCore) -> None:
    record = ready(core)
    assert core.peek(record.region) == record
    assert core.free(record.region) == (Retire(HOME, record.region, False),)
    assert core.waited_for() == {HOME}


def test_freeing_twice_is_freeing_once(core: RegistryCore) -> None:
    region = ready(core).region
    assert len(core.free(region)) == 1
    assert core.free(region) == ()
    core.region_idle(region, HOME)
    assert core.free(region) == ()
    core.dropped(region, HOME)
    assert core.free(region) == ()
    with pytest.raises(NoSuchRegion, match="never existed"):
        core.free(999)


def test_reports_that_come_twice_or_late_change_nothing(core: RegistryCore) -> None:
    region = ready(core).region
    assert core.region_idle(region, READER) == ()
    core.dropped(region, HOME)
    assert core.state(region) is RegionState.READY
    core.free(region)
    core.region_idle(region, HOME)
    core.region_idle(region, HOME)
    core.dropped(region, READER)
    assert core.state(region) is RegionState.DROPPING
    core.dropped(region, HOME)
    core.dropped(region, HOME)
    assert core.region_idle(region, HOME) == ()


def test_abandoning_drops_at_once(core: RegistryCore) -> None:
    record = core.create_region(1, HOME)
    assert core.abandon(record.region) == (Retire(HOME, record.region, True),)
    assert core.abandon(record.region) == ()
    core.dropped(record.region, HOME)
    assert core.abandon(record.region) == ()
    assert core.create_region(1, HOME).base_address == record.base_address


def test_what_was_sealed_while_its_maker_gave_up_goes_with_its_last_lease(
    core: RegistryCore,
) -> None:
    """The answer of `seal` was lost, so its maker does not know, and nobody has a reference."""
    region = ready(core).region
    assert {order.server_id for order in core.abandon(region)} >= {HOME}
    assert core.state(region) is RegionState.FREED
    assert core.abandon(region) == ()
    with pytest.raises(IllegalTransition, match="no 'seal' while freed"):
        core.seal(region)  # a repeated call that is late
    for server in core.known_to(region):
        orders = core.region_idle(region, server)
    assert orders == (Retire(HOME, region, True),)
    core.dropped(region, HOME)
    assert core.state(region) is RegionState.GONE


def test_what_its_maker_maps_keeps_its_address_until_the_last_lease(core: RegistryCore) -> None:
    record = core.create_region(1, HOME)
    assert core.abandon(record.region, leased=True) == (Retire(HOME, record.region, False),)
    assert isinstance(core.peek(record.region), RegionFreed)
    assert core.create_region(1, HOME).base_address != record.base_address
    assert core.region_idle(record.region, HOME) == (Retire(HOME, record.region, True),)
    core.dropped(record.region, HOME)
    assert core.create_region(1, HOME).base_address == record.base_address


def test_what_a_dead_maker_left_is_abandoned(core: RegistryCore) -> None:
    old = core.create_region(1, HOME, now_s=100.0)
    sealed = core.create_region(1, HOME, now_s=100.0)
    core.seal(sealed.region)
    young = core.create_region(1, HOME, now_s=200.0)
    assert core.abandon_stale(100.0) == ()
    assert core.abandon_stale(150.0) == (Retire(HOME, old.region, True),)
    assert core.abandon_stale(150.0) == ()
    core.dropped(old.region, HOME)
    states = [core.state(record.region) for record in (old, sealed, young)]
    assert states == [RegionState.GONE, RegionState.READY, RegionState.CREATING]
    with pytest.raises(NoSuchRegion, match="was freed"):
        core.seal(old.region)
    assert core.create_region(1, HOME).base_address == old.base_address


def test_a_request_that_comes_again_gets_the_same_region(core: RegistryCore) -> None:
    record = core.create_region(1, HOME, request_id=9)
    assert core.create_region(1, HOME, request_id=9) == record == core.requested(9)
    assert core.create_region(1, HOME) != record
    core.undo_create(record.region)
    core.check()
    assert core.requested(9) is None
    assert core.create_region(1, HOME, request_id=9).region > record.region


def test_a_region_knows_its_distinct_homes(core: RegistryCore) -> None:
    record = core.create_region(3 * EXTENT_BYTES, HOME)
    assert core.homes_of(record.region) == ()
    core.seal(record.region)
    assert core.homes_of(record.region) == (HOME,)
    core.free(record.region)
    assert core.homes_of(record.region) == ()


def test_a_server_that_moved_is_where_it_says(core: RegistryCore) -> None:
    moved = dataclasses.replace(info(HOME), port=4711, epoch=9)
    core.server_moved(moved)
    assert core.locate(HOME) == moved
    core.server_lost(HOME, "died")
    core.server_moved(moved)
    assert isinstance(core.locate(HOME), ServerLost)


def test_after_a_restart_every_server_may_know_a_region(core: RegistryCore) -> None:
    record = ready(core)
    again = RegistryCore()
    orders = again.restore(
        2, [(record, RegionState.READY, 7)], core.servers(), [ServerLost(99, "died")], 0.0
    )
    assert orders == ()
    again.check()
    assert again.requested(7) == record
    assert isinstance(again.locate(99), ServerLost)
    assert {order.server_id for order in again.free(record.region)} == {HOME, READER, OTHER}


def test_every_pair_of_state_and_event_is_in_the_table_or_refused(core: RegistryCore) -> None:
    region = ready(core).region
    assert core.seal(region) == core.record_of(region)  # the answer was lost: asked again
    creating = core.create_region(1, HOME).region
    with pytest.raises(IllegalTransition, match="no 'free' while creating"):
        core.free(creating)
    assert not any(state is RegionState.GONE for state, _ in TRANSITIONS)
    assert {event for _, event in TRANSITIONS} == set(RegionEvent)


# -- servers


def test_a_lost_reader_counts_as_idle(core: RegistryCore) -> None:
    region = ready(core).region
    core.lookup(region, READER)
    core.free(region)
    core.region_idle(region, HOME)
    assert core.server_lost(READER, "node died") == (Retire(HOME, region, True),)
    assert core.server_lost(READER, "again") == ()
    assert core.locate(READER) == ServerLost(READER, "node died")


def test_a_lost_home_holds_nothing_back(core: RegistryCore) -> None:
    waiting, dropping, kept = (ready(core).region for _ in range(3))
    for region in (waiting, dropping):
        core.free(region)
    core.region_idle(dropping, HOME)
    assert core.server_lost(HOME, "node died") == ()
    assert core.state(waiting) is core.state(dropping) is RegionState.GONE
    assert core.state(kept) is RegionState.READY
    assert core.free(kept) == ()
    assert core.state(kept) is RegionState.GONE


def test_what_is_filled_at_a_server_that_is_lost_is_no_variable(core: RegistryCore) -> None:
    """Its node has joined again as another server, which has got the bytes, and is told to drop
    them: the maker has asked for the region before."""
    node = "c" * 56
    first = core.server_id_at(node)
    known = ServerInfo(first, node, "10.0.0.1", 1, "name", "0.1")
    core.server_registered(known)
    dropped, leased, early = (core.create_region(1, first).region for _ in range(3))
    core.server_lost(first, "its keeper died with it")
    assert core.abandon(early) == ()
    second = core.server_id_at(node)
    core.server_registered(dataclasses.replace(known, server_id=second))
    for region in (dropped, leased):
        with pytest.raises(IllegalTransition, match="died with it"):
            core.check_seal(region)
        with pytest.raises(IllegalTransition, match="died with it"):
            core.seal(region)
    assert core.abandon(dropped) == (Retire(second, dropped, True),)
    core.dropped(dropped, second)
    assert core.abandon(leased, leased=True) == (Retire(second, leased, False),)
    assert core.region_idle(leased, second) == (Retire(second, leased, True),)
    core.dropped(leased, second)
    assert {core.state(region) for region in (dropped, leased, early)} == {RegionState.GONE}
    core.check()


def test_a_restarted_server_is_told_again(core: RegistryCore) -> None:
    waiting, dropping = ready(core).region, ready(core).region
    core.free(waiting)
    core.free(dropping)
    core.region_idle(dropping, HOME)
    known, orders = core.server_registered(info(HOME))
    assert known.epoch == 2
    assert set(orders) == {Retire(HOME, waiting, False), Retire(HOME, dropping, True)}
    assert core.locate(HOME) == known


def test_a_node_whose_server_is_lost_joins_again_under_another_id(core: RegistryCore) -> None:
    node = "c" * 56
    first = core.server_id_at(node)
    assert first == server_id_of(node) == core.server_id_now(first)
    info = ServerInfo(first, node, "10.0.0.1", 1, "name", "0.1")
    core.server_registered(info)
    core.server_lost(first, "its keeper died with it")
    second = core.server_id_at(node)
    assert second not in (first, 0)
    assert core.server_id_now(first) == second
    known, _ = core.server_registered(dataclasses.replace(info, server_id=second))
    assert core.locate(second) == known
    core.server_lost(second, "again")
    assert len({first, second, core.server_id_at(node)}) == 3
    # So it is after a restart of the registry, which knows lost ones by their ids alone.
    again = RegistryCore()
    lost = [ServerLost(server_id, "") for server_id in (first, second)]
    third = dataclasses.replace(info, server_id=core.server_id_at(node))
    again.restore(1, [], [third], lost, 0.0)
    assert again.server_id_at(node) == again.server_id_now(first) == third.server_id
    assert again.server_id_now(12345) == 12345


def test_a_lost_server_stays_lost(core: RegistryCore) -> None:
    core.server_lost(HOME, "gone")
    with pytest.raises(NoSuchServer, match="declared lost: gone"):
        core.server_registered(info(HOME))
    with pytest.raises(NoSuchServer, match="not registered"):
        core.create_region(1, HOME)
    assert core.locate(777) == ServerLost(777, "no such page server ever registered")


def test_counts(core: RegistryCore) -> None:
    ready(core)
    core.free(ready(core).region)
    core.create_region(1, HOME)
    assert core.count_by_state() == {"creating": 1, "ready": 1, "freed": 1, "dropping": 0}
    assert len(core.servers()) == 3


# -- against a model


class AddressMachine(RuleBasedStateMachine):
    """The model is a set of used 2 MiB units, in a window small enough to fill up."""

    UNITS = 24

    def __init__(self) -> None:
        super().__init__()
        self.space = AddressSpace(WINDOW_BEGIN, WINDOW_BEGIN + self.UNITS * UNIT_BYTES)
        self.model: dict[int, int] = {}

    def used(self) -> set[int]:
        return {unit for at, n in self.model.items() for unit in range(at, at + n)}

    @rule(units=st.integers(1, 8), less=st.integers(0, UNIT_BYTES - 1))
    def allocate(self, units: int, less: int) -> None:
        used, need = self.used(), units + 1
        fits = [
            at for at in range(self.UNITS - need + 1) if not used.intersection(range(at, at + need))
        ]
        length_bytes = units * UNIT_BYTES - less
        if not fits:
            with pytest.raises(NoAddresses):
                self.space.allocate(length_bytes)
            return
        assert self.space.allocate(length_bytes) == WINDOW_BEGIN + fits[0] * UNIT_BYTES
        self.model[fits[0]] = need

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        at = data.draw(st.sampled_from(sorted(self.model)))
        del self.model[at]
        self.space.release(WINDOW_BEGIN + at * UNIT_BYTES)

    @rule(data=st.data())
    def rebuild(self, data: st.DataObject) -> None:
        """As after a restart, in any order."""
        self.space = AddressSpace(self.space.begin, self.space.end)
        for at in data.draw(st.permutations(sorted(self.model))):
            length_bytes = (self.model[at] - 1) * UNIT_BYTES
            self.space.reserve(WINDOW_BEGIN + at * UNIT_BYTES, length_bytes)
            with pytest.raises(ValueError, match="not free"):
                self.space.reserve(WINDOW_BEGIN + at * UNIT_BYTES, 1)

    @invariant()
    def tiles(self) -> None:
        self.space.check()
        assert self.space.bytes_in_use == len(self.used()) * UNIT_BYTES


class RetireMachine(RuleBasedStateMachine):
    """Leases on nodes, and nothing else, decide when an address may be used again.

    The model plays the page servers: it carries out orders in any order, late or twice.
    """

    SERVERS = (1, 2, 3)

    def __init__(self) -> None:
        super().__init__()
        self.core = RegistryCore()
        for server_id in self.SERVERS:
            self.core.server_registered(info(server_id))
        self.alive = set(self.SERVERS)
        self.records: dict[int, RegionRecord] = {}
        self.leases: set[tuple[int, int]] = set()
        self.held: set[tuple[int, int]] = set()  # by homes
        self.orders: list[Retire] = []
        self.journal: dict[int, RegionState] = {}
        self.next_region = 1

    def pick(self, data: st.DataObject, items):
        return data.draw(st.sampled_from(sorted(items)))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), seal=st.booleans(), answered=st.booleans(), mapped=st.booleans())
    def create(self, data: st.DataObject, seal: bool, answered: bool, mapped: bool) -> None:
        home = self.pick(data, self.alive)
        record = self.core.create_region(1, home)
        in_use = {r for r, s in self.leases | self.held if s in self.alive}
        assert record.base_address not in {self.records[r].base_address for r in in_use}
        self.records[record.region] = record
        self.journal[record.region] = RegionState.CREATING
        self.next_region = record.region + 1
        self.held.add((record.region, home))
        if seal:
            self.core.seal(record.region)
        if mapped:
            self.leases.add((record.region, home))
        if not (seal and answered):
            self.orders += self.core.abandon(record.region, leased=mapped)

    @precondition(lambda self: self.records and self.alive)
    @rule(data=st.data())
    def open_lease(self, data: st.DataObject) -> None:
        region, server = self.pick(data, self.records), self.pick(data, self.alive)
        answer = self.core.lookup(region, server)
        if isinstance(answer, RegionRecord) and not answer.freed:
            self.leases.add((region, server))

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.orders += self.core.free(self.pick(data, self.records))

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def close_lease(self, data: st.DataObject) -> None:
        region, server = self.pick(data, self.leases)
        self.leases.discard((region, server))
        if server in self.alive and not isinstance(self.core.peek(region), RegionRecord):
            self.orders += self.core.region_idle(region, server)

    @precondition(lambda self: self.orders)
    @rule(data=st.data(), twice=st.booleans())
    def carry_out(self, data: st.DataObject, twice: bool) -> None:
        order = self.orders[data.draw(st.integers(0, len(self.orders) - 1))]
        if not twice:
            self.orders.remove(order)
        if order.server_id not in self.alive:
            return
        key = (order.region, order.server_id)
        if order.force:
            self.held.discard(key)
            self.core.dropped(*key)
        elif key not in self.leases:
            self.orders += self.core.region_idle(*key)

    @precondition(lambda self: len(self.alive) > 1)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        server = self.pick(data, self.alive)
        self.alive.discard(server)
        self.orders += self.core.server_lost(server, "died")

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        server = self.pick(data, self.alive)
        self.orders += self.core.server_registered(info(server))[1]

    @rule()
    def restart_registry(self) -> None:
        """Who looked up what, and which orders are on their way, nobody knows any more."""
        self.core = RegistryCore()
        lost = set(self.SERVERS) - self.alive
        orders = self.core.restore(
            self.next_region,
            [
                (self.records[region], state, 0)
                for region, state in self.journal.items()
                if state is not RegionState.GONE
            ],
            [info(server) for server in sorted(self.alive)],
            [ServerLost(server, "died") for server in lost],
            0.0,
        )
        self.orders = list(orders)

    @invariant()
    def checks(self) -> None:
        self.core.check()
        self.journal.update(self.core.take_changed())
        for region, state in self.journal.items():
            assert self.core.state(region) is state

    @invariant()
    def a_restarted_server_gets_its_leases_back(self) -> None:
        for region, server in self.leases:
            if server in self.alive:
                assert isinstance(self.core.lookup(region, server), RegionRecord)

    def teardown(self) -> None:
        for region in self.records:
            self.orders += self.core.free(region)
        for region, server in sorted(self.leases):
            self.leases.discard((region, server))
            self.orders += self.core.region_idle(region, server)
        while self.orders:
            order = self.orders.pop()
            if order.force:
                self.core.dropped(order.region, order.server_id)
            else:
                self.orders += self.core.region_idle(order.region, order.server_id)
        # Everything was let go: nothing is left, and every address is free.
        assert sum(self.core.count_by_state().values()) == 0
        assert self.core.addresses.bytes_in_use == 0


TestAddresses = AddressMachine.TestCase
TestRetire = RetireMachine.TestCase
TestAddresses.settings = TestRetire.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)


# -- what many regions cost


class Unwalked(dict):  # type: ignore[type-arg]
    """A table that nobody may walk over."""

    def _walked(self, *_: object) -> None:
        raise AssertionError("somebody walks over all regions")

    __iter__ = keys = values = items = _walked  # type: ignore[assignment]


def test_no_call_of_a_put_or_a_free_walks_over_all_regions(core) -> None:
    kept = [ready(core) for _ in range(3)]
    core._regions = Unwalked(core._regions)
    for _ in range(3):
        core.abandon_stale(before_s=0.0)
        region = core.create_region(100, HOME).region
        core.seal(region)
        core.lookup(region, READER)
        core.free(region)
        assert core.waited_for() == {HOME, READER}
        core.region_idle(region, READER)
        core.region_idle(region, HOME)
        core.dropped(region, HOME)
        assert core.waited_for() == set()
        assert (region, RegionState.GONE) in core.take_changed()
    core._regions = dict(dict.items(core._regions))
    assert core.count_by_state()["ready"] == len(kept)


def test_only_a_home_without_other_lookups_is_alone(core) -> None:
    unread, read = ready(core).region, ready(core).region
    core.lookup(read, READER)
    core.lookup(unread, HOME)
    assert [order.alone for order in core.free(unread)] == [True]
    assert [order.alone for order in core.free(read)] == [False, False]


def test_stale_regions_are_found_among_sealed_ones(core) -> None:
    old = core.create_region(100, HOME, now_s=1.0).region
    sealed = core.create_region(100, HOME, now_s=2.0).region
    core.seal(sealed)
    young = core.create_region(100, HOME, now_s=5.0).region
    assert core.abandon_stale(before_s=3.0) == (Retire(HOME, old, force=True),)
    assert core.state(young) is RegionState.CREATING
    assert core.state(sealed) is RegionState.READY
