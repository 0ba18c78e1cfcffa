"""Find the values of a float graph that calibration looks at, and run it in ONNX Runtime with these as outputs."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import sched_getaffinity
from pathlib import Path
from typing import Any

import numpy as np

from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks.onnx import edit, evaluator, ir, model_file
from enginesmith.pipeline.passes.quantize.layers import CONVOLUTIONS, PRODUCTS, SAME_NUMBERS
from enginesmith.pipeline.passes.rescale.axes import find_axis
from enginesmith.pipeline.passes.rescale.labels import label
from enginesmith.pipeline.passes.rescale.products import find
from enginesmith.pipeline.tensors import Array, Feeds


class ActivationCapture:
    """An open session; how many samples are fed at once can change the last bits of what it answers."""

    def __init__(self, session: Any, values: Sequence[str], failures: tuple[type[Exception], ...]) -> None:
        self._session, self._values, self._failures = session, tuple(values), failures
        self._inputs = {value.name for value in session.get_inputs()}
        self._computed = [name for name in dict.fromkeys(values) if name not in self._inputs]

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """Return the values, in the order in which they were named; feeds that the graph does not read are left out.

        Raises:
            ModelError: it does not take these feeds.
        """
        given = {name: value for name, value in feeds.items() if name in self._inputs}
        try:
            computed = self._session.run(self._computed, given) if self._computed else []
        except self._failures as error:
            raise ModelError(f"{evaluator.TITLE} failed on these feeds: {_shorten(error)}") from error
        everything = {**given, **dict(zip(self._computed, computed, strict=True))}
        return {name: everything[name] for name in self._values}


@contextmanager
def open_activation_capture(path: Path, values: Sequence[str]) -> Iterator[ActivationCapture]:
    """Open a graph on the CPU for reading out values of its main graph; inputs and outputs may be among them.

    The runtime's own optimizations are off, so that every value is there. Weights that lie beside the graph are mapped
    and none is laid out anew, so it takes about one copy of the weights and the memory of the values that are read out.

    Raises:
        ModelError: there is no such value, or ONNX Runtime cannot load the graph.
        MissingCapability: ONNX Runtime is not installed.
    """
    library, failures = evaluator.import_library()
    failures = (*failures, ValueError)  # what is missing or of another rank
    options = evaluator.session_options(library, len(sched_getaffinity(0)))
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    options.add_session_config_entry("session.disable_prepacking", "1")
    folder = str(path.parent.absolute())
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
    try:
        session = library.InferenceSession(_with_outputs(path, values), options, ["CPUExecutionProvider"])
    except failures as error:
        raise ModelError(f"{evaluator.TITLE} cannot load {path.name}: {_shorten(error)}") from error
    capture = ActivationCapture(session, values, failures)
    del session
    try:
        yield capture
    finally:
        del capture._session  # frees its memory, whoever still holds the object


def _with_outputs(path: Path, values: Sequence[str]) -> bytes:
    """Return the serialized graph; ONNX Runtime finds out the types of what is added."""
    from google.protobuf.message import EncodeError

    model = model_file.read(path)
    known = {value.name for value in (*model.graph.input, *model.graph.output)}
    missing = [name for name in dict.fromkeys(values) if name not in known]
    node_outputs = {name for node in model.graph.node for name in node.output}
    if unknown := [name for name in missing if name not in node_outputs]:
        raise ModelError(f"{path.name} computes no value {unknown[0]!r} in its main graph, so it cannot be read out")
    for name in missing:
        model.graph.output.add().name = name
    try:
        data: bytes = model.SerializeToString()
    except (EncodeError, ValueError) as error:
        raise ModelError(f"{path.name} with more outputs is larger than 2 GB", "save it with external data") from error
    return data


def _shorten(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]


_AROUND = frozenset(
    ("Add", "Sub", "Mul", "Div", "Concat", "Split", "Slice", "Gather", "Pad", "Resize", "Expand", "Tile", "Where")
    + ("Relu", "LeakyRelu", "PRelu", "Clip", "Sigmoid", "HardSigmoid", "HardSwish", "Gelu", "Tanh", "Softmax", "Mish")
    + ("MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool", "ReduceMean")
    + ("LayerNormalization", "RMSNormalization", "BatchNormalization", "InstanceNormalization", "GroupNormalization")
)
"""Operators whose inputs and outputs engines read and write in few bits where they stand next to a product."""
_MIXING = frozenset(("Add", "Mul", "Concat", "MatMul", "Attention", "AveragePool", "GlobalAveragePool", "ReduceMean"))
"""Operators behind which channels have other sizes than before, relative to each other."""


@dataclass(frozen=True)
class CalibrationPoints:
    """Names of values of the main graph; values within the bodies of If, Loop and Scan are not among them."""

    values: tuple[str, ...]
    """Every float value, in the order in which they are computed: what has to be run with."""
    histograms: frozenset[str]
    """Values that int8 may have to represent."""
    channels: Mapping[str, int]
    """Channel axis of what is multiplied by a constant weight, and of what is scaled along with it; −1 is the last."""
    products: frozenset[str]
    """Values that products read or make: these have to be finite."""
    same: Mapping[str, str]
    """Value → another one with the same numbers in another shape, which stands for it in the sets above, but for
    ``channels``.
    """

    @property
    def taps(self) -> tuple[str, ...]:
        """Return the values that are worth reading out."""
        return tuple(name for name in self.values if name not in self.same or name in self.channels)


def find_calibration_points(model: "ir.Model") -> CalibrationPoints:
    """Return the values of a graph that calibration looks at; types that it does not say are inferred, in place."""
    graph = model.graph
    if any(value.type is None for node in graph for value in node.outputs):
        edit.infer_shapes(model, strict=True)
    inputs = [value for value in graph.inputs if value.name not in graph.initializers]
    computed = (value for node in graph for value in node.outputs)
    floats = {value.name: value for value in (*inputs, *computed) if value.name and _may_be_float(value)}
    same: dict[str, str] = {}
    histograms: set[str] = set()
    products: set[str] = set()
    channels: dict[str, int] = {}
    for node in graph:
        if node.domain:
            continue
        near = [value.name for value in (*node.inputs, *node.outputs) if value is not None and value.name in floats]
        names = [same.get(name, name) for name in near if name]
        if node.op_type in SAME_NUMBERS and len(names) == 2:
            same[names[1]] = names[0]
        if node.op_type in _AROUND or node.op_type in PRODUCTS:
            histograms.update(names)
        if node.op_type in PRODUCTS:
            products.update(names)
            data, factor = (*node.inputs, None)[:2]
            plain = node.op_type in CONVOLUTIONS or not node.attributes.get_int("transA", 0)
            if data is not None and data.name in floats and factor is not None and _is_constant(factor) and plain:
                channels.setdefault(str(data.name), 1 if node.op_type in CONVOLUTIONS else -1)
    channel_labels = label(model, find(model))
    ended = np.zeros(channel_labels.count, bool)
    for end in channel_labels.ends:
        ended[end.labels] = True
    for value, labels in channel_labels.values.items():
        mixed = ended[labels].any() or any(use.node.op_type in _MIXING for use in value.uses())
        axis = find_axis(labels)
        if mixed and value.name in histograms and axis is not None and not channel_labels.fixed[labels].all():
            channels.setdefault(str(value.name), axis)
    return CalibrationPoints(tuple(map(str, floats)), frozenset(histograms), channels, frozenset(products), same)


def _is_constant(value: "ir.Value") -> bool:
    producer = value.producer()
    return value.is_initializer() if producer is None else producer.op_type == "Constant"


def _may_be_float(value: "ir.Value") -> bool:
    """Tell whether it is a float as numpy knows them, as far as the graph says."""
    if _is_constant(value) or (value.type is not None and not isinstance(value.type, ir.TensorType)):
        return False
    return value.dtype in (None, ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
