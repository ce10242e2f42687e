"""What sort of object a variable is, as its references say without reading it."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from clamor_ray._objects.global_array import GlobalArray


class Kind(NamedTuple):
    """The type of an object, and what an array looks like.

    Args:
        type_name: of its class, without the module.
        dtype: of an array's elements: what `np.dtype` takes; None of any other object.
        shape: of an array; None of any other object.
    """

    type_name: str = "object"
    dtype: Any = None
    shape: tuple[int, ...] | None = None

    def __str__(self) -> str:
        if self.shape is None:
            return self.type_name
        return f"{self.type_name} {np.dtype(self.dtype)} {self.shape}"


OBJECT: Final = Kind()


def kind_of_array(dtype: np.dtype[Any], shape: tuple[int, ...], name: str = "ndarray") -> Kind:
    """The kind of an array.

    Example:
        >>> str(kind_of_array(np.dtype(np.float32), (1000, 256)))
        'ndarray float32 (1000, 256)'
    """
    # A reference is pickled with every task: a string costs less there than a dtype. That of a
    # structured dtype does not say what its fields are.
    short = dtype.isbuiltin == 1 and dtype.metadata is None
    return Kind(name, dtype.str if short else dtype, shape)


def kind_of(obj: object) -> Kind:
    """The kind of an object.

    Example:
        >>> kind_of({"a": 1})
        Kind(type_name='dict', dtype=None, shape=None)
    """
    cls = type(obj)
    if not isinstance(obj, np.ndarray):
        return Kind(cls.__name__)
    # What is read is no file any more, and a global array wherever it is large enough.
    name = "ndarray" if cls in (GlobalArray, np.memmap) else cls.__name__
    return kind_of_array(obj.dtype, obj.shape, name)
