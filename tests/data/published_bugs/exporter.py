"""PyTorch's exporter and onnxscript, which rewrites what it exports."""

import numpy as np
from onnx import TensorProto, numpy_helper

from published_bugs import probes
from published_bugs.case import Graphs, graph, known_bug

_FUNCTIONS = "pipeline/passes/export/functions.py"


def _weights(**shapes: tuple[int, ...]) -> list[TensorProto]:
    rng = np.random.default_rng(0)
    return [
        numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), key) for key, shape in shapes.items()
    ]


def _two_convolutions(first: str, second: str) -> Graphs:
    """Make two convolutions with biases; the wrong graph takes other names for them."""
    head = "(float[N,3,6,6] x) => (float[N,4,6,6] y)"
    text = "{{ p = Conv<pads=[1,1,1,1]>(x, w1, {}) q = Relu(p) y = Conv<pads=[1,1,1,1]>(q, w2, {}) }}"
    weights = _weights(w1=(4, 3, 3, 3), w2=(4, 4, 3, 3), b1=(4,), b2=(4,))
    return Graphs(
        graph(head + text.format("b1", "b2"), 18, *weights), graph(head + text.format(first, second), 18, *weights)
    )


@known_bug(
    "pytorch/pytorch#166797",
    "the exporter gives a convolution the bias of another one when it folds BatchNorm (ResNet-50)",
    "onnxscript",
    "torch of November 2025",
)
def bias_of_another() -> Graphs:
    return _two_convolutions("b1", "b1")


@known_bug(
    "pytorch/pytorch#169178",
    "ResNet-18 exported with a dynamic batch is right for no picture; rebuilt as two biases that changed places",
    "onnxscript",
    "torch 2.9.1, onnxscript 0.5.6",
)
def biases_swapped() -> Graphs:
    return _two_convolutions("b2", "b1")


@known_bug(
    "microsoft/onnxscript#3027",
    "folding BatchNorm into a Gemm forgets beta in the bias, and applies it to the folded bias instead",
    "onnxscript",
    "September 2026, before #3027",
    affected="<0.7.2",
    probe=probes.differs(probes.run_rewritten, probes.run_unoptimized),
)
def gemm_beta() -> Graphs:
    head = "(float[N,6] x) => (float[N,4] y)"
    rng = np.random.default_rng(1)
    folded = {"w": rng.standard_normal((6, 4)), "b": rng.standard_normal(4), "scale": rng.uniform(0.5, 2, 4)}
    folded |= {"shift": rng.standard_normal(4), "mean": rng.standard_normal(4), "var": rng.uniform(0.5, 2, 4)}
    factor = folded["scale"] / np.sqrt(folded["var"] + 1e-5)
    bias = (folded["b"] - folded["mean"]) * factor + folded["shift"]
    tensors = [numpy_helper.from_array(value.astype(np.float32), key) for key, value in folded.items()]
    made = [("w", folded["w"] * factor), ("b", bias)]
    wrong = [numpy_helper.from_array(value.astype(np.float32), key) for key, value in made]
    gemm = "Gemm<beta=2.0>(x, w, b)"
    normalized = f"{{ p = {gemm} y = BatchNormalization(p, scale, shift, mean, var) }}"
    return Graphs(graph(f"{head} {normalized}", 18, *tensors), graph(f"{head} {{ y = {gemm} }}", 18, *wrong))


@known_bug(
    "microsoft/onnxscript#2589",
    "whole numbers that are divided with a rounding mode are divided as float32; mended for floor_divide alone",
    "onnxscript",
    "September 2025",
    affected=">=0.5",
    probe=probes.exports_wrongly(
        lambda torch, key: torch.div(key, 7, rounding_mode="floor"), 123_456_789 * np.arange(60).reshape(10, 6)
    ),
    guard=_FUNCTIONS,
    slow=True,
)
def whole_division() -> Graphs:
    text = "(int64[N,6] x) => (int64[N,6] y) <int64 large = {123456789}, int64 by = {7}, float seven = {7}>"
    text += " { k = Mul(x, x) i = Mul(k, large)"
    return Graphs(
        graph(text + " y = Div(i, by) }", 18),
        graph(text + " f = Cast<to=1>(i) q = Div(f, seven) r = Floor(q) y = Cast<to=7>(r) }", 18),
    )


@known_bug(
    "pytorch/pytorch#14830",
    "the logarithm of a sigmoid is computed as that, and is -inf where the sigmoid is 0",
    "onnxscript",
    "December 2018",
    affected=">=0.5",
    probe=probes.exports_wrongly(
        lambda torch, x: torch.nn.functional.logsigmoid(x), np.array([-20, -90, 3], np.float32)
    ),
    guard=_FUNCTIONS,
    slow=True,
)
def log_of_sigmoid() -> Graphs:
    head = "(float[N,6] x) => (float[N,6] y)"
    return Graphs(
        graph(f"{head} {{ n = Neg(x) p = Softplus(n) y = Neg(p) }}"), graph(f"{head} {{ s = Sigmoid(x) y = Log(s) }}")
    )


@known_bug(
    "pytorch/pytorch#162570",
    "atan2 is NaN at the origin; mended there, it is still -pi for pi on the negative axis",
    "onnxscript",
    "torch 2.7.1",
    affected=">=0.5",
    probe=probes.exports_wrongly(lambda torch, x: torch.atan2(0 * x, -x), np.array([1, 2], np.float32)),
    guard=_FUNCTIONS,
    slow=True,
)
def angle_of_the_negative_axis() -> Graphs:
    text = "(float[N,6] x) => (float[N,6] y) <float zero = {{0}}, float pi = {{3.1415927}}>"
    text += " {{ y0 = Relu(x) x0 = Abs(x) n0 = Neg(x0) q = Div(y0, n0) a = Atan(q)"
    text += " above = {}(y0, zero) p = Add(a, pi) m = Sub(a, pi) y = Where(above, p, m) }}"
    return Graphs(graph(text.format("GreaterOrEqual")), graph(text.format("Greater")))


@known_bug(
    "onnx/onnx#5100",
    "scatter_reduce of means takes one of the values, as ONNX has no means",
    "onnxscript",
    "April 2023",
    affected=">=0.5",
    probe=probes.exports_wrongly(
        lambda torch, x: x.scatter_reduce(0, torch.tensor([0, 0, 1]), x, "mean", include_self=False),
        np.array([1, 2, 4], np.float32),
    ),
    guard="pipeline/passes/export/translations.py",
    slow=True,
)
def mean_by_place() -> Graphs:
    head = "(float[3] x) => (float[2] y) <int64[3] at = {0, 0, 1}, float[2] none = {0, 0}, float[2] count = {2, 1}>"
    return Graphs(
        graph(f'{head} {{ s = ScatterElements<reduction="add">(none, at, x) y = Div(s, count) }}'),
        graph(f"{head} {{ y = ScatterElements(none, at, x) }}"),
    )
