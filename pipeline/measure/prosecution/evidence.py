"""Write what was found as a folder: a small graph, its inputs, the right answers, a script that shows the fault."""

import json
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from enginesmith.pipeline.engines.options import AddedOption
from enginesmith.pipeline.tensors import Array, Feeds

FINDING, MODEL, INPUTS, EXPECTED, SCRIPT, ISSUE = (
    *("finding.json", "model.onnx", "inputs.npz", "expected.npz", "repro.py", "issue.md"),
)
_SHOWN = 12


class Finding(BaseModel, frozen=True):
    """Describe an input on which an engine is wrong, and what is guilty."""

    walk: str
    """Family of the input: ``sizes``, ``values`` …"""
    note: str
    reason: str
    witness: str
    """Source of the right answer: ``model``, ``graph``, or itself on one sample ``alone``."""
    attempts: int
    """Inputs that were tried, this one included."""
    guilty: str
    """The stage that made the answer wrong: ``export``, ``simplify``, a precision, ``engine``."""
    nodes: tuple[str, ...] = ()
    """Operators and names of the nodes that the graph was reduced to."""
    whole: int | None = None
    """Nodes of the graph that was reduced."""
    workaround: str = ""
    """An option with which the engine answers right, as people give it; empty if none was found."""
    option: AddedOption | None = None
    """The workaround as a change of the recipe."""
    versions: dict[str, str] = {}
    folder: str = ""
    """Folder of the evidence, below the run's."""
    unreduced: str = ""
    """Reason why the graph was not reduced."""

    @property
    def fault(self) -> str:
        """The input and what is wrong on it."""
        return f"wrong on {self.walk} ({self.note}): {self.reason}"

    @property
    def sentence(self) -> str:
        """The finding in one sentence."""
        reduced = f", in {len(self.nodes)} of {self.whole} nodes ({', '.join(self.nodes[:3])})" if self.nodes else ""
        mended = f"; right with {self.workaround}" if self.workaround else ""
        return f"{self.fault}; guilty: {self.guilty}{reduced}{mended}"


class Prosecution(BaseModel, frozen=True):
    """Report what was tried on an engine, and what was found."""

    seconds: float
    """Time for trying inputs."""
    attempts: int
    walks: dict[str, int]
    """Inputs by family."""
    finding: Finding | None = None


def write_evidence(
    folder: Path,
    finding: Finding,
    model: bytes | None,
    feeds: Feeds,
    expected: Feeds,
    script: str,
) -> None:
    """Write the folder; ``script`` are the lines of the engine's own package that set ``found`` by output name."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FINDING).write_text(finding.model_dump_json(indent=1) + "\n")
    if model is not None:
        (folder / MODEL).write_bytes(model)
    _save(folder / INPUTS, feeds)
    _save(folder / EXPECTED, expected)
    if model is not None and script:
        (folder / SCRIPT).write_text(_SCRIPT.replace("# ENGINE", textwrap.indent(script.strip(), "    ").strip()))
    (folder / ISSUE).write_text(_write_issue(finding, feeds, expected, runnable=model is not None and bool(script)))


def _save(file: Path, arrays: Feeds) -> None:
    names = {f"{index}": name for index, name in enumerate(arrays)}
    content: dict[str, Any] = {key: arrays[name] for key, name in names.items()}
    np.savez(file, allow_pickle=False, names=np.array(json.dumps(names)), **content)


def load_arrays(file: Path) -> dict[str, Array]:
    """Read arrays by name, as they were saved: names of graphs may have any letters."""
    with np.load(file, allow_pickle=False) as stored:
        return {name: stored[key] for key, name in json.loads(str(stored["names"])).items()}


_SCRIPT = '''"""Show the fault: python repro.py. Exit code 1: the answer is wrong; 0: it is right."""

import json
import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
MODEL = str(HERE / "model.onnx")


def load(name):
    with np.load(HERE / name) as stored:
        return {value: stored[key] for key, value in json.loads(str(stored["names"])).items()}


inputs, expected = load("inputs.npz"), load("expected.npz")
try:
    # ENGINE
except ImportError:
    raise
except Exception as error:
    print(f"it does not answer: {error}")
    sys.exit(1)
wrong = False
for name, wanted in expected.items():
    given = np.asarray(found[name])
    if given.shape != wanted.shape:
        print(f"{name}: shape {given.shape}, expected {wanted.shape}")
        wrong = True
        continue
    if not wanted.size:
        continue
    finite = np.isfinite(wanted.astype(float))
    apart = np.abs(given.astype(float) - wanted.astype(float))
    error = float(np.nan_to_num(apart[finite], nan=np.inf, posinf=np.inf).max(initial=0))
    span = float(np.ptp(wanted[finite].astype(float))) if finite.any() else 0.0
    span = span or float(np.abs(wanted[finite].astype(float)).max(initial=0)) or 1.0
    far = error > 1e-4 * span or (np.isfinite(given.astype(float)) != finite).any()
    print(f"{name}: wrong by up to {error:.6g}, {100 * error / span:.3g} % of the range" + (" <-" if far else ""))
    wrong = wrong or far
sys.exit(int(wrong))
'''


def _write_issue(finding: Finding, feeds: Feeds, expected: Feeds, *, runnable: bool) -> str:
    lines = [
        f"# Wrong result: {', '.join(finding.nodes[:3]) or finding.guilty}\n",
        f"{finding.reason} ({finding.walk}: {finding.note}).\n",
    ]
    if runnable:
        lines.append(
            "`model.onnx`, its inputs and the right answers are attached; `python repro.py` shows the difference.\n"
        )
    lines += ["## Inputs\n", *_describe(feeds), "", "## Expected outputs\n", *_describe(expected), ""]
    if finding.nodes:
        lines += [
            f"## Nodes ({len(finding.nodes)} of {finding.whole})\n",
            *(f"- {node}" for node in finding.nodes[:_SHOWN]),
            "",
        ]
    if finding.workaround:
        lines += ["## Workaround\n", f"The answer is right with {finding.workaround}.\n"]
    lines += ["## Versions\n", *(f"- {name} {version}" for name, version in finding.versions.items())]
    return "\n".join(lines) + "\n"


def _describe(arrays: Mapping[str, Array]) -> Sequence[str]:
    return [f"- `{name}`: {value.dtype}{list(value.shape)}" for name, value in list(arrays.items())[:_SHOWN]]
