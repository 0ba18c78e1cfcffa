"""The museum: networks that lose their accuracy in int8 by plain recipes, and what the search makes of them.

    pip install jiwer scikit-learn pillow tokenizers transformers
    python benchmarks/museum.py [--cases vit_outliers detector …] [--rivals ort-static …]

Each case says what the plain recipes do wrong. It is run as a cell of the arena (batch 1, one thread): the rivals'
recipes and `enginesmith optimize MODEL --data … --max-drop …`, with nothing else, on the same data and allowed loss,
timed in the same rounds. A case holds if the variant that wins loses no more than is allowed, if there is one in int8
that loses no more and computes at least 80 % of the multiply-adds in it, if the winner is at least 0.95 × as fast as
the fastest recipe that loses too much, and if it took ten minutes at most. Writes results/museum.json and .md;
a case that is in it is not run again, but with --again.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parent / "arena"))
sys.path.insert(1, str(Path(__file__).parent / "arena" / "recipes"))

from cell import Cell, add_arguments, describe_command, describe_machine
from models import MANY, MODELS, Model, lines_with_text, trained
from summary import OURS

from enginesmith import load_run
from enginesmith.pipeline.results.run import Run, VariantRecord

RESULTS = Path(__file__).parent / "results" / "museum.json"
_RIVALS = (
    "eager",
    "ort-fp32",
    "ort-static",
    "ort-static-u8",
    "openvino-nncf",
    "openvino-nncf-control",
    "inc-static",
    "modelopt",
)
_PRECISION = "int8"
_LOSS = "its accuracy on the samples for choosing"
"""In the reason of a variant that the search dropped because it loses too much; others were dropped for their speed."""
_LEAST_SHARE, _LEAST_SPEED, _MOST_SECONDS = 0.8, 0.95, 600.0


@dataclass(frozen=True)
class Case:
    """A network, and why it is here."""

    model: Model
    cause: str
    """What plain recipes do to it, in one sentence."""
    obstacle: str = ""
    """Why it cannot be in int8 today, with what was measured; empty where nothing is known to prevent it."""


def _classifier(name: str, factory: str, weights: str = "") -> Model:
    return Model(name, factory, trained(weights or name), rows=MANY)


CASES: dict[str, Case] = {
    case.model.name: case
    for case in (
        Case(
            _classifier("mobilenet_bottlenecks", "harden:mobilenet_bottlenecks", "mobilenet"),
            "channels between the blocks differ by three powers of ten, so one scale for all of them leaves most of "
            "them one level or two (Nagel et al., ICCV 2019: MobileNetV2, 71.7 % to 0.1 %)",
        ),
        Case(
            _classifier("resnet_stages", "harden:resnet_stages", "resnet56"),
            "three channels of each stage are 64 times as large as the others, and shortcuts carry them on",
        ),
        Case(
            _classifier("mobilenet_v3_outliers", "harden:mobilenet_v3_outliers", "mobilenet_v3"),
            "the same between the blocks; within them, a few large channels have hard-swish before and factors of "
            "squeeze-and-excitation behind them",
        ),
        Case(
            _classifier("efficientnet_outliers", "harden:efficientnet_outliers", "efficientnet"),
            "the same with SiLU (TensorRT's model zoo: EfficientNet-B0 loses 5.3 points)",
        ),
        Case(
            _classifier("shufflenet_units", "harden:shufflenet_units", "shufflenet"),
            "the same with half of the channels going past each unit, and a shuffle behind it, so that channels of a "
            "value come from many layers",
        ),
        Case(
            _classifier("vit_outliers", "harden:vit_outliers", "vit"),
            "three channels behind each normalization are 64 times as large as the others (ModelOpt's default int8: "
            "ViT-B/16, 85.2 % to 0.03 %)",
        ),
        Case(
            _classifier("swin_outliers", "harden:swin_outliers", "swin"),
            "the same in windows, with minus infinity where positions are masked",
        ),
        Case(
            Model(
                "minilm_ranking", "networks:minilm_embedding", trained("minilm_embedding"), "ranking", transformer=True
            ),
            "a few large activations of the perceptrons take the int8 levels of all others, and the order of similar "
            "sentences is lost",
        ),
        Case(_classifier("lstm", "networks:lstm"), "recipes for static int8 have no form for recurrent layers"),
        Case(
            _classifier("gru", "networks:gru"),
            "the same, and errors of the state add up along the sequence",
            "PyTorch's GRU multiplies by the reset gate after the product (linear_before_reset), and for that form "
            "neither engine has an int8 kernel: ONNX Runtime has one for LSTM alone, and OpenVINO 2026.4.1 cannot "
            "compile it with quantized weights and inputs (oneDNN: no primitive for LBR GRU). The other form, which is "
            "another function, does run in int8 there: 0.17 ms instead of 1.8 ms in float32 (64 steps of 64, state of "
            "128, one thread); PyTorch's form takes 0.30 ms in float32",
        ),
        Case(
            Model("unet_shortcuts", "harden:unet_shortcuts", trained("unet"), "overlap"),
            "shortcuts are 64 times as large as what they are joined with, and share its scale",
        ),
        Case(
            Model("detector", "dense:detector", trained("detector"), "mean_precision"),
            "boxes up to 640 and probabilities up to 1 share a tensor, and so a scale (ultralytics: YOLO11s, mAP 0.743 "
            "to 0.324)",
        ),
        Case(
            replace(MODELS["text_reader"], name="line_reader", data=lines_with_text, metric="cer=blank:0"),
            "hard-swish and factors of squeeze-and-excitation, as in MobileNetV3, and 6 625 letters to choose from",
        ),
        Case(
            Model("upscaler", "dense:upscaler", trained("upscaler"), "psnr", max_drop=0.1),
            "without normalization the ranges of pictures differ, and each level that is lost is noise in the answer",
        ),
        Case(
            replace(MODELS["silero_vad"], rows=(300, 300, 304)),
            "a spectrum's range of many powers of ten, and a state that is fed back",
        ),
        Case(
            Model("gauge", "dense:gauge", trained("gauge"), "closeness", rows=MANY),
            "answers from 1 to 10 000 of which the relative error counts: a step of int8 is larger than the small ones",
        ),
    )
}


def run_case(case: Case, names: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Run a case as a cell of the arena, and say what became of it."""
    cell = Cell(case.model, 1, 1, names, {}, options)
    found = cell.run()
    place = cell.folder_of(OURS) / "run"
    run = load_run(place) if (place / "run.json").is_file() else None
    return found | {
        "cause": case.cause,
        "machine": describe_machine(),
        **(_judge(case, found, run) if run else {"holds": False, "winner_variant": "", "variant": "", "share": 0.0}),
    }


def _judge(case: Case, cell: dict[str, Any], run: Run) -> dict[str, Any]:
    """Look up the winner and the best variant in int8; compare with the fastest broken recipe."""
    rows = {row["rival"]: row for row in cell["rows"]}
    best = _find_best(run, case)
    ours = rows.get(OURS)
    broken = [row for name, row in rows.items() if name != OURS and row["quality"] and not row["allowed"]]
    fastest = max((_speed(row) for row in broken), default=None)
    speed = _speed(ours) / fastest if ours and fastest else None
    share = _share(best)
    held = {
        "loss": bool(ours and ours["allowed"]),
        "share": share >= _LEAST_SHARE,
        "speed": speed is None or speed >= _LEAST_SPEED,
        "time": bool(ours and ours["job_seconds"] <= _MOST_SECONDS),
    }
    return {
        "winner_variant": run.winner,
        "variant": best.id if best else "",
        "share": share,
        "times_the_broken": speed,
        "held": held,
        "holds": all(held.values()),
        "failed": [f"{each.id}: {each.reason}" for each in run.variants if each.status == "failed"],
    }


def _find_best(run: Run, case: Case) -> VariantRecord | None:
    """Return the winner if it is in int8, else the variant with the largest share that loses no more."""
    fitting = [
        each
        for each in run.variants
        if each.precision.startswith(_PRECISION)
        and each.status != "failed"
        and _LOSS not in each.reason
        and (each.quality is None or each.quality.drop <= case.model.max_drop)
    ]
    return max(fitting, key=lambda each: (each.id == run.winner, _share(each)), default=None)


def _share(variant: VariantRecord | None) -> float:
    coverage = variant and (variant.engine_coverage or variant.coverage)
    return coverage.share(_PRECISION) if coverage else 0.0


def _speed(row: dict[str, Any]) -> float:
    """Speed relative to the winner's."""
    return 1.0 if row["times_the_winner"] is None else 1 / float(row["times_the_winner"]["median"])


def write(found: dict[str, Any], path: Path) -> None:
    """Write the results as JSON, and the same as Markdown."""
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text("\n".join(_lines(found)) + "\n")


def _lines(found: dict[str, Any]) -> Iterator[str]:
    cases = found["cases"]
    held = sum(case["holds"] for case in cases)
    yield "# The museum\n\nNetworks that plain recipes break, and what one command makes of them; batch 1, one thread."
    yield f"{held} of {len(cases)} hold: the allowed loss, a variant with 80 % of the multiply-adds in int8,"
    yield "0.95 × the speed of the fastest recipe that loses too much, and ten minutes.\n"
    yield "| case | metric | lose too much | enginesmith | loses | in int8 | × their speed | took |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for case in cases:
        rows = {row["rival"]: row for row in case["rows"]}
        broken = [
            f"{name} {row['quality']['drop']:+.3f}"
            for name, row in rows.items()
            if name != OURS and row["quality"] and not row["allowed"]
        ]
        broken += [f"{name} fails" for name in case["failures"] if name != OURS]
        ours = rows.get(OURS)
        if ours is None:
            yield f"| {case['model']} | | {', '.join(broken)} | **{case['failures'].get(OURS, '–')}** | | | | |"
            continue
        quality = ours["quality"] or {"baseline": float("nan"), "drop": float("nan")}
        speed = f"{case['times_the_broken']:.2f}" if case["times_the_broken"] else "–"
        name = case["winner_variant"] if case["holds"] else f"**{case['winner_variant']}**"
        share = f"{case['share']:.0%} ({case['variant']})" if case["variant"] else "0 %"
        yield (
            f"| {case['model']} | {quality['baseline']:.3f} | {', '.join(broken) or 'none'} | {name} | "
            f"{quality['drop']:+.4f} of {case['max_drop']} | {share} | {speed} | {ours['job_seconds']:.0f} s |"
        )
    yield "\n## Why they break\n"
    for case in cases:
        yield f"- **{case['model']}**: {case['cause']}."
    lost = [case for case in cases if not case["holds"]]
    if lost:
        yield "\n## Cases that do not hold\n"
    for case in lost:
        missing = ", ".join(name for name, held in case.get("held", {}).items() if not held) or "it failed"
        yield " ".join((f"- **{case['model']}**: {missing}.", *_explain_failure(case)))
    yield "\nMachines:\n"
    for machine in dict.fromkeys(case["machine"] for case in cases):
        yield f"- {machine}: {', '.join(case['model'] for case in cases if case['machine'] == machine)}"
    yield "\nCommands:\n"
    for command in dict.fromkeys(case["command"] for case in cases):
        yield f"- `{command}`"


def _explain_failure(case: dict[str, Any]) -> Iterator[str]:
    """List sentences: what is known to stand in the way, and variants that failed."""
    if obstacle := CASES[case["model"]].obstacle:
        yield f"{obstacle}."
    yield from (f"{failed}." for failed in case.get("failed", ()))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cases that are asked for, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rivals", nargs="*", help="beside enginesmith; all of int8, eager and float32 by default")
    parser.add_argument("--again", action="store_true", help="run cases again that are in the results")
    add_arguments(parser)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    options.work = options.work.resolve()
    found = json.loads(options.out.read_text()) if options.out.is_file() else {"cases": []}
    cases = {case["model"]: case for case in found["cases"]}
    command = describe_command("museum.py", arguments)
    for name in options.cases:
        if name in cases and not options.again:
            continue
        if options.again:
            shutil.rmtree(options.work / "rivals" / OURS / f"{name}-b1-t1", ignore_errors=True)
        case = CASES[name]
        names = [OURS, *(_RIVALS if options.rivals is None else options.rivals)]
        print(name, flush=True)
        cases[name] = run_case(case, names, options) | {"command": command}
        ours = cases[name]
        print(f"  {'holds' if ours['holds'] else 'DOES NOT HOLD'}: {ours['variant']}, {ours['share']:.0%}", flush=True)
        write({"cases": [cases[each] for each in CASES if each in cases]}, options.out)


if __name__ == "__main__":
    main()
