"""A Ray cluster on this machine: nodes that are processes of their own, with types of GPU that they only claim."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

_DATA = Path(__file__).parent


@dataclass
class Node:
    """Processes that make one node: all of a session."""

    session: int

    @property
    def processes(self) -> list[psutil.Process]:
        """Those that are left."""
        return [process for process in psutil.process_iter() if _session(process.pid) == self.session]

    def kill(self) -> None:
        """End it as a machine that loses its power does."""
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


@dataclass
class Cluster:
    """Started by :func:`cluster`."""

    folder: Path
    address: str
    client: str
    nodes: list[Node]
    """The head first."""

    def add(self, resources: str = "{}", cpus: int = 2, **variables: str) -> Node:
        """One more node, with an environment of its own."""
        words = ("--address", self.address, "--num-cpus", str(cpus), "--resources", resources)
        self.nodes.append(_start(self.folder, words, variables))
        return self.nodes[-1]


@contextlib.contextmanager
def cluster(**variables: str) -> Iterator[Cluster]:
    """A head, and what is added to it; all is gone afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets lie in there, whose paths may not be long
    port, client = _free_port(), _free_port()
    words = ["--head", "--port", str(port), "--num-cpus", "2", "--include-dashboard=false", "--temp-dir", str(folder)]
    words += ["--ray-client-server-port", str(client)]
    started: list[Node] = []
    try:
        started.append(_start(folder, words, variables))
        yield Cluster(folder, f"127.0.0.1:{port}", f"ray://127.0.0.1:{client}", started)
    finally:
        for node in started:
            node.kill()
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path, words: "list[str] | tuple[str, ...]", variables: Mapping[str, str]) -> Node:
    ray = Path(sys.executable).parent / "ray"
    command = [str(ray), "start", *words, "--object-store-memory", "100000000", "--num-gpus=0", "--disable-usage-stats"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "OMP_"))}
    environment |= {"RAY_TMPDIR": str(folder), "PYTHONPATH": str(_DATA), **variables}
    log = folder / f"start-{len(list(folder.glob('start-*')))}.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output, start_new_session=True)
        code = process.wait(timeout=60)
    if code:
        Node(process.pid).kill()
        raise RuntimeError(log.read_text())
    return Node(process.pid)


def _session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except (ProcessLookupError, PermissionError):
        return -1


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port
