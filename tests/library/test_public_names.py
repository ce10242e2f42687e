"""What a user finds at the top of the package, and under which names."""

from __future__ import annotations

import builtins
import inspect
import warnings

import pytest

import clamor_ray as clamor
from clamor_ray import errors


@pytest.mark.parametrize(
    ("old", "new"), [("accumulate", "add"), ("reads", "read_report"), ("region", "build")]
)
def test_an_old_name_works_and_says_the_new_one(old: str, new: str) -> None:
    function = getattr(clamor, old)
    assert inspect.signature(function) == inspect.signature(getattr(clamor, new))
    said = rf"clamor\.{old} is called clamor\.{new} now"
    with pytest.warns(errors.ClamorWarning, match=said), pytest.raises(TypeError):
        function(no_such_argument=1)


def test_families_are_modules_and_at_the_top() -> None:
    for module in (clamor.data, clamor.collective):
        for name in module.__all__:
            assert getattr(clamor, name) is getattr(module, name)


def test_nothing_of_python_is_there_or_hidden() -> None:
    names: dict[str, object] = {}
    exec("from clamor_ray import *", names)
    assert not {name for name in names if hasattr(builtins, name)}
    assert clamor.open is not open
    for name in clamor.__all__:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = getattr(clamor, name)
        owner = found.__name__ if inspect.ismodule(found) else getattr(found, "__module__", None)
        assert owner is None or owner.startswith("clamor_ray"), name
