"""Tabulate where a run comes from: steps, tools, files and the machine; write the commands that repeat it."""

import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from enginesmith.pipeline.artifact import HistoryEntry
from enginesmith.pipeline.report.tables import Table, make_table, mark_name
from enginesmith.pipeline.results.run import Run
from enginesmith.pipeline.units import format_bytes, format_seconds, format_si

_OTHER_FACTS = ("busy", "cautions", "warnings", "packages", "reasons", "gpus", "folder", "out")
_UNITS: Mapping[str, Callable[[float], str]] = {
    "_bytes": format_bytes,
    "_seconds": lambda value: f"{value:,.0f} s",
    "_mhz": lambda value: f"{value:,.0f} MHz",
}
"""Ending of a fact's name → how its number is formatted."""
_OWN = "enginesmith"


def tabulate_steps(run: Run) -> Table:
    """List each step of the plan with its result, tools and notes."""
    history = _history(run)
    rows = (
        {
            "step": step.id,
            "ended": "from the store" if step.cached else step.status,
            "time": "–" if step.seconds is None else format_seconds(step.seconds),
            "host peak": format_bytes(entry.host_peak_bytes if (entry := history.get(step.id)) else None),
            "effect": step.effect,
            "with": ", ".join(f"{name} {version}" for name, version in entry.tools.items()) if entry else "–",
            "notes": "; ".join(entry.notes) if entry else "",
        }
        for step in run.steps
    )
    return make_table("steps", "Every step of the plan", rows, searched=True)


def tabulate_parameters(run: Run) -> Table:
    """List the fields that each step was done with."""
    fields = {name: entry.parameters.get("fields", entry.parameters) for name, entry in _history(run).items()}
    rows = ({"step": name, "parameters": json.dumps(values, ensure_ascii=False)} for name, values in fields.items())
    return make_table("fields", "Fields of each step", rows)


def _history(run: Run) -> dict[str, HistoryEntry]:
    return {entry.step: entry for record in run.records for entry in record.history}


def tabulate_files(run: Run) -> Table:
    """List the engines' files with their digests and the steps that made them."""
    rows = (
        {
            "variant": mark_name(record),
            "file": file.path,
            "size": format_bytes(file.bytes),
            "sha256": file.sha256,
            "made by": " → ".join(entry.step for entry in record.history),
        }
        for record in run.variants
        if (file := record.artifact)
    )
    return make_table("files", "Engine files in the run directory", rows).without_empty_columns()


def tabulate_machine(environment: Mapping[str, Any]) -> Table:
    """List the facts of the machine, each with its unit or why it is not known."""
    rows = ({"fact": name, "value": text} for name, text in _list_facts(environment))
    return make_table("machine", "The machine when latency was measured", rows)


def _list_facts(environment: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    reasons = environment.get("reasons")
    why = reasons if isinstance(reasons, Mapping) else {}
    for name, value in environment.items():
        if name not in _OTHER_FACTS:
            title, text = _format_fact(name, value)
            yield title, f"unknown: {why.get(name, 'no reason was given')}" if value is None else text
    gpus = environment.get("gpus")
    if gpus is None:
        yield "GPUs", f"none: {why.get('gpus', 'no reason was given')}"
    for index, gpu in enumerate(gpus or ()):
        if not isinstance(gpu, Mapping):
            yield f"GPU {index}", str(gpu)
            continue
        for name, value in gpu.items():
            if name not in ("reasons", "processes") and value is not None:
                title, text = _format_fact(name, value)
                yield f"GPU {index}: {title}", text


def _format_fact(name: str, value: Any) -> tuple[str, str]:
    """Name a fact for people, without its unit, and format its value."""
    unit = next((unit for unit in _UNITS if name.endswith(unit)), "")
    title = name.removesuffix(unit).replace("_", " ")
    if isinstance(value, bool):
        return title, "yes" if value else "no"
    if unit and isinstance(value, int | float):
        return title, _UNITS[unit](value)
    if isinstance(value, Mapping):
        return title, ", ".join(f"{key} {item}" for key, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return title, ", ".join(map(str, value)) or "none"
    return title, f"{value:.4g}" if isinstance(value, float) else str(value)


def tabulate_rates(run: Run) -> Table:
    """List what the machine can do at best, where that was measured."""
    rates = {}
    if limits := run.limits:
        rates = {
            "memory, copied": (limits.copy_bandwidth, "B/s"),
            "memory, read": (limits.read_bandwidth, "B/s"),
            "caches": (limits.cache_bandwidth, "B/s"),
            **{f"products in {name}": (rate, "OP/s") for name, rate in limits.products.items()},
            "operators started": (limits.operators, "/s"),
            "inferences of one operator": (limits.calls, "/s"),
        }
    rows = (
        {
            "of the machine": name,
            "at best": format_si(rate.per_second, unit),
            "usually": format_si(rate.usual_per_second, unit),
            "repetitions": str(rate.repetitions),
            "how": rate.how,
        }
        for name, (rate, unit) in rates.items()
        if rate
    )
    return make_table("rates", "What the machine can do at best, measured in this run", rows)


def list_versions(environment: Mapping[str, Any]) -> dict[str, str]:
    """List the installed packages' versions by name."""
    packages = environment.get("packages")
    return {str(name): str(version) for name, version in packages.items()} if isinstance(packages, Mapping) else {}


def write_install_command(environment: Mapping[str, Any]) -> str:
    """Write the command that installs the run's packages in a checkout of enginesmith; empty if none are known."""
    versions = list_versions(environment).items()
    pins = [f"{name}=={version.partition('+')[0]}" for name, version in versions if name != _OWN]
    return " ".join(["pip install -e .", *map(shlex.quote, pins)]) if pins else ""


def list_local_builds(environment: Mapping[str, Any]) -> list[str]:
    """List packages in a local build, such as ``torch 2.13.0+cpu``, which their index has to offer."""
    return [f"{name} {version}" for name, version in list_versions(environment).items() if "+" in version]


def write_resume_command(run: Run) -> str:
    """Write the command that goes on with the run, from the folder where it was started."""
    return shlex.join(["enginesmith", "resume", run.environment.get("out") or run.name])


def write_commands(run: Run) -> str:
    """Write the commands that repeat the run from its recipe, and that go on with it."""
    model, name = shlex.quote(run.recipe.model), shlex.quote(run.name)
    again = f"enginesmith optimize {model} --recipe recipe.yaml --out runs/{name}-again"
    return f"{again}\n{write_resume_command(run)}    # what is there already is not done again"
