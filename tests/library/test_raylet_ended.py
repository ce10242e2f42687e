"""A process whose own raylet has ended knows nothing of its session: nobody says that it is over.

tests/library/test_rpc.py has how that is found.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import types
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
from click.testing import CliRunner

from clamor_ray import errors
from clamor_ray._protocol import ray_state
from clamor_ray._session import named_sessions, process_sessions
from clamor_ray._session.named_sessions import SessionInfo
from clamor_ray.cli import drain
from clamor_ray.cli.clusters import OpenSession
from clamor_ray.cli.main import main
from clamor_ray.cli.output import NOT_CHECKED, WELL, WRONG

NODE = "ab" * 28


def raylet_ended(*_: Any, **__: Any) -> NoReturn:
    raise ray_state.RayletEndedError("its raylet has ended", hint="Begin again.")


def session_ended(*_: Any, **__: Any) -> NoReturn:
    raise errors.SessionEndedError("its driver has gone")


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_state, "check_raylet", raylet_ended)


def test_the_error_travels_and_is_caught_as_an_ended_session() -> None:
    with pytest.raises(errors.SessionEndedError) as caught:
        raylet_ended()
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is ray_state.RayletEndedError
    assert str(again) == "its raylet has ended Begin again."


# -- clamor drain


def drained(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[..., Any], error: str = "", form: str = "text"
) -> Any:
    rpc: Any = types.SimpleNamespace(drain=ask, cancel_drain=ask)
    found = [OpenSession(SessionInfo("prices", "", error=error), rpc)]
    monkeypatch.setattr(drain, "connected", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(drain, "node_of", lambda _: NODE)
    monkeypatch.setattr(drain, "open_sessions", lambda *_: found)
    return CliRunner().invoke(main, ["drain", NODE, "--format", form])


@pytest.mark.parametrize("error", ["", "it did not answer"])
def test_a_drain_does_not_say_that_the_node_is_empty(
    error: str, ended: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the raylet ends while the sessions are listed, or while one is asked."""
    said = drained(monkeypatch, raylet_ended, error)
    assert said.exit_code == NOT_CHECKED
    assert "has ended." not in said.stdout.replace(drain.NOT_KNOWN, "")
    assert drain.NOT_KNOWN in said.stdout
    assert "Ray on the machine of this command has ended" in said.stderr
    assert f"clamor drain {NODE[:12]}" in said.stderr
    (told,) = json.loads(drained(monkeypatch, raylet_ended, error, "json").stdout)["sessions"]
    assert (told["error"], "ended" in told) == (drain.NOT_KNOWN, False)


def test_a_drain_with_a_raylet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_state, "check_raylet", lambda: None)
    said = drained(monkeypatch, session_ended)
    assert (said.exit_code, said.stderr) == (WELL, "")
    assert "Session prices has ended." in said.stdout
    said = drained(monkeypatch, session_ended, "it did not answer")
    assert said.exit_code == WRONG
    assert "it did not answer" in said.stdout


# -- clamor.sessions()


def test_a_session_stays_in_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    info = SessionInfo("prices", "")
    monkeypatch.setattr(named_sessions, "await_rpc", session_ended)
    assert named_sessions._said(info, None) is None
    monkeypatch.setattr(named_sessions, "await_rpc", raylet_ended)
    said = named_sessions._said(info, None)
    assert said is not None
    assert said.name == "prices"
    assert "the raylet of this process has ended" in said.error


# -- a driver that has attached to a session by name


class Attached:
    """This process's part in a session. Without a raylet Ray would say that it is over."""

    name, scope, bound_task = "prices", "0123456789ab", ""
    owner, of_job, in_driver, is_here, was_told = False, True, True, True, False

    def _has_ended(self) -> bool:
        raise AssertionError("Ray was asked, which may not answer")


@pytest.fixture
def attached(monkeypatch: pytest.MonkeyPatch) -> Attached:
    session = Attached()
    monkeypatch.setattr(process_sessions, "_current", session)
    return session


@pytest.mark.parametrize("error", [errors.ServerUnavailableError, errors.SessionEndedError])
def test_what_fails_in_it_says_that_the_raylet_has_ended(
    error: type[errors.ClamorError], attached: Attached, ended: None
) -> None:
    def make(session: Any) -> None:
        assert session is attached
        raise error("no page server")

    with pytest.raises(ray_state.RayletEndedError):
        process_sessions.with_current(make)


def test_the_error_is_not_told_twice(attached: Attached, ended: None) -> None:
    with pytest.raises(ray_state.RayletEndedError) as caught:
        process_sessions.with_current(raylet_ended)
    assert caught.value.__context__ is None


def test_nobody_is_said_to_have_ended_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page server went with the raylet, and had said that it leaves."""
    monkeypatch.setattr(process_sessions, "_current", None)
    monkeypatch.setattr(process_sessions, "_others", {})
    monkeypatch.setattr(process_sessions, "_ended", Attached())
    monkeypatch.setattr(process_sessions.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(process_sessions.starting, "check_not_ray_client", lambda: None)
    monkeypatch.setattr(process_sessions.starting, "in_worker", lambda: False)
    monkeypatch.setattr(process_sessions, "_known", lambda _: None)
    monkeypatch.setattr(ray_state, "check_raylet", lambda: None)
    with pytest.raises(errors.SessionEndedError, match="another process has called"):
        process_sessions.current()
    monkeypatch.setattr(ray_state, "check_raylet", raylet_ended)
    with pytest.raises(ray_state.RayletEndedError):
        process_sessions.current()
