"""Compute the task's own metric on labeled data, and its drop against eager on the same samples.

A metric is written ``NAME``, or ``NAME:OUTPUT`` for one output of several: ``top1:category``, ``metrics.py:f:value``.
Outputs that are judged together are written with commas: ``answer_f1:start,end``, ``map:boxes,scores,classes``.
Numbers of classes that a metric has to know are part of its name: ``wer=27``, ``cer=blank:10:text``.
"""

import contextlib
import difflib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import BaseModel

from enginesmith.calibration import user_code
from enginesmith.calibration.dataset import Labels, count_rows, describe_arrays, describe_labels, find_missing_labels
from enginesmith.pipeline.errors import DataError, EnginesmithError, SampleError
from enginesmith.pipeline.frameworks.records import explain_missing
from enginesmith.pipeline.measure.metrics import classes, texts
from enginesmith.pipeline.measure.metrics.own_metric import LABELS_DOUBT, OwnMetric
from enginesmith.pipeline.measure.metrics.table import METRICS, WORD_ERRORS, explain_options, find_own, split_own
from enginesmith.pipeline.measure.statistics import NORMAL, Samples, count_for_width, drop_interval
from enginesmith.pipeline.system import plugins
from enginesmith.pipeline.tensors import Array, Feeds
from enginesmith.pipeline.units import format_metric

Metric = Callable[[dict[str, Array], Any], Any]
"""``(outputs by name, labels)`` → one number for all samples, or an array with one for each; more is better."""
DEFAULT_METRIC = "top1"
"""Where labels fit it, and no other metric was named."""
_OWN_FUNCTION = "give such labels, or a function of your own with --metric file.py:function"
_OF_SEVERAL_CLASSES = (
    "samples have several classes, and no metric of enginesmith's judges scores by such labels: give a function of "
    "your own with --metric file.py:function; or have the model answer scores > 0, say: f1 judges such an output, all "
    "classes together"
)
_OTHER_SIZE = "give masks of the output's size or, for scores, of twice, three times, … its height and width"
_ROUNDING = 1e-5
"""Share of a graded metric below which a drop is rounding, and none.

Kernels in float32 answer alike to about 120 dB, which is 1e-6 of the answers, as they add in another order. A metric of
small errors, such as a mean square of errors of a tenth of the answers, changes by ten times as much.
"""
_SHOWN_NAMES = 4
_PADDING = "attention_mask"
"""Input [samples, tokens] that is 0 for tokens that only fill up a text."""
_FINITE = "remove those samples, or give a function with --metric file.py:function that leaves them out"


class MetricError(DataError):
    """A metric that failed on these samples; on more of them it may not."""


class Quality(BaseModel, frozen=True):
    """A metric on one engine's outputs and on the baseline's; ``drop`` is positive where the engine is worse."""

    metric: str
    output: str | None = None
    """The output that was judged; None where the metric was given all of them."""
    other_outputs: tuple[str, ...] = ()
    value: float
    spread: float | None = None
    """Standard deviation of the metric of single samples; None where the metric is one number."""
    baseline: float
    guess: float | None = None
    """Metric of the most frequent label as the answer to all samples; None for metrics but top1."""
    drop: float
    """0 where it is no more than the rounding of float32 in a graded metric; so are the ends of its interval."""
    drop_low: float | None = None
    drop_high: float | None = None
    """95 % interval of the mean drop, paired by sample; by bootstrap where the metric is one number."""
    deviation: float | None = None
    """Standard deviation of the drops of single samples; None where the metric is one number."""
    samples: int
    counted: bool = False
    """True where each sample is right or wrong, and scores are not graded."""
    worse: int | None = None
    """Samples that the baseline alone answers right, and this engine alone; None where scores are graded."""
    better: int | None = None
    whole: bool = False
    """True where the metric is one number for all samples; the interval is of samples drawn anew."""
    data_sha256: str = ""
    """Digest of the samples and their labels."""
    batch: int | None = None
    """Samples that were computed together, where they change each other's answers."""
    reasons: dict[str, str] = {}

    @property
    def basis(self) -> str:
        """Describe how many samples were judged, and how they were computed."""
        return f"{self.samples} samples" + (f" in batches of {self.batch}" if self.batch else "")

    @property
    def seen_high(self) -> float | None:
        """Upper end of the drop by what these samples show: 0 where no answer changed, however few there are.

        Variants are chosen by it, as nothing is known against those that changed no answer.
        """
        if self.deviation is None:
            return self.drop_high
        return self.drop + NORMAL * self.deviation / math.sqrt(self.samples)

    @property
    def title(self) -> str:
        """The metric and, where the model has several outputs, the one that was judged."""
        if self.output is None or not self.other_outputs:
            return self.metric
        return f"{parse_metric(self.metric)[0]} of {self.output!r}"

    def explain_doubt(self) -> str:
        """Explain why a budget held on this as the reference says little; empty where nothing speaks against it.

        No more is right than of one answer to all samples, or nothing is right at all.
        """
        own = find_own(parse_metric(self.metric)[0])
        if self.guess is not None and self.value <= self.guess and self.value < 1:
            reached = f"and the most frequent label as every answer would have {format_metric(self.guess)}"
        elif own and own.worst is not None and own.sign * (self.value - own.worst) <= 0:
            reached = "as if no answer were right"
        else:
            return ""
        return f"{reached}: {own.doubt if own else LABELS_DOUBT}, and a budget held on them says little"

    def explain_excess(self, max_drop: float) -> str:
        """Explain that more is lost than allowed, as far as so many samples tell; empty where that is not shown.

        Of graded scores, the upper end of what the samples show has to be allowed. Where they are right or wrong, it
        takes a whole sample above what is allowed: of 96 samples a single one is a drop of 0.0104, and no sign that
        0.01 is exceeded. The interval of a metric of all samples is wide likewise. Where more samples would show that
        the same drop is allowed, it is told how many.
        """
        drop, high = format_metric(self.drop), self.seen_high or 0.0
        if self.counted:
            above = round((self.drop - max_drop) * self.samples, 6) >= 1
            return f"the drop of {drop} is more than {max_drop:g}" if above else ""
        if self.drop > max_drop:
            return f"the drop of {drop} is more than {max_drop:g}"
        if not self.whole and high > max_drop:
            excess = f"the drop of {drop} may be up to {format_metric(high)}, which is more than {max_drop:g}"
            more = self.count_missing(max_drop)
            return f"{excess}; if it stays, about {more} more samples for choosing are enough" if more else excess
        return ""

    def count_missing(self, max_drop: float) -> int:
        """Count the samples that are missing to show that this drop of graded scores is allowed.

        0 where there are enough, and where no number of samples shows that.
        """
        high = self.seen_high or 0.0
        if self.counted or self.whole or high <= max_drop or self.drop >= max_drop:
            return 0
        return self._count_for(high - self.drop, max_drop - self.drop) - self.samples

    def _count_for(self, half: float, wanted: float) -> int:
        """Count the samples of graded scores with which half an interval is as small as wanted."""
        return math.ceil(round(self.samples * (half / wanted) ** 2, 6))  # it shrinks with the root of the number

    def explain_width(self, max_drop: float) -> str:
        """Tell how many more samples it takes to see the largest allowed drop; empty where there are enough."""
        if max_drop <= 0:
            return ""
        half = ((self.drop_high or 0.0) - (self.drop_low or 0.0)) / 2
        if half <= max_drop:
            return ""
        if self.worse is None or self.better is None:
            needed = self._count_for(half, max_drop)
        else:
            needed = count_for_width(max_drop, (self.worse + self.better) / self.samples)
        return (
            f"{self.samples} samples tell the drop to ±{format_metric(half)}: to see one of {max_drop:g}, about "
            f"{needed - self.samples} more are needed"
        )


def explain_few_samples(parts: Mapping[str, int], metric: str | None, max_drop: float | None) -> str:
    """Explain that a single sample is a larger loss than is allowed, in a part that is judged; empty where it is not.

    Metrics that are no share of right answers have no such limit.
    """
    counts = {name: count for name, count in parts.items() if name != "calibration"}
    own = find_own(parse_metric(metric or "")[0])
    least = math.ceil(round(1 / max_drop, 6)) if max_drop and own and own.counts else 0
    if all(count >= least for count in counts.values()):
        return ""
    listing = " and ".join(f"{count} for {name}" for name, count in counts.items())
    return (
        f"a drop of {max_drop:g} is less than one sample: there are {listing}, and it needs at least {least} for each"
    )


def evaluate(metric: str, outputs: Feeds, baseline: Feeds, labels: Labels | None, seed: int = 0) -> Quality:
    """Judge outputs and the baseline's outputs on the same labels; the first axis of each is the sample.

    ``metric`` is a name of ``METRICS``, a plug-in's, or ``module:function``, each perhaps with ``:OUTPUT`` after it.
    What it leaves open, the labels given settle; see :func:`settle_metric`.

    Raises:
        SampleError: a label, or the metric of a sample, is no finite number.
        DataError: the metric is not found, does not fit the outputs and labels, raises, returns no finite numbers, or
            other ones for the same outputs; or there are no labels.
    """
    if labels is None:
        raise DataError(
            f"the data has no labels, and the metric {metric} needs them",
            "name the array that holds them with --labels KEY",
        )
    if not (rows := count_rows(labels)):
        raise DataError("there are no labeled samples to evaluate on", "give data with labels: --eval DATA")
    metric = settle_metric(metric, baseline, labels)
    function, same = find_metric(metric), outputs is baseline
    (outputs, labels), (baseline, _) = (join_arrays(metric, side, labels) for side in (outputs, baseline))
    chosen = choose_output(metric, outputs, labels)

    def apply(given: Feeds) -> Samples:
        return _apply(metric, function, given if chosen is None else {chosen: given[chosen]}, labels, rows)

    ours = apply(outputs)
    if same and find_own(parse_metric(metric)[0]) is None:
        _check_repeats(metric, apply, outputs, ours)
    theirs = ours if same else apply(baseline)
    drops = sign_of(metric) * (theirs - ours)
    value, reference, drop = (float(np.mean(each)) for each in (ours, theirs, drops))
    others = () if chosen is None else tuple(name for name in outputs if name != chosen)
    own = find_own(parse_metric(metric)[0])
    its = None if own is None or chosen is None else _labels_for(chosen, labels)
    counted = bool(np.isin([ours, theirs], (0, 1)).all())
    least = 0.0 if counted else _ROUNDING * max(abs(value), abs(reference))
    judged = Quality(
        metric=metric,
        output=chosen,
        other_outputs=others,
        value=value,
        baseline=reference,
        guess=own.guess(its) if own and own.guess and its is not None else None,
        drop=_drop_rounding(drop, least),
        samples=rows,
        counted=counted,
    )
    whole = ours.ndim == 0 or theirs.ndim == 0
    interval: tuple[float, float] | None
    if counted and not (whole or same):
        worse, better = (int((sign * drops > 0).sum()) for sign in (1, -1))
        judged = judged.model_copy(update={"worse": worse, "better": better})
    if not whole:
        deviation = _drop_rounding(float(drops.std()), least * math.sqrt(rows) / NORMAL)
        judged = judged.model_copy(update={"deviation": deviation, "spread": float(ours.std())})
        largest = 1.0 if counted and not same else float(np.abs(drops).max())
        interval = drop_interval(drops, largest)
    elif own is None or chosen is None:
        return explain_missing(judged, f"{metric} returns one number for all samples")
    else:
        interval = None if its is None else own.estimate_drop(outputs[chosen], baseline[chosen], its, seed)
    if interval is None:
        return explain_missing(judged, f"{metric} cannot be computed for most sets drawn from so few samples")
    low, high = (_drop_rounding(end, least) for end in interval)
    return judged.model_copy(update={"drop_low": low, "drop_high": high, "whole": whole})


def _drop_rounding(value: float, least: float) -> float:
    """Return 0 for what is no more than rounding."""
    return value if abs(value) > least else 0.0


def join_arrays(metric: str, outputs: Feeds, labels: Labels) -> tuple[Feeds, Labels]:
    """Join arrays that a metric judges together, as the greatest scores and their classes."""
    name, chosen = parse_metric(metric)
    own = find_own(name)
    if own is not None and own.join:
        return own.join(outputs, labels, chosen.split(",") if chosen else ())
    return (_place_scores(outputs, labels, chosen) if name in classes.METRICS else outputs), labels


def settle_metric(text: str, outputs: Feeds, labels: Labels) -> str:
    """Write into a metric's name what it leaves open, as CTC's blank, by labels and the reference's outputs.

    Parts of a set are judged alike only if it is settled by the labels of all samples.

    Raises:
        DataError: it cannot be settled, or the metric does not fit the outputs and labels.
    """
    name, output = parse_metric(text)
    own = find_own(name)
    if own is None or own.settle is None:
        return text
    outputs, labels = join_arrays(text, outputs, labels)
    chosen = choose_output(text, outputs, labels)
    its = None if chosen is None else _labels_for(chosen, labels)
    assert chosen is not None  # it is a metric of enginesmith's
    assert its is not None  # the output was chosen by its labels
    name = own.settle(name, outputs[chosen], its)
    return f"{name}:{output}" if output else name


def _place_scores(outputs: Feeds, labels: Labels, chosen: str | None) -> Feeds:
    """Replace each pair of greatest scores and their classes, as of torch.topk, by the scores of all classes.

    These have the name of the greatest scores, or that of the classes if the metric names it.
    """
    results = dict(outputs)
    pairs = [(pair, pair[1] == f"{pair[0]}_indices") for pair in itertools.permutations(outputs, 2)]
    for (values, indices), named in sorted(pairs, key=lambda entry: not entry[1]):
        name, other = (indices, values) if chosen == indices else (values, indices)
        its = _labels_for(name, labels)
        given = outputs[values], outputs[indices]
        if {values, indices} <= results.keys() and its is not None and classes.are_greatest(*given, its, single=named):
            results[name] = classes.place_scores(*given, its)
            del results[other]
    return results


def leave_out_padding(metric: str | None, outputs: Feeds, inputs: Feeds) -> dict[str, Array]:
    """Give padding -inf as its scores, [samples, tokens] or [samples, tokens, 2], if the metric chooses tokens by them.

    Padding is what ``attention_mask`` has 0 for among the inputs of the same samples, [samples, tokens].
    """
    own, mask = find_own(parse_metric(metric)[0]) if metric else None, inputs.get(_PADDING)
    if own is None or not own.chooses_tokens or mask is None:
        return dict(outputs)
    results = dict(outputs)
    for name, array in outputs.items():
        if array.dtype.kind == "f" and array.shape in {mask.shape, (*mask.shape, 2)}:
            there = mask.reshape(*mask.shape, *(1,) * (array.ndim - mask.ndim)) != 0
            results[name] = np.where(there, array, array.dtype.type(-np.inf))
    return results


def choose_output(metric: str, outputs: Feeds, labels: Labels) -> str | None:
    """Choose the output that a metric judges; None for a function of the user's that takes all of them.

    It is the one that the metric names; else, for a metric of enginesmith's, the first if it fits the labels, or the
    only one that does.

    Raises:
        DataError: there is no such output, it does not fit, or several do that are not the first.
    """
    name, output = parse_metric(metric)
    if output is not None and output not in outputs:
        (near,) = difflib.get_close_matches(output, outputs, 1, 0)
        raise DataError(
            f"the metric {metric} names the output {output!r}, and the model has {describe_arrays(outputs)}",
            f"name one of these, such as --metric {name}:{near}",
        )
    own = find_own(name)
    if own is None:
        return output
    labeled = ((key, array, _labels_for(key, labels)) for key, array in outputs.items())
    fitting = [key for key, array, its in labeled if its is not None and own.accepts(array, its)]
    check_finite(labels)
    first = output or next(iter(outputs))
    if first in fitting or (len(fitting) == 1 and output is None):
        return first if first in fitting else fitting[0]
    its = _labels_for(first, labels)
    if name in classes.METRICS and its is not None and (row := classes.find_outside(outputs[first], its)) is not None:
        raise SampleError(
            f"a label is {its.reshape(-1)[row]}, and the output {first!r} has {outputs[first].shape[1]} classes, first "
            "for {}",
            "number the classes from 0, or remove those samples",
            row,
        )
    if name in classes.OF_MAPS and its is not None and (problem := classes.describe_other_size(outputs[first], its)):
        raise DataError(f"{name} needs {problem} ({first!r})", f"{_OTHER_SIZE}; or {_OWN_FUNCTION}")
    raise DataError(
        f"{name} needs {own.needs}; {first!r} is not that: the outputs are {describe_arrays(outputs)}, and the labels "
        f"{describe_labels(labels)}",
        " or ".join(f"--metric {name}:{key}" for key in fitting) or _suggest_metrics(name, first, outputs, labels),
    )


def explain_choice(metric: str, chosen: str | None) -> list[str]:
    """Explain what was assumed of outputs that are judged together, where the metric does not name them."""
    name, output = parse_metric(metric)
    own = find_own(name)
    if own is None or own.explain_join is None or output is not None or chosen is None:
        return []
    return [*filter(None, [own.explain_join(chosen)])]


def explain_numbering(metric: str, outputs: Feeds, labels: Labels, names: Mapping[int, str]) -> list[str]:
    """Explain that scores are of more classes than there are names, which were numbered in their order.

    A class that lacks its name then shifts the numbers of all later ones.
    """
    joined, _ = join_arrays(metric, outputs, labels)
    chosen = choose_output(metric, outputs, labels)
    scores = None if chosen is None else joined[chosen]
    # Of the greatest scores alone, nobody knows how many classes there are.
    is_known = scores is not None and scores is outputs.get(chosen or "") and parse_metric(metric)[0] in classes.METRICS
    if not names or not is_known or scores is None or scores.ndim != len("NC") or scores.shape[1] <= len(names):
        return []
    shown = ", ".join(f"{name} = {number}" for number, name in itertools.islice(names.items(), _SHOWN_NAMES))
    more = ", …" if len(names) > _SHOWN_NAMES else ""
    return [
        f"{len(names)} classes are numbered in alphabetical order of their names ({shown}{more}), and {chosen!r} has "
        f"{scores.shape[1]}: the numbers have to be the model's. If a class of folders has no images, add an empty "
        "folder of its name; or write the model's numbers as labels or names of folders"
    ]


def check_finite(labels: Labels, remedy: str = _FINITE) -> None:
    """Check that labels are finite numbers, as far as they are numbers.

    Raises:
        SampleError: a label is not.
    """
    if (rows := find_missing_labels(labels)).size:
        raise SampleError("the labels have NaN or infinity, first for {}", remedy, int(rows[0]))


def _suggest_metrics(name: str, judged: str, outputs: Feeds, labels: Labels) -> str:
    """Name the metrics that the output and its labels fit, else another output; or the labels that a metric takes."""
    its = _labels_for(judged, labels)
    if its is not None and name in classes.METRICS and classes.begin_with_one(outputs[judged], its):
        return f"subtract 1 from the labels: classes are counted from 0, to {outputs[judged].shape[1] - 1} here"
    if its is not None and name in classes.METRICS and classes.are_one_hot(its):
        return f"the labels are one-hot: give the class of each sample, labels.argmax(axis=1); or {_OWN_FUNCTION}"
    if its is not None and classes.are_multi_hot(outputs[judged], its):
        return _OF_SEVERAL_CLASSES
    if its is not None and its.dtype.kind in "USO":
        letters = name.partition("=")[0] in texts.OF_LETTERS
        numbers = "the numbers of its letters" if letters else "the number of its class"
        return f"write each text as {numbers}, in the order of the outputs, from 0; or {_OWN_FUNCTION}"
    order = sorted(outputs, key=lambda key: key != judged)
    ways = next(filter(None, (_list_fitting(key, outputs, labels) for key in order)), [])
    return "; or ".join([*ways, _OWN_FUNCTION])


def _list_fitting(key: str, outputs: Feeds, labels: Labels) -> list[str]:
    """List ways to judge an output by its labels; its name is written behind a metric's unless it is the first."""
    output, its = outputs[key], _labels_for(key, labels)
    if its is None:
        return []
    ending = "" if key == next(iter(outputs)) else f":{key}"
    fitting = [f"{name}{ending}" for name, own in METRICS.items() if (own.suits or own.accepts)(output, its)]
    ways = [f"use --metric {' or '.join(fitting)}, which these fit"] if fitting else []
    if classes.are_last(output, its):
        maps = " and ".join(classes.OF_MAPS)
        ways.append(f"add --append argmax{ending}, with which {maps} judge the class of each step")
    return ways


def parse_metric(text: str) -> tuple[str, str | None]:
    """Split a metric's text into its function and its output: ``top1``, ``top1:category``, ``metrics.py:f:value``."""
    if own := split_own(text):
        return own
    name, _, output = text.partition(":")
    if plugins.offered(plugins.METRICS, name):
        return name, output or None
    return user_code.split_reference(text)


def name_output(text: str, keys: Sequence[str], outputs: Iterable[str]) -> str:
    """Name the output whose labels are asked for by its own name, where a metric of enginesmith's names none itself."""
    own, output = find_own(parse_metric(text)[0]), parse_metric(text)[1]
    is_labeled = own is not None and output is None and len(keys) == 1 and keys[0] in outputs
    return f"{text}:{keys[0]}" if is_labeled else text


def sign_of(text: str) -> float:
    """Return -1 for a metric of which less is better, else 1."""
    own = find_own(parse_metric(text)[0])
    return own.sign if own else 1.0


def find_metric(text: str) -> Metric:
    """Look up a metric by name; only a name that the table lacks is looked up elsewhere.

    Raises:
        DataError: there is none, the code that holds it cannot be imported, or it cannot be called as metrics are.
        MissingCapability: it is a plug-in that cannot be loaded.
    """
    name = parse_metric(text)[0]
    if own := find_own(name):
        return lambda outputs, labels: next(_compute(own, key, array, labels) for key, array in outputs.items())
    if ":" not in name:
        check_metric(name)
    metric: Metric = user_code.find(name, "metric") if ":" in name else plugins.load(plugins.METRICS, name)
    if not callable(metric):
        raise DataError(f"the metric {name} is no function", "give it as module:function or file.py:function")
    user_code.check_arguments(metric, f"the metric {name}", "outputs", "labels")
    return metric


def check_metric(text: str) -> None:
    """Check that there is a metric of that name; none of other people's code is run.

    Raises:
        DataError: there is none, or ``module:function`` names no module.
    """
    name = parse_metric(text)[0]
    is_there = find_own(name) or plugins.offered(plugins.METRICS, name)
    if not is_there and (explained := explain_options(text)):
        raise DataError(*explained)
    if text.endswith(":"):
        raise DataError(
            f"no output is named after the colon of the metric {text!r}", f"write {text[:-1]}, or {text}OUTPUT"
        )
    if is_there:
        return
    if ":" in name:
        user_code.check_reference(name, "metric")
        return
    others = [f"{plugin.name} (of {plugin.distribution})" for plugin in plugins.installed(plugins.METRICS)]
    known = ", ".join((*METRICS, f"{WORD_ERRORS}=SPACE", *others))
    raise DataError(f"there is no metric {text!r}", f"use {known}, module:function or file.py:function")


def identify_metric(text: str | None) -> dict[str, dict[str, str]]:
    """Identify what a plug-in's metric depends on, its distribution's version and code; empty for other metrics."""
    name = parse_metric(text or "")[0]
    code = plugins.identify_code(find_metric(name)) if name and not find_own(name) and ":" not in name else {}
    return {"metric": code} if code else {}


def _copy(outputs: Feeds, labels: Labels) -> tuple[dict[str, Array], Labels]:
    """Copy what a function of the user's is given: it may compute in place, and others are judged by the same."""
    mine = {name: array.copy() for name, array in labels.items()} if isinstance(labels, Mapping) else labels.copy()
    return {name: array.copy() for name, array in outputs.items()}, mine


def _apply(name: str, function: Metric, outputs: Feeds, labels: Labels, rows: int) -> Samples:
    """Apply a metric; returns values of shape () or (samples,)."""
    given = f"it was given the outputs {describe_arrays(outputs)} and the labels {describe_labels(labels)}"
    own = find_own(parse_metric(name)[0]) is not None
    try:
        returned = function(*((dict(outputs), labels) if own else _copy(outputs, labels)))
    except EnginesmithError:
        raise
    except Exception as error:
        raise _explain_error(name, function, error, labels, given) from error
    expected = _OWN_FUNCTION
    if not own:
        expected = (
            f"return one finite number, or an array of {rows} of them, one for each sample; more has to be better"
        )
    try:
        raw = np.asarray(returned)
        known = returned is not None and raw.dtype.kind in "biufO"  # NumPy reads numbers from text, too
        values = raw.astype(np.float64) if known else np.empty((0, 0))
    except (TypeError, ValueError):
        values = np.empty((0, 0))
    if values.ndim > 1 or (values.ndim == 1 and len(values) != rows):
        what = f"the shape {list(values.shape)}" if values.size else f"{type(returned).__name__} {returned!r:.40}"
        raise DataError(f"the metric {name} returned {what}; {given}", expected)
    if not (finite := np.isfinite(values)).all():
        problem = f"the metric {name} returned NaN or infinity"
        if values.ndim:  # more samples do not change that of one
            raise SampleError(f"{problem}, first for {{}}; {given}", expected, int(np.argmin(finite)))
        raise MetricError(f"{problem}; {given}", expected)
    return values


def _check_repeats(name: str, apply: Callable[[Feeds], Samples], outputs: Feeds, first: Samples) -> None:
    """Check that a metric gives the same for the same outputs, after it was given others: the samples turned round.

    Raises:
        DataError: it does not.
    """
    with contextlib.suppress(EnginesmithError):
        apply({key: value[::-1] for key, value in outputs.items()})
    again = apply(outputs)
    if first.shape != again.shape or not np.allclose(first, again, rtol=1e-6, atol=1e-12):
        values = " and then ".join(f"{np.mean(each):.7g}" for each in (first, again))
        raise DataError(
            f"the metric {name} gives {values} for the same answers and labels",
            "have it forget earlier calls and draw no random numbers: a drop would be of those alone",
        )


def _explain_error(name: str, function: Metric, error: Exception, labels: Labels, given: str) -> DataError:
    """Explain what a metric raised: a :class:`MetricError` unless it would raise that for any samples."""
    always = isinstance(error, (AttributeError, NameError, ImportError))
    if isinstance(error, KeyError) and isinstance(error.args[0], str):
        arrays = labels.values() if isinstance(labels, Mapping) else [labels]
        always = all(array.dtype.kind not in "OSU" for array in arrays)  # else it may be a label
    return (DataError if always else MetricError)(
        f"the metric {name} raised {user_code.describe_error(error, function)}; {given}",
        "correct it: a metric takes a dict of arrays by output name, and the labels",
    )


def _compute(metric: OwnMetric, name: str, output: Array, labels: Labels) -> Samples:
    its = _labels_for(name, labels)
    assert its is not None  # the output was chosen by its labels
    return metric.compute(output, its)


def _labels_for(output: str, labels: Labels) -> Array | None:
    """Return an output's labels: of several arrays the one of its name."""
    return labels.get(output) if isinstance(labels, Mapping) else labels
