"""Run single stages and benchmarks for the command line: steps as in the main job, outside of a run directory."""

import contextlib
import datetime
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn

from pydantic import BaseModel

from enginesmith.pipeline.artifact import Artifact, HistoryEntry, replace_folder
from enginesmith.pipeline.engines import PORTABLE_PLACEMENT, engine_class, environment, read_file
from enginesmith.pipeline.engines.options import DEFAULT_ENGINES
from enginesmith.pipeline.errors import FidelityError, ModelError, StoreError, UsageError, storage_errors
from enginesmith.pipeline.execution.events import Event, Outcome, Outcomes
from enginesmith.pipeline.execution.merge import assign_step_machines
from enginesmith.pipeline.execution.scheduler import Runner
from enginesmith.pipeline.execution.settings import Settings
from enginesmith.pipeline.frameworks.fidelity import THRESHOLDS
from enginesmith.pipeline.frameworks.onnx import edit, ir, model_file
from enginesmith.pipeline.frameworks.records import PruningFacts
from enginesmith.pipeline.frameworks.source import SAVED, Source
from enginesmith.pipeline.measure.rows import StageFidelity
from enginesmith.pipeline.passes.quantize.precisions import AS_GIVEN
from enginesmith.pipeline.planning import single_stages as plans
from enginesmith.pipeline.planning.plan import LOAD, REFERENCE, Step, StepRef, libraries_of
from enginesmith.pipeline.planning.planner import plan_loading
from enginesmith.pipeline.planning.variants import ResolvedRecipe, resolve_recipe
from enginesmith.pipeline.recipe import Recipe
from enginesmith.pipeline.recipe.fleet import Place
from enginesmith.pipeline.results.assemble import Header, assemble
from enginesmith.pipeline.results.differences import ModelIdentity
from enginesmith.pipeline.results.package import manifest
from enginesmith.pipeline.results.package import verify as verification
from enginesmith.pipeline.results.run import Run, VariantRecord
from enginesmith.pipeline.system import worker
from enginesmith.pipeline.tasks.base import read_models
from enginesmith.pipeline.tasks.prune import FACTS, TRIALS, join_facts, read_facts
from enginesmith.pipeline.workflows.device import begin_on
from enginesmith.pipeline.workflows.earlier_searches import EarlierSearches


def run_steps(steps: Sequence[Step], settings: Settings, recipe: Recipe) -> Mapping[str, Outcome]:
    """Run steps; raise the error of the first that failed."""
    outcomes = try_steps(steps, settings, recipe)
    for outcome in outcomes.values():
        if outcome.error:
            raise outcome.error
    return outcomes


def reload_model(run: Run, folder: Path, settings: Settings, remedy: str) -> Artifact:
    """Load the model of a run again, from the current folder, and refuse another one than the run is of.

    Raises:
        UsageError: it is another one; ``remedy`` says what to do then.
        EnginesmithError: it cannot be loaded.
    """
    steps = plan_loading(resolve_recipe(run.recipe)).steps
    artifact = run_steps(steps, settings, run.recipe)[LOAD].artifact
    assert artifact is not None
    if not ModelIdentity.of(artifact).matches(run.model):
        message = f"{run.recipe.model} loads as another model than that of {folder}: it has changed since then, or"
        raise UsageError(f"{message} an earlier version of enginesmith made the run", remedy)
    return artifact


def try_steps(
    steps: Sequence[Step], settings: Settings, recipe: Recipe, given: Outcomes = MappingProxyType({})
) -> Mapping[str, Outcome]:
    """Run steps as far as they come, after those that are given. Logs are kept only where an error names them."""
    here = next((step for step in steps if step.task.machine_specific), None)
    if here and settings.executor == "local":
        begin_on(recipe.where, recipe, settings.listener, here)
    worker.also_preload(libraries_of(steps))
    logs = Path(tempfile.mkdtemp(prefix="enginesmith-"))
    outcomes: dict[str, Outcome] = {}

    def log_of(step: Step) -> Path:
        return logs / f"{step.id}.log"

    def note(text: str) -> None:
        settings.listener(Event("note", steps[0], text))

    try:
        with settings.open_executor() as executor:
            if not executor.is_local:
                place = Place(device=recipe.where.kind)
                steps = assign_step_machines(steps, place, executor.why_unavailable(place))
            searches = EarlierSearches(steps if executor.is_local else (), settings.open_store())
            runner = Runner(executor, log_of, settings.time_limit_seconds, settings.listener)
            known: dict[str, Outcome] = dict(given)

            def advise(new: Outcomes) -> dict[str, str]:
                known.update(new)
                for step, task in searches.advise(new, known, note):
                    runner.change_task(step, task)
                return {}

            outcomes = runner.run(steps, given, on_new=advise)
        with contextlib.suppress(StoreError):
            searches.remember(outcomes)
        return outcomes
    finally:
        errors = [outcome.error for outcome in outcomes.values() if outcome.error]
        if not any(str(logs) in error.remedy for error in errors):
            shutil.rmtree(logs, ignore_errors=True)


_EVERYWHERE = "most engines take this graph; --engine {} makes one that is much faster there, and only there"
_LOOK = "look at what the model does that the graph does not"


class StageResult(BaseModel, frozen=True):
    """The files that a single stage wrote, and how far they are from what they were made of."""

    summary: str
    files: tuple[str, ...] = ()
    history: tuple[HistoryEntry, ...] = ()
    fidelity: tuple[StageFidelity, ...] = ()

    @property
    def passed(self) -> bool:
        """True if every comparison was close enough."""
        return all(entry.passed for entry in self.fidelity)


class PruneResult(StageResult):
    """The result of ``prune``, with the parts that were removed."""

    pruning: PruningFacts


def export(recipe: Recipe, output: Path, settings: Settings) -> StageResult:
    """Export a model to the ONNX file ``output`` and hold it against eager.

    Raises:
        EnginesmithError: the model cannot be exported, or the graph answers something else; nothing is written then.
    """
    resolved = resolve_recipe(recipe)
    if not resolved.source.is_torch:
        wish = "add --prepend and --append to it" if recipe.prepend or recipe.append else "clean it"
        remedy = f"to {wish}, use `enginesmith simplify` with the same options"
        raise UsageError(f"{recipe.model} is an ONNX file already", remedy)
    return _to_file(resolved, plans.export_steps(resolved), plans.EXPORT, output, settings)


def simplify(recipe: Recipe, output: Path, settings: Settings) -> StageResult:
    """Simplify an ONNX file into ``output`` and hold it against the original; errors as in :func:`export`."""
    resolved = resolve_recipe(recipe)
    if resolved.source.is_torch:
        raise UsageError(f"{recipe.model} is not an ONNX file", "export it first: `enginesmith export MODEL -o m.onnx`")
    return _to_file(resolved, plans.export_steps(resolved, simplify=True), plans.SIMPLIFY, output, settings)


def precision(recipe: Recipe, output: Path, settings: Settings) -> StageResult:
    """Turn a model into an ONNX file of another precision, held against it; errors as in :func:`export`."""
    resolved = resolve_recipe(recipe)
    steps, lowered = plans.precision_steps(resolved)
    result = _to_file(resolved, steps, lowered.graph, output, settings, also=(lowered.calibration,))
    portable = recipe.quantization.placement == PORTABLE_PLACEMENT and recipe.engines == DEFAULT_ENGINES
    everywhere = _EVERYWHERE.format(DEFAULT_ENGINES[0]) if portable else ""
    plain_use = engine_class(recipe.engines[0]).as_given().describe_plain_use(output)
    notes = "".join(f"\n  note: {note}" for note in (everywhere, plain_use) if note)
    return result.model_copy(update={"summary": f"{result.summary}{notes}"})


def sparsify(recipe: Recipe, output: Path, settings: Settings) -> StageResult:
    """Turn a model into an ONNX file with sparse weights; how far its answers are from the dense one's is told.

    That judges nothing unless the recipe has a least SQNR.

    Raises:
        UsageError: an option that does nothing to the pattern.
        EnginesmithError: as in :func:`export`.
    """
    if recipe.sparsities[0].pattern == "2:4" and recipe.sparsifying.scope != "global":
        raise UsageError("a threshold for each layer has no effect on weights that are 2:4", "omit --per-layer")
    resolved = resolve_recipe(recipe)
    steps, last = plans.sparsify_steps(resolved)
    return _to_file(resolved, steps, last, output, settings)


def prune(recipe: Recipe, output: Path, settings: Settings) -> PruneResult:
    """Prune a model into the folder ``output``, which is a MODEL for every other command; recover it if that is asked.

    Raises:
        UsageError: the target cannot be met, or there is something else in the folder.
        EnginesmithError: the model cannot be loaded, followed or run without what would go; nothing is written then.
    """
    resolved = resolve_recipe(recipe)
    if Path(resolved.source.target).resolve() == output.resolve():
        raise UsageError(f"{output} is the model that is to be pruned", "give another folder: -o DIR")
    if output.exists() and not (output / SAVED).is_file() and (not output.is_dir() or any(output.iterdir())):
        raise UsageError(f"{output} is there already, and holds something else", "give a new folder: -o DIR")
    steps, last, cuts = plans.prune_steps(resolved)
    outcomes = run_steps(steps, settings, recipe)
    model, pruned = outcomes[last].artifact, [artifact for cut in cuts if (artifact := outcomes[cut].artifact)]
    assert model is not None
    facts = join_facts([read_facts(artifact) for artifact in pruned], recipe.prune_targets[0])
    from enginesmith.pipeline.frameworks.torch.saved import write_saved

    with storage_errors(f"the output {output}"), replace_folder(output) as whole:
        write_saved(model, whole, output)
        (whole / FACTS).write_text(facts.model_dump_json(indent=1) + "\n", encoding="utf-8")
        if (trials := pruned[-1].folder / TRIALS).exists():
            shutil.copy2(trials, whole)
    changes = [artifact.history[-1] for artifact in (*pruned, model)]
    notes = "".join(f"\n  note: {note}" for note in dict.fromkeys(note for each in changes for note in each.notes))
    files = tuple(str(path) for path in sorted(output.iterdir()))
    summary = f"wrote {output}: {model.history[-1].effect}{notes}"
    return PruneResult(summary=summary, files=files, history=model.history, pruning=facts)


def verify(recipe: Recipe, file: Path, settings: Settings) -> StageResult:
    """Compare an ONNX file with the recipe's model at the points of the shape range.

    Raises:
        UsageError: it is a folder.
        EnginesmithError: one of the two cannot be loaded.
    """
    if file.is_dir():
        _refuse_folder(file)
    outcomes = run_steps(plans.verify_steps(resolve_recipe(recipe), str(file)), settings, recipe)
    checked = outcomes[plans.VERIFY_FILE].artifact
    fidelity = tuple(read_models(checked, StageFidelity))
    judged = [artifact for artifact in (outcomes[REFERENCE].artifact, checked) if artifact]
    notes = "".join(f"\n  note: {note}" for artifact in judged for note in artifact.history[-1].notes)
    return StageResult(summary=f"{file} {_describe_closeness(fidelity, recipe)}{notes}", fidelity=fidelity)


def _refuse_folder(folder: Path) -> NoReturn:
    """Refuse a folder that is to be compared with a model; of a bundle, name what can be."""
    if not all((folder / name).is_file() for name in (manifest.FILE, "infer.py")):
        raise UsageError(f"{folder} is a folder, and --against compares a file with a model", "give an ONNX file")
    graphs = [f"; or give the graph in it: {graph}" for graph in folder.glob("*.onnx")]
    message = f"{folder} is a bundle, which is compared with the answers in it, and --against compares a file"
    raise UsageError(message, f"omit --against{''.join(graphs[:1])}")


def _describe_closeness(fidelity: Sequence[StageFidelity], recipe: Recipe) -> str:
    """Describe how close a file is to the recipe's model; what is as close as fp32 has to be equals it."""
    good, threshold = all(entry.passed for entry in fidelity), recipe.min_sqnr_db
    worst = min((entry.sqnr_db for entry in fidelity if entry.sqnr_db is not None), default=None)
    short = worst is not None and threshold is not None and worst < threshold
    beside = fidelity[0].describe_unverified() if good and fidelity else ""
    if worst is None or worst >= THRESHOLDS["fp32"].min_sqnr_db or not (good or short):
        return f"{'equals' if good else 'differs from'} {recipe.model}{beside}"
    least = f", {threshold:g} dB asked for" if threshold is not None else ""
    return f"is {'' if good else 'not '}close enough to {recipe.model}: lowest SQNR {worst:.1f} dB{least}{beside}"


def verify_bundle(
    folder: Path, settings: Settings, *, trust: bool = False, min_sqnr_db: float | None = None
) -> StageResult:
    """Check that a bundle is what was packaged, and that it answers its test vector.

    Raises:
        UsageError: it is no bundle.
        EnginesmithError: as in :func:`verification.verify`.
    """
    if folder.is_file():
        raise UsageError(
            f"{folder} is a file, and nothing says what its outputs have to equal",
            "give the model: --against MODEL; or a bundle, which is a folder",
        )
    summary, fidelity = verification.verify(folder, settings.time_limit_seconds, trust=trust, min_sqnr_db=min_sqnr_db)
    return StageResult(summary=summary, fidelity=(fidelity,))


def _to_file(
    resolved: ResolvedRecipe,
    steps: Sequence[Step],
    stage: StepRef,
    output: Path,
    settings: Settings,
    also: Sequence[StepRef] = (),
) -> StageResult:
    """Run steps and save what one of them made as a file; ``also`` are others whose notes matter."""
    recipe = resolved.recipe
    if output.suffix != ".onnx":
        raise UsageError(f"the output {str(output)!r} is no .onnx file", f"call it {output.with_suffix('.onnx')}")
    _check_output(resolved.source, output)
    outcomes = run_steps(steps, settings, recipe)
    stage_artifact = outcomes[stage].artifact
    if stage_artifact is None:
        needed = (outcomes[step.id] for step in reversed(steps) if step.id in outcomes)  # optional steps come first
        short = next(
            (result.artifact.rejected for result in needed if result.artifact and result.artifact.rejected), ""
        )
        raise FidelityError(short or outcomes[stage].reason, "nothing was written; ask for less, or search for longer")
    fidelity = tuple(read_models(outcomes[StepRef("verify", stage)].artifact, StageFidelity))
    if failed := next((entry for entry in fidelity if not entry.passed), None):
        message = f"the result differs from the original at {failed.point}: {failed.reason}"
        if recipe.min_sqnr_db is None:
            is_right_elsewhere = stage == plans.EXPORT and any(entry.passed for entry in fidelity)
            advice = _advise_sizes(stage_artifact) if is_right_elsewhere else _LOOK
            raise FidelityError(message, f"nothing was written; {advice}")
        message += f", and {recipe.min_sqnr_db:g} dB are asked for"
        raise FidelityError(message, "nothing was written; change less, or ask for less: --min-sqnr")
    for step in steps:
        check = outcomes[step.id].artifact if step.id.kind == "verify" and step.id in outcomes else None
        if check is not None and check.rejected:
            raise FidelityError(check.rejected, "nothing was written; leave that stage out")
    with storage_errors(f"the output {output}"):
        files = _save_as(stage_artifact, output)
    beside = [artifact.history[-1] for name in also if (artifact := outcomes[name].artifact)]
    notes = "".join(f"\n  note: {note}" for entry in (*stage_artifact.history, *beside) for note in entry.notes)
    count = 2 if stage.kind == "recover" else 1  # what was trained, and how
    entries = stage_artifact.history[-count:]
    summary = f"wrote {' and '.join(files)}: {'; '.join(entry.effect for entry in entries)}{notes}"
    return StageResult(summary=summary, files=tuple(files), history=stage_artifact.history, fidelity=fidelity)


def _advise_sizes(graph: Artifact) -> str:
    """Advise on a graph that is right at some sizes alone, with what its export noted about them."""
    advice = "limit the sizes with --shape to those at which it is right, or take the other exporter with --exporter"
    return "; ".join((advice, *graph.history[-1].notes))


def _check_output(source: Source, output: Path) -> None:
    """Refuse an output that overwrites something of the model that it is made from.

    Raises:
        UsageError: it is that file, or its weights would be written over those of that file.
        InvalidGraph: the model is an ONNX file that cannot be read.
    """
    if source.form not in ("onnx", "pt2"):
        return
    given, other = Path(source.target), "give another file: -o FILE.onnx"
    if given == output.resolve():
        raise UsageError(f"{output} is the model itself, and would be overwritten", other)
    if source.form == "onnx":
        data = output.resolve().with_name(f"{output.name}.data")
        if data in [(given.parent / name).resolve() for name in model_file.external_files(given)]:
            raise UsageError(f"{data.name} has the weights of {source.text}, and would be overwritten", other)


def _save_as(artifact: Artifact, output: Path) -> list[str]:
    """Write an ONNX artifact under a name of the user's, external data as ``<name>.data`` beside it; all or nothing."""
    data = f"{output.name}.data" if model_file.external_files(artifact.path) else None
    output.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as scratch:
        ir.save(edit.load(artifact.path), Path(scratch, output.name), external_data=data)
        names = [name for name in (data, output.name) if name]  # the graph last, as it is what makes the file usable
        for name in names:
            Path(scratch, name).replace(output.parent / name)
    return [str(output.parent / name) for name in reversed(names)]


def benchmark(recipe: Recipe, models: Sequence[str], settings: Settings) -> Run:
    """Measure models side by side; measurements are always made anew. The baseline is the first PyTorch model.

    One that fails has the reason beside it, and the others are measured.

    Raises:
        MissingCapability: none of them can run on the device.
        EnginesmithError: the baseline cannot be loaded, or the measurement as a whole failed.
    """
    started = time.monotonic()
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    resolved, others = plans.choose_baseline(recipe, models)
    recipe, damaged = resolved.recipe, _damaged_engines(others)
    plan = plans.benchmark_plan(resolved, [source for source in others if source.text not in damaged], now)
    measured = next(step.task for step in plan.steps if step.id == plan.latency)
    engines = [variant.engine for variant in (plan.baseline, *plan.variants)]
    if not any(engine.available(measured.runs_on).ok for engine in engines):
        plan.baseline.engine.require(measured.runs_on)
    outcomes = try_steps(plan.steps, settings, recipe)
    needed = (LOAD, REFERENCE, plan.latency or "")
    if error := next((outcomes[name].error for name in needed if name in outcomes and outcomes[name].error), None):
        raise error
    header = Header(
        name="benchmark",
        created=now,
        seconds=round(time.monotonic() - started, 3),
        environment=environment().model_dump(mode="json"),
    )
    run = assemble(header, recipe, plan, outcomes, {})
    return run.model_copy(update={"variants": (*run.variants, *damaged.values())})


def _damaged_engines(sources: Sequence[Source]) -> dict[str, VariantRecord]:
    """Make the record of each engine file that cannot be used at all, by argument: it says why."""
    records = {}
    for source in sources:
        if source.form != "engine":
            continue
        try:
            read_file(Path(source.target))
        except ModelError as error:
            reasons = dict.fromkeys(("latency", "memory", "quality", "limits", "profile"), str(error))
            records[source.text] = VariantRecord(
                id=source.text,
                engine="unknown",
                precision=AS_GIVEN,
                status="failed",
                reason=str(error),
                reasons=reasons,
            )
    return records
