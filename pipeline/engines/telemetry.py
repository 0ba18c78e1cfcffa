"""Import packages that would report to their makers."""

import importlib
import sys
from typing import Any

_TELEMETRY = "openvino_telemetry"


def import_without_telemetry(package: str) -> Any:
    """Import a package as if ``openvino_telemetry`` were not installed: OpenVINO and NNCF would report to Intel.

    Raises:
        ImportError: it is not installed, or cannot be imported.
    """
    hidden = _TELEMETRY not in sys.modules
    if hidden:
        sys.modules[_TELEMETRY] = None  # type: ignore[assignment]  # importing it then raises ImportError
    try:
        return importlib.import_module(package)
    finally:
        if hidden:
            del sys.modules[_TELEMETRY]
