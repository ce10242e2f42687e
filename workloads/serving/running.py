"""The application on a cluster: Serve started, replicas deployed or replaced, and what they say."""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any, Final

from ray import serve

from ..data.errors import InputError
from .client_rules import MOST_TRIES, TRY_TIMEOUT_S, pause_s
from .deployment import AppOptions, application

APP_NAME: Final = "embeddings"
HOST: Final = "127.0.0.1"
PROXY_S: Final = 10.0  # for one that runs already to answer


class NoProxy(InputError):
    """Serve runs, and not where it was asked for."""


def free_port() -> int:
    """A port of this machine that nobody has at the moment."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def start_http(port: int) -> str:
    """Serve's proxy, on the head node alone; where one runs, it must be at this port.

    Returns:
        Its URL.

    Raises:
        NoProxy: None answers there: Serve keeps the options that it was started with.
    """
    serve.start(proxy_location="HeadOnly", http_options={"host": HOST, "port": port})
    url = f"http://{HOST}:{port}"
    deadline = time.monotonic() + PROXY_S
    while not _is_proxy(url):
        if time.monotonic() > deadline:
            raise NoProxy(
                f"No proxy of Serve answers at {url}: Serve was started before, with another port "
                "or on another node. Give that port, on the head node; or end Serve with all its "
                "applications (`serve shutdown`), and try again."
            )
        time.sleep(0.1)
    return url


def _is_proxy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/-/routes", timeout=TRY_TIMEOUT_S) as answer:
            return isinstance(json.load(answer), dict)
    except urllib.error.HTTPError as error:
        return error.code == 503  # it has no application yet
    except (OSError, http.client.HTTPException, ValueError):
        return False


def is_started() -> bool:
    """Whether somebody has started Serve on this cluster."""
    status = serve.status()
    return bool(status.proxies or status.applications)


def deploy(options: AppOptions, replica: Any = None) -> None:
    """Deploys the application, or replaces the one that runs, a replica after the other.

    Args:
        replica: see `deployment.application`.
    """
    serve.run(application(options, replica), name=APP_NAME, route_prefix="/")


def end() -> None:
    """Ends the application; the session goes on, and so does Serve."""
    serve.delete(APP_NAME)


def end_serve() -> None:
    """Ends the application, and Serve with it where there is no other application by now."""
    if set(serve.status().applications) - {APP_NAME}:
        end()
    else:
        serve.shutdown()


def about(url: str) -> dict[str, Any]:
    """What one of the replicas says of itself and of the table.

    Raises:
        OSError, HTTPException: None answers, after the tries that a client has.
    """
    for n_tries in range(1, MOST_TRIES + 1):
        try:
            with urllib.request.urlopen(f"{url}/about", timeout=TRY_TIMEOUT_S) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (OSError, http.client.HTTPException):  # while it reads, too
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
