"""Names that nothing in a graph has yet."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnx_ir as ir


class Names:
    """Those of the values and nodes of a graph and of all bodies in it."""

    def __init__(self, graph: "ir.Graph") -> None:
        self._taken: set[str | None] = set()
        for body in (graph, *graph.subgraphs()):
            self._taken |= {value.name for value in body.inputs} | set(body.initializers)
            self._taken |= {node.name for node in body} | {value.name for node in body for value in node.outputs}

    def new(self, wanted: str) -> str:
        """The name that is wanted, with a number behind it if it is taken; it is taken from now on."""
        found, count = wanted, 1
        while found in self._taken:
            count += 1
            found = f"{wanted}_{count}"
        self._taken.add(found)
        return found
