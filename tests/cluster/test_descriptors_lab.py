"""A page server that runs out of file descriptors: it says so, and nothing is taken for lost."""

from __future__ import annotations

import contextlib
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._session.process_sessions import current
from tests.conftest import until
from tests.support.lab import LocalCluster, local_cluster, require_lab
from tests.support.lab.cluster import node_resource

pytestmark = pytest.mark.lab

LIMIT = 256
KEPT_BACK = LIMIT // 8
REFUSED_S = 10.0  # a commit's deadline is 48 s
TASK_S = 120.0  # beyond what a page server waits for a peer before it gives it up
ITEMS = 1024


@pytest.fixture(scope="module")
def lab() -> Iterator[LocalCluster]:
    require_lab("local")
    with local_cluster(2, num_cpus=1) as lab:
        yield lab


@pytest.fixture
def nodes(lab: LocalCluster) -> Iterator[LocalCluster]:
    """With a session, whose page servers a test may limit: they end with it."""
    clamor.init()
    try:
        yield lab
    finally:
        clamor.shutdown()


def limit(pid: int, n: int) -> None:
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (n, hard))


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def put_until_it_is_refused() -> tuple[list[Any], errors.DescriptorLimitError]:
    refs: list[Any] = []
    for n in range(LIMIT):
        try:
            refs.append(clamor.put(np.full(ITEMS, n)))
        except errors.DescriptorLimitError as refused:
            return refs, refused
    pytest.fail(f"{LIMIT} variables in a process that may have {LIMIT} descriptors")


@ray.remote(num_cpus=0)
def read(refs: list[Any]) -> tuple[list[int], str]:
    """What each holds; and the error, where one cannot be had."""
    found: list[int] = []
    held: list[Any] = []
    try:
        for ref in refs:
            held.append(ref.get())
            found.append(int(held[-1][-1]))
    except errors.DescriptorLimitError as refused:
        return found, str(refused)
    return found, ""


@ray.remote(num_cpus=0)
def change(refs: list[Any]) -> tuple[str, float]:
    """What a commit to the first of them says at once, and after how many seconds. The others are
    freed then, and the same transaction is committed."""
    update = clamor.update(refs[0])
    update.begin()[:] = LIMIT
    began_s = time.monotonic()
    try:
        update.commit()
    except errors.ClamorError as failure:
        said, after_s = str(failure), time.monotonic() - began_s
        for ref in refs[1:]:
            clamor.free(ref)

        def fits() -> bool:
            with contextlib.suppress(errors.DescriptorLimitError):
                update.commit()
                return True
            return False

        until(fits)  # their descriptors are closed soon after
        return said, after_s
    return "", 0.0


def says_which_limit(text: str) -> bool:
    return "page server" in text and "RLIMIT_NOFILE" in text and "ulimit -n" in text


def test_a_home_without_descriptors_serves_on(nodes: LocalCluster) -> None:
    home = nodes.page_server_pid(0, scope=current().scope)
    limit(home, LIMIT)
    before = descriptors(home)
    refs, refused = put_until_it_is_refused()
    assert says_which_limit(str(refused)), refused
    # One for each variable; and what is kept back is there for those that come.
    assert LIMIT - KEPT_BACK - 10 <= before + len(refs) <= LIMIT - KEPT_BACK + 10
    assert descriptors(home) <= LIMIT - KEPT_BACK
    task = read.options(resources={node_resource(1): 0.01}).remote(refs)
    assert ray.get(task, timeout=TASK_S) == (list(range(len(refs))), "")
    clamor.free(refs.pop())

    def fits() -> bool:
        with contextlib.suppress(errors.DescriptorLimitError):
            refs.append(clamor.put(np.full(ITEMS, len(refs))))
            return True
        return False

    until(fits)  # its descriptor is closed soon after
    task = read.options(resources={node_resource(1): 0.01}).remote(refs)
    assert ray.get(task, timeout=TASK_S) == (list(range(len(refs))), "")


def test_a_commit_to_a_home_without_descriptors_is_refused_at_once(nodes: LocalCluster) -> None:
    limit(nodes.page_server_pid(0, scope=current().scope), LIMIT)
    refs, _ = put_until_it_is_refused()
    task = change.options(resources={node_resource(1): 0.01}).remote(refs)
    said, after_s = ray.get(task, timeout=TASK_S)
    assert says_which_limit(said), said
    assert after_s < REFUSED_S, said
    refs[0].refresh()
    assert int(refs[0].get()[-1]) == LIMIT


def test_a_reader_without_descriptors_is_told(nodes: LocalCluster) -> None:
    refs = [clamor.put(np.full(ITEMS, n)) for n in range(LIMIT)]
    somewhere = {node_resource(1): 0.01}
    reading = read.options(resources=somewhere)
    assert ray.get(reading.remote(refs[:1]), timeout=TASK_S) == ([0], "")
    limit(nodes.page_server_pid(1, scope=current().scope), LIMIT)
    found, said = ray.get(reading.remote(refs), timeout=TASK_S)
    assert found == list(range(len(found)))
    assert 0 < len(found) < LIMIT
    assert says_which_limit(said), said
    # Nothing is lost: what is freed makes room for the others.
    for ref in refs[:60]:
        clamor.free(ref)
    until(lambda: ray.get(reading.remote(refs[-20:]), timeout=TASK_S)[1] == "")
    assert ray.get(reading.remote(refs[-20:]), timeout=TASK_S)[0] == [*range(LIMIT - 20, LIMIT)]
