"""What `prosecute` is asked for: options that have no meaning, times, and the precision of a file."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from click.testing import CliRunner, Result
from onnx import TensorProto, helper, numpy_helper

from enginesmith import cli
from enginesmith.pipeline.passes.quantize.precisions import KINDS
from enginesmith.pipeline.planning.prosecution import PROSECUTE
from enginesmith.pipeline.planning.single_stages import prosecute_file_steps
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.tasks.prosecute import Prosecute


def run(*words: object) -> Result:
    return CliRunner().invoke(cli.main, ["prosecute", *map(str, words)])


@pytest.mark.parametrize(
    ("words", "flags", "omit"),
    [
        (("--input", "x:float32:batch,3"), "--input", "omit it"),
        (("--as", "int8", "--batch", "1,3", "--seed", "0"), "--as, --batch, --seed", "omit them"),
        (("--eval", "digits", "--threads", "2"), "--eval, --threads", "omit them"),
        (("--prepend", "nhwc", "--allow-pickle"), "--prepend, --allow-pickle", "omit them"),
    ],
)
def test_options_that_a_run_has_itself_are_refused(
    tmp_path: Path, words: tuple[str, ...], flags: str, omit: str
) -> None:
    (tmp_path / "run.json").write_text("{}")
    refused = run(tmp_path, "onnxruntime-fp32", *words)
    assert refused.exit_code == 2
    for flag in flags.split(", "):
        assert flag in refused.output.partition("cannot be given with a run")[0]
    assert f"{omit}; or give the model and a file" in refused.output


def test_times_are_refused_as_optimize_refuses_them() -> None:
    for time in ("0", "0s"):
        commands = (["prosecute", "digits", "m.onnx", "--time", time], ["optimize", "digits", "--prosecute", time])
        for words in commands:
            refused = CliRunner().invoke(cli.main, words)
            assert refused.exit_code == 2
            assert f"{words[-2]}: must be greater than 0 (given: '{time}')" in refused.output


@pytest.mark.parametrize("word", ["int4", "tf32", "float16"])
def test_a_precision_of_no_variant_is_refused_with_the_list(word: str) -> None:
    refused = run("no-such-model", "no-such-file.onnx", "--as", word)
    assert refused.exit_code == 2
    assert f"{word!r} is not one of {', '.join(map(repr, KINDS))}" in " ".join(refused.output.split())


def planned(file: Path, precision: str | None = None) -> Prosecute:
    steps = prosecute_file_steps(resolve_recipe(make({"model": "digits"})), str(file), precision, 1.0)
    task = next(step.task for step in steps if step.id == PROSECUTE)
    assert isinstance(task, Prosecute)
    return task


@pytest.mark.parametrize(
    ("precision", "threshold", "apart"),
    [("int4-weights", "int4", True), ("int8+fp16", "int8", True), ("int8-dynamic", "int8", False)],
)
def test_a_file_is_judged_by_the_precision_that_is_named(
    tmp_path: Path, precision: str, threshold: str, apart: bool
) -> None:
    (tmp_path / "m.onnx").touch()
    task = planned(tmp_path / "m.onnx", precision)
    assert (task.precision, task.graphs[0].precision, task.rows_apart) == (threshold, threshold, apart)


@pytest.mark.parametrize(
    ("dtype", "operators", "threshold", "apart"),
    [
        ("float16", (), "fp16", True),
        ("int4", ("DequantizeLinear",), "int4", True),
        ("float8e4m3fn", ("DequantizeLinear",), "fp8", True),
        ("int8", ("DynamicQuantizeLinear",), "int8", False),
    ],
)
def test_a_file_is_judged_by_its_own_precision(
    tmp_path: Path, dtype: str, operators: tuple[str, ...], threshold: str, apart: bool
) -> None:
    weight = TensorProto(name="w", dims=[64], data_type=getattr(TensorProto, dtype.upper()), raw_data=bytes(64))
    rest = numpy_helper.from_array(np.ones(8, np.float16), "b")
    value = helper.make_tensor_value_info("x", TensorProto.FLOAT, [1])
    nodes = [helper.make_node(name, ["x", "s"], ["y"]) for name in operators]
    onnx.save(helper.make_model(helper.make_graph(nodes, "g", [value], [value], [weight, rest])), tmp_path / "m.onnx")
    task = planned(tmp_path / "m.onnx")
    assert (task.precision, task.rows_apart) == (threshold, apart)
