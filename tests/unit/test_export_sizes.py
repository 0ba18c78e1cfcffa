"""Sizes for which an exported graph holds, and what is said where they are not all that were asked for."""

import dataclasses
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from enginesmith.pipeline.errors import ExportError, ModelError
from enginesmith.pipeline.frameworks.onnx import edit, evaluator, model_file
from enginesmith.pipeline.passes import passes_for
from enginesmith.pipeline.passes.export import agreement, export, sizes
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.tensors import ShapeRange
from exporting import exported, loaded


@pytest.mark.parametrize(("divisor", "factor", "told"), [(4, 2.0, "(length % 4) == 0"), (1, 2.0, ""), (4, 1.0, "")])
def test_sizes_that_a_module_decides_by_are_named(tmp_path: Path, divisor: int, factor: float, told: str) -> None:
    """Unless the answers are the same on both ways."""

    class Module(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x.sum(1) if x.shape[1] % divisor == 0 else factor * x.sum(1)

    model = loaded(Module(), {"x": torch.ones(2, 8)}, {"x": ("batch", "length")}, ["y:float32:batch"])
    notes = exported(tmp_path, model, exporter="dynamo").notes
    words = f"the graph is right only where {told}: with length = 7, the module answers otherwise"
    words += "; or fix the size: --input x:float32:batch,8"
    assert notes == ((words,) if told else ())


@pytest.mark.parametrize("told", [True, False])
def test_a_graph_is_captured_at_another_size_where_that_makes_one_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: bool
) -> None:
    """The path of a length that is no multiple of four holds for multiples, too; that of the example does not.

    So it is where no comparison in the graph tells of it, as in that of a Reformer.
    """
    if not told:
        monkeypatch.setattr(export, "COMPARISONS", ())

    class Blocks(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            length = x.shape[1]
            missing = (4 - length % 4) % 4
            filled = torch.nn.functional.pad(x, (0, missing)) if missing else x
            blocks = filled.reshape(x.shape[0], -1, 4).cumsum(2).reshape(x.shape[0], -1)
            return blocks[:, :length] if missing else blocks

    model = loaded(Blocks(), {"x": torch.randn(2, 8)}, {"x": ("batch", "length")}, ["y:float32:batch,length"])
    assert exported(tmp_path, model, exporter="dynamo").notes == ()
    for length in (1, 7, 8, 9, 14):
        feed = torch.randn(3, length)
        answer = evaluator.run_graph(tmp_path / edit.FILE, {"x": feed.numpy()})
        assert evaluator.largest_difference([model.module(feed)[0].numpy()], answer) < 1e-6


def test_a_size_that_only_the_example_has_is_no_fixed_one(tmp_path: Path) -> None:
    """Positions are made anew for all pictures but those of the size in the configuration."""

    class Positions(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(1, 1, 4, 4))

        def forward(self, x: Any) -> Any:
            height, width = x.shape[2:]
            if height == width and height * width == 16:
                return x + self.table
            return x + torch.nn.functional.interpolate(self.table, size=(height, width), mode="nearest")

    dims = ("batch", 1, "height", "width")
    model = loaded(Positions(), {"x": torch.randn(2, 1, 4, 4)}, {"x": dims}, ["y:float32:batch,1,height,width"])
    effect = exported(tmp_path, model)
    assert (effect.summary.endswith("by the torch.export exporter"), effect.notes) == (True, ())
    for height, width in ((4, 4), (8, 4), (5, 5), (3, 7)):
        feed = torch.randn(3, 1, height, width)
        answer = evaluator.run_graph(tmp_path / edit.FILE, {"x": feed.numpy()})
        assert evaluator.largest_difference([model.module(feed)[0].numpy()], answer) < 1e-6


def test_models_in_bfloat16_are_compared_too() -> None:
    model = loaded(torch.nn.Identity(), {"x": torch.ones(2, 3)}, {"x": ("batch", 3)}, ["y:float32:batch,3"])
    half = {"x": model.example["x"].to(torch.bfloat16)}
    model = dataclasses.replace(model, example=half)
    assert agreement.find_fault(model, half, lambda arrays: [arrays["x"]], {}) == ""
    assert agreement.find_fault(model, half, lambda arrays: [2 * arrays["x"]], {}) == "wrong"


def fail(*feeds: Any) -> Any:
    raise RuntimeError("runtime assertion failed")


def refuse(*models: Any) -> Any:
    raise ExportError("it cannot be captured")


def test_a_program_that_fails_at_a_size_is_not_said_to_be_wrong_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its failure tells nothing of what becomes of it, such as the ONNX graph."""
    monkeypatch.setattr(export, "capture_program", refuse)

    model = loaded(torch.nn.Identity(), {"x": torch.ones(2, 8)}, {"x": ("batch", 8)}, ["y:float32:batch,8"])
    program: Any = types.SimpleNamespace(_guards_code=["L['x'].size()[0] != 1"], module=lambda check_guards: fail)
    words = sizes.describe_limits(export.widen_program(program, model, {})[2])
    assert words.startswith("captured where batch != 1: with batch = 1, PyTorch's own program fails, so other sizes")


def test_sizes_that_are_sums_are_whole_in_what_a_program_takes_for_granted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export, "capture_program", refuse)
    model = loaded(
        torch.nn.Identity(), {"x": torch.ones(2, 5)}, {"x": ("batch", "length+1")}, ["y:float32:batch,length+1"]
    )
    program: Any = types.SimpleNamespace(_guards_code=["2*L['x'].size()[1] != 8"], module=lambda check_guards: fail)
    words = sizes.describe_limits(export.widen_program(program, model, {})[2])
    assert words.startswith("captured where 2*(length+1) != 8: with length = 3,")


class Padded(torch.nn.Module):
    """Fill up a picture to multiples of four, as FocalNet does."""

    def forward(self, x: Any) -> Any:
        height, width = x.shape[2:]
        if width % 4:
            x = torch.nn.functional.pad(x, (0, 4 - width % 4))
        if height % 4:
            x = torch.nn.functional.pad(x, (0, 0, 0, 4 - height % 4))
        return torch.nn.functional.avg_pool2d(x, 4).mean((2, 3))


@pytest.mark.parametrize(
    ("shapes", "refused"),
    [
        ({"height": "4:8:12", "width": "4:8:12"}, "height = 7 or width = 7"),
        ({"height": "4:8:12"}, "height = 7"),
        ({"height": "11:12:20", "width": "8:8:8"}, "height = 11"),
        ({"height": "8:8:8", "width": "8"}, ""),
        ({"batch": "1:2:4"}, ""),
        ({}, ""),
    ],
)
def test_a_graph_that_is_wrong_within_a_range_is_refused(tmp_path: Path, shapes: dict[str, str], refused: str) -> None:
    """Every size that decides is named, with one that the range has where there is one."""
    ranges = {name: ShapeRange.parse(text) for name, text in shapes.items()}
    dims = ("batch", 3, "height", "width")
    model = loaded(Padded(), {"x": torch.randn(2, 3, 8, 8)}, {"x": dims}, ["y:float32:batch,3"])
    if not refused:
        (note,) = exported(tmp_path, model, ranges=ranges).notes
        words = "right only where (height % 4) == 0 and (width % 4) == 0: with height = 7 or width = 7, the module"
        assert words in note
        assert note.endswith("or fix the size: --input x:float32:batch,3,8,8")
        return
    with pytest.raises(ExportError) as error:
        exported(tmp_path, model, ranges=ranges)
    spans = " ".join(f"--shape {name}={ranges[name]}" for name in ranges if f"{name} =" in refused)
    said = f": with {refused}, the module answers otherwise, and {spans} has such sizes"
    assert error.value.message.endswith(said)
    size = ",".join("8" if f"{name} =" in refused else name for name in ("height", "width"))
    assert error.value.remedy.startswith(f"fix the size: --input x:float32:batch,3,{size}; or")


class Checked(Padded):
    """Refuse other sizes."""

    def forward(self, x: Any) -> Any:
        height, width = x.shape[2:]
        torch._check((height % 4) == 0 and (width % 4) == 0)
        return super().forward(x)


def test_sizes_that_the_module_itself_refuses_are_no_reason_to_refuse_its_graph(tmp_path: Path) -> None:
    dims = {"x": ("batch", 3, "height", "width")}
    model = loaded(Checked(), {"x": torch.randn(2, 3, 8, 8)}, dims, ["y:float32:batch,3"])
    ranges = {name: ShapeRange.parse("4:8:12") for name in ("height", "width")}
    assert not [note for note in exported(tmp_path, model, ranges=ranges).notes if "answers otherwise" in note]
    with pytest.raises(ExportError) as error:
        exported(tmp_path, loaded(Padded(), model.example, dims, ["y:float32:batch,3"]), ranges=ranges)
    assert error.value.remedy.endswith("torch._check((height % 4) == 0 and (width % 4) == 0)")


def test_what_is_known_wrong_is_refused_by_the_ranges_of_a_recipe() -> None:
    recipe = make({"model": "digits", "shapes": {"height": "4:8:12"}})
    (step,) = [step for step in passes_for("graph", recipe, "torch") if isinstance(step, export.Export)]
    assert step.ranges == recipe.ranges


@pytest.mark.parametrize("right", [True, False])
def test_a_size_at_which_the_program_alone_fails_is_tried_on_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, right: bool
) -> None:
    module = torch.nn.Linear(4, 4)
    model = loaded(module, {"x": torch.ones(2, 4)}, {"x": ("batch", 4)}, ["y:float32:batch,4"])
    limit = sizes.SizeLimit("batch != 1", "batch", {"batch": 1 if right else 0}, "fails")
    translate = export._translate_widely
    monkeypatch.setattr(export, "_translate_widely", lambda *given: (translate(*given)[0], (limit,)))
    if not right:
        monkeypatch.setattr(export, "differs_at", lambda *given: True)
    notes = exported(tmp_path, model).notes
    assert [note.partition(":")[0] for note in notes] == ([] if right else ["the graph is captured where batch != 1"])


@pytest.mark.parametrize(("dims", "advice"), [(("batch", "length"), "batch,8"), (("rows", "length"), "9,8")])
def test_sizes_that_a_capture_holds_alone_are_told_to_be_fixed(
    tmp_path: Path, dims: tuple[str, ...], advice: str
) -> None:
    """The trace of the other exporter, which holds at no other number of blocks either, is no way out."""

    class Blocks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.randn(2, 8))

        def forward(self, x: Any) -> Any:
            table = self.table if x.shape[1] // 4 == len(self.table) else torch.ones(2, 8)
            if dims[0] == "rows" and x.shape[0] // 9 == 1:
                table = 2 * table
            return (x.mean(1)[:, None, None] * table).sum((1, 2))

    model = loaded(Blocks(), {"x": torch.randn(9, 8)}, {"x": dims}, [f"y:float32:{dims[0]}"])
    with pytest.raises(ExportError, match=r"the graph is right only where .* the module answers otherwise") as error:
        exported(tmp_path, model)
    assert error.value.remedy.startswith(f"make it fixed with --input x:float32:{advice}, or remove that size from")


def test_a_fixed_dimension_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    find = agreement.find_other_sizes
    monkeypatch.setattr(export, "find_other_sizes", lambda model: [asked.append(model), find(model)][1])

    class Fixed(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            assert x.shape[0] == 2
            return x + 1

    model = loaded(Fixed(), {"x": torch.ones(2, 4)}, {"x": ("batch", 4)}, ["y:float32:2,4"])
    with pytest.raises(ExportError, match=r"holds only for batch = 2 .*'x'\), which .*\.py:\d+ fixes") as error:
        exported(tmp_path, model)
    line = Fixed.forward.__code__.co_firstlineno + 1
    assert f"{__file__}:{line} fixes" in error.value.message
    assert "--input x:float32:2,4" in error.value.remedy
    assert "torch.vmap" in error.value.remedy
    assert len(asked) == 1, "where it runs is found out once"


def test_the_line_that_fixes_a_dimension_is_named_where_it_looks_at_another_of_the_same_size(tmp_path: Path) -> None:
    class Masked(torch.nn.Module):
        def forward(self, x: Any, mask: Any) -> Any:
            assert mask.shape[0] == 2
            return x * mask

    feeds, dims = {"x": torch.ones(2, 4), "mask": torch.ones(2, 4)}, {"x": ("batch", 4), "mask": ("batch", 4)}
    with pytest.raises(ExportError) as error:
        exported(tmp_path, loaded(Masked(), feeds, dims, ["y:float32:2,4"]))
    line = Masked.forward.__code__.co_firstlineno + 1
    assert f"(dimension 0 of input 'x'), which {__file__}:{line} fixes" in error.value.message


def test_a_batch_that_has_to_be_fixed_is_advised_to_be_one_sample(tmp_path: Path) -> None:
    class Loop(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.stack([row.mean() for row in x])

    model = loaded(Loop(), {"x": torch.randn(2, 4)}, {"x": ("batch", 4)}, ["y:float32:batch"])
    with pytest.raises(ExportError, match="the graph holds only for batch = 2") as caught:
        exported(tmp_path, model)
    assert "make it fixed with --input x:float32:1,4, or" in (caught.value.remedy or "")


def test_a_fixed_length_is_given_to_all_inputs_that_have_it(tmp_path: Path) -> None:
    """A module that goes through a text step by step, as RWKV and Mamba do."""

    class Steps(torch.nn.Module):
        def forward(self, ids: Any, mask: Any, longer: Any, scale: Any) -> Any:
            state = longer.sum(1)
            for step in range(ids.shape[1]):
                state = state * 0.5 + ids[:, step] * mask[:, step]
            return state * scale

    example = {"ids": torch.ones(2, 6), "mask": torch.ones(2, 6), "longer": torch.ones(2, 7), "scale": torch.ones(2)}
    sizes = {"ids": ("sequence",), "mask": ("sequence",), "longer": ("sequence+1",), "scale": ()}
    dims: Any = {name: ("batch", *rest) for name, rest in sizes.items()}
    with pytest.raises(ExportError, match=r"holds only for sequence = 6 .*'ids'") as error:
        exported(tmp_path, loaded(Steps(), example, dims, ["y:float32:batch"]))
    flags = (
        "--input ids:float32:batch,6 --input mask:float32:batch,6 --input longer:float32:batch,7 --input scale:float32"
    )
    assert flags in error.value.remedy
    fixed = dims | {"ids": ("batch", 6), "mask": ("batch", 6), "longer": ("batch", 7)}
    exported(tmp_path, loaded(Steps(), example, fixed, ["y:float32:batch"]))


def test_where_both_exporters_fail_and_the_trace_holds_at_one_size_that_is_named(tmp_path: Path) -> None:
    """Longformer does so, which looks at values, and whose blocks of text are Python numbers."""

    class Module(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            size = int(x.new_full((), float(x.shape[0])).item())
            ones = torch.ones(size, 1)
            return x + ones if size < 3 else x + ones * 2

    model = loaded(Module(), {"x": torch.ones(2, 4)}, {"x": ("batch", "width")}, ["y:float32:batch,width"])
    with pytest.raises(ExportError, match="the trace holds only at the sizes of the example") as error:
        exported(tmp_path, model)
    assert "torch.where" in error.value.remedy
    assert "--input x:float32:2,width" in error.value.remedy
    fixed = loaded(Module(), {"x": torch.ones(2, 4)}, {"x": (2, "width")}, ["y:float32:2,width"])
    exported(tmp_path, fixed)


def test_a_trace_that_holds_within_one_block_is_tried_at_several(tmp_path: Path) -> None:
    class Blocks(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.cat([x[:, start : start + 16].cumsum(1) for start in range(0, x.shape[1], 16)], 1)

    model = loaded(Blocks(), {"x": torch.randn(2, 8)}, {"x": ("batch", "length")}, ["y:float32:batch,length"])
    with pytest.raises(ExportError, match="the trace holds only at the sizes of the example") as error:
        exported(tmp_path, model, exporter="torchscript")
    assert "--input x:float32:batch,8" in error.value.remedy


class Pieces(torch.nn.Module):
    """Normalize the batch in pieces, as TabNet does."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm, self.size = torch.nn.BatchNorm1d(3), size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pieces = x.split(self.size) if self.size else x.chunk(int(np.ceil(x.shape[0] / 128)), 0)
        return torch.cat([self.norm(piece) for piece in pieces])


def test_a_batch_that_is_cut_into_pieces_is_exported(tmp_path: Path) -> None:
    """Their size is a size of the input: onnxscript's optimizer fails where it is to make Split of that."""
    model = loaded(Pieces(0), {"x": torch.randn(4, 3)}, {"x": ("batch", 3)}, ["y:float32:batch,3"])
    assert exported(tmp_path, model, exporter="dynamo").notes == ()
    assert "Slice" in model_file.summary(tmp_path / edit.FILE).operators
    for batch in (1, 8, 130, 300):
        x = torch.randn(batch, 3)
        answer = evaluator.run_graph(tmp_path / edit.FILE, {"x": x.numpy()})
        np.testing.assert_allclose(answer[0], model.module(x)[0].detach().numpy(), atol=1e-6)


def test_a_size_far_from_the_examples_from_which_on_pieces_are_lacking_is_named(tmp_path: Path) -> None:
    model = loaded(Pieces(128), {"x": torch.randn(8, 3)}, {"x": ("batch", 3)}, ["y:float32:batch,3"])
    (note,) = exported(tmp_path, model, exporter="dynamo").notes
    guard = "((127 + batch) // 128) == 1"
    assert note.startswith(f"the graph is captured where {guard}: with batch = 129, PyTorch's own program fails")
    for batch in (1, 128):
        x = torch.randn(batch, 3)
        answer = evaluator.run_graph(tmp_path / edit.FILE, {"x": x.numpy()})
        np.testing.assert_allclose(answer[0], model.module(x)[0].detach().numpy(), atol=1e-6)


def test_feeds_that_the_module_does_not_take_are_no_fault_of_a_graph() -> None:
    class Picky(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[0] == 3:
                raise ValueError("not three")
            return x

    def fail(feeds: Any) -> Any:
        raise ModelError("the graph does not take it")

    model = loaded(Picky(), {"x": torch.ones(2)}, {"x": ("batch",)}, ["y:float32:batch"])
    assert agreement.find_fault(model, {"x": torch.ones(3)}, fail, {}) == ""
    assert agreement.find_fault(model, {"x": torch.ones(2)}, fail, {}) == "fails"


class Steps(torch.nn.Module):
    """Go through a text step by step, or sum it up at once."""

    def __init__(self, loops: bool) -> None:
        super().__init__()
        self.loops = loops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.sum(1)
        for step in range(x.shape[1] if self.loops else 2):
            state = 0.5 * state + x[:, step]
        return state


def add_up(x: torch.Tensor) -> torch.Tensor:
    state = x.sum(1)
    for step in range(x.shape[1]):
        state = 0.5 * state + x[:, step]
    return state


@pytest.mark.parametrize(
    ("module", "symbol", "unrolled"),
    [
        (Steps(loops=True), "length", True),
        (Steps(loops=True), "batch", False),
        (Steps(loops=True), "", False),
        (Steps(loops=False), "length", False),
        (None, "length", False),
    ],
    ids=["loop", "batch", "no dimension", "no loop", "loop in TorchScript"],
)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_a_loop_is_unrolled_where_traces_grow_with_the_dimension(
    module: torch.nn.Module | None, symbol: str, unrolled: bool
) -> None:
    if module is None:
        module, scripted = torch.nn.Module(), torch.jit.script(add_up)
        module.forward = lambda x: scripted(x)
    model = loaded(module, {"x": torch.ones(2, 6)}, {"x": ("batch", "length")}, ["y:float32:batch"])
    assert agreement.is_unrolled(model, symbol) == unrolled


def test_nothing_more_is_captured_of_a_module_whose_loop_was_unrolled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each capture takes as many times longer as the loop has steps; no other size or exporter gives another graph."""
    captures: list[bool] = []
    capture = torch.export.export
    monkeypatch.setattr(
        torch.export, "export", lambda *given, **how: [captures.append(how["strict"]), capture(*given, **how)][1]
    )
    monkeypatch.setattr(export, "_trace", lambda *given: pytest.fail("it was traced, too"))
    model = loaded(Steps(loops=True), {"x": torch.ones(2, 6)}, {"x": ("batch", "length")}, ["y:float32:batch"])
    with pytest.raises(ExportError, match=r"^the graph holds only for length = 6 .* fixes") as error:
        exported(tmp_path, model)
    assert "the TorchScript exporter fails too" not in error.value.message
    assert captures == [False]
    with pytest.raises(ExportError, match=r"^the graph holds only for length = 6"):
        export.capture_widely(model, {})
    assert captures == [False, False]
