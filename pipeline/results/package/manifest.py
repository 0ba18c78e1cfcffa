"""Define and read ``manifest.json`` of a package: its origin, where it runs, and every file's digest."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from enginesmith.pipeline.artifact import HistoryEntry, file_digest, files_below
from enginesmith.pipeline.errors import ModelError, UsageError
from enginesmith.pipeline.frameworks.fidelity import Thresholds
from enginesmith.pipeline.results import documents
from enginesmith.pipeline.tensors import ShapeRange, Signature

SCHEMA: Literal["enginesmith.bundle/1"] = "enginesmith.bundle/1"
FILE = "manifest.json"
VECTOR, INFER = "test_vector.npz", "infer.py"


class PackagedFile(BaseModel, frozen=True):
    """A file, by its content."""

    sha256: str
    bytes: int


class EngineRecord(BaseModel, frozen=True):
    """The engine that loads the package, and its options."""

    name: str
    package: str
    """The Python module to import."""
    version: str
    """Version of the package that the engine was built and measured with."""
    file: str
    """The file that is loaded."""
    device: Literal["cpu", "cuda"]
    compute_capabilities: tuple[str, ...] = ()
    """Capabilities of the GPUs that the engine is built for; empty where it is not for certain ones."""
    options: dict[str, Any] = {}
    """Names and values as the package's own session takes them."""


class Origin(BaseModel, frozen=True):
    """The run that the package came from."""

    run: str
    created: str
    model: str
    model_sha256: str | None
    """Digest of the model as it was loaded: its weights, signature and code."""
    data: str | None
    """Data that latency, fidelity and the test vector were made with."""
    processor: str | None
    gpus: tuple[str, ...] = ()
    packages: dict[str, str] = {}
    recipe: dict[str, Any]
    history: tuple[HistoryEntry, ...]


class Measured(BaseModel, frozen=True):
    """Latency at one batch size, on the machine of the run."""

    batch: int
    p50_ms: float | None
    p99_ms: float | None
    throughput_per_s: float | None
    speedup: float | None
    """Over eager in the same rounds, as a median."""
    reasons: dict[str, str] = {}


class Summary(BaseModel, frozen=True):
    """Measurements of the run; None beside a reason where there was none."""

    latency: tuple[Measured, ...]
    peak_bytes: int | None
    sqnr_db: float | None
    """The lowest of the built engine's, over the points of the shape range."""
    metric: str | None
    value: float | None
    drop: float | None
    reasons: dict[str, str] = {}


class Preprocessing(BaseModel, frozen=True):
    """Steps that the run took with its data before it was fed; the package does none of them."""

    options: dict[str, Any]
    """The recipe's data options that were given."""
    notes: tuple[str, ...]


class Manifest(BaseModel, frozen=True, populate_by_name=True):
    """Describe the whole document."""

    schema_name: Literal["enginesmith.bundle/1"] = Field(SCHEMA, alias="schema")
    format: Literal["bundle", "triton"]
    variant: str
    precision: str
    engine: EngineRecord
    signature: Signature
    shapes: dict[str, ShapeRange]
    """By dynamic dimension; an engine that is built for ranges takes no other sizes."""
    interacting_samples: bool = False
    """True if an answer to a sample depends on the others of its batch: requests must not be put together."""
    preprocessing: Preprocessing
    measured: Summary
    thresholds: Thresholds
    """Thresholds that the answers to the test vector have to reach."""
    origin: Origin
    cautions: tuple[str, ...] = ()
    files: dict[str, PackagedFile]
    """Every file of the package but this one, by relative name."""

    def text(self) -> str:
        """Write the manifest as JSON."""
        return self.model_dump_json(indent=1, by_alias=True) + "\n"


def read(folder: Path) -> Manifest:
    """Read the manifest of a package.

    Raises:
        UsageError: there is none, it is damaged, or of another schema.
    """

    def explain(error: OSError) -> UsageError:
        message = f"there is no bundle in {folder}: {FILE}: {error.strerror}"
        return UsageError(message, "give a folder that `enginesmith package` wrote")

    again = "copy the bundle again, or package the run again"
    return documents.read(Manifest, folder / FILE, SCHEMA, "enginesmith package", explain, again)[0]


def list_files(folder: Path) -> dict[str, PackagedFile]:
    """List every file in a folder but the manifest."""
    return {
        name: PackagedFile(sha256=file_digest(folder / name), bytes=(folder / name).stat().st_size)
        for name in files_below(folder, skip=[FILE])
    }


def check_files(folder: Path, manifest: Manifest) -> None:
    """Insist on exactly the files that were packaged.

    Raises:
        ModelError: one is missing, is another one, or was not packaged.
        UsageError: one cannot be read.
    """
    outside = [name for name in manifest.files if not (folder / name).resolve().is_relative_to(folder.resolve())]
    missing = [name for name in manifest.files if not (folder / name).is_file()]
    try:
        there = {} if missing or outside else list_files(folder)
    except OSError as error:
        raise UsageError(f"{error.filename} cannot be read: {error.strerror}", "check its rights") from error
    changed = [name for name, entry in manifest.files.items() if name in there and there[name] != entry]
    extra = sorted(set(there) - set(manifest.files))
    for names, what in (
        (outside, "lies outside of the bundle"),
        (missing, "is missing"),
        (changed, "is not the file that was packaged: its sha256 differs"),
        (extra, "was not packaged"),
    ):
        if names:
            more = f", and so {len(names) - 1} more" if len(names) > 1 else ""
            remedy = (
                "copy the bundle again, or package the run again: engines are code, and this is not what was packaged"
            )
            if all(Path(name).parent.name == "__pycache__" for name in names):
                remedy = (
                    "Python writes it where infer.py is imported: remove the folder __pycache__, and set "
                    "PYTHONDONTWRITEBYTECODE=1 for programs that import it"
                )
            raise ModelError(f"{folder / names[0]} {what}{more}; nothing was loaded", remedy)
