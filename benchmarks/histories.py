"""Random histories of the store and of a run directory, with faults: what is lost, reused wrongly, or damaged.

    python benchmarks/histories.py [--histories 1000] [--seed 1] [--part store|resume] [--seconds S]

The histories are those of ``tests/unit/test_store_histories.py`` and ``tests/unit/test_run_histories.py``, drawn by
hypothesis from the seed. A history that fails is counted and written down, and the next one is lived through. Faults
are counted where they were met. ``--seconds`` bounds the time of the second part.
Writes results/histories.json and .md; with ``--part``, the other part of the results stays.
"""

import argparse
import functools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "data"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit"))

import test_run_histories as resume_histories
import test_store_histories as store_histories
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

RESULTS = Path(__file__).parent / "results" / "histories.json"
_STORE = st.tuples(store_histories.HISTORIES, st.booleans())
_RESUME = st.tuples(st.lists(resume_histories.COMMANDS, min_size=2, max_size=5), st.booleans())


def run_histories(strategy: st.SearchStrategy[Any], live: Callable[[Any], None], number: int, start: int) -> Any:
    """Live through so many histories; returns how many there were, and the failures."""
    lived, failures = [0], list[dict[str, str]]()

    @seed(start)
    @settings(
        max_examples=number,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def one(history: Any) -> None:
        lived[0] += 1
        try:
            live(history)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is counted
            failures.append({"error": f"{type(error).__name__}: {error}"[:400], "history": repr(history)})

    one()
    return lived[0], failures


def run_store(number: int, start: int) -> dict[str, Any]:
    """Live through histories of the store, half of them with a shared one."""
    counts: Counter[str] = Counter()
    lived, failures = run_histories(_STORE, lambda drawn: store_histories.live_through(*drawn, counts), number, start)
    return {"histories": lived, **split_counts(counts), "failures": failures}


def run_resume(number: int, start: int, seconds: float) -> dict[str, Any]:
    """Live through histories of a run directory, half of them with a shared store, as far as there is time."""
    counts: Counter[str] = Counter()
    ends = time.monotonic() + seconds

    def live(drawn: Any) -> None:
        if time.monotonic() < ends:
            history, shared = drawn
            counts["lived"] += 1
            resume_histories.live_through([("optimize", None), *history], shared, counts)

    _, failures = run_histories(_RESUME, live, number, start)
    lived = counts.pop("lived")
    return {"histories": lived, **split_counts(counts), "failures": failures}


def split_counts(counts: Counter[str]) -> dict[str, dict[str, int]]:
    """Split what was counted into operations and the faults that were met."""
    faults = {name[6:]: count for name, count in counts.items() if name.startswith("fault ") and name != "fault "}
    operations = {name: count for name, count in counts.items() if not name.startswith("fault ")}
    return {"operations": operations, "faults": {name: count for name, count in faults.items() if count}}


def describe(results: dict[str, Any]) -> str:
    """Write the results as Markdown."""
    lines = ["# Random histories with faults", "", "| part | seed | histories | operations | faults | failures | s |"]
    lines.append("| --- | --- | --- | --- | --- | --- | --- |")
    for name, part in results.items():
        counts = (sum(part["operations"].values()), sum(part["faults"].values()), len(part["failures"]))
        lines.append(
            f"| {name} | {part['seed']} | {part['histories']} | {' | '.join(map(str, counts))} | {part['seconds']} |"
        )
    for name, part in results.items():
        for kind in ("operations", "faults"):
            known = ", ".join(f"{what} {count}" for what, count in sorted(part[kind].items()))
            lines += ["", f"{kind.capitalize()} of {name}: {known}."]
        lines += [line for one in part["failures"] for line in ("", f"- {one['error']}", f"  `{one['history']}`")]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Live through the histories, and write what came out."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--part", choices=("store", "resume"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = json.loads(options.out.read_text()) if options.part and options.out.exists() else {}
    for name, work in (("store", run_store), ("resume", functools.partial(run_resume, seconds=options.seconds))):
        if options.part in (None, name):
            began = time.monotonic()
            results[name] = work(options.histories, options.seed)
            results[name] |= {"seed": options.seed, "seconds": round(time.monotonic() - began)}
            options.out.write_text(json.dumps(results, indent=1) + "\n")
            options.out.with_suffix(".md").write_text(describe(results))
    print(describe(results))


if __name__ == "__main__":
    main()
