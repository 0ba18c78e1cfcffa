"""Random histories of a run directory: no command leaves less than there was, no gate passes what was not judged.

The real workflow, scheduler, store, run directory and commands run; only the work of a step is replaced by cheap files.
"""

import contextlib
import itertools
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from enginesmith import cli
from enginesmith.pipeline.artifact import Artifact, Effect, has_files
from enginesmith.pipeline.engines import environment
from enginesmith.pipeline.errors import EnginesmithError, ModelError
from enginesmith.pipeline.execution.executor import Executor, Result, StepCache, StepRequest
from enginesmith.pipeline.execution.local import LocalExecutor
from enginesmith.pipeline.execution.settings import Settings
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.measure.rows import SAMPLES, LatencyRow, MemoryRow, StageFidelity
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.tasks.base import RECORDS, Done, write_records
from enginesmith.pipeline.tasks.measure import ENVIRONMENT, Latency
from enginesmith.pipeline.tensors import Signature, TensorSpec
from enginesmith.pipeline.workflows import optimize as workflow

ENGINES = ("onnxruntime", "compiled")
SIGNATURE = Signature(
    inputs=(TensorSpec(name="image", dtype="float32", shape=("batch", 1, 8, 8)),),
    outputs=(TensorSpec(name="logits", dtype="float32", shape=("batch", 10)),),
)
RECIPE = {"model": "digits", "engines": ENGINES, "batch": [1], "budgets": {"max_drop": 0.1}}


class Killed(BaseException):
    """The process is killed: what is in the folder now stays, and nothing else is done."""


@dataclass
class World:
    """A folder, and the fault that the next command meets."""

    folder: Path
    fault: tuple[str, str | int] | None = None
    weights: int = 0
    """What the model's file holds."""
    killed: bool = False
    """True where the last run was killed."""
    made: Iterator[int] = field(default_factory=itertools.count)
    steps: Iterator[int] = field(default_factory=itertools.count)
    writes: Iterator[int] = field(default_factory=itertools.count)

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def meets(self, kind: str, place: str | int) -> bool:
        if self.fault is None or self.fault[0] != kind:
            return False
        where = self.fault[1]
        return place.startswith(where) if isinstance(place, str) and isinstance(where, str) else place == where

    def kill(self) -> None:
        shutil.copytree(self.out, self.folder / "killed", symlinks=True)
        raise Killed

    def begin_step(self, name: str) -> None:
        number = next(self.steps)
        if self.meets("fail", name):
            raise ModelError(f"{name} failed")
        if self.meets("interrupt", number) or self.meets("interrupt", name):
            raise KeyboardInterrupt
        if self.meets("kill", number) or self.meets("kill", name):
            self.kill()


class CheapExecutor(LocalExecutor):
    """Executes steps as the local executor does, with files that take no time to make."""

    world: ClassVar[World]

    def execute(self, request: StepRequest) -> Result:
        request.on_start()
        self.world.begin_step(request.step.id)
        cache = StepCache(request.step, request.inputs, self._store)
        return Result(cache.make(lambda out, partial: self._work_cheaply(request, out)), cached=False)

    def _work_cheaply(self, request: StepRequest, out: Path) -> Done:
        task, world = request.step.task, self.world
        kind, name = type(task).__name__, "made"
        rejected = "it answers something else" if kind == "Verify" and world.meets("reject", request.step.id) else ""
        if kind == "Sample":
            case = samples.Case(sizes={"batch": 1}, batch=1, points=("min", "opt", "max"), measured=True)
            samples.write(out, samples.Samples(data="digits", ranges={}, cases=(case,)))
            samples.write_arrays(out, "feeds", 0, {"image": np.ones((1, 1, 8, 8), np.float32)})
            samples.write_arrays(out, "outputs", 0, {"logits": np.full((1, 10), world.weights, np.float32)})
            name = samples.RECORD
        elif task.produces == "record":
            write_records(out, self._records(task, kind, request.inputs, out))
            name = RECORDS
        else:  # like TensorRT's, no two engines are the same
            own = next(world.made) if task.produces == "engine" else world.weights
            (out / name).write_text(f"{request.step.id} {own}")
        effect = Effect(file=name, summary="made", signature=SIGNATURE, rejected=rejected)
        return Done(effect=effect, seconds=0.1, host_peak_bytes=None)

    def _records(self, task: Any, kind: str, inputs: dict[str, Artifact], out: Path) -> list[Any]:
        if kind == "Verify":
            known = {"sqnr_db": 60.0, "cosine": 1.0, "max_abs_error": 0.0, "argmax_agreement": 1.0}
            return [StageFidelity(stage="engine", point="opt", batch=1, passed=True, **known)]
        if kind == "Memory":
            return [MemoryRow(device="cpu", batch=1, peak_bytes=1 << 20)]
        if kind == "Quality":
            return [Quality(metric="top1", value=0.9, baseline=0.91, drop=0.01, samples=100)]
        if not isinstance(task, Latency):
            return []
        rows = []
        for index, variant in enumerate(name for name in task.engines if name in inputs):
            ms = 10.0 / (1 + index) + 0.01 * (next(self.world.made) % 7)
            row = LatencyRow(batch=1, n=100, launches=5, p50_ms=ms, reasons={"p99_ms": "too few calls"})
            if index and self.world.meets("crash", variant):
                row = LatencyRow(batch=1, failure="it crashed")
            rows.append({"variant": variant, "row": row.model_dump(mode="json")})
        (out / ENVIRONMENT).write_text(environment().model_dump_json())
        np.savez(out / SAMPLES, times=np.array([row["row"]["p50_ms"] or 0.0 for row in rows]))
        return rows


@dataclass(frozen=True)
class CheapSettings(Settings):
    def open_executor(self) -> Executor:
        return CheapExecutor(self.open_store(), 1)


@contextlib.contextmanager
def faulty_writes(world: World) -> Iterator[None]:
    """Count what is written below the run directory; there the disk is full, or the process is killed."""
    with pytest.MonkeyPatch.context() as patch:
        real_copy, real_write, real_rename, real_replace = shutil.copyfile, Path.write_text, Path.rename, Path.replace

        def meet(path: Path) -> bool:
            if not Path(path).is_relative_to(world.out):
                return False
            number = next(world.writes)
            if world.meets("kill-write", number):
                world.kill()
            return world.fault is not None and world.fault[0] == "full" and number >= int(world.fault[1])

        def copy(source: Path, target: Path, **rest: Any) -> Any:
            if meet(target):
                Path(target).write_bytes(Path(source).read_bytes()[:3])
                raise OSError(28, "No space left on device")
            return real_copy(source, target, **rest)

        def write(path: Path, text: str, **rest: Any) -> int:
            if meet(path):
                real_write(path, text[:3], **rest)
                raise OSError(28, "No space left on device")
            return real_write(path, text, **rest)

        def rename(path: Path, target: Path) -> Path:
            meet(path)
            return real_rename(path, target)

        def replace(path: Path, target: Path) -> Path:
            meet(path)
            return real_replace(path, target)

        patch.setattr(shutil, "copyfile", copy)
        for name, function in (("write_text", write), ("rename", rename), ("replace", replace)):
            patch.setattr(Path, name, function)
        yield


def results(folder: Path, *, killed: bool = False, usable: bool = True) -> dict[str, set[str]]:
    """What there is of each variant, or each that can be used, and the winner; engines only as files that are whole.

    Where a process was killed while it replaced an engine, the earlier one lies beside, and the next run puts it back.
    """
    if not (folder / "run.json").exists():
        return {}
    run = runs.read(folder)
    present = {"winner": {"a winner"} if run.winner else set[str]()}
    for record in run.records:
        if record.status in ("measured", "built") or not usable:
            place = (folder / record.artifact.path).parent if record.artifact else folder
            places = (place, place.with_name(f".{place.name}.earlier"))[: 1 + killed]
            engine = record.artifact and any(has_files(side, record.artifact.sha256) for side in places)
            values = {"quality": record.quality, "memory": record.memory, "fidelity": record.fidelity, "engine": engine}
            present[record.id] = {name for name, value in values.items() if value}
            present[record.id] |= {f"latency {row.batch}" for row in record.latency if row.p50_ms is not None}
            assert record.artifact is None or engine, f"run.json names an engine of {record.id} that is not there"
    return present


def carry_out(world: World, command: str, fault: tuple[str, str | int] | None) -> None:
    """Run one command in a world; whatever it raises, the folder tells what is left."""
    world.fault, world.steps, world.writes = fault, itertools.count(), itertools.count()
    world.killed = False
    CheapExecutor.world = world
    known = CheapSettings(store=world.folder / "store", reuse="anew" not in command, jobs=1)
    recipe = make({**RECIPE, "measure": {"seconds": 7.0 if "other" in command else 5.0}})
    try:
        with faulty_writes(world), contextlib.suppress(EnginesmithError, KeyboardInterrupt):
            if command.startswith("resume"):
                workflow.resume(world.out, known)
            else:
                workflow.optimize(recipe, world.out, known, replace="replace" in command)
    except Killed:
        world.killed = True
        shutil.rmtree(world.out)
        (world.folder / "killed").rename(world.out)


def check_gate(world: World, options: list[str]) -> None:
    """Judge the run on the command line; what passes was judged, and its engines were measured or are named."""
    answer = CliRunner().invoke(cli.main, ["gate", str(world.out), "--no-measure", "--quiet", "--json", *options])
    if answer.exit_code:
        assert answer.exit_code in (1, 2, 3), answer.output
        return
    gate, run = json.loads(answer.stdout), runs.read(world.out)
    states = {check["name"]: check["state"] for check in gate["verdicts"] if check["against"] == "budget"}
    asked = {"max_drop", *(option[2:].replace("-", "_") for option in options if option.startswith("--max"))}
    assert all(any(name.startswith(budget) and state == "passed" for name, state in states.items()) for budget in asked)
    told = " ".join([*gate["cautions"], *(check["text"] for check in gate["verdicts"])])
    measured = {record.engine for record in run.variants if record.status == "measured"}
    assert all(engine in measured or engine in told for engine in ENGINES)
    assert measured, "eager alone passes no gate"


STEPS = ("load", "export", "build", "verify", "quality", "memory-onnxruntime", "latency")
FAULTS = st.one_of(
    st.none(),
    st.tuples(st.sampled_from(["fail", "interrupt", "kill"]), st.sampled_from(STEPS)),
    st.tuples(st.just("reject"), st.sampled_from(["verify-onnxruntime", "verify-compiled"])),
    st.tuples(st.just("crash"), st.sampled_from(["onnxruntime", "compiled"])),
    st.tuples(st.sampled_from(["full", "kill-write"]), st.integers(0, 25)),
)
COMMANDS = st.one_of(
    st.tuples(st.sampled_from(["optimize", "resume", "resume anew", "resume anew", "optimize anew"]), FAULTS),
    st.tuples(st.sampled_from(["optimize other", "optimize other replace", "optimize replace"]), FAULTS),
    st.tuples(st.sampled_from(["another model", "no store", "report", "keep", "strict"]), st.none()),
)
History = list[tuple[str, tuple[str, str | int] | None]]


def live_through(history: History) -> None:
    with tempfile.TemporaryDirectory() as place:
        world = World(Path(place))
        kept = world.folder / "baseline"
        for command, fault in history:
            folders = [folder for folder in world.folder.glob("run*") if folder.is_dir()]
            before, moved = (
                results(world.out, killed=world.killed),
                {folder.name: results(folder) for folder in folders[1:]},
            )
            document = (world.out / "run.json").read_bytes() if before else b""
            if command in ("another model", "no store"):
                world.weights += command == "another model"
                shutil.rmtree(world.folder / "store", ignore_errors=True)
            elif command == "report":
                CliRunner().invoke(cli.main, ["report", str(world.out)])
            elif command == "keep":
                check_gate(world, ["--baseline", str(kept), "--update-baseline"])
            else:
                carry_out(world, command, fault) if command != "strict" else check_gate(world, ["--strict"])
            set_aside = [folder for folder in world.folder.glob("run.*") if folder not in folders]
            if set_aside:
                assert (set_aside[0] / "run.json").read_bytes() == document, "what is moved is moved whole"
                assert results(set_aside[0]) == before
            else:
                after = results(world.out, killed=world.killed, usable=False)
                lost = {
                    name: some - after.get(name, set())
                    for name, some in before.items()
                    if some - after.get(name, set())
                }
                assert not lost, (command, fault, lost)
            assert all(results(world.folder / name) == there for name, there in moved.items() if name != "run")
            if results(world.out, killed=world.killed):
                check_gate(world, ["--max-latency", "1s"])
                check_gate(world, ["--max-p99", "1s", *(["--baseline", str(kept)] if kept.exists() else [])])


@settings(max_examples=5, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(COMMANDS, min_size=2, max_size=5))
@example([("optimize", None), ("resume anew", ("interrupt", "latency")), ("resume", None)])
@example([("optimize", None), ("resume anew", ("kill", "latency")), ("resume anew", ("fail", "latency"))])
@example([("optimize", ("fail", "build")), ("resume", ("kill", "latency")), ("resume", None)])
@example([("optimize", None), ("resume anew", ("kill-write", 5)), ("resume anew", ("full", 6)), ("report", None)])
@example([("optimize", ("fail", "quality")), ("strict", None), ("optimize other replace", ("kill", "load"))])
def test_no_command_loses_results_and_no_gate_passes_what_was_not_judged(history: History) -> None:
    live_through(history)


def test_a_finished_run_has_nothing_left_to_do_and_says_so(tmp_path: Path) -> None:
    world = World(tmp_path)
    carry_out(world, "optimize", None)
    told: list[str] = []
    run = workflow.resume(world.out, None, told.append)
    assert (run, told) == (
        runs.read(world.out),
        [f"nothing is left to do: {world.out} is finished; --no-cache does every step again"],
    )
    (engine,) = world.out.glob("variants/*/made")
    whole = engine.read_bytes()
    engine.write_bytes(b"damaged")
    assert not workflow.is_finished(run, world.out)
    engine.write_bytes(whole)
    assert workflow.is_finished(run, world.out)
    beside = run.variants[0].model_copy(update={"id": "compiled-bf16", "reference": True, "status": "failed"})
    step = run.steps[0].model_copy(update={"id": "verify-compiled-bf16", "status": "failed"})
    for variants, finished in (((*run.variants, beside), True), (run.variants, False)):
        failed = run.model_copy(update={"variants": variants, "steps": (*run.steps, step)})
        assert workflow.is_finished(failed, world.out) == finished, "only a variant that nobody asked for may fail"
    for change in ({"packages": {}}, {"processor": "another"}):
        moved = run.model_copy(update={"environment": run.environment | change})
        assert not workflow.is_finished(moved, world.out), "here another engine is needed"


def test_an_interrupted_run_ends_although_an_engine_fails_when_it_is_measured(tmp_path: Path) -> None:
    world = World(tmp_path)
    carry_out(world, "optimize", ("interrupt", "latency"))
    assert {record.status for record in runs.read(world.out).variants} == {"built"}
    carry_out(world, "resume", ("crash", "onnxruntime"))
    run = runs.read(world.out)
    assert ([record.status for record in run.variants], run.winner) == (["failed", "measured"], "compiled-fp32")


def test_a_step_that_fails_again_is_an_error_and_what_was_there_stays(tmp_path: Path) -> None:
    world = World(tmp_path)
    carry_out(world, "optimize", None)
    before = (world.out / "run.json").read_bytes()
    world.fault = ("fail", "quality-onnxruntime")
    with pytest.raises(ModelError, match="keeps the results that it has: this time onnxruntime-fp32 has no") as caught:
        workflow.resume(world.out, CheapSettings(store=world.folder / "store", reuse=False, jobs=1))
    assert "quality-onnxruntime-fp32 failed" in str(caught.value)
    assert (world.out / "run.json").read_bytes() == before


@pytest.mark.thorough
@settings(max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(COMMANDS, min_size=3, max_size=8))
def test_longer_histories(history: History) -> None:
    live_through([("optimize", None), *history])
