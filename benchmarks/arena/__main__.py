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
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).parent.parent))
sys.path.insert(1, str(Path(__file__).parent / "recipes"))

import judging
import models
import numpy as np
import report
import rivals
import rounds
from cells import Entrant, Row, count_by_machine, find_far_behind, list_hopeless, summarise
from recipes.job import JUDGEMENT, Job
from rounds import Prepared, Server, Timing

from enginesmith.pipeline.measure.quality import Quality, evaluate
from enginesmith.pipeline.system import cpu

RESULTS = Path(__file__).parent.parent / "results" / "arena.json"
_EXPORT = "import sys; from pathlib import Path; from judging import exported; exported(sys.argv[1], Path(sys.argv[2]))"
_UNITS = {"avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "asimd", "i8mm", "bf16"}
"""Vector extensions that decide how fast int8 and bfloat16 are, besides AMX."""


class Cell:
    """Run the rivals of one model, batch size and number of threads."""

    def __init__(
        self,
        model: str,
        batch: int,
        threads: int,
        names: Sequence[str],
        absent: Mapping[str, str],
        options: argparse.Namespace,
    ) -> None:
        self.model, self.batch, self.threads = model, batch, threads
        self._names, self._absent, self._options = names, absent, options
        self._work: Path = options.work / "models"
        self._description = models.MODELS[model]

    @property
    def key(self) -> dict[str, Any]:
        """Identify the cell in the results."""
        return {"model": self.model, "batch": self.batch, "threads": self.threads}

    def run(self) -> Row:
        """Prepare all rivals, time them in the same rounds, and judge their answers."""
        folder = models.prepare(self.model, self._work)
        export = self._export() if self._description.module else Prepared(0.0, 0)
        prepared = {name: self._prepare(name, export) for name in self._names}
        timings = {name: Timing() for name in self._names}
        entrants = {name: Entrant(timings[name], prepared[name], None) for name in self._names}
        answers = {name: self._folder(name) / f"answers-b{self.batch}-t{self.threads}.npy" for name in self._names}
        starting = [name for name in self._names if not prepared[name].failure]
        for launch in range(self._options.launches if starting else 0):
            servers = {name: self._serve(name) for name in starting}
            how = (self._options.rounds, self._options.block, self._options.warmup)
            try:
                rounds.run_launch(servers, timings, *how, answers if launch == 0 else {})
            finally:
                for server in servers.values():
                    server.close()
            running = [name for name in starting if not timings[name].failure]
            if launch == 0:
                judged = {name: self._judge(answers[name], folder) for name in running}
                entrants |= {name: replace(entrants[name], quality=judged[name]) for name in running}
            hopeless = list_hopeless({name: entrants[name] for name in running}, self._description.max_drop)
            starting = [name for name in running if name not in hopeless]
        return {**self.key, "max_drop": self._description.max_drop, **summarise(entrants, self._description.max_drop)}

    @property
    def _cores(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))

    def _folder(self, name: str) -> Path:
        place = f"{self.model}-b{self.batch}-t{self.threads}" if rivals.RIVALS[name].per_cell else self.model
        return Path(self._options.work, "rivals", name, place)

    def _command(self, mode: str, name: str) -> tuple[list[str], dict[str, str]]:
        rival = rivals.RIVALS[name]
        server = Path(rounds.HERE, "recipes", "server.py")
        job = Job(
            folder=str(self._folder(name)),
            model=str(self._work / self.model),
            source=models.source(self.model, self._work),
            factory=self._description.factory if self._description.module else "",
            metric=models.metric(self.model, self._work),
            transformer=self._description.transformer,
            max_drop=self._description.max_drop,
            batch=self.batch,
            threads=self._cores,
        )
        path = self._folder(name) / f"job-b{self.batch}-t{self.threads}.json"
        job.write(path)
        interpreter = rivals.python(rival.environment, self._options.work)
        variables = rounds.variables(rival.environment, models.import_paths(self._work), self._cores)
        return [str(interpreter), str(server), mode, str(path), rival.recipe], variables

    def _export(self) -> Prepared:
        """Export the module in a process of its own: the job of rivals that take the graph begins with it."""
        folder = self._work / self.model / "export"
        folder.mkdir(exist_ok=True)
        source = models.source(self.model, self._work)
        paths = [Path(judging.__file__).parent, *models.import_paths(self._work)]
        command = [sys.executable, "-c", _EXPORT, source, str(folder / "model.onnx")]
        return rounds.prepare(command, rounds.variables("", paths, self._cores), folder, self._options.limit)

    def _prepare(self, name: str, export: Prepared) -> Prepared:
        if reason := rivals.RIVALS[name].refuses(self._description) or self._absent.get(name):
            return Prepared(0.0, 0, f"does not take part: {reason}")
        folder = self._folder(name)
        folder.mkdir(parents=True, exist_ok=True)
        done = rounds.prepare(*self._command("prepare", name), folder, self._options.limit)
        if rivals.RIVALS[name].takes_graph:
            peak = max(done.peak_bytes, export.peak_bytes)
            done = replace(done, seconds=done.seconds + export.seconds, peak_bytes=peak)
        print(f"  {name}: {done.failure or f'prepared in {done.seconds:.0f} s'}", flush=True)
        return done

    def _serve(self, name: str) -> Server:
        log = self._folder(name) / "serve.log"
        return Server.start(name, *self._command("serve", name), log, self._options.limit)

    def _judge(self, answers: Path, folder: Path) -> Quality:
        """Compare the answers on the judged rows with the labels, and with the original's answers."""
        found = np.load(answers)
        original = {"output": np.load(folder / "reference.npy")[: len(found)]}
        with np.load(folder / f"{JUDGEMENT}.npz") as arrays:
            labels = arrays["labels"][: len(found)]
        given = {"output": found.reshape(original["output"].shape)}
        return evaluate(models.metric(self.model, self._work), given, original, labels)


def _list_rivals(cell: Row | None, options: argparse.Namespace) -> list[str]:
    """List the rivals to run: those asked for and those that the cell has; none if it has all of them already."""
    there = {row["rival"] for row in cell["rows"]} | set(cell["failures"]) if cell else set()
    if set(options.rivals) <= there and not options.again:
        return []
    return [name for name in rivals.RIVALS if name in there | set(options.rivals)]


def _describe_machine() -> str:
    units = [unit for unit in cpu.vector_units() if unit in _UNITS or "amx" in unit]
    return f"{cpu.model()}, {os.cpu_count()} cores, {', '.join(units) or 'no AVX2'}"


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python benchmarks/arena", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=models.MODELS, default=list(models.MODELS))
    parser.add_argument("--rivals", nargs="+", choices=rivals.RIVALS, default=list(rivals.RIVALS))
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 0], help="0: all")
    parser.add_argument("--rounds", type=int, default=10, help="of each launch")
    parser.add_argument("--launches", type=int, default=3, help="times that all servers are started")
    parser.add_argument("--block", type=float, default=0.08, help="seconds of calls in a block")
    parser.add_argument("--warmup", type=float, default=1.0, help="seconds of calls before the first block")
    parser.add_argument(
        "--limit", type=float, default=3600.0, help="seconds for a rival's whole job, and for an answer"
    )
    parser.add_argument("--again", nargs="*", choices=rivals.RIVALS, default=[], help="rivals to prepare again")
    parser.add_argument(
        "--work", type=Path, default=Path("build/arena"), help="folder of environments, models and files"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    options.work = options.work.resolve()
    return options


def _drop_places(words: Sequence[str]) -> list[str]:
    """Leave out where files lay, which changes nothing."""
    kept = list(words)
    for option in {"--work", "--out"} & set(kept):
        del kept[kept.index(option) : kept.index(option) + 2]
    return kept


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cells that are asked for, and write the results after each."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended from outside"))  # so that servers are ended, too
    found: Row = json.loads(options.out.read_text()) if options.out.is_file() else {"cells": []}
    here = _describe_machine()
    cells = {(cell["machine"], cell["model"], cell["batch"], cell["threads"]): cell for cell in found["cells"]}
    for name in options.again:
        for model in options.models:
            for folder in (options.work / "rivals" / name).glob(f"{model}*"):
                shutil.rmtree(folder)
    words = " ".join(_drop_places(sys.argv[1:] if arguments is None else arguments))
    for model in options.models:
        for batch in options.batch:
            for threads in options.threads:
                place = (here, model, batch, threads)
                if not (names := _list_rivals(cells.get(place), options)):
                    continue
                others = [cell for at, cell in cells.items() if at[:2] == place[:2] and at != place]
                cell = Cell(model, batch, threads, names, find_far_behind(others), options)
                print(f"{model}, batch {batch}, {threads or 'all'} threads", flush=True)
                cells[place] = cell.run() | {
                    "machine": here,
                    "command": f"python benchmarks/arena {words}".strip(),
                    "others": cpu.count_others(),
                }
                print(report.describe_cell(cells[place]), flush=True)
                found = {"cells": list(cells.values()), "environments": rivals.ENVIRONMENTS}
                found["count"] = count_by_machine(found["cells"])
                options.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
                options.out.with_suffix(".md").write_text(report.markdown(found))


if __name__ == "__main__":
    main()
