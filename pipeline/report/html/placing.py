"""Charts on their way to the sections that they belong to, and what stands there where there is nothing to draw."""

from collections.abc import Sequence
from dataclasses import dataclass

from enginesmith.pipeline.report.charts import Chart
from enginesmith.pipeline.report.html.blocks import Drawn, Words, drawn
from enginesmith.pipeline.run import Run


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
