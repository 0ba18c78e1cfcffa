"""Entry points of other distributions: listed without an import, loaded by name, part of a step's key."""

import sys
from pathlib import Path

import pytest
from pydantic import BaseModel

from enginesmith.pipeline.errors import MissingCapability
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
