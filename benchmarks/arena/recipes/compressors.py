"""Tools that compress a model for another runtime.

- Intel Neural Compressor 3: https://intel.github.io/neural-compressor → "PyTorch Static Quantization", PT2E backend:
  export, prepare, calibrate, convert, then torch.compile with freezing.
- Olive: https://microsoft.github.io/Olive → ``olive optimize --precision int8 --device cpu`` schedules the passes
  OnnxPeepholeOptimizer and OnnxStaticQuantization for an ONNX file (``--dry_run`` shows them); they run here with the
  user's data instead of its text set. For transformers: OrtTransformersOptimization and OnnxDynamicQuantization.
- NVIDIA ModelOpt: https://nvidia.github.io/Model-Optimizer → "ONNX Quantization"; calibrated on the CPU. It places Q/DQ
  for TensorRT; here the graph runs in ONNX Runtime on the CPU.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from job import Call, Job, Recipe

_MADE, _PACKAGE = "made.onnx", "made.pt2"


def _open_graph(job: Job) -> Call:
    import ort

    return ort.open_made(job)


def _inc(job: Job) -> None:
    import pytorch
    import torch
    from neural_compressor.torch.export import export
    from neural_compressor.torch.quantization import convert, get_default_static_config, prepare

    with torch.no_grad():
        example = pytorch.tensors(job.example())
        prepared = prepare(export(job.module(), example_inputs=example), get_default_static_config())
        for row in job.rows(job.batch):
            prepared(*pytorch.tensors(row))
        torch.export.save(torch.export.export(convert(prepared), example), job.file(_PACKAGE))


def _open_inc(job: Job) -> Call:
    import pytorch
    import torch
    import torchao.quantization.pt2e  # noqa: F401  # registers the operators of the package

    torch.set_num_threads(job.threads)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(job.file("inductor"))
    torch._inductor.config.freezing = True
    compiled = torch.compile(torch.export.load(job.file(_PACKAGE)).module(), dynamic=False)

    @torch.no_grad()
    def call(feeds: Any) -> Any:
        return pytorch.as_arrays(compiled(*pytorch.tensors(feeds)))

    return call


def _olive(job: Job) -> None:
    import olive
    import torch
    from olive.data.registry import Registry

    class Rows(torch.utils.data.Dataset):  # type: ignore[misc, type-arg]
        def __init__(self) -> None:
            self._rows = list(job.rows())

        def __len__(self) -> int:
            return len(self._rows)

        def __getitem__(self, index: int) -> Any:
            return {name: array[0] for name, array in self._rows[index].items()}, 0

    @Registry.register_dataset("arena_rows")
    def rows(**options: Any) -> Any:
        return Rows()

    static = {"type": "OnnxStaticQuantization", "data_config": "rows", "precision": "int8", "per_channel": True}
    passes = (
        {"fuse": {"type": "OrtTransformersOptimization"}, "quantize": {"type": "OnnxDynamicQuantization"}}
        if job.transformer
        else {"peephole": {"type": "OnnxPeepholeOptimizer"}, "quantize": static}
    )
    target = {"device": "cpu", "execution_providers": ["CPUExecutionProvider"]}
    olive.run(
        {
            "input_model": {"type": "OnnxModel", "model_path": str(job.upgraded_graph())},
            "passes": passes,
            "systems": {"here": {"type": "LocalSystem", "accelerators": [target]}},
            "target": "here",
            "data_configs": [{"name": "rows", "load_dataset_config": {"type": "arena_rows"}}],
            "output_dir": str(job.file("olive")),
            "cache_dir": str(job.file("cache")),
        }
    )
    shutil.copyfile(next(Path(job.file("olive")).rglob("*.onnx")), job.file(_MADE))


def _modelopt(job: Job) -> None:
    from modelopt.onnx.quantization import quantize

    feeds, _ = job.data("calibration")
    quantize(
        str(job.graph),
        quantize_mode="int8",
        calibration_data=feeds,
        calibration_eps=["cpu"],
        output_path=str(job.file(_MADE)),
    )


RECIPES = {
    "inc": Recipe(_inc, _open_inc),
    "olive": Recipe(_olive, _open_graph),
    "modelopt": Recipe(_modelopt, _open_graph),
}
