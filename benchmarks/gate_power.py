"""Count how often `gate` catches a model that became 10 % slower, and passes one that did not, on a noisy machine.

    python benchmarks/gate_power.py [--tries 20] [--work build/gate_power] [--loads quiet,random]

Three networks are optimized as users do: `digits`; the same with other weights, so that no byte of the engine is the
baseline's; and one with a residual branch more, as wide as takes 10 % more time. How wide that is, is measured: each
width of WIDTHS in several long measurements side by side. Then `gate RUN --baseline digits` is asked in turns, with its
default tolerance and time, about the unchanged and the slower one, beside each load of `noise.py` in turn. Targets:
slower ones are caught in 9 of 10 tries, unchanged ones pass in 19 of 20. Writes results/gate_power.json and .md.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from command import call
from noise import load

from enginesmith.pipeline.measure.statistics import Interval
from enginesmith.pipeline.results.gate import DEFAULT_SECONDS, stored_in
from enginesmith.pipeline.results.remeasure import remeasure

RESULTS = Path(__file__).parent / "results"
WIDTHS = (4, 8, 16)
WANTED = 1.10
BASELINE, UNCHANGED = "baseline", "unchanged"
NET = '''"""digits with a residual branch of {width} channels after its first layer, and other weights."""

import torch
from torch import Tensor, nn

from enginesmith.models.digits import digits


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = digits()[0]
        with torch.no_grad():
            self.net.fc.weight *= {scale}
        self.branch = None
        if {width}:
            self.branch = nn.Sequential(nn.Conv2d(16, {width}, 3, padding=1), nn.ReLU(), nn.Conv2d({width}, 16, 1))
            for weight in self.branch.parameters():
                nn.init.normal_(weight, std=1e-3)

    def forward(self, image: Tensor) -> Tensor:
        net = self.net
        x = torch.relu(net.bn1(net.conv1(image)))
        if self.branch is not None:
            x = x + self.branch(x)
        x = net.layer3(net.layer2(net.layer1(x)))
        return net.fc(x.mean((2, 3)))


def build() -> tuple[nn.Module, dict[str, Tensor]]:
    return Net().eval(), digits()[1]
'''


def optimized(work: Path, name: str, width: int, scale: float) -> Path:
    """The run directory of a network; one that is there already is used as it is."""
    source, out = work / f"{name}.py", work / name
    source.write_text(NET.format(width=width, scale=scale))
    if not (out / "report.md").exists():
        words = ("--precision", "fp32", "--eval", "digits", "--batch", "1", "--measure-time", "5s")
        answer = call("optimize", f"{source}:build", *words, "--out", str(out), "--store", str(work / "store"))
        if answer.exit_code:
            sys.exit(f"optimize failed: {answer.message}")
    return out


def ratio(before: Path, after: Path, seconds: float) -> Interval:
    """Measure how much longer the engine of one run takes than that of another, without a time limit."""
    sides = [stored_in(folder, "onnxruntime-fp32") for folder in (before, after)]
    assert sides[0] is not None
    assert sides[1] is not None
    return remeasure(
        sides[0], sides[1], 1, seconds=seconds, decided=lambda found: False, progress=lambda text: None
    ).ratio


def calibrated(work: Path, baseline: Path, repeats: int, seconds: float) -> tuple[Path, dict[str, Any]]:
    """The run of the width that is nearest to what is wanted, and what was measured of all widths."""
    found: dict[int, list[float]] = {width: [] for width in WIDTHS}
    runs = {width: optimized(work, f"wider{width}", width, 1.0) for width in WIDTHS}
    for _ in range(repeats):
        for width, run in runs.items():
            found[width].append(ratio(baseline, run, seconds).median)
            print(f"width {width}: {found[width][-1]:.3f}", flush=True)
    medians = {width: statistics.median(each) for width, each in found.items()}
    print("calibration:", {width: f"{value:.3f}" for width, value in medians.items()}, flush=True)
    chosen = min(WIDTHS, key=lambda width: abs(medians[width] - WANTED))
    return runs[chosen], {"width": chosen, "ratio": medians[chosen], "measured": found}


def asked(run: Path, baseline: Path) -> dict[str, Any]:
    """Ask one gate, and return its verdict on latency."""
    answer = call("gate", str(run), "--baseline", str(baseline))
    if answer.exit_code not in (0, 3) or answer.document is None:
        sys.exit(f"gate failed: {answer.message}")
    said = next(one for one in answer.document["verdicts"] if one["name"] == "latency_ms")
    passed = said["passed"] or not said["required"]
    return {
        "passed": passed,
        "state": said["state"],
        "change": said["change"],
        "basis": said["basis"],
        "seconds": answer.seconds,
    }


def powers(tries: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """By what was tried, and the load beside it: how many answers were right, of how many."""
    found: dict[str, dict[str, int]] = {}
    for one in tries:
        for load_name in (one["load"], "all"):
            counts = found.setdefault(f"{one['what']}, {load_name}", {"right": 0, "of": 0})
            counts["of"] += 1
            counts["right"] += one["passed"] == (one["what"] == UNCHANGED)
    return found


def markdown(found: Mapping[str, Any]) -> str:
    """The results as a page."""
    slower, tries = found["slower"], found["tries"]
    lines = [
        "# gate: what it catches and what it lets pass",
        "",
        f"`{found['command']}`: `digits` in ONNX Runtime at batch 1, p50 {found['p50_ms']:.4f} ms; the slower one",
        f"has a branch of {slower['width']} channels more, and takes {slower['ratio']:.3f} times as long, as",
        f"{len(slower['measured'][slower['width']])} long measurements have it. Tolerance 5 %, at most",
        f"{DEFAULT_SECONDS:g} s a try.",
        "",
        "| what, beside which load | right | of |",
        "| --- | --- | --- |",
        *(f"| {name} | {counts['right']} | {counts['of']} |" for name, counts in found["powers"].items()),
        "",
        "| try | what | load | passed | change [95 %] | seconds |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for number, one in enumerate(tries, 1):
        change = one["change"]
        ends = f"{change['median'] - 1:+.1%} [{change['low'] - 1:+.1%}, {change['high'] - 1:+.1%}]" if change else "–"
        passed = "yes" if one["passed"] else "no"
        lines.append(f"| {number} | {one['what']} | {one['load']} | {passed} | {ends} | {one['seconds']:.0f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Prepare, ask, and write what was answered, after every try."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tries", type=int, default=20, help="of the unchanged, and as many of the slower one")
    parser.add_argument("--loads", default="quiet,random")
    parser.add_argument("--work", type=Path, default=Path("build/gate_power"))
    parser.add_argument("--calibrate", type=int, default=3, help="long measurements of each width")
    parser.add_argument("--out", type=Path, default=RESULTS / "gate_power.json")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    baseline = optimized(given.work, BASELINE, 0, 1.0)
    unchanged = optimized(given.work, UNCHANGED, 0, 1.001)
    slower, calibration = calibrated(given.work, baseline, given.calibrate, 20.0)
    found: dict[str, Any] = {
        "command": " ".join(["python benchmarks/gate_power.py", *sys.argv[1:]]),
        "slower": calibration,
        "p50_ms": json.loads((baseline / "run.json").read_bytes())["variants"][0]["latency"][0]["p50_ms"],
        "tries": [],
    }
    loads = given.loads.split(",")
    for number in range(given.tries):
        for what, run in ((UNCHANGED, unchanged), ("slower", slower)):
            with load(loads[number % len(loads)]):
                answer = {"what": what, "load": loads[number % len(loads)], **asked(run, baseline)}
            found["tries"].append(answer)
            found["powers"] = powers(found["tries"])
            print(f"{number + 1}/{given.tries} {answer}", flush=True)
            given.out.write_text(json.dumps(found, indent=1) + "\n")
            given.out.with_suffix(".md").write_text(markdown(found))
    for name, counts in found["powers"].items():
        print(f"{name}: {counts['right']} of {counts['of']} right")


if __name__ == "__main__":
    main()
