"""Parse recipes from plain values, as files and options give them, and check that their fields go together."""

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from enginesmith.calibration import file_formats, user_code
from enginesmith.calibration.sources import Request
from enginesmith.pipeline.engines import ENGINES, engine_class
from enginesmith.pipeline.engines.options import DEFAULT_ENGINES
from enginesmith.pipeline.errors import UsageError, require_utf8
from enginesmith.pipeline.measure.quality import check_metric
from enginesmith.pipeline.passes import requested_pass
from enginesmith.pipeline.passes.quantize.precisions import KINDS
from enginesmith.pipeline.recipe.candidates import fill_variants
from enginesmith.pipeline.recipe.cli_options import option_for, walk_fields
from enginesmith.pipeline.recipe.options import QuantizationOptions
from enginesmith.pipeline.recipe.recipe import LISTS, Recipe
from enginesmith.pipeline.tensors import ShapeRange

_READERS = {"inputs": "specs", "shapes": "ranges", "device": "named_device", "workspace": "workspace_limits"}
"""Field → the property of a recipe that reads its text."""
_NOT_FOR_NNCF = ("ranges", "percentile", "placement", "smooth", "smooth_insert", "shift", "equalize", "bias_correction")
"""Options of quantization that NNCF's graphs do not depend on."""
_JUDGED_BY = {
    "memory": ("budgets.max_memory_bytes",),
    "latency": (
        *("budgets.max_latency_ms", "budgets.max_p99_ms", "budgets.min_throughput_per_s"),
        *("measure.concurrency", "measure.sweep"),
    ),
}
"""Measurement → the fields that have no effect without it."""
_OBJECTIVES = {"memory": "memory", "throughput": "latency"}
"""Objective → what it is judged by. The default is left out: without latency, engines are built and not compared."""
_YAML_WORDS = {"Value": "", "Input": "must", "tuple": "list", "dicti": "mapping"}
_IN_PYTHON_WORDS = re.compile(r"^Value error, |^Input should|tuple|dictionary or instance of \w+|dictionary")
"""Python's words in messages of pydantic, which are replaced by those of YAML."""


def make(values: dict[str, Any], options: Mapping[str, Any] | None = None, *, listed: bool = False) -> Recipe:
    """Make a recipe from plain values, sizes and durations as text included; paths may be those of pathlib.

    ``options`` are those of the values that come from options of the command line: errors name the option. Where no
    variants are listed, they are found, unless the recipe is for what takes those that are ``listed`` or the default.

    Raises:
        UsageError: a key or a value that does not belong there; a field that has no effect, or lacks what it needs.
    """
    if not isinstance(values, Mapping):
        raise UsageError(
            f"the recipe: must be a mapping of its fields (given: {values!r})", "{'model': …} is the least"
        )
    values = _convert_paths(values)
    recipe = parsed(values, options)
    if not listed:
        recipe = parsed(fill_variants(values, recipe), options)
    _check_smaller(recipe, options or {})
    _check_metric(recipe, options or {})
    _check_measured(recipe, options or {})
    for check in (_check_passes, _check_engines, _check_quantizers, _check_data):
        check(recipe)
    return recipe


def parsed(values: dict[str, Any], options: Mapping[str, Any] | None = None) -> Recipe:
    """Make a recipe without checking that its fields go together and that the model exists.

    Raises:
        UsageError: a key or a value that does not belong there.
    """
    _check_encoding(values, options or {})
    try:
        field = "shapes"
        recipe = Recipe.model_validate(_fill_batches(values))
        for field in _READERS:
            getattr(recipe, _READERS[field])
    except ValidationError as error:
        raise _explain_error(error, values, options or {}) from error
    except UsageError as error:
        raise type(error)(f"{_name_place([field], options or {})}: {error.message}", error.remedy) from error
    return recipe


def _convert_paths(values: Any) -> Any:
    """Replace paths by their text, at any depth."""
    if isinstance(values, Mapping):
        return {key: _convert_paths(value) for key, value in values.items()}
    if isinstance(values, list | tuple):
        return [_convert_paths(value) for value in values]
    return os.fspath(values) if isinstance(values, os.PathLike) else values


def _check_encoding(values: Any, options: Mapping[str, Any], place: tuple[str, ...] = ()) -> None:
    """Insist that all text, such as the path of a data set, is UTF-8."""
    if isinstance(values, Mapping):
        for key, value in values.items():
            _check_encoding(value, options, (*place, str(key)))
    elif isinstance(values, list | tuple):
        for value in values:
            _check_encoding(value, options, place)
    elif isinstance(values, str):
        require_utf8(values, _name_place(place, options))


def _fill_batches(values: dict[str, Any]) -> dict[str, Any]:
    """Fill in batches where only their range is given: those of the default within it, else its usual one."""
    shapes = values.get("shapes")
    given = shapes.get("batch") if isinstance(shapes, dict) else None
    if "batch" in values or not isinstance(given, str):
        return values
    return {**values, "batch": [*ShapeRange.parse(given).select(Recipe.model_fields["batch"].default)]}


def _explain_error(error: ValidationError, values: Mapping[str, Any], options: Mapping[str, Any]) -> UsageError:
    first = error.errors()[0]
    if first["type"] == "extra_forbidden":
        return unknown_field("recipe", _find_part(Recipe, first["loc"][:-1]), first["loc"])
    place = tuple(part for part in map(str, first["loc"]) if part.isalnum() or part.isidentifier())
    name, given = _name_place(place, options), value_at(values, place)
    given = first["input"] if given is None or isinstance(given, Mapping | list) else given
    if first["type"] == "unit":  # quotes the text
        return UsageError(f"{name}: {first['msg']}", first["ctx"]["remedy"])
    if first["type"] == "greater_than_equal" and place[-1].endswith("seconds"):
        return UsageError(f"{name}: must be at least {first['ctx']['ge']:g} s (given: {given!r})", "give more time")
    where = (
        "the command's help describes it" if name.startswith("--") else "`enginesmith init MODEL` describes all fields"
    )
    return UsageError(f"{name}: {plain_words(first['msg'])} (given: {given!r})", where)


def _name_place(place: Sequence[str], options: Mapping[str, Any]) -> str:
    """Name the options that filled a field of the recipe or the fields in it, else the field itself."""
    path = ".".join(place)
    path = "recover" if path == "recovery.method" and "recover" in options else path  # the shorthand
    fields = [field for field, _, _ in walk_fields() if value_at(options, field.split(".")) is not None]
    used = [field for field in fields if f"{path}.".startswith(f"{field}.") or field.startswith(f"{path}.")]
    return ", ".join(option_for(tuple(field.split("."))) for field in used) or path or "the recipe"


def value_at(values: Any, place: Sequence[str]) -> Any:
    """Look a field up in plain values; None where it is not there."""
    for key in place:
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def plain_words(message: str) -> str:
    """Rewrite a message of pydantic in the words of YAML."""
    return _IN_PYTHON_WORDS.sub(lambda match: _YAML_WORDS[match[0][:5]], message)


def _find_part(part: Any, place: Sequence[str | int]) -> type[BaseModel]:
    for step in place:
        part = part.model_fields[step].annotation
    return part  # type: ignore[no-any-return]


def unknown_field(document: str, part: type[BaseModel], place: Sequence[str | int]) -> UsageError:
    """Make the error for a field that a part of a document does not have, with a similar one."""
    *above, name = map(str, place)
    near = difflib.get_close_matches(name, part.model_fields, n=1)
    return UsageError(
        f"the {document} has no field {name!r}"
        + (f" in {'.'.join(above)}" if above else "")
        + (f"; did you mean {near[0]}?" if near else ""),
        f"the fields are {', '.join(part.model_fields)}",
    )


def _check_engines(recipe: Recipe) -> None:
    """Refuse options of engines that are not asked for; those that are may refuse what does not go together."""
    engines = [engine_class(name) for name in recipe.engines]
    for engine in engines:
        engine.check_options(recipe)
    if recipe.tune_seconds and not any(engine().tunable_options(None, recipe.where) for engine in engines):
        message = f"--tune finds nothing to try: {', '.join(recipe.engines)} has no options to tune on {recipe.where}"
        raise UsageError(message, "omit it; on a CPU there are options from two threads on")
    heard = {field for engine in engines for field in engine.reads}
    for field in dict.fromkeys(field for name in ENGINES for field in engine_class(name).reads if field not in heard):
        value, default, path = getattr(recipe, field), Recipe.model_fields[field].default, [field]
        if value == default:
            continue
        if isinstance(value, BaseModel):
            path.append(next(key for key in type(value).model_fields if getattr(value, key) != getattr(default, key)))
        able = [other for other in map(engine_class, ENGINES) if field in other.reads]
        best = next((other for other in able if other.built_elsewhere), able[0])
        raise UsageError(
            f"{option_for(tuple(path))} has no effect on {', '.join(recipe.engines)}",
            f"add --engine {best.name}, or omit it",
        )


def _check_passes(recipe: Recipe) -> None:
    """Check that each pass which the recipe names is there, before anything is exported for it."""
    for index, name in enumerate(recipe.passes):
        requested_pass(name)
        if name in recipe.passes[:index]:
            raise UsageError(f"--pass is given twice as {name}", "give each one once")
    if recipe.passes and not any(engine_class(name).consumes == "onnx" for name in recipe.engines):
        raise UsageError(
            f"--pass has no effect on {', '.join(recipe.engines)}", f"add --engine {DEFAULT_ENGINES[0]}, or omit it"
        )


def _check_quantizers(recipe: Recipe) -> None:
    """Refuse makers of int8 graphs where there are none, and NNCF where nothing takes its graphs or reads options."""
    for name in ("qat", "nncf"):
        if name in recipe.quantization.quantizers and "int8" not in recipe.precisions:
            message = f"--quantizer {name} has no effect without --precision int8"
            raise UsageError(message, "add --precision int8, or omit it")
    if "nncf" not in recipe.quantization.quantizers:
        return
    if not any("nncf" in engine_class(name).quantizers for name in recipe.engines):
        able = [name for name in ENGINES if "nncf" in engine_class(name).quantizers]
        raise UsageError(
            f"--quantizer nncf has no effect on {', '.join(recipe.engines)}, which does not take its graphs",
            f"add one of --engine {', '.join(able)}, or omit it",
        )
    options, default = recipe.quantization, QuantizationOptions()
    unread = [name for name in _NOT_FOR_NNCF if getattr(options, name) != getattr(default, name)]
    own = [name for name in recipe.precisions if KINDS[name].calibrated and name != "int8"]
    if unread and options.quantizers == ("nncf",) and not own:
        raise UsageError(
            f"{option_for(('quantization', unread[0]))} has no effect on --quantizer nncf, which chooses ranges, places"
            " of Q/DQ pairs and smoothing by rules of its own",
            "omit it, or add --quantizer own, which reads it",
        )


def _check_data(recipe: Recipe) -> None:
    """Check that ranges come from real data, or from made-up data that was asked for, and that files can be read."""
    needing = [name for name in recipe.precisions if KINDS[name].calibrated]
    if needing and not recipe.calibration_data and not recipe.synthetic_calibration:
        raise UsageError(
            f"{needing[0]} needs calibration data, and there is none",
            "give some samples with --calibration DATA; --synthetic-calibration takes random ones, which are "
            "good for measuring speed and memory, and not accuracy",
        )
    for data in dict.fromkeys(filter(None, (recipe.data, recipe.calibration, recipe.eval_data))):
        file_formats.check_readable(data, Request(recipe.specs, options=recipe.data_options))
    options = {"--tokenizer": (recipe.data_options.tokenizer,), **recipe.engine_files}
    for option, names in options.items():
        for name in filter(None, names):
            if not os.access(Path(name).expanduser(), os.R_OK):
                raise UsageError(f"{option} names {name}, which is not there or cannot be read", "check the path")


def _check_smaller(recipe: Recipe, options: Mapping[str, Any]) -> None:
    """Check that pruning has a module, and training has data."""
    for option, ids in (
        ("--prune", [target.slug for target in recipe.prune_targets]),
        ("--sparsity", [pattern.slug for pattern in recipe.sparsities]),
    ):  # each raises its own message
        if twice := next((id_ for id_ in ids if ids.count(id_) > 1), None):
            raise UsageError(f"{option} is given twice as {twice}", "give each one once")
    for field, part, empty, missing in (
        ("pruning", recipe.pruning, not recipe.prune, "--prune macs=-50%"),
        ("recovery", recipe.recovery, not recipe.recover, "--recover distil"),
        ("sparsifying", recipe.sparsifying, not recipe.sparsity, "--sparsity 2:4"),
    ):
        given = [name for name in type(part).model_fields if getattr(part, name) != getattr(type(part)(), name)]
        if given and empty:
            name = _name_place((field, given[0]), options)
            raise UsageError(f"{name} has no effect without {missing.split()[0]}", f"add {missing}, or omit it")
    if recipe.recover and not (recipe.prune or recipe.sparsity or "int8" in recipe.precisions):
        raise UsageError(
            "--recover trains what is pruned, sparse or in int8, and nothing is",
            "add --prune macs=-50%, --sparsity 2:4 or --precision int8; or --data and --max-drop, for a search",
        )
    if recipe.recover and user_code.is_reference(recipe.recovery.method):
        user_code.check_reference(recipe.recovery.method, "loss")
    by_taylor = recipe.prune and recipe.pruning.importance == "taylor"
    if (recipe.recover or by_taylor) and recipe.calibration_data is None:
        raise UsageError(
            f"{'recovery' if recipe.recover else 'importance by taylor'} needs data, and there is none",
            "give some samples with --data DATA; distilling needs no labels",
        )


def _check_metric(recipe: Recipe, options: Mapping[str, Any]) -> None:
    metric = recipe.metric
    if metric:
        check_metric(metric)
    if recipe.evaluation_data is None and (metric or recipe.budgets.max_drop is not None):
        subject = f"the metric {metric}" if metric else _name_place(("budgets", "max_drop"), options)
        raise UsageError(f"{subject} needs labeled data, and there is none", "give some with --eval DATA")


def _check_measured(recipe: Recipe, options: Mapping[str, Any]) -> None:
    """Refuse budgets, an objective and numbers of callers that need a measurement which the recipe switches off."""
    values = recipe.model_dump()
    for measurement, fields in _JUDGED_BY.items():
        if value_at(values, ("measure", measurement)):
            continue
        names = [_name_place(field.split("."), options) for field in fields if value_at(values, field.split("."))]
        if _OBJECTIVES.get(recipe.objective) == measurement:
            names.insert(0, f"{_name_place(['objective'], options)} {recipe.objective}")
        if names:
            off = _name_place(("measure", measurement), options)
            raise UsageError(
                f"{names[0]} needs {measurement} to be measured, which {off} switches off", "omit one of them"
            )


# Recipes as YAML.

_MERGE = "tag:yaml.org,2002:merge"
"""The tag of ``<<``, which may stand there several times."""


def read(path: Path, what: str = "recipe", remedy: str = "start from `enginesmith init MODEL`") -> dict[str, Any]:
    """Read the values of a recipe file, or of another YAML file that is a mapping, without checking them.

    Raises:
        UsageError: no such file, or not a YAML mapping, or one that has a name twice.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), _EachOnce)
    except OSError as error:
        raise UsageError(f"the {what} {path} cannot be read: {error.strerror}", "check the path") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
            reason = f"{error.problem} in line {error.problem_mark.line + 1}"
        raise UsageError(f"the {what} {path} is not YAML: {reason}", remedy) from error
    if not isinstance(values, dict):
        raise UsageError(f"the {what} {path} is no mapping of names to values in YAML", remedy)
    return values


class _EachOnce(yaml.SafeLoader):
    """YAML of plain values, in which a name that a mapping has twice is an error: the first would be lost unseen."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Compose a mapping, and refuse a repeated name."""
        node = super().compose_mapping_node(anchor)
        names: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                if key.value in names:
                    raise yaml.MarkedYAMLError(problem=f"{key.value!r} stands there twice", problem_mark=key.start_mark)
                names.add(key.value)
        return node


def commented(recipe: Recipe) -> str:
    """Write a recipe as YAML, with a comment for every field; lists of variants are only named if they are defaults."""
    return "\n".join(_lines(recipe, "")) + "\n"


def _lines(part: BaseModel, indent: str) -> list[str]:
    lines = []
    for name, field in type(part).model_fields.items():
        value = getattr(part, name)
        if isinstance(value, BaseModel):
            about = (type(value).__doc__ or "").partition("\n")[0]
            lines += [f"{indent}# {about}", f"{indent}{name}:", *_lines(value, indent + "  ")]
        else:
            plain = part.model_dump(mode="json")[name]
            text = yaml.safe_dump(plain, default_flow_style=True).removesuffix("...\n").strip()
            mark = "# " if name in LISTS and value == field.get_default(call_default_factory=True) else ""
            lines += [f"{indent}# {field.description}", f"{indent}{mark}{name}: {text}"]
    return lines
