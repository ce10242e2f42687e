"""Starts what a lab's raylets start as forks of itself, which has imported what Ray imports.

A worker of Ray computes for most of a second before it is asked for anything: it imports Ray, what
Ray wants, and NumPy. A lab has some dozens of them, and the tests of a day some thousands, which
was a third of all that they computed. Here one process for each pytest process imports once all
but Ray itself, which reads the variables of its worker when it is loaded; a worker is a fork, with
the arguments, variables, directory and outputs that its raylet gave. So is the agent for runtime
environments.

What a raylet starts is `worker_launcher.c`, which asks here, and ends when the worker does. Who
looks for the processes of a node finds the worker below it: `parents()`.

Args: the listening socket, the pipe that ends with whoever started this, the directory of parents,
a file with the names of the modules, which is written where there is none.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import os
import resource
import runpy
import select
import signal
import socket
import struct
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

N_OUTPUTS = 3
REQUEST_S = 10.0  # that a launcher has to say what it wants
# What a process reads when it begins, or a module when it is imported: a worker that has another
# one is none for a fork.
READ_EARLY = ("PYTHON", "LD_", "OMP_", "OPENBLAS_", "MKL_", "MALLOC_", "GLIBC_", "GRPC_")
COMPILED = "clamor_ray._pagecache"
OF_ALL = {"PYTHONUNBUFFERED": "1"}  # what a raylet gives to each of its workers of these


def parents(directory: Path) -> dict[int, int]:
    """Who has asked for each worker that lives, by the worker."""
    found = {}
    for entry in directory.iterdir():
        with contextlib.suppress(OSError, ValueError):
            found[int(entry.name)] = int(entry.read_text())
    return found


def is_for_a_fork(variables: dict[str, str], own: dict[str, str]) -> bool:
    """Whether a worker with these variables begins as a fork of a process with those does.

    Example:
        >>> is_for_a_fork({"RAY_JOB_ID": "01", "HOME": "/a"}, {"HOME": "/b"})
        True
        >>> is_for_a_fork({"PYTHONPATH": "/a"}, {})
        False
    """
    names = (variables.keys() | own.keys()) - {"PYTHONBREAKPOINT"}  # read when it is called
    early = {name for name in names if name.startswith(READ_EARLY)}
    return all(variables.get(name) == own.get(name) for name in early)


def _received(connection: socket.socket) -> tuple[list[bytes], list[int]]:
    """A request's texts, and the worker's outputs."""
    fds = array.array("i")
    head, ancillary, _, _ = connection.recvmsg(4, socket.CMSG_SPACE(N_OUTPUTS * fds.itemsize))
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(content)
    (left,) = struct.unpack("<I", head)
    texts = b""
    while len(texts) < left:
        more = connection.recv(left - len(texts))
        if not more:
            raise EOFError("the launcher has ended")
        texts += more
    return texts.split(b"\0")[:-1], list(fds)


def _imported() -> list[str]:
    """What workers and the agent have imported that is not Ray's, in this order. In a process of
    its own."""
    import ray._private.runtime_env.agent.main
    import ray._private.workers.default_worker

    import clamor_ray._session.init
    import clamor_ray._tasks.remote
    import clamor_ray.actors.page_server.page_server
    import clamor_ray.actors.registry.registry  # noqa: F401

    home = os.path.dirname(ray.__file__)

    def is_rays(name: str, spec: Any) -> bool:
        origin = str(spec.origin)
        own = origin.startswith(home) and "thirdparty_files" not in origin
        return own or name.partition(".")[0] in ("ray", "__main__")

    specs = {name: getattr(module, "__spec__", None) for name, module in sys.modules.items()}
    return [name for name, spec in specs.items() if spec is not None and not is_rays(name, spec)]


def _import_all(names: Path) -> None:
    """Imports what the file says; without it a fork finds that out.

    Not Ray, nor what imports it: that is left to the workers. Nor what is compiled of this project.
    """
    if not names.exists():
        pid = os.fork()
        if pid == 0:
            try:
                own = names.with_name(f"{names.name}.{os.getpid()}")
                own.write_text("\n".join(_imported()))
                own.replace(names)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
    # Where Ray keeps some packages of its own, as its import says.
    sys.path.insert(0, str(Path(find_spec("ray").origin).with_name("thirdparty_files")))
    sys.modules["ray"] = None  # type: ignore[assignment]
    for name in names.read_text().split():
        with contextlib.suppress(ImportError):
            if name != COMPILED:
                importlib.import_module(name)
    del sys.modules["ray"]
    del sys.path[0]


def _cgroups(process: int | str) -> dict[str, str]:
    """Path of each hierarchy that it is in, below /sys/fs/cgroup."""
    found = {}
    for line in Path(f"/proc/{process}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        found[controllers.removeprefix("name=")] = path
    return found


def _be_like(process: int) -> None:
    """What a fork has of its parent, as if that were the process that asked for it."""
    own = _cgroups("self")
    for controllers, path in _cgroups(process).items():
        if own.get(controllers) != path:
            tasks = Path("/sys/fs/cgroup", controllers, path.lstrip("/"), "cgroup.procs")
            tasks.write_text(str(os.getpid()))
    for number in {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}:
        resource.setrlimit(number, resource.prlimit(process, number))
    os.sched_setaffinity(0, os.sched_getaffinity(process))
    os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, process))
    Path("/proc/self/oom_score_adj").write_text(Path(f"/proc/{process}/oom_score_adj").read_text())


def _become(
    launcher: int,
    directory: str,
    arguments: list[str],
    variables: dict[str, str],
    outputs: list[int],
) -> None:
    """The worker: never returns."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for to, fd in enumerate(outputs):
            os.dup2(fd, to)
            os.close(fd)
        _be_like(launcher)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update(variables)
        script, *_ = sys.argv = arguments
        sys.path[0] = os.path.dirname(script)
        numpy_random = sys.modules.get("numpy.random")
        if numpy_random is not None:
            numpy_random.seed()  # else all forks draw the same numbers
        runpy.run_path(script, run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        # As the interpreter ends, for what has registered with atexit; Ray's has.
        try:
            import atexit

            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


class Server:
    """Args:
    listener: launchers connect to it.
    pipe: at its end this ends.
    directory: of parents.
    """

    def __init__(self, listener: socket.socket, pipe: int, directory: Path) -> None:
        self._listener = listener
        self._pipe = pipe
        self._directory = directory
        self._own = dict(os.environ)
        self._poll = select.epoll()
        self._poll.register(listener.fileno(), select.EPOLLIN)
        self._poll.register(pipe, select.EPOLLIN)
        self._workers: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
        self._connections: dict[int, int] = {}  # pidfds

    def serve(self) -> None:
        while True:
            events = {fd for fd, _ in self._poll.poll()}
            if self._pipe in events:
                return
            new = self._listener.fileno() in events
            for fd in events:
                if fd in self._workers:
                    self._ended(fd)
                elif fd in self._connections:  # its launcher was killed: so is the worker
                    self._poll.unregister(fd)
                    pid, _ = self._workers[self._connections.pop(fd)]
                    os.kill(pid, signal.SIGKILL)
            if new:  # last: it gets the number of a descriptor that has just been closed
                connection, _ = self._listener.accept()
                with contextlib.suppress(OSError, EOFError, struct.error):
                    self._start(connection)

    def _start(self, connection: socket.socket) -> None:
        connection.settimeout(REQUEST_S)
        texts, outputs = _received(connection)
        directory, n_arguments, *rest = (os.fsdecode(text) for text in texts)
        arguments, pairs = rest[: int(n_arguments)], rest[int(n_arguments) :]
        variables = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
        if not is_for_a_fork(variables, self._own):
            for fd in outputs:
                os.close(fd)
            connection.close()
            return
        launcher = struct.unpack(
            "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        )[0]
        pid = os.fork()
        if pid == 0:
            for fd in (self._poll.fileno(), self._pipe, *self._workers):
                os.close(fd)
            for one in (self._listener, connection, *(c for _, c in self._workers.values())):
                one.close()
            _become(launcher, directory, arguments, variables, outputs)
        for fd in outputs:
            os.close(fd)
        (self._directory / str(pid)).write_text(str(launcher))
        pidfd = os.pidfd_open(pid)
        self._workers[pidfd] = pid, connection
        self._connections[connection.fileno()] = pidfd
        self._poll.register(pidfd, select.EPOLLIN)
        self._poll.register(connection.fileno(), select.EPOLLRDHUP)
        connection.sendall(struct.pack("<i", pid))

    def _ended(self, pidfd: int) -> None:
        pid, connection = self._workers.pop(pidfd)
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            (self._directory / str(pid)).unlink()
        if self._connections.pop(connection.fileno(), None) is not None:
            # By hand: a worker that was just forked has it open still, and the poll would go on.
            self._poll.unregister(connection.fileno())
        with contextlib.suppress(OSError):
            connection.sendall(struct.pack("<i", status))
        connection.close()
        self._poll.unregister(pidfd)
        os.close(pidfd)


def main() -> None:
    listener, pipe, directory, names = sys.argv[1:]
    _import_all(Path(names))
    gc.collect()
    gc.freeze()
    Server(socket.socket(fileno=int(listener)), int(pipe), Path(directory)).serve()


if __name__ == "__main__":
    main()
