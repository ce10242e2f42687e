"""What the environment and `clamor.init` say about the cache, and what each node makes of it."""

from __future__ import annotations

import pickle
import re
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

from clamor_ray import errors
from clamor_ray._native import client as _native
from clamor_ray._native.builder import C_DIR
from clamor_ray._objects import memory
from clamor_ray._objects.memory import (
    UNKNOWN_CACHE_BYTES,
    available_bytes,
    budget_trouble,
    cache_budget,
    memory_bytes,
)
from clamor_ray._protocol.config import _CHOICES, Config, parse_bytes
from clamor_ray._session import init

GIB = 1 << 30


def test_the_environment_and_then_the_arguments() -> None:
    environ = {
        "CLAMOR_CACHE_BYTES": "4GiB",
        "CLAMOR_CACHE_POLICY": "lru",
        "CLAMOR_REPLICATION": "off",
        "CLAMOR_PAGE_BYTES": "64KiB",
    }
    config = Config.from_env(environ)
    assert (config.cache_bytes, config.cache_policy) == (4 * GIB, "lru")
    assert (config.replication, config.page_bytes) == ("off", 65536)
    over = Config.from_env(environ, cache_bytes=1 << 20, replication="random", page_bytes=0)
    assert (over.cache_bytes, over.cache_policy) == (1 << 20, "lru")
    assert (over.replication, over.page_bytes) == ("random", 0)
    none = Config.from_env({}, cache_bytes=None, cache_policy=None)
    assert none == Config()
    assert (none.cache_bytes, none.cache_policy, none.replication) == (0, "sieve", "p2c")


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("0", 0),
        ("512MB", 512 * 10**6),
        ("512 mib", 512 << 20),
        ("1.5GiB", 3 * GIB // 2),
        ("7B", 7),
        ("2TB", 2 * 10**12),
        *[(text, None) for text in ("", "-1", "1e9", "1.5", "GiB", "4 G i B", "4XB", "٣")],
    ],
)
def test_numbers_of_bytes(text: str, n_bytes: int | None) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("cache_bytes", -5),
        ("cache_bytes", 1),
        ("cache_bytes", (1 << 20) - 1),
        ("cache_bytes", 1e9),
        ("cache_bytes", "much"),
        ("cache_disk_bytes", "7MiB"),
        ("cache_policy", "mru"),
        ("cache_policy", "none"),
        ("replication", "on"),
        ("page_bytes", 5000),
        ("page_bytes", "16MiB"),
        ("repair_bytes_s", "256"),  # a unit was forgotten
        ("repair_bytes_s", -1),
        ("repair_bytes_s", "fast"),
    ],
)
def test_a_senseless_setting_names_its_variable(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field} is .*not '{re.escape(str(value))}'"):
        Config.from_env({}, **{field: value})
    variable = f"CLAMOR_{field.upper()}"
    with pytest.raises(ValueError, match=f"^{variable} is "):
        Config.from_env({variable: str(value)})


def test_an_empty_argument_is_not_a_default() -> None:
    with pytest.raises(ValueError, match="cache_policy is one of"):
        Config.from_env({}, cache_policy="")


def test_the_names_are_those_of_the_header() -> None:
    text = (C_DIR / "pagecache.h").read_text()
    for prefix, table, field in (
        ("PC_POLICY_", _native.POLICIES, "cache_policy"),
        ("PC_REPLICATION_", _native.REPLICATIONS, "replication"),
    ):
        found = re.findall(rf"{prefix}(\w+) = (\d+)", text)
        assert {name.lower(): int(code) for name, code in found} == table
        assert set(_CHOICES[field]) == set(table)
    assert f"PC_MAP_PAGE_SHIFT = {_native.MAP_PAGE_SHIFT}" in text


# ------------------------------------------------------------------ what a node has


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       16777216 kB\nMemFree: 1 kB\nMemAvailable:    8388608 kB\n"


def test_memory_is_the_least_of_the_machine_and_the_container(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) is None
    files(tmp_path, {"proc/meminfo": MEMINFO})
    assert memory_bytes(tmp_path) == 16 * GIB
    files(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/memory.max": "max\n",
            "sys/fs/cgroup/a/memory.max": f"{2 * GIB}\n",
            "sys/fs/cgroup/a/memory.current": f"{GIB}\n",
        },
    )
    assert memory_bytes(tmp_path) == 2 * GIB
    assert available_bytes(tmp_path) == GIB
    files(
        tmp_path,
        {
            "proc/self/cgroup": "4:cpu:/x\n9:memory:/c\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/c/memory.limit_in_bytes": f"{3 * GIB}\n",
        },
    )
    assert memory_bytes(tmp_path) == 3 * GIB


def test_the_budget_of_a_node() -> None:
    assert cache_budget(0, 16 * GIB, "n") == 4 * GIB
    assert cache_budget(0, None, "n") == UNKNOWN_CACHE_BYTES
    assert cache_budget(5 * GIB, 5 * GIB, "n") == 5 * GIB
    assert cache_budget(5 * GIB, None, "n") == 5 * GIB


def test_more_than_a_node_has_is_refused_with_the_numbers() -> None:
    with pytest.raises(errors.CacheBudgetError) as caught:
        cache_budget(5 * GIB, 4 * GIB, "c0ffee")
    text = str(caught.value)
    for part in ("c0ffee", str(5 * GIB), str(4 * GIB), "5.0 GiB", "CLAMOR_CACHE_BYTES"):
        assert part in text, text
    assert isinstance(caught.value, ValueError)
    assert str(pickle.loads(pickle.dumps(caught.value))) == text


def test_after_how_long_an_idle_node_is_drained() -> None:
    assert Config.from_env({}).idle_node_s == 0.0  # none is
    assert Config.from_env({"CLAMOR_IDLE_NODE_S": "300"}).idle_node_s == 300.0
    assert Config.from_env({"CLAMOR_IDLE_NODE_S": "2.5"}).idle_node_s == 2.5
    with pytest.raises(ValueError, match="CLAMOR_IDLE_NODE_S is a number of seconds, 0 or more"):
        Config.from_env({"CLAMOR_IDLE_NODE_S": "-1"})


def test_what_repairs_may_read_a_second() -> None:
    assert Config.from_env({}).repair_bytes_s == 256 << 20
    assert Config.from_env({"CLAMOR_REPAIR_BYTES_S": "1GiB"}).repair_bytes_s == GIB
    assert Config.from_env({"CLAMOR_REPAIR_BYTES_S": "1 MiB"}).repair_bytes_s == 1 << 20
    assert Config.from_env({"CLAMOR_REPAIR_BYTES_S": "0"}).repair_bytes_s == 0  # no limit
    with pytest.raises(ValueError, match="CLAMOR_REPAIR_BYTES_S is at least 1048576 bytes"):
        Config.from_env({"CLAMOR_REPAIR_BYTES_S": "1000000"})


@pytest.mark.parametrize(
    ("has_bytes", "cache_bytes", "history_bytes", "is_said"),
    [
        (None, GIB, GIB, False),
        (4 * GIB, GIB, GIB // 4, False),
        (300 << 20, 75 << 20, 256 << 20, True),
        (1000, 500, 399, False),
        (1000, 500, 400, True),
    ],
)
def test_a_budget_that_leaves_nothing_is_said_with_its_numbers(
    has_bytes: int | None, cache_bytes: int, history_bytes: int, is_said: bool
) -> None:
    trouble = budget_trouble(has_bytes, cache_bytes, history_bytes)
    assert (trouble is not None) == is_said
    if has_bytes == 300 << 20:
        assert trouble is not None
        for words in ("300.0 MiB", "331.0 MiB", "75.0 MiB", "256.0 MiB", "CLAMOR_HISTORY_BYTES"):
            assert words in trouble


def test_init_says_it(monkeypatch: pytest.MonkeyPatch) -> None:
    part: Any = types.SimpleNamespace(config=Config(cache_bytes=75 << 20), node_id="n")
    monkeypatch.setattr(memory, "memory_bytes", lambda: 300 << 20)
    with pytest.warns(errors.ClamorWarning, match=r"This node has 300.0 MiB .* 331.0 MiB"):
        init._warn_of_budget(part)
    monkeypatch.setattr(memory, "memory_bytes", lambda: GIB)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        init._warn_of_budget(part)
