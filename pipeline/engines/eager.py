"""PyTorch as it is: the module itself in inference mode. The baseline that every other engine is held against."""

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from enginesmith.pipeline.artifact import Artifact, Kind
from enginesmith.pipeline.engines.base import Availability, Device, Engine, Session
from enginesmith.pipeline.errors import EnginesmithError, ModelError, StepOutOfMemory, UsageError
from enginesmith.pipeline.tensors import Array, Feeds, Signature

if TYPE_CHECKING:
    import torch

    Tensors = tuple[torch.Tensor, ...]
    Forward = Callable[..., Tensors]

_PRIMING_SIDE = 256
"""Rows and columns of the matrix that starts torch's thread pool: large enough to be split among threads."""


class Eager(Engine):
    """Runs a torch artifact's module, op by op."""

    name: ClassVar[str] = "eager"
    consumes: ClassVar[Kind] = "torch"
    tools: ClassVar[tuple[str, ...]] = ("torch",)
    memory_from_torch: ClassVar[bool] = True

    @classmethod
    def available(cls, device: Device) -> Availability:
        """On the CPU always; on CUDA when this torch is built for it and finds the device."""
        if device.kind == "cpu":
            return Availability(ok=True)
        import torch

        if torch.version.cuda is None:
            reason = f"the installed torch {torch.__version__} is built without CUDA"
            return Availability(ok=False, reason=reason, remedy="install one with it: pip install 'enginesmith[gpu]'")
        if not torch.cuda.is_available():
            remedy = "look at what nvidia-smi says; the driver is missing or older than this torch needs"
            return Availability(ok=False, reason="torch finds no CUDA device", remedy=remedy)
        count = torch.cuda.device_count()
        if device.index >= count:
            remedy = f"use one of cuda:0 … cuda:{count - 1}"
            return Availability(ok=False, reason=f"there is no {device}", remedy=remedy)
        return Availability(ok=True)

    def load(self, artifact: Artifact, device: Device) -> "EagerSession":
        """Rebuild the module with the stored weights and move it to the device."""
        from enginesmith.pipeline.torch_model import load_artifact

        self.require(device)
        _use(device)
        loaded = load_artifact(artifact)
        module = loaded.module.eval().to(str(device))
        return EagerSession(self.forward(module), loaded.signature, device)

    def forward(self, module: "torch.nn.Module") -> "Forward":
        """What a session calls; engines that transform the module do it here."""
        return module

    def prime(self, artifact: Artifact, device: Device) -> None:
        """Build the module once, which imports all of its code, and start the thread pool."""
        import torch

        from enginesmith.pipeline.torch_model import load_artifact

        _use(device)
        load_artifact(artifact)
        with torch.inference_mode():
            square = torch.ones(_PRIMING_SIDE, _PRIMING_SIDE, device=str(device))
            (square @ square).relu_().sum().item()
        gc.collect()


def _use(device: Device) -> None:
    import torch

    torch.set_num_threads(device.thread_count)
    if device.kind == "cuda":
        torch.cuda.set_device(device.index)


class EagerSession(Session):
    """A module on a device. On CUDA all work goes to one stream of its own."""

    def __init__(self, forward: "Forward", signature: Signature, device: Device) -> None:
        import torch

        self.signature = signature
        self._inference_mode = torch.inference_mode
        self._forward: Forward = forward
        self._device = str(device)
        self._stream = torch.cuda.Stream(self._device) if device.kind == "cuda" else None  # type: ignore[no-untyped-call]
        if self._stream:
            torch.cuda.set_stream(self._stream)
        self._outputs: Tensors = ()

    @property
    def cuda_stream(self) -> int | None:
        """Handle of the session's stream; None on the CPU."""
        return self._stream.cuda_stream if self._stream else None

    def bind(self, feeds: Feeds) -> "Tensors":
        """Tensors on the device, in the order of the inputs."""
        import torch

        arrays = (np.require(feeds[spec.name], requirements=("C", "W")) for spec in self.signature.inputs)
        return tuple(torch.from_numpy(array).to(self._device) for array in arrays)

    def enqueue(self, bound: "Tensors") -> None:
        """Run the module; on CUDA this returns before the kernels have finished.

        Raises:
            ModelError: the module raised; StepOutOfMemory where memory was what it lacked.
        """
        self._outputs = ()  # its memory is free for this call
        try:
            with self._inference_mode():
                self._outputs = self._forward(*bound)
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
            raise _translated(error) from error

    def synchronize(self) -> None:
        """Wait for the stream; on the CPU there is nothing to wait for."""
        if self._stream:
            self._stream.synchronize()

    def fetch(self) -> dict[str, Array]:
        """Copies of the last outputs on the host."""
        pairs = zip(self.signature.outputs, self._outputs, strict=True)
        return {spec.name: np.array(tensor.cpu().numpy()) for spec, tensor in pairs}

    def close(self) -> None:
        """Let go of the module."""
        self._forward, self._outputs = _closed, ()
        gc.collect()


def _closed(*bound: Any) -> "Tensors":
    raise UsageError("the session is closed")


def _translated(error: Exception) -> EnginesmithError:
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in text:
        return StepOutOfMemory(text, "use a smaller batch")
    return ModelError(
        f"the module raised {type(error).__name__}: {text}", "run it alone with these inputs to see where"
    )
