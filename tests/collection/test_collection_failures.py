"""What goes wrong in collections, and what the user then sees."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from tests.conftest import ClamorCluster, until

pytestmark = pytest.mark.usefixtures("clamor_cluster")


def log_of(path: Path) -> int:
    """How often `note(path)` was called."""
    return path.stat().st_size if path.exists() else 0


def note(path: Path) -> None:
    with path.open("a") as log:
        log.write("x")


# ------------------------------------------------------------------ functions


def test_a_function_that_raises_is_named_and_not_tried_again(tmp_path: Path) -> None:
    def third(x: int) -> float:
        note(tmp_path / str(x))
        return 1 / (x - 13)

    numbers = clamor.from_items(range(20), partitions=4)
    with pytest.raises(errors.FunctionFailedError) as caught:
        numbers.map(third).collect()
    error = caught.value
    assert "ZeroDivisionError: division by zero" in str(error)
    assert "return 1 / (x - 13)" in str(error)
    assert "third raised at item 3, in stage 'map(third)', partition 2 (made of items 10-14)" in (
        str(error)
    )
    assert (error.partition, error.cause) == (2, "ZeroDivisionError")
    assert log_of(tmp_path / "13") == 1
    assert "clamor_ray/collection/run/task.py" not in str(error)


def test_a_function_that_exits_is_not_tried_again(tmp_path: Path) -> None:
    def leave(x: int) -> int:
        note(tmp_path / str(x))
        sys.exit("enough")

    with pytest.raises(errors.FunctionFailedError, match=r"sys\.exit\('enough'\)") as caught:
        clamor.from_items([7], partitions=1).map(leave).collect()
    assert caught.value.cause == "SystemExit"
    assert log_of(tmp_path / "7") == 1
    assert clamor.from_items([7], partitions=1).sum() == 7


def test_an_error_of_the_users_that_says_read_only_stays_theirs() -> None:
    def refuse(x: int) -> int:
        raise ValueError("the database is read-only")

    with pytest.raises(errors.FunctionFailedError, match="the database is read-only") as caught:
        clamor.from_items([1], partitions=1).map(refuse).collect()
    assert type(caught.value) is errors.FunctionFailedError


def test_a_function_of_a_module_that_workers_do_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def one(x):\n    return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here  # type: ignore[import-not-found]

    with pytest.raises(errors.FunctionFailedError, match="could not be loaded") as caught:
        clamor.from_items([1], partitions=1).map(only_here.one).collect()
    assert "ModuleNotFoundError" in str(caught.value)
    assert "runtime_env" in caught.value.hint


@pytest.mark.parametrize(
    "broken",
    [
        lambda c: c.filter(lambda x: x.nope),
        lambda c: c.flat_map(lambda x: x),
        lambda c: c.map_batches(lambda b: b.nope),
        lambda c: c.map_batches(lambda b: object()),
        lambda c: c.map(lambda x: (x, x)).reduce_by_key(lambda a, b: a.nope),
        lambda c: c.sort(lambda x: x.nope),
        lambda c: c.map(lambda x: [x]).distinct(),
        lambda c: c.reduce_by_key("sum"),
        lambda c: c.map(str).sum() and c,
        lambda c: c.reduce(lambda a, b: a.nope) and c,
        lambda c: c.aggregate(0, lambda a, b: a.nope) and c,
        lambda c: c.tree_aggregate(0, lambda a, b: a + b, lambda a, b: a.nope) and c,
    ],
)
def test_every_operator_says_where_it_failed(broken: Any) -> None:
    numbers = clamor.from_items([0, 0, 1, 1, 2, 2], partitions=3)
    with pytest.raises(errors.FunctionFailedError, match=r"stage '.*', partition \d"):
        broken(numbers).collect()
    assert numbers.sum() == 6  # the next action has all places


def test_keys_that_cannot_be_compared() -> None:
    mixed = clamor.from_items([0, 1], partitions=2).map(lambda x: "a" if x else 1)
    with pytest.raises(TypeError, match="int, str cannot be sorted"):
        mixed.sort().collect()


def test_a_function_that_cannot_be_pickled() -> None:
    lock = threading.Lock()

    def locked(x: int) -> int:
        with lock:
            return x

    numbers = clamor.from_items([1])
    with pytest.raises(errors.UnpicklableError, match=r"locked .* 'lock', which it closes over"):
        numbers.map(locked)
    with pytest.raises(errors.UnpicklableError, match=r"argument 1 is a lock"):
        numbers.map(lambda x, y: x, lock)
    with pytest.raises(TypeError, match="function"):
        numbers.map(3)  # type: ignore[arg-type]


def test_a_class_of_the_users_script(clamor_cluster: ClamorCluster) -> None:
    program = textwrap.dedent(
        """
        import dataclasses, numpy as np, ray
        ray.init()
        import clamor_ray as clamor
        clamor.init()

        @dataclasses.dataclass
        class Row:
            x: float

        ref = clamor.put(np.arange(10_000.0))
        rows = clamor.from_items(range(3)).map(lambda i, a: Row(float(a[i])), ref)
        assert [row.x for row in rows.collect()] == [0.0, 1.0, 2.0]
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **clamor_cluster.lab.environment},
        capture_output=True,
        text=True,
        timeout=90,
    )
    assert done.returncode == 0, done.stderr


def test_a_function_that_writes_to_a_global_variable() -> None:
    ref = clamor.put(np.zeros(10_000))

    def write(i: int, x: Any) -> None:
        x[i] = 1

    with pytest.raises(errors.ReadOnlyError, match=r"clamor\.update") as caught:
        clamor.from_items([1, 2]).map(write, ref).collect()
    assert "x[i] = 1" in str(caught.value)
    assert ref.get()[1] == 0


def test_a_batch_is_read_only() -> None:
    def double(batch: Any) -> Any:
        batch *= 2
        return batch

    numbers = clamor.from_numpy(np.arange(4), partitions=1)
    with pytest.raises(errors.ReadOnlyError, match=r"x\.copy\(\)"):
        numbers.map_batches(double).zip(numbers).collect()


def test_items_that_cannot_be_pickled() -> None:
    with pytest.raises(errors.UnpicklableError, match="partition 0"):
        clamor.from_items([threading.Lock(), 1], partitions=2).collect()
    assert clamor.from_items(range(8), partitions=8).sum() == 28  # all places are free


def test_results_that_cannot_be_pickled() -> None:
    with pytest.raises(errors.FunctionFailedError, match="pickle") as caught:
        clamor.from_items([1]).map(lambda x: threading.Lock()).collect()
    assert "memory" not in str(caught.value)


def test_a_copy_that_fails_does_not_fail_the_first(tmp_path: Path) -> None:
    def slow(x: int) -> int:
        note(tmp_path / str(x))
        if x == 0 and log_of(tmp_path / "0") > 1:
            raise OSError("only here")
        if x == 0:
            until(lambda: log_of(tmp_path / "0") > 1, 30)
        return x

    assert clamor.from_items(range(4), partitions=4).map(slow).collect() == [0, 1, 2, 3]


def test_a_process_that_dies_is_replaced(tmp_path: Path) -> None:
    def die_once(x: int) -> int:
        note(tmp_path / "log")
        if log_of(tmp_path / "log") == 1:
            os._exit(1)
        return x

    assert clamor.from_items([7]).map(die_once).collect() == [7]
    assert log_of(tmp_path / "log") == 2


def test_a_process_that_always_dies_is_given_up(tmp_path: Path) -> None:
    def die(x: int) -> int:
        note(tmp_path / "log")
        os._exit(1)

    once = clamor.from_items([7]).options(max_retries=1)
    with pytest.raises(errors.FunctionFailedError, match=r"Ray tried 2 times"):
        once.map(die).collect()
    assert log_of(tmp_path / "log") == 2


def test_a_freed_variable() -> None:
    ref = clamor.put(np.zeros(10_000))
    found = clamor.from_items([1]).map(lambda i, x: x[i], ref)
    clamor.free(ref)
    with pytest.raises(errors.FreedError):
        found.collect()


# ------------------------------------------------------------------ what is not deterministic


def test_a_rerun_that_is_the_same_passes(tmp_path: Path) -> None:
    checked = clamor.from_items(range(1000), partitions=2).options(check=True)
    found = checked.map(lambda x: {"x": x, "s": str(x)}).sort("s").execute()
    assert found.count() == 1000


# ------------------------------------------------------------------ the driver


def test_a_driver_that_dies_leaves_nothing(clamor_cluster: ClamorCluster, tmp_path: Path) -> None:
    program = textwrap.dedent(
        f"""
        import time, numpy as np, ray
        ray.init()
        import clamor_ray as clamor
        clamor.init()
        ref = clamor.put(np.zeros(100_000))

        def slow(x, a):
            import os
            open(f"{tmp_path}/pid{{x}}", "w").write(str(os.getpid()))
            time.sleep(600)

        clamor.from_items(range(2), partitions=2).cache().map(slow, ref).collect()
        """
    )
    driver = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, **clamor_cluster.lab.environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        until(lambda: any(path.read_text() for path in tmp_path.glob("pid*")), 90)
    finally:
        driver.kill()
        driver.wait()
    pids = [int(path.read_text()) for path in tmp_path.glob("pid*") if path.read_text()]
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 90)
