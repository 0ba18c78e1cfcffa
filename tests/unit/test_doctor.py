"""Test what the doctor tells people."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from enginesmith.pipeline.engines.stack import find_broken
from enginesmith.pipeline.errors import explain_import
from enginesmith.pipeline.system import machine
from enginesmith.pipeline.system.nvidia import GpuProcess, GpuState
from enginesmith.pipeline.system.software import Stack
from enginesmith.pipeline.workflows import inspect
from enginesmith.pipeline.workflows.inspect import Check, Diagnosis

FITS = Check(name="C library", found="glibc 2.36", needed="2.28, by torch", ok=True)
BROKEN = Check(name="cuDNN", found="8.9.7", needed="9.x", ok=False, fix="pip install 'nvidia-cudnn-cu13==9.*'")
MEANINGLESS = Check(name="torch", found="without CUDA", needed="CUDA", ok=None, note="there is no NVIDIA GPU here")


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Diagnosis:
    rows = [
        {"engine": "eager", "usable": "yes", "builds here": "yes", "reason": "", "remedy": ""},
        {"engine": "aotinductor", "usable": "yes", "builds here": "no: no g++", "reason": "no g++", "remedy": "get it"},
        {"engine": "tensorrt_rtx", "usable": "no", "builds here": "yes", "reason": "no GPU", "remedy": "get one"},
    ]
    monkeypatch.setattr(inspect, "find_broken", lambda packages: {})
    monkeypatch.setattr(inspect, "find_stack", lambda broken: Stack())
    monkeypatch.setattr(inspect, "check_software", lambda *stack: [FITS, BROKEN, MEANINGLESS])
    monkeypatch.setattr(inspect, "_list_engines", lambda where, broken: rows)
    return inspect.examine()


def test_fixes_begin_with_what_does_not_fit(found: Diagnosis) -> None:
    assert found.fixes[0] == "cuDNN: pip install 'nvidia-cudnn-cu13==9.*'"
    assert "tensorrt_rtx on cuda: get one" in found.fixes
    assert "aotinductor on cuda: get it" in found.fixes
    assert not any("tensorrt_rtx on cpu" in fix for fix in found.fixes)  # it never runs there
    assert found.engines["cpu"] == {
        "eager": "ok",
        "aotinductor": "runs, and cannot be built here: no g++",
        "tensorrt_rtx": "no: no GPU; it can be built here for other machines",
    }


def test_people_read_the_fixes_last(found: Diagnosis) -> None:
    facts = inspect.readable(found)
    assert next(iter(facts)) == "processor"
    assert facts[list(facts)[-1]] == list(found.fixes)
    assert facts["what fits together"] == {
        "C library": "yes: glibc 2.36; needed: 2.28, by torch",
        "cuDNN": "NO: 8.9.7; needed: 9.x",
        "torch": "– without CUDA; needed: CUDA (there is no NVIDIA GPU here)",
    }
    assert all(isinstance(value, str | list | dict) for value in facts.values())


def test_gpus_with_units_and_reasons(found: Diagnosis) -> None:
    gpu = GpuState(
        name="NVIDIA H100",
        compute_capability="9.0",
        memory_bytes=80 << 30,
        clock_limits=("power limit",),
        persistence=True,
        processes=(GpuProcess(pid=7, used_bytes=1 << 30), GpuProcess(pid=8, used_bytes=None)),
        reasons={"power_watts": "no permission"},
    )
    machine = found.environment.model_copy(update={"gpus": (gpu,)})
    facts = inspect.readable(found.model_copy(update={"environment": machine}))["cuda:0"]
    assert (facts["memory"], facts["clock limits"], facts["persistence"]) == ("80 GiB", "power limit", "yes")
    assert (facts["processes"], facts["power watts"]) == ("7 (1 GiB), 8 (–)", "unknown (no permission)")


def test_a_machine_that_shows_everything(found: Diagnosis) -> None:
    shown = {
        "quota_cores": 1.5,
        "turbo": False,
        "governor": "performance",
        "throttled_periods": 4,
        "thermal_throttles": 2,
        "stolen_seconds": 3.4,
        "memory_limit_bytes": 2 << 30,
        "memory_limit_left_bytes": 1 << 30,
        "frequency_mhz": 2400.0,
        "frequency_max_mhz": 3600.0,
        "frequency_min_mhz": None,
    }
    facts = inspect.readable(found.model_copy(update={"environment": machine.environment().model_copy(update=shown)}))
    processor = facts["processor"]
    assert processor["container's limit"] == "1.5 cores"
    assert (processor["turbo"], processor["governor"]) == ("no", "performance")
    assert processor["clock"] == "2400 MHz now, 3600 MHz at most"
    lost = "4 periods of the quota throttled, slowed down by heat 2 times, 3 s given to other machines"
    assert processor["lost since the start"] == lost
    assert facts["memory"]["container's limit"] == "2 GiB, left: 1 GiB"


def test_here() -> None:
    found = inspect.examine()
    assert found.environment.processor
    assert found.engines["cpu"]["eager"] == "ok"
    assert not found.broken
    assert Diagnosis.model_validate_json(found.model_dump_json()) == found


def break_package(folder: Path, package: str, code: str) -> Path:
    """Write a package that is imported instead of the installed one if its folder is searched first."""
    (folder / package).mkdir()
    (folder / package / "__init__.py").write_text(code)
    return folder


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ImportError('libtorch_cpu.so: undefined symbol\\nand more')", "libtorch_cpu.so: undefined symbol"),
        ("print('hello'); raise RuntimeError('half of it is missing')", "half of it is missing"),
        ("raise RuntimeError", "RuntimeError"),
        ("import sys; sys.exit(5)", "importing it ends the process with code 5"),
        ("import os; os.kill(os.getpid(), 11)", "importing it ends the process by SIGSEGV"),
    ],
)
def test_a_broken_package_is_named_with_the_reason_and_the_command(
    code: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(break_package(tmp_path, "torch", code))
    broken = find_broken(["torch", "safetensors", "not_installed_at_all"])
    assert list(broken) == ["torch"]
    assert broken["torch"].message == f"torch cannot be imported: {reason}"
    assert broken["torch"].remedy == "install it again: pip install --force-reinstall 'torch>=2.11'"


@pytest.mark.parametrize(
    ("package", "engines"),
    [
        ("torch", ["eager", "compiled", "aotinductor"]),
        ("onnx", ["onnxruntime", "openvino"]),
        ("tensorrt_rtx", []),  # it runs on no processor anyway
    ],
)
def test_a_broken_package_is_told_once_and_all_else_is_still_examined(
    package: str, engines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(break_package(tmp_path, package, "raise ImportError('bad ABI')"))
    state = inspect.examine()
    assert state.broken == (package,)
    wrong = f"no: {package} cannot be imported: bad ABI"
    assert [name for name, answer in state.engines["cpu"].items() if answer == wrong] == engines
    assert "ok" in state.engines["cpu"].values()
    told = inspect.readable(state)["what fits together"][f"package {package}"]
    assert told == "NO: cannot be imported: bad ABI; needed: a package that can be imported"
    commands = [fix for fix in state.fixes if "--force-reinstall" in fix]
    assert len(commands) == 1
    assert commands[0].startswith(f"package {package}: install it again: pip install --force-reinstall ")


@pytest.mark.parametrize(("package", "stream"), [("torch", "stdout"), ("numpy", "stderr")])
def test_a_broken_package_ends_doctor_with_the_exit_code_for_what_is_missing(
    package: str, stream: str, tmp_path: Path
) -> None:
    """Without numpy no engine can be listed, and there is nothing but the error."""
    folder = break_package(tmp_path, package, "raise ImportError('bad ABI')")
    searched = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, "-m", "enginesmith.cli", "doctor"]
    environment = {**os.environ, "PYTHONPATH": searched}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 4
    assert "cannot be imported: bad ABI" in getattr(done, stream)
    assert f"pip install --force-reinstall '{package}>=" in getattr(done, stream)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("later", [False, True])
def test_a_package_that_lacks_another_one_later_can_be_imported(
    later: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one that reads a table by a package that is not installed."""
    (tmp_path / "fragile-1.0.dist-info").mkdir()
    (tmp_path / "fragile-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: fragile\nVersion: 1.0\n")
    raising = 'raise ImportError("it needs another one")\n'
    (tmp_path / "fragile.py").write_text(f"def read():\n    {raising}" if later else raising)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError) as raised:
        importlib.import_module("fragile").read()
    broken = explain_import(raised.value)
    sys.modules.pop("fragile", None)
    if later:
        assert broken is None
    else:
        assert broken is not None
        assert broken.message == "fragile cannot be imported: it needs another one"
        assert broken.remedy == "install it again: pip install --force-reinstall fragile"
