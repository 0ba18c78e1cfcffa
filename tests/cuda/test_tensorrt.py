"""TensorRT's real Python bindings, of each version that is supported, without its libraries.

Names are read from bindings over empty libraries. Builds and sessions run over ``tensorrt/libnvinfer.cpp``, on a CUDA
runtime without a device: the code that calls TensorRT is executed, and nothing is computed. TENSORRT_PARTS names the
folder with bindings and headers that ``tensorrt/fetch.sh FOLDER`` made.
"""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tensorrt_names import FLAVOURS, Flavour, all_used, missing

HERE = Path(__file__).parent / "tensorrt"
VERSIONS = ("10.13", "10.16", "11.4")
CUDA_HEADER = "typedef struct CUstream_st* cudaStream_t;\ntypedef struct CUevent_st* cudaEvent_t;\n"
ENTRIES = (
    *("createInferBuilder_INTERNAL", "createInferRefitter_INTERNAL", "createInferRuntime_INTERNAL"),
    *("createNvOnnxParser_INTERNAL", "createNvOnnxParserRefitter_INTERNAL", "getNvOnnxParserVersion"),
    *("getPluginRegistry", "getBuilderPluginRegistry", "initLibNvInferPlugins"),
)
NAMES = """
import json, tensorrt as trt
kinds = {name: vars(trt)[name] for name in dir(trt) if isinstance(vars(trt)[name], type)}
print(json.dumps([trt.__version__, [name for name in dir(trt) if name not in kinds],
    {name: [one for one in dir(kind) if not one.startswith("__")] for name, kind in kinds.items()}]))
"""
NEEDS_A_DEVICE = "digits or depends_on_values or no_waiting or streaming_budget or compiled_kernels"
"""Tests of tests/gpu whose answers have to be computed, or that wait for a real stream."""


def part(pattern: str) -> Path:
    folder = os.environ.get("TENSORRT_PARTS")
    if not folder:
        pytest.skip("TENSORRT_PARTS names no folder that tests/cuda/tensorrt/fetch.sh made")
    parts = sorted(Path(folder).glob(pattern))
    return parts[0] if parts else pytest.skip(f"{folder} has no {pattern}")


def run(command: list[str], folder: Path, **more: str) -> str:
    paths = {
        name: ":".join(filter(None, (str(folder), os.environ.get(name)))) for name in ("PYTHONPATH", "LD_LIBRARY_PATH")
    }
    variables = {**os.environ, **paths, **more}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def compiled(folder: Path, version: str, source: Path, *flags: str) -> None:
    """Compile the three libraries; the first has all functions, as the bindings look names up in any."""
    if shutil.which("g++") is None:
        pytest.skip("there is no g++")
    major = version.partition(".")[0]
    empty = folder / "empty.cpp"
    empty.touch()
    for name in ("libnvinfer", "libnvinfer_plugin", "libnvonnxparser"):
        library = folder / f"{name}.so.{major}"
        given = [str(source), *flags] if name == "libnvinfer" else [str(empty)]
        command = ["g++", "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wno-deprecated-declarations", *given]
        subprocess.run([*command, f"-Wl,-soname,{library.name}", "-o", str(library)], check=True)


def bindings(folder: Path, version: str) -> Path:
    """Unpack the bindings as the package ``tensorrt``, as NVIDIA's package of that name presents them."""
    wheel = part(f"tensorrt_cu1?_bindings-{version}.*-cp{sys.version_info.major}{sys.version_info.minor}-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (folder / "tensorrt_bindings").rename(folder / "tensorrt")
    number = wheel.name.split("-")[1]
    (folder / f"tensorrt-{number}.dist-info").mkdir()
    metadata = f"Metadata-Version: 2.1\nName: tensorrt\nVersion: {number}\n"
    (folder / f"tensorrt-{number}.dist-info" / "METADATA").write_text(metadata)
    return folder


@pytest.fixture(scope="module", params=VERSIONS)
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bindings of one version over the libraries for tests, on the CUDA runtime without a device."""
    folder = bindings(tmp_path_factory.mktemp("tensorrt"), request.param)
    (folder / "cuda_runtime_api.h").write_text(CUDA_HEADER)
    headers = part(f"include-{request.param}")
    compiled(folder, request.param, HERE / "libnvinfer.cpp", "-Werror", f"-I{folder}", f"-I{headers}")
    return folder


@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_that_the_code_uses_is_in_the_bindings(version: str, tmp_path: Path) -> None:
    folder = bindings(tmp_path, version)
    source = folder / "empty_functions.cpp"
    source.write_text("".join(f'extern "C" void* {name}() {{ return nullptr; }}\n' for name in ENTRIES))
    compiled(folder, version, source)
    number, functions, classes = json.loads(run([sys.executable, "-c", NAMES], folder))
    members = {name: frozenset(words) for name, words in classes.items()}
    flavour = Flavour("tensorrt", number, frozenset(functions), members)
    assert missing(flavour, all_used()) == []
    for noted in FLAVOURS:  # the names that everyday tests go by are those of the bindings
        if noted.name == "tensorrt" and number.startswith(noted.version):
            assert all(words <= members[name] for name, words in noted.classes.items())


def test_the_tests_for_a_gpu_run_with_weights_of_zero(library: Path) -> None:
    chosen = f"tensorrt and not rtx and not ({NEEDS_A_DEVICE})"
    tests = [str(Path(__file__).parents[1] / "gpu" / name) for name in ("test_tensorrt.py", "test_memory.py")]
    output = run([sys.executable, "-m", "pytest", "-q", "-k", chosen, *tests], library, WEIGHTS_SCALE="0")
    assert " passed" in output
    assert "refuses" not in output


def test_sessions_and_builds_that_fail(library: Path) -> None:
    run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "failures.py")], library)
