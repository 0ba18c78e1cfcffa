"""Hold `build` to its promise on files of every kind: an engine, or one clear message with a class and a remedy.

    python benchmarks/tensorrt_trials.py --graphs build/graphs [--mutations 200] [--elsewhere 150] [--zoo fp16]

Three parts, all through the command line's own code, in this process:

- the zoo's six models (benchmarks/graphs.py);
- models broken on purpose (benchmarks/mutations.py), each with a seed of its own;
- models from elsewhere: the onnx package's own test cases, seeded. Here `build --check` has to answer what a real
  `build` does: it builds, or the same class of failure.

Writes results/tensorrt_trials.json. The exit code is 1 where a promise was broken.
"""

import argparse
import collections
import importlib.metadata
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mutations
import numpy as np
import onnx
from command import Answer, call
from onnx import parser

import graphs

RESULTS = Path(__file__).parent / "results" / "tensorrt_trials.json"
_LIMIT = "60s"
_TARGET = "sm86"
_HEAD = '<ir_version: 10, opset_import: ["" : 21]>'
_SMALL = {
    "conv": """(float[batch,3,8,8] x) => (float[batch,4,8,8] y)
        <float[4,3,3,3] w> {a = Conv<pads=[1,1,1,1]>(x, w) y = Relu(a)}""",
    "products": """(float16[batch,8] x) => (float16[batch,4] y)
        <float16[8,16] v, float16[16,4] w> {a = MatMul(x, v) b = Tanh(a) y = MatMul(b, w)}""",
    "top": """(float[batch,16] x) => (float[batch,3] y, int64[batch,3] i)
        <int64[1] k = {3}> {y, i = TopK<axis=-1>(x, k)}""",
    "reshape": """(float[batch,4,6] x) => (float[batch,24] y)
        <int64[2] s = {0,-1}> {a = Reshape(x, s) y = Softmax<axis=1>(a)}""",
    "branch": """(float[batch,4] x, bool c) => (float[batch,4] y)
        {y = If(c) <then_branch = t () => (float[batch,4] p) {p = Relu(x)},
                    else_branch = e () => (float[batch,4] q) {q = Neg(x)}>}""",
    "loop": """(float[2,4] x) => (float[2,4] y)
        <int64 n = {3}, bool go = {1}> {y = Loop(n, go, x) <body = b (int64 i, bool c, float[2,4] s)
            => (bool d, float[2,4] r) {d = Identity(c) r = Add(s, s)}>}""",
    "resize": """(float[batch,2,4,4] x) => (float[batch,2,8,8] y)
        <float[4] s = {1,1,2,2}> {y = Resize<mode="nearest">(x, , s)}""",
    "quantized": """(float[batch,8] x) => (float[batch,8] y)
        <float s = {0.1}, int8 z = {0}, int8[8,8] w> {
            a = QuantizeLinear(x, s, z) b = DequantizeLinear(a, s, z)
            c = DequantizeLinear(w, s, z) y = MatMul(b, c)}""",
    "slices": """(float[batch,6,8] x) => (float[batch,2,8] y, float[batch,3,8] u)
        <int64[1] f = {1}, int64[1] t = {3}, int64[1] a = {1}, int64[2] p = {3,3}> {
            y = Slice(x, f, t, a) u, v = Split<axis=1>(x, p)}""",
    "gathered": """(int64[batch,5] i) => (float16[batch,5,8] y)
        <float16[16,8] e, float16[8] g> {a = Gather(e, i) y = Mul(a, g)}""",
    "recurrent": """(float[5,batch,3] x) => (float[5,1,batch,4] y)
        <float[1,16,3] w, float[1,16,4] r> {y = LSTM<hidden_size=4>(x, w, r)}""",
}
"""Small sound graphs; weights without values are filled with random ones."""


def small(name: str) -> onnx.ModelProto:
    """One of the small graphs."""
    model = parser.parse_model(f"{_HEAD} {name} {_SMALL[name]}")
    random = np.random.default_rng(0)
    for value in model.graph.value_info:
        kind = value.type.tensor_type
        values = random.standard_normal([dim.dim_value for dim in kind.shape.dim]) * 3
        typed = values.astype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type))
        model.graph.initializer.append(onnx.numpy_helper.from_array(typed, value.name))
    del model.graph.value_info[:]
    for index, node in enumerate(model.graph.node):
        node.name = f"{node.op_type}_{index}"
    return model


def build(path: Path, folder: Path, *options: str) -> Answer:
    """Build an engine in a temporary folder."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        output = str(Path(out, "m.engine"))
        return call("build", str(path), "-o", output, *_options(folder), *options)


def _options(folder: Path) -> tuple[str, ...]:
    return ("--target", _TARGET, "--time", _LIMIT, "--store", str(folder / "store"))


def row(answer: Answer, folder: Path, **more: object) -> dict[str, Any]:
    """Make the row of an answer; temporary paths are left out."""
    kept: dict[str, Any] = {**more, "built": answer.exit_code == 0, "seconds": round(answer.seconds, 2)}
    if answer.exit_code:
        kept |= {"failure": answer.failure, "exit_code": answer.exit_code}
        kept |= {"message": _short(answer.message, folder), "remedy": _short(answer.remedy, folder)}
    return kept | {"broken_promises": list(answer.broken_promises)}


def _short(text: str, folder: Path) -> str:
    """A message without the temporary folders' names."""
    return re.sub(rf"{re.escape(str(folder))}/(?:tmp\w+/)?", "", text).partition("; its log: ")[0][:500]


def zoo(graphs_folder: Path, precision: str, folder: Path) -> list[dict[str, Any]]:
    """The zoo's models as they are."""
    rows = []
    for model in graphs.MODELS:
        answer = build(graphs.make(model, precision, graphs_folder), folder, *graphs.SHAPES.get(model, ()))
        rows.append(row(answer, folder, model=model))
        print(f"zoo {model:14}{_said(rows[-1])}", flush=True)
    return rows


def _said(found: dict[str, Any]) -> str:
    broken = f"  BROKEN: {', '.join(found['broken_promises'])}" if found["broken_promises"] else ""
    what = "built" if found["built"] else f"{found['failure']}: {found['message'][:110]}"
    return f"{found['seconds']:6.2f} s  {what}{broken}"


def mutants(count: int, graphs_folder: Path, folder: Path) -> Iterator[tuple[Path, str]]:
    """Broken models, one at a time, with what was done to each."""
    large = [graphs.make(model, "fp16", graphs_folder) for model in ("lstm", "mobilenet_v2", "unet")]
    kinds = [*mutations.GRAPH, *mutations.BYTES, "external"]
    for seed in range(count):
        random = np.random.default_rng(seed)
        kind = kinds[seed % len(kinds)]
        names = sorted(_SMALL)
        choice = int(random.integers(len(names) + len(large)))
        model = small(names[choice]) if choice < len(names) else onnx.load(large[choice - len(names)])
        base = model.graph.name if choice < len(names) else large[choice - len(names)].parent.name
        with tempfile.TemporaryDirectory(dir=folder) as place:
            path = Path(place, "model.onnx")
            done = _break(model, kind, path, random)
            yield path, f"{seed}: {base}, {kind}: {done}"


def _break(model: onnx.ModelProto, kind: str, path: Path, random: np.random.Generator) -> str:
    if kind == "external":
        return mutations.external(model, path, random)
    if kind in mutations.BYTES:
        data = mutations.BYTES[kind](model.SerializeToString(), random)
        path.write_bytes(data)
        return f"{len(data)} bytes"
    done = mutations.GRAPH[kind](model, random)
    path.write_bytes(model.SerializeToString())
    return done


def broken_on_purpose(count: int, graphs_folder: Path, folder: Path) -> list[dict[str, Any]]:
    """Build every mutant."""
    rows = []
    for path, what in mutants(count, graphs_folder, folder):
        rows.append(row(build(path, folder), folder, what=what))
        print(f"{what[:100]:100}{_said(rows[-1])}", flush=True)
    return rows


def cases(count: int) -> Iterator[tuple[str, onnx.ModelProto]]:
    """A seeded sample of the onnx package's test cases: half of single nodes, half of whole graphs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from onnx.backend.test.case.node import collect_testcases

        nodes = sorted(((case.name, case.model) for case in collect_testcases(None)), key=lambda one: one[0])
    data = Path(onnx.__file__).parent / "backend" / "test" / "data"
    files = sorted((*data.rglob("model.onnx"), *data.glob("light/*.onnx")))
    random = np.random.default_rng(0)
    for index in random.choice(len(nodes), min(count // 2, len(nodes)), replace=False):
        yield f"node/{nodes[index][0]}", nodes[index][1]
    for index in random.choice(len(files), min(count - count // 2, len(files)), replace=False):
        path = files[index]
        name = path.relative_to(data)
        yield str(name.parent if name.name == "model.onnx" else name), onnx.load(path)


def elsewhere(count: int, folder: Path) -> list[dict[str, Any]]:
    """Check and build models that were made by others."""
    rows = []
    for name, model in cases(count):
        path = folder / "case.onnx"
        path.write_bytes(model.SerializeToString())
        checked = call("build", str(path), "--check", *_options(folder))
        built = build(path, folder)
        said, really = _verdict(checked), _verdict(built)
        found = row(built, folder, case=name, check=said, agrees=said == really)
        found["broken_promises"] += _check_promises(checked)
        if said != really:
            found["broken_promises"].append(f"--check says {said or 'builds'}, build says {really or 'builds'}")
        rows.append(found)
        print(f"{name[:70]:70}{_said(found)}", flush=True)
    return rows


def _verdict(answer: Answer) -> str:
    """The class of the failure, empty where it builds."""
    if isinstance(answer.document, list):
        return str(answer.document[0]["failure"])
    return answer.failure


def _check_promises(answer: Answer) -> list[str]:
    if not isinstance(answer.document, list):
        return [f"--check: {text}" for text in answer.broken_promises]
    lacking = [one for one in answer.document if not one["builds"] and not (one["reason"] and one["remedy"])]
    return ["--check: a refusal without reason or remedy"] if lacking else []


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts of a part."""
    classes = collections.Counter(one.get("failure") or "built" for one in rows)
    broken = collections.Counter(text for one in rows for text in one["broken_promises"])
    return {"count": len(rows), "classes": dict(classes.most_common()), "broken_promises": dict(broken.most_common())}


def main() -> None:
    """Try, print, write."""
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--graphs", type=Path, default=Path("build/graphs"), help="folder of benchmarks/graphs.py")
    parse.add_argument("--zoo", default="fp16", choices=graphs.PRECISIONS, help="precision of the zoo's models")
    parse.add_argument("--mutations", type=int, default=200)
    parse.add_argument("--elsewhere", type=int, default=150)
    options = parse.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        parts = {
            "zoo": zoo(options.graphs, options.zoo, folder),
            "mutations": broken_on_purpose(options.mutations, options.graphs, folder),
            "elsewhere": elsewhere(options.elsewhere, folder),
        }
    counts = {name: summary(rows) for name, rows in parts.items()}
    for name, one in counts.items():
        print(f"{name}: {one['count']}, {one['classes']}, broken promises: {one['broken_promises'] or 'none'}")
    versions = {name: importlib.metadata.version(name) for name in ("tensorrt-rtx", "onnx")}
    lines = {name: [json.dumps(one, ensure_ascii=False) for one in rows] for name, rows in parts.items()}
    head = json.dumps({"target": _TARGET, "versions": versions, "summary": counts}, indent=1)
    tail = ",\n".join(f' "{name}": [\n  ' + ",\n  ".join(rows) + "\n ]" for name, rows in lines.items())
    RESULTS.write_text(f"{head[:-2]},\n{tail}\n}}\n")
    sys.exit(any(one["broken_promises"] for one in counts.values()))


if __name__ == "__main__":
    main()
