"""Which modules the nodes of an optimised graph do the work of.

ONNX Runtime drops the metadata of nodes when it optimises, and names what it fuses as it likes; the values between
nodes mostly keep their names. So a node of the optimised graph stands for those nodes of the graph it was made from
that lie between what it reads and what it writes.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.pipeline import onnx_file
from enginesmith.pipeline.engines.profiling import NODE, Origin
from enginesmith.pipeline.precision.audit.costs import is_product
from enginesmith.pipeline.precision.audit.foreign import attributes
from enginesmith.pipeline.precision.audit.structure import CONVERTERS

if TYPE_CHECKING:
    import onnx

_NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
"""torch's word for operators that it made up outside of any module: sizes of inputs."""
_MEMCPY = ("MemcpyToHost", "MemcpyFromHost")
_LAYOUT = ("ReorderInput", "ReorderOutput", "Transpose", "Cast", "Identity", *_MEMCPY)
"""What engines insert without the graph asking for it; the value stays the same."""
_BLOCKED = "_nchwc"
"""Ends the names of ONNX Runtime's convolutions and pools on blocked channels, which begin with the value's name."""
_COPY = re.compile(r"_token_\d+$")
"""What ONNX Runtime puts behind the name of a node that it made anew."""
_CLAMPS = ("Relu", "Clip")
"""Activations that quantising does by itself."""
_SUM = 3
"""Input of a blocked convolution that is added to its result."""
_WRAPPER = "model."
"""What names of parameters start with when the exporter saw the module within a wrapper."""


@dataclass
class Provenance:
    """The graph that an engine was built from: makers, readers and modules of its nodes."""

    nodes: "list[onnx.NodeProto]"
    constants: frozenset[str]
    _makers: "dict[str, onnx.NodeProto]" = field(init=False)
    _readers: "dict[str, list[onnx.NodeProto]]" = field(init=False)
    _named: "dict[str, onnx.NodeProto]" = field(init=False)
    _places: dict[str, int] = field(init=False)
    _modules: dict[str, str] = field(init=False)
    """By name of a node's first output."""

    def __post_init__(self) -> None:
        self._makers = {output: node for node in self.nodes for output in node.output if output}
        self._named = {node.name: node for node in self.nodes if node.name}
        self._places = {node.name: place for place, node in enumerate(self.nodes) if node.name}
        self._readers = {}
        for node in self.nodes:
            for value in node.input:
                self._readers.setdefault(value, []).append(node)
        noted = {_key(node): found for node in self.nodes if (found := _noted(node)) is not None}
        self._modules = {_key(node): self._module(node, noted) for node in self.nodes}

    @classmethod
    def read(cls, path: Path) -> "Provenance":
        """Of an ONNX file.

        Raises:
            InvalidGraph: it cannot be read.
        """
        model = onnx_file.skeleton(path)
        constants = {tensor.name for tensor in model.graph.initializer}
        return cls(list(onnx_file.nodes(model)), frozenset(constants))

    def _module(self, node: "onnx.NodeProto", noted: Mapping[str, str]) -> str:
        """A node's module: as noted; for conversions between modules the one that wrote the value, else its reader."""
        own = noted.get(_key(node))
        if own is not None:
            return own
        if not noted:
            return f"{NODE}{node.name or _key(node)}"
        if node.op_type not in (*CONVERTERS, "Cast"):
            return ""
        near = [self._makers.get(node.input[0]), *self._readers.get(node.output[0], ())]
        return next((noted[_key(one)] for one in near if one is not None and _key(one) in noted), "")

    def named(self, names: Iterable[str], *, light: bool = False) -> Origin:
        """Where the work of a kernel comes from, of an engine that tells which nodes are in it; unknown for none.

        A ``light`` kernel multiplies nothing: products that it names are what it prepares or finishes.
        """
        places = {self._places[name] for name in names if name in self._places}
        covered = [self.nodes[place] for place in sorted(places, reverse=True)]
        others = [node for node in covered if not is_product(node)]
        if not light or not others:
            return self._origin(covered)
        if all(node.op_type in CONVERTERS for node in others):
            return self._origin(covered).model_copy(update={"converts": True, "multiplies": False})
        return self._origin(others)

    def of_executed(self, path: Path) -> dict[str, Origin]:
        """Where the work of each node of an optimised file comes from, by the node's name.

        Raises:
            InvalidGraph: it cannot be read.
        """
        executed = list(onnx_file.nodes(onnx_file.skeleton(path)))
        same = self._aliases(executed)
        cuts = {same[output] for node in executed for output in node.output if output in same}
        found = {node.name: self._of_node(node, same, cuts) for node in executed}
        return self._of_readers(executed, found)

    def _of_readers(self, executed: "list[onnx.NodeProto]", found: Mapping[str, Origin]) -> dict[str, Origin]:
        """What the engine put in front of a single module belongs to it."""
        readers: dict[str, set[tuple[str, ...]]] = {}
        known = dict(found)
        for node in reversed(executed):
            beyond = set[tuple[str, ...]]().union(*(readers.get(output, set()) for output in node.output))
            if not known[node.name].modules and len(beyond) == 1:
                known[node.name] = Origin(modules=next(iter(beyond)))
            for value in node.input:
                readers.setdefault(value, set()).add(known[node.name].modules)
        return known

    def _of_node(self, node: "onnx.NodeProto", same: Mapping[str, str], cuts: set[str]) -> Origin:
        targets = {same[output] for output in node.output if output in same}
        inputs = {same.get(value, value) for value in node.input}
        if targets and targets <= inputs:  # it hands on what it was given, in another layout
            maker = next((self._makers[value] for value in targets if value in self._makers), None)
            return Origin(modules=(self._modules[_key(maker)],) if maker is not None else (), converts=True)
        return self._origin(list(self._between(targets, cuts | inputs)))

    def _between(self, targets: set[str], cuts: set[str]) -> "Iterator[onnx.NodeProto]":
        """Nodes that lead to the targets, back to where other nodes of the engine end; the last ones first."""
        waiting, seen = [value for value in targets if value in self._makers], set[str]()
        while waiting:
            node = self._makers[waiting.pop(0)]
            if _key(node) in seen:
                continue
            seen.add(_key(node))
            yield node
            waiting += [value for value in node.input if value in self._makers and value not in cuts]

    def _origin(self, covered: "list[onnx.NodeProto]") -> Origin:
        """The modules of the products among the nodes, else of the last one; the others are fused into it."""
        if not covered:
            return Origin()
        products = [node for node in covered if is_product(node)]
        main = products or covered[:1]
        modules = tuple(dict.fromkeys(path for node in reversed(main) for path in self._paths(node)))
        also: dict[str, dict[str, None]] = {}
        for node in covered:
            path = self._modules[_key(node)]
            if path not in modules and node.op_type not in (*CONVERTERS, "Constant"):
                also.setdefault(path, {})[node.op_type] = None
        converts = all(node.op_type in CONVERTERS for node in covered)
        fused = {path: tuple(found) for path, found in also.items()}
        return Origin(modules=modules, also=fused, multiplies=bool(products), converts=converts)

    def _paths(self, node: "onnx.NodeProto") -> Iterator[str]:
        """A node's module, after the one beside it whose weight it has: a BatchNorm is folded into its convolution."""
        path = self._modules[_key(node)]
        parent = path.rpartition(".")[0]
        for value in node.input:
            while value in self._makers and self._makers[value].op_type in CONVERTERS:
                value = self._makers[value].input[0]
            holder = value.removeprefix(_WRAPPER).rpartition(".")[0]
            if value in self.constants and holder and holder.rpartition(".")[0] == parent and NODE not in path:
                yield holder
        yield path

    def _aliases(self, executed: "list[onnx.NodeProto]") -> dict[str, str]:
        """What values of the optimised graph are called in this one."""
        known = {*self._makers, *self.constants}
        same = {value: value for node in executed for value in (*node.input, *node.output) if value in known}
        for node in reversed(executed):  # a value in another layout is known by what is made of it
            if node.op_type in _LAYOUT and node.output[0] in same:
                same.setdefault(node.input[0], same[node.output[0]])
        for node in executed:
            self._follow(node, same)
        return same

    def _follow(self, node: "onnx.NodeProto", same: dict[str, str]) -> None:
        """Find out what a node's output is called here, from its name or from what it was made of."""
        if not node.output or node.output[0] in same:
            return
        value = node.name.partition(_BLOCKED)[0]
        if node.op_type in _LAYOUT and node.input[0] in same:
            same[node.output[0]] = same[node.input[0]]
        elif _BLOCKED in node.name and value in self._makers:
            same[node.output[0]] = self._behind_fused(node, value)
        elif (found := self._named.get(_COPY.sub("", node.name))) is not None:
            same[node.output[0]] = self._quantised(found.output[0], same)

    def _quantised(self, value: str, same: Mapping[str, str]) -> str:
        """What a value becomes when it is quantised, where no node of the engine does that by itself."""
        behind, steps = value, self._readers.get(value, ())
        for operators in (_CLAMPS, ("QuantizeLinear",)):
            following = next((one for one in steps if one.op_type in operators and one.output[0] not in same), None)
            if following is not None:
                behind, steps = following.output[0], self._readers.get(following.output[0], ())
        return behind if self._makers[behind].op_type == "QuantizeLinear" else value

    def _behind_fused(self, node: "onnx.NodeProto", value: str) -> str:
        """The value after the sum and the activation that a blocked convolution took in, and keeps its name."""
        wanted = ["Add", "Sum"] if len(node.input) > _SUM and node.input[_SUM] else []
        activation = attributes(node).get("activation", b"")
        for operators in filter(None, (tuple(wanted), (activation.decode(),) if activation else ())):
            if self._makers[value].op_type in operators:
                continue
            following = next((one for one in self._readers.get(value, ()) if one.op_type in operators), None)
            value = following.output[0] if following is not None else value
        return value


def _key(node: "onnx.NodeProto") -> str:
    return next(iter(node.output), node.name)


def _noted(node: "onnx.NodeProto") -> str | None:
    found = next((entry.value for entry in node.metadata_props if entry.key == onnx_file.MODULE_KEY), None)
    return "" if found == _NO_MODULE else found
