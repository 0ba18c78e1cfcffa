"""Explain why a model cannot be exported, in one sentence: the operator, the line of the model's code, what to do."""

import contextlib
import itertools
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from enginesmith.pipeline.errors import EnginesmithError, ExportError
from enginesmith.pipeline.passes.export.agreement import runs
from enginesmith.pipeline.tensors import BATCH, is_sum, join_sum

if TYPE_CHECKING:
    from enginesmith.pipeline.frameworks.torch.module import LoadedModel
    from enginesmith.pipeline.tensors import TensorSpec

FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError, ImportError)
"""Exceptions of the library that folds constants; running out of memory and interrupts are none of them."""
REMEDY_PROGRAM = "the whole trace is in the step's log; engines that are made from ONNX have another exporter, too"
_OPERATOR = (
    re.compile(r"OpOverload\(op='([\w.]+)'"),
    re.compile(r"unrecognized namespace ([\w:]+)"),
    re.compile(r"Exporting the operator '([\w:]+)'"),
    re.compile(r"DataDependentOutputException: (aten\.equal)\b"),
    re.compile(r"(?:Could not find|Missing) .*?'?(\w+::\w+)'?"),
)
_STATIC = re.compile(r"static shape of (\d+) for dimension (.+)\.shape\[(\d+)\]")
_SPECIALIZED = re.compile(r"\['tensors'\]\[(\d+)\]\.size\(\)\[(\d+)\] as dynamic but .* constant \((\d+)\)")
_COMPLEX = re.compile(r"for the complex-valued input|aten\._conj\b|aten\._neg_view\b|aten::view_as_complex\b")
_POSITION = re.compile(r"\[(\d+)\]$")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TOOLS = ("torch", "onnx", "onnxscript", "onnx_ir", "enginesmith")
_HERE = Path(__file__).resolve().parents[3]
_REMEDY_OPERATOR = "rewrite that line with operators that ONNX has, or register a translation with torch.onnx"
_INSTEAD = {
    "linalg_pinv": "for a matrix a of independent columns, write torch.linalg.solve(a.mT @ a, a.mT)",
    "linalg_lstsq": "for a matrix a of independent columns, write torch.linalg.solve(a.mT @ a, a.mT @ b)",
    "linalg_qr": "for a matrix a of independent columns, write r = torch.linalg.cholesky(a.mT @ a, upper=True) and "
    "torch.linalg.solve(r, a, left=False), which are R and Q but for signs",
    "linalg_lu": "write torch.linalg.solve, det or slogdet of the matrix, for what the factors are used for",
    "lu_": "write torch.linalg.solve of the matrix itself",
    "_linalg_solve_ex": "write torch.linalg.solve",
    "cholesky_solve": "write torch.linalg.solve_triangular twice, or torch.linalg.solve of the matrix itself",
    "cholesky_inverse": "write torch.linalg.inv of the matrix itself",
    "triangular_solve": "write torch.linalg.solve_triangular",
    "nanmedian": "write torch.median of what torch.where puts in the place of NaN",
    "histc": "write torch.zeros(bins).scatter_add(0, torch.bucketize(x, edges), torch.ones_like(x))",
    "bincount": "write torch.zeros(bins).scatter_add(0, x, torch.ones(x.shape)), for a number of bins that is known",
    "segment_reduce": "write torch.scatter_reduce with the number of each row's segment",
    "put": "write x.flatten().scatter(0, places, numbers)",
    "equal": "write (a == b).all() for torch.equal; for torch.cov and corrcoef, which use it, products of rows without "
    "their means, x @ x.mT / (n - 1)",
}
"""Code to write instead of operators that have no translation, by how their names begin."""
_REMEDY_COMPLEX = (
    "keep real and imaginary parts in float32 tensors and weights: torch.view_as_real behind an FFT, "
    "torch.view_as_complex only before the inverse one"
)
_REMEDY_DATA = "the path through the code depends on values: use torch.where or torch.cond, or fix the value"
REMEDY = "the whole trace is in the step's log; take the other one with --exporter, or rewrite what it names"


class FixedDimension(ExportError):
    """The graph holds at one size only of a dimension that was to be dynamic."""

    runs_elsewhere: bool | None = None
    """True if the module runs at other sizes, where another capture may hold; None where that was not tried."""


@contextlib.contextmanager
def explained_failures(loaded: "LoadedModel", remedy: str = REMEDY) -> Iterator[None]:
    """Turn what exporters raise, or the user's code that they run, into one sentence; but for memory that ran out.

    Raises:
        ExportError: anything was raised, which libraries have classes of their own for.
    """
    try:
        yield
    except (EnginesmithError, MemoryError):
        raise
    except Exception as error:
        raise explain_failure(error, loaded, remedy) from error


def explain_failure(error: BaseException, loaded: "LoadedModel", remedy: str = REMEDY) -> ExportError:
    """Return the reason of an exporter's exception, and a remedy, by default that for an export to ONNX."""
    chain = list(_walk_chain(error))
    for link in chain:
        if static := _STATIC.search(str(link)):
            position = _POSITION.search(static[2])
            index, axis, size = int(position[1]) if position else 0, int(static[3]), int(static[1])
        elif fixed := _SPECIALIZED.search(str(link)):
            index, axis, size = map(int, fixed.groups())
        else:
            continue
        place = _find_fixing_place(chain, index, axis)
        return explain_fixed_dimension(loaded, loaded.signature.inputs[index], axis, size, place)
    text = "\n".join(f"{type(link).__name__}: {link}" for link in chain)
    operator = next((match[1] for pattern in _OPERATOR if (match := pattern.search(text))), "")
    place = next((line for link in reversed(chain) if (line := _find_place(link))), "")
    where = f" at {place}" if place else ""
    if refusal := next((link for link in chain if isinstance(link, ExportError)), None):  # of a translation
        return ExportError(f"{refusal.message}{where}", refusal.remedy)
    if operator and remedy == REMEDY:
        lacking = f"the operator {operator}{where} has no translation to ONNX"
        if _COMPLEX.search(text):
            return ExportError(f"{lacking} for complex numbers", _REMEDY_COMPLEX)
        name = re.split(r"\.|::", operator)[1]
        remedies = (words for start, words in _INSTEAD.items() if name.startswith(start))
        return ExportError(lacking, next(remedies, _REMEDY_OPERATOR))
    first = next((line.strip() for line in str(chain[-1]).splitlines() if line.strip()), "no message")[:300]
    reason = f"{type(chain[-1]).__name__}: {first.partition(' Please feel free')[0]}"
    remedy = _REMEDY_DATA if "data-dependent" in text else remedy
    return ExportError(f"the model cannot be exported{where}: {reason}", remedy)


def explain_fixed_dimension(
    loaded: "LoadedModel", spec: "TensorSpec", axis: int, size: int, place: str = ""
) -> FixedDimension:
    """Return the reason for one dimension that came out fixed, and a remedy, with the ``--input`` of all inputs.

    ``place`` is the line of the model's code that fixed it, if it is known.
    """
    word = str(spec.shape[axis])
    message = f"the graph holds only for {word} = {size} (dimension {axis} of input {spec.name!r})"
    message += f", which {place} fixes" if place else ""
    if is_sum(word):
        return FixedDimension(message, "remove that size from the model's code, or fix all of the sum with --input")
    return FixedDimension(
        message,
        f"{advise_fixed(loaded, {word: size})}, such as a loop over that many steps; where that has none, "
        "torch.export fixes it, as within torch.vmap: write a batched product in its place",
    )


def advise_fixed(loaded: "LoadedModel", sizes: Mapping[str, int]) -> str:
    """Advise to fix these dimensions; a batch is fixed at one sample where the model runs with one."""
    if BATCH in sizes and runs(loaded, {**loaded.dynamic_sizes, **sizes, BATCH: 1}):
        sizes = {**sizes, BATCH: 1}
    return f"make it fixed with {write_inputs(loaded, sizes)}, or remove that size from the model's code"


def write_inputs(loaded: "LoadedModel", sizes: Mapping[str, int]) -> str:
    """Write the ``--input`` of all inputs, with fixed sizes in the place of words."""
    split = ([str(dim).split("+") for dim in spec.shape] for spec in loaded.signature.inputs)
    fixed = ([join_sum(str(sizes.get(part, part)) for part in parts) for parts in dims] for dims in split)
    pairs = zip(loaded.signature.inputs, fixed, strict=True)
    return " ".join(f"--input {spec.model_copy(update={'shape': tuple(shape)})}" for spec, shape in pairs)


def name_root(error: BaseException) -> str:
    """Return the class and the words of the exception that is the root cause."""
    *_, root = _walk_chain(error)
    return f"{type(root).__name__}: {root}"


def _walk_chain(error: BaseException) -> Iterator[BaseException]:
    """Return the exception and what caused it, the root cause last."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)


def _find_place(error: BaseException) -> str:
    """Return ``file:line`` of the innermost frame that is the model's own code.

    The stack that torch.export noted for the graph node in translation counts, if a frame has one in its hands.
    """
    frames: list[tuple[str, object]] = []
    recorded = ""
    for frame, line in traceback.walk_tb(error.__traceback__):
        frames.append((frame.f_code.co_filename, line))
        meta = getattr(frame.f_locals.get("node"), "meta", None)
        if isinstance(meta, dict):
            recorded = str(meta.get("stack_trace") or recorded)
    inward = reversed([*frames, *_FRAME.findall(recorded)])
    return next((f"{file}:{line}" for file, line in inward if _is_model_code(file)), "")


def _find_fixing_place(errors: Iterable[BaseException], index: int, axis: int) -> str:
    """Return ``file:line`` of the model's code that fixed a dimension, as torch.export noted it.

    ``index`` is the number of the input. The notes are where a frame has them in its hands; empty where there are none.
    """
    for frame, _ in itertools.chain.from_iterable(traceback.walk_tb(error.__traceback__) for error in errors):
        notes = frame.f_locals.get("shape_env")
        replaced, lines, ends = (
            getattr(notes, name, {}) for name in ("replacements", "replacements_slocs", "var_to_range_sloc")
        )
        symbol = getattr(notes, "source_to_var", {}).get(f"L['tensors'][{index}].size()[{axis}]")
        while replaced.get(symbol) in ends:  # it has to equal another size, which is the one that was fixed
            symbol = replaced[symbol]
        for noted in (lines.get(symbol), getattr(ends.get(symbol), "upper", None)):
            location = getattr(noted, "framework_loc", None)
            if isinstance(location, traceback.FrameSummary) and _is_model_code(location.filename):
                return f"{location.filename}:{location.lineno}"
    return ""


def _is_model_code(file: str) -> bool:
    import sysconfig

    path = Path(file)
    if file.startswith("<") or path.resolve().is_relative_to(_HERE / "pipeline"):
        return False
    if "site-packages" in path.parts:
        package = path.parts[len(path.parts) - path.parts[::-1].index("site-packages")]
        return package not in _TOOLS
    return not path.is_relative_to(sysconfig.get_path("stdlib"))
