"""What a quantised graph has to reach: the metric on labelled data where a drop was allowed, else nearness to eager."""

from pathlib import Path

from pydantic import BaseModel, ConfigDict, SerializeAsAny

from enginesmith.pipeline import samples
from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Device, Engine, Session
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.measure.fidelity import Fidelity, compare, thresholds_for
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.precision.search import Judgement
from enginesmith.pipeline.tasks.base import Inputs
from enginesmith.pipeline.tasks.quality import BASELINE, Quality

REFERENCE = "reference"


class Goal(BaseModel):
    """The budgets of accuracy, and what they are judged on."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    threshold: str
    """Row of the fidelity thresholds."""
    min_sqnr_db: float | None
    max_drop: float | None
    quality: SerializeAsAny[Quality] | None
    """How the metric is found; None where there is no labelled data."""
    simulation: SerializeAsAny[Engine]
    """What runs the graph where the engine proper cannot run."""

    def judge(
        self, engine: Engine, made: Artifact, device: Device, inputs: Inputs, progress: Progress
    ) -> tuple[Judgement, tuple[Path, ...]]:
        """Hold a graph or engine against the reference, and the metric on it against the baseline's."""
        with engine.load(made, device) as session:
            worst = self._fidelity(session, inputs[REFERENCE])
            drop: float | None = None
            reads: tuple[Path, ...] = ()
            if self.quality and BASELINE in inputs:
                quality, _, reads = self.quality.judge(session, inputs[BASELINE], progress)
                drop = quality.drop if quality else None
        if drop is None and self.max_drop is not None:
            raise DataError(
                "the budget max_drop needs labelled data, and this has no labels", "add an array named labels"
            )
        sqnr = worst.sqnr_db
        reasons = (
            [] if worst.passed else [f"SQNR {sqnr:.1f} dB is too little" if sqnr is not None else "outputs differ"]
        )
        if self.max_drop is not None and drop is not None and drop > self.max_drop:
            reasons.append(f"the drop of {drop:.4f} is more than {self.max_drop:g}")
        error = drop if drop is not None and self.max_drop is not None else -(sqnr if sqnr is not None else -1e3)
        found = Judgement(passed=not reasons, error=error, drop=drop, sqnr_db=sqnr, reason="; ".join(reasons))
        return found, reads

    def _fidelity(self, session: Session, reference: Artifact) -> Fidelity:
        """The worst over the points of the shape range."""
        thresholds = thresholds_for(self.threshold)
        if self.min_sqnr_db is not None:
            thresholds = thresholds.model_copy(update={"min_sqnr_db": self.min_sqnr_db, "max_error_of_range": 0.0})
        found = [
            compare(
                samples.read_arrays(reference.folder, "outputs", index),
                session.run(samples.read_arrays(reference.folder, "feeds", index)),
                thresholds,
            )
            for index, case in enumerate(samples.read(reference.folder).cases)
            if case.points
        ]
        return min(found, key=lambda one: (one.passed, one.sqnr_db if one.sqnr_db is not None else -1e3))
