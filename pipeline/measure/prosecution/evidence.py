"""Hold what shows a fault: a small graph, its inputs, the right answers, and the script that compares them."""

import re
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.tensors import Feeds

if TYPE_CHECKING:
    import onnx


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
