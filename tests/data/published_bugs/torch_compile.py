"""torch.compile with Inductor on the CPU."""

import onnx

from published_bugs.case import Graphs, graph, known_bug


def _max_of_transposed(_: onnx.ModelProto) -> bool:
    import torch

    def largest(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (a + b).max(dim=1).indices

    torch.manual_seed(0)
    a, b = torch.randn(8, 8).transpose(0, 1), torch.randn(8, 8)
    return not torch.equal(largest(a, b), torch.compile(largest)(a, b))


def _argmax_of_transposed(_: onnx.ModelProto) -> bool:
    import torch

    def largest(x: torch.Tensor) -> torch.Tensor:
        return x.clone().sin_().t().argmax()

    torch.manual_seed(0)
    x = torch.randn(5, 7)
    return not torch.equal(largest(x), torch.compile(largest)(x))


@known_bug(
    "pytorch/pytorch#178964",
    "the indices of the maxima of a sum with a transposed tensor are all 0",
    "torch",
    "April 2026",
    affected="<2.13",
    probe=_max_of_transposed,
    slow=True,
)
def max_indices() -> Graphs:
    head = "(float[N,8] x) => (int64[N] y)"
    return Graphs(
        graph(f"{head} {{ y = ArgMax<axis=1, keepdims=0>(x) }}"),
        graph(f"{head} {{ i = ArgMax<axis=1, keepdims=0>(x) y = Sub(i, i) }}"),
    )


@known_bug(
    "pytorch/pytorch#183082",
    "the position of the maximum of a transposed tensor is that in memory",
    "torch",
    "2.10.0",
    affected="<2.13",
    probe=_argmax_of_transposed,
    slow=True,
)
def argmax_transposed() -> Graphs:
    head = "(float[N,5,7] x) => (int64[N] y) <int64[2] flat = {0,-1}>"
    end = "y = ArgMax<axis=1, keepdims=0>(f) }"
    return Graphs(
        graph(f"{head} {{ s = Sin(x) t = Transpose<perm=[0,2,1]>(s) f = Reshape(t, flat) {end}"),
        graph(f"{head} {{ s = Sin(x) f = Reshape(s, flat) {end}"),
    )


@known_bug(
    "pytorch/pytorch#138908",
    "rows that an index names twice are added twice by an assignment in place",
    "torch",
    "2.4.0",
)
def index_twice() -> Graphs:
    head = "(float[N,4] x) => (float[N,4] y)"
    return Graphs(
        graph(f"{head} {{ y = Add(x, x) }}"),
        graph(f"{head} {{ d = Add(x, x) y = Add(d, d) }}"),
    )


@known_bug(
    "pytorch/pytorch#108963",
    "a value that is read after index_add is zero",
    "torch",
    "September 2023",
)
def index_add_lost() -> Graphs:
    head = "(float[N,4] x) => (float[N,4] y, float[N,4] z) <float two = {2.0}>"
    return Graphs(
        graph(f"{head} {{ a = Add(x, x) y = Div(a, two) z = Div(a, two) }}"),
        graph(f"{head} {{ a = Add(x, x) y = Div(a, two) z = Sub(a, a) }}"),
    )


@known_bug(
    "pytorch/pytorch#118266",
    "argmax passes over NaN, as of log1p of less than -1, where eager returns its place",
    "torch",
    "January 2024, before #118358",
)
def argmax_of_nan() -> Graphs:
    head = "(float[N,6] x) => (int64[N] y) <float one = {1.0}, float least = {-1e30}, float most = {1e30}>"
    start = "{ s = Add(x, one) l = Log(s) n = IsNaN(l)"
    end = "y = ArgMax<axis=1, keepdims=0>(r) }"
    return Graphs(
        graph(f"{head} {start} r = Where(n, most, l) {end}"), graph(f"{head} {start} r = Where(n, least, l) {end}")
    )


@known_bug(
    "pytorch/pytorch#100775",
    "softmax of large numbers is NaN, as the largest is not subtracted before the exponential",
    "torch",
    "2.1.0.dev20230503",
)
def softmax_overflow() -> Graphs:
    head = "(float[N,8] x) => (float[N,8] y) <float factor = {20.0}, int64[1] a = {-1}>"
    return Graphs(
        graph(f"{head} {{ s = Mul(x, factor) y = Softmax<axis=-1>(s) }}"),
        graph(f"{head} {{ s = Mul(x, factor) e = Exp(s) t = ReduceSum<keepdims=1>(e, a) y = Div(e, t) }}"),
    )
