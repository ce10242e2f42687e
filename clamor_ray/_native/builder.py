"""Builds `clamor_ray._pagecache` from pagecache_c; setup.py names it in cffi_modules.

The declarations are read from the public headers as they stand, between their cdef marks, so
headers and binding cannot differ.
"""

from __future__ import annotations

import sys
from pathlib import Path

from cffi import FFI

ROOT = Path(__file__).resolve().parents[2]
C_DIR = ROOT / "pagecache_c"
HEADERS = ("pagecache.h", "pagecache_kernels.h", "pagecache_match.h")  # the first includes them

BEGIN = "/* cdef-begin */"
END = "/* cdef-end */"

# pagecache_c/Makefile adds -Werror and the conversion warnings; the code that cffi generates does
# not pass those, and a compiler newer than ours must not break somebody's install.
FLAGS = [
    *("-std=c11", "-O2", "-g", "-fvisibility=hidden", "-D_GNU_SOURCE"),
    *("-Wall", "-Wextra", "-Wno-unused-parameter", "-Wno-missing-field-initializers"),
]


def declarations(header: str) -> str:
    """The text between the cdef marks of a header.

    Raises:
        ValueError: A mark is missing.
    """
    _, begin, rest = header.partition(BEGIN)
    text, end, _ = rest.partition(END)
    if not begin or not end:
        raise ValueError("a public header has lost its cdef marks")
    return text


def sources(c_dir: Path) -> list[str]:
    """The C files of the library, without its tests and its Python types, relative to the root."""
    return sorted(
        str(path.relative_to(c_dir.parent))
        for path in c_dir.rglob("*.c")
        if path.relative_to(c_dir).parts[0] not in ("tests", "build", "python")
    )


def make_builder() -> FFI:
    if not sys.platform.startswith("linux"):
        raise SystemExit("clamor-ray needs Linux: its page cache stands on memfd and userfaultfd.")
    builder = FFI()
    for header in HEADERS:
        builder.cdef(declarations((C_DIR / header).read_text(encoding="utf-8")))
    builder.set_source(
        "clamor_ray._pagecache",
        '#include "pagecache.h"',
        sources=sources(C_DIR),
        include_dirs=["pagecache_c"],
        depends=sorted(str(path.relative_to(ROOT)) for path in C_DIR.rglob("*.h")),
        extra_compile_args=FLAGS,
        libraries=["pthread", "dl"],
        py_limited_api=True,
    )
    return builder


if __name__ in ("__main__", "__cffi__"):
    ffibuilder = make_builder()
    if __name__ == "__main__":
        ffibuilder.compile(verbose=True)
