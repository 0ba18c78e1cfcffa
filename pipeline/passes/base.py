"""What a pass is: a pure function from artifact to artifact, with its promises checked before and after."""

from abc import abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

from pydantic import BaseModel, ConfigDict

from enginesmith.pipeline.artifact import Artifact, Effect, Kind
from enginesmith.pipeline.errors import InvalidGraph, ModelError

Progress = Callable[[str], None]
Records = Mapping[str, Artifact]


_SHOWN, _NAMES = 5, 3
"""Reasons that are written out, and names for each."""


class Pass(BaseModel):
    """A transformation; its fields are its parameters, and with the parent's digest they make its key.

    Same artifact and same parameters give the same bytes: fixed seeds, no timestamps, no machine paths in what is
    written.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: ClassVar[str]
    consumes: ClassVar[Kind]
    produces: ClassVar[Kind]
    tools: ClassVar[tuple[str, ...]]
    """Distributions whose versions decide what comes out."""

    @abstractmethod
    def apply(self, artifact: Artifact, out: Path, progress: Progress, records: Records) -> Effect:
        """Read the artifact, write files into the empty folder ``out``, say what was done.

        ``records`` holds what was found out about the artifact before, by role; most passes need none.
        """


def run_pass(
    pass_: Pass, artifact: Artifact, out: Path, progress: Progress, records: Records = MappingProxyType({})
) -> Effect:
    """Apply a pass and hold it to its promises.

    Raises:
        ModelError: the artifact is not what the pass consumes, or what came out is not sound.
    """
    if artifact.kind != pass_.consumes:
        raise ModelError(f"the pass {pass_.name!r} takes a {pass_.consumes} artifact, and got a {artifact.kind} one")
    effect = pass_.apply(artifact, out, progress, records)
    if not (out / effect.file).is_file():
        raise ModelError(f"the pass {pass_.name!r} did not write {effect.file!r}")
    if pass_.produces != "onnx":
        return effect
    _check_onnx(pass_, artifact, out / effect.file)
    kept = _check_sparsity(pass_, artifact, out / effect.file) if artifact.kind == "onnx" else ""
    return effect.model_copy(update={"summary": f"{effect.summary}; {kept}"}) if kept else effect


def _check_onnx(pass_: Pass, before: Artifact, path: Path) -> None:
    from enginesmith.pipeline import onnx_file

    onnx_file.check(path)
    after = onnx_file.signature(path)
    if before.signature is None:
        return
    for side in ("inputs", "outputs"):
        names = [spec.name for spec in getattr(before.signature, side)]
        found = [spec.name for spec in getattr(after, side)]
        if names != found:
            raise InvalidGraph(f"the pass {pass_.name!r} changed the {side} from {names} to {found}")


def _check_sparsity(pass_: Pass, before: Artifact, path: Path) -> str:
    """What became of the weights of a graph that is marked as 2:4; empty for others.

    It is looked at here, as a promise of every pass alike: casts, scaling and symmetric quantisation keep zeros where
    they are, and a pass that moves them would cost the speed that they are for without a word.
    """
    from enginesmith.pipeline import onnx_file
    from enginesmith.pipeline.sparsity import check, marks

    if marks.of(onnx_file.skeleton(before.path)) != marks.TWO_OF_FOUR:
        return ""
    found = check.follow(before.path, path)
    if found.lost:
        raise InvalidGraph(
            f"the pass {pass_.name!r} took weights out of their 2:4 pattern: {found}",
            "leave that pass away, or make the graph sparse after it",
        )
    if marks.of(onnx_file.skeleton(path)) != marks.TWO_OF_FOUR:
        raise InvalidGraph(f"the pass {pass_.name!r} lost the mark of a 2:4 graph", "this is a fault of the pass")
    return str(found)


def by_reason(what: str, left: Mapping[str, str]) -> tuple[str, ...]:
    """Sentences on what a pass did not do: names of groups or weights, those of one reason together."""
    found: dict[str, list[str]] = {}
    for name, why in left.items():
        found.setdefault(why, []).append(name)
    notes = []
    for why, names in list(found.items())[:_SHOWN]:
        more = f" and {len(names) - _NAMES} more" if len(names) > _NAMES else ""
        notes.append(f"{what}: {', '.join(names[:_NAMES])}{more}: {why}")
    rest = sum(map(len, list(found.values())[_SHOWN:]))
    return (*notes, *([f"{what}: {rest} more, each for a reason of its own"] if rest else []))
