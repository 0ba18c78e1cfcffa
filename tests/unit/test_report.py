"""Tables, sentences and the terminal: numbers as run.json has them."""

from pathlib import Path
from typing import Any

import pytest

from enginesmith.pipeline.commands import context
from enginesmith.pipeline.errors import NO_TIME, OVER_SHARE, UsageError
from enginesmith.pipeline.measure.prosecution.finding import Excuse, Prosecution
from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.measure.rows import LatencyRow, Profile, StageFidelity, Stop
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.recipe.options import Budgets
from enginesmith.pipeline.report import junit, markdown, run_tables, sentences, tables, terminal
from enginesmith.pipeline.report.html import page
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.results.run import Run, SearchStep, StepRecord, VariantRecord
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.workflows.inspect import inspect
from enginesmith.pipeline.workflows.prosecute import ProsecutionResult
from reported import printed, record, run
from runs import small, variant


def test_the_table_has_the_numbers() -> None:
    rows = run_tables.tabulate_variants(run()).rows
    assert rows[0] == ("eager", "1", "reference", "2", "–", "3 MiB", "–", "+0.0050", "measured")
    assert (rows[1][0], rows[1][2]) == ("★ onnxruntime-fp32", "4.00× [3.90, 4.10]")


@pytest.mark.parametrize(("failure", "status"), [("it hangs", "failed"), (NO_TIME, "not measured")])
def test_a_variant_without_the_batch_that_decides_is_not_shown_as_measured(failure: str, status: str) -> None:
    rows = (LatencyRow(batch=1, failure=failure, late=failure == NO_TIME), LatencyRow(batch=8, p50_ms=1.0))
    shown = run(variants=(variant("onnxruntime-fp32", latency=rows),), winner=None)
    assert [row[-1] for row in run_tables.tabulate_variants(shown).rows] == ["measured", status, ""]


@pytest.mark.parametrize(
    ("changes", "budgets", "code"),
    [
        ({}, {}, 0),
        ({"winner": None}, {}, 1),
        ({"winner": None}, {"max_drop": 0.01}, 3),
        ({"winner": None, "variants": (variant("tensorrt-fp32", status="built"),)}, {"max_drop": 0.01}, 0),
    ],
)
def test_a_run_without_a_winner_is_no_success(
    changes: dict[str, Any], budgets: dict[str, float], code: int, tmp_path: Path
) -> None:
    """Unless an engine is built that another machine measures."""
    recipe = make({"model": "digits", "budgets": budgets}, listed=True)
    ended = run(recipe=recipe, **changes)
    runs.write(ended, tmp_path)
    assert context.show_run(ended, tmp_path, as_json=True) == code


def test_on_a_gpu_what_a_deployment_takes_comes_first() -> None:
    own = {"deployment_bytes": 512 << 20, "device_bytes": 24 << 30, "deployments_per_device": 48}
    taken = record("onnxruntime-fp32", 0.5, 4.0)
    taken = taken.model_copy(update={"memory": taken.memory.model_copy(update=own)})
    table = run_tables.tabulate_variants(shown := run(variants=(taken,)))
    column = table.columns.index("on the GPU")
    assert [row[column : column + 2] for row in table.rows] == [("–", "3 MiB"), ("512 MiB, 48 fit", "3 MiB")]
    assert "on the GPU" in run_tables.tabulate_memory(shown).columns
    assert "a deployment takes 512 MiB of the GPU's 24 GiB, so that 48 fit; peak 3 MiB" in page._describe_memory(shown)


def test_groups_on_a_gpu_are_named() -> None:
    fast = record("onnxruntime-fp32", 0.5, 4.0)
    rows = tuple(row.model_copy(update={"group": 2}) for row in fast.latency)
    shown = run(variants=(fast.model_copy(update={"latency": rows}),))
    said = "at batch 1 the variants do not fit on the GPU together and were measured in groups"
    assert [said in " ".join(sentences.list_footnotes(one)) for one in (shown, run())] == [True, False]
    assert "group" in run_tables.tabulate_latency(shown).columns


@pytest.mark.parametrize(
    ("capability", "rounded", "said"),
    [
        ("8.9", "all", "in no product: onnxruntime-fp32; in convolutions: eager; in all products: tensorrt-fp32"),
        ("8.9", "", "in no product: onnxruntime-fp32, tensorrt-fp32; in convolutions: eager"),
        ("7.5", "all", ""),
    ],
)
def test_what_fp32_is_on_a_gpu_is_said_where_it_differs(capability: str, rounded: str, said: str) -> None:
    names = {"onnxruntime-fp32": "", "tensorrt-fp32": rounded, "tensorrt-fp16": "all"}
    others = tuple(
        record(name, 1.0, 2.0).model_copy(update={"rounds_to_tf32": tf32, "precision": name[-4:], "memory": None})
        for name, tf32 in names.items()
    )
    shown = run(variants=others, environment={"gpus": [{"name": "GPU", "compute_capability": capability}]})
    baseline = shown.baseline.model_copy(update={"rounds_to_tf32": "convolutions", "precision": "fp32", "memory": None})
    shown = shown.model_copy(update={"device": Device(kind="cuda"), "baseline": baseline})
    notes = [note for note in sentences.list_footnotes(shown) if "TF32 (10 bits)" in note]
    assert [note.partition("(10 bits) ")[2] for note in notes] == ([said] if said else [])


@pytest.mark.parametrize(
    ("parts", "drop", "said"),
    [
        (
            {"choice": 40, "judgement": 41},
            0.0,
            "samples of mine.npz: 40 for choice, 41 for judgement; no sample is in two",
        ),
        ({}, 0.0, "the search was judged on the same samples: the drop is optimistic"),
        ({}, None, ""),
    ],
)
def test_the_samples_of_the_search_and_of_the_drop_are_told(
    parts: dict[str, int], drop: float | None, said: str
) -> None:
    trial = SearchStep(step=1, quantized=1, kept=0, drop=drop, passed=True, why="everything")
    searched = record("onnxruntime-fp32", 0.5, 4.0).model_copy(update={"search": (trial,)})
    plain = run(variants=(searched,))
    recipe = plain.recipe.model_copy(update={"data": "mine.npz" if parts else None})
    shown = plain.model_copy(update={"recipe": recipe, "model": plain.model.model_copy(update={"parts": parts})})
    told = " ".join(sentences.list_footnotes(shown)), run_tables.tabulate_quality(shown).caption
    assert [said in text for text in told] == [True, True]
    assert [" samples" in text or "samples of" in text for text in told] == [bool(said)] * 2
    assert Run.model_validate_json(shown.model_dump_json()).model.parts == parts


def test_the_judged_output_and_the_others_are_named() -> None:
    judged = record("onnxruntime-fp32", 0.5, 4.0)
    named = {"output": "category", "other_outputs": ("score",)}
    some = run(variants=(judged.model_copy(update={"quality": judged.quality.model_copy(update=named)}),))
    table = run_tables.tabulate_quality(some.model_copy(update={"baseline": some.variants[0]}))
    assert table.rows[0][1] == "top1 of 'category'"
    assert table.caption.endswith("not judged: the outputs 'score' (--metric NAME:OUTPUT)")
    assert "top1 of 'category' 0.9900 (drop" in sentences.summarize(some)


def test_the_verdict_is_one_sentence() -> None:
    said = sentences.summarize(run())
    assert said == (
        "onnxruntime-fp32 is 4.00× [3.90, 4.10] faster than eager at batch 1, uses 100 % of its peak memory, "
        "top1 0.9900 (drop +0.0050) on 200 samples."
    )
    none = run(winner=None, winner_reason="nothing was measured")
    assert sentences.summarize(none) == "No winner: nothing was measured."
    with pytest.raises(UsageError, match="the run has no variant 'edited'") as error:
        sentences.summarize(run(winner="edited"))
    assert error.value.remedy == "it has eager, onnxruntime-fp32"
    alone = record("onnxruntime-fp32", 0.5, 4.0)
    alone = alone.model_copy(update={"latency": (alone.latency[0].model_copy(update={"speedup": None}),)})
    late = record("eager", 2.0, 1.0).model_copy(update={"latency": (LatencyRow(batch=1, failure="it hangs"),)})
    said = sentences.summarize(run(variants=(alone,), baseline=late))
    assert said.startswith("onnxruntime-fp32 takes 0.5 ms at batch 1 (eager was not measured there), uses 100 %")
    rows = (LatencyRow(batch=1, p50_ms=236.0, n=1, disturbed_share=0.966),)
    late = late.model_copy(update={"latency": rows})
    said = sentences.summarize(run(variants=(alone,), baseline=late))
    assert "at batch 1 (no speed-up is known: other programs disturbed most calls of eager), uses" in said
    rows = (alone.latency[0].model_copy(update={"disturbed_share": 0.6}),)
    said = sentences.summarize(run(variants=(alone.model_copy(update={"latency": rows}),), baseline=late))
    assert "other programs disturbed most calls of onnxruntime-fp32 and eager), uses" in said


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (0.98, 3.9, "has 4.00× [0.98, 3.90] the speed of eager at batch 8 (which may be no difference)"),
        (0.15, 580.88, "onnxruntime-fp32 has a speed-up over eager at batch 8 that is too noisy to tell,"),
        (0.3, 0.9, "has 4.00× [0.30, 0.90] the speed of eager at batch 8,"),
        (3.9, 4.1, "is 4.00× [3.90, 4.10] faster than eager at batch 8,"),
    ],
)
def test_the_verdict_is_of_the_deciding_batch_within_its_interval(low: float, high: float, words: str) -> None:
    fast = record("onnxruntime-fp32", 0.5, 4.0)
    deciding = LatencyRow(batch=8, p50_ms=0.5, speedup=Interval(median=4.0, low=low, high=high))
    eager = record("eager", 2.0, 1.0)
    both = eager.model_copy(update={"latency": (*eager.latency, LatencyRow(batch=8, p50_ms=2.0))})
    one = fast.model_copy(update={"latency": (*fast.latency, deciding)})
    recipe = make({"model": "digits", "batch": [8, 1]})
    assert words in sentences.summarize(run(baseline=both, variants=(one,), recipe=recipe))
    disturbed = deciding.model_copy(update={"speedup_disturbed": True})
    one = fast.model_copy(update={"latency": (disturbed,)})
    said = run(baseline=both, variants=(one,), recipe=recipe)
    assert (
        "has a speed-up over eager at batch 8 that is too noisy to tell (nearly all calls waited for a core),"
        in sentences.summarize(said)
    )
    assert "speed-up of onnxruntime-fp32 at batch 8: too noisy to tell" in next(sentences.describe_noise(said))


@pytest.mark.parametrize(
    ("ends", "words"),
    [
        ((1.7, 1.8, 1.9), "at batch 1, and is 1.80× [1.70, 1.90] faster than compiled-bf16 (the fastest setting of Py"),
        (
            (0.6, 0.9, 1.1),
            "and has 0.90× [0.60, 1.10] the speed of compiled-bf16 (the fastest setting of PyTorch",
        ),
        (
            (0.1, 0.9, 9.0),
            "and has a speed-up over compiled-bf16 (the fastest setting of PyTorch tried) that is",
        ),
        (None, "and was measured in too few rounds to compare it with compiled-bf16"),
    ],
)
def test_the_headline_names_the_best_of_pytorch_too(ends: tuple[float, float, float] | None, words: str) -> None:
    ratio = Interval(low=ends[0], median=ends[1], high=ends[2]) if ends else None
    noisy = ratio is not None and ratio.too_noisy
    best = runs.BestReference(variant="compiled-bf16", batch=1, speedup=ratio, too_noisy=noisy)
    said = sentences.summarize(run(best_reference=best))
    assert words in said
    assert "uses 100 % of eager's peak memory" in said
    assert words.partition("and ")[2] in sentences.summarize(run(best_reference=best, winner="eager"))


@pytest.mark.parametrize(
    ("kind", "layers", "said"),
    [
        ("fp32", {"fp32": 5}, []),
        ("a little fp64", None, []),
        ("fp64", None, ["the model computes in float64, and so do variants called fp32"]),
        (
            "fp64",
            {"fp32": 5},
            [
                "the model computes in float64, and so do variants called fp32, but for openvino-fp32: "
                "the engine computes in float32"
            ],
        ),
    ],
)
def test_what_a_float64_model_is_computed_in_is_told(kind: str, layers: dict[str, int] | None, said: list[str]) -> None:
    share = {"fp32": 0.98, "fp64": 0.02} if kind == "a little fp64" else {kind: 1.0}
    coverage = {"total_macs": 9, "macs": share, "operators": {}, "weights": share, "products": {kind: 1}}
    build = {"seconds": 1.0, "host_peak_bytes": None, "engine_bytes": 9, "layers": layers}
    shown = run(
        variants=(
            variant("onnxruntime-fp32", coverage=coverage, build={**build, "layers": None}),
            variant("openvino-fp32", coverage=coverage, build=build),
            variant("openvino-bf16", precision="bf16", build={**build, "layers": {"bf16": 5}}),
        )
    )
    for lines in (sentences.list_notes(shown), sentences.list_warnings(shown)):
        assert [line for line in lines if "float64" in line] == said


@pytest.mark.parametrize(("shares", "said"), [((None,), ""), ((1.0, None), "of eager"), ((1.0, 0.985), "98.5%")])
def test_outputs_that_are_compared_as_sets_of_rows_are_told(shares: tuple[float | None, ...], said: str) -> None:
    figures: dict[str, Any] = {"sqnr_db": 50.0, "cosine": 1.0, "max_abs_error": 0.0, "argmax_agreement": None}
    compared = [
        StageFidelity(stage="build", point="min", batch=1, passed=True, paired=share, **figures) for share in shares
    ]
    shown = run(variants=(variant("onnxruntime-fp32", fidelity=compared),))
    for lines in (sentences.list_notes(shown), sentences.list_warnings(shown)):
        told = [line for line in lines if "compared as sets" in line]
        assert len(told) == bool(said)
        assert all(said in line for line in told)


def test_a_difference_that_rounding_alone_explains_is_a_warning() -> None:
    figures: dict[str, Any] = {"cosine": 1.0, "max_abs_error": 0.1, "argmax_agreement": None, "passed": True}
    said = "rounding in float32 may change the output 'y' to an SQNR of 60.5 dB: that explains the 64.2 dB after engine"
    explained = StageFidelity(stage="engine", point="min", batch=1, sqnr_db=64.2, rounding_note=said, **figures)
    plain = StageFidelity(stage="engine", point="opt", batch=1, sqnr_db=95.0, **figures)
    assert (tables.describe_pass(explained), tables.describe_pass(plain)) == (f"yes: {said}", "yes")
    loose = plain.model_copy(update={"unverified": {"label": 0.63}})
    assert tables.describe_pass(loose) == "yes, but for what is not verified: 'label' (rounding decides 63 % of it)"
    for fidelity, told in ((explained, True), (plain, False)):
        shown = run(variants=(variant("onnxruntime-fp32", fidelity=[plain, fidelity]),))
        for lines in (sentences.list_notes(shown), sentences.list_warnings(shown)):
            assert any(line.startswith(f"{said} of onnxruntime-fp32") for line in lines) is told


@pytest.mark.parametrize(
    ("guess", "value"), [(0.996, 0.995), (0.996, 0.996), (0.994, 0.995), (None, 0.995), (1.0, 1.0)]
)
def test_a_model_that_is_right_no_more_often_than_one_that_looks_at_nothing_is_a_note(
    guess: float | None, value: float
) -> None:
    quality = Quality(metric="top1", value=value, baseline=value, guess=guess, drop=0.0, samples=200)
    shown = small(record("eager", 2.0, 1.0).model_copy(update={"quality": quality}))
    for lines in (sentences.list_notes(shown), sentences.list_warnings(shown)):
        told = [line for line in lines if "labels may not belong to the samples" in line]
        assert len(told) == (guess == 0.996)
        assert all(line.startswith(f"eager has a top1 of {value:.4f}, and ") and " 0.9960:" in line for line in told)


@pytest.mark.parametrize(
    ("metric", "value", "said"), [("map", 0.0, 1), ("map:boxes", 0.0, 1), ("map", 0.4, 0), ("f1", 0, 0)]
)
def test_a_detector_that_finds_no_box_is_a_note(metric: str, value: float, said: int) -> None:
    quality = Quality(metric=metric, value=value, baseline=value, drop=0.0, samples=200)
    shown = small(record("eager", 2.0, 1.0).model_copy(update={"quality": quality}))
    for lines in (sentences.list_notes(shown), sentences.list_warnings(shown)):
        told = [line for line in lines if "labels and boxes may be in different pixels" in line]
        assert len(told) == said
        assert all(line.startswith(f"eager has a {metric} of 0.0000, as if no answer were right: ") for line in told)


@pytest.mark.parametrize(
    ("metric", "worst", "better", "reason"),
    [
        *(
            (name, 0.0, 0.01, "how classes are numbered")
            for name in ("top1", "top5", "f1", "miou", "auroc", "entity_f1")
        ),
        *((name, 0.0, 0.01, "their order") for name in ("answer_f1", "answer_match", "ndcg")),
        ("exact_match=blank:3", 0.0, 0.01, "another class is CTC's blank"),
        ("cer", 1.0, 0.98, "another class is CTC's blank"),
        ("wer=2,blank:0:y", 1.7, 0.98, "another class is CTC's blank"),
        ("spearman", -1.0, 0.0, "their order"),
    ],
)
def test_a_reference_without_a_right_answer_is_a_note(metric: str, worst: float, better: float, reason: str) -> None:
    for value in (worst, better):
        quality = Quality(metric=metric, value=value, baseline=value, drop=0.0, samples=200)
        shown = small(record("eager", 2.0, 1.0).model_copy(update={"quality": quality}))
        lines = [line for line in sentences.list_warnings(shown) if "as if no answer were right" in line]
        assert len(lines) == (value == worst)
        assert all(reason in line and line.endswith("a budget held on them says little") for line in lines)


def test_of_metrics_without_a_guess_nothing_is_said_of_labels() -> None:
    quality = Quality(metric="own.py:error", value=-0.09, baseline=-0.09, drop=0.0, samples=200)
    shown = small(record("eager", 2.0, 1.0).model_copy(update={"quality": quality}))
    assert not [line for line in sentences.list_warnings(shown) if "labels may not belong" in line]


def test_a_reference_that_failed_is_a_note() -> None:
    """It is no failure in the terminal, in junit.xml and at the exit code."""
    broken = record("compiled-bf16", 1.0, 2.0).model_copy(
        update={"status": "failed", "reason": "verify-compiled-bf16: there is no C compiler", "reference": True}
    )
    shown = run(variants=(*run().variants, broken))
    assert run_tables.tabulate_variants(shown).rows[2][-1] == "failed, for comparison"
    assert sentences.list_reasons(shown) == []
    (note,) = sentences.list_measurement_notes(shown)
    assert note == "not measured for comparison: compiled-bf16: verify-compiled-bf16: there is no C compiler"
    assert note in sentences.list_notes(shown)
    assert "compiled-bf16" not in junit.render(shown)
    assert sentences.list_footnotes(shown)[-1].startswith("compiled-bf16: PyTorch alone, measured for comparison")


def test_a_winner_that_is_not_measurably_faster_is_said_to_be_none() -> None:
    def fast(name: str, ms: float, *ends: float) -> VariantRecord:
        row = LatencyRow(batch=1, p50_ms=ms, speedup=Interval(median=2 / ms, low=ends[0], high=ends[1]))
        return record(name, ms, 2 / ms).model_copy(update={"latency": (row,)})

    tied = run(variants=(fast("fp32", 0.5, 3.5, 4.5), fast("int8", 0.45, 3.9, 5.0)), winner="int8")
    told = "it wins by its higher speed-up, which is not measurably higher than that of fp32"
    assert told in sentences.summarize(tied)
    clear = run(variants=(fast("fp32", 0.5, 3.9, 4.1), fast("int8", 0.1, 19.0, 21.0)), winner="int8")
    assert "it wins by" not in sentences.summarize(clear)

    bare = [each.model_copy(update={"latency": (LatencyRow(batch=1, p50_ms=0.5),)}) for each in tied.variants]
    told = "it wins by its lower median; too few rounds to tell whether it is faster than fp32"
    assert told in sentences.summarize(tied.model_copy(update={"variants": tuple(bare)}))

    def lossy(record: VariantRecord, drop: float) -> VariantRecord:
        quality = Quality(metric="top1", value=0.9 - drop, baseline=0.9, drop=drop, samples=99)
        return record.model_copy(update={"quality": quality})

    careful = run(variants=(lossy(tied.variants[0], 0.0), lossy(tied.variants[1], 0.008)), winner="fp32")
    said = "it wins by its smaller accuracy drop: int8 (top1 drop +0.0080) is not measurably faster"
    assert said in sentences.summarize(careful)
    assert careful.variants[1].quality is not None
    wide = careful.variants[1].quality.model_copy(update={"drop_high": 0.013})
    risky = careful.variants[1].model_copy(update={"quality": wide})
    budgets = careful.recipe.model_copy(update={"budgets": Budgets(max_drop=0.01)})
    safe = careful.model_copy(update={"variants": (careful.variants[0], risky), "recipe": budgets})
    said = "it wins by its accuracy: int8 (top1 drop +0.0080, and up to +0.0130) is 1.11× [0.93, 1.33] as fast, but may"
    assert said in sentences.summarize(safe)
    waited = risky.latency[0].model_copy(
        update={"speedup_disturbed": True, "speedup": Interval(median=9, low=9, high=9)}
    )
    noisy = safe.model_copy(update={"variants": (careful.variants[0], risky.model_copy(update={"latency": (waited,)}))})
    assert "up to +0.0130) may be faster, but may lose more" in sentences.summarize(noisy)
    beyond = (lossy(tied.variants[1], 0.0), lossy(tied.variants[0], 0.1))
    alone = careful.model_copy(update={"variants": beyond, "recipe": budgets, "winner": "int8"})
    assert "it wins by" not in sentences.summarize(alone), "the other one loses more than allowed"
    strict = careful.recipe.model_copy(update={"budgets": Budgets(max_drop=0.005)})
    assert "it wins by" not in sentences.summarize(careful.model_copy(update={"recipe": strict}))


@pytest.mark.parametrize(
    ("stop", "remedy"),
    [
        (
            None,
            "--measure-time 60s --replace on a quiet machine (at the speed of this run, it would take 3 m 40 s) may be",
        ),
        (Stop(cause="time limit", seconds=5), "--measure-time 60s --replace should be enough"),
        (
            Stop(cause="time limit", seconds=18, extension=3),
            "--measure-time 60s --replace on a quiet machine (at the speed of this run, it would take 3 m 18 s) may be",
        ),
        (Stop(cause="precise", precision=0.02), "--measure-time 60s --precision-target 0.0049 --replace on a"),
    ],
)
def test_a_missing_p99_and_a_negative_drop_have_a_footnote(
    stop: Stop | None, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    row = LatencyRow(batch=1, n=90, p50_ms=1.0, stop=stop)
    better = Quality(metric="top1", value=0.9, baseline=0.9, drop=-0.0033, drop_low=-0.01, drop_high=0.002, samples=9)
    few = record("a", 1.0, 1.0).model_copy(update={"latency": (row,), "quality": better})
    p99, judged, drop = sentences.list_footnotes(run(variants=(few,)))
    assert p99.startswith(f"no p99 (–): it needs 662 calls, and there were as few as 90; {remedy}")
    for folder in (Path("run"), None):
        terminal.show_run(run(variants=(few,), winner="a"), folder, as_json=False)
        shown = p99 if folder else p99.replace(" --replace", "")
        assert shown in capsys.readouterr().out, "benchmark keeps no folder, and has no such option"
    assert judged == "drop: from eager's top1 of 0.9900"
    assert drop == "a negative drop is an improvement over the original model"
    assert tables.describe_drop(better) == "top1 0.9000 (drop −0.0033 [−0.0100, +0.0020]) on 9 samples"
    none = better.model_copy(update={"drop": -2e-6, "drop_low": -3e-6, "drop_high": -1e-6})
    assert "(drop +0.0000 [+0.0000, +0.0000])" in tables.describe_drop(none), "no loss has no sign"
    error = none.model_copy(update={"metric": "mse", "value": 2.1e-5, "baseline": 1.9e-5})
    assert "mse 0.000021 (drop −0.0000020 [−0.0000030, −0.0000010])" in tables.describe_drop(error)


def test_noise_is_told_once_with_what_to_do() -> None:
    wide = LatencyRow(batch=1, p50_ms=0.5, disturbed_share=0.9, speedup=Interval(median=2.7, low=0.15, high=581))
    waited = wide.model_copy(update={"speedup": None, "disturbed_share": 0.7})
    several = [record(name, 0.5, 4.0).model_copy(update={"latency": (wide,)}) for name in ("one", "two")]
    slow = record("eager", 2.0, 1.0).model_copy(update={"latency": (waited,)})
    (said,) = sentences.describe_noise(run(baseline=slow, variants=tuple(several), environment={}))
    assert said.startswith("speed-up of one at batch 1, two at batch 1: too noisy to tell; measure on a quiet")
    narrow = wide.model_copy(update={"speedup": Interval(median=7, low=6, high=8), "speedup_disturbed": True})
    for noisy in (wide, narrow):
        assert tables.speedup(slow.model_copy(update={"latency": (noisy,)}), 1) == "too noisy to tell"
        assert noisy.format_speedup() == "too noisy to tell"
    assert narrow.model_copy(update={"speedup_disturbed": False}).format_speedup() == "7.00× [6.00, 8.00]"
    assert waited.format_speedup() == "–"
    (said,) = sentences.describe_noise(run(baseline=slow, variants=(), environment={}))
    assert said.startswith("1 of 1 measurements were disturbed: in up to 70% of their calls")
    assert not list(sentences.describe_noise(run(baseline=slow, variants=())))  # the machine's warning says it


def test_medians_of_disturbed_calls_are_marked_for_eager_as_for_variants() -> None:
    rows = tuple(LatencyRow(batch=batch, p50_ms=54.4, disturbed_share=share) for batch, share in ((1, 0.3), (8, 1.0)))
    both = [record(name, 2.0, 1.0).model_copy(update={"latency": rows}) for name in ("eager", "onnxruntime-fp32")]
    disturbed = run(baseline=both[0], variants=(both[1],))
    table = run_tables.tabulate_variants(disturbed)
    assert [row[table.columns.index("p50 ms")] for row in table.rows] == ["54.4", "~54.4"] * 2
    assert any(note.startswith("p50 with ~: other programs") for note in sentences.list_footnotes(disturbed))
    assert not any("~" in note for note in sentences.list_footnotes(run()))


def test_a_run_that_is_not_complete_says_so_wherever_it_is_read() -> None:
    text = markdown.render(run(winner=None, winner_reason="nothing was measured", complete=False))
    assert "No winner yet: nothing was measured." in text
    assert "- this run is not complete: 0 of 0 steps have ended" in text


def test_the_report_warns_and_says_why_measuring_stopped() -> None:
    text = markdown.render(run())
    assert "- the machine is busy." in text
    assert "Stopped: the time limit of 5 s." in text
    assert "| ★ onnxruntime-fp32 | 1 | 4.00× [3.90, 4.10] |" in text


def test_inputs_that_no_time_was_left_to_try_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    ends: dict[str, Any] = {"status": "skipped", "cached": False, "seconds": None, "effect": NO_TIME, "late": "no time"}
    step = StepRecord(id="any", kind="prosecute", variant="onnxruntime-fp32", **ends)
    told = "inputs beside the samples: no time was left to try any on onnxruntime-fp32; `enginesmith resume`"
    assert told in printed(run(steps=(step,)), capsys)
    assert told not in printed(run(), capsys)
    untried = "; no time was left to try inputs beside the samples on it."
    assert sentences.summarize(run(steps=(step,))).endswith(untried)
    assert untried not in sentences.summarize(run())
    stopped = step.model_copy(update={"effect": OVER_SHARE, "late": "over share"})
    told = "inputs beside the samples: none could be tried in its share of the time on onnxruntime-fp32; `enginesmith"
    assert told in printed(run(steps=(stopped,)), capsys)
    failed = step.model_copy(
        update={"status": "failed", "late": None, "effect": "AxisError: out of bounds\n  in a line below"}
    )
    told = "inputs beside the samples: none could be tried on onnxruntime-fp32: AxisError: out of bounds\n"
    assert told in printed(run(steps=(failed,)), capsys)


def test_samples_do_not_count_among_the_inputs_beside_them(capsys: pytest.CaptureFixture[str]) -> None:
    tried = [Prosecution(seconds=3, attempts=4 + more, walks={"samples": 4, "sizes": more}) for more in (0, 7)]
    names = ("onnxruntime-fp32", "openvino-fp32")
    records = tuple(
        record(name, 2.0, 1.0).model_copy(update={"prosecution": each}) for name, each in zip(names, tried, strict=True)
    )
    told = "inputs beside the samples: 0 to 7 tried on each variant; none found on which one is wrong"
    assert told in printed(run(variants=records), capsys)
    assert "inputs beside the samples: 0 tried on each variant\n" in printed(run(variants=records[:1]), capsys)
    cut = records[0].model_copy(update={"prosecution": tried[0].model_copy(update={"cut": True})})
    told = "inputs beside the samples: with more time, `enginesmith resume` tries more on onnxruntime-fp32\n"
    assert told not in printed(run(variants=records), capsys)
    assert told in printed(run(variants=(cut, *records[1:])), capsys)


def test_inputs_that_were_excused_are_reported_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    excuse = Excuse(walk="values", note="x: all zeros", reason="output 'y' is off; rounding alone moves it by up to 1")
    tried = Prosecution(seconds=3, attempts=4, walks={"samples": 4}, excused=3, excuses=(excuse,) * 3)
    text = (
        "on 3 of 4 inputs, answers differ by more than the threshold, but no further than rounding explains, as on "
        "values (x: all zeros): output 'y' is off; rounding alone moves it by up to 1\n"
    )
    for each, present in ((tried, True), (tried.model_copy(update={"excused": 0, "excuses": ()}), False)):
        records = (record("onnxruntime-fp32", 2.0, 1.0).model_copy(update={"prosecution": each}),)
        assert (f"onnxruntime-fp32: {text}" in printed(run(variants=records), capsys)) is present
        terminal.show_prosecution(ProsecutionResult(subject="a", prosecution=each), as_json=False)
        assert (text in capsys.readouterr().out) is present


@pytest.mark.parametrize("name", ["<script>alert(1)</script>", "a | b", "two\nlines"])
def test_names_cannot_break_out(name: str) -> None:
    failed = record("x", 1.0, 2.0).model_copy(update={"id": name, "status": "failed", "reason": name})
    text = markdown.render(run(variants=(failed,), winner=None))
    assert "<script>" not in text
    table = [line for line in text.splitlines() if line.startswith("|") and "MiB" in line]
    assert len(table) == 2
    bars = len(run_tables.tabulate_variants(run()).columns) + 1
    assert all(line.replace("\\|", "").count("|") == bars for line in table)


def test_a_profile_says_whose_figures_it_has_and_what_it_cost(capsys: pytest.CaptureFixture[str]) -> None:
    common = {"batch": 1, "device": "cpu", "calls": 20}
    told = Profile(**common, variant="eager", source="a profiler", total_ms=2.0, call_ms=3.0, notes=("half of it",))
    lacking = Profile(**common, variant="x", reasons={"total_ms": "there is no profiler"})
    shown = run(
        baseline=record("eager", 2.0, 1.0).model_copy(update={"profile": (told,)}),
        variants=(record("x", 1.0, 2.0).model_copy(update={"profile": (lacking,)}),),
        winner="x",
    )
    lines = (
        "profile of eager at batch 1: by a profiler; 3 ms a call while profiled, 2 ms without: 1.50×; half of it",
        "profile of x at batch 1: there is no profiler",
    )
    said = " ".join(printed(shown, capsys).split())
    assert tuple(sentences.describe_profiles(shown)) == lines
    for line in lines:
        assert line in said


def test_a_tail_far_above_the_median_is_explained_once() -> None:
    def with_p99(ms: float, p99_ms: float, share: float | None = 0.3) -> VariantRecord:
        rows = (
            LatencyRow(batch=batch, p50_ms=ms, p99_ms=tail, disturbed_share=share)
            for batch, tail in ((1, p99_ms), (8, p99_ms / 2))
        )
        return record("eager", ms, 1.0).model_copy(update={"latency": tuple(rows)})

    some = run(baseline=with_p99(1.0, 398.0))
    (note,) = sentences.describe_noise(some)
    start = "p99 of eager at batch 1 is 398 ms beside a p50 of 1 ms (1 more like it)"
    assert note.startswith(f"{start}: 30% of its calls waited while other programs used the cores; ")
    (unknown,) = sentences.describe_noise(run(baseline=with_p99(1.0, 398.0, share=0.0)))
    assert unknown.startswith(f"{start}: the cause is not known; ")
    assert note in sentences.list_measurement_notes(some)
    assert "beside a p50 of 1 ms" in markdown.render(some)
    assert not list(sentences.describe_noise(run(baseline=with_p99(1.0, 19.0))))


def test_at_most_three_notes_follow_a_run_and_noise_comes_first(capsys: pytest.CaptureFixture[str]) -> None:
    wide = LatencyRow(batch=1, p50_ms=0.5, p99_ms=50.0, speedup=Interval(median=2.7, low=0.15, high=581))
    noisy = record("x", 0.5, 4.0).model_copy(update={"latency": (wide,)})
    warned = {"warnings": ["the machine is busy: very", "it is hot", "it is throttled", "it is far away"]}
    shown = run(variants=(noisy,), winner="x", environment=warned, recipe=make({"model": "digits", "batch": [1]}))
    notes = [line for line in printed(shown, capsys).splitlines() if "note:" in line]
    assert len(notes) == 3
    assert notes[0].startswith("note: speed-up of x at batch 1: too noisy to tell; p99 of x at batch 1 is 50 ms")
    assert notes[0].count("measure on a quiet machine") == 1
    assert notes[1] == "note: the machine is busy: very"


def test_facts_that_are_not_known_or_empty_are_said_at_each_level(capsys: pytest.CaptureFixture[str]) -> None:
    terminal.show_facts({"target": None, "notes": [], "options": {}, "figures": {"scratch_bytes": None}}, as_json=False)
    lines = ["target: unknown", "notes: none", "options: none", "figures:", "  scratch_bytes: unknown"]
    assert capsys.readouterr().out.splitlines() == lines


def test_a_run_without_a_winner_is_inspected_line_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = variant("onnxruntime-fp32", status="failed", reason="race: too late\n  → give more: --time")
    runs.write(run(variants=(failed,), winner=None), tmp_path)
    terminal.show_facts(inspect(tmp_path), as_json=False)
    lines = capsys.readouterr().out.splitlines()
    assert "winner: none" in lines
    assert lines[lines.index("variants:") + 1 : lines.index("notes:")] == [
        "  eager: measured",
        "  onnxruntime-fp32: failed race: too late",
    ]


def test_cautions_about_the_run_do_not_make_the_machine_noisy() -> None:
    """Also one about fields of a newer version, which reading adds."""
    told = "the model is not the one that this run was started with"
    environment: dict[str, Any] = {"warnings": [told], "cautions": [told]}
    assert not page._describe_disturbance(run(environment=environment)).startswith("No: ")
    environment["warnings"] = [told, "the machine is busy"]
    assert page._describe_disturbance(run(environment=environment)).startswith("No: the machine is busy")
