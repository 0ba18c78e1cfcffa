"""Measure the engines of two runs again, side by side: two stored runs, apart in time, are never as sharp.

Each iteration measures several launches of both, interleaved as everywhere (``measure/latency/benchmark.py``). After
each one the ratio over all launches so far is judged; where it is not clear, another iteration follows, up to a limit.
"""

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import BaseModel

from enginesmith.pipeline.artifact import Artifact, has_files
from enginesmith.pipeline.engines import engine_class, environment
from enginesmith.pipeline.engines.base import Candidate, Engine
from enginesmith.pipeline.errors import MissingCapability, ModelError, require_utf8
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.measure.latency.benchmark import LatencySettings
from enginesmith.pipeline.measure.latency.rows import launches_of, measure_latency
from enginesmith.pipeline.measure.statistics import (
    LEAST_LAUNCHES,
    TOO_NOISY,
    Interval,
    Timed,
    paired_medians,
    paired_ratio,
)
from enginesmith.pipeline.results import differences, documents
from enginesmith.pipeline.results.run import Run, VariantRecord
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.gpu_lock import LONGEST_SECONDS, lock_gpu
from enginesmith.pipeline.tensors import Feeds, ShapeRange

UNTRUSTED = "the engine has machine code, which could do anything on this machine as soon as it is loaded"
"""Said where nobody has said that its maker is trusted."""
MOST_ITERATIONS = 4
_BEFORE, _AFTER = "baseline", "candidate"
_UNENDING = 1e-9
"""A precision that no measurement reaches: an iteration takes its time, so that all weigh alike."""
_WARM_SHARE = 0.05
"""Share of an iteration for warming up one engine once: on a busy machine calls never look warm; launches count."""
_BLOCK_MS = 40.0
"""Blocks are shorter than elsewhere, so that more launches fit into the time: it is these that differ."""


@dataclass(frozen=True)
class Stored:
    """A variant of a run directory."""

    folder: Path
    run: Run
    record: VariantRecord


class Remeasurement(BaseModel, frozen=True):
    """The second engine's time as a multiple of the first's: 1.1 is 10 % slower."""

    ratio: Interval
    before_ms: float
    after_ms: float
    launches: int


def needs_trust(record: VariantRecord) -> bool:
    """Tell whether a variant's engine has machine code, which is loaded only where the user trusts its maker."""
    kind = engine_class(record.engine)
    built = record.options_of(kind).get("options")
    return kind.needs_trust(built if isinstance(built, dict) else {})


def why_not(before: Stored, after: Stored, *, any_machine: bool, trust: bool = False) -> str:
    """Explain why the two cannot be measured here and now; empty if they can."""
    for which, stored in (("baseline", before), ("run", after)):
        if needs_trust(stored.record) and not trust:
            warning = (
                f"{stored.record.id} of the {which} has machine code, which could do anything as soon as it is loaded"
            )
            return f"{warning}; with --trust both are measured again: say so if you trust who made them"
        if stored.record.artifact is None or not stored.record.built_with:
            return f"the {which} has no engine file of {stored.record.id}"
        if not has_files((stored.folder / stored.record.artifact.path).parent, stored.record.artifact.sha256):
            return f"the {which}'s engine file of {stored.record.id} is missing, or not what the run made"
    if before.run.model.signature != after.run.model.signature or after.run.model.signature is None:
        return "the inputs or outputs are not the same"
    if _vector(after) is None:
        return "the run keeps no test vector that engines could be fed with"
    here = after.run.model_copy(update={"environment": environment().model_dump(mode="json")})
    apart = differences.compare_devices(after.run, here)
    if apart and not any_machine:
        return f"this is not the kind of machine that the runs were measured on ({apart[0].name})"
    return ""


def same(before: Stored, after: Stored) -> bool:
    """Tell whether both are the same engine, byte for byte, run in the same way."""
    old, other = before.record.artifact, after.record.artifact
    if old is None or other is None or old.sha256 != other.sha256:
        return False
    if _engine(before.record) != _engine(after.record) or _device(before) != _device(after):
        return False
    return all(
        has_files((side.folder / artifact.path).parent, artifact.sha256)
        for side, artifact in ((before, old), (after, other))
    )


def remeasure(
    before: Stored,
    after: Stored,
    batch: int,
    *,
    seconds: float,
    decided: Callable[[Interval], bool],
    progress: Callable[[str], None],
    trust: bool = False,
) -> Remeasurement:
    """Measure both in turns until the ratio of their times is ``decided``, or time is over.

    ``trust`` loads machine code in the engines, too.

    Raises:
        EnginesmithError: one of them cannot be loaded or run here.
    """
    candidates = [candidate(_BEFORE, before, trust=trust), candidate(_AFTER, after, trust=trust)]
    each = seconds / MOST_ITERATIONS
    settings = LatencySettings(
        precision=_UNENDING,
        time_limit_seconds=each,
        block_ms=_BLOCK_MS,
        min_rounds=15,
        noisy_extension=1,
        warmup_limit_seconds=_WARM_SHARE * each,
    )
    feeds, iteration = {batch: _feeds(after, batch)}, 0
    launches: dict[str, list[list[Timed]]] = {_BEFORE: [], _AFTER: []}
    device = candidates[1].device
    lock = lock_gpu(device.index, LONGEST_SECONDS, progress) if device.kind == "cuda" else nullcontext()
    with tempfile.TemporaryDirectory() as logs, lock:
        while True:
            iteration += 1
            seeded = settings.model_copy(update={"seed": iteration})
            result = measure_latency(candidates, feeds, seeded, Path(logs), lambda text: None)
            for name, stored in ((_BEFORE, before), (_AFTER, after)):
                if failure := result.rows[name][0].failure:
                    raise ModelError(f"{stored.record.id} of {stored.folder} cannot be run here: {failure}")
                if result.rows[name][0].group is not None:
                    raise ModelError("the two do not fit on the GPU together", "free memory of the GPU, then try again")
                launches[name] += launches_of(result.samples, name, batch)
            ratio = paired_ratio(launches[_AFTER], launches[_BEFORE], settings.seed)
            times = f"{ratio.median:.3f} times the baseline's [{ratio.low:.3f}, {ratio.high:.3f}]"
            progress(f"iteration {iteration}: {TOO_NOISY if ratio.too_noisy else times}")
            enough = len(launches[_BEFORE]) >= LEAST_LAUNCHES
            if iteration == MOST_ITERATIONS or (enough and decided(ratio)):
                break
    before_ms, after_ms = (seconds * 1e3 for seconds in paired_medians(launches[_BEFORE], launches[_AFTER]))
    return Remeasurement(ratio=ratio, before_ms=before_ms, after_ms=after_ms, launches=len(launches[_BEFORE]))


def candidate(name: str, stored: Stored, *, trust: bool = False) -> Candidate:
    """Make what opens a stored engine: the engine as it was built, its file, and the device that it ran on.

    Raises:
        MissingCapability: it has machine code, and nobody has said that its maker is trusted.
        SourceError: its path is not UTF-8, which engines take no other path in.
    """
    require_utf8(str(stored.folder), "the run directory")
    if needs_trust(stored.record) and not trust:
        remedy = "if you trust who made the run: load(..., trust=True) in Python, or enginesmith gate --trust"
        raise MissingCapability(UNTRUSTED, remedy)
    stored_engine = stored.record.artifact
    assert stored_engine is not None
    artifact = Artifact(
        kind="engine",
        path=stored.folder / stored_engine.path,
        sha256=stored_engine.sha256,
        bytes=stored_engine.bytes,
        signature=stored.run.model.signature,
        history=stored.record.history,
    )
    engine = _engine(stored.record, trust=trust)
    running = engine.running_options(stored.run.recipe)
    return Candidate(name, engine.model_copy(update=running), artifact, _device(stored))


def _engine(record: VariantRecord, *, trust: bool = False) -> Engine:
    """Rebuild the engine's settings; nothing that a file says and that would run code is taken over without trust."""
    kind = engine_class(record.engine)
    options = kind.restore_options(record.options_of(kind), trust=trust)
    return documents.parse_fields(kind, options, f"what {record.id} was built with")


def _device(stored: Stored) -> Device:
    fields = stored.record.built_with.get("device")
    return documents.parse_fields(Device, fields, f"where {stored.record.id} ran") if fields else stored.run.where


def _vector(stored: Stored) -> Path | None:
    """Find the file of feeds that the run keeps."""
    vector = stored.record.test_vector
    path = stored.folder / vector.path if vector else None
    return path if path and path.is_file() else None


def _feeds(stored: Stored, batch: int) -> Feeds:
    """Make feeds of a batch size from those of the test vector; the other dimensions are the usual ones."""
    signature, path = stored.run.model.signature, _vector(stored)
    assert signature is not None
    assert path is not None
    with np.load(path, allow_pickle=False) as vector:
        feeds = {spec.name: vector[f"input:{spec.name}"] for spec in signature.inputs}
    usual = {name: ShapeRange.parse(text).opt for name, text in stored.run.model.shapes.items()}
    symbol = samples.batch_symbol(signature)
    return samples.resize(feeds, signature, {**usual, symbol: batch} if symbol else usual)
