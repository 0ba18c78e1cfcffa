"""From MODEL to the first artifact of a run."""

import shutil
from pathlib import Path
from typing import Any, ClassVar

from enginesmith.pipeline.artifact import Effect, Kind
from enginesmith.pipeline.errors import SignatureError
from enginesmith.pipeline.passes.base import Progress
from enginesmith.pipeline.source import Source
from enginesmith.pipeline.tasks.base import Inputs, Task
from enginesmith.pipeline.tensors import TensorSpec


class _FromSource(Task):
    """A task that begins with what the user named."""

    title: ClassVar[str] = "load"

    source: Source
    inputs: tuple[TensorSpec, ...] = ()

    @property
    def identity(self) -> dict[str, Any]:
        source = self.source.model_dump(mode="json", exclude={"target"})
        return {**super().identity, "fields": {**self.model_dump(mode="json"), "source": source}}

    @property
    def place(self) -> str:
        return self.source.target


class Load(_FromSource):
    """MODEL → a torch artifact."""

    produces: ClassVar[Kind] = "torch"

    seed: int = 0
    allow_pickle: bool = False

    @property
    def tools(self) -> tuple[str, ...]:
        libraries = {"hf": ("transformers",), "timm": ("timm",)}
        return ("torch", *libraries.get(self.source.form, ()))

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        from enginesmith.pipeline import saved_module, torch_model

        options = torch_model.LoadOptions(inputs=self.inputs, seed=self.seed, allow_pickle=self.allow_pickle)
        progress(f"building {self.source.text}")
        if self.source.form == "saved":
            loaded = saved_module.read_saved(Path(self.source.target), options, out)
        else:
            loaded = torch_model.load(self.source, options)
            saved_module.save(loaded, self.source, options, out)
        weights = sum(value.numel() for value in loaded.module.model.parameters())
        return Effect(
            file=saved_module.RECORD,
            summary=f"{weights:,} parameters; {', '.join(map(str, loaded.signature.inputs))}",
            notes=loaded.notes,
            signature=loaded.signature,
            reads=loaded.files,
            packages=loaded.packages,
        )


class LoadEngine(_FromSource):
    """A built engine of the user's, with its manifest; whether it fits this machine is checked when it is opened."""

    produces: ClassVar[Kind] = "engine"

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        from enginesmith.pipeline.engines.trt import manifest

        path = Path(self.source.target)
        found = manifest.read(path)
        shutil.copyfile(path, out / "model.engine")
        shutil.copyfile(manifest.path_beside(path), manifest.path_beside(out / "model.engine"))
        summary = f"{found.engine} {found.version} for {', '.join(found.compute_capabilities)}"
        reads = (path, manifest.path_beside(path))
        return Effect(file="model.engine", summary=summary, signature=found.signature, reads=reads)


class LoadOnnx(_FromSource):
    """An ONNX file, checked, with its external data."""

    produces: ClassVar[Kind] = "onnx"

    def run(self, inputs: Inputs, out: Path, progress: Progress) -> Effect:
        from enginesmith.pipeline import onnx_file

        path = Path(self.source.target)
        progress(f"checking {path.name}")
        onnx_file.check(path)
        signature = onnx_file.signature(path)
        if self.inputs and self.inputs != signature.inputs:
            raise SignatureError(
                f"--input says {', '.join(map(str, self.inputs))}, and the file has "
                f"{', '.join(map(str, signature.inputs))}",
                "leave --input away: an ONNX file names its own inputs",
            )
        external = onnx_file.external_files(path)
        shutil.copyfile(path, out / "model.onnx")
        for name in external:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path.parent / name, out / name)
        facts = onnx_file.summary(path)
        return Effect(
            file="model.onnx",
            summary=f"{facts.nodes} nodes, opset {facts.opset}, {facts.parameters:,} parameters",
            signature=signature,
            reads=(path, *(path.parent / name for name in external)),
        )
