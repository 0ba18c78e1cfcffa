"""Compare what a search finds in a limited time with the best of everything that it could try.

    python benchmarks/search.py [--models digits …] [--time 30s 3m] [--batch 1] [--threads 1] [--work build/arena]

For each model of the arena: `optimize --data … --max-drop … --time …` finds a winner in each of the times. One more run
lists by hand all engines, precisions, quantizers and prunings that the searches could choose from, and measures every
variant in full, in the same interleaved rounds. Its numbers tell how much faster the best of all variants is than the
one that was found (1 where they are the same). A search judges on samples for choosing before it judges on others; what
it dropped there for its accuracy is not the best of all, even if it loses nothing on the others. The arena's data are
split in the same way in all. Writes results/search.json; a model that is in it is not run again.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parent / "arena"))
sys.path.insert(1, str(Path(__file__).parent / "arena" / "recipes"))

import models
from command import call
from recipes.job import KNOWN

from enginesmith import load_run
from enginesmith.pipeline.measure.statistics import divide
from enginesmith.pipeline.results.run import Run
from enginesmith.pipeline.results.verdicts import select_winner

RESULTS = Path(__file__).parent / "results" / "search.json"
_LOSS = "its accuracy on the samples for choosing"
"""In the reason of a variant that the search dropped because it loses too much."""
_LISTS = (("--engine", "engines"), ("--precision", "precisions"))


def list_everything(run: Run) -> Iterator[str]:
    """Options that list by hand what a search could choose from."""
    for option, field in _LISTS:
        for name in getattr(run.recipe, field):
            yield from (option, name)
    for name in run.recipe.quantization.quantizers:
        yield from ("--quantizer", name)
    for target in run.recipe.prune:
        yield from ("--prune", target)
    if run.recipe.prune and run.recipe.recover:
        recovery = run.recipe.recovery
        yield from ("--recover", recovery.method, "--recover-time", f"{recovery.seconds:g}s")


def compare(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Search once in each time, and measure everything of one model; yield a row of the results for each time."""
    model, work = models.MODELS[name], options.work / "models"
    folder, place = model.prepare(work), options.work / "search" / name
    common = (model.source(work), "--data", str(folder / f"{KNOWN}.npz"), "--max-drop", str(model.max_drop))
    common += (
        "--metric",
        model.metric_argument(work),
        "--batch",
        str(options.batch),
        "--threads",
        str(options.threads),
    )
    searches: list[tuple[dict[str, Any], Run | None]] = []
    listed: tuple[str, ...] = ()
    stores: tuple[str, ...] = ()
    for time in options.time:
        # A store of its own: nothing is known from the shorter search.
        stores, out = ("--store", str(place / time / "store")), place / time / "found"
        searched = call("optimize", *common, *stores, "--time", time, "--out", str(out))
        row = {"model": name, "time": time, "search_seconds": round(searched.seconds, 1)}
        if searched.error:
            searches.append((row | {"failure": searched.message}, None))
            continue
        found = load_run(out)
        tried = len([record for record in found.requested if not record.untried])
        searches.append((row | {"found": found.winner, "tried": tried, "variants": len(found.requested)}, found))
        listed = tuple(list_everything(found))
    if not listed:
        yield from (row for row, _ in searches)
        return
    whole = call("optimize", *common, *stores, *listed, "--out", str(place / "everything"), "--no-memory")
    everything = None if whole.error else load_run(place / "everything")
    for row, run in searches:
        if everything is None:
            yield row | {"failure": whole.message}
        elif run is None:
            yield row
        else:
            yield row | _judge(run, everything) | {"everything_seconds": round(whole.seconds, 1)}


def _judge(found: Run, everything: Run) -> dict[str, Any]:
    recipe = everything.recipe
    lossy = [record for record in found.requested if _LOSS in record.reason]
    names, pruned = {record.id for record in lossy}, {record.prune for record in lossy if record.precision == "fp32"}
    dropped = {record.id for record in everything.requested if record.id in names or record.prune in pruned - {None}}
    records = [record for record in everything.records if record.id not in dropped]
    best = select_winner(records, recipe.budgets, recipe.objective, min(recipe.batch), recipe.min_sqnr_db).winner
    row: dict[str, Any] = {"best": best}
    if everything.winner in dropped:
        row["dropped_when_chosen"] = everything.winner
    speeds = {record.id: record.latency[0].speedup for record in everything.requested if record.latency}
    ours, theirs = speeds.get(found.winner or ""), speeds.get(best or "")
    if ours and theirs:
        ratio = divide(theirs, ours)
        same = found.winner == best
        row["best_over_found"] = [1.0] * 3 if same else [round(end, 3) for end in (ratio.low, ratio.median, ratio.high)]
    return row


def main() -> None:
    """Add the models that are asked for to the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=models.MODELS, default=list(models.MODELS))
    parser.add_argument("--time", nargs="+", default=["30s", "3m"])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--work", type=lambda text: Path(text).resolve(), default=Path("build/arena").resolve())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    rows = json.loads(options.out.read_text()) if options.out.is_file() else []
    for name in options.models:
        if name in {row["model"] for row in rows}:
            continue
        for row in compare(name, options):
            rows.append(row | {"batch": options.batch, "threads": options.threads})
            print(json.dumps(rows[-1]), flush=True)
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
