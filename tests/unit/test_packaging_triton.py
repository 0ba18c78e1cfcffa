"""Repositories for Triton: the configuration is read as Triton reads it, and batches only what can be batched."""

from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format

import packaged_runs
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.results.package import manifest
from enginesmith.pipeline.results.package import package as bundle
from enginesmith.pipeline.results.package.package import package
from enginesmith.pipeline.tensors import Signature, TensorSpec
from packaged_runs import ExampleRun

found, made, no_script = packaged_runs.found, packaged_runs.made, packaged_runs.no_script  # fixtures


def config(found: manifest.Manifest, **changes: Any) -> Any:
    text = bundle.config("net", found.model_copy(update=changes))
    return text_format.Parse(text, message_factory.GetMessageClass(_model_config())())


def test_a_repository_for_triton(made: ExampleRun, tmp_path: Path) -> None:
    wrote = package(made.write(), "triton", tmp_path / "t")
    assert wrote.files == ("net_py_build/1/model.onnx", "net_py_build/config.pbtxt", "net_py_build/manifest.json")
    parsed = text_format.Parse(
        (tmp_path / "t/net_py_build/config.pbtxt").read_text(), message_factory.GetMessageClass(_model_config())()
    )
    assert (parsed.name, parsed.backend, parsed.max_batch_size) == ("net_py_build", "onnxruntime", 8)
    assert [(one.name, one.data_type, list(one.dims)) for one in parsed.input] == [("x", 11, [4])]
    assert list(parsed.dynamic_batching.preferred_batch_size) == [8]
    assert parsed.instance_group[0].kind == 2
    assert not parsed.HasField("optimization")  # slow optimizers, unlike wrong ones, do not switch the others off
    assert {one.key: one.value.string_value for one in parsed.parameters}["intra_op_thread_count"] == "0"
    assert set(manifest.read(tmp_path / "t/net_py_build").files) == {"1/model.onnx", "config.pbtxt"}


@pytest.mark.parametrize(
    ("inputs", "outputs", "shapes", "most", "dims"),
    [
        (["x:float32:batch,4"], ["y:float32:batch,4"], {"batch": "1:8:64"}, 64, [[4]]),
        (["x:int64:batch,s", "m:bool:batch,s"], ["y:float16:batch"], {"batch": "1:1:2", "s": "1:8:9"}, 2, [[-1], [-1]]),
        (["x:float32:batch,4"], ["y:float32:4"], {"batch": "1:8:64"}, 0, [[-1, 4]]),
        (["x:float32:batch,batch"], ["y:float32:batch,4"], {"batch": "1:8:64"}, 0, [[-1, -1]]),
        (["x:float32:batch,batch+1"], ["y:float32:batch,4"], {"batch": "1:8:64"}, 0, [[-1, -1]]),
        (["x:float32:batch,s", "m:bool:batch,s+1"], ["y:float32:batch"], {"batch": "1:1:2"}, 2, [[-1], [-1]]),
        (["x:float32:batch,4"], ["y:float32:batch,4"], {"batch": "8:8:8"}, 8, [[4]]),
        (["x:float32:batch,4"], ["y:float32:batch,4"], {}, 0, [[-1, 4]]),
        (["x:float32:8,4"], ["y:float32:8,4"], {}, 0, [[8, 4]]),
    ],
)
def test_batching_needs_the_same_first_dimension_everywhere(
    inputs: list[str],
    outputs: list[str],
    shapes: dict[str, str],
    most: int,
    dims: list[list[int]],
    found: manifest.Manifest,
) -> None:
    specs = [tuple(TensorSpec.parse(text) for text in texts) for texts in (inputs, outputs)]
    ranges = {name: manifest.ShapeRange.parse(text) for name, text in shapes.items()}
    parsed = config(found, signature=Signature(inputs=specs[0], outputs=specs[1]), shapes=ranges)
    assert parsed.max_batch_size == most
    assert [list(one.dims) for one in parsed.input] == dims
    assert parsed.HasField("dynamic_batching") == (most >= 8), "batches of 1 and 8 were measured"


def test_batching_needs_an_engine_that_takes_a_single_row(found: manifest.Manifest) -> None:
    measured = {"shapes": {"batch": manifest.ShapeRange.parse("8:8:8")}}
    asked = found.origin.model_copy(update={"recipe": {"shapes": {"batch": "8:8:8"}}})
    built = found.engine.model_copy(update={"name": "tensorrt", "file": "1/model.plan"})
    assert config(found, **measured).max_batch_size == 8
    assert config(found, **measured, origin=asked).max_batch_size == 0
    assert config(found, **measured, engine=built).max_batch_size == 0


@pytest.mark.parametrize(
    ("rates", "preferred"),
    [
        ((10, 5, 40), [64]),
        ((10, 20, 40), [8, 64]),
        ((10, 9, 8), []),
        ((10, None, None), []),
        ((None, 20, None), []),
        ((None, 20, 40), [64]),
        ((None, None, None), []),
    ],
)
def test_batches_are_preferred_where_they_paid(
    rates: tuple[float | None, ...], preferred: list[int], found: manifest.Manifest
) -> None:
    row = found.measured.latency[0]
    rows = tuple(
        row.model_copy(update={"batch": batch, "throughput_per_s": rate})
        for batch, rate in zip((1, 8, 64), rates, strict=True)
    )
    changes = {"measured": found.measured.model_copy(update={"latency": rows})}
    parsed = config(found, **changes, shapes={"batch": manifest.ShapeRange(min=1, opt=8, max=64)})
    assert parsed.HasField("dynamic_batching") == bool(preferred)
    assert list(parsed.dynamic_batching.preferred_batch_size) == preferred


def test_requests_are_not_put_together_where_samples_influence_each_other(found: manifest.Manifest) -> None:
    shapes = {"batch": manifest.ShapeRange(min=1, opt=8, max=64)}
    assert config(found, shapes=shapes).HasField("dynamic_batching")
    parsed = config(found, shapes=shapes, interacting_samples=True)
    assert (parsed.max_batch_size, parsed.HasField("dynamic_batching")) == (64, False)


def test_a_precision_whose_ranges_are_of_the_batch_is_not_batched(made: ExampleRun, tmp_path: Path) -> None:
    made.variants = [made.record("onnxruntime-int8-dynamic", graph=made.graph, artifact=made.graph)]
    made.changes["winner"] = "onnxruntime-int8-dynamic"
    wrote = package(made.write(), "triton", tmp_path / "t")
    assert any("requests in it change each other's answers" in text for text in wrote.cautions)
    text = (tmp_path / "t/net_py_build/config.pbtxt").read_text()
    assert "dynamic_batching" not in text
    assert "# no dynamic batching: the answer to a sample depends on the rest of its batch" in text


def test_odd_names_do_not_break_the_configuration(found: manifest.Manifest) -> None:
    name = 'a"b\\c\n} é'
    specs = Signature(
        inputs=(TensorSpec(name=name, dtype="float32", shape=("batch", 4)),), outputs=found.signature.outputs
    )
    origin = found.origin.model_copy(update={"run": "x\nbackend: 'python'"})
    parsed = config(found, signature=specs, origin=origin)
    assert (parsed.input[0].name, parsed.backend) == (name, "onnxruntime")


def test_a_gpu_keeps_its_arithmetic(found: manifest.Manifest) -> None:
    options = {
        **found.engine.options,
        "graph_optimization_level": "ORT_ENABLE_BASIC",
        "session": {
            "providers": ["CUDAExecutionProvider", "CPUExecutionProvider"],
            "provider_options": [{"use_tf32": "0", "enable_cuda_graph": "1"}, {}],
            "disabled_optimizers": [],
        },
    }
    on_cuda = found.model_copy(
        update={"engine": found.engine.model_copy(update={"device": "cuda", "options": options})}
    )
    assert "no CUDA graphs" in bundle.config("net", on_cuda)
    parsed = config(on_cuda)
    (cuda,) = parsed.optimization.execution_accelerators.gpu_execution_accelerator
    assert (cuda.name, [(one.key, one.value) for one in cuda.parameters]) == ("cuda", [("use_tf32", "0")])
    assert (parsed.optimization.graph.level, parsed.instance_group[0].kind) == (-1, 1)


def test_engines_of_tensorrt(made: ExampleRun, tmp_path: Path) -> None:
    made.variants += [made.engine("tensorrt"), made.engine("tensorrt_rtx")]
    run = made.write()
    wrote = package(run, "triton", tmp_path / "t", "tensorrt-fp16")
    assert "needs a Triton with TensorRT 10.14.1, on sm86" in wrote.cautions
    names = {Path(name).name for name in wrote.files}
    assert names == {"config.pbtxt", "manifest.json", "model.plan"}, "a server reads none of our records"
    assert (tmp_path / "t/net_py_build/1/model.plan").read_bytes() == b"engine"
    text = (tmp_path / "t/net_py_build/config.pbtxt").read_text()
    parsed = text_format.Parse(text, message_factory.GetMessageClass(_model_config())())
    assert (parsed.backend, parsed.platform, parsed.instance_group[0].kind) == ("tensorrt", "tensorrt_plan", 1)
    assert "TensorRT 10.14.1, on sm86" in text
    assert not parsed.HasField("optimization")
    found = manifest.read(tmp_path / "t/net_py_build")
    options = {"engine": found.engine.model_copy(update={"options": {**found.engine.options, "cuda_graphs": True}})}
    assert config(found, **options).optimization.cuda.graphs
    assert not parsed.instance_group[0].profile
    forward = found.engine.model_copy(update={"options": {**found.engine.options, "version_compatible": True}})
    assert "version-compatible=true" in bundle.config("net", found.model_copy(update={"engine": forward}))
    several = found.engine.model_copy(update={"options": {**found.engine.options, "profiles": 2}})
    assert config(found, engine=several).instance_group[0].profile == ["0", "1"]
    with pytest.raises(UsageError, match="and not of tensorrt_rtx"):
        package(run, "triton", tmp_path / "rtx", "tensorrt_rtx-fp16")
    package(run, "bundle", tmp_path / "b", "tensorrt_rtx-fp16")
    kept = manifest.read(tmp_path / "b")
    assert (kept.engine.version, kept.engine.compute_capabilities) == ("10.14.1", ("sm86",))
    assert {"model.engine", "model.engine.json"} < set(kept.files)


TYPES = "INVALID BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 STRING BF16"


def _model_config() -> Any:
    """The part of Triton's ``model_config.proto`` that is used, with maps as the entries that they are in text."""
    kinds = {"string": 9, "int": 3, "message": 11, "bool": 8}
    messages = {
        "Reshape": {"shape": "*int"},
        "Tensor": {"name": "string", "data_type": "enum", "dims": "*int", "reshape": "Reshape"},
        "Group": {"count": "int", "kind": "kind", "profile": "*string"},
        "Batching": {"preferred_batch_size": "*int", "max_queue_delay_microseconds": "int"},
        "Text": {"string_value": "string"},
        "Parameter": {"key": "string", "value": "Text"},
        "Option": {"key": "string", "value": "string"},
        "Accelerator": {"name": "string", "parameters": "*Option"},
        "Accelerators": {"gpu_execution_accelerator": "*Accelerator", "cpu_execution_accelerator": "*Accelerator"},
        "Graph": {"level": "int"},
        "Cuda": {"graphs": "bool"},
        "Optimization": {"graph": "Graph", "execution_accelerators": "Accelerators", "cuda": "Cuda"},
        "ModelConfig": {
            **dict.fromkeys(("name", "platform", "backend", "default_model_filename"), "string"),
            "max_batch_size": "int",
            "input": "*Tensor",
            "output": "*Tensor",
            "dynamic_batching": "Batching",
            "instance_group": "*Group",
            "optimization": "Optimization",
            "parameters": "*Parameter",
        },
    }
    file = descriptor_pb2.FileDescriptorProto(name="model_config.proto", package="part", syntax="proto2")
    for name, values in (
        ("enum", [f"TYPE_{one}" for one in TYPES.split()]),
        ("kind", ["KIND_AUTO", "KIND_GPU", "KIND_CPU"]),
    ):
        enum = file.enum_type.add(name=name)
        for number, value in enumerate(values):
            enum.value.add(name=value, number=number)
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for number, (entry, kind) in enumerate(fields.items(), 1):
            one = message.field.add(name=entry, number=number, label=3 if kind.startswith("*") else 1)
            kind = kind.removeprefix("*")
            one.type = kinds.get(kind, 14 if kind in ("enum", "kind") else 11)
            if kind not in kinds:
                one.type_name = f".part.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool.FindMessageTypeByName("part.ModelConfig")
