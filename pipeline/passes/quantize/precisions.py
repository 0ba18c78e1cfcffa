"""List the precisions that a variant can have, and what each of them takes to be made."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

Name = Literal["fp32", "fp16", "bf16", "int8", "int8+fp16", "int8-dynamic", "fp8", "int4-weights"]
AS_GIVEN = "as given"
"""Name for that of a file which is measured as it is, and promises none."""
Quantizer = Literal["own", "nncf", "qat"]
"""Maker of static int8 graphs: the rules and the search of enginesmith; for CPUs also NNCF; or the same rules with
everything in int8, and training (quantization-aware) in the place of the search."""
Placement = Literal["inputs", "inputs+outputs", "inputs+read outputs"]
"""Places of Q/DQ pairs: at inputs of products alone, symmetric, which every engine takes; or also behind convolutions,
with zero points, for kernels that write integers; or there only where int8 operators read them. What one engine fuses
tears another one's kernels apart."""

Form = Literal["given", "rescaled", "multiplied"]
"""The float graph that is quantized: as it is; with channels scaled against each other; and with multiplications added,
where nothing else can scale them."""
FORM_WORDS: Mapping[Form, str] = {"rescaled": "channels rescaled", "multiplied": "channels rescaled by multiplications"}
Cause = Literal[
    "constant offsets",
    "uneven activations",
    "uneven weights",
    "uneven outputs",
    "shifted means",
    "single peaks",
    "unlike samples",
    "sensitive readers",
    "no outliers",
    "unknown",
]
"""Cause for which a group loses much: channels of its activations are far from zero and vary little; these, or input
channels of its weight, or channels of its output in engines that round it with one scale, differ much; most of its
error is the same for all samples, single activations are large; some samples are much larger than others; what reads
its result makes much of small errors; or nothing of that."""
WEAK_DB = 25.0
"""SQNR of a group, its inputs being exact, below which it loses much. In four networks that int8 suits, all groups have
more than 33 dB; in four whose channels are uneven, one in ten has less than 13."""


@dataclass(frozen=True)
class Kind:
    """Facts about a precision before anything is made."""

    summary: str
    threshold: str
    """Row of fidelity thresholds that it has to reach."""
    calibrated: bool = False
    """Ranges of activations are part of the result, so that they have to come from real data."""
    searched: bool = False
    """Single groups can be left in floating point where it costs too much accuracy."""
    lowered: bool = False
    """All of a graph is in one narrow float, but what has to be float32; groups are left there for a metric alone."""
    rest: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Type of operators that are not quantized."""
    opset: int = 0
    """The first opset with all operators of the precision: with scales for each channel, in float16, or with blocks."""


KINDS: Mapping[Name, Kind] = {
    "fp32": Kind("as exported", "fp32"),
    "fp16": Kind(
        "float16; normalizations, softmax, reductions and what overflows in float32", "fp16", lowered=True, rest="fp16"
    ),
    "bf16": Kind(
        "bfloat16; normalizations, softmax and reductions in float32", "bf16", lowered=True, rest="bf16", opset=22
    ),
    "int8": Kind(
        "products in int8 by static Q/DQ, the rest in float32", "int8", calibrated=True, searched=True, opset=13
    ),
    "int8+fp16": Kind(
        "products in int8 by static Q/DQ, the rest in float16",
        "int8",
        calibrated=True,
        searched=True,
        rest="fp16",
        opset=19,
    ),
    "int8-dynamic": Kind(
        "products with weights in int8, activations quantized as they come; CPU only", "int8", searched=True, opset=11
    ),
    "fp8": Kind(
        "products in E4M3 by Q/DQ, the rest in float16", "fp8", calibrated=True, searched=True, rest="fp16", opset=19
    ),
    "int4-weights": Kind(
        "weights of products in int4 by blocks, computed in floating point", "int4", searched=True, opset=21
    ),
}
assert set(KINDS) == set(get_args(Name))
RANGES_PER_BATCH = ("int8-dynamic",)
"""Precisions whose ranges are of the whole batch, so that samples are not answered as they are alone."""
