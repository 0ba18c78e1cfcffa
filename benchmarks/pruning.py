"""Pruning that the product does, against its targets and beside torch-pruning used by hand.

    python benchmarks/pruning.py [--only A B C] [--seconds 20] [--work build/pruning]

``A``: ``optimize digits`` with half of the MACs, trained back within two minutes: top-1 of the embedded test data, and
speed. ``B``: resnet50 (random weights, so about speed alone) with half of the MACs, in float32 and in int8, each beside
its dense sibling; settings are gone through until both targets are met. ``C``: pruning_by_hand.py. All graphs of one
row are timed in turns, one thread, batch 1. Writes results/pruning.json and results/pruning.md.
"""

import argparse
import dataclasses
import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import judging
import pruning_by_hand
import pruning_report
import torch
from command import Answer, call
from racing import race

RESULTS = Path(__file__).parent / "results"
SUFFIX = "prune-macs50"
DIGITS_DROP, FLOAT_SPEEDUP, INT8_SPEEDUP = 0.005, 1.6, 1.3
"""Targets: top-1 that may be lost, and × the dense sibling."""
SETTINGS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "multiples of 32": ("--multiple-of", "32"),
    "uniform": ("--prune-scope", "uniform"),
    "uniform, multiples of 32": ("--prune-scope", "uniform", "--multiple-of", "32"),
}


def digits(work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Part A."""
    answer = _optimized(
        *("digits", "--recover", "distil", "--recover-time", f"{options.recover}s"),
        *("--max-drop", str(DIGITS_DROP), "--measure-time", f"{options.seconds:g}s"),
        folder=work / "digits",
    )
    row: dict[str, Any] = {"seconds": round(answer.seconds, 1), "refusal": _refusal(answer)}
    if answer.exit_code not in (0, 3) or not answer.document:
        return row
    row |= _variants(answer.document, ("fp32",))
    recovered = _by_id(answer.document)[f"onnxruntime-fp32-{SUFFIX}"].get("recovery") or [None]
    row["recovery"] = recovered[0] and {
        key: recovered[0][key] for key in ("metric", "teacher", "before", "after", "steps", "reason", "held_back")
    }
    row["recover_seconds"] = _step_seconds(answer.document, f"recover-{SUFFIX}")
    graphs = _engines(answer, work / "digits" / "run", ("fp32",))
    row["timed"] = _timed(graphs, pruning_by_hand.feeds("digits", 1), options.seconds)
    return row


def resnet50(work: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Part B: one row for each setting, until the targets are met."""
    rows = []
    for name, words in SETTINGS.items():
        folder = work / "resnet50" / name.replace(" ", "-").replace(",", "")
        answer = _optimized(
            *("resnet50", "--precision", "fp32", "--precision", "int8", "--synthetic-calibration"),
            *("--samples", "8", "--search-steps", "1", "--no-memory"),
            *("--measure-time", f"{options.seconds:g}s", *words),
            folder=folder,
            store=work / "resnet50" / "store",
        )
        row: dict[str, Any] = {"setting": name, "seconds": round(answer.seconds, 1), "refusal": _refusal(answer)}
        rows.append(row)
        if answer.exit_code not in (0, 3) or not answer.document:
            continue
        row |= _variants(answer.document, ("fp32", "int8"))
        graphs = _engines(answer, folder / "run", ("fp32", "int8"))
        row["timed"] = _timed(graphs, pruning_by_hand.feeds("resnet50", 1), options.seconds)
        row["met"] = _met(row["timed"])
        print(pruning_report.of_resnet50(row), flush=True)
        if row["met"] and not options.all_settings:
            break
    return rows


def _optimized(*words: str, folder: Path, store: Path | None = None) -> Answer:
    return call(
        *("optimize", *words, "--prune", "macs=-50%", "--batch", "1", "--threads", "1"),
        *("--out", str(folder / "run"), "--store", str(store or folder / "store")),
    )


def _refusal(answer: Answer) -> str:
    return f"exit code {answer.exit_code}: {answer.message}" if answer.exit_code else ""


def _by_id(document: Mapping[str, Any]) -> dict[str, Any]:
    return {each["id"]: each for each in document["variants"]}


def _variants(document: Mapping[str, Any], precisions: Sequence[str]) -> dict[str, Any]:
    """Read the product's own figures of each variant."""
    known = _by_id(document)
    found: dict[str, Any] = {"winner": document["winner"], "variants": {}}
    for precision in precisions:
        for name in (f"onnxruntime-{precision}", f"onnxruntime-{precision}-{SUFFIX}"):
            one = known[name]
            first = next(iter(one["latency"]), None)
            found["variants"][name] = {
                "status": one["status"],
                "reason": one["reason"],
                "rejected": one["rejected"],
                "quality": one["quality"] and {key: one["quality"][key] for key in ("value", "drop", "samples")},
                "speedup_over_dense": first and first["speedup_over_dense"],
            }
    facts = known[f"onnxruntime-fp32-{SUFFIX}"].get("pruning") or [None]
    keys = ("macs_before", "macs_after", "parameters_before", "parameters_after", "channels_before", "channels_after")
    found["pruning"] = facts[0] and {key: facts[0][key] for key in keys}
    return found


def _step_seconds(document: Mapping[str, Any], step: str) -> float | None:
    return next((one["seconds"] for one in document["steps"] if one["id"] == step), None)


def _engines(answer: Answer, run: Path, precisions: Sequence[str]) -> dict[str, Path]:
    names = {f"onnxruntime-{each}": f"dense {each}" for each in precisions}
    names |= {f"onnxruntime-{each}-{SUFFIX}": f"pruned {each}" for each in precisions}
    return judging.engines(answer, run, names)


def _timed(graphs: Mapping[str, Path], feeds: judging.Feeds, seconds: float) -> dict[str, Any]:
    """Engines in turns; pruned ones over the dense ones of their precision."""
    times = race({name: pruning_by_hand.runner(path, feeds) for name, path in graphs.items()}, seconds)
    found: dict[str, Any] = {"p50_ms": {name: times.p50_ms(name) for name in graphs}, "rounds": len(times.seconds)}
    pairs = [(name, name.replace("pruned", "dense")) for name in graphs if name.startswith("pruned")]
    found["over_dense"] = {
        name: dataclasses.asdict(times.speedup(name, dense)) for name, dense in pairs if dense in graphs
    }
    return found


def _met(timed: Mapping[str, Any]) -> bool:
    targets = {"pruned fp32": FLOAT_SPEEDUP, "pruned int8": INT8_SPEEDUP}
    ratios = timed["over_dense"]
    return all(name in ratios and ratios[name]["median"] >= least for name, least in targets.items())


def main(arguments: Sequence[str] | None = None) -> None:
    """Prune, train back, time, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=("A", "B", "C"), default=("A", "B", "C"))
    parser.add_argument("--seconds", type=float, default=20.0, help="of timing, for each row")
    parser.add_argument("--recover", type=float, default=110.0, help="seconds of recovery")
    parser.add_argument("--models", nargs="+", choices=pruning_by_hand.MODELS, default=list(pruning_by_hand.MODELS))
    parser.add_argument("--all-settings", action="store_true", help="B: go on where the targets are met")
    parser.add_argument("--work", type=Path, default=Path("build/pruning"), help="folder of runs and graphs")
    parser.add_argument("--out", type=Path, default=RESULTS / "pruning.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    work = options.work.resolve()
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.is_file() else {}
    found["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    found["versions"] = {name: version(name) for name in ("torch", "onnxruntime", "torch-pruning")}
    if "A" in options.only:
        found["digits"] = digits(work, options) | {"recover_limit_seconds": options.recover}
        _write(options.out, found)
    if "B" in options.only:
        found["resnet50"] = resnet50(work, options)
        _write(options.out, found)
    if "C" in options.only:
        rows = {(row["model"], row["scope"]): row for row in found.get("by_hand", ())}
        for row in pruning_by_hand.compared(options.models, work / "by_hand", options.seconds, options.recover):
            rows[row["model"], row["scope"]] = row
            found["by_hand"] = list(rows.values())
            print(pruning_report.of_by_hand(row), flush=True)
            _write(options.out, found)
    print(pruning_report.markdown(found))


def _write(path: Path, found: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(pruning_report.markdown(found))


if __name__ == "__main__":
    main()
