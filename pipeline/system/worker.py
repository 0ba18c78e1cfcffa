"""Run work in a fresh process from a fork server, so that a crash, a leak or a time limit ends that work alone.

The fork server imports the heavy libraries once; a new worker is then a fork of it, ready in a fraction of a second,
with no thread pool started and CUDA not initialized. What a worker starts itself is a fork of the same server. Both
ends talk over a pipe: requests in, progress and one answer out. A worker dies with its parent, whatever ends that.
"""

import contextlib
import errno
import faulthandler
import functools
import logging
import multiprocessing
import multiprocessing.connection
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from enginesmith.pipeline.errors import (
    EnginesmithError,
    KilledForMemory,
    StepCrashed,
    StepError,
    StepKilled,
    StepTimeout,
    explain_errno,
    explain_import,
)
from enginesmith.pipeline.system import oom
from enginesmith.pipeline.system.device import take_share

_PROGRESS, _DONE, _FAILED = "progress", "done", "failed"
_STOP_SECONDS = 5.0
_LOG_TAIL = 4096
_LAST_LINES = 3
_FATAL, _CRASHED = "Fatal Python error: ", "Current thread 0x"
"""Words of faulthandler: its first, and those before the calls of the thread that crashed, the innermost first."""
_TRACE = re.compile(r"\n(?=Traceback \(most|[^\n]*\n*  File \")")
"""Begin of a trace inside of an error's message, which torch puts there when CUDA fails at its first use."""
_starting = threading.Lock()
_server: Any = forkserver._forkserver
_ADDRESS = ("_forkserver_address", "_forkserver_authkey")  # what reaches a fork server; the key since Python 3.14

Progress = Callable[[str], None]


def run(
    function: Callable[..., Any],
    *args: Any,
    log: Path,
    on_progress: Progress | None = None,
    on_start: "Callable[[Worker], None] | None" = None,
    timeout_seconds: float | None = None,
    cores: Collection[int] | None = None,
    prepare: Callable[[], None] | None = None,
) -> Any:
    """Call ``function(*args, progress)`` in a fresh process and give back what it returns.

    ``on_start`` is handed the worker, so that another thread can kill it; ``cores`` are those it may run on;
    ``prepare`` is called in the process while it has one thread.

    Raises:
        EnginesmithError: the function raised it.
        StepError: the function raised anything else, or its process ended without an answer.
    """
    with Worker(_serve_once, function, args, log=log, cores=cores, prepare=prepare) as worker:
        if on_start:
            on_start(worker)
        return worker.receive(on_progress, timeout_seconds)


class Worker:
    """A process that answers requests one at a time; leaving its context ends it."""

    def __init__(
        self,
        body: Callable[..., None],
        *args: Any,
        log: Path,
        cores: Collection[int] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """Start ``body(connection, *args)`` with its standard output and error in ``log``.

        Raises:
            KilledForMemory: the fork server was killed meanwhile; the next worker starts another one.
        """
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_PRELOADED])
        self.log = log
        self._earlier_bytes = log.stat().st_size if log.is_file() else 0
        self._kernel_kills = oom.count_kernel_kills()
        self._ending = threading.Lock()
        """An exit code can be read once, and two threads may want it: the one that kills and the one that waits."""
        self._connection, theirs = context.Pipe()
        if _server.ensure_running is resource_tracker.ensure_running:  # what this worker has and its server lacks
            prepare = functools.partial(_inherit, dict(os.environ), os.sched_getaffinity(0), prepare)
        with hide_main_module(), _preload_named():
            _server.ensure_running()
            address = {name: getattr(_server, name) for name in _ADDRESS if hasattr(_server, name)}
            main = (body, theirs, args, str(log), cores, prepare, address)
            self._process = context.Process(target=_main, args=main, name=body.__name__)
            try:
                self._process.start()
            except (EOFError, ConnectionError) as error:
                _wait_for_server_to_end()
                raise KilledForMemory(
                    "its process was not started, as the fork server that starts it was killed, most likely by the "
                    "kernel because memory ran out",
                    "give it more memory, or fewer --jobs; `resume` does what is missing",
                ) from error
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def request(self, *message: Any, on_progress: Progress | None = None, timeout_seconds: float | None = None) -> Any:
        """Send a message to the body and wait for the answer; errors as in :func:`run`."""
        try:
            self._connection.send(message)
        except (BrokenPipeError, ConnectionResetError):
            raise self._explain_end() from None
        return self.receive(on_progress, timeout_seconds)

    def receive(self, on_progress: Progress | None, timeout_seconds: float | None) -> Any:
        """Wait for one answer; errors as in :func:`run`."""
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while True:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._connection.poll(left):
                self.kill()
                raise StepTimeout(f"it ran past its time limit of {timeout_seconds:.3g} s", "give more: --time")
            try:
                kind, value = self._connection.recv()
            except (EOFError, ConnectionResetError):
                raise self._explain_end() from None
            if kind == _DONE:
                return value
            if kind == _FAILED:
                raise value
            if on_progress:
                on_progress(value)

    def kill(self) -> None:
        """End the process now."""
        with self._ending:
            if self._process.is_alive():
                self._process.kill()
            self._process.join(_STOP_SECONDS)

    def _explain_end(self) -> StepError:
        with self._ending:
            self._process.join(_STOP_SECONDS)
            code = self._process.exitcode
        log_text = ""
        if self.log.is_file():
            log_text = self.log.read_bytes()[self._earlier_bytes :].decode(errors="replace").strip()
        log_text, place = _split_trace(log_text)
        nothing = "nothing but the trace of the crash" if place else "empty"
        tail = f"; the end of its log ({self.log.name}): {log_text or nothing}{place}"
        if code == -signal.SIGKILL:
            return _explain_kill(self._kernel_kills, oom.count_kernel_kills(), tail)
        cause = signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"
        if code == -signal.SIGABRT and oom.says_out_of_memory(log_text):  # an exception that nothing caught
            return oom.out_of_memory(log_text, f"memory ran out, and its process ended ({cause}){tail}")
        remedy = "its log, in the run's logs folder where there is one, has what was running last"
        return StepCrashed(f"its process crashed ({cause}){tail}", remedy)

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            self.kill()
        self.close()

    def close(self) -> None:
        """Let the process end, which removes what its libraries unpacked; it is killed if that takes seconds."""
        self._connection.close()
        with self._ending:
            self._process.join(_STOP_SECONDS)
        self.kill()


def _explain_kill(kernel_kills_before: int | None, kernel_kills: int | None, tail: str) -> StepKilled:
    if kernel_kills is not None and kernel_kills == kernel_kills_before:
        return StepKilled(
            "its process was killed (SIGKILL), and not by the kernel, which killed none for lack of memory" + tail,
            "find out who or what kills processes here; `resume` does what is missing",
        )
    known = kernel_kills is not None and kernel_kills_before is not None
    by_kernel = "the kernel killed its process" if known else "its process was killed, most likely by the kernel"
    return KilledForMemory(
        f"{by_kernel} because memory ran out{tail}",
        "give it more memory, a smaller batch or fewer --jobs; `resume` does what is missing",
    )


def _wait_for_server_to_end() -> None:
    """Wait until a fork server that was killed has ended: only then is another one started."""
    deadline, ended = time.monotonic() + _STOP_SECONDS, os.WEXITED | os.WNOWAIT | os.WNOHANG
    with contextlib.suppress(ChildProcessError):  # it is another process's
        while _server._forkserver_pid and time.monotonic() < deadline:
            if os.waitid(os.P_PID, _server._forkserver_pid, ended) is not None:
                return
            time.sleep(0.01)


def _split_trace(log_text: str) -> tuple[str, str]:
    """Take the last lines of a log, and where the process crashed in words, if faulthandler wrote that below them."""
    before, _, trace = log_text.partition(_FATAL)
    frames = trace.partition(_CRASHED)[2].splitlines()[1 : 1 + _LAST_LINES]
    place = " / ".join(frame.strip() for frame in frames if frame.startswith("  File "))
    lines = [line for line in before[-_LOG_TAIL:].splitlines() if line.strip()]
    return " / ".join(lines[-_LAST_LINES:]), f"; it was in {place}" if place else ""


def serve(connection: Connection, answer: Callable[..., Any]) -> None:
    """Answer requests in a worker: ``answer(*message, progress)`` for each, until the other end hangs up."""
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            message = connection.recv()
            connection.send(_attempt(answer, (*message, _reporter(connection))))


def _serve_once(connection: Connection, function: Callable[..., Any], args: Sequence[Any]) -> None:
    answer = _attempt(function, (*args, _reporter(connection)))
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.send(answer)


def _reporter(connection: Connection) -> Progress:
    return lambda text: connection.send((_PROGRESS, text))


def _attempt(function: Callable[..., Any], args: Sequence[Any]) -> tuple[str, Any]:
    """Catch whatever a step raises and turn it into an answer: the one place where everything is caught."""
    try:
        return _DONE, function(*args)
    except Exception as error:  # noqa: BLE001 - the worker boundary
        traceback.print_exc()
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
            return _FAILED, explain_errno(error, error.filename or "a file of the step")
        if memory := oom.find_cause(error):
            return _FAILED, memory
        if isinstance(error, EnginesmithError):
            return _FAILED, error
        if isinstance(error, ImportError) and (broken := explain_import(error)):
            return _FAILED, broken
        message = _TRACE.split(str(error), maxsplit=1)[0].rstrip()
        return _FAILED, StepError(f"{type(error).__name__}: {message}", "the whole trace is in the step's log")


def _main(
    body: Callable[..., None],
    connection: Connection,
    args: Sequence[Any],
    log: str,
    cores: Collection[int] | None,
    prepare: Callable[[], None] | None,
    address: Mapping[str, object],
) -> None:
    # multiprocessing promises that a child uses its parent's fork server, and starts another: it lacks the address
    vars(_server).update(address, ensure_running=resource_tracker.ensure_running)
    # a process begins others as it was begun itself; the user's code, as a DataLoader, is to do so as anywhere else
    multiprocessing.set_start_method(None, force=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides; Ctrl-C reaches the whole group
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        stream.flush()
        os.dup2(descriptor, number)
    os.close(descriptor)
    faulthandler.enable()
    if cores:
        take_share(cores)
    if prepare:
        prepare()
    end_with_parent()
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    body(connection, *args)


def end_with_parent() -> None:
    """End this process as soon as its parent has ended, however that ended."""
    if (parent := multiprocessing.parent_process()) is not None:
        sentinel = parent.sentinel

        def die_with_parent() -> None:
            multiprocessing.connection.wait([sentinel])
            os._exit(1)

        threading.Thread(target=die_with_parent, daemon=True).start()


def _inherit(environment: Mapping[str, str], cores: Collection[int], prepare: Callable[[], None] | None) -> None:
    """Take over what a worker has set for itself, as its GPU and its cores."""
    os.environ.clear()
    os.environ.update(environment)
    os.sched_setaffinity(0, cores)
    if prepare:
        prepare()


@contextlib.contextmanager
def hide_main_module() -> Iterator[None]:
    """Keep a new process from importing the caller's script again: it needs none of it, and scripts lack guards."""
    main = sys.modules["__main__"]
    with _starting:
        saved = {name: getattr(main, name) for name in ("__file__", "__spec__") if hasattr(main, name)}
        for name in saved:
            setattr(main, name, None)
        try:
            yield
        finally:
            for name, value in saved.items():
                setattr(main, name, value)


_PRELOADED = "enginesmith.pipeline.system.preload"  # not imported here: it is all that is heavy
_wanted: list[str] = []
_only: list[str] = []


@contextlib.contextmanager
def _preload_named() -> Iterator[None]:
    """Tell the fork server, which this may be the start of, what to import."""
    named = {"ENGINESMITH_PRELOAD": " ".join(_wanted)}
    named |= {"ENGINESMITH_PRELOAD_ONLY": " ".join(_only)} if _only else {}
    os.environ.update(named)
    try:
        yield
    finally:
        for name in named:
            del os.environ[name]


def preloaded() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """List what was named with :func:`also_preload` and :func:`preload_only`, for fork servers of other machines."""
    return tuple(_wanted), tuple(_only)


def preload_only(modules: Iterable[str]) -> None:
    """Have the fork server import these instead of all frameworks, for work that needs none; only before it runs."""
    _only[:] = modules


def also_preload(modules: Iterable[str]) -> None:
    """Have the fork server import these too; without effect once it runs."""
    _wanted.extend(module for module in modules if module not in _wanted)
