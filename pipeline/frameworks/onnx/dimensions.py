"""Name or fix the open dimensions of an ONNX file's inputs, as ``--input`` describes them, and name its outputs'.

Where a file declares other shapes of its outputs than it answers, they are corrected: ONNX Runtime takes the outputs of
a first call for given ones in the next call with the same binding, and checks them against what the file declares.
"""

import contextlib
import itertools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.pipeline.errors import InvalidGraph, MissingCapability, ModelError, SignatureError
from enginesmith.pipeline.frameworks.onnx import choices, evaluator, model_file, traversal
from enginesmith.pipeline.frameworks.samples import batch_symbol
from enginesmith.pipeline.tensors import (
    BATCH,
    DTYPES,
    Array,
    Feeds,
    Signature,
    TensorSpec,
    format_sizes,
    is_sum,
    join_sum,
    list_words,
    write_options,
)

if TYPE_CHECKING:
    import onnx


def write_inputs(path: Path, given: Sequence[TensorSpec], target: Path) -> None:
    """Copy a file, with the dimensions of these inputs in place of its own; a name that it has elsewhere changes, too.

    Raises:
        SignatureError: an input is missing, or has another dtype, rank or fixed size than in the file; or a name that
            stands twice in the file gets two others.
    """
    model, declared = model_file.read(path), model_file.signature(path)
    specs = _order(declared.inputs, given)
    values = {value.name: value for value in model.graph.input}
    words, texts = _match(declared.inputs, specs, values)
    for spec in specs:
        for proto, dim in zip(values[spec.name].type.tensor_type.shape.dim, spec.shape, strict=True):
            _write(proto, dim)
    refuted = bool(_list_moved(declared.inputs, specs))
    for output, value in zip(declared.outputs, model.graph.output, strict=True):
        for proto, dim in zip(value.type.tensor_type.shape.dim, output.shape, strict=True):
            if refuted and dim == BATCH and model_file.is_unnamed(proto):
                continue  # it was read as the batch, as first dimensions of inputs were
            new = _substitute(dim, words)
            # a dimension without a name is not fixed by what is only guessed of it
            if not words.keys().isdisjoint(list_words(dim)) and not (
                model_file.is_unnamed(proto) and isinstance(new, int)
            ):
                _write(proto, new)
    for graph in traversal.list_graphs(model):
        for value in graph.value_info:
            for proto in value.type.tensor_type.shape.dim:
                if proto.dim_param in texts:
                    _write(proto, texts[proto.dim_param])
    model_file.copy(path, target)
    target.write_bytes(model.SerializeToString())


def _order(own: Sequence[TensorSpec], given: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Put specifications in the order of the file's inputs.

    Raises:
        SignatureError: they are not those of all inputs, each once, with their dtypes and ranks.
    """
    by_name = {spec.name: spec for spec in given}
    kinds, own_kinds = (sorted((spec.name, spec.dtype, len(spec.shape)) for spec in specs) for specs in (given, own))
    if kinds != own_kinds:
        raise _refuse(own, given)
    return [by_name[spec.name] for spec in own]


def _match(
    own: Sequence[TensorSpec], given: Sequence[TensorSpec], values: "Mapping[str, onnx.ValueInfoProto]"
) -> tuple[dict[str, int | str], dict[str, int | str]]:
    """Map words of the file's signature, and names in the file, to the dimensions that are given for them.

    A word of dimensions that have no name in the file is left out where they get different ones.

    Raises:
        SignatureError: a fixed size is another one, or a name or a sum of the file does not fit.
    """
    words, texts, guessed = dict[str, set[int | str]](), dict[str, int | str](), set[str]()
    for mine, spec in zip(own, given, strict=True):
        dims = zip(mine.shape, spec.shape, values[spec.name].type.tensor_type.shape.dim, strict=True)
        for dim, new, proto in dims:
            if isinstance(dim, int):
                if new != dim:
                    raise _refuse(own, given, f"; the file fixes a size of {mine.name!r} at {dim}")
            elif not is_sum(dim):
                words.setdefault(dim, set()).add(new)
                if model_file.is_unnamed(proto):
                    guessed.add(dim)
                else:
                    texts[proto.dim_param] = new
    for word, names in words.items():
        if len(names) > 1 and word not in guessed:
            raise _refuse(own, given, f"; {word} is one size in the file, and gets {' and '.join(map(str, names))}")
    renamed = {word: names.pop() for word, names in words.items() if len(names) == 1}
    for mine, spec in zip(own, given, strict=True):
        for dim, new in zip(mine.shape, spec.shape, strict=True):
            if is_sum(dim) and _list_parts(new) != _list_parts(wanted := _substitute(dim, renamed)):
                raise _refuse(own, given, f"; {dim} of {mine.name!r} is then {wanted}")
    return renamed, texts


def _refuse(own: Sequence[TensorSpec], given: Sequence[TensorSpec], why: str = "") -> SignatureError:
    says, has = (", ".join(map(str, specs)) for specs in (given, own))
    return SignatureError(
        f"--input says {says}, and the file has {has}{why}",
        "omit --input, or give all inputs with the file's dtypes and fixed sizes, and a word or a size for each open "
        f"dimension, starting from {write_options(own)}",
    )


def _list_parts(dim: int | str) -> list[str]:
    return sorted(str(dim).split("+"))


def _list_moved(own: Sequence[TensorSpec], given: Sequence[TensorSpec]) -> set[str]:
    """List the words of the file's inputs that become the batch."""
    shapes = [(mine.shape, spec.shape) for mine, spec in zip(own, given, strict=True)]
    pairs = (pair for shape in shapes for pair in zip(*shape, strict=True))
    return {dim for dim, new in pairs if isinstance(dim, str) and new == BATCH != dim}


def _substitute(dim: int | str, words: Mapping[str, int | str]) -> int | str:
    """Replace the words of a dimension, those of a sum, too."""
    if isinstance(dim, int):
        return dim
    return join_sum("+".join(str(words.get(part, part)) for part in dim.split("+")).split("+"))


def _write(proto: "onnx.TensorShapeProto.Dimension", dim: int | str) -> None:
    if isinstance(dim, int):
        proto.dim_value = dim
    else:
        proto.dim_param = dim


_RECURRENT = ("LSTM", "GRU", "RNN")
"""Operators that take a dimension of each input for the batch, unless their attribute ``layout`` is 1."""
_BATCH_AXES = {0: 1, 4: 0, 5: 1, 6: 1}
"""Which one it is, by the place of the input: of the sequences, their lengths, and both states."""
_BY_ELEMENT = ("Identity", "Cast", "MatMul", "Add", "Mul", "Div", "Relu", "Tanh", "Sigmoid", "LayerNormalization")
"""Operators whose result has the first two dimensions of their first input, of three."""
_ORDINALS = ("first", "second", "third")
_EXACT = ("batch_size", "batchsize", "n", "bs")
"""Usual names of the batch besides ``batch`` itself."""
_BATCHES = ("batch", "batchsize", "minibatch", "nbatch", "bs", "bsz")
"""Words that mean the batch, where a name ends in one of them, perhaps before one of these:"""
_SIZES = ("size", "dim", "dimension", "axis", "num", "n")
_JOINING = ("times", "mul", "x", "by", "per", "in", "of", "and", "plus", "add")
"""Words before it in names of products, sums and shares, which are other sizes."""
_WORD = re.compile("[A-Z]?[a-z]+|[A-Z]+")


def find_batch(path: Path, known: Collection[str] = ()) -> tuple[tuple[TensorSpec, ...], tuple[str, ...]]:
    """Find inputs whose batch is not their first dimension: return them with it, and a note.

    It is a dimension that is named so, or the one that recurrent layers take for the batch. Nothing is returned where
    the first dimension is it, or where it is in ``known``: somebody calls it by its own name. First dimensions without
    a name are read as the batch unless something tells otherwise; a note alone is returned where that leaves open which
    one it is in another input.
    """
    model, signature = model_file.skeleton(path), model_file.signature(path)
    dims = [dim for value in model_file.list_inputs(model.graph) for dim in value.type.tensor_type.shape.dim]
    guessed = BATCH in signature.symbols and all(dim.dim_param != BATCH for dim in dims)
    first = batch_symbol(signature)
    if not guessed and (BATCH in signature.symbols or _names_batch(first or "")):
        return (), ()
    axes, kind = _find_recurrent(model.graph, signature)
    word, why = _choose_by_name(model, signature, first), "by its name"
    if not (word or axes or first):
        word, why = _choose_shared(signature), "as all inputs have it, and outputs begin with it"
    if word:
        axes = {spec.name: spec.shape.index(word) for spec in signature.inputs if word in spec.shape}
    elif axes:
        name, axis = next(iter(axes.items()))
        word = next(str(spec.shape[axis]) for spec in signature.inputs if spec.name == name)
        why = f"the {_ORDINALS[axis]} dimension of {name!r}, as {kind} has it there"
    specs = tuple(_place_batch(spec, position, word, axes) for position, spec in enumerate(signature.inputs))
    moved = _list_moved(signature.inputs, specs)
    follows = any(model_file.may_follow(model, signature, dim) for dim in moved)
    if word not in signature.symbols or (word == first and not guessed) or not moved.isdisjoint(known) or not follows:
        return (), ()
    unknown = [spec.name for spec in signature.inputs if guessed and BATCH in spec.shape and spec.name not in axes]
    options = write_options(signature.inputs)
    if unknown:
        note = f"the batch seems to be {word!r}, {why}, and nothing tells which dimension of {unknown[0]!r} it is"
        return (), (f"{note}: first dimensions are taken for it; if they are not it, call it {BATCH!r} in {options}",)
    otherwise = "the first dimension" if guessed else repr(first)
    otherwise = f"where {otherwise} is the batch" if first else "where there is none"
    note = f"the batch is taken to be {word!r}, {why}, and is called {BATCH!r}; {otherwise}, say so with {options}"
    return specs, (note,)


def _place_batch(spec: TensorSpec, position: int, word: str, axes: Mapping[str, int]) -> TensorSpec:
    """Call a word of an input the batch, and its dimension in ``axes``; another that was read as it is not, then."""
    shape = [_substitute(dim, {word: BATCH}) for dim in spec.shape]
    if spec.name in axes:
        axis = axes[spec.name]
        shape = [f"input_{position}_dim_{at}" if own == BATCH else shape[at] for at, own in enumerate(spec.shape)]
        shape[axis] = BATCH if isinstance(shape[axis], str) else shape[axis]
    return spec.model_copy(update={"shape": tuple(shape)})


def _names_batch(name: str) -> bool:
    """Tell whether the words of a name say that it is the batch: ``my_batch_size`` does, ``batch_times_heads`` not."""
    words = [word.lower() for word in _WORD.findall(name)]
    while words and words[-1] in _SIZES:
        words.pop()
    return bool(words) and words[-1] in _BATCHES and set(words[1:-1]).isdisjoint(_JOINING)


def _choose_by_name(model: "onnx.ModelProto", signature: Signature, first: str | None) -> str:
    """Choose the word that is named as the batch, that most inputs have, and outputs follow; empty for none.

    Without a ``first`` dimension that may be it, all inputs must have it.
    """
    shaped = [spec for spec in signature.inputs if spec.shape]
    names = {word: sum(word in spec.symbols for spec in shaped) for word in signature.symbols if _names_batch(word)}
    usual = bool(first) and first != BATCH and str(first).lower() in _EXACT
    chosen = [
        word
        for word, count in names.items()
        if word not in (BATCH, first)
        and (first or count == len(shaped))
        and (not usual or word.lower() in _EXACT)
        and model_file.may_follow(model, signature, word)
    ]
    return max(chosen, key=lambda word: (names[word], word.lower() in _EXACT), default="")


def _choose_shared(signature: Signature) -> str:
    """Choose the only word that all inputs have, once, some input begins with, and some output; empty for none."""
    sides = [[spec.shape for spec in specs if spec.shape] for specs in (signature.inputs, signature.outputs)]
    chosen = [
        word
        for word in signature.symbols
        if all(shape.count(word) == 1 for shape in sides[0])
        and all(any(shape[0] == word for shape in side) for side in sides)
    ]
    return chosen[0] if len(chosen) == 1 else ""


def _find_recurrent(graph: "onnx.GraphProto", signature: Signature) -> tuple[dict[str, int], str]:
    """Find the dimension of inputs that recurrent layers take for the batch, and name the operator of the first."""
    values = {spec.name: (spec.name, [*range(len(spec.shape))]) for spec in signature.inputs}
    axes, kind = dict[str, int](), ""
    for node in graph.node:
        attributes = {each.name: each for each in node.attribute}
        name, dims = values.get(node.input[0] if node.input else "", ("", []))
        if node.op_type in _BY_ELEMENT and len(dims) == 3:
            values[node.output[0]] = name, dims
        elif node.op_type == "Transpose" and dims and "perm" in attributes:
            values[node.output[0]] = name, [dims[at] for at in attributes["perm"].ints]
        elif node.op_type in _RECURRENT and not ("layout" in attributes and attributes["layout"].i):
            for place, axis in _BATCH_AXES.items():
                name, dims = values.get(node.input[place] if place < len(node.input) else "", ("", []))
                if len(dims) > axis:
                    axes.setdefault(name, dims[axis])
                    kind = kind or node.op_type
    return axes, kind


def name_outputs(path: Path, sizes: Mapping[str, int], draw: Callable[[Mapping[str, int]], Feeds]) -> tuple[str, ...]:
    """Write the word into a dimension of an output whose size it follows, where the file has no word of the inputs.

    The model is run for that at ``sizes``, and with each of them halved (1 doubled). Returns notes: what is not known,
    and why.
    """
    model, signature = model_file.read(path), model_file.signature(path)
    if all({*spec.symbols} <= sizes.keys() for spec in signature.outputs):
        return ()
    runs = [{**sizes, **changed} for changed in ({}, *({word: size // 2 or 2} for word, size in sizes.items()))]
    try:
        answers = [evaluator.run_graph(path, draw(each)) for each in runs]
    except (ModelError, MissingCapability) as error:
        why = error.message
        if isinstance(error, ModelError):
            why = f"the model refuses samples drawn at {format_sizes(sizes)}, or half of one; --shape gives other sizes"
        unknown = "which dimensions of outputs follow those of --input is not known, and the first is read as the batch"
        return (f"{unknown}: {why}",)
    followed = {tuple(each[word] for each in runs): word for word in sizes}
    for spec, value, *arrays in zip(signature.outputs, model.graph.output, *answers, strict=True):
        for axis, proto in enumerate(value.type.tensor_type.shape.dim):
            measured = tuple(array.shape[axis] if array.ndim > axis else -1 for array in arrays)
            if not {*list_words(spec.shape[axis])} <= sizes.keys() and measured in followed:
                _write(proto, followed[measured])
    path.write_bytes(model.SerializeToString())
    return ()


@dataclass(frozen=True)
class _Run:
    """Answers of a model at the usual sizes, or with some of them changed."""

    sizes: Mapping[str, int]
    answers: Sequence[Array]


def correct_outputs(
    path: Path, sizes: Mapping[str, int], draw: Callable[[Mapping[str, int], int], Feeds]
) -> tuple[str, ...]:
    """Write the shapes that a file answers in place of declared ones that contradict them; return a note for each.

    The model is run for that on two draws, at ``sizes`` and with all of them changed, and, if it answers anything else
    than declared, with each of them changed; not at all if inference gives what is declared, or numpy lacks a dtype.
    Of a size that depends on values, nothing that a run gives is written: it stays as declared where all runs answer
    that, and else is left open. ``draw`` takes sizes and a seed.

    Raises:
        InvalidGraph: inference contradicts what is declared, and the model cannot be run.
        SignatureError: an input or output is no tensor of a supported dtype and known rank.
    """
    model, signature = model_file.read(path), model_file.signature(path)
    inferred = model_file.infer_outputs(model_file.skeleton(path))
    unproven = _list_unproven(model, inferred)
    if not unproven:
        return ()
    counted = choices.find_counted(model.graph)
    words = dict.fromkeys(word for spec in signature.inputs for word in spec.symbols)
    try:
        runs = _measure(path, signature, {word: sizes[word] for word in words}, draw)
    except (ModelError, MissingCapability) as error:
        if wrong := next((name for name, contradicted in unproven.items() if contradicted), ""):
            raise InvalidGraph(
                f"types or shapes in {path.name} contradict each other: the output {wrong!r} is declared with another "
                f"shape than its node gives, and the model cannot be run to see its shape: {error.message}",
                "export it again",
            ) from error
        return ()
    changed = list[int]()
    for at, value in enumerate(model.graph.output):
        if value.name not in unproven:
            continue
        before, follows = value.SerializeToString(), value.name not in counted
        shapes = [run.answers[at].shape for run in runs]
        if len({len(shape) for shape in shapes}) == 1 and any(_contradicts(value, shape) for shape in shapes):
            _write_measured(value, shapes, [run.sizes for run in runs], follows=follows)
        if value.SerializeToString() != before:
            changed.append(at)
    if not changed:
        return ()
    path.write_bytes(model.SerializeToString())
    outputs = model_file.signature(path).outputs
    return tuple(_describe(signature.outputs[at], outputs[at], words) for at in changed)


def find_shapes(
    path: Path,
    signature: Signature,
    sizes: Mapping[str, int],
    draw: Callable[[Mapping[str, int], int], Feeds],
) -> None:
    """Write the shapes that a file answers for outputs that have none; arguments as for :func:`correct_outputs`.

    Raises:
        InvalidGraph: the model cannot be run, or answers another rank each time.
    """
    model = model_file.read(path)
    counted = choices.find_counted(model.graph)
    lacking = {at: value for at, value in enumerate(model.graph.output) if model_file.lacks_shape(value)}
    why = "its rank differs from run to run"
    try:
        runs = _measure(path, signature, {word: sizes[word] for word in signature.symbols}, draw)
    except (ModelError, MissingCapability) as error:
        runs, why = [], f"the model cannot be run to see it: {error.message}"
    for at, value in lacking.items():
        shapes = [run.answers[at].shape for run in runs]
        if len({len(shape) for shape in shapes}) != 1:
            raise InvalidGraph(
                f"the output {value.name!r} has no shape in the file, and {why}", "write its shape into the file"
            )
        value.type.tensor_type.shape.SetInParent()
        _write_measured(value, shapes, [run.sizes for run in runs], follows=value.name not in counted)
    path.write_bytes(model.SerializeToString())


def _describe(old: TensorSpec, new: TensorSpec, words: Collection[str]) -> str:
    declared = f"the file declares the output {old}"
    if {*new.symbols} - {*old.symbols, *words}:
        return f"{declared}, of which a size may differ from call to call, and is left open: {new}"
    return f"{declared}, and answers {new}, which is taken instead"


def _list_unproven(model: "onnx.ModelProto", inferred: Mapping[str, tuple[int | None, ...]]) -> dict[str, bool]:
    """List the outputs whose declared shapes shape inference does not give, and True where it gives another one."""
    unproven = dict[str, bool]()
    for value in model.graph.output:
        declared, given = value.type.tensor_type.shape.dim, inferred.get(value.name)
        pairs = [
            (dim.dim_value, size) for dim, size in zip(declared, given or (), strict=False) if model_file.is_fixed(dim)
        ]
        if given is None or any(size is None for _, size in pairs):
            unproven[value.name] = False
        if given is not None and (
            len(given) != len(declared) or any(size is not None and size != fixed for fixed, size in pairs)
        ):
            unproven[value.name] = True
    return unproven


def _measure(
    path: Path, signature: Signature, sizes: Mapping[str, int], draw: Callable[[Mapping[str, int], int], Feeds]
) -> list[_Run]:
    """Run a model at sizes, and on another draw with all of them changed: halved, or 1 doubled.

    Where it answers other sizes than declared, or refuses the changed ones, the second run gives way to one on another
    draw and one for each changed size; those that it refuses are left out.

    Raises:
        ModelError: it refuses the first ones, or numpy lacks a dtype of it.
        MissingCapability: ONNX Runtime is not installed.
    """
    if lacking := next((s for s in (*signature.inputs, *signature.outputs) if s.dtype not in DTYPES), None):
        raise ModelError(f"numpy has no {lacking.dtype}, which {lacking.name!r} has")
    run, values = evaluator.open_graph(path), model_file.skeleton(path).graph.output
    changed = {word: size // 2 or 2 for word, size in sizes.items()}
    runs = [_Run(sizes, run(draw(sizes, 0))), *_try(run, draw, changed, 1)]
    answers = [(value, array.shape) for each in runs for value, array in zip(values, each.answers, strict=True)]
    if len(runs) > 1 and not any(_contradicts(*answer) for answer in answers):
        return runs
    singles = [_try(run, draw, {**sizes, word: size}, 0) for word, size in changed.items()]
    return [runs[0], *_try(run, draw, sizes, 1), *itertools.chain.from_iterable(singles)]


def _try(
    run: evaluator.RunGraph, draw: Callable[[Mapping[str, int], int], Feeds], sizes: Mapping[str, int], seed: int
) -> list[_Run]:
    with contextlib.suppress(ModelError):
        return [_Run(sizes, run(draw(sizes, seed)))]
    return []


def _contradicts(value: "onnx.ValueInfoProto", shape: Sequence[int]) -> bool:
    dims = value.type.tensor_type.shape.dim
    return len(dims) != len(shape) or any(
        model_file.is_fixed(dim) and dim.dim_value != size for dim, size in zip(dims, shape, strict=True)
    )


def _write_measured(
    value: "onnx.ValueInfoProto",
    shapes: Sequence[tuple[int, ...]],
    sizes: Sequence[Mapping[str, int]],
    *,
    follows: bool,
) -> None:
    """Write the shape that an output had at sizes of the inputs: words that it follows, and what stays the same.

    What fits of the declared shape is kept. A size stays only if every size of the inputs was changed, and the draw:
    else it is open, and so is 0, which comes of numbers. Of one that does not ``follow`` sizes, no more than the rank
    is written.
    """
    columns = list(zip(*shapes, strict=True))
    words = {tuple(each[word] for each in sizes): word for word in sizes[0]}
    dims = value.type.tensor_type.shape.dim
    if len(dims) != len(columns):  # as many open ones take their place
        del dims[:]
        dims.extend(type(value.type.tensor_type.shape).Dimension() for _ in columns)
    for dim, column in zip(dims, columns, strict=True):
        if dim.dim_param or (model_file.is_fixed(dim) and {*column} == {dim.dim_value}):
            continue
        dim.Clear()
        if follows and len({*column}) > 1 and column in words:
            _write(dim, words[column])
        elif follows and len({*column}) == 1 and column[0] and len(sizes) == len(sizes[0]) + 2:
            _write(dim, column[0])
