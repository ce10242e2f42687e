"""Waiting for an answer of an actor of ours, and what its failure means here."""

from __future__ import annotations

import pickle
import secrets
import time
from typing import Any, Final

import ray

from clamor_ray import errors
from clamor_ray._protocol import ray_state, refusals
from clamor_ray._protocol.cause import cause_of

LOOK_S: Final = 2.0  # so often a process that waits for an answer looks for its raylet
_LOST = "The session is lost with it: call clamor.shutdown(), then clamor.init()."


def new_request_id() -> int:
    """Names one request, so that Ray may repeat the call and it is carried out once."""
    return secrets.randbits(63)


def pack(*values: object) -> bytes:
    """Values as bytes, which Ray passes on as they are.

    It pickles every other argument and result by a pickler written in Python: for a call with
    one dataclass in and out that is a quarter of a millisecond, a fifth of the whole call.

    Example:
        >>> unpack(pack("latest", [7]))
        ('latest', [7])
    """
    return pickle.dumps(values, pickle.HIGHEST_PROTOCOL)


def unpack(packed: bytes) -> tuple[Any, ...]:
    """What `pack` got."""
    values: tuple[Any, ...] = pickle.loads(packed)
    return values


def await_rpc(reference: Any, timeout_s: float, *, owner: bool = True) -> Any:
    """The answer of an actor of ours.

    Args:
        reference: of the answer.
        timeout_s: for it.
        owner: this process made the session: that its registry is dead is an accident. To others it
            is the session's end.

    Raises:
        ClamorError: What the actor raised, or, where it is another exception, what it means here.
    """
    try:
        return _get(reference, timeout_s)
    except errors.ClamorError as error:
        got: BaseException = error
        own = _own(error)
    except ray.exceptions.GetTimeoutError as error:
        got = error
        own = errors.WaitTimeoutError(
            f"The registry did not answer within {timeout_s:g} s.",
            hint="See the registry actor's log in Ray's session directory, or raise "
            "CLAMOR_CONTROL_TIMEOUT_S.",
        )
    except ray.exceptions.RayTaskError as error:
        got = error
        own = _meaning_of(error.cause)
    except ray_state.GONE as error:
        got = error
        own = (
            errors.ServerUnavailableError(f"The registry is dead: {cause_of(error)}", hint=_LOST)
            if owner
            else errors.SessionEndedError("The session has ended: its registry is gone.")
        )
    except ray.exceptions.RayError as error:
        got = error
        own = errors.ServerUnavailableError(
            f"The registry cannot be reached: {cause_of(error)}",
            hint="It restarts by itself: try again in a moment.",
        )
    # Not while Ray's error is handled, and without the frames it came through: one of them holds it
    # (ray.get's `value`), and each its caller, so that every mapping of our callers would wait for
    # a garbage collection.
    _without_frames(own)
    _without_frames(got)
    try:
        if isinstance(got, errors.ClamorError):
            raise own
        raise own from got
    finally:
        del own, got


def _get(reference: Any, timeout_s: float) -> Any:
    """As `ray.get`. A driver outlives its raylet, and waits in vain then.

    Raises:
        RayletEndedError: The raylet has ended.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        left_s = deadline - time.monotonic()
        try:
            return ray.get(reference, timeout=max(0.0, min(left_s, LOOK_S)))
        except ray.exceptions.GetTimeoutError:
            ray_state.check_raylet()
            if left_s <= LOOK_S:
                raise


def _without_frames(error: BaseException | None) -> None:
    while error is not None and error.__traceback__ is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _own(error: errors.ClamorError) -> errors.ClamorError:
    # Ray wraps it in a class of its own that prints the remote traceback; the cause is ours.
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, errors.ClamorError) else error


def _meaning_of(cause: BaseException | None) -> errors.ClamorError:
    text = "" if cause is None else str(cause).strip().rstrip(".")
    message = f"{text or 'it says no more'}."
    match cause:
        case refusals.NoSuchRegion():
            return errors.FreedError(f"The global variable does not exist: {message}")
        case refusals.IllegalTransition():
            return errors.FreedError(f"The global variable is going away: {message}")
        case refusals.NoSuchServer():
            return errors.ServerUnavailableError(f"The home is not there: {message}")
        case refusals.TooLarge():
            return errors.OutOfMemoryError(
                f"The variable is too large: {message}",
                hint="Make several smaller ones. To free others does not help.",
            )
        case refusals.NoAddresses():
            return errors.OutOfMemoryError(
                f"The global address space is full: {message}",
                hint="Free variables that are not needed, or end another session of the cluster. "
                "Addresses are taken by size, whether they are written or not.",
            )
    return errors.InternalError(f"The registry failed with {type(cause).__name__}: {message}")
