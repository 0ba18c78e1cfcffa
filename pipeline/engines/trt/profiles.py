"""Optimisation profiles: which shapes an engine takes, and the one that it is fastest at."""

from collections.abc import Mapping

from enginesmith.pipeline.engines.trt.building import Profile
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.tensors import Point, ShapeRange, Signature

_POINTS: tuple[Point, ...] = ("min", "opt", "max")


def plan(signature: Signature, ranges: Mapping[str, ShapeRange], more: tuple[str, ...]) -> tuple[Profile, ...]:
    """The profiles asked for, in their order, and the whole range as the last one.

    Raises:
        UsageError: a dynamic dimension without a range; a profile of another dimension, or beyond its range.
    """
    missing = [name for name in signature.symbols if name not in ranges]
    if missing:
        raise UsageError(
            f"the dynamic dimension {missing[0]!r} has no range", f"give one: --shape {missing[0]}=MIN:OPT:MAX"
        )
    narrowed = [_narrowed(text, ranges) for text in more]
    return tuple(_shapes(signature, one) for one in (*narrowed, ranges))


def _shapes(signature: Signature, ranges: Mapping[str, ShapeRange]) -> Profile:
    found: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {}
    for spec in signature.inputs:
        low, usual, high = (spec.resolve({name: one.at(point) for name, one in ranges.items()}) for point in _POINTS)
        found[spec.name] = (low, usual, high)
    return found


def _narrowed(text: str, ranges: Mapping[str, ShapeRange]) -> dict[str, ShapeRange]:
    """``batch=1:1:1,seq=1:64:128`` within the whole range; dimensions that are not named keep theirs."""
    found = dict(ranges)
    for part in text.split(","):
        name, separator, value = part.partition("=")
        if not separator or name not in ranges:
            raise UsageError(
                f"the profile {text!r} names {name!r}, and the dynamic dimensions are {', '.join(ranges) or 'none'}",
                "write it as batch=1:1:1,seq=1:64:128",
            )
        asked, whole = ShapeRange.parse(value), ranges[name]
        if asked.min < whole.min or asked.max > whole.max:
            raise UsageError(f"the profile {text!r} goes beyond the range {name}={whole}", "widen --shape")
        found[name] = asked
    return found
