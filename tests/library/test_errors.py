"""Every code of the page cache has its exception; every exception says what to do and travels."""

from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path

import pytest

from clamor_ray import errors
from clamor_ray._native import base
from clamor_ray._native import client as _native

HEADER = Path(__file__).parents[2] / "pagecache_c" / "pagecache.h"

CLASSES = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if issubclass(cls, errors.ClamorError)
]


def codes() -> dict[str, int]:
    text = HEADER.read_text()
    body = text[text.index("enum pc_err {") :]
    body = body[: body.index("};")]
    return {name: int(code) for name, code in re.findall(r"(PC_\w+) = (-?\d+)", body)}


def test_the_header_is_read() -> None:
    assert codes()["PC_OK"] == 0
    assert len(codes()) > 10


@pytest.mark.parametrize(("name", "code"), sorted(codes().items()))
def test_each_code_has_its_exception(name: str, code: int) -> None:
    if name in ("PC_OK", "PC_ERR_LAST"):
        assert code not in _native.ERRORS
        return
    assert getattr(_native, name) == code
    error = _native.error_for(code, "mmap: reason", region=7, version=None)
    assert type(error) is not errors.ClamorError
    assert type(error) is not errors.InternalError
    assert error.code == code
    assert error.hint
    assert "variable 7" in str(error)
    assert "version" not in error.message.partition("(region")[2]
    assert "mmap: reason" in str(error)


def test_the_table_has_nothing_that_the_header_has_not() -> None:
    assert set(_native.ERRORS) <= set(codes().values())
    assert min(codes().values()) == codes()["PC_ERR_LAST"] == min(_native.ERRORS) - 1


def test_a_limit_of_maps_is_not_a_want_of_memory() -> None:
    code = codes()["PC_ERR_NO_MEMORY"]
    limit = _native.error_for(code, "mmap of a home of 4096 bytes: Cannot allocate memory")
    assert type(limit) is errors.OutOfMemoryError
    assert "vm.max_map_count" in limit.hint
    assert "larger node" not in limit.hint
    ours = _native.error_for(code, "MADV_DONTFORK of variable 7: Cannot allocate memory")
    assert ours.hint == limit.hint
    memory = _native.error_for(code, "writing to a home: No space left on device")
    assert "larger node" in memory.hint


def test_an_unreached_server_is_named() -> None:
    said = "the page server says: server 0x2 is not reached for 7 s: it is stopped"
    error = _native.error_for(codes()["PC_ERR_TIMEOUT"], said, mapping=8)
    assert type(error) is errors.WaitTimeoutError
    assert "server 0x2 is not reached for 7 s: it is stopped" in error.message


def test_which_descriptors_of_the_server_are_in_use() -> None:
    code = codes()["PC_ERR_DESCRIPTORS"]
    said = "the page server says: server 0x2 is not reached: the page server of this node has no"
    for_a_connection = str(_native.error_for(code, f"{said} descriptor", mapping=8))
    assert "(mapping 8): server 0x2 is not reached: the page server of this" in for_a_connection
    assert "eighth" not in for_a_connection  # those are in use, too
    for_memory = str(_native.error_for(code, "the page server says: out of file descriptors"))
    assert "RLIMIT_NOFILE" in for_memory


def test_an_unknown_code_is_an_internal_error_that_names_it() -> None:
    error = _native.error_for(-4711)
    assert type(error) is errors.InternalError
    assert "-4711" in str(error)


def test_what_the_server_says_is_said_once() -> None:
    detail = "the page server says: the blocks of that version are kept no longer"
    error = _native.error_for(_native.PC_ERR_EXPIRED, detail, region=3, version=1)
    assert error.message == (
        "The blocks of this version of the global variable are kept no longer (variable 3, version "
        "1), says the page server."
    )
    assert "no room for 7" in _native.error_for(-2, "no room for 7").message


def test_a_code_whose_class_has_another_hint_says_what_is_true_of_it() -> None:
    """The class's hint is about another cause: doing what it says would change nothing."""

    def said(code: int, detail: str = "") -> str:
        return str(_native.error_for(code, detail, mapping=5))

    huge = said(_native.PC_ERR_HUGE_PAGES)
    assert "CLAMOR_TRAP" not in huge  # the fallback is what cannot work there
    assert "shmem_enabled" in huge
    assert "CLAMOR_TRAP" in said(_native.PC_ERR_NO_TRAP)
    for code in (_native.PC_ERR_NO_GENERATION, _native.PC_ERR_NO_PEER):
        assert "clamor.init()" not in said(code)
        assert _native.error_for(code).hint != errors.ServerUnavailableError.default_hint
    sealed = said(_native.PC_ERR_EXISTS, "variable 4 is sealed, or another thread is at it")
    assert "id exists already" not in sealed  # no id is given out twice
    assert "two sessions" not in sealed
    assert "variable 4 is sealed" in sealed
    assert "clamor.init()" not in errors.ServerUnavailableError.default_hint


def test_success_and_counts_pass() -> None:
    assert _native.check(0) == 0
    assert _native.check(17) == 17


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_errors_survive_pickling(cls: type[errors.ClamorError]) -> None:
    error = cls("What happened.", code=-3, hint="What to do.")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is cls
    assert (again.message, again.code, again.hint) == ("What happened.", -3, "What to do.")
    assert str(again) == "What happened. What to do."
    assert again.args == error.args


@pytest.mark.parametrize("cls", CLASSES, ids=lambda cls: cls.__name__)
def test_each_class_says_what_to_do(cls: type[errors.ClamorError]) -> None:
    error = cls("It broke.")
    assert error.code is None
    if cls is not errors.ClamorError:
        assert error.hint.endswith(".")
        assert cls.__doc__
        assert cls.__name__ in errors.__all__


def test_python_knows_them_by_its_own_names() -> None:
    assert issubclass(errors.PrefetchTimeoutError, TimeoutError)
    assert issubclass(errors.OutOfMemoryError, MemoryError)
    assert issubclass(errors.SessionMismatchError, errors.NotInitializedError)


def test_a_closed_handle_is_poison() -> None:
    handle = base._Handle()
    with pytest.raises(errors.ClosedError):
        _ = handle._handle
    handle._opened(object())
    assert handle._handle is not None
    handle.poison(errors.ForkedError("No."))
    for _ in range(2):
        with pytest.raises(errors.ForkedError, match="No"):
            _ = handle._handle


def test_the_traps_are_those_of_the_header() -> None:
    text = HEADER.read_text()
    traps = {name: int(code) for name, code in re.findall(r"PC_TRAP_(\w+) = (\d+)", text)}
    assert {
        "auto": traps["AUTO"],
        "uffd": traps["UFFD"],
        "sigsegv": traps["SIGSEGV"],
    } == _native.TRAPS
    assert set(_native.TRAPS_IN_FORCE) == {
        traps["UFFD_FULL"],
        traps["UFFD_USER"],
        traps["SIGSEGV"],
    }


def test_the_constants_are_those_of_the_header() -> None:
    text = HEADER.read_text()

    def value(name: str) -> int:
        found = re.search(rf"{name}(?:\s*=)?\s+(0x[0-9a-f]+|\d+)", text)
        assert found is not None, name
        return int(found[1], 0)

    assert value("PC_BLOCK_SHIFT") == _native.BLOCK_SHIFT
    assert value("PC_WINDOW_BEGIN") == _native.WINDOW_BEGIN
    assert value("PC_WINDOW_END") == _native.WINDOW_END
    assert value("PC_MAP_PRIVATE") == _native.MAP_PRIVATE
    assert value("PC_MAP_EXACT_READS") == _native.MAP_EXACT_READS
    assert value("PC_MAP_FIXED") == _native.MAP_FIXED
    assert value("PC_MAP_PAGE_SHIFT") == _native.MAP_PAGE_SHIFT
    assert value("PC_TASK_BYTES") == _native.TASK_BYTES
    for event in (
        *("NEED_REGION", "NEED_PEER", "REGION_IDLE", "LOG"),
        *("NEED_CHANGES", "NEED_PUBLISHED", "NEED_OUTCOME", "PULLED", "THRASHING", "NEED_HOME"),
        *("KEEPER_LOST", "TASK_ENDED", "NEED_SETTLED", "NEED_REPAIR"),
    ):
        assert value(f"PC_EVENT_{event}") == getattr(_native, f"EVENT_{event}")
    for blocks in ("PRESENT", "FETCHED", "TOUCHED"):
        assert value(f"PC_BLOCKS_{blocks}") == getattr(_native, f"BLOCKS_{blocks}")
