"""Names of variables against a plain model, through restarts at any moment. Without Ray."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from clamor_ray import errors
from clamor_ray._protocol.messages import INLINE_BASE, RegionRecord, ServerInfo
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.journal import Journal
from clamor_ray.actors.registry.registry_core import AddressSpace, RegionState, RegistryCore
from clamor_ray.actors.registry.variable_names import VariableNames

NAMES = ["a", "b", "ä c"]
SERVER = ServerInfo(7, "ab" * 28, "10.0.0.1", 4711, "name", "0.1.0")


class Registry:
    """What the registry keeps of regions and names, with one journal through all its lives."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.begin()

    def begin(self) -> None:
        self.journal = Journal(self.directory)
        saved = self.journal.load()
        self.core = RegistryCore(AddressSpace())
        self.log = CommitLog()
        self.core.restore(
            saved.next_region,
            [(each.record, RegionState(each.state), each.request_id) for each in saved.regions],
            saved.servers,
            saved.lost,
            0.0,
        )
        for record in self.core.ready_regions():
            self.log.open(record.region, record.homes, record.length_bytes)
        self.journal.save_server(SERVER)
        self.core.server_registered(SERVER)
        self.log.restore((), (), (), (), saved.freed_inline, ())
        self.names = VariableNames(self.core, self.log, self.journal)
        self.names.take_back(saved.names)

    def restart(self) -> None:
        self.journal.close()
        self.begin()

    def make(self) -> RegionRecord:
        record = self.core.create_region(4096, SERVER.server_id)
        self.journal.create_region(record, 0, record.region + 1)
        self.journal.seal(record.region)
        self.core.seal(record.region, written=True)
        self.log.open(record.region, record.homes, record.length_bytes)
        return record

    def free(self, region: int) -> None:
        if region >= INLINE_BASE:
            self.journal.free_inline([region])
        else:
            self.journal.set_states([(region, RegionState.FREED.value)])
            self.core.free(region, written=True)
        self.log.close(region)
        self.names.region_freed(region)


class Program(RuleBasedStateMachine):
    """Gives, drops, frees and restarts; a dictionary says what must be there."""

    directory: Path

    @initialize()
    def begin(self) -> None:
        for path in self.directory.iterdir():
            path.unlink()
        self.registry = Registry(self.directory)
        self.live: list[int] = []
        self.freed: list[int] = []
        self.named: dict[str, int] = {}
        self.n_inline = 0

    def teardown(self) -> None:
        self.registry.journal.close()

    @rule(inline=st.booleans())
    def make(self, inline: bool) -> None:
        if inline:
            self.n_inline += 1
            self.live.append(INLINE_BASE + self.n_inline)
        else:
            self.live.append(self.registry.make().region)

    @rule(name=st.sampled_from(NAMES), at=st.integers(0, 9))
    def give(self, name: str, at: int) -> None:
        every = self.live + self.freed
        if not every:
            return
        region = every[at % len(every)]
        packed = f"{region}".encode()
        taken = self.named.get(name, region) != region
        if taken or region in self.freed:
            wrong = errors.NameTakenError if taken else errors.FreedError
            with pytest.raises(wrong):
                self.registry.names.give(name, region, packed)
        else:
            self.registry.names.give(name, region, packed)
            self.named[name] = region

    @rule(name=st.sampled_from(NAMES))
    def drop(self, name: str) -> None:
        self.registry.names.drop(name)
        self.named.pop(name, None)

    @rule(at=st.integers(0, 9))
    def free(self, at: int) -> None:
        if self.live:
            region = self.live.pop(at % len(self.live))
            self.registry.free(region)
            self.freed.append(region)
            self.named = {name: of for name, of in self.named.items() if of != region}

    @rule()
    def restart(self) -> None:
        self.registry.restart()

    @invariant()
    def all_is_as_the_model_says(self) -> None:
        for name in NAMES:
            found = self.registry.names.find(name)
            if name not in self.named:
                assert found is None
                continue
            assert found is not None
            packed, latest = found
            assert (packed, latest.region) == (f"{self.named[name]}".encode(), self.named[name])
        listed = self.registry.names.variables()
        assert {name: each.region for each in listed for name in each.names} == self.named
        regions = [each.region for each in listed if each.region < INLINE_BASE]
        assert regions == sorted(region for region in self.live if region < INLINE_BASE)


def test_names_are_as_a_model_says(tmp_path: Path) -> None:
    program = type("Program", (Program,), {"directory": tmp_path})
    program.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
    program.TestCase("runTest").runTest()


def test_the_first_of_its_names_is_what_a_variable_is_called(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    region = registry.make().region
    assert registry.names.label(region) == f"variable {region}"
    for name in ("second", "first"):
        registry.names.give(name, region, b"")
    assert registry.names.label(region) == "variable 'first'"
    registry.names.drop("first")
    assert registry.names.label(region) == "variable 'second'"
    registry.free(region)
    assert registry.names.label(region) == f"variable {region}"
    with pytest.raises(errors.FreedError, match=f"^Variable {region} was freed"):
        registry.names.give("third", region, b"")
    registry.journal.close()


def test_a_full_journal_gives_and_drops_no_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(tmp_path)
    one, other = registry.make().region, registry.make().region
    registry.names.give("one", one, b"1")

    def full(*_: object) -> None:
        raise errors.JournalFullError("full")

    monkeypatch.setattr(registry.journal, "give_name", full)
    monkeypatch.setattr(registry.journal, "drop_name", full)
    with pytest.raises(errors.JournalFullError):
        registry.names.give("other", other, b"2")
    assert registry.names.find("other") is None
    with pytest.raises(errors.JournalFullError):
        registry.names.drop("one")
    found = registry.names.find("one")
    assert found is not None
    assert found[0] == b"1"
    registry.journal.close()
