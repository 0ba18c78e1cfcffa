"""The calibration task, histograms, what every method makes of them, and statistics by channel."""

import json
from pathlib import Path
from types import MappingProxyType

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.calibration.collector import ChannelSums, Collector
from enginesmith.calibration.dataset import embedded
from enginesmith.calibration.histogram import Histogram, amax
from enginesmith.calibration.ranges import FILE, METHODS, Provenance, Ranges, load
from enginesmith.pipeline.artifact import Artifact, Effect
from enginesmith.pipeline.errors import DataError, ModelError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.tasks.base import Inputs
from enginesmith.pipeline.tasks.calibrate import BEFORE, Calibrate, Feeder
from enginesmith.pipeline.tensors import Array, ShapeRange, Signature, TensorSpec
from graphs import quiet

WEIGHT = np.random.default_rng(0).standard_normal((64, 10)).astype(np.float32)


def network(
    folder: Path,
    *middle: onnx.NodeProto,
    batch: int | str = "batch",
    sha256: str = "model",
    weights: dict[str, Array] | None = None,
) -> Artifact:
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
    weights = weights or {"w": WEIGHT, "zero": np.float32(0), "none": np.float32(-np.inf)}
    body = helper.make_graph(nodes, "g", *ends, [numpy_helper.from_array(one, name) for name, one in weights.items()])
    path = folder / "model.onnx"
    onnx.save(helper.make_model(body, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return Artifact(kind="onnx", path=path, sha256=sha256, bytes=0, signature=model_file.signature(path))


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
    if data == samples.SYNTHETIC:
        samples.write_example(place, {"image": images})
    return Artifact(kind="reference", path=place / samples.RECORD, sha256="reference", bytes=0)


def calibrated(
    folder: Path,
    model: Artifact,
    beside: Artifact,
    data: str | None = "digits",
    count: int = 8,
    before: Inputs = MappingProxyType({}),
    **options: float,
) -> tuple[Ranges, Effect]:
    out = folder / "out"
    out.mkdir(exist_ok=True)
    task = Calibrate(feeder=Feeder(data=data, samples=count, seed=0), **options)
    effect = task.run({"model": model, "reference": beside, **before}, out, quiet)
    return load(out / effect.file, model_sha256=model.sha256), effect


def raw(given: Ranges) -> Array:
    """The samples that were used, one a row."""
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
    assert (found.tensors["y"].minimum, found.tensors["flat"]) == (0, found.tensors["image"])
    assert found.tensors["product"].count == product.size
    assert found.channels["flat"].mean == pytest.approx(raw(found).mean(0).tolist(), rel=1e-6)
    assert effect.summary == "8 samples of digits/calibration, 4 values, 4 histograms"
    assert not effect.notes


def test_values_that_a_pass_left_as_they_were_keep_their_ranges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first product's numbers are twice as large here, and the second one's are the same.

    Pixels that are 0 in all samples which are compared tell nothing, unless they always were 0.
    """
    random = np.random.default_rng(1)
    first, second = (random.standard_normal(shape).astype(np.float32) for shape in ((64, 10), (10, 10)))
    second[:, 0] = -np.abs(second[:, 0])
    nodes = (
        helper.make_node("Relu", ["product"], ["clipped"]),
        helper.make_node("MatMul", ["clipped", "second"], ["mixed"], name="behind"),
        helper.make_node("Relu", ["mixed"], ["y"]),
    )
    graphs = []
    for folder, factor in (("before", 1), ("after", 2)):
        (tmp_path / folder).mkdir()
        weights = {"w": first * np.float32(factor), "second": second / np.float32(factor)}
        graphs.append(network(tmp_path / folder, *nodes, sha256=folder, weights=weights))
    beside, added = reference(tmp_path), set[str]()
    known, _ = calibrated(tmp_path, graphs[0], beside, count=40)
    alone, _ = calibrated(tmp_path, graphs[1], beside, count=40)
    (record := tmp_path / "known").mkdir()
    (record / FILE).write_text(known.model_dump_json())
    before = {BEFORE: graphs[0], "ranges": Artifact(kind="record", path=record / FILE, sha256="", bytes=0)}
    add = Collector.add

    def count(self: Collector, name: str, values: Array) -> None:
        added.add(name)
        add(self, name, values)

    monkeypatch.setattr(Collector, "add", count)
    found, _ = calibrated(tmp_path, graphs[1], beside, count=40, before=before)
    assert added == {"flat", "product", "clipped"}
    assert found.tensors["clipped"].maximum == pytest.approx(2 * known.tensors["clipped"].maximum)
    assert found.channels == alone.channels
    for name, tensor in alone.tensors.items():
        assert found.tensors[name].amax == pytest.approx(tensor.amax, rel=1e-3)


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
    assert (found.provenance.rows, found.tensors["image"].count) == (tuple(range(50)), 50 * 64)
    assert found.tensors["image"].minimum < -2
    assert "random" in effect.notes[-1]


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


@pytest.mark.parametrize("tables", [{}, {"ids": 64}])
def test_made_up_samples_are_like_the_example_and_not_like_the_feeds_that_were_drawn_of_it(
    tmp_path: Path, tables: dict[str, int]
) -> None:
    """One token of two was drawn at batch 1; those of a table are of all its rows, as the reference's are."""
    beside = reference(tmp_path)
    samples.write(beside.folder, samples.read(beside.folder).model_copy(update={"tables": tables}))
    for index in range(2):
        samples.write_arrays(beside.folder, "feeds", index, {"ids": np.full((1, 1), 7)})
    samples.write_example(beside.folder, {"ids": np.array([[4], [7]])})
    signature = Signature(inputs=(TensorSpec.parse("ids:int64:batch,1"),), outputs=())
    model = network(tmp_path).model_copy(update={"signature": signature})
    feeding, _ = Feeder(data=None, samples=300, seed=0).open(model, beside)
    found = {int(feeds["ids"][0, 0]) for feeds in feeding}
    assert len(found) > 50 if tables else found == {4, 7}


@pytest.mark.parametrize("data", ["mine.npz", "synthetic"])
def test_samples_of_the_reference_are_taken_from_where_the_batch_is(tmp_path: Path, data: str) -> None:
    beside = reference(tmp_path, data=data)
    images = np.random.default_rng(0).random((3, 6, 2), np.float32) + 7
    samples.write_arrays(beside.folder, "feeds", 1, {"image": images})
    samples.write_example(beside.folder, {"image": images})
    signature = Signature(inputs=(TensorSpec.parse("image:float32:3,batch,2"),), outputs=())
    model = network(tmp_path).model_copy(update={"signature": signature})
    feeding, _ = Feeder(data=None, samples=9, seed=0).open(model, beside)
    found = [feeds["image"] for feeds in feeding]
    assert {feeds.shape for feeds in found} == {(3, 1, 2)}
    assert len(found) == (6 if data == "mine.npz" else 9)
    if data == "mine.npz":
        np.testing.assert_array_equal(np.concatenate(found, axis=1), images)
    assert np.mean(found) == pytest.approx(7.5, abs=0.2)


def test_samples_run_one_at_a_time_or_as_many_as_a_fixed_batch_takes(tmp_path: Path) -> None:
    beside = reference(tmp_path)
    feeding, _ = Feeder(data="digits", samples=7, seed=0).open(network(tmp_path), beside)
    assert [len(feeds["image"]) for feeds in feeding] == [1] * 7 == [1] * len(feeding)
    feeding, _ = Feeder(data="digits", samples=7, seed=0).open(network(tmp_path, batch=3), beside)
    assert [len(feeds["image"]) for feeds in feeding] == [3, 3]
    assert (feeding.provenance.batch, len(feeding.provenance.rows)) == (3, 6)
    feeding, _ = Feeder(data="digits", samples=2, seed=0).open(network(tmp_path, batch=3), beside)
    assert [len(feeds["image"]) for feeds in feeding] == [3]


def test_samples_that_change_each_others_answers_run_in_the_largest_batch(tmp_path: Path) -> None:
    """Alone, their difference from the mean of the batch is zero."""
    beside = reference(tmp_path)
    known = samples.read(beside.folder).model_copy(update={"interacting": True})
    samples.write(beside.folder, known)
    for data in ("digits", None):
        feeding, _ = Feeder(data=data, samples=13, seed=0).open(network(tmp_path), beside)
        assert [len(feeds["image"]) for feeds in feeding] == [6, 6]
    feeding, _ = Feeder(data="digits", samples=5, seed=0).open(network(tmp_path), beside)
    assert [len(feeds["image"]) for feeds in feeding] == [1] * 5  # there are too few for the largest
    assert len(set(feeding.provenance.rows)) == 5
    np.savez(tmp_path / "data.npz", image=np.random.default_rng(1).random((40, 1, 8, 8), np.float32))
    feeder = Feeder(data=str(tmp_path / "data.npz"), samples=20, seed=0)
    model = network(tmp_path)
    assert model.signature is not None
    taken, left = feeder.open(model, beside)[0].data.rows, feeder.held_out(model.signature)[0].rows
    assert (len(taken), len(left), set(taken) & set(left)) == (18, 20, set())


def test_made_up_samples_are_drawn_as_the_reference_took_them_and_as_many(tmp_path: Path) -> None:
    """A row of the example alone may be too short for the sizes of others."""
    beside = reference(tmp_path)
    samples.write(beside.folder, samples.read(beside.folder).model_copy(update={"drawing": "repeat"}))
    known = samples.read(beside.folder)
    index = max(range(len(known.cases)), key=lambda position: known.cases[position].batch)
    stored = samples.read_arrays(beside.folder, "feeds", index)["image"]
    feeding, _ = Feeder(data=None, samples=13, seed=0).open(network(tmp_path), beside)
    assert [feeds["image"].tolist() for feeds in feeding] == [stored.tolist()] * 2
    feeding, _ = Feeder(data="digits", samples=2, seed=0).open(network(tmp_path), beside)
    assert [len(feeds["image"]) for feeds in feeding] == [1, 1]


def test_a_fixed_batch_gives_the_same_ranges(tmp_path: Path) -> None:
    beside = reference(tmp_path)
    single, _ = calibrated(tmp_path, network(tmp_path), beside, count=6)
    three, _ = calibrated(tmp_path, network(tmp_path, batch=3), beside, count=6)
    assert (three.provenance.rows, three.channels) == (single.provenance.rows, single.channels)
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
        ModelError, match=r"'broken', made by the Div node 'division', is NaN or infinite on row \d+ of .* \(the first"
    ):
        calibrated(tmp_path, model, reference(tmp_path))


def test_a_product_of_what_is_missing_names_the_row(tmp_path: Path) -> None:
    images = np.random.default_rng(0).random((8, 1, 8, 8), np.float32)
    images[5, 0, 3, 3] = np.nan
    np.savez(tmp_path / "images.npz", image=images)
    with pytest.raises(DataError, match=r"images.npz: 'image' holds NaN in row 5, and 'image' then has no range"):
        calibrated(tmp_path, network(tmp_path), reference(tmp_path), str(tmp_path / "images.npz"))


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
def test_fidelity_has_samples_of_its_own(tmp_path: Path, rows: int, count: int, left: int, noted: bool) -> None:
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


def test_a_function_that_yields_other_samples_leaves_none_for_fidelity(tmp_path: Path) -> None:
    """The order is another one than the reference's, so those that are left for it may be taken."""
    model, beside = network(tmp_path), reference(tmp_path)
    assert model.signature is not None
    for seed in ("0", ""):
        rows = f"random.default_rng({seed}).random((9, 1, 8, 8))"
        code = f"from numpy import random\ndef f():\n    yield {{'image': {rows}}}"
        (tmp_path / f"rows{seed}_of_calibration.py").write_text(code)
        data = f"{tmp_path}/rows{seed}_of_calibration.py:f"
        feeder = Feeder(data=data, samples=4, seed=0)
        held_out, _ = feeder.held_out(model.signature)
        known = samples.read(beside.folder).model_copy(update={"yielded": {data: held_out.whole.digest}})
        samples.write(beside.folder, known)
        if seed:
            assert len(feeder.open(model, beside)[0]) == 4
        else:
            with pytest.raises(DataError, match=r"yields other samples each time.*held out for fidelity"):
                feeder.open(model, beside)


RESOLUTION = 1 / 512  # of a bin, relative to the values in it
COUNT = 60_000
ROUNDED = 1e-8  # nine significant digits


def normal(count: int = COUNT) -> Array:
    return np.random.default_rng(0).standard_normal(count, dtype=np.float32)


def heavy_tailed() -> Array:
    return np.random.default_rng(1).standard_t(2, COUNT).astype(np.float32)


def histogram(*parts: Array) -> Histogram:
    found = Histogram()
    for part in parts:
        found.add(part)
    return found


def squared_error(values: Array, end: float) -> float:
    step = end / 127
    return float(np.mean((values - np.clip(np.rint(values / step), -127, 127) * step) ** 2))


def divergence(magnitudes: Array, bins: int) -> float:
    """KL of clipped against quantized values for so many of 2048 bins: as in the paper, and as slow."""
    counts = np.histogram(magnitudes, 2048, (0, magnitudes.max()))[0].astype(float)
    clipped = counts[:bins].copy()
    clipped[-1] += counts[bins:].sum()
    quantized = np.zeros(bins)
    level = np.arange(bins) * 128 // bins
    for one in range(128):
        occupied = (level == one) & (clipped > 0)
        quantized[occupied] = counts[:bins][level == one].sum() / max(occupied.sum(), 1)
    both = clipped > 0
    quantized[both & (quantized == 0)] = 1e-4
    p, q = clipped[both] / clipped.sum(), quantized[both] / quantized.sum()
    return float((p * np.log(p / q)).sum())


def test_a_histogram_counts_every_value_once_in_its_bin() -> None:
    values = np.concatenate([normal(), [0, -0.0, 1e-30, -4.0, 4.0]]).astype(np.float32)
    found = histogram(values)
    edges, counts = found.magnitudes()
    assert found.zeros == 3
    assert counts.sum() + found.zeros == found.extent.count == values.size
    assert counts.tolist() == np.histogram(np.abs(values), edges)[0].tolist()
    assert edges[-1] == np.abs(values).max()
    assert (np.diff(edges) <= RESOLUTION * edges[:-1] * (1 + 1e-12)).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_extents_are_exact(dtype: type) -> None:
    values = normal(1000).astype(dtype)
    found = histogram(values.reshape(10, 100)).extent
    assert (found.minimum, found.maximum, found.count) == (np.float32(values.min()), np.float32(values.max()), 1000)


def test_an_outlier_takes_no_resolution_from_the_rest() -> None:
    found = amax(histogram(normal(), np.full(3, -3.4e38, np.float32)), 99)
    assert found["percentile"] == pytest.approx(np.percentile(np.abs(normal()), 99), rel=2 * RESOLUTION)
    assert found["minmax"] == pytest.approx(3.4e38)


@pytest.mark.parametrize("odd", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_told_and_kept_out(odd: float) -> None:
    found = histogram(np.array([1, odd, -2], np.float32), np.array([odd], np.float32))
    assert not found.extent.finite
    assert found.extent.count == 4
    assert (found.extent.minimum, found.extent.maximum, found.magnitudes()[1].sum()) == (-2, 1, 2)


def test_percentile_counts_all_values() -> None:
    values = heavy_tailed()
    for percentile in (90, 99, 99.99):
        expected = np.percentile(np.abs(values), percentile)
        assert amax(histogram(values), percentile)["percentile"] == pytest.approx(expected, rel=2 * RESOLUTION)
    with_zeros = np.append(values, np.zeros(3 * COUNT, np.float32))
    expected = np.percentile(np.abs(with_zeros), 99)
    assert amax(histogram(with_zeros), 99)["percentile"] == pytest.approx(expected, rel=2 * RESOLUTION)


@pytest.mark.parametrize("values", [normal(), heavy_tailed(), np.maximum(normal(), 0), np.clip(3 + 3 * normal(), 0, 6)])
def test_mse_is_as_good_as_the_best_end_for_the_raw_values(values: Array) -> None:
    values = values.astype(np.float64)
    largest = np.abs(values).max()
    best = min(squared_error(values, largest * 2.0**-exponent) for exponent in np.arange(0, 6, 1 / 64))
    found = amax(histogram(values))["mse"]
    assert squared_error(values, found) <= 1.001 * best
    assert found <= largest


@pytest.mark.parametrize("values", [normal(), normal(2000), np.maximum(normal(), 0), normal() ** 3])
def test_entropy_is_as_good_as_the_best_end_for_the_raw_values(values: Array) -> None:
    magnitudes = np.abs(values[values != 0])
    found = round(amax(histogram(values))["entropy"] / magnitudes.max() * 2048)
    assert 128 < found <= 2048
    best = min(divergence(magnitudes, bins) for bins in range(128, 2049, 64))
    assert divergence(magnitudes, found) <= 1.1 * best


def test_methods_differ_on_a_heavy_tail_and_zeros_change_nothing_but_percentile() -> None:
    values = heavy_tailed()
    found = amax(histogram(values))
    assert found["entropy"] < 0.3 * found["minmax"]
    assert found["entropy"] < found["mse"] < 0.9 * found["minmax"]
    others = amax(histogram(values, np.zeros(20 * COUNT, np.float32)))
    assert {**others, "percentile": 0} == {**found, "percentile": 0}
    assert others["percentile"] < found["percentile"]


def test_entropy_keeps_half_of_the_values_and_of_equal_ends_the_largest() -> None:
    last = 207.5 / 2048  # in the last one of the first 208 bins, which is all that the divergence is taken of
    spread = np.append((1 + np.random.default_rng(0).random(COUNT)) / 2, 1)
    assert amax(histogram(np.full(COUNT // 3, last), spread))["entropy"] > 0.5
    assert amax(histogram(np.full(6, last), np.full(4, 1.0)))["entropy"] == pytest.approx(1, rel=RESOLUTION)


def test_entropy_goes_below_a_sixteenth_of_the_largest() -> None:
    values = np.append(normal(), [1000.0] * 3)
    found = amax(histogram(values))["entropy"]
    assert np.abs(normal()).max() / 2 < found < 1000 / 16 / 4


@pytest.mark.parametrize("value", [0.0, 1e-20, -0.37, 6.0])
def test_a_value_that_never_varies(value: float) -> None:
    found = amax(histogram(np.full(1000, value, np.float32)))
    assert found == pytest.approx(dict.fromkeys(METHODS, abs(value)), rel=1e-6)


def document(values: Array, batch: int) -> str:
    collector = Collector({"x", "rows"}, {"x": 1, "rows": -1, "matrix": -1})
    for start in range(0, len(values), batch):
        part = values[start : start + batch]
        collector.add("x", part)
        collector.add("rows", part.transpose(0, 2, 3, 1).copy())
        collector.add("watched", part * 2)
        collector.add("matrix", part[:, :, 0, 0])
        collector.add("numbers", np.ones(3, np.int64))
    provenance = Provenance(data="d", digest="e", rows=(0,), seed=0, batch=1)
    found = Ranges(model_sha256="m", provenance=provenance, tensors=collector.tensors(), channels=collector.channels())
    return found.model_dump_json()


def test_the_document_depends_neither_on_the_batch_nor_on_the_order() -> None:
    values = heavy_tailed()[: 64 * 5 * 6 * 7].reshape(64, 5, 6, 7)
    assert document(values, 1) == document(values, 3) == document(values, 64)
    backwards = json.loads(document(values[::-1], 3))
    assert backwards == json.loads(document(values, 1))


def test_channel_sums_are_the_same_to_the_last_bit() -> None:
    values = normal(64 * 5 * 42).reshape(64, 42, 5)
    alone, together = ChannelSums(-1), ChannelSums(-1)
    together.add(values)
    for start in range(64):
        alone.add(values[start : start + 1])
    for name, one in alone.statistics().items():
        assert one.tobytes() == together.statistics()[name].tobytes()


def test_channel_statistics_are_those_of_the_raw_values() -> None:
    values = normal(64 * 5 * 6 * 7).reshape(64, 5, 6, 7) + np.arange(5, dtype=np.float32).reshape(5, 1, 1)
    found = Ranges.model_validate_json(document(values, 3))
    exact = values.astype(np.float64)
    for name, axis in (("x", 1), ("rows", 3)):
        one = found.channels[name]
        assert one.axis == axis
        assert list(one.amax) == pytest.approx(np.abs(exact).max((0, 2, 3)).tolist(), rel=ROUNDED)
        middle = (exact.min((0, 2, 3)) + exact.max((0, 2, 3))) / 2
        assert list(one.middle) == pytest.approx(middle.tolist(), rel=ROUNDED)
        assert list(one.mean) == pytest.approx(exact.mean((0, 2, 3)).tolist(), rel=ROUNDED)
        assert list(one.mean_absolute) == pytest.approx(np.abs(exact).mean((0, 2, 3)).tolist(), rel=ROUNDED)
        assert list(one.mean_square) == pytest.approx((exact**2).mean((0, 2, 3)).tolist(), rel=ROUNDED)
    assert found.channels["matrix"].axis == 1
    assert list(found.channels["matrix"].mean) == pytest.approx(exact[:, :, 0, 0].mean(0), rel=ROUNDED)


def test_only_floats_are_collected_and_only_named_values_have_methods() -> None:
    found = Ranges.model_validate_json(document(normal(64 * 5 * 6 * 7).reshape(64, 5, 6, 7), 64))
    assert set(found.tensors) == {"x", "rows", "watched", "matrix"}
    assert found.tensors["watched"].amax is None
    assert found.tensors["x"].amax is not None
    assert found.tensors["watched"].maximum == pytest.approx(2 * found.tensors["x"].maximum)
    assert set(found.tensors["x"].amax) == set(METHODS)


def test_infinite_values_have_a_range_and_no_methods() -> None:
    collector = Collector({"x"}, {"x": 1})
    collector.add("x", np.array([[1, -np.inf]], np.float32))
    collector.add("x", np.array([[1, np.inf]], np.float32))
    one = collector.tensors()["x"]
    assert (one.minimum, one.maximum, one.finite, one.amax) == (1, 1, False, None)
    assert not collector.channels()


def written(folder: Path) -> Path:
    (folder / FILE).write_text(document(np.ones((1, 2, 3, 4), np.float32), 1))
    return folder / FILE


def test_ranges_are_read_for_their_model(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert load(path, model_sha256="m").model_sha256 == "m"
    with pytest.raises(DataError, match=r"another model .*\n.*calibrate again"):
        load(path, model_sha256="other")


@pytest.mark.parametrize("text", ["", "{}", '{"model_sha256": 1}'])
def test_what_holds_no_ranges_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(text)
    with pytest.raises(DataError, match="does not hold ranges"):
        load(tmp_path / FILE, model_sha256="m")
    with pytest.raises(DataError, match="cannot read"):
        load(tmp_path / "nothing", model_sha256="m")


def test_the_percentile_is_a_parameter(tmp_path: Path) -> None:
    model, beside = network(tmp_path), reference(tmp_path)
    usual, _ = calibrated(tmp_path, model, beside)
    low, _ = calibrated(tmp_path, model, beside, percentile=60)
    assert low.tensors["product"].amax["percentile"] < 0.9 * usual.tensors["product"].amax["percentile"]
    assert usual.channels
