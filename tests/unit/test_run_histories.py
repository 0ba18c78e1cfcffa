"""Random histories of a run directory: no command leaves less than there was, no gate passes what was not judged.

The real workflow, scheduler, store, run directory and commands run; only the work of a step is replaced by cheap files.
"""

import contextlib
import itertools
import json
import os
import platform
import shutil
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import faults
from enginesmith import cli
from enginesmith.pipeline.artifact import Artifact, Effect, has_files
from enginesmith.pipeline.engines import environment
from enginesmith.pipeline.errors import EnginesmithError, ModelError, SourceError, UsageError, storage_errors
from enginesmith.pipeline.execution.executor import Executor, Result, StepCache, StepRequest
from enginesmith.pipeline.execution.local import LocalExecutor
from enginesmith.pipeline.execution.settings import Settings
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.measure.quality import Quality
from enginesmith.pipeline.measure.rows import SAMPLES, LatencyRow, MemoryRow, StageFidelity
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.report.html import page
from enginesmith.pipeline.results import run as runs
from enginesmith.pipeline.system import cpu
from enginesmith.pipeline.tasks.base import RECORDS, Done, write_records
from enginesmith.pipeline.tasks.measure import ENVIRONMENT, Latency, this_machine
from enginesmith.pipeline.tensors import Signature, TensorSpec
from enginesmith.pipeline.workflows import optimize as workflow
from enginesmith.pipeline.workflows import request
from lying_storage import LyingFileSystem

MACHINES = ("one", "two")
ENGINES = ("onnxruntime", "compiled")
SIGNATURE = Signature(
    inputs=(TensorSpec(name="image", dtype="float32", shape=("batch", 1, 8, 8)),),
    outputs=(TensorSpec(name="logits", dtype="float32", shape=("batch", 10)),),
)
RECIPE = {"model": "digits", "engines": ENGINES, "batch": [1], "budgets": {"max_drop": 0.1}}


@dataclass
class World:
    """A run directory, machines with their stores, and the fault that the next command meets."""

    folder: Path
    shared: bool = False
    """True where the machines have one store."""
    fault: tuple[str, str | int] | None = None
    met: bool = False
    weights: int = 0
    """What the model's file holds."""
    machine: str = MACHINES[0]
    offset: float = 0.0
    """Seconds that the clock is ahead."""
    killed: bool = False
    """True where the last run was killed."""
    torn: bool = False
    """True where run.json was cut."""
    place: str = "run"
    synced: set[int] = field(default_factory=set)
    """Files that are on the disk."""
    made: Iterator[int] = field(default_factory=itertools.count)
    steps: Iterator[int] = field(default_factory=itertools.count)
    copies: Iterator[int] = field(default_factory=itertools.count)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def out(self) -> Path:
        return self.folder / self.place

    @property
    def store(self) -> str | Path:
        return "lying://team/store" if self.shared else self.folder / f"store-{self.machine}"

    @property
    def stores(self) -> list[Path]:
        """Folders of stores, and of what is cached of a shared one."""
        return [self.folder / f"store-{machine}" for machine in MACHINES] + [
            path.parent for path in self.folder.glob("cache-*/*/objects")
        ]

    def meets(self, kind: str, place: str | int) -> bool:
        if self.fault is None or self.fault[0] != kind:
            return False
        where = self.fault[1]
        due = place.startswith(where) if isinstance(place, str) and isinstance(where, str) else place == where
        self.met |= due
        return due

    def begin_step(self, name: str) -> None:
        number = next(self.steps)
        if self.meets("fail", name):
            raise ModelError(f"{name} failed")
        if self.meets("interrupt", number) or self.meets("interrupt", name):
            raise KeyboardInterrupt
        if self.meets("kill", number) or self.meets("kill", name):
            faults.current.dead = True
            raise faults.Killed

    def empty_stores(self) -> None:
        LyingFileSystem.objects.clear()
        for store in self.stores:
            shutil.rmtree(store, ignore_errors=True)


def weights_of(inputs: dict[str, Artifact]) -> int:
    """Read which model the inputs of a step were made of: all of the same one."""
    made = {int(artifact.path.read_text().split()[-1]) for artifact in inputs.values() if artifact.path.name == "made"}
    assert len(made) <= 1, f"a step mixes what was made of several models: {inputs}"
    return next(iter(made), 0)


class CheapExecutor(LocalExecutor):
    """Executes steps as the local executor does, with files that take no time to make."""

    world: ClassVar[World]

    def execute(self, request: StepRequest) -> Result:
        request.on_start()
        self.world.begin_step(request.step.id)
        cache = StepCache(request.step, request.inputs, self._store)
        return Result(cache.make(lambda out, partial: self._work_cheaply(request, out)), cached=False)

    def _work_cheaply(self, request: StepRequest, out: Path) -> Done:
        with storage_errors("what the step makes"):
            return self._write_cheaply(request, out)

    def _write_cheaply(self, request: StepRequest, out: Path) -> Done:
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
            own = next(world.made) if task.produces == "engine" else 0
            weights = world.weights if kind == "Load" else weights_of(request.inputs)
            (out / name).write_text(f"{request.step.id} {own} of {weights}")
        effect = Effect(file=name, summary="made", signature=SIGNATURE, rejected=rejected)
        return Done(effect=effect, seconds=0.1, host_peak_bytes=None)

    def _records(self, task: Any, kind: str, inputs: dict[str, Artifact], out: Path) -> list[Any]:
        if kind == "Verify":
            known = {"sqnr_db": 60.0, "cosine": 1.0, "max_abs_error": 0.0, "argmax_agreement": 1.0}
            return [StageFidelity(stage="engine", point="opt", batch=1, passed=True, **known)]
        if kind == "Memory":
            return [MemoryRow(device="cpu", batch=1, peak_bytes=1 << 20)]
        if kind == "Quality":
            return [Quality(metric="top1", value=0.9, baseline=0.91, drop=0.01, samples=100 + weights_of(inputs))]
        if not isinstance(task, Latency):
            return []
        rows, launches = [], 10 * (1 + weights_of(inputs)) + MACHINES.index(self.world.machine)
        for index, variant in enumerate(name for name in task.engines if name in inputs):
            ms = 10.0 / (1 + index) + 0.01 * (next(self.world.made) % 7)
            row = LatencyRow(batch=1, n=100, launches=launches, p50_ms=ms, reasons={"p99_ms": "too few calls"})
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
def cheap_world(world: World) -> Iterator[None]:
    """Have machines, clocks and disks of this world; leave out what takes long and decides nothing here."""
    faults.observe_files()
    fsspec.register_implementation("lying", LyingFileSystem, clobber=True)
    LyingFileSystem.objects.clear()
    LyingFileSystem.now = LyingFileSystem.lag = 0
    clock = time.time
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "render", lambda *rest: "")
        patch.setattr(cpu, "count_others", lambda: 0.0)
        patch.setattr(cpu, "model", lambda: f"processor {world.machine}")
        patch.setattr(platform, "node", lambda: world.machine)
        patch.setattr(socket, "gethostname", lambda: world.machine)
        patch.setattr(time, "time", lambda: clock() + world.offset)
        patch.setattr(os, "fsync", lambda number: world.synced.add(os.fstat(number).st_ino))
        yield
    this_machine.cache_clear()


def results(folder: Path, *, killed: bool = False, usable: bool = True) -> dict[str, set[str]]:
    """List what there is of each variant, or each that can be used, and the winner; engines only as whole files.

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


def carry_out(world: World, command: str, fault: tuple[str, str | int] | None) -> EnginesmithError | None:
    """Run one command in a world as a process of its own; whatever it raises, the folder tells what is left."""
    world.fault, world.steps, world.met, world.killed = fault, itertools.count(), False, False
    CheapExecutor.world = world
    LyingFileSystem.now += 1
    this_machine.cache_clear()
    known = CheapSettings(store=world.store, reuse="anew" not in command, jobs=1)
    recipe = make({**RECIPE, "measure": {"seconds": 7.0 if "other" in command else 5.0}})
    kind, at = fault if fault and fault[0] in ("full", "kill-write", "power") else ("", -1)
    files, began = faults.list_files(world.folder), time.time_ns()
    trouble = faults.Trouble(kind.removesuffix("-write"), 1 << 30 if at == -1 else int(at), str(world.folder))
    faults.current, error = trouble, None
    try:
        if command.startswith("resume"):
            workflow.resume(world.out, known)
        else:
            workflow.optimize(recipe, world.out, known, replace="replace" in command)
    except (EnginesmithError, KeyboardInterrupt) as caught:
        error = caught if isinstance(caught, EnginesmithError) else None
    except faults.Killed:
        world.killed = True
    finally:
        faults.current = faults.Trouble()
    if world.killed:
        faults.end_process(world.stores)
        if kind == "power":
            faults.tear(world.folder, files | world.synced, int(at) % 3)
    world.met |= trouble.met
    faults.shift_times(world.folder, began, world.offset)
    return error


def check_gate(world: World, options: list[str]) -> None:
    """Judge the run on the command line; what passes was judged, and its engines were measured or are named."""
    answer = CliRunner().invoke(cli.main, ["gate", str(world.out), "--no-measure", "--quiet", "--json", *options])
    if answer.exit_code:
        assert answer.exit_code in (1, 2, 3), answer.output
        return
    assert not world.torn, "a gate passes a run that cannot be read"
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
    st.tuples(st.sampled_from(["full", "kill-write", "power"]), st.one_of(st.integers(1, 40), st.integers(1, 400))),
)
COMMANDS = st.one_of(
    st.tuples(st.sampled_from(["optimize", "resume", "resume anew", "resume anew", "optimize anew"]), FAULTS),
    st.tuples(st.sampled_from(["optimize other", "optimize other replace", "optimize replace"]), FAULTS),
    st.tuples(st.sampled_from(["another model", "no store", "report", "keep", "strict", "machine", "copy"]), st.none()),
    st.tuples(st.just("clock"), st.tuples(st.just("days"), st.sampled_from([-400, -3, -1, 1, 3, 400]))),
    st.tuples(st.just("prune"), st.tuples(st.just("days"), st.integers(0, 2))),
    st.tuples(st.just("tear"), st.tuples(st.just("percent"), st.integers(0, 99))),
)
Fault = tuple[str, str | int] | None
History = list[tuple[str, Fault]]


def change_world(world: World, command: str, amount: int) -> bool:
    """Do what is no command of the tool; False where it is one."""
    if command in ("another model", "no store"):
        world.weights += command == "another model"
        world.empty_stores()
    elif command == "machine":
        world.machine = next(name for name in MACHINES if name != world.machine)
    elif command == "copy" and world.out.exists():
        place = f"elsewhere-{next(world.copies)}/run"
        shutil.copytree(world.out, world.folder / place)
        world.place = place
    elif command == "clock":
        world.offset += amount * 86400.0
    elif command == "prune":
        store = CheapSettings(store=world.store).open_store()
        store.prune(max_age_seconds=amount * 86400.0) if amount else store.prune(max_bytes=0)
    elif command == "tear" and (path := world.out / "run.json").exists() and not world.torn:
        os.truncate(path, path.stat().st_size * amount // 100)
        world.torn = True
    return command in ("another model", "no store", "machine", "copy", "clock", "prune", "tear")


def read_files(folder: Path) -> dict[str, bytes]:
    """Read what a run directory has of results: run.json and the engines."""
    paths = [folder / "run.json", *folder.glob("variants/**/*")]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths if path.is_file()}


def check_origin(world: World) -> None:
    """Check that all results of a run are of one model, and were measured on the machine that it names."""
    run = runs.read(world.out)
    models = set()
    for record in run.records:
        models |= {record.quality.samples - 100} if record.quality else set()
        for row in (row for row in record.latency if row.p50_ms is not None):
            models.add(row.launches // 10 - 1)
            assert run.environment["processor"] == f"processor {MACHINES[row.launches % 10]}", "measured elsewhere"
        if record.artifact and not world.killed:
            models.add(int((world.out / record.artifact.path).read_text().split()[-1]))
    assert len(models) <= 1, "results of several models"


def check_torn(world: World, before: dict[str, bytes], error: EnginesmithError | None) -> None:
    """Check that a run whose record is cut is refused in words, and stays as it is, or was moved as a whole."""
    if read_files(world.out) == before:
        assert world.met or (isinstance(error, UsageError) and "run.json is damaged" in str(error)), error
        return
    moved = [folder for folder in world.out.parent.glob("run.*") if read_files(folder) == before]
    assert moved, "what a damaged run has is lost"
    world.torn = False


def work_on(world: World, command: str, fault: Fault, kept: Path) -> None:
    """Carry out one entry of a history, and check what it leaves."""
    world.counts[command] += 1
    if world.torn:
        files = read_files(world.out)
        if command in ("report", "keep", "strict"):
            arguments = ["report", str(world.out)] if command == "report" else ["gate", str(world.out), "--no-measure"]
            answer = CliRunner().invoke(cli.main, arguments)
            assert answer.exit_code == UsageError.exit_code, answer.output
            assert "run.json is damaged" in answer.output
            assert read_files(world.out) == files
        elif not change_world(world, command, int(fault[1]) if fault and not isinstance(fault[1], str) else 0):
            check_torn(world, files, carry_out(world, command, fault))
        return
    folders = [path.parent for path in world.folder.glob("**/run.json")]
    others = {folder: read_files(folder) for folder in folders if folder != world.out}
    before, earlier = results(world.out, killed=world.killed), read_files(world.out)
    if change_world(world, command, int(fault[1]) if fault and not isinstance(fault[1], str) else 0):
        world.counts["fault torn run.json"] += world.torn
        world.counts[f"fault {command}"] += command in ("machine", "copy", "clock", "prune", "no store")
    elif command == "report":
        CliRunner().invoke(cli.main, ["report", str(world.out)])
    elif command == "keep":
        check_gate(world, ["--baseline", str(kept), "--update-baseline"])
        others.pop(kept, None)
    elif command == "strict":
        check_gate(world, ["--strict"])
    else:
        carry_out(world, command, fault)
        world.counts[f"fault {fault[0] if fault else ''}"] += world.met
    assert all(read_files(folder) == files for folder, files in others.items()), "another run directory changed"
    if world.torn:
        return
    set_aside = [path.parent for path in world.out.parent.glob("run.*/run.json") if path.parent not in others]
    if set_aside:
        assert read_files(set_aside[0]) == earlier, "what is moved is moved whole"
    else:
        after = results(world.out, killed=world.killed, usable=False)
        lost = {name: some - after.get(name, set()) for name, some in before.items() if some - after.get(name, set())}
        assert not lost, (command, fault, lost)
    if results(world.out, killed=world.killed):
        check_origin(world)
        check_gate(world, ["--max-latency", "1s", "--max-p99", "1s"])
        if kept.exists():
            check_gate(world, ["--max-p99", "1s", "--baseline", str(kept)])


def live_through(history: History, shared: bool = False, counts: Counter[str] | None = None) -> None:
    """Live through a history from an empty folder."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as place:
        world = World(Path(place), shared, counts=Counter() if counts is None else counts)
        with cheap_world(world), pytest.MonkeyPatch.context() as patch:
            patch.setenv("ENGINESMITH_CACHE", place)
            for command, fault in history:
                patch.setenv("ENGINESMITH_CACHE", str(world.folder / f"cache-{world.machine}"))
                work_on(world, command, fault, world.folder / "baseline")


@settings(max_examples=5, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(COMMANDS, min_size=2, max_size=5), st.booleans())
@example([("optimize", None), ("resume anew", ("interrupt", "latency")), ("resume", None)], False)
@example([("optimize", None), ("resume anew", ("kill", "latency")), ("resume anew", ("fail", "latency"))], False)
@example([("optimize", ("fail", "build")), ("resume", ("kill", "latency")), ("resume", None)], False)
@example(
    [("optimize", None), ("resume anew", ("kill-write", 5)), ("resume anew", ("full", 6)), ("report", None)], False
)
@example([("optimize", ("fail", "quality")), ("strict", None), ("optimize other replace", ("kill", "load"))], False)
def test_no_command_loses_results_and_no_gate_passes_what_was_not_judged(history: History, shared: bool) -> None:
    live_through(history, shared)


def test_a_finished_run_has_nothing_left_to_do_and_says_so(tmp_path: Path) -> None:
    world = World(tmp_path)
    carry_out(world, "optimize", None)
    told: list[str] = []
    run = workflow.resume(world.out, None, told.append)
    assert (run, told) == (runs.read(world.out), [workflow.NOTHING_LEFT.format(world.out)])
    assert Path(run.environment["folder"], run.environment["out"]).resolve() == world.out.resolve()
    (engine,) = world.out.glob("variants/*/made")
    whole = engine.read_bytes()
    engine.write_bytes(b"damaged")
    assert not workflow.is_finished(run, world.out)
    engine.write_bytes(whole)
    assert workflow.is_finished(run, world.out)
    beside = run.variants[0].model_copy(update={"id": "compiled-bf16", "reference": True, "status": "failed"})
    step = run.steps[0].model_copy(
        update={"id": "verify-compiled-bf16", "variant": "compiled-bf16", "status": "failed"}
    )
    for variants, finished in (((*run.variants, beside), True), (run.variants, False)):
        failed = run.model_copy(update={"variants": variants, "steps": (*run.steps, step)})
        assert workflow.is_finished(failed, world.out) == finished, "only a variant that nobody asked for may fail"
    for change in ({"packages": {}}, {"processor": "another"}):
        moved = run.model_copy(update={"environment": run.environment | change})
        assert not workflow.is_finished(moved, world.out), "here another engine is needed"


def test_only_a_finished_run_is_resumed_although_its_recipe_has_fields_that_are_not_known(tmp_path: Path) -> None:
    world = World(tmp_path)
    carry_out(world, "optimize", None)
    document = json.loads((world.out / "run.json").read_text(encoding="utf-8"))
    document["recipe"]["color"] = "red"
    (world.out / "run.json").write_text(json.dumps(document), encoding="utf-8")
    told: list[str] = []
    workflow.resume(world.out, None, told.append)
    assert told == [workflow.NOTHING_LEFT.format(world.out)]
    for engine in world.out.glob("variants/*/made"):
        engine.unlink()
    with pytest.raises(UsageError, match=r"does not have: recipe\.color"):
        workflow.resume(world.out)


@pytest.mark.parametrize("name", [f".{SAMPLES}.partial", SAMPLES, "report.html", "report.md", "junit.xml"])
@pytest.mark.parametrize("command", ["resume", "optimize"])
def test_the_next_command_writes_what_could_not_be_written_at_the_end(tmp_path: Path, name: str, command: str) -> None:
    world = World(tmp_path)
    with cheap_world(world):
        (world.out / name).mkdir(parents=True)
        failed = carry_out(world, "optimize", None)
        assert (failed is not None) == (SAMPLES in name)
        assert runs.read(world.out).complete or not (world.out / SAMPLES).exists()
        (world.out / name).rmdir()
        assert carry_out(world, command, None) is None
    assert {SAMPLES, "report.html", "report.md", "junit.xml"} <= {path.name for path in world.out.iterdir()}
    assert runs.read(world.out).complete


def test_a_run_is_not_complete_before_its_samples_are_copied(tmp_path: Path) -> None:
    world = World(tmp_path)
    with cheap_world(world):
        (world.out / f".{SAMPLES}.partial").mkdir(parents=True)
        carry_out(world, "optimize", None)
    assert not runs.read(world.out).complete


def test_resume_of_a_finished_run_writes_reports_that_are_older_than_its_record(tmp_path: Path) -> None:
    world = World(tmp_path)
    with cheap_world(world):
        carry_out(world, "optimize", None)
        report = world.out / "report.md"
        whole, page = report.read_text(), (world.out / "report.html").stat().st_mtime_ns
        report.write_text("of an unfinished run")
        os.utime(report, (0, 0))
        carry_out(world, "resume", None)
    assert report.read_text() == whole
    assert (world.out / "report.html").stat().st_mtime_ns == page, "the others stay as they are"


@pytest.mark.parametrize(
    ("step", "error_begins"), [("export", "export: the result of load was removed"), ("latency", "the result of build")]
)
def test_a_store_that_is_emptied_meanwhile_is_named_as_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error_begins: str
) -> None:
    """The run directory has no use for the loaded model, but for the engines."""
    world, work = World(tmp_path), CheapExecutor._work_cheaply

    def empty_store(executor: CheapExecutor, request: StepRequest, out: Path) -> Done:
        if request.step.id == step:
            for artifact in request.inputs.values():
                shutil.rmtree(artifact.folder)
            raise ModelError("FileNotFoundError")
        return work(executor, request, out)

    with cheap_world(world):
        with monkeypatch.context() as patch:
            patch.setattr(CheapExecutor, "_work_cheaply", empty_store)
            error = carry_out(world, "optimize", None)
        assert str(error).startswith(error_begins)
        assert "was removed from the store while it was in use" in str(error)
        assert str(error).endswith("; then resume")
        assert carry_out(world, "resume", None) is None
    assert runs.read(world.out).complete


def test_an_interrupted_run_ends_although_an_engine_fails_when_it_is_measured(tmp_path: Path) -> None:
    world = World(tmp_path)
    carry_out(world, "optimize", ("interrupt", "latency"))
    assert {record.status for record in runs.read(world.out).variants} == {"built"}
    carry_out(world, "resume", ("crash", "onnxruntime"))
    run = runs.read(world.out)
    assert ([record.status for record in run.variants], run.winner) == (["failed", "measured"], "compiled-fp32")


def test_a_step_that_fails_again_is_an_error_and_what_was_there_stays(tmp_path: Path) -> None:
    """The error says so, as a script that goes on to `gate` would judge the earlier run."""
    world = World(tmp_path)
    carry_out(world, "optimize", None)
    before = (world.out / "run.json").read_bytes()
    world.fault = ("fail", "quality-onnxruntime")
    with pytest.raises(ModelError, match="keeps the results that it has: this time onnxruntime-fp32 has no") as caught:
        workflow.resume(world.out, CheapSettings(store=world.folder / "store", reuse=False, jobs=1))
    assert "quality-onnxruntime-fp32 failed" in str(caught.value)
    world.fault = ("fail", "load")
    with pytest.raises(EnginesmithError, match=r"keeps the results of its earlier run$"):
        workflow.resume(world.out, CheapSettings(store=world.folder / "store", reuse=False, jobs=1))
    recipe = runs.read(world.out).recipe.model_copy(update={"model": "gone.onnx"})
    with pytest.raises(SourceError, match=r"keeps the results of its earlier run$"):
        workflow.optimize(recipe, world.out, CheapSettings(store=world.folder / "store", jobs=1))
    assert (world.out / "run.json").read_bytes() == before


def test_a_run_is_done_again_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world, notes = World(tmp_path), list[str]()
    carry_out(world, "optimize", None)
    here = environment()
    other = here.model_copy(update={"usable_cores": here.usable_cores + 1})
    for module in (workflow, request):
        monkeypatch.setattr(module, "environment", lambda: other)
    workflow.resume(world.out, CheapSettings(store=world.folder / "store", jobs=1), notes.append)
    assert f"usable_cores: {here.usable_cores} and {other.usable_cores}" in notes[0]


@pytest.mark.thorough
@settings(max_examples=20, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
@given(st.lists(COMMANDS, min_size=3, max_size=8))
def test_longer_histories(history: History) -> None:
    live_through([("optimize", None), *history])


def test_a_cut_record_is_refused_with_a_remedy_that_works(tmp_path: Path) -> None:
    world = World(tmp_path)
    carry_out(world, "optimize", None)
    os.truncate(world.out / "run.json", 100)
    before = read_files(world.out)
    for command in ("optimize", "resume"):
        error = carry_out(world, command, None)
        assert isinstance(error, UsageError)
        assert "run.json is damaged" in str(error)
        assert "--replace" in str(error)
        assert read_files(world.out) == before
    assert carry_out(world, "optimize replace", None) is None
    assert read_files(world.out.with_name("run.1")) == before
    assert all(step.cached for step in runs.read(world.out).steps)


def test_engines_are_on_the_disk_before_the_record_names_them(tmp_path: Path) -> None:
    world = World(tmp_path)
    with cheap_world(world):
        carry_out(world, "optimize", None)
    engines = [world.out / record.artifact.path for record in runs.read(world.out).records if record.artifact]
    assert engines
    assert all(path.stat().st_ino in world.synced for path in engines)
