"""The book of known bugs: published wrong results of the tools, each as a model beside what the tool made of it."""

from published_bugs import arithmetic, exporter, onnxruntime_bugs, openvino_bugs, tensorrt_bugs, torch_compile
from published_bugs.case import KnownBug

BUGS: dict[str, KnownBug] = {
    bug.name: bug
    for module in (exporter, torch_compile, onnxruntime_bugs, openvino_bugs, tensorrt_bugs, arithmetic)
    for bug in vars(module).values()
    if isinstance(bug, KnownBug)
}
"""All cases, by name."""
