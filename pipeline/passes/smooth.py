"""Smooth: factors of channels moved between activations and the weights that they meet, the function kept."""

from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from pydantic import Field

from enginesmith.pipeline import graph
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.passes.base import Pass, Progress, Records
from enginesmith.pipeline.precision.scaling.smooth import Mode

if TYPE_CHECKING:
    from enginesmith.pipeline.precision.scaling.smooth import Smoothed


class Smooth(Pass):
    """Scale what matrix products read; needs ``ranges`` of the same graph."""

    name: ClassVar[str] = "smooth"
    consumes: ClassVar[Kind] = "onnx"
    produces: ClassVar[Kind] = "onnx"
    tools: ClassVar[tuple[str, ...]] = ("numpy", "onnx", "onnx-ir")

    mode: Mode = "smooth"
    """``smooth`` for activations in few bits, ``awq`` for weights in int4 beside exact activations."""
    alpha: float | None = Field(None, ge=0, le=1)
    """How much of the difficulty moves into the weights; without a number, what is best for each value."""
    insert: bool = False
    """Whether a multiplication may be added where the factors do not fit into what is there."""
    external_data_bytes: int = graph.EXTERNAL_DATA_BYTES

    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        """Rewrite weights, and what comes before them.

        Raises:
            UsageError: there are no ranges.
            DataError: the ranges are of another graph.
        """
        from enginesmith.calibration import ranges as calibration
        from enginesmith.pipeline import onnx_file
        from enginesmith.pipeline.precision.scaling.smooth import Settings, smooth

        if "ranges" not in records:
            raise UsageError("smoothing needs the ranges of activations, and got none", "calibrate the graph first")
        ranges = calibration.load(records["ranges"].path, model_sha256=artifact.sha256)
        model = graph.load(artifact.path)
        progress("finding factors")
        done = smooth(model, ranges, Settings(self.mode, self.alpha, self.insert))
        if not done.values:
            effect = graph.pass_on(artifact.path, out, "no value could be scaled")
            return effect.model_copy(update={"notes": (*effect.notes, *_notes(done))})
        progress("writing")
        graph.save(model, out, self.external_data_bytes)
        return Effect(
            file=graph.FILE,
            summary=self._summary(done),
            notes=_notes(done),
            signature=onnx_file.signature(out / graph.FILE),
        )

    def _summary(self, done: "Smoothed") -> str:
        what = f"scaled {done.products} of {done.all_products} products"
        if self.mode == "smooth":
            what = f"{what}; largest channel ratio {done.ratio_before:.3g} → {done.ratio_after:.3g}"
        return f"{what}; error of their rounding, estimated, {done.error_after / done.error_before - 1:+.0%}"


def _notes(done: "Smoothed") -> tuple[str, ...]:
    reasons = {
        "no place for the factors that would cost nothing": done.homeless,
        "a weight that something else reads too": done.shared,
        "no statistics of their channels": done.unknown,
        "little or nothing to gain": done.even,
    }
    left = [f"{count} values were left alone: {reason}" for reason, count in reasons.items() if count]
    return (*left, *([f"{done.inserted} multiplications were added"] if done.inserted else []))
