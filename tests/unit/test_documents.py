"""Documents: schemas and references are those of the code; what commands and remedies name is there."""

import ast
import json
import re
import runpy
import subprocess
import tomllib
from pathlib import Path

import pytest

import enginesmith
from enginesmith import cli
from enginesmith.pipeline import errors
from enginesmith.pipeline.recipe import commented, make
from enginesmith.pipeline.recipe.cli_options import list_options
from enginesmith.pipeline.results.run import json_schema

ROOT = Path(__file__).parents[2]
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))


def test_the_public_api_is_what_is_documented() -> None:
    page = (ROOT / "docs/stability.md").read_text()
    assert [*enginesmith.__all__] == sorted(enginesmith._HOMES)
    assert not [name for name in enginesmith.__all__ if f"`{name}`" not in page or not getattr(enginesmith, name)]


def test_the_shipped_schema_is_that_of_the_code() -> None:
    shipped = json.loads((ROOT / "pipeline/report/run.schema.json").read_text())
    assert shipped == json.loads(json.dumps(json_schema())), "run `make documents`"


def test_the_options_of_the_command_line_are_those_of_the_recipes_fields() -> None:
    assert json.loads((ROOT / "pipeline/commands/options.json").read_text()) == list_options(), "run `make documents`"


@pytest.mark.parametrize(
    ("script", "function", "page"),
    [("fields.py", "recipe_reference", "recipe.md"), ("commands.py", "command_reference", "cli.md")],
)
def test_a_reference_is_that_of_the_code(script: str, function: str, page: str) -> None:
    write = runpy.run_path(str(ROOT / "docs" / script))[function]
    assert (ROOT / "docs" / page).read_text() == write(), "run `make documents`"


def prose(document: Path) -> str:
    """Return the text of a document without its blocks of code."""
    return re.sub(r"^ *```.*?^ *```$", "", document.read_text(encoding="utf-8"), flags=re.M | re.S)


def anchors(document: Path) -> set[str]:
    """Return the anchors of a document's headings, as code hosts and the site make them."""
    titles = (
        re.sub(r"\[(.*?)\]\(.*?\)", r"\1", title).lower() for title in re.findall(r"^#+ (.*)$", prose(document), re.M)
    )
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_every_link_of_a_document_leads_somewhere(document: Path) -> None:
    links = re.findall(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)]*))?\)", prose(document))
    lost = [f"{path}#{anchor}" for path, anchor in links if not (document.parent / path).exists()]
    targets = [(document.parent / path if path else document, anchor) for path, anchor in links if anchor]
    assert not lost + [f"{path}#{anchor}" for path, anchor in targets if anchor not in anchors(path)]


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    named = re.findall(r"^ +(?:- .*: |/)(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert {path.name for path in DOCUMENTS[1:]} <= set(named)


def test_every_environment_variable_that_is_read_is_documented() -> None:
    text = "".join(path.read_text() for room in ("pipeline", "calibration") for path in (ROOT / room).rglob("*.py"))
    read = set(re.findall(r"environ(?:ment)?(?:\.get\(|\[|\.setdefault\()\"([A-Z_]+)\"", text))
    read |= set(re.findall(r"\bENGINESMITH_[A-Z_]+", text))
    named = (ROOT / "docs" / "files.md").read_text()
    assert len(read) > 5
    assert not [name for name in read if f"`{name}`" not in named]


def test_the_readme_shows_the_two_commands_on_its_first_screen() -> None:
    first = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])
    assert "make demo" in first
    assert "make test" in first


def test_every_python_file_that_documents_name_exists() -> None:
    """Below the root or ``pipeline/``; a name without a folder anywhere there; or it is a block of the document."""
    missing = {}
    for document in DOCUMENTS:
        text = document.read_text()
        named = set(re.findall(r"`([\w./*-]+\.py)`", text)) - set(re.findall(r"^```python (\S+)$", text, re.M))
        places = {name: (name, f"pipeline/{name}" if "/" in name else f"pipeline/**/{name}") for name in named}
        gone = [name for name, patterns in places.items() if not any(any(ROOT.glob(each)) for each in patterns)]
        if gone:
            missing[document.name] = sorted(gone)
    assert not missing


def test_every_function_that_the_design_names_exists() -> None:
    """A module and a function or method, or a class: ``planning/planner.py:plan``, ``tasks/base.py:Task.run``."""
    missing = []
    named = re.findall(r"`([\w/]+\.py):([\w.]+)`", (ROOT / "docs/design.md").read_text())
    for module, name in named:
        path = next(path for path in (ROOT / module, ROOT / "pipeline" / module) if path.is_file())
        node: ast.AST | None = ast.parse(path.read_text())
        for part in name.split("."):
            inner = ast.iter_child_nodes(node) if node else ()
            node = next((child for child in inner if getattr(child, "name", None) == part), None)
        missing += [] if node else [f"{module}:{name}"]
    assert len(named) > 10
    assert not missing


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    names = {re.split(r"[<>=\[]", requirement)[0].lower().replace("_", "-") for requirement in wanted}
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.M)
    assert names - {"enginesmith"} <= {pin.lower().replace("_", "-") for pin in pins}


@pytest.mark.parametrize(("flavour", "other"), [("cpu", "gpu"), ("gpu", "cpu")])
def test_make_keeps_flavours_apart(flavour: str, other: str, tmp_path: Path) -> None:
    words = ["make", "-n", "demo", "test-all", f"FLAVOUR={flavour}", f"VENV={tmp_path}"]
    lines = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    packages = {"cpu": "onnxruntime", "gpu": "onnxruntime-gpu"}
    uninstall = f"{tmp_path}/bin/pip uninstall -q -y onnxruntime onnxruntime-gpu"
    removed = next(i for i, line in enumerate(lines) if f"show -q {packages[other]} " in line and uninstall in line)
    installed = next(index for index, line in enumerate(lines) if f"-e '.[{flavour},openvino]'" in line)
    assert removed < installed < lines.index(f"touch {tmp_path}/.runtime-{flavour}")
    assert f"rm -f {tmp_path}/.runtime-{other} {tmp_path}/.dev-{other}" in lines
    together = [line for line in lines if "-n 2" in line]  # several processes: none of them sees a GPU
    assert [line.startswith("CUDA_VISIBLE_DEVICES= ") for line in together] == [True, True]
    assert f"{tmp_path}/bin/pytest -n 0 -m gpu tests/gpu" in lines
    assert ("--device cuda --out" in "".join(lines)) == (flavour == "gpu")


def test_no_message_names_a_file_of_the_documents() -> None:
    """A wheel has none of them."""
    named = []
    for path in (path for room in ("pipeline", "calibration", "models") for path in (ROOT / room).rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        about = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        texts = [node for node in nodes if isinstance(node, ast.Constant) and id(node) not in about]
        named += [f"{path.name}:{node.lineno}" for node in texts if "docs/" in str(node.value)]
    assert not named


def test_every_option_that_the_code_names_is_one_of_a_command() -> None:
    """Or one of another tool, an older name that is still explained, or ``--no-`` before a name."""
    known = cli._list_options(cli.main) | {"--help", "--no-", "--time-limit", "--search-limit"}
    known |= {"--address", "--head", "--gpus", "--upgrade", "--force-reinstall"}
    known |= {"--backend-config", "--model-repository", "--disable-auto-complete-config"}
    unknown = [
        f"{path.name}: {flag}"
        for room in ("pipeline", "calibration", "models")
        for path in (ROOT / room).rglob("*.py")
        for flag in cli._FLAG.findall(path.read_text())
        if flag not in known
    ]
    assert not unknown


def test_a_commented_recipe_reads_back_as_itself() -> None:
    import yaml

    recipe = make({"model": "digits", "batch": [1, 4], "budgets": {"max_memory_bytes": "2GiB"}})
    assert make(yaml.safe_load(commented(recipe))) == recipe


def test_a_remedy_names_distributions_and_no_extra_of_a_package_that_is_on_no_index() -> None:
    assert re.fullmatch(r"pip install 'transformers>=[\d.]+'", errors.install_command("transformers"))
    assert errors.install_command("torch", "--upgrade").startswith("pip install --upgrade 'torch>=")
    assert errors.install_command("gcsfs") == "pip install gcsfs"
    roots = [Path(errors.__file__).parents[1] / name for name in ("pipeline", "calibration", "models", "docs")]
    files = [path for root in roots for ends in ("*.py", "*.md") for path in root.rglob(ends)]
    assert len(files) > 100
    extra = re.compile(r"(?<!\./)enginesmith\[[a-z]")
    assert not [path for path in files if extra.search(path.read_text())]


MESSAGE = re.compile(r"^\| `([^`]+)`", re.M)
MESSAGES = MESSAGE.findall((ROOT / "docs" / "troubleshooting.md").read_text())


@pytest.fixture(scope="module")
def sources() -> str:
    """All text of the code, with what separates the parts of a literal taken out."""
    texts = [path.read_text() for room in ("pipeline", "calibration") for path in (ROOT / room).rglob("*.py")]
    return " ".join(re.sub(r"\"\s*\n\s*f?\"", "", "\n".join(texts)).split())


def test_there_are_messages() -> None:
    assert len(MESSAGES) > 20


@pytest.mark.parametrize("message", MESSAGES)
def test_message_is_in_the_code(message: str, sources: str) -> None:
    parts = [part.strip() for part in message.split("…") if part.strip()]
    assert parts
    for part in parts:
        assert part in sources, f"{part!r} of {message!r} is said nowhere"
