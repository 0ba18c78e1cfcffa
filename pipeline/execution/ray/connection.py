"""The connection to a Ray cluster: opened without Ray's taking over this process's signals, output or telemetry."""

import contextlib
import logging
import os
import re
import signal
import socket
import threading
import uuid
from collections.abc import Iterator, Sequence
from types import ModuleType

from enginesmith.pipeline.errors import MissingCapability, UsageError, install_command

AUTO = "auto"
_CLIENT = "ray://"
_ADDRESS = re.compile(rf"{AUTO}|({_CLIENT})?([^\s/:]+|\[[^\s/]+\]):[0-9]{{1,5}}")
"""Ray itself takes others: ``local`` would start a cluster."""
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_RUNTIME_ENV_IGNORE_GITIGNORE": "1", "RAY_TQDM_PATCH_PRINT": "0"}
"""No telemetry; and what a .gitignore names travels all the same: weights are often in there."""
_REACH_SECONDS = 5.0
"""How long a machine may take to accept a connection."""
_ANSWER_SECONDS = 15.0
"""And to say the first bytes of its protocol."""


def ray() -> ModuleType:
    """The package.

    Raises:
        MissingCapability: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingCapability(
            "--executor ray needs the package ray, which is not here", install_command("ray")
        ) from error
    return ray


def connect(address: str, modules: Sequence[str]) -> None:
    """Join the cluster as a driver that has these folders travel; nothing is started where there is none.

    Raises:
        MissingCapability: the package or the cluster is not there, or is of another version.
        UsageError: the address is none, or this process is connected already.
    """
    if not _ADDRESS.fullmatch(address):
        raise UsageError(
            f"{address!r} is no address of a Ray cluster",
            "auto is the one that this machine is a node of; HEAD:6379 names it; any other machine has ray://HEAD:10001",
        )
    package = ray()
    if package.is_initialized():
        raise UsageError("this process is connected to a Ray cluster already", "call ray.shutdown() before")
    _validate_reachable(address)
    with _environment(), _own_signals(), _silent_listener():
        try:
            package.init(
                address=address,
                runtime_env={"py_modules": list(modules)},
                namespace=f"enginesmith-{uuid.uuid4().hex}",
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except (ConnectionError, RuntimeError, ValueError, OSError, AssertionError) as error:
            raise _refused(address, error) from error


def _validate_reachable(address: str) -> None:
    """See that somebody listens there who may be Ray, which itself tries for minutes, and takes no interrupt meanwhile.

    Raises:
        MissingCapability: nobody does, or another service.
    """
    where = address
    if address == AUTO:
        from ray._private import services

        running = services.find_gcs_addresses()  # type: ignore[no-untyped-call]
        where = os.environ.get("RAY_ADDRESS") or next(iter(running), "")
    host, colon, port = where.removeprefix(_CLIENT).rpartition(":")
    if not (colon and port.isdecimal()):
        return
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_SECONDS) as connection:
            connection.settimeout(_ANSWER_SECONDS)
            if not _speaks_http2(connection):
                raise ConnectionError("what listens on this port is another service")
    except (OSError, OverflowError) as error:
        raise _refused(address, error) from error


def _speaks_http2(connection: socket.socket) -> bool:
    """Whether a server answers with settings, as all of gRPC do; it is not asked where Ray is set up to use TLS."""
    if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
        return True
    settings = b"\0\0\0\x04\0\0\0\0\0"  # an empty frame of them, RFC 9113, section 6.5
    connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
    with connection.makefile("rb") as answer:
        return answer.read(len(settings))[3:4] == b"\x04"


def disconnect() -> None:
    """End the connection; the cluster goes on."""
    with _own_signals():
        ray().shutdown()


def _refused(address: str, error: Exception) -> MissingCapability:
    words = " ".join(str(error).split())
    brief = words if len(words) <= 300 else f"{words[:299]}…"
    if "version" in words.lower() and "mismatch" in words.lower():
        return MissingCapability(f"the Ray cluster at {address} is of another version: {brief}", "install the same ray")
    if isinstance(error, ImportError) or ("grpc" in words.lower() and address.startswith(_CLIENT)):
        return MissingCapability(f"{address} cannot be reached: {brief}", install_command("ray"))
    if address == AUTO:
        return MissingCapability(
            "there is no Ray cluster that this machine is part of",
            "start one with `ray start --head`, and on each other machine `ray start --address=HEAD:6379`; "
            "or name one with --ray-address",
        )
    remedy = "check the address and that it runs (`ray status`)"
    if not address.startswith(_CLIENT):
        remedy += (
            "; this machine has to be one of its nodes: from any other machine it is --ray-address ray://HEAD:10001"
        )
    return MissingCapability(f"there is no Ray cluster at {address}: {brief}", remedy)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    before = {name: os.environ.get(name) for name in _QUIET}
    os.environ.update(_QUIET)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Keep the handlers of this process: Ray would end it on SIGTERM where we leave a run that can be resumed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _silent_listener() -> Iterator[None]:
    """Keep Ray from printing each node's and worker's end to standard output, where our JSON goes: we say it ourselves.

    There is no option for that; the function that prints is started as a thread while Ray connects.
    """
    from ray._private import worker

    name = "listen_error_messages"
    listener = getattr(worker, name, None)
    if listener is None:  # another version has another way
        yield
        return
    setattr(worker, name, lambda *_: None)
    try:
        yield
    finally:
        setattr(worker, name, listener)
