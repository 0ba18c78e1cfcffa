"""Workers: whatever happens in the process becomes one answer, and nothing outlives the parent."""

import importlib
import multiprocessing.connection
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.errors import (
    MissingCapability,
    SourceError,
    StepCrashed,
    StepKilled,
    StepOutOfMemory,
    StepTimeout,
)
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.system import oom, worker
from enginesmith.pipeline.tasks.base import Done, execute
from enginesmith.pipeline.tasks.load import Load

NETS = Path(__file__).parent.parent / "data" / "nets.py"


def load(factory: str, tmp_path: Path, **how: Any) -> Done:
    task = Load(source=resolve(f"{NETS}:{factory}"))
    out = tmp_path / "out"
    out.mkdir()
    done: Done = worker.run(execute, task, {}, out, log=tmp_path / "step.log", **how)
    return done


def alone() -> dict[str, str]:
    """An environment in which a fork server of its own imports nothing beforehand, as that takes seconds."""
    return {**os.environ, "ENGINESMITH_PRELOAD_ONLY": ""}


def test_a_killed_fork_server_is_no_interruption(tmp_path: Path) -> None:
    """The step is told to have been killed, and is repeated; the next worker starts another server."""
    script = """
import os, signal, threading
from pathlib import Path
from enginesmith.pipeline.errors import StepKilled
from enginesmith.pipeline.system import oom, worker
run = lambda: worker.run(callable, log=Path("log"))
print(run())
server = worker._server._forkserver_pid
os.kill(server, signal.SIGSTOP)
threading.Timer(0.2, os.kill, (server, signal.SIGKILL)).start()
try:
    run()
except StepKilled as killed:
    print("fork server" in str(killed))
print(run())
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=alone(), capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["True"] * 3, done.stderr


def test_processes_of_the_users_code_are_begun_as_python_begins_them(tmp_path: Path) -> None:
    """Forked ones, up to Python 3.13, need not import the file that names their functions and classes."""
    code = "import multiprocessing\ndef ask(_): return multiprocessing.get_start_method()\n"
    (tmp_path / "starts.py").write_text(code)
    script = """
import multiprocessing
from pathlib import Path
from enginesmith.pipeline.system import oom, worker
import starts
print(multiprocessing.get_start_method(), worker.run(starts.ask, log=Path("log")))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=alone(), capture_output=True, text=True, check=False
    )
    plain, inside = done.stdout.split() or ("", done.stderr)
    assert plain == inside


def test_an_answer_and_progress_come_back(tmp_path: Path) -> None:
    said: list[str] = []
    done = load("mlp", tmp_path, on_progress=said.append)
    assert [str(spec) for spec in done.effect.signature.inputs] == ["x:float32:batch,4"]
    assert said
    assert done.host_peak_bytes is not None
    assert done.host_peak_bytes > 50 << 20


def test_an_error_of_ours_comes_back_as_it_is(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no 'nothing'") as caught:
        load("nothing", tmp_path)
    assert "mlp" in caught.value.remedy


def test_a_trace_inside_of_a_message_stays_in_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    """Torch's message has one where CUDA fails at its first use."""
    text = 'CUDA failed lazily\n\nCUDA call was originally invoked at:\n\n  File "<string>", line 1\n'

    def fail() -> None:
        raise RuntimeError(text)

    _, error = worker._attempt(fail, ())
    assert error.message == "RuntimeError: CUDA failed lazily"
    assert "invoked at" in capfd.readouterr().err


def test_a_broken_package_is_named_with_the_command_that_installs_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "safetensors.py").write_text("raise ImportError('bad ABI')")
    (tmp_path / "net_of_mine.py").write_text("import a_package_that_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "safetensors", raising=False)
    _, error = worker._attempt(importlib.import_module, ("safetensors",))
    assert isinstance(error, MissingCapability)
    assert error.message == "safetensors cannot be imported: bad ABI"
    assert error.remedy == "install it again: pip install --force-reinstall 'safetensors>=0.5'"
    _, error = worker._attempt(importlib.import_module, ("net_of_mine",))
    assert "ModuleNotFoundError: No module named 'a_package_that_nobody_has'" in error.message


def test_a_segmentation_fault_ends_the_worker_alone(tmp_path: Path) -> None:
    with pytest.raises(StepCrashed, match="SIGSEGV") as caught:
        load("segfault", tmp_path)
    assert re.search(r'; it was in File "[^"]*", line \d+ in string_at / .* in segfault', caught.value.message)


def test_an_allocation_that_nothing_caught_is_lack_of_memory(tmp_path: Path) -> None:
    """C++ says so before it aborts the process, and faulthandler writes its trace below."""
    with pytest.raises(StepOutOfMemory, match=r"SIGABRT.*: making it /   what\(\):  std::bad_alloc; it was in File"):
        load("uncaught", tmp_path)


@pytest.mark.parametrize(
    ("kills", "for_memory", "words"),
    [
        ((3, 3), False, "not by the kernel"),
        ((3, 4), True, "the kernel killed its process because memory ran out"),
        ((None, None), True, "most likely by the kernel"),
    ],
)
def test_a_killed_worker_lacked_memory_unless_the_kernel_killed_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kills: tuple[int | None, ...], for_memory: bool, words: str
) -> None:
    counts = iter(kills)
    monkeypatch.setattr(oom, "count_kernel_kills", lambda: next(counts))
    with pytest.raises(StepKilled, match=words) as caught:
        load("killed", tmp_path)
    assert isinstance(caught.value, StepOutOfMemory) == for_memory


def test_a_worker_that_is_closed_removes_what_it_unpacked(tmp_path: Path) -> None:
    import nets

    for end, left in (("close", False), ("kill", True)):
        started = worker.Worker(nets.serve_with_a_file, tmp_path / end, log=tmp_path / "step.log")
        assert started.request("asked") == "asked"
        getattr(started, end)()
        assert (tmp_path / end).exists() == left


def test_a_kill_leaves_the_exit_code_to_who_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = multiprocessing.connection.wait

    def both_see_its_end(what: list[Any], timeout: float | None = None) -> list[Any]:
        found = ready(what, timeout)
        if isinstance(what[0], int) and timeout is None:  # next, the code is read
            time.sleep(0.4 if threading.current_thread() is threading.main_thread() else 0.2)
        return found

    def started(worker: worker.Worker) -> None:
        monkeypatch.setattr(multiprocessing.connection, "wait", both_see_its_end)
        threading.Thread(target=worker.kill).start()

    with pytest.raises(StepKilled):
        load("slow", tmp_path, on_start=started)


def test_a_crash_is_placed_below_a_trace_of_any_length(tmp_path: Path) -> None:
    """With many threads, faulthandler writes more than any tail of a log holds."""
    others = "".join('  File "other.py", line 1 in wait\n' for _ in range(9_000))
    trace = f"std::bad_alloc\nFatal Python error: Aborted\n\nThread 0x1:\n{others}Current thread 0x2:\n"
    (tmp_path / "log").write_text(f'{trace}  File "net.py", line 7 in forward\n')
    process = SimpleNamespace(join=lambda timeout: None, exitcode=-signal.SIGABRT)
    ended = SimpleNamespace(_ending=threading.Lock(), _process=process, log=tmp_path / "log", _earlier_bytes=0)
    error = worker.Worker._explain_end(ended)  # type: ignore[arg-type]
    assert isinstance(error, StepOutOfMemory)
    assert error.message.endswith('std::bad_alloc; it was in File "net.py", line 7 in forward')
    (tmp_path / "log").write_text('Fatal Python error: Aborted\n\nCurrent thread 0x2:\n  File "net.py", line 7 in f\n')
    error = worker.Worker._explain_end(ended)  # type: ignore[arg-type]
    assert error.message.endswith('(log): nothing but the trace of the crash; it was in File "net.py", line 7 in f')
    (tmp_path / "log").write_text("")
    error = worker.Worker._explain_end(ended)  # type: ignore[arg-type]
    assert error.message.endswith("(log): empty")


def test_a_worker_of_a_worker_is_a_fork_of_the_same_server_with_what_its_parent_has(tmp_path: Path) -> None:
    from nets import family  # not above: a script imports this module, too

    cores = os.sched_getaffinity(0)
    outer, inner = worker.run(family, str(tmp_path / "log"), log=tmp_path / "log", cores=[min(cores)])
    threads = [(1, len(cores)), (1, 8)]  # of sessions beside others, and of those that have the machine for themselves
    assert outer == inner == (inner[0], "1", {min(cores)}, threads)
    (alone, _) = worker.run(family, str(tmp_path / "log"), log=tmp_path / "log")
    assert alone[2:] == (cores, [(len(cores), len(cores)), (8, 8)])


def test_a_time_limit_ends_the_worker(tmp_path: Path) -> None:
    started: list[worker.Worker] = []
    with pytest.raises(StepTimeout, match=r"0\.2 s"):
        load("slow", tmp_path, timeout_seconds=0.2, on_start=started.append)
    assert not psutil.pid_exists(started[0].pid)


def test_output_goes_to_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SourceError):
        load("nothing", tmp_path)
    assert "Traceback" in (tmp_path / "step.log").read_text()
    assert "Traceback" not in "".join(capfd.readouterr())


def test_workers_die_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from enginesmith.pipeline.system import oom, worker
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.tasks.base import execute
from enginesmith.pipeline.tasks.load import Load
task = Load(source=resolve({str(NETS)!r} + ":slow"))
worker.run(execute, task, {{}}, Path("."), log=Path("log"), on_start=lambda worker: print(worker.pid, flush=True))
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], cwd=tmp_path, env=alone(), stdout=subprocess.PIPE, text=True
    ) as parent:
        worker = int(parent.stdout.readline())
        assert psutil.pid_exists(worker)
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 60
    while psutil.pid_exists(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not psutil.pid_exists(worker)


@pytest.mark.thorough
def test_a_progress_bar_of_a_worker_that_is_killed_leaves_no_semaphore() -> None:
    bar = "from enginesmith.pipeline.system import preload; from tqdm import tqdm; tqdm(total=1).update()"
    as_there = "import multiprocessing; multiprocessing.set_start_method('forkserver')"
    command = [sys.executable, "-c", f"import os; {as_there}; {bar}; os._exit(0)"]
    done = subprocess.run(command, env=alone(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "leaked" not in done.stderr


def test_engines_that_are_imported_ahead_are_no_part_of_a_model() -> None:
    pytest.importorskip("openvino")
    names = {"ENGINESMITH_PRELOAD_ONLY": "json", "ENGINESMITH_PRELOAD": " ".join(engine_class("openvino").modules)}
    script = "import sys; from enginesmith.pipeline.system import preload; "
    script += (
        "import gc; print('openvino' in preload.COMMON, 'openvino_telemetry' in sys.modules, gc.get_freeze_count())"
    )
    done = subprocess.run([sys.executable, "-c", script], env=alone() | names, capture_output=True, text=True)
    common, telemetry, frozen = done.stdout.split()
    assert (common, telemetry) == ("True", "False"), done.stderr
    assert int(frozen) > 1000  # objects that no collection in a worker has to look at


def test_scripts_need_no_main_guard(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
open("ran", "a").write("x")
from pathlib import Path
from test_workers import load
print(load("mlp", Path(".")).effect.summary)
"""
    )
    result = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=True, env=alone()
    )
    assert "131 parameters" in result.stdout
    assert (tmp_path / "ran").read_text() == "x"
