"""What the project ships as text tells the truth: the schema of run.json, the reference of recipes, the README."""

import json
import re
import tomllib
from pathlib import Path

from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.report.reference import recipe_reference
from enginesmith.pipeline.results.run import json_schema

ROOT = Path(__file__).parents[2]


def test_the_shipped_schema_is_that_of_the_code() -> None:
    shipped = json.loads((ROOT / "pipeline/report/run.schema.json").read_text())
    assert shipped == json.loads(json.dumps(json_schema())), "run `make documents`"


def test_the_recipe_reference_is_that_of_the_code() -> None:
    assert (ROOT / "docs/recipe.md").read_text() == recipe_reference(), "run `make documents`"


def test_the_readme_shows_the_two_commands_on_its_first_screen() -> None:
    first = "\n".join((ROOT / "README.md").read_text().splitlines()[:40])
    assert "make demo" in first
    assert "make test" in first


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(one for extra in project["optional-dependencies"].values() for one in extra)]
    names = {re.split(r"[<>=\[]", requirement)[0].lower().replace("_", "-") for requirement in wanted}
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(), re.M)
    assert names - {"enginesmith"} <= {pin.lower().replace("_", "-") for pin in pins}


def test_a_commented_recipe_reads_back_as_itself() -> None:
    import yaml

    from enginesmith.pipeline.recipe import commented

    recipe = make({"model": "digits", "batch": [1, 4], "budgets": {"max_memory_bytes": "2GiB"}})
    assert make(yaml.safe_load(commented(recipe))) == recipe
