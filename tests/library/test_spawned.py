"""References in processes that Ray did not start: children of multiprocessing, joblib's workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from clamor_ray._session.begin import announced
from tests.conftest import ClamorCluster

SCRIPT = """
import multiprocessing
import sys
import numpy as np
import ray
import clamor_ray as clamor
from clamor_ray import errors


def total(ref, again):
    array = ref.get()
    assert again[0].get().tolist() == [1, 2, 3]  # travels in its reference
    return float(array.sum()), ray.is_initialized()


def raised(ref, what):
    calls = {
        "put": lambda: clamor.put(np.zeros(10**5)),
        "latest": lambda: ref._latest(),
        "update": lambda: clamor.update(ref).__enter__(),
        "free": lambda: clamor.free(ref),
        "get": lambda: ref.get(),
    }
    try:
        calls[what]()
    except errors.ClamorError as error:
        return type(error).__name__ + ": " + str(error)
    return "nothing"


def becomes_driver(ref, again):
    array = ref.get()
    clamor.init()
    mine = clamor.put(np.full(10**6, 2.0))
    sums = float(ref.get().sum()), float(mine.get().sum()), float(array.sum())
    clamor.shutdown()
    ray.shutdown()
    return sums


if __name__ == "__main__":
    ray.init(address=sys.argv[2])
    clamor.init()
    ref, small = clamor.put(np.ones(10**6)), clamor.put(np.array([1, 2, 3]))
    if sys.argv[1] == "multiprocessing":
        pool = multiprocessing.get_context("spawn").Pool(1)
        call = pool.apply
    else:
        joblib = __import__("joblib")
        parallel = joblib.Parallel(n_jobs=2, backend="loky")
        call = lambda function, args: parallel([joblib.delayed(function)(*args)])[0]
    assert call(total, (ref, [small])) == (1e6, False)
    with clamor.update(ref) as x:
        x[0] = 11
    assert call(total, (ref, [small])) == (1e6 + 10, False)  # another version
    assert call(raised, (ref, "get")) == "nothing"
    for what in ("put", "latest", "update", "free"):
        text = call(raised, (ref, what))
        assert text.startswith("NotInitializedError"), (what, text)
        assert "not started by Ray" in text and "or in a Ray task" in text, (what, text)
    if sys.argv[1] == "multiprocessing":  # what the message says that one can do
        with multiprocessing.get_context("spawn").Pool(1) as another:
            sums = another.apply(becomes_driver, (ref, [small]))
        assert sums == (1e6 + 10, 2e6, 1e6 + 10), sums
    clamor.shutdown()
    text = call(raised, (ref, "get"))
    assert text.startswith(("SessionEndedError", "SessionMismatchError")), text
    clamor.init()
    assert call(total, (clamor.put(np.full(10**5, 3.0)), [small])) == (3e5, False)
    print("spawned")
"""


@pytest.mark.lab
@pytest.mark.parametrize("how", ["multiprocessing", "loky"])
def test_they_attach_by_themselves(how: str, tmp_path: Path, clamor_cluster: ClamorCluster) -> None:
    """They read, also a second version and a second session; what they cannot do they say."""
    if how == "loky":
        pytest.importorskip("joblib")
    script = tmp_path / "main.py"  # spawned processes import it
    script.write_text(SCRIPT)
    environment = {**os.environ, **clamor_cluster.lab.environment}
    del environment["RAY_ADDRESS"]  # they find it without
    done = subprocess.run(
        [sys.executable, str(script), how, clamor_cluster.lab.address],
        env=environment,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "spawned" in done.stdout


def test_only_processes_that_were_started_take_what_was_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(announced.VARIABLE, raising=False)
    assert announced.announced() is None
    monkeypatch.setenv(announced.VARIABLE, "")
    assert announced.announced() is None
    announced.announce("ab" * 28, "/var/a:b")
    assert announced.announced() is None  # this one has Ray, or had it
    command = "from clamor_ray._session.begin import announced as a; print(a.announced())"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, timeout=100, check=True
    )
    assert done.stdout.strip() == repr(("ab" * 28, "/var/a:b"))
