"""What the processor can do for few-bit arithmetic, read from the kernel."""

import platform
import re
from functools import cache
from pathlib import Path

_UNITS = re.compile(r"\b(?:avx|fma|amx|asimd|sve|i8mm|bf16)\w*")


@cache
def vector_units() -> tuple[str, ...]:
    """Names of the vector extensions, sorted; where the kernel does not tell, what Python knows of the processor."""
    info = Path("/proc/cpuinfo")
    return tuple(sorted(set(_UNITS.findall(info.read_text())))) if info.is_file() else (platform.processor(),)


def int8_weight_bits() -> int:
    """Bits that weights can have beside 8-bit activations without a wrong result.

    x86 processors before VNNI add two products in a saturating 16-bit register (vpmaddubsw): with weights of 8 bits
    that overflows, so they get 7 ("reduce_range" in ONNX Runtime's documentation of quantisation).
    """
    units = vector_units()
    x86 = any(unit.startswith("avx") for unit in units)
    return 7 if x86 and not any("vnni" in unit or "amx" in unit for unit in units) else 8
