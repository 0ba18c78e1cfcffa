"""What the passes over ONNX graphs share: loading, naming, tidying, saving."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.pipeline.artifact import Effect
from enginesmith.pipeline.errors import InvalidGraph
from enginesmith.pipeline.onnx_file import MODULE_KEY

if TYPE_CHECKING:
    import onnx_ir as ir

FILE = "model.onnx"
EXTERNAL_DATA_BYTES = 128 << 20
"""Weights of more than this together lie beside the graph, so that writing them needs no second copy in memory."""
_DATA_FILE = "model.onnx.data"
_SCOPES_KEY = "pkg.torch.onnx.name_scopes"
_EXPORTER_KEYS = ("pkg.torch.", "pkg.onnxscript.", "namespace")
_INLINE_BYTES = 1024  # weights up to this size stay in the graph file, where shape inference sees them


def load(path: Path) -> "ir.Model":
    """The graph with its external weights mapped, not read.

    Raises:
        InvalidGraph: the file does not hold what its header says.
    """
    import onnx_ir as ir

    from enginesmith.pipeline import onnx_file

    try:
        model = ir.from_proto(onnx_file.read(path))
    except (ValueError, TypeError, KeyError) as error:
        raise InvalidGraph(f"{path} cannot be taken apart: {error}", "hold it against onnx.checker") from error
    ir.external_data.set_base_dir(model.graph, path.parent)
    return model


def save(model: "ir.Model", out: Path, external_data_bytes: int = EXTERNAL_DATA_BYTES) -> None:
    """Write ``model.onnx`` into a folder; weights of more bytes than that together go beside it."""
    import onnx_ir as ir

    external = weight_bytes(model) > external_data_bytes
    if not external:
        ir.external_data.load_to_model(model)  # what lay beside the file that was read has no file here
    ir.save(
        model,
        out / FILE,
        external_data=_DATA_FILE if external else None,
        size_threshold_bytes=_INLINE_BYTES,
    )


def pass_on(path: Path, out: Path, note: str) -> Effect:
    """Write the same graph with its weights, and say why it is the same."""
    from enginesmith.pipeline import onnx_file

    for name in onnx_file.external_files(path):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path.parent / name, out / name)
    shutil.copyfile(path, out / FILE)
    nodes = onnx_file.summary(path).nodes
    return Effect(file=FILE, summary=f"{nodes} nodes, unchanged", notes=(note,), signature=onnx_file.signature(path))


def weight_bytes(model: "ir.Model") -> int:
    """Bytes of all initialisers, subgraphs included."""
    values = (value for graph in model.graphs() for value in graph.initializers.values())
    return sum(value.const_value.nbytes for value in values if value.const_value is not None)


def node_count(model: "ir.Model") -> int:
    """Nodes of the graph, its subgraphs and its functions."""
    import onnx_ir as ir

    return sum(1 for body in _bodies(model) for _ in ir.traversal.RecursiveGraphIterator(body))


def _bodies(model: "ir.Model") -> list["ir.Graph | ir.Function"]:
    return [model.graph, *model.functions.values()]


def rename(values: Iterable["ir.Value"], names: Iterable[str]) -> None:
    """Give inputs or outputs their names."""
    for value, name in zip(values, names, strict=True):
        value.name = name


def tidy(model: "ir.Model", wrapper: str = "") -> None:
    """Keep of all that exporters note about nodes the path of each one's module: no machine paths, no source text.

    ``wrapper`` is the attribute by which a wrapper around the user's module holds it; paths start below it.
    """
    import onnx_ir as ir

    for body in _bodies(model):
        for node in ir.traversal.RecursiveGraphIterator(body):
            if module := _module_path(node, wrapper):
                node.metadata_props[MODULE_KEY] = module
            _strip(node)
            for value in node.outputs:
                _strip(value)
        for value in body.inputs:
            _strip(value)
    for graph in model.graphs():
        _strip(graph)
        for value in graph.initializers.values():
            _strip(value)


def _strip(holder: "ir.Node | ir.Value | ir.Graph") -> None:
    holder.doc_string = None
    for key in [key for key in holder.metadata_props if key.startswith(_EXPORTER_KEYS)]:
        del holder.metadata_props[key]


def _module_path(node: "ir.Node", wrapper: str) -> str:
    """Dotted path of the module that a node came from, as the exporters noted it; empty if they did not."""
    import ast

    known = node.metadata_props.get(MODULE_KEY)
    if known is not None:
        return known
    path = ""
    if scopes := node.metadata_props.get(_SCOPES_KEY):
        path = ["", *ast.literal_eval(scopes)[:-1]][-1]
    elif node.name and node.name.startswith("/"):
        path = _joined(node.name.strip("/").split("/")[:-1])
    return "" if path == wrapper else path.removeprefix(f"{wrapper}.") if wrapper else path


def _joined(scopes: list[str]) -> str:
    """The TorchScript exporter's ``layer1/layer1.0/conv1`` as ``layer1.0.conv1``."""
    parts: list[str] = []
    for scope in scopes:
        if parts and scope.startswith(f"{parts[-1]}."):
            parts.pop()
        parts.append(scope)
    return ".".join(parts)
