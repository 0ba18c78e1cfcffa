"""Choose the variant of a run that is packaged, check its files by digest, and describe it in a manifest."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from enginesmith.calibration.options import AS_FOUND
from enginesmith.pipeline.artifact import MANIFEST_NAMES, files_below, has_content, has_files
from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.engines.base import Engine
from enginesmith.pipeline.engines.options import DEFAULT_ENGINES
from enginesmith.pipeline.errors import ModelError, UsageError
from enginesmith.pipeline.frameworks.fidelity import Thresholds, find_thresholds
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.measure.statistics import TOO_NOISY
from enginesmith.pipeline.passes.quantize.precisions import KINDS, RANGES_PER_BATCH
from enginesmith.pipeline.planning.plan import REFERENCE
from enginesmith.pipeline.planning.variants import device_for
from enginesmith.pipeline.results import documents
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.results.package.manifest import (
    EngineRecord,
    Manifest,
    Measured,
    Origin,
    PackagedFile,
    Preprocessing,
    Summary,
)
from enginesmith.pipeline.results.remeasure import Stored
from enginesmith.pipeline.results.run import Run, StoredArtifact, VariantRecord
from enginesmith.pipeline.tensors import ShapeRange


@dataclass(frozen=True)
class Chosen(Stored):
    """A variant of a run whose files are there, as they were made."""

    cautions: tuple[str, ...]

    @property
    def loaded(self) -> StoredArtifact:
        """The artifact that is packaged: the graph where the engine takes one, as that runs on other machines too."""
        loaded = self.record.graph or self.record.artifact
        assert loaded is not None
        return loaded

    @property
    def main(self) -> Path:
        """The file that is loaded."""
        return self.folder / self.loaded.path

    @property
    def files(self) -> dict[str, Path]:
        """All files that belong to it, by name from the main file's folder."""
        folder = self.main.parent
        if self.record.graph:
            return {name: folder / name for name in (self.main.name, *model_file.external_files(self.main))}
        names = files_below(folder, skip=MANIFEST_NAMES)
        return {name: folder / name for name in names if not name.endswith(".log")}


def choose(folder: Path, variant: str | None) -> Chosen:
    """Choose the variant of that name, else the winner.

    Raises:
        UsageError: there is no such run or variant, or it is nothing that can be packaged.
        ModelError: a file is missing, or is not the one that the run made.
    """
    stored = find_variant(folder, variant)
    folder, run, record = stored.folder, stored.run, stored.record
    _check_packagable(folder, run, record)
    others = () if record.id == run.winner else (f"it is not the run's winner, which is {run.winner or 'none'}",)
    chosen = Chosen(folder, run, record, (*list_doubts(record), *others))
    check_engine_file(folder, chosen.loaded)
    assert record.test_vector is not None
    check_vector(folder, record.test_vector)
    return chosen


def find_variant(folder: Path, variant: str | None) -> Stored:
    """Find the variant of that name in a run directory, else the winner; UsageError if there is none."""
    run = runs.read(folder)
    folder = folder if folder.is_dir() else folder.parent
    record = next((record for record in run.records if record.id == run.winner), None)
    if variant:
        record = runs.find_record(run, variant)
    if record is None:
        why = run.winner_reason or ("the run is not complete" if not run.complete else "none meets the budgets")
        built = ", ".join(variant.id for variant in run.variants if variant.artifact)
        named = f"name one with --variant (in Python: variant=…); built are: {built}"
        again = "run optimize again" if run.complete else f"`enginesmith resume {folder}` goes on"
        raise UsageError(f"the run has no winner: {why}", named if built else f"no engine is built: {again}")
    return Stored(folder, run, record)


def list_doubts(record: VariantRecord) -> Iterator[str]:
    """List what speaks against a variant, which only those use who name it."""
    if record.status == "failed":
        yield f"it failed in the run: {record.reason}"
    elif record.status != "measured":
        yield f"it was not measured: {record.reason or record.status}"
    if record.rejected:
        yield f"it was rejected: {record.rejected}"


def _check_packagable(folder: Path, run: Run, record: VariantRecord) -> None:
    if engine_class(record.engine).runs_module():
        graphs = [variant.id for variant in run.variants if variant.graph and variant.status != "failed"]
        remedy = f"--variant {graphs[0]}, " if graphs else f"optimize with --engine {DEFAULT_ENGINES[0]}, "
        raise UsageError(
            f"{record.id} runs the PyTorch module itself, which takes the code that makes it",
            f"package a built engine instead ({remedy}say), or `enginesmith export {run.model.source} -o model.onnx`",
        )
    require_engine(folder, run, record)
    if (engine_class(record.engine).loads_graph and record.graph is None) or record.test_vector is None:
        raise UsageError(
            f"the run keeps no graph or test vector of {record.id}",
            f"`enginesmith resume {folder}` adds them, and does nothing else again that the store still has",
        )
    if run.model.signature is None:
        raise UsageError("the run does not know the model's inputs and outputs", f"`enginesmith resume {folder}`")


def require_engine(folder: Path, run: Run, record: VariantRecord) -> StoredArtifact:
    """Give the engine of a variant; UsageError if the run keeps none."""
    if record.artifact is None and record.status == "measured":
        message = f"{record.id} is the ONNX file that the run was given, of which it keeps no copy"
        raise UsageError(message, "use that file as it is, or name another variant")
    if record.artifact is None and record.dropped:
        message = f"the run keeps no engine of {record.id}, which was not measured in full: {record.dropped}"
        alone = f"--engine {record.engine} --precision {record.precision}"
        raise UsageError(message, f"make it in a run of its own: {alone}, with another --out")
    if record.artifact is None:
        why = record.reason or record.status
        again = f"`enginesmith resume {folder}` does what is missing"
        failed = f"name another variant; {again}, if it failed for want of time or memory"
        raise UsageError(f"{record.id} has no engine: {why}", failed if record.status == "failed" else again)
    return record.artifact


def check_engine_file(folder: Path, stored: StoredArtifact) -> None:
    """Check that a run's engine or graph is what the run made, byte for byte; ModelError if it is not."""
    main, again = folder / stored.path, f"run `enginesmith resume {folder}`, which makes it again"
    if not main.is_file():
        raise ModelError(f"{main} is missing", again)
    if not has_files(main.parent, stored.sha256):
        raise ModelError(f"{main.parent} is not what the run made: its sha256 differs from the one in run.json", again)


def check_vector(folder: Path, stored: StoredArtifact) -> Path:
    """Give the path of a run's test vector; ModelError if it is not what the run made."""
    path = folder / stored.path
    if not has_content(path, stored.sha256):
        again = f"run `enginesmith resume {folder}`, which makes it again"
        raise ModelError(f"{path} is missing, or not what the run made", again)
    return path


_SYNTHETIC = "ranges were taken from random data: its accuracy says nothing about real data"
_GRAPHS = "it was measured with CUDA graphs, which this package does not replay: it is slower than in the run"
_INTERACTING = "the answer to a sample depends on the rest of its batch: requests must not be put together in one"
_RANGES_PER_BATCH = (
    "activations are quantized by the range of the whole batch: requests in it change each other's answers"
)
_CHANNELS = (1, 3, 4)


def describe(
    chosen: Chosen, form: Literal["bundle", "triton"], file: str, files: Mapping[str, PackagedFile]
) -> Manifest:
    """Describe a package of these files in a manifest; the engine loads ``file``."""
    run, record = chosen.run, chosen.record
    assert run.model.signature is not None
    # with the options that the run built and measured it with
    engine_kind = engine_class(record.engine)
    options = {**record.options_of(engine_kind), **engine_kind.running_options(run.recipe)}
    engine = documents.parse_fields(engine_kind, options, f"what {record.id} was built with")
    described, backend = _describe_engine(chosen, engine, file), engine_kind.triton() if form == "triton" else None
    own_graph = record.graph != record.artifact and record.graph is not None
    cautions = (
        *chosen.cautions,
        *([engine.package_caution] if own_graph and engine.package_caution else []),
        *(backend.remark(described.model_dump()) if backend else ()),
        *([_GRAPHS] if record.cuda_graphs and form not in engine.replays_in else []),
        *([_SYNTHETIC] if record.synthetic_calibration else []),
        *([record.shortfall] if record.shortfall else []),
        *([_INTERACTING] if run.model.interacting_samples else []),
        *([_RANGES_PER_BATCH] if record.precision in RANGES_PER_BATCH else []),
    )
    return Manifest.model_validate(
        {
            "format": form,
            "variant": record.id,
            "precision": record.precision,
            "engine": described,
            "signature": run.model.signature,
            "shapes": {name: ShapeRange.parse(text) for name, text in run.model.shapes.items()},
            "interacting_samples": run.model.interacting_samples or record.precision in RANGES_PER_BATCH,
            "preprocessing": _preprocessing(chosen),
            "measured": _summary(record),
            "thresholds": thresholds_of(run, record, engine),
            "origin": _origin(chosen),
            "cautions": cautions,
            "files": dict(files),
        }
    )


def thresholds_of(run: Run, record: VariantRecord, engine: Engine) -> Thresholds:
    """Look up the thresholds that the run judged the variant's answers by."""
    assert run.model.signature is not None
    kind = KINDS.get(record.precision)  # type: ignore[call-overload]
    row = kind.threshold if kind and kind.threshold != "fp32" else engine.arithmetic
    return find_thresholds((spec.dtype for spec in run.model.signature.outputs), row, run.recipe.min_sqnr_db)


def _describe_engine(chosen: Chosen, engine: Engine, file: str) -> EngineRecord:
    record, device = chosen.record, device_for(chosen.run.recipe, engine)
    tools = record.history[-1].tools
    facts = engine.package_facts(chosen.main, device)
    return EngineRecord(
        name=record.engine,
        package=facts.module or record.engine,
        version=facts.version or next((tools[name] for name in engine.tools if name in tools), "unknown"),
        file=file,
        device="cuda" if device.kind == "cuda" else "cpu",
        compute_capabilities=facts.targets,
        options=dict(facts.options),
    )


def _summary(record: VariantRecord) -> Summary:
    sqnr = [check.sqnr_db for check in record.fidelity if check.stage == "engine" and check.sqnr_db is not None]
    reasons = {name: record.reasons[name] for name in ("latency", "memory", "quality") if name in record.reasons}
    return Summary(
        latency=tuple(
            Measured(
                batch=row.batch,
                p50_ms=row.p50_ms,
                p99_ms=row.p99_ms,
                throughput_per_s=row.throughput_per_s,
                speedup=row.speedup.median if row.speedup and not row.speedup_too_noisy else None,
                reasons={name: row.reasons[name] for name in Measured.model_fields if name in row.reasons}
                | ({"speedup": TOO_NOISY} if row.speedup_too_noisy else {}),
            )
            for row in record.latency
        ),
        peak_bytes=record.peak_bytes,
        sqnr_db=min(sqnr, default=None),
        metric=record.quality.metric if record.quality else None,
        value=record.quality.value if record.quality else None,
        drop=record.quality.drop if record.quality else None,
        reasons=reasons | ({} if sqnr else {"sqnr_db": "the built engine was not compared with the reference"}),
    )


def _preprocessing(chosen: Chosen) -> Preprocessing:
    run, signature = chosen.run, chosen.run.model.signature
    assert signature is not None
    given = {name: value for name, value in run.recipe.data_options if value != getattr(AS_FOUND, name)}
    notes = [f"the run fed {step.effect}" for step in run.steps if step.id == REFERENCE and step.effect]
    for spec in signature.inputs:  # the layout of images, where sizes tell
        if len(spec.shape) == 4 and spec.shape[1] in _CHANNELS:
            notes.append(f"{spec.name} is NCHW: batch, channels, height, width")
        elif len(spec.shape) == 4 and spec.shape[3] in _CHANNELS:
            notes.append(f"{spec.name} is NHWC: batch, height, width, channels")
    return Preprocessing(options=given, notes=tuple(notes))


def _origin(chosen: Chosen) -> Origin:
    run, here = chosen.run, chosen.run.environment
    return Origin(
        run=run.name,
        created=run.created,
        model=run.model.source,
        model_sha256=run.model.sha256,
        data=run.model.data,
        processor=here.get("processor"),
        gpus=tuple(str(gpu.get("name", "unknown")) for gpu in here.get("gpus") or ()),
        packages=here.get("packages") or {},
        recipe=run.recipe.model_dump(mode="json"),
        history=chosen.record.history,
    )
