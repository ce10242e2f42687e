"""In: a cluster's address. Out: an error where the cluster refuses this process's token.

`ray.init` tries for 20 s, with a line each second, and then says that it failed to connect. What is
taken from inside Ray for that is here alone; Rays without it have no tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from typing import Any, Final

import ray

from clamor_ray import errors
from clamor_ray._protocol import ray_state
from clamor_ray._protocol.cause import cause_of

AUTO: Final = "auto"
KNOCK_S: Final = 2.0
ANSWER_S: Final = 2  # a whole number; three times that where a host accepts and says nothing
_WAITS: Final = ("gcs_rpc_server_connect_timeout_s", "py_gcs_connect_timeout_s")
LAST_PORT: Final = 65_535
REMEDY: Final = (
    "Set RAY_AUTH_MODE=token, and give the cluster's token: RAY_AUTH_TOKEN, or a file that "
    "RAY_AUTH_TOKEN_PATH names, or ~/.ray/auth_token."
)
_Refusal: Final = getattr(ray.exceptions, "AuthenticationError", None)


def knock(address: str, timeout_s: float) -> bool:
    """Whether the address is HOST:PORT, where somebody listens. Another form is Ray's to read.

    Raises:
        OSError: Nobody listens there.
    """
    host, _, port = address.rpartition(":")
    if not host or "/" in host or not port.isdigit():
        return False
    if int(port) > LAST_PORT:
        raise OSError(f"there is no port {port}")
    socket.create_connection((host.strip("[]"), int(port)), timeout_s).close()
    return True


def _denied(says: str, refusal: Exception) -> errors.DeniedError:
    # `str` of it goes on for lines, with what our hint says.
    cause = str(getattr(refusal, "message", "") or cause_of(refusal)).rstrip(".")
    return errors.DeniedError(f"{says}: {cause}.", hint=REMEDY)


@contextlib.contextmanager
def _soon_given_up(config: Any) -> Iterator[None]:
    """By itself a client waits for 40 s, and no other thread of Python runs meanwhile."""
    config.initialize(json.dumps(dict.fromkeys(_WAITS, ANSWER_S)))
    try:
        yield
    finally:
        config.initialize("")  # as it is before `ray.init`, which sets the cluster's


def meant(address: str | None) -> tuple[str, bool]:
    """The cluster that Ray takes for an address.

    Returns:
        Its address; "": nobody knows. And whether it was found: nobody has named it, neither here
        nor in RAY_ADDRESS.
    """
    asked = address if address not in (None, "", AUTO) else os.environ.get("RAY_ADDRESS") or AUTO
    return (ray_state.noted_address(), True) if asked == AUTO else (asked, False)


def check_token(address: str, is_found: bool = False) -> None:
    """Asks a cluster that accepts connections. Any other trouble is left to `ray.init`.

    Args:
        address: HOST:PORT. "": only whether this process has a token, where it wants one.
        is_found: See `meant`. For such a cluster Ray uses a token that is there, unasked.

    Raises:
        DeniedError: There is no token, or the cluster refuses it.
    """
    if _Refusal is None:
        return
    try:
        from ray._private.authentication import authentication_token_setup as setup
        from ray._private.authentication.authentication_utils import is_token_auth_enabled
    except ImportError:
        return
    client, config = (getattr(ray._raylet, name, None) for name in ("GcsClient", "Config"))
    enable = getattr(setup, "maybe_enable_token_auth_if_token_available", None)
    if is_found and enable is not None:
        enable(warn_if_disabled=False)
    try:  # first: a client without a token ends the process
        setup.ensure_token_if_auth_enabled(None, create_token_if_missing=False)
    except _Refusal as refusal:
        raise _denied("This process has no token for Ray", refusal) from refusal
    if not address or client is None or not hasattr(config, "initialize"):
        return
    try:
        with _soon_given_up(config):
            client(address=address)
    except _Refusal as refusal:
        says = (
            "refuses the token of this process"
            if is_token_auth_enabled()
            else "asks for a token, and this process sends none (RAY_AUTH_MODE)"
        )
        raise _denied(f"The Ray cluster at {address} {says}", refusal) from refusal
    except ray.exceptions.RayError:
        return


def check_token_before(address: str | None) -> None:
    """Before `ray.init(address)`, which makes a token itself where it starts a cluster.

    Raises:
        DeniedError: As `check_token`.
    """
    asked, is_found = meant(address)
    try:
        listens = knock(asked, KNOCK_S)
    except OSError:
        return
    if listens:
        check_token(asked, is_found)
