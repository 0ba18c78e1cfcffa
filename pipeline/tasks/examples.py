"""Choose sizes, an example and the samples that tell most, and find out about a model by running it on feeds."""

import contextlib
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import numpy as np

from enginesmith.calibration.dataset import Dataset, Drawing
from enginesmith.pipeline.artifact import Artifact
from enginesmith.pipeline.engines.base import Engine, Session
from enginesmith.pipeline.errors import EnginesmithError, ModelError
from enginesmith.pipeline.frameworks import samples
from enginesmith.pipeline.frameworks.fidelity import compare, thresholds_for
from enginesmith.pipeline.frameworks.onnx import model_file
from enginesmith.pipeline.system.device import Device
from enginesmith.pipeline.tensors import (
    BATCH,
    Array,
    Feeds,
    ShapeRange,
    Signature,
    TensorSpec,
    format_sizes,
    list_words,
    read_sizes,
)

_PICTURE_RANK = 4
_EXAMPLE_SIZE = 8
"""Along a dynamic dimension of an ONNX file, which brings no example."""
_PICTURE_SIZES = (128, 64, 32, _EXAMPLE_SIZE)
"""Along heights and widths, the first one that the model takes, as does its half: they are multiples of the strides of
networks for pictures; some, for lines of text, take no large heights."""
_LENGTH_SIZES = (_EXAMPLE_SIZE, 64, 512, 4096)
"""Along the only dimension whose size is assumed, where it is none of a picture: the first that the model takes, as
does its half; frames of sound are some hundred numbers long."""
_LARGE = 1000
"""Largest magnitude of made-up whole numbers of more than 8 bits: no product of two leaves 32 bits."""
_ALMOST = 1e-6
"""Distance from 0 and 1 below which a score is one of them."""
_SETTINGS = ("sr", "sample_rate", "sampling_rate")
"""Names of single numbers of which a model takes few."""
_CHANNELS = (1, 3)
_DRAWN: Mapping[Drawing, str] = {
    "within": "floats are drawn within the example's least and greatest, and all others are its own rows, repeated",
    "repeat": "they are the example's rows, repeated",
}
"""Descriptions of samples that are no usual ones."""
_BEYOND = re.compile(r"index (\d+) is out of bounds for dimension \d+ with size (\d+)")
_T = TypeVar("_T")
_LOOKED_THROUGH, _MOST_LOOKED_THROUGH = 64, 256
"""Samples among which those are looked for whose answers tell most: answers of any length, and of few kinds."""


def make_example(
    model: Artifact, picture_size: int = _PICTURE_SIZES[0], lengths: Mapping[str, int] = MappingProxyType({})
) -> tuple[dict[str, Array], dict[str, int]]:
    """Make a feed for each input, of these lengths; returns also the size it has along each dynamic dimension."""
    specs = model.model_signature.inputs
    if model.kind == "torch":
        from enginesmith.pipeline.frameworks.torch.saved import read_example

        feeds = read_example(model)
        return feeds, read_sizes(specs, feeds)
    sizes = {**choose_sizes(model.model_signature, picture_size), **lengths}
    return draw_feeds(model.model_signature, sizes), sizes


def choose_sizes(signature: Signature, picture_size: int = _PICTURE_SIZES[0]) -> dict[str, int]:
    """Choose a size for each dynamic dimension of a file, which brings no example.

    Height and width of pictures, of 1 or 3 channels that come first or last, are larger than others, if no input has
    another dynamic dimension: masks and caches of attention have four dimensions, too.
    """
    sides, others = set[str](), set[str]()
    for spec in signature.inputs:
        axes: tuple[int, ...] = ()
        if len(spec.shape) == _PICTURE_RANK:
            axes = (2, 3) if spec.shape[1] in _CHANNELS else (1, 2) if spec.shape[3] in _CHANNELS else ()
        for axis, dim in enumerate(spec.shape[1:], 1):
            (sides if axis in axes else others).update(list_words(dim))
    if others - {samples.batch_symbol(signature)}:
        sides = set()
    return {name: picture_size if name in sides else _EXAMPLE_SIZE for name in signature.symbols}


def draw_feeds(signature: Signature, sizes: Mapping[str, int], seed: int = 0) -> dict[str, Array]:
    """Draw normal floats, pixels, rows of the tables that inputs are indices of, lengths of 1, else 0 and 1."""
    rng, feeds, lengths = np.random.default_rng(seed), dict[str, Array](), signature.list_lengths()
    for spec in signature.inputs:
        shape = spec.resolve(sizes)
        pixels = spec.dtype == "uint8" and len(shape) == _PICTURE_RANK
        whole = rng.integers(0, 256 if pixels else signature.tables.get(spec.name, 2), shape)
        if spec in lengths:
            whole = np.ones_like(whole)  # no model refuses it, as it may 0, or more than a dimension's smallest size
        drawn = rng.standard_normal(shape) if spec.dtype.startswith("float") else whole
        feeds[spec.name] = drawn.astype(spec.dtype)
    return feeds


def plan_draws(
    signature: Signature, known: Mapping[str, int] = MappingProxyType({})
) -> tuple[dict[str, int], Callable[[Mapping[str, int], int], Feeds]]:
    """Choose sizes for a file, and return them with the call that draws feeds of given sizes with a seed."""
    return {**choose_sizes(signature), **known}, lambda sizes, seed: draw_feeds(signature, sizes, seed)


def vary_lengths(
    session: Session,
    cases: Sequence[samples.Case],
    example: Mapping[str, Array],
    ranges: Mapping[str, ShapeRange],
    seed: int,
) -> dict[str, Array]:
    """Replace lengths that are all 1 by ones that differ, the longest that the model takes in all cases.

    They are up to the smallest size that they may count: a dimension of the inputs that have the same samples.
    """
    signature, changed = session.signature, dict(example)
    lengths = [spec for spec in signature.list_lengths() if (example[spec.name] == 1).all()]
    longest = min((_find_smallest_size(spec, signature, ranges) for spec in lengths), default=1)
    while longest > 1:
        for spec in lengths:
            rows = example[spec.name].size
            falling = -(-longest * np.arange(rows, 0, -1) // rows)  # rounded up: none is 0
            changed[spec.name] = falling.astype(spec.dtype).reshape(example[spec.name].shape)
        with contextlib.suppress(ModelError):
            for case in cases:
                session.run(samples.feeds_for(case, signature, changed, None, seed))
            return changed
        longest //= 2
    return dict(example)


def widen_numbers(
    session: Session,
    cases: Sequence[samples.Case],
    example: Mapping[str, Array],
    quantities: Sequence[str],
    seed: int,
) -> tuple[dict[str, Array], list[str]]:
    """Replace whole numbers that are all 0 and 1 by larger ones, if the model takes these in all cases.

    Those of 8 bits are any that there are. Returns also a note on them.
    """
    narrow = [name for name in quantities if np.isin(example[name], (0, 1)).all()]
    if not narrow:
        return dict(example), []
    rng, wide, spans = np.random.default_rng(seed), dict(example), list[str]()
    for name in narrow:
        value = example[name]
        limits = np.iinfo(value.dtype)
        low, high = (limits.min, limits.max) if limits.bits == 8 else (max(limits.min, -_LARGE), _LARGE)
        wide[name] = np.asarray(rng.integers(low, high, value.shape, value.dtype, endpoint=True))
        spans.append(f"{name!r} has whole numbers from {low} to {high} in them")
    made = "the samples are made up, and "
    if refusal := _find_refusal(session, cases, example, wide, seed):
        names = ", ".join(map(repr, narrow))
        return dict(example), [
            f"{made}{names} {'has' if len(narrow) == 1 else 'have'} only 0 and 1 in them, as the model {refusal}: "
            "other numbers are verified if samples with real ones are given with --eval DATA"
        ]
    return wide, [f"{made}{', '.join(spans)}; --eval DATA gives real ones"]


def _find_refusal(session: Session, cases: Sequence[samples.Case], narrow: Feeds, wide: Feeds, seed: int) -> str:
    """Say what a model does with large made-up numbers that it does not take, empty if it does.

    It fails, answers NaN or infinity, or answers with 0 and 1 alone, which hide whatever an engine gets wrong.
    """
    for case in cases:
        small, large = (samples.feeds_for(case, session.signature, each, None, seed) for each in (narrow, wide))
        try:
            answers = session.run(large)
        except ModelError as error:
            return f"refuses larger ones ({error.message})"
        if any(value.dtype.kind == "f" and not np.isfinite(value).all() for value in answers.values()):
            return "answers NaN or infinity to larger ones"
        usual = session.run(small)
        if any(_measure_saturation(answers[name]) > 2 * _measure_saturation(usual[name]) + 0.1 for name in usual):
            return "answers hardly anything but 0 and 1 to larger ones"
    return ""


def _measure_saturation(answer: Array) -> float:
    """Compute the share of 0, 1 and -1 in what may be probabilities, scores or signs; 0 for other numbers."""
    sizes = np.abs(answer.astype(np.float64)) if answer.dtype.kind == "f" else np.empty(0)
    if not sizes.size or sizes.max() > 1:
        return 0.0
    return float(np.mean((sizes < _ALMOST) | (sizes > 1 - _ALMOST)))


def _find_smallest_size(spec: TensorSpec, signature: Signature, ranges: Mapping[str, ShapeRange]) -> int:
    """Find the smallest size that a length may count: a dimension of another input of these samples, above 1."""
    sizes = {name: range_.min for name, range_ in ranges.items()}
    left_out = {1, samples.batch_symbol(signature), *spec.shape[:1]}
    others = (other for other in signature.inputs if other != spec and {*spec.shape[:1]} <= {*other.shape})
    pairs = (pair for other in others for pair in zip(other.shape, other.resolve(sizes), strict=True))
    return min((size for dim, size in pairs if dim not in left_out), default=1)


def describe_narrow(
    signature: Signature, cases: Sequence[samples.Case], folder: Path, narrow: Sequence[str]
) -> list[str]:
    """Describe made-up whole numbers, one for each sample, that are the same in the feeds of all cases.

    And those of the ``narrow`` inputs, if they are 0 and 1 alone.
    """
    numbers: dict[str, set[int]] = {
        spec.name: set() for spec in signature.inputs if spec.is_number or spec.name in narrow
    }
    for index in range(len(cases)):
        feeds = samples.read_arrays(folder, "feeds", index)
        for name, known in numbers.items():
            known.update(np.unique(feeds[name]).tolist())
    single = {spec.name for spec in signature.inputs if spec.is_number}
    said = {name: f"is {min(known)} in all of" for name, known in numbers.items() if name in single and len(known) == 1}
    said |= {name: "has only 0 and 1 in" for name in narrow if name not in said and numbers[name] <= {0, 1}}
    return [
        f"the samples are made up, and {name!r} {words} them: other numbers are verified if samples with real ones are "
        "given with --eval DATA"
        for name, words in said.items()
    ]


def list_narrow(signature: Signature, quantities: Sequence[str]) -> list[str]:
    """List the inputs of a file that are drawn as 0 and 1, though no table, name or use tells that they are no more."""
    wide = {*quantities, *signature.tables}
    whole = (spec.name for spec in signature.inputs if spec.dtype in ("int32", "int64") and spec.name not in wide)
    return [name for name in whole if not any(word in name.lower() for word in model_file.MASKS)]


def find_example(
    engine: Engine, model: Artifact, known: Mapping[str, ShapeRange]
) -> tuple[dict[str, Array], dict[str, int]]:
    """Make an example; pictures whose sizes are assumed are of the largest size that the model takes, as its half.

    A length that is the only assumed size is the least that it takes likewise; eight, if it takes none.
    """
    assumed = list_assumed(model, known)
    examples = [make_example(model, size) for size in (_PICTURE_SIZES if assumed else _PICTURE_SIZES[:1])]
    if len({tuple(sizes.values()) for _, sizes in examples}) == 1:
        if len(assumed) != 1:
            return examples[0]
        lengths = (*_LENGTH_SIZES, _EXAMPLE_SIZE)
        examples = [make_example(model, lengths={assumed[0]: length}) for length in lengths]
    usual = {name: range_.opt for name, range_ in known.items()}
    with engine.load(model, Device()) as session:
        for feeds, sizes in examples[:-1]:
            halved = {name: size // 2 if name in assumed else size for name, size in sizes.items()}
            with contextlib.suppress(ModelError):
                for each in (sizes, halved):
                    session.run(samples.resize(feeds, model.model_signature, {**each, **usual}))
                return feeds, sizes
    return examples[-1]


def list_assumed(model: Artifact, known: Mapping[str, ShapeRange]) -> tuple[str, ...]:
    """List the dimensions of a file whose sizes are assumed: the dynamic ones besides the batch, if not ``known``."""
    batch = samples.batch_symbol(model.model_signature)
    if model.kind != "onnx":  # a module brings an example
        return ()
    return tuple(name for name in model.model_signature.symbols if name not in known and name != batch)


def describe_assumed(ranges: Mapping[str, ShapeRange], assumed: Sequence[str]) -> list[str]:
    """Describe at which assumed sizes everything is verified and measured, and which options give others."""
    sizes = ", ".join(f"{name} = {ranges[name].opt} (verified from {ranges[name].min})" for name in assumed)
    shapes = " ".join(f"--shape {name}=MIN:OPT:MAX" for name in assumed)
    return [f"sizes that nothing tells are assumed: {sizes}; {shapes} gives those of real inputs"] if assumed else []


def advise(model: Artifact, known: Mapping[str, ShapeRange], assumed: Sequence[str], data: Dataset | None) -> str:
    """Say what helps a model that refuses samples that are made up, or sizes that are ``assumed``."""
    symbol = samples.batch_symbol(model.model_signature)
    if model.kind == "onnx":
        advice = samples.advise_sizes(assumed)
        options = samples.suggest_batch(model.model_signature) if symbol is None else ""
        advice += f"; if one of the dimensions is the batch, name it with {options}" if options else ""
        settings = [
            spec.name for spec in model.model_signature.inputs if not spec.shape and spec.name.lower() in _SETTINGS
        ]
        words = "".join(f", and {name!r}, which seems to be a setting, in them" for name in settings)
        return advice if data else f"{advice}; samples are drawn at random: give some with --eval DATA{words}"
    if data:
        own = samples.read_row_ranges(model.model_signature, data).items()
        shapes = " ".join(f"--shape {name}={range_}" for name, range_ in own if name not in known)
        return (
            f"; samples are cut to the other sizes, and may lack their end: give only that of {data.name} with {shapes}"
            if shapes
            else ""
        )
    if symbol is None:
        return ""
    return (
        "; they are drawn at random from the example's: give samples with --eval DATA, or, where inputs are not "
        f"made of samples, call their dimensions otherwise than {symbol!r}: the example is then cut to other sizes"
    )


class Baseline(NamedTuple):
    """Hold the model that answers first, with what helps where it refuses feeds."""

    session: Session
    example: Feeds
    advice: str

    def run(self, case: samples.Case, feeds: Feeds) -> dict[str, Array]:
        """Run it; ModelError says at which sizes it fails, and which batches or sizes may work, after the advice."""
        try:
            return self.session.run(feeds)
        except ModelError as error:
            other = "no single sample, measure other batches: --batch 2,8"
            if case.batch > 1:
                other = "single samples alone, as where an input is for one, measure those: --batch 1"
            symbol = samples.batch_symbol(self.session.signature)
            batches = f"; if the model takes {other}" if symbol else ""
            indices = _advise_indices(error.message, self.session.signature.inputs, self.example, case.sizes)
            message = f"{error.message}, at {format_sizes(case.sizes)}"
            remedy = (
                indices
                or self._find_single(feeds)
                or self._find_least(case, feeds)
                or f"{error.remedy}{self.advice}{batches}"
            )
            raise ModelError(message, remedy) from error

    def _find_single(self, feeds: Feeds) -> str:
        """Find a dimension that leads inputs, or has the word batch in its name, of which the model takes only 1.

        Say which options fix it; empty for none.
        """
        signature = self.session.signature
        sizes = read_sizes([spec for spec in signature.inputs if spec.name in feeds], feeds)
        leading = {dim for spec in signature.inputs for dim in spec.shape[:1]}
        symbol = samples.batch_symbol(signature)
        for word in [word for word in sizes if sizes[word] > 1 and (word in leading or "batch" in word.lower())]:
            with contextlib.suppress(ModelError):
                self.session.run(samples.resize(feeds, signature, {**sizes, word: 1}))
                options = "--batch 1" if word == symbol else f"--batch 1 --shape {word}=1:1:1"
                fixed = [str(spec) for spec in signature.inputs if 1 in spec.shape and word not in spec.shape]
                cause = f", as {fixed[0]} is for one sample" if fixed else ""
                return f"it takes the same with {word} 1{cause}: give {options}"
        return ""

    def _find_least(self, case: samples.Case, feeds: Feeds) -> str:
        """Find a dimension that is shorter than in the example, and at whose double, or more, the model takes the same.

        Say which option leaves shorter ones out; empty for none.
        """
        signature = self.session.signature
        if any(spec.name not in feeds or spec.name not in self.example for spec in signature.inputs):
            return ""
        usual, symbol = read_sizes(signature.inputs, self.example), samples.batch_symbol(signature)
        for word in [word for word, size in case.sizes.items() if word != symbol and size < usual.get(word, 0)]:
            size = case.sizes[word]
            while size < usual[word]:
                size = min(2 * size, usual[word])
                with contextlib.suppress(ModelError):
                    self.session.run(samples.resize(feeds, signature, {**case.sizes, word: size}))
                    least = _write_range(word, size, usual)
                    return f"it takes the same with {word} {size}: give only sizes from there on, with {least}"
        return ""


def _write_range(word: str, least: int, usual: Mapping[str, int]) -> str:
    return f"--shape {word}={least}:{usual[word]}:MAX"


def _advise_indices(message: str, specs: Sequence[TensorSpec], example: Feeds, sizes: Mapping[str, int]) -> str:
    """Advise which sizes are large enough where whole numbers of the example are places along a dimension that was cut.

    Empty where the message says nothing of it.
    """
    beyond = _BEYOND.search(message)
    if not beyond:
        return ""
    usual = read_sizes(specs, example)
    words = [word for word in usual if sizes.get(word) == int(beyond[2]) <= int(beyond[1]) < usual[word]]
    for word, spec in itertools.product(words, specs):
        value = example[spec.name]
        if word not in spec.symbols and "int" in spec.dtype and value.size and sizes[word] <= value.max() < usual[word]:
            return (
                f"{spec.name!r} has whole numbers up to {value.max()}, which seem to be places along {word!r}: give "
                f"only sizes that have them, {_write_range(word, value.max() + 1, usual)}"
            )
    return ""


def try_drawings(answer: Callable[[Drawing], _T], drawings: Sequence[Drawing]) -> tuple[Drawing, _T, list[str]]:
    """Answer samples that are drawn in the first of these ways that the model takes; return a note for other ones.

    Raises:
        ModelError: it takes none of them; the error is that of the first.
    """
    refusals = list[ModelError]()
    for drawing in drawings:
        try:
            answers = answer(drawing)
        except ModelError as error:
            refusals.append(error)
        else:
            made = f"the model refuses random samples ({refusals[0].message}): " if refusals else ""
            return drawing, answers, [f"{made}{_DRAWN[drawing]}; --eval DATA gives real ones"] if made else []
    raise refusals[0]


def find_choosing(session: Session, cases: Sequence[samples.Case], folder: Path) -> tuple[str, ...] | None:
    """Find the outputs whose rows the baseline chooses by values, at the feeds of any case; None where any may be."""
    choosing = set[str]()
    for index in range(len(cases)):
        names = session.find_choosing(samples.read_arrays(folder, "feeds", index))
        if names is None:
            return None
        choosing |= names
    return tuple(sorted(choosing))


def describe_interaction(
    session: Session, cases: Sequence[samples.Case], make: samples.FeedMaker, folder: Path
) -> tuple[list[str], list[str]]:
    """Describe how the answer to a sample depends on its batch: the last one of the largest batch is run alone.

    Where single samples alone are measured, two are run together: other steps compute many at a time. Where an
    output has a number for each pair of samples, it depends. Nothing is said of outputs without a batch, or whose
    rows are chosen by values, or whose sizes are, nor of a model that takes no such batch. Returns besides a note on
    outputs that lack the dimension of the batch for one sample.
    """
    signature = session.signature
    symbol = samples.batch_symbol(signature)
    pairs = [spec.name for spec in signature.outputs if spec.shape.count(symbol) > 1] if symbol else []
    if pairs:
        return [
            f"the model's output {pairs[0]!r} has the batch in two dimensions, a number for each pair of samples: "
            f"it is judged in batches of {cases[0].batch}, and a server must not put requests together"
        ], []
    index, case = max(enumerate(cases), key=lambda pair: pair[1].batch)
    judged = [spec for spec in signature.outputs if symbol in spec.shape and spec.name not in signature.unordered]
    if symbol is None or not judged:
        return [], []
    try:
        if case.batch > 1:
            feeds, together = (samples.read_arrays(folder, kind, index) for kind in ("feeds", "outputs"))
        else:
            case = case.model_copy(update={"sizes": {**case.sizes, symbol: 2}, "batch": 2})
            feeds = make(case)
            together = session.run(feeds)
        alone = session.run(samples.take_last(feeds, signature.inputs, symbol))
    except ModelError:
        return [], []
    expected = samples.take_last({spec.name: together[spec.name] for spec in judged}, judged, symbol)
    dropping = [
        f"the model drops a batch of 1 from its output {name!r}, as squeeze() does: it answers {list(value.shape)} to "
        f"one sample, and {list(together[name].shape)} to {case.batch}"
        for name, value in alone.items()
        if name in expected and value.ndim < together[name].ndim
    ]
    # sizes that depend on values, such as the number of boxes, are others for one sample
    alike = {name: value for name, value in expected.items() if alone[name].shape == value.shape}
    answers = {name: alone[name] for name in alike}
    compared = compare(answers, alike, thresholds_for("fp16"), ranges=samples.find_spans([together]))
    different = [output.name for output in compared.outputs if not output.passed]
    others = {word for word in signature.symbols if word != symbol}
    taken = f"; the batch is taken to be {symbol!r}: if it is another dimension, call that {BATCH!r} with --input"
    return [
        f"the answer to a sample depends on the rest of its batch: eager's {name!r} for the last of {case.batch} "
        "samples is another one where it is alone; a server must not put requests together"
        f"{taken if others and symbol != BATCH else ''}"
        for name in different[:1]
    ], dropping


def put_telling_first(session: Session, data: Dataset, batch: int) -> Dataset:
    """Put samples first whose answers tell most, where values decide how long they are, or are of few kinds.

    Where no box is found, answers agree whatever an engine computes; where all samples are of the common class, so do
    those of an engine that knows no other. Those that have an answer come first; or those of each kind in turn, for
    which samples are run in batches of this size.
    """
    signature, symbol = session.signature, samples.batch_symbol(session.signature)
    varying = [spec.name for spec in signature.outputs if {*spec.symbols} - {*signature.symbols}]
    discrete = [spec.name for spec in signature.outputs if symbol in spec.shape[:1] and _has_kinds(spec)]
    first = list[int]()
    with contextlib.suppress(EnginesmithError):  # it takes no such batch
        if varying and samples.fixed_batch(signature) == 1:
            first = _list_answered(session, data, varying)
        elif discrete and not varying:
            first = _list_kinds_in_turn(session, data, discrete, batch)
    if first == [*range(len(first))]:
        return data
    return data.take(np.array([*first, *(row for row in range(len(data)) if row not in first)]), data.name)


def _list_answered(session: Session, data: Dataset, varying: Sequence[str]) -> list[int]:
    """List the first samples for which none of these outputs is empty, as many as are judged."""
    answered = list[int]()
    for row in range(min(len(data), _LOOKED_THROUGH)):
        outputs = session.run(data.feed(np.array([row])))
        answered += [row] if all(outputs[name].size for name in varying) else []
        if len(answered) == samples.JUDGED_SAMPLES:
            break
    return answered


def _list_kinds_in_turn(session: Session, data: Dataset, discrete: Sequence[str], batch: int) -> list[int]:
    """List samples with each answer of these outputs in turn, as many as are judged."""
    kinds, count = dict[object, list[int]](), min(len(data), _MOST_LOOKED_THROUGH)
    for start in range(0, count, batch):
        rows = range(start, min(start + batch, count))
        outputs = session.run(data.feed(np.array(rows)))
        for place, row in enumerate(rows):
            kinds.setdefault(tuple(_name_kind(outputs[name][place]) for name in discrete), []).append(row)
        if len(kinds) >= samples.JUDGED_SAMPLES:
            break
    turns = itertools.chain.from_iterable(itertools.zip_longest(*kinds.values()))
    return [row for row in turns if row is not None][: samples.JUDGED_SAMPLES]


def _has_kinds(spec: TensorSpec) -> bool:
    """Tell whether samples have few kinds of answers: one whole number each, or a mask."""
    return spec.dtype == "bool" or (not spec.dtype.startswith("float") and all(dim == 1 for dim in spec.shape[1:]))


def _name_kind(answer: Array) -> object:
    """Name the kind of a sample by its answer: the number itself, or which of the two values a mask has."""
    return answer.item() if answer.size == 1 else (bool(answer.any()), bool(answer.all()))
