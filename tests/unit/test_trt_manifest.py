"""The manifest beside an engine and its header; every TensorRT name that the code uses exists in each version."""

import ast
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest

from enginesmith.pipeline.artifact import Artifact, file_digest
from enginesmith.pipeline.engines.base import MemoryFigures
from enginesmith.pipeline.engines.tensorrt import manifest, versions
from enginesmith.pipeline.engines.tensorrt.engine import TensorRT, TensorRTRTX
from enginesmith.pipeline.engines.tensorrt.manifest import EngineManifest
from enginesmith.pipeline.engines.tensorrt.options import BuildOptions
from enginesmith.pipeline.engines.tensorrt.versions import Capabilities
from enginesmith.pipeline.engines.torch.eager import Compiled, Eager
from enginesmith.pipeline.errors import MissingCapability, ModelError
from enginesmith.pipeline.planning.single_stages import verify_steps
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.system import nvidia
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.nvidia import CudaDevice, Driver
from enginesmith.pipeline.tasks.verify import Verify
from enginesmith.pipeline.tensors import Signature, TensorSpec
from tensorrt_names import FLAVOURS, ONLY_WHERE, Flavour, all_used, missing, used

HEADER = bytes.fromhex(
    "76747274000000000200000000000000d4ec0000000000000107017476747274"
    "04000000000000000000000000000000000000000000000000c1000000000000"
)
"""The first 64 bytes of an engine that TensorRT-RTX 1.7.1.116 built for sm86, with 49 408 bytes of weights."""
SIGNATURE = Signature(inputs=(TensorSpec.parse("x:float32:4"),), outputs=(TensorSpec.parse("y:float32:4"),))
AMPERE = CudaDevice(name="NVIDIA A10", compute_capability=(8, 6))
ADA = CudaDevice(name="NVIDIA L4", compute_capability=(8, 9))
TURING = CudaDevice(name="NVIDIA T4", compute_capability=(7, 5))


def record(file: Path | None = None, **changes: object) -> EngineManifest:
    values = {
        "engine": "tensorrt_rtx",
        "version": "1.7.1.116",
        "target": "sm86",
        "compute_capabilities": ("sm86",),
        "sha256": file_digest(file) if file else "0" * 64,
        "bytes": file.stat().st_size if file else 1,
        "model_sha256": "1" * 64,
        "workspace_limit_bytes": 1 << 30,
        "workspace_asked_bytes": None,
        "options": BuildOptions(),
        "profiles": ({"x": ((4,), (4,), (4,))},),
        "signature": SIGNATURE,
        "figures": MemoryFigures(weights_bytes=8, activation_bytes=512),
        "audit": None,
    }
    return EngineManifest.model_validate(values | changes)


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """An engine file with the manifest that belongs to it."""
    path = tmp_path / "model.engine"
    path.write_bytes(HEADER + bytes(1000))
    manifest.path_beside(path).write_text(record(path).model_dump_json())
    return path


def beside(engine: Path, text: str) -> None:
    manifest.path_beside(engine).write_text(text)


def changed(path: Path, **values: object) -> None:
    stored = json.loads(manifest.path_beside(path).read_text())
    beside(path, json.dumps(stored | values))


def flip(engine: Path) -> None:
    data = bytearray(engine.read_bytes())
    data[500] ^= 1
    engine.write_bytes(data)


@pytest.mark.parametrize(("tf32", "row"), [(True, "tf32"), (False, "fp32")])
def test_an_engine_file_has_its_arithmetic_and_allows_itself_nothing(engine: Path, tf32: bool, row: str) -> None:
    changed(engine, options=BuildOptions(tf32=tf32, host_code=True, plugins=("nms.so",)).model_dump())
    check = verify_steps(resolve_recipe(make({"model": "digits"})), str(engine))[-1].task
    assert isinstance(check, Verify)
    assert isinstance(check.engine, TensorRTRTX)
    assert (check.precision, check.engine.options) == (row, BuildOptions(tf32=tf32))


def test_a_manifest_reads_back_as_it_was_written(engine: Path) -> None:
    assert manifest.read(engine) == record(engine)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, "is not the engine that its manifest describes"),
        (lambda engine: engine.write_bytes(engine.read_bytes()[:-1]), "truncated, or another engine"),
        (lambda engine: engine.write_bytes(b""), "has 0 bytes"),
        (lambda engine: manifest.path_beside(engine).unlink(), "has no manifest"),
        (lambda engine: beside(engine, "{"), "is damaged"),
        (lambda engine: beside(engine, "{}"), "is damaged"),
        (lambda engine: beside(engine, '{"schema_name": "enginesmith.engine/2"}'), "is damaged"),
        (lambda engine: changed(engine, engine="tensorrt_xyz"), "is damaged"),
        (lambda engine: changed(engine, options={"optimization": 3}), "is damaged"),
        (lambda engine: engine.unlink(), "there is no engine"),
    ],
    ids=["bit", "cut", "empty", "none", "json", "fields", "schema", "flavour", "options", "engine"],
)
def test_an_engine_not_described_is_refused(damage: Callable[[Path], object], message: str, engine: Path) -> None:
    damage(engine)
    with pytest.raises(ModelError, match=message) as caught:
        manifest.read(engine)
    assert caught.value.remedy


@pytest.mark.parametrize("kind", [TensorRT, TensorRTRTX])
def test_the_file_is_checked_before_anything_is_asked_of_the_machine(kind: type[TensorRT], engine: Path) -> None:
    flip(engine)
    artifact = Artifact(kind="engine", path=engine, sha256="", bytes=0, signature=SIGNATURE)
    with pytest.raises(ModelError, match="is not the engine"):
        kind().load(artifact, Device(kind="cuda"))
    with pytest.raises(ModelError, match="is not the engine"):
        kind().facts(artifact)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Callable[[CudaDevice | None, str | None], None]:
    """Stands in for a machine with this device and this version of both flavours."""

    def install(device: CudaDevice | None, version: str | None) -> None:
        found = Driver(version=13000, devices=(device,)) if device else Driver(reason="there is no CUDA driver")
        monkeypatch.setattr(manifest, "driver", lambda: found)
        monkeypatch.setattr(manifest, "cuda_device", lambda index: found.devices[index] if found.devices else None)
        monkeypatch.setattr(manifest, "installed_version", lambda flavour: version)

    return install


AMPERE_PLUS = {"engine": "tensorrt", "version": "11.4.0", "options": {"hardware_compatibility": "ampere_plus"}}
FORWARD = {"engine": "tensorrt", "version": "11.3.0", "options": {"version_compatible": True, "host_code": True}}
WITHOUT_RUNTIME = {**FORWARD, "options": {"version_compatible": True}}


@pytest.mark.parametrize(
    ("device", "version", "changes"),
    [
        (AMPERE, "1.7.1.116", {}),
        (ADA, "1.7.1.116", {"compute_capabilities": ("sm86", "sm89")}),
        (ADA, "1.7.1.116", {"compute_capabilities": ()}),
        (AMPERE, "11.4.0", FORWARD),
        (ADA, "11.4.0", AMPERE_PLUS),
    ],
    ids=["same", "listed", "unknown", "newer", "ampere-plus"],
)
def test_an_engine_runs_where_it_was_built_for(device: CudaDevice, version: str, changes: dict, here) -> None:
    here(device, version)
    assert manifest.misfit(record(**changes), 0) == ""
    manifest.validate_machine(record(**changes), 0)


@pytest.mark.parametrize(
    ("device", "version", "changes", "words"),
    [
        (AMPERE, None, {}, "tensorrt_rtx is not installed, and the engine is of version 1.7.1.116"),
        (AMPERE, "1.7.2", {}, "of tensorrt_rtx 1.7.1.116, and 1.7.2 is installed"),
        (AMPERE, "11.2.0", FORWARD, "the older 11.2.0 is installed"),
        (AMPERE, "11.4.0", WITHOUT_RUNTIME, "of tensorrt 11.3.0, and 11.4.0 is installed"),
        (None, "1.7.1.116", {}, "no CUDA device here: there is no CUDA driver"),
        (ADA, "1.7.1.116", {}, "built for sm86, and cuda:0 is sm89 (NVIDIA L4)"),
        (TURING, "11.4.0", AMPERE_PLUS, "cuda:0 is sm75"),
        (ADA, "1.7.1.116", {"options": {"hardware_compatibility": "ampere_plus"}}, "cuda:0 is sm89"),
    ],
    ids=["package", "version", "older", "without-runtime", "driver", "device", "turing", "rtx-has-no-ampere-plus"],
)
def test_an_engine_for_elsewhere_says_what_differs(
    device: CudaDevice | None, version: str | None, changes: dict, words: str, here
) -> None:
    here(device, version)
    assert words in manifest.misfit(record(**changes), 0)
    with pytest.raises(MissingCapability, match="the engine cannot run here") as caught:
        manifest.validate_machine(record(**changes), 0)
    assert "enginesmith build" in caught.value.remedy


def test_an_engine_that_was_built_on_another_model_of_gpu_is_doubted(here, engine: Path) -> None:
    """It has the same compute capability, and TensorRT loads it with a warning."""
    here(AMPERE, "11.4.0")
    built: dict[str, object] = {"engine": "tensorrt", "version": "11.4.0", "device": "NVIDIA A40"}
    with pytest.warns(UserWarning, match=f"may be slower .* built on NVIDIA A40, and cuda:0 is {AMPERE.name}"):
        manifest.validate_machine(record(**built), 0)
    assert "NVIDIA A40" in manifest.describe(engine, record(**built))["runs here"]
    for fine in ({"device": AMPERE.name}, {"options": {"hardware_compatibility": "same_compute_capability"}}):
        manifest.validate_machine(record(**built | fine), 0)
    assert manifest.describe(engine, record(**built | {"device": None}))["runs here"] == "yes"


def test_the_header_says_version_targets_and_weights(engine: Path) -> None:
    header = manifest.read_header(engine)
    assert header == manifest.Header(version="1.7.1.116", compute_capabilities=("sm86",), weights_bytes=49408)


def test_every_target_has_a_bit_of_its_own(engine: Path) -> None:
    data = bytearray(HEADER)
    data[0x20] = 0b11_1111
    engine.write_bytes(data)
    found = manifest.read_header(engine)
    assert found.compute_capabilities == versions.capabilities("tensorrt_rtx", "1.7").targets


@pytest.mark.parametrize("data", [b"", HEADER[:-1], b"ftrt" + HEADER[4:], bytes(64)])
def test_other_files_have_no_header(data: bytes, engine: Path) -> None:
    engine.write_bytes(data)
    assert manifest.read_header(engine) is None


class NoDriver:
    """A driver library that does not start."""

    def cuInit(self, flags: int) -> int:  # noqa: N802
        return 100


@pytest.mark.parametrize(
    ("library", "words"), [(OSError("libcuda.so.1"), "there is no CUDA driver"), (NoDriver(), "cuInit gives 100")]
)
def test_without_a_driver_there_is_no_device(library: object, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str) -> object:
        if isinstance(library, OSError):
            raise library
        return library

    monkeypatch.setattr(nvidia.ctypes, "CDLL", load)
    fresh = nvidia.driver.__wrapped__()
    monkeypatch.setattr(nvidia, "driver", lambda: fresh)
    assert words in fresh.reason
    assert nvidia.cuda_device(0) is None
    assert words in nvidia.available(0).reason
    assert "driver" in nvidia.available(0).remedy


def test_devices_beyond_those_that_are_there_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "driver", lambda: Driver(version=13000, devices=(AMPERE, ADA)))
    monkeypatch.setattr(nvidia, "torch_cuda", lambda: "13.0")
    assert nvidia.available(1).ok
    assert nvidia.cuda_device(1) == ADA
    missing = nvidia.available(2)
    assert (missing.ok, missing.reason) == (False, "there is no cuda:2")
    assert "cuda:0 … cuda:1" in missing.remedy
    assert CudaDevice(name="RTX 5090", compute_capability=(12, 0)).target == "sm120"


@pytest.mark.parametrize(
    ("version", "torch_cuda", "words", "remedy"),
    [
        (12090, "13.0", "for CUDA 12.9, and the installed torch needs CUDA 13", "driver 580.65.06 or newer"),
        (13000, "13.2", "", ""),  # minor versions are compatible
        (13020, "12.8", "", ""),  # drivers run older CUDA
        (12080, "12.6", "", ""),
        (13000, None, "built without CUDA", "pip uninstall -y torch && pip install torch"),
    ],
)
def test_the_driver_has_to_fit_the_torch_that_is_installed(
    version: int, torch_cuda: str | None, words: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvidia, "driver", lambda: Driver(version=version, devices=(ADA,)))
    monkeypatch.setattr(nvidia, "torch_cuda", lambda: torch_cuda)
    answer = nvidia.available(0)
    assert answer.ok == (not words)
    assert words in answer.reason
    assert remedy in answer.remedy
    assert answer.ok or all(engine.available(Device(kind="cuda")) == answer for engine in (Eager, Compiled))


@pytest.mark.parametrize("flavour", FLAVOURS, ids=lambda one: f"{one.name}-{one.version}")
def test_every_name_exists_or_is_kept_from_the_flavour(flavour: Flavour) -> None:
    assert missing(flavour, all_used()) == []


def test_names_are_found_in_all_that_the_code_does() -> None:
    found = all_used()
    assert len(found) > 80
    assert {"OnnxParser.parse_from_file", "BuilderFlag.TF32", "IExecutionContext.execute_async_v3"} <= found
    assert {"TilingOptimizationLevel.FAST", "HardwareCompatibilityLevel.AMPERE_PLUS", "ILogger.log"} <= found


@pytest.mark.parametrize(
    ("file", "line", "name"),
    [
        ("builder.py", "config.set_memory_limit(1)", "IBuilderConfig.set_memory_limit"),
        ("builder.py", "x = trt.BuilderFlag.FP16", "BuilderFlag.FP16"),
        ("session.py", "native.execute_async_v2(0)", "IExecutionContext.execute_async_v2"),
        ("parser.py", "x = trt.OnnxParserRefiter", "OnnxParserRefiter"),
        ("loader.py", "engine.weight_streaming_budget = 1", "ICudaEngine.weight_streaming_budget"),
        ("build_log.py", "class L(trt.ILogger):\n def logg(self): ...", "ILogger.logg"),
    ],
)
def test_a_wrong_name_is_found(file: str, line: str, name: str) -> None:
    assert all(name in missing(flavour, set(used(file, ast.parse(line)))) for flavour in FLAVOURS[1:])


def test_the_table_of_exceptions_holds_no_name_that_is_everywhere() -> None:
    assert set(ONLY_WHERE) <= all_used()
    assert [name for name in ONLY_WHERE if all(flavour.has(name) for flavour in FLAVOURS)] == []
    assert set(ONLY_WHERE.values()) <= set(Capabilities.model_fields)


def test_every_target_is_a_member_of_the_flavours_enumeration() -> None:
    for flavour in FLAVOURS:
        wanted = {target.upper() for target in flavour.known.targets}
        assert wanted <= flavour.classes.get("ComputeCapability", frozenset())


def test_the_installed_module_has_the_names_too() -> None:
    for name in get_args(versions.FlavourName):
        found = versions.installed_version(name)
        if found is None:
            continue
        trt: Any = importlib.import_module(name)
        real = {one: frozenset(dir(getattr(trt, one))) for one in FLAVOURS[-1].classes if hasattr(trt, one)}
        functions = FLAVOURS[-1].functions & set(dir(trt))
        assert missing(Flavour(name, found, functions, real), all_used()) == []
