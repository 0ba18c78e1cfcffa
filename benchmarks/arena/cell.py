"""Run one cell: all rivals do their whole job, are timed in the same rounds, and answer the judged rows."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import judging
import numpy as np
import rivals
import rounds
from models import Model, import_paths
from recipes.job import JUDGEMENT, Job
from rounds import Prepared, Server, Timing
from summary import Entrant, Row, list_hopeless, summarize

from enginesmith.pipeline.measure.quality import Quality, evaluate
from enginesmith.pipeline.system import cpu

_EXPORT = "import sys; from pathlib import Path; from judging import exported; exported(sys.argv[1], Path(sys.argv[2]))"
_UNITS = {"avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "asimd", "i8mm", "bf16"}
"""Vector extensions that decide how fast int8 and bfloat16 are, besides AMX."""


class Cell:
    """Run the rivals of one model, batch size and number of threads."""

    def __init__(
        self,
        model: Model,
        batch: int,
        threads: int,
        names: Sequence[str],
        absent: Mapping[str, str],
        options: argparse.Namespace,
    ) -> None:
        self.model, self.batch, self.threads = model, batch, threads
        self._names, self._absent, self._options = names, absent, options
        self._work: Path = options.work / "models"

    @property
    def key(self) -> dict[str, Any]:
        """Identify the cell in the results."""
        return {"model": self.model.name, "batch": self.batch, "threads": self.threads}

    def run(self) -> Row:
        """Prepare all rivals, time them in the same rounds, and judge their answers."""
        folder = self.model.prepare(self._work)
        export = self._export() if self.model.module else Prepared(0.0, 0)
        prepared = {name: self._prepare(name, export) for name in self._names}
        timings = {name: Timing() for name in self._names}
        entrants = {name: Entrant(timings[name], prepared[name], None) for name in self._names}
        answers = {name: self.folder_of(name) / f"answers-b{self.batch}-t{self.threads}.npy" for name in self._names}
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
            hopeless = list_hopeless({name: entrants[name] for name in running}, self.model.max_drop)
            starting = [name for name in running if name not in hopeless]
        return {**self.key, "max_drop": self.model.max_drop, **summarize(entrants, self.model.max_drop)}

    @property
    def _cores(self) -> int:
        return self.threads or len(os.sched_getaffinity(0))

    def folder_of(self, name: str) -> Path:
        """Return the folder of a rival's files."""
        named = self.model.name
        place = f"{named}-b{self.batch}-t{self.threads}" if rivals.RIVALS[name].per_cell else named
        return Path(self._options.work, "rivals", name, place)

    def _command(self, mode: str, name: str) -> tuple[list[str], dict[str, str]]:
        rival = rivals.RIVALS[name]
        server = Path(rounds.HERE, "recipes", "server.py")
        job = Job(
            folder=str(self.folder_of(name)),
            model=str(self._work / self.model.name),
            source=self.model.source(self._work),
            factory=self.model.factory if self.model.module else "",
            metric=self.model.metric_argument(self._work),
            transformer=self.model.transformer,
            max_drop=self.model.max_drop,
            batch=self.batch,
            threads=self._cores,
        )
        path = self.folder_of(name) / f"job-b{self.batch}-t{self.threads}.json"
        job.write(path)
        interpreter = rivals.python(rival.environment, self._options.work)
        variables = rounds.variables(rival.environment, import_paths(self._work), self._cores)
        return [str(interpreter), str(server), mode, str(path), rival.recipe], variables

    def _export(self) -> Prepared:
        """Export the module in a process of its own: the job of rivals that take the graph begins with it."""
        folder = self._work / self.model.name / "export"
        folder.mkdir(exist_ok=True)
        source = self.model.source(self._work)
        paths = [Path(judging.__file__).parent, *import_paths(self._work)]
        command = [sys.executable, "-c", _EXPORT, source, str(folder / "model.onnx")]
        return rounds.prepare(command, rounds.variables("", paths, self._cores), folder, self._options.limit)

    def _prepare(self, name: str, export: Prepared) -> Prepared:
        if reason := rivals.RIVALS[name].refuses(self.model) or self._absent.get(name):
            return Prepared(0.0, 0, f"does not take part: {reason}")
        folder = self.folder_of(name)
        folder.mkdir(parents=True, exist_ok=True)
        done = rounds.prepare(*self._command("prepare", name), folder, self._options.limit)
        if rivals.RIVALS[name].takes_graph:
            peak = max(done.peak_bytes, export.peak_bytes)
            done = replace(done, seconds=done.seconds + export.seconds, peak_bytes=peak)
        print(f"  {name}: {done.failure or f'prepared in {done.seconds:.0f} s'}", flush=True)
        return done

    def _serve(self, name: str) -> Server:
        log = self.folder_of(name) / "serve.log"
        return Server.start(name, *self._command("serve", name), log, self._options.limit)

    def _judge(self, answers: Path, folder: Path) -> Quality:
        """Compare the answers on the judged rows with the labels, and with the original's answers."""
        found = np.load(answers)
        original = {"output": np.load(folder / "reference.npy")[: len(found)]}
        with np.load(folder / f"{JUDGEMENT}.npz") as arrays:
            labels = arrays["labels"][: len(found)]
        given = {"output": found.reshape(original["output"].shape)}
        return evaluate(self.model.metric_argument(self._work), given, original, labels)


def describe_machine() -> str:
    """Name the processor, its cores and the instructions that decide how fast it is."""
    units = [unit for unit in cpu.vector_units() if unit in _UNITS or "amx" in unit]
    return f"{cpu.model()}, {os.cpu_count()} cores, {', '.join(units) or 'no AVX2'}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a cell is run, and where its files are."""
    parser.add_argument("--rounds", type=int, default=10, help="of each launch")
    parser.add_argument("--launches", type=int, default=3, help="times that all servers are started")
    parser.add_argument("--block", type=float, default=0.08, help="seconds of calls in a block")
    parser.add_argument("--warmup", type=float, default=1.0, help="seconds of calls before the first block")
    parser.add_argument(
        "--limit", type=float, default=3600.0, help="seconds for a rival's whole job, and for an answer"
    )
    parser.add_argument(
        "--work", type=Path, default=Path("build/arena"), help="folder of environments, models and files"
    )


def describe_command(script: str, arguments: Sequence[str] | None) -> str:
    """Write the command, without where files lay, which changes nothing."""
    kept = list(sys.argv[1:] if arguments is None else arguments)
    for option in {"--work", "--out"} & set(kept):
        del kept[kept.index(option) : kept.index(option) + 2]
    return " ".join((f"python benchmarks/{script}", *kept))
