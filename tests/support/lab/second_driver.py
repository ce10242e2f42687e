"""A driver of its own on a running cluster: its session lives beside that of the test.

`python -m tests.support.lab.second_driver FILE` writes the references of its variables to FILE
(pickled), says so, and shuts its session down when its standard input ends.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.lab.cluster import LocalCluster

START_S = 300.0
END_S = 120.0


@contextlib.contextmanager
def second_driver(lab: LocalCluster, folder: Path) -> Iterator[dict[str, Any]]:
    """The references of its variables; its session has ended when the block has."""
    file = folder / "references"
    said = folder / "driver.log"
    with said.open("wb") as log:
        driver = subprocess.Popen(
            [sys.executable, "-m", "tests.support.lab.second_driver", str(file)],
            env={**os.environ, **lab.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
        )
    assert driver.stdin is not None
    assert driver.stdout is not None
    late = threading.Timer(START_S, driver.kill)
    late.start()
    try:
        assert driver.stdout.readline() == b"ready\n", said.read_text()
        late.cancel()
        yield pickle.loads(file.read_bytes())
        assert driver.poll() is None, said.read_text()
        driver.stdin.close()
        assert driver.wait(END_S) == 0, said.read_text()
    finally:
        late.cancel()
        driver.kill()
        driver.wait(END_S)
        driver.stdout.close()


def main(file: str) -> None:
    import ray

    import clamor_ray as clamor
    from tests.cluster.test_stress import variables

    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False)
    clamor.init()
    made = variables()
    Path(file).write_bytes(pickle.dumps(made))  # which are weak: `made` keeps them
    print("ready", flush=True)
    sys.stdin.read()
    clamor.shutdown(force=True)


if __name__ == "__main__":
    main(sys.argv[1])
