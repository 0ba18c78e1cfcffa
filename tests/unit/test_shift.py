"""Channels that are shifted to the middle of their ranges: where that is exact, and where they stay."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from enginesmith.pipeline.artifact import Artifact, Effect
from enginesmith.pipeline.frameworks.onnx import edit, validation
from enginesmith.pipeline.passes.rescale.shift import ChannelShift, ShiftResult, shift_channels
from enginesmith.pipeline.passes.run import run_pass
from graphs import Weights, artifact, difference, evaluate, measure_ranges, node, normal, operators, save_graph

WIDTH = 6
OFFSETS = np.float32([150, -80, 0, 40, -140, 9])


def residual(**more: Any) -> tuple[list[onnx.NodeProto], Weights]:
    """A stream of two blocks with a constant on each channel, which all that read it subtract again."""
    weights = {"w": normal(3, WIDTH), "o": OFFSETS, "w1": normal(WIDTH, 8, seed=1)}
    weights["b1"] = normal(8, seed=2) - more.get("o", OFFSETS) @ weights["w1"]
    weights |= {"v1": normal(8, WIDTH, seed=3) / 8, "w2": normal(4, WIDTH, seed=4), "b2": normal(4, seed=5), **more}
    nodes = [node("MatMul", "x w", "s"), node("Add", "o s", "h")]
    nodes += [
        node("MatMul", "h w1", "m"),
        node("Add", "m b1", "n"),
        node("Relu", "n", "r"),
        node("MatMul", "r v1", "p"),
    ]
    nodes += [node("Add", "h p", "k"), node("Gemm", "k w2 b2", "y", transB=1, alpha=0.5, beta=2.0)]
    return nodes, weights


def shifted(path: Path, x: Any, *names: str, axis: int = 1) -> tuple[Path, ShiftResult]:
    model = edit.load(path)
    done = shift_channels(model, measure_ranges(path, x, *names, axis=axis))
    out = path.parent / "out"
    out.mkdir(exist_ok=True)
    edit.save(model, out)
    validation.check(out / edit.FILE)
    assert operators(out / edit.FILE) == operators(path)
    return out / edit.FILE, done


def test_a_stream_is_shifted_where_it_begins_and_all_readers_make_up_for_it(tmp_path: Path) -> None:
    path, x = save_graph(tmp_path, *residual(), x=("n", 3)), normal(64, 3, seed=9)
    after, done = shifted(path, x, "h", "k")
    assert (done.values, done.products) == (2, 2)
    assert done.before > 140
    assert done.after < 8
    values = evaluate(after, x, "h", "k")
    both = np.concatenate([values["h"], values["k"]])
    np.testing.assert_allclose(both.max(axis=0), -both.min(axis=0), rtol=1e-3)  # about the middle of both
    assert np.abs(both).max() == pytest.approx(done.after, rel=1e-3)
    assert difference(path, after, x) < 1e-5
    again, done = shifted(after, x, "h", "k")
    assert done.values == 0
    assert difference(after, again, x) == 0


def test_a_bias_further_on_takes_what_is_added_there(tmp_path: Path) -> None:
    """The first block adds constants to a stream that had none: only what comes behind is shifted."""
    nodes, weights = residual(o=np.zeros(WIDTH, np.float32), q=OFFSETS)
    at = next(index for index, each in enumerate(nodes) if each.output[0] == "k")
    nodes[at : at + 1] = [node("Add", "p q", "t"), node("Add", "t h", "k")]
    path, x = save_graph(tmp_path, nodes, weights, x=("n", 3)), normal(64, 3, seed=9)
    after, done = shifted(path, x, "h", "k")
    assert (done.values, done.products) == (2, 1)
    values = [evaluate(each, x, "h", "k") for each in (path, after)]
    np.testing.assert_array_equal(values[0]["h"], values[1]["h"])
    assert np.abs(values[1]["k"]).max() < 8
    assert difference(path, after, x) < 1e-5


def test_what_is_left_of_an_offset_is_shifted_further_on(tmp_path: Path) -> None:
    """A block adds to the offset of its stream: the middle of both is not that of either."""
    nodes, weights = residual(o=OFFSETS, q=OFFSETS / 2)
    at = next(index for index, each in enumerate(nodes) if each.output[0] == "k")
    nodes[at : at + 1] = [node("Add", "p q", "t"), node("Add", "t h", "k")]
    path, x = save_graph(tmp_path, nodes, weights, x=("n", 3)), normal(64, 3, seed=9)
    after, done = shifted(path, x, "h", "k")
    assert (done.values, done.products) == (3, 2)
    assert np.abs(evaluate(after, x, "k")["k"]).max() < 8
    assert difference(path, after, x) < 1e-5


def test_a_layer_normalization_takes_the_shift_of_all_that_read_it(tmp_path: Path) -> None:
    weights = {"g": normal(WIDTH) / 4, "o": OFFSETS, "w1": normal(WIDTH, 4, seed=1), "b1": normal(4, seed=2)}
    weights |= {"w2": normal(WIDTH, 4, seed=3), "b2": np.float32(3)}
    nodes = [node("LayerNormalization", "x g o", "h"), node("MatMul", "h w1", "a"), node("Add", "a b1", "c")]
    nodes += [node("MatMul", "h w2", "d"), node("Add", "b2 d", "e"), node("Mul", "c e", "y")]
    path, x = save_graph(tmp_path, nodes, weights, x=("n", 5, WIDTH)), normal(16, 5, WIDTH, seed=9)
    after, done = shifted(path, x, "h", axis=2)
    assert (done.values, done.products) == (1, 2)
    assert difference(path, after, x) < 1e-5


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize(("attributes", "moved"), [({}, True), ({"pads": [1, 1, 1, 1]}, False)])
def test_convolutions_are_shifted_unless_they_pad(
    tmp_path: Path, groups: int, attributes: dict[str, Any], moved: bool
) -> None:
    """Zeros at the border are not shifted. The second convolution gets a bias."""
    weights = {"w": normal(WIDTH, 3, 1, 1), "o": OFFSETS, "w1": normal(4, WIDTH // groups, 3, 3, seed=1)}
    nodes = [node("Conv", "x w o", "h"), node("Conv", "h w1", "y", group=groups, **attributes)]
    path, x = save_graph(tmp_path, nodes, weights, x=("n", 3, 8, 8)), normal(4, 3, 8, 8, seed=9)
    after, done = shifted(path, x, "h")
    assert (done.values, done.products) == ((1, 1) if moved else (0, 0))
    assert difference(path, after, x) < 1e-5


def test_a_bias_that_others_add_too_is_theirs_as_it_was(tmp_path: Path) -> None:
    nodes, weights = residual(o=OFFSETS[:WIDTH], w2=normal(WIDTH, WIDTH), b2=OFFSETS)
    for each in nodes:
        if each.op_type == "Gemm":
            each.input[2] = "o"
    nodes += [node("Add", "x z", "u"), node("MatMul", "u w", "j"), node("Add", "j o", "z2")]
    weights["z"] = np.float32(1)
    path, x = save_graph(tmp_path, nodes, weights, "y z2", x=("n", 3)), normal(64, 3, seed=9)
    after, done = shifted(path, x, "h", "k")
    assert done.values == 2
    assert difference(path, after, x) < 1e-5


@pytest.mark.parametrize(
    "change",
    ["another reader", "an output", "a reader without bias", "added to itself", "no offset", "unknown", "no bias"],
)
def test_channels_stay_where_shifting_is_not_free_or_does_not_pay(tmp_path: Path, change: str) -> None:
    nodes, weights = residual()
    outputs, names = "y", ["h", "k"]
    match change:
        case "another reader":
            nodes, outputs = [*nodes, node("Sigmoid", "k", "z")], "y z"
        case "an output":
            outputs = "y k"
        case "a reader without bias":
            nodes, outputs = [*nodes, node("MatMul", "k v", "z")], "y z"
            weights["v"] = normal(WIDTH, 2)
        case "added to itself":
            nodes[-1].input[0], names = "k2", ["h", "k2"]
            nodes.insert(-1, node("Add", "k h", "k2"))
        case "no offset":
            weights["o"] = np.zeros(WIDTH, np.float32)
        case "unknown":
            names = ["h"]
        case "no bias":  # the stream begins with what no constant is added to
            nodes[1:2] = [node("Mul", "s o", "h")]
    path, x = save_graph(tmp_path, nodes, weights, outputs, x=("n", 3)), normal(64, 3, seed=9)
    after, done = shifted(path, x, *names)
    assert done.values == 0
    assert after.stat().st_size > 0
    assert difference(path, after, x) == 0


def applied(path: Path, x: Any) -> tuple[Path, Effect]:
    found = measure_ranges(path, x, "h", "k")
    given = artifact(path)
    ranges = path.parent / "ranges.json"
    ranges.write_text(found.model_copy(update={"model_sha256": given.sha256}).model_dump_json(), encoding="utf-8")
    out = path.parent / "pass"
    out.mkdir()
    record = Artifact(kind="record", path=ranges, sha256="r", bytes=0, signature=None)
    return out / edit.FILE, run_pass(ChannelShift(), given, out, lambda message: None, {"ranges": record})


def test_the_pass_says_what_it_did(tmp_path: Path) -> None:
    path, x = save_graph(tmp_path, *residual(), x=("n", 3)), normal(64, 3, seed=9)
    after, effect = applied(path, x)
    assert effect.summary.startswith("shifted the channels of 2 values that 2 products read; largest magnitude 15")
    assert difference(path, after, x) < 1e-5


def test_what_has_nothing_to_shift_is_passed_on(tmp_path: Path) -> None:
    path = save_graph(tmp_path, *residual(o=np.zeros(WIDTH, np.float32)), x=("n", 3))
    after, effect = applied(path, normal(64, 3, seed=9))
    assert effect.notes == ("no channels have constant offsets that biases can take",)
    assert after.read_bytes() == path.read_bytes()


def test_biases_of_experts_make_up_for_a_shift(tmp_path: Path) -> None:
    weights = {"w": normal(3, WIDTH), "o": OFFSETS, "v": normal(2, WIDTH, 4, seed=1), "b": normal(4, seed=2)}
    nodes = [node("MatMul", "x w", "s"), node("Add", "s o", "h"), node("MatMul", "h v", "m"), node("Add", "m b", "y")]
    path, x = save_graph(tmp_path, nodes, weights, x=("n", 1, 7, 3)), normal(8, 1, 7, 3, seed=9)
    after, done = shifted(path, x, "h", axis=-1)
    assert (done.values, done.products) == (1, 1)
    assert difference(path, after, x) < 1e-5
