"""Look up metrics by their names."""

from collections.abc import Mapping

from enginesmith.pipeline.measure.metrics import boxes, classes, numbers, texts
from enginesmith.pipeline.measure.metrics.own_metric import OwnMetric

METRICS: Mapping[str, OwnMetric] = classes.METRICS | numbers.METRICS | texts.METRICS | boxes.METRICS
"""Name → metric."""
WORD_ERRORS = "wer"
"""Metric whose name also has the number of the letter between words, from 1: ``wer=27``."""


def find_own(name: str) -> OwnMetric | None:
    """Look up a metric of enginesmith's; None if there is none of that name."""
    word, equals, space = name.partition("=")
    if word == WORD_ERRORS and equals and space.isdecimal() and int(space):
        return texts.make_word_errors(int(space))
    return METRICS.get(name)
