"""Dimensions of ONNX files: what --input may write into them, and which sizes are assumed where nothing tells any."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.errors import SignatureError
from enginesmith.pipeline.frameworks.onnx import dimensions, model_file, validation
from enginesmith.pipeline.tasks.examples import choose_sizes
from enginesmith.pipeline.tensors import Feeds, Signature, TensorSpec

STATEFUL = {"x": ["", ""], "state": [2, "", 4], "rate": []}


def save_graph(path: Path, inputs: Mapping[str, list[Any]], outputs: Mapping[str, list[Any]]) -> Path:
    """Save a graph that adds to each output's input a weight that lies beside the file; ``rate`` is left out.

    An output is called after its input, with a y before. What it adds is not seen by shape inference.
    """
    weight = numpy_helper.from_array(np.zeros(1, np.float32), "w")
    weight.raw_data = b"\0" * 4
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in outputs.items()]
    nodes = [helper.make_node("Add", [name[1:], "w"], [name]) for name in outputs]
    graph = helper.make_graph(nodes, "g", values, ends, [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path, save_as_external_data=True, location="w.bin", size_threshold=0)
    return path


def draw(path: Path) -> Any:
    def draw_feeds(sizes: Mapping[str, int]) -> Feeds:
        return {spec.name: np.ones(spec.resolve(sizes), np.float32) for spec in model_file.signature(path).inputs}

    return draw_feeds


def write(path: Path, *texts: str) -> Signature:
    target = path.parent / "out" / "model.onnx"
    target.parent.mkdir(exist_ok=True)
    dimensions.write_inputs(path, [TensorSpec.parse(text) for text in texts], target)
    sizes = choose_sizes(model_file.signature(target))
    assert dimensions.name_outputs(target, sizes, draw(target)) == ()
    validation.check(target)
    return model_file.signature(target)


def test_input_names_and_fixes_open_dimensions_of_a_file_and_outputs_follow(tmp_path: Path) -> None:
    """In the file's order, whatever that of the options is."""
    path = save_graph(tmp_path / "m.onnx", STATEFUL, {"yx": ["", ""], "ystate": ["", "", ""]})
    signature = write(path, "state:float32:2,batch,4", "x:float32:batch,8", "rate:float32:")
    assert [str(spec) for spec in signature.inputs] == [
        "x:float32:batch,8",
        "state:float32:2,batch,4",
        "rate:float32:",
    ]
    assert signature.outputs[0].shape == ("batch", "output_0_dim_1")
    assert signature.outputs[1].shape == ("output_1_dim_0", "batch", "output_1_dim_2")


def test_a_name_that_is_replaced_is_replaced_wherever_the_file_has_it(tmp_path: Path) -> None:
    given = {"x": ["N.1", "past"], "mask": ["N.1", "past + 1"]}
    path = save_graph(tmp_path / "m.onnx", given, {"yx": ["N.1", "past"], "ymask": ["N.1", "past + 1"]})
    signature = write(path, "x:float32:batch,length", "mask:float32:batch,length+1")
    assert [spec.shape for spec in signature.outputs] == [("batch", "length"), ("batch", "length+1")]
    signature = write(path, "x:float32:3,length", "mask:float32:3,length+1")
    assert [spec.shape for spec in signature.outputs] == [(3, "length"), (3, "length+1")]


def test_an_output_without_a_name_is_not_fixed_by_what_is_guessed_of_it(tmp_path: Path) -> None:
    path = save_graph(tmp_path / "m.onnx", {"x": ["", 3]}, {"yx": ["", 3]})
    assert model_file.signature(path).outputs[0].shape == ("batch", 3)
    assert write(path, "x:float32:5,3").outputs[0].shape == ("output_0_dim_0", 3)
    assert write(path, "x:float32:n,3").outputs[0].shape == ("n", 3)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["x:float32:batch,8", "state:float32:2,batch,4"], "and the file has"),  # not all
        (["x:float32:batch,8", "state:float32:2,batch,4", "rate:int64:"], "and the file has"),
        (["x:float32:batch,8,1", "state:float32:2,batch,4", "rate:float32:"], "and the file has"),
        (["x:float32:batch,8", "state:float32:batch,2,4", "rate:float32:"], "fixes a size of 'state' at 2"),
    ],
)
def test_input_may_not_change_what_a_file_fixes(tmp_path: Path, given: list[str], words: str) -> None:
    path = save_graph(tmp_path / "m.onnx", STATEFUL, {"yx": ["", ""]})
    with pytest.raises(SignatureError, match=words) as error:
        write(path, *given)
    options = "--input x:float32:input_0_dim_0,input_0_dim_1 --input state:float32:2,input_1_dim_1,4 --input rate"
    assert options in error.value.remedy


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["x:float32:a,past", "mask:float32:b,past+1"], "N is one size in the file, and gets "),
        (["x:float32:a,b", "mask:float32:a,past+1"], r"past\+1 of 'mask' is then b\+1"),
        (["x:float32:a,4", "mask:float32:a,7"], r"past\+1 of 'mask' is then 5"),
    ],
)
def test_input_may_not_contradict_names_of_a_file(tmp_path: Path, given: list[str], words: str) -> None:
    inputs = {"x": ["N", "past"], "mask": ["N", "past + 1"]}
    path = save_graph(tmp_path / "m.onnx", inputs, {"yx": ["N", "past"]})
    with pytest.raises(SignatureError, match=words):
        write(path, *given)


def test_a_model_that_refuses_drawn_feeds_keeps_the_names_of_its_outputs_with_a_note(tmp_path: Path) -> None:
    path = save_graph(tmp_path / "m.onnx", {"x": ["n", 3], "z": [2, 3]}, {"yx": ["", ""]})
    model = onnx.load(path)
    model.graph.node[0].input[1] = "z"  # which 8 rows cannot be added to
    onnx.save(model, path)
    (note,) = dimensions.name_outputs(path, {"n": 8}, draw(path))
    assert "is read as the batch: the model refuses samples drawn at n 8, or half of one; --shape" in note
    assert model_file.signature(path).outputs[0].shape == ("output_0_dim_0", "output_0_dim_1")


@pytest.mark.parametrize(
    ("inputs", "sizes"),
    [
        (["x:float32:batch,3,height,width"], [8, 128, 128]),
        (["x:uint8:batch,height,width,1"], [8, 128, 128]),
        (["x:float32:n,3,48,width"], [8, 128]),
        (["x:float32:batch,4,height,width"], [8, 8, 8]),
        (["x:float32:batch,3,length"], [8, 8]),
        (["x:float32:batch,3,height,width", "state:float32:2,batch,8"], [8, 128, 128]),
        (["ids:int64:batch,length", "mask:float32:batch,1,length,total"], [8, 8, 8]),  # of attention
        (["ids:int64:batch,1", "mask:int64:batch,past+1", "keys:float32:batch,3,past,8"], [8, 8]),
    ],
)
def test_heights_and_widths_of_pictures_are_assumed_larger_than_other_sizes(
    inputs: list[str], sizes: list[int]
) -> None:
    signature = Signature(inputs=tuple(map(TensorSpec.parse, inputs)), outputs=())
    assert [*choose_sizes(signature).values()] == sizes
