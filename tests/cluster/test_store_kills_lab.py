"""A session with a store whose processes are killed, while its cluster lives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support import stored
from tests.support.lab import LocalCluster, require_lab, troubles
from tests.support.processes import end, stop
from tests.support.store_openings import opening

pytestmark = [pytest.mark.lab, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalCluster, list[int]]]:
    """A session on three nodes, and how often its variables were changed."""
    require_lab("local")
    with opening(tmp_path_factory.mktemp("three") / "s", 3) as lab:
        stored.put_all(3)
        yield lab, [0]


KILLED: dict[str, Any] = {
    "page server": lambda lab: [troubles.server_pid(lab, 1)],
    "page server and keeper": lambda lab: [
        troubles.server_pid(lab, 1),
        *troubles.keeper_pids(lab, 1),
    ],
    "registry": lambda lab: [troubles.registry_pid()],
    # Not those of the driver's node: what it maps and has not read yet would end it.
    "all of them": lambda lab: [
        troubles.registry_pid(),
        *(pid for n in (1, 2) for pid in (troubles.server_pid(lab, n), *keepers_of(lab, n))),
    ],
}


def keepers_of(lab: LocalCluster, node: int) -> list[int]:
    return troubles.keeper_pids(lab, node)


@pytest.mark.parametrize("who", KILLED)
def test_processes_of_a_session_are_killed(three: tuple[LocalCluster, list[int]], who: str) -> None:
    lab, steps = three
    stored.change(steps[0] + 1, 3)
    steps[0] += 1
    before = stored.places()
    pids = KILLED[who](lab)
    stop(*pids)  # none gives another one what it has
    end(pids)
    stored.check(steps[0], 3)
    stored.change(steps[0] + 1, 3)
    steps[0] += 1
    stored.check(steps[0], 3)
    assert stored.places() == before
