"""Sequences with lengths of their own in OpenVINO: recurrent layers, and masks that are made of the lengths."""

import contextlib
import itertools
import runpy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.openvino.engine import OpenVINO
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.system.device import Device
from graphs import parse_graph, run_model
from openvino_graphs import CPU, build

if not (openvino := OpenVINO.available(CPU)).ok:
    pytest.skip(f"{openvino.reason}; {openvino.remedy}", allow_module_level=True)

_GATES = {"GRU": 3, "LSTM": 4, "RNN": 1}
_HIDDEN, _FEATURES = 3, 4
_GIVEN = "int32[b] l"


def make_layer(
    operator: str,
    direction: str,
    *,
    batch: str = "b",
    steps: str = "t",
    lengths: str = _GIVEN,
    more: str = "",
    outputs: str = "y, h",
) -> Any:
    """Make a graph of a recurrent layer with a first state."""
    rng, count = np.random.default_rng(0), 2 if direction == "bidirectional" else 1
    rows = _GATES[operator] * _HIDDEN
    shapes = {"w": (count, rows, _FEATURES), "r": (count, rows, _HIDDEN), "k": (count, 2 * rows)}
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    read = "l" if lengths else ""
    ends = ", ".join(f"float[{'s, d, b, u' if name == 'y' else 'd, b, u'}] {name}" for name in outputs.split(", "))
    attributes = f'hidden_size = {_HIDDEN}, direction = "{direction}"{more}'
    inputs = ", ".join(filter(None, (f"float[{steps}, b, {_FEATURES}] x", f"float[{count}, b, {_HIDDEN}] s", lengths)))
    text = f"net ({inputs}) => ({ends}) {{ {outputs} = {operator} <{attributes}> (x, w, r, k, {read}, s) }}"
    return parse_graph(text.replace("b,", f"{batch},").replace("[b]", f"[{batch}]"), 17, **weights)


@pytest.mark.parametrize("direction", ["forward", "reverse", "bidirectional"])
@pytest.mark.parametrize(
    ("operator", "more"), [("GRU", ""), ("GRU", ", linear_before_reset = 1"), ("LSTM", ""), ("RNN", "")]
)
@pytest.mark.parametrize(("lengths", "steps"), [(_GIVEN, "s"), (_GIVEN, "5"), ("", "s")])
def test_steps_behind_the_end_of_a_sequence_are_left_out(
    tmp_path: Path, operator: str, more: str, direction: str, lengths: str, steps: str
) -> None:
    """OpenVINO ignores the lengths where the batch or the number of steps is dynamic."""
    model = make_layer(operator, direction, lengths=lengths, more=more, steps=steps)
    artifact, _ = build(make_layer(operator, direction, lengths=lengths, more=more, steps=steps), tmp_path)
    rng = np.random.default_rng(1)
    feeds: dict[str, Any] = {"x": rng.standard_normal((5, 3, _FEATURES)).astype(np.float32)}
    feeds["s"] = rng.standard_normal((1 + (direction == "bidirectional"), 3, _HIDDEN)).astype(np.float32)
    if lengths:
        feeds["l"] = np.int32([5, 3, 0])
    with OpenVINO().load(artifact, CPU) as session:
        found = session.run(feeds)
    for name, wanted in run_model(model, feeds).items():
        np.testing.assert_allclose(found[name], wanted, atol=1e-5)


def test_an_lstm_of_coupled_gates_is_refused(tmp_path: Path) -> None:
    """OpenVINO ignores it that the forget gate is made of the input gate."""
    with pytest.raises(ModelError, match="OpenVINO ignores the attribute input_forget"):
        build(make_layer("LSTM", "forward", lengths="", more=", input_forget = 1"), tmp_path)
    (tmp_path / "own").mkdir()
    build(make_layer("LSTM", "forward", lengths="", more=", input_forget = 0"), tmp_path / "own")


def test_the_last_state_of_a_cell_is_refused_where_lengths_are_ignored(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="ignores the lengths of sequences in"):
        build(make_layer("LSTM", "forward", outputs="y, h, c"), tmp_path)
    for name, options in (("fixed", {"steps": "5", "batch": "3"}), ("none", {"lengths": ""})):
        (tmp_path / name).mkdir()
        build(make_layer("LSTM", "forward", outputs="y, h, c", **options), tmp_path / name)


MASK = """net (float[n, t, 4] x, int64[n] lengths) => (float[n, t, 4] y) {
    most = ReduceMax <keepdims = 0> (lengths)
    places = Range(zero, most, one)
    column = Unsqueeze(lengths, axis)
    within = Less(places, column)
    mask = Unsqueeze(within, last)
    exponentials = Exp(x)
    y = Where(mask, exponentials, outside)
}"""
"""A mask as wide as the longest sequence: where that is shorter than the data, it does not fit them."""

POOLED = MASK.replace("int64[n]", "int64[1]").replace("[n, t, 4] x", "[1, t, 4] x").replace("[n, t, 4] y", "[1, 4] y")
POOLED = POOLED.replace(
    "    y = Where(mask, exponentials, outside)",
    """    wide = Where(mask, exponentials, outside)
    y = ReduceMax <axes = [1], keepdims = 0> (wide)""",
)
"""The same with an output of one size, which a call that fails does not leave empty."""

Answer = Callable[[dict[str, Any]], dict[str, Any]]


@contextlib.contextmanager
def answer_in_session(artifact: Artifact, device: Device) -> Iterator[Answer]:
    with OpenVINO().load(artifact, device) as session:
        yield session.run


@contextlib.contextmanager
def answer_for_caller(artifact: Artifact, device: Device) -> Iterator[Answer]:
    with OpenVINO().load(artifact, device) as session:
        yield lambda feeds: {"y": session.answer([*feeds.values()])[0]}


@contextlib.contextmanager
def answer_in_sibling(artifact: Artifact, device: Device) -> Iterator[Answer]:
    """Fail in one session, and answer in another one on the same weights, whose inputs are set already."""
    with OpenVINO().load(artifact, device) as session, session.sibling() as sibling:

        def answer(feeds: dict[str, Any]) -> dict[str, Any]:
            if int(feeds["lengths"].max()) < feeds["x"].shape[1]:
                return session.run(feeds)
            bound = sibling.bind(feeds)
            with contextlib.suppress(ModelError):
                session.run({**feeds, "lengths": feeds["lengths"] // 2})
            sibling.enqueue(bound)
            with contextlib.suppress(ModelError):
                session.run({**feeds, "lengths": feeds["lengths"] // 2})
            sibling.enqueue(bound)
            return sibling.fetch()

        yield answer


@contextlib.contextmanager
def answer_in_bundle(artifact: Artifact, device: Device) -> Iterator[Answer]:
    run = runpy.run_path(str(OpenVINO.infer_script()))
    options = OpenVINO().package_facts(artifact.path, device).options
    inputs = [{"shape": ["n", "t", 4]}, {"shape": ["n"]}]
    facts = {"options": options, "inputs": inputs, "outputs": [{"name": "y", "shape": ["n", "t", 4]}]}
    yield run["_openvino"](artifact.path, facts)


@pytest.mark.parametrize("opened", [answer_in_session, answer_for_caller, answer_in_bundle])
def test_an_output_of_one_size_is_not_that_of_another_call(
    tmp_path: Path, opened: Callable[[Artifact, Device], contextlib.AbstractContextManager[Answer]]
) -> None:
    constants = {"zero": np.int64(0), "one": np.int64(1), "axis": np.int64([1]), "last": np.int64([2])}
    artifact, _ = build(parse_graph(POOLED, 17, outside=np.float32(-1), **constants), tmp_path)
    rng, refused = np.random.default_rng(0), 0
    with opened(artifact, Device(threads=1)) as answer:
        for length in (20, 9, 20, 3, 3, 20):
            x = rng.standard_normal((1, 20, 4)).astype(np.float32)
            try:
                found = answer({"x": x, "lengths": np.array([length])})["y"]
            except (ModelError, RuntimeError):
                refused += 1
                continue
            np.testing.assert_allclose(found, np.exp(x).max(1), rtol=1e-5)
    assert refused == 3


@pytest.mark.parametrize(
    ("opened", "threads"),
    [*itertools.product((answer_in_session, answer_for_caller, answer_in_sibling, answer_in_bundle), (1, 2))],
)
def test_calls_after_one_that_was_refused_are_answered_right(
    tmp_path: Path,
    opened: Callable[[Artifact, Device], contextlib.AbstractContextManager[Answer]],
    threads: int,
) -> None:
    """OpenVINO keeps sizes of the call that failed, and on one thread it fails without an error.

    Later calls were refused, or had answers of other sizes.
    """
    constants = {"zero": np.int64(0), "one": np.int64(1), "axis": np.int64([1]), "last": np.int64([2])}
    artifact, _ = build(parse_graph(MASK, 17, outside=np.float32(-1), **constants), tmp_path)
    rng, refused = np.random.default_rng(0), 0
    with opened(artifact, Device(threads=threads)) as answer:
        for _ in range(24):
            x = rng.standard_normal((int(rng.integers(1, 4)), 20, 4)).astype(np.float32)
            lengths = rng.choice([3, 9, 20], len(x))
            try:
                found = answer({"x": x, "lengths": lengths})["y"]
            except (ModelError, RuntimeError):
                assert lengths.max() < 20
                refused += 1
                continue
            within = np.arange(20) < lengths[:, np.newaxis]
            if lengths.max() == 20:
                np.testing.assert_allclose(found, np.where(within[..., np.newaxis], np.exp(x), -1), rtol=1e-5)
    assert refused > 3
