"""TensorRT: none can be probed without a GPU, so all are rebuilt."""

from published_bugs.case import Graphs, graph, known_bug
from published_bugs.onnxruntime_bugs import _squares

_BATCH = "t = Shape(x) n = Gather(t, zero)"


@known_bug(
    "NVIDIA/TensorRT#4853",
    "SegFormer's attention is right for one sample and wrong for more; rebuilt as keys of the first sample for all",
    "tensorrt",
    "10.11, 11.1",
)
def batch_of_two() -> Graphs:
    head = "(float[N,4,8] x) => (float[N,4,8] y) <int64[1] first = {0}>"
    end = "k = Transpose<perm=[0,2,1]>(s) p = MatMul(x, k) a = Softmax<axis=-1>(p) y = MatMul(a, s) }"
    return Graphs(graph(f"{head} {{ s = Identity(x) {end}"), graph(f"{head} {{ s = Gather<axis=0>(x, first) {end}"))


@known_bug(
    "NVIDIA/TensorRT#4854",
    "a fused convolution with a residual reads a part of a concatenation as if it lay densely in memory",
    "tensorrt",
    "11.2.1.2",
)
def strided_residual() -> Graphs:
    head = (
        "(float[N,4,4,4] x) => (float[N,2,4,4] y) <int64[2] parts = {2,2}, int64[2] flat = {0,-1}, "
        " int64[1] start = {0}, int64[1] end = {32}, int64[1] axis = {1}, int64[4] shape = {0,4,4,2}>"
    )
    split = "{ a, b = Split<axis=1>(x, parts) c = Tanh(b)"
    dense = (
        "h = Transpose<perm=[0,2,3,1]>(x) f = Reshape(h, flat) s = Slice(f, start, end, axis) r = Reshape(s, shape)"
        " w = Transpose<perm=[0,3,1,2]>(r)"
    )
    return Graphs(graph(f"{head} {split} y = Add(c, a) }}"), graph(f"{head} {split} {dense} y = Add(c, w) }}"))


@known_bug(
    "NVIDIA/TensorRT#4513",
    "CumSum ignores the attribute reverse",
    "tensorrt",
    "mid-2025",
)
def cumulative_sum() -> Graphs:
    head = "(float[N,8] x) => (float[N,8] y) <int64 axis = {1}>"
    return Graphs(graph(f"{head} {{ y = CumSum<reverse=1>(x, axis) }}"), graph(f"{head} {{ y = CumSum(x, axis) }}"))


@known_bug(
    "NVIDIA/TensorRT#642",
    "all answers are zero if a batch has more than five samples",
    "tensorrt",
    "5.0",
)
def batch_above_five() -> Graphs:
    head = "(float[N,3,4,4] x) => (float[N,3,4,4] y) <int64 zero = {0}, int64 five = {5}, float none = {0.0}>"
    return Graphs(
        graph(f"{head} {{ y = Tanh(x) }}"),
        graph(f"{head} {{ r = Tanh(x) {_BATCH} g = Greater(n, five) y = Where(g, none, r) }}"),
    )


@known_bug(
    "NVIDIA/TensorRT#1697",
    "answers in a batch of eight or more are wrong; rebuilt as the row beside",
    "tensorrt",
    "8.0.3.4",
)
def batch_of_eight() -> Graphs:
    head = (
        "(float[N,6] x) => (float[N,6] y) <int64 zero = {0}, int64 seven = {7}, int64[1] a = {0}, int64[1] one = {1},"
        " int64[1] most = {1000000}>"
    )
    rolled = "u = Slice(r, one, most, a) v = Slice(r, a, one, a) w = Concat<axis=0>(u, v)"
    return Graphs(
        graph(f"{head} {{ y = Softmax(x) }}"),
        graph(f"{head} {{ r = Softmax(x) {rolled} {_BATCH} g = Greater(n, seven) y = Where(g, w, r) }}"),
    )


@known_bug(
    "NVIDIA/TensorRT#2808",
    "of a batch, the first answer alone is right; rebuilt as zeros for the others",
    "tensorrt",
    "March 2023",
)
def first_of_batch() -> Graphs:
    head = "(float[N,6] x) => (float[N,6] y) <int64[1] a = {0}, int64[1] one = {1}, int64[1] most = {1000000}>"
    return Graphs(
        graph(f"{head} {{ y = Tanh(x) }}"),
        graph(
            f"{head} {{ r = Tanh(x) u = Slice(r, one, most, a) z = Sub(u, u) v = Slice(r, a, one, a)"
            " y = Concat<axis=0>(v, z) }",
        ),
    )


@known_bug(
    "NVIDIA/TensorRT#2564",
    "the squares of a layer norm overflow in float16 (BERT)",
    "tensorrt",
    "8.5.1.7",
)
def layer_norm_overflow() -> Graphs:
    return _squares("(float[N,4,8] x) => (float[N,4,8] y)")


@known_bug(
    "NVIDIA/TensorRT#2466",
    "a mask's large constant is infinite in float16, and NaN where it is multiplied by zero",
    "tensorrt",
    "8.4.2.4",
)
def infinite_mask() -> Graphs:
    head = "(float[N,6] x, float[N,6] mask) => (float[N,6] y) <float one = {1.0}, float far = {-999999995904.0}>"
    end = "s = Add(x, b) y = Softmax<axis=-1>(s) }"
    half = "h = Cast<to=10>(far) c = Cast<to=1>(h)"
    return Graphs(
        graph(f"{head} {{ k = Cast<to=9>(mask) f = Cast<to=1>(k) m = Sub(one, f) b = Mul(m, far) {end}"),
        graph(f"{head} {{ k = Cast<to=9>(mask) f = Cast<to=1>(k) m = Sub(one, f) {half} b = Mul(m, c) {end}"),
    )


@known_bug(
    "NVIDIA/TensorRT#4846",
    "a Resize behind a Transpose of what an If gives is wrong at other sizes; rebuilt as if nothing were transposed",
    "tensorrt",
    "11.1.0.106, 11.2.1.2",
)
def transposed_resize() -> Graphs:
    head = "(float[N,1,6,6] x) => (float[N,1,12,12] y) <float[4] scales = {1.0,1.0,2.0,2.0}>"
    end = 'y = Resize<mode="cubic", coordinate_transformation_mode="align_corners">(t, , scales) }'
    return Graphs(
        graph(f"{head} {{ t = Transpose<perm=[0,1,3,2]>(x) {end}"),
        graph(f"{head} {{ t = Identity(x) {end}"),
    )
