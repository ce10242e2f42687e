"""What outlives its driver: a detached actor, as Serve has them, whose session has ended."""

from __future__ import annotations

import pytest

from tests.conftest import ClamorCluster
from tests.support import driver_script

pytestmark = pytest.mark.lab

SCRIPT_S = 240  # below pytest's own with the start of a cluster: that one ends this process at once

SCRIPT = """
import contextlib
import subprocess
import sys
import time
import numpy as np
import ray
import clamor_ray as clamor

DRIVER = '''
import sys
import numpy as np
import ray
import clamor_ray as clamor
from clamor_ray import errors
import time


@ray.remote(num_cpus=0, resources={"node0": 0.001})  # where the arrays are at home
class App:
    def keep(self, refs):
        self.ref = refs[0]
        self.array = self.ref.get()
        self.made = clamor.put(np.arange(10**5))
        return self.made.get()[7]

    def raised(self, what):
        calls = {
            "get": lambda: self.ref.get(),
            "latest": lambda: self.ref._latest(),
            "update": lambda: clamor.update(self.ref).__enter__(),
            "put": lambda: clamor.put(np.zeros(10**5)),
            "small": lambda: clamor.put(1).refresh(),
            "init": lambda: clamor.init(),
            "prefetch": lambda: clamor.prefetch(self.ref),
        }
        begun = time.monotonic()
        try:
            calls[what]()
        except errors.ClamorError as error:
            return type(error).__name__, str(error), time.monotonic() - begun
        return "nothing", "", time.monotonic() - begun

    def held(self):
        return float(self.array[5])

    def total(self, refs):
        with clamor.update(refs[0]) as x:
            x[0] = 100
        return float(refs[0]._latest().get()[:3].sum())


ray.init(address=sys.argv[1], namespace="outlived", log_to_driver=False)
clamor.init()
app = App.options(name="app", lifetime="detached").remote()
print(ray.get(app.keep.remote([clamor.put(np.full(10**6, 7.0))]), timeout=100))
'''

ray.init(namespace="outlived")
try:
    driver = [sys.executable, "-c", DRIVER, ray.get_runtime_context().gcs_address]
    done = subprocess.run(driver, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    app = ray.get_actor("app")
    for what in ("get", "latest", "update", "put", "small", "init", "prefetch"):
        name, text, took_s = ray.get(app.raised.remote(what), timeout=200)
        print(what, name, f"{took_s:.1f} s", text)
        assert name == "SessionEndedError", (what, name, text)
        assert "has ended" in text and "clamor.init()" not in text, text
        assert took_s < 30, (what, took_s)  # not one of the timeouts of 60 s
    # What is here of it stays right, and so does the actor: it uses any driver's session that runs.
    assert ray.get(app.held.remote(), timeout=100) == 7.0
    clamor.init()
    assert ray.get(app.total.remote([clamor.put(np.ones(10**6))]), timeout=100) == 102.0
    assert ray.get(app.held.remote(), timeout=100) == 7.0
    name, text, _ = ray.get(app.raised.remote("get"), timeout=200)
    assert name == "SessionEndedError", (name, text)
finally:  # it would outlive this test, too
    with contextlib.suppress(ValueError):  # the driver has not come so far
        ray.kill(ray.get_actor("app"))
print("outlived")
"""


SERVE_SCRIPT = """
import subprocess
import sys
import time
import ray
from ray import serve
import numpy as np
import clamor_ray as clamor

DRIVER = '''
import os
import signal
import sys
import time
import numpy as np
import ray
from ray import serve
import clamor_ray as clamor
from clamor_ray import errors


@serve.deployment(ray_actor_options={"num_cpus": 0, "resources": {"node0": 0.001}})
class App:
    def __init__(self, refs):
        self.held, self.other = refs
        self.array = self.held.get()

    def raised(self, what):
        calls = {
            "get": lambda: self.held.get(),
            "first get": lambda: self.other.get(),
            "latest": lambda: self.held._latest(),
            "refresh": lambda: self.held.refresh(),
            "at": lambda: self.held.at(0).get(),
            "update": lambda: clamor.update(self.held).__enter__(),
            "prefetch": lambda: clamor.prefetch(self.other),
            "free": lambda: clamor.free(self.held),
            "put": lambda: clamor.put(np.zeros(10**5)),
            "zeros": lambda: clamor.zeros(10**5),
            "stats": lambda: clamor.stats(),
            "init": lambda: clamor.init(),
        }
        begun = time.monotonic()
        try:
            calls[what]()
        except errors.ClamorError as error:
            return type(error).__name__, str(error), time.monotonic() - begun
        return "nothing", "", time.monotonic() - begun

    def answers(self):
        return float(self.array[:3].sum())

    def total(self, refs):
        return float(refs[0].get()[:3].sum())


address, name, end = sys.argv[1:]
ray.init(address=address, namespace="served", log_to_driver=False)
clamor.init()
serve.start(proxy_location="Disabled")
refs = [clamor.put(np.full(10**6, float(i))) for i in (7, 8)]
app = serve.run(App.bind(refs), name=name, route_prefix=None)
assert app.answers.remote().result(timeout_s=100) == 21.0
if end == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if end == "shutdown":
    clamor.shutdown()
'''

OF_A_VARIABLE = ("first get", "get", "latest", "refresh", "at", "update", "prefetch", "free")
ray.init(namespace="served", log_to_driver=False)
address = ray.get_runtime_context().gcs_address
try:
    for end, code in (("ended", 0), ("killed", -9), ("shutdown", 0)):
        driver = [sys.executable, "-c", DRIVER, address, end, end]
        done = subprocess.run(driver, capture_output=True, text=True, timeout=200)
        assert done.returncode == code, (end, done.stdout, done.stderr)
        app = serve.get_app_handle(end)
        deadline_s = time.monotonic() + 30
        while app.raised.remote("first get").result(timeout_s=200)[0] == "nothing":
            assert time.monotonic() < deadline_s  # that a driver was killed is heard of, by and by
            time.sleep(0.1)
        for what in (*OF_A_VARIABLE, "put", "zeros", "stats", "init"):
            name, text, took_s = app.raised.remote(what).result(timeout_s=200)
            print(end, what, name, f"{took_s:.1f} s", text)
            assert name == "SessionEndedError", (end, what, name, text)
            assert "has ended" in text and "clamor.init()" not in text, text
            of_one = what in OF_A_VARIABLE
            hint = "pass new references to actors" if of_one else "pass it their references"
            assert hint in text, (what, text)
            assert took_s < 30, (end, what, took_s)  # not one of the timeouts of 60 s
        # It goes on: with what is here of the old session, and with a driver that runs.
        assert app.answers.remote().result(timeout_s=100) == 21.0
    clamor.init()
    for end in ("ended", "killed", "shutdown"):
        app = serve.get_app_handle(end)
        assert app.total.remote([clamor.put(np.ones(10**6))]).result(timeout_s=100) == 3.0
finally:  # its actors would outlive this test, too
    serve.shutdown()
print("outlived")
"""


def test_a_serve_app_whose_driver_has_ended(clamor_cluster: ClamorCluster) -> None:
    """So it is where the driver was killed, or has shut its session down."""
    assert "outlived" in driver_script.run(SERVE_SCRIPT, timeout_s=SCRIPT_S, lab=clamor_cluster.lab)


def test_a_detached_actor_whose_driver_has_ended(clamor_cluster: ClamorCluster) -> None:
    """Its calls fail at once, and say what is so."""
    assert "outlived" in driver_script.run(SCRIPT, timeout_s=SCRIPT_S, lab=clamor_cluster.lab)
