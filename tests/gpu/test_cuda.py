"""Eager in all its forms and ONNX Runtime on CUDA: the same answers as on the CPU, and never silently on the CPU."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from enginesmith import Settings, optimize
from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.engines.base import Engine, Session
from enginesmith.pipeline.engines.torch.eager import Compiled, Eager
from enginesmith.pipeline.errors import ModelError, UsageError
from enginesmith.pipeline.frameworks.fidelity import compare, thresholds_for
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.frameworks.torch import module
from enginesmith.pipeline.frameworks.torch import saved as saved_module
from enginesmith.pipeline.measure.latency.timer import serve_session
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.worker import Worker
from enginesmith.pipeline.tensors import Array, Feeds

CUDA = Device(kind="cuda")
Answers = dict[int, dict[str, Array]]
FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, padding=1)
        self.second = nn.Conv2d(64, 64, 3, padding=1)
        self.classes = nn.Linear(64 * 16, 10)

    def forward(self, x):
        y = self.second(self.first(x).relu()).relu()
        return self.classes(nn.functional.adaptive_avg_pool2d(y, 4).flatten(1))

class Waiting(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.scale if x.sum().item() > 0 else x

def build():
    torch.manual_seed(0)
    return Net(), {"x": torch.ones(2, 3, 32, 32)}

def waiting():
    return Waiting(), {"x": torch.ones(2, 3, 32, 32)}
"""


def feeds(batch: int = 4, seed: int = 0) -> Feeds:
    return {"x": np.random.default_rng(seed).standard_normal((batch, 3, 32, 32)).astype(np.float32)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "cuda_net.py").write_text(FACTORY)
    return folder


def saved(folder: Path, factory: str) -> Artifact:
    source, options, out = resolve(f"{folder}/cuda_net.py:{factory}"), module.LoadOptions(), folder / factory
    out.mkdir()
    loaded = module.load(source, options)
    saved_module.save(loaded, source, options, out)
    path = out / saved_module.RECORD
    return Artifact(kind="torch", path=path, sha256="", bytes=0, signature=loaded.signature)


@pytest.fixture(scope="module")
def artifact(folder: Path) -> Artifact:
    return saved(folder, "build")


@pytest.fixture(scope="module")
def expected(artifact: Artifact) -> Answers:
    """Eager's answers on the CPU, by seed."""
    with Eager().load(artifact, Device()) as session:
        return {seed: session.run(feeds(seed=seed)) for seed in range(4)}


@pytest.fixture(autouse=True)
def tf32_as_it_was() -> Iterator[None]:
    yield
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = True


def agrees(engine: Engine, found: dict[str, Array], wanted: dict[str, Array]) -> bool:
    return compare(wanted, found, thresholds_for(engine.arithmetic)).passed


FORMS = [
    Eager(),
    Eager(tf32=True),
    Eager(dtype="float16"),
    Eager(dtype="bfloat16"),
    Eager(cuda_graphs=True),
    Eager(dtype="float16", cuda_graphs=True),
]


def form(engine: Eager) -> str:
    return "-".join([engine.name, *(str(value) for value in engine.model_dump(exclude_defaults=True).values())])


@pytest.mark.parametrize("engine", FORMS, ids=form)
def test_every_form_answers_as_the_cpu_does(engine: Eager, artifact: Artifact, expected: Answers) -> None:
    if not engine.runnable(CUDA).ok:
        pytest.skip(engine.runnable(CUDA).reason)
    with engine.load(artifact, CUDA) as session:
        bounds = {seed: session.bind(feeds(seed=seed)) for seed in (0, 1)}
        for _ in range(5):
            for seed, bound in bounds.items():
                session.enqueue(bound)
                session.synchronize()
                found = session.fetch()
                assert found["output"].dtype == np.float32
                assert agrees(engine, found, expected[seed])


def test_float32_is_float32_and_tf32_is_not(artifact: Artifact, expected: Answers) -> None:
    rounding = Eager(tf32=True)
    if not rounding.runnable(CUDA).ok:
        pytest.skip(rounding.runnable(CUDA).reason)
    with rounding.load(artifact, CUDA) as session:
        rounded = session.run(feeds())
    assert not agrees(Eager(), rounded, expected[0])
    with Eager().load(artifact, CUDA) as session:
        assert agrees(Eager(), session.run(feeds()), expected[0])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{}, {"dtype": "float16"}, {"cuda_graphs": True}], ids=str)
def test_compiled_answers_too(options: dict[str, Any], artifact: Artifact, expected: Answers) -> None:
    engine = Compiled(**options)
    with engine.load(artifact, CUDA) as session:
        for seed in (0, 1, 2, 3):
            assert agrees(engine, session.run(feeds(seed=seed)), expected[seed])


def answers(session: Session, seed: int, together: threading.Barrier) -> list[dict[str, Array]]:
    with session.sibling() as own:
        bound = own.bind(feeds(seed=seed))
        together.wait(60)
        found = []
        for _ in range(50):
            own.enqueue(bound)
            own.synchronize()
            found.append(own.fetch())
        return found


@pytest.mark.parametrize("engine", FORMS, ids=form)
def test_siblings_answer_at_the_same_time(engine: Eager, artifact: Artifact, expected: Answers) -> None:
    if not engine.runnable(CUDA).ok:
        pytest.skip(engine.runnable(CUDA).reason)
    together = threading.Barrier(3)
    with engine.load(artifact, CUDA) as session, ThreadPoolExecutor(3) as threads:
        session.release_idle_memory()
        before = torch.cuda.memory_allocated()
        running = {seed: threads.submit(answers, session, seed, together) for seed in (1, 2, 3)}
        for seed, future in running.items():
            assert all(agrees(engine, found, expected[seed]) for found in future.result(120))
        session.release_idle_memory()  # each stream has a workspace of cuBLAS: 8 or 32 MiB
        assert torch.cuda.memory_allocated() - before < 4 << 20  # the weights are there once


def test_a_session_used_from_another_thread_stays_on_its_stream(artifact: Artifact) -> None:
    with Eager().load(artifact, CUDA) as session, ThreadPoolExecutor(1) as threads:
        bound = session.bind(feeds())

        def stream() -> int:
            session.enqueue(bound)
            return int(torch.cuda.current_stream().cuda_stream)

        assert threads.submit(stream).result(60) == session.cuda_stream


def test_what_no_graph_can_hold_is_said(folder: Path, tmp_path: Path) -> None:
    """In a process of its own: a capture that fails leaves its traces in CUDA."""
    what = (Eager(cuda_graphs=True), saved(folder, "waiting"), CUDA)
    with Worker(serve_session, *what, log=tmp_path / "log") as worker:
        worker.request("load", timeout_seconds=120)
        with pytest.raises(ModelError, match="captured no graph") as caught:
            worker.request("make_ready", feeds(), 1.0, timeout_seconds=120)
    assert "without CUDA graphs" in caught.value.remedy


def test_closing_gives_graphs_and_weights_back(artifact: Artifact) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    session = Eager(cuda_graphs=True).load(artifact, CUDA)
    bound = session.bind(feeds())
    for _ in range(4):
        session.enqueue(bound)
    session.close()
    with pytest.raises(UsageError, match="closed"):
        session.enqueue(bound)
    del bound
    assert torch.cuda.memory_allocated() <= before + (1 << 20)


@pytest.mark.parametrize("model", ["digits", "resnet18"])
def test_the_main_job_runs_on_cuda(model: str, tmp_path: Path) -> None:
    found = engine_class("onnxruntime").available(CUDA)
    if not found.ok:
        pytest.skip(f"ONNX Runtime cannot use CUDA here: {found.reason}")
    recipe = make({"model": model, "device": "cuda", "measure": {"seconds": 3.0}})
    run = optimize(recipe, tmp_path / "run", Settings(store=tmp_path / "store"))
    assert [record.status for record in run.variants] == ["measured"]
    row = run.variants[0].row(1)
    assert row.device_p50_ms is not None
    assert row.h2d_ms is not None
