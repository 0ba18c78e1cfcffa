"""Memory of linear layers: to the byte, under limits, of several callers, and on a card that is too small."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.artifact import Artifact, file_digest
from enginesmith.pipeline.engines.base import Candidate
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.engines.torch.eager import Eager
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.frameworks.torch import module, saved
from enginesmith.pipeline.measure.latency.benchmark import LatencySettings
from enginesmith.pipeline.measure.latency.rows import LatencyBenchmark, measure_latency
from enginesmith.pipeline.measure.memory.limits import try_batch
from enginesmith.pipeline.measure.memory.peak import measure_memory
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Feeds

from .conftest import NETS
from .control import Control

CUDA, MIB = Device(kind="cuda"), 1 << 20
WEIGHTS = (64 * 256, 256 * 10)
PEAKS = {"eager": 85504, "onnxruntime": 80384}
"""Weights, activations and outputs, in blocks of 512 bytes; ONNX Runtime's graph has no biases."""
REQUESTED = {"eager": 19_210 * 4 + 2 * 4 * 256 * 4, "onnxruntime": sum(WEIGHTS) * 4 + 4 * 256 * 4 + 4 * 10 * 4}
"""The same without rounding; eager has the first product and its ReLU at once, ONNX Runtime one and the answer."""
Card = Callable[..., Control]


def feeds(batch: int) -> Feeds:
    return {"input": np.zeros((batch, 64), np.float32)}


@pytest.fixture
def candidates(tmp_path: Path) -> dict[str, Candidate]:
    """The zero-weight MLP for eager, and a graph of its products for ONNX Runtime."""
    folder, path = tmp_path / "torch", tmp_path / "mlp.onnx"
    folder.mkdir()
    source, options = resolve(f"{NETS}:mlp"), module.LoadOptions()
    saved.save(loaded := module.load(source, options), source, options, folder)
    first, second = (np.zeros(size, np.float32) for size in WEIGHTS)
    held = [numpy_helper.from_array(first.reshape(64, 256), "a"), numpy_helper.from_array(second.reshape(256, 10), "b")]
    nodes = [("MatMul", ["input", "a"], "h"), ("Relu", ["h"], "r"), ("MatMul", ["r", "b"], "output")]
    ends = [
        helper.make_tensor_value_info(spec.name, TensorProto.FLOAT, ["batch", width])
        for spec, width in ((loaded.signature.inputs[0], 64), (loaded.signature.outputs[0], 10))
    ]
    graph = helper.make_graph([helper.make_node(op, i, [o]) for op, i, o in nodes], "mlp", ends[:1], ends[1:], held)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    record = folder / saved.RECORD
    net = Artifact(kind="torch", path=record, sha256="", bytes=0, signature=loaded.signature)
    exported = Artifact(kind="onnx", path=path, sha256=file_digest(path), bytes=0, signature=loaded.signature)
    return {
        "eager": Candidate("eager", Eager(), net, CUDA),
        "onnxruntime": Candidate("onnxruntime", OnnxRuntime(), exported, CUDA),
    }


@pytest.mark.parametrize(
    ("capability", "workspace", "told", "source"),
    [("8.9", 8.125, "real", "NVML, this process"), ("9.0", 32, "zero", "cudaMemGetInfo of another process")],
)
def test_the_peak_of_eager_has_no_workspace_of_cublas(
    capability: str,
    workspace: float,
    told: str,
    source: str,
    candidates: dict[str, Candidate],
    card: Card,
    tmp_path: Path,
) -> None:
    """A deployment is the same by both instruments, of which NVML may not tell a process's memory."""
    card(capability=capability, memory_mib=2000, context_mib=300, process_bytes=told)
    row = measure_memory(candidates["eager"], 4, feeds(4), tmp_path, lambda text: None)
    lenses = {name: lens.bytes for name, lens in row.lenses.items()}
    assert (row.peak_bytes, lenses["allocator_libraries"]) == (PEAKS["eager"], workspace * MIB)
    assert lenses["allocator_closed"] == 0
    assert lenses["allocator_requested"] == REQUESTED["eager"]
    assert lenses["first_call_peak"] == lenses["steady_peak"] == PEAKS["eager"]
    segments = 2 * 2 * MIB + max(20, int(workspace)) * MIB  # small blocks of two streams, and the workspace
    assert (row.deployment_bytes, row.lenses["deployed"].source) == (300 * MIB + segments, source)
    assert row.deployments_per_device == 2000 * MIB // row.deployment_bytes


def test_a_limit_holds_every_engine_and_leaves_eager_its_workspace(
    candidates: dict[str, Candidate], card: Card, tmp_path: Path
) -> None:
    """At batch 13312 activations take 13 MiB and inputs 3.25 MiB; at 8192 they take 10 MiB together."""
    card(memory_mib=2000, context_mib=300)
    row = measure_memory(candidates["onnxruntime"], 4, feeds(4), tmp_path, lambda text: None)
    assert (row.peak_bytes, "allocator_libraries" in row.lenses) == (PEAKS["onnxruntime"], False)
    assert row.lenses["allocator_requested"].bytes == REQUESTED["onnxruntime"]
    assert 301 * MIB <= (row.deployment_bytes or 0) < 310 * MIB
    for engine, fitting in (("eager", 1), ("onnxruntime", 8192)):
        assert try_batch(candidates[engine], feeds(fitting), tmp_path, 16 * MIB) is None
        oom = try_batch(candidates[engine], feeds(13312), tmp_path, 16 * MIB)
        assert oom
        assert (oom.asked_bytes or 0) >= (oom.free_bytes or 0)


def test_callers_give_their_workspaces_back(candidates: dict[str, Candidate], card: Card, tmp_path: Path) -> None:
    control = card(capability="9.0", context_mib=300)
    settings = LatencySettings(
        block_ms=0.2,
        time_limit_seconds=0.05,
        min_rounds=2,
        launches=1,
        warmup_limit_seconds=0.01,
        concurrency=(1, 4),
    )
    used: dict[str, int] = {}

    def hear(text: str) -> None:
        used[text] = max(control.used_bytes().values(), default=0) // MIB

    rows = measure_latency([candidates["eager"]], {1: feeds(1), 2: feeds(2)}, settings, tmp_path, hear).rows["eager"]
    assert [row.failure for row in rows] == [None, None]
    assert max(used.values()) > 300 + 4 * 32
    assert used["batch 2: warming up eager"] < 300 + 32  # when the callers of batch 1 have ended


def test_variants_share_a_small_card_in_groups(candidates: dict[str, Candidate], card: Card, tmp_path: Path) -> None:
    """A context takes 300 MiB of 1000: three beside the baseline's are too many."""
    control = card(memory_mib=1000, context_mib=300)
    graph = candidates["onnxruntime"]
    several = [candidates["eager"], *(Candidate(name, graph.engine, graph.artifact, CUDA) for name in "abc")]
    settings = LatencySettings(
        block_ms=0.2, time_limit_seconds=0.1, min_rounds=2, launches=1, warmup_limit_seconds=0.01
    )
    rows = measure_latency(several, {4: feeds(4)}, settings, tmp_path, lambda text: None).rows
    assert [(row.failure, row.oom) for (row,) in rows.values()] == [(None, None)] * 4
    assert {name: row.group for name, (row,) in rows.items()} == {"eager": 1, "a": 1, "b": 1, "c": 2}
    assert control.used_bytes() == {}


def test_a_sweep_ends_where_the_card_does(candidates: dict[str, Candidate], card: Card, tmp_path: Path) -> None:
    """The hidden layer takes 1 KiB a row, and the context 300 of 360 MiB."""
    control = card(memory_mib=360, context_mib=300)
    settings = LatencySettings(
        block_ms=0.2, time_limit_seconds=0.05, min_rounds=2, launches=1, warmup_limit_seconds=0.01
    )
    with LatencyBenchmark([candidates["onnxruntime"]], settings, tmp_path, lambda text: None) as benchmark:
        benchmark.measure(16384, feeds(16384))
        benchmark.sweep(feeds, 16384, 1 << 20)
        rows = benchmark.rows("onnxruntime")
    fitting, refused = [row for row in rows if row.p50_ms], [row for row in rows if not row.p50_ms]
    assert all(row.oom and row.oom.asked_bytes for row in refused)
    largest, smallest = fitting[-1].batch, refused[0].batch
    assert 16384 <= largest < smallest <= 65536
    assert control.used_bytes() == {}
