"""Equalise: ranges of channels evened out across neighbouring layers, the function kept.

Networks with depthwise convolutions need it before they are quantised: their channels differ by orders of magnitude,
and one scale has to do for all channels of a value.
"""

from pathlib import Path
from typing import ClassVar

from enginesmith.pipeline import graph
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.passes.base import Pass, Progress, Records


class Equalise(Pass):
    """Scale the channels of neighbouring layers against each other; ``ranges``, where given, show how far."""

    name: ClassVar[str] = "equalise"
    consumes: ClassVar[Kind] = "onnx"
    produces: ClassVar[Kind] = "onnx"
    tools: ClassVar[tuple[str, ...]] = ("numpy", "onnx", "onnx-ir")

    external_data_bytes: int = graph.EXTERNAL_DATA_BYTES

    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        """Rewrite weights and biases; names stay.

        Raises:
            DataError: the ranges are of another graph.
        """
        from enginesmith.calibration import ranges as calibration
        from enginesmith.pipeline import onnx_file
        from enginesmith.pipeline.precision.scaling.equalise import equalise

        given = records.get("ranges")
        ranges = calibration.load(given.path, model_sha256=artifact.sha256) if given is not None else None
        model = graph.load(artifact.path)
        done = equalise(model, ranges)
        notes = _notes(done.clips_replaced, done.clips_left, known=ranges is not None)
        if not done.pairs:
            effect = graph.pass_on(artifact.path, out, "no two neighbouring layers have channels to equalise")
            return effect.model_copy(update={"notes": (*effect.notes, *notes)})
        progress("writing")
        graph.save(model, out, self.external_data_bytes)
        return Effect(
            file=graph.FILE,
            summary=f"equalised {done.pairs} pairs of {done.products} products; "
            f"largest channel ratio {done.ratio_before:.3g} → {done.ratio_after:.3g}",
            notes=notes,
            signature=onnx_file.signature(out / graph.FILE),
        )


def _notes(replaced: int, left: int, *, known: bool) -> tuple[str, ...]:
    notes = []
    if replaced:
        notes.append(f"{replaced} Clip nodes became Relu: no activation of the calibration data reaches their bound")
    if left:
        why = "cuts every channel" if known else "may cut, and there are no ranges that show where"
        notes.append(f"{left} pairs were left alone, as the Clip between them {why}")
    return tuple(notes)
