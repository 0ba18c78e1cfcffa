"""A random graph while it grows: its nodes, weights and values, and the source of chance.

Shapes are followed as they are made, so that no operator gets what it does not take. The first axis is the batch
everywhere. Weights are scaled by what they add up, to stay near 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

BATCH = "batch"
FLOAT, INT64, BOOL, HALF = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL, TensorProto.FLOAT16
VOCABULARY = 4
"""Integers that are fed are smaller, and everything that they look up has at least as many rows."""
Array = np.ndarray[Any, Any]
Shape = tuple[int, ...]
"""Sizes of a value behind its batch."""


@dataclass(frozen=True)
class Value:
    """A value of the graph: its name, and its sizes behind the batch."""

    name: str
    shape: Shape
    kind: int = FLOAT


@dataclass
class RandomGraph:
    """Collect the nodes, weights and values of a graph that is being made."""

    seed: int
    rng: np.random.Generator
    opset: int
    batch: int | str
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    weights: dict[str, Array] = field(default_factory=dict)
    values: list[Value] = field(default_factory=list)
    inputs: list[onnx.ValueInfoProto] = field(default_factory=list)
    extras: list[onnx.ValueInfoProto] = field(default_factory=list)
    """Outputs that have no batch."""
    count: int = 0

    def chance(self, share: float) -> bool:
        """Draw whether something happens."""
        return bool(self.rng.random() < share)

    def choose(self, options: Sequence[Any]) -> Any:
        """Draw one of several."""
        return options[int(self.rng.integers(len(options)))]

    def name(self, word: str) -> str:
        """Make a name of its own."""
        self.count += 1
        return f"{word}_{self.count}"

    def weight(self, *shape: int, scale: float | None = None) -> str:
        """Add a weight of normal numbers; sometimes return one of the same shape that is there already."""
        fan = math.prod(shape[1:]) if len(shape) > 1 else 4
        same = [name for name, one in self.weights.items() if one.shape == shape and one.dtype == np.float32]
        if scale is None and same and self.chance(0.3):
            return str(self.choose(same))
        numbers = self.rng.standard_normal(shape).astype(np.float32) * (scale or 1 / math.sqrt(max(fan, 1)))
        return self.constant(numbers.astype(np.float32))

    def constant(self, numbers: Any, dtype: Any = None) -> str:
        """Add an initializer, or rarely a Constant node."""
        array, name = np.asarray(numbers, dtype), self.name("c")
        if self.chance(0.1):
            self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array)))
        else:
            self.weights[name] = array
        return name

    def integers(self, *numbers: int) -> str:
        """Add a list of integers."""
        return self.constant(list(numbers), np.int64)

    def node(self, operator: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> str:
        """Add a node; return its first output."""
        names = [self.name(operator.lower()) for _ in range(outputs)]
        label = self.name(operator) if self.chance(0.7) else ""
        self.nodes.append(helper.make_node(operator, list(inputs), names, name=label, **attributes))
        return names[0]

    def last_outputs(self) -> list[str]:
        """List the outputs of the node that was added last."""
        return list(self.nodes[-1].output)

    def add(self, name: str, shape: Sequence[int], kind: int = FLOAT) -> Value:
        """Note a value that later nodes may read."""
        value = Value(name, tuple(shape), kind)
        self.values.append(value)
        return value

    def pick(self, rank: int | None = None, kind: int = FLOAT) -> Value | None:
        """Draw a value of a rank behind the batch, later ones more often."""
        fitting = [one for one in self.values if one.kind == kind and rank in (None, len(one.shape))]
        if not fitting:
            return None
        return fitting[-1 - min(int(self.rng.geometric(0.5)) - 1, len(fitting) - 1)]

    def describe(self, value: Value, name: str = "") -> onnx.ValueInfoProto:
        """Describe a value as inputs and outputs are."""
        return helper.make_tensor_value_info(name or value.name, value.kind, [self.batch, *value.shape])
