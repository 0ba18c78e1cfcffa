"""Test what is said of variants: failed or flagged where they are not what they are called, and whether it paid."""

from typing import Any

import pytest

from enginesmith.pipeline.frameworks.records import Coverage
from enginesmith.pipeline.measure.rows import LatencyRow
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.results import explain
from enginesmith.pipeline.results.explain import explain_gain, narrowest_type
from enginesmith.pipeline.results.run import Assignment, BuildRecord, VariantRecord
from enginesmith.pipeline.results.verdicts import judge_precision
from enginesmith.pipeline.system.device import Device

CPU, GPU = Device(), Device(kind="cuda")
ORT, RTX = "onnxruntime", "tensorrt_rtx"


def coverage(macs: dict[str, float], weights: dict[str, float] | None = None, **counts: int) -> Coverage:
    operators = {name: {"MatMul": share} for name, share in macs.items()}
    values = {"products": dict.fromkeys(macs, 10), **counts}
    return Coverage(total_macs=1000, macs=macs, operators=operators, weights=weights or macs, **values)


def record(
    precision: str, engine: str = ORT, speedup: float | None = None, spread: float = 0.01, **more: Any
) -> VariantRecord:
    interval = speedup and Interval(median=speedup, low=speedup * (1 - spread), high=speedup * (1 + spread))
    rows = (LatencyRow(batch=1, p50_ms=10 / speedup, speedup=interval),) if speedup else ()
    values = {"id": f"{engine}-{precision}", "engine": engine, "precision": precision, "status": "measured"}
    return VariantRecord.model_validate({**values, "latency": rows, **more})


@pytest.mark.parametrize(
    ("precision", "low"),
    [
        ("fp32", None),
        ("fp16", "fp16"),
        ("int8", "int8"),
        ("int8-dynamic", "int8"),
        ("int8+fp16", "int8"),
        ("int4-weights", "int4"),
    ],
)
def test_names_promise_their_narrowest_type(precision: str, low: str | None) -> None:
    assert narrowest_type(precision) == low


def test_what_is_covered_is_left_alone() -> None:
    for precision, macs in (("fp32", {"fp32": 1.0}), ("int8", {"int8": 0.6, "fp32": 0.4}), ("fp16", {"fp16": 1.0})):
        given = record(precision, engine_coverage=coverage(macs))
        assert judge_precision(given, CPU) == given
    assert judge_precision(record("int8"), CPU) == record("int8"), "nothing is known of it"


def test_products_of_unknown_size_are_judged_by_their_number() -> None:
    """Such as those of experts, which are given as many rows as the data choose: only the others can be counted."""
    most = coverage({"fp32": 1.0}).model_copy(update={"products": {"int8": 8, "fp32": 2}, "unknown_products": 8})
    assert judge_precision(record("int8", engine_coverage=most), CPU).shortfall == ""
    few = most.model_copy(update={"products": {"int8": 2, "fp32": 8}})
    assert judge_precision(record("int8", engine_coverage=few), CPU).shortfall == (
        "only 20 % of the products, some of unknown size, is computed in int8; the rest is fp32 80 %"
    )


def test_fp16_that_runs_in_fp32_is_failed_in_words() -> None:
    given = record("fp16", coverage=coverage({"fp16": 1.0}), engine_coverage=coverage({"fp32": 1.0}, casts=2))
    found = judge_precision(given, CPU)
    assert (found.status, found.failure) == ("failed", "wrong result")
    given_so = judge_precision(given, CPU, asked=False)
    as_given = f"its name has the precision that the file is in; {found.reason}"
    assert (given_so.status, given_so.shortfall) == ("measured", as_given)
    assert found.reason == (
        "none of the multiply-adds is computed in fp16; the rest is fp32: MatMul 100 %; "
        "ONNX Runtime has no fp16 kernels on the CPU: it computes in fp32 between casts"
    )


def test_pairs_that_are_not_fused_are_told() -> None:
    given = record(
        "int8", coverage=coverage({"int8": 1.0}), engine_coverage=coverage({"fp32": 0.57, "int8": 0.43}, unfused=7)
    )
    assert "of 20 products, 7 not fused with the Q/DQ around" in judge_precision(given, CPU).shortfall


def test_groups_left_out_on_purpose_are_told_with_the_reasons() -> None:
    groups = [
        Assignment(group=f"g{index}", operator="Conv", precision="fp32" if index < 3 else "int8", why=why)
        for index, why in enumerate(["sensitive", "sensitive", "asked for", ""])
    ]
    given = record("int8", coverage=coverage({"fp32": 0.8, "int8": 0.2}), assignment=groups)
    assert judge_precision(given, CPU).shortfall.endswith("3 of 4 groups stay in fp32: sensitive (2), asked for (1)")
    low = [one.model_copy(update={"precision": "int8-dynamic"}) for one in groups[3:]]
    given = record("int8-dynamic", coverage=coverage({"fp32": 0.8, "int8": 0.2}), assignment=[*groups[:3], *low])
    assert "3 of 4 groups stay in fp32" in judge_precision(given, CPU).shortfall


def test_the_engine_counts_more_than_the_graph() -> None:
    given = record("int8", coverage=coverage({"int8": 1.0}), engine_coverage=coverage({"fp32": 1.0}))
    assert judge_precision(given, CPU).status == "failed"
    assert judge_precision(given.model_copy(update={"engine_coverage": None}), CPU).status == "measured"


def test_tensorrt_is_held_against_its_kernels() -> None:
    def built(**layers: int) -> VariantRecord:
        build = BuildRecord(seconds=1, host_peak_bytes=None, engine_bytes=1, layers=layers)
        return record("int8+fp16", RTX, coverage=coverage({"int8": 0.9, "fp16": 0.1}), build=build, status="built")

    assert judge_precision(built(int8=3, fp16=9), GPU).status == "built"
    found = judge_precision(built(fp16=9, fp32=1), GPU)
    assert (found.status, found.reason) == ("failed", "none of its kernels reads int8 (9 fp16, 1 fp32)")


def test_int4_is_a_matter_of_weights() -> None:
    def weights(**shares: float) -> VariantRecord:
        return judge_precision(record("int4-weights", coverage=coverage({"fp32": 1.0}, shares)), CPU)

    assert weights(int4=0.8, fp32=0.2).shortfall == ""
    assert weights(int4=0.3, fp32=0.7).shortfall == "only 30 % of the weights is stored in int4; the rest is fp32 70 %"
    assert weights(int4=0.001, fp32=0.999).shortfall.startswith("less than 1 % of the weights is stored in int4")
    assert weights(fp32=1.0).status == "failed"


def test_a_failure_keeps_its_own_reason() -> None:
    given = record("int8", coverage=coverage({"fp32": 1.0}), status="failed", reason="it crashed")
    assert judge_precision(given, CPU).reason == "it crashed"


def given(where: Device = CPU, **environment: Any) -> tuple[int, Device, dict[str, Any]]:
    return 1, where, {"vector_units": ["avx2"], **environment}


FLOAT = record("fp32", speedup=2.0)


def test_what_pays_is_said_with_the_factor() -> None:
    fast = record("int8", speedup=4.0, engine_coverage=coverage({"int8": 0.97, "fp32": 0.03}))
    assert explain_gain(fast, [FLOAT, fast], *given()) == (
        "int8 pays: 2.00× [1.97, 2.03] the speed of onnxruntime-fp32 at batch 1, "
        "with 97 % of the multiply-adds in int8",
    )


def test_what_does_not_pay_is_said_with_the_evidence() -> None:
    ran = coverage({"int8": 0.6, "fp32": 0.4}, islands=12, conversions=30, casts=4, unfused=5, reorders=3)
    asked = coverage({"int8": 1.0}, reorders=2)
    (said,) = explain_gain(record("int8", speedup=1.5, coverage=asked, engine_coverage=ran), [FLOAT], *given())
    assert said.startswith("int8 does not pay: 0.75× [0.74, 0.76] the speed of onnxruntime-fp32 at batch 1; ")
    for evidence in (
        "60 % of the multiply-adds in int8",
        "int8 runs in 12 separate parts of the graph, with 30 quantizing or dequantizing operators, 4 casts between",
        "types, 1 change of layout;",
        "of 20 products, 5 not fused",
        "no instructions for int8 dot products (VNNI, AMX)",
    ):
        assert evidence in said


def test_an_interval_around_one_claims_neither() -> None:
    (said,) = explain_gain(record("int8", speedup=2.02, spread=0.05), [FLOAT], *given())
    assert said.startswith("int8 is not measurably faster: 1.01× [0.96, 1.06]")
    (said,) = explain_gain(record("int8", speedup=1.98, spread=0.05), [FLOAT], *given())
    assert said.startswith("int8 is not measurably faster: 0.99× [0.94, 1.04]")
    few = record("int8", speedup=3.0)
    few = few.model_copy(update={"latency": (few.latency[0].model_copy(update={"speedup": None}),)})
    waited = LatencyRow(batch=1, p50_ms=5, speedup=Interval(median=2, low=2, high=2), speedup_disturbed=True)
    (said,) = explain_gain(record("int8", latency=(waited,)), [FLOAT], *given())
    assert said.endswith("is too noisy to tell"), "of calls that other programs disturbed"
    assert explain_gain(few, [FLOAT], *given()) == (
        "too few rounds to tell whether int8 pays against onnxruntime-fp32 at batch 1",
    )


def test_it_is_compared_with_the_best_float_variant_of_the_same_engine() -> None:
    int8 = record("int8", speedup=3.0)
    half = record("fp16", speedup=2.5)
    others = [FLOAT, record("fp32", RTX, speedup=9.0), record("int8-dynamic", speedup=8.0)]
    assert "of onnxruntime-fp16 at" in explain_gain(int8, [*others, half], *given())[0]
    not_fp16 = half.model_copy(update={"shortfall": "it is fp32"})
    assert "of onnxruntime-fp32 at" in explain_gain(int8, [*others, not_fp16], *given())[0]
    assert "of onnxruntime-fp32 at" in explain_gain(half, [*others, int8, half], *given())[0]
    pruned = half.model_copy(update={"prune": "macs=-50%"})
    assert "of onnxruntime-fp32 at" in explain_gain(int8, [*others, pruned], *given())[0]
    assert explain_gain(int8, [others[1]], *given()) == ()
    assert explain_gain(FLOAT, others, *given()) == ()
    assert explain_gain(int8.model_copy(update={"status": "failed"}), others, *given()) == ()


@pytest.mark.parametrize(
    ("low", "where", "environment", "words"),
    [
        ("int8", CPU, {"vector_units": ["avx512_vnni", "fma"]}, "instructions for int8 dot products (avx512_vnni)"),
        ("int8", CPU, {}, ""),
        ("fp16", CPU, {"vector_units": ["avx2"]}, ""),
        ("fp8", GPU, {"gpus": [{"name": "A10", "compute_capability": "8.6"}]}, "matrix units for fp8 begin with 8.9"),
        ("int8", GPU, {"gpus": [{"name": "A10", "compute_capability": "8.6"}]}, "with it matrix units for int8"),
        ("int8", GPU, {"gpus": [{"name": "A10", "compute_capability": "[N/A]"}]}, ""),
        ("int8", GPU, {"gpus": None}, ""),
    ],
)
def test_hardware_is_told_as_far_as_it_is_known(low: str, where: Device, environment: Any, words: str) -> None:
    found = explain.describe_hardware(low, where, environment)
    assert words in found
    assert bool(words) == bool(found)
