"""Count the known bugs that `enginesmith prosecute` finds, and which of them the installed versions have.

    python benchmarks/known_bugs.py [--seconds 30] [--only NAME ...]

Cases are published wrong results (``tests/data/published_bugs``): a model, and a graph that computes what a tool made
of it. The command line gets nothing but these two files. Counted are the bugs found, the seconds, the nodes of the
reproducers, and whether `repro.py` shows the bug alone. Writes results/known_bugs.json and .md.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import onnx

sys.path.insert(1, str(Path(__file__).parent / "arena"))
sys.path.insert(1, str(Path(__file__).parent / "nets"))
sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "data"))

from cell import describe_command, describe_machine
from prosecution import prosecute

from published_bugs import BUGS
from published_bugs.case import KnownBug

RESULTS = Path(__file__).parent / "results" / "known_bugs.json"


def prosecute_bug(bug: KnownBug, seconds: float, work: Path) -> dict[str, Any]:
    """Prosecute a bug's wrong graph beside its model, and probe the installed version."""
    graphs = bug.make()
    files = [work / f"{bug.name}-{side}.onnx" for side in ("right", "wrong")]
    for model, file in zip(graphs, files, strict=True):
        onnx.save(model, file)
    made = prosecute(files, seconds, work / f"finding-{bug.name}")
    present = bug.probe(graphs.right) if bug.probe else None
    return {"bug": bug.name, "source": bug.source, "installed": bug.installed(), "present": present, **made}


def _lines(found: Mapping[str, Any]) -> Iterator[str]:
    cases = found["cases"]
    caught = [each for each in cases if each.get("found")]
    yield "# Known bugs\n"
    yield f"{len(caught)} of {len(cases)} were found, after {median(each['seconds'] for each in caught):.0f} s in the"
    yield f"median and {max(each['seconds'] for each in caught):.0f} s at most, starting and reducing included;"
    yield f"`repro.py` shows {sum(bool(each['repro_shows_it']) for each in caught)} of them alone.\n"
    yield "| bug | source | found by | seconds | nodes | `repro.py` shows it | installed version |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for each in cases:
        walk = each.get("walk") or ("error" if "error" in each else "not found")
        state = {True: "has it", False: "does not have it", None: "not probed"}[each["present"]]
        installed = f"{each['installed']}: {state}" if each["installed"] else "not installed"
        shown = {True: "yes", False: "no", None: ""}[each.get("repro_shows_it")]
        row = (each["bug"], each["source"], walk, f"{each['seconds']:.0f}", each.get("nodes") or "", shown, installed)
        yield f"| {' | '.join(map(str, row))} |"
    yield f"\nMachine: {found['machine']}. Command: `{found['command']}`"


def main(arguments: Sequence[str] | None = None) -> None:
    """Prosecute each known bug, and write the results after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=30.0, help="time for trying inputs on each graph")
    parser.add_argument("--only", nargs="+", choices=tuple(BUGS), help="some; the others stay as they are")
    parser.add_argument("--work", type=Path, default=Path("build/known_bugs"), help="folder of graphs and findings")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    work = options.work.resolve()
    earlier = json.loads(options.out.read_text())["cases"] if options.out.is_file() else []
    cases = {each["bug"]: each for each in earlier if each["bug"] in BUGS}
    for name in options.only or BUGS:
        cases[name] = made = prosecute_bug(BUGS[name], options.seconds, work)
        print({key: value for key, value in made.items() if value is not None}, flush=True)
        found = {"machine": describe_machine(), "command": describe_command("known_bugs.py", arguments)}
        found["cases"] = [cases[each] for each in BUGS if each in cases]
        options.out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
        if any(each.get("found") for each in found["cases"]):
            options.out.with_suffix(".md").write_text("\n".join(_lines(found)) + "\n")


if __name__ == "__main__":
    main()
