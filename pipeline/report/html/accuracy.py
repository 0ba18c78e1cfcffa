"""Render accuracy and what explains it: fidelity by stage, sensitivity, precisions, and what was made smaller."""

from collections.abc import Iterator

from enginesmith.pipeline.explain import claimed
from enginesmith.pipeline.report import proof, smaller, tables
from enginesmith.pipeline.report.html.blocks import Block, Folded, Table, Words, filled, folded, points, table
from enginesmith.pipeline.report.html.glance import calibration
from enginesmith.pipeline.report.html.placing import Placed
from enginesmith.pipeline.run import Run, VariantRecord

_NAMED = 3
"""Variants that are named where many have the same assignment."""


def render_fidelity(run: Run, placed: Placed) -> tuple[Block, ...]:
    """List the distance to the baseline's outputs, and the metric."""
    data = run.model.data or "unknown"
    lost = f"Where each variant came furthest from {run.baseline.id}, stage by stage at the worst shape"
    judged = f"The metric on {run.recipe.data or 'labelled data'}; the drop is paired by sample"
    compared = f"Outputs against those of {run.baseline.id} on {data} data, by stage and shape"
    quality = table("quality", judged, proof.QUALITY, proof.quality(run), sortable=True)
    return (
        *filled(table("lost", lost, proof.LOST, proof.lost(run), sortable=True)),
        *(filled(quality) or (placed.why(run, "quality", "No metric was taken"),)),
        *placed.under("fidelity"),
        *folded(
            "Every comparison", *filled(table("compared", compared, proof.FIDELITY, proof.fidelity(run), searched=True))
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
    models = filled(table("pruned", caption, smaller.MODELS, smaller.models(run)))
    if not models:
        asked = ", ".join(run.recipe.prune)
        return (Words(f"No pruned model came out: {asked} was asked for." if asked else "Nothing was to be pruned."),)
    return (*models, *placed.under("recovery"), *_groups(run))


def _groups(run: Run) -> Iterator[Folded]:
    for place, record in enumerate(smaller.pruned(run)):
        for index, facts in enumerate(record.pruning):
            title = f"{record.prune}: what each group lost"
            lost = table(f"lost-{place}-{index}", title, smaller.GROUPS, smaller.groups(facts))
            whole = points(f"{group} stays whole: {why}." for group, why in facts.whole.items())
            yield Folded(title, (*filled(lost), *whole))
