"""The directory of a node's Unix sockets: whose it is, and where it may lie."""

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path

import pytest

from clamor_ray import errors
from clamor_ray._protocol import names
from clamor_ray._protocol.config import Config
from clamor_ray.actors.process import socket_directory, starting

NOBODY = 65534
NODE, SCOPE = "f" * 56, "0" * 12


def test_it_is_made_for_this_user_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = tmp_path / "clamor"
    before = os.umask(0)
    try:
        for _ in range(2):
            socket_directory.prepare(str(directory))
    finally:
        os.umask(before)
    found = directory.lstat()
    assert stat.S_IMODE(found.st_mode) == 0o700
    assert found.st_uid == os.geteuid()
    assert caplog.text == ""


def refused(directory: Path) -> errors.DeniedError:
    with pytest.raises(errors.DeniedError) as caught:
        socket_directory.prepare(str(directory))
    assert str(directory) in caught.value.message
    assert isinstance(caught.value, starting.FINAL)  # the next try would end the same way
    return caught.value


def test_one_that_others_can_enter(tmp_path: Path) -> None:
    for mode in (0o755, 0o710, 0o701, 0o777):
        tmp_path.chmod(mode)
        error = refused(tmp_path)
        assert f"{mode:04o}" in error.message
        assert f"chmod 700 {tmp_path}" in error.hint


def test_a_link_and_a_file(tmp_path: Path) -> None:
    link, file, nowhere = tmp_path / "link", tmp_path / "file", tmp_path / "nowhere"
    (tmp_path / "real").mkdir(0o700)
    link.symlink_to(tmp_path / "real")
    nowhere.symlink_to(tmp_path / "nothing")
    file.touch()
    for path, what in ((link, "symbolic link"), (nowhere, "symbolic link"), (file, "file")):
        error = refused(path)
        assert f"is a {what} of user {os.geteuid()}" in error.message
        assert "CLAMOR_SOCKET_DIR" in error.hint


def test_one_of_another_user(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a directory away")
    for mode in (0o700, 0o777):
        theirs = tmp_path / f"{mode:o}"
        theirs.mkdir()
        theirs.chmod(mode)
        os.chown(theirs, NOBODY, NOBODY)
        error = refused(theirs)
        assert f"belongs to user {NOBODY}" in error.message
        assert f"user {NOBODY} or by root" in error.hint
        assert "CLAMOR_SOCKET_DIR" in error.hint


def test_where_none_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for above in ("no", "file"):
        assert "CLAMOR_SOCKET_DIR" in refused(tmp_path / above / "clamor").hint


def test_a_shortage_may_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "mkdir", short)
    with pytest.raises(OSError, match="No space") as caught:
        socket_directory.prepare(str(tmp_path / "clamor"))
    assert not isinstance(caught.value, starting.FINAL)


def test_where_others_can_rename_it_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        socket_directory.prepare(str(tmp_path / "one"))
    assert "sticky bit" in caplog.text
    caplog.clear()
    tmp_path.chmod(0o1777)
    socket_directory.prepare(str(tmp_path / "two"))
    assert caplog.text == ""


def test_every_path_fits_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 2**32 - 1)
    longest = "/" + "d" * (names.SOCKETS_BELOW_BYTES - 1)
    config = Config.from_env({"CLAMOR_SOCKET_DIR": longest})
    name = names.keeper_socket(SCOPE, NODE, 2**64 - 1, config.socket_dir)
    assert len(name) == 107
    assert name.startswith(names.server_socket(SCOPE, NODE, longest))
    assert names.below_which(name) == longest


@pytest.mark.parametrize("text", ["here", "/" + "d" * names.SOCKETS_BELOW_BYTES])
def test_settings_that_make_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match="CLAMOR_SOCKET_DIR"):
        Config.from_env({"CLAMOR_SOCKET_DIR": text})
    assert Config.from_env({}).socket_dir == names.SOCKETS_BELOW


def test_users_do_not_share_one(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = names.socket_directory("/tmp/")
    assert mine == f"/tmp/clamor-{os.geteuid()}"
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert names.socket_directory("/tmp") != mine
