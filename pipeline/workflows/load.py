"""Load what a run or a bundle keeps, to call it from Python in the place of the model, from any number of threads.

Built engines are opened by their own runtime: no code of the user's runs. ``eager`` and ``compiled`` have no file,
so the recipe's model is loaded again, by its own code.
"""

import contextlib
import ctypes
import dataclasses
import functools
import operator
import os
import queue
import sys
import threading
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from enginesmith.pipeline.engines import engine_class
from enginesmith.pipeline.engines.base import Candidate, Session
from enginesmith.pipeline.errors import (
    CallError,
    FidelityError,
    ModelError,
    ShapeError,
    SignatureError,
    UsageError,
    warn_caller,
)
from enginesmith.pipeline.execution.settings import Settings
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.fidelity import Fidelity, Thresholds, compare, describe_failure
from enginesmith.pipeline.planning import planner
from enginesmith.pipeline.planning.plan import LOAD
from enginesmith.pipeline.planning.variants import resolve_recipe
from enginesmith.pipeline.results import remeasure
from enginesmith.pipeline.results.package import describe, verify
from enginesmith.pipeline.results.package import manifest as manifests
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import (
    Array,
    Constant,
    Feeds,
    ShapeRange,
    Signature,
    TensorSpec,
    check_indices,
    is_same,
    read_sizes,
)
from enginesmith.pipeline.workflows.run_directory import work_where_begun
from enginesmith.pipeline.workflows.stages import reload_model

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Stored:
    """Hold the files that a model is opened from, once they are checked."""

    candidate: Candidate
    ranges: Mapping[str, ShapeRange]
    vector: Path | None
    thresholds: Thresholds
    returns: Any = None
    """Form of the module's outputs, as in :class:`Signature`."""
    unsigned: tuple[str, ...] = ()
    """Inputs of which the module refuses negative numbers, as in :class:`Signature`."""
    constants: Mapping[str, Constant] = field(default_factory=dict)
    """Arguments that the module was called with beside its inputs, as in :class:`Signature`."""
    work_folder: Path | None = None
    """Folder in which a module's code is run: where its run was begun. None for engines, which have no such code."""
    origin: Callable[[], Any] | None = None
    """:func:`load` with the arguments that open it again."""


def load(
    path: str | os.PathLike[str], variant: str | None = None, *, device: str | None = None, trust: bool = False
) -> "LoadedModel":
    """Load the winner of a run directory, a variant of that name, or a bundle; digests are checked first.

    ``device`` is ``cpu``, ``cuda`` or ``cuda:1`` instead of the run's own. A variant that failed or was rejected is
    loaded only by name, with a warning. ``trust`` allows an engine with machine code (``aotinductor``, TensorRT with
    host code): you trust who made the run or bundle.

    Raises:
        UsageError: there is no such run, bundle or variant, no winner, or the variant has no engine; the model, which
            is loaded again for ``eager`` and ``compiled``, has changed.
        ModelError: a file is missing or changed; nothing was loaded.
        MissingCapability: this machine cannot run it, or its code is not trusted.
    """
    folder = Path(path)
    bundle = (folder / manifests.FILE).is_file()
    stored = _find_in_bundle(folder, variant, trust=trust) if bundle else _find_in_run(folder, variant, trust=trust)
    candidate = stored.candidate
    if device is not None:
        candidate = dataclasses.replace(candidate, device=Device.parse(device, candidate.device.threads))
    origin = functools.partial(load, str(folder.absolute()), candidate.id, device=str(candidate.device), trust=trust)
    return LoadedModel(dataclasses.replace(stored, candidate=candidate, origin=origin))


def _find_in_bundle(folder: Path, variant: str | None, *, trust: bool) -> Stored:
    manifest = manifests.read(folder)
    if manifest.format != "bundle" or variant not in (None, manifest.variant):
        message = f"{folder} is a {manifest.format} package of {manifest.variant}"
        raise UsageError(message, f"load the run, or a bundle of {variant or manifest.variant}")
    manifests.check_files(folder, manifest)
    verify.require_trust(manifest, trust=trust)
    candidate = verify.candidate(folder, manifest)
    vector, signature = folder / manifests.VECTOR, manifest.signature
    return Stored(candidate, manifest.shapes, vector, manifest.thresholds, **_form_of(signature))


def _find_in_run(folder: Path, variant: str | None, *, trust: bool) -> Stored:
    stored = describe.find_variant(folder, variant)
    folder, run, record = stored.folder, stored.run, stored.record
    for doubt in describe.list_doubts(record):
        warn_caller(f"{record.id}: {doubt}")
    vector = describe.check_vector(folder, record.test_vector) if record.test_vector else None
    work_folder = None
    if engine_class(record.engine).runs_module():
        with work_where_begun(run):
            candidate, work_folder = _load_module(stored), Path.cwd()
    else:
        describe.check_engine_file(folder, describe.require_engine(folder, run, record))
        candidate = remeasure.candidate(record.id, stored, trust=trust)
    ranges = {name: ShapeRange.parse(text) for name, text in run.model.shapes.items()}
    thresholds, signature = describe.thresholds_of(run, record, candidate.engine), run.model.signature
    form = _form_of(signature) if signature else {}
    return Stored(candidate, ranges, vector, thresholds, **form, work_folder=work_folder)


def _form_of(signature: Signature) -> dict[str, Any]:
    return {"returns": signature.returns, "unsigned": signature.unsigned, "constants": signature.constants}


def _load_module(stored: remeasure.Stored) -> Candidate:
    """Load the recipe's model by its own code; refuse it if it is another one."""
    run, name = stored.run, stored.record.id
    plan = planner.plan(resolve_recipe(run.recipe), here=False)
    planned = next((each for each in (plan.baseline, *plan.variants) if each.id == name), None)
    if planned is None or planned.artifact != LOAD:
        message = f"the run directory does not have the weights of {name}, which runs a changed PyTorch module"
        raise UsageError(message, "load a variant that is built from a graph")
    remedy = "run optimize again, or load a variant that has an engine file"
    return Candidate(name, planned.engine, reload_model(run, stored.folder, Settings(), remedy), planned.device)


_WIDEN = "optimize with --shape {word}=MIN:OPT:MAX that includes {size}"


def _advise_nothing(word: str, range_: ShapeRange | None, signature: Signature) -> str:
    """Say what helps where a size is 0 that nobody has verified at that: no option allows a batch of 0."""
    if range_ is None or word == samples.batch_symbol(signature):
        return "give some rows"
    return f"give some, or, if the model takes none, optimize with --shape {word}=0:{range_.opt}:{range_.max}"


class LoadedModel:
    """Call a stored engine as the module that it was made from, with numpy arrays or torch tensors.

    Outputs are of the same kind as the inputs, in the form in which the module returned them: a tensor, a tuple, or
    :class:`Outputs` by name. Calls may come from any number of threads. No gradients are computed. A copy, pickled or
    not, is loaded from the same files again.
    """

    def __init__(self, stored: Stored) -> None:
        """Open the engine; errors as in :func:`load`."""
        candidate = stored.candidate
        self._stored, self.variant, self.device = stored, candidate.id, candidate.device
        where = contextlib.chdir(stored.work_folder) if stored.work_folder else contextlib.nullcontext()
        with _keep_torch_settings(candidate), where:
            session = candidate.engine.load(candidate.artifact, candidate.device)
        self.signature = session.signature
        self._pool = _Pool(session, candidate)
        self._answer = session.answer if session.concurrent else self._pool.answer
        self._inputs = [spec.name for spec in self.signature.inputs]
        self._names = frozenset(self._inputs)
        self._tables = [
            (self._inputs.index(name), rows, 0 if name in stored.unsigned else -rows)
            for name, rows in self.signature.tables.items()
        ]
        self._pack = _make_packer(stored.returns, [spec.name for spec in self.signature.outputs])
        self._known: set[tuple[Any, ...]] = set()
        self._exceeded: set[str | int] = set()  # dimensions that were outside their range
        _open.add(self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Run the model on its inputs, in order or by name; SignatureError if they do not fit (ShapeError: by size)."""
        values: Sequence[Any] = arguments
        if not arguments and named.keys() == self._names:
            values = [named[name] for name in self._inputs]
        elif named or len(arguments) != len(self._inputs):
            values = self._order(arguments, named)
        convert: Callable[[Array], Any] | None = None
        shapes: tuple[Any, ...] = ()
        for value in values:
            if type(value) is not np.ndarray:
                if any(value is None for value in values):
                    raise self._explain_call((), dict(zip(self._inputs, values, strict=True)))
                values, convert = _to_arrays(values, self.signature.inputs)
                shapes = tuple(fact for value in values for fact in (value.dtype, value.shape))
                break
            shapes += (value.dtype, value.shape)
        if shapes not in self._known:
            self._check(dict(zip(self._inputs, values, strict=True)))
            if len(self._known) < 1000:  # sets of shapes
                self._known.add(shapes)
        for at, rows, lowest in self._tables:
            check_indices(self._inputs[at], values[at], rows, lowest)
        try:
            outputs = self._answer(values)
        except ModelError as error:
            self._explain_failure(error, dict(zip(self._inputs, values, strict=True)))
            raise
        return self._pack([convert(output) for output in outputs] if convert else outputs)

    def _order(self, arguments: tuple[Any, ...], named: dict[str, Any]) -> Sequence[Any]:
        fixed = self._stored.constants
        named = {name: value for name, value in named.items() if value is not None}
        named = {name: value for name, value in named.items() if name not in fixed or not is_same(value, fixed[name])}
        values = dict(zip(self._inputs, arguments, strict=False)) | named
        if len(arguments) + len(named) != len(self._inputs) or values.keys() != set(self._inputs):
            raise self._explain_call(arguments, named)
        return [values[name] for name in self._inputs]

    def _explain_call(self, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> CallError:
        """Name what is missing, and what is none of the inputs."""
        inputs, fixed = self._inputs, self._stored.constants
        if len(arguments) == 1 and isinstance(arguments[0], Mapping):
            message = f"the model's inputs are {', '.join(inputs)}; it was called with a mapping"
            return CallError(message, "unpack the mapping: model(**inputs)")
        first = inputs[: len(arguments)]
        missing = [name for name in inputs if name not in first and named.get(name) is None]
        faults = [
            f"without {', '.join(missing)}" if missing else "",
            f"with {len(arguments)} in order" if len(arguments) > len(self._inputs) else "",
            *(f"with {name} twice" for name in first if name in named),
            *(f"with {_show(*each)}, which is none of them" for each in named.items() if each[0] not in inputs),
            *(f"where the engine has {name}={fixed[name]!r}" for name in named if name in fixed),
        ]
        remedy = "give each input once, in this order or by name; what else the original takes is not in the engine"
        return CallError(
            f"the model's inputs are {', '.join(inputs)}; it was called {', '.join(filter(None, faults))}", remedy
        )

    def _check(self, feeds: Feeds) -> None:
        """Compare feeds with the signature, and sizes with the ranges: outside, engines built for ranges take none.

        Others answer, and their first answer there is given with a warning. Sizes of 0 are taken only if they were
        verified.
        """
        self.signature.check(feeds)
        for word, size in read_sizes(self.signature.inputs, feeds).items():
            range_ = self._stored.ranges.get(word)
            if size == 0 and (range_ is None or range_.min):
                name = next(spec.name for spec in self.signature.inputs if word in spec.symbols)
                message = f"{word} is 0 in {name}, and engines do not compute with nothing"
                raise ShapeError(message, _advise_nothing(word, range_, self.signature))
        for word, (size, message) in self._find_outside(feeds).items():
            remedy = _WIDEN.format(word=word, size=size)
            if self._stored.candidate.engine.needs_shapes:
                raise ShapeError(message, remedy)
            if word not in self._exceeded:
                self._exceeded.add(word)
                warn_caller(f"{message}: nobody has checked its answers there; {remedy}")

    def _find_outside(self, feeds: Feeds) -> dict[str, tuple[int, str]]:
        """Find the dimensions whose size is outside of its range: that size, and a sentence about it."""
        outside = dict[str, tuple[int, str]]()
        state = "is built" if self._stored.candidate.engine.needs_shapes else "was verified"
        for word, size in read_sizes(self.signature.inputs, feeds).items():
            range_ = self._stored.ranges.get(word)
            if range_ is not None and not range_.min <= size <= range_.max:
                outside[word] = size, f"{word} is {size}, and {self.variant} {state} for {range_.min} to {range_.max}"
        return outside

    def _explain_failure(self, error: ModelError, feeds: Feeds) -> None:
        """Say of an engine that failed that sizes are outside of their range, if they are.

        Raises:
            ShapeError: so it is.
        """
        for word, (size, message) in self._find_outside(feeds).items():
            remedy = _WIDEN.format(word=word, size=size)
            raise ShapeError(f"{message}, and fails there: {error.message}", remedy) from error

    def check(self) -> Fidelity:
        """Answer the test vector; FidelityError if that differs from the stored answers by more than is allowed."""
        if self._stored.vector is None:
            raise UsageError(f"the run keeps no test vector of {self.variant}", "check another variant")
        vector = samples.read_vector(self._stored.vector)
        outputs = self._answer([vector.feeds[name] for name in self._inputs])
        answers = {spec.name: value for spec, value in zip(self.signature.outputs, outputs, strict=True)}
        fidelity = compare(vector.outputs, answers, self._stored.thresholds, self.signature, *vector[2:])
        if not fidelity.passed:
            message = f"{self.variant} does not answer its test vector: {describe_failure(fidelity)}"
            raise FidelityError(message, "optimize again on this machine")
        return fidelity

    def as_module(self, eager: "nn.Module | None" = None) -> "nn.Module":
        """Make a torch module that calls this model; shapes that it does not take go to ``eager``, if given."""
        from enginesmith.pipeline.frameworks.torch.replacement import Replacement

        returns = self._stored.returns
        named = isinstance(returns, dict) and "namedtuple" not in returns
        constants = self._stored.constants
        return Replacement(self, eager, self.device, self._inputs, names_outputs=named, constants=constants)

    def close(self) -> None:
        """Free the engine once calls that have begun are done; later calls raise UsageError."""
        self._answer = _refuse_closed
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        assert self._stored.origin is not None
        return self._stored.origin, ()


def _show(name: str, value: Any) -> str:
    return f"{name}={value}" if isinstance(value, (bool, int, float, str)) else name


class Outputs(dict[str, Any]):
    """Give the outputs of a module that named them: as items, as attributes, or by number; None where it gave None."""

    def __init__(self, values: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        super().__init__(values)
        for name in [name for name, value in self.items() if value is None]:
            vars(self)[name] = self.pop(name)

    def __getitem__(self, name: Any) -> Any:
        return self.to_tuple()[name] if isinstance(name, (int, slice)) else super().__getitem__(name)

    def __missing__(self, name: str) -> None:
        if name not in vars(self):
            raise KeyError(name)

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(f"the outputs are {', '.join(self)}, and none is called {name!r}")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ({**self, **vars(self)},)

    def to_tuple(self) -> tuple[Any, ...]:
        """List the outputs that are not None."""
        return tuple(self.values())


def _make_packer(structure: Any, names: list[str]) -> Callable[[Sequence[Any]], Any]:
    """Make a function that puts outputs of these names into the form that was recorded; into a usual one without."""
    if structure is None:
        several = {name: name for name in names} if len(names) > 1 else names[0]
        structure = names if names == [f"output_{index}" for index in range(len(names))] else several
    if isinstance(structure, str):
        return operator.itemgetter(0)
    if isinstance(structure, dict) and list(structure.values()) == names:
        return lambda values: Outputs(zip(structure, values, strict=True))
    return lambda values: _pack(structure, dict(zip(names, values, strict=True)))


@functools.cache
def _make_namedtuple(name: str, fields: tuple[str, ...]) -> Callable[..., Any]:
    return namedtuple(name, fields)  # with the fields of the module's own


def _pack(structure: Any, values: Mapping[str, Any]) -> Any:
    if isinstance(structure, list):
        return tuple([_pack(each, values) for each in structure])
    if isinstance(structure, dict) and structure.keys() == {"namedtuple", "fields"}:
        fields = structure["fields"]
        kind = _make_namedtuple(structure["namedtuple"], tuple(fields))
        return kind(*[_pack(each, values) for each in fields.values()])
    if isinstance(structure, dict):
        return Outputs({name: _pack(each, values) for name, each in structure.items()})
    return values[structure] if structure is not None else None


def _to_arrays(values: Sequence[Any], specs: Sequence[TensorSpec]) -> tuple[list[Array], Callable[[Array], Any] | None]:
    """View inputs as arrays, with what turns outputs into their kind; tensors of another device are copied."""
    torch = sys.modules.get("torch")  # not imported for this: without it no value is a tensor
    kinds = set(map(type, values))
    if torch is None or (kinds != {torch.Tensor} and not all(issubclass(kind, torch.Tensor) for kind in kinds)):
        if all(issubclass(kind, (np.ndarray, np.generic)) for kind in kinds):
            return [np.asarray(value) for value in values], None
        given = ", ".join(type(value).__name__ for value in values)
        raise SignatureError(f"the inputs are {given}", "give numpy arrays, or torch tensors, all of one kind")
    try:
        return [value.numpy() for value in values], torch.from_numpy
    except (TypeError, RuntimeError):
        if torch.is_grad_enabled() and any(value.requires_grad for value in values):
            raise UsageError("an engine has no gradients", "call it in `with torch.inference_mode():`") from None
    try:
        as_floats = [value.float() if value.dtype == torch.bfloat16 else value for value in values]  # exact
        arrays = [value.numpy(force=True) for value in as_floats]
    except (TypeError, RuntimeError) as error:  # sparse
        given = ", ".join(f"{spec.name} in {spec.dtype}" for spec in specs)
        message = f"an input cannot be fed to an engine: {error}"
        raise SignatureError(message, f"give dense tensors of the model's dtypes: {given}") from error
    return arrays, lambda array: torch.from_numpy(array).to(values[0].device)


@contextlib.contextmanager
def _keep_torch_settings(candidate: Candidate) -> Iterator[None]:
    """Leave torch's number of threads and random numbers as they are, which opening a module changes."""
    if candidate.engine.consumes != "torch":
        yield
        return
    import torch

    threads = torch.get_num_threads()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.set_num_threads(threads)


class _Pool:
    """Lend sessions of one engine to threads, each to one call at a time; siblings are opened up to a limit."""

    def __init__(self, first: Session, candidate: Candidate) -> None:
        self._first, self._candidate, self._closed, self._lock = first, candidate, False, threading.Lock()
        self._more = Device().thread_count - 1 if candidate.device.kind == "cpu" else 0
        self._free: queue.SimpleQueue[Session | None] = queue.SimpleQueue()
        """None wakes up those that wait where the pool was closed."""
        self._free.put(first)

    def answer(self, values: Sequence[Array]) -> Sequence[Array]:
        try:
            session = self._free.get_nowait()
        except queue.Empty:
            session = self._open_or_wait()
        if session is None:
            self._free.put(None)
            _refuse_closed(values)
        assert session is not None
        try:
            return session.answer(values)
        finally:
            self._free.put(session)
            if self._closed:
                self.close()

    def _open_or_wait(self) -> Session | None:
        with self._lock:
            more, self._more = self._more > 0 and not self._closed, max(self._more - 1, 0)
        if not more:
            return self._free.get()
        with _keep_torch_settings(self._candidate):
            return self._first.sibling()

    def close(self) -> None:
        """Close the sessions that are free now; one that answers is closed by its call."""
        self._closed = True
        with contextlib.suppress(queue.Empty):
            while True:
                if (session := self._free.get_nowait()) is not None:
                    session.close()
        self._free.put(None)

    def abandon(self) -> None:
        """Never free the sessions: in a forked process, OpenVINO would wait forever for threads that are not there."""
        for resource in (self._first, self._free):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(resource))
        self._free = queue.SimpleQueue()


def _refuse_closed(values: Sequence[Array]) -> Sequence[Array]:
    raise UsageError("the model is closed", "load it again")


def _refuse_forked(values: Sequence[Array]) -> Sequence[Array]:
    message = "the model was loaded before this process was forked, and the engine's threads are in the other process"
    raise UsageError(
        message, "load it in each worker, and start workers by spawn if PyTorch runs it, which hangs in a fork"
    )


_open: "weakref.WeakSet[LoadedModel]" = weakref.WeakSet()


def _disable_in_child() -> None:
    """Refuse calls in a process that was forked."""
    for model in list(_open):
        model._answer = _refuse_forked
        model._pool.abandon()


os.register_at_fork(after_in_child=_disable_in_child)
