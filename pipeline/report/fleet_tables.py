"""The tables and sentences of a fleet: one definition for the terminal, fleet.md and the page."""

from collections.abc import Iterator, Sequence

from enginesmith.pipeline.report.comparison import judged, latency_row, number_row, percent
from enginesmith.pipeline.report.tables import MADE_UP
from enginesmith.pipeline.results import budgets
from enginesmith.pipeline.results.fleet import EntryChange, EntryRecord, EntryStatus, Failure, FleetRecord, Winner
from enginesmith.pipeline.units import format_bytes, format_seconds, ms

ENTRIES = (
    *("entry", "status", "winner", "batch", "speed-up [95 %]", "p50 ms", "since the last fleet"),
    *("peak memory", "size", "drop", "budgets"),
)
CHANGES = ("entry", "variant", "number", "last fleet", "now", "change [95 %]", "judgement")
FAILURES = ("entry", "variant", "class", "reason", "what to do", "log")
PAGE = "report.html"
"""What a run directory is read in."""
_WORDS: dict[EntryStatus, str] = {
    "done": "done",
    "breached": "over budget",
    "lacking": "lacking",
    "failed": "failed",
    "pending": "not ended",
}
_COUNTED: dict[EntryStatus, str] = {
    "breached": "over budget",
    "failed": "failed",
    "lacking": "lacking what the target asks for",
    "pending": "not ended",
}
_LONGEST, _MOST_NAMED = 160, 8
_EXPECTED = 20
"""Intervals of 95 % from which one is expected to leave out what is true by chance."""


def headline(record: FleetRecord) -> str:
    """The fleet in one sentence."""
    total = len(record.entries)
    winners = sum(one.winner is not None for one in record.entries)
    counts = {word: len(record.having(status)) for status, word in _COUNTED.items()}
    rest = "; ".join(f"{count} {word}" for word, count in counts.items() if count)
    said = f"{winners} of {total} {'entry has' if total == 1 else 'entries have'} a winner"
    return f"{said}{'; ' if rest else ''}{rest}."


def rows(record: FleetRecord) -> list[tuple[str, ...]]:
    """A row for each entry; columns as in :data:`ENTRIES`."""
    return [_row(one) for one in record.entries]


def links(record: FleetRecord) -> list[str]:
    """For each of these rows the page of its run, from the fleet's folder; empty where there is none."""
    return [page(one) for one in record.entries]


def page(entry: EntryRecord) -> str:
    """The page of an entry's run, from the fleet's folder."""
    return f"{entry.run}/{PAGE}" if entry.run else ""


def _row(entry: EntryRecord) -> tuple[str, ...]:
    found = entry.winner
    first, changed, held = (entry.name, status(entry)), since(entry.since_last), _budgets(entry)
    if found is None:
        return (*first, *("–" * 4), changed, *("–" * 3), held)
    numbers = (_marked(found), str(found.batch), _speedup(found), ms(found.p50_ms))
    drop = "–" if found.drop is None else f"{found.drop:+.4f}"
    return (*first, *numbers, changed, format_bytes(found.peak_bytes), format_bytes(found.bytes), drop, held)


def _marked(found: Winner) -> str:
    return f"{found.id}*" if found.synthetic_calibration else found.id


def _speedup(found: Winner) -> str:
    if found.speedup is None:
        return "–"
    return found.speedup.times()


def _budgets(entry: EntryRecord) -> str:
    if not entry.verdicts:
        return "–"
    broken = [budgets.format_title(one.budget) for one in entry.verdicts if not one.passed]
    return f"broken: {', '.join(broken)}" if broken else "met"


def status(entry: EntryRecord) -> str:
    """How an entry ended, in a few words."""
    failed = entry.variants.get("failed", 0)
    some = f", {failed} of {sum(entry.variants.values())} variants failed" if failed and entry.status == "done" else ""
    return f"{_WORDS[entry.status]}{', taken over' if entry.taken_from else ''}{some}"


def since(change: EntryChange | None) -> str:
    """What became of an entry's latency since the last fleet: of its winner now, beside the winner then."""
    if change is None:
        return "–"
    if change.pair is None:
        return change.note.partition(":")[0]
    now = change.pair.after.winner
    if now is None or change.winner is None:
        return f"no winner {'then' if now else 'now' if change.winner else 'then either'}"
    beside = change.winners or next((one for one in change.pair.variants if one.id == now), None)
    row = beside.latency[0] if beside and beside.latency else None
    if row is None:
        return "not measured"
    if row.change.median == row.change.low == row.change.high == 1.0:
        return "the same measurement"
    was = f", was {change.winner}" if change.winners else ""
    return f"{judged(row.change)} {percent(row.change)}{was}".replace(" –", "")


def changes(record: FleetRecord, *, certain: bool) -> Iterator[tuple[tuple[str, ...], EntryRecord]]:
    """Numbers beside those of the last fleet; columns as in :data:`CHANGES`.

    Either all that intervals and spreads tell from chance, or the rest of what there is of winners.
    """
    for entry in record.entries:
        change = entry.since_last
        for variant in change.compared if change else ():
            succeeded = change is not None and variant is change.winners
            now = change.pair.after.winner if change and change.pair else None
            name = f"{now}, after {variant.id}" if succeeded else variant.id
            ofwinner = succeeded or variant.id == now
            found = [(row.change.significant, latency_row(row)) for row in variant.latency]
            found += [(number.significant, number_row(number)) for number in variant.numbers]
            for significant, cells in found:
                if set(cells[1:3]) != {"–"} and (bool(significant) if certain else ofwinner and not significant):
                    yield (entry.name, name, *cells), entry


def slower(record: FleetRecord) -> list[EntryRecord]:
    """Entries with a variant that became slower for certain."""
    return [one for one in record.entries if any(ratio > 1 for ratio in _certain(one))]


def faster(record: FleetRecord) -> list[EntryRecord]:
    """Entries with one that became faster."""
    return [one for one in record.entries if any(ratio < 1 for ratio in _certain(one))]


def _certain(entry: EntryRecord) -> Iterator[float]:
    compared = entry.since_last.compared if entry.since_last else ()
    changed = (row.change for variant in compared for row in variant.latency)
    return (one.median for one in changed if one.significant and one.median is not None)


def last(record: FleetRecord) -> Iterator[str]:
    """What the fleet is held against, and what of it cannot be compared, a sentence each."""
    if record.last is None:
        yield "there is no earlier fleet of this file beside this one"
        return
    yield f"held against {record.last.path}, begun {record.last.created}"
    if record.last.without:
        yield f"no longer there: {_few(record.last.without)}"
    notes: dict[str, list[str]] = {}
    for entry in record.entries:
        if entry.since_last and entry.since_last.pair is None:
            notes.setdefault(entry.since_last.note, []).append(entry.name)
        if entry.done_because:
            notes.setdefault(f"done again: {entry.done_because}", []).append(entry.name)
        for note in dict.fromkeys(_notes(entry.since_last)):
            notes.setdefault(note, []).append(entry.name)
    for note, names in notes.items():
        yield f"{_few(names)}: {note}"
    count = sum(
        row.change.basis is not None and row.change.low is not None
        for entry in record.entries
        for variant in (entry.since_last.compared if entry.since_last else ())
        for row in variant.latency
    )
    if count >= _EXPECTED:
        yield f"of {count} intervals of 95 %, {count / _EXPECTED:.0f} are expected to leave out no change by chance"


def _notes(change: EntryChange | None) -> Iterator[str]:
    """What else changed, and how the winner's latency was judged."""
    if change is None or change.pair is None:
        return
    for name, fields in change.pair.changed.sections:
        if fields and name in ("model", "versions"):
            yield f"{name} changed: {', '.join(one.name for one in fields)}"
    for variant in change.compared:
        if variant is change.winners or variant.id == change.pair.after.winner:
            yield from (row.change.note for row in variant.latency if row.change.note)


def _few(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more


def failures(record: FleetRecord) -> Iterator[tuple[tuple[str, ...], EntryRecord]]:
    """What failed, is lacking or breaks a budget, and why, each reason once; columns as in :data:`FAILURES`."""
    for entry in record.entries:
        whole = next((one for one in entry.failures if not one.variant), None)
        variants = [one for one in entry.failures if one.variant and not (whole and whole.reason in one.reason)]
        if whole is not None:
            yield _failure(entry, ["all"], _shortened(whole, variants)), entry
        elif entry.status not in ("done", "pending"):
            yield _failure(entry, ["all"], Failure(variant="", reason=entry.reason, remedy=entry.remedy)), entry
        alike: dict[Failure, list[str]] = {}
        for one in variants:
            alike.setdefault(one.model_copy(update={"variant": "any"}), []).append(one.variant)
        for one, names in alike.items():
            yield _failure(entry, names, one), entry


def _shortened(whole: Failure, variants: Sequence[Failure]) -> Failure:
    """Why an entry came to nothing, without what is told of its variants beside it."""
    reason, logs = whole.reason, {one.log for one in variants}
    for one in variants:
        reason = reason.replace(f"\n  {one.variant}: {one.reason}", "")
    log = None if whole.log in logs else whole.log
    return whole.model_copy(update={"reason": reason.removesuffix(":"), "log": log})


def _failure(entry: EntryRecord, names: Sequence[str], one: Failure) -> tuple[str, ...]:
    kind = one.failure or ("failed" if one.variant else _WORDS[entry.status])
    return entry.name, ", ".join(names), kind, one.reason or "–", one.remedy or "–", one.log or "–"


def told_once(record: FleetRecord) -> Iterator[tuple[str, ...]]:
    """The same where entries share a reason, as those of one model do: one row for all of them."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for (name, *rest), _ in failures(record):
        alike.setdefault(tuple(rest), []).append(name)
    yield from ((_few(names), *rest) for rest, names in alike.items())


def matrix(record: FleetRecord) -> tuple[tuple[str, ...], list[tuple[str, ...]], dict[tuple[int, int], str]]:
    """Models by targets: columns, rows, and the pages that cells lead to."""
    models = list(dict.fromkeys(one.model for one in record.entries))
    targets = list(dict.fromkeys(one.target for one in record.entries))
    by_pair = {(one.model, one.target): one for one in record.entries}
    found: dict[tuple[int, int], str] = {}
    lines: list[tuple[str, ...]] = []
    for number, model in enumerate(models):
        cells = [model]
        for column, target in enumerate(targets, start=1):
            entry = by_pair.get((model, target))
            cells.append(_cell(entry) if entry else "–")
            if entry and (where := page(entry)):
                found[number, column] = where
        lines.append(tuple(cells))
    return ("model", *targets), lines, found


def _cell(entry: EntryRecord) -> str:
    if entry.winner is None:
        return status(entry)
    times = entry.winner.speedup
    number = f"{times.median:.2f}×" if times else f"{ms(entry.winner.p50_ms)} ms" if entry.winner.p50_ms else ""
    return f"{_marked(entry.winner)} {number}".strip()


def facts(record: FleetRecord) -> dict[str, str]:
    """What is said in short at the top: term → text."""
    steps, reused = (sum(getattr(one, name) for one in record.entries) for name in ("steps", "reused"))
    found = {
        "entries": str(len(record.entries)),
        "winners": str(sum(one.winner is not None for one in record.entries)),
        "failed": str(len(record.having("failed"))),
        "lacking": str(len(record.having("lacking"))),
        "budgets broken": str(len(record.having("breached"))),
    }
    if record.last is not None:
        found |= {"slower": str(len(slower(record))), "faster": str(len(faster(record)))}
    if taken := sum(one.taken_from is not None for one in record.entries):
        found["taken over"] = str(taken)
    found["steps"] = f"{steps:,}, of which {reused:,} shared or from the store"
    found["time"] = format_seconds(record.seconds)
    return found


def footnotes(record: FleetRecord) -> list[str]:
    """What stars mean, and who is called otherwise than in the fleet file, where there are any."""
    found = [MADE_UP] if any(one.winner and one.winner.synthetic_calibration for one in record.entries) else []
    names = {one.model: one.name.partition("@")[0] for one in record.entries}
    otherwise = [f"{name} for {model}" for model, name in names.items() if name != model]
    return [*found, f"entries are called as their folders: {_few(otherwise)}"] if otherwise else found


def short(text: str, longest: int = _LONGEST) -> str:
    """The first line of a text, not too long."""
    first = text.strip().partition("\n")[0]
    return first if len(first) <= longest else f"{first[: longest - 1]}…"
