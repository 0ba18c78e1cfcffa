"""Inputs that are tried on engines, the judgement of their answers, and the reduction of graphs."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.errors import InvalidGraph, ModelError
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.measure.prosecution import reduction
from enginesmith.pipeline.measure.prosecution.inputs import InputSpace, generate, list_sizes
from enginesmith.pipeline.measure.prosecution.judging import OWN_GRAPH, make_judge, measure_sensitivity
from enginesmith.pipeline.measure.prosecution.locate import find_guilty_stage
from enginesmith.pipeline.measure.prosecution.search import ALONE, GRAPH, MODEL, Disagreement, InputSearch, Subject
from enginesmith.pipeline.measure.prosecution.stages import Stage, Stages
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import Array, Feeds, ShapeRange, Signature, TensorSpec

RNG = np.random.default_rng(0)
Function = Callable[[Feeds], dict[str, Array]]


def spec(name: str, dtype: str, *shape: int | str) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


SIGNATURE = Signature(inputs=(spec("x", "float32", "batch", 6),), outputs=(spec("y", "float32", "batch", 6),))
SPACE = InputSpace(
    SIGNATURE,
    {"batch": ShapeRange.parse("1:4:9")},
    [{"x": RNG.standard_normal((4, 6)).astype(np.float32)} for _ in range(2)],
)
TOKENS = InputSpace(
    Signature(
        inputs=(spec("ids", "int64", "batch", "length"), spec("mask", "int64", "batch", "length")),
        outputs=(spec("y", "float32", "batch", 2),),
    ),
    {"batch": ShapeRange.parse("1:2:4"), "length": ShapeRange.parse("2:8:33")},
    [{"ids": RNG.integers(3, 50, (2, 8)), "mask": np.array([[1] * 8, [1] * 5 + [0] * 3])}],
)


# Inputs


def test_the_same_seed_gives_the_same_inputs() -> None:
    first, again, other = (list(itertools.islice(generate(SPACE, seed), 60)) for seed in (1, 1, 2))
    assert [each.note for each in first] == [each.note for each in again]
    assert all(np.array_equal(a.feeds["x"], b.feeds["x"]) for a, b in zip(first, again, strict=True))
    assert any(
        not np.array_equal(a.feeds["x"], b.feeds["x"])
        for a, b in zip(first[10:], other[10:], strict=False)
        if a.feeds["x"].shape == b.feeds["x"].shape
    )


@pytest.mark.parametrize("space", [SPACE, TOKENS])
def test_inputs_are_allowed(space: InputSpace) -> None:
    for attempt in itertools.islice(generate(space, 0), 300):
        space.signature.check(attempt.feeds)
        for name, value in attempt.feeds.items():
            if value.dtype.kind == "i":
                low, high = space.bounds[name]
                assert value.min() >= low
                assert value.max() <= high
        for name, range_ in space.ranges.items():
            size = next(
                attempt.feeds[each.name].shape[each.shape.index(name)]
                for each in space.signature.inputs
                if name in each.shape
            )
            assert range_.min <= size <= range_.max


def test_all_families_come_early_and_sizes_reach_both_ends() -> None:
    tried = list(itertools.islice(generate(TOKENS, 0), 80))
    assert {each.walk for each in tried} == {"samples", "sizes", "values", "padding", "mutations"}
    lengths = {each.feeds["ids"].shape[1] for each in tried if each.walk == "sizes"}
    assert {2, 33, 31, 32, 17} <= lengths
    tails = [each.feeds["mask"] for each in tried if each.walk == "padding"]
    empty = [not mask.any(axis=1).all() for mask in tails]
    assert sum(empty) == 1, "one input has a row of which nothing is there"
    (odd,) = [each for each in tried if each.walk == "padding" and not each.usual]
    assert odd.feeds["mask"].any(axis=1).tolist() == [False, True]
    assert len({tuple(mask.sum(axis=1)) for mask in tails}) > 2


def test_a_search_of_a_few_inputs_has_some_of_each_family() -> None:
    space = InputSpace(TOKENS.signature, TOKENS.ranges, TOKENS.samples * 20)
    first = list(itertools.islice(generate(space, 0), 8))
    assert {each.walk for each in first} == {"samples", "sizes", "values", "padding", "mutations"}
    assert first[0].walk == "samples"
    assert first[1].note == "mask: nothing in the first row"


def test_a_mask_of_what_is_padding_is_emptied_by_ones() -> None:
    padding = [{**feeds, "mask": feeds["mask"] == 0} for feeds in TOKENS.samples]
    signature = TOKENS.signature.model_copy(
        update={"inputs": (TOKENS.signature.inputs[0], spec("mask", "bool", "batch", "length"))}
    )
    tried = itertools.islice(generate(InputSpace(signature, TOKENS.ranges, padding), 0), 80)
    masks = {each.note: each.feeds["mask"] for each in tried if each.walk == "padding"}
    assert masks["mask: nothing in the first row"].all(axis=1).tolist() == [True, False]
    assert not masks["mask: all there"].any()
    assert masks["mask: one place each"].sum(axis=1).tolist() == [7, 7]


def test_an_empty_row_has_another_one_beside_it() -> None:
    ranges = {"batch": ShapeRange.parse("1:1:4"), "length": ShapeRange.parse("2:8:33")}
    tried = itertools.islice(generate(InputSpace(TOKENS.signature, ranges, TOKENS.samples), 0), 80)
    (odd,) = [each for each in tried if each.walk == "padding" and not each.usual]
    assert odd.feeds["mask"].any(axis=1).tolist() == [False, True]


def test_offsets_stay_in_order() -> None:
    bags = Signature(
        inputs=(spec("ids", "int64", "ids"), spec("offsets", "int64", "bags")),
        outputs=(spec("y", "float32", "bags", 2),),
    )
    ranges = {"ids": ShapeRange.parse("7:15:15"), "bags": ShapeRange.parse("1:3:3")}
    space = InputSpace(bags, ranges, [{"ids": RNG.integers(0, 50, 15), "offsets": np.array([0, 5, 10])}])
    tried = list(itertools.islice(generate(space, 0), 80))
    assert {each.walk for each in tried} == {"samples", "sizes", "values", "mutations"}
    assert {tuple(each.feeds["offsets"]) for each in tried} == {(0,), (0, 5), (0, 5, 10)}
    assert len({tuple(each.feeds["ids"]) for each in tried}) > 20


def test_sizes_are_ends_tiles_and_primes() -> None:
    assert list_sizes(ShapeRange.parse("1:8:64"))[:4] == [1, 64, 2, 63]
    assert {7, 15, 16, 17, 31, 33} <= set(list_sizes(ShapeRange.parse("1:8:64")))
    assert list_sizes(ShapeRange.parse("5:5:5")) == [5]


def test_a_single_number_beside_samples_is_changed_within_its_bounds() -> None:
    signature = Signature(inputs=(*SIGNATURE.inputs, TensorSpec.parse("rate:int64:")), outputs=SIGNATURE.outputs)
    own = {spec.name: np.ones(spec.resolve({"batch": 2}), spec.dtype) for spec in SIGNATURE.inputs}
    space = InputSpace(signature, {"batch": ShapeRange.parse("1:2:4")}, [{**own, "rate": np.asarray(16)}])
    rates = [attempt.feeds["rate"] for attempt in itertools.islice(generate(space, 0), 200)]
    assert {(type(rate), rate.item()) for rate in rates} == {(np.ndarray, 16)}


def test_nan_is_explained_where_the_last_digits_move_the_answer_as_far() -> None:
    """Equal numbers less their mean, divided by their deviation: eager gives some number, an engine 0 / 0."""
    wanted, given = {"y": np.full((4, 6), 0.9, np.float32)}, {"y": np.full((4, 6), np.nan, np.float32)}
    judge = make_judge(SIGNATURE, "fp32", {"y": 4.0})
    assert "NaN" in judge.find_fault(wanted, given, no_movement)
    assert "NaN" in judge.find_fault(wanted, given, lambda: {"y": 0.01})
    assert not judge.find_fault(wanted, given, lambda: {"y": 2.0})


@pytest.mark.parametrize("fill", [-1e4, -1e9])
def test_masked_places_hide_no_wrong_number(fill: float) -> None:
    masked = np.where(np.arange(6) > 2, fill, np.arange(24).reshape(4, 6)).astype(np.float32)
    judge = make_judge(SIGNATURE, "fp32", {"y": 4.0})
    assert not judge.find_fault({"y": masked}, {"y": masked * np.float32(1 + 1e-6)}, no_movement)
    wrong, unmasked = masked.copy(), masked.copy()
    wrong[1, 1], unmasked[1, 5] = 9, 0
    assert "of sample 1 is wrong by up to 2" in judge.find_fault({"y": masked}, {"y": wrong}, no_movement)
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


def test_an_engine_that_refuses_an_allowed_input_is_found() -> None:
    def refuses(feeds: Feeds) -> dict[str, Array]:
        if len(feeds["x"]) > 8:
            raise ModelError("no room")
        return double(feeds)

    found = search(refuses)
    assert found is not None
    assert found.found is None
    assert "no room" in found.reason


# Reduction


def chain(*nodes: onnx.NodeProto, **weights: Array) -> onnx.ModelProto:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in ("x", "y")]
    tensors = [numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = helper.make_graph(list(nodes), "g", ends[:1], ends[1:], tensors)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


NODE = helper.make_node
SOUND = (
    NODE("Relu", ["x"], ["a"], name="first"),
    NODE("Mul", ["a", "two"], ["b"], name="second"),
    NODE("Add", ["b", "x"], ["c"], name="third"),
    NODE("Tanh", ["c"], ["y"], name="last"),
)
TWO = {"two": np.float32(2)}
FEEDS = {"x": RNG.standard_normal((3, 4)).astype(np.float32)}


def test_any_nodes_are_a_graph() -> None:
    model = chain(*SOUND, **TWO)
    values = reduction.record_values(model, FEEDS)
    for kept in ([1], [0, 2], [2, 3], [0, 1, 2, 3]):
        part, feeds = reduction.take_nodes(model, kept, values)
        onnx.checker.check_model(part, full_check=True)
        for name, value in reduction.compute(part, feeds).items():
            np.testing.assert_allclose(value, values[name])
    with pytest.raises(ModelError, match="not known"):
        reduction.take_nodes(model, [3], FEEDS)


def test_shrinking_finds_the_nodes_that_fail_together() -> None:
    for culprits in ({41}, {3, 77}, {0, 50, 99}):
        calls = []

        def fails(kept: Any, culprits: set[int] = culprits, calls: list[int] = calls) -> bool:
            calls.append(len(kept))
            return culprits <= set(kept)

        assert set(reduction.shrink(100, fails, seconds=60)) == culprits
        assert len(calls) < 400
    assert reduction.shrink(10, lambda kept: True, seconds=0) == list(range(10))


@pytest.mark.parametrize("renamed", [False, True])
def test_the_first_wrong_node_is_found_by_names_and_without(renamed: bool) -> None:
    truth = reduction.record_values(chain(*SOUND, **TWO), FEEDS)
    if renamed:
        truth = {name if name in "xy" else f"other_{name}": value for name, value in truth.items()}
    wrong = chain(SOUND[0], NODE("Mul", ["a", "three"], ["b"], name="second"), *SOUND[2:], three=np.float32(3))
    part = find_wrong_part(wrong, truth)
    assert part.suspects[0] == 1
    assert (part.nodes, part.value) == (((1, 2, 3), "y") if renamed else ((1,), "b"))
    assert reduction.slice_between(wrong, [1], ["y"]) == [1, 2, 3]


def find_wrong_part(wrong: onnx.ModelProto, truth: Feeds) -> reduction.WrongPart:
    found = reduction.find_wrong_part(wrong, reduction.record_values(wrong, FEEDS), truth, {"y": truth["y"]})
    assert found is not None
    return found


def test_a_dropped_activation_is_named_although_another_value_equals_its_own() -> None:
    truth = reduction.record_values(chain(*SOUND, **TWO), FEEDS)
    wrong = chain(NODE("Identity", ["x"], ["a"], name="first"), *SOUND[1:], **TWO)
    assert find_wrong_part(wrong, truth).nodes == (0,)
    assert reduction.find_wrong_part(chain(*SOUND, **TWO), truth, truth, {"y": truth["y"]}) is None


def test_the_node_that_computes_is_named_before_those_that_move_numbers() -> None:
    """A pass computes a product with axes in another order, and gets its factor wrong."""
    truth = reduction.record_values(chain(*SOUND, **TWO), FEEDS)
    inner = [NODE("Transpose", ["a"], ["t"], perm=[1, 0]), NODE("Mul", ["t", "three"], ["u"])]
    wrong = chain(SOUND[0], *inner, NODE("Transpose", ["u"], ["b"], perm=[1, 0]), *SOUND[2:], three=np.float32(3))
    part = find_wrong_part(wrong, truth)
    assert [wrong.graph.node[at].op_type for at in part.suspects] == ["Mul", "Transpose", "Transpose"]
    assert (part.nodes, part.value) == ((1, 2, 3), "b")

    inner[1].input[1] = "two"
    wrong = chain(SOUND[0], *inner, NODE("Transpose", ["u"], ["b"], perm=[0, 1]), *SOUND[2:], **TWO)
    square = {"x": RNG.standard_normal((4, 4)).astype(np.float32)}
    truth = reduction.record_values(chain(*SOUND, **TWO), square)
    values = reduction.record_values(wrong, square)
    found = reduction.find_wrong_part(wrong, values, truth, {"y": truth["y"]})
    assert found is not None
    assert found.nodes == (3,), "the product is right but for the order of its axes"


def test_nodes_that_compute_a_condition_are_not_named_first() -> None:
    truth = reduction.record_values(chain(*SOUND, **TWO), FEEDS)
    condition = [
        NODE("ReduceMax", ["x"], ["most"], keepdims=0),
        NODE("ReduceMin", ["x"], ["least"], keepdims=0),
        NODE("Greater", ["most", "least"], ["here"]),
    ]
    chosen = [NODE("Mul", ["a", "three"], ["u"]), NODE("Where", ["here", "u", "a"], ["b"])]
    wrong = chain(SOUND[0], *condition, *chosen, *SOUND[2:], three=np.float32(3))
    part = find_wrong_part(wrong, truth)
    assert part.value == "b"
    assert [wrong.graph.node[at].op_type for at in part.suspects][:2] == ["Mul", "Where"]


def test_values_that_a_pass_scales_and_scales_back_are_not_accused() -> None:
    """The first values that differ by their names are 4 times as large by intent; they are divided by 3."""
    truth = reduction.record_values(chain(*SOUND, **TWO), FEEDS)
    scaled = [NODE("Mul", ["a", "eight"], ["b"]), NODE("Mul", ["x", "four"], ["z"]), NODE("Add", ["b", "z"], ["c"])]
    back = [NODE("Div", ["c", "three"], ["s"]), NODE("Tanh", ["s"], ["y"])]
    wrong = chain(SOUND[0], *scaled, *back, eight=np.float32(8), four=np.float32(4), three=np.float32(3))
    part = find_wrong_part(wrong, truth)
    assert part.value == "y"
    assert [wrong.graph.node[at].op_type for at in part.suspects] == ["Div", "Tanh", "Mul", "Mul", "Add"]


def test_subgraphs_count_as_read() -> None:
    body = helper.make_graph(
        [NODE("Mul", ["outer", "own"], ["z"])],
        "body",
        [],
        [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.float32(1), "own")],
    )
    branch = NODE("If", ["condition"], ["y"], then_branch=body, else_branch=body)
    assert set(model_file.list_reads(branch)) == {"condition", "outer"}


def test_a_graph_with_large_weights_in_another_file_is_refused_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = numpy_helper.from_array(np.ones((64, 64), np.float32), "w")
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 64]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "w"], ["y"])], "g", ends[:1], ends[1:], [weight])
    file = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph), file, save_as_external_data=True, location="weights", size_threshold=0)
    assert reduction.read_whole(file).graph.initializer[0].raw_data
    monkeypatch.setattr(reduction, "_LARGEST_BYTES", 1 << 12)
    with pytest.raises(InvalidGraph, match="too large to be cut up"):
        reduction.read_whole(file)
