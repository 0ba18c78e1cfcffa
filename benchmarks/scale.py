"""Measure planning, scheduling and looking things up with many steps and many variants.

    python benchmarks/scale.py [plan steps alone ray warm shared] [--steps 10000] [--variants 1000] [--work build/scale]

plan    real recipes until they have that many steps, planned and merged; target: 2 s.
steps   as many steps that do nothing, on the local executor in processes that they share; target: 5 ms a step.
alone   200 such steps in a process of their own each.
ray     as many as of `steps` on a Ray cluster of two nodes on this machine; target: 20 ms a step.
warm    a fleet of so many variants whose every step is in the store, from the command line; target: 10 s. The store is
        filled with what one recipe left, under the keys of recipes that differ in their seed only: how long an answer
        takes does not depend on what it says.
shared  200 steps that another machine did, with an empty cache in front of a bucket that answers 20 ms late.

The memory of the parent is its resident set, at each quarter of the way. Writes results/scale.json.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bucket import bucket
from idle import Nothing, NothingAlone

sys.path.append(str(Path(__file__).parents[1] / "tests" / "data" / "cluster"))

import ray_processes

from enginesmith.pipeline.artifact import Artifact, Effect
from enginesmith.pipeline.execution.events import Outcomes
from enginesmith.pipeline.execution.executor import Executor, Result, StepCache, StepRequest
from enginesmith.pipeline.execution.local import LocalExecutor
from enginesmith.pipeline.execution.merge import deduplicate_steps
from enginesmith.pipeline.execution.scheduler import Runner
from enginesmith.pipeline.execution.settings import Settings
from enginesmith.pipeline.planning.plan import LOAD, Step, StepRef
from enginesmith.pipeline.planning.planner import plan
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import Recipe, make
from enginesmith.pipeline.recipe.fleet import read
from enginesmith.pipeline.store.store import Store
from enginesmith.pipeline.tasks.base import Done
from enginesmith.pipeline.workflows.optimize import optimize_all
from enginesmith.pipeline.workflows.request import RunRequest

RESULTS = Path(__file__).parent / "results" / "scale.json"
_WIDTH = 100
"""So many steps do not wait for each other."""
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_ALONE_STEPS = _SHARED_STEPS = 200
_DELAY_MS = 20.0
_WARM_ROUNDS = 3
_ENGINES = {
    "precisions": ["fp32", "fp16", "int8", "int8-dynamic"],
    "graph_optimization": ["disabled", "basic", "extended", "all"],
    "quantization": {"search_steps": 1},
    "measure": {"memory": False, "seconds": 0.3},
    "batch": [1],
}
"""Sixteen variants."""


def recipe(seed: int) -> Recipe:
    """One of many alike, none of whose steps another one has."""
    return make({"model": "digits", "seed": seed, **_ENGINES})


def planned(count: int) -> dict[str, Any]:
    """Plans of real recipes, until there are so many steps."""
    plan(resolve_recipe(recipe(0)))  # imports
    begun = time.perf_counter()
    plans, steps = {}, 0
    while steps < count:
        plans[f"run{len(plans)}"] = made = plan(resolve_recipe(recipe(len(plans))))
        steps += len(made.steps)
    together = deduplicate_steps(plans)
    return {"steps": len(together.steps), "runs": len(plans), "seconds": round(time.perf_counter() - begun, 3)}


def chains(count: int, kind: type[Nothing]) -> list[Step]:
    """Steps that do nothing, in chains side by side."""
    steps: list[Step] = []
    for number in range(count):
        needs = {"before": steps[number - _WIDTH].id} if number >= _WIDTH else {}
        steps.append(Step(StepRef("step", number), kind(number=number), needs))
    return steps


def carried_out(steps: Sequence[Step], executor: Executor, logs: Path) -> dict[str, Any]:
    """Time and memory of running steps."""
    memory: list[int] = []
    done = 0
    begun = time.perf_counter()

    def note(new: Outcomes) -> None:
        nonlocal done
        done += len(new)
        if done % (len(steps) // 4) == 0:
            memory.append(resident_bytes())

    with executor:
        before = resident_bytes()
        outcomes = Runner(executor, lambda step: logs / f"{step.id}.log").run(steps, on_new=note)
    seconds = time.perf_counter() - begun
    assert all(outcome.good for outcome in outcomes.values())
    return {
        "steps": len(steps),
        "seconds": round(seconds, 2),
        "ms_a_step": round(1000 * seconds / len(steps), 3),
        "parent_bytes": [before, *memory],
    }


def resident_bytes() -> int:
    """Read this process's resident bytes (statm of proc(5))."""
    return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * _PAGE_BYTES


class Filling(LocalExecutor):
    """Does what it knows no result of, and publishes that for every step of the same name."""

    made: dict[str, Artifact]

    def lookup(self, request: StepRequest) -> Artifact | None:
        found = super().lookup(request)
        if found is not None:
            self.made.setdefault(request.step.name, found)
        return found

    def execute(self, request: StepRequest) -> Result:
        if request.step.name == LOAD or request.step.name not in self.made:
            result = super().execute(request)
            self.made[request.step.name] = result.artifact
            return result
        cache, known = StepCache(request.step, request.inputs, self._store), self.made[request.step.name]

        def work(out: Path, begun: Path | None) -> Done:
            shutil.copytree(known.folder, out, dirs_exist_ok=True, ignore=shutil.ignore_patterns("artifact.json"))
            last = known.history[-1]
            effect = Effect(
                file=known.path.name, summary=last.effect, signature=known.signature, rejected=known.rejected
            )
            return Done(effect=effect, seconds=last.seconds, host_peak_bytes=last.host_peak_bytes)

        return Result(cache.make(work), cached=False)


class FillingSettings(Settings):
    """Settings of runs that fill the store."""

    def open_executor(self) -> Executor:
        executor = Filling(self.open_store(), self.jobs)
        executor.made = {}
        return executor


def warm(variants: int, work: Path) -> dict[str, Any]:
    """A fleet whose every step is known, from the start of the command to its end."""
    file, store = work / "fleet.yaml", work / "store"
    models = {f"net{seed}": {"model": "digits", "recipe": {"seed": seed}} for seed in range(-(-variants // 16))}
    file.write_text(json.dumps({"recipe": _ENGINES, "models": models, "targets": {"cpu": {}}}))
    asked = [RunRequest(one.name, one.recipe, work / "filling" / one.name, one.place) for one in read(file).entries()]
    optimize_all(asked, FillingSettings(store=store))
    command = [sys.executable, "-m", "enginesmith.cli", "optimize", str(file), "--store", str(store), "--quiet"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    took = []
    for turn in range(_WARM_ROUNDS):  # each in a folder of its own: file systems are slow where much was just removed
        words = [*command, "--out", str(work / f"warm-{turn}" / "fleet")]
        begun = time.perf_counter()
        done = subprocess.run(words, env=environment, check=False, capture_output=True, text=True)
        took.append(round(time.perf_counter() - begun, 2))
        assert done.returncode == 0, done.stderr
    runs = [json.loads(path.read_bytes()) for path in work.glob("warm-0/fleet/runs/*/run.json")]
    return {
        "runs": len(runs),
        "variants": sum(len(run["variants"]) for run in runs),
        "steps": sum(len(run["steps"]) for run in runs),
        "reused": sum(step["cached"] for run in runs for step in run["steps"]),
        "seconds": statistics.median(took),
        "each": took,
    }


def on_ray(count: int, work: Path) -> dict[str, Any]:
    """Steps that do nothing, on two nodes that are processes of this machine."""
    from enginesmith.pipeline.execution.ray.executor import RayExecutor

    project, path = work / "project", str(Path(__file__).parent)
    project.mkdir()
    with ray_processes.cluster(PYTHONPATH=path) as cluster:
        cluster.add(PYTHONPATH=path)
        executor = RayExecutor(Store(work / "ray"), 2, cluster.address, project)
        return carried_out(chains(count, Nothing), executor, work / "logs")


def from_a_bucket(work: Path) -> dict[str, Any]:
    """Steps that another machine did, taken from the store that both share."""
    steps = chains(_SHARED_STEPS, Nothing)
    found: dict[str, Any] = {"delay_ms": _DELAY_MS}
    with bucket("team", _DELAY_MS) as url:
        for machine in ("first", "second"):
            os.environ["ENGINESMITH_CACHE"] = str(work / machine)
            found[machine] = carried_out(steps, LocalExecutor(Store(f"{url}/store"), 2), work / "logs")
    return found


def main() -> None:
    """Run the parts that are asked for, and put them beside those of before."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["plan", "steps", "alone", "ray", "warm", "shared"])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--variants", type=int, default=1000)
    parser.add_argument("--work", type=Path, default=Path("build/scale"))
    chosen = parser.parse_args()
    shutil.rmtree(chosen.work, ignore_errors=True)
    work = chosen.work.absolute()
    work.mkdir(parents=True)

    def local(count: int, kind: type[Nothing]) -> dict[str, Any]:
        return carried_out(chains(count, kind), LocalExecutor(Store(work / kind.__name__), 2), work / "logs")

    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "plan": lambda: planned(chosen.steps),
        "steps": lambda: local(chosen.steps, Nothing),
        "alone": lambda: local(_ALONE_STEPS, NothingAlone),
        "ray": lambda: on_ray(chosen.steps, work),
        "warm": lambda: warm(chosen.variants, work),
        "shared": lambda: from_a_bucket(work),
    }
    found = json.loads(RESULTS.read_bytes()) if RESULTS.exists() else {}
    for name in chosen.parts:
        found[name] = {**parts[name](), "load_average": os.getloadavg()[0]}
        print(name, json.dumps(found[name]))
        RESULTS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
