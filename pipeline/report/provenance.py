"""Tables of where a run comes from: its steps, their tools and files, the machine, and what it takes to do it again."""

import json
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from enginesmith.pipeline.artifact import HistoryEntry
from enginesmith.pipeline.measure.rows import DeviceLimits
from enginesmith.pipeline.report.tables import marked
from enginesmith.pipeline.results.run import Run
from enginesmith.pipeline.units import format_bytes, format_seconds, format_si

STEPS = ("step", "ended", "time", "host peak", "effect", "with", "notes")
PARAMETERS = ("step", "parameters")
FILES = ("variant", "file", "size", "sha256", "made by")
RATES = ("of the machine", "at best", "usually", "repetitions", "how")
MACHINE = ("fact", "value")
_OTHER_FACTS = ("warnings", "packages", "reasons", "gpus", "folder")
_BYTES, _SECONDS, _MHZ = "_bytes", "_seconds", "_mhz"
_OWN = "enginesmith"


def steps(run: Run) -> list[tuple[str, ...]]:
    """A row for each step of the plan; columns as in :data:`STEPS`."""
    known = _history(run)
    rows: list[tuple[str, ...]] = []
    for step in run.steps:
        entry = known.get(step.id)
        rows.append(
            (
                step.id,
                "from the store" if step.cached else step.status,
                "–" if step.seconds is None else format_seconds(step.seconds),
                format_bytes(entry.host_peak_bytes if entry else None),
                step.effect,
                ", ".join(f"{name} {version}" for name, version in entry.tools.items()) if entry else "–",
                "; ".join(entry.notes) if entry else "",
            )
        )
    return rows


def parameters(run: Run) -> list[tuple[str, ...]]:
    """The fields that each step was done with; columns as in :data:`PARAMETERS`."""
    return [
        (name, json.dumps(entry.parameters.get("fields", entry.parameters), ensure_ascii=False))
        for name, entry in _history(run).items()
    ]


def _history(run: Run) -> dict[str, HistoryEntry]:
    records = (run.baseline, *run.variants)
    return {entry.step: entry for record in records for entry in record.history}


def files(run: Run) -> list[tuple[str, ...]]:
    """The engines' files with their digests; columns as in :data:`FILES`."""
    return [
        (marked(record), found.path, format_bytes(found.bytes), found.sha256, " → ".join(_steps(record.history)))
        for record in run.variants
        if (found := record.artifact)
    ]


def _steps(history: tuple[HistoryEntry, ...]) -> Iterator[str]:
    return (entry.step for entry in history)


def machine(environment: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Facts of the machine, each with its unit or why it is not known; columns as in :data:`MACHINE`."""
    reasons = environment.get("reasons")
    why = reasons if isinstance(reasons, Mapping) else {}
    rows = [
        (_words(name), f"unknown: {why.get(name, 'no reason was given')}" if value is None else _fact(name, value))
        for name, value in environment.items()
        if name not in _OTHER_FACTS
    ]
    gpus = environment.get("gpus")
    if gpus is None:
        return [*rows, ("GPUs", f"none: {why.get('gpus', 'no reason was given')}")]
    return [*rows, *(row for index, gpu in enumerate(gpus) for row in _gpu(index, gpu))]


def _gpu(index: int, gpu: Any) -> Iterator[tuple[str, ...]]:
    if not isinstance(gpu, Mapping):
        yield f"GPU {index}", str(gpu)
        return
    for name, value in gpu.items():
        if name not in ("reasons", "processes") and value is not None:
            yield f"GPU {index}: {_words(name)}", _fact(name, value)


def _words(name: str) -> str:
    for ending in (_BYTES, _SECONDS, _MHZ):
        name = name.removesuffix(ending)
    return name.replace("_", " ")


def _fact(name: str, value: Any) -> str:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if number and name.endswith(_BYTES):
        return format_bytes(value)
    if number and name.endswith(_SECONDS):
        return f"{value:,.0f} s"
    if number and name.endswith(_MHZ):
        return f"{value:,.0f} MHz"
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {one}" for key, one in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(str(one) for one in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def rates(limits: DeviceLimits | None) -> list[tuple[str, ...]]:
    """What the machine can do at best; columns as in :data:`RATES`."""
    if limits is None:
        return []
    known = {
        "memory, copied": (limits.copy_bandwidth, "B/s"),
        "memory, read": (limits.read_bandwidth, "B/s"),
        "caches": (limits.cache_bandwidth, "B/s"),
        **{f"products in {name}": (rate, "OP/s") for name, rate in limits.products.items()},
        "operators started": (limits.operators, "/s"),
        "inferences of one operator": (limits.calls, "/s"),
    }
    return [
        (
            name,
            format_si(rate.per_second, unit),
            format_si(rate.usual_per_second, unit),
            str(rate.repetitions),
            rate.how,
        )
        for name, (rate, unit) in known.items()
        if rate
    ]


def versions(environment: Mapping[str, Any]) -> dict[str, str]:
    """Packages as they were installed, by name."""
    packages = environment.get("packages")
    return {str(name): str(version) for name, version in packages.items()} if isinstance(packages, Mapping) else {}


def install(environment: Mapping[str, Any]) -> str:
    """The command that installs what the run was made with, in a checkout of enginesmith; empty if nothing is known."""
    pins = [f"{name}=={version.partition('+')[0]}" for name, version in versions(environment).items() if name != _OWN]
    return " ".join(["pip install -e .", *map(shlex.quote, pins)]) if pins else ""


def builds(environment: Mapping[str, Any]) -> list[str]:
    """Packages in a build of their own, as ``torch 2.13.0+cpu``: an index has to offer that."""
    return [f"{name} {version}" for name, version in versions(environment).items() if "+" in version]


def commands(run: Run) -> str:
    """What makes the run again from its recipe, and what goes on with this one."""
    model, name = shlex.quote(run.recipe.model), shlex.quote(run.name)
    again = f"enginesmith optimize {model} --recipe recipe.yaml --out runs/{name}-again"
    return f"{again}\nenginesmith resume {name}    # with this run directory: what is there already is not done again"
