"""What can go wrong with names of variables and sessions. `errors.py` has all errors."""

from __future__ import annotations

from clamor_ray._errors.base import ClamorError


class NameTakenError(ClamorError, ValueError):
    """Another variable of the session has the name. Nothing was made.

    Example:
        >>> one = clamor.put(np.zeros(1000), name="taken")
        >>> clamor.put(np.ones(1000), name="taken")
        Traceback (most recent call last):
            ...
        clamor_ray.errors.NameTakenError: ...
    """

    default_hint = (
        "Open it with clamor.open(name), use clamor.get_or_create, or drop the name first with "
        "clamor.drop(name)."
    )


class NoSuchNameError(ClamorError, LookupError):
    """No variable of the session has the name.

    Example:
        >>> clamor.open("nothing has this name")
        Traceback (most recent call last):
            ...
        clamor_ray.errors.NoSuchNameError: ...
    """

    default_hint = "clamor.variables() lists the variables of the session, and their names."

    __str__ = ClamorError.__str__
