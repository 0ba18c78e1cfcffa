"""Engines are named in engines/ alone, so that one more is a file there and a line in its table."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from enginesmith.pipeline.engines import ENGINES, engine_class

ROOT = Path(__file__).parents[2]
LIBRARY = "pipeline/frameworks/onnx/evaluator.py"
"""ONNX Runtime as a library that computes graphs, for calibration and comparisons: there whichever engine is built."""
ENGLISH = {"eager", "compiled"}
"""Names that are also words: in a sentence they name no engine, as a value or an option's they do."""
FOR_PEOPLE = {"help", "description"}
"""Arguments that explain an option to people; their examples name engines."""
TITLES = {engine_class(name).title for name in ENGINES}
PATTERN = re.compile("|".join(map(re.escape, (*(set(ENGINES) - ENGLISH), *TITLES))))
AS_VALUE = re.compile(rf"(?:.*--engine )?(?:{'|'.join(ENGLISH)})\b")


def sources() -> list[str]:
    """Every module outside of engines/, by its path in the repository."""
    found = [
        ROOT / "cli.py",
        *(path for room in ("pipeline", "models", "calibration") for path in (ROOT / room).rglob("*.py")),
    ]
    names = (path.relative_to(ROOT).as_posix() for path in found)
    return sorted(name for name in names if not name.startswith("pipeline/engines/"))


def engines_named(code: str) -> Iterator[str]:
    """Line and text of each string, import and attribute that names an engine, but docstrings and help texts."""
    tree = ast.parse(code)
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in FOR_PEOPLE:
            texts |= {id(inner) for inner in ast.walk(node.value)}
    for node in ast.walk(tree):
        if id(node) in texts:
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if PATTERN.search(node.value) or AS_VALUE.fullmatch(node.value):
                yield f"{node.lineno}: {node.value!r}"
        elif isinstance(node, ast.Import | ast.ImportFrom):
            text = ast.unparse(node)
            own = re.search(r"pipeline\.engines\.(torch|onnxruntime|tensorrt)\b", text)
            if own or re.search(r"\b(onnxruntime|tensorrt)", text.replace("enginesmith.pipeline.engines", "")):
                yield f"{node.lineno}: {text}"
        elif isinstance(node, ast.Attribute) and PATTERN.search(node.attr):
            yield f"{node.lineno}: .{node.attr}"


def test_no_module_outside_of_engines_names_one() -> None:
    found = {name: list(engines_named((ROOT / name).read_text())) for name in sources() if name != LIBRARY}
    assert len(found) > 100
    naming = {name: lines for name, lines in found.items() if lines}
    assert not naming, "ask the engine itself, or the table in pipeline/engines/__init__.py"


@pytest.mark.parametrize(
    "code",
    [
        'name = "tensorrt_rtx"',
        'if name == "eager": pass',
        'fix = "add --engine compiled"',
        'raise ValueError(f"{one} is not made by ONNX Runtime")',
        "import onnxruntime",
        "from enginesmith.pipeline.engines.tensorrt import manifest",
        "from enginesmith.pipeline.engines.torch.eager import Eager",
        "options = recipe.tensorrt_run",
    ],
)
def test_what_names_an_engine_is_found(code: str) -> None:
    assert list(engines_named(code))


@pytest.mark.parametrize(
    "code",
    [
        '"""Engines such as onnxruntime."""',
        'option("--engine", help="onnxruntime, say")',
        'text = "outputs against eager in float32"',
        "from enginesmith.pipeline.engines import baseline",
    ],
)
def test_words_for_people_name_none(code: str) -> None:
    assert not list(engines_named(code))
