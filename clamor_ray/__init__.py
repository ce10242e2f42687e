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
    from clamor_ray._build.region import Region as Region
    from clamor_ray._build.region import region as region
    from clamor_ray._objects.pointer import Pointer as Pointer
    from clamor_ray._read.access_report import reads as reads
    from clamor_ray._read.gather import gather as gather
    from clamor_ray._read.hashmap import HashMap as HashMap
    from clamor_ray._read.prefetch import prefetch as prefetch
    from clamor_ray._read.ref import GlobalRef as GlobalRef
    from clamor_ray._read.views import views_by_value as views_by_value
    from clamor_ray._ring.group import AllReduceGroup as AllReduceGroup
    from clamor_ray._session.driver import init as init
    from clamor_ray._session.driver import shutdown as shutdown
    from clamor_ray._session.starting import InitResult as InitResult
    from clamor_ray._session.stats import block_map as block_map
    from clamor_ray._session.stats import stats as stats
    from clamor_ray._session.surface import free as free
    from clamor_ray._session.surface import put as put
    from clamor_ray._session.surface import share as share
    from clamor_ray._session.surface import zeros as zeros
    from clamor_ray._tasks.remote import remote as remote
    from clamor_ray._write.retry import retry as retry
    from clamor_ray._write.scatter_add import accumulate as accumulate
    from clamor_ray._write.scatter_add import add_at as add_at
    from clamor_ray._write.scatter_add import maximum_at as maximum_at
    from clamor_ray._write.scatter_add import minimum_at as minimum_at
    from clamor_ray._write.transaction import Transaction as Transaction
    from clamor_ray._write.transaction import transaction as transaction
    from clamor_ray._write.transaction import update as update
    from clamor_ray.collection.collection import DataCollection as DataCollection
    from clamor_ray.collection.io.read import from_arrow as from_arrow
    from clamor_ray.collection.io.read import from_items as from_items
    from clamor_ray.collection.io.read import from_numpy as from_numpy
    from clamor_ray.collection.io.read import from_ray_dataset as from_ray_dataset
    from clamor_ray.collection.io.read import read_csv as read_csv
    from clamor_ray.collection.io.read import read_npy as read_npy
    from clamor_ray.collection.io.read import read_parquet as read_parquet
    from clamor_ray.collection.io.read import read_text as read_text

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
    "AllReduceGroup": "_ring.group",
    "DataCollection": "collection.collection",
    "GlobalRef": "_read.ref",
    "HashMap": "_read.hashmap",
    "InitResult": "_session.starting",
    "Pointer": "_objects.pointer",
    "Region": "_build.region",
    "Transaction": "_write.transaction",
    "accumulate": "_write.scatter_add",
    "add_at": "_write.scatter_add",
    "free": "_session.surface",
    "block_map": "_session.stats",
    "gather": "_read.gather",
    "init": "_session.driver",
    "maximum_at": "_write.scatter_add",
    "minimum_at": "_write.scatter_add",
    "prefetch": "_read.prefetch",
    "region": "_build.region",
    "put": "_session.surface",
    "reads": "_read.access_report",
    "remote": "_tasks.remote",
    "retry": "_write.retry",
    "share": "_session.surface",
    "shutdown": "_session.driver",
    "stats": "_session.stats",
    "transaction": "_write.transaction",
    "update": "_write.transaction",
    "views_by_value": "_read.views",
    "zeros": "_session.surface",
    "from_arrow": "collection.io.read",
    "from_items": "collection.io.read",
    "from_numpy": "collection.io.read",
    "from_ray_dataset": "collection.io.read",
    "read_csv": "collection.io.read",
    "read_npy": "collection.io.read",
    "read_parquet": "collection.io.read",
    "read_text": "collection.io.read",
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
