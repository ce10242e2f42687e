"""The examples of the README and of every page of docs/ run as they stand, one after the other.

A block that cannot run is marked with the reason (`NOT_RUN`). What a page's examples use, and do
not make, is in `SETUP`; `CHECKS` looks at what they did. Blocks that need a driver of their own are
put together in `SCRIPTS`.
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

pytestmark = pytest.mark.lab

ROOT = Path(__file__).parents[2]
README, GUIDE, DOCS = ROOT / "README.md", ROOT / "docs" / "guide.md", ROOT / "docs"
SHORT = (README, GUIDE)  # they begin with what they need, for who pastes them
MARK = "<!-- executed by tests/project/test_readme.py -->"
BY_ITSELF = "<!-- executed by itself by tests/project/test_readme.py -->"  # a script of its own
NOT_RUN: Final = re.compile(r"<!-- not run: (\S.*\S) -->")
BLOCK: Final = re.compile(
    r"(?:^(?P<mark>[^\n]*)\n)?^```(?:python|py|pycon)\n(?P<code>.*?)^```", re.M | re.S
)

COMMON = """
import ctypes
import numpy as np
import ray
import clamor_ray as clamor
ray.init()
clamor.init()
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


def blocks(page: Path) -> list[tuple[str, str]]:
    """(the line before it, the code) of each block of Python."""
    return [(found["mark"] or "", found["code"]) for found in BLOCK.finditer(page.read_text())]


def examples(page: Path, wanted: str = MARK) -> list[str]:
    return [code for mark, code in blocks(page) if mark == wanted]


PAGES = [page for page in (README, *sorted(DOCS.glob("*.md"))) if blocks(page)]


def script_of(page: Path) -> str:
    first, *others = examples(page)
    if page in SHORT:
        return "\n".join([first, CHECKS_FIRST.get(page.name, ""), *others])
    if page.name in IN_ACTORS:
        code = "\n".join([first, *others])
        return f"{COMMON}CODE = {code!r}\n{IN_ACTORS[page.name]}"
    return "\n".join([COMMON, SETUP[page.name], first, *others, CHECKS[page.name]])


def test_each_block_is_run_or_says_why_not() -> None:
    for page in PAGES:
        for mark, code in blocks(page):
            assert mark in (MARK, BY_ITSELF) or NOT_RUN.fullmatch(mark), f"{page}: {code}"
        assert bool(examples(page, BY_ITSELF)) == (page.name in SCRIPTS)
    for page in (README, *DOCS.glob("*.md")):
        text = page.read_text()
        # None is hidden by the way it is written, and no mark is over something else.
        assert len(re.findall(r"^[ \t]*```[ \t]*py", text, re.M | re.I)) == len(blocks(page)), page
        n_marks = text.count(MARK) + text.count(BY_ITSELF) + len(NOT_RUN.findall(text))
        assert n_marks == len(blocks(page)), page


def run(cluster: ClamorCluster, directory: Path, script: str) -> str:
    """What it prints; it has a directory of its own, and the lab's cluster."""
    path = directory / "example.py"
    path.write_text(script)
    done = subprocess.run(
        [sys.executable, str(path)],
        cwd=directory,
        env={**os.environ, **cluster.lab.environment},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("page", sorted(SCRIPTS))
def test_examples_run_by_themselves(
    clamor_cluster: ClamorCluster, tmp_path: Path, page: str
) -> None:
    run(clamor_cluster, tmp_path, SCRIPTS[page].format(*examples(DOCS / page, BY_ITSELF)))


@pytest.mark.parametrize("page", list(filter(examples, PAGES)), ids=lambda page: page.name)
def test_the_examples_run(clamor_cluster: ClamorCluster, tmp_path: Path, page: Path) -> None:
    printed = run(clamor_cluster, tmp_path, script_of(page))
    prints_stats = page.name in ("guide.md", "memory.md")
    assert (re.search("node +home", printed) is not None) == prints_stats


@pytest.mark.parametrize("page", SHORT, ids=lambda page: page.name)
def test_the_examples_are_short(page: Path) -> None:
    for example in (*examples(page), *examples(page, BY_ITSELF)):
        assert len([line for line in example.splitlines() if line.strip()]) <= 20


def test_the_readme_takes_two_minutes() -> None:
    assert len(README.read_text().splitlines()) < 150
