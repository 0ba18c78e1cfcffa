"""Describe a known bug: where it was reported, which versions have it, and the graphs that show it."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

import onnx
import onnx.parser
from packaging.specifiers import SpecifierSet


class Graphs(NamedTuple):
    """A model, and a graph that computes what the tool made of it."""

    right: onnx.ModelProto
    wrong: onnx.ModelProto


@dataclass(frozen=True)
class KnownBug:
    """A published bug that gives a wrong result without a message."""

    name: str
    source: str
    """Report: ``owner/repository#number``, or the document of this project that describes it."""
    wrong: str
    """What goes wrong, in one sentence."""
    package: str
    """Distribution that has the bug."""
    reported: str
    """Versions of the report, or its date where it names none."""
    make: Callable[[], Graphs]
    probe: Callable[[onnx.ModelProto], bool] | None
    """Tell whether the installed version gets the model wrong; None where that takes a GPU or a certain processor."""
    affected: str
    """Specifier of the versions that a probe should find wrong; its upper end is a version known to be right."""
    guard: str
    """File of this project that works around it, or nothing."""
    slow: bool

    @property
    def url(self) -> str:
        """Address of the report."""
        repository, _, number = self.source.partition("#")
        return f"https://github.com/{repository}/issues/{number}" if number.isdigit() else self.source

    def row(self) -> str:
        """Format the case as a row of the table in docs/prosecute.md."""
        address = self.url if "#" in self.source else Path(self.source).name
        cells = [f"[{self.source}]({address})", self.wrong, f"{self.package} {self.reported}"]
        cells += [f"`{code}`" if code else "" for code in (self.affected, self.guard)]
        return f"| {' | '.join(cells)} |"

    def installed(self) -> str | None:
        """Return the installed version of the package."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            return None

    def expected(self) -> bool:
        """Tell whether the installed version should have the bug."""
        found = self.installed()
        return found is not None and SpecifierSet(self.affected).contains(found.partition("+")[0], prereleases=True)

    def describe_change(self, present: bool) -> str:
        """Say what a probe found that the book does not have, and what to do."""
        if present:
            return f"{self.package} {self.installed()} has {self.source} now: {self.wrong}; recorded: {self.affected}"
        gone = f"{self.package} {self.installed()} no longer has {self.source}"
        return f"{gone}: the workaround in {self.guard} can go" if self.guard else f"{gone}: correct its versions"


def known_bug(
    source: str,
    wrong: str,
    package: str,
    reported: str,
    *,
    affected: str = "",
    probe: Callable[[onnx.ModelProto], bool] | None = None,
    guard: str = "",
    slow: bool = False,
) -> Callable[[Callable[[], Graphs]], KnownBug]:
    """Make a case of a function that makes its graphs."""

    def decorate(make: Callable[[], Graphs]) -> KnownBug:
        return KnownBug(make.__name__, source, wrong, package, reported, make, probe, affected, guard, slow)

    return decorate


def graph(text: str, opset: int = 18, *extra: onnx.TensorProto) -> onnx.ModelProto:
    """Parse a graph in ONNX's textual syntax."""
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": {opset}]> g {text}')
    model.graph.initializer.extend(extra)
    onnx.checker.check_model(model, full_check=True)
    return model
