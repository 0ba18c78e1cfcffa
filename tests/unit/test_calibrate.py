"""The calibration task: which samples, which values, and what is refused."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.calibration.ranges import FILE, Ranges, load
from enginesmith.pipeline.artifact import Artifact, Effect
from enginesmith.pipeline.errors import DataError, ModelError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.tasks.calibrate import Calibrate, Feeder
from enginesmith.pipeline.tensors import Array, ShapeRange

WEIGHT = np.random.default_rng(0).standard_normal((64, 10)).astype(np.float32)


def quiet(text: str) -> None:
    del text


def network(folder: Path, *middle: onnx.NodeProto, batch: int | str = "batch") -> Artifact:
    """Digits' input, flattened, through a MatMul and nodes from ``product`` to ``y``."""
    nodes = [
        helper.make_node("Flatten", ["image"], ["flat"]),
        helper.make_node("MatMul", ["flat", "w"], ["product"], name="dense"),
        *(middle or (helper.make_node("Relu", ["product"], ["y"]),)),
    ]
    ends = (
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [batch, 1, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [batch, 10])],
    )
    weights = {"w": WEIGHT, "zero": np.float32(0), "none": np.float32(-np.inf)}
    body = helper.make_graph(nodes, "g", *ends, [numpy_helper.from_array(one, name) for name, one in weights.items()])
    path = folder / "model.onnx"
    onnx.save(helper.make_model(body, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return Artifact(kind="onnx", path=path, sha256="model", bytes=0, signature=model_file.signature(path))


def reference(folder: Path, data: str = "synthetic", batch: str | None = "batch") -> Artifact:
    place = folder / "reference"
    place.mkdir()
    sizes = [{batch: size} if batch else {} for size in ((1, 6) if batch else (1,))]
    cases = tuple(samples.Case(sizes=one, batch=6, points=("opt",)) for one in sizes)
    cases = tuple(case.model_copy(update={"batch": case.sizes.get("batch", 2)}) for case in cases)
    ranges = {batch: ShapeRange(min=1, opt=1, max=6)} if batch else {}
    samples.write(place, samples.Samples(data=data, ranges=ranges, cases=cases))
    for index, case in enumerate(cases):
        images = np.random.default_rng(index).standard_normal((case.batch, 1, 8, 8)).astype(np.float32)
        samples.write_arrays(place, "feeds", index, {"image": images})
    return Artifact(kind="reference", path=place / samples.RECORD, sha256="reference", bytes=0)


def calibrated(
    folder: Path, model: Artifact, beside: Artifact, data: str | None = "digits", count: int = 8, **options: float
) -> tuple[Ranges, Effect]:
    out = folder / "out"
    out.mkdir(exist_ok=True)
    task = Calibrate(feeder=Feeder(data=data, samples=count, seed=0), **options)
    effect = task.run({"model": model, "reference": beside}, out, quiet)
    return load(out / effect.file, model_sha256=model.sha256), effect


def raw(given: Ranges) -> Array:
    """The samples that were used, one a row."""
    from enginesmith.calibration.dataset import embedded

    images = np.asarray(embedded("digits", "calibration").arrays["image"])
    return images[list(given.provenance.rows)].reshape(-1, 64)


def test_ranges_are_those_of_the_samples_that_are_named(tmp_path: Path) -> None:
    found, effect = calibrated(tmp_path, network(tmp_path), reference(tmp_path))
    assert len(found.provenance.rows) == 8
    assert (found.provenance.data, found.provenance.synthetic) == ("digits/calibration", False)
    product = raw(found) @ WEIGHT
    assert list(found.tensors) == ["image", "flat", "product", "y"]
    assert found.tensors["product"].minimum == pytest.approx(product.min(), rel=1e-5)
    assert found.tensors["product"].maximum == pytest.approx(product.max(), rel=1e-5)
    assert found.tensors["y"].minimum == 0
    assert found.tensors["flat"] == found.tensors["image"]
    assert found.tensors["product"].count == product.size
    assert found.channels["flat"].mean == pytest.approx(raw(found).mean(0).tolist(), rel=1e-6)
    assert effect.summary == "8 samples of digits/calibration, 4 values, 4 histograms"
    assert not effect.notes


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    model, beside = network(tmp_path), reference(tmp_path)
    calibrated(tmp_path, model, beside)
    first = (tmp_path / "out" / FILE).read_bytes()
    calibrated(tmp_path, model, beside)
    assert (tmp_path / "out" / FILE).read_bytes() == first
    json.loads(first)


def test_files_that_were_read_are_told(tmp_path: Path) -> None:
    path = tmp_path / "images.npy"
    np.save(path, np.random.default_rng(0).random((20, 1, 8, 8), np.float32))
    found, effect = calibrated(tmp_path, network(tmp_path), reference(tmp_path), str(path), 30)
    assert effect.reads == (path,)
    assert found.provenance.rows == tuple(range(20))
    assert any("30 samples are asked for" in note for note in effect.notes)


def test_data_that_cannot_be_calibrated_on_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "images.npy"
    np.save(path, np.ones((20, 1, 8, 8), np.float32))
    with pytest.raises(DataError, match="all the same"):
        calibrated(tmp_path, network(tmp_path), reference(tmp_path), str(path))


def test_without_data_made_up_samples_are_like_the_reference_and_said_to_be(tmp_path: Path) -> None:
    found, effect = calibrated(tmp_path, network(tmp_path), reference(tmp_path), None, 50)
    assert found.provenance.synthetic
    assert found.provenance.rows == tuple(range(50))
    assert found.tensors["image"].count == 50 * 64
    assert found.tensors["image"].minimum < -2
    assert "made up" in effect.notes[-1]


def test_made_up_samples_are_the_same_however_many_there_are(tmp_path: Path) -> None:
    model, beside = network(tmp_path), reference(tmp_path)
    few, many = (Feeder(data=None, samples=count, seed=0).open(model, beside)[0] for count in (3, 9))
    other, _ = Feeder(data=None, samples=3, seed=1).open(model, beside)
    pairs = list(zip(few, many, other, strict=False))
    assert len(pairs) == 3
    assert all((a["image"] == b["image"]).all() for a, b, _ in pairs)
    assert not any((a["image"] == c["image"]).any() for a, _, c in pairs)
    assert len({a["image"].tobytes() for a, _, _ in pairs}) == 3
    assert len({feeding.provenance.digest for feeding in (few, many, other)}) == 3


def test_without_data_real_samples_of_the_reference_are_used_as_they_are(tmp_path: Path) -> None:
    beside = reference(tmp_path, data="mine.npz")
    found, effect = calibrated(tmp_path, network(tmp_path), beside, None, 50)
    assert not found.provenance.synthetic
    assert "mine.npz" in effect.summary
    images = samples.read_arrays(beside.folder, "feeds", 1)["image"]
    assert found.tensors["image"].count == images.size
    assert found.tensors["image"].maximum == pytest.approx(images.max())


def test_samples_run_one_at_a_time_or_as_many_as_a_fixed_batch_takes(tmp_path: Path) -> None:
    beside = reference(tmp_path)
    feeding, _ = Feeder(data="digits", samples=7, seed=0).open(network(tmp_path), beside)
    assert [len(feeds["image"]) for feeds in feeding] == [1] * 7 == [1] * len(feeding)
    feeding, _ = Feeder(data="digits", samples=7, seed=0).open(network(tmp_path, batch=3), beside)
    assert [len(feeds["image"]) for feeds in feeding] == [3, 3]
    assert (feeding.provenance.batch, len(feeding.provenance.rows)) == (3, 6)
    feeding, _ = Feeder(data="digits", samples=2, seed=0).open(network(tmp_path, batch=3), beside)
    assert [len(feeds["image"]) for feeds in feeding] == [3]


def test_a_fixed_batch_gives_the_same_ranges(tmp_path: Path) -> None:
    beside = reference(tmp_path)
    single, _ = calibrated(tmp_path, network(tmp_path), beside, count=6)
    three, _ = calibrated(tmp_path, network(tmp_path, batch=3), beside, count=6)
    assert three.provenance.rows == single.provenance.rows
    assert three.channels == single.channels
    for name, one in single.tensors.items():
        assert three.tensors[name].amax == pytest.approx(one.amax, rel=1e-5)


def test_a_product_of_what_is_not_finite_names_the_first_such_value(tmp_path: Path) -> None:
    nodes = (
        helper.make_node("Div", ["product", "zero"], ["broken"], name="division"),
        helper.make_node("Neg", ["broken"], ["turned"]),
        helper.make_node("Gemm", ["turned", "square"], ["y"]),
    )
    model = network(tmp_path, *nodes)
    proto = onnx.load(model.path)
    proto.graph.initializer.append(numpy_helper.from_array(np.eye(10, dtype=np.float32), "square"))
    onnx.save(proto, model.path)
    with pytest.raises(
        ModelError, match=r"'broken', made by the Div node 'division', is NaN or infinite on row \d+ of"
    ):
        calibrated(tmp_path, model, reference(tmp_path))


def test_infinite_masks_are_no_fault(tmp_path: Path) -> None:
    nodes = (
        helper.make_node("Less", ["product", "zero"], ["negative"]),
        helper.make_node("Where", ["negative", "none", "product"], ["masked"]),
        helper.make_node("Softmax", ["masked"], ["y"]),
    )
    found, _ = calibrated(tmp_path, network(tmp_path, *nodes), reference(tmp_path))
    assert (found.tensors["masked"].finite, found.tensors["masked"].amax) == (False, None)
    assert found.tensors["y"].amax is not None


def test_an_unnamed_batch_gets_made_up_samples_of_the_reference_alone(tmp_path: Path) -> None:
    found, _ = calibrated(tmp_path, network(tmp_path, batch=2), reference(tmp_path, batch=None), None)
    assert found.provenance.synthetic
    assert found.tensors["image"].count == 2 * 64


@pytest.mark.parametrize(("rows", "count", "left", "noted"), [(40, 8, 32, False), (10, 8, 2, True), (8, 8, 8, True)])
def test_fidelity_is_judged_on_samples_that_calibration_does_not_take(
    tmp_path: Path, rows: int, count: int, left: int, noted: bool
) -> None:
    model = network(tmp_path)
    assert model.signature is not None
    images = np.random.default_rng(1).standard_normal((rows, 1, 8, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", image=images)
    feeder = Feeder(data=str(tmp_path / "data.npz"), samples=count, seed=0)
    taken = feeder.open(model, reference(tmp_path))[0].data.rows
    held_out, files = feeder.held_out(model.signature)
    assert (len(held_out), bool(held_out.notes)) == (left, noted)
    assert [path.name for path in files] == ["data.npz"]
    assert np.array_equal(held_out.batch(0, left)["image"], images[list(held_out.rows)])
    assert rows == count or not set(taken) & set(held_out.rows)
