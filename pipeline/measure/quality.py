"""Compute the task's own metric on labelled data, and its drop against eager on the same samples."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from enginesmith.calibration import user_code
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.measure.rows import explain_missing
from enginesmith.pipeline.measure.statistics import Samples, mean_interval
from enginesmith.pipeline.system import plugins
from enginesmith.pipeline.tensors import Array, Feeds

Metric = Callable[[dict[str, Array], Any], Any]
"""``(outputs by name, labels)`` → one number for all samples, or an array with one for each; more is better."""


class Quality(BaseModel):
    """A metric on one engine's outputs and on the baseline's; ``drop`` is positive where the engine is worse."""

    model_config = ConfigDict(frozen=True)

    metric: str
    value: float
    baseline: float
    drop: float
    drop_low: float | None = None
    drop_high: float | None = None
    """95 % bootstrap interval of the mean drop, paired by sample."""
    samples: int
    reasons: dict[str, str] = {}


def evaluate(metric: str, outputs: Feeds, baseline: Feeds, labels: Array, seed: int = 0) -> Quality:
    """Judge outputs and the baseline's outputs on the same labels; the first axis of each is the sample.

    ``metric`` is ``top1``, ``top5``, ``mse`` (less is better), a plug-in's name, or ``module:function``.

    Raises:
        DataError: the metric is not found, raises, or returns no finite numbers; or there are no samples.
    """
    if not len(labels):
        raise DataError("there are no labeled samples to evaluate on", "give data with labels: --eval DATA")
    function = find_metric(metric)
    sign = -1.0 if function is mse else 1.0
    ours, theirs = (_apply(metric, function, each, labels) for each in (outputs, baseline))
    drops = sign * (theirs - ours)
    value, reference, drop = (float(np.mean(each)) for each in (ours, theirs, drops))
    judged = Quality(metric=metric, value=value, baseline=reference, drop=drop, samples=len(labels))
    if ours.ndim == 0 or theirs.ndim == 0:
        return explain_missing(judged, f"{metric} returns one number for all samples")
    low, high = mean_interval(drops, seed)
    return judged.model_copy(update={"drop_low": low, "drop_high": high})


def find_metric(text: str) -> Metric:
    """Look up a metric by name; only a name that the table lacks is looked up elsewhere.

    Raises:
        DataError: there is none, or the code that holds it cannot be imported.
        MissingCapability: it is a plug-in that cannot be loaded.
    """
    if text in METRICS:
        return METRICS[text]
    if ":" not in text:
        check_metric(text)
    metric: Metric = user_code.find(text, "metric") if ":" in text else plugins.load(plugins.METRICS, text)
    if not callable(metric):
        raise DataError(f"the metric {text} is no function", "give it as module:function or file.py:function")
    return metric


def check_metric(text: str) -> None:
    """Check that there is a metric of that name; none of other people's code is run.

    Raises:
        DataError: there is none, or ``module:function`` names no module.
    """
    if text in METRICS or plugins.offered(plugins.METRICS, text):
        return
    if ":" in text:
        user_code.check_reference(text, "metric")
        return
    others = [f"{plugin.name} (of {plugin.distribution})" for plugin in plugins.installed(plugins.METRICS)]
    known = ", ".join((*METRICS, *others))
    raise DataError(f"there is no metric {text!r}", f"use {known}, module:function or file.py:function")


def identify_metric(text: str | None) -> dict[str, str]:
    """Compute what a plug-in's metric depends on, its distribution's version and code; empty for other metrics."""
    named = text is not None and text not in METRICS and ":" not in text
    return plugins.identify_code(find_metric(text)) if text is not None and named else {}


def _apply(name: str, function: Metric, outputs: Feeds, labels: Array) -> Samples:
    """Apply a metric; returns values of shape () or (samples,)."""
    try:
        values = np.asarray(function(dict(outputs), labels), dtype=np.float64)
    except DataError:
        raise
    except Exception as error:
        shapes = ", ".join(f"{key}: {value.dtype}{list(value.shape)}" for key, value in outputs.items())
        raise DataError(
            f"the metric {name} raised {type(error).__name__}: {error}",
            f"it was given the outputs {{{shapes}}} and {len(labels)} labels",
        ) from error
    if values.ndim > 1 or (values.ndim == 1 and len(values) != len(labels)) or not np.isfinite(values).all():
        raise DataError(
            f"the metric {name} returned {values.dtype}{list(values.shape)} with values that cannot be used",
            f"return one finite number, or {len(labels)} of them, one for each sample",
        )
    return values


def mse(outputs: dict[str, Array], labels: Array) -> Samples:
    """Compute the mean squared difference of the first output to labels of the same shape, for each sample."""
    first = next(iter(outputs.values()))
    if first.shape != labels.shape:
        raise DataError(
            f"the output is {list(first.shape)} and the labels are {list(labels.shape)}", "mse compares alike"
        )
    apart = (first.astype(np.float64) - labels).reshape(len(labels), -1)
    return np.asarray((apart**2).mean(axis=1))


def _find_among_greatest(outputs: dict[str, Array], labels: Array, count: int) -> Samples:
    """Give 1 where the label's logit is among so many greatest of the first output, shape (samples, classes)."""
    logits = next(iter(outputs.values()))
    if logits.ndim != 2 or labels.shape != logits.shape[:1]:
        raise DataError(
            f"top{count} takes logits of shape [samples, classes] and one label each, and got {list(logits.shape)} and "
            f"{list(labels.shape)}",
            "give a metric of your own: --metric module:function",
        )
    best = np.argsort(-logits.astype(np.float64), axis=1, kind="stable")[:, :count]
    return np.asarray((best == labels[:, None]).any(axis=1), np.float64)


METRICS: Mapping[str, Metric] = {
    "top1": partial(_find_among_greatest, count=1),
    "top5": partial(_find_among_greatest, count=5),
    "mse": mse,
}
"""Name → function. A metric is one function and one line here; or it is a plug-in's, or the user's."""
