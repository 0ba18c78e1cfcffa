"""Describe a rival's job: a model's files, and the cell that it is measured in. Runs in the rival's environment."""

import importlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Feeds = Mapping[str, NDArray[Any]]
Call = Callable[[Feeds], Any]
"""From feeds to the outputs in order, as arrays, or to the only one."""
CALIBRATION, EVALUATION, JUDGEMENT = "calibration", "evaluation", "judgement"
KNOWN, PEAK = "known", "peak_bytes.txt"
"""Calibration and evaluation together; the file of a job that says the peak memory of its first process."""
_PER_CHANNEL_OPSET = 13


@dataclass(frozen=True)
class Job:
    """Record the model, the cell and the folder that a rival writes its files to."""

    folder: str
    model: str
    """Folder with model.onnx, and data with labels: calibration, evaluation, known, and judgement (not for rivals)."""
    source: str
    """MODEL of enginesmith's command line."""
    factory: str
    """``module:function`` that returns (module, example); empty where the model is only an ONNX file."""
    metric: str
    transformer: bool
    max_drop: float
    batch: int
    threads: int

    @classmethod
    def read(cls, path: Path) -> "Job":
        """Read what :meth:`write` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")

    @property
    def graph(self) -> Path:
        """Path of the float32 graph, as exported, with a dynamic batch."""
        return Path(self.model, "model.onnx")

    def upgraded_graph(self) -> Path:
        """Path of the float32 graph in an opset whose DequantizeLinear has scales per channel."""
        import onnx
        from onnx import version_converter

        graph = onnx.load(self.graph)
        if all(each.domain or each.version >= _PER_CHANNEL_OPSET for each in graph.opset_import):
            return self.graph
        onnx.save(version_converter.convert_version(graph, _PER_CHANNEL_OPSET), self.file("upgraded.onnx"))
        return self.file("upgraded.onnx")

    def file(self, name: str) -> Path:
        """Path of a file of the rival's own."""
        return Path(self.folder, name)

    def data(self, part: str) -> tuple[dict[str, NDArray[Any]], NDArray[Any] | None]:
        """Read a part of the data: inputs [rows, ...] by name, and labels where there are some."""
        with np.load(Path(self.model, f"{part}.npz")) as arrays:
            feeds = {name: arrays[name] for name in arrays.files}
        return feeds, feeds.pop("labels", None)

    def rows(self, size: int = 1, part: str = CALIBRATION) -> Iterator[dict[str, NDArray[Any]]]:
        """Iterate over feeds of so many rows each; a remainder is left out."""
        feeds, _ = self.data(part)
        count = len(next(iter(feeds.values())))
        for first in range(0, count - size + 1, size):
            yield {name: np.ascontiguousarray(array[first : first + size]) for name, array in feeds.items()}

    def example(self) -> dict[str, NDArray[Any]]:
        """Read the feeds that calls are timed with: the first rows of the calibration data."""
        return next(self.rows(self.batch))

    def score(self, outputs: NDArray[Any], labels: NDArray[Any]) -> NDArray[Any]:
        """Judge a model's first output by the metric; one number for each row, more is better."""
        if self.metric == "top1":
            return np.asarray(outputs.argmax(-1) == labels, np.float64)
        path, _, function = self.metric.rpartition(":")
        spec = importlib.util.spec_from_file_location("metrics", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return np.asarray(getattr(module, function)({"output": outputs}, labels))

    def module(self) -> Any:
        """Build the PyTorch module with the weights of the graph."""
        import torch
        from safetensors.torch import load_file

        name, _, function = self.factory.partition(":")
        torch.manual_seed(0)
        module, _ = getattr(importlib.import_module(name), function)()
        module.load_state_dict(load_file(Path(self.model, "weights.safetensors")))
        return module.eval().requires_grad_(False)


class Recipe(NamedTuple):
    """Prepare a rival once (its files go to the job's folder), and open its result."""

    prepare: Callable[[Job], None]
    open: Callable[[Job], Call]
