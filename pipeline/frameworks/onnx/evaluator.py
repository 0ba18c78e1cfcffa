"""Bring in ONNX Runtime as a library that computes graphs, for calibration, comparisons and probes."""

from typing import Any

from enginesmith.pipeline.errors import MissingCapability, install_command

LIBRARY, TITLE = "onnxruntime", "ONNX Runtime"
TOOLS = (LIBRARY, "onnxruntime-gpu")
"""Distributions that it comes in."""
_ERRORS = 3


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


def session_options(library: Any, threads: int) -> Any:
    """Make options of a session that computes a graph as it stands, one operator after the other."""
    options = library.SessionOptions()
    options.log_severity_level = _ERRORS
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.execution_mode = library.ExecutionMode.ORT_SEQUENTIAL
    options.graph_optimization_level = library.GraphOptimizationLevel.ORT_DISABLE_ALL
    return options
