"""Change a graph so that it computes as another implementation may: results of its operators differ by some rounding.

As :mod:`enginesmith.pipeline.frameworks.torch.rounding` does with a module. The changes are sines of places, so that
equal numbers are changed differently, and the opposite changes can be asked for.
"""

from pathlib import Path

import numpy as np

from enginesmith.pipeline.errors import InvalidGraph
from enginesmith.pipeline.frameworks.onnx import edit, ir
from enginesmith.pipeline.tensors import INFINITE, Array

STEP, SEED = "enginesmith/step", "enginesmith/seed"
"""Inputs, [] float32, that a graph has more: the size of changes, negative for the opposite ones; and which ones."""
_LEAST_OPSET = 12
_CHOOSING = frozenset(
    ("Identity", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Slice", "Split", "Concat", "Expand")
    + ("Gather", "GatherElements", "GatherND", "ScatterElements", "ScatterND", "Where", "Pad", "Trilu", "OneHot")
    + ("Max", "Min", "ReduceMax", "ReduceMin", "MaxPool", "GlobalMaxPool", "TopK", "Clip", "Abs", "Neg", "Sign")
    + ("Floor", "Ceil", "Round", "Cast", "CastLike", "DepthToSpace", "SpaceToDepth", "Dropout", "DequantizeLinear")
    + ("Constant", "ConstantOfShape", "EyeLike", "Range", "If", "Loop", "Scan", "Compress", "ReverseSequence", "Tile")
    + ("Hardmax", "Unique", "MaxUnpool", "MaxRoiPool", "CenterCropPad", "SequenceAt", "ConcatFromSequence")
    + ("ArrayFeatureExtractor", "Binarizer", "CastMap", "CategoryMapper", "DictVectorizer", "FeatureVectorizer")
    + ("Imputer", "LabelEncoder", "OneHotEncoder", "ZipMap")  # with those of the line above: of ai.onnx.ml
)
"""Operators whose results are numbers that they were given, or whole ones, or those of graphs within: all stay."""
_PROBABILITIES = frozenset(("Sigmoid", "HardSigmoid", "Softmax"))
_UP_TO_ONE = _PROBABILITIES | {"Tanh", "Erf"}
_BY_ELEMENT = frozenset(
    ("Add", "Sub", "Mul", "Div", "Pow", "Sqrt", "Reciprocal", "Exp", "Log", "Relu", "LeakyRelu", "PRelu", "Mod", "Sum")
    + ("Mean", "Sin", "Cos", "Tan", "Atan", "ThresholdedRelu", "Softsign", "Scaler")
)
"""Operators of which each result has a rounding error of its own size; of all others, it is one of the largest."""
_SUMS_OF_PRODUCTS = frozenset(("MatMul", "Gemm", "Conv", "ConvTranspose"))
"""Operators of which each result is a sum of products: its error is one of the size of these."""
_EXACT_SUMS = {"ReduceSum": 1, "ReduceL1": 1, "ReduceSumSquare": 1, "CumSum": 1, "MatMul": 2, "Gemm": 3}
"""Operators that are exact in any order while whole numbers are small, and how many of their inputs are added or
multiplied."""
_LEAVES = {
    "TreeEnsemble": ("leaf_weights", "base_values", "tree_roots"),
    "TreeEnsembleClassifier": ("class_weights", "base_values", "class_treeids"),
    "TreeEnsembleRegressor": ("target_weights", "base_values", "target_treeids"),
}
"""Attributes of ensembles of trees: numbers of leaves, what is added to them, and an entry or more for each tree."""
_MOST_WHOLE = 2.0**24
"""Whole number up to which all are exact in float32."""
_QUANTIZED = frozenset(("INT8", "UINT8", "INT16", "UINT16", "INT4", "UINT4", "INT2", "UINT2"))
"""Types of what a QuantizeLinear writes."""
_LOOKED_AT = 64
"""Numbers of a weight by which one is told that has others than whole ones."""
_DEVIATIONS = 4.0
_INWARDS = 4.0
_NEARER_TO_0 = 16.0
_FREQUENCY, _SPREAD, _TURN = 12.9898, 0.618034, 2.399963
_ROW = 256
"""Places of a value whose sines are computed from one first angle."""


def change_results(path: Path) -> bytes:
    """Return the graph of a file with two inputs more, :data:`STEP` and :data:`SEED`; its weights lie where they do.

    Where an output is of quantized numbers, which are compared by equality, a QuantizeLinear stays.

    Raises:
        InvalidGraph: its opset is too old, or it is larger than 2 GB.
    """
    model = edit.load(path)
    if model.opset_imports.get("", 0) < _LEAST_OPSET:
        raise InvalidGraph(f"{path.name} is of an opset before {_LEAST_OPSET}", "convert it to a later one")
    edit.infer_shapes(model, strict=True)
    builder = _Builder(model.graph)
    answers_steps = any(value.dtype is not None and value.dtype.name in _QUANTIZED for value in model.graph.outputs)
    for node in list(model.graph):
        computed = any(value is not None and not _is_constant(value) for value in node.inputs)
        if computed and node.op_type == "QuantizeLinear" and not answers_steps:
            builder.change_quantized(node)
        for value in node.outputs if computed and not _chooses(node) else ():
            builder.change(node, value)
    builder.finish()
    try:
        content: bytes = ir.to_proto(model).SerializeToString()
    except ValueError as error:
        raise InvalidGraph(f"{path.name} is larger than 2 GB", "save it with external data") from error
    return content


def _is_constant(value: "ir.Value") -> bool:
    return value.is_initializer() and not value.is_graph_input()


def _is_float(value: "ir.Value") -> bool:
    return value.dtype in (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


def _chooses(node: "ir.Node") -> bool:
    """Tell whether all results of a node are numbers that it was given, or stored ones, or whole ones."""
    if node.op_type in _CHOOSING:
        return True
    if node.op_type in ("Resize", "Upsample"):
        return node.attributes.get_string("mode", "nearest") == "nearest"
    if node.op_type == "SVMRegressor":
        return bool(node.attributes.get_int("one_class", 0))
    return node.op_type in _LEAVES and _has_exact_leaves(node)


def _has_exact_leaves(node: "ir.Node") -> bool:
    """Tell whether an ensemble of trees chooses a stored number, or adds whole ones that float32 adds exactly."""
    own = node.attributes
    if own.get("post_transform") is not None and own["post_transform"].value not in ("NONE", 0):
        return False
    leaves, bases, trees = (_read_stored(node, name) for name in _LEAVES[node.op_type])
    count = len(np.unique(trees))
    if own.get("aggregate_function") is not None and own["aggregate_function"].value in ("AVERAGE", 0) and count > 1:
        return False
    if count == 1 and not bases.any() and node.op_type != "TreeEnsembleClassifier":  # which may take them from 1
        return True
    stored = np.concatenate([leaves, bases])
    return bool((stored == np.round(stored)).all()) and (count + 1) * np.abs(stored).max(initial=0) <= _MOST_WHOLE


def _read_stored(node: "ir.Node", name: str) -> Array:
    """Read numbers from an attribute, a list or a tensor: [numbers] float64, none where there is no such attribute."""
    for each in (name, f"{name}_as_tensor"):
        if (attribute := node.attributes.get(each)) is not None:
            value = attribute.value.numpy() if attribute.type == ir.AttributeType.TENSOR else attribute.value
            return np.asarray(value, np.float64).reshape(-1)
    return np.zeros(0)


def _has_fractions(value: "ir.Value") -> bool:
    """Tell whether a weight's first numbers are not all whole."""
    if not _is_constant(value) or value.const_value is None:
        return False
    numbers = value.const_value.numpy().reshape(-1)[:_LOOKED_AT].astype(np.float32)
    return bool((numbers != np.round(numbers)).any())


def moves_steps(model: "ir.Model") -> bool:
    """Tell whether a QuantizeLinear of computed numbers with one scale is changed by :func:`change_results`."""
    answers = (value.dtype.name for value in model.graph.outputs if value.dtype is not None)
    return _QUANTIZED.isdisjoint(answers) and any(
        node.op_type == "QuantizeLinear" and edit.read(node.inputs[0]) is None and _has_one_scale(node)
        for node in model.graph
    )


def _has_one_scale(node: "ir.Node") -> bool:
    scale = node.inputs[1]
    return scale is not None and scale.shape is not None and all(size == 1 for size in scale.shape)


class _Builder:
    """Inserts what changes values."""

    def __init__(self, graph: "ir.Graph") -> None:
        self._graph, self._count, self._new_nodes = graph, 0, list[ir.Node]()
        self._constants: dict[tuple[str, bytes], ir.Value] = {}
        kind = ir.TensorType(ir.DataType.FLOAT)
        self._step, self._seed = (ir.Value(name=name, type=kind, shape=ir.Shape([])) for name in (STEP, SEED))
        self._extent = self._make("Abs", self._step)
        self._sign = self._make("Mul", self._make("Sign", self._step), self._constant(2**0.5))  # a sine varies by half
        self._graph.insert_before(self._graph[0], self._new_nodes)

    def change(self, node: "ir.Node", value: "ir.Value") -> None:
        """Change what a node writes, if it is of floats: all that reads it reads what it has become."""
        half = value.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
        read = value.uses() or value.is_graph_output()
        known = value.shape is not None and len(value.shape) > 0
        if not read or not known or not (half or value.dtype == ir.DataType.FLOAT):
            return
        self._new_nodes, self._count = [], self._count + 1
        changed = self._change_numbers(node, value, 2.0**-10 if half else 0.0)
        changed.type, changed.shape = value.type, value.shape
        ir.convenience.replace_all_uses_with(value, changed, replace_graph_outputs=True)
        for new_node in self._new_nodes:  # which read the value itself
            for index, given in enumerate(new_node.inputs):
                if given is changed:
                    new_node.replace_input_with(index, value)
        self._graph.insert_after(node, self._new_nodes)
        value.name, changed.name = f"{value.name}/exact", value.name

    def change_quantized(self, node: "ir.Node") -> None:
        """Change what a QuantizeLinear reads by one step of its scale, whatever the size of other changes.

        It rounds by up to half a step, and an engine that rounds a little earlier or later, or ties otherwise, by
        another half; as with other operators, changes are larger than errors that rounding may explain.
        """
        value, scale = node.inputs[:2]
        if value is None or not value.shape or not _is_float(value) or scale is None or not _has_one_scale(node):
            return
        self._new_nodes, self._count = [], self._count + 1
        step = self._make("Mul", self._sign, self._to_float(scale))
        moved = self._make("Add", self._to_float(value), self._make("Mul", self._make_noise(value), step))
        moved = moved if value.dtype == ir.DataType.FLOAT else self._make("Cast", moved, to=value.dtype)
        node.replace_input_with(0, moved)
        self._graph.insert_before(node, self._new_nodes)

    def finish(self) -> None:
        """Add the inputs."""
        self._graph.inputs.extend((self._step, self._seed))

    def _change_numbers(self, node: "ir.Node", value: "ir.Value", least_step: float) -> "ir.Value":
        floats = value if value.dtype == ir.DataType.FLOAT else self._make("Cast", value, to=ir.DataType.FLOAT)
        extent = self._make("Max", self._extent, self._constant(least_step)) if least_step else self._extent
        change = self._make("Mul", self._make_noise(value), self._make("Mul", self._sign, extent))
        if node.op_type in _BY_ELEMENT:
            moved = self._make("Add", floats, self._make("Mul", change, floats))
            kept = self._find_exact(floats, value.dtype)
        else:
            moved, kept = self._change_sum(node, floats, change, extent)
            if (exact := self._find_exact_sum(node, floats, value.dtype)) is not None:
                kept = self._make("Or", kept, exact)
        moved = self._make("Where", kept, floats, moved)
        return moved if floats is value else self._make("Cast", moved, to=value.dtype)

    def _change_sum(
        self, node: "ir.Node", floats: "ir.Value", change: "ir.Value", extent: "ir.Value"
    ) -> "tuple[ir.Value, ir.Value]":
        """Return changed numbers, and a mask of those that stay: what is infinite, or NaN."""
        operator = node.op_type
        size = self._make("Abs", floats)
        usable = self._make("Less", size, self._constant(INFINITE))  # not so for NaN
        known = self._make("Where", usable, floats, self._constant(0.0))
        if operator in _UP_TO_ONE:
            large = self._make("Greater", size, self._constant(0.5))
            small = self._constant(float(operator in _PROBABILITIES))
            inwards = self._make("Where", large, self._make("Neg", self._make("Sign", known)), small)
            inwards = self._make("Mul", inwards, self._make("Mul", extent, self._constant(_INWARDS)))
            change = self._make("Add", change, inwards)
        else:
            limit = self._make_largest(known)
            if operator in _SUMS_OF_PRODUCTS:
                root = self._make("Sqrt", self._make_squared_sum(node))  # rounding moves sums by some times that
                spread = self._make("Mul", root, self._constant(_DEVIATIONS))
                limit = self._make("Min", limit, self._make("Max", size, spread))
            change = self._make("Mul", change, limit)
        moved = self._make("Add", known, change)
        beside = moved if operator in _PROBABILITIES else self._make("Mul", moved, known)  # which may move away from 0
        same_sign = self._make("Greater", beside, self._constant(0.0))
        moved = self._make("Where", same_sign, moved, self._make("Div", known, self._constant(_NEARER_TO_0)))
        return moved, self._make("Not", usable)

    def _find_exact(self, floats: "ir.Value", dtype: "ir.DataType | None") -> "ir.Value":
        """Mark numbers that nobody rounds: all if they are whole and small, those of ``find_infinite``, Inf and NaN."""
        size = self._make("Abs", floats)
        finite = self._make("Less", size, self._constant(np.inf))
        largest = self._make_largest(self._make("Where", finite, size, self._constant(0.0)))
        alike = self._make("Equal", size, largest)
        several = self._make("Greater", self._count_marks(alike), self._constant(1.0))
        infinite = self._make("GreaterOrEqual", largest, self._constant(INFINITE))
        counts = self._make("And", self._are_whole(floats), self._is_small(largest, dtype))
        exact = self._make("Or", counts, self._make("And", alike, self._make("And", several, infinite)))
        return self._make("Or", exact, self._make("Not", finite))

    def _find_exact_sum(self, node: "ir.Node", floats: "ir.Value", dtype: "ir.DataType | None") -> "ir.Value | None":
        """Mark sums of whole numbers, [] bool, whose sizes are exact together; None for other operators and weights.

        A product of whole numbers is no larger than its square, so that small sums of squares have small parts.
        """
        given = [value for value in node.inputs[: _EXACT_SUMS.get(node.op_type, 0)] if value is not None]
        if not given or any(_has_fractions(value) for value in given):
            return None
        numbers = [self._to_float(value) for value in given]
        if node.op_type in _SUMS_OF_PRODUCTS:
            size = self._make_squared_sum(node)
        else:
            sizes = [self._make("Abs", numbers[0]), *(value for value in node.inputs[1:] if value is not None)]
            size = self._make(node.op_type, *sizes, **node.attributes)
        exact = self._is_small(self._make_largest(size), dtype)
        for each in (floats, *numbers):
            exact = self._make("And", exact, self._are_whole(each))
        return exact

    def _to_float(self, value: "ir.Value") -> "ir.Value":
        return value if value.dtype == ir.DataType.FLOAT else self._make("Cast", value, to=ir.DataType.FLOAT)

    def _are_whole(self, floats: "ir.Value") -> "ir.Value":
        whole = self._make("Equal", floats, self._make("Round", floats))
        return self._make("Less", self._count_marks(self._make("Not", whole)), self._constant(1.0))

    def _is_small(self, largest: "ir.Value", dtype: "ir.DataType | None") -> "ir.Value":
        """Tell whether numbers of a dtype are exact up to this one."""
        most = {ir.DataType.FLOAT16: 2.0**11, ir.DataType.BFLOAT16: 2.0**8}.get(dtype or ir.DataType.FLOAT, _MOST_WHOLE)
        return self._make("LessOrEqual", largest, self._constant(most))

    def _count_marks(self, marks: "ir.Value") -> "ir.Value":
        return self._make("ReduceSum", self._make("Cast", marks, to=ir.DataType.FLOAT), keepdims=0)

    def _make_noise(self, value: "ir.Value") -> "ir.Value":
        """Make sines of mean 0, one for each place of a value.

        As sin(a + b) = sin a cos b + cos a sin b, those of all places are a product of two small matrices, of the rows'
        first angles and of the angles within a row. Computing each sine took as long as the rest of the graph.
        """
        frequency = _FREQUENCY * (1 + self._count * _SPREAD % 1)
        within = frequency * np.arange(_ROW)
        by_place = self._constant(np.stack([np.cos(within), np.sin(within)]).astype(np.float32))
        size = self._make("Size", value)
        rows = self._make("Div", self._make("Cast", size, to=ir.DataType.FLOAT), self._constant(float(_ROW)))
        places = self._make("Range", self._constant(0.0), self._make("Ceil", rows), self._constant(1.0))
        angles = self._make("Mul", places, self._constant(frequency * _ROW % (2 * np.pi)))
        turn = self._make("Mul", self._seed, self._constant(_TURN * (1 + self._count)))
        first = self._make("Reshape", self._make("Add", angles, turn), self._constant(np.array([-1, 1])))
        by_row = self._make("Concat", self._make("Sin", first), self._make("Cos", first), axis=1)
        noise = self._make("Reshape", self._make("MatMul", by_row, by_place), self._constant(np.array([-1])))
        end = self._make("Reshape", size, self._constant(np.array([1])))
        used = self._make("Slice", noise, self._constant(np.array([0])), end)
        return self._make("Reshape", used, self._make("Shape", value))

    def _make_squared_sum(self, node: "ir.Node") -> "ir.Value":
        squares = []
        for value in node.inputs:
            if value is not None:
                floats = self._to_float(value)
                squares.append(self._make("Mul", floats, floats))
        return self._make("Abs", self._make(node.op_type, *squares, **node.attributes))  # alpha may be negative

    def _make_largest(self, known: "ir.Value") -> "ir.Value":
        flat = self._make("Reshape", self._make("Abs", known), self._constant(np.array([-1])))
        every = self._make("Concat", flat, self._constant(np.zeros(1, np.float32)), axis=0)  # a value may be empty
        return self._make("ReduceMax", every, keepdims=0)

    def _make(self, operator: str, *inputs: "ir.Value", **attributes: object) -> "ir.Value":
        node = ir.node(operator, inputs, attributes)  # type: ignore[arg-type]
        self._new_nodes.append(node)
        return node.outputs[0]

    def _constant(self, numbers: Array | float) -> "ir.Value":
        array = numbers if isinstance(numbers, np.ndarray) else np.array(numbers, np.float32)
        key = (f"{array.dtype}{array.shape}", array.tobytes())
        if key not in self._constants:
            name = f"enginesmith/constant_{len(self._constants)}"
            self._constants[key] = ir.Value(name=name, const_value=ir.tensor(array, name=name))
            self._graph.register_initializer(self._constants[key])
        return self._constants[key]
