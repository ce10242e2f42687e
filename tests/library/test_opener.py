"""What opens a reference in a process that has loaded no session."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys

from clamor_ray._objects.layout import Plan
from clamor_ray._read.ref import GlobalRef
from clamor_ray._session.begin.announced import VARIABLE

SCRIPT = """
import pickle, sys
import clamor_ray
assert "numpy" not in sys.modules and "ray" not in sys.modules
ref = pickle.loads(bytes.fromhex({packed!r}))
assert "clamor_ray._session.process_sessions" not in sys.modules
from clamor_ray._read import opener
assert opener.sessions() == () and opener.at_address(ref._base_address) is None
assert "clamor_ray._session.process_sessions" not in sys.modules
try:
    ref.get()
except clamor_ray.errors.NotInitializedError as error:
    print(type(error).__name__)
from clamor_ray._session import process_sessions
assert opener.given().current is process_sessions.current
"""


def test_the_first_reference_that_is_opened_loads_what_opens_it() -> None:
    ref = GlobalRef[object](3, 0, 0x1100_0000_0000, 1 << 20, Plan(1 << 20, 100), "s")
    script = SCRIPT.format(packed=pickle.dumps(ref).hex())
    # A session that another test had here has announced its node to all that are started later.
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.stdout.strip(), done.stderr) == ("NotInitializedError", "")
