"""Tables of models that were made smaller: what was pruned, and how training them back went."""

from collections.abc import Iterator

from enginesmith.pipeline.pruning.facts import Facts
from enginesmith.pipeline.recovery.record import Recovery
from enginesmith.pipeline.run import Run, VariantRecord

MODELS = ("pruned to", "ranked by", "channels", "MACs left", "parameters left", "trained back", "on held-back samples")
GROUPS = ("group", "unit", "before", "after")
CURVE = ("step", "loss", "metric", "learning rate")


def pruned(run: Run) -> Iterator[VariantRecord]:
    """One variant for each pruned model."""
    seen: set[str] = set()
    for record in run.variants:
        if record.prune and record.pruning and record.prune not in seen:
            seen.add(record.prune)
            yield record


def models(run: Run) -> list[tuple[str, ...]]:
    """A row for each time that a model was pruned; columns as in :data:`MODELS`."""
    return [row for record in pruned(run) for row in _turns(record)]


def _turns(record: VariantRecord) -> Iterator[tuple[str, ...]]:
    several = len(record.pruning) > 1
    for index, facts in enumerate(record.pruning):
        back = record.recovery[index] if index < len(record.recovery) else None
        yield (
            f"{record.prune}, step {index + 1}" if several else record.prune or "",
            f"{facts.importance}, {facts.scope}",
            f"{facts.channels_before} → {facts.channels_after}",
            _left(facts.macs_before, facts.macs_after),
            _left(facts.parameters_before, facts.parameters_after),
            f"{back.method}, {back.steps} steps: {back.reason}" if back else "no",
            f"{back.metric} {back.before:.4f} → {back.after:.4f} (dense {back.teacher:.4f})" if back else "–",
        )


def _left(before: int, after: int) -> str:
    return f"{after / before:.1%}" if before else "–"


def groups(facts: Facts) -> list[tuple[str, ...]]:
    """What each group of layers lost; columns as in :data:`GROUPS`."""
    return [(one.root, one.unit, str(one.before), str(one.after)) for one in facts.groups]


def curve(recovery: Recovery) -> list[tuple[str, ...]]:
    """How training went; columns as in :data:`CURVE`."""
    return [
        (str(point.step), "–" if point.loss is None else f"{point.loss:.4g}", f"{point.metric:.4f}")
        + (f"{point.learning_rate:.2g}",)
        for point in recovery.curve
    ]
