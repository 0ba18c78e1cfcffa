"""List what two runs differ in besides their results: model, recipe, versions, machine and data.

Only what differs is listed, field by field, with dotted names; a side that has no such field is None.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict

from enginesmith.pipeline.engines import ENGINES, engine_class, needs_cuda
from enginesmith.pipeline.frameworks.samples import batch_symbol
from enginesmith.pipeline.results.run import Run

_PROCESSOR = ("processor", "architecture", "vector_units", "threads_per_core", "usable_cores", "quota_cores")
"""Which processor it is, and how much of it may be used."""
_MACHINE = (
    *_PROCESSOR,
    *("memory_bytes", "virtual", "numa_nodes", "governor", "turbo", "system", "kernel", "thread_variables"),
)
_GPU = ("name", "compute_capability", "memory_bytes", "mig")
_GPU_STATE = (*_GPU, "driver", "power_limit_watts", "ecc")


class Changed(BaseModel):
    """Hold one field, as each run has it."""

    model_config = ConfigDict(frozen=True)

    name: str
    before: Any = None
    after: Any = None


class Differences(BaseModel):
    """Hold all that two runs differ in, by subject."""

    model_config = ConfigDict(frozen=True)

    model: tuple[Changed, ...] = ()
    recipe: tuple[Changed, ...] = ()
    versions: tuple[Changed, ...] = ()
    machine: tuple[Changed, ...] = ()
    data: tuple[Changed, ...] = ()

    @property
    def sections(self) -> tuple[tuple[str, tuple[Changed, ...]], ...]:
        """Names and fields of the parts, also of those that do not differ."""
        return tuple((name, getattr(self, name)) for name in type(self).model_fields)


def list_differences(before: Run, after: Run) -> Differences:
    """List everything that two runs differ in besides their results."""
    return Differences(
        model=_changed(_model(before), _model(after)),
        recipe=_changed(before.recipe.model_dump(mode="json"), after.recipe.model_dump(mode="json")),
        versions=_changed(_versions(before), _versions(after)),
        machine=_changed(_machine(before, _MACHINE, _GPU_STATE), _machine(after, _MACHINE, _GPU_STATE)),
        data=_changed(_data(before), _data(after)),
    )


def is_same_model(before: Run, after: Run) -> bool | None:
    """Tell whether both runs loaded the same model; None where that is not known.

    Runs without the model's digest had the same one where an engine of both is the same, byte for byte.
    """
    one, other = before.model.sha256, after.model.sha256
    if one is not None and other is not None:
        return one == other
    if before.model.signature != after.model.signature:
        return False
    made = {record.id: record.artifact.sha256 for record in before.variants if record.artifact}
    alike = any(record.artifact and made.get(record.id) == record.artifact.sha256 for record in after.variants)
    return True if alike else None


def why_no_yardstick(before: Run, after: Run) -> str:
    """Explain why the baseline of one run is no yardstick for the other; empty where it is one.

    It is one where the same model ran on the same inputs by the same versions on the same kind of machine.
    """
    same = is_same_model(before, after)
    if not same:
        return "other models" if same is False else "whether the model is the same was not recorded"
    if before.baseline.engine != after.baseline.engine:
        return f"{before.baseline.engine} and {after.baseline.engine}"
    changed = [
        *_changed(_lasting(before), _lasting(after)),
        *_changed(_machine(before, _PROCESSOR, _GPU_STATE), _machine(after, _PROCESSOR, _GPU_STATE)),
    ]
    return f"{changed[0].name}: {_brief(changed[0].before)} and {_brief(changed[0].after)}" if changed else ""


def compare_devices(before: Run, after: Run) -> tuple[Changed, ...]:
    """List how the devices differ that latency and memory were measured on; empty where they are of one kind."""
    kinds = device_kind(before), device_kind(after)
    if kinds[0] != kinds[1]:
        return (Changed(name="device", before=kinds[0], after=kinds[1]),)
    if kinds[0] == "cuda":
        return _changed(_gpus(before, _GPU), _gpus(after, _GPU))
    return _changed(_machine(before, _PROCESSOR, ()), _machine(after, _PROCESSOR, ()))


def device_kind(run: Run) -> str:
    """Return the kind of device that a run measured on, or would have: cpu or cuda."""
    measured = (record.memory.device for record in run.records if record.memory)
    if known := next(measured, run.recipe.device):
        return known.partition(":")[0]
    needs = any(needs_cuda(name) for name in run.recipe.engines)
    return "cuda" if needs and run.environment.get("gpus") else "cpu"


def _model(run: Run) -> dict[str, Any]:
    signature = run.model.signature
    shown = {} if signature is None else signature.model_dump(mode="json", include={"inputs", "outputs"})
    return {
        "source": run.model.source,
        "sha256": run.model.sha256,
        **{f"{side}.{spec['name']}": _tensor(spec) for side, specs in shown.items() for spec in specs},
        "baseline": run.baseline.engine,
    }


def _tensor(spec: Mapping[str, Any]) -> str:
    return f"{spec['dtype']}[{', '.join(map(str, spec['shape']))}]"


def _versions(run: Run) -> dict[str, Any]:
    return {"python": run.environment.get("python"), **run.environment.get("packages", {})}


def _machine(run: Run, facts: Iterable[str], gpu: Iterable[str]) -> dict[str, Any]:
    return {**{name: run.environment.get(name) for name in facts}, **_gpus(run, gpu)}


def _gpus(run: Run, facts: Iterable[str]) -> dict[str, Any]:
    found = enumerate(run.environment.get("gpus") or ())
    names = tuple(facts)
    return {f"gpus[{index}].{name}": gpu.get(name) for index, gpu in found for name in names}


def _data(run: Run) -> dict[str, Any]:
    quality = next((record.quality for record in run.variants if record.quality), None)
    return {
        "measured on": run.model.data,
        "shapes": run.model.shapes,
        "metric": quality.metric if quality else None,
        "evaluated samples": quality.samples if quality else None,
    }


def _lasting(run: Run) -> dict[str, Any]:
    """Collect what decides how fast the baseline is, besides model and machine."""
    engine = run.baseline.engine
    tools = engine_class(engine).tools if engine in ENGINES else ()
    packages = run.environment.get("packages", {})
    batch = batch_symbol(run.model.signature) if run.model.signature else None
    return {
        "python": run.environment.get("python"),
        **{name: packages.get(name) for name in tools},
        "device": device_kind(run),
        "threads": run.recipe.threads,
        "thread_variables": run.environment.get("thread_variables", {}),
        "shapes": {name: sizes for name, sizes in run.model.shapes.items() if name != batch},
    }


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Changed, ...]:
    one, other = _flat(before), _flat(after)
    names = dict.fromkeys((*one, *other))
    return tuple(
        Changed(name=name, before=one.get(name), after=other.get(name))
        for name in names
        if one.get(name) != other.get(name)
    )


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Mappings within mappings as dotted names; an empty one is nothing."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return found


def _brief(value: Any) -> str:
    return "none" if value is None else str(value)
