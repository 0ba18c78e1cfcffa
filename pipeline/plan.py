"""A recipe becomes a tree of steps; variants that share a prefix share its steps.

load ─┬─ reference ─────────────────┬────────────────┬────────────┐
      └─ export ─┬─ simplify ─┬─ build-V ── verify-V ┴─ memory-V   └─ latency
                 └─ verify    └─ verify              └─ quality-V     (all variants together)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.engines.base import Device, Engine
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.measure.race import LatencySettings
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.source import Source, resolve
from enginesmith.pipeline.tasks.base import Task
from enginesmith.pipeline.tasks.compare import Sample, Verify
from enginesmith.pipeline.tasks.load import Load, LoadOnnx
from enginesmith.pipeline.tasks.measure import VERIFIED, Latency, Memory, Quality
from enginesmith.pipeline.tasks.transform import Build, Transform

LOAD, REFERENCE, LATENCY = "load", "reference", "latency"


@dataclass(frozen=True)
class Step:
    """One task and the steps whose artifacts it takes, by the role they have in it."""

    id: str
    task: Task
    needs: dict[str, str] = field(default_factory=dict)
    """Role → id of a step; without all of them the step cannot run."""
    wants: dict[str, str] = field(default_factory=dict)
    """Role → id of a step that may fail: one failed variant does not keep the others from being compared."""
    vital: bool = False
    """Whether nothing is worth doing once this has failed."""


@dataclass(frozen=True)
class Variant:
    """One way to run the model: which engine, and the steps that lead to it and say how good it is."""

    id: str
    engine: Engine
    precision: str
    artifact: str
    """The step whose artifact the engine loads."""
    verified: tuple[str, ...] = ()
    """Steps that hold its stages against the reference."""
    memory: str | None = None
    quality: str | None = None


@dataclass(frozen=True)
class Plan:
    """Steps in an order in which each comes after what it needs, and what they are for."""

    steps: tuple[Step, ...]
    baseline: Variant
    variants: tuple[Variant, ...]
    latency: str | None


def plan(recipe: Recipe) -> Plan:
    """Expand a recipe.

    Raises:
        UsageError: the recipe asks for what does not go together.
    """
    source = resolve(recipe.model)
    device = recipe.where
    engines = [name for name in recipe.engines if name != "eager"]  # eager is the baseline, always there
    _hold(source, engines)
    steps = list(_first_steps(recipe))
    graph: str = LOAD
    verified: tuple[str, ...] = ()
    if any(engine_class(name).consumes == "onnx" for name in engines):
        graph, verified, more = _graph_steps(recipe, source)
        steps += more
    baseline = Variant("eager" if source.is_torch else "source", _baseline(source), "fp32", LOAD)
    variants = [baseline]
    for name, engine in _variants(recipe, engines):
        variant, more = _engine_steps(recipe, name, engine, graph, verified)
        variants.append(variant)
        steps += more
    for index, variant in enumerate(variants):
        variants[index], more = _own_measurements(recipe, variant, baseline.id, device)
        steps += more
    latency = _latency(recipe, variants, device) if recipe.measure.latency else None
    return Plan(
        (*steps, *([latency] if latency else [])), variants[0], tuple(variants[1:]), latency.id if latency else None
    )


def _hold(source: Source, engines: list[str]) -> None:
    needs_module = [name for name in engines if engine_class(name).consumes == "torch"]
    if needs_module and not source.is_torch:
        raise UsageError(
            f"the engine {needs_module[0]!r} runs a PyTorch module, and {source.text} is an ONNX file",
            "leave that engine away, or give the model as file.py:factory",
        )


def _load(recipe: Recipe, source: Source) -> Task:
    if not source.is_torch:
        return LoadOnnx(source=source, inputs=recipe.specs)
    return Load(source=source, inputs=recipe.specs, seed=recipe.seed, allow_pickle=recipe.allow_pickle)


def _baseline(source: Source) -> Engine:
    """Eager for a module; an ONNX file is held against itself, run as it is."""
    if source.is_torch:
        return engine_class("eager")()
    return _unoptimised()


def _unoptimised() -> Engine:
    """ONNX Runtime on a graph as it stands."""
    return engine_class("onnxruntime").model_validate({"graph_optimization": "disabled"})


def _sample(recipe: Recipe, source: Source) -> Task:
    return Sample(
        engine=_baseline(source),
        ranges=recipe.ranges,
        batches=recipe.batch,
        data=recipe.data,
        seed=recipe.seed,
    )


def _graph_steps(recipe: Recipe, source: Source) -> tuple[str, tuple[str, ...], list[Step]]:
    """From what was loaded to the graph that engines are built from; each stage is verified as it is, unoptimised."""
    from enginesmith.pipeline.passes.export import Export
    from enginesmith.pipeline.passes.simplify import Simplify

    stages: dict[str, Task] = {}
    if source.is_torch:
        stages["export"] = Transform(step=Export(**recipe.export.model_dump()))
    if recipe.simplify:
        stages["simplify"] = Transform(step=Simplify(external_data_bytes=recipe.export.external_data_bytes))
    runtime = _unoptimised()
    steps, checks, parent = [], [], LOAD
    for name, task in stages.items():
        steps.append(Step(name, task, {"model": parent}))
        checks.append(_verify(recipe, name, name, name, runtime, Device()))
        parent = name
    return parent, tuple(check.id for check in checks), [*steps, *checks]


def _verify(recipe: Recipe, name: str, stage: str, artifact: str, engine: Engine, device: Device) -> Step:
    task = Verify(stage=stage, engine=engine, device=device, precision="fp32", min_sqnr_db=recipe.min_sqnr_db)
    return Step(f"verify-{name}", task, {"model": artifact, "reference": REFERENCE})


def _variants(recipe: Recipe, engines: list[str]) -> Iterator[tuple[str, Engine]]:
    """Variant ids and their engines, in the order of the recipe."""
    for name in engines:
        if name != "onnxruntime":
            yield f"{name}-fp32", engine_class(name)()
            continue
        for level in recipe.graph_optimization:
            suffix = "" if level == "all" else f"-{level}"
            yield f"{name}-fp32{suffix}", engine_class(name).model_validate({"graph_optimization": level})


def _engine_steps(
    recipe: Recipe, name: str, engine: Engine, graph: str, checks: tuple[str, ...]
) -> tuple[Variant, list[Step]]:
    """Build, and the check that stands for all checks before it too."""
    device = recipe.where
    if engine.consumes == "torch":
        check = _verify(recipe, name, "engine", LOAD, engine, device)
        return Variant(name, engine, "fp32", LOAD, (check.id,)), [check]
    build = Step(f"build-{name}", Build(engine=engine, device=device), {"model": graph})
    check = _verify(recipe, name, "engine", build.id, engine, device)
    check = replace(check, needs={**check.needs, **{name: name for name in checks}})
    return Variant(name, engine, "fp32", build.id, (*checks, check.id)), [build, check]


def _own_measurements(recipe: Recipe, variant: Variant, baseline_id: str, device: Device) -> tuple[Variant, list[Step]]:
    """What is measured of one variant alone."""
    needs = {"model": variant.artifact, "reference": REFERENCE}
    if variant.verified:
        needs[VERIFIED] = variant.verified[-1]
    steps = []
    if recipe.data:
        task = Quality(
            engine=variant.engine,
            device=device,
            data=recipe.data,
            samples=recipe.samples,
            metric=recipe.metric,
            batch=max(recipe.batch),
            seed=recipe.seed,
        )
        baseline = {"baseline": f"quality-{baseline_id}"} if variant.id != baseline_id else {}
        steps.append(Step(f"quality-{variant.id}", task, {**needs, **baseline}))
        variant = replace(variant, quality=steps[-1].id)
    if recipe.measure.memory:
        steps.append(Step(f"memory-{variant.id}", Memory(engine=variant.engine, device=device), needs))
        variant = replace(variant, memory=steps[-1].id)
    return variant, steps


def _latency(recipe: Recipe, variants: list[Variant], device: Device, again: str = "") -> Step:
    settings = LatencySettings(
        precision=recipe.measure.precision, time_limit_seconds=recipe.measure.seconds, seed=recipe.seed
    )
    task = Latency(
        engines={variant.id: variant.engine for variant in variants}, device=device, settings=settings, again=again
    )
    needs = {variants[0].id: variants[0].artifact, "reference": REFERENCE}
    wants = {variant.id: variant.artifact for variant in variants[1:]}
    wants |= {f"{variant.id} {VERIFIED}": (variant.artifact, *variant.verified)[-1] for variant in variants[1:]}
    return Step(LATENCY, task, needs, wants)


def export_steps(recipe: Recipe) -> tuple[Step, ...]:
    """The steps of ``export`` alone, with its check."""
    graph = _graph_steps(recipe.model_copy(update={"simplify": False}), resolve(recipe.model))[2]
    return (*_first_steps(recipe), *graph)


def simplify_steps(recipe: Recipe) -> tuple[Step, ...]:
    """The steps of ``simplify`` on an ONNX file, with its check."""
    graph = _graph_steps(recipe.model_copy(update={"simplify": True}), resolve(recipe.model))[2]
    return (*_first_steps(recipe), *graph)


def verify_steps(recipe: Recipe, file: str) -> tuple[Step, ...]:
    """The steps that hold an ONNX file against the recipe's model."""
    source = resolve(file)
    if source.is_torch:
        raise UsageError(f"{file} is not an ONNX file", "verify FILE.onnx --against MODEL")
    check = _verify(recipe, "file", Path(file).name, "file", engine_class("onnxruntime")(), recipe.where)
    return (*_first_steps(recipe), Step("file", LoadOnnx(source=source)), check)


def benchmark_plan(recipe: Recipe, others: Sequence[str], again: str) -> Plan:
    """Measure models side by side as they are, the recipe's first; ``again`` is new each time."""
    device = recipe.where
    steps = list(_first_steps(recipe))
    variants = [Variant(_label(recipe.model), _own_engine(resolve(recipe.model)), "as given", LOAD)]
    for index, text in enumerate(others, 1):
        source = resolve(text)
        name = f"{LOAD}-{index}"
        steps.append(Step(name, _load(recipe.model_copy(update={"inputs": ()}), source)))
        variants.append(Variant(_distinct(_label(text), variants), _own_engine(source), "as given", name))
    for index, variant in enumerate(variants):
        memory = Memory(engine=variant.engine, device=device, again=again)
        steps.append(Step(f"memory-{variant.id}", memory, {"model": variant.artifact, "reference": REFERENCE}))
        variants[index] = replace(variant, memory=steps[-1].id)
    latency = _latency(recipe, variants, device, again)
    return Plan((*steps, latency), variants[0], tuple(variants[1:]), latency.id)


def _first_steps(recipe: Recipe) -> tuple[Step, Step]:
    source = resolve(recipe.model)
    load = Step(LOAD, _load(recipe, source), vital=True)
    return load, Step(REFERENCE, _sample(recipe, source), {"model": LOAD}, vital=True)


def _own_engine(source: Source) -> Engine:
    return engine_class("eager" if source.is_torch else "onnxruntime")()


def _label(text: str) -> str:
    source = resolve(text)
    return Path(text).name if source.form in ("onnx", "pt2") else source.name


def _distinct(label: str, variants: Sequence[Variant]) -> str:
    taken = {variant.id for variant in variants}
    return label if label not in taken else f"{label}-{len(taken) + 1}"
