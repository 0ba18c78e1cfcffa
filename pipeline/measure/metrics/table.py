"""Look up metrics by their names."""

import re
from collections.abc import Mapping

from enginesmith.pipeline.measure.metrics import boxes, classes, numbers, texts
from enginesmith.pipeline.measure.metrics.own_metric import OwnMetric

METRICS: Mapping[str, OwnMetric] = classes.METRICS | numbers.METRICS | texts.METRICS | boxes.METRICS
"""Name → metric."""
WORD_ERRORS = "wer"
"""Metric whose name also has the number of the letter between words: ``wer=27``."""
_NAME = r"(\w+)(?:=(?:(\d+)(?:,blank:(\d+))?|blank:(\d+)))?"
"""Name, the number of the letter between words, and that of CTC's blank, with such a letter or without."""
_WITH_OUTPUT = re.compile(rf"({_NAME})(?::(.*))?", re.DOTALL)


def find_own(name: str) -> OwnMetric | None:
    """Look up a metric of enginesmith's, such as ``top1`` or ``wer=27,blank:0``; None if there is none of that name."""
    if "=" not in name:
        return METRICS.get(name)
    match = re.fullmatch(_NAME, name)
    if match is None or match[1] not in texts.OF_LETTERS or (match[1] == WORD_ERRORS) != bool(match[2]):
        return None
    space, blank = (None if number is None else int(number) for number in (match[2], match[3] or match[4]))
    return texts.make_letter_metric(match[1], blank=blank, space=space)


def split_own(text: str) -> tuple[str, str | None] | None:
    """Split the text of a metric of enginesmith's into its name and its output; None if there is none of that name."""
    match = _WITH_OUTPUT.fullmatch(text)
    return (match[1], match[6] or None) if match and find_own(match[1]) else None


def explain_options(text: str) -> tuple[str, str] | None:
    """Explain what is wrong with the options in a metric's name, and how they are written; None if it takes none."""
    word = re.split("[=:]", text, maxsplit=1)[0]
    if word not in texts.OF_LETTERS:
        return None
    if word == WORD_ERRORS and not re.match(rf"{word}=\d", text):
        problem = f"the metric {text!r} does not name the letter between words"
        return problem, f"give its number, such as --metric {word}=27; or with CTC's blank, {word}=27,blank:0"
    option = f"{word}=27,blank:0" if word == WORD_ERRORS else f"{word}=blank:0"
    return (
        f"the options of the metric {text!r} cannot be read",
        f"name CTC's blank by its number, such as --metric {option}; or omit it where the labels tell it",
    )
