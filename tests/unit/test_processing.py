"""Test what --prepend and --append add: nodes compute what PyTorch does, what does not fit is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper

from enginesmith.pipeline.errors import ModelError, SignatureError, UsageError
from enginesmith.pipeline.frameworks import processing
from enginesmith.pipeline.frameworks.onnx import edit, evaluator, model_file
from enginesmith.pipeline.frameworks.onnx.processing import extend
from enginesmith.pipeline.frameworks.processing import Processing, ProcessingRequest
from enginesmith.pipeline.frameworks.source import resolve
from enginesmith.pipeline.frameworks.torch.processing import Extension, check_graph, make_raw_example, replace_places
from enginesmith.pipeline.tasks.load import LoadOnnx
from enginesmith.pipeline.tensors import Array, Signature, TensorSpec

RNG = np.random.default_rng(5)
PICTURE = ("image:float32:batch,3,6,8",)


def request(prepend: str = "", append: str = "") -> ProcessingRequest:
    return ProcessingRequest(prepend=(prepend,) if prepend else (), append=(append,) if append else ())


def write_copies(path: Path, inputs: tuple[str, ...], opset: int = 17) -> Path:
    """Write a graph whose outputs y0, y1, ... are its inputs, times one."""
    specs = [TensorSpec.parse(text) for text in inputs]
    kind = TensorProto.FLOAT
    graph = helper.make_graph(
        [helper.make_node("Mul", [spec.name, "one"], [f"y{index}"]) for index, spec in enumerate(specs)],
        "copies",
        [helper.make_tensor_value_info(spec.name, kind, spec.shape) for spec in specs],
        [helper.make_tensor_value_info(f"y{index}", kind, spec.shape) for index, spec in enumerate(specs)],
        [helper.make_tensor("one", kind, [], [1.0])],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)
    return path


def build(folder: Path, asked: ProcessingRequest, *inputs: str) -> tuple[Processing, Path, Path]:
    """Return what fits, the graph as it was, and the extended one."""
    path = write_copies(folder / "core.onnx", inputs)
    fitted = processing.fit(asked, model_file.signature(path))
    model = edit.load(path)
    extend(model, fitted)
    out = folder / "extended"
    out.mkdir()
    edit.save(model, out)
    onnx.checker.check_model(onnx.load(out / edit.FILE), full_check=True)
    return fitted, path, out / edit.FILE


def compare(folder: Path, asked: ProcessingRequest, feeds: dict[str, Array], *inputs: str) -> list[Array]:
    """Run the extended graph, which has to answer as PyTorch does to 1e-5 of the range; return its answers."""
    fitted, core, extended = build(folder, asked, *inputs)
    own = model_file.signature(extended)
    assert own.outputs == fitted.signature.outputs
    assert own.inputs == fitted.signature.inputs
    assert own.unordered == fitted.signature.unordered
    check_graph(fitted, core, extended, feeds)
    extension = Extension(fitted)
    prepared = extension.prepare([torch.from_numpy(feeds[spec.name]) for spec in fitted.signature.inputs])
    answers = evaluator.run_graph(extended, feeds)
    expected = [value.numpy() for value in extension.complete(prepared)]
    assert evaluator.largest_difference(expected, answers) < 1e-5
    return answers


@pytest.mark.parametrize("sides", [(6, 8), (13, 5), (1, 1), (64, 48)])
def test_raw_pixels_are_prepared_as_in_pytorch(tmp_path: Path, sides: tuple[int, int]) -> None:
    raw = RNG.integers(0, 256, (2, *sides, 3)).astype(np.uint8)
    (answer,) = compare(tmp_path, request("normalize=imagenet,resize,nhwc,uint8,scale"), {"image": raw}, *PICTURE)
    assert answer.shape == (2, 3, 6, 8)
    if sides == (6, 8):
        mean, deviation = (np.array(each, np.float32) for each in processing.IMAGENET)
        np.testing.assert_allclose(answer, ((raw / 255 - mean) / deviation).transpose(0, 3, 1, 2), atol=1e-5)


@pytest.mark.parametrize("shape", ["batch,6,8,3", "batch,height,width,3", "batch,6,8,1", "batch,32,6,4"])
@pytest.mark.parametrize("words", ["nhwc,", ""])
def test_pictures_with_channels_last_stay_so(tmp_path: Path, shape: str, words: str) -> None:
    """They are resized along the second and third axis, and scaled along the last, as computed here with matrices."""
    spec = TensorSpec.parse(f"image:float32:{shape}")
    height, width, channels = (size if isinstance(size, int) else 6 for size in spec.shape[1:])
    size = f"=6x{width}" if "height" in shape else ""
    means = ",".join(str(number / 10) for number in range(channels))
    raw = RNG.integers(0, 256, (2, 13, 20, channels)).astype(np.uint8)
    (answer,) = compare(
        tmp_path, request(f"uint8,{words}resize{size},scale,normalize={means}/0.5"), {"image": raw}, str(spec)
    )
    rows, columns = (interpolate_linearly(*sides) for sides in ((13, height), (20, width)))
    expected = np.einsum("hi,niwc,vw->nhvc", rows, raw / 255, columns)
    np.testing.assert_allclose(answer, (expected - np.arange(channels) / 10) / 0.5, atol=1e-5)


def interpolate_linearly(old: int, new: int) -> Array:
    """Make a matrix [new, old] that interpolates linearly between pixels, whose centers are at halves."""
    places = np.clip((np.arange(new) + 0.5) * old / new - 0.5, 0, old - 1)
    return np.maximum(0, 1 - np.abs(places[:, None] - np.arange(old)))


@pytest.mark.parametrize("shape", ["batch,3,6,3", "batch,12,3,3", "batch,3,8,4", "batch,channels,6,8"])
def test_channels_are_second_where_sizes_do_not_say_otherwise(shape: str) -> None:
    core = (TensorSpec.parse(f"image:float32:{shape}"),)
    fitted = processing.fit(request("nhwc,scale"), Signature(inputs=core, outputs=core))
    assert fitted.prepared is not None
    assert (fitted.prepared.channels_last, fitted.prepared.own_last) == (True, False)
    raw = fitted.prepared.raw.shape
    assert (raw[0], raw[3], raw[1], raw[2]) == core[0].shape


def test_raw_pictures_of_a_module_with_channels_last_are_as_input_says() -> None:
    raw = (TensorSpec.parse("image:uint8:batch,480,640,3"),)
    own = {"image": TensorSpec.parse("image:float32:batch,6,8,3")}
    for words in ("uint8,resize", "uint8,nhwc,resize"):
        assert processing.describe_core(raw, request(words), own) == (own["image"],)
    example = torch.from_numpy(RNG.standard_normal((2, 6, 8, 3)).astype(np.float32))
    fitted = processing.fit(request("nhwc,resize,normalize"), Signature(inputs=(own["image"],), outputs=()))
    assert fitted.prepared is not None
    made = make_raw_example(fitted.prepared, example)
    assert made.shape == (2, 12, 16, 3)
    torch.testing.assert_close(Extension(fitted).prepare((made,))[0], example, rtol=1e-4, atol=1e-4)


def test_numbers_for_each_of_any_channels_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="any channels") as caught:
        build(tmp_path, request("normalize"), "image:float32:batch,c,6,8")
    assert "image:float32:batch,c,6,8" in caught.value.remedy


def test_numbers_are_scaled_for_all_channels_or_for_each(tmp_path: Path) -> None:
    value = RNG.standard_normal((4, 3)).astype(np.float32)
    (answer,) = compare(tmp_path, request("scale=2,normalize=1,2,3/0.5"), {"x": value}, "x:float32:batch,3")
    np.testing.assert_allclose(answer, (value / 2 - [1, 2, 3]) / 0.5, rtol=1e-5)


@pytest.mark.parametrize(
    ("words", "shape", "axis"), [("softmax", "4,7", 1), ("softmax", "4,5,7", 2), ("softmax", "4,5,2,7", 1)]
)
def test_classes_are_the_second_axis_and_of_tokens_the_last(tmp_path: Path, words: str, shape: str, axis: int) -> None:
    value = RNG.standard_normal([int(size) for size in shape.split(",")]).astype(np.float32)
    (answer,) = compare(tmp_path, request(append=words), {"x": value}, f"x:float32:{shape}")
    np.testing.assert_allclose(answer.sum(axis), 1, rtol=1e-5)


@pytest.mark.parametrize(
    ("shape", "axis"),
    [("4,8,8,5", 3), ("4,side,side,5", 3), ("4,5,8,8", 1), ("4,8,8,9", 1), ("4,8,6,5", 1), ("4,6,6,c", 1)],
)
def test_classes_of_a_square_picture_are_last_where_they_are_fewer(shape: str, axis: int) -> None:
    specs = (TensorSpec.parse(f"x:float32:{shape}"),)
    for word in ("softmax", "argmax", "topk=2"):
        fitted = processing.fit(request(append=word), Signature(inputs=specs, outputs=specs))
        assert fitted.appended[0].axis == axis
        note = f"takes axis {axis} of {specs[0]} for the classes, {specs[0].shape[axis]} of them"
        assert fitted.notes == (f"--append {word.partition('=')[0]} {note}",)
    assert processing.fit(request(append="sigmoid"), Signature(inputs=specs, outputs=specs)).notes == ()


def test_selections_come_behind_activations_and_of_the_named_output(tmp_path: Path) -> None:
    feeds = {name: RNG.standard_normal((4, 7)).astype(np.float32) for name in ("a", "b")}
    inputs = ("a:float32:batch,7", "b:float32:batch,7")
    first, best, places = compare(tmp_path, request(append="topk:y1=3,sigmoid:y1"), feeds, *inputs)
    assert np.array_equal(first, feeds["a"])
    assert np.array_equal(places, np.argsort(-feeds["b"], axis=1)[:, :3])
    assert ((best > 0) & (best < 1)).all()


def test_argmax_gives_one_class_for_each_place(tmp_path: Path) -> None:
    value = RNG.standard_normal((2, 5, 3, 4)).astype(np.float32)
    (answer,) = compare(tmp_path, request(append="argmax"), {"x": value}, "x:float32:batch,5,3,4")
    assert np.array_equal(answer, value.argmax(1))


# NonMaxSuppression


def draw_boxes(count: int, classes: int) -> tuple[Array, Array]:
    """Draw centers, extents and scores of two images: many boxes overlap."""
    centers = RNG.uniform(0, 30, (2, count, 2))
    extents = RNG.uniform(4, 12, (2, count, 2))
    scores = RNG.uniform(0, 1, (2, classes, count))
    return np.concatenate([centers, extents], 2).astype(np.float32), scores.astype(np.float32)


@pytest.mark.parametrize("options", ["nms", "nms=iou:0.3,score:0.01,max:7", "sigmoid,nms=max:2000,score:0.6,iou:0.9"])
@pytest.mark.parametrize("boxes", ["60", "cells"])
def test_one_output_with_centers_is_suppressed_as_in_onnx(tmp_path: Path, options: str, boxes: str) -> None:
    found, scores = draw_boxes(60, 3)
    value = np.concatenate([found.transpose(0, 2, 1), scores], 1)
    (table,) = compare(tmp_path, request(append=options), {"x": value}, f"x:float32:batch,7,{boxes}")
    rows = table[0][table[0][:, 4] > 0]
    assert len(rows) > 5
    assert (np.diff(rows[:, 4]) <= 0).all()
    assert (table[0][len(rows) :] == 0).all()


def test_boxes_by_corners_in_any_order_have_scores_of_their_own(tmp_path: Path) -> None:
    found, scores = draw_boxes(50, 2)
    corners = np.concatenate([found[..., :2] + found[..., 2:], found[..., :2]], 2)  # the larger ones first
    inputs = ("scores:float32:batch,2,50", "boxes:float32:batch,50,4")
    feeds = {"scores": scores, "boxes": corners}
    (table,) = compare(tmp_path, request(append="nms=iou:0.4,max:30"), feeds, *inputs)
    assert table.shape == (2, 30, 6)


def suppress(corners: Array, scores: Array, iou: float, least: float, most: int) -> Array:
    """Suppress the boxes of one image class by class, one after the other: [boxes, 4], [classes, boxes] → rows."""
    rows: list[list[float]] = []
    areas = (corners[:, 2:] - corners[:, :2]).prod(1)
    for number, column in enumerate(scores):
        best: list[int] = []
        for at in np.argsort(-column):
            overlap = np.minimum(corners[best, 2:], corners[at, 2:]) - np.maximum(corners[best, :2], corners[at, :2])
            common = overlap.clip(0).prod(1)
            if column[at] > least and (common <= iou * (areas[best] + areas[at] - common)).all():
                best.append(int(at))
        rows += [[*corners[at], column[at], number] for at in best]
    return np.array(sorted(rows, key=lambda row: -row[4])[:most])


@pytest.mark.parametrize(
    "words", ["nms:y1=score:0.6,iou:0.4", "sigmoid:y1,nms:y1=score:0.6,iou:0.4", "sigmoid:y2,nms:y1"]
)
def test_a_named_output_is_suppressed_and_the_others_stay(tmp_path: Path, words: str) -> None:
    boxes, scores = draw_boxes(60, 3)
    feeds = {"a": scores[..., :4].copy(), "b": np.concatenate([boxes.transpose(0, 2, 1), scores], 1), "c": scores[0]}
    inputs = ("a:float32:batch,3,4", "b:float32:batch,7,60", "c:float32:3,60")
    before, table, behind = compare(tmp_path, request(append=words), feeds, *inputs)
    assert np.array_equal(before, feeds["a"])
    sigmoid = {name: 1 / (1 + np.exp(-value)) for name, value in (("c", feeds["c"]), ("scores", scores))}
    np.testing.assert_allclose(behind, sigmoid["c"] if "y2" in words else feeds["c"], rtol=1e-5)
    corners = np.concatenate([boxes[..., :2] - boxes[..., 2:] / 2, boxes[..., :2] + boxes[..., 2:] / 2], 2)
    least, iou = (0.6, 0.4) if "0.6" in words else (0.25, 0.5)
    for image, rows in enumerate(table):
        probabilities = sigmoid["scores"] if "sigmoid:y1" in words else scores
        expected = suppress(corners[image], probabilities[image], iou, least, 100)
        assert len(expected) > 5
        np.testing.assert_allclose(rows[: len(expected)], expected, rtol=1e-4, atol=1e-5)
        assert (rows[len(expected) :] == 0).all()


@pytest.mark.parametrize("words", ["nms:y0", "nms:y2", "sigmoid:y2,nms:y0"])
def test_named_boxes_take_the_scores_that_fit(words: str) -> None:
    """Either may be named, where the scores cannot be both: three classes are not a box and scores."""
    texts = ("y0:float32:batch,50,4", "y1:float32:batch,12", "y2:float32:batch,3,50")
    outputs = tuple(TensorSpec.parse(text) for text in texts)
    fitted = processing.fit(request(append=words), Signature(inputs=(), outputs=outputs))
    (step,) = fitted.appended
    assert (step.reads, step.classes) == ((0, 2), 3)
    assert step.activation == ("sigmoid" if "sigmoid" in words else None)
    assert [spec.name for spec in fitted.signature.outputs] == ["detections", "y1"]
    assert fitted.signature.returns == ["detections", "y1"]


def test_more_boxes_than_are_compared_at_once_are_suppressed_in_order() -> None:
    from enginesmith.pipeline.frameworks.torch import processing as computed

    found, scores = (torch.from_numpy(each) for each in draw_boxes(1500, 1))
    order = scores[0, 0].argsort(descending=True)
    corners = torch.cat([found[0, :, :2], found[0, :, :2] + found[0, :, 2:]], 1)[order]
    kept = computed._find_best(corners, torch.zeros(1500, dtype=torch.int64), 0.5)
    expected: list[int] = []
    overlaps = computed._overlap(corners, torch.zeros(1500), torch.arange(1500), torch.arange(1500), 0.5)
    for index in range(1500):
        if not overlaps[expected, index].any():
            expected.append(index)
    assert kept.tolist() == expected


# What is refused


@pytest.mark.parametrize(
    ("prepend", "append", "inputs", "message"),
    [
        ("blur", "", PICTURE, "does not know 'blur'"),
        ("scale,scale=2", "", PICTURE, "scale is given twice"),
        ("resize=0", "", PICTURE, "cannot read --prepend resize=0"),
        ("resize=7x7", "", PICTURE, "does not fit"),
        ("normalize=0.5", "", PICTURE, "means/standard deviations"),
        ("normalize=1,2/1", "", PICTURE, "2 numbers, and the input has 3 channels"),
        ("normalize=0/0", "", PICTURE, "not above 0"),
        ("scale=big", "", PICTURE, "is no number"),
        ("uint8=3", "", PICTURE, "takes no value"),
        ("resize", "", ("x:float32:batch,3",), "needs one input of floats with 4 axes"),
        ("scale", "", ("a:float32:batch,3", "b:float32:batch,3"), "the model has 2 among"),
        ("resize", "", ("image:float32:batch,h,w,3",), "takes any size"),
        ("resize", "", ("image:float32:batch,3,32,w",), "takes several sizes"),
        ("resize=8", "", ("image:float32:batch,3,32,w",), "does not fit"),
        ("", "softmax,sigmoid", PICTURE, "do not go together"),
        ("", "topk,nms", PICTURE, "do not go together"),
        ("", "softmax=1", PICTURE, "takes no value"),
        ("", "softmax", ("x:float32:batch",), "needs floats of shape"),
        ("", "softmax", ("a:float32:batch,3", "b:float32:batch,3"), "the model has 2 outputs"),
        ("", "softmax:z", ("a:float32:batch,3",), "no output 'z'"),
        ("", "topk=9", ("a:float32:batch,3",), "has 3 classes"),
        ("", "topk=x", ("a:float32:batch,3",), "cannot read"),
        ("", "nms", ("a:float32:batch,3",), "needs outputs boxes"),
        ("", "nms", ("a:float32:batch,9,4", "b:float32:batch,2,8"), "needs outputs boxes"),
        ("", "nms:z", ("a:float32:batch,9,60",), "nms: the model has no output 'z'"),
        ("", "sigmoid:z,nms", ("a:float32:batch,9,60",), "sigmoid: the model has no output 'z'"),
        ("", "nms", ("a:float32:batch,9,60", "b:float32:batch,3"), "name one of them: nms:a"),
        ("", "nms:b", ("a:float32:batch,9,60", "b:float32:batch,3"), "the output 'b' is b:float32:batch,3"),
        ("", "sigmoid:a,nms:a", ("a:float32:batch,60,4", "b:float32:batch,9,60"), "its scores: sigmoid:b"),
        ("", "nms:b", ("a:float32:batch,60,4", "b:float32:batch,9,60"), "may be a and b or b"),
        ("", "nms:a", ("a:float32:batch,9,60", "detections:float32:batch,3"), "has an output 'detections' already"),
        ("", "nms=size:3", ("a:float32:batch,9,4",), "cannot read 'size:3'"),
        ("", "nms=iou:2", ("a:float32:batch,9,4",), "out of range"),
        ("", "nms=boxes:round", ("a:float32:batch,9,4",), "out of range"),
    ],
)
def test_what_does_not_fit_is_refused(prepend: str, append: str, inputs: tuple[str, ...], message: str) -> None:
    specs = tuple(TensorSpec.parse(text) for text in inputs)
    asked = request(prepend, append)

    def fit() -> Any:
        asked.check()
        return processing.fit(asked, Signature(inputs=specs, outputs=specs))

    with pytest.raises(UsageError, match=message):
        fit()


def test_old_graphs_are_refused(tmp_path: Path) -> None:
    path = write_copies(tmp_path / "old.onnx", ("x:float32:batch,3",), opset=11)
    fitted = processing.fit(request(append="softmax"), model_file.signature(path))
    with pytest.raises(UsageError, match="opset 13 or newer"):
        extend(edit.load(path), fitted)


def test_files_of_an_old_opset_are_converted(tmp_path: Path) -> None:
    path = write_copies(tmp_path / "old.onnx", ("x:float32:batch,3",), opset=11)
    load = LoadOnnx(source=resolve(str(path)), processing=request("scale=2", "softmax"))
    (out := tmp_path / "out").mkdir()
    effect = load.run({}, out, lambda _: None)
    assert "the graph was converted from opset 11 to 13, for --prepend and --append" in effect.notes
    value = RNG.standard_normal((4, 3)).astype(np.float32)
    (answer,) = evaluator.run_graph(out / effect.file, {"x": value})
    np.testing.assert_allclose(answer, torch.from_numpy(value / 2).softmax(1), rtol=1e-5)


def test_a_graph_that_computes_something_else_is_refused(tmp_path: Path) -> None:
    fitted, core, extended = build(tmp_path, request("scale=2"), "x:float32:batch,3")
    assert fitted.prepared is not None
    other = fitted.model_copy(update={"prepared": fitted.prepared.model_copy(update={"factors": (0.4,)})})
    with pytest.raises(ModelError, match="differs from PyTorch"):
        check_graph(other, core, extended, {"x": np.ones((2, 3), np.float32)})


@pytest.mark.parametrize("words", ["softmax", "topk=2", "argmax"])
def test_float16_may_be_rounded_otherwise(tmp_path: Path, words: str) -> None:
    """Places of equal scores may be any of these; other places, and larger distances, are refused."""
    spec = TensorSpec(name="x", dtype="float16", shape=(4, 3))
    graph = onnx.parser.parse_graph("g (float16[4, 3] x) => (float16[4, 3] y) { y = Neg(x) }")
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "x.onnx")
    fitted = processing.fit(request(append=words), model_file.signature(tmp_path / "x.onnx"))
    for number, (change, refused) in enumerate((("m = Mul(n, near)", False), ("m = Mul(n, far)", True))):
        constants = "<float near = {1.002}, float far = {-1.2}>"
        text = f"{constants} {{ f = Cast <to = 1> (x) n = Neg(f) {change} y = Cast <to = 10> (m) }}"
        graph = onnx.parser.parse_graph(f"g (float16[4, 3] x) => (float16[4, 3] y) {text}")
        onnx.save(
            helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "y.onnx"
        )
        model = edit.load(tmp_path / "y.onnx")
        extend(model, fitted)
        (out := tmp_path / str(number)).mkdir()
        edit.save(model, out)
        feeds = {spec.name: np.array([[1, 1, 1], [2, 1, 1], [-1, -1, 3], [0, 1, 2]], np.float16)}
        if refused:
            with pytest.raises(ModelError, match="differs from PyTorch"):
                check_graph(fitted, tmp_path / "x.onnx", out / edit.FILE, feeds)
        else:
            check_graph(fitted, tmp_path / "x.onnx", out / edit.FILE, feeds)


def test_places_of_equal_scores_may_be_any_of_these() -> None:
    specs = (TensorSpec.parse("a:float32:2,3"), TensorSpec.parse("b:float32:2,3"))
    scores = [torch.zeros(2, 3), torch.tensor([[1.0, 1, 0], [0, 2, 2]])]
    for word, count in (("argmax:b", 1), ("topk:b=1", 2)):
        fitted = processing.fit(request(append=word), Signature(inputs=specs, outputs=specs))
        outputs = [each.numpy() for each in Extension(fitted).complete(scores)]
        assert len(outputs) == 1 + count
        for place, same in ((1, True), (2, False)):
            other = [*outputs[:-1], np.full_like(outputs[-1], place)]
            mine = [*outputs]
            replace_places(fitted, scores, mine, other)
            assert (evaluator.largest_difference(mine, other) == 0) is same


def test_raw_inputs_are_as_input_says() -> None:
    asked = request("uint8,nhwc,resize=6x8")
    raw = (TensorSpec.parse("image:uint8:batch,480,640,3"),)
    core = processing.describe_core(raw, asked, {})
    assert core == (TensorSpec.parse("image:float32:batch,3,6,8"),)
    fitted = processing.fit(asked, Signature(inputs=core, outputs=core), raw)
    assert fitted.signature.inputs == raw
    with pytest.raises(SignatureError, match="uint8"):
        processing.describe_core(core, asked, {})
    other = (TensorSpec.parse("image:uint8:batch,480,640,4"),)
    with pytest.raises(SignatureError, match="--input says"):
        processing.fit(asked, Signature(inputs=core, outputs=core), other)


def test_a_raw_example_gives_the_models_example_back() -> None:
    core = (TensorSpec.parse(PICTURE[0]),)
    fitted = processing.fit(request("nhwc,scale,normalize"), Signature(inputs=core, outputs=core))
    assert fitted.prepared is not None
    example = torch.from_numpy(RNG.standard_normal((2, 3, 6, 8)).astype(np.float32))
    raw = make_raw_example(fitted.prepared, example)
    assert raw.shape == (2, 6, 8, 3)
    torch.testing.assert_close(Extension(fitted).prepare((raw,))[0], example, rtol=1e-4, atol=1e-4)
