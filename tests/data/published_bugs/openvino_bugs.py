"""OpenVINO on CPUs."""

import functools

import numpy as np
import onnx
from onnx import numpy_helper

from published_bugs import probes
from published_bugs.case import Graphs, graph, known_bug

_TIES = np.full((1, 16), -1, np.int32)
_TIES[:, :4] = 0


@known_bug(
    "openvinotoolkit/openvino#13491",
    "ArgMin of equal numbers is not the first of them if there are many",
    "openvino",
    "2022.2",
    affected="<2026",
    probe=probes.differs(probes.run_openvino, probes.evaluate, {"x": _TIES.astype(np.float32)}),
)
def argmin_of_ties() -> Graphs:
    head = "(float[N,16] x) => (int64[N] y)"
    return Graphs(
        graph(f"{head} {{ y = ArgMin<axis=1, keepdims=0>(x) }}"),
        graph(f"{head} {{ y = ArgMin<axis=1, keepdims=0, select_last_index=1>(x) }}"),
    )


@known_bug(
    "openvinotoolkit/openvino#25169",
    "ReduceMean of opset 18 takes the mean over all axes instead of those given",
    "openvino",
    "2024.2.0",
    affected="<2026",
    probe=probes.differs(probes.run_openvino, probes.evaluate),
)
def mean_over_all() -> Graphs:
    head = "(float[N,3,4,4] x) => (float[N,3,1,1] y) <int64[2] two = {2,3}, int64[4] all = {0,1,2,3}>"
    return Graphs(
        graph(f"{head} {{ y = ReduceMean<keepdims=1>(x, two) }}"),
        graph(
            f"{head} {{ m = ReduceMean<keepdims=1>(x, all)"
            " z = ReduceMean<keepdims=1>(x, two) d = Sub(z, z) y = Add(d, m) }"
        ),
    )


def _chain(added: str) -> onnx.ModelProto:
    """Make two products in int8, to whose answers something is added that is made of the last feature."""
    rng = np.random.default_rng(0)
    weights = [numpy_helper.from_array(rng.integers(-127, 128, (8, 8), np.int8), name) for name in ("v", "w")]
    head = "(float[1,8] x) => (float[1,8] y) <float s = {0.03}, uint8 z = {128}, float r = {0.005}, int8 o = {0},"
    head += " int64[1] last = {-1}, int64[1] end = {8}, int64[1] one = {1}, float[8] first = {1,0,0,0,0,0,0,0}>"
    lines = ["q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) e = DequantizeLinear(v, r, o)"]
    lines += ["a = MatMul(d, e) b = Relu(a)"]
    lines += ["f = QuantizeLinear(b, s, z) g = DequantizeLinear(f, s, z) h = DequantizeLinear(w, r, o)"]
    lines += ["p = MatMul(g, h) c = Slice(x, last, end, one)", added]
    return graph(f"{head} {{ {' '.join(lines)} }}", 19, *weights)


@known_bug(
    "docs/precision.md",
    "a column that is added to chained products in int8, of fixed sizes, is read as a row; floats end the process",
    "openvino",
    "2026.4.1",
    affected=">=2025.3",
    probe=probes.differs(functools.partial(probes.run_openvino, threads=1), probes.evaluate),
    guard="pipeline/engines/openvino/session.py",
)
def column_as_row() -> Graphs:
    return Graphs(_chain("y = Add(c, p)"), _chain("m = Mul(c, first) y = Add(m, p)"))


@known_bug(
    "docs/precision.md",
    "a mean without its axis is scaled by the factor of its row in the batch, instead of that of its channel",
    "openvino",
    "2026.4.1",
    affected=">=2026.4",
    probe=probes.differs(probes.run_openvino, probes.evaluate),
    guard="pipeline/engines/openvino/rewrites.py",
)
def scale_of_the_row() -> Graphs:
    head = "(float[N,16,6] x) => (float[N,16] y) <int64[1] zero = {0}, int64[1] one = {1}, int64[1] last = {2}>"
    scales = numpy_helper.from_array(np.arange(1, 17, dtype=np.float32), "s")
    mean = "m = ReduceMean<keepdims=0>(x, last)"
    rows = "n = Shape<start=0, end=1>(x) r = Slice(s, zero, n) c = Unsqueeze(r, one)"
    return Graphs(
        graph(f"{head} {{ {mean} y = Mul(m, s) }}", 18, scales),
        graph(f"{head} {{ {mean} {rows} y = Mul(m, c) }}", 18, scales),
    )


@known_bug(
    "docs/precision.md",
    "an int8 convolution without a bias that several operators read is scaled twice for a Relu and what follows",
    "openvino",
    "2026.4.1",
    affected=">=2026.4",
    probe=probes.differs(probes.run_openvino, probes.run_unoptimized),
    guard="pipeline/engines/openvino/rewrites.py",
)
def scaled_twice() -> Graphs:
    head = "(float[N,4,6,6] x) => (float[N,4,6,6] y) <float a = {0.05}, float b = {0.01}, float c = {0.0005}>"
    levels = np.random.default_rng(0).integers(-127, 128, (4, 4, 1, 1)).astype(np.int8)
    more = [numpy_helper.from_array(levels, "w"), numpy_helper.from_array(np.zeros((), np.int8), "z")]
    more += [numpy_helper.from_array(np.uint8(128), "m"), numpy_helper.from_array(np.uint8(0), "o")]
    weight = "v = DequantizeLinear(w, b, z) u = DequantizeLinear(w, b, z)"
    first = f"{weight} q = QuantizeLinear(x, a, m) d = DequantizeLinear(q, a, m) s = Conv(d, v)"
    last = "e = QuantizeLinear(r, a, o) f = DequantizeLinear(e, a, o) t = Conv(f, u) g = Sigmoid(s) y = Add(t, g)"
    return Graphs(
        graph(f"{head} {{ {first} r = Relu(s) {last} }}", 18, *more),
        graph(f"{head} {{ {first} p = Mul(s, c) r = Relu(p) {last} }}", 18, *more),
    )


@known_bug(
    "docs/precision.md",
    "softplus, also written as log(1 + exp(x)), is 0 or negative below -12, so a logarithm of it is NaN",
    "openvino",
    "2026.4.1",
    affected=">=2026.4",
    probe=probes.differs(
        probes.run_openvino, probes.run_unoptimized, {"x": np.array([[-20, -16, -14, 1]], np.float32)}
    ),
    guard="pipeline/engines/openvino/rewrites.py",
)
def logarithm_of_softplus() -> Graphs:
    head = "(float[N,4] x) => (float[N,4] y) <float least = {-12}>"
    return Graphs(
        graph(f"{head} {{ s = Softplus(x) y = Log(s) }}"),
        graph(f"{head} {{ s = Softplus(x) z = Sub(x, x) b = Less(x, least) r = Where(b, z, s) y = Log(r) }}"),
    )


@known_bug(
    "docs/precision.md",
    "uint8 that are divided, or shifted to the right, are rounded to the nearest number if there are 16 or more",
    "openvino",
    "2026.4.1",
    affected=">=2026.4",
    probe=probes.differs(probes.run_openvino, probes.evaluate, {"x": np.arange(64, dtype=np.uint8).reshape(4, 16)}),
    guard="pipeline/engines/openvino/rewrites.py",
)
def rounded_quotients() -> Graphs:
    head = "(uint8[N,16] x) => (uint8[N,16] y) <uint8 one = {1}, float half = {0.5}>"
    return Graphs(
        graph(f'{head} {{ y = BitShift<direction="RIGHT">(x, one) }}'),
        graph(f"{head} {{ f = Cast<to=1>(x) h = Mul(f, half) r = Round(h) y = Cast<to=2>(r) }}"),
    )


@known_bug(
    "docs/precision.md",
    "LpNormalization adds 1.2e-7 to the sum of squares, so that rows shorter than 1e-3 come out too short",
    "openvino",
    "2026.4.1",
    affected=">=2026.4",
    probe=probes.differs(probes.run_openvino, probes.run_unoptimized, {"x": np.full((1, 4), 1e-4, np.float32)}),
    guard="pipeline/engines/openvino/rewrites.py",
)
def padded_norm() -> Graphs:
    head = "(float[N,4] x) => (float[N,4] y)"
    constants = "<float two = {2}, int64[1] last = {1}, float added = {1.1920929e-07}>"
    sums = "q = Pow(x, two) s = ReduceSum(q, last) a = Add(s, added) r = Sqrt(a) y = Div(x, r)"
    return Graphs(
        graph(f"{head} {{ y = LpNormalization<axis=1>(x) }}"),
        graph(f"{head} {constants} {{ {sums} }}"),
    )


@known_bug(
    "docs/precision.md",
    "Mod of floats (fmod=1) is x - trunc(x / y) y in float32: 1e9 by 3 leaves 0, and 123456789 by 7 leaves 8",
    "openvino",
    "2026.4.1",
    affected=">=2026.4",
    probe=probes.differs(
        probes.run_openvino, probes.evaluate, {"x": np.array([[1e9, 1e7]], np.float32), "z": np.full(2, 3, np.float32)}
    ),
)
def remainder_of_large_quotients() -> Graphs:
    head = "(float[N,2] x, float[2] z) => (float[N,2] y)"
    return Graphs(
        graph(f"{head} {{ y = Mod<fmod=1>(x, z) }}"),
        graph(
            f"{head} {{ q = Div(x, z) s = Sign(q) a = Abs(q) f = Floor(a) t = Mul(s, f) m = Mul(t, z) y = Sub(x, m) }}"
        ),
    )


@known_bug(
    "docs/precision.md",
    "GRU, LSTM and RNN ignore the lengths of sequences where batch or steps are dynamic",
    "openvino",
    "2026.4.1",
    affected=">=2026.4",
    probe=probes.differs(
        probes.run_openvino,
        probes.run_unoptimized,
        {"x": np.ones((4, 2, 3), np.float32), "l": np.array([4, 1], np.int32)},
    ),
    guard="pipeline/engines/openvino/sequences.py",
)
def lost_lengths() -> Graphs:
    rng = np.random.default_rng(0)
    shapes = {"w": (1, 6, 3), "r": (1, 6, 2)}
    weights = [
        numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32), name) for name, shape in shapes.items()
    ]
    head = "(float[T,N,3] x, int32[N] l) => (float[T,1,N,2] y)"
    clipped = "a = Abs(l) t = Shape<start=0, end=1>(x) s = Cast<to=6>(t) c = Min(a, s)"
    return Graphs(
        graph(f"{head} {{ {clipped} y, h = GRU<hidden_size=2>(x, w, r, , c) }}", 18, *weights),
        graph(f"{head} {{ y, h = GRU<hidden_size=2>(x, w, r) }}", 18, *weights),
    )


@known_bug(
    "docs/precision.md",
    "LSTM ignores the attribute input_forget, and computes a forget gate of its own",
    "openvino",
    "2026.4.1",
    affected=">=2026.4",
    probe=probes.differs(probes.run_openvino, probes.run_unoptimized),
    guard="pipeline/engines/openvino/sequences.py",
)
def uncoupled_gates() -> Graphs:
    rng = np.random.default_rng(0)
    weights = [
        numpy_helper.from_array(rng.standard_normal((1, 8, columns)).astype(np.float32), name)
        for name, columns in (("w", 3), ("r", 2))
    ]
    head = "(float[4,N,3] x) => (float[4,1,N,2] y)"
    return Graphs(
        graph(f"{head} {{ y, h = LSTM<hidden_size=2, input_forget=1>(x, w, r) }}", 18, *weights),
        graph(f"{head} {{ y, h = LSTM<hidden_size=2>(x, w, r) }}", 18, *weights),
    )


@known_bug(
    "docs/precision.md",
    "DFT is along axis 1 from opset 20 on, where the axis is an input: whichever is given, and the last by default",
    "openvino",
    "2026.4.1",
    affected=">=2026.4",
    probe=probes.differs(
        probes.run_openvino, probes.evaluate, {"x": np.arange(24, dtype=np.float32).reshape(1, 3, 4, 2) % 5}
    ),
    guard="pipeline/engines/openvino/fourier.py",
)
def transform_along_another_axis() -> Graphs:
    head = "(float[N,3,4,2] x) => (float[N,3,4,2] y)"
    return Graphs(
        graph(f"{head} <int64 a = {{2}}> {{ y = DFT(x, , a) }}", 20),
        graph(f"{head} <int64 a = {{1}}> {{ y = DFT(x, , a) }}", 20),
    )
