"""`clamor.remote`: as `ray.remote`, but references arrive as the objects they stand for.

The wrapped function runs inside a `_Task`: it opens the references among the arguments, holds
their leases while the call runs, and tells the page server afterwards what was touched. What the
call keeps or returns of the objects keeps its own hold on the leases.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextvars import ContextVar
from typing import Any

import ray

from clamor_ray import errors
from clamor_ray._counting.anchors import Anchor
from clamor_ray._protocol.config import ReadSets, check_read_sets, read_sets_of_env
from clamor_ray._read import bad_address
from clamor_ray._read.lease import Lease
from clamor_ray._read.ref import GlobalRef
from clamor_ray._tasks.passing import Passing, is_packed, unpacked
from clamor_ray._tasks.predicted_reads import PredictedReads
from clamor_ray._tasks.read_predictor import Hinted, hinting_of

logger = logging.getLogger("clamor_ray")


class _Task:
    """The leases of one call.

    Args:
        read_set: coarse, exact or off; None for what CLAMOR_READ_SETS says in this process.
        name: of the function, for people.
    """

    def __init__(self, read_set: ReadSets | None, name: str) -> None:
        self._read_set = read_set
        self._name = name
        self._leases: list[Lease] = []
        self._anchors: list[weakref.ref[Anchor]] = []  # of what the caller holds for the call
        self._versions: dict[int, int] = {}
        self._replaying: PredictedReads | None = None

    def resolve(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with top-level references opened."""
        read_set = self._read_set or read_sets_of_env()
        args, kwargs = self._unhint(args, kwargs, read_set)
        opened: dict[object, Any] = {}  # one reference passed twice is one object

        def resolved(value: Any) -> Any:
            if not isinstance(value, GlobalRef):
                return value
            # Ray pickles each argument on its own, so that one reference arrives as two. Each is
            # opened at the version that it was pickled with: a call that is run again sees the
            # same.
            key = (value._scope, value._region, value.version)
            self._anchors += map(weakref.ref, value._anchors or ())
            if key not in opened:
                obj, lease = value._open("r", read_set, again=True)
                if lease is not None and read_set != "off":
                    self._leases.append(lease)
                    self._versions[value._region] = value.version
                opened[key] = obj
            return opened[key]

        opened_args = tuple(resolved(value) for value in args)
        opened_kwargs = {name: resolved(value) for name, value in kwargs.items()}
        if self._replaying is not None:
            self._replaying.fetch(self._leases)
        return opened_args, opened_kwargs

    def _unhint(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], read_set: str
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as they were passed. What the caller said is asked for at once: the answer
        comes while references are opened."""
        args = tuple(map(unpacked, args))
        kwargs = {name: unpacked(value) for name, value in kwargs.items()} if kwargs else kwargs
        hints = [value for value in (*args, *kwargs.values()) if isinstance(value, Hinted)]
        if not hints:
            return args, kwargs

        def plain(value: Any) -> Any:
            return value.ref if isinstance(value, Hinted) else value

        args = tuple(plain(value) for value in args)
        kwargs = {name: plain(value) for name, value in kwargs.items()}
        if read_set != "off":
            refs = [value for value in (*args, *kwargs.values()) if isinstance(value, GlobalRef)]
            self._replaying = PredictedReads(hints[0], refs)
        return args, kwargs

    def finish(self) -> None:
        """Reports what was touched, which never fails the task: it is statistics. What outlives the
        call holds its variable itself from now on."""
        leases, self._leases = self._leases, []
        read = []
        for lease in leases:
            with contextlib.suppress(errors.ClamorError):
                if (runs := lease.report_reads()) is not None:
                    read.append((lease.region, runs))
            del lease
        if self._replaying is not None:
            self._replaying.note(read, self._name, self._versions)
        leases.clear()
        self._replaying = None
        for kept in self._anchors:
            if (anchor := kept()) is not None:
                try:
                    anchor.object_ref()
                except errors.ServerUnavailableError as error:
                    logger.warning("what %s keeps may be freed: %s", self._name, error.message)


def _has_refs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    return any(
        isinstance(value, GlobalRef) or is_packed(value) for value in (*args, *kwargs.values())
    )


# Whether a function runs that Ray has called. What it calls itself gets its arguments as they are,
# as with Ray's own references.
_runs: ContextVar[bool] = ContextVar("clamor_runs", default=False)


def _is_inside() -> bool:
    """A function of its own: wrappers are pickled with their globals, and no ContextVar can be."""
    return _runs.get()


@contextlib.contextmanager
def _running() -> Iterator[None]:
    """For the function's own code alone: a generator that waits for its consumer does not run."""
    _runs.set(True)
    try:
        yield
    except OSError as error:
        bad_address.explain(error)
        raise
    finally:
        _runs.set(False)


def resolving(function: Callable[..., Any], read_set: ReadSets | None = None) -> Callable[..., Any]:
    """`function`, but references among its arguments arrive as objects when Ray calls it.

    It is of the same kind as `function`: plain, coroutine, generator or asynchronous generator,
    with its name, documentation and signature. A call that such a function makes itself, as one
    method of an actor calls another, resolves nothing.
    """
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if inspect.isasyncgenfunction(function):

        @functools.wraps(function)
        async def asyncgen(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            if _is_inside():
                async for item in function(*args, **kwargs):
                    yield item
                return
            task = _Task(read_set, name)
            if _has_refs(args, kwargs):  # mapping waits for the page server: not on the loop
                args, kwargs = await asyncio.to_thread(task.resolve, args, kwargs)
            try:
                async with contextlib.aclosing(function(*args, **kwargs)) as items:
                    while True:
                        with _running():
                            try:
                                item = await anext(items)
                            except StopAsyncIteration:
                                break
                        yield item
            finally:
                del args, kwargs  # what is left of them then outlives the call
                task.finish()

        return asyncgen

    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def coroutine(*args: Any, **kwargs: Any) -> Any:
            if _is_inside():
                return await function(*args, **kwargs)
            task = _Task(read_set, name)
            if _has_refs(args, kwargs):
                args, kwargs = await asyncio.to_thread(task.resolve, args, kwargs)
            try:
                with _running():
                    return await function(*args, **kwargs)
            finally:
                del args, kwargs
                task.finish()

        return coroutine

    if inspect.isgeneratorfunction(function):

        @functools.wraps(function)
        def generator(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
            if _is_inside():
                return (yield from function(*args, **kwargs))
            task = _Task(read_set, name)
            args, kwargs = task.resolve(args, kwargs)
            try:
                # Not `yield from`: Ray sends statistics into generators, which user code like
                # `yield from a_list` would pass on to something that has no send.
                with contextlib.closing(function(*args, **kwargs)) as items:
                    while True:
                        with _running():
                            try:
                                item = next(items)
                            except StopIteration:
                                break
                        yield item
            finally:
                del args, kwargs
                task.finish()
            return None

        return generator

    @functools.wraps(function)
    def plain(*args: Any, **kwargs: Any) -> Any:
        if _is_inside():
            return function(*args, **kwargs)
        task = _Task(read_set, name)
        args, kwargs = task.resolve(args, kwargs)
        try:
            with _running():
                return function(*args, **kwargs)
        finally:
            del args, kwargs
            task.finish()

    return plain


def _resolving_class(cls: type[Any], read_set: ReadSets | None) -> type[Any]:
    """A subclass whose methods resolve their arguments: all that can be called by name, static and
    class methods, `__init__` and `__call__` among them."""
    body: dict[str, Any] = {"__module__": cls.__module__, "__doc__": cls.__doc__}
    for name in dir(cls):
        if name.startswith("__") and name not in ("__init__", "__call__"):
            continue
        member = inspect.getattr_static(cls, name)
        if isinstance(member, (staticmethod, classmethod)):
            if inspect.isfunction(member.__func__):
                body[name] = type(member)(resolving(member.__func__, read_set))
        elif inspect.isfunction(member):
            body[name] = resolving(member, read_set)
    resolved = type(cls.__name__, (cls,), body)
    resolved.__qualname__ = cls.__qualname__
    return resolved


def _wrap(
    target: Any, options: dict[str, Any], read_set: ReadSets | None, replay: str | bool | None
) -> Any:
    if inspect.isclass(target):
        if replay is not None:
            raise TypeError("replay= is for functions: an actor's methods are not replayed")
        wrapped: Any = _resolving_class(target, read_set)
    elif callable(target):
        wrapped = resolving(target, read_set)
        hinting = None if read_set == "off" else hinting_of(target, replay)
        wrapped.__ray_invocation_decorator__ = Passing(hinting)
    else:
        raise TypeError(f"clamor.remote takes a function or a class, not {target!r}")
    return ray.remote(**options)(wrapped) if options else ray.remote(wrapped)


def remote(
    *args: Any, read_set: str | None = None, replay: str | bool | None = None, **options: Any
) -> Any:
    """As `ray.remote`: turns a function into a task, a class into an actor.

    `GlobalRef`s among the arguments, at top level as with Ray's own references, arrive as the
    objects they stand for, each at the version that it was passed with: a task that Ray runs again
    sees what it first saw. The lease is the call: it ends when the call does, unless something
    keeps the object. Afterwards the node's page server knows which blocks the call touched.
    `clamor.update` takes such an object too.

    Args:
        read_set: "coarse" (a superset of what was touched, cheap), "exact" (dearer first
            touches; a superset all the same while this process has other uses of the object)
            or "off"; what CLAMOR_READ_SETS says on the worker where it is None.
        replay: whether what a task touched is fetched ahead, in one batch, for the next task that
            is the same: of this function, with equal plain arguments (numbers, text, bytes, bools,
            None, tuples of them) and the same variables, at whatever version. None: yes, but tasks
            that have arguments of other types only after two of them have touched much the same.
            True: yes, at once. A name: in the place of the function's own, and as True. False: no.
            Without read sets nothing is replayed.
        options: as `ray.remote`'s: num_cpus, num_returns, max_retries, ...
        args: the function or the class, where it is used as a decorator without options.

    Returns:
        What `ray.remote` returns, with `.remote()` and `.options()`.

    Raises:
        TypeError: It decorates neither a function nor a class, or a class with `replay`.

    Example:
        >>> @clamor.remote(num_cpus=1)
        ... def total(x, first, last):
        ...     return int(x[first:last].sum())
        >>> ray.get(total.remote(clamor.put(np.arange(10**5)), 10, 20))
        145
    """
    choice = None if read_set is None else check_read_sets(read_set)
    if replay is not None and not isinstance(replay, (bool, str)):
        raise TypeError(f"replay is a name, True, False or None, not {replay!r}")
    if len(args) == 1 and not options and read_set is None and replay is None:
        return _wrap(args[0], {}, None, None)
    if args:
        raise TypeError("use @clamor.remote, or @clamor.remote(name=value, ...)")
    return lambda target: _wrap(target, options, choice, replay)
