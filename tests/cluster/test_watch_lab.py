"""`ref.on_update` and `aio.watch` on two nodes: commits anywhere, kills of what tells of them."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import clamor_ray as clamor
from clamor_ray import errors
from clamor_ray._session import process_sessions
from tests.conftest import ANSWER_S, ClamorCluster, until
from tests.support import driver_script
from tests.support.lab.cluster import node_resource
from tests.support.lab.troubles import registry_pid, server_pid

pytestmark = pytest.mark.lab

N = 1 << 16


@pytest.fixture(params=[N, 10], ids=["region", "inline"])
def ref(clamor_cluster: ClamorCluster, request: pytest.FixtureRequest) -> Iterator[Any]:
    ref = clamor.put(np.zeros(request.param))
    yield ref
    clamor.free(ref)


def change(refs: list[Any]) -> int:
    with clamor.update(refs[0]) as x:
        x[0] += 1
    return int(refs[0].version)


class Watcher:
    """A process of the other node that watches."""

    def __init__(self, refs: list[Any]) -> None:
        self.ref = refs[0]
        self.versions: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.watch = self.ref.on_update(self.versions.put)

    def next(self, at_least: int) -> int:
        while (version := self.versions.get(timeout=ANSWER_S)) < at_least:
            pass
        return version

    def error(self) -> str:
        until(lambda: self.watch.error is not None)
        return type(self.watch.error).__name__

    def in_aio(self, until_version: int) -> list[int]:
        async def work() -> list[int]:
            found = []
            async for version in clamor.aio.watch(self.ref, timeout=ANSWER_S):
                found.append(version)
                if version >= until_version:
                    break
            assert (await clamor.aio.refresh(self.ref)).version >= until_version
            return found

        return asyncio.run(work())


@pytest.fixture
def there(ref: Any) -> Iterator[Callable[..., Any]]:
    """Calls a method of a watcher on the other node."""
    import ray

    actor: Any = (
        ray.remote(Watcher)
        .options(num_cpus=0, resources={node_resource(1): 0.001}, max_concurrency=4)
        .remote([ref])
    )
    assert ray.get(actor.__ray_ready__.remote(), timeout=ANSWER_S)
    yield lambda method, *args: ray.get(getattr(actor, method).remote(*args), timeout=ANSWER_S)
    ray.kill(actor)


def test_commits_of_both_nodes_are_heard_of_on_both(
    clamor_cluster: ClamorCluster, ref: Any, there: Callable[..., Any]
) -> None:
    import ray

    here: queue.SimpleQueue[int] = queue.SimpleQueue()
    watch = ref.on_update(here.put)
    assert change([ref]) == here.get(timeout=ANSWER_S) == there("next", 1) == 1
    task = clamor_cluster.remote(lambda refs: change(refs))  # of the other node
    assert ray.get(task.remote([ref]), timeout=ANSWER_S) == 2
    assert here.get(timeout=ANSWER_S) == there("next", 2) == 2
    assert ref.version == 1  # to hear of it moves nothing
    assert there("in_aio", 2) == [2]  # the newest at once, for who is behind
    watch.cancel()
    clamor.free(ref)
    assert there("error") == "FreedError"


def test_a_coroutine_hears_of_each_version(ref: Any) -> None:
    before = ref.snapshot()

    async def work() -> None:
        versions = clamor.aio.watch(before, timeout=ANSWER_S)
        for number in range(1, 4):
            await asyncio.to_thread(change, [ref])
            assert await anext(versions) == number
        clamor.free(ref)
        with pytest.raises(errors.FreedError):
            await anext(versions)
        quiet = clamor.aio.watch(clamor.put(1), timeout=0.01)
        with pytest.raises(errors.WaitTimeoutError, match=r"no newer version for 0\.01 s"):
            await anext(quiet)
        with pytest.raises(errors.FreedError):
            await anext(clamor.aio.watch(ref))

    asyncio.run(asyncio.wait_for(work(), 2 * ANSWER_S))
    until(lambda: not process_sessions.current().news._watches)


@pytest.mark.parametrize("victim", ["registry", "page server here", "page server there"])
def test_a_kill_loses_no_update(
    clamor_cluster: ClamorCluster, ref: Any, there: Callable[..., Any], victim: str
) -> None:
    here: queue.SimpleQueue[int] = queue.SimpleQueue()
    watch = ref.on_update(here.put)
    assert change([ref]) == here.get(timeout=ANSWER_S) == there("next", 1) == 1
    if victim == "registry":
        os.kill(registry_pid(), signal.SIGKILL)
    else:
        node = 0 if victim == "page server here" else 1
        os.kill(server_pid(clamor_cluster.lab, node), signal.SIGKILL)
    assert change([ref]) == 2  # as soon as it can be made
    assert here.get(timeout=ANSWER_S) == there("next", 2) == 2
    assert change([ref]) == here.get(timeout=ANSWER_S) == there("next", 3) == 3
    assert watch.error is None
    watch.cancel()


ENDED = """
import subprocess
import sys
import threading
import numpy as np
import ray
import clamor_ray as clamor
from clamor_ray import errors

DRIVER = '''
import sys
import numpy as np
import ray
import clamor_ray as clamor
ray.init(address=sys.argv[1], namespace="watch", log_to_driver=False)
clamor.init()
watcher = ray.get_actor("watcher")
ref = clamor.put(np.zeros(10**5))
ray.get(watcher.watch.remote([ref]), timeout=100)
clamor.add_at(ref, [0], 1.0)
print(ray.get(watcher.heard.remote(), timeout=100))
'''


@ray.remote(num_cpus=0)
class Watcher:
    def watch(self, refs):
        import queue
        self.versions = queue.SimpleQueue()
        self.on = refs[0].on_update(self.versions.put)
        self.ended = threading.Event()
        self.other = threading.Thread(target=self.wait, args=refs)
        self.other.start()

    def wait(self, ref):
        import asyncio

        async def wait():
            async for version in clamor.aio.watch(ref):
                pass

        try:
            asyncio.run(wait())
        except errors.SessionEndedError:
            self.ended.set()

    def heard(self):
        return self.versions.get(timeout=100)

    def error(self):
        assert self.ended.wait(100)
        return type(self.on.error).__name__


ray.init(namespace="watch")
watcher = Watcher.options(name="watcher").remote()
driver = [sys.executable, "-c", DRIVER, ray.get_runtime_context().gcs_address]
done = subprocess.run(driver, capture_output=True, text=True, timeout=200)
said = [line for line in done.stdout.splitlines() if not line.startswith("(")]  # as Ray's logs do
assert said == ["1"], done.stdout + done.stderr
assert ray.get(watcher.error.remote(), timeout=200) == "SessionEndedError"
clamor.init()
ref = clamor.put(np.zeros(10**5))
watch = ref.on_update(print)
clamor.shutdown()
print(type(watch.error).__name__)
"""


def test_the_end_of_the_session_is_heard(clamor_cluster: ClamorCluster) -> None:
    printed = driver_script.run(ENDED, timeout_s=300, lab=clamor_cluster.lab)
    said = [line for line in printed.splitlines() if not line.startswith("(")]
    assert said[-1] == "SessionEndedError"
