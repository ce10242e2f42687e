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
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from clamor_ray import errors
from clamor_ray._version import __version__

if TYPE_CHECKING:
    from clamor_ray import aio as aio
    from clamor_ray._adds import accumulate as accumulate
    from clamor_ray._adds import add_at as add_at
    from clamor_ray._adds import maximum_at as maximum_at
    from clamor_ray._adds import minimum_at as minimum_at
    from clamor_ray._driver import init as init
    from clamor_ray._driver import shutdown as shutdown
    from clamor_ray._gather import gather as gather
    from clamor_ray._group import AllReduceGroup as AllReduceGroup
    from clamor_ray._hashmap import HashMap as HashMap
    from clamor_ray._pointer import Pointer as Pointer
    from clamor_ray._prefetch import prefetch as prefetch
    from clamor_ray._reads import reads as reads
    from clamor_ray._ref import GlobalRef as GlobalRef
    from clamor_ray._region import Region as Region
    from clamor_ray._region import region as region
    from clamor_ray._remote import remote as remote
    from clamor_ray._retry import retry as retry
    from clamor_ray._starting import InitResult as InitResult
    from clamor_ray._stats import block_map as block_map
    from clamor_ray._stats import stats as stats
    from clamor_ray._surface import free as free
    from clamor_ray._surface import put as put
    from clamor_ray._surface import share as share
    from clamor_ray._surface import zeros as zeros
    from clamor_ray._transaction import Transaction as Transaction
    from clamor_ray._transaction import transaction as transaction
    from clamor_ray._transaction import update as update
    from clamor_ray._views import views_by_value as views_by_value
    from clamor_ray.collection.collection import DataCollection as DataCollection
    from clamor_ray.collection.read import from_arrow as from_arrow
    from clamor_ray.collection.read import from_items as from_items
    from clamor_ray.collection.read import from_numpy as from_numpy
    from clamor_ray.collection.read import from_ray_dataset as from_ray_dataset
    from clamor_ray.collection.read import read_csv as read_csv
    from clamor_ray.collection.read import read_npy as read_npy
    from clamor_ray.collection.read import read_parquet as read_parquet
    from clamor_ray.collection.read import read_text as read_text

__all__ = [
    "init",
    "put",
    "zeros",
    "share",
    "region",
    "update",
    "transaction",
    "retry",
    "add_at",
    "maximum_at",
    "minimum_at",
    "accumulate",
    "remote",
    "prefetch",
    "gather",
    "aio",
    "views_by_value",
    "free",
    "stats",
    "block_map",
    "reads",
    "shutdown",
    "from_items",
    "from_numpy",
    "from_arrow",
    "from_ray_dataset",
    "read_parquet",
    "read_csv",
    "read_text",
    "read_npy",
    "AllReduceGroup",
    "DataCollection",
    "GlobalRef",
    "HashMap",
    "Transaction",
    "InitResult",
    "Pointer",
    "Region",
    "errors",
    "__version__",
]

# Ray, NumPy and cloudpickle are loaded when something of them is first used.
_HOMES = {
    "AllReduceGroup": "_group",
    "DataCollection": "collection.collection",
    "GlobalRef": "_ref",
    "HashMap": "_hashmap",
    "InitResult": "_starting",
    "Pointer": "_pointer",
    "Region": "_region",
    "Transaction": "_transaction",
    "accumulate": "_adds",
    "add_at": "_adds",
    "free": "_surface",
    "block_map": "_stats",
    "gather": "_gather",
    "init": "_driver",
    "maximum_at": "_adds",
    "minimum_at": "_adds",
    "prefetch": "_prefetch",
    "region": "_region",
    "put": "_surface",
    "reads": "_reads",
    "remote": "_remote",
    "retry": "_retry",
    "share": "_surface",
    "shutdown": "_driver",
    "stats": "_stats",
    "transaction": "_transaction",
    "update": "_transaction",
    "views_by_value": "_views",
    "zeros": "_surface",
    "from_arrow": "collection.read",
    "from_items": "collection.read",
    "from_numpy": "collection.read",
    "from_ray_dataset": "collection.read",
    "read_csv": "collection.read",
    "read_npy": "collection.read",
    "read_parquet": "collection.read",
    "read_text": "collection.read",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if name == "aio":
        return importlib.import_module("clamor_ray.aio")
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"clamor_ray.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
