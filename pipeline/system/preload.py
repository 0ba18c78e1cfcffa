"""Import what workers need into the fork server; what is broken is left for the worker to report."""

import contextlib
import gc
import importlib
import os
import signal
import sys
import threading

signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that people see


def _import(names: str) -> None:
    """Import modules; of ``module:function`` the function is called, too."""
    for name in names.split():
        module, _, function = name.partition(":")
        with contextlib.suppress(Exception):
            loaded = importlib.import_module(module)
            if function:
                getattr(loaded, function)()


_FRAMEWORKS = (
    "torch torch.export torch.onnx onnx enginesmith.pipeline.engines:import_default onnxscript safetensors.torch "
    "enginesmith.pipeline.tasks.mixed_precision enginesmith.pipeline.tasks.load "
    "enginesmith.pipeline.frameworks.torch.module"
)
_import(os.environ.get("ENGINESMITH_PRELOAD_ONLY", _FRAMEWORKS))
_wanted = os.environ.get("ENGINESMITH_PRELOAD", "").split()
_import(" ".join(name for name in _wanted if name.startswith("enginesmith.")))  # engines: no part of a model
with contextlib.suppress(ImportError):  # tqdm's lock across processes is a semaphore that a killed worker leaves
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())
COMMON = frozenset(name.partition(".")[0] for name in sys.modules)
"""Top-level modules that every worker has, whatever the model is."""
_import(" ".join(_wanted))
gc.collect()
gc.freeze()  # collections in workers pass over what is here already, and copy none of its pages
