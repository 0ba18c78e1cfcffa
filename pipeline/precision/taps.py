"""A graph run in ONNX Runtime with any of its values as outputs.

The runtime's own optimisations are off, so that every value is there. Weights that lie beside the graph are mapped and
none is laid out anew, so the memory that it takes is about one copy of the weights and the values that are read out.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import sched_getaffinity
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginesmith.pipeline import onnx_file
from enginesmith.pipeline.errors import MissingCapability, ModelError, install_command
from enginesmith.pipeline.tensors import Array, Feeds

if TYPE_CHECKING:
    import onnx

_FATAL = 4


class Tapped:
    """An open session; how many samples are fed at once can change the last bits of what it answers."""

    def __init__(self, session: Any, values: Sequence[str], failures: tuple[type[Exception], ...]) -> None:
        self._session = session
        self._values = tuple(values)
        self._failures = failures
        self._inputs = {value.name for value in session.get_inputs()}
        self._computed = [name for name in dict.fromkeys(values) if name not in self._inputs]

    def run(self, feeds: Feeds) -> dict[str, Array]:
        """The values, in the order in which they were named; feeds that the graph does not read are left out.

        Raises:
            ModelError: it does not take these feeds.
        """
        given = {name: value for name, value in feeds.items() if name in self._inputs}
        try:
            found = self._session.run(self._computed, given) if self._computed else []
        except self._failures as error:
            raise ModelError(f"ONNX Runtime failed on these feeds: {_brief(error)}") from error
        everything = {**given, **dict(zip(self._computed, found, strict=True))}
        return {name: everything[name] for name in self._values}


@contextmanager
def open_tapped(path: Path, values: Sequence[str], threads: int = 0) -> Iterator[Tapped]:
    """Open a graph on the CPU for reading out values of its main graph; inputs and outputs may be among them.

    ``threads`` is within an operator; 0 means one for each core this process may use.

    Raises:
        ModelError: there is no such value, or ONNX Runtime cannot load the graph.
        MissingCapability: ONNX Runtime is not installed.
    """
    try:
        import onnxruntime
        from onnxruntime.capi import onnxruntime_pybind11_state as state
    except ImportError as error:
        raise MissingCapability("onnxruntime is not installed", install_command("onnxruntime")) from error
    failures: tuple[type[Exception], ...] = (
        *(state.Fail, state.InvalidArgument, state.InvalidGraph, state.NotImplemented, state.RuntimeException),
        ValueError,  # what is missing or of another rank
    )
    options = _options(onnxruntime, path.parent, threads or len(sched_getaffinity(0)))
    try:
        session = onnxruntime.InferenceSession(_with_outputs(path, values), options, ["CPUExecutionProvider"])
    except failures as error:
        raise ModelError(f"ONNX Runtime cannot load {path.name}: {_brief(error)}") from error
    tapped = Tapped(session, values, failures)
    del session
    try:
        yield tapped
    finally:
        del tapped._session  # frees its memory, whoever still holds the object


def _options(onnxruntime: Any, folder: Path, threads: int) -> Any:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = _FATAL
    options.intra_op_num_threads = threads
    options.enable_cpu_mem_arena = options.enable_mem_pattern = False
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.absolute()))
    return options


def _with_outputs(path: Path, values: Sequence[str]) -> bytes:
    """The serialised graph; ONNX Runtime finds out the types of what is added."""
    model = onnx_file.read(path)
    known = {value.name for value in (*model.graph.input, *model.graph.output)}
    missing = [name for name in dict.fromkeys(values) if name not in known]
    made = {name for node in model.graph.node for name in node.output}
    if unknown := [name for name in missing if name not in made]:
        raise ModelError(f"{path.name} computes no value {unknown[0]!r} in its main graph, so it cannot be read out")
    for name in missing:
        model.graph.output.add().name = name
    return _serialised(model, path)


def _serialised(model: "onnx.ModelProto", path: Path) -> bytes:
    from google.protobuf.message import EncodeError

    try:
        data: bytes = model.SerializeToString()
    except (EncodeError, ValueError) as error:
        raise ModelError(f"{path.name} with more outputs is larger than 2 GB", "save it with external data") from error
    return data


def _brief(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
