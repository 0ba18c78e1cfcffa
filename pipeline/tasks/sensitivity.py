"""How much error each group brings in when it is quantised, found out for all of them in one pass over the data."""

import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from enginesmith.pipeline import graph, onnx_file, samples
from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.engines import simulation
from enginesmith.pipeline.engines.base import Device
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.passes import assignment
from enginesmith.pipeline.passes.base import Progress, run_pass
from enginesmith.pipeline.passes.precision import Precision
from enginesmith.pipeline.precision import groups, joint
from enginesmith.pipeline.precision.audit import costs
from enginesmith.pipeline.precision.quantise.preparation import require_opset
from enginesmith.pipeline.precision.search import GroupFact
from enginesmith.pipeline.tasks.base import RECORDS, Inputs, Task, write_records
from enginesmith.pipeline.tasks.calibrate import Feeder

if TYPE_CHECKING:
    import onnx_ir as ir


class Sensitivity(Task):
    """The groups of a float graph, with the work in each and the error that each brings in."""

    title: ClassVar[str] = "sensitivity"
    produces: ClassVar[Kind] = "record"

    step: Precision
    """The precision, with everything quantised."""
    feeder: Feeder
    """Where the feeds come from."""

    @property
    def tools(self) -> tuple[str, ...]:
        return ("onnxruntime", "onnxruntime-gpu", *self.step.tools)

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        model = inputs["model"]
        floating = graph.load(model.path)
        found = groups.find(floating)
        kinds = {node.name: _kind(node) for node in floating.graph}
        work = costs.macs(model.path, _sizes(inputs["reference"]))
        ratios, left, reads = self._ratios(inputs, found, progress)
        if not ratios:
            raise ModelError(
                f"nothing in this model has a form in {self.step.precision}: it has no product with a constant weight",
                "use fp16, or another precision",
            )
        records = [
            GroupFact(
                name=group.name,
                module=group.module,
                kind=kinds[group.name],
                macs=work.get(group.name, 0),
                sqnr_db=ratios.get(group.name),
                reason="" if group.name in ratios else left.get(group.name) or group.reason or "nothing is quantised",
            )
            for group in found
        ]
        write_records(out, records)
        known = sorted((one.sqnr_db, one.name) for one in records if one.sqnr_db is not None)
        worst = f"; most sensitive {known[0][1]} with {known[0][0]:.1f} dB" if known else ""
        return Effect(file=RECORDS, summary=f"{len(records)} groups, {len(known)} measured{worst}", reads=reads)

    def _ratios(
        self, inputs: Inputs, found: tuple[groups.Group, ...], progress: Progress
    ) -> tuple[dict[str, float], dict[str, str], tuple[Path, ...]]:
        """Signal-to-noise ratios in dB by group, and why others have none."""
        model = inputs["model"]
        with tempfile.TemporaryDirectory(prefix="enginesmith-sensitivity-") as folder:
            quantised, both = Path(folder, "quantised"), Path(folder, "joint")
            for place in (quantised, both):
                place.mkdir()
            alone = self.step.model_copy(update={"inputs_only": True, "rest": "fp32"})
            records = {name: artifact for name, artifact in inputs.items() if name == "ranges"}
            effect = run_pass(alone, model, quantised, progress, records)
            left = {entry["group"]: entry["why"] for entry in assignment.read(quantised)}
            floating, narrow = graph.load(model.path), graph.load(quantised / effect.file)
            require_opset(floating, narrow.opset_imports[""], self.step.precision)
            measured = joint.side_by_side(floating, narrow, found)
            if not measured:
                return {}, left, ()
            graph.save(floating, both)
            file = both / graph.FILE
            artifact = Artifact(kind="onnx", path=file, sha256="", bytes=0, signature=onnx_file.signature(file))
            energies: Counter[str] = Counter()
            engine = simulation()
            feeds, reads = self.feeder.open(model, inputs["reference"])
            with engine.load(artifact, Device()) as session:
                for index, batch in enumerate(feeds):
                    progress(f"float and quantised side by side, batch {index + 1}")
                    energies.update({name: float(value) for name, value in session.run(batch).items()})
        names = [group.name for group in measured]
        return {name: _decibels(energies, group) for name, group in zip(names, measured, strict=True)}, left, reads


def _kind(node: "ir.Node") -> str:
    """The operator; convolutions of single channels are a kind of their own, as they move more than they compute."""
    if node.op_type == "Conv" and node.attributes.get_int("group", 1) > 1:
        return "grouped Conv"
    return node.op_type


def _decibels(energies: Counter[str], group: groups.Group) -> float:
    signal, noise = (energies[joint.output_name(group, what)] for what in (joint.SIGNAL, joint.NOISE))
    return round(10 * math.log10(max(signal, 1e-30) / max(noise, 1e-30)), 3)


def _sizes(reference: Artifact) -> dict[str, int]:
    """The usual sizes of dynamic dimensions."""
    return {name: range_.opt for name, range_ in samples.read(reference.folder).ranges.items()}
