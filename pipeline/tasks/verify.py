"""Sample feeds, answer them with the baseline, and compare what others answer."""

import contextlib
import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar, NamedTuple, TypeVar

import numpy as np
from pydantic import SerializeAsAny

from enginesmith.calibration.dataset import DRAWINGS, Dataset, Drawing, check_parts, count_parts
from enginesmith.calibration.options import DataOptions, PartOptions
from enginesmith.calibration.user_code import is_reference
from enginesmith.pipeline.artifact import Effect, Kind
from enginesmith.pipeline.engines.base import Engine, Session
from enginesmith.pipeline.errors import DataError, FidelityError, ModelError, SignatureError, SourceError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.fidelity import Fidelity, compare_calls, describe_failure, find_thresholds
from enginesmith.pipeline.frameworks.onnx import edit, model_file
from enginesmith.pipeline.frameworks.onnx.rounding import moves_steps
from enginesmith.pipeline.frameworks.rounding import UnstableNumbers
from enginesmith.pipeline.measure import quality
from enginesmith.pipeline.measure.rows import StageFidelity
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.passes.export.sizes import find_limits
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.base import Inputs, Task, write_records
from enginesmith.pipeline.tasks.calibrate import Feeder, check_yields_again, open_data, read_class_names
from enginesmith.pipeline.tasks.examples import (
    Baseline,
    advise,
    describe_assumed,
    describe_interaction,
    describe_narrow,
    find_choosing,
    find_example,
    list_assumed,
    list_narrow,
    put_telling_first,
    try_drawings,
    vary_lengths,
    widen_numbers,
)
from enginesmith.pipeline.tasks.quality import EngineCheck, describe_numbering, try_metric
from enginesmith.pipeline.tensors import DTYPES, Array, Feeds, ShapeRange, Signature, format_sizes
from enginesmith.pipeline.units import count_words, format_share

_T = TypeVar("_T")
_BY_SIZE = (
    "perhaps the module decides by a size in Python (limit its range with --shape, or use torch.cond), or an operator "
    "is exported wrongly for some sizes"
)
_FAILS = "limit sizes to those for which it runs, with --shape and --batch, or fix them in --input"
_DECIDES = "perhaps the module decides by a size in Python"
_CAUSES = (
    "look for large numbers that cancel, as a constant that is added and subtracted again, and for a division by "
    "nearly 0, as by the deviation of numbers that are all equal"
)
_UNSTEADY = "; eager's own answer is another one where its operations are rounded otherwise"
_STEPS = (
    "the model is quantized: where its QuantizeLinear round otherwise, or are left out, numbers move by whole steps of "
    "a scale"
)
_NOT_STEPS = ", but by less than this: perhaps a scale or a zero point is another one there"
_NEAR_ROUNDING = 16.0
"""Times what rounding explains, up to which it is named as a cause of a larger error, too."""
_ROUNDING = 1e-6
"""Error that may be rounding alone, of answers in float32 that are up to 1 for other samples."""
_LEAST_ADVISED_DB = 40.0
"""Lowest SQNR of a float32 graph that an option to allow it is named for: float16's."""
_MADE_UP = "; the error is tiny, and the samples are made up: --data or --eval judges on real ones"
_NOT_JUDGED = "changed on purpose; its quality says whether that is good enough"


_TIME_SHARE = 0.3
"""Share of the time left that the samples beyond the first call of each case may take: engines need the rest."""


class _Answers(NamedTuple):
    cases: tuple[samples.Case, ...]
    """Those that were given, with the calls that there was time for."""
    unstable: UnstableNumbers
    odd: Mapping[str, float]
    """Shares of NaN and Inf by output."""
    lost: Sequence[str]
    """Measured sizes at which there is nothing else."""
    spans: Mapping[str, float]
    """Ranges of the other numbers, by output."""


class Sample(Task):
    """Make feeds at every size that is needed, and the baseline's answers to them."""

    title: ClassVar[str] = "reference"
    produces: ClassVar[Kind] = "reference"
    other_tools: ClassVar[tuple[str, ...]] = ("numpy",)

    engine: SerializeAsAny[Engine]
    ranges: dict[str, ShapeRange]
    batches: tuple[int, ...]
    batches_given: bool = True
    """False for the default ones, of which a range may leave some out."""
    data: str | None
    data_options: SerializeAsAny[DataOptions]
    held_out: Feeder | None = None
    """Calibration, whose other samples stand in where no data is named."""
    seed: int
    metric: str | None = None
    """Metric of the data that is tried on two rows; None where none is asked for."""

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        model = inputs["model"]
        signature = model.model_signature
        _check_ends(signature)
        data, read = self._open(signature)
        origin = self.data or (self.held_out.data if self.held_out else None)
        yielded = {origin: data.whole.digest} if data and origin and is_reference(origin) else {}
        class_names = read_class_names(inputs)
        if data:
            with contextlib.nullcontext() if self.metric else contextlib.suppress(DataError):
                data = data.number_words(class_names)
        known, is_file = self.ranges, model.kind == "onnx"
        if data and is_file:  # which brings no example
            known = {**samples.read_row_ranges(signature, data), **known}
        given, sizes = find_example(self.engine, model, known)
        batches = samples.fit_batches(signature, self.ranges, self.batches, given=self.batches_given)
        ranges = samples.plan_ranges(signature, known, batches, sizes, named_by_file=is_file)
        assumed = list_assumed(model, known)
        advice = advise(model, known, assumed, data)
        planned = samples.plan_cases(signature, ranges, batches)
        cases = tuple(samples.plan_calls(case, data) for case in planned)
        tried: list[str] = []
        with self.engine.load(model, Device()) as session:
            if self.metric and self.data and data:
                progress(f"trying {self.metric} on a few samples")
                sentence, code = try_metric(self.metric, session, data, self.data_options.label_keys)
                tried, read = list(filter(None, [sentence])), (*read, *code)
            if self.data and data:
                tried += describe_numbering(self.metric or quality.DEFAULT_METRIC, session, data)
            if data:
                _check_missing(session, data, batches[0])
                data = put_telling_first(session, data, max(batches))
            if not data:
                given = vary_lengths(session, cases, given, ranges, self.seed)
                quantities = model_file.list_quantities(model.path, signature) if is_file else ()
                narrow = list_narrow(signature, quantities) if is_file else []
                given, wide = widen_numbers(session, cases, given, quantities, self.seed)
                tried += wide
            make = partial(samples.feeds_for, signature=session.signature, example=given, data=data, seed=self.seed)
            baseline = Baseline(session, given, advice)

            def answer(drawing: Drawing) -> _Answers:
                return self._answer(baseline, cases, partial(make, drawing=drawing), out, progress)

            alone = data is None and not is_file and samples.batch_symbol(signature) is not None
            drawing, answered, redrawn = try_drawings(answer, DRAWINGS if alone else DRAWINGS[:1])
            whole, (cases, unstable, odd, lost, spans) = cases, answered
            whole = whole[: len(cases)]  # the model may refuse the size between the others
            tried += [] if data else describe_narrow(signature, cases, out, narrow)
            choosing = find_choosing(session, cases, out)
            interacting, dropping = describe_interaction(session, cases, partial(make, drawing=drawing), out)
        name = data.name if data else samples.SYNTHETIC
        parts, notes = dict[str, int](), data.notes if data else ()
        if self.data and data and isinstance(self.data_options, PartOptions):
            parts, notes = count_parts(data, self.data, self.data_options), (*notes, *check_parts(data))
        in_sets = session.signature.unordered.keys() & (session.signature.unordered if choosing is None else choosing)
        unsteady = tuple(sorted(unstable.unsteady))
        facts = {"parts": parts, "spans": spans, "interacting": bool(interacting), "unsteady": unsteady}
        facts["unverified"] = unstable.find_unverified(in_sets)
        facts["quantizes"] = is_file and moves_steps(edit.load(model.path))
        facts |= {"choosing": choosing, "rounding": unstable.movements, "rounding_db": unstable.sqnr_db}
        facts |= {"class_names": class_names, "assumed": assumed, "drawing": drawing, "yielded": yielded}
        facts["tables"] = {} if data else signature.tables
        if not data:
            samples.write_example(out, given)
        samples.write(out, samples.Samples(data=name, ranges=ranges, cases=cases, **facts))
        if empty := [key for key, share in odd.items() if share == 1.0]:
            raise SourceError(
                f"all numbers in the model's output {', '.join(empty)} are NaN or infinity, for all samples of {name}",
                "check the weights, and that the data has the values that the model was trained on",
            )
        if lost:
            raise SourceError(
                f"all numbers in the model's outputs are NaN or infinity at {lost[0]}, for all samples of {name}",
                "measure sizes that the model has answers for, such as --batch 2,8",
            )
        strange = (
            f"{format_share(share, 3)} of the numbers in eager's output {key!r} are NaN or infinity"
            for key, share in odd.items()
        )
        notes = (
            *notes,
            *_describe_fewer(whole, cases),
            *describe_assumed(ranges, assumed),
            *redrawn,
            *tried,
            *strange,
            *unstable.describe(in_sets),
            *interacting,
            *dropping,
            *_describe_emptiness(cases, out),
        )
        summary = "; ".join([f"{count_words(len(cases), 'set')} of feeds from {name} data", *notes])
        return Effect(file=samples.RECORD, summary=summary, notes=notes, reads=read, incomplete=cases != whole)

    def _open(self, signature: Signature) -> tuple[Dataset | None, tuple[Path, ...]]:
        """Open the data, with the files that it was read from.

        Raises:
            DataError: it cannot be used, or is to be split and is not the same each time.
        """
        if not self.data:
            return self.held_out.held_out(signature) if self.held_out else (None, ())
        data, read = open_data(self.data, signature.inputs, "test", self.data_options)
        if isinstance(self.data_options, PartOptions) and is_reference(self.data):
            again, _ = open_data(self.data, signature.inputs, "test", self.data_options)
            check_yields_again(self.data, again.digest, data.digest, "so they cannot be split")
        return data, read

    def _answer(
        self,
        baseline: Baseline,
        cases: Sequence[samples.Case],
        make: samples.FeedMaker,
        out: Path,
        progress: Progress,
    ) -> _Answers:
        """Write the feeds of all cases, the answers, and which of their numbers rounding decides.

        Each case has one call, and more of them while its part of the time lasts. The last one, of a size between the
        others, is left out if the model refuses it.
        """
        begun, seconds, kept = time.monotonic(), _TIME_SHARE * self.left_seconds / len(cases), list[samples.Case]()
        unstable = UnstableNumbers(baseline.session.perturb)
        odd, sizes, lost = Counter[str](), Counter[str](), list[str]()
        ends: list[dict[str, tuple[float, float]]] = []
        for index, case in enumerate(cases):
            feeds = make(case)
            samples.write_arrays(out, "feeds", index, feeds)
            before = odd.total(), sizes.total()
            calls = 0
            for call in range(case.calls):
                if call and time.monotonic() - begun >= seconds * (index + 1):
                    break
                progress(f"running {self.engine.name} at {format_sizes(case.sizes)}")
                calls = call + 1
                if call:
                    feeds = make(case, call=call)
                    samples.write_arrays(out, "feeds", index, feeds, call)
                try:
                    outputs = baseline.run(case, feeds)
                except ModelError:
                    if case.points != (samples.BETWEEN,):
                        raise
                    calls = call
                    break
                sizes.update({key: value.size for key, value in outputs.items()})
                ends.append(samples.find_ends(outputs))
                odd.update({key: count for key, value in outputs.items() if (count := _count_not_finite(value))})
                _write_answer(out, index, call, outputs, unstable.find(feeds, outputs))
            if case.measured and 0 < odd.total() - before[0] == sizes.total() - before[1]:
                lost.append(format_sizes(case.sizes))
            kept += [case.model_copy(update={"calls": calls})] if calls else []
        shares = {key: count / sizes[key] for key, count in odd.items()}
        return _Answers(tuple(kept), unstable, shares, lost, samples.join_ends(ends))


def _describe_fewer(planned: Sequence[samples.Case], cases: Sequence[samples.Case]) -> list[str]:
    """Describe that outputs are compared on fewer samples than planned, as the time is short."""
    pairs = [(all_.calls, case) for all_, case in zip(planned, cases, strict=True) if case.calls < all_.calls]
    return [
        f"the time is short: outputs are compared on {count_words(case.calls * case.batch, 'sample')} at "
        f"{format_sizes(case.sizes)} instead of {calls * case.batch}; give more with --time"
        for calls, case in pairs[:1]
    ]


def _write_answer(out: Path, index: int, call: int, outputs: Feeds, unstable: Feeds) -> None:
    samples.write_arrays(out, "outputs", index, outputs, call)
    if unstable:
        samples.write_arrays(out, samples.UNSTABLE, index, unstable, call)


def _check_ends(signature: Signature) -> None:
    """Check that feeds can be made, and that there are answers to compare.

    Raises:
        SignatureError: a dtype that numpy does not have, or sizes of 0 that leave nothing to compute.
    """
    ends = (*signature.inputs, *signature.outputs)
    for spec in ends:
        if spec.dtype not in DTYPES:
            side = "input" if spec in signature.inputs else "output"
            raise SignatureError(
                f"the {side} {spec.name!r} is {spec.dtype}: numpy has no such numbers to feed or compare",
                f"give the model this {side} in float32, with a Cast inside the graph",
            )
    if not samples.fixed_batch(signature) or all(0 in spec.shape for spec in signature.outputs):
        empty = ", ".join(str(spec) for spec in ends if 0 in spec.shape)
        raise SignatureError(
            f"there is nothing to compute with the sizes of 0 in {empty}",
            "give a module an example for which it answers something; write other sizes or dynamic ones into a file",
        )


def _check_missing(session: Session, data: Dataset, batch: int) -> None:
    """Check that the model has an answer to the first sample with NaN in an input, repeated to this batch.

    Raises:
        DataError: it has none: an output is NaN as a whole.
    """
    size = batch if samples.batch_symbol(session.signature) else samples.fixed_batch(session.signature)
    for name, row in data.missing.items():
        feeds = data.whole.feed(np.full(size, row))
        for output, value in session.run(feeds).items():
            if value.size and _count_not_finite(value) == value.size:
                raise DataError(
                    f"{data.whole.name}: {name!r} holds NaN, first in row {row}, and so does all of {output!r} then",
                    "remove those rows, or fill them in as for training",
                )


def _describe_emptiness(cases: Sequence[samples.Case], folder: Path) -> list[str]:
    """Describe that no answer holds a number, so that all engines agree."""
    calls = ((index, call) for index, case in enumerate(cases) for call in range(case.calls))
    if any(value.size for at in calls for value in samples.read_arrays(folder, "outputs", *at).values()):
        return []
    return ["the model's answers to all samples that variants are compared on are empty: the comparison tells nothing"]


class Verify(EngineCheck):
    """Compare outputs with the reference's, at min, opt and max, and at every batch that is measured."""

    title: ClassVar[str] = "verify"

    stage: str
    precision: str
    min_sqnr_db: float | None
    judged: bool = True
    """True where outputs have to agree; a pruned model's distance from the given one is only reported."""

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        reference = inputs["reference"].folder
        known = samples.read(reference)
        entries: list[StageFidelity] = []
        failed = ""
        names: dict[str, str] = {}
        exported = inputs["model"].history if self.stage == "export" else ()
        limits = find_limits(note for entry in exported for note in entry.notes)
        with self.engine.load(inputs["model"], self.device) as session:
            for answered in samples.read_calls(reference):
                sizes = format_sizes(answered.case.sizes)
                progress(f"comparing at {sizes}")
                names = names or _pair_by_position(session.signature, answered.feeds[0], answered.outputs[0])
                calls = ([_rename(each, names) for each in calls] for calls in answered[1:])
                renamed = samples.Answered(answered.case, *calls)
                try:
                    comparisons = self._compare(session, renamed, known, names, limits)
                except ModelError as error:
                    if not known.assumed:
                        raise
                    message = f"{error.message}, at {sizes}{samples.advise_sizes(known.assumed)}"
                    raise type(error)(message, error.remedy) from error
                entries += comparisons
                if not failed and comparisons and not comparisons[0].passed:
                    failed = f"{comparisons[0].point} ({sizes}): {comparisons[0].reason}"
        if failed and self.stage == "export" and any(entry.passed for entry in entries):
            failed += f"; at other sizes it is right: {limits or _BY_SIZE}"
        worst = min((entry.sqnr_db for entry in entries if entry.sqnr_db is not None), default=None)
        by_rounding = _describe_rounding(entries, _STEPS if known.quantizes else _CAUSES)
        rounds = "rounding in its QuantizeLinear" if known.quantizes else "rounding in float32"
        summary = f"SQNR at least {worst:.1f} dB" if worst is not None else "outputs agree"
        return write_records(
            out,
            entries,
            f"{summary}, which {rounds} explains" if by_rounding and not failed else summary,
            notes=(
                *(f"{ours!r} is compared with {theirs!r}, by position" for ours, theirs in names.items()),
                *by_rounding,
            ),
            rejected=f"after {self.stage} at {failed}{samples.advise_sizes(known.assumed)}" if failed else "",
        )

    def _compare(
        self,
        session: Session,
        answered: samples.Answered,
        known: samples.Samples,
        names: Mapping[str, str],
        limits: str,
    ) -> list[StageFidelity]:
        case, feeds, expected, unstable = answered
        thresholds = find_thresholds(
            (str(value.dtype) for value in expected[0].values()), self.precision, self.min_sqnr_db
        )
        replayed = bool(getattr(self.engine, "cuda_graphs", False))
        try:
            answers = [run_once(session, call, replayed=replayed) for call in feeds]
        except ModelError as error:
            sizes = f"{case.points[0]} ({format_sizes(case.sizes)})"
            message = f"after {self.stage} at {sizes}, where the given model runs: {error.message}"
            raise ModelError(message, f"{_FAILS}: {limits or _DECIDES}") from error
        rounding = _rename(known.rounding, names)
        try:
            result = compare_calls(
                list(zip(expected, answers, strict=True)),
                thresholds,
                known.limit_sets(session.signature, names),
                _rename(known.spans, names),
                unstable,
                rounding,
                _rename(known.quantized_db, names),
            )
            reason = "" if result.passed else describe_failure(result) if self.judged else _NOT_JUDGED
        except FidelityError as error:  # outputs of another shape; those of other sizes may be right
            if not self.judged:
                raise
            result, reason = Fidelity(), "; ".join(filter(None, (error.message, error.remedy)))
        if self.judged and not result.passed and self.precision == "fp32":
            if _is_near_rounding(result, _rename(dict.fromkeys(known.unsteady, True), names), rounding):
                cause = f"; {_STEPS}{_NOT_STEPS}" if known.quantizes else f"{_UNSTEADY}: {_CAUSES}"
                reason += cause + _advise_min_sqnr(result.sqnr_db)
            elif known.data == samples.SYNTHETIC and _may_be_rounding(result):
                reason += _MADE_UP
        return [
            StageFidelity(
                stage=self.stage,
                point=point,
                batch=case.batch,
                **result.model_dump(include={"sqnr_db", "cosine", "max_abs_error", "argmax_agreement"}),
                paired=result.paired,
                sets=result.sets,
                unverified=_rename(known.unverified, names),
                rounding_note=_explain_rounding(result, known, names, self.stage),
                passed=result.passed or not self.judged,
                reason=reason,
            )
            for point in case.points
        ]


def _pair_by_position(signature: Signature, feeds: Feeds, outputs: Feeds) -> dict[str, str]:
    """Map the model's names of inputs and outputs to a file's, in their order, where none of them is the file's own.

    Files that others exported often have other names. What has the same number and no name in common is renamed.
    """
    names: dict[str, str] = {}
    for given, specs in ((feeds, signature.inputs), (outputs, signature.outputs)):
        own = [spec.name for spec in specs]
        if len(own) == len(given) and not set(own) & set(given):
            names |= dict(zip(given, own, strict=True))
    return names


def _rename(values: Mapping[str, _T], names: Mapping[str, str]) -> dict[str, _T]:
    """Rename the keys that have another name."""
    return {names.get(name, name): value for name, value in values.items()}


def run_once(session: Session, feeds: Feeds, *, replayed: bool) -> dict[str, Array]:
    """Run one inference; ``replayed``: as often as it takes to capture a CUDA graph, so that it answers by a replay."""
    if not replayed:
        return session.run(feeds)
    bound = session.warm_up(feeds)
    session.enqueue(bound)
    session.synchronize()
    return session.fetch()


def _is_near_rounding(fidelity: Fidelity, unsteady: Collection[str], rounding: Mapping[str, float]) -> bool:
    """Tell whether an unsteady output failed for an error not far from what rounding explains; sets of rows have none.

    Errors that are many times as large are faults of the graph.
    """
    failed = [output for output in fidelity.outputs if not output.passed and output.paired is None]
    return any(
        output.name in unsteady and (output.max_abs_error or 0.0) <= _NEAR_ROUNDING * rounding.get(output.name, 0.0)
        for output in failed
    )


def _explain_rounding(fidelity: Fidelity, known: samples.Samples, names: Mapping[str, str], stage: str) -> str:
    """Say which output rounding explains, the worst of them; nothing where none passes because of it, or one fails."""
    left = _rename(known.rounding_db, names)
    explained = [output for output in fidelity.outputs if output.is_rounding and output.name in left]
    if not explained or not fidelity.passed:
        return ""
    worst = min(explained, key=lambda output: output.sqnr_db or 0.0)
    change = (
        "rounding in the model's QuantizeLinear may change the output"
        if known.quantizes
        else "rounding in float32 may change the output"
    )
    return (
        f"{change} {worst.name!r} to an SQNR of {left[worst.name]:.1f} dB: "
        f"that explains the {worst.sqnr_db or 0:.1f} dB after {stage}"
    )


def _describe_rounding(entries: Sequence[StageFidelity], causes: str) -> list[str]:
    """Warn of differences that only rounding explains, by the largest of them."""
    explained = [entry for entry in entries if entry.rounding_note]
    if not explained:
        return []
    worst = min(explained, key=lambda entry: entry.sqnr_db or 0.0)
    return [f"{worst.rounding_note}; {causes}"]


def _advise_min_sqnr(sqnr_db: float | None) -> str:
    """Say which option allows an SQNR, where it is one of answers that are much alike."""
    if sqnr_db is None or sqnr_db < _LEAST_ADVISED_DB:
        return ""
    return f"; if a loss as small as this is good enough, allow it with --min-sqnr {int(sqnr_db)}"


def _may_be_rounding(fidelity: Fidelity) -> bool:
    """Tell whether outputs failed for an error that is within the rounding of larger answers, and for nothing else."""
    failed = [output for output in fidelity.outputs if not output.passed]
    plain = all(output.finite and output.paired is None and output.sqnr_db is not None for output in failed)
    return bool(failed) and plain and max(output.max_abs_error or 0.0 for output in failed) < _ROUNDING


def _count_not_finite(value: Array) -> int:
    """Count the elements that are NaN or infinite."""
    return int((~np.isfinite(value)).sum()) if np.issubdtype(value.dtype, np.floating) else 0


class Answers(Task):
    """Answer the given model's feeds with a pruned or sparse one: a reference for what is made of that.

    It was changed on purpose, its engines are not.
    """

    title: ClassVar[str] = "reference"
    produces: ClassVar[Kind] = "reference"
    other_tools: ClassVar[tuple[str, ...]] = ("numpy",)

    engine: SerializeAsAny[Engine]

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        given = inputs["reference"].folder
        known, ends = samples.read(given), list[dict[str, tuple[float, float]]]()
        if known.data == samples.SYNTHETIC:
            samples.write_example(out, samples.read_example(given))
        with self.engine.load(inputs["model"], Device()) as session:
            unstable = UnstableNumbers(session.perturb)
            for index, case in enumerate(known.cases):
                for call in range(case.calls):
                    feeds = samples.read_arrays(given, "feeds", index, call)
                    samples.write_arrays(out, "feeds", index, feeds, call)
                    progress(f"running the changed model at batch {case.batch}")
                    outputs = session.run(feeds)
                    before = samples.read_arrays(given, "outputs", index, call)
                    for name, value in outputs.items():
                        if _count_not_finite(value) and not _count_not_finite(before[name]):
                            raise ModelError(
                                f"the changed model answers NaN or Inf in {name!r}, and the given one does not",
                                "prune less, or with other weights left",
                            )
                    ends.append(samples.find_ends(outputs))
                    _write_answer(out, index, call, outputs, unstable.find(feeds, outputs))
        facts = {"spans": samples.join_ends(ends), "unsteady": tuple(sorted(unstable.unsteady))}
        facts |= {"rounding": unstable.movements, "rounding_db": unstable.sqnr_db}
        facts["unverified"] = unstable.find_unverified(known.limit_sets(session.signature).unordered)
        samples.write(out, known.model_copy(update=facts))
        return Effect(file=samples.RECORD, summary=f"{count_words(len(known.cases), 'set')} of feeds answered")
