"""Where a session's time goes: its operators by the module of the model that they do the work of.

Profilers slow down what they look at, so a profile says how time is divided, and the latency measurement how much there
is. A session is profiled alone in a fresh process.
"""

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from enginesmith.pipeline.engines.profiling import NODE, OperatorTime, Profiled, ProfileRequest
from enginesmith.pipeline.errors import EnginesmithError, MissingCapability
from enginesmith.pipeline.measure.candidate import Candidate
from enginesmith.pipeline.measure.profile_table import groups, label
from enginesmith.pipeline.measure.rows import Profile, ProfileRow
from enginesmith.pipeline.tensors import Feeds
from enginesmith.pipeline.workers import run

Progress = Callable[[str], None]

_GAP = 0.1
"""Share of a call that may lie outside of operators before a profile says so."""


def measure_profile(
    candidate: Candidate,
    batch: int,
    feeds: Feeds,
    graph: Path | None,
    calls: int,
    log_folder: Path,
    progress: Progress,
    time_limit_seconds: float = 900.0,
) -> Profile:
    """Profile a candidate in a fresh process; one that fails, or cannot be profiled, gets a profile that says why.

    ``graph`` is the ONNX file that its engine was built from.
    """
    progress(f"profile of {candidate.id} at batch {batch}")
    log = log_folder / f"profile-{candidate.id}.log"
    empty = Profile(variant=candidate.id, batch=batch, device=str(candidate.device), calls=calls)
    try:
        found: Profiled = run(_profile, candidate, feeds, graph, calls, log=log, timeout_seconds=time_limit_seconds)
    except MissingCapability as error:
        return _unknown(empty, str(error))
    except EnginesmithError as error:
        return _unknown(empty.model_copy(update={"failure": str(error)}), str(error))
    return of(empty, found)


def _profile(candidate: Candidate, feeds: Feeds, graph: Path | None, calls: int, progress: Progress) -> Profiled:
    with tempfile.TemporaryDirectory(prefix="enginesmith-profile-") as scratch:
        request = ProfileRequest(candidate.artifact, candidate.device, feeds, calls, Path(scratch), graph)
        return candidate.engine.profile(request)


def _unknown(profile: Profile, reason: str) -> Profile:
    names = [name for name, value in profile if value is None and name != "failure"]
    return profile.model_copy(update={"reasons": dict.fromkeys(names, reason)})


def of(profile: Profile, found: Profiled) -> Profile:
    """The profile with the operators that were found."""
    total = sum(one.seconds for one in found.operators)
    together = groups(one.origin.modules for one in found.operators)
    members: dict[tuple[str, ...], list[OperatorTime]] = {}
    for one in found.operators:
        key = together[one.origin.modules[0]] if one.origin.modules else (f"{NODE}{one.name}", "")
        members.setdefault(key, []).append(one)
    known = {*together, *(path for one in found.operators for path in one.origin.also)}
    rows = [_row(key, operators, total, known) for key, operators in members.items()]
    notes, whole = list(found.notes), found.call_seconds
    if whole and whole - total > _GAP * whole:
        both = f"{total * 1e3:.3g} ms of {whole * 1e3:.3g} ms a call"
        notes.append(f"operators add up to {both}; the rest lies between them, or disturbed some")
    unknown = sum(row.ms for row in rows if not row.modules) / 1e3
    return profile.model_copy(
        update={
            "source": found.source,
            "rows": tuple(sorted(rows, key=lambda row: -row.ms)),
            "total_ms": total * 1e3,
            "call_ms": None if whole is None else whole * 1e3,
            "unattributed_share": unknown / total if total else 0.0,
            "notes": tuple(notes),
            "reasons": {} if whole is not None else {"call_ms": f"{found.source} tells the time of operators alone"},
        }
    )


def _row(key: tuple[str, ...], operators: Sequence[OperatorTime], total: float, known: set[str]) -> ProfileRow:
    modules = tuple(key) if operators[0].origin.modules else ()
    ordered = sorted(operators, key=lambda one: -one.seconds)
    seconds = sum(one.seconds for one in operators)
    runs, conversions = Counter[str](), dict[str, float]()
    also: dict[str, dict[str, None]] = {}
    for one in ordered:
        runs[one.operator] += one.calls
        if one.origin.converts:
            conversions[one.operator] = conversions.get(one.operator, 0.0) + one.seconds * 1e3
        for path, fused in one.origin.also.items():
            if path not in modules:
                also.setdefault(path, {}).update(dict.fromkeys(fused))
    return ProfileRow(
        module=label(modules, known) if modules else f"(unknown: {operators[0].name})",
        modules=modules,
        operators=dict(runs),
        calls=runs.total(),
        ms=seconds * 1e3,
        share=seconds / total if total else 0.0,
        precision=next((one.precision for one in ordered if one.origin.multiplies), ""),
        conversions=conversions,
        also={path: tuple(found) for path, found in also.items()},
    )
