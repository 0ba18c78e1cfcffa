"""Tabulate each section of a run once, for the terminal, Markdown and HTML."""

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace

from enginesmith.pipeline.frameworks.records import format_percent, format_shares
from enginesmith.pipeline.measure import profile
from enginesmith.pipeline.measure.rows import LatencyRow, LimitRow, MemoryRow
from enginesmith.pipeline.report.tables import (
    Number,
    Table,
    best_level,
    describe_data,
    describe_drop,
    describe_pass,
    drop_cell,
    format_drop,
    format_median_interval,
    make_table,
    mark_name,
    number_cell,
    rate,
    size_cell,
    speedup,
    time_cell,
)
from enginesmith.pipeline.results import verdicts
from enginesmith.pipeline.results.explain import list_losses, narrowest_type
from enginesmith.pipeline.results.run import Assignment, Run, VariantRecord
from enginesmith.pipeline.units import format_bytes, format_metric, format_seconds, ms

_MOST_ROWS = 20_000
_NOTHING_DB = 3.0
"""A fall by less is no loss that anyone looks for: the noise's power does not even double."""

# Variants and their latency.


def tabulate_variants(run: Run) -> Table:
    """List each variant and batch size: the baseline, what was measured, and the others.

    Of each variant the batch size that decides comes first.
    """
    records = sorted(run.records, key=lambda record: not record.latency)
    return make_table(
        "variants",
        f"All variants; latency at batch {run.deciding_batch} decides. ★ marks the winner.",
        (row for record in records for row in _variant_rows(run, record)),
        sortable=True,
        grouped=True,
        foldable=True,
        marked=frozenset(f"★ {mark_name(record)}" for record in run.records if record.id == run.winner),
    )


def _variant_rows(run: Run, record: VariantRecord) -> Iterator[dict[str, str]]:
    once = {
        **_deployment(run, record),
        "peak memory": size_cell(record.peak_bytes),
        "size": size_cell(record.artifact.bytes if record.artifact else None),
        "drop [95 %]": format_drop(record.quality),
        "status": _status(record),
    }
    name = f"★ {mark_name(record)}" if record.id == run.winner else mark_name(record)
    heads = ("batch", "speed-up [95 %]", "p50 ms", "p99 ms")
    if not record.latency:
        yield {"variant": name, **dict.fromkeys(heads, "–"), **once}
    rows = sorted(record.latency, key=lambda row: (row.batch != run.deciding_batch, row.batch))
    for index, row in enumerate(rows):
        state = "oom" if row.oom else "not measured" if row.late else "failed" if row.failure else ""
        faster = speedup(record, row.batch)
        if record is run.baseline:
            faster = Number("reference", row.speedup.median if row.speedup else None)
        median = Number(f"~{ms(row.p50_ms)}", row.p50_ms) if row.mostly_disturbed else time_cell(row.p50_ms)
        numbers = (number_cell(row.batch), faster, median, time_cell(row.p99_ms))
        rest = dict.fromkeys(once, "") if index else once
        rest = {**rest, "status": state or rest["status"]}
        yield {"variant": "" if index else name, **dict(zip(heads, numbers, strict=True)), **rest}


def _deployment(run: Run, record: VariantRecord) -> dict[str, str]:
    """Format what a deployment takes of the GPU, and how many fit; nothing for a run that did not measure it."""
    if not any(other.memory and other.memory.deployment_bytes for other in run.records):
        return {}
    size, count = (record.memory.deployment_bytes, record.memory.deployments_per_device) if record.memory else (None, 0)
    cell = Number(f"{format_bytes(size)}, {count} fit", size) if size else size_cell(None)
    return {"on the GPU": cell}


def _status(record: VariantRecord) -> str:
    if record.rejected:
        return "rejected"
    if record.reference:
        return f"{record.status}, for comparison"
    if record.status == "skipped" and (record.untried or record.dropped):
        begun = bool(record.search) or record.late in ("no time to measure", "over share")
        return "dropped" if not record.untried else "not measured" if begun else "not tried"
    if not record.shortfall:
        return record.status
    coverage = record.engine_coverage or record.coverage
    shares = {} if coverage is None else coverage.weights if "weights" in record.precision else coverage.work
    amount = "all" if len(shares) == 1 else "mostly"
    return f"{record.status}, {amount} {next(iter(shares), 'something else')}"


def _place(record: VariantRecord, row: LatencyRow | MemoryRow | LimitRow) -> dict[str, str]:
    return {"variant": mark_name(record), "batch": number_cell(row.batch)}


def _times(row: object, *names: str) -> dict[str, str]:
    """Format the fields of these names, ``p50 ms`` for ``p50_ms``."""
    return {f"{name} ms": time_cell(getattr(row, f"{re.sub('[ .]', '_', name)}_ms")) for name in names}


def _sizes(row: object, *names: str) -> dict[str, str]:
    """Format the fields of these names, ``workspace limit`` for ``workspace_limit_bytes``."""
    heads = {"activation": "activations"}
    return {heads.get(name, name): size_cell(getattr(row, f"{name.replace(' ', '_')}_bytes")) for name in names}


def _list_latency(run: Run) -> Iterator[tuple[VariantRecord, LatencyRow]]:
    return ((record, row) for record in run.records for row in record.latency)


def tabulate_latency(run: Run) -> Table:
    """List the percentiles of single calls for each variant and batch size."""
    caption = f"Latency of one call by variant and batch size; speed-up is paired by round against {run.baseline.id}"
    grouped = any(row.group for record in run.records for row in record.latency)
    rows = (
        {
            **_place(record, row),
            **({"group": number_cell(row.group)} if grouped else {}),
            **_times(row, "p50", "p90", "p95", "p99", "p99.9", "mean"),
            "speed-up [95 %]": speedup(record, row.batch),
            "samples": number_cell(row.n),
            "rounds": number_cell(row.rounds),
            "launches": number_cell(row.launches),
            "disturbed": number_cell(row.disturbed_share, ".1%"),
            **_times(row, "load", "first call"),
            "stopped because": row.failure or row.stopped_because or "–",
        }
        for record, row in _list_latency(run)
    )
    return make_table("latencies", caption, rows, sortable=True)


def tabulate_device_latency(run: Run) -> Table:
    """List the host's clock beside the device's, where there are two."""
    heads = ("host p50 ms", "device p50 ms", "to the device ms", "from the device ms")
    rows = (
        {
            **_place(record, row),
            **dict(zip(heads, map(time_cell, (row.p50_ms, row.device_p50_ms, row.h2d_ms, row.d2h_ms)), strict=True)),
        }
        for record, row in _list_latency(run)
        if row.device_p50_ms is not None
    )
    return make_table("on-device", "The host's clock beside the device's", rows, sortable=True)


def tabulate_sweep(run: Run) -> Table:
    """List median latency and the best throughput of each variant by batch size."""
    rows = (
        {
            **_place(record, row),
            "p50 ms": time_cell(row.p50_ms),
            "95 % interval ms": format_median_interval(row),
            "p99 ms": time_cell(row.p99_ms),
            "samples/s": Number(rate(row.throughput_per_s), row.throughput_per_s),
            "callers": number_cell(best.callers if (best := best_level(row)) else 1),
        }
        for record, row in _list_latency(run)
        if row.p50_ms
    )
    return make_table("by-batch", "Latency and throughput by batch size", rows, sortable=True)


def tabulate_throughput(run: Run) -> Table:
    """List throughput and latency for each number of concurrent callers."""
    rows = []
    for record, row in _list_latency(run):
        for level in row.concurrency:
            notes = ("the knee" if level.callers == row.knee else "", row.sibling_note if level.callers > 1 else "")
            cells = {
                **_place(record, row),
                "callers": number_cell(level.callers),
                "samples/s [95 %]": Number(level.samples_per_s.format(rate), level.samples_per_s.median),
                **_times(level, "p50", "p99"),
                "": "; ".join(filter(None, notes)),
            }
            rows.append(cells)
    return make_table("callers", "Throughput with several callers at the same time", rows, sortable=True)


# Memory, limits of the device, and time by module.


def tabulate_engines(run: Run) -> Table:
    """List the figures that engines report of themselves."""
    rows = (
        {
            "variant": mark_name(record),
            "target": record.target or "–",
            "built in": Number(format_seconds(build.seconds), build.seconds),
            **_sizes(build, "workspace limit", "weights", "activation", "scratch"),
            "kernels": ", ".join(f"{count} {name}" for name, count in (build.layers or {}).items()) or "–",
        }
        for record in run.variants
        if (build := record.build)
    )
    caption = "Figures that engines report, and how long it took to build them"
    return make_table("engines", caption, rows, sortable=True).without_empty_columns()


def tabulate_memory(run: Run) -> Table:
    """List the peak memory of each variant by part."""
    rows = (
        {
            **_place(record, row),
            **_deployment(run, record),
            **_sizes(row, "peak", "weights", "activation"),
            "host": size_cell(row.host_peak_bytes),
            "what": row.failure or "measured",
        }
        for record in run.records
        if (row := record.memory)
    )
    return make_table("memory-by-part", "Peak memory by part", rows, sortable=True)


def tabulate_lenses(run: Run) -> Table:
    """List every number of memory with its source."""
    rows = (
        {
            "variant": mark_name(record),
            "counted by": name.replace("_", " "),
            "bytes": size_cell(lens.bytes),
            "source": lens.source,
            "note": lens.note,
        }
        for record in run.records
        if record.memory
        for name, lens in record.memory.lenses.items()
    )
    return make_table("lenses", "Memory, counted in every way that there is", rows)


def tabulate_limits(run: Run) -> Table:
    """List how far each variant is from what the device can do."""
    rows = (
        {
            **_place(record, row),
            **_times(row, "measured", "floor"),
            "measured/floor": Number(_ratio(row.measured_over_floor, ".3g"), row.measured_over_floor),
            "bound by": row.bound_by,
            "summary": row.summary,
        }
        for record in run.records
        for row in record.limits
    )
    return make_table(
        "distances", "Measured time beside the floor: the least time that the device needs", rows, sortable=True
    )


def _ratio(ratio: float | None, form: str) -> str:
    return "–" if ratio is None else f"{ratio:{form}}×"


def tabulate_profile(run: Run) -> Table:
    """List time by module, the baseline's beside those of all variants."""
    profiles = [entry for record in run.records for entry in record.profile]
    caption = "The slowest modules"
    return Table(
        "modules-side-by-side",
        caption,
        profile.list_columns(profiles) if profiles else (),
        tuple(profile.format_cells(profiles)),
    )


def tabulate_modules(run: Run) -> Table:
    """List each variant's modules beside the baseline's, those that lost time first, at most 20 000 of them."""
    baselines = {entry.batch: entry for entry in run.baseline.profile if entry.total_ms is not None}
    rows = (
        {
            "module": row.module,
            "variant": mark_name(record),
            "ms": ms(row.ms.get(entry.variant)),
            f"{run.baseline.id} ms": ms(row.ms.get(run.baseline.id)),
            f"over {run.baseline.id}": _ratio(row.ratio.get(entry.variant), ".2f"),
            "why": row.why.get(entry.variant, ""),
        }
        for record in winner_first(run)
        for entry in record.profile
        if entry.total_ms is not None and entry.batch in baselines
        for row in profile.join_profiles([baselines[entry.batch], entry])
    )
    return _limit_rows("modules", f"Modules beside those of {run.baseline.id}", rows, run)


def tabulate_operators(run: Run) -> Table:
    """List the operators that do a module's work by variant, the slowest first, at most 20 000 rows."""
    rows = (
        {
            "variant": mark_name(record),
            "module": row.module,
            "operators": ", ".join(f"{count}× {name}" for name, count in row.operators.items()),
            "ms": ms(row.ms),
            "of its total": f"{row.share:.1%}",
            "in": row.precision or "–",
        }
        for record in (run.baseline, *winner_first(run))
        for entry in record.profile
        for row in entry.rows
    )
    return _limit_rows("operators", "Operators by module", rows, run)


def winner_first(run: Run) -> list[VariantRecord]:
    """Order the variants by their importance: the winner, the Pareto front, then as they stand."""
    return sorted(run.variants, key=lambda record: (record.id != run.winner, record.id not in run.pareto))


def _limit_rows(name: str, caption: str, rows: Iterator[dict[str, str]], run: Run) -> Table:
    table = make_table(name, caption, itertools.islice(rows, _MOST_ROWS), searched=True)
    if len(table.rows) < _MOST_ROWS:
        return table
    return replace(table, total=sum(len(entry.rows) for record in run.records for entry in record.profile))


# Precision: what is computed in which, and the search that led there.


def tabulate_coverage(run: Run) -> Table:
    """List what each graph asks for and what each engine runs."""
    rows = []
    for record in run.records:
        for kind, coverage in (("graph", record.coverage), ("engine", record.engine_coverage)):
            if coverage is not None:
                products = coverage.unknown_products
                unknown = f", {products} products of unknown size" if products else ""
                row = {
                    "variant": mark_name(record) if kind == "graph" or record.coverage is None else "",
                    "of": kind,
                    "multiply-adds": format_shares(coverage.macs) + unknown,
                    "weights": format_shares(coverage.weights),
                    "Q/DQ pairs": str(coverage.qdq_pairs),
                    "not fused": str(coverage.unfused),
                    "separate parts": str(coverage.islands),
                    "conversions": str(coverage.conversions),
                    "casts": str(coverage.casts),
                }
                rows.append(row)
    return make_table("coverage", "What each graph asks for, and what each engine runs", rows, grouped=True)


def tabulate_assignment(record: VariantRecord, name: str = "") -> Table:
    """List the precision of each group; those first that are not in the variant's low precision."""
    low = narrowest_type(record.precision)
    total = sum(group.macs or 0 for group in record.assignment)

    def rank(group: Assignment) -> tuple[bool, int, str]:
        return narrowest_type(group.precision) == low, -(group.macs or 0), group.group

    rows = (
        {
            "group": group.group,
            "module": group.module or "–",
            "operator": group.operator,
            "precision": group.precision,
            "SQNR dB": number_cell(group.sqnr_db, ".1f"),
            "multiply-adds": "–" if group.macs is None or not total else format_percent(group.macs / total),
            "why": group.why or "–",
        }
        for group in sorted(record.assignment, key=rank)
    )
    caption = "By group; those first that are not in the variant's low precision, with the reason"
    return make_table(name, caption, rows, searched=True)


def tabulate_group_losses(record: VariantRecord, name: str = "", most: int | None = None) -> Table:
    """List the groups that lose much or stayed in float: why, what was done, and what that costs."""
    rows = (
        {
            "group": loss.group.module or loss.group.group,
            "operator": loss.group.operator,
            "SQNR dB": _format_change(loss.group.given_sqnr_db, loss.group.sqnr_db),
            "cause": loss.group.cause or "–",
            "remedy": loss.remedy,
            "cost": loss.cost,
        }
        for loss in list_losses(record)[:most]
    )
    return make_table(name, f"What loses much in {mark_name(record)}, why, and what was done", rows)


def _format_change(before: float | None, after: float | None) -> str:
    if before is None or after is None or f"{before:.1f}" == f"{after:.1f}":
        return number_cell(before if after is None else after, ".1f")
    return f"{before:.1f} → {after:.1f}"


def summarize_assignment(record: VariantRecord) -> str:
    """Count the groups in low precision in one sentence; empty where there is no assignment."""
    if not record.assignment:
        return ""
    low, total = narrowest_type(record.precision), len(record.assignment)
    count = sum(narrowest_type(group.precision) == low for group in record.assignment)
    return f"{mark_name(record)}: {count} of {total} groups in {low}"


def tabulate_search(record: VariantRecord, name: str, caption: str) -> Table:
    """List the trials that led to the assignment."""
    rows = (
        {
            "trial": str(trial.step),
            "ranges": trial.method or "–",
            "quantized": number_cell(trial.quantized),
            "kept": str(trial.kept),
            "SQNR dB": number_cell(trial.sqnr_db, ".1f"),
            "drop": drop_cell(trial.drop),
            "speed against float": _ratio(trial.speedup, ".2f"),
            "reaches the goal": "yes" if trial.passed else f"no: {trial.reason}" if trial.reason else "no",
            "what": trial.why,
        }
        for trial in record.search
    )
    return make_table(name, caption, rows)


# Accuracy on labeled data, and fidelity: outputs against the baseline's by stage.


def tabulate_quality(run: Run) -> Table:
    """List the metric of each variant that was evaluated on labeled data."""
    rows = (
        {
            "variant": mark_name(record),
            "metric": quality.title,
            "value": format_metric(quality.value),
            run.baseline.id: format_metric(quality.baseline),
            "drop [95 %]": format_drop(quality),
            "samples": str(quality.samples),
        }
        for record in run.records
        if (quality := record.quality)
    )
    others = next((record.quality.other_outputs for record in run.records if record.quality), ())
    caption = f"The metric on {run.recipe.evaluation_data or 'labeled data'}; the drop is paired by sample"
    caption = "; ".join(filter(None, [caption, describe_data(run)]))
    if others:
        caption += f"; not judged: the outputs {', '.join(map(repr, others))} (--metric NAME:OUTPUT)"
    return make_table("quality", caption, rows, sortable=True)


def tabulate_fidelity(run: Run) -> Table:
    """List each comparison with the reference, by variant, stage and shape."""
    rows = (
        {
            "variant": mark_name(record),
            "stage": entry.stage,
            "at": f"{entry.point} (batch {entry.batch})",
            "SQNR dB": number_cell(entry.sqnr_db, ".1f"),
            "cosine": number_cell(entry.cosine, ".6f"),
            "max abs error": number_cell(entry.max_abs_error, ".3g"),
            "argmax agreement": number_cell(entry.argmax_agreement, ".4f"),
            "passed": describe_pass(entry),
        }
        for record in run.variants
        for entry in record.fidelity
    )
    data = run.model.data or "unknown"
    caption = f"Outputs against those of {run.baseline.id} on {data} data, by stage and shape"
    return make_table("compared", caption, rows, searched=True)


def tabulate_losses(run: Run) -> Table:
    """List for each variant the stage at which its outputs fell furthest."""
    rows = (
        {"variant": mark_name(record), **fall, "metric": describe_drop(record.quality) if record.quality else "–"}
        for record in run.variants
        if (fall := _find_fall(record))
    )
    caption = f"Where each variant came furthest from {run.baseline.id}, stage by stage at the worst shape"
    return make_table("lost", caption, rows, sortable=True)


def _find_fall(record: VariantRecord) -> dict[str, str]:
    """Find the stage with the largest fall of the lowest SQNR of all shapes from the stage before it, in dB.

    Stages that change the model on purpose are left out. Empty where no stage has an SQNR.
    """
    if not (lowest := record.lowest_sqnr_db):
        return {}
    fall, stage, before, after = max(record.falls_db, default=(0.0, "", 0.0, 0.0))
    large = fall >= _NOTHING_DB
    return {
        "largest fall at": stage if large else f"none of {_NOTHING_DB:g} dB or more",
        "SQNR dB": f"{before:.1f} → {after:.1f}" if large else "–",
        "lowest SQNR dB": f"{min(lowest.values()):.1f}",
    }


def tabulate_budgets(run: Run) -> Table:
    """List the budgets that the run was judged by."""
    rows = (
        {
            "budget": verdicts.format_title(verdict.budget),
            "limit": verdicts.format_limit(verdict),
            "actual": verdicts.format_value(verdict.budget, verdict.actual),
            "met": "yes" if verdict.passed else "no",
        }
        for verdict in run.verdicts
    )
    return make_table("budgets", "Budgets", rows)
