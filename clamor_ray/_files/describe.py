"""From a path to what lies where in the file: reads its metadata, and no more."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any, Final, Literal

from clamor_ray._files import arrays, arrow_ipc, local, s3
from clamor_ray._files.reader import open_ranges
from clamor_ray._files.spec import FileSpec
from clamor_ray._objects.layout import Plan

Format = Literal["npy", "arrow", "raw"]
_FORMATS: Final[dict[str, Format]] = {"npy": "npy", "arrow": "arrow", "raw": "raw"}
_SUFFIXES: Final[dict[str, Format]] = {
    ".npy": "npy",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".ipc": "arrow",
}


def format_of(path: str, format: str | None, dtype: Any) -> Format:
    """As said, or by the suffix.

    Raises:
        ValueError: It is not known.

    Example:
        >>> format_of("s3://b/x.npy", None, None), format_of("x.bin", None, "f4")
        ('npy', 'raw')
    """
    if format is not None:
        if (said := _FORMATS.get(format)) is None:
            raise ValueError(f"format must be 'npy', 'arrow' or 'raw', not {format!r}")
        return said
    if (known := _SUFFIXES.get(os.path.splitext(path)[1].lower())) is not None:
        return known
    if dtype is None:
        raise ValueError(
            f"nobody knows what is in {path!r}: say format='npy' or 'arrow', or the dtype of raw "
            "bytes"
        )
    return "raw"


def describe(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    dtype: Any = None,
    shape: Any = None,
    offset_bytes: int = 0,
    storage_options: dict[str, Any] | None = None,
    node_id: str = "",
) -> tuple[FileSpec, Plan]:
    """The file, and what lies where in it. Arguments as of `clamor.from_file`.

    Raises:
        As `clamor.from_file`.
    """
    name = os.fspath(path)
    if not isinstance(name, str):
        raise TypeError(f"the path is a str, not {type(name).__qualname__}")
    options: dict[str, str] = {}
    if name.startswith("s3://"):
        name, options = s3.parse(name, storage_options)
    elif "://" in name and not name.startswith("file://"):
        raise ValueError(f"{name.partition('://')[0]}:// is not known: a local path, or s3://")
    elif storage_options:
        raise ValueError("storage_options are for s3:// addresses")
    is_what = format_of(name, format, dtype)
    if is_what == "raw" and dtype is None:
        raise ValueError("raw bytes need a dtype")
    if is_what != "raw" and offset_bytes:
        raise ValueError("offset_bytes is for raw bytes: other files say themselves where data is")
    if is_what == "arrow" and not (dtype is None and shape is None):
        raise ValueError("dtype and shape are for arrays: an Arrow file says them itself")
    identity: tuple[Any, ...]
    if options or name.startswith("s3://"):
        size_bytes, etag = s3.describe(name, options)
        identity, node_id = (etag,), ""
    else:
        name, size_bytes, identity = local.describe(name.removeprefix("file://"))
    spec = FileSpec(name, size_bytes, identity, node_id=node_id, options=options)
    file = open_ranges(spec)
    if is_what == "npy":
        plan, tail = arrays.lay_out_npy(name, size_bytes, file, dtype, shape)
    elif is_what == "arrow":
        plan, tail = arrow_ipc.lay_out(name, size_bytes, file)
    else:
        plan, tail = arrays.lay_out_raw(name, size_bytes, offset_bytes, dtype, shape)
    return replace(spec, tail=tail), plan
