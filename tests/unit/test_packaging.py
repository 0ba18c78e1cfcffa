"""Packages of a run that nobody had to make: choosing, refusing, the manifest, Triton's configuration, verification."""

import errno
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory, text_format
from onnx import TensorProto, helper

from enginesmith import load
from enginesmith.pipeline.artifact import file_digest, folder_digest
from enginesmith.pipeline.engines.tensorrt.build_log import Figures
from enginesmith.pipeline.engines.tensorrt.manifest import EngineManifest, path_beside
from enginesmith.pipeline.engines.tensorrt.options import BuildOptions
from enginesmith.pipeline.errors import EnginesmithError, MissingCapability, ModelError, StoreError, UsageError
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.results import remeasure
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.results.package import manifest, verify
from enginesmith.pipeline.results.package import package as bundle
from enginesmith.pipeline.results.package.package import package
from enginesmith.pipeline.results.run import ModelRecord, Run, StepRecord, StoredArtifact, VariantRecord
from enginesmith.pipeline.tensors import Signature, TensorSpec

SIGNATURE = Signature(inputs=(TensorSpec.parse("x:float32:batch,4"),), outputs=(TensorSpec.parse("y:float32:batch,4"),))
ENTRY = {"tools": {"onnxruntime": "1.0"}, "seconds": 1, "host_peak_bytes": None, "effect": "made"}
BUILT = {"step": "build", "parameters": {"fields": {"engine": {"graph_optimization": "all"}}}, **ENTRY}


def stored(folder: Path, path: Path) -> StoredArtifact:
    digests = {one.name: file_digest(one) for one in path.parent.iterdir()}
    size = sum(one.stat().st_size for one in path.parent.iterdir())
    return StoredArtifact(path=str(path.relative_to(folder)), sha256=folder_digest(digests), bytes=size)


def row(batch: int, rate: float | None) -> dict[str, Any]:
    return {"batch": batch, "n": 9, "p50_ms": 1.0, "throughput_per_s": rate}


class Made:
    """A run directory with a portable graph, an engine of TensorRT-RTX, and the module itself."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        graph = folder / "graphs/simplify/model.onnx"
        graph.parent.mkdir(parents=True)
        values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in "xy"]
        weight = helper.make_tensor("w", TensorProto.FLOAT, [4], np.arange(4.0))
        node = helper.make_node("Mul", ["x", "w"], ["y"])
        made = helper.make_graph([node], "tiny", values[:1], values[1:], [weight])
        onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), graph)
        x = np.ones((1, 4), np.float32)
        np.savez(folder / "test_vector.npz", **{"input:x": x, "output:y": x * np.arange(4, dtype=np.float32)})
        vector = folder / "test_vector.npz"
        self.vector = StoredArtifact(path=vector.name, sha256=file_digest(vector), bytes=vector.stat().st_size)
        self.graph = stored(folder, graph)
        self.variants = [self.record("onnxruntime-fp32", graph=self.graph, artifact=self.graph)]
        self.changes: dict[str, Any] = {"winner": "onnxruntime-fp32"}

    def record(self, name: str, **fields: Any) -> VariantRecord:
        engine, _, precision = name.partition("-")
        values = {"id": name, "engine": engine, "precision": precision or "fp32", "status": "measured"}
        values |= {"test_vector": self.vector, "history": (BUILT,), "latency": (row(1, 10), row(8, 40))}
        return VariantRecord.model_validate(values | fields)

    def engine(self, flavour: str) -> VariantRecord:
        path = self.folder / f"variants/{flavour}/model.engine"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"engine")
        made = EngineManifest.model_validate(
            {
                "engine": flavour,
                "version": "10.14.1",
                "target": None,
                "compute_capabilities": ("sm86",),
                "sha256": file_digest(path),
                "bytes": 6,
                "model_sha256": "1",
                "options": BuildOptions(),
                "workspace_limit_bytes": 1,
                "workspace_asked_bytes": None,
                "signature": SIGNATURE,
                "audit": None,
                "profiles": ({"x": ((1, 4), (1, 4), (8, 4))},),
                "figures": Figures(),
            }
        )
        path_beside(path).write_text(made.model_dump_json())
        built = {**BUILT, "parameters": {"fields": {"engine": {}}}}
        return self.record(f"{flavour}-fp16", artifact=stored(self.folder, path), history=(built,))

    def write(self, **changes: Any) -> Path:
        values: dict[str, Any] = {
            "name": "demo",
            "created": "2026-01-01",
            "seconds": 1,
            "complete": True,
            "pareto": (),
            "verdicts": (),
            "recipe": make({"model": "net.py:build"}),
            "environment": {"processor": "a CPU"},
            "model": ModelRecord(source="net.py:build", signature=SIGNATURE, data="set", shapes={"batch": "1:8:8"}),
            "steps": (StepRecord(id="reference", status="done", cached=False, seconds=1, effect="2 sets of feeds"),),
            "baseline": self.record("eager", test_vector=None),
            "variants": tuple(self.variants),
        }
        runs.write(Run.model_validate(values | self.changes | changes), self.folder)
        return self.folder


@pytest.fixture(autouse=True)
def no_script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packages are written without running their script, which takes half a second, unless a test is about it."""
    if "script" not in request.node.name:
        monkeypatch.setattr(bundle, "run_script", lambda folder, kept: "not run")


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made(tmp_path / "run")


def test_a_bundle_holds_what_it_needs_and_names_everything(made: Made, tmp_path: Path) -> None:
    found = package(made.write(), "bundle", tmp_path / "b")
    assert found.files == ("infer.py", "manifest.json", "model.onnx", "test_vector.npz")
    kept = manifest.read(tmp_path / "b")
    assert set(kept.files) == set(found.files) - {"manifest.json"}
    assert kept.files["model.onnx"].sha256 == file_digest(tmp_path / "b/model.onnx")
    assert kept.engine.options["session"]["providers"] == ["CPUExecutionProvider"]
    assert (kept.origin.model, kept.origin.processor) == ("net.py:build", "a CPU")
    assert kept.measured.latency[1].throughput_per_s == 40
    assert kept.preprocessing.notes == ("the run fed 2 sets of feeds",)
    assert found.manifest_sha256 == file_digest(tmp_path / "b/manifest.json")


def test_the_same_run_gives_the_same_bytes(made: Made, tmp_path: Path) -> None:
    run = made.write()
    for form in ("bundle", "triton"):
        one, two = package(run, form, tmp_path / f"{form}-1"), package(run, form, tmp_path / f"{form}-2")
        assert one.manifest_sha256 == two.manifest_sha256


def test_a_bundle_without_samples_has_a_made_up_vector(made: Made, tmp_path: Path) -> None:
    sample = {"input:x": np.array([[7, 9, 5, 0]], np.float32), "output:y": np.array([[0, 9, 10, 0]], np.float32)}
    np.savez(tmp_path / "run/test_vector.npz", **sample)
    made.vector = made.vector.model_copy(update={"sha256": file_digest(tmp_path / "run/test_vector.npz")})
    made.variants = [made.record("onnxruntime-fp32", graph=made.graph, artifact=made.graph)]
    done = package(made.write(), "bundle", tmp_path / "b", keep_samples=False)
    assert any("made-up input" in text for text in done.cautions)
    kept = dict(np.load(tmp_path / "b/test_vector.npz"))
    assert not np.isin(kept["input:x"], [7, 9, 5, 0]).any()
    np.testing.assert_allclose(kept["output:y"], kept["input:x"] * np.arange(4))
    assert verify.verify(tmp_path / "b")[1].passed


@pytest.mark.parametrize(
    ("sample", "values"),
    [
        (np.array([[3, 900]]), {*range(3, 901)}),
        (np.array([True, False]), {True, False}),
        (np.zeros((0, 3)), set()),
        (np.array(4, np.int64), {4}),
    ],
)
def test_made_up_values_stay_in_range(sample: Any, values: set[Any]) -> None:
    drawn = bundle._make_up(sample)
    assert (drawn.dtype, drawn.shape) == (sample.dtype, sample.shape)
    assert {*drawn.ravel().tolist()} <= values


@pytest.mark.parametrize(
    ("changes", "variant", "said"),
    [
        ({"winner": None, "winner_reason": "none is fast enough"}, None, "none is fast enough"),
        ({}, "onnxruntime-fp23", "did you mean onnxruntime-fp32"),
        ({}, "eager", "takes the code that makes it"),
        ({"variants": ()}, None, "no winner"),
    ],
)
def test_wrong_choices_are_said(
    changes: dict[str, Any], variant: str | None, said: str, made: Made, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        package(made.write(**changes), "bundle", tmp_path / "b", variant)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("form", ["bundle", "triton"])
def test_the_next_command_can_be_pasted(form: Any, made: Made, tmp_path: Path) -> None:
    odd = tmp_path / "two words 'quoted'"
    said = package(made.write(), form, odd).next
    assert any(str(odd) in word for word in shlex.split(said))


def test_a_run_from_before_graphs_were_kept_can_be_resumed(made: Made, tmp_path: Path) -> None:
    made.variants = [made.record("onnxruntime-fp32", artifact=made.graph)]
    with pytest.raises(UsageError, match="enginesmith resume"):
        package(made.write(), "bundle", tmp_path / "b")


def test_a_failed_variant_is_packaged_by_name_with_a_caution(made: Made, tmp_path: Path) -> None:
    fields = {"graph": made.graph, "artifact": made.graph, "status": "failed", "reason": "too far from eager"}
    made.variants.append(made.record("onnxruntime-int8", **fields, rejected="of unknown loss"))
    found = package(made.write(), "bundle", tmp_path / "b", "onnxruntime-int8")
    assert "it failed in the run: too far from eager" in found.cautions
    assert "it was rejected: of unknown loss" in found.cautions
    assert any("not the run's winner" in text for text in found.cautions)
    assert any("it failed" in text for text in manifest.read(tmp_path / "b").cautions)


def test_packaging_ends_with_the_script_of_the_bundle(made: Made, tmp_path: Path) -> None:
    made.variants.append(made.engine("tensorrt_rtx"))
    run = made.write()
    assert package(run, "bundle", tmp_path / "b").check == "its answers match the test vector"
    elsewhere = package(run, "bundle", tmp_path / "rtx", "tensorrt_rtx-fp16").check
    assert elsewhere.startswith("not run: ")
    assert "made with tensorrt_rtx 10.14.1 for cuda" in elsewhere
    np.savez(tmp_path / "run/test_vector.npz", **{"input:x": np.ones((1, 4), "f"), "output:y": np.ones((1, 4), "f")})
    made.vector = made.vector.model_copy(update={"sha256": file_digest(tmp_path / "run/test_vector.npz")})
    made.variants = [made.record("onnxruntime-fp32", graph=made.graph, artifact=made.graph)]
    with pytest.raises(ModelError, match="y does not match the test vector"):
        package(made.write(), "bundle", tmp_path / "wrong")
    assert not (tmp_path / "wrong").exists()
    made.variants = [made.variants[0].model_copy(update={"status": "failed", "reason": "too far from eager"})]
    assert "does not match" in package(made.write(), "bundle", tmp_path / "named", "onnxruntime-fp32").check


@pytest.mark.parametrize("file", ["graphs/simplify/model.onnx", "test_vector.npz"])
@pytest.mark.parametrize("harm", [lambda path: path.unlink(), lambda path: path.write_bytes(b"other")])
def test_files_that_the_run_did_not_make_are_refused(
    file: str, harm: Callable[[Path], object], made: Made, tmp_path: Path
) -> None:
    harm(made.write() / file)
    with pytest.raises(ModelError, match=r"missing|not what the run made"):
        package(made.folder, "bundle", tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_full_disk_leaves_nothing(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(chosen: object, folder: Path, keep_samples: bool) -> None:
        (folder / "model.onnx").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bundle, "write_bundle", full)
    with pytest.raises(StoreError, match="no space left"):
        package(made.write(), "bundle", tmp_path / "out/b")
    assert not list((tmp_path / "out").iterdir())


def config(found: manifest.Manifest, **changes: Any) -> Any:
    text = bundle.config("net", found.model_copy(update=changes))
    return text_format.Parse(text, message_factory.GetMessageClass(_model_config())())


@pytest.fixture
def found(made: Made, tmp_path: Path) -> manifest.Manifest:
    package(made.write(), "bundle", tmp_path / "b")
    return manifest.read(tmp_path / "b")


def test_a_repository_for_triton(made: Made, tmp_path: Path) -> None:
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
    assert parsed.HasField("dynamic_batching") == bool(most)


def test_batching_needs_an_engine_that_takes_a_single_row(found: manifest.Manifest) -> None:
    measured = {"shapes": {"batch": manifest.ShapeRange.parse("8:8:8")}}
    asked = found.origin.model_copy(update={"recipe": {"shapes": {"batch": "8:8:8"}}})
    built = found.engine.model_copy(update={"name": "tensorrt", "file": "1/model.plan"})
    assert config(found, **measured).max_batch_size == 8
    assert config(found, **measured, origin=asked).max_batch_size == 0
    assert config(found, **measured, engine=built).max_batch_size == 0


@pytest.mark.parametrize(("rates", "preferred"), [((10, 5, 40), [64]), ((10, 9, 8), None), ((None, None, None), [])])
def test_batches_are_preferred_where_they_paid(
    rates: tuple[float | None, ...], preferred: list[int] | None, found: manifest.Manifest
) -> None:
    row = found.measured.latency[0]
    rows = tuple(
        row.model_copy(update={"batch": batch, "throughput_per_s": rate})
        for batch, rate in zip((1, 8, 64), rates, strict=True)
    )
    changes = {"measured": found.measured.model_copy(update={"latency": rows})}
    parsed = config(found, **changes, shapes={"batch": manifest.ShapeRange(min=1, opt=8, max=64)})
    assert parsed.HasField("dynamic_batching") == (preferred is not None)
    assert list(parsed.dynamic_batching.preferred_batch_size) == (preferred or [])


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


def test_a_variant_with_cuda_graphs_has_its_options_wherever_it_is_run_again(made: Made, tmp_path: Path) -> None:
    """What was built is the same with and without them: the record says which it is; packages say if they cannot."""
    graphs = {"cuda_graphs": True}
    engines = map(made.engine, ("tensorrt", "tensorrt_rtx"))
    made.variants = [record.model_copy(update=graphs) for record in (*made.variants, *engines)]
    assert all(remeasure._engine(record).cuda_graphs for record in made.variants)  # type: ignore[attr-defined]
    run, said = made.write(), {}
    packages = [(form, name) for form in ("triton", "bundle") for name in ("onnxruntime-fp32", "tensorrt-fp16")]
    for form, name in packages:
        wrote = package(run, form, tmp_path / f"{form}-{name}", name)  # type: ignore[arg-type]
        said[form, name[:4]] = any("does not replay" in text for text in wrote.cautions)
    bundles = {("bundle", "onnx"): False, ("bundle", "tens"): True}
    assert said == {("triton", "onnx"): True, ("triton", "tens"): False, **bundles}
    assert "graphs: true" in (tmp_path / "triton-tensorrt-fp16/net_py_build/config.pbtxt").read_text()


def test_engines_of_tensorrt(made: Made, tmp_path: Path) -> None:
    made.variants += [made.engine("tensorrt"), made.engine("tensorrt_rtx")]
    run = made.write()
    package(run, "triton", tmp_path / "t", "tensorrt-fp16")
    assert (tmp_path / "t/net_py_build/1/model.plan").read_bytes() == b"engine"
    text = (tmp_path / "t/net_py_build/config.pbtxt").read_text()
    parsed = text_format.Parse(text, message_factory.GetMessageClass(_model_config())())
    assert (parsed.backend, parsed.platform, parsed.instance_group[0].kind) == ("tensorrt", "tensorrt_plan", 1)
    assert "TensorRT 10.14.1, on sm86" in text
    assert not parsed.HasField("optimization")
    found = manifest.read(tmp_path / "t/net_py_build")
    options = {"engine": found.engine.model_copy(update={"options": {**found.engine.options, "cuda_graphs": True}})}
    assert config(found, **options).optimization.cuda.graphs
    with pytest.raises(UsageError, match="and not of tensorrt_rtx"):
        package(run, "triton", tmp_path / "rtx", "tensorrt_rtx-fp16")
    package(run, "bundle", tmp_path / "b", "tensorrt_rtx-fp16")
    kept = manifest.read(tmp_path / "b")
    assert (kept.engine.version, kept.engine.compute_capabilities) == ("10.14.1", ("sm86",))
    assert {"model.engine", "model.engine.json"} < set(kept.files)


def test_digests_are_checked_without_an_engine(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made.variants.append(made.engine("tensorrt_rtx"))
    package(made.write(), "bundle", tmp_path / "b", "tensorrt_rtx-fp16")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(MissingCapability, match="4 files are what was packaged; the test vector was not run"):
        verify.verify(tmp_path / "b")
    (tmp_path / "b/model.engine").write_bytes(b"angine")
    with pytest.raises(ModelError, match="nothing was loaded"):
        verify.verify(tmp_path / "b")


def _spoil(name: str, data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(data)


def _rewrite(**changes: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        values = json.loads((folder / "manifest.json").read_text())
        (folder / "manifest.json").write_text(json.dumps(values | changes))

    return change


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_spoil("model.onnx", b"other"), "its sha256 differs"),
        (_spoil("infer.py", b"print()"), "its sha256 differs"),
        (_spoil("extra.so", b"code"), "was not packaged"),
        (lambda folder: (folder / "test_vector.npz").unlink(), "is missing"),
        (_spoil("manifest.json", b'{"schema": "enginesmith.bundle/1", '), "damaged"),
        (_spoil("manifest.json", b"\xff\xfe"), "damaged"),
        (_rewrite(signature=3), "signature"),
        (_rewrite(schema="enginesmith.bundle/2"), "newer schema"),
        (_rewrite(schema="enginesmith.run/1"), "not of the schema"),
        (_rewrite(files={"../run/run.json": {"sha256": "0", "bytes": 1}}), "outside of the bundle"),
        (shutil.rmtree, "no bundle"),
    ],
)
def test_a_bundle_that_is_not_what_was_packaged_is_not_loaded(
    harm: Callable[[Path], object], said: str, found: manifest.Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify.worker, "run", None)  # nothing gets as far as a process
    harm(tmp_path / "b")
    with pytest.raises(EnginesmithError, match=said):
        verify.verify(tmp_path / "b")


def test_machine_code_is_loaded_only_where_its_maker_is_trusted(made: Made, tmp_path: Path) -> None:
    package(made.write(), "bundle", tmp_path / "b")
    text = (tmp_path / "b/manifest.json").read_text()
    native = re.sub(r'"engine": \{\s+"name": "\w+"', '"engine": {"name": "aotinductor"', text)
    (tmp_path / "b/manifest.json").write_text(native.replace('"options": {', '"options": {"dtype": "float32",', 1))
    for refused in (lambda: verify.verify(tmp_path / "b"), lambda: load(tmp_path / "b")):
        with pytest.raises(MissingCapability, match="machine code") as caught:
            refused()
        assert "--trust" in caught.value.remedy
    with pytest.raises(ModelError, match=r"engine\.json"):
        load(tmp_path / "b", trust=True)


def test_only_bundles_can_be_verified(made: Made, tmp_path: Path) -> None:
    package(made.write(), "triton", tmp_path / "t")
    with pytest.raises(UsageError, match="no test vector"):
        verify.verify(tmp_path / "t/net_py_build")


TYPES = "INVALID BOOL UINT8 UINT16 UINT32 UINT64 INT8 INT16 INT32 INT64 FP16 FP32 FP64 STRING BF16"


def _model_config() -> Any:
    """The part of Triton's ``model_config.proto`` that is used, with maps as the entries that they are in text."""
    kinds = {"string": 9, "int": 3, "message": 11, "bool": 8}
    messages = {
        "Reshape": {"shape": "*int"},
        "Tensor": {"name": "string", "data_type": "enum", "dims": "*int", "reshape": "Reshape"},
        "Group": {"count": "int", "kind": "kind"},
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


def test_the_script_of_bundles_stands_alone_and_explains_what_is_missing(made: Made, tmp_path: Path) -> None:
    made.variants.append(made.engine("tensorrt_rtx"))
    package(made.write(), "bundle", tmp_path / "b", "tensorrt_rtx-fp16")
    script = tmp_path / "b/infer.py"
    assert f'"{manifest.SCHEMA}"' in script.read_text()
    imported = re.findall(r"^\s*(?:import|from) (\w+)", script.read_text(), re.M)
    assert {*imported} - sys.stdlib_module_names == {"numpy", "onnxruntime", "openvino", "torch"}

    def run(*arguments: str) -> tuple[int, str]:
        hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
        done = subprocess.run([sys.executable, script, *arguments], capture_output=True, text=True, env=hidden)
        return done.returncode, done.stdout + done.stderr

    assert run("--help")[0] == 0
    code, said = run("--input", "x.npy")
    assert (code, said.splitlines()[-1].partition("error: ")[2]) == (
        2,
        "--input x.npy: write NAME=x.npy, with the name of an input (see manifest.json)",
    )
    code, said = run()
    assert code == 1
    assert said.startswith("error: this machine cannot run the engine: "), said
    assert "made with tensorrt_rtx 10.14.1 for cuda" in said


def test_programs_and_bundles_run_with_the_tuned_options(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    chosen = {"intra_op_num_threads": "1", "session.intra_op.allow_spinning": "0"}
    fields = {"session_options": [f"{name}={value}" for name, value in chosen.items()]}
    tuning = {"fields": fields, "kept": (), "trials": (), "untried": ()}
    made.variants = [made.record("onnxruntime-fp32", graph=made.graph, artifact=made.graph, tuning=tuning)]
    folder, seen = made.write(), list[Any]()
    package(folder, "bundle", tmp_path / "b")
    candidates = [
        remeasure.candidate("run", remeasure.Stored(folder, runs.read(folder), made.variants[0])),
        verify.candidate(tmp_path / "b", manifest.read(tmp_path / "b")),
    ]
    for found in candidates:  # for gate, benchmark and load
        with found.engine.load(found.artifact, found.device) as session:
            seen.append(session._session.get_session_options())  # type: ignore[attr-defined]
    real = onnxruntime.InferenceSession
    monkeypatch.setattr(
        onnxruntime, "InferenceSession", lambda file, given, **more: seen.append(given) or real(file, given, **more)
    )
    assert runpy.run_path(str(tmp_path / "b/infer.py"))["Model"]().check()[1] == []
    assert len(seen) == 3
    for options in seen:
        assert options.intra_op_num_threads == 1
        assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_runs_and_bundles_are_loaded_into_a_program(made: Made, tmp_path: Path) -> None:
    good, ones = made.variants[0], np.ones((2, 4), np.float32)
    changes = ({"id": "bad", "status": "failed", "reason": "wrong result"}, {"id": "slow", "rejected": "no faster"})
    made.variants += [good.model_copy(update=fields) for fields in (*changes, {"id": "none", "artifact": None})]
    folder = made.write()
    package(folder, "bundle", tmp_path / "bundle", None)
    for place in (folder, str(tmp_path / "bundle")):
        with load(place, good.id, device="cpu") as model:
            assert np.array_equal(model(x=ones), ones * np.arange(4, dtype=np.float32))
            assert model.check().passed
    for name, doubt in (("bad", "bad: it failed in the run: wrong result"), ("slow", "it was rejected: no faster")):
        with pytest.warns(UserWarning, match=doubt), load(folder, name) as model:
            assert model.variant == name
    refusals: list[tuple[Path, dict[str, str], str]] = [
        (tmp_path / "bundle", {"variant": "other"}, "is a bundle package of onnxruntime-fp32"),
        (folder, {"variant": "none"}, "none has no engine"),
        (folder, {"variant": "eager"}, r"net\.py"),
        (folder, {"variant": good.id, "device": "tpu"}, "no device 'tpu'"),
        (tmp_path, {}, "no run in"),
        (made.write(winner=None, winner_reason="all are slow"), {}, r"all are slow(?s:.*)variant=…\); built are: onnx"),
    ]
    for place, asked, words in refusals:
        with pytest.raises(UsageError, match=words):
            load(place, **asked)
    for file, place in ((folder / good.artifact.path, folder), (tmp_path / "bundle/model.onnx", tmp_path / "bundle")):
        file.write_bytes(file.read_bytes() + b" ")
        with pytest.raises(ModelError, match="is not"):
            load(place, good.id)
