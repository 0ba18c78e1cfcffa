"""Every TensorRT name that the code uses exists in each flavour and version; the names were read from real modules."""

import ast
import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest

from enginesmith.pipeline import engines
from enginesmith.pipeline.engines.tensorrt import versions
from enginesmith.pipeline.engines.tensorrt.options import BuildOptions
from enginesmith.pipeline.engines.tensorrt.versions import Capabilities
from enginesmith.pipeline.system.software import numbers

NAMES = json.loads((Path(__file__).parent.parent / "data" / "tensorrt_api_names.json").read_text())
HERE = Path(engines.__file__).parent
SOURCES = [path for path in sorted((HERE / "tensorrt").glob("*.py")) if path.name != "infer.py"]

CLASSES = {
    ("builder.py", "builder"): "Builder",
    ("builder.py", "config"): "IBuilderConfig",
    ("builder.py", "network"): "INetworkDefinition",
    ("builder.py", "profile"): "IOptimizationProfile",
    ("builder.py", "tensor"): "ITensor",
    ("builder.py", "pools"): "MemoryPoolType",
    ("builder.py", "flags"): "BuilderFlag",
    ("parser.py", "parser"): "OnnxParser",
    ("parser.py", "network"): "INetworkDefinition",
    ("parser.py", "layer"): "ILayer",
    ("parser.py", "layer.attention"): "IAttention",
    ("parser.py", "error"): "ParserError",
    ("parser.py", "registry"): "IPluginRegistry",
    ("builder.py", "cache"): "ITimingCache",
    ("loader.py", "runtime"): "Runtime",
    ("loader.py", "engine"): "ICudaEngine",
    ("loader.py", "config"): "IRuntimeConfig",
    ("loader.py", "opened.config"): "IRuntimeConfig",
    ("loader.py", "opened.cache"): "IRuntimeCache",
    ("loader.py", "self.cache"): "IRuntimeCache",
    ("loader.py", "graphs"): "CudaGraphStrategy",
    ("loader.py", "opened.engine"): "ICudaEngine",
    ("loader.py", "native"): "IExecutionContext",
    ("session.py", "engine"): "ICudaEngine",
    ("session.py", "self._opened.engine"): "ICudaEngine",
    ("session.py", "native"): "IExecutionContext",
    ("session.py", "context.native"): "IExecutionContext",
    ("session.py", "bound.context.native"): "IExecutionContext",
    ("loader.py", "built"): "ICudaEngine",
    ("loader.py", "serialization"): "ISerializationConfig",
    ("loader.py", "refitter"): "Refitter",
    ("loader.py", "parser"): "OnnxParserRefitter",
}
"""What variables stand for, by module."""
OURS = {"error": {"index", "name", "operator", "text"}, "layer": {"__class__"}, "engine": {"path"}}
"""Attributes that a variable of that name has where it is one of our own."""
RECLASSED = {"ILayer.attention": "IAttentionInputLayer.attention"}
"""The binding hands out the base class, and the code changes the class before it asks."""
CALLBACKS = {"allocate", "deallocate", "reallocate_output", "reallocate_output_async", "notify_shape", "reallocate"}
"""Methods that the library looks up by name in subclasses; the base classes show them in some flavours only."""
ONLY_WHERE = {
    "ComputeCapability": "targets",
    "IBuilderConfig.num_compute_capabilities": "targets",
    "IBuilderConfig.set_compute_capability": "targets",
    "LayerType.ATTENTION_INPUT": "attention_layers_since",
    "IAttentionInputLayer": "attention_layers_since",
    "IAttentionInputLayer.attention": "attention_layers_since",
    "IAttention.decomposable": "attention_layers_since",
    "CudaGraphStrategy": "runtime_cache",
    "CudaGraphStrategy.DISABLED": "runtime_cache",
    "CudaGraphStrategy.WHOLE_GRAPH_CAPTURE": "runtime_cache",
    "DynamicShapesKernelSpecializationStrategy": "runtime_cache",
    "DynamicShapesKernelSpecializationStrategy.EAGER": "runtime_cache",
    "IRuntimeCache.serialize": "runtime_cache",
    "IRuntimeCache.deserialize": "runtime_cache",
    "IRuntimeConfig.create_runtime_cache": "runtime_cache",
    "IRuntimeConfig.cuda_graph_strategy": "runtime_cache",
    "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy": "runtime_cache",
    "IRuntimeConfig.set_runtime_cache": "runtime_cache",
}
"""Names that some flavours or versions lack, and the field of the capability table that keeps the code from them."""


class Flavour(NamedTuple):
    name: versions.FlavourName
    version: str
    functions: frozenset[str]
    classes: Mapping[str, frozenset[str]]

    @property
    def known(self) -> Capabilities:
        return versions.capabilities(self.name, self.version)

    def has(self, name: str) -> bool:
        first, _, member = name.partition(".")
        return member in self.classes.get(first, ()) if member else first in (*self.classes, *self.functions)

    def uses(self, field: str) -> bool:
        if field == "attention_layers_since":
            return numbers(self.version) >= self.known.attention_layers_since
        return bool(getattr(self.known, field))


FLAVOURS = [
    Flavour(
        one["flavour"],
        one["version"],
        frozenset(one["functions"].split()),
        {name: frozenset(members.split()) for name, members in one["classes"].items()},
    )
    for one in NAMES
]


def used(file: str, tree: ast.Module) -> Iterator[str]:
    """Names as ``Class`` or ``Class.member``, of every access that the tables above know how to read."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            owner = ast.unparse(node.value).replace("self._trt", "trt")
            owner = "registry" if owner == "trt.get_plugin_registry()" else owner
            if owner == "trt" and not node.attr.startswith("__"):
                yield node.attr
            elif owner.startswith("trt.") and owner.count(".") == 1 and not node.attr.startswith("__"):
                yield f"{owner.removeprefix('trt.')}.{node.attr}"
            elif (file, owner) in CLASSES and node.attr not in OURS.get(owner, ()):
                name = f"{CLASSES[file, owner]}.{node.attr}"
                yield RECLASSED.get(name, name)
        elif isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base).removeprefix("trt.") for base in node.bases if "trt." in ast.unparse(base)]
            methods = [one.name for one in node.body if isinstance(one, ast.FunctionDef)]
            yield from (
                f"{base}.{method}" for base in bases for method in methods if method not in {"__init__", *CALLBACKS}
            )


def words(field: str) -> list[str]:
    """The words that an option may have, as the enumeration writes them."""
    kinds = get_args(BuildOptions.model_fields[field].annotation)
    return [str(word).upper() for kind in kinds for word in (get_args(kind) or (kind,)) if isinstance(word, str)]


def by_value() -> list[str]:
    """Members that are looked up by the value of an option."""
    return [
        *(f"TilingOptimizationLevel.{word}" for word in words("tiling")),
        *(f"HardwareCompatibilityLevel.{word}" for word in words("hardware_compatibility")),
    ]


def all_used() -> set[str]:
    return {name for path in SOURCES for name in used(path.name, ast.parse(path.read_text()))} | set(by_value())


def missing(flavour: Flavour, names: set[str]) -> list[str]:
    """Names that the flavour lacks where nothing keeps the code from them."""
    lacking = [name for name in names if not flavour.has(name)]
    return sorted(name for name in lacking if name not in ONLY_WHERE or flavour.uses(ONLY_WHERE[name]))


@pytest.mark.parametrize("flavour", FLAVOURS, ids=lambda one: f"{one.name}-{one.version}")
def test_every_name_exists_or_is_kept_from_the_flavour(flavour: Flavour) -> None:
    assert missing(flavour, all_used()) == []


def test_names_are_found_in_all_that_the_code_does() -> None:
    found = all_used()
    assert len(found) > 80
    assert {"OnnxParser.parse_from_file", "BuilderFlag.TF32", "IExecutionContext.execute_async_v3"} <= found
    assert {"TilingOptimizationLevel.FAST", "HardwareCompatibilityLevel.AMPERE_PLUS", "ILogger.log"} <= found


@pytest.mark.parametrize(
    ("file", "line", "name"),
    [
        ("builder.py", "config.set_memory_limit(1)", "IBuilderConfig.set_memory_limit"),
        ("builder.py", "x = trt.BuilderFlag.FP16", "BuilderFlag.FP16"),
        ("session.py", "native.execute_async_v2(0)", "IExecutionContext.execute_async_v2"),
        ("parser.py", "x = trt.OnnxParserRefiter", "OnnxParserRefiter"),
        ("loader.py", "engine.weight_streaming_budget = 1", "ICudaEngine.weight_streaming_budget"),
        ("build_log.py", "class L(trt.ILogger):\n def logg(self): ...", "ILogger.logg"),
    ],
)
def test_a_wrong_name_is_found(file: str, line: str, name: str) -> None:
    assert all(name in missing(flavour, set(used(file, ast.parse(line)))) for flavour in FLAVOURS[1:])


def test_the_table_of_exceptions_holds_no_name_that_is_everywhere() -> None:
    assert set(ONLY_WHERE) <= all_used()
    assert [name for name in ONLY_WHERE if all(flavour.has(name) for flavour in FLAVOURS)] == []
    assert set(ONLY_WHERE.values()) <= set(Capabilities.model_fields)


def test_every_target_is_a_member_of_the_flavours_enumeration() -> None:
    for flavour in FLAVOURS:
        wanted = {target.upper() for target in flavour.known.targets}
        assert wanted <= flavour.classes.get("ComputeCapability", frozenset())


def test_the_installed_module_has_the_names_too() -> None:
    for name in get_args(versions.FlavourName):
        found = versions.installed_version(name)
        if found is None:
            continue
        trt: Any = importlib.import_module(name)
        real = {one: frozenset(dir(getattr(trt, one))) for one in FLAVOURS[-1].classes if hasattr(trt, one)}
        functions = FLAVOURS[-1].functions & set(dir(trt))
        assert missing(Flavour(name, found, functions, real), all_used()) == []
