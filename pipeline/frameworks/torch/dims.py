"""Find out by running a model which dimensions may vary, and which output dimension follows which input."""

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from enginesmith.pipeline.errors import SourceError
from enginesmith.pipeline.frameworks import processing
from enginesmith.pipeline.frameworks.processing import ProcessingRequest
from enginesmith.pipeline.frameworks.samples import batch_symbol
from enginesmith.pipeline.tensors import (
    BATCH,
    DTYPES,
    Signature,
    TensorSpec,
    compute_size,
    is_sum,
    join_sum,
    read_sizes,
)

_MOST_AXES, _MOST_TRIED = 3, 24
"""Dimensions of an input that may be the batch, and sets of them that are tried."""
_LONG = 16
"""From this size on a shorter one is tried first, as it runs faster."""
_ROWS = "rows"
"""Name of the first dimension of inputs whose rows are no samples."""
_SIDE = "side"
"""Name of two dimensions that have to be equal."""

Forward = Callable[..., tuple[Tensor, ...]]
Shapes = list[tuple[int, ...]]
AnswerShapes = Callable[[Mapping[str, int]], Shapes | None]
"""Runs a module on its example at other sizes; None where it does not take them."""


def default_specs(example: Mapping[str, Tensor]) -> tuple[TensorSpec, ...]:
    """Derive the inputs from the example: the first dimension is the batch, if all that are arrays agree on it."""
    batched = len({value.shape[0] for value in example.values() if value.ndim}) == 1
    lead = (BATCH,) if batched else ()
    shapes = {name: (*lead, *value.shape[len(lead) :]) if value.ndim else () for name, value in example.items()}
    dtypes = input_dtypes(example)
    return tuple(TensorSpec(name=name, dtype=dtypes[name], shape=shapes[name]) for name in example)


def choose_specs(module: Forward, example: Mapping[str, Tensor], outputs: int) -> tuple[tuple[TensorSpec, ...], str]:
    """Choose the batch of each input: the first dimension, unless samples are kept apart along others; with a note.

    ``outputs`` is the number of tensors that the module returns.

    Of a network that takes time first, it is the second one; of the states of an LSTM, too. Where that holds of several
    dimensions, as in a network that computes each pixel alone, it is none of them. Single numbers have no batch, and
    inputs of fewer dimensions or of another first size than others may have none, as tables.
    """
    first = default_specs(example)
    batched = any(BATCH in spec.shape for spec in first)
    if not first or (batched and _keeps_rows_apart(module, first, example, outputs, pairs=True) is not False):
        return first, ""  # also where nothing is known, as each other sample was refused
    most = max(value.ndim for value in example.values())
    deepest = {name for name, value in example.items() if value.ndim == most}
    if tabled := _set_tables_apart(module, first, example, outputs, deepest):
        return tabled
    candidates = []
    for axes in itertools.islice(_list_axes(example), _MOST_TRIED):
        specs = tuple(
            spec.model_copy(update={"shape": (*value.shape[:axis], BATCH, *value.shape[axis + 1 :])})
            if value.ndim
            else spec
            for spec, value, axis in zip(first, example.values(), axes, strict=True)
        )
        if any(axes) and _keeps_rows_apart(module, specs, example, outputs):
            candidates.append(specs)
    if not candidates:
        for size in dict.fromkeys(value.shape[0] for value in example.values() if value.ndim):
            alike = {name for name, value in example.items() if value.ndim and value.shape[0] == size}
            if tabled := _set_tables_apart(module, first, example, outputs, alike):
                return tabled
    if len(candidates) != 1:
        return first, ""
    flags = " ".join(f"--input {spec}" for spec in candidates[0])
    return candidates[0], f"the batch is the dimension along which samples do not change each other's answers: {flags}"


def _set_tables_apart(
    module: Forward,
    specs: Sequence[TensorSpec],
    example: Mapping[str, Tensor],
    outputs: int,
    rows: Collection[str],
) -> tuple[tuple[TensorSpec, ...], str] | None:
    """Give a batch to the inputs named in ``rows`` alone, with a note; None if the model does not keep these apart."""
    lengths = {value.shape[0] for name, value in example.items() if name in rows and value.ndim}
    shapes = {name: tuple(value.shape) for name, value in example.items()}
    own = tuple(
        spec.model_copy(update={"shape": (BATCH, *shape[1:]) if shape and spec.name in rows else shape})
        for spec, shape in zip(specs, shapes.values(), strict=True)
    )
    if len(lengths) != 1 or all(BATCH in spec.shape for spec in own):
        return None
    if not _keeps_rows_apart(module, own, example, outputs):
        return None
    tables = ", ".join(repr(spec.name) for spec in own if spec.shape and BATCH not in spec.shape)
    return own, tables and f"the same for all samples, without a batch: {tables}"


def _list_axes(example: Mapping[str, Tensor]) -> Iterator[tuple[int, ...]]:
    """List a dimension of each input, all of one size; where there are many sets, those that are the last in most."""
    shapes = [value.shape[:_MOST_AXES] for value in example.values()]
    for size in sorted(set.intersection(*([set(shape) for shape in shapes if shape] or [set[int]()]))):
        places = [[axis for axis, other in enumerate(shape) if other == size] or [0] for shape in shapes]
        if size:
            yield from itertools.product(*(reversed(axes) for axes in places))


def _keeps_rows_apart(
    module: Forward, specs: Sequence[TensorSpec], example: Mapping[str, Tensor], outputs: int, *, pairs: bool = False
) -> bool | None:
    """Tell whether two samples are answered together as each of them is alone, by every output.

    The answers are one after the other; with ``pairs``, there may be one for each pair of samples, as on a diagonal.
    None if the module takes such sizes, and refuses the values of every other sample that was made up.
    """
    if not all(value.numel() for value in example.values()):
        return False
    axes, values = _list_batch_axes(specs), [*example.values()]
    first = _pick_row(values, axes, 0)
    alone = _answer(module, first)
    if alone is None:
        return False
    others = [
        [value if axis is None else _change(row, value) for row, value, axis in zip(first, values, axes, strict=True)],
        _pick_row(values, axes, 1),
        [row if axis is None else _roll(row) for row, axis in zip(first, axes, strict=True)],
    ]
    for other in others:
        if not all(map(torch.equal, first, other)) and (alone_too := _answer(module, other)) is not None:
            together = _answer(module, _join_rows(first, other, axes))
            return together is not None and _are_rows_alike(together, (alone, alone_too), outputs, pairs)
    return None if _answer(module, _join_rows(first, first, axes)) else False


def _list_batch_axes(specs: Iterable[TensorSpec]) -> list[int | None]:
    """List the axis of each input's batch; None for what all samples share."""
    return [spec.batch_axis if BATCH in spec.shape else None for spec in specs]


def _pick_row(values: Sequence[Tensor], axes: Sequence[int | None], row: int) -> list[Tensor]:
    """Pick one of the example's samples, or the first where there is only one."""
    return [
        value if axis is None else value.narrow(axis, min(row, value.shape[axis] - 1), 1)
        for value, axis in zip(values, axes, strict=True)
    ]


def _join_rows(first: Sequence[Tensor], other: Sequence[Tensor], axes: Sequence[int | None]) -> list[Tensor]:
    parts = zip(first, other, axes, strict=True)
    return [one if axis is None else torch.cat([one, two], axis) for one, two, axis in parts]


def _answer(module: Forward, feeds: Iterable[Tensor]) -> tuple[Tensor, ...] | None:
    """Run the module; None where it refuses these sizes or values, whatever it raises."""
    with contextlib.suppress(Exception), torch.inference_mode():
        return module(*feeds)
    return None


def _are_rows_alike(
    together: tuple[Tensor, ...], alone: Sequence[tuple[Tensor, ...]], outputs: int, pairs: bool
) -> bool:
    """Tell whether each of these answers has those of two samples alone, along one dimension or, for pairs, two."""
    with contextlib.suppress(Exception):  # other numbers of outputs, or of their dimensions; dtypes without a distance
        for rows, *single in zip(together, *alone, strict=True):
            shape = single[0].shape
            grown = [dim for dim, (size, least) in enumerate(zip(rows.shape, shape, strict=True)) if size != least]
            if not 1 <= len(grown) <= 1 + pairs or any(rows.shape[dim] != 2 * shape[dim] for dim in grown):
                return False
            apart = rows, rows
            for dim in grown:
                apart = apart[0].narrow(dim, 0, shape[dim]), apart[1].narrow(dim, shape[dim], shape[dim])
            comparable = not rows.is_floating_point() or bool(rows.isfinite().any())
            if not (comparable and same_answers(apart, tuple(single))):
                return False
        return len(together) == outputs
    return False


def _change(sample: Tensor, given: Tensor) -> Tensor:
    """Make another sample like this one: noise is added to numbers, and whole numbers change places, or by one.

    Numbers are reflected where they leave the range of what was ``given``, unless that is a single number: a module may
    check that points lie inside an image, say.
    """
    if sample.is_floating_point():
        spread = given.float().std(correction=0)  # NaN where there is any, or infinity
        noise = torch.randn(sample.shape, generator=torch.Generator().manual_seed(0))
        changed = sample + (noise * torch.where(spread > 0, spread, 1.0)).to(sample.dtype)
        if not spread > 0:
            return changed
        low, high = given.aminmax()
        return (low + (high - (high - changed).abs() - low).abs()).clamp(low, high)
    rolled = _roll(sample)
    if not torch.equal(rolled, sample):
        return rolled
    return ~sample if sample.dtype == torch.bool else torch.where(sample > 0, sample - 1, sample + 1)


def _roll(sample: Tensor) -> Tensor:
    """Move a sample's numbers by one place along its longest dimension."""
    return sample.roll(1, max(range(sample.ndim), key=lambda dim: sample.shape[dim])) if sample.ndim else sample


def resize_example(
    specs: Iterable[TensorSpec], example: Mapping[str, Tensor], sizes: Mapping[str, int]
) -> dict[str, Tensor]:
    """Cut or repeat an example to other sizes of its dynamic dimensions, in the order of the inputs."""
    resized = {}
    for spec in specs:
        value = example[spec.name]
        for axis, size in enumerate(spec.resolve(sizes)):
            if value.shape[axis] != size:
                value = value.index_select(axis, torch.arange(size, device=value.device) % value.shape[axis])
        resized[spec.name] = value
    return resized


def input_dtypes(example: Mapping[str, Tensor]) -> dict[str, str]:
    """Return numpy's names of the inputs' dtypes.

    Raises:
        SourceError: inputs cannot have one of these dtypes.
    """
    return {name: _dtype_name("input", name, value) for name, value in example.items()}


_REMEDIES = {
    "input": "give it in float32, and cast it to {} inside the model",
    "output": "cast it to float32 inside the model",
    "complex input": "give torch.view_as_real of it, and call torch.view_as_complex inside the model",
    "complex output": "return torch.view_as_real of it",
}


def _dtype_name(side: str, name: str, tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        remedy = _REMEDIES[f"complex {side}" if tensor.is_complex() else side].format(dtype)
        raise SourceError(f"the {side} {name!r} is {dtype}, which inputs and outputs cannot be", remedy)
    return dtype


def infer_dims(
    module: Forward,
    specs: tuple[TensorSpec, ...],
    example: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
    specs_given: bool,
) -> tuple[Signature, list[str]]:
    """Infer the signature by running again with each dynamic dimension changed; return it, and notes for people.

    ``outputs`` are those for ``example``. Sizes that are others for other values are dynamic, too. A batch that nobody
    asked for (``specs_given`` is false) becomes fixed, with a note, where the model takes or answers one sample alone;
    and gets another name where no output follows it.

    Raises:
        SourceError: a dimension that was asked to be dynamic cannot vary, or not alone; or outputs cannot have one of
            their dtypes.
    """
    dims: dict[str, list[int | str]] = {name: list(value.shape) for name, value in outputs.items()}
    notes: list[str] = []
    chosen, followed = _list_chosen_by_values(module, example, outputs), set[str]()
    for name, axis in chosen:
        dims[name][axis] = f"{name}_dim_{axis}"
    answer = functools.partial(_answer_shapes, module, specs, example)
    sizes, others, rarely = read_sizes(specs, example), dict[str, int](), list[str]()
    grown: dict[tuple[str, int], dict[str, bool]] = {}
    for symbol, size in sizes.items():
        other, shapes = _try_other_size(answer, symbol, sizes)
        rarely += [symbol] if symbol != BATCH and other in (size, size + 1) and size >= _LONG else []
        alone = (
            not specs_given and symbol == BATCH and size == 1 and _answers_first_alone(module, specs, example, outputs)
        )
        if shapes is not None and not alone:
            if [len(shape) for shape in shapes] != [value.ndim for value in outputs.values()]:
                raise SourceError(
                    f"the outputs have other ranks at {symbol} = {other} than at {symbol} = {size}",
                    f"squeeze() drops every dimension of size 1: name the one, or give an example with {symbol} = 2",
                )
            others[symbol] = other
            for (name, value), shape in zip(outputs.items(), shapes, strict=True):
                for axis, (before, after) in enumerate(zip(value.shape, shape, strict=True)):
                    if before != after:
                        followed.add(symbol)
                        grown.setdefault((name, axis), {})[symbol] = after - before == other - size
        elif specs_given:
            _check_equal_words(answer, specs, sizes.keys() - {BATCH}, sizes)
            raise SourceError(
                f"the model runs with {symbol} = {size}, and with no other size that was tried",
                f"write the number {size} instead of {symbol!r} in --input, or fix the model",
            )
        else:
            fixed = [tuple(size if dim == symbol else dim for dim in spec.shape) for spec in specs]
            specs = tuple(spec.model_copy(update={"shape": shape}) for spec, shape in zip(specs, fixed, strict=True))
            behavior = "answers the first sample alone" if alone else f"runs with a batch of {size} only"
            notes.append(f"the model {behavior}, so the dimension is fixed")
    _check_equal_words(answer, specs, rarely, sizes)
    sums = {
        (name, axis): _write_sum(words, outputs[name].shape[axis] - sum(sizes[word] for word in words), specs)
        for (name, axis), words in grown.items()
        if all(words.values()) and (name, axis) not in chosen
    }
    if any(map(is_sum, sums.values())):
        sums = _confirm_sums(sums, answer, list(outputs), sizes, others)
    for name, axis in grown:
        dims[name][axis] = sums.get((name, axis)) or f"{name}_dim_{axis}"
    results = (
        TensorSpec(name=name, dtype=_dtype_name("output", name, value), shape=tuple(dims[name]))
        for name, value in outputs.items()
    )
    signature = Signature(inputs=specs, outputs=tuple(results))
    batch = batch_symbol(signature)
    if batch is None or batch in followed or chosen:
        return signature, notes
    if not specs_given:
        batch, specs = _ROWS, tuple(_rename_dim(spec, batch, _ROWS) for spec in specs)
    described = ", ".join(map(str, specs))
    notes.append(f"no output follows {batch!r} in {described}: it is no batch, and a call counts as one sample")
    return signature.model_copy(update={"inputs": specs, "batched": False}), notes


def _write_sum(words: Iterable[str], rest: int, specs: Sequence[TensorSpec]) -> str:
    """Write the sum of these words and what is left, in the order that inputs have it in; empty if less is left."""
    total = str(join_sum([*words, str(rest)])) if rest >= 0 else ""
    alike = (dim for spec in specs for dim in spec.shape if is_sum(dim))
    return next((str(dim) for dim in alike if sorted(str(dim).split("+")) == sorted(total.split("+"))), total)


def _confirm_sums(
    sums: Mapping[tuple[str, int], str],
    answer: AnswerShapes,
    names: Sequence[str],
    sizes: Mapping[str, int],
    others: Mapping[str, int],
) -> dict[tuple[str, int], str]:
    """Return what holds of dimensions of outputs, by name and axis, at a third size of each word, all together."""
    third = {word: other + 1 if other > sizes[word] else (sizes[word] + other) // 2 for word, other in others.items()}
    sizes = {**sizes, **third}
    answered = answer(sizes)
    alike = answered is not None and len(answered) == len(names)
    shapes = dict(zip(names, answered or (), strict=True)) if alike else {}
    return {
        (name, axis): dim
        for (name, axis), dim in sums.items()
        if not is_sum(dim) or shapes.get(name, ())[axis : axis + 1] == (compute_size(dim, sizes),)
    }


def _rename_dim(spec: TensorSpec, name: str, new: str) -> TensorSpec:
    return spec.model_copy(update={"shape": tuple(new if dim == name else dim for dim in spec.shape)})


def _answers_first_alone(
    module: Forward, specs: tuple[TensorSpec, ...], example: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> bool:
    """Tell whether another sample behind that of the example changes nothing: detectors of one image take ``x[0]``."""
    axes, values = _list_batch_axes(specs), [*example.values()]
    for other in _list_others(values):
        answers = _answer(module, _join_rows(values, other, axes))
        if answers is not None:
            with contextlib.suppress(Exception):  # as with the rows of two samples
                return same_answers(tuple(outputs.values()), answers)
            return False
    return False


def _list_others(values: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Make other examples like this one, the first by noise, and one of values that it has, which more modules take."""
    yield [_change(value, value) if value.numel() else value for value in values]
    rolled = [_roll(value) if value.numel() else value for value in values]
    if not all(map(torch.equal, values, rolled)):
        yield rolled


def _list_chosen_by_values(
    module: Forward, example: Mapping[str, Tensor], outputs: Mapping[str, Tensor]
) -> list[tuple[str, int]]:
    """List the outputs' dimensions that have other sizes for other values of the inputs: boxes that are found, say."""
    answers = next(filter(None, (_answer(module, other) for other in _list_others([*example.values()]))), ())
    return [
        (name, axis)
        for (name, value), other in zip(outputs.items(), answers if len(answers) == len(outputs) else (), strict=False)
        for axis in range(value.ndim)
        if value.ndim == other.ndim and value.shape[axis] != other.shape[axis]
    ]


def _try_other_size(answer: AnswerShapes, symbol: str, sizes: Mapping[str, int]) -> tuple[int, Shapes | None]:
    """Find another size of a word that the model runs with, and the shapes it gives; None where there is none."""
    size = sizes[symbol]
    others = (size + 1, max(1, size // 2), size * 2) if size < _LONG else (size // 2, size + 1, size * 2)
    for other in others:
        shapes = answer({**sizes, symbol: other}) if other != size else None
        if shapes is not None:
            return other, shapes
    return size, None


def _check_equal_words(
    answer: AnswerShapes, specs: Sequence[TensorSpec], words: Collection[str], sizes: Mapping[str, int]
) -> None:
    """Check that no two of these words have to be equal, as height and width of a model that takes squares.

    A difference of one may be rounded away, so that a size that is one more tells nothing.

    Raises:
        SourceError: the model runs with half or twice the size of two words, and with neither of only one of them.
    """
    pairs = [pair for pair in itertools.combinations(sizes, 2) if sizes[pair[0]] == sizes[pair[1]]]
    for first, second in (pair for pair in pairs if set(pair) <= set(words)):
        size = sizes[first]
        for other in (size // 2, 2 * size):
            both, alone = {**sizes, first: other, second: other}, {**sizes, first: other}
            if answer(both) and not answer(alone):
                one = (_rename_dim(_rename_dim(spec, first, _SIDE), second, _SIDE) for spec in specs)
                raise SourceError(
                    f"the model runs with {first} = {second} = {other}, and not with {first} = {other} and "
                    f"{second} = {size}",
                    f"give both one name: {' '.join(f'--input {spec}' for spec in one)}",
                )


def _answer_shapes(
    module: Forward, specs: Sequence[TensorSpec], example: Mapping[str, Tensor], sizes: Mapping[str, int]
) -> Shapes | None:
    """Run the module on the example at other sizes; return the shapes of its outputs, None where it does not run."""
    with contextlib.suppress(Exception), torch.inference_mode():  # whatever it raises, it does not take such sizes
        return [tuple(value.shape) for value in module(*resize_example(specs, example, sizes).values())]
    return None


def suggest_dynamic_sizes(
    module: Forward, signature: Signature, example: Mapping[str, Tensor], request: ProcessingRequest
) -> Iterator[str]:
    """Suggest ``--input`` for a model of which only the batch is dynamic, where it runs at half of another size, too.

    Dimensions of one size are halved together, as those of a text and its mask; height and width of an image have
    names of their own where it need not be square. With ``--prepend``, the raw input is described; what is resized has
    one size in the model.
    """
    specs = signature.inputs
    if len(signature.symbols) != 1 or any(isinstance(dim, str) for spec in specs for dim in spec.shape[1:]):
        return
    resized = specs[processing.choose_input(specs, request)].name if "resize" in request.before else None
    names: dict[tuple[str, int], str] = {}
    for size in dict.fromkeys(dim for spec in specs for dim in spec.shape[1:] if isinstance(dim, int) and dim > 1):
        places = [(spec.name, axis, dim) for spec in specs for axis, dim in enumerate(spec.shape) if axis]
        axes = [(name, axis) for name, axis, dim in places if dim == size and name != resized]
        if not axes or not _runs_halved(module, example, axes):
            continue
        word = f"{axes[0][0]}_length" if "length" in names.values() else "length"
        if any(name == axes[0][0] for name, _ in names):
            word = f"length_{len({*names.values()}) + 1}"
        least = min(axis for _, axis in axes)
        square = {axis for _, axis in axes} == {least, least + 1} and len({name for name, _ in axes}) < len(axes)
        rows = [(name, axis) for name, axis in axes if axis == least]
        if square and _runs_halved(module, example, rows):
            prefix = f"{axes[0][0]}_" if "height" in names.values() else ""
            names |= {(name, axis): f"{prefix}{('height', 'width')[axis - least]}" for name, axis in axes}
        else:
            names |= dict.fromkeys(axes, word)
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


def _runs_halved(module: Forward, example: Mapping[str, Tensor], axes: Sequence[tuple[str, int]]) -> bool:
    """Tell whether the model runs with half of these dimensions, each an input's name and an axis."""
    feeds = dict(example)
    for name, axis in axes:
        feeds[name] = feeds[name].narrow(axis, 0, feeds[name].shape[axis] // 2)
    with contextlib.suppress(Exception), torch.inference_mode():
        module(*feeds.values())
        return True
    return False


def explain_no_batch(module: Forward, signature: Signature, example: Mapping[str, Tensor]) -> Iterator[str]:
    """Explain that inputs of different lengths have no batch; suggest ``--input`` for sizes that may be others.

    Dimensions of one size are open together, if the model runs with another one: half of it, or one more, where whole
    numbers of other inputs are places along it. The numbers and offsets of an EmbeddingBag are such, and the nodes and
    edges of a graph.
    """
    lengths = {name: value.shape[0] for name, value in example.items() if value.ndim}
    if signature.symbols or len(set(lengths.values())) < 2:
        return
    known = ", ".join(f"{name} {length}" for name, length in lengths.items())
    note = f"the inputs have no batch, as their first sizes differ ({known}): all are fixed, and a call counts as one"
    rest = (size for value in example.values() for size in value.shape[1:])
    sizes = [size for size in dict.fromkeys((*lengths.values(), *rest)) if size > 1]

    def name(words: Mapping[int, str]) -> list[TensorSpec]:
        dims = {spec.name: [words.get(size, size) for size in example[spec.name].shape] for spec in signature.inputs}
        return [spec.model_copy(update={"shape": tuple(dims[spec.name])}) for spec in signature.inputs]

    def answer(others: Mapping[int, int]) -> tuple[Tensor, ...] | None:
        words = {size: f"length_{size}" for size in others}
        resized = resize_example(name(words), example, {words[size]: other for size, other in others.items()})
        with contextlib.suppress(Exception), torch.inference_mode():
            return module(*resized.values())
        return None

    def is_open(size: int) -> bool:
        if answer({size: size // 2}) is not None:
            return True
        longer = answer({size: size + 1})  # the same answer is of a model that looks at none but the first ones
        return longer is not None and not same_answers(longer, answer({}) or ())

    open_sizes = [size for size in sizes if is_open(size)]
    halved = bool(open_sizes) and answer({size: size // 2 for size in open_sizes}) is not None
    longer = bool(open_sizes) and answer({size: size + 1 for size in open_sizes}) is not None
    if halved or longer:
        words = {size: f"length_{index}" for index, size in enumerate(open_sizes, 1)}
        which = ", of which the example has the largest" if halved else ""
        options = [f"--input {spec}" for spec in name(words)]
        options += [] if halved else [f"--shape {word}={size}:{size}:MAX" for size, word in words.items()]
        note += f"; for others{which}: {' '.join(options)}"
    yield note


def same_answers(before: tuple[Tensor, ...], after: tuple[Tensor, ...]) -> bool:
    """Compare arrays but for the last bits, which threads may add up in another order."""
    for tensor, other in zip(before, after, strict=True):
        if tensor.shape != other.shape:
            return False
        finite = tensor[tensor.isfinite()] if tensor.is_floating_point() else tensor.flatten()[:0]
        noise = 1e-5 * float(finite.abs().max()) if finite.numel() else 0.0
        if not (torch.equal(tensor, other) or torch.allclose(tensor, other, rtol=1e-4, atol=noise, equal_nan=True)):
            return False
    return True
