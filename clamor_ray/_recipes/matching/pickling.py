"""Pickles what goes between the processes of a program: messages and partitions."""

from __future__ import annotations

import pickle
from typing import Any

import cloudpickle


def pickled(value: Any) -> bytes:
    """`pickle.loads` reads it.

    Raises:
        Exception: Any of the value's.
    """
    try:
        return pickle.dumps(value, protocol=5)
    except (pickle.PicklingError, AttributeError, TypeError):
        # A class of the user's script is not importable in a worker. By value takes longer.
        return bytes(cloudpickle.dumps(value, protocol=5))
