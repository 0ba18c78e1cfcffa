"""Run random graphs through every pass, and see that each keeps what it promises, or refuses in words.

    python benchmarks/fuzzing.py --from 0 --to 10000        # goes on where it ended; --again starts anew
    python benchmarks/fuzzing.py --seed 17 --stop           # one graph, with the traceback of what is raised

Graphs are made by nets/random_graphs.py, computed by ONNX Runtime without optimization, and run through the passes as
the tasks of a plan run them, in a process that is started again where it crashes or hangs. Passes that keep the answer
in float32 are judged by the thresholds and the sensitivity by which `prosecute` judges engines, float16 and bfloat16
likewise; fewer bits by a noise above the signal; and lossy ones by shapes, dtypes and finite numbers alone where a
graph chooses by value. Some 2:4 graphs go through other passes, where their zeros have to stay; some graphs go through
`enginesmith optimize` and `package`, and the bundle has to answer on its own. What ONNX Runtime with optimization,
OpenVINO and the builder of TensorRT-RTX make of the graphs is noted, and is no finding. Numbers go to
benchmarks/results/fuzzing.json and fuzzing.md.
"""

import importlib.util
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from fuzz_process import FINDINGS, Outcome, collect, run_command, shorten, write_report, write_table

from enginesmith.calibration.dataset import Dataset
from enginesmith.pipeline.artifact import Artifact, Effect, file_digest
from enginesmith.pipeline.engines.base import BuildRequest
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.engines.tensorrt.engine import TensorRTRTX
from enginesmith.pipeline.errors import EnginesmithError
from enginesmith.pipeline.frameworks.fidelity import Thresholds
from enginesmith.pipeline.frameworks.onnx import edit, evaluator, model_file, traversal, validation
from enginesmith.pipeline.frameworks.samples import find_spans
from enginesmith.pipeline.measure.prosecution.judging import make_judge, measure_sensitivity
from enginesmith.pipeline.passes.base import Pass
from enginesmith.pipeline.passes.export.attention import DecomposeAttention
from enginesmith.pipeline.passes.float16.emulation import emulate
from enginesmith.pipeline.passes.quantize.precision import Precision
from enginesmith.pipeline.passes.rescale.equalize import CrossLayerEqualization
from enginesmith.pipeline.passes.rescale.shift import ChannelShift
from enginesmith.pipeline.passes.rescale.smooth_quant import Smooth
from enginesmith.pipeline.passes.run import run_pass
from enginesmith.pipeline.passes.simplify import Simplify
from enginesmith.pipeline.passes.sparsify.check import follow
from enginesmith.pipeline.passes.sparsify.sparsify import Sparsify
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.calibrate import Calibrate, Feeder, Feeding
from enginesmith.pipeline.tensors import Array, Feeds, ShapeRange

sys.path.append(str(Path(__file__).parent / "nets"))
import random_graphs

RESULTS = Path(__file__).parent / "results" / "fuzzing.json"
LOG = Path(tempfile.gettempdir()) / "enginesmith-fuzzing.jsonl"
BATCHES = (1, 3)
_CALIBRATION_ROWS = 8
_ENGINES_EVERY, _SPARSE_EVERY, _BUILDER_EVERY, _PACKAGE_EVERY = 10, 20, 50, 200
"""Every so many seeds, the engines run the graphs, 2:4 graphs go through other passes, TensorRT-RTX is built, and a
bundle is made, too."""
_COARSE = ("int8", "fp8", "int4")
_BROKEN = Thresholds(min_sqnr_db=0, max_error_of_range=0.5, min_agreement=0)
"""How coarse few bits are is found out by the search, and no pass promises it; noise above the signal is a fault."""
_CHOOSING = frozenset(
    {
        *("ArgMax", "ArgMin", "TopK", "Greater", "Less", "GreaterOrEqual", "Floor", "QuantizeLinear", "If", "Cast"),
        *("ThresholdedRelu", "Where"),
    }
)
"""Operators whose result jumps where a number moves a little."""


@dataclass(frozen=True)
class Trial:
    """A pass with its parameters, and what it promises of the answer."""

    step: Pass
    precision: str
    """Row of the thresholds; empty where the answer may change at will."""


_BITS = OnnxRuntime().weight_bits(Device())
"""7 where the products of integers of this processor saturate."""


def _precision(precision: str, threshold: str, **fields: Any) -> Trial:
    return Trial(Precision.model_validate({"precision": precision, **fields}), threshold)


TRIALS: Mapping[str, Trial] = {
    "simplify": Trial(Simplify(), "fp32"),
    "decompose-attention": Trial(DecomposeAttention(), "fp32"),
    "sparsify 2:4": Trial(Sparsify(), ""),
    "sparsify unstructured": Trial(Sparsify(pattern="unstructured", ratio=0.6), ""),
    "shift": Trial(ChannelShift(), "fp32"),
    "equalize": Trial(CrossLayerEqualization(), "fp32"),
    "smooth": Trial(Smooth(), "fp32"),
    "smooth, multiplications": Trial(Smooth(insert=True), "fp32"),
    "awq": Trial(Smooth(mode="awq", insert=True), "fp32"),
    "fp16": _precision("fp16", "fp16"),
    "bf16": _precision("bf16", "bf16"),
    "fp8": _precision("fp8", "fp8"),
    "int8, tensorrt_rtx": _precision("int8", "int8", placement="inputs"),
    "int8, onnxruntime": _precision("int8", "int8", placement="inputs+outputs"),
    "int8, onnxruntime, 7 bits": _precision(
        "int8", "int8", placement="inputs+outputs", weight_bits=7, bias_correction=True
    ),
    "int8, openvino": _precision("int8", "int8", placement="inputs+read outputs", bias_correction=True),
    "int8+fp16": _precision("int8+fp16", "int8"),
    "int8-dynamic": _precision("int8-dynamic", "int8", placement="inputs+outputs", weight_bits=_BITS),
    "int4-weights": _precision("int4-weights", "int4"),
    "int4-weights, float32": _precision("int4-weights", "int4", placement="inputs+outputs"),
}
CHEAP = ("simplify", "sparsify 2:4", "equalize", "smooth, multiplications", "fp16", "int8, onnxruntime", "int8-dynamic")
"""Those of the quick test."""
_SPARSE = "sparsify 2:4"
_KEEP_ZEROS = ("simplify", "smooth, multiplications", "fp16", "int8, tensorrt_rtx", "int8, onnxruntime", "int8+fp16")
_PACKAGE = "package"
_BUILT = {"simplify": "sm86", "int8, tensorrt_rtx": "sm86", "fp8": "sm89"}
"""Passes whose graphs are built by TensorRT-RTX, with the target."""


class RandomFeeder(Feeder):
    """Feed random numbers to a random graph."""

    data: str | None = None
    samples: int = _CALIBRATION_ROWS
    seed: int = 0

    def open(self, model: Artifact, reference: Artifact) -> tuple[Feeding, tuple[Path, ...]]:
        assert model.signature is not None
        proto = onnx.load(model.path)
        fixed = not model.signature.symbols
        calls = [random_graphs.make_feeds(proto, _CALIBRATION_ROWS, 100 + index) for index in range(4 if fixed else 1)]
        judged = BATCHES if not fixed else (1,)  # what is outside of the calibrated range is cut off, which is no fault
        calls += [random_graphs.make_feeds(proto, batch, self.seed) for batch in judged]
        rows = {name: np.concatenate([call[name] for call in calls]) for name in calls[0]}
        data = Dataset("random", rows)
        return Feeding(data, data.provenance(self.seed, len(calls[0][next(iter(rows))]) if fixed else 1)), ()


def describe(path: Path) -> Artifact:
    """Make an artifact of a graph's file."""
    signature = model_file.signature(path)
    return Artifact(kind="onnx", path=path, sha256=file_digest(path), bytes=path.stat().st_size, signature=signature)


class Answerer:
    """A graph in ONNX Runtime without optimization; half types are emulated."""

    def __init__(self, path: Path, *, emulated: bool = False, optimized: bool = False) -> None:
        library, self._failures = evaluator.import_library()
        options = evaluator.session_options(library, 1)
        options.log_severity_level = 4
        if optimized:
            options.graph_optimization_level = library.GraphOptimizationLevel.ORT_ENABLE_ALL
        if emulated:
            model = edit.load(path)
            if emulate(model):
                path = path.parent / "emulated" / edit.FILE
                path.parent.mkdir(exist_ok=True)
                edit.save(model, path.parent)
        self._session = library.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._names = [value.name for value in self._session.get_outputs()]
        self._inputs = {value.name: value.type for value in self._session.get_inputs()}

    def __call__(self, feeds: Feeds) -> dict[str, Array]:
        """Compute the outputs, by name; floats are cast to what the graph takes."""
        given = {name: value for name, value in feeds.items() if name in self._inputs}
        halves = {name for name, kind in self._inputs.items() if kind == "tensor(float16)"}
        given = {name: value.astype(np.float16) if name in halves else value for name, value in given.items()}
        return dict(zip(self._names, self._session.run(None, given), strict=True))


@dataclass
class Subject:
    """A random graph with its answers."""

    seed: int
    artifact: Artifact
    folder: Path
    answer: Answerer
    feeds: list[dict[str, Array]]
    wanted: list[dict[str, Array]]
    chooses: bool
    """It chooses by value, so that its answer may jump."""
    ranges: Artifact | None
    refusal: str

    @property
    def symbols(self) -> tuple[str, ...]:
        """Names of the dynamic dimensions."""
        return self.artifact.signature.symbols if self.artifact.signature is not None else ()

    def find_fault(self, path: Path, trial: Trial) -> str:
        """Say what is wrong with a graph that a pass made, or nothing."""
        given = Answerer(path, emulated=trial.precision not in ("", "fp32"))
        assert self.artifact.signature is not None
        sides = self.artifact.signature, model_file.signature(path)
        if sides[0] != sides[1]:
            return f"the signature became {sides[1]}"
        precision = trial.precision or "int4"
        judge = make_judge(self.artifact.signature, precision, find_spans(self.wanted))
        if precision in _COARSE:
            judge = replace(judge, thresholds=_BROKEN)
        for feeds, wanted in zip(self.feeds, self.wanted, strict=True):
            actual = given(feeds)
            if not trial.precision or (self.chooses and trial.precision != "fp32"):
                if text := _compare_forms(wanted, actual, finite=bool(trial.precision)):
                    return text
                continue
            step = {"fp32": "fp16" if self.chooses else "fp32", "fp16": "fp16"}.get(precision, "bf16")
            text = judge.find_fault(wanted, actual, lambda: measure_sensitivity(self.answer, feeds, step))  # noqa: B023
            if text:
                return text
        return ""


def _compare_forms(wanted: Feeds, actual: Feeds, *, finite: bool) -> str:
    for name, array in wanted.items():
        given = actual[name]
        if array.shape != given.shape or (array.dtype.kind == "f") != (given.dtype.kind == "f"):
            return f"output {name!r} is {given.dtype}{list(given.shape)}, expected {array.dtype}{list(array.shape)}"
        if finite and array.dtype.kind == "f" and not np.isfinite(given[np.isfinite(array)]).all():
            return f"output {name!r} has NaN or infinite numbers where there should be none"
    return ""


def prepare(seed: int, folder: Path) -> Subject:
    """Make the graph of a seed, compute its answers, and calibrate it; every second one is simplified before."""
    folder.mkdir(parents=True, exist_ok=True)
    model = random_graphs.make_graph(seed)
    path = folder / "given.onnx"
    onnx.save(model, path)
    validation.check(path)
    artifact = describe(path)
    answer = Answerer(path)
    batches = BATCHES if artifact.signature is not None and artifact.signature.symbols else (1,)
    feeds = [random_graphs.make_feeds(model, batch, seed) for batch in batches]
    wanted = [answer(each) for each in feeds]
    if seed % 2:
        out = folder / "simplified"
        out.mkdir(exist_ok=True)
        effect = run_pass(Simplify(), artifact, out, _ignore, {})
        artifact = describe(out / effect.file)
    chooses = any(node.op_type in _CHOOSING for node in traversal.nodes(model))
    ranges, refusal = _calibrate(artifact, seed, folder / "ranges")
    return Subject(seed, artifact, folder, answer, feeds, wanted, chooses, ranges, refusal)


def _calibrate(artifact: Artifact, seed: int, out: Path) -> tuple[Artifact | None, str]:
    out.mkdir(exist_ok=True)
    try:
        effect = Calibrate(feeder=RandomFeeder(seed=seed)).run({"model": artifact, "reference": artifact}, out, _ignore)
    except EnginesmithError as error:
        return None, f"calibrate: {error.message}"
    file = out / effect.file
    return Artifact(kind="record", path=file, sha256=file_digest(file), bytes=file.stat().st_size), ""


def _ignore(text: str) -> None:
    pass


def apply(subject: Subject, name: str, out: Path) -> Outcome:
    """Run one pass over a graph, and judge what it made; what is raised beside refusals is left to the caller."""
    trial = TRIALS[name]
    out.mkdir(parents=True, exist_ok=True)
    records = {} if subject.ranges is None else {"ranges": subject.ranges}
    try:
        effect = run_pass(trial.step, subject.artifact, out, _ignore, records)
    except EnginesmithError as error:
        return Outcome(subject.seed, name, "refused", error.message)
    if text := subject.find_fault(out / effect.file, trial):
        return Outcome(subject.seed, name, "wrong", text)
    note = _find_reason(effect)
    return Outcome(subject.seed, name, "unchanged" if note else "right", note)


def take_sparse(subject: Subject, path: Path) -> Subject:
    """Make a subject of the 2:4 graph of another one."""
    artifact, answer = describe(path), Answerer(path)
    ranges, refusal = _calibrate(artifact, subject.seed, path.parent / "ranges")
    wanted = [answer(each) for each in subject.feeds]
    return replace(subject, artifact=artifact, answer=answer, wanted=wanted, ranges=ranges, refusal=refusal)


def apply_to_sparse(sparse: Subject, name: str, out: Path) -> Outcome:
    """Run one pass over a 2:4 graph, and judge what it made and whether the zeros are still there."""
    outcome = replace(apply(sparse, name, out), trial=f"{_SPARSE}, then {name}")
    made = out / edit.FILE
    if outcome.kind == "right" and made.is_file() and (lost := follow(sparse.artifact.path, made).lost):
        return replace(outcome, kind="wrong", text=f"no longer 2:4: {', '.join(lost)}")
    return outcome


def package(subject: Subject, out: Path) -> Outcome:
    """Optimize the graph and package what came of it by the commands, and have the bundle answer on its own."""
    run, bundle, path = str(out / "run"), str(out / "bundle"), subject.folder / "given.onnx"
    model = onnx.load(path)
    given = ("optimize", str(path), "--engine", "onnxruntime", "--precision", "fp32")
    shapes = [f"--shape={name}=1:3:3" for name in subject.symbols]
    options = ("--no-cache", "--measure-time", "100ms", "--batch", "1", "--quiet", "--out", run, *shapes)
    precision = "int8" if any(node.op_type == "QuantizeLinear" for node in traversal.nodes(model)) else "fp32"
    variant = ("--variant", f"onnxruntime-{precision}")
    program = Path(sys.executable).with_name("enginesmith")
    for command in ((*given, *options), ("package", run, "-f", "bundle", "-o", bundle, *variant)):
        done = subprocess.run([program, *command], capture_output=True, text=True)
        if "Traceback" in done.stderr:
            return Outcome(subject.seed, _PACKAGE, "traceback", done.stderr[-300:])
        if done.returncode:
            return Outcome(subject.seed, _PACKAGE, "refused", " ".join(done.stderr.split())[:300])
    script = importlib.util.spec_from_file_location("infer", Path(bundle) / "infer.py")
    assert script is not None
    assert script.loader is not None
    assert subject.artifact.signature is not None
    infer = importlib.util.module_from_spec(script)
    script.loader.exec_module(infer)
    judge = make_judge(subject.artifact.signature, "fp32", find_spans(subject.wanted))
    bundled = infer.Model()
    for feeds, wanted in zip(subject.feeds, subject.wanted, strict=True):
        step = "fp16" if subject.chooses else "fp32"
        if text := judge.find_fault(wanted, bundled(feeds), lambda: measure_sensitivity(subject.answer, feeds, step)):  # noqa: B023
            return Outcome(subject.seed, _PACKAGE, "wrong", text)
    return Outcome(subject.seed, _PACKAGE, "right")


def _find_reason(effect: Effect) -> str:
    """Find the reason why a pass passed the graph on as it was."""
    return next((note for note in effect.notes if note.startswith("passed on unchanged")), "")


def fuzz(seed: int, names: list[str], folder: Path, begin: Callable[[str], None], *, stop: bool) -> Iterator[Outcome]:
    """Run passes over the graph of a seed; ``begin`` is told what comes next."""
    try:
        begin("prepare")
        subject = prepare(seed, folder)
    except Exception as error:
        if stop:
            raise
        kind = "wrong" if isinstance(error, EnginesmithError) else "traceback"
        yield Outcome(seed, "prepare", kind, shorten(error))
        return

    def attempt(name: str, work: Callable[[], Outcome]) -> Outcome:
        begin(name)
        try:
            return work()
        except Exception as error:
            if stop:
                raise
            return Outcome(seed, name, "traceback", shorten(error))

    for index, name in enumerate(names):
        out = folder / str(index)
        made = out / edit.FILE
        yield attempt(name, lambda: apply(subject, name, out))  # noqa: B023
        if not made.is_file():
            continue
        for engine, run in _ENGINES.items() if seed % _ENGINES_EVERY == 0 else ():
            begin(f"engine: {engine}")
            yield Outcome(seed, f"engine: {engine}", f"engine: {_try_engine(run, made, subject)}", name)
        if seed % _BUILDER_EVERY == 0 and name in _BUILT:
            yield attempt("engine: tensorrt_rtx", lambda: _build_rtx(subject, made, name, out / "engine"))  # noqa: B023
        if seed % _SPARSE_EVERY == 0 and name == _SPARSE:
            sparse = take_sparse(subject, made)
            for then in (one for one in _KEEP_ZEROS if one in names):
                trial = f"{_SPARSE}, then {then}"
                yield attempt(trial, lambda: apply_to_sparse(sparse, then, out / then))  # noqa: B023
    if seed % _PACKAGE_EVERY == 0 and _SPARSE in names:
        yield attempt(_PACKAGE, lambda: package(subject, folder))


def _try_engine(run: Callable[[Path, Feeds], None], path: Path, subject: Subject) -> str:
    try:
        run(path, subject.feeds[-1])
    except Exception as error:  # noqa: BLE001 - engines raise what they like
        return f"{type(error).__name__}"
    return "ran"


def _build_rtx(subject: Subject, path: Path, name: str, out: Path) -> Outcome:
    """Build an engine of TensorRT-RTX; what is raised beside refusals is left to the caller."""
    out.mkdir(exist_ok=True)
    ranges = {symbol: ShapeRange(min=1, opt=3, max=3) for symbol in subject.symbols}
    engine = TensorRTRTX(target=_BUILT[name])
    try:
        effect = engine.build(BuildRequest(describe(path), out, Device(), ranges))
    except EnginesmithError as error:
        return Outcome(subject.seed, "engine: tensorrt_rtx", f"engine: {type(error).__name__}", f"{name}: {error}")
    kind = "engine: rejected" if effect.rejected else "engine: ran"
    return Outcome(subject.seed, "engine: tensorrt_rtx", kind, f"{name}: {effect.rejected}")


def _run_onnxruntime(path: Path, feeds: Feeds) -> None:
    Answerer(path, optimized=True)(feeds)


def _run_openvino(path: Path, feeds: Feeds) -> None:
    import openvino

    core = openvino.Core()
    compiled = core.compile_model(core.read_model(path), "CPU", {"INFERENCE_NUM_THREADS": 1})
    read = {name for port in compiled.inputs for name in port.names}
    compiled({name: value for name, value in feeds.items() if name in read})


_ENGINES: Mapping[str, Callable[[Path, Feeds], None]] = {"onnxruntime": _run_onnxruntime, "openvino": _run_openvino}


def _report(log: Path) -> None:
    write_report(RESULTS, collect(log), _write_lines)


def _write_lines(document: dict[str, Any]) -> Iterator[str]:
    yield f"# {document['seeds']} random graphs through every pass"
    yield ""
    yield f"Seeds {document['first']} to {document['last']}; `python benchmarks/fuzzing.py` made this."
    yield ""
    yield from write_table(document, ("right", "unchanged", "refused", *FINDINGS))
    yield "What engines made of the graphs is no finding:"
    yield ""
    for name, one in document["passes"].items():
        if name.startswith("engine"):
            told = ", ".join(f"{kind.removeprefix('engine: ')} {count}" for kind, count in one.items())
            yield f"- {name.removeprefix('engine: ')}: {told}"
    yield ""


if __name__ == "__main__":
    run_command(__doc__, Path(__file__), LOG, list(TRIALS), fuzz, _report)
