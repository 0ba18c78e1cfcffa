"""Write a variant of a run as a package, whole or not at all: a bundle, or a model repository for Triton."""

import dataclasses
import re
import shlex
import shutil
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel

from enginesmith.pipeline.artifact import file_digest, files_below, replace_folder
from enginesmith.pipeline.engines import ENGINES, engine_class
from enginesmith.pipeline.engines.triton import Fields, Message, quoted
from enginesmith.pipeline.errors import MissingCapability, ModelError, UsageError, storage_errors
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.results.package import manifest as manifests
from enginesmith.pipeline.results.package.describe import Chosen, choose, describe
from enginesmith.pipeline.results.package.manifest import INFER, Manifest
from enginesmith.pipeline.results.package.verify import answer, run_script
from enginesmith.pipeline.results.remeasure import UNTRUSTED, needs_trust
from enginesmith.pipeline.tensors import Array, TensorSpec
from enginesmith.pipeline.units import format_bytes

# A bundle: what is loaded, a manifest, a test vector and a script that runs it with the engine's own package alone.


_MADE_UP = "the test vector is made-up input, and the answers that this engine gave to it when it was packaged"


def write_bundle(chosen: Chosen, folder: Path, keep_samples: bool) -> None:
    """Write a bundle into an empty folder; without samples, its test vector is made up.

    Raises:
        UsageError: the engine has no script to run it without enginesmith.
    """
    script = engine_class(chosen.record.engine).infer_script()
    if script is None:
        raise UsageError(
            f"{chosen.record.engine} has no script that runs a bundle without enginesmith", "package another variant"
        )
    _copy_files(chosen, folder, chosen.main.name)
    assert chosen.record.test_vector is not None
    vector = chosen.folder / chosen.record.test_vector.path
    if keep_samples:
        shutil.copyfile(vector, folder / manifests.VECTOR)
    else:
        chosen = dataclasses.replace(chosen, cautions=(*chosen.cautions, _MADE_UP))
        manifest = describe(chosen, "bundle", chosen.main.name, manifests.list_files(folder))
        stored = samples.read_vector(vector)
        feeds = {name: _make_up(value) for name, value in stored.feeds.items()}
        answers = answer(folder, manifest, feeds)
        made_up = stored._replace(feeds=feeds, outputs=answers, unstable={})
        samples.save_vector(folder / manifests.VECTOR, made_up)
    shutil.copyfile(script, folder / manifests.INFER)
    manifest = describe(chosen, "bundle", chosen.main.name, manifests.list_files(folder))
    (folder / manifests.FILE).write_text(manifest.text(), encoding="utf-8")


def _make_up(sample: Array) -> Array:
    """Draw values of a sample's dtype, shape and range: normal ones for floats, else integers that are as likely."""
    rng, drawn = np.random.default_rng(0), sample
    if sample.size and sample.dtype.kind == "f":
        drawn = rng.normal(sample.astype(float).mean(), sample.astype(float).std(), sample.shape)
    elif sample.size:
        drawn = np.array(rng.integers(int(sample.min()), int(sample.max()), sample.shape, endpoint=True))
    return drawn.astype(sample.dtype)


def _copy_files(chosen: Chosen, folder: Path, main: str, *, records: bool = True) -> None:
    """Copy the variant's files, the one that is loaded under the name ``main``, and enginesmith's records if asked."""
    for name, source in chosen.files.items():
        if not records and source.suffix == ".json":
            continue
        target = folder / (main if name == chosen.main.name else name)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)


# A model repository for Triton Inference Server: MODEL/config.pbtxt and MODEL/1/model.onnx or model.plan. The fields
# are those of ``model_config.proto``; the options of the ONNX Runtime backend are those of its README.

CONFIG, VERSION = "config.pbtxt", "1"
_TYPES = {"float16": "FP16", "float32": "FP32", "float64": "FP64", "bfloat16": "BF16"}
_QUEUE_MICROSECONDS = 100
_MODEL_NAME = re.compile(r"[^A-Za-z0-9_-]+")


def write_repository(chosen: Chosen, folder: Path) -> None:
    """Write a model repository into an empty folder.

    Raises:
        UsageError: Triton has no backend for the engine.
    """
    file, name = _choose_file(chosen), model_name(chosen)
    home = folder / name
    _copy_files(chosen, home / VERSION, file, records=False)
    manifest = describe(chosen, "triton", f"{VERSION}/{file}", {})
    (home / CONFIG).write_text(config(name, manifest), encoding="utf-8")
    whole = manifest.model_copy(update={"files": manifests.list_files(home)})
    (home / manifests.FILE).write_text(whole.text(), encoding="utf-8")


def model_name(chosen: Chosen) -> str:
    """Derive the served model's name from the model's own, as far as Triton takes it."""
    text = chosen.run.model.source.partition("@")[0]
    last = re.split(r"[/\\]", text)[-1].removesuffix(".onnx").removesuffix(".pt2")
    name = last.split(":")[-1] if text.startswith(("hf:", "timm:")) else last
    return _MODEL_NAME.sub("_", name).strip("_") or "model"


def _choose_file(chosen: Chosen) -> str:
    engine = chosen.record.engine
    if backend := engine_class(engine).triton():
        return backend.file
    usable = (variant for variant in chosen.run.variants if variant.graph and variant.status != "failed")
    graphs = [variant.id for variant in usable if engine_class(variant.engine).loads_graph]
    able = " or ".join(name for name in ENGINES if engine_class(name).triton())
    remedy = f"--variant {graphs[0]}" if graphs else f"optimize with --engine {able} as well"
    raise UsageError(
        f"Triton has a backend for engines of {able}, and not of {engine}",
        f"package another variant ({remedy}), or make a bundle: -f bundle",
    )


def config(name: str, manifest: Manifest) -> str:
    """Write the text of ``config.pbtxt``."""
    batch = batch_dimension(manifest)
    most = manifest.shapes[batch].max if batch else 0
    backend = engine_class(manifest.engine.name).triton()
    assert backend is not None
    fields: Fields = [("name", quoted(name)), ("backend", quoted(backend.name))]
    if backend.platform:
        fields.append(("platform", quoted(backend.platform)))
    fields += [("default_model_filename", quoted(Path(manifest.engine.file).name)), ("max_batch_size", most)]
    fields += [("input", _tensor(spec, batch)) for spec in manifest.signature.inputs]
    fields += [("output", _tensor(spec, batch)) for spec in manifest.signature.outputs]
    batching = _batching(manifest, batch) if batch and not manifest.interacting_samples else None
    if batching is not None:
        fields.append(("dynamic_batching", batching))
    kind = "KIND_GPU" if manifest.engine.device == "cuda" else "KIND_CPU"
    group = backend.group(manifest.engine.options)
    fields.append(("instance_group", Message([("count", 1), ("kind", kind), *group])))
    fields += backend.configure(manifest.engine.options, manifest.engine.device)
    run = " ".join(manifest.origin.run.split())  # a line break would end the comment
    comments = [f"{manifest.variant} of the run {run}; {manifests.FILE} beside this file has the rest"]
    if batch is None:
        comments.append("no batching: no dynamic dimension leads every input and output and takes a size of 1")
    elif manifest.interacting_samples:
        comments.append("no dynamic batching: the answer to a sample depends on the rest of its batch")
    elif batching is None:
        comments.append("no dynamic batching: no batch was measured to do more a second than every smaller one")
    comments += backend.remark(manifest.engine.model_dump())
    return "\n".join([*(f"# {line}" for line in comments), *Message(fields).lines()]) + "\n"


def batch_dimension(manifest: Manifest) -> str | None:
    """Find the dimension that Triton may put requests together along, if there is one.

    It leads every input and output and stands nowhere else in them, and the engine takes a single row.
    """
    symbol = samples.batch_symbol(manifest.signature)
    specs = (*manifest.signature.inputs, *manifest.signature.outputs)
    leads = symbol is not None and all(
        spec.shape[:1] == (symbol,) and spec.symbols.count(symbol) == 1 for spec in specs
    )
    if symbol is None or not leads or symbol not in manifest.shapes:
        return None
    # an engine without a profile of sizes takes any, where nobody set a range: that only says what was measured
    any_size = engine_class(manifest.engine.name).loads_graph and symbol not in manifest.origin.recipe.get("shapes", {})
    return symbol if manifest.shapes[symbol].min == 1 or any_size else None


def _tensor(spec: TensorSpec, batch: str | None) -> Message:
    dims = [-1 if isinstance(dim, str) else dim for dim in (spec.shape[1:] if batch else spec.shape)]
    dtype = _TYPES.get(spec.dtype, spec.dtype.upper())
    fields: Fields = [("name", quoted(spec.name)), ("data_type", f"TYPE_{dtype}"), ("dims", dims or [1])]
    if not dims:  # Triton has no tensors without dimensions, and drops this one for the model
        fields.append(("reshape", Message([("shape", [])])))
    return Message(fields)


def _batching(manifest: Manifest, batch: str) -> Message | None:
    """Prefer batches that were measured to do more a second than every smaller one; None where none was."""
    rows = sorted((row.batch, row.throughput_per_s) for row in manifest.measured.latency if row.throughput_per_s)
    rows = [(size, rate) for size, rate in rows if size <= manifest.shapes[batch].max]
    better = [
        size for size, rate in rows if size > rows[0][0] and all(rate > other for least, other in rows if least < size)
    ]
    if not better:
        return None
    return Message([("preferred_batch_size", better), ("max_queue_delay_microseconds", _QUEUE_MICROSECONDS)])


# The command's work: choose a variant, and write it as a package, whole or not at all.

Format = Literal["bundle", "triton"]
FORMATS: tuple[Format, ...] = ("bundle", "triton")


class Packaged(BaseModel, frozen=True):
    """Summary of a package that was written."""

    format: Format
    variant: str
    folder: str
    files: tuple[str, ...]
    bytes: int
    manifest: str
    manifest_sha256: str
    """Names the package as a whole, as the manifest names every other file by its digest."""
    cautions: tuple[str, ...]
    check: str = ""
    """Output of ``python infer.py`` in the bundle; empty for other packages."""
    next: str

    @property
    def summary(self) -> str:
        """Describe the package for people."""
        notes = "".join(f"\n  note: {text}" for text in self.cautions)
        what = {"bundle": "a bundle", "triton": "a Triton model repository"}[self.format]
        size = f"{len(self.files)} files, {format_bytes(self.bytes)}"
        check = f"\n  {INFER}: {self.check}" if self.check else ""
        return f"wrote {self.folder}: {self.variant} as {what}, {size}{notes}{check}\n{self.next}"


def package(
    run: Path,
    form: Format,
    output: Path,
    variant: str | None = None,
    *,
    keep_samples: bool = True,
    trust: bool = False,
) -> Packaged:
    """Write the winner of a run, or another variant, as a package; without samples of the user's data if asked.

    A bundle's script is tried out; ``trust`` does that for an engine with machine code, too.

    Raises:
        UsageError: the folder is there already, or the variant is nothing that can be packaged so.
        MissingCapability: a test vector is to be made up, and this machine cannot run the engine, or its code is not
            trusted.
        ModelError: the run's files are not those that it made, or the bundle's script does not run it.
        StoreError: the folder cannot be written.

    Nothing is left of the folder where an error is raised.
    """
    if output.exists() or output.is_symlink():
        raise UsageError(f"{output} is there already", "give a new folder: -o DIR")
    chosen, check = choose(run, variant), ""
    with storage_errors(f"the output {output}"), replace_folder(output) as whole:
        whole.mkdir()
        if form == "bundle":
            unknown = needs_trust(chosen.record) and not trust
            if unknown and not keep_samples:
                raise MissingCapability(
                    f"the test vector is to be made up, and {UNTRUSTED}",
                    "keep the samples; or, if you trust who made the run, add --trust",
                )
            write_bundle(chosen, whole, keep_samples)
            check = f"not run: {UNTRUSTED}; --trust runs it" if unknown else _check_script(chosen, whole)
        else:
            write_repository(chosen, whole)
    names = files_below(output)
    path = next(output / name for name in names if Path(name).name == manifests.FILE)
    manifest = manifests.read(path.parent)
    folder, script, repository = (shlex.quote(str(path)) for path in (output, output / INFER, output.resolve()))
    trusting = " --trust" if needs_trust(chosen.record) else ""
    after = {
        "bundle": f"check it anywhere: enginesmith verify {folder}{trusting}, or python {script}",
        "triton": f"serve it: tritonserver --model-repository={repository} --disable-auto-complete-config",
    }
    return Packaged(
        format=form,
        variant=chosen.record.id,
        folder=str(output),
        files=tuple(names),
        bytes=sum((output / name).stat().st_size for name in names),
        manifest=str(path.relative_to(output)),
        manifest_sha256=file_digest(path),
        cautions=manifest.cautions,
        check=check,
        next=after[form],
    )


def _check_script(chosen: Chosen, folder: Path) -> str:
    """Run the bundle's script; what failed or was rejected in the run may differ, as its cautions say."""
    try:
        return run_script(folder, manifests.read(folder))
    except ModelError as error:
        if chosen.record.status != "failed" and not chosen.record.rejected:
            raise
        return error.message
