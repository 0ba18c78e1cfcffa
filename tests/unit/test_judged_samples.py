"""Outputs and labels of samples that a metric judges."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from PIL import Image

from enginesmith.calibration.dataset import Dataset, open_dataset, split_rows
from enginesmith.calibration.options import DataOptions, PartName, PartOptions
from enginesmith.pipeline.artifact import Artifact, HistoryEntry
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.errors import DataError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.measure.quality import explain_numbering
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tasks import quality as tasks
from enginesmith.pipeline.tasks.base import Task
from enginesmith.pipeline.tasks.quality import Quality, try_metric
from enginesmith.pipeline.tasks.verify import Sample
from enginesmith.pipeline.tensors import Array, Feeds, ShapeRange, Signature, TensorSpec
from graphs import parse_graph, save_operator


@pytest.mark.parametrize("part", ["choice", "judgement"])
def test_a_bad_label_is_named_by_its_row_in_the_data(tmp_path: Path, part: PartName) -> None:
    """Rows of a part are shuffled."""
    rows, place = np.random.default_rng(0).random((40, 3), np.float32), tmp_path / "data.npz"
    options = PartOptions(part=part, shared_by=("choice", "judgement"))
    row = split_rows(Dataset("d", {"x": rows}), options.shared_by, None)[part][4]
    np.savez(place, x=rows, labels=np.where(np.arange(40)[:, None] == row, np.inf, rows))
    fields = {"data": str(place), "data_options": options, "samples": None, "metric": "mse"}
    quality = Quality(engine=OnnxRuntime(), device=Device(), batch=8, largest_batch=8, seed=0, **fields)
    with quality.engine.load(save_operator(tmp_path / "model.onnx", "Identity"), Device()) as session:
        data = open_dataset(str(place), session.signature.inputs, split="test", options=options)
        for judge in (lambda: quality.judge(session, None, lambda _: None), lambda: try_metric("mse", session, data)):
            with pytest.raises(DataError, match=f"have NaN or infinity, first for row {row} of data.npz\n"):
                judge()


@pytest.mark.parametrize(("most", "sizes"), [(3, {3}), (16, {16})])
def test_as_many_samples_are_judged_together_as_the_range_of_the_batch_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, sizes: set[int]
) -> None:
    rows = np.random.default_rng(0).random((40, 3), np.float32)
    np.savez(tmp_path / "data.npz", x=rows, labels=rows)
    model = save_operator(tmp_path / "model.onnx", "Identity")
    assert model.signature is not None
    ranges = {samples.batch_symbol(model.signature) or "": ShapeRange(min=1, opt=1, max=most)}
    fields = {"data": str(tmp_path / "data.npz"), "data_options": DataOptions(), "samples": None, "metric": "mse"}
    quality = Quality(engine=OnnxRuntime(), device=Device(), batch=8, largest_batch=8, ranges=ranges, seed=0, **fields)
    given, answer_rows = set[int](), tasks._answer_rows
    monkeypatch.setattr(tasks, "_answer_rows", lambda *args, **named: given.add(args[2]) or answer_rows(*args, **named))
    with quality.engine.load(model, Device()) as session:
        quality.judge(session, None, lambda _: None)
    assert given == sizes


LOADER = """
import numpy as np

def f():
    rows = np.random.default_rng(SEED).random((40, 3), np.float32)
    yield {"x": rows, "labels": rows}
"""


@pytest.mark.parametrize("known", ["reference", "baseline"])
def test_a_function_that_yields_other_samples_is_refused(tmp_path: Path, known: str) -> None:
    """Two variants would be judged on different ones, or in another order."""
    model = save_operator(tmp_path / "model.onnx", "Identity")
    for seed in ("0", ""):
        place, folder = tmp_path / f"loader_{known}{seed}.py", tmp_path / f"seed{seed}"
        place.write_text(LOADER.replace("SEED", seed))
        folder.mkdir()
        reading = {"data": f"{place}:f", "data_options": DataOptions(), "metric": "mse", "seed": 0}
        quality = Quality(engine=OnnxRuntime(), device=Device(), samples=None, batch=8, largest_batch=8, **reading)
        sample = Sample(engine=OnnxRuntime(), ranges={}, batches=(1,), **reading)
        task: Task = sample if known == "reference" else quality
        effect = task.run({"model": model}, folder, lambda _: None)
        entry = HistoryEntry(step="", parameters={}, tools={}, seconds=0, host_peak_bytes=None, effect=effect.summary)
        path = folder / effect.file
        earlier = Artifact(kind=task.produces, path=path, sha256="", bytes=0, history=(entry,))
        message = rf"{place.name}:f yields other samples each time.*equal ones only"
        with contextlib.nullcontext() if seed else pytest.raises(DataError, match=message):
            quality.run({"model": model, known: earlier}, tmp_path, lambda _: None)


def test_a_label_of_another_part_is_found_before_long_work(tmp_path: Path) -> None:
    """The metric is tried with the samples for choosing; this one is for the last judgement."""
    place, options = tmp_path / "data.npz", PartOptions(part="choice", shared_by=("choice", "judgement"))
    rows = np.eye(3, dtype=np.float32)[np.arange(40) % 3]
    with OnnxRuntime().load(save_operator(tmp_path / "model.onnx", "Identity"), Device()) as session:
        for row in range(40):
            np.savez(place, x=rows, labels=np.where(np.arange(40) == row, 3, np.arange(40) % 3))
            data = open_dataset(str(place), session.signature.inputs, split="test", options=options)
            if row in data.parts["judgement"]:
                break
        told = f"a label is 3, and the output 'y' has 3 classes, first for row {row} of data.npz\n.*from 0"
        with pytest.raises(DataError, match=told):
            try_metric("top1", session, data)


@pytest.mark.parametrize("filled", [False, True])
def test_missing_values_are_for_models_that_answer_them(tmp_path: Path, filled: bool) -> None:
    rows, place = np.random.default_rng(0).random((40, 3), np.float32), tmp_path / "data.npz"
    np.savez(place, x=np.where(np.arange(40)[:, None] == 31, np.nan, rows))
    value = "Where(missing, zero, x)" if filled else "Neg(x)"
    body = f"{{missing = IsNaN(x) zero = Constant<value_float: float = 0.0>() y = {value}}}"
    graph = parse_graph(f"net (float[batch, 3] x) => (float[batch, 3] y) {body}")
    ir.save(graph, path := tmp_path / "model.onnx")
    model = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    fields = {"data": str(place), "data_options": DataOptions(), "batches": (1,)}
    sample = Sample(engine=OnnxRuntime(), ranges={}, seed=0, **fields)
    if filled:
        assert "'x' has NaN in 1 of 40 rows" in sample.run({"model": model}, tmp_path, lambda _: None).notes[0]
        return
    with pytest.raises(DataError, match="'x' holds NaN, first in row 31, and so does all of 'y'"):
        sample.run({"model": model}, tmp_path, lambda _: None)


@pytest.mark.parametrize("metric", [None, "top1"])
@pytest.mark.parametrize(
    ("names", "body", "count"),
    [
        (["ant", "cow", "dog"], "y = GlobalAveragePool(x) z = Flatten(y)", 4),
        (["ant", "cow", "dog", "bee"], "y = GlobalAveragePool(x) z = Flatten(y)", None),
        (["0", "2", "3"], "y = GlobalAveragePool(x) z = Flatten(y)", None),
        (["ant", "cow", "dog"], "z = Flatten(x)", 16),
    ],
)
def test_classes_of_folders_are_counted_against_those_of_the_model(
    tmp_path: Path, names: list[str], body: str, count: int | None, metric: str | None
) -> None:
    """A class that lacks its folder shifts the numbers of all later ones."""
    for name in names:
        (tmp_path / "set" / name).mkdir(parents=True)
        Image.fromarray(np.full((2, 2, 4), len(name), np.uint8), "RGBA").save(tmp_path / "set" / name / "0.png")
    graph = parse_graph(f"net (float[batch, 4, 2, 2] x) => (float[batch, classes] z) {{{body}}}")
    ir.save(graph, path := tmp_path / "model.onnx")
    model = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    fields = {"data": str(tmp_path / "set"), "data_options": DataOptions(), "batches": (1,), "metric": metric}
    notes = (
        Sample(engine=OnnxRuntime(), ranges={}, seed=0, **fields).run({"model": model}, tmp_path, lambda _: None).notes
    )
    notes = [note for note in notes if "classes are numbered" in note]
    shown = "alphabetical order of their names (ant = 0, cow = 1, dog = 2)"
    expected = f"3 classes are numbered in {shown}, and 'z' has {count}"
    assert [note.partition(":")[0] for note in notes] == ([expected] if count else [])


def test_the_greatest_scores_do_not_tell_how_many_classes_there_are() -> None:
    outputs = {"values": np.float32([[3, 2, 1, 0]] * 2), "indices": np.array([[2, 0, 1, 3]] * 2)}
    assert not explain_numbering("top1", outputs, np.array([0, 1]), {0: "ant", 1: "bee"})


def test_only_outputs_with_a_row_for_each_sample_are_judged(tmp_path: Path) -> None:
    """A loss beside the logits is a single number; of rows that values choose, each batch has as many as it likes."""
    specs = ("y:float32:batch,3", "loss:float32:", "chosen:float32:n,4", "wide:float32:batch,n")
    x = TensorSpec.parse("x:float32:batch,3")
    outputs = tuple(
        TensorSpec(name=name, dtype="float32", shape=tuple(int(d) if d.isdigit() else d for d in dims.split(",") if d))
        for name, _, dims in (spec.split(":") for spec in specs)
    )

    class Model:
        signature = Signature(inputs=(x,), outputs=outputs)

        def run(self, feeds: Feeds) -> dict[str, Array]:
            rows = feeds["x"]
            positive = int((rows[0] > 0).sum())
            wide = np.zeros((len(rows), positive), np.float32)
            return {"y": rows, "loss": rows.sum(), "chosen": np.zeros((positive, 4), np.float32), "wide": wide}

    rows = np.float32([[1, -1, -1], [1, 0, 0], [1, 1, -1], [0, 1, 0]])
    np.savez(tmp_path / "data.npz", x=rows, labels=np.array([0, 0, 0, 1]))
    data = {"data": str(tmp_path / "data.npz"), "data_options": DataOptions(), "samples": None}
    quality = Quality(engine=OnnxRuntime(), device=Device(), batch=2, largest_batch=2, seed=0, metric="top1:y", **data)
    judged, answers, _ = quality.judge(Model(), None, lambda _: None)  # type: ignore[arg-type]
    assert list(answers) == ["y"]
    assert not isinstance(judged, str)
    assert judged.value == 1
    dataset = open_dataset(data["data"], (x,), split="test", options=DataOptions())
    sentence, _ = try_metric("top1", Model(), dataset)  # type: ignore[arg-type]
    assert sentence == "top1 of 'y' is judged, 'wide' not (--metric NAME:OUTPUT)"
    Model.signature = Signature(inputs=(x,), outputs=outputs[3:])
    Model.run = lambda _, feeds: {"wide": np.zeros((len(feeds["x"]), int(feeds["x"][0].sum()) + 2), np.float32)}  # type: ignore[assignment,method-assign,misc]
    unnamed = quality.model_copy(update={"metric": None})
    reason, _, _ = unnamed.judge(Model(), None, lambda _: None)  # type: ignore[arg-type]
    assert str(reason).startswith("no metric was named, and 'wide' has rows of other sizes in other batches")
    Model.signature = Signature(inputs=(x,), outputs=outputs[1:2])
    Model.run = lambda _, feeds: {"loss": feeds["x"].sum()}  # type: ignore[assignment,method-assign,misc]
    with pytest.raises(
        DataError, match=r"for 2 samples, no output of the model has a row for each, .*: 'loss' is \[\]"
    ):
        try_metric("top1", Model(), dataset)  # type: ignore[arg-type]
    reason, _, _ = unnamed.judge(Model(), None, lambda _: None)  # type: ignore[arg-type]
    assert str(reason).startswith("no metric was named, and for 2 samples, no output of the model has a row")


@pytest.mark.parametrize(("size", "taken"), [(1, True), (2, False), ("batch", False)])
def test_all_that_a_model_of_batch_1_answers_is_of_that_sample(size: int | str, taken: bool) -> None:
    """Readers of text answer [time, 1, letters], say."""
    rows = size if isinstance(size, int) else 1
    x, y = TensorSpec.parse(f"x:float32:{size},3"), TensorSpec.parse(f"y:float32:5,{rows}")
    signature = Signature(inputs=(x,), outputs=(y,))
    answer = np.arange(5 * rows).reshape(5, rows)
    model: Any = SimpleNamespace(signature=signature, run=lambda feeds: {"y": answer})
    if taken:
        answers = tasks._answer_rows(model, {"x": np.zeros((1, 3))}, 1, None)
        assert answers["y"].tolist() == [[0, 1, 2, 3, 4]]
    else:
        with pytest.raises(DataError, match="no output of the model has a row for each"):
            tasks._answer_rows(model, {"x": np.zeros((rows, 3))}, rows, None)


def test_boxes_of_one_image_without_a_batch_are_no_row_of_a_sample() -> None:
    """A detector of batch 1 with NMS inside answers [boxes, 4] and [boxes]."""
    x = TensorSpec.parse("x:float32:1,3")
    outputs = (TensorSpec.parse("boxes:float32:count,4"), TensorSpec.parse("scores:float32:count"))
    answers = {"boxes": np.zeros((7, 4)), "scores": np.zeros(7)}
    model: Any = SimpleNamespace(signature=Signature(inputs=(x,), outputs=outputs), run=lambda feeds: answers)
    with pytest.raises(DataError, match=r"^for 1 sample, .* which a metric needs: 'boxes' is") as error:
        tasks._answer_rows(model, {"x": np.zeros((1, 3))}, 1, None)
    assert "[batch, boxes, 6]" in error.value.remedy
    assert "omit --metric and --max-drop" in error.value.remedy


@pytest.mark.parametrize("batched", [False, True])
def test_different_numbers_of_boxes_are_judged(tmp_path: Path, batched: bool) -> None:
    """Of a detector of one image: two boxes, one, where the answers look like those of a sample, and none."""
    x = TensorSpec.parse("x:float32:1,3")
    lead = "1," if batched else ""
    outputs = tuple(
        TensorSpec.parse(text)
        for text in (f"boxes:float32:{lead}n,4", f"scores:float32:{lead}m", f"labels:int64:{lead}k", "loss:float32:1")
    )

    def run(feeds: Feeds) -> dict[str, Array]:
        found = np.float32([[0, 0, 10, 10], [20, 20, 30, 30]])[: int(feeds["x"][0, 0])]
        answers = {
            "boxes": found,
            "scores": np.full(len(found), 0.9, np.float32),
            "labels": np.arange(len(found), dtype=np.int64),
        }
        return {**({k: v[None] for k, v in answers.items()} if batched else answers), "loss": np.zeros(1, np.float32)}

    labels = np.full((3, 2, 5), -1.0, np.float32)
    labels[:2, 0] = 0, 0, 0, 10, 10
    labels[0, 1] = 1, 20, 20, 30, 35
    np.savez(tmp_path / "data.npz", x=np.float32([[2] * 3, [1] * 3, [0] * 3]), labels=labels)
    data = {"data": str(tmp_path / "data.npz"), "data_options": DataOptions(), "samples": None}
    quality = Quality(engine=OnnxRuntime(), device=Device(), batch=1, largest_batch=1, seed=0, metric="map", **data)
    model: Any = SimpleNamespace(signature=Signature(inputs=(x,), outputs=outputs), run=run)
    judged, answers, _ = quality.judge(model, None, lambda _: None)
    assert not isinstance(judged, str)
    assert judged.output == "boxes,scores,labels"
    assert judged.value == pytest.approx(
        (1 + 0.4) / 2
    )  # the second class overlaps by 2/3: enough at 4 of 10 thresholds
    assert answers["boxes"].shape == (3, 2, 4)
    dataset = open_dataset(data["data"], (x,), split="test", options=DataOptions())
    sentence, _ = try_metric("map", model, dataset)
    assert sentence == "map of 'boxes,scores,labels' is judged, 'loss' not (--metric NAME:OUTPUT)"


@pytest.mark.parametrize("joined", [False, True])
def test_padding_is_no_answer(tmp_path: Path, joined: bool) -> None:
    """The greatest scores are those of padding, which a mask tells; without one, they are the answer."""
    x, mask = (TensorSpec.parse(f"{name}:float32:batch,6") for name in ("x", "attention_mask"))
    ends = ("y:float32:batch,6,2",) if joined else ("start:float32:batch,6", "end:float32:batch,6")
    outputs = tuple(map(TensorSpec.parse, ends))

    def run(feeds: Feeds) -> dict[str, Array]:
        if joined:
            return {"y": np.stack([feeds["x"], feeds["x"]], axis=-1)}
        return {spec.name: feeds["x"] for spec in outputs}

    arrays = {"x": np.tile(np.float32([1, 3, 2, 0, 5, 4]), (3, 1)), "labels": np.full((3, 2), 1)}
    there = np.tile(np.float32([1, 1, 1, 1, 0, 0]), (3, 1))
    fields: dict[str, Any] = {"samples": None, "metric": "answer_match", "batch": 2, "largest_batch": 2, "seed": 0}
    values = []
    for number, (inputs, more) in enumerate([((x,), {}), ((x, mask), {"attention_mask": there})]):
        np.savez(path := tmp_path / f"{number}.npz", **arrays, **more)
        model: Any = SimpleNamespace(signature=Signature(inputs=inputs, outputs=outputs), run=run)
        task = Quality(engine=OnnxRuntime(), device=Device(), data=str(path), data_options=DataOptions(), **fields)
        judged, _, _ = task.judge(model, None, lambda _: None)
        assert not isinstance(judged, str)
        values.append(judged.value)
    assert values == [0, 1]
