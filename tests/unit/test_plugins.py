"""Engines are named in engines/ alone; others come from other distributions by entry points, loaded by name."""

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from enginesmith.pipeline.engines import ENGINES, engine_class
from enginesmith.pipeline.errors import MissingCapability, UsageError
from enginesmith.pipeline.system import plugins

GROUP = "enginesmith.test"


def install(folder: Path, package: str, entry: str, code: str = "", version: str = "1.0") -> None:
    """Lay out a distribution of one module as an installer would."""
    (folder / f"{package}.py").write_text(code)
    metadata = folder / f"{package}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{entry}\n")
    (metadata / "top_level.txt").write_text(f"{package}\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_listing_imports_nothing(site: Path) -> None:
    install(site, "plug_listed", "fast = plug_listed:Fast", "raise SystemExit")
    assert plugins.installed(GROUP) == (plugins.Plugin("fast", "plug_listed", "1.0"),)
    assert plugins.offered(GROUP, "fast")
    assert not plugins.offered(GROUP, "slow")
    assert "plug_listed" not in sys.modules


def test_loading_by_name(site: Path) -> None:
    install(site, "plug_loaded", "fast = plug_loaded:Fast", "class Fast: ...")
    assert plugins.load(GROUP, "fast").__name__ == "Fast"


@pytest.mark.parametrize(
    ("package", "code"), [("plug_raises", "1 / 0"), ("plug_empty", ""), ("plug_lacks", "import not_there_at_all")]
)
def test_what_cannot_be_loaded_names_distribution_and_error(site: Path, package: str, code: str) -> None:
    install(site, package, f"fast = {package}:Fast", code)
    with pytest.raises(MissingCapability, match=f"'fast' of {package} 1.0 cannot be loaded from {package}:Fast: "):
        plugins.load(GROUP, "fast")


def test_a_name_offered_twice_is_refused(site: Path) -> None:
    install(site, "plug_one", "fast = plug_one:Fast")
    install(site, "plug_two", "fast = plug_two:Fast")
    with pytest.raises(MissingCapability, match="offered by plug_one and plug_two"):
        plugins.load(GROUP, "fast")


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(MissingCapability, match="no installed distribution offers 'fast'"):
        plugins.load(GROUP, "fast")


def test_several_engines_at_once_are_refused_with_the_way_to_name_them() -> None:
    with pytest.raises(UsageError, match="no engine 'eager,compiled'") as refused:
        engine_class("eager,compiled")
    assert refused.value.remedy is not None
    assert "repeat the option: --engine eager --engine compiled" in refused.value.remedy


def test_code_and_version_identify_a_plugin(site: Path) -> None:
    class Holder(BaseModel):
        inner: dict[str, BaseModel]

    code = "from pydantic import BaseModel\nclass Fast(BaseModel): ..."
    install(site, "plug_code", "fast = plug_code:Fast", code)
    fast = plugins.load(GROUP, "fast")
    found = plugins.identify_plugins(Holder(inner={"one": fast()}))["plug_code"]
    assert found["plug_code"] == "1.0"
    plugins._identify_package.cache_clear()
    (site / "plug_code.py").write_text(code + "\n# changed")
    assert plugins.identify_code(fast)["code"] != found["code"]


def test_own_classes_are_no_plugins() -> None:
    assert plugins.identify_code(plugins.Plugin) == {}


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
