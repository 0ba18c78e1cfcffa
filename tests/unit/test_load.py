"""Engines called from Python: what is opened and refused, the forms of calls, many threads, a place among modules."""

import copy
import dataclasses
import gc
import inspect
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper

from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Candidate
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.errors import CallError, FidelityError, ModelError, ShapeError, SignatureError, UsageError
from enginesmith.pipeline.frameworks.fidelity import thresholds_for
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.frameworks.rounding import FINE, Draw, make_records
from enginesmith.pipeline.frameworks.torch.module import describe_structure
from enginesmith.pipeline.frameworks.torch.replacement import Replacement
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import ShapeRange, Signature, TensorSpec
from enginesmith.pipeline.workflows.load import LoadedModel, Stored

Load = Callable[..., LoadedModel]
X = np.arange(12, dtype=np.float32).reshape(3, 4)
SCALE = np.full((3, 1), 2, np.float32)


class Ranged(OnnxRuntime):
    needs_shapes = True


@pytest.fixture
def opened(tmp_path: Path) -> Load:
    """Open a graph of x · scale and its negative, with outputs of these names; ``ranged``: as if built for 1 to 8."""

    def open_graph(*outputs: str, ranged: bool = False, threads: int = 1, returns: Any = None) -> LoadedModel:
        inputs = {"x": ["batch", 4], "scale": ["batch", 1]}
        given = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()]
        made = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in outputs]
        nodes = [helper.make_node("Mul", ["x", "scale"], [outputs[0]])]
        nodes += [helper.make_node("Neg", [outputs[0]], [name]) for name in outputs[1:]]
        graph, path = helper.make_graph(nodes, "tiny", given, made), tmp_path / "model.onnx"
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
        specs = [TensorSpec(name=name, dtype="float32", shape=tuple(shape)) for name, shape in inputs.items()]
        answers = [TensorSpec.parse(f"{name}:float32:batch,4") for name in outputs]
        signature = Signature(inputs=tuple(specs), outputs=tuple(answers))
        artifact = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=signature)
        engine = (Ranged if ranged else OnnxRuntime)(save_optimized=False)
        candidate = Candidate("onnxruntime-fp32", engine, artifact, Device(threads=threads))
        ranges = {"batch": ShapeRange(min=1, opt=3, max=8)}
        return LoadedModel(Stored(candidate, ranges, tmp_path / "vector.npz", thresholds_for("fp32", None), returns))

    return open_graph


@pytest.mark.parametrize("unsigned", [(), ("ids",)])
def test_an_index_outside_of_its_table_is_no_answer(tmp_path: Path, unsigned: tuple[str, ...]) -> None:
    """Engines take negative ones from the end, which a module that looks them up in an embedding refuses."""
    ends = [helper.make_tensor_value_info(*end) for end in (("ids", 7, ["batch", 2]), ("y", 1, ["batch", 2, 3]))]
    table = numpy_helper.from_array(np.arange(12, dtype=np.float32).reshape(4, 3), "table")
    graph = helper.make_graph([helper.make_node("Gather", ["table", "ids"], ["y"])], "g", ends[:1], ends[1:], [table])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    signature = model_file.signature(tmp_path / "m.onnx")
    assert signature.tables == {"ids": 4}
    artifact = Artifact(kind="onnx", path=tmp_path / "m.onnx", sha256="", bytes=0, signature=signature)
    candidate = Candidate("v", OnnxRuntime(save_optimized=False), artifact, Device(threads=1))
    model = LoadedModel(Stored(candidate, {}, None, thresholds_for("fp32", None), None, unsigned))
    if not unsigned:
        assert model(np.array([[3, -4]]))[0, :, 0].tolist() == [9, 0]
        assert model(torch.tensor([[3, -4]]))[0, :, 0].tolist() == [9, 0]
    for ids in ([[0, 4]], [[-5, 0]], *([[[3, -4]], [[-1, 0]]] if unsigned else [])):
        with pytest.raises(SignatureError, match=r"its table has 4 rows"):
            model(np.array(ids))
    assert model(np.array([[1, 2]]))[0, :, 0].tolist() == [3, 6]


@pytest.mark.parametrize(
    ("outputs", "unpack"),
    [
        (("output",), lambda answer: (answer,)),
        (("logits",), lambda answer: (answer,)),
        (("output_0",), lambda answer: answer),
        (("output_0", "output_1"), lambda answer: answer),
        (("y", "z"), lambda answer: (answer["y"], answer["z"])),
    ],
)
def test_a_call_is_answered_in_the_form_and_kind_of_the_module(opened: Load, outputs: Any, unpack: Any) -> None:
    model, tensors = opened(*outputs), (torch.from_numpy(X), torch.from_numpy(SCALE))
    for answer in (model(X, SCALE), model(X, scale=SCALE), model(scale=SCALE, x=X), model(X[::-1][::-1], SCALE)):
        values = unpack(answer)
        assert len(values) == len(outputs)
        assert all(np.array_equal(value, sign * X * 2) for value, sign in zip(values, (1, -1), strict=False))
    parameter = torch.nn.Parameter(tensors[0])
    with torch.inference_mode():
        given = unpack(model(parameter, tensors[1]))[0]
    assert torch.equal(given, tensors[0] * 2)
    assert torch.equal(unpack(model(*tensors))[0], tensors[0] * 2)


_SPARSE = r"\n.*give dense tensors of the model's dtypes: x in float32, scale in float32"


@pytest.mark.parametrize(
    ("values", "error", "words"),
    [
        ((X,), SignatureError, "x, scale; it was called without scale"),
        ((X, SCALE, X), SignatureError, "x, scale; it was called with 3 in order"),
        ((X, SCALE.astype(np.float64)), SignatureError, r"float64\[3, 1\]"),
        ((X[:, :3], SCALE), ShapeError, r"float32\[3, 3\]"),
        ((X, SCALE[:2]), ShapeError, "batch = 3"),
        ((X[:0], SCALE[:0]), ShapeError, "batch is 0 in x"),
        ((np.tile(X, (3, 1)), np.tile(SCALE, (3, 1))), ShapeError, "batch is 9, .* is built for 1 to 8"),
        ((X, [[2.0]]), SignatureError, "ndarray, list"),
        (({"x": X, "scale": SCALE},), SignatureError, r"with a mapping\n.*unpack the mapping: model\(\*\*inputs\)"),
        ((torch.from_numpy(X), SCALE), SignatureError, "Tensor, ndarray"),
        ((torch.from_numpy(X).to_sparse(), torch.from_numpy(SCALE)), SignatureError, _SPARSE),
        ((torch.nn.Parameter(torch.from_numpy(X)), torch.from_numpy(SCALE)), UsageError, "gradients"),
    ],
)
def test_what_does_not_fit_is_refused(opened: Load, values: Any, error: type[Exception], words: str) -> None:
    with opened("y", ranged=True) as model:
        for _ in range(2):  # what was refused once is not taken for known
            with pytest.raises(error, match=words):
                model(*values)
        assert np.array_equal(model(X, SCALE), X * 2)


def test_the_first_size_that_was_not_verified_is_answered_with_a_warning(opened: Load) -> None:
    x, scale = np.ones((9, 4), np.float32), np.ones((9, 1), np.float32)
    with opened("y") as model:
        told = "batch is 9, and onnxruntime-fp32 was verified for 1 to 8: nobody"
        with pytest.warns(UserWarning, match=told) as warned:
            assert np.array_equal(model(x, scale), x)
        assert warned[0].filename == __file__
        assert model(x[:8], scale[:8]).shape == (8, 4)
        assert model(np.repeat(x, 2, 0), np.repeat(scale, 2, 0)).shape == (18, 4)


def test_a_size_that_was_not_verified_and_that_the_engine_fails_at_does_not_fit(tmp_path: Path) -> None:
    """A table of four positions; what fails at sizes that were verified is no error of the caller's."""
    ends = [helper.make_tensor_value_info(name, 1, ["batch", "length", 3]) for name in "xy"]
    weights = numpy_helper.from_array(np.zeros((4, 3), np.float32), "table")
    nodes = [
        helper.make_node("Shape", ["x"], ["length"], start=1, end=2),
        helper.make_node("Squeeze", ["length"], ["most"]),
        helper.make_node("Range", ["first", "most", "step"], ["places"]),
        helper.make_node("Gather", ["table", "places"], ["added"]),
        helper.make_node("Add", ["x", "added"], ["y"]),
    ]
    numbers = [numpy_helper.from_array(np.int64(value), name) for name, value in (("first", 0), ("step", 1))]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [weights, *numbers])
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    artifact = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    candidate = Candidate("v", OnnxRuntime(save_optimized=False), artifact, Device(threads=1))

    def open_for(longest: int) -> LoadedModel:
        ranges = {"length": ShapeRange(min=1, opt=2, max=longest)}
        return LoadedModel(Stored(candidate, ranges, None, thresholds_for("fp32", None), None))

    model, x = open_for(3), np.ones((2, 5, 3), np.float32)
    with pytest.warns(UserWarning, match="length is 4, and v was verified for 1 to 3"):
        assert model(x[:, :4]).shape == (2, 4, 3)
    for _ in range(2):
        with pytest.raises(ShapeError, match="length is 5, and v was verified for 1 to 3, and fails there") as error:
            model(x)
        assert error.value.remedy == "optimize with --shape length=MIN:OPT:MAX that includes 5"
    option = "give some, or, if the model takes none, optimize with --shape length=0:2:3"
    for empty, word, remedy in ((x[:0, :2], "batch", "give some rows"), (x[:, :0], "length", option)):
        with pytest.raises(ShapeError, match=f"{word} is 0 in x") as error:
            model(empty)
        assert error.value.remedy == remedy
    with pytest.raises(ModelError, match="failed on this input"):
        open_for(8)(x)


@pytest.mark.parametrize("most", [0, 3])
def test_threads_share_a_model_until_it_is_closed(opened: Load, monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """For engines whose session serves one call at a time, there are so many sessions at most, and all are closed."""
    model = opened("y")
    pool, ones = model._pool, np.ones((4, 1), np.float32)
    if most:
        model._answer, pool._more = pool.answer, most - 1

    def call(index: int) -> bool:
        feed = np.full((1 + index % 4, 4), index, np.float32)
        return bool(np.array_equal(model(feed, ones[: len(feed)]), feed))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(call, range(800)))
    every = [pool._free.get() for _ in range(pool._free.qsize())]
    assert 1 <= len(every) <= max(most, 1)
    for session in every:
        pool._free.put(session)
    if most:  # a call that has begun is answered
        first = every[0]
        assert first is not None
        answer = first.answer
        monkeypatch.setattr(first, "answer", lambda values: (model.close(), answer(values))[1])
        assert call(3)
    model.close()
    model.close()
    with pytest.raises(UsageError, match="closed"):
        call(0)
    assert all(closed._session is None for closed in every)  # type: ignore[attr-defined]


def test_a_module_falls_back_for_shapes_alone(opened: Load) -> None:
    class Original(torch.nn.Module):
        def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return x + scale

    model, x = opened("y", ranged=True), torch.ones(9, 4)
    net = torch.nn.Sequential(model.as_module(Original()))[0]
    assert torch.equal(net(x[:2], x[:2, :1] * 3), x[:2] * 3)
    assert (net.fallbacks, net.training) == (0, False)
    with pytest.warns(UserWarning, match="batch is 9"):
        assert torch.equal(net(x, scale=x[:, :1]), x + 1)
    net(x, x[:, :1])  # warns no more
    assert net.fallbacks == 2
    head = torch.nn.Linear(4, 1)
    head(net(x, x[:, :1])).sum().backward()  # what is behind it can be trained
    assert head.weight.grad is not None
    with pytest.raises(SignatureError, match="float64"):
        net(x[:2].double(), x[:2, :1])
    with pytest.raises(ShapeError, match="batch is 9"):
        model.as_module()(x, x[:, :1])


def test_a_module_stays_as_it_is_built_and_looks_up_the_rest_in_the_original(opened: Load) -> None:
    original = torch.nn.Linear(4, 4)
    original.config = "of the original"  # type: ignore[assignment]
    module = opened("y").as_module(original)
    net = torch.nn.Sequential(module, torch.nn.Dropout()).train()
    assert net[1].training
    assert not module.training
    assert not original.training
    assert module.config == "of the original"
    assert net.to("cpu").float() is net
    for change in (lambda: net.half(), lambda: net.to("meta")):
        with pytest.raises(UsageError, match="an engine stays on cpu"):
            change()
    assert original.weight.dtype == torch.float32

    def fail(place: torch.Tensor) -> torch.Tensor:  # as torch does where it is built without CUDA
        raise AssertionError("Torch not compiled with CUDA enabled")

    with pytest.raises(UsageError, match="an engine stays on cpu"):
        module._apply(fail)
    with pytest.raises(AttributeError, match=r"no attribute 'config': give the module .* as_module\(original\)"):
        _ = opened("y").as_module().config


class Encoder(torch.nn.Module):
    """Take its inputs in another order than the engine's, and switches as modules of transformers do."""

    def forward(
        self, scale: torch.Tensor, x: torch.Tensor | None = None, double: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        assert x is not None
        return x * scale * (2 if double else 1)

    def generate(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Call this module, as such methods do."""
        return torch.as_tensor(self(scale, x) + 1)

    def name(self) -> str:
        return "encoder"


@pytest.mark.parametrize(
    ("original", "shown"), [(Encoder(), ["scale", "x", "double", "kwargs"]), (None, ["x", "scale", "kwargs"])]
)
def test_a_module_and_its_copy_show_the_parameters_of_the_original(
    original: torch.nn.Module | None, shown: list[str]
) -> None:
    module = Replacement(lambda x, scale: x * scale, original, inputs=("x", "scale"))
    copied = copy.deepcopy(module)
    assert [list(inspect.signature(each.forward).parameters) for each in (module, copied)] == [shown, shown]
    del module
    assert copied(torch.tensor(2.0), torch.tensor(3.0)) == 6


def test_a_module_is_called_as_the_original_is(opened: Load) -> None:
    net, x, scale = opened("y").as_module(Encoder()), torch.ones(2, 4), torch.full((2, 1), 3.0)
    for answer in (
        net(scale, x),
        net(scale, x, False),
        net(x=x, scale=scale, double=False, output_attentions=False, use_cache=None),
    ):
        assert torch.equal(answer, x * 3)
    assert net.fallbacks == 0


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ({"double": True}, "with double=True, which is none of them"),
        ({"return_dict": True}, "with return_dict=True, which"),
        ({"output_attentions": True}, "with output_attentions=True, which"),
        ({"mask": None, "normalize": False}, "with normalize=False, which"),
    ],
)
def test_what_is_not_in_the_engine_is_asked_of_the_original(opened: Load, named: dict[str, Any], words: str) -> None:
    model, x, scale = opened("y"), torch.ones(2, 4), torch.full((2, 1), 3.0)
    net = model.as_module(Encoder())
    with pytest.warns(UserWarning, match=words):
        assert torch.equal(net(scale, x, **named), x * (6 if "double" in named else 3))
    assert net.fallbacks == 1
    with pytest.raises(CallError, match=words):
        model.as_module()(x, scale, **named)


def test_an_argument_that_the_engine_has_is_taken_and_another_value_is_asked_of_the_original(opened: Load) -> None:
    model, x, scale = opened("y"), torch.ones(2, 4), torch.full((2, 1), 3.0)
    model._stored = dataclasses.replace(model._stored, constants={"double": True, "rows": None})
    assert torch.equal(model(x, scale=scale, double=True), x * 3)
    net = model.as_module(Encoder())
    for answer in (
        net(scale, x, True),
        net(scale, x, double=True, rows=None),
        model.as_module()(x, scale, double=True),
    ):
        assert torch.equal(answer, x * 3)
    assert net.fallbacks == 0
    with pytest.warns(
        UserWarning, match="double is left out, and the engine computes what the module does with double=T"
    ):
        assert torch.equal(net(scale, x), x * 3)
    assert net.fallbacks == 1
    assert torch.equal(net(scale, x, False), x * 3)
    assert net.fallbacks == 2
    for double in (False, 1):
        with pytest.raises(
            CallError, match=f"with double={double}, which is none of them, where the engine has double=T"
        ):
            model(x, scale=scale, double=double)


def test_none_in_the_place_of_a_default_is_asked_of_the_original(opened: Load) -> None:
    net, x, scale = opened("y").as_module(Encoder()), torch.ones(2, 4), torch.full((2, 1), 3.0)
    with pytest.warns(UserWarning, match="double is None, and the engine computes what the module does without double"):
        assert torch.equal(net(scale, x, None), x * 3)
    net(scale, x, double=None)
    assert net.fallbacks == 2
    net(scale, x, other=None)  # among keywords of any name
    assert net.fallbacks == 2


def test_what_is_no_input_may_be_given_as_none(opened: Load) -> None:
    assert np.array_equal(opened("y")(X, SCALE, mask=None), X * 2)


def test_an_input_that_is_missing_is_not_made_up(opened: Load) -> None:
    with pytest.raises(CallError, match="it was called without scale"):
        opened("y").as_module()(x=torch.ones(2, 4))
    for model in (opened("y").as_module(), opened("y")):
        for call in (lambda x, model=model: model(x, None), lambda x, model=model: model(x=x, scale=None)):
            with pytest.raises(CallError, match="it was called without scale"):
                call(torch.ones(2, 4))
    with pytest.warns(UserWarning, match="it was called without x"), pytest.raises(AssertionError):
        opened("y").as_module(Encoder())(torch.ones(2, 1))
    net = opened("y").as_module(Encoder())
    with pytest.warns(UserWarning, match="it was called without x"), pytest.raises(AssertionError):
        net(torch.ones(2, 1), x=None)
    assert net.fallbacks == 1


def test_outputs_by_name_are_what_transformers_asks_for(opened: Load) -> None:
    named = opened("y", returns={"last_hidden_state": "y"}).as_module()
    x, scale = torch.ones(2, 4), torch.full((2, 1), 3.0)
    assert torch.equal(named(x=x, scale=scale, return_dict=True).last_hidden_state, x * 3)
    with pytest.raises(CallError, match="return_dict=False"):
        named(x=x, scale=scale, return_dict=False)


def test_methods_of_the_original_that_run_it_are_counted(opened: Load) -> None:
    net, x, scale = opened("y").as_module(Encoder()), torch.ones(2, 4), torch.full((2, 1), 3.0)
    assert net.name() == "encoder"
    assert net.fallbacks == 0
    with pytest.warns(
        UserWarning, match=r"generate\(\) is a method of the original module and runs that, not the engine"
    ):
        assert torch.equal(net.generate(x, scale), x * 3 + 1)
    assert net.fallbacks == 1


def test_calls_of_the_original_in_other_threads_are_not_counted(opened: Load) -> None:
    class Slow(Encoder):
        def generate(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            thread = threading.Thread(target=self, args=(scale, x))  # somebody else uses the original meanwhile
            thread.start()
            thread.join()
            return super().generate(x, scale)

    net = opened("y").as_module(Slow())
    with pytest.warns(UserWarning, match="generate"):
        net.generate(torch.ones(2, 4), torch.ones(2, 1))
    assert net.fallbacks == 1


def test_warnings_name_the_line_that_calls_the_module(opened: Load) -> None:
    net, x = torch.nn.Sequential(opened("y", ranged=True).as_module(Encoder())), torch.ones(9, 4)
    with pytest.warns(UserWarning, match="batch is 9") as warned:
        net[0](x[:, :1], x)
    net = torch.nn.Sequential(Replacement(refuse_sizes, torch.nn.Identity(), inputs=("input",)))
    with pytest.warns(UserWarning, match="too large") as nested:
        net(x)
    assert [each.filename for each in (*warned, *nested)] == [__file__] * 2


def refuse_sizes(*arguments: torch.Tensor) -> torch.Tensor:
    raise ShapeError("too large", "give less")


def test_a_call_that_the_original_has_no_parameters_for_is_refused(opened: Load) -> None:
    x, scale = torch.ones(2, 4), torch.full((2, 1), 3.0)
    net = opened("y").as_module(Encoder())
    with pytest.raises(CallError, match=r"parameters are scale, x, double, .* too many positional arguments"):
        net(scale, x, False, 1)
    with pytest.raises(CallError, match="multiple values for argument 'scale'"):
        net(scale, x, False, scale=scale)
    with pytest.raises(CallError, match="missing a required argument: 'scale'"):
        net(x=x)
    with pytest.raises(CallError, match="with 3 in order"):
        opened("y").as_module()(x, scale, scale)
    assert net.fallbacks == 0


def test_what_is_kept_of_a_module_answers_without_it(opened: Load) -> None:
    module = opened("y").as_module(Encoder())
    forward, dropped = module.forward, weakref.ref(module)
    del module
    assert dropped() is None
    assert torch.equal(forward(torch.full((2, 1), 3.0), torch.ones(2, 4)), torch.full((2, 4), 3.0))


STRUCTURE: Any = {"logits": "y", "hidden": ["y", ["z"]], "cache": None}


def test_outputs_have_the_form_that_was_recorded(opened: Load) -> None:
    model = opened("y", "z", returns=STRUCTURE)
    outputs = model(X, SCALE)
    for logits in (outputs.logits, outputs["logits"], outputs[0], outputs.to_tuple()[0], *outputs[:1]):
        assert np.array_equal(logits, X * 2)
    assert np.array_equal(outputs.hidden[1][0], X * -2)
    assert list(outputs) == ["logits", "hidden"]
    assert outputs.cache is outputs["cache"] is None
    with pytest.raises(AttributeError, match="logits, hidden, and none is called 'other'"):
        _ = outputs.other
    with pytest.raises(KeyError):
        outputs["other"]
    again = pickle.loads(pickle.dumps(outputs))
    assert again.cache is None
    assert np.array_equal(again.logits, X * 2)
    assert isinstance(model(torch.from_numpy(X), torch.from_numpy(SCALE)).hidden[1][0], torch.Tensor)


def test_a_named_tuple_can_be_unpacked(opened: Load) -> None:
    outputs = opened("y", "z", returns={"namedtuple": "Point", "fields": {"x": "y", "y": ["z", None]}})(X, SCALE)
    point, (other, nothing) = outputs
    assert isinstance(outputs, tuple)
    assert np.array_equal(point, X * 2)
    assert np.array_equal(other, X * -2)
    assert (type(outputs).__name__, outputs.x is point, nothing) == ("Point", True, None)


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Answer(dict[str, Any]):
    """Stand for transformers' outputs: a data class whose items are the fields that are not None."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self["logits"] = self.logits


@pytest.mark.parametrize(
    ("make", "structure"),
    [
        (lambda a, b: a, "a"),
        (lambda a, b: [a, (b,)], ["a", ["b"]]),
        (Point, {"namedtuple": "Point", "fields": {"x": "a", "y": "b"}}),
        (
            lambda a, b: {"first": a, "more": {"b": b}, "cache": object()},
            {"first": "a", "more": {"b": "b"}, "cache": None},
        ),
        (lambda a, b: Answer(b), {"logits": "b", "loss": None}),
    ],
)
def test_the_form_of_outputs_is_described_by_name(make: Any, structure: Any) -> None:
    tensors = torch.zeros(1), torch.ones(1)
    assert describe_structure(make(*tensors), {id(tensors[0]): "a", id(tensors[1]): "b"}) == structure


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_is_told_to_load_again(opened: Load, tmp_path: Path) -> None:
    model, told = opened("y"), tmp_path / "told"
    if (child := os.fork()) == 0:
        try:
            model(X, SCALE)
        except UsageError as error:
            told.write_text(str(error))
        model.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert "load it in each worker" in told.read_text()
    assert np.array_equal(model(X, SCALE), X * 2)


def test_a_model_that_nobody_uses_is_freed_with_its_threads(opened: Load) -> None:
    tasks = Path("/proc/self/task")
    opened("y", threads=1)(X, SCALE)
    before = len(list(tasks.iterdir()))
    model = opened("y", threads=3)
    model(X, SCALE)
    assert len(list(tasks.iterdir())) == before + 2
    del model
    gc.collect()
    assert len(list(tasks.iterdir())) == before


def test_a_wrong_answer_to_the_test_vector_is_told(opened: Load, tmp_path: Path) -> None:
    np.savez(tmp_path / "vector.npz", **{"input:x": X, "input:scale": SCALE, "output:y": X})
    with pytest.raises(FidelityError, match="does not answer its test vector: output 'y'"):
        opened("y").check()
    records = make_records(X, [Draw(FINE, np.arange(X.size), 2 * X.reshape(-1))])
    np.savez(tmp_path / "vector.npz", **{"input:x": X, "input:scale": SCALE, "output:y": X, "unstable:y": records})
    assert opened("y").check().passed, "rounding decides it"
    marks = np.full(X.shape, FINE, np.uint8)
    np.savez(tmp_path / "vector.npz", **{"input:x": X, "input:scale": SCALE, "output:y": X, "unstable:y": marks})
    with pytest.raises(UsageError, match=r"vector\.npz is of an earlier version: .* in the output 'y'"):
        opened("y").check()


def test_tensors_in_bfloat16_are_fed_in_float32_which_holds_them(opened: Load) -> None:
    with opened("y") as model:
        answer = model(torch.from_numpy(X).bfloat16(), torch.from_numpy(SCALE))
    assert np.array_equal(answer, X * 2)


def test_a_test_vector_that_is_gone_and_an_original_that_is_no_module_are_told(opened: Load, tmp_path: Path) -> None:
    model = opened("y")
    model._stored = dataclasses.replace(model._stored, vector=tmp_path / "gone.npz")
    with pytest.raises(ModelError, match=r"gone\.npz is not there"):
        model.check()
    with pytest.raises(UsageError, match=r"eager: must be a torch module \(given: 3\)"):
        model.as_module(3)  # type: ignore[arg-type]


def test_a_module_of_an_engine_is_pickled_and_not_compiled_again() -> None:
    module = Replacement(len)
    again = pickle.loads(pickle.dumps(module))
    seen: list[Any] = []
    backend = lambda graph, inputs: (seen.append(graph), graph.forward)[1]  # noqa: E731
    compiled = torch.compile(torch.nn.Sequential(Replacement(torch.sin), torch.nn.Tanh()), backend=backend)
    x = torch.ones(3)
    assert torch.equal(compiled(x), x.sin().tanh())
    assert again("four") == 4
    calls = [node.target for graph in seen for node in graph.graph.nodes if node.op == "call_function"]
    assert torch.sin not in calls
