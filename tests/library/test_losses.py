"""Who opens a variable of which blocks are lost is warned, once for each loss. No Ray."""

from __future__ import annotations

import os
import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from pyroaring import BitMap

from clamor_ray import errors
from clamor_ray._read import losses
from clamor_ray.actors.lost_homes.lost_blocks import LostBlocks


class FakeSession:
    """A registry that knows one loss, or fails."""

    def __init__(self) -> None:
        self.asked = 0
        self.found: LostBlocks | None = LostBlocks(
            5, 100, bytes(BitMap([3, 4, 9]).serialize()), "Its home is lost", "Put it again."
        )
        self.fails = False
        self.cannot_ask: errors.ClamorError | None = None

    @property
    def rpc(self) -> FakeSession:
        """It is its own registry."""
        return self

    def lost_blocks(self, region: int) -> LostBlocks | None:
        assert region == 7
        self.asked += 1
        if self.cannot_ask is not None:
            raise self.cannot_ask
        if self.fails:
            raise errors.ServerUnavailableError("The registry does not answer.")
        return self.found


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(losses, "_told", set())
    return FakeSession()


REF: Any = SimpleNamespace(_scope="scope", _region=7, _label="variable 'index'")


def warned(session: Any, loss: int, action: Any = "always") -> list[Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        losses.warn(session, REF, loss)
    return [found.message for found in caught]


def test_once_for_each_loss(session: Any) -> None:
    (warning,) = warned(session, 5)
    assert isinstance(warning, errors.LostBlocksWarning)
    assert isinstance(warning, errors.ClamorWarning)
    assert "variable 'index'" in str(warning)
    assert "3 of 100 blocks (3-4, 9)" in str(warning)
    assert "Its home is lost" in str(warning)
    assert "Put it again." in str(warning)
    assert (warning.region, warning.runs) == (7, ((3, 2), (9, 1)))
    assert not warned(session, 5)
    assert session.asked == 1
    assert len(warned(session, 6)) == 1  # lost again
    assert session.asked == 2


def test_it_names_the_line_of_the_caller(session: Any) -> None:
    with pytest.warns(errors.LostBlocksWarning) as caught:
        losses.warn(session, REF, 5)
    assert caught[0].filename == __file__


def test_where_a_filter_makes_errors_it_raises_each_time(session: Any) -> None:
    for _ in range(2):
        with pytest.raises(errors.LostBlocksWarning, match="3 of 100 blocks"):
            warned(session, 5, "error")
    assert len(warned(session, 5)) == 1


def test_what_is_whole_again_is_not_warned_of(session: Any) -> None:
    session.found = None
    assert not warned(session, 5)
    assert not warned(session, 5)
    assert session.asked == 1


def test_a_registry_that_does_not_answer_is_asked_again(session: Any) -> None:
    session.fails = True
    (warning,) = warned(session, 5)
    assert "does not answer" in str(warning)
    assert warning.runs == ()
    session.fails = False
    (warning,) = warned(session, 5)
    assert "3 of 100 blocks" in str(warning)


@pytest.mark.parametrize("error", [errors.NotInitializedError, errors.ForkedError])
def test_a_process_that_cannot_ask_is_told_once(session: Any, error: Any) -> None:
    """One that Ray did not start, or a fork: it can never ask the registry."""
    session.cannot_ask = error("Not here.")
    (warning,) = warned(session, 5)
    assert "Blocks of" in str(warning)
    assert "are lost" in str(warning)
    assert "This process cannot ask which." in str(warning)
    assert "does not say now" not in str(warning)
    assert not warned(session, 5)
    assert len(warned(session, 6)) == 1  # lost again
    with pytest.raises(errors.LostBlocksWarning):
        warned(session, 7, "error")


def test_a_child_of_fork_is_warned_too(session: Any) -> None:
    assert len(warned(session, 5)) == 1
    child = os.fork()
    if not child:
        os._exit(10 + len(warned(session, 5)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 11
    assert not warned(session, 5)


def test_it_travels_as_an_error_of_a_task(session: Any) -> None:
    (warning,) = warned(session, 5)
    again = pickle.loads(pickle.dumps(warning))
    assert (str(again), again.region, again.runs) == (str(warning), 7, warning.runs)
