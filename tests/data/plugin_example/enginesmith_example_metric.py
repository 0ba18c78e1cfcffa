"""A metric in one function."""

from typing import Any

import numpy as np


def within_one(outputs: dict[str, Any], labels: Any) -> Any:
    """Tell for each sample whether the class with the greatest logit is the label, or next to it: shape (samples,)."""
    logits = next(iter(outputs.values()))
    return np.abs(logits.argmax(axis=1) - labels) <= 1
