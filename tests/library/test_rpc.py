"""What asking an actor raises, and that it keeps nothing of its callers."""

from __future__ import annotations

import gc
import socket
import time
import types
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError, RayTaskError

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._protocol import ray_state, rpc
from tests.conftest import ClamorCluster


class Mapping:
    """Stands for what a caller holds."""


def _task_error(cause: Exception) -> Exception:
    made: Exception = RayTaskError("f", "its traceback", cause).as_instanceof_cause()
    return made


# Made in the test: what keeps an error keeps the frames that it was raised through.
FAILURES: list[tuple[Callable[[], Exception], type[Exception]]] = [
    (lambda: GetTimeoutError("late"), errors.WaitTimeoutError),
    (lambda: ActorDiedError(), errors.ServerUnavailableError),
    (lambda: ActorUnavailableError("away", None), errors.ServerUnavailableError),
    (lambda: _task_error(KeyError("x")), errors.InternalError),
    (lambda: _task_error(errors.FreedError("gone")), errors.FreedError),
    (lambda: errors.FreedError("gone"), errors.FreedError),
]


@pytest.mark.parametrize(("make", "expected"), FAILURES)
def test_what_callers_hold_goes_with_them(
    make: Callable[[], Exception], expected: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a garbage collection, as in a worker that waits for its next task."""

    def get(reference: Any, timeout: float) -> Any:
        value = make()  # Ray's own function has it in such a variable
        try:
            raise ValueError("within Ray")
        except ValueError:
            raise value  # noqa: B904

    def caller() -> tuple[weakref.ref[Mapping], type[Exception]]:
        held = Mapping()
        try:
            rpc.await_rpc(None, 1.0)
        except errors.ClamorError as error:  # a name that would outlive it would be a cycle itself
            return weakref.ref(held), type(error)
        raise AssertionError("nothing was raised")

    monkeypatch.setattr(ray, "get", get)
    gc.collect()
    gc.disable()
    try:
        held, raised = caller()
        assert held() is None
        assert raised is expected
    finally:
        gc.enable()


def test_the_cause_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(reference: Any, timeout: float) -> Any:
        raise GetTimeoutError("late")

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(errors.WaitTimeoutError) as caught:
        rpc.await_rpc(None, 1.0)
    assert isinstance(caught.value.__cause__, GetTimeoutError)


def test_a_driver_whose_raylet_has_ended_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its socket may be there still, where nobody listens, or not. Where only the file was removed,
    its port says that it lives."""
    asked: list[float] = []

    def get(reference: Any, timeout: float) -> Any:
        asked.append(timeout)
        raise GetTimeoutError("late")

    path = tmp_path / "raylet"
    monkeypatch.setattr(ray, "get", get)
    node = types.SimpleNamespace(raylet_socket_name=str(path), node_ip_address="127.0.0.1")
    monkeypatch.setattr(ray_state.ray_worker.global_worker, "node", node)
    with socket.socket(socket.AF_UNIX) as raylet, socket.socket() as manager:
        manager.bind(("127.0.0.1", 0))
        node.node_manager_port = manager.getsockname()[1]
        for what in ("not there", "nobody listens"):
            with pytest.raises(ray_state.RayletEndedError, match="its raylet has ended"):
                rpc.await_rpc(None, 1000.0)
            assert asked == [rpc.LOOK_S], what
            asked.clear()
            if not path.exists():
                raylet.bind(str(path))
        path.unlink()
        node.node_manager_port = None  # so nobody can say
        ray_state.check_raylet()
        manager.listen()
        node.node_manager_port = manager.getsockname()[1]
        ray_state.check_raylet()
        raylet.close()
    with socket.socket(socket.AF_UNIX) as raylet:
        raylet.bind(str(path))
        raylet.listen()
        with pytest.raises(errors.WaitTimeoutError):
            rpc.await_rpc(None, 0.5)


def a_task_of_the_users() -> None: ...


@pytest.mark.lab
def test_our_calls_are_not_among_the_users_tasks(clamor_cluster: ClamorCluster) -> None:
    """They would cost each put a tenth more, and push the user's own out of Ray's list."""
    clamor.free(clamor.put(bytes(8192)))
    clamor_cluster.run(a_task_of_the_users)
    deadline = time.monotonic() + 30
    while True:  # each process tells Ray once a second
        names = {event["name"] for event in ray.timeline()}
        if any("a_task_of_the_users" in name for name in names):
            break
        assert time.monotonic() < deadline, names
        time.sleep(0.1)
    assert not names & {"create_region", "seal", "ask", "register_server", "retire", "ping"}
