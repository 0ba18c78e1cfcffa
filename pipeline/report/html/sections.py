"""Render accuracy and what explains it: fidelity by stage, sensitivity, precisions, and what was made smaller."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version

from enginesmith.pipeline.recipe import commented
from enginesmith.pipeline.report import provenance, sections, tables
from enginesmith.pipeline.report.charts import Chart
from enginesmith.pipeline.report.html.blocks import (
    Block,
    Code,
    Drawn,
    Fact,
    Facts,
    Folded,
    Points,
    Table,
    Words,
    drawn,
    filled,
    folded,
    points,
    table,
    without_empty,
)
from enginesmith.pipeline.report.html.summary import calibration, disturbances
from enginesmith.pipeline.results.explain import claimed
from enginesmith.pipeline.results.run import Run, VariantRecord
from enginesmith.pipeline.units import format_seconds

# Charts on their way to the sections that they belong to, and what stands there where there is nothing to draw.


@dataclass(frozen=True)
class Placed:
    """All charts of a run."""

    charts: Sequence[Chart]

    def under(self, *names: str) -> tuple[Drawn | Words, ...]:
        """Those of the names, in their order, with a reason in the place of one that is empty."""
        by_id = {one.id: one for one in self.charts}
        return tuple(_shown(by_id[name]) for name in names if name in by_id)

    def by_batch(self, name: str, first: int) -> tuple[Drawn | Words, ...]:
        """Those of a name that there is one of for each batch size, one batch size first."""
        found = [one for one in self.charts if one.id == name or one.id.startswith(f"{name}-")]
        return tuple(_shown(one) for one in sorted(found, key=lambda one: one.id != f"{name}-{first}"))

    def why(self, run: Run, field: str, what: str) -> Words:
        """Why no variant has something."""
        records = (run.baseline, *run.variants)
        reason = next((one.reasons[field] for one in records if one.reasons.get(field)), "")
        return Words(f"{what}: {reason}." if reason else f"{what}.")


def _shown(chart: Chart) -> Drawn | Words:
    return drawn(chart) if chart.figure is not None else Words(f"{chart.title}: {chart.empty.rstrip('.')}.")


_NAMED = 3
"""Variants that are named where many have the same assignment."""


def render_fidelity(run: Run, placed: Placed) -> tuple[Block, ...]:
    """List the distance to the baseline's outputs, and the metric."""
    data = run.model.data or "unknown"
    lost = f"Where each variant came furthest from {run.baseline.id}, stage by stage at the worst shape"
    judged = f"The metric on {run.recipe.data or 'labelled data'}; the drop is paired by sample"
    compared = f"Outputs against those of {run.baseline.id} on {data} data, by stage and shape"
    quality = table("quality", judged, sections.QUALITY, sections.quality(run), sortable=True)
    return (
        *filled(table("lost", lost, sections.LOST, sections.lost(run), sortable=True)),
        *(filled(quality) or (placed.why(run, "quality", "No metric was taken"),)),
        *placed.under("fidelity"),
        *folded(
            "Every comparison",
            *filled(table("compared", compared, sections.FIDELITY, sections.fidelity(run), searched=True)),
        ),
    )


def render_sensitivity(run: Run, placed: Placed) -> tuple[Block, ...]:
    """List what each group costs in low precision."""
    trials = (_trials(index, record) for index, record in enumerate(run.variants) if record.search)
    return (*placed.under("sensitivity"), *trials)


def _trials(index: int, record: VariantRecord) -> Folded:
    count = len(record.search)
    name = f"{tables.marked(record)}: {count} trial{'s' if count > 1 else ''} of what stays in floating point"
    return Folded(name, (table(f"trials-{index}", name, tables.SEARCH, tables.search(record)),))


def render_precision(run: Run, placed: Placed) -> tuple[Block, ...]:
    """List what is computed in which precision, and why."""
    paid = [(tables.marked(one), tables.mark(run, text)) for one in run.variants for text in one.remarks]
    covered = tuple(tables.coverage(run))
    none = Words("No variant was quantised group by group: operators are in the precision of their variant's name.")
    shares = "What each graph asks for, and what each engine runs"
    return (
        *points(f"{note}." for note in tables.made_up(run)),
        *([Words(f"Ranges come from {calibration(run)}.")] if any(one.assignment for one in run.variants) else []),
        *(tuple(_assignments(run)) or (none,)),
        *filled(table("paid", "Whether low precision pays", ("variant", "evidence"), paid)),
        *filled(Table("coverage", shares, tables.COVERAGE, covered, grouped=True)),
    )


def _assignments(run: Run) -> Iterator[Folded]:
    """What every group is computed in, variants that agree in all of it together."""
    together: dict[tuple[object, ...], list[VariantRecord]] = {}
    for record in run.variants:
        if record.assignment:
            alike = tuple((one.group, one.precision, one.why, one.sqnr_db) for one in record.assignment)
            together.setdefault((record.precision, alike), []).append(record)
    opened = next((key for key, found in together.items() if _mixed(found[0])), next(iter(together), None))
    for index, (key, records) in enumerate(together.items()):
        rows = tuple(tables.assignment(records[0]))
        more = f"; and {len(records) - _NAMED} more alike" if len(records) > _NAMED else ""
        summary = "; ".join(tables.kept(record) for record in records[:_NAMED]) + more
        caption = "By group; those first that are not in the variant's low precision, with the reason"
        groups = Table(f"groups-{index}", caption, tables.ASSIGNMENT, rows, searched=True)
        yield Folded(summary, (groups,), open=key is opened)


def _mixed(record: VariantRecord) -> bool:
    """Whether some groups are in its low precision, and some are not."""
    low = {claimed(one.precision) == claimed(record.precision) for one in record.assignment}
    return len(low) > 1


def render_compression(run: Run, placed: Placed) -> tuple[Block, ...]:
    """List what pruning took away, and what training brought back."""
    caption = "What pruning took away, and what training brought back"
    models = filled(table("pruned", caption, sections.MODELS, sections.models(run)))
    if not models:
        asked = ", ".join(run.recipe.prune)
        return (Words(f"No pruned model came out: {asked} was asked for." if asked else "Nothing was to be pruned."),)
    return (*models, *placed.under("recovery"), *_groups(run))


def _groups(run: Run) -> Iterator[Folded]:
    for place, record in enumerate(sections.pruned(run)):
        for index, facts in enumerate(record.pruning):
            title = f"{record.prune}: what each group lost"
            lost = table(f"lost-{place}-{index}", title, sections.GROUPS, sections.groups(facts))
            whole = points(f"{group} stays whole: {why}." for group, why in facts.whole.items())
            yield Folded(title, (*filled(lost), *whole))


# Render what was left out and where the numbers come from: steps, the machine, doing it again.

_TELLING = ("processor", "usable cores", "memory", "system", "kernel", "python", "governor", "turbo", "load average")
_MOST_FACTS = 24
OUT = ("variants", "what", "why")


def render_rejected(run: Run, placed: Placed) -> tuple[Block, ...]:
    """List variants that cannot be used, and why."""
    rejected = [(tables.marked(one), "rejected", one.rejected) for one in run.variants if one.rejected]
    others = [(", ".join(map(tables.marked, found)), _how(found[0]), why) for found, why in tables.by_reason(run)]
    rows = [*rejected, *others]
    found = table("reasons", "Variants that failed, were rejected or are left, with the reason", OUT, rows)
    none = Words("None: every variant was built, held against the baseline and measured.")
    return (found,) if rows else (none,)


def _how(record: VariantRecord) -> str:
    """In a word what became of a variant."""
    if record.status == "failed":
        return f"failed: {record.failure}" if record.failure else "failed"
    return f"{record.status}, with a shortfall" if record.shortfall else record.status


def render_provenance(run: Run, placed: Placed) -> tuple[Block, ...]:
    """List the model, the files and every step."""
    steps = table("steps", "Every step of the plan", provenance.STEPS, provenance.steps(run), searched=True)
    files = table("files", "Engine files in the run directory", provenance.FILES, provenance.files(run))
    fields = table("fields", "Fields of each step", provenance.PARAMETERS, provenance.parameters(run))
    return (
        Facts(tuple(_about(run))),
        *(filled(without_empty(files)) or (Words("No engine was built."),)),
        *(folded(f"All {len(run.steps)} steps, with tools and versions", *filled(steps)) or (Words("No step ended."),)),
        *folded("The fields that each step was done with", *filled(fields)),
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
    yield Fact("Begun", run.created)
    yield Fact("Took", format_seconds(run.seconds))


def render_environment(run: Run, placed: Placed) -> tuple[Block, ...]:
    """List the machine, its warnings and its software."""
    warnings = tuple(f"{one}." for one in run.environment.get("warnings", ()))
    facts = provenance.machine(run.environment)
    known = [Fact(name, text) for name, text in facts if name in _TELLING or name.startswith("GPU")]
    every = table("machine", "The machine when latency was measured", provenance.MACHINE, facts)
    packages = table("packages", "Packages", ("package", "version"), provenance.versions(run.environment).items())
    quiet = Words("Nothing was seen that spoils measurements.", "good")
    unknown = Words("Nothing is known of the machine.", "caution")
    return (
        *(points(warnings, "caution") or (quiet if facts else unknown,)),
        Facts((Fact("device", f"{run.recipe.where}"), *known[:_MOST_FACTS])),
        *folded("Every fact of the machine", *filled(every)),
        *folded("Packages and their versions", *filled(packages)),
    )


def render_reproduction(run: Run, placed: Placed) -> tuple[Block, ...]:
    """List what to install and what to run."""
    known = provenance.versions(run.environment)
    install, python = provenance.install(run.environment), run.environment.get("python")
    own = known.get("enginesmith") or version("enginesmith")
    said = f"In a checkout of enginesmith {own}{f', with Python {python}' if python else ''}:"
    builds = provenance.builds(run.environment)
    build = f"The run was made with {', '.join(builds)}: a build of its own, from the index that offers it."
    unknown = Words("The run does not say which packages it was made with.", "caution")
    return (
        *((Words(said), Code("install", "Install", install)) if install else (unknown,)),
        *([Words(build)] if builds else []),
        Code("command", "Run", provenance.commands(run)),
        *([Words(f"Begun in the folder {run.environment['folder']}.")] if run.environment.get("folder") else []),
        *folded("recipe.yaml: everything that was asked for", Code("recipe", "recipe.yaml", commented(run.recipe))),
    )


# Render what was measured: latency, memory, batch sizes, the machine's limits, and where time goes.

_MOST_ROWS = 20_000
_REASONS = 2


def render_latency(run: Run, placed: Placed) -> tuple[Block, ...]:
    """List the distributions and percentiles of single calls."""
    first, *others = placed.by_batch("ecdf", run.deciding_batch) or (None,)
    whys = "; ".join(sections.percentiles_missing(run)[:_REASONS])
    missing = [f"Why some have no p99: {whys}."] if whys else []
    device = table(
        "on-device",
        "The host's clock beside the device's",
        sections.LATENCY_ON_DEVICE,
        sections.on_device(run),
        sortable=True,
    )
    return (
        *([first] if first else []),
        *folded("The distribution at other batch sizes", *others),
        *filled(_timed(run)),
        *filled(device),
        *points((*missing, *(f"{note}." for note in disturbances(run)))),
    )


def _timed(run: Run) -> Table:
    values = tuple(
        (None, float(row.batch), row.p50_ms, row.p90_ms, row.p95_ms, row.p99_ms, row.p99_9_ms, row.mean_ms)
        + (row.speedup.median if row.speedup else None, row.n, row.rounds, row.launches, row.disturbed_share)
        + (row.load_ms, row.first_call_ms, None)
        for record in (run.baseline, *run.variants)
        for row in record.latency
    )
    caption = f"Latency of one call by variant and batch size; speed-up is paired by round against {run.baseline.id}"
    rows = tuple(sections.latency(run))
    return Table("latencies", caption, sections.LATENCY, rows, values, sortable=True)


def render_memory(run: Run, placed: Placed) -> tuple[Block, ...]:
    """List peak memory by part, and the figures of the engines."""
    caption = "What engines say of themselves, and how long building them took"
    built = table("engines", caption, sections.ENGINES, sections.engines(run), sortable=True)
    unsaid = [f"{said}." for said in sections.unsaid(run)]
    seen = table("lenses", "Memory by every way that it was looked at", sections.LENSES, sections.lenses(run))
    return (
        *placed.under("memory"),
        *filled(without_empty(built)),
        *points(unsaid),
        *folded("Every number of memory, with its source", *filled(seen)),
    )


def render_batch_sweep(run: Run, placed: Placed) -> tuple[Block, ...]:
    """List latency and throughput by batch size and callers."""
    caption = "Throughput with several callers at the same time"
    callers = table("callers", caption, sections.THROUGHPUT, sections.throughput(run), sortable=True)
    charts = placed.under("latency-by-batch", "throughput-by-batch", "concurrency")
    return (*charts, *folded(caption, *filled(callers)))


def render_limits(run: Run, placed: Placed) -> tuple[Block, ...]:
    """Compare each variant with the limits of the device."""
    caption = "What the machine can do at best, measured in this run"
    rates = table("rates", caption, provenance.RATES, provenance.rates(run.limits))
    warnings = run.limits.warnings if run.limits else ()
    return (*placed.under("limits"), *filled(rates), *points(f"{warning}." for warning in warnings))


def render_profile(run: Run, placed: Placed) -> tuple[Block, ...]:
    """List time by module and operator."""
    modules = _many("modules", "Modules beside the baseline's", sections.BY_MODULE, sections.by_module(run), run)
    operators = _many("operators", "Operators by module", sections.OPERATORS, sections.operators(run), run)
    profiled = [one for record in (run.baseline, *run.variants) for one in record.profile]
    sizes = ", ".join(str(batch) for batch in sorted({one.batch for one in profiled}))
    said = f"At batch {sizes}. Profilers slow down what they look at: this says how time is divided."
    notes = points(f"{note[:1].upper()}{note[1:]}." for note in sections.profiled(run))
    return (
        *([Words(said)] if profiled else []),
        *placed.under("profile"),
        *folded("Every module, and why it takes more or less than in the baseline", *filled(modules)),
        *folded("Every operator, by the module whose work it does", *filled(operators)),
        *folded("What the profilers say of themselves", *notes),
    )


def _many(name: str, caption: str, columns: tuple[str, ...], rows: Iterator[tuple[str, ...]], run: Run) -> Table:
    """A table of profiles, which may have more rows than anybody reads; the winner's come first."""
    kept = tuple(itertools.islice(rows, _MOST_ROWS))
    total = sections.profile_rows(run) if len(kept) == _MOST_ROWS else len(kept)
    return Table(name, caption, columns, kept, searched=True, total=total)


# How the run's numbers were taken, in short; docs/measurement.md has the whole of it.

_LATENCY = (
    "Latency: the host's monotonic clock around enqueueing and synchronising, the same for eager and every engine. "
    "Inputs are in place before, outputs are fetched after. On CUDA, events on the stream stand beside it.",
    "All variants take turns in shuffled rounds, each in a process of its own, and the processes are started anew "
    "several times (launches). Speed-up is the median over rounds of the paired ratio; its 95 % interval is over "
    "launches.",
)
_REST = (
    "Calls around which a session's threads waited for a core are disturbed: medians and speed-ups leave them out, "
    "percentiles do not. A percentile is given only with enough samples behind it.",
    "Memory: one session alone in a fresh process, at the largest batch size. On the CPU it is growth over the loaded "
    "libraries; on CUDA torch's caching allocator counts it for every engine.",
    "Fidelity: the outputs of each stage against eager's in float32 on the same samples, at the smallest, usual and "
    "largest shape. Accuracy: the metric on labelled data, paired by sample.",
)


def render_method(run: Run, placed: Placed) -> tuple[Block, ...]:
    """Describe the clock, the rounds, and what counts as memory."""
    where, count = run.recipe.where, run.recipe.where.thread_count
    device = f"Measured on {where} with {count} thread{'s' if count != 1 else ''} a session."
    return (
        Points((device, *_LATENCY, _stopping(run), *_REST)),
        Words("The whole of it is in docs/measurement.md of enginesmith."),
    )


def _stopping(run: Run) -> str:
    measure = run.recipe.measure
    rule = f"Measuring stops when every median is known to ± {measure.precision:.0%}, or after {measure.seconds:g} s"
    stops = {row.stopped_because for record in (run.baseline, *run.variants) for row in record.latency}
    here = ", ".join(sorted(one for one in stops if one))
    return f"{rule} for each batch size{f'; here: {here}' if here else ''}."
