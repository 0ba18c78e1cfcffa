"""A loaded PyTorch model with named inputs and outputs."""

import contextlib
import dataclasses
import inspect
import re
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor, nn

from enginesmith.pipeline.errors import ShapeError, SignatureError, SourceError, UsageError
from enginesmith.pipeline.frameworks import processing
from enginesmith.pipeline.frameworks.processing import ProcessingRequest
from enginesmith.pipeline.frameworks.source import Source
from enginesmith.pipeline.frameworks.torch import factories
from enginesmith.pipeline.frameworks.torch.file_tracking import track_files
from enginesmith.pipeline.frameworks.torch.processing import Extension, make_raw_example
from enginesmith.pipeline.tensors import DTYPES, Signature, TensorSpec, check_feeds

# Find out by running a model which dimensions may vary, and which output dimension follows which input.

_LONG = 16
"""From this size on a shorter one is tried first, as it runs faster."""

Forward = Callable[..., tuple[Tensor, ...]]
Shapes = list[tuple[int, ...]]


def default_specs(example: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """Derive the inputs from the example: the first dimension is the batch, if all inputs agree on it."""
    ranks = [value.ndim for value in example.values()]
    batched = all(ranks) and len({value.shape[0] for value in example.values()}) == 1
    shapes = {name: ("batch", *value.shape[1:]) if batched else tuple(value.shape) for name, value in example.items()}
    return tuple(TensorSpec(name=name, dtype=dtype_name(value), shape=shapes[name]) for name, value in example.items())


def sizes_of(specs: tuple[TensorSpec, ...], example: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the size of each dynamic dimension in these tensors."""
    return {
        dim: size
        for spec in specs
        for dim, size in zip(spec.shape, example[spec.name].shape, strict=True)
        if isinstance(dim, str)
    }


def dtype_name(tensor: Tensor) -> str:
    """Return numpy's name of a tensor's dtype.

    Raises:
        SourceError: numpy has none.
    """
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise SourceError(f"a tensor of dtype {name} cannot cross the boundary", "cast it to float32 inside the model")
    return name


def infer_dims(
    module: Forward,
    specs: tuple[TensorSpec, ...],
    example: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    asked: bool,
) -> tuple[Signature, list[str]]:
    """Infer the signature by running again with each dynamic dimension changed; return it, and notes for people.

    ``outputs`` are those for ``example``. A batch that nobody asked for (``asked`` is false), and that the model does
    not allow to vary, becomes fixed, with a note.

    Raises:
        SourceError: a dimension that was asked to be dynamic cannot vary.
    """
    dims: dict[str, list[int | str]] = {name: list(value.shape) for name, value in outputs.items()}
    notes: list[str] = []
    for symbol, size in sizes_of(specs, example).items():
        other, shapes = _try_other_size(module, specs, example, symbol, size)
        if shapes is not None:
            if [len(shape) for shape in shapes] != [value.ndim for value in outputs.values()]:
                raise SourceError(
                    f"the outputs have other ranks at {symbol} = {other} than at {symbol} = {size}",
                    f"squeeze() drops every dimension of size 1: name the one, or give an example with {symbol} = 2",
                )
            for (name, value), shape in zip(outputs.items(), shapes, strict=True):
                for axis, change in enumerate(zip(value.shape, shape, strict=True)):
                    if change[0] != change[1]:
                        dims[name][axis] = symbol if change == (size, other) else f"{name}_dim_{axis}"
        elif asked:
            raise SourceError(
                f"the model runs with {symbol} = {size}, and with no other size that was tried",
                f"write the number {size} instead of {symbol!r} in --input, or fix the model",
            )
        else:
            fixed = [tuple(size if dim == symbol else dim for dim in spec.shape) for spec in specs]
            specs = tuple(spec.model_copy(update={"shape": shape}) for spec, shape in zip(specs, fixed, strict=True))
            notes.append(f"the model runs with a batch of {size} only, so the dimension is fixed")
    results = (
        TensorSpec(name=name, dtype=dtype_name(value), shape=tuple(dims[name])) for name, value in outputs.items()
    )
    return Signature(inputs=specs, outputs=tuple(results)), notes


def _try_other_size(
    module: Forward, specs: tuple[TensorSpec, ...], example: Mapping[str, Tensor], symbol: str, size: int
) -> tuple[int, Shapes | None]:
    """Find another size that the model runs with, and the shapes it gives; None where there is none."""
    others = (size + 1, max(1, size // 2), size * 2) if size < _LONG else (size // 2, size + 1, size * 2)
    for other in others:
        feeds = []
        for spec in specs:
            value = example[spec.name]
            for axis, dim in enumerate(spec.shape):
                if dim == symbol:
                    value = value.index_select(axis, torch.arange(other) % value.shape[axis])
            feeds.append(value)
        with contextlib.suppress(RuntimeError, ValueError, IndexError, AssertionError, TypeError):
            if other != size:
                with torch.inference_mode():
                    return other, [tuple(value.shape) for value in module(*feeds)]
    return size, None


def _suggest_dynamic_sizes(
    module: Forward, signature: Signature, example: Mapping[str, Tensor], request: ProcessingRequest
) -> Iterator[str]:
    """Suggest ``--input`` for a model of which only the batch is dynamic, where it runs at half of another size, too.

    Dimensions of one size are halved together: those of a text and its mask, height and width of an image. With
    ``--prepend``, the raw input is described; what is resized has one size in the model.
    """
    specs = signature.inputs
    if len(signature.symbols) != 1 or any(isinstance(dim, str) for spec in specs for dim in spec.shape[1:]):
        return
    resized = specs[processing.choose_input(specs, request)].name if "resize" in request.before else None
    names: dict[tuple[str, int], str] = {}
    for size in dict.fromkeys(dim for spec in specs for dim in spec.shape[1:] if isinstance(dim, int) and dim > 1):
        places = [(spec.name, axis, dim) for spec in specs for axis, dim in enumerate(spec.shape) if axis]
        axes = [(name, axis) for name, axis, dim in places if dim == size and name != resized]
        if not axes:
            continue
        feeds = dict(example)
        for name, axis in axes:
            feeds[name] = feeds[name].narrow(axis, 0, size // 2)
        with contextlib.suppress(RuntimeError, ValueError, IndexError, AssertionError, TypeError):
            with torch.inference_mode():
                module(*feeds.values())
            image = {axis for _, axis in axes} == {2, 3}
            word = f"{axes[0][0]}_length" if "length" in names.values() else "length"
            if any(name == axes[0][0] for name, _ in names):
                word = f"length_{len({*names.values()}) + 1}"
            names |= {(name, axis): ("height", "width")[axis - 2] if image else word for name, axis in axes}
    if names:
        dims = {spec.name: [names.get((spec.name, axis), dim) for axis, dim in enumerate(spec.shape)] for spec in specs}
        dynamic = tuple(spec.model_copy(update={"shape": tuple(dims[spec.name])}) for spec in specs)
        raw = processing.fit(request, signature.model_copy(update={"inputs": dynamic})).signature.inputs
        inputs = (f"--input {spec.name}:{spec.dtype}:{','.join(map(str, spec.shape))}" for spec in raw)
        sizes = {word: example[place[0]].shape[place[1]] for place, word in names.items()}
        shapes = (f"--shape {word}=MIN:{size}:MAX" for word, size in sizes.items())
        words = " ".join((*inputs, *shapes))
        beside = f" beside --prepend {','.join(request.prepend)}" if request.prepend else ""
        yield f"only the batch is dynamic, and the model runs with other sizes, too; for those{beside}: {words}"


@contextlib.contextmanager
def by_operators() -> Iterator[None]:
    """Make transformers of torch.nn run by single operators.

    In eval mode one fused operator hides what is inside, and makes nested tensors of inputs with a padding mask.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


_UNNAMED = re.compile(r"input_\d+")
"""Names of inputs that have none: the module takes ``*args``."""


class LoadOptions(BaseModel, frozen=True):
    """Options of loading a source: input specifications where the user gave some, the seed for random weights."""

    inputs: tuple[TensorSpec, ...] = ()
    seed: int = 0
    allow_pickle: bool = False
    processing: ProcessingRequest = ProcessingRequest()
    """Computation before and after the model; ``inputs`` are then the raw ones."""


class NamedForward(nn.Module):
    """The user's module as a function of tensors in order: names in, a flat tuple out."""

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        extension: Extension | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.extension = extension
        self.training = False
        self.outputs = outputs
        self._keywords = inputs if _takes_keywords(model, inputs) else None

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return tensors in the order of the signature's inputs → tensors in the order of its outputs."""
        given = self.extension.prepare(tensors) if self.extension else tensors
        flat = flatten(self.call(*given))[0]
        outputs = tuple(flat[name] for name in self.outputs) if self.outputs else tuple(flat.values())
        return self.extension.complete(outputs) if self.extension else outputs

    def call(self, *tensors: Tensor) -> Any:
        """Call the user's module, and return what it returns."""
        if self._keywords is None:
            return self.model(*tensors)
        return self.model(**dict(zip(self._keywords, tensors, strict=True)))


class Replacement(nn.Module):
    """Call a loaded engine as a module; what it does not take for its shape goes to the original, if that is there."""

    def __init__(self, model: Callable[..., Any], eager: nn.Module | None = None, device: object = "cpu") -> None:
        """``eager`` is the original, which is put into evaluation mode; ``device`` is the engine's."""
        super().__init__()
        place = str(device) if torch.cuda.is_available() else "cpu"
        self.model, self.original, self._place = model, eager, torch.empty(0, device=place)
        self.fallbacks = 0
        """Calls that the original answered."""
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode, as an engine does: what it is part of may be trained around it."""
        return super().train(False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Refuse to be moved or cast: ``fn`` is what ``to``, ``half`` and the like do with each tensor."""
        moved = fn(self._place)
        if (moved.device, moved.dtype) != (self._place.device, self._place.dtype):
            told = f"an engine stays on {self._place.device} with the types that it was built with"
            raise UsageError(told, "move or cast the other modules, and load the engine with device=… for another one")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getattr__(self, name: str) -> Any:
        """Look up what an engine does not have in the original: its ``config``, say."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__["_modules"].get("original")
            if original is None:
                raise
            return getattr(original, name)

    def forward(self, *arguments: Any, **named: Any) -> Any:
        """Run the engine; count the calls that it leaves to the original, and warn of the first."""
        try:
            return self.model(*arguments, **named)
        except ShapeError as error:
            if self.original is None:
                raise
            with _counting:
                self.fallbacks += 1
                first = self.fallbacks == 1
            if first:
                told = f"the engine does not take these shapes, so the original module answers: {error.message}"
                warnings.warn(f"{told}; further such calls are counted (fallbacks) and not told", stacklevel=2)
        with torch.no_grad():
            return self.original(*arguments, **named)


_counting = threading.Lock()
"""Not of a module's own, which is copied and pickled."""


@dataclass
class LoadedModel:
    """A module ready to run: ``module(*tensors)`` takes and returns tensors in the order of the signature."""

    module: NamedForward
    signature: Signature
    example: dict[str, Tensor]
    notes: tuple[str, ...] = ()
    files: tuple[Path, ...] = ()
    """Files of the user's that were read while it was built: code and weights."""
    packages: dict[str, str] = dataclasses.field(default_factory=dict)
    """Installed packages that it is built with."""
    answers: tuple[Tensor, ...] = ()
    """Outputs for the example, where it was just loaded."""

    @property
    def dynamic_sizes(self) -> dict[str, int]:
        """Size of the example along each dynamic dimension."""
        return sizes_of(self.signature.inputs, self.example)

    @property
    def without_processing(self) -> Self:
        """The model by itself, without what is computed before and after it."""
        extension = self.module.extension
        if extension is None:
            return self
        core, names = extension.processing.core, tuple(self.example)
        with torch.no_grad():
            values = extension.prepare(tuple(self.example.values()))
        module = NamedForward(self.module.model, names, self.module.outputs)
        example = dict(zip(names, values, strict=True))
        return dataclasses.replace(self, module=module, signature=core, example=example, answers=())


def load(source: Source, options: LoadOptions) -> LoadedModel:
    """Build a source's module and find out its signature by running it.

    Raises:
        SourceError: the model cannot be built or run, or returns what is no tensor.
        SignatureError: the given inputs do not fit it.
    """
    torch.manual_seed(options.seed)
    with track_files(options.allow_pickle) as tracker:
        if source.form == "pt2":
            tracker.add(source.target)  # torch opens it below Python, where no audit event tells
        built = factories.build(source)
        loaded = _infer_signature(source, _describe_core(options, built), built)
        if options.processing:
            loaded = extend(loaded, options)
    return dataclasses.replace(loaded, files=tuple(sorted(tracker.files)), packages=tracker.packages())


def _describe_core(options: LoadOptions, built: factories.Built) -> LoadOptions:
    """Return the options with the model's own inputs, where ``--input`` describes raw ones."""
    if not (options.inputs and options.processing.prepend):
        return options
    own = {spec.name: spec for spec in built.inputs}
    if not own and built.example is not None:
        example = _example(built, options)
        own = {spec.name: spec for spec in default_specs(example)}
    core = processing.describe_core(options.inputs, options.processing, own)
    return options.model_copy(update={"inputs": core})


def extend(loaded: LoadedModel, options: LoadOptions) -> LoadedModel:
    """Put the computation that the options ask for before and after a loaded model.

    Raises:
        UsageError: it does not fit the model.
    """
    fitted = processing.fit(options.processing, loaded.signature, options.inputs)
    example = dict(loaded.example)
    if fitted.prepared:
        name = fitted.prepared.core.name
        example[name] = make_raw_example(fitted.prepared, example[name])
    module = NamedForward(loaded.module.model, tuple(example), loaded.module.outputs, Extension(fitted))
    with torch.inference_mode():
        answers = module(*example.values())
    # sizes in outputs stay as they were found: neither resizing nor a selection changes which of them may vary
    return dataclasses.replace(loaded, module=module, signature=fitted.signature, example=example, answers=answers)


def _infer_signature(source: Source, options: LoadOptions, built: factories.Built) -> LoadedModel:
    example = _example(built, options)
    specs = options.inputs or built.inputs or default_specs(example)
    try:
        check_feeds(specs, {name: (dtype_name(value), tuple(value.shape)) for name, value in example.items()})
    except SignatureError as error:
        origin = "--input" if options.inputs else "the source"
        message = f"the example input does not fit what {origin} says: {error.message}"
        raise SignatureError(message, "make the two agree") from error
    module = NamedForward(built.module, tuple(example), ())
    with factories.user_errors("running the model on its example inputs", None), torch.inference_mode():
        returned = module.call(*example.values())
        flat, left_out = flatten(returned)
        again = flatten(module.call(*example.values()))[0]
    if not flat:
        raise SourceError(f"{source.text} returns no tensor", "its forward has to return tensors")
    if not same_answers(tuple(flat.values()), tuple(again.values())):
        raise SourceError(
            f"{source.text} answers differently each time it is run on the same input",
            "take out what is random (dropout, sampling) and what the module remembers from call to call",
        )
    module.outputs = tuple(flat)
    names = built.outputs if len(built.outputs) == len(flat) else module.outputs
    asked = bool(options.inputs or built.inputs)
    outputs = dict(zip(names, flat.values(), strict=True))
    signature, notes = infer_dims(module, specs, example, outputs, asked)
    structure = describe_structure(returned, {id(value): name for name, value in outputs.items()})
    signature = signature.model_copy(update={"returns": structure})
    if options.inputs or not built.inputs:  # a source that declares its inputs knows what varies
        notes += _suggest_dynamic_sizes(module, signature, example, options.processing)
    if left_out:
        notes.append(f"outputs that are no tensors were left out: {', '.join(left_out)}")
    return LoadedModel(module, signature, example, tuple(notes), answers=tuple(flat.values()))


def same_answers(before: tuple[Tensor, ...], after: tuple[Tensor, ...]) -> bool:
    """Compare arrays but for the last bits, which threads may add up in another order."""
    for tensor, other in zip(before, after, strict=True):
        if tensor.shape != other.shape:
            return False
        finite = tensor[tensor.isfinite()] if tensor.is_floating_point() else tensor[:0]
        noise = 1e-5 * float(finite.abs().max()) if finite.numel() else 0.0
        if not (torch.equal(tensor, other) or torch.allclose(tensor, other, rtol=1e-4, atol=noise, equal_nan=True)):
            return False
    return True


def flatten(value: Any, prefix: str = "") -> tuple[dict[str, Tensor], list[str]]:
    """Return tensors of a nested output by name, and descriptions of what was no tensor.

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


def describe_structure(value: Any, names: Mapping[int, str]) -> Any:
    """Describe the form of a nested output, as ``Signature.returns`` has it; ``names`` are those of tensors by id."""
    if isinstance(value, Tensor):
        return names[id(value)]
    if isinstance(value, (tuple, list)) and not hasattr(value, "_fields"):
        return [describe_structure(item, names) for item in value]
    items = {name: getattr(value, name) for name in getattr(value, "_fields", ())}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # transformers' have items and None besides
        items = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    items |= {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}
    return {name: describe_structure(item, names) for name, item in items.items()} or None


def _example(built: factories.Built, options: LoadOptions) -> dict[str, Tensor]:
    """Bring the factory's example inputs in the order of the specifications; without any they are drawn.

    Raises:
        SourceError: there are neither, or one is no tensor.
        SignatureError: they are called otherwise than ``--input`` says.
    """
    specs = options.inputs or built.inputs
    names = tuple(spec.name for spec in specs)
    if built.example is None:
        if not names:
            remedy = "return (module, example_inputs) from it, or add --input name:dtype:batch,3,224,224"
            raise SourceError("the factory gives no example inputs", remedy)
        return {spec.name: _draw(spec) for spec in specs}
    example = _name_inputs(built, names)
    if names and set(names) != set(example):
        message = f"--input names {', '.join(names)}, and the factory's example inputs are {', '.join(example)}"
        raise SignatureError(message, "use the same names")
    for name, value in example.items():
        example[name] = torch.from_numpy(value) if isinstance(value, np.ndarray) else value
        if not isinstance(example[name], Tensor):
            raise SourceError(
                f"the example input {name!r} is a {type(value).__name__}, not a tensor",
                "wrap the model so that its inputs are tensors, and fix the rest inside the wrapper",
            )
    return {name: example[name] for name in names or example}


def _name_inputs(built: factories.Built, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the example by input name, whatever form the factory gave it in."""
    value = built.example
    if isinstance(value, Mapping):
        return dict(value)
    values = list(value) if isinstance(value, (tuple, list)) else [value]
    if len(values) == len(names):
        return dict(zip(names, values, strict=True))
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    given = inspect.signature(built.module.forward).parameters
    parameters = [name for name, value in given.items() if value.kind in kinds]
    if len(values) > len(parameters):
        parameters = [f"input_{index}" for index in range(len(values))]  # as _UNNAMED says
    return dict(zip(parameters, values, strict=False))


def _takes_keywords(module: nn.Module, names: tuple[str, ...]) -> bool:
    parameters = inspect.signature(module.forward).parameters
    allowed = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    open_ended = any(value.kind is inspect.Parameter.VAR_KEYWORD for value in parameters.values())
    return all(
        parameters[name].kind in allowed if name in parameters else open_ended and not _UNNAMED.fullmatch(name)
        for name in names
    )


def _draw(spec: TensorSpec) -> Tensor:
    """Draw a feed from nothing but its specification: two rows, eight along other dynamic dimensions."""
    generator = torch.Generator().manual_seed(0)
    sizes = {dim: 2 if dim == "batch" or position == 0 else 8 for position, dim in enumerate(spec.shape)}
    shape = [sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape]
    dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)
