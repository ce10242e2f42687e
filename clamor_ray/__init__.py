"""Global variables that Ray tasks page in on demand.

    import clamor_ray as clamor

    clamor.init()
    ref = clamor.put(big_object)

    @clamor.remote
    def work(big_object, part): ...

    ray.get([work.remote(ref, part) for part in parts])

Only the blocks that a task touches cross the network, and each reaches a node once.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from clamor_ray import errors
from clamor_ray._version import __version__

if TYPE_CHECKING:
    from clamor_ray._prefetch import prefetch as prefetch
    from clamor_ray._ref import GlobalRef as GlobalRef
    from clamor_ray._remote import remote as remote
    from clamor_ray._session import InitResult as InitResult
    from clamor_ray._session import free as free
    from clamor_ray._session import init as init
    from clamor_ray._session import put as put
    from clamor_ray._session import share as share
    from clamor_ray._session import shutdown as shutdown
    from clamor_ray._session import zeros as zeros
    from clamor_ray._stats import block_map as block_map
    from clamor_ray._stats import stats as stats

__all__ = [
    "init",
    "put",
    "zeros",
    "share",
    "remote",
    "prefetch",
    "free",
    "stats",
    "block_map",
    "shutdown",
    "GlobalRef",
    "InitResult",
    "errors",
    "__version__",
]

# Ray, NumPy and cloudpickle are loaded when something of them is first used.
_HOMES = {
    "GlobalRef": "_ref",
    "InitResult": "_session",
    "free": "_session",
    "block_map": "_stats",
    "init": "_session",
    "prefetch": "_prefetch",
    "put": "_session",
    "remote": "_remote",
    "share": "_session",
    "shutdown": "_session",
    "stats": "_stats",
    "zeros": "_session",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"clamor_ray.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
