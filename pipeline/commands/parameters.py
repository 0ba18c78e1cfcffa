"""Make the options that commands share, under the headings that ``--help`` shows them with.

Options that fill a field of the recipe are declared with that field: ``options.json`` lists them (``make documents``).
"""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from enginesmith.pipeline.engines import BUILD_FIELDS, RUN_FIELDS

Decorated = Callable[..., Any]

INPUTS, WORK = "Model and inputs", "Where and how it runs"
_OTHERS, _HELP = "Options", "Help"
_HEADINGS = (INPUTS, "Variants", "Data and accuracy", "Budgets", "Building engines", "Measuring", WORK)
PATH = click.Path(path_type=Path)


_ALL = "enginesmith.all_options"


class Option(click.Option):
    """An option with the heading that it stands under; an advanced one is shown by ``--help-all`` only."""

    heading = _OTHERS
    advanced = False


class Command(click.Command):
    """A command that lists its options under headings, the everyday ones first; ``--help-all`` lists all."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if any(isinstance(parameter, Option) and parameter.advanced for parameter in self.params):
            self.params.append(
                click.Option(
                    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all,
                    help="Show the advanced options, too, and exit.",
                )
            )  # fmt: skip

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments; of an option that there was, the error names the one that replaces it."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name in _REMOVED:
                raise click.UsageError(
                    f"{error.option_name} is called --time now, {_REMOVED[error.option_name]}", ctx
                ) from None
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, a section for each heading."""
        sections: dict[str, list[tuple[str, str]]] = {name: [] for name in (_OTHERS, *_HEADINGS, _HELP)}
        hidden = 0
        for param in self.get_params(ctx):
            if not isinstance(param, click.Option):
                continue
            record = param.get_help_record(ctx)
            advanced = isinstance(param, Option) and param.advanced
            if advanced and not ctx.meta.get(_ALL):
                hidden += 1
            elif record is not None:
                asks_for_help = not {"--help", "--help-all"}.isdisjoint(param.opts)
                heading = param.heading if isinstance(param, Option) else _HELP if asks_for_help else _OTHERS
                sections[heading].append(record)
        for name, records in sections.items():
            if records:
                with formatter.section(name):
                    formatter.write_dl(records)
        if hidden:
            formatter.write_paragraph()
            formatter.write_text(f"{hidden} more options are for special cases: --help-all shows them.")


class EngineName(click.ParamType[str]):
    """The name of an engine of the table that runs modules as they are."""

    name = "engine"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Accept a name; engines are imported only now."""
        from enginesmith.pipeline.engines import ENGINES, engine_class

        able = [name for name in ENGINES if engine_class(name).runs_module()]
        if value not in able:
            self.fail(f"{value!r} is not one of {', '.join(map(repr, able))}.", param, ctx)
        return value


class PrecisionName(click.ParamType[str]):
    """The name of a precision, as ``--precision`` takes it."""

    name = "precision"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Accept a name; the table is imported only now."""
        from enginesmith.pipeline.passes.quantize.precisions import KINDS

        if value not in KINDS:
            self.fail(f"{value!r} is not one of {', '.join(map(repr, KINDS))}.", param, ctx)
        return value


def _read_quantity(
    parse: str, _: click.Context, param: click.Parameter, text: str | None, *, above_zero: bool = False
) -> Any:
    """Read a size or a duration by a function of units, which imports pydantic; an error names the option."""
    from enginesmith.pipeline import errors, units

    try:
        value = None if text is None else getattr(units, parse)(text)
    except errors.UsageError as error:
        raise errors.UsageError(f"{param.opts[0]}: {error.message}", error.remedy) from error
    if above_zero and value == 0:
        raise errors.UsageError(f"{param.opts[0]}: must be greater than 0 (given: {text!r})", "give some time: 10s")
    return value


SIZE, TIME = partial(_read_quantity, "parse_bytes"), partial(_read_quantity, "parse_seconds")
TIME_ABOVE_ZERO = partial(_read_quantity, "parse_seconds", above_zero=True)


def _show_all(ctx: click.Context, _: click.Parameter, given: bool) -> None:
    if given:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


def _join_values(_: click.Context, __: click.Parameter, values: Sequence[str]) -> str | None:
    return ",".join(values) if values else None


option = partial(click.option, cls=Option)


def together(*options: Callable[[Decorated], Decorated]) -> Callable[[Decorated], Decorated]:
    def decorate(command: Decorated) -> Decorated:
        for each in reversed(options):
            command = each(command)
        return command

    return decorate


def under(heading: str, *options: Callable[[Decorated], Decorated], advanced: bool = False) -> Callable[..., Decorated]:
    """Declare options that stand under a heading."""

    def decorate(command: Any) -> Decorated:
        before = len(getattr(command, "__click_params__", ()))
        together(*options)(command)
        for param in command.__click_params__[before:]:
            param.heading, param.advanced = heading, advanced
        return command  # type: ignore[no-any-return]

    return decorate


_REMOVED = {
    "--time-limit": "for all commands; of `optimize`, it also has the variants race",
    "--search-limit": "the time of all; --search-steps limits the trials",
}
"""Options that there were, with the difference of --time, which replaces them."""
_JOINED = {"--labels", "--batch", "--workspace", "--concurrency", "--mean", "--std"}
"""Options of one text with commas that may be repeated: --labels a --labels b is --labels a,b."""
_TYPES: Mapping[str, Any] = {"integer": int, "number": float, "list": str, "mapping": str, "text": str}
RECIPE_OPTIONS: tuple[Mapping[str, Any], ...] = tuple(
    json.loads(Path(__file__).with_name("options.json").read_text(encoding="utf-8"))
)
"""The description by ``recipe/cli_options.py`` of each option that fills a field, without importing the recipe."""


def recipe_options(*fields: str) -> Callable[[Decorated], Decorated]:
    """Declare the options of these fields of the recipe, and of the fields in them; of all fields if none is named."""
    parts = tuple(f"{field}." for field in fields)
    declared = []
    for row in RECIPE_OPTIONS:
        if parts and not f"{row['field']}.".startswith(parts):
            continue
        settings: dict[str, Any] = {"help": row["help"], "metavar": row["metavar"]}
        if row["kind"] == "flag":
            settings["default"] = None
            settings |= {} if "/" in row["flags"] else {"flag_value": not row["flags"].startswith("--no-")}
        else:
            settings["type"] = click.Choice(row["choices"]) if row["choices"] else _TYPES[row["kind"]]
            settings["multiple"] = row["kind"] in ("list", "mapping") or row["flags"] in _JOINED
            settings["callback"] = _join_values if row["flags"] in _JOINED else None
        decorator = option(row["flags"], parameter_name(row["field"]), **settings)
        declared.append(under(row["heading"], decorator, advanced=not row["everyday"]))
    return together(*declared)


def list_given_options(options: Mapping[str, Any]) -> list[str]:
    """List the flags of the options for fields of the recipe that a command was given."""
    values = ((row["flags"].split("/")[0], options.get(parameter_name(row["field"]))) for row in RECIPE_OPTIONS)
    return [flag for flag, value in values if value is not None and value != ()]


def parameter_name(field: str) -> str:
    """Name the parameter of a command that holds the value for a field of the recipe: ``budgets__max_drop``."""
    return field.replace(".", "__")


as_json_option = option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")
model_argument, run_argument, file_argument = (
    *(click.argument("model"), click.argument("run", type=PATH), click.argument("file", type=PATH)),
)
store_option = option("--store", metavar="FOLDER|URL", help="Store (cache of results); default $ENGINESMITH_STORE.")
output_option = option("-o", "--output", type=PATH, required=True, help="File to write.")

what_to_load = recipe_options(
    "inputs", "prepend", "append", "shapes", "batch", "eval_data", "data_options", "seed", "allow_pickle"
)
how_to_export = recipe_options("export")
how_to_calibrate = recipe_options(
    "calibration", "samples", "quantization", "metric", "budgets.max_drop", "synthetic_calibration", "eval_samples"
)
how_to_prune = recipe_options("pruning", "recover", "recovery")
with_budgets = recipe_options("budgets", "min_sqnr_db")
how_to_build = recipe_options(*BUILD_FIELDS)
how_to_run_engines = recipe_options(*RUN_FIELDS)
where_to_run = recipe_options("device", "threads")
how_to_measure = recipe_options("measure")
without_limit = together(
    under(
        WORK,
        option("--jobs", type=click.IntRange(1), help="Parallel steps; default 2, on one core 1."),
        option("--no-cache", is_flag=True, help="Do every step again."),
        store_option,
        option("--quiet", is_flag=True, help="No progress on standard error."),
        as_json_option,
    ),
    under(
        WORK,
        option("--executor", type=click.Choice(["local", "ray"]), default="local", help="Where steps run."),
        option("--ray-address", metavar="auto|ray://HEAD:10001|HEAD:6379", help="The Ray cluster; default auto."),
        advanced=True,
    ),
)
_time = option("--time", "time_limit", callback=TIME, metavar="TIME", help="Stop after this long; `resume` continues.")
how_to_work = together(under(WORK, _time), without_limit)
