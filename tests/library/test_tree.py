"""`clamor.get` of containers, and references that are used where their objects are meant."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._session import process_sessions
from tests.support.fake_session import Cluster, FakeSession

Pair = namedtuple("Pair", "left right")


@dataclasses.dataclass(frozen=True)
class Batch:
    x: Any
    name: str
    made: int = dataclasses.field(default=3, init=False)


@pytest.fixture(autouse=True)
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeSession]:
    session = FakeSession(Cluster())
    monkeypatch.setattr(process_sessions, "_current", session)
    return session


def test_a_nest_of_references_is_opened() -> None:
    refs = [clamor.put(np.full(1000, i)) for i in range(5)]
    small = clamor.put({"a": 1})
    nest = {
        "list": [refs[0], 7, (refs[1], "text")],
        "pair": Pair(refs[2], None),
        "batch": Batch(refs[3], "b"),
        3: {"deep": [[[refs[4]]]]},
        "small": small,
    }
    opened = clamor.get(nest)
    assert [int(array[0]) for array in (opened["list"][0], opened["list"][2][0])] == [0, 1]
    assert opened["list"][1:2] == [7]
    assert type(opened["pair"]) is Pair
    assert int(opened["pair"].left[0]) == 2
    assert type(opened["batch"]) is Batch
    assert (int(opened["batch"].x[0]), opened["batch"].name, opened["batch"].made) == (3, "b", 3)
    assert int(opened[3]["deep"][0][0][0][0]) == 4
    assert opened["small"] == {"a": 1}
    assert nest["list"][0] is refs[0]  # what was passed is as it was
    private = clamor.get([refs[0]], mode="c")[0]
    private[0] = 9
    assert refs[0].get()[0] == 0


def test_what_has_no_reference_is_the_same_object() -> None:
    for obj in ([1, [2]], {"a": (1, 2)}, Pair(1, [2]), Batch(1, "b"), {1, 2}, "text", None, Batch):
        assert clamor.get(obj) is obj
    odd = OrderedDict(a=clamor.put(1))  # another type than dict: as it is
    assert clamor.get(odd) is odd
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(RecursionError):
        clamor.get(endless)
    freed = clamor.put(np.zeros(1000))
    clamor.free(freed)
    with pytest.raises(errors.FreedError):
        clamor.get([freed])


USES: dict[str, Any] = {
    "sum": np.sum,
    "mean": np.mean,
    "add": lambda ref: np.add(ref, 1),
    "of the right": lambda ref: np.ones(3) * ref,
    "concatenate": lambda ref: np.concatenate([np.ones(3), ref]),
    "sort": np.sort,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("content", [np.zeros(1000), 1.0])
def test_numpy_does_not_take_a_reference_for_an_array(use: str, content: Any) -> None:
    with pytest.raises(errors.NotOpenedError, match=r"Call ref\.get\(\)") as raised:
        USES[use](clamor.put(content))
    assert isinstance(raised.value, TypeError)
    assert pickle.loads(pickle.dumps(raised.value)).message == raised.value.message


def test_containers_hold_references() -> None:
    ref, other = clamor.put(np.zeros(1000)), clamor.put(1.0)
    for made in (np.array([ref, other], object), pd.Series([ref, other]).to_numpy()):
        assert made.tolist() == [ref, other]
        assert (made == ref).tolist() == [True, False]
        assert ref in made.tolist()
    assert np.asarray(ref)[()] is ref
    assert ref not in [np.float64(1), "text"]


def test_what_a_reference_lacks_names_get() -> None:
    ref = clamor.put(np.zeros(1000))
    with pytest.raises(AttributeError, match=r"no attribute 'sum'.*use ref\.get\(\)\.sum\.$"):
        ref.sum()
    with pytest.raises(AttributeError, match=r"no attribute '_secret'\.$"):
        _ = ref._secret
    assert not hasattr(ref, "shape_of_it")
    assert not hasattr(ref, "__array_interface__")
    assert copy.copy(ref) == copy.deepcopy(ref) == pickle.loads(pickle.dumps(ref)) == ref


def test_free_takes_what_holds_a_reference() -> None:
    table = clamor.HashMap.build(np.arange(1000), np.arange(1000))
    clamor.free(table)
    assert table.ref._freed
    with pytest.raises(TypeError, match="takes a GlobalRef, not ndarray"):
        clamor.free(np.zeros(3))


def test_common_errors_are_at_the_top() -> None:
    for name in ("ClamorError", "CommitConflict", "FreedError", "MemberLostError"):
        assert getattr(clamor, name) is getattr(errors, name)
        assert getattr(errors, name).__module__ == "clamor_ray.errors"
    assert errors.StorageError.__module__ == "clamor_ray.errors"
