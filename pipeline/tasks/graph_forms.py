"""The forms of a float graph that a search can quantize: as it is, or rescaled; and what each of their groups loses."""

import json
import logging
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from pydantic import SerializeAsAny

from enginesmith.calibration import ranges
from enginesmith.calibration.ranges import FILE as RANGES_FILE
from enginesmith.pipeline.artifact import Artifact, Effect, Kind, copy_folder, file_digest
from enginesmith.pipeline.engines import simulation
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.fidelity import find_parts, measure_losses
from enginesmith.pipeline.frameworks.onnx import choices, coverage, edit, evaluator, ir, model_file
from enginesmith.pipeline.passes.base import Pass, PrecisionPass, Progress, Records
from enginesmith.pipeline.passes.quantize import layers, layerwise_error, precision, upsampling
from enginesmith.pipeline.passes.quantize.activation_capture import ActivationCapture, open_activation_capture
from enginesmith.pipeline.passes.quantize.causes import explain_loss, explain_output_loss, to_decibels
from enginesmith.pipeline.passes.quantize.layerwise_error import OwnError, OwnErrors
from enginesmith.pipeline.passes.quantize.precisions import KINDS, WEAK_DB, Cause, Form
from enginesmith.pipeline.passes.quantize.search import GroupFact
from enginesmith.pipeline.passes.run import run_pass
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.base import RECORDS, Inputs, Task, read_models, scratch_artifact, write_records
from enginesmith.pipeline.tasks.calibrate import BEFORE, Calibrate, Feeder
from enginesmith.pipeline.tasks.verify import Verify
from enginesmith.pipeline.tensors import Array, Feeds, find_fill

_log = logging.getLogger(__name__)
MODEL, REFERENCE, RANGES, SENSITIVITY = "model", "reference", "ranges", "sensitivity"
RESCALED: Form = "rescaled"
MULTIPLIED: Form = "multiplied"
_CHANGED = (RESCALED, MULTIPLIED)
"""Inputs that are forms of the float graph beside the one given."""
_IMPACT_ROWS = 4
"""Samples on which groups are quantized alone: it is for their order."""
_IMPACT_SECONDS = 120.0
"""Longest time in which groups are quantized alone."""
_IMPACT_SHARE = 0.3
"""Share of the time that is left which that may take."""
_OFFSET = 4.0
"""Times what answers vary by from which on their mean is a constant that hides what is lost, as an SQNR of 60 dB does
of scores around 2000."""
_ROUNDINGS = 100
"""Roundings in float32 of the largest answer that answers have to vary by."""
_STEPS = ("Round", "Floor", "Ceil", "Sign")
_FIDELITY = "fp16"
"""Row of the fidelity thresholds: the graph is rounded to 8 bits next, and a Clip may cut data that were not seen."""


class Impact(NamedTuple):
    """Tell what a group alone in few bits changes in the answers."""

    energy: float
    """Energy of the error, of that of the answers, 0 to 1: in the part of an output that changes most, or in the mean
    over samples, if that is more. Where all answers of an output are near a constant, it is of what they vary by."""
    part: str
    """That part, in words: ``column 1 of output 'y'``; ``output 'y', sample by sample``."""


class Sensitivity(Task):
    """List the groups of a float graph, with the work in each and the error that each brings in when quantized.

    For a graph that is lowered as a whole, no errors are measured, as a search asks for groups only where that fails.
    The error in a group's own output is measured for all of them in one pass over the data. It does not tell what is
    left of a part of the answers in another unit, nor of samples that are small beside others: where there are such
    parts, or groups that lose such samples in their own output, each group is quantized alone, too.
    """

    title: ClassVar[str] = "sensitivity"
    produces: ClassVar[Kind] = "record"
    other_tools: ClassVar[tuple[str, ...]] = evaluator.TOOLS

    step: SerializeAsAny[PrecisionPass]
    """The precision, with inputs of all products quantized, and nothing else."""
    feeder: Feeder
    least_share: float = 0.0
    """Share of the multiply-adds that needs a form in the precision; with less it is not worth a trial."""

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        model = inputs["model"]
        floating = edit.load(model.path)
        groups = layers.find_groups(floating)
        kinds = {node.name: upsampling.name_kind(node) for node in floating.graph}
        sizes = samples.read(inputs["reference"].folder).ranges
        work = coverage.count_macs(model.path, {name: range_.opt for name, range_ in sizes.items()})
        if KINDS[self.step.precision].lowered:
            return self._list_lowered(inputs, groups, kinds, work, out, progress)
        try:
            errors, left, reads = self._measure_errors(inputs, groups, progress)
        except layers.NothingToQuantize as error:
            if not self.least_share:
                raise
            return write_records(out, [], "nothing to measure", rejected=error.message)
        lost_parts, measured = self._find_lost_parts(inputs, errors, progress)
        ratios = {name: to_decibels(error.energy) for name, error in errors.items()}
        ratios |= {name: to_decibels(impact.energy) for name, impact in lost_parts.items()}
        causes = self._explain_losses(inputs, errors, lost_parts)
        if not ratios:
            raise ModelError(
                f"nothing in this model has a form in {self.step.precision}: it has no product with a constant weight",
                "use fp16, or another precision",
            )
        records = [
            _describe(
                *(group, kinds, work),
                sqnr_db=ratios.get(group.name),
                reason="" if group.name in ratios else left.get(group.name) or group.reason or "nothing is quantized",
                cause=causes[group.name][1] if group.name in causes else "",
                pattern=causes[group.name][0] if group.name in causes else "unknown",
                **_describe_output(errors.get(group.name)),
            )
            for group in groups
        ]
        known = sorted((record.sqnr_db, record.name) for record in records if record.sqnr_db is not None)
        worst = f"; most sensitive {known[0][1]} with {known[0][0]:.1f} dB" if known else ""
        share = sum(work.get(name, 0) for name in ratios) / max(1, sum(work.values()))
        rejected = ""
        if share < self.least_share and all(group.name in work for group in groups):
            rejected = f"only {share:.1%} of the multiply-adds have a form in {self.step.precision}"
        summary = f"{len(records)} groups, {len(known)} measured{worst}"
        return write_records(out, records, summary, reads=reads, rejected=rejected, incomplete=not measured)

    def _list_lowered(
        self,
        inputs: Inputs,
        groups: Sequence[layers.QuantizableOp],
        kinds: Mapping[str | None, str],
        work: Mapping[str, int],
        out: Path,
        progress: Progress,
    ) -> Effect:
        """List the groups of a graph that is lowered as a whole; of those that stay in float32 anyway, say why.

        An engine that casts by itself may have a graph in the precision that cannot be lowered.
        """
        with tempfile.TemporaryDirectory(prefix="enginesmith-sensitivity-") as folder:
            records = {name: artifact for name, artifact in inputs.items() if name == RANGES}
            try:
                run_pass(self.step, inputs[MODEL], Path(folder), progress, records)
                reasons = {entry["group"]: _explain_wide(entry, self.step) for entry in precision.read(Path(folder))}
            except ModelError as error:
                reasons = {group.name: error.message for group in groups}
        facts = [_describe(group, kinds, work, sqnr_db=None, reason=reasons[group.name]) for group in groups]
        kept = sum(bool(fact.reason) for fact in facts)
        return write_records(out, facts, f"{len(facts)} groups, {kept} of them in float32 anyway")

    def _find_lost_parts(
        self, inputs: Inputs, errors: Mapping[str, OwnError], progress: Progress
    ) -> tuple[dict[str, Impact], bool]:
        """Find the groups that alone lose more of a part of the answers, or of small samples, than of their own output.

        Returns also whether time was enough to measure that; nothing is measured where answers have no such parts, and
        no group loses the small samples of its own output.
        """
        hidden = any(
            to_decibels(error.sample_energy or 0.0) < WEAK_DB <= to_decibels(error.energy) for error in errors.values()
        )
        if not (hidden or _has_parts(inputs[REFERENCE].folder)):
            return {}, True
        impacts, measured = measure_impacts(self.step, "given", inputs, {}, errors, self.left_seconds, progress)
        return {name: impact for name, impact in impacts.items() if impact.energy > errors[name].energy}, measured

    def _explain_losses(
        self, inputs: Inputs, errors: Mapping[str, OwnError], lost_parts: Mapping[str, Impact]
    ) -> dict[str, tuple[Cause, str]]:
        """Explain by group why it loses what it does, and which part of the answers, where it is one of these.

        Its numbers explain nothing where no ranges are known, as for weights alone.
        """
        model, known = edit.load(inputs["model"].path), None
        layers.find_groups(model)  # which names the nodes
        if "ranges" in inputs:
            known = ranges.load(inputs["ranges"].folder / RANGES_FILE, model_sha256=inputs["model"].sha256)
        causes = dict[str, tuple[Cause, str]]()
        for node in model.graph:
            if (name := str(node.name)) in errors:
                cause, words = explain_loss(node, known, errors[name])
                causes[name] = cause, f"{lost_parts[name].part}: {words}" if words and name in lost_parts else words
        return causes

    def _measure_errors(
        self, inputs: Inputs, groups: tuple[layers.QuantizableOp, ...], progress: Progress
    ) -> tuple[dict[str, OwnError], dict[str, str], tuple[Path, ...]]:
        """Measure the error of each group's own output; return also why others have none, and the files read."""
        model = inputs["model"]
        with tempfile.TemporaryDirectory(prefix="enginesmith-sensitivity-") as folder:
            quantized, both = Path(folder, "quantized"), Path(folder, "joint")
            for place in (quantized, both):
                place.mkdir()
            records = {name: artifact for name, artifact in inputs.items() if name == "ranges"}
            effect = run_pass(self.step, model, quantized, progress, records)
            left = {entry["group"]: entry["why"] for entry in precision.read(quantized)}
            floating, narrow = edit.load(model.path), edit.load(quantized / effect.file)
            output_errors = self._add_output_errors(floating, groups, model, records, Path(folder), progress)
            measured = layerwise_error.add_layerwise_error(floating, narrow, groups)
            if not measured:
                return {}, left, ()
            floating.graph.outputs.extend(output_errors)
            edit.save(floating, both)
            file = both / edit.FILE
            artifact = scratch_artifact("onnx", file, model_file.signature(file))
            feeds, reads = self.feeder.open(model, inputs["reference"])
            errors = OwnErrors(measured, single=feeds.provenance.batch == 1)
            with simulation().load(artifact, Device()) as session:
                for index, batch in enumerate(feeds):
                    progress(f"float and quantized side by side, batch {index + 1}")
                    errors.add(session.run(batch))
        return errors.find(), left, reads

    def _add_output_errors(
        self,
        floating: "ir.Model",
        groups: Sequence[layers.QuantizableOp],
        model: Artifact,
        records: Records,
        folder: Path,
        progress: Progress,
    ) -> "list[ir.Value]":
        """Compute in the joint graph what rounding outputs does, for the engines that do so; return its outputs."""
        step = self.step.rounding_outputs()
        if step is None:
            return []
        try:
            effect = run_pass(step, model, folder, progress, records)
        except ModelError as error:
            _log.info("the rounding of outputs is not measured: %s", error)
            return []
        rounded = edit.load(folder / effect.file)
        edit.infer_shapes(floating)
        return layerwise_error.add_output_errors(floating, rounded, groups, step.find_writers(rounded))


def _describe_output(error: OwnError | None) -> dict[str, Any]:
    """Describe what rounding its output alone does to what is read behind a group, for its record."""
    if error is None or error.output is None:
        return {}
    pattern, words = explain_output_loss(error.output)
    return {"output_db": to_decibels(error.output.energy), "output_pattern": pattern, "output_cause": words}


def _describe(
    group: layers.QuantizableOp, kinds: Mapping[str | None, str], work: Mapping[str, int], **errors: Any
) -> GroupFact:
    macs = work.get(group.name, group.parameters)  # of unknown size: one sample at least
    return GroupFact(
        name=group.name, module=group.module, kind=kinds[group.name], macs=macs, given=group.given, **errors
    )


def _explain_wide(entry: Mapping[str, str], step: PrecisionPass) -> str:
    """Explain why a group was not lowered; empty if it was."""
    return "" if entry["precision"] == step.precision else entry["why"] or "it is not lowered"


def measure_impacts(
    step: PrecisionPass,
    form: Form,
    inputs: Inputs,
    records: Records,
    names: Collection[str],
    left_seconds: float,
    progress: Progress,
) -> tuple[dict[str, Impact], bool]:
    """Measure the impact of each of these groups that can be quantized, by name.

    ``records`` has the assignment by which ``step`` quantizes everything. Where no output is a float in a fixed order,
    the impact is that on the last such values that outputs are computed from: scores, where they are classes. Nothing
    is measured without pairs, and where the graph cannot be run with single groups quantized. After a share of the time
    that is left, fewer samples have to do; returns also whether time was enough for one. If not, nothing is measured.
    """
    limit = _IMPACT_SHARE * left_seconds
    deadline = time.monotonic() + min(limit, _IMPACT_SECONDS)
    (model, its_ranges), alone = find_form(form, inputs), step.rounding_alone()
    try:
        with tempfile.TemporaryDirectory(prefix="enginesmith-impacts-") as folder:
            out = Path(folder)
            effect = run_pass(alone, model, out, progress, {**its_ranges, **records})
            floating, quantized = edit.load(model.path), edit.load(out / effect.file)
            edit.fix_weights(floating)
            layers.find_groups(floating)  # which names the nodes
            switched = layerwise_error.add_switches(floating, quantized, alone.find_writers(quantized))
            groups = [name for name in names if name in switched]
            values = _list_judged(quantized, floating, model)
            if not groups or not values:
                return {}, True
            edit.save(quantized, out)
            rows, batch = _read_rows(inputs[REFERENCE].folder, "feeds", _IMPACT_ROWS), _find_batch(model, inputs)
            with open_activation_capture(out / edit.FILE, [*values]) as session:
                passes = list(_quantize_alone(session, rows, batch, groups, switched, values, deadline, progress))
    except ModelError as error:
        _log.warning("groups are ranked by their own errors: %s", error)
        return {}, True
    impacts = {name: _find_worst([losses[name] for losses in passes]) for name in groups if passes}
    return impacts, bool(passes) or limit > _IMPACT_SECONDS


def _quantize_alone(
    session: ActivationCapture,
    rows: Sequence[Feeds],
    batch: int,
    groups: Sequence[str],
    switched: Sequence[str],
    values: Mapping[str, str],
    deadline: float,
    progress: Progress,
) -> Iterator[dict[str, dict[str, float]]]:
    """Yield by group what it alone loses of each part of the answers, for one feed after the other until a time.

    ``values`` are those that answers are judged by, with their names for people; ``batch`` is how many samples are
    along their first axis, 1 where that is not known.
    """

    def answer(feeds: Feeds, group: str = "") -> dict[str, Array]:
        return session.run({**feeds, layerwise_error.SWITCHES: np.array([name == group for name in switched])})

    exact = [answer(feeds) for feeds in rows]
    parts = {value: find_parts([answers[value] for answers in exact]) for value in values}
    offsets = {value: 0.0 if parts[value] else find_offset([answers[value] for answers in exact]) for value in values}
    for count, (feeds, wanted) in enumerate(zip(rows, exact, strict=True), 1):
        losses = dict[str, dict[str, float]]()
        for group in groups:
            if time.monotonic() > deadline:  # those of some groups alone would mislead
                return
            progress(f"{len(losses)} of {len(groups)} groups quantized alone, pass {count}")
            answers, losses[group] = answer(feeds, group), {}
            for value, its_parts in parts.items():
                pair = wanted[value] - offsets[value], answers[value] - offsets[value]
                losses[group] |= measure_losses(values[value], [pair], its_parts, batch)
        yield losses


def find_offset(answers: Sequence[Array]) -> float:
    """Find the constant that all answers of an output are near, by their mean; 0 where they vary as much as that.

    Infinities and the fill of masked places do not count. 0 also where answers vary by no more than rounding.
    """
    fill = find_fill(answers)
    used = [answer[np.isfinite(answer) & (np.abs(answer) < fill)] for answer in answers]
    numbers = np.concatenate(used).astype(np.float64)
    if not numbers.size:
        return 0.0
    rounding = float(np.finfo(np.float32).eps * np.abs(numbers).max())
    mean, apart = float(numbers.mean()), float(numbers.std())
    return mean if abs(mean) > _OFFSET * apart and np.ptp(numbers) > _ROUNDINGS * rounding else 0.0


def _find_worst(losses: Sequence[Mapping[str, float]]) -> Impact:
    """Find the part of the answers that loses most, in the mean over several samples."""
    means = {part: sum(each.get(part, 0.0) for each in losses) / len(losses) for each in losses for part in each}
    part = max(means, key=lambda name: means[name], default="")
    return Impact(means.get(part, 0.0), part)


def _list_judged(quantized: "ir.Model", floating: "ir.Model", model: Artifact) -> dict[str, str]:
    """Name the floats in a fixed order that answers are judged by: outputs, else the last that outputs depend on."""
    signature = model.signature or model_file.signature(model.path)
    chosen = {*signature.unordered, *choices.find_chosen(model_file.read(model.path).graph)}
    edit.infer_shapes(floating)
    usable = {value.name for node in floating.graph for value in node.outputs if _is_gradual(value)} - chosen
    judged = [str(value.name) for value in quantized.graph.outputs if value.name in usable]
    if judged:
        return {name: f"output {name!r}" for name in judged}
    waiting, seen = list(quantized.graph.outputs), set[ir.Value]()
    while waiting:
        value = waiting.pop(0)
        node = value.producer()
        if value in seen or node is None or node.op_type in choices.SHAPES:
            continue
        seen.add(value)
        if value.name in usable:
            judged.append(str(value.name))
        else:
            waiting += _list_reads(node)
    return {name: f"value {name!r}" for name in judged}


def _list_reads(node: "ir.Node") -> "list[ir.Value]":
    """List the values that a node computes from: its inputs, and what the graphs within it return."""
    returned = list[ir.Value]()
    for entry in node.attributes.values():
        if entry.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            graphs = [entry.as_graph()] if entry.type == ir.AttributeType.GRAPH else entry.as_graphs()
            returned += [value for graph in graphs for value in graph.outputs]
    return [value for value in (*node.inputs, *returned) if value is not None]


def _is_gradual(value: "ir.Value") -> bool:
    """Tell whether a value is a float that small changes before it change a little: no whole number in a float."""
    if value.dtype is None or not value.dtype.is_floating_point():
        return False
    node = value.producer()
    if node is None or node.op_type != "Cast":
        return node is None or node.op_type not in _STEPS
    given = layers.get_input(node, 0).dtype
    return given is None or given.is_floating_point()


def _read_rows(reference: Path, what: str, count: int) -> list[dict[str, Array]]:
    """Read feeds or outputs of the largest batch in the reference, call by call, until there are so many rows."""
    cases = samples.read(reference).cases
    index = _find_largest(cases)
    calls = min(cases[index].calls, -(-count // cases[index].batch))
    return [samples.read_arrays(reference, what, index, call) for call in range(calls)]


def _find_largest(cases: Sequence[samples.Case]) -> int:
    """Find the case with the largest batch."""
    return max(range(len(cases)), key=lambda position: cases[position].batch)


def _find_batch(model: Artifact, inputs: Inputs) -> int:
    """Find how many samples are along the first axis of the largest batch's values; 1 where that is not known."""
    signature, known = model.signature or model_file.signature(model.path), samples.read(inputs[REFERENCE].folder)
    moved = any(spec.batch_axis for spec in (*signature.inputs, *signature.outputs))
    return 1 if moved or known.interacting else known.cases[_find_largest(known.cases)].batch


def _has_parts(reference: Path) -> bool:
    """Tell whether the answers have parts that are judged apart."""
    answers = _read_rows(reference, "outputs", _IMPACT_ROWS)
    floats = [name for name, value in answers[0].items() if np.issubdtype(value.dtype, np.floating)]
    return any(find_parts([each[name] for each in answers]) for name in floats)


class Rescale(Task):
    """Make a graph of the same function that loses less, with its ranges and the errors of its groups beside it.

    It begins with the graph that was rescaled before, where there is one.
    """

    title: ClassVar[str] = "rescale"
    produces: ClassVar[Kind] = "onnx"

    steps: tuple[SerializeAsAny[Pass], ...]
    """Passes that scale channels, each by the ranges of the graph that it gets."""
    only_weak: bool = False
    """True where the passes may only change what is read by groups that lose much."""
    outputs: bool = True
    """True where there is an engine that rounds all outputs of convolutions, and may lose much by that."""
    calibration: Calibrate
    sensitivity: Sensitivity

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        form: Form = RESCALED if RESCALED in inputs else "given"
        (given, records), reference = find_form(form, inputs), inputs[REFERENCE]
        groups = _read_form(form, inputs)
        of_outputs = self.outputs and not self.only_weak  # factors before a product change nothing in what it writes
        weak = [(least, group.name) for group in groups if (least := _find_least(group, of_outputs)) is not None]
        weak = sorted(pair for pair in weak if pair[0] < WEAK_DB)
        if not weak:
            what = f"every group has an SQNR of {WEAK_DB:g} dB or more"
            until = " until its output is rounded" if self.outputs and any(map(_loses_output, groups)) else ""
            return _pass_on(given, out, f"not needed: {what}{until}")
        model, summaries, reads = given, list[str](), set[Path]()
        with tempfile.TemporaryDirectory(prefix="enginesmith-rescale-") as scratch:
            if self.only_weak:
                file = Path(scratch, "products.json")
                file.write_text(json.dumps([name for _, name in weak]), encoding="utf-8")
                records["products"] = scratch_artifact("record", file, None)
            has_parts = _has_parts(reference.folder)
            for index, step in enumerate(step.judging_outputs_apart() if has_parts else step for step in self.steps):
                folder = Path(scratch, str(index))
                folder.mkdir()
                effect = run_pass(step, model, folder, progress, records)
                new_model = _with_digest(scratch_artifact("onnx", folder / effect.file, given.signature))
                if new_model.sha256 == file_digest(model.path):
                    continue  # passed on as it was
                summaries.append(effect.summary)
                known = {BEFORE: model, RANGES: records[RANGES]}
                model = new_model
                calibrated = self.calibration.run({MODEL: model, REFERENCE: reference, **known}, folder, progress)
                reads.update(calibrated.reads)
                records[RANGES] = scratch_artifact("record", folder / RANGES_FILE, None)
            if model is given:
                return _pass_on(given, out, "no channels can be scaled against each other")
            rescaled = {MODEL: model, RANGES: records[RANGES], REFERENCE: reference}
            ranking = self.sensitivity.model_copy(update={"left_seconds": self.left_seconds})
            ranked = ranking.run(rescaled, model.folder, progress)
            reads.update(ranked.reads)
            check = Verify(stage="rescale", engine=simulation(), device=Device(), precision=_FIDELITY, min_sqnr_db=None)
            rejected = check.run(rescaled, Path(scratch), progress).rejected
            copy_folder(model.folder, out)
        decibels = [_find_least(group, of_outputs) for group in _read_facts(out / RECORDS)]
        errors = [error for error in decibels if error is not None]
        summary = (
            f"{len(weak)} of {len(groups)} groups had less than {WEAK_DB:g} dB, {weak[0][1]} {weak[0][0]:.1f} dB; "
            f"{'; '.join(summaries)}; now at least {min(errors):.1f} dB"
        )
        return Effect(
            file=edit.FILE,
            summary=summary,
            signature=model.signature,
            rejected=rejected,
            reads=tuple(sorted(reads)),
            incomplete=ranked.incomplete,
        )


def _pass_on(model: Artifact, out: Path, reason: str) -> Effect:
    return edit.pass_on(model.path, out, reason).model_copy(update={"rejected": reason})


def read_forms(inputs: Inputs, step: PrecisionPass) -> dict[Form, list[GroupFact]]:
    """Read the groups of each form of the graph that there is, in the order in which they are tried.

    Engines share what was measured; groups that a pass has no kernels for are left out of what can be chosen. Where it
    rounds outputs, groups that lose much by that have that loss and its cause. Where it loses little of any group as
    given, the other forms were made for other engines, and are left out.
    """
    forms: dict[Form, list[GroupFact]] = {form: _read_form(form, inputs) for form in _CHANGED if form in inputs}
    forms["given"] = _read_form("given", inputs)
    for form, groups in forms.items():
        reasons = [group.reason or step.explain_kind(group.kind) for group in groups]
        forms[form] = [
            group.model_copy(update={"reason": why, "sqnr_db": None}) if why else group
            for group, why in zip(map(_count_output, groups) if step.rounds_outputs else groups, reasons, strict=True)
        ]
    lost = any(group.is_weak for group in forms["given"])
    return forms if lost else {"given": forms["given"]}


def _find_least(group: GroupFact, of_outputs: bool) -> float | None:
    """Find the lowest SQNR of a group; its rounded output counts where that is asked for, and loses much."""
    return (_count_output(group) if of_outputs else group).sqnr_db


def _loses_output(group: GroupFact) -> bool:
    """Tell whether rounding its output alone loses much."""
    return group.output_db is not None and group.output_db < WEAK_DB


def _count_output(group: GroupFact) -> GroupFact:
    """Take a group's loss and its cause from its rounded output, where that loses much, and more than the rest."""
    if group.sqnr_db is None or not _loses_output(group) or group.sqnr_db <= (group.output_db or 0.0):
        return group
    update = {"sqnr_db": group.output_db, "cause": group.output_cause, "pattern": group.output_pattern}
    return group.model_copy(update=update)


def _read_form(form: Form, inputs: Inputs) -> list[GroupFact]:
    """Read the groups of a form of the graph."""
    return _read_facts(inputs[SENSITIVITY if form == "given" else form].folder / RECORDS)


def _read_facts(path: Path) -> list[GroupFact]:
    return read_models(scratch_artifact("record", path, None), GroupFact)


def find_form(form: str, inputs: Inputs) -> tuple[Artifact, dict[str, Artifact]]:
    """Find a form of the float graph, and the record of its ranges."""
    if form == "given":
        return inputs[MODEL], {role: artifact for role, artifact in inputs.items() if role == RANGES}
    return _with_digest(inputs[form]), {RANGES: scratch_artifact("record", inputs[form].folder / RANGES_FILE, None)}


def _with_digest(model: Artifact) -> Artifact:
    """Identify a graph by its own file, as ranges do that lie beside it."""
    return model.model_copy(update={"sha256": file_digest(model.path)})
