"""Find out what this machine can do, whether its software fits together, and the command for what does not."""

import importlib.util
from typing import Any

from pydantic import BaseModel, ConfigDict

from enginesmith.pipeline.engines import check_software, engine_class, environment
from enginesmith.pipeline.engines.compatibility import Check
from enginesmith.pipeline.engines.stack import find_stack
from enginesmith.pipeline.errors import install_command
from enginesmith.pipeline.recipe.options import ExportOptions
from enginesmith.pipeline.store.address import default_address
from enginesmith.pipeline.system.machine import Environment
from enginesmith.pipeline.system.nvidia import GpuState
from enginesmith.pipeline.system.software import Formats
from enginesmith.pipeline.units import format_bytes
from enginesmith.pipeline.workflows import inspect

Facts = dict[str, Any]

_EXTRAS = (
    ("transformers", "transformers", "models as hf:…"),
    ("timm", "timm", "models as timm:…"),
    ("PIL", "pillow", "folders of images as data"),
    ("tokenizers", "transformers", ".jsonl files of texts as data"),
)
_UNKNOWN = "unknown"


class Diagnosis(BaseModel):
    """Hold all that is found out."""

    model_config = ConfigDict(frozen=True)

    environment: Environment
    compatibility: tuple[Check, ...]
    engines: dict[str, dict[str, str]]
    """By kind of device: engine → ``ok``, or why not."""
    fixes: tuple[str, ...]
    """What to do about what is missing or does not fit."""
    store: str


def examine() -> Diagnosis:
    """Look at everything. Takes some seconds, most of them for importing torch."""
    opset = ExportOptions().opset
    compared = check_software(find_stack(), Formats(ir=_ir_version(opset), opset=opset))
    engines, missing = {}, []
    for where in ("cpu", "cuda"):
        rows = inspect.engines(where)
        engines[where] = {row["engine"]: _usable(row) for row in rows}
        missing += [
            f"{row['engine']} on {where}: {row['remedy']}"
            for row in rows
            if row["remedy"] and where in engine_class(row["engine"]).kinds
        ]
    missing += [
        f"{what}: {install_command(distribution)}"
        for package, distribution, what in _EXTRAS
        if importlib.util.find_spec(package) is None
    ]
    return Diagnosis(
        environment=environment(),
        compatibility=tuple(compared),
        engines=engines,
        fixes=(*(f"{check.name}: {check.fix}" for check in compared if check.ok is False), *missing),
        store=default_address().text,
    )


def _ir_version(opset: int) -> int:
    """Return the IR version of the specification for that opset; exporters may write an older one."""
    from onnx import helper

    return int(helper.find_min_ir_version_for([helper.make_opsetid("", opset)]))


def _usable(row: Facts) -> str:
    if row["usable"] != "no":
        return "ok" if row["usable"] == "yes" else row["reason"]
    elsewhere = engine_class(row["engine"]).built_elsewhere and row["builds here"] == "yes"
    return f"no: {row['reason']}" + ("; it can be built here for other machines" if elsewhere else "")


def readable(found: Diagnosis) -> Facts:
    """Describe it for people: what is here, what spoils numbers, what fits and runs, and last what is to be done."""
    machine = found.environment
    gpus = {f"cuda:{index}": _gpu(gpu) for index, gpu in enumerate(machine.gpus or ())}
    return {
        "processor": _processor(machine),
        "memory": _memory(machine),
        **(gpus or {"GPUs": f"none: {machine.reasons.get('gpus', '')}"}),
        "software": {"system": machine.system, "kernel": machine.kernel, "python": machine.python, **machine.packages},
        "store": found.store,
        "what spoils measurements": list(machine.warnings),
        "what fits together": {check.name: _verdict(check) for check in found.compatibility},
        **{f"engines on {where}": rows for where, rows in found.engines.items()},
        "what to do about what is missing or does not fit": list(found.fixes),
    }


def _verdict(check: Check) -> str:
    word = {True: "yes: ", False: "NO: ", None: "– "}[check.ok]
    return f"{word}{check.found}; needed: {check.needed}" + (f" ({check.note})" if check.note else "")


def _processor(machine: Environment) -> Facts:
    unlimited = f"none ({machine.reasons.get('quota_cores', '')})"
    clocks = [
        f"{mhz:.0f} MHz {word}"
        for word, mhz in (
            ("now", machine.frequency_mhz),
            ("at least", machine.frequency_min_mhz),
            ("at most", machine.frequency_max_mhz),
        )
        if mhz is not None
    ]
    lost = [
        words.format(value)
        for words, value in (
            ("{:.0f} periods of the quota throttled", machine.throttled_periods),
            ("slowed down by heat {:.0f} times", machine.thermal_throttles),
            ("{:.0f} s given to other machines", machine.stolen_seconds),
        )
        if value is not None
    ]
    yes = {True: "yes", False: "no", None: f"{_UNKNOWN} ({machine.reasons.get('turbo', '')})"}
    return {
        "model": f"{machine.processor} ({machine.architecture}{', virtual machine' if machine.virtual else ''})",
        "cores": f"{machine.cores}, usable here: {machine.usable_cores}, "
        f"threads per core: {machine.threads_per_core or _UNKNOWN}, memory nodes: {machine.numa_nodes or _UNKNOWN}",
        "container's limit": unlimited if machine.quota_cores is None else f"{machine.quota_cores:g} cores",
        "load": f"{machine.load_average:.2f}",
        "governor": machine.governor or f"{_UNKNOWN} ({machine.reasons.get('governor', '')})",
        "turbo": yes[machine.turbo],
        "clock": ", ".join(clocks) or _UNKNOWN,
        "lost since the start": ", ".join(lost) or "nothing that is counted here",
        "vector units": ", ".join(machine.vector_units),
        "thread variables": ", ".join(f"{name}={value}" for name, value in machine.thread_variables.items()) or "none",
    }


def _memory(machine: Environment) -> Facts:
    limit, left = machine.memory_limit_bytes, machine.memory_limit_left_bytes
    return {
        "size": f"{format_bytes(machine.memory_bytes)}, available: {format_bytes(machine.available_memory_bytes)}",
        "container's limit": f"{format_bytes(limit)}, left: {format_bytes(left)}"
        if limit is not None
        else f"none ({machine.reasons.get('memory_limit_bytes', '')})",
        "transparent huge pages": machine.transparent_huge_pages or _UNKNOWN,
    }


def _gpu(gpu: GpuState) -> Facts:
    """Format every field with its unit; what is not known, with the reason."""
    facts: Facts = {}
    for name, value in gpu.model_dump(exclude={"reasons"}).items():
        label = name.removesuffix("_bytes").replace("_", " ")
        if value is None:
            facts[label] = f"{_UNKNOWN} ({gpu.reasons.get(name, '')})"
        elif name.endswith("_bytes"):
            facts[label] = format_bytes(value)
        elif name == "processes":
            facts[label] = ", ".join(f"{one['pid']} ({format_bytes(one['used_bytes'])})" for one in value) or "none"
        elif isinstance(value, tuple | list):
            facts[label] = ", ".join(value) or "nothing"
        else:
            facts[label] = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
    return facts
