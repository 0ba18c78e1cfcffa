"""Save a loaded PyTorch model as an artifact, and load it from one.

The artifact holds no pickle: ``model.json`` says which factory to call and how the outputs are named,
``state.safetensors`` has the weights, ``example.safetensors`` one feed for each input.
"""

import contextlib
import dataclasses
import logging
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor, nn

from enginesmith.pipeline.artifact import Artifact, copy_folder, file_digest
from enginesmith.pipeline.errors import ModelError, SignatureError, SourceError, explain_errno
from enginesmith.pipeline.frameworks.processing import Processing
from enginesmith.pipeline.frameworks.source import SAVED, Source, rebase, resolve
from enginesmith.pipeline.frameworks.torch import factories
from enginesmith.pipeline.frameworks.torch.dims import same_answers
from enginesmith.pipeline.frameworks.torch.file_tracking import swap, track_files
from enginesmith.pipeline.frameworks.torch.module import LoadedModel, LoadOptions, NamedForward, extend
from enginesmith.pipeline.frameworks.torch.native_readers import read_held
from enginesmith.pipeline.frameworks.torch.packages import list_packages
from enginesmith.pipeline.frameworks.torch.processing import Extension
from enginesmith.pipeline.frameworks.torch.surgery import Surgery, apply_surgery, named_tensors, put_module
from enginesmith.pipeline.store.inputs import from_portable_path, to_portable_path
from enginesmith.pipeline.tensors import BATCH, Array, Signature

_log = logging.getLogger(__name__)

RECORD = SAVED
_PART_BYTES = 4 << 20
"""Part of a weight that is mapped at a time while it is read."""
_SMALL_BYTES = 32 << 20
"""Files below this are looked at whenever a model is rebuilt; the tensors of larger ones are in the artifact."""
_OS_ERROR = re.compile(r"\(os error (\d+)\)")
_STATE, _EXAMPLE, _ANSWERS = "state.safetensors", "example.safetensors", "answers.safetensors"


@contextlib.contextmanager
def parameters_left_empty() -> Iterator[None]:
    """Make ``torch.nn.init`` leave parameters at NaN within the block; buffers and plain tensors are filled.

    The caller replaces the parameters, and makes sure that nothing was made of them. Drawing random weights takes most
    of the time of building a large model: 2.8 s of BERT-base's, against 0.1 s without.
    """

    def skip_parameters(filler: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def fill(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                return filler(tensor, *args, **kwargs)
            if tensor.is_floating_point():  # NaN, so that whatever is made of it shows, and shows each time
                tensor.detach().fill_(math.nan)
            return tensor

        return fill

    fillers = {name: value for name, value in vars(nn.init).items() if name.endswith("_") and not name.startswith("_")}
    with swap(nn.init, **{name: skip_parameters(filler) for name, filler in fillers.items()}):
        yield


class _Record(BaseModel):
    """Content of ``model.json``."""

    model: str
    options: LoadOptions
    code: tuple[tuple[str, str], ...]
    """Portable path and sha256 of each file that the model was made of, so that other code makes another artifact."""
    packages: dict[str, str]
    signature: Signature
    output_names: tuple[str, ...]
    tied: dict[str, str]
    """State entries that share memory with another one → that other."""
    attributes: str = ""
    """Digest of what the module holds beside tensors, so that a module with other numbers makes another artifact."""
    draw: bool = False
    """The factory has to draw its random weights, although others replace them: something is made of them."""
    surgery: Surgery | None = None
    """Changes that pruning made to the module that the factory builds."""
    copies: bool = False
    """The module changes its inputs in place."""
    processing: Processing | None = None
    """Computation before and after the module."""
    class_names: tuple[str, ...] = ()
    """Names of the classes by number, where the model has some."""

    def wrap(self, model: nn.Module, inputs: Iterable[str]) -> NamedForward:
        """Make the module with named inputs and outputs of the one that the factory builds."""
        extension = Extension(self.processing) if self.processing else None
        constants = self.signature.constants
        return NamedForward(model, tuple(inputs), self.output_names, extension, copies=self.copies, constants=constants)


def save(loaded: LoadedModel, source: Source, options: LoadOptions, out: Path) -> None:
    """Write the artifact's files into ``out``.

    Raises:
        StoreError: the disk is full or cannot be written.
    """
    state, tied = _split_tied(named_tensors(loaded.module.model))
    record = _Record(
        model=source.text,
        options=options.model_copy(update={"widen": loaded.widened}),
        code=tuple(sorted((to_portable_path(str(path)), file_digest(path)) for path in loaded.files)),
        signature=loaded.signature,
        output_names=loaded.module.outputs,
        packages=loaded.packages,
        tied=tied,
        attributes=loaded.attributes,
        copies=loaded.module.copies,
        processing=loaded.module.extension.processing if loaded.module.extension else None,
        class_names=loaded.class_names,
    )
    _write(state, out / _STATE)
    record = _build_again(loaded, out / _STATE, record)
    (out / RECORD).write_text(record.model_dump_json(indent=1), encoding="utf-8")
    _write_example(loaded, out)
    _write_answers(loaded.answers, out)


def save_changed(parent: Artifact, loaded: LoadedModel, out: Path, surgery: Surgery | None = None) -> None:
    """Write an artifact of the parent's model with other weights, and with other sizes where there was ``surgery``.

    ``surgery`` is relative to the parent's module; None says that only weights changed. The module is rebuilt from
    what was written, and has to answer to the example as ``loaded`` does.

    Raises:
        ModelError: the rebuilt module is another one: something was changed that the surgery does not tell of.
        StoreError: the disk is full or cannot be written.
    """
    parents = read_record(parent.folder)
    state, tied = _split_tied(named_tensors(loaded.module.model))
    combined = parents.surgery.then(surgery) if parents.surgery and surgery else surgery or parents.surgery
    record = parents.model_copy(update={"tied": tied, "surgery": combined})
    _write(state, out / _STATE)
    (out / RECORD).write_text(record.model_dump_json(indent=1), encoding="utf-8")
    _write_example(loaded, out)
    with torch.inference_mode(False):
        model = _build_around(out / _STATE, record).module
    before, after = named_tensors(loaded.module.model), named_tensors(model)
    other = [name for name, value in before.items() if name not in after or not _same_bits(value, after[name])]
    with torch.inference_mode():
        expected = loaded.module(*loaded.example.values())
    if other or not same_answers(expected, _answer(model, loaded, record)):
        where = f", as at {other[0]!r}" if other else ""
        raise ModelError(
            f"{record.model} cannot be built again as it was changed: the rebuilt module differs{where}",
            "keep sizes in attributes that are whole numbers or tuples of them, and tensors in parameters or buffers",
        )
    _write_answers(expected, out)


def _same_bits(tensor: Tensor, other: Tensor) -> bool:
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    return torch.equal(tensor, other) or (
        torch.equal(tensor.isnan(), other.isnan()) and torch.equal(tensor.nan_to_num(), other.nan_to_num())
    )


def _answer(model: nn.Module, loaded: LoadedModel, record: _Record) -> tuple[Tensor, ...]:
    """Run a rebuilt module on the example."""
    with torch.inference_mode():
        return record.wrap(model, loaded.example).forward(*loaded.example.values())


def _build_again(loaded: LoadedModel, state: Path, record: _Record) -> _Record:
    """Find out whether a module without random weights, with the stored tensors in it, is the original; record it.

    It has to answer likewise, and to hold the same beside its tensors: a table of random numbers is drawn from those
    that follow the weights' own, and the example, of zeros perhaps, need not show it.

    Raises:
        SourceError: they do not even where the weights are drawn again: the factory builds another model each time, or
            fails when it is called again.
    """
    failure: Exception | None = None
    for draw in (False, True):
        # without weights that are drawn, the factory itself may fail: what is in their place is no matrix to invert
        try:
            with torch.inference_mode(False):
                built = _build_around(state, record.model_copy(update={"draw": draw}))
            alike = draw or (built.attributes.complete and built.attributes.digest == record.attributes)
            if alike and same_answers(loaded.answers, _answer(built.module, loaded, record)):
                return record.model_copy(update={"draw": draw})
        except (RuntimeError, ValueError, SourceError) as error:
            failure = error if draw else None
    if failure is not None:
        reason = failure.message if isinstance(failure, SourceError) else str(failure).strip().partition("\n")[0]
        raise SourceError(
            f"{record.model} cannot be built a second time in one process: {reason}",
            "move what may happen only once, such as registering a name, into a module that the file imports",
        ) from failure
    if _changes_itself(built, loaded, record):
        raise SourceError(
            f"{record.model} changes itself when it is called with other sizes, and then answers otherwise",
            f"fix its sizes, to those of this example or others: {_fix_sizes(loaded)}",
        )
    raise SourceError(
        f"{record.model} builds another model each time it is called",
        "keep what it computes in parameters or buffers (register_buffer), or seed it within the factory",
    )


def _changes_itself(built: factories.Built, loaded: LoadedModel, record: _Record) -> bool:
    """Tell whether a rebuilt module answers as the loaded one once it was tried with the sizes that that was."""
    if resolve(record.model).form != "hf" or record.options.inputs:
        return False
    factories.fix_lengths(built)
    return same_answers(loaded.answers, _answer(built.module, loaded, record))


def _fix_sizes(loaded: LoadedModel) -> str:
    """Write the options that fix all sizes but the batch to those of the example."""
    specs = []
    for spec in loaded.signature.inputs:
        sizes = zip(spec.shape, loaded.example[spec.name].shape, strict=True)
        specs.append(spec.model_copy(update={"shape": tuple(dim if dim == BATCH else size for dim, size in sizes)}))
    return " ".join(f"--input {spec}" for spec in specs)


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(tensors, path)
    except SafetensorError as error:  # written from Rust: the system's error is in the text only
        if (number := _OS_ERROR.search(str(error))) is None:
            raise
        raise explain_errno(OSError(int(number[1]), str(error)), "the store") from error


def _write_example(loaded: LoadedModel, out: Path) -> None:
    """Write the example, in which one tensor may be several inputs."""
    example = {name: value.clone(memory_format=torch.contiguous_format) for name, value in loaded.example.items()}
    _write(example, out / _EXAMPLE)


def _write_answers(answers: Iterable[Tensor], out: Path) -> None:
    """Write what the module answers to the example, output by output."""
    copies = (value.clone(memory_format=torch.contiguous_format) for value in answers)
    _write({str(number): value for number, value in enumerate(copies)}, out / _ANSWERS)


def load_artifact(artifact: Artifact) -> LoadedModel:
    """Load the module of a torch artifact, with exactly the weights that were stored.

    Raises:
        SourceError: the factory now gives a module that the stored weights do not fit, or that holds something else.
    """
    return _load_files(artifact.folder, read_record(artifact.folder))


def _load_files(folder: Path, record: _Record) -> LoadedModel:
    from safetensors.torch import load_file

    built = _build_around(folder / _STATE, record)
    example = load_file(folder / _EXAMPLE)
    ordered = {spec.name: example[spec.name] for spec in record.signature.inputs}
    loaded = LoadedModel(record.wrap(built.module, ordered), record.signature, ordered, frozen=built.frozen)
    if built.attributes.digest != record.attributes and (folder / _ANSWERS).is_file():
        before = load_file(folder / _ANSWERS)
        with torch.inference_mode():
            _check_answers(tuple(before[name] for name in sorted(before, key=int)), loaded, record)
    return loaded


def _check_answers(before: tuple[Tensor, ...], loaded: LoadedModel, record: _Record) -> None:
    """Check that a module which holds something else beside its tensors than where it was stored answers as there.

    Raises:
        SourceError: it does not.
    """
    after = loaded.module(*loaded.example.values())
    if len(before) != len(after) or not same_answers(before, after):
        raise SourceError(
            f"{record.model} builds another model each time it is called in another process: what it holds beside "
            "parameters and buffers is something else there, and so are its answers",
            "let nothing in it depend on the order of a set (write sorted(…)), a date, os.getpid() or the machine; or "
            "keep what it computes in parameters or buffers (register_buffer)",
        )


def _build_around(state: Path, record: _Record) -> factories.Built:
    """Build the factory's module around the stored tensors."""
    from safetensors import safe_open

    torch.manual_seed(record.options.seed)
    drawing = contextlib.nullcontext() if record.draw else parameters_left_empty()
    others = {read_held(module, "__file__") for module in list(sys.modules.values())}  # data may be code, too
    with drawing, track_files(record.options.allow_pickle, again=True) as tracker:
        built = factories.build(resolve(record.model))
        built = factories.widen(built) if record.options.widen else built
        model = built.module
    _compare_files({path for path in tracker.files if str(path) not in others}, record)
    try:
        if record.surgery is not None:
            apply_surgery(record.surgery, model)
    except LookupError as error:
        raise SourceError(
            f"{record.model} no longer builds the module that was pruned: there is no {error.args[0]!r}",
            "prune it again, or bring the code back that it was pruned with",
        ) from error
    own = named_tensors(model)
    with safe_open(state, framework="pt") as stored:
        names = list(stored.keys())
    if set(own) != {*names, *record.tied}:
        raise SourceError(
            f"{record.model} no longer builds the module whose weights were stored",
            "run optimize again, so that it is loaded again",
        )
    for name in names:
        if 0 not in own[name].stride() or own[name].numel() <= 1:
            _copy_stored(state, name, own[name])
        else:  # an expanded buffer: its elements share memory and cannot be written
            with safe_open(state, framework="pt") as stored:
                put_module(model, name, stored.get_tensor(name).clone())
    return built


def _copy_stored(state: Path, name: str, target: torch.Tensor) -> None:
    """Copy a stored tensor in parts, each of a file opened anew, as what was read stays mapped until it is closed."""
    from safetensors import safe_open

    rows = len(target) if target.ndim else 0
    step = max(1, _PART_BYTES * rows // max(1, target.nbytes))
    if rows <= step:
        with safe_open(state, framework="pt") as stored:
            target.copy_(stored.get_tensor(name))
        return
    for start in range(0, rows, step):
        with safe_open(state, framework="pt") as stored:
            target[start : start + step].copy_(stored.get_slice(name)[start : start + step])


def _compare_files(files: Collection[Path], record: _Record) -> None:
    """Compare files that were read with those that the model was made of.

    One that is not among these is no change: libraries read more files in one process than in another.

    Raises:
        SourceError: a file has other content.
    """
    digests = {os.path.normpath(from_portable_path(name)): digest for name, digest in record.code}
    for path in files:
        before = digests.get(os.path.normpath(path))
        if before and path.stat().st_size < _SMALL_BYTES and file_digest(path) != before:
            raise SourceError(
                f"{path} is not as it was when the model was loaded",
                "leave it alone while a run is under way; for a pruned model, bring it back as it was, or prune again",
            )
    if new := sorted(path for path in files if os.path.normpath(path) not in digests):
        _log.info("%d files were read that loading the model did not read, such as %s", len(new), new[0])


def _rebase_code(code: tuple[tuple[str, str], ...], old: Path, new: Path) -> tuple[tuple[str, str], ...]:
    """Rewrite portable paths of the project ``old`` for the project ``new``."""
    here = "{project}/"
    return tuple(
        (here + os.path.relpath(old / name.removeprefix(here), new) if name.startswith(here) else name, digest)
        for name, digest in code
    )


def read_saved(folder: Path, options: LoadOptions, out: Path) -> LoadedModel:
    """Bring a saved model's folder into ``out`` as an artifact, and load it; what it is made of has to be as it was.

    Paths in the folder's record are taken from that folder, in an artifact from the current one.

    Raises:
        SourceError: the folder is damaged, or what the model is built with changed.
        SignatureError: ``options`` give other inputs than the model was saved with.
    """
    from safetensors import SafetensorError

    try:
        record = read_record(folder)
    except ValueError as error:
        raise SourceError(f"{folder / RECORD} is no record of a saved model", "prune the model again") from error
    if options.processing and record.processing:
        raise SourceError(
            f"the saved model {folder} has what --prepend and --append added already",
            "omit these options, or prune the model again without them",
        )
    if options.inputs and not options.processing.prepend and options.inputs != record.signature.inputs:
        raise SignatureError(
            f"--input says {', '.join(map(str, options.inputs))}, and the model was saved with "
            f"{', '.join(map(str, record.signature.inputs))}",
            "omit --input: a saved model names its own inputs",
        )
    allowed = record.options.allow_pickle and options.allow_pickle
    inner = record.options.model_copy(update={"allow_pickle": allowed})
    paths = {
        "model": rebase(record.model, folder, Path.cwd()),
        "code": _rebase_code(record.code, folder.absolute(), Path.cwd()),
    }
    record = record.model_copy(update={**paths, "options": inner})
    (out / RECORD).write_text(record.model_dump_json(indent=1), encoding="utf-8")
    for name in (_STATE, _EXAMPLE):
        if not (folder / name).is_file():
            raise SourceError(f"the saved model {folder} lacks {name}", "prune the model again")
        shutil.copyfile(folder / name, out / name)
    if (folder / _ANSWERS).is_file():
        shutil.copyfile(folder / _ANSWERS, out / _ANSWERS)
    with track_files(allowed) as tracker:
        try:
            loaded = _load_files(out, record)
        except SafetensorError as error:
            raise SourceError(f"the saved model {folder} is damaged: {error}", "prune the model again") from error
    if options.processing:
        loaded = extend(loaded, options)
        assert loaded.module.extension is not None
        changed = {"processing": loaded.module.extension.processing, "signature": loaded.signature}
        (out / RECORD).write_text(record.model_copy(update=changed).model_dump_json(indent=1), encoding="utf-8")
        _write_example(loaded, out)
        (out / _ANSWERS).unlink(missing_ok=True)
    own = {path for path in tracker.files if path.is_relative_to(out.absolute())}
    files = {*tracker.files - own, *(folder / name for name in (RECORD, _STATE, _EXAMPLE))}
    return dataclasses.replace(loaded, files=tuple(sorted(files)), packages=list_packages()[0])


def write_saved(artifact: Artifact, folder: Path, seen_from: Path) -> None:
    """Write a torch artifact's files into a folder, and what lies beside them.

    ``seen_from`` is where the folder is going to be; paths in its record are taken from there.
    """
    copy_folder(artifact.folder, folder, skip=["artifact.json"])
    record = read_record(artifact.folder)
    here, there = Path.cwd(), seen_from.resolve()
    moved = {"model": rebase(record.model, here, there), "code": _rebase_code(record.code, here, there)}
    record = record.model_copy(update=moved)
    (folder / RECORD).write_text(record.model_dump_json(indent=1), encoding="utf-8")


def read_record(folder: Path) -> _Record:
    """Read ``model.json`` in an artifact's folder."""
    return _Record.model_validate_json((folder / RECORD).read_bytes())


def list_code_files(folder: Path) -> set[Path]:
    """List the files that a torch artifact was made of."""
    return {Path(from_portable_path(name)) for name, _ in read_record(folder).code}


def read_example(artifact: Artifact) -> dict[str, Array]:
    """Read the example feeds of a torch artifact; nothing of the model is loaded."""
    from safetensors.numpy import load_file

    return load_file(artifact.folder / _EXAMPLE)


def _split_tied(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Split a state into entries with memory of their own, and those that share an earlier entry's, by name."""
    names_by_place: dict[tuple[Any, ...], str] = {}
    storages: set[int] = set()
    unique: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    for name, value in state.items():
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() and place in names_by_place:
            tied[name] = names_by_place[place]
        else:
            names_by_place[place] = name
            storage = value.untyped_storage().data_ptr()
            unique[name] = value.clone() if storage in storages else value.contiguous()
            storages.add(storage)
    return unique, tied
