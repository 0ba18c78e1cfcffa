"""Options of sessions on the CPU: which ones are tried, when they are kept, and that everything runs with them."""

import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Engine
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.engines.openvino.engine import OpenVINO
from enginesmith.pipeline.engines.triton import Message
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.measure.rows import LatencyRow, Throughput
from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.system import cpu
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks import tune
from enginesmith.pipeline.tensors import ShapeRange
from graphs import parse_graph

THREADS, SPINNING = "intra_op_num_threads", "session.intra_op.allow_spinning"
PRODUCT = "net (float[n, 64] x) => (float[n, 64] y) { y = MatMul(x, w) }"
WEIGHT = np.random.default_rng(0).standard_normal((64, 64), np.float32)
FEEDS = {"x": np.ones((2, 64), np.float32)}
FASTER, UNSURE = Interval(median=1.3, low=1.1, high=1.5), Interval(median=1.3, low=0.9, high=1.5)


@pytest.mark.parametrize(
    ("allowed", "smt", "quota", "counts"),
    [
        (16, 2, None, ("8", "4", "1")),
        (16, 1, None, ("8", "1")),
        (64, 2, 5.5, ("6", "32", "16", "1")),
        (2, 1, 4.0, ("1",)),
        (1, 2, None, ()),
    ],
)
def test_fewer_threads_than_allowed_are_tried(
    allowed: int, smt: int, quota: float | None, counts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu, "threads_per_core", lambda: smt)
    monkeypatch.setattr(cpu, "quota_cores", lambda: quota)
    assert cpu.fewer_threads(allowed) == counts


@pytest.mark.parametrize(
    ("engine", "threads", "names"),
    [
        (OnnxRuntime(), 4, [SPINNING, THREADS]),
        (OnnxRuntime(), 1, []),
        (OnnxRuntime(session_options=(f"{THREADS}=1",)), 4, []),
        (OnnxRuntime(session_options=(f"{THREADS}=2",)), 4, [SPINNING]),
        (OpenVINO(), 4, ["INFERENCE_NUM_THREADS"]),
        (OpenVINO(session_options=("INFERENCE_NUM_THREADS=2",)), 4, []),
        (OpenVINO(), 1, []),
    ],
)
def test_options_are_tried_where_they_can_matter(engine: Engine, threads: int, names: list[str]) -> None:
    assert list(engine.tunable_options(None, Device(threads=threads))) == names


class Tuned:
    """A graph that was built and tuned; measurements alone are not real: ``gains`` says what they are."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model = parse_graph(PRODUCT, w=WEIGHT)
        (folder / "in").mkdir()
        path = folder / "in/model.onnx"
        ir.save(model, path)
        self.graph = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
        self.reference, self.out = folder / "reference", folder / "out"
        for made in (self.reference, self.out):
            made.mkdir()
        case = samples.Case(points=("min",), sizes={"n": 2}, batch=2, measured=True)
        samples.write(self.reference, samples.Samples(data="x", ranges={"n": ShapeRange.parse("2:2:2")}, cases=(case,)))
        samples.write_arrays(self.reference, "feeds", 0, FEEDS)
        self.answer(FEEDS["x"] @ WEIGHT)
        monkeypatch.setattr(tune, "measure_latency", self.measure)
        self.gains: Callable[[str], Interval | None] = lambda name: FASTER
        self.settings: list[Any] = []
        self.disturbed = False

    def answer(self, wanted: np.ndarray[Any, Any]) -> None:
        samples.write_arrays(self.reference, "outputs", 0, {"y": wanted})

    def measure(self, candidates: Any, feeds: Any, settings: Any, logs: Path, progress: Any) -> Any:
        self.settings.append(settings)
        names = [one.id for one in candidates]
        disturbed = {"speedup_disturbed": self.disturbed}
        rows = {name: [LatencyRow(batch=2, speedup=self.gains(name), **disturbed)] for name in names}
        return SimpleNamespace(rows=rows)

    def run(self, engine: Engine | None = None, **fields: Any) -> tuple[Artifact, Any]:
        reference = Artifact(kind="reference", path=self.reference / "x", sha256="", bytes=0)
        task = tune.Tune(engine=engine or OnnxRuntime(), device=Device(threads=4), seconds=60, **fields)
        task.run({"model": self.graph, "engine": self.graph, "reference": reference}, self.out, lambda text: None)
        built = self.graph.model_copy(update={"path": self.out / "model.onnx"})
        return built, json.loads((self.out / "tuning.json").read_text())


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tuned:
    monkeypatch.setattr(cpu, "threads_per_core", lambda: 1)
    monkeypatch.setattr(cpu, "quota_cores", lambda: None)
    return Tuned(tmp_path, monkeypatch)


def test_sessions_run_with_what_was_chosen(tuned: Tuned) -> None:
    built, record = tuned.run()
    assert (record["kept"], record["dropped"]) == ([f"{SPINNING}=0", f"{THREADS}=2"], "")
    assert record["confirmation"]["low"] == 1.1
    assert [settings.launches for settings in tuned.settings] == [1, 1, 16]  # the last one confirms
    for threads, wanted in ((4, 2), (1, 1)):  # never more than allowed
        with OnnxRuntime().load(built, Device(threads=threads)) as session:
            options = session._session.get_session_options()
            assert (options.intra_op_num_threads, options.get_session_config_entry(SPINNING)) == (wanted, "0")


def test_nothing_is_chosen_by_calls_that_other_programs_disturbed(tuned: Tuned) -> None:
    tuned.disturbed = True
    _, record = tuned.run()
    assert (record["fields"], record["kept"]) == ({}, [])
    assert {(trial["speedup"], trial["failure"]) for trial in record["trials"]} == {(None, "too noisy to tell")}


def unsure_together(name: str) -> Interval:
    return UNSURE if name == "kept" else FASTER


def noisy_together(name: str) -> Interval:
    return Interval(median=3, low=1.1, high=9) if name == "kept" else FASTER


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gains": unsure_together}, "together they are not measurably faster"),
        ({"gains": noisy_together}, "together they are not measurably faster"),
        ({"answer": np.zeros((2, 64), np.float32)}, "the outputs differ too much from the reference"),
        ({"max_memory_bytes": 1}, "peak memory is .*, above --max-memory"),
    ],
)
def test_the_recipes_options_stay_where_others_are_no_better(
    changes: Mapping[str, Any], reason: str, tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "measure_memory", lambda *_: SimpleNamespace(peak_bytes=2))
    fields = dict(changes)
    tuned.gains = fields.pop("gains", tuned.gains)
    if "answer" in fields:
        tuned.answer(fields.pop("answer"))
    built, record = tuned.run(**fields)
    assert (record["fields"], record["kept"]) == ({}, [])
    assert record["dropped"].startswith(f"{SPINNING}=0, {THREADS}=2: ")
    assert re.search(reason, record["dropped"])
    assert OnnxRuntime().tuned(built) == OnnxRuntime()


@pytest.mark.parametrize(
    ("there", "kept"),
    [
        (Interval(median=0.6, low=0.5, high=0.7), False),
        (Interval(median=0.9, low=0.85, high=0.95), True),  # less than the gain of 1.3 where it decides
        (Interval(median=0.6, low=0.2, high=1.1), True),
    ],
)
def test_options_that_lose_more_at_another_batch_than_they_gain_are_not_kept(
    there: Interval, kept: bool, tuned: Tuned, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [samples.Case(points=("min",), sizes={"n": size}, batch=size, measured=True) for size in (2, 8)]
    ranges = {"n": ShapeRange.parse("2:2:8")}
    samples.write(tuned.reference, samples.Samples(data="x", ranges=ranges, cases=tuple(cases)))
    large = np.ones((8, 64), np.float32)
    samples.write_arrays(tuned.reference, "feeds", 1, {"x": large})
    samples.write_arrays(tuned.reference, "outputs", 1, {"y": large @ WEIGHT})

    def measure(candidates: Any, feeds: Any, settings: Any, logs: Path, progress: Any) -> Any:
        (batch,) = feeds
        found = FASTER if batch == 2 else there
        return SimpleNamespace(rows={one.id: [LatencyRow(batch=batch, speedup=found)] for one in candidates})

    monkeypatch.setattr(tune, "measure_latency", measure)
    _, record = tuned.run()
    assert bool(record["kept"]) is kept
    assert record["other_batches"]["8"]["median"] == there.median
    assert ("at batch 8 they are 0.60× [0.50, 0.70] as fast" in record["dropped"]) is not kept


def test_the_best_throughput_of_several_callers_decides(tuned: Tuned, monkeypatch: pytest.MonkeyPatch) -> None:
    rates = {"": (10, 20), "2": (10, 40), "1": (30, 10), "kept": (10, 40)}

    def measure(candidates: Any, feeds: Any, settings: Any, logs: Path, progress: Any) -> Any:
        assert (list(feeds), settings.concurrency) == ([2], (1, 4))
        assert settings.time_limit_seconds * settings.noisy_extension <= 30  # latency and throughput take it each
        rows = {one.id: LatencyRow(batch=2, speedup=UNSURE, concurrency=levels(*rates[one.id])) for one in candidates}
        return SimpleNamespace(rows={name: [row] for name, row in rows.items()})

    def levels(*best: float) -> tuple[Throughput, ...]:
        intervals = (Interval(median=rate, low=0.9 * rate, high=1.1 * rate) for rate in best)
        return tuple(Throughput(callers=1, samples_per_s=one, p50_ms=1, p99_ms=None, n=1) for one in intervals)

    monkeypatch.setattr(tune, "measure_latency", measure)
    monkeypatch.setattr(tune.Tune, "_find_fault", lambda *_: "")
    _, record = tuned.run(OpenVINO(), batch=2, callers=(1, 4))
    assert record["kept"] == ["INFERENCE_NUM_THREADS=2"]
    assert record["confirmation"]["median"] == pytest.approx(2)


@pytest.mark.parametrize(
    ("engine", "parameters", "remarks"),
    [
        (OnnxRuntime(session_options=(f"{THREADS}=1",)), {"intra_op_thread_count": "1"}, 0),
        (OnnxRuntime(session_options=(f"{THREADS}=2", f"{SPINNING}=0")), {"intra_op_thread_count": "2"}, 1),
        (OpenVINO(session_options=("INFERENCE_NUM_THREADS=2",)), {"INFERENCE_NUM_THREADS": "2", "NUM_STREAMS": "1"}, 1),
    ],
)
def test_packages_have_what_was_chosen(engine: Any, parameters: dict[str, str], remarks: int) -> None:
    options = engine.package_facts(Path("none.onnx"), Device(threads=4)).options
    again = type(engine).from_package(Path("none.onnx"), json.loads(json.dumps(options)))
    assert {*engine.session_options} <= {*again.session_options}
    backend = engine.triton()
    text = " ".join(Message(backend.configure(options, "cpu")).lines())
    assert parameters.items() <= dict(re.findall(r'key: "(\w+)"\s+value {\s+string_value: "(\w+)"', text)).items()
    assert len(backend.remark({"options": options})) == remarks


@pytest.mark.parametrize(("seconds", "left", "cut"), [(1.0, 60.0, False), (60.0, 1.0, True), (60.0, 60.0, False)])
def test_options_that_the_whole_run_left_no_time_for_are_tried_again(
    tuned: Tuned, seconds: float, left: float, cut: bool
) -> None:
    reference = Artifact(kind="reference", path=tuned.reference / "x", sha256="", bytes=0)
    task = tune.Tune(engine=OnnxRuntime(), device=Device(threads=4), seconds=seconds, left_seconds=left)
    effect = task.run({"model": tuned.graph, "engine": tuned.graph, "reference": reference}, tuned.out, print)
    record = json.loads((tuned.out / "tuning.json").read_text())
    assert (effect.incomplete, record["cut"]) == (cut, cut)
    assert bool(record["untried"]) is (1.0 in (seconds, left))
    assert any("no time was left to try" in note for note in effect.notes) is bool(record["untried"])
