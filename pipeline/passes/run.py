"""Apply a pass, with its promises checked before and after."""

from pathlib import Path
from types import MappingProxyType

from enginesmith.pipeline.artifact import Artifact, Effect
from enginesmith.pipeline.errors import InvalidGraph, ModelError, UsageError
from enginesmith.pipeline.frameworks.onnx import model_file, validation
from enginesmith.pipeline.passes.base import Pass, Progress, Records
from enginesmith.pipeline.passes.sparsify import check, sparsify

_FAULT = "this is a fault of the pass, not of the model"


def run_pass(
    pass_: Pass, artifact: Artifact, out: Path, progress: Progress, records: Records = MappingProxyType({})
) -> Effect:
    """Apply a pass, and check that it keeps its promises.

    Raises:
        UsageError: a record that the pass requires is not among ``records``.
        ModelError: the artifact is not what the pass consumes, or what came out is not sound.
    """
    if artifact.kind != pass_.consumes:
        raise ModelError(f"the pass {pass_.name!r} takes a {pass_.consumes} artifact, and got a {artifact.kind} one")
    if lacking := [role for role in pass_.requires if role not in records]:
        raise UsageError(
            f"the pass {pass_.name!r} needs {' and '.join(lacking)} of the graph, and got none", "calibrate it first"
        )
    effect = pass_.apply(artifact, out, progress, records)
    if not (out / effect.file).is_file():
        raise ModelError(f"the pass {pass_.name!r} did not write {effect.file!r}")
    return check_graph(pass_.name, artifact, out, effect) if pass_.produces == "onnx" else effect


def check_graph(name: str, artifact: Artifact, out: Path, effect: Effect) -> Effect:
    """Check the graph that the pass ``name`` made of an artifact; the summary then also tells of its zeros.

    Raises:
        ModelError: it is not sound.
    """
    # what an exporter writes may be the module's fault
    remedy = _FAULT if artifact.kind == "onnx" else validation.EXPORT_AGAIN
    validation.check(out / effect.file, f"the graph that the pass {name!r} wrote", remedy)
    after = model_file.signature(out / effect.file)
    for side in ("inputs", "outputs") if artifact.signature is not None else ():
        expected, names = ([spec.name for spec in getattr(ends, side)] for ends in (artifact.signature, after))
        if names != expected:
            raise InvalidGraph(f"the pass {name!r} changed the {side} from {expected} to {names}")
    sparsity = _check_sparsity(name, artifact, out / effect.file) if artifact.kind == "onnx" else ""
    return effect.model_copy(update={"summary": f"{effect.summary}; {sparsity}"}) if sparsity else effect


def _check_sparsity(name: str, before: Artifact, path: Path) -> str:
    """Describe what became of the weights of a graph that is marked as 2:4; return nothing for others.

    This is a promise of every pass alike: casts, scaling and symmetric quantization keep zeros where they are, and a
    pass that moves them would cost the speed that they are for without a word.
    """
    if sparsify.of(model_file.skeleton(before.path)) != sparsify.TWO_OF_FOUR:
        return ""
    outcome = check.follow(before.path, path)
    if outcome.lost:
        raise InvalidGraph(
            f"the pass {name!r} took weights out of their 2:4 pattern: {outcome}",
            "omit that pass, or make the graph sparse after it",
        )
    if sparsify.of(model_file.skeleton(path)) != sparsify.TWO_OF_FOUR:
        raise InvalidGraph(f"the pass {name!r} lost the mark of a 2:4 graph", _FAULT)
    return str(outcome)
