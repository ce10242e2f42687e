"""Which shared object a value stands for: a path, a ctypes or cffi library, an extension module."""

from __future__ import annotations

import ctypes
import os
import sys
from types import ModuleType
from typing import Any

_CFFI_PREFIX = "FFILibrary_"


class _LinkMap(ctypes.Structure):
    _fields_ = (("l_addr", ctypes.c_void_p), ("l_name", ctypes.c_char_p))


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
