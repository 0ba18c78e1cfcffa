"""ONNX graphs of the zoo's models in several precisions, made by the product, for benchmarks that build them.

    python benchmarks/graphs.py --out build/graphs --models resnet50 unet --precisions fp32 int8

A graph lies in FOLDER/MODEL-PRECISION/model.onnx, large weights beside it, what the product said of it in made.json;
what is there already is left alone. Inputs keep the zoo's dynamic dimensions. Calibration samples are made up and most
of the zoo's weights are random, so the quantized graphs are good for measuring speed and memory, and for nothing else.
"""

import argparse
import dataclasses
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from command import Answer, call

MODELS = ("resnet50", "mobilenet_v2", "unet", "vit_b16", "bert_base", "lstm")
PRECISIONS = ("fp32", "fp16", "bf16", "int8", "int8+fp16", "fp8", "int4-weights")
SHAPES = {"bert_base": ("--shape", "sequence=16:128:384")}
"""Options for dynamic dimensions other than the batch, which an ONNX file brings no range for."""
ENGINE = "tensorrt_rtx"
"""Whose rules Q/DQ pairs are placed by, unless another is asked for."""
_FILE, _FOUND = "model.onnx", "made.json"
_QUICK = ("--synthetic-calibration", "--samples", "8", "--search-steps", "1", "--batch", "1,2")


class NothingToQuantize(ValueError):
    """The product makes no such graph, and says why."""


@dataclass(frozen=True)
class Made:
    """A graph, or why there is none."""

    path: Path | None
    seconds: float
    summary: str = ""
    fidelity: Sequence[dict[str, Any]] = ()
    """At each point of the shapes, as ONNX Runtime computes the graph."""
    failure: str = ""
    reason: str = ""


def make(model: str, precision: str, folder: Path) -> Path:
    """Path of the graph of a zoo model in a precision; made unless it is there.

    Raises:
        NothingToQuantize: the product refuses, as it does ``int4-weights`` of a model without matrix products.
    """
    made = attempt(model, precision, folder)
    if made.path is None:
        raise NothingToQuantize(made.reason)
    return made.path


def attempt(model: str, precision: str, folder: Path, engine: str = ENGINE) -> Made:
    """Quantize like :func:`make`, for any engine; a refusal is returned with its reason."""
    target = folder / (f"{model}-{precision}" if engine == ENGINE else f"{model}-{precision}-{engine}")
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            out = Path(scratch, "whole")
            out.mkdir()
            answer = _called(model, precision, folder, out / _FILE, engine)
            found = _found(answer, scratch)
            if answer.exit_code:
                return found
            (out / _FOUND).write_text(json.dumps(dataclasses.asdict(found)))
            out.rename(target)  # at once, so that what is there is complete
    return Made(**{**json.loads((target / _FOUND).read_text()), "path": target / _FILE})


def _called(model: str, precision: str, folder: Path, out: Path, engine: str) -> Answer:
    common = ("-o", str(out), "--store", str(folder / "store"), *SHAPES.get(model, ()))
    if precision == "fp32":
        return call("export", model, *common, "--batch", "1,2")
    return call("precision", model, *common, "--precision", precision, "--engine", engine, *_QUICK)


def _found(answer: Answer, scratch: str) -> Made:
    seconds = round(answer.seconds, 1)
    if answer.exit_code:
        return Made(None, seconds, failure=answer.failure, reason=answer.message.replace(scratch, "…"))
    summary = str(answer.document["summary"]).partition(": ")[2].splitlines()[0]
    return Made(None, seconds, summary, answer.document["fidelity"])


def main() -> None:
    """Make the graphs named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    arguments = parser.parse_args()
    for model in arguments.models:
        for precision in arguments.precisions:
            made = attempt(model, precision, arguments.out)
            result = made.path or f"not made: {made.reason}"
            print(f"{model:14}{precision:14}{made.seconds:6.1f} s  {result}", flush=True)


if __name__ == "__main__":
    main()
