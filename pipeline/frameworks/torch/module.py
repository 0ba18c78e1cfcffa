"""A loaded PyTorch model with named inputs and outputs."""

import contextlib
import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import BaseModel, Field
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from enginesmith.pipeline.errors import SignatureError, SourceError
from enginesmith.pipeline.frameworks import processing
from enginesmith.pipeline.frameworks.processing import ProcessingRequest
from enginesmith.pipeline.frameworks.source import Source
from enginesmith.pipeline.frameworks.torch import examples, factories
from enginesmith.pipeline.frameworks.torch.dims import (
    choose_specs,
    default_specs,
    explain_no_batch,
    infer_dims,
    input_dtypes,
    resize_example,
    same_answers,
    suggest_dynamic_sizes,
)
from enginesmith.pipeline.frameworks.torch.file_tracking import track_files
from enginesmith.pipeline.frameworks.torch.packages import list_packages
from enginesmith.pipeline.frameworks.torch.processing import Extension, make_raw_example
from enginesmith.pipeline.frameworks.torch.surgery import named_tensors
from enginesmith.pipeline.tensors import Constant, Feeds, InputChoice, Signature, TensorSpec, check_feeds, read_sizes

_REMEDY_RANDOM = (
    "take out what is random (sampling, F.dropout without training=self.training) and what the module remembers from "
    "call to call"
)


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
    widen: bool = False
    """Take a module in bfloat16 in float32."""
    sizes: dict[str, int] = Field({}, exclude=True)
    """Usual sizes of dynamic dimensions, with which inputs are drawn. No part of records, which have what was drawn."""


class NamedForward(nn.Module):
    """The user's module as a function of tensors in order: names in, a flat tuple out."""

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        extension: Extension | None = None,
        *,
        copies: bool = False,
        constants: Mapping[str, Constant] | None = None,
    ) -> None:
        """``copies`` is for a module that changes its inputs in place, as no engine does: it gets copies.

        ``constants`` are arguments that it is always called with beside the inputs, by name.
        """
        super().__init__()
        self.model = model
        self.extension, self.copies, self.constants = extension, copies, dict(constants or {})
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
        tensors = tuple(tensor.clone() for tensor in tensors) if self.copies else tensors
        if self._keywords is None:
            return self.model(*tensors, **self.constants)
        return self.model(**dict(zip(self._keywords, tensors, strict=True)), **self.constants)


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
    """Installed packages that it is built with, with their versions and digests."""
    frozen: tuple[str, ...] = ()
    """Parameters that are not to be trained."""
    answers: tuple[Tensor, ...] = ()
    """Outputs for the example, where it was just loaded."""
    attributes: str = ""
    """Digest of what the module holds beside tensors, where it was just loaded."""
    class_names: tuple[str, ...] = ()
    """Names of the classes by number, where it was just loaded and has some."""
    widened: bool = False
    """True where it was just loaded, in bfloat16, and is in float32 now."""

    @property
    def dynamic_sizes(self) -> dict[str, int]:
        """Size of the example along each dynamic dimension."""
        return read_sizes(self.signature.inputs, self.example)

    def resize(self, sizes: Mapping[str, int]) -> dict[str, Tensor]:
        """Cut or repeat the example to other sizes of its dynamic dimensions, in the order of the inputs."""
        return resize_example(self.signature.inputs, self.example, sizes)

    @property
    def without_processing(self) -> Self:
        """The model by itself, without what is computed before and after it."""
        extension = self.module.extension
        if extension is None:
            return self
        core, names = extension.processing.core, tuple(self.example)
        with torch.no_grad():
            values = extension.prepare(tuple(self.example.values()))
        own = self.module
        module = NamedForward(own.model, names, own.outputs, copies=own.copies, constants=own.constants)
        example = dict(zip(names, values, strict=True))
        return dataclasses.replace(self, module=module, signature=core, example=example, answers=())


RowReader = Callable[[Sequence[TensorSpec], InputChoice | None], tuple[Feeds, Sequence[Path]]]
"""Read samples of the data for these inputs, or for those that are chosen, with the files that they come from."""


class _Choice:
    """Choose the inputs of a Hugging Face model by the arrays of the data; ``built`` has them then."""

    def __init__(self, built: factories.Built) -> None:
        self.built = built

    def __call__(self, arrays: Sequence[TensorSpec]) -> Sequence[TensorSpec]:
        self.built = factories.choose_inputs(self.built, arrays)
        return self.built.inputs


def load(source: Source, options: LoadOptions, read_rows: RowReader | None = None) -> LoadedModel:
    """Build a source's module and find out its signature by running it.

    The example is the source's; in the place of one that would be made up, it is what ``read_rows`` reads.

    Raises:
        SourceError: the model cannot be built or run, or returns what is no tensor.
        SignatureError: the given inputs do not fit it.
        DataError: the rows cannot be read.
    """
    torch.manual_seed(options.seed)
    with track_files(options.allow_pickle) as building:
        if source.form == "pt2":
            building.add(source.target)  # torch opens it below Python, where no audit event tells
        if source.form in ("file", "module"):
            building.variables.add("PYTHONPATH")  # another module of the same name may come first
        built = factories.build(source)
        built = factories.widen(built) if options.widen else built
        built = _fix_constants(built, options.inputs)
        if source.form == "hf" and not options.inputs:
            built = factories.fix_lengths(built)
    rows: Feeds = {}
    read: Sequence[Path] = ()  # no part of the model
    specs = options.inputs or built.inputs
    if read_rows and specs and built.is_made_up:
        choice = _Choice(built) if source.form == "hf" and not options.inputs else None
        rows, read = read_rows(specs, choice)
        built = choice.built if choice else built
        example = {name: torch.from_numpy(value) for name, value in rows.items()}
        built = dataclasses.replace(built, example=example, takes=(), origin="the first samples of the data")
    try:
        with track_files(options.allow_pickle) as running:
            loaded = _infer_signature(source, _describe_core(options, built), built)
            if options.processing:
                loaded = extend(loaded, options)
    except SourceError:
        if not built.widened:
            raise
        return load(source, options.model_copy(update={"widen": False}), read_rows)  # its code names bfloat16
    files = tuple(sorted(building.files | (running.files - {*read})))
    return dataclasses.replace(
        loaded,
        files=files,
        packages=list_packages()[0],
        attributes=built.attributes.digest,
        class_names=built.class_names,
        widened=built.widened,
    )


def _describe_core(options: LoadOptions, built: factories.Built) -> LoadOptions:
    """Return the options with the model's own inputs, where ``--input`` describes raw ones."""
    if not (options.inputs and options.processing.prepend):
        return options
    own = {spec.name: spec for spec in built.inputs}
    if not own and built.example is not None:
        example, _ = examples.make_example(built, options.inputs, options.sizes)
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
    core, extension = loaded.module, Extension(fitted)
    kept: dict[str, Any] = {"copies": core.copies, "constants": core.constants}
    module = NamedForward(core.model, tuple(example), core.outputs, extension, **kept)
    with torch.inference_mode():
        answers = module(*example.values())
    # sizes in outputs stay as they were found: neither resizing nor a selection changes which of them may vary
    changes = {"module": module, "signature": fitted.signature, "example": example, "answers": answers}
    return dataclasses.replace(loaded, notes=(*loaded.notes, *fitted.notes), **changes)


def _infer_signature(source: Source, options: LoadOptions, built: factories.Built) -> LoadedModel:
    example, drawn = examples.make_example(built, options.inputs, options.sizes)
    specs, moved = options.inputs or built.inputs or default_specs(example), ""
    try:
        dtypes = input_dtypes(example)
        check_feeds(specs, {name: (dtypes[name], tuple(value.shape)) for name, value in example.items()})
    except SignatureError as error:
        origin = "--input" if options.inputs else "the source"
        message = f"the example input does not fit what {origin} says: {error.message}"
        raise SignatureError(message, "make the two agree") from error
    module = NamedForward(built.module, tuple(example), (), constants=built.constants)
    sizes = _tensor_sizes(built.module)
    origin, remedy = built.origin, factories.REMEDY
    if built.is_made_up:
        origin, remedy = examples.describe_made_up(built, specs, example, drawn)
    remedy = built.remedy or remedy
    with factories.user_errors(f"running the model on {origin}", None, remedy), torch.inference_mode():
        given = [value.clone() for value in example.values()]
        returned = module.call(*given)
        flat, left_out = flatten(returned)
        module.copies = not all(map(torch.equal, given, example.values()))
        again = flatten(module.call(*example.values()))[0]
    if not flat:
        raise SourceError(f"{source.text} returns no tensor", "its forward has to return tensors")
    if not same_answers(tuple(flat.values()), tuple(again.values())):
        raise SourceError(
            f"{source.text} answers differently each time it is run on the same input",
            built.remedy_random or _REMEDY_RANDOM,
        )
    module.outputs = tuple(flat)
    names = _rename_outputs(built.outputs if len(built.outputs) == len(flat) else module.outputs, example)
    specs_given = bool(options.inputs or built.inputs)
    outputs = dict(zip(names, flat.values(), strict=True))
    if not specs_given:
        specs, moved = choose_specs(module, example, len(outputs))
    signature, notes = infer_dims(module, specs, example, outputs, specs_given)
    notes += [*built.notes, *([moved] if moved else []), *examples.note_guessed(drawn, options.sizes)]
    notes += [] if specs_given else explain_no_batch(module, signature, example)
    if others := ", ".join(name for name in built.usual if name not in example):
        notes.append(
            f"inputs that are left out, so that their defaults hold: {others}; --input, for all inputs, adds some"
        )
    structure = describe_structure(returned, {id(value): name for name, value in outputs.items()})
    indices = {"unsigned": _list_unsigned(module, example), "tables": _count_table_rows(module, example)}
    signature = signature.model_copy(update={"returns": structure, "constants": built.constants, **indices})
    if options.inputs or not built.inputs:  # a source that declares its inputs knows what varies
        notes += suggest_dynamic_sizes(module, signature, example, options.processing)
    if left_out:
        notes.append(f"outputs that are no tensors were left out: {', '.join(left_out)}")
    if changed := sizes.items() ^ _tensor_sizes(built.module).items():
        raise SourceError(
            f"{source.text} makes {min(changed)[0]!r} when it is called, or changes its size",
            "make it in __init__ (register_buffer), as large as it may become; or call the module once in the factory",
        )
    answers = tuple(flat.values())
    return LoadedModel(module, signature, example, tuple(notes), frozen=built.frozen, answers=answers)


def _list_unsigned(module: NamedForward, example: Mapping[str, Tensor]) -> tuple[str, ...]:
    """List the inputs of which a negative number is an index that is out of range, as it is in an embedding."""
    unsigned = []
    for name, value in example.items():
        if value.dtype in (torch.int32, torch.int64) and value.numel():
            negative = value.contiguous().clone()
            negative.view(-1)[0] = -1
            with contextlib.suppress(Exception), torch.inference_mode():  # whatever else it raises tells nothing
                try:
                    module.call(*{**example, name: negative}.values())
                except IndexError:
                    unsigned.append(name)
    return tuple(unsigned)


class _Embeddings(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Collect, while it is on, the rows of the smallest embedding that reads each input, or a copy of it, by name."""

    def __init__(self, inputs: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.rows: dict[str, int] = {}
        self._names = {value.data_ptr(): name for name, value in inputs.items()}
        self._copies: list[Tensor] = []
        """They are kept, so that no other tensor has their place in memory."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        answer = func(*args, **(kwargs or {}))
        aten = torch.ops.aten
        if func in (aten.clone.default, aten._to_copy.default) and args[0].data_ptr() in self._names:
            self._names[answer.data_ptr()] = self._names[args[0].data_ptr()]
            self._copies.append(answer)
        elif func is aten.embedding.default and (name := self._names.get(args[1].data_ptr())):
            self.rows[name] = min(len(args[0]), self.rows.get(name, len(args[0])))
        return answer


def _count_table_rows(module: NamedForward, example: Mapping[str, Tensor]) -> dict[str, int]:
    """Count the rows of the smallest embedding that an input is an index of, as tokens are, by the input's name.

    Inputs whose last row the module refuses are left out: they are places in something else, too.
    """
    kinds = (torch.int32, torch.int64)
    whole = {name: value.clone() for name, value in example.items() if value.dtype in kinds and value.numel()}
    embeddings, tables = _Embeddings(whole), dict[str, int]()
    # inference_mode would hide what casts are made of
    with contextlib.suppress(Exception), torch.no_grad(), embeddings:
        module.call(*{**example, **whole}.values())
    for name, rows in embeddings.rows.items():
        with contextlib.suppress(Exception), torch.inference_mode():
            module.call(*{**example, name: torch.full_like(example[name], rows - 1)}.values())
            tables[name] = rows
    return tables


def _tensor_sizes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in named_tensors(module).items()}


def _rename_outputs(names: Sequence[str], inputs: Collection[str]) -> list[str]:
    """Rename outputs that are called as an input is: a graph has one value of each name."""
    taken, renamed = {*names, *inputs}, list[str]()
    for name in names:
        free = name
        while name in inputs and free in taken:
            free += "_out"
        taken.add(free)
        renamed.append(free)
    return renamed


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
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        fields = {name: describe_structure(item, names) for name, item in zip(value._fields, value, strict=True)}
        return {"namedtuple": type(value).__name__, "fields": fields}
    if isinstance(value, (tuple, list)):
        return [describe_structure(item, names) for item in value]
    items: dict[str, Any] = {}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):  # transformers' have items and None besides
        items |= {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    items |= {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}
    return {name: describe_structure(item, names) for name, item in items.items()} or None


def _fix_constants(built: factories.Built, inputs: Sequence[TensorSpec]) -> factories.Built:
    """Take the arguments that are no arrays out of the example, if forward names them: they are always the same."""
    if not isinstance(built.example, (Mapping, tuple, list)):
        return built
    example = examples.name_inputs(built, tuple(spec.name for spec in inputs or built.inputs))
    constants = {name: value for name, value in example.items() if _is_constant(value)}
    if not constants or len(constants) == len(example) or not _takes_keywords(built.module, tuple(constants)):
        return built
    others = {name: value for name, value in example.items() if name not in constants}
    told = ", ".join(f"{name} = {value!r}" for name, value in constants.items())
    note = f"always called with {told}, which the example gives no array for; what is to vary has to be a tensor there"
    return dataclasses.replace(built, example=others, constants=constants, notes=(*built.notes, note))


def _is_constant(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value))


def _takes_keywords(module: nn.Module, names: tuple[str, ...]) -> bool:
    parameters = inspect.signature(module.forward).parameters
    allowed = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    open_ended = any(value.kind is inspect.Parameter.VAR_KEYWORD for value in parameters.values())
    return all(
        parameters[name].kind in allowed if name in parameters else open_ended and not _UNNAMED.fullmatch(name)
        for name in names
    )
