"""The search for an input on which an engine is wrong, and the judgement of its answers."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks.fidelity import OutputFidelity
from enginesmith.pipeline.frameworks.onnx import edit
from enginesmith.pipeline.measure.prosecution import judging, reduction
from enginesmith.pipeline.measure.prosecution import search as searching
from enginesmith.pipeline.measure.prosecution.inputs import InputSpace, generate
from enginesmith.pipeline.measure.prosecution.judging import OWN_GRAPH, make_judge, measure_sensitivity
from enginesmith.pipeline.measure.prosecution.locate import find_guilty_stage, locate_fault
from enginesmith.pipeline.measure.prosecution.search import ALONE, GRAPH, MODEL, Disagreement, InputSearch, Subject
from enginesmith.pipeline.measure.prosecution.stages import Stage, Stages
from enginesmith.pipeline.passes.export.attention import decompose_attention
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Array, Feeds, ShapeRange, Signature
from enginesmith.pipeline.units import AddedOption
from prosecuted import SIGNATURE, SPACE, spec

RNG = np.random.default_rng(0)
Function = Callable[[Feeds], dict[str, Array]]


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


def no_movement() -> dict[str, float]:
    return {}


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


def test_what_the_inputs_last_digits_explain_is_no_fault() -> None:
    """A mean of equal numbers is subtracted, and the rest is normalized: any digit may come out."""

    def normalize(feeds: Feeds) -> dict[str, Array]:
        centered = feeds["x"] - feeds["x"].mean(axis=1, keepdims=True)
        return {"y": centered / np.sqrt((centered**2).mean(axis=1, keepdims=True) + 1e-12)}

    feeds = {"x": np.full((2, 6), 1000, np.float32) + RNG.standard_normal((2, 6)).astype(np.float32) * 1e-3}
    wanted = normalize(feeds)
    other = {"y": wanted["y"] + np.float32(0.2)}
    judge = make_judge(SIGNATURE, "fp32", {})
    assert judge.find_fault(wanted, other, no_movement)
    assert not judge.find_fault(wanted, other, lambda: measure_sensitivity(normalize, feeds, "fp32"))
    calm = {"x": RNG.standard_normal((2, 6)).astype(np.float32)}
    wanted = normalize(calm)
    assert judge.find_fault(
        wanted, {"y": wanted["y"] + np.float32(0.2)}, lambda: measure_sensitivity(normalize, calm, "fp32")
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


def double(feeds: Feeds) -> dict[str, Array]:
    return {"y": 2 * feeds["x"]}


def search(
    engine: Function, precision: str = "fp32", model: Function | None = None, **more: Any
) -> Disagreement | None:
    search = InputSearch(Subject(SPACE, precision, engine, model or double, **more), seed=0)
    for attempt in itertools.islice(generate(SPACE, 0), 150):
        search.attempts += 1
        if found := search.examine(attempt):
            return search.shrink(found)
    return None


def test_a_right_engine_is_not_accused() -> None:
    assert search(lambda feeds: {"y": feeds["x"] + feeds["x"]}) is None
    coarse = search(
        lambda feeds: {"y": np.round(feeds["x"] * 2, 1)}, "int8", graph=lambda feeds: {"y": np.round(feeds["x"] * 2, 1)}
    )
    assert coarse is None


def test_what_rounding_within_the_model_explains_is_no_fault() -> None:
    def engine(feeds: Feeds) -> dict[str, Array]:
        return {"y": 2 * feeds["x"] + np.float32(0.01)}

    def perturb(feeds: Feeds, step: float, seed: int) -> dict[str, Array]:
        return {"y": 2 * feeds["x"] - np.float32(0.01 * np.sign(step))}

    assert search(engine) is not None
    assert search(engine, perturb=perturb) is None
    assert search(engine, perturb=lambda feeds, step, seed: {}) is not None
    assert search(lambda feeds: {"y": 2 * feeds["x"] + 1}, perturb=perturb) is not None


def test_rounding_explains_that_a_sample_is_answered_otherwise_alone_where_it_explains_it_of_the_model() -> None:
    """Sums in another order in a batch of several, in a model that makes much of it; input digits explain nothing.

    The engine is another function than the model, as that decides which of them rounding is known of.
    """

    def answer(feeds: Feeds) -> dict[str, Array]:
        return {"y": 2 * feeds["x"] + np.float32(0.01 * (len(feeds["x"]) > 1))}

    def perturb(feeds: Feeds, step: float, seed: int) -> dict[str, Array]:
        return {"y": 2 * feeds["x"] - np.float32(0.01 * np.sign(step))}

    def mix(feeds: Feeds) -> dict[str, Array]:
        rows = len(feeds["x"])
        return {"y": answer(feeds)["y"] + np.float32(0.8) * np.roll(feeds["x"], 1, axis=0) * (rows > 2)}

    assert search(lambda feeds: answer(feeds), model=answer, perturb=perturb) is None
    for precision in ("fp32", "int4"):
        mixed = search(mix, precision, model=answer, perturb=perturb, loss_judged=False)
        assert mixed is not None
        assert mixed.witness == (MODEL if precision == "fp32" else ALONE)


@pytest.mark.parametrize("decided", [True, False])
def test_a_class_that_rounding_decides_may_be_another_one_in_a_batch(decided: bool) -> None:
    """Whether the engine computes in float32 or not; without it, the engine looks at the other samples."""

    def answer(feeds: Feeds, first: int) -> dict[str, Array]:
        return {"y": np.concatenate([np.full_like(feeds["x"][:, :1], first), feeds["x"][:, 1:]], axis=1)}

    def engine(feeds: Feeds) -> dict[str, Array]:
        return answer(feeds, 60 if len(feeds["x"]) > 1 else 3)

    def perturb(feeds: Feeds, step: float, seed: int) -> dict[str, Array]:
        return answer(feeds, 70 if decided and step > 0 else 3)

    for precision in ("fp32", "int8"):
        shown = search(engine, precision, lambda feeds: answer(feeds, 3), perturb=perturb, loss_judged=False)
        assert (shown is None) is decided, precision


def test_inputs_that_rounding_excuses_are_recorded_with_the_reason() -> None:
    def shift(feeds: Feeds, step: float) -> dict[str, Array]:
        return {"y": 2 * feeds["x"] + np.float32(step)}

    def choose(feeds: Feeds, first: int) -> dict[str, Array]:
        return {"y": np.concatenate([np.full_like(feeds["x"][:, :1], first), feeds["x"][:, 1:]], axis=1)}

    def shift_batch(feeds: Feeds) -> dict[str, Array]:
        return shift(feeds, 0.01 * (len(feeds["x"]) > 1))

    def perturb_shift(feeds: Feeds, step: float, seed: int) -> dict[str, Array]:
        return shift(feeds, 0.01 * np.sign(step))

    def perturb_choice(feeds: Feeds, step: float, seed: int) -> dict[str, Array]:
        return choose(feeds, 7 if step > 0 else 3)

    usual, decided = "rounding alone moves it by up to 0.01", "rounding alone decides the numbers that differ"
    pairs = (
        (lambda feeds: shift(feeds, 0.01), double, perturb_shift, ("output 'y' of sample ", usual)),
        (lambda feeds: choose(feeds, 6), lambda feeds: choose(feeds, 3), perturb_choice, ("output 'y' of ", decided)),
        (
            lambda feeds: shift_batch(feeds),
            shift_batch,
            perturb_shift,
            ("sample 2 is answered in another way than alone: output", usual),
        ),
        (double, double, perturb_shift, None),
    )
    for engine, model, perturb, expected in pairs:
        search = InputSearch(Subject(SPACE, "fp32", engine, model, perturb=perturb), seed=0)
        assert search.run(0) is None
        assert (search.attempts, search.excused) == (1, len(search.excuses))
        assert bool(search.excuses) is (expected is not None)
        if expected:
            (excuse,) = search.excuses
            assert (excuse.walk, excuse.note) == ("samples", "sample 0")
            assert excuse.reason.startswith(expected[0])
            assert excuse.reason.endswith(expected[1])


def test_an_input_that_is_answered_right_after_an_excused_one_is_not_excused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sample has a batch of 4, and the zeros after it one of 9."""

    def shift(feeds: Feeds, step: float) -> dict[str, Array]:
        return {"y": 2 * feeds["x"] + np.float32(step)}

    def engine(feeds: Feeds) -> dict[str, Array]:
        return shift(feeds, 0.01 * (len(feeds["x"]) == 4))

    def perturb(feeds: Feeds, step: float, seed: int) -> dict[str, Array]:
        return shift(feeds, 0.01 * np.sign(step))

    monkeypatch.setattr(searching, "time", SimpleNamespace(monotonic=itertools.count().__next__))
    search = InputSearch(Subject(SPACE, "fp32", engine, double, perturb=perturb), seed=0)
    assert search.run(1) is None
    assert (search.attempts, search.excused) == (2, 1)


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


def test_classes_that_rounding_decides_are_not_held_against_an_engine() -> None:
    def answer(feeds: Feeds, first: int, last: int) -> dict[str, Array]:
        found = feeds["x"].copy()
        found[:, 0], found[:, 5] = first, last
        return {"y": found}

    def perturb(feeds: Feeds, step: float, seed: int) -> dict[str, Array]:
        return answer(feeds, 70 if step > 0 else 3, 4)

    usual: dict[str, Any] = {"model": lambda feeds: answer(feeds, 3, 4), "perturb": perturb}
    assert search(lambda feeds: answer(feeds, 60, 4), **usual) is None
    assert search(lambda feeds: answer(feeds, 60, 4), **usual | {"perturb": None}) is not None
    assert search(lambda feeds: answer(feeds, 60, 50), **usual) is not None


@pytest.mark.parametrize(("span", "wrong"), [(1.0, False), (0.0, True)])
def test_rows_that_are_nearly_equal_are_judged_by_the_range_of_all_answers(span: float, wrong: bool) -> None:
    outputs = (spec("y", "float32", "batch", 4, 2),)
    judge = make_judge(
        Signature(inputs=SIGNATURE.inputs, outputs=outputs, unordered={"y": "rows"}), "fp32", {"y": span}
    )
    rows = np.full((2, 4, 2), 1.869e-5, np.float32)
    assert bool(judge.find_fault({"y": rows}, {"y": rows - np.float32(5e-9)}, no_movement)) is wrong


@pytest.mark.parametrize(
    ("found", "near"),
    [
        ({}, True),
        ({"paired": 0.3}, True),
        ({"paired": 0.2}, False),
        ({"agreement": 0.1}, False),
        ({"max_abs_error": 15.0}, True),
        ({"max_abs_error": 17.0}, False),
    ],
)
def test_rows_are_explained_by_rounding_that_leaves_about_as_many_alike(found: dict[str, float], near: bool) -> None:
    usual = {"name": "y", "paired": 0.5, "agreement": 0.5, "max_abs_error": 1.0}
    others = [OutputFidelity.model_validate(usual), OutputFidelity.model_validate({**usual, "paired": 0.8})]
    output = OutputFidelity.model_validate({**usual, **found})
    assert judging._is_as_near(output, others) is near
    assert not judging._is_as_near(output, [])
    nothing_left = OutputFidelity(name="y", paired=0.0)
    assert judging._is_as_near(output.model_copy(update={"max_abs_error": 99.0}), [nothing_left])


def test_rows_that_rounding_chooses_are_not_held_against_an_engine() -> None:
    """Any four of six equal scores are the best four; numbers that the model never answers are wrong."""
    outputs = (spec("y", "float32", "batch", 4, 2), spec("kind", "int64", "batch", 4))
    form = SIGNATURE.model_copy(update={"unordered": {"y": "rows", "kind": "rows"}, "outputs": outputs})

    def answer(feeds: Feeds, *chosen: int) -> dict[str, Array]:
        found = feeds["x"][:, chosen]
        return {"y": np.stack([found, 2 * found], axis=2), "kind": np.tile(chosen, (len(found), 1))}

    subject = Subject(
        InputSpace(form, SPACE.ranges, SPACE.samples),
        "fp32",
        lambda feeds: answer(feeds, 0, 1, 4, 5),
        lambda feeds: answer(feeds, 0, 1, 2, 3),
        perturb=lambda feeds, step, seed: answer(feeds, 0, 1, 2, 4 if step > 0 else 5),
    )
    attempt = next(generate(subject.space, 0))
    assert InputSearch(subject, seed=0).examine(attempt) is None
    assert InputSearch(replace(subject, perturb=None), seed=0).examine(attempt) is not None
    steady = replace(subject, perturb=lambda feeds, step, seed: answer(feeds, 0, 1, 2, 3))
    assert InputSearch(steady, seed=0).examine(attempt) is not None
    for name, shift in (("y", 900), ("kind", 1000)):
        right = answer(attempt.feeds, 0, 1, 2, 4)
        wrong = replace(subject, engine=lambda feeds, found={**right, name: right[name] + shift}: found)
        assert InputSearch(wrong, seed=0).examine(attempt) is not None, name
    excused = InputSearch(subject, seed=0)
    excused.run(0)
    assert excused.excuses[0].reason.endswith("have a partner; rounding alone chooses other rows, too")


@pytest.mark.parametrize(("every", "wrong"), [(10, False), (1, True)])
def test_a_box_at_the_threshold_is_not_held_against_a_low_precision(every: int, wrong: bool) -> None:
    """One box for each input: the engine leaves out one of ten, or of each of them."""
    outputs = (spec("y", "float32", "boxes", 4),)
    form = SIGNATURE.model_copy(update={"unordered": {"y": "rows"}, "outputs": outputs})
    called = itertools.count(1)

    def answer(feeds: Feeds) -> dict[str, Array]:
        return {"y": np.arange(4, dtype=np.float32)[None]}

    def engine(feeds: Feeds) -> dict[str, Array]:
        return {"y": answer(feeds)["y"][: int(next(called) % every != 0)]}

    subject = Subject(InputSpace(form, SPACE.ranges, SPACE.samples), "int8", engine, answer, answer, rows_apart=False)
    search = InputSearch(subject, seed=0)
    found = list(filter(None, map(search.examine, itertools.islice(generate(subject.space, 0), 40))))
    assert bool(found) is wrong
    if found:
        assert found[0].reason.endswith("0 % have a partner, of 16 inputs with few rows")
        assert len(found) > 20, "an input that is wrong by itself"
        search = InputSearch(subject, seed=0)
        assert search.run(0) is None
        assert search.excuses[0].reason.endswith("have a partner; too few rows to tell")


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
