"""OpenVINO on CPUs."""

import numpy as np

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
