"""Order the trials of a search for a precision by what earlier ones found, and remember what it finds itself.

sensitivity ── pattern ─┬─ searches with a similar pattern ── advice ── trials in another order
                        └─ trials of this search ── store

A pattern is what groups lose much, and why: two networks whose convolutions have uneven activations have the same one.
Advice is a field of the trials' steps, and so part of their keys; a search that is done again begins with the advice
that it had, and finds its trials in the store.
"""

import contextlib
import functools
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import Annotated, Any

from pydantic import BaseModel, Field, StringConstraints

from enginesmith.pipeline.artifact import json_digest
from enginesmith.pipeline.errors import StoreError
from enginesmith.pipeline.execution.events import Outcomes
from enginesmith.pipeline.passes.quantize.layers import find_kept
from enginesmith.pipeline.passes.quantize.search import (
    NO_ADVICE,
    Advice,
    GroupFact,
    Setting,
    Trial,
    best,
    count_quantized,
)
from enginesmith.pipeline.planning.plan import Step, StepRef
from enginesmith.pipeline.store.past_records import PastRecord, PastRecords
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.tasks.base import read_models
from enginesmith.pipeline.tasks.graph_forms import MODEL, SENSITIVITY
from enginesmith.pipeline.tasks.mixed_precision import BEFORE, Search

_ALIKE = 0.5
"""Distance below which two patterns count as similar: half of what loses much has the same operator and cause."""
_AGAIN = 2
"""Models with which a setting has to have failed, and none with which it worked, until it is put off."""
_NAMED_SHARE = 0.8
"""Share of a pattern that is named."""
_NOTHING_WEAK = "little lost"

Pattern = dict[
    Annotated[str, StringConstraints(pattern=r"^([a-z]+ )?\w+: [a-z ]+$")], Annotated[float, Field(ge=0, le=1)]
]
"""Share by operator and cause of the groups that lose much; of all groups, where none does."""


class TriedSetting(BaseModel, frozen=True, extra="forbid"):
    """A setting with which everything was quantized."""

    setting: Setting
    passed: bool


class PastSearch(PastRecord, frozen=True, extra="forbid"):
    """Record the result of a search: digests, numbers and names of patterns."""

    search: str
    """Digest of what was searched, and for which goal."""
    model: str
    """Digest of the float graph."""
    pattern: Pattern
    max_drop: float | None
    begun_with: Advice = NO_ADVICE
    tried: tuple[TriedSetting, ...] = ()
    worked: Setting | None = None
    """The setting that reached the goal; None where none did, the search has not ended, or nothing was quantized."""
    float_share: float = Field(0.0, ge=0, lt=1)
    """Share of the groups that had to stay in floating point with it."""

    def replaces(self, other: Any) -> bool:
        """Tell whether another record is of the same search."""
        return isinstance(other, PastSearch) and self.search == other.search

    def distance(self, pattern: Mapping[str, float]) -> float:
        """Measure how unlike two patterns are: 0 for the same, 1 for two that share nothing."""
        names = self.pattern.keys() | pattern.keys()
        return sum(abs(self.pattern.get(name, 0.0) - pattern.get(name, 0.0)) for name in names) / 2

    def is_as_strict(self, max_drop: float | None) -> bool:
        """Tell whether what failed here fails for a goal with this drop, too."""
        if self.max_drop is None or max_drop is None:
            return self.max_drop is max_drop
        return self.max_drop >= max_drop


def find_pattern(groups: Sequence[GroupFact]) -> dict[str, float]:
    """Find the pattern of a model, from the sensitivity of its groups."""
    measured = [group for group in groups if group.sqnr_db is not None]
    weak = [group for group in measured if group.is_weak]
    counts = Counter(f"{group.kind}: {group.pattern if weak else _NOTHING_WEAK}" for group in weak or measured)
    return {name: round(count / counts.total(), 6) for name, count in counts.most_common()}


def describe_pattern(pattern: Mapping[str, float]) -> str:
    """Name the most common parts of a pattern."""
    ordered = sorted(pattern.items(), key=lambda item: -item[1])
    before = accumulate((share for _, share in ordered), initial=0.0)
    named = [
        name for (name, _), _ in takewhile(lambda pair: pair[1] < _NAMED_SHARE, zip(ordered, before, strict=False))
    ]
    return " and ".join(f"{kind} with {cause}" for kind, _, cause in (name.partition(": ") for name in named))


def advise(pattern: Mapping[str, float], max_drop: float | None, past: Sequence[PastSearch]) -> Advice:
    """Advise what to try first and last, from earlier searches of models with a similar pattern, newest first."""
    near = [search for search in past if search.distance(pattern) < _ALIKE]
    near.sort(key=lambda search: search.distance(pattern))  # stable: of the most similar the newest first
    scores: defaultdict[Setting, float] = defaultdict(float)
    failures: defaultdict[Setting, set[str]] = defaultdict(set)
    """By setting, the models with which it failed."""
    for search in near:
        for each in search.tried:
            weight = 1 / (0.05 + search.distance(pattern))
            scores[each.setting] += weight if each.passed else -weight
            if not each.passed and search.is_as_strict(max_drop):
                failures[each.setting].add(search.model)
    wins = [(search.worked, search) for search in near if search.worked]
    whole = [(scores[setting], search) for setting, search in wins if not search.float_share and scores[setting] > 0]
    partly = (search for _, search in wins if search.float_share)
    best = max(whole, key=lambda pair: pair[0])[1] if whole else next(partly, None)
    first = best.worked if best else None
    passed = {each.setting for search in near for each in search.tried if each.passed}
    again = (setting for setting, models in failures.items() if len(models) >= _AGAIN)
    failed = tuple(setting for setting in again if setting not in passed and setting != first)
    if best is None:
        return Advice(failed=failed)
    left = f" with {best.float_share:.0%} of the groups in floating point" if best.float_share else ""
    return Advice(
        first=first,
        float_share=best.float_share,
        failed=failed,
        why=f"tried first, as it worked{left} for {describe_pattern(best.pattern)} in an earlier run",
    )


@dataclass(frozen=True)
class _Trials:
    """The steps of one search in their order."""

    steps: tuple[Step, ...]
    task: Search

    @property
    def inputs(self) -> Mapping[str, StepRef]:
        """The inputs of the first one."""
        return self.steps[0].inputs


@dataclass(frozen=True)
class EarlierSearches:
    """The searches for precisions that are in a store, as one run uses them."""

    planned: Sequence[Step]
    store: Store
    _begun: dict[StepRef, PastSearch] = field(default_factory=dict)
    """By the first trial of a search."""

    def advise(self, new: Outcomes, known: Outcomes, note: Callable[[str], object]) -> Iterator[tuple[StepRef, Search]]:
        """List the trials of searches that can begin now, with advice; a search that is known begins as it did."""
        for trials in self._searches:
            if trials.inputs[SENSITIVITY] not in new or (begun := self._begin(trials, known)) is None:
                continue
            past = self._past(trials)
            records = past.read(note)
            earlier = next((record for record in records if begun.replaces(record)), None)
            if earlier is not None and self.store.reuse:
                begun = begun.model_copy(update={"begun_with": earlier.begun_with})
            else:
                begun = begun.model_copy(update={"begun_with": advise(begun.pattern, begun.max_drop, records)})
                with contextlib.suppress(StoreError):
                    past.add(begun)
            self._begun[trials.steps[0].id] = begun
            if begun.begun_with != NO_ADVICE:
                task = trials.task.model_copy(update={"advice": begun.begun_with})
                yield from ((step.id, task) for step in trials.steps)

    def remember(self, outcomes: Outcomes) -> None:
        """Add the trials of a run's searches.

        Raises:
            StoreError: the store cannot be written.
        """
        for trials in self._searches:
            ends = [outcome for step in trials.steps if (outcome := outcomes.get(step.id)) and outcome.good]
            begun = self._begun.get(trials.steps[0].id) or self._begin(trials, outcomes)
            if begun is None or not ends:
                continue
            task, search_trials = trials.task, read_models(ends[-1].artifact, Trial)
            groups = read_models(outcomes[trials.inputs[SENSITIVITY]].artifact, GroupFact)
            tried = [
                (Setting.of(trial, task.signs), trial.passed) for trial in search_trials if trial.phase == "everything"
            ]
            worked, share = find_worked(search_trials, task.signs, find_kept(task.keep, groups), groups)
            changes = {
                "tried": tuple(TriedSetting(setting=setting, passed=passed) for setting, passed in tried),
                "worked": worked,
                "float_share": share,
            }
            self._past(trials).add(begun.model_copy(update=changes))

    @functools.cached_property
    def _searches(self) -> list[_Trials]:
        steps = [(step, step.task) for step in self.planned if isinstance(step.task, Search)]
        following = {step.inputs[BEFORE]: step for step, _ in steps if BEFORE in step.inputs}
        searches = []
        for first, task in steps:
            if BEFORE not in first.inputs:
                chain = [first]
                while chain[-1].id in following:
                    chain.append(following[chain[-1].id])
                searches.append(_Trials(tuple(chain), task))
        return searches

    def _past(self, trials: _Trials) -> PastRecords[PastSearch]:
        return self.store.past("searches", trials.task.step.precision, PastSearch)

    def _begin(self, trials: _Trials, known: Outcomes) -> PastSearch | None:
        """Describe a search before its first trial; None where its groups are not known."""
        model, sensitivity = (known.get(trials.inputs[role]) for role in (MODEL, SENSITIVITY))
        if not (model and model.artifact and sensitivity and sensitivity.artifact and sensitivity.good):
            return None
        return PastSearch(
            search=json_digest([sensitivity.artifact.sha256, trials.task.identity]),
            model=model.artifact.sha256,
            pattern=find_pattern(read_models(sensitivity.artifact, GroupFact)),
            max_drop=trials.task.goal.max_drop,
        )


def find_worked(
    trials: Sequence[Trial], signs: Sequence[bool], fixed: frozenset[str], groups: Sequence[GroupFact]
) -> tuple[Setting | None, float]:
    """Find the setting that reached the goal, and the share of the groups that it took in floating point besides.

    There is none where the search chose nothing in few bits: then its variant has failed.
    """
    winner = best(trials, groups)
    if winner is None or not count_quantized(winner, groups):
        return None, 0.0
    passed = [trial for trial in trials if trial.passed and trial.phase != "speed"]
    least = min(passed, key=lambda trial: (trial.phase != "everything", len(trial.kept)))
    free = sum(1 for group in groups if not group.reason and group.name not in fixed)
    return Setting.of(least, signs), round(len(set(least.kept) - fixed) / max(1, free), 6)
