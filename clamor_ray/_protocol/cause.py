"""An exception as the cause in a message. Imports nothing: a keeper does, too."""

from __future__ import annotations


def cause_of(error: BaseException) -> str:
    """What went wrong, never empty, without a full stop: many exceptions have no text.

    Example:
        >>> cause_of(TimeoutError()), cause_of(KeyError("x")), cause_of(ValueError("Too large."))
        ('no answer in time (TimeoutError)', "KeyError: 'x'", 'ValueError: Too large')
        >>> cause_of(ConnectionResetError())
        'ConnectionResetError'
    """
    name = type(error).__name__
    text = str(error).strip().rstrip(".")
    if text:
        # Errors of ours are sentences for people; of others the type is half of what they say.
        return text if type(error).__module__.startswith("clamor_ray") else f"{name}: {text}"
    return f"no answer in time ({name})" if "Timeout" in name else name
