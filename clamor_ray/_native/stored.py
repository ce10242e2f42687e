"""The files of homes and of layers, for who keeps them beyond the session: given and taken back.

Import the names from `clamor_ray._native.client`. Nothing here imports Ray.
"""

from __future__ import annotations

from dataclasses import dataclass

from clamor_ray._native.base import PC_ERR_SYSTEM, _Handle, c, check, medium_of


@dataclass(frozen=True, slots=True)
class HomeFile:
    """The file of a home on disk; see `struct pc_home_file`.

    Attributes:
        fd: Open for reading and writing. Whose it is says the call that gives it or takes it.
        version: That its blocks are at. Blocks of later ones may be there, in part.
        base_address, length_bytes: Of the region. Behind its length lie notes of the engine.
        term: In which the server is, or is to be, the home; 0: it was not said.
        in_file: What no commit has written is in a file of the user's, and not in this one.
    """

    fd: int
    version: int
    base_address: int
    length_bytes: int
    in_file: bool
    term: int = 0


class StoredFiles(_Handle):
    """The part of `Engine` that is for who keeps homes beyond the session."""

    def home_file(self, region: int) -> HomeFile:
        """The file of a home that is here, sealed or prepared; the caller closes it. Any thread.

        It has an open file description of its own, so what the disk refuses to write is said to
        `os.fdatasync` of this descriptor, whoever else has heard of it.

        Raises:
            FreedError: It is not here, or not on disk; the text says which.
            SystemCallError: The disk has refused a part of it.
        """
        out = c.ffi.new("struct pc_home_file *")
        check(self._call(c.lib.pc_engine_home_file, region, out), region=region)
        return HomeFile(
            fd=int(out.fd),
            version=int(out.version),
            base_address=int(out.base_address),
            length_bytes=int(out.length_bytes),
            in_file=bool(out.in_file),
            term=int(out.term),
        )

    def layer_file(self, region: int, commit_id: int) -> tuple[int, int]:
        """The file of a layer that is staged here, or published and not applied yet. Any thread.

        Returns:
            A descriptor, which the caller closes, and the layer's bytes. Its offset is shared with
            others: read with `os.pread`.

        Raises:
            NoVersionError: There is none.
        """
        fd, n_bytes = c.ffi.new("int *"), c.ffi.new("uint64_t *")
        check(
            self._call(c.lib.pc_engine_layer_file, region, commit_id, fd, n_bytes),
            region=region,
            commit=f"{commit_id:#x}",
        )
        return int(fd[0]), int(n_bytes[0])

    def layer_durable(self, region: int, commit_id: int, ok: bool) -> None:
        """Answers NEED_DURABLE: the layer that `layer_file` gives is in a file that outlives a cut
        of power. Not ok: it could not be written, and is asked for again. Any thread."""
        rc = 0 if ok else PC_ERR_SYSTEM
        check(self._call(c.lib.pc_engine_layer_durable, region, commit_id, rc), region=region)

    def rebuild_from_file(self, region: int, home: HomeFile, term: int = 0) -> None:
        """This server is to be the home of a region whose file is there: as `Engine.rebuild_begin`
        and `rebuild_seal`. Its versions before that of the file are not kept.

        Args:
            region: Its id.
            home: Its file, which stays the caller's.
            term: In which this server would be the home.

        Raises:
            WaitTimeoutError: The keeper does not take it, or a former home is still read here.
            FreedError: It was freed.
        """
        info = c.ffi.new("struct pc_region_info *")
        info.region, info.version, info.term = region, home.version, term
        info.base_address, info.length_bytes = home.base_address, home.length_bytes
        info.medium = medium_of(True, home.in_file)
        check(self._call(c.lib.pc_engine_rebuild_from_file, info, home.fd), region=region)


def put_home(keeper_fd: int, region: int, home: HomeFile) -> None:
    """Gives a keeper the file of a home of an earlier session, for an engine that starts later."""
    what = c.ffi.new("struct pc_home_file *")
    what.version, what.base_address = home.version, home.base_address
    what.length_bytes, what.in_file, what.fd = home.length_bytes, home.in_file, home.fd
    what.term = home.term
    check(c.lib.pc_keeper_put_home(keeper_fd, region, what), region=region)
