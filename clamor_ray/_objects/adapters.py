"""How objects of a class are taken apart, where their own pickles would travel whole.

An adapter says in which arrays the memory of an object is, and what makes the object anew over
them. Those that users register come first, then ours for other libraries. Pure: no Ray, no C.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from clamor_ray.errors import UnpicklableError

Reduce = Callable[[Any], Any]

# Pickle writes these itself, and asks nobody how.
_PICKLE_WRITES: Final = frozenset(
    (type(None), bool, int, float, str, bytes, bytearray, tuple, list, dict, set, frozenset)
)
_registered: dict[type[Any], Reduce] = {}


def register_adapter(cls: type[Any], reduce: Callable[[Any], Any] | None) -> None:
    """Sets how objects of a class are taken apart, so that their memory is paged in.

    An object that keeps its memory in `bytes`, or behind a `__reduce__` that copies, travels whole.
    An adapter gives its memory as NumPy arrays instead, and a function that makes the object anew
    over them. In the process that reads, these arrays are the variable's memory: a function that
    does not copy or scan them leaves their blocks on the other nodes until they are touched.

    Processes that put need the adapter, and those that read do not: the variable has the function.
    `clamor.share` takes the object apart in a process of the library's, which has no adapters but
    the library's own.

    Args:
        cls: the class. Its subclasses are taken apart the same way, but for those that have an
            adapter of their own; `reduce` may look at ``type(obj)``.
        reduce: obj -> (callable, args), as `__reduce__` of pickle returns it: ``callable(*args)``
            makes the object. The callable is importable, or cloudpickle can pickle it. Arrays in
            args, also deep inside, page; when the object is made, they are read-only, except in
            `clamor.update`. NotImplemented stands for pickle's own way. None removes the adapter.

    Raises:
        TypeError: `cls` is not a class, or one that pickle writes by itself (as list), or that
            pages without an adapter (as numpy.ndarray); `reduce` is not callable.
        UnpicklableError: Raised by `clamor.put`: the adapter returned something else.

    Example:
        >>> class Codebook:
        ...     def __init__(self, words):
        ...         self.words = words
        ...     def __reduce__(self):  # one string of bytes: it would travel whole
        ...         return Codebook.of_bytes, (self.words.tobytes(), self.words.shape)
        ...     @staticmethod
        ...     def of_bytes(raw, shape):
        ...         return Codebook(np.frombuffer(raw).reshape(shape))
        >>> clamor.register_adapter(Codebook, lambda book: (Codebook, (book.words,)))
        >>> ref = clamor.put(Codebook(np.ones((1_000, 64))))
        >>> @clamor.remote
        ... def word(book, i):
        ...     return float(book.words[i].sum())  # one block is read
        >>> ray.get(word.remote(ref, 17))
        64.0
        >>> clamor.register_adapter(Codebook, None)
    """
    if not isinstance(cls, type):
        raise TypeError(f"register_adapter takes a class, not {cls!r}")
    if cls in _PICKLE_WRITES or cls is object or issubclass(cls, type):
        raise TypeError(
            f"{cls.__qualname__} cannot have an adapter: pickle does not ask how to write it. "
            "Make a class of your own, and register that."
        )
    if cls is np.ndarray:
        raise TypeError("numpy.ndarray needs no adapter: its memory is paged in as it is")
    if reduce is None:
        _registered.pop(cls, None)
        return
    if not callable(reduce):
        raise TypeError(
            f"reduce is a function of an object, or None, not {type(reduce).__qualname__}"
        )
    _registered[cls] = reduce


def registered_reduction(obj: Any) -> Any:
    """What the adapter that the user registered returns; NotImplemented if there is none.

    Raises:
        UnpicklableError: It is not what `__reduce__` may return.
        Whatever the adapter raises.
    """
    if not _registered:
        return NotImplemented
    for cls in type(obj).__mro__:
        reduce = _registered.get(cls)
        if reduce is not None:
            return _checked(reduce(obj), cls, obj)
    return NotImplemented


def _checked(reduction: Any, cls: type[Any], obj: Any) -> Any:
    if reduction is NotImplemented:
        return reduction
    is_tuple = isinstance(reduction, tuple) and 2 <= len(reduction) <= 6
    if is_tuple and callable(reduction[0]) and isinstance(reduction[1], tuple):
        return reduction
    what = type(reduction).__qualname__
    if isinstance(reduction, tuple):
        what = f"a tuple of ({', '.join(type(part).__qualname__ for part in reduction)})"
    raise UnpicklableError(
        f"The adapter of {cls.__module__}.{cls.__qualname__} returned {what} for an object of type "
        f"{type(obj).__module__}.{type(obj).__qualname__}.",
        hint="It returns (callable, args): callable(*args) makes the object, and args is a tuple.",
    )
