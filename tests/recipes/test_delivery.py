"""Messages find slices that move, and each task runs once: one case after the other, by hand."""

from __future__ import annotations

from clamor_ray._recipes.matching.state import PartitionState, SliceState
from clamor_ray._recipes.placement.messages import (
    Ack,
    Decision,
    Decisions,
    Drained,
    Envelope,
    MapUpdate,
    Packet,
    Parted,
    Slice,
    SliceCame,
    Stop,
    Stored,
)
from tests.recipes.by_hand import POINTS, REDUCE, ByHand, branch_program, reduce_program
from tests.recipes.test_placement import plain

# The senders are on w0, the receiver on w1; w2 has nothing.
APART: dict[Slice, str] = {(POINTS, 0): "w0", (POINTS, 1): "w0", REDUCE: "w1"}


def apart(workers: int = 3) -> ByHand:
    return ByHand(reduce_program(), APART, workers)


def ends_well(cluster: ByHand) -> None:
    assert cluster.end() == plain(cluster.builder)


# -- maps that are stale


def test_a_sender_with_a_stale_map_is_forwarded() -> None:
    cluster = apart()
    cluster.update(2, {REDUCE: "w2"}, "w1", "w2")
    cluster.pass_on("w2", SliceCame)
    cluster.run("w0", 1, 0)
    cluster.pass_on("w1", Packet, "w0")
    packet = cluster.flying[cluster.on_the_way("w2", Packet, "w1")[0]][2].content
    assert packet.version == 2  # written anew: it was 1
    cluster.update(2, {REDUCE: "w2"}, "w0")
    ends_well(cluster)


def test_a_receiver_with_a_stale_map_holds_what_comes() -> None:
    cluster = apart()
    cluster.update(2, {REDUCE: "w2"}, "w0", "w1")
    for index in range(2):
        cluster.run("w0", 1, index)
        cluster.pass_on("w2", Packet, "w0")
    cluster.pass_on("w2", SliceCame)
    # By its own map all of that belongs to w1: it keeps it, and says that it has come.
    assert not cluster.on_the_way("w1", Packet)
    assert not cluster.on_the_way("w1", SliceCame)
    assert cluster.on_the_way("w0", Ack)
    assert cluster.reported("w2") == []
    cluster.update(2, {REDUCE: "w2"}, "w2")
    assert cluster.reported("w2") == [REDUCE]
    assert cluster.may_run("w2", 2)
    ends_well(cluster)


def test_sender_and_receiver_with_stale_maps() -> None:
    cluster = apart()
    cluster.update(2, {REDUCE: "w2"}, "w2")
    cluster.run("w0", 1, 0)
    cluster.pass_on("w1", Packet, "w0")  # both think that it is there, and it is
    cluster.update(2, {REDUCE: "w2"}, "w1")
    came = cluster.flying[cluster.on_the_way("w2", SliceCame)[0]][2].content
    assert came.state.inboxes[2].closed == {0}
    cluster.update(2, {REDUCE: "w2"}, "w0")
    ends_well(cluster)


def test_a_chain_of_three_stale_maps() -> None:
    cluster = apart(workers=5)
    cluster.update(2, {REDUCE: "w2"}, "w1", "w2", "w3")
    cluster.pass_on("w2", SliceCame)
    cluster.update(3, {REDUCE: "w3"}, "w2", "w3")
    cluster.pass_on("w3", SliceCame)
    cluster.update(4, {REDUCE: "w4"}, "w3")
    # w0 knows version 1, w1 version 2, w2 version 3, w3 version 4, and w4 version 1.
    cluster.run("w0", 1, 0)
    for sender, to in [("w0", "w1"), ("w1", "w2"), ("w2", "w3"), ("w3", "w4")]:
        cluster.pass_on(to, Packet, sender)
    assert not cluster.on_the_way("w1", Packet)
    for version, worker in [(2, "w2"), (3, "w3"), (4, "w4")]:
        cluster.update(version, {REDUCE: worker}, "w0", "w1", "w2", "w3", "w4")
    ends_well(cluster)


def test_steps_of_the_map_that_overtake_each_other_are_taken_in_order() -> None:
    cluster = apart()
    cluster.update(3, {REDUCE: "w1"}, "w0", "w1", "w2")
    assert cluster.core("w1").map.version == 1
    cluster.update(2, {REDUCE: "w2"}, "w0", "w1", "w2")
    assert cluster.core("w1").map.version == 3
    cluster.update(2, {REDUCE: "w2"}, "w0", "w1", "w2")  # again, and late
    assert cluster.core("w1").map.worker_of(REDUCE) == "w1"
    ends_well(cluster)


# -- when a slice moves


def test_a_slice_moves_after_one_of_two_messages() -> None:
    cluster = apart()
    cluster.run("w0", 1, 0)
    cluster.pass_on("w1", Packet)
    cluster.update(2, {REDUCE: "w2"}, "w0", "w1", "w2")
    cluster.run("w0", 1, 1)
    cluster.pass_on("w2", Packet)  # it comes before the slice
    assert not cluster.may_run("w2", 2)
    cluster.pass_on("w2", SliceCame)
    assert cluster.may_run("w2", 2)
    ends_well(cluster)


def test_a_slice_that_moves_after_its_reduce_does_not_run_it_again() -> None:
    cluster = apart()
    for index in range(2):
        cluster.run("w0", 1, index)
        cluster.pass_on("w1", Packet)
    cluster.run("w1", 2)
    cluster.update(2, {REDUCE: "w2"}, "w0", "w1", "w2")
    cluster.pass_on("w2", SliceCame)
    # What was for the reduce comes again, by another way.
    for index in range(2):
        packet = Packet(2, REDUCE[0], index, 2, {0: [b"again"]})
        cluster.core("w2").on_message("w0", Envelope(1, 100 + index, packet))
    assert not cluster.may_run("w2", 2)
    assert cluster.may_run("w2", 3)
    assert 2 not in cluster.nodes["w2"].matcher._inboxes[REDUCE]  # dropped, not kept for ever
    ends_well(cluster)


def test_a_slice_is_moved_back_while_it_is_in_flight() -> None:
    cluster = apart()
    cluster.update(2, {REDUCE: "w2"}, "w0", "w1", "w2")
    cluster.run("w0", 1, 0)
    cluster.pass_on("w2", Packet)  # waits there for the slice
    cluster.update(3, {REDUCE: "w1"}, "w0", "w1", "w2")
    cluster.pass_on("w1", Packet, "w2")  # it does not wait for what does not come
    cluster.pass_on("w2", SliceCame)
    assert cluster.reported("w2") == []  # passed on, not taken
    cluster.pass_on("w1", SliceCame, "w2")
    assert cluster.reported("w1") == [REDUCE]
    ends_well(cluster)


def test_a_slice_that_was_to_go_and_runs_still_stays_where_the_map_takes_that_back() -> None:
    cluster = apart()
    assert cluster.may_run("w0", 1, 0)  # and runs now
    cluster.update(2, {(POINTS, 0): "w2"}, "w0", "w1", "w2")
    assert not cluster.on_the_way("w2", SliceCame)
    cluster.update(3, {(POINTS, 0): "w0"}, "w0", "w1", "w2")
    cluster.run("w0", 1, 0)
    assert not cluster.on_the_way("w2", SliceCame)
    assert cluster.reported("w0") == []  # it has not gone and come back
    ends_well(cluster)


def test_a_slice_is_moved_on_while_its_data_is_stored() -> None:
    cluster = apart()
    cluster.update(2, {REDUCE: "w2"}, "w0", "w1", "w2")
    (which,) = cluster.on_the_way("w2", SliceCame)
    cluster.deliver(which)
    ((group, index, data),) = cluster.core("w2").take_arrivals()
    cluster.nodes["w2"].values.at |= {(dataset, index): value for dataset, value in data.items()}
    cluster.core("w2").on_update(MapUpdate(3, {REDUCE: "w0"}))
    cluster.core("w2").arrived(group, index)
    cluster.move(cluster.nodes["w2"])
    cluster.update(3, {REDUCE: "w0"}, "w0", "w1")
    cluster.pass_on("w0", SliceCame, "w2")
    assert cluster.reported("w0") == [REDUCE]
    ends_well(cluster)


def test_a_slice_goes_when_what_runs_on_it_has_ended() -> None:
    cluster = apart()
    assert cluster.may_run("w0", 1, 0)
    cluster.update(2, {(POINTS, 0): "w2"}, "w0", "w1", "w2")
    assert not cluster.on_the_way("w2", SliceCame)
    cluster.run("w0", 1, 0)
    came = cluster.flying[cluster.on_the_way("w2", SliceCame)[0]][2].content
    assert came.state.partitions[0] == PartitionState(started=1, finished=1)
    ends_well(cluster)


def test_a_slice_whose_tasks_are_ended_by_other_processes_goes_with_the_next_tick() -> None:
    cluster = apart()
    assert cluster.may_run("w0", 1, 0)
    cluster.update(2, {(POINTS, 0): "w2"}, "w0", "w1", "w2")
    node = cluster.nodes["w0"]
    node.run_task(next(each for each in node.running if each.index == 0), finishes_itself=True)
    cluster.move(node)
    assert not cluster.on_the_way("w2", SliceCame)
    cluster.tick()
    cluster.move(node)
    cluster.pass_on("w2", SliceCame)
    ends_well(cluster)


def test_a_slice_moves_to_a_worker_that_is_ahead() -> None:
    builder = branch_program()
    cluster = ByHand(builder, {(0, 0): "w0", (0, 1): "w1", (0, 2): "w1", (1, 0): "w1"})
    for index in (1, 2):
        cluster.run("w1", 1, index)
    cluster.run("w0", 1, 0)
    cluster.pass_all()
    cluster.run("w1", 2)
    cluster.run("w1", 3)
    decided = next(iter(cluster.core("w1")._decisions.values()))
    cluster.run("w1", 4, 1)  # of the branch; w0 has not heard which
    assert cluster.core("w0")._decisions == {}
    cluster.update(2, {(0, 0): "w1"}, "w0", "w1", "w2")
    cluster.pass_on("w1", SliceCame)
    assert cluster.may_run("w1", 4, 0), decided  # the older stage runs, for this slice
    ends_well(cluster)


def test_what_a_worker_that_has_left_has_decided_is_passed_on_to_who_is_new() -> None:
    cluster = ByHand(branch_program(), dict.fromkeys([(0, 0), (0, 1), (0, 2), (1, 0)], "w0"), 2)
    for index in range(3):
        cluster.run("w0", 1, index)
    cluster.run("w0", 2)
    cluster.run("w0", 3)  # it decides, and w1 has not heard of it
    moves = dict.fromkeys(cluster.core("w0").map.assigned, "w1")
    cluster.update(2, moves, "w0", "w1")
    for _ in moves:
        cluster.pass_on("w1", SliceCame)
    cluster.update(3, {}, "w0", "w1", left=frozenset({"w0"}))
    cluster.join_by_hand("w2", MapUpdate(4, moves, {"w1": 0, "w2": 0}, is_whole=True))
    cluster.update(4, {}, "w1", joined={"w2": "at w2"})  # and w0 ends before it hears of that
    assert not cluster.on_the_way("w2", Decisions)
    cluster.pass_on("w1", Decision, "w0")
    cluster.pass_on("w2", Decisions, "w1")
    assert cluster.core("w2")._decisions == cluster.core("w0")._made != {}


def test_a_slice_moves_to_a_worker_that_is_behind() -> None:
    builder = branch_program()
    cluster = ByHand(builder, {(0, 0): "w0", (0, 1): "w1", (0, 2): "w1", (1, 0): "w1"})
    for index in (1, 2):
        cluster.run("w1", 1, index)
    cluster.run("w0", 1, 0)
    cluster.pass_all()
    cluster.run("w1", 2)
    cluster.run("w1", 3)
    cluster.run("w1", 4, 1)
    cluster.update(2, {(0, 1): "w0"}, "w0", "w1", "w2")
    cluster.pass_on("w0", SliceCame)  # it has run stage 4, of which w0 has not heard
    cluster.run("w1", 4, 2)
    assert not cluster.may_run("w0", 4, 1)
    cluster.pass_on("w0", Decision)
    assert not cluster.may_run("w0", 4, 1)
    assert cluster.may_run("w0", 4, 0)
    ends_well(cluster)


def test_partitions_that_a_stage_reads_together_move_together() -> None:
    cluster = apart()
    cluster.update(2, {(POINTS, 0): "w2"}, "w0", "w1", "w2")
    cluster.pass_on("w2", SliceCame)
    at = cluster.nodes["w2"].values.at
    assert at == {(0, 0): 0, (1, 0): 5}  # points and extra
    ends_well(cluster)


def test_a_slice_runs_only_when_its_data_is_stored() -> None:
    cluster = apart()
    cluster.update(2, {(POINTS, 0): "w2"}, "w0", "w1", "w2")
    (which,) = cluster.on_the_way("w2", SliceCame)
    cluster.deliver(which)  # and the runtime does nothing yet
    assert not cluster.may_run("w2", 1, 0)
    ((group, index, data),) = cluster.core("w2").take_arrivals()
    cluster.nodes["w2"].values.at |= {(dataset, index): value for dataset, value in data.items()}
    cluster.core("w2").arrived(group, index)
    assert cluster.may_run("w2", 1, 0)
    ends_well(cluster)


# -- what comes twice, or not at all


def test_a_message_that_comes_twice_counts_once() -> None:
    cluster = apart()
    cluster.run("w0", 1, 0)
    (which,) = cluster.on_the_way("w1", Packet)
    content = cluster.flying[which][2].content
    cluster.pass_on("w1", Packet, twice=True)
    cluster.core("w1").on_message("w2", Envelope(1, 1, content))  # and by another way
    assert not cluster.may_run("w1", 2)
    cluster.run("w0", 1, 1)
    cluster.pass_on("w1", Packet, twice=True)
    ends_well(cluster)


def test_a_slice_that_comes_twice_is_there_once() -> None:
    cluster = apart()
    cluster.update(2, {(POINTS, 0): "w2"}, "w0", "w1", "w2")
    (which,) = cluster.on_the_way("w2", SliceCame)
    again = cluster.flying[which]
    cluster.pass_on("w2", SliceCame)
    cluster.run("w2", 1, 0)
    cluster.update(3, {(POINTS, 0): "w0"}, "w0", "w1", "w2")
    cluster.pass_on("w0", SliceCame)
    cluster.flying.append(again)  # an old copy: it has not run the first stage
    cluster.pass_all()
    assert cluster.reported("w2") == [(POINTS, 0)]
    assert cluster.reported("w0") == [(POINTS, 0)]
    ends_well(cluster)


def test_a_lost_acknowledgement_makes_the_message_come_again() -> None:
    cluster = apart()
    cluster.run("w0", 1, 0)
    cluster.pass_on("w1", Packet)
    assert [to for _, to, envelope in cluster.flying if isinstance(envelope.content, Ack)]
    cluster.flying.clear()
    cluster.tick(0)
    cluster.tick(2.0)
    cluster.move(cluster.nodes["w0"])
    cluster.pass_on("w1", Packet)
    assert not cluster.may_run("w1", 2)
    cluster.pass_on("w0", Ack)
    cluster.tick(2.0)
    cluster.move(cluster.nodes["w0"])
    assert not cluster.on_the_way("w1", Packet)
    ends_well(cluster)


def test_a_worker_that_does_not_acknowledge_counts_as_lost() -> None:
    cluster = apart()
    core = cluster.core("w0")
    core._links._lost_after_s = 5.0
    cluster.run("w0", 1, 0)
    cluster.tick(0)
    cluster.tick(4.9)
    assert core.lost_workers == set()
    cluster.tick(0.2)
    assert core.lost_workers == {"w1"}
    (report,) = core.take_reports()
    assert report.lost == "w1"


def test_what_is_of_another_run_is_dropped() -> None:
    cluster = apart()
    cluster.update(2, {(POINTS, 0): "w2"}, "w0", "w1", "w2")
    came = SliceCame(POINTS, 1, 1, SliceState({}), {})
    cluster.core("w2").on_message("w0", Envelope(2, 1, came))
    cluster.core("w2").on_message("w0", Envelope(0, 1, came))
    cluster.pass_all()  # number 1 of this run comes still
    assert cluster.reported("w2") == [(POINTS, 0)]
    ends_well(cluster)


# -- who leaves


def test_a_worker_parts_from_one_that_has_left_when_all_it_has_sent_there_has_come() -> None:
    cluster = apart()
    cluster.run("w0", 1, 0)  # goes to w1
    cluster.update(2, {REDUCE: "w2"}, "w0", "w1", "w2")
    left = {"left": frozenset({"w1"})}
    cluster.update(3, {}, "w0", "w1", "w2", **left)
    assert not [each for each in cluster.nodes["w0"].reports if isinstance(each, Parted)]
    assert [each.version for each in cluster.nodes["w2"].reports if isinstance(each, Parted)] == [3]
    cluster.core("w1").on_order(Stop())
    cluster.move(cluster.nodes["w1"])
    assert not cluster.nodes["w1"].reports  # the slice that it has sent has not come
    cluster.pass_all()
    cluster.tick(0)
    cluster.pass_all()
    for node in cluster.nodes.values():
        cluster.move(node)
    assert [each.version for each in cluster.nodes["w0"].reports if isinstance(each, Parted)] == [3]
    assert [type(each) for each in cluster.nodes["w1"].reports] == [Drained]
    ends_well(cluster)


# -- decisions


def test_a_checkpoint_has_the_decision_of_which_the_core_has_not_heard() -> None:
    cluster = ByHand(branch_program(), dict.fromkeys([(0, 0), (0, 1), (0, 2), (1, 0)], "w0"), 2)
    for index in range(3):
        cluster.run("w0", 1, index)
    cluster.run("w0", 2)
    assert cluster.may_run("w0", 3)
    (task,) = cluster.nodes["w0"].running
    cluster.nodes["w0"].run_task(task, finishes_itself=True)
    core = cluster.core("w0")
    assert core._decisions == {}
    core.stored(1, [])
    (said,) = core.take_reports()
    assert isinstance(said, Stored)
    assert said.decisions.keys() == {3}
    cluster.nodes["w0"].empty_outbox()
    ends_well(cluster)


def test_a_new_worker_gets_all_decisions_of_all_others() -> None:
    builder = branch_program()
    cluster = ByHand(builder, dict.fromkeys([(0, 0), (0, 1), (0, 2), (1, 0)], "w0"), 2)
    for index in range(3):
        cluster.run("w0", 1, index)
    cluster.run("w0", 2)
    cluster.run("w0", 3)
    cluster.flying.clear()  # w1 hears of it late
    step = {"joined": {"w2": "at w2"}}
    cluster.join_by_hand(
        "w2",
        MapUpdate(
            2, cluster.core("w0").map.whole().moves, {"w0": 0, "w1": 0, "w2": 0}, is_whole=True
        ),
    )
    cluster.update(2, {}, "w0", "w1", **step)
    assert cluster.on_the_way("w2", Decisions, "w0")
    cluster.pass_on("w2", Decisions, "w0")
    assert cluster.core("w2")._decisions == cluster.core("w0")._decisions != {}
    cluster.update(3, {(0, 0): "w2"}, "w0", "w1", "w2")
    cluster.pass_on("w2", SliceCame)
    assert cluster.may_run("w2", 4, 0)
    ends_well(cluster)
