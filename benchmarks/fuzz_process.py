"""Run random models of many seeds in a process that is started again where it crashes or hangs, and report.

What came of each is a line in a log, so that a later call goes on where one ended.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

FINDINGS = ("wrong", "traceback", "hang", "crash")
_HANG_SECONDS = 60.0


@dataclass(frozen=True)
class Outcome:
    """Hold the result of a pass over a model."""

    seed: int
    trial: str
    kind: str
    """``right``, ``unchanged``, ``refused``, one of the findings, or of an engine ``engine: …``."""
    text: str = ""


class Fuzz(Protocol):
    """Run trials over the model of a seed; ``begin`` is told what comes next."""

    def __call__(
        self, seed: int, names: list[str], folder: Path, begin: Callable[[str], None], *, stop: bool
    ) -> Iterator[Outcome]: ...


def shorten(error: Exception) -> str:
    """Describe an error with the place where it was raised, and the product's function that called it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "benchmarks" not in frame.filename]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} {frames[-1].name})" if frames else ""
    own = [frame for frame in frames if "/pipeline/" in frame.filename]
    where = f" under {Path(own[-1].filename).name} {own[-1].name}" if own else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{place}{where}"


def read_log(log: Path) -> list[dict[str, Any]]:
    """Read the lines of a log."""
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []


def collect(log: Path) -> dict[str, Any]:
    """Count what a log tells: seeds, outcomes by pass, findings, and the commonest reasons of refusals."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    findings, reasons, seeds = [], Counter[str](), set()
    for entry in read_log(log):
        if entry.get("done"):
            seeds.add(entry["seed"])
        if "kind" not in entry:
            continue
        counts[entry["trial"]][entry["kind"]] += 1
        if entry["kind"] in FINDINGS:
            findings.append(entry)
        if entry["kind"] in ("refused", "unchanged"):
            reasons[f"{entry['trial']}: {entry['text'][:100]}"] += 1
    return {
        "seeds": len(seeds),
        "first": min(seeds, default=0),
        "last": max(seeds, default=0),
        "passes": {name: dict(one) for name, one in counts.items()},
        "findings": findings,
        "refusals": dict(reasons.most_common(100)),
    }


def write_report(results: Path, document: dict[str, Any], lines: Callable[[dict[str, Any]], Iterator[str]]) -> None:
    """Write a document as JSON and as text; notes and what was mended are taken over from the one that is there."""
    previous = json.loads(results.read_text(encoding="utf-8")) if results.exists() else {}
    document |= {name: previous.get(name, []) for name in ("notes", "mended")}
    results.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    results.with_suffix(".md").write_text("\n".join((*lines(document), *_list_findings(document))) + "\n")


def write_table(document: dict[str, Any], kinds: Sequence[str]) -> Iterator[str]:
    """Write the numbers of outcomes by pass, engines left out."""
    yield f"| pass | {' | '.join(kinds)} |"
    yield "| --- " * (len(kinds) + 1) + "|"
    for name, one in document["passes"].items():
        if not name.startswith("engine"):
            yield f"| {name} | {' | '.join(str(one.get(kind, 0)) for kind in kinds)} |"
    yield ""


def _list_findings(document: dict[str, Any]) -> Iterator[str]:
    for note in document["notes"]:
        yield f"{note}\n"
    yield "## Open findings"
    yield ""
    for entry in document["findings"]:
        yield f"- seed {entry['seed']}, {entry['trial']}: {entry['kind']}: {entry['text']}"
    if not document["findings"]:
        yield "None."
    yield ""
    yield "## Found and mended"
    yield ""
    for entry in document["mended"]:
        yield f"- seed {entry['seed']}, {entry['pass']}: {entry['text']}"


def _work(fuzz: Fuzz, arguments: argparse.Namespace) -> None:
    """Fuzz seeds in this process; each line of the log is an outcome, or what begins."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    done = {entry["seed"] for entry in read_log(arguments.log) if entry.get("done")}
    with arguments.log.open("a", buffering=1) as stream:
        for seed in (one for one in range(arguments.first, arguments.last) if one not in done):
            with tempfile.TemporaryDirectory() as folder:

                def begin(what: str, seed: int = seed) -> None:
                    stream.write(json.dumps({"seed": seed, "begin": what}) + "\n")

                for outcome in fuzz(seed, arguments.passes, Path(folder), begin, stop=False):
                    stream.write(json.dumps(outcome.__dict__) + "\n")
            stream.write(json.dumps({"seed": seed, "done": True}) + "\n")


def _supervise(script: Path, first: int, last: int, log: Path, passes: Sequence[str]) -> None:
    """Have seeds fuzzed by a process, and start another one behind the seed where it crashed or hung."""
    seed = first
    while seed < last:
        seeds = ("--from", str(seed), "--to", str(last))
        command = [sys.executable, str(script), *seeds, "--log", str(log), "--worker", "--passes", *passes]
        process = subprocess.Popen(command)
        kind = "crash"
        while process.poll() is None:
            time.sleep(1)
            if log.exists() and time.time() - log.stat().st_mtime > _HANG_SECONDS:
                process.kill()
                kind = "hang"
        if process.returncode == 0:
            return
        entry = read_log(log)[-1]
        seed = int(entry["seed"]) + 1
        if not entry.get("done"):
            what = entry.get("begin", entry.get("trial", ""))
            kind = f"engine: {kind}" if what.startswith("engine") else kind
            with log.open("a", encoding="utf-8") as stream:
                lost = Outcome(seed - 1, what, kind, f"the process ended with {process.returncode}")
                stream.write(json.dumps(lost.__dict__) + "\n" + json.dumps({"seed": seed - 1, "done": True}) + "\n")


def run_command(
    description: str | None, script: Path, log: Path, names: Sequence[str], fuzz: Fuzz, report: Callable[[Path], None]
) -> None:
    """Fuzz the seeds that the command line asks for; ``report`` is given the log in the end."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="first", type=int, default=0)
    parser.add_argument("--to", dest="last", type=int, default=10_000)
    parser.add_argument("--passes", nargs="*", default=list(names), choices=list(names))
    parser.add_argument("--seed", type=int, help="one model, in this process")
    parser.add_argument("--stop", action="store_true", help="with --seed: let what is raised through")
    parser.add_argument("--log", type=Path, default=log, help="outcomes, which a later call goes on with")
    parser.add_argument("--again", action="store_true", help="forget the outcomes of earlier calls")
    parser.add_argument("--report", action="store_true", help="write the report of the outcomes so far, and end")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.seed is not None:
        with tempfile.TemporaryDirectory() as folder:
            for outcome in fuzz(arguments.seed, arguments.passes, Path(folder), lambda _: None, stop=arguments.stop):
                print(f"{outcome.trial:32} {outcome.kind:10} {outcome.text}")
        return
    if arguments.worker:
        _work(fuzz, arguments)
        return
    if arguments.again:
        arguments.log.unlink(missing_ok=True)
    if not arguments.report:
        _supervise(script, arguments.first, arguments.last, arguments.log, arguments.passes)
    report(arguments.log)
