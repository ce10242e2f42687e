"""Ray's token authentication, settled for a lab's lifetime.

Ray decides by what it finds: a variable, a file in the home folder, or its version's default. A lab
that starts raylets and drivers at different moments could then have some with and some without. So
a lab makes a token of its own, hands it to everything it starts, and leaves the home folder alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator

_VARIABLES = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


def token_environment() -> dict[str, str]:
    """What a cluster's processes get. A mode that the caller has set is left as it is."""
    if "RAY_AUTH_MODE" in os.environ:
        return {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}


def _forget_cached() -> None:
    # Rays without token authentication have nothing to forget.
    with contextlib.suppress(ImportError, AttributeError):
        from ray._raylet import AuthenticationTokenLoader, Config

        Config.initialize("")
        AuthenticationTokenLoader.instance().reset_cache()


@contextlib.contextmanager
def authenticated() -> Iterator[dict[str, str]]:
    """Sets the variables in this process, for as long as the block runs."""
    before = {name: os.environ.get(name) for name in _VARIABLES}
    chosen = token_environment()
    for name in _VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(chosen)
    _forget_cached()
    try:
        yield chosen
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        _forget_cached()
