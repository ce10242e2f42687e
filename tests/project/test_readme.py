"""The examples of the README and of every page of docs/ run as they stand, one after the other.

A block of Python or of a shell that cannot run is marked with the reason (`NOT_RUN`). What a page's
examples use, and do not make, is in `SETUP`; `CHECKS` looks at what they did. Blocks that need a
driver of their own are put together in `SCRIPTS`. Short pages share a driver (`TOGETHER`).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import ClamorCluster
from tests.support import fences
from tests.support.fences import Fence

pytestmark = pytest.mark.lab

ROOT = Path(__file__).parents[2]
README, GUIDE, DOCS = ROOT / "README.md", ROOT / "docs" / "guide.md", ROOT / "docs"
SHORT = (README, GUIDE)  # they begin with what they need, for who pastes them
MARK = "<!-- executed by tests/project/test_readme.py -->"
BY_ITSELF = "<!-- executed by itself by tests/project/test_readme.py -->"  # a script of its own
NOT_RUN: Final = re.compile(r"<!-- not run: (\S.*\S) -->")

COMMON = """
import ctypes
import numpy as np
import ray
import clamor_ray as clamor
ray.init()
clamor.init()
def _shell(command):
    import subprocess
    subprocess.run(command, shell=True, check=True, timeout=100)
"""
SETUP = {
    "adapters.md": "",
    "backup.md": "",
    "building.md": """
import pathlib
import subprocess
pathlib.Path("index.c").write_text('''
#include <stdlib.h>
double *build_index(const double *points, size_t n)
{
    double *index = malloc(n * sizeof *index);
    for (size_t i = 0; i < n; i++)
        index[i] = points[3 * i] + 1;
    return index;
}
''')
options = "-shared -fPIC -Wl,-soname,libindex.so -o libindex.so index.c"
subprocess.run(["cc", *options.split()], check=True)
lib = ctypes.CDLL("./libindex.so")
lib.build_index.restype = ctypes.c_void_p
def load_into(points):
    points[:] = np.arange(points.size).reshape(points.shape)[::-1]
""",
    "caching.md": """
table, ids = clamor.put(np.arange(10**5).reshape(-1, 4)).get(), [7, 1, 7]
""",
    "files.md": "",
    "homes.md": "",
    "memory.md": """
ref = clamor.put(np.ones(10**5))
array = ref.get()
""",
    "scatter_add.md": """
w = clamor.put(np.zeros(1000))
ids, values, dense, steps = [3, 1, 3], [1.0, 2.0, 3.0], np.ones(1000), 2
data = clamor.from_items(range(8), partitions=2)
def gradients(batch, w):
    clamor.add_at(w, [0], 1.0)
    return batch
loss = np.sum
""",
    "transactions.md": """
import asyncio
ref, a, b, something_else = (clamor.put(np.ones(1000)) for _ in range(4))
ids, delta, new = [1, 2], 1.0, np.zeros(1000)
def transfer(a, b):
    with clamor.transaction(a, b) as (x, y):
        x[1] -= 1
        y[1] += 1
""",
}
# Behind the first example of a page.
CHECKS_FIRST = {
    "guide.md": "assert len(answers) == 8 and all(a.shape == (125, 10) for a in answers)\n",
}
# Behind the last one.
CHECKS = {
    "backup.md": "assert first.variables == second.variables == 2\n",
    "adapters.md": "assert answer == 64 and not ref.get().words.flags.writeable\n",
    "building.md": """
got = ref.get()
assert got["points"][0, 0] == 3 * 10**7 - 3 and got["order"][0] == 10**7 - 1
""",
    "caching.md": """
import asyncio
assert rows.tolist() == table[ids].tolist() and stats.cache_bytes > 0
async def use():
    replica = Replica.__new__(Replica)  # as Serve does
    await replica.__init__(clamor.put(np.ones(1000)))
    return await replica(ids)
assert asyncio.run(use()) == 3
""",
    "files.md": "assert rows[:, 0].tolist() == [5 * 64, 7 * 64, 15_000 * 64]\n",
    "homes.md": "assert result.moved >= 1 and clamor.drain(here).moved == 0\n",
    "memory.md": """
assert part.is_home and part.mappings == 1 and 4096 * part.present_blocks > ref.nbytes
""",
    "scatter_add.md": "assert w.refresh().get()[:4].tolist() == [5, 3, 1, 2]\n",
    "transactions.md": """
assert ref.get().tolist() == [0] * 1000 and a.get()[:2].tolist() == [-1, 0]
async def both():
    following = asyncio.ensure_future(follow(ref))
    while not following.done():
        await asyncio.to_thread(clamor.add_at, ref, [0], 1.0)
    return await following
assert asyncio.run(asyncio.wait_for(both(), 60)) >= 1
""",
}
# With all blocks of a page that are executed by themselves, in order.
SCRIPTS = {
    "guide.md": """
import numpy as np
import ray
import clamor_ray as clamor
ray.init(namespace="prices")
table = np.arange(10**5)
{0}
clamor.shutdown()
{1}
serve.start(proxy_location="Disabled")
try:
    app = serve.run(Prices.bind(), name="prices", route_prefix=None)
    assert app.remote(7).result(timeout_s=60) == 7
finally:
    serve.shutdown()
    clamor.shutdown(session="prices")
""",
    "serving.md": """
import numpy as np
import ray
import clamor_ray as clamor
ray.init(namespace="embeddings")
table = np.arange(10**5).reshape(-1, 4)
{0}
clamor.shutdown()
{1}
serve.start(proxy_location="Disabled")
try:
    app = serve.run(Rows.bind(), name="embeddings", route_prefix=None)
    assert app.remote([7]).result(timeout_s=60).tolist() == [[28, 29, 30, 31]]
    clamor.init(session="embeddings")
    clamor.add_at(clamor.open("table"), [7], 100)
    import time
    deadline = time.monotonic() + 60
    while app.remote([7]).result(timeout_s=60).tolist() != [[128, 129, 130, 131]]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
finally:
    serve.shutdown()
    clamor.shutdown(session="embeddings")
""",
    "how-to/sessions.md": """
import numpy as np
import ray
import clamor_ray as clamor
ray.init()
{0}
clamor.shutdown(session="prices")
""",
    "store.md": """
import tempfile
import numpy as np
import ray
import clamor_ray as clamor
ray.init()
root, init = tempfile.mkdtemp(), clamor.init
clamor.init = lambda store, session: init(store=root + "/clamor", session=session)  # not in /data
{0}
clamor.shutdown(session="features")
del index  # it has the store's addresses
{0}
assert clamor.open("index").get()[0] == 2
clamor.shutdown(session="features")
""",
}
# Pages that share a driver have no names of each other.
DROP = """
for _info in clamor.variables():
    if _info.name:
        clamor.drop(_info.name)
"""
# What is there before one of them.
BEFORE = {
    "get-started.md": "import pathlib; pathlib.Path('first.py').write_text({first!r})",
}
# A member's code: each of two actors runs it.
IN_ACTORS = {
    "groups.md": """
@ray.remote(num_cpus=0)
class Member:
    def run(self, group, code):
        names = {"np": np, "clamor": clamor, "group": group, "gradient": np.full(4, 2.0), "step": 0}
        exec(code, names)
        return names["gradient"].tolist(), names["step"]
members = [Member.remote() for _ in range(2)]
group = clamor.AllReduceGroup(members)
got = ray.get([member.run.remote(group, CODE) for member in members], timeout=100)
assert got == [([2.0] * 4, 1)] * 2, got
""",
}


def name_of(page: Path) -> str:
    return str(page.relative_to(DOCS if page.is_relative_to(DOCS) else ROOT))


def runnable(page: Path) -> list[Fence]:
    """The blocks of Python, and of a shell."""
    return [
        fence
        for fence in fences.fences(page.read_text())
        if fence.language in fences.PYTHON + fences.SHELL
    ]


def examples(page: Path, wanted: str = MARK) -> list[str]:
    """Python for each block with the mark, in order: what a shell is given runs in one."""
    return [
        fence.code
        if fence.language in fences.PYTHON
        else "".join(f"_shell({command!r})\n" for command in fence.commands)
        for fence in runnable(page)
        if fence.mark == wanted
    ]


PAGES = [page for page in fences.pages(ROOT) if runnable(page)]
ALONE = [page for page in PAGES if examples(page) and name_of(page) in {*SETUP, *IN_ACTORS}]
ALONE += SHORT
TOGETHER = [page for page in PAGES if examples(page) and page not in ALONE]


def script_of(page: Path) -> str:
    first, *others = examples(page)
    name = name_of(page)
    if page in SHORT:
        return "\n".join([first, CHECKS_FIRST.get(name, ""), *others])
    if name in IN_ACTORS:
        code = "\n".join([first, *others])
        return f"{COMMON}CODE = {code!r}\n{IN_ACTORS[name]}"
    return "\n".join([COMMON, SETUP[name], first, *others, CHECKS[name]])


def script_of_all(pages: list[Path]) -> str:
    """One driver for several pages, each with names of its own."""
    code = [COMMON, "_names = dict(globals())"]
    for page in pages:
        code += [f"print('page', {name_of(page)!r}, flush=True)", DROP]
        code.append(BEFORE.get(name_of(page), "").format(first=examples(page)[0]))
        code.append("page = dict(_names)")
        code += [f"exec({example!r}, page)" for example in examples(page)]
        code.append("page = None")
    return "\n".join(code)


def test_each_block_is_run_or_says_why_not() -> None:
    for page in fences.pages(ROOT):
        text = page.read_text()
        for fence in fences.fences(text):
            place = f"{page}:{fence.line}: {fence.code}"
            if fence.language in fences.PYTHON + fences.SHELL:
                assert fence.mark in (MARK, BY_ITSELF) or NOT_RUN.fullmatch(fence.mark), place
                assert fence.language in fences.PYTHON or fence.commands, place
            else:
                assert fences.OTHER.fullmatch(fence.language), f"{place} has no language"
                assert not re.search(r"^(\$|>>>) ", fence.code, re.M), f"{place} is an example"
        assert bool(examples(page, BY_ITSELF)) == (name_of(page) in SCRIPTS)
        # None is hidden by the way it is written, and no mark is over something else.
        n_fences = len(re.findall(r"^[ \t]*(?:`{3,}|~{3,})[^`\n]*$", text, re.M))
        assert n_fences == 2 * len(fences.fences(text)), page
        n_marks = text.count(MARK) + text.count(BY_ITSELF) + len(NOT_RUN.findall(text))
        assert n_marks == len(runnable(page)), page
    assert {*SETUP, *IN_ACTORS} == {name_of(page) for page in ALONE} - {"README.md", "guide.md"}


def run(cluster: ClamorCluster, directory: Path, script: str) -> str:
    """What it prints; it has a directory of its own, and the lab's cluster."""
    path = directory / "example.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=directory,
        env={
            **os.environ,
            **cluster.lab.environment,
            # `clamor` and `python` are those of this environment.
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("page", sorted(SCRIPTS))
def test_examples_run_by_themselves(
    clamor_cluster: ClamorCluster, tmp_path: Path, page: str
) -> None:
    run(clamor_cluster, tmp_path, SCRIPTS[page].format(*examples(DOCS / page, BY_ITSELF)))


@pytest.mark.parametrize("page", ALONE, ids=name_of)
def test_the_examples_run(clamor_cluster: ClamorCluster, tmp_path: Path, page: Path) -> None:
    printed = run(clamor_cluster, tmp_path, script_of(page))
    prints_stats = page.name in ("guide.md", "memory.md")
    assert (re.search("node +home", printed) is not None) == prints_stats


def test_the_examples_of_short_pages_run(clamor_cluster: ClamorCluster, tmp_path: Path) -> None:
    printed = run(clamor_cluster, tmp_path, script_of_all(TOGETHER))
    assert re.findall(r"^page (.*)$", printed, re.M) == [name_of(page) for page in TOGETHER]
    assert "[45, 99999945]" in printed  # what get-started.md says that it prints


@pytest.mark.parametrize("page", SHORT, ids=lambda page: page.name)
def test_the_examples_are_short(page: Path) -> None:
    for example in (*examples(page), *examples(page, BY_ITSELF)):
        assert len([line for line in example.splitlines() if line.strip()]) <= 20


def test_the_readme_takes_two_minutes() -> None:
    assert len(README.read_text().splitlines()) < 150
