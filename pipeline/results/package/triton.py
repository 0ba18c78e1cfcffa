"""Write a model repository for Triton Inference Server: MODEL/config.pbtxt and MODEL/1/model.onnx or model.plan.

The fields are those of ``model_config.proto``; the options of the ONNX Runtime backend are those of its README.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from enginesmith.pipeline.engines import ENGINES, engine_class
from enginesmith.pipeline.engines.base import Message, quoted
from enginesmith.pipeline.errors import UsageError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.results.package import manifest as manifests
from enginesmith.pipeline.results.package.describe import Chosen, describe
from enginesmith.pipeline.results.package.manifest import Manifest
from enginesmith.pipeline.tensors import TensorSpec

CONFIG, VERSION = "config.pbtxt", "1"
_TYPES = {"float16": "FP16", "float32": "FP32", "float64": "FP64", "bfloat16": "BF16"}
_QUEUE_MICROSECONDS = 100
_MODEL_NAME = re.compile(r"[^A-Za-z0-9_-]+")


def write(chosen: Chosen, folder: Path) -> None:
    """Write a model repository into an empty folder.

    Raises:
        UsageError: Triton has no backend for the engine.
    """
    file = _file(chosen)
    name = model_name(chosen)
    home = folder / name
    version = home / VERSION
    for relative, source in chosen.files.items():
        target = version / (file if relative == chosen.main.name else relative)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
    found = describe(chosen, "triton", f"{VERSION}/{file}", {})
    (home / CONFIG).write_text(config(name, found))
    whole = found.model_copy(update={"files": manifests.list_files(home)})
    (home / manifests.FILE).write_text(whole.text())


def model_name(chosen: Chosen) -> str:
    """Derive the served model's name from the model's own, as far as Triton takes it."""
    text = chosen.run.model.source.partition("@")[0]
    last = re.split(r"[/\\]", text)[-1].removesuffix(".onnx").removesuffix(".pt2")
    return (
        _MODEL_NAME.sub("_", last.split(":")[-1] if text.startswith(("hf:", "timm:")) else last).strip("_") or "model"
    )


def _file(chosen: Chosen) -> str:
    engine = chosen.record.engine
    if backend := engine_class(engine).triton():
        return backend.file
    usable = (one for one in chosen.run.variants if one.graph and one.status != "failed")
    graphs = [one.id for one in usable if engine_class(one.engine).loads_graph]
    able = " or ".join(name for name in ENGINES if engine_class(name).triton())
    remedy = f"--variant {graphs[0]}" if graphs else f"optimize with --engine {able} as well"
    raise UsageError(
        f"Triton has a backend for engines of {able}, and not of {engine}",
        f"package another variant ({remedy}), or make a bundle: -f bundle",
    )


def config(name: str, found: Manifest) -> str:
    """Write the text of ``config.pbtxt``."""
    batch = batch_dimension(found)
    most = found.shapes[batch].max if batch else 0
    backend = engine_class(found.engine.name).triton()
    assert backend is not None
    fields: list[tuple[str, Any]] = [("name", quoted(name)), ("backend", quoted(backend.name))]
    if backend.platform:
        fields.append(("platform", quoted(backend.platform)))
    fields += [("default_model_filename", quoted(Path(found.engine.file).name)), ("max_batch_size", most)]
    fields += [("input", _tensor(spec, batch)) for spec in found.signature.inputs]
    fields += [("output", _tensor(spec, batch)) for spec in found.signature.outputs]
    if batch and (batching := _batching(found)) is not None:
        fields.append(("dynamic_batching", batching))
    kind = "KIND_GPU" if found.engine.device == "cuda" else "KIND_CPU"
    fields.append(("instance_group", Message([("count", 1), ("kind", kind)])))
    fields += backend.configure(found.engine.options, found.engine.device)
    comments = [
        f"# {found.variant} of the run {one_line(found.origin.run)}; {manifests.FILE} beside this file has the rest"
    ]
    comments += [f"# {line}" for line in _comments(found, batch)]
    return "\n".join([*comments, *Message(fields).lines()]) + "\n"


def batch_dimension(found: Manifest) -> str | None:
    """Find the dimension that Triton may put requests together along, if there is one.

    It leads every input and output and stands nowhere else in them, and the engine takes a single row.
    """
    symbol = samples.batch_symbol(found.signature)
    specs = (*found.signature.inputs, *found.signature.outputs)
    leads = symbol is not None and all(spec.shape[:1] == (symbol,) and symbol not in spec.shape[1:] for spec in specs)
    known = found.shapes.get(symbol) if symbol and leads else None
    return symbol if symbol and known and (known.min == 1 or _takes_any_size(found, symbol)) else None


def _takes_any_size(found: Manifest, dimension: str) -> bool:
    """Tell whether the engine has no profile of sizes, and nobody set a range for this dimension.

    The range then only says which batch sizes were measured.
    """
    return engine_class(found.engine.name).loads_graph and dimension not in found.origin.recipe.get("shapes", {})


def _tensor(spec: TensorSpec, batch: str | None) -> Message:
    dims = [-1 if isinstance(dim, str) else dim for dim in (spec.shape[1:] if batch else spec.shape)]
    dtype = _TYPES.get(spec.dtype, spec.dtype.upper())
    fields: list[tuple[str, Any]] = [("name", quoted(spec.name)), ("data_type", f"TYPE_{dtype}"), ("dims", dims or [1])]
    if not dims:  # Triton has no tensors without dimensions, and drops this one for the model
        fields.append(("reshape", Message([("shape", [])])))
    return Message(fields)


def _batching(found: Manifest) -> Message | None:
    """Prefer batches that were measured to do more a second than any smaller one; None where batching does not pay."""
    batch = batch_dimension(found)
    assert batch is not None
    rows = sorted((row.batch, row.throughput_per_s) for row in found.measured.latency if row.throughput_per_s)
    rows = [(size, rate) for size, rate in rows if size <= found.shapes[batch].max]
    better = [size for size, rate in rows if size > 1 and all(rate > other for least, other in rows if least < size)]
    if rows and rows[0][0] == 1 and len(rows) > 1 and not better:
        return None
    preferred: list[tuple[str, Any]] = [("preferred_batch_size", better)] if better else []
    return Message([*preferred, ("max_queue_delay_microseconds", _QUEUE_MICROSECONDS)])


def _comments(found: Manifest, batch: str | None) -> Iterator[str]:
    if batch is None:
        yield "no batching: no dynamic dimension leads every input and output and takes a size of 1"
    elif _batching(found) is None:
        yield "no dynamic batching: in the run no larger batch did more a second than batch 1"
    if backend := engine_class(found.engine.name).triton():
        yield from backend.remark(found.engine.model_dump())


def one_line(text: str) -> str:
    """Remove line breaks, which would end a comment."""
    return " ".join(text.split())
