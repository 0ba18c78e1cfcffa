"""Charts: the run's own numbers, names that are shown as they stand, bounded sizes, and words for what is missing."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.measure.rows import (
    LatencyRow,
    LimitRow,
    MemoryRow,
    Profile,
    ProfileRow,
    StageFidelity,
    Throughput,
    Work,
)
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.passes.finetune.options import Point
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.report.charts import Chart, charts
from enginesmith.pipeline.report.charts.plotly import COLORS, MOST_NAMED, NEUTRAL, Cast, shorten_name
from enginesmith.pipeline.results.run import Assignment, Run, VariantRecord
from runs import PRUNING, RECOVERY, small

IDS = {"pareto", "memory", "latency-by-batch", "throughput-by-batch", "fidelity"}
MARKUP = "<b>net</b><a href='javascript:alert(1)'>x</a>%{x}&lt;$y$"


def around(value: float) -> Interval:
    return Interval(median=value, low=0.95 * value, high=1.07 * value)


def latency(batch: int, ms: float) -> LatencyRow:
    levels = tuple(
        Throughput(
            callers=n, samples_per_s=around(700 * batch * n**0.5 / ms), p50_ms=ms * n, p99_ms=1.3 * ms * n, n=900
        )
        for n in (1, 2, 4)
    )
    rate = max(level.samples_per_s.median for level in levels)
    return LatencyRow(
        batch=batch,
        n=900,
        p50_ms=ms,
        p99_ms=1.3 * ms,
        median_ms=around(ms),
        throughput_per_s=rate,
        concurrency=levels,
        knee=2,
    )


def stages(*sqnr: float) -> tuple[StageFidelity, ...]:
    names = ("export", "simplify", "precision-int8-onnxruntime", "engine")
    return tuple(
        StageFidelity(
            stage=stage,
            point=point,
            batch=1,
            sqnr_db=value + shift,
            cosine=1.0,
            max_abs_error=0.0,
            argmax_agreement=1.0,
            passed=value > 10,
        )
        for stage, value in zip(names, sqnr, strict=False)
        for point, shift in (("min", 3.25), ("opt", 0.0))
    )


def profiled(name: str, ms: float, modules: int) -> Profile:
    rows = tuple(
        ProfileRow(
            module=f"layers.{i}.conv",
            modules=(f"layers.{i}.conv",),
            operators={"Conv": 1},
            calls=1,
            ms=ms / (i + 1),
            share=0.1,
        )
        for i in range(modules)
    )
    return Profile(variant=name, batch=1, device="cpu", calls=10, rows=rows, total_ms=sum(row.ms for row in rows))


def bound(ms: float) -> LimitRow:
    return LimitRow(
        batch=1,
        work=Work(batch=1, flops={}, least_bytes=1),
        measured_ms=ms,
        arithmetic_ms=ms / 4,
        memory_ms=ms / 8,
        launch_ms=None,
        floor_ms=ms / 4,
        measured_over_floor=4.0,
        bound_by="arithmetic",
        summary="4× its floor",
    )


def record(name: str, ms: float, mib: float, drop: float | None, modules: int = 6, **more: Any) -> VariantRecord:
    values: dict[str, Any] = {
        "id": name,
        "engine": "onnxruntime",
        "precision": "int8" if "int8" in name else "fp32",
        "status": "measured",
        "latency": tuple(latency(batch, ms * batch**0.8) for batch in (1, 8, 32)),
        "memory": MemoryRow(
            device="cpu",
            batch=32,
            peak_bytes=int(mib * 2**20),
            weights_bytes=int(mib * 2**19),
            activation_bytes=int(mib * 2**18),
            host_peak_bytes=300 << 20,
        ),
        "quality": None if drop is None else Quality(metric="top1", value=0.9, baseline=0.9, drop=drop, samples=200),
        "fidelity": () if name == "eager" else stages(135.5, 135.5, 34.25 if "int8" in name else 130.0, 33.0),
        "profile": (profiled(name, ms, modules),),
        "limits": (bound(ms),),
    }
    return VariantRecord(**{**values, **more})


def pruned(name: str, ms: float) -> VariantRecord:
    curve = tuple(
        Point(
            step=step,
            loss=None if step == 0 else 2.0 / step,
            metric=1 - 0.5 / (1 + step),
            held_back_loss=None,
            learning_rate=1e-3,
        )
        for step in range(0, 21, 2)
    )
    recovery = RECOVERY.model_copy(update={"teacher": 0.9875, "before": 0.5, "after": 0.976, "curve": curve})
    return record(name, ms, 30, 0.011, prune="macs=-50%", pruning=(PRUNING,), recovery=(recovery,))


def assigned(groups: int) -> tuple[Assignment, ...]:
    return tuple(
        Assignment(
            group=f"/layers/{i}/Conv",
            operator="Conv",
            precision="fp32" if i == 0 else "int8",
            why="lowest SQNR",
            sqnr_db=20.0 + i,
            macs=10,
        )
        for i in range(groups)
    )


def run(*variants: VariantRecord, **changes: Any) -> Run:
    recipe = make({"model": "digits", "batch": [1, 8, 32]})
    return small(
        changes.pop("baseline", record("eager", 2.0, 64, 0.0)),
        *variants,
        **{"recipe": recipe, "winner": None, **changes},
    )


def full() -> Run:
    """Every chart has something to show."""
    budgets = {"max_latency_ms": 1.5, "max_memory_bytes": 50 << 20, "max_p99_ms": 2.0, "min_throughput_per_s": 900}
    int8 = record("onnxruntime-int8", 0.2, 24, 0.004, assignment=assigned(9))
    variants = (record("onnxruntime-fp32", 0.5, 48, 0.0), int8, pruned("onnxruntime-int8-prune-macs50", 0.125))
    return run(
        *variants,
        winner="onnxruntime-int8",
        pareto=tuple(one.id for one in variants),
        recipe=make({"model": "digits", "batch": [1, 8, 32], "budgets": budgets}),
    )


def many() -> Run:
    """200 variants of 30 modules, one of 10 000; several batch sizes and callers."""
    variants = [
        record(f"onnxruntime-int8-workspace-{i}MiB", 0.1 + 0.01 * i, 90 - 0.3 * i, 0.0001 * i, modules=30)
        for i in range(198)
    ]
    large = record("onnxruntime-int8-large", 0.4, 60, 0.01, modules=10_000, assignment=assigned(10_000))
    return run(
        *variants,
        large,
        pruned("onnxruntime-int8-prune-macs50", 0.3),
        winner=large.id,
        pareto=tuple(one.id for one in variants),
    )


def odd() -> Run:
    """Markup and long names; no intervals, tails, memory or parts of it; four decades; negative and unknown drops."""
    bare = LatencyRow(batch=1, n=10, p50_ms=2000.0, throughput_per_s=0.5, reasons={"p99_ms": "too few samples"})
    level = Throughput(callers=2, samples_per_s=around(0.5), p50_ms=2000.0, p99_ms=None, n=10)
    memory = MemoryRow(device="cpu", batch=1, peak_bytes=5 << 20, reasons={"weights_bytes": "not divided"})
    failed = stages(120.0)[0].model_copy(
        update={"passed": False, "sqnr_db": 4.5, "reason": f"output {MARKUP!r} is off"}
    )
    unknown = stages(120.0)[0].model_copy(update={"sqnr_db": None})
    return run(
        record(MARKUP, 0.2, 24, -0.004, assignment=assigned(3)),
        record("x" * 250 + "y" * 250, 0.2, 24, None, memory=memory, fidelity=(failed,)),
        record("bare", 1, 0, None, latency=(bare.model_copy(update={"concurrency": (level,)}),), memory=None),
        record("same", 0.2, 24, 0.0, fidelity=(unknown,), profile=(), limits=()),
        VariantRecord(id="failed", engine="e", precision="int8", status="failed", reason=f"crash in {MARKUP}"),
        winner=MARKUP,
        pareto=(MARKUP,),
    )


def nothing() -> Run:
    """A run in which nothing was measured."""
    reasons = {"latency": "step latency failed", "memory": "--no-memory", "limits": "no --limits", "profile": "no <b>"}
    return run(
        VariantRecord(id="onnxruntime-fp32", engine="onnxruntime", precision="fp32", status="skipped"),
        baseline=VariantRecord(id="eager", engine="eager", precision="fp32", status="failed", reasons=reasons),
    )


RUNS = {"full": full, "odd": odd, "nothing": nothing, "alone": run}


def by_id(of: Run) -> dict[str, Chart]:
    return {chart.id: chart for chart in charts(of)}


def traces(chart: Chart) -> list[dict[str, Any]]:
    assert chart.figure is not None, chart.empty
    found: list[dict[str, Any]] = chart.figure["data"]
    return found


def named(chart: Chart, name: str) -> dict[str, Any]:
    return next(trace for trace in traces(chart) if trace.get("name", "").endswith(name))


def texts(value: object) -> Iterator[str]:
    """Every string in a figure that plotly.js may show."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from texts(inner)


@pytest.mark.parametrize("kind", RUNS)
def test_every_chart_is_drawn_or_says_why_not(kind: str) -> None:
    found = by_id(RUNS[kind]())
    assert found.keys() == IDS
    for chart in found.values():
        assert chart.title
        assert (chart.figure is None) == bool(chart.empty)
        assert (chart.figure is None) or chart.summary.endswith((".", ")"))
        assert not re.search(r"\bNone\b|\bnan\b|\binf\b", chart.summary + chart.empty)
        json.dumps(chart.figure, allow_nan=False)


@pytest.mark.parametrize("kind", ["full", "odd"])
def test_axes_have_titles_and_units(kind: str) -> None:
    for chart in by_id(RUNS[kind]()).values():
        if chart.figure is not None:
            axes = {name: axis for name, axis in chart.figure["layout"].items() if re.match("[xy]axis", name)}
            for name, axis in axes.items():
                if name == "yaxis" and chart.id == "memory":
                    assert chart.figure["layout"]["annotations"]
                else:
                    assert re.search(r"\((ms|MiB|%|dB|samples/s|samples)\)|^stage$", axis["title"]["text"])


def test_numbers_are_the_runs() -> None:
    of = full()
    found, int8 = by_id(of), of.variants[1]
    point = named(found["pareto"], "onnxruntime-int8")
    assert (point["x"], point["y"]) == ([int8.latency[0].p50_ms], [int8.peak_bytes / 2**20])
    assert point["hovertext"] == [
        "onnxruntime-int8<br>p50 0.2 ms, peak 24 MiB, top1 0.9000 (drop +0.0040) on 200 samples<br>on the front, wins"
    ]
    line = named(found["latency-by-batch"], "onnxruntime-int8")
    assert line["x"] == [1, 8, 32]
    assert line["y"] == [row.p50_ms for row in int8.latency]
    rates = named(found["throughput-by-batch"], "onnxruntime-int8")
    assert rates["y"] == [row.throughput_per_s for row in int8.latency]
    after = named(found["fidelity"], "onnxruntime-int8")
    assert after["y"] == [135.5, 135.5, 34.25, 33.0]
    parts = {trace["name"]: trace for trace in traces(found["memory"]) if not trace.get("showlegend", True)}
    assert (parts["weights"]["x"], parts["activations"]["x"]) == ([32, 24, 12, 15], [16, 12, 6, 7.5])


def test_budgets_are_lines() -> None:
    found = by_id(full())
    lines = {
        name: [shape["label"]["text"] for shape in chart.figure["layout"]["shapes"]]
        for name, chart in found.items()
        if chart.figure and chart.figure["layout"].get("shapes")
    }
    assert lines == {
        "pareto": ["budget 1.5 ms", "budget 50 MiB"],
        "memory": ["budget 50 MiB"],
        "throughput-by-batch": ["budget 900 samples/s"],
        "fidelity": ["threshold of fp32: 90 dB", "threshold of int8: 10 dB"],
    }


def test_a_variant_looks_the_same_everywhere() -> None:
    of = full()
    cast = Cast(of)
    for record_ in (of.baseline, *of.variants):
        style = cast.style(record_)
        found = {
            (trace.get("line") or trace["marker"])["color"]
            for chart in by_id(of).values()
            if chart.figure
            for trace in traces(chart)
            if trace.get("name") == style.name
        }
        assert found == {style.color}
    assert cast.style(of.baseline).color == NEUTRAL
    styles = [cast.style(one) for one in of.variants]
    assert len({(one.color, one.symbol) for one in styles}) == len(styles)
    assert [one.winner for one in styles] == [False, True, False]
    assert styles[1].line["width"] > styles[0].line["width"]
    assert styles[1].name == "★ onnxruntime-int8"
    assert {one.color for one in styles} <= set(COLORS)


def test_names_are_shown_as_they_stand() -> None:
    allowed = re.compile(r"<br>|%\{hovertext\}|<extra></extra>|&(amp|lt|gt|nbsp|#123|#36);")
    for chart in by_id(odd()).values():
        for text in texts(chart.figure):
            left = allowed.sub("", text)
            assert not re.search(r"[<>]|%\{|\$", left), (chart.id, text)
    names = " ".join(texts([chart.figure for chart in by_id(odd()).values()]))
    assert "&lt;b&gt;net&lt;/b&gt;" in names


def test_long_names_lose_their_middle_in_legends_and_nothing_in_hover_texts() -> None:
    name = "x" * 250 + "y" * 250
    assert shorten_name(name) == "x" * 16 + "…" + "y" * 15
    assert shorten_name("short") == "short"
    chart = by_id(odd())["latency-by-batch"]
    line = next(trace for trace in traces(chart) if trace.get("name", "").startswith("xx"))
    assert len(line["name"]) == 32
    assert name in line["hovertext"][0].replace("<br>", "")


def test_a_tiny_drop_has_a_small_marker() -> None:
    found = by_id(run(record("tiny", 1, 24, 2e-6), record("large", 0.5, 30, 0.02)))["pareto"]
    alone = by_id(run(record("tiny", 1, 24, 2e-6)))["pareto"]
    assert named(found, "large")["marker"]["size"] == pytest.approx(28)
    assert named(alone, "tiny")["marker"]["size"] < 9.1


def test_summaries_say_what_is_seen() -> None:
    found = by_id(full())
    assert found["pareto"].summary == (
        "onnxruntime-int8-prune-macs50 has the lowest latency (0.125 ms) at 47 % of eager's peak memory; "
        "on the front: onnxruntime-int8, onnxruntime-int8-prune-macs50; for a smaller drop: onnxruntime-fp32."
    )
    assert found["fidelity"].summary == (
        "onnxruntime-int8 loses most at precision-int8-onnxruntime, from 135.5 dB to 34.2 dB; every stage passed."
    )
    assert (
        "onnxruntime-int8-prune-macs50 answers most, 22400 samples/s at batch 32"
        in found["throughput-by-batch"].summary
    )
    assert found["memory"].summary.endswith("3 of 4 meet the budget of 50 MiB.")


def test_what_is_wrong_is_not_drawn_as_fast() -> None:
    wrong = record("wrong", 0.01, 1, 0.0).model_copy(update={"status": "failed"})
    found = by_id(run(record("right", 0.5, 24, 0.0), wrong))
    assert found["pareto"].summary.startswith("right has the lowest latency (0.5")
    for kind in ("pareto", "memory", "latency-by-batch", "throughput-by-batch"):
        assert "right" in json.dumps(traces(found[kind])), kind
        assert "wrong" not in json.dumps(traces(found[kind])), kind


def test_noise_is_said_and_not_drawn_as_an_interval() -> None:
    wild = Interval(median=1.0, low=0.01, high=500)
    noisy = latency(1, 1.0)
    level = noisy.concurrency[0].model_copy(update={"samples_per_s": wild})
    rows = (noisy.model_copy(update={"median_ms": wild, "concurrency": (level,)}), latency(8, 2.0))
    found = by_id(run(record("a", 1, 1, None, latency=rows)))
    for name in ("latency-by-batch", "pareto"):
        said = [text for trace in traces(found[name]) for text in texts(trace)]
        assert name == "pareto" or any("too noisy to tell" in text for text in said)
        bars = [bar for trace in traces(found[name]) for key, bar in trace.items() if key.startswith("error_")]
        assert all(high < 100 for bar in bars for high in bar["array"])


def test_an_interval_beside_its_point_is_said_to_be_without_disturbed_calls() -> None:
    beside = latency(8, 2.0).model_copy(update={"median_ms": Interval(median=1.0, low=0.9, high=1.1)})
    lines = named(by_id(run(record("a", 1, 1, None, latency=(latency(1, 1.0), beside))))["latency-by-batch"], "a")
    first, second = lines["hovertext"]
    assert "without disturbed calls" not in first
    assert "95 % interval (ms) [0.9, 1.1] without disturbed calls" in second.replace("<br>", " ")


def test_what_is_missing_is_told_in_the_runs_own_words() -> None:
    found = by_id(nothing())
    assert all(chart.figure is None for chart in found.values())
    assert "step latency failed" in found["pareto"].empty
    assert "--no-memory" in found["memory"].empty


def test_one_batch_size_makes_no_sweep() -> None:
    single = record("a", 1, 1, None, latency=(latency(1, 0.5),))
    chart = by_id(run(single, baseline=record("eager", 1, 1, None, latency=(latency(1, 1.0),))))["latency-by-batch"]
    assert chart.figure is None
    assert chart.empty == "Only batch 1 was measured: --batch 1,8,32 or --batch sweep measures more."


def test_four_decades_take_a_logarithmic_axis_and_equal_values_do_not() -> None:
    def layout(of: Run) -> dict[str, Any]:
        figure = by_id(of)["pareto"].figure
        found: dict[str, Any] = figure["layout"]["xaxis"]
        return found

    wide = run(record("a", 0.02, 5, None), record("b", 200, 5, None))
    assert layout(wide)["type"] == "log"
    assert "type" not in layout(run(record("a", 2.0, 5, None), record("b", 2.0, 5, None)))


def test_stages_that_change_the_model_are_no_loss() -> None:
    cut = stages(120.0)[0].model_copy(update={"stage": "prune", "sqnr_db": 3.0, "reason": "changed on purpose"})
    chart = by_id(run(record("p", 1, 5, None, fidelity=(cut, *stages(120.0, 119.0)))))["fidelity"]
    line, marker = (trace for trace in traces(chart) if trace["name"] == "p")
    assert line["y"] == [120.0, 119.0]
    assert (marker["mode"], marker["y"]) == ("markers", [3.0])
    assert "simplify, from 120.0 dB to 119.0 dB" in chart.summary


@pytest.mark.thorough
def test_200_variants_stay_small_and_readable() -> None:
    of = many()
    found = charts(of)
    size = sum(len(json.dumps([one.figure, one.summary], ensure_ascii=False)) for one in found)
    assert size < 1_500_000
    for chart in (one for one in found if one.figure):
        shown = {trace["name"] for trace in traces(chart) if "name" in trace and trace.get("showlegend", True)}
        assert len(shown) <= MOST_NAMED + 2, chart.id
        assert max(len(list(texts(trace))) for trace in traces(chart)) < 500
    pareto = next(one for one in found if one.id == "pareto")
    assert "189 more are gray" in pareto.summary
    winner = Cast(of).style(of.variants[198])
    assert winner.name in {one.get("name") for one in traces(pareto)}
