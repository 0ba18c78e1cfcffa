"""Prepare rivals, judge their answers, and time them in interleaved rounds: every rival in a process of its own."""

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
from recipes.job import PEAK

from enginesmith.pipeline.measure.statistics import Timed

HERE = Path(__file__).parent
CHECKOUT = HERE.parent.parent
_SERVER = HERE / "recipes" / "server.py"
_PAUSE_SECONDS = 0.02
"""Between two blocks, for the threads of the one before to fall asleep."""
_LOOK_SECONDS = 0.1
"""Between two looks at the memory of a job's processes."""
_SESSION = 3
"""Column of /proc/PID/stat after the name (proc(5))."""
_LAST_WORDS = 300


def variables(environment: str, import_paths: Sequence[Path], threads: int) -> dict[str, str]:
    """Return the environment variables of a rival's process; the checkout is there for the models' own code.

    Its bytecode is kept, as that of installed packages is.
    """
    package = CHECKOUT / "build" / "enginesmith"
    if not package.exists():
        package.parent.mkdir(exist_ok=True)
        package.symlink_to("..")
    paths = [*import_paths, package.parent] if environment else import_paths
    numbers = {name: str(threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, **numbers, "PYTHONPATH": os.pathsep.join(map(str, paths))}


class RivalFailed(RuntimeError):
    """Say what a rival raised, or that it took too long."""


@dataclass(frozen=True)
class Prepared:
    """Record the whole job of a rival, from the model to the first answer."""

    seconds: float
    peak_bytes: int
    """Of its largest process."""
    failure: str = ""


@dataclass
class Server:
    """Drive one rival's process over its pipes."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    limit_seconds: float
    _rest: bytes = field(default=b"")

    @classmethod
    def start(
        cls, name: str, command: Sequence[str], environment: Mapping[str, str], log: Path, limit: float
    ) -> "Server":
        """Start ``server.py serve`` in a session of its own; what it prints goes to the log."""
        with log.open("ab") as errors:
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
            place: dict[str, Any] = {"cwd": log.parent, "start_new_session": True}
            process = subprocess.Popen(command, env=dict(environment), **place, **pipes)
        return cls(name, process, log, limit)

    def request(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Ask and wait for the answer.

        Raises:
            RivalFailed: the rival raised an error, ended, or took longer than the limit; it is ended then.
        """
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
            self.process.stdin.flush()
            answer: dict[str, Any] = json.loads(self._read_line())
        except (OSError, ValueError) as error:
            self.close()
            raise RivalFailed(f"{self.name} ended: {last_words(self.log)}") from error
        if "error" in answer:
            self.close()
            raise RivalFailed(answer["error"])
        return answer

    def _read_line(self) -> bytes:
        stream: IO[bytes] | None = self.process.stdout
        assert stream is not None
        end = time.monotonic() + self.limit_seconds
        while b"\n" not in self._rest:
            ready, _, _ = select.select([stream], [], [], max(0.0, end - time.monotonic()))
            if not ready:
                self.close()
                raise RivalFailed(f"{self.name} took longer than {self.limit_seconds:.0f} s")
            if not (part := os.read(stream.fileno(), 1 << 20)):
                raise OSError("the pipe was closed")
            self._rest += part
        line, _, self._rest = self._rest.partition(b"\n")
        return line

    def close(self) -> None:
        """End the process and its children."""
        end_group(self.process)


def end_group(process: "subprocess.Popen[bytes]") -> None:
    """Kill the processes of a session, and wait for the first."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def last_words(log: Path) -> str:
    """Return the last line of a log; where it is the remedy of an error of enginesmith, the line before it, too."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    count = 2 if lines and lines[-1].startswith("→") else 1
    return " ".join(lines[-count:])[-_LAST_WORDS:] or "it printed nothing"


def prepare(command: Sequence[str], environment: Mapping[str, str], folder: Path, limit_seconds: float) -> Prepared:
    """Run the whole job once; its time and memory are kept in the folder, and read from there the next time."""
    record, log = folder / "prepared.json", folder / "prepare.log"
    if not record.is_file():
        start, peak, late = time.monotonic(), 0, False
        with log.open("wb") as output:
            pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            place: dict[str, Any] = {"cwd": folder, "start_new_session": True}  # tools leave files where they run
            process = subprocess.Popen(command, env=dict(environment), **place, **pipes)
            try:
                while process.poll() is None and not late:
                    peak = max(peak, largest_process_bytes(process.pid))
                    late = time.monotonic() - start > limit_seconds
                    time.sleep(_LOOK_SECONDS)
            finally:
                end_group(process)
        failure = (
            f"it took longer than {limit_seconds:.0f} s" if late else last_words(log) if process.returncode else ""
        )
        seconds, told = time.monotonic() - start, folder / PEAK
        peak = max(peak, int(told.read_text()) if told.is_file() else 0)  # the looks miss the end of a short job
        record.write_text(json.dumps({"seconds": seconds, "peak_bytes": peak, "failure": failure}))
    return Prepared(**json.loads(record.read_text()))


def largest_process_bytes(session: int) -> int:
    """Read the peaks of all processes of a session, those that nobody waits for among them; return the largest."""
    found = [0]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            columns = (process / "stat").read_text().rpartition(")")[2].split()
            if int(columns[_SESSION]) == session:
                lines = (process / "status").read_text().splitlines()
                found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")]
    return max(found)


@dataclass
class Timing:
    """Record what one server did: blocks by launch and round, memory, and why it stopped."""

    launches: list[list[Timed]] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    failure: str = ""


def run_launch(
    servers: Mapping[str, Server],
    timings: Mapping[str, Timing],
    rounds: int,
    block_seconds: float,
    warmup_seconds: float,
    answers: Mapping[str, Path],
) -> None:
    """Open all servers one after another, time blocks of all of them round by round in random order, and end them.

    The answers on the judged rows are written by the rivals that are named in ``answers``, after the last round.
    """
    opened = dict(servers)
    order = random.Random(len(next(iter(timings.values())).launches))

    def ask(name: str, do: str, **arguments: Any) -> dict[str, Any] | None:
        try:
            return opened[name].request(do, **arguments)
        except RivalFailed as error:
            timings[name].failure = str(error)
            del opened[name]
            return None

    for name in list(opened):
        if ask(name, "open", warmup_seconds=warmup_seconds) is not None:
            timings[name].launches.append([])
    for _ in range(rounds):
        names = list(opened)
        order.shuffle(names)
        for name in names:
            time.sleep(_PAUSE_SECONDS)
            if (block := ask(name, "block", seconds=block_seconds)) is not None:
                timings[name].launches[-1].append(Timed(np.array(block["seconds"]), np.array(block["waited"])))
    for name in list(opened):
        timings[name].memory = ask(name, "memory") or {}
        if name in answers and name in opened:
            ask(name, "predict", out=str(answers[name]))
    for server in opened.values():
        server.close()
