"""Render the sections of a run's page: accuracy and compression, provenance, and measurements."""

from collections.abc import Iterable, Iterator, Mapping

from enginesmith.pipeline.recipe import commented
from enginesmith.pipeline.report import gate as gates
from enginesmith.pipeline.report import provenance, run_tables, sentences, training_tables
from enginesmith.pipeline.report.charts.plotly import Chart, why_none
from enginesmith.pipeline.report.html.blocks import (
    Block,
    Code,
    Drawn,
    Fact,
    Facts,
    Folded,
    Points,
    Section,
    Words,
    fold,
    list_points,
    show_rows,
)
from enginesmith.pipeline.report.tables import make_table, mark, mark_name
from enginesmith.pipeline.results.explain import list_losses, narrowest_type
from enginesmith.pipeline.results.gate_report import FleetGate, Gate
from enginesmith.pipeline.results.run import Run, VariantRecord
from enginesmith.pipeline.units import count_words, format_seconds

Drawings = Mapping[str, Drawn | Words]
"""Chart's id → the chart, or the reason why it is empty."""


def draw(charts: Iterable[Chart]) -> Drawings:
    """Make blocks of charts, with a reason in the place of each that is empty."""
    return {
        chart.id: Words(f"{chart.title}: {chart.empty.rstrip('.')}.") if chart.figure is None else Drawn(chart)
        for chart in charts
    }


_NAMED, _MOST_LOSSES = 3, 12
"""Variants that are named where many have the same assignment."""
_CALIBRATION = "calibrate"
"""The step that takes ranges of the model as it came; changed models have others of their own."""


def render_gate(gate: Gate | FleetGate | None) -> list[Section]:
    """List the checks of a gate, those that fail it first; empty where there was none."""
    if gate is None:
        return []
    blocks: tuple[Block, ...] = (
        Words(f"{gates.summarize(gate)}.", "bad" if gate.exit_code else "good" if gate.passed else "caution"),
        *show_rows(gates.tabulate_checks(gate)),
        *list_points(gates.list_notes(gate)),
    )
    return [Section("gate", "Gate", "What did the last gate judge?", blocks)]


def render_fidelity(run: Run, drawings: Drawings) -> tuple[Block, ...]:
    """List the distance to the baseline's outputs, and the metric."""
    why = next((record.reasons["quality"] for record in run.records if record.reasons.get("quality")), "")
    return (
        *show_rows(run_tables.tabulate_losses(run)),
        *(
            show_rows(run_tables.tabulate_quality(run))
            or (Words(f"No metric was computed{f': {why}' if why else ''}."),)
        ),
        drawings["fidelity"],
        *fold("Every comparison", run_tables.tabulate_fidelity(run)),
    )


def render_sensitivity(run: Run, drawings: Drawings) -> tuple[Block, ...]:
    """List the groups that lose most in low precision, and the trials of what stays in float."""
    trials = []
    for index, record in enumerate(run.variants):
        if count := len(record.search):
            name = f"{mark_name(record)}: {count} trial{'s' if count > 1 else ''} of what stays in floating point"
            trials.append(Folded(name, (run_tables.tabulate_search(record, f"trials-{index}", name),)))
    having = [record for record in run.variants if record.assignment and list_losses(record)]
    if not having:
        return (Words(_explain_no_losses(run)), *trials)
    chosen = min(having, key=lambda record: record.id != run.winner)
    return (run_tables.tabulate_group_losses(chosen, "losses", _MOST_LOSSES), *trials)


def _explain_no_losses(run: Run) -> str:
    groups = [group for record in run.variants for group in record.assignment]
    if not groups:
        return "Nothing was quantized group by group in this run."
    if all(group.sqnr_db is None for group in groups) and not any(record.search for record in run.variants):
        return "The groups were not tried one by one: no accuracy or fidelity goal asked for a search."
    return "No group loses much in low precision."


def render_precision(run: Run, drawings: Drawings) -> tuple[Block, ...]:
    """List what is computed in which precision, and why."""
    paid = (
        {"variant": mark_name(variant), "evidence": mark(run, text)}
        for variant in run.variants
        for text in variant.remarks
    )
    none = Words("No variant was quantized group by group: operators are in the precision of their variant's name.")
    assigned = any(variant.assignment for variant in run.variants)
    return (
        *list_points(f"{note}." for note in sentences.list_footnotes(run)),
        *([Words(f"Ranges come from {describe_calibration(run)}."), *_assignments(run)] if assigned else [none]),
        *show_rows(make_table("paid", "Whether low precision pays", paid)),
        *show_rows(run_tables.tabulate_coverage(run)),
    )


def describe_calibration(run: Run) -> str:
    """Name the data that ranges were taken from, as the step that calibrates the model says."""
    step = next((step for step in run.steps if step.id == _CALIBRATION and step.effect), None)
    return step.effect if step else f"{run.recipe.calibration_data or 'no data'}, up to {run.recipe.samples} samples"


def _assignments(run: Run) -> Iterator[Folded]:
    """List the precision of every group, variants that agree in all of them together, the first mixed one opened."""
    together: dict[tuple[object, ...], list[VariantRecord]] = {}
    for record in run.variants:
        if record.assignment:
            alike = tuple((group.group, group.precision, group.why, group.sqnr_db) for group in record.assignment)
            together.setdefault((record.precision, alike), []).append(record)
    groups = list(together.values())
    mixed = [
        len(
            {narrowest_type(group.precision) == narrowest_type(members[0].precision) for group in members[0].assignment}
        )
        > 1
        for members in groups
    ]
    opened = mixed.index(True) if any(mixed) else 0
    for index, records in enumerate(groups):
        more = f"; and {len(records) - _NAMED} more alike" if len(records) > _NAMED else ""
        summary = "; ".join(run_tables.summarize_assignment(record) for record in records[:_NAMED]) + more
        table = run_tables.tabulate_assignment(records[0], f"groups-{index}")
        yield Folded(summary, (table,), open=index == opened)


def render_compression(run: Run, drawings: Drawings) -> tuple[Block, ...]:
    """List what pruning took away, and what training brought back."""
    models = show_rows(training_tables.tabulate_pruning(run))
    trained = show_rows(training_tables.tabulate_training(run))
    if not (models or trained):
        names = ", ".join(run.recipe.prune)
        return (Words(f"No pruned model came out: {names} was asked for." if names else "Nothing was to be pruned."),)
    curves = fold("Every step of training", training_tables.tabulate_training_steps(run))
    groups = []
    for place, record in enumerate(training_tables.list_pruned(run)):
        for index, facts in enumerate(record.pruning):
            title = f"{record.prune}: what each group lost"
            lost = training_tables.tabulate_groups(facts, f"lost-{place}-{index}", title)
            whole = list_points(f"{group} is not pruned: {why}." for group, why in facts.whole.items())
            groups.append(Folded(title, (*show_rows(lost), *whole)))
    alone = () if trained else (Words("Pruned models were not trained back: --recover distil does it."),)
    return (*models, *trained, *alone, *curves, *groups)


# Render what was left out and where the numbers come from: steps, the machine, doing it again.

_TELLING = ("processor", "usable cores", "memory", "system", "kernel", "python", "governor", "turbo", "load average")
_MOST_FACTS = 24


def render_rejected(run: Run, drawings: Drawings) -> tuple[Block, ...]:
    """List variants that cannot be used, and why."""
    rejected = [([record], "rejected", record.rejected) for record in run.variants if record.rejected]
    others = [(records, _describe_end(records[0]), why) for records, why in sentences.group_by_reason(run)]
    rows = (
        {"variants": ", ".join(map(mark_name, records)), "what": what, "why": why}
        for records, what, why in (*rejected, *others)
    )
    left = [mark_name(record) for record in run.requested if record.status != "measured"]
    everything = "None: every variant was built, compared with the original model and measured."
    none = Words(f"None failed; not measured: {', '.join(left)}." if left else everything)
    caption = "Variants that failed, were rejected or not measured, with the reason"
    return show_rows(make_table("reasons", caption, rows)) or (none,)


def _describe_end(record: VariantRecord) -> str:
    if record.status == "failed":
        return f"failed: {record.failure}" if record.failure else "failed"
    return f"{record.status}, with a shortfall" if record.shortfall else record.status


def render_provenance(run: Run, drawings: Drawings) -> tuple[Block, ...]:
    """List the model, the files and every step."""
    steps = f"All {len(run.steps)} steps, with tools and versions"
    return (
        Facts(tuple(_about(run))),
        *(show_rows(provenance.tabulate_files(run)) or (Words("No engine was built."),)),
        *(fold(steps, provenance.tabulate_steps(run)) or (Words("No step ended."),)),
        *fold("The fields that each step was done with", provenance.tabulate_parameters(run)),
    )


def _about(run: Run) -> Iterator[Fact]:
    model = run.model
    yield Fact("Model", model.source)
    yield Fact("Digest of the model", model.sha256 or "not recorded")
    if model.signature:
        yield Fact("Inputs", "; ".join(map(str, model.signature.inputs)))
        yield Fact("Outputs", "; ".join(map(str, model.signature.outputs)))
    if model.shapes:
        yield Fact("Shapes (min:opt:max)", ", ".join(f"{name} {range_}" for name, range_ in model.shapes.items()))
    yield Fact("Started", run.created)
    yield Fact("Took", format_seconds(run.seconds))


def render_environment(run: Run, drawings: Drawings) -> tuple[Block, ...]:
    """List the machine, its warnings and its software."""
    warnings = tuple(f"{warning}." for warning in run.environment.get("warnings", ()))
    machine = provenance.tabulate_machine(run.environment)
    known = [Fact(name, text) for name, text in machine.rows if name in _TELLING or name.startswith("GPU")]
    versions = provenance.list_versions(run.environment).items()
    packages = make_table("packages", "Packages", ({"package": name, "version": version} for name, version in versions))
    quiet = Words("Nothing was found that disturbs measurements.", "good")
    unknown = Words("Nothing is known of the machine.", "caution")
    return (
        *(list_points(warnings, "caution") or (quiet if machine.rows else unknown,)),
        Facts((Fact("device", f"{run.where}"), *known[:_MOST_FACTS])),
        *fold("Every fact of the machine", machine),
        *fold("Packages and their versions", packages),
    )


def render_reproduction(run: Run, drawings: Drawings) -> tuple[Block, ...]:
    """List what to install and what to run."""
    known = provenance.list_versions(run.environment)
    install, python = provenance.write_install_command(run.environment), run.environment.get("python")
    own = " ".join(filter(None, ("enginesmith", known.get("enginesmith"))))
    instruction = f"In a checkout of {own}{f', with Python {python}' if python else ''}:"
    builds = provenance.list_local_builds(run.environment)
    build = f"The run was made with {', '.join(builds)}: a build of its own, from the index that offers it."
    unknown = Words("The run does not say which packages it was made with.", "caution")
    return (
        *((Words(instruction), Code("install", "Install", install)) if install else (unknown,)),
        *([Words(build)] if builds else []),
        Code("command", "Run", provenance.write_commands(run)),
        *([Words(f"Started in the folder {run.environment['folder']}.")] if run.environment.get("folder") else []),
        *fold("recipe.yaml: everything that was asked for", Code("recipe", "recipe.yaml", commented(run.recipe))),
    )


# Render what was measured: latency, memory, batch sizes, the machine's limits, and where time goes.


def render_latency(run: Run, drawings: Drawings) -> tuple[Block, ...]:
    """List the percentiles of single calls."""
    none = Words(f"No latency was measured: {why_none(run, 'latency', 'nothing has run yet')}.")
    return (
        *(show_rows(run_tables.tabulate_latency(run)) or (none,)),
        *show_rows(run_tables.tabulate_device_latency(run)),
        *list_points(f"{note}." for note in sentences.list_measurement_notes(run)),
    )


def render_memory(run: Run, drawings: Drawings) -> tuple[Block, ...]:
    """List peak memory by part, and the figures of the engines."""
    return (
        drawings["memory"],
        *show_rows(run_tables.tabulate_memory(run)),
        *show_rows(run_tables.tabulate_engines(run)),
        *list_points(f"{text}." for text in sentences.list_unreported(run)),
        *fold("Every number of memory, with its source", run_tables.tabulate_lenses(run)),
    )


def render_batch_sweep(run: Run, drawings: Drawings) -> tuple[Block, ...]:
    """List latency and throughput by batch size and callers."""
    sweep = run_tables.tabulate_sweep(run)
    none = Words("Throughput of several callers was not measured: --concurrency 1,2,4 asks for it.")
    return (
        drawings["latency-by-batch"],
        drawings["throughput-by-batch"],
        *fold(sweep.caption, sweep),
        *(show_rows(run_tables.tabulate_throughput(run)) or (none,)),
    )


def render_limits(run: Run, drawings: Drawings) -> tuple[Block, ...]:
    """Compare each variant with the limits of the device."""
    why = why_none(run, "limits", "no floor is known")
    none = Words(f"Nothing was compared with the device's limits: {why}.")
    return (
        *(show_rows(run_tables.tabulate_limits(run)) or (none,)),
        *show_rows(provenance.tabulate_rates(run)),
        *list_points(f"{warning}." for warning in (run.limits.warnings if run.limits else ())),
    )


def render_profile(run: Run, drawings: Drawings) -> tuple[Block, ...]:
    """List time by module and operator."""
    sizes = ", ".join(str(batch) for batch in sorted({table.batch for entry in run.records for table in entry.profile}))
    caution = f"At batch {sizes}. Profilers slow the model down: use this for shares of the time, not for its length."
    notes = list_points(f"{note[:1].upper()}{note[1:]}." for note in sentences.describe_profiles(run))
    return (
        Words(caution if sizes else f"Nothing was profiled: {why_none(run, 'profile', 'not asked for')}."),
        *show_rows(run_tables.tabulate_profile(run)),
        *fold(
            "Every module, and why it takes more or less time than in the original model",
            run_tables.tabulate_modules(run),
        ),
        *fold("Every operator, by the module whose work it does", run_tables.tabulate_operators(run)),
        *fold("Notes of the profilers", *notes),
    )


# How the run's numbers were taken, in short; docs/measurement.md has all of it.

_LATENCY = (
    "Latency: the host's monotonic clock around enqueueing and synchronizing, the same for eager and every engine. "
    "Inputs are in place before, outputs are fetched after. On CUDA, events on the stream time other calls, after some "
    "blocks.",
    "All variants take turns in shuffled rounds, each in a process of its own, and the processes are restarted "
    "several times (launches). Speed-up is the median over rounds of the paired ratio; its 95 % interval is over "
    "launches.",
)
_REST = (
    "Calls around which a session's threads waited for a core are disturbed: medians and speed-ups leave them out, "
    "percentiles do not. A percentile is given only with enough samples behind it.",
    "Memory: one session alone in a fresh process, at the largest batch size. On the CPU it is growth over the loaded "
    "libraries; on CUDA torch's caching allocator counts it for every engine.",
    "Fidelity: the outputs of each stage against eager's in float32 on the same samples, at the smallest, usual and "
    "largest shape. Accuracy: the metric on labeled data, paired by sample.",
)


def render_method(run: Run, drawings: Drawings) -> tuple[Block, ...]:
    """Describe the clock, the rounds, and what counts as memory."""
    measure = run.recipe.measure
    device = f"Measured on {run.where} with {count_words(run.thread_count, 'thread')} a session."
    rule = f"Measuring stops when every median is known to ± {measure.precision:.0%}, or after {measure.seconds:g} s"
    stops = ", ".join(sentences.list_stops(run))
    stopping = f"{rule} for each batch size{f'; here: {stops}' if stops else ''}."
    return (Points((device, *_LATENCY, stopping, *_REST)),)
