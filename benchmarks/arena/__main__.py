"""The arena: enginesmith and its rivals on the same models, data and allowed loss, in the same interleaved rounds.

    pip install scikit-learn pillow tokenizers transformers
    python benchmarks/arena [--models digits silero_vad …] [--rivals ort-fp32 …] [--batch 1 8] [--threads 1 0]

Each rival's toolkit gets an environment of its own below --work (rivals.py), and each model a folder (models.py). A
cell is a model, a batch size and a number of threads (0: all). For a cell, every rival does its whole job once, in a
process whose wall time and peak memory are taken; then all of them are timed as servers, block by block, in random
order, in several launches, and each answers the judged rows. What takes more than twice the time of the fastest in the
first launch is not launched again; what took more than four times in all other cells of the model is not prepared.
A cell that this machine has in the results with all rivals asked for is not run
again; --again names rivals to prepare and time again. Writes --out and the same as .md.
"""

import argparse
import json
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parent.parent))
sys.path.insert(1, str(Path(__file__).parent / "recipes"))

import models
import report
import rivals
from cell import Cell, add_arguments, describe_command, describe_machine
from summary import Row, count_by_machine, find_far_behind

from enginesmith.pipeline.system import cpu

RESULTS = Path(__file__).parent.parent / "results" / "arena.json"


def _list_rivals(cell: Row | None, options: argparse.Namespace) -> list[str]:
    """List the rivals to run: those asked for and those that the cell has; none if it has all of them already."""
    there = {row["rival"] for row in cell["rows"]} | set(cell["failures"]) if cell else set()
    if set(options.rivals) <= there and not options.again:
        return []
    return [name for name in rivals.RIVALS if name in there | set(options.rivals)]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/arena", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=models.MODELS, default=list(models.MODELS))
    parser.add_argument("--rivals", nargs="+", choices=rivals.RIVALS, default=list(rivals.RIVALS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 0], help="0: all")
    add_arguments(parser)
    parser.add_argument("--again", nargs="*", choices=rivals.RIVALS, default=[], help="rivals to prepare again")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    options.work = options.work.resolve()
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cells that are asked for, and write the results after each."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that servers are ended, too
    found: Row = json.loads(options.out.read_text()) if options.out.is_file() else {"cells": []}
    here = describe_machine()
    cells = {(cell["machine"], cell["model"], cell["batch"], cell["threads"]): cell for cell in found["cells"]}
    for name in options.again:
        for model in options.models:
            for folder in (options.work / "rivals" / name).glob(f"{model}*"):
                shutil.rmtree(folder)
    command = describe_command("arena", arguments)
    for model in options.models:
        for batch in options.batch:
            for threads in options.threads:
                place = (here, model, batch, threads)
                if not (names := _list_rivals(cells.get(place), options)):
                    continue
                others = [cell for at, cell in cells.items() if at[:2] == place[:2] and at != place]
                cell = Cell(models.MODELS[model], batch, threads, names, find_far_behind(others), options)
                print(f"{model}, batch {batch}, {threads or 'all'} threads", flush=True)
                cells[place] = cell.run() | {
                    "machine": here,
                    "command": command,
                    "others": cpu.count_others(),
                }
                print(report.describe_cell(cells[place]), flush=True)
                found = {"cells": list(cells.values()), "environments": rivals.ENVIRONMENTS}
                found["count"] = count_by_machine(found["cells"])
                options.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
                options.out.with_suffix(".md").write_text(report.markdown(found))


if __name__ == "__main__":
    main()
