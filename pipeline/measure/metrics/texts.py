"""Judge texts: letters, words, entities, and answers to questions."""

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from enginesmith.calibration.dataset import Labels
from enginesmith.pipeline.errors import DataError, SampleError
from enginesmith.pipeline.measure.metrics.own_metric import OwnMetric, are_whole, import_library, put_first
from enginesmith.pipeline.measure.statistics import Samples
from enginesmith.pipeline.tensors import Array, Feeds
from enginesmith.pipeline.units import name_some

_NO_LETTER = 0
"""What fills up texts that an output has as whole numbers, besides negative ones."""
_MOST_NAMED = 5
_MOST = 0.5
"""Share of answers above which what they have is no mistake of single ones."""
_WORD = re.compile("[A-Z]?[a-z]+|[A-Z]+")
_FIRST_WORDS, _LAST_WORDS = {"start", "starts", "begin", "first"}, {"end", "ends", "stop", "last"}
"""Words in names of outputs and labels that tell which end of an answer they are for."""
_LONGEST_ANSWER = 30
"""Tokens, as in SQuAD's evaluation of BERT."""


def _count_errors(output: Array, labels: Array, *, blank: int | None = None, space: int | None = None) -> Array:
    """Count letters that have to be changed, and those that there should be, [samples, 2]; or words, with ``space``."""
    jiwer = import_library("jiwer")
    compare, lack = (jiwer.process_characters, "is empty") if space is None else (jiwer.process_words, "has no word")
    counts = []
    for number, (given, wanted) in enumerate(zip(*_read_texts(output, labels, blank), strict=True)):
        if not (text := " ".join(_spell(wanted, space).split())):
            raise SampleError(f"the text of {{}} {lack}", "leave such samples out", number)
        judged = compare(text, _spell(given, space))
        errors = judged.substitutions + judged.deletions + judged.insertions
        counts.append((errors, len(text if space is None else text.split())))
    return np.asarray(counts)


def _divide_errors(counts: Array) -> float:
    errors, wanted = counts.sum(axis=0)
    return float(errors / wanted)


def _compare_texts(output: Array, labels: Array, *, blank: int | None = None) -> Samples:
    """Give 1 where a text has no error."""
    pairs = zip(*_read_texts(output, labels, blank), strict=True)
    return np.asarray([_spell(given) == _spell(wanted) for given, wanted in pairs], np.float64)


def _read_texts(output: Array, labels: Array, blank: int | None) -> tuple[Array, Array]:
    """Read the letters that were answered, and those that there should be; negative where there is none.

    With a blank, the output is decoded as CTC's: the best class of each step, repeated ones once. Without one, the
    output is a text already.
    """
    best = output.argmax(axis=-1) if _has_scores(output) else output
    if blank is not None:
        repeated = np.concatenate([np.zeros_like(best[:, :1], bool), best[:, 1:] == best[:, :-1]], axis=1)
        best = np.where(repeated, -1, best)
    none = _NO_LETTER if blank is None else blank
    given, wanted = (np.where(side == none, -1, side) for side in (best.astype(np.int64), labels.astype(np.int64)))
    return given, wanted


def _spell(numbers: Array, space: int | None = None) -> str:
    """Write numbers as characters; negative ones are none."""
    first = 0x4E00  # characters without spaces or combining marks among them
    return "".join(" " if number == space else chr(first + int(number)) for number in numbers if number >= 0)


def _has_scores(output: Array) -> bool:
    return output.ndim == len("NTC")


def _are_letters(output: Array, labels: Array) -> bool:
    scored = _has_scores(output) and output.shape[2] > 1
    return (scored or (output.ndim == 2 and output.dtype.kind in "iu")) and labels.ndim == 2 and are_whole(labels)


def _are_texts(output: Array, labels: Array) -> bool:
    """Tell whether labels can be texts of what the output has steps for, and are not a class for each step."""
    if not _are_letters(output, labels):
        return False
    steps, longest = output.shape[1], int((labels >= 0).sum(axis=1).max())
    return not _has_scores(output) or (labels.shape[1] != steps and longest <= steps)


def _settle_blank(name: str, output: Array, labels: Array, *, blank: int | None, space: int | None = None) -> str:
    """Find CTC's blank by the labels of all samples, where the metric's name leaves it open; return the full name.

    Raises:
        SampleError: a text has the blank as a letter, which no answer can have.
        DataError: the labels do not tell the blank, it is no class or the letter between words, or whole numbers that
            are not decoded were taken for texts.
    """
    numbers = labels.astype(np.int64)
    if blank is None and _has_scores(output):
        blank = _find_blank(name, output.shape[2], numbers)
        name = _write_blank(name, blank)
    if blank is None:
        _check_decoded(name, output, numbers)
    elif blank == space:
        raise DataError(f"{name} names one class as CTC's blank and as the letter between words", "give two numbers")
    elif _has_scores(output) and blank >= output.shape[2]:
        raise DataError(
            f"{name} names class {blank} as CTC's blank, and the output has the classes 0 to {output.shape[2] - 1}",
            f"name one of these, often the first or the last: blank:0 or blank:{output.shape[2] - 1}",
        )
    _check_letters(name, numbers, blank)
    return name


def _check_letters(name: str, labels: Array, blank: int | None) -> None:
    """Check that no text has the blank as a letter, or 0, where there is no blank."""
    none, where = _NO_LETTER, "in whole numbers that are texts"
    remedy = "number the letters from 1, with negative numbers behind the end"
    if blank is not None:
        none, where = blank, f"with {name}"
        remedy = "name a class as blank that no text has; behind the end of texts, give negative numbers"
    if (rows := ((labels == none) & _mark_letters(labels)).any(axis=1)).any():
        raise SampleError(f"the text of {{}} has {none} as a letter, which is none {where}", remedy, int(rows.argmax()))


def _write_blank(name: str, blank: int) -> str:
    return f"{name}{',' if '=' in name else '='}blank:{blank}"


def _find_blank(name: str, classes: int, labels: Array) -> int:
    """Find the only class that no text has.

    Raises:
        DataError: there is none, or several.
    """
    letters = np.unique(labels[_mark_letters(labels) & (labels < classes)])
    others = np.setdiff1d(np.arange(classes), letters)
    if len(others) == 1:
        return int(others[0])
    if not len(others):
        raise DataError(
            f"{name} needs a class for CTC's blank, and the labels have all {classes} classes of the output as letters",
            "give texts as labels, with negative numbers behind the end; or, if the network answers one letter at each "
            "step, and no blank, a function of your own with --metric file.py:function",
        )
    likely = [number for number in (0, classes - 1) if number in others] or [int(others[0])]
    span = f", from {letters[0]} to {letters[-1]}" if len(letters) else ""
    raise DataError(
        f"{name} needs CTC's blank, and the labels do not tell it: as letters they have {len(letters)} of {classes} "
        f"classes{span}, and any other may be the blank: {name_some(list(map(str, others)), _MOST_NAMED)}",
        "name it: " + " or ".join(f"--metric {_write_blank(name, number)}" for number in likely) + ", say",
    )


def _mark_letters(labels: Array) -> Array:
    """Mark what is a letter for certain, [samples, length].

    Negative numbers are none. Where there are none of these, a number may fill up texts that is at the end of rows
    alone, as zeros do, or the blank.
    """
    there = labels >= 0
    if not labels.size or not there.all():
        return there
    last = np.logical_and.accumulate((labels == labels[:, -1:])[:, ::-1], axis=1)[:, ::-1]
    return ~last | np.isin(labels, labels[~last])


def _check_decoded(name: str, output: Array, labels: Array) -> None:
    """Check that whole numbers are texts, and not CTC's best class of each step.

    Raises:
        DataError: a class that no text has is between the letters of most answers, as the blank is.
    """
    unknown = output[(output >= 0) & ~np.isin(output, labels[_mark_letters(labels)])]
    if not unknown.size:
        return
    numbers, counts = np.unique(unknown, return_counts=True)
    blank = int(numbers[counts.argmax()])
    letters = (output >= 0) & (output != blank)
    begun, ahead = (np.logical_or.accumulate(side, axis=1) for side in (letters, letters[:, ::-1]))
    between = ((output == blank) & begun & ahead[:, ::-1]).any(axis=1)
    if between.mean() > _MOST:
        raise DataError(
            f"{name} takes whole numbers as texts, and {between.sum()} of {len(output)} answers have {blank}, which no "
            "label has, between letters",
            f"if they are the best classes of CTC's steps, name the blank: --metric {_write_blank(name, blank)}",
        )


def _count_entities(output: Array, labels: Array) -> Array:
    """Count entities that were found right, that were found, and that there are, [samples, 3].

    An entity is right if its type, its first and its last token are. Tokens whose label is negative are left out.
    """
    entities = import_library("seqeval.metrics.sequence_labeling").get_entities
    counts = []
    for given, wanted in zip(output.argmax(axis=-1), labels.astype(np.int64), strict=True):
        used = wanted >= 0
        predictions, truth = (set(entities([_name_tag(int(tag)) for tag in tags[used]])) for tags in (given, wanted))
        counts.append((len(predictions & truth), len(predictions), len(truth)))
    return np.asarray(counts)


def _name_tag(number: int) -> str:
    """Write a tag as seqeval reads it: 0 is outside; of each type, the odd number begins and the even one goes on."""
    return f"{'B' if number % 2 else 'I'}-{(number + 1) // 2}" if number else "O"


def _score_entities(counts: Array) -> float:
    right, predictions, wanted = counts.sum(axis=0)
    return float(2 * right / (predictions + wanted)) if predictions + wanted else math.nan


def _are_tags(output: Array, labels: Array) -> bool:
    """Tell whether there are scores of tags for each token, an odd number of them: outside, and two of each type."""
    if output.ndim != 3 or output.shape[2] % 2 == 0 or output.shape[2] == 1:
        return False
    if labels.ndim != 2 or labels.shape[1] != output.shape[1]:
        return False
    return are_whole(labels) and int(labels.max()) < output.shape[2] and bool((labels >= 0).any())


def _judge_answers(output: Array, labels: Array, score: str) -> Samples:
    """Compute SQuAD's F1 or exact match of each answer, its tokens' places being the words."""
    squad = import_library("torchmetrics.functional.text").squad
    judged = []
    for scores, answers in zip(output.astype(np.float64), labels.reshape(len(labels), -1, 2), strict=True):
        prediction = {"prediction_text": _write_span(*_find_span(scores)), "id": ""}
        texts = [_write_span(*answer) for answer in answers.astype(int) if answer[0] >= 0]
        wanted = {"answers": {"answer_start": [0] * len(texts), "text": texts}, "id": ""}
        judged.append(float(squad([prediction], [wanted])[score]) / 100)
    return np.asarray(judged)


def _find_span(scores: Array) -> tuple[int, int]:
    """Find the first and the last token, [tokens, 2], whose scores together are the greatest."""
    together = scores[:, None, 0] + scores[None, :, 1]
    allowed = np.tri(len(scores), k=_LONGEST_ANSWER - 1, dtype=bool) & ~np.tri(len(scores), k=-1, dtype=bool)
    first, last = np.unravel_index(np.where(allowed, together, -np.inf).argmax(), together.shape)
    return int(first), int(last)


def _write_span(first: int, last: int) -> str:
    return " ".join(map(str, range(first, last + 1)))


def _are_spans(output: Array, labels: Array) -> bool:
    """Tell whether there are scores of tokens to be first and last, and of each sample an answer or several."""
    if output.ndim != 3 or output.shape[2] != 2 or output.dtype.kind != "f":
        return False
    if labels.ndim not in (2, 3) or labels.shape[-1] != 2 or not are_whole(labels):
        return False
    first, last = labels.reshape(len(labels), -1, 2).transpose(2, 0, 1)
    there = first >= 0
    return bool(there.any(axis=1).all() and (first <= last)[there].all() and last.max() < output.shape[1])


def _join_spans(outputs: Feeds, labels: Labels, names: Sequence[str]) -> tuple[Feeds, Labels]:
    """Join the scores of first and of last tokens, two outputs of the form [samples, tokens]; labels likewise.

    Which is which, their names tell, else their order; of outputs in ``names``, always their order.
    """
    if isinstance(labels, Mapping) and len({array.shape for array in labels.values()}) == 1:
        labels = np.stack([labels[key] for key in _find_ends(list(labels)) or labels], axis=-1)
    flat = {key for key, array in outputs.items() if array.ndim == 2 and array.dtype.kind == "f"}
    pair = [key for key in names or outputs if key in flat]
    if len(pair) != 2 or outputs[pair[0]].shape != outputs[pair[1]].shape:
        return outputs, labels
    pair = pair if names else list(_find_ends(pair) or pair)
    return put_first(outputs, pair, np.stack([outputs[key] for key in pair], axis=-1)), labels


def _find_ends(names: Sequence[str]) -> tuple[str, str] | None:
    """Find which of two names is that of the start, and which that of the end; None where they do not tell."""
    words = {name: {word.lower() for word in _WORD.findall(name)} for name in names}
    firsts, lasts = ([name for name in names if words[name] & those] for those in (_FIRST_WORDS, _LAST_WORDS))
    tells = len(names) == 2 and len(firsts) == len(lasts) == 1 and firsts != lasts
    return (firsts[0], lasts[0]) if tells else None


def _explain_ends(joined: str) -> str:
    """Say which output is taken as that of the first token, where the names of two that were joined do not tell."""
    names = joined.split(",")
    if len(names) != 2 or _find_ends(names):
        return ""
    first, last = names
    taken = f"{first!r} is taken as the scores of an answer's first token, and {last!r} as those of its last"
    return f"{taken}, as their names do not tell (--metric NAME:{last},{first} for the other way round)"


_TEXTS = (
    "letters as whole numbers above 0, [samples, length], or scores of CTC's classes, [samples, steps, classes], of "
    "which one is the blank; labels [samples, length], letters as whole numbers, negative behind the end"
)
_ANSWERS = (
    "scores of tokens to be first and last in the answer: two outputs of shape [samples, tokens], or one of [samples, "
    "tokens, 2]; labels [samples, 2] with the first and the last token, or [samples, answers, 2], negative where there "
    "are fewer answers"
)
_OTHER_LETTERS = (
    "labels may not belong to the samples (their order, or how letters are numbered), or another class is CTC's blank "
    "(blank:NUMBER behind the metric's name and =)"
)
OF_LETTERS = ("cer", "exact_match", "wer")
"""Metrics that take letters, and in whose names CTC's blank may be given."""


def make_letter_metric(name: str, *, blank: int | None = None, space: int | None = None) -> OwnMetric:
    """Make a metric of ``OF_LETTERS``, of CTC with this blank, and for ``wer`` with this letter between words."""
    if name == "exact_match":
        return OwnMetric(
            partial(_compare_texts, blank=blank),
            _are_letters,
            _TEXTS,
            counts=True,
            suits=_are_texts,
            settle=partial(_settle_blank, blank=blank),
            worst=0.0,
            doubt=_OTHER_LETTERS,
        )
    return OwnMetric(
        partial(_count_errors, blank=blank, space=space),
        _are_letters,
        _TEXTS,
        _divide_errors,
        sign=-1.0,
        suits=_are_texts,
        settle=partial(_settle_blank, blank=blank, space=space),
        worst=1.0,
        doubt=_OTHER_LETTERS,
    )


METRICS: dict[str, OwnMetric] = {
    "cer": make_letter_metric("cer"),
    "exact_match": make_letter_metric("exact_match"),
    "entity_f1": OwnMetric(
        _count_entities,
        _are_tags,
        "scores of tags, [samples, tokens, tags], with 0 for outside, then B and I of each type by turns; labels "
        "[samples, tokens], such tags as whole numbers, negative where a token does not count",
        _score_entities,
        worst=0.0,
    ),
    "answer_f1": OwnMetric(
        partial(_judge_answers, score="f1"),
        _are_spans,
        _ANSWERS,
        join=_join_spans,
        explain_join=_explain_ends,
        worst=0.0,
        chooses_tokens=True,
    ),
    "answer_match": OwnMetric(
        partial(_judge_answers, score="exact_match"),
        _are_spans,
        _ANSWERS,
        counts=True,
        join=_join_spans,
        explain_join=_explain_ends,
        worst=0.0,
        chooses_tokens=True,
    ),
}
"""Name → metric."""
