"""What a module costs: multiply-accumulates of one run, and parameters.

Operations are counted where PyTorch dispatches them, by the formulas of ``torch.utils.flop_counter``: convolutions,
matrix products and attention, in whatever way the module calls them; a multiply-add is two of its FLOPs. Recurrent
layers are no products for it and count as 0.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from enginesmith.pipeline.pruning.tracing import by_operators


@dataclass(frozen=True)
class Cost:
    """MACs of one run on the example, and the number of parameters."""

    macs: int
    parameters: int


class Counter:
    """Counts what ``run`` does, which calls ``model`` once, as often as the model's sizes change.

    Where the model runs on tensors without values too, only sizes are worked out, and the counts are the same.
    """

    def __init__(self, model: nn.Module, run: Callable[[], Any]) -> None:
        self._model, self._run = model, run
        self._real = _macs(run, fake=False)
        self._fake = self._can_fake()

    def _can_fake(self) -> bool:
        try:
            return _macs(self._run, fake=True) == self._real
        except Exception:  # noqa: BLE001 - a forward that looks at values raises whatever it likes without them
            return False

    def cost(self) -> Cost:
        """The cost as the model is now."""
        return Cost(_macs(self._run, self._fake), self.parameters())

    def parameters(self) -> int:
        """Numbers in parameters; shared ones count once."""
        return sum(value.numel() for value in self._model.parameters())


def _macs(run: Callable[[], Any], fake: bool) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    without_values = FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext()
    plain = (by_operators(), sdpa_kernel(SDPBackend.MATH))
    with torch.no_grad(), without_values, plain[0], plain[1], FlopCounterMode(display=False) as counter:
        run()
    return int(counter.get_total_flops()) // 2
