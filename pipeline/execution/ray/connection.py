"""Connect to a Ray cluster, and stage the code and the project folder that travel to its nodes.

Ray does not take over this process's signals, output or telemetry. Code and project go as Ray's ``py_modules``, each a
folder in a folder of its own. A ``working_dir`` would put the user's modules on the import path of everything there:
their ``queue.py`` in the place of Python's.
"""

import contextlib
import logging
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from enginesmith.pipeline.errors import MissingCapability, UsageError, install_command, storage_errors
from enginesmith.pipeline.frameworks.source import Source
from enginesmith.pipeline.store.inputs import OWN_FILES, OWN_FOLDERS
from enginesmith.pipeline.tasks.base import Task
from enginesmith.pipeline.units import format_bytes, shorten

AUTO = "auto"
_CLIENT = "ray://"
_ADDRESS = re.compile(rf"{AUTO}|({_CLIENT})?([^\s/:]+|\[[^\s/]+\]):[0-9]{{1,5}}")
"""Forms of address that are accepted; Ray itself takes others: ``local`` would start a cluster."""
_QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_RUNTIME_ENV_IGNORE_GITIGNORE": "1", "RAY_TQDM_PATCH_PRINT": "0"}
"""Turns telemetry off; and what a .gitignore names travels all the same: weights are often in there."""
_REACH_SECONDS = 5.0
"""Time in which a machine has to accept a connection."""
_ANSWER_SECONDS = 15.0
"""Time in which it has to send the first bytes of its protocol."""


def ray() -> ModuleType:
    """Import Ray.

    Raises:
        MissingCapability: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingCapability(
            "--executor ray needs the package ray, which is not installed", install_command("ray")
        ) from error
    return ray


def connect(address: str, modules: Sequence[str]) -> None:
    """Join a cluster as a driver whose folders ``modules`` travel to the nodes; never start a cluster.

    Raises:
        MissingCapability: the package or the cluster is not available, or has another version.
        UsageError: the address is invalid, or this process is connected already.
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
            raise _explain_refusal(address, error) from error


def _validate_reachable(address: str) -> None:
    """Check that a service that may be Ray listens at an address; Ray itself tries for minutes, deaf to interrupts.

    Raises:
        MissingCapability: nothing listens there, or another service.
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
            if os.environ.get("RAY_USE_TLS", "0") not in ("", "0"):
                return
            # a server of gRPC answers with HTTP/2 settings; this is an empty frame of them, RFC 9113, section 6.5
            settings = b"\0\0\0\x04\0\0\0\0\0"
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings)
            with connection.makefile("rb") as answer:
                if answer.read(len(settings))[3:4] != b"\x04":
                    raise ConnectionError("what listens on this port is another service")
    except (OSError, OverflowError) as error:
        raise _explain_refusal(address, error) from error


def disconnect() -> None:
    """End the connection; the cluster keeps running."""
    with _own_signals():
        ray().shutdown()


def _explain_refusal(address: str, error: Exception) -> MissingCapability:
    text = " ".join(str(error).split())
    brief = shorten(text, 300)
    if "version" in text.lower() and "mismatch" in text.lower():
        return MissingCapability(f"the Ray cluster at {address} has another version: {brief}", "install the same ray")
    if isinstance(error, ImportError) or ("grpc" in text.lower() and address.startswith(_CLIENT)):
        return MissingCapability(f"{address} cannot be reached: {brief}", install_command("ray"))
    if address == AUTO:
        return MissingCapability(
            "there is no Ray cluster that this machine is part of",
            "start one with `ray start --head`, and on each other machine `ray start --address=HEAD:6379`; "
            "or name one with --ray-address",
        )
    remedy = "check the address and that it runs (`ray status`)"
    if not address.startswith(_CLIENT):
        remedy += "; this machine has to be one of its nodes: "
        remedy += "from any other machine it is --ray-address ray://HEAD:10001"
    return MissingCapability(f"there is no Ray cluster at {address}: {brief}", remedy)


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set Ray's environment variables while the block runs."""
    before = {name: os.environ[name] for name in _QUIET if name in os.environ}
    os.environ.update(_QUIET)
    try:
        yield
    finally:
        for name in _QUIET:
            del os.environ[name]
        os.environ.update(before)


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Restore this process's signal handlers: Ray would end it on SIGTERM, where we leave a run that can be resumed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _silent_listener() -> Iterator[None]:
    """Keep Ray from printing the end of nodes and workers to standard output, where our JSON goes; we report it.

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


PROJECT = "enginesmith_project"
_LARGEST_BYTES = 480 << 20
"""Largest project folder: Ray takes 500 MiB, and the code has to fit too."""
_MOST_FILES = 20_000
_NAMED_FILES = 5
_NEVER = {"__pycache__", "node_modules"}
_RECORDS = ("pyvenv.cfg", "run.json", "fleet.json")
"""Files that mark a folder as an environment, a run or a fleet, which stays here."""


@contextlib.contextmanager
def stage_folders(project: Path, skip: Path) -> Iterator[list[str]]:
    """Copy our code and link the user's project into folders for Ray; the folder ``skip`` is left out.

    Raises:
        UsageError: the user's folder holds more than Ray takes.
    """
    with contextlib.ExitStack() as stack:
        with storage_errors("the folder for temporary files"):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="enginesmith-"))
            code, files = Path(folder, "enginesmith"), Path(folder, PROJECT)
            root = Path(__file__).parents[3]
            for name in OWN_FOLDERS:
                shutil.copytree(root / name, code / name, ignore=shutil.ignore_patterns("__pycache__"))
            for name in OWN_FILES:
                shutil.copyfile(root / name, code / name)
            _link_project(project.resolve(), files, skip.resolve())
        yield [str(code), str(files)]


def find_named_files(task: Task, project: Path) -> tuple[str, ...]:
    """List existing files that a task's fields name; nodes need them under the same name.

    Relative names are taken from the project folder. The model's own path is not listed if it was given from there.
    """
    files = set()
    for text in filter(None, _walk_strings(task.model_dump(exclude={"source"}))):
        with contextlib.suppress(OSError, ValueError):  # too long for a name, or with a zero in it
            files |= {text} if (project / text).is_file() else set()
    source = getattr(task, "source", None)
    if isinstance(source, Source) and Path(source.target).is_absolute():
        path = source.text.removeprefix("hf:") if source.form == "hf" else source.text
        if Path(path).expanduser().is_absolute() or not Path(source.target).is_relative_to(project):
            files.add(source.target)
    return tuple(sorted(files))


def _walk_strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _walk_strings([*value.values()])
    elif isinstance(value, (list, tuple, set, frozenset)):
        for item in value:
            yield from _walk_strings(item)


def find_project() -> Path | None:
    """Locate the user's folder on this node; None if none was sent."""
    folders = (Path(entry, PROJECT) for entry in sys.path if entry)
    return next((folder for folder in folders if folder.is_dir()), None)


def _link_project(project: Path, files: Path, skip: Path) -> None:
    total, sizes = 0, {}
    files.mkdir()
    for folder, subfolders, names in os.walk(project):
        here = Path(folder)
        subfolders[:] = sorted(name for name in subfolders if here / name != skip and _travels(here / name))
        there = files / here.relative_to(project)
        there.mkdir(exist_ok=True)
        for name in sorted(names):
            path = here / name
            if name.startswith(".") or not path.is_file() or not os.access(path, os.R_OK):
                continue
            (there / name).symlink_to(path.resolve())
            sizes[str(path.relative_to(project))] = size = path.stat().st_size
            total += size
            if len(sizes) > _MOST_FILES:
                raise _too_much(project, f"more than {_MOST_FILES:,} files", sizes)
    if total > _LARGEST_BYTES:
        raise _too_much(project, f"{format_bytes(total)} in {len(sizes):,} files", sizes)


def _travels(folder: Path) -> bool:
    hidden = folder.name.startswith(".") or folder.name in _NEVER
    return not hidden and not folder.is_symlink() and not any((folder / name).is_file() for name in _RECORDS)


def _too_much(project: Path, what: str, sizes: dict[str, int]) -> UsageError:
    largest = sorted(sizes, key=lambda name: -sizes[name])[:_NAMED_FILES]
    named = ", ".join(f"{name} ({format_bytes(sizes[name])})" for name in largest)
    return UsageError(
        f"the current folder travels to the nodes, and {project} holds {what}: more than Ray takes",
        "run the command in the folder of the model, or keep what is large on a disk that all nodes share; "
        f"the largest files are {named}",
    )
