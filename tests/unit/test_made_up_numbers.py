"""Test whole numbers that are made up: indices of tables, lengths, and quantities."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from enginesmith.calibration.options import DataOptions
from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.onnxruntime.engine import OnnxRuntime
from enginesmith.pipeline.errors import ModelError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.tasks import examples
from enginesmith.pipeline.tasks.calibrate import Feeder
from enginesmith.pipeline.tasks.examples import make_example
from enginesmith.pipeline.tasks.verify import Sample
from enginesmith.pipeline.tensors import Feeds, ShapeRange, Signature, TensorSpec


def signature(*inputs: str) -> Signature:
    return Signature(inputs=tuple(TensorSpec.parse(text) for text in inputs), outputs=())


@pytest.mark.parametrize(
    ("nodes", "most"),
    [
        ([("Gather", "table ids", "y")], 7),
        ([("Cast", "ids", "a"), ("Unsqueeze", "a axes", "b"), ("Gather", "table b", "y")], 7),
        ([("DequantizeLinear", "small scale", "a"), ("Gather", "a ids", "y"), ("Gather", "table ids", "z")], 5),
        ([("Add", "ids axes", "a"), ("Gather", "table a", "y")], 1),  # a place behind an offset
        ([("Gather", "ids axes", "y")], 1),
    ],
)
def test_made_up_indices_are_of_all_rows_of_their_table(
    tmp_path: Path, nodes: list[tuple[str, str, str]], most: int
) -> None:
    """Else all answers of a sentence encoder would be those of two tokens."""
    ends = [helper.make_tensor_value_info(*end) for end in (("ids", 7, ["batch", 64]), ("y", 1, ["batch", "n", 3]))]
    tables = {"table": np.zeros((8, 3), np.float32), "small": np.zeros((6, 3), np.int8), "scale": np.float32(1)}
    stored = {**tables, "axes": np.array([1])}
    made = [
        helper.make_node(operator, read.split(), [output], **({"to": 6} if operator == "Cast" else {}))
        for operator, read, output in nodes
    ]
    weights = [numpy_helper.from_array(np.asarray(value), name) for name, value in stored.items()]
    path = tmp_path / "model.onnx"
    graph = helper.make_graph(made, "g", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    given = model_file.signature(path)
    assert given.tables == ({"ids": most + 1} if most > 1 else {})
    feeds, _ = make_example(Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=given))
    assert (feeds["ids"].min(), feeds["ids"].max()) == (0, most)


def test_whole_numbers_that_are_called_lengths_are_1() -> None:
    """No larger than the smallest size of a dimension, and not 0. Masks, and numbers for each place, are none."""
    words = ("input_lengths:int64:batch", "ids:int64:batch,n", "seq_lens:int32:batch,1", "length_ids:int64:batch")
    words += ("length_mask:int64:batch,n",)
    specs = tuple(map(TensorSpec.parse, words))
    made = Signature(inputs=specs, outputs=specs[:1], tables={"length_ids": 1})
    drawn = examples.draw_feeds(made, {"batch": 64, "n": 2})
    assert [sorted(set(drawn[spec.name].flat)) for spec in specs] == [[1], [0, 1], [1], [0], [0, 1]]


@pytest.mark.parametrize(
    ("inputs", "most", "expected"),
    [
        ("x:float32:batch,10,8 lengths:int64:batch", 10, [8, 7, 6, 5, 4, 3, 2, 1]),
        ("x:float32:batch,time,1 lengths:int32:batch,1", 3, [3, 3, 3, 2, 2, 2, 1, 1]),
        ("x:float32:time,batch,64 y:float32:batch,50 lengths:int64:batch", 3, [3, 3, 3, 2, 2, 2, 1, 1]),
        ("x:float32:batch,10,8 lengths:int64:batch", 5, [4, 4, 3, 3, 2, 2, 1, 1]),
        ("x:float32:batch,10,8 lengths:int64:batch", 1, [1] * 8),
        ("x:float32:batch,1 z:float32:4,8 lengths:int64:batch", 8, [1] * 8),
        ("x:float32:4,10 lengths:int64:4", 10, [10, 8, 5, 3]),
    ],
)
def test_lengths_differ_up_to_what_they_may_count_and_the_model_takes(
    inputs: str, most: int, expected: list[int]
) -> None:
    """They fit the smallest sizes, too; a model that takes none but 1 is verified at 1."""
    specs = tuple(map(TensorSpec.parse, inputs.split()))
    made = Signature(inputs=specs, outputs=specs[:1])

    def run(feeds: Feeds) -> Feeds:
        if feeds["lengths"].max() > most:
            raise ModelError("too long")
        return {}

    ranges = {"time": ShapeRange(min=3, opt=40, max=40), "batch": ShapeRange(min=1, opt=1, max=64)}
    ranges = {name: range_ for name, range_ in ranges.items() if name in made.symbols}
    sizes = {name: 8 if name == "batch" else 40 for name in made.symbols}
    session: Any = SimpleNamespace(signature=made, run=run)
    cases = samples.plan_cases(made, ranges, (1, 64))
    drawn = examples.vary_lengths(session, cases, examples.draw_feeds(made, sizes), ranges, seed=0)
    assert drawn["lengths"].reshape(-1).tolist() == expected
    assert drawn["lengths"].dtype == specs[-1].dtype
    own = {**drawn, "lengths": drawn["lengths"] + 1}
    assert examples.vary_lengths(session, cases, own, ranges, seed=0)["lengths"] is own["lengths"], "an example's own"


@pytest.mark.parametrize("name", ["len", "x_len", "seqLen", "kvlen", "n_frames", "seqlens_k", "LEN"])
def test_a_length_is_known_by_the_words_of_its_name(name: str) -> None:
    assert TensorSpec.parse(f"{name}:int64:batch").is_length
    assert not TensorSpec.parse(f"{name}:int64:batch,n").is_length


@pytest.mark.parametrize("name", ["lenient_rank", "valence", "silent", "frames", "kvlenient"])
def test_a_part_of_another_word_makes_no_length(name: str) -> None:
    assert not TensorSpec.parse(f"{name}:int64:batch").is_length


LENGTHS = {
    "read by a GRU": "c = Cast <to = 6> (n) y, h = GRU <hidden_size = 2> (x, w, r, , c)",
    "read in a branch": "y = If (true) <then_branch = t () => (float[batch, d, 1, e] y) "
    "{ c = Cast <to = 6> (n) y, h = GRU <hidden_size = 2> (x, w, r, , c) }, "
    "else_branch = e () => (float[batch, d, 1, e] y) { y = Unsqueeze(x, one) }>",
    "read by Attention": "y = Attention <q_num_heads = 1, kv_num_heads = 1> (x, x, x, , , , n)",
    "compared with a Range": "s = Shape(x) d = Size(s) g = Range(zero, d, step) a = Unsqueeze(n, one) b = Div(a, one) "
    "y = Less(g, b)",
    "compared with a number": "y = Less(n, one)",
    "added": "y = Add(n, one)",
}


@pytest.mark.parametrize(
    ("use", "is_length"), [(use, use not in ("compared with a number", "added")) for use in LENGTHS]
)
def test_lengths_are_known_by_their_use_in_a_file(tmp_path: Path, use: str, is_length: bool) -> None:
    """Whatever they are called, and not what is merely compared or added."""
    constants = "<float[1, 6, 4] w, float[1, 6, 2] r, bool true = {1}, int64[1] one = {1}, int64 zero = {0}, "
    constants += "int64 step = {1}>"
    text = f"net (float[batch, d, 4] x, int64[batch] n) => (float[batch, e] y) {constants} {{ {LENGTHS[use]} }}"
    graph = onnx.parser.parse_graph(text)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)]), tmp_path / "model.onnx")
    made = model_file.signature(tmp_path / "model.onnx")
    assert made.lengths == (("n",) if is_length else ())
    assert set(examples.draw_feeds(made, {"batch": 64, "d": 4})["n"]) == ({1} if is_length else {0, 1})


def test_lengths_of_any_name_vary_in_made_up_samples_and_0_and_1_alone_are_noted(tmp_path: Path) -> None:
    text = "net (float[batch, 6, 3] x, int64[batch] n, int64[batch] kind, int64[batch, 4] keep_mask)"
    text += " => (float[batch, 6, 3] y)"
    body = "a = Unsqueeze(n, one) m = Less(places, a) f = Cast <to = 1> (m) u = Unsqueeze(f, last) z = Mul(x, u)"
    body += " k = Cast <to = 1> (kind) q = Unsqueeze(k, both) v = Mul(z, q) c = Cast <to = 1> (keep_mask)"
    body += " s = ReduceSum(c, one) w = Unsqueeze(s, last) y = Add(v, w)"
    constants = "int64[1] one = {1}, int64[1] last = {2}, int64[2] both = {1, 2}, int64 zero = {0}, int64 six = {6}"
    graph = onnx.parser.parse_graph(
        f"{text} <{constants}, int64 step = {{1}}> {{ places = Range(zero, six, step) {body} }}"
    )
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    model = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    (reference := tmp_path / "reference").mkdir()
    sample = Sample(engine=OnnxRuntime(), ranges={}, batches=(1, 8), data=None, data_options=DataOptions(), seed=0)
    (note,) = sample.run({"model": model}, reference, lambda _: None).notes
    assert re.match("the samples are made up, and 'kind' has only 0 and 1 in them: .* --eval DATA$", note)
    assert samples.read_arrays(reference, "feeds", 1)["n"].max() == 3


def test_a_step_is_verified_and_calibrated_on_all_rows_of_its_table(tmp_path: Path) -> None:
    text = "net (int64[batch, 1] ids, float[batch, 3] x) => (float[batch, 3] y)"
    graph = onnx.parser.parse_graph(
        f"{text} <int64[1] one = {{1}}> {{ r = Gather(t, ids) s = Squeeze(r, one) y = Add(s, x) }}"
    )
    graph.initializer.append(numpy_helper.from_array(np.arange(300, dtype=np.float32).reshape(100, 3), "t"))
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    model = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    found = []
    for name in ("reference", "again"):
        (folder := tmp_path / name).mkdir()
        sample = Sample(engine=OnnxRuntime(), ranges={}, batches=(1, 64), data=None, data_options=DataOptions(), seed=0)
        effect = sample.run({"model": model}, folder, lambda _: None)
        reference = Artifact(kind="reference", path=folder / effect.file, sha256="", bytes=0)
        feeding, _ = Feeder(data=None, samples=64, seed=0).open(model, reference)
        found.append(
            (samples.read_arrays(folder, "feeds", 1)["ids"], np.concatenate([feeds["ids"] for feeds in feeding]))
        )
    assert all(len(set(ids.flat)) > 30 for ids in found[0])
    assert all((ids == other).all() for ids, other in zip(*found, strict=True))


def test_made_up_numbers_that_are_the_same_in_all_samples_are_noted(tmp_path: Path) -> None:
    text = "net (float[batch, 6] x, int64[batch] lengths, int64 rate) => (float[batch, 6] y)"
    body = "c = Unsqueeze(lengths, one) r = Mul(c, rate) f = Cast <to = 1> (r) y = Add(x, f)"
    graph = onnx.parser.parse_graph(f"{text} <int64[1] one = {{1}}> {{ {body} }}")
    path = tmp_path / "model.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    model = Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))
    (reference := tmp_path / "reference").mkdir()
    sample = Sample(engine=OnnxRuntime(), ranges={}, batches=(1, 8), data=None, data_options=DataOptions(), seed=0)
    (note,) = sample.run({"model": model}, reference, lambda _: None).notes
    assert re.match("the samples are made up, and 'rate' is [01] in all of them: .* --eval DATA$", note)
    lengths = samples.read_arrays(reference, "feeds", 1)["lengths"]
    assert len({*lengths.tolist()}) > 2
    assert lengths.max() > 3


QUANTITIES = """net ({dtype}[batch, 4] {name}) => ({end}[batch, n] y)
<int64[2] sizes = {{-1, 2}}, float[300, 2] table = {{{table}}}, {dtype} two = {{2}}, float one = {{1}}> {{ {body} }}"""


def save_quantities(path: Path, dtype: str, end: str, body: str, name: str = "x") -> Artifact:
    """Save a graph of whole numbers ``x``; it has a ``table`` of 300 rows, ``two``, and floats ``one``."""
    text = QUANTITIES.format(dtype=dtype, end=end, body=body, name=name, table=", ".join(["1"] * 600))
    graph = onnx.parser.parse_graph(text)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), path)
    return Artifact(kind="onnx", path=path, sha256="", bytes=0, signature=model_file.signature(path))


@pytest.mark.parametrize(
    ("dtype", "end", "body", "found"),
    [
        ("uint8", "uint8", 'y = BitShift <direction = "RIGHT"> (x, two)', True),
        ("int32", "int32", "a = Add(x, two) y = Mul(a, x)", True),
        ("int64", "int64", "y = Div(x, two)", True),
        ("int64", "int64", "y = Div(two, x)", False),  # no number is divided by 0 that is not today
        ("uint8", "float", "a = Cast <to = 1> (x) y = Mul(a, one)", True),
        ("int64", "float", "a = Cast <to = 1> (x) y = Sub(one, a)", False),  # as masks are
        ("int64", "float", "b = Mod(x, two) a = Cast <to = 1> (b) y = Sub(one, a)", True),
        ("int64", "bool", "y = Greater(x, two)", False),
        ("int64", "bool", "y = Cast <to = 9> (x)", False),
        ("int64", "float", "a = Mul(x, two) b = Div(a, two) c = Flatten(b) y = Gather(table, c)", False),
        (  # an index that is computed as a float
            *("uint8", "float", "a = Cast <to = 1> (x) b = Sub(a, one) c = Cast <to = 7> (b) y = Gather(table, c)"),
            False,
        ),
        ("uint8", "uint8", "a = Cast <to = 1> (x) b = Mul(a, one) c = Floor(b) y = Cast <to = 2> (c)", True),
        ("int64", "int64", "s = Shape(x) y = Add(x, s)", True),
        ("int64", "float", "y = DequantizeLinear(x, one)", True),
    ],
)
def test_quantities_are_told_from_indices_and_masks(
    tmp_path: Path, dtype: str, end: str, body: str, found: bool
) -> None:
    made = save_quantities(tmp_path / "model.onnx", dtype, end, body)
    assert bool(model_file.list_quantities(made.path, made.model_signature)) == found


@pytest.mark.parametrize("name", ["attention_mask", "has_flags", "keep"])
def test_numbers_that_are_called_masks_are_no_quantities(tmp_path: Path, name: str) -> None:
    body = f'y = BitShift <direction = "RIGHT"> ({name}, two)'
    made = save_quantities(tmp_path / "model.onnx", "uint8", "uint8", body, name)
    assert model_file.list_quantities(made.path, made.model_signature) == ()


@pytest.mark.parametrize(
    ("dtype", "end", "body", "ends", "note"),
    [
        ("uint8", "uint8", "y = Div(x, two)", (0, 255), "'x' has whole numbers from 0 to 255 in them; --eval"),
        ("int8", "int8", "y = Div(x, two)", (-128, 127), "'x' has whole numbers from -128 to 127 in them; --eval"),
        ("int32", "int32", "y = Add(x, two)", (-1000, 1000), "'x' has whole numbers from -1000 to 1000 in"),
        ("uint16", "float", "a = Cast <to = 1> (x) y = Sqrt(a)", (0, 1000), "whole numbers from 0 to 1000 in"),
        (
            "int16",
            "float",
            "a = Cast <to = 1> (x) y = Sqrt(a)",
            (0, 1),
            "only 0 and 1 in them, as the model answers NaN",
        ),
        (
            "int16",
            "float",
            "a = Cast <to = 1> (x) y = Sigmoid(a)",
            (0, 1),
            "only 0 and 1 in them, as the model answers hardly anything but 0 and 1 to",
        ),
    ],
)
def test_quantities_are_large_unless_the_model_refuses_such(
    tmp_path: Path, dtype: str, end: str, body: str, ends: tuple[int, int], note: str
) -> None:
    """Zeros and ones do not tell a quotient that is rounded from one that is cut off."""
    made = save_quantities(tmp_path / "model.onnx", dtype, end, body)
    (reference := tmp_path / "reference").mkdir()
    sample = Sample(engine=OnnxRuntime(), ranges={}, batches=(8, 64), data=None, data_options=DataOptions(), seed=0)
    notes = sample.run({"model": made}, reference, lambda _: None).notes
    assert any(f"the samples are made up, and {each}" in text for each in (note, f"'x' has {note}") for text in notes)
    drawn = samples.read_arrays(reference, "feeds", 1)["x"]
    assert ends[0] <= drawn.min() <= ends[0] * 0.75 + ends[1] * 0.25 <= ends[1] * 0.75 <= drawn.max() <= ends[1]


def test_quantities_are_0_and_1_where_the_model_refuses_large_ones() -> None:
    spec = TensorSpec.parse("x:int32:batch,4")
    made = Signature(inputs=(spec,), outputs=(spec,))

    def run(feeds: Feeds) -> Feeds:
        if feeds["x"].shape[0] == 8 and feeds["x"].max() > 1:
            raise ModelError("there are two places")
        return {}

    session: Any = SimpleNamespace(signature=made, run=run)
    cases = samples.plan_cases(made, {"batch": ShapeRange(min=1, opt=1, max=8)}, (1, 8))
    drawn = examples.draw_feeds(made, {"batch": 8})
    given, (note,) = examples.widen_numbers(session, cases, drawn, ["x"], seed=0)
    assert given["x"] is drawn["x"]
    assert "'x' has only 0 and 1 in them, as the model refuses larger ones (there are two places): other" in note
    own = {"x": drawn["x"] * 7}
    assert examples.widen_numbers(session, cases, own, ["x"], seed=0) == (own, [])


def test_several_refused_quantities_have_a_note_in_the_plural() -> None:
    specs = tuple(TensorSpec.parse(f"{name}:int32:batch,4") for name in "xz")
    made = Signature(inputs=specs, outputs=specs)

    def run(feeds: Feeds) -> Feeds:
        if feeds["x"].max() > 1:
            raise ModelError("too large")
        return {}

    session: Any = SimpleNamespace(signature=made, run=run)
    cases = samples.plan_cases(made, {"batch": ShapeRange(min=1, opt=8, max=8)}, (8,))
    _, (note,) = examples.widen_numbers(session, cases, examples.draw_feeds(made, {"batch": 8}), ["x", "z"], seed=0)
    assert "'x', 'z' have only 0 and 1 in them, as the model refuses larger ones (too large): other numbers" in note
