"""Which shared objects a value stands for: a path, a ctypes or cffi library, an extension module,
a package of those."""

from __future__ import annotations

import ctypes
import os
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from types import ModuleType
from typing import Any

from clamor_ray.errors import MallocShimError

_CFFI_PREFIX = "FFILibrary_"


class _LinkMap(ctypes.Structure):
    _fields_ = (("l_addr", ctypes.c_void_p), ("l_name", ctypes.c_char_p))


def names_of(library: Any) -> list[str]:
    """The names of a library, or of all loaded extension modules of a Python package.

    SWIG's `tree.py` beside its `_tree.so` is such a package too.

    Raises:
        TypeError: As `name_of`.
        MallocShimError: A package of which no extension module is loaded.
    """
    if not isinstance(library, ModuleType) or is_extension(library):
        return [name_of(library)]
    parent, _, leaf = library.__name__.rpartition(".")
    swig = f"{parent}._{leaf}" if parent else f"_{leaf}"
    folders = [os.path.join(folder, "") for folder in getattr(library, "__path__", ())]
    found = {
        str(module.__file__)
        for name, module in list(sys.modules.items())
        if is_extension(module)
        and (
            name == swig
            or name.startswith(f"{library.__name__}.")
            or any(str(module.__file__).startswith(folder) for folder in folders)
        )
    }
    if not found:
        raise MallocShimError(
            f"No extension module of {library.__name__} is loaded.",
            hint="Import the one that allocates, or pass the path of the shared library.",
        )
    return sorted(found)


def is_extension(module: Any) -> bool:
    """Whether it is a module made from a shared object."""
    path = getattr(module, "__file__", None)
    return (
        isinstance(module, ModuleType)
        and isinstance(path, str)
        and path.endswith(tuple(EXTENSION_SUFFIXES))
    )


def name_of(library: Any) -> str:
    """The name under which the loader knows a library; "" for the program.

    Args:
        library: a path or a soname, a `ctypes.CDLL`, what `ffi.dlopen` returned, the `lib` of a
            compiled cffi module, or an extension module.

    Raises:
        TypeError: It is none of those.
    """
    if isinstance(library, str | os.PathLike):
        return os.fspath(library)
    if isinstance(library, ctypes.CDLL):
        return _name_of_handle(library._handle) or str(library._name or "")
    if isinstance(library, ModuleType) and getattr(library, "__file__", None):
        return str(library.__file__)
    cls = type(library).__name__
    if cls.startswith(_CFFI_PREFIX):
        return cls.removeprefix(_CFFI_PREFIX)
    # The `lib` of a compiled cffi module says that it is "package._name.lib".
    module = sys.modules.get(str(getattr(library, "__name__", "")).removesuffix(".lib"))
    if module is not None and getattr(module, "lib", None) is library and module.__file__:
        return str(module.__file__)
    raise TypeError(
        f"{library!r} is no shared library: pass a path, a ctypes.CDLL, a cffi library or an "
        "extension module"
    )


def _name_of_handle(handle: int) -> str:
    # RTLD_DI_LINKMAP is 2: the loader's own entry, with the path that it found.
    kind: Any = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)
    info = kind(("dlinfo", ctypes.CDLL(None)))
    found = ctypes.POINTER(_LinkMap)()
    if info(handle, 2, ctypes.byref(found)) != 0 or not found:
        return ""
    return os.fsdecode(found.contents.l_name or b"")
