"""Tabulate and sum up a fleet once, for the terminal, fleet.md and fleet.html."""

from collections.abc import Iterator, Sequence

from enginesmith.pipeline.measure.statistics import TOO_NOISY
from enginesmith.pipeline.report.comparison import format_latency, format_number, format_percent, judge
from enginesmith.pipeline.report.sentences import SYNTHETIC
from enginesmith.pipeline.report.tables import (
    Number,
    Table,
    Tone,
    drop_cell,
    make_table,
    number_cell,
    size_cell,
    time_cell,
)
from enginesmith.pipeline.results import verdicts
from enginesmith.pipeline.results.comparison import warn_of_chance
from enginesmith.pipeline.results.fleet import EntryChange, EntryRecord, EntryStatus, Failure, FleetRecord, Winner
from enginesmith.pipeline.units import format_seconds, group_values, ms, name_some

PAGE = "report.html"
"""File of a run directory that entries link to."""
_STATUSES: dict[EntryStatus, tuple[str, str, Tone]] = {
    "done": ("done", "", "good"),
    "breached": ("over budget", "over budget", "bad"),
    "failed": ("failed", "failed", "bad"),
    "lacking": ("not available", "on targets that are not available", "caution"),
    "pending": ("not ended", "not ended", "caution"),
}
"""Status → its word in tables, its words in the sentence that counts those that are not done, and its tone."""
_CHANGES: dict[str, Tone] = {"slower": "bad", "faster": "good"}
_UNCOMPARED = {
    "new": "not in the last fleet",
    "run gone": "its run is no longer there",
    "no run then": "there was no run",
    "no run now": "there is no run now",
    "reused": "reused",
    "other machine": "other machine",
}
"""Why an entry is compared with none, in the few words of a cell."""
_MOST_NAMED = 8


def summarize(record: FleetRecord) -> str:
    """Sum up the fleet in one sentence."""
    total = len(record.entries)
    winners = sum(entry.winner is not None for entry in record.entries)
    counts = {words: len(record.having(status)) for status, (_, words, _) in _STATUSES.items() if words}
    rest = "; ".join(f"{count} {words}" for words, count in counts.items() if count)
    return f"{winners} of {total} {'entry has' if total == 1 else 'entries have'} a winner{'; ' if rest else ''}{rest}."


def tabulate_entries(record: FleetRecord) -> Table:
    """List each entry with its winner's numbers, and links to the pages of runs."""
    rows = [_entry_row(entry) for entry in record.entries]
    changed = [row["since the last fleet"].partition(" ")[0] for row in rows]
    tones: dict[tuple[int, int], Tone] = {}
    for index, entry in enumerate(record.entries):
        columns = list(rows[index])
        tones[index, columns.index("status")] = _STATUSES[entry.status][2]
        if changed[index] in _CHANGES:
            tones[index, columns.index("since the last fleet")] = _CHANGES[changed[index]]
    caption = "All entries; latency is that of the winner at the batch size that decides."
    links = _link_first(record.entries)
    return make_table("entries", caption, rows, sortable=True, searched=True, links=links, tones=tones)


def _link_first(entries: Sequence[EntryRecord]) -> dict[tuple[int, int], str]:
    return {(index, 0): f"{entry.run}/{PAGE}" for index, entry in enumerate(entries) if entry.run}


def _entry_row(entry: EntryRecord) -> dict[str, str]:
    winner = entry.winner
    speedup = winner.speedup if winner else None
    broken = [verdicts.format_title(verdict.budget) for verdict in entry.verdicts if not verdict.passed]
    return {
        "entry": entry.name,
        "status": describe_status(entry),
        "winner": _name(winner) if winner else "–",
        "batch": number_cell(winner.batch if winner else None),
        "speed-up [95 %]": Number(speedup.times(), speedup.median) if speedup else "–",
        "p50 ms": time_cell(winner.p50_ms if winner else None),
        "since the last fleet": describe_change(entry.since_last),
        "peak memory": size_cell(winner.peak_bytes if winner else None),
        "size": size_cell(winner.bytes if winner else None),
        "drop": drop_cell(winner.drop if winner else None),
        "budgets": f"broken: {', '.join(broken)}" if broken else "met" if entry.verdicts else "–",
    }


def _name(winner: Winner) -> str:
    return f"{winner.id}*" if winner.synthetic_calibration else winner.id


def describe_status(entry: EntryRecord) -> str:
    """Say how an entry ended, in a few words."""
    failed = entry.variants.get("failed", 0)
    some = f", {failed} of {sum(entry.variants.values())} variants failed" if failed and entry.status == "done" else ""
    return f"{_STATUSES[entry.status][0]}{', reused' if entry.taken_from else ''}{some}"


def describe_change(change: EntryChange | None) -> str:
    """Say how the latency of an entry's winner changed since the last fleet's winner."""
    if change is None:
        return "–"
    if change.pair is None:
        return _UNCOMPARED[change.cause] if change.cause else change.note
    now = change.pair.after.winner
    if now is None or change.winner is None:
        return f"no winner {'then' if now else 'now' if change.winner else 'then either'}"
    beside = change.winners or next((variant for variant in change.pair.variants if variant.id == now), None)
    row = beside.latency[0] if beside and beside.latency else None
    if row is None:
        return "not measured"
    if row.change.median == row.change.low == row.change.high == 1.0:
        return "the same measurement"
    was = f", was {change.winner}" if change.winners else ""
    return f"{judge(row.change)} {format_percent(row.change)}{was}".replace(" –", "")


def tabulate_changes(record: FleetRecord, *, certain: bool) -> Table:
    """List numbers beside those of the last fleet.

    Either all that intervals and spreads tell from chance, or the rest of what there is of winners.
    """
    changes = list(_list_changes(record, certain=certain))
    caption = "Winners' other numbers, which are the same, or which may differ by chance."
    if certain:
        caption = "What differs for certain: its interval, or its spread, leaves out that nothing changed."
    rows, links = (row for row, _ in changes), _link_first([entry for _, entry in changes])
    name = "changes" if certain else "unchanged"
    return make_table(name, caption, rows, sortable=True, searched=True, links=links)


def _list_changes(record: FleetRecord, *, certain: bool) -> Iterator[tuple[dict[str, str], EntryRecord]]:
    heads = ("number", "last fleet", "now", "change [95 %]", "judgment")
    for entry in record.entries:
        change = entry.since_last
        now = change.pair.after.winner if change and change.pair else None
        for variant in change.compared if change else ():
            succeeded = change is not None and variant is change.winners
            name = f"{now}, after {variant.id}" if succeeded else variant.id
            is_winner = succeeded or variant.id == now
            numbers = [(row.change.significant, format_latency(row)) for row in variant.latency]
            numbers += [(number.significant, format_number(number)) for number in variant.numbers]
            for significant, cells in numbers:
                if set(cells[1:3]) != {"–"} and (bool(significant) if certain else is_winner and not significant):
                    yield {"entry": entry.name, "variant": name, **dict(zip(heads, cells, strict=True))}, entry


def list_changed(record: FleetRecord, *, slower: bool) -> list[EntryRecord]:
    """List entries with a variant that became slower, or faster, for certain."""
    return [entry for entry in record.entries if any((ratio > 1) == slower for ratio in _list_certain_ratios(entry))]


def _list_certain_ratios(entry: EntryRecord) -> Iterator[float]:
    compared = entry.since_last.compared if entry.since_last else ()
    changed = (row.change for variant in compared for row in variant.latency)
    return (change.median for change in changed if change.significant and change.median is not None)


def describe_last(record: FleetRecord) -> Iterator[str]:
    """Describe the fleet that this one is compared with, and what cannot be compared, a sentence each."""
    if record.last is None:
        yield "there is no earlier fleet of this file beside this one"
        return
    yield f"compared with {record.last.path}, started {record.last.created}"
    if record.last.without:
        yield f"no longer there: {name_some(record.last.without, _MOST_NAMED)}"
    notes: dict[str, list[str]] = {}
    for entry in record.entries:
        if entry.since_last and entry.since_last.pair is None:
            notes.setdefault(entry.since_last.note, []).append(entry.name)
        if entry.done_because:
            notes.setdefault(f"done again: {entry.done_because}", []).append(entry.name)
        for note in dict.fromkeys(_list_notes(entry.since_last)):
            notes.setdefault(note, []).append(entry.name)
    for note, names in notes.items():
        yield f"{name_some(names, _MOST_NAMED)}: {note}"
    changes = (entry.since_last for entry in record.entries if entry.since_last)
    yield from warn_of_chance(variant for change in changes for variant in change.compared)


def _list_notes(change: EntryChange | None) -> Iterator[str]:
    """List what else changed, and how the winner's latency was judged."""
    if change is None or change.pair is None:
        return
    for name, fields in change.pair.changed.sections:
        if fields and name in ("model", "versions"):
            yield f"{name} changed: {', '.join(field.name for field in fields)}"
    for variant in change.compared:
        if variant is change.winners or variant.id == change.pair.after.winner:
            yield from (row.change.note for row in variant.latency if row.change.note)


def tabulate_failures(record: FleetRecord) -> Table:
    """List what failed, is lacking or breaks a budget and why, each reason once, with links to pages and logs."""
    failures = list(_list_failures(record))
    links = _link_first([entry for _, entry in failures])
    for index, (row, _) in enumerate(failures):
        if row["log"] != "–":
            links[index, len(row) - 1] = row["log"]
    caption = "What failed, including single variants."
    return make_table("failures", caption, (row for row, _ in failures), links=links)


def _list_failures(record: FleetRecord) -> Iterator[tuple[dict[str, str], EntryRecord]]:
    for entry in record.entries:
        whole = next((failure for failure in entry.failures if not failure.variant), None)
        variants = [failure for failure in entry.failures if failure.variant]
        if whole is not None:
            variants = [failure for failure in variants if whole.reason not in failure.reason]
            yield _failure_row(entry, ["all"], _shorten_reason(whole, variants)), entry
        elif entry.status not in ("done", "pending"):
            yield _failure_row(entry, ["all"], Failure(variant="", reason=entry.reason, remedy=entry.remedy)), entry
        alike = group_values((failure.model_copy(update={"variant": "any"}), failure.variant) for failure in variants)
        for failure, names in alike.items():
            yield _failure_row(entry, names, failure), entry


def _shorten_reason(whole: Failure, variants: Sequence[Failure]) -> Failure:
    """Leave out of an entry's reason what is said of its variants beside it."""
    reason, logs = whole.reason, {failure.log for failure in variants}
    for failure in variants:
        names = ", ".join(other.variant for other in variants if other.reason == failure.reason)
        reason = reason.replace(f"\n  {names}: {failure.reason}", "")
    log = None if whole.log in logs else whole.log
    return whole.model_copy(update={"reason": reason.removesuffix(":"), "log": log})


def _failure_row(entry: EntryRecord, names: Sequence[str], failure: Failure) -> dict[str, str]:
    return {
        "entry": entry.name,
        "variant": ", ".join(names),
        "class": failure.failure or ("failed" if failure.variant else _STATUSES[entry.status][0]),
        "reason": failure.reason or "–",
        "what to do": failure.remedy or "–",
        "log": failure.log or "–",
    }


def group_failures(record: FleetRecord) -> Iterator[tuple[str, ...]]:
    """List failures with one row for all entries that share a reason."""
    alike = group_values((tuple(rest), name) for name, *rest in tabulate_failures(record).rows)
    yield from ((name_some(names, _MOST_NAMED), *rest) for rest, names in alike.items())


def tabulate_matrix(record: FleetRecord) -> Table:
    """List winners by model and target, with links to the pages of runs."""
    models = list(dict.fromkeys(entry.model for entry in record.entries))
    targets = list(dict.fromkeys(entry.target for entry in record.entries))
    by_pair = {(entry.model, entry.target): entry for entry in record.entries}
    rows = [{"model": model, **{target: _cell(by_pair.get((model, target))) for target in targets}} for model in models]
    places = {(models.index(model), targets.index(target) + 1): entry for (model, target), entry in by_pair.items()}
    links = {place: f"{entry.run}/{PAGE}" for place, entry in places.items() if entry.run}
    tones = {place: _STATUSES[entry.status][2] for place, entry in places.items()}
    caption = "Winners by model and target, with their speed-up over the baseline there."
    return make_table("matrix", caption, rows, links=links, tones=tones)


def _cell(entry: EntryRecord | None) -> str:
    if entry is None:
        return "–"
    if entry.winner is None:
        return describe_status(entry)
    times = entry.winner.speedup
    number = f"{ms(entry.winner.p50_ms)} ms" if entry.winner.p50_ms else ""
    if times:
        number = TOO_NOISY if times.too_noisy else f"{times.median:.2f}×"
    return f"{_name(entry.winner)} {number}".strip()


def list_facts(record: FleetRecord) -> dict[str, str]:
    """List the counts that are said in short at the top, by term."""
    steps, reused = (sum(getattr(entry, name) for entry in record.entries) for name in ("steps", "reused"))
    facts = {
        "entries": str(len(record.entries)),
        "winners": str(sum(entry.winner is not None for entry in record.entries)),
        "failed": str(len(record.having("failed"))),
        "not available": str(len(record.having("lacking"))),
        "budgets broken": str(len(record.having("breached"))),
    }
    if record.last is not None:
        facts |= {word: str(len(list_changed(record, slower=word == "slower"))) for word in ("slower", "faster")}
    if taken := sum(entry.taken_from is not None for entry in record.entries):
        facts["entries reused"] = str(taken)
    facts["steps"] = f"{steps:,}, of which {reused:,} shared or from the store"
    facts["time"] = format_seconds(record.seconds)
    return facts


def list_footnotes(record: FleetRecord) -> list[str]:
    """Explain stars, and names that differ from the fleet file's, where there are any."""
    synthetic = any(entry.winner and entry.winner.synthetic_calibration for entry in record.entries)
    names = {entry.model: entry.name.partition("@")[0] for entry in record.entries}
    renamed = [f"{name} for {model}" for model, name in names.items() if name != model]
    return [
        *([SYNTHETIC] if synthetic else []),
        *([f"entries are called as their folders: {name_some(renamed, _MOST_NAMED)}"] if renamed else []),
    ]
