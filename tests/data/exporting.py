"""Export of a module without the steps before and behind it."""

from pathlib import Path
from typing import Any

from enginesmith.pipeline.frameworks.torch.module import LoadedModel, NamedForward
from enginesmith.pipeline.passes.export.export import Export, export_module
from enginesmith.pipeline.tensors import Signature, TensorSpec
from graphs import quiet


def loaded(module: Any, example: dict[str, Any], shapes: dict[str, tuple[Any, ...]], outputs: list[str]) -> Any:
    """Wrap a module as a loaded model; outputs are written as ``name:dtype:dims``."""
    specs = tuple(
        TensorSpec(name=name, dtype=str(value.dtype).removeprefix("torch."), shape=shapes[name])
        for name, value in example.items()
    )
    answers = tuple(TensorSpec.parse(text) for text in outputs)
    wrapper = NamedForward(module.eval(), tuple(example), ())
    return LoadedModel(wrapper, Signature(inputs=specs, outputs=answers), example)


def exported(out: Path, model: Any, **options: Any) -> Any:
    """Write the graph of a model as ``edit.FILE`` into a folder."""
    out.mkdir(exist_ok=True)
    return export_module(model, out, Export(**options), quiet)
