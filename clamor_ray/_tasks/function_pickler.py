"""Pickles functions by value, as cloudpickle does, with what a traceback needs."""

from __future__ import annotations

import types
from collections import ChainMap
from typing import Any, ClassVar

import cloudpickle


def _code_with_its_file(code: types.CodeType) -> Any:
    """As cloudpickle has it. Since 3.1.3 that leaves out which file the code is from, so that the
    traceback of a function that raises would have no lines."""
    made, values, *rest = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    values = (code.co_filename if value == "<dynamic-code>" else value for value in values)
    return made, tuple(values), *rest


class FunctionPickler(cloudpickle.Pickler):
    """See the file's head. `cloudpickle.loads` reads what it writes."""

    dispatch_table: ClassVar[Any] = ChainMap(
        {types.CodeType: _code_with_its_file}, cloudpickle.Pickler.dispatch_table
    )
