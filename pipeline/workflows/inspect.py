"""List facts for people: what is in a file, what this machine can do, what the tables and the store hold."""

import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginesmith.calibration import describe
from enginesmith.models import MODELS
from enginesmith.pipeline.engines import describe_file, with_files
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.system import plugins
from enginesmith.pipeline.system.plugins import Plugin
from enginesmith.pipeline.tensors import Signature
from enginesmith.pipeline.units import format_bytes

if TYPE_CHECKING:
    from enginesmith.pipeline.store.store import Store


Facts = dict[str, Any]

_USUAL_SIZE = 128
"""Of dynamic dimensions other than the batch, where work is counted: a file says nothing of them."""


def inspect(file: Path) -> Facts:
    """List what is inside a file, run directory or data set; a function that yields feeds is called.

    Raises:
        UsageError: there is no such file, or its kind is not known.
        MissingCapability: a data set needs a package that is not installed.
    """
    if not file.exists() and not describe.is_data(str(file)):
        raise UsageError(f"{file} does not exist", "check the path")
    if file.name == "fleet.json" or (file / "fleet.json").is_file():
        return _fleet(file)
    if file.name == "run.json" or (file / "run.json").is_file():
        return _run(file)
    if describe.is_data(str(file)):
        return describe.describe(str(file))
    files = {engine.file_suffix: describe_file for engine in with_files()}
    readers = {".onnx": _onnx, ".pt2": _pt2, ".safetensors": _safetensors, **files}
    if file.suffix not in readers:
        raise UsageError(
            f"{file} is of no known kind",
            f"inspect reads run directories, fleets, {', '.join(sorted(readers))}, .npz, .npy, .jsonl, "
            "folders of images, and functions that yield feeds as file.py:function",
        )
    return readers[file.suffix](file)


def _onnx(file: Path) -> Facts:
    from enginesmith.pipeline.frameworks.onnx import model_file

    model_file.check(file)
    signature = model_file.signature(file)
    return {
        "kind": "ONNX model",
        **model_file.summary(file).model_dump(mode="json"),
        "inputs": [str(spec) for spec in signature.inputs],
        "outputs": [str(spec) for spec in signature.outputs],
        "external_files": list(model_file.external_files(file)),
        "precision": _precision(file, signature),
        "sparsity": _sparsity(file),
    }


def _sparsity(file: Path) -> Facts:
    """Zeros among the weights of products, and the pattern that they are in."""
    from enginesmith.pipeline.frameworks.onnx import model_file
    from enginesmith.pipeline.passes.sparsify import check, sparsify

    found = check.sparse_weights(file)
    elements = sum(one.elements for one in found)
    zeros = sum(one.zeros for one in found)
    return {
        "marked as": sparsify.of(model_file.skeleton(file)) or "dense",
        "zeros": f"{zeros / elements:.1%} of {elements:,} weights of products"
        if elements
        else "no weights of products",
        "2:4": f"{sum(one.two_of_four for one in found)} of {len(found)} weights",
    }


def _precision(file: Path, signature: Signature) -> Facts:
    """Shares of work and weights by precision, of one sample; what else is dynamic is taken at a usual size."""
    from enginesmith.pipeline.frameworks.onnx import coverage
    from enginesmith.pipeline.frameworks.records import format_shares
    from enginesmith.pipeline.frameworks.samples import batch_symbol

    sizes = dict.fromkeys(signature.symbols, _USUAL_SIZE)
    if batch := batch_symbol(signature):
        sizes[batch] = 1
    found = coverage.compute_coverage(file, sizes)
    return {
        "sizes": ", ".join(f"{name} {size}" for name, size in sizes.items()) or "all fixed",
        "multiply-adds": f"{found.total_macs:,}",
        "share of multiply-adds": format_shares(found.macs),
        "share of weights": format_shares(found.weights),
        "products": ", ".join(f"{count} {name}" for name, count in found.products.items()) or "none",
        "products of unknown size": found.unknown_products,
        "Q/DQ pairs": found.qdq_pairs,
        "islands of low precision": found.islands,
        "casts between floating-point types": found.casts,
    }


def _pt2(file: Path) -> Facts:
    """List the archive; the program itself is not loaded."""
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
    except zipfile.BadZipFile as error:
        raise UsageError(f"{file} is no torch.export archive: {error}", "save one with torch.export.save") from error
    return {
        "kind": "torch.export archive",
        "bytes": file.stat().st_size,
        "members": [f"{member.filename} ({format_bytes(member.file_size)})" for member in members],
    }


def _safetensors(file: Path) -> Facts:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as stored:
            slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118 - not a dict
            arrays = [f"{name}: {one.get_dtype()}{one.get_shape()}" for name, one in slices.items()]
            rows = {one.get_shape()[0] for one in slices.values() if one.get_shape()}
    except (SafetensorError, OSError) as error:
        raise UsageError(f"cannot read {file}: {error}", "is it a safetensors file, and whole?") from error
    samples = {"samples": rows.pop()} if len(rows) == 1 else {}
    return {"kind": "tensors", "bytes": file.stat().st_size, **samples, "arrays": arrays}


def _run(folder: Path) -> Facts:
    from enginesmith.pipeline.report import sentences
    from enginesmith.pipeline.report.tables import marked
    from enginesmith.pipeline.results import run as runs

    run = runs.read(folder)
    return {
        "kind": "run",
        "name": run.name,
        "created": run.created,
        "complete": run.complete,
        "model": run.model.source,
        "data": run.model.data,
        "winner": run.winner,
        "verdict": sentences.summarize(run),
        "variants": [f"{marked(one)}: {one.status} {one.reason or one.shortfall}".strip() for one in run.records],
        "notes": [*sentences.list_footnotes(run), *run.environment.get("warnings", ())],
    }


def _fleet(folder: Path) -> Facts:
    from enginesmith.pipeline.report import fleet_tables
    from enginesmith.pipeline.results import fleet as records

    found = records.read(folder)
    return {
        "kind": "fleet",
        "name": found.name,
        "created": found.created,
        "complete": found.complete,
        "file": found.file,
        "verdict": fleet_tables.summarize(found),
        "entries": [
            f"{one.name}: {fleet_tables.describe_status(one)}: {one.winner.id if one.winner else one.reason}"
            for one in found.entries
        ],
        "runs": str((folder if folder.is_dir() else folder.parent) / records.RUNS),
    }


def zoo() -> list[Facts]:
    """List the models of the zoo."""
    return [
        {
            "model": name,
            "parameters": f"{entry.parameters:,}",
            "FLOPs": f"{entry.flops / 1e9:.3g} G",
            "inputs": " ".join(entry.inputs),
            "data": entry.data or "",
            "about": entry.summary,
        }
        for name, entry in MODELS.items()
    ]


def engines(device: str) -> list[Facts]:
    """List the engines and whether they can be used on a device."""
    from enginesmith.pipeline.engines import ENGINES, engine_class
    from enginesmith.pipeline.recipe import make

    where = make({"model": "digits", "device": device}).where
    rows = []
    for name in ENGINES:
        found = engine_class(name)
        here, builds = found.available(where), found.buildable()
        rows.append(
            {
                "engine": name,
                "made from": found.consumes,
                "usable": "yes" if here.ok else "no",
                "builds here": "yes" if builds.ok else f"no: {builds.reason}",
                "reason": here.reason,
                "remedy": here.remedy,
            }
        )
    return [*rows, *map(_plugin, plugins.installed(plugins.ENGINES))]


def _plugin(found: Plugin) -> Facts:
    """Describe an engine of another distribution, which is not imported for this."""
    where = f"from a plug-in: {found.distribution} {found.version}, imported where it is named"
    unknown = dict.fromkeys(("made from", "usable", "builds here"), "unknown")
    return {"engine": found.name, **unknown, "reason": where, "remedy": ""}


def cached(store: "Store") -> list[Facts]:
    """List what a store holds."""
    import datetime

    return [
        {
            "key": entry.key[:16],
            "step": entry.step,
            "kind": entry.kind,
            "size": format_bytes(entry.bytes),
            "last used": datetime.datetime.fromtimestamp(entry.used).isoformat(sep=" ", timespec="seconds"),
        }
        for entry in store.entries()
    ]
