"""Opening TensorRT engines: memory, weights that are streamed, kernels that are kept, what is refused."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from enginesmith.pipeline.engines.cuda_allocator import WEIGHTS, WORKSPACE, active, counting
from enginesmith.pipeline.engines.tensorrt import loader
from enginesmith.pipeline.engines.tensorrt.build_log import RuntimeLog
from enginesmith.pipeline.engines.tensorrt.loader import ActivationMemory, Opened, _validate_allowed, open_engine
from enginesmith.pipeline.engines.tensorrt.manifest import EngineManifest
from enginesmith.pipeline.engines.tensorrt.options import BuildOptions, SessionOptions
from enginesmith.pipeline.engines.tensorrt.session import TensorRTSession
from enginesmith.pipeline.engines.tensorrt.versions import capabilities
from enginesmith.pipeline.errors import MissingCapability, ModelError, StepOutOfMemory, UsageError
from enginesmith.pipeline.system.device import Device
from fake_tensorrt import SIGNATURE, TRT, Engine, Heap, Logger, replace_cuda

HERE = Device()  # fakes run on the host


@pytest.fixture(autouse=True)
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from replace_cuda(monkeypatch)


@pytest.fixture
def engine() -> Engine:
    return Engine(RuntimeLog())


def test_activation_memory_grows_and_does_not_shrink() -> None:
    held = ActivationMemory("cpu")
    assert (held.bytes, held.address) == (0, 0)
    held.reserve(0)
    assert held.generation == 0
    held.reserve(100)
    first = (held.generation, held.address)
    held.reserve(60)
    assert (held.generation, held.address, held.bytes) == (*first, 100)
    held.reserve(101)
    assert held.bytes == 101
    assert held.generation > first[0]


def test_the_allocator_takes_and_gives_back_torchs_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int, int]] = []
    freed: list[int] = []

    def alloc(size: int, device: int, stream: int) -> int:
        if size > 1000:
            raise torch.OutOfMemoryError("CUDA out of memory")
        taken.append((size, device, stream))
        return 0xABC000

    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", alloc)
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", freed.append)
    found = loader.allocator(TRT, loader.ledger_of(1))
    stream = 0x7F0000000000
    assert found.allocate_async(10, 256, stream, 1) == found.allocate_async(10, 256, 1, stream) == 0xABC000
    assert found.allocate(20, 256, 1) == 0xABC000
    assert taken == [(10, 1, stream), (10, 1, stream), (20, 1, 0)]
    assert found.allocate(0, 256, 0) == 0
    assert found.allocate(5000, 256, 0) == 0
    assert found.deallocate(0xABC000) is True
    assert found.deallocate_async(0, 0) is True
    assert freed == [0xABC000]
    assert found.reallocate(1, 256, 5) == 0


class Streaming:
    """An engine whose budget is set as it is on TensorRT: a value that it does not take leaves the old one."""

    def __init__(self, whole: int, takes: bool = True) -> None:
        self.streamable_weights_size, self._takes, self._budget = whole, takes, whole

    @property
    def weight_streaming_budget_v2(self) -> int:
        return self._budget

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, value: int) -> None:
        self._budget = value if self._takes else self._budget


@pytest.mark.parametrize(("budget", "streams", "held"), [(None, False, 100), (40, True, 40), (1000, False, 100)])
def test_a_streaming_budget_is_set_up_to_what_there_is(budget: int | None, streams: bool, held: int) -> None:
    engine = Streaming(100)
    assert loader._stream_weights(engine, SessionOptions(weight_streaming_budget=budget)) is streams
    assert engine.weight_streaming_budget_v2 == held


@pytest.mark.parametrize(
    ("engine", "options", "message"),
    [
        (Streaming(0), {}, "streams no weights"),
        (Streaming(100, takes=False), {}, "does not take"),
        (Streaming(100), {"cuda_graphs": True}, "CUDA graph"),
    ],
)
def test_streaming_budgets_that_do_not_go(engine: Streaming, options: dict[str, bool], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        loader._stream_weights(engine, SessionOptions(weight_streaming_budget=40, **options))


def opened_from(
    engine: Engine | None, tmp_path: Path, flavour: Any = "tensorrt", says: str = "", **options: Any
) -> Opened:
    """Open a file that the fake runtime takes for ``engine``."""

    class Runtime:
        def __init__(self, logger: Any) -> None:
            self.logger = logger
            self.gpu_allocator = None

        def deserialize_cuda_engine(self, plan: Any) -> Engine | None:
            assert self.gpu_allocator is not None, "weights would not be counted"
            assert bytes(plan) == b"plan"
            if active(0):
                self.gpu_allocator.allocate_async(500, 256, 0x7F0000000000, 0)
            if says:
                self.logger.log(Logger.Severity.ERROR, says)
            return engine

    path = tmp_path / "model.engine"
    path.write_bytes(b"plan")
    manifest = EngineManifest.model_construct(signature=SIGNATURE, options=BuildOptions(), sha256="0" * 64)
    plugins = staticmethod(lambda log, namespace: True)
    trt = type("Trt", (), {**vars(TRT), "Runtime": Runtime, "init_libnvinfer_plugins": plugins})
    return open_engine(trt, path, manifest, capabilities(flavour), HERE, BuildOptions(), SessionOptions(**options))


def test_engine_that_is_not_taken(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.engine, and said: generated on an incompatible device"):
        opened_from(None, tmp_path, says="generated on an incompatible device")
    with pytest.raises(StepOutOfMemory):
        opened_from(None, tmp_path, says="Requested amount of GPU memory (9 bytes) could not be allocated.")


def test_memory_that_tensorrt_asks_for_has_the_tag_of_its_time(engine: Engine, tmp_path: Path) -> None:
    with counting(0, Heap()) as ledger:
        found = opened_from(engine, tmp_path)
        assert ledger.account().by_tag == {WEIGHTS: 500}
        with TensorRTSession(TRT, found, SIGNATURE, HERE, SessionOptions()) as one:
            one.bind({"x": np.ones((2, 4), np.float32)})
            found.allocator.allocate_async(70, 256, 0, 0)
            scratch = engine.contexts[0].temporary_allocator.allocate_async(9, 256, 0, 0)
            assert ledger.account().by_tag[WORKSPACE] == 79
            assert engine.contexts[0].temporary_allocator.deallocate_async(scratch, 0) is True
            assert engine.contexts[0].temporary_allocator.deallocate_async(scratch, 0) is False
        assert (ledger.account().double_frees, ledger.account().unknown_frees) == (1, 0)


def test_inputs_that_no_feeds_can_be(engine: Engine, tmp_path: Path) -> None:
    engine.input_dtype = "HALF"
    with pytest.raises(ModelError, match="'x' is HALF, not float32"):
        opened_from(engine, tmp_path)
    engine.input_dtype, engine.location = "FLOAT", "host"
    with pytest.raises(ModelError, match="decide shapes"):
        opened_from(engine, tmp_path)


def test_streaming_has_scratch(engine: Engine, tmp_path: Path) -> None:
    found = opened_from(engine, tmp_path, weight_streaming_budget=100)
    with TensorRTSession(TRT, found, SIGNATURE, HERE, SessionOptions()) as one:
        one.bind({"x": np.ones((2, 4), np.float32)})
        assert one.activation_memory.bytes == 1000


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ENGINESMITH_STORE", str(tmp_path / "store"))
    return tmp_path / "store" / "kernels"


@pytest.mark.parametrize(
    ("contents", "warm"),
    [((b"one", b"one"), True), ((b"one", b"one and two"), True), ((b"other", b"ours"), False)],
    ids=["the same", "more", "of another device"],
)
def test_compiled_kernels_from_one_run_to_the_next(
    engine: Engine, tmp_path: Path, kernels: Path, contents: tuple[bytes, bytes], warm: bool
) -> None:
    for expected_warm, content in zip((False, warm), contents, strict=True):
        found = opened_from(engine, tmp_path, "tensorrt_rtx")
        assert bool(found.cached_bytes) == expected_warm
        found.users, found.cache.content = 1, content
        found.leave()
        assert [path.read_bytes() for path in kernels.iterdir()] == [content]


def test_kernels_that_cannot_be_kept_are_no_error(engine: Engine, tmp_path: Path, kernels: Path) -> None:
    kernels.parent.mkdir()
    kernels.touch()
    found = opened_from(engine, tmp_path, "tensorrt_rtx")
    found.users, found.cache.content = 1, b"kernels"
    found.leave()
    assert found.engine is None


@pytest.mark.parametrize(("wanted", "strategy"), [(True, "whole"), (False, "off")])
def test_rtx_is_told_at_first(engine: Engine, tmp_path: Path, kernels: Path, wanted: bool, strategy: str) -> None:
    found = opened_from(engine, tmp_path, "tensorrt_rtx", cuda_graphs=wanted)
    assert found.config.cuda_graph_strategy == strategy
    assert found.config.dynamic_shapes_kernel_specialization_strategy == "eager"


def test_one_logger_for_all_runtimes() -> None:
    trt = type("Trt", (), {"ILogger": Logger})
    assert loader._logger(trt) is loader._logger(trt)


def test_host_code_and_plugins_are_the_user_s_to_allow() -> None:
    asked = EngineManifest.model_construct(options=BuildOptions(host_code=True, plugins=("/elsewhere/nms.so",)))
    with pytest.raises(MissingCapability, match="host code"):
        _validate_allowed(asked, BuildOptions(plugins=("nms.so",)))
    with pytest.raises(MissingCapability, match="nms"):
        _validate_allowed(asked, BuildOptions(host_code=True))
    _validate_allowed(asked, BuildOptions(host_code=True, plugins=("here/nms.so",)))
