"""A seal whose answer is lost: it is sent again, and what was given up is no variable."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from clamor_ray import errors
from clamor_ray._protocol.config import Config
from tests.support.fake_session import Cluster, FakeSession


def test_a_seal_whose_answer_is_lost_is_sent_again() -> None:
    cluster = Cluster(answer_lost=["seal"])
    ref = FakeSession(cluster).creator.put(np.arange(5000))
    assert cluster.calls == ["create_region", "seal", "seal"]
    assert ref.region in cluster.content


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
