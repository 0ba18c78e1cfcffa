"""From a source to a module: imports the user's code, builds what it names. Runs in a worker only."""

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import sys
import traceback
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree

from enginesmith.models import MODELS
from enginesmith.pipeline.errors import MissingCapability, SourceError, broken_package, install_command
from enginesmith.pipeline.frameworks.onnx import evaluator
from enginesmith.pipeline.frameworks.source import TORCHSCRIPT_REMEDY, Source
from enginesmith.pipeline.frameworks.torch import file_tracking, hugging_face, hugging_face_inputs, native_readers
from enginesmith.pipeline.frameworks.torch.attributes import UNKNOWN, Attributes, digest_attributes
from enginesmith.pipeline.tensors import BATCH, Constant, TensorSpec, join_sum

_LONGEST_MESSAGE = 400
_LIBRARIES = ("numpy", "onnx", evaluator.LIBRARY, "onnxscript", "safetensors", "timm", "torch", "transformers")
"""A file of such a name would be imported in the library's place."""
_TRAINING_MODE = (
    "the module was in training mode; it is measured in evaluation mode, where dropout is off and batch norms use their"
    " running statistics"
)
_WIDENED = (
    "its weights are in bfloat16, in which engines of ONNX graphs do not compute on the CPU: it is taken in float32, "
    "which holds them exactly, and so is eager, which variants are compared with"
)
REMEDY = "it has to work in plain Python first; the whole trace is in the step's log"


@dataclass(frozen=True)
class Built:
    """Result of a factory: the module, example inputs in any of the accepted forms, and names where they are known."""

    module: nn.Module
    example: Any = None
    inputs: tuple[TensorSpec, ...] = ()
    outputs: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    """Parameters that are not to be trained."""
    notes: tuple[str, ...] = ()
    takes: tuple[str, ...] = ()
    """Inputs that ``--input`` may name beside those of the example, or in their place: they are drawn."""
    usual: tuple[str, ...] = ()
    """Those of them that are not made from others where they are left out."""
    class_names: tuple[str, ...] = ()
    """Names of the classes that the model tells apart, by number, where it has some."""
    attributes: Attributes = UNKNOWN
    widened: bool = False
    """True where its weights were in bfloat16 and are in float32 now."""
    origin: str = "its example inputs"
    """Name of the example in messages."""
    remedy: str = ""
    """Remedy where the module does not run on it, if one is known."""
    remedy_random: str = ""
    """Remedy where the module answers differently each time, if one is known."""
    constants: Mapping[str, Constant] = field(default_factory=dict)
    """Arguments that were in the example and are no arrays: the module is always called with them."""

    @property
    def is_made_up(self) -> bool:
        """Tell whether the example is drawn, or will be: nobody gave one."""
        return self.example is None or bool(self.takes)


def build(source: Source) -> Built:
    """Build the module that a source names, in eval mode, on the CPU.

    Raises:
        SourceError: the code cannot be imported, or the factory fails or returns something else.
        MissingCapability: the library that the source needs is not installed.
    """
    built = _BUILDERS[source.form](source)
    frozen = _list_frozen(built.module)
    built.module.eval()
    built.module.requires_grad_(False)
    attributes = digest_attributes(built.module, file_tracking.list_user_globals())
    return dataclasses.replace(built, frozen=frozen, attributes=attributes)


def widen(built: Built) -> Built:
    """Turn weights in bfloat16, and examples, into float32; other types stay, and so does a captured program."""

    def convert(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value

    module = built.module
    dtypes = {value.dtype for value in (*module.parameters(), *module.buffers())}
    if torch.bfloat16 not in dtypes or isinstance(module, torch.fx.GraphModule):
        return built
    # as Module.float does, which would turn float64 and float16, too
    module._apply(convert)  # type: ignore[no-untyped-call]
    example = _pytree.tree_map(convert, built.example)
    return dataclasses.replace(built, example=example, widened=True, notes=(*built.notes, _WIDENED))


def _list_frozen(module: nn.Module) -> tuple[str, ...]:
    """List the parameters that the user's code froze: tables of positions, say, or filters.

    None where they are more than half of all: then it froze what an earlier training was not to change.
    """
    weights = {name: value for name, value in module.named_parameters() if value.is_floating_point()}
    frozen = {name: value.numel() for name, value in weights.items() if not value.requires_grad}
    return tuple(frozen) if 2 * sum(frozen.values()) <= sum(value.numel() for value in weights.values()) else ()


def _zoo(source: Source) -> Built:
    entry = MODELS[source.target]
    module_name, _, factory = entry.factory.partition(":")
    built = _call(source, getattr(importlib.import_module(module_name), factory))
    return Built(built.module, built.example, entry.specs, entry.outputs)


def _file(source: Source) -> Built:
    path = Path(source.target)
    _put_first(Path.cwd())
    root, parts = path.parent, [path.stem]
    while (root / "__init__.py").is_file():  # its dotted name starts below the first folder that is no package
        parts.insert(0, root.name)
        root = root.parent
    name = ".".join(parts)
    _put_first(root)
    with user_errors(f"importing {path.name}", path):
        module = importlib.import_module(name) if "." in name else _execute(name, path)
    return _call(source, _attribute(source, module, path.name))


def _execute(name: str, path: Path) -> Any:
    present = sys.modules.get(name)
    if name in _LIBRARIES or (present and native_readers.read_held(present, "__file__") != str(path)):
        raise SourceError(f"the file's name {path.name!r} hides the module {name!r}", "rename the file")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    with _operators_kept(present) if present else contextlib.nullcontext():
        spec.loader.exec_module(module)
    return module


_LIBRARIES_KEPT: list[torch.library.Library] = []
"""Libraries of files that were executed again: PyTorch forgets the operators of those that nothing refers to."""


@contextlib.contextmanager
def _operators_kept(module: ModuleType) -> Iterator[None]:
    """Keep the operators that a file registered while it is executed again: PyTorch takes each name once.

    ``module`` is what the file made before.
    """
    library = torch.library.Library
    _LIBRARIES_KEPT.extend(value for value in vars(module).values() if isinstance(value, library))
    own = {name: getattr(library, name) for name in ("__init__", "define", "impl")}

    def begin(self: Any, ns: str, kind: str, *args: Any, **options: Any) -> None:
        own["__init__"](self, ns, "FRAGMENT" if kind == "DEF" else kind, *args, **options)

    def define(self: Any, schema: str, *args: Any, **options: Any) -> Any:
        try:
            return own["define"](self, schema, *args, **options)
        except RuntimeError as error:
            if "multiple times" not in str(error):
                raise
            return schema.split("(")[0].split(".")[0]

    def implement(self: Any, *args: Any, **options: Any) -> None:
        try:
            own["impl"](self, *args, **options)
        except RuntimeError as error:
            if "already a kernel" not in str(error):
                raise

    with file_tracking.swap(library, __init__=begin, define=define, impl=implement):
        yield


def _module(source: Source) -> Built:
    _put_first(Path.cwd())
    name = source.target
    with user_errors(f"importing {name}", Path.cwd()):
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):  # it is there, and lacks something
                raise
            places = "it is looked for in the current folder first, then in what is installed"
            raise SourceError(f"there is no module {error.name!r}", f"{places}; a file is {name}.py:factory") from error
    return _call(source, _attribute(source, module, name))


def _pt2(source: Source) -> Built:
    try:
        program = torch.export.load(source.target)
    except (RuntimeError, ValueError, LookupError, OSError, AttributeError, zipfile.BadZipFile) as error:
        raise SourceError(
            f"{source.text} is no torch.export archive, or a damaged one: {_first_words(error)}",
            "save one with torch.export.save, with the same version of torch",
        ) from error
    specs = []
    placeholders = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    kinds = {spec.arg.name: spec.kind for spec in program.graph_signature.input_specs}
    given = {name: value for name, value in placeholders.items() if kinds[name] is InputKind.USER_INPUT}
    shapes = {
        name: [str(dim) for dim in value.shape] for name, value in given.items() if isinstance(value, torch.Tensor)
    }
    dims = _name_dims(shapes)
    for name, shape in shapes.items():
        dtype = str(given[name].dtype).removeprefix("torch.")
        specs.append(TensorSpec(name=name, dtype=dtype, shape=tuple(dims.get(text) or int(text) for text in shape)))
    leaves = _pytree.tree_leaves(program.example_inputs) if program.example_inputs else [*given.values()]
    example = {name: leaf for name, leaf in zip(given, leaves, strict=True) if isinstance(leaf, torch.Tensor)}
    return Built(_in_order(program, leaves), example if program.example_inputs else None, tuple(specs))


def _name_dims(shapes: Mapping[str, Sequence[str]]) -> dict[str, int | str]:
    """Name the dynamic dimensions of inputs, by the texts of a program, which has symbols, and sums of them."""
    dims: dict[str, int | str] = {}
    places = [
        (text, f"{name}_dim_{axis}" if axis else BATCH)
        for name, shape in shapes.items()
        for axis, text in enumerate(shape)
    ]
    for text, word in sorted(places, key=lambda place: not place[0].isidentifier()):
        parts = [part if part.isdecimal() else str(dims.get(part, "")) for part in text.split(" + ")]
        if not text.isdecimal():
            dims.setdefault(text, join_sum(parts) if all(parts) else word)
    return dims


def _in_order(program: Any, leaves: list[Any]) -> nn.Module:
    """Return the exported program as a function of its tensors in order, whichever of them were keywords or in lists.

    Of ``leaves``, all that it was exported with, those that are no tensors are given again.
    """

    class InOrder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.program = program.module()

        def train(self, mode: bool = True) -> "InOrder":
            return self  # an exported program has its mode fixed, and refuses the call

        def forward(self, *tensors: Any) -> Any:
            rest = iter(tensors)
            given = [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            args, kwargs = _pytree.tree_unflatten(given, program.call_spec.in_spec)
            return self.program(*args, **kwargs)

    return InOrder()


def _timm(source: Source) -> Built:
    timm = _library("timm", "timm")
    with user_errors(f"building {source.text}", None, "timm.create_model has to work with it; see timm.list_models()"):
        module = timm.create_model(source.target, **{"pretrained": True, **source.keywords})
    channels, height, width = module.pretrained_cfg.get("input_size", (3, 224, 224))
    spec = TensorSpec(name="image", dtype="float32", shape=("batch", channels, height, width))
    return Built(module, {"image": torch.randn(2, channels, height, width)}, (spec,), ("logits",))


def _hf(source: Source) -> Built:
    transformers = _library("transformers", "hf")
    remedy = "transformers.AutoModel.from_pretrained has to work on it; a folder holds config.json and safetensors"
    with user_errors(f"loading {source.text}", None, remedy):
        module, missing, notes = hugging_face.load_model(transformers, source.target)
    module.eval()
    hugging_face.check_callable(module)
    inputs = hugging_face_inputs.make_example(module)
    example = {name: values for name, (values, _) in inputs.items()}
    notes += hugging_face.check_missing(module, example, missing)
    return Built(
        module,
        example or None,
        tuple(spec for _, spec in inputs.values()),
        notes=tuple(notes),
        takes=tuple(hugging_face_inputs.list_inputs(module)),
        usual=tuple(hugging_face_inputs.list_usual_inputs(module)),
        class_names=hugging_face.name_classes(module.config),
        remedy=hugging_face.advise(module),
        remedy_random=hugging_face.advise_random(module),
    )


def fix_lengths(built: Built) -> Built:
    """Fix the lengths that a Hugging Face model refuses half of; it is run for that."""
    example = {spec.name: (built.example[spec.name], spec) for spec in built.inputs}
    inputs, notes = hugging_face_inputs.fix_lengths(built.module, example)
    return dataclasses.replace(built, inputs=tuple(spec for _, spec in inputs.values()), notes=(*built.notes, *notes))


def choose_inputs(built: Built, arrays: Sequence[TensorSpec]) -> Built:
    """Choose the inputs of a Hugging Face model by the arrays that there are for them, and note what that changes."""
    inputs = hugging_face_inputs.choose_inputs(built.module, built.inputs, arrays)
    before, after = ({spec.name: spec for spec in specs} for specs in (built.inputs, inputs))
    added = [f"{spec} is an input, as the data has it" for name, spec in after.items() if before.get(name) != spec]
    left_out = [name for name in before if name not in after]
    omitted = [f"{name} is left out, so that its default holds: the data does not have it" for name in left_out]
    remedy = f"give it what it needs: beside {', '.join(after)}, which the data has, it takes {', '.join(left_out)}"
    return dataclasses.replace(
        built,
        inputs=tuple(inputs),
        notes=(*built.notes, *added, *omitted),
        usual=tuple(name for name in built.usual if name not in left_out),
        remedy=built.remedy or (remedy if left_out else ""),
    )


_BUILDERS = {"zoo": _zoo, "file": _file, "module": _module, "pt2": _pt2, "timm": _timm, "hf": _hf}


def _library(name: str, extra: str) -> Any:
    if importlib.util.find_spec(name) is None:
        message = f"{extra}: models need the package {name}, which is not installed"
        raise MissingCapability(message, install_command(name))
    try:
        return importlib.import_module(name)
    except (ImportError, RuntimeError, AttributeError, OSError) as error:
        raise broken_package(name, f"{type(error).__name__}: {_first_words(error)}") from error


def _attribute(source: Source, module: Any, place: str) -> Callable[..., Any]:
    value = module
    for part in source.factory.split("."):
        if not hasattr(value, part):
            names = [key for key, item in vars(module).items() if callable(item) and not key.startswith("_")]
            own = [key for key in names if getattr(getattr(module, key), "__module__", "") == module.__name__]
            raise SourceError(
                f"{place} has no {source.factory!r}",
                f"it defines {', '.join(own or names) or 'nothing that can be called'}",
            )
        value = getattr(value, part)
    return value  # type: ignore[no-any-return]


def _call(source: Source, factory: Any) -> Built:
    result = factory
    if not isinstance(factory, nn.Module):
        if not callable(factory):
            raise SourceError(f"{source.text} is {_described(factory)}, not a factory", "name a callable")
        signature = None
        with contextlib.suppress(TypeError, ValueError):  # some callables tell nothing about themselves
            signature = inspect.signature(factory)
        try:
            if signature is not None:
                signature.bind(*source.arguments, **source.keywords)
        except TypeError as error:
            message = f"the factory {source.text} cannot be called: {error}"
            raise SourceError(message, f"its parameters are {signature}") from error
        with user_errors(f"the factory {source.text}", Path(source.target)):
            result = factory(*source.arguments, **source.keywords)
    module, example = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(module, nn.Module):
        raise SourceError(
            f"the factory {source.text} returned {_described(result)}",
            "return an nn.Module, or a pair (module, example_inputs)",
        )
    if isinstance(module, torch.jit.ScriptModule):
        raise SourceError(
            f"the factory {source.text} returned a TorchScript module, whose Python code is gone",
            TORCHSCRIPT_REMEDY.format(loaded="module"),
        )
    for name, value in (*module.named_parameters(), *module.named_buffers()):
        if value.is_meta:
            raise SourceError(
                f"the factory {source.text} returned a module on the meta device, whose weights have no values",
                "build it on the CPU, or load weights into it with load_state_dict(…, assign=True)",
            )
        if nn.parameter.is_lazy(value):
            raise SourceError(
                f"the factory {source.text} returned a module whose {name!r} has no size before the first call",
                "call the module once on the example before it is returned",
            )
        if value.layout is not torch.strided:
            layout = str(value.layout).removeprefix("torch.")
            raise SourceError(
                f"the factory {source.text} returned a module that keeps {name!r} as {layout}",
                "keep it as a dense tensor: to_dense()",
            )
    example = getattr(module, "example_input_array", None) if example is None else example
    return Built(module, example, notes=(_TRAINING_MODE,) if any(map(_differs_in_training, module.modules())) else ())


def _differs_in_training(module: nn.Module) -> bool:
    """Tell whether a module is in training mode, and answers otherwise there."""
    if not module.training:
        return False
    if isinstance(module, nn.modules.batchnorm._NormBase):
        return bool(module.track_running_stats)
    rates = (
        getattr(module, "p", 0) if isinstance(module, nn.modules.dropout._DropoutNd) else 0,
        vars(module).get("dropout"),
    )
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _described(value: Any) -> str:
    if isinstance(value, dict) and value and all(hasattr(item, "shape") for item in value.values()):
        return "a state dict (weights without a model)"
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def _put_first(folder: Path) -> None:
    sys.path[:] = [str(folder), *(entry for entry in sys.path if entry != str(folder))]
    importlib.invalidate_caches()


@contextlib.contextmanager
def user_errors(doing: str, near: Path | None, remedy: str = REMEDY) -> Iterator[None]:
    """Turn what the user's code raises into one message that names their line.

    Where libraries put other exceptions around the first one, it names that, too.
    """
    try:
        yield
    except (SourceError, MissingCapability):
        raise
    except (Exception, SystemExit) as error:
        message = f"{doing} failed with {type(error).__name__}: {_first_words(error) or 'no message'}"
        frames = file_tracking.select_user_frames(traceback.extract_tb(error.__traceback__))
        if near is not None and near.is_file():
            frames = [frame for frame in frames if Path(frame.filename).parent == near.parent] or frames
        if isinstance(error, SyntaxError) and error.filename:
            message += f" ({error.filename}:{error.lineno})"
        elif frames:
            message += f" ({frames[-1].filename}:{frames[-1].lineno})"
        first: BaseException = error
        while first.__cause__ is not None:
            first = first.__cause__
        if first is not error and _first_words(first) not in str(error):
            message += f"; it began with {type(first).__name__}: {_first_words(first)}"
        raise SourceError(message, remedy) from error


def _first_words(error: BaseException) -> str:
    """Return the beginning of an exception's message, on one line: some list every weight that does not fit."""
    if isinstance(error, SyntaxError):
        return error.msg
    words = " ".join(str(error).split())
    return words if len(words) <= _LONGEST_MESSAGE else f"{words[:_LONGEST_MESSAGE]} …"
