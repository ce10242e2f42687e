"""``free`` on several nodes: who is refused when it returns, and what if one is not reached."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._protocol.registry_client import RegistryClient
from clamor_ray._session import process_sessions
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, require_lab, troubles
from tests.support.lab.cluster import node_resource
from tests.support.processes import stop

pytestmark = pytest.mark.lab

ITEMS = 1024
ANSWER_S = 120.0
REATTACH_S = 15.0


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(2, num_cpus=1) as lab, pytest.MonkeyPatch.context() as patch:
        # For so long after its restart a page server does not call a freed region idle.
        patch.setenv("CLAMOR_REATTACH_S", str(REATTACH_S))
        clamor.init()
        try:
            yield lab
        finally:
            clamor.shutdown()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often this process has called each method of the registry."""
    counted: Counter[str] = Counter()
    ask = RegistryClient._ask

    def counting(self: Any, method: str, *arguments: Any, **how: Any) -> Any:
        counted[method] += 1
        return ask(self, method, *arguments, **how)

    monkeypatch.setattr(RegistryClient, "_ask", counting)
    return counted


@ray.remote(num_cpus=0)
class Reader:
    """Reads, and holds nothing of it unless it is to."""

    def __init__(self) -> None:
        self.held: list[Any] = []

    def last(self, refs: list[Any], hold: bool = False) -> int | str:
        """The last item of the first, or the name of the error."""
        try:
            array = refs[0].get()
        except errors.ClamorError as error:
            return type(error).__name__
        if hold:
            self.held.append(array)
        return int(array[-1])

    def last_of_held(self) -> int:
        return int(self.held[-1][-1])

    def let_go(self) -> None:
        self.held.clear()

    def free(self, refs: list[Any]) -> None:
        clamor.free(refs[0].snapshot())


def reader(index: int) -> Any:
    return Reader.options(resources={node_resource(index): 0.01}).remote()


def ask(reference: Any) -> Any:
    return ray.get(reference, timeout=ANSWER_S)


def regions() -> dict[str, int]:
    """How many are in each state, at the registry."""
    found: dict[str, int] = process_sessions.current().rpc.stats().regions_by_state
    return found


def nothing_is_left() -> bool:
    return all(regions()[state] == 0 for state in ("ready", "freed", "dropping"))


def put(value: int) -> Any:
    """A reference that does not learn of a ``free``: the servers are to refuse it."""
    return clamor.put(np.full(ITEMS, value)).snapshot()


def free(ref: Any) -> None:
    clamor.free(ref.snapshot())


def test_a_reader_is_refused_when_free_returns(nodes: LocalCluster, calls: Counter[str]) -> None:
    here, there = reader(0), reader(1)
    n = 30
    for i in range(n):
        ref = put(i)
        assert ask(there.last.remote([ref])) == i
        if i % 2:
            assert ask(here.last.remote([ref])) == i
        calls.clear()
        free(ref)
        assert ask(there.last.remote([ref])) == "FreedError"
        assert ask(here.last.remote([ref])) == "FreedError"
        # The registry was asked once, and no server was waited for by way of it.
        assert calls == {"free": 1}
    until(nothing_is_left)


def test_a_node_without_the_variable_is_refused_too(nodes: LocalCluster) -> None:
    there = reader(1)
    for i in range(10):
        ref = put(i)
        free(ref)
        assert ask(there.last.remote([ref])) == "FreedError"
    until(nothing_is_left)


def test_freed_from_a_node_that_is_not_its_home(nodes: LocalCluster) -> None:
    here, there = reader(0), reader(1)
    for i in range(10):
        ref = put(i)
        assert ask(there.last.remote([ref])) == i
        assert ask(here.last.remote([ref])) == i
        ask(there.free.remote([ref]))
        assert ask(here.last.remote([ref])) == "FreedError"
        assert ask(there.last.remote([ref])) == "FreedError"
        with pytest.raises(errors.FreedError):
            ref.get()
    until(nothing_is_left)


def test_what_another_node_maps_stays_there_and_goes_with_it(nodes: LocalCluster) -> None:
    holder, other = reader(1), reader(1)
    ref = put(7)
    assert ask(holder.last.remote([ref], True)) == 7
    free(ref)
    assert ask(other.last.remote([ref])) == "FreedError"
    assert ask(holder.last_of_held.remote()) == 7
    time.sleep(0.5)  # orders have gone out by now
    assert regions()["freed"] == 1
    assert ask(holder.last_of_held.remote()) == 7
    ask(holder.let_go.remote())
    until(nothing_is_left)


def test_a_stopped_reader_delays_a_free_for_a_short_time(nodes: LocalCluster) -> None:
    there = reader(1)
    refs = [put(i) for i in range(4)]
    for i, ref in enumerate(refs):
        assert ask(there.last.remote([ref])) == i
    stopped = nodes.page_server_pid(1)
    stop(stopped)
    try:
        began_s = time.monotonic()
        free(refs[0])
        assert time.monotonic() - began_s < 30  # RETIRE_S, and then the registry's FREE_S
        with pytest.raises(errors.FreedError):
            refs[0].get()
    finally:
        os.kill(stopped, signal.SIGCONT)
    until(lambda: ask(there.last.remote([refs[0]])) == "FreedError")
    for ref in refs[1:]:  # what has failed before delays nothing
        free(ref)
        assert ask(there.last.remote([ref])) == "FreedError"
    until(nothing_is_left)


def test_a_page_server_is_killed_meanwhile(nodes: LocalCluster) -> None:
    """First the home's, then the reader's."""
    here, there = reader(0), reader(1)
    for index in (0, 1):
        refs = [put(i) for i in range(6)]
        for i, ref in enumerate(refs):
            assert ask(there.last.remote([ref])) == i
        pid = nodes.page_server_pid(index)
        free(refs[0])
        os.kill(pid, signal.SIGKILL)
        for ref in refs[1:3]:
            free(ref)
        assert nodes.page_server_pid(index) != pid
        for ref in refs[3:]:
            free(ref)
        for ref in refs:
            assert ask(there.last.remote([ref])) == "FreedError"
            assert ask(here.last.remote([ref])) == "FreedError"
    until(nothing_is_left)


def test_the_registry_is_killed_before_its_orders_go_out(nodes: LocalCluster) -> None:
    there = reader(1)
    refs = [put(i) for i in range(8)]
    for i, ref in enumerate(refs):
        assert ask(there.last.remote([ref])) == i
    pid = troubles.registry_pid()
    for ref in refs[:4]:
        free(ref)
    os.kill(pid, signal.SIGKILL)
    for ref in refs[4:]:
        free(ref)
    assert troubles.registry_pid() != pid
    for ref in refs:
        assert ask(there.last.remote([ref])) == "FreedError"
        with pytest.raises(errors.FreedError):
            ref.get()
    until(nothing_is_left)


def test_memory_of_a_variable_no_other_node_knows_is_given_back_at_once(
    nodes: LocalCluster,
) -> None:
    server = nodes.page_server(0)

    def home_bytes() -> int:
        return int(ask(server.stats.remote()).engine["home_bytes"])

    until(nothing_is_left)
    before = home_bytes()
    for n_bytes in (8 << 20, 64 << 20):  # the larger one by way of the registry
        ref = clamor.put(np.ones(n_bytes // 8))
        assert home_bytes() >= before + n_bytes
        clamor.free(ref)
        assert home_bytes() <= before + (1 << 20)
