"""The one JSON of a lane. Parts are measured in one call or in several, and written as soon as there is something.

python benchmarks/gpu/record.py tests JUNIT.xml EXIT --out gpu_lane.json     what came of tests/gpu
python benchmarks/gpu/record.py merge FILE... --out gpu_lane.json            parts of several calls, later ones last
"""

import argparse
import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

_PACKAGES = ("torch", "onnx", "onnxruntime", "onnxruntime-gpu", "tensorrt", "tensorrt-cu13", "tensorrt-rtx", "triton")


class Record:
    """A file of parts; what is in it already stays, but for the part that is made anew."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        self.content["machine"] = machine()

    def start(self, *place: str) -> dict[str, Any]:
        """A part to be filled, empty now; it is marked as cut short until it is not."""
        inner = self.content
        for name in place[:-1]:
            inner = inner.setdefault(name, {})
        inner[place[-1]] = {"complete": False}
        self.write()
        found: dict[str, Any] = inner[place[-1]]
        return found

    def write(self) -> None:
        """The record as it is now; whole, whenever the lane is cut short."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        beside = self._path.with_suffix(".part")
        beside.write_text(json.dumps(self.content, indent=1) + "\n")
        beside.replace(self._path)


def machine() -> dict[str, Any]:
    """The device, its driver, and the versions of what is measured."""
    from enginesmith.pipeline.system import nvidia

    device, driver = nvidia.cuda_device(0), nvidia.driver()
    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    shown = device.model_dump(mode="json") if device else f"none: {driver.reason}"
    return {"device": shown, "driver": driver.version, "versions": versions}


def merged(files: list[Path]) -> dict[str, Any]:
    """Parts of several records, two levels deep; of two that are the same part, the later one."""
    found: dict[str, Any] = {}
    for file in files:
        for name, part in json.loads(file.read_text()).items():
            together = name == "models" and name in found
            found[name] = {**found[name], **part} if together else part
    return found


def _outcome(case: ElementTree.Element) -> dict[str, Any]:
    part = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
    found = {"test": case.get("name"), "seconds": float(case.get("time", 0))}
    return found | ({"result": "passed"} if part is None else {"result": part.tag, "why": part.get("message")})


def _tests(junit: Path, code: int, out: Path) -> None:
    record = Record(out)
    part = record.start("tests")
    cases = ElementTree.parse(junit).iter("testcase") if junit.is_file() else ()
    part |= {"exit": code, "cases": [_outcome(case) for case in cases], "complete": junit.is_file()}
    record.write()


def main() -> None:
    """Write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    tests = commands.add_parser("tests")
    tests.add_argument("junit", type=Path)
    tests.add_argument("exit", type=int)
    merge = commands.add_parser("merge")
    merge.add_argument("files", nargs="+", type=Path)
    for command in (tests, merge):
        command.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    if given.command == "tests":
        _tests(given.junit, given.exit, given.out)
    else:
        given.out.write_text(json.dumps(merged(given.files), indent=1) + "\n")


if __name__ == "__main__":
    main()
