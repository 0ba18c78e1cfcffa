"""List facts for people: the content of a file, of the tables and of the store, and what this machine can do."""

import contextlib
import datetime
import importlib.util
import shlex
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from enginesmith.calibration import describe
from enginesmith.models import MODELS
from enginesmith.pipeline.engines import ENGINES, check_software, describe_file, engine_class, environment, with_files
from enginesmith.pipeline.engines.compatibility import Check, check
from enginesmith.pipeline.engines.stack import find_broken, find_stack
from enginesmith.pipeline.errors import InvalidGraph, MissingCapability, SignatureError, UsageError, install_command
from enginesmith.pipeline.recipe import make
from enginesmith.pipeline.recipe.options import ExportOptions
from enginesmith.pipeline.store.address import default_address
from enginesmith.pipeline.system import plugins
from enginesmith.pipeline.system.device import Availability, Device, unavailable
from enginesmith.pipeline.system.machine import Environment
from enginesmith.pipeline.system.nvidia import GpuState
from enginesmith.pipeline.system.software import Formats
from enginesmith.pipeline.tensors import Signature
from enginesmith.pipeline.units import format_bytes

if TYPE_CHECKING:
    import onnx

    from enginesmith.pipeline.engines.base import Engine
    from enginesmith.pipeline.store.store import Store

Facts = dict[str, Any]

_USUAL_SIZE = 128
"""Size of dynamic dimensions other than the batch, where work is counted: a file says nothing of them."""


def inspect(file: Path) -> Facts:
    """List what is inside a file, run directory or data set; a function that yields feeds is called.

    Raises:
        UsageError: there is no such file, or its kind is not known.
        MissingCapability: a data set needs a package that is not installed.
    """
    if str(file).startswith(("hf:", "timm:")):
        remedy = f"make a file of it, and inspect that: enginesmith export {shlex.quote(str(file))} -o model.onnx"
        raise UsageError(f"{file} is a model that has to be loaded, and inspect reads files", remedy)
    if not file.exists() and not describe.is_data(str(file)):
        raise UsageError(f"{file} does not exist", "check the path")
    if file.name == "fleet.json" or (file / "fleet.json").is_file():
        return _fleet(file)
    if file.name == "run.json" or (file / "run.json").is_file():
        return _run(file)
    if (file / "manifest.json").is_file() and (file / "infer.py").is_file():
        return _bundle(file)
    configurations = (*file.glob("config.pbtxt"), *file.glob("*/config.pbtxt")) if file.is_dir() else ()
    if models := [path.parent for path in configurations]:
        if len(models) > 1:
            raise UsageError(f"{file} has {len(models)} models for Triton", f"inspect one of them: {sorted(models)[0]}")
        return _bundle(models[0])
    if file.is_dir() and (run := file.absolute().parent.parent / "run.json").is_file():
        raise UsageError(f"{file} is a part of a run directory", f"inspect the whole: enginesmith inspect {run.parent}")
    if describe.is_data(str(file)):
        return describe.describe(str(file))
    files = {engine.file_suffix: describe_file for engine in with_files()}
    readers = {".onnx": _onnx, ".pt2": _pt2, ".safetensors": _safetensors, **files}
    if file.suffix not in readers:
        raise UsageError(
            f"{file} is of no known kind",
            f"inspect reads run directories, fleets, bundles, {', '.join(sorted(readers))}, .npz, .npy, .jsonl, "
            ".json of boxes, folders of images, and functions that yield feeds as file.py:function",
        )
    return readers[file.suffix](file)


def _onnx(file: Path) -> Facts:
    from enginesmith.pipeline.frameworks.onnx import model_file, outputs, validation
    from enginesmith.pipeline.frameworks.onnx.flatten import flatten
    from enginesmith.pipeline.tasks.examples import plan_draws

    with tempfile.TemporaryDirectory() as scratch:
        complete = file
        with contextlib.suppress(SignatureError):  # nothing can be fed to it: it is shown as it is
            complete, _ = outputs.complete(file, Path(scratch, "complete"), plan_draws)
        validation.check(complete, str(file))
        graph, _ = flatten(complete, Path(scratch))
        ends: Facts
        try:
            signature = model_file.signature(graph)
            ends = {side: [str(spec) for spec in getattr(signature, side)] for side in ("inputs", "outputs")}
            precision = _precision(graph, signature)
        except SignatureError as error:  # ends that nothing can be fed to, or compared with
            declared = model_file.read(graph).graph
            given = {"inputs": model_file.list_inputs(declared), "outputs": declared.output}
            ends = {side: [f"{each.name}:{_describe_type(each.type)}" for each in given[side]] for side in given}
            precision = {"not known": f"{error.message}; optimize does not take the model as it is"}
        return {
            "kind": "ONNX model",
            **model_file.summary(file).model_dump(mode="json"),
            **ends,
            "external_files": list(model_file.external_files(file)),
            "precision": precision,
            "sparsity": _sparsity(graph),
        }


def _describe_type(kind: "onnx.TypeProto") -> str:
    """Write a type: a tensor's with its dimensions, where ? is one without a name, and … a shape that is not given."""
    from enginesmith.pipeline.frameworks.onnx.model_file import dtype_name

    name = kind.WhichOneof("value")
    if name is None:
        return "a value without a type"
    word, inner = str(name).removesuffix("_type"), getattr(kind, name)
    if word in ("tensor", "sparse_tensor"):
        sizes = (dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in inner.shape.dim)
        shape = ",".join(map(str, sizes)) if inner.HasField("shape") else "…"
        text = f"{dtype_name(inner.elem_type)}:{shape}"
        return text if word == "tensor" else f"sparse({text})"
    if word in ("sequence", "optional"):
        return f"{word}({_describe_type(inner.elem_type)})"
    if word == "map":
        return f"map({dtype_name(inner.key_type)}, {_describe_type(inner.value_type)})"
    return word


def _sparsity(file: Path) -> Facts:
    """Zeros among the weights of products, and the pattern that they are in."""
    from enginesmith.pipeline.frameworks.onnx import model_file
    from enginesmith.pipeline.passes.sparsify import check, sparsify

    try:
        weights = check.sparse_weights(file)
    except InvalidGraph as error:
        return {"not known": error.message}
    elements = sum(weight.elements for weight in weights)
    zeros = sum(weight.zeros for weight in weights)
    return {
        "marked as": sparsify.of(model_file.skeleton(file)) or "dense",
        "zeros": f"{zeros / elements:.1%} of {elements:,} weights of products"
        if elements
        else "no weights of products",
        "2:4": f"{sum(weight.two_of_four for weight in weights)} of {len(weights)} weights",
    }


def _precision(file: Path, signature: Signature) -> Facts:
    """Shares of work and weights by precision, of one sample; what else is dynamic is taken at a usual size.

    So is the batch, where more products have a size then.
    """
    from enginesmith.pipeline.frameworks.onnx import coverage
    from enginesmith.pipeline.frameworks.records import format_shares
    from enginesmith.pipeline.frameworks.samples import batch_symbol

    usual, batch = dict.fromkeys(signature.symbols, _USUAL_SIZE), batch_symbol(signature)
    sizes = usual | ({batch: 1} if batch else {})
    covered = coverage.compute_coverage(file, sizes)
    if covered.unknown_products and batch:  # it may be a time, of which windows take several steps
        longer = coverage.compute_coverage(file, usual)
        if longer.unknown_products < covered.unknown_products:
            sizes, covered = usual, longer
    return {
        "sizes": ", ".join(f"{name} {size}" for name, size in sizes.items()) or "all fixed",
        "multiply-adds": f"{covered.total_macs:,}",
        "share of multiply-adds": format_shares(covered.macs),
        "share of weights": format_shares(covered.weights),
        "products": ", ".join(f"{count} {name}" for name, count in covered.products.items()) or "none",
        "products of unknown size": covered.unknown_products,
        "Q/DQ pairs": covered.qdq_pairs,
        "separate low-precision parts": covered.islands,
        "casts between floating-point types": covered.casts,
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
            arrays = [f"{name}: {slice_.get_dtype()}{slice_.get_shape()}" for name, slice_ in slices.items()]
            rows = {slice_.get_shape()[0] for slice_ in slices.values() if slice_.get_shape()}
    except (SafetensorError, OSError) as error:
        raise UsageError(f"cannot read {file}: {error}", "is it a safetensors file, and whole?") from error
    samples = {"samples": rows.pop()} if len(rows) == 1 else {}
    return {"kind": "tensors", "bytes": file.stat().st_size, **samples, "arrays": arrays}


def _run(folder: Path) -> Facts:
    from enginesmith.pipeline.report import sentences
    from enginesmith.pipeline.report.tables import mark_name
    from enginesmith.pipeline.results import run as runs

    run = runs.read(folder)
    reasons = {record.id: (record.reason or record.shortfall).partition("\n")[0] for record in run.records}
    return {
        "kind": "run",
        "name": run.name,
        "created": run.created,
        "complete": run.complete,
        "model": run.model.source,
        "data": run.model.data,
        "winner": run.winner,
        "verdict": sentences.summarize(run),
        "variants": [f"{mark_name(record)}: {record.status} {reasons[record.id]}".strip() for record in run.records],
        "notes": [*sentences.list_footnotes(run), *run.environment.get("warnings", ())],
    }


def _bundle(folder: Path) -> Facts:
    from enginesmith.pipeline.results.package import manifest as manifests

    bundle = manifests.read(folder)
    return {
        "kind": bundle.format,
        "variant": bundle.variant,
        "engine": f"{bundle.engine.package} {bundle.engine.version}, on {bundle.engine.device}",
        "model": bundle.origin.model,
        "run": bundle.origin.run,
        "inputs": [str(spec) for spec in bundle.signature.inputs],
        "outputs": [str(spec) for spec in bundle.signature.outputs],
        "cautions": [*bundle.cautions],
        **({"check": shlex.join(["enginesmith", "verify", str(folder)])} if bundle.format == "bundle" else {}),
    }


def _fleet(folder: Path) -> Facts:
    from enginesmith.pipeline.report import fleet_tables
    from enginesmith.pipeline.results import fleet as records

    fleet = records.read(folder)
    return {
        "kind": "fleet",
        "name": fleet.name,
        "created": fleet.created,
        "complete": fleet.complete,
        "file": fleet.file,
        "verdict": fleet_tables.summarize(fleet),
        "entries": [
            f"{entry.name}: {fleet_tables.describe_status(entry)}: {entry.winner.id if entry.winner else entry.reason}"
            for entry in fleet.entries
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
    """List the engines and whether they can be used on a device; their packages are imported to find it out."""
    return _list_engines(device, _find_broken_packages())


def _list_engines(device: str, broken: Mapping[str, MissingCapability]) -> list[Facts]:
    where = make({"model": "digits", "device": device}, listed=True).where
    rows = []
    for name in ENGINES:
        engine = engine_class(name)
        here, builds = _check_engine(engine, where, broken)
        rows.append(
            {
                "engine": name,
                "made from": engine.consumes,
                "usable": "yes" if here.ok else "no",
                "builds here": "yes" if builds.ok else f"no: {builds.reason}",
                "reason": here.reason or builds.reason,
                "remedy": here.remedy or builds.remedy,
            }
        )
    unknown = dict.fromkeys(("made from", "usable", "builds here"), "unknown")
    for plugin in plugins.installed(plugins.ENGINES):  # not imported for this
        reason = f"from a plug-in: {plugin.distribution} {plugin.version}, imported where it is named"
        rows.append({"engine": plugin.name, **unknown, "reason": reason, "remedy": ""})
    return rows


def _find_broken_packages() -> dict[str, MissingCapability]:
    """Describe the packages of engines that are installed and cannot be imported."""
    return find_broken(dict.fromkeys(package for name in ENGINES for package in engine_class(name).packages))


def _check_engine(
    engine: "type[Engine]", where: Device, broken: Mapping[str, MissingCapability]
) -> tuple[Availability, Availability]:
    """Check whether an engine can be used, and built; one with a broken package is not imported here."""
    fault = next((broken[package] for package in engine.packages if package in broken), None)
    if fault is None:
        return engine.available(where), engine.buildable(where)
    lacking, here = unavailable(fault.message, fault.remedy), engine.installed(where)
    return lacking if here.ok else here, lacking


def list_entries(store: "Store") -> list[Facts]:
    """List what a store holds."""
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


# The doctor: what this machine can do, and whether its software fits together.

_EXTRAS = (
    ("transformers", "transformers", "models as hf:…"),
    ("timm", "timm", "models as timm:…"),
    ("PIL", "pillow", "folders of images as data"),
    ("tokenizers", "transformers", ".jsonl files of texts as data"),
)
_UNKNOWN = "unknown"


class Diagnosis(BaseModel, frozen=True):
    """The state of this machine and its software, with the command for what is missing."""

    environment: Environment
    broken: tuple[str, ...]
    """Packages that are installed and cannot be imported."""
    compatibility: tuple[Check, ...]
    engines: dict[str, dict[str, str]]
    """By kind of device: engine → ``ok``, or why not."""
    fixes: tuple[str, ...]
    """Commands for what is missing or does not fit."""
    store: str


def examine() -> Diagnosis:
    """Look at everything. Takes some seconds, most of them for importing torch."""
    broken = _find_broken_packages()
    compared = [
        *(
            check(
                f"package {name}",
                fault.message.removeprefix(f"{name} "),
                "a package that can be imported",
                False,
                fault.remedy,
            )
            for name, fault in broken.items()
        ),
        *check_software(find_stack(broken), None if "onnx" in broken else _exported_formats()),
    ]
    reinstalls = {fault.remedy for fault in broken.values()}  # said once for each package, and not for each engine
    usable, missing = {}, []
    for where in ("cpu", "cuda"):
        rows = _list_engines(where, broken)
        usable[where] = {row["engine"]: _describe_usable(row) for row in rows}
        missing += [
            f"{row['engine']} on {where}: {row['remedy']}"
            for row in rows
            if row["remedy"] and row["remedy"] not in reinstalls and where in engine_class(row["engine"]).kinds
        ]
    missing += [
        f"{what}: {install_command(distribution)}"
        for package, distribution, what in _EXTRAS
        if importlib.util.find_spec(package) is None
    ]
    return Diagnosis(
        environment=environment(),
        broken=tuple(broken),
        compatibility=tuple(compared),
        engines=usable,
        fixes=(*(f"{check.name}: {check.fix}" for check in compared if check.ok is False), *missing),
        store=default_address().text,
    )


def _exported_formats() -> Formats:
    """Look up the format of exported models: the specification's for that opset; exporters may write an older one."""
    from onnx import helper

    opset = ExportOptions().opset
    return Formats(ir=int(helper.find_min_ir_version_for([helper.make_opsetid("", opset)])), opset=opset)


def _describe_usable(row: Facts) -> str:
    if row["usable"] != "no":
        built = not row["builds here"].startswith("no: ")
        return (row["reason"] or "ok") if built else f"runs, and cannot be built here: {row['reason']}"
    elsewhere = engine_class(row["engine"]).built_elsewhere and row["builds here"] == "yes"
    return f"no: {row['reason']}" + ("; it can be built here for other machines" if elsewhere else "")


def readable(diagnosis: Diagnosis) -> Facts:
    """Describe it for people: what is here, what spoils numbers, what fits and runs, and last what is to be done."""
    machine, words = diagnosis.environment, {True: "yes: ", False: "NO: ", None: "– "}
    gpus = {f"cuda:{index}": _describe_gpu(gpu) for index, gpu in enumerate(machine.gpus or ())}
    return {
        "processor": _describe_processor(machine),
        "memory": {
            "size": f"{format_bytes(machine.memory_bytes)}, available: {format_bytes(machine.available_memory_bytes)}",
            "container's limit": f"none ({machine.reasons.get('memory_limit_bytes', '')})"
            if machine.memory_limit_bytes is None
            else f"{format_bytes(machine.memory_limit_bytes)}, left: {format_bytes(machine.memory_limit_left_bytes)}",
            "transparent huge pages": machine.transparent_huge_pages or _UNKNOWN,
        },
        **(gpus or {"GPUs": f"none: {machine.reasons.get('gpus', '')}"}),
        "software": {"system": machine.system, "kernel": machine.kernel, "python": machine.python, **machine.packages},
        "store": diagnosis.store,
        "what spoils measurements": list(machine.warnings),
        "what fits together": {
            check.name: f"{words[check.ok]}{check.found}; needed: {check.needed}"
            + (f" ({check.note})" if check.note else "")
            for check in diagnosis.compatibility
        },
        **{f"engines on {where}": rows for where, rows in diagnosis.engines.items()},
        "what to do about what is missing or does not fit": list(diagnosis.fixes),
    }


def _describe_processor(machine: Environment) -> Facts:
    unlimited = f"none ({machine.reasons.get('quota_cores', '')})"
    clocks = [
        f"{mhz:.0f} MHz {word}"
        for word, mhz in (
            ("now", machine.frequency_mhz),
            ("at least", machine.frequency_min_mhz),
            ("at most", machine.frequency_max_mhz),
        )
        if mhz is not None
    ]
    lost = [
        words.format(value)
        for words, value in (
            ("{:.0f} periods of the quota throttled", machine.throttled_periods),
            ("slowed down by heat {:.0f} times", machine.thermal_throttles),
            ("{:.0f} s given to other machines", machine.stolen_seconds),
        )
        if value is not None
    ]
    yes = {True: "yes", False: "no", None: f"{_UNKNOWN} ({machine.reasons.get('turbo', '')})"}
    return {
        "model": f"{machine.processor} ({machine.architecture}{', virtual machine' if machine.virtual else ''})",
        "cores": f"{machine.cores}, usable here: {machine.usable_cores}, "
        f"threads per core: {machine.threads_per_core or _UNKNOWN}, memory nodes: {machine.numa_nodes or _UNKNOWN}",
        "container's limit": unlimited if machine.quota_cores is None else f"{machine.quota_cores:g} cores",
        "load": f"{machine.load_average:.2f}",
        "governor": machine.governor or f"{_UNKNOWN} ({machine.reasons.get('governor', '')})",
        "turbo": yes[machine.turbo],
        "clock": ", ".join(clocks) or _UNKNOWN,
        "lost since the start": ", ".join(lost) or "nothing that is counted here",
        "vector units": ", ".join(machine.vector_units),
        **{
            kind.replace("_", " "): ", ".join(f"{name}={value}" for name, value in getattr(machine, kind).items())
            or "none"
            for kind in ("thread_variables", "other_variables")
        },
    }


def _describe_gpu(gpu: GpuState) -> Facts:
    """Format every field with its unit; what is not known, with the reason."""
    facts: Facts = {}
    for name, value in gpu.model_dump(exclude={"reasons"}).items():
        label = name.removesuffix("_bytes").replace("_", " ")
        if value is None:
            facts[label] = f"{_UNKNOWN} ({gpu.reasons.get(name, '')})"
        elif name.endswith("_bytes"):
            facts[label] = format_bytes(value)
        elif name == "processes":
            facts[label] = ", ".join(f"{item['pid']} ({format_bytes(item['used_bytes'])})" for item in value) or "none"
        elif isinstance(value, tuple | list):
            facts[label] = ", ".join(value) or "nothing"
        else:
            facts[label] = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
    return facts
