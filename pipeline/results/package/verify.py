"""Verify a bundle's files by digest, and its answer to the test vector in a process of its own."""

import contextlib
import importlib.metadata
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np

from enginesmith.pipeline.artifact import Artifact, Kind
from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.engines.base import Candidate, Engine
from enginesmith.pipeline.engines.infer import DIFFERENT, UNABLE
from enginesmith.pipeline.errors import MissingCapability, ModelError, UsageError, require_utf8
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.fidelity import Fidelity, compare, describe_failure
from enginesmith.pipeline.frameworks.rounding import find_unverified
from enginesmith.pipeline.measure.rows import StageFidelity
from enginesmith.pipeline.results.package import manifest as manifests
from enginesmith.pipeline.results.package.manifest import Manifest
from enginesmith.pipeline.results.remeasure import UNTRUSTED
from enginesmith.pipeline.system import worker
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Feeds

_MODULES = ("numpy", "enginesmith.pipeline.results.package.verify")
"""All that the worker needs, where the engine does not take its memory from PyTorch."""
_SCRIPT_SECONDS = 900


def verify(
    folder: Path, timeout_seconds: float | None = None, *, trust: bool = False, min_sqnr_db: float | None = None
) -> tuple[str, StageFidelity]:
    """Check every digest, then run the test vector; gives a sentence, and how close the answer is.

    ``trust`` allows to load machine code. ``min_sqnr_db`` stands instead of the SQNR that the run asked for.

    Raises:
        UsageError: it is no bundle, or its manifest is damaged or of another schema.
        ModelError: a file is missing, changed or was not packaged; nothing was loaded.
        MissingCapability: this machine cannot run the engine, or its code is not trusted: digests were checked, the
            vector was not run.
        StepError: the engine's process ended without an answer.
    """
    manifest = manifests.read(folder)
    if manifest.format != "bundle":
        raise UsageError(
            f"{folder} is a {manifest.format} package, which has no test vector",
            "package the run as a bundle to verify it",
        )
    manifests.check_files(folder, manifest)
    checked = f"{len(manifest.files)} files are what was packaged"
    vector = samples.read_vector(folder / manifests.VECTOR)
    try:
        require_trust(manifest, trust=trust)
        answers = answer(folder, manifest, vector.feeds, timeout_seconds)
    except MissingCapability as error:
        raise MissingCapability(f"{checked}; the test vector was not run: {error.message}", error.remedy) from error
    thresholds = manifest.thresholds.with_sqnr(min_sqnr_db)
    fidelity = compare(vector.outputs, answers, thresholds, manifest.signature, *vector[2:])
    result = _result(manifest, fidelity)
    result = result.model_copy(update={"unverified": find_unverified(vector.unstable, vector.outputs, result.sets)})
    verdict = "answers its test vector" if result.passed else "does not answer its test vector"
    beside = result.describe_unverified() if result.passed else ""
    return f"{folder}: {checked}; {manifest.variant} {verdict}{beside}{_note_version(folder, manifest)}", result


def require_trust(manifest: Manifest, *, trust: bool) -> None:
    """Insist that the user trusts who made a bundle, if its engine is machine code; MissingCapability if not."""
    if engine_class(manifest.engine.name).needs_trust(manifest.engine.options) and not trust:
        raise MissingCapability(
            UNTRUSTED,
            "if you trust who made the bundle: enginesmith verify --trust, or load(..., trust=True) in Python",
        )


def answer(folder: Path, manifest: Manifest, feeds: Feeds, timeout_seconds: float | None = None) -> Feeds:
    """Load what was packaged in a process of its own, and return its outputs.

    Raises:
        MissingCapability: this machine cannot run the engine.
        StepError: the engine's process ended without an answer.
    """
    engine, device = _engine(folder, manifest), Device(kind=manifest.engine.device)
    if not engine.memory_from_torch:
        worker.preload_only((*_MODULES, *engine.modules))
    engine.require(device)
    with tempfile.TemporaryDirectory(prefix="enginesmith-") as logs:
        log = Path(logs, "verify.log")
        answers: Feeds = worker.run(_run, folder, manifest, feeds, log=log, timeout_seconds=timeout_seconds)
    return answers


def run_script(folder: Path, manifest: Manifest) -> str:
    """Run ``infer.py`` of a bundle in a new process of this interpreter, and say what came of it.

    Nothing of enginesmith is loaded there and no library is found beforehand, as on the machine that serves the model.

    Raises:
        ModelError: its answers are not those of the test vector, or it fails where this machine can run the engine.
    """
    engine = _engine(folder, manifest)
    runnable = engine.runnable(Device(kind=manifest.engine.device)).ok
    command = [sys.executable, "-B", str(folder.resolve() / manifests.INFER)]
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=_SCRIPT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"not run to its end: no answer after {_SCRIPT_SECONDS} s"
    lines = done.stderr.strip().splitlines()
    last_line = lines[-1] if lines else "no message"
    error_line = next((line for line in reversed(lines) if line.startswith("error: ")), last_line)
    elsewhere = not engine.loads_graph and done.returncode == UNABLE  # it may be for another GPU than the one here
    if done.returncode and (done.returncode == DIFFERENT or (runnable and not elsewhere)):
        message = f"{manifests.INFER} does not run this bundle: {error_line.removeprefix('error: ')}"
        raise ModelError(message, "package another variant, or optimize again")
    if done.returncode:
        return f"not run: {error_line.removeprefix('error: ')}"
    return "its answers match the test vector"


def _engine(folder: Path, manifest: Manifest) -> Engine:
    """Make the engine, with no option that a file could allow itself, except what :func:`require_trust` asks for."""
    return engine_class(manifest.engine.name).from_package(folder / manifest.engine.file, manifest.engine.options)


def candidate(folder: Path, manifest: Manifest) -> Candidate:
    """Make what opens the engine of a bundle, with the number of threads that it was measured with.

    Raises:
        SourceError: the folder's path is not UTF-8, which engines take no other path in.
    """
    engine, path = _engine(folder, manifest), folder / manifest.engine.file
    require_utf8(str(path), "the bundle's engine")
    file_entry, threads = manifest.files[manifest.engine.file], manifest.origin.recipe.get("threads")
    kind: Kind = "onnx" if engine.loads_graph else "engine"
    artifact = Artifact(
        kind=kind, path=path, sha256=file_entry.sha256, bytes=file_entry.bytes, signature=manifest.signature
    )
    device = Device(kind=manifest.engine.device, threads=threads if isinstance(threads, int) else 0)
    return Candidate(manifest.variant, engine, artifact, device)


def _run(folder: Path, manifest: Manifest, feeds: Feeds, progress: Callable[[str], None]) -> Feeds:
    engine_candidate = candidate(folder, manifest)
    with engine_candidate.engine.load(engine_candidate.artifact, engine_candidate.device) as session:
        return {name: np.array(value) for name, value in session.run(feeds).items()}


def _result(manifest: Manifest, fidelity: Fidelity) -> StageFidelity:
    sizes = [shape.min for name, shape in manifest.shapes.items() if name == samples.batch_symbol(manifest.signature)]
    return StageFidelity(
        stage="test vector",
        point="min",
        batch=sizes[0] if sizes else samples.fixed_batch(manifest.signature),
        sqnr_db=fidelity.sqnr_db,
        cosine=fidelity.cosine,
        max_abs_error=fidelity.max_abs_error,
        argmax_agreement=fidelity.argmax_agreement,
        paired=fidelity.paired,
        sets=fidelity.sets,
        passed=fidelity.passed,
        reason="" if fidelity.passed else describe_failure(fidelity),
    )


def _note_version(folder: Path, manifest: Manifest) -> str:
    """Say which version of the engine's package ran, the first that is installed, if it is another one."""
    for name in _engine(folder, manifest).tools:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            here = importlib.metadata.version(name)
            package = f"{manifest.engine.name} {manifest.engine.version}"
            return (
                "" if here == manifest.engine.version else f"\n  note: it was made with {package}, and ran with {here}"
            )
    return ""
