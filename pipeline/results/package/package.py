"""The command's work: choose a variant, and write it as a package, whole or not at all."""

import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from enginesmith.pipeline.artifact import file_digest, files_below
from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.errors import UsageError, storage_errors
from enginesmith.pipeline.results.package import manifest as manifests
from enginesmith.pipeline.results.package import triton
from enginesmith.pipeline.results.package.describe import Chosen, choose, describe
from enginesmith.pipeline.results.package.manifest import INFER
from enginesmith.pipeline.units import format_bytes

# A bundle: what is loaded, a manifest, a test vector and a script that runs it with the engine's own package alone.


def write(chosen: Chosen, folder: Path) -> None:
    """Write a bundle into an empty folder.

    Raises:
        UsageError: the engine has no script to run it without enginesmith.
    """
    script = engine_class(chosen.record.engine).infer_script()
    if script is None:
        raise UsageError(
            f"{chosen.record.engine} has no script that runs a bundle without enginesmith", "package another variant"
        )
    for name, source in chosen.files.items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    assert chosen.record.test_vector is not None
    shutil.copyfile(chosen.folder / chosen.record.test_vector.path, folder / manifests.VECTOR)
    shutil.copyfile(script, folder / manifests.INFER)
    found = describe(chosen, "bundle", chosen.main.name, manifests.list_files(folder))
    (folder / manifests.FILE).write_text(found.text())


Format = Literal["bundle", "triton"]
FORMATS: tuple[Format, ...] = ("bundle", "triton")


class Packaged(BaseModel):
    """What was written."""

    model_config = ConfigDict(frozen=True)

    format: Format
    variant: str
    folder: str
    files: tuple[str, ...]
    bytes: int
    manifest: str
    manifest_sha256: str
    """Names the package as a whole, as the manifest names every other file by its digest."""
    cautions: tuple[str, ...]
    next: str

    @property
    def summary(self) -> str:
        """For people."""
        notes = "".join(f"\n  note: {text}" for text in self.cautions)
        what = {"bundle": "a bundle", "triton": "a Triton model repository"}[self.format]
        size = f"{len(self.files)} files, {format_bytes(self.bytes)}"
        return f"wrote {self.folder}: {self.variant} as {what}, {size}{notes}\n{self.next}"


def package(run: Path, form: Format, output: Path, variant: str | None = None) -> Packaged:
    """Write the winner of a run, or another variant, as a package.

    Raises:
        UsageError: the folder is there already, or the variant is nothing that can be packaged so.
        ModelError: the run's files are not those that it made.
        StoreError: the folder cannot be written; nothing is left of it then.
    """
    if output.exists() or output.is_symlink():
        raise UsageError(f"{output} is there already", "give a new folder: -o DIR")
    chosen = choose(run, variant)
    with storage_errors(f"the output {output}"):
        output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}.") as scratch:
            whole = Path(scratch, output.name)
            whole.mkdir()
            {"bundle": write, "triton": triton.write}[form](chosen, whole)
            whole.rename(output)
    names = files_below(output)
    manifest = next(output / name for name in names if Path(name).name == manifests.FILE)
    found = manifests.read(manifest.parent)
    after = {
        "bundle": f"check it anywhere: enginesmith verify {_typed(output)}, or python {_typed(output / INFER)}",
        "triton": f"serve it: tritonserver --model-repository={_typed(output.resolve())} "
        "--disable-auto-complete-config",
    }
    return Packaged(
        format=form,
        variant=chosen.record.id,
        folder=str(output),
        files=tuple(names),
        bytes=sum((output / name).stat().st_size for name in names),
        manifest=str(manifest.relative_to(output)),
        manifest_sha256=file_digest(manifest),
        cautions=found.cautions,
        next=after[form],
    )


def _typed(path: Path) -> str:
    """Quote a path for a shell."""
    return shlex.quote(str(path))
