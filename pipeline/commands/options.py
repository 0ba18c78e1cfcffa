"""Options that commands share, under the headings that ``--help`` shows them with."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import click

Decorated = Callable[..., Any]

INPUTS = "Model and inputs"
VARIANTS = "Variants"
DATA = "Data and accuracy"
BUDGETS = "Budgets"
BUILDING = "Building engines"
MEASURING = "Measuring"
WORK = "Where and how it runs"
_HEADINGS = (INPUTS, VARIANTS, DATA, BUDGETS, BUILDING, MEASURING, WORK)
_OTHERS = "Options"
_HELP = "Help"


class Option(click.Option):
    """An option with the heading that it stands under; an advanced one is shown by ``--help-all`` only."""

    heading = _OTHERS
    advanced = False


class Command(click.Command):
    """A command that lists its options under headings, the everyday ones first; ``--help-all`` lists all."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        if any(isinstance(one, Option) and one.advanced for one in self.params):
            self.params.append(
                click.Option(
                    ["--help-all"], is_flag=True, is_eager=True, expose_value=False, callback=_show_all,
                    help="Show the advanced options, too, and exit.",
                )
            )  # fmt: skip

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
    """The name of an engine of the table that is made from modules, or from graphs."""

    name = "engine"

    def __init__(self, consumes: str) -> None:
        self._consumes = consumes

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Accept a name; engines are imported only now."""
        from enginesmith.pipeline.engines import ENGINES, engine_class

        able = [name for name in ENGINES if engine_class(name).consumes == self._consumes]
        if value not in able:
            self.fail(f"{value!r} is not one of {', '.join(map(repr, able))}.", param, ctx)
        return value


_ALL = "enginesmith.all_options"


def _show_all(ctx: click.Context, _: click.Parameter, given: bool) -> None:
    if given:
        ctx.meta[_ALL] = True
        click.echo(ctx.get_help(), color=ctx.color)
        ctx.exit()


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


as_json_option = option("--json", "as_json", is_flag=True, help="Print one JSON document instead of text.")


model_argument = click.argument("model")


store_option = option("--store", metavar="FOLDER|URL", help="The store, perhaps shared; else $ENGINESMITH_STORE.")


output_option = option("-o", "--output", type=click.Path(path_type=Path), required=True, help="File to write.")


what_to_load = together(
    under(
        INPUTS,
        option("--input", "inputs", multiple=True, metavar="NAME:DTYPE:DIMS", help="x:float32:batch,3,224,224"),
        option("--shape", "shapes", multiple=True, metavar="DIM=MIN:OPT:MAX", help="batch=1:8:64"),
        option("--batch", "batch", metavar="N,N", help="Batch sizes to measure, or sweep; default 1,8."),
    ),
    under(
        DATA,
        option("--eval", "eval_data", metavar="DATA", help="Labelled data: embedded set, .npz, images, texts …"),
        option("--labels", metavar="KEY", help="Its key of the labels; default labels, in texts label."),
    ),
    under(
        DATA,
        option("--resize", metavar="N|H,W", help="Images: the shorter side, or height and width."),
        option("--crop", metavar="N|H,W", help="Images: the centre that is cut out after that."),
        option("--mean", metavar="X,X,X", help="Images: subtracted, after scaling to 0…1."),
        option("--std", metavar="X,X,X", help="Images: divided by after that."),
        option("--tokenizer", metavar="PATH", help="Texts: tokenizer.json, or a Hugging Face folder."),
        option("--text-field", metavar="KEY", help="Texts: the key of the text in each line; default text."),
        option("--max-length", type=int, help="Texts: tokens in each row."),
        advanced=True,
    ),
    under(
        INPUTS,
        option("--seed", type=int, help="Seed of random weights and samples."),
        option("--allow-pickle", is_flag=True, default=None, help="Let the model's code read pickles."),
        advanced=True,
    ),
)


how_to_export = under(
    VARIANTS,
    option("--opset", type=int, help="ONNX opset version."),
    option("--exporter", type=click.Choice(["auto", "dynamo", "torchscript"]), help="Which exporter."),
    option("--attention", type=click.Choice(["fused", "decomposed"]), help="One operator, or several."),
    option("--external-data", metavar="SIZE", help="Weights above this size go to a file of their own."),
    advanced=True,
)


how_to_calibrate = together(
    under(
        DATA,
        option("--calibration", metavar="DATA", help="Data for ranges: embedded set, .npz, images, texts …"),
        option("--samples", type=int, help="How many samples of it are used; default 128."),
        option("--keep", multiple=True, metavar="NAME", help="Group, module or pattern that stays in float."),
        option("--metric", help="top1, top5, mse or module:function."),
    ),
    under(
        BUDGETS,
        option("--max-drop", type=float, help="Largest loss of the metric."),
    ),
    under(
        DATA,
        option("--synthetic-calibration", is_flag=True, default=None, help="Make data up, where there is none."),
        option("--ranges", type=click.Choice(["auto", "minmax", "percentile", "entropy", "mse"]), help="Method."),
        option("--placement", metavar="auto|ENGINE", help="Whose rules Q/DQ pairs are placed by."),
        option("--percentile", type=float, help="Share of the values that ranges by percentile hold; 99.99."),
        option("--weight-bits", type=int, help="Bits of int8 weights: 8, or 7 where 8 would saturate."),
        option("--smooth", metavar="ALPHA|auto", help="SmoothQuant: move outliers into weights; auto, or 0 to 1."),
        option("--smooth-insert", is_flag=True, default=None, help="Also where it costs a multiplication."),
        option("--awq", is_flag=True, default=None, help="Activation-aware scaling before int4."),
        option("--equalise", is_flag=True, default=None, help="Cross-layer equalisation, for depthwise nets."),
        option("--bias-correction", is_flag=True, default=None, help="Take the mean error out of the biases."),
        option("--convert-io", is_flag=True, default=None, help="Inputs and outputs in fp16 or bf16 too."),
        option("--eval-samples", type=int, help="How many samples of the labelled data are used."),
        option("--search-limit", metavar="TIME", help="Time for choosing what stays in float; default 10m."),
        option("--search-steps", type=int, help="Most assignments that are tried; default 12."),
        advanced=True,
    ),
)


how_to_prune = together(
    under(
        VARIANTS,
        option("--recover", metavar="METHOD", help="Train back: distil, supervised, or module:function."),
    ),
    under(
        VARIANTS,
        option("--importance", type=click.Choice(["l1", "l2", "taylor", "bn", "random"]), help="Default l2."),
        option("--prune-scope", type=click.Choice(["global", "uniform"]), help="Rank all layers together, or each."),
        option("--multiple-of", type=int, help="Channels are kept at multiples of this, at most 256; default 16."),
        option("--protect", multiple=True, metavar="NAME", help="Module or pattern whose channels stay."),
        option("--prune-steps", type=int, help="In so many steps, each of which ranks anew, and recovers."),
        option("--no-heads", "heads", flag_value=False, default=None, help="Leave attention heads alone."),
        option("--recover-time", metavar="TIME", help="Time for it; default 2m."),
        option("--recover-memory", metavar="SIZE", help="What it may take; batches are worked through in parts."),
        advanced=True,
    ),
)


with_budgets = together(
    under(
        BUDGETS,
        option("--max-memory", metavar="SIZE", help="Largest peak memory."),
        option("--max-latency", metavar="TIME", help="Largest median latency at the first batch size."),
        option("--max-p99", metavar="TIME", help="Largest 99th percentile of latency, there."),
        option("--min-throughput", type=float, metavar="N", help="Smallest throughput, samples a second."),
        option("--max-size", metavar="SIZE", help="Largest size of the engine's files."),
    ),
    under(
        BUDGETS,
        option("--max-build-time", metavar="TIME", help="Longest time that building the engine takes."),
        option("--min-sqnr", type=float, metavar="DB", help="Fidelity threshold."),
        advanced=True,
    ),
)


how_to_build = together(
    under(
        BUILDING,
        option("--target", "targets", multiple=True, help="sm86, portable …: TensorRT-RTX builds ahead of time."),
        option("--workspace", metavar="SIZE,SIZE", help="Limits, each a variant: 64MiB,256MiB,max; or sweep."),
    ),
    under(
        BUILDING,
        option("--tactic-dram", metavar="SIZE", help="Device memory that trying one kernel may take."),
        option("--tactic-shared-memory", metavar="SIZE", help="Shared memory that a kernel may use."),
        option("--optimization-level", type=int, help="0 builds fastest, 5 searches longest."),
        option("--aux-streams", type=int, help="Most streams besides the main one."),
        option("--tiling", type=click.Choice(["none", "fast", "moderate", "full"]), help="Search for tiled kernels."),
        option("--sparse-weights", is_flag=True, default=None, help="Kernels for 2:4 sparse weights."),
        option("--weight-streaming", is_flag=True, default=None, help="Weights can be streamed from the host."),
        option("--strip-plan", is_flag=True, default=None, help="Leave the weights out, to be refitted."),
        option("--refit", is_flag=True, default=None, help="Weights can be replaced in the built engine."),
        option("--version-compatible", is_flag=True, default=None, help="Later versions can load the engine."),
        option("--hardware-compatibility", help="none, ampere_plus or same_compute_capability."),
        option("--tf32/--no-tf32", default=None, help="Whether fp32 products may be rounded to TF32."),
        option("--plugins", multiple=True, metavar="FILE.so", help="Plugin library to load; it is code, and is run."),
        option("--timing-cache", metavar="FILE", help="Kernel timings; default one per device and version."),
        option("--locked", is_flag=True, default=None, help="Fail where a timing is missing."),
        option(
            "--optimization-profile", "profiles", multiple=True, metavar="DIM=MIN:OPT:MAX,…", help="One more of them."
        ),
        option("--host-code", is_flag=True, default=None, help="Allow host code in engines."),
        advanced=True,
    ),
)


how_to_run_tensorrt = under(
    BUILDING,
    option("--cuda-graphs", is_flag=True, default=None, help="Replay each set of shapes as a CUDA graph."),
    option("--share-activation-memory", is_flag=True, default=None, help="One buffer for all engines."),
    option("--weight-streaming-budget", metavar="SIZE", help="Streamed weights kept on the device."),
    advanced=True,
)


where_to_run = together(
    under(
        WORK,
        option("--device", metavar="cpu|cuda[:I]", help="Where engines run."),
    ),
    under(
        WORK,
        option("--threads", type=int, help="CPU threads of a session; default: one a core."),
        advanced=True,
    ),
)


how_to_measure = together(
    under(
        MEASURING,
        option("--measure-time", metavar="TIME", help="Longest time for one batch size; default 20s."),
        option("--profile", is_flag=True, default=None, help="Time every operator, by the module it comes from."),
    ),
    under(
        MEASURING,
        option("--precision-target", type=float, metavar="SHARE", help="Stop at medians known to ± this; 0.02."),
        option("--concurrency", metavar="N,N", help="Callers at the same time; throughput is measured with each."),
        option("--memory-limit", metavar="SIZE", help="What a session may take; what needs more is out of memory."),
        option("--no-memory", "memory", flag_value=False, default=None, help="Do not measure peak memory."),
        option("--limits/--no-limits", default=None, help="Hold times against what the machine can do at best."),
        advanced=True,
    ),
)


how_to_work = together(
    under(
        WORK,
        option("--jobs", type=click.IntRange(1), help="Steps at the same time; default 2, on one core 1."),
        option("--no-cache", is_flag=True, help="Do every step again."),
        option("--time-limit", metavar="TIME", help="Stop after this long; what is missing can be resumed."),
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
