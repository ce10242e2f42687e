"""Adapters: whose objects are taken apart how, and what an adapter may not do."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from clamor_ray._objects import adapters
from clamor_ray._objects.adapters import register_adapter
from clamor_ray._objects.layout import Pickled, Plan, put_together, take_apart
from clamor_ray.errors import UnpicklableError

ARRAY = np.random.default_rng(3).random(5_000)


class Opaque:
    """Keeps its numbers in bytes, as wrappers of C++ libraries do."""

    def __init__(self, raw: bytes, name: str = "") -> None:
        self.raw, self.name = bytes(raw), name


class SubOpaque(Opaque):
    pass


class View:
    """What is made over an array that is not its own."""

    def __init__(self, array: Any, name: str) -> None:
        self.array, self.name = array, name


def as_view(obj: Opaque) -> Any:
    return View, (np.frombuffer(obj.raw), obj.name)


def over(pickled: Pickled) -> tuple[npt.NDArray[np.uint8], Plan]:
    """A region's memory with the object in it."""
    image = np.zeros(pickled.plan.region_bytes, np.uint8)
    for offset, view in pickled.pieces():
        image[offset : offset + view.nbytes] = np.frombuffer(view, np.uint8)
    return image, pickled.plan


@pytest.fixture(autouse=True)
def nothing_registered() -> Iterator[None]:
    yield
    adapters._registered.clear()


def test_the_adapters_arrays_are_buffers_and_its_callable_rebuilds_over_them() -> None:
    obj = Opaque(ARRAY.tobytes(), "a")
    assert take_apart(obj).plan.buffers == ()
    register_adapter(Opaque, as_view)
    pickled = take_apart({"deep": [obj]})
    assert [n_bytes for _, n_bytes in pickled.plan.buffers] == [ARRAY.nbytes]
    image, plan = over(pickled)
    made = put_together(image, plan)["deep"][0]
    assert (type(made), made.name) == (View, "a")
    assert np.array_equal(made.array, ARRAY)
    assert np.shares_memory(made.array, image)


def test_subclasses_have_the_adapter_unless_they_have_their_own() -> None:
    register_adapter(Opaque, as_view)
    assert len(take_apart(SubOpaque(ARRAY.tobytes())).plan.buffers) == 1
    register_adapter(SubOpaque, lambda obj: NotImplemented)
    assert take_apart(SubOpaque(ARRAY.tobytes())).plan.buffers == ()
    assert len(take_apart(Opaque(ARRAY.tobytes())).plan.buffers) == 1
    register_adapter(SubOpaque, None)
    assert len(take_apart(SubOpaque(ARRAY.tobytes())).plan.buffers) == 1


def test_none_removes_an_adapter_also_where_there_is_none() -> None:
    register_adapter(Opaque, None)
    register_adapter(Opaque, as_view)
    register_adapter(Opaque, None)
    assert take_apart(Opaque(ARRAY.tobytes())).plan.buffers == ()


@pytest.mark.parametrize("cls", [list, dict, int, bytes, type(None), object, type, np.ndarray])
def test_classes_that_can_have_none(cls: type[Any]) -> None:
    with pytest.raises(TypeError, match=r"adapter"):
        register_adapter(cls, as_view)


def test_what_is_no_class_or_no_function() -> None:
    with pytest.raises(TypeError, match="takes a class, not 'Opaque'"):
        register_adapter("Opaque", as_view)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="reduce is a function of an object, or None, not tuple"):
        register_adapter(Opaque, ())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("reduction", "said"),
    [
        (None, "returned NoneType"),
        ((View,), r"a tuple of \(type\)"),
        ((View, [1]), r"a tuple of \(type, list\)"),
        (("View", (1,)), r"a tuple of \(str, tuple\)"),
    ],
)
def test_what_is_no_reduction_is_named_with_the_class(reduction: Any, said: str) -> None:
    register_adapter(Opaque, lambda obj: reduction)
    with pytest.raises(UnpicklableError, match=said) as caught:
        take_apart([SubOpaque(b"1")])
    assert "adapter of tests.library.test_adapters.Opaque" in caught.value.message
    assert "type tests.library.test_adapters.SubOpaque" in caught.value.message
    assert "(callable, args)" in caught.value.hint


def test_what_an_adapter_raises_is_the_cause() -> None:
    def broken(obj: Opaque) -> Any:
        raise KeyError("no such memory")

    register_adapter(Opaque, broken)
    with pytest.raises(UnpicklableError, match="KeyError: 'no such memory'") as caught:
        take_apart(Opaque(b"1"))
    assert isinstance(caught.value.__cause__, KeyError)


def local_reduce() -> Callable[[Opaque], Any]:
    def rebuild(array: Any) -> Any:
        return ("by value", float(array.sum()))

    return lambda obj: (rebuild, (np.frombuffer(obj.raw),))


def test_another_process_needs_no_adapter_and_the_callable_may_be_local(tmp_path: Path) -> None:
    register_adapter(Opaque, local_reduce())
    image, plan = over(take_apart(Opaque(np.ones(5_000).tobytes())))
    (tmp_path / "image").write_bytes(image.tobytes())
    script = f"""
        import numpy as np
        from clamor_ray._objects.layout import Plan, put_together
        from clamor_ray._objects import adapters
        image = np.fromfile({str(tmp_path / "image")!r}, np.uint8)
        plan = Plan({plan.total_bytes}, {plan.inband_bytes}, {plan.buffers!r})
        assert not adapters._registered
        print(put_together(image, plan))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "('by value', 5000.0)", done.stderr
