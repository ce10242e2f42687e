"""The controller: moves, joins, leaves, lost workers, checkpoints, and a new controller."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from clamor_ray import errors
from clamor_ray._recipes.placement.checkpoints import Checkpoints, Phase
from clamor_ray._recipes.placement.controller_core import ControllerCore
from clamor_ray._recipes.placement.messages import (
    TERM,
    Arrived,
    Begin,
    Complete,
    Completed,
    Drained,
    Envelope,
    Heartbeat,
    MapUpdate,
    Packet,
    Parted,
    Paused,
    Slice,
    SliceCame,
    Stop,
    Store,
    Whereabouts,
)
from clamor_ray._recipes.placement.placing import HURRIED
from clamor_ray._recipes.program.builder import Builder
from tests.recipes.by_hand import POINTS, REDUCE, Placed, branch_program, reduce_program
from tests.recipes.network import Cluster
from tests.recipes.programs import random_program
from tests.recipes.test_placement import plain

APART: dict[Slice, str] = {(POINTS, 0): "w0", (POINTS, 1): "w0", REDUCE: "w1"}
WORKERS = {name: f"at {name}" for name in ("w0", "w1", "w2")}


def controller_of(
    where: dict[Slice, str] = APART, workers: dict[str, Any] = WORKERS, **settings: Any
) -> ControllerCore:
    controller = ControllerCore(reduce_program().tables(), [Placed(where)], **settings)
    controller.begin(workers)
    assert [type(order) for _, order in controller.take_outgoing()] == [Begin] * len(workers)
    return controller


def arrives(controller: ControllerCore, slice: Slice, worker: str, version: int = -1) -> None:
    version = controller.map.version if version < 0 else version
    controller.on_report(Arrived(controller.run, worker, *slice, version))


# -- moves


def test_a_move_goes_to_all_workers_and_takes_the_partitions_along_that_are_together() -> None:
    controller = controller_of()
    assert controller.move(1, 0, "w2")  # `extra`, which a stage reads with `points`
    update = MapUpdate(2, {(POINTS, 0): "w2"})
    assert controller.take_outgoing() == [(name, update) for name in WORKERS]
    assert controller.map.worker_of((POINTS, 0)) == "w2"
    # Those that it concerns hear of it in advance.
    told = Envelope(controller.run, 0, update)
    assert controller.take_hurried() == [("w0", told), ("w2", told)]
    assert controller.take_hurried() == []


def test_nothing_of_an_earlier_run_is_hurried() -> None:
    controller = controller_of()
    controller.move(1, 0, "w2")
    controller.on_lost("w1")
    assert controller.take_hurried() == []


def test_of_many_workers_none_is_told_in_advance() -> None:
    n_workers = HURRIED + 1
    program = Builder()
    parts = program.dataset(range(n_workers))
    program.stage(lambda t, part: None, reads=[parts])

    def all_to_the_next(workers: Any, partitions: Any, leaving: Any) -> dict[Any, str]:
        at = [row.worker for row in partitions]
        return {(0, index): at[(index + 1) % n_workers] for index in range(n_workers)}

    controller = ControllerCore(program.tables())
    controller.begin({f"w{n}": "" for n in range(n_workers)})
    controller.take_outgoing()
    controller._functions = (all_to_the_next,)
    controller.schedule()
    assert len(controller.in_migration) == len(controller.take_outgoing()) == n_workers
    assert controller.take_hurried() == []


def test_to_move_what_moves_already_is_no_move() -> None:
    controller = controller_of()
    assert controller.move(0, 0, "w2")
    controller.take_outgoing()
    assert not controller.move(0, 0, "w1")
    assert not controller.move(0, 0, "w0")
    assert controller.take_outgoing() == []
    arrives(controller, (POINTS, 0), "w2")
    assert not controller.move(0, 0, "w2")  # it is there
    assert controller.move(0, 0, "w1")


def test_a_report_of_an_earlier_stay_ends_no_move() -> None:
    controller = controller_of()
    for worker in ["w2", "w0", "w2"]:
        assert controller.move(0, 0, worker)
        if controller.map.version < 4:
            arrives(controller, (POINTS, 0), worker)
    arrives(controller, (POINTS, 0), "w2", version=2)  # it came late, and twice
    assert controller.in_migration == {(POINTS, 0)}
    arrives(controller, (POINTS, 0), "w2")
    assert not controller.in_migration


def test_a_report_of_another_worker_or_another_run_ends_no_move() -> None:
    controller = controller_of()
    assert controller.move(0, 0, "w2")
    arrives(controller, (POINTS, 0), "w0")
    controller.on_report(Arrived(controller.run - 1, "w2", POINTS, 0, controller.map.version))
    assert controller.in_migration == {(POINTS, 0)}


def test_what_cannot_be_moved_is_refused() -> None:
    controller = controller_of()
    for move, says in [
        ((0, 0, "nobody"), "nobody takes no part; these do: w0, w1, w2"),
        ((7, 0, "w0"), "The program has 3 datasets"),
        ((0, 2, "w0"), "has 2 partitions, and none of index 2"),
    ]:
        with pytest.raises(errors.ProgramError, match=says):
            controller.move(*move)
    with pytest.raises(errors.ProgramError, match="There is, or was, a worker w1"):
        controller.join("w1", "")
    with pytest.raises(errors.ProgramError, match="nobody takes no part"):
        controller.leave("nobody")
    controller.leave("w0")
    with pytest.raises(errors.ProgramError, match="w0 leaves"):
        controller.move(0, 1, "w0")
    controller.leave("w1")
    with pytest.raises(errors.ProgramError, match="w2 is the last worker"):
        controller.leave("w2")


def test_a_scheduling_function_that_answers_nonsense_is_refused() -> None:
    controller = controller_of()
    controller._functions = (lambda workers, partitions, leaving: {(0, 0): "nobody"},)
    with pytest.raises(errors.ProgramError, match="to nobody, which takes no part"):
        controller.schedule()
    assert controller.take_outgoing() == []


def test_a_scheduling_function_moves_nothing_that_moves_nor_to_who_leaves() -> None:
    controller = controller_of()
    controller.leave("w2")
    assert controller.move(0, 0, "w1")
    controller.take_outgoing()
    controller.leaving.add("w1")  # it has still what the function has not moved
    answer = {(0, 0): "w0", (0, 1): "w1", (2, 0): "w0"}
    controller._functions = (lambda workers, partitions, leaving: answer,)
    controller.schedule()
    assert [each.moves for _, each in controller.take_outgoing()] == [{REDUCE: "w0"}] * 3


def test_scheduling_functions_are_called_at_the_times_of_the_paper() -> None:
    calls: list[frozenset[str]] = []

    def note(workers: Any, partitions: Any, leaving: frozenset[str]) -> dict[Any, Any]:
        calls.append(leaving)
        return {}

    controller = ControllerCore(reduce_program().tables(), [note], every_s=5.0)
    what: list[Callable[[], object]] = [
        lambda: controller.begin({"w0": "", "w1": ""}),
        lambda: controller.join("w2", ""),
        controller.schedule,
        lambda: controller.tick(100.0) or controller.tick(105.0),
        lambda: controller.leave("w0"),
    ]
    for n, do in enumerate(what, 1):
        do()
        assert len(calls) == n
    controller.tick(109.9)
    assert calls == [frozenset()] * 4 + [frozenset({"w0"})]


def test_nothing_is_sent_while_nothing_moves() -> None:
    cluster = Cluster(reduce_program(rounds=50), seed=1)
    controller = cluster.controller
    assert controller is not None
    sent = []
    give_orders = cluster.give_orders

    def note() -> None:
        sent.extend(controller._outgoing)
        give_orders()

    cluster.give_orders = note  # type: ignore[method-assign]
    assert cluster.run_to_end() == plain(cluster.builder)
    assert sent == []


def test_a_heartbeat_ends_the_move_whose_report_was_lost() -> None:
    cluster = Cluster(reduce_program(), seed=2, functions=[Placed(APART)])
    controller = cluster.controller
    assert controller is not None
    controller.move(0, 0, "w2")
    cluster.give_orders()
    cluster.until(lambda: any(isinstance(e, Arrived) for e in cluster.nodes["w2"].reports))
    cluster.nodes["w2"].reports.clear()
    cluster.until(lambda: not controller.in_migration)
    assert cluster.run_to_end() == plain(cluster.builder)


# -- who takes part


def test_a_worker_that_leaves_while_partitions_come_to_it() -> None:
    cluster = Cluster(reduce_program(rounds=4), seed=3, functions=[Placed(APART)])
    controller = cluster.controller
    assert controller is not None
    cluster.settle()
    for node in cluster.nodes.values():
        node.take_tasks()
        node.is_paused = True  # tasks run, so that nothing may go yet
    assert controller.move(0, 0, "w2")
    assert controller.move(2, 0, "w2")
    controller.leave("w2")
    cluster.give_orders()
    assert controller.in_migration
    assert controller.map.n_slices_of("w2") == 2
    for node in cluster.nodes.values():
        node.is_paused = False
    cluster.until(lambda: cluster.gone == ["w2"])
    assert cluster.run_to_end() == plain(cluster.builder)


def test_a_worker_that_has_left_stays_until_nobody_sends_to_it() -> None:
    cluster = Cluster(reduce_program(rounds=4), seed=4, losses=0, functions=[Placed(APART)])
    controller = cluster.controller
    assert controller is not None
    cluster.settle()
    controller.leave("w1")
    cluster.blocks = lambda envelope: isinstance(envelope.content, MapUpdate)
    cluster.give_orders()
    slow = cluster.nodes["w0"]  # it hears nothing of this, and goes on to send there
    waiting, slow.orders = slow.orders, type(slow.orders)()
    cluster.until(lambda: cluster.nodes["w1"].core.map.version == controller.map.version)
    for _ in range(500):
        cluster.step()
    assert "w1" not in cluster.gone
    slow.orders = type(slow.orders)([*waiting, *slow.orders])
    cluster.until(lambda: cluster.gone == ["w1"])
    assert cluster.run_to_end() == plain(cluster.builder)


def test_a_new_worker_gets_slices_and_catches_up() -> None:
    cluster = Cluster(branch_program(), seed=5, workers=1, window=4)
    for _ in range(150):
        cluster.step()
    cluster.join("w1")
    controller = cluster.controller
    assert controller is not None
    cluster.until(lambda: controller.map.n_slices_of("w1") > 0)
    assert cluster.run_to_end() == plain(cluster.builder)
    assert any(node.name == "w1" for node in cluster.nodes.values())


def test_workers_that_join_together_share_evenly() -> None:
    program = Builder()
    parts = program.dataset(range(16))
    program.stage(lambda t, part: None, reads=[parts])
    controller = ControllerCore(program.tables())
    controller.begin({"w0": "", "w1": ""})
    controller.take_outgoing()
    controller.join_all({"w2": "", "w3": ""})
    assert {controller.map.n_slices_of(f"w{n}") for n in range(4)} == {4}
    of_first = [each for name, each in controller.take_outgoing() if name == "w0"]
    assert [set(each.joined) for each in of_first] == [{"w2", "w3"}, set()]
    with pytest.raises(errors.ProgramError, match="There is, or was, a worker w3"):
        controller.join_all({"w4": "", "w3": ""})
    assert "w4" not in controller.map.workers


@pytest.mark.parametrize("noticed_by", ["a heartbeat", "an acknowledgement"])
def test_a_lost_worker_makes_the_job_begin_again(noticed_by: str) -> None:
    settings: dict[str, Any] = {
        "a heartbeat": {"lost_after_s": 50.0},
        "an acknowledgement": {"unacknowledged_s": 50.0},
    }[noticed_by]
    cluster = Cluster(
        reduce_program(rounds=4), seed=6, losses=0, functions=[Placed(APART)], **settings
    )
    controller = cluster.controller
    assert controller is not None
    cluster.settle()
    for _ in range(100):
        cluster.step()
    cluster.kill("w1")
    cluster.until(lambda: controller.run == 2)
    assert controller.map.workers == {"w0", "w2"}
    assert cluster.run_to_end() == plain(cluster.builder)


KILLED: dict[str, Callable[[Cluster], bool]] = {
    "running": lambda cluster: bool(cluster.nodes["w1"].running),
    "sending": lambda cluster: any(
        sender == "w1" and isinstance(envelope.content, Packet)
        for sender, _, envelope in cluster.flying
    ),
    "receiving": lambda cluster: any(
        to == "w1" and isinstance(envelope.content, Packet) for _, to, envelope in cluster.flying
    ),
    "giving a slice": lambda cluster: any(
        sender == "w1" and isinstance(envelope.content, SliceCame)
        for sender, _, envelope in cluster.flying
    ),
    "checkpointing": lambda cluster: cluster.controller.checkpoints.phase is Phase.STORING,
}


@pytest.mark.parametrize("what", KILLED)
def test_a_worker_is_killed_while_it_is(what: str) -> None:
    cluster = Cluster(
        reduce_program(rounds=8),
        seed=17,
        losses=0,
        functions=[Placed(APART)],
        checkpoint_every_s=3.0,
        lost_after_s=30.0,
    )
    controller = cluster.controller
    assert controller is not None
    cluster.until(lambda: controller.checkpoints.last is not None)
    if what == "giving a slice":
        controller.move(2, 0, "w2")
        cluster.give_orders()
    cluster.until(lambda: KILLED[what](cluster))
    cluster.kill("w1")
    cluster.until(lambda: controller.run == 2)
    assert cluster.run_to_end() == plain(cluster.builder)


def test_a_lost_worker_is_lost_once() -> None:
    controller = controller_of()
    controller.leave("w2")
    controller.on_lost("w1")
    controller.on_lost("w1")  # others say so too
    assert controller.run == 2
    assert controller.map.workers == {"w0"}
    assert controller.take_gone() == ["w2"]  # what it had is of the run before


def test_a_run_that_begins_again_has_nothing_of_the_one_before() -> None:
    controller = controller_of(lost_after_s=10.0)
    controller.tick(0.0)
    for worker in WORKERS:
        controller.on_heartbeat(heartbeat(worker, 1), 0.0)
    assert controller.move(0, 0, "w2")
    controller.leave("w1")
    assert controller.in_migration
    controller.on_lost("w1")  # it leaves no more
    assert {type(order) for _, order in controller.take_outgoing()} == {Begin}
    assert not controller.in_migration
    controller.tick(11.0)  # the time of each begins anew, as each does
    assert controller.run == 2


def test_where_only_workers_that_leave_are_left_they_stay() -> None:
    controller = controller_of()
    assert controller.move(0, 0, "w2")
    controller.leave("w1")
    controller.leave("w2")
    controller.take_outgoing()
    controller.on_lost("w0")
    assert controller.map.workers == {"w1", "w2"}
    assert controller.map.assigned.keys() == APART.keys()
    assert {type(order) for _, order in controller.take_outgoing()} == {Begin}


def test_what_is_asked_for_during_a_checkpoint_is_done_though_a_worker_is_lost() -> None:
    controller = controller_of()
    controller.checkpoint(0.0)
    controller.join("w3", "at w3")
    controller.take_outgoing()
    controller.on_lost("w2")
    assert controller.map.workers == {"w0", "w1", "w3"}
    begun = [(name, each.loads) for name, each in controller.take_outgoing() if type(each) is Begin]
    assert begun == [("w0", True), ("w1", True), ("w3", False)]


def test_slices_of_workers_that_live_stay_when_the_job_begins_again() -> None:
    where = {(POINTS, 0): "w2", (POINTS, 1): "w0", REDUCE: "w1"}  # not in turn
    controller = controller_of(where)
    controller.on_lost("w1")
    assert controller.map.assigned == {**where, REDUCE: controller.map.worker_of(REDUCE)}
    ((_, begin), *_) = controller.take_outgoing()
    assert begin.run == 2
    assert begin.loads
    assert begin.update.is_whole


def test_a_worker_ends_when_all_others_have_parted() -> None:
    controller = controller_of()
    controller.leave("w2")
    update = MapUpdate(2, {}, left=frozenset({"w2"}))  # it had no slices
    assert controller.take_outgoing() == [(name, update) for name in WORKERS]
    controller.on_report(Parted(1, "w1", 1))  # of an earlier time
    controller.on_report(Parted(1, "w0", 2))
    assert controller.take_outgoing() == []
    controller.on_report(Parted(1, "w0", 2))
    assert controller.take_outgoing() == []
    controller.on_report(Parted(1, "w1", 2))
    assert controller.take_outgoing() == [("w2", Stop())]
    assert controller.take_gone() == []
    controller.on_report(Drained(1, "w2"))
    assert controller.take_gone() == ["w2"]


def heartbeat(worker: str, floor: int, is_settled: bool = True, version: int = 1) -> Heartbeat:
    return Heartbeat(1, worker, version, is_settled, False, floor)


def test_the_load_of_a_worker_is_that_of_the_whole_interval() -> None:
    seen: list[float] = []

    def look(workers: Any, partitions: Any, leaving: Any) -> dict[tuple[int, int], str]:
        seen.append(workers[0].seconds)
        return {}

    controller = controller_of(every_s=2.0)
    controller._functions = (look,)
    controller.tick(0.0)
    for now_s, seconds in enumerate([1.0, 0.25, 0.5, 0.125]):
        said = dataclasses.replace(heartbeat("w0", 1), seconds={(0, 0): seconds})
        controller.on_heartbeat(said, float(now_s))
        controller.tick(float(now_s + 1))
    assert seen == [0.625, 0.3125]


def test_stages_are_forgotten_only_when_all_slices_are_in_their_places() -> None:
    controller = controller_of()
    assert controller.on_heartbeat(heartbeat("w0", 10), 0.0) == 0  # the others have said nothing
    assert controller.on_heartbeat(heartbeat("w1", 20), 0.0) == 0
    # A slice of an older stage may be on its way to this one, as it says.
    assert controller.on_heartbeat(heartbeat("w2", 30, is_settled=False), 0.0) == 0
    assert controller.on_heartbeat(heartbeat("w2", 30), 0.0) == 10
    controller.move(0, 0, "w2")
    assert controller.on_heartbeat(heartbeat("w0", 40), 0.0) == 0  # of the map before
    for worker, floor in [("w0", 60), ("w1", 50)]:
        assert controller.on_heartbeat(heartbeat(worker, floor, version=2), 0.0) == 0
    assert controller.on_heartbeat(heartbeat("w2", 70, version=2), 0.0) == 50


def test_the_last_worker_that_is_lost_ends_the_job() -> None:
    controller = controller_of({}, {"w0": ""})
    controller.on_lost("w0")
    assert controller.failure == "w0 was the last worker, and it is lost."
    assert controller.take_outgoing() == []


# -- a new controller


def test_the_job_goes_on_to_its_end_without_controller() -> None:
    cluster = Cluster(reduce_program(rounds=6), seed=7, functions=[Placed(APART)])
    controller = cluster.controller
    assert controller is not None
    cluster.settle()
    controller.move(2, 0, "w2")
    cluster.give_orders()
    for node in cluster.nodes.values():
        while cluster.order(node):
            pass
    cluster.controller = None
    cluster.until(
        lambda: all(
            node.core is not None and node.core.is_settled and node.matcher.is_complete
            for node in cluster.nodes.values()
        )
    )
    assert set(cluster.ran.values()) == {1}
    assert cluster.answer() == plain(cluster.builder)


@pytest.mark.parametrize("seed", range(10))
def test_a_new_controller_learns_the_map_from_workers_that_know_different_ones(seed: int) -> None:
    rng = random.Random(seed)
    cluster = Cluster(reduce_program(rounds=6), seed, functions=[Placed(APART)])
    old = cluster.controller
    assert old is not None
    cluster.until(lambda: all(node.core is not None for node in cluster.nodes.values()))
    for _ in range(rng.randint(0, 200)):
        cluster.step()
    old.move(0, 0, "w2")
    old.move(2, 0, "w0")
    cluster.give_orders()
    for node in cluster.nodes.values():  # some hear of it, some do not
        for _ in range(rng.randint(0, len(node.orders))):
            cluster.order(node)
        node.orders.clear()
    cluster.controller = None
    for _ in range(200):
        cluster.step()
    # What the old one has said last comes late, to one of them.
    assert old.move(0, 1, "w1")
    ((_, late), *_) = old.take_outgoing()
    for node in cluster.nodes.values():
        node.reports.clear()  # nobody was there to hear them
    new = ControllerCore(cluster.tables, lost_after_s=1e9)
    new.learn([node.core.whereabouts() for node in cluster.nodes.values()])
    assert new.map.version == TERM
    assert new.in_migration == {
        slice
        for slice in cluster.slices
        if slice not in cluster.nodes[new.map.worker_of(slice)].core._here
    }
    cluster.controller = new
    if seed % 2:
        cluster.nodes["w0"].core.on_update(late)
    cluster.give_orders()
    if not seed % 2:
        cluster.until(lambda: not cluster.nodes["w0"].orders)
        cluster.nodes["w0"].core.on_update(late)
    cluster.settle()
    assert new.move(0, 0, "w1") or new.map.worker_of((POINTS, 0)) == "w1"
    cluster.give_orders()
    assert cluster.run_to_end() == plain(cluster.builder)


def test_a_new_controller_begins_again_where_a_worker_is_lost_too() -> None:
    cluster = Cluster(reduce_program(rounds=4), seed=8, functions=[Placed(APART)])
    cluster.settle()
    for _ in range(100):
        cluster.step()
    cluster.kill("w1")
    new = ControllerCore(cluster.tables, lost_after_s=1e9)
    new.learn([node.core.whereabouts() for node in cluster.nodes.values()])
    cluster.controller = new
    cluster.give_orders()
    assert new.run == 2
    assert cluster.run_to_end() == plain(cluster.builder)


def test_a_new_controller_ends_workers_of_an_earlier_run() -> None:
    slices = {(POINTS, 0): "w0", (POINTS, 1): "w0", REDUCE: "w0"}
    of_1 = MapUpdate(3, {**slices, REDUCE: "w1"}, {"w0": "", "w1": ""}, is_whole=True)
    of_2 = MapUpdate(4, slices, {"w0": ""}, is_whole=True)  # w1 counted as lost, and lives
    new = ControllerCore(reduce_program().tables())
    new.learn(
        [
            Whereabouts(2, "w0", of_2, frozenset(slices)),
            Whereabouts(1, "w1", of_1, frozenset({REDUCE})),
        ]
    )
    assert new.run == 3
    assert new.take_gone() == ["w1"]
    assert [(name, type(each)) for name, each in new.take_outgoing()] == [("w0", Begin)]
    with pytest.raises(errors.ProgramError, match="No worker of the job lives"):
        ControllerCore(reduce_program().tables()).learn([])
    with pytest.raises(errors.ProgramError, match="No worker of the newest run lives"):
        ControllerCore(reduce_program().tables()).learn([Whereabouts(2, "w9", of_2, frozenset())])


def test_a_new_controller_ends_the_pause_of_the_old_one() -> None:
    cluster = Cluster(reduce_program(rounds=4), seed=9)
    cluster.settle()
    old = cluster.controller
    assert old is not None
    assert old.checkpoint(cluster.now_s)
    cluster.give_orders()
    cluster.until(lambda: old.checkpoints.phase is Phase.COMPLETING)
    new = ControllerCore(cluster.tables, lost_after_s=1e9, last=old.checkpoints.last, first_name=2)
    new.learn([node.core.whereabouts() for node in cluster.nodes.values()])
    cluster.controller = new
    cluster.give_orders()
    assert cluster.run_to_end() == plain(cluster.builder)


# -- checkpoints


def stages_run(cluster: Cluster, run: int) -> dict[int, int]:
    """Number -> how many of its tasks have run."""
    found: dict[int, int] = {}
    for (of, number, _), n in cluster.ran.items():
        if of == run:
            found[number] = found.get(number, 0) + n
    return found


def store_one(cluster: Cluster) -> None:
    """A checkpoint, from its beginning to its end, at a time that the seed chooses."""
    controller = cluster.controller
    assert controller is not None
    assert controller.checkpoint(cluster.now_s)
    assert not controller.checkpoint(cluster.now_s)  # one at a time
    cluster.give_orders()
    cluster.until(lambda: controller.checkpoints.phase is Phase.STORING)
    # All up to the furthest have run, and nothing later.
    run = stages_run(cluster, controller.run)
    number = controller.checkpoints._number
    assert max(run, default=0) <= number
    numbers = {each for node in cluster.nodes.values() for each in node.matcher._instances}
    for each in numbers:
        if each <= number:
            instance = next(
                node.matcher._instances[each]
                for node in cluster.nodes.values()
                if each in node.matcher._instances
            )
            assert run.get(each, 0) == cluster.tables.stages[instance.stage].n_tasks
    cluster.until(lambda: controller.checkpoints.phase is Phase.RESTS)


def lose_one(cluster: Cluster) -> None:
    controller = cluster.controller
    assert controller is not None
    name = cluster.rng.choice(sorted(cluster.nodes))
    cluster.kill(name)
    controller.on_lost(name)
    cluster.give_orders()


@pytest.mark.parametrize("seed", range(12))
def test_a_job_that_begins_again_at_a_checkpoint_gives_the_same_answer(seed: int) -> None:
    for n in range(2):
        rng = random.Random(50 * seed + n)
        builder = random_program(rng)
        cluster = Cluster(builder, seed, workers=3, window=rng.choice([4, 1 << 16]))
        controller = cluster.controller
        assert controller is not None
        for _ in range(rng.randint(0, 300)):
            cluster.step()
        group, index = rng.choice(cluster.slices)
        controller.move(cluster.tables.datasets_of(group)[0], index, rng.choice(["w0", "w1", "w2"]))
        cluster.give_orders()
        for _ in range(rng.randint(0, 30)):
            cluster.step()
        store_one(cluster)
        last = controller.checkpoints.last
        assert last is not None
        for _ in range(rng.randint(0, 200)):
            cluster.step()
        lose_one(cluster)
        assert cluster.run_to_end() == plain(builder)
        # Nothing that the checkpoint has ran again.
        assert all(number > last.number for run, number, _ in cluster.ran if run == 2)


def test_a_checkpoint_during_a_migration_waits_for_the_slice() -> None:
    cluster = Cluster(reduce_program(rounds=4), seed=11, functions=[Placed(APART)])
    controller = cluster.controller
    assert controller is not None
    cluster.settle()
    controller.move(2, 0, "w2")
    cluster.give_orders()
    for node in cluster.nodes.values():
        while cluster.order(node):
            pass
        node.move_data()
    assert controller.in_migration == {REDUCE}
    flying = [name for name, node in cluster.nodes.items() if REDUCE in node.core._here]
    assert flying == []  # it is on its way
    controller.checkpoint(cluster.now_s)
    cluster.give_orders()
    # What is asked for now is done behind it.
    assert controller.move(0, 0, "w1")
    controller.leave("w2")
    version = controller.map.version
    cluster.until(lambda: controller.checkpoints.phase is Phase.STORING)
    assert REDUCE in cluster.nodes["w2"].core._here
    assert controller.map.version == version
    cluster.until(lambda: controller.checkpoints.last is not None)
    assert controller.map.version > version
    cluster.until(lambda: cluster.gone == ["w2"])
    lose_one(cluster)
    assert cluster.run_to_end() == plain(cluster.builder)


def test_a_checkpoint_waits_for_messages_behind_its_last_stage() -> None:
    cluster = Cluster(reduce_program(rounds=4), seed=12, functions=[Placed(APART)])
    controller = cluster.controller
    assert controller is not None
    cluster.blocks = lambda envelope: isinstance(envelope.content, Packet)
    cluster.until(lambda: sum(cluster.ran.values()) == 2)  # the first stage, which sends
    controller.checkpoint(cluster.now_s)
    cluster.give_orders()
    cluster.until(lambda: controller.checkpoints.phase is Phase.COMPLETING)
    for _ in range(1000):
        cluster.step()
    assert controller.checkpoints.phase is Phase.COMPLETING
    cluster.blocks = lambda envelope: False
    cluster.until(lambda: controller.checkpoints.last is not None)
    assert controller.checkpoints.last is not None
    assert controller.checkpoints.last.number == 1
    lose_one(cluster)
    assert cluster.run_to_end() == plain(cluster.builder)


def test_what_is_said_of_an_earlier_checkpoint_is_not_heard() -> None:
    checkpoints = Checkpoints(None, 1, 60.0)
    checkpoints.begin(["w0"], 1, 0.0)
    checkpoints.fail("It was given up.")
    assert checkpoints.begin(["w0"], 1, 0.0).checkpoint == 2
    assert checkpoints.on_report(Paused(1, "w0", 1, 9)) is None
    assert checkpoints.on_report(Completed(1, "w0", 2)) is None  # not asked yet
    assert checkpoints.on_report(Paused(1, "w0", 2, 3)) == Complete(2, 3)


@pytest.mark.parametrize("n_steps", [100, 150, 200, 250, 300, 350])
def test_a_checkpoint_inside_a_branch(n_steps: int) -> None:
    cluster = Cluster(branch_program(), seed=n_steps)
    for _ in range(n_steps):
        cluster.step()
    store_one(cluster)
    lose_one(cluster)
    assert cluster.run_to_end() == plain(cluster.builder)


def test_a_full_disk_leaves_the_last_checkpoint_and_the_job_goes_on() -> None:
    cluster = Cluster(reduce_program(rounds=8), seed=13)
    controller = cluster.controller
    assert controller is not None
    cluster.settle()
    store_one(cluster)
    first = controller.checkpoints.last
    cluster.nodes["w1"].stores = lambda: "No space left on device"
    for _ in range(100):
        cluster.step()
    store_one(cluster)
    assert controller.checkpoints.last is first
    assert controller.checkpoints.error == "w1: No space left on device"
    lose_one(cluster)
    assert cluster.run_to_end() == plain(cluster.builder)


def test_a_worker_that_is_lost_while_it_stores_leaves_the_last_checkpoint() -> None:
    cluster = Cluster(reduce_program(rounds=8), seed=14)
    controller = cluster.controller
    assert controller is not None
    cluster.settle()
    store_one(cluster)
    first = controller.checkpoints.last
    for _ in range(100):
        cluster.step()
    controller.checkpoint(cluster.now_s)
    cluster.give_orders()
    cluster.until(lambda: controller.checkpoints.phase is Phase.STORING)
    lose_one(cluster)
    assert controller.checkpoints.last is first
    assert controller.checkpoints.phase is Phase.RESTS
    assert cluster.run_to_end() == plain(cluster.builder)


def test_a_checkpoint_that_takes_too_long_is_given_up() -> None:
    controller = controller_of(checkpoint_deadline_s=30.0)
    controller.tick(1000.0)
    assert controller.checkpoint(1000.0)
    controller.take_outgoing()
    assert controller.move(0, 0, "w2")
    for now_s in (1005.0, 1029.0):
        for name in WORKERS:
            controller._heartbeats._seen_s[name] = now_s
        controller.tick(now_s)
    assert controller.take_outgoing() == []
    for name in WORKERS:
        controller._heartbeats._seen_s[name] = 1030.0
    controller.tick(1030.0)
    assert controller.checkpoints.error == "w0, w1, w2 took longer than 30 s (PAUSING)."
    kinds = [type(order).__name__ for _, order in controller.take_outgoing()]
    assert kinds == ["Resume"] * 3 + ["MapUpdate"] * 3


def test_checkpoints_are_made_at_their_interval() -> None:
    cluster = Cluster(reduce_program(rounds=40), seed=15, checkpoint_every_s=2.0)
    controller = cluster.controller
    assert controller is not None
    cluster.until(lambda: controller.checkpoints.last and controller.checkpoints.last.name == 3)
    assert cluster.run_to_end() == plain(cluster.builder)


def test_what_a_checkpoint_asks_for_comes_in_order() -> None:
    cluster = Cluster(reduce_program(rounds=8), seed=16)
    cluster.settle()
    seen: list[str] = []
    node = cluster.nodes["w0"]
    on_order = node.core.on_order
    node.core.on_order = lambda order: (seen.append(type(order).__name__), on_order(order))
    store_one(cluster)
    cluster.until(lambda: not node.orders)
    assert seen == ["Pause", Complete.__name__, Store.__name__, "Resume"]
