"""List what two runs differ in besides their results: field by field, with dotted names; a missing one is None."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines import ENGINES, engine_class, needs_cuda
from enginesmith.pipeline.frameworks.samples import batch_symbol
from enginesmith.pipeline.frameworks.source import content_digest
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.results.run import ModelRecord, Run

_PROCESSOR = ("processor", "architecture", "vector_units", "threads_per_core", "usable_cores", "quota_cores")
"""Facts that tell processors apart, and how much of one may be used."""
_MACHINE = (
    *_PROCESSOR,
    *("memory_bytes", "virtual", "numa_nodes", "governor", "turbo", "transparent_huge_pages", "system", "kernel"),
    *("thread_variables", "other_variables"),
)
_GPU = ("name", "compute_capability", "memory_bytes", "mig")
_GPU_STATE = (*_GPU, "driver", "power_limit_watts", "ecc")
_SAMPLES_DIGEST = "evaluated samples, sha256"


class Changed(BaseModel, frozen=True):
    """One field, as each run has it."""

    name: str
    before: Any = None
    after: Any = None

    def __str__(self) -> str:
        sides = ("none" if side is None else str(side) for side in (self.before, self.after))
        return f"{self.name}: {' and '.join(sides)}"


class Differences(BaseModel, frozen=True):
    """Everything that two runs differ in, by subject."""

    model: tuple[Changed, ...] = ()
    recipe: tuple[Changed, ...] = ()
    versions: tuple[Changed, ...] = ()
    machine: tuple[Changed, ...] = ()
    data: tuple[Changed, ...] = ()

    @property
    def sections(self) -> tuple[tuple[str, tuple[Changed, ...]], ...]:
        """Names and fields of the subjects, also of those that do not differ."""
        return tuple((name, getattr(self, name)) for name in type(self).model_fields)


def list_differences(before: Run, after: Run) -> Differences:
    """List everything that two runs differ in besides their results."""
    environments = before.environment, after.environment
    return Differences(
        model=_list_changed(*_models(before, after)),
        recipe=compare_recipes(before.recipe, after.recipe),
        versions=_list_changed(*({"python": env.get("python"), **env.get("packages", {})} for env in environments)),
        machine=_list_changed(*_machines(before, after, _MACHINE, _GPU_STATE)),
        data=_list_changed(*_describe_data(before, after)),
    )


def compare_recipes(before: Recipe, after: Recipe) -> tuple[Changed, ...]:
    """List the fields in which two recipes differ."""
    return _list_changed(before.model_dump(mode="json"), after.model_dump(mode="json"))


@dataclass(frozen=True)
class ModelIdentity:
    """Identify a model as it is loaded now, to find out whether a run is of it."""

    sha256: str
    content: str
    """Digest of its content, as :func:`content_digest` computes it."""

    @classmethod
    def of(cls, artifact: Artifact) -> "ModelIdentity":
        """Identify the model that the step for loading has left."""
        return cls(artifact.sha256, content_digest(artifact.folder))

    def matches(self, model: ModelRecord) -> bool:
        """Tell whether a run's model is the same, or has the same content."""
        return model.sha256 == self.sha256 or (bool(self.content) and model.content == self.content)


def is_same_model(before: Run, after: Run) -> bool | None:
    """Tell whether both runs loaded the same model; None where that is not known, as one of them loaded none."""
    if before.model.sha256 is None or after.model.sha256 is None:
        return None
    return ModelIdentity(before.model.sha256, before.model.content).matches(after.model)


def why_no_yardstick(before: Run, after: Run) -> str:
    """Explain why the baseline of one run is no yardstick for the other; empty where it is one.

    It is one where the same model ran on the same inputs by the same versions on the same kind of machine.
    """
    same = is_same_model(before, after)
    if not same:
        return "other models" if same is False else "it was not recorded whether the model is the same"
    if before.baseline.engine != after.baseline.engine:
        return f"{before.baseline.engine} and {after.baseline.engine}"
    changed = [
        *_list_changed(_lasting(before), _lasting(after)),
        *_list_changed(*_machines(before, after, _PROCESSOR, _GPU_STATE)),
    ]
    return str(changed[0]) if changed else ""


def compare_devices(before: Run, after: Run) -> tuple[Changed, ...]:
    """List how the devices differ that latency and memory were measured on; empty where they are of one kind."""
    kinds = device_kind(before), device_kind(after)
    if kinds[0] != kinds[1]:
        return (Changed(name="device", before=kinds[0], after=kinds[1]),)
    if kinds[0] == "cuda":
        return _list_changed(*_machines(before, after, (), _GPU))
    return _list_changed(*_machines(before, after, _PROCESSOR, ()))


def compare_packages(before: Run, after: Run) -> tuple[Changed, ...]:
    """List the packages whose versions differ, whatever they are used for."""
    return _list_changed(*(run.environment.get("packages", {}) for run in (before, after)))


def compare_runtimes(before: Run, after: Run, engine: str) -> tuple[Changed, ...]:
    """List the versions that differ and decide how fast an engine's files run; empty where they are equal."""
    return _list_changed(_runtime(before, engine), _runtime(after, engine))


def _runtime(run: Run, engine: str) -> dict[str, Any]:
    packages = run.environment.get("packages", {})
    tools = {name: packages.get(name) for name in engine_class(engine).tools}
    return tools | (_gpus(run, ("driver",)) if device_kind(run) == "cuda" else {})


def device_kind(run: Run) -> str:
    """Return the kind of device that a run measured on, or would have: cpu or cuda."""
    measured = (record.memory.device for record in run.records if record.memory)
    if known := next(measured, run.device.kind if run.device else run.recipe.device):
        return known.partition(":")[0]
    needs = any(needs_cuda(name) for name in run.recipe.engines)
    return "cuda" if needs and run.environment.get("gpus") else "cpu"


def _models(before: Run, after: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Collect the facts about both models; digests that differ of the same model tell of the versions alone."""
    shown = not is_same_model(before, after)
    first, second = (_model(run) | ({"sha256": run.model.sha256} if shown else {}) for run in (before, after))
    return first, second


def _model(run: Run) -> dict[str, Any]:
    signature = run.model.signature
    sides = {"inputs": signature.inputs, "outputs": signature.outputs} if signature else {}
    tensors = {
        f"{side}.{spec.name}": f"{spec.dtype}[{', '.join(map(str, spec.shape))}]"
        for side, specs in sides.items()
        for spec in specs
    }
    return {"source": run.model.source, **tensors, "baseline": run.baseline.engine}


def _machines(
    before: Run, after: Run, facts: Sequence[str], gpu: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Collect the facts about both machines that both runs recorded: versions do not all record the same ones."""
    environments = before.environment, after.environment
    facts = [name for name in facts if all(name in environment for environment in environments)]
    gpus = [each for environment in environments for each in environment.get("gpus") or ()]
    gpu = [name for name in gpu if all(name in each for each in gpus)]
    first, second = ({name: run.environment[name] for name in facts} | _gpus(run, gpu) for run in (before, after))
    return first, second


def _gpus(run: Run, facts: Sequence[str]) -> dict[str, Any]:
    gpus = enumerate(run.environment.get("gpus") or ())
    return {f"gpus[{index}].{name}": gpu.get(name) for index, gpu in gpus for name in facts}


def _describe_data(before: Run, after: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Collect the facts about both runs' data; a digest that only one of them recorded tells nothing."""
    first, second = _data(before), _data(after)
    if not (first[_SAMPLES_DIGEST] and second[_SAMPLES_DIGEST]):
        del first[_SAMPLES_DIGEST], second[_SAMPLES_DIGEST]
    return first, second


def _data(run: Run) -> dict[str, Any]:
    quality = next((record.quality for record in run.variants if record.quality), None)
    return {
        "measured on": run.model.data,
        "shapes": run.model.shapes,
        "metric": quality.metric if quality else None,
        "evaluated samples": quality.samples if quality else None,
        _SAMPLES_DIGEST: quality.data_sha256 if quality else None,
    }


def _lasting(run: Run) -> dict[str, Any]:
    """Collect the facts that decide how fast the baseline is, besides model and machine."""
    engine = run.baseline.engine
    tools = engine_class(engine).tools if engine in ENGINES else ()
    packages = run.environment.get("packages", {})
    batch = batch_symbol(run.model.signature) if run.model.signature else None
    return {
        "python": run.environment.get("python"),
        **{name: packages.get(name) for name in tools},
        "device": device_kind(run),
        "threads": run.recipe.threads,
        **{name: run.environment.get(name, {}) for name in ("thread_variables", "other_variables")},
        "shapes": {name: sizes for name, sizes in run.model.shapes.items() if name != batch},
    }


def _list_changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[Changed, ...]:
    old, other = _flat(before), _flat(after)
    names = dict.fromkeys((*old, *other))
    return tuple(
        Changed(name=name, before=old.get(name), after=other.get(name))
        for name in names
        if old.get(name) != other.get(name)
    )


def _flat(values: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Flatten mappings within mappings to dotted names; an empty one is nothing."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{above}{name}.") if isinstance(value, Mapping) else {f"{above}{name}": value}
    return flat
