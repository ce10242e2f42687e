"""A cluster with Ray's autoscaler, v1 or v2, over its fake provider: each node is a raylet here.

Ray's own test cluster for this needs a file that its wheel lacks, and ends the Ray of everybody. So
the head is started by `ray start`, and all that it and the autoscaler have started is ended by its
process id.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.lab.auth import authenticated
from tests.support.lab.cluster import descendants, in_time

ROOT = Path(__file__).resolve().parents[3]
START_S = 120.0
UPDATE_S = 1
IDLE_S = 6.0
STORE_BYTES = 90 << 20
WORKER = "worker"


def _config(n_most: int, gcs_address: str) -> dict[str, Any]:
    from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

    empty_lists = (
        *("initialization_commands", "setup_commands", "head_setup_commands", "rsync_exclude"),
        *("worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands"),
        *("cluster_synced_files", "rsync_filter"),
    )
    return {
        "cluster_name": "fake",
        "max_workers": n_most,
        "provider": {
            "type": "external",
            "module": "tests.support.lab.scaled_nodes.ScaledNodes",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "launch_multiple": True,
            "head_node_id": FAKE_HEAD_NODE_ID,
            "gcs_address": gcs_address,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            WORKER: {
                "resources": {"CPU": 1, "object_store_memory": STORE_BYTES},
                "node_config": {},
                "min_workers": 0,
                "max_workers": n_most,
            },
        },
        "head_node_type": "ray.head.default",
        "upscaling_speed": 1.0,
        "idle_timeout_minutes": IDLE_S / 60,
        "file_mounts_sync_continuously": False,
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{name: [] for name in empty_lists},
    }


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def _of_session(directory: str) -> list[int]:
    """All processes that name the cluster's directory, or are below one that does."""
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                if directory.encode() in (entry / "cmdline").read_bytes():
                    found |= {int(entry.name), *descendants(int(entry.name))}
    return sorted(found)


@contextlib.contextmanager
def autoscaled_cluster(version: int, directory: Path, n_most: int = 2) -> Iterator[None]:
    """Starts the head, which has no CPU, and connects this process to it.

    Args:
        version: Of the autoscaler: 1 or 2.
        directory: For Ray's files: a short path, which nothing else uses.
        n_most: How many nodes it may add, of one CPU each.
    """
    import ray
    from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

    import clamor_ray

    config = directory / "autoscaling.json"
    port = _free_port()
    address = f"{ray.util.get_node_ip_address()}:{port}"
    config.write_text(json.dumps(_config(n_most, address)))
    with authenticated() as environment:
        of_version = {"RAY_enable_autoscaler_v2": str(version - 1)}
        if version == 2:
            of_version["RAY_CLOUD_INSTANCE_ID"] = FAKE_HEAD_NODE_ID
            of_version["RAY_OVERRIDE_NODE_ID_FOR_TESTING"] = FAKE_HEAD_NODE_ID

        def start() -> None:
            started = subprocess.run(
                [
                    *(str(Path(sys.executable).with_name("ray")), "start", "--head"),
                    *(
                        f"--port={port}",
                        f"--temp-dir={directory}",
                        f"--autoscaling-config={config}",
                    ),
                    *("--num-cpus=0", f"--object-store-memory={STORE_BYTES}"),
                    "--include-dashboard=false",
                ],
                env={
                    **os.environ,
                    **environment,
                    **of_version,
                    "AUTOSCALER_UPDATE_INTERVAL_S": str(UPDATE_S),
                    "RAY_FAKE_CLUSTER": "1",
                    "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                },
                capture_output=True,
                text=True,
                timeout=START_S,
                check=False,
                start_new_session=True,
            )
            if started.returncode != 0:
                _end(str(directory))
                raise RuntimeError(f"ray start failed: {started.stdout}{started.stderr}")

        try:
            in_time(start)
            ray.init(address, log_to_driver=False)
            yield
        finally:
            clamor_ray.shutdown()
            ray.shutdown()
            _end(str(directory))


def _end(directory: str) -> None:
    """All that belongs to it, by process id; what comes meanwhile, too."""
    deadline = time.monotonic() + 30.0
    while (left := _of_session(directory)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
    if left:
        raise RuntimeError(f"processes {left} of {directory} do not end")
