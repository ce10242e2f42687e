"""Global variables that Ray tasks page in on demand.

    import clamor_ray as clamor

    clamor.init()
    ref = clamor.put(big_object)

    @clamor.remote
    def work(big_object, part): ...

    ray.get([work.remote(ref, part) for part in parts])

Only the blocks that a task touches cross the network, and each reaches a node once.

    with clamor.update(ref) as x:
        x[ids] += delta

makes the next version, in place: only the changed blocks travel, and old versions stay readable.

The examples in docstrings begin after this:

    import clamor_ray as clamor
    import numpy as np
    import ray

    clamor.init()
"""

import importlib

import lazy_loader

from clamor_ray._programs import collections as _collections
from clamor_ray._read import opener as _opener

# Ray, NumPy and cloudpickle are loaded when something of them is first used. The names, and where
# they are, are in __init__.pyi.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ = [name for name in __all__ if name != "open"]  # Python's own is not hidden by a star

_collections.load_by(lambda: importlib.import_module("clamor_ray.collection.io.programs"))

# What unpickled a reference has loaded no more than that.
_opener.load_by(lambda: importlib.import_module("clamor_ray._session.process_sessions"))
