"""Post-training quantisation by others, as their documentation tells to call it, with their defaults."""

import importlib.util
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

Feeds = Mapping[str, NDArray[Any]]
Quantise = Callable[[Path, Path, Feeds], None]
"""(float graph, where to write the quantised one, calibration data)."""


class Missing(ImportError):
    """The peer is not installed."""


@dataclass(frozen=True)
class Outcome:
    """The graph that a peer made, or why there is none."""

    peer: str
    path: Path | None
    seconds: float
    reason: str = ""


def quantised(peer: str, graph: Path, feeds: Feeds, folder: Path) -> Outcome:
    """Let a peer quantise a graph; what it raises is its answer."""
    path = folder / f"{peer}.onnx"
    start = time.perf_counter()
    try:
        PEERS[peer](graph, path, feeds)
    except Exception as error:  # noqa: BLE001  # whatever a peer raises is what its user sees
        return Outcome(peer, None, time.perf_counter() - start, f"{type(error).__name__}: {error}")
    return Outcome(peer, path, time.perf_counter() - start)


def _static(**options: Any) -> Quantise:
    """ONNX Runtime's static quantisation, after the preparation that its documentation recommends."""

    def run(graph: Path, out: Path, feeds: Feeds) -> None:
        from onnxruntime.quantization import quantize_static

        with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
            quantize_static(_prepared(graph, scratch), out, _reader(feeds), **_resolved(options))

    return run


def _resolved(options: dict[str, Any]) -> dict[str, Any]:
    from onnxruntime.quantization import CalibrationMethod

    method = options.get("calibrate_method")
    return options if method is None else {**options, "calibrate_method": CalibrationMethod[method]}


def _reader(feeds: Feeds) -> Any:
    """The calibration data, row by row."""
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            count = len(next(iter(feeds.values())))
            self._rows = ({name: array[row : row + 1] for name, array in feeds.items()} for row in range(count))

        def get_next(self) -> Any:
            return next(self._rows, None)

    return Reader()


def _dynamic(graph: Path, out: Path, feeds: Feeds) -> None:
    """ONNX Runtime's dynamic quantisation, which its documentation recommends for transformers and LSTMs."""
    from onnxruntime.quantization import quantize_dynamic

    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        quantize_dynamic(_prepared(graph, scratch), out)


def _prepared(graph: Path, scratch: str) -> Path:
    """The graph after the preparation; where its symbolic shapes fail, as they do on MiniLM, without them."""
    from onnxruntime.quantization.shape_inference import quant_pre_process

    prepared = Path(scratch, "prepared.onnx")
    try:
        quant_pre_process(graph, prepared)
    except TypeError:
        quant_pre_process(graph, prepared, skip_symbolic_shape=True)
    return prepared


def _modelopt(graph: Path, out: Path, feeds: Feeds) -> None:
    """NVIDIA ModelOpt's int8 quantisation of ONNX graphs, calibrated on the CPU."""
    if importlib.util.find_spec("modelopt") is None:
        raise Missing("nvidia-modelopt is not installed")
    from modelopt.onnx.quantization import quantize

    quantize(
        str(graph), quantize_mode="int8", calibration_data=dict(feeds), calibration_eps=["cpu"], output_path=str(out)
    )


PEERS: Mapping[str, Quantise] = {
    "ort-static": _static(),
    "ort-static-per-channel": _static(per_channel=True),
    "ort-static-entropy": _static(per_channel=True, calibrate_method="Entropy"),
    "ort-dynamic": _dynamic,
    "modelopt-int8": _modelopt,
}
