"""Open, feed and free sessions of OpenVINO on the CPU. Feeds are bound once; a call moves nothing.

With OpenVINO 2026.4 and one thread, MiniLM opens in 1.4 s from OpenVINO's files and in 2.6 s from ONNX, and takes 40
instead of 126 MB beside its mapped weights: so engines are these files.
"""

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from enginesmith.pipeline.engines.base import UNKNOWN_OPERATOR, Session, refuse_closed
from enginesmith.pipeline.engines.openvino import fourier, rewrites
from enginesmith.pipeline.engines.telemetry import import_without_telemetry
from enginesmith.pipeline.errors import EnginesmithError, InvalidGraph, ModelError, UnsupportedGraph
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.system.oom import out_of_memory, says_out_of_memory
from enginesmith.pipeline.tensors import Array, Feeds, Signature

if TYPE_CHECKING:
    import onnx
    import openvino

FloatType = Literal["f32", "f16", "bf16"]
"""OpenVINO's words for the types that floating-point layers may compute in."""
_UNSUPPORTED = ("OpConversionFailure", "NotImplementedFailure", "not supported", "Unsupported", "Cannot create")
"""Words of OpenVINO about operators that it does not know."""
_PRODUCTS = ("MatMul", "Einsum")
_WITHOUT_SNIPPETS = {"SNIPPETS_MODE": "DISABLE"}


def load_openvino() -> Any:
    """Import OpenVINO; nothing is reported to Intel."""
    return import_without_telemetry("openvino")


@functools.cache
def core() -> "openvino.Core":
    """Open the library's registry of devices, which loads what it needs for the CPU; one for the process."""
    return load_openvino().Core()


def computes_in_bf16() -> bool:
    """Tell whether this processor has instructions for bf16; else OpenVINO computes in float32 without a word."""
    return "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


THREADS = "INFERENCE_NUM_THREADS"
"""Option that is tuned."""


def compile_options(threads: int, hint: FloatType) -> dict[str, Any]:
    """List options of a compiled model: for the latency of one call, on that many threads, computed as written.

    Threads are not pinned: a process in a container would pin them to cores that others use, too. Hyper-threads count
    as cores, because OpenVINO else takes fewer threads than it is told to. Products whose weights are compressed do not
    quantize their activations, which no graph asks for.
    """
    return {
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        THREADS: threads,
        "INFERENCE_PRECISION_HINT": hint,
        "ENABLE_CPU_PINNING": False,
        "ENABLE_HYPER_THREADING": True,
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    }


def read_graph(path: Path, source: "onnx.ModelProto | None" = None) -> "openvino.Model":
    """Read an ONNX graph, of which ``source`` is the skeleton, or a file of OpenVINO.

    Raises:
        InvalidGraph: it cannot be read.
        UnsupportedGraph: OpenVINO does not know an operator.
    """
    registry = core()
    if source is not None and fourier.has_transforms(source):
        registry = load_openvino().Core()
        fourier.translate_transforms(registry, source)
    try:
        graph = registry.read_model(path)
    except (RuntimeError, MemoryError) as error:
        raise _load_error(error, path.name) from error
    rewrites.correct(graph)
    return graph


def _name_type(value: Array) -> Array:
    """View an array as the type of the same numbers that OpenVINO knows: not ``longlong``, which also is int64."""
    return value if value.dtype.char not in "qQ" else value.view(value.dtype.name)


AS_WRITTEN = "enginesmith_types"
"""Name of what a model says of itself whose types OpenVINO is to keep."""
_FLOAT32_MARK = "precise_0"
"""Attribute of nodes that are not computed in a lower type; it has an effect once it was written to a file and read."""


def mark_float32(graph: "openvino.Model", nodes: Iterable["onnx.NodeProto"]) -> None:
    """Mark what OpenVINO makes of these nodes of the ONNX graph: it computes in float32 whatever type is chosen.

    OpenVINO 2026.4.1 else computes all of a graph in float16, also what the graph has in float32 between casts. In
    bfloat16, it heeds the mark for convolutions, and not for products of matrices.
    """
    makers = (node for node in graph.get_ordered_ops() if node.get_type_name() != "Result")
    made_by = {name: node for node in makers for value in node.outputs() for name in value.get_names()}
    for source in nodes:
        waiting = [made_by[name] for name in source.output if name in made_by]
        values = [value for node in waiting for value in node.outputs()]
        readers = [target.get_node() for value in values for target in value.get_target_inputs()]
        waiting += [reader for reader in readers if reader.get_type_name() == "Result"]  # else answers are cast
        seen = set[str]()
        for node in waiting:
            if node.get_name() not in seen:
                seen.add(node.get_name())
                node.get_rt_info()[_FLOAT32_MARK] = ""
                before = (node.input_value(index) for index in range(node.get_input_size()))
                # what has no name of the graph is a part of the same ONNX node: a convolution without its bias
                waiting += [value.get_node() for value in before if not value.get_names()]


def choose_hint(graph: "openvino.Model", floats: FloatType) -> FloatType:
    """Choose the type that OpenVINO casts layers to, to compute a graph in ``floats``.

    One that :func:`mark_written` has marked is computed as it is written: with f32, what is in bfloat16 stays, as what
    is in float16 would not.
    """
    return "f32" if floats == "bf16" and graph.has_rt_info([AS_WRITTEN]) else floats


def mark_written(graph: "openvino.Model") -> None:
    """Mark a graph in bfloat16 with parts in float32, which OpenVINO would cast as well; the mark is saved with it."""
    graph.set_rt_info("", [AS_WRITTEN])


def compile_graph(graph: "openvino.Model", name: str, device: Device, floats: FloatType, **more: Any) -> Any:
    """Compile a graph for this processor; errors name ``name``, and are those of :func:`read_graph`."""
    hint = choose_hint(graph, floats)
    options = {**compile_options(device.thread_count, hint), **find_workarounds(graph), **more}
    try:
        return core().compile_model(graph, "CPU", options)
    except (RuntimeError, MemoryError) as error:
        raise _load_error(error, name) from error


def find_workarounds(graph: "openvino.Model", *, fixed: bool = False) -> dict[str, str]:
    """List the options that keep OpenVINO from computing a graph wrongly; ``fixed``: its sizes are still to be fixed.

    Since 2025.3, it generates one piece of code for matrix products of two dimensions that follow each other, where
    their sizes are fixed: on one thread always, on more for some batches. In int8, that code may read beyond its
    inputs; in floats, making it may end the process (docs/precision.md). Bodies of branches and loops may have such
    products, too.
    """
    fixed = fixed or not graph.is_dynamic()
    behind = set[str]()
    for node in graph.get_ordered_ops():
        sources = {node.input_value(at).get_node().get_name() for at in range(node.get_input_size())}
        follows = not behind.isdisjoint(sources)
        if fixed and node.get_type_name() in rewrites.WITH_BODIES:
            return _WITHOUT_SNIPPETS
        product = node.get_type_name() in _PRODUCTS and _is_matrix(node.get_output_partial_shape(0), fixed)
        if product and follows:
            return _WITHOUT_SNIPPETS
        if product or follows:
            behind.add(node.get_name())
    return {}


def _is_matrix(shape: "openvino.PartialShape", fixed: bool) -> bool:
    return shape.rank.is_static and len(shape) == 2 and (fixed or shape.is_static)


def _load_error(error: Exception, file: str) -> EnginesmithError:
    text = _read_message(error)
    if isinstance(error, MemoryError) or says_out_of_memory(str(error)):
        return out_of_memory(text, f"memory ran out while OpenVINO loaded {file}: {text}", "use a larger machine")
    if any(words in str(error) for words in _UNSUPPORTED):
        remedy = UNKNOWN_OPERATOR.format("openvino")
        return UnsupportedGraph(f"OpenVINO does not support what is in {file}: {text}", remedy)
    return InvalidGraph(f"OpenVINO cannot load {file}: {text}", "export the model again")


def _read_message(error: Exception) -> str:
    """Take the last line, which says what happened; those above it say where in OpenVINO's source."""
    lines = [line.strip().removeprefix("-- ") for line in str(error).splitlines()]
    return next(filter(None, reversed(lines)), type(error).__name__)


def has_only_a_batch(signature: Signature) -> bool:
    """Tell whether the batch is all that is dynamic in the inputs."""
    dynamic = [spec for spec in signature.inputs if spec.symbols]
    one_word = len({word for spec in dynamic for word in spec.symbols}) == 1
    return one_word and all(spec.symbols == (spec.shape[spec.batch_axis],) for spec in dynamic)


def read_with_batch(path: Path, signature: Signature, batch: int) -> "openvino.Model":
    """Read a graph that is dynamic in the batch alone for one size of it; as it is where it takes no such size."""
    graph = read_graph(path)
    shapes = {
        at: [batch if isinstance(size, str) else size for size in spec.shape]
        for at, spec in enumerate(signature.inputs)
        if spec.symbols
    }
    try:
        graph.reshape(shapes)
    except RuntimeError:
        return read_graph(path)
    return graph


_failed_silently: list[Any] = []
"""Models in which a call failed on one thread. Once they are freed, calls of other models may end the process."""


class Compiled:
    """Compile a graph when a size is first asked for: apart for each of the batch sizes given, once for all others.

    With fixed sizes, OpenVINO chooses faster layouts and kernels: a detector of text took 0.84 times as long.
    """

    def __init__(self, compile_for: Callable[[int | None, bool], Any], batches: Collection[int]) -> None:
        """``compile_for`` is given a batch size, and True where it has to compile for two threads at least."""
        self.batches = frozenset(batches)
        self._compile_for, self._compiled, self._lock = compile_for, dict[int | None, Any](), threading.Lock()
        self._twofold = False

    def find(self, batch: int | None) -> Any:
        """Return the compiled model for a batch size; None is for all others."""
        with self._lock:
            if batch not in self._compiled:
                self._compiled[batch] = self._compile_for(batch, self._twofold)
            return self._compiled[batch]

    def discard(self, compiled: Any, *, silent: bool = False) -> None:
        """Have what a call failed in compiled anew when it is next asked for.

        OpenVINO 2026.4.1 keeps the sizes of values up to the operator that failed, as one does whose mask is shorter
        than its data. The next calls then fail, too, or have answers of other sizes, also in new requests. On one
        thread a call fails in ``silent``: its outputs are those of an earlier one. From then on, there are two.
        """
        with self._lock:
            self._twofold |= silent
            _failed_silently.extend([compiled] if silent else [])
            self._compiled = {batch: each for batch, each in self._compiled.items() if each is not compiled}

    def release_memory(self) -> None:
        """Free the buffers of layers, which the next call allocates again."""
        with self._lock:
            for compiled in self._compiled.values():
                compiled.release_memory()


_CHECK_INPUT = "check that the model takes this shape and these values"
_LONG = ("int64", "uint64", "uint32")
_INT32 = np.iinfo(np.int32)
_LARGE_BYTES = 1 << 18
"""Size from which an output is not copied for a caller, but written into an array of its own."""


@dataclass(frozen=True)
class Bound:
    """Keep tensors with the arrays that they point into."""

    tensors: tuple[Any, ...]
    arrays: tuple[Array, ...]


class OpenVINOSession(Session):
    """Run compiled models with infer requests of its own; inputs stay where the caller's arrays are."""

    def __init__(self, models: Compiled, signature: Signature) -> None:
        """Keep what is compiled by the first calls; inputs and outputs are in the order of the graph's."""
        self.signature = signature
        self._models: Compiled | None = models
        self._requests: dict[int | None, Any] = {}
        self._of: dict[int | None, Any] = {}
        """The compiled models that these requests are of, by batch size."""
        self._silent: dict[int | None, bool] = {}
        """By batch size: True where a call may fail without an error."""
        self._emptied: dict[int | None, list[list[int]]] = {}
        """For each batch size, shapes of all outputs without elements, where a call that fails leaves them empty."""
        self._large: dict[int | None, dict[int, Any]] = {}
        """For each batch size, the tensors of its request that large outputs are written into, by position."""
        self._lent = set[int | None]()
        """Batch sizes whose requests write large outputs into arrays that a caller has."""
        self._batch: int | None = None
        """The batch size that the last call's model was compiled for."""
        batched = ((at, spec.batch_axis) for at, spec in enumerate(signature.inputs) if spec.symbols)
        self._batch_place = next(batched, (0, 0))
        """The input that has the batch, and its dimension there."""
        self._long = [(at, spec.name) for at, spec in enumerate(signature.inputs) if spec.dtype in _LONG]
        self._set: Bound | None = None
        self._tensor, self._outputs = load_openvino().Tensor, range(len(signature.outputs))

    @property
    def sibling_note(self) -> str:
        return "it waits while another session on the same weights runs: there is one stream"

    @property
    def compiled(self) -> Any:
        """The compiled model of the last call."""
        return self._opened().find(self._batch)

    @property
    def request(self) -> Any:
        """The infer request of the last call."""
        compiled = self.compiled
        if self._of.get(self._batch) is not compiled:
            self._requests[self._batch] = request = compiled.create_infer_request()
            self._of[self._batch] = compiled
            dynamic = any(each.partial_shape.is_dynamic for each in (*compiled.inputs, *compiled.outputs))
            self._silent[self._batch] = silent = dynamic and compiled.get_property(THREADS) == 1
            shapes = [[*request.get_output_tensor(at).shape] for at in self._outputs if silent]
            self._emptied[self._batch] = shapes if all(0 in shape for shape in shapes) else []
            self._lent.discard(self._batch)
            self._set = None
            static = (at for at in self._outputs if compiled.outputs[at].partial_shape.is_static)
            tensors = {at: request.get_output_tensor(at) for at in static}
            self._large[self._batch] = {at: each for at, each in tensors.items() if each.byte_size >= _LARGE_BYTES}
        return self._requests[self._batch]

    def _opened(self) -> Compiled:
        if self._models is None:
            refuse_closed()
        return self._models

    def sibling(self) -> "OpenVINOSession":
        return OpenVINOSession(self._opened(), self.signature)

    def bind(self, feeds: Feeds) -> Bound:
        """Wrap arrays without copying them, but for those that are read-only or in another layout.

        Raises:
            ModelError: a whole number does not fit in 32 bits.
        """
        self._opened()
        arrays = tuple(np.require(_name_type(feeds[spec.name]), None, ("C", "W")) for spec in self.signature.inputs)
        self._check_range(arrays)
        return Bound(tuple(self._tensor(array, shared_memory=True) for array in arrays), arrays)

    def enqueue(self, bound: Bound) -> None:
        """Run what is bound; returns when it is done.

        Raises:
            ModelError: OpenVINO raised; StepOutOfMemory where memory was what it lacked.
        """
        request = self._choose(bound.arrays)
        changed, self._set = () if self._set is bound else bound.tensors, None
        if self._batch in self._lent:
            self._lent.remove(self._batch)
            for at, tensor in self._large[self._batch].items():
                request.set_output_tensor(at, tensor)
        self._infer(request, changed)
        self._set = bound

    def answer(self, values: Sequence[Array]) -> Sequence[Array]:
        """Run one whole inference without keeping what is bound, which would cost some 20 µs a call."""
        self._check_range(values)
        named = map(_name_type, values)
        buffers = [
            value if (flags := value.flags).c_contiguous and flags.writeable else value.copy() for value in named
        ]
        self._set = None
        request = self._choose(buffers)
        # A new array to write into is quicker than a copy: of 8.5 MB after a call of 32 ms, it saves 0.9 ms.
        given = {at: np.empty_like(tensor.data) for at, tensor in self._large[self._batch].items()}
        if given:
            self._lent.add(self._batch)
            for at, array in given.items():
                request.set_output_tensor(at, self._tensor(array, shared_memory=True))
        self._infer(request, [self._tensor(value, shared_memory=True) for value in buffers])
        return [given[at] if at in given else request.get_output_tensor(at).data.copy() for at in self._outputs]

    def _check_range(self, values: Sequence[Array]) -> None:
        """Refuse whole numbers that OpenVINO, which computes int64 in 32 bits, would change without a word."""
        for at, name in self._long:
            # of numbers from 0 on, this is one pass: the bits of all together show the highest one
            if 0 <= int(np.bitwise_or.reduce(values[at], axis=None)) <= _INT32.max:
                continue
            least, most = int(values[at].min()), int(values[at].max())
            if least < _INT32.min or most > _INT32.max:
                number = most if most > _INT32.max else least
                raise ModelError(
                    f"input {name!r} has {number}, and OpenVINO computes whole numbers in 32 bits, "
                    f"{_INT32.min} to {_INT32.max}",
                    "use another engine, or give the model smaller numbers",
                )

    def _choose(self, values: Sequence[Array]) -> Any:
        """Choose the request for the sizes of these values."""
        models, (at, axis) = self._opened(), self._batch_place
        batch = values[at].shape[axis] if models.batches and axis < values[at].ndim else None
        self._batch = batch if batch in models.batches else None
        return self.request

    def _infer(self, request: Any, tensors: Iterable[Any]) -> None:
        """Run a request on input tensors, or on those that it has.

        On one thread, a call that fails raises nothing, and writes no output: where one stays empty, or may be an old
        one, the request runs in a way that raises, which takes some 30 µs more.
        """
        begun, silent, emptied = False, self._silent[self._batch], self._emptied[self._batch]
        try:
            for index, tensor in enumerate(tensors):
                request.set_input_tensor(index, tensor)
            for at, shape in enumerate(emptied):
                request.get_output_tensor(at).shape = shape
            begun = True
            if emptied or not silent:
                request.infer(share_outputs=True)
            if silent and not (emptied and all(request.get_output_tensor(at).size for at in self._outputs)):
                request.start_async()
                request.wait()
        except (RuntimeError, MemoryError) as error:
            if begun:
                self._opened().discard(self._of[self._batch], silent=silent)
            text = _read_message(error)
            if isinstance(error, MemoryError) or says_out_of_memory(str(error)):
                raise out_of_memory(text, f"OpenVINO ran out of memory: {text}") from error
            raise ModelError(f"OpenVINO failed on this input: {text}", _CHECK_INPUT) from error

    def synchronize(self) -> None:
        """Wait for nothing: a call returns when it is done."""

    def fetch(self) -> dict[str, Array]:
        outputs = self.signature.outputs
        request = self._requests[self._batch]
        return {spec.name: request.get_output_tensor(at).data.copy() for at, spec in enumerate(outputs)}

    def release_idle_memory(self) -> None:
        """Free the buffers of layers, which the next call allocates again."""
        self._opened().release_memory()

    def close(self) -> None:
        """Free the request, and the weights if no sibling uses them."""
        self._models = self._set = None
        self._requests.clear()
        self._of.clear()
        self._large.clear()
        gc.collect()
        # OpenVINO keeps threads of closed models for later ones. A forked process would wait for them forever; they end
        # with the plugin, once no other model is open.
        with contextlib.suppress(RuntimeError):  # it was unloaded already
            core().unload_plugin("CPU")
