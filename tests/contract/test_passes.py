"""Promises of every pass, and of the table that they are looked up in."""

import ast
import importlib
import inspect
from pathlib import Path
from typing import get_args

import pytest

from enginesmith.pipeline import passes
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.passes.base import Pass, PrecisionRequest, Stage
from enginesmith.pipeline.recipe import Recipe

PIPELINE = Path(__file__).parents[2] / "pipeline"
CLASSES = {entry.partition(":")[2] for entry in passes.PASSES.values()}
RECIPE = Recipe.model_validate(
    {
        "model": "digits",
        "sparsity": ("2:4",),
        "quantization": {"shift": True, "equalize": True, "smooth": "auto", "awq": True},
    }
)


def named_classes(source: str) -> set[str]:
    """Pass classes that a module imports or names."""
    named = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.alias):
            named.add(node.name.rpartition(".")[2])
        elif isinstance(node, ast.Attribute):
            named.add(node.attr)
        elif isinstance(node, ast.Name):
            named.add(node.id)
    return named & CLASSES


def test_only_passes_and_planning_name_a_pass() -> None:
    files = [one for one in PIPELINE.rglob("*.py") if one.relative_to(PIPELINE).parts[0] not in ("passes", "planning")]
    assert len(files) > 100
    assert {str(file): names for file in files if (names := named_classes(file.read_text()))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "from enginesmith.pipeline.passes.simplify import Simplify as Other",
        "def run(step):\n    return isinstance(step, simplify.Simplify)",
    ],
)
def test_a_named_pass_is_seen(source: str) -> None:
    assert named_classes(source) == {"Simplify"}


def test_every_pass_class_is_in_the_table() -> None:
    for file in (PIPELINE / "passes").rglob("*.py"):
        importlib.import_module(".".join(("enginesmith.pipeline", *file.relative_to(PIPELINE).with_suffix("").parts)))
    waiting, known = [Pass], set()
    while waiting:
        waiting += (children := waiting.pop().__subclasses__())
        known |= {
            one for one in children if not inspect.isabstract(one) and one.__module__.startswith("enginesmith.pipe")
        }
    assert known == {passes.pass_class(name) for name in passes.PASSES}


@pytest.mark.parametrize("name", passes.PASSES)
def test_a_pass_declares_what_it_is(name: str) -> None:
    found = passes.pass_class(name)
    assert found.name == name
    assert found.stage in get_args(Stage)
    assert found.tools
    assert all(hasattr(RECIPE, field) for field in found.reads)
    made = found.requested({field: getattr(RECIPE, field) for field in found.reads}, PrecisionRequest("int8"))
    assert [step.model_dump()["pass"] for step in made] == [name]


def test_a_plan_goes_through_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [step.name for step in passes.graph_passes(RECIPE, "torch")]
    assert names == ["export", "simplify"]
    monkeypatch.setattr(passes, "PASSES", {name: passes.PASSES[name] for name in passes.PASSES if name != "simplify"})
    assert [step.name for step in passes.graph_passes(RECIPE, "torch")] == ["export"]
    rescaling = passes.passes_for("rescale", RECIPE, request=PrecisionRequest("int8"))
    assert [step.step_name for step in rescaling] == ["shift", "equalize", "smooth"]
    rescaling = passes.passes_for("rescale", RECIPE, request=PrecisionRequest("int4-weights"))
    assert [step.step_name for step in rescaling] == ["awq"]


def test_a_pass_can_be_asked_for_by_name() -> None:
    asked = RECIPE.model_copy(update={"passes": ("decompose-attention",)})
    assert [step.name for step in passes.graph_passes(asked, "onnx")] == ["simplify", "decompose-attention"]
    with pytest.raises(UsageError, match="'simplify' is not asked for by --pass") as error:
        passes.requested_pass("simplify")
    assert error.value.remedy.startswith("use decompose-attention")
    with pytest.raises(UsageError, match="there is no pass 'sharpen'"):
        passes.requested_pass("sharpen")
