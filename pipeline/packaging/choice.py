"""Which variant of a run is packaged, and the files that it is made of, held against the run's digests."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginesmith.pipeline import onnx_file
from enginesmith.pipeline import run as runs
from enginesmith.pipeline.artifact import RECORDS, file_digest, files_below, holds
from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.errors import ModelError, UsageError
from enginesmith.pipeline.run import Run, StoredArtifact, VariantRecord

_LOG = ".log"


@dataclass(frozen=True)
class Chosen:
    """A variant of a run whose files are there, as they were made."""

    folder: Path
    run: Run
    record: VariantRecord
    cautions: tuple[str, ...]

    @property
    def loaded(self) -> StoredArtifact:
        """What is packaged: the graph where the engine takes one, as that runs on other machines too."""
        found = self.record.graph or self.record.artifact
        assert found is not None
        return found

    @property
    def main(self) -> Path:
        """The file that is loaded."""
        return self.folder / self.loaded.path

    @property
    def files(self) -> dict[str, Path]:
        """All files that belong to it, by name from the main file's folder."""
        folder = self.main.parent
        if self.record.graph:
            return {name: folder / name for name in (self.main.name, *onnx_file.external_files(self.main))}
        names = files_below(folder, skip=RECORDS)
        return {name: folder / name for name in names if not name.endswith(_LOG)}

    @property
    def engine_options(self) -> dict[str, Any]:
        """What the engine was built with, of the fields of its class."""
        return dict(self.record.built_with.get("engine", {}))


def choose(folder: Path, variant: str | None) -> Chosen:
    """The variant of that name, else the winner.

    Raises:
        UsageError: there is no such run or variant, or it is nothing that can be packaged.
        ModelError: a file is missing, or is not the one that the run made.
    """
    run = runs.read(folder)
    folder = folder if folder.is_dir() else folder.parent
    record = runs.named(run, variant) if variant else _winner(run)
    _hold_packagable(folder, run, record)
    chosen = Chosen(folder, run, record, tuple(_cautions(run, record)))
    _hold_whole(chosen)
    return chosen


def _winner(run: Run) -> VariantRecord:
    found = next((one for one in (run.baseline, *run.variants) if one.id == run.winner), None)
    if found is None:
        why = run.winner_reason or ("the run is not complete" if not run.complete else "none meets the budgets")
        built = ", ".join(one.id for one in run.variants if one.artifact) or "none"
        raise UsageError(f"the run has no winner: {why}", f"name one with --variant; built are: {built}")
    return found


def _cautions(run: Run, record: VariantRecord) -> Iterator[str]:
    """What speaks against a variant that was asked for by name."""
    if record.id == run.winner:
        return
    if record.status == "failed":
        yield f"it failed in the run: {record.reason}"
    elif record.status != "measured":
        yield f"it was not measured: {record.reason or record.status}"
    if record.rejected:
        yield f"it was rejected: {record.rejected}"
    yield f"it is not the run's winner, which is {run.winner or 'none'}"


def _hold_packagable(folder: Path, run: Run, record: VariantRecord) -> None:
    if engine_class(record.engine).consumes == "torch":
        graphs = [one.id for one in run.variants if one.graph and one.status != "failed"]
        remedy = f"--variant {graphs[0]}, " if graphs else "optimize with --engine onnxruntime, "
        raise UsageError(
            f"{record.id} runs the PyTorch module itself, which takes the code that makes it",
            f"package a built engine instead ({remedy}say), or `enginesmith export {run.model.source} -o model.onnx`",
        )
    if record.artifact is None:
        why = record.reason or record.status
        raise UsageError(f"{record.id} has no engine: {why}", f"`enginesmith resume {folder}` does what is missing")
    if (engine_class(record.engine).loads_graph and record.graph is None) or record.test_vector is None:
        raise UsageError(
            f"the run keeps no graph or test vector of {record.id}: it was made before runs kept them",
            f"`enginesmith resume {folder}` adds them, and does nothing else again that the store still has",
        )
    if run.model.signature is None:
        raise UsageError("the run does not know the model's inputs and outputs", f"`enginesmith resume {folder}`")


def _hold_whole(chosen: Chosen) -> None:
    """What is packaged is what the run made, byte for byte."""
    kept, main = chosen.loaded, chosen.main
    again = f"run `enginesmith resume {chosen.folder}`, which makes it again"
    if not main.is_file():
        raise ModelError(f"{main} is missing", again)
    if not holds(main.parent, kept.sha256):
        raise ModelError(f"{main.parent} is not what the run made: its sha256 is another than run.json says", again)
    vector = chosen.record.test_vector
    assert vector is not None
    path = chosen.folder / vector.path
    if not path.is_file() or file_digest(path) != vector.sha256:
        raise ModelError(f"{path} is missing, or not what the run made", again)
