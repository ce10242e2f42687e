"""Whether the lab can run here, and what a test does when it cannot."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from typing import Literal

Form = Literal["local", "netns"]

REQUIRE_VARIABLE = "CLAMOR_REQUIRE_LAB"
SHM_BYTES = 512 << 20


def lab_unavailable(form: Form) -> str | None:
    """Why this form of the lab cannot run here, or None when it can."""
    if not sys.platform.startswith("linux"):
        return "the lab needs Linux"
    if importlib.util.find_spec("ray") is None:
        return "ray is not installed"
    try:
        shm = os.statvfs("/dev/shm")
    except OSError as failure:
        return f"/dev/shm: {failure.strerror}"
    if shm.f_bavail * shm.f_frsize < SHM_BYTES:
        return f"/dev/shm has less than {SHM_BYTES >> 20} MiB left"
    return _netns_unavailable() if form == "netns" else None


def _netns_unavailable() -> str | None:
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (Debian: iproute2)"
    probe = f"clamorlab-{os.getpid()}-probe"
    made = subprocess.run(
        ["ip", "netns", "add", probe], capture_output=True, text=True, timeout=30, check=False
    )
    if made.returncode != 0:
        return f"no network namespaces here: {made.stderr.strip()}"
    try:
        # A tbf on lo: the scheduler may be missing in the kernel.
        shaped = subprocess.run(
            [
                *("tc", "-n", probe, "qdisc", "add", "dev", "lo", "root"),
                *("tbf", "rate", "1gbit", "burst", "256kb", "latency", "50ms"),
            ],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        return f"no tc tbf here: {shaped.stderr.strip()}" if shaped.returncode != 0 else None
    finally:
        subprocess.run(["ip", "netns", "del", probe], timeout=30, check=False)


def require_lab(form: Form) -> None:
    """Skips the calling test with the reason, or fails it where CLAMOR_REQUIRE_LAB=1."""
    reason = lab_unavailable(form)
    if reason is not None:
        missing(f"the {form} lab cannot run: {reason}")


def missing(text: str) -> None:
    """Skips the calling test with this reason, or fails it where CLAMOR_REQUIRE_LAB=1."""
    import pytest

    if os.environ.get(REQUIRE_VARIABLE) == "1":
        pytest.fail(f"{text} ({REQUIRE_VARIABLE}=1)", pytrace=False)
    pytest.skip(text)
