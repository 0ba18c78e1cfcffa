"""List the installed packages that a user's code imported: what it computes depends on them, too."""

import importlib.metadata
import sys
from collections.abc import Collection
from pathlib import Path

from enginesmith.pipeline.frameworks.torch.native_readers import read_held
from enginesmith.pipeline.system import software

PRELOADED = "enginesmith.pipeline.system.preload"
INSTALLED = frozenset(("site-packages", "dist-packages"))
"""Names of the folders that pip installs distributions into."""


def list_packages() -> tuple[dict[str, str], set[Path]]:
    """List packages imported beyond those that every worker has, and the files of modules that belong to none."""
    common: frozenset[str] = getattr(sys.modules.get(PRELOADED), "COMMON", frozenset())
    imported = {name for name in sys.modules if "." not in name} - common
    modules = {name for name in imported if _is_installed(sys.modules[name])}
    if not modules:  # as for most models: reading what each distribution holds takes half a second
        return {}, set()
    homes = dict(importlib.metadata.packages_distributions())
    homes |= _find_homes({name for name in modules if name not in homes})
    names = {name for module in modules for name in homes.get(module, ())}
    loose = [held for name, held in sys.modules.items() if name.partition(".")[0] in modules - homes.keys()]
    files = {Path(file) for held in loose if isinstance(file := read_held(held, "__file__"), str)}
    packages = {name: identity for name in sorted(names) if (identity := software.identify(name))}
    return packages, {file for file in files if file.is_file()}


def _find_homes(modules: Collection[str]) -> dict[str, list[str]]:
    """Find the distributions that hold the files of modules, as of extensions, which Python does not list as theirs."""
    files = {name: Path(str(read_held(sys.modules[name], "__file__") or "")).name for name in modules}
    homes: dict[str, list[str]] = {}
    for distribution in importlib.metadata.distributions() if modules else ():
        rows = (distribution.read_text("RECORD") or "").splitlines()
        held = {row.partition(",")[0].partition("/")[0] for row in rows}
        for name, file in files.items():
            if {name, file} & held:
                homes.setdefault(name, []).append(distribution.metadata["Name"])
    return homes


def _is_installed(module: object) -> bool:
    """Tell whether a module is of an installed distribution; files of all others are tracked themselves."""
    places = [read_held(module, "__file__"), *(read_held(module, "__path__") or ())]
    return any(INSTALLED.intersection(Path(place).parts) for place in places if place)
