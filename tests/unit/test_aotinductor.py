"""AOTInductor: what is captured without ONNX, what its code says, and which packages are never loaded."""

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from enginesmith.pipeline.artifact import Artifact, file_digest
from enginesmith.pipeline.engines.base import BuildRequest
from enginesmith.pipeline.engines.torch import aotinductor
from enginesmith.pipeline.engines.torch.aotinductor import AOTInductor, Record, audit_code, describe_machine
from enginesmith.pipeline.errors import ExportError, MissingCapability, ModelError
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.frameworks.torch import module as torch_model
from enginesmith.pipeline.frameworks.torch import saved
from enginesmith.pipeline.passes.export.export import capture_program
from enginesmith.pipeline.planning.planner import plan
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.system.device import Availability, Device
from enginesmith.pipeline.tasks.build import Build
from enginesmith.pipeline.tensors import ShapeRange, TensorSpec

CPU = Device(threads=1)
NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return {forward}

def build():
    return Net(), torch.ones(2, 4)
"""
CODE = """
    constants_info_[0].name = "layer_weight";
    constants_info_[0].dtype = cached_torch_dtype_bfloat16;
    constants_info_[0].data_size = 320;
    constants_info_[1].name = "table";
    constants_info_[1].dtype = cached_torch_dtype_int64;
    constants_info_[1].data_size = 64;
extern "C"  void  cpp_fused_relu_0(float* out_ptr0);
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(1, a, b, cached_torch_dtype_float32, c, &buf0_handle));
    cpp_fused_relu_0((float*)(buf0.data_ptr()), s77);
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_convolution(arg4_1, layer_weight, 1, &buf1_handle));
    auto buf2 = std::move(buf1);  // reuse
    cpp_fused_relu_0((bfloat16*)(buf2.data_ptr()), s77);
    AOTI_TORCH_ERROR_CODE_CHECK(aoti_torch_cpu_sort(arg4_1, table, &buf3_handle));
"""


def load(folder: Path, forward: str = "self.layer(x)") -> torch_model.LoadedModel:
    (folder / f"{folder.name}.py").write_text(NETS.format(forward=forward))
    spec = TensorSpec.parse("x:float32:batch,4")
    return torch_model.load(resolve(f"{folder}/{folder.name}.py:build"), torch_model.LoadOptions(inputs=(spec,)))


def save(folder: Path, forward: str = "self.layer(x)") -> Artifact:
    loaded = load(folder, forward)
    saved.save(loaded, resolve(f"{folder}/{folder.name}.py:build"), torch_model.LoadOptions(), folder)
    return Artifact(kind="torch", path=folder / saved.RECORD, sha256="", bytes=0, signature=loaded.signature)


def test_a_program_takes_any_batch_and_operators_that_onnx_lacks(tmp_path: Path) -> None:
    loaded = load(tmp_path, "torch.special.i0e(self.layer(x))")
    captured = capture_program(loaded)
    assert [limits.lower for limits in captured.range_constraints.values()] == [0], "not 2, as by default"
    program = captured.module()
    for batch in (1, 3):
        x = torch.randn(batch, 4)
        torch.testing.assert_close(program(x), loaded.module(x))


@pytest.mark.parametrize(
    ("forward", "said"),
    [
        ("self.layer(x) if x.sum() > 0 else x", "data-dependent"),
        ("self.layer(x) + torch.ones([int(x.shape[0]) if x.shape[0] == 2 else 1, 4])", "holds only for batch = 2"),
    ],
    ids=["values", "sizes"],
)
def test_what_cannot_be_captured_is_explained(tmp_path: Path, forward: str, said: str) -> None:
    with pytest.raises(ExportError, match=said) as caught:
        capture_program(load(tmp_path, forward))
    assert "ONNX" not in caught.value.message


def test_calls_are_counted_in_the_code_with_the_types_of_their_tensors() -> None:
    found = audit_code(CODE.splitlines(), ["mine::op", "mine::op"])
    assert (found.fused, found.operators) == (2, {"convolution": 1, "sort": 1})
    assert found.layers == {"bf16": 2, "fp32": 1}, "the call that is given integers alone is in none"
    assert found.weights_bytes == 384
    assert found.dispatched == ("mine::op",)
    assert "mine::op" in found.notes[1]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Artifact:
    """A file that is no package: to load it is a failure of the test."""
    path = tmp_path / "model.pt2"
    path.write_bytes(b"package")
    record = Record(sha256=file_digest(path), threads=1, audit=audit_code([]), **describe_machine(CPU))
    (tmp_path / "engine.json").write_text(record.model_dump_json())
    return Artifact(kind="engine", path=path, sha256="", bytes=0)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"torch": "2.0.0"}, MissingCapability, f"with torch 2.0.0, and here is {torch.__version__[:4]}"),
        ({"machine": "riscv"}, MissingCapability, "for riscv"),
        ({"instructions": ("avx9",)}, MissingCapability, "for a processor with avx9, which this one lacks"),
        ({"device": "cuda"}, MissingCapability, "for cuda, and here is cpu"),
        ({"target": "sm86"}, MissingCapability, "for sm86, and here is none"),
        ({"sha256": "0"}, ModelError, "is not the package that engine.json describes"),
        ({"audit": None}, ModelError, "cannot be read"),
        ({}, ModelError, "torch cannot load model.pt2"),
    ],
)
def test_a_package_from_elsewhere_is_not_loaded(
    package: Artifact, changes: dict[str, Any], error: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.package import package as torch_package

    opened = []

    def open_package(*arguments: object, **options: object) -> None:
        opened.append(arguments)
        raise RuntimeError("no archive")

    monkeypatch.setattr(torch_package, "load_package", open_package)
    record = aotinductor.read_record(package.folder).model_copy(update=changes)
    (package.folder / "engine.json").write_text(record.model_dump_json(warnings=False))
    with pytest.raises(error, match=said):
        AOTInductor().load(package, CPU)
    assert bool(opened) is not bool(changes)


def test_without_a_compiler_nothing_is_built_and_a_package_can_still_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(MissingCapability, match=r"no C\+\+ compiler 'no-such-compiler'") as caught:
        AOTInductor().build(BuildRequest(Artifact(kind="torch", path=tmp_path, sha256="", bytes=0), tmp_path, CPU))
    assert "apt-get install g++" in caught.value.remedy
    assert not AOTInductor.buildable(CPU).ok
    assert AOTInductor.available(CPU).ok


def test_on_cuda_a_build_needs_the_headers_of_the_cuda_toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aotinductor, "check_inductor", lambda device, kinds: Availability(ok=True))
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(aotinductor.shutil, "which", lambda name: tmp_path / "bin" / name)
    cuda, headers = Device(kind="cuda"), tmp_path / "include" / "crt"
    headers.mkdir(parents=True)
    (headers.parent / "cuda.h").touch()
    answer = AOTInductor.buildable(cuda)
    assert answer.reason == f"there is no CUDA toolkit in {tmp_path}: it lacks include/cuda_runtime.h"
    assert "CUDA_HOME" in answer.remedy
    (headers.parent / "cuda_runtime.h").touch()
    (headers / "host_config.h").touch()
    assert AOTInductor.buildable(cuda).ok
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "elsewhere"))
    assert not AOTInductor.buildable(cuda).ok
    assert AOTInductor.buildable(CPU).ok


@pytest.mark.parametrize(("divisor", "told"), [(2, True), (1, False)])
def test_sizes_that_a_module_decides_by_are_named(
    divisor: int, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(program: Any, path: Path, device: Device) -> None:
        path.touch()

    monkeypatch.setattr(aotinductor, "_compile", write)
    monkeypatch.setattr(aotinductor, "audit_package", lambda path: aotinductor.audit_code([], []))
    artifact = save(tmp_path, f"self.layer(x) if x.shape[0] % {divisor} == 0 else 2 * self.layer(x)")
    effect = AOTInductor().build(BuildRequest(artifact, tmp_path, CPU))
    engine = Artifact(kind="engine", path=tmp_path / effect.file, sha256="", bytes=0)
    words = "the program is right only where (batch % 2) == 0: with batch = 1, the module answers otherwise"
    words += "; or fix the size: --input x:float32:2,4"
    assert AOTInductor().facts(engine).cautions == ((words,) if told else ())
    within = BuildRequest(artifact, tmp_path, CPU, {"batch": ShapeRange(min=1, opt=2, max=4)})
    if not told:
        AOTInductor().build(within)
        return
    with pytest.raises(ExportError, match="with batch = 1, the module answers otherwise, and --shape batch=1:2:4 has"):
        AOTInductor().build(within)


def test_a_build_knows_the_sizes_that_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = make({"model": "digits", "engines": ["aotinductor", "onnxruntime"], "shapes": {"batch": "1:2:8"}})
    steps = plan(resolve_recipe(recipe)).steps
    builds = {step.task.engine.name: step.task for step in steps if isinstance(step.task, Build)}
    assert {name: build.ranges for name, build in builds.items()} == {"aotinductor": recipe.ranges, "onnxruntime": {}}
    given = Artifact(kind="torch", path=tmp_path, sha256="", bytes=0)
    asked = builds["aotinductor"].request({"model": given}, tmp_path, lambda text: None)
    assert asked.ranges == recipe.ranges


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_weights_on_cuda_come_from_the_allocator_that_limits_hold(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: dict[str, Any] = {}
    monkeypatch.setattr(
        torch._inductor, "aoti_compile_and_package", lambda *program, **how: chosen.update(how["inductor_configs"])
    )
    aotinductor._compile(None, tmp_path / "model.pt2", Device(kind=kind))
    with torch._inductor.config.patch(chosen):  # which knows all of these names
        assert torch._inductor.config.aot_inductor.weight_use_caching_allocator is (kind == "cuda")
    assert AOTInductor.memory_from_torch


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch", "ignore::FutureWarning")
def test_a_cast_module_is_compiled_in_its_type(tmp_path: Path) -> None:
    artifact, out = save(tmp_path, "torch.special.i0e(self.layer(x))"), tmp_path / "engine"
    out.mkdir()
    engine = AOTInductor(dtype="bfloat16")
    effect = engine.build(BuildRequest(artifact, out, CPU))
    assert {path.name for path in out.iterdir()} == {"model.pt2", "engine.json"}
    built = Artifact(kind="engine", path=out / effect.file, sha256="", bytes=0, signature=effect.signature)
    facts = engine.facts(built)
    assert set(facts.layers or ()) <= {"bf16", "fp32"}
    assert "bf16" in (facts.layers or ())
    assert facts.weights_bytes
    x = torch.randn(5, 4)
    with engine.load(built, CPU) as session:
        answers = session.run({"x": x.numpy()})
    wanted = saved.load_artifact(artifact).module(x)[0]
    torch.testing.assert_close(torch.from_numpy(answers["output"]), wanted.detach(), rtol=0.05, atol=0.05)


def test_the_script_of_bundles_loads_no_package_from_elsewhere(package: Artifact) -> None:
    script = AOTInductor.infer_script()
    start, options = runpy.run_path(str(script))["_torch"], AOTInductor().package_facts(package.path, CPU).options
    for changes in ({"torch": "2.0.0"}, {"machine": "riscv"}, {"instructions": ["avx9"]}, {"target": "sm86"}):
        with pytest.raises(ImportError, match="compiled for"):
            start(package.path, {"device": "cpu", "options": {**options, **changes}})
    with pytest.raises(RuntimeError):  # torch opens it, and it is no archive
        start(package.path, {"device": "cpu", "options": options})


@pytest.fixture
def tf32_as_it_was() -> Iterator[None]:
    yield
    torch.backends.cudnn.allow_tf32 = True


@pytest.mark.usefixtures("tf32_as_it_was")
def test_the_script_of_bundles_rounds_nothing_to_tf32(package: Artifact, monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.backends.cudnn.allow_tf32
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 9))
    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda file: None)
    script = runpy.run_path(str(AOTInductor.infer_script()))
    options = {**AOTInductor().package_facts(package.path, CPU).options, "target": "sm89"}
    script["_torch"](package.path, {"device": "cuda", "options": options})
    assert not torch.backends.cudnn.allow_tf32
    assert not torch.backends.cuda.matmul.allow_tf32


def test_the_script_of_bundles_refuses_one_dimension_with_two_sizes() -> None:
    kind = runpy.run_path(str(AOTInductor.infer_script()))["Model"]
    model = kind.__new__(kind)
    specs = [{"name": name, "dtype": "float32", "shape": ["batch", 2]} for name in "ab"]
    model.manifest = {"signature": {"inputs": specs}, "shapes": {"batch": {"min": 1, "max": 8}}}
    model._run, model.exceeded = dict, set()
    a, b = np.ones((2, 2)), np.ones((3, 2))
    assert model({"a": a, "b": a})["b"].shape == (2, 2)
    with pytest.raises(ValueError, match="b has 3 for batch"):
        model({"a": a, "b": b})


def test_code_is_compiled_for_all_threads_also_beside_other_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(
        torch._inductor, "aoti_compile_and_package", lambda *program, **how: compiled.append(how["inductor_configs"])
    )
    monkeypatch.setenv("ENGINESMITH_CORES", "7")
    for device, threads in ((Device(), 7), (Device(threads=3), 3)):
        assert AOTInductor().environment_key(device)["threads"] == threads
        aotinductor._compile(None, tmp_path / "model.pt2", device)
        assert compiled[-1]["cpp.threads"] == threads


@pytest.mark.parametrize(("threads", "used"), [(3, 3), (0, 5)])
def test_the_script_of_bundles_runs_with_the_threads_of_the_recipe(
    package: Artifact, monkeypatch: pytest.MonkeyPatch, threads: int, used: int
) -> None:
    seen: list[int] = []
    state = {"threads": 5}
    monkeypatch.setattr(torch, "get_num_threads", lambda: state["threads"])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: state.update(threads=count))

    def call(value: torch.Tensor) -> list[torch.Tensor]:
        seen.append(torch.get_num_threads())
        if not value.any():
            raise RuntimeError("a kernel's")
        return [value]

    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda file: call)
    options = AOTInductor().package_facts(package.path, Device(threads=threads)).options
    outputs = [{"name": "y", "dtype": "float32"}]
    run = runpy.run_path(str(AOTInductor.infer_script()))["_torch"](
        package.path, {"device": "cpu", "options": options, "outputs": outputs}
    )
    assert run({"x": np.ones(2, "f4")})["y"].tolist() == [1, 1]
    with pytest.raises(RuntimeError, match="a kernel's"):
        run({"x": np.zeros(2, "f4")})
    assert seen == [used, used]
    assert state["threads"] == 5, "the caller's own number is what it was"
