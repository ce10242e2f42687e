"""Collections: `clamor.data.from_items(...)`, `clamor.data.read_parquet(...)`.

The same functions are at the top: `clamor.from_items` is `clamor.data.from_items`.

Example:
    >>> clamor.data.from_items(range(4)).map(lambda x: x * x).sum()
    14
"""

from clamor_ray.collection.collection import DataCollection
from clamor_ray.collection.io.read import (
    from_arrow,
    from_items,
    from_numpy,
    from_ray_dataset,
    read_csv,
    read_npy,
    read_parquet,
    read_text,
)

__all__ = [
    "DataCollection",
    "from_arrow",
    "from_items",
    "from_numpy",
    "from_ray_dataset",
    "read_csv",
    "read_npy",
    "read_parquet",
    "read_text",
]
