"""The hash map against a dict, its keys' types, its limits, and as a value that travels."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._objects.hashtable import HEAD_N, HEAD_SLOTS, Table, slots_for
from clamor_ray._read.hashmap import HashMap, MutableHashMap
from clamor_ray._read.ref import GlobalRef
from tests.conftest import ClamorCluster

POINT = np.dtype([("x", "<f8"), ("label", "S3"), ("rgb", "u1", (3,))])


def build(keys: Any, values: Any, capacity: int | None = None) -> MutableHashMap:
    """A map in private memory, as a transaction sees it."""
    table = Table.build(np.asarray(keys), np.asarray(values), capacity)
    return MutableHashMap({"header": table.header, "slots": table.slots})


def arrays(m: MutableHashMap) -> tuple[Any, Any]:
    return m._table.header, m._table.slots


# ------------------------------------------------------------------ against a dict

# Few of them, in a small table: they meet often.
INTS = st.one_of(st.integers(0, 40), st.sampled_from([-1, -(2**63), 2**63 - 1]))
BYTES = st.binary(max_size=3).map(lambda b: b.rstrip(b"\0"))


class AgainstDict(RuleBasedStateMachine):
    key_dtype: Any = np.int64
    keys = INTS

    def __init__(self) -> None:
        super().__init__()
        self.m = build(np.array([], self.key_dtype), np.array([], np.int32), capacity=16)
        self.model: dict[Any, int] = {}
        assert self.m.capacity == 16

    def as_keys(self, keys: list[Any]) -> Any:
        return np.array(keys, self.key_dtype)

    @rule(data=st.data(), value=st.integers(-(2**31), 2**31 - 1))
    def set_one(self, data: Any, value: int) -> None:
        key = data.draw(self.keys)
        if key not in self.model and len(self.model) == 16:
            with pytest.raises(errors.HashMapFullError):
                self.m[key] = value
        else:
            self.m[key] = value
            self.model[key] = value

    @rule(data=st.data())
    def set_many(self, data: Any) -> None:
        keys = data.draw(st.lists(self.keys, max_size=20))
        values = list(range(len(keys)))
        after = {**self.model, **dict(zip(keys, values, strict=True))}
        if len(after) > 16:
            with pytest.raises(errors.HashMapFullError, match="capacity of 16"):
                self.m.set(self.as_keys(keys), values)
        else:
            self.m.set(self.as_keys(keys), values)
            self.model = after

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def erase(self, data: Any) -> None:
        gone = data.draw(st.lists(st.sampled_from(sorted(self.model)), min_size=1))
        self.m.erase(self.as_keys(gone))
        for key in gone:
            self.model.pop(key, None)

    @rule(data=st.data())
    def erase_what_is_not_there(self, data: Any) -> None:
        keys = data.draw(st.lists(self.keys, min_size=1))
        absent = [key for key in keys if key not in self.model]
        if absent:
            with pytest.raises(KeyError) as info:
                self.m.erase(self.as_keys(keys))
            assert repr(absent[0]) in str(info.value)

    @rule(data=st.data())
    def look(self, data: Any) -> None:
        keys = data.draw(st.lists(self.keys))
        found = self.m.get(self.as_keys(keys), default=-7)
        assert found.tolist() == [self.model.get(key, -7) for key in keys]
        assert self.m.contains(self.as_keys(keys)).tolist() == [k in self.model for k in keys]
        for key in keys:
            assert (key in self.m) == (key in self.model)

    @invariant()
    def same(self) -> None:
        assert len(self.m) == len(self.model)
        keys, values = self.m.items()
        assert dict(zip(keys.tolist(), values.tolist(), strict=True)) == self.model
        # What was erased leaves nothing: a lookup costs what the content costs.
        header, slots = arrays(self.m)
        assert int((slots["tag"] != 0).sum()) == int(header[HEAD_N]) == len(self.model)
        assert not slots[slots["tag"] == 0].tobytes().strip(b"\0")


class BytesAgainstDict(AgainstDict):
    key_dtype = "S3"
    keys = BYTES


TestInts = AgainstDict.TestCase
TestBytes = BytesAgainstDict.TestCase
TestInts.settings = TestBytes.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None
)


@settings(max_examples=60, deadline=None)
@given(
    keys=st.lists(st.binary(min_size=1, max_size=20).map(lambda b: b.rstrip(b"\0")), max_size=60),
    seed=st.integers(0, 1000),
)
def test_structured_values(keys: list[bytes], seed: int) -> None:
    rng = np.random.default_rng(seed)
    values = np.zeros(len(keys), POINT)
    values["x"] = rng.random(len(keys))
    values["label"] = [b"%d" % (i % 999) for i in range(len(keys))]
    values["rgb"] = rng.integers(0, 256, (len(keys), 3))
    m = build(np.array(keys, "S20"), values)
    model = dict(zip(keys, values, strict=True))  # the last of equal keys
    assert len(m) == len(model)
    found = m.get(np.array(keys, "S20"))
    assert found.dtype == POINT
    for key, value in zip(keys, found, strict=True):
        assert value == model[key] == m.get(key)


@pytest.mark.parametrize(
    "values",
    [
        np.arange(24, dtype=np.float32).reshape(4, 2, 3),
        np.array(["2020-01-01", "NaT", "2021-05-05", "1969-12-31"], "datetime64[s]"),
        np.array(["a", "bcd", "", "ü"]),
        np.arange(4, dtype=">i2"),
        np.array([1 + 2j, 0, -1j, 5]),
        np.array([True, False, True, True]),
        np.arange(4 * 1500).reshape(4, 1500),
    ],
    ids=["rows", "datetime", "text", "big-endian", "complex", "bool", "large"],
)
def test_values_of_any_plain_dtype(values: Any) -> None:
    m = build([10, -20, 30, 0], values)
    found = m.get([[0, 10], [-20, 30]])
    assert found.dtype == values.dtype
    np.testing.assert_array_equal(found, values[[[3, 0], [1, 2]]])
    np.testing.assert_array_equal(m.get(30), values[2])
    m[30] = values[0]
    np.testing.assert_array_equal(m[30], values[0])
    assert m.row_shape == values.shape[1:]


def test_millions_of_keys() -> None:
    rng = np.random.default_rng(5)
    keys = rng.permutation(2_000_000) * 1_000_003 - 7
    values = rng.random(len(keys))
    m = build(keys, values)
    assert len(m) == len(keys)
    assert m.capacity >= len(keys)
    np.testing.assert_array_equal(m.get(keys), values)
    assert not m.contains(keys + 1).any()
    m.erase(keys[::2])
    assert m.contains(keys).tolist() == [False, True] * 1_000_000
    np.testing.assert_array_equal(np.sort(m.keys()), np.sort(keys[1::2]))


def test_half_full_means_short_probes() -> None:
    # Knuth: 1.5 slots for a key that is there at a load of a half, 2.5 for one that is not. Also
    # for keys that a weaker hash would heap up, and after a long life of inserts and erases.
    n = 1 << 15
    for keys in (np.arange(n), np.arange(n) << 32, np.arange(n) * 1024 + (1 << 62)):
        m = build(keys, np.zeros(n, np.uint8), capacity=n)
        for i in range(64):
            m.erase(keys[i::64])
            m.set(keys[i::64], i)
        _, slots = arrays(m)
        record = slots.dtype.itemsize
        starts = m._table.starts(slots["key"].copy()) // np.uint64(record)
        at = np.arange(len(slots), dtype=np.uint64)
        steps = (at - starts) % np.uint64(len(slots))
        assert steps[slots["tag"] != 0].mean() < 0.6


# ------------------------------------------------------------------ what is asked


def test_the_last_of_equal_keys_stays() -> None:
    m = build([1, 2, 1], [10, 20, 30])
    assert (m.get(1), m.get(2), len(m)) == (30, 20, 2)
    m.set([2, 2], [5, 6])
    assert m[2] == 6


def test_scalars_in_scalars_out() -> None:
    m = build([1, 2], [1.5, 2.5])
    assert isinstance(m.get(1), np.float64)
    assert m.get(np.int32(2)) == 2.5
    assert m.get(9, default=0) == 0.0
    assert m.contains(1) is True
    assert m.get([]).shape == (0,)
    assert m.get(np.zeros((0, 3), np.int64)).shape == (0, 3)


def test_the_first_missing_key_is_named() -> None:
    m = build([1, 2], [1.5, 2.5])
    with pytest.raises(KeyError, match=r"no key 17 \(and 1 more of the 4\)"):
        m.get([1, 17, 2, 18])
    with pytest.raises(errors.MissingKeyError, match="no key 17"):
        _ = m[17]
    with pytest.raises(KeyError, match="b'x'"):
        build([b"abc"], [1]).get(b"x")


def test_arrays_are_in_it_if_all_their_keys_are() -> None:
    m = build([1, 2], [1.5, 2.5])
    assert [1, 2, 1] in m
    assert [1, 3] not in m
    assert [] in m
    assert sorted(m) == [1, 2]


def test_trailing_nuls_are_padding() -> None:
    m = build(np.array([b"ab", b"a\0b"], "S4"), [1, 2])
    assert m.get(b"ab\0") == m.get(b"ab") == m.get(np.array(b"ab", "S2")) == 1
    assert m.get(b"a\0b") == 2
    assert b"a" not in m
    assert sorted(m.keys().tolist()) == [b"a\0b", b"ab"]
    assert m.get(np.array([b"ab"], "S99")).tolist() == [1]  # wide, but what is in it fits
    m[b""] = 3
    assert m[b"\0"] == 3


@pytest.mark.parametrize(
    "key",
    [
        *(True, 1.0, b"a", "a", None, 2**63, -(2**63) - 1, {1}),
        *([True], [1.5], ["a"], [None], [b"x"], [[1], [1, 2]]),
        *(np.array([2**63], np.uint64), np.array([]), np.zeros(2, "M8[s]")),
    ],
    ids=repr,
)
def test_keys_of_a_wrong_type_for_integers(key: Any) -> None:
    m = build([1], [1])
    calls: list[Callable[[], Any]] = [
        lambda: m.get(key),
        lambda: key in m,
        lambda: m.set(key, 1),
        lambda: m.erase(key),
    ]
    for call in calls:
        with pytest.raises(errors.KeyTypeError, match="keys of int64") as info:
            call()
        assert isinstance(info.value, TypeError)


@pytest.mark.parametrize(
    "key",
    [
        *(1, "abc", b"toolong", bytearray(b"abc"), np.void(b"abc")),
        *([b"ok", b"toolong"], [1], ["a"], np.array([b"a"], object)),
    ],
    ids=repr,
)
def test_keys_of_a_wrong_type_for_bytes(key: Any) -> None:
    m = build([b"abcd"], [1])
    with pytest.raises(errors.KeyTypeError, match=r"bytes of at most 4 \(S4\)"):
        m.get(key)
    with pytest.raises(errors.KeyTypeError, match=r"bytes of at most 4 \(S4\)"):
        m.set(key, 1)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.uint64, ">i4"])
def test_all_integers_that_fit_are_keys(dtype: Any) -> None:
    keys = np.array([1, 2, 100], dtype)
    m = build(keys, [1, 2, 3])
    assert m.key_dtype == np.int64
    assert m.get(keys[::-1]).tolist() == [3, 2, 1]
    turned = np.asfortranarray(np.array([[1, 2], [100, 1]], dtype))
    assert m.get(turned).tolist() == [[1, 2], [3, 1]]


@pytest.mark.parametrize(
    ("keys", "values", "error"),
    [
        ([1.5], [1], errors.KeyTypeError),
        (["text"], [1], errors.KeyTypeError),
        ([True], [1], errors.KeyTypeError),
        ([2**63], [1], errors.KeyTypeError),
        ([1], [object()], TypeError),
        ([1], np.zeros((1, 0)), TypeError),
        ([1, 2], [1], ValueError),
        ([1], 5, ValueError),
        ([[1]], [[1]], ValueError),
    ],
)
def test_what_no_map_is_built_of(keys: Any, values: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        build(keys, values)


def test_values_that_do_not_fit_change_nothing() -> None:
    m = build([1, 2], np.zeros((2, 3)))
    with pytest.raises(ValueError, match="broadcast"):
        m.set([1, 2], np.zeros((2, 2)))
    m.set([1, 2, 3], 7)
    assert m.get([1, 2, 3]).tolist() == [[7.0] * 3] * 3


# ------------------------------------------------------------------ limits


@pytest.mark.parametrize(
    ("capacity", "slots"), [(0, 8), (1, 8), (4, 8), (5, 16), (1024, 2048), (1025, 4096)]
)
def test_at_most_half_full(capacity: int, slots: int) -> None:
    assert slots_for(capacity) == slots
    assert build(np.arange(0), np.arange(0), capacity).capacity == slots // 2


def test_there_is_room_for_more_by_default() -> None:
    m = build(np.arange(1000), np.arange(1000))
    assert m.capacity >= 1250


def test_a_full_map_says_so_and_stays_as_it_is() -> None:
    m = build(np.arange(4), np.arange(4), capacity=4)
    with pytest.raises(errors.HashMapFullError, match=r"capacity of 4.*[Bb]uild a larger one"):
        m.set([0, 99], [50, 51])
    assert m.get(np.arange(4)).tolist() == [0, 1, 2, 3]
    assert 99 not in m
    m.set([0, 3], [50, 51])  # those are there
    m.erase(2)
    m[99] = 7  # in the place of the one that went
    assert sorted(m) == [0, 1, 3, 99]
    with pytest.raises(errors.HashMapFullError):
        build(np.arange(5), np.arange(5), capacity=4)
    build([1, 1, 1, 1, 2, 2], np.arange(6), capacity=4)  # two keys
    with pytest.raises(ValueError, match="capacity"):
        build([1], [1], capacity=-1)


def test_equal_values_and_known_keys_leave_the_header_alone() -> None:
    m = build(np.arange(100), np.arange(100))
    header, slots = (array.copy() for array in arrays(m))
    m.set(np.arange(100), np.arange(100))
    np.testing.assert_array_equal(arrays(m)[0], header)
    assert arrays(m)[1].tobytes() == slots.tobytes()
    m.set(np.arange(100), 1)
    np.testing.assert_array_equal(arrays(m)[0], header)
    m[100] = 1
    m.erase(100)  # as many as before, but not the same history: two such transactions must meet
    assert arrays(m)[1].tobytes() != slots.tobytes()
    assert arrays(m)[0].tolist() != header.tolist()
    assert len(m) == 100


def test_read_only_maps_refuse_changes() -> None:
    m = build([1], [1])
    for array in arrays(m):
        array.flags.writeable = False
    assert m[1] == 1
    for call in (lambda: m.set(1, 2), lambda: m.erase(1)):
        with pytest.raises(ValueError, match=r"clamor\.update"):
            call()


# ------------------------------------------------------------------ what others wrote


def corrupt(change: Callable[[Any, Any], Any]) -> Any:
    header, slots = arrays(build(np.arange(20), np.arange(20.0), capacity=32))
    return change(header, slots) or {"header": header, "slots": slots}


def with_word(index: int, value: int) -> Callable[[Any, Any], None]:
    return lambda header, slots: header.__setitem__(index, value)


@pytest.mark.parametrize(
    "change",
    [
        lambda header, slots: (header, slots),
        lambda header, slots: {"header": header},
        lambda header, slots: {"header": header[:7], "slots": slots},
        lambda header, slots: {"header": header.astype(np.int64), "slots": slots},
        lambda header, slots: {"header": header, "slots": slots[:32]},
        lambda header, slots: {"header": header, "slots": slots[::-1]},
        lambda header, slots: {"header": header, "slots": slots.tobytes()},
        lambda header, slots: {"header": header, "slots": slots["value"].copy()},
        lambda header, slots: {"header": header, "slots": slots.reshape(2, -1)},
        lambda header, slots: {
            "header": header,
            "slots": np.zeros(64, np.dtype(slots.dtype.descr, align=True)),
        },
        with_word(0, 1),
        with_word(1, 99),
        with_word(HEAD_SLOTS, 32),
        with_word(HEAD_SLOTS, 2**63),
        with_word(HEAD_N, 33),
        with_word(HEAD_N, 2**64 - 1),
    ],
)
def test_what_is_no_table_is_refused(change: Any) -> None:
    with pytest.raises(errors.HashMapCorruptError, match="not a hash map of this library"):
        MutableHashMap(corrupt(change))


def test_a_table_without_an_empty_slot_is_refused() -> None:
    m = build(np.arange(20), np.arange(20.0))
    arrays(m)[1]["tag"] |= 1
    for call in (lambda: m.get(999, 0), lambda: m.set(999, 1), lambda: m.items()):
        with pytest.raises(errors.HashMapCorruptError):
            call()


def test_a_count_that_does_not_fit_is_noticed() -> None:
    m = build(np.arange(20), np.arange(20.0))
    arrays(m)[0][HEAD_N] = 21
    with pytest.raises(errors.HashMapCorruptError, match="21 keys, but 20"):
        m.keys()


@settings(max_examples=100, deadline=None)
@given(junk=st.binary(min_size=64 * 17, max_size=64 * 17), key=st.integers(0, 2**62))
def test_any_bytes_as_slots(junk: bytes, key: int) -> None:
    header, slots = arrays(build(np.arange(20), np.arange(20.0), capacity=32))
    slots.view(np.uint8)[:] = np.frombuffer(junk, np.uint8)
    m = MutableHashMap({"header": header, "slots": slots})
    for call in (lambda: m.get(key, 0), lambda: m.set(key, 1.0), lambda: m.erase(key)):
        with contextlib.suppress(errors.HashMapCorruptError, errors.MissingKeyError):
            call()  # whatever it finds: it ends, and nothing else is raised


# ------------------------------------------------------------------ as a value, in a cluster


def test_a_handle_needs_a_reference_of_a_map() -> None:
    with pytest.raises(TypeError, match=r"HashMap\.build"):
        HashMap({1: 2})  # type: ignore[arg-type]
    with pytest.raises(errors.NotInitializedError):
        HashMap.build([1], [1])


def _look(m: Any, keys: Any, default: Any = None) -> tuple[str, Any, int]:
    return type(m).__name__, m.get(keys, default), len(m)


def _look_inside(box: Any, keys: Any) -> Any:
    return box["maps"][0].get(keys)


def _prefetch_then_look(m: HashMap, keys: Any) -> tuple[int, int, Any]:
    """Faults of this node's page server during the prefetch, and during the lookups."""
    import ray

    node = ray.get_runtime_context().get_node_id()

    def faults() -> int:
        (entry,) = (entry for entry in clamor.stats().nodes if entry.node_id == node)
        return entry.engine.faults

    len(m)  # opens it
    m.prefetch(keys)
    before = faults()
    found = m.get(keys)
    return faults() - before, len(found), found


def test_a_map_travels_as_its_reference(clamor_cluster: ClamorCluster) -> None:
    keys = np.arange(200_000) * 17
    m = clamor.HashMap.build(keys, np.sqrt(keys))
    data = pickle.dumps(m)
    assert len(data) < 600
    again = pickle.loads(data)
    assert isinstance(again, clamor.HashMap)
    assert again.ref == m.ref
    assert again.version == m.version == 0
    np.testing.assert_array_equal(again.get(keys), np.sqrt(keys))
    assert "variable " in repr(m)

    some = keys[::1000]
    name, found, n = clamor_cluster.run(_look, m, some)
    assert (name, n) == ("HashMap", len(keys))
    np.testing.assert_array_equal(found, np.sqrt(some))
    found = clamor_cluster.run(_look_inside, {"maps": [m]}, some)
    np.testing.assert_array_equal(found, np.sqrt(some))
    with pytest.raises(KeyError):
        clamor_cluster.run(_look, m, [3])
    assert m.get(0) == 0.0
    clamor.free(m.ref)
    with pytest.raises(errors.FreedError):
        m.get(0)


def test_only_blocks_that_lookups_touch_travel(clamor_cluster: ClamorCluster) -> None:
    n = 1 << 20
    m = clamor.HashMap.build(np.arange(n), np.ones((n, 3), np.int32), capacity=n)
    keys = np.arange(0, n, n // 50)
    assert clamor_cluster.run(_look, m, keys)[1].shape == (len(keys), 3)
    region = clamor_cluster.region(m.ref)
    assert region.touched_blocks <= 2 * len(keys) + 16 * 16
    clamor.free(m.ref)


def test_prefetch_brings_what_lookups_touch(clamor_cluster: ClamorCluster) -> None:
    n = 1 << 20
    m = clamor.HashMap.build(np.arange(n), np.arange(n) / 2, capacity=n)
    keys = np.random.default_rng(2).integers(0, n, 500)
    faults, n_found, found = clamor_cluster.run(_prefetch_then_look, m, keys)
    assert n_found == 500
    np.testing.assert_array_equal(found, keys / 2)
    assert faults <= 25  # searches that go on in the next block
    clamor.free(m.ref)


def test_lookups_in_every_trap(clamor_cluster: ClamorCluster, trap: str) -> None:
    # C reads the region and writes the result: no system call touches an absent block.
    m = clamor.HashMap.build(np.arange(100_000), np.ones((100_000, 3)), capacity=100_000)
    keys = np.arange(0, 100_000, 777)
    name, found, n = clamor_cluster.run_in_trap(trap, _look, m, keys)
    assert (name, n) == ("HashMap", 100_000)
    np.testing.assert_array_equal(found, np.ones((len(keys), 3)))
    clamor.free(m.ref)


def test_small_maps_travel_inside(clamor_cluster: ClamorCluster) -> None:
    m = clamor.HashMap.build([b"one", b"two"], [1, 2])
    assert m.ref._inline
    m.prefetch(b"one")
    name, found, n = clamor_cluster.run(_look, m, [b"two", b"six"], -1)
    assert (name, found.tolist(), n) == ("HashMap", [2, -1], 2)


def test_a_reference_of_something_else_is_refused(clamor_cluster: ClamorCluster) -> None:
    ref: GlobalRef[Any] = clamor.put(np.arange(10_000))
    with pytest.raises(errors.HashMapCorruptError, match="its type is ndarray"):
        HashMap(ref).get(1)
