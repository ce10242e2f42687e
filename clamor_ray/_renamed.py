"""Names that the public API had before: they work, and say what they are called now."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

from clamor_ray import errors
from clamor_ray._errors.base import level_of_caller
from clamor_ray._observe.access_report import read_report
from clamor_ray._write.scatter_add import add
from clamor_ray._write.spread_region import build

_F = TypeVar("_F", bound=Callable[..., Any])


def _formerly(name: str, function: _F) -> _F:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        warnings.warn(
            f"clamor.{name} is called clamor.{function.__name__} now; the old name goes with the "
            "next release.",
            errors.ClamorWarning,
            stacklevel=level_of_caller(),
        )
        return function(*arguments, **options)

    return cast(_F, call)


accumulate = _formerly("accumulate", add)
reads = _formerly("reads", read_report)
region = _formerly("region", build)
