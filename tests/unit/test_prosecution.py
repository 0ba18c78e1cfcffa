"""The search for an input on which an engine is wrong, and the judgement of its answers."""

import itertools
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks.onnx import edit
from enginesmith.pipeline.measure.prosecution import reduction
from enginesmith.pipeline.measure.prosecution.inputs import InputSpace, generate
from enginesmith.pipeline.measure.prosecution.judging import OWN_GRAPH, make_judge, measure_sensitivity
from enginesmith.pipeline.measure.prosecution.locate import find_guilty_stage, locate_fault
from enginesmith.pipeline.measure.prosecution.search import ALONE, GRAPH, MODEL, Disagreement, InputSearch, Subject
from enginesmith.pipeline.measure.prosecution.stages import Stage, Stages
from enginesmith.pipeline.passes.export.attention import decompose_attention
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Array, Feeds, ShapeRange, Signature
from enginesmith.pipeline.units import AddedOption
from prosecuted import SIGNATURE, SPACE, Function, double, no_movement, search, spec

RNG = np.random.default_rng(0)


def test_nan_is_explained_where_the_last_digits_move_the_answer_as_far() -> None:
    """Equal numbers less their mean, divided by their deviation: eager gives some number, an engine 0 / 0."""
    wanted, given = {"y": np.full((4, 6), 0.9, np.float32)}, {"y": np.full((4, 6), np.nan, np.float32)}
    judge = make_judge(SIGNATURE, "fp32", {"y": 4.0})
    assert "NaN" in judge.find_fault(wanted, given, no_movement)
    assert "NaN" in judge.find_fault(wanted, given, lambda: {"y": 0.01})
    assert not judge.find_fault(wanted, given, lambda: {"y": 2.0})
    shapes = judge.judge(wanted, {"y": wanted["y"] + 1}, lambda: {"y": np.inf})
    assert (shapes.fault, shapes.excuse.split("; ")[1]) == ("", "rounding alone gives it another shape")


@pytest.mark.parametrize("fill", [-1e4, -1e9])
def test_masked_places_hide_no_wrong_number(fill: float) -> None:
    masked = np.where(np.arange(6) > 2, fill, np.arange(24).reshape(4, 6)).astype(np.float32)
    judge = make_judge(SIGNATURE, "fp32", {"y": 4.0})
    assert not judge.find_fault({"y": masked}, {"y": masked * np.float32(1 + 1e-6)}, no_movement)
    wrong, unmasked = masked.copy(), masked.copy()
    wrong[1, 1], unmasked[1, 5] = 9, 0
    assert "of sample 1 is off by up to 2" in judge.find_fault({"y": masked}, {"y": wrong}, no_movement)
    assert "in masked places" in judge.find_fault({"y": masked}, {"y": unmasked}, no_movement)
    assert not judge.find_fault({"y": masked}, {"y": unmasked}, lambda: {"y": abs(fill)})  # it moves by itself


# Steps along gradients


def test_steps_along_the_gradient_reach_what_other_inputs_do_not() -> None:
    """The engine is wrong where a weighted sum is large, and as yet a little wrong below: a polynomial's end."""
    weights = RNG.standard_normal(64)
    space = InputSpace(
        Signature(inputs=(spec("x", "float32", 2, 64),), outputs=(spec("y", "float32", 2, 1),)),
        {},
        [{"x": RNG.uniform(-1, 1, (2, 64)).astype(np.float32)}],
    )

    def model(feeds: Feeds) -> dict[str, Array]:
        return {"y": (feeds["x"] @ weights)[:, None].astype(np.float32)}

    def engine(feeds: Feeds) -> dict[str, Array]:
        right = model(feeds)["y"]
        if np.abs(feeds["x"]).max() > 1:  # it is right on outliers
            return {"y": right}
        return {"y": right * (1 + 4e-10 * np.maximum(np.abs(right) - 2, 0) ** 4).astype(np.float32)}

    def differentiate(feeds: Feeds, changes: Feeds) -> dict[str, Array]:
        return {"x": changes["y"] * weights}

    found = {}
    for name, gradient in (("with", differentiate), ("without", None)):
        search = InputSearch(Subject(space, "fp32", engine, model, differentiate=gradient), 0)
        attempts = search._attempts()
        found[name] = next(
            (shown.walk for shown in map(search.examine, itertools.islice(attempts, 120)) if shown is not None), None
        )
    assert found == {"with": "gradients", "without": None}


@pytest.mark.parametrize(("most", "right_on_outliers"), [(35, True), (150, False)])
def test_outputs_are_driven_to_where_no_sample_brings_them(most: float, right_on_outliers: bool) -> None:
    """The engine cuts sums off that only inputs with the signs of the weights reach; below, it is exactly right."""
    weights = RNG.standard_normal((64, 3))
    space = InputSpace(
        Signature(inputs=(spec("x", "float32", 2, 64),), outputs=(spec("y", "float32", 2, 3),)),
        {},
        [{"x": RNG.uniform(-1, 1, (2, 64)).astype(np.float32)}],
    )

    def model(feeds: Feeds) -> dict[str, Array]:
        return {"y": (feeds["x"] @ weights).astype(np.float32)}

    def engine(feeds: Feeds) -> dict[str, Array]:
        right = model(feeds)
        exact = right_on_outliers and np.abs(feeds["x"]).max() > 1
        return right if exact else {"y": right["y"].clip(-most, most)}

    def differentiate(feeds: Feeds, changes: Feeds) -> dict[str, Array]:
        return {"x": changes["y"] @ weights.T}

    found = {}
    for name, gradient in (("with", differentiate), ("without", None)):
        search = InputSearch(Subject(space, "fp32", engine, model, differentiate=gradient), 0)
        shown = filter(None, map(search.examine, itertools.islice(search._attempts(), 120)))
        found[name] = next((each.note for each in shown), None)
    assert found["with"].startswith("y: number")
    assert found["with"].endswith("ten times as large") != right_on_outliers
    assert found["without"] is None


@pytest.mark.parametrize("undefined", [True, False])
def test_inputs_that_are_driven_to_where_the_model_is_not_defined_are_not_judged(undefined: bool) -> None:
    """The signs of the gradient make all rows of a matrix equal, so that rounding decides what its inverse is."""
    sample = {"x": RNG.uniform(1, 2, (2, 8)).astype(np.float32)}
    space = InputSpace(
        Signature(inputs=(spec("x", "float32", 2, 8),), outputs=(spec("y", "float32", 2, 8),)), {}, [sample]
    )

    def answer(feeds: Feeds, where_equal: float) -> dict[str, Array]:
        row = np.where(np.arange(8) < undefined, np.nan, where_equal)
        equal = np.ptp(feeds["x"]) < 1e-3
        return {"y": np.tile(row, (2, 1)).astype(np.float32) if equal else feeds["x"]}

    search = InputSearch(
        Subject(
            space,
            "fp32",
            engine=lambda feeds: {"y": np.nan_to_num(answer(feeds, 1.5)["y"])},
            model=lambda feeds: answer(feeds, 0.5),
            differentiate=lambda feeds, changes: {"x": np.ones((2, 8), np.float32)},
        ),
        0,
    )
    driven = search._drive_output()
    assert driven is not None
    assert np.ptp(driven.feeds["x"]) == 0
    assert (search.examine(driven) is None) == undefined


def test_eager_computes_gradients_of_its_float_inputs() -> None:
    import torch

    from enginesmith.pipeline.engines.torch.session import EagerSession
    from enginesmith.pipeline.system.device import Device

    def forward(x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * x * ids).sum(1), ids

    signature = Signature(
        inputs=(spec("x", "float32", 2, 3), spec("ids", "int64", 2, 3)),
        outputs=(spec("y", "float32", 2), spec("same", "int64", 2, 3)),
    )
    session = EagerSession(forward, signature, Device(), None, lambda: None)
    feeds = {"x": np.arange(6, dtype=np.float32).reshape(2, 3), "ids": np.full((2, 3), 2)}
    slopes = session.differentiate(feeds, {"y": np.array([1.0, -1.0], np.float32)})
    assert np.array_equal(slopes["x"], 4 * feeds["x"] * [[1], [-1]])
    assert slopes.keys() == {"x"}
    assert session.differentiate(feeds, {}) == {}


# Judgement


def test_one_wrong_sample_of_many_is_seen() -> None:
    wanted = {"y": RNG.standard_normal((64, 6)).astype(np.float32)}
    wrong = {"y": wanted["y"].copy()}
    wrong["y"][17] *= 1.5
    for precision in ("fp32", OWN_GRAPH):
        told = make_judge(SIGNATURE, precision, {"y": 4.0}).find_fault(wanted, wrong, no_movement)
        assert "of sample 17" in told
    assert not make_judge(SIGNATURE, "fp32", {}).find_fault(
        wanted, {"y": wanted["y"] * np.float32(1 + 1e-6)}, no_movement
    )


def test_new_nan_and_other_shapes_are_faults() -> None:
    wanted = {"y": np.ones((2, 6), np.float32)}
    odd = {"y": wanted["y"].copy()}
    odd["y"][1, 2] = np.nan
    judge = make_judge(SIGNATURE, "fp32", {})
    assert "NaN" in judge.find_fault(wanted, odd, no_movement)
    assert not judge.find_fault(odd, odd, no_movement)
    assert "expected" in judge.find_fault(wanted, {"y": wanted["y"][:1]}, no_movement)
    assert "outputs" in judge.find_fault(wanted, {"z": wanted["y"]}, no_movement)
    assert "elements" in judge.find_fault({"y": np.array([[1], [2]])}, {"y": np.array([[1], [3]])}, no_movement)


# The search


def test_a_right_engine_is_not_accused() -> None:
    assert search(lambda feeds: {"y": feeds["x"] + feeds["x"]}) is None
    coarse = search(
        lambda feeds: {"y": np.round(feeds["x"] * 2, 1)}, "int8", graph=lambda feeds: {"y": np.round(feeds["x"] * 2, 1)}
    )
    assert coarse is None


def test_single_numbers_are_changed_as_arrays() -> None:
    """An input without axes stays an array in all that is tried: engines take nothing else."""
    form = SIGNATURE.model_copy(update={"inputs": (*SIGNATURE.inputs, spec("scale", "float32"))})
    given = [{**feeds, "scale": np.array(scale, np.float32)} for scale, feeds in enumerate(SPACE.samples, 2)]

    def model(feeds: Feeds) -> dict[str, Array]:
        assert {type(value) for value in feeds.values()} == {np.ndarray}
        return {"y": feeds["x"] * feeds["scale"]}

    def differentiate(feeds: Feeds, changes: Feeds) -> dict[str, Array]:
        return {"x": changes["y"], "scale": np.array(changes["y"].sum())}

    def engine(feeds: Feeds) -> dict[str, Array]:
        return {"y": model(feeds)["y"] * np.float32(1 + 2e-7)}

    subject = Subject(InputSpace(form, SPACE.ranges, given), "fp32", engine, model, differentiate=differentiate)
    search = InputSearch(subject, seed=0)
    for attempt in itertools.islice(search._attempts(), 120):
        search.examine(attempt)
        measure_sensitivity(model, attempt.feeds, "fp32")


@pytest.mark.parametrize(("factor", "guilty"), [(2.0, 2), (3.0, 1)])
def test_a_graph_is_not_guilty_of_what_the_runtime_that_computes_it_does(
    tmp_path: Path, factor: float, guilty: int
) -> None:
    """ONNX Runtime computes the graphs in between: onnx's own evaluator says whether they are right."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 6]) for name in "xy"]
    stored = [numpy_helper.from_array(np.float32(factor), "factor")]
    graph = helper.make_graph([helper.make_node("Mul", ["x", "factor"], ["y"])], "g", ends[:1], ends[1:], stored)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path := tmp_path / "graph.onnx")
    stages = (
        Stage("model", double, "fp32"),
        Stage("export", lambda feeds: {"y": 3 * feeds["x"]}, "fp32", path),
        Stage("engine", lambda feeds: {"y": 3 * feeds["x"]}, "fp32"),
    )
    feeds = SPACE.samples[0]
    shown = Disagreement(
        walk="values", note="", witness=MODEL, reason="", attempts=1, feeds=feeds, expected=double(feeds), found=None
    )
    assert find_guilty_stage(Stages(stages, engine_class("onnxruntime")(), Device(), 1), shown) == guilty


def test_an_engine_is_guilty_of_what_the_runtime_without_optimization_shares(tmp_path: Path) -> None:
    """The kernel is wrong in both: onnx's evaluator tells, the node is named, and another export is the option."""
    shape, lowest = ["batch", 1, 3, 2], np.finfo(np.float32).min
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
    stored = [numpy_helper.from_array(np.full((1, 1, 3, 3), lowest), "mask")]
    nodes = [
        helper.make_node("Relu", ["x"], ["a"], "before"),
        helper.make_node("Attention", ["a", "a", "a", "mask"], ["b"], "attention"),
        helper.make_node("Neg", ["b"], ["y"], "behind"),
    ]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], stored)
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10),
        path := tmp_path / "g.onnx",
    )

    def model(feeds: Feeds) -> dict[str, Array]:
        mean = np.maximum(feeds["x"], 0).mean(2, keepdims=True)
        return {"y": -np.broadcast_to(mean, feeds["x"].shape)}

    def decompose(out: Path) -> Artifact:
        net = edit.load(path)
        decompose_attention(net)
        out.mkdir(parents=True)
        edit.save(net, out)
        return Artifact(kind="onnx", path=out / edit.FILE, sha256="", bytes=0)

    option = AddedOption(field="export.attention", value="decomposed", words="--attention decomposed")
    engine = engine_class("onnxruntime")(graph_optimization="disabled")  # type: ignore[call-arg]
    feeds = {"x": RNG.standard_normal((1, 1, 3, 2)).astype(np.float32)}
    answer = reduction.compute(onnx.load(path), feeds)
    stages = (
        Stage("model", model, "fp32"),
        Stage("export", lambda feeds: answer, "fp32", path, other_graphs=lambda _: iter([(option, decompose)])),
        Stage("engine", lambda feeds: answer, "fp32"),
    )
    shown = Disagreement(
        walk="", note="", witness=MODEL, reason="", attempts=1, feeds=feeds, expected=model(feeds), found=answer
    )
    finding = locate_fault(Stages(stages, engine, Device(), 60), shown, tmp_path / "finding")
    assert (finding.guilty, finding.nodes, finding.unreduced) == ("engine", ("Attention attention",), "")
    assert "the evaluator of onnx" in finding.reference
    assert finding.option == option


def test_a_wrong_size_is_found() -> None:
    def wrong_at_7(feeds: Feeds) -> dict[str, Array]:
        return {"y": feeds["x"] * (3 if len(feeds["x"]) == 7 else 2)}

    found = search(wrong_at_7)
    assert found is not None
    assert (found.witness, len(found.feeds["x"])) == (MODEL, 7)


def test_samples_that_depend_on_their_batch_are_found_in_a_low_precision() -> None:
    """By so little that the precision explains the difference from the model."""

    def mixes(feeds: Feeds) -> dict[str, Array]:
        return {"y": 2 * feeds["x"] + np.float32(0.8) * np.roll(feeds["x"], 1, axis=0) * (len(feeds["x"]) > 2)}

    found = search(mixes, "int4")
    assert found is not None
    assert found.witness in (ALONE, MODEL)
    apart = InputSearch(Subject(SPACE, "int4", mixes, double, rows_apart=False), seed=0)
    samples = list(itertools.islice(generate(SPACE, 0), 2))
    assert all((seen := apart.examine(each)) is None or seen.witness == MODEL for each in samples)


def test_a_model_whose_samples_change_each_other_now_and_then_accuses_no_engine() -> None:
    """Large values anywhere in the batch change all answers, and most inputs have none."""

    def limits(feeds: Feeds) -> dict[str, Array]:
        return {"y": feeds["x"] * (3 if np.abs(feeds["x"]).max() > 2.5 else 2)}

    search = InputSearch(Subject(SPACE, "fp32", limits, limits), seed=0)
    assert not [each for each in itertools.islice(generate(SPACE, 0), 150) if search.examine(each)]


def test_samples_are_taken_from_where_the_batch_is() -> None:
    """Also where it is the second dimension, as in networks that take time first."""
    signature = Signature(inputs=(spec("x", "float32", 6, "batch"),), outputs=(spec("y", "float32", 6, "batch"),))
    feeds = [{"x": RNG.standard_normal((6, 4)).astype(np.float32)} for _ in range(2)]
    space = InputSpace(signature, {"batch": ShapeRange.parse("1:4:9")}, feeds)
    attempts = list(itertools.islice(generate(space, 0), 60))
    assert {attempt.feeds["x"].shape[0] for attempt in attempts} == {6}
    assert {attempt.feeds["x"].shape[1] for attempt in attempts} >= {1, 4, 9}
    size = next(attempt for attempt in attempts if attempt.walk == "sizes" and attempt.feeds["x"].shape[1] < 4)
    known = {column.tobytes() for one in feeds for column in one["x"].T}
    assert {column.tobytes() for column in size.feeds["x"].T} <= known

    def mixes(feeds: Feeds) -> dict[str, Array]:
        x = feeds["x"]
        return {"y": 2 * x + np.float32(0.8) * np.roll(x, 1, axis=1) * (x.shape[1] > 2)}

    def examine(engine: Function) -> list[Disagreement]:
        search = InputSearch(Subject(space, "int4", engine, double), seed=0)
        return [found for attempt in attempts if (found := search.examine(attempt))]

    assert not examine(double)
    found = next(each for each in examine(mixes) if each.witness == ALONE)
    row = int(found.reason.split()[1])
    assert found.found is not None
    np.testing.assert_array_equal(found.expected["y"][:, row], 2 * found.feeds["x"][:, row])
    other = (row + 1) % found.feeds["x"].shape[1]
    np.testing.assert_array_equal(found.expected["y"][:, other], found.found["y"][:, other])


@pytest.mark.parametrize("judged", [True, False])
def test_what_a_low_precision_loses_is_left_to_those_who_judge_it(judged: bool) -> None:
    """A graph that is far off even on samples, and an engine that computes what it says."""

    def loses(feeds: Feeds) -> dict[str, Array]:
        return {"y": 2 * feeds["x"].round()}

    found = search(loses, "int8", graph=loses, loss_judged=judged)
    assert (found is not None and found.witness == MODEL) == judged
    assert search(lambda feeds: {"y": loses(feeds)["y"] + 1}, "int8", graph=loses, loss_judged=judged) is not None


def test_what_a_low_precision_loses_on_unusual_values_is_no_fault_unless_its_own_graph_does_not() -> None:
    def saturates(feeds: Feeds) -> dict[str, Array]:
        return {"y": 2 * feeds["x"].clip(-2.8, 2.8)}

    assert search(saturates, "int8", graph=saturates) is None
    found = search(saturates, "int8", graph=double)
    assert found is not None
    assert found.witness == GRAPH


_LOSES = np.float32(1.01)


def double_but_zero(feeds: Feeds) -> dict[str, Array]:
    """Answer right but where a number is large, as a runtime with a wrong kernel."""
    return {"y": 2 * feeds["x"] * (np.abs(feeds["x"]).max(1, keepdims=True) < 2.8)}


def scale(answer: Function) -> Function:
    return lambda feeds: {"y": answer(feeds)["y"] * _LOSES}


@pytest.mark.parametrize(
    ("engine", "definition", "witness"),
    [
        (scale(double), scale(double), ""),
        (scale(double), lambda feeds: {}, ""),
        (scale(double_but_zero), scale(double), MODEL),
        (scale(double_but_zero), lambda feeds: {}, MODEL),
        (lambda feeds: {"y": -double(feeds)["y"]}, scale(double), GRAPH),
    ],
)
def test_a_runtime_that_is_wrong_in_float_accuses_no_other_engine(
    engine: Function, definition: Function, witness: str
) -> None:
    """ONNX Runtime computes the own graph of an engine in int8; the one that shares its kernels is wrong, too."""
    wrong = {"graph": scale(double_but_zero), "float_graph": double_but_zero, "loss_judged": False}
    found = search(engine, "int8", definition=definition, **wrong)
    assert (found.witness if found else "") == witness


def test_numbers_that_stand_for_infinity_are_not_changed_in_their_last_digits() -> None:
    """Else a row of nothing but the lowest number would choose one of its places."""
    lowest = np.finfo(np.float32).min

    def attend(feeds: Feeds) -> dict[str, Array]:
        scores = np.exp(feeds["x"] - feeds["x"].max(1, keepdims=True))
        return {"y": scores / scores.sum(1, keepdims=True)}

    assert measure_sensitivity(attend, {"x": np.full((2, 6), lowest)}, "fp32")["y"] == 0
    assert measure_sensitivity(attend, {"x": np.arange(12.0, dtype=np.float32).reshape(2, 6)}, "fp32")["y"] > 0


def test_an_engine_that_refuses_an_allowed_input_is_found() -> None:
    def refuses(feeds: Feeds) -> dict[str, Array]:
        if len(feeds["x"]) > 8:
            raise ModelError("no room")
        return double(feeds)

    found = search(refuses)
    assert found is not None
    assert found.found is None
    assert "no room" in found.reason
