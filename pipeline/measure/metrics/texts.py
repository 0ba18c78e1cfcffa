"""Judge texts: letters, words, entities, and answers to questions."""

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np

from enginesmith.calibration.dataset import Labels
from enginesmith.pipeline.errors import SampleError
from enginesmith.pipeline.measure.metrics.own_metric import OwnMetric, are_whole, import_library, put_first
from enginesmith.pipeline.measure.statistics import Samples
from enginesmith.pipeline.tensors import Array, Feeds

_BLANK = 0
_WORD = re.compile("[A-Z]?[a-z]+|[A-Z]+")
_FIRST_WORDS, _LAST_WORDS = {"start", "starts", "begin", "first"}, {"end", "ends", "stop", "last"}
"""Words in names of outputs and labels that tell which end of an answer they are for."""
_LONGEST_ANSWER = 30
"""Tokens, as in SQuAD's evaluation of BERT."""


def _count_errors(output: Array, labels: Array, space: int | None = None) -> Array:
    """Count letters that have to be changed, and those that there should be, [samples, 2]; or words, with ``space``.

    An output with scores of letters is decoded as of CTC: the best at each step, repeated ones once, without blanks.
    """
    jiwer = import_library("jiwer")
    compare, lack = (jiwer.process_characters, "is empty") if space is None else (jiwer.process_words, "has no word")
    counts = []
    for number, (given, wanted) in enumerate(zip(_decode(output), labels, strict=True)):
        if not (text := " ".join(_spell(wanted, space).split())):
            raise SampleError(f"the text of {{}} {lack}", "leave such samples out", number)
        judged = compare(text, _spell(given, space))
        errors = judged.substitutions + judged.deletions + judged.insertions
        counts.append((errors, len(text if space is None else text.split())))
    return np.asarray(counts)


def _divide_errors(counts: Array) -> float:
    errors, wanted = counts.sum(axis=0)
    return float(errors / wanted)


def _compare_texts(output: Array, labels: Array) -> Samples:
    """Give 1 where a text has no error."""
    pairs = zip(_decode(output), labels, strict=True)
    return np.asarray([_spell(given) == _spell(wanted) for given, wanted in pairs], np.float64)


def _decode(output: Array) -> Array:
    if output.ndim == 2:
        return output
    best = output.argmax(axis=-1)
    repeated = np.concatenate([np.zeros_like(best[:, :1], bool), best[:, 1:] == best[:, :-1]], axis=1)
    return np.where(repeated | (best == _BLANK), -1, best)


def _spell(numbers: Array, space: int | None = None) -> str:
    """Write numbers as characters; negative ones, and the blank, are none."""
    first = 0x4E00  # characters without spaces or combining marks among them
    return "".join(" " if number == space else chr(first + int(number)) for number in numbers if number > _BLANK)


def _are_letters(output: Array, labels: Array) -> bool:
    whole = output.ndim == 3 or (output.ndim == 2 and output.dtype.kind in "iu")
    return whole and labels.ndim == 2 and are_whole(labels)


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
    "letters as whole numbers above 0, [samples, length], or scores of them, [samples, steps, letters] with 0 for "
    "CTC's blank; labels [samples, length], negative behind the end"
)
_ANSWERS = (
    "scores of tokens to be first and last in the answer: two outputs of shape [samples, tokens], or one of [samples, "
    "tokens, 2]; labels [samples, 2] with the first and the last token, or [samples, answers, 2], negative where there "
    "are fewer answers"
)
METRICS: dict[str, OwnMetric] = {
    "cer": OwnMetric(_count_errors, _are_letters, _TEXTS, _divide_errors, sign=-1.0),
    "exact_match": OwnMetric(_compare_texts, _are_letters, _TEXTS, counts=True),
    "entity_f1": OwnMetric(
        _count_entities,
        _are_tags,
        "scores of tags, [samples, tokens, tags], with 0 for outside, then B and I of each type by turns; labels "
        "[samples, tokens], such tags as whole numbers, negative where a token does not count",
        _score_entities,
    ),
    "answer_f1": OwnMetric(
        partial(_judge_answers, score="f1"), _are_spans, _ANSWERS, join=_join_spans, explain_join=_explain_ends
    ),
    "answer_match": OwnMetric(
        partial(_judge_answers, score="exact_match"),
        _are_spans,
        _ANSWERS,
        counts=True,
        join=_join_spans,
        explain_join=_explain_ends,
    ),
}
"""Name → metric."""


def make_word_errors(space: int) -> OwnMetric:
    """Make the word error rate, for texts with the letter ``space`` between words."""
    return OwnMetric(partial(_count_errors, space=space), _are_letters, _TEXTS, _divide_errors, sign=-1.0)
