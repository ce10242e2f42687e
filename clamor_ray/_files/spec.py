"""Which file a variable is made of. Pure."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from typing import Any

from clamor_ray._objects.layout import BLOCK_BYTES, round_up
from clamor_ray._protocol.source import FILE, Source


@dataclass(frozen=True)
class FileSpec:
    """A file as it was when the variable was made.

    Args:
        path: absolute, or an s3:// address without options.
        size_bytes: of the file.
        identity: of a local file (inode, modification and change time in ns); of an object in S3
            its ETag. A file that has another one, or another size, is another file.
        tail: what lies behind the file in the region, from the next block on.
        node_id: Ray's hex id of the node that knows the path, of a local file.
        options: how S3 is reached, by the names of obstore's `S3Config`. There may be secrets in
            it: no text has it.
    """

    path: str
    size_bytes: int
    identity: tuple[Any, ...]
    tail: bytes = b""
    node_id: str = ""
    options: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def is_local(self) -> bool:
        return not self.path.startswith("s3://")

    @property
    def tail_offset(self) -> int:
        return round_up(self.size_bytes, BLOCK_BYTES)

    def source(self) -> Source:
        """For the registry."""
        return Source(FILE, 0, b"", pickle.dumps(self))

    @staticmethod
    def of_source(source: Source) -> FileSpec:
        """What `source` made.

        Raises:
            ValueError: It is no file's.
        """
        if source.kind != FILE:
            raise ValueError(f"a source of kind {source.kind!r} is no file")
        spec = pickle.loads(source.what)
        assert isinstance(spec, FileSpec)
        return spec
