"""Search for groups that stay in floating point: few measured trials, each step a function of those before.

1. Everything quantized, until a trial passes: where some group loses much, the graph with channels rescaled, and with
   multiplications that rescale more; the graph as it is; the best of these with activations in uint8, where int8 is
   faster; with biases corrected for the mean error of weights; then with the ranges of one more method after the other.
   What fits the most common cause of the groups that lose much comes before the other changes.
2. Where none does: with the best of these (where noise decides, one in whose form the least work is in groups that lose
   much), the most sensitive groups stay in floating point: those that alone change the answers most for the work in
   them. First as many as make most of the error; their number is doubled until it passes, then bisected.
3. Of those, the groups with the most work are quantized after all, if that passes too; where impacts are known, work
   has been weighed before.
4. Where speed was measured: whole kinds of operators that may lose by being quantized stay in floating point.

A graph that is lowered as a whole to float16 or bfloat16 has no settings: one trial with everything lowered, then 2.,
where groups stay in float32; no speed is measured, so the search ends with the smallest number of groups that passes.

Advice from earlier searches changes the order alone: a setting that worked comes first. Forms of the graph that failed
again and again come after the others, unless all groups of this model lose little in them; so do changes that failed,
and all of this before any group stays in floating point.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import numpy as np
from pydantic import BaseModel, Field

from enginesmith.pipeline.passes.quantize.precisions import FORM_WORDS, WEAK_DB, Cause, Form

Phase = Literal["everything", "sensitive", "give back", "speed"]

_GAIN = 1.02
"""Least speed-up of the whole model for which an assignment with fewer quantized groups is preferred, where it is
also more than what the measurements vary by."""
_MAIN_SHARE = 0.6
"""A kind with more of the work than this is what quantization is for."""
_LEAST_SHARE = 0.001
"""A kind with less of the work than this is not worth a trial for speed: the last product of a classifier."""
_WORTHWHILE_SHARE = 0.01
_MOST_KINDS = 3
_MOST_OF_ERROR = 0.75
"""Share of all impacts that is taken away first: 6 dB."""
_DROWNED_DB = 3.0
"""SQNR of answers below which more than half is error: which of two trials has less of it says little."""
_SAME_DB = 1.0
"""Difference in SQNR below which two trials are as good as each other."""
_FLOAT_COST = 0.01
"""Share of the work that a group in floating point costs beside its own: changes of types around it."""


class GroupFact(BaseModel, frozen=True):
    """A group, its work, and its sensitivity."""

    name: str
    module: str
    kind: str
    """Operator; convolutions in groups are a kind of their own, and so are those that enlarge pictures."""
    macs: int
    sqnr_db: float | None
    """SQNR of its output with quantized weights and activations, its inputs being exact; or of the part of the answers
    in another unit, or of small samples, that it alone loses most, if that is lower. None without such a form."""
    reason: str = ""
    """Reason for staying in floating point anyway."""
    given: str = "fp32"
    """Precision that the graph has it in."""
    cause: str = ""
    """Says what makes it lose much, if it does: its numbers, its samples, or what reads its result."""
    pattern: Cause = "unknown"
    """The kind of that cause."""
    output_db: float | None = None
    """SQNR of what is read behind it where its output alone is rounded, which counts for engines that do so; None
    where that was not measured."""
    output_cause: str = ""
    output_pattern: Cause = "unknown"

    @property
    def is_weak(self) -> bool:
        """Tell whether it loses much in few bits."""
        return self.sqnr_db is not None and self.sqnr_db < WEAK_DB


class Judgement(BaseModel, frozen=True):
    """Accuracy of the answers of a graph."""

    passed: bool
    error: float
    """Distance from the answers wanted, smaller is better: the drop of the metric if it is known, else by SQNR."""
    drop: float | None = None
    drop_high: float | None = None
    """Upper end of the drop's interval."""
    sqnr_db: float | None = None
    reason: str = ""
    """Reason for not passing."""
    missing_samples: int = 0
    """Samples for choosing that are missing to show that this drop is allowed; 0 where it failed for other reasons."""


class Trial(Judgement):
    """One assignment that was tried, and what came of it."""

    phase: Phase
    form: Form = "given"
    signed: bool = False
    """True where activations with both signs are in int8 around 0."""
    method: str
    corrected: bool = False
    """True where biases make up for the mean error of rounded weights."""
    kept: tuple[str, ...]
    """Groups in floating point, sorted."""
    why: str
    impacts: dict[str, float] = Field(default_factory=dict)
    """Error of the answers with that group alone quantized, of their energy; the first trial with sensitive groups in
    floating point has it."""
    impact_seconds: float = 0.0
    speedup: float | None = None
    """Against the float graph in the same engine; None where the engine cannot run here."""
    speedup_range: tuple[float, float] | None = None
    """Its 95 % interval."""
    fits: bool = True
    """False where its engine is larger than is allowed."""
    outpaced: str = ""
    """What is so much faster than it, with everything quantized, that the search ends: with less quantized, it would
    hardly become faster."""
    seconds: float = 0.0


class Setting(BaseModel, frozen=True, extra="forbid"):
    """Describe how everything is quantized: a search changes this before it leaves a group in floating point."""

    form: Form = "given"
    unsigned: bool = False
    """True where activations are in uint8, although int8 around 0 is faster."""
    corrected: bool = False
    method: str
    """Method whose ranges are taken; empty where there are none, as the whole graph is in a narrow float."""

    @classmethod
    def of(cls, trial: Trial, signs: Sequence[bool]) -> "Setting":
        """Return the setting of a trial; ``signs`` has the faster form of activations first."""
        unsigned = trial.signed != signs[0]
        return cls(form=trial.form, unsigned=unsigned, corrected=trial.corrected, method=trial.method)

    def describe(self) -> str:
        """Describe it for people."""
        if not self.method:
            return "everything lowered"
        words = ["everything quantized"]
        words += [FORM_WORDS[self.form]] if self.form in FORM_WORDS else []
        words += ["activations in uint8"] if self.unsigned else []
        words += ["biases corrected"] if self.corrected else []
        return ", ".join([*words, f"ranges by {self.method}"])


class Advice(BaseModel, frozen=True, extra="forbid"):
    """Suggest an order of trials, from earlier searches of models with a similar pattern."""

    first: Setting | None = None
    """The setting that worked."""
    float_share: float = Field(0.0, ge=0, lt=1)
    """Share of the groups that stayed in floating point with it."""
    failed: tuple[Setting, ...] = ()
    """Settings that failed again and again: they are put off."""
    why: str = ""
    """Reason for what is first, for people."""


NO_ADVICE = Advice()


@dataclass(frozen=True)
class Candidate:
    """The assignment to try next."""

    phase: Phase
    form: Form
    signed: bool
    method: str
    kept: frozenset[str]
    why: str
    corrected: bool = False


Groups = Mapping[Form, Sequence[GroupFact]]
"""The groups of each form of the graph that there is, the best first; their names are the same in all."""


def propose(
    trials: Sequence[Trial],
    forms: Groups,
    methods: Sequence[str],
    fixed: frozenset[str],
    signs: Sequence[bool] = (False,),
    corrections: Sequence[bool] = (False,),
    advice: Advice = NO_ADVICE,
    impacts: Mapping[str, float] = MappingProxyType({}),
) -> Candidate | None:
    """Propose the next candidate, None where the search is over; ``fixed`` groups stay in floating point anyway.

    ``signs`` says whether activations with both signs are in int8 around 0; what is faster comes first.
    ``corrections`` says whether biases make up for the error of weights. ``impacts`` are for the first trial with
    sensitive groups in floating point, as :func:`measure_impacts` finds them; later ones know them from it. Without,
    groups are ranked by the errors of their own outputs.
    """
    impacts = impacts or next((trial.impacts for trial in trials if trial.impacts), {})
    forms = {form: [group for group in groups if not group.reason] for form, groups in forms.items()}
    everything = [trial for trial in trials if trial.phase == "everything"]

    if not any(trial.passed for trial in everything):
        setting, why = _next_setting(everything, forms, methods, signs, corrections, advice)
        if setting is not None:
            signed = signs[setting.unsigned]
            return Candidate("everything", setting.form, signed, setting.method, fixed, why, setting.corrected)
    tried = {(trial.form, trial.signed, trial.method, frozenset(trial.kept)) for trial in trials}
    share = advice.float_share
    later = (
        _grow(trials, forms, fixed, share, impacts),
        _give_back(trials, forms, fixed, impacts),
        _speed_up(trials, forms),
    )
    for new in later:
        if new and (new.form, new.signed, new.method, new.kept) not in tried:
            return new
    return None


def _next_setting(
    everything: Sequence[Trial],
    forms: Groups,
    methods: Sequence[str],
    signs: Sequence[bool],
    corrections: Sequence[bool],
    advice: Advice,
) -> tuple[Setting | None, str]:
    """Choose the setting of one more trial with everything quantized, and say why.

    The one that worked for others comes first; then all forms; then one change at a time of what lost least so far. Of
    the forms and of the changes, what failed for others comes last.
    """
    tried = [Setting.of(trial, signs) for trial in everything]
    usual = [Setting(form=form, corrected=corrections[0], method=methods[0]) for form in forms]
    plain = usual[0]
    usual.sort(key=lambda setting: setting in advice.failed and not _lose_little(forms[setting.form]))
    first = advice.first
    advised = first is not None and (
        first.form in forms
        and first.method in methods
        and first.corrected in corrections
        and first.unsigned < len(signs)
    )
    options = [*([first] if advised and first else []), *usual]
    if everything:
        nearest = Setting.of(_find_nearest(everything, forms), signs)
        alone = [setting for setting in tried if setting != first]  # these differ in one thing
        changes: list[tuple[Cause, dict[str, object]]] = []
        if len(signs) > 1 and not any(setting.unsigned for setting in alone):
            changes.append(("no outliers", {"unsigned": True, "method": methods[0]}))
        if len(corrections) > 1 and not any(setting.corrected > corrections[0] for setting in alone):
            changes.append(("shifted means", {"corrected": corrections[1], "method": methods[0]}))
        used = {setting.method for setting in alone}
        changes += [("single peaks", {"method": method}) for method in methods[1:] if method not in used]
        cause = _find_main_cause(forms[nearest.form])
        changes.sort(key=lambda change: change[0] != cause)
        changed = [nearest.model_copy(update=change) for _, change in changes]
        options += sorted(changed, key=lambda setting: setting in advice.failed)
    chosen = next((setting for setting in options if setting not in tried), None)
    if chosen is None:
        return None, ""
    moved = chosen == first and chosen != plain and not everything
    return chosen, f"{chosen.describe()}; {advice.why}" if moved else chosen.describe()


def _find_nearest(everything: Sequence[Trial], forms: Groups) -> Trial:
    """Find the trial with everything quantized that came nearest to the goal.

    Where noise decides that, as trials are equally good, or one bad group drowns the answers of all, it is one in whose
    form of the graph the least work is in groups that lose much.
    """
    nearest = min(everything, key=lambda trial: trial.error)
    best_db = nearest.sqnr_db
    if nearest.drop is not None or best_db is None:
        return nearest
    least_db = best_db - _SAME_DB if best_db >= _DROWNED_DB else -math.inf
    alike = [trial for trial in everything if trial.sqnr_db is not None and trial.sqnr_db >= least_db]
    return min(alike, key=lambda trial: (_sum_weak_work(forms[trial.form]), trial.error))


def _sum_weak_work(groups: Sequence[GroupFact]) -> int:
    return sum(group.macs for group in groups if group.is_weak)


def _lose_little(groups: Sequence[GroupFact]) -> bool:
    """Tell whether all groups lose little, as far as that was measured."""
    known = [group.sqnr_db for group in groups if group.sqnr_db is not None]
    return bool(known) and min(known) >= WEAK_DB


def _find_main_cause(groups: Sequence[GroupFact]) -> Cause:
    """Find the cause for which most of the groups that lose much do so."""
    causes = Counter(group.pattern for group in groups if group.is_weak)
    return causes.most_common(1)[0][0] if causes else "unknown"


def best(trials: Sequence[Trial], groups: Sequence[GroupFact]) -> Trial | None:
    """Return the trial with the most work quantized, of those that passed and are not slower than another.

    Where engines are larger than is allowed, it is one of the others, if there are any.
    """
    work = {group.name: group.macs for group in groups}
    passed = [trial for trial in trials if trial.passed]
    passed = [trial for trial in passed if trial.fits] or passed
    passed.sort(key=lambda trial: (sum(work.get(name, 0) for name in trial.kept), trial.error))
    return next((trial for trial in passed if not any(_is_faster(other, trial) for other in passed)), None)


def _is_faster(trial: Trial, other: Trial) -> bool:
    """Tell whether a trial is faster by more than the gain that counts, and the intervals of both are apart."""
    mine, theirs = trial.speedup, other.speedup
    if mine is None or theirs is None:  # it was not measured, or other programs disturbed that
        return False
    low, high = (trial.speedup_range or (mine,))[0], (other.speedup_range or (theirs,))[-1]
    return mine > _GAIN * theirs and low > high


def count_quantized(trial: Trial, groups: Sequence[GroupFact]) -> int:
    """Count the groups that a trial has in few bits."""
    return sum(1 for group in groups if not group.reason and group.name not in trial.kept)


def _grow(
    trials: Sequence[Trial], forms: Groups, fixed: frozenset[str], share: float, impacts: Mapping[str, float]
) -> Candidate | None:
    """Propose some of the most sensitive groups: twice as many as did not pass, or half way to those that passed.

    The first time, it is those that make most of the error; where that is not known, the share that was enough in an
    earlier search, or a single group.
    """
    everything = [trial for trial in trials if trial.phase == "everything"]
    if any(trial.passed for trial in everything):
        return None
    nearest = _find_nearest(everything, forms)
    groups = [group for group in forms[nearest.form] if group.name not in fixed]
    if impacts and not nearest.method:  # what could not be measured may be what hurts
        impacts = {**dict.fromkeys((group.name for group in groups), math.inf), **impacts}
    ranked = _rank(groups, impacts)
    counts = [(len(set(trial.kept) - fixed), trial.passed) for trial in trials if trial.phase == "sensitive"]
    failed = max((count for count, passed in counts if not passed), default=0)
    enough = min((count for count, passed in counts if passed), default=None)
    known = [impact if math.isfinite(impact := impacts.get(group.name, 0.0)) else 0.0 for group in ranked]
    begin = min(_count_most(known), len(ranked) - 1) if any(known) else round(share * len(ranked))
    begin = max(1, begin)
    most = len(ranked) if nearest.method else len(ranked) - 1  # nothing lowered is another precision
    count = min(most, 2 * failed or begin) if enough is None else (failed + enough) // 2
    if count <= failed:
        return None
    why = f"the {count} most sensitive groups" if count > 1 else "the most sensitive group"
    float_groups = fixed | {group.name for group in ranked[:count]}
    why = f"{why} in {'floating point' if nearest.method else 'float32'}"
    return Candidate("sensitive", nearest.form, nearest.signed, nearest.method, float_groups, why, nearest.corrected)


def _rank(groups: Sequence[GroupFact], impacts: Mapping[str, float]) -> list[GroupFact]:
    """Sort groups by what is gained for the work with each of them in floating point, the best first.

    Those whose impact is not known follow, the one with the largest error of its own output first.
    """
    total = sum(group.macs for group in groups) or 1

    def gain(group: GroupFact) -> float:
        return impacts.get(group.name, 0.0) / (group.macs / total + _FLOAT_COST)

    def own_error(group: GroupFact) -> float:
        return group.sqnr_db if group.sqnr_db is not None else -1e9

    return sorted(groups, key=lambda group: (-gain(group), own_error(group), group.macs))


def _count_most(impacts: Sequence[float]) -> int:
    """Count the first that together make most of all."""
    return int(np.searchsorted(np.cumsum(impacts), _MOST_OF_ERROR * sum(impacts))) + 1


def _give_back(
    trials: Sequence[Trial], forms: Groups, fixed: frozenset[str], impacts: Mapping[str, float]
) -> Candidate | None:
    """Propose to quantize more: first the half of the kept groups with the most work, then the one with the most."""
    before = [trial for trial in trials if trial.phase == "give back"]
    sensitive = [trial for trial in trials if trial.phase == "sensitive" and trial.passed]
    if impacts or not sensitive or len(before) > 1 or any(trial.passed for trial in before):
        return None
    smallest = min(sensitive, key=lambda trial: len(trial.kept))
    groups = forms[smallest.form]
    total = sum(group.macs for group in groups)
    candidates = [group for group in groups if group.name in smallest.kept and group.name not in fixed]
    candidates.sort(key=lambda group: (-group.macs, group.name))
    back = candidates[: len(candidates) // 2] if not before else candidates[:1]
    if len(candidates) < 2 or sum(group.macs for group in back) < _WORTHWHILE_SHARE * total:
        return None
    left = frozenset(smallest.kept) - {group.name for group in back}
    why = f"{len(back)} of them {'quantized' if smallest.method else 'lowered'} after all, for their work"
    return Candidate("give back", smallest.form, smallest.signed, smallest.method, left, why, smallest.corrected)


def _speed_up(trials: Sequence[Trial], forms: Groups) -> Candidate | None:
    """Propose a kind of operators to stay in floating point, that with the least work first."""
    fastest = best(trials, forms["given"])
    if fastest is None or fastest.speedup is None:
        return None
    groups = forms[fastest.form]
    work: Counter[str] = Counter()
    for group in groups:
        if group.name not in fastest.kept:
            work[group.kind] += group.macs
    total = sum(group.macs for group in groups) or 1
    tried = {trial.why for trial in trials if trial.phase == "speed"}
    for kind in sorted(work, key=lambda kind: (work[kind], kind)):
        why = f"{kind} in floating point, for speed"
        worthwhile = _LEAST_SHARE * total <= work[kind] <= _MAIN_SHARE * total
        if len(work) > 1 and worthwhile and why not in tried and len(tried) < _MOST_KINDS:
            float_groups = frozenset(fastest.kept) | {group.name for group in groups if group.kind == kind}
            return Candidate(
                "speed", fastest.form, fastest.signed, fastest.method, float_groups, why, fastest.corrected
            )
    return None
