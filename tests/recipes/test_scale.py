"""What one thing costs does not grow with the number of workers: lines of Python are counted.

Lines, and not seconds: they are the same in each run.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any
from unittest import mock

from clamor_ray._recipes.placement.controller_core import ControllerCore
from clamor_ray._recipes.placement.links import Links
from clamor_ray._recipes.placement.messages import (
    Ack,
    Arrived,
    Begin,
    Decision,
    Decisions,
    Envelope,
    Heartbeat,
    Parted,
    Stop,
)
from clamor_ray._recipes.placement.schedule import PartitionRow, WorkerRow, round_robin
from clamor_ray._recipes.program.builder import Builder
from tests.recipes.network import Cluster, Node

FEW, MANY = 8, 256


def lines_of(call: Callable[[], Any]) -> int:
    """How many lines run, here and in all that it calls."""
    n = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal n
        n += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return n


def names(n: int, first: int = 0) -> dict[str, str]:
    return {f"w{k:03d}": f"at w{k:03d}" for k in range(first, first + n)}


def program(n: int) -> Builder:
    p = Builder()
    rows, total = p.dataset([0] * n), p.value(0)
    with p.loop(max=3) as loop:
        p.stage(lambda t, rows: t.send(0, 1), reads=[rows])
        p.stage(lambda t, total: sum(t.recv()), writes=[total])
        loop.until(lambda t, total: total > 1e9, reads=[total])
    return p


def controller_of(n: int) -> ControllerCore:
    controller = ControllerCore(program(4 * n).tables())
    controller.begin(names(n))
    controller.take_outgoing()
    return controller


def heartbeat(controller: ControllerCore, worker: str, floor: int = 3) -> Heartbeat:
    version = controller.map.version
    return Heartbeat(1, worker, version, True, False, floor, seconds={(0, 0): 0.5})


def test_a_heartbeat() -> None:
    def cost(n: int) -> int:
        controller = controller_of(n)
        for worker in names(n):
            controller.on_heartbeat(heartbeat(controller, worker), 1.0)
        news = heartbeat(controller, "w001", 4)
        lines = lines_of(lambda: controller.on_heartbeat(news, 2.0))
        assert controller.on_heartbeat(news, 2.0) == 3
        return lines + lines_of(lambda: controller.is_complete)

    assert cost(MANY) == cost(FEW)


def test_a_slice_that_has_come_while_many_leave() -> None:
    def cost(n: int) -> int:
        controller = controller_of(n)
        slices = sorted(controller.map.slices_of("w000"))
        controller.leave_all(sorted(names(n))[: n // 2])
        to = controller.map.worker_of(slices[0])
        report = Arrived(1, to, *slices[0], controller.map.version)
        assert slices[0] in controller.in_migration
        lines = lines_of(lambda: controller.on_report(report))
        assert slices[0] not in controller.in_migration
        return lines

    assert cost(MANY) == cost(FEW)


def test_a_message_to_a_worker_that_knows_many() -> None:
    def cost(n: int) -> int:
        links = Links(1, 1.0, 10.0)
        for worker in names(n):
            links.send(worker, Decision(1, True))
            links.accept(worker, Envelope(1, 1, Decision(2, True)))
        links.take(names(n))
        for worker in names(n):
            links.accept(worker, Envelope(1, 0, Ack((1,))))
        assert links.is_quiet()

        def exchange() -> None:
            links.accept("w001", Envelope(1, 2, Decision(3, True)))
            links.take(known)
            links.tick(1.0)
            links.is_quiet()

        known = names(n)
        return lines_of(exchange)

    assert cost(MANY) == cost(FEW)


def test_placing_slices_and_giving_a_part_to_new_workers() -> None:
    def cost(n: int, is_new: bool) -> float:
        workers = [WorkerRow(name) for name in names(2 * n if is_new else n)]
        rows = [
            PartitionRow(0, index, 0, f"w{index % n:03d}" if is_new else None)
            for index in range(4 * n)
        ]
        moves: dict[Any, str] = {}
        lines = lines_of(lambda: moves.update(round_robin()(workers, rows, frozenset())))
        assert len(moves) == (2 * n if is_new else 4 * n)
        return lines / n

    for is_new in (False, True):
        assert cost(MANY, is_new) < 1.5 * cost(FEW, is_new)


def test_as_many_again_join_in_four_orders_each_and_learn_decisions_from_two_workers() -> None:
    n = 12
    cluster = Cluster(program(2 * n), workers=n, duplicates=0, losses=0)
    controller = cluster.controller
    assert controller is not None
    cluster.until(lambda: any(node.core and node.core._made for node in cluster.nodes.values()))
    more = names(n)
    for name in more:
        cluster.nodes[name] = Node(cluster, name)
    told: Counter[str] = Counter()
    send = Links.send

    def counts(links: Links, to: str, content: Any) -> None:
        told[to] += isinstance(content, Decisions)
        send(links, to, content)

    with mock.patch.object(Links, "send", counts):
        controller.join_all(more)
        orders = controller._outgoing
        # The others hear of them, they begin, and then all hear of what moves.
        assert len(orders) == n + n + 2 * n
        begin, *others = (order for _, order in orders if isinstance(order, Begin))
        assert all(each is begin for each in others)  # is pickled once
        cluster.give_orders()
        cluster.settle()
    assert {name for name, times in told.items() if times} == set(more)
    assert max(told.values()) <= 2  # from the oldest, and from who has decided


def test_those_that_leave_at_once_are_one_step_of_the_map() -> None:
    controller = controller_of(FEW)
    leaving = sorted(names(FEW))[: FEW // 2]
    controller.leave_all(leaving)
    controller.take_outgoing()
    *first, last = sorted(controller.in_migration)
    for slice in first:
        to = controller.map.worker_of(slice)
        controller.on_report(Arrived(1, to, *slice, controller.map.version))
    assert controller.take_outgoing() == []
    controller.tick(0.0)  # those that are ready do not wait for the last one
    assert {order.left for _, order in controller.take_outgoing()} == {
        frozenset(leaving) - {leaving[last[1] % FEW]}
    }
    to = controller.map.worker_of(last)
    controller.on_report(Arrived(1, to, *last, controller.map.version))
    orders = controller.take_outgoing()
    assert [to for to, _ in orders] == sorted(names(FEW))
    for worker in names(FEW):  # it parts from all by one report
        assert not [order for _, order in controller.take_outgoing() if order == Stop()]
        controller.on_report(Parted(1, worker, controller.map.version))
    assert sorted(worker for worker, _ in controller.take_outgoing()) == leaving
