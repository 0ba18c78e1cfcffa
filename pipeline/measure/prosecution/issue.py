"""Write a finding as a folder: a report for the issue tracker of the software that is wrong, and what it names."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from enginesmith.pipeline.measure.prosecution.evidence import Evidence
from enginesmith.pipeline.measure.prosecution.finding import Finding
from enginesmith.pipeline.measure.prosecution.reduction import measure_distance
from enginesmith.pipeline.tensors import Array, Feeds
from enginesmith.pipeline.units import count_words, format_share, name_some

if TYPE_CHECKING:
    import onnx

FINDING, MODEL, INPUTS, EXPECTED, FOUND, SCRIPT, ISSUE = (
    *("finding.json", "model.onnx", "inputs.npz", "expected.npz", "found.npz", "repro.py", "issue.md"),
)
_ROWS = 5
"""Elements of an output that are shown, the worst ones."""
_OUTPUTS = 4
_OPERATORS = 4
_INPUTS = 12
_WRITTEN_OUT = 16
"""Elements up to which an input or a weight is written out."""
_GRAPH_LINES = 60
_LISTED_ROWS = 8
_LISTED_FAMILIES = ("sizes", "values", "padding")
"""Families whose inputs can be made again by their descriptions."""


@dataclass(frozen=True)
class _Difference:
    """Compare an output with what it should be."""

    name: str
    expected: Array
    found: Array
    apart: Array
    """Distance of each element; infinite where one of them is no finite number."""
    span: float
    """Range of the expected numbers."""
    tolerance: float

    @property
    def worst(self) -> tuple[int, ...]:
        return _to_index(int(self.apart.argmax()), self.apart.shape)

    @property
    def error(self) -> float:
        """The largest distance."""
        return float(self.apart.max())

    @property
    def wrong(self) -> Array:
        """True for the elements that differ."""
        return np.asarray(self.apart > self.tolerance * self.span)


def write_evidence(folder: Path, finding: Finding, evidence: Evidence) -> None:
    """Write the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FINDING).write_text(finding.model_dump_json(indent=1) + "\n", encoding="utf-8")
    if evidence.model is not None:
        (folder / MODEL).write_bytes(evidence.model.SerializeToString())
    _save(folder / INPUTS, evidence.feeds)
    _save(folder / EXPECTED, evidence.expected)
    if evidence.found is not None:
        _save(folder / FOUND, evidence.found)
    if evidence.program:
        (folder / SCRIPT).write_text(evidence.program, encoding="utf-8")
    (folder / ISSUE).write_text(write_issue(finding, evidence), encoding="utf-8")


def _save(file: Path, arrays: Feeds) -> None:
    names = {f"{index}": name for index, name in enumerate(arrays)}
    content: dict[str, Any] = {key: arrays[name] for key, name in names.items()}
    np.savez(file, allow_pickle=False, names=np.array(json.dumps(names)), **content)


def write_issue(finding: Finding, evidence: Evidence) -> str:
    """Write the report in Markdown, with all that is needed to see the fault."""
    differences = _compare(evidence)
    lines = [
        f"# {_write_title(finding, differences)}\n",
        *_describe(finding, differences),
        *_list_differences(finding, evidence, differences),
        *_list_inputs(finding, evidence.feeds),
        *_explain_files(evidence),
        *(_write_graph(evidence.model) if evidence.model is not None else ()),
        "## Versions\n",
        *(f"- {name}: {version}" for name, version in finding.versions.items()),
    ]
    return "\n".join(lines) + "\n"


def _write_title(finding: Finding, differences: "Sequence[_Difference]") -> str:
    nodes = [node if finding.guilty != "engine" else node.split()[0] for node in finding.nodes]
    of = f" of {name_some(nodes, _OPERATORS)}" if nodes else ""
    by = f" with {finding.option.value}" if finding.option and _is_optimizer(finding) else ""
    return f"{finding.software or finding.guilty}: wrong result{of}{by}{_name_symptom(finding, differences)}"


def _name_symptom(finding: Finding, differences: "Sequence[_Difference]") -> str:
    if not differences:
        return ""
    if finding.ties:
        return f", {finding.ties}"
    worst = max(differences, key=lambda each: each.error / each.span)
    if worst.found.shape != worst.expected.shape:
        return f", of shape {list(worst.found.shape)} instead of {list(worst.expected.shape)}"
    if not np.isfinite(worst.error):
        return f", {_write(worst.found[worst.worst])} instead of {_write(worst.expected[worst.worst])}"
    return f", off by up to {format_share(worst.error / worst.span, 3)} of its range"


def _is_optimizer(finding: Finding) -> bool:
    return finding.option is not None and finding.option.field.endswith("disabled_optimizers")


def _describe(finding: Finding, differences: "Sequence[_Difference]") -> Iterator[str]:
    software = finding.software or f"the stage {finding.guilty}"
    part = f" of the {count_words(len(finding.nodes), 'node')} below" if finding.nodes else ""
    whole = f" They are a part of a model of {finding.whole} nodes." if finding.whole and finding.nodes else ""
    symptom = _name_symptom(finding, differences).removeprefix(", ")
    wrong = (
        f"a wrong result{part}: {symptom or finding.reason}" if differences else f"no right result: {finding.reason}"
    )
    yield f"{software} gives {wrong}.{whole}\n"
    if finding.reference:
        yield f"The expected values are from {finding.reference}.\n"
    if _is_optimizer(finding) and finding.option:
        yield f"The result is right if the optimization `{finding.option.value}` is disabled.\n"
    elif finding.workaround:
        yield f"The result is right with `{finding.workaround}` of enginesmith.\n"


def _list_differences(finding: Finding, evidence: Evidence, differences: "Sequence[_Difference]") -> Iterator[str]:
    yield "## Expected and found\n"
    if evidence.found is None:
        yield f"There is no answer: {finding.reason}. Expected are:\n"
        yield from (f"- {_describe_array(name, value)}" for name, value in evidence.expected.items())
        yield ""
    for each in sorted(differences, key=lambda each: -each.error / each.span)[:_OUTPUTS]:
        if each.found.shape != each.expected.shape:
            yield f"`{each.name}` is {_describe_type(each.found)}, expected {_describe_type(each.expected)}.\n"
            continue
        yield f"`{each.name}`, {_describe_type(each.expected)}: {_summarize(each)}.\n"
        yield f"| index in `{each.name}` | expected | found |\n| --- | --- | --- |"
        worst = np.argsort(-each.apart, axis=None, kind="stable")[: min(_ROWS, int(each.wrong.sum()) or 1)]
        for index in (_to_index(int(flat), each.apart.shape) for flat in worst):
            yield f"| {list(index)} | {_write(each.expected[index])} | {_write(each.found[index])} |"
        yield ""
    if evidence.found is not None and not differences:
        yield "No output of the reduced graph differs.\n"


def _summarize(each: _Difference) -> str:
    wrong = each.wrong
    parts = [f"{int(wrong.sum())} of {count_words(wrong.size, 'number')} differ"]
    finite = each.apart[np.isfinite(each.apart)]
    if finite.size and finite.max() > 0:
        by = f"{format_share(float(finite.max()) / each.span, 3)} of the range of the expected ones"
        parts.append(f"by up to {float(finite.max()):.3g} ({by})")
    for word, side in (("expected", each.expected), ("found", each.found)):
        if side.dtype.kind == "f" and (odd := _count_odd(side)):
            parts.append(f"{word} are {' and '.join(odd)}")
    rows = np.unique(np.nonzero(wrong)[0]).tolist() if wrong.ndim > 1 and len(wrong) > 1 else []
    if len(rows):
        shown = ", ".join(map(str, rows[:_LISTED_ROWS])) + (" …" if len(rows) > _LISTED_ROWS else "")
        every = len(rows) == len(wrong)
        parts.append(f"in all {len(wrong)} rows" if every else f"in the rows {shown} of {len(wrong)}")
    return ", ".join(parts)


def _list_inputs(finding: Finding, feeds: Feeds) -> Iterator[str]:
    yield "## Inputs\n"
    yield from (f"- {_describe_array(name, value)}" for name, value in list(feeds.items())[:_INPUTS])
    if len(feeds) > _INPUTS:
        yield f"- and {len(feeds) - _INPUTS} more, in `inputs.npz`"
    yield ""
    tried = f"{finding.walk} ({finding.note})"
    yield f"They are what the whole model computes there for this input: {tried}.\n" if finding.nodes else f"{tried}.\n"
    if finding.right_on:
        of = " of the whole model" if finding.nodes else ""
        families = finding.right_on.items()
        listed = (f"{walk} ({'; '.join(notes)})" if walk in _LISTED_FAMILIES else walk for walk, notes in families)
        yield f"Other inputs{of} were answered right: {', '.join(listed)}.\n"
    for outcome, wrong in (("wrong, too", True), ("right", False)):
        if kinds := [kind for kind, was_wrong in finding.elsewhere.items() if was_wrong == wrong]:
            yield f"With other numbers in the same shapes, the result is {outcome}: {', '.join(kinds)}.\n"


def _explain_files(evidence: Evidence) -> Iterator[str]:
    yield "## To reproduce\n"
    if not evidence.program:
        files = "`model.onnx`, `inputs.npz` and" if evidence.model is not None else "`inputs.npz` and"
        yield f"{files} `expected.npz` are attached.\n"
        return
    yield "`model.onnx`, `inputs.npz` and `expected.npz` are attached. Beside them, this is `repro.py`:\n"
    yield f"```python\n{evidence.program.rstrip()}\n```\n"


def _write_graph(model: "onnx.ModelProto") -> Iterator[str]:
    """Write a small graph as text, with weights of a few numbers."""
    import onnx
    from onnx import printer

    graph = onnx.GraphProto()
    graph.CopyFrom(model.graph)
    large = [tensor for tensor in graph.initializer if int(np.prod(tensor.dims)) > _WRITTEN_OUT]
    for tensor in large:
        graph.initializer.remove(tensor)
    del graph.value_info[:]
    if len(graph.node) > _GRAPH_LINES:
        return
    opsets = ", ".join(f"{entry.domain or 'ai.onnx'} {entry.version}" for entry in model.opset_import)
    yield f"## Graph\n\nOpset: {opsets}.\n\n```\n{printer.to_text(graph).rstrip()}\n```\n"
    for tensor in large[:_INPUTS]:
        dtype = np.dtype(onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)).name
        yield f"- the weight `{tensor.name}`: {dtype}{list(tensor.dims)}"
    if large:
        yield ""


# Arrays


def _compare(evidence: Evidence) -> list[_Difference]:
    """Compare the outputs that differ."""
    answers = evidence.found or {}
    differences = []
    for name, expected in evidence.expected.items():
        if name not in answers:
            continue
        given = np.asarray(answers[name])
        apart, span = measure_distance(expected, given)
        each = _Difference(name, expected, given, apart, span, evidence.tolerance)
        if each.apart.size and each.wrong.any():
            differences.append(each)
    return differences


def _to_index(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(each) for each in np.unravel_index(flat, shape))


def _write(number: "np.generic | Array") -> str:
    """Write a number with the digits that tell it from its neighbors."""
    return f"{number:.9g}" if np.asarray(number).dtype.kind == "f" else str(number)


def _describe_type(value: Array) -> str:
    return f"{value.dtype}{list(value.shape)}"


def _describe_array(name: str, value: Array) -> str:
    """Describe an array: its numbers where they are few, else their range."""
    text = f"`{name}`: {_describe_type(value)}"
    if not value.size:
        return f"{text}, empty"
    if value.size <= _WRITTEN_OUT:
        return f"{text} = {_nest(value)}"
    if value.dtype.kind != "f":
        return f"{text}, from {_write(value.min())} to {_write(value.max())}"
    finite = value[np.isfinite(value)]
    between = [f"from {_write(finite.min())} to {_write(finite.max())}"] if finite.size else []
    return ", ".join([text, *between, *_count_odd(value)])


def _count_odd(value: Array) -> list[str]:
    counts = {"NaN": np.isnan(value).sum(), "infinite": np.isinf(value).sum()}
    return [f"{count} {kind}" for kind, count in counts.items() if count]


def _nest(value: Array) -> str:
    if value.ndim == 0:
        return _write(value[()])
    return f"[{', '.join(map(_nest, value))}]"
