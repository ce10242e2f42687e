"""Plans without a cluster: what is captured of functions, where stages end, what tasks get."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest

from clamor_ray import errors
from clamor_ray._objects.layout import take_apart
from clamor_ray._read.ref import GlobalRef
from clamor_ray.collection import options
from clamor_ray.collection.plan import results
from clamor_ray.collection.plan.functions import Captured, capture
from clamor_ray.collection.plan.plan import Narrow, Node, Scan, Wide, Zip, node, upstream
from clamor_ray.collection.plan.stages import Cutter, FromStage, PiecesOf, SlicesOf, Stage, in_order


def ref(region: int, version: int = 0, *, frozen: bool = False) -> GlobalRef[Any]:
    plan = take_apart(np.zeros(3)).plan
    return GlobalRef(region, version, 1 << 44, 4096, plan, "scope", None, frozen=frozen)


def source(n: int = 4) -> Node:
    return Node(Scan("items", tuple(range(n))), (), n)


def narrow(parent: Node, *args: Any) -> Node:
    return node(Narrow("map", capture(lambda x, *_: x, args)), (parent,), parent.n_partitions)


def whole(target: Node, *there: Node) -> Stage:
    return Cutter(lambda each: each in there).whole(target)


# ------------------------------------------------------------------ functions


def load(captured: Captured, *refs: GlobalRef[Any]) -> Any:
    return captured.load(refs or [variable.ref for variable in captured.variables])


def test_references_are_variables_wherever_they_are() -> None:
    first, second, third = ref(1, 5), ref(2), ref(3, frozen=True)
    captured = capture(lambda x: (x, first), ({"in": [second]}, first), {"name": third})
    assert [(v.region, v.ref.version, v.moves) for v in captured.variables] == [
        (1, 5, True),
        (2, 0, True),
        (3, 0, False),
    ]
    newer = [ref(1, 9, frozen=True), ref(2, 7, frozen=True), ref(3, frozen=True)]
    function, args, kwargs = load(captured, *newer)
    assert function(0)[1].version == 9
    assert args[0]["in"][0].version == 7
    assert args[1].version == 9
    assert kwargs["name"].version == 0


def test_one_reference_frozen_and_not_are_two_variables() -> None:
    moving = ref(1, 2)
    captured = capture(lambda x: x, (moving, moving.snapshot(), moving))
    assert [variable.moves for variable in captured.variables] == [True, False]


def test_a_later_version_of_the_reference_is_not_the_functions() -> None:
    moving = ref(1, 2)
    captured = capture(lambda x: moving)
    moving._move(moving._state._replace(version=3))
    assert captured.variables[0].ref.version == 2


def test_what_cannot_be_pickled_is_named() -> None:
    lock = threading.Lock()
    with pytest.raises(errors.UnpicklableError, match="'lock', which it closes over"):
        capture(lambda x: lock)
    with pytest.raises(errors.UnpicklableError, match="argument 'by' is a lock"):
        capture(lambda x, by: x, (), {"by": lock})
    with pytest.raises(errors.UnpicklableError, match="default 1 is a lock"):
        capture(lambda x, by=lock: x)


def test_names() -> None:
    def inner(x: int) -> int:
        return x

    assert capture(inner).name == "inner"
    assert capture(len).name == "len"
    assert capture(np.sum).name == "sum"


# ------------------------------------------------------------------ stages


def test_narrow_operators_and_zips_are_one_stage() -> None:
    base = source()
    last = node(Zip(), (narrow(base, ref(1)), narrow(narrow(base), ref(2))), 4)
    stage = whole(narrow(last))
    assert stage.inputs == ()
    assert stage.n_tasks == 4
    assert [variable.region for variable in stage.variables] == [1, 2]
    # The source is read once, though both sides of the zip begin with it.
    assert [type(step).__name__ for step in stage.program.steps].count("ReadSplit") == 1


def test_a_wide_operator_ends_a_stage() -> None:
    wide = node(Wide("reduce_by_key", None, "sum"), (narrow(source(5)),), 3)
    stages = in_order(whole(narrow(wide)))
    assert [stage.n_tasks for stage in stages] == [5, 3]
    assert stages[0].program.out.kind == "hashed"
    assert [type(slot) for slot in stages[1].slots] == [PiecesOf]


def test_a_join_has_a_stage_for_each_side() -> None:
    join = node(Wide("join", None, "inner"), (source(2), source(3)), 4)
    assert [stage.n_tasks for stage in in_order(whole(join))] == [2, 3, 4]


def test_a_join_with_itself() -> None:
    both = source(2)
    stages = in_order(whole(node(Wide("join", None, "inner"), (both, both), 2)))
    assert [stage.program.out.kind for stage in stages] == ["hashed", "hashed", "whole"]


def test_a_sort_looks_twice() -> None:
    stages = in_order(whole(node(Wide("sort"), (narrow(source(2)),), 3)))
    assert [stage.program.out.kind for stage in stages] == ["sampled", "ranged", "whole"]
    assert stages[1].sampled is stages[0]
    assert stages[0].program.out.whole  # type: ignore[union-attr]


def test_a_sort_of_kept_partitions_takes_a_sample_of_them() -> None:
    kept = narrow(source(2))
    kept.keep = True
    stages = in_order(whole(node(Wide("sort"), (kept,), 3)))
    kinds = [stage.program.out.kind for stage in stages]
    assert kinds == ["whole", "sampled", "ranged", "whole"]
    assert not stages[1].program.out.whole  # type: ignore[union-attr]


def test_a_repartition_takes_slices() -> None:
    last = whole(node(Wide("repartition"), (source(2),), 5))
    assert [type(slot) for slot in last.slots] == [SlicesOf]


def test_a_kept_node_is_a_border() -> None:
    kept = narrow(source())
    kept.keep = True
    stage = whole(narrow(kept))
    assert [type(slot) for slot in stage.slots] == [FromStage]
    assert stage.inputs[0].owner is kept
    assert stage.inputs[0].key == "whole"


def test_nothing_is_cut_behind_what_is_there() -> None:
    kept = narrow(narrow(source()))
    kept.keep = True
    (placeholder,) = whole(narrow(kept), kept).inputs
    assert placeholder.program.steps == ()
    assert len(in_order(whole(narrow(kept), kept))) == 2


def test_signatures_tell_stages_apart() -> None:
    base = narrow(source())
    middle = narrow(base)
    last = narrow(middle)
    before = whole(last).signature
    assert before == whole(last).signature
    middle.keep = True
    assert whole(last).signature != before


def test_upstream_comes_once_and_before() -> None:
    base = source()
    left, right = narrow(base), narrow(base)
    last = node(Zip(), (left, right), 4)
    assert list(upstream(last)) == [base, left, right, last]


def test_a_very_long_chain() -> None:
    last = source()
    for _ in range(3000):
        last = narrow(last)
    assert len(list(upstream(last))) == 3001


# ------------------------------------------------------------------ slices and options


def test_slices() -> None:
    counts = [4, 0, 1, 5]
    edges = results.even_bounds(10, 3)
    assert edges == [0, 4, 7, 10]
    found = [results.slices(counts, a, b) for a, b in itertools.pairwise(edges)]
    assert found == [[(0, 0, 4)], [(2, 0, 1), (3, 0, 2)], [(3, 2, 5)]]
    assert results.even_bounds(0, 2) == [0, 0, 0]


def test_options_from_the_environment() -> None:
    found = options.from_env(
        {"CLAMOR_SCHEDULING": "ray", "CLAMOR_SPECULATION": "off", "CLAMOR_CHECK_OUTPUTS": "1"}
    )
    assert (found.scheduling, found.speculation, found.check) == ("ray", False, True)
    assert options.from_env({}) == options.Options()
    with pytest.raises(ValueError, match="CLAMOR_SPECULATION is 1 or 0, not 'maybe'"):
        options.from_env({"CLAMOR_SPECULATION": "maybe"})
    with pytest.raises(ValueError, match="'nowhere'"):
        options.from_env({"CLAMOR_SCHEDULING": "nowhere"})


@pytest.mark.parametrize(
    "wrong",
    [{"num_cpus": -1}, {"max_retries": -1}, {"locality_wait_s": float("nan")}],
)
def test_options_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        options.Options().with_(**wrong)
