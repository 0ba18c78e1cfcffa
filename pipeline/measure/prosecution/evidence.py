"""Write what was found as a folder: a small graph, its inputs, the right answers, a script that shows the fault."""

import json
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.measure.prosecution.finding import Finding
from enginesmith.pipeline.measure.prosecution.issue import write_issue
from enginesmith.pipeline.tensors import Feeds

if TYPE_CHECKING:
    import onnx

FINDING, MODEL, INPUTS, EXPECTED, FOUND, SCRIPT, ISSUE = (
    *("finding.json", "model.onnx", "inputs.npz", "expected.npz", "found.npz", "repro.py", "issue.md"),
)


@dataclass(frozen=True)
class Evidence:
    """A graph, its inputs, the right answers and those that were given; and how to run it."""

    model: "onnx.ModelProto | None"
    feeds: Feeds
    expected: Feeds
    found: Feeds | None
    """None where there was no answer."""
    script: str = ""
    """Lines of the engine's own package that answer, as ``Engine.reproduce`` writes them; empty where it cannot."""
    tolerance: float = 1e-4
    """Share of an output's range from which a difference is a fault."""

    @property
    def program(self) -> str:
        """The text of ``repro.py``; empty where there is none."""
        if self.model is None or not self.script:
            return ""
        graph = self.model.graph
        texts = {
            "# ENGINE": textwrap.indent(self.script.strip(), "    ").strip(),
            "TOLERANCE": f"{self.tolerance:g}",
            "INPUT_NAMES": repr([value.name for value in model_file.list_inputs(graph)]),
            "OUTPUT_NAMES": repr([value.name for value in graph.output]),
            "IT_FAILS": "it does not answer" if self.found is None else "this script cannot run the model",
            "FAILURE_CODE": "1" if self.found is None else "2",
        }
        return re.sub("|".join(texts), lambda match: texts[match[0]], _SCRIPT)  # at once: names may be like these


def write_evidence(folder: Path, finding: Finding, evidence: Evidence) -> None:
    """Write the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FINDING).write_text(finding.model_dump_json(indent=1) + "\n", encoding="utf-8")
    if evidence.model is not None:
        (folder / MODEL).write_bytes(evidence.model.SerializeToString())
    _save(folder / INPUTS, evidence.feeds)
    _save(folder / EXPECTED, evidence.expected)
    if evidence.found is not None:
        _save(folder / FOUND, evidence.found)
    if evidence.program:
        (folder / SCRIPT).write_text(evidence.program, encoding="utf-8")
    (folder / ISSUE).write_text(write_issue(finding, evidence), encoding="utf-8")


def _save(file: Path, arrays: Feeds) -> None:
    names = {f"{index}": name for index, name in enumerate(arrays)}
    content: dict[str, Any] = {key: arrays[name] for key, name in names.items()}
    np.savez(file, allow_pickle=False, names=np.array(json.dumps(names)), **content)


_SCRIPT = '''\
"""Show the fault: python repro.py. Exit code 1: the answer is wrong; 0: it is right; 2: it cannot be computed."""

import json
import pathlib
import sys

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
MODEL = str(HERE / "model.onnx")
INPUTS = INPUT_NAMES
OUTPUTS = OUTPUT_NAMES


def load(name):
    with np.load(HERE / name) as stored:
        return {value: stored[key] for key, value in json.loads(str(stored["names"])).items()}


inputs, expected = load("inputs.npz"), load("expected.npz")
try:
    # ENGINE
except ImportError as error:
    print(f"this script cannot run the model: {error}")
    sys.exit(2)
except Exception as error:
    print(f"IT_FAILS: {error}")
    sys.exit(FAILURE_CODE)
wrong = False
for name, wanted in expected.items():
    given = np.asarray(found[name])
    if given.shape != wanted.shape:
        print(f"{name}: shape {given.shape}, expected {wanted.shape}")
        wrong = True
        continue
    if not wanted.size:
        continue
    wide, right = given.astype(float), wanted.astype(float)
    finite = np.isfinite(right)
    with np.errstate(invalid="ignore"):
        apart = np.where(np.isfinite(wide) == finite, np.nan_to_num(np.abs(wide - right)), np.inf)
    span = float(np.ptp(right[finite])) if finite.any() else 0.0
    span = span or float(np.abs(right[finite]).max(initial=0)) or 1.0
    at, error = np.unravel_index(apart.argmax(), apart.shape), float(apart.max())
    far = error > TOLERANCE * span
    place, share = f"{name}{[int(each) for each in at]}", float(f"{100 * error / span:.3g}")
    print(f"{place}: {given[at]}, expected {wanted[at]} ({share:g} % of the range){' <-' if far else ''}")
    wrong = wrong or far
sys.exit(int(wrong))
'''
