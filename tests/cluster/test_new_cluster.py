"""A cluster whose head is started again: nothing of a session with a name is left.

These clusters end in this process, which is connected to no other meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from tests.cluster.test_named_sessions import of_scope, other_driver
from tests.conftest import ANSWER_S, until
from tests.support.lab import local_cluster

pytestmark = [pytest.mark.lab, pytest.mark.timeout(300)]


def test_a_new_cluster_knows_no_session() -> None:
    """As after a restart of the head node: nothing of the old one is left either."""
    with local_cluster(1, connect=False) as lab:
        made = """
print(clamor.init(session="kept", lifetime="detached").scope)
clamor.put(np.zeros(10**5), name="index")
"""
        scope = other_driver(lab, made).strip()
        for pid in lab.head_processes():
            with contextlib.suppress(ProcessLookupError):  # it has ended with one before
                os.kill(pid, signal.SIGKILL)
    until(lambda: not of_scope(scope), ANSWER_S)
    with local_cluster(1, connect=False) as lab:
        said = other_driver(
            lab,
            """
try:
    clamor.init(session="kept")
except clamor.errors.NoSuchSessionError as error:
    print(type(error).__name__)
print(clamor.init(session="kept", lifetime="detached").scope)
assert clamor.variables() == []
clamor.shutdown(session="kept")
""",
        )
    name, new_scope = said.split()
    assert (name, new_scope != scope) == ("NoSuchSessionError", True)
