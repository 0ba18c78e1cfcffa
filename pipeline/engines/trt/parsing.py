"""From an ONNX file to a TensorRT network; what the parser refuses becomes one message that names the nodes."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginesmith.pipeline import onnx_file
from enginesmith.pipeline.engines.trt.flavours import Capabilities, numbers
from enginesmith.pipeline.engines.trt.graph_check import node_name
from enginesmith.pipeline.errors import UnsupportedGraph, UsageError

if TYPE_CHECKING:
    import onnx

_SHOWN = 4
_WHY: Mapping[str, tuple[str, str]] = {
    "Plugin not found": ("no importer and no plugin has this operator", "load its library: --plugins FILE.so"),
    "Non-zero zero point": ("its zero point is not 0", "quantise symmetrically: int8 with zero point 0"),
    "input has type Int32 but must have type": ("it dequantises int32", "leave biases in float: do not quantise them"),
    "must have same input types": ("its inputs differ in type", "cast one of them: TensorRT converts nothing itself"),
    "convertDtype": ("TensorRT does not have its element type", "convert it to float32, float16 or int64"),
    "more output tensors than TRT expected": ("it has fewer outputs than the operator", "export the model again"),
}
"""Words of the parser → what they mean, and what to do."""
_OTHER_FORMATS = ("QLinear", "DynamicQuantize", "MatMulInteger", "ConvInteger", "MatMulNBits", "MatMulBnb4")
_NOISE = re.compile(
    r"Error Code \d+: |API Usage Error |Internal Error |\(?\bIn \w+ at /\S+\)?|Assertion failed: |Invalid Node - \S+"
)
_QDQ = "quantise in the Q/DQ format: QuantizeLinear and DequantizeLinear around ordinary operators"
_WORKS_WITH = "replace the operator in the model, or export it with another opset"
_FAULT = "look at the node's inputs and attributes; export the model again"
_A_VALUE = "an input or output"


def parse(trt: Any, network: Any, logger: Any, path: Path, known: Capabilities) -> None:
    """Fill ``network`` with the graph.

    Raises:
        UnsupportedGraph: the parser refuses nodes; they are named, with the PyTorch modules that they come from.
    """
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(str(path)):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        raise _refusal([_Refused(error) for error in errors], path)
    if not network.num_layers or not network.num_outputs:
        raise UnsupportedGraph(f"TensorRT finds no layer or no output in {path.name}", "export the model again")
    if numbers(trt.__version__) >= known.attention_layers_since:
        _let_attention_decompose(trt, network)


def load_plugins(trt: Any, paths: tuple[str, ...], logger: Any, known: Capabilities) -> None:
    """Load the plugins that come along, and libraries of others, which runs their code: only those that were named.

    Raises:
        UsageError: there is no such file, or it is no library of plugins.
    """
    if known.standard_plugins:
        trt.init_libnvinfer_plugins(logger, "")
    for text in paths:
        if not Path(text).is_file():
            raise UsageError(f"there is no plugin library {text}", "give the path of an .so file")
        registry = trt.get_plugin_registry()
        if registry.load_library(str(Path(text).absolute())) is None:  # a bare name is looked for in system folders
            raise UsageError(
                f"{text} is no library of TensorRT plugins, or lacks libraries that it needs",
                f"build it for TensorRT {trt.__version__}; `ldd {text}` lists what it needs",
            )


class _Refused:
    """One error of the parser, as plain values."""

    def __init__(self, error: Any) -> None:
        self.index: int = error.node()
        self.operator: str = error.node_operator()
        self.name: str = error.node_name()
        self.code: str = error.code().name
        self.text: str = error.desc()


def _refusal(errors: list[_Refused], path: Path) -> UnsupportedGraph:
    model = onnx_file.read(path)
    first = next((error for error in errors if error.operator), errors[0] if errors else None)
    if first is None:
        return UnsupportedGraph(f"TensorRT's parser refuses {path.name} without a reason", _FAULT)
    ordered = [first, *(error for error in errors if error is not first)]
    said = list(dict.fromkeys(_said(error, model) for error in ordered))
    more = f"; and {len(said) - _SHOWN} more" if len(said) > _SHOWN else ""
    remedy = _reason(first, _node(first, model))[1]
    return UnsupportedGraph(f"TensorRT's parser refuses {'; '.join(said[:_SHOWN])}{more}", remedy)


def _said(error: _Refused, model: "onnx.ModelProto") -> str:
    node = _node(error, model)
    place = node_name(node) if node is not None else f"{error.operator} {error.name!r}" if error.operator else _A_VALUE
    return f"{place}: {_reason(error, node)[0]}"


def _node(error: _Refused, model: "onnx.ModelProto") -> "onnx.NodeProto | None":
    nodes = model.graph.node
    if 0 <= error.index < len(nodes) and nodes[error.index].op_type == error.operator:
        found: onnx.NodeProto = nodes[error.index]
        return found
    return next((node for node in onnx_file.nodes(model) if error.name and node.name == error.name), None)


def _reason(error: _Refused, node: "onnx.NodeProto | None") -> tuple[str, str]:
    standard = node is not None and node.domain in ("", "ai.onnx")
    lacking = error.code == "UNSUPPORTED_NODE" and error.text in ("false", "")
    if lacking or (standard and ("Plugin not found" in error.text or "plugin creator" in error.text)):
        quantised = error.operator.startswith(_OTHER_FORMATS)
        return "TensorRT does not have this operator", _QDQ if quantised else _WORKS_WITH
    for words, found in _WHY.items():
        if words in error.text:
            return found
    quoted = re.search(r'&& "([^"]+)"', error.text)
    lines = [line for line in error.text.splitlines() if "catchCudaError" not in line]
    return plain(quoted[1] if quoted else " ".join(lines)) or error.code, _FAULT


def plain(text: str) -> str:
    """A message of TensorRT without source lines, conditions and error numbers."""
    text = text.rpartition("): ")[2] if "||" in text else text
    return " ".join(_NOISE.sub(" ", text).split()).strip(" .()")


def _let_attention_decompose(trt: Any, network: Any) -> None:
    """Let attention without a fused kernel (fp32, say) be built from several; a fused one is still taken first."""
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # the binding hands out the base class
            layer.attention.decomposable = True
