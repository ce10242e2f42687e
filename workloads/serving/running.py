"""The application on a cluster: Serve started, replicas deployed or replaced, and what they say."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, Final

from ray import serve

from .client_rules import MOST_TRIES, TRY_TIMEOUT_S, pause_s
from .deployment import AppOptions, application

APP_NAME: Final = "embeddings"
HOST: Final = "127.0.0.1"


def free_port() -> int:
    """A port of this machine that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def start_http(port: int) -> str:
    """Serve's proxy, on the head node alone; one that runs keeps its port. Returns its URL."""
    serve.start(proxy_location="HeadOnly", http_options={"host": HOST, "port": port})
    return f"http://{HOST}:{port}"


def deploy(options: AppOptions, replica: Any = None) -> None:
    """Deploys the application, or replaces the one that runs, a replica after the other.

    Args:
        replica: see `deployment.application`.
    """
    serve.run(application(options, replica), name=APP_NAME, route_prefix="/")


def end() -> None:
    """Ends the application; the session goes on, and so does Serve."""
    serve.delete(APP_NAME)


def about(url: str) -> dict[str, Any]:
    """What one of the replicas says of itself and of the table.

    Raises:
        OSError: None answers, after the tries that a client has.
    """
    for n_tries in range(1, MOST_TRIES + 1):
        try:
            with urllib.request.urlopen(f"{url}/about", timeout=TRY_TIMEOUT_S) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (urllib.error.URLError, ConnectionError):
            if n_tries == MOST_TRIES:
                raise
            time.sleep(pause_s(n_tries))
    raise AssertionError("MOST_TRIES is 0")


def replicas(url: str, n_replicas: int, timeout_s: float = 60.0) -> dict[str, dict[str, Any]]:
    """What each of them says, by its name: Serve sends a question to any one.

    Raises:
        TimeoutError: Fewer have answered in time.
    """
    return wait_for(url, n_replicas, lambda _: True, timeout_s)


def wait_for(
    url: str, n_replicas: int, wanted: Callable[[dict[str, Any]], bool], timeout_s: float = 60.0
) -> dict[str, dict[str, Any]]:
    """What the replicas say once so many of them say what is wanted.

    Serve chooses who is asked, and a proxy with a replica on its own node asks no other while that
    one has time: RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING=0 switches that off.

    Raises:
        TimeoutError: Fewer did in time.
    """
    found: dict[str, dict[str, Any]] = {}
    deadline = time.monotonic() + timeout_s
    while len(found) < n_replicas:
        said = about(url)
        if wanted(said):
            found[said["replica"]] = said
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{len(found)} of {n_replicas} replicas said what was waited for within "
                f"{timeout_s:g} s; the last one said {said}"
            )
        time.sleep(0.05)
    return found
