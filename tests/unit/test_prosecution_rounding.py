"""Differences that rounding explains, which accuse no engine."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from enginesmith.pipeline.frameworks.fidelity import OutputFidelity
from enginesmith.pipeline.measure.prosecution import judging
from enginesmith.pipeline.measure.prosecution import search as searching
from enginesmith.pipeline.measure.prosecution.inputs import InputSpace, generate
from enginesmith.pipeline.measure.prosecution.judging import make_judge, measure_sensitivity
from enginesmith.pipeline.measure.prosecution.search import ALONE, MODEL, InputSearch, Subject
from enginesmith.pipeline.tensors import Array, Feeds, Signature
from prosecuted import SIGNATURE, SPACE, double, no_movement, search, spec

RNG = np.random.default_rng(0)


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
    """It may in float32 and in a low precision; if rounding decides nothing, the engine looks at the other samples."""

    def answer(feeds: Feeds, first: int) -> dict[str, Array]:
        return {"y": np.concatenate([np.full_like(feeds["x"][:, :1], first), feeds["x"][:, 1:]], axis=1)}

    def engine(feeds: Feeds) -> dict[str, Array]:
        return answer(feeds, 70 if len(feeds["x"]) > 1 else 3)

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
        (lambda feeds: choose(feeds, 7), lambda feeds: choose(feeds, 3), perturb_choice, ("output 'y' of ", decided)),
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


def test_classes_that_rounding_decides_are_not_held_against_an_engine() -> None:
    def answer(feeds: Feeds, first: int, last: int) -> dict[str, Array]:
        found = feeds["x"].copy()
        found[:, 0], found[:, 5] = first, last
        return {"y": found}

    def perturb(feeds: Feeds, step: float, seed: int) -> dict[str, Array]:
        return answer(feeds, 70 if step > 0 else 3, 4)

    usual: dict[str, Any] = {"model": lambda feeds: answer(feeds, 3, 4), "perturb": perturb}
    assert search(lambda feeds: answer(feeds, 70, 4), **usual) is None
    assert search(lambda feeds: answer(feeds, 70, 4), **usual | {"perturb": None}) is not None
    assert search(lambda feeds: answer(feeds, 70, 50), **usual) is not None
    assert search(lambda feeds: answer(feeds, 60, 4), **usual) is not None, "a class that rounding does not make"


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
        shown = InputSearch(wrong, seed=0).examine(attempt)
        assert shown is not None
        assert "output 'y'" in shown.reason, name  # both describe the same rows
    excused = InputSearch(subject, seed=0)
    excused.run(0)
    assert excused.excuses[0].reason.endswith("have a partner in the reference; rounding alone chooses other rows, too")


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
        assert found[0].reason.endswith("have a partner in the reference, of 16 inputs with few rows")
        assert len(found) > 20, "an input that is wrong by itself"
        search = InputSearch(subject, seed=0)
        assert search.run(0) is None
        assert search.excuses[0].reason.endswith("have a partner in the reference; too few rows to tell")


def test_the_output_whose_rows_are_others_is_described_and_no_other_one() -> None:
    """A low precision may be far off in the numbers before: the rows alone are judged."""
    outputs = (spec("z", "float32", "batch", 4), spec("y", "float32", "boxes", 4))
    form = SIGNATURE.model_copy(update={"unordered": {"y": "rows"}, "outputs": outputs})
    right = {"z": RNG.standard_normal((2, 4)).astype(np.float32), "y": np.arange(40, dtype=np.float32).reshape(10, 4)}
    wrong = {"z": -right["z"], "y": right["y"] + 1000}
    judge = make_judge(form, "int8", {"z": 4.0, "y": 40.0})
    for fault in (judge.find_fault_in_all([(right, wrong)] * 2), judge.find_fault(right, wrong, no_movement)):
        assert fault.startswith("0.0 % of the rows in output 'y' have a partner")
