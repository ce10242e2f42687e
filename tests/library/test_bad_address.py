"""Which errors get the note about absent blocks, and where; with a real trap: test_traps.py."""

from __future__ import annotations

import errno
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from clamor_ray._read import bad_address
from clamor_ray._session import process_sessions
from clamor_ray._tasks.remote import resolving


@pytest.fixture
def trap(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    client = SimpleNamespace(trap="sigsegv")
    session = SimpleNamespace(_client=client, leases=[1])
    monkeypatch.setattr(process_sessions, "_current", session)
    return client


OURS = [
    OSError(errno.EFAULT, "Bad address"),
    OSError("2000000 requested and 0 written"),
    OSError("2000000 requested and 4096 written"),  # the first blocks were there
    OSError("Error writing bytes to file. Detail: [errno 14] Bad address"),
]
OTHERS = [
    OSError(errno.ENOSPC, "No space left on device"),
    OSError("2000000 requested and 5 written, said somebody else"),
    ValueError("2000000 requested and 0 written"),
]


@pytest.mark.parametrize("error", OURS)
def test_errors_that_an_absent_block_makes(trap: SimpleNamespace, error: OSError) -> None:
    note = bad_address.note_of(error)
    assert note is not None
    assert "clamor.prefetch" in note
    assert "'sigsegv'" in note
    assert ("disk is not full" in note) == ("requested" in str(error))  # a full disk says so too
    trap.trap = "uffd"
    assert bad_address.note_of(error) is None


def test_the_variable_may_be_of_another_session_than_the_current_one(
    trap: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = SimpleNamespace(trap="sigsegv")
    other = SimpleNamespace(_client=client, leases=[1])
    monkeypatch.setattr(process_sessions, "_others", {"other": other})
    for current in (None, SimpleNamespace(_client=None, leases=[]), process_sessions._current):
        monkeypatch.setattr(process_sessions, "_current", current)
        note = bad_address.note_of(OURS[0])
        assert note is not None
        assert "'sigsegv'" in note
    client.trap = trap.trap = "uffd"
    assert bad_address.note_of(OURS[0]) is None


@pytest.mark.parametrize("error", OTHERS)
def test_errors_that_it_does_not_make(trap: SimpleNamespace, error: Exception) -> None:
    assert bad_address.note_of(error) is None


@pytest.mark.parametrize("error", OURS)
def test_a_process_that_maps_nothing_is_told_nothing(
    trap: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    monkeypatch.setattr(process_sessions._current, "leases", [])
    assert bad_address.note_of(error) is None


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_the_note_is_added_once(trap: SimpleNamespace) -> None:
    def fail() -> None:
        raise OSError(errno.EFAULT, "Bad address")

    with pytest.raises(OSError, match="Bad address") as caught:
        resolving(resolving(fail))()
    assert len(caught.value.__notes__) == 1  # type: ignore[attr-defined]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="exceptions have no notes")
def test_what_ends_the_program_or_a_thread_is_explained(
    trap: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, traceback: shown.append(error))
    monkeypatch.setattr(threading, "excepthook", lambda args: shown.append(args.exc_value))
    monkeypatch.setattr(bad_address, "_hooked", threading.Event())
    bad_address.hook()
    bad_address.hook()  # once is enough

    def fail() -> None:
        raise OSError("8 requested and 0 written")

    thread = threading.Thread(target=fail)
    thread.start()
    thread.join(60)
    error = OSError(errno.EFAULT, "Bad address")
    sys.excepthook(OSError, error, None)
    assert [len(each.__notes__) for each in shown] == [1, 1]
