"""Labels that are words: by which numbers a model's answers are judged by them."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from enginesmith.calibration.dataset import Dataset, embedded
from enginesmith.calibration.options import PartOptions
from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.torch.eager import Eager
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.frameworks.source import Source, resolve
from enginesmith.pipeline.frameworks.torch import factories, hugging_face, module
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks.calibrate import read_class_names
from enginesmith.pipeline.tasks.load import Load
from enginesmith.pipeline.tasks.measure import Quality
from enginesmith.pipeline.tasks.verify import Sample
from enginesmith.pipeline.tensors import TensorSpec
from graphs import quiet

DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
NO_DIGEST: dict[str, Any] = {"sha256": "", "bytes": 0}


def words_of(*words: str) -> Dataset:
    """A set with a sample of each word, in alphabetical order, behind one of the first."""
    rows = np.arange(len(words) + 1, dtype=np.float32)[:, None]
    return Dataset("texts", {"x": rows}, np.maximum(np.arange(len(rows)) - 1, 0), words=words)


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
    assert numbered.number_words(()) is numbered, "they have their numbers"


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
    monkeypatch.setattr(hugging_face, "make_example", lambda _: example)
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


@pytest.mark.parametrize("named", [True, False])
def test_answers_are_judged_by_the_names_of_the_models_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, digit_folders: Path, named: bool
) -> None:
    """Samples are drawn and split as if it had no names; the reference has them for the engines without any."""
    build = factories.build
    names = DIGITS if named else ()
    monkeypatch.setattr(factories, "build", lambda source: dataclasses.replace(build(source), class_names=names))
    model, reference, eager = (tmp_path / folder for folder in ("model", "reference", "eager"))
    for folder in (model, reference, eager):
        folder.mkdir()
    effect = Load(source=resolve("digits")).run({}, model, quiet)
    inputs = {"model": Artifact(kind="torch", path=model / effect.file, signature=effect.signature, **NO_DIGEST)}
    fields: dict[str, Any] = {"engine": Eager(), "data": str(digit_folders), "metric": "top1", "seed": 0}
    fields["data_options"] = PartOptions(part="choice", shared_by=("choice", "judgement"))
    effect = Sample(ranges={}, batches=(1,), **fields).run(inputs, reference, quiet)
    order = "as the model's classes are (id2label): ZERO = 0, " if named else "in alphabetical order: EIGHT = 0, "
    assert any(note.startswith(f"labels are numbered {order}") for note in effect.notes)

    inputs["reference"] = Artifact(kind="reference", path=reference / effect.file, **NO_DIGEST)
    quality = Quality(device=Device(), samples=None, batch=1, largest_batch=8, **fields)
    with fields["engine"].load(inputs["model"], Device()) as session:
        judged, _, _ = quality.judge(session, None, quiet, inputs["reference"])
    assert not isinstance(judged, str)
    assert (judged.value > 0.9) == named
    assert read_class_names({"model": inputs["model"]}) == names
