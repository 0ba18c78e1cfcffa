"""Find the names of TensorRT that the code uses, and tell which a flavour lacks."""

import ast
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple, get_args

from enginesmith.pipeline import engines
from enginesmith.pipeline.engines.tensorrt import versions
from enginesmith.pipeline.engines.tensorrt.options import BuildOptions
from enginesmith.pipeline.engines.tensorrt.versions import Capabilities
from enginesmith.pipeline.system.software import numbers

NAMES = json.loads((Path(__file__).parent / "tensorrt_api_names.json").read_text())
HERE = Path(engines.__file__).parent
SOURCES = sorted((HERE / "tensorrt").glob("*.py"))

CLASSES = {
    (file, variable): kind
    for file, pairs in (
        ("builder.py", "builder=Builder config=IBuilderConfig network=INetworkDefinition profile=IOptimizationProfile"),
        ("builder.py", "tensor=ITensor pools=MemoryPoolType flags=BuilderFlag cache=ITimingCache"),
        ("parser.py", "parser=OnnxParser network=INetworkDefinition layer=ILayer layer.attention=IAttention"),
        ("parser.py", "error=ParserError registry=IPluginRegistry"),
        ("loader.py", "runtime=Runtime engine=ICudaEngine config=IRuntimeConfig opened.config=IRuntimeConfig"),
        ("loader.py", "opened.cache=IRuntimeCache self.cache=IRuntimeCache graphs=CudaGraphStrategy"),
        ("loader.py", "opened.engine=ICudaEngine native=IExecutionContext built=ICudaEngine"),
        ("loader.py", "serialization=ISerializationConfig refitter=Refitter parser=OnnxParserRefitter"),
        ("session.py", "engine=ICudaEngine self._opened.engine=ICudaEngine native=IExecutionContext"),
        ("session.py", "context.native=IExecutionContext bound.context.native=IExecutionContext"),
    )
    for variable, kind in (pair.split("=") for pair in pairs.split())
}
"""What variables stand for, by module."""
OURS = {"error": {"index", "name", "operator", "text"}, "layer": {"__class__"}, "engine": {"path"}}
"""Attributes that a variable of that name has where it is one of our own."""
RECLASSED = {"ILayer.attention": "IAttentionInputLayer.attention"}
"""The binding hands out the base class, and the code changes the class before it asks."""
CALLBACKS = {"allocate", "deallocate", "reallocate_output", "reallocate_output_async", "notify_shape", "reallocate"}
"""Methods that the library looks up by name in subclasses; the base classes show them in some flavours only."""
ONLY_WHERE = {
    name: field
    for field, names in (
        ("targets", "ComputeCapability IBuilderConfig.num_compute_capabilities"),
        ("targets", "IBuilderConfig.set_compute_capability"),
        ("attention_layers_since", "LayerType.ATTENTION_INPUT IAttentionInputLayer"),
        ("attention_layers_since", "IAttentionInputLayer.attention IAttention.decomposable"),
        ("runtime_cache", "CudaGraphStrategy CudaGraphStrategy.DISABLED"),
        ("runtime_cache", "CudaGraphStrategy.WHOLE_GRAPH_CAPTURE DynamicShapesKernelSpecializationStrategy"),
        ("runtime_cache", "DynamicShapesKernelSpecializationStrategy.EAGER IRuntimeCache.serialize"),
        ("runtime_cache", "IRuntimeCache.deserialize IRuntimeConfig.create_runtime_cache"),
        ("runtime_cache", "IRuntimeConfig.cuda_graph_strategy"),
        ("runtime_cache", "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy"),
        ("runtime_cache", "IRuntimeConfig.set_runtime_cache"),
    )
    for name in names.split()
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
            yield from (f"{base}.{name}" for base in bases for name in methods if name not in {"__init__", *CALLBACKS})


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
