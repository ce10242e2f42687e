"""Every message of loss names the variable; where blocks were asked for, it names them too.

The tables below have every place that can raise it, in Python and in C, by name."""

from __future__ import annotations

import ast
import asyncio
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pyroaring import BitMap
from ray.exceptions import ActorDiedError

import clamor_ray
from clamor_ray import errors
from clamor_ray._labels import label
from clamor_ray._native import client as _native
from clamor_ray._native.base import PC_ERR_HOME_LOST
from clamor_ray._protocol.messages import Write
from clamor_ray.actors.commits.commit_log import CommitLog
from clamor_ray.actors.commits.commits import Commits
from clamor_ray.actors.registry.ray_homes import RayHomes

HOME = Path(clamor_ray.__file__).parent
ROOT = HOME.parent

# Each place in Python that makes the error, by file and function: how many, and how its message
# names the region. One that is new or that moves must be entered here, by somebody who looks at it.
IN_PYTHON = {
    ("clamor_ray/_session/session.py", "Session.explain"): ["why.message"],  # the registry's, whole
    # Of the touch, which names region, version and block, and with the registry's reason before it.
    ("clamor_ray/_tasks/task_ends.py", "error_of"): [
        "{touch} The block is on no node",
        "{why.message} {touch}",
    ],
    ("actors/commits/commits.py", "Commits._check_home"): ["{about}"],
    # Of versions that are kept or let go: no blocks were asked for. It ends in the registry's log.
    ("actors/lineage/lineage_service.py", "LineageService._retain_watched"): [
        "{', '.join(map(self._label, floors))}"
    ],
    ("actors/registry/ray_homes.py", "RayHomes._call"): ["{about}"],  # with blocks, below
    # A variable that nobody could read yet: its maker hears it.
    ("actors/registry/regions.py", "Regions._keep"): ["{about}"],
    ("actors/lost_homes/lost_blocks.py", "BlockLoss.all_of_it"): [
        "{capital(self.label)} is lost: {self.why}, and {said}"
    ],
    ("actors/lost_homes/lost_blocks.py", "LostBlocks.error"): [
        "Blocks of {label} are lost: {said}"
    ],
    # Away, in a directory of a store, or damaged there: `why` begins with the variable.
    ("actors/store/stored_homes.py", "StoredHomes.error"): ["{why}"],
    # Of a page server, while a variable moves: `Moves` and `Switches` say of which one, in a log.
    ("actors/lost_homes/watched_calls.py", "_lost"): ["{capital(what)}"],
}
# The same in C, with a text.
IN_C = {
    ("definitions.c", "pc_engine_define_region"): "variable %llu",
    ("unchecked.c", "say_damaged"): "block %llu of variable %llu",
    ("unchecked.c", "pc__unchecked_expect"): "block %llu",  # said before, with all of it
    ("layer.c", "publish"): "variable %llu",
    ("move.c", "take_piece"): "block %llu of variable %llu is %s",
    ("rebuild.c", "pc__rebuild_become_home"): "variable %llu",
    # Of a whole keeper, and so of no region: what it was not given yet it does not know, so nobody
    # can name blocks here. Only its page server hears it, says so in its log, and joins again as
    # another one; the registry then names the regions and blocks that are lost by that.
    ("keeper.c", "pc__keeper_list"): "the keeper has only a part of what there was",
}
# A code without a text: who names the region, and where blocks were asked for, these.
CODES = {
    # The message to a stopped thread, or the mapping's call, below.
    ("batch.c", "fill_from_home"): 1,  # compares
    ("redirect.c", "pc__fetch_lost"): 1,
    ("repair.c", "give_up"): 1,
    ("repair.c", "fail"): 1,  # compares
    # Of a block that does not have its checksum: `say_damaged` has said which.
    ("unchecked.c", "pc__unchecked_judge"): 1,
    ("unchecked.c", "say_damaged"): 1,  # in the log
    ("reply.c", "pc__reply_fill"): 1,  # compares
    ("apply.c", "read_old"): 1,
    ("apply.c", "keep_old"): 1,  # compares
    ("rows.c", "copy_all"): 1,
    ("home.c", "compose_delta"): 1,
    ("parity.c", "add_old"): 1,
    ("engine.c", "pc_engine_peer_lost"): 2,  # one compares
    ("definitions.c", "pc_engine_define_region"): 1,  # compares
    # Of a layer: `layer_error` says it, with the commit, the region and the server.
    ("fetch.c", "take_answers"): 1,
    # Of a member of a group, whose blocks nobody asked for by name: who waits, waits for the home.
    ("fetch.c", "take_bitmaps"): 1,
    ("member.c", "read_some"): 1,
    ("pull.c", "pc_engine_pull"): 1,
    ("homes.c", "pc_engine_region_lost"): 1,
    ("region.c", "give_up"): 1,  # which logs why: the disk cannot be read
    ("homes.c", "pc_engine_home_lost"): 1,
    ("fetch.c", "pc__peer_is_lost"): 2,  # compares
    ("gather.c", "end"): 1,  # compares, for what `pc__unreached_error_text` knows of the server
    ("causes.c", "pc__unreached_error_text"): 2,  # compares: which server, and if it is lost
    ("error.c", ""): 1,  # the code's own text
    # What Python tells the engine; it reaches people as the codes above.
    ("actors/page_server/server_core.py", "ServerCore._what_became_of"): 1,
    ("actors/page_server/server_core.py", "ServerCore._find_home"): 1,
    ("actors/page_server/server_core.py", "ServerCore.region_lost"): 1,
    ("actors/page_server/server_core.py", "ServerCore._lose"): 1,
    ("actors/page_server/rebuilt_homes.py", "layer_error"): 1,  # compares
    ("actors/page_server/rebuilt_homes.py", "RebuiltHomes.drop"): 1,
}


class Places(ast.NodeVisitor):
    """What a file makes of the error: by function, messages; and where its code is named."""

    def __init__(self, path: Path) -> None:
        self.messages: dict[str, list[str]] = {}
        self.codes: dict[str, int] = {}
        self._inside: list[str] = []
        self.visit(ast.parse(path.read_text()))

    def _enter(self, node: Any) -> None:
        self._inside.append(node.name)
        self.generic_visit(node)
        self._inside.pop()

    visit_ClassDef = visit_FunctionDef = visit_AsyncFunctionDef = _enter

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name == "HomeLostError":
            message = ast.unparse(node.args[0]) if node.args else ""
            self.messages.setdefault(".".join(self._inside), []).append(message)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if node.attr in ("HOME_LOST", "PC_ERR_HOME_LOST"):
            where = ".".join(self._inside)
            self.codes[where] = self.codes.get(where, 0) + 1
        self.generic_visit(node)


def places_in_python() -> dict[str, Places]:
    files = [p for folder in (HOME, ROOT / "actors") for p in folder.rglob("*.py")]
    return {str(path.relative_to(ROOT)): Places(path) for path in files}


def places_in_c() -> tuple[dict[tuple[str, str], list[str]], dict[tuple[str, str], int]]:
    """By file and function: the texts, and how often the code stands without one."""
    texts: dict[tuple[str, str], list[str]] = {}
    codes: dict[tuple[str, str], int] = {}
    for path in (ROOT / "pagecache_c").rglob("*.c"):
        if "tests" in path.relative_to(ROOT).parts:
            continue
        code = re.sub(r"/\*.*?\*/", " ", path.read_text(), flags=re.S)
        for found in re.finditer(r"PC_ERR_HOME_LOST", code):
            begins = re.findall(r"^[A-Za-z_].*?\b(\w+)\(", code[: found.start()], re.M)
            where = (path.name, begins[-1] if begins else "")
            if re.search(r"pc__fail\(\s*$", code[: found.start()]):
                text = re.match(r",(.*?)\);", code[found.end() :], re.S)
                assert text is not None, where
                texts.setdefault(where, []).append(text[1])
            else:
                codes[where] = codes.get(where, 0) + 1
    return texts, codes


def test_every_place_in_python_names_the_region() -> None:
    found = {
        (file, where): messages
        for file, places in places_in_python().items()
        for where, messages in places.messages.items()
    }
    assert found.keys() == IN_PYTHON.keys()
    for place, marks in IN_PYTHON.items():
        assert len(found[place]) == len(marks), place
        for message, mark in zip(found[place], marks, strict=True):
            assert mark in message, (place, message)


def test_every_place_in_c_names_the_region() -> None:
    texts, _ = places_in_c()
    assert texts.keys() == IN_C.keys()
    for place, mark in IN_C.items():
        (text,) = texts[place]
        assert mark in text, (place, text)


def test_every_code_without_a_text_is_known() -> None:
    """Who knows the mapping names it: the next tests."""
    found = dict(places_in_c()[1])
    for file, places in places_in_python().items():
        found |= {(file, where): n for where, n in places.codes.items() if where}
    assert found == CODES


def test_no_call_about_a_mapping_is_checked_without_its_variable() -> None:
    assert "mapping=mapping_id" not in (HOME / "_native/client.py").read_text()


class LosingClient(_native.Client):
    """Whose page server has lost everything."""

    def __init__(self) -> None:
        self._mapped = {}
        mapped = {"address": 1 << 44, "length_bytes": 1 << 20, "loss": 0, "wastes": False}
        self._remember(SimpleNamespace(id=8, **mapped), 7, 2)

    def _call(self, function: Any, *args: Any) -> int:
        return PC_ERR_HOME_LOST


RUNS = np.array([[3, 3], [9, 1]], np.uint64)


@pytest.mark.parametrize("name", ["prefetch", "gather", "dirty", "stage", "evicted", "build_seal"])
def test_what_a_call_on_a_mapping_says(name: str) -> None:
    client = LosingClient()
    calls = {
        "prefetch": lambda: client.prefetch(8, RUNS),
        "gather": lambda: client.gather(
            8,
            np.array([2, 5], np.uint64),
            np.empty(200, np.uint8),
            offset_bytes=4096,
            stride_bytes=4096,
            row_bytes=100,
        ),
        "dirty": lambda: client.dirty(8),
        "stage": lambda: client.stage(8, 1, RUNS),
        "evicted": lambda: client.evicted(8),
        "build_seal": lambda: client.build_seal(8),
    }
    with pytest.raises(errors.HomeLostError) as caught:
        calls[name]()
    assert "variable 7, version 2" in caught.value.message
    assert "mapping" not in caught.value.message
    blocks = {
        "prefetch": "blocks 3-5, 9)",
        "stage": "blocks 3-5, 9)",
        "gather": "blocks 2 rows in 3-6)",
    }
    assert blocks.get(name, "blocks among 0-255)") in caught.value.message
    assert "is gone" not in caught.value.message  # nobody has said that of a node


def test_what_opening_one_says() -> None:
    with pytest.raises(errors.HomeLostError) as caught:
        LosingClient().map(9, 4, 1 << 44, 3 << 12)
    assert "(variable 9, version 4, blocks among 0-2)" in caught.value.message


SAYS = "the page server says: "


@pytest.mark.parametrize(
    ("detail", "known"),
    [
        (SAYS + "server 0x2 is lost, and no other has them", "server 0x2 is lost, and no other"),
        (SAYS + "server 0x2 does not have them", "server 0x2 does not have them"),
        (SAYS + "no server has it", "this node's page server knows none that has them"),
        ("version 1 of variable 7 was never staged here", "was never staged here"),
    ],
)
def test_it_says_what_is_known_and_no_more(detail: str, known: str) -> None:
    said = _native.error_for(PC_ERR_HOME_LOST, detail, region=7, version=2, blocks="3").message
    assert said.startswith("Blocks of the global variable are missing (variable 7, version 2, ")
    assert known in said
    assert "gone" not in said


def test_a_mapping_that_is_forgotten_is_named_by_its_number() -> None:
    client = LosingClient()
    client._mapped.clear()
    with pytest.raises(errors.HomeLostError, match="mapping 8"):
        client.prefetch(8, RUNS)


def test_few_mappings_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "MAPPED_MOST", 4)
    client = LosingClient()
    for number in range(100, 120):
        mapped = {"address": 0, "length_bytes": 0, "loss": 0, "wastes": False}
        client._remember(SimpleNamespace(id=number, **mapped), number, 0)
        assert len(client._mapped) <= 4
    assert {118, 119} <= client._mapped.keys()


HOME_ID = 0x2A
MANY = BitMap(range(0, 40, 2))
MANY_SAID = "blocks 0, 2, 4, 6, 8, 10, ... (20 in all) of variable 7"


def writing(blocks: BitMap) -> Write:
    return Write(7, 1, len(blocks), blocks.serialize(), 4096 * len(blocks), HOME_ID)


@pytest.mark.parametrize(
    ("blocks", "said"),
    [
        (BitMap([3, 4, 5, 9]), "blocks 3-5, 9 of variable 7"),
        (MANY, MANY_SAID),
        (BitMap(), "to variable 7 cannot be made"),  # only its plan changes
    ],
)
def test_what_a_commit_to_a_lost_home_says(blocks: BitMap, said: str) -> None:
    commits = object.__new__(Commits)
    commits._log = CommitLog()
    commits._homes = SimpleNamespace(why_lost=lambda home: "its node is dead")  # type: ignore[assignment]
    with pytest.raises(errors.HomeLostError) as caught:
        commits._check_home(HOME_ID, writing(blocks))
    assert said in caught.value.message
    assert "0x2a" in caught.value.message
    assert "its node is dead" in caught.value.message


class DeadActor:
    """Whose every method is answered by Ray: it is dead."""

    def __getattr__(self, method: str) -> Any:
        def remote(*_: Any) -> Any:
            answer = asyncio.get_running_loop().create_future()
            answer.set_exception(ActorDiedError())
            return answer

        return SimpleNamespace(remote=remote)


@pytest.mark.parametrize(
    "call",
    [
        lambda homes: homes.pull(HOME_ID, 1, writing(MANY)),
        lambda homes: homes.stage_cached(HOME_ID, 7, 1, 1, MANY.serialize()),
    ],
    ids=["pull", "stage_cached"],
)
def test_what_a_call_about_blocks_says(call: Callable[[RayHomes], Awaitable[Any]]) -> None:
    lost: list[int] = []
    homes = object.__new__(RayHomes)
    homes._handles = {HOME_ID: DeadActor()}
    homes._label = label

    async def at_once() -> None: ...

    homes._before_told = at_once
    homes._lose = lambda home, why: lost.append(home)

    async def ask() -> None:
        await call(homes)

    with pytest.raises(errors.HomeLostError) as caught:
        asyncio.run(ask())
    assert MANY_SAID in caught.value.message
    assert lost == [HOME_ID]
