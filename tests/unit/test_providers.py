"""ONNX Runtime's TensorRT providers: when they can run, what a session is given, and the record of what was built."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from onnx import helper

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import BuildRequest
from enginesmith.pipeline.engines.onnxruntime import engine as plain
from enginesmith.pipeline.engines.onnxruntime import providers, tensorrt
from enginesmith.pipeline.engines.onnxruntime.session import open_session, session_options
from enginesmith.pipeline.engines.onnxruntime.tensorrt import OnnxRuntimeTensorRT, OnnxRuntimeTensorRTRTX
from enginesmith.pipeline.engines.options import EngineOptions, OnnxRuntimeOptions
from enginesmith.pipeline.errors import MissingCapability, ModelError, StoreError, UsageError
from enginesmith.pipeline.measure.rows import LatencyRow
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.planning.planner import plan
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.report import sentences
from enginesmith.pipeline.results import assemble
from enginesmith.pipeline.results.run import VariantRecord
from enginesmith.pipeline.system import nvidia, software
from enginesmith.pipeline.system.device import Availability, Device
from enginesmith.pipeline.tasks import tune as tuning
from enginesmith.pipeline.tensors import ShapeRange, Signature, TensorSpec
from graphs import save_operator

CUDA = Device(kind="cuda", index=1)
GPU = nvidia.CudaDevice(name="a GPU", compute_capability=(8, 6))
SIGNATURE = Signature(
    inputs=tuple(map(TensorSpec.parse, ("x:float16:batch,64", "m:float32:3"))),
    outputs=(TensorSpec.parse("y:float32:batch"),),
)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU, and an onnxruntime-gpu."""
    monkeypatch.setattr(nvidia, "cuda_device", lambda index: GPU)
    monkeypatch.setattr(plain.OnnxRuntime, "installed", classmethod(lambda kind, device: Availability(ok=True)))
    monkeypatch.setattr(software, "loads", lambda library: False)


@pytest.mark.parametrize(
    ("version", "said"),
    [("10.13.3", ""), ("11.4.0", "needs TensorRT 10 and 11.4.0 is installed"), (None, "is not installed")],
)
def test_the_tensorrt_provider_needs_version_10(
    version: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(software, "version", lambda name: version)
    found = OnnxRuntimeTensorRT.available(CUDA)
    assert (found.ok, said in found.reason) == (not said, True)
    assert not OnnxRuntimeTensorRT.available(Device()).ok
    if said:
        assert "'tensorrt==10.*'" in found.remedy


def test_the_rtx_provider_is_a_plug_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "find", lambda module: None)
    found = OnnxRuntimeTensorRTRTX.available(CUDA)
    assert not found.ok
    assert "onnxruntime-ep-nv-tensorrt-rtx" in found.remedy
    monkeypatch.setattr(software, "find", lambda module: Path())
    assert OnnxRuntimeTensorRTRTX.available(CUDA).ok
    old = GPU.model_copy(update={"compute_capability": (7, 5)})
    monkeypatch.setattr(nvidia, "cuda_device", lambda index: old)
    assert "8.6, 8.9, or 12.0" in OnnxRuntimeTensorRTRTX.available(CUDA).reason


def test_workspaces_and_options_are_variants_of_the_provider_that_has_them() -> None:
    texts = ("trt_builder_optimization_level=3,5", "prefer_nhwc=1")
    asked = EngineOptions(
        engines=("onnxruntime", "onnxruntime_tensorrt"),
        workspace=("64MiB", "sweep"),
        onnxruntime=OnnxRuntimeOptions(provider_options=texts),
    )
    configs = list(OnnxRuntimeTensorRT.configurations(asked, "fp16"))
    assert [(one.workspace, one.mode) for one in configs] == [
        ("64MiB", ""),
        ("64MiB", "trt_builder_optimization_level_5"),
    ]
    engine: Any = configs[1].engine
    trt, cuda, cpu = engine._providers(CUDA, 7)
    limits = {"trt_max_workspace_size": str(64 << 20), "trt_builder_optimization_level": "5"}
    shared = {"device_id": "1", "user_compute_stream": "7"}
    assert trt == ("TensorrtExecutionProvider", {**shared, **limits})
    assert cuda == ("CUDAExecutionProvider", {**shared, "use_tf32": "0"})
    assert cpu == ("CPUExecutionProvider", {})
    assert (engine.arithmetic, engine.replays_graphs()) == ("tf32", False)


def test_options_that_the_session_cannot_keep_to_are_not_offered() -> None:
    """A CUDA graph reads and writes fixed addresses; these sessions bind others in each call."""
    asked = EngineOptions(
        engines=("onnxruntime_tensorrt",),
        onnxruntime=OnnxRuntimeOptions(provider_options=("trt_cuda_graph_enable=True",)),
    )
    with pytest.raises(UsageError, match="has the option 'trt_cuda_graph_enable'"):
        list(OnnxRuntimeTensorRT.configurations(asked, "fp16"))


TOGETHER = Interval(median=1.6, low=1.1, high=2)
TRIED = {
    "prefer_nhwc": {"1": (1.2, 1.1)},
    "cudnn_conv_algo_search": {"HEURISTIC": (1.3, 0.9), "DEFAULT": None},
    "arena_extend_strategy": {"kSameAsRequested": (1.5, 1.4)},
}


def test_options_that_are_measurably_faster_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement alone is not real: its rows are those of TRIED."""
    sides: list[list[tuple[str, ...]]] = []

    def measure_latency(candidates: Any, feeds: Any, settings: Any, logs: Path, progress: Any) -> Any:
        sides.append([candidate.engine.provider_options for candidate in candidates])
        name = candidates[1].engine.provider_options[-1].partition("=")[0]
        now[0] += 4
        rows = {"": [LatencyRow(batch=1)], "kept": [LatencyRow(batch=1, speedup=TOGETHER)]}
        for value, figures in TRIED.get(name, {"0": None}).items():
            interval = figures and Interval(median=figures[0], low=figures[1], high=2)
            rows[value] = [LatencyRow(batch=1, speedup=interval, failure=None if figures else "crash")]
        return SimpleNamespace(rows=rows)

    now = [0.0]
    monkeypatch.setattr(tuning.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(tuning, "measure_latency", measure_latency)
    monkeypatch.setattr(tuning, "measured_feeds", lambda artifact: {1: {}, 8: {}})
    monkeypatch.setattr(tuning.Tune, "_find_fault", lambda *_: "")
    monkeypatch.setattr(plain.model_file, "summary", lambda path: SimpleNamespace(operators={"Conv": 2}))
    (tmp_path / "in").mkdir()
    (tmp_path / "in/model.onnx").write_bytes(b"graph")
    built = Artifact(kind="engine", path=tmp_path / "in/model.onnx", sha256="", bytes=0, signature=SIGNATURE)
    engine = plain.OnnxRuntime(provider_options=("fuse_conv_bias=1",))
    (tmp_path / "out").mkdir()
    tune = tuning.Tune(engine=engine, device=CUDA, seconds=16.5)
    effect = tune.run(dict.fromkeys(("engine", "model", "reference"), built), tmp_path / "out", print)
    given = "fuse_conv_bias=1"  # is not tried: the recipe says it
    fast = (given, "prefer_nhwc=1")
    assert sides == [
        [(given,), fast],
        [fast, (*fast, "cudnn_conv_algo_search=HEURISTIC"), (*fast, "cudnn_conv_algo_search=DEFAULT")],
        [fast, (*fast, "cudnn_conv_use_max_workspace=0")],
        [fast, (*fast, "arena_extend_strategy=kSameAsRequested")],
        *[[(given,), (*fast, "arena_extend_strategy=kSameAsRequested")]] * 2,  # together, at batch 1 and 8
    ]
    kept = "prefer_nhwc=1, arena_extend_strategy=kSameAsRequested"
    assert effect.summary == f"{kept} was measurably faster, of 5 values"
    assert effect.notes == ("no time was left to try use_ep_level_unified_stream",)
    result = Artifact(kind="engine", path=tmp_path / "out" / effect.file, sha256="", bytes=0)
    tuned = (*fast, "arena_extend_strategy=kSameAsRequested")
    assert engine.model_copy(update={"cuda_graphs": True}).tuned(result).provider_options == tuned
    record = VariantRecord(
        id="v", engine="onnxruntime", precision="fp32", status="measured", tuning=assemble._read_tuning(result)
    )
    assert record.options_of(plain.OnnxRuntime)["provider_options"] == list(tuned)  # for packages and gates
    run: Any = SimpleNamespace(variants=(record,), recipe=SimpleNamespace(tune_seconds=30.0))
    told = [line.partition("tuned: ")[2] for line in sentences._describe_tuning(run)]
    assert told[:3] == [
        "prefer_nhwc=1: 1.20× [1.10, 2.00] (kept)",
        "cudnn_conv_algo_search=HEURISTIC: 1.30× [0.90, 2.00]",
        "cudnn_conv_algo_search=DEFAULT: crash",
    ]
    assert told[-2:] == [
        "together, measured once more: 1.60× [1.10, 2.00]; at batch 8: 1.60× [1.10, 2.00]",
        "no time was left for use_ep_level_unified_stream: run it again with --replace and a longer --tune",
    ]


CONTEXT = ("ep_context_file_path", "ep_context_embed_mode")


class Opened:
    """Sessions of the provider, which write a context file with these inputs or none, and a cache where they may."""

    def __init__(self, parts: dict[str, tuple[str, ...]], writes: tuple[str, ...] = ()) -> None:
        self.parts, self.writes, self.calls = parts, writes, list[tuple[Path, dict[str, str]]]()

    def __call__(self, path: Path, chosen: Any, device: Device, listed: Any, content: object = None) -> "Opened":
        self.calls.append((path, given := listed[0][1]))
        if self.writes and path.name == "graph.onnx":
            ends = ([helper.make_tensor_value_info(name, 1, [1]) for name in names] for names in (self.writes, "y"))
            node = helper.make_node("EPContext", self.writes, ["y"], domain="com.microsoft", embed_mode=1)
            made = helper.make_model(helper.make_graph([node], "g", *ends), ir_version=8)
            if listed[0][0] == "TensorrtExecutionProvider":  # which reads no entries of the session
                told = {name: given.pop(f"trt_{name}") for name in ("dump_ep_context_model", *CONTEXT)}
            else:
                told = {name: chosen.get_session_config_entry(name.replace("_", ".", 1)) for name in CONTEXT}
            assert told.pop("dump_ep_context_model", "True") == "True"
            assert told["ep_context_embed_mode"] == "1"
            Path(told["ep_context_file_path"]).write_bytes(made.SerializeToString())
        for folder in (given[name] for name in ("trt_engine_cache_path", "nv_runtime_cache_path") if name in given):
            Path(folder, "kept.engine").write_bytes(b"engine")
        return self

    def get_provider_graph_assignment_info(self) -> list[Any]:
        return [
            SimpleNamespace(
                ep_name=name, get_nodes=lambda kinds=kinds: [SimpleNamespace(op_type=kind) for kind in kinds]
            )
            for name, kinds in self.parts.items()
        ]


def build(engine: OnnxRuntimeTensorRT, opened: Opened, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(tensorrt, "open_session", opened)
    monkeypatch.setattr(type(engine), "available", classmethod(lambda kind, device: Availability(ok=True)))
    (folder / "graph.onnx").write_bytes(b"graph")
    summary = SimpleNamespace(weight_dtypes={"float16": 2}, operators={"MatMul": 1, "QuantizeLinear": 1})
    monkeypatch.setattr(tensorrt.model_file, "summary", lambda path: summary)
    monkeypatch.setattr(tensorrt.model_file, "external_files", lambda path: ())
    (folder / "out").mkdir()
    artifact = Artifact(kind="onnx", path=folder / "graph.onnx", sha256="", bytes=0, signature=SIGNATURE)
    effect = engine.build(BuildRequest(artifact, folder / "out", CUDA, {"batch": ShapeRange(min=1, opt=4, max=8)}))
    built = Artifact(kind="engine", path=folder / "out" / effect.file, sha256="", bytes=0, signature=SIGNATURE)
    return effect, built


PARTS = {"TensorrtExecutionProvider": ("MatMul", "Add"), "CPUExecutionProvider": ("NonZero",)}


def test_engines_go_into_a_context_file_and_the_rest_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, engine = Opened(PARTS, ("x", "m")), OnnxRuntimeTensorRT()
    effect, built = build(engine, opened, tmp_path, monkeypatch)
    assert effect.summary == "2 nodes in 1 TensorRT engines, kept in a context file"
    assert "1 of 3 nodes run on CPUExecutionProvider" in effect.notes[0]
    assert b"EPContext" in built.path.read_bytes()
    ((_, given),) = opened.calls
    timing = {name: given.pop(name) for name in ("trt_timing_cache_enable", "trt_timing_cache_path")}
    folder = Path(timing["trt_timing_cache_path"])
    assert (timing["trt_timing_cache_enable"], folder.is_dir(), folder.name) == ("True", True, "sm86-a_GPU")
    shapes = {f"trt_profile_{point}_shapes": f"x:{size}x64" for point, size in (("min", 1), ("opt", 4), ("max", 8))}
    assert given == {"device_id": "1", **shapes, "trt_fp16_enable": "True", "trt_int8_enable": "True"}
    facts = engine.package_facts(built.path, CUDA)
    assert (facts.module, facts.targets) == ("onnxruntime", ("sm86",))
    assert facts.options["session"]["provider_options"][0] == {}
    assert (facts.options["imports"], facts.options["cache"]) == (["tensorrt"], "")
    other = GPU.model_copy(update={"compute_capability": (9, 0)})
    monkeypatch.setattr(nvidia, "cuda_device", lambda index: other)
    with pytest.raises(MissingCapability, match="built for sm86"):
        engine.load(built, CUDA)


@pytest.mark.parametrize("writes", [(), ("x", "m", "n")])  # none, and one of a part of the graph alone
def test_engines_without_a_context_file_lie_beside_the_graph(
    writes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, engine = Opened(PARTS, writes), OnnxRuntimeTensorRT()
    effect, built = build(engine, opened, tmp_path, monkeypatch)
    assert effect.summary == "2 nodes in 1 TensorRT engines, kept in a folder beside the graph"
    assert built.path.read_bytes() == b"graph"
    path, given = opened.calls[-1]
    assert (path, given["trt_engine_cache_path"]) == (built.path, str(built.folder / "cache"))
    wanted = {"trt_engine_cache_enable": "True", "trt_profile_max_shapes": "x:8x64", "trt_fp16_enable": "True"}
    assert wanted.items() <= given.items()
    options = engine.package_facts(built.path, CUDA).options
    assert options["cache"] == "trt_engine_cache_path"
    packaged = options["session"]["provider_options"][0]
    assert wanted.items() <= packaged.items()
    assert not {"trt_timing_cache_path", "trt_engine_cache_path"} & packaged.keys()  # of this machine

    loaded: list[dict[str, str]] = []
    monkeypatch.setattr(OnnxRuntimeTensorRT, "_open", lambda self, *_: loaded.append(self._options) or Loaded())
    session = engine.load(built, CUDA)
    copied = Path(loaded[0]["trt_engine_cache_path"])
    assert wanted.items() <= loaded[0].items()
    assert [file.read_bytes() for file in copied.iterdir()] == [b"engine"]
    assert copied != built.folder / "cache"
    del session
    assert not copied.exists()


class Loaded:
    """A session."""


def test_large_engines_are_files_of_the_cache_beside_the_context_file() -> None:
    large, entries = OnnxRuntimeTensorRT()._context_options(Path("out/model.onnx"), embedded=False)
    cached = {"trt_ep_context_embed_mode": "0", "trt_engine_cache_enable": "True"}
    assert (cached.items() <= large.items(), entries) == (True, {})
    options, entries = OnnxRuntimeTensorRTRTX()._context_options(Path("out/model.onnx"), embedded=False)
    assert (options, entries["ep.context_embed_mode"]) == ({}, "0")


def test_kernels_that_tensorrt_rtx_compiles_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, engine = Opened({"NvTensorRTRTXExecutionProvider": ("Gemm",)}, ("x", "m")), OnnxRuntimeTensorRTRTX()
    effect, built = build(engine, opened, tmp_path, monkeypatch)
    assert effect.summary == "1 nodes in 1 TensorRT engines, kept in a context file"
    (_, given), (path, again) = opened.calls
    assert {"nv_profile_max_shapes"} <= given.keys() - {"trt_fp16_enable", "trt_timing_cache_path"}
    assert (path, again) == (built.path, {"device_id": "1", "nv_runtime_cache_path": str(built.folder / "cache")})
    assert engine.package_facts(built.path, CUDA).options["cache"] == "nv_runtime_cache_path"


def test_options_that_may_load_libraries_are_not_taken_from_files(tmp_path: Path) -> None:
    evil = "trt_extra_plugin_lib_paths=/tmp/evil.so"
    for kind in (plain.OnnxRuntime, OnnxRuntimeTensorRT):
        kept = kind.restore_options({"provider_options": ["prefer_nhwc=1", "trt_sparsity_enable=True", evil]})
        assert kept["provider_options"] == (
            ("prefer_nhwc=1",) if kind is plain.OnnxRuntime else ("trt_sparsity_enable=True",)
        )
    options = {"trt_profile_min_shapes": "x:1x64", "trt_fp16_enable": "True"}
    record = tensorrt._Record(
        versions={}, compute_capability="8.6", driver=None, context=True, options=options, assigned={}
    )
    for given, damaged in ((options, False), ({**options, **dict([evil.split("=")])}, True)):
        (tmp_path / "context.json").write_text(record.model_copy(update={"options": given}).model_dump_json())
        if damaged:
            with pytest.raises(ModelError, match="trt_extra_plugin_lib_paths, which enginesmith does not write"):
                tensorrt._read_record(tmp_path)
        else:
            assert tensorrt._read_record(tmp_path).options == options


def test_a_graph_of_which_it_takes_nothing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Opened({"CUDAExecutionProvider": ("MatMul",)})
    with pytest.raises(ModelError, match="takes no part"):
        build(OnnxRuntimeTensorRT(), opened, tmp_path, monkeypatch)


def test_a_plug_in_is_registered_once_and_finds_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime as ort

    listed: list[Any] = []
    plugin = SimpleNamespace(get_ep_name=lambda: providers.TENSORRT_RTX.name, get_library_path=lambda: "lib.so")
    monkeypatch.setattr(providers.importlib, "import_module", lambda name: plugin)
    found = [SimpleNamespace(ep_name=providers.TENSORRT_RTX.name) for _ in range(2)]
    monkeypatch.setattr(ort, "get_ep_devices", lambda: listed, raising=False)
    register = lambda name, path: listed.extend(found)  # noqa: E731
    monkeypatch.setattr(ort, "register_execution_provider_library", register, raising=False)
    added: list[Any] = []
    chosen = SimpleNamespace(add_provider_for_devices=lambda devices, options: added.append((devices, options)))
    for _ in range(2):
        assert providers.attach_plugin(chosen, providers.TENSORRT_RTX.name, {"device_id": "1", "a": "b"}, CUDA)
    assert added == [([found[1]], {"a": "b"})] * 2
    assert providers.attach_plugin(chosen, providers.TENSORRT_RTX.name, {"user_compute_stream": "7"}, CUDA)
    assert added[-1][1] == {"user_compute_stream": "7", "has_user_compute_stream": "1"}
    assert not providers.attach_plugin(chosen, providers.CUDA_PROVIDER, {}, CUDA)
    with pytest.raises(MissingCapability, match="finds no cuda:2"):
        providers.attach_plugin(chosen, providers.TENSORRT_RTX.name, {}, Device(kind="cuda", index=2))


def test_a_run_of_nothing_but_engines_that_cannot_be_built_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "version", lambda name: None)
    resolved = resolve_recipe(make({"model": "digits", "engines": ["onnxruntime_tensorrt"]}))
    with pytest.raises(MissingCapability, match="cannot be built here: TensorRT 10"):
        plan(resolved)


def test_a_full_disk_is_no_fault_of_the_graph(tmp_path: Path) -> None:
    model = save_operator(tmp_path / "model.onnx", "Neg")
    with pytest.raises(StoreError, match=r"cannot write the optimized graph of model\.onnx") as full:
        open_session(model.path, session_options(Device(), "all", True, Path("/dev/full")), Device())
    assert "disk is full" in full.value.remedy
