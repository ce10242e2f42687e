"""A seal whose answer is lost: it is sent again, and what was given up is no variable."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clamor_ray import errors
from clamor_ray._protocol.config import Config
from clamor_ray._session import create
from tests.support.fake_session import Cluster, FakeSession


class Shared:
    """A Ray object that is ready."""

    @staticmethod
    def wait(refs: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return refs, []


@pytest.mark.parametrize("error", [errors.WaitTimeoutError, KeyboardInterrupt])
def test_a_share_without_an_answer_is_given_up(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Registry and page server may go on with it, and nobody would ever free it."""

    def share(_refs: Any, _node_id: str, request_id: int) -> None:
        shared.append(request_id)
        raise error("no answer")

    shared: list[int] = []
    given_up: list[int] = []
    cluster = Cluster()
    monkeypatch.setattr(cluster, "share", share, raising=False)
    monkeypatch.setattr(cluster, "give_up_share", given_up.append, raising=False)
    monkeypatch.setattr(create, "ray", Shared)
    monkeypatch.setattr(create.ray_state, "nodes_of", lambda _ref: ["node"])
    with pytest.raises(error):
        FakeSession(cluster).creator.share(object(), 2.0)
    assert shared == given_up


def test_a_seal_whose_answer_is_lost_is_sent_again() -> None:
    cluster = Cluster(answer_lost=["seal"])
    ref = FakeSession(cluster).creator.put(np.arange(5000))
    assert cluster.calls == ["create_counted", "seal", "seal"]
    assert ref._region in cluster.content


@pytest.mark.parametrize("error", [errors.WaitTimeoutError, errors.ServerUnavailableError])
def test_one_that_is_never_answered_is_given_up(
    error: type[errors.ClamorError], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        if name == "seal":
            raise error("No answer.")

    cluster = Cluster(fail=fail)
    session = FakeSession(cluster, Config(reattach_s=0.3))
    abandoned: list[Any] = []
    monkeypatch.setattr(cluster, "abandon", lambda *args: abandoned.append(args), raising=False)
    with pytest.raises(error):
        session.creator.put(np.arange(5000))
    assert cluster.calls.count("seal") > 1
    assert {args[0] for args in abandoned} == set(cluster.regions)
