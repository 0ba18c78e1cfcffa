"""Compute graphs with ONNX Runtime as a library, for calibration, comparisons and probes."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from enginesmith.pipeline.errors import MissingCapability, ModelError, install_command
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.tensors import Array, Feeds, Signature, TensorSpec, find_fill

LIBRARY, TITLE = "onnxruntime", "ONNX Runtime"
TOOLS = (LIBRARY, "onnxruntime-gpu")
"""Distributions that it comes in."""
_FATAL = 4
"""Severity from which ONNX Runtime logs by itself; what it raises says the same."""
_EQUAL_SHARE = 0.9999
"""Integers that have to be equal: of 10 000 classes of pixels, one may lie on an edge."""


def import_library() -> tuple[Any, tuple[type[Exception], ...]]:
    """Import it, with the errors that it raises where it does not take a graph or its feeds.

    Raises:
        MissingCapability: it is not installed.
    """
    try:
        import onnxruntime
        from onnxruntime.capi import onnxruntime_pybind11_state as state
    except ImportError as error:
        raise MissingCapability(f"{LIBRARY} is not installed", install_command(LIBRARY)) from error
    failures = (state.Fail, state.InvalidArgument, state.InvalidGraph, state.NotImplemented, state.RuntimeException)
    return onnxruntime, failures


def session_options(library: Any, threads: int = 0) -> Any:
    """Make options of a session that computes a graph as it stands, one operator after the other; 0 threads: all."""
    options = library.SessionOptions()
    options.log_severity_level = _FATAL
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.execution_mode = library.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = library.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


# Compare two graphs by running both on the same feeds, with the runtime's own optimizations off.

TOLERANCE = 1e-4  # of the output's range: the project's bound for "equal"
_FIRST, _OTHERS = 2, (3, 16, 64, 224)  # sizes tried for dynamic first dimensions, and for all other ones


def compare_graphs(before: Path, after: Path) -> None:
    """Run both on the same feeds; sizes of dynamic dimensions are guessed until the first graph takes them.

    Raises:
        ModelError: their outputs differ, or nothing could be compared.
        MissingCapability: ONNX Runtime is not installed.
    """
    reason = "no feeds"
    for feeds in draw_candidates(model_file.signature(before)):
        try:
            expected = run_graph(before, feeds)
        except ModelError as error:
            reason = error.message
            continue
        distance = largest_difference(expected, run_graph(after, feeds))
        if distance > TOLERANCE:
            raise ModelError(f"the outputs differ by {distance:.1e} of their range")
        return
    raise ModelError(f"it could not be run for comparison ({reason})")


def run_graph(model: Path | bytes, feeds: Feeds, outputs: Sequence[str] | None = None, threads: int = 0) -> list[Array]:
    """Run a graph once, on the CPU.

    Raises:
        ModelError, MissingCapability: as :func:`open_graph` does.
    """
    return open_graph(model, threads)(feeds, outputs)


class RunGraph(Protocol):
    """The call that answers feeds by a graph, in one session."""

    def __call__(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> list[Array]: ...


def open_graph(model: Path | bytes, threads: int = 0) -> RunGraph:
    """Open a graph, a file or its bytes, on the CPU, to be run for outputs; feeds that it does not read are left out.

    Raises:
        ModelError: it cannot be loaded, or does not take the feeds that it is run on.
        MissingCapability: ONNX Runtime is not installed.
    """
    library, failures = import_library()
    with _translate_errors(failures):
        session = library.InferenceSession(model, session_options(library, threads), providers=["CPUExecutionProvider"])
    inputs = {value.name for value in session.get_inputs()}

    def run(feeds: Feeds, outputs: Sequence[str] | None = None) -> list[Array]:
        with _translate_errors((*failures, RuntimeError, ValueError, TypeError)):  # of a dtype that it cannot take
            return list(session.run(outputs, {name: value for name, value in feeds.items() if name in inputs}))

    return run


@contextlib.contextmanager
def _translate_errors(failures: tuple[type[Exception], ...]) -> Iterator[None]:
    try:
        yield
    except failures as error:
        raise ModelError(str(error).splitlines()[0][:200]) from error


def largest_difference(expected: list[Array], actual: list[Array]) -> float:
    """Compute the greatest difference of any output as a share of that output's range; infinite where shapes differ."""
    return max((_distance(a, b) for a, b in zip(expected, actual, strict=True)), default=0.0)


def _distance(expected: Array, actual: Array) -> float:
    if expected.shape != actual.shape or expected.dtype != actual.dtype:
        return float("inf")
    same = (expected == actual) | ((expected != expected) & (actual != actual))
    if same.all():
        return 0.0
    if not np.issubdtype(expected.dtype, np.floating):
        return 0.0 if np.mean(same) >= _EQUAL_SHARE else float("inf")
    fill, worst = find_fill([expected]), 0.0
    for part in (np.abs(expected) < fill, ~(np.abs(expected) < fill)):  # the fill of masked places hides all others
        a, b = (value[part & ~same].astype(np.float64) for value in (expected, actual))
        finite = np.abs(expected[part & np.isfinite(expected)].astype(np.float64))
        span = max(float(finite.max(initial=0.0)), float(np.finfo(expected.dtype).tiny))
        difference = float(np.abs(a - b).max(initial=0.0))
        worst = max(worst, difference / span if np.isfinite(difference) else float("inf"))
    return worst


def draw_candidates(
    signature: Signature, known: Mapping[str, int] = MappingProxyType({})
) -> Iterator[dict[str, Array]]:
    """Draw feeds of several sizes: normal numbers, rows of tables, and else zeros and ones, which are masks, too.

    The last ones have lengths in the place of ones, one of them as long as a dimension: masks that are computed from
    lengths have to fit it. ``known`` are sizes of dimensions; all others are guessed.
    """
    first = {spec.shape[0] for spec in signature.inputs if spec.shape}
    choices: list[dict[str, int]] = []
    for other in _OTHERS if set(signature.symbols) - first - {*known} else _OTHERS[:1]:
        guessed = {symbol: _FIRST if symbol in first else other for symbol in signature.symbols}
        choices.append({**guessed, **known})
    yield from (_draw(signature, sizes) for sizes in choices)
    if any(_may_be_lengths(spec, signature) for spec in signature.inputs):
        for sizes in choices:
            dims = dict.fromkeys(dim for spec in signature.inputs for dim in spec.resolve(sizes)[1:] if dim > 1)
            yield from (_draw(signature, sizes, length) for length in dims)


def _draw(signature: Signature, sizes: Mapping[str, int], length: int = 0) -> dict[str, Array]:
    """Draw feeds at these sizes; what may be lengths is at most ``length``, and once as much, unless that is 0."""
    generator = np.random.default_rng(0)
    feeds: dict[str, Array] = {}
    for spec in signature.inputs:
        dtype, shape = np.dtype(spec.dtype), spec.resolve(sizes)
        if np.issubdtype(dtype, np.floating):
            feeds[spec.name] = generator.standard_normal(shape, dtype=np.float32).astype(dtype)
        elif length and _may_be_lengths(spec, signature):
            lengths = generator.integers(1, length + 1, shape).astype(dtype)
            lengths.reshape(-1)[:1] = length
            feeds[spec.name] = lengths
        else:
            feeds[spec.name] = generator.integers(0, signature.tables.get(spec.name, 2), shape).astype(dtype)
    return feeds


def _may_be_lengths(spec: TensorSpec, signature: Signature) -> bool:
    whole = np.issubdtype(np.dtype(spec.dtype), np.integer)
    return whole and len(spec.shape) <= 1 and spec.name not in signature.tables
