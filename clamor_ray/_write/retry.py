"""`clamor.retry`: runs a transaction again after each conflict."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Callable
from typing import Any

from clamor_ray.errors import CommitConflict


def pause_s(
    attempt: int, base_s: float, most_s: float, draw: Callable[[float, float], float]
) -> float:
    """How long to wait after the n-th conflict: exponential back-off with full jitter.

    Args:
        attempt: 0 for the first.
        base_s, most_s: bound of the first pause, and of any.
        draw: gives a number between two.

    Example:
        >>> [pause_s(n, 0.01, 0.05, max) for n in range(4)]
        [0.01, 0.02, 0.04, 0.05]
    """
    return draw(0.0, min(most_s, base_s * 2.0 ** min(attempt, 60)))


def retry(
    fn: Callable[..., Any] | None = None,
    *args: Any,
    attempts: int = 10,
    base_s: float = 0.01,
    most_s: float = 1.0,
    **kwargs: Any,
) -> Any:
    """Calls a function until its transaction commits without a conflict.

    The function must begin the transaction itself, on references that are no snapshots: each call
    then starts from the newest version. Whatever else it does, it does again. Between two calls it
    waits a random time, of up to `base_s` after the first, doubled each time, `most_s` at most.

    Args:
        fn: called with `args` and `kwargs`; without it, a decorator with these settings.
        args, kwargs: for `fn`.
        attempts: calls at most.
        base_s, most_s: seconds.

    Returns:
        What `fn` returns; without `fn`, a decorator.

    Raises:
        CommitConflict: That of the last call. Other exceptions pass at once.
        ValueError: Fewer than one attempt, or a negative time.

    Example:
        >>> account = clamor.put(np.zeros(1000))
        >>> def deposit(amount):
        ...     with clamor.update(account) as balance:
        ...         balance[0] += amount
        >>> clamor.retry(deposit, 100)
        >>> float(account.get()[0])
        100.0
    """
    if attempts < 1:
        raise ValueError(f"attempts is at least 1, not {attempts}")
    if base_s < 0 or most_s < 0:
        raise ValueError("base_s and most_s are not negative")
    if fn is None:

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(function)
            def retried(*args: Any, **kwargs: Any) -> Any:
                call = functools.partial(function, *args, **kwargs)
                return retry(call, attempts=attempts, base_s=base_s, most_s=most_s)

            return retried

        return decorate
    for attempt in range(attempts - 1):
        try:
            return fn(*args, **kwargs)
        except CommitConflict:
            wait_s = pause_s(attempt, base_s, most_s, random.uniform)
        # Outside of the handler: nothing of the failed call is kept alive meanwhile.
        time.sleep(wait_s)
    return fn(*args, **kwargs)
