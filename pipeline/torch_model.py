"""A loaded PyTorch model with named inputs and outputs, and how it is kept as an artifact.

The artifact holds no pickle: ``model.json`` says which factory to call and how the outputs are named,
``state.safetensors`` has the weights, ``example.safetensors`` one feed for each input.
"""

import contextlib
import dataclasses
import inspect
import re
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
from enginesmith.pipeline.errors import SignatureError, SourceError
from enginesmith.pipeline.skip_init import parameters_left_empty
from enginesmith.pipeline.source import Source, resolve
from enginesmith.pipeline.store import translated
from enginesmith.pipeline.tensors import Array, Signature, TensorSpec, check_feeds
from enginesmith.pipeline.torch_shapes import default_specs, dtype_name, infer_dims, sizes_of
from enginesmith.pipeline.watch import watching

RECORD = "model.json"
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
    state, tied = _untied(_tensors(loaded.module.model))
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
    from safetensors.torch import load_file

    record = _Record.model_validate_json((artifact.folder / RECORD).read_bytes())
    model = _built_around(artifact.folder / _STATE, record)
    example = load_file(artifact.folder / _EXAMPLE)
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
    own = _tensors(model)
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


def _put(model: nn.Module, name: str, place: Tensor, value: Tensor) -> None:
    if 0 not in place.stride() or place.numel() <= 1:
        place.copy_(value)
        return
    parent, _, leaf = name.rpartition(".")  # an expanded buffer: its elements share memory and cannot be written
    setattr(model.get_submodule(parent), leaf, value.clone())


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Every parameter and buffer by name, those too that a state dict leaves out."""
    named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    return {name: value.detach() for name, value in named}


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
