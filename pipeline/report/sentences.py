"""Say in words what a run comes to: its verdict, what to know before believing its numbers, and what became of each
variant."""

from collections.abc import Iterable, Iterator, Mapping

from enginesmith.pipeline.engines import REFERENCES
from enginesmith.pipeline.frameworks.records import describe_fallback
from enginesmith.pipeline.frameworks.samples import batch_symbol
from enginesmith.pipeline.measure.statistics import NOISE_REMEDY, SAMPLE_FLOORS, TOO_NOISY, divide
from enginesmith.pipeline.report.tables import (
    describe_data,
    describe_drop,
    format_drop,
    format_value,
    mark,
    mark_name,
    shorten_reason,
    speedup,
)
from enginesmith.pipeline.results import verdicts
from enginesmith.pipeline.results.differences import device_kind
from enginesmith.pipeline.results.run import Run, VariantRecord, find_record
from enginesmith.pipeline.system.software import numbers
from enginesmith.pipeline.units import count_words, format_bytes, format_metric, group_values, ms, name_some

_MOST_NAMED = 3
_EXACT, _TF32_SINCE = "fp32", (8,)
"""The precision that says nothing of TF32, and the compute capability that brought that."""
LONG_TAIL = 20.0
"""p99 over p50 from which the report explains the tail."""
_SLOWEST = 0.01
"""Share of calls that are slower than p99: if more than these waited for a core, that may be why."""
_LOWERING = ("precision", "quantize")
"""Steps that make the graph in a low precision that an engine computes."""
_SUSPECT_DB, _SUSPECT_LOSS_DB = 25.0, 10.0
"""An engine is suspect below this SQNR, if its graph's is higher by more than the second: ties that are rounded the
other way, and sums that saturate without VNNI, cost less."""
_DISTURBED = "p50 with ~: other programs disturbed most of its calls; on a quiet machine it may be much lower"
SYNTHETIC = "* calibrated on random data: speed and memory are valid, accuracy is not"


def list_footnotes(run: Run, *, in_folder: bool = True) -> list[str]:
    """Explain stars on names, marked p50s, dashes for a p99, groups on a GPU, searches and negative drops, if any.

    ``in_folder`` is False for a run that is printed alone, as ``benchmark`` does.
    """
    negative = any(record.quality and format_drop(record.quality).startswith("−") for record in run.variants)
    return [
        *([SYNTHETIC] if any(record.synthetic_calibration for record in run.variants) else []),
        *([_DISTURBED] if any(row.mostly_disturbed for record in run.records for row in record.latency) else []),
        *_explain_p99(run, in_folder),
        *_describe_judged(run),
        *_explain_references(run),
        *_explain_tf32(run),
        *_describe_search(run),
        *_describe_prosecution(run),
        *_explain_groups(run),
        *filter(None, [describe_data(run)]),
        *(["a negative drop is an improvement over the original model"] if negative else []),
    ]


def _describe_judged(run: Run) -> Iterator[str]:
    """Say what the baseline itself reaches in the metric."""
    if quality := run.baseline.quality:
        yield f"drop: from {run.baseline.id}'s {quality.title} of {format_value(quality.value)}"


def _explain_groups(run: Run) -> Iterator[str]:
    """Say at which batch sizes the variants did not fit on the GPU together."""
    groups = {row.batch: row.group for record in run.records for row in record.latency if row.group}
    if groups:
        batches = f"batch {', '.join(map(str, sorted(groups)))}"
        compared = f"a speed-up is a ratio to {run.baseline.id} of the same group"
        yield f"at {batches} the variants do not fit on the GPU together and were measured in groups; {compared}"


def _explain_p99(run: Run, in_folder: bool) -> Iterator[str]:
    """Say how many calls a p99 takes, and which option gives as many."""
    rows = [row for record in run.records for row in record.latency if row.p50_ms and row.n and row.p99_ms is None]
    if rows:
        row, least = min(rows, key=lambda row: row.n or 0), SAMPLE_FLOORS[99.0]
        options, slow = verdicts.options_for_more(run, row, least / (row.n or 1))
        replace = " --replace" if in_folder else ""
        remedy = f"{options}{replace}{slow} {'may' if slow else 'should'} be enough"
        yield f"no p99 (–): it needs {least} calls, and there were as few as {row.n}; {remedy}"


def _explain_references(run: Run) -> Iterator[str]:
    """Explain the rows that nobody asked for, and how eager runs beside them."""
    if names := [record.id for record in run.variants if record.reference]:
        yield f"{', '.join(names)}: PyTorch alone, measured for comparison (--no-references leaves them out)"
    if run.baseline.engine in REFERENCES and device_kind(run) == "cuda":
        yield (
            f"{run.baseline.id} is timed as PyTorch ships it, which rounds convolutions to TF32; "
            "answers and accuracy are compared with exact float32"
        )


def _explain_tf32(run: Run) -> Iterator[str]:
    """Say which variants in fp32 round products to TF32, where they differ on a GPU that has it."""
    gpus = run.environment.get("gpus") or ()
    capability = gpus[run.where.index].get("compute_capability") if run.where.index < len(gpus) else None
    if device_kind(run) != "cuda" or numbers(capability or "") < _TF32_SINCE:
        return
    places = {"": "in no product", "convolutions": "in convolutions", "all": "in all products"}
    exact = [record for record in run.records if record.precision == _EXACT and record.status == "measured"]
    named = {
        where: names
        for kind, where in places.items()
        if (names := ", ".join(record.id for record in exact if record.rounds_to_tf32 == kind))
    }
    if len(named) > 1:
        parts = "; ".join(f"{where}: {names}" for where, names in named.items())
        yield f"fp32 is not the same arithmetic in all of them: this GPU may round to TF32 (10 bits) {parts}"


def summarize(run: Run) -> str:
    """Sum up the run in one sentence."""
    if run.winner is None:
        return mark(run, f"No winner{'' if run.complete else ' yet'}: {shorten_reason(run.winner_reason, 300)}.")
    record = find_record(run, run.winner)
    row = record.row(run.deciding_batch) or next((row for row in record.latency if row.p50_ms is not None), None)
    beside = _compare_with_reference(run)
    if row is None or record.id == run.baseline.id:
        return mark(run, f"{run.winner} wins: {run.winner_reason}{f'; it {beside}' if beside else ''}.")
    parts = [_compare_latency(record, run.baseline, row.batch), *([f"and {beside}"] if beside else [])]
    if record.peak_bytes is not None and run.baseline.peak_bytes:
        share, whose = record.peak_bytes / run.baseline.peak_bytes, f"{run.baseline.id}'s" if beside else "its"
        parts.append(f"uses {100 * share:.0f} % of {whose} peak memory")
    if record.quality and record.quality.drop is not None:
        parts.append(describe_drop(record.quality))
    sentences = [", ".join(parts)]
    broken = [verdicts.format_verdict(verdict) for verdict in run.verdicts if not verdict.passed]
    if broken:
        sentences.append(f"{len(broken)} of {len(run.verdicts)} budgets broken: {', '.join(broken)}")
    elif len(run.verdicts) == 1:
        sentences.append(f"it meets the budget for {verdicts.format_title(run.verdicts[0].budget)}")
    elif run.verdicts:
        sentences.append(f"it meets all {len(run.verdicts)} budgets")
    if why := _explain_near_win(run, record, row.batch):
        sentences.append(why)
    if any(step.kind == "prosecute" and step.variant == record.id and step.late for step in run.steps):
        sentences.append("no time was left to try inputs beside the samples on it")
    return mark(run, "; ".join(sentences) + ".")


def _describe_search(run: Run) -> Iterator[str]:
    """Tell what became of the variants of a run that raced, and what is left to try."""
    raced = [record for record in run.requested if record.race or record.untried]
    if not raced:
        return
    skipped = [record for record in run.requested if record.status == "skipped"]
    measured = [record for record in run.requested if record.status == "measured"]
    late, batch = [record for record in skipped if record.untried], run.deciding_batch
    ends = {
        "measured in full": [record for record in measured if record.row(batch)],
        f"not measured at batch {batch}, which decides": [record for record in measured if not record.row(batch)],
        "dropped": [record for record in skipped if record.dropped],
        "skipped": [record for record in skipped if not (record.dropped or record.untried)],
        "built and not measured": [record for record in run.requested if record.status == "built"],
        "failed": [record for record in run.requested if record.status == "failed"],
        "not tried, as the time was over": [record for record in late if record.late in ("no time", None)],
        "stopped at a share of the time": [record for record in late if record.late == "over share"],
        "built and not measured, as the time was over": [
            record for record in late if record.late == "no time to measure"
        ],
    }
    parts = (f"{len(records)} {end}" for end, records in ends.items() if records)
    yield f"search: {count_words(len(run.requested), 'variant')}: {', '.join(parts)}"
    if untried := [record.id for record in raced if record.untried]:
        yield f"search: with as much time again, `enginesmith resume` tries {', '.join(untried)}"


def _describe_prosecution(run: Run) -> Iterator[str]:
    """Tell which workarounds were added, which inputs were tried and excused, and which variants are wrong on one."""
    yield from (workaround.sentence for workaround in run.workarounds)
    given = [(record.id, record.prosecution) for record in run.requested if record.prosecution]
    yield from (f"{name}: {prosecution.reason}" for name, prosecution in given if prosecution.reason)
    right = ((name, prosecution) for name, prosecution in given if not prosecution.finding)
    yield from (f"{name}: {prosecution.caution}" for name, prosecution in right if prosecution.caution)
    ends = {step.variant: step for step in run.steps if step.kind == "prosecute"}
    ends = {each.id: ends[each.id] for each in run.requested if each.status == "measured" and each.id in ends}
    for name, step in ends.items():
        if step.status == "failed":
            yield f"inputs beside the samples: none could be tried on {name}: {step.effect.splitlines()[0]}"
    words = {"no time": "no time was left to try any", "over share": "none could be tried in its share of the time"}
    for late, phrase in words.items():
        if left := [name for name, step in ends.items() if step.late == late]:
            again = "`enginesmith resume` or `enginesmith prosecute RUN VARIANT` does"
            yield f"inputs beside the samples: {phrase} on {', '.join(left)}; {again}"
    if cut := [name for name, prosecution in given if prosecution.cut]:
        yield f"inputs beside the samples: with more time, `enginesmith resume` tries more on {', '.join(cut)}"
    tried = [(name, prosecution) for name, prosecution in given if prosecution.attempts]
    if not tried:
        return
    attempts = [prosecution.beside_samples for _, prosecution in tried]
    few = f"{min(attempts)} to {max(attempts)}" if min(attempts) < max(attempts) else f"{attempts[0]}"
    wrong = [name for name, prosecution in tried if prosecution.finding]
    outcome = "; none found on which one is wrong" if max(attempts) else ""
    if wrong:
        outcome = f"; wrong on one: {', '.join(wrong)} (`enginesmith prosecute RUN VARIANT` writes the proof)"
    yield f"inputs beside the samples: {few} tried on each variant{outcome}"


def _compare_with_reference(run: Run) -> str:
    """Compare the winner with the fastest setting of PyTorch that was measured; empty if that is not another one."""
    best = run.best_reference
    if best is None or best.variant in (run.winner, run.baseline.id):
        return ""
    other, ratio = f"{best.variant} (the fastest setting of PyTorch tried)", best.speedup
    if ratio is None:
        return f"was measured in too few rounds to compare it with {other}"
    if best.too_noisy:
        return f"has a speed-up over {other} that is {TOO_NOISY}"
    if ratio.low > 1:
        return f"is {ratio.times()} faster than {other}"
    return f"has {ratio.times()} the speed of {other}{' (which may be no difference)' if ratio.high >= 1 else ''}"


def _explain_near_win(run: Run, winner: VariantRecord, batch: int) -> str:
    """Explain why the winner won over another one that it is not measurably faster than; empty if there is none."""
    mine, rules = winner.row(batch), (run.recipe.budgets, batch, run.recipe.min_sqnr_db)
    if run.recipe.objective != "latency" or mine is None:
        return ""
    others = [(row, each) for each in run.variants if each is not winner and (row := each.row(batch))]
    for theirs, record in sorted(others, key=lambda other: other[0].p50_ms or 0.0):
        if verdicts.why_ineligible(record):
            continue
        allowed, quality = run.recipe.budgets.max_drop, record.quality
        holds, best = (
            all(verdict.passed for verdict in verdicts.judge_budgets(each, *rules)) for each in (record, winner)
        )
        if best and not holds:  # it had to lose
            continue
        if not mine.speedup or not theirs.speedup:
            if holds and (mine.p50_ms or 0.0) <= (theirs.p50_ms or 0.0):
                return f"it wins by its lower median; too few rounds to tell whether it is faster than {record.id}"
            continue
        ratio = divide(mine.speedup, theirs.speedup)
        disturbed = mine.speedup_disturbed or theirs.speedup_disturbed
        if ratio.low > 1 and not disturbed:
            continue
        loss = f"{quality.metric} drop {format_metric(quality.drop, '+')}" if quality else ""
        risky = verdicts.may_lose_more(record, allowed) and not verdicts.may_lose_more(winner, allowed)
        if quality and holds and risky:
            most, back = format_metric(quality.seen_high or 0.0, "+"), divide(theirs.speedup, mine.speedup)
            speed = "may be faster" if disturbed or back.too_noisy else f"is {back.times()} as fast"
            other = f"{record.id} ({loss}, and up to {most}) {speed}"
            return f"it wins by its accuracy: {other}, but may lose more than allowed"
        if ratio.median >= 1:
            return f"it wins by its higher speed-up, which is not measurably higher than that of {record.id}"
        if quality and holds:
            return f"it wins by its smaller accuracy drop: {record.id} ({loss}) is not measurably faster"
    return ""


def _compare_latency(record: VariantRecord, baseline: VariantRecord, batch: int) -> str:
    """Compare medians; says ``faster`` only if the interval leaves out that it is not."""
    mine, theirs = record.row(batch), baseline.row(batch)
    if mine is None or (mine.speedup is None and (theirs is None or theirs.p50_ms is None)):
        taken = "was not timed" if mine is None else f"takes {ms(mine.p50_ms)} ms"
        return f"{record.id} {taken} at batch {batch} ({baseline.id} was not measured there)"
    sides = (record, mine), (baseline, theirs)
    disturbed = [each.id for each, row in sides if row and row.mostly_disturbed]
    if mine.speedup is None and disturbed:
        why = f"other programs disturbed most calls of {' and '.join(disturbed)}"
        return f"{record.id} takes {ms(mine.p50_ms)} ms at batch {batch} (no speed-up is known: {why})"
    if mine.speedup is None:
        medians = f"{ms(mine.p50_ms)} ms against {ms(theirs.p50_ms if theirs else None)} ms of {baseline.id}"
        return f"{record.id} takes {medians} at batch {batch}, in too few rounds for an interval"
    times, beside = speedup(record, batch), f"{baseline.id} at batch {batch}"
    if mine.speedup_too_noisy:
        why = " (nearly all calls waited for a core)" if mine.speedup_disturbed else ""
        return f"{record.id} has a speed-up over {beside} that is {TOO_NOISY}{why}"
    if mine.speedup.low > 1:
        return f"{record.id} is {times} faster than {beside}"
    unsure = " (which may be no difference)" if mine.speedup.high >= 1 else ""
    return f"{record.id} has {times} the speed of {beside}{unsure}"


# What became of variants, and why.


def list_reasons(run: Run) -> list[str]:
    """Say what is wrong with variants or left to do: ``names: reason``, variants of one reason together."""
    return [f"{', '.join(map(mark_name, records))}: {reason}" for records, reason in group_by_reason(run)]


def group_by_reason(run: Run) -> list[tuple[list[VariantRecord], str]]:
    """Group the variants that failed, fall short or are left by their reason."""
    records = [(record, record.reason or record.shortfall) for record in (run.baseline, *run.requested)]
    return [(group, mark(run, reason)) for group, reason in _group_alike(records)]


def _group_alike(reasons: Iterable[tuple[VariantRecord, str]]) -> list[tuple[list[VariantRecord], str]]:
    """Group variants with a reason by that, whatever variant it names; it then names the first one."""
    groups = group_values((reason.replace(record.id, "…"), record) for record, reason in reasons if reason)
    return [(records, reason.replace("…", records[0].id)) for reason, records in groups.items()]


def list_remarks(run: Run) -> list[tuple[str, str]]:
    """Say by variant why it is rejected, and whether low precision, pruning and zeros paid."""
    rejected = [(record, f"rejected: {record.rejected}") for record in run.variants if record.rejected]
    remarks = [(record, text) for record in run.variants for text in (*_explain_cut(record), *record.remarks)]
    return [(mark_name(record), mark(run, text)) for record, text in (*rejected, *remarks)]


def _explain_cut(record: VariantRecord) -> Iterator[str]:
    """Tell that a variant is the best of fewer trials than its search would have made."""
    why = record.reasons.get("search")
    if why and record.status in ("built", "measured"):
        words = {"no time": "no time was left", "over share": "a trial took more than its share of the time"}
        short = words.get(record.late_fields.get("search", "")) or shorten_reason(why)
        yield f"the best of {count_words(len(record.search), 'trial')}: the search then ended, as {short}"


# What to know before believing the numbers.


def list_warnings(run: Run) -> list[str]:
    """List what the machine and the run warn of."""
    machine = map(str, run.environment.get("warnings", ()))
    first = [*_warn_of_labels(run), *_warn_of_fixed_batch(run), *_describe_float64(run)]
    fidelity = [*_warn_of_engines(run), *_describe_rounding(run), *_describe_sets(run)]
    return [*machine, *first, *fidelity, *_list_fallbacks(run), *run.model.notes]


def _warn_of_engines(run: Run) -> Iterator[str]:
    """Warn of engines that are much further from the model than the graph in a low precision that they compute."""
    for record in run.requested:
        graphs = dict[tuple[str, int], float]()
        losses = list[tuple[float, float, float]]()
        for entry in record.fidelity if record.status != "failed" else ():
            place, sqnr_db = (entry.point, entry.batch), entry.sqnr_db
            graph = graphs.pop(place, None)
            if sqnr_db is not None and entry.stage.partition("-")[0] in _LOWERING:
                graphs[place] = sqnr_db
            elif sqnr_db is not None and graph and sqnr_db < min(_SUSPECT_DB, graph - _SUSPECT_LOSS_DB):
                losses.append((graph - sqnr_db, graph, sqnr_db))
        if losses:
            _, right, engine = max(losses)
            yield (
                f"{mark_name(record)} is suspect: its graph in {record.precision} has an SQNR of {right:.1f} dB, and "
                f"its engine {engine:.1f} dB: the engine computes a part of it otherwise; `enginesmith prosecute` of "
                "this run and variant looks for the part"
            )


def _describe_rounding(run: Run) -> Iterator[str]:
    """Warn of the variant furthest from the baseline for a difference that only rounding explains."""
    records = (record for record in run.requested if record.status != "failed")
    explained = [(entry, record) for record in records for entry in record.fidelity if entry.rounding_note]
    if explained:
        entry, record = min(explained, key=lambda pair: pair[0].sqnr_db or 0.0)
        yield (
            f"{entry.rounding_note} of {mark_name(record)}, which is beyond the threshold: no difference as small as "
            "that can be judged"
        )


def _describe_sets(run: Run) -> Iterator[str]:
    """Say that outputs were compared as sets of rows, and how many of them have no partner."""
    least = {
        mark_name(record): min(shares)
        for record in run.requested
        if record.status != "failed"
        and (shares := [entry.paired for entry in record.fidelity if entry.paired is not None])
    }
    if least:
        name = min(least, key=lambda each: least[each])
        fewest = f"; the fewest in {name}, {least[name]:.1%}" if least[name] < 1 else ""
        yield (
            "rows that the model chooses by their values, such as boxes, are compared as sets, in any order: nearly "
            f"all need a partner close to them in those of {run.baseline.id}{fewest}"
        )


def _list_fallbacks(run: Run) -> Iterator[str]:
    """Name the nodes of each variant that do not run on the part that its engine is for, as on the CPU."""
    for record in run.variants:
        ran = record.engine_coverage
        if ran and (fallback := describe_fallback(ran.assigned, ran.copies)):
            yield f"{mark_name(record)}: {fallback}"


def _warn_of_labels(run: Run) -> Iterator[str]:
    """Say that the reference is right less often than one that looks at nothing, or never."""
    quality = run.baseline.quality
    if quality and (doubt := quality.explain_doubt()):
        yield f"{run.baseline.id} has a {quality.title} of {format_value(quality.value)}, {doubt}"


def _warn_of_fixed_batch(run: Run) -> Iterator[str]:
    measured = {row.batch for row in run.baseline.latency}
    missing = [batch for batch in run.recipe.batch if batch not in measured]
    if measured and missing:
        at, others = (", ".join(map(str, sorted(sizes))) for sizes in (measured, missing))
        symbol = batch_symbol(run.model.signature) if run.model.signature else None
        range_ = run.recipe.ranges.get(symbol or "")
        reason = f"--shape {symbol}={range_} leaves that out" if range_ else "it has no dynamic batch"
        yield f"{mark_name(run.baseline)} was measured at batch {at}, and not at {others}: {reason}"


def _describe_float64(run: Run) -> Iterator[str]:
    """Say what variants called fp32 compute in where the model computes in float64."""
    exact = [record for record in run.variants if record.precision == _EXACT]
    if any(record.coverage and _main_type(record.coverage.macs) == "fp64" for record in exact):
        layers = {mark_name(record): record.build.layers for record in exact if record.build}
        lower = [name for name, counts in layers.items() if counts and "fp64" not in counts]
        but = f", but for {', '.join(lower)}: the engine computes in float32" if lower else ""
        yield f"the model computes in float64, and so do variants called {_EXACT}{but}"


def _main_type(macs: Mapping[str, float]) -> str:
    return max(macs, key=lambda kind: macs[kind], default="")


def describe_progress(run: Run) -> str:
    """Say how far a run came that was interrupted or has steps for another machine; empty if it is complete."""
    done = sum(step.status != "pending" for step in run.steps)
    return "" if run.complete else f"this run is not complete: {done} of {len(run.steps)} steps have ended"


def list_stops(run: Run) -> list[str]:
    """List the reasons why measuring stopped, each once."""
    return sorted({row.stopped_because for record in run.records for row in record.latency if row.stopped_because})


def list_unreported(run: Run) -> Iterator[str]:
    """Say which figures engines do not report, all fields of one reason together."""
    groups: dict[str, dict[str, None]] = {}
    for record in run.variants:
        for name, reason in (record.build.reasons if record.build else {}).items():
            groups.setdefault(reason, {})[name.removesuffix("_bytes").replace("_", " ")] = None
    for reason, names in groups.items():
        yield f"No {', '.join(names)}: {reason}"


def describe_profiles(run: Run) -> Iterator[str]:
    """Say whose figures each profile has, what profiling cost and what it does not tell; or why there is none."""
    for record in run.records:
        for profile in record.profile:
            row = record.row(profile.batch)
            if profile.total_ms is None:
                parts: tuple[str, ...] = (profile.reasons["total_ms"],)
            else:
                parts = (f"by {profile.source}", profile.overhead(row.p50_ms if row else None), *profile.notes)
            yield f"profile of {mark_name(record)} at batch {profile.batch}: {'; '.join(filter(None, parts))}"


def describe_out_of_memory(run: Run) -> Iterator[str]:
    """Say for each variant that ran out of memory what it asked for, and the largest batch that fits."""
    for record in run.records:
        full = next((row for row in record.latency if row.oom), None)
        if full is None or full.oom is None:
            continue
        fitting = [row.batch for row in record.latency if not row.failure]
        fits = max((batch for batch in fitting if batch < full.batch), default=None)
        request = f"asked for {format_bytes(full.oom.asked_bytes)}" if full.oom.asked_bytes else "out of memory"
        free = f", {format_bytes(full.oom.free_bytes)} free" if full.oom.free_bytes is not None else ""
        back = {True: "; its memory was released", False: "; it is not known whether its memory was released", None: ""}
        largest = f"the largest batch that fits is {fits}" if fits else "no batch fits"
        if larger := [batch for batch in fitting if batch > full.batch]:
            largest = f"batch {larger[-1]} fits, so that other programs may have taken the memory"
        yield f"{mark_name(record)}: {largest}; batch {full.batch} {request}{free}{back[full.oom.given_back]}"


def describe_noise(run: Run) -> Iterator[str]:
    """Say in one sentence what other work on the machine did to the numbers, and what helps."""
    parts = [*_describe_disturbed(run), *_describe_tails(run)]
    if parts:
        yield "; ".join([*parts, NOISE_REMEDY])


def _describe_disturbed(run: Run) -> Iterator[str]:
    """Name speed-ups that tell nothing, or else count medians that are of disturbed calls."""
    rows = [(record, row) for record in run.records for row in record.latency]
    noisy = [f"{mark_name(entry)} at batch {row.batch}" for entry, row in rows if row.speedup_too_noisy]
    shares = [row.disturbed_share for _, row in rows if row.mostly_disturbed]
    if noisy:
        yield f"speed-up of {name_some(noisy, _MOST_NAMED)}: {TOO_NOISY}"
    elif shares and not run.environment.get("busy"):
        waited = f"in up to {max(filter(None, shares)):.0%} of their calls threads waited for a core"
        yield f"{len(shares)} of {len(rows)} measurements were disturbed: {waited}"


def _describe_tails(run: Run) -> Iterator[str]:
    """Explain percentiles that are far above the median by the longest of them."""
    tails = [
        (row.p99_ms / row.p50_ms, mark_name(record), row)
        for record in run.records
        for row in record.latency
        if row.p50_ms and row.p99_ms and row.p99_ms > LONG_TAIL * row.p50_ms
    ]
    if tails:
        _, name, row = max(tails, key=lambda tail: tail[0])
        sentence = f"p99 of {name} at batch {row.batch} is {ms(row.p99_ms)} ms beside a p50 of {ms(row.p50_ms)} ms"
        others = f" ({len(tails) - 1} more like it)" if len(tails) > 1 else ""
        share = row.disturbed_share or 0.0
        waited = f"{share:.0%} of its calls waited while other programs used the cores"
        yield f"{sentence}{others}: {waited if share > _SLOWEST else 'the cause is not known'}"


def list_measurement_notes(run: Run) -> tuple[str, ...]:
    """List what disturbed measurements: other work, too little memory, references that failed; and what was tuned."""
    missing = _describe_missing_references(run)
    return (*describe_noise(run), *describe_out_of_memory(run), *missing, *_describe_tuning(run))


def _describe_tuning(run: Run) -> Iterator[str]:
    tuned = ((record, record.tuning) for record in run.variants if record.tuning and not record.cuda_graphs)
    for record, tuning in tuned:
        for trial in tuning.trials:
            gain = trial.speedup.times() if trial.speedup else shorten_reason(trial.failure) or "too few rounds to tell"
            suffix = " (kept)" if f"{trial.option}={trial.value}" in tuning.kept else ""
            yield f"{mark_name(record)}, tuned: {trial.option}={trial.value}: {gain}{suffix}"
        if tuning.confirmation:
            others = (f"; at batch {batch}: {speedup.times()}" for batch, speedup in tuning.other_batches.items())
            times = tuning.confirmation.times() + "".join(others)
            yield f"{mark_name(record)}, tuned: together, measured once more: {times}"
        if tuning.dropped:
            yield f"{mark_name(record)}, tuned: the recipe's options are used instead of {tuning.dropped}"
        if tuning.untried:
            longer = f"run it again with --replace and a longer {'--tune' if run.recipe.tune_seconds else '--time'}"
            remedy = "`enginesmith resume` goes on" if tuning.cut else longer
            yield f"{mark_name(record)}, tuned: no time was left for {', '.join(tuning.untried)}: {remedy}"


def _describe_missing_references(run: Run) -> Iterator[str]:
    missing = [record for record in run.variants if record.reference and record.status != "measured"]
    for records, reason in _group_alike((record, record.reason) for record in missing):
        names = ", ".join(record.id for record in records)
        yield f"not measured for comparison: {names}: {shorten_reason(reason, 300)}"


def list_notes(run: Run) -> list[str]:
    """List what to know before believing the numbers, the most important first."""
    first = [*_warn_of_labels(run), *_warn_of_fixed_batch(run), *_describe_float64(run)]
    first += [*_warn_of_engines(run), *_describe_rounding(run), *_describe_sets(run)]
    warnings = map(str, run.environment.get("warnings", ()))
    return [*first, *run.model.notes, *describe_noise(run), *warnings, *_describe_missing_references(run)]
