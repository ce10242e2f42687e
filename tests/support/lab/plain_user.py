"""Fewer rights, as most users have them: another user than root, and what a container refuses.

* ``as_plain_user()`` goes before a command: who runs it is no longer root.
* ``enter_container()`` gives the calling thread, and all that it starts, the filter of system calls
  that containers have.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import shutil
import subprocess
import sys

NOBODY = 65534

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER_AT, _ARCHITECTURE_AT = 0, 4  # in struct seccomp_data
_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# Docker's default profile (moby's profiles/seccomp/default.json) without any capability: what it
# does not list is EPERM. These of it could matter to a program like ours; and the last three, which
# it has allowed since Linux 4.8 and refused before. Numbers: x86-64, and 64-bit ARM.
REFUSED = {
    "userfaultfd": (323, 282),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "kcmp": (312, 272),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_by_handle_at": (304, 265),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "mbind": (237, 235),
    "get_mempolicy": (239, 236),
    "set_mempolicy": (238, 237),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
    "io_uring_setup": (425, 425),  # since 2023
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "swapon": (167, 224),
    "syslog": (103, 116),
    "clock_settime": (227, 112),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
}
_CLONE3 = 435  # ENOSYS, so that libraries use clone: its flags cannot be looked at
_NEWER = 450  # what a profile has never heard of is ENOSYS, too


class _Instruction(ctypes.Structure):
    _fields_ = [
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("k", ctypes.c_uint32),
    ]


class _Program(ctypes.Structure):
    _fields_ = [("n", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction))]


def as_plain_user() -> list[str]:
    """Words to put before a command: none where we are no root; LookupError where it cannot be.

    Where the interpreter is in a folder that only root enters, the other user keeps one right: to
    look into folders and to read files (CAP_DAC_READ_SEARCH). It opens no device for writing.
    """
    if os.geteuid() != 0:
        return []
    setpriv, env = shutil.which("setpriv"), shutil.which("env")
    if setpriv is None or env is None:
        raise LookupError("there is no setpriv (Debian: util-linux), or no env")
    words = [setpriv, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    right = "+dac_read_search"
    with_right = [*words, f"--inh-caps=-all,{right}", f"--ambient-caps=-all,{right}"]
    said = ""
    for rights in ([*words, "--inh-caps=-all"], with_right):
        tried = [*rights, env]  # setpriv itself still has its rights when it starts a program
        run = subprocess.run(
            [*tried, sys.executable, "-c", "import clamor_ray._pagecache"],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        if run.returncode == 0:
            return tried
        said = run.stderr
    raise LookupError(f"user {NOBODY} cannot run {sys.executable}: {said}")


def system_call(name: str) -> int:
    """The number that it has here."""
    return REFUSED[name][list(_ARCHITECTURES).index(platform.machine())]


def enter_container() -> None:
    """The calling thread, and what it starts from now on, is refused these system calls for good.

    LookupError on a machine of another kind.
    """
    if platform.machine() not in _ARCHITECTURES:
        raise LookupError(f"no numbers of system calls for {platform.machine()}")
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_JUMP_EQUAL, 1, 0, _ARCHITECTURES[platform.machine()]),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_EQUAL, 1, 0, _CLONE3),
        (_JUMP_AT_LEAST, 0, 1, _NEWER),
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
    ]
    for name in REFUSED:
        steps.append((_JUMP_EQUAL, 0, 1, system_call(name)))
        steps.append((_RETURN, 0, 0, _ERRNO | errno.EPERM))
    steps.append((_RETURN, 0, 0, _ALLOW))
    program = _Program(len(steps), (_Instruction * len(steps))(*steps))
    libc = ctypes.CDLL(None, use_errno=True)
    zero = ctypes.c_ulong(0)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, ctypes.c_ulong(1), zero, zero, zero):
        raise OSError(ctypes.get_errno(), "PR_SET_NO_NEW_PRIVS")
    mode = ctypes.c_ulong(_SECCOMP_MODE_FILTER)
    if libc.prctl(_PR_SET_SECCOMP, mode, ctypes.byref(program), zero, zero):
        raise OSError(ctypes.get_errno(), "PR_SET_SECCOMP")


def refused(name: str) -> str:
    """What the kernel says to a system call of these without arguments that make sense: "EPERM"."""
    libc = ctypes.CDLL(None, use_errno=True)
    ctypes.set_errno(0)
    bad = ctypes.c_long(-1)
    done = libc.syscall(ctypes.c_long(system_call(name)), bad, bad, bad, bad, bad, bad)
    return "" if done >= 0 else errno.errorcode[ctypes.get_errno()]
