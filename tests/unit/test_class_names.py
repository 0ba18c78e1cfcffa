"""Labels that are words: by which numbers a model's answers are judged by them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn

from enginesmith.calibration.dataset import Dataset, embedded, open_dataset
from enginesmith.calibration.options import PartOptions
from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.torch.eager import Eager
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.frameworks.source import Source, resolve
from enginesmith.pipeline.frameworks.torch import factories, hugging_face, hugging_face_inputs, module
from enginesmith.pipeline.passes.finetune.options import RecoverOptions
from enginesmith.pipeline.passes.prune import selection
from enginesmith.pipeline.passes.prune.options import PruneOptions, PruneTarget
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.calibrate import Feeder, read_class_names
from enginesmith.pipeline.tasks.finetune import Recover
from enginesmith.pipeline.tasks.load import Load
from enginesmith.pipeline.tasks.mixed_precision import Goal
from enginesmith.pipeline.tasks.prune import Prune
from enginesmith.pipeline.tasks.quality import BASELINE, Quality
from enginesmith.pipeline.tasks.verify import Sample
from enginesmith.pipeline.tensors import TensorSpec
from graphs import quiet

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CHOICE = PartOptions(part="choice", shared_by=("choice", "judgement"))
LoadDigits = Callable[[Path, tuple[str, ...]], tuple[dict[str, Artifact], tuple[str, ...]]]


def words_of(*words: str) -> Dataset:
    """A set with a sample of each word, in alphabetical order, behind one of the first."""
    rows = np.arange(len(words) + 1, dtype=np.float32)[:, None]
    return Dataset("texts", {"x": rows}, np.maximum(np.arange(len(rows)) - 1, 0), class_names=dict(enumerate(words)))


@pytest.mark.parametrize(
    ("words", "names", "numbers", "note"),
    [
        (("neg", "pos"), (), [0, 0, 1], "in alphabetical order: neg = 0, pos = 1"),
        (("neg", "pos"), ("pos", "neg"), [1, 1, 0], "as the model's classes are (id2label): pos = 0, neg = 1"),
        (("neg", "pos"), ("POS", "Neg"), [1, 1, 0], "as the model's classes are (id2label): pos = 0, neg = 1"),
        (("neg", "pos"), ("neg", "other", "pos"), [0, 0, 2], "as the model's classes are (id2label): neg = 0, pos = 2"),
        (("A", "a"), ("a", "A"), [1, 1, 0], "as the model's classes are (id2label): a = 0, A = 1"),
        (
            ("n1", "n2"),
            ("tench", "goldfish"),
            [0, 0, 1],
            "in alphabetical order: n1 = 0, n2 = 1; the model's classes have other names: tench, goldfish",
        ),
    ],
)
def test_words_get_the_numbers_of_the_models_classes(
    words: tuple[str, ...], names: tuple[str, ...], numbers: list[int], note: str
) -> None:
    numbered = words_of(*words).number_words(names)
    assert isinstance(numbered.labels, np.ndarray)
    assert numbered.labels.tolist() == numbers
    assert numbered.notes == (f"labels are numbered {note}",)
    assert not numbered.class_names or "alphabetical" in note, "they have their numbers"


@pytest.mark.parametrize(
    ("words", "names", "reason"),
    [
        (
            ("mixed", "neg"),
            ("neg", "pos"),
            "labels mixed, neg, and .* classes are neg, pos: 'mixed' is the name of none",
        ),
        (("crane", "dog"), ("crane", "dog", "crane"), "'crane' is the name of 2"),
        (("a", "b"), ("A", "b", "á", "A"), "'a' is the name of 2"),
    ],
)
def test_words_of_which_some_are_names_are_refused(words: tuple[str, ...], names: tuple[str, ...], reason: str) -> None:
    with pytest.raises(DataError, match=reason) as error:
        words_of(*words).number_words(names)
    assert "or their numbers" in error.value.remedy


def test_numbers_stay_as_they_are() -> None:
    data = Dataset("d", {"x": np.zeros((3, 1), np.float32)}, np.array([2, 0, 1]))
    assert data.number_words(("b", "a")) is data


def test_all_samples_of_a_part_are_renumbered() -> None:
    """A metric is settled by the labels of the whole set."""
    part = words_of("neg", "pos").take(np.array([2]), "part").number_words(("pos", "neg"))
    assert part.labels == [0]
    assert isinstance(part.whole.labels, np.ndarray)
    assert part.whole.labels.tolist() == [1, 1, 0]


@pytest.mark.parametrize(
    ("id2label", "names"),
    [
        ({0: "POSITIVE", 1: "NEGATIVE"}, ("POSITIVE", "NEGATIVE")),
        ({"1": "b", "0": "a"}, ("a", "b")),
        ({0: "LABEL_0", 1: "LABEL_1"}, ()),
        ({1: "a", 2: "b"}, ()),
        ({}, ()),
        (None, ()),
    ],
)
def test_classes_have_the_names_that_somebody_gave_them(
    id2label: dict[int | str, str] | None, names: tuple[str, ...]
) -> None:
    assert hugging_face.name_classes(SimpleNamespace(id2label=id2label)) == names
    assert hugging_face.name_classes(SimpleNamespace()) == ()


def test_a_folders_configuration_names_the_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Classifier(nn.Linear):
        config = SimpleNamespace(id2label={0: "POSITIVE", 1: "NEGATIVE"})

    monkeypatch.setattr(factories, "_library", lambda *_: None)
    monkeypatch.setattr(hugging_face, "load_model", lambda *_: (Classifier(3, 2), [], []))
    example = {"input": (torch.ones(2, 3), TensorSpec.parse("input:float32:batch,3"))}
    monkeypatch.setattr(hugging_face_inputs, "make_example", lambda _: example)
    loaded = module.load(Source(form="hf", text="hf:folder", target="folder"), module.LoadOptions())
    assert loaded.class_names == ("POSITIVE", "NEGATIVE")


@pytest.fixture
def digit_folders(tmp_path: Path) -> Path:
    """A folder of digits, in sub-folders that are called after them: in alphabetical order, EIGHT is the first."""
    pillow = pytest.importorskip("PIL.Image")
    data = embedded("digits", "test")
    for row in range(60):
        folder = tmp_path / "digits" / DIGITS[data.classes[row]].upper()
        folder.mkdir(parents=True, exist_ok=True)
        pixels = np.asarray(data.arrays["image"][row], np.float32)[0] * 255
        pillow.fromarray(pixels.round().astype(np.uint8)).save(folder / f"{row}.png")
    return tmp_path / "digits"


@pytest.fixture
def load_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LoadDigits:
    """Loads the model of digits as if it named its classes, and answers samples as the reference."""
    build = factories.build

    def load(data: Path, names: tuple[str, ...]) -> tuple[dict[str, Artifact], tuple[str, ...]]:
        monkeypatch.setattr(factories, "build", lambda source: dataclasses.replace(build(source), class_names=names))
        for folder in ("model", "reference"):
            (tmp_path / folder).mkdir()
        effect = Load(source=resolve("digits")).run({}, tmp_path / "model", quiet)
        model = Artifact(
            kind="torch", path=tmp_path / "model" / effect.file, signature=effect.signature, sha256="", bytes=0
        )
        fields = {"engine": Eager(), "data": str(data), "metric": "top1", "seed": 0, "data_options": CHOICE}
        effect = Sample(ranges={}, batches=(1,), **fields).run({"model": model}, tmp_path / "reference", quiet)
        path = tmp_path / "reference" / effect.file
        reference = Artifact(kind="reference", path=path, sha256="", bytes=0)
        return {"model": model, "reference": reference}, effect.notes

    return load


def number_rightly(data: Path, inputs: dict[str, Artifact]) -> NDArray[np.int64]:
    """Number the digits of all samples, as 0 to 9."""
    assert inputs["model"].signature is not None
    drawn = open_dataset(str(data), inputs["model"].signature.inputs)
    assert isinstance(drawn.labels, np.ndarray)
    return np.array([DIGITS.index(drawn.class_names[label].lower()) for label in drawn.labels])


@pytest.mark.parametrize("named", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_answers_are_judged_by_the_names_of_the_models_classes(
    load_digits: LoadDigits, digit_folders: Path, named: bool
) -> None:
    names = DIGITS if named else ()
    inputs, notes = load_digits(digit_folders, names)
    order = "as the model's classes are (id2label): ZERO = 0, " if named else "in alphabetical order: EIGHT = 0, "
    assert any(note.startswith(f"labels are numbered {order}") for note in notes)
    fields: dict[str, Any] = {"engine": Eager(), "data": str(digit_folders), "data_options": CHOICE}
    quality = Quality(device=Device(), samples=None, batch=1, largest_batch=8, metric="top1", seed=0, **fields)
    with quality.engine.load(inputs["model"], Device()) as session:
        judged, _, _ = quality.judge(session, None, quiet, inputs["reference"])
    assert not isinstance(judged, str)
    assert (judged.value > 0.9) == named
    assert read_class_names(inputs) == read_class_names({"model": inputs["model"]}) == names


def test_models_are_trained_and_pruned_by_the_names_of_their_classes(
    load_digits: LoadDigits, digit_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, _ = load_digits(digit_folders, DIGITS)
    numbers = number_rightly(digit_folders, inputs)
    recover = Recover(options=RecoverOptions(method="supervised"), data=str(digit_folders), data_options=CHOICE)
    learnt = recover._data({"model": inputs["model"]})
    np.testing.assert_array_equal(learnt.labels, numbers[[*learnt.rows]])

    collected: list[int] = []

    def collect(*arguments: Any) -> None:
        for _, labels in arguments[-1]:
            collected.extend(labels.tolist())
        raise InterruptedError

    monkeypatch.setattr(selection, "collect_gradients", collect)
    feeder = Feeder(data=str(digit_folders), samples=20, seed=0)
    prune = Prune(target=PruneTarget.parse("0.3"), options=PruneOptions(importance="taylor"), feeder=feeder)
    with pytest.raises(InterruptedError):
        prune.run({"model": inputs["model"]}, digit_folders, quiet)
    feeding, _ = feeder.open(inputs["model"], inputs["model"])
    np.testing.assert_array_equal(collected, numbers[[*feeding.data.rows]])


@pytest.mark.thorough
def test_searches_judge_by_the_names_that_the_reference_has(
    load_digits: LoadDigits, digit_folders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, _ = load_digits(digit_folders, DIGITS)
    references: list[Artifact | None] = []

    def judge(task: Quality, session: Any, baseline: Any, progress: Any, reference: Artifact | None = None) -> Any:
        references.append(reference)
        return "not judged", {}, ()

    monkeypatch.setattr(Quality, "judge", judge)
    fields: dict[str, Any] = {"engine": Eager(), "data": str(digit_folders), "data_options": CHOICE}
    quality = Quality(device=Device(), samples=None, batch=1, largest_batch=8, metric="top1", seed=0, **fields)
    goal = Goal(threshold="fp32", min_sqnr_db=None, max_drop=0.1, quality=quality, simulation=Eager())
    goal.judge(Eager(), inputs["model"], Device(), {**inputs, BASELINE: inputs["model"]}, quiet)
    assert references == [inputs["reference"]]
