"""Limits of the hardware: how rates come about, what a graph's work is, and what the floor says of a measured time."""

import itertools
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.engines.torch.eager import Eager
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.measure import device_rates
from enginesmith.pipeline.measure.device_rates import Probe, repeat_probes
from enginesmith.pipeline.measure.roofline import count_work, floor
from enginesmith.pipeline.measure.rows import DeviceLimits, LatencyRow, Rate, Work
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.results import assemble as assembling
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.measure import CountWork, DeviceRates, read_limits, read_work

MIB = 1 << 20
BOTH = 2


# Repeating


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_rates, "_BURST_SECONDS", 0.0)  # one repetition in each round


def probe(*seconds: float, threads: int = 1, amount: float = 1.0, shared: bool = False) -> Probe:
    """Return a probe whose repetitions take the seconds that are given, the last of them from then on."""
    turns = itertools.chain(seconds, itertools.repeat(seconds[-1]))
    calls = tuple(partial(next, turns) for _ in range(threads))
    return Probe("fp32", calls, amount, "by hand", lambda call: float(str(call())), shared)


def repeat(one: Probe, rounds: list[str] | None = None, deadline: float = 0.0) -> Rate:
    return repeat_probes([one], deadline, (rounds if rounds is not None else []).append)["fp32"]


def test_the_best_round_counts_and_the_median_stands_beside_it() -> None:
    found = repeat(probe(0.5, 0.1, 0.4, amount=2.0))
    assert (found.per_second, found.usual_per_second) == pytest.approx((20.0, 5.0))
    assert (found.spread, found.repetitions, found.how) == (pytest.approx(4.0), 3, "by hand")


def test_rounds_go_on_until_none_is_better_or_time_is_over() -> None:
    falling = [1.0 / number for number in range(1, 9)]
    rounds: list[str] = []
    assert repeat(probe(*falling), rounds, time.monotonic() + 60).per_second == pytest.approx(8.0)
    assert len(rounds) == len(falling) + device_rates._STEADY_ROUNDS
    assert repeat(probe(*falling)).per_second == pytest.approx(3.0)


@pytest.mark.parametrize(("shared", "per_second"), [(False, 2 / 0.1), (True, 2 / 0.2)])
def test_threads_add_up_and_where_they_share_a_limit_their_median_counts(
    monkeypatch: pytest.MonkeyPatch, shared: bool, per_second: float
) -> None:
    monkeypatch.setattr(device_rates, "_repeat", lambda timer, call: [0.1, 0.2, 0.3])
    found = repeat(probe(1.0, threads=BOTH, shared=shared))
    assert (found.per_second, found.how) == (pytest.approx(per_second), "by hand in each of 2 threads")


# Which type a product may be computed in


def rate(per_second: float) -> Rate:
    return Rate(per_second=per_second, usual_per_second=per_second, repetitions=9, how="told")


def device(**more: Any) -> DeviceLimits:
    known: dict[str, Any] = {
        "device": "cpu",
        "copy_bandwidth": rate(10e9),
        "read_bandwidth": rate(20e9),
        "cache_bandwidth": rate(100e9),
        "cache_bytes": 1_000_000,
        "products": {"fp32": rate(100e9), "int8": rate(400e9), "fp16": rate(5e9)},
        "operators": rate(1e6),
        "calls": rate(200e3),
        "seconds": 4.0,
    }
    return DeviceLimits(**(known | more))


@pytest.mark.parametrize(
    ("precision", "name"),
    [("fp32", "fp32"), ("int8", "int8"), ("fp16", "fp32"), ("bf16", "fp32"), ("int4", "int8"), ("tf32", "fp32")],
)
def test_narrow_types_may_be_computed_in_wider_ones(precision: str, name: str) -> None:
    found = device().product(precision)
    assert found[0] == name


def test_no_type_stands_in_for_a_wider_one() -> None:
    assert device().product("fp64") is None
    assert device(products={"int8": rate(1.0)}).product("fp32") is None


# The floor


def work(**more: Any) -> Work:
    return Work(**({"batch": 1, "flops": {"fp32": 1_000_000}, "least_bytes": 0} | more))


def test_bound_by_arithmetic() -> None:
    row = floor(work(flops={"fp32": 100_000_000, "int8": 400_000_000}, least_bytes=1000), device(), 3.0)
    assert row.arithmetic_ms == pytest.approx(2.0)
    assert (row.bound_by, row.floor_ms) == ("arithmetic", row.arithmetic_ms)
    assert row.measured_over_floor == pytest.approx(1.5)
    assert row.summary.startswith("1.5 × its floor of 2 ms; bound by arithmetic: ")
    assert "400 MFLOP in int8 at 400 GFLOP/s" in row.summary
    assert "100 MFLOP in fp32 at 100 GFLOP/s" in row.summary


def test_what_the_caches_hold_does_not_come_from_memory() -> None:
    small = floor(work(least_bytes=1_000_000), device(), 1.0)
    assert small.memory_ms == pytest.approx(0.010)  # through the caches at 100 GB/s
    large = floor(work(least_bytes=41_000_000), device(), 4.0)
    assert large.memory_ms == pytest.approx(2.0)  # 40 MB at 20 GB/s, the faster one of copying and reading
    assert large.bound_by == "memory"


def test_a_result_beyond_the_caches_is_written_and_read() -> None:
    row = floor(work(large_intermediates=(11_000_000, 500_000)), device(), 2.0)
    assert row.memory_ms == pytest.approx(1.0)


def test_bound_by_the_start_of_operators() -> None:
    row = floor(work(launches=500), device(), 1.0)
    assert (row.bound_by, row.launch_ms) == ("launch", pytest.approx(0.5))
    assert "500 operators at 1 µs each" in row.summary
    assert floor(work(launches=1), device(), 1.0).launch_ms == pytest.approx(0.005)  # no call is shorter


def test_the_floor_is_the_largest_and_not_the_sum() -> None:
    row = floor(work(flops={"fp32": 100_000_000}, least_bytes=19_000_000, launches=700), device(), 1.0)
    assert (row.arithmetic_ms, row.memory_ms, row.launch_ms) == pytest.approx((1.0, 0.9, 0.7))
    assert row.floor_ms == pytest.approx(1.0)


def test_a_floor_above_what_was_measured_is_called_wrong() -> None:
    row = floor(work(flops={"fp32": 100_000_000}), device(warnings=("the device was busy",)), 0.5)
    assert row.measured_over_floor == pytest.approx(0.5)
    assert "so the floor is wrong, at least 100 % too high: " in row.summary
    assert "Winograd" in row.summary
    assert "the device was busy" in row.summary


def test_what_is_not_known_is_left_out_with_its_reason() -> None:
    row = floor(work(flops={"fp64": 9, "fp32": 100_000_000}), device(), 2.0)
    assert row.arithmetic_ms == pytest.approx(1.0)
    assert "fp64 are left out" in row.reasons["arithmetic_ms"]
    assert row.launch_ms is None
    assert row.reasons["launch_ms"]


def test_without_knowing_the_caches_memory_bounds_nothing() -> None:
    row = floor(work(least_bytes=1 << 30), device(cache_bytes=None, reasons={"cache_bytes": "not shown"}), 2.0)
    assert row.memory_ms is None
    assert row.reasons["memory_ms"] == "not shown"


def test_a_floor_without_a_measured_time() -> None:
    row = floor(work(), device(), None)
    assert row.floor_ms is not None
    assert row.measured_over_floor is None
    assert row.reasons["measured_over_floor"] == "it was not measured"
    assert row.summary.startswith("its floor is 0.01 ms; bound by arithmetic")


# The work of a graph


def saved(path: Path, nodes: list[onnx.NodeProto], given: Any, made: Any, weights: Any, kind: int = 1) -> Path:
    ends = [
        [
            helper.make_tensor_value_info(name, TensorProto.INT64 if name == "ids" else kind, shape)
            for name, shape in end
        ]
        for end in (given.items(), made.items())
    ]
    stored = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "g", *ends, stored)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


@pytest.fixture
def product(tmp_path: Path) -> Path:
    """``y = relu(x w)`` in another shape: 2 · batch · 16 · 7 operations."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("Unsqueeze", ["r", "axes"], ["y"]),
    ]
    weights = {"w": np.ones((16, 7), np.float32), "axes": np.array([0])}
    return saved(tmp_path / "m.onnx", nodes, {"x": ["batch", 16]}, {"y": [1, "batch", 7]}, weights)


def test_the_work_of_a_product(product: Path) -> None:
    found = count_work(product, {"batch": 4}, 4, executed=True)
    assert (found.batch, found.flops) == (4, {"fp32": 2 * 4 * 16 * 7})
    assert found.least_bytes == 4 * (16 * 7 + 4 * 16 + 4 * 7) + 8
    assert found.launches == 2  # a view starts nothing
    assert found.reasons == {}


def test_a_stand_in_has_no_launches(product: Path) -> None:
    found = count_work(product, {"batch": 4}, 4, executed=False)
    assert found.launches is None
    assert "launches" in found.reasons


@pytest.mark.parametrize(("arithmetic", "bytes_each"), [("tf32", 4), ("fp16", 2), ("bf16", 2)])
def test_products_count_in_what_they_are_computed_in(product: Path, arithmetic: str, bytes_each: int) -> None:
    found = count_work(product, {"batch": 4}, 4, executed=False, arithmetic=arithmetic)
    assert found.flops == {arithmetic: 2 * 4 * 16 * 7}
    assert found.least_bytes == bytes_each * 16 * 7 + 4 * (4 * 16 + 4 * 7) + 8


def test_work_of_branches_is_told_to_be_that_of_both(tmp_path: Path) -> None:
    def branch(name: str) -> onnx.GraphProto:
        made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)]
        return helper.make_graph([helper.make_node("MatMul", ["x", "w"], [name])], name, [], made)

    nodes = [
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Cast", ["sum"], ["chosen"], to=TensorProto.BOOL),
        helper.make_node("If", ["chosen"], ["y"], then_branch=branch("a"), else_branch=branch("b")),
    ]
    weights = {"w": np.ones((16, 7), np.float32)}
    path = saved(tmp_path / "m.onnx", nodes, {"x": ["batch", 16]}, {"y": ["batch", 7]}, weights)
    found = count_work(path, {"batch": 4}, 4, executed=True)
    assert found.flops == {"fp32": 2 * 2 * 4 * 16 * 7}
    assert found.reasons == {"flops": "both branches of If are counted, and one of them runs"}


def test_the_time_beside_a_floor_is_that_of_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float | None] = []
    monkeypatch.setattr(assembling, "read_device_limits", lambda *_: object())
    monkeypatch.setattr(assembling, "artifact_of", lambda *_: object())
    monkeypatch.setattr(assembling, "read_work", lambda _: {1: object()})
    monkeypatch.setattr(assembling, "floor", lambda work, limits, ms: seen.append(ms))
    row = LatencyRow(batch=1, p50_ms=3.0, median_ms=Interval(median=2.0, low=1.9, high=2.1))
    assembling._compare_with_limits(SimpleNamespace(work="work"), None, {}, (row,))  # type: ignore[arg-type]
    assert seen == [3.0]


def test_of_a_table_only_the_rows_that_are_looked_up_count(tmp_path: Path) -> None:
    nodes = [helper.make_node("Gather", ["table", "ids"], ["y"])]
    path = saved(
        tmp_path / "m.onnx", nodes, {"ids": ["batch", 3]}, {"y": ["batch", 3, 8]}, {"table": np.ones((1000, 8), "f4")}
    )
    found = count_work(path, {"batch": 2}, 2, executed=True)
    assert found.flops == {}
    assert found.least_bytes == 2 * 3 * 8 + 2 * (2 * 3 * 8 * 4)  # ids, rows, result


def test_large_results_count_only_where_operators_run_one_by_one(tmp_path: Path) -> None:
    nodes = [helper.make_node("Neg", ["x"], ["h"]), helper.make_node("ReduceSum", ["h"], ["y"], keepdims=0)]
    path = saved(tmp_path / "m.onnx", nodes, {"x": ["batch", MIB]}, {"y": []}, {})
    assert count_work(path, {"batch": 3}, 3, executed=True).large_intermediates == (12 * MIB,)
    assert count_work(path, {"batch": 3}, 3, executed=False).large_intermediates == ()
    assert count_work(path, {"batch": 2}, 2, executed=True).large_intermediates == ()


# This machine


def caches(folder: Path, core: int, *rows: tuple[str, str, str, str]) -> None:
    for index, row in enumerate(rows):
        place = folder / f"cpu{core}" / "cache" / f"index{index}"
        place.mkdir(parents=True)
        for name, text in zip(("level", "type", "size", "shared_cpu_list"), row, strict=True):
            (place / name).write_text(f"{text}\n")


def test_each_cache_counts_once(tmp_path: Path) -> None:
    for core in range(3):
        caches(
            tmp_path,
            core,
            ("1", "Data", "32K", str(core)),
            ("2", "Unified", "1024K", str(core)),
            ("3", "Unified", "32M", "0-2"),
        )
    assert device_rates.cpu_cache_bytes(tmp_path, {0, 1}) == 2 * MIB + 32 * MIB
    assert device_rates.cpu_cache_bytes(tmp_path / "nothing", {0, 1}) is None


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make probes of next to no size, and no more rounds than there must be."""
    monkeypatch.setattr(device_rates, "_LEAST_BYTES", {"cpu": 4 * MIB})
    monkeypatch.setattr(device_rates, "_BEYOND_CACHE", 0)
    monkeypatch.setattr(device_rates, "_PIECE", {"cpu": MIB, "cuda": MIB})
    monkeypatch.setattr(device_rates, "_OPERATORS", 3)
    monkeypatch.setattr(device_rates, "_SIDE", {"cpu": 64, "cuda": 64})
    monkeypatch.setattr(device_rates, "_BUDGET_SECONDS", 0.0)


@pytest.mark.usefixtures("small")
def test_all_figures_of_this_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    monkeypatch.setattr(device_rates, "cpu_cache_bytes", lambda *_: 8 * MIB)
    found = device_rates.measure_limits(Device(threads=2))
    assert torch.get_num_threads() == threads
    assert found.products.keys() == {"fp32", "fp16", "bf16", "int8"}
    assert all((found.copy_bandwidth, found.read_bandwidth, found.cache_bandwidth, found.operators, found.calls))
    assert found.reasons.keys() == {"tf32", "fp8"}
    assert found.warnings == () or "the device was busy" in found.warnings[0]
    assert DeviceLimits.model_validate_json(found.model_dump_json()) == found


@pytest.mark.usefixtures("small")
def test_a_figure_that_cannot_be_had_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("no kernel\nwith a trace")

    monkeypatch.setattr(torch, "mm", refuse)
    monkeypatch.setattr(device_rates, "cpu_cache_bytes", lambda *_: None)
    found = device_rates.measure_limits(Device(threads=1))
    assert found.products.keys() == {"int8"}
    assert found.reasons["fp32"] == "RuntimeError: no kernel"
    unknown = "the system does not show what caches there are"
    assert found.reasons["cache_bytes"] == found.reasons["cache_bandwidth"] == unknown


def test_matrices_are_made_smaller_where_a_product_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_rates, "time_by_host", lambda call: call.args[0].shape[0] / 3000)
    monkeypatch.setattr(device_rates, "_SIDE", {"cpu": 512})
    assert device_rates.product_probe(Device(threads=1), "fp32").amount == 2.0 * 128**3


# A CUDA device that is not there


class Event:
    """Records the time of a device that takes a millisecond for each call."""

    def __init__(self, done: list[str], enable_timing: bool) -> None:
        self.done, self.at = done, 0

    def record(self) -> None:
        self.done.append("event")
        self.at = self.done.count("call")

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: "Event") -> float:
        return float(other.at - self.at)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    facts = SimpleNamespace(name="Some GPU", major=8, minor=6, L2_cache_size=8 * MIB, done=[])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (facts.major, facts.minor))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (4 << 30, 8 << 30))
    monkeypatch.setattr(torch.cuda, "Event", partial(Event, facts.done))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: facts.done.append("spin"))
    return facts


def test_a_figure_that_a_gpu_is_too_old_for_has_its_reason(gpu: SimpleNamespace) -> None:
    device = Device(kind="cuda")
    name, cache, free, reasons = device_rates._describe(device)
    assert (name, cache, free) == ("cuda:0, Some GPU", 8 * MIB, 4 << 30)
    assert reasons == {"fp8": "needs compute capability 8.9, and Some GPU has 8.6"}
    always = {*device_rates._FIELDS, "fp32", "fp16", "int8"}
    for version, newer in (((8, 6), {"tf32", "bf16"}), ((7, 5), set()), ((9, 0), {"tf32", "bf16", "fp8"})):
        gpu.major, gpu.minor = version
        reasons = device_rates._describe(device)[3]
        assert reasons.keys() == {"tf32", "bf16", "fp8"} - newer
        assert device_rates._list_probes(device, cache, free, reasons).keys() == always | newer


def test_events_are_around_several_calls_that_are_queued_while_the_device_spins(gpu: SimpleNamespace) -> None:
    assert device_rates.time_by_events(lambda: gpu.done.append("call")) == pytest.approx(0.001)
    assert gpu.done == ["spin", "event", *["call"] * device_rates._QUEUED, "event"]


@pytest.mark.parametrize(
    ("precision", "tf32", "sums"), [("fp32", False, False), ("tf32", True, False), ("fp16", False, True)]
)
def test_settings_are_made_for_the_product_and_given_back(
    gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, precision: str, tf32: bool, sums: bool
) -> None:
    before = SimpleNamespace(allow_tf32=True, allow_fp16_accumulation=True)
    monkeypatch.setattr(torch.backends.cuda, "matmul", before)
    seen: list[SimpleNamespace] = []
    device_rates._time_product(precision, lambda: seen.append(SimpleNamespace(**vars(before))))
    assert seen == [SimpleNamespace(allow_tf32=tf32, allow_fp16_accumulation=sums)] * device_rates._QUEUED
    assert before == SimpleNamespace(allow_tf32=True, allow_fp16_accumulation=True)


def test_kernels_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("kernel"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("wait"))
    found = device_rates.operators_probe(Device(kind="cuda"), 3, "operators")
    found.calls[0]()
    assert done == ["kernel"] * 3 + ["wait"]
    assert found.amount == 3


def test_eight_bit_floats_are_given_by_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(torch, "_scaled_mm", lambda left, right, **how: seen.append((left, right, how)))
    device_rates._multiply("cpu", "float8_e4m3fn", 64)()
    left, right, how = seen[-1]
    assert (left.stride(), right.stride()) == ((64, 1), (1, 64))
    assert {left.dtype, right.dtype} == {torch.float8_e4m3fn}
    assert how["scale_a"].dtype == torch.float32


@pytest.mark.parametrize("figure", ["copy_bandwidth", "read_bandwidth"])
def test_memory_is_gone_through_piece_by_piece(figure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(device_rates, "_PIECE", {"cpu": 4096})
    monkeypatch.setattr(torch.Tensor, "copy_", lambda to, of: seen.append(of.data_ptr()))
    monkeypatch.setattr(torch.Tensor, "sum", lambda one: seen.append(one.data_ptr()))
    probe = device_rates.memory_probe(Device(threads=1), 3 * 4096 - 100, figure)
    assert probe.how.endswith(" the next 0.00390625 MiB of 0.0117188 MiB")
    (call,) = probe.calls
    for _ in range(4):
        call()
    assert len(set(seen)) == 3
    assert seen[0] == seen[3]


@pytest.mark.parametrize(("cache", "free", "mib"), [(50 << 20, 79 << 30, 512), (6 << 20, 4 << 30, 256)])
def test_a_gpu_copies_and_reads_far_more_than_its_cache_holds(cache: int, free: int, mib: int) -> None:
    probes = device_rates._list_probes(Device(kind="cuda"), cache, free, {})
    sizes = [probes[f"{figure}_bandwidth"].args[1] for figure in ("copy", "read", "cache")]
    assert sizes == [mib << 20, mib << 20, min(16 << 20, cache // 4)]


# As tasks


@pytest.mark.usefixtures("small")
def test_the_rates_of_a_device_as_a_task(tmp_path: Path) -> None:
    task = DeviceRates(device=Device())
    effect = task.run({}, tmp_path, lambda text: None)
    record = Artifact(kind="record", path=tmp_path / effect.file, sha256="", bytes=0)
    assert read_limits(record).products["fp32"].per_second > 0
    assert "fp32" in effect.summary
    assert task.exclusive
    assert task.environment_key["machine"]


@pytest.fixture
def inputs(product: Path, tmp_path: Path) -> dict[str, Artifact]:
    signature = model_file.signature(product)
    folder = tmp_path / "reference"
    folder.mkdir()
    sizes = [samples.Case(sizes={"batch": n}, batch=n, measured=n > 1) for n in (1, 2, 3)]
    samples.write(folder, samples.Samples(data="made up", ranges={}, cases=tuple(sizes)))
    reference = Artifact(kind="reference", path=folder / samples.RECORD, sha256="", bytes=0)
    return {
        "model": Artifact(kind="onnx", path=product, sha256="", bytes=0, signature=signature),
        "reference": reference,
    }


def test_the_work_at_each_measured_batch_as_a_task(inputs: dict[str, Artifact], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    task = CountWork(engine=OnnxRuntime(), device=Device(threads=1))
    effect = task.run(inputs, out, lambda text: None)
    found = read_work(Artifact(kind="record", path=out / effect.file, sha256="", bytes=0))
    assert {batch: one.flops for batch, one in found.items()} == {2: {"fp32": 448}, 3: {"fp32": 672}}
    assert found[2].launches == 2
    assert effect.summary.startswith("batch 2: 448 FLOP in fp32, at least ")


def test_an_engine_without_a_graph_has_the_work_of_a_stand_in(inputs: dict[str, Artifact], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    effect = CountWork(engine=Eager(dtype="bfloat16"), device=Device()).run(inputs, out, lambda text: None)
    found = read_work(Artifact(kind="record", path=out / effect.file, sha256="", bytes=0))
    assert found[2].flops == {"bf16": 448}
    assert found[2].launches is None


def test_engines_of_other_kinds_have_other_work() -> None:
    tasks = [CountWork(engine=engine, device=Device()) for engine in (OnnxRuntime(), Eager(), Eager(tf32=True))]
    assert len({str(task.identity) for task in tasks}) == 3
