"""Variables of a session with a store: what is in them, by how often they were changed.

Each is known by its name alone, so a test that opens the store in another cluster, and a driver of
its own, find the same: `put_all`, `change` and `check` in turn.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import clamor_ray as clamor

N_ARRAY, N_SPREAD, N_DTYPE, N_KEYS = 300_000, 2_000_000, 5000, 20_000
DTYPES = ("?", "f2", "c16", "U7", "S5", "M8[s]", "i4,f8", ">i8")
LEVELS: dict[str, dict[str, Any]] = {
    "spread": {"home": "spread"},
    "raid5": {"redundancy": "raid5"},
    "raid1": {"redundancy": "raid1"},
}
OF_ONE_NODE = ("array", "small", "spread")


def changed_names(n_nodes: int) -> tuple[str, ...]:
    """Those that `change` changes: redundancy needs three nodes."""
    return (*OF_ONE_NODE, "raid5", "raid1") if n_nodes >= 3 else OF_ONE_NODE


def _of_dtype(dtype: str) -> Any:
    numbers = np.arange(N_DTYPE) % 97
    if "," not in dtype:
        return numbers.astype(np.int64).astype(dtype)
    found = np.zeros(N_DTYPE, dtype)
    found["f0"], found["f1"] = numbers, numbers / 7
    return found


def _first(name: str) -> Any:
    if name in LEVELS:
        return np.arange(N_SPREAD) + len(name)
    return np.arange(N_ARRAY) if name == "array" else np.arange(10, dtype=np.int16)


def _rows(name: str, step: int) -> Any:
    """What a step changes: some blocks in each piece, and others in each step."""
    if name == "small":
        return np.array([step % 10])
    n_rows = N_ARRAY if name == "array" else N_SPREAD
    return np.arange(step * 700, n_rows, 90_001)


def expected(name: str, step: int) -> Any:
    """The array after that many changes."""
    content = _first(name)
    for each in range(1, step + 1):
        content[_rows(name, each)] = -each
    return content


def put_all(n_nodes: int) -> None:
    """All of them, none of them changed."""
    for name in changed_names(n_nodes):
        clamor.put(_first(name), name=name, **LEVELS.get(name, {}))
    clamor.put({dtype: _of_dtype(dtype) for dtype in DTYPES}, name="dtypes")
    clamor.put({"words": ["a", "\u00e4"], "n": 3}, name="text")
    keys = np.arange(N_KEYS) * 7
    clamor.HashMap.build(keys, keys * 2, name="map")
    inner = clamor.put(np.full(N_DTYPE, 7.5))
    small = clamor.put(np.full(3, 8.5))
    clamor.put({"inner": inner, "small": small, "filling": np.zeros(N_DTYPE)}, name="outer")
    clamor.put([inner], name="small outer")


def change(step: int, n_nodes: int) -> None:
    """The next step: one commit to each."""
    for name in changed_names(n_nodes):
        with clamor.update(clamor.open(name)) as array:
            array[_rows(name, step)] = -step


def check(step: int, n_nodes: int) -> None:
    """All of them, after that many changes.

    Raises:
        AssertionError: Something else is there.
    """
    for name in changed_names(n_nodes):
        ref = clamor.open(name)
        assert ref.version == step, f"{name}: version {ref.version}, not {step}"
        assert np.array_equal(ref.get(), expected(name, step)), name
    dtypes = clamor.open("dtypes").get()
    for dtype in DTYPES:
        assert dtypes[dtype].dtype == np.dtype(dtype)
        assert np.array_equal(dtypes[dtype], _of_dtype(dtype)), dtype
    assert clamor.open("text").get() == {"words": ["a", "\u00e4"], "n": 3}
    found = clamor.HashMap(clamor.open("map"))
    assert [int(found[key]) for key in (0, 7, 7 * (N_KEYS - 1))] == [0, 14, 14 * (N_KEYS - 1)]
    outer = clamor.open("outer").get()
    assert np.array_equal(outer["inner"].get(), np.full(N_DTYPE, 7.5))
    assert np.array_equal(outer["small"].get(), np.full(3, 8.5))
    (inner,) = clamor.open("small outer").get()
    assert inner == outer["inner"]


def places() -> dict[str, list[int]]:
    """Region and address of each, by name: they never change."""
    refs = {info.name: clamor.open(info.name) for info in clamor.variables() if info.name}
    return {name: [ref._region, ref._base_address] for name, ref in refs.items()}
