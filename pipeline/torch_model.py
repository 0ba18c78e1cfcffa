"""A loaded PyTorch model with named inputs and outputs, and how it is kept as an artifact.

The artifact holds no pickle: ``model.json`` says which factory to call and how the outputs are named,
``state.safetensors`` has the weights, ``example.safetensors`` one feed for each input.
"""

import contextlib
import dataclasses
import inspect
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor, nn

from enginesmith.pipeline import factories
from enginesmith.pipeline.artifact import Artifact, file_digest, portable
from enginesmith.pipeline.errors import ModelError, SignatureError, SourceError
from enginesmith.pipeline.pruning import record as pruning
from enginesmith.pipeline.pruning.record import Surgery, named_tensors
from enginesmith.pipeline.skip_init import parameters_left_empty
from enginesmith.pipeline.source import SAVED, Source, rebased, resolve
from enginesmith.pipeline.store import translated
from enginesmith.pipeline.tensors import Array, Signature, TensorSpec, check_feeds
from enginesmith.pipeline.torch_shapes import default_specs, dtype_name, infer_dims, sizes_of
from enginesmith.pipeline.watch import watching

RECORD = SAVED
_UNNAMED = re.compile(r"input_\d+")
"""Names of inputs that have none: the module takes ``*args``."""
_SMALL_BYTES = 32 << 20
"""Files below this are looked at whenever a model is rebuilt; the tensors of larger ones are in the artifact."""
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_STATE, _EXAMPLE = "state.safetensors", "example.safetensors"


class LoadOptions(BaseModel):
    """How a source is loaded: input specifications where the user gave some, the seed for random weights."""

    model_config = ConfigDict(frozen=True)

    inputs: tuple[TensorSpec, ...] = ()
    seed: int = 0
    allow_pickle: bool = False


class _Record(BaseModel):
    """What ``model.json`` holds."""

    model: str
    options: LoadOptions
    code: tuple[tuple[str, str], ...]
    """Name and sha256 of each file that the model was made of, so that other code makes another artifact."""
    packages: dict[str, str]
    signature: Signature
    output_names: tuple[str, ...]
    tied: dict[str, str]
    """State entries that share memory with another one → that other."""
    draw: bool = False
    """Whether the factory has to draw its random weights, although others replace them: something is made of them."""
    surgery: Surgery | None = None
    """What pruning changed of the module that the factory builds."""


class NamedForward(nn.Module):
    """The user's module as a function of tensors in order: names in, a flat tuple out."""

    def __init__(self, model: nn.Module, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self.training = False
        self.outputs = outputs
        self._keywords = inputs if _takes_keywords(model, inputs) else None

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Tensors in the order of the signature's inputs → tensors in the order of its outputs."""
        flat = flatten(self.call(*tensors))[0]
        return tuple(flat[name] for name in self.outputs) if self.outputs else tuple(flat.values())

    def call(self, *tensors: Tensor) -> Any:
        """What the user's module returns, as it returns it."""
        if self._keywords is None:
            return self.model(*tensors)
        return self.model(**dict(zip(self._keywords, tensors, strict=True)))


@dataclass
class LoadedModel:
    """A module ready to run: ``module(*tensors)`` takes and returns tensors in the order of the signature."""

    module: NamedForward
    signature: Signature
    example: dict[str, Tensor]
    notes: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    """What was read of the user's while it was built: code and weights."""
    packages: dict[str, str] = dataclasses.field(default_factory=dict)
    """Installed packages that it is built with."""
    answers: tuple[Tensor, ...] = ()
    """What it answers to the example, where it was just loaded."""

    @property
    def dynamic_sizes(self) -> dict[str, int]:
        """The size that the example has along each dynamic dimension."""
        return sizes_of(self.signature.inputs, self.example)


def load(source: Source, options: LoadOptions) -> LoadedModel:
    """Build a source's module and find out its signature by running it.

    Raises:
        SourceError: the model cannot be built or run, or returns what is no tensor.
        SignatureError: the given inputs do not fit it.
    """
    torch.manual_seed(options.seed)
    with watching(options.allow_pickle) as watch:
        if source.form == "pt2":
            watch.read(source.target)  # torch opens it below Python, where no audit event tells
        built = factories.build(source)
        loaded = _understood(source, options, built)
    return dataclasses.replace(loaded, files=tuple(sorted(watch.files)), packages=watch.packages())


def _understood(source: Source, options: LoadOptions, built: factories.Built) -> LoadedModel:
    example = _example(built, options)
    specs = options.inputs or built.inputs or default_specs(example)
    _check_example(specs, example, "--input" if options.inputs else "the source")
    module = NamedForward(built.module, tuple(example), ())
    with factories.user_errors("running the model on its example inputs", None), torch.inference_mode():
        flat, left_out = flatten(module.call(*example.values()))
        again = flatten(module.call(*example.values()))[0]
    if not flat:
        raise SourceError(f"{source.text} returns no tensor", "its forward has to return tensors")
    if not _alike(tuple(flat.values()), tuple(again.values())):
        raise SourceError(
            f"{source.text} answers differently each time it is run on the same input",
            "take out what is random (dropout, sampling) and what the module remembers from call to call",
        )
    module.outputs = tuple(flat)
    names = built.outputs if len(built.outputs) == len(flat) else module.outputs
    asked = bool(options.inputs or built.inputs)
    signature, notes = infer_dims(module, specs, example, dict(zip(names, flat.values(), strict=True)), asked)
    if left_out:
        notes.append(f"outputs that are no tensors were left out: {', '.join(left_out)}")
    return LoadedModel(module, signature, example, tuple(notes), answers=tuple(flat.values()))


def save(loaded: LoadedModel, source: Source, options: LoadOptions, out: Path) -> None:
    """Write the artifact's files into ``out``.

    Raises:
        StoreError: the disk is full or cannot be written.
    """
    state, tied = _untied(named_tensors(loaded.module.model))
    record = _Record(
        model=source.text,
        options=options,
        code=tuple(portable({path: file_digest(path) for path in loaded.files})),
        signature=loaded.signature,
        output_names=loaded.module.outputs,
        packages=loaded.packages,
        tied=tied,
    )
    _write(state, out / _STATE)
    record = record.model_copy(update={"draw": not _comes_back(loaded, out / _STATE, record)})
    (out / RECORD).write_text(record.model_dump_json(indent=1))
    _write({name: value.contiguous() for name, value in loaded.example.items()}, out / _EXAMPLE)


def save_changed(parent: Artifact, loaded: LoadedModel, out: Path, surgery: Surgery | None = None) -> None:
    """Write an artifact of the parent's model with other weights, and with other sizes where there was ``surgery``.

    ``surgery`` is relative to the parent's module; None says that only weights changed. The module is rebuilt from
    what was written, and has to answer to the example as ``loaded`` does.

    Raises:
        ModelError: the rebuilt module is another one: something was changed that the surgery does not tell of.
        StoreError: the disk is full or cannot be written.
    """
    parents = read_record(parent.folder)
    state, tied = _untied(named_tensors(loaded.module.model))
    made = surgery if parents.surgery is None or surgery is None else parents.surgery.then(surgery)
    record = parents.model_copy(update={"tied": tied, "surgery": made or parents.surgery})
    _write(state, out / _STATE)
    (out / RECORD).write_text(record.model_dump_json(indent=1))
    _write({name: value.contiguous() for name, value in loaded.example.items()}, out / _EXAMPLE)
    _hold_rebuilt(loaded, out / _STATE, record)


def _hold_rebuilt(loaded: LoadedModel, state: Path, record: "_Record") -> None:
    """Insist on the same tensors, bit by bit, and the same answers."""
    with torch.inference_mode(False):
        model = _built_around(state, record)
    before, after = named_tensors(loaded.module.model), named_tensors(model)
    other = [name for name, value in before.items() if name not in after or not _same_bits(value, after[name])]
    feeds = tuple(loaded.example.values())
    with torch.inference_mode():
        answers = NamedForward(model, tuple(loaded.example), record.output_names)(*feeds)
        expected = loaded.module(*feeds)
    if other or not _alike(expected, answers):
        where = f", as at {other[0]!r}" if other else ""
        raise ModelError(
            f"{record.model} cannot be built again as it was changed: the rebuilt module differs{where}",
            "keep sizes in attributes that are whole numbers or tuples of them, and tensors in parameters or buffers",
        )


def _same_bits(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one, other) or (
        torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())
    )


def _comes_back(loaded: LoadedModel, state: Path, record: _Record) -> bool:
    """Whether the stored tensors in a module without random weights answer as the original does.

    Raises:
        SourceError: they do not even where the weights are drawn again: the factory builds another model each time.
    """
    feeds = tuple(loaded.example.values())
    for draw in (False, True):
        # without weights that are drawn, the factory itself may fail: what is in their place is no matrix to invert
        with contextlib.suppress(RuntimeError, ValueError, SourceError):
            with torch.inference_mode(False):
                model = _built_around(state, record.model_copy(update={"draw": draw}))
            with torch.inference_mode():
                alike = _alike(loaded.answers, NamedForward(model, tuple(loaded.example), record.output_names)(*feeds))
            if alike:
                return not draw
    raise SourceError(
        f"{record.model} builds another model each time it is called",
        "keep what it computes in parameters or buffers (register_buffer), or seed it within the factory",
    )


def _alike(before: tuple[Tensor, ...], after: tuple[Tensor, ...]) -> bool:
    """Equal, but for the last bits that threads may add up in another order."""
    pairs = zip(before, after, strict=True)
    return all(
        one.shape == other.shape
        and (torch.equal(one, other) or torch.allclose(one, other, rtol=1e-4, atol=_noise(one), equal_nan=True))
        for one, other in pairs
    )


def _noise(value: Tensor) -> float:
    finite = value[value.isfinite()] if value.is_floating_point() else value[:0]
    return 1e-5 * float(finite.abs().max()) if finite.numel() else 0.0


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path)
    except SafetensorError as error:  # written from Rust: the system's error is in the text only
        found = _OS_ERROR.search(str(error))
        if found is None:
            raise
        raise translated(OSError(int(found[1]), str(error)), "the store") from error


def load_artifact(artifact: Artifact) -> LoadedModel:
    """The module of a torch artifact, with exactly the weights that were stored.

    Raises:
        SourceError: the factory now gives a module that the stored weights do not fit.
    """
    return _loaded(artifact.folder, read_record(artifact.folder))


def _loaded(folder: Path, record: _Record) -> LoadedModel:
    from safetensors.torch import load_file

    model = _built_around(folder / _STATE, record)
    example = load_file(folder / _EXAMPLE)
    ordered = {spec.name: example[spec.name] for spec in record.signature.inputs}
    module = NamedForward(model, tuple(ordered), record.output_names)
    return LoadedModel(module, record.signature, ordered)


def _built_around(state: Path, record: _Record) -> nn.Module:
    """What the factory builds, with the stored tensors in it."""
    from safetensors import safe_open

    torch.manual_seed(record.options.seed)
    drawing = contextlib.nullcontext() if record.draw else parameters_left_empty()
    others = {getattr(module, "__file__", None) for module in list(sys.modules.values())}  # data may be code, too
    with drawing, watching(record.options.allow_pickle) as watch:
        model = factories.build(resolve(record.model)).module
    known = {digest for _, digest in record.code}
    for path in watch.files:
        if str(path) not in others and path.stat().st_size < _SMALL_BYTES and file_digest(path) not in known:
            raise SourceError(f"{path} changed since the model was loaded", "start again, and leave it alone meanwhile")
    if record.surgery is not None:
        _operate(model, record.surgery, record.model)
    own = named_tensors(model)
    with safe_open(state, framework="pt") as stored:
        names = list(stored.keys())
    if set(own) != {*names, *record.tied}:
        raise SourceError(
            f"{record.model} no longer builds the module whose weights were stored",
            "run optimize again, so that it is loaded anew",
        )
    for name in names:
        with safe_open(state, framework="pt") as stored:  # opened for each, as what was read stays mapped until closed
            _put(model, name, own[name], stored.get_tensor(name))
    return model


def _operate(model: nn.Module, surgery: Surgery, text: str) -> None:
    try:
        pruning.apply(surgery, model)
    except LookupError as error:
        raise SourceError(
            f"{text} no longer builds the module that was pruned: there is no {error.args[0]!r}",
            "prune it again, or bring the code back that it was pruned with",
        ) from error


def _put(model: nn.Module, name: str, place: Tensor, value: Tensor) -> None:
    if 0 not in place.stride() or place.numel() <= 1:
        place.copy_(value)
        return
    parent, _, leaf = name.rpartition(".")  # an expanded buffer: its elements share memory and cannot be written
    setattr(model.get_submodule(parent), leaf, value.clone())


def read_saved(folder: Path, options: LoadOptions, out: Path) -> LoadedModel:
    """Bring a saved model's folder into ``out`` as an artifact, and load it; what it is made of has to be as it was.

    Paths in the folder's record are taken from that folder, in an artifact from the current one.

    Raises:
        SourceError: the folder is damaged, or what the model is built with changed.
        SignatureError: ``options`` give other inputs than the model was saved with.
    """
    try:
        record = read_record(folder)
    except ValueError as error:
        raise SourceError(f"{folder / RECORD} is no record of a saved model", "prune the model again") from error
    if options.inputs and options.inputs != record.signature.inputs:
        raise SignatureError(
            f"--input says {', '.join(map(str, options.inputs))}, and the model was saved with "
            f"{', '.join(map(str, record.signature.inputs))}",
            "leave --input away: a saved model names its own inputs",
        )
    allowed = record.options.allow_pickle and options.allow_pickle
    inner = record.options.model_copy(update={"allow_pickle": allowed})
    record = record.model_copy(update={"model": rebased(record.model, folder, Path.cwd()), "options": inner})
    (out / RECORD).write_text(record.model_dump_json(indent=1))
    for name in (_STATE, _EXAMPLE):
        if not (folder / name).is_file():
            raise SourceError(f"the saved model {folder} lacks {name}", "prune the model again")
        shutil.copyfile(folder / name, out / name)
    from safetensors import SafetensorError

    with watching(allowed) as watch:
        try:
            loaded = _loaded(out, record)
        except SafetensorError as error:
            raise SourceError(f"the saved model {folder} is damaged: {error}", "prune the model again") from error
    own = {path for path in watch.files if path.is_relative_to(out.absolute())}
    files = {*watch.files - own, *(folder / name for name in (RECORD, _STATE, _EXAMPLE))}
    return dataclasses.replace(loaded, files=tuple(sorted(files)), packages=watch.packages())


def write_saved(artifact: Artifact, folder: Path, seen_from: Path) -> None:
    """Write a torch artifact's files into a folder, and what lies beside them.

    ``seen_from`` is where the folder is going to be; paths in its record are taken from there.
    """
    shutil.copytree(artifact.folder, folder, ignore=shutil.ignore_patterns("artifact.json"))
    record = read_record(artifact.folder)
    record = record.model_copy(update={"model": rebased(record.model, Path.cwd(), seen_from.resolve())})
    (folder / RECORD).write_text(record.model_dump_json(indent=1))


def read_record(folder: Path) -> "_Record":
    """What ``model.json`` in an artifact's folder says."""
    return _Record.model_validate_json((folder / RECORD).read_bytes())


def read_example(artifact: Artifact) -> dict[str, Array]:
    """The example feeds of a torch artifact; nothing of the model is loaded."""
    from safetensors.numpy import load_file

    return load_file(artifact.folder / _EXAMPLE)


def flatten(value: Any, prefix: str = "") -> tuple[dict[str, Tensor], list[str]]:
    """Tensors of a nested output by name, and descriptions of what was no tensor.

    A lone tensor is ``output``; tuples give ``output_0``, ``output_1``; mappings and dataclasses their own names.
    """
    if isinstance(value, Tensor):
        return {prefix or "output": value}, []
    if value is None:
        return {}, []
    if dataclasses.is_dataclass(value) and not isinstance(value, (type, Mapping)):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        items = [(f"{prefix}_{key}" if prefix else str(key), item) for key, item in value.items()]
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        items = [(f"{prefix}_{key}" if prefix else key, item) for key, item in zip(value._fields, value, strict=True)]
    elif isinstance(value, (tuple, list)):
        items = [(f"{prefix or 'output'}_{index}", item) for index, item in enumerate(value)]
    else:
        return {}, [f"{prefix or 'output'} ({type(value).__name__})"]
    tensors: dict[str, Tensor] = {}
    others: list[str] = []
    for name, item in items:
        below, left_out = flatten(item, name)
        if twice := tensors.keys() & below.keys():
            raise SourceError(f"two outputs are both called {twice.pop()!r}", "give the outputs distinct names")
        tensors |= below
        others += left_out
    return tensors, others


def _example(built: factories.Built, options: LoadOptions) -> dict[str, Tensor]:
    names = tuple(spec.name for spec in options.inputs or built.inputs)
    if built.example is None:
        if not names:
            raise SourceError(
                "the factory gives no example inputs",
                "return (module, example_inputs) from it, or add --input name:dtype:batch,3,224,224",
            )
        return {spec.name: _made_up(spec) for spec in options.inputs or built.inputs}
    example = {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        for name, value in _named(built, names).items()
    }
    if names and set(names) != set(example):
        raise SignatureError(
            f"--input names {', '.join(names)}, and the factory's example inputs are {', '.join(example)}",
            "use the same names",
        )
    _check_tensors(example)
    return {name: example[name] for name in names or example}


def _check_tensors(example: Mapping[str, Any]) -> None:
    for name, value in example.items():
        if not isinstance(value, Tensor):
            raise SourceError(
                f"the example input {name!r} is a {type(value).__name__}, not a tensor",
                "wrap the model so that its inputs are tensors, and fix the rest inside the wrapper",
            )


def _check_example(specs: tuple[TensorSpec, ...], example: Mapping[str, Tensor], who: str) -> None:
    try:
        check_feeds(specs, {name: (dtype_name(value), tuple(value.shape)) for name, value in example.items()})
    except SignatureError as error:
        raise SignatureError(
            f"the example input does not fit what {who} says: {error.message}", "make the two agree"
        ) from error


def _named(built: factories.Built, names: tuple[str, ...]) -> dict[str, Any]:
    """The example by input name, whatever form the factory gave it in."""
    value = built.example
    if isinstance(value, Mapping):
        return dict(value)
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    if len(values) == len(names):
        return dict(zip(names, values, strict=True))
    parameters = _parameters(built.module)
    if len(values) > len(parameters):
        parameters = [f"input_{index}" for index in range(len(values))]  # as _UNNAMED says
    return dict(zip(parameters, values, strict=False))


def _parameters(module: nn.Module) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, value in inspect.signature(module.forward).parameters.items() if value.kind in kinds]


def _takes_keywords(module: nn.Module, names: tuple[str, ...]) -> bool:
    parameters = inspect.signature(module.forward).parameters
    allowed = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    open_ended = any(value.kind is inspect.Parameter.VAR_KEYWORD for value in parameters.values())
    return all(
        parameters[name].kind in allowed if name in parameters else open_ended and not _UNNAMED.fullmatch(name)
        for name in names
    )


def _made_up(spec: TensorSpec) -> Tensor:
    """A feed for an input that only a specification is known of: two rows, eight along other dynamic dimensions."""
    generator = torch.Generator().manual_seed(0)
    sizes = {dim: 2 if dim == "batch" or position == 0 else 8 for position, dim in enumerate(spec.shape)}
    shape = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape]
    dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


def _untied(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """State without entries that share memory with an earlier one, and those entries by name."""
    seen: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    unique: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, value in state.items():
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and place in seen:
            tied[name] = seen[place]
        else:
            seen[place] = name
            storage = value.untyped_storage().data_ptr()
            unique[name] = value.clone() if storage in storages else value.contiguous()
            storages.add(storage)
    return unique, tied
