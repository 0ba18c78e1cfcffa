"""Measure the loss of int8 or 2:4, and the part that some minutes of training bring back.

    pip install scikit-learn pillow tokenizers transformers
    python benchmarks/training.py [--cases text_reader …] [--minutes 5]

Each case is a network of the museum or of the arena, and one command: `optimize` with the variant that is made without
training, with everything in int8 (or 2:4), and trained by distillation for at most so many minutes on all cores. The
metric before and after is that on the samples held out while training; the drop is judged on other samples, in the
engine. Half of what was lost comes back: that is the target. Writes results/training.json and .md.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parent / "arena"))
sys.path.insert(1, str(Path(__file__).parent / "arena" / "recipes"))
sys.path.insert(1, str(Path(__file__).parent))

from cell import describe_command, describe_machine
from models import MODELS, import_paths
from museum import CASES
from recipes.job import KNOWN

from enginesmith import load_run
from enginesmith.pipeline.results.run import VariantRecord

RESULTS = Path(__file__).parent / "results" / "training.json"
_TRAINED = {
    **dict.fromkeys(
        (*CASES, "text_detector", "text_reader"), ("--precision", "int8", "--quantizer", "qat", "--engine", "openvino")
    ),
    **{f"{name} 2:4": ("--sparsity", "2:4", "--engine", "onnxruntime") for name in ("digits", "resnet56")},
}
"""Case → options of what is trained."""
_ENOUGH = 0.5
_OVER_BUDGET = 3
_NOTHING = 1e-3
"""Share of the float model's metric below which a loss is none that anyone sees."""


def run_case(name: str, minutes: float, work: Path) -> dict[str, Any]:
    """Train one case by the command line, and read what came of it."""
    model_name, folder = name.removesuffix(" 2:4"), work / "training" / name.replace(":", "").replace(" ", "-")
    model = CASES[model_name].model if model_name in CASES else MODELS[model_name]
    data = str(model.prepare(work / "models") / f"{KNOWN}.npz") if model_name != "digits" else "digits"
    paths = ":".join(map(str, import_paths(work / "models")))
    words = [
        *("optimize", model.source(work / "models"), "--data", data, *_TRAINED[name]),
        *("--recover", "distil", "--recover-time", f"{minutes:g}m", "--max-drop", str(model.max_drop)),
        *("--metric", model.metric_argument(work / "models"), "--measure-time", "5s"),
        *("--out", str(folder / "run"), "--store", str(folder / "store"), "--replace", "--quiet"),
    ]
    variables = {"PYTHONPATH": paths, "PATH": str(Path(sys.executable).parent)}
    ended = subprocess.run([sys.executable, "-m", "enginesmith.cli", *words], env=variables).returncode
    if ended not in (0, _OVER_BUDGET):
        raise RuntimeError(f"{name} ended with {ended}")
    run = load_run(folder / "run")
    record = next(variant for variant in run.variants if variant.recovery)
    return {"case": name, "max_drop": model.max_drop, "machine": describe_machine(), **describe(record)}


def describe(record: VariantRecord) -> dict[str, Any]:
    """Say what a training brought back; shares are of what was lost on the samples held out."""
    (training,) = record.recovery
    lost = training.teacher - training.before
    return {
        "metric": training.metric.rpartition(":")[2],
        "float": training.teacher,
        "before": training.before,
        "after": training.after,
        "back": (training.after - training.before) / lost if lost > _NOTHING * abs(training.teacher) else None,
        "steps": training.steps,
        "batch": training.plan.batch,
        "learning_rate": training.plan.learning_rate,
        "held_out": training.held_back,
        "drop": record.quality.drop if record.quality else None,
        "reason": record.reason,
    }


def write(found: Mapping[str, Any], path: Path) -> None:
    """Write the results as JSON, and the same as Markdown."""
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text("\n".join(_lines(found["cases"])) + "\n")


def _lines(cases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    known = [case for case in cases if case["back"] is not None]
    yield "# Training in int8, and with zeros\n"
    enough = sum(case["back"] >= _ENOUGH for case in known)
    yield f"At least half of what was lost came back in {enough} of {len(known)}"
    yield "cases that lost something; before and after are the metric on samples held out while training.\n"
    yield "| case | metric | float | before | after | came back | steps × batch, rate | drop in the engine, judged |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for case in cases:
        back = "nothing was lost" if case["back"] is None else f"{case['back']:.0%}"
        drop = "–" if case["drop"] is None else f"{case['drop']:+.4f} (allowed {case['max_drop']:g})"
        yield (
            f"| {case['case']} | {case['metric']} | {case['float']:.4f} | {case['before']:.4f} | "
            f"{case['after']:.4f} | {back} | {case['steps']} × {case['batch']}, {case['learning_rate']:g} | {drop} |"
        )
    yield f"\nMachine: {cases[-1]['machine']}. Commands:\n"
    for command in dict.fromkeys(case["command"] for case in cases):
        yield f"- {', '.join(case['case'] for case in cases if case['command'] == command)}: `{command}`"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cases that are asked for, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=_TRAINED, default=["text_reader", "detector", "digits 2:4"])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--work", type=Path, default=Path("build/arena"), help="folder of models and files")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    found = json.loads(options.out.read_text()) if options.out.is_file() else {"cases": []}
    cases = {case["case"]: case for case in found["cases"]}
    command = describe_command("training.py", arguments)
    for name in options.cases:
        print(name, flush=True)
        made = run_case(name, options.minutes, options.work.resolve())
        cases[name] = made | {"command": command}
        print(f"  {made['before']:.4f} → {made['after']:.4f} of {made['float']:.4f}", flush=True)
        write({"cases": [cases[each] for each in _TRAINED if each in cases]}, options.out)


if __name__ == "__main__":
    main()
