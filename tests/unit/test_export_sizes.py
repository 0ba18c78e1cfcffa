"""Sizes for which an exported graph holds, and what is said where they are not all that were asked for."""

import contextlib
import dataclasses
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from enginesmith.pipeline.errors import ExportError
from enginesmith.pipeline.frameworks.onnx import edit, evaluator
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
    assert [note.partition(":")[0] for note in notes] == ([] if right else ["the graph is right only where batch != 1"])
    ranges = {"batch": ShapeRange.parse("0:2:4")}
    with contextlib.nullcontext() if right else pytest.raises(ExportError, match="--shape batch=0:2:4 has such sizes"):
        exported(tmp_path, model, ranges=ranges)


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
