"""Configuration of a build, its thread and the timing cache; what the builder says, in TensorRT's own texts."""

import enum
import json
import pickle
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper

from enginesmith.pipeline.artifact import file_digest
from enginesmith.pipeline.engines.base import MemoryFigures
from enginesmith.pipeline.engines.tensorrt import builder as building
from enginesmith.pipeline.engines.tensorrt import builder as timing
from enginesmith.pipeline.engines.tensorrt import parser, versions
from enginesmith.pipeline.engines.tensorrt.build_log import BuildLog, logger
from enginesmith.pipeline.engines.tensorrt.builder import BuilderSettings, build_error
from enginesmith.pipeline.engines.tensorrt.options import BuildOptions
from enginesmith.pipeline.engines.tensorrt.parser import _refusal, _Refused, plain
from enginesmith.pipeline.errors import (
    BuilderFailed,
    BuildError,
    LimitTooSmall,
    MissingCapability,
    UnsupportedGraph,
    UsageError,
)
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.tasks.build import BuildProbe, TrialResult
from fake_tensorrt import Logger

RTX = versions.capabilities("tensorrt_rtx", "1.7.1")
ENTERPRISE = versions.capabilities("tensorrt", "11.4.0")
FLAGS = (
    *("TF32", "SPARSE_WEIGHTS", "WEIGHT_STREAMING", "STRIP_PLAN", "REFIT", "VERSION_COMPATIBLE"),
    *("ERROR_ON_TIMING_CACHE_MISS", "EDITABLE_TIMING_CACHE", "MONITOR_MEMORY"),
)


def names(*words: str) -> Any:
    return enum.Enum("Names", list(words))


TRT = SimpleNamespace(
    __version__="11.4.0",
    MemoryPoolType=names("WORKSPACE", "TACTIC_DRAM", "TACTIC_SHARED_MEMORY"),
    BuilderFlag=names(*FLAGS),
    TilingOptimizationLevel=names("NONE", "FAST", "MODERATE", "FULL"),
    HardwareCompatibilityLevel=names("NONE", "AMPERE_PLUS", "SAME_COMPUTE_CAPABILITY"),
    ProfilingVerbosity=names("DETAILED"),
    ComputeCapability=names("SM75", "SM80", "SM86", "SM89"),
    IProgressMonitor=type("IProgressMonitor", (), {}),
)


class Config:
    """A configuration that keeps limits and flags, but for those that it ``refuses``, as TensorRT's does."""

    def __init__(self, *refuses: str) -> None:
        self.refuses = refuses
        self.limits: dict[str, int] = {}
        self.flags = {"TF32"}
        self.targets: dict[int, str] = {}

    def set_memory_pool_limit(self, pool: Any, limit: int) -> None:
        if pool.name not in self.refuses:
            self.limits[pool.name] = limit

    def get_memory_pool_limit(self, pool: Any) -> int:
        return self.limits.get(pool.name, 1 << 36)

    def set_flag(self, flag: Any) -> None:
        if flag.name not in self.refuses:
            self.flags.add(flag.name)

    def clear_flag(self, flag: Any) -> None:
        self.flags.discard(flag.name)

    def get_flag(self, flag: Any) -> bool:
        return flag.name in self.flags

    def set_compute_capability(self, capability: Any, index: int) -> bool:
        self.targets[index] = capability.name
        return True


def configured(
    config: Config,
    flavour: versions.FlavourName = "tensorrt",
    workspace: int | None = None,
    targets: tuple[str, ...] = (),
    **options: Any,
) -> Any:
    known = RTX if flavour == "tensorrt_rtx" else ENTERPRISE
    building._configure(TRT, config, BuilderSettings(flavour, known, BuildOptions(**options), workspace, targets, ()))
    return config


def test_limits_are_set_where_they_were_asked_for() -> None:
    assert configured(Config()).limits == {}
    found = configured(Config(), workspace=5, tactic_dram=6, tactic_shared_memory=7)
    assert found.limits == {"WORKSPACE": 5, "TACTIC_DRAM": 6, "TACTIC_SHARED_MEMORY": 7}


@pytest.mark.parametrize("pool", ["WORKSPACE", "TACTIC_DRAM", "TACTIC_SHARED_MEMORY"])
def test_a_limit_that_tensorrt_keeps_as_it_was_is_an_error(pool: str) -> None:
    with pytest.raises(UsageError, match=pool):
        configured(Config(pool), workspace=5, tactic_dram=6, tactic_shared_memory=7)


def test_flags_follow_the_options() -> None:
    always = {"MONITOR_MEMORY", "EDITABLE_TIMING_CACHE"}
    assert configured(Config()).flags == {"TF32", *always}
    assert configured(Config(), tf32=False, sparse_weights=True).flags == {"SPARSE_WEIGHTS", *always}
    assert {"REFIT", "STRIP_PLAN"} <= configured(Config(), refit=True, strip_plan=True).flags
    assert "WEIGHT_STREAMING" in configured(Config(), weight_streaming=True).flags


def test_a_flag_that_tensorrt_does_not_take_is_an_error() -> None:
    with pytest.raises(MissingCapability, match="REFIT"):
        configured(Config("REFIT"), refit=True)


def test_levels_follow_the_options() -> None:
    found = configured(
        Config(), optimization_level=4, aux_streams=2, tiling="fast", hardware_compatibility="ampere_plus"
    )
    assert (found.builder_optimization_level, found.max_aux_streams) == (4, 2)
    assert (found.tiling_optimization_level.name, found.hardware_compatibility_level.name) == ("FAST", "AMPERE_PLUS")
    assert found.profiling_verbosity.name == "DETAILED"


def test_what_was_not_asked_for_is_left_to_the_builder() -> None:
    left = {
        "builder_optimization_level",
        "max_aux_streams",
        "tiling_optimization_level",
        "hardware_compatibility_level",
    }
    assert left.isdisjoint(vars(configured(Config())))


def test_every_target_is_declared() -> None:
    found = configured(Config(), "tensorrt_rtx", targets=("sm86", "sm89"))
    assert (found.num_compute_capabilities, found.targets) == (2, {0: "SM86", 1: "SM89"})


def monitor() -> Any:
    return building._monitor(TRT)


def test_a_monitor_knows_the_step_and_goes_on_until_it_is_cancelled() -> None:
    found = monitor()
    found.phase_start("Building engine", None, 6)
    assert found.step_complete("Building engine", 1) is True
    assert found.phase == "Building engine 2 of 6"
    found.cancelled = True
    assert found.step_complete("Building engine", 2) is False
    found.phase_finish("Building engine")
    found.phase_finish("Building engine")


def test_a_build_gives_its_result_and_says_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_HEARTBEAT_SECONDS", 0.01)
    said: list[str] = []

    def work() -> int:
        while len(said) < 3:
            time.sleep(0.001)
        return 7

    assert building._run_on_large_stack(work, monitor(), said.append) == 7
    assert said[0].startswith("parsing, 0 s")


def test_an_error_of_a_build_is_raised_where_it_was_asked_for() -> None:
    def work() -> None:
        raise UsageError("the shapes do not fit")

    with pytest.raises(UsageError, match="do not fit"):
        building._run_on_large_stack(work, monitor(), lambda text: None)


def test_a_build_is_stopped_before_an_interrupt_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "_HEARTBEAT_SECONDS", 0.01)
    found = monitor()
    ended = threading.Event()

    def work() -> None:
        while found.step_complete("Building engine", 0):
            time.sleep(0.001)
        ended.set()

    def interrupt(text: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        building._run_on_large_stack(work, found, interrupt)
    assert ended.is_set()


def test_a_build_has_a_large_stack_and_other_threads_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    before, set_to = threading.stack_size(), list[int]()
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        set_to.append(threading.stack_size())
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)
    building._run_on_large_stack(lambda: None, monitor(), lambda text: None)
    assert set_to[0] >= 256 << 20
    assert threading.stack_size() == before


def test_what_a_builder_takes_is_counted_and_later_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", lambda size, device, stream: 0x1000 * size)
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", done.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: done.append(f"waited for {device}"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    trt, builder = SimpleNamespace(IGpuAsyncAllocator=object), SimpleNamespace()
    ledger = building._ledger(trt, builder, 1)
    for size in (5, 7):
        builder.gpu_allocator.allocate_async(size, 256, 0, 0)
    assert builder.gpu_allocator.deallocate_async(0x5000, 0) is True
    assert done == ["waited for 1", 0x5000, "emptied"]
    built = building.Built(BuildLog(), 0, "", (), device_peak_bytes=ledger.account().peak)
    assert built.figures.build_device_peak_bytes == 12


def test_an_engine_that_is_built_ahead_of_time_needs_no_device() -> None:
    builder = SimpleNamespace()
    assert building._ledger(TRT, builder, None) is None
    assert vars(builder) == {}
    assert building.Built(BuildLog(), 0, "", ()).figures.build_device_peak_bytes is None


class TimingCache:
    def __init__(self, keys: list[str], here: bool = True) -> None:
        self.keys, self.here = keys, here

    def combine(self, other: "TimingCache", ignore_mismatch: bool) -> bool:
        self.keys += [key for key in other.keys if key not in self.keys]
        return self.here or ignore_mismatch

    def queryKeys(self) -> list[str]:  # noqa: N802
        return self.keys

    def serialize(self) -> bytes:
        return b"cache:" + ",".join(self.keys).encode()


class CacheConfig:
    """Reads caches that begin as its own do; others become empty ones. ``here`` is whether they are of this device."""

    def __init__(self, here: bool = True) -> None:
        self.here = here
        self.cache: TimingCache | None = None

    def create_timing_cache(self, data: bytes) -> TimingCache:
        known = data[6:] and data.startswith(b"cache:")
        return TimingCache(data.decode().removeprefix("cache:").split(",") if known else [], self.here or not known)

    def set_timing_cache(self, cache: TimingCache, ignore_mismatch: bool) -> bool:
        self.cache = cache
        return self.here or ignore_mismatch


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "timing" / "sm86.cache"


def stored(file: Path, data: bytes) -> None:
    file.parent.mkdir()
    file.write_bytes(data)


def test_a_timing_cache_is_begun_kept_and_taken_up_again(file: Path) -> None:
    config = CacheConfig()
    cache = timing.attach_timing_cache(TRT, config, file, locked=False, named=True)
    assert config.cache is cache
    cache.keys.append("conv")
    assert timing.save_timing_cache(config, cache, file, False) == file_digest(file)
    assert {path.name for path in file.parent.iterdir()} == {file.name, f".{file.name}.lock"}
    assert timing.attach_timing_cache(TRT, CacheConfig(), file, locked=True, named=False).queryKeys() == ["conv"]


def test_builds_side_by_side_keep_each_others_timings(file: Path) -> None:
    stored(file, b"cache:conv")
    configs = CacheConfig(), CacheConfig()
    caches = [timing.attach_timing_cache(TRT, config, file, locked=False, named=False) for config in configs]
    for name, config, cache in zip(("gemm", "pool"), configs, caches, strict=True):
        cache.keys.append(name)
        timing.save_timing_cache(config, cache, file, False)
    assert file.read_bytes() == b"cache:conv,gemm,pool"


def test_a_timing_cache_that_nobody_named_takes_the_place_of_one_from_elsewhere(file: Path) -> None:
    stored(file, b"cache:conv")
    config = CacheConfig(here=False)
    cache = timing.attach_timing_cache(TRT, config, file, locked=False, named=False)
    cache.keys.append("gemm")
    timing.save_timing_cache(config, cache, file, False)
    assert file.read_bytes() == b"cache:gemm"


def test_a_locked_timing_cache_is_left_as_it_is(file: Path) -> None:
    stored(file, b"cache:conv")
    config = CacheConfig()
    cache = timing.attach_timing_cache(TRT, config, file, locked=True, named=False)
    cache.keys.append("gemm")
    assert timing.save_timing_cache(config, cache, file, True) == file_digest(file)
    assert file.read_bytes() == b"cache:conv"


def test_a_locked_build_needs_a_timing_cache(file: Path) -> None:
    with pytest.raises(UsageError, match="there is none") as caught:
        timing.attach_timing_cache(TRT, CacheConfig(), file, locked=True, named=False)
    assert "without --locked" in caught.value.remedy


@pytest.mark.parametrize(("data", "here"), [(b"something else", True), (b"cache:conv", False)])
def test_a_timing_cache_from_elsewhere_is_refused_and_kept(data: bytes, here: bool, file: Path) -> None:
    stored(file, data)
    with pytest.raises(UsageError, match=r"damaged, or of another device or version of TensorRT 11\.4\.0"):
        timing.attach_timing_cache(TRT, CacheConfig(here), file, locked=False, named=True)
    assert file.read_bytes() == data
    if here:  # one that nobody named is made again
        assert timing.attach_timing_cache(TRT, CacheConfig(), file, locked=False, named=False).queryKeys() == []


def test_a_timing_cache_without_keys_is_not_damaged(file: Path) -> None:
    stored(file, b"cache:")  # of a graph without tunable layers
    timing.attach_timing_cache(TRT, CacheConfig(), file, locked=True, named=False)


class Registry:
    def load_library(self, path: str) -> object | None:
        return object() if path.startswith("/") and path.endswith("good.so") else None


PLUGGED = SimpleNamespace(
    __version__="11.4.0", get_plugin_registry=Registry, init_libnvinfer_plugins=lambda logger, namespace: None
)


@pytest.mark.parametrize(("name", "message"), [("gone.so", "there is no plugin library"), ("bad.so", "is no library")])
def test_plugin_libraries_that_cannot_be_loaded(name: str, message: str, tmp_path: Path) -> None:
    for one in ("good.so", "bad.so"):
        (tmp_path / one).touch()
    with pytest.raises(UsageError, match=message):
        parser.load_plugins(PLUGGED, (str(tmp_path / "good.so"), str(tmp_path / name)), None, ENTERPRISE)


def test_a_plugin_library_in_the_working_folder_needs_only_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "good.so").touch()
    monkeypatch.chdir(tmp_path)
    parser.load_plugins(PLUGGED, ("good.so",), None, ENTERPRISE)  # the loader looks for bare names elsewhere


TWO_PROFILES = """\
Max Scratch Memory: 512 bytes
Total Activation Memory: 512 bytes
Max Scratch Memory: 8224768 bytes
Total Activation Memory: 8224768 bytes
Total Weights Memory: 98560 bytes
"""
TURING = (
    "IBuilder::buildSerializedNetwork: Error Code 1: Myelin ([pass.cpp:337: check_turing_op_compatibility] Cannot "
    "compile operation 'one' for Turing (SM75): FP32 GEMM is not supported. In compileGraph at "
    "/_src/optimizer/myelin/codeGenerator.cpp:2012)"
)
WORKSPACE = (
    "IBuilder::buildSerializedNetwork: Error Code 1: Myelin ([tactic.cpp:1676: enumerate_tactics] Tactic Selection: no "
    "tactics to implement the operation within workspace limit. Consider increase the allowed workspace size if "
    "applicable.; [tactic.cpp:264: run] Error during tactic selection. In compileGraph at "
    "/_src/optimizer/myelin/codeGenerator.cpp:2012)"
)
OUT_OF_MEMORY = (
    "[virtualMemoryBuffer.cpp::resizePhysical::145] Error Code 2: OutOfMemory (Requested size was 57344 bytes.)"
)
NO_IMPLEMENTATION = (
    "Error Code 10: Internal Error (Could not find any implementation for node {ForeignNode[one...two]}.)"
)
SKIPPED = "Skipping tactic 0x0 due to insufficient memory on requested size of 4294967296 detected for tactic 0x1."
NO_DRIVER = "MyelinCheckException: graph_jit.cpp:278: CHECK(status == CUDA_SUCCESS) failed."
CUDA_35 = "catchCudaError: Error Code 1: Cuda Runtime (cudaError 35: CUDA driver version is insufficient)"


def taken(*messages: tuple[str, str]) -> BuildLog:
    log = BuildLog()
    for severity, text in messages:
        log.take(severity, text)
    return log


def infos(text: str) -> BuildLog:
    return taken(*(("INFO", line) for line in text.splitlines()))


def test_of_several_profiles_the_largest_figure_counts() -> None:
    expected = MemoryFigures(weights_bytes=98560, activation_bytes=8224768, scratch_bytes=8224768)
    assert infos(TWO_PROFILES).figures == expected
    assert infos("\n".join(reversed(TWO_PROFILES.splitlines()))).figures == expected


def test_what_the_builder_did_not_say_is_unknown_and_its_own_peak_is_read_in_bytes() -> None:
    assert taken(("INFO", "Compiler backend is used during engine build.")).figures == MemoryFigures()
    line = "[MemUsageStats] Peak memory usage of TRT CPU/GPU memory allocators: CPU 3 MiB, GPU 17 MiB"
    assert infos(line).figures == MemoryFigures(build_device_peak_bytes=17 << 20)


def test_times_and_the_machine_are_left_out_of_the_log() -> None:
    first, second = (
        infos(f"took {ms}ms to assign 1 blocks\nEngine generation completed in {s} seconds.\n[MemUsageStats] CPU {s}")
        for ms, s in (("0.011934", "0.03"), ("1.5", "12"))
    )
    assert first.text == second.text
    assert first.text == "[INFO] took … to assign 1 blocks\n[INFO] Engine generation completed in ….\n"


def test_messages_reach_the_steps_log_as_they_come(capsys: pytest.CaptureFixture[str]) -> None:
    taken(("WARNING", "odd"), ("INFO", "took 1 ms"), ("VERBOSE", "chatter"))
    assert capsys.readouterr().err == "[WARNING] odd\n[INFO] took 1 ms\n"


def test_the_dump_of_layers_is_kept_and_other_chatter_is_not() -> None:
    log = taken(("VERBOSE", "Layers:\nName: a"), ("VERBOSE", "Trying tactic 7"))
    assert (log.layers, log.text) == ("Layers:\nName: a", "")


def test_errors_that_only_say_there_is_no_driver_are_not_taken_for_the_cause() -> None:
    log = taken(("ERROR", CUDA_35), ("INTERNAL_ERROR", NO_DRIVER), ("WARNING", SKIPPED))
    assert (log.errors, log.warnings) == ([NO_DRIVER], [SKIPPED])


def test_a_logger_for_tensorrt_hands_on_the_severity_by_name() -> None:
    log = BuildLog()
    logger(type("Trt", (), {"ILogger": Logger}), log).log(Logger.Severity.ERROR, "broken")
    assert log.errors == ["broken"]
    assert "broken" in log.text


@pytest.fixture
def graph(tmp_path: Path) -> Path:
    """Two products, the first from a module."""
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, 4]) for name in "xy")
    first = helper.make_node("MatMul", ["x", "x"], ["h"], name="one")
    first.metadata_props.add(key=model_file.MODULE_KEY, value="encoder.proj")
    nodes = [first, helper.make_node("MatMul", ["h", "x"], ["y"], name="two")]
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [x], [y])), path)
    return path


def error(graph: Path, errors: Sequence[str], warnings: Sequence[str] = (), workspace: int | None = None) -> BuildError:
    messages = [*(("WARNING", text) for text in warnings), *(("ERROR", text) for text in errors)]
    return build_error(taken(*messages), graph, workspace, "tensorrt_rtx")


def test_what_a_target_lacks_names_the_node_and_its_module(graph: Path) -> None:
    found = error(graph, [TURING])
    assert type(found) is UnsupportedGraph
    assert "MatMul 'one' (of the module 'encoder.proj')" in found.message
    assert "FP32 GEMM is not supported" in found.message
    assert "build --check" in found.remedy


def test_a_trial_does_not_advise_to_try(graph: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes from another process."""
    refused = pickle.loads(pickle.dumps(error(graph, [TURING])))

    def refuse(request: object) -> None:
        raise refused

    monkeypatch.setattr(BuildProbe, "request", lambda *_: None)
    engine = SimpleNamespace(build=refuse)
    BuildProbe.model_construct(engine=engine).run({}, tmp_path, print)
    (found,) = (TrialResult.model_validate(record) for record in json.loads((tmp_path / "records.json").read_text()))
    assert found.remedy == refused.remedy
    assert found.remedy_of_trial == "use another precision for it, or another target"


@pytest.mark.parametrize("said", [[WORKSPACE], [OUT_OF_MEMORY], [OUT_OF_MEMORY, NO_IMPLEMENTATION]])
def test_too_small_a_workspace_is_told_from_what_is_unsupported(said: list[str], graph: Path) -> None:
    found = error(graph, said, workspace=1 << 20)
    assert type(found) is LimitTooSmall
    assert "a workspace of 1 MiB" in found.message
    assert "--workspace sweep" in found.remedy


def test_the_size_that_was_asked_for_is_said(graph: Path) -> None:
    assert "57344 bytes" in error(graph, [OUT_OF_MEMORY], workspace=1 << 20).message
    assert "4294967296 bytes" in error(graph, [NO_IMPLEMENTATION], [SKIPPED]).message


def test_no_implementation_after_skipped_tactics_is_a_lack_of_memory(graph: Path) -> None:
    found = error(graph, [NO_IMPLEMENTATION], [SKIPPED])
    assert type(found) is LimitTooSmall
    assert "ran out of memory" in found.message
    assert "workspace" not in found.message


def test_no_implementation_without_them_is_unsupported(graph: Path) -> None:
    assert type(error(graph, [NO_IMPLEMENTATION])) is UnsupportedGraph


@pytest.mark.parametrize(("said", "words"), [([NO_DRIVER], "CHECK"), ([], "nothing")])
def test_other_failures_are_the_builders_own(said: list[str], words: str, graph: Path) -> None:
    found = error(graph, said)
    assert type(found) is BuilderFailed
    assert words in found.message


def refused(node: int, operator: str, name: str, code: str, text: str) -> _Refused:
    return _Refused(
        SimpleNamespace(
            node=lambda: node,
            node_operator=lambda: operator,
            node_name=lambda: name,
            code=lambda: SimpleNamespace(name=code),
            desc=lambda: text,
        )
    )


@pytest.mark.parametrize(
    ("text", "words", "remedy"),
    [
        (
            'creator && "Plugin not found, are the plugin name, version, and namespace correct?"',
            "does not have this operator",
            "replace the operator",
        ),
        ("NonZero plugin creator version 1 was not found in plugin registry.", "does not have", "replace the operator"),
        ('tensor && "Failed to add input."', "'encoder.proj'): Failed to add input", "inputs and attributes"),
        ("(a || b): Scale coefficients must all be positive", "'encoder.proj'): Scale", "inputs and attributes"),
        ("Assertion failed: shiftIsAllZeros(zeroPoint): Non-zero zero point is not supported.", "not 0", "symmetrical"),
        ("bias_dq: input has type Int32 but must have type FP8, FP4, Int4, Int8, or UInt8.", "int32", "in float"),
        (
            "ElementWiseOperation SUM must have same input types. But they are of types Half and Float.",
            "differ",
            "cast",
        ),
        ("false", "does not have this operator", "replace the operator"),
    ],
)
def test_words_of_the_parser_are_put_in_ours(text: str, words: str, remedy: str, graph: Path) -> None:
    found = _refusal([refused(0, "MatMul", "one", "UNSUPPORTED_NODE", text)], graph)
    assert "MatMul 'one' (of the module 'encoder.proj')" in found.message
    assert words in found.message
    assert remedy in found.remedy


def test_an_operator_of_ones_own_is_a_plugin_s(graph: Path) -> None:
    own = onnx.load(graph)
    own.graph.node[0].domain = "acme"
    onnx.save(own, graph)
    found = _refusal([refused(0, "MatMul", "one", "INVALID_NODE", 'creator && "Plugin not found, are …?"')], graph)
    assert "no importer and no plugin" in found.message
    assert "--plugins FILE.so" in found.remedy


def test_an_error_that_names_a_node_comes_first_and_long_lists_are_cut(graph: Path) -> None:
    errors = [refused(-1, "", "", "INVALID_GRAPH", f"odd {index}") for index in range(6)]
    found = _refusal([*errors, refused(0, "MatMul", "one", "INVALID_NODE", "Non-zero zero point")], graph)
    assert found.message.startswith("TensorRT's parser refuses MatMul 'one'")
    assert found.message.endswith("and 3 more")
    assert "symmetrically" in found.remedy


def test_a_parser_without_a_reason_is_said_to_have_none(graph: Path) -> None:
    assert "without a reason" in _refusal([], graph).message


def test_a_node_is_found_by_its_name_where_its_index_is_anothers(graph: Path) -> None:
    assert "of the module 'encoder.proj'" in _refusal([refused(1, "Conv", "one", "X", "odd")], graph).message
    assert "Conv 'gone'" in _refusal([refused(7, "Conv", "gone", "X", "odd")], graph).message


def test_source_lines_are_no_part_of_a_message() -> None:
    text = "ITensor::getDims: Error Code 4: API Usage Error (add: odd types. In validateTypes at /_src/a/node.cpp:40)"
    assert plain(text) == "ITensor::getDims: (add: odd types"


def test_a_locked_build_fails_where_a_timing_is_missing() -> None:
    assert "ERROR_ON_TIMING_CACHE_MISS" in configured(Config(), locked=True).flags
