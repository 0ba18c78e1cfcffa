"""Tabulate what was pruned, and how training went."""

from collections import Counter
from collections.abc import Iterator, Sequence

from enginesmith.pipeline.frameworks.records import PrunedGroup, PruningFacts
from enginesmith.pipeline.passes.finetune.options import Point, Recovery
from enginesmith.pipeline.report.tables import Table, make_table, number_cell
from enginesmith.pipeline.results.run import Run, VariantRecord
from enginesmith.pipeline.units import format_metric

_MOST_POINTS = 500


def list_pruned(run: Run) -> Iterator[VariantRecord]:
    """Iterate over one variant for each pruned model."""
    prune_names: set[str] = set()
    for record in run.variants:
        if record.prune and record.pruning and record.prune not in prune_names:
            prune_names.add(record.prune)
            yield record


def tabulate_pruning(run: Run) -> Table:
    """List each time that a model was pruned."""
    caption = "What pruning removed"
    return make_table("pruned", caption, (row for record in list_pruned(run) for row in _pruning_rows(record)))


def _pruning_rows(record: VariantRecord) -> Iterator[dict[str, str]]:
    for index, facts in enumerate(record.pruning):
        yield {
            "pruned to": f"{record.prune}, step {index + 1}" if len(record.pruning) > 1 else record.prune or "",
            "ranked by": f"{facts.importance}, {facts.scope}",
            "channels": f"{facts.channels_before} → {facts.channels_after}",
            "MACs left": _format_left(facts.macs_before, facts.macs_after),
            "parameters left": _format_left(facts.parameters_before, facts.parameters_after),
        }


def _format_left(before: int, after: int) -> str:
    return f"{after / before:.1%}" if before else "–"


def tabulate_groups(facts: PruningFacts, name: str = "", caption: str = "") -> Table:
    """List the channels or heads of each group of layers before and after pruning; rows add up to all channels."""
    rows = [(group.root, _name_unit(group), group.before, group.after) for group in facts.groups]
    rest = facts.channels_before - sum(group.before * group.width for group in facts.groups)
    rows += [("all others", "channel", rest, rest)] if rest > 0 else []
    keys = ("group", "unit", "before", "after")
    return make_table(name, caption, (dict(zip(keys, map(str, row), strict=True)) for row in rows))


def _name_unit(group: PrunedGroup) -> str:
    return f"{group.unit} of {group.width} channels" if group.unit == "head" else group.unit


def _list_trained(run: Run) -> Iterator[tuple[str, Recovery]]:
    """Iterate over each training: the name of what was trained, and the record."""
    names: set[str] = set()
    for record in run.variants:
        turns: Counter[str] = Counter()
        for recovery in record.recovery:
            turns[recovery.subject] += 1
            name = _name_trained(record, recovery, turns[recovery.subject])
            if name not in names:
                names.add(name)
                yield name, recovery


def _name_trained(record: VariantRecord, recovery: Recovery, turn: int) -> str:
    if recovery.subject == "int8":
        return record.id
    changes = (record.sparsity,) if recovery.subject == "sparse" else (record.prune,)
    several = sum(other.subject == recovery.subject for other in record.recovery) > 1
    return f"{', '.join(filter(None, changes)) or record.id}{f', turn {turn}' if several else ''}"


def tabulate_training(run: Run) -> Table:
    """List what was trained, and what that brought back."""
    rows = (
        {
            "trained": name,
            "method": recovery.method,
            "steps": f"{recovery.steps}: {recovery.outcome}",
            "metric": recovery.metric,
            "before": format_metric(recovery.before),
            "after": format_metric(recovery.after),
            "of": format_metric(recovery.teacher),
            "samples held out": str(recovery.held_back),
        }
        for name, recovery in _list_trained(run)
    )
    return make_table("trained", "What training brought back, on held-out samples", rows)


def tabulate_training_steps(run: Run) -> Table:
    """List loss and metric by step of each training."""
    rows = (
        {
            "trained": name,
            "step": str(point.step),
            "loss": number_cell(point.loss, ".4g"),
            "metric": format_metric(point.metric),
            "learning rate": f"{point.learning_rate:.2g}",
        }
        for name, recovery in _list_trained(run)
        for point in thin_curve(recovery.curve)
    )
    return make_table("training-by-step", "How training went", rows)


def thin_curve(curve: Sequence[Point]) -> Sequence[Point]:
    """Choose as many points as can be told apart, the first and the last among them."""
    if len(curve) <= _MOST_POINTS:
        return curve
    return [curve[round(index * (len(curve) - 1) / (_MOST_POINTS - 1))] for index in range(_MOST_POINTS)]
