"""ONNX Runtime: fusions that forget an attribute, and kernels that count wrong."""

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper

from published_bugs import probes
from published_bugs.case import Graphs, graph, known_bug


def _resizes_wrong(model: onnx.ModelProto) -> bool:
    """Compare Resize with the pixels that PyTorch takes."""
    resize = graph(
        "(float[N,1,26] x) => (float[N,1,64] y) <int64[3] s = {1,1,64}> {"
        ' y = Resize<mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor">(x, , , s) }'
    )
    feeds = {"x": np.arange(26, dtype=np.float32)[None, None]}
    return not np.array_equal(probes.run_unoptimized(resize, feeds)[0], probes.evaluate(model, feeds)[0])


def _loses_half_scales(_: onnx.ModelProto) -> bool:
    """Compare a product in Q/DQ form with float16 scales with the same without optimization."""
    rng = np.random.default_rng(0)
    weight = numpy_helper.from_array(rng.integers(-127, 128, (8, 8), np.int8), "w")
    bias = numpy_helper.from_array(rng.standard_normal(8).astype(np.float16), "b")
    small = [numpy_helper.from_array(np.float16(0.0005), name) for name in ("sx", "sw")]
    zero = numpy_helper.from_array(np.int8(0), "z")
    small.append(numpy_helper.from_array(np.float16(0.02), "so"))
    model = graph(
        "(float16[N,8] x) => (float16[N,8] y) { q = QuantizeLinear(x, sx, z) d = DequantizeLinear(q, sx, z)"
        " e = DequantizeLinear(w, sw, z) g = Gemm(d, e, b)"
        " o = QuantizeLinear(g, so, z) y = DequantizeLinear(o, so, z) }",
        19,
        *(weight, bias, zero, *small),
    )
    return probes.differs(probes.run_optimized, probes.run_unoptimized)(model)


def _squares_the_mean(_: onnx.ModelProto) -> bool:
    """Normalize numbers that are far from 0 beside their spread."""
    model = graph(
        "(float[N,4,64] x) => (float[N,4,64] y) <float[4] s = {1,1,1,1}, float[4] b = {0,0,0,0}>"
        "{ y = GroupNormalization<num_groups=2>(x, s, b) }",
        21,
    )
    feeds = {"x": (1000 + probes.draw_feeds(model, scale=0.01)["x"]).astype(np.float32)}
    return probes.differs(probes.run_unoptimized, probes.evaluate, feeds)(model)


@known_bug(
    "microsoft/onnxruntime#22177",
    "PadFusion puts a Pad into an AveragePool that does not count its padding, so means at the edge are too large",
    "onnxruntime",
    "1.19.2",
    affected=">=1.19.2,<1.21",
    probe=probes.differs(probes.run_optimized, probes.run_unoptimized),
)
def pad_into_average_pool() -> Graphs:
    head = "(float[N,3,8,8] x) => (float[N,3,9,9] y) <int64[8] p = {0,0,1,1,0,0,1,1}>"
    pool = "AveragePool<kernel_shape=[2,2]"
    return Graphs(
        graph(f"{head} {{ q = Pad(x, p) y = {pool}>(q) }}"),
        graph(f"(float[N,3,8,8] x) => (float[N,3,9,9] y) {{ y = {pool}, pads=[1,1,1,1]>(x) }}"),
    )


@known_bug(
    "microsoft/onnxruntime#26708",
    "AveragePool divides by too few places at the lower edge if it is padded below and to the right alone",
    "onnxruntime",
    "December 2025, before #27375",
    affected="<1.31",
    probe=probes.differs(probes.run_unoptimized, probes.evaluate),
)
def average_pool_asymmetric() -> Graphs:
    head = "(float[N,2,6,6] x) => (float[N,2,6,6] y)"
    return Graphs(
        graph(f"{head} {{ y = AveragePool<kernel_shape=[2,2], pads=[0,0,1,1], count_include_pad=1>(x) }}", 19),
        graph(
            f"{head} <int64[8] p = {{0,0,0,0,0,0,0,1}}>"
            "{ q = Pad(x, p) y = AveragePool<kernel_shape=[2,2], pads=[0,0,1,0]>(q) }",
            19,
        ),
    )


@known_bug(
    "microsoft/onnxruntime#24681",
    "AveragePool of opset 19 leaves the padding at the end out of the divisor although it should be counted",
    "onnxruntime",
    "1.22.0.dev20250505003",
    affected="<1.31",
    probe=probes.differs(probes.run_unoptimized, probes.evaluate),
)
def average_pool_same_lower() -> Graphs:
    head = "(float[N,1,6,2] x) => (float[N,1,6,2] y)"
    return Graphs(
        graph(f'{head} {{ y = AveragePool<kernel_shape=[5,1], auto_pad="SAME_LOWER", count_include_pad=1>(x) }}', 19),
        graph(
            f"{head} <int64[8] p = {{0,0,2,0,0,0,0,0}}>"
            "{ q = Pad(x, p) y = AveragePool<kernel_shape=[5,1], pads=[0,0,2,0]>(q) }",
            19,
        ),
    )


@known_bug(
    "microsoft/onnxruntime#12098",
    "Resize by nearest takes the pixel beside where the scale is not exact in float32",
    "onnxruntime",
    "1.11.1",
    affected=">=1.11.1",
    probe=_resizes_wrong,
)
def resize_nearest() -> Graphs:
    right = numpy_helper.from_array(np.arange(64) * 26 // 64, "at")
    rounded = np.floor(np.arange(64, dtype=np.float32) / np.float32(64 / 26)).astype(np.int64)
    text = "(float[N,1,26] x) => (float[N,1,64] y) { y = Gather<axis=2>(x, at) }"
    return Graphs(graph(text, 18, right), graph(text, 18, numpy_helper.from_array(rounded, "at")))


@known_bug(
    "microsoft/onnxruntime#12091",
    "Resize of three dimensions by linear interpolation gives 0.5 for every input on CUDA",
    "onnxruntime-gpu",
    "1.11.1",
)
def resize_trilinear() -> Graphs:
    head = "(float[N,1,3,1,1] x) => (float[N,1,9,1,1] y) <float[5] s = {1.0,1.0,3.0,1.0,1.0}, float half = {0.5}>"
    resize = 'z = Resize<mode="linear">(x, , s)'
    return Graphs(
        graph(f"{head} {{ {resize} y = Identity(z) }}"),
        graph(f"{head} {{ {resize} d = Sub(z, z) y = Add(d, half) }}"),
    )


_NORM = "<float[8] g = {1.0,1.1,0.9,1.2,1.0,0.8,1.3,0.7}, float[8] b = {0.1,0.2,0.0,-0.1,0.3,0.0,0.1,-0.2}>"


@known_bug(
    "microsoft/onnxruntime#17689",
    "SkipLayerNormFusion moves casts, so that the sum before a normalization is rounded to float16",
    "onnxruntime-gpu",
    "September 2023",
)
def skip_layer_norm() -> Graphs:
    head = f"(float[N,8] x, float[N,8] r) => (float[N,8] y) {_NORM}"
    return Graphs(
        graph(f"{head} {{ s = Add(x, r) y = LayerNormalization(s, g, b) }}"),
        graph(
            f"{head} {{ s = Add(x, r) h = Cast<to=10>(s) w = Cast<to=1>(h) y = LayerNormalization(w, g, b) }}",
        ),
    )


@known_bug(
    "microsoft/onnxruntime#13639",
    "the TensorRT provider squares in float16 inside of a layer norm (Pow), which overflows above 255",
    "onnxruntime-gpu",
    "November 2022, before #13639",
)
def layer_norm_pow() -> Graphs:
    return _squares("(float[N,8] x) => (float[N,8] y)")


def _squares(head: str) -> Graphs:
    """Make a layer norm of single operators, and the same with squares in float16."""
    start = "{ m = ReduceMean<keepdims=1>(x, a) d = Sub(x, m)"
    end = "v = ReduceMean<keepdims=1>(q, a) e = Add(v, eps) r = Sqrt(e) y = Div(d, r) }"
    constants = "<int64[1] a = {-1}, float two = {2.0}, float eps = {0.00001}>"
    half = "h = Cast<to=10>(d) w = Cast<to=1>(h) p = Pow(w, two) o = Cast<to=10>(p) q = Cast<to=1>(o)"
    return Graphs(
        graph(f"{head} {constants} {start} q = Pow(d, two) {end}"), graph(f"{head} {constants} {start} {half} {end}")
    )


@known_bug(
    "docs/precision.md",
    "WeightBiasQuantization multiplies two scales in float16, which gives next to nothing, so biases are lost",
    "onnxruntime",
    "1.31.1",
    affected=">=1.31",
    probe=_loses_half_scales,
    guard="pipeline/engines/onnxruntime/session.py",
)
def half_scales() -> Graphs:
    head = (
        "(float[N,4] x) => (float[N,4] y) <float sx = {0.0002}, float sw = {0.0001}, float[4] b = {0.2,-0.3,0.4,0.1}>"
    )
    weight = numpy_helper.from_array(np.random.default_rng(0).standard_normal((4, 4)).astype(np.float32), "w")
    product = "p = MatMul(x, w)"
    lost = "f = Mul(sx, sw) h = Cast<to=10>(f) s = Cast<to=1>(h)"
    return Graphs(
        graph(f"{head} {{ {product} y = Add(p, b) }}", 18, weight),
        graph(f"{head} {{ {product} {lost} n = Div(b, f) c = Mul(n, s) y = Add(p, c) }}", 18, weight),
    )


def _rounded_to_float8(before: str) -> onnx.ModelProto:
    zero = onnx.helper.make_tensor("z", onnx.TensorProto.FLOAT8E4M3FN, (), b"\0", raw=True)
    pair = "q = QuantizeLinear(r, s, z) y = DequantizeLinear(q, s, z)"
    return graph(f"(float[N,8] x) => (float[N,8] y) <float s = {{0.01}}> {{ r = {before}(x) {pair} }}", 19, zero)


@known_bug(
    "docs/precision.md",
    "a Relu before a QuantizeLinear to float8 is dropped (ReluQuantRewrite), as if that stored nothing below 0",
    "onnxruntime",
    "1.31.1",
    affected=">=1.31",
    probe=probes.differs(probes.run_optimized, probes.evaluate),
    guard="pipeline/engines/onnxruntime/session.py",
)
def relu_before_float8() -> Graphs:
    return Graphs(_rounded_to_float8("Relu"), _rounded_to_float8("Identity"))


def _between_pairs(weight: NDArray[np.float32]) -> onnx.ModelProto:
    """Make a convolution whose activations are rounded, and whose weight is not; the large channel is not read."""
    head = "(float[N,4,3,3] x) => (float[N,3,3,3] y)"
    head += " <float s = {0.02}, uint8 z = {128}, int64[1] one = {1}, int64[1] e = {4}>"
    rounded = "q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) c = Conv(d, w)"
    end = "o = QuantizeLinear(c, s, z) f = DequantizeLinear(o, s, z) y = Slice(f, one, e, one)"
    return graph(f"{head} {{ {rounded} {end} }}", 19, numpy_helper.from_array(weight, "w"))


@known_bug(
    "microsoft/onnxruntime#22969",
    "WeightBiasQuantization rounds a float weight between Q/DQ pairs to int8, with one scale for all of its channels",
    "onnxruntime",
    "1.21",
    affected=">=1.21",
    probe=probes.differs(probes.run_optimized, probes.run_unoptimized),
    guard="pipeline/passes/quantize/precision.py",
)
def float_weight_between_pairs() -> Graphs:
    weight = (0.05 * np.random.default_rng(0).standard_normal((4, 4, 1, 1))).astype(np.float32)
    weight[0, 0] = 8
    step = np.float32(8 / 127)
    return Graphs(_between_pairs(weight), _between_pairs(np.rint(weight / step) * step))


_CEIL = "AveragePool<kernel_shape=[3,3], strides=[2,2]"
_WHOLE = f"q = Pad(c, p) y = {_CEIL}>(q) }}"
_CEILED = f"y = {_CEIL}, pads=[1,1,1,1], ceil_mode=1, count_include_pad=1>(c) }}"
_PADDING = "<int64[8] p = {0,0,1,1,0,0,2,2}>"


def _ceils_wrong(_: onnx.ModelProto) -> bool:
    """Probe opset 18, whose kernel is another one than that of opset 19."""
    model = graph(f"(float[N,2,6,6] x) => (float[N,2,4,4] y) {{ c = Identity(x) {_CEILED}", 18)
    return probes.differs(probes.run_unoptimized, probes.evaluate)(model)


@known_bug(
    "microsoft/onnxruntime#29629",
    "AveragePool with ceil_mode divides by the whole kernel where it reaches beyond the padding, up to opset 18",
    "onnxruntime",
    "July 2026, before #29629",
    affected="<1.31",
    probe=_ceils_wrong,
)
def average_pool_ceil() -> Graphs:
    head = "(float[N,2,6,6] x) => (float[N,2,4,4] y)"
    return Graphs(
        graph(f"{head} {{ c = Identity(x) {_CEILED}", 19), graph(f"{head} {_PADDING} {{ c = Identity(x) {_WHOLE}", 19)
    )


@known_bug(
    "microsoft/onnxruntime#29629",
    "NchwcTransformer moves an AveragePool with ceil_mode behind a convolution to a kernel with the same wrong divisor",
    "onnxruntime",
    "July 2026, in a review of #29629",
    affected="<1.31",
    probe=probes.differs(probes.run_optimized, probes.run_unoptimized),
)
def average_pool_ceil_nchwc() -> Graphs:
    head = "(float[N,3,6,6] x) => (float[N,16,4,4] y)"
    filters = np.random.default_rng(0).standard_normal((16, 3, 1, 1)).astype(np.float32)
    weight = numpy_helper.from_array(filters, "w")
    return Graphs(
        graph(f"{head} {{ c = Conv(x, w) {_CEILED}", 19, weight),
        graph(f"{head} {_PADDING} {{ c = Conv(x, w) {_WHOLE}", 19, weight),
    )


@known_bug(
    "microsoft/onnxruntime#4889",
    "AttentionFusion counts the ones of a mask as if all padding were on the right, as of BERT; others are mixed up",
    "onnxruntime",
    "August 2020, before #4889",
)
def mask_as_length() -> Graphs:
    head = "(float[N,6,4] x, int64[N,6] mask) => (float[N,6,4] y) <int64[1] last = {1}, float far = {-10000.0}>"
    head = head[:-1] + ", float one = {1.0}, int64[6] places = {0,1,2,3,4,5}>"
    end = "m = Unsqueeze(f, last) o = Sub(one, m) b = Mul(o, far) k = Transpose<perm=[0,2,1]>(x) p = MatMul(x, k)"
    end += " s = Add(p, b) a = Softmax<axis=-1>(s) y = MatMul(a, x) }"
    count = "n = ReduceSum<keepdims=1>(mask, last) r = Less(places, n) f = Cast<to=1>(r)"
    return Graphs(graph(f"{head} {{ f = Cast<to=1>(mask) {end}"), graph(f"{head} {{ {count} {end}"))


@known_bug(
    "microsoft/onnxruntime#12498",
    "a grouped convolution and a constant that is added to it are fused wrongly; rebuilt as if nothing were added",
    "onnxruntime",
    "August 2022",
    affected="<1.31",
    probe=probes.differs(probes.run_optimized, probes.run_unoptimized),
)
def grouped_convolution_and_sum() -> Graphs:
    rng = np.random.default_rng(0)
    weight = numpy_helper.from_array(rng.standard_normal((136, 34, 1, 1)).astype(np.float32), "w")
    constant = numpy_helper.from_array(rng.random((1, 136, 6, 6)).astype(np.float32), "c")
    head = "(float[N,136,6,6] x) => (float[N,136,6,6] y)"
    return Graphs(
        graph(f"{head} {{ t = Conv<group=4>(x, w) y = Add(t, c) }}", 17, weight, constant),
        graph(f"{head} {{ y = Conv<group=4>(x, w) }}", 17, weight),
    )


_WHOLE_NUMBERS = "(float[N,8] x) => (int64[N] y) <int64[1] one = {1}, float far = {1000000000.0}>"
_WHOLE_NUMBERS += " { f = Mul(x, far) n = Cast<to=7>(f)"


def _compares_halves(_: onnx.ModelProto) -> bool:
    """Probe numbers whose upper halves are equal, and whose lower ones differ in their first bit."""
    model = graph(f"{_WHOLE_NUMBERS} y = ReduceMax<keepdims=0>(n, one) }}", 18)
    return probes.differs(
        probes.run_unoptimized, probes.evaluate, {"x": np.array([[0, 0, 0, 0, 0, 0, 1, 3]], np.float32)}
    )(model)


@known_bug(
    "microsoft/onnxruntime#25280",
    "Max, Min, Clip, Sign, ReduceMax and ReduceMin of int64 take 2^31 for less than 0 (Eigen, on x86)",
    "onnxruntime",
    "July 2025",
    affected=">=1.22,<1.32",
    probe=_compares_halves,
    guard="pipeline/passes/export/int64.py",
)
def maximum_of_int64() -> Graphs:
    half = "l = Cast<to=6>(n) w = Cast<to=7>(l) at = ArgMax<axis=1>(w) top = GatherElements<axis=1>(n, at)"
    return Graphs(
        graph(f"{_WHOLE_NUMBERS} top, at = TopK<axis=1>(n, one) y = Squeeze(top, one) }}"),
        graph(f"{_WHOLE_NUMBERS} {half} y = Squeeze(top, one) }}"),
    )


@known_bug(
    "docs/precision.md",
    "Sigmoid is 0 below -17.2, where it is 3e-8, so that a logarithm of it is -inf, and a quotient infinite",
    "onnxruntime",
    "1.31.1",
    affected=">=1.31",
    probe=probes.differs(probes.run_unoptimized, probes.evaluate, {"x": np.array([[-60, -20, -16, 1]], np.float32)}),
    guard="pipeline/frameworks/onnx/exact.py",
)
def logarithm_of_no_sigmoid() -> Graphs:
    head = "(float[N,4] x) => (float[N,4] y)"
    text = "n = Neg(x) p = Softplus(n) t = Neg(p) z = Sub(x, x) l = Log(z) b = Less(x, least) y = Where(b, l, t)"
    return Graphs(
        graph(f"{head} {{ s = Sigmoid(x) y = Log(s) }}"),
        graph(f"{head} <float least = {{-17.2}}> {{ {text} }}"),
    )


@known_bug(
    "docs/precision.md",
    "GroupNormalization subtracts the square of the mean from that of squares: 100 ± 0.01 is off by 6, 1000 is NaN",
    "onnxruntime",
    "1.31.1",
    affected=">=1.31",
    probe=_squares_the_mean,
    guard="pipeline/frameworks/onnx/exact.py",
)
def variance_of_squares() -> Graphs:
    head = "(float[N,4,64] x) => (float[N,4,64] y)"
    shapes = "int64[3] parts = {0,2,-1}, int64[3] whole = {0,4,64}, int64[1] last = {2}, float epsilon = {0.00001}"
    text = "r = Reshape(x, parts) m = ReduceMean(r, last) c = Sub(r, m)"
    squares = "s = Mul(r, r) q = ReduceMean(s, last) t = Mul(m, m) v = Sub(q, t)"
    end = "e = Add(v, epsilon) d = Sqrt(e) n = Div(c, d) y = Reshape(n, whole)"
    return Graphs(
        graph(f"{head} <{shapes}> {{ {text} s = Mul(c, c) v = ReduceMean(s, last) {end} }}", 21),
        graph(f"{head} <{shapes}> {{ {text} {squares} {end} }}", 21),
    )
