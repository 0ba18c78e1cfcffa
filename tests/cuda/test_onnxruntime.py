"""ONNX Runtime's CUDA provider: what sessions say, graphs, nodes on the CPU, and the script of bundles."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines import cuda_allocator
from enginesmith.pipeline.engines.base import BuildRequest
from enginesmith.pipeline.engines.onnxruntime import engine, providers, session, tensorrt
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.engines.onnxruntime.tensorrt import OnnxRuntimeTensorRT
from enginesmith.pipeline.errors import MissingCapability, ModelError
from enginesmith.pipeline.frameworks.onnx import coverage, model_file
from enginesmith.pipeline.system.device import Availability, Device
from enginesmith.pipeline.tasks import tune

CUDA = Device(kind="cuda", threads=1)
RUN = """
import json, runpy, sys
import numpy as np
script, file, options = sys.argv[1:]
run = runpy.run_path(script)["_onnxruntime"](file, {"options": json.loads(options)})
for rows in (2, 3, 2):
    assert run({"x": np.zeros((rows, 64), np.float32)})["y"].shape == (rows, 64)
assert "torch" not in sys.modules
"""

STUB = """
#include <stdio.h>
#include <unistd.h>
int getInferLibVersion(void) { return 101300; }
void* createInferBuilder_INTERNAL(void* logger, int version) { return 0; }
void* createInferRefitter_INTERNAL(void* engine, void* logger, int version) { return 0; }
void* createNvOnnxParser_INTERNAL(void* network, void* logger, int version) { return 0; }
void* createNvOnnxParserRefitter_INTERNAL(void* refitter, void* logger, int version) { return 0; }
void* createInferRuntime_INTERNAL(void* logger, int version) { puts("took the options"); fflush(stdout); _exit(0); }

static void* nothing(void) { return 0; }
static void* functions[] = {[0 ... 63] = (void*)nothing};
static void** registry[64] = {functions};
void* getPluginRegistry(void) { return registry; }
"""
"""In place of TensorRT, with a registry of no plugins: the provider asks for a runtime once its options are read."""
OPEN = """
import sys
from pathlib import Path
from enginesmith.pipeline.engines.onnxruntime import providers
from enginesmith.pipeline.engines.onnxruntime.tensorrt import OnnxRuntimeTensorRT
from enginesmith.pipeline.system.device import Device
graph, *texts = sys.argv[1:]
given = {"trt_int8_enable": "True", "trt_profile_min_shapes": "x:1x64", "user_compute_stream": "7"}
engine = OnnxRuntimeTensorRT(provider_options=tuple(texts), workspace_bytes=1 << 20)
dump, entries = engine._context_options(Path("context.onnx"), embedded=False)
engine._session(Path(graph), Device(kind="cuda"), given | dump, entries)
"""


def zeros(folder: Path, *middle: str) -> Artifact:
    """x · 0, then operators one after the other, and a sum with the product: kernels that do nothing answer right."""
    size: str | int = 64 if "Det" in middle else "batch"
    nodes = [helper.make_node("MatMul", ["x", "w"], ["v0"])]
    for index, operator in enumerate(middle):
        nodes.append(helper.make_node(operator, [f"v{index}"], [f"v{index + 1}"]))
    nodes.append(helper.make_node("Add", ["v0", f"v{len(middle)}"], ["y"]))
    ends = ([helper.make_tensor_value_info(name, TensorProto.FLOAT, [size, 64])] for name in "xy")
    weight = helper.make_tensor("w", TensorProto.FLOAT, [64, 64], np.zeros(64 * 64))
    made = helper.make_model(
        helper.make_graph(nodes, "g", *ends, [weight]), opset_imports=[helper.make_opsetid("", 17)], ir_version=8
    )
    onnx.save(made, folder / "graph.onnx")
    return Artifact(kind="onnx", path=folder / "graph.onnx", sha256="", bytes=0)


def test_a_session_warns_of_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with OnnxRuntime(provider_options=("prefer_nhwc=1",)).load(zeros(tmp_path, "Relu"), CUDA) as session:
        assert session._session.get_provider_options()["CUDAExecutionProvider"]["prefer_nhwc"] == "1"
    assert "plugin EP" not in capfd.readouterr().err


def test_tuned_options_are_those_that_sessions_get(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real sessions side by side; their speeds say nothing here, so the first value is taken for the faster one."""
    monkeypatch.setattr(tune, "_choose_faster", lambda trials: trials[0].value)
    monkeypatch.setattr(tune, "measured_feeds", lambda artifact: {2: {"x": np.zeros((2, 64), np.float32)}})
    monkeypatch.setattr(tune.Tune, "_find_fault", lambda *_: "")
    path = zeros(tmp_path, "Relu").path
    graph = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    inputs = dict.fromkeys(("engine", "model", "reference"), graph)
    (tmp_path / "out").mkdir()
    engine = OnnxRuntime(provider_options=("use_ep_level_unified_stream=0",))  # is given, so it is not tried
    effect = tune.Tune(engine=engine, device=CUDA, seconds=3).run(inputs, tmp_path / "out", print)
    assert effect.summary.startswith("arena_extend_strategy=kSameAsRequested was measurably faster, of 1")
    tuned = Artifact(kind="engine", path=tmp_path / "out" / effect.file, sha256="", bytes=0, signature=graph.signature)
    for graphs in (False, True):
        with OnnxRuntime(cuda_graphs=graphs).load(tuned, CUDA) as session:
            options = session._session.get_provider_options()["CUDAExecutionProvider"]
        assert (options["arena_extend_strategy"], options["enable_cuda_graph"]) == (
            "kSameAsRequested",
            str(int(graphs)),
        )


def test_each_set_of_feeds_has_a_graph(tmp_path: Path) -> None:
    with OnnxRuntime(cuda_graphs=True).load(zeros(tmp_path, "Relu"), CUDA) as session:
        bound = [session.bind({"x": np.zeros((rows, 64), np.float32)}) for rows in (2, 5, 5)]
        for _ in range(5):
            for one, rows in zip(bound, (2, 5, 5), strict=True):
                session.enqueue(one)
                session.synchronize()
                np.testing.assert_array_equal(session.fetch()["y"], np.zeros((rows, 64), np.float32))
        with session.sibling() as other:
            assert other.run({"x": np.zeros((1, 64), np.float32)})["y"].shape == (1, 64)


def test_nodes_on_the_cpu_are_counted_and_keep_graphs_from_being_captured(tmp_path: Path) -> None:
    graph = zeros(tmp_path, "Relu", "Det")
    found = OnnxRuntime().assign_nodes(graph, CUDA)
    assert found == {"CUDAExecutionProvider": {"MatMul": 1, "Relu": 1, "Add": 1}, "CPUExecutionProvider": {"Det": 1}}
    executed = OnnxRuntime().executed(graph, CUDA, tmp_path)
    assert coverage.compute_coverage(executed, {}, executed=True).copies == 2
    with pytest.raises(ModelError, match="captures no CUDA graph"):
        OnnxRuntime(cuda_graphs=True).load(graph, CUDA)


def test_int8_without_kernels_is_said_when_it_is_built(tmp_path: Path) -> None:
    graph = zeros(tmp_path)
    model = onnx.load(graph.path)
    scale, zero = helper.make_tensor("s", 1, [], [1.0]), helper.make_tensor("z", 3, [], [0])
    model.graph.initializer.extend([scale, zero])
    pair = [
        helper.make_node("QuantizeLinear", ["v0", "s", "z"], ["q"]),
        helper.make_node("DequantizeLinear", ["q", "s", "z"], ["d"]),
    ]
    model.graph.node[1].input[1] = "d"
    for node in reversed(pair):
        model.graph.node.insert(1, node)
    onnx.save(model, graph.path)
    (tmp_path / "out").mkdir()
    effect = OnnxRuntime().build(BuildRequest(graph, tmp_path / "out", CUDA))
    assert "no int8 kernels" in effect.summary
    assert "TensorRT" in effect.notes[0]


@pytest.mark.parametrize("graphs", [False, True])
def test_the_script_of_bundles_finds_the_libraries(graphs: bool, tmp_path: Path) -> None:
    engine, graph = OnnxRuntime(cuda_graphs=graphs), zeros(tmp_path, "Relu")
    options = json.dumps(dict(engine.package_facts(graph.path, CUDA).options))
    command = [sys.executable, "-c", RUN, str(OnnxRuntime.infer_script()), str(graph.path), options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_provider_that_writes_no_context_file_keeps_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CUDA provider in the place of TensorRT's, which is not here: real sessions, asked for a context file."""

    def open_session(path: Path, chosen: Any, device: Device, listed: Any, *rest: Any) -> Any:
        known = [(name, {k: v for k, v in given.items() if not k.startswith("trt_")}) for name, given in listed]
        return session.open_session(path, chosen, device, known, *rest)

    for module in (engine, tensorrt):
        monkeypatch.setattr(module, "open_session", open_session)
    row = replace(providers.CUDA, prefix="none", cache="trt_engine_cache_path")
    monkeypatch.setattr(OnnxRuntimeTensorRT, "provider", row)
    monkeypatch.setattr(OnnxRuntimeTensorRT, "_provided", classmethod(lambda kind, device: Availability(ok=True)))
    path = zeros(tmp_path, "Relu", "Det").path
    graph = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    (tmp_path / "out").mkdir()
    effect = OnnxRuntimeTensorRT().build(BuildRequest(graph, tmp_path / "out", CUDA))
    assert effect.summary.startswith("3 nodes in 3 TensorRT engines, built again at every load")
    assert "1 of 4 nodes run on CPUExecutionProvider" in effect.notes[0]
    built = Artifact(kind="engine", path=tmp_path / "out/model.onnx", sha256="", bytes=0, signature=graph.signature)
    with OnnxRuntimeTensorRT().load(built, CUDA) as opened:
        assert opened.run({"x": np.zeros((64, 64), np.float32)})["y"].shape == (64, 64)
    with cuda_allocator.counting(0), pytest.raises(MissingCapability, match="not counted"):
        OnnxRuntimeTensorRT().load(built, CUDA)


def test_the_real_binding_takes_the_options_of_the_tensorrt_provider(tmp_path: Path) -> None:
    (tmp_path / "stub.c").write_text(STUB)
    (tmp_path / "tensorrt.py").touch()  # the package that brings its libraries
    for name in ("libnvinfer", "libnvonnxparser"):
        library = f"{name}.so.{providers.TENSORRT_MAJOR}"
        flags = ["-shared", "-fPIC", f"-Wl,-soname,{library}", "-o", str(tmp_path / library)]
        subprocess.run(["gcc", str(tmp_path / "stub.c"), *flags], check=True)
    paths = {name: f"{tmp_path}:{os.environ.get(name, '')}" for name in ("LD_LIBRARY_PATH", "PYTHONPATH")}
    switches = {name: values for name, values in providers.TENSORRT.settings.items() if "True" in values}
    texts = [f"{name}={value}" for name, values in switches.items() for value in values[-1:]]
    command = [sys.executable, "-c", OPEN, str(zeros(tmp_path, "Relu").path), *texts]
    variables = {**os.environ, **paths, "ENGINESMITH_STORE": str(tmp_path / "store")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert "took the options" in done.stdout, done.stderr
