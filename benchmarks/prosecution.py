"""Count the faults that are found, and the correct engines that are called wrong.

    python benchmarks/prosecution.py [--faults 75] [--seconds 30]

Sound engines are variants of small networks of the usual kinds (``nets/suspects.py``), as `optimize` makes them;
faulty ones are their exported graphs with a fault put in (``nets/injected_faults.py``) that changes some allowed
answer: that is seen by brute force, on random inputs of many sizes. Two thirds of them, if there are as many, are not
seen on inputs like the samples: they hold for other batches, values or masks alone. Each is given to `enginesmith
prosecute` with nothing but the model. Counted are the faults found, the sound engines accused, the seconds, the nodes
of the reproducers, and whether `repro.py` shows the fault alone. Writes results/prosecution.json and .md.
"""

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np
import onnx
from numpy.typing import NDArray

sys.path.insert(1, str(Path(__file__).parent / "arena"))
sys.path.insert(1, str(Path(__file__).parent / "nets"))

from cell import describe_command, describe_machine
from injected_faults import Fault, list_faults
from suspects import SUSPECTS

from enginesmith import load_run
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.measure.prosecution.reduction import compute

RESULTS = Path(__file__).parent / "results" / "prosecution.json"
_NETS = Path(__file__).parent / "nets"
_SOUND = (
    *("--engine", "onnxruntime", "--engine", "openvino", "--precision", "fp32", "--precision", "int8"),
    *("--precision", "bf16", "--precision", "int8-dynamic", "--synthetic-calibration"),
    *("--graph-optimization", "all", "--graph-optimization", "basic"),
)
_Item = TypeVar("_Item")
_VISIBLE = 1e-3
"""Of an output's range, by which a fault has to change some answer to count as one."""
_SEEN = 2e-5
"""Of an output's range, by which a fault that samples show changes an answer to inputs like them."""


def run(*words: object) -> subprocess.CompletedProcess[str]:
    """Run the command line, with the small networks in reach."""
    command = [sys.executable, "-m", "enginesmith.cli", *map(str, words)]
    variables = {"PYTHONPATH": f"{_NETS}:{_NETS.parents[1] / 'build'}", "PATH": str(Path(sys.executable).parent)}
    return subprocess.run(command, env=variables, capture_output=True, text=True)


def export(name: str, work: Path) -> Path:
    """Export a network, once."""
    file = work / f"{name}.onnx"
    if not file.is_file() and (made := run("export", f"suspects:{name}", "-o", file, "--quiet")).returncode:
        raise RuntimeError(made.stderr)
    return file


class Draw(NamedTuple):
    """Describe inputs: the batch, how large they are, and the shape of the mask."""

    batch: int
    scale: float = 1.0
    alike: bool = False
    """All rows are the same."""
    places: int | None = None
    """Places of the mask that are there in the first row; at random if it is None."""


_LIKE_SAMPLES = [Draw(batch) for batch in (1, 8) * 4]
_OTHERS = [
    *(Draw(batch, scale) for batch in range(1, 9) for scale in (1.0, 0.0, 10.0)),
    *(Draw(3, alike=True), Draw(8, alike=True), Draw(4, places=1), Draw(4, places=0)),
]


def draw_inputs(model: onnx.ModelProto, draw: Draw, seed: int) -> dict[str, NDArray[Any]]:
    """Draw allowed inputs: normal numbers, ids below 200, masks with tails."""
    rng, feeds = np.random.default_rng(seed), {}
    for value in model.graph.input:
        dims = value.type.tensor_type.shape.dim
        shape = [dim.dim_value or (draw.batch if at == 0 else 12) for at, dim in enumerate(dims)]
        if value.name == "mask":
            lengths = rng.integers(2, shape[1] + 1, draw.batch)
            lengths[0] = lengths[0] if draw.places is None else draw.places
            feeds[value.name] = (np.arange(shape[1])[None] < lengths[:, None]).astype(np.int64)
        elif value.type.tensor_type.elem_type == onnx.TensorProto.INT64:
            feeds[value.name] = rng.integers(0, 200, shape) if draw.scale else np.full(shape, 7)
        else:
            feeds[value.name] = (draw.scale * rng.standard_normal(shape)).astype(np.float32)
        if draw.alike:
            feeds[value.name][:] = feeds[value.name][:1]
    return feeds


def is_visible(sound: onnx.ModelProto, faulty: onnx.ModelProto, draws: Sequence[Draw], share: float) -> bool:
    """Tell by brute force whether a fault changes an answer to such inputs by a share of its range, or ends it."""
    for seed, draw in enumerate(draws):
        feeds = draw_inputs(sound, draw, seed)
        wanted = compute(sound, feeds)
        try:
            given = compute(faulty, feeds)
        except ModelError:
            return True
        for name, value in wanted.items():
            span = float(np.ptp(value)) or 1.0
            if value.shape != given[name].shape or not np.abs(value - given[name]).max() <= share * span:
                return True
    return False


def choose_faults(count: int, work: Path) -> list[tuple[str, Fault, bool]]:
    """Choose faults of all networks and kinds in turn, with whether inputs like the samples show them.

    Two thirds of them are not shown by such inputs, if there are as many.
    """
    plain: dict[str, list[tuple[str, Fault, bool]]] = {}
    hidden: dict[str, list[tuple[str, Fault, bool]]] = {}
    for name in SUSPECTS:
        model = onnx.load(export(name, work))
        for fault in list_faults(model):
            try:
                onnx.checker.check_model(fault.model, full_check=True)
            except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
                continue
            try:
                compute(fault.model, draw_inputs(model, _LIKE_SAMPLES[0], 0))
            except ModelError:
                continue  # a graph that computes nothing is no engine
            if is_visible(model, fault.model, _LIKE_SAMPLES, _SEEN):
                plain.setdefault(fault.kind, []).append((name, fault, True))
            elif is_visible(model, fault.model, _OTHERS, _VISIBLE):
                hidden.setdefault(fault.kind, []).append((name, fault, False))
    first = _take_in_turn(hidden, (2 * count + 2) // 3)
    return [*first, *_take_in_turn(plain, count - len(first))]


def _take_in_turn(listed: Mapping[str, list[_Item]], count: int) -> list[_Item]:
    """Take the first of each kind, then the second, and so on."""
    rounds = itertools.zip_longest(*listed.values())
    return [each for row in rounds for each in row if each is not None][:count]


def prosecute(subject: Sequence[object], seconds: float, out: Path) -> dict[str, Any]:
    """Prosecute one engine; what was found, and whether its script shows it."""
    start = time.monotonic()
    words = ("prosecute", *subject, "--time", f"{seconds:g}s", "-o", out, "--json", "--quiet", "--no-cache")
    done = run(*words)
    took = time.monotonic() - start
    if done.returncode not in (0, 1) or not done.stdout.startswith("{"):
        return {"error": done.stderr[-600:], "seconds": took}
    document = json.loads(done.stdout)
    if "error" in document:
        return {"error": document["error"], "seconds": took}
    made = document["prosecution"]
    finding = made["finding"] or {}
    shows = None
    if finding and (out / "repro.py").is_file():
        shows = subprocess.run([sys.executable, "-I", out / "repro.py"], capture_output=True).returncode == 1
    return {
        "found": bool(finding),
        "attempts": made["attempts"],
        "seconds": took,
        "walk": finding.get("walk"),
        "reason": finding.get("reason"),
        "guilty": finding.get("guilty"),
        "nodes": len(finding["nodes"]) if finding.get("nodes") else None,
        "named": finding.get("nodes", [])[:3],
        "unreduced": finding.get("unreduced"),
        "repro_shows_it": shows,
    }


def prosecute_faulty(count: int, seconds: float, work: Path) -> Iterator[dict[str, Any]]:
    """Prosecute graphs with faults in them."""
    for number, (name, fault, visible) in enumerate(choose_faults(count, work)):
        file = work / f"fault-{number}.onnx"
        onnx.save(fault.model, file)
        subject = (f"suspects:{name}", file)
        made = prosecute(subject, seconds, work / f"finding-{number}")
        yield {"network": name, "fault": fault.kind, "place": fault.place, "like_samples": visible, **made}


def prosecute_sound(seconds: float, work: Path) -> Iterator[dict[str, Any]]:
    """Prosecute sound variants."""
    for name in SUSPECTS:
        folder = work / f"run-{name}"
        if not (folder / "run.json").is_file():
            words = (f"suspects:{name}", *_SOUND, "--measure-time", "200ms", "--prosecute", "0s")
            run("optimize", *words, "--out", folder, "--quiet")
        for variant in load_run(folder).variants:
            if variant.status == "measured":
                made = prosecute((folder, variant.id), seconds, work / f"accused-{name}-{variant.id}")
                yield {"network": name, "variant": variant.id, **made}


def write(found: Mapping[str, Any], path: Path) -> None:
    """Write the results as JSON, and the same as Markdown."""
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text("\n".join(_lines(found)) + "\n")


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    faulty, sound = found["faulty"], found["sound"]
    caught = [each for each in faulty if each.get("found")]
    accused = [each for each in sound if each.get("found") or "error" in each]
    yield "# The prosecutor\n"
    hidden = [each for each in faulty if not each.get("like_samples", True)]
    yield f"{len(caught)} of {len(faulty)} faults were found;"
    yield f"{len(accused)} of {len(sound)} sound engines were accused."
    if hidden:
        yield f"Of the {len(hidden)} faults that inputs like the samples do not show,"
        yield f"{sum(bool(each.get('found')) for each in hidden)} were found."
    if caught:
        nodes = [each["nodes"] for each in caught if each["nodes"]]
        shown = sum(bool(each["repro_shows_it"]) for each in caught)
        yield f"A fault was found after {median(each['seconds'] for each in caught):.0f} s in the median, and"
        yield f"{max(each['seconds'] for each in caught):.0f} s at most, starting and reducing included; the graph was"
        yield f"reduced in {len(nodes)} cases, to {median(nodes):g} nodes in the median and {max(nodes)} at most;"
        yield f"`repro.py` shows the fault alone in {shown} cases.\n"
    yield "| fault | found | of | by |"
    yield "| --- | --- | --- | --- |"
    for kind in dict.fromkeys(each["fault"] for each in faulty):
        cases = [each for each in faulty if each["fault"] == kind]
        walks = dict.fromkeys(each["walk"] for each in cases if each.get("found"))
        yield f"| {kind} | {sum(bool(each.get('found')) for each in cases)} | {len(cases)} | {', '.join(walks)} |"
    if accused:
        yield "\nAccused, and sound:\n"
        for each in accused:
            yield f"- {each['network']} {each['variant']}: {each.get('reason') or each.get('error')}"
    if missed := [each for each in faulty if not each.get("found")]:
        yield "\nNot found:\n"
        for each in missed:
            yield f"- {each['network']}: {each['fault']} at {each['place']} {each.get('error', '')}".rstrip()
    yield f"\nMachine: {found['machine']}. Command: `{found['command']}`"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prosecute faulty and sound engines, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=75)
    parser.add_argument("--seconds", type=float, default=30.0, help="time for trying inputs on each engine")
    parser.add_argument("--only", choices=("faulty", "sound"), help="one half; the other stays as it is")
    parser.add_argument("--work", type=Path, default=Path("build/prosecution"), help="folder of models and findings")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    work = options.work.resolve()
    found = json.loads(options.out.read_text()) if options.out.is_file() else {"faulty": [], "sound": []}
    found |= {"machine": describe_machine(), "command": describe_command("prosecution.py", arguments)}
    halves = {"faulty": lambda: prosecute_faulty(options.faults, options.seconds, work)}
    halves["sound"] = lambda: prosecute_sound(options.seconds, work)
    for half in (options.only,) if options.only else tuple(halves):
        found[half] = []
        for each in halves[half]():
            found[half].append(each)
            print({k: v for k, v in each.items() if v is not None}, flush=True)
            write(found, options.out)


if __name__ == "__main__":
    main()
