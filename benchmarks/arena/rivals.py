"""The rivals, and an environment for each toolkit, installed from the index that pip is configured for."""

import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from models import Model
from summary import OURS

_ORT = ("onnxruntime==1.31.1", "onnx==1.23.2", "sympy==1.14.0", "numpy==2.4.6")
_TORCH = ("torch==2.13.0", "numpy==2.4.6", "pydantic==2.14.3", "safetensors==0.8.0", "transformers==5.23.0")
ENVIRONMENTS: Mapping[str, Sequence[str]] = {
    "onnxruntime": _ORT,
    "onnxruntime-transformers": (*_ORT, "torch==2.13.0", "transformers==5.23.0"),
    "openvino": ("openvino==2026.4.1", "nncf==3.4.0"),
    "torch": (*_TORCH, "torchao==0.18.0", "setuptools"),
    "inc": (*_TORCH, "neural-compressor-pt==3.10", "setuptools"),
    "olive": ("olive-ai==0.13.0", "onnxruntime==1.31.1", "torch==2.13.0", "requests"),
    "modelopt": ("nvidia-modelopt[onnx]==0.47.0", "torch==2.13.0"),
}
"""Environment → what pip installs into it. enginesmith runs in the environment that runs the arena."""


@dataclass(frozen=True)
class Rival:
    """Name what makes and runs a model."""

    environment: str
    recipe: str
    """``module:recipe`` of ``recipes/``."""
    per_cell: bool = False
    """Made for each batch size and number of threads, not once for a model."""
    needs_module: bool = False
    only_transformers: bool = False

    @property
    def takes_graph(self) -> bool:
        """Tell whether its job begins with the model exported to ONNX."""
        return bool(self.environment) and not self.needs_module

    def refuses(self, model: Model) -> str:
        """Tell why a model is not for this rival; empty if it is."""
        if self.needs_module and not model.module:
            return "the model is an ONNX file, and this rival takes PyTorch modules"
        return "it is for transformers" if self.only_transformers and not model.transformer else ""


def _torch(recipe: str, environment: str = "torch") -> Rival:
    return Rival(environment, recipe, per_cell=True, needs_module=True)


RIVALS: Mapping[str, Rival] = {
    OURS: Rival("", "ours:optimize", per_cell=True),
    "eager": Rival("torch", "pytorch:eager", needs_module=True),
    "ort-fp32": Rival("onnxruntime", "ort:fp32"),
    "ort-static": Rival("onnxruntime", "ort:static"),
    "ort-static-u8": Rival("onnxruntime", "ort:static_u8"),
    "ort-dynamic": Rival("onnxruntime", "ort:dynamic"),
    "ort-optimizer": Rival("onnxruntime-transformers", "ort:optimizer", only_transformers=True),
    "ort-optimizer-dynamic": Rival("onnxruntime-transformers", "ort:optimizer_dynamic", only_transformers=True),
    "openvino-fp32": Rival("openvino", "ov:fp32"),
    "openvino-bf16": Rival("openvino", "ov:bf16"),
    "openvino-nncf": Rival("openvino", "ov:nncf"),
    "openvino-nncf-control": Rival("openvino", "ov:nncf_control"),
    "compile": _torch("pytorch:compile"),
    "compile-autotune": _torch("pytorch:compile_autotune"),
    "compile-freezing": _torch("pytorch:compile_freezing"),
    "aotinductor": _torch("pytorch:aotinductor"),
    "torchao-dynamic": _torch("pytorch:torchao"),
    "inc-static": _torch("compressors:inc", "inc"),
    "olive": Rival("olive", "compressors:olive"),
    "modelopt": Rival("modelopt", "compressors:modelopt"),
}


def python(environment: str, work: Path) -> Path:
    """Return the interpreter of an environment; the environment is made unless it is there as listed.

    Raises:
        subprocess.CalledProcessError: pip fails.
    """
    if not environment:
        return Path(sys.executable)
    folder, wanted = work / "environments" / environment, "\n".join(ENVIRONMENTS[environment])
    stamp, interpreter = folder / "installed.txt", folder / "bin" / "python"
    if not stamp.is_file() or stamp.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([interpreter, "-m", "pip", "install", "-q", *ENVIRONMENTS[environment]], check=True)
        stamp.write_text(wanted)
    return interpreter
