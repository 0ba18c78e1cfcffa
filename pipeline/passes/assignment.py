"""What single groups are computed in: as it was decided, and as it came out."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginesmith.calibration.ranges import METHODS, Method
from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.errors import UsageError

if TYPE_CHECKING:
    from enginesmith.pipeline.precision.groups import Group
    from enginesmith.pipeline.precision.half.lowering import Lowered

FILE = "assignment.json"
"""Beside the graph: what each group is computed in, and why."""


@dataclass(frozen=True)
class Assignment:
    """What was decided."""

    method: Method
    """Whose ranges to take."""
    keep: frozenset[str] = frozenset()
    """Groups that are not to be quantised."""
    floating: frozenset[str] = frozenset()
    """Groups that stay in float32, also where the rest is lowered."""
    why: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, record: Artifact | None, precision: str, method: Method) -> "Assignment":
        """Read a record: a JSON list of ``{"group": …, "precision": …, "why": …, "method": …}``, the last two optional.

        Raises:
            UsageError: it is something else.
        """
        if record is None:
            return cls(method)
        try:
            entries: list[dict[str, Any]] = json.loads(record.path.read_bytes())
            given = {str(entry["group"]): str(entry["precision"]) for entry in entries}
            why = {str(entry["group"]): str(entry.get("why", "")) for entry in entries}
            methods = {str(entry["method"]) for entry in entries if entry.get("method")}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{record.path.name} is no assignment ({type(error).__name__}: {error})",
                'give a JSON list of objects like {"group": "conv1", "precision": "int8", "why": ""}',
            ) from error
        low = precision.partition("+")[0]
        kept = frozenset(name for name, one in given.items() if one != low)
        floating = frozenset(name for name in kept if given[name] == "fp32")
        return cls(_method(methods, method), kept, floating, why)


def _method(named: Iterable[str], otherwise: Method) -> Method:
    found = sorted(named)
    known = [method for method in METHODS if method in found]
    if len(found) > 1 or len(known) != len(found):
        raise UsageError(f"the assignment names ranges by {' and '.join(found)}", f"name one of {', '.join(METHODS)}")
    return known[0] if known else otherwise


def entries(
    found: "Sequence[Group]", left: Mapping[str, str], chosen: Assignment, lowered: "Lowered | None", low: str
) -> list[dict[str, str]]:
    """What each group is computed in now; ``low`` is what those are in that are not ``left``, empty if none is."""
    halved = set(lowered.nodes) if lowered else set()
    reasons = {**(lowered.kept if lowered else {}), **left}

    def entry(group: "Group") -> dict[str, str]:
        described = {"group": group.name, "module": group.module, "operator": group.operator}
        if low and group.name not in left:
            return {**described, "precision": low, "why": ""}
        precision = lowered.dtype if lowered and group.name in halved else "fp32"
        return {**described, "precision": precision, "why": chosen.why.get(group.name) or reasons.get(group.name, "")}

    return [entry(group) for group in found]


def write(out: Path, described: Sequence[Mapping[str, str]]) -> None:
    """Write what became of the groups beside the graph."""
    (out / FILE).write_text(json.dumps(described, indent=1) + "\n")


def read(folder: Path) -> list[dict[str, str]]:
    """Read what :func:`write` wrote."""
    found: list[dict[str, str]] = json.loads((folder / FILE).read_bytes())
    return found
