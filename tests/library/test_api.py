"""What a user does wrong, and the one exception that says so."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from tests.conftest import ClamorCluster
from tests.support import driver_script

pytestmark = pytest.mark.lab


def test_init_says_what_it_found(clamor_cluster: ClamorCluster) -> None:
    attached = clamor_cluster.attached
    assert attached.trap in ("uffd", "uffd-user", "sigsegv")
    assert bool(attached.trap_reason) == (attached.trap != "uffd")
    assert attached.node_id == clamor_cluster.lab.node_ids[0]
    assert attached.server_version == clamor.__version__
    assert clamor.init() == attached  # again: nothing changes


def init_here() -> tuple[str, str]:
    found = clamor.init()
    return found.node_id, found.scope


def test_init_in_a_task_attaches_to_the_drivers_session(clamor_cluster: ClamorCluster) -> None:
    scope = clamor_cluster.attached.scope
    assert clamor_cluster.run(init_here) == (clamor_cluster.lab.node_ids[1], scope)


def regions() -> set[int]:
    return {info.region for info in clamor.variables()}


@pytest.mark.parametrize("obj", [threading.Lock(), {"deep": [np.zeros(9), (i for i in ())]}])
def test_what_cannot_be_pickled(clamor_cluster: ClamorCluster, obj: Any) -> None:
    before, known = dict(clamor.stats().regions_by_state), regions()
    with pytest.raises(errors.UnpicklableError, match=r"cannot .*pickle") as caught:
        clamor.put(obj)
    assert f"{type(obj).__module__}.{type(obj).__qualname__}" in str(caught.value)
    assert caught.value.hint
    assert isinstance(caught.value.__cause__, TypeError)
    assert regions() <= known  # what others have dropped goes meanwhile
    assert dict(clamor.stats().regions_by_state)["creating"] <= before["creating"]


def test_an_object_without_buffers_works_and_warns_once(clamor_cluster: ClamorCluster) -> None:
    large = {f"key {i}": (i, str(i)) for i in range(60_000)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ref = clamor.put(large)
    (warning,) = caught
    assert warning.category is errors.ClamorWarning
    assert "dict" in str(warning.message)
    assert "NumPy arrays, Arrow tables" in str(warning.message)
    assert warning.filename == __file__
    assert clamor_cluster.run(lambda found: found == large, ref)
    clamor.free(ref)


def test_wrong_types(clamor_cluster: ClamorCluster) -> None:
    with pytest.raises(TypeError, match="share takes a Ray ObjectRef, not int"):
        clamor.share(3)
    with pytest.raises(TypeError, match="free takes a GlobalRef, not ndarray"):
        clamor.free(np.zeros(3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="not part of a global variable"):
        clamor.prefetch(np.zeros(3))
    with pytest.raises(ValueError, match="which is one of present, fetched, touched"):
        clamor.block_map(clamor.put(1), "seen")  # type: ignore[arg-type]


def test_more_than_the_memory(
    clamor_cluster: ClamorCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("clamor_ray._objects.memory.available_bytes", lambda: 1 << 20)
    before = dict(clamor.stats().regions_by_state)
    with pytest.raises(
        errors.OutOfMemoryError,
        match=r"needs 16\.0 MiB .* has 1\.0 MiB .* nor has it room when it is spread",
    ) as caught:
        clamor.put(np.zeros(2 << 20))
    assert isinstance(caught.value, MemoryError)
    after = dict(clamor.stats().regions_by_state)  # what other tests have freed may go meanwhile
    assert all(after[state] <= before[state] for state in ("creating", "ready"))


def get_where_something_lies(refs: list[Any]) -> tuple[str, str, int]:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    at = refs[0]._base_address
    private_anonymous_fixed = 0x2 | 0x20 | 0x100000
    assert libc.mmap(at, 4096, 3, private_anonymous_fixed, -1, 0) == at
    try:
        refs[0].get()
    except errors.AddressClashError as error:
        said = str(error)
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.munmap(at, 4096)
    return said, f"{at:x}", int(refs[0].get().sum())


def test_an_address_clash_names_both(clamor_cluster: ClamorCluster) -> None:
    ref = clamor.put(np.arange(100_000))
    said, address, total = clamor_cluster.run(get_where_something_lies, [ref])
    assert address in said
    assert f"variable {ref._region}" in said
    assert total == 4_999_950_000
    clamor.free(ref)


def run_script(
    cluster: ClamorCluster | None, folder: Path, text: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(text)
    env = {**os.environ, **(cluster.lab.environment if cluster else {}), **environment}
    return subprocess.run(
        [sys.executable, str(script)],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


NO_SESSION = """
import numpy, pickle
import clamor_ray as clamor
from clamor_ray import errors

def raised(call):
    try:
        call()
    except errors.ClamorError as error:
        return type(error).__name__
    return "nothing"

calls = [
    lambda: clamor.put(numpy.zeros(9999)),
    lambda: clamor.put(3),
    lambda: clamor.zeros(9999),
    lambda: clamor.prefetch(numpy.zeros(9999)),
    lambda: clamor.stats(),
]
"""


def test_nothing_works_before_init_and_ray_client_never(tmp_path: Path) -> None:
    text = NO_SESSION + (
        "print(*map(raised, calls))\n"
        "print(raised(lambda: clamor.init('ray://head:10001')), raised(clamor.init))\n"
        "clamor.shutdown()\n"
        "try:\n"
        "    clamor.put(3)\n"
        "except errors.NotInitializedError as error:\n"
        "    print(error)\n"
    )
    done = run_script(None, tmp_path, text, RAY_ADDRESS="ray://head:10001")
    assert done.returncode == 0, done.stderr
    first, second, third = driver_script.lines_of(done.stdout)
    assert first.split() == ["NotInitializedError"] * 5
    assert second.split() == ["RayClientError"] * 2
    assert "clamor.init()" in third


def test_after_shutdown_and_in_the_next_session(
    clamor_cluster: ClamorCluster, tmp_path: Path
) -> None:
    text = NO_SESSION + (
        "import ray\n"
        "first = clamor.init().scope\n"
        "old, small = clamor.put(numpy.arange(9999)), clamor.put(5)\n"
        "@clamor.remote(num_cpus=0)\n"
        "def total(array):\n"
        "    return int(array.sum())\n"
        "assert ray.get(total.remote(old)) == 49985001\n"
        "clamor.shutdown()\n"
        "clamor.shutdown()\n"
        "print(*map(raised, calls), raised(old.get))\n"
        "assert clamor.init().scope != first\n"
        "new = clamor.put(numpy.arange(9999))\n"
        "print(raised(old.get), raised(lambda: clamor.free(old)),\n"
        "      raised(lambda: clamor.prefetch(old)),\n"
        "      raised(lambda: ray.get(total.remote(old))),\n"
        "      raised(lambda: ray.get(total.remote(new))))\n"
        "print(small.get(), old == pickle.loads(pickle.dumps(old)))\n"
    )
    done = run_script(clamor_cluster, tmp_path, text)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second, third = driver_script.lines_of(done.stdout)[-3:]
    assert first.split() == [*["NotInitializedError"] * 5, "NotInitializedError"]
    # What a task raises is Ray's class, made of ours and its own.
    *old, new = [name.replace("RayTaskError", "").strip("()") for name in second.split()]
    assert old[:3] == ["SessionEndedError"] * 3
    assert old[3] in ("SessionEndedError", "SessionMismatchError")  # a worker that never knew it
    assert (len(old), new) == (4, "nothing")
    assert third == "5 True"
