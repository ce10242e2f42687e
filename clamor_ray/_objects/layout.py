"""From an object to bytes at offsets, and back. Pure: no Ray, no C.

What is put lies in its region with the pickle stream (protocol 5) at offset 0 and the object's
buffers behind it: small ones on 64-byte boundaries, those of a block or more on block boundaries,
so that a block holds parts of two large buffers never, and an allocation's alignment is kept. What
is built in place lies where it was built, and its stream anywhere. The `Plan` says what lies
where; it travels in the reference, so that reading needs no table from anywhere.
"""

from __future__ import annotations

import ctypes
import functools
import io
import itertools
import math
import operator
import pickle
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

import cloudpickle
import numpy as np
import numpy.typing as npt

from clamor_ray._counting.anchors import Anchor, Anchors, collecting
from clamor_ray._errors.base import level_of_caller
from clamor_ray._objects.adapters import registered_reduction
from clamor_ray._objects.arrow_slices import trimmed
from clamor_ray._objects.global_array import GlobalArray, as_global, plain
from clamor_ray._objects.kind import OBJECT, Kind, kind_of, kind_of_array
from clamor_ray._objects.library_adapters import library_reduction
from clamor_ray._objects.pointer import Pointer
from clamor_ray.errors import ClamorWarning, UnpicklableError

BLOCK_BYTES: Final = 4096
BUFFER_ALIGNMENT: Final = 64
INLINE_BYTES: Final = 4096  # an object below this travels inside its reference
LARGE_INBAND_BYTES: Final = 1 << 20
# A copy of an array that is not contiguous pays from here on: its bytes leave the stream.
CONTIGUOUS_COPY_BYTES: Final = 1024
GROWN_STREAM_BYTES: Final = 64


def round_up(value: int, unit: int) -> int:
    """The least multiple of `unit` that is not below `value`."""
    return -(-value // unit) * unit


@dataclass(frozen=True, slots=True)
class Plan:
    """What lies where in a region.

    Args:
        total_bytes: end of the last byte that means something.
        inband_bytes: length of the pickle stream.
        buffers: (offset, length) of each out-of-band buffer, in the stream's order.
        inband_offset: where the stream begins.
        capacity_bytes: end of what is reserved, where that is more than what is there.
        fixed: it holds pointers into itself: at another address it means nothing.
        kind: of the object.
    """

    total_bytes: int
    inband_bytes: int
    buffers: tuple[tuple[int, int], ...] = ()
    inband_offset: int = 0
    capacity_bytes: int = 0
    fixed: bool = False
    kind: Kind = OBJECT

    @property
    def object_bytes(self) -> int:
        """Size of the object: an array's `nbytes`; of any other its stream and its buffers."""
        if self.kind.shape is not None:
            dtype: np.dtype[Any] = np.dtype(self.kind.dtype)
            return dtype.itemsize * math.prod(self.kind.shape)
        return self.inband_bytes + sum(n_bytes for _, n_bytes in self.buffers)

    @property
    def region_bytes(self) -> int:
        """Length of the region: whole blocks, at least one."""
        end = max(self.total_bytes, self.capacity_bytes)
        return max(BLOCK_BYTES, round_up(end, BLOCK_BYTES))


def make_plan(inband_bytes: int, buffer_bytes: Sequence[int], kind: Kind = OBJECT) -> Plan:
    """Lays out a stream and buffers of these lengths.

    Example:
        >>> make_plan(100, [8, 5000]).buffers
        ((128, 8), (4096, 5000))
    """
    end = inband_bytes
    buffers = []
    for n_bytes in buffer_bytes:
        alignment = BLOCK_BYTES if n_bytes >= BLOCK_BYTES else BUFFER_ALIGNMENT
        offset = round_up(end, alignment)
        buffers.append((offset, n_bytes))
        end = offset + n_bytes
    return Plan(end, inband_bytes, tuple(buffers), kind=kind)


@dataclass(frozen=True, slots=True)
class Pickled:
    """An object taken apart. Holds the object's own memory: nothing is copied yet.

    Args:
        plan: what lies where.
        inband: the pickle stream.
        buffers: out of band.
        inside: anchors of the references that are in it.
    """

    plan: Plan
    inband: memoryview
    buffers: tuple[memoryview, ...]
    inside: Anchors = ()

    def pieces(self) -> Iterator[tuple[int, memoryview]]:
        """(offset, bytes) of everything that has to be written, in order."""
        yield self.plan.inband_offset, self.inband
        for (offset, n_bytes), view in zip(self.plan.buffers, self.buffers, strict=True):
            if n_bytes:
                yield offset, view

    def image(self) -> bytes:
        """The region's content as one bytes object; for small objects."""
        image = bytearray(self.plan.total_bytes)
        for offset, view in self.pieces():
            image[offset : offset + view.nbytes] = view
        return bytes(image)


# ------------------------------------------------------------------ reducers


def _array_of_bytes(raw: Any, dtype: np.dtype[Any], shape: tuple[int, ...], order: str) -> Any:
    flat = np.frombuffer(raw, dtype=np.uint8) if memoryview(raw).nbytes else np.empty(0, np.uint8)
    return flat.view(dtype).reshape(shape, order=order)  # type: ignore[call-overload]


def _array_as(array: npt.NDArray[Any], cls: type[Any]) -> Any:
    return array.view(cls)


def _masked_array(data: Any, mask: Any, fill_value: Any, hard: bool) -> Any:
    return np.ma.MaskedArray(data, mask=mask, fill_value=fill_value, hard_mask=hard)


def _as_writable(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The same memory, for a pickle stream that does not say that it must not be written.

    Whether an object's arrays are writable is for who opens it to say, not for who put it: in an
    update they are. Nothing is written through this one.
    """
    memory: Any = (ctypes.c_char * array.nbytes).from_address(array.__array_interface__["data"][0])
    memory.owner = array
    alias: npt.NDArray[Any] = np.ndarray(array.shape, array.dtype, memory, 0, array.strides)
    return alias


def _reduce_array(array: npt.NDArray[Any]) -> Any:
    """Makes an array of plain data leave out of band, whatever its strides and its dtype."""
    dtype = array.dtype
    if dtype.hasobject or dtype.itemsize == 0 or type(dtype).__name__ == "StringDType":
        return NotImplemented
    if not (array.flags.c_contiguous or array.flags.f_contiguous):
        if array.nbytes < CONTIGUOUS_COPY_BYTES:
            return NotImplemented
        array = np.ascontiguousarray(array)
    if array.nbytes == 0:
        return NotImplemented
    if not array.flags.writeable:
        array = _as_writable(array)
    try:
        memoryview(cast(Any, array))
    except (ValueError, BufferError, NotImplementedError):
        # datetime64 and the like refuse the buffer protocol, their bytes do not.
        order = "C" if array.flags.c_contiguous else "F"
        flat = array.reshape(-1, order=order).view(np.uint8)  # type: ignore[call-overload]
        return _array_of_bytes, (pickle.PickleBuffer(flat), dtype, array.shape, order)
    return array.__reduce_ex__(5)


def _torch_tensor(array: Any, view_as: str, requires_grad: bool, parameter: bool) -> Any:
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # "the given NumPy array is not writable"
        tensor = torch.from_numpy(array)
    if view_as:
        tensor = tensor.view(getattr(torch, view_as))
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad=requires_grad)
    return tensor.requires_grad_(requires_grad) if requires_grad else tensor


def _reduce_tensor(torch: Any, tensor: Any) -> Any:
    parameter = type(tensor) is torch.nn.Parameter
    if type(tensor) is not torch.Tensor and not parameter:
        return NotImplemented
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or tensor.is_quantized:
        return NotImplemented
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    view_as = ""
    try:
        array = plain.numpy()
    except TypeError:  # bfloat16, float8: NumPy has no such dtype, but the bits fit an integer
        if plain.dim() == 0:
            return NotImplemented
        bits = {1: torch.uint8, 2: torch.int16}.get(plain.element_size())
        if bits is None:
            return NotImplemented
        view_as = str(plain.dtype).removeprefix("torch.")
        array = plain.view(bits).numpy()
    return _torch_tensor, (array, view_as, bool(tensor.requires_grad), parameter)


def array_reduction(obj: Any) -> Any:
    """How this object leaves its buffers out of band, or NotImplemented for pickle's own way."""
    if isinstance(obj, np.ndarray):
        cls = type(obj)
        if cls is np.ndarray:
            return _reduce_array(obj)
        if cls is GlobalArray:
            return _reduce_array(plain(obj))
        if cls is np.memmap:  # its file is not ours to reopen elsewhere
            return _reduce_array(np.asarray(obj))
        if cls in (np.recarray, np.matrix):
            return _array_as, (obj.view(np.ndarray), cls)
        if cls is np.ma.MaskedArray:
            masked: Any = obj
            mask = masked.mask if masked.mask is not np.ma.nomask else False
            return _masked_array, (masked.data, mask, masked.fill_value, masked.hardmask)
        return NotImplemented
    arrow = sys.modules.get("pyarrow")
    if arrow is not None and isinstance(obj, arrow.Array):
        part = trimmed(obj)
        return NotImplemented if part is obj else part.__reduce__()
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(obj, torch.Tensor):
        return _reduce_tensor(torch, obj)
    return library_reduction(obj)


class _Pickler(cloudpickle.Pickler):
    has_pointers = False
    arrays: list[npt.NDArray[Any]] | None = None  # where those that were met are collected
    as_is = False  # nothing is cut, so no buffer is looked into

    def reducer_override(self, obj: Any) -> Any:
        if self.as_is:
            return super().reducer_override(obj)
        if type(obj) is Pointer:
            self.has_pointers = True
            return obj.reduction()
        if self.arrays is not None and isinstance(obj, np.ndarray):
            self.arrays.append(obj)
        reduction = registered_reduction(obj)
        if reduction is not NotImplemented:
            return reduction
        reduction = array_reduction(obj)
        if reduction is not NotImplemented:
            return reduction
        return super().reducer_override(obj)


# ------------------------------------------------------------------ apart, and together again


def _warn_travels_whole(obj: object, plan: Plan) -> None:
    cls = type(obj)
    warnings.warn(
        f"{cls.__module__}.{cls.__qualname__} keeps {format_bytes(plan.inband_bytes)} of its "
        f"{format_bytes(plan.total_bytes)} outside of buffers: it works, but every process that "
        "gets it reads and rebuilds that part whole. NumPy arrays, Arrow tables and pandas "
        "frames, alone or inside other objects, are paged in where they are touched. For a class "
        "that can read memory that is not its own, clamor.register_adapter does that.",
        ClamorWarning,
        stacklevel=level_of_caller(),
    )


def dump(
    obj: object,
    arrays: list[npt.NDArray[Any]] | None = None,
    inside: list[Anchor] | None = None,
    as_is: bool = False,
) -> tuple[memoryview, list[memoryview], bool]:
    """The pickle stream, the buffers out of band, and whether there are pointers in it.

    Args:
        obj: what is pickled.
        arrays: gets those that were met.
        inside: gets the anchors of references that were met.
        as_is: Arrow arrays are not cut to what they use, which would look into their buffers.

    Raises:
        UnpicklableError: Something in it cannot be pickled; the cause says what.
    """
    stream = io.BytesIO()
    views: list[memoryview] = []

    def out_of_band(buffer: pickle.PickleBuffer) -> bool:
        try:
            views.append(buffer.raw())
        except BufferError:
            return True  # not contiguous: pickle says so better than we can
        return False

    pickler = _Pickler(stream, protocol=5, buffer_callback=out_of_band)
    pickler.arrays = arrays
    pickler.as_is = as_is
    try:
        with collecting() as found:
            pickler.dump(obj)
    except (KeyboardInterrupt, SystemExit, MemoryError, UnpicklableError):
        raise
    except Exception as error:  # __reduce__ of any class may raise anything
        cls = type(obj)
        raise UnpicklableError(
            f"An object of type {cls.__module__}.{cls.__qualname__} cannot be pickled: "
            f"{type(error).__name__}: {error}."
        ) from error
    if inside is not None:
        inside += found
    return stream.getbuffer(), views, pickler.has_pointers


def take_apart(obj: object) -> Pickled:
    """Pickles an object with its buffers out of band. Copies no buffer.

    Raises:
        UnpicklableError: Something in it cannot be pickled; the cause says what.
    """
    inside: list[Anchor] = []
    inband, views, has_pointers = dump(obj, inside=inside)
    if has_pointers:
        raise UnpicklableError(
            "A clamor.Pointer means nothing in a copy of what it points to.",
            hint="Publish it from the region that it points into: region.publish(pointer).",
        )
    plan = make_plan(inband.nbytes, [view.nbytes for view in views], kind_of(obj))
    if plan.inband_bytes > LARGE_INBAND_BYTES and 2 * plan.inband_bytes > plan.total_bytes:
        _warn_travels_whole(obj, plan)
    return Pickled(plan, inband, tuple(views), tuple(inside))


@dataclass(frozen=True, slots=True)
class InPlace:
    """An object taken apart where it was built.

    Args:
        plan: what lies where.
        pieces: (offset, bytes) of what has to be copied.
        buffers: all of them: they must stay as they are for as long as the region is written.
        arrays: NumPy arrays that were met in the object, wherever they lie.
        inside: anchors of the references that are in it.
    """

    plan: Plan
    pieces: tuple[tuple[int, memoryview], ...]
    buffers: tuple[memoryview, ...]
    arrays: tuple[npt.NDArray[Any], ...]
    inside: Anchors


def take_apart_in_place(
    obj: object,
    begin: int,
    end: int,
    place: Callable[[int, int], int],
    *,
    capacity_bytes: int,
    fixed: bool = False,
    as_is: bool = False,
) -> InPlace:
    """Pickles an object whose buffers lie, as far as possible, where they are to stay.

    Args:
        obj: what is published.
        begin, end: addresses of the region.
        place: (number of bytes, alignment) -> offset of new memory in the region, for the stream
            and for buffers that lie elsewhere.
        capacity_bytes: the region's length.
        fixed: as `Plan.fixed`; also true where there is a `Pointer` in the object.
        as_is: as `dump`'s.

    Raises:
        UnpicklableError: Something in it cannot be pickled; the cause says what.
        Whatever `place` raises.
    """
    arrays: list[npt.NDArray[Any]] = []
    inside: list[Anchor] = []
    inband, views, has_pointers = dump(obj, arrays, inside, as_is)
    pieces: list[tuple[int, memoryview]] = []

    def placed(view: memoryview, alignment: int) -> int:
        offset = place(view.nbytes, alignment)
        pieces.append((offset, view))
        return offset

    buffers: list[tuple[int, int]] = []
    for view in views:
        if view.nbytes == 0:
            buffers.append((0, 0))
            continue
        address = int(np.frombuffer(view, np.uint8).__array_interface__["data"][0])
        if begin <= address and address + view.nbytes <= end:
            offset = address - begin
        else:
            alignment = BLOCK_BYTES if view.nbytes >= BLOCK_BYTES else BUFFER_ALIGNMENT
            offset = placed(view, alignment)
        buffers.append((offset, view.nbytes))
    stream_offset = placed(inband, BUFFER_ALIGNMENT)
    ends = (offset + n_bytes for offset, n_bytes in (*buffers, (stream_offset, inband.nbytes)))
    plan = Plan(
        max(ends),
        inband.nbytes,
        tuple(buffers),
        inband_offset=stream_offset,
        capacity_bytes=capacity_bytes,
        fixed=fixed or has_pointers,
        kind=kind_of(obj),
    )
    return InPlace(
        plan=plan,
        pieces=tuple(pieces),
        buffers=tuple(views),
        arrays=tuple(arrays),
        inside=tuple(inside),
    )


def array_shape(shape: Any, dtype: Any) -> tuple[np.dtype[Any], tuple[int, ...], int]:
    """The dtype, the dimensions and the number of bytes of an array of plain data.

    Raises:
        ValueError: dtype holds Python objects, or a dimension is negative.
    """
    dtype = np.dtype(dtype)
    if dtype.hasobject or dtype.itemsize == 0:
        raise ValueError(f"an array of {dtype} cannot be made of zero bytes")
    lengths = (shape,) if hasattr(shape, "__index__") else shape
    dims: tuple[int, ...] = tuple(operator.index(n) for n in lengths)
    if any(n < 0 for n in dims):
        raise ValueError(f"negative dimensions are not allowed: {dims}")
    n_bytes = dtype.itemsize
    for n in dims:
        n_bytes *= n
    return dtype, dims, n_bytes


def take_apart_zeros(shape: Any, dtype: Any, capacity: int | None = None) -> tuple[Plan, bytes]:
    """The plan and the stream of an array of zeros, without making it.

    Args:
        shape, dtype: of the array.
        capacity: rows that the region has addresses for; the array may grow to so many.

    Raises:
        ValueError: dtype holds Python objects, a dimension is negative, or the capacity is below
            the number of rows.
    """
    dtype, dims, n_bytes = array_shape(shape, dtype)
    inband = array_stream(dtype, dims)
    kind = kind_of_array(dtype, dims)
    if capacity is None:
        return make_plan(len(inband), [n_bytes], kind), inband
    capacity = operator.index(capacity)
    if not dims or capacity < dims[0]:
        raise ValueError(f"an array of shape {dims} does not fit in a capacity of {capacity} rows")
    _, _, capacity_bytes = array_shape((capacity, *dims[1:]), dtype)
    # The stream of a longer array is a little longer: it is rewritten where it is.
    offset = round_up(len(inband) + GROWN_STREAM_BYTES, BLOCK_BYTES)
    plan = Plan(
        offset + n_bytes,
        len(inband),
        ((offset, n_bytes),),
        capacity_bytes=offset + capacity_bytes,
        kind=kind,
    )
    return plan, inband


def array_stream(dtype: np.dtype[Any], shape: tuple[int, ...], order: str = "C") -> bytes:
    """The pickle stream of an array of plain data, over one buffer that is made later.

    Args:
        dtype, shape: of the array.
        order: "C", or "F" for Fortran's.
    """
    stream = io.BytesIO()
    pickler = pickle.Pickler(stream, protocol=5, buffer_callback=lambda _: False)
    pickler.dump(_Placeholder(dtype, shape, order))
    return stream.getvalue()


class _Placeholder:
    """Pickles to what an array of this dtype and shape would, over a buffer made later."""

    def __init__(self, dtype: np.dtype[Any], shape: tuple[int, ...], order: str) -> None:
        self.dtype, self.shape, self.order = dtype, shape, order

    def __reduce_ex__(self, protocol: Any) -> Any:
        buffer = pickle.PickleBuffer(bytearray())
        return _array_of_bytes, (buffer, self.dtype, self.shape, self.order)


def _global_of_bytes(
    raw: Any, dtype: np.dtype[Any], shape: tuple[int, ...], order: str, *rest: Any
) -> Any:
    return as_global(_array_of_bytes(raw, dtype, shape, order, *rest))


def _global_from_buffer(raw: Any, dtype: np.dtype[Any], shape: tuple[int, ...], order: str) -> Any:
    flat: npt.NDArray[Any] = np.frombuffer(raw, dtype)
    return as_global(flat.reshape(shape, order=order))  # type: ignore[call-overload]


# What NumPy's pickles, and ours, make arrays over buffers by; NumPy's stood in two modules.
_GLOBAL_MAKERS: Final[dict[tuple[str, str], Any]] = {
    ("numpy._core.numeric", "_frombuffer"): _global_from_buffer,
    ("numpy.core.numeric", "_frombuffer"): _global_from_buffer,
    (__name__, "_array_of_bytes"): _global_of_bytes,
}


class _GlobalUnpickler(pickle.Unpickler):
    """Arrays over buffers become `GlobalArray`s. One that stands twice in the object is one."""

    def find_class(self, module: str, name: str) -> Any:
        made = _GLOBAL_MAKERS.get((module, name))
        return super().find_class(module, name) if made is None else made


def put_together(
    image: Any, plan: Plan, stream: bytes | None = None, *, as_globals: bool = False
) -> Any:
    """Rebuilds the object over a byte array that holds a region's content.

    Args:
        image: one-dimensional uint8 array. What it rests on must live as long as it does: the
            object's buffers keep it, and nothing else, alive. Read-only in, read-only out.
        plan: as `take_apart` made it.
        stream: the pickle stream, where it is known: then the image is not touched.
        as_globals: its arrays are `GlobalArray`s.
    """
    buffers = (image[offset : offset + n_bytes] for offset, n_bytes in plan.buffers)
    inband: Any = stream
    if inband is None:
        inband = memoryview(image[plan.inband_offset : plan.inband_offset + plan.inband_bytes])
    if as_globals and plan.buffers:
        return _GlobalUnpickler(io.BytesIO(inband), buffers=buffers).load()
    return pickle.loads(inband, buffers=buffers)


_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def format_bytes(n_bytes: int) -> str:
    """For people: 1.2 GiB.

    Example:
        >>> format_bytes(4096), format_bytes(17), format_bytes(1 << 30)
        ('4.0 KiB', '17 B', '1.0 GiB')
    """
    if n_bytes < 1024:
        return f"{n_bytes} B"
    value = float(n_bytes)
    for unit in _UNITS[1:]:
        value /= 1024
        if value < 1024 or unit == _UNITS[-1]:
            return f"{value:.1f} {unit}"
    raise AssertionError("unreachable")


@functools.lru_cache(maxsize=256)
def stream_blocks(plan: Plan) -> npt.NDArray[np.uint64]:
    """The runs of blocks that the pickle stream lies on; not to be changed."""
    runs = np.array(runs_of_buffers(plan, lambda _: False), np.uint64).reshape(-1, 2)
    runs.flags.writeable = False
    return runs


def runs_of_buffers(
    plan: Plan, indices: Callable[[int], bool] | None = None
) -> list[tuple[int, int]]:
    """(first block, number of blocks) of the stream and the chosen buffers, merged."""
    spans = itertools.chain(
        [(plan.inband_offset, plan.inband_bytes)],
        (span for i, span in enumerate(plan.buffers) if indices is None or indices(i)),
    )
    runs: list[tuple[int, int]] = []
    for offset, n_bytes in sorted(spans):
        if n_bytes == 0:
            continue
        first, end = offset // BLOCK_BYTES, -(-(offset + n_bytes) // BLOCK_BYTES)
        if runs and first <= runs[-1][0] + runs[-1][1]:
            runs[-1] = (runs[-1][0], max(end - runs[-1][0], runs[-1][1]))
        else:
            runs.append((first, end - first))
    return runs
