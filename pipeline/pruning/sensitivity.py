"""What each group costs in accuracy when it is pruned alone: a quick scan, one group and one ratio at a time."""

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor, nn

from enginesmith.pipeline.pruning import selection
from enginesmith.pipeline.pruning.cutting import Removal, cut_for_now
from enginesmith.pipeline.pruning.record import GroupSensitivity
from enginesmith.pipeline.pruning.structure import Group

Judge = Callable[[], tuple[str, float | None, str]]
"""The metric's name, its value, and why it has none."""


def scan(
    model: nn.Module,
    groups: Sequence[Group],
    importance: dict[str, Tensor],
    ratios: Sequence[float],
    multiple_of: int,
    judge: Judge,
) -> Iterator[GroupSensitivity]:
    """Prune each group by each ratio, look at the model, and put the group back.

    Ratios that come to the same number of units are looked at once.
    """
    for group in groups:
        order = importance[group.root].argsort(stable=True).tolist()
        cuts = selection.cuts_of(group, order, selection.quartering(group, multiple_of), 1)
        counts = {min(range(len(cuts) + 1), key=lambda n: abs(_share(group, cuts[:n]) - ratio)) for ratio in ratios}
        for count in sorted(counts - {0}):
            gone = selection.removed(cuts[:count])[group.root]
            with cut_for_now(model, [Removal(group, gone)]):
                metric, value, reason = judge()
            yield GroupSensitivity(
                group=group.root,
                unit=group.unit,
                units=group.units,
                left=group.units - len(gone),
                ratio=round(len(gone) / group.units, 4),
                metric=metric,
                value=value,
                reason=reason,
            )


def _share(group: Group, cuts: Sequence[selection.Cut]) -> float:
    return sum(len(cut.gone) for cut in cuts) / group.units
