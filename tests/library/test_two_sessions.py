"""Several sessions in one process: at once, one after the other, of two clusters."""

from __future__ import annotations

import pytest

from tests.conftest import ClamorCluster
from tests.support import driver_script

pytestmark = pytest.mark.lab

COMMON = """
import subprocess
import sys
import numpy as np
import ray
import clamor_ray as clamor
from clamor_ray._session import process_sessions
from tests.support.driver_script import lines_of


def span(array):
    start = array.__array_interface__["data"][0]
    return range(start, start + array.nbytes)


def apart(*arrays):
    spans = sorted((s.start, s.stop) for s in map(span, arrays))
    return all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))
"""

ACTOR = (
    COMMON
    + """
OTHER = '''
import sys
import numpy as np
import ray
import clamor_ray as clamor
ray.init(address=sys.argv[1], namespace="several", log_to_driver=False)
clamor.init()
keeper = ray.get_actor("keeper")
mine = clamor.put(np.full(10**6, float(sys.argv[2])))
small = clamor.put([1, 2])
print(ray.get(keeper.use.remote([mine, small]), timeout=60))
theirs = ray.get(keeper.make.remote(), timeout=60)[0]   # of the actor's own session
print(theirs.get()[0], theirs._scope != mine._scope, clamor.put(1)._scope == mine._scope)
print(mine.get()[0] == float(sys.argv[2]))
'''


@ray.remote
class Keeper:
    def __init__(self):
        self.kept = []

    def use(self, refs):
        ref = refs[0]
        array = ref.get()
        assert refs[1].get() == [1, 2]
        with clamor.update(ref) as x:
            x[1] = -1
        newest = ref._latest().get()
        assert newest[1] == -1 and array[1] != -1
        assert clamor.gather(newest, [0, 1, 2]).tolist() == newest[:3].tolist()
        clamor.prefetch(newest)
        self.kept += [array, newest]
        assert apart(*self.kept), [span(a) for a in self.kept]
        return ref._region, float(array[0])

    def make(self):
        return [clamor.put(np.full(10**6, 5.0))]

    def held(self):
        # The first and the last elements of all arrays.
        values = [float(a[0]) for a in self.kept] + [float(a[-1]) for a in self.kept]
        return values

    def look(self, view):
        return float(view.sum())


ray.init(namespace="several")
clamor.init()
keeper = Keeper.options(name="keeper", num_cpus=0, resources={"node0": 0.001}).remote()
ref = clamor.put(np.full(10**6, 7.0))
ids = [ray.get(keeper.use.remote([ref, clamor.put([1, 2])]), timeout=60)[0]]
for number in (8, 9):  # each a session of its own, which ends
    other = [sys.executable, "-c", OTHER, ray.get_runtime_context().gcs_address, str(number)]
    done = subprocess.run(other, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    used, made, own = lines_of(done.stdout)[-3:]
    region, first = eval(used)
    assert first == number and made == "5.0 True True" and own == "True", done.stdout
    ids.append(region)
values = ray.get(keeper.held.remote(), timeout=60)
assert values == [7, 7, 8, 8, 9, 9] * 2, values
assert len(set(ids)) == 3, ids
# The first session goes on, in the actor too.
assert ray.get(keeper.look.remote(ref.get()[:1000]), timeout=60) == 7000
clamor.free(ref)
print("kept")
"""
)


def test_an_actor_that_uses_sessions_of_several_drivers(clamor_cluster: ClamorCluster) -> None:
    """Each array shows its own session's bytes, while there are others and after their ends."""
    assert "kept" in driver_script.run(ACTOR, lab=clamor_cluster.lab)


AGAIN = (
    COMMON
    + """
ray.init()


@ray.remote(num_cpus=0, resources={"node0": 0.001})
class Worker:
    kept = []

    def use(self, refs):
        self.kept.append(refs[0].get())
        assert apart(*self.kept)
        return [float(a[0]) for a in self.kept], clamor.put(np.zeros(9999))._scope


worker = Worker.remote()
kept, ids = [], []
for number in range(4):
    scope = clamor.init().scope
    ref = clamor.put(np.full(10**6, float(number)))
    values, made = ray.get(worker.use.remote([ref]), timeout=60)
    assert values == list(range(number + 1)), values
    assert made == scope  # and not an ended session's
    kept.append(ref.get())
    with clamor.update(ref) as x:
        x[1] = -1
    kept.append(ref.get())  # a second version, at an address of the kernel's choice
    kept.append(ref.get(mode="c"))
    kept[-1][0] = -2
    ids.append(ref._region)
    assert apart(*kept), [span(a) for a in kept]
    clamor.shutdown()
assert len(set(ids)) == 4
# What nobody looks into any more is given back.
n_left = len([session for session in process_sessions._over if len(session.leases)])
assert n_left == 4, n_left
assert [float(a.sum()) for a in kept[::3]] == [number * 1e6 for number in range(4)]
starts = [span(a).start for a in kept]
del kept
lines = [line.split("-")[0] for line in open("/proc/self/maps")]
assert not {f"{start & ~4095:x}" for start in starts} & set(lines)
print("again")
"""
)


def test_one_driver_one_session_after_the_other(clamor_cluster: ClamorCluster) -> None:
    assert "again" in driver_script.run(AGAIN, lab=clamor_cluster.lab)


CLUSTERS = (
    COMMON
    + """
from tests.support.lab.cluster import bare_cluster

kept = []
for number in range(2):
    with bare_cluster():
        clamor.init()
        ref = clamor.put(np.full(10**6, float(number)))
        kept.append(ref.get())
        assert kept[-1][0] == number and apart(*kept)
print("clusters")
"""
)


def test_sessions_of_two_clusters() -> None:
    """They know nothing of each other, and the driver's arrays of both stay apart."""
    assert "clusters" in driver_script.run(CLUSTERS, timeout_s=280)


OUTLIVES = (
    COMMON
    + """
import gc
import warnings
from clamor_ray._session import process_sessions, shutdown

warnings.simplefilter("error")
ray.init()
clamor.init()


@ray.remote(num_cpus=0, resources={"node1": 0.001})
def make():
    return clamor.put(np.arange(10**6))


modes = ("r", "c")
refs = [clamor.put(np.full(10**6, 7.0)), *ray.get([make.remote() for _ in modes], timeout=100)]
here = [refs[0].get(mode) for mode in modes]
there = [ref.get(mode) for ref, mode in zip(refs[1:], modes)]
assert [array[5] for array in there] == [5, 5]  # of the rest nothing is here
there[1][6] = -6
clamor.shutdown()
clamor.shutdown()
clamor.init()
other = clamor.put(np.full(10**6, 9.0)).get()
assert other.sum() == 9e6
assert [array.sum() for array in here] == [7e6, 7e6]
assert all((array[[3, 77]] == 7).all() for array in here)
total = 10**6 * (10**6 - 1) // 2
assert [array.sum() for array in there] == [total, total - 12]
assert apart(*here, *there, other)
(over,) = process_sessions._over
del here[0], there[0]
gc.collect()
assert here[0].sum() == 7e6 and there[0].sum() == total - 12  # those of one mode keep it
assert over._client is not None
del here, there
gc.collect()
clamor.shutdown()  # nothing looks into the first any more: it is closed
assert over._client is None and over not in process_sessions._over
assert other.sum() == 9e6
print("it reads")
"""
)


@pytest.mark.parametrize("trap", ["uffd", "sigsegv"])
def test_arrays_stay_readable_when_their_driver_ends_its_session(
    trap: str, clamor_cluster: ClamorCluster
) -> None:
    """Those to read, and those whose changes are the process's own."""
    done = driver_script.start(OUTLIVES, lab=clamor_cluster.lab, CLAMOR_TRAP=trap)
    assert "it reads" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stderr


ABSENT = (
    COMMON
    + """
import warnings
from clamor_ray import errors
from clamor_ray._session import shutdown

ray.init()
clamor.init()


@ray.remote(num_cpus=0, resources={"node1": 0.001})
def make():
    return clamor.put(np.arange(10**6))


array = ray.get(make.remote(), timeout=100).get()
here = clamor.put(np.full(10**5, 3.0)).get()
assert array[5] == 5
shutdown.LAST_FETCH_S = 0.0
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    clamor.shutdown(force=True)
(warning,) = [w for w in caught if issubclass(w.category, errors.ClamorWarning)]
assert "Blocks of 1 object that" in str(warning.message), warning.message
assert warning.filename == "<string>", warning.filename  # this script
assert array[5] == 5 and (array[[3, 5]] == [3, 5]).all() and here.sum() == 3e5
sys.stdout.write("it has 5 ")
sys.stdout.flush()
sys.stdout.write(f"it reads {array[999_999]}")
"""
)


@pytest.mark.parametrize("trap", ["uffd", "sigsegv"])
def test_what_did_not_come_in_time_names_the_cause(
    trap: str, clamor_cluster: ClamorCluster
) -> None:
    done = driver_script.start(ABSENT, lab=clamor_cluster.lab, CLAMOR_TRAP=trap)
    assert "it has 5" in done.stdout, done.stdout + done.stderr
    assert "it reads" not in done.stdout
    assert done.returncode == 70, done.stdout + done.stderr
    assert "session has ended" in done.stderr


REFUSED = (
    COMMON
    + """
from clamor_ray import errors
from clamor_ray._session import shutdown

ray.init()
clamor.init()


@ray.remote(num_cpus=0, resources={"node1": 0.001})
def make():
    return clamor.put(np.arange(10**6))


ref = ray.get(make.remote(), timeout=100)
array, scope = ref.get(), process_sessions.current().scope
assert array[5] == 5
shutdown.LAST_FETCH_S = 0.0
for _ in range(2):
    try:
        clamor.shutdown()
    except errors.ObjectsInUseError as error:
        assert "1 object that this process holds" in str(error), error
        assert "clamor.shutdown(force=True)" in str(error), error
    else:
        raise AssertionError("it ended")
    # As if nobody had called it.
    assert clamor.init().scope == scope
    assert ref.refresh().version == 0 and ref.get()[7] == 7
    assert ray.get(make.remote(), timeout=100).get()[9] == 9
    assert clamor.put(np.full(10**5, 2.0)).get().sum() == 2e5
assert (array == np.arange(10**6)).all()
clamor.shutdown()  # nothing is missing now
assert (array == np.arange(10**6)).all()
assert clamor.init().scope != scope
array = ray.get(make.remote(), timeout=100).get()
if LETS_GO:
    del array
    clamor.shutdown()
print("it went on")
"""
)


@pytest.mark.parametrize("trap", ["uffd", "sigsegv"])
def test_shutdown_refuses_where_blocks_are_missing(
    trap: str, clamor_cluster: ClamorCluster
) -> None:
    script = REFUSED.replace("LETS_GO", str(trap == "uffd"))  # else it ends with the process
    done = driver_script.start(script, lab=clamor_cluster.lab, CLAMOR_TRAP=trap)
    assert "it went on" in done.stdout, done.stdout + done.stderr
    assert done.returncode == 0, done.stdout + done.stderr


CROWDED = (
    COMMON
    + """
from clamor_ray import errors

ray.init()
clamor.init(cache_bytes="16MiB")


@ray.remote(num_cpus=0, resources={"node1": 0.001})
def make():
    return clamor.put(np.arange(12 << 17))  # 12 MiB


refs = [ray.get(make.remote(), timeout=100) for _ in range(2)]
first, second = (ref.get() for ref in refs)
try:
    clamor.shutdown()
except errors.ObjectsInUseError as error:
    assert "room" in str(error), error
else:
    raise AssertionError("what came last has pushed out what was here")
del second
clamor.free(refs[1])
try:
    with clamor.build(1 << 20) as region:
        built = region.zeros(1000)
        raise KeyError
except KeyError:
    pass
clamor.shutdown()  # there is room now; what was built and not sealed is nobody's
assert (first == np.arange(12 << 17)).all()
print("it went on")
"""
)


def test_shutdown_refuses_where_not_all_has_room(clamor_cluster: ClamorCluster) -> None:
    assert "it went on" in driver_script.run(CROWDED, lab=clamor_cluster.lab)


RAY_ENDS = (
    COMMON
    + """
import warnings
from clamor_ray import errors
from clamor_ray._session import shutdown


@ray.remote(num_cpus=0, resources={"node1": 0.001})
def make():
    return clamor.put(np.arange(10**6))


scopes = set()
for comes in (True, False):
    ray.init()
    scopes.add(clamor.init().scope)
    array = ray.get(make.remote(), timeout=100).get()
    assert array[5] == 5
    shutdown.LAST_FETCH_S = 10.0 * comes
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ray.shutdown()
    assert not ray.is_initialized()
    said = [str(w.message) for w in caught if issubclass(w.category, errors.ClamorWarning)]
    if comes:
        assert said == [] and (array == np.arange(10**6)).all()
    else:
        assert "Blocks of 1 object" in said[0] and array[5] == 5
    try:
        clamor.put(np.zeros(10**5))
    except errors.NotInitializedError:
        pass
    else:
        raise AssertionError("there is a session")
assert len(scopes) == 2
print("it went on")
"""
)


def test_arrays_stay_readable_after_ray_shutdown(clamor_cluster: ClamorCluster) -> None:
    """As in a notebook that ends Ray, and not the session."""
    assert "it went on" in driver_script.run(RAY_ENDS, lab=clamor_cluster.lab)


INTERRUPTED = (
    COMMON
    + """
import warnings
from clamor_ray import errors
from clamor_ray._session import shutdown

ray.init()
clamor.init()


@ray.remote(num_cpus=0, resources={"node1": 0.001})
def make():
    return clamor.put(np.arange(10**6))


array = ray.get(make.remote(), timeout=100).get()
shutdown.LAST_FETCH_S = 0.0
scope = process_sessions.current().scope
warnings.simplefilter("error")
try:
    clamor.shutdown(force=True)
except errors.ClamorWarning:
    pass
else:
    raise AssertionError("it did not warn")
from clamor_ray._protocol import ray_state
assert ray_state.find_registry(scope) is None  # it has ended all the same
assert clamor.init().scope != scope
print("ended")
"""
)


def test_a_warning_that_raises_leaves_no_session(clamor_cluster: ClamorCluster) -> None:
    assert "ended" in driver_script.run(INTERRUPTED, lab=clamor_cluster.lab)
